"""Random batches, drawn anew for every check, so that a target cannot pass by recognising the golden cases.

A batch is determined by its seed, its number and the claim about the target. It combines values of options with
structures, such as references, masks and subsets of anchors. Several candidates are drawn for each batch. The one with
the most new combinations of three choices is taken, so that every three choices soon occur together. A combination
counts only if the batch shows its effect: a policy for anchors without positives needs such an anchor.

Entries have at most 8 significant bits, so they are exactly representable in every dtype. Only the scaling for dot
products can move them out of the range of a dtype.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np

from ..implementations.signatures import OF_VIEWS, ONE_EACH, Claim
from ..suite.cases import Case, row_norms
from ..suite.catalogue import LOSSES, WEIGHTS, Loss
from ..suite.flags import saturated, true_flags
from ..suite.garbage import forked
from ..suite.golden import DTYPES, GoldenCase
from ..suite.records import Expected, Matrix
from ..truth.matrices import has_formula
from ..truth.tolerances import rounding_of
from .options import DRAWN_IDS, Request, Selection
from .proofs import prove, scaled_to_logits

CANDIDATES = 40
"""Minimum number of candidates for each batch."""

ROWS = (*((2, 5), (3, 7), (6, 9), (7, 10)) * 3, (11, 15), (16, 16), (17, 17), (18, 24))
"""Ranges of the number of rows; each entry of the tuple is drawn equally often."""

COLUMNS = ((2, 3), (4, 8), (9, 16), (17, 40), None, None)
"""Ranges of the embedding dimension; None stands for the number of rows. Each entry is drawn equally often."""

LARGE = 80
"""One in this many batches has a large class, if the loss takes labels and a closed form can prove the batch."""

LARGE_BATCH: Mapping[str, Any] = {
    "rows": (259, 259),
    "columns": (3, 4),
    "trained": False,
    "mixed norms": False,
    "layout": "shuffled",
    "common": "large",
    "labels": "small",
}
"""The choices of a batch with a class of 257 rows. Each of them has 256 positives, and 256 overflows to 0 in uint8."""

TRAINING_ROWS = ((33, 64), (65, 128), (129, 256), (129, 256), (257, 400), (401, 512))
"""Ranges of the number of rows of the batches of training size. Every check has one batch for each range."""

FEW_CLASSES = 4
"""The number of a batch with few, large classes. It is also plain, and has rows without positives."""

MOST_CLASSES, MOST_ALONE = 6, 8
"""In this batch: the largest number of classes with positives, and of rows without positives."""

THOROUGH_ROWS = ((513, 1024), (1025, 2048))
"""Ranges of the further batches of training size with ``--thorough``."""

TRAINING_COLUMNS = ((16, 266), (267, 517), (518, 768))
"""Ranges of the embedding dimension of the batches of training size. Each range is drawn twice."""

THOROUGH_COLUMNS = (769, 1024)
"""Range of the embedding dimension of the further batches."""

MANY_ENTRIES, MOST_ENTRIES = 150_000, 200_000
"""Rows times dimension: one of the batches of ``TRAINING_ROWS`` may exceed the first number, and none the second."""

MOST_SIMILARITIES, THOROUGH_SIMILARITIES = 600_000, 2048**2
"""Largest number of similarities of a batch of training size, and of a further one."""

FITTED = 2.0**-8
"""Size of a row's gradient, relative to one anchor's share of 1 / temperature, below which a batch is fitted."""

PLANS = 8
"""Number of plans that are tried for a batch of training size."""

PLAIN = 4
"""One in this many batches is plain: no references, weights or ignored pairs, and every row is an anchor with a
positive and a negative. Directed pairs can still leave a row without a positive."""

LABELS = ("small",) * 4 + ("colliding",) * 3 + ("extreme",)
"""Kinds of labels (see ``label_names``); each entry is drawn equally often."""

APART = (1, 256, 997, 1000, 2**16, 2**24, 2**32)
"""Differences of "colliding" labels, which are equal modulo a number or rounded to a narrower dtype."""

IGNORED_LABEL = -100
"""The label that ``torch.nn.functional.cross_entropy`` ignores."""

EXTREME = (-(2**63), 2**63 - 1, 0, -(2**62), -1, 2**62)
"""Extreme labels. K classes use the first K. Differences of the first three overflow int64 in both directions."""

CLASSES = ("common", "common", "single", "one", "distinct")
"""Class structures:

- "common": every row has a positive and a negative.
- "single": one class or more have one row, the others have more.
- "one": all rows have the same class.
- "distinct": every class has one row.
- "pairs": every class has two rows. Drawn only for a loss that gets views without labels.
"""

COMMON_CLASSES = ("unbalanced", "balanced", "balanced", "views", "large")
"""Kinds of the structure "common":

