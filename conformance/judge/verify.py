"""``pairproof verify``: judge the figures and claims of the documents, and every implementation on every case."""

from __future__ import annotations

import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pairproof

from ..documents.claims import CHECKS, ClaimJudgement, judge_claims
from ..documents.figures import Judgement, judge
from ..documents.load import WorkedFixture, load_worked, worked_cases
from ..implementations import ALL, Implementation, Unavailable
from ..implementations.base import one_thread, unusable
from ..suite.cases import Case
from ..suite.catalogue import LOSSES
from ..suite.garbage import forked, without_collections
from ..suite.golden import DTYPES, GoldenCase, load_golden
from ..suite.machine import machine
from ..suite.progress import Progress, tracked
from ..suite.records import Bounds, Outcome, Truth
from ..suite.store import fixtures_root, read_json
from ..suite.subset import covering
from ..truth.compare import Comparison, compare
from ..truth.evaluate import stored_truth, truth
from ..truth.tolerances import bounds, rounded_once
from .deviations import verdict
from .options import CouldNotRun, Selection, UsageError, meant, unknown
from .results import BAD, Check, Status, counted, grouped, tally, unused

EXPECTED = "expected.json"
EXPECTED_FORMAT = "pairproof-expected/1"
PRINTED = "printed entries"

MOST_ROWS = 258
"""Largest ``Case.size`` that runs by default. Larger cases test tiles of more than 256 rows."""


@dataclass
class Report:
    """The results of a run.

    Attributes:
        selection: what was selected.
        checks: all checks.
        judgements: the judged figures.
        claims: the judged claims.
        fixtures: the worked examples.
        versions: the version of each implementation that is present.
        absent: the reason why an implementation is absent, by name.
        problems: what is wrong apart from the checks, such as an unexpected number of them.
        cases_chosen: number of cases that were run.
        cases_left_out: number of selected cases that only a thorough run includes.
        dtypes_left_out: the dtypes that only a thorough run includes.
        alternates: whether each case ran with only one of several similar implementations, in one dtype.
        cases_in_all: number of cases before any were left out.
        machine: what rounding errors depend on, as of the creation of the report.
    """

    selection: Selection
    checks: list[Check] = field(default_factory=list)
    judgements: list[Judgement] = field(default_factory=list)
    claims: list[ClaimJudgement] = field(default_factory=list)
    fixtures: list[WorkedFixture] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    cases_chosen: int = 0
    cases_left_out: int = 0
    dtypes_left_out: list[str] = field(default_factory=list)
    alternates: bool = False
    cases_in_all: int = 0
    machine: dict[str, str] = field(default_factory=machine)

    @property
    def judged(self) -> bool:
        """Whether any check was not skipped."""
        return any(check.status is not Status.SKIPPED for check in self.checks)

    @property
    def passed(self) -> bool:
        """Whether a check was judged, none failed or ended in an error, and there are no ``problems``."""
        return self.judged and not self.problems and not any(check.status in BAD for check in self.checks)

    @property
    def first_problem(self) -> str:
        """The first failed check, or else the first problem, and the number of others; "" if the run passed."""
        bad = [check for check in self.checks if check.status in BAD]
        words = [f"{bad[0].implementation}, {bad[0].case}: {bad[0].message}"] if bad else self.problems[:1]
        more = len(bad) + len(self.problems) - 1
        return "".join(words) + (f" (and {more} more)" if more > 0 else "")

    @property
    def exit_code(self) -> int:
        """0: passed; 1: not passed; 3: nothing was judged."""
        return int(not self.passed) if self.judged else 3

    def entries(self) -> dict[str, int]:
        """Return the number of judged printed entries, by kind."""
        counts = Counter(
            "infinite" if entry in ("inf", "-inf") else judgement.figure.kind
            for judgement in self.judgements
            for _, entry in judgement.figure.entries()
        )
        return dict(sorted(counts.items()))

    def header(self) -> dict[str, str]:
        """Return the header of the report: what is tested, the device and the versions."""
        return {
            "pairproof": pairproof.__version__,
            "copy": pairproof.__path__[0],
            "fixtures": str(fixtures_root()),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": torch.__version__,
            "device": self.selection.device,
            "machine": platform.machine(),
            **self.machine,
        }


