"""Print the report as tables; write it as JSON and as a plot.

``cpu.json`` (``cuda.json`` on a GPU) is one object:

    format      "pairproof-bench/2"
    date        the value of --date, or null
    protocol    the attributes of the `jobs.Plan`, temperature, threads, and the environment variables of each regime of
                the allocator
    machine     cpu, cores, capability, memory, governor, system, libc, load_before; on a GPU also its properties
    versions    of Python, pairproof and the installed packages
    timings     one row per form, n, d (columns), dtype ("tf32": float32, products may round to TF32), regime and
                implementation ("pairproof", "plain" torch, or a peer):
                  status        "measured", or "refused" with a reason
                  version       of the implementation
                  rounds        number of rounds; of a peer, the number of pairs of samples
                  repeats       calls per sample
                  processes     number of processes, if the figures are medians over several
                  forward_ms    [lower quartile, median, upper quartile] per call, without autograd
                  both_ms       the same for forward and backward; a step replayed as a CUDA graph has only this
                  forward_ratio, both_ratio   quartiles over the pairs: time of the peer divided by that of pairproof
                  errors        {"random": {"loss", "gradient"}, "trained": {...}}, relative to float64; empty if
                                not measured. On a GPU with more than 65536 rows, "gradient" is measured on 512 rows
                  mm_gflops     throughput of torch.mm in the same rounds
                  forward_share, both_share   quartiles over the rounds: throughput of pairproof divided by that of mm.
                                Operations counted for pairproof (forward; forward and backward), for N anchors and
                                M rows that they are compared with:
                                  labels, partners, pairs   N^2 D, 4 N^2 D (on a GPU 2 N^2 D, 6 N^2 D)
                                  others                    2 N M D, 8 N M D
                  square_gflops, forward_square_share, both_square_share   on a GPU, the same for a product of
                                square matrices of 8192 rows in the same dtype
    memory      one row per form, n, d, dtype and implementation: status, reason (if refused), and
                  bytes         peak of forward and backward beyond the interpreter, its libraries and the inputs; on a
                                GPU as reported by the allocator
                  once_ms       time of this step, with page faults; not on a GPU
    accuracy    one row per form, d, dtype, temperature, kind ("random", "trained") and implementation: loss_error and
                gradient_error (medians of the relative errors over the batches), smallest_loss (smallest true loss)
    large       null, or pairproof at 65536 rows in 10 classes: bytes, once_ms, worst_anchor_error, anchors_compared
    goals       the result of `goals.judge`; on a GPU, that of `goals.judge_device`
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from pairproof import install_command
from pairproof.conformance.suite.store import dump_json

from .forms import COLUMNS, CORNERS, RECIPES, WAYS
from .goals import MIB, PARTS, Goal, Row, per_row
from .peers import OURS, PEERS, PLAIN, Unavailable

FILE_WIDTH = 80

FORMAT = "pairproof-bench/2"

LEGEND = """\
A ratio is the time of another implementation divided by that of pairproof.fast:
above 1, pairproof.fast is faster. "forward" is plain torch without autograd;
the other lines are forward and backward. "%": share of the throughput of
torch.mm. "ms": time of pairproof.fast. "!": a goal is missed."""

COLOURS = ("#000000", "#e69f00", "#56b4e9", "#009e73", "#0072b2", "#d55e00", "#cc79a7", "#999999")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
"""Colours (of Okabe and Ito) and markers of the plot, for colour-blind readers."""

TICKS = (0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 20, 50)

DRAWN = "drawn combinations"
"""Name of the table of `forms.CORNERS`."""

Group = tuple[str, int, str, str]
"""Loss, number of columns, dtype and allocator regime of a table."""


def _number(value: float) -> str:
    """Format a number with three significant digits, if possible without an exponent."""
    if not math.isfinite(value):
        return "not finite"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:.1e}"


def _ratio(value: float) -> str:
    """Format a ratio with four characters, if possible."""
    places = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{places}f}" if value < 9999.5 else f"{value / 1000:.0f}k"


def _group(row: Row) -> Group:
    if row["form"] in CORNERS:
        return DRAWN, 0, "", row.get("regime", "default")
    return RECIPES[row["form"]].loss, row["d"], row["dtype"], row.get("regime", "default")


def _described(group: Group) -> str:
    name, d, dtype, _ = group
    return name if name == DRAWN or (d, dtype) == (COLUMNS, "float32") else f"{name}, D={d}, {dtype}"


def _named(row: Row) -> str:
    return row["form"] if row["form"] in CORNERS else _described((row["form"], row["d"], row["dtype"], ""))


def _way(form: str) -> str:
    return form if form in CORNERS else form.removeprefix(f"{RECIPES[form].loss}, ")


def _table(title: str, left: Iterable[str], right: Iterable[str], caption: str | None = None) -> Table:
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in left:
        table.add_column(column, overflow="fold")
    for column in right:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _lines(row: Row) -> dict[str, str]:
    """Return the figures of a row by the label of their line in the table."""
    name = row["implementation"]
    if name == OURS:
        shares = {"% of mm": "both_share", "% square": "both_square_share"}
        found = {line: f"{100 * row[key][1]:.0f}" for line, key in shares.items() if key in row}
        return found | {"ms": _number(row["both_ms"][1])}
    keys = {PEERS[name].title: "both_ratio"} | ({"forward": "forward_ratio"} if name == PLAIN else {})
    return {line: _ratio(row[key][1]) for line, key in keys.items() if key in row}


def _timings(report: Row, group: Group) -> Table:
    """Return the table of one loss; the form with the worst ratio to plain torch comes first."""
    missed = {(goal["form"], goal["n"], goal["regime"], goal["part"], goal["against"]) for goal in _marked(report)}
    cells: dict[str, dict[str, dict[int, str]]] = {}
    worst: dict[str, float] = {}
    order = [PLAIN, *(name for name in PEERS if name not in (PLAIN, OURS)), OURS]
    rows = [row for row in report["timings"] if _group(row) == group and row["status"] == "measured"]
    sizes = sorted({row["n"] for row in rows})
    for row in sorted(rows, key=lambda row: order.index(row["implementation"])):
        form = row["form"]
        if row["implementation"] == PLAIN:
            worst[form] = min(worst.get(form, math.inf), row["both_ratio"][1])
        for line, text in _lines(row).items():
            part = "forward" if line == "forward" else "both"
            wrong = (form, row["n"], row["regime"], part, row["implementation"]) in missed
            found = cells.setdefault(form, {}).setdefault(line, {})
            found[row["n"]] = f"[red]{text}![/red]" if wrong else f"{text} "
    regime = "" if group[3] == "default" else f", {group[3]} allocator"
    title = f"{_described(group)}{regime}: times faster than"
    table = _table(title, ["", ""], [f"{n} " for n in sizes])
    for form in sorted(cells, key=lambda form: worst.get(form, math.inf)):
        table.add_section()
        name = _way(form)
        for line, figures in cells[form].items():
            table.add_row(name, line, *(figures.get(n, "") for n in sizes), style="dim" if line[0] in "m%" else None)
            name = ""
    return table


def _marked(report: Row) -> list[Goal]:
    """Return the missed goals that are marked in the tables of ratios."""
    return [goal for goal in report["goals"] if goal.get("against", "best") != "best" and goal["met"] is False]


def _refusals(report: Row) -> list[str]:
    """Return one line per reason why an implementation was not timed, with the sizes."""
    lines: dict[str, dict[str, None]] = {}
    for row in report["timings"]:
        if row["status"] != "measured":
            line = f"{_named(row)}, {PEERS[row['implementation']].title}: {row['reason']}"
            lines.setdefault(line, {})[str(row["n"])] = None
    return [f"not timed at N={','.join(sizes)}: {line}" for line, sizes in lines.items()]


def _crossed(title: str, left: Sequence[str], cells: Mapping[Any, str]) -> Table:
    """Return a table of cells by row labels and column name; missing cells are "-"."""
    columns = list(dict.fromkeys(column for _, column in cells))
    table = _table(title, left, columns)
    for words in dict.fromkeys(words for words, _ in cells):
        table.add_row(*words, *(cells.get((words, column), "-") for column in columns))
    return table


def _memory(report: Row) -> Table:
    cells = {
        ((_named(row), PEERS[row["implementation"]].title), f"N={row['n']}"): _number(row["bytes"] / MIB)
        for row in sorted(report["memory"], key=lambda row: row["n"])
        if "bytes" in row
    }
    return _crossed("Peak memory of forward and backward beyond the inputs, MiB", ("form", "implementation"), cells)


def _per_row(report: Row) -> Table:
    """Return the table of memory per row. If memory is linear in N, all columns are equal."""
    cells = {
        ((f"{form}, {dtype}", str(d)), f"N={n}"): _number(peak / d)
        for (form, d, dtype), peaks in per_row(report).items()
        for n, peak in sorted(peaks.items())
    }
    title = "Peak memory of pairproof.fast per row and column of the inputs, bytes"
    return _crossed(title, ("form", "D"), cells)


def _accuracy(report: Row) -> Iterable[Table]:
    rows = [row for row in report["accuracy"] if row["status"] == "measured"]
    for name in dict.fromkeys(map(_named, rows)):
        cells = {
            ((str(row["temperature"]), row["kind"]), PEERS[row["implementation"]].title): (
                f"{row['loss_error']:.0e}/{row['gradient_error']:.0e}"
            )
            for row in rows
            if _named(row) == name
        }
        yield _crossed(f"{name}: median relative error of loss/gradient", ("temperature", "inputs"), cells)


def goals_table(goals: list[Goal], title: str) -> Table:
    """Return a table of the goals or floors that are missed or not measured; the caption counts those met."""
    table = _table(title, ["what"], ["goal", "measured", ""], f"{sum(goal['met'] is True for goal in goals)} met")
    words = {False: "[red]missed[/red]", None: "[yellow]not measured[/yellow]"}
    for met, word in words.items():
        for goal in goals:
            if goal["met"] is met:
                measured = "" if met is None else _number(goal["value"])
                what = f"{goal['what']} ({goal['reason']})" if goal["reason"] else goal["what"]
                table.add_row(what, f"{goal['sense']} {_number(goal['goal'])}", measured, word)
    return table


def open_console() -> Console:
    """Return a console for standard output, `FILE_WIDTH` columns wide if it is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=FILE_WIDTH)