- "unbalanced": classes of usually unequal sizes.
- "balanced": classes of one size, drawn from ``EQUAL``.
- "views": classes of even sizes.
- "large": two classes, one of which has two rows.
"""

EQUAL = (2, 6)
"""Range of the size of equal classes."""

TEMPERATURES = {"lowest": (0.0125, 0.0225), "low": (0.0225, 0.1), "usual": (0.1, 1.0), "high": (1.0, 8.0)}
"""Ranges of the temperature, if the target takes one. Learned scales of CLIP end at the lowest."""

DRAWN = {
    "bias": (-12.0, 2.0),
    "tau_plus": (0.01, 0.3),
    "beta": (0.1, 3.0),
    "sigma": (0.1, 2.0),
    "hardness_strength": (0.5, 9.0),
}
"""Ranges of the other numeric options. 0 is also drawn, except for those in ``NEVER_ZERO``."""

NEVER_ZERO = ("sigma",)

SPREAD = 0.4
"""Distance of trained-like rows from the centre of their class, relative to the norm of the centre."""

SIGNIFICANT = 255
"""The largest integer of 8 bits."""

MASKED = 0.4
"""Probability that a random mask marks a positive."""

IGNORED_SHARE = 0.25
"""Probability that a random mask ignores a pair."""

WEIGHTED_SHARE = 0.25
"""Probability that a batch has weights, for each kind of weights that the target takes."""

WEIGHTS_DRAWN = (0.125, 0.25, 0.5, 0.7529296875, 1.0, 2.0, 3.0)
"""The weights of pairs and anchors, drawn equally often. One of them, 771/1024, is not exact in bfloat16."""

OF_TARGETS = ("inside_reduction", "no_positive")
"""Options of two-tower losses that matter only if positives are given. They are drawn with the positives."""

STRUCTURES = ("classes", "anchors", "references")
"""A plain batch has the first value of ``_factors`` for these."""

FEW, MANY = (1, 8), (17, 40)
"""Ranges of the number of rows of a short and of a long queue. Random references use the same ranges.

