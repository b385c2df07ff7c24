"""Print the report as tables; write it as JSON and as a plot.

``cpu.json`` (``cuda.json`` on a GPU) is one object:

    format      "pairproof-bench/1"
    date        the value of --date, or null
    protocol    device, dtypes, backend, temperature, columns (D), threads, rounds and the regimes of the allocator
    machine     cpu, cores, capability, memory, governor, system, libc, load_before; on a GPU also its properties
    versions    of Python, pairproof and the installed packages
    timings     one row per loss, n, d (columns), dtype ("tf32": float32, products may round to TF32), regime and
                implementation:
                  status        "measured", or "refused" with a reason
                  version       of the implementation
                  rounds        number of pairs (pairproof: of rounds); repeats: calls per sample
                  forward_ms    [lower quartile, median, upper quartile] per call, with autograd
                  both_ms       the same for forward and backward; a step replayed as a CUDA graph has only this
                  forward_ratio, both_ratio   quartiles over the pairs: time of the peer divided by that of pairproof
                  errors        {"random": {"loss", "gradient"}, "trained": {...}}, relative to float64; empty if
                                they are in another row of the same loss, n and implementation. On a GPU with
                                more than 65536 rows, "gradient" is measured on 512 rows, spread over the batch
                  forward_gflops, both_gflops, mm_gflops   throughput of pairproof and of torch.mm; the step is counted
                                as N^2 D and 4 N^2 D operations (on a GPU 2 N^2 D and 6 N^2 D)
                  forward_share, both_share   quartiles over the pairs: throughput of pairproof divided by that of mm
                  square_gflops, forward_square_share, both_square_share   on a GPU, the same for a product of
                                square matrices of 8192 rows in the same dtype
    memory      one row per loss, n, d, dtype and implementation: status, bytes (peak of forward and backward beyond
                the interpreter, its libraries and the inputs; on a GPU as reported by the allocator) and once_ms (time
                of this step, with page faults; not on a GPU), or reason
    accuracy    one row per loss, d, dtype, temperature, kind ("random", "trained") and implementation: loss_error and
                gradient_error, the medians of the relative errors over the batches; smallest_loss, of the true losses
    large       null, or pairproof at 65536 rows in 10 classes: bytes, once_ms, worst_anchor_error, anchors_compared
    goals       the result of `bench.goals.judge`, on a GPU of `bench.goals.judge_device`
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

from .batches import KINDS, LOSSES
from .goals import MIB, Goal, Row, per_row
from .peers import CAPTURED, OURS, PEERS, Unavailable

FILE_WIDTH = 180
"""Width of the output in columns if it is not written to a terminal."""

FORMAT = "pairproof-bench/1"

Group = tuple[str, int, str]
"""Loss, number of columns and dtype of a table."""


def _number(value: float) -> str:
    """Format a number with three significant digits, without an exponent if possible."""
    if not math.isfinite(value):
        return "not finite"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:.1e}"


def _pair(errors: Row | None, suffix: str = "") -> str:
    """Format the errors of loss and gradient."""
    return " / ".join(_number(errors[part + suffix]) for part in ("loss", "gradient")) if errors else ""


def _group(row: Row) -> Group:
    return row["loss"], row["d"], row["dtype"]


def _named(group: Group) -> str:
    return "{}, D={}, {}".format(*group)


def _titled(group: Group) -> str:
    return _named((LOSSES[group[0]], *group[1:]))


def _ratio_or_shares(row: Row) -> str:
    """Format the median and quartiles of a peer's ratio, or the shares of pairproof of the matrix products."""
    if "both_ratio" in row:
        low, middle, high = (_number(value) for value in row["both_ratio"])
        return f"{middle} ({low}-{high})"
    products = {"both_share": "mm", "both_square_share": "square mm"}
    found = {name: f"{100 * row[key][1]:.0f}" for key, name in products.items() if key in row}
    return f"{' / '.join(found.values())} % of {' / '.join(found)}" if found else ""


