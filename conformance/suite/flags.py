"""For each flag of a golden case, the condition that the case must meet."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from pairproof.reference.hard_negative import log_masses

from .cases import Case, once, row_norms, unit_rows
from .catalogue import WEIGHTS
from .records import Matrix


class Facts:
    """The properties of a case that conditions use. They are computed when they are used."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.given: dict[str, Any] = {**case.arguments, **case.others, **case.keywords}
        """The arguments, the matrices except the first, and the keywords of the case, by name."""

    @cached_property
    def members(self) -> list[int]:
        """For every row, the number of columns that it is contrasted with."""
        return self.case.member_counts()

    @cached_property
    def positives(self) -> list[int]:
        """For every row, the number of its positives."""
        return self.case.positive_counts()

    @cached_property
    def negatives(self) -> list[int]:
        """For every row, the number of its negatives."""
        return [m - p for m, p in zip(self.members, self.positives, strict=True)]

    @cached_property
    def rows(self) -> Matrix:
        """The rows of all matrices, concatenated."""
        return np.concatenate(list(self.case.matrices.values())) + 0.0

    @cached_property
    def norms(self) -> list[float]:
        """The norm of each of ``rows``."""
        found: list[float] = row_norms(self.rows).tolist()
        return found

    @cached_property
    def longest(self) -> float:
        """The largest norm."""
        return max(self.norms)

    @cached_property
    def shortest(self) -> float:
        """The smallest norm of a row that is not zero; 0 if all rows are zero."""
        return min((x for x in self.norms if x), default=0.0)

    @cached_property
    def anchors(self) -> list[int]:
        """The rows that are anchors."""
        return self.case.anchors()

    @cached_property
    def first_views(self) -> list[list[int]]:
        """The rows of the first view, if the batch has two, three or four views.

        One entry per possible number of views and layout (stacked, interleaved).
        """
        n = self.case.n
        counts = [views for views in (2, 3, 4) if n % views == 0]
        return [list(rows) for v in counts for rows in (range(n // v), range(0, n, v))]

    @cached_property
    def mutual(self) -> bool:
        """Whether the mask of positives is square and symmetric."""
        mask = self.case.positive_array()
        return mask.shape[0] == mask.shape[1] and np.array_equal(mask, mask.T)

    @cached_property
    def labels(self) -> list[int]:
        """The labels of rows and references, or a single 0."""
        return [*self.given.get("labels", [0]), *self.given.get("ref_labels", [])]

    @cached_property
    def farthest_positive(self) -> Matrix:
        """For every row, the smallest logit of a positive; infinity for a row without positives."""
        return np.asarray(self._logits_where(self.case.positive_array(), math.inf).min(axis=1))

    @cached_property
    def nearest_negative(self) -> Matrix:
        """For every row, the largest logit of a negative; minus infinity for a row without negatives."""
        return np.asarray(self._logits_where(~self.case.positive_array(), -math.inf).max(axis=1))

    @cached_property
    def margins(self) -> Matrix:
        """For every row, the smallest logit of a positive minus the logsumexp of the logits of the negatives."""
        negatives = self._logits_where(~self.case.positive_array(), -math.inf)
        return np.asarray(self.farthest_positive - np.logaddexp.reduce(negatives, axis=1))

    def _logits_where(self, pairs: Any, elsewhere: float) -> Matrix:
        return np.where(pairs & self.case.member_array(), _logits(self.case), elsewhere)


Condition = tuple[str, Callable[[Facts], Any]]


def _repeats(rows: Any) -> bool:
    return len(np.unique(rows, axis=0)) < len(rows)


def _given(name: str) -> Condition:
    return f"{name} is given", lambda facts: facts.given.get(name) is not None


_WITHOUT_POSITIVE: Condition = ("a row has no positive", lambda facts: 0 in facts.positives)
_NO_PAIRS: Condition = ("no row has a positive", lambda facts: not any(facts.positives))
_UNEQUAL: Condition = ("numbers of positives differ", lambda facts: len(set(facts.positives)) > 1)
_PAIRED: Condition = ("every row has a positive and a negative", lambda facts: all(facts.positives + facts.negatives))
_ONE_ROW: Condition = ("there is one row", lambda facts: facts.case.n == 1)

CONDITIONS: Mapping[str, Condition] = {
    "every-anchor-paired": _PAIRED,
    "agreement": ("every row has one positive", lambda facts: set(facts.positives) == {1}),
    "lonely-anchors": _WITHOUT_POSITIVE,
    "no-positive": _WITHOUT_POSITIVE,
    "all-distinct": _NO_PAIRS,
    "empty-positive-pairs": _NO_PAIRS,
    "one-class": ("no row has a negative", lambda facts: not any(facts.negatives)),
    "asymmetric-mask": ("positives are not mutual", lambda facts: not facts.mutual),
    "directed-pairs": ("positives are not mutual", lambda facts: not facts.mutual),
    "rows-without-negatives": ("a row has no negative", lambda facts: 0 in facts.negatives),
    "one-negative": ("every row has one negative", lambda facts: set(facts.negatives) == {1}),
    "unbalanced-classes": _UNEQUAL,
    "unequal-positives": _UNEQUAL,
    "two-positives": ("a row has two or more positives", lambda facts: max(facts.positives) > 1),
    "nothing-left": ("a row is contrasted with no column", lambda facts: 0 in facts.members),
    "diagonal-true": ("a row is given as its own positive", lambda facts: facts.case.positive_array().diagonal().any()),
    "repeated-pairs": ("a pair is given twice", lambda facts: _repeats(facts.given["positive_pairs"])),
    "first-view-anchors": (
        "the rows of the first of several views are the anchors",
        lambda facts: any(facts.anchors == first for first in facts.first_views),
    ),
    "anchor-subset": ("some rows are not anchors", lambda facts: not all(facts.given.get("anchors") or [True])),
    "no-anchors": (
        'there is no anchor, or no_positive="drop" leaves out all of them',
        lambda facts: not facts.case.counted(),
    ),
    "one-row": _ONE_ROW,
    "one-pair": _ONE_ROW,
    "two-rows": ("there are two rows", lambda facts: facts.case.n == 2),
    "odd-batch": ("the number of rows is odd", lambda facts: facts.case.n % 2 == 1),
    "training-size": (
        "there are at least 128 rows of at least 64 numbers",
        lambda facts: facts.case.n >= 128 and facts.case.embeddings.shape[1] >= 64,
    ),
    "many-columns": ("a row is contrasted with more than 512 columns", lambda facts: max(facts.members) > 512),
    "large-batch": ("there are 256 rows or more", lambda facts: facts.case.n >= 256),
    "one-dimension": ("rows have one entry", lambda facts: facts.rows.shape[1] == 1),
    "duplicate-embeddings": ("two rows are equal", lambda facts: _repeats(facts.rows)),
    "identical-embeddings": ("all rows are equal", lambda facts: (facts.rows == facts.rows[0]).all()),
    "self-similarity-dominates": (
        "the largest product of every row is the one with itself",
        lambda facts: ((facts.rows @ facts.rows.T).argmax(axis=1) == np.arange(len(facts.rows))).all(),
    ),
    "mixed-norms": (
        "the norms of two nonzero rows differ by a factor of 2 or more",
        lambda facts: facts.longest >= 2 * facts.shortest,
    ),
    "tiny-norms": ("the norm of a nonzero row is below 2^-8", lambda facts: facts.shortest < 2.0**-8),
    "huge-norms": ("a norm is 2^8 or more", lambda facts: facts.longest >= 2.0**8),
    "antipodal-embeddings": (
        "two rows are opposite, or a row is zero",
        lambda facts: not {row.tobytes() for row in facts.rows}.isdisjoint(row.tobytes() for row in 0.0 - facts.rows),
    ),
    "orthogonal-embeddings": (
        "two rows are orthogonal, or a row is zero",
        lambda facts: (facts.rows @ facts.rows.T == 0).any(),
    ),
    "zero-row": ("a row is zero", lambda facts: 0 in facts.norms),
    "unit-rows": ("every row has norm 1", lambda facts: set(facts.norms) == {1.0}),
    "full-significand": (
        "an entry has more than 8 significant bits",
        lambda facts: (np.frexp(facts.rows)[0] * 256 % 1).any(),
    ),
    "labels-negative": ("a label is negative", lambda facts: min(facts.labels) < 0),
    "base-temperature": _given("base_temperature"),
    "labels-huge": ("the magnitude of a label is 2^24 or more", lambda facts: max(map(abs, facts.labels)) >= 2**24),
    "low-temperature": (
        "the temperature is below 0.0125, so that logits may exceed 80",
        lambda facts: facts.case.temperature < 1 / 80,
    ),
    "similarity": _given("similarity"),
    "high-temperature": ("the temperature is 1 or more", lambda facts: facts.case.temperature >= 1),
    "denominator": _given("denominator"),
    "inside-reduction": _given("inside_reduction"),
    "references": _given("ref_embeddings"),
    "self-rows": _given("self_rows"),
    "ignored-pairs": _given("ignored"),
    "ignored-ids": _given("ignored_ids"),
    "positive-weights": _given("positive_weights"),
    "negative-weights": _given("negative_weights"),
    "anchor-weights": _given("anchor_weights"),
    "zero-weights": ("a weight is 0", lambda facts: any(0 in np.array(facts.given.get(name, 1)) for name in WEIGHTS)),
    "one-reference": ("there is one reference", lambda facts: len(facts.given["ref_embeddings"]) == 1),
    "own-copy": ("two rows are equal, among the batch and its references", lambda facts: _repeats(facts.rows)),
    "rectangular": ("the similarity matrix is not square", lambda facts: len(set(facts.case.shape)) > 1),
    "two-towers": ("there are two towers", lambda facts: facts.case.entry.two_towers),
    "equal-towers": (
        "the towers are equal",
        lambda facts: np.array_equal(facts.case.embeddings, facts.given["embeddings_b"]),
    ),
    "queue": _given("negatives"),
    "direction-weights": _given("direction_weights"),
    "own-key-in-queue": ("two rows are equal, among the towers and the negatives", lambda facts: _repeats(facts.rows)),
    "hard-negative": (
        "a negative is at least as close to its anchor as a positive",
        lambda facts: (facts.farthest_positive <= facts.nearest_negative + 1e-9).any(),
    ),
    "loss-rounds-to-0": (
        "each anchor has one positive; the sum of its negatives' exponentials, divided by the positive's, is below 2^-8"
        " for every anchor and above 2^-20 for some anchor",
        lambda facts: {*facts.positives} == {1} and 8 < (facts.margins / math.log(2)).min() < 20,
    ),
    "scale-at-the-clamp": ("the temperature is 0.01 or less", lambda facts: facts.case.temperature <= 0.01),
    "copy-of-the-positive": (
        "a negative of an anchor equals its positive",
        lambda facts: _repeats_a_positive(facts.case),
    ),
    "thousand-classes": (
        "labels are from 0 to 999, and two of them are equal when rounded to bfloat16",
        lambda facts: min(facts.labels) >= 0 and max(facts.labels) <= 999 and _collide_in_bfloat16(facts.labels),
    ),
    "hard-negatives": _given("hard_negatives"),
    "directions": _given("directions"),
    "hardness": ("beta or hardness_mode is given", lambda facts: {"beta", "hardness_mode"} & {*facts.case.keywords}),
    "hidden-positives": _given("tau_plus"),
    "mass-floor": ("a mass of negatives is below its floor", lambda facts: _is_floored(facts.case)),
    "weighted-positives": _given("sigma"),
    "differentiated-weights": _given("detach_weights"),
}
"""For each flag, the condition in words and as a function. Other flags are not checked."""


def _holds(facts: Facts, flag: str) -> bool:
    try:
        return bool(CONDITIONS[flag][1](facts)) if flag in CONDITIONS else True
    except KeyError:  # the condition refers to an argument that the case does not have
        return False


@once
def _facts(case: Case) -> Facts:
    return Facts(case)


def true_flags(case: Case) -> tuple[str, ...]:
    """Return the flags of ``CONDITIONS`` whose condition the case meets."""
    facts = _facts(case)
    return tuple(flag for flag in CONDITIONS if _holds(facts, flag))


def first_untrue(case: Case, flags: Sequence[str]) -> str | None:
    """Return a message about the first flag whose condition the case does not meet, or None."""
    facts = _facts(case)
    untrue = next((flag for flag in flags if not _holds(facts, flag)), None)
    return untrue and f"{case.id}: the flag {untrue!r} needs a case in which {CONDITIONS[untrue][0]}"


def saturated(case: Case) -> bool:
    """Return whether a positive's exponential is below 2^-53 max(1, largest exponential of the row).

    The flag "saturated" has no condition, because it also marks less extreme cases.
    """
    logits, members = _logits(case), case.member_array()
    largest = np.where(members, np.maximum(logits, 0.0), 0.0).max(axis=1, keepdims=True)
    return bool((members & case.positive_array() & (largest - logits > 53 * math.log(2))).any())


def strains_float32(case: Case) -> bool:
    """Return whether exponentials of the logits may leave the range of float32 at an ordinary temperature.

    At temperatures below 0.02254, e^(2/temperature) overflows float32. Exponentials can still be computed without
    subtracting a maximum if all logits are below 80, and if an anchor's logits are within 60 of its largest positive's.
    """
    if 2 / case.temperature <= math.log(float(np.finfo(np.float32).max)):
        return False
    logits, member = _logits(case), case.member_array()
    largest = np.where(member & case.positive_array(), logits, -math.inf).max(axis=1, keepdims=True)
    anchors = case.anchors()
    far = member & (abs(logits - largest) > 60) & np.isfinite(largest)
    return bool((member & (logits >= 80))[anchors].any() or far[anchors].any())


def _repeats_a_positive(case: Case) -> bool:
    """Return whether an anchor has a negative that equals one of its positives."""
    positive, member, known = case.positive_array(), case.member_array(), dict[bytes, int]()
    names = {
        name: [known.setdefault((row + 0.0).tobytes(), len(known)) for row in matrix]
        for name, matrix in case.matrices.items()
    }
    columns = np.full(case.shape, -1)
    for block in case.blocks():
        columns[block.part] = names[block.right]
    return any(
        np.isin(columns[i, member[i] & positive[i]], columns[i, member[i] & ~positive[i]]).any() for i in case.anchors()
    )


def _collide_in_bfloat16(labels: Sequence[int]) -> bool:
    """Return whether two labels from 0 to 999 are equal when rounded to bfloat16 (8 significant bits)."""
    steps = [2.0 ** max(0, label.bit_length() - 8) for label in labels]
    return len({round(label / step) * step for label, step in zip(labels, steps, strict=True)}) < len({*labels})


def _is_floored(case: Case) -> bool:
    """Return whether an anchor's mass of negatives (see ``hard_negative_loss``) is below its floor."""
    if not case.lowest:
        return False
    logits, members, positives = _logits(case).tolist(), case.members(), case.positives()
    for i in case.anchors():
        (p,) = positives[i]
        negatives = [k for k in members[i] if k != p]
        if negatives:
            mass, floor = log_masses(logits[i], p, negatives, **case.lowest, **case.formula_options())
            if mass is None or mass < floor:
                return True
    return False


@once
def _logits(case: Case) -> Matrix:
    rows = case.matrices
    if case.option("similarity") == "cosine":
        rows = {name: unit_rows(z) for name, z in rows.items()}
    logits = np.zeros(case.shape)
    for block in case.blocks():
        logits[block.part] = rows[block.left] @ rows[block.right].T / case.temperature
    return logits
