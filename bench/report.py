"""The report: tables on the terminal, JSON, and a plot.

``cpu.json`` (``cuda.json`` on a GPU) is one object:

    format      "pairproof-bench/1"
    date        what --date said, or null
    protocol    device, dtype, backend, temperature, columns (D), threads, rounds and the allocator's two regimes; on a
                GPU dtype and columns are lists
    machine     cpu, cores, capability, memory, governor, system, libc, load_before; on a GPU also its own facts
    versions    of Python, ours and the installed packages
    timings     one row per loss, n, regime and implementation, on a GPU also per d (columns) and dtype ("tf32":
                float32 whose products may round to TF32):
                  status        "measured" or "refused", then with a reason
                  version       of the implementation
                  rounds        pairs (for ours: the rounds), repeats: calls per sample
                  forward_ms    [lower quartile, median, upper quartile] per call, the graph recorded
                  both_ms       the same of forward and backward; alone where a step is replayed as one graph
                  forward_ratio, both_ratio   quartiles of the pairs' ratios, the peer's time over ours (not of ours)
                  errors        {"random": {"loss", "gradient"}, "trained": {...}}, relative, against float64; empty
                                where another row of the same loss, n and implementation has them. On a GPU above
                                65536 rows "gradient" is that of 512 rows, spread over the batch
                  forward_gflops, both_gflops, mm_gflops   of ours, on N^2 D and 4 N^2 D operations (2 and 6 on a
                                GPU), and of torch.mm
                  forward_share, both_share   quartiles of the pairs' ratios of ours to mm
                  square_gflops, forward_square_share, both_square_share   on a GPU, the same against a product of
                                square matrices of 8192 rows in the same dtype
    memory      one row per loss, n and implementation, on a GPU also per d and dtype: status, bytes (peak of forward
                and backward beyond the interpreter, its libraries and the inputs; by the allocator on a GPU) and
                once_ms (that one step, its pages still to be faulted in; absent on a GPU), or reason
    accuracy    one row per loss, temperature, kind ("random", "trained") and implementation, on a GPU also with d and
                dtype: the medians over batches of the relative errors as loss_error and gradient_error, and
                smallest_loss among the true losses
    large       null, or ours at 65536 rows in 10 classes: bytes, once_ms, worst_anchor_error, anchors_compared
    goals       as `bench.goals.judge` gives them, on a GPU `bench.goals.judge_device`
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from .batches import KINDS, LOSSES
from .goals import MIB, Goal, per_row
from .peers import CAPTURED, OURS, TILED, TITLES, Unavailable

FORMAT = "pairproof-bench/1"

COLOURS = {
    OURS: "#000000",
    TILED: "#777777",
    CAPTURED: "#000000",
    "cross_entropy_tf32": "#004c78",
    "cross_entropy_compiled": "#6fb7e9",
    "flex_attention": "#f0e442",
    "inf_cl": "#8c564b",
    "cross_entropy": "#0072b2",
    "masked_logsumexp": "#009e73",
    "supcontrast": "#d55e00",
    "pml": "#cc79a7",
    "pml_ntxent": "#e69f00",
    "info_nce_pytorch": "#56b4e9",
    "lightly": "#999999",
}


def _number(value: float) -> str:
    """Three significant digits, without an exponent where it is readable."""
    if value != value or value in (float("inf"), float("-inf")):
        return "not finite"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:.1e}"


def _middle(row: dict[str, Any], key: str) -> str:
    return _number(row[key][1]) if key in row else ""


def _spread(row: dict[str, Any], key: str) -> str:
    """Median and quartiles."""
    if key not in row:
        return ""
    low, middle, high = (_number(value) for value in row[key])
    return f"{middle} ({low}-{high})"


def _errors(row: dict[str, Any], kind: str) -> str:
    found = row.get("errors", {}).get(kind)
    return f"{_number(found['loss'])} / {_number(found['gradient'])}" if found else ""


Group = tuple[str, int | None, str | None]
"""Loss, columns and dtype of one table; the last two are None on a CPU, where there is one of each."""


def _group(row: dict[str, Any]) -> Group:
    return row["loss"], row.get("d"), row.get("dtype")


def _groups(rows: list[dict[str, Any]]) -> list[Group]:
    """What tables to make, in the order of the rows."""
    return list(dict.fromkeys(_group(row) for row in rows))


def _title(group: Group) -> str:
    loss, d, dtype = group
    return LOSSES[loss] if d is None else f"{LOSSES[loss]}, D={d}, {dtype}"


def _shares(row: dict[str, Any]) -> str:
    """Of forward and backward: of the product at a tile's shape, and on a GPU of the square one too."""
    shares = [f"{100 * row[key][1]:.0f}" for key in ("both_share", "both_square_share") if key in row]
    if not shares:
        return ""
    return f"{shares[0]} % of mm" if len(shares) == 1 else f"{' / '.join(shares)} % of mm / square mm"


