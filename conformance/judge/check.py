"""``pairproof check``: anybody's loss held to every case that its claim covers, and a verdict.

It is judged as ``pairproof verify`` judges a peer: by the same cases, the same truth and the same bounds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ..diagnose.explain_failure import explain_failure
from ..documents.load import load_worked
from ..implementations.base import Deviation, lonely
from ..implementations.callable import External, load
from ..implementations.sandbox import TargetError, TargetMisused
from ..suite.cases import Case
from ..suite.catalogue import LOSSES
from ..suite.golden import DTYPES
from ..suite.progress import Progress, tracked
from ..suite.records import Outcome, Truth
from ..truth.baseline import plain_outcome
from ..truth.compare import compare
from ..truth.tolerances import bounds
from .deviations import deviations, project_file, read_declarations
from .options import CouldNotRun, Request, Selection, UsageError
from .results import BAD, Check, Status, unused
from .verify import Report, judge_case, load_cases, truth_of

SHOWN = 10
"""Failing cases that are shown and explained without being asked for."""

SHARED_WITHIN = 1000.0
"""Bounds beyond which an error is no loss of digits, whoever else makes it."""

SHARED = (
    "the straightforward implementation (norms, products, logsumexp) is as far off in this dtype: digits are lost on"
    " the way, and the formula need not be another"
)

CONFORMS, DOES_NOT, COULD_NOT = "conforms", "does not conform", "could not run"
EXIT_CODES = {CONFORMS: 0, DOES_NOT: 1, COULD_NOT: 3}


def load_target(request: Request, declared: Sequence[Deviation]) -> External:
    """Find the target of a request.

    Args:
        request: what is judged, and as what.
        declared: the declared deviations, of whatever loss and target.

    Raises:
        UsageError: what is said of it is wrong or too little.
        CouldNotRun: it cannot be loaded.
    """
    try:
        target = load(
            request.target,
            loss=request.loss,
            call=request.call,
            arrays=request.arrays,
            temperature=request.temperature,
            normalised=request.normalised,
            settings=request.settings,
            limit=request.limit,
            device=request.device,
            dtypes=tuple(dtype for dtype in DTYPES if dtype in (request.dtypes or External.dtypes)),
            deviations=tuple(one for one in declared if one.concerns(request.loss, request.name)),
        )
    except TargetMisused as error:
        raise UsageError(str(error)) from None
    except TargetError as error:
        raise CouldNotRun(str(error)) from None
    _check_dtypes(target, request.dtypes or External.dtypes)
    return target


@dataclass
class Checked:
    """What a check found.

    Attributes:
        request: what was asked.
        target: who was judged.
        report: every check, in the form of a run.
        cases: how many cases of the loss there are in the selection.
        left_out: how many of them were not judged, by reason.
        diagnoses: what explains a failure, by case and dtype, for the failures that were explained.
        shared: the failures, by case and dtype, that are at most twice as large as those of the straightforward
            implementation in ``plain.py``: beyond the bound, but no sign of another formula.
        advice: what to say of the target if the verdict surprises.
        declared: the declared deviations that speak of this loss of this target.
        unused: what to say of those that no check met.
        aside: those of this loss that speak of another target.
    """

    request: Request
    target: External
    report: Report
    cases: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    diagnoses: dict[tuple[str, str], str] = field(default_factory=dict)
    shared: set[tuple[str, str]] = field(default_factory=set)
    advice: list[str] = field(default_factory=list)
    declared: list[Deviation] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    aside: list[Deviation] = field(default_factory=list)

    @property
    def judged(self) -> list[Check]:
        """The checks that were done."""
        return [check for check in self.report.checks if check.status is not Status.SKIPPED]

    @property
    def failures(self) -> list[Check]:
        """Those that did not end well."""
        return [check for check in self.report.checks if check.status in BAD]

    @property
    def verdict(self) -> str:
        """Whether it conforms, does not, or could not run: where nothing was judged, or nothing ended but in errors."""
        statuses = {check.status for check in self.judged}
        if not statuses - {Status.ERRORED}:
            return COULD_NOT
        return DOES_NOT if statuses & set(BAD) or self.unused else CONFORMS

    @property
    def exit_code(self) -> int:
        """0 conforms, 1 does not, 3 could not run."""
        return EXIT_CODES[self.verdict]

    def sentence(self) -> str:
        """The verdict with its numbers."""
        counts = Counter(check.status for check in self.judged)
        if not self.judged:
            return f"could not run: none of the {self.cases} cases of {self.request.loss} can be judged"
        if self.verdict == COULD_NOT:
            return f"could not run: each of {len(self.judged)} checks ended in an error: {self.failures[0].message}"
        told = ", ".join(f"{counts[status]} {status.value}" for status in Status if counts[status])
        values = "" if self.target.gradients_judged else ", by its values alone"
        shared = (
            f" ({len(self.shared)} of them no worse than the straightforward implementation)" if self.shared else ""
        )
        stale = f"; {len(self.unused)} declarations meet nothing" if self.unused else ""
        return f"{self.verdict}: {self.request.name} as {self.request.loss}{values}: {told}{shared}{stale}"

    def worst(self) -> dict[str, float]:
        """The worst error in units of its bound, by dtype."""
        found: dict[str, float] = {}
        for check in self.judged:
            if check.ratio is not None:
                found[check.dtype] = max(found.get(check.dtype, 0.0), check.ratio)
        return found

    def flags(self) -> dict[str, Counter[Status]]:
        """How the checks ended, by flag; those with the most failures first."""
        found: dict[str, Counter[Status]] = {}
        for check in self.judged:
            for flag in check.flags:
                found.setdefault(flag, Counter())[check.status] += 1
        return dict(sorted(found.items(), key=lambda item: (-sum(item[1][status] for status in BAD), item[0])))


def check(request: Request, progress: Progress | None = None, *, explain: int | None = SHOWN) -> Checked:
    """Judge a target on every case that it claims.

    Args:
        request: what is judged, and as what.
        progress: called at each step.
        explain: how many failing cases are explained; None for all.

    Returns:
        What was found.

    Raises:
        UsageError: what is said of the target is wrong or too little, or no case is selected.
        CouldNotRun: the target cannot be loaded, or the device cannot be used.
        FixtureError: the fixtures cannot be trusted.
    """
    torch.set_num_threads(1)
    check_request(request)
    check_device(request)
    dtypes = request.dtypes or External.dtypes
    selection = Selection(losses=(request.loss,), cases=request.cases, dtypes=dtypes, device=request.device)
    stored = load_cases(load_worked())
    path = request.deviations or project_file(Path.cwd())
    declared = deviations(read_declarations(path) if path else {}, stored)
    target = load_target(request, declared)
    cases = chosen_cases(request, stored)
    report = Report(selection, versions={target.name: target.version()}, cases_in_all=len(cases))
    checked = Checked(request, target, report, len(cases))
    checked.declared = [one for one in declared if one.concerns(request.loss, request.name)]
    checked.aside = [one for one in declared if one not in checked.declared and one.concerns(request.loss, one.target)]
    kept: dict[tuple[str, str], tuple[Case, Outcome]] = {}
    try:
        for case in tracked("cases", cases, len(cases), progress):
            target.outcomes.clear()
            checks = judge_case(case, stored[case], [target], selection)
            if all(one.status is Status.SKIPPED for one in checks):
                checked.left_out[" and ".join(dict.fromkeys(one.message for one in checks))] += 1
            for one in checks:
                repeat = request.repeat(case.id, one.dtype) if one.repeat else ""
                report.checks.append(replace(one, repeat=repeat, message=one.message.removeprefix("TargetError: ")))
            # A case that fails in several dtypes is explained once.
            failed = [one.dtype for one in checks if one.status is Status.FAILED]
            if failed and (explain is None or len(kept) < explain):
                kept[case.id, failed[0]] = case, target.outcomes[case.id, failed[0]]
        report.cases_chosen = len(cases) - checked.left_out.total()
        checked.advice += _advice(checked, kept, {case.id: case for case in cases})
    finally:
        target.close()
    if request.whole:
        due = [one.name for one in checked.declared if one.concerns(request.loss, request.name, dtypes)]
        checked.unused = unused(
            due, {name for one in report.checks for name in one.declared}, f"{request.name} as {request.loss}"
        )
        report.problems += checked.unused
    failing = [case for case in cases if any(c.case == case.id and c.status is Status.FAILED for c in report.checks)]
    for case in tracked("failures", failing, len(failing), progress):
        true = truth_of(case, stored[case])
        for one in report.checks:
            name = one.case, one.dtype
            if one.case != case.id or one.status is not Status.FAILED:
                continue
            if is_shared(one, case, true):
                checked.shared.add(name)
                checked.diagnoses[name] = SHARED
            elif name in kept and not conforms(one):
                sentence = diagnosis(case, kept[name][1], true)
                if sentence:
                    checked.diagnoses[name] = sentence
    if checked.verdict == COULD_NOT:
        report.problems.append(checked.sentence())
    return checked


def chosen_cases(request: Request, stored: Iterable[Case]) -> list[Case]:
    """The cases that a request names.

    Raises:
        UsageError: one of its patterns names none.
    """
    cases = [case for case in stored if case.loss == request.loss]
    for pattern in request.cases:
        if not any(Selection(cases=(pattern,)).takes_case(case.id) for case in cases):
            raise UsageError(f"no case of {request.loss} matches {pattern}; see: pairproof list")
    selection = Selection(cases=request.cases)
    return [case for case in cases if selection.takes_case(case.id)]


def check_request(request: Request) -> None:
    """Refuse what cannot be asked.

    Raises:
        UsageError: a loss, dtype or number is wrong.
    """
    if request.loss not in LOSSES:
        raise UsageError(f"unknown loss {request.loss!r}; known: {', '.join(LOSSES)}")
    for dtype in request.dtypes:
        if dtype not in DTYPES:
            raise UsageError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    if request.temperature is not None and not (math.isfinite(request.temperature) and request.temperature > 0):
        raise UsageError(f"--temperature: expected a positive number, got {request.temperature:g}")
    if not request.limit > 0:
        raise UsageError(f"--limit: expected a positive number of seconds, got {request.limit:g}")


def check_device(request: Request) -> None:
    """Refuse a device that cannot be used.

    Raises:
        CouldNotRun: it cannot be used.
    """
    try:
        torch.empty(1, device=request.device)
    except (RuntimeError, AssertionError) as error:
        raise CouldNotRun(f"device {request.device!r} cannot be used: {str(error).splitlines()[0]}") from None


def _check_dtypes(target: External, dtypes: Sequence[str]) -> None:
    halves = [dtype for dtype in dtypes if dtype not in External.dtypes]
    if "bfloat16" in halves and target.claim.arrays == "numpy" and target.claim.call != "command":
        raise UsageError("numpy has no bfloat16")
    if halves and target.claim.normalised:
        raise UsageError(f"rows brought to norm 1 are no numbers of {halves[0]}: --raw, or other dtypes")


def conforms(check: Check) -> bool:
    """Whether a check fails for a declaration alone: nothing in its result is to be explained."""
    return check.ratio is not None and check.ratio <= 1


def is_shared(check: Check, case: Case, true: Truth) -> bool:
    """Whether a failure is at most twice as large as that of the straightforward implementation in the same dtype."""
    if check.ratio is None or not 1 < check.ratio <= SHARED_WITHIN:
        return False
    plain = compare(case, true, plain_outcome(case, check.dtype), bounds(case, true, check.dtype), check.dtype)
    return math.isfinite(plain.ratio) and check.ratio <= 2 * plain.ratio


def diagnosis(case: Case, outcome: Outcome, true: Truth) -> str | None:
    """What explains a failure, or None if nothing that is known explains it."""
    try:
        return explain_failure(case, outcome, true)
    except Exception as error:  # what fails to explain a failure must not hide it
        return f"no explanation was found: {type(error).__name__}: {error}"


def _advice(
    checked: Checked, kept: Mapping[tuple[str, str], tuple[Case, Outcome]], cases: Mapping[str, Case]
) -> list[str]:
    """What to say of the target if it was meant otherwise than it was judged."""
    claim = checked.target.claim
    advice: list[str] = []
    failed = [check for check in checked.failures if check.status is Status.FAILED]
    if not failed:
        return advice
    for case, outcome in kept.values():
        if "reduction" not in (*claim.settings, *claim.passed) and len(outcome.values) == len(case.counted()) > 1:
            advice.append("it returns one value per anchor: --set reduction=none says that it is meant to")
            break
    cosine = [case for case, _ in kept.values() if case.option("similarity") == "cosine"]
    if cosine and not claim.normalised and "similarity" not in claim.passed and _feels_norms(checked.target, cosine[0]):
        advice.append(
            "rows twice as long give another value, so it does not normalise them: --normalised says that its caller"
            " does, --set similarity=dot that dot products are meant"
        )
    policy = "no_positive" in LOSSES[claim.loss].choices and "no_positive" not in (*claim.settings, *claim.passed)
    if policy and all(lonely(cases[check.case]) for check in failed):
        advice.append(
            "it fails only where an anchor has no positive: --set no_positive=drop or =nan says that it leaves such"
            " anchors out, or gives NaN for them"
        )
    return advice


def _feels_norms(target: External, case: Case) -> bool:
    """Whether rows of twice the length give another value."""
    doubled = replace(case, embeddings=2 * case.embeddings, others={k: 2 * z for k, z in case.others.items()})
    try:
        once, twice = (target.evaluate(one, "float64").values for one in (case, doubled))
    except Exception:  # outside code may raise anything
        return False
    return len(once) != len(twice) or any(
        not math.isclose(a, b, rel_tol=1e-6) for a, b in zip(once, twice, strict=True) if not math.isnan(a)
    )
