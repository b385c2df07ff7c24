"""What a run or a check found: tables for a terminal, JSON for programs, JUnit XML for continuous integration."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .documents.figures import Judgement
from .documents.load import Figure
from .judge.check import CONFORMS, CheckResult
from .judge.results import BAD, Check, Status, counted, grouped, tally
from .judge.verify import Report, show_counts
from .suite.catalogue import LOSSES

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
NUMBERS = {*Status, "cases", "median", "90 %", "99 %", "worst", "ulp", "published", "reference"}
"""Columns of numbers, which are aligned on the right."""

TAGS = {Status.FAILED: "failure", Status.ERRORED: "error", Status.SKIPPED: "skipped"}
"""Elements of JUnit XML."""

Cell = str | Text
Part = Cell | Table
"""What is printed as it is: a text in one line, or a table."""


def show(found: Report | CheckResult, console: Console, *, seconds: float) -> None:
    """Print a run or a check: what was judged, the results in tables, the failures, the verdict last.

    Args:
        found: what to print.
        console: on which; one that leaves markup and emoji codes as they are.
        seconds: how long it took.
    """
    parts = _of_check(found, seconds) if isinstance(found, CheckResult) else _of_run(found, seconds)
    for part in parts:
        console.print(part, soft_wrap=not isinstance(part, Table))


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Iterator[Table]:
    """A table, if it has rows, in which a first cell that repeats the one above it is left blank."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for name in columns:
        table.add_column(
            name, justify="right" if name in NUMBERS else "left", overflow="fold", no_wrap=name == "published"
        )
    before: Cell = ""
    for first, *others in rows:
        table.add_row("" if first == before else first, *others)
        before = first
    if table.row_count:
        yield table


def _counts(counts: Counter[Status], statuses: Iterable[Status] = Status) -> list[Cell]:
    """One cell for each status: how many checks ended with it."""
    return [Text(str(counts[status]), STYLE[status]) if counts[status] else "" for status in statuses]


def _versions(header: Mapping[str, str]) -> str:
    return f"python {header['python']}, numpy {header['numpy']}, torch {header['torch']}, {header['device']}"


def _style(good: bool) -> str:
    return "green" if good else "bold red"


def _failure(check: Check, who: str, diagnosis: str = "") -> Iterator[Cell]:
    """A check that failed: what was found, what explains it, how to repeat it."""
    yield Text(f"{check.status.value} {check.case} {who}".rstrip(), "bold red")
    for words in (check.message, diagnosis, f"repeat: {check.repeat}"):
        if words:
            yield f"    {words}"


def _of_run(report: Report, seconds: float) -> Iterator[Part]:
    """What was tested, the figures, the implementations, the findings, the verdict."""
    header = report.header()
    yield f"pairproof {header['pairproof']} from {header['copy']}; {_versions(header)}"
    yield from (f"  {name}: {version}" for name, version in report.versions.items())
    yield from (Text(f"  {name}: skipped: {reason}", "yellow") for name, reason in report.absent.items())
    yield from _figures(report)
    claims = [(it.document, it.claim.id, Text(it.verdict, _style(it.passed)), it.evidence) for it in report.claims]
    yield from _table("Claims in words", ("document", "claim", "verdict", "evidence"), claims)
    cases = [check for check in report.checks if check.kind == "case"]
    yield from _implementations(cases)
    yield from _distribution(cases)
    yield from _flags(cases)
    if bad := [check for check in report.checks if check.status in BAD]:
        yield Text(f"\n{len(bad)} failures", "bold red")
    for check in bad:
        yield from _failure(check, f"{check.implementation} {check.dtype}" if check.kind == "case" else "")
    for title, texts in _findings(report).items():
        if texts:
            yield f"\n{title}"
        yield from (Text(f"  {text}", "dim" if title == "Skipped" else "") for text in texts)
    yield from _verdict(report, seconds)


