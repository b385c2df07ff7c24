"""Judge a user's loss: :func:`check_loss` and ``pairproof check``.

The user's loss is the *target*. Its *claim* states which loss it computes, and with which options. Cases, true values
and error bounds are those of ``pairproof verify``. In addition:

- Cases are adapted to the claim (``proofs.py``).
- Random batches are drawn (``fresh.py``).
- A result beyond its bound is compared with wider bounds (``levels.py``).
"""

from __future__ import annotations

import math
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np

from ..diagnose.explain import Diagnosis, Known, Observation, arguments_of, explain_case
from ..diagnose.explain import explain as find_reasons
from ..diagnose.search import Searched, searched
from ..diagnose.variants import variant_of
from ..documents.load import load_worked
from ..implementations import child
from ..implementations.base import Deviation, one_thread
from ..implementations.callable import External
from ..implementations.forms import READING
from ..implementations.gpu import ON_CPU
from ..implementations.sandbox import NoCallFits, TargetError, TargetMisused
from ..implementations.signatures import NO_TEMPERATURE, Claim
from ..implementations.usages import BY_NAME
from ..suite.cases import Case
from ..suite.catalogue import LOSSES
from ..suite.golden import DTYPES, GoldenCase
from ..suite.progress import Progress, tracked, unreported
from ..suite.records import Outcome, Truth
from ..truth.tolerances import FORMULA_TIMES
from .deviations import deviations, project_file, read_declarations
from .fresh import FreshBatch, draw_training, fresh_batches, proved_ahead
from .levels import Level, level_of, level_of_case, reviewed
from .options import CannotBeCalled, CouldNotRun, Request, Selection, UsageError, takes, unknown
from .proofs import as_claimed, case_as_claimed, repeated
from .ranges import Limit, find_limits
from .results import BAD, Check, Status, counted, grouped, phrase, several, unused
from .shrink import Shrunk, smallest_failure
from .tried import Tried
from .usages import NONE_PASSES, OTHER_ARRAYS, UsageJudge, Watch
from .usages import names as usage_names
from .verify import Report, check_names, flush_denormal, judge_case, load_cases, truth_of

SHOWN = 3
"""Default number of failing cases to show: the smallest one of each reason, and the smallest ones without a reason."""

EXPLAINED = 10
"""Maximum number of failures that one pytest process explains."""

ROUNDED = f"the error has the size of rounding errors: it is at most {FORMULA_TIMES:g} times the bound"
"""The explanation of a failure that is only a rounding error."""

SAME = "with the claimed options, the same as another case"

SCALARS = ("temperature-tensor", "learned-temperature", "bias-tensor", "learned-bias")
"""The usages that judge the gradient of a scalar in an ordinary call."""

_OWN_ERROR = re.compile(r"\A(TargetError|Overtime): ")
"""Names of exceptions that are removed from the start of messages."""

CONFORMS, DOES_NOT, COULD_NOT = "conforms", "does not conform", "could not run"
EXIT_CODES = {CONFORMS: 0, DOES_NOT: 1, COULD_NOT: 3}


@dataclass(frozen=True)
class Failing:
    """A failing case.

    Attributes:
        case: the case with the claimed options.
        truth: its true results.
        outcomes: the results of the target by dtype. A dtype in which it raised an error is missing.
    """

    case: Case
    truth: Truth
    outcomes: Mapping[str, Outcome]