def show(report: Row, console: Console) -> None:
    """Print every table that is not empty."""
    machine, versions = report["machine"], report["versions"]
    device = f"{machine['gpu']['name']}; " if "gpu" in machine else ""
    described = ", ".join(f"{k} {v}" for k, v in versions.items())
    console.print(f"{device}{machine['cpu']}, {machine['cores']} cores; {described}")
    order = [*WAYS, DRAWN]
    groups = {_group(row) for row in report["timings"] if row["status"] == "measured"}
    for group in sorted(groups, key=lambda group: (order.index(group[0]), *group[1:])):
        console.print(_timings(report, group))
    if groups:
        console.print(LEGEND, highlight=False)
    for line in _refusals(report):
        console.print(line, style="dim", markup=False)
    if report["memory"]:
        console.print(_memory(report))
    for table in _accuracy(report):
        console.print(table)
    if "gpu" in machine and any("bytes" in row for row in report["memory"]):
        console.print(_per_row(report))
    if large := report["large"]:
        found = f"refused: {large.get('reason')}"
        if large["status"] == "measured":
            figures = (large["bytes"] / MIB, large["once_ms"] / 1e3, large["worst_anchor_error"])
            size, seconds, error = map(_number, figures)
            count = large["anchors_compared"]
            found = f"{size} MiB beyond the inputs, {seconds} s, largest relative error of {count} anchors {error}"
        console.print(f"{large['form']}, N={large['n']}: {found}")
    if report["goals"]:
        marked, counts = _marked(report), [goal["met"] for goal in report["goals"]]
        console.print(goals_table([goal for goal in report["goals"] if goal not in marked], "Goals"))
        console.print(f"{counts.count(True)} of {len(counts)} goals met; {len(marked)} missed ones are marked above")