def load_cases(fixtures: Sequence[WorkedFixture], losses: Collection[str] = ()) -> dict[Case, GoldenCase | None]:
    """Load the cases of some losses (by default all) with their golden entries; None for worked examples."""
    with without_collections():
        worked = [case for fixture in fixtures for case in worked_cases(fixture) if not losses or case.loss in losses]
        return dict.fromkeys(worked) | {golden.case: golden for golden in load_golden(losses=losses)}


@one_thread()
def run(selection: Selection, progress: Progress | None = None) -> Report:
    """Judge figures and claims, run the implementations on the cases, and compare the counts with the expected ones.

    Args:
        selection: what to run.
        progress: called at each step.

    Returns:
        The report.

    Raises:
        UsageError: the selection names an unknown loss, implementation, dtype or device, or matches no case.
        CouldNotRun: an implementation that the selection names, the path of a peer or the device is not available.
        FixtureError: the fixtures cannot be trusted.
    """
    check_names(selection)
    check_device(selection.device)
    if selection.flush_denormal:
        flush_denormal()
    report = Report(selection, fixtures=load_worked())
    implementations = list(_present(selection, report))
    stored = load_cases(report.fixtures)
    report.cases_in_all = len(stored)
    cases = [case for case in stored if selection.takes_loss(case.loss) and selection.takes_case(case.id)]
    if selection.covering:
        cases = covering({case: stored[case] for case in cases})
    left_out = []
    if not selection.complete:
        left_out = [case for case in cases if case.size > MOST_ROWS]
        cases = [case for case in cases if case.size <= MOST_ROWS]
    report.cases_chosen, report.cases_left_out = len(cases), len(left_out)
    report.dtypes_left_out = [] if selection.dtypes else [name for name in DTYPES if not selection.takes_dtype(name)]
    report.alternates = selection.alternates and any(one.alternates for one in implementations)
    jobs = [partial(judge_case, case, stored[case], implementations, selection) for case in cases]
    with _shared_out(jobs, cases, selection) as results:
        # Meanwhile, other processes judge cases.
        if any(i.name == "reference" for i in implementations) and selection.takes_dtype("float64"):
            _judge_documents(report, progress)
        _check_cases(selection, {case.id for case in cases} | {check.case for check in report.checks}, stored)
        not_run = _left_out(implementations, stored, cases, selection) if selection.whole else {}
        found = dict(tracked("cases", results, len(jobs), progress))
        report.checks += chain.from_iterable(found[k] for k in range(len(jobs)))
    if not report.judged:
        reasons = Counter(check.message for check in report.checks).most_common(1)
        why = f"every check was skipped: {reasons[0][0]}" if reasons else "no implementation has the selected dtypes"
        report.problems.append(f"nothing was judged: {why}")
    if selection.whole:
        for one in implementations:
            if left_out or report.alternates or not {*report.dtypes_left_out}.isdisjoint(one.dtypes):
                continue  # a deviation may match only what is left out
            used = {name for check in report.checks if check.implementation == one.name for name in check.declared}
            report.problems += unused([deviation.name for deviation in one.deviations], used, one.name)
        report.problems += _count_problems(report, implementations, cases, not_run)
    return report


def _dtypes(implementation: Implementation, case: Case, selection: Selection) -> list[str]:
    """Return the dtypes in which a run judges an implementation on a case that is not refused."""
    chosen = list(filter(selection.takes_dtype, implementation.dtypes))
    return implementation.shared(case, chosen) if selection.alternates else chosen


def truth_of(case: Case, golden: GoldenCase | None) -> Truth:
    """Return the true results of a case: stored for a golden case, computed for a worked example."""
    return truth(case) if golden is None else stored_truth(case, golden.expected)


