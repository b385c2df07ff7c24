"""Judge a user's loss under every usage, on batches that it computes correctly.

A *usage* is another way to call a loss, such as under autocast (see ``implementations.usages``). Each usage is judged
on small golden cases, on a drawn batch of training size, and on a drawn batch with an anchor without positives.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from ..implementations.base import items_of, lacks_positives
from ..implementations.callable import External
from ..implementations.sandbox import TargetError, described
from ..implementations.signatures import Claim
from ..implementations.usages import (
    SIDE_EFFECTS,
    STEP,
    TEMPERATURE,
    USAGES,
    NotApplicable,
    NotJudged,
    Usage,
    direction_of,
    upstream_of,
)
from ..suite.cases import Case, row_norms, unit_rows
from ..suite.catalogue import IGNORED, LOSSES, WEIGHTS
from ..suite.golden import GoldenCase
from ..suite.levels import Level
from ..suite.progress import Progress, tracked
from ..suite.records import Bounds, Matrix, Outcome, Truth
from ..truth.compare import compare
from ..truth.evaluate import PROVE_UP_TO, truth
from ..truth.intervals import CertificationError, precision
from ..truth.loops import enclosures
from ..truth.matrices import has_formula
from ..truth.tolerances import bounds, scalar_bounds, unit_roundoff
from .deviations import verdict
from .fresh import draw_with
from .levels import in_float32
from .options import Request
from .proofs import case_as_claimed, scaled_to_logits
from .results import BAD, Check, Status
from .verify import truth_of

CASES = 3
"""Largest number of small cases on which each usage is judged."""

CANDIDATES = 12
"""Number of small cases from which ``CASES`` are chosen."""

DRAWN: Mapping[str, Mapping[str, Any]] = {
    "training-size": {"rows": (65, 72), "columns": (33, 48), "classes": "common", "common": "unbalanced"},
    "lonely-anchors": {"rows": (9, 12), "columns": (5, 8), "classes": "single", "common": "unbalanced"},
    "large-labels": {"rows": (12, 16), "columns": (5, 8), "classes": "common", "common": "unbalanced"},
}
"""The choices of the drawn batches (see ``fresh.py``). The last one is for usages in which results are rounded."""

LARGE_LABELS = 2**24
"""Added to the labels of the batch "large-labels": float32, bfloat16 and float16 round some of them to one number."""

SAME_CHOICES: Mapping[str, Any] = {
    "temperature": "usual",
    "trained": False,
    "mixed norms": True,
    "layout": "shuffled",
    "labels": "small",
}

REQUIRED: Mapping[str, Mapping[str, Any]] = {
    "negatives": {"queue": "long"},
    "hard_negatives": {"hard": 1},
    "ref_embeddings": {"references": "others"},
}
"""Choices for the arrays that a target requires."""

SECOND_BITS = 300
"""Working precision of second derivatives."""

SECOND_STEP = 2.0**-32
"""Step of the difference quotient of gradients. Its error is about the square of the step, below that of float64."""

LEAST = 0.01
"""Lower limit of the loss and of the largest entry of its gradient, so that a wrong factor is noticed."""

CLAMPED = 1e-3
"""Relative tolerance for the loss in which rows of zeros have similarities of 0, as with clamped norms."""

LARGEST_SHARE = 32
"""Largest allowed error of a row of a gradient in a 16-bit dtype, in unit roundoffs of the largest norm of a row.

The error of a straightforward implementation was at most 9 unit roundoffs on the ordinary cases of all losses.
"""

LARGEST_VALUE_SHARE = 6
"""Largest allowed error of a value in a 16-bit dtype, in unit roundoffs of the value plus the sum over all similarities
of their size times the derivative with respect to them.

