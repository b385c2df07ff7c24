"""Judge anybody's loss on every case that its claim covers: :func:`check_loss` and ``pairproof check``.

It is judged as ``pairproof verify`` judges a peer: by the same cases, the same truth and the same bounds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from ..diagnose.explain_failure import explain_failure
from ..documents.load import load_worked
from ..implementations.base import Deviation, lacks_positives, one_thread
from ..implementations.callable import External
from ..implementations.sandbox import TargetError, TargetMisused
from ..implementations.signatures import Claim
from ..suite.cases import Case
from ..suite.catalogue import LOSSES
from ..suite.golden import DTYPES, GoldenCase
from ..suite.progress import Progress, tracked
from ..suite.records import Outcome
from ..truth.baseline import plain_outcome
from ..truth.compare import compare
from ..truth.tolerances import bounds
from .deviations import deviations, project_file, read_declarations
from .options import CouldNotRun, Request, Selection, UsageError, takes
from .results import BAD, Check, Status, counted, grouped, unused
from .verify import Report, check_device, check_names, judge_case, load_cases, truth_of

SHOWN = 10
"""Number of failing cases that are explained and shown by default."""

SHARED_WITHIN = 1000.0
"""Error in units of its bound beyond which it is not a loss of digits, even if the baseline's is as large."""

SHARED = (
    "the straightforward implementation (norms, products, logsumexp) is as far off in this dtype: digits are lost on"
    " the way, and the formula need not be another"
)

CONFORMS, DOES_NOT, COULD_NOT = "conforms", "does not conform", "could not run"
EXIT_CODES = {CONFORMS: 0, DOES_NOT: 1, COULD_NOT: 3}


@dataclass
class CheckResult:
    """What a check found.

    Attributes:
        request: what was judged, and as what.
        claim: what the target computes, as the request and its signature say.
        notes: what was guessed, in words.
        report: every check, in the form of a run.
        cases: how many cases of the loss were selected.
        gradients_judged: whether the target gives gradients.
        left_out: how many of the cases were not judged, by reason.
        diagnoses: explanations of failures, by case and dtype.
        advice: options to try if the verdict is a surprise.
        declared: the declared deviations of this loss of this target.
        unused: the problem of each of them that no check met.
        aside: the declared deviations of this loss of another target.
        explained: how many failing cases are explained and shown; None for all.
    """

    request: Request
    claim: Claim
    notes: tuple[str, ...]
    report: Report
    cases: int
    gradients_judged: bool = False
    left_out: Counter[str] = field(default_factory=Counter)
    diagnoses: dict[tuple[str, str], str] = field(default_factory=dict)
    advice: list[str] = field(default_factory=list)
    declared: list[Deviation] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    aside: list[Deviation] = field(default_factory=list)
    explained: int | None = SHOWN

    @property
    def checks(self) -> list[Check]:
        """Every check, the skipped ones included."""
        return self.report.checks

    @property
    def judged(self) -> list[Check]:
        """The checks that were not skipped."""
        return [check for check in self.checks if check.status is not Status.SKIPPED]

    @property
    def failures(self) -> list[Check]:
        """The checks that failed or ended in an error."""
        return [check for check in self.checks if check.status in BAD]

    @property
    def counts(self) -> Counter[Status]:
        """How many checks ended with each status."""
        return counted(self.checks)

    @property
    def shared(self) -> set[tuple[str, str]]:
        """The failures, by case and dtype, that are at most twice as large as the baseline's."""
        return {name for name, words in self.diagnoses.items() if words == SHARED}

    @property
    def verdict(self) -> str:
        """``CONFORMS``, ``DOES_NOT``, or ``COULD_NOT`` if nothing was judged or every check ended in an error."""
        statuses = {check.status for check in self.judged}
        if not statuses - {Status.ERRORED}:
            return COULD_NOT
        return DOES_NOT if statuses & set(BAD) or self.unused else CONFORMS

    @property
    def exit_code(self) -> int:
        """0 conforms, 1 does not, 3 could not run."""
        return EXIT_CODES[self.verdict]

    @property
    def summary(self) -> str:
        """The verdict with its numbers."""
        loss, counts = self.request.loss, counted(self.judged)
        if not counts:
            return f"could not run: none of the {self.cases} cases of {loss} can be judged"
        if self.verdict == COULD_NOT:
            return f"could not run: each of {counts.total()} checks ended in an error: {self.failures[0].message}"
        values = "" if self.gradients_judged else ", by its values alone"
        ends = ", ".join(f"{counts[status]} {status}" for status in Status if counts[status])
        said = f"{self.verdict}: {self.request.name} as {loss}{values}: {ends}"
        if self.shared:
            said += f" ({len(self.shared)} of them no worse than the straightforward implementation)"
        return said + (f"; {len(self.unused)} declarations meet nothing" if self.unused else "")

    def worst(self) -> dict[str, float]:
        """Return the worst error in units of its bound, by dtype."""
        ratios = grouped((check.dtype, check.ratio) for check in self.judged if check.ratio is not None)
        return {dtype: max(found) for dtype, found in ratios.items()}

    def flags(self) -> dict[str, Counter[Status]]:
        """Return the counts of the statuses by flag; those with the most failures first."""
        statuses = grouped((flag, check.status) for check in self.judged for flag in check.flags)
        found = {flag: Counter(statuses[flag]) for flag in sorted(statuses)}
        return dict(sorted(found.items(), key=lambda item: -sum(item[1][status] for status in BAD)))