@dataclass
class CheckResult:
    """The result of a check.

    Attributes:
        request: the target, the loss that it claims to compute, and the options.
        claim: what the target computes, according to the request and its signature.
        notes: messages about the target, such as the inferred way to call it.
        report: all checks, in the format of ``pairproof verify``.
        cases: number of selected cases, without random batches.
        gradients_judged: whether the target gives gradients.
        left_out: number of cases that were not judged, by reason.
        diagnoses: explanations of failures, by case and dtype.
        diagnosis: the fewest reasons that explain the failures.
        advice: options to try if the verdict is unexpected.
        declared: the declared deviations for this loss and this target.
        unused: one message for each deviation in ``declared`` that matches no check.
        aside: the declared deviations for this loss but another target.
        sizes: the size and a description of the shape of each failing or errored case, by id.
        failing: the failing and errored cases with their results, by id.
        explained: number of failing cases to show: one for each reason, the others without a reason. None shows all,
            also those above the required level.
        fresh: the random batches.
        limits: the temperatures, norms or logits at which the target starts to break. Empty if only some cases were
            selected, or if the target cannot compute the ordinary batch of ``ranges.py``.
        untried: what no judged case tried: claimed options and values, skipped random batches, and cases that need
            ``thorough``.
        shrunk: the smallest failing random batch that was found. Set only if no stored case of its level or a lower one
            fails.
        question: a question about another reading of the signature (``forms.Reading``), in which all judged cases pass;
            "" if there is none.
        inapplicable: why a selected usage has no check, by its id.
        wrong_from: the number of rows and of columns from which the target fails, if it fails only on random batches
            of training size and cases above the required level; else "".
    """

    request: Request
    claim: Claim
    notes: tuple[str, ...]
    report: Report
    cases: int
    gradients_judged: bool = False
    left_out: Counter[str] = field(default_factory=Counter)
    diagnoses: dict[tuple[str, str], str] = field(default_factory=dict)
    diagnosis: Diagnosis = field(default_factory=Diagnosis)
    advice: list[str] = field(default_factory=list)
    declared: list[Deviation] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    aside: list[Deviation] = field(default_factory=list)
    sizes: dict[str, tuple[int, str]] = field(default_factory=dict)
    failing: dict[str, Failing] = field(default_factory=dict)
    explained: int | None = SHOWN
    fresh: list[FreshBatch] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)
    shrunk: Shrunk | None = None
    question: str = ""
    inapplicable: dict[str, str] = field(default_factory=dict)
    wrong_from: str = ""

    @property
    def reading(self) -> str:
        """What each parameter of the target gets; "" for a command."""
        return next((note for note in self.notes if note.startswith(READING)), "")

    @property
    def level(self) -> Level:
        """The highest level at which the target must pass."""
        return self.request.required

    @property
    def checks(self) -> list[Check]:
        """All checks, including skipped ones."""
        return self.report.checks

    @property
    def judged(self) -> list[Check]:
        """The checks that were not skipped."""
        return [check for check in self.checks if check.status is not Status.SKIPPED]

    @property
    def _results(self) -> list[Check]:
        """The judged checks of cases, or those of usages if only usages were selected."""
        return [check for check in self.judged if check.kind == "case"] or self.judged

    @property
    def failures(self) -> list[Check]:
        """The checks that failed or ended in an error, at every level."""
        return [check for check in self.checks if check.status in BAD]

    @property
    def failures_above(self) -> list[Check]:
        """The failures that do not affect the verdict."""
        return [check for check in self.failures if is_above(check, self.level)]

    @property
    def failures_required(self) -> list[Check]:
        """The failures that affect the verdict."""
        return [check for check in self.failures if not is_above(check, self.level)]

    @property
    def counts(self) -> Counter[Status]:
        """Number of checks with each status."""
        return counted(self.checks)

    @property
    def not_tried(self) -> list[str]:
        """``untried``, gradients that may be zero, and the usages that were not judged, with the reason."""
        untried = [*self.untried, *(f"the gradient of {name} (--frozen)" for name in self.request.frozen)]
        usages = [check for check in self.checks if check.kind == "usage" and check.case.startswith("usage/")]
        if not usages and not self.request.cases:
            why = "not possible for a command" if self.claim.call == "command" else "no ordinary case passes"
            return [*untried, f"usages, such as autocast and torch.compile ({why})"]
        skipped = (check for check in usages if check.status is Status.SKIPPED)
        untried += [f"{check.case.removeprefix('usage/')} ({check.message})" for check in skipped]
        reasons = grouped((why, name.removeprefix("usage/")) for name, why in self.inapplicable.items())
        # Without patterns, usages that do not apply are only counted, and only those that need other arrays.
        if self.request.cases:
            return untried + [f"{', '.join(names)} ({why})" for why, names in reasons.items()]
        arrays = (item for item in reasons.items() if item[0].startswith(OTHER_ARRAYS))
        return untried + [f"{len(names)} usages ({why}: --case 'usage/*' lists them)" for why, names in arrays]

    @property
    def scalars(self) -> list[str]:
        """The scalars whose gradient was checked and is right, such as "a learned temperature"."""
        passed = {check.case for check in self.checks if check.status is Status.PASSED}
        return [BY_NAME[name].words for name in SCALARS if BY_NAME[name].id in passed]

    @property
    def only_usages(self) -> bool:
        """Whether neither cases nor random batches are selected."""
        return not self.cases and not self.fresh

    @property
    def levels(self) -> dict[Level, Counter[Status]]:
        """Number of judged checks by level and status."""
        return {level: counted(check for check in self.judged if check.level is level) for level in Level}

    def verdict_at(self, level: Level) -> str:
        """Return the verdict at a level.

        - ``COULD_NOT``: no case at this level or below has a result.
        - ``DOES_NOT``: a check at this level or below fails or ends in an error, or a declaration matches no check.
        - ``CONFORMS``: otherwise.
        """
        cases = (check for check in self._results if level_of(check.flags) <= level)
        if all(check.status is Status.ERRORED for check in cases):
            return COULD_NOT
        failed = any(not is_above(check, level) for check in self.failures)
        return DOES_NOT if failed or self.unused else CONFORMS

    @property
    def verdict(self) -> str:
        """The verdict at the required level."""
        return self.verdict_at(self.level)

    @property
    def exit_code(self) -> int:
        """0: conforms; 1: does not conform; 3: could not run."""
        return EXIT_CODES[self.verdict]

    @property
    def summary(self) -> str:
        """The verdict and the number of checks of each status, in one line."""
        loss, counts = self.request.loss, counted(self.judged)
        cases = self._results
        if not cases and self.only_usages:
            if self.checks:
                return f"could not run: every selected usage is skipped: {self.checks[0].message}"
            if not self.inapplicable:
                return "could not run: side effects are watched in the calls of cases and usages: select some of them"
            reasons = grouped((why, name) for name, why in self.inapplicable.items())
            first = {why: [*names[:SHOWN], *["..."] * (len(names) > SHOWN)] for why, names in reasons.items()}
            return "could not run: " + "; ".join(f"{why} ({', '.join(names)})" for why, names in first.items())
        if not cases:
            return f"could not run: none of the {self.cases} {loss} cases applies to this target"
        if all(check.status is Status.ERRORED for check in cases):
            return f"could not run: each of {len(cases)} checks ended in an error: {cases[0].message}"
        if self.verdict == COULD_NOT:
            least = min(level_of(check.flags) for check in cases if check.status is not Status.ERRORED)
            return f"could not run: no check of the level {self.level} or below has a result: pass --level {least}"
        values, above = "" if self.gradients_judged else ", values only", self.failures_above
        values += ", on the CPU instead of a GPU" if ON_CPU in self.notes else ""
        counts -= counted(above)
        # Reasons count cases, each of which is checked in several dtypes, so the first number has a noun.
        noun = iter(["check"])
        ends = [phrase(status, counts[status], next(noun, "")) for status in Status if counts[status]]
        ends += [f"{phrase(Status.FAILED, len(above), next(noun, ''))} above this level"] if above else []
        idle = f"; {several(len(self.unused), 'declaration')} without a matching check" if self.unused else ""
        above_only = "above this level, " if self.verdict == CONFORMS else ""
        words = ", ".join(filter(None, (self.wrong_from, self.diagnosis.short, self._raised)))
        why = f"{above_only}{words}; " if words else ""
        start = f"{self.verdict} at level {self.level}: {self.request.name} as {loss}"
        return f"{start}{values}: {why}{', '.join(ends)}{idle}"

    @property
    def _raised(self) -> str:
        """The most frequent error of the checks up to the level that ended in an error; "" if none did."""
        bad = [one for one in self.failures_required if one.status is Status.ERRORED]
        if not bad:
            return ""
        (message, count), *_ = Counter(shorten(one.message, 100) for one in bad).most_common(1)
        ordinary = any(one.level is Level.FORMULA for one in bad)
        where = "" if ordinary else " (on no batch of the level formula)"
        return f"{'' if count == len(bad) else 'most often '}an error{where}: {message}"

    def worst(self) -> dict[str, float]:
        """Return the largest error of each dtype, in units of its bound."""
        ratios = grouped((check.dtype, check.ratio) for check in self.judged if check.ratio is not None)
        return {dtype: max(found) for dtype, found in ratios.items()}

    def flags(self) -> dict[str, Counter[Status]]:
        """Return the number of checks by flag and status. Flags with the most failures come first."""
        statuses = grouped((flag, check.status) for check in self.judged for flag in check.flags)
        found = {flag: Counter(statuses[flag]) for flag in sorted(statuses)}
        return dict(sorted(found.items(), key=lambda item: -sum(item[1][status] for status in BAD)))


