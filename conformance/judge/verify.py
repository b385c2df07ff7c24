"""Everything judged: figures, claims, and every implementation on every case; the counts asserted."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pairproof

from ..documents.claims import CHECKS, ClaimJudgement, judge_claims
from ..documents.figures import Judgement, judge
from ..implementations import ALL, Implementation, Unavailable
from ..suite.cases import Case, worked_cases
from ..suite.golden import GoldenCase, load_golden
from ..suite.store import WorkedFixture, fixtures_root, load_worked
from ..suite.subset import covering
from ..truth.baseline import plain_outcome
from ..truth.compare import compare
from ..truth.evaluate import Truth, stored_truth, truth
from ..truth.tolerances import Bounds, bounds, held_to, with_narrowed_weights
from .results import BAD, Check, Status, tally

EXPECTED = "expected.json"
EXPECTED_FORMAT = "pairproof-expected/1"

Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and how much there is."""


class UsageError(ValueError):
    """The selection names something that does not exist."""


class CouldNotRun(RuntimeError):
    """Something needed is not here; the message says what and how to get it."""


@dataclass(frozen=True)
class Selection:
    """What to run. Empty means everything.

    ``cases`` are ids or shell patterns; ``required`` names implementations that must be present; ``peers`` maps a
    peer's name to a path; ``processes`` is how many share the cases (by default one per core, where that is safe);
    ``covering`` leaves as few of the selected cases as show everything that they show.
    """

    losses: tuple[str, ...] = ()
    implementations: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    device: str = "cpu"
    required: tuple[str, ...] = ()
    peers: Mapping[str, str] = field(default_factory=dict)
    processes: int | None = None
    covering: bool = False

    @property
    def whole(self) -> bool:
        """Whether nothing is filtered by loss, case or dtype, so that counts can be asserted."""
        return not (self.losses or self.cases or self.dtypes or self.covering)

    def takes_loss(self, loss: str) -> bool:
        """Whether a loss is selected."""
        return not self.losses or loss in self.losses

    def takes_dtype(self, dtype: str) -> bool:
        """Whether a dtype is selected."""
        return not self.dtypes or dtype in self.dtypes

    def takes_case(self, case: str) -> bool:
        """Whether a case, figure or claim is selected."""
        return not self.cases or any(fnmatchcase(case, pattern) for pattern in self.cases)


@dataclass
class Report:
    """What a run found."""

    selection: Selection
    checks: list[Check] = field(default_factory=list)
    judgements: list[Judgement] = field(default_factory=list)
    claims: list[ClaimJudgement] = field(default_factory=list)
    fixtures: list[WorkedFixture] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    cases_chosen: int = 0
    cases_in_all: int = 0

    @property
    def passed(self) -> bool:
        """Whether every check ended well and the right number of them ran."""
        return not self.problems and not any(check.status in BAD for check in self.checks)

    def header(self) -> dict[str, str]:
        """What is tested, where, with which versions."""
        return {
            "pairproof": pairproof.__version__,
            "copy": str(Path(next(iter(pairproof.__path__)))),
            "fixtures": str(fixtures_root()),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": torch.__version__,
            "device": self.selection.device,
            "machine": platform.machine(),
        }


def repeat_line(kind: str, case: str, implementation: str = "", dtype: str = "", device: str = "cpu") -> str:
    """The command that repeats one check."""
    words = ["pairproof", "verify", "--case", case]
    if kind == "case":
        words += ["--impl", implementation, "--dtype", dtype]
        if device != "cpu":
            words += ["--device", device]
    return shlex.join(words)


def load_cases(fixtures: Sequence[WorkedFixture]) -> dict[Case, GoldenCase | None]:
    """Every case on which implementations are run, with its golden entry where it has one."""
    worked: dict[Case, GoldenCase | None] = {case: None for fixture in fixtures for case in worked_cases(fixture)}
    return worked | {golden.case: golden for golden in load_golden()}


