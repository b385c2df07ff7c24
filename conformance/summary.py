"""Summaries of ``verify`` or ``check`` for CI: Markdown, for example for GitHub's step summary, and a badge."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from .judge.check import CONFORMS, CheckResult
from .judge.results import BAD, Check, Status, counted, grouped, phrase
from .judge.verify import Report

SHOWN = 5
"""Maximum number of failing cases in a summary."""


def _plain(text: str) -> str:
    special: dict[str, str | int | None] = {"&": "&amp;", "<": "&lt;", "\n": " ", **{one: f"\\{one}" for one in "|*_`"}}
    return text.translate(str.maketrans(special))


def _code(text: str) -> str:
    """Format a text as inline code. Not for tables, because ``|`` is not escaped."""
    ticks = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " * (text[:1] == "`" or text[-1:] == "`")
    return f"{ticks}{space}{text}{space}{ticks}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'|'.join(['---', *['---:'] * (len(columns) - 1)])}|"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


def _of_checks(title: str, groups: dict[str, list[Check]]) -> Iterator[str]:
    """Yield a table of the number of checks by status, with one row per group."""
    used = [status for status in Status if any(counted(checks)[status] for checks in groups.values())]
    rows = ([_plain(name), *(str(counted(checks)[status] or "") for status in used)] for name, checks in groups.items())
    yield from _table((title, *used), rows)


def _failures(checks: Sequence[Check]) -> Iterator[str]:
    firsts = [same[0] for same in grouped(((check.implementation, check.case), check) for check in checks).values()]
    for check in firsts[:SHOWN]:
        yield f"- **{_plain(check.case)}** {check.dtype}: {_plain(check.message)}"
        if check.repeat:
            yield f"  {_code(check.repeat)}"
    if len(firsts) > SHOWN:
        yield f"- and {len(firsts) - SHOWN} more cases"
    if firsts:
        yield ""


def _of_check(found: CheckResult) -> Iterator[str]:
    mark = "✅" if found.verdict == CONFORMS else "❌"
    yield from (f"### {mark} {_code(found.request.name)} as {_code(found.request.loss)}", "", _plain(found.summary), "")
    yield from (f"**{_plain(words)}**\n" for words in found.diagnosis.sentences())
    levels = grouped((str(check.level), check) for check in found.judged if check.level is not None)
    yield from _of_checks("level", {str(level): levels.get(str(level), []) for level in found.levels})
    yield from _failures(found.failures_required)
    yield from (
        f"- {_plain(words)}" for words in (found.question, *found.unused, *found.advice, found.reading) if words
    )


def _of_run(report: Report) -> Iterator[str]:
    counts = counted(report.checks)
    yield f"### {'✅ everything holds' if report.passed else '❌ not everything holds'}"
    yield from ("", ", ".join(phrase(status, counts[status]) for status in Status), "")
    names = grouped(
        (check.implementation if check.kind == "case" else f"{check.kind}s", check) for check in report.checks
    )
    yield from _of_checks("judged", names)
    yield from _failures([check for check in report.checks if check.status in BAD])
    yield from (f"- {_plain(problem)}" for problem in report.problems)


def write_summary(found: Report | CheckResult, path: Path) -> None:
    """Write the results of ``verify`` or ``check`` as Markdown: the verdict, the counts and the first failures."""
    lines = _of_check(found) if isinstance(found, CheckResult) else _of_run(found)
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def write_badge(found: Report | CheckResult, path: Path) -> None:
    """Write the verdict of ``verify`` or ``check`` as JSON for an endpoint badge of shields.io."""
    if isinstance(found, CheckResult):
        good, words = found.verdict == CONFORMS, f"{found.request.loss} {found.verdict} at {found.level}"
    else:
        good, words = found.passed, "everything holds" if found.passed else "not everything holds"
    badge = {"schemaVersion": 1, "label": "pairproof", "message": words, "color": "brightgreen" if good else "red"}
    path.write_text(json.dumps(badge) + "\n", encoding="utf-8")
