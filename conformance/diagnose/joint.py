"""Find few reasons that explain most failures of a target (a loss under test).

1. A few small failing cases are tested for every known mistake. The mistakes that explain one of them are candidates.
2. The candidates are tested on the other failing cases. The candidate that explains most cases becomes a reason.
3. These steps are repeated for the cases that remain.

A reason about the formula must reproduce the value and the gradient of the target on each case that it explains.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import accumulate, tee
from typing import Any

import numpy as np
import torch

from ..implementations.base import items_of
from ..suite.cases import Case
from ..suite.catalogue import WEIGHTS
from ..suite.records import Expected, Outcome, Truth
from ..truth.baseline import plain_outcome, similarities
from .explain_failure import (
    BROKEN_GRADIENT,
    EXPLAINED,
    HIDDEN,
    LOST,
    NO_NEGATIVES,
    NO_POSITIVES,
    NORMS,
    OVERFLOW,
    UNDERFLOW,
    Failure,
    Suspect,
    clamped_norms,
    factor_words,
    factors_of,
    general_words,
    gradient_words,
    is_explained,
    not_finite,
    other_weights,
    right_elsewhere,
    slight,
    suspects,
    words_for_case,
    work_of,
)
from .positives import CASE, FIRST_VIEW, POSITIVES, RIGHT_POSITIVES
from .search import Match, same_loss
from .variants import COUNTS, ROUNDED, WRONG_COUNTS, Variant, weights_words, words_of

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

NOISE = {"float64": 1e-12, "float32": 1e-6, "float16": 4e-3, "bfloat16": 3e-2}
"""Relative difference that is attributed to rounding, by the dtype in which the target computes."""

LOW = {"float32": 1e-4, "float16": 3e-2, "bfloat16": 0.2}
"""Relative error that computing in this dtype explains, if the formula is right."""

COMPUTES = "the formula is right, but the target computes in {} for inputs of every dtype"
NO_PAIR = "the loss is NaN or infinite if there is no pair: in a batch of one row"

EXTREME = (NORMS, LOST, BROKEN_GRADIENT, NO_POSITIVES, NO_NEGATIVES, UNDERFLOW, HIDDEN)
"""Reasons that are not about the formula."""

CERTAIN = {NO_POSITIVES, NO_NEGATIVES, UNDERFLOW, HIDDEN, OVERFLOW, *WRONG_COUNTS}
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
        match: the identified loss; None if nothing was identified, or identification was not needed.
    """

    reasons: list[Reason] = field(default_factory=list)
    failing: int = 0
    details: dict[tuple[str, str], str] = field(default_factory=dict)
    match: Match | None = None

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
            share = f"explains {count} of {_cases(self.failing)}, {left or 'none'} left"
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
        """Return the diagnosis as a JSON value, without ``details`` and ``match``."""
        reasons = [
            {name: getattr(one, name) for name in ("words", "setting", "also", "loss")} | {"cases": list(one.cases)}
            for one in self.reasons
        ]
        return {"reasons": reasons, "failing": self.failing, "unexplained": self.unexplained}


def _cases(number: int) -> str:
    return f"{number} failing case{'s' * (number != 1)}"


Test = Callable[[], Any]
"""Tests a candidate on one case. Returns an explanation, or None if the candidate does not explain the case."""


