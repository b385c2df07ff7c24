"""What a run or a check found: tables for a terminal, JSON for programs, JUnit XML for continuous integration."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from xml.etree import ElementTree

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .documents.figures import Judgement
from .documents.load import Figure
from .judge.check import CONFORMS, SHOWN, CheckResult
from .judge.results import BAD, Check, Status, tally
from .judge.verify import Report
from .suite.catalogue import LOSSES

T = TypeVar("T")

FORMAT = "pairproof-report/1"
CHECK_FORMAT = "pairproof-check/1"

COLUMNS = {"fast": "fast", "pml": "PML", "supcontrast": "original"}
"""Implementations with a column of their own in the table of figures, and its title."""

STYLE = {
    Status.PASSED: "green",
    Status.FAILED: "bold red",
    Status.DEVIATES: "yellow",
    Status.SKIPPED: "dim",
    Status.ERRORED: "bold magenta",
}
NUMBERS = {*(status.value for status in Status), "cases", "median", "90 %", "99 %", "worst", "ulp"}
"""Columns of numbers, which are aligned on the right."""

TAGS = {Status.FAILED: "failure", Status.ERRORED: "error", Status.SKIPPED: "skipped"}
"""Elements of JUnit XML."""

Line = Callable[..., None]


def _table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = NUMBERS
) -> Table:
    """A table in which a first cell that repeats the one above it is left blank."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for column in columns:
        numbers, whole = column in right, column == "published"
        table.add_column(column, justify="right" if numbers else "left", overflow="fold", no_wrap=whole)
    before = ""
    for first, *others in rows:
        table.add_row("" if first == before else first, *others)
        before = first
    return table


def _grouped(items: Iterable[tuple[Any, T]]) -> dict[Any, list[T]]:
    groups: dict[Any, list[T]] = {}
    for key, item in items:
        groups.setdefault(key, []).append(item)
    return groups


def _counts(checks: Iterable[Check], statuses: Iterable[Status] = Status) -> list[str]:
    """One cell for each status: how many checks ended with it."""
    counts = Counter(check.status for check in checks)
    return [_styled(str(counts[status]), STYLE[status]) if counts[status] else "" for status in statuses]


def _styled(text: str, style: str) -> str:
    return f"[{style}]{escape(text)}[/]"


def _line(console: Console) -> Line:
    """Prints a text as it is, in one line."""
    return lambda text, style="": console.print(escape(text), highlight=False, soft_wrap=True, style=style)


def _versions(header: Mapping[str, str]) -> str:
    return f"python {header['python']}, numpy {header['numpy']}, torch {header['torch']}, {header['device']}"


def show(report: Report, console: Console, *, seconds: float) -> None:
    """Print a report: what was tested, the figures, the implementations, the findings, the verdict."""
    header, line = report.header(), _line(console)
    line(f"pairproof {header['pairproof']} from {header['copy']}; {_versions(header)}")
    for name, version in report.versions.items():
        line(f"  {name}: {version}")
    for name, reason in report.absent.items():
        line(f"  {name}: skipped: {reason}", "yellow")
    if report.judgements:
        console.print(_figures(report))
    if report.claims:
        rows = [
            (one.document, one.claim.id, _styled(one.verdict, _style(one.passed)), escape(one.evidence))
            for one in report.claims
        ]
        console.print(_table("Claims in words", ("document", "claim", "verdict", "evidence"), rows))
    cases = [check for check in report.checks if check.kind == "case"]
    if cases:
        console.print(_implementations(cases))
        console.print(_distribution(cases))
        if any(check.flags for check in cases):
            console.print(_flags(cases))
    _findings(report, line)
    _verdict(report, line, seconds)


def _figures(report: Report) -> Table:
    # The value of an implementation on a case: in float32, which the documents use, if that was run.
    values: dict[tuple[str, str], tuple[float, Status]] = {}
    for check in sorted(report.checks, key=lambda check: check.dtype != "float32"):
        if check.kind == "case" and check.value is not None:
            values.setdefault((check.implementation, check.case), (check.value, check.status))
    calls = {(fixture.document.id, figure.id): figure.call for fixture in report.fixtures for figure in fixture.figures}

    def row(judgement: Judgement) -> Sequence[str]:
        figure, document = judgement.figure, judgement.document
        count = len(list(figure.entries()))
        kinds = "indices" if figure.kind == "index" else f"{figure.kind}s"
        case = f"{document}/{calls[document, figure.id]}"
        found = [values.get((name, case)) if figure.quantity == "loss" else None for name in COLUMNS]
        style = "yellow" if judgement.verdict == "artefact" else "green"
        return (
            document,
            figure.id,
            figure.place,
            str(figure.printed) if count == 1 else f"{count} {kinds}",
            _reference(judgement, count),
            *(_value(*one, figure) if one else "" for one in found),
            _styled(judgement.verdict, style) if judgement.passed else _styled(f"{judgement.verdict}!", "bold red"),
        )

    columns = ("document", "figure", "place", "published", "reference", *COLUMNS.values(), "verdict")
    return _table("Printed figures", columns, map(row, report.judgements), ("published", "reference"))


