"""Diagnose all cases on which a target (a loss under test) fails together: find few reasons that explain many of them.

A reason explains a case only if a test on this case confirms it. A reason about the formula must reproduce the target's
value and gradient. A few small cases are explored completely, to find candidates. The candidates are then tested on
all other failing cases, and the one that explains most of them is chosen, then the next one.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from ..suite.cases import Case
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
    right_elsewhere,
    slight,
    suspects,
    words_for_case,
)
from .positives import CASE, POSITIVES, RIGHT_POSITIVES
from .search import Match
from .variants import COUNTS, WRONG_COUNTS, weights_words, words_of

SECONDS = 4.0
"""CPU time after which fewer candidates are tested, in seconds; it starts again after identification."""

EXPLORED = 12
"""Number of failing cases that are compared with every candidate."""

MOST = 3
"""Largest number of reasons that are given."""

PASSING = 6
"""Number of passing cases on which candidates are tested."""

MORE_PASSING = 30
"""Number of further passing cases, on which only the candidates that would be chosen are tested."""

LARGEST_PASSING = 16
"""The largest passing case on which candidates are tested, by ``Case.size``."""

FEW = 3
"""If more cases fail than this, a reason must explain at least two of them, unless it is in ``CERTAIN``."""

TESTED = 6
"""Number of candidates that are tested on all failing cases."""

NOISE = {"float64": 1e-12, "float32": 1e-6, "float16": 4e-3, "bfloat16": 3e-2}
"""Relative error up to which a difference is attributed to rounding, by the dtype in which a target computes."""

LOW = {"float32": 1e-4, "float16": 3e-2, "bfloat16": 0.2}
"""Largest relative error that computing in this dtype explains, if the formula is right."""

COMPUTES = "the formula is right, but the target computes in {} for inputs of every dtype"
EXTREME = (NORMS, LOST, BROKEN_GRADIENT, NO_POSITIVES, NO_NEGATIVES, UNDERFLOW, HIDDEN)
"""Reasons about policies, the range or the digits, not about the formula."""

CERTAIN = {NO_POSITIVES, NO_NEGATIVES, UNDERFLOW, HIDDEN, OVERFLOW, *WRONG_COUNTS}
"""Reasons for which one failing case is enough, because they cannot hold by coincidence."""

OPTION_WORDS: Mapping[tuple[str, str], str] = {
    ("no_positive", "zero"): "anchors without positives count as 0 in the mean",
    ("no_positive", "drop"): "anchors without positives are left out of the mean",
    ("no_positive", "nan"): "anchors without positives make the loss NaN",
    ("no_negative", "nan"): "anchors without negatives make the loss NaN",
    ("reduction", "sum"): "the values of the anchors are summed, not averaged",
    ("reduction", "none"): "one value per anchor is returned",
    ("reduction", "mean"): "the values of the anchors are averaged",
    ("reduction", "mean_pairs"): "the mean is over the positive pairs, not over the anchors",
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
"""What an option does, by its name and value."""


@dataclass(frozen=True)
class Reason:
    """What explains one or more failing cases.

    Attributes:
        words: a statement that holds for every one of them.
        cases: the ids of the cases.
        setting: the option to pass to ``--set`` if this is intended, as "name=value"; "" if there is none.
        also: whether it holds in addition to the first reason.
        ordinary: whether it is about the formula, not about a policy, the range or the digits.
    """

    words: str
    cases: tuple[str, ...]
    setting: str = ""
    also: bool = False
    ordinary: bool = True


@dataclass
class Diagnosis:
    """The reasons for the failures of a target.

    Attributes:
        reasons: the reasons, those that explain most cases first.
        failing: number of failing cases that were diagnosed.
        details: the explanation of each failure, by case and dtype.
        match: what identification found; None if it was not needed, or found nothing.
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
        """One sentence per reason, with the number of cases that it explains. Without reasons, one sentence says so."""
        found, left = [], self.failing
        for reason in self.reasons:
            count = len(reason.cases)
            left -= count
            remedy = f" (if intended: --set {reason.setting})" * bool(reason.setting)
            also = "also, " * reason.also
            share = f"explains {count} of {_cases(self.failing)}, {left or 'none'} left"
            found.append(f"{also}{reason.words}{remedy}: {share}")
        if self.failing and not found:
            found.append(f"no known mistake explains any of {_cases(self.failing)}")
        return found

    @property
    def short(self) -> str:
        """The first reason, the number of cases that it explains, and the number of other reasons.

        Without a reason: that the failing cases are not explained, or "" if there are none.
        """
        if not self.reasons:
            return f"{_cases(self.failing)} not explained" if self.failing else ""
        first, *others = self.reasons
        more = f", and {len(others)} more reason{'s' * (len(others) > 1)}" if others else ""
        return f"{first.words} ({len(first.cases)} of {_cases(self.failing)}){more}"

    def as_data(self) -> dict[str, Any]:
        """The diagnosis as plain data, without the details of each failure."""
        reasons = [
            {"words": one.words, "cases": list(one.cases), "setting": one.setting, "also": one.also}
            for one in self.reasons
        ]
        return {"reasons": reasons, "failing": self.failing, "unexplained": self.unexplained}


