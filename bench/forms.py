"""The forms that are measured: each loss with each way of giving its positives, and random variants."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor

from pairproof import fast

COLUMNS = 128
TEMPERATURE = 0.1
LOW = 0.01
"""A low temperature, to which CLIP's falls in training."""
CLASSES = 10
QUEUE = 4096
"""Number of rows of the queue of negatives."""
BANK = 65536
"""Number of rows of the labelled bank."""

KINDS = ("random", "trained")
"""Kinds of rows: independent normal rows, or rows around the centre of their class."""

NOISE = 1 / 3
"""Standard deviation of a row around its centre. Two rows of a class have a cosine of about 1 / (1 + 1/9) = 0.9."""

DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
"""The dtype of the embeddings by its name in the report. With "tf32", products may round to TF32."""

Step = Callable[..., Tensor]
"""From the inputs of a form to the loss, a scalar."""

_LABELS = ("two views", "10 classes", "8 per class")
_MASKS = ("mask classes", "mask symmetric", "mask asymmetric")
_BY_LABELS = (*_LABELS, *_MASKS, "references")
WAYS = {
    "supcon": (*_BY_LABELS, f"bank of {BANK}"),
    "supcon_in": _BY_LABELS,
    "supcon_epsilon": (*_LABELS, *_MASKS),
    "nt_xent": ("partners", "references"),
    "nt_xent_pairwise": (*_BY_LABELS, "mean over pairs"),
    "nt_bxent": ("pairs", "pairs, 8/class"),
    "info_nce": ("both directions", "one direction", "queue of 4096"),
    "sigmoid": ("matching rows", "10 classes"),
    "hard_negative": ("partners", "references"),
    "multiple_negatives_ranking": ("hard negatives", "all directions"),
    "dclw": ("partners", "references"),
}
"""Ways of giving the positives, by loss. References are N rows that get a gradient; a queue and a bank get none."""
BANK_UP_TO = 256
"""Largest number of rows with the bank."""

TOWERS = ("info_nce", "sigmoid", "multiple_negatives_ranking")


@dataclass(frozen=True)
class Recipe:
    """How to make the batches of a form.

    Attributes:
        loss: a key of `WAYS`.
        way: one of the ways of the loss in `WAYS`.
        options: keyword arguments of the loss.
        columns: number of columns of the embeddings; None: as requested.
        dtype: a key of `DTYPES`; None: as requested.
        temperature: the temperature of the timings.
    """

    loss: str
    way: str
    options: Mapping[str, Any] = field(default_factory=dict)
    columns: int | None = None
    dtype: str | None = None
    temperature: float = TEMPERATURE

    @property
    def group(self) -> str:
        """The key of `goals.PLAIN_RATIOS`: "labels", "masks", "both directions", "one direction" or "bank of 65536"."""
        if self.way.startswith("mask"):
            return "masks"
        one_way = ("references", "one direction", f"queue of {QUEUE}", "hard negatives", "all directions")
        if self.way in one_way or self.loss == "sigmoid":
            return "one direction"
        return self.way if self.way == "both directions" or self.up_to < math.inf else "labels"

    @property
    def up_to(self) -> float:
        """The largest number of rows that is measured."""
        return BANK_UP_TO if self.way == f"bank of {BANK}" else math.inf


def _options(loss: str, way: str) -> dict[str, Any]:
    found = {"similarity": "cosine"} if loss == "supcon_epsilon" else {}
    if way == "mean over pairs":
        found["reduction"] = "mean_pairs"
    elif way == "all directions":
        found["directions"] = "query_to_doc+query_to_query+doc_to_query+doc_to_doc"
    elif loss == "info_nce":
        found["direction"] = "both" if way == "both directions" else "a_to_b"
    return found


FORMS = {f"{loss}, {way}": Recipe(loss, way, _options(loss, way)) for loss, ways in WAYS.items() for way in ways}