def _reference(judgement: Judgement, count: int) -> str:
    figure = judgement.figure
    if judgement.value is not None:
        return _digits(judgement.value, figure)
    if figure.verdict == "artefact" and figure.instead is not None:
        return f"{float(figure.instead.value):.9g}"
    if not judgement.passed:
        return _styled("missed", "bold red")
    return "met" if count == 1 else "all met"


def _digits(value: float, figure: Figure) -> str:
    if not math.isfinite(value):
        return str(value)
    return f"{value:.{figure.decimals}f}" if figure.decimals is not None else f"{value:.9g}"


def _value(value: float, status: Status, figure: Figure) -> str:
    text = _digits(value, figure)
    return text if status is Status.PASSED else _styled(f"{text} {status.value}", STYLE[status])


def _implementations(cases: Sequence[Check]) -> Table:
    rows = []
    for (implementation, loss), checks in _grouped(((c.implementation, c.loss), c) for c in cases).items():
        if all(check.status is Status.SKIPPED for check in checks):
            continue
        judged = [check for check in checks if check.status in (Status.PASSED, Status.FAILED)]
        ratios = [check.ratio for check in judged if check.ratio is not None]
        ulps = [check.ulps for check in judged if check.ulps is not None]
        dtypes = dict.fromkeys(check.dtype for check in checks if check.ratio is not None)
        worst = f"{max(ratios):.2f}" if ratios else "", f"{max(ulps):.3g}" if ulps else ""
        rows.append((implementation, loss, " ".join(dtypes), *_counts(checks), *worst))
    title = "Implementations on the cases (worst error in units of its bound, and of the loss in ulp)"
    return _table(title, ("implementation", "loss", "dtypes", *(s.value for s in Status), "worst", "ulp"), rows)


def _distribution(cases: Sequence[Check]) -> Table:
    """How close the errors come to their bounds: a bound that is too wide would show."""
    ratios = _grouped(
        ((check.implementation, check.dtype), check.ratio)
        for check in cases
        if check.status is Status.PASSED and check.ratio is not None
    )
    order = list(dict.fromkeys(check.implementation for check in cases))
    rows = [
        (*key, str(len(found)), *(f"{float(np.quantile(found, q)):.3f}" for q in (0.5, 0.9, 0.99, 1)))
        for key, found in sorted(ratios.items(), key=lambda item: order.index(item[0][0]))
    ]
    columns = ("implementation", "dtype", "cases", "median", "90 %", "99 %", "worst")
    return _table("Error ÷ bound over all cases that conform", columns, rows)


def _flags(cases: Sequence[Check]) -> Table:
    """What each kind of case found."""
    rows = []
    for flag, checks in sorted(_grouped((flag, check) for check in cases for flag in check.flags).items()):
        notable = sorted({c.implementation for c in checks if c.status in (*BAD, Status.DEVIATES)})
        rows.append((flag, str(len({check.case for check in checks})), *_counts(checks), ", ".join(notable)))
    columns = ("flag", "cases", *(status.value for status in Status), "who deviates or fails")
    return _table("Golden cases by flag", columns, rows)


def _findings(report: Report, line: Line) -> None:
    bad = [check for check in report.checks if check.status in BAD]
    if bad:
        line(f"\n{len(bad)} failures", "bold red")
    for check in bad:
        who = f"{check.implementation} {check.dtype}" if check.kind == "case" else ""
        line(f"{check.status.value} {check.case} {who}".rstrip(), "bold red")
        line(f"    {check.message}")
        line(f"    repeat: {check.repeat}")
    passed = [judgement for judgement in report.judgements if judgement.passed]
    _section(line, "Artefacts", [_finding(one) for one in passed if one.verdict == "artefact"])
    in_full = [_finding(one) for one in passed if one.figure.length and one.verdict == "reproduced"]
    _section(line, "Printed in full", in_full)
    cut = [f"{one.case}: {one.figure.cut}" for one in report.judgements if one.figure.cut]
    _section(line, "Cut off in the document", cut)
    declared = Counter(
        (check.implementation, check.message.partition(" Declared: ")[2])
        for check in report.checks
        if check.status is Status.DEVIATES
    )
    seen = [f"{name}, {count} checks: {reason}" for (name, reason), count in declared.items()]
    _section(line, "Declared deviations, each seen", seen)
    skipped = Counter((one.implementation, one.message) for one in report.checks if one.status is Status.SKIPPED)
    reasons = [f"{name}, {count}: {reason}" for (name, reason), count in skipped.items()]
    _section(line, "Skipped", reasons, "dim")


