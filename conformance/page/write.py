"""The results of ``verify``, ``check``, ``diagnose`` or ``parity`` as one HTML page that loads no other file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from pairproof import install_command

from ..documents.load import WorkedFixture, load_worked, worked_cases
from ..implementations import ALL
from ..judge.check import CONFORMS, CheckResult
from ..judge.comparisons import ParityResult
from ..judge.deviations import DECLARED
from ..judge.options import CouldNotRun
from ..judge.results import Check, Status, counted, grouped
from ..judge.verify import Report, load_cases, matrix
from ..suite.catalogue import LOSSES
from ..suite.golden import load_flags
from ..suite.levels import Level
from ..suite.machine import described, machine
from ..training import Diagnosis
from .differences import failing_cases, failures
from .examples import document
from .findings import findings, judged, public_losses, sweeps
from .plots import Chart, Line, Rule, arrivals, bars, number, range_bar

FORMAT = "pairproof-page/1"
LARGEST = 3_000_000
"""Maximum size of a page in bytes."""
BENCH = Path(__file__).resolve().parents[2] / "bench/results/cpu.json"
"""The results of the benchmark. The installed package does not contain them."""
SMALLEST = 1e-9
"""If a loss differs by at most this or by at most 0.1 %, another term that differs is shown instead."""
NOT_FINITE = re.compile(r"got (?:nan|-?inf)")
COLUMNS = 128
"""Number of columns of the embeddings in the plotted timings."""
OPENED = "supcon_notebook/supcon-3x3"
"""The worked example that is open at first."""
LEVELS = {
    Level.FORMULA: "ordinary batches",
    Level.POLICIES: "anchors without positives or negatives, duplicate rows, layouts, label values",
    Level.RANGE: "extreme temperatures, norms and logits",
    Level.DIGITS: "results close to the rounding error of the dtype",
}
"""The cases of each level, in a few words."""
OF_REPORT = ("documents", "deviations", "public", "findings", "sweeps", "speed")
"""Parts of the page of a report that the page of a check lacks."""
VALUES = "values only: the target returns no gradient"
"""What the page of a check says if no gradient was judged."""
MOST_PARTS = 200
"""A longer curve has this many parts; the first, the lowest, the highest and the last point of each are drawn."""
ORDER = (Status.ERRORED, Status.FAILED, Status.DEVIATES, Status.PASSED)
"""Statuses by importance. If the dtypes of a case differ, the most important status is shown."""


def _levels(found: CheckResult) -> Iterator[dict[str, Any]]:
    """The checks by level and status, with a sum up to the required level and one of all levels.

    A case that fails at two levels is counted at the lower one.
    """
    cases: dict[str, Level] = {}
    for one in found.failures:
        cases[one.case] = min(one.level or Level.FORMULA, cases.get(one.case, Level.DIGITS))
    shown = [status for status in Status if any(counts[status] for counts in found.levels.values())]

    def row(name: str, levels: Sequence[Level], words: str = "") -> dict[str, Any]:
        checks = {str(status): sum(found.levels[one][status] for one in levels) for status in shown}
        failing = sum(level in levels for level in cases.values())
        return {"level": name, "words": words, "sum": not words, "checks": checks, "cases": failing}

    for k, level in enumerate(Level, 1):
        yield row(level, [level], LEVELS[level])
        if level is found.level and level is not Level.DIGITS:
            yield row(f"required: up to {level}", [*Level][:k])
    yield row("all levels", [*Level])


def _accuracy(checks: Sequence[Check]) -> Iterator[dict[str, Any]]:
    """The median, 90th percentile and maximum of error / bound over passed checks, by implementation and dtype."""
    judged = ((one.implementation, one.dtype, one.ratio) for one in checks if one.status is Status.PASSED)
    groups = grouped(((who, dtype), ratio) for who, dtype, ratio in judged if ratio is not None)
    for (who, dtype), ratios in groups.items():
        median, ninety = np.quantile(ratios, [0.5, 0.9])
        numbers = {"median": number(median, 3), "ninety": number(ninety, 3), "worst": number(max(ratios), 3)}
        yield {"implementation": who, "dtype": dtype, "checks": len(ratios), **numbers}


def _cases(checks: Sequence[Check], fixtures: Sequence[WorkedFixture]) -> Iterator[dict[str, Any]]:
    """Every judged case with its status for each implementation that does not skip it."""
    stored = {case.id: case for case in load_cases(fixtures)}
    documents = {case.id: one.document.id for one in fixtures for case in worked_cases(one)}
    for name, some in grouped((one.case, one) for one in checks if one.status is not Status.SKIPPED).items():
        statuses = {
            who: str(min((one.status for one in same), key=ORDER.index))
            for who, same in grouped((one.implementation, one) for one in some).items()
        }
        case = stored.get(name)
        yield {
            "id": name,
            "loss": some[0].loss,
            "flags": list(some[0].flags),
            "document": documents.get(name, ""),
            "sizes": case.sizes() if case else "",
            "statuses": statuses,
        }


def _deviations(checks: Sequence[Check], versions: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The declared deviations that occurred, grouped by reason, each with an example.

    An example should have no other deviation, and its loss should clearly differ. If no loss differs, another term is
    shown.
    """
    reasons = {(kind.name, one.name): one for kind in ALL for one in kind.deviations}
    golden = {case.id: found.expected.loss for case, found in load_cases(()).items() if found}
    declared = [((one.implementation, name), one) for one in checks for name in one.declared]
    met = grouped((reasons[key], check) for key, check in declared if key in reasons)

    def differs(check: Check) -> bool:
        true = golden.get(check.case)
        if check.value is None or not isinstance(true, float):
            return False
        return not abs(check.value - true) <= max(1e-3 * abs(true), SMALLEST)

    for same in grouped(((one.reason, one.link, one.wrong), one) for one in met).values():
        some = [check for one in same for check in met[one]]
        shown = max(
            some, key=lambda check: (len(check.declared) == 1, differs(check), bool(NOT_FINITE.search(check.message)))
        )
        expected = golden.get(shown.case)
        names = list(dict.fromkeys(check.implementation for check in some))
        yield {
            "who": names,
            "versions": list(dict.fromkeys(versions.get(name, "") for name in names)),
            "reason": same[0].reason,
            "link": same[0].link,
            "wrong": same[0].wrong,
            "checks": len(some),
            "case": shown.case,
            "by": shown.implementation,
            "dtype": shown.dtype,
            "expected": number(expected) if differs(shown) else "",
            "found": number(shown.value) if differs(shown) else "",
            "term": "" if differs(shown) else _term(shown),
        }