class Limits:
    """The bounds of a case for each implementation. Shared bounds are computed once."""

    def __init__(self, case: Case, true: Truth) -> None:
        self.case, self.true = case, true
        self._bounds = cache(self._bounds_of)

    def compare(self, implementation: Implementation, outcome: Outcome, dtype: str) -> Comparison:
        """Compare the results of an implementation with the truth."""
        return compare(self.case, self.true, outcome, self.of(implementation, dtype), dtype)

    def of(self, implementation: Implementation, dtype: str) -> Bounds:
        """Return the bounds of an implementation in a dtype."""
        return self._bounds(dtype, implementation.computes_in or dtype, implementation.narrows_weights)

    def _bounds_of(self, dtype: str, computing: str, narrowed: bool) -> Bounds:
        found = bounds(self.case, self.true, computing, narrowed=narrowed)
        return found if computing == dtype else rounded_once(found, self.true, dtype)


def judge_case(
    case: Case,
    golden: GoldenCase | None,
    implementations: Sequence[Implementation],
    selection: Selection,
    *,
    predict: bool = False,
    review: Callable[[Check, Truth, Outcome], Check] | None = None,
) -> list[Check]:
    """Judge implementations on one case.

    Args:
        case: the case.
        golden: its golden entry, if it has one.
        implementations: the implementations to judge.
        selection: limits the dtypes, and names the device in the commands that repeat a check.
        predict: whether to run nothing, and to derive the status of each check from the declared deviations.
        review: takes the check, the true results and the outcome of each comparison, and returns the final check.

    Returns:
        The checks by implementation. If the true results cannot be computed, there is a single errored check.
    """
    alone = Selection(cases=(case.id,), peers=selection.peers, flush_denormal=selection.flush_denormal)
    flags = golden.flags if golden else ()
    try:
        true = truth_of(case, golden)
    except Exception as error:  # without the truth this case cannot be judged; the others can
        message = f"the truth of this case could not be computed: {type(error).__name__}: {error}"
        repeat = replace(alone, implementations=("reference",), dtypes=("float64",)).command()
        return [Check("case", "reference", case.loss, case.id, "float64", Status.ERRORED, message, repeat=repeat)]

    limits = Limits(case, true)

    def judge_one(implementation: Implementation, dtype: str) -> Check:
        check = partial(Check, "case", implementation.name, case.loss, case.id, dtype, flags=flags)
        if not case.holds_in(dtype):
            return check(Status.SKIPPED, f"inputs are not exactly representable in {dtype}")
        this = replace(alone, implementations=(implementation.name,), dtypes=(dtype,), device=selection.device)
        repeat = " ".join((*implementation.environment, this.command()))
        declared = [one for one in implementation.deviations if one.applies(case, dtype, true)]
        check = partial(check, repeat=repeat, declared=tuple(one.name for one in declared))
        if predict:
            return check(Status.DEVIATES if declared else Status.PASSED)
        try:
            outcome = implementation.evaluate(case, dtype)
            comparison = limits.compare(implementation, outcome, dtype)
        except Exception as error:  # a crash of external code is a result, not the end of the run
            return check(Status.ERRORED, f"{type(error).__name__}: {error}".splitlines()[0])
        value = outcome.values[0] if len(outcome.values) == 1 else None
        numbers = {"ratio": comparison.ratio, "ulps": comparison.ulps, "value": value}
        found = check(*verdict(comparison.first, declared), **numbers)
        return review(found, true, outcome) if review else found

    checks = []
    for implementation in implementations:
        if not (dtypes := _dtypes(implementation, case, selection)):
            continue
        if refusal := implementation.refuses(case):
            skipped = Check("case", implementation.name, case.loss, case.id, "", Status.SKIPPED, refusal, flags=flags)
            checks.append(skipped)
        else:
            checks += [judge_one(implementation, dtype) for dtype in dtypes]
    return checks


def predicted(kinds: Sequence[type[Implementation]], stored: Mapping[Case, GoldenCase | None]) -> list[Check]:
    """Predict the checks of implementations, installed or not, from their declared deviations. Nothing is evaluated."""

    def declared_by(kind: type[Implementation]) -> Implementation:
        try:
            return kind({}, "cpu")
        except Unavailable:
            return kind.__new__(kind)

    declared = list(map(declared_by, kinds))
    checks = (
        judge_case(case, golden, declared, Selection(thorough=True), predict=True) for case, golden in stored.items()
    )
    return list(chain.from_iterable(checks))


AT_ONCE = 8
"""Largest number of cases of the same shape that a process judges before it gets others."""