def _figures(report: Report) -> Iterator[Table]:
    # The value of an implementation on a case: in float32, which the documents use, if that was run.
    values: dict[tuple[str, str], Check] = {}
    for check in sorted(report.checks, key=lambda check: check.dtype != "float32"):
        if check.kind == "case" and check.value is not None:
            values.setdefault((check.implementation, check.case), check)

    def row(judgement: Judgement) -> Iterator[Cell]:
        figure, document = judgement.figure, judgement.document
        count = len(list(figure.entries()))
        kinds = "indices" if figure.kind == "index" else f"{figure.kind}s"
        yield from (document, figure.id, figure.place, str(figure.printed) if count == 1 else f"{count} {kinds}")
        yield _reference(judgement, count)
        for name in COLUMNS:
            check = values.get((name, f"{document}/{figure.call}"))
            if check is None or check.value is None or figure.quantity != "loss":
                yield ""
            else:
                text = _digits(check.value, figure)
                yield text if check.status is Status.PASSED else Text(f"{text} {check.status}", STYLE[check.status])
        style = "yellow" if judgement.verdict == "artefact" else "green"
        yield Text(judgement.verdict, style) if judgement.passed else Text(f"{judgement.verdict}!", "bold red")

    columns = ("document", "figure", "place", "published", "reference", *COLUMNS.values(), "verdict")
    return _table("Printed figures", columns, map(list, map(row, report.judgements)))


def _reference(judgement: Judgement, count: int) -> Cell:
    figure = judgement.figure
    if judgement.value is not None:
        return _digits(judgement.value, figure)
    if figure.verdict == "artefact" and figure.instead is not None:
        return f"{float(figure.instead['value']):.9g}"
    if not judgement.passed:
        return Text("missed", "bold red")
    return "met" if count == 1 else "all met"


def _digits(value: float, figure: Figure) -> str:
    return f"{value:.9g}" if figure.decimals is None or not math.isfinite(value) else f"{value:.{figure.decimals}f}"


def _implementations(cases: Sequence[Check]) -> Iterator[Table]:
    rows = []
    for names, checks in grouped(((check.implementation, check.loss), check) for check in cases).items():
        judged = [check for check in checks if check.status in (Status.PASSED, Status.FAILED)]
        ratios = [check.ratio for check in judged if check.ratio is not None]
        ulps = [check.ulps for check in judged if check.ulps is not None]
        dtypes = " ".join(dict.fromkeys(check.dtype for check in checks if check.ratio is not None))
        worst = f"{max(ratios):.2f}" if ratios else "", f"{max(ulps):.3g}" if ulps else ""
        if any(check.status is not Status.SKIPPED for check in checks):
            rows.append((*names, dtypes, *_counts(counted(checks)), *worst))
    title = "Implementations on the cases (worst error in units of its bound, and of the loss in ulp)"
    return _table(title, ("implementation", "loss", "dtypes", *Status, "worst", "ulp"), rows)


def _distribution(cases: Sequence[Check]) -> Iterator[Table]:
    """How close the errors come to their bounds: a bound that is too wide would show."""
    order = list(dict.fromkeys(check.implementation for check in cases))
    ratios = grouped(
        ((check.implementation, check.dtype), check.ratio)
        for check in sorted(cases, key=lambda check: order.index(check.implementation))
        if check.status is Status.PASSED and check.ratio is not None
    )
    rows = [
        (*key, str(len(found)), *(f"{ratio:.3f}" for ratio in np.quantile(found, (0.5, 0.9, 0.99, 1))))
        for key, found in ratios.items()
    ]
    columns = ("implementation", "dtype", "cases", "median", "90 %", "99 %", "worst")
    return _table("Error ÷ bound over all cases that conform", columns, rows)