def is_above(check: Check, level: Level) -> bool:
    """Return whether a failure is above a level, so that it does not affect the verdict at that level.

    A declared deviation that does not occur affects the verdict at every level, because the declaration is wrong.
    """
    stale = check.status is Status.FAILED and bool(check.declared)
    return check.level is not None and check.level > level and not stale


@takes(Request)
def check_loss(*target: Any, **options: Any) -> CheckResult:
    """Judge a loss: ``check_loss(MyLoss, "supcon", temperature=0.1)``.

    The keywords are the options of ``pairproof check``; see :class:`~pairproof.conformance.judge.options.Request`.

    Returns:
        All checks with their status, the counts, the verdict and a summary.

    Raises:
        UsageError: an option is wrong or missing, or no case is selected.
        CouldNotRun: the target cannot be loaded, or the device cannot be used.
        FixtureError: the fixtures cannot be trusted.
    """
    return check(Request(*target, **options))


@one_thread()
def check(request: Request, progress: Progress | None = None, *, explain: int | None = SHOWN) -> CheckResult:
    """Judge a target on the selected cases of the loss that it claims to compute.

    Args:
        request: the target, the loss and the options.
        progress: called at each step.
        explain: number of failing cases to show: one for each reason, the others without a reason. None shows all, also
            those above the required level.

    Returns:
        The result of the check.

    Raises:
        UsageError: an option is wrong or missing, or no case is selected.
        CouldNotRun: the target cannot be loaded, or the device cannot be used.
        FixtureError: the fixtures cannot be trusted.
    """
    request = request.with_seed(secrets.randbelow(2**32))
    dtypes = request.dtypes or External.dtypes
    selection = Selection(losses=(request.loss,), cases=request.cases, dtypes=dtypes, device=request.device)
    worked = load_worked()
    stored = load_cases(worked, (request.loss,))
    cases, fresh = chosen_cases(request, stored), fresh_batches(request)
    path = request.deviations or project_file(Path.cwd())
    entries = read_declarations(path) if path else {}
    known = deviations(entries, load_cases(worked)) if entries else ()
    begun: list[CheckResult] = []
    with _noting(begun), closing(load_target(request, known)) as target, ExitStack() as while_judging:
        report = Report(selection, versions={target.name: target.version()}, cases_in_all=len(cases))
        result = CheckResult(request, target.claim, target.notes, report, len(cases), explained=explain, fresh=fresh)
        begun.append(result)
        result.declared = [one for one in known if one.concerns(request.loss, request.name)]
        result.aside = [one for one in known if one not in result.declared and one.concerns(request.loss, one.target)]
        failing: list[tuple[Case, Outcome]] = []
        drawn: list[GoldenCase] = []
        watch, tried = Watch(request, target), Tried(target.claim)
        same = repeated(cases, target.claim, thorough=request.thorough)
        options = [name for name in LOSSES[request.loss].choices if name not in target.claim.passed]
        observed: list[Observation] = []
        every: list[Case | FreshBatch] = [*cases, *fresh]
        training: dict[str, Observation] = {}
        judged: list[tuple[Case, GoldenCase | None]] = []
        while_judging.enter_context(proved_ahead(fresh, target.claim))
        for chosen in tracked("cases", every, len(every), progress):
            if chosen.id in same:
                result.left_out[SAME] += 1
                continue
            case, golden = inputs_of(chosen, stored, target.claim, request)
            checks = list(judge_target(request, target, case, golden, dtypes, probes(stored, target.claim)))
            report.checks += checks
            watch.note()
            if any(one.status is not Status.SKIPPED for one in checks):
                tried.note(case)
                judged.append((case, golden))
            else:
                why = " and ".join(dict.fromkeys(one.message for one in checks))
                tried.note_skipped(case, why, drawn=isinstance(chosen, FreshBatch))
                result.left_out[why] += isinstance(chosen, Case)
            failed = [one for one in checks if one.status is Status.FAILED]
            if explain is not None:
                failed = [one for one in failed if not is_above(one, result.level)]
            for one in failed:
                if words := explanation(one, case, golden):
                    result.diagnoses[case.id, one.dtype] = words
            wrong = [one.dtype for one in failed if (one.ratio or math.inf) > 1]
            wrong = [dtype for dtype in wrong if (case.id, dtype) not in result.diagnoses]
            if wrong:
                outcome, ordinary = target.outcomes[case.id, wrong[0]], failed[0].level == Level.FORMULA
                found = Observation(case, wrong, outcome, truth_of(case, golden), ordinary)
                if isinstance(chosen, FreshBatch) and chosen.training:
                    training[case.id] = found
                else:
                    observed.append(found)
            elif golden and checks[0].status is Status.PASSED:
                observed.append(Observation(case, (), None, truth_of(case, golden)))
            if any(one.status in BAD for one in checks):
                result.sizes[case.id] = case.size, case.sizes()
                outcomes = {dtype: outcome for (_, dtype), outcome in target.outcomes.items()}
                true = truth_of(case, golden)
                result.failing[case.id] = Failing(case, true, outcomes)
            drawn += [golden] if failed and golden and isinstance(chosen, FreshBatch) else []
            failing += [(case, target.outcomes[case.id, one.dtype]) for one in failed[:1]]

        while_judging.close()

        def fails(golden: GoldenCase) -> bool:
            checks = judge_target(request, target, golden.case, golden, dtypes, probes(stored, target.claim))
            return any(one.status is Status.FAILED and not is_above(one, result.level) for one in checks)

        step = progress or unreported
        step("reasons for failures" if result.failures else "advice", 0, 0)
        compared = report.checks
        if all(golden.case.id in training for golden in drawn):  # large stored cases may fail for the same reason
            least = min((golden.case.size for golden in drawn), default=0)
            compared = [one for one in compared if result.sizes.get(one.case, (0, ""))[0] < least]
        result.shrunk = smallest_failure(drawn, compared, fails, request.name)
        if result.shrunk and (small := result.shrunk.golden).case.id in training:
            # The reasons must explain the smallest failing batch instead of the batch that it was made from.
            fails(small)
            large = training[small.case.id]
            outcome = target.outcomes.get((small.case.id, large.dtype), large.outcome)
            smallest = Observation(small.case, large.dtypes, outcome, truth_of(small.case, small), large.ordinary)
            training[small.case.id] = smallest
            result.wrong_from = f"wrong from N = {small.case.n}, D = {small.case.embeddings.shape[1]}"
        claim = target.claim
        named = {"claimed": variant_of(LOSSES[claim.loss], claim.settings), "temperature": claim.temperature}
        search = partial(_searched, request, claim.call, claim.arrays, normalised=claim.normalised, **named)
        calls = search, target.evaluate, partial(draw_training, claim, 0, 0)
        facts = Known(options, *calls, claim.call, str(claim.settings["direction"]) if claim.directed_here else "")
        result.diagnosis = find_reasons([*observed, *training.values()], facts)
        result.diagnoses |= result.diagnosis.details
        result.advice += _advice(target, failing)
        beyond = (one for one in result.failures_required if one.status is Status.FAILED)
        if any((one.ratio or math.inf) > 1 for one in beyond) and not result.diagnosis.reasons:
            result.advice.append("no reason was found; --html FILE draws the terms of a batch beside the right ones")
        report.checks += watch.checks
        usages = UsageJudge(
            target, request.dtypes, stored, lambda one: as_claimed(one, stored[one], target.claim), report.checks
        )
        report.checks += usages.checks(request, progress)
        result.inapplicable = usages.inapplicable
        if not request.cases:
            step("ranges of temperatures, norms and logits", 0, 0)
            result.limits = find_limits(target, target.claim, dtypes)
        result.notes = target.notes
        if result.failures_required:
            step("other readings of the signature", 0, 0)
            unit = any("--normalised" in one for one in result.advice)
            result.question = _question(request, target, known, stored, judged, dtypes, unit)
    result.untried = tried.missing()
    report.cases_chosen = len(cases) - result.left_out.total()
    result.gradients_judged = bool(target.gradients_judged)
    if request.whole:
        due = [one.name for one in result.declared if one.concerns(request.loss, request.name, dtypes)]
        met = {name for one in report.checks for name in one.declared}
        if result.failures_required:  # usages that no ordinary case passes may fail in the corrected loss
            unjudged = {name for name, why in usages.inapplicable.items() if why.startswith(NONE_PASSES)}
            met |= {one.name for one in result.declared if not unjudged.isdisjoint(one.usages)}
        result.unused = unused(due, met, f"{request.name} as {request.loss}")
        report.problems += result.unused
    if result.verdict == COULD_NOT:
        report.problems.append(result.summary)
    return result