def run(selection: Selection, progress: Progress | None = None) -> Report:
    """Judge figures and claims, run the implementations on the cases, assert the counts.

    Args:
        selection: what to run.
        progress: told of each step.

    Returns:
        The report.

    Raises:
        UsageError: the selection names an unknown loss, implementation, dtype or device, or matches no case.
        CouldNotRun: a required implementation is absent, or the device is.
        FixtureError: the fixtures cannot be trusted.
    """
    torch.set_num_threads(1)
    tell: Progress = progress or (lambda what, done, total: None)
    _check_selection(selection)
    report = Report(selection, fixtures=load_worked())
    implementations = list(_present(selection, report))
    if any(i.name == "reference" for i in implementations) and selection.takes_dtype("float64"):
        _judge_documents(report, tell)
    stored = load_cases(report.fixtures)
    cases = [case for case in stored if selection.takes_loss(case.loss) and selection.takes_case(case.id)]
    if not cases and not report.checks:
        raise UsageError(f"no case matches {', '.join(selection.cases or selection.losses)}; see: pairproof list")
    names = {case.id for case in cases} | {check.case for check in report.checks}
    for pattern in selection.cases:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UsageError(f"no case matches {pattern}; see: pairproof list")
    report.cases_in_all = len(stored)
    if selection.covering:
        cases = covering({case: stored[case] for case in cases})
    report.cases_chosen = len(cases)
    used: set[tuple[str, str]] = set()
    work = [(case, stored[case]) for case in cases]
    for done, (checks, met) in enumerate(_share_out(work, implementations, selection)):
        tell("cases", done + 1, len(cases))
        report.checks += checks
        used |= met
    if selection.whole:
        for implementation in implementations:
            for deviation in implementation.deviations:
                if (implementation.name, deviation.name) not in used:
                    report.problems.append(
                        f"{implementation.name}: the declared deviation {deviation.name!r} meets no case: remove it"
                    )
        report.problems += _count_problems(report, implementations, cases)
    return report


Work = tuple[Case, GoldenCase | None]
Judged = tuple[list[Check], set[tuple[str, str]]]


@dataclass
class _Yardstick:
    """What implementations are held to on one case: computed once for each dtype, whoever asks."""

    case: Case
    true: Truth
    known: dict[tuple[str, bool, bool], Bounds] = field(default_factory=dict)

    def bounds(self, dtype: str, *, plain: bool, narrowed: bool) -> Bounds:
        """The bounds in a dtype.

        If ``plain`` drawn in to twice what the straightforward implementation attains; if ``narrowed`` for one that
        rounds its weights.
        """
        if (dtype, plain, narrowed) not in self.known:
            if narrowed:
                found = self.bounds(dtype, plain=plain, narrowed=False)
                found = with_narrowed_weights(found, self.case, self.true, dtype)
            elif plain:
                found = self.bounds(dtype, plain=False, narrowed=False)
                found = held_to(found, self.true, plain_outcome(self.case, dtype))
            else:
                found = bounds(self.case, self.true, dtype)
            self.known[dtype, plain, narrowed] = found
        return self.known[dtype, plain, narrowed]


def judge_case(
    case: Case, golden: GoldenCase | None, implementations: Sequence[Implementation], selection: Selection
) -> Judged:
    """Judge implementations on one case.

    Args:
        case: the case.
        golden: its golden entry, where it has one.
        implementations: who is judged.
        selection: what is said of dtypes and of the device.

    Returns:
        The checks, and the declared deviations that the case met, each with its implementation.
    """
    try:
        true = truth(case) if golden is None else stored_truth(case, golden.expected)
    except Exception as error:  # without the truth nobody can be judged on this case; the others can
        message = f"the truth of this case could not be computed: {type(error).__name__}: {error}"
        repeat = repeat_line("case", case.id, "reference", "float64")
        return [
            Check("case", "reference", case.loss, case.id, "float64", Status.ERRORED, message, repeat=repeat)
        ], set()
    used: set[tuple[str, str]] = set()
    flags = golden.flags if golden else ()
    yardstick = _Yardstick(case, true)
    checks = [c for i in implementations for c in _check(i, yardstick, selection, used)]
    return [replace(check, flags=flags) for check in checks], used


class _Judge:
    """Judges one case at a time; what it needs is inherited by the processes that share the cases."""

    work: Sequence[Work] = ()
    implementations: Sequence[Implementation] = ()
    selection = Selection()

    @classmethod
    def judge(cls, k: int) -> Judged:
        """The checks of the k-th case on every implementation, and the declared deviations that it met."""
        return judge_case(*cls.work[k], cls.implementations, cls.selection)


def _share_out(work: list[Work], implementations: Sequence[Implementation], selection: Selection) -> Iterator[Judged]:
    """Judge the cases in order, shared among processes where that pays and is safe."""
    _Judge.work, _Judge.implementations, _Judge.selection = work, implementations, selection
    processes = selection.processes or os.cpu_count() or 1
    # A forked process inherits the loaded implementations; an accelerator's context does not survive a fork.
    if processes == 1 or len(work) < 50 or selection.device != "cpu" or sys.platform != "linux":
        yield from map(_Judge.judge, range(len(work)))
        return
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        yield from pool.imap(_Judge.judge, range(len(work)), chunksize=8)