def write(report: Row, path: Path, console: Console) -> None:
    """Write the report as JSON with six digits, and the plot. Numbers that are not finite become null."""
    text, digits = json.dumps(report), lambda number: float(f"{float(number):.6g}")
    finite = json.loads(text, parse_constant=lambda name: None, parse_float=digits)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(dump_json(finite), encoding="utf-8")
    plot(report, path.with_suffix(".svg"))
    console.print(f"written: {path}.json, {path}.svg")


def pyplot() -> Any:
    """Import matplotlib with a backend that writes files.

    Raises:
        Unavailable: matplotlib is not installed.
    """
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
    except ImportError as error:
        raise Unavailable(f"the plot needs matplotlib ({error}): {install_command('bench')}") from None
    matplotlib.use("Agg")
    # A fixed salt makes the file reproducible.
    matplotlib.rcParams["svg.hashsalt"] = FORMAT
    return importlib.import_module("matplotlib.pyplot")


def plot(report: Row, path: Path) -> None:
    """Plot the time of plain torch divided by that of pairproof against N: a row per loss, a line per form.

    The left panel shows forward and backward, the right one the forward pass. If the report has bfloat16, only that
    dtype is plotted. Random combinations (`CORNERS`) and the tuned allocator are not plotted.

    Args:
        report: the report.
        path: the file to write; its suffix is the format.

    Raises:
        Unavailable: matplotlib is not installed.
    """
    plt = pyplot()
    rows = [row for row in report["timings"] if row["regime"] == "default" and row["form"] not in CORNERS]
    rows = [row for row in rows if row["dtype"] == "bfloat16"] or rows
    groups = sorted({_group(row): None for row in rows}, key=lambda group: (list(WAYS).index(group[0]), group))
    size = (10, 2.9 * max(1, len(groups)))
    figure, axes = plt.subplots(max(1, len(groups)), 2, figsize=size, squeeze=False, sharey="row", layout="constrained")
    for group, pair in zip(groups, axes, strict=False):
        sizes = sorted({row["n"] for row in rows if _group(row) == group})
        found: dict[str, list[Row]] = {row["form"]: [] for row in rows if _group(row) == group}
        for row in rows:
            if row["implementation"] == PLAIN and _group(row) == group:
                found[row["form"]].append(row)
        for axis, (part, title) in zip(pair, reversed(PARTS.items()), strict=True):
            for (form, same), colour, marker in zip(found.items(), COLOURS, MARKERS, strict=False):
                points = sorted((row["n"], row[f"{part}_ratio"][1]) for row in same if f"{part}_ratio" in row)
                if points:
                    label = {"color": colour, "marker": marker, "label": _way(form)}
                    axis.plot(*zip(*points, strict=True), markersize=4, linewidth=1.3, **label)
            axis.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
            axis.set(xscale="log", yscale="log", xlabel="N", title=f"{_described(group)}: {title}")
            axis.set_xticks(sizes, [str(n) for n in sizes])
            low, high = axis.get_ylim()
            ticks = [tick for tick in TICKS if low <= tick <= high]
            axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.minorticks_off()
            axis.grid(visible=True, alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
        if any(labels := pair[0].get_legend_handles_labels()):
            pair[1].legend(*labels, fontsize="small", frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    machine = report["machine"]
    device = machine["gpu"]["name"] if "gpu" in machine else f"{machine['cpu']}, one thread"
    version = report["versions"]["torch"]
    figure.suptitle(f"Times faster than plain torch (above 1: pairproof.fast is faster)\n{device}, torch {version}")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {})
    plt.close(figure)
