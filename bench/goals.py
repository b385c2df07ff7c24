"""The goals for the measurements on a CPU and on an H200, and whether they are met.

A ratio is the time of plain torch or of a peer divided by that of pairproof, as the median over pairs of neighbouring
timings. The "best" implementation has the smallest ratio. If the measurements for a goal are missing, ``met`` is None
and ``reason`` says what is missing.

A floor is a fraction of a goal on a ratio; for a goal that is not met yet, it is this fraction of the figure in
``missed.json``, so that a regression is noticed. ``python -m bench --quick --record`` writes this file. The floor of a
goal on memory is its limit divided by `MEMORY_FRACTION`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from .forms import CORNERS, RECIPES
from .peers import GIB, NT_XENT, OURS, PAIRWISE, PAIRWISE_CLASSES, PLAIN, SUPCON, TILED, TWO_VIEW

RECORDED_ON, ELSEWHERE = "Intel", 0.75
"""The processors of the figures in `MISSED`, and the factor of floors on ratios on all other processors."""

MISSED = Path(__file__).with_name("missed.json")
"""The figures of goals on ratios that are not met yet, by the description of the goal."""

MIB = 1 << 20
ULP = 2.0**-23

PARTS = {"forward": "forward", "both": "forward+backward"}


PLAIN_RATIOS = {
    "labels": {1024: 2.0, 4096: 3.0},
    "masks": {1024: 1.0, 4096: 1.8},
    "both directions": {1024: 1.8, 4096: 2.8},
    "one direction": {1024: 1.3, 4096: 1.5},
    "bank of 65536": {64: 1.2, 256: 1.3},
}
"""Goals for forward+backward relative to plain torch, by `forms.Recipe.group` and number of rows.

The goal is 1 at other numbers of rows, and for the forms in `forms.CORNERS`. The forward pass has the goal 1 from
`FORWARD_ROWS` rows on.
"""

FORWARD_ROWS = 128
FORWARD_BEHIND_MS = 0.06
"""Goal for the forward pass on fewer rows: at most this much slower than plain torch."""

RATIOS = (
    (256, "both", "best", TWO_VIEW, 1.5, 1.5),
    (256, "forward", "best", TWO_VIEW, 1.0, 1.0),
    (1024, "both", "best", TWO_VIEW, 3.0, 3.0),
    (1024, "both", "supcontrast", TWO_VIEW, 4.0, 4.0),
    (1024, "both", "pml", (SUPCON,), 9.0, 9.0),
    (4096, "both", "best", TWO_VIEW, 5.0, 3.0),
    (4096, "both", "pml", (SUPCON,), 12.0, 8.0),
    (256, "both", "pml_ntxent", (PAIRWISE,), 500.0, 500.0),
    (256, "both", "pml_ntxent", (PAIRWISE_CLASSES,), 5000.0, 5000.0),
)
"""Number of rows, part of the step, peer, forms, and the goals in the two regimes of `jobs.REGIMES`."""

SHARES = {4096: {SUPCON: 0.80, NT_XENT: 0.60}, 8192: dict.fromkeys(TWO_VIEW, 0.60)}
"""Goals for forward+backward as a share of the throughput of torch.mm in the same run, by number of rows."""
OTHER_SHARE = 0.55
"""The same for every other form at 4096 rows."""

MEMORY = {4096: 12 * MIB, 8192: 20 * MIB}
"""Goals for the peak memory of `TWO_VIEW` by number of rows; for every other form, one float32 matrix N x N."""
MEMORY_FRACTION = 0.8
"""Memory hardly depends on the processor, so its floors are stricter than those of ratios."""
GROWTH = 2.5
"""Goal for the peak memory at 8192 rows divided by that at 4096: linear memory gives 2, quadratic memory 4."""

LARGE_MEMORY = GIB
"""Goal for the peak memory of the step with `jobs.LARGE` rows."""
ACCURACY_FACTOR = 2.0
ACCURACY_FLOOR = 4 * ULP
"""Goal for an error: at most `ACCURACY_FACTOR` times the smallest error of plain torch and the peers, or this floor if
it is larger."""

DEVICE_SHARES = {128: {"forward": 0.45, "both": 0.55}, 512: {"both": 0.65}}
"""Goals on an H200 in bfloat16 as shares of the throughput of torch.mm in the same run, by number of columns."""
DEVICE_PRODUCTS = {"share": "torch.mm at the tile's shape", "square_share": "a large square torch.mm"}
DEVICE_LEAST_ROWS = 16384
"""Smallest number of rows with a goal; in smaller batches, the overhead of kernel launches dominates."""
EAGER_RATIO = 12.0
"""Goal for the speedup in bfloat16 at 128 columns over cross_entropy in TF32, at sizes whose matrices fit in memory."""
EAGER_ROWS = (16384, 65536)
DEVICE_GROWTH = 1.25
"""Goal for the peak memory per row at the largest number of rows, divided by that at `DEVICE_LEAST_ROWS`.

