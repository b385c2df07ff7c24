"""Search for the variant, the temperature and the divisor that explain the answers of a target.

A *target* is a loss under test, a *probe* a small batch on which losses differ, a *variant* a loss with its options, or
a modification of it.

1. For every probe, each variant predicts the sum over the anchors.
2. A built-in temperature is recovered from the ratio of the answers to two probes of the same structure, because
   constant factors cancel in this ratio. The temperatures at which the predicted ratio crosses the ratio of the answers
   are found on a grid, and refined.
3. The variant is compared with the target on all probes. The divisor and the factor of the sum are found here.
4. For variants that fit, gradients are compared, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from itertools import islice, product
from statistics import median
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from pairproof.reference.ranking import hard_of_documents

from ..implementations.callable import Answer, Batch, Target
from ..implementations.sandbox import TargetError
from ..suite.catalogue import LOSSES, Loss
from .positives import (
    ADJACENT,
    FEATURES,
    HARD,
    LABELS,
    PAIRS,
    PARTNERS,
    POSITIVES,
    QUEUE,
    RANKING_OPTIONS,
    STACKED,
    VIEWS,
    Setting,
    batch_setting,
    ranking_reading,
)
from .variants import (
    ALL_PAIRS,
    COUNTS,
    FLOWS,
    REDUCED_BY,
    ROUNDED,
    TWO_GUARDS,
    WRONG_COUNTS,
    Evaluation,
    Variant,
    temperings,
    variant_of,
    variations,
    words_of,
)

Tensor = torch.Tensor
Array = np.ndarray[Any, Any]

CLOSE = 1e-6
"""Relative difference up to which values and gradients are equal, in float64."""

CLOSE_SINGLE = 2e-5
"""``CLOSE`` for targets that answer in float32."""

CLOSE_HALF = {"bfloat16": 3e-2, "float16": 5e-3}
"""``CLOSE`` for targets that answer in 16 bits. Gradients may differ ten times as much."""

EXACT = 1e-10
"""A match in float64 with a larger relative error is reported as inexact."""

CLEARLY = 1e3
"""Matches whose error exceeds the smallest error by more than this factor are discarded."""

GRID: tuple[float, ...] = tuple((torch.logspace(-3, 2, 80, dtype=torch.float64) * 1.0001).tolist())
"""Temperatures between which crossings are searched. The factor 1.0001 avoids temperatures that people choose."""

PASSED = (0.5, 0.2)
"""Temperatures that are passed to targets with a temperature argument."""

T = TypeVar("T")

TIE = 1e-9
"""Difference, relative to 1 or to the smaller of two sizes, up to which the sizes are equal apart from rounding."""

NEAR = 0.05
"""Variants whose values are further from the answers than this relative distance are discarded."""

TIED = 12
"""Decimals to which distances are compared, so that rounding errors do not change the order of variants."""

POWERS = (0, 1, -1, 2, -2)
"""A factor of the loss may be a constant times one of these powers of the temperature."""

ANOTHER = (0.5, 2.0)
"""A recovered temperature is undetermined if the variant also fits at one of these multiples."""

LEAST_GAIN = 100
"""An epsilon with an inexact match is accepted only if it reduces the error by this factor."""

NEAREST = 2
"""Number of correct variants that are tried with two epsilons."""

REFINED = 40
"""Number of crossings that are refined, or of variants that are compared with all probes."""

SHORTLIST = 400
"""Number of variants that are compared with more than two batches, if the temperature is passed."""


# Probes


def drawn(seed: int, labels: Sequence[int], weight: float, columns: int = 5) -> Tensor:
    """Draw rows [N, D] around the centres of their classes, with random norms from 0.6 to 1.5."""
    draw: dict[str, Any] = {"generator": torch.Generator().manual_seed(seed), "dtype": torch.float64}
    centres = torch.randn(max(labels) + 1, columns, **draw)
    rows = weight * centres[torch.tensor(labels)] + torch.randn(len(labels), columns, **draw)
    norms = 0.6 + 0.9 * torch.rand(len(labels), 1, **draw)
    return torch.nn.functional.normalize(rows) * norms


@dataclass(frozen=True, eq=False)
class Probes:
    """The batches that a target is called with.

    Attributes:
        call: how the target is called.
        alike: batches that differ only in how close the rows of a class are, so that divisors are equal.
        further: ordinary batches of other sizes.
        edges: batches on which policies differ, or with extreme labels or norms.
    """

    call: str
    alike: list[Batch]
    further: list[Batch]
    edges: list[Batch]


def _batch(call: str, name: str, seed: int, items: str | Sequence[int], weight: float = 0.8, **given: Any) -> Batch:
    """Make a batch of ``PROBES``.

    Args:
        call: how the target is called.
        name: describes the batch.
        seed: seed of the rows.
        items: the class of every item, one digit each. Labels are passed for the call "labels", and for "features" if
            two items share a class.
        weight: factor of the class centres. For larger weights, the rows of a class are closer together.
        given: optional changes:

            * ``n_views``: number of views per item
            * ``pairs``: positive pairs, such as "0>2 2>0" (anchor>positive)
            * ``labels``: labels to pass in place of the classes
            * ``scale``: factor of the rows
            * ``duplicates``: replace rows 1 and 5 by copies of rows 0 and 2
            * ``queued``: number of rows of the queue
            * ``hard``: number of hard negatives per item
    """
    two_views = call in (FEATURES, VIEWS, QUEUE, HARD)
    classes, n_views = [int(item) for item in items], given.get("n_views", 2 if two_views else 1)
    rows = drawn(seed, classes * n_views, weight) * given.get("scale", 1.0)
    if "duplicates" in given:
        rows[[1, 5]] = rows[[0, 2]]
    labelled = call == LABELS or (call == FEATURES and len(set(classes)) < len(classes))
    pairs = [[int(row) for row in pair.split(">")] for pair in given.get("pairs", "").split()]
    labels: Sequence[int] | None = given.get("labels", classes if labelled else None)
    if call == PARTNERS:
        labels = [sum(k for k, other in enumerate(classes) if other == item) - row for row, item in enumerate(classes)]
    queue = [k % len(classes) for k in range(given.get("queued", 0))]
    keywords = {"negatives": drawn(seed + 500, queue, weight)} if queue else {}
    if hard := given.get("hard"):
        near = drawn(seed + 500, [item for item in classes for _ in range(hard)], weight)
        keywords["hard_negatives"] = near.reshape(len(classes), hard, -1)
    return Batch(name, call, rows, labels, pairs, n_views, keywords)


@lru_cache
def _with_unit_rows(probes: Probes) -> Probes:

    def unit(batch: Batch) -> Batch:
        keywords = {name: torch.nn.functional.normalize(rows, dim=-1) for name, rows in batch.keywords.items()}
        return replace(batch, embeddings=torch.nn.functional.normalize(batch.embeddings), keywords=keywords)

    found = ([unit(batch) for batch in batches] for batches in (probes.alike, probes.further, probes.edges))
    return Probes(probes.call, *found)


def _probes(*table: tuple[Any, ...]) -> list[Probes]:
    """Make probes from a table.

    Args:
        table: tuples of call, role, name, seed, items, and possibly other arguments of ``_batch``. The role is an
            attribute of ``Probes``. "alike" starts new probes, and makes four batches with different class weights.
    """
    found: list[Probes] = []
    for call, role, name, seed, items, *others in table:
        make: Callable[..., Batch] = partial(_batch, call, items=items, **dict(*others))
        if role == "alike":
            weights = enumerate((0.0, 0.6, 1.2, 2.0))
            alike = [make(f"{name}, {weight:g} apart", seed + k, weight=weight) for k, weight in weights]
            found.append(Probes(call, alike, [], []))
        else:
            getattr(found[-1], role).append(make(name, seed))
    return found


UNBALANCED, TWO_SINGLES, TWINS = "010210210", "0102033", "012345012345"
FAR_APART = (0, 256, 2**32, 2**24, 2**24 + 1, -1) * 2
"""Labels that partly become equal if they are converted to fewer bits or to float32."""

NINE_ROWS = "0>2 2>0 1>4 4>1 3>6 5>0 6>8 7>2 8>3 0>5 0>8 2>5 6>3"
TWELVE_ROWS = "0>1 1>0 2>3 3>4 4>2 5>9 6>0 7>8 8>7 9>5 10>11 11>1 0>7 2>9 2>10 5>6 9>10 9>11"

PROBES = _probes(
    (LABELS, "alike", "classes of 4, 3 and 2 rows", 3, UNBALANCED),
    (LABELS, "further", "14 rows in classes of 6 to 2", 11, "30110222032230"),
    (LABELS, "further", "pairs only, stacked", 12, TWINS),
    (LABELS, "further", "duplicated rows", 13, "0101202211", {"duplicates": True}),
    (LABELS, "further", "pairs only, side by side", 14, "00112233"),
    (LABELS, "edges", "two anchors without positives", 21, TWO_SINGLES),
    (LABELS, "edges", "a batch of one class", 22, "00000"),
    (LABELS, "edges", "a batch without positives", 23, "01234"),
    (LABELS, "edges", "labels far apart", 24, TWINS, {"labels": FAR_APART}),
    (LABELS, "edges", "rows of norm 1e-9", 25, UNBALANCED, {"scale": 1e-9}),
    (LABELS, "alike", "six pairs", 31, TWINS),
    (LABELS, "further", "five pairs", 36, "0123401234"),
    (LABELS, "further", "eight pairs", 37, "0123456701234567"),
    (FEATURES, "alike", "6 items of 2 views in 3 classes", 41, "010201"),
    (FEATURES, "further", "5 items of 2 views in 3 classes", 45, "21200"),
    (FEATURES, "further", "4 items of 3 views in 2 classes", 46, "0100", {"n_views": 3}),
    (FEATURES, "further", "9 items of 1 view in 3 classes", 47, UNBALANCED, {"n_views": 1}),
    (FEATURES, "further", "6 items of 2 views, no labels", 48, "012345"),
    (FEATURES, "edges", "one view, two anchors without positives", 49, TWO_SINGLES, {"n_views": 1}),
    (FEATURES, "edges", "a batch of one class", 50, "000"),
    (FEATURES, "alike", "6 items of 2 views", 51, "012345"),
    (FEATURES, "further", "9 items of 2 views", 56, "012345678"),
    (FEATURES, "further", "4 items of 3 views", 57, "0123", {"n_views": 3}),
    (FEATURES, "further", "3 items of 2 views", 58, "012"),
    (VIEWS, "alike", "6 items", 61, "012345"),
    (VIEWS, "further", "9 items", 66, "012345678"),
    (VIEWS, "further", "3 items", 67, "012"),
    (VIEWS, "further", "duplicated rows", 68, "0123456", {"duplicates": True}),
    (VIEWS, "further", "12 items", 69, range(12)),
    (VIEWS, "alike", "4 items", 121, "0123"),
    (VIEWS, "further", "9 items", 66, "012345678"),
    (PARTNERS, "alike", "12 rows with partners", 131, "010232145345"),
    (PARTNERS, "further", "10 rows, k and k + 5 are partners", 136, "0123401234"),
    (PARTNERS, "further", "8 rows, 2k and 2k + 1 are partners", 137, "00112233"),
    (PARTNERS, "further", "14 rows with partners", 138, "01234566543210"),
    (PARTNERS, "further", "duplicated rows", 139, "0123240143", {"duplicates": True}),
    (QUEUE, "alike", "6 items, a queue of 7 rows", 141, "012345", {"queued": 7}),
    (QUEUE, "further", "9 items, a queue of 4 rows", 146, "012345678", {"queued": 4}),
    (QUEUE, "further", "3 items, a queue of 13 rows", 147, "012", {"queued": 13}),
    (QUEUE, "further", "5 items, a queue of 1 row", 148, "01234", {"queued": 1}),
    (HARD, "alike", "6 items, 2 hard negatives each", 151, "012345", {"hard": 2}),
    (HARD, "further", "9 items, 1 hard negative each", 156, "012345678", {"hard": 1}),
    (HARD, "further", "3 items, 4 hard negatives each", 157, "012", {"hard": 4}),
    (HARD, "further", "5 items, 3 hard negatives each", 158, "01234", {"hard": 3}),
    (HARD, "alike", "6 items, 1 hard negative each", 161, "012345", {"hard": 1}),
    (HARD, "further", "9 items, 1 hard negative each", 156, "012345678", {"hard": 1}),
    (HARD, "further", "3 items, 1 hard negative each", 167, "012", {"hard": 1}),
    (PAIRS, "alike", "13 directed pairs of 9 rows", 71, "012012012", {"pairs": NINE_ROWS}),
    (PAIRS, "further", "18 directed pairs of 12 rows", 76, "012012012012", {"pairs": TWELVE_ROWS}),
    (PAIRS, "further", "each of 8 rows with one partner", 77, "01201201", {"pairs": "0>4 1>5 2>6 3>7 4>0 5>1 6>2 7>3"}),
    (PAIRS, "further", "6 rows, both directions", 78, "012012", {"pairs": "0>1 1>0 2>3 3>2 4>5 5>4 0>5 5>0"}),
    (PAIRS, "edges", "pairs listed twice", 79, "01201201", {"pairs": "0>2 2>0 1>4 4>1 5>0 6>3 7>2 3>6 0>2 5>0"}),
    (PAIRS, "edges", "two rows without positives", 80, "0120120", {"pairs": "0>2 2>0 1>4 4>1 3>6 5>0"}),
    (PAIRS, "edges", "a row without negatives", 81, "0120", {"pairs": "0>1 0>2 0>3 1>0 2>1 3>0"}),
    (PAIRS, "edges", "a diagonal entry listed", 82, "012012", {"pairs": "0>1 1>0 2>3 3>2 4>5 5>4 2>2"}),
)
"""The probes of every call. The first ones that the target accepts are used."""


@dataclass(frozen=True)
class Probe:
    """A batch, and the temperature that is passed (or None)."""

    batch: Batch
    temperature: float | None

    @property
    def name(self) -> str:
        """Description in reports."""
        return self.batch.name + ("" if self.temperature is None else f", temperature {self.temperature:g}")


def call_with(target: Target, probe: Probe, limit: float | None = None) -> Answer:
    """Call a target with a probe. ``limit`` is the maximum duration in seconds.

    Raises:
        TargetError: the target raised an error, was too slow, or did not return a loss.
    """
    keywords = {**probe.batch.keywords, **({} if probe.temperature is None else {"temperature": probe.temperature})}
    keywords |= target.trial_keywords
    try:
        return target.evaluate(replace(probe.batch, keywords=keywords), limit)
    except TargetError:
        raise
    except Exception as error:  # external code may raise any exception
        raise TargetError(f"{type(error).__name__}: {error}".splitlines()[0]) from error


@lru_cache(maxsize=10_000)
def read_as(batch: Batch, positives: str) -> Setting | None:
    """Return the setting of a batch, with the positives read in one way of ``POSITIVES``; None if impossible."""
    return POSITIVES[positives].change(batch_setting(batch))


@lru_cache(maxsize=10_000)
def _number(setting: Setting, count: str, form: str) -> float:
    return float(COUNTS[ALL_PAIRS if (count, form) == ("mean_pairs", "sigmoid") else count](setting))


# Variants to try

READ_AS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "labels": dict.fromkeys((LABELS, FEATURES, PAIRS, VIEWS), ("meant",)),
    "partners": {VIEWS: ("meant",), FEATURES: ("views",), LABELS: (STACKED, ADJACENT), PARTNERS: ("meant",)},
    "pairs": dict.fromkeys((LABELS, FEATURES, VIEWS, PAIRS), ("meant",)),
    "towers": {**dict.fromkeys((VIEWS, FEATURES), ("towers",)), QUEUE: ("queue",), HARD: ("queue",)},
}
"""Ways to read the positives (keys of ``POSITIVES``), by ``Loss.positives_by`` and the call."""


NUMBERS_TRIED: Mapping[str, tuple[float, ...]] = {
    "bias": (-10.0, 0.0),
    "tau_plus": (0.1, 0.0),
    "beta": (1.0, 0.0, 0.5, 2.0),
    "sigma": (0.5, 0.1, 1.0),
    "hardness_strength": (0.0, 9.0, 5.0, 2.0, 1.0),
}
"""Values that are tried for numeric options."""


def known_losses(call: str, bias: float | None = None) -> list[Variant]:
    """Return every loss of the catalogue that fits a call, with the combinations of its options.

    A ``bias`` of None tries -10 and 0.
    """
    found: list[Variant] = []
    for loss in LOSSES.values():
        if "directions" in loss.keywords:
            found += _rankings(loss, call)
            continue
        choices: dict[str, tuple[Any, ...]] = {
            name: values for name, values in loss.choices.items() if name not in REDUCED_BY
        }
        choices |= {name: values for name, values in NUMBERS_TRIED.items() if name in loss.keywords}
        if bias is not None and "bias" in loss.keywords:
            choices["bias"] = (bias,)
        for values in product(*choices.values()):
            chosen = dict(zip(choices, values, strict=True))
            if chosen.get("tau_plus") == chosen.get("beta") == 0:  # this is nt_xent
                continue
            variant = variant_of(loss, chosen)
            direction = dict(variant.options).get("direction", "a_to_b" if "direction" not in loss.keywords else "")
            direction = direction if loss.two_towers else ""
            usable = call not in (QUEUE, HARD) or "negatives" in loss.keywords
            usable = usable and (call != HARD or direction == "a_to_b")
            # With one positive per anchor, losses of labels equal losses of partners, except for DCL.
            dcl = loss.name == "supcon" and variant.denominator == "only_negatives"
            usable = usable and (call != VIEWS or loss.positives_by != "labels" or dcl)
            for positives in READ_AS[loss.positives_by].get(call, ()) if usable else ():
                found.append(replace(variant, positives=f"{positives} {direction}" if direction else positives))
    return found


def same_loss(variant: Variant, called: str = "") -> Variant | None:
    """Return another loss of the catalogue that takes the same arguments and has these parts; None if there is none.

    ``called`` is how the target is called; "" if it is not known. Unless it gets partners, it may also be a loss of
    labels.
    """
    if not variant.in_parts:
        return None
    own, (call, *_) = variant.entry, READ_AS[variant.entry.positives_by]
    parts = replace(variant, loss="", options=())
    alike = {own.positives_by}
    if own.positives_by == "partners" and called not in ("", "partners", "command"):
        alike.add("labels")
    for known in known_losses(call):
        same = known.in_parts and known.entry.positives_by in alike
        if same and parts == replace(known, loss="", options=(), positives=variant.positives):
            return None if known.loss == own.name else known
    return None


RANKED = ("query_to_doc", "query_to_doc+doc_to_query", "query_to_doc+query_to_query+doc_to_query+doc_to_doc")
"""The directions of MultipleNegativesRankingLoss, of MultipleNegativesSymmetricRankingLoss, and of GTE."""


def _rankings(loss: Loss, call: str) -> Iterator[Variant]:
    """Yield multiple_negatives_ranking with the combinations of its options that fit a call.

    Equivalent combinations are yielded once. Those that equal info_nce get its way to read the positives. To save time,
    hardness is combined only with the directions in ``RANKED``, and not with ``doc_to_doc_hard``.
    """
    if call not in (VIEWS, HARD):
        return
    names = ("similarity", *RANKING_OPTIONS)
    for values in product(*(loss.choices[name] for name in names), NUMBERS_TRIED["hardness_strength"]):
        chosen = dict(zip((*names, "hardness_strength"), values, strict=True))
        directions, partition, scope, mode, hard_of_doc = options = [chosen[name] for name in RANKING_OPTIONS]
        if hard_of_doc == hard_of_documents(None, scope):
            chosen["doc_to_doc_hard"] = None
        elif call == VIEWS or "doc_to_doc" not in directions or mode != "none":
            continue
        alone = call == VIEWS and (scope != "batch" or mode not in ("none", "in_batch_negatives"))
        same = partition == "per_direction" and directions == "query_to_doc"
        same = same or (scope == "own_only" and mode in ("in_batch_negatives", "all_negatives"))
        matrices = {"hard_negatives": call} if call == HARD else {}
        same = same or (mode != "none" and directions not in RANKED)
        if alone or same or (mode == "none") != (values[-1] == 0) or loss.unfit({**chosen, **matrices}):
            continue
        towers = {"joint": "towers a_to_b", "per_direction": "towers"}[partition]
        plain = call == VIEWS and mode == "none" and (partition != "joint" or directions == "query_to_doc")
        reading = towers if plain else ranking_reading(*options)
        yield replace(variant_of(loss, chosen), positives=reading)


def _levels(call: str, bias: float | None, claimed: Variant | None) -> Iterator[Sequence[Variant]]:
    """Yield the variants with no mistake, with one, and with two: first in the claimed loss, if there is one."""
    losses = tuple(LOSSES.values())
    yield _right_variants(call, bias, losses)
    yield _wrong_variants(call, bias, losses)
    yield from (_twice_wrong_variants(call, bias, losses, one) for one in dict.fromkeys((claimed, None)))


# The argument ``losses`` (the catalogue) is only a key of the cache.


@lru_cache
def _right_variants(call: str, bias: float | None, losses: tuple[Loss, ...]) -> Sequence[Variant]:
    known = known_losses(call, bias)
    # ``Search.explain`` finds the mean over pairs as a multiple of the sum over pairs.
    means = [variant for variant in known if variant.form == "mean"]
    over_pairs = [variant for variant in means if "mean_pairs" in variant.entry.choices["reduction"]]
    return [*known, *(replace(variant, form="sum") for variant in over_pairs)]


@lru_cache
def _wrong_variants(call: str, bias: float | None, losses: tuple[Loss, ...]) -> Sequence[Variant]:
    known = (variant for variant in known_losses(call, bias) if _combined_with_mistakes(variant))
    return _unique(wrong for variant in known for wrong in variations(variant, call))


def _combined_with_mistakes(variant: Variant) -> bool:
    """Return whether a correct variant is combined with mistakes. This excludes rare options, to save time.

    * beta and sigma must have their defaults or be 0.
    * The ranking loss may change only the scope of hard negatives, or use all four directions.
    """
    changed = {name for name, value in variant.options if value}  # those that differ from their defaults and from 0
    if "directions" in variant.entry.keywords:
        return changed <= {"hard_negatives_scope"} or dict(variant.options) == {"directions": RANKED[-1]}
    return not {"beta", "sigma"} & changed


@lru_cache
def _twice_wrong_variants(
    call: str, bias: float | None, losses: tuple[Loss, ...], claimed: Variant | None
) -> Sequence[Variant]:
    known, kept = known_losses(call, bias), {"guard"}
    chosen = [one for one in known if claimed and (one.loss, one.options) == (claimed.loss, claimed.options)]
    use_of_temperature = temperings if chosen else lambda variant: ()
    if not chosen:  # without rare options and other similarities, to save time
        chosen = [x for x in known if not x.guard and not dict(x.options).keys() - {"similarity", "denominator"}]
        kept.add("similarity")
    once = [first for one in chosen for first in variations(one, call, kept)]
    twice = ((*variations(first, call, kept), *use_of_temperature(first)) for first in once)
    return _unique(second for some in twice for second in some if len(second.words()) == 2)


def _with_two_epsilons(near: Iterable[Match]) -> list[Variant]:
    """Return the nearest correct variants, with different epsilons in the numerator and in the denominator."""
    close = ranked([match for match in near if match.distance <= NEAR], lambda match: match.distance)
    first = dict.fromkeys(match.variant for match in close if match.variant.takes_guard and not match.variant.words())
    return [replace(variant, guard=guard) for variant in islice(first, NEAREST) for guard in TWO_GUARDS]


def ranked(items: Sequence[T], size: Callable[[T], float], then: Callable[[T], int] = lambda _: 0) -> list[T]:
    """Sort items by a size that has rounding errors. Equal sizes are sorted by ``then``, and keep their order."""
    order = sorted(range(len(items)), key=lambda place: size(items[place]))
    groups: list[list[int]] = []
    for place in order:
        least = size(items[groups[-1][0]]) if groups else math.nan
        if size(items[place]) - least <= TIE * (1 + abs(least)):
            groups[-1].append(place)
        else:
            groups.append([place])
    return [items[place] for group in groups for place in sorted(group, key=lambda k: (then(items[k]), k))]


def _unique(variants: Iterable[Variant]) -> list[Variant]:
    """Remove variants that have the parts and the numbers of an earlier one."""
    first: dict[tuple[Variant, tuple[float, ...]], Variant] = {}
    for variant in variants:
        parts = replace(variant, loss="", options=()) if variant.in_parts else variant
        first.setdefault((parts, variant.numbers), variant)
    return list(first.values())


@torch.no_grad()
def totals(tried: Sequence[Variant], batches: Sequence[Batch], temperatures: Sequence[float]) -> Array:
    """[B, V, T], the predicted sum over the anchors; NaN if a variant does not apply to a batch.

    Sums at ``PASSED`` and ``GRID`` are cached, because all targets need them.
    """
    at, losses = tuple(temperatures), tuple(LOSSES.values())
    found = np.empty((len(batches), len(tried), len(at)))
    for batch, sums in zip(batches, found, strict=True):
        known = _kept_sums(batch, at, losses) if at in (PASSED, GRID) else {}
        evaluations: dict[str, Evaluation | None] = {}
        # Sorted, so that variants that differ only in their form share the costs of their pairs.
        for variant in sorted((one for one in tried if one not in known), key=lambda one: one.pair_parts):
            name = variant.positives
            if name not in evaluations:
                setting = read_as(batch, name)
                evaluations[name] = Evaluation(setting, torch.tensor(at, dtype=torch.float64)) if setting else None
            evaluation = evaluations[name]
            known[variant] = evaluation.anchors(variant).sum(dim=1).numpy() if evaluation else np.nan
        for k, variant in enumerate(tried):
            sums[k] = known[variant]
    return found


@lru_cache(maxsize=1000)
def _kept_sums(batch: Batch, temperatures: tuple[float, ...], losses: tuple[Loss, ...]) -> dict[Variant, Any]:
    return {}


@dataclass(frozen=True)
class Match:
    """A variant, compared with the answers to every ordinary probe.

    Attributes:
        variant: the variant.
        temperatures: the effective temperature for each temperature that is passed (None if none is).
        count: what the sum over the anchors is divided by, a key of ``COUNTS``.
        factor: the factor of the loss for each temperature that is passed (None if none is).
        error: the largest relative error of a value.
        worst: the probe with this error, the expected value, and the returned value.
        distance: relative distance of the vector of all values from the answers.
        vector: whether there is one value per anchor or per pair.
        gradient_error: the largest relative error of a gradient; None if none was compared.
        gradient_factor: further factor of the gradients.
    """

    variant: Variant
    temperatures: Mapping[float | None, float]
    count: str
    factor: Mapping[float | None, float]
    error: float
    worst: tuple[str, float, float]
    distance: float
    vector: bool
    gradient_error: float | None = None
    gradient_factor: float = 1.0

    def as_data(self) -> dict[str, Any]:
        """Return the match as a JSON value for ``from_data``."""
        pairs = {name: [*getattr(self, name).items()] for name in ("temperatures", "factor")}
        return {
            **vars(self),
            **pairs,
            "variant": {one.name: getattr(self.variant, one.name) for one in fields(self.variant)},
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Match:
        """Return the match that ``as_data`` converted."""
        parts = data["variant"]
        variant = Variant(**{**parts, "options": tuple(map(tuple, parts["options"]))})
        pairs = {name: dict(data[name]) for name in ("temperatures", "factor")}
        return cls(**{**data, **pairs, "variant": variant, "worst": tuple(data["worst"])})

    @property
    def plainness(self) -> tuple[int, int]:
        """A sort key, smaller if there is less to report about factor and count."""
        scaled = any(factor != 1 for factor in self.factor.values())
        return scaled + (self.count in WRONG_COUNTS), list(COUNTS).index(self.count)

    @property
    def reduction(self) -> str:
        """The reduction: a key of ``COUNTS``, "none" or "none_pairs"."""
        return {"sum_pairs": "none_pairs"}.get(self.count, "none") if self.vector else self.count

    def words(self) -> list[str]:
        """Return descriptions of the mistakes."""
        of_pairs = self.count == "mean_pairs" and "mean_pairs" not in self.variant.entry.choices["reduction"]
        return self.variant.words() + ["the mean is over the positive pairs, not over the anchors"] * of_pairs

    @property
    def name(self) -> str:
        """The loss, its options and its mistakes, in one line."""
        return self.variant.describe(reduction=self.reduction)

    def predict(self, probe: Probe, policy: str = "zero", rows: Tensor | None = None) -> Tensor | None:
        """[K], the predicted loss. ``rows`` [N, D] replace the embeddings of the batch.

        None if the variant does not apply to the batch, or if the factor at the temperature is unknown.
        """
        setting = POSITIVES[self.variant.positives].change(batch_setting(probe.batch, rows))
        factor = self.factor_for(probe.temperature)
        if setting is None or factor is None:
            return None
        evaluation = Evaluation(setting, self.temperatures.get(probe.temperature, probe.temperature or math.nan))
        return evaluation.loss(self.variant, self.reduction, policy) * factor

    @property
    def digits(self) -> int:
        """The number of digits of a built-in temperature, which is as inaccurate as the answers."""
        return max(math.floor(-math.log10(max(self.error, 1e-8))), 1)

    @property
    def built_in(self) -> float | None:
        """The temperature that is used whatever is passed; None if it depends on the one that is passed."""
        used = [*self.temperatures.values()]
        return used[0] if np.ptp(used) <= CLOSE * used[0] else None

    def always(self, passed: float | None = None) -> str:
        """Return ``built_in`` in digits, or "" if it is None or about ``passed``. Rounding to float32 is undone."""
        used = self.built_in
        if used is None or (passed is not None and math.isclose(used, passed, rel_tol=1e-9)):
            return ""
        short = f"{used:.4g}"
        return short if math.isclose(used, float(short), rel_tol=5e-7) else f"{used:.{self.digits}g}"

    @property
    def as_passed(self) -> bool:
        """Whether the effective temperature is the one that is passed."""
        return all(math.isclose(used, passed or math.nan, rel_tol=1e-12) for passed, used in self.temperatures.items())

    @property
    def scale(self) -> tuple[float, int] | None:
        """(c, p) if the factor is c * temperature^p for the temperatures that were passed; otherwise None."""
        for power in POWERS:
            shares = [factor / (passed or 1.0) ** power for passed, factor in self.factor.items()]
            if np.ptp(shares) <= 1e-6 * abs(shares[0]):
                return shares[0], power
        return None

    def factor_for(self, passed: float | None) -> float | None:
        """Return the factor at a temperature that is passed; None if unknown."""
        if passed is None or passed in self.factor:
            return self.factor[passed]
        return self.scale and self.scale[0] * passed ** self.scale[1]


class Search:
    """The answers of one target, and the variants compared with them.

    Attributes:
        target: the target.
        limit: maximum duration of one call, in seconds.
        unit: whether all rows have norm 1.
        call: the call of the probes.
        bias: the bias of the target; None if unknown.
        passed: the temperatures that are passed; (None,) if the target takes none.
        answers: the answers of the target.
        broken: error messages, by the name of the batch that the target rejected.
        undefined: ordinary batches with NaN or infinity in an answer.
        probes: the probes that are used; ``alike`` is without the batches in ``undefined``.
        batches: ordinary batches (``alike`` and ``further``) with finite answers.
        ordinary: the probes of ``batches``.
        vector: whether the target returns one value per anchor or per pair.
        gives_gradient: whether the target gives any gradient.
        single: whether all values are representable in float32.
        dtype: the narrowest dtype in which all values, or all gradients, are representable.
        close: relative difference up to which values are equal.
        close_gradient: relative difference up to which gradients are equal.
        undetermined: matches that hold at several temperatures.
        claimed: the loss that the target claims to compute; None if unknown.
        used: the known effective temperatures, one for each of ``passed``; empty if they are unknown.

    Raises:
        TargetError: the target accepts no probes.
    """

    def __init__(
        self,
        target: Target,
        limit: float | None = 60.0,
        *,
        unit: bool = False,
        bias: float | None = None,
        claimed: Variant | None = None,
        temperature: float | None = None,
    ) -> None:
        self.target, self.limit, self.unit = target, limit, unit
        self.bias = target.trial_keywords.get("bias", bias)
        self.call = target.probed_as
        self.passed: tuple[float | None, ...] = PASSED if target.takes_temperature else (None,)
        self.claimed, built_in = claimed, () if temperature is None else (temperature,)
        self.used: tuple[float, ...] = PASSED if target.takes_temperature else built_in
        self.answers: dict[Probe, Answer] = {}
        self.undetermined: list[Match] = []
        probes = self.probes = self._choose()
        self.broken = {x.name: error for x in (*probes.further, *probes.edges) if (error := self.ask([x], self.passed))}
        accepted = [batch for batch in (*probes.alike, *probes.further) if batch.name not in self.broken]
        self.undefined = [batch for batch in accepted if not np.isfinite(self.given([batch], self.passed)).all()]
        self.batches = [batch for batch in accepted if batch not in self.undefined]
        self.probes = replace(probes, alike=[batch for batch in probes.alike if batch not in self.undefined])
        self.ordinary = [probe for probe in self.answers if probe.batch in self.batches]
        self.vector = any(len(self.answers[probe].values) > 1 for probe in self.ordinary)
        self.gives_gradient = any(answer.gradient is not None for answer in self.answers.values())
        self.single = all(answer.single for answer in self.answers.values())
        self.dtype = _dtype_of(self.answers.values()) if self.single else "float64"
        self.close = CLOSE_HALF.get(self.dtype, CLOSE_SINGLE if self.single else CLOSE)
        self.close_gradient = self.close * (10 if self.dtype in CLOSE_HALF else 1)

    @cached_property
    def unusable(self) -> str:
        """Why no loss can be identified from the answers, or ""."""
        totals = [self.answers[probe].total for probe in self.ordinary]
        if len(self.probes.alike) < 2:
            every = "" if self.batches else "every batch"
            names = ", ".join(batch.name for batch in self.undefined)
            return f"it returns NaN or infinity for {every or names}"
        if len(set(totals)) == 1:
            return f"it returns {totals[0]:g} for every batch"
        first = self.ordinary[0]
        if failure := self.ask([first.batch], [first.temperature]):
            return f"it fails when it is called with the same batch again: {failure}"
        again = self.answers[first].total
        if relative(totals[0], again) > self.close:
            new = ", or a new instance is random" if self.target.constructs else ""
            return f"it returns {totals[0]:.6g} and {again:.6g} for the same batch: it is random, or keeps state{new}"
        return ""

    def _choose(self) -> Probes:
        """Return the first probes that the target accepts."""
        failures = []
        for probes in (probes for probes in PROBES if probes.call == self.call):
            probes = _with_unit_rows(probes) if self.unit else probes
            failures.append(self.ask(probes.alike, self.passed))
            if not failures[-1]:
                return probes
        raise TargetError(f"it cannot be called with any probe: {'; '.join(dict.fromkeys(failures))}")

    def ask(self, batches: Iterable[Batch], passed: Sequence[float | None]) -> str:
        """Call the target and store its answers. Return the first error, or ""."""
        try:
            for probe in (Probe(batch, at) for batch in batches for at in passed):
                self.answers[probe] = call_with(self.target, probe, self.limit)
        except TargetError as error:
            return str(error)
        return ""

    def given(self, batches: Iterable[Batch], passed: Iterable[float | None]) -> Array:
        """[B, 1, P], the sum of the returned values for each of B batches and P passed temperatures."""
        return np.array([[[self.answers[Probe(batch, at)].total for at in passed]] for batch in batches])

    def fitting(self, matches: Iterable[Match]) -> list[Match]:
        """Return the matches that reproduce the answers."""
        return [match for match in matches if match.error <= self.close]

    # Candidates

    def matches(self, levels: int = 4) -> list[Match]:
        """Return near matches among the first of ``_levels``; ``fitting`` selects those that fit.

        Variants with one mistake are tried if no correct variant fits exactly, and variants with two mistakes if no
        other variant fits.
        """
        near: list[Match] = []
        for level, tried in enumerate(islice(_levels(self.call, self.bias, self.claimed), levels)):
            tried = [*tried, *_with_two_epsilons(near)] if level == 1 else tried
            if self.used:
                tempered = [wrong for variant in tried for wrong in temperings(variant)] if level == 0 else []
                near += self._as_passed([*tried, *tempered])
            if not self.used or (level == 0 and not self.fitting(near)):
                near += self._solved(tried)
            if level == 0 and self.call == VIEWS and not self.fitting(near):
                near += self._weighted()
            good = self.fitting(near)
            # Before a close but inexact match is accepted, try one mistake, such as an epsilon.
            if good and (level > 0 or min(match.error for match in good) < EXACT or self.single):
                break
        return near

    def _weighted(self) -> Iterator[Match]:
        """Yield matches with different weights of the two directions of a loss of two towers."""
        batches, first = self.probes.alike, self.passed[0]
        for variant in known_losses(self.call, self.bias):
            if "direction_weights" not in variant.entry.keywords or dict(variant.options).get("direction"):
                continue
            sides = [replace(variant, positives=f"{variant.positives} {side}") for side in ("a_to_b", "b_to_a")]

            def off(at: Sequence[float], sides: Sequence[Variant] = sides) -> Array:
                """Return a determinant of three batches, which is 0 if the answers are weighted sums of the sides."""
                a, b = totals(sides, batches[:3], at).transpose(1, 2, 0)
                return np.asarray(np.cross(a, b) @ self.given(batches[:3], [first])[:, 0, 0])

            solved = [first]
            if first is None and len(batches) > 2:
                found = off(GRID)
                places = np.nonzero(np.sign(found[:-1]) * np.sign(found[1:]) <= 0)[0]
                roots = (crossing(lambda at: float(off([at])[0]), *GRID[place : place + 2]) for place in places)
                solved = list(filter(None, roots))
            for at in filter(None, solved):
                temperatures = {passed: passed or at for passed in self.passed}
                numbers = np.array([[len(batch.embeddings) / 2] for batch in batches])
                columns = totals(sides, batches, [at])[:, :, 0] / numbers
                (a, b), *_ = np.linalg.lstsq(columns, self.given(batches, [first])[:, 0, 0], rcond=None)
                if a * b > 0:
                    share = a / (a + b)
                    simple = float(Fraction(share).limit_denominator(20))
                    share = simple if math.isclose(share, simple, rel_tol=1e-6) else float(share)
                    share = round(share, 2) if self.dtype in CLOSE_HALF else share
                    weights = "direction_weights", (round(share, 6), round(1 - share, 6))
                    weighted = replace(variant, share=share, options=(*variant.options, weights))
                    yield from self.explain(weighted, temperatures)

    def _as_passed(self, tried: Sequence[Variant]) -> Iterator[Match]:
        """Yield matches in which the effective temperature is the one that is passed or known."""
        first, *inner, last = self.probes.alike
        for batches, most in (((first, last), SHORTLIST), ((first, last, *inner), REFINED)):
            off = disproportion(totals(tried, batches, self.used), self.given(batches, self.passed)).max(axis=1)
            tried = [tried[k] for k in np.argsort(off.round(TIED), kind="stable")[:most].tolist()]
        for variant in tried:
            yield from self.explain(variant, dict(zip(self.passed, self.used, strict=True)))

    def _solved(self, tried: Sequence[Variant]) -> Iterator[Match]:
        """Yield matches with an effective temperature that is recovered from the answers.

        Matches that also fit at another temperature are stored in ``undetermined`` instead. For example, the
        temperature is only a factor of the value if exponentials saturate.
        """
        first, *others = self.passed
        for variant, at in self.crossings(tried, first):
            solved = {first: at}
            for passed in others:
                solved.update((passed, at) for _, at in self.crossings([variant], passed)[:1])
            for match in self.explain(variant, solved):
                elsewhere = ({passed: share * at for passed, at in solved.items()} for share in ANOTHER)
                if self.fitting([match]) and any(self.fitting(self.explain(variant, at)) for at in elsewhere):
                    self.undetermined.append(match)
                else:
                    yield match

    @np.errstate(all="ignore")
    def crossings(self, tried: Sequence[Variant], passed: float | None) -> list[tuple[Variant, float]]:
        """Return variants that may explain the answers, each with its temperature, best first.

        For two probes a and b of the same structure, let V be the values of the variant, and t those of the target. If
        t is a multiple of V, then V_a t_b - V_b t_a = 0. This difference is evaluated on the grid for the first and the
        last probe. Where it crosses 0, the values for the other probes must be near, too.
        """
        ends = self.probes.alike[0], self.probes.alike[-1]
        given, (low, high) = self.given(self.probes.alike, [passed])[:, :, 0], totals(tried, ends, GRID)
        off = (low * given[-1] - high * given[0]) / np.maximum(np.abs(low), np.abs(high))
        k, j = np.nonzero(np.sign(off[:, :-1]) * np.sign(off[:, 1:]) <= 0)
        crossed, at = np.unique(k, return_inverse=True)
        values = totals([tried[one] for one in crossed.tolist()], self.probes.alike, GRID)
        share = np.nan_to_num(off[k, j] / (off[k, j] - off[k, j + 1]))
        away = disproportion(values[:, at, j] + share * (values[:, at, j + 1] - values[:, at, j]), given)
        wrong = np.array([len(tried[one].words()) for one in crossed.tolist()], dtype=int)
        order = np.lexsort((k, (away * (1 + wrong[at])).round(TIED)))

        def difference(variant: Variant, temperature: float) -> float:
            one, two = totals([variant], ends, [temperature])[:, 0, 0]
            return float(one * given[-1, 0] - two * given[0, 0])

        found = [(tried[k[place]], j[place]) for place in order[away[order] < NEAR][:REFINED]]
        roots = [(variant, crossing(partial(difference, variant), *GRID[left : left + 2])) for variant, left in found]
        return [(variant, at) for variant, at in roots if at is not None]

    # Explanations

    @np.errstate(all="ignore")
    def explain(self, variant: Variant, temperatures: Mapping[float | None, float]) -> list[Match]:
        """Compare a variant at these temperatures with every ordinary probe.

        Returns:
            At most one match: the plainest that fits; otherwise the nearest. The list is empty if a temperature is
            missing, if the variant does not apply to the probes, or if an epsilon improves the match too little.
        """
        settings = {batch: setting for batch in self.batches if (setting := read_as(batch, variant.positives))}
        at = [temperatures.get(passed, math.nan) for passed in self.passed]
        value, given = totals([variant], list(settings), at)[:, 0], self.given(settings, self.passed)[:, 0]
        matches = []
        counts = [count for count in COUNTS if variant.form in ("sum", "sigmoid") or count != "mean_pairs"]
        counts.remove("sum_pairs")  # found as the sum of a variant that sums over the pairs
        for count in ["sum"] if variant.form == "pooled" else counts:
            number = np.array([[_number(setting, count, variant.form)] for setting in settings.values()])
            number = number * variant.mean_of(count)
            usable = (value != 0) & np.isfinite(value) & (number > 0)
            if not usable.any(axis=0).all():
                continue
            columns = zip(self.passed, (given * number / value).T, usable.T, strict=True)
            factor = {passed: _rounded(median(ratios[kept].tolist()), self.close) for passed, ratios, kept in columns}
            expected = value * list(factor.values()) / np.maximum(number, 1)
            errors = relative(expected[..., None], given[..., None])
            # Of the errors that equal the largest apart from rounding, the first is named.
            largest = float(errors.max())
            p, b = np.argwhere((1 - TIE) * largest <= errors.T)[0]
            worst = Probe(list(settings)[b], self.passed[p]).name, float(expected[b, p]), float(given[b, p])
            distance = math.hypot(*(expected - given).flat) / max(math.hypot(*given.flat), 1e-150)
            of_pairs = count in ("mean_pairs", self._sum_over_pairs(variant, settings)) and variant.form == "sum"
            found, error = replace(variant, form="mean") if of_pairs else variant, largest
            named = "sum_pairs" if count == self._sum_over_pairs(variant, settings) else count
            matches.append(Match(found, temperatures, named, factor, error, worst, distance, self.vector))
        fitting = sorted(self.fitting(matches), key=lambda match: match.plainness)
        if fitting and self.inexactness(fitting[0]) and words_of(variant.guard) in variant.words():
            # One epsilon must reduce the error much; two must explain the whole error.
            without = [] if variant.guard in TWO_GUARDS else self.explain(replace(variant, guard=""), temperatures)
            matches = fitting = fitting * any(match.error >= LEAST_GAIN * fitting[0].error for match in without)
        return (fitting or ranked(matches, lambda match: match.error))[:1]

    def _sum_over_pairs(self, variant: Variant, settings: Mapping[Batch, Setting]) -> str:
        """Return "sum" if the count "sum" is a sum over pairs for this variant, else ""."""
        if "sum_pairs" not in variant.entry.choices["reduction"]:
            return ""
        if variant.form == "sum":
            return "sum"
        # For "sigmoid", both sums are equal, so only the number of returned values shows which one it is.
        returned = [len(self.answers[Probe(batch, self.passed[0])].values) for batch in settings]
        pairs = [int(COUNTS[ALL_PAIRS](setting)) for setting in settings.values()]
        return "sum" if self.vector and variant.form == "sigmoid" and returned == pairs else ""

    def tolerance_of_gradient(self, match: Match) -> float:
        """Return the relative difference up to which gradients are equal.

        Products in 16 bits have a larger tolerance, because their gradients are rounded in an unknown order. So do
        inexact matches, because a missing epsilon may change gradients more than values.
        """
        dtype, _ = ROUNDED.get(match.variant.similarity, ("", False))
        return max(self.close_gradient, 10 * CLOSE_HALF.get(dtype, 0.0), CLEARLY * self.inexactness(match))

    def inexactness(self, match: Match) -> float:
        """Return the error of a match, or 0 if the error may come from rounding."""
        return 0.0 if self.single or match.error <= EXACT else match.error

    def with_gradient(self, match: Match) -> Match:
        """Return the match with its ``gradient_error``, and with the flow or factor that explains the gradient."""
        error, factor = self._compare_gradient(match)
        flows = (replace(match, variant=replace(match.variant, flow=flow)) for flow in FLOWS)
        for other in (*flows, replace(match, gradient_factor=factor)):
            off, _ = self._compare_gradient(other)
            if off is not None and off <= self.tolerance_of_gradient(other):
                return replace(other, gradient_error=off)
        return replace(match, gradient_error=error)

    def _compare_gradient(self, match: Match) -> tuple[float | None, float]:
        """Return the largest relative error of a finite gradient (None without gradients), and the median factor."""
        errors, ratios = [], []
        for probe in self.ordinary:
            given, embeddings = self.answers[probe].gradient, probe.batch.embeddings
            # With duplicate rows, the derivative of a maximum is not unique.
            shared_maximum = match.variant.guard and len(torch.unique(embeddings, dim=0)) < len(embeddings)
            rows = embeddings.clone().requires_grad_()
            value = None if given is None or shared_maximum else match.predict(probe, rows=rows)
            if given is None or value is None:
                continue
            expected = torch.autograd.grad(value.sum(), rows)[0] * match.gradient_factor
            if self.unit:
                # The caller normalises the rows, so the gradient along a row has no effect.
                given, expected = (g - (g * embeddings).sum(1, keepdim=True) * embeddings for g in (given, expected))
            given, expected = given.flatten(), expected.flatten()
            if bool((given + expected).isfinite().all()):
                # A gradient below this norm consists of rounding errors.
                nothing = 1e-12 * abs(self.answers[probe].total) / float(embeddings.norm())
                errors.append(float(relative(expected, given, nothing)))
                ratios.append(float(given @ expected / (expected @ expected)))
        return max(errors, default=None), _rounded(np.median(ratios or 1), self.close)

    def preferred(self, matches: Iterable[Match]) -> list[Match]:
        """Return the matches that fit, with their gradients; the preferred one comes first."""
        good = self.fitting(matches)
        closest = min((match.error for match in good), default=0.0)
        near = [self.with_gradient(match) for match in good if match.error <= max(closest * CLEARLY, 1e-12)]
        return sorted(near, key=self._preference)

    def _preference(self, match: Match) -> tuple[Any, ...]:
        """Return a sort key; the preferred match has the smallest key."""
        gradient = match.gradient_error is not None and match.gradient_error > self.tolerance_of_gradient(match)
        loss, (scaled, place) = match.variant.entry, match.plainness
        # Without labels, a loss of partners is the simplest description.
        unlabelled = self.call == FEATURES and self.probes.alike[0].labels is None
        other_way = not (unlabelled and loss.positives_by == "partners")
        # For the same pairs, info_nce needs fewer options than multiple_negatives_ranking.
        options = dict(match.variant.options).keys() - {"direction"}
        tail = len(options), list(LOSSES).index(loss.name), place
        return gradient, len(match.words()), scaled, other_way, *tail


class Searched(NamedTuple):
    """The result of a search.

    Attributes:
        search: the answers of the target; None if it accepts no probes.
        near: the nearest matches.
        fitting: the matches that reproduce the answers; the preferred one comes first.
    """

    search: Search | None = None
    near: Sequence[Match] = ()
    fitting: Sequence[Match] = ()


def searched(called: Target, limit: float | None, *, normalised: bool, **known: Any) -> Searched:
    """Search with rows of different norms. If nothing fits and the norms matter, search with rows of norm 1.

    Args:
        called: the target.
        limit: maximum duration of one call, in seconds; None for no limit.
        normalised: whether only rows of norm 1 are passed.
        known: ``bias``, ``claimed`` and ``temperature`` of ``Search``.

    Raises:
        TargetError: the target accepts no probes.
    """
    found, refused = None, list[TargetError]()
    near: list[Match] = []
    for unit in (True,) if normalised else (False, True):
        try:
            search = Search(called, limit, unit=unit, **known)
        except TargetError as error:
            refused.append(error)
            continue
        other = found is None or _depends_on_norms(found, search)
        # So many variants are tried last that some would fit answers in 16 bits by chance.
        levels = (3 if search.dtype in CLOSE_HALF else 4) if unit == normalised else 2
        tried = search.matches(levels) if other and not search.unusable else []
        fits = bool(search.fitting(tried))
        if found is None or fits:
            found, near = search, tried
        if fits or (search.unusable and not search.undefined):
            break
    if found is None:
        words = "; ".join(called.notes)
        raise type(refused[0])(f"{refused[0]} ({words})" if words else str(refused[0])) from refused[0]
    return Searched(found, near, found.preferred(near))


def _depends_on_norms(first: Search, second: Search) -> bool:
    if not first.batches:
        return True
    names = [probe.name for probe in first.ordinary]
    found = ({probe.name: search.answers[probe].total for probe in search.answers} for search in (first, second))
    raw, unit = (np.array([totals.get(name, math.nan) for name in names]) for totals in found)
    return bool(relative(raw, unit) > first.close)


def _dtype_of(answers: Iterable[Answer]) -> str:
    """Return the narrowest dtype that represents all finite values, or all finite gradients."""
    answers = list(answers)
    gradients = [answer.gradient.flatten() for answer in answers if answer.gradient is not None]
    results = [torch.cat(x) for x in ([answer.values for answer in answers], gradients) if x]
    results = [found for x in results if len(found := x[x.isfinite() & (x != 0)]) > 2]
    for name in CLOSE_HALF:
        if any(bool((x.to(getattr(torch, name)).double() == x).all()) for x in results):
            return name
    return "float32"


def crossing(function: Callable[[float], float], low: float, high: float) -> float | None:
    """Return the temperature between ``low`` and ``high`` at which a function crosses 0; None if none is found."""
    from scipy.optimize import brentq  # imported here because it takes as long as importing pairproof

    ends = math.log(low) - 1e-9, math.log(high) + 1e-9
    try:
        return math.exp(float(brentq(lambda logarithm: function(math.exp(logarithm)), *ends, xtol=1e-15, rtol=1e-14)))
    except (ValueError, RuntimeError):
        return None


@np.errstate(all="ignore")
def disproportion(values: Array, given: Array) -> Array:
    """Return the relative distance of ``given`` [B, ...] from multiples of ``values``; infinity in place of NaN."""
    values, given = (x / np.abs(x).max(axis=0) for x in (values, given))
    values, given = (x / np.linalg.norm(x, axis=0) for x in (values, given))
    away = np.linalg.norm((values * given).sum(axis=0) * values - given, axis=0)
    return np.where(np.isfinite(away), away, math.inf)


@np.errstate(all="ignore")
def relative(expected: Any, given: Any, floor: float = 0.0) -> Array:
    """Return the distance of vectors [..., K], relative to the larger norm.

    The distance is 0 if the vectors are equal (NaN equals NaN) or if no norm exceeds ``floor``. Otherwise, a non-finite
    vector gives infinity.
    """
    expected, given = np.atleast_1d(expected), np.atleast_1d(given)
    same = ((expected == given) | (np.isnan(expected) & np.isnan(given))).all(axis=-1)
    size = np.maximum(np.linalg.norm(expected, axis=-1), np.linalg.norm(given, axis=-1))
    away = np.linalg.norm(expected - given, axis=-1) / size
    return np.where(same | (size <= floor), 0.0, np.where(np.isnan(away), math.inf, away))


def _rounded(factor: Any, close: float) -> float:
    """Replace a factor by a simple number that is equal up to rounding."""
    simple = (1.0, 2.0, 0.5, -1.0, 4.0, 0.25)
    return next((number for number in simple if math.isclose(factor, number, rel_tol=close)), float(factor))