LEAST_CASES = 50
"""Number of cases from which several processes are faster than one."""

MOST_PROCESSES = 8
"""Default limit of the number of processes. Each one needs 0.4 GiB, or 0.7 GiB if jax is installed."""

_jobs: Sequence[Callable[[], list[Check]]] = ()
"""The jobs of ``_shared_out``. Forked processes inherit them with the loaded implementations."""


def _done(part: Sequence[int]) -> list[tuple[int, list[Check]]]:
    with without_collections():
        return [(k, _jobs[k]()) for k in part]


@contextmanager
def _shared_out(
    jobs: Sequence[Callable[[], list[Check]]], cases: Sequence[Case], selection: Selection
) -> Iterator[Iterator[tuple[int, list[Check]]]]:
    """Run the jobs, in several processes if that is faster and safe. Yield their numbers and results in any order."""
    global _jobs
    _jobs = jobs
    # JAX compiles a loss for each shape in each process. Large cases come first, so that the processes end together.
    alike: dict[tuple[int, ...], list[int]] = {}
    for k, case in enumerate(cases):
        alike.setdefault(case.embeddings.shape, []).append(k)
    parts = [ks[start : start + AT_ONCE] for ks in alike.values() for start in range(0, len(ks), AT_ONCE)]
    parts.sort(key=lambda ks: sum(cases[k].size for k in ks), reverse=True)
    # An accelerator's context does not survive a fork.
    forks = len(jobs) >= LEAST_CASES and selection.device == "cpu" and sys.platform == "linux"
    processes = (selection.processes or min(len(os.sched_getaffinity(0)), MOST_PROCESSES)) if forks else 1
    if processes == 1:
        yield chain.from_iterable(map(_done, parts))
        return
    try:
        with forked(processes) as pool:
            done = as_completed([pool.submit(_done, part) for part in parts])
            yield chain.from_iterable(one.result() for one in done)
    except BrokenProcessPool:
        raise CouldNotRun("a process that judges cases was killed; if memory is short, use --jobs 1") from None


def _check_cases(selection: Selection, names: Collection[str], stored: Iterable[Case]) -> None:
    """Raise a UsageError if a pattern of a selection matches nothing, or if nothing is selected."""
    for pattern in selection.cases:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = meant(pattern, {case.id for case in stored})
            raise UsageError(f"no case matches {pattern}; see: pairproof list cases{near}")
    if not names:
        raise UsageError(f"{', '.join(selection.losses)}: no case yet; see: pairproof fixtures add --help")


def matrix(checks: Sequence[Check]) -> dict[str, dict[str, dict[str, int]]]:
    """Return the number of checks by implementation, loss and status, and whether a declared deviation is a bug.

    Implementations are in the order of reports. The key of the second fact is "wrong".
    """
    mistakes = {kind.name: {one.name for one in kind.deviations if one.wrong} for kind in ALL}
    judged = {one.implementation for one in checks}
    found: dict[str, dict[str, dict[str, int]]] = {name: {} for name in mistakes if name in judged}
    for (who, loss), some in grouped(((one.implementation, one.loss), one) for one in checks).items():
        counts = counted(some)
        wrong = any(mistakes.get(who, set()).intersection(one.declared) for one in some)
        found.setdefault(who, {})[loss] = {**{str(status): counts[status] for status in Status}, "wrong": wrong}
    return found


def check_names(selection: Selection) -> None:
    """Check that the names in a selection exist.

    Raises:
        UsageError: a loss, implementation, dtype or peer is unknown, or the number of processes is not positive.
        CouldNotRun: the path of a peer does not exist.
    """
    kinds = [kind.name for kind in ALL]
    for given, known, what in (
        (selection.losses, LOSSES, "loss"),
        ((*selection.implementations, *selection.required), kinds, "implementation"),
        (selection.dtypes, DTYPES, "dtype"),
        (selection.peers, ("supcontrast", "folder"), "peer with a path"),
    ):
        for name in given:
            if name not in known:
                raise unknown(what, name, known)
    if selection.processes is not None and selection.processes < 1:
        raise UsageError(f"--jobs: expected a positive number, got {selection.processes}")
    for name, path in selection.peers.items():
        if not Path(path).exists():
            raise CouldNotRun(f"--peer {name}: there is no file or folder {path}")


