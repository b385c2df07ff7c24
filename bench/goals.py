"""The goals for the measurements on a CPU and on an H200, and whether they are met.

A ratio is the time of a peer divided by that of pairproof, as the median over pairs. The "best" peer has the smallest
ratio. If the measurements for a goal are missing, ``met`` is None and ``reason`` says what is missing.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from .peers import GIB, OURS, TILED, TWO_VIEW

MIB = 1 << 20
ULP = 2.0**-23

PARTS = {"forward": "forward", "both": "forward+backward"}


RATIOS = (
    (256, "both", "best", TWO_VIEW, 1.5, 1.5),
    (256, "forward", "best", TWO_VIEW, 1.0, 1.0),
    (1024, "both", "best", TWO_VIEW, 3.0, 3.0),
    (1024, "both", "supcontrast", TWO_VIEW, 4.0, 4.0),
    (1024, "both", "pml", ("supcon",), 9.0, 9.0),
    (4096, "both", "best", TWO_VIEW, 5.0, 3.0),
    (4096, "both", "pml", ("supcon",), 12.0, 8.0),
    (256, "both", "pml_ntxent", ("pairwise_views",), 500.0, 500.0),
    (256, "both", "pml_ntxent", ("pairwise_classes",), 5000.0, 5000.0),
)
"""Number of rows, part of the step, peer, losses, and the goals with the default and the tuned allocator."""

SHARES = {4096: 0.60, 8192: 0.60}
"""Goal for forward+backward as a share of the matrix product in the same run, by number of rows."""

MEMORY = {4096: 12 * MIB, 8192: 20 * MIB}
GROWTH = 2.5
"""Goal for the peak memory at 8192 rows divided by that at 4096: linear memory gives 2, quadratic memory 4."""

LARGE_MEMORY = GIB
ACCURACY_FACTOR = 2.0
ACCURACY_FLOOR = 4 * ULP

DEVICE_SHARES = {128: {"forward": 0.45, "both": 0.55}, 512: {"both": 0.65}}
"""Goals on an H200 in bfloat16 as shares of the matrix products in the same run, by number of columns."""
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


def ratio_goals(report: Row, fraction: float = 1.0) -> list[Goal]:
    """Judge the goals on ratios for the measured sizes and allocator regimes, each goal multiplied by a fraction."""
    goals = []
    for n, part, against, losses, *values in RATIOS:
        for loss, (regime, value) in product(losses, zip(("default", "tuned"), values, strict=True)):
            keys: dict[str, Any] = {"loss": loss, "n": n, "regime": regime}
            if rows := _select(report["timings"], **keys):
                key = f"{part}_ratio"
                row = _best(rows if against == "best" else _select(rows, implementation=against), key)
                what = f"{loss}, N={n}, {PARTS[part]}, {regime} allocator: times faster than {against}"
                goals.append(_goal(what, "at least", fraction * value, row, key, **keys))
                if against == "best" and "reason" not in row:
                    goals[-1]["reason"] = row["implementation"]
    return goals


def _memory_goal(row: Row, goal: float) -> Goal:
    what = f"{row['loss']}, N={row['n']}: MiB beyond the inputs, forward+backward"
    return _goal(what, "at most", goal / MIB, row, "bytes", MIB)


def _growth_goal(what: str, goal: float, growth: float) -> Goal:
    return _goal(what, "at most", goal, {"growth": growth}, "growth")


def memory_goals(report: Row, fraction: float = 1.0) -> list[Goal]:
    """Judge the goals on peak memory for the measured sizes, each goal divided by a fraction."""
    goals = []
    for loss in TWO_VIEW:
        peaks = {row["n"]: row for row in _select(report["memory"], loss=loss, implementation=OURS)}
        goals += [_memory_goal(peaks[n], goal / fraction) for n, goal in MEMORY.items() if n in peaks]
        if all("bytes" in peaks.get(n, {}) for n in MEMORY):
            growth = peaks[8192]["bytes"] / peaks[4096]["bytes"]
            goals.append(_growth_goal(f"{loss}: memory at 8192 divided by that at 4096", GROWTH, growth))
    return goals


def _ours(report: Row, **wanted: Any) -> list[Row]:
    return [row for row in _select(report["timings"], implementation=OURS, **wanted) if row["loss"] in TWO_VIEW]


def _share_goals(report: Row) -> list[Goal]:
    what = "{loss}, N={n}, {regime} allocator: share of mm in the same run"
    rows = [row for row in _ours(report) if row["n"] in SHARES]
    return [_goal(what.format_map(row), "at least", SHARES[row["n"]], row, "both_share") for row in rows]


def _accuracy_goals(report: Row) -> list[Goal]:
    goals = []
    for row in _select(report["accuracy"], implementation=OURS):
        same = {key: row.get(key) for key in ("loss", "temperature", "kind", "dtype")}
        peers = _select(report["accuracy"], status="measured", **same)
        peers = [peer for peer in peers if peer["implementation"] not in (OURS, TILED)]
        named = f"{row['loss']}, temperature {row['temperature']}, {row['kind']}, {row.get('dtype', 'float32')}"
        for part in ("loss", "gradient"):
            what, key = f"{named}: error of the {part}", f"{part}_error"
            goal, judged = ACCURACY_FLOOR, {"reason": "no peer was measured"}
            if peers:
                best = min(peers, key=lambda peer: float(peer[key]))
                goal, judged = max(ACCURACY_FACTOR * best[key], goal), {"reason": best["implementation"]} | row
            goals.append(_goal(what, "at most", goal, judged, key, accuracy=True))
    return goals


def judge(report: Row) -> list[Goal]:
    """Judge every goal that the plan of the run covers.

    Args:
        report: the report that `bench.report` describes, without its goals.

    Returns:
        Objects with ``what``, ``sense`` ("at least" or "at most"), ``goal``, ``value`` (None: not measured), ``met``
        (None: not measured) and ``reason`` (the best peer, or what is missing); ``accuracy`` is true for goals of the
        accuracy table.
    """
    large = [_memory_goal(report["large"], LARGE_MEMORY)] if report["large"] else []
    return ratio_goals(report) + _share_goals(report) + memory_goals(report) + large + _accuracy_goals(report)


def floors(report: Row, fraction: float) -> list[Goal]:
    """Judge the goals on ratios and memory, relaxed by a fraction: 0.5 halves ratios and doubles limits on memory."""
    return ratio_goals(report, fraction) + memory_goals(report, fraction)


def judge_device(report: Row) -> list[Goal]:
    """Judge every GPU goal that the plan of the run covers, as `judge` does for the CPU. The goals are for an H200."""
    shares, ratios, growths = [], [], []
    for row in _ours(report, dtype="bfloat16"):
        named = "{loss}, N={n}, D={d}, {dtype}".format_map(row)
        if row["n"] >= DEVICE_LEAST_ROWS:
            for (part, value), (key, name) in product(DEVICE_SHARES.get(row["d"], {}).items(), DEVICE_PRODUCTS.items()):
                what = f"{named}, {PARTS[part]}: share of {name}"
                shares.append(_goal(what, "at least", value, row, f"{part}_{key}"))
        if row["n"] in EAGER_ROWS and row["d"] == 128:
            same = {key: row[key] for key in ("loss", "n", "d", "dtype")}
            peer = _best(_select(report["timings"], implementation="cross_entropy_tf32", **same), "both_ratio")
            what = f"{named}, {PARTS['both']}: times faster than cross_entropy in TF32"
            ratios.append(_goal(what, "at least", EAGER_RATIO, peer, "both_ratio"))
    for (loss, d, dtype), peaks in per_row(report).items():
        most, least = max(peaks), DEVICE_LEAST_ROWS
        if most > least and least in peaks:
            what = f"{loss}, D={d}, {dtype}: peak per row at {most} divided by that at {least}"
            growths.append(_growth_goal(what, DEVICE_GROWTH, peaks[most] / peaks[least]))
    return shares + ratios + growths + _accuracy_goals(report)


def per_row(report: Row) -> dict[tuple[str, int, str], dict[int, float]]:
    """Return the peak memory of pairproof per row, in bytes, by loss, columns and dtype, then by number of rows."""
    found: dict[tuple[str, int, str], dict[int, float]] = {}
    for row in _select(report["memory"], implementation=OURS):
        if "bytes" in row:
            found.setdefault((row["loss"], row["d"], row["dtype"]), {})[row["n"]] = row["bytes"] / row["n"]
    return found