@takes(Request)
def check_loss(*target: Any, **options: Any) -> CheckResult:
    """Judge a loss: ``check_loss(MyLoss, "supcon", temperature=0.1)``.

    The keywords are the options of ``pairproof check``, as :class:`~pairproof.conformance.judge.options.Request` lists
    them.

    Returns:
        Every check with its status, the counts, the verdict and a summary.

    Raises:
        UsageError: an option is wrong or missing, or no case is selected.
        CouldNotRun: the target cannot be loaded, or the device cannot be used.
    """
    return check(Request(*target, **options))


@one_thread()
def check(request: Request, progress: Progress | None = None, *, explain: int | None = SHOWN) -> CheckResult:
    """Judge a target on every case that it claims.

    Args:
        request: what is judged, and as what.
        progress: called at each step.
        explain: how many failing cases are explained; None for all.

    Returns:
        What was found.

    Raises:
        UsageError: an option is wrong or missing, or no case is selected.
        CouldNotRun: the target cannot be loaded, or the device cannot be used.
        FixtureError: the fixtures cannot be trusted.
    """
    dtypes = request.dtypes or External.dtypes
    selection = Selection(losses=(request.loss,), cases=request.cases, dtypes=dtypes, device=request.device)
    stored = load_cases(load_worked())
    cases = chosen_cases(request, stored)
    path = request.deviations or project_file(Path.cwd())
    known = deviations(read_declarations(path) if path else {}, stored)
    with closing(load_target(request, known)) as target:
        report = Report(selection, versions={target.name: target.version()}, cases_in_all=len(cases))
        result = CheckResult(request, target.claim, target.notes, report, len(cases), explained=explain)
        result.declared = [one for one in known if one.concerns(request.loss, request.name)]
        result.aside = [one for one in known if one not in result.declared and one.concerns(request.loss, one.target)]
        failing: list[tuple[Case, Outcome]] = []
        for case in tracked("cases", cases, len(cases), progress):
            checks = list(judge_target(request, target, case, stored[case], dtypes))
            report.checks += checks
            if all(one.status is Status.SKIPPED for one in checks):
                result.left_out[" and ".join(dict.fromkeys(one.message for one in checks))] += 1
            failed = [one for one in checks if one.status is Status.FAILED]
            for one in failed:
                # A case that fails in several dtypes is explained once.
                first = one is failed[0] and (explain is None or len(failing) < explain)
                outcome = target.outcomes[case.id, one.dtype] if first else None
                if words := explanation(one, case, stored[case], outcome):
                    result.diagnoses[case.id, one.dtype] = words
            failing += [(case, target.outcomes[case.id, one.dtype]) for one in failed[:1]]
        result.advice += _advice(target, failing)
    report.cases_chosen = len(cases) - result.left_out.total()
    result.gradients_judged = bool(target.gradients_judged)
    if request.whole:
        due = [one.name for one in result.declared if one.concerns(request.loss, request.name, dtypes)]
        met = {name for one in report.checks for name in one.declared}
        result.unused = unused(due, met, f"{request.name} as {request.loss}")
        report.problems += result.unused
    if result.verdict == COULD_NOT:
        report.problems.append(result.summary)
    return result


def judge_target(
    request: Request, target: External, case: Case, golden: GoldenCase | None, dtypes: Sequence[str]
) -> Iterator[Check]:
    """Judge a target on one case; its ``outcomes`` are those of this case alone.

    Args:
        request: what is judged, and as what.
        target: as it was loaded.
        case: the case.
        golden: its golden entry, where it has one.
        dtypes: of the inputs.

    Yields:
        The checks, with the commands that repeat them.
    """
    target.outcomes.clear()
    for one in judge_case(case, golden, [target], Selection(dtypes=dtypes, device=request.device)):
        repeat = one.repeat and request.repeat(case.id, one.dtype)
        yield replace(one, repeat=repeat, message=one.message.removeprefix("TargetError: "))