def _cases(number: int) -> str:
    return f"{number} failing case{'s' * (number != 1)}"


Test = Callable[[], Any]
"""Returns an explanation of one case if a candidate explains the case, otherwise None."""


class Evidence:
    """A case with the result of the target, and the candidates that may explain this result.

    Attributes:
        case: the case.
        dtype: the dtype of the result.
        outcome: what the target returned.
        truth: the true results.
        computes: the dtype in which the target computes, derived from the result.
        match: the loss that was identified, if any.
    """

    def __init__(self, case: Case, dtype: str, outcome: Outcome, truth: Truth | Expected) -> None:
        self.case, self.dtype, self.outcome, self.truth = case, dtype, outcome, truth
        self.computes = _precision(outcome, dtype)
        self.match: Match | None = None

    @cached_property
    def failure(self) -> Failure:
        """The result, for comparison with suspects: losses that the target may have computed."""
        return Failure(self.case, self.outcome, self.truth, NOISE[self.computes])

    @cached_property
    def _listed(self) -> list[tuple[str, Suspect]]:
        return list(_listed(self.failure))

    @cached_property
    def comparable(self) -> bool:
        """Whether suspects can be compared with it: the values have the right number, and are finite."""
        found = self.failure
        finite = bool(found.given.isfinite().all() and found.expected.isfinite().all())
        return finite and len(found.given) == len(found.expected)

    def candidates(self, options: Collection[str], base: str = "") -> Iterator[tuple[str, Test]]:
        """Yield the words of each candidate and its test, the preferred ones first.

        After the words, there may be a NUL character and the option that makes the candidate right, as "name=value".

        Args:
            options: the options of the loss that may have another value in the target.
            base: the words of a suspect that is taken as right, so that the candidates hold in addition to it.
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
            # A second change of the formula would contradict the cases that the first reason explains alone.
            return
        yield from self._factors(found)
        yield from ((words, partial(_tested, found, suspect, words)) for words, suspect in self.suspects(found))
        yield from self._last(found)

    def _wrong(self, found: Failure) -> bool:
        """Return whether the error is larger than the rounding errors of the dtype in which the target computes."""
        if found.right.words or not self.comparable:
            return True
        return any(found.left(expected, place) > 0 for place, (_, expected) in enumerate(found.compared))

    def _options(self, options: Collection[str]) -> Iterator[tuple[str, Test]]:
        """Yield the other values of the options."""
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
        """Return whether the values of the target, and its gradient if its values are finite, are those of ``found``.

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
        """Whether the straightforward implementation gives the same wrong result, so that the formula is right."""
        plain = _plain(self.case)
        return bool(np.isfinite(plain.values).all()) and self._equals(plain, EXPLAINED)

    def _dtypes(self, found: Failure) -> Iterator[tuple[str, Test]]:
        """Yield the dtype in which the target computes, if the error of the right formula may come from it."""
        if not self.comparable or self.computes == self.dtype or self.dtype not in ("float64", "float32"):
            return
        right = found.value(found.right).detach()
        if float((right - found.given).norm() / right.norm().clamp(min=1e-300)) <= LOW[self.computes]:
            words = COMPUTES.format(self.computes)
            yield words, lambda: words

    def _norms(self, found: Failure) -> Iterator[tuple[str, Test]]:
        """Yield the explanation that norms are clamped, or underflow or overflow, if it holds."""
        if words := clamped_norms(found):
            yield words[0], lambda: words[1]

    def _factors(self, found: Failure) -> Iterator[tuple[str, Test]]:
        """Yield the causes of a constant factor of the values, and the weights of the two directions."""
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
        """Yield the weights of the two directions, if a weighted sum of them explains value and gradient."""
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
        if left <= 1e-6 and abs(a - b) > 1e-3:
            words = weights_words(a, b)
            yield words, lambda: words

    def suspects(self, found: Failure) -> Iterator[tuple[str, Suspect]]:
        """Yield the words of each suspect, and the suspect."""
        if self.match is not None and (identified := proposed(self.match, found)) is not None:
            yield identified
        yield from self._listed if found is self.failure else _listed(found)

    def predicts_failure(self, words: str) -> bool:
        """Return whether a candidate has another value than the right loss, so that the case should have failed."""
        text, _, setting = words.partition("\0")
        option, _, choice = setting.partition("=")
        if choice and option in self.case.entry.choices:
            if self.case.option(option) == choice:
                return False
            changed = replace(self.case, keywords={**self.case.keywords, option: choice})
            right, other = (torch.tensor(_plain(case).values) for case in (self.case, changed))
        else:
            suspect = next((one for name, one in self.suspects(self.failure) if name == text), None)
            if suspect is None:
                return False
            right, other = (self.failure.value(one).detach() for one in (self.failure.right, suspect))
        return right.shape != other.shape or not torch.allclose(right, other, rtol=1e-4, atol=1e-9, equal_nan=True)

    def _last(self, found: Failure) -> Iterator[tuple[str, Test]]:
        """Yield factors without a cause, and errors of rounding size."""
        if factors := factors_of(found):
            factor, slope = factors
            words = gradient_words(slope) if factor == 1 else factor_words(factor)
            yield words, lambda: words
        if both := slight(found):
            yield both[0], lambda: both[1]