Linear memory gives 1; quadratic memory gives the ratio of the numbers of rows, 16.
"""

Goal = dict[str, Any]
Row = dict[str, Any]


def _goal(what: str, sense: str, goal: float, row: Row, key: str, unit: float = 1.0, **more: Any) -> Goal:
    """Judge one entry of a row, in the given unit; of a list of quartiles, the median is judged."""
    value = row.get(key)
    if value is not None:
        value = (value[1] if isinstance(value, list) else value) / unit
    met = None if value is None else (value >= goal if sense == "at least" else value <= goal)
    found = {"what": what, "sense": sense, "goal": goal, "value": value, "met": met}
    return found | {"reason": row.get("reason", "")} | more


def _select(rows: list[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def _best(rows: list[Row], key: str) -> Row:
    """Return the row with the smallest median ratio; if none was measured, a row with the reason."""
    measured = [row for row in rows if key in row]
    if measured:
        return min(measured, key=lambda row: float(row[key][1]))
    return next((row for row in rows if "reason" in row), {"reason": "not timed in this run"})


def _plain_goal(row: Row, part: str) -> float:
    recipe = RECIPES[row["form"]]
    if part == "both" and row["form"] not in CORNERS:
        return PLAIN_RATIOS[recipe.group].get(row["n"], 1.0)
    if part == "both" or row["n"] >= FORWARD_ROWS or "forward_ms" not in row:
        return 1.0
    return float(row["forward_ms"][1] / (row["forward_ms"][1] + FORWARD_BEHIND_MS))


def _ratio_goal(row: Row, part: str, against: str, goal: float, **more: Any) -> Goal:
    keys = {key: row[key] for key in ("form", "n", "regime")}
    what = "{form}, N={n}, {}, {regime} allocator: times faster than {}".format(PARTS[part], against, **keys)
    return _goal(what, "at least", goal, row, f"{part}_ratio", part=part, against=against, **keys) | more


def ratio_goals(report: Row) -> list[Goal]:
    """Judge the goals on ratios for the measured forms, sizes and allocator regimes."""
    rows = _select(report["timings"], implementation=PLAIN)
    goals = [_ratio_goal(row, part, PLAIN, _plain_goal(row, part)) for row, part in product(rows, PARTS)]
    for n, part, against, forms, *values in RATIOS:
        for form, (regime, value) in product(forms, zip(("default", "tuned"), values, strict=True)):
            keys: dict[str, Any] = {"form": form, "n": n, "regime": regime}
            rows = [row for row in _select(report["timings"], **keys) if row["implementation"] != OURS]
            if rows := rows if against == "best" else _select(rows, implementation=against):
                row = _best(rows, f"{part}_ratio")
                best = {"reason": row["implementation"]} if against == "best" and "reason" not in row else {}
                goals.append(_ratio_goal({**row, **keys}, part, against, value, **best))
    return goals


def _memory_goal(row: Row, goal: float) -> Goal:
    what = f"{row['form']}, N={row['n']}: MiB beyond the inputs, forward+backward"
    return _goal(what, "at most", goal / MIB, row, "bytes", MIB)


def _growth_goal(what: str, goal: float, growth: float) -> Goal:
    return _goal(what, "at most", goal, {"growth": growth}, "growth")


def memory_goals(report: Row, fraction: float = 1.0) -> list[Goal]:
    """Judge the goals on peak memory for the measured sizes; limits in bytes are divided by a fraction."""
    goals = []
    for form in dict.fromkeys(row["form"] for row in report["memory"]):
        peaks = {row["n"]: row for row in _select(report["memory"], form=form, implementation=OURS)}
        limits = MEMORY if form in TWO_VIEW else {n: 4 * n * n for n in MEMORY}
        goals += [_memory_goal(peaks[n], goal / fraction) for n, goal in limits.items() if n in peaks]
        if all("bytes" in peaks.get(n, {}) for n in MEMORY):
            growth = peaks[8192]["bytes"] / max(1, peaks[4096]["bytes"])
            goals.append(_growth_goal(f"{form}: memory at 8192 divided by that at 4096", GROWTH, growth))
    return goals


def _share_goals(report: Row) -> list[Goal]:
    goals = []
    for row in _select(report["timings"], implementation=OURS):
        goal = SHARES.get(row["n"], {}).get(row["form"], OTHER_SHARE if row["n"] == 4096 else None)
        if goal is not None and row["form"] not in CORNERS:
            what = "{form}, N={n}, {regime} allocator: share of mm in the same run".format_map(row)
            goals.append(_goal(what, "at least", goal, row, "both_share"))
    return goals


def _accuracy_goals(report: Row) -> list[Goal]:
    goals = []
    for row in _select(report["accuracy"], implementation=OURS):
        same = {key: row.get(key) for key in ("form", "temperature", "kind", "dtype")}
        peers = _select(report["accuracy"], status="measured", **same)
        peers = [peer for peer in peers if peer["implementation"] not in (OURS, TILED)]
        named = f"{row['form']}, temperature {row['temperature']}, {row['kind']}, {row.get('dtype', 'float32')}"
        for part in ("loss", "gradient"):
            what, key = f"{named}: error of the {part}", f"{part}_error"
            goal, judged = ACCURACY_FLOOR, {"reason": "no peer was measured"}
            if peers:
                best = min(peers, key=lambda peer: float(peer[key]))
                goal, judged = max(ACCURACY_FACTOR * best[key], goal), {"reason": best["implementation"]} | row
            goals.append(_goal(what, "at most", goal, judged, key))
    return goals


def judge(report: Row) -> list[Goal]:
    """Judge every goal that the plan of the run covers.

    Args:
        report: the report that `bench.report` describes, without its goals.

    Returns:
        Objects with ``what``, ``sense`` ("at least" or "at most"), ``goal``, ``value`` (None: not measured), ``met``
        (None: not measured) and ``reason`` (the best peer, or what is missing); for goals on ratios also ``form``,
        ``n``, ``regime``, ``part`` and ``against``.
    """
    large = [_memory_goal(report["large"], LARGE_MEMORY)] if report["large"] else []
    return ratio_goals(report) + _share_goals(report) + memory_goals(report) + large + _accuracy_goals(report)


def fraction_on(processor: str, fraction: float) -> float:
    """Return the fraction of the goals on ratios that is the floor on a processor with this name."""
    return fraction * (1.0 if RECORDED_ON in processor else ELSEWHERE)


def floors(report: Row, fraction: float, missed: Mapping[str, float]) -> list[Goal]:
    """Judge the floors: the goals on ratios and memory, relaxed.

    Args:
        report: the report that `bench.report` describes, without its goals.
        fraction: 0.8 lowers the goals on ratios by a fifth. Limits in bytes are divided by `MEMORY_FRACTION`; `GROWTH`
            is unchanged.
        missed: the content of `MISSED`. The floor of a goal in it is the fraction of its figure or of the goal,
            whichever is lower.

    Returns:
        The same objects as `judge`.
    """
    found = []
    for goal in ratio_goals(report):
        figure = missed.get(goal["what"])
        limit = fraction * (goal["goal"] if figure is None else min(figure, goal["goal"]))
        note = "" if figure is None else f" (floor of a goal that is not met yet, {goal['goal']:.3g})"
        met = None if goal["value"] is None else goal["value"] >= limit
        found.append(goal | {"what": goal["what"] + note, "goal": limit, "met": met})
    return found + memory_goals(report, MEMORY_FRACTION)


def judge_device(report: Row) -> list[Goal]:
    """Judge every GPU goal that the plan of the run covers, as `judge` does for the CPU. The goals are for an H200."""
    shares, ratios, growths = [], [], []
    for row in _select(report["timings"], implementation=OURS, dtype="bfloat16"):
        if row["form"] not in TWO_VIEW:
            continue
        named = "{form}, N={n}, D={d}, {dtype}".format_map(row)
        if row["n"] >= DEVICE_LEAST_ROWS:
            for (part, value), (key, name) in product(DEVICE_SHARES.get(row["d"], {}).items(), DEVICE_PRODUCTS.items()):
                what = f"{named}, {PARTS[part]}: share of {name}"
                shares.append(_goal(what, "at least", value, row, f"{part}_{key}"))
        if row["n"] in EAGER_ROWS and row["d"] == 128:
            same = {key: row[key] for key in ("form", "n", "d", "dtype")}
            peer = _best(_select(report["timings"], implementation="cross_entropy_tf32", **same), "both_ratio")
            what = f"{named}, {PARTS['both']}: times faster than cross_entropy in TF32"
            ratios.append(_goal(what, "at least", EAGER_RATIO, peer, "both_ratio"))
    for (form, d, dtype), peaks in per_row(report).items():
        most, least = max(peaks), DEVICE_LEAST_ROWS
        if most > least and least in peaks:
            what = f"{form}, D={d}, {dtype}: peak per row at {most} divided by that at {least}"
            growths.append(_growth_goal(what, DEVICE_GROWTH, peaks[most] / peaks[least]))
    return shares + ratios + growths + _accuracy_goals(report)


def per_row(report: Row) -> dict[tuple[str, int, str], dict[int, float]]:
    """Return the peak memory of pairproof per row, in bytes, by form, columns and dtype, then by number of rows."""
    found: dict[tuple[str, int, str], dict[int, float]] = {}
    for row in _select(report["memory"], implementation=OURS):
        if "bytes" in row:
            found.setdefault((row["form"], row["d"], row["dtype"]), {})[row["n"]] = row["bytes"] / row["n"]
    return found
