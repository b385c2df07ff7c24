"""A run on the page: tables for a terminal, JSON for programs, JUnit XML for continuous integration."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .documents.load import Figure
from .judge.results import BAD, Check, Status, tally
from .judge.verify import Report

COLUMNS = ("fast", "pml", "supcontrast")
"""Implementations with a column of their own in the table of figures."""

STYLE = {
    Status.PASSED: "green",
    Status.FAILED: "bold red",
    Status.DEVIATES: "yellow",
    Status.SKIPPED: "dim",
    Status.ERRORED: "bold magenta",
}


def show(report: Report, console: Console, *, seconds: float) -> None:
    """Print a report: what was tested, the figures, the implementations, the findings, the verdict."""
    header = report.header()
    console.print(
        f"pairproof {header['pairproof']} from {header['copy']}; python {header['python']}, numpy {header['numpy']},"
        f" torch {header['torch']}, {header['device']}",
        highlight=False,
    )
    for name, version in report.versions.items():
        console.print(f"  {name}: {version}", highlight=False, soft_wrap=True)
    for name, reason in report.absent.items():
        console.print(f"  {name}: skipped: {reason}", style="yellow", highlight=False, soft_wrap=True)
    if report.judgements:
        console.print(_figures(report))
    if report.claims:
        console.print(_claims(report))
    cases = [check for check in report.checks if check.kind == "case"]
    if cases:
        console.print(_implementations(cases))
        console.print(_distribution(cases))
        if any(check.flags for check in cases):
            console.print(_flags(cases))
    _findings(report, console)
    _verdict(report, console, seconds)


def _figures(report: Report) -> Table:
    table = Table(title="Printed figures", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for column in ("document", "figure", "place", "published", "reference", "fast", "PML", "original", "verdict"):
        right = column in ("published", "reference")
        table.add_column(column, justify="right" if right else "left", overflow="fold", no_wrap=column == "published")
    found = _values(report)
    before = ""
    calls = {(f.document.id, figure.id): figure.call for f in report.fixtures for figure in f.figures}
    for judgement in report.judgements:
        figure = judgement.figure
        document = judgement.document if judgement.document != before else ""
        before = judgement.document
        entries = list(figure.entries())
        scalar = len(entries) == 1
        case = f"{judgement.document}/{calls[judgement.document, figure.id]}"
        cells = [_value(found.get((name, case)), figure) if figure.quantity == "loss" else "" for name in COLUMNS]
        style = "green" if judgement.passed else "bold red"
        word = judgement.verdict if judgement.passed else f"{judgement.verdict}!"
        if judgement.passed and judgement.verdict == "artefact":
            style = "yellow"
        table.add_row(
            document,
            figure.id,
            figure.place,
            str(figure.printed)
            if scalar
            else f"{len(entries)} {'indices' if figure.kind == 'index' else figure.kind + 's'}",
            _reference(judgement.value, figure, scalar, judgement.passed),
            *cells,
            f"[{style}]{word}[/]",
        )
    return table


def _reference(value: float | None, figure: Figure, scalar: bool, passed: bool) -> str:
    if value is not None:
        return _digits(value, figure)
    if figure.verdict == "artefact" and figure.instead is not None:
        return f"{float(figure.instead.value):.9g}"
    return ("met" if scalar else "all met") if passed else "[bold red]missed[/]"


def _digits(value: float, figure: Figure) -> str:
    return f"{value:.{figure.decimals}f}" if figure.decimals is not None else f"{value:.9g}"


def _values(report: Report) -> dict[tuple[str, str], Check]:
    """One value per implementation and case: in the dtype that the document used, if it was run."""
    found: dict[tuple[str, str], Check] = {}
    for check in report.checks:
        if check.kind == "case" and check.value is not None:
            key = (check.implementation, check.case)
            if key not in found or check.dtype == "float32":
                found[key] = check
    return found


def _value(check: Check | None, figure: Figure) -> str:
    if check is None or check.value is None:
        return ""
    text = _digits(check.value, figure) if math.isfinite(check.value) else str(check.value)
    if check.status is Status.PASSED:
        return text
    return f"[{STYLE[check.status]}]{text} {check.status.value}[/]"


def _claims(report: Report) -> Table:
    table = Table(title="Claims in words", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for column in ("document", "claim", "verdict", "evidence"):
        table.add_column(column, overflow="fold")
    before = ""
    for claim in report.claims:
        document = claim.document if claim.document != before else ""
        before = claim.document
        style = "green" if claim.passed else "bold red"
        table.add_row(document, claim.claim.id, f"[{style}]{escape(claim.verdict)}[/]", escape(claim.evidence))
    return table


def _implementations(cases: list[Check]) -> Table:
    table = Table(
        title="Implementations on the cases (worst error in units of its bound, and of the loss in ulp)",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        pad_edge=False,
    )
    for column in ("implementation", "loss", "dtypes"):
        table.add_column(column)
    for status in Status:
        table.add_column(status.value, justify="right")
    table.add_column("worst", justify="right")
    table.add_column("ulp", justify="right")
    groups: dict[tuple[str, str], list[Check]] = {}
    for check in cases:
        groups.setdefault((check.implementation, check.loss), []).append(check)
    before = ""
    for (implementation, loss), checks in groups.items():
        counts = Counter(check.status for check in checks)
        if set(counts) == {Status.SKIPPED}:
            continue
        ratios = [c.ratio for c in checks if c.ratio is not None and c.status in (Status.PASSED, Status.FAILED)]
        ulps = [c.ulps for c in checks if c.ulps is not None and c.status in (Status.PASSED, Status.FAILED)]
        dtypes = list(dict.fromkeys(c.dtype for c in checks if c.ratio is not None))
        table.add_row(
            implementation if implementation != before else "",
            loss,
            " ".join(dtypes),
            *(f"[{STYLE[s]}]{counts[s]}[/]" if counts[s] else "" for s in Status),
            f"{max(ratios):.2f}" if ratios else "",
            f"{max(ulps):.3g}" if ulps else "",
        )
        before = implementation
    return table


def _distribution(cases: list[Check]) -> Table:
    """How close the errors come to their bounds: slack that nobody uses would show."""
    table = Table(
        title="Error ÷ bound over all cases that conform",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        pad_edge=False,
    )
    for column in ("implementation", "dtype", "cases", "median", "90 %", "99 %", "worst"):
        table.add_column(column, justify="left" if column in ("implementation", "dtype") else "right")
    groups: dict[tuple[str, str], list[float]] = {}
    for check in cases:
        if check.status is Status.PASSED and check.ratio is not None:
            groups.setdefault((check.implementation, check.dtype), []).append(check.ratio)
    before = ""
    order = list(dict.fromkeys(check.implementation for check in cases))
    for (implementation, dtype), ratios in sorted(groups.items(), key=lambda item: order.index(item[0][0])):
        found = [f"{float(np.quantile(ratios, q)):.3f}" for q in (0.5, 0.9, 0.99, 1)]
        table.add_row(implementation if implementation != before else "", dtype, str(len(ratios)), *found)
        before = implementation
    return table


def _flags(cases: list[Check]) -> Table:
    """What each kind of case found."""
    table = Table(title="Golden cases by flag", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.add_column("flag")
    table.add_column("cases", justify="right")
    for status in Status:
        table.add_column(status.value, justify="right")
    table.add_column("who deviates or fails")
    groups: dict[str, list[Check]] = {}
    for check in cases:
        for flag in check.flags:
            groups.setdefault(flag, []).append(check)
    for flag, checks in sorted(groups.items()):
        counts = Counter(check.status for check in checks)
        notable = sorted({c.implementation for c in checks if c.status in (*BAD, Status.DEVIATES)})
        table.add_row(
            flag,
            str(len({check.case for check in checks})),
            *(f"[{STYLE[s]}]{counts[s]}[/]" if counts[s] else "" for s in Status),
            ", ".join(notable),
        )
    return table


def _findings(report: Report, console: Console) -> None:
    bad = [check for check in report.checks if check.status in BAD]
    if bad:
        console.print(f"\n[bold red]{len(bad)} failures[/]")
        for check in bad:
            who = f" {check.implementation} {check.dtype}".rstrip() if check.kind == "case" else ""
            console.print(f"[bold red]{check.status.value}[/] {escape(check.case)}{who}", highlight=False)
            console.print(f"    {escape(check.message)}", highlight=False, soft_wrap=True)
            console.print(f"    repeat: {escape(check.repeat)}", highlight=False, soft_wrap=True)
    artefacts = [j for j in report.judgements if j.verdict == "artefact" and j.passed]
    if artefacts:
        console.print("\nArtefacts")
        for judgement in artefacts:
            printed = judgement.figure.printed
            console.print(
                f"  {judgement.case} prints {printed}: {escape(judgement.finding)}", highlight=False, soft_wrap=True
            )
    full = [j for j in report.judgements if j.figure.length and j.verdict == "reproduced" and j.passed]
    if full:
        console.print("\nPrinted in full")
        for judgement in full:
            console.print(
                f"  {judgement.case} prints {judgement.figure.printed}: {escape(judgement.finding)}",
                highlight=False,
                soft_wrap=True,
            )
    cut = [j for j in report.judgements if j.figure.cut]
    if cut:
        console.print("\nCut off in the document")
        for judgement in cut:
            console.print(f"  {judgement.case}: {escape(judgement.figure.cut or '')}", highlight=False, soft_wrap=True)
    deviations = Counter(
        (check.implementation, check.message.partition(" Declared: ")[2])
        for check in report.checks
        if check.status is Status.DEVIATES
    )
    if deviations:
        console.print("\nDeclared deviations, each seen")
        for (name, reason), count in deviations.items():
            console.print(f"  {name}, {count} checks: {escape(reason)}", highlight=False, soft_wrap=True)
    skipped = Counter(
        (check.implementation, check.message) for check in report.checks if check.status is Status.SKIPPED
    )
    if skipped:
        console.print("\nSkipped")
        for (name, reason), count in skipped.items():
            console.print(f"  {name}, {count}: {escape(reason)}", highlight=False, soft_wrap=True, style="dim")


def _verdict(report: Report, console: Console, seconds: float) -> None:
    counts = Counter(check.status for check in report.checks)
    figures = Counter(j.verdict for j in report.judgements if j.passed)
    entries: Counter[str] = Counter()
    for judgement in report.judgements:
        for _, entry in judgement.figure.entries():
            entries["infinite" if entry in ("inf", "-inf") else judgement.figure.kind] += 1
    console.print()
    if report.judgements:
        console.print(
            f"{len(report.fixtures)} documents, {len(report.judgements)} figures: {figures['reproduced']} reproduced,"
            f" {figures['artefact']} proved artefacts; entries: "
            + ", ".join(f"{n} {kind}" for kind, n in entries.items())
            + f"; {len(report.claims)} claims judged",
            highlight=False,
        )
    console.print(", ".join(f"{counts[s]} {s.value}" for s in Status) + f" in {seconds:.1f} s", highlight=False)
    if report.absent:
        who = f"{len(report.absent)} implementation{'s' if len(report.absent) > 1 else ''}"
        console.print(
            f"{who} not here, so skipped: {', '.join(report.absent)}", style="yellow", highlight=False, soft_wrap=True
        )
    for problem in report.problems:
        console.print(f"[bold red]counts[/] {escape(problem)}", highlight=False, soft_wrap=True)
    if report.selection.covering:
        console.print(
            f"{report.cases_chosen} of {report.cases_in_all} cases were run: a covering choice", highlight=False
        )
    if not report.selection.whole:
        console.print("the counts are not asserted: the run was filtered", style="dim")
    console.print("[bold green]everything holds[/]" if report.passed else "[bold red]NOT everything holds[/]")


def as_json(report: Report) -> dict[str, Any]:
    """The report as plain data: header, versions, absences, problems, counts and every check."""
    return {
        "format": "pairproof-report/1",
        "passed": report.passed,
        "header": report.header(),
        "versions": report.versions,
        "absent": report.absent,
        "problems": report.problems,
        "counts": tally(report.checks),
        "cases": {"run": report.cases_chosen, "in all": report.cases_in_all},
        "checks": [
            {
                "kind": check.kind,
                "implementation": check.implementation,
                "loss": check.loss,
                "case": check.case,
                "dtype": check.dtype,
                "status": check.status.value,
                "message": check.message,
                "ratio": _finite(check.ratio),
                "value": _finite(check.value),
                "repeat": check.repeat,
                "flags": list(check.flags),
            }
            for check in report.checks
        ],
    }


def _finite(number: float | None) -> float | str | None:
    """Non-finite numbers as strings, for JSON has none."""
    return number if number is None or math.isfinite(number) else str(number)


def write_json(report: Report, path: Path) -> None:
    """Write the report as JSON."""
    path.write_text(json.dumps(as_json(report), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def write_junit(report: Report, path: Path) -> None:
    """Write the report as JUnit XML: one suite per implementation, one case per check."""
    root = ElementTree.Element("testsuites", name="pairproof")
    groups: dict[str, list[Check]] = {}
    for check in report.checks:
        groups.setdefault(check.implementation if check.kind == "case" else check.kind, []).append(check)
    for name, checks in groups.items():
        counts = Counter(check.status for check in checks)
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=name,
            tests=str(len(checks)),
            failures=str(counts[Status.FAILED]),
            errors=str(counts[Status.ERRORED]),
            skipped=str(counts[Status.SKIPPED]),
        )
        for check in checks:
            case = ElementTree.SubElement(
                suite,
                "testcase",
                classname=f"{name}.{check.loss or check.kind}",
                name=f"{check.case} {check.dtype}".strip(),
            )
            text = f"{check.message}\nrepeat: {check.repeat}"
            if check.status is Status.FAILED:
                ElementTree.SubElement(case, "failure", message=check.message).text = text
            elif check.status is Status.ERRORED:
                ElementTree.SubElement(case, "error", message=check.message).text = text
            elif check.status is Status.SKIPPED:
                ElementTree.SubElement(case, "skipped", message=check.message)
            elif check.message:
                ElementTree.SubElement(case, "system-out").text = check.message
    if report.problems:
        suite = ElementTree.SubElement(
            root, "testsuite", name="counts", tests=str(len(report.problems)), failures=str(len(report.problems))
        )
        for problem in report.problems:
            case = ElementTree.SubElement(suite, "testcase", classname="counts", name=problem.partition(":")[0])
            ElementTree.SubElement(case, "failure", message=problem)
    ElementTree.indent(root)
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)