The error of a straightforward implementation was at most 1.5 such units on the ordinary cases of all losses.
"""

OTHER_ARRAYS = "not possible for arrays of"
"""The start of the reason why a usage that needs other arrays is not judged; their kind follows."""

NONE_PASSES = "usages are judged on cases that pass in an ordinary call, and none does"
"""Why none is judged, before the first case that does not pass."""

CHANGE_SHARE = 0.05
"""Largest error of a difference quotient of the loss, as a share of the derivative, that still confirms it."""

REFUSAL = re.compile(
    r"\b(dtype|scalar type|strides?|layout|contiguous|view|b?float\d*|half|double|u?int\d*|byte|bool|long|"
    r"\w+Tensor|not (yet )?(implemented|supported)|unsupported)\b",
    re.IGNORECASE,
)
"""Words of an error that refuses a dtype or a layout."""


def names() -> list[str]:
    """Return the names of the checks of all usages and side effects."""
    return [*(usage.id for usage in USAGES), *(f"side-effects/{kind}" for kind in SIDE_EFFECTS)]


def chosen(request: Request) -> list[Usage]:
    """Return the usages that a request selects; all if it selects no cases. The slow ones may still be skipped."""
    patterns = request.cases
    return [u for u in USAGES if not patterns or any(fnmatchcase(u.id, one) for one in patterns)]


def ordinary(case: Case, claim: Claim) -> bool:
    """Return whether a case is small and its inputs are moderate, so that a right loss is right under every usage."""
    # Usages change rows and references, not masks and weights of pairs.
    if not {*IGNORED, *WEIGHTS}.isdisjoint(case.arguments):
        return False
    if not (case.n >= 4 and case.size <= 24) or lacks_positives(case):
        return False
    if not 0.03 <= (claim.temperature or case.temperature) <= 2 or not case.holds_in("float32"):
        return False
    norms = np.concatenate([row_norms(rows) for rows in case.matrices.values()])
    has_negatives = all(len(m) > len(p) for m, p in zip(case.members(), case.positives(), strict=True))
    return bool(norms.min() > 0.05 and norms.max() < 100) and has_negatives


def _mixed(cases: Sequence[Case]) -> Iterator[Case]:
    """Yield the cases so that the first ones differ in matrices, masks, classes, dtypes and sizes."""
    kinds: dict[tuple[object, ...], list[Case]] = {}
    for case in sorted(cases, key=lambda case: case.temperature != 0.5):
        two = {*case.arguments.get("labels", ())} == {0, 1}
        kinds.setdefault(
            (*case.others, "positives" in case.arguments, two, case.holds_in("bfloat16"), case.n <= 8), []
        ).append(case)
    groups = list(kinds.values())
    for k in range(max(map(len, groups), default=0)):
        yield from (group[k] for group in groups if k < len(group))


class UsageJudge:
    """Judges one target under usages, on batches that it computes correctly.

    Args:
        target: the target.
        dtypes: the dtypes in which it is judged; empty for all.
        cases: the cases of the loss.
        claimed: returns a case with the options that the target claims, and its golden entry.
        checks: the checks of the cases so far. The target is not called again for a case that it computed wrongly.

    Attributes:
        inapplicable: why a selected usage has no check, by its id.
        wrong: the first ordinary case that the target computes wrongly, and its first difference, in words.
    """

    def __init__(
        self,
        target: External,
        dtypes: Sequence[str],
        cases: Iterable[Case],
        claimed: Callable[[Case], tuple[Case, GoldenCase | None]],
        checks: Iterable[Check] = (),
    ) -> None:
        self.target, self.dtypes, self._offered, self._claimed = target, dtypes, cases, claimed
        self.inapplicable: dict[str, str] = {}
        self.wrong = ""
        self._known_bounds: dict[tuple[Case, str], Bounds] = {}
        wrong = (one for one in checks if one.status is Status.ERRORED or (one.ratio or 0) > 1)
        self._known_wrong = {(one.case, one.dtype): one.message for one in wrong if one.status in BAD}

    def checks(self, request: Request, progress: Progress | None = None) -> Iterator[Check]:
        """Judge the usages that a request selects. ``progress`` is called at each of them.

        Yields:
            One check per usage, which is skipped if the target refuses the usage. A usage that does not apply has no
            check.
        """
        usages = chosen(request)
        if self.target.command:
            self.inapplicable |= dict.fromkeys((one.id for one in usages), "not possible for a command")
        elif usages and not self._cases_and_dtype[0]:
            why = f"{NONE_PASSES}: {self.wrong or 'none applies to this target'}"
            self.inapplicable |= dict.fromkeys((one.id for one in usages), why)
        else:
            each = tracked("usages", usages, len(usages), progress)
            yield from filter(None, (self.check(request, usage) for usage in each))

    @cached_property
    def _ordinary(self) -> list[Case]:
        """The cases on which usages may be judged, the preferred ones first."""
        return list(_mixed([case for case in self._offered if ordinary(case, self.target.claim)]))

    def _probes(self) -> Iterator[Case]:
        return (case_as_claimed(case, self.target.claim) for case in self._ordinary)

    @cached_property
    def _cases_and_dtype(self) -> tuple[list[tuple[Case, Truth]], str]:
        """The small cases on which usages are judged, with their true results, and the dtype of their rows."""
        # A loss whose own parameters are float32 is right only in float32.
        dtypes = [one for one in ("float64", "float32") if one in (self.dtypes or (one,))] or ["float32"]
        for dtype in dtypes:
            tried = [case for case in self._ordinary if (case.id, dtype) not in self._known_wrong]
            known = ((case.id, dtype) for case in self._ordinary if case not in tried)
            self.wrong = self.wrong or next((f"{key[0]}: {self._known_wrong[key]}" for key in known), "")
            proved = ((case, truth_of(case, golden)) for case, golden in map(self._claimed, tried) if self._takes(case))
            if found := list(islice(self._right(proved, dtype), CANDIDATES)):
                return found, dtype
        return [], dtypes[-1]

    @cached_property
    def _drawn(self) -> dict[str, list[tuple[Case, Truth]]]:
        """The drawn batches that the target supports and computes correctly, with their true results, by kind."""
        drawn = {kind: drawn_batch(self.target.claim, kind) for kind in DRAWN}
        dtype = self._cases_and_dtype[1]
        return {
            kind: [*self._right([(case, _proved(case))], dtype)] if case and self._takes(case) else []
            for kind, case in drawn.items()
        }

    def _takes(self, case: Case) -> bool:
        return not self.target.refuses(case)

    def _right(self, cases: Iterable[tuple[Case, Truth]], dtype: str) -> Iterator[tuple[Case, Truth]]:
        """Yield the cases that the target computes correctly.

        Cases whose loss or gradient is at most ``LEAST`` are left out.
        """
        for case, true in cases:
            if (
                true.gradient is None
                or not sum(map(abs, true.values)) > LEAST
                or not np.abs(true.gradient).max() > LEAST
            ):
                continue
            if wrong := self._ordinary_error(case, true, dtype):
                self.wrong = self.wrong or f"{case.id}: {wrong}"
            else:
                yield case, true

    def _is_right(self, case: Case, true: Truth, dtype: str) -> bool:
        """Return whether the target computes a case correctly in an ordinary call."""
        return not self._ordinary_error(case, true, dtype)

    def _ordinary_error(self, case: Case, true: Truth, dtype: str, judged_as: str = "") -> str:
        """Return the error of an ordinary call, or the first difference of its result; "" if it is right.

        The bounds are those of the dtype ``judged_as``, by default ``dtype``.
        """
        try:
            outcome = self.target.evaluate(case, dtype)
        except Exception as error:  # external code may raise anything
            return _words(error)
        return compare(case, true, outcome, self._bounds(case, true, judged_as or dtype), dtype).first

    def _bounds(self, case: Case, true: Truth, dtype: str) -> Bounds:
        """Return the bounds of a case. Most usages share their cases."""
        if (case, dtype) not in self._known_bounds:
            self._known_bounds[case, dtype] = bounds(case, true, dtype)
        return self._known_bounds[case, dtype]

    def check(self, request: Request, usage: Usage) -> Check | None:
        """Judge one usage; None if its dtype is not selected or if it does not apply (see ``inapplicable``)."""
        try:
            check = self._judged(request, usage)
        except NotApplicable as error:
            self.inapplicable[usage.id] = str(error)
            return None
        named = (one for one in self.target.deviations if usage.id in one.usages)
        declared = [one for one in named if one.concerns(check.loss, one.target, (check.dtype,))]
        if not declared:
            return check
        check = replace(check, declared=tuple(one.name for one in declared))
        if check.status is Status.SKIPPED:
            return check
        status, message = verdict(check.message, declared)
        return replace(check, status=status, message=message)

    def _judged(self, request: Request, usage: Usage) -> Check:
        name = usage.id
        if self.target.claim.arrays not in usage.arrays:
            raise NotApplicable(f"{OTHER_ARRAYS} {self.target.claim.arrays}")
        dtype = usage.dtype or self._cases_and_dtype[1]
        if dtype not in (self.dtypes or (dtype,)):
            raise NotApplicable(f"judged in {dtype}, which --dtype does not select")
        blank = Check("usage", self.target.name, self.target.claim.loss, name, dtype, Status.PASSED)
        blank = replace(blank, repeat=request.repeat(name, dtype), level=usage.level)
        if usage.slow and not (request.thorough or request.cases):
            return replace(blank, status=Status.SKIPPED, message=f"takes seconds: --thorough, or --case {usage.id}")
        if self.target.frozen and (usage.second or usage.name == "forward-mode"):  # along a direction of all matrices
            return replace(blank, status=Status.SKIPPED, message="not judged with --frozen")
        if reason := self.target.not_run("usages"):
            return replace(blank, status=Status.SKIPPED, message=reason)
        ratios = []
        for case, true in self._cases(usage):
            try:
                outcome = self.target.evaluate(case, dtype, usage.name)
            except Exception as error:  # external code may raise anything
                words = _words(error)
                died = isinstance(error, TargetError) and error.died
                if usage.expects != "the truth" and not died:
                    ratios.append(0.0)
                    continue
                named = usage.refusable == "any" or (usage.refusable and REFUSAL.search(words))
                if named and not died:
                    return replace(blank, status=Status.SKIPPED, message=f"refused: {words}")
                return replace(blank, status=Status.ERRORED, message=f"{usage.words}: {words} ({case.id})")
            judged_as = dtype
            try:
                ratio, found = self._difference(usage, case, true, outcome, dtype)
                if found and true and dtype == "float64" and in_float32(self.target, outcome, self._probes()):
                    judged_as = "float32"
                    ratio, found = self._difference(usage, case, true, outcome, judged_as)
            except NotJudged as error:
                return replace(blank, status=Status.SKIPPED, message=f"not judged: {error}")
            effects = outcome.observed.get("seen", {})
            if not found and (kinds := [kind for kind in usage.reveals if kind in effects]):
                ratio, found = math.inf, f"it {effects[kinds[0]]}"
            if found:
                if usage.temperature == "tensor" and true and self._ordinary_error(case, true, dtype, judged_as):
                    wrong = f"the loss is already wrong with the temperature as a number ({case.id})"
                    return replace(blank, status=Status.SKIPPED, message=wrong)
                level = usage.level
                if usage.name == "zero-row" and not _is_of_zero_similarities(case, outcome):
                    level, found = Level.POLICIES, f"{found}, or the loss with similarities of 0"
                passed = usage.temperature == "default" and true and self._ordinary_error(case, true, dtype, judged_as)
                also = ", also if it is passed" * bool(passed)  # the mistake is not in the default
                message = f"{usage.words}{also}: {found} ({case.id})"
                return replace(blank, status=Status.FAILED, message=message, ratio=ratio, level=level)
            ratios.append(ratio)
        if not ratios:
            raise NotApplicable("no ordinary case fits")
        return replace(blank, ratio=max(ratios))

    def _cases(self, usage: Usage) -> Iterator[tuple[Case, Truth | None]]:
        """Yield the cases for a usage, with their true results if numbers are expected."""
        groups = [(self._cases_and_dtype[0], usage.most or CASES)]
        suits = {"training-size": usage.large, "large-labels": bool(usage.rounds)}
        groups += [(cases, 1) for kind, cases in self._drawn.items() if suits.get(kind, True)]
        for cases, most in groups:
            fitting = ((one, true, usage.case(one, self.target.claim)) for one, true in cases)
            supported = ((one, true, case) for one, true, case in fitting if case and self._takes(case))
            for one, true, case in islice(supported, most):
                if usage.expects == "NaN":
                    yield case, None
                elif usage.second:
                    if found := second_derivatives(case):
                        first = found.pop(case.first)
                        yield case, replace(true, gradient=first, other_gradients=found)
                elif case is one:
                    yield case, true
                else:
                    yield case, _proved(case, upstream_of(len(case.counted())) if usage.upstream else None)

    def _difference(
        self, usage: Usage, case: Case, true: Truth | None, outcome: Outcome, dtype: str
    ) -> tuple[float, str]:
        """Return the error in units of its bound for a dtype, and the first difference in words; "" if there is none.

        Raises:
            NotApplicable: the usage does not apply to the target.
            NotJudged: the target notes why, or the loss depends on a guessed parameter in another way.
        """
        if notes := outcome.observed.get("notes"):
            raise (NotJudged if outcome.observed.get("applies", True) else NotApplicable)(notes[0])
        if true is None:
            if not np.isfinite(outcome.values).all():
                return 0.0, ""
            given = repr(outcome.values[0]) if outcome.values else "empty"
            return math.inf, f"the loss is {given}, expected NaN or an error"
        allowed = _allowed(usage, case, true, dtype, self._bounds(case, true, dtype))
        found = compare(case, *_judged_rows(usage, case, true, outcome, allowed), dtype)
        expected = true.bias_gradient if usage.bias else true.temperature_gradient
        if found.first or not usage.scalar or not self.target.gradients_judged or expected is None:
            return found.ratio, found.first
        bound = scalar_bounds(case, dtype)[1 if usage.bias else 0]
        got = outcome.observed.get(usage.scalar, 0.0)
        # The bound is 0 if the loss does not depend on the scalar, as where all logits are 0.
        ratio = 0.0 if got == expected else abs(got - expected) / bound if math.isfinite(got) and bound else math.inf
        if ratio > 1 and not _confirmed(expected, outcome.observed.get("change"), true):
            raise NotJudged(
                f"a parameter has the value of the {usage.scalar}, but the loss depends on it in another way"
            )
        words = (
            f"gradient of the {usage.scalar}: expected {expected!r}, got {got!r}; the error is {ratio:.3g} times the "
            "bound"
        )
        return ratio, words if ratio > 1 else ""


def _words(error: Exception) -> str:
    """Return the first line of an error of a target."""
    return next(iter(described(error).splitlines()), type(error).__name__)


def _confirmed(expected: float, change: float | None, true: Truth) -> bool:
    """Return whether the loss changes with its parameters as with the scalar; also if it was not tried."""
    rounding = unit_roundoff("float32") * sum(map(abs, true.values)) / STEP
    return change is None or abs(change - expected) <= CHANGE_SHARE * abs(expected) + rounding


def _is_of_zero_similarities(case: Case, outcome: Outcome) -> bool:
    """Return whether a loss has similarities of 0 for zero rows, as with clamped norms.

    True if the loss with these similarities cannot be proved.
    """
    products = case.mapped(unit_rows).with_options(similarity="dot")
    try:
        return np.allclose(outcome.values, truth(products).values, rtol=CLAMPED)
    except CertificationError:  # a maximum is tied
        return True


def drawn_batch(claim: Claim, kind: str) -> Case | None:
    """Draw a batch of ``DRAWN``, always the same one for a claim; None if the loss or its proof does not allow it."""
    by = LOSSES[claim.loss].positives_by
    if (kind == "lonely-anchors" and by not in ("labels", "pairs")) or (kind == "large-labels" and by != "labels"):
        return None
    required = {key: value for name in claim.required for key, value in REQUIRED.get(name, {}).items()}
    case = draw_with(claim, {**SAME_CHOICES, **DRAWN[kind], **required}, f"drawn, {kind}", random.Random(kind))
    if kind == "large-labels":
        labels = {name: case.arguments[name] for name in ("labels", "ref_labels") if name in case.arguments}
        large = {name: [LARGE_LABELS + label for label in given] for name, given in labels.items()}
        case = replace(case, arguments={**case.arguments, **large})
    if claim.temperature is None:
        case = case.with_options(temperature=TEMPERATURE)
    if case.option("similarity") == "dot":
        case = scaled_to_logits(case) or case
    return case if case.size <= PROVE_UP_TO or has_formula(case) else None


def _proved(case: Case, upstream: Sequence[float] | None = None) -> Truth:
    """Prove the results of a case of any size that a usage changes or that is drawn."""
    return truth(case, upstream=upstream, by_loops=False)


def second_derivatives(case: Case) -> dict[str, Matrix] | None:
    """Return the derivatives of the product of the gradients with ``direction_of`` each matrix.

    They are a difference quotient of two proved gradients. None if float64 cannot represent the changed rows.
    """
    directions = {name: direction_of(rows.shape).numpy() for name, rows in case.matrices.items()}
    ends = []
    for step in (SECOND_STEP, -SECOND_STEP):
        rows = {name: z + step * directions[name] for name, z in case.matrices.items()}
        if any((rows[name] - step * directions[name] != z).any() for name, z in case.matrices.items()):
            return None
        ends.append(enclosures(case.with_matrices(rows), SECOND_BITS).gradients)
    with precision(SECOND_BITS):
        return {
            name: np.array([[float((b - a) / (2 * SECOND_STEP)) for a, b in zip(*pair, strict=True)] for pair in pairs])
            for name, pairs in ((name, zip(ends[1][name], ends[0][name], strict=True)) for name in directions)
        }


def _allowed(usage: Usage, case: Case, true: Truth, dtype: str, allowed: Bounds) -> Bounds:
    """Return the bounds of a case under a usage, given those of an ordinary call."""
    if usage.upstream:
        # Upstream gradients do not change the values.
        plain = _proved(case)
        return replace(bounds(case, plain, dtype), rows=allowed.rows)
    if usage.second:
        # A mistake in a formula is far larger than the square root of the unit roundoff.
        share = math.sqrt(unit_roundoff(dtype))
        rows = {n: np.full(len(z), share * _largest({n: z})[n]) for n, z in case.gradients(true).items()}
        return replace(allowed, rows=rows)
    if not usage.rounds:
        return allowed
    # Not the bounds of the 16-bit dtype, which already contain the rounding of the gradient.
    allowed = bounds(case, true, "float32")
    wider = allowed.times(unit_roundoff(usage.rounds) / unit_roundoff("float32"))
    share, largest = LARGEST_SHARE * unit_roundoff(usage.rounds), _largest(case.gradients(true))
    rows = {
        # A gradient of zeros must not pass.
        name: np.maximum(allowed.rows[name], np.minimum(found, share * largest.get(name, math.inf)))
        for name, found in wider.rows.items()
    }
    values = wider.values
    if len(values) == 1 and true.similarity is not None:
        size = abs(true.values[0]) + float((np.abs(true.weights) * np.abs(true.similarity)).sum())
        values = [min(values[0], LARGEST_VALUE_SHARE * unit_roundoff(usage.rounds) * size)]
    return replace(wider, rows=rows, values=values)


def _largest(gradients: Mapping[str, Matrix]) -> dict[str, float]:
    """Return the largest norm of a row of each matrix."""
    return {name: float(np.linalg.norm(rows, axis=1).max()) for name, rows in gradients.items()}


def _judged_rows(
    usage: Usage, case: Case, true: Truth, outcome: Outcome, allowed: Bounds
) -> tuple[Truth, Outcome, Bounds]:
    """Return the true results, the outcome and the bounds, with the gradients that a usage produces."""
    if not usage.differentiable or outcome.gradient is None or true.gradient is None:
        return replace(true, gradient=None, other_gradients={}), outcome, allowed
    first, others = true.gradient.copy(), dict(true.other_gradients)
    if usage.joined:
        name = "embeddings_b" if case.entry.two_towers else "ref_embeddings"
        first += others[name]
        others[name] = np.zeros_like(others[name])
        allowed = replace(allowed, rows={**allowed.rows, case.first: allowed.rows[case.first] + allowed.rows[name]})
    elif usage.frozen is not None and others:
        first = first if usage.frozen else np.zeros_like(first)
        others = {name: np.zeros_like(z) if usage.frozen else z for name, z in others.items()}
    elif usage.frozen is not None:
        first[[row for item in items_of(case) for row in (item[1:] if usage.frozen else item[:1])]] = 0
    return replace(true, gradient=first, other_gradients=others), outcome, allowed


class Watch:
    """The side effects of a target, with the first case that shows each."""

    def __init__(self, request: Request, target: External) -> None:
        self.request, self.target = request, target
        self._found: dict[str, Check] = {}

    def note(self) -> None:
        """Note the side effects in the outcomes of the target."""
        for (case, dtype), outcome in self.target.outcomes.items():
            for kind in outcome.observed.get("seen", {}):
                words = f"it {outcome.observed['seen'][kind]} ({case})"
                loss, repeat = self.target.claim.loss, self.request.repeat(case, dtype)
                check = Check("usage", self.target.name, loss, f"side-effects/{kind}", dtype, Status.FAILED, words)
                self._found.setdefault(kind, replace(check, repeat=repeat, level=Level.POLICIES))

    @property
    def checks(self) -> list[Check]:
        """One failed check for each kind of side effect."""
        return list(self._found.values())