class Evidence:
    """A case with the result of the target.

    Attributes:
        case: the case.
        dtype: the dtype of the result.
        outcome: what the target returned.
        truth: the true results.
        views: number of views of each item that the target was called with; 1 if it was called with single rows.
        computes: the dtype in which the target seems to compute.
        match: the loss that was identified, if any.
    """

    def __init__(self, case: Case, dtype: str, outcome: Outcome, truth: Truth | Expected, views: int = 1) -> None:
        self.case, self.dtype, self.outcome, self.truth, self.views = case, dtype, outcome, truth, views
        self.computes = _precision(outcome, dtype)
        self.match: Match | None = None

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
        if not self.case.anchors():
            return
        found = self.failure
        if base:
            suspect = next((one for words, one in self.suspects(found) if words == base), None)
            if suspect is None:
                return
            found = Failure(self.case, self.outcome, self.truth, NOISE[self.computes])
            found.right = suspect
        else:
            if self.comparable:
                yield from self._norms(found)
                if self._wrong(found) and self._straightforward:
                    yield from self._last(found)
                    return
            yield from self._options(options)
        yield from self._dtypes(found)
        if not self._wrong(found):
            return
        if len(found.given) == len(found.expected):
            finite = bool(found.given.isfinite().all()), bool(found.expected.isfinite().all())
            if finite == (False, True) and (found_words := not_finite(found)):
                yield found_words[0], lambda: found_words[1]
            if finite == (False, True) and self.case.option("reduction") == "mean":
                zero = (count for count in WRONG_COUNTS if not COUNTS[count](found.right.setting))
                yield from ((count, partial("{}, which is 0".format, count)) for count in zero)
        if not self.comparable:
            return
        if base:
            yield from self._norms(found)
            # A second mistake in the formula would contradict the cases that the first reason explains alone.
            return
        yield from ((words, partial(str, words)) for words in other_weights(found))
        yield from self._factors(found)
        yield from ((words, partial(_tested, found, suspect, words)) for words, suspect in self.suspects(found))
        yield from self._last(found)

    def _wrong(self, found: Failure) -> bool:
        """Return whether the error is larger than rounding errors."""
        if found.right.words or not self.comparable:
            return True
        return any(found.left(expected, place) > 0 for place, (_, expected) in enumerate(found.compared))

    def _options(self, options: Collection[str]) -> Iterator[tuple[str, Test]]:
        for option in options:
            for choice in self.case.entry.choices.get(option, ()):
                if choice != self.case.option(option):
                    words = OPTION_WORDS.get((option, choice), f"{option}={choice} is computed")
                    yield f"{words}\0{option}={choice}", partial(self._has_option, words, option, choice)

    def _has_option(self, words: str, option: str, choice: str) -> str | None:
        case = replace(self.case, keywords={**self.case.keywords, option: choice})
        other = _plain(case)
        if not case.undefined() and not np.isfinite(other.values).all():
            return None
        return words if self._equals(other, EXPLAINED) and not self._equals(self.truth, 0.0) else None

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

    @cached_property
    def _straightforward(self) -> bool:
        """Whether the straightforward implementation is equally wrong, so that the formula is right."""
        values = _plain(self.case, gradient=False)
        finite = bool(np.isfinite(values.values).all())
        return finite and self._equals(values, EXPLAINED) and self._equals(_plain(self.case), EXPLAINED)

    def _dtypes(self, found: Failure) -> Iterator[tuple[str, Test]]:
        """Yield that the target computes in a narrower dtype, if this explains the error."""
        if not self.comparable or self.computes == self.dtype or self.dtype not in ("float64", "float32"):
            return
        right = found.value(found.right).detach()
        if float((right - found.given).norm() / right.norm().clamp(min=1e-300)) <= LOW[self.computes]:
            words = COMPUTES.format(self.computes)
            yield words, lambda: words

    def _norms(self, found: Failure) -> Iterator[tuple[str, Test]]:
        if words := clamped_norms(found):
            yield words[0], lambda: words[1]

    def _factors(self, found: Failure) -> Iterator[tuple[str, Test]]:
        """Yield causes of a wrong factor, and wrong weights of the two directions."""
        factors = factors_of(found)
        for value, words, general in found.causes if factors else ():
            if math.isclose(factors[0], value, rel_tol=1e-4) and factors[0] != 1:  # type: ignore[index]
                setting = _setting_of(general, self.case.entry.keywords)
                yield f"{general}\0{setting}", lambda words=words: words  # type: ignore[misc]
        if factors and factors[0] not in (0, 1) and "base_temperature" in self.case.entry.keywords:
            base = self.case.temperature / factors[0]
            if base > 0 and math.isclose(base, float(f"{base:.2g}"), rel_tol=1e-5) and found.factor == 1:
                words = f"values are multiplied by temperature/{base:.2g}"
                yield f"{words}\0base_temperature={base:.2g}", lambda: words
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
        right = self.case.option("direction_weights") or (0.5, 0.5)
        if left <= 1e-6 and abs(a * right[1] - b * right[0]) > 1e-3 * abs(a + b):
            words = weights_words(a, b, right)
            yield words, lambda: words

    def suspects(self, found: Failure) -> Iterator[tuple[str, Suspect]]:
        """Yield suspects with their words, an identified loss first; none for a case with weights, which they lack."""
        if not WEIGHTS.keys().isdisjoint(self.case.arguments):
            return
        if self.match is not None and (identified := proposed(self.match, found)) is not None:
            yield identified
        yield from copy(self._listed) if found is self.failure else _listed(found)

    def predicts_failure(self, words: str) -> bool:
        """Return whether a candidate differs from the correct loss, so that the case should fail."""
        text, _, setting = words.partition("\0")
        option, _, choice = setting.partition("=")
        if choice and option in self.case.entry.choices:
            if self.case.option(option) == choice:
                return False
            changed = replace(self.case, keywords={**self.case.keywords, option: choice})
            right, other = (torch.tensor(_plain(case, gradient=False).values) for case in (self.case, changed))
        else:
            suspect = next((one for name, one in self.suspects(self.failure) if name == text), None)
            if suspect is None:
                return False
            right, other = (self.failure.value(one).detach() for one in (self.failure.right, suspect))
        return right.shape != other.shape or not torch.allclose(right, other, rtol=1e-4, atol=1e-9, equal_nan=True)

    def _last(self, found: Failure) -> Iterator[tuple[str, Test]]:
        """Yield wrong factors without a known cause, and rounding errors."""
        if factors := factors_of(found):
            factor, slope = factors
            words = gradient_words(slope) if factor == 1 else factor_words(factor)
            yield words, lambda: words
        if both := slight(found):
            yield both[0], lambda: both[1]