In a batch of training size, a long queue is up to twice as long as the batch, and many references are half to all of
its number of rows."""

NOT_SHOWN = {"self-similarity-dominates", "low-temperature", "high-temperature"}
"""Flags that random batches do not get. They mark extreme values, but ordinary batches can meet their conditions."""

ONLY_WITH = {
    "asymmetric-mask": "positives",
    "diagonal-true": "positives",
    "directed-pairs": "positive_pairs",
    "own-copy": "ref_embeddings",
    "own-key-in-queue": "negatives",
}
"""Flags about an argument. Batches without this argument do not get them."""

COPIES = {"duplicate-embeddings", "own-copy"}
"""Flags of equal rows. Batches with ``self_rows`` do not get them: their references always contain the batch."""


Triple: TypeAlias = tuple[int, int, int]
"""The numbers of three choices."""


@dataclass(frozen=True)
class FreshBatch:
    """A random batch that is not drawn yet.

    Attributes:
        loss: short name in the catalogue.
        seed: the seed of the check.
        number: the number of the batch, from 0.
        training: whether it is a batch of training size. These have numbers of their own.
    """

    loss: str
    seed: int
    number: int
    training: bool = False

    @property
    def id(self) -> str:
        """The id of the case."""
        return _name(self.seed, self.number, self.training)

    def proved(self, claim: Claim) -> GoldenCase:
        """The batch for a claim, with its proved results. The result for the latest claim is kept."""
        kept: tuple[Claim, GoldenCase] | None = self.__dict__.get("kept")
        if kept is None or kept[0] is not claim:
            ahead: Future[GoldenCase] | None = self.__dict__.pop("ahead", None)
            kept = self.__dict__["kept"] = claim, ahead.result() if ahead else self._proved(claim)
        return kept[1]

    def _proved(self, claim: Claim) -> GoldenCase:
        """Draw the batch for a claim, and prove its results."""
        return with_proof((draw_training if self.training else draw)(claim, self.seed, self.number))


LEAST_AHEAD = 16
"""Number of batches from which a second process saves time."""

_ahead: tuple[Sequence[FreshBatch], Claim] | None = None
"""What ``proved_ahead`` proves. The forked process inherits it."""


@contextmanager
def proved_ahead(batches: Sequence[FreshBatch], claim: Claim) -> Iterator[None]:
    """Within this context, a second process proves the batches for a claim, if there is a second processor.

    It also evaluates their rounding errors. The results are those of ``FreshBatch.proved`` in one process.
    """
    if sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2 or len(batches) < LEAST_AHEAD:
        yield
        return
    global _ahead
    _ahead = batches, claim
    try:
        with forked(1) as pool:
            for number, batch in enumerate(batches):
                batch.__dict__["ahead"] = pool.submit(_proved_ahead, number)
            yield
    finally:
        _ahead = None
        for batch in batches:
            batch.__dict__.pop("ahead", None)


def _proved_ahead(number: int) -> GoldenCase:
    assert _ahead is not None
    batches, claim = _ahead
    golden = batches[number]._proved(claim)
    rounding_of(golden.case, "float32")
    return golden


def _name(seed: int, number: int, training: bool) -> str:
    return f"{DRAWN_IDS[training]}{seed}-{number}"


def label_names(kind: str, count: int, chance: random.Random) -> Sequence[int]:
    """Draw different labels.

    - "small": below 8, or below the number of labels.
    - "colliding": of any size and sign. Pairs of them are equal modulo a number, in a narrower dtype, or without their
      signs. One of them may be ``IGNORED_LABEL``.
    - "extreme": the first of ``EXTREME``; "small" if it has too few.
    """
    if kind == "extreme" and count <= len(EXTREME):
        return chance.sample(EXTREME[:count], count)
    if kind != "colliding":
        return chance.sample(range(max(8, count)), count)
    names = [chance.choice((IGNORED_LABEL, chance.choice((-1, 1)) * chance.randrange(2 ** chance.randrange(1, 63))))]
    while len(names) < count:
        near = chance.choice(names)
        step = chance.choice((0, *APART)) * chance.choice((-1, 1)) * chance.randint(1, 3)
        name = near + step if step else -near
        if -(2**63) <= name < 2**63 and name not in names:
            names.append(name)
    return chance.sample(names, count)


def fresh_batches(request: Request) -> list[FreshBatch]:
    """Return the random batches that a request selects. The request must have a seed."""
    seed, sizes = request.seed or 0, len(TRAINING_ROWS) + len(THOROUGH_ROWS) * request.thorough
    batches = [FreshBatch(request.loss, seed, number) for number in range(request.fuzz)]
    batches += [FreshBatch(request.loss, seed, number, training=True) for number in range(sizes if request.fuzz else 0)]
    return [batch for batch in batches if Selection(cases=request.cases).takes_case(batch.id)]


def with_proof(case: Case) -> GoldenCase:
    """Prove the results of a drawn case, and determine its flags.

    Raises:
        CertificationError: a result cannot be proved.
    """
    given, omitted = {"", *case.arguments, *case.others}, NOT_SHOWN
    if "self_rows" in case.arguments:
        omitted = omitted | COPIES
    if "ref_embeddings" in case.others:
        omitted = omitted | {"asymmetric-mask", "diagonal-true"}
    flags = [flag for flag in true_flags(case) if ONLY_WITH.get(flag, "") in given and flag not in omitted]
    flags += ["saturated"] * saturated(case)
    dtypes, expected = tuple(dtype for dtype in DTYPES if case.holds_in(dtype)), prove(case)
    flags += ["fitted-pairs"] * _is_fitted(case, expected)
    return GoldenCase(case, tuple(flags), "a random batch", dtypes, expected)


def _is_fitted(case: Case, expected: Expected) -> bool:
    """Whether a binary cross-entropy has a row whose gradient nearly vanishes.

    torch's derivative of a positive's term is a difference, sigmoid(s) - 1, which loses as many digits as it is small.
    """
    if case.form not in ("binary", "sigmoid"):
        return False
    cosine, each = case.option("similarity") == "cosine", case.temperature * max(1, len(case.anchors()))
    sizes = (
        row_norms(gradient) * (row_norms(case.matrices[name]) if cosine else 1.0)
        for name, gradient in case.gradients(expected).items()
    )
    return any(bool(((size > 0) & (size * each < FITTED)).any()) for size in sizes)


def draw(claim: Claim, seed: int, number: int) -> Case:
    """Draw a batch whose options and arguments the claim accepts. ``seed`` is that of the check."""
    name, factors, entry = _name(seed, number, False), _factors(claim), LOSSES[claim.loss]
    chance = random.Random(f"batch {seed} {number}")
    if number % LARGE == LARGE - 1 and entry.targets == "labels":
        large = draw_with(claim, LARGE_BATCH, name, chance)
        if has_formula(large):
            return large
    plan = _plans(tuple(factors.items()), entry.variant.get("denominator"), seed)[number]
    case = _Drawing(claim, plan, chance).case(name)
    return case if number % PLAIN == 0 else _with_further(case, claim, f"{seed} {number}")


def _with_further(case: Case, claim: Claim, seed: str) -> Case:
    """Add given positives, ignored pairs and weights to some batches."""
    case = _with_targets(case, claim, random.Random(f"targets {seed}"))
    case = _with_ignored(case, claim, random.Random(f"ignored {seed}"))
    return _with_weights(case, claim, random.Random(f"weights {seed}"))


def draw_training(claim: Claim, seed: int, number: int) -> Case:
    """Draw a batch with many rows and many columns, as training has them.

    Every third batch has a row without positives, if the loss allows it. One of these is plain and has large
    classes; its mean leaves out the rows without positives. Plans with too many similarities are passed over. If
    all plans have too many, because of an option that the target fixes, the batch gets fewer rows.
    """
    name, (n, d) = _name(seed, number, True), training_sizes(seed)[number]
    most = MOST_SIMILARITIES if number < len(TRAINING_ROWS) else THOROUGH_SIMILARITIES
    factors, denominator = _training_factors(claim), LOSSES[claim.loss].variant.get("denominator")
    plans = _plans(tuple(factors.items()), denominator, f"{seed} training")
    several = [k for k in range(1, len(TRAINING_ROWS)) if k != FEW_CLASSES]

    def drawn(place: int, rows: int, columns: int) -> Case:
        plan = {**plans[place], "rows": (rows, rows), "columns": (columns, columns)}
        if number % 3 == 1 and "single" in factors["classes"]:
            plan["classes"] = "single"
        if number in several:
            # With few batches, a reduction could be missing, or occur only with references.
            order = random.Random(f"training reductions {seed}").sample(factors["reduction"], len(factors["reduction"]))
            turn = several.index(number)
            plan["reduction"] = order[turn % len(order)]
            if turn < len(order) and plan["reduction"] != "mean":
                plan["references"] = "none"
        if number == FEW_CLASSES:
            usual = {"no_positive": "drop", "reduction": "mean"}
            plan |= {"few": True, **{name: x for name, x in usual.items() if x in factors.get(name, ())}}
        case = _Drawing(claim, plan, random.Random(f"training {seed} {number}")).case(name)
        return case if place % PLAIN == 0 else _with_further(case, claim, f"{seed} training {number}")

    if not LOSSES[claim.loss].two_towers:  # at most as many references as rows are added to the rows
        return drawn(number, n, d)
    for place in range(number, number + 3 * PLAIN * PLANS, 3 * PLAIN):
        if (similarities := math.prod(drawn(place, n, 1).shape)) <= most:
            return drawn(place, n, d)
    return drawn(place, int(n * math.sqrt(most / similarities)), d)


@lru_cache(maxsize=8)
def training_sizes(seed: int) -> list[tuple[int, int]]:
    """The numbers of rows and of columns of the batches of training size, those with ``--thorough`` at the end.

    No number of columns is a power of two or its neighbour: these are stored cases.
    """
    chance = random.Random(f"training sizes {seed}")
    columns = {
        (low, high): [d for d in range(low, high + 1) if all(abs(d - 2**k) > 1 for k in range(11))]
        for low, high in (*TRAINING_COLUMNS, THOROUGH_COLUMNS)
    }
    while True:
        ranges = chance.sample(2 * TRAINING_COLUMNS, 2 * len(TRAINING_COLUMNS))
        found = [
            (chance.randint(*rows), chance.choice(columns[within]))
            for rows, within in zip(TRAINING_ROWS, ranges, strict=True)
        ]
        entries = sorted(n * d for n, d in found)
        if entries[-1] <= MOST_ENTRIES and entries[-2] <= MANY_ENTRIES:
            return found + [(chance.randint(*rows), chance.choice(columns[THOROUGH_COLUMNS])) for rows in THOROUGH_ROWS]


def _training_factors(claim: Claim) -> dict[str, tuple[Any, ...]]:
    """``_factors`` without choices that make the value NaN or constant, which would hide all others at this size."""
    found = _factors(claim)
    policies = [policy for policy in found.get("no_positive", ()) if policy != "nan"]
    # "none_pairs" would return hundreds of thousands of values, which take long to compare.
    found["reduction"] = tuple(x for x in found["reduction"] if x != "none_pairs") or found["reduction"]
    several = ("common", "single") if policies else ("common",)
    classes = several if len(found["classes"]) > 1 else found["classes"]
    return {**found, "classes": classes, **({"no_positive": tuple(policies)} if policies else {})}


def draw_with(claim: Claim, choices: Mapping[str, Any], name: str, chance: random.Random) -> Case:
    """Draw a batch with some choices of ``_Plans``; the others have their first value."""
    usual = {name: "usual" if "usual" in values else values[0] for name, values in _factors(claim).items()}
    return _Drawing(claim, {**usual, **choices}, chance).case(name)


def _with_weights(case: Case, claim: Claim, chance: random.Random) -> Case:
    """Add weights to some batches. They are drawn last, so that targets without weights get the same batches."""
    names = [name for name in WEIGHTS if name in claim.passed and name not in claim.support.lacks]
    names = [name for name in names if chance.random() < WEIGHTED_SHARE]
    if len(case.others.get("embeddings_b", case.embeddings)) != case.n and case.option("direction") != "a_to_b":
        names = []  # both directions use the same weights, so the towers must have equal lengths

    def drawn(count: int) -> list[float]:
        return [chance.choice(WEIGHTS_DRAWN) for _ in range(count)]

    width = case.shape[1]
    given: dict[str, Any] = {
        name: drawn(case.n) if name == "anchor_weights" else [drawn(width) for _ in range(case.n)] for name in names
    }
    divisor: object = "count"
    if "positive_weights" in given:
        divisor = chance.choice(claim.values_of("weights_divisor") or case.entry.choices["weights_divisor"])
    keywords = {**case.keywords, **({"weights_divisor": divisor} if divisor != "count" else {})}
    return replace(case, arguments={**case.arguments, **given}, keywords=keywords)


def _with_targets(case: Case, claim: Claim, chance: random.Random) -> Case:
    """Add given positives, and weights of the directions, to some batches of two towers.

    With given positives, the towers can have different lengths.
    """
    if not case.entry.two_towers or "negatives" in case.others:
        return case
    if claim.direction_weights and case.option("direction") == "both":
        case = case.with_options(direction_weights=claim.direction_weights)
    elif "direction_weights" in claim.passed and case.option("direction") == "both" and chance.random() < 0.5:
        weights = [chance.choice((0.25, 0.5, 0.75, 1.0, 2.0)) for _ in range(2)]
        changed = case.with_options(direction_weights=weights)
        case = case if claim.support.refuses(changed) else changed
    way = chance.choice(("none", *(name for name in ("partners", "labels", "positives") if name in claim.passed)))
    if way == "none":
        return case
    n, b = case.n, case.others["embeddings_b"]
    m = max(1, n + chance.choice((-2, -1, 0, 0, 1, 3))) if way != "labels" or "ref_labels" in claim.passed else n
    rows = np.concatenate([b, b[:, ::-1], b])[:m]
    given: dict[str, Any] = {}
    if way == "partners":
        given["partners"] = [chance.randrange(m) for _ in range(n)]
    elif way == "labels":
        classes = max(2, n // 2)
        names = label_names(chance.choice(LABELS), classes, chance)
        given["labels"] = [chance.choice(names) for _ in range(n)]
        if m != n or ("ref_labels" in claim.passed and chance.random() < 0.5):
            given["ref_labels"] = [chance.choice(names) for _ in range(m)]
    else:
        given["positives"] = [[chance.random() < MASKED for _ in range(m)] for _ in range(n)]
    options = {name: chance.choice(case.entry.choices[name]) for name in OF_TARGETS if name in claim.passed}
    keywords = {**case.keywords, **{key: x for key, x in options.items() if x != case.entry.default(key)}}
    others = {**case.others, "embeddings_b": rows}
    changed = replace(case, arguments={**case.arguments, **given}, keywords=keywords, others=others)
    return case if claim.support.refuses(changed) else changed


def _with_ignored(case: Case, claim: Claim, chance: random.Random) -> Case:
    """Add ignored pairs to some batches, as a mask or as ids.

    A mask keeps at least one positive and one negative of every row that has them.
    """
    ways = [name for name in ("ignored", "ignored_ids") if name in claim.passed and name not in claim.support.lacks]
    way = chance.choice(("none", "none", *ways))
    if way == "none" or "negatives" in case.others:
        return case
    if case.option("partition") == "per_direction":
        return case
    one_block = case.entry.two_towers and case.option("directions") is None
    columns = len(case.others["embeddings_b"]) if one_block else case.shape[1]
    given: dict[str, Any] = {}
    if way == "ignored_ids":
        other = "ref_embeddings" in case.others or (one_block and columns != case.n)
        sizes = {"ignored_ids": case.n, **({"ref_ignored_ids": columns} if other else {})}
        if sizes.keys().isdisjoint(claim.support.lacks):
            given = {name: [chance.randrange(case.n) for _ in range(size)] for name, size in sizes.items()}
    else:
        # For two towers, rows of the mask are rows of a, and columns are rows of b, in both directions.
        one_way = case.with_options(direction="a_to_b") if one_block else case
        members, positive = (found[: case.n, :columns] for found in (one_way.member_array(), one_way.positive_array()))
        mask = [[chance.random() < IGNORED_SHARE for _ in range(columns)] for _ in range(case.n)]
        for i, row in enumerate(mask):
            for kind in (positive[i], ~positive[i]):
                kept = np.flatnonzero(members[i] & kind).tolist()
                if kept:
                    row[chance.choice(kept)] = False
        given = {"ignored": mask}
    return replace(case, arguments={**case.arguments, **given})


def _factors(claim: Claim) -> dict[str, tuple[Any, ...]]:
    """Return the options and structures to combine, with the values that the claim accepts.

    Values that are drawn more often are repeated. True stands for a number that is drawn later.
    """
    entry, support = LOSSES[claim.loss], claim.support

    def takes(name: str) -> bool:
        return name in entry.keywords and name not in support.lacks

    harder = {}
    if "hardness_strength" in entry.keywords:
        harder = {"hardness_strength": claim.values_of("hardness_strength") or (True, True, 0.0)}
    references = ["none"]
    if takes("ref_embeddings") and (entry.targets != "labels" or takes("ref_labels")):
        references += ["others", "own"] if takes("self_rows") else ["others"]
    classes = CLASSES if entry.positives_by in ("labels", "pairs") else ("common",)
    if claim.unlabelled:
        classes = ("pairs",)
    elif claim.call in OF_VIEWS and entry.targets == "labels":
        classes = ("views",)  # every item has two views
    return {
        "classes": classes,
        "directed": (False, True) if entry.positives_by == "pairs" else (False,),
        "anchors": (False, True) if takes("anchors") else (False,),
        "mask": (False, True) if takes("positives") and not entry.two_towers else (False,),
        "references": tuple(references),
        "queue": ("none", "short", "long") if takes("negatives") else ("none",),
        "temperature": tuple(TEMPERATURES) if claim.temperature is None else ("built-in",),
        "base_temperature": claim.values_of("base_temperature") or (None, True),
        **{
            name: claim.values_of(name) or (True, *(() if name in NEVER_ZERO else (0.0,)))
            for name in DRAWN
            if name in entry.keywords
        },
        **{name: claim.values_of(name) or entry.choices[name] for name in _drawn_options(entry)},
        **({"hard": (0, 1) if claim.queue == ONE_EACH else (0, 1, 2)} if takes("hard_negatives") else {}),
        **(harder if takes("hardness_mode") else {}),
    }


def _drawn_options(entry: Loss) -> list[str]:
    """Return the options whose values are names, except those that are drawn later or not at all."""
    later = ("weights_divisor", "zero_row", *(OF_TARGETS if entry.two_towers else ()))
    return [name for name in entry.choices if name not in later]


@lru_cache(maxsize=8)
def _plans(factors: tuple[tuple[str, tuple[Any, ...]], ...], denominator: str | None, seed: int | str) -> _Plans:
    return _Plans(dict(factors), denominator, seed)


class _Plans:
    """The choices of each batch of a check, by its number. ``denominator`` is the fixed one of a loss, or None."""

    def __init__(self, factors: Mapping[str, tuple[Any, ...]], denominator: str | None, seed: int | str) -> None:
        self.factors, self.denominator, self.chance = factors, denominator, random.Random(f"plans {seed}")
        # If two options have many values, a small number of plans would miss most combinations.
        self.candidates = max(CANDIDATES, 2 * math.prod(sorted(map(len, factors.values()))[-2:]))
        evenly: Mapping[str, Sequence[Any]] = {
            "rows": ROWS,
            "columns": COLUMNS,
            "trained": (False, True),
            "mixed norms": (False, True),
            "layout": ("stacked", "interleaved", "shuffled"),
            "common": COMMON_CLASSES,
            "labels": LABELS,
        }
        self.evenly = [{name: self._evenly(values) for name, values in evenly.items()} for _ in (False, True)]
        self.plans: list[dict[str, Any]] = []
        self.numbers: dict[tuple[str, Any], int] = {}
        self.seen: set[Triple] = set()

    def __getitem__(self, number: int) -> dict[str, Any]:
        while len(self.plans) <= number:
            plain = len(self.plans) % PLAIN == 0
            fixed = {name: self.factors[name][0] for name in STRUCTURES} if plain else {}
            drawn = [
                {name: self.chance.choice(values) for name, values in self.factors.items()} | fixed
                for _ in range(self.candidates)
            ]
            triples = [self.triples(plan) for plan in drawn]
            best = max(range(self.candidates), key=lambda k: sum(triple not in self.seen for triple in triples[k]))
            self.seen.update(triples[best])
            self.plans.append(drawn[best] | {name: next(values) for name, values in self.evenly[plain].items()})
        return self.plans[number]

    def _evenly(self, values: Sequence[Any]) -> Iterator[Any]:
        while True:
            yield from self.chance.sample(values, len(values))

    def triples(self, plan: Mapping[str, Any]) -> list[Triple]:
        """Return the combinations of three choices that a batch shows.

        A policy that has an effect is an additional choice. A choice that makes the result NaN or constant hides the
        others: then only combinations with this choice count.
        """
        denominator = plan.get("denominator", self.denominator)
        lacking = "no_positive" in plan and plan["classes"] in ("single", "distinct")
        lacking_negatives = (
            "no_negative" in plan and plan["classes"] == "one" and denominator in (None, "only_negatives")
        )
        constant = ""
        undefined = plan.get("no_positive") == "nan" and plan.get("reduction") != "none_pairs"
        if lacking and (undefined or plan["classes"] == "distinct"):
            constant = "no_positive, with effect"
        elif lacking_negatives and (denominator or plan["no_negative"] == "nan"):
            constant = "no_negative, with effect"
        elif plan["classes"] == "one" and denominator in ("one_positive", "only_negatives"):
            constant = "classes"
        choices = [*plan.items()]
        choices += [("no_positive, with effect", plan["no_positive"])] if lacking else []
        choices += [("no_negative, with effect", plan["no_negative"])] if lacking_negatives else []
        numbers = [self.numbers.setdefault(choice, len(self.numbers)) for choice in choices]
        found = itertools.combinations(numbers, 3)
        if not constant:
            return list(found)
        (shown,) = (number for number, (name, _) in zip(numbers, choices, strict=True) if name == constant)
        return [triple for triple in found if shown in triple]


@cache
def _normal() -> list[float]:
    """Quantiles of the normal distribution, equally likely."""
    count = 4096
    return [NormalDist().inv_cdf((k + 0.5) / count) for k in range(count)]


class _Drawing:
    """One batch that is being drawn, with the choices ``plan`` of ``_Plans``."""

    def __init__(self, claim: Claim, plan: Mapping[str, Any], chance: random.Random) -> None:
        self.claim, self.plan, self.chance, self.entry = claim, plan, chance, LOSSES[claim.loss]
        self.kind = plan["common"] if plan["classes"] == "common" else plan["classes"]
        # "single" needs one row and a pair; "common" needs two pairs.
        least = {"one": 2, "distinct": 2, "single": 3}.get(self.kind, 4 if self.entry.targets else 2)
        n = max(least, chance.randint(*plan["rows"]))
        self.n = (
            n + n % 2
            if self.entry.positives_by == "partners" or (self.kind in ("views", "pairs") and self.entry.targets)
            else n
        )
        self.size = 1
        if self.kind == "balanced" and self.entry.positives_by in ("labels", "pairs"):
            self.size = chance.randint(*EQUAL)
            self.n = max(self.n + -self.n % self.size, 2 * self.size)
        self.few = bool(plan.get("few"))
        self.alone = 0
        if self.kind == "single":
            some = chance.randint(1, MOST_ALONE if self.few else self.n - 2)
            self.alone = some if self.few else chance.choice((1, self.n - 2, some))
        self.dim = chance.randint(*plan["columns"]) if plan["columns"] else self.n
        self.many = MANY if self.n <= ROWS[-1][1] else (self.n // 2, self.n)
        self.centres: dict[int, list[float]] = {}

    def case(self, name: str) -> Case:
        classes = self._classes()
        arguments, further = self._arguments(classes)
        rows = {self.entry.embeddings[0]: self._rows(classes)}
        if self.entry.two_towers:
            rows["embeddings_b"] = self._rows(classes)
            if self.plan["queue"] != "none":
                long = MANY if self.many == MANY else (self.n + 1, 2 * self.n)
                count = self.chance.randint(*(long if self.plan["queue"] == "long" else FEW))
                rows["negatives"] = self._rows([self.n + k for k in range(count)])
            if hard := self.plan.get("hard"):
                rows["hard_negatives"] = self._rows([k // hard for k in range(self.n * hard)])
        elif further is not None:
            rows["ref_embeddings"] = self._rows(further)
        drawn_options = _drawn_options(self.entry)
        keywords = self.entry.fitting({name: self.plan[name] for name in drawn_options} | rows)
        keywords = {name: keywords[name] for name in drawn_options}
        if (drawn := self.claim.temperature) is None:
            low, high = map(math.log, TEMPERATURES[self.plan["temperature"]])
            drawn = round(math.exp(self.chance.uniform(low, high)), 5)
        keywords["temperature"] = drawn
        base = self.plan["base_temperature"]
        keywords["base_temperature"] = round(drawn * self.chance.choice((0.5, 3.0)), 5) if base is True else base
        for key, limits in DRAWN.items():
            if key in self.plan:
                number = self.plan[key]
                keywords[key] = round(self.chance.uniform(*limits), 3) if number is True else number
        if self.plan["anchors"]:
            keywords["anchors"] = self._anchors(classes)
        keywords = {key: value for key, value in keywords.items() if value not in (None, self.entry.default(key, rows))}
        matrices = self._exact(rows)
        if "self_rows" in arguments:
            matrices["ref_embeddings"][arguments["self_rows"]] = matrices[self.entry.embeddings[0]]
        case = Case(name, self.claim.loss, matrices.pop(self.entry.embeddings[0]), arguments, keywords, matrices)
        return (scaled_to_logits(case) or case) if case.option("similarity") == "dot" else case

    def _sizes(self) -> list[int]:
        n = self.n
        if self.kind == "one":
            return [n]
        if self.kind == "distinct":
            return [1] * n
        if self.kind == "single":
            return [1] * self.alone + self._unequal(n - self.alone)
        if self.kind == "views":
            return [2 * size for size in self._unequal(n // 2, 1)]
        if self.kind == "large":
            return [2, n - 2]
        if self.kind == "balanced":
            return [self.size] * (n // self.size)
        return self._unequal(n)

    def _unequal(self, n: int, least: int = 2) -> list[int]:
        """Divide rows into classes of usually unequal sizes; into at least two classes, if possible."""
        fewest = 2 if n >= 2 * least else 1
        most = min(n // least, MOST_CLASSES) if self.few else n // least
        count = self.chance.randint(fewest, max(fewest, most))
        sizes = [least] * count
        for _ in range(n - least * count):
            sizes[min(self.chance.randrange(count), self.chance.randrange(count))] += 1
        return sizes

    def _classes(self) -> list[int]:
        """Return the class of every row."""
        if self.entry.two_towers:
            return list(range(self.n))
        pairs = self.entry.positives_by == "partners" or self.kind == "pairs"
        sizes = [2] * (self.n // 2) if pairs else self._sizes()
        # (place in the class, class)
        members = [(place, k) for k, size in enumerate(sizes) for place in range(size)]
        if self.plan["layout"] == "stacked":
            members.sort()
        elif self.plan["layout"] == "shuffled":
            self.chance.shuffle(members)
        return [k for _, k in members]

    def _arguments(self, classes: Sequence[int]) -> tuple[dict[str, Any], list[int] | None]:
        """Return the arguments that give the positives, and the classes of the references if there are any."""
        chance, n = self.chance, self.n
        if self.entry.positives_by == "towers":
            return {}, None
        if self.entry.positives_by == "pairs":
            pairs = [pair for pair in itertools.permutations(range(n), 2) if classes[pair[0]] == classes[pair[1]]]
            chance.shuffle(pairs)
            return {"positive_pairs": pairs[: -(-3 * len(pairs) // 4)] if self.plan["directed"] else pairs}, None
        arguments: dict[str, Any] = {}
        further: list[int] | None = None
        if self.plan["references"] != "none":
            # A reference must not have the class of a row without positives.
            first, last = min(classes) + self.alone, max(classes)
            others = range(last + 1, last + 4) if self.kind == "distinct" else range(first, last + 1)
            count = chance.randint(*(chance.choice((FEW, FEW, self.many))))
        if self.plan["references"] == "own":
            # The rows of the batch and further rows, in random order.
            own = chance.sample(range(n + count), n)
            further = [chance.choice(others) for _ in range(n + count)]
            for row, place in enumerate(own):
                further[place] = classes[row]
            if self.entry.targets == "labels":
                self._shared(own, classes)
            arguments["self_rows"] = own
        elif self.plan["references"] == "others":
            further = [*others, *(chance.choice(others) for _ in range(count))]
            chance.shuffle(further)
        if self.entry.positives_by == "partners":
            own = arguments.get("self_rows", range(n))
            if self.plan["references"] == "others":
                assert further is not None
                return {"partners": [further.index(k) for k in classes]}, further
            mates = [next(j for j in range(n) if j != i and classes[j] == classes[i]) for i in range(n)]
            return {"partners": [own[j] for j in mates], **arguments}, further
        if self.plan["mask"]:
            return {"positives": self._mask(classes, arguments.get("self_rows"), further), **arguments}, further
        highest = max([*classes, *(further or ())])
        names = label_names(self.plan["labels"], highest + 1, chance)
        arguments["labels"] = [names[k] for k in classes]
        if further is not None:
            arguments["ref_labels"] = [names[k] for k in further]
        return arguments, further

    def _shared(self, own: list[int], classes: Sequence[int]) -> None:
        """Sometimes give a row the self row of another row of its class, or no self row (-1)."""
        row, other = self.chance.sample(range(self.n), 2)
        if classes[row] == classes[other] and self.kind != "single":
            own[row] = self.chance.choice((own[row], own[other], -1))

    def _mask(
        self, classes: Sequence[int], own: Sequence[int] | None, further: Sequence[int] | None
    ) -> list[list[bool]]:
        """Return a random mask whose rows have positives and negatives as the class structure requires."""
        chance, n = self.chance, self.n
        m = n if further is None else len(further)
        selves = own if own is not None else range(n) if further is None else [-1] * n
        likely = {"one": 1.0, "distinct": 0.0}.get(self.kind, MASKED)
        mask = [[chance.random() < likely for _ in range(m)] for _ in range(n)]
        if further is None and chance.random() < 0.5:
            mask = [[mask[i][j] or mask[j][i] for j in range(n)] for i in range(n)]
        if likely == MASKED:
            without = classes.index(0) if self.kind == "single" else -1
            for i in range(n):
                first, *others = chance.sample([j for j in range(m) if j != selves[i]], m - (selves[i] >= 0))
                if i == without:
                    mask[i] = [False] * m
                elif others:
                    mask[i][first], mask[i][others[0]] = True, False
                else:
                    mask[i][first] = True
        diagonal = chance.random() < 0.5
        for i, place in enumerate(selves):
            if place >= 0:
                mask[i][place] = diagonal
        return mask

    def _anchors(self, classes: Sequence[int]) -> list[bool]:
        """Return a random subset of the rows. With the structure "single", it includes the row without positives."""
        chosen = [self.chance.random() < 0.6 for _ in range(self.n)]
        chosen[classes.index(0) if self.kind == "single" else self.chance.randrange(self.n)] = True
        return chosen

    def _rows(self, classes: Sequence[int]) -> list[list[float]]:
        """Return Gaussian rows, or rows near the centre of their class."""
        return [self._row(k) for k in classes]

    def _row(self, k: int) -> list[float]:
        noise = self._gauss()
        if not self.plan["trained"]:
            return noise
        if k not in self.centres:
            self.centres[k] = self._gauss()
        return [centre + SPREAD * x for centre, x in zip(self.centres[k], noise, strict=True)]

    def _gauss(self) -> list[float]:
        if self.n > ROWS[-1][1]:  # gauss is slow
            return self.chance.choices(_normal(), k=self.dim)
        return [self.chance.gauss(0.0, 1.0) for _ in range(self.dim)]

    def _exact(self, rows: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Matrix]:
        """Round entries to integers of 8 bits times a power of two. With cosine, the power can differ between rows."""
        given = {name: np.array(matrix).reshape(len(matrix), self.dim) for name, matrix in rows.items()}
        largest = max(float(np.abs(matrix).max(initial=0.0)) for matrix in given.values())
        return {name: self._scaled(np.rint(matrix / largest * SIGNIFICANT) + 0.0) for name, matrix in given.items()}

    def _scaled(self, integers: Matrix) -> Matrix:
        integers[~integers.any(axis=1), :1] = 1.0
        mixed = self.plan["mixed norms"] and self.plan["similarity"] == "cosine"
        sizes = [self.chance.choice((-2, -1, 0, 1, 2)) if mixed else 0 for _ in integers]
        return np.asarray(np.ldexp(integers, np.array(sizes, dtype=int)[:, None] - 7))