def _timings(report: dict[str, Any], group: Group) -> Table:
    where = "on one thread" if group[1] is None else "on the device"
    table = Table(title=f"{_title(group)}: one step {where}; a ratio is the peer's time over ours", box=box.SIMPLE)
    table.add_column("N", justify="right")
    for column in ("allocator", "implementation") if group[1] is None else ("implementation",):
        table.add_column(column)
    for column in ("forward ms", "f+b ms", "forward ratio", "f+b ratio (quartiles)"):
        table.add_column(column, justify="right")
    for kind in KINDS:
        table.add_column(f"error, {kind}:\nloss / gradient", justify="right", no_wrap=True)
    before: tuple[Any, ...] | None = None
    for row in report["timings"]:
        if _group(row) != group or row["status"] != "measured":
            continue
        section = (row["n"], row["regime"])
        if before not in (None, section):
            table.add_section()
        names = [str(row["n"]), row["regime"]] if section != before else ["", ""]
        if group[1] is not None:
            names.pop()
        before = section
        share = _shares(row)
        title = TITLES[row["implementation"]]
        table.add_row(
            *names,
            f"[bold]{title}[/bold]" if row["implementation"] == OURS else title,
            _middle(row, "forward_ms"),
            _middle(row, "both_ms"),
            _middle(row, "forward_ratio"),
            _spread(row, "both_ratio") or share,
            *(_errors(row, kind) for kind in KINDS),
        )
    return table


def _refusals(report: dict[str, Any]) -> list[str]:
    """Who was not timed and why, each once."""
    lines: dict[str, list[str]] = {}
    for row in report["timings"]:
        if row["status"] != "measured":
            shape = "" if "d" not in row else f", D={row['d']}, {row['dtype']}"
            sizes = lines.setdefault(f"{row['loss']}{shape}, {TITLES[row['implementation']]}: {row['reason']}", [])
            if str(row["n"]) not in sizes:
                sizes.append(str(row["n"]))
    return [f"not timed at N={','.join(sizes)}: {line}" for line, sizes in lines.items()]


def _memory(report: dict[str, Any]) -> Table:
    sizes = sorted({row["n"] for row in report["memory"]})
    table = Table(title="Peak memory of forward and backward beyond the inputs, MiB", box=box.SIMPLE)
    table.add_column("loss")
    table.add_column("implementation")
    for n in sizes:
        table.add_column(f"N={n}", justify="right")
    found = {(_group(row), row["implementation"], row["n"]): row for row in report["memory"]}
    for group, name in dict.fromkeys((_group(row), row["implementation"]) for row in report["memory"]):
        rows = [found.get((group, name, n), {}) for n in sizes]
        cells = [_number(row["bytes"] / MIB) if "bytes" in row else "-" for row in rows]
        if any("bytes" in row for row in rows):
            loss, d, dtype = group
            table.add_row(loss if d is None else f"{loss}, D={d}, {dtype}", TITLES[name], *cells)
    return table