@contextmanager
def _noting(begun: Sequence[CheckResult]) -> Iterator[None]:
    """Add what has been judged to the exception of Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt as error:
        for result in begun:
            judged, failed = counted(result.judged), list(dict.fromkeys(one.case for one in result.failures_required))
            so_far = ", ".join(phrase(status, judged[status]) for status in Status if judged[status])
            error.add_note(f"so far {so_far}" + f"; failing: {', '.join(failed[:SHOWN])}" * bool(failed))
        raise


def _question(
    request: Request,
    target: External,
    declared: Sequence[Deviation],
    stored: Mapping[Case, GoldenCase | None],
    judged: Sequence[tuple[Case, GoldenCase | None]],
    dtypes: Sequence[str],
    unit: bool,
) -> str:
    """Return the question about another reading of the signature in which every judged case passes; "" if none is.

    The smallest cases are tried first, and the first failure ends the trial. The verdict does not change. If ``unit``,
    the loss depends on the norms of the rows; they are then passed normalised.
    """

    def passes(target: External, case: Case, golden: GoldenCase | None) -> bool:
        ordinary = probes(stored, target.claim)
        checks = [*judge_target(request, target, case, golden, dtypes, ordinary)]
        fails = any(one.status in BAD and not is_above(one, request.required) for one in checks)
        return not fails and any(one.status is not Status.SKIPPED for one in checks)

    in_turn = sorted(judged, key=lambda one: one[0].size)
    for reading in target.readings:
        options: dict[str, Any] = {**reading.options, "normalised": unit or request.normalised}
        with suppress(UsageError, CouldNotRun), closing(load_target(replace(request, **options), declared)) as other:
            if in_turn and all(passes(other, *one) for one in in_turn):
                return reading.question + " --normalised" * unit
    return ""


def inputs_of(
    chosen: Case | FreshBatch, stored: Mapping[Case, GoldenCase | None], claim: Claim, request: Request
) -> tuple[Case, GoldenCase | None]:
    """Return the case to judge, and its golden entry with the proved results.

    The case is a stored case with the claimed options, or a random batch. The entry is None for a worked example.
    """
    if isinstance(chosen, FreshBatch):
        golden = chosen.proved(claim)
        return golden.case, golden
    return as_claimed(chosen, stored[chosen], claim, thorough=request.thorough)


def probes(stored: Mapping[Case, GoldenCase | None], claim: Claim) -> Iterator[Case]:
    """Yield the golden cases of the level formula, with the claimed temperature and options of a target."""
    for case, golden in stored.items():
        if golden and level_of_case(case, golden) is Level.FORMULA:
            yield case_as_claimed(case, claim)


def judge_target(
    request: Request,
    target: External,
    case: Case,
    golden: GoldenCase | None,
    dtypes: Sequence[str],
    ordinary: Iterable[Case],
) -> Iterator[Check]:
    """Judge a target on one case. Afterwards, ``target.outcomes`` contains only the outcomes of this case.

    Args:
        request: the request of the check.
        target: the target, as ``load_target`` returns it.
        case: the case.
        golden: its golden entry, if it has one.
        dtypes: the dtypes of the inputs.
        ordinary: cases that show whether the target computes in float32 when its inputs are float64.

    Yields:
        The checks, with their levels and the commands that repeat them.
    """
    target.outcomes.clear()
    selection = Selection(dtypes=dtypes, device=request.device)

    def review(check: Check, true: Truth, outcome: Outcome) -> Check:
        return reviewed(check, case, golden, true, outcome, target, ordinary)

    for one in judge_case(case, golden, [target], selection, review=review):
        known = one.level or level_of_case(case, golden, one.dtype)
        repeat = one.repeat and request.repeat(case.id, one.dtype, known)
        yield replace(one, repeat=repeat, message=_OWN_ERROR.sub("", one.message, count=1), level=known)


def chosen_cases(request: Request, stored: Iterable[Case]) -> list[Case]:
    """Return the cases that a request selects, after validating its options.

    Options that depend on the target are validated by ``load_target``.

    Raises:
        UsageError: a loss, dtype, level or number is wrong, or a pattern matches no case.
    """
    check_names(Selection(losses=(request.loss,), dtypes=request.dtypes))
    if request.level not in (None, *Level):
        raise unknown("level", str(request.level), list(Level))
    if request.temperature is not None and not 0 < request.temperature < math.inf:
        raise UsageError(f"--temperature: expected a positive number, got {request.temperature:g}")
    entry = LOSSES[request.loss]
    others = (*entry.embeddings[1:], *entry.matrices)
    for name in request.frozen:
        if name not in others:
            raise UsageError(f"--frozen {name}: {request.loss} can freeze {', '.join(others) or 'no matrix'}")
    if not request.limit > 0:
        raise UsageError(f"--limit: expected a positive number of seconds, got {request.limit:g}")
    if request.fuzz < 0:
        raise UsageError(f"--fuzz: expected 0 or more random batches, got {request.fuzz}")
    cases = [case for case in stored if case.loss == request.loss]
    names = [case.id for case in cases] + [batch.id for batch in fresh_batches(replace(request, cases=()))]
    for pattern in request.cases:
        if not any(fnmatchcase(name, pattern) for name in (*usage_names(), *names)):
            raise UsageError(f"no case of {request.loss} matches {pattern}; see: pairproof list")
    return [case for case in cases if Selection(cases=request.cases).takes_case(case.id)]


def load_target(request: Request, declared: Sequence[Deviation]) -> External:
    """Load the target of a request. ``declared`` may contain deviations of other losses and targets.

    Raises:
        UsageError: an option is wrong or missing.
        CouldNotRun: the target cannot be loaded, or the device cannot be used.
    """
    same = ["loss", "call", "arrays", "temperature", "scale", "normalised", "frozen", "settings", "init", "result"]
    same += ["limit", "device"]
    options = {name: getattr(request, name) for name in same}
    dtypes = tuple(dtype for dtype in DTYPES if dtype in (request.dtypes or External.dtypes))
    concerning = tuple(one for one in declared if one.concerns(request.loss, request.name))
    if request.flush_denormal:
        flush_denormal()
    try:
        return child.load_loss(request.target, **options, dtypes=dtypes, deviations=concerning)
    except NoCallFits as error:
        raise CannotBeCalled(str(error)) from None
    except TargetError as error:
        found = _recovered(request) if str(error).startswith(NO_TEMPERATURE) else ""
        raise (UsageError if isinstance(error, TargetMisused) else CouldNotRun)(f"{error}{found}") from None


def explanation(check: Check, case: Case, golden: GoldenCase | None, outcome: Outcome | None = None) -> str:
    """Explain one failure in a sentence; "" if no explanation is found.

    If the outcome of the target is None, only rounding errors are recognised.
    """
    ratio = math.inf if check.ratio is None else check.ratio
    if ratio <= 1:
        # Within its bound: the check fails only because a declared deviation did not occur.
        return ""
    if check.rounding:
        return ROUNDED
    if outcome is None:
        return ""
    try:
        return explain_case(case, outcome, truth_of(case, golden), check.dtype)
    except Exception as error:  # a failure of the explanation must not hide the failure itself
        return f"no explanation was found: {type(error).__name__}: {error}"


def _searched(request: Request, call: str | None, arrays: str | None, **known: Any) -> Searched | None:
    """Look for the loss that a target computes on probes; None if it cannot be called with probes."""
    same = {name: getattr(request, name) for name in ("loss", "scale", "init", "result")}
    with suppress(TargetError):
        if call != "command":
            with closing(child.load_target(request.target, call, arrays, request.limit, **same)) as called:
                return searched(called, request.limit, **known)
    return None


def _recovered(request: Request) -> str:
    """Return the end of the message that the temperature is missing: the arguments that explain the answers to probes.

    Return "" if no loss of the catalogue explains them.
    """
    known = {"claimed": variant_of(LOSSES[request.loss], {}), "normalised": bool(request.normalised)}
    found = _searched(request, request.call, request.arrays, **known)
    if not found or not found.search or not found.fitting:
        return ""
    arguments = arguments_of(found.fitting[0], found.search.target.call)
    return f"; its values are those of {arguments}" if arguments else ""


def _advice(target: External, failing: Sequence[tuple[Case, Outcome]]) -> Iterator[str]:
    claim = target.claim
    given = {*claim.settings, *claim.passed}
    if "reduction" not in given and any(len(o.values) == len(case.counted()) > 1 for case, o in failing):
        yield "it returns one value per anchor: pass --set reduction=none if that is intended"
    cosine = [case for case, _ in failing if case.option("similarity") == "cosine"]
    if cosine and not claim.normalised and "similarity" not in claim.passed and _depends_on_norms(target, cosine[0]):
        words = "scaling the embeddings changes its value: pass --normalised if its caller normalises them"
        yield f"{words}, or --set similarity=dot if it computes dot products"


def _depends_on_norms(target: External, case: Case) -> bool:
    """Return whether scaling the embeddings changes the loss. False if the target raises an error."""
    # Large entries are halved instead of doubled, so that no product overflows.
    factor = 2.0 if max(np.abs(rows).max() for rows in case.matrices.values()) < 1 else 0.5
    scaled = case.mapped(lambda rows: factor * rows)
    try:
        once, twice = (np.array(target.evaluate(one, "float64").values) for one in (case, scaled))
    except Exception:  # external code may raise anything
        return False
    return once.shape != twice.shape or not np.allclose(twice, once, rtol=1e-6, atol=0, equal_nan=True)