def _check_selection(selection: Selection) -> None:
    from ..suite.catalogue import LOSSES

    known = [kind.name for kind in ALL]
    for given, allowed, what in (
        (selection.losses, list(LOSSES), "loss"),
        (selection.implementations, known, "implementation"),
        (selection.required, known, "implementation"),
        (selection.dtypes, ["float64", "float32", "bfloat16", "float16"], "dtype"),
        (tuple(selection.peers), ["supcontrast", "folder"], "peer with a path"),
    ):
        for name in given:
            if name not in allowed:
                raise UsageError(f"unknown {what} {name!r}; known: {', '.join(allowed)}")
    try:
        torch.empty(1, device=selection.device)
    except (RuntimeError, AssertionError) as error:
        raise CouldNotRun(f"device {selection.device!r} cannot be used: {str(error).splitlines()[0]}") from None


def _present(selection: Selection, report: Report) -> Iterator[Implementation]:
    for kind in ALL:
        if selection.implementations and kind.name not in (*selection.implementations, *selection.required):
            continue
        try:
            implementation = kind(selection.peers, selection.device)
        except Unavailable as error:
            if kind.name in selection.required:
                raise CouldNotRun(f"{kind.name} is required and not here: {error}") from None
            report.absent[kind.name] = str(error)
            continue
        report.versions[kind.name] = implementation.version()
        yield implementation


def _judge_documents(report: Report, tell: Progress) -> None:
    selection = report.selection
    for done, fixture in enumerate(report.fixtures):
        tell("documents", done, len(report.fixtures))
        only = [
            figure.id
            for figure in fixture.figures
            if selection.takes_case(f"{fixture.document.id}/{figure.id}")
            and (not selection.losses or (figure.call and fixture.calls[figure.call].loss in selection.losses))
        ]
        for figure in only:
            name = f"{fixture.document.id}/{figure}"
            try:
                (judgement,) = judge(fixture, [figure])
            except Exception as error:  # what breaks one figure must not hide the others
                message = f"{type(error).__name__}: {error}"
                repeat = repeat_line("figure", name)
                report.checks.append(Check("figure", "reference", "", name, "", Status.ERRORED, message, repeat=repeat))
                continue
            report.judgements.append(judgement)
            report.checks.append(_figure_check(fixture, judgement))
        if selection.losses:
            continue
        for claim in judge_claims(fixture):
            if selection.takes_case(claim.case):
                report.claims.append(claim)
                message = (
                    claim.evidence
                    if claim.passed
                    else (f"recorded as {claim.claim.verdict!r}, found {claim.verdict!r}: {claim.evidence}")
                )
                status = Status.PASSED if claim.passed else Status.FAILED
                report.checks.append(
                    Check(
                        "claim",
                        "reference",
                        "",
                        claim.case,
                        "",
                        status,
                        message,
                        repeat=repeat_line("claim", claim.case),
                    )
                )
    if selection.whole:
        known = {claim.case for claim in report.claims}
        report.problems += [
            f"{name}: a check is written for a claim that no fixture holds" for name in CHECKS if name not in known
        ]
    tell("documents", len(report.fixtures), len(report.fixtures))


def _figure_check(fixture: WorkedFixture, judgement: Judgement) -> Check:
    figure = judgement.figure
    return Check(
        kind="figure",
        implementation="reference",
        loss=fixture.calls[figure.call].loss if figure.call else "",
        case=judgement.case,
        dtype="",
        status=Status.PASSED if judgement.passed else Status.FAILED,
        message=judgement.finding if judgement.passed else judgement.message,
        repeat=repeat_line("figure", judgement.case),
        value=judgement.value,
    )


