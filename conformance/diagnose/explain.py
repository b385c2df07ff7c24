"""Find few reasons that explain most failures of a target (a loss under test): ``check``, pytest and ``identify``.

1. A few small failing cases are tested for every known mistake. The mistakes that explain one of them are candidates.
2. If they leave more than a quarter of the ordinary cases, the target is called with probes, and the loss that
   reproduces its answers (``search``) is one more candidate. Without cases, this is the only step.
3. The candidates are tested on the other failing cases. The candidate that explains most cases becomes a reason.
4. These steps are repeated for the cases that remain.

A reason about the formula must reproduce the value and the gradient of the target on each case that it explains, and on
some of these cases with random rows.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import accumulate, islice, tee
from typing import Any

import numpy as np
import torch

from ..implementations.base import items_of
from ..suite.cases import Case
from ..suite.catalogue import NUMBERS, WEIGHTS
from ..suite.records import Expected, Matrix, Outcome, Truth
from ..truth.baseline import plain_outcome
from . import suspects
from .positives import CASE, LAYOUTS, MIXED_UP, POSITIVES, RIGHT_POSITIVES, TOWERS
from .search import Match, Searched, same_loss
from .suspects import Failure, Suspect
from .variants import COUNTS, FLOWS, ROUNDED, WRONG_COUNTS, Variant, weights_words, words_of

EQUAL_WEIGHTS = 0.5, 0.5
"""The weights of the two directions in a loss of two towers, unless it has the option ``direction_weights``."""

WORK = 100
"""Limit of the work of testing all candidates on the failing cases. On further cases, only the best one is tested.

One case counts as ``work_of(case)``."""

EXPLORED, EXPLORATION = 12, 17
"""Largest number of failing cases that are tested for every known mistake, and the limit of their work.