def check_device(device: str) -> None:
    """Check that a torch device can be used.

    Raises:
        CouldNotRun: the device cannot be used.
    """
    if reason := unusable(device):
        raise CouldNotRun(reason)


def flush_denormal() -> None:
    """Flush subnormal numbers to zero in this thread and in the processes that it starts.

    Raises:
        CouldNotRun: the processor cannot flush them.
    """
    if not torch.set_flush_denormal(True):
        raise CouldNotRun("--flush-denormal: this processor cannot flush subnormal numbers to zero")
    # Modules that are compiled from now on have constants of 0 in place of subnormal ones.
    sys.dont_write_bytecode = True


def _present(selection: Selection, report: Report) -> Iterator[Implementation]:
    """Load the selected implementations. Record the absent ones, and the versions of the others.

    Raises:
        CouldNotRun: an implementation that the selection names is absent.
    """
    # --peer supcontrast=PATH is what supcontrast-today runs.
    named = {*selection.implementations, *selection.required, *(f"{peer}-today" for peer in selection.peers)}
    for kind in ALL:
        if selection.implementations and kind.name not in (*selection.implementations, *selection.required):
            continue
        try:
            implementation = kind(selection.peers, selection.device)
        except Exception as error:  # a file that the user names may raise anything
            if kind.name in named:
                raise CouldNotRun(f"{kind.name} is not available: {error}") from None
            if not isinstance(error, Unavailable):
                raise
            report.absent[kind.name] = str(error)
        else:
            report.versions[kind.name] = implementation.version()
            yield implementation


def _judge_documents(report: Report, progress: Progress | None) -> None:
    """Recompute the printed figures of the documents, and judge their claims."""
    selection = report.selection

    def add(kind: str, name: str, passed: bool, message: str, loss: str = "", **more: Any) -> None:
        found = Check(kind, "reference", loss, name, "", Status.PASSED if passed else Status.FAILED, message)
        report.checks.append(replace(found, repeat=Selection(cases=(name,)).command(), **more))

    for fixture in tracked("documents", report.fixtures, len(report.fixtures), progress):
        for figure in fixture.figures:
            name, loss = f"{fixture.document.id}/{figure.id}", fixture.calls[figure.call].loss if figure.call else ""
            if not (selection.takes_case(name) and selection.takes_loss(loss)):
                continue
            try:
                (judged,) = judge(fixture, [figure.id])
            except Exception as error:  # an error in one figure must not hide the others
                add("figure", name, False, f"{type(error).__name__}: {error}", loss, status=Status.ERRORED)
                continue
            report.judgements.append(judged)
            message = judged.finding if judged.passed else judged.message
            add("figure", name, judged.passed, message, loss, value=judged.value)
        for claim in () if selection.losses else judge_claims(fixture):
            if selection.takes_case(claim.case):
                report.claims.append(claim)
                wrong = "" if claim.passed else f"recorded as {claim.claim.verdict!r}, found {claim.verdict!r}: "
                add("claim", claim.case, claim.passed, wrong + claim.evidence)
    if selection.whole:
        unknown = [name for name in CHECKS if name not in {claim.case for claim in report.claims}]
        report.problems += [f"{name}: no fixture has this claim, remove its check" for name in unknown]