def _term(check: Check) -> str:
    """The term that differs, with its numbers rounded to six digits."""
    words = check.message.partition(DECLARED)[0].partition("; ")[0]
    return re.sub(r"-?\d+\.\d+(?:e[-+]?\d+)?", lambda found: f"{float(found[0]):.6g}", words)


def _speed() -> Iterator[dict[str, Any]]:
    """For each loss, two charts of time of plain torch / time of pairproof.fast, with a line per kind of batch."""
    if not BENCH.is_file():
        return
    timings = json.loads(BENCH.read_text(encoding="utf-8"))["timings"]
    usual = {"implementation": "plain", "regime": "default", "dtype": "float32", "d": COLUMNS}
    rows = [row for row in timings if usual.items() <= row.items() and "D=" not in row["form"]]
    for loss, some in grouped((row["form"].partition(", ")[0], row) for row in rows).items():
        forms = grouped((row["form"].partition(", ")[2], row) for row in some)
        charts = []
        for part, words in (("both", "forward and backward"), ("forward", "forward pass")):
            lines = [
                Line(form, sorted((float(row["n"]), row[f"{part}_ratio"][1]) for row in same if f"{part}_ratio" in row))
                for form, same in forms.items()
            ]
            title = f"{loss}, {words}: time of plain torch / time of pairproof.fast"
            chart = Chart(title, "rows", "ratio of the times", [line for line in lines if line.points], True, True)
            charts.append(replace(chart, rules=[Rule(1)], ticks=(32, 128, 512, 2048, 8192)).data())
        yield {"loss": loss, "charts": charts}


def data_of(found: Report | CheckResult) -> dict[str, Any]:
    """Return the data of the page.

    Args:
        found: the results of ``verify`` or of ``check``.

    Returns:
        A JSON object.
    """
    report = found.report if isinstance(found, CheckResult) else found
    checks = [one for one in report.checks if one.kind == "case"]
    failing = failing_cases(found)
    shown = failures(found, failing)
    occurring = {flag for one in checks for flag in one.flags}
    data: dict[str, Any] = {
        "format": FORMAT,
        "title": "pairproof",
        "header": {name: value for name, value in report.header().items() if name not in ("copy", "fixtures")},
        "versions": dict(report.versions),
        "absent": dict(report.absent),
        "counts": {str(status): counted(report.checks)[status] for status in Status},
        "problems": list(report.problems),
        "losses": [name for name in LOSSES if any(one.loss == name for one in checks)],
        "matrix": matrix(checks),
        "accuracy": list(_accuracy(checks)),
        "cases": list(_cases(checks, report.fixtures or load_worked())),
        "flags": {name: flag.hunts for name, flag in load_flags().items() if name in occurring},
        "all_levels": LEVELS,
        "failures": shown,
        "more_failures": len(failing) - len(shown),
        **{name: [] for name in ("levels", "notes", *OF_REPORT)},
    }
    if isinstance(found, CheckResult):
        data |= {
            "title": f"{found.request.name} as {found.request.loss}",
            "good": found.verdict == CONFORMS,
            "verdict": found.summary.partition(f": {found.request.name} as ")[0],
            "levels": list(_levels(found)),
            "reasons": [*filter(None, [found.wrong_from]), *found.diagnosis.sentences()],
            "notes": [*filter(None, (found.question, found.reading, "" if found.gradients_judged else VALUES))],
        }
    else:
        implementations = judged(report)
        documents = sorted(report.fixtures, key=lambda one: one.document.source is not None)  # public tests come last
        data |= {
            "good": report.passed,
            "verdict": "everything holds" if report.passed else "not everything holds",
            "reasons": [*filter(None, [report.first_problem])],
            "documents": [document(one, report) for one in documents],
            "deviations": list(_deviations(checks, report.versions)),
            "public": list(public_losses(load_cases(report.fixtures))),
            "findings": [one.data() for one in findings(report, implementations)],
            "sweeps": list(sweeps(data["losses"], implementations)),
            "speed": list(_speed()),
        }
    return data