def chosen_cases(request: Request, stored: Iterable[Case]) -> list[Case]:
    """Check the options of a request that need no target, and return the cases that it selects.

    Raises:
        UsageError: a loss, dtype or number is wrong, or one of its patterns matches no case.
    """
    check_names(Selection(losses=(request.loss,), dtypes=request.dtypes))
    if request.temperature is not None and not 0 < request.temperature < math.inf:
        raise UsageError(f"--temperature: expected a positive number, got {request.temperature:g}")
    if not request.limit > 0:
        raise UsageError(f"--limit: expected a positive number of seconds, got {request.limit:g}")
    cases = [case for case in stored if case.loss == request.loss]
    for pattern in request.cases:
        if not any(fnmatchcase(case.id, pattern) for case in cases):
            raise UsageError(f"no case of {request.loss} matches {pattern}; see: pairproof list")
    return [case for case in cases if Selection(cases=request.cases).takes_case(case.id)]


def load_target(request: Request, declared: Sequence[Deviation]) -> External:
    """Find the target of a request.

    Args:
        request: what is judged, and as what.
        declared: the declared deviations of any loss and target.

    Raises:
        UsageError: an option is wrong or missing.
        CouldNotRun: it cannot be loaded, or the device cannot be used.
    """
    check_device(request.device)
    same = ("loss", "call", "arrays", "temperature", "normalised", "settings", "limit", "device")
    options = {name: getattr(request, name) for name in same}
    dtypes = tuple(dtype for dtype in DTYPES if dtype in (request.dtypes or External.dtypes))
    concerning = tuple(one for one in declared if one.concerns(request.loss, request.name))
    try:
        return External(request.target, **options, dtypes=dtypes, deviations=concerning)
    except TargetError as error:
        raise (UsageError if isinstance(error, TargetMisused) else CouldNotRun)(str(error)) from None


def explanation(check: Check, case: Case, golden: GoldenCase | None, outcome: Outcome | None) -> str:
    """Explain a failure.

    Args:
        check: that failed.
        case: that it judged.
        golden: its golden entry, where it has one.
        outcome: what the target returned; None to explain no more than a loss of digits.

    Returns:
        A sentence, or "" if nothing explains it.
    """
    ratio = math.inf if check.ratio is None else check.ratio
    if ratio <= 1:
        # It fails only because a deviation is declared.
        return ""
    true = truth_of(case, golden)
    if ratio <= SHARED_WITHIN:
        plain = compare(case, true, plain_outcome(case, check.dtype), bounds(case, true, check.dtype), check.dtype)
        if math.isfinite(plain.ratio) and ratio <= 2 * plain.ratio:
            return SHARED
    if outcome is None:
        return ""
    try:
        return explain_failure(case, outcome, true) or ""
    except Exception as error:  # a failure of the explanation must not hide the failure itself
        return f"no explanation was found: {type(error).__name__}: {error}"


def _advice(target: External, failing: Sequence[tuple[Case, Outcome]]) -> Iterator[str]:
    """Yield options to try, from the cases that failed and what the target returned for them."""
    claim = target.claim
    said = {*claim.settings, *claim.passed}
    if "reduction" not in said and any(len(o.values) == len(case.counted()) > 1 for case, o in failing):
        yield "it returns one value per anchor: --set reduction=none says that it is meant to"
    cosine = [case for case, _ in failing if case.option("similarity") == "cosine"]
    if cosine and not claim.normalised and "similarity" not in claim.passed and _depends_on_norms(target, cosine[0]):
        yield (
            "rows twice as long give another value, so it does not normalise them: --normalised says that its caller"
            " does, --set similarity=dot that dot products are meant"
        )
    has_policy = "no_positive" in LOSSES[claim.loss].choices and "no_positive" not in said
    if failing and has_policy and all(lacks_positives(case) for case, _ in failing):
        yield (
            "it fails only where an anchor has no positive: --set no_positive=drop or =nan says that it leaves such"
            " anchors out, or gives NaN for them"
        )


def _depends_on_norms(target: External, case: Case) -> bool:
    """Return whether rows of twice the length give another value."""
    doubled = replace(case, embeddings=2 * case.embeddings, others={k: 2 * z for k, z in case.others.items()})
    try:
        once, twice = (np.array(target.evaluate(one, "float64").values) for one in (case, doubled))
    except Exception:  # outside code may raise anything
        return False
    return once.shape != twice.shape or not np.allclose(twice, once, rtol=1e-6, atol=0, equal_nan=True)