def _per_row(report: dict[str, Any]) -> Table:
    """That memory is linear in N: the same figure in every column."""
    found = per_row(report)
    sizes = sorted({n for peaks in found.values() for n in peaks})
    table = Table(title=f"Peak memory of {TITLES[OURS]} per row and column of the inputs, bytes", box=box.SIMPLE)
    table.add_column("loss")
    for n in sizes:
        table.add_column(f"N={n}", justify="right")
    for (loss, d, dtype), peaks in found.items():
        table.add_row(f"{loss}, D={d}, {dtype}", *(_number(peaks[n] / d) if n in peaks else "-" for n in sizes))
    return table


def _accuracy(report: dict[str, Any]) -> Table:
    on_cpu = all("dtype" not in row for row in report["accuracy"])
    title = f"Median relative error of loss / gradient against float64{', float32 inputs' if on_cpu else ''}"
    table = Table(title=title, box=box.SIMPLE)
    table.add_column("loss")
    table.add_column("temperature", justify="right")
    table.add_column("inputs")
    names = list(dict.fromkeys(row["implementation"] for row in report["accuracy"] if row["status"] == "measured"))
    for name in names:
        table.add_column(TITLES[name], justify="right", no_wrap=True)
    keys = dict.fromkeys((_group(row), row["temperature"], row["kind"]) for row in report["accuracy"])
    found = {(_group(r), r["temperature"], r["kind"], r["implementation"]): r for r in report["accuracy"]}
    for group, temperature, kind in keys:
        loss = group[0] if group[1] is None else f"{group[0]}, D={group[1]}, {group[2]}"
        rows = [found.get((group, temperature, kind, name), {}) for name in names]
        cells = [
            f"{_number(r['loss_error'])} / {_number(r['gradient_error'])}" if "loss_error" in r else "-" for r in rows
        ]
        table.add_row(loss, str(temperature), kind, *cells)
    return table


def goals_table(goals: list[Goal], title: str) -> Table:
    """Goals or floors, those that are not met first; goals on accuracy that are met are only counted."""
    accuracy = [goal for goal in goals if goal.get("accuracy")]
    counted = [goal for goal in accuracy if goal["met"]]
    caption = f"accuracy: {len(counted)} of {len(accuracy)} goals met" if accuracy else None
    goals = [goal for goal in goals if goal not in counted]
    table = Table(title=title, caption=caption, box=box.SIMPLE)
    table.add_column("what")
    table.add_column("asked", justify="right", no_wrap=True)
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    words = {True: "[green]met[/green]", False: "[red]missed[/red]", None: "[yellow]not measured[/yellow]"}
    for goal in sorted(goals, key=lambda goal: {False: 0, None: 1, True: 2}[goal["met"]]):
        measured = "" if goal["value"] is None else _number(goal["value"])
        what = f"{goal['what']} ({goal['reason']})" if goal["reason"] else goal["what"]
        table.add_row(what, f"{goal['sense']} {_number(goal['goal'])}", measured, words[goal["met"]])
    return table


def show(report: dict[str, Any], console: Console) -> None:
    """Print every table that has rows."""
    machine, versions = report["machine"], report["versions"]
    device = f"{machine['gpu']['name']}; " if "gpu" in machine else ""
    described = ", ".join(f"{k} {v}" for k, v in versions.items())
    console.print(f"{device}{machine['cpu']}, {machine['cores']} cores; {described}")
    for group in _groups([row for row in report["timings"] if row["status"] == "measured"]):
        console.print(_timings(report, group))
    for line in _refusals(report):
        console.print(line, style="dim", markup=False)
    for rows, table in (("memory", _memory), ("accuracy", _accuracy)):
        if report[rows]:
            console.print(table(report))
    if "gpu" in machine and any("bytes" in row for row in report["memory"]):
        console.print(_per_row(report))
    large = report["large"]
    if large is not None and large["status"] == "measured":
        console.print(
            f"{LOSSES[large['loss']]}, N={large['n']}: {_number(large['bytes'] / MIB)} MiB beyond the inputs,"
            f" {_number(large['once_ms'] / 1e3)} s, worst of {large['anchors_compared']} anchors"
            f" {_number(large['worst_anchor_error'])} off"
        )
    elif large is not None:
        console.print(f"{LOSSES[large['loss']]}, N={large['n']}: refused: {large['reason']}")
    if report["goals"]:
        console.print(goals_table(report["goals"], "Goals"))


