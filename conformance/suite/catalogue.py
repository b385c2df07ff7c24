"""The catalogue of losses: one entry per loss, with its keywords, their defaults, and a baseline implementation.

A test checks that ``reference`` and ``fast`` have the same defaults. ``register`` adds losses defined elsewhere.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

REDUCTIONS = ("mean", "sum", "none")
PAIR_REDUCTIONS = ("mean_pairs", "sum_pairs", "none_pairs")
"""The reductions of a loss that has a value for every pair."""
CHOICES: Mapping[str, tuple[Any, ...]] = {
    "similarity": ("cosine", "dot"),
    "denominator": ("all", "one_positive", "only_negatives"),
    "inside_reduction": ("mean", "sum"),
    "no_positive": ("zero", "drop", "nan"),
    "no_negative": ("zero", "nan"),
    "reduction": REDUCTIONS,
    "direction": ("both", "a_to_b", "b_to_a"),
    "hard_negatives_scope": ("batch", "own", "own_only"),
    "directions": tuple(
        "+".join(("query_to_doc", *others))
        for count in range(4)
        for others in combinations(("query_to_query", "doc_to_query", "doc_to_doc"), count)
    ),
    "partition": ("joint", "per_direction"),
    "doc_to_doc_hard": ("others", "all", "none"),
    "hardness_mode": ("none", "in_batch_negatives", "hard_negatives", "all_negatives"),
    "detach_weights": (True, False),
    "weights_divisor": ("count", "weight"),
    "zero_row": ("error", "zero"),
}
"""The allowed values of each option."""

POSITIVES_BY: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "labels": ("labels", ("labels", "mask", "features", "views", "one_way", "similarities", "command")),
    "partners": (
        "partners",
        (
            *("labels", "partners", "mask", "features", "views", "one_way", "stacked", "interleaved", "similarities"),
            "command",
        ),
    ),
    "pairs": ("positive_pairs", ("pairs", "command")),
    "towers": ("", ("towers", "views", "similarities", "command")),
}
"""For each way of giving positives: the positional argument ("" for two towers), and the values of ``--call`` that
support it."""

COMMON: Mapping[str, object] = {
    "temperature": 0.07,
    "base_temperature": None,
    "similarity": "cosine",
    "reduction": "mean",
}
"""The keywords that every loss has, with their usual defaults."""

PUBLISHED_BASE = 0.07
"""The base temperature of the original SupCon code."""

NUMBERS = ("base_temperature", "bias", "tau_plus", "beta", "sigma", "hardness_strength")
"""The options that are numbers, apart from the temperature."""

REFERENCES: Mapping[str, object] = {"ref_embeddings": None, "ref_labels": None, "self_rows": None}
"""The keywords of a loss that contrasts a batch with other rows."""

IGNORED: Mapping[str, object] = {"ignored": None, "ignored_ids": None, "ref_ignored_ids": None}
"""The keywords by which a loss leaves out pairs."""

WEIGHTS: Mapping[str, object] = {"positive_weights": None, "negative_weights": None, "anchor_weights": None}
"""The keywords by which a loss weights pairs or anchors."""

TOWER_TARGETS: Mapping[str, object] = {"partners": None, "labels": None, "ref_labels": None, "positives": None}
"""The keywords that give the positives of two towers. By default, row k of both towers is a positive pair."""

OUTSIDE_FORMULA = (
    *(*COMMON, *REFERENCES, *IGNORED, *WEIGHTS, *TOWER_TARGETS),
    *("anchors", "no_positive", "negatives", "direction", "direction_weights", "bias", "detach_weights"),
    *("hard_negatives", "hard_negatives_scope", "directions", "partition", "doc_to_doc_hard", "zero_row"),
)
"""The keywords that are not passed to the formula."""

FAST_ONLY_KEYWORDS: Mapping[str, object] = {"validate": False, "backend": "auto", "group": None}
"""Keywords that only ``fast`` has. ``validate`` is off by default because it synchronises an accelerator."""


@dataclass(frozen=True)
class Weights:
    """Weights that a formula takes as the option ``weights``, computed from all similarities of the batch.

    Weights do not depend on the temperature. No gradient flows through weights, except with ``detach_weights=False``.

    Attributes:
        baseline: the straightforward torch function, ``baseline(similarity [R, C], member bool [R, C], positive bool
            [R, C], **options)``. It returns a weight per anchor, [R, 1], or per pair, [R, C]. The reference has its own
            function, ``weights(similarity, P, N, **options)``.
        options: the keywords that both functions take. They are not passed to the formula.
    """

    baseline: Callable[..., Tensor] = field(repr=False)
    options: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Loss:
    """One loss of the catalogue.

    Attributes:
        name: short name, as on the command line.
        module: stem of its file in ``reference/`` and in ``fast/``.
        source: where it is published.
        positives_by: how positives are given: "labels", "partners", "pairs" or "towers".
        keywords: every keyword with its default. That of ``direction`` is None here; see ``default``.
        baseline: the straightforward torch implementation, ``baseline(logits [R, C], member bool [R, C], positive bool
            [R, C], **options) -> [R]``. It gives 0 for a row without terms, and takes the options of the formula.
        lowest: the lowest possible similarity. The formula and the baseline take its logit as the option ``lowest``.
            None if they have no such option.
        weights: the weights that the formula and the baseline take as the option ``weights``, if any.
        unfit: a function that takes the options and matrices of a call, and returns the options that contradict the
            others. A default never contradicts. By default, every combination is valid.
        module_class: name of its ``torch.nn.Module`` in ``fast``, or "".
        own_choices: allowed values of options that differ from ``CHOICES`` or are not in it.
        variant: fields of ``diagnose.variants.Variant`` that describe the loss. If empty, ``diagnose`` evaluates the
            baseline instead.
        epsilon: number added to every exponential e^(logit - maximum of the row); 0 for most losses. The maximum
            includes the self pair, but no ignored pair.
        functions: the "reference", "fast", "formula" and "weights" functions of a loss that is defined elsewhere.
    """

    name: str
    module: str
    source: str
    positives_by: str
    keywords: Mapping[str, object]
    baseline: Callable[..., Tensor] = field(repr=False)
    lowest: float | None = None
    weights: Weights | None = None
    unfit: Callable[[Mapping[str, object]], Sequence[str]] = field(default=lambda given: (), repr=False)
    module_class: str = ""
    own_choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    variant: Mapping[str, str] = field(default_factory=dict)
    epsilon: float = 0.0
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.positives_by not in POSITIVES_BY:
            raise ValueError(f"positives_by: expected one of {', '.join(POSITIVES_BY)}, got {self.positives_by!r}")
        missing = [name for name in COMMON if name not in self.keywords]
        if missing:
            raise ValueError(f"keywords: {missing[0]} is missing; every loss has {', '.join(COMMON)}")

    @property
    def function(self) -> str:
        """Name of the function in ``reference`` and in ``fast``."""
        return f"{self.name}_loss"

    @property
    def reference(self) -> Callable[..., Any]:
        """The reference function, which returns the loss and its terms."""
        return self._find("reference", "pairproof.reference", self.function)

    @property
    def fast(self) -> Callable[..., Any]:
        """The torch function."""
        return self._find("fast", "pairproof.fast", self.function)

    @property
    def formula(self) -> Callable[..., Any]:
        """The reference's formula of one anchor: ``formula(s, i, A, P, N, **options)``."""
        return self._find("formula", f"pairproof.reference.{self.module}", f"{self.name}_anchor")

    @property
    def weights_function(self) -> Callable[..., Any]:
        """The reference's function of the weights: ``weights(similarity, P, N, **options)``."""
        return self._find("weights", f"pairproof.reference.{self.module}", f"{self.name}_weights")

    def _find(self, key: str, module: str, name: str) -> Callable[..., Any]:
        return self.functions.get(key) or getattr(sys.modules.get(module) or importlib.import_module(module), name)

    @property
    def golden_file(self) -> str:
        """Path of its golden cases in a folder of fixtures. A loss without cases may have no file."""
        return f"golden/{self.name}.json"

    @property
    def targets(self) -> str:
        """The positional argument that gives the positives; "" for two towers."""
        return POSITIVES_BY[self.positives_by][0]

    @property
    def calls(self) -> tuple[str, ...]:
        """The values of ``--call`` that support the positives of this loss."""
        return POSITIVES_BY[self.positives_by][1]

    @property
    def two_towers(self) -> bool:
        """Whether it contrasts two matrices. By default, row k of each is the positive of row k of the other."""
        return self.positives_by == "towers"

    @property
    def embeddings(self) -> tuple[str, ...]:
        """The positional float matrices."""
        return ("embeddings_a", "embeddings_b") if self.two_towers else ("embeddings",)

    @property
    def matrices(self) -> tuple[str, ...]:
        """The float matrices among the keywords."""
        return tuple(name for name in ("ref_embeddings", "negatives", "hard_negatives") if name in self.keywords)

    @property
    def choices(self) -> Mapping[str, tuple[Any, ...]]:
        """The allowed values of each option."""
        every = {**CHOICES, **self.own_choices}
        return {name: values for name, values in every.items() if name in self.keywords}

    def default(self, name: str, given: Container[str] = ()) -> object:
        """The default of a keyword, or None if the loss does not have it.

        The default of ``direction`` is "both", or "a_to_b" if ``negatives`` is among the ``given`` arguments.
        """
        if name == "direction" and name in self.keywords:
            return "a_to_b" if "negatives" in given else "both"
        return self.keywords.get(name)

    def fitting(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The options and matrices of a call, with every ``unfit`` option replaced by its default."""
        return {**given, **{name: self.default(name, given) for name in self.unfit(given)}}

    @property
    def scalars(self) -> tuple[str, ...]:
        """The options whose values are not arrays, apart from the temperature."""
        return (*self.choices, *(name for name in NUMBERS if name in self.keywords))

    @property
    def formula_options(self) -> tuple[str, ...]:
        """The keywords that are passed to the formula and the baseline."""
        outside = (*OUTSIDE_FORMULA, *(self.weights.options if self.weights else ()))
        return tuple(name for name in self.keywords if name not in outside)

    @property
    def form(self) -> str:
        """How the value of an anchor is computed from its terms.

        * "mean": the mean over the positives of -log ratio;
        * "inside": -log of the mean or of the sum of the ratios;
        * "binary": the binary cross-entropy, averaged over the negatives and over the positives. The self pair counts
          as a positive with loss 0;
        * "sigmoid": the sum of the binary cross-entropies of all pairs;
        * "mass": the cross-entropy of ``hard_negative``;
        * "weighted": the logsumexp of the negatives minus the weighted logit of the positive;
        * "": any other.
        """
        return self.variant.get("form", "")


_registered: dict[str, Loss] = {}
LOSSES: Mapping[str, Loss] = MappingProxyType(_registered)
"""Every loss by name, in the order of registration. Read-only."""


def register(loss: Loss) -> Loss:
    """Add a loss to the catalogue.

    Raises:
        ValueError: the catalogue already has a loss of this name.
    """
    if loss.name in LOSSES:
        raise ValueError(f"{loss.name}: the catalogue already has a loss of this name")
    _registered[loss.name] = loss
    return loss


@contextmanager
def registered(loss: Loss) -> Iterator[Loss]:
    """Add a loss to the catalogue inside a ``with`` statement. Raises the same errors as ``register``."""
    register(loss)
    try:
        yield loss
    finally:
        del _registered[loss.name]


def find_loss(name: str) -> Loss:
    """The loss of this name.

    Raises:
        ValueError: the catalogue has no such loss.
    """
    if name not in LOSSES:
        raise ValueError(f"unknown loss {name!r}; known: {', '.join(LOSSES)}")
    return LOSSES[name]


def choice_of(value: object, choices: Collection[Any]) -> Any:
    """The choice that equals a value, or None. The texts "True" and "False" also mean True and False."""
    named = (choice for choice in choices if type(choice) is type(value) and choice == value)
    return next(named, next((choice for choice in choices if choice in (True, False) and value == str(choice)), None))


def masked_logsumexp(logits: Tensor, mask: Tensor) -> Tensor:
    """The logsumexp of each row over a mask, [R, 1]; 0 for a row whose mask is empty."""
    empty = ~mask.any(dim=1, keepdim=True)
    return logits.masked_fill(~mask & ~empty, -math.inf).logsumexp(dim=1, keepdim=True).where(~empty, 0.0)


def log_denominators(logits: Tensor, member: Tensor, positive: Tensor, denominator: str) -> tuple[Tensor, Tensor]:
    """The logarithm of each denominator, [R, 1], or [R, C] if each positive has its own; and the rows with one, [R]."""
    negative = member & ~positive
    rows = positive.any(dim=1)
    if denominator == "all":
        return masked_logsumexp(logits, member), rows
    of_negatives = masked_logsumexp(logits, negative)
    if denominator == "only_negatives":
        return of_negatives, rows & negative.any(dim=1)
    return logits.logaddexp(of_negatives.where(negative.any(dim=1, keepdim=True), -math.inf)), rows


def supcon_baseline(
    logits: Tensor,
    member: Tensor,
    positive: Tensor,
    *,
    denominator: str = "all",
    no_negative: str = "zero",
    weights_divisor: str = "count",
    positive_weights: Tensor | None = None,
    negative_weights: Tensor | None = None,
) -> Tensor:
    """SupCon. Other masks and denominators give NT-Xent, pairwise NT-Xent and InfoNCE."""
    if negative_weights is not None:
        logits = logits + negative_weights.log().to(logits.dtype).where(member & ~positive, 0.0)
    below, rows = log_denominators(logits, member, positive, denominator)
    weights = (positive if positive_weights is None else positive_weights.where(positive, 0.0)).to(logits.dtype)
    total, number = weights.sum(dim=1), positive.sum(dim=1).to(logits.dtype)
    number = (total if weights_divisor == "weight" else number).clamp(min=0)
    number = number.where(number > 0, 1.0)
    if denominator == "one_positive":
        return (((below - logits) * weights).sum(dim=1) / number).where(rows, 0.0)
    return (below[:, 0] * (total / number) - (logits * weights).sum(dim=1) / number).where(rows, 0.0)


def supcon_in_baseline(
    logits: Tensor,
    member: Tensor,
    positive: Tensor,
    *,
    denominator: str = "all",
    inside_reduction: str = "mean",
    no_negative: str = "zero",
) -> Tensor:
    """SupCon with the mean or the sum over the positives inside the logarithm."""
    below, rows = log_denominators(logits, member, positive, denominator)
    if denominator == "one_positive":
        value = -masked_logsumexp(logits - below, positive)[:, 0]
    else:
        value = below[:, 0] - masked_logsumexp(logits, positive)[:, 0]
    if inside_reduction == "mean":
        value = positive.sum(dim=1).to(logits.dtype).clamp(min=1).log() + value
    return value.where(rows, 0.0)


def info_nce_baseline(logits: Tensor, member: Tensor, positive: Tensor, *, inside_reduction: str = "none") -> Tensor:
    """SupCon with the mean over the positives outside the logarithm, or the mean or sum inside."""
    if inside_reduction == "none":
        return supcon_baseline(logits, member, positive)
    return supcon_in_baseline(logits, member, positive, inside_reduction=inside_reduction)


EQUAL = 2.0**-26
"""Relative difference below which numbers of float64 count as equal.

Rounding errors make equal ones differ by less, so that no machine decides which are equal."""


def _largest(logits: Tensor) -> Tensor:
    """The largest logit of each row: the mean of all that are equal to it, so that each has the same derivative."""
    top = logits.detach().amax(dim=1, keepdim=True)
    equal = logits.detach() >= top - EQUAL * top.abs()
    return logits.where(equal, 0.0).sum(dim=1, keepdim=True) / equal.sum(dim=1, keepdim=True)


def supcon_epsilon_baseline(logits: Tensor, member: Tensor, positive: Tensor, *, epsilon: float = 1e-8) -> Tensor:
    """The batch tutorial's loss: epsilon is added to every e^(logit - maximum) and to the number of positives."""
    import torch

    compared = member | torch.eye(len(member), dtype=torch.bool)
    logits = logits.masked_fill(~compared, -math.inf)
    e = (logits - _largest(logits)).exp() + epsilon
    ratio = e.where(member, 0.0).sum(dim=1, keepdim=True).log() - e.log()
    return ratio.where(positive, 0.0).sum(dim=1) / (positive.sum(dim=1).to(e.dtype) + epsilon)


def nt_bxent_baseline(logits: Tensor, member: Tensor, positive: Tensor, *, no_negative: str = "zero") -> Tensor:
    """Binary cross-entropy, averaged over the negatives and over the positives including the self pair."""
    from torch.nn.functional import logsigmoid

    # torch's softplus is the identity above 20, with an error of 2e-9. logsigmoid has no such error. As in torch's
    # binary_cross_entropy_with_logits, a negative's value is its logit minus logsigmoid.
    negative, attract = member & ~positive, -logsigmoid(logits)
    of_positives = attract.where(positive, 0.0).sum(dim=1) / (positive.sum(dim=1).to(logits.dtype) + 1)
    return of_positives + (logits + attract).where(negative, 0.0).sum(dim=1) / negative.sum(dim=1).clamp(min=1)


def sigmoid_baseline(logits: Tensor, member: Tensor, positive: Tensor) -> Tensor:
    """The sum of the binary cross-entropies of all pairs."""
    from torch.nn.functional import logsigmoid

    sign = positive.to(logits.dtype) * 2 - 1
    return -logsigmoid(sign * logits).where(member, 0.0).sum(dim=1)


def hard_negative_baseline(
    logits: Tensor,
    member: Tensor,
    positive: Tensor,
    *,
    lowest: float | Tensor,
    tau_plus: float = 0.1,
    beta: float = 1.0,
) -> Tensor:
    """The cross-entropy of the positive against the *mass*, a debiased and hardness-weighted sum over the negatives."""
    from torch.nn.functional import logsigmoid

    negative = member & ~positive
    rows = negative.any(dim=1)
    own = logits.where(positive, 0.0).sum(dim=1)
    of_weighted, of_weights = masked_logsumexp((1 + beta) * logits, negative), masked_logsumexp(beta * logits, negative)
    log_mass = (of_weighted - of_weights)[:, 0] - own
    if tau_plus:
        # Where the mass is not positive, the floor applies. Replacing the values keeps the gradient finite.
        above = log_mass > math.log(tau_plus)
        share = tau_plus * (-log_mass.where(above, 0.0)).exp()
        log_mass = (log_mass + (1 - share).log() - math.log(1 - tau_plus)).where(above, -math.inf)
    log_ratio = log_mass.maximum(lowest - own) + negative.sum(dim=1).clamp(min=1).to(own.dtype).log()
    return -logsigmoid(-log_ratio).where(rows, 0.0)


def ranking_baseline(logits: Tensor, member: Tensor, positive: Tensor, *, weights: Tensor) -> Tensor:
    """The cross-entropy of the positive. The weights are added to the logits."""
    return supcon_baseline(logits + weights, member, positive)


def ranking_weights_baseline(
    similarity: Tensor,
    member: Tensor,
    positive: Tensor,
    *,
    hardness_mode: str,
    hardness_strength: float,
    hard_negatives_scope: str,
    directions: str,
    partition: str,
    doc_to_doc_hard: str | None,
) -> Tensor:
    """``hardness_strength`` times the similarity for the negatives that ``hardness_mode`` selects, 0 elsewhere."""
    import torch

    from pairproof.reference.ranking import hard_of_documents

    further, columns = directions.count("+"), similarity.shape[1]
    apart = partition == "per_direction" and "doc_to_query" in directions
    n = len(similarity) // 2 if apart else len(similarity)
    repeated = "doc_to_doc" in directions and hard_of_documents(doc_to_doc_hard, hard_negatives_scope) != "none"
    number = (columns - n * (1 if apart else 1 + further)) // (2 if repeated else 1)
    own = torch.eye(n, dtype=torch.bool)
    of_hard = own.repeat_interleave(number // n, dim=1)
    in_batch, hard = torch.cat([~own, ~of_hard], dim=1), torch.cat([own & False, of_hard], dim=1)
    chosen = {"in_batch_negatives": in_batch, "hard_negatives": hard, "all_negatives": in_batch | hard}
    harder = torch.zeros_like(member)
    if hardness_mode in chosen:
        harder[:n, : n + number] = chosen[hardness_mode]
    return (hardness_strength * similarity).where(harder, 0.0)


def unfit_for_ranking(given: Mapping[str, object]) -> list[str]:
    """The options that contradict the others.

    * "partition", if a separate denominator would contain no positive;
    * "hard_negatives_scope", if it is "own_only" and there are no hard negatives.
    """
    alike = any(name in str(given.get("directions")) for name in ("query_to_query", "doc_to_doc"))
    found = ["partition"] if alike and given.get("partition") == "per_direction" else []
    alone = given.get("hard_negatives_scope") == "own_only" and given.get("hard_negatives") is None
    return [*found, "hard_negatives_scope"] if alone else found


def dclw_weights_baseline(similarity: Tensor, member: Tensor, positive: Tensor, *, sigma: float = 0.5) -> Tensor:
    """2 - R softmax(s / sigma), [R, 1], where s are the similarities of the R rows and their positives."""
    closeness = similarity.where(positive, 0.0).sum(dim=1, keepdim=True) / sigma
    return 2 - len(closeness) * closeness.softmax(dim=0)


def dclw_baseline(logits: Tensor, member: Tensor, positive: Tensor, *, weights: Tensor) -> Tensor:
    """The logsumexp of the negatives minus the weighted logit of the positive."""
    negative = member & ~positive
    own = logits.where(positive, 0.0).sum(dim=1)
    return (masked_logsumexp(logits, negative)[:, 0] - weights[:, 0] * own).where(negative.any(dim=1), 0.0)


_BY_LABELS: Mapping[str, object] = {**COMMON, "anchors": None, "positives": None}
_REFERRING = {**_BY_LABELS, **REFERENCES, **IGNORED}
_SUPCON = {**_REFERRING, "denominator": "all", "no_positive": "zero", "no_negative": "zero"}
_WEIGHTED = {**WEIGHTS, "weights_divisor": "count"}
_BY_PARTNERS = {**COMMON, "anchors": None, "ref_embeddings": None, "self_rows": None, **IGNORED}
_BY_TOWERS = {**TOWER_TARGETS, **IGNORED, **COMMON, "anchor_weights": None}

for _loss in (
    Loss(
        name="supcon",
        module="supcon",
        module_class="SupConLoss",
        source="Khosla et al. 2020, arXiv 2004.11362, equation 2 (L_out)",
        positives_by="labels",
        keywords={**_SUPCON, **_WEIGHTED, "zero_row": "error"},
        baseline=supcon_baseline,
        variant={"form": "mean"},
    ),
    Loss(
        name="supcon_in",
        module="supcon",
        module_class="SupConInLoss",
        source="Khosla et al. 2020, arXiv 2004.11362, equation 3 (L_in)",
        positives_by="labels",
        keywords={**_SUPCON, "inside_reduction": "mean"},
        baseline=supcon_in_baseline,
        variant={"form": "inside"},
    ),
    Loss(
        name="nt_xent",
        module="nt_xent",
        module_class="NTXentLoss",
        source="Chen et al. 2020 (SimCLR), arXiv 2002.05709, equation 1",
        positives_by="partners",
        keywords={**_BY_PARTNERS, "anchor_weights": None, "zero_row": "error"},
        baseline=supcon_baseline,
        variant={"form": "mean", "denominator": "all"},
    ),
    Loss(
        name="nt_xent_pairwise",
        module="nt_xent",
        module_class="NTXentPairwiseLoss",
        source="pytorch-metric-learning's NTXentLoss; its issue 6",
        positives_by="labels",
        keywords={**_REFERRING, **_WEIGHTED, "no_positive": "zero"},
        own_choices={"reduction": (*REDUCTIONS, *PAIR_REDUCTIONS)},
        baseline=partial(supcon_baseline, denominator="one_positive"),
        variant={"form": "mean", "denominator": "one_positive"},
    ),
    Loss(
        name="nt_bxent",
        module="nt_bxent",
        module_class="NTBXentLoss",
        source="the multi-label notebook: NT-Xent's binary cross-entropy sibling",
        positives_by="pairs",
        keywords={**COMMON, "anchors": None, "ignored": None, "ignored_ids": None, "no_negative": "zero"},
        baseline=nt_bxent_baseline,
        variant={"form": "binary"},
    ),
    Loss(
        name="supcon_epsilon",
        module="supcon",
        module_class="SupConEpsilonLoss",
        source="the batch tutorial of 31 January 2023",
        positives_by="labels",
        keywords={**_BY_LABELS, "similarity": "dot", "ignored": None, "ignored_ids": None, "no_positive": "zero"},
        baseline=supcon_epsilon_baseline,
        variant={"form": "mean", "guard": "each 1e-08"},
        epsilon=1e-8,
    ),
    Loss(
        name="info_nce",
        module="info_nce",
        module_class="InfoNCELoss",
        source="van den Oord et al. 2018, arXiv 1807.03748; Radford et al. 2021 (CLIP), arXiv 2103.00020;"
        " He et al. 2020 (MoCo), arXiv 1911.05722, equation 1",
        positives_by="towers",
        keywords={
            **_BY_TOWERS,
            "negatives": None,
            "direction": None,
            "direction_weights": None,
            "inside_reduction": "none",
            "no_positive": "drop",
        },
        own_choices={"inside_reduction": ("none", "mean", "sum")},
        baseline=info_nce_baseline,
        variant={"form": "mean", "denominator": "all"},
    ),
    Loss(
        name="sigmoid",
        module="sigmoid",
        module_class="SigmoidLoss",
        source="Zhai et al. 2023 (SigLIP), arXiv 2303.15343, Algorithm 1",
        positives_by="towers",
        keywords={**_BY_TOWERS, "temperature": 0.1, "bias": -10.0},
        own_choices={"reduction": (*REDUCTIONS, *PAIR_REDUCTIONS)},
        baseline=sigmoid_baseline,
        variant={"form": "sigmoid"},
    ),
    Loss(
        name="hard_negative",
        module="hard_negative",
        module_class="HardNegativeLoss",
        source="Robinson et al. 2021 (HCL), arXiv 2010.04592, and Chuang et al. 2020 (debiased), arXiv 2007.00224, as"
        " in image/main.py of joshr17/HCL",
        positives_by="partners",
        keywords={**_BY_PARTNERS, "temperature": 0.5, "tau_plus": 0.1, "beta": 1.0},
        own_choices={"similarity": ("cosine",)},
        baseline=hard_negative_baseline,
        lowest=-1.0,
        variant={"form": "mass"},
    ),
    Loss(
        name="multiple_negatives_ranking",
        module="ranking",
        module_class="MultipleNegativesRankingLoss",
        source="Henderson et al. 2017, arXiv 1705.00652, section 4.4; Li et al. 2023 (GTE), arXiv 2308.03281, section"
        " 3.3, as in sentence-transformers",
        positives_by="towers",
        keywords={
            **COMMON,
            "temperature": 0.05,
            "hard_negatives": None,
            "hard_negatives_scope": "batch",
            "directions": "query_to_doc",
            "partition": "joint",
            "doc_to_doc_hard": None,
            "ignored": None,
            "hardness_mode": "none",
            "hardness_strength": 0.0,
        },
        baseline=ranking_baseline,
        weights=Weights(
            ranking_weights_baseline,
            (
                *("hardness_mode", "hardness_strength", "hard_negatives_scope", "directions", "partition"),
                "doc_to_doc_hard",
            ),
        ),
        unfit=unfit_for_ranking,
        variant={"form": "mean", "denominator": "all"},
    ),
    Loss(
        name="dclw",
        module="dclw",
        module_class="DCLWLoss",
        source="Yeh et al. 2022 (DCL), arXiv 2110.06848, the loss L_DCW with the negative von Mises-Fisher weights",
        positives_by="partners",
        keywords={**_BY_PARTNERS, "temperature": 0.1, "sigma": 0.5, "detach_weights": True},
        own_choices={"similarity": ("cosine",)},
        baseline=dclw_baseline,
        weights=Weights(dclw_weights_baseline, ("sigma",)),
        variant={"form": "weighted"},
    ),
):
    register(_loss)