def _draw(losses: Collection[str], number: int, seed: int) -> dict[str, Recipe]:
    """Draw forms of some losses, each with random options, columns and dtype.

    A form's own options override drawn ones, but its name lists all that were drawn.
    """
    random, found = Random(seed), {}
    usual = [
        form
        for form in FORMS.values()
        if form.loss in losses and form.up_to == math.inf and form.temperature == TEMPERATURE
    ]
    for form in random.sample(usual, number):
        options = {"similarity": random.choice(("cosine", "dot")), "reduction": random.choice(("mean", "sum", "none"))}
        if form.loss in ("supcon", "supcon_in"):
            options["denominator"] = random.choice(("all", "one_positive", "only_negatives"))
        if form.loss in ("hard_negative", "dclw"):
            options["similarity"] = "cosine"
        columns = random.choice((32, 48, 64, 100, 192, 256, 384, 512, 768))
        dtype = random.choice(("float32", "float32", "float64"))
        name = ", ".join((form.loss, form.way, f"D={columns}", dtype, *options.values()))
        found[name] = replace(form, options={**options, **form.options}, columns=columns, dtype=dtype)
    return found


LATER = {"sigmoid": 1, "hard_negative": 2, "multiple_negatives_ranking": 3, "dclw": 4}
"""Losses that were added later. Each has its own seed, so that the earlier draws stay the same."""

CORNERS = _draw(WAYS.keys() - LATER.keys(), 30, seed=0)
for _loss, _seed in LATER.items():
    CORNERS |= _draw((_loss,), 2, _seed)
"""Variants of forms with random options, number of columns and dtype, by name."""

_AT_LOW = ("supcon, 10 classes", "supcon, mask classes", "nt_xent, partners", "info_nce, both directions")
FORMS |= {f"{name}, T={LOW}": replace(FORMS[name], temperature=LOW) for name in _AT_LOW}

RECIPES = FORMS | CORNERS

BY_PAIRS = (
    "nt_xent, partners",
    "supcon, two views",
    "nt_xent_pairwise, two views",
    "nt_xent_pairwise, mean over pairs",
    "info_nce, one direction",
)
"""Forms whose loss is a mean over positive pairs. `bench.truth` is accurate for them at low temperatures."""


def _with_references(function: Callable[..., Tensor], z: Tensor, references: Tensor) -> Tensor:
    return function(z, ref_embeddings=references)