def _table(title: str, left: Iterable[str], right: Iterable[str], caption: str | None = None) -> Table:
    """Return an empty table with text columns on the left and number columns on the right."""
    table = Table(title=title, caption=caption, box=box.SIMPLE)
    for column in left:
        table.add_column(column)
    for column in right:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _timings(report: Row, group: Group) -> Table:
    errors = [f"error, {kind}:\nloss / gradient" for kind in KINDS]
    title = f"{_titled(group)}: one step; a ratio is the time of the peer divided by that of pairproof"
    figures = ["forward ms", "f+b ms", "forward ratio", "f+b ratio (quartiles)", *errors]
    table = _table(title, ["N", "allocator", "implementation"], figures)
    before = None
    for row in report["timings"]:
        if _group(row) != group or row["status"] != "measured":
            continue
        section = (str(row["n"]), row["regime"])
        if before not in (None, section):
            table.add_section()
        name = PEERS[row["implementation"]].title
        table.add_row(
            *(section if section != before else ("", "")),
            f"[bold]{name}[/bold]" if row["implementation"] == OURS else name,
            *(_number(row[key][1]) if key in row else "" for key in ("forward_ms", "both_ms", "forward_ratio")),
            _ratio_or_shares(row),
            *(_pair(row["errors"].get(kind)) for kind in KINDS),
        )
        before = section
    return table


def _refusals(report: Row) -> list[str]:
    """Return one line per distinct reason why an implementation was not timed, with the sizes that it applies to."""
    lines: dict[str, dict[str, None]] = {}
    for row in report["timings"]:
        if row["status"] != "measured":
            line = f"{_named(_group(row))}, {PEERS[row['implementation']].title}: {row['reason']}"
            lines.setdefault(line, {})[str(row["n"])] = None
    return [f"not timed at N={','.join(sizes)}: {line}" for line, sizes in lines.items()]


def _crossed(title: str, left: Sequence[str], cells: Mapping[Any, str]) -> Table:
    """Return a table of cells, by the labels of the row and the name of the column; a missing cell is "-"."""
    columns = list(dict.fromkeys(column for _, column in cells))
    table = _table(title, left, columns)
    for words in dict.fromkeys(words for words, _ in cells):
        table.add_row(*words, *(cells.get((words, column), "-") for column in columns))
    return table


def _memory(report: Row) -> Table:
    cells = {
        ((_named(_group(row)), PEERS[row["implementation"]].title), f"N={row['n']}"): _number(row["bytes"] / MIB)
        for row in sorted(report["memory"], key=lambda row: row["n"])
        if "bytes" in row
    }
    return _crossed("Peak memory of forward and backward beyond the inputs, MiB", ("loss", "implementation"), cells)


def _per_row(report: Row) -> Table:
    """Return the table of memory per row. If memory is linear in N, all columns have the same number."""
    cells = {
        ((_named(group),), f"N={n}"): _number(peak / group[1])
        for group, peaks in per_row(report).items()
        for n, peak in sorted(peaks.items())
    }
    return _crossed(f"Peak memory of {PEERS[OURS].title} per row and column of the inputs, bytes", ("loss",), cells)


def _accuracy(report: Row) -> Table:
    cells = {}
    for row in report["accuracy"]:
        if row["status"] == "measured":
            words = (_named(_group(row)), str(row["temperature"]), row["kind"])
            cells[words, PEERS[row["implementation"]].title] = _pair(row, "_error")
    title = "Median relative error of loss / gradient against float64"
    return _crossed(title, ("loss", "temperature", "inputs"), cells)


def goals_table(goals: list[Goal], title: str) -> Table:
    """Return a table of goals or floors, missed ones first; the caption counts the met goals on accuracy."""
    accuracy = [goal for goal in goals if goal.get("accuracy")]
    counted = [goal for goal in accuracy if goal["met"]]
    caption = f"accuracy: {len(counted)} of {len(accuracy)} goals met" if accuracy else None
    table = _table(title, ["what"], ["goal", "measured", ""], caption)
    words = {False: "[red]missed[/red]", None: "[yellow]not measured[/yellow]", True: "[green]met[/green]"}
    for met, word in words.items():
        for goal in goals:
            if goal["met"] is met and goal not in counted:
                measured = "" if met is None else _number(goal["value"])
                what = f"{goal['what']} ({goal['reason']})" if goal["reason"] else goal["what"]
                table.add_row(what, f"{goal['sense']} {_number(goal['goal'])}", measured, word)
    return table