def _flags(cases: Sequence[Check]) -> Iterator[Table]:
    """What each kind of case found."""
    rows = []
    for flag, checks in sorted(grouped((flag, check) for check in cases for flag in check.flags).items()):
        notable = sorted({check.implementation for check in checks if check.status in (*BAD, Status.DEVIATES)})
        rows.append((flag, str(len({check.case for check in checks})), *_counts(counted(checks)), ", ".join(notable)))
    return _table("Golden cases by flag", ("flag", "cases", *Status, "who deviates or fails"), rows)


def _findings(report: Report) -> dict[str, list[str]]:
    """What else is worth knowing, by title."""
    passed = [one for one in report.judgements if one.passed]
    words = {one.case: f"{one.case} prints {one.figure.printed}: {one.finding}" for one in passed}
    ends = Counter((one.status, one.implementation, one.message.split(" Declared: ")[-1]) for one in report.checks)
    declared = [(who, n, why) for (status, who, why), n in ends.items() if status is Status.DEVIATES]
    skipped = [(who, n, why) for (status, who, why), n in ends.items() if status is Status.SKIPPED]
    return {
        "Artefacts": [words[one.case] for one in passed if one.verdict == "artefact"],
        "Printed in full": [words[one.case] for one in passed if one.verdict == "reproduced" and one.figure.length],
        "Cut off in the document": [f"{one.case}: {one.figure.cut}" for one in report.judgements if one.figure.cut],
        "Declared deviations, each seen": [f"{who}, {n} checks: {why}" for who, n, why in declared],
        "Skipped": [f"{who}, {n}: {why}" for who, n, why in skipped],
    }


def _verdict(report: Report, seconds: float) -> Iterator[Cell]:
    counts = counted(report.checks)
    yield ""
    if report.judgements:
        figures = Counter(one.verdict for one in report.judgements if one.passed)
        yield (
            f"{len(report.fixtures)} documents, {len(report.judgements)} figures: {figures['reproduced']} reproduced,"
            f" {figures['artefact']} proved artefacts; entries: {show_counts(report.entries())};"
            f" {len(report.claims)} claims judged"
        )
    yield ", ".join(f"{counts[status]} {status}" for status in Status) + f" in {seconds:.1f} s"
    if report.absent:
        who = f"{len(report.absent)} implementation{'s' if len(report.absent) > 1 else ''}"
        yield Text(f"{who} not here, so skipped: {', '.join(report.absent)}", "yellow")
    yield from (Text(f"counts {problem}", "bold red") for problem in report.problems)
    if report.selection.covering:
        yield f"{report.cases_chosen} of {report.cases_in_all} cases were run: a covering choice"
    if not report.selection.whole:
        yield Text("the counts are not asserted: the run was filtered", "dim")
    yield Text("everything holds" if report.passed else "NOT everything holds", _style(report.passed))


def _of_check(result: CheckResult, seconds: float) -> Iterator[Part]:
    """What was judged, as which loss, on which cases, with which results; the verdict last."""
    request, header = result.request, result.report.header()
    yield f"{request.name} as {LOSSES[request.loss].function}"
    yield f"  pairproof {header['pairproof']}; {_versions(header)}"
    yield from (f"  target: {version}" for version in result.report.versions.values() if version != request.name)
    yield from (f"  {note}" for note in result.notes)
    if request.temperature is not None:
        yield f"  temperature: {request.temperature:g} built in: only cases of that temperature are judged"
    yield "  rows: " + ("brought to norm 1 under cosine" if result.claim.normalised else "as they are")
    yield from (f"  declared: {one.name}: {one.reason} ({one.link})" for one in result.declared)
    yield from (Text(f"  declared of another target, {one.target}: {one.name}", "dim") for one in result.aside)
    yield f"{result.report.cases_chosen} of {result.cases} cases of {request.loss} judged"
    for reason, count in result.left_out.most_common():
        yield Text(f"  {count} not judged: {reason}", "dim")
    if result.judged:
        yield from _check_tables(result)
        if not result.gradients_judged:
            yield Text("gradients were not judged: the target gives none", "yellow")
    failures = list(grouped(((check.case, check.status), check) for check in result.failures).values())
    shown = len(failures) if result.explained is None else result.explained
    for first, *others in failures[:shown]:
        dtypes = ", ".join(check.dtype for check in (first, *others))
        yield from _failure(first, dtypes, result.diagnoses.get((first.case, first.dtype), ""))
    if len(failures) > shown:
        yield f"and {len(failures) - shown} more cases: --all shows them"
    yield from (Text(words, "bold red") for words in result.unused)
    yield from (Text(f"advice: {words}", "yellow") for words in result.advice)
    yield Text(f"{result.summary} in {seconds:.1f} s", _style(result.verdict == CONFORMS))