def write_json(report: dict[str, Any], path: Path) -> None:
    """Write the report; figures that are not finite become null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and value - value != 0 else value

    path.write_text(json.dumps(plain(report), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def pyplot() -> Any:
    """The plotting library, for files, without a display.

    Raises:
        Unavailable: it is not installed.
    """
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
    except ImportError as error:
        raise Unavailable(f'the plot needs matplotlib ({error}): pip install "pairproof[bench]"') from None
    matplotlib.use("Agg")
    # Ids in the file come from a salt, not from chance: the same figures give the same file.
    matplotlib.rcParams["svg.hashsalt"] = FORMAT
    return importlib.import_module("matplotlib.pyplot")


def plot(report: dict[str, Any], path: Path) -> None:
    """Time and memory of one step against N, both axes logarithmic, one line per implementation.

    On a GPU one pair of axes for each loss and number of columns, in bfloat16 if the report has it, else per dtype.

    Args:
        report: with timings.
        path: of the file to write; its suffix is the format.

    Raises:
        Unavailable: matplotlib is not installed.
    """
    plt = pyplot()
    order = list(LOSSES)
    groups = sorted(_groups(report["timings"]), key=lambda group: order.index(group[0]))
    groups = [group for group in groups if group[2] == "bfloat16"] or groups
    figure, axes = plt.subplots(len(groups), 2, figsize=(10, 3.6 * len(groups)), squeeze=False, layout="constrained")
    for group, (left, right) in zip(groups, axes, strict=True):
        for name, colour in COLOURS.items():
            style = {"color": colour, "marker": "o", "markersize": 4, "label": TITLES[name]}
            style |= {"linewidth": 2.5, "zorder": 3} if name == OURS else {"linewidth": 1.3}
            style |= {"linestyle": ":"} if name == CAPTURED else {}
            times = sorted(
                (row["n"], row["both_ms"][1])
                for row in report["timings"]
                if (_group(row), row["implementation"], row["regime"]) == (group, name, "default") and "both_ms" in row
            )
            peaks = sorted(
                (row["n"], max(row["bytes"], 1 << 16) / MIB)
                for row in report["memory"]
                if (_group(row), row["implementation"]) == (group, name) and "bytes" in row
            )
            if times:
                left.plot(*zip(*times, strict=True), **style)
            if peaks:
                right.plot(*zip(*peaks, strict=True), **style)
        for axis, quantity in ((left, "ms, forward and backward"), (right, "MiB beyond the inputs")):
            axis.set(xscale="log", yscale="log", xlabel="N", ylabel=quantity, title=_title(group))
            sizes = sorted({row["n"] for row in report["timings"] if _group(row) == group})
            axis.set_xticks(sizes, [str(n) for n in sizes])
            axis.minorticks_off()
            axis.grid(visible=True, alpha=0.3)
            for side in ("top", "right"):
                axis.spines[side].set_visible(False)
        if left.lines:
            left.legend(fontsize="small", frameon=False)
    machine = report["machine"]
    device = machine["gpu"]["name"] if "gpu" in machine else f"{machine['cpu']}, one thread"
    columns = report["protocol"]["columns"]
    shape = "" if isinstance(columns, (list, tuple)) else f", D = {columns}"
    figure.suptitle(f"One step{shape}: {device}, torch {report['versions']['torch']}")
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    figure.savefig(path, metadata=metadata)
    plt.close(figure)