def open_console() -> Console:
    """Return a console for standard output, wide enough for the tables if it is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=FILE_WIDTH)


def show(report: Row, console: Console) -> None:
    """Print every table that is not empty."""
    machine, versions = report["machine"], report["versions"]
    device = f"{machine['gpu']['name']}; " if "gpu" in machine else ""
    described = ", ".join(f"{k} {v}" for k, v in versions.items())
    console.print(f"{device}{machine['cpu']}, {machine['cores']} cores; {described}")
    for group in dict.fromkeys(_group(row) for row in report["timings"] if row["status"] == "measured"):
        console.print(_timings(report, group))
    for line in _refusals(report):
        console.print(line, style="dim", markup=False)
    for rows, table in (("memory", _memory), ("accuracy", _accuracy)):
        if report[rows]:
            console.print(table(report))
    if "gpu" in machine and any("bytes" in row for row in report["memory"]):
        console.print(_per_row(report))
    if large := report["large"]:
        found = f"refused: {large.get('reason')}"
        if large["status"] == "measured":
            figures = (large["bytes"] / MIB, large["once_ms"] / 1e3, large["worst_anchor_error"])
            size, seconds, error = map(_number, figures)
            count = large["anchors_compared"]
            found = f"{size} MiB beyond the inputs, {seconds} s, largest relative error of {count} anchors {error}"
        console.print(f"{LOSSES[large['loss']]}, N={large['n']}: {found}")
    if report["goals"]:
        console.print(goals_table(report["goals"], "Goals"))


def write(report: Row, path: Path, console: Console) -> None:
    """Write the report as JSON, and the plot; numbers that are not finite become null."""
    finite = json.loads(json.dumps(report), parse_constant=lambda name: None)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(finite, indent=1) + "\n", encoding="utf-8")
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
        raise Unavailable(f'the plot needs matplotlib ({error}): pip install "pairproof[bench]"') from None
    matplotlib.use("Agg")
    # With a fixed salt, the same figures give the same file.
    matplotlib.rcParams["svg.hashsalt"] = FORMAT
    return importlib.import_module("matplotlib.pyplot")


def plot(report: Row, path: Path) -> None:
    """Plot time and memory of one step against N, with logarithmic axes and one line per implementation.

    There is one pair of plots for each loss, number of columns and dtype; if the report has bfloat16, only that
    dtype is plotted.

    Args:
        report: the report.
        path: the file to write; its suffix is the format.

    Raises:
        Unavailable: matplotlib is not installed.
    """
    plt = pyplot()
    order = list(LOSSES)
    groups = sorted(dict.fromkeys(map(_group, report["timings"])), key=lambda group: order.index(group[0]))
    groups = [group for group in groups if group[2] == "bfloat16"] or groups
    figure, axes = plt.subplots(len(groups), 2, figsize=(10, 3.6 * len(groups)), squeeze=False, layout="constrained")
    panels = (("timings", "both_ms", "ms, forward and backward"), ("memory", "bytes", "MiB beyond the inputs"))
    for group, pair in zip(groups, axes, strict=True):
        sizes = sorted({row["n"] for row in report["timings"] if _group(row) == group})
        for axis, (rows, key, quantity) in zip(pair, panels, strict=True):
            for name, peer in PEERS.items():
                style = {"color": peer.colour, "marker": "o", "markersize": 4, "label": peer.title}
                style |= {"linewidth": 2.5, "zorder": 3} if name == OURS else {"linewidth": 1.3}
                style |= {"linestyle": ":"} if name == CAPTURED else {}
                points = sorted(
                    (row["n"], row[key][1] if rows == "timings" else max(row[key], 1 << 16) / MIB)
                    for row in report[rows]
                    if key in row and (_group(row), row["implementation"]) == (group, name)
                    if row.get("regime", "default") == "default"
                )
                if points:
                    axis.plot(*zip(*points, strict=True), **style)
            axis.set(xscale="log", yscale="log", xlabel="N", ylabel=quantity, title=_titled(group))
            axis.set_xticks(sizes, [str(n) for n in sizes])
            axis.minorticks_off()
            axis.grid(visible=True, alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
        if pair[0].lines:
            pair[0].legend(fontsize="small", frameon=False)
    machine = report["machine"]
    device = machine["gpu"]["name"] if "gpu" in machine else f"{machine['cpu']}, one thread"
    figure.suptitle(f"One step: {device}, torch {report['versions']['torch']}")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {})
    plt.close(figure)