def page_of(data: Mapping[str, Any]) -> str:
    """Return the page.

    Args:
        data: the result of ``data_of``.

    Returns:
        The text of the HTML page.

    Raises:
        CouldNotRun: jinja2 is not installed.
    """
    embedded = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    views = [view["id"] for one in data["documents"] for view in one["views"]]
    opened = next((name for name in views if name == OPENED), views[0] if views else "")
    return _rendered("page.html", {**data, "embedded": embedded, "opened": opened})


def _rendered(template: str, data: Mapping[str, Any]) -> str:
    """Return a page. Raise CouldNotRun if jinja2 is not installed."""
    if find_spec("jinja2") is None:
        raise CouldNotRun(f"jinja2 is not installed: {install_command('verify')}")
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    loader = PackageLoader("pairproof.conformance.page", "")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["svg"] = lambda chart: Markup(Chart.from_data(chart).svg())
    environment.globals["bars"] = lambda table: Markup(bars(table))
    environment.globals["range_bar"] = lambda *values: Markup(range_bar(*map(float, values)))
    return environment.get_template(template).render(data)


def _scale(found: Diagnosis) -> Chart:
    """The value, or the values of all steps, among the levels. A value far outside the levels becomes a cross."""
    levels = found.levels
    known = {
        "lowest": (levels.lowest, 0.0),
        "chance": (levels.chance, 3 * levels.spread),
        "collapsed": (levels.collapsed, 0.0),
        "started": (levels.started, 3 * levels.started_spread),
    }
    rules = [
        Rule(y, f"{name} {y:.4g}", spread) for name, (y, spread) in known.items() if y is not None and math.isfinite(y)
    ]
    low, high = min(rules).y, max(rules).y
    far = 2 * max(high - low, abs(high))

    def drawn(y: float) -> float:
        return y if low - far <= y <= high + far else -math.inf if y < low else math.inf

    values = found.values or [y for y in [found.value] if y is not None]
    points = [(float(step), drawn(y)) for step, y in enumerate(values, 1)]
    size = -(-len(points) // MOST_PARTS) or 1
    parts = [points[k : k + size] for k in range(0, len(points), size)]
    height: Callable[[tuple[float, float]], float] = itemgetter(1)
    kept = {point for part in parts for point in (part[0], min(part, key=height), max(part, key=height), part[-1])}
    lines = [Line(f"value {y:.4g}", sorted(kept)) for y in values[-1:]]
    title = f"{found.loss}: {', '.join([line.name for line in lines] + [rule.name for rule in rules])}"
    x, ticks = ("step", None) if found.values else ("", ())
    return Chart(title, x, "loss", lines, rules=rules, ticks=ticks)


def write_figures(found: Diagnosis | ParityResult, path: Path) -> None:
    """Write a result with its figures as one HTML page.

    Args:
        found: the result of ``diagnose``, or of ``parity`` with ``html``.
        path: the file that is written.

    Raises:
        CouldNotRun: jinja2 is not installed.
    """
    data: dict[str, Any] = {
        "good": not found.exit_code,
        "header": {"on": described(machine())},
        "notes": (),
        "lines": found.lines(),
    }
    if isinstance(found, Diagnosis):
        words = "Dashed lines: levels; grey: where the values of random batches are. ×: NaN, or far outside the levels."
        data |= {
            "title": f"The value of {found.loss}",
            "verdict": "a problem" if found.problems else "no problem found",
            "reasons": found.problems,
            "notes": found.hints,
            "figures": [(_scale(found).svg(), words)] if math.isfinite(found.levels.chance) else [],
        }
    else:
        words = (
            "{} ranks: the gradient that the loss of each rank (left) sends to the rows of each rank (top), as a share"
            " of the gradient in one process. Dashed: none arrives."
        )
        named = {words.format(world): one for world, one in found.arrivals.items()}
        data |= {
            "title": f"{found.request.name} in several processes",
            "verdict": found.summary.partition(": ")[0],
            "reasons": [f"{name}: {', '.join(where)}" for name, where in found.mistakes.items()],
            "figures": [(arrivals(one, text), text) for text, one in named.items()],
        }
    path.write_text(_rendered("figures.html", data), encoding="utf-8")


def write_page(found: Report | CheckResult, path: Path) -> None:
    """Write the results as one HTML page.

    Args:
        found: the results of ``verify`` or of ``check``.
        path: the file that is written.

    Raises:
        CouldNotRun: jinja2 is not installed, or the page is larger than ``LARGEST``.
    """
    page = page_of(data_of(found)).encode()
    if len(page) > LARGEST:
        raise CouldNotRun(f"the page has {len(page)} bytes, more than {LARGEST}; select fewer losses or cases")
    path.write_bytes(page)