@dataclass(frozen=True)
class Form:
    """One batch of one form.

    Attributes:
        name: a key of `RECIPES`.
        inputs: floating ``[N, D]``: the embeddings, and the other tower or the references. They get a gradient. Under
            cosine similarity, they are not normalised.
        given: keyword arguments of the loss.
        labels: integers, the classes of the rows of all inputs.
    """

    name: str
    inputs: tuple[Tensor, ...]
    given: Mapping[str, Any]
    labels: Tensor

    @property
    def loss(self) -> str:
        """Name of the loss."""
        return RECIPES[self.name].loss

    @property
    def n(self) -> int:
        """Number of rows of the first input."""
        return len(self.inputs[0])

    def to(self, dtype: torch.dtype) -> Form:
        """Return the batch with its floating tensors in another dtype."""

        def cast(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        given = {name: cast(value) for name, value in self.given.items()}
        return replace(self, inputs=tuple(map(cast, self.inputs)), given=given)

    def step(self, function: Callable[..., Tensor], temperature: float, **more: Any) -> Step:
        """Return a function from the inputs to the loss, a scalar. For the reduction "none", it returns the mean.

        Args:
            function: a loss with the keywords of `pairproof.fast`.
            temperature: positive number.
            more: keywords that override those of the batch.
        """
        call = partial(function, temperature=temperature, **{**self.given, **more})
        if RECIPES[self.name].way == "references":
            call = partial(_with_references, call)
        return (lambda *rows: call(*rows).mean()) if self.given.get("reduction") == "none" else call

    def leaves(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return copies of the inputs that require a gradient."""
        return tuple(rows.detach().to(dtype, copy=True).requires_grad_() for rows in self.inputs)


def _positives(recipe: Recipe, labels: Tensor, drawn: Callable[[], Tensor]) -> dict[str, Any]:
    """Return the arguments that give the positives; ``drawn`` returns a random mask."""
    n, way = len(labels), recipe.way
    rows, partners = torch.arange(n), fast.stacked_partners(n)
    if recipe.loss in ("info_nce", "multiple_negatives_ranking") or way == "matching rows":
        return {}
    if recipe.loss in ("nt_xent", "hard_negative", "dclw"):
        return {"partners": rows if way == "references" else partners}
    if recipe.loss == "nt_bxent" and way == "pairs":
        return {"positive_pairs": torch.stack((rows, partners), dim=1)}
    if recipe.loss == "nt_bxent":
        others = [rows // 8 * 8 + (rows + step) % 8 for step in range(1, 8)]
        return {"positive_pairs": torch.stack((rows.repeat(7), torch.cat(others)), dim=1)}
    if way == "mask classes":
        return {"positives": labels[:, None] == labels}
    if way in _MASKS:
        mask = drawn()
        return {"positives": mask | mask.T if way == "mask symmetric" else mask}
    return {"labels": labels} | ({"ref_labels": labels.clone()} if way == "references" else {})


def make(name: str, n: int, d: int = COLUMNS, kind: str = "random", *, seed: int = 0, device: str = "cpu") -> Form:
    """Return a batch in float32.

    Args:
        name: a key of `RECIPES`.
        n: number of rows, a multiple of 8. From 24 on, every anchor has a positive.
        d: number of columns, unless the recipe has another.
        kind: one of `KINDS`.
        seed: seed of the rows, which are the same on every device.
        device: device of the batch.
    """
    recipe, generator = RECIPES[name], torch.Generator().manual_seed(seed)
    d, rows, two = recipe.columns or d, torch.arange(n), recipe.loss in TOWERS or recipe.way == "references"
    by_row = ("info_nce", "nt_xent", "hard_negative", "dclw", "multiple_negatives_ranking")
    if two and (recipe.loss in by_row or recipe.way == "matching rows"):
        labels = rows
    elif "8" in recipe.way:
        labels = rows // 8
    else:
        classes = ("10 classes", "mask classes", "references", "mean over pairs", f"bank of {BANK}")
        labels = rows % CLASSES if recipe.way in classes else rows % (n // 2)

    def drawn() -> Tensor:
        mask = torch.rand(n, n, generator=generator) < 1 / CLASSES
        mask[rows, (rows + 1) % n] = True  # every anchor has a positive
        return mask

    inputs = [torch.randn(n, d, generator=generator) for _ in range(1 + two)]
    if kind == "trained":
        centres = torch.randn(int(labels.max()) + 1, d, generator=generator)
        inputs = [centres[labels] + NOISE * rows for rows in inputs]
    given = {**recipe.options, **_positives(recipe, labels, drawn)}
    if "queue" in recipe.way:
        given["negatives"] = torch.randn(QUEUE, d, generator=generator)
    if recipe.up_to < math.inf:
        given |= {
            "ref_embeddings": torch.randn(BANK, d, generator=generator),
            "ref_labels": torch.arange(BANK) % CLASSES,
        }
    if recipe.way == "hard negatives":
        given["hard_negatives"] = torch.randn(n, 1, d, generator=generator)
    if recipe.options.get("similarity") == "dot":  # dot products are usually taken of normalised rows
        normalised = torch.nn.functional.normalize
        inputs = [normalised(rows) for rows in inputs]
        given |= {"negatives": normalised(given["negatives"])} if "negatives" in given else {}
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}
    return Form(name, tuple(rows.to(device) for rows in inputs), moved, labels.repeat(1 + two).to(device))