def _check_tables(result: CheckResult) -> Iterator[Table]:
    shown = [status for status in Status if status is not Status.DEVIATES or result.declared]
    worst = {dtype: f"{ratio:.3g}" for dtype, ratio in result.worst().items()}
    rows = [
        (dtype, *_counts(counted(checks), shown), worst.get(dtype, ""))
        for dtype, checks in grouped((check.dtype, check) for check in result.checks).items()
        if any(check.status is not Status.SKIPPED for check in checks)
    ]
    yield from _table("Checks by dtype (worst error in units of its bound)", ("dtype", *shown, "worst"), rows)
    shown.remove(Status.SKIPPED)
    rows = [(flag, *_counts(counts, shown)) for flag, counts in result.flags().items()]
    yield from _table("Checks by flag", ("flag", *shown), rows)


def as_json(found: Report | CheckResult) -> dict[str, Any]:
    """What was found as plain data: header, versions, absences, problems, counts and every check."""
    report = found.report if isinstance(found, CheckResult) else found
    data: dict[str, Any] = {
        "format": FORMAT,
        "passed": found.exit_code == 0,
        "header": report.header(),
        "versions": report.versions,
        "absent": report.absent,
        "problems": report.problems,
        "counts": tally(report.checks),
        "cases": {"run": report.cases_chosen, "in all": report.cases_in_all},
        "checks": [
            {name: _plain(value) for name, value in vars(check).items() if name not in ("ulps", "declared")}
            for check in report.checks
        ],
    }
    if isinstance(found, CheckResult):
        for entry in data["checks"]:
            name = entry["case"], entry["dtype"]
            entry |= {"diagnosis": found.diagnoses.get(name, ""), "shared": name in found.shared}
        data |= {
            "format": CHECK_FORMAT,
            "verdict": found.verdict,
            "target": found.request.name,
            "claim": {
                **vars(found.claim),
                "settings": dict(found.claim.settings),
                "passed": sorted(found.claim.passed),
            },
            "notes": found.notes,
            "advice": found.advice,
            "declared": [{"place": one.name, "reason": one.reason, "link": one.link} for one in found.declared],
            "unused": found.unused,
            "gradients_judged": found.gradients_judged,
            "left_out": dict(found.left_out.most_common()),
            "statuses": found.counts,
            "flags": found.flags(),
            "worst": {dtype: _plain(ratio) for dtype, ratio in found.worst().items()},
        }
    return data


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
    groups = grouped((one.implementation if one.kind == "case" else one.kind, one) for one in report.checks)
    for name, checks in groups.items():
        failed, errors, skipped = (str(counted(checks)[status]) for status in TAGS)
        totals = {"tests": str(len(checks)), "failures": failed, "errors": errors, "skipped": skipped}
        suite = add(root, "testsuite", {"name": name, **totals})
        for check in checks:
            title = f"{check.case} {check.dtype}".strip()
            case = add(suite, "testcase", classname=f"{name}.{check.loss or check.kind}", name=title)
            message = ". ".join(filter(None, (check.message, diagnoses.get((check.case, check.dtype)))))
            if check.status in BAD:
                add(case, TAGS[check.status], message=message).text = f"{message}\nrepeat: {check.repeat}"
            elif check.status is Status.SKIPPED:
                add(case, "skipped", message=message)
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