def _listed(found: Failure) -> Iterator[tuple[str, Suspect]]:
    return ((general_words(found, suspect), suspect) for suspect in suspects(found))


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
        if unchanged or found.left(without, 0) < found.left(rounded, 0):
            return None
    return suspect.words or (words if "; " in words else words_for_case(found, suspect.variant) or words)


@np.errstate(over="ignore")  # the norm of a difference may exceed the range of float64
def _share(given: Any, found: Any, expected: Any, noise: float, floor: float) -> float:
    """Return |given - found| / |given - expected|.

    The result is 0 if the numerator is at most ``noise * |given|`` or ``floor``, and infinity if shapes or NaN differ.
    """
    if given.shape != found.shape or not np.array_equal(np.isnan(given), np.isnan(found)):
        return math.inf
    kept = ~np.isnan(given)
    if not np.isfinite(given[kept]).all():
        return math.inf
    left, size = float(np.linalg.norm((given - found)[kept])), float(np.linalg.norm(given[kept]))
    if given.shape != expected.shape or np.isnan(expected).any() or not kept.all():
        return 0.0 if left <= 1e-6 * size + noise else math.inf
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


class Collector:
    """Collects the failing cases of a target, and diagnoses them.

    Args:
        options: the options that are not passed to the target, so that the target may use other values.
        call: how the target is called, one of ``CALLS``.
    """

    def __init__(self, options: Iterable[str], call: str = "") -> None:
        self.options, self.call, self._by_items = tuple(options), call, call == "features"
        self.failing: list[tuple[Evidence, bool]] = []
        self.dtypes: dict[str, tuple[str, ...]] = {}
        self.passing: list[Evidence] = []
        self.refuting: list[Evidence] = []

    def add(self, case: Case, dtypes: Sequence[str], outcome: Outcome, truth: Truth | Expected, ordinary: bool) -> None:
        """Add a failing case.

        Args:
            case: the case.
            dtypes: the dtypes in which it fails, at least one.
            outcome: the result in the first of these dtypes.
            truth: the true results.
            ordinary: whether the case tests the formula. Ordinary cases are explored first.
        """
        self.failing.append((self._evidence(case, dtypes[0], outcome, truth), ordinary))
        self.dtypes[case.id] = tuple(dtypes)

    def add_passing(self, case: Case, truth: Truth | Expected) -> None:
        """Add a passing case, which may refute reasons. Only a few small cases are kept."""
        if len(self.passing) < PASSING + MORE_PASSING and case.size <= LARGEST_PASSING and case.anchors():
            outcome = Outcome(list(truth.values), truth.gradient, other_gradients=truth.other_gradients)
            self.passing.append(self._evidence(case, "float64", outcome, truth))

    def _evidence(self, case: Case, dtype: str, outcome: Outcome, truth: Truth | Expected) -> Evidence:
        views = len(items_of(case)[0]) if self._by_items else 1
        return Evidence(case, dtype, outcome, truth, views)

    def diagnose(self, propose: Callable[[], Match | None] = lambda: None) -> Diagnosis:
        """Find reasons that explain the failing cases.

        Args:
            propose: identifies the loss. Called at most once, if more than half of the ordinary cases remain
                unexplained.
        """
        found = Diagnosis(failing=len(self.failing))
        if words := self._everywhere():
            found.reasons.append(Reason(words, tuple(self.dtypes)))
            found.details = {(case, dtype): words for case, dtypes in self.dtypes.items() for dtype in dtypes}
            return found
        self.refuting = self.passing[:PASSING]
        ordered = sorted(self.failing, key=lambda one: (not one[1], one[0].case.size))
        left = [evidence for evidence, _ in ordered]
        ordinary = {id(evidence) for evidence, common in ordered if common}
        proposed, base, done = False, "", set[int]()
        while left and len(found.reasons) < MOST:
            both = [self._best(left, name) for name in dict.fromkeys(("", base))]
            best = max((one for one in both if one), key=lambda one: len(one[1]), default=None)
            explained_now = () if best is None else best[1].keys()
            if not proposed and 2 * len(ordinary - {*explained_now} - done) > len(ordinary):
                proposed, found.match = True, propose()
                match = found.match
                if match is not None:
                    for evidence, _ in self.failing:
                        evidence.match = match
                    continue
            if best is None:
                break
            words, explained, also = best
            text, _, setting = words.partition("\0")
            # An option has the same value in all cases, so no case may contradict it.
            before = [one for one, _ in self.failing if id(one) in done]
            hint = "" if setting and self._refuted(words, [*before, *self.passing]) else setting
            policy = bool(setting) or text in EXTREME or words == OVERFLOW
            precise = self._precise(words, [one for one in left if id(one) in explained])
            cases = tuple(x.case.id for x in left if id(x) in explained)
            same = next((k for k, reason in enumerate(found.reasons) if reason.words == precise), None)
            if same is None:
                loss = "" if policy or also else self._other_loss(text, [one for one in left if id(one) in explained])
                loss = "--call one_way" if self.call == "views" and text == FIRST_VIEW else loss
                found.reasons.append(Reason(precise, cases, hint, also, not policy, loss))
            else:
                reason = found.reasons[same]
                found.reasons[same] = replace(reason, cases=reason.cases + cases)
            self.refuting += [one for one in left if id(one) in explained][:PASSING]
            self._narrow(text, left)
            for evidence in left:
                if id(evidence) in explained:
                    details = explained[id(evidence)]
                    found.details |= {(evidence.case.id, dtype): details for dtype in self.dtypes[evidence.case.id]}
            left, done = [evidence for evidence in left if id(evidence) not in explained], done | explained.keys()
            base = base or ("" if setting else text)
        return found

    def _everywhere(self) -> str:
        """Describe a target that returns NaN, infinity or the same number for every batch; "" for other targets.

        Passing cases must not contradict this. Only an ordinary case shows that the cause is not the policy of a case.
        """
        cases = [*(one for one, _ in self.failing), *self.passing]
        if len(self.failing) < FEW or not any(ordinary for _, ordinary in self.failing):
            return ""
        with np.errstate(over="ignore"):  # the results of some cases are rounded to float32
            values = np.unique(np.concatenate([one.outcome.values for one in cases]).astype(np.float32))
        if len(values) > 1:
            return ""
        (value,) = values
        name = f"the constant {value:g}" if np.isfinite(value) else "NaN" if np.isnan(value) else "infinite"
        return f"the loss is {name} for every batch"

    def _other_loss(self, words: str, explained: Sequence[Evidence]) -> str:
        """Return the arguments of ``pairproof check`` for the loss of the catalogue that the words describe.

        Return "" if there is none, if it does not explain most failing cases, or if a passing case contradicts it.
        """
        if 2 * len(explained) <= len(self.failing) or self._refuted(words, self.passing):
            return ""
        match, found = explained[0].match, explained[0].failure
        if match is not None and words == computes(match):
            return _arguments(match.variant, match.reduction)
        suspect = next((one for name, one in explained[0].suspects(found) if name == words), None)
        if suspect is None or suspect.loss:
            return f"--loss {suspect.loss}" if suspect else ""
        same = replace(suspect, variant=found.right.variant, words="", general="")
        if vars(same) != vars(found.right):  # not only the variant is wrong
            return ""
        other = same_loss(suspect.variant)
        return _arguments(other) if other else ""

    def _narrow(self, words: str, left: Sequence[Evidence]) -> None:
        """If ``words`` say that the target computes in a dtype, use this dtype for the remaining cases."""
        dtype = next((name for name in LOW if words == COMPUTES.format(name)), None)
        for evidence in left if dtype else ():
            evidence.computes = str(dtype)
            vars(evidence).pop("failure", None)
            vars(evidence).pop("_listed", None)

    def _best(self, left: Sequence[Evidence], base: str) -> tuple[str, dict[int, str], bool] | None:
        """Return the candidate that explains most cases, or None if none explains enough.

        Returns:
            The words, the explanations by the id() of the evidence, and ``bool(base)``.
        """
        explains: dict[str, dict[int, str]] = {}
        explored = _explored([evidence for evidence in left if is_explained(evidence.case)])
        for evidence in explored[: EXPLORED // 2]:
            self._explore(evidence, base, explains)
        first = {words: dict(details) for words, details in explains.items()}
        found = self._best_of(left, base, first, explored[: EXPLORED // 2])
        if found is not None and len(found[1]) == len(left):
            return found  # no candidate of the other cases explains more
        for evidence in explored[EXPLORED // 2 :]:
            self._explore(evidence, base, explains)
        return self._best_of(left, base, explains, explored)

    def _explore(self, evidence: Evidence, base: str, explains: dict[str, dict[int, str]]) -> None:
        """Test a case for every known mistake, and add the explanations."""
        for words, test in self._candidates(evidence, base):
            if id(evidence) not in explains.get(words, {}) and (details := _safely(test)):
                explains.setdefault(words, {})[id(evidence)] = details

    def _best_of(
        self,
        left: Sequence[Evidence],
        base: str,
        explains: dict[str, dict[int, str]],
        explored: Sequence[Evidence],
    ) -> tuple[str, dict[int, str], bool] | None:
        """Test the candidates on the cases that are not explored, add the explanations, and return the best one."""
        first = sorted(explains, key=lambda words: -len(explains[words]))[: 2 * TESTED]
        views = {words: {one.views for one in left if id(one) in explains[words]} for words in first}
        refuted = {words: self._refuted(words, self.refuting, views[words]) for words in first}
        first = [words for words in first if 2 * refuted[words] <= len(explains[words])]
        first = sorted(first, key=lambda words: refuted[words] - len(explains[words]))[:TESTED]
        contradictions = cache(lambda words: self._refuted(words, self.passing[PASSING:], views[words]))
        others, work = [one for one in left if one not in explored], 0.0
        for evidence in others:
            self._test(evidence, base, first[:1], explains)
        if first and len(explains[first[0]]) == len(left) and not refuted[first[0]] + contradictions(first[0]):
            first = first[:1]  # no candidate explains more
        for evidence in others if first[1:] else ():
            work += work_of(evidence.case)
            if work > WORK:
                break
            self._test(evidence, base, first[1:], explains)
        ranked = sorted(first, key=lambda words: refuted[words] - len(explains[words]))
        best, least = None, 0
        for words in ranked:
            score = refuted[words] + contradictions(words) - len(explains[words])
            if 2 * contradictions(words) <= len(explains[words]) and score < least:
                best, least = words, score
            if not contradictions(words):
                break  # the others explain fewer cases
        few = best is None or (len(explains[best]) == 1 and len(self.failing) > FEW and best not in CERTAIN)
        return None if best is None or few else (best, explains[best], bool(base))

    def _test(self, evidence: Evidence, base: str, names: Iterable[str], explains: dict[str, dict[int, str]]) -> None:
        """Test some candidates on a case, and add the explanations."""
        left = {words for words in names if id(evidence) not in explains[words]}
        for words, test in self._candidates(evidence, base) if left else ():
            if words in left and (details := _safely(test)):
                explains[words][id(evidence)] = details
                left.remove(words)
                if not left:
                    return

    def _refuted(self, words: str, cases: Sequence[Evidence], views: Collection[int] = ()) -> int:
        """Return the number of cases that refute a candidate: they should fail in this way, but do not.

        Args:
            words: the candidate.
            cases: the cases.
            views: if given, only cases with one of these numbers of views count. Code for one view is often separate.
        """
        found = 0
        for evidence in cases:
            if views and evidence.views not in views:
                continue
            if _safely(partial(evidence.predicts_failure, words)):
                tests = [test for name, test in self._candidates(evidence, "") if name == words]
                found += not any(map(_safely, tests))
        return found

    def _candidates(self, evidence: Evidence, base: str) -> Iterator[tuple[str, Test]]:
        # Extreme inputs may raise errors, which must not hide the failure itself.
        with suppress(Exception):
            yield from evidence.candidates(self.options, base)

    def _precise(self, words: str, explained: Sequence[Evidence]) -> str:
        """Make the words of a reason more precise for the cases that it explains."""
        (text, _, setting), cases = words.partition("\0"), [one.case for one in explained]
        views = sorted({one.views for one in explained})
        if not setting and self._refuted(words, [one for one in self.passing if one.views not in views]):
            return f"{text} (only with {' or '.join(map(str, views))} view{'s' * (views != [1])} per item)"
        if text == NO_POSITIVES and all(case.has_no_pair for case in cases):
            return NO_PAIR
        if text == NO_POSITIVES and not any(case.positives()[i] for case in cases for i in case.anchors()):
            return "the loss is NaN or infinite if no anchor has positives"
        if text != OVERFLOW:
            return text
        least = min(_largest_logit(case) for case in cases)
        return f"the loss is NaN or infinite where the largest logit is {least:.4g} or more"


def _explored(cases: Sequence[Evidence]) -> list[Evidence]:
    """Choose the cases to explore: the first ones, and some of the others, within the limit of the work."""
    chosen = [*cases[: EXPLORED // 2], *cases[EXPLORED // 2 :: max(1, 2 * len(cases) // EXPLORED)]]
    works = accumulate(work_of(evidence.case) for evidence in chosen)
    return [one for k, (one, work) in enumerate(zip(chosen, works, strict=True)) if k == 0 or work <= EXPLORATION]


def _largest_logit(case: Case) -> float:
    rows = {name: torch.tensor(matrix) for name, matrix in case.matrices.items()}
    return float(similarities(case, rows).max()) / case.temperature


def _safely(test: Test) -> Any:
    """Return the result of a test, or None if it raises an error."""
    try:
        return test()
    except Exception:  # extreme inputs may raise errors
        return None


def proposed(match: Match, found: Failure) -> tuple[str, Suspect] | None:
    """Return the identified loss in words and as a suspect for a case; None if it does not apply to the case."""
    (used, *_), variant, right = match.temperatures.values(), match.variant, found.right.variant
    built_in = None in match.temperatures
    scale = match.factor_for(None if built_in else found.temperature)
    positives = "meant" if variant.positives in RIGHT_POSITIVES else variant.positives
    if scale is None or CASE not in POSITIVES[positives].calls or not (built_in or match.as_passed):
        return None
    reduction = match.count if match.count not in ("mean", "drop") else found.right.reduction
    scale /= found.factor
    changed = replace(variant, loss=found.case.loss, positives=positives)
    same = built_in and math.isclose(used, found.temperature, rel_tol=1e-6)
    temperature = used if built_in and not same else None
    suspect = replace(found.right, variant=changed, reduction=reduction, scale=scale, temperature=temperature)
    if found.right.setting.views is not None and variant.positives.startswith("towers"):
        setting, rows = found.right.setting, torch.arange(len(found.rows))
        items = rows.minimum(setting.positive.int().argmax(dim=1))
        towers = POSITIVES[variant.positives].change(replace(setting, n_views=2, items=items))
        suspect = replace(suspect, read_as=lambda: towers or setting)
    direction = dict(variant.options).get("direction", "both")
    if found.loss.two_towers and variant.entry.two_towers and direction != found.case.option("direction"):
        suspect = replace(suspect, read_as=found.read_again("", direction=direction).read_as)
    if words := match.words() + [words_of(match.count)] * (match.count in WRONG_COUNTS):
        words += right_elsewhere(right, changed)
    if not math.isclose(scale, 1.0, rel_tol=1e-6):
        power = match.scale[1] if match.scale else 0
        words.append(factor_words(scale) if power == 0 else f"values are multiplied by temperature^{power}")
    return "; ".join(words) or computes(match), suspect


def computes(match: Match) -> str:
    """Describe a target that computes another loss of the catalogue, or other options."""
    return f"the target computes {match.name}"


def _arguments(variant: Variant, reduction: str = "mean") -> str:
    """Return the arguments of ``pairproof check`` for a loss of the catalogue and its options."""
    options = [
        *variant.options,
        *([("reduction", reduction)] if reduction in variant.entry.choices["reduction"][1:] else []),
    ]
    return " ".join([f"--loss {variant.loss}", *(f"--set {name}={value}" for name, value in options)])
