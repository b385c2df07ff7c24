"""Print the results of ``verify`` (a run) or ``check``, or write them as JSON or JUnit XML."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from textwrap import wrap
from typing import Any
from xml.etree import ElementTree

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .documents.figures import Judgement
from .documents.load import Figure
from .implementations import ALL
from .implementations.forms import READING
from .judge.check import CONFORMS, CheckResult, is_above
from .judge.levels import Level
from .judge.options import DRAWN_IDS
from .judge.ranges import at_the_scale_of_clip, sentences
from .judge.results import BAD, Check, Status, counted, grouped, phrase, plain, several, tally
from .judge.suggest import suggested
from .judge.verify import MOST_ROWS, Report, matrix, show_counts
from .suite.catalogue import LOSSES
from .suite.machine import described

FORMAT = "pairproof-report/1"
CHECK_FORMAT = "pairproof-check/2"

NOT_WRITTEN = ("ulps", "declared", "level", "rounding")
"""Fields that the JSON report of a run leaves out. The report of ``check`` adds the level and ``rounding``."""

COLUMNS = {"fast": "fast", "pml": "PML", "supcontrast": "original"}
"""Implementations whose values are shown beside the losses that documents print, with the titles of their columns."""

STYLE = {
    Status.PASSED: "green",
    Status.FAILED: "bold red",
    Status.DEVIATES: "yellow",
    Status.SKIPPED: "dim",
    Status.ERRORED: "bold magenta",
}
NUMBERS = {*Status, *COLUMNS.values(), *(kind.name for kind in ALL), "skip", "cases", "median", "90 %", "99 %"} | {
    *("worst", "ulp", "published", "figures", "reproduced", "artefacts", "claims", "hold", "partly", "not")
}
"""Titles of right-aligned columns."""

SHORT = 12
"""Columns of words get at least this many characters, or the table is printed as lines."""

TAGS = {Status.FAILED: "failure", Status.ERRORED: "error", Status.SKIPPED: "skipped"}
"""Elements of JUnit XML."""

REPEAT = "repeat: "

MANY = 5
"""An implementation that was judged on at least this many losses is a column of a table; any other is a line."""

FILLED = 42
"""Width of the list of losses in such a line. With the longest name, the line fits into 80 columns."""

LISTED = 3
"""``check`` without ``--all`` prints this many reasons for skipped cases, or all if only one would be left out."""

ADD = "to add it: "

LEGEND = (
    "n: n checks passed; n~m: m more deviate as declared; n!m: some of these m are known mistakes; nxm: m more failed;"
    " -: all skipped"
)


class Verbatim(str):
    """A line to copy, which is not wrapped."""

    __slots__ = ()


Cell = str | Text
Part = Cell | Table


def show(
    found: Report | CheckResult, console: Console, *, seconds: float, details: Collection[str] | None = ()
) -> None:
    """Print the results: what was judged, the failures, tables, and the verdict.

    Args:
        found: the results of ``verify`` or of ``check``.
        console: where to print.
        seconds: how long the run took.
        details: further parts of a run to print, such as "figures" (see ``judge.options.DETAILS``); None prints only
            failures and verdict.
    """
    for part in (
        _of_check(found, seconds, details) if isinstance(found, CheckResult) else _of_run(found, seconds, details)
    ):
        shown = fitted(part, console)
        console.print(shown, soft_wrap=isinstance(shown, Text))


def fitted(part: Part, console: Console) -> Text | Table:
    """Return a line as text without broken words, and a table that is wider than the console as lines."""
    if isinstance(part, Verbatim):
        return Text(part)
    if not isinstance(part, Table):
        return Text(wrapped(str(part), console.width), part.style if isinstance(part, Text) else "")
    if console.measure(part, options=console.options.update(width=1000)).minimum <= console.width:
        return part
    return Text("\n".join(wrapped(line, console.width) for line in _as_lines(part)))


def wrapped(text: str, width: int) -> str:
    """Wrap a text to lines of at most ``width`` characters; words are not broken.

    The lines of a command end with a backslash, so that they can be copied.
    """
    margin = " " * (len(text) - len(text.lstrip()))
    command = text.strip().startswith((REPEAT, ADD))
    if command:
        # Keep an option and its value on one line, and leave space for the backslash.
        words = (shlex.quote(word).replace(" ", "\0") for word in shlex.split(text))
        text, width = margin + re.sub("(?<= )(-[^ ]*) (?!-)", "\\1\0", " ".join(words)), width - len(" \\")
    lines = wrap(text, width, subsequent_indent=f"{margin}  ", break_long_words=False, break_on_hyphens=False)
    return (" \\\n" if command else "\n").join(lines).replace("\0", " ")


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Iterator[Part]:
    """Yield a title and a table, or nothing without rows. Repeated cells in the first column are left blank."""
    table, rows = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0), list(rows)
    for k, name in enumerate(columns):
        table.add_column(
            name.replace("-", "-\n"),
            justify="right" if name in NUMBERS else "left",
            overflow="fold",
            no_wrap=name == "published" or name in NUMBERS,
            min_width=min(SHORT, max((len(str(row[k])) for row in rows), default=0)),
        )
    before: Cell = ""
    for first, *others in rows:
        # Rich interprets markup and emoji codes in str, but not in Text.
        table.add_row(
            *(Text(cell) if isinstance(cell, str) else cell for cell in ("" if first == before else first, *others))
        )
        before = first
    if table.row_count:
        yield from ("", Text(title, "bold"), table)


def _as_lines(table: Table) -> Iterator[str]:
    """Yield a line for each row of a table that is wider than the terminal."""
    names = [str(column.header).replace("\n", "") for column in table.columns]
    subject = ""
    for first, *others in zip(*(map(str, column.cells) for column in table.columns), strict=True):
        subject = first or subject
        yield f"{subject}: {', '.join(f'{name} {cell}' for name, cell in zip(names[1:], others, strict=True) if cell)}"


def _counts(counts: Counter[Status], statuses: Iterable[Status] = Status) -> list[Cell]:
    return [Text(str(counts[status]), STYLE[status]) if counts[status] else "" for status in statuses]


def _versions(header: Mapping[str, str]) -> str:
    return f"python {header['python']}, numpy {header['numpy']}, torch {header['torch']}, device {header['device']}"


def _style(good: bool) -> str:
    return "green" if good else "bold red"


def _failure(check: Check, who: str, diagnosis: str = "") -> Iterator[Cell]:
    yield Text(f"{check.status.value} {check.case} {who}".rstrip(), "bold red")
    for words in (check.message, diagnosis, f"{REPEAT}{check.repeat}"):
        if words:
            yield f"    {words}"


def _of_run(report: Report, seconds: float, details: Collection[str] | None) -> Iterator[Part]:
    header, cases = report.header(), [check for check in report.checks if check.kind == "case"]
    if details is not None:
        yield f"pairproof {header['pairproof']}, {_versions(header)}"
        yield f"  from {header['copy']}"
        yield f"  on {described(report.machine)}"
        if report.versions:
            yield f"  judged: {len(report.versions)} implementations; what each one is: --show versions"
        if report.absent:
            yield Text(f"  not available: {', '.join(report.absent)}; the reasons: --show skips", "yellow")
    if details is not None:
        shown = {
            "versions": _versions_judged(report),
            "skips": chain(_absent(report), _skips(cases)),
            "figures": _figures(report),
            "claims": _claims(report),
            "deviations": _deviations(cases),
            "bounds": _distribution(cases),
            "flags": _flags(cases),
        }
        yield from chain.from_iterable(parts for name, parts in shown.items() if name in details)
        yield from (*_documents(report), *_matrix(cases), "", *_findings(report))
    counts = counted(report.checks)
    yield ", ".join(phrase(status, counts[status]) for status in Status) + f" in {seconds:.1f} s"
    for check in report.checks:
        if check.status in BAD:
            yield from _failure(check, f"{check.implementation} {check.dtype}" if check.kind == "case" else "")
    yield from (Text(problem, "bold red") for problem in report.problems)
    yield Text("everything holds" if report.passed else "NOT everything holds", _style(report.passed))


def _versions_judged(report: Report) -> Iterator[Part]:
    names = grouped((version, name) for name, version in report.versions.items())
    rows = [(", ".join(who), version) for version, who in names.items()]
    return _table("Implementations that were judged", ("implementation", "version"), rows)


def _absent(report: Report) -> Iterator[Part]:
    if report.absent:
        yield from ("", Text("Implementations that are not available", "bold"))
    yield from (f"  {name}: {reason}" for name, reason in report.absent.items())


def _skips(cases: Sequence[Check]) -> Iterator[Part]:
    skips = Counter((one.message, one.implementation) for one in cases if one.status is Status.SKIPPED)
    rows = [(why, who, str(n)) for (why, who), n in sorted(skips.items())]
    return _table("Skipped checks by reason", ("reason", "implementation", "skip"), rows)


def _claims(report: Report) -> Iterator[Part]:
    rows = [(it.document, it.claim.id, Text(it.verdict, _style(it.passed)), it.evidence) for it in report.claims]
    return _table("Claims in words", ("document", "claim", "verdict", "evidence"), rows)


def _documents(report: Report) -> Iterator[Part]:
    """Yield a table that counts the figures and the claims of every document or public test by verdict."""

    def row(name: str) -> Iterator[Cell]:
        judged = [one for one in report.judgements if one.document == name]
        claims = [one.verdict for one in report.claims if one.document == name]
        verdicts = Counter(one.verdict if one.passed else "failed" for one in judged)
        hold, refuted = claims.count("holds"), claims.count("does not hold")
        yield from (name, str(len(judged)), str(verdicts["reproduced"]), str(verdicts["artefact"]))
        yield Text(str(verdicts["failed"]), STYLE[Status.FAILED] if verdicts["failed"] else "")
        yield from map(str, (len(claims), hold, len(claims) - hold - refuted, refuted))

    names = dict.fromkeys([one.document for one in report.judgements] + [one.document for one in report.claims])
    columns = ("document", "figures", "reproduced", "artefacts", "failed", "claims", "hold", "partly", "not")
    return _table(
        "Documents and public tests: printed figures, and claims in words", columns, map(list, map(row, names))
    )


def _matrix(cases: Sequence[Check]) -> Iterator[Part]:
    """Yield tables that count the checks of every implementation and loss by status."""
    everyone = matrix(cases)
    skips = {who: str(sum(by[Status.SKIPPED] for by in losses.values()) or "") for who, losses in everyone.items()}

    def cell(counts: Mapping[str, int]) -> Text | None:
        passed, deviates, bad = counts[Status.PASSED], counts[Status.DEVIATES], sum(counts[status] for status in BAD)
        if bad:
            return Text(f"{passed}x{bad}", STYLE[Status.FAILED])
        if deviates:
            return Text(f"{passed}{'!' if counts['wrong'] else '~'}{deviates}", STYLE[Status.DEVIATES])
        return Text(str(passed), STYLE[Status.PASSED]) if passed else None

    found = {who: {loss: cell(by[loss]) for loss in LOSSES if loss in by} for who, by in everyone.items()}
    cells = {who: {loss: one for loss, one in by.items() if one} for who, by in found.items()}
    wide = [who for who, found in cells.items() if len(found) >= MANY]
    rows: list[list[Cell]] = [
        [loss, *(cells[who].get(loss, Text("-", STYLE[Status.SKIPPED])) for who in wide)]
        for loss in LOSSES
        if any(loss in cells[who] for who in wide)
    ]
    if wide:
        rows.append([Text(words, STYLE[Status.SKIPPED]) for words in ("skipped", *(skips[who] for who in wide))])
    yield from _table("Implementations of many losses: checks on the cases of each", ("loss", *wide), rows)
    rows = [
        [who, _filled(found), Text(skips[who], STYLE[Status.SKIPPED])]
        for who, found in cells.items()
        if who not in wide
    ]
    title = "Other implementations" if wide else "Implementations on the cases of each loss"
    yield from _table(title, ("implementation", "checks of each loss", "skip"), rows)
    if cells:
        yield Text(LEGEND, "dim")


def _filled(cells: Mapping[str, Text]) -> Text:
    """Join names and cells to lines of at most ``FILLED`` characters."""
    lines: list[list[Text]] = [[]]
    for loss, cell in cells.items():
        part = Text.assemble(f"{loss} ", cell)
        if sum(len(one) + len(", ") for one in (*lines[-1], part)) > FILLED:
            lines.append([])
        lines[-1].append(part)
    return Text(",\n").join(Text(", ").join(line) for line in lines if line)


def _figures(report: Report) -> Iterator[Part]:
    """Yield tables of the figures, and of the values that implementations return for printed losses."""

    def row(judgement: Judgement) -> Iterator[Cell]:
        figure = judgement.figure
        count = len(list(figure.entries()))
        kinds = "indices" if figure.kind == "index" else f"{figure.kind}s"
        yield from (figure.id, figure.place, str(figure.printed) if count == 1 else f"{count} {kinds}")
        yield _reference(judgement, count)
        style = "yellow" if judgement.verdict == "artefact" else "green"
        yield Text(judgement.verdict, style) if judgement.passed else Text(f"{judgement.verdict}!", "bold red")

    columns = ("figure", "place", "published", "reference", "verdict")
    for document, judgements in grouped((one.document, one) for one in report.judgements).items():
        yield from _table(f"Figures of {document}", columns, map(list, map(row, judgements)))

    # Prefer values in float32, the dtype of the documents.
    values: dict[tuple[str, str], Check] = {}
    for check in sorted(report.checks, key=lambda check: check.dtype != "float32"):
        if check.kind == "case" and check.value is not None:
            values.setdefault((check.implementation, check.case), check)

    def value(name: str, judgement: Judgement) -> Cell:
        check = values.get((name, f"{judgement.document}/{judgement.figure.call}"))
        if check is None or check.value is None:
            return ""
        text = _digits(check.value, judgement.figure)
        return text if check.status is Status.PASSED else Text(f"{text} {check.status}", STYLE[check.status])

    losses = [one for one in report.judgements if one.figure.quantity == "loss"]
    rows = [(one.document, one.figure.id, *(value(name, one) for name in COLUMNS)) for one in losses]
    found = [row for row in rows if any(row[2:])]
    yield from _table("Printed losses by implementation", ("document", "figure", *COLUMNS.values()), found)
    notes: list[tuple[str, str]] = []
    for one in report.judgements:
        if one.passed and (one.verdict == "artefact" or one.figure.length):
            notes.append((one.case, f"prints {one.figure.printed}: {one.finding}"))
        if one.figure.cut:
            notes.append((one.case, f"{one.figure.place}: {one.figure.cut}"))
    title = "Artefacts, figures printed with all digits, and outputs that are cut off"
    yield from _table(title, ("figure", "note"), notes)
    if report.judgements:
        yield f"entries of all figures: {show_counts(report.entries())}"


def _reference(judgement: Judgement, count: int) -> Cell:
    """Return the exact value or, without one, whether the reference reproduces the figure."""
    figure = judgement.figure
    if judgement.value is not None:
        return _digits(judgement.value, figure)
    if figure.verdict == "artefact" and figure.instead is not None:
        return f"{float(figure.instead['value']):.9g}"
    if not judgement.passed:
        return Text("differs", "bold red")
    return "agrees" if count == 1 else "all agree"


def _digits(value: float, figure: Figure) -> str:
    return f"{value:.9g}" if figure.decimals is None or not math.isfinite(value) else f"{value:.{figure.decimals}f}"


def _deviations(cases: Sequence[Check]) -> Iterator[Part]:
    ends = Counter(
        (check.message.split(" Declared: ")[-1], check.implementation)
        for check in cases
        if check.status is Status.DEVIATES
    )
    if ends:
        yield from ("", Text("Declared deviations", "bold"))
    for why, found in grouped((why, f"{who} {n}") for (why, who), n in ends.items()).items():
        yield f"  {', '.join(found)}: {why}"


def _distribution(cases: Sequence[Check]) -> Iterator[Part]:
    """Yield tables of error / bound, which show bounds that are too wide."""
    judged = [one for one in cases if one.status in (Status.PASSED, Status.FAILED) and one.ratio is not None]
    rows = [
        (*names, f"{max(one.ratio or 0 for one in checks):.2f}", f"{max(one.ulps or 0 for one in checks):.3g}")
        for names, checks in grouped(((check.implementation, check.loss), check) for check in judged).items()
    ]
    title = "Largest errors (worst = largest error / bound; ulp = largest error of the loss in ulp)"
    yield from _table(title, ("implementation", "loss", "worst", "ulp"), rows)
    order = list(dict.fromkeys(check.implementation for check in cases))
    ratios = grouped(
        ((check.implementation, check.dtype), check.ratio)
        for check in sorted(cases, key=lambda check: order.index(check.implementation))
        if check.status is Status.PASSED and check.ratio is not None
    )
    found = [
        (*key, str(len(found)), *(f"{ratio:.3f}" for ratio in np.quantile(found, (0.5, 0.9, 0.99, 1))))
        for key, found in ratios.items()
    ]
    columns = ("implementation", "dtype", "cases", "median", "90 %", "99 %", "worst")
    yield from _table("error / bound, over all checks that passed", columns, found)


def _flags(cases: Sequence[Check]) -> Iterator[Part]:
    rows = []
    for flag, checks in sorted(grouped((flag, check) for check in cases for flag in check.flags).items()):
        notable = sorted({check.implementation for check in checks if check.status in (*BAD, Status.DEVIATES)})
        rows.append((flag, str(len({check.case for check in checks})), *_counts(counted(checks)), ", ".join(notable)))
    return _table("Golden cases by flag", ("flag", "cases", *Status, "deviate or fail"), rows)


def _findings(report: Report) -> Iterator[Cell]:
    for one in report.judgements:
        if one.passed and one.verdict == "artefact" and one.figure.instead:
            value = float(one.figure.instead["value"])
            yield f"{one.case} prints {one.figure.printed}, an artefact: the exact value is {value:.9g}"
    counts = counted(report.checks)
    if counts[Status.DEVIATES]:
        yield f"{phrase(Status.DEVIATES, counts[Status.DEVIATES])}, all as declared: --show deviations"
    if counts[Status.SKIPPED]:
        yield f"{counts[Status.SKIPPED]} skipped, each with its reason: --show skips"
    if report.judgements:
        figures = Counter(one.verdict for one in report.judgements if one.passed)
        tests = sum(one.document.source is not None for one in report.fixtures)
        yield (
            f"{len(report.fixtures) - tests} documents, {tests} public tests,"
            f" {len(report.judgements)} figures: {figures['reproduced']} reproduced,"
            f" {figures['artefact']} artefacts; {len(report.claims)} claims"
        )
    if report.selection.covering:
        yield f"{report.cases_chosen} of {report.cases_in_all} cases ran, which cover all flags, options and kernels"
    if report.cases_left_out or report.dtypes_left_out:
        large = [f"{report.cases_left_out} cases of more than {MOST_ROWS} rows"] if report.cases_left_out else []
        shared = ["all but one check of fast-dense, fast-tiled and fast-exact on each case"] * report.alternates
        yield f"left out: {', '.join([*large, *report.dtypes_left_out, *shared])}; --thorough runs them"
    if not report.selection.whole:
        yield Text("counts not compared with the expected ones, because only a part ran", "dim")


def _of_check(result: CheckResult, seconds: float, details: Collection[str] | None) -> Iterator[Part]:
    if details is not None:
        yield from _target(result)
    yield from (Text(words, "bold") for words in result.diagnosis.sentences())
    listed = result.failures if result.explained is None else result.failures_required
    failures = list(grouped(((check.case, check.status), check) for check in listed).values())
    # By level, then by size; usages have no size and come last.
    sizes = {case: size for case, (size, _) in result.sizes.items()}
    failures.sort(key=lambda checks: (checks[0].level or Level.FORMULA, sizes.get(checks[0].case, math.inf)))
    shown = failures if result.explained is None else _examples(result, failures)
    for first, *others in shown:
        dtypes = ", ".join(check.dtype for check in (first, *others))
        words = f"{dtypes}: {result.sizes[first.case][1]}" if first.case in result.sizes else dtypes
        yield from _failure(first, words, result.diagnoses.get((first.case, first.dtype), ""))
    if rest := Counter(first.kind for first, *_ in failures) - Counter(first.kind for first, *_ in shown):
        yield f"and {' and '.join(several(n, f'more {kind}') for kind, n in rest.items())}: --all shows them"
    if details is not None:
        yield from _judged(result)
        yield from _levels(result)
    if result.shrunk:
        case = result.shrunk.golden.case
        start = f"{result.wrong_from}: " if result.wrong_from else ""
        yield f"{start}the smallest failing batch found has {case.sizes()}; it was made from {case.id}"
        if not result.wrong_from:
            yield "    no stored case of its level or a lower one fails"
        yield f"    {ADD}{result.shrunk.command}"
        if result.shrunk.folder is None:
            yield "    to write these files: --save FOLDER"
    yield from (Text(words, "bold red") for words in result.unused)
    yield from (Text(f"advice: {words}", "yellow") for words in result.advice)
    if result.question:
        yield Text(f"question: {result.question}", "yellow")
    if declared := suggested(result):
        drawn = any(check.case.startswith(DRAWN_IDS) for check in result.failures_required)
        left_out = ", and add --fuzz 0 (in pytest, fuzz=0), because random batches fail too and cannot be declared"
        yield f"if this is intended, declare it in pyproject.toml{left_out if drawn else ''}:"
        yield from map(Verbatim, declared)
    yield from filter(None, [result.reading])
    yield Text(f"{result.summary} in {seconds:.1f} s", _style(result.verdict == CONFORMS))


def _examples(result: CheckResult, failures: Sequence[list[Check]]) -> list[list[Check]]:
    """Return the failing cases to show: one for each reason, and at least one without a reason.

    ``failures`` are the checks of each failing case.
    """
    reasons = {case: place for place, reason in enumerate(result.diagnosis.reasons) for case in reason.cases}
    first = {reasons.get(checks[0].case): place for place, checks in reversed([*enumerate(failures)])}
    others = [place for place, checks in enumerate(failures) if checks[0].case not in reasons]
    # One of each status comes first, so that errors do not hide a failure.
    heads = {failures[place][0].status: place for place in reversed(others)}
    others = sorted(others, key=lambda place: (place not in heads.values(), place))
    chosen = {*first.values(), *others[: max(0, (result.explained or 0) - len(first) + 1)]}
    return [failures[place] for place in sorted(chosen)]


def _levels(result: CheckResult) -> Iterator[Part]:
    """Yield one line per level. If only checks above the required level failed, add an example of each level."""
    above = grouped((check.level, check) for check in result.failures_above)
    for level, counts in result.levels.items():
        ends = ", ".join(phrase(status, counts[status]) for status in Status if counts[status]) or "no checks"
        limits = ""
        if level is Level.RANGE:
            limits = "; ".join(filter(None, [*sentences(result.limits), at_the_scale_of_clip(result.limits)]))
        failed = sum(counts[status] for status in BAD)
        style = "" if not failed else "yellow" if level > result.level else "bold red"
        yield Text(f"{level}: {ends}{'; ' if limits else ''}{limits}", style)
        if level in above and not result.failures_required:
            first = above[level][0]
            yield f"    for example {first.case} in {first.dtype}: {first.message}"


def _target(result: CheckResult) -> Iterator[Part]:
    request, header = result.request, result.report.header()
    yield f"{request.name} as {LOSSES[request.loss].function}"
    yield f"  pairproof {header['pairproof']}; {_versions(header)}"
    yield f"  on {described(result.report.machine)}"
    yield from (f"  target: {version}" for version in result.report.versions.values() if version != request.name)
    yield from (f"  {note}" for note in result.notes if note != result.reading)
    if request.temperature is not None:
        proved = "the cases are proved again with it" + ("" if request.thorough else ", except slow ones (--thorough)")
        yield f"  temperature: {request.temperature:g} built in; {proved}"
    yield f"  rows: {'normalised in cosine cases' if result.claim.normalised else 'not normalised'} before the call"
    yield from (f"  declared: {one.name}: {one.reason} ({one.link})" for one in result.declared)
    yield from (Text(f"  declared for another target, {one.target}: {one.name}", "dim") for one in result.aside)


def _judged(result: CheckResult) -> Iterator[Part]:
    request = result.request
    chosen, given, noun = result.report.cases_chosen, result.cases, f"{request.loss} cases"
    if result.only_usages:
        chosen = sum(one.case.startswith("usage/") for one in result.checks)
        given, noun = chosen + len(result.inapplicable), "selected usages"
    if given:
        yield f"{chosen} of {given} {noun} apply to this target"
    reasons = result.left_out.most_common()
    listed = reasons if result.explained is None or len(reasons) <= LISTED + 1 else reasons[:LISTED]
    yield from (Text(f"  {count} skipped: {reason}", "dim") for reason, count in listed)
    if rest := reasons[len(listed) :]:
        number = sum(count for _, count in rest)
        yield Text(f"  {number} skipped for {len(rest)} other reasons: --all shows them", "dim")
    if any(reason.startswith("needs ") and "=" in reason for reason, _ in reasons):
        yield Text("  if the target has an option built in that a skipped case needs, claim it with --set", "dim")
    if result.fresh:
        yield f"random batches: {len(result.fresh)}, drawn with --seed {request.seed}"
    if result.not_tried:
        yield Text(f"  not tried: {', '.join(result.not_tried)}", "dim")
    if result.judged:
        yield from _check_tables(result)
        if not result.gradients_judged:
            yield Text("gradients were not checked: the target returns none", "yellow")
        elif result.scalars:
            yield f"gradients were checked, also those of {' and '.join(result.scalars)}"


def _check_tables(result: CheckResult) -> Iterator[Part]:
    """Yield a table of the checks by dtype. With ``--all``, also yield a table by flag, for flags of failed checks."""
    shown = [status for status in Status if status is not Status.DEVIATES or result.declared]
    worst = {dtype: f"{ratio:#.3g}" for dtype, ratio in result.worst().items()}
    rows = [
        (dtype, *_counts(counted(checks), shown), worst.get(dtype, ""))
        for dtype, checks in grouped((check.dtype, check) for check in result.checks).items()
        if any(check.status is not Status.SKIPPED for check in checks)
    ]
    yield from _table("Checks by dtype (worst = largest error / bound)", ("dtype", *shown, "worst"), rows)
    if result.explained is not None:
        return
    shown.remove(Status.SKIPPED)
    failed = {flag for check in result.failures_required for flag in check.flags}
    flags = {flag: counts for flag, counts in result.flags().items() if flag in failed}
    if flags:
        rows = [(flag, *_counts(counts, shown)) for flag, counts in flags.items()]
        title = "Checks by flag (what a case can reveal; pairproof fixtures show CASE explains its flags)"
        yield from _table(title, ("flag", *shown), rows)


def as_json(found: Report | CheckResult) -> dict[str, Any]:
    """Return the results as a JSON value."""
    report = found.report if isinstance(found, CheckResult) else found
    data: dict[str, Any] = {
        "format": FORMAT,
        "passed": found.exit_code == 0,
        "header": report.header(),
        **{name: getattr(report, name) for name in ("versions", "absent", "problems")},
        "counts": tally(report.checks),
        "cases": {"run": report.cases_chosen, "in all": report.cases_in_all},
        "checks": [
            {name: plain(value) for name, value in vars(check).items() if name not in NOT_WRITTEN}
            for check in report.checks
        ],
    }
    if isinstance(found, CheckResult):
        for entry, check in zip(data["checks"], report.checks, strict=True):
            entry["diagnosis"] = found.diagnoses.get((check.case, check.dtype), "")
            entry |= {"level": check.level, "rounding": check.rounding}
        data |= {
            "format": CHECK_FORMAT,
            "verdict": found.verdict,
            "level": found.level,
            "levels": {
                level: {"verdict": found.verdict_at(level), "statuses": counts}
                for level, counts in found.levels.items()
            },
            "limits": [{**vars(limit), "words": limit.sentence} for limit in found.limits],
            "target": found.request.name,
            "claim": {
                **vars(found.claim),
                "settings": dict(found.claim.settings),
                **{name: sorted(getattr(found.claim, name)) for name in ("passed", "required", "unused")},
            },
            **{name: getattr(found, name) for name in ("notes", "question", "advice", "unused", "gradients_judged")},
            "diagnosis": found.diagnosis.as_data(),
            "reading": found.reading.removeprefix(READING),
            "declared": [{"place": one.name, "reason": one.reason, "link": one.link} for one in found.declared],
            "seed": found.request.seed,
            "random_batches": [batch.id for batch in found.fresh],
            "shrunk": found.shrunk and found.shrunk.as_json(),
            "left_out": dict(found.left_out.most_common()),
            "not_tried": found.not_tried,
            "statuses": found.counts,
            "flags": found.flags(),
            "worst": {dtype: plain(ratio) for dtype, ratio in found.worst().items()},
        }
    return data


def write_json(found: Report | CheckResult, path: Path) -> None:
    """Write the results as JSON."""
    path.write_text(json.dumps(as_json(found), indent=1, allow_nan=False) + "\n", encoding="utf-8")


NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _as_xml(text: str) -> str:
    """Replace characters that XML cannot contain by their Python escapes."""
    return NOT_XML.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _skipped_above(found: CheckResult) -> Iterator[Check]:
    """Yield the checks. Failures above the required level are replaced by skipped checks."""
    for check in found.checks:
        if check.status in BAD and is_above(check, found.level):
            message = f"fails at the level {check.level}, above {found.level}: {check.message}"
            check = replace(check, status=Status.SKIPPED, message=message)
        yield check


def write_junit(found: Report | CheckResult, path: Path) -> None:
    """Write the results as JUnit XML: one test suite per implementation or kind of check, one test case per check."""
    report, diagnoses = (found.report, found.diagnoses) if isinstance(found, CheckResult) else (found, {})
    root, add = ElementTree.Element("testsuites", name="pairproof"), ElementTree.SubElement
    listed = _skipped_above(found) if isinstance(found, CheckResult) else report.checks
    groups = grouped((one.implementation if one.kind == "case" else one.kind, one) for one in listed)
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
    for element in root.iter():
        element.text = element.text and _as_xml(element.text)
        element.attrib.update({name: _as_xml(value) for name, value in element.attrib.items()})
    ElementTree.indent(root)
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)