def _finding(judgement: Judgement) -> str:
    return f"{judgement.case} prints {judgement.figure.printed}: {judgement.finding}"


def _section(line: Line, title: str, texts: Sequence[str], style: str = "") -> None:
    if texts:
        line(f"\n{title}")
    for text in texts:
        line(f"  {text}", style)


def _verdict(report: Report, line: Line, seconds: float) -> None:
    counts = Counter(check.status for check in report.checks)
    line("")
    if report.judgements:
        figures = Counter(one.verdict for one in report.judgements if one.passed)
        line(
            f"{len(report.fixtures)} documents, {len(report.judgements)} figures: {figures['reproduced']} reproduced,"
            f" {figures['artefact']} proved artefacts; entries: "
            + ", ".join(f"{n} {kind}" for kind, n in report.entries().items())
            + f"; {len(report.claims)} claims judged"
        )
    line(", ".join(f"{counts[status]} {status.value}" for status in Status) + f" in {seconds:.1f} s")
    if report.absent:
        who = f"{len(report.absent)} implementation{'s' if len(report.absent) > 1 else ''}"
        line(f"{who} not here, so skipped: {', '.join(report.absent)}", "yellow")
    for problem in report.problems:
        line(f"counts {problem}", "bold red")
    if report.selection.covering:
        line(f"{report.cases_chosen} of {report.cases_in_all} cases were run: a covering choice")
    if not report.selection.whole:
        line("the counts are not asserted: the run was filtered", "dim")
    line("everything holds" if report.passed else "NOT everything holds", _style(report.passed))


def _style(good: bool) -> str:
    return "green" if good else "bold red"


def show_check(result: CheckResult, console: Console, *, seconds: float, everything: bool = False) -> None:
    """Print what was judged, as which loss, on which cases, with which results; the verdict last."""
    request, claim, header = result.request, result.claim, result.report.header()
    line = _line(console)
    line(f"{request.name} as {LOSSES[request.loss].function}")
    line(f"  pairproof {header['pairproof']}; {_versions(header)}")
    for version in result.report.versions.values():
        if version != request.name:
            line(f"  target: {version}")
    for note in result.notes:
        line(f"  {note}")
    if request.temperature is not None:
        line(f"  temperature: {request.temperature:g} built in: only cases of that temperature are judged")
    line("  rows: " + ("brought to norm 1 under cosine" if claim.normalised else "as they are"))
    for one in result.declared:
        line(f"  declared: {one.name}: {one.reason} ({one.link})")
    for one in result.aside:
        line(f"  declared of another target, {one.target}: {one.name}", "dim")
    line(f"{result.report.cases_chosen} of {result.cases} cases of {request.loss} judged")
    for reason, count in result.left_out.most_common():
        line(f"  {count} not judged: {reason}", "dim")
    if result.judged:
        for table in _check_tables(result):
            console.print(table)
        if not result.gradients_judged:
            line("gradients were not judged: the target gives none", "yellow")
    failures = _grouped(((check.case, check.status), check) for check in result.failures)
    for (case, status), checks in list(failures.items())[: None if everything else SHOWN]:
        line(f"{status.value} {case} {', '.join(check.dtype for check in checks)}", "bold red")
        line(f"    {checks[0].message}")
        diagnosis = result.diagnoses.get((case, checks[0].dtype))
        if diagnosis:
            line(f"    {diagnosis}")
        line(f"    repeat: {checks[0].repeat}")
    if len(failures) > SHOWN and not everything:
        line(f"and {len(failures) - SHOWN} more cases: --all shows them")
    for words in result.unused:
        line(words, "bold red")
    for words in result.advice:
        line(f"advice: {words}", "yellow")
    line(f"{result.summary} in {seconds:.1f} s", _style(result.verdict == CONFORMS))


