"""The report: tables on the terminal, JSON, and a plot.

``cpu.json`` (``cuda.json`` on a GPU) is one object:

    format      "pairproof-bench/1"
    date        what --date said, or null
    protocol    device, dtypes, backend, temperature, columns (D), threads, rounds and the allocator's regimes
    machine     cpu, cores, capability, memory, governor, system, libc, load_before; on a GPU also its own facts
    versions    of Python, ours and the installed packages
    timings     one row per loss, n, d (columns), dtype ("tf32": float32 whose products may round to TF32), regime and
                implementation:
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
    memory      one row per loss, n, d, dtype and implementation: status, bytes (peak of forward and backward beyond
                the interpreter, its libraries and the inputs; by the allocator on a GPU) and once_ms (that one step,
                page faults included; absent on a GPU), or reason
    accuracy    one row per loss, d, dtype, temperature, kind ("random", "trained") and implementation: the medians over
                batches of the relative errors as loss_error and gradient_error, and smallest_loss among the true losses
    large       null, or ours at 65536 rows in 10 classes: bytes, once_ms, worst_anchor_error, anchors_compared
    goals       as `bench.goals.judge` gives them, on a GPU `bench.goals.judge_device`
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
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


Group = tuple[str, int, str]
"""Loss, columns and dtype of one table."""


def _group(row: dict[str, Any]) -> Group:
    return row["loss"], row["d"], row["dtype"]


def _named(group: Group, names: Mapping[str, str] = LOSSES) -> str:
    loss, d, dtype = group
    return f"{names.get(loss, loss)}, D={d}, {dtype}"


def _shares(row: dict[str, Any]) -> str:
    """Of forward and backward: of the product at a tile's shape, and on a GPU of the square one too."""
    shares = [f"{100 * row[key][1]:.0f}" for key in ("both_share", "both_square_share") if key in row]
    if not shares:
        return ""
    return f"{shares[0]} % of mm" if len(shares) == 1 else f"{' / '.join(shares)} % of mm / square mm"


def _table(title: str, left: Iterable[str], right: Iterable[str], caption: str | None = None) -> Table:
    """An empty table with columns of words and columns of figures."""
    table = Table(title=title, caption=caption, box=box.SIMPLE)
    for column in left:
        table.add_column(column)
    for column in right:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _timings(report: dict[str, Any], group: Group) -> Table:
    errors = [f"error, {kind}:\nloss / gradient" for kind in KINDS]
    figures = ["forward ms", "f+b ms", "forward ratio", "f+b ratio (quartiles)", *errors]
    table = _table(
        f"{_named(group)}: one step; a ratio is the peer's time over ours",
        ["N", "allocator", "implementation"],
        figures,
    )
    before: tuple[Any, ...] | None = None
    for row in report["timings"]:
        if _group(row) != group or row["status"] != "measured":
            continue
        section = (str(row["n"]), row["regime"])
        if before not in (None, section):
            table.add_section()
        title = TITLES[row["implementation"]]
        table.add_row(
            *(section if section != before else ("", "")),
            f"[bold]{title}[/bold]" if row["implementation"] == OURS else title,
            _middle(row, "forward_ms"),
            _middle(row, "both_ms"),
            _middle(row, "forward_ratio"),
            _spread(row, "both_ratio") or _shares(row),
            *(_errors(row, kind) for kind in KINDS),
        )
        before = section
    return table


def _refusals(report: dict[str, Any]) -> list[str]:
    """What was not timed and why, each reason once."""
    lines: dict[str, dict[str, None]] = {}
    for row in report["timings"]:
        if row["status"] != "measured":
            line = f"{_named(_group(row), {})}, {TITLES[row['implementation']]}: {row['reason']}"
            lines.setdefault(line, {})[str(row["n"])] = None
    return [f"not timed at N={','.join(sizes)}: {line}" for line, sizes in lines.items()]


def _crossed(title: str, left: Iterable[str], cells: Mapping[Any, str], columns: Sequence[str]) -> Table:
    """A table of cells, given by the pair (words of its row, name of its column); "-" where there is none."""
    table = _table(title, left, columns)
    for words in dict.fromkeys(words for words, _ in cells):
        table.add_row(*words, *(cells.get((words, column), "-") for column in columns))
    return table


def _memory(report: dict[str, Any]) -> Table:
    cells = {
        ((_named(_group(row), {}), TITLES[row["implementation"]]), f"N={row['n']}"): _number(row["bytes"] / MIB)
        for row in report["memory"]
        if "bytes" in row
    }
    sizes = [f"N={n}" for n in sorted({row["n"] for row in report["memory"]})]
    title = "Peak memory of forward and backward beyond the inputs, MiB"
    return _crossed(title, ("loss", "implementation"), cells, sizes)


def _per_row(report: dict[str, Any]) -> Table:
    """Memory that is linear in N has the same figure in every column."""
    found = per_row(report)
    cells = {
        ((_named(group, {}),), f"N={n}"): _number(peak / group[1])
        for group, peaks in found.items()
        for n, peak in peaks.items()
    }
    sizes = [f"N={n}" for n in sorted({n for peaks in found.values() for n in peaks})]
    return _crossed(f"Peak memory of {TITLES[OURS]} per row and column of the inputs, bytes", ("loss",), cells, sizes)


def _accuracy(report: dict[str, Any]) -> Table:
    measured = [row for row in report["accuracy"] if row["status"] == "measured"]
    cells = {
        ((_named(_group(r), {}), str(r["temperature"]), r["kind"]), TITLES[r["implementation"]]): (
            f"{_number(r['loss_error'])} / {_number(r['gradient_error'])}"
        )
        for r in measured
    }
    names = list(dict.fromkeys(TITLES[row["implementation"]] for row in measured))
    title = "Median relative error of loss / gradient against float64"
    return _crossed(title, ("loss", "temperature", "inputs"), cells, names)


def goals_table(goals: list[Goal], title: str) -> Table:
    """Goals or floors, those that are not met first; goals on accuracy that are met are only counted."""
    accuracy = [goal for goal in goals if goal.get("accuracy")]
    counted = [goal for goal in accuracy if goal["met"]]
    caption = f"accuracy: {len(counted)} of {len(accuracy)} goals met" if accuracy else None
    goals = [goal for goal in goals if goal not in counted]
    table = _table(title, ["what"], ["goal", "measured", ""], caption)
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
    for group in dict.fromkeys(_group(row) for row in report["timings"] if row["status"] == "measured"):
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
    groups = sorted(dict.fromkeys(map(_group, report["timings"])), key=lambda group: order.index(group[0]))
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
            axis.set(xscale="log", yscale="log", xlabel="N", ylabel=quantity, title=_named(group))
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
    figure.suptitle(f"One step: {device}, torch {report['versions']['torch']}")
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    figure.savefig(path, metadata=metadata)
    plt.close(figure)
