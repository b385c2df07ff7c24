"""The flags of golden cases that can be computed from a case, each with the condition that the case must meet."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from .cases import Case


class Facts:
    """The properties of a case that conditions refer to, each computed once.

    Attributes:
        case: the case.
    """

    def __init__(self, case: Case) -> None:
        self.case = case

    @cached_property
    def members(self) -> list[int]:
        """The number of columns that every row is contrasted with."""
        return [len(columns) for columns in self.case.members()]

    @cached_property
    def positives(self) -> list[int]:
        """The number of positives of every row."""
        return [len(columns) for columns in self.case.positives()]

    @cached_property
    def negatives(self) -> list[int]:
        """The number of negatives of every row."""
        return [members - positives for members, positives in zip(self.members, self.positives, strict=True)]

    @cached_property
    def rows(self) -> Any:
        """The rows of every matrix."""
        return np.concatenate(list(self.case.matrices.values())) + 0.0

    @cached_property
    def norms(self) -> list[float]:
        """The norm of each of those rows."""
        return [math.hypot(*row) for row in self.rows]

    @cached_property
    def repeats(self) -> bool:
        """Whether two rows are equal."""
        return len(np.unique(self.rows, axis=0)) < len(self.rows)

    def given(self, name: str) -> Any:
        """An argument or a keyword, or None."""
        return {**self.case.arguments, **self.case.others, **self.case.keywords}.get(name)


CONDITIONS: Mapping[str, tuple[str, Callable[[Facts], bool]]] = MappingProxyType(
    {
        "every-anchor-paired": (
            "every row has a positive and a negative",
            lambda facts: min(facts.positives) > 0 and min(facts.negatives) > 0,
        ),
        "agreement": ("every row has one positive", lambda facts: set(facts.positives) == {1}),
        "lonely-anchors": ("a row has no positive", lambda facts: 0 in facts.positives),
        "no-positive": ("a row has no positive", lambda facts: 0 in facts.positives),
        "all-distinct": ("no row has a positive", lambda facts: not any(facts.positives)),
        "empty-positive-pairs": ("no row has a positive", lambda facts: not any(facts.positives)),
        "one-class": ("no row has a negative", lambda facts: not any(facts.negatives)),
        "one-negative": ("every row has one negative", lambda facts: set(facts.negatives) == {1}),
        "unbalanced-classes": ("numbers of positives differ", lambda facts: len(set(facts.positives)) > 1),
        "unequal-positives": ("numbers of positives differ", lambda facts: len(set(facts.positives)) > 1),
        "two-positives": ("a row has two positives", lambda facts: max(facts.positives) > 1),
        "nothing-left": ("a row is contrasted with no other", lambda facts: 0 in facts.members),
        "diagonal-true": (
            "a row is given as its own positive",
            lambda facts: bool(np.diagonal(facts.case.positive_mask()).any()),
        ),
        "repeated-pairs": (
            "a pair is given twice",
            lambda facts: len({*map(tuple, facts.given("positive_pairs"))}) < len(facts.given("positive_pairs")),
        ),
        "anchor-subset": ("some rows are not anchors", lambda facts: not all(facts.given("anchors") or [True])),
        "no-anchors": ("no anchor counts", lambda facts: not facts.case.counted()),
        "one-row": ("there is one row", lambda facts: facts.case.n == 1),
        "one-pair": ("there is one row", lambda facts: facts.case.n == 1),
        "two-rows": ("there are two rows", lambda facts: facts.case.n == 2),
        "odd-batch": ("the number of rows is odd", lambda facts: facts.case.n % 2 == 1),
        "large-batch": ("there are 256 rows or more", lambda facts: facts.case.n >= 256),
        "one-dimension": ("rows have one entry", lambda facts: facts.rows.shape[1] == 1),
        "antipodal-embeddings": (
            "a row is the negative of another",
            lambda facts: any(np.array_equal(row, -other) for row in facts.rows for other in facts.rows),
        ),
        "orthogonal-embeddings": (
            "two rows are at right angles",
            lambda facts: bool((facts.rows @ facts.rows.T == 0).any()),
        ),
        "zero-row": ("a row is zero", lambda facts: 0 in facts.norms),
        "unit-rows": ("every row has norm 1", lambda facts: set(facts.norms) == {1.0}),
        "full-significand": (
            "8 bits do not hold every entry",
            lambda facts: any(math.frexp(x)[0] * 256 % 1 for x in facts.rows.ravel()),
        ),
        "labels-negative": (
            "a label is negative",
            lambda facts: min(facts.given("labels") + (facts.given("ref_labels") or [])) < 0,
        ),
        "base-temperature": ("base_temperature is given", lambda facts: facts.given("base_temperature") is not None),
        "high-temperature": ("the temperature is 1 or more", lambda facts: facts.case.option("temperature") >= 1),
        "denominator": ("denominator is given", lambda facts: facts.given("denominator") is not None),
        "references": ("ref_embeddings is given", lambda facts: facts.given("ref_embeddings") is not None),
        "self-rows": ("self_rows is given", lambda facts: facts.given("self_rows") is not None),
        "one-reference": ("there is one reference", lambda facts: len(facts.given("ref_embeddings")) == 1),
        "own-copy": ("a reference equals a row", lambda facts: facts.repeats),
        "rectangular": (
            "there are more rows than columns, or fewer",
            lambda facts: facts.case.shape[0] != facts.case.shape[1],
        ),
        "two-towers": ("there are two towers", lambda facts: facts.case.entry.two_towers),
        "equal-towers": (
            "both towers are equal",
            lambda facts: np.array_equal(facts.case.embeddings, facts.given("embeddings_b")),
        ),
        "queue": ("negatives is given", lambda facts: facts.given("negatives") is not None),
        "own-key-in-queue": ("one of the negatives equals a row", lambda facts: facts.repeats),
    }
)
"""By flag: the condition in words, and the condition. The other flags are judgements."""


def first_untrue(case: Case, flags: Sequence[str]) -> str | None:
    """Return what the first flag that a case does not bear out requires of it; None if every flag is right.

    Args:
        case: the case.
        flags: names of flags.
    """
    facts = Facts(case)
    for flag in flags:
        words, holds = CONDITIONS.get(flag, ("", lambda facts: True))
        try:
            right = holds(facts)
        except TypeError:  # the condition is about an argument that the case does not have
            right = False
        if not right:
            return f"{case.id}: the flag {flag!r} needs a case in which {words}"
    return None