def _count_problems(
    report: Report,
    implementations: Sequence[Implementation],
    cases: Sequence[Case],
    left_out: Mapping[str, Mapping[str, int]],
) -> list[str]:
    """Return the differences between the counts of a whole run and those of ``EXPECTED``.

    Checks that fail or end in an error are reported themselves. They count as any status that the file expects.

    Only implementations that are present are compared. The file counts a thorough run. Of the checks that this run left
    out, only the number is known, not how many pass or deviate. Implementations that need a special device are not in
    the file: they must pass every case that they support.

    Where subnormal numbers are flushed, more checks may deviate, as declared; they count as passed.
    """
    if not (fixtures_root() / EXPECTED).is_file():
        return [f"{EXPECTED} is missing: the counts of checks cannot be asserted"]
    data = read_json(fixtures_root(), EXPECTED)
    found_format = data.get("format") if isinstance(data, dict) else None
    if found_format != EXPECTED_FORMAT:
        return [f"{EXPECTED}: $.format: expected {EXPECTED_FORMAT!r}, got {found_format!r}"]
    present = {one.name for one in implementations if one.anywhere}
    found = tally(report.checks)
    if "reference" in present:
        present |= {"figure", "claim", PRINTED}
        found[PRINTED] = report.entries()
    recorded = {**data["counts"], PRINTED: data["entries"]}
    wanted = {key: counts for key, counts in recorded.items() if key.partition("/")[0] in present} | tally(
        Check("case", one.name, case.loss, case.id, dtype, Status.PASSED if runs else Status.SKIPPED)
        for one in implementations
        if not one.anywhere
        for case in cases
        for dtype, runs in _checks_of(one, case, list(filter(report.selection.takes_dtype, one.dtypes)))
    )

    def complete(key: str) -> bool:
        """Whether the counts equal those in the file, except for checks that are left out, fail or end in an error."""
        skipped, number = Status.SKIPPED.value, Counter(left_out.get(key, {}))
        rest, ran = Counter(wanted.get(key, {})), Counter(found.get(key, {}))
        if report.selection.flush_denormal:
            for counts in (rest, ran):
                counts[Status.PASSED.value] += counts.pop(Status.DEVIATES.value, 0)
        bad = sum(ran.pop(status.value, 0) for status in BAD)
        rest.subtract(ran)
        total = number.total() + bad
        return min(rest.values(), default=0) >= 0 and (rest[skipped], rest.total()) == (number[skipped], total)

    def less(key: str) -> str:
        left = left_out.get(key)
        return f" in a thorough run, {sum(left.values())} of them left out here" if left else ""

    return [
        f"{key}: expected {show_counts(wanted.get(key))}{less(key)}, ran {show_counts(found.get(key))}"
        for key in sorted(wanted.keys() | found.keys())
        if not complete(key)
    ]


def _left_out(
    implementations: Sequence[Implementation], stored: Iterable[Case], cases: Collection[Case], selection: Selection
) -> dict[str, dict[str, int]]:
    """Return the counts of the checks that only a thorough run includes. All that would run count as passed."""
    chosen = set(cases)

    def checks(one: Implementation, case: Case) -> Iterator[tuple[str, bool]]:
        judged = _dtypes(one, case, selection) if case in chosen else []
        rest = [dtype for dtype in one.dtypes if dtype not in judged]
        if rest and not (judged and one.refuses(case)):  # a refused case has one check
            yield from _checks_of(one, case, rest)

    return tally(
        Check("case", one.name, case.loss, case.id, dtype, Status.PASSED if runs else Status.SKIPPED)
        for one in implementations
        if one.anywhere
        for case in stored
        for dtype, runs in checks(one, case)
    )


def _checks_of(implementation: Implementation, case: Case, dtypes: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yield the dtype of each check of a case, and whether a run would judge it."""
    if implementation.refuses(case):
        yield "", False  # a refused case has one check
    else:
        yield from ((dtype, case.holds_in(dtype)) for dtype in dtypes)


def show_counts(counts: Mapping[str, int] | None) -> str:
    """Format counts as text."""
    return ", ".join(f"{n} {name}" for name, n in counts.items()) if counts else "nothing"


def expected_counts(report: Report, stored: Mapping[Case, GoldenCase | None]) -> dict[str, Any]:
    """Return the JSON object of ``fixtures/expected.json`` for a run. ``stored`` contains the cases of the run.

    A check that failed, or whose implementation is absent, counts as "deviates" if a declared deviation applies to it,
    else as "passed". Implementations that need a special device are left out.
    """
    everywhere = {kind.name: kind for kind in ALL if kind.anywhere}
    checks = [
        replace(check, status=Status.DEVIATES if check.declared else Status.PASSED) if check.status in BAD else check
        for check in report.checks
        if check.implementation in everywhere
    ]
    checks += predicted([everywhere[name] for name in report.absent if name in everywhere], stored)
    return {"format": EXPECTED_FORMAT, "counts": tally(checks), "entries": report.entries()}