def _check_tables(result: CheckResult) -> Iterable[Table]:
    shown = [status for status in Status if status is not Status.DEVIATES or result.declared]
    by_dtype = _grouped((check.dtype, check) for check in result.checks)
    worst = {dtype: f"{ratio:.3g}" for dtype, ratio in result.worst().items()}
    rows = [
        (dtype, *_counts(by_dtype[dtype], shown), worst.get(dtype, ""))
        for dtype in dict.fromkeys(check.dtype for check in result.judged)
    ]
    title = "Checks by dtype (worst error in units of its bound)"
    yield _table(title, ("dtype", *(status.value for status in shown), "worst"), rows)
    if result.flags():
        shown.remove(Status.SKIPPED)
        by_flag = _grouped((flag, check) for check in result.judged for flag in check.flags)
        rows = [(flag, *_counts(by_flag[flag], shown)) for flag in result.flags()]
        yield _table("Checks by flag", ("flag", *(status.value for status in shown)), rows)


def as_json(found: Report | CheckResult) -> dict[str, Any]:
    """What was found as plain data: header, versions, absences, problems, counts and every check."""
    if isinstance(found, CheckResult):
        return _check_as_json(found)
    return {
        "format": FORMAT,
        "passed": found.passed,
        "header": found.header(),
        "versions": found.versions,
        "absent": found.absent,
        "problems": found.problems,
        "counts": tally(found.checks),
        "cases": {"run": found.cases_chosen, "in all": found.cases_in_all},
        "checks": [
            {name: _plain(value) for name, value in vars(check).items() if name not in ("ulps", "declared")}
            for check in found.checks
        ],
    }


def _check_as_json(result: CheckResult) -> dict[str, Any]:
    data = as_json(result.report)
    for entry in data["checks"]:
        name = entry["case"], entry["dtype"]
        entry |= {"diagnosis": result.diagnoses.get(name, ""), "shared": name in result.shared}
    return {
        **data,
        "format": CHECK_FORMAT,
        "passed": result.verdict == CONFORMS,
        "verdict": result.verdict,
        "target": result.request.name,
        "claim": {
            **vars(result.claim),
            "settings": dict(result.claim.settings),
            "passed": sorted(result.claim.passed),
        },
        "notes": result.notes,
        "advice": result.advice,
        "declared": [{"place": one.name, "reason": one.reason, "link": one.link} for one in result.declared],
        "unused": result.unused,
        "gradients_judged": result.gradients_judged,
        "left_out": dict(result.left_out.most_common()),
        "statuses": result.counts,
        "flags": result.flags(),
        "worst": {dtype: _plain(ratio) for dtype, ratio in result.worst().items()},
    }


def _plain(value: Any) -> Any:
    """Non-finite numbers as strings, for JSON has none."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def write_json(found: Report | CheckResult, path: Path) -> None:
    """Write what was found as JSON."""
    path.write_text(json.dumps(as_json(found), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def write_junit(found: Report | CheckResult, path: Path) -> None:
    """Write what was found as JUnit XML: one suite per implementation, one case per check."""
    report, diagnoses = (found.report, found.diagnoses) if isinstance(found, CheckResult) else (found, {})
    root, add = ElementTree.Element("testsuites", name="pairproof"), ElementTree.SubElement
    groups = _grouped((one.implementation if one.kind == "case" else one.kind, one) for one in report.checks)
    for name, checks in groups.items():
        counts = Counter(check.status for check in checks)
        totals = {
            "tests": len(checks),
            "failures": counts[Status.FAILED],
            "errors": counts[Status.ERRORED],
            "skipped": counts[Status.SKIPPED],
        }
        suite = add(root, "testsuite", {"name": name, **{what: str(count) for what, count in totals.items()}})
        for check in checks:
            title = f"{check.case} {check.dtype}".strip()
            case = add(suite, "testcase", classname=f"{name}.{check.loss or check.kind}", name=title)
            diagnosis = diagnoses.get((check.case, check.dtype))
            message = f"{check.message}. {diagnosis}" if diagnosis else check.message
            if check.status in BAD:
                add(case, TAGS[check.status], message=message).text = f"{message}\nrepeat: {check.repeat}"
            elif check.status is Status.SKIPPED:
                add(case, TAGS[check.status], message=message)
            elif message:
                add(case, "system-out").text = message
    if report.problems:
        count = str(len(report.problems))
        suite = add(root, "testsuite", name="counts", tests=count, failures=count)
        for problem in report.problems:
            case = add(suite, "testcase", classname="counts", name=problem.partition(":")[0])
            add(case, "failure", message=problem)
    ElementTree.indent(root)
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)