def _check(
    implementation: Implementation, yardstick: _Yardstick, selection: Selection, used: set[tuple[str, str]]
) -> Iterator[Check]:
    name, case, true = implementation.name, yardstick.case, yardstick.true
    refusal = implementation.refuses(case)
    if refusal:
        yield Check("case", name, case.loss, case.id, "", Status.SKIPPED, refusal)
        return
    for dtype in implementation.dtypes:
        if not selection.takes_dtype(dtype):
            continue
        if not case.holds_in(dtype):
            yield Check(
                "case", name, case.loss, case.id, dtype, Status.SKIPPED, f"its inputs are no numbers of {dtype}"
            )
            continue
        repeat = " ".join((*implementation.environment, repeat_line("case", case.id, name, dtype, selection.device)))
        declared = [d for d in implementation.deviations if d.applies(case, dtype, true)]
        used.update((name, d.name) for d in declared)
        try:
            outcome = implementation.evaluate(case, dtype)
            allowed = yardstick.bounds(
                dtype, plain=implementation.held_to_plain, narrowed=implementation.narrows_weights
            )
            comparison = compare(case, true, outcome, allowed, dtype)
        except Exception as error:  # a crash of outside code is a result, not the end of the run
            message = f"{type(error).__name__}: {error}".splitlines()[0]
            yield Check("case", name, case.loss, case.id, dtype, Status.ERRORED, message, repeat=repeat)
            continue
        value = outcome.values[0] if len(outcome.values) == 1 else None
        if declared and comparison.first:
            reasons = "; ".join(f"{d.reason} ({d.link})" for d in declared)
            status, message = Status.DEVIATES, f"{comparison.first}. Declared: {reasons}"
        elif declared:
            status = Status.FAILED
            message = f"declared to deviate ({declared[0].name}) but conforms: remove the declaration or narrow it"
        elif comparison.first:
            status, message = Status.FAILED, comparison.first
        else:
            status, message = Status.PASSED, ""
        yield Check(
            "case",
            name,
            case.loss,
            case.id,
            dtype,
            status,
            message,
            comparison.ratio,
            repeat,
            value,
            ulps=comparison.ulps,
        )


def _count_problems(report: Report, implementations: Sequence[Implementation], cases: Sequence[Case]) -> list[str]:
    """The counts of a whole run against those on file, or told by the cases, for whatever was present."""
    path = fixtures_root() / EXPECTED
    if not path.is_file():
        return [f"{EXPECTED} is missing: without it nobody knows how many checks there should be"]
    data = json.loads(path.read_text(encoding="utf-8"))
    if data.get("format") != EXPECTED_FORMAT:
        return [f"{EXPECTED}: $.format: expected {EXPECTED_FORMAT!r}, got {data.get('format')!r}"]
    present = {i.name for i in implementations if i.anywhere}
    documents = "reference" in present
    wanted = {
        key: counts
        for key, counts in data["counts"].items()
        if key.partition("/")[0] in present or (documents and "/" not in key)
    }
    for implementation in implementations:
        if not implementation.anywhere:
            wanted |= _every_case(implementation, cases)
    found = tally(report.checks)
    problems = []
    for key in sorted(wanted.keys() | found.keys()):
        if wanted.get(key) != found.get(key):
            problems.append(f"{key}: expected {_show(wanted.get(key))}, ran {_show(found.get(key))}")
    entries = _entries(report)
    if documents and entries != data["entries"]:
        problems.append(f"printed entries: expected {_show(data['entries'])}, judged {_show(entries)}")
    return problems


def _every_case(implementation: Implementation, cases: Sequence[Case]) -> dict[str, dict[str, int]]:
    """The counts of an implementation that passes every case in every dtype which holds it."""
    checks = [
        Check("case", implementation.name, case.loss, case.id, dtype, status)
        for case in cases
        for dtype in implementation.dtypes
        for status in (Status.PASSED if case.holds_in(dtype) else Status.SKIPPED,)
    ]
    return tally(checks)


def _show(counts: Mapping[str, int] | None) -> str:
    return ", ".join(f"{n} {name}" for name, n in counts.items()) if counts else "nothing"


def _entries(report: Report) -> dict[str, int]:
    """Printed entries judged, by kind."""
    entries: dict[str, int] = {}
    for judgement in report.judgements:
        for _, entry in judgement.figure.entries():
            kind = "infinite" if entry in ("inf", "-inf") else judgement.figure.kind
            entries[kind] = entries.get(kind, 0) + 1
    return dict(sorted(entries.items()))


def expected_counts(report: Report) -> dict[str, Any]:
    """The JSON object of ``fixtures/expected.json`` for a whole run with everything present.

    What runs on some machines only is left out.
    """
    some = {kind.name for kind in ALL if not kind.anywhere}
    checks = [check for check in report.checks if check.implementation not in some]
    return {"format": EXPECTED_FORMAT, "counts": tally(checks), "entries": _entries(report)}