A case of 512 rows counts as 17. The first case is always tested."""

MOST = 3
"""Maximum number of reasons."""

PASSING = 6
"""Number of passing cases on which candidates are tested."""

MORE_PASSING = 30
"""Number of further passing cases, on which only the best candidates are tested."""

LARGEST_PASSING = 16
"""Largest ``Case.size`` of a passing case on which candidates are tested."""

FEW = 3
"""If more cases fail, a reason must explain at least two of them (except those in ``CERTAIN``)."""

TESTED = 6
"""Number of candidates that are tested on all failing cases."""

RARELY = 3
"""A candidate is a coincidence if more than this number of explored cases contradict it for each that it explains."""

NOISE = {"float64": 1e-12, "float32": 1e-6, "float16": 4e-3, "bfloat16": 3e-2}
"""Relative difference that is attributed to rounding, by the dtype in which the target computes."""

FINE = 1e-14
"""``NOISE`` in float64 when a reason that was chosen for larger errors is compared with an error within ``NOISE``."""

LOW = {"float32": 1e-4, "float16": 3e-2, "bfloat16": 0.2}
"""Relative error that computing in this dtype explains, if the formula is right."""

FORMULA_RIGHT = "the formula is right"
COMPUTES = f"{FORMULA_RIGHT}, but the target computes in {{}} for inputs of every dtype"
NO_PAIR = "the loss is NaN or infinite if there is no pair: in a batch of one row"

CERTAIN = {*suspects.NOT_FINITE, *WRONG_COUNTS}
"""Reasons for which one failing case is enough, because they do not hold by coincidence."""

OPTION_WORDS: Mapping[tuple[str, str], str] = {
    ("no_positive", "zero"): "anchors without positives count as 0 in the mean",
    ("no_positive", "drop"): "anchors without positives are left out of the mean",
    ("no_positive", "nan"): "anchors without positives make the loss NaN",
    ("no_negative", "nan"): "anchors without negatives make the loss NaN",
    ("reduction", "sum"): "the values of the anchors are summed, not averaged",
    ("reduction", "none"): "one value per anchor is returned",
    ("reduction", "mean"): "the values of the anchors are averaged",
    ("reduction", "mean_pairs"): "the mean is over the pairs, not over the anchors",
    ("reduction", "sum_pairs"): "the values of the pairs are summed",
    ("reduction", "none_pairs"): "one value per pair is returned",
    ("similarity", "dot"): "similarities are raw dot products: rows are not normalised",
    ("similarity", "cosine"): "rows are normalised, but raw dot products are required",
    ("denominator", "all"): "the denominator contains all other rows",
    ("denominator", "one_positive"): "the denominator lacks the other positives",
    ("denominator", "only_negatives"): "the denominator lacks the positives",
    ("inside_reduction", "mean"): "the ratios are averaged inside the logarithm, not summed",
    ("inside_reduction", "sum"): "the ratios are summed inside the logarithm, not averaged: 1/|P| is missing",
    ("direction", "both"): "the anchors are the rows of both towers",
    ("direction", "a_to_b"): "the anchors are only the rows of the first tower",
    ("direction", "b_to_a"): "the anchors are only the rows of the second tower",
}


@dataclass(frozen=True)
class Reason:
    """A mistake that explains one or more failing cases.

    Attributes:
        words: describes the mistake, without the numbers of one case.
        cases: the ids of the cases.
        setting: "name=value" for ``--set`` if the behaviour is intended; "" if no option describes it.
        loss: the arguments of ``pairproof check`` that name the loss, if the target computes another one, or that say
            how it is called; else "".
        also: whether these cases have the mistake in addition to the first reason.
        ordinary: whether the mistake is in the formula, not in a policy, the range or the digits.
    """

    words: str
    cases: tuple[str, ...]
    setting: str = ""
    also: bool = False
    ordinary: bool = True
    loss: str = ""

    @property
    def intended(self) -> str:
        """The arguments of ``pairproof check`` to use if the behaviour is intended; "" if there are none."""
        return self.loss or (self.setting and f"--set {self.setting}")


@dataclass
class Diagnosis:
    """The reasons for the failures of a target.

    Attributes:
        reasons: the reasons, in the order in which they were found.
        failing: number of failing cases.
        details: the explanation of each failure, by case and dtype.
        searched: the answers to probes, and the losses that reproduce them; None if no probes were needed.
    """

    reasons: list[Reason] = field(default_factory=list)
    failing: int = 0
    details: dict[tuple[str, str], str] = field(default_factory=dict)
    searched: Searched | None = None

    @property
    def match(self) -> Match | None:
        """The identified loss; None if nothing was identified, or identification was not needed."""
        return next(iter(self.searched.fitting), None) if self.searched else None

    @property
    def unexplained(self) -> int:
        """Number of failing cases that no reason explains."""
        return self.failing - sum(len(reason.cases) for reason in self.reasons)

    def sentences(self) -> list[str]:
        """Return one sentence per reason, or a sentence that no reason was found."""
        found, left = [], self.failing
        for reason in self.reasons:
            count = len(reason.cases)
            left -= count
            remedy = f" (if intended: {reason.intended})" * bool(reason.intended)
            also = "also, " * reason.also
            rest = "not explained" if left and reason is self.reasons[-1] else "left"
            share = f"explains {count} of {_cases(self.failing)}, {left or 'none'} {rest}"
            found.append(f"{also}{reason.words}{remedy}: {share}")
        if self.failing and not found:
            found.append(f"no known mistake explains any of {_cases(self.failing)}")
        return found

    @property
    def short(self) -> str:
        """The first reason and the number of other reasons, or that nothing is explained; "" without failing cases.

        If the reasons explain at most half of the failing cases together, it says how many are left.
        """
        if not self.reasons:
            return f"{_cases(self.failing)} not explained" if self.failing else ""
        first, *others = self.reasons
        more = f", and {len(others)} more reason{'s' * (len(others) > 1)}" if others else ""
        left = f", {self.unexplained} not explained" if 2 * self.unexplained >= self.failing else ""
        return f"{first.words} ({len(first.cases)} of {_cases(self.failing)}){more}{left}"

    def as_data(self) -> dict[str, Any]:
        """Return the diagnosis as a JSON value, without ``details`` and ``searched``."""
        reasons = [
            {name: getattr(one, name) for name in ("words", "setting", "also", "loss")} | {"cases": list(one.cases)}
            for one in self.reasons
        ]
        return {"reasons": reasons, "failing": self.failing, "unexplained": self.unexplained}


def _cases(number: int) -> str:
    return f"{number} failing case{'s' * (number != 1)}"


Test = str | Callable[[], Any]
"""An explanation of one case, or a function that returns one, or None if the candidate does not explain the case."""


Explanations = dict[str, dict[int, str]]
"""The explanations of cases by the words of a candidate and the id() of the observation."""


class Observation:
    """A case with the result of the target.

    Attributes:
        case: the case.
        dtypes: the dtypes in which it fails; empty if it passes.
        outcome: what the target returned in the first of them; by default, the true results.
        truth: the true results.
        ordinary: whether the case tests the formula. Ordinary cases are explored first.
        views: number of views of each item that the target was called with; 1 if it was called with single rows.
        match: the loss that was identified, if any.
        alone: whether no other case fails. Then an unusual factor of one value explains nothing.
        fixed: whether all failing cases have the same temperature. Then its powers are like other factors.
        direction: see ``Known``.
    """

    def __init__(
        self, case: Case, dtypes: Sequence[str], outcome: Outcome | None, truth: Truth | Expected, ordinary: bool = True
    ) -> None:
        self.case, self.dtypes, self.truth, self.ordinary = case, dtypes, truth, ordinary
        self.outcome = outcome or Outcome(list(truth.values), truth.gradient, other_gradients=truth.other_gradients)
        self.dtype = dtypes[0] if dtypes else "float64"
        self.match: Match | None = None
        self.views, self.alone, self.fixed, self.direction = 1, False, False, ""

    @cached_property
    def computes(self) -> str:
        """The dtype in which the target seems to compute."""
        return _precision(self.outcome, self.dtype)

    @cached_property
    def failure(self) -> Failure:
        """The result, for comparison with suspects (losses that the target may have computed)."""
        return Failure(self.case, self.outcome, self.truth, NOISE[self.computes])

    @cached_property
    def _listed(self) -> Iterator[tuple[str, Suspect]]:
        """The suspects. Only copies are advanced; they share the suspects that one of them has made."""
        (found,) = tee(_listed(self.failure), 1)
        return found

    @cached_property
    def comparable(self) -> bool:
        """Whether all values are finite, and their number is right."""
        found = self.failure
        finite = bool(found.given.isfinite().all() and found.expected.isfinite().all())
        return finite and len(found.given) == len(found.expected)

    def candidates(self, options: Collection[str], base: str = "") -> Iterator[tuple[str, Test]]:
        r"""Yield candidates, the preferred ones first, as (words, test).

        If an option makes the candidate right, the words end with "\0name=value".

        Args:
            options: the options of the loss that may have another value in the target.
            base: the words of a suspect. If given, candidates are mistakes in addition to this suspect.
        """
        # Extreme inputs may raise errors, which must not hide the failure itself.
        with suppress(Exception):
            if not self.case.anchors():
                return
            found = self.failure
            if self.comparable:
                yield from filter(None, [suspects.clamped_norms(found)])
            if base:
                suspect = next((one for words, one in self.suspects(found) if words == base), None)
                if suspect is None:
                    return
                found = copy(found)
                found.right = suspect
            else:
                modelled = suspects.is_explained(self.case) and WEIGHTS.keys().isdisjoint(self.case.arguments)
                modelled = modelled and self.case.option("direction_weights") in (None, EQUAL_WEIGHTS)
                if modelled and self.comparable and self.is_wrong(found) and found.remaining(found.right) < math.inf:
                    yield suspects.LOST, suspects.SAME_DIGITS
                    return
                yield from self._options(options)
            yield from self._dtypes(found)
            tiny = suspects.slight(found) if self.comparable else None
            if tiny and (self.alone or tiny[0] == suspects.BROKEN_GRADIENT):
                yield tiny
            if not self.is_wrong(found):
                return
            if len(found.given) == len(found.expected):
                finite = bool(found.given.isfinite().all()), bool(found.expected.isfinite().all())
                if finite == (True, False) and self.alone:
                    yield suspects.NOT_NAN, suspects.NOT_NAN
                if finite == (False, True):
                    yield from suspects.not_finite(found)
                if finite == (False, True) and self.case.option("reduction") == "mean":
                    zero = (count for count in WRONG_COUNTS if not COUNTS[count](found.right.setting))
                    yield from ((count, f"{count}, which is 0") for count in zero)
            # A second mistake in the formula would contradict the cases that the first reason explains alone.
            if base or not self.comparable:
                return
            yield from ((words, words) for words in suspects.other_weights(found))
            yield from self._factors(found)
            factor, slope = suspects.factors_of(found) or (0.0, None)
            unclear = slope is None or (self.alone and len(found.compared) == 1 and not _is_simple(abs(factor)))
            words = suspects.factor_words(factor) if factor != 1 else suspects.gradient_words(slope or 0.0)
            last = [] if unclear else [(words, words)]
            yield from last * self.alone  # several cases distinguish a mistake from a factor, one case may not
            yield from ((words, partial(_tested, found, suspect, words)) for words, suspect in self.suspects(found))
            yield from filter(None, [*last, tiny])
            if len(found.empty) == len(found.anchors):
                words = f"the loss is {float(found.given[0]):g}, not {float(found.expected[0]):g}"
                yield (f"{words}, {suspects.WITHOUT_POSITIVES}",) * 2

    def is_wrong(self, found: Failure) -> bool:
        """Return whether the error is larger than rounding errors."""
        if found.right.words or not self.comparable:
            return True
        return any(found.left(expected, place) > 0 for place, (_, expected) in enumerate(found.compared))

    def _options(self, options: Collection[str]) -> Iterator[tuple[str, Test]]:
        for option in options:
            for choice in self.case.entry.choices.get(option, ()):
                if choice != self.case.option(option):
                    words = OPTION_WORDS.get((option, choice), f"{option}={choice} is computed")
                    yield f"{words}\0{option}={choice}", partial(self.has_option, words, option, choice)
        own, choices = self.case.option("reduction"), self.case.entry.choices["reduction"]
        for choice in choices if own == "none" and len(self.failure.given) < len(self.failure.expected) else ():
            words = f"with reduction={own}, the value is that of reduction={choice}"
            yield (
                f"{words} (to judge the mean alone: --set reduction=mean)",
                partial(self.has_option, words, "reduction", choice),
            )

    def has_option(self, words: str, option: str, choice: str) -> str | None:
        """Return ``words`` if the target computes another choice of an option."""
        case = replace(self.case, keywords={**self.case.keywords, option: choice})
        other = _plain(case)
        if not case.undefined() and not np.isfinite(other.values).all():
            return None
        return words if self._equals(other, suspects.EXPLAINED) and not self._equals(self.truth, 0.0) else None

    def _equals(self, found: Outcome | Truth | Expected, most: float) -> bool:
        """Return whether the target computed ``found``. Gradients are compared only if all values are finite.

        Args:
            found: what the target may have computed.
            most: the largest difference, relative to the error of the target.
        """
        given, expected = self.outcome, self.truth
        compared: list[tuple[Any, Any, Any]] = [(given.values, found.values, expected.values)]
        if np.isfinite(given.values).all() and given.gradient is not None and found.gradient is not None:
            compared.append((given.gradient, found.gradient, expected.gradient))
        noise, floor = max(1e-9, NOISE[self.computes]), max(self.failure.floors)
        arrays = [(np.asarray(a), np.asarray(b), np.asarray(c)) for a, b, c in compared if c is not None]
        return all(_share(a, b, c, noise, floor) <= most for a, b, c in arrays)

    def _dtypes(self, found: Failure) -> Iterator[tuple[str, Test]]:
        """Yield that the target computes in a narrower dtype, if this explains the error."""
        if not self.comparable or self.computes == self.dtype or self.dtype not in ("float64", "float32"):
            return
        low, least = LOW[self.computes], found.floors[1] / found.noise
        (off, size), *gradients = (((given - true).norm(), true.norm()) for given, true in found.compared)
        if off <= low * size and all(off <= 10 * low * (size + least) for off, size in gradients):
            words = COMPUTES.format(self.computes)
            yield words, words

    def _factors(self, found: Failure) -> Iterator[tuple[str, Test]]:
        """Yield causes of a wrong factor, and wrong weights of the two directions."""
        factors = suspects.factors_of(found)
        for value, words, general in suspects.causes(found) if factors else ():
            if math.isclose(factors[0], value, rel_tol=1e-4) and factors[0] != 1:  # type: ignore[index]
                setting, times = _setting_of(general, self.case.entry.keywords), suspects.factor_words(value)
                details = f"{times}, possibly because {words}" if _is_simple(value) else words
                yield f"{general}\0{setting}", details
        if factors and factors[0] not in (0, 1) and "base_temperature" in self.case.entry.keywords:
            base = self.case.temperature / factors[0]
            usual = base > 0 and found.factor == 1 and not ((self.alone or self.fixed) and _is_simple(factors[0]))
            if usual and math.isclose(base, float(f"{base:.2g}"), rel_tol=1e-5):
                words = f"values are multiplied by temperature/{base:.2g}"
                yield f"{words}\0base_temperature={base:.2g}", words
        if self.case.entry.two_towers and self.case.option("direction") == "both":
            yield from self._weights(found)

    def _weights(self, found: Failure) -> Iterator[tuple[str, Test]]:
        """Yield weights of the two directions, if a weighted sum explains value and gradient."""
        columns = []
        for direction in ("a_to_b", "b_to_a"):
            value = found.value(found.read_again("", direction=direction))
            gradient = torch.autograd.grad(value.sum(), found.rows, retain_graph=True)[0]
            parts = (value.detach().sum()[None], gradient.flatten())[: len(found.compared)]
            columns.append(torch.cat(parts))
        given = torch.cat([found.given.sum()[None], *(pair[0].flatten() for pair in found.compared[1:])])
        matrix = torch.stack(columns, dim=1)
        if len(given) < 3 or not bool(matrix.isfinite().all()):
            return
        weights, *_ = torch.linalg.lstsq(matrix, given[:, None])
        left = float((matrix @ weights - given[:, None]).norm() / given.norm())
        a, b = (round(float(w), 4) for w in weights[:, 0])
        right = self.case.option("direction_weights") or EQUAL_WEIGHTS
        if left <= 1e-6 and abs(a * right[1] - b * right[0]) > 1e-3 * abs(a + b) and a and b:
            words = weights_words(a, b, right)
            yield f"{words}\0direction_weights={a:g},{b:g}", words

    def suspects(self, found: Failure) -> Iterator[tuple[str, Suspect]]:
        """Yield suspects with their words, an identified loss first; none for a case with weights, which they lack."""
        if not WEIGHTS.keys().isdisjoint(self.case.arguments):
            return
        if self.match is not None and (identified := proposed(self.match, found, self.direction)) is not None:
            yield identified
        yield from copy(self._listed) if found is self.failure else _listed(found)

    def predicts_failure(self, words: str) -> bool:
        """Return whether a candidate differs from the correct loss, so that the case should fail."""
        text, _, setting = words.partition("\0")
        option, _, choice = setting.partition("=")
        if choice and option in self.case.entry.choices:
            changed = replace(self.case, keywords={**self.case.keywords, option: choice})
            right, other = (torch.tensor(_plain(case, gradient=False).values) for case in (self.case, changed))
        else:
            suspect = next((one for name, one in self.suspects(self.failure) if name == text), None)
            if suspect is None:
                return False
            right, other = (self.failure.value(one).detach() for one in (self.failure.right, suspect))
        return right.shape != other.shape or not torch.allclose(right, other, rtol=1e-4, atol=1e-9, equal_nan=True)


def _is_simple(factor: float) -> bool:
    return any(math.isclose(factor, x, rel_tol=1e-4) for x in (*suspects.SIMPLE, 1.0))


def _listed(found: Failure) -> Iterator[tuple[str, Suspect]]:
    return ((suspects.general_words(found, suspect), suspect) for suspect in suspects.suspects(found))


def _plain(case: Case, *, gradient: bool = True) -> Outcome:
    """Return the result of the straightforward implementation, with NaN where the policies of the case require it."""
    outcome, undefined = plain_outcome(case, "float64", gradient=gradient), case.undefined()
    values = outcome.anchors if case.option("reduction") == "none" else None
    if not any(case.undefined_values()):
        return outcome
    return replace(outcome, values=[math.nan if i in undefined else x for i, x in (values or {}).items()] or [math.nan])


def _setting_of(words: str, keywords: Collection[str]) -> str:
    """Return the option that makes a cause right, such as "base_temperature=0.07"; "" if there is none."""
    base = re.search(r"temperature/([0-9.]+)", words)
    return f"base_temperature={base[1]}" if base and "base_temperature" in keywords else ""


def _tested(found: Failure, suspect: Suspect, words: str) -> str | None:
    if not found.remaining(suspect) < math.inf:
        return None
    similarity = suspect.variant.similarity
    if similarity in ROUNDED:  # exact products must not explain as much, unless only the gradient is rounded
        exact = replace(suspect.variant, similarity="cosine" if similarity.startswith("cosine") else "dot")
        rounded, without = (found.value(one).detach() for one in (suspect, replace(suspect, variant=exact)))
        unchanged = torch.equal(rounded, without) and exact.similarity != found.right.variant.similarity
        if unchanged or found.left(without, 0, rounded=True) < found.left(rounded, 0, rounded=True):
            return None
    return suspect.words or (words if "; " in words else suspects.words_for_case(found, suspect.variant) or words)


@np.errstate(over="ignore")  # the norm of a difference may exceed the range of float64
def _share(given: Any, found: Any, expected: Any, noise: float, floor: float) -> float:
    """Return |given - found| / |given - expected|.

    The result is 0 if the numerator is at most ``noise * |given|`` or ``floor``, and infinity if shapes or NaN differ,
    or if results in float64 are not reproduced.
    """
    if given.shape != found.shape or not np.array_equal(np.isnan(given), np.isnan(found)):
        return math.inf
    kept = ~np.isnan(given)
    if not np.isfinite(given[kept]).all():
        return math.inf
    left, size = float(np.linalg.norm((given - found)[kept])), float(np.linalg.norm(given[kept]))
    if given.shape != expected.shape or np.isnan(expected).any() or not kept.all():
        return 0.0 if left <= 1e-6 * size + noise else math.inf
    if noise < suspects.DTYPE_NOISE and left > max(suspects.REPRODUCED_EXACTLY * size, floor):
        return math.inf
    error = float(np.linalg.norm(given - expected))
    return 0.0 if left <= max(noise * size, floor) else float(left / max(error, noise * size))


def _precision(outcome: Outcome, dtype: str) -> str:
    """Return the narrowest dtype that represents all finite results.

    Return ``dtype`` if no narrower dtype does, or if fewer than three results are nonzero.
    """
    gradient = [] if outcome.gradient is None else [np.ravel(outcome.gradient)]
    rows = torch.tensor(np.concatenate([np.ravel(outcome.values), *gradient]), dtype=torch.float64)
    rows = rows[rows.isfinite() & (rows != 0)]
    for name in ("bfloat16", "float16", "float32") if len(rows) > 2 else ():
        if bool((rows.to(getattr(torch, name)).double() == rows).all()):
            return name
    return dtype


@dataclass(frozen=True)
class Known:
    """What is known about a target, besides its results.

    Attributes:
        options: the options of the claimed loss that are not passed, so that the target may use other values; None if
            no loss is claimed.
        search: calls the target with probes, and looks for the loss that it computes; called at most once.
        evaluate: calls the target on a case, in a dtype; returns None if it cannot be called again.
        training: draws a batch of training size, or returns None.
        call: how the target is called, one of ``CALLS``; "" if it is not known.
        direction: the direction that the target computes, if pairproof swaps the towers for the other one; else "".
    """

    options: Collection[str] | None = ()
    search: Callable[[], Searched | None] = lambda: None
    evaluate: Callable[[Case, str], Outcome | None] = lambda case, dtype: None
    training: Callable[[], Case | None] = lambda: None
    call: str = ""
    direction: str = ""


def explain(observations: Sequence[Observation], known: Known) -> Diagnosis:
    """Find reasons that explain the failing cases, or, if no loss is claimed, the loss that reproduces the answers.

    Args:
        observations: the results of the target. At most ``PASSING + MORE_PASSING`` small passing cases are used.
        known: what is known about the target.
    """
    if known.options is None:
        return Diagnosis(searched=known.search())
    return _Explanation(observations, known).diagnosis()


def explain_case(case: Case, outcome: Outcome, truth: Truth | Expected, dtype: str = "float64") -> str:
    """Explain one failing case, with its numbers; return "" if no known mistake explains it."""
    return explain([Observation(case, (dtype,), outcome, truth)], Known()).details.get((case.id, dtype), "")


class _Explanation:
    """The search for reasons. ``explain`` describes the arguments."""

    def __init__(self, observations: Sequence[Observation], known: Known) -> None:
        self.known, self.options = known, known.options or ()
        self.failing = sorted((one for one in observations if one.dtypes), key=lambda x: (not x.ordinary, x.case.size))
        small = (x for x in observations if not x.dtypes and x.case.size <= LARGEST_PASSING and x.case.anchors())
        self.passing = [*islice(small, PASSING + MORE_PASSING)]
        self.refuting = self.passing[:PASSING]
        self.redrawn: dict[str, Observation | None] = {}
        # If a target computes in float32, results that are changed outside it, such as gradients of rows that were
        # normalised before, or means over two directions, are in float64. Numbers of few bits are no evidence.
        wide = [one for one in self.failing if one.computes == one.dtype == "float64"]
        values = torch.tensor([x for one in wide for x in one.outcome.values], dtype=torch.float64)
        single = int(((values.float() == values) & (values.bfloat16() != values)).sum())
        for one in wide if single > max(2, len(values) // 2) else ():
            one.computes = "float32"
        fixed = len({one.case.temperature for one in self.failing}) == 1
        for one in (*self.failing, *self.passing):
            one.alone, one.fixed = len(self.failing) == 1, fixed
            one.views, one.direction = _views(one.case, known), known.direction

    def diagnosis(self) -> Diagnosis:
        """Find the reasons."""
        found = Diagnosis(failing=len(self.failing))
        if words := self._everywhere():
            found.reasons.append(Reason(words, tuple(one.case.id for one in self.failing)))
            found.details = {(one.case.id, dtype): words for one in self.failing for dtype in one.dtypes}
            return found
        left, base, done = self.failing, "", set[int]()
        ordinary = {id(one) for one in self.failing if one.ordinary} or {*map(id, self.failing)}
        while left and len(found.reasons) < MOST:
            both = [self._best(left, name) for name in dict.fromkeys(("", base))]
            best = max((one for one in both if one), key=lambda one: len(one[1]), default=None)
            explained_now = () if best is None else best[1].keys()
            if found.searched is None and 4 * len(ordinary - {*explained_now} - done) > len(ordinary):
                found.searched = self.known.search() or Searched()
                for one in self.failing:
                    one.match = found.match
                if found.match is not None:
                    continue
            if best is None:
                break
            words, explained, also = best
            explained |= self._slight(words, base if also else "", [one for one in left if id(one) not in explained])
            text, _, setting = words.partition("\0")
            chosen = [one for one in left if id(one) in explained]
            # An option has the same value in all cases, so no case may contradict it.
            others = (*(one for one in self.failing if id(one) in done), *self.passing)
            hint = "" if setting and self._refuted(words, others) else setting
            policy = bool(setting) or text in suspects.EXTREME or text.endswith(suspects.WITHOUT_POSITIVES)
            precise, cases = self._precise(words, chosen, base), tuple(one.case.id for one in chosen)
            known = next((one for one in found.reasons if one.words == precise), None)
            if known:
                found.reasons[found.reasons.index(known)] = replace(known, cases=known.cases + cases)
            else:
                loss = "" if policy or also else self._other_loss(text, chosen)
                layout = LAYOUTS.get((self.known.call, text), "")
                loss = f"--call {layout}" if layout else _frozen(text, chosen) or loss
                found.reasons.append(Reason(precise, cases, hint, also, not policy, loss))
            self.refuting = [*self.refuting, *chosen[:PASSING]]
            self._narrow(text, left)
            found.details |= {(one.case.id, dtype): explained[id(one)] for one in chosen for dtype in one.dtypes}
            left, done = [one for one in left if id(one) not in explained], done | explained.keys()
            base = base or ("" if setting else text)
        return found

    def _slight(self, words: str, base: str, cases: Iterable[Observation]) -> dict[int, str]:
        """Return explanations, by id(), of errors within ``NOISE`` by a reason that was chosen for larger errors."""
        found = dict[int, str]()
        for one in cases:
            with suppress(Exception):  # extreme inputs may raise errors
                if one.computes == "float64" and not one.is_wrong(one.failure):
                    fine = copy(one)
                    vars(fine).pop("_listed", None)
                    fine.failure = Failure(one.case, one.outcome, one.truth, FINE)
                    tests = (test for name, test in fine.candidates(self.options, base) if name == words)
                    if details := next(filter(None, map(_safely, tests)), ""):
                        found[id(one)] = details
        return found

    def _everywhere(self) -> str:
        """Describe a target that returns NaN, infinity or the same number for every batch; "" for other targets.

        Passing cases must not contradict this. Only an ordinary case shows that the cause is not the policy of a case.
        """
        cases = [*self.failing, *self.passing]
        if len(self.failing) < FEW or not any(one.ordinary for one in self.failing):
            return ""
        with np.errstate(over="ignore"):  # the results of some cases are rounded to float32
            value, *others = np.unique(np.concatenate([one.outcome.values for one in cases]).astype(np.float32))
        name = f"the constant {value:g}" if np.isfinite(value) else "NaN" if np.isnan(value) else "infinite"
        often = " (often because a positive, such as the self pair, is masked with -inf)" * (name == "infinite")
        return "" if others else f"the loss is {name} for every batch{often}"

    def _other_loss(self, words: str, explained: Sequence[Observation]) -> str:
        """Return the arguments of ``pairproof check`` for the loss of the catalogue that the words describe.

        Return "" if there is none, if it does not explain most failing cases, or if a passing case contradicts it.
        """
        if 2 * len(explained) <= len(self.failing) or self._refuted(words, self.passing):
            return ""
        match, found = explained[0].match, explained[0].failure
        identified = match and proposed(match, found, self.known.direction)
        if match and identified and identified[0] == words and _is_in_catalogue(match):
            return _arguments(match.variant, match.reduction) + _at(match.always(found.temperature))
        suspect = next((one for name, one in explained[0].suspects(found) if name == words), None)
        if suspect is None or suspect.loss:
            return f"--loss {suspect.loss}" if suspect else ""
        same = replace(suspect, variant=found.right.variant, words="", general="")
        if vars(same) != vars(found.right):  # not only the variant is wrong
            return ""
        other = same_loss(suspect.variant, self.known.call)
        return _arguments(other) if other else ""

    def _narrow(self, words: str, left: Sequence[Observation]) -> None:
        """If ``words`` say that the target computes in a dtype, use this dtype for the remaining cases."""
        dtype = next((name for name in LOW if words == COMPUTES.format(name)), None)
        for evidence in left if dtype else ():
            evidence.computes = str(dtype)
            vars(evidence).pop("failure", None)
            vars(evidence).pop("_listed", None)

    def _best(self, left: Sequence[Observation], base: str) -> tuple[str, dict[int, str], bool] | None:
        """Return the candidate that explains most cases, or None if none explains enough.

        Returns:
            The words, the explanations by the id() of the evidence, and ``bool(base)``.
        """
        explains: Explanations = {}
        explored = _explored([evidence for evidence in left if suspects.is_explained(evidence.case)])
        for evidence in explored[: EXPLORED // 2]:
            self._test(evidence, base, explains)
        first = {words: dict(details) for words, details in explains.items() if details}
        found = self._best_of(left, base, first, explored[: EXPLORED // 2])
        if found is not None and len(found[1]) == len(left):
            return found  # no candidate of the other cases explains more
        for evidence in explored[EXPLORED // 2 :]:
            self._test(evidence, base, explains)
        return self._best_of(left, base, explains, explored)

    def _best_of(
        self, left: Sequence[Observation], base: str, explains: Explanations, explored: Sequence[Observation]
    ) -> tuple[str, dict[int, str], bool] | None:
        """Test the candidates on the cases that are not explored, add the explanations, and return the best one."""
        first = sorted(filter(explains.get, explains), key=lambda words: -len(explains[words]))[: 2 * TESTED]
        views = {words: {one.views for one in left if id(one) in explains[words]} for words in first}
        refuted = {words: self._refuted(words, self.refuting, views[words]) for words in first}
        first = [words for words in first if 2 * refuted[words] <= len(explains[words])]
        first = sorted(first, key=lambda words: refuted[words] - len(explains[words]))[:TESTED]
        contradictions = cache(lambda words: self._refuted(words, self.passing[PASSING:], views[words]))
        others, work = [one for one in left if one not in explored], 0.0

        @cache
        def holds(words: str) -> bool:
            seen = sum(id(one) in explains[words] for one in explored)
            coincides = not base and self._refuted(words, explored, views[words]) > RARELY * seen
            return not coincides and self._holds(words, base, [one for one in left if id(one) in explains[words]])

        for evidence in others:
            self._test(evidence, base, explains, first[:1])
        top = first[0] if first and len(explains[first[0]]) == len(left) else ""
        if top and not refuted[top] + contradictions(top) and holds(top):
            first = first[:1]  # no candidate explains more
        for evidence in others if first[1:] else ():
            work += suspects.work_of(evidence.case)
            if work > WORK:
                break
            self._test(evidence, base, explains, first[1:])
        ranked = sorted(first, key=lambda words: refuted[words] - len(explains[words]))
        best, least = None, 0
        for words in ranked:
            score = refuted[words] + contradictions(words) - len(explains[words])
            if 2 * contradictions(words) > len(explains[words]) or score >= least or not holds(words):
                continue
            best, least = words, score
            if not contradictions(words):
                break  # the others explain fewer cases
        few = best is None or (len(explains[best]) == 1 and len(self.failing) > FEW and best not in CERTAIN)
        return None if best is None or few else (best, explains[best], bool(base))

    def _test(
        self, evidence: Observation, base: str, explains: Explanations, names: Iterable[str] | None = None
    ) -> None:
        """Test some candidates on a case, or every known mistake if ``names`` is None, and add the explanations."""
        left = None if names is None else {words for words in names if id(evidence) not in explains[words]}
        for words, test in evidence.candidates(self.options, base) if left != set() else ():
            known = explains.setdefault(words, {}) if left is None else explains.get(words, {})
            if (left is None or words in left) and id(evidence) not in known and (details := _safely(test)):
                known[id(evidence)] = details
                if left is not None:
                    left.remove(words)
                    if not left:
                        return

    def _refuted(self, words: str, cases: Sequence[Observation], views: Collection[int] = ()) -> int:
        """Return the number of cases that refute a candidate: they should fail in this way, but do not.

        Args:
            words: the candidate.
            cases: the cases.
            views: if given, only cases with one of these numbers of views count. Code for one view is often separate.
        """
        chosen = [one for one in cases if not views or one.views in views]
        failing = (one for one in chosen if _safely(partial(one.predicts_failure, words)))
        return sum(not self._explains(one, words) for one in failing)

    def _explains(self, one: Observation, words: str, base: str = "") -> bool:
        """Return whether a candidate explains a case."""
        return any(_safely(test) for name, test in one.candidates(self.options, base) if name == words)

    def _holds(self, words: str, base: str, explained: Sequence[Observation]) -> bool:
        """Return whether a candidate about the formula also explains cases with random rows."""
        policy = words.partition("\0")[2].startswith(("no_positive=", "no_negative="))  # not about the formula
        if policy or words in suspects.EXTREME or words.startswith(FORMULA_RIGHT):
            return True
        small = [one for one in explained if one.case.size < suspects.COSTLY]
        like = [(one.case, one) for one in (*small[len(small) // 2 :][:1], *small[-1:])]
        if 2 * len(explained) > len(self.failing) and (large := _safely(self.known.training)):
            alike = [one for one in explained if one.case.arguments.keys() == large.arguments.keys()]
            like += [(large, one) for one in alike if one.case.size <= large.size][:1]  # it may start above this size
        for case, one in like:
            if case.id not in self.redrawn:
                self.redrawn[case.id] = redraw(case, one, self.known)
            if found := self.redrawn[case.id]:
                found.match, found.direction = one.match, one.direction
                wrong, predicted = found.is_wrong(found.failure), partial(found.predicts_failure, words)
                if not self._explains(found, words, base) if wrong else _safely(predicted):
                    return False
        return True

    def _finite_with_lone_anchors(self) -> bool:
        """Return whether the loss is finite in a case in which some anchors have no positives, but not all."""
        cases = (one for one in (*self.failing, *self.passing) if np.isfinite(one.outcome.values).all())
        return any(0 < len(one.failure.empty) < len(one.failure.anchors) for one in cases)

    def _precise(self, words: str, explained: Sequence[Observation], base: str) -> str:
        """Make the words of a reason more precise for the cases that it explains; ``base`` as in ``candidates``."""
        (text, _, setting), cases = words.partition("\0"), [one.case for one in explained]
        views = sorted({one.views for one in explained})
        if not setting and self._refuted(words, [one for one in self.passing if one.views not in views]):
            return f"{text} (only with {' or '.join(map(str, views))} view{'s' * (views != [1])} per item)"
        if text == suspects.NO_POSITIVES and all(case.has_no_pair for case in cases):
            return NO_PAIR
        of_nan = text == OPTION_WORDS["no_positive", "nan"]
        alone = not any(case.positives()[i] for case in cases for i in case.anchors())
        if alone and (text == suspects.NO_POSITIVES or (of_nan and self._finite_with_lone_anchors())):
            return f"the loss is NaN or infinite {suspects.WITHOUT_POSITIVES}"
        if text != suspects.OVERFLOW:
            return text
        listed = explained[0].suspects(explained[0].failure)
        first = next((one for words, one in listed if words == base), explained[0].failure.right)
        largest = partial(suspects.largest_logit, similarity=first.variant.similarity)
        least, where = min(largest(one.failure) for one in explained), "where the largest logit is"
        finite = (one for one in (*self.passing, *self.failing) if np.isfinite(one.outcome.values).all())
        about = least * (1 - 1e-9)  # the last digits of equal logits may differ
        if all("float64" in one.dtypes for one in explained) and any(largest(one.failure) >= about for one in finite):
            where = "in some batches whose largest logit is"
        return f"the loss is NaN or infinite {where} {least:.4g} or more"


def redraw(case: Case, like: Observation, known: Known) -> Observation | None:
    """Return the result on a case whose rows have random directions, so that no products are exact in 16 bits.

    Return None in 16 bits, if the target returns no finite result, or if it is called with another number of views.
    """
    if like.dtype not in ("float64", "float32"):
        return None
    draw = np.random.default_rng(zlib.crc32(case.id.encode()))

    def turned(rows: Matrix) -> Matrix:
        other = draw.normal(size=rows.shape)
        other *= (np.linalg.norm(rows, axis=1) / np.linalg.norm(other, axis=1))[:, None]
        return other.astype(like.dtype).astype(np.float64)

    others = {name: turned(rows) for name, rows in case.others.items()}
    case = replace(case, embeddings=turned(case.embeddings), others=others)
    outcome, plain = _safely(partial(known.evaluate, case, like.dtype)), _plain(case)
    if outcome is None:
        return None
    truth = Expected(tuple(plain.values), plain.anchors or {}, plain.gradient, None, plain.other_gradients)
    found = Observation(case, (like.dtype,), outcome, truth)
    found.views = _views(case, known)
    # At training size, weights 1/|P| that are rounded to float32 are as good as exact ones.
    rounded = case.id != like.case.id and like.computes == "float64"
    found.computes = "float32" if rounded else like.computes
    found.failure.strict = True
    return found if found.comparable and found.views == like.views else None


def _explored(cases: Sequence[Observation]) -> list[Observation]:
    """Choose the cases to explore: the first ones, and some of the others, within the limit of the work."""
    chosen = [*cases[: EXPLORED // 2], *cases[EXPLORED // 2 :: max(1, 2 * len(cases) // EXPLORED)]]
    works = accumulate(suspects.work_of(evidence.case) for evidence in chosen)
    return [one for k, (one, work) in enumerate(zip(chosen, works, strict=True)) if k == 0 or work <= EXPLORATION]


def _views(case: Case, known: Known) -> int:
    return len(items_of(case)[0]) if known.call == "features" else 1


def _frozen(words: str, explained: Sequence[Observation]) -> str:
    """Return the argument that claims that the queue, or keys and queue, are constant; "" if the words are others."""
    if words == suspects.QUEUE_DETACHED:
        return "--frozen negatives"
    of_keys = any(one.case.option("direction") == "a_to_b" and "negatives" in one.case.others for one in explained)
    return "--frozen embeddings_b,negatives" if words.endswith(FLOWS["columns"]) and of_keys else ""


def _safely(test: Test) -> Any:
    """Return the result of a test, or None if it raises an error."""
    try:
        return test if isinstance(test, str) else test()
    except Exception:  # extreme inputs may raise errors
        return None


def proposed(match: Match, found: Failure, swapped: str = "") -> tuple[str, Suspect] | None:
    """Return the identified loss in words and as a suspect for a case; ``swapped`` is the direction in ``Known``.

    Return None if it does not apply to the case, or is the correct loss.
    """
    if swapped := swapped if dict(match.variant.options).get("direction") == swapped else "":
        options = {**dict(match.variant.options), "direction": found.case.option("direction")}
        match = replace(match, variant=replace(match.variant, options=tuple(options.items())))
    variant, right, scale = match.variant, found.right.variant, match.factor_for(found.temperature)
    built_in, mixed = match.built_in, variant.positives == MIXED_UP and "partners" in found.case.arguments
    positives = "meant" if variant.positives in RIGHT_POSITIVES or mixed else variant.positives
    if scale is None or CASE not in POSITIVES[positives].calls or not (built_in or match.as_passed):
        return None
    reduction = match.count if match.count not in ("mean", "drop") else found.right.reduction
    scale /= found.factor
    changed = replace(variant, positives=positives)
    suspect = replace(found.right, variant=changed, reduction=reduction, scale=scale, temperature=built_in)
    if mixed:
        suspect = replace(suspect, read_as=suspects.mixed_up(found).read_as)
    setting, rows, partners = found.right.setting, torch.arange(len(found.rows)), found.right.setting.views is not None
    if variant.positives.startswith(("towers", "ranking") if partners else "ranking"):
        items = rows.minimum(setting.positive.int().argmax(dim=1)) if partners else rows % found.case.n
        paired = partners or (len(found.case.matrices), len(rows)) == (2, 2 * found.case.n)
        other = POSITIVES[variant.positives].change(replace(setting, n_views=2, items=items)) if paired else None
        suspect = replace(suspect, read_as=lambda: other or setting)
    elsewhere = suspects.right_elsewhere(right, changed)
    direction = dict(variant.options).get("direction", "both") if "direction" in variant.entry.keywords else None
    if direction and found.case.option("direction") not in (None, direction):
        suspect = replace(suspect, read_as=found.read_again("", direction=direction).read_as)
        elsewhere.append(OPTION_WORDS["direction", direction])
    if not found.case.entry.two_towers:
        elsewhere += [TOWERS[variant.positives]] if variant.positives in TOWERS else []
    wrong, factor = match.words() + [words_of(match.count)] * (match.count in WRONG_COUNTS), list[str]()
    others = dict({*variant.options} ^ {*right.options} if variant.loss == right.loss else ())
    numbers = [name for name in NUMBERS if name in others and not any(f"the {name} " in one for one in wrong)]
    wrong += [f"{name}={variant.number(name):g} is computed" for name in numbers]
    power = match.scale[1] if match.scale else 0
    if power or not math.isclose(scale, 1.0, rel_tol=1e-6):  # the words are the same at every temperature
        factor.append(suspects.factor_words(scale) if power == 0 else f"values are multiplied by temperature^{power}")
    if (wrong or factor) and variant.form != "pooled" and reduction in variant.entry.choices["reduction"][1:]:
        elsewhere += [OPTION_WORDS["reduction", reduction]] * (reduction != found.right.reduction)
    claimed = (right.loss, {*right.options}, found.right.reduction)
    another = [computes(match)] * ((variant.loss, {*variant.options}, reduction) != claimed)
    words = wrong + elsewhere + factor if wrong or factor else another
    if always := match.always(found.temperature):
        words.append(f"the temperature is always {always}, whatever is passed")
    if swapped and direction == "both" and (reduction, found.right.reduction) == ("sum", "mean"):
        suspect = replace(suspect, scale=suspect.scale / 2)  # pairproof averages the two directions
    return ("; ".join(words), suspect) if words else None


def _is_in_catalogue(match: Match) -> bool:
    """Whether an identified loss is one of the catalogue, without mistakes."""
    scaled = any(not math.isclose(factor, 1.0, rel_tol=1e-6) for factor in match.factor.values())
    return not match.words() and match.count not in WRONG_COUNTS and not scaled


def computes(match: Match) -> str:
    """Describe a target that computes another loss of the catalogue, or other options."""
    return f"the target computes {match.name}"


def arguments_of(match: Match, call: str) -> str:
    """Return the arguments of ``pairproof check`` for an identified loss; "" if the target has a mistake.

    Args:
        match: the loss.
        call: how the target was called; it may be right in another call.
    """
    layout = LAYOUTS.get((call, match.variant.positives), "")
    match = replace(match, variant=replace(match.variant, positives="meant")) if layout else match
    arguments = _arguments(match.variant, match.reduction) + f" --call {layout}" * bool(layout) + _at(match.always())
    return arguments * _is_in_catalogue(match)


def _arguments(variant: Variant, reduction: str = "mean") -> str:
    """Return the arguments of ``pairproof check`` for a loss of the catalogue and its options."""
    options = [
        *variant.options,
        *([("reduction", reduction)] if reduction in variant.entry.choices["reduction"][1:] else []),
    ]
    written = [f"{name}={','.join(map(str, x)) if isinstance(x, tuple) else x}" for name, x in options]
    return " ".join([f"--loss {variant.loss}", *(f"--set {one}" for one in written)])


def _at(temperature: str) -> str:
    return f" --temperature {temperature}" * bool(temperature)