def _listed(found: Failure) -> Iterator[tuple[str, Suspect]]:
    return ((general_words(found, suspect), suspect) for suspect in suspects(found))


def _plain(case: Case) -> Outcome:
    """The result of the straightforward implementation, with the NaN that the policies of the case require."""
    outcome, undefined = plain_outcome(case, "float64"), case.undefined()
    values = outcome.anchors if case.option("reduction") == "none" else None
    if not any(case.undefined_values()):
        return outcome
    return replace(outcome, values=[math.nan if i in undefined else x for i, x in (values or {}).items()] or [math.nan])


def _setting_of(words: str, keywords: Collection[str]) -> str:
    """Return the option that makes a cause right, as "name=value"; "" if there is none."""
    base = re.search(r"temperature/([0-9.]+)", words)
    return f"base_temperature={base[1]}" if base and "base_temperature" in keywords else ""


def _tested(found: Failure, suspect: Suspect, words: str) -> str | None:
    if not found.remaining(suspect) < math.inf:
        return None
    return suspect.words or (words if "; " in words else words_for_case(found, suspect.variant))


@np.errstate(over="ignore")  # the norm of a difference may exceed the range of float64
def _share(given: Any, found: Any, expected: Any, noise: float, floor: float) -> float:
    """The distance of ``found`` from ``given``, relative to the distance of ``expected`` from ``given``.

    It is 0 within ``noise`` (relative to ``given``) or ``floor`` (absolute), and infinite if shapes or NaN differ.
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
    """The dtype in which a target computes: the narrowest in which all its finite results are representable.

    If there is none, or fewer than three results are nonzero, it is the dtype of the check.
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
        options: the options of the loss that may have another value in the target: those that are not passed to it.
    """

    def __init__(self, options: Iterable[str]) -> None:
        self.options = tuple(options)
        self.failing: list[tuple[Evidence, bool]] = []
        self.dtypes: dict[str, tuple[str, ...]] = {}
        self.passing: list[Evidence] = []
        self.refuting: list[Evidence] = []

    def add(self, case: Case, dtypes: Sequence[str], outcome: Outcome, truth: Truth | Expected, ordinary: bool) -> None:
        """Add a failing case.

        Args:
            case: the case.
            dtypes: the dtypes in which it fails, at least one.
            outcome: the result in the first of them.
            truth: the true results.
            ordinary: whether the case tests the formula; such cases are explored first.
        """
        self.failing.append((Evidence(case, dtypes[0], outcome, truth), ordinary))
        self.dtypes[case.id] = tuple(dtypes)

    def add_passing(self, case: Case, truth: Truth | Expected) -> None:
        """Add a case that passes; a reason that would make it fail is less credible. Only a few small ones are kept."""
        if len(self.passing) < PASSING + MORE_PASSING and case.size <= LARGEST_PASSING and case.anchors():
            outcome = Outcome(list(truth.values), truth.gradient, other_gradients=truth.other_gradients)
            self.passing.append(Evidence(case, "float64", outcome, truth))

    def diagnose(self, propose: Callable[[], Match | None] = lambda: None) -> Diagnosis:
        """Find reasons that explain the failing cases, one after the other.

        Args:
            propose: returns what identification finds, if anything; called at most once, if more than half of the
                ordinary cases remain unexplained.
        """
        found = Diagnosis(failing=len(self.failing))
        self.refuting = self.passing[:PASSING]
        ordered = sorted(self.failing, key=lambda one: (not one[1], one[0].case.size))
        left = [evidence for evidence, _ in ordered]
        ordinary = {id(evidence) for evidence, common in ordered if common}
        self._deadline = time.process_time() + SECONDS
        proposed, base, done = False, "", set[int]()
        while left and len(found.reasons) < MOST:
            both = [self._best(left, name) for name in dict.fromkeys(("", base))]
            best = max((one for one in both if one), key=lambda one: len(one[1]), default=None)
            explained_now = () if best is None else best[1].keys()
            if not proposed and 2 * len(ordinary - {*explained_now} - done) > len(ordinary):
                proposed, found.match = True, propose()
                match = found.match
                self._deadline = time.process_time() + SECONDS
                if match is not None:
                    for evidence, _ in self.failing:
                        evidence.match = match
                    continue
            if best is None:
                break
            words, explained, also = best
            text, _, setting = words.partition("\0")
            # An option has one value in all cases: no case may contradict it.
            before = [one for one, _ in self.failing if id(one) in done]
            hint = "" if setting and self._refuted(words, [*before, *self.passing]) else setting
            policy = bool(setting) or text in EXTREME or words == OVERFLOW
            text = self._precise(text, [one.case for one in left if id(one) in explained], left)
            cases = tuple(x.case.id for x in left if id(x) in explained)
            same = next((k for k, reason in enumerate(found.reasons) if reason.words == text), None)
            if same is None:
                found.reasons.append(Reason(text, cases, hint, also, not policy))
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

    def _narrow(self, words: str, left: Sequence[Evidence]) -> None:
        """Compare the other cases in the dtype in which the target computes, if ``words`` name one."""
        dtype = next((name for name in LOW if words == COMPUTES.format(name)), None)
        for evidence in left if dtype else ():
            evidence.computes = str(dtype)
            vars(evidence).pop("failure", None)
            vars(evidence).pop("_listed", None)

    def _best(self, left: Sequence[Evidence], base: str) -> tuple[str, dict[int, str], bool] | None:
        """Return the candidate that explains most cases: its words, its explanations by case, and ``bool(base)``.

        None if no candidate explains enough of them.
        """
        explains: dict[str, dict[int, str]] = {}
        small = [evidence for evidence in left if is_explained(evidence.case)]
        explored = small[: EXPLORED // 2] + small[EXPLORED // 2 :: max(1, 2 * len(small) // EXPLORED)]
        for place, evidence in enumerate(explored):
            if place and time.process_time() > self._deadline:
                del explored[place:]
                break
            for words, test in self._candidates(evidence, base):
                if id(evidence) not in explains.get(words, {}) and (details := _safely(test)):
                    explains.setdefault(words, {})[id(evidence)] = details
        # Candidates that explain equally many cases keep their order.
        first = sorted(explains, key=lambda words: -len(explains[words]))[: 2 * TESTED]
        refuted = {words: self._refuted(words, self.refuting) for words in first}
        first = [words for words in first if 2 * refuted[words] <= len(explains[words])]
        first = sorted(first, key=lambda words: refuted[words] - len(explains[words]))[:TESTED]
        for evidence in (one for one in left if one not in explored):
            if time.process_time() > self._deadline:
                # Without more time, only the best candidate is tested on all cases.
                first = first[:1]
            for words, test in self._candidates(evidence, base):
                if words in first and id(evidence) not in explains[words] and (details := _safely(test)):
                    explains[words][id(evidence)] = details
        ranked = sorted(first, key=lambda words: refuted[words] - len(explains[words]))
        best, least = None, 0
        for words in ranked:
            contradictions = self._refuted(words, self.passing[PASSING:])
            score = refuted[words] + contradictions - len(explains[words])
            if 2 * contradictions <= len(explains[words]) and score < least:
                best, least = words, score
            if not contradictions:
                break  # the others explain fewer cases
        few = best is None or (len(explains[best]) == 1 and len(self.failing) > FEW and best not in CERTAIN)
        return None if best is None or few else (best, explains[best], bool(base))

    def _refuted(self, words: str, cases: Sequence[Evidence]) -> int:
        """Return the number of cases that a candidate does not explain, although it predicts another value there."""
        found = 0
        for evidence in cases:
            if _safely(partial(evidence.predicts_failure, words)):
                tests = [test for name, test in self._candidates(evidence, "") if name == words]
                found += not any(map(_safely, tests))
        return found

    def _candidates(self, evidence: Evidence, base: str) -> Iterator[tuple[str, Test]]:
        # Extreme inputs may break any formula; a failure of the explanation must not hide the failure itself.
        with suppress(Exception):
            yield from evidence.candidates(self.options, base)

    def _precise(self, words: str, cases: Sequence[Case], left: Sequence[Evidence]) -> str:
        """Replace the words of ``OVERFLOW`` by words with a bound that the largest logit of each case reaches.

        Those of ``NO_POSITIVES`` are made narrower if no anchor has positives in any of the cases.
        """
        if words == NO_POSITIVES and not any(case.positives()[i] for case in cases for i in case.anchors()):
            return "the loss is NaN or infinite if no anchor has positives"
        if words != OVERFLOW:
            return words
        least = min(_largest_logit(case) for case in cases)
        return f"the loss is NaN or infinite where the largest logit is {least:.4g} or more"


def _largest_logit(case: Case) -> float:
    rows = {name: torch.tensor(matrix) for name, matrix in case.matrices.items()}
    return float(similarities(case, rows).max()) / case.temperature


def _safely(test: Test) -> Any:
    """Return the result of a test; None if it fails, because extreme inputs may break it."""
    try:
        return test()
    except Exception:  # a failure of the explanation must not hide the failure itself
        return None


def proposed(match: Match, found: Failure) -> tuple[str, Suspect] | None:
    """Return what identification found, in words, and as a suspect for a case; None if it cannot be applied there."""
    (used, *_), variant, right = match.temperatures.values(), match.variant, found.right.variant
    built_in = None in match.temperatures
    scale = match.factor_for(None if built_in else found.temperature)
    positives = "meant" if variant.positives in RIGHT_POSITIVES else variant.positives
    if scale is None or CASE not in POSITIVES[positives].calls or not (built_in or match.as_passed):
        return None
    reduction = match.count if match.count not in ("mean", "drop") else found.right.reduction
    changed = replace(variant, loss=found.case.loss, positives=positives)
    same = built_in and math.isclose(used, found.temperature, rel_tol=1e-6)
    temperature = used if built_in and not same else None
    suspect = replace(found.right, variant=changed, reduction=reduction, scale=scale, temperature=temperature)
    if words := match.words() + [words_of(match.count)] * (match.count in WRONG_COUNTS):
        words += right_elsewhere(right, changed)
    return "; ".join(words) or match.name, suspect
