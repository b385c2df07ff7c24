"""What the figures should reach on a CPU and on an H200, and whether they do.

A ratio is a peer's time over ours, the median of pairs; "best peer" is the one with the smallest ratio. A goal whose
figures are missing is not met and not missed: ``met`` is None and ``reason`` says what is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .peers import OURS, TILED, CrossEntropyTf32

MIB = 1 << 20
GIB = 1 << 30
ULP = 2.0**-23

TWO_VIEW = ("nt_xent", "supcon")


@dataclass(frozen=True)
class Ratio:
    """Ours at least so many times as fast as a peer.

    Attributes:
        n: rows.
        part: "forward" or "both".
        against: a peer's name, or "best".
        goals: by allocator regime.
        losses: to which it applies.
    """

    n: int
    part: str
    against: str
    goals: dict[str, float]
    losses: tuple[str, ...] = TWO_VIEW


def _both(value: float) -> dict[str, float]:
    return {"default": value, "tuned": value}


RATIOS = (
    Ratio(256, "both", "best", _both(1.5)),
    Ratio(256, "forward", "best", _both(1.0)),
    Ratio(1024, "both", "best", _both(3.0)),
    Ratio(1024, "both", "supcontrast", _both(4.0)),
    Ratio(1024, "both", "pml", _both(9.0), ("supcon",)),
    Ratio(4096, "both", "best", {"default": 5.0, "tuned": 3.0}),
    Ratio(4096, "both", "pml", {"default": 12.0, "tuned": 8.0}, ("supcon",)),
    Ratio(256, "both", "pml_ntxent", _both(500.0), ("pairwise_views",)),
    Ratio(256, "both", "pml_ntxent", _both(5000.0), ("pairwise_classes",)),
)

SHARES = {4096: 0.60, 8192: 0.60}
"""Of the same run's matrix product, forward+backward, by number of rows."""

MEMORY = {4096: 12 * MIB, 8192: 20 * MIB}
GROWTH = 2.5
"""Peak at 8192 over peak at 4096: 2 is linear, 4 is quadratic."""

LARGE_MEMORY = GIB
ACCURACY_FACTOR = 2.0
ACCURACY_FLOOR = 4 * ULP

DEVICE_SHARES = {128: {"forward": 0.45, "both": 0.55}, 512: {"both": 0.65}}
"""On an H200 in bfloat16, by number of columns: of the same run's matrix products."""
DEVICE_PRODUCTS = {"share": "torch.mm at the tile's shape", "square_share": "a large square torch.mm"}
DEVICE_LEAST_ROWS = 16384
"""Below, starting kernels is what costs."""
EAGER_RATIO = 12.0
"""In bfloat16 at 128 columns against cross_entropy in TF32, at the sizes where its matrices fit."""
EAGER_ROWS = (16384, 65536)
DEVICE_GROWTH = 1.25
"""Peak per row at the most rows over peak per row at `DEVICE_LEAST_ROWS`: 1 is linear, 16 is quadratic."""

Goal = dict[str, Any]


def _goal(what: str, sense: str, goal: float, value: float | None, reason: str = "", **more: Any) -> Goal:
    met = None if value is None else (value >= goal if sense == "at least" else value <= goal)
    return {"what": what, "sense": sense, "goal": goal, "value": value, "met": met, "reason": reason, **more}


def _row(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any] | None:
    return next((row for row in rows if all(row.get(key) == value for key, value in wanted.items())), None)


def _ratio(report: dict[str, Any], rule: Ratio, loss: str, regime: str) -> tuple[float | None, str]:
    """The smallest median ratio and whose it is, or None and the reason."""
    rows = [r for r in report["timings"] if (r["loss"], r["n"], r["regime"]) == (loss, rule.n, regime)]
    if rule.against != "best":
        rows = [row for row in rows if row["implementation"] == rule.against]
    key = f"{rule.part}_ratio"
    found = {row["implementation"]: row[key][1] for row in rows if key in row}
    if not found:
        return None, next((row["reason"] for row in rows if "reason" in row), "not timed in this run")
    name = min(found, key=lambda peer: found[peer])
    return found[name], name if rule.against == "best" else ""


def ratio_goals(report: dict[str, Any], fraction: float = 1.0) -> list[Goal]:
    """The goals on ratios for the sizes and regimes that were planned, each multiplied by a fraction."""
    goals = []
    for rule in RATIOS:
        for loss in rule.losses:
            for regime, value in rule.goals.items():
                if any((r["loss"], r["n"], r["regime"]) == (loss, rule.n, regime) for r in report["timings"]):
                    ratio, note = _ratio(report, rule, loss, regime)
                    part = "forward" if rule.part == "forward" else "forward+backward"
                    what = f"{loss}, N={rule.n}, {part}, {regime} allocator: times faster than {rule.against}"
                    keys = {"loss": loss, "n": rule.n, "regime": regime}
                    goals.append(_goal(what, "at least", fraction * value, ratio, note, **keys))
    return goals


def memory_goals(report: dict[str, Any], fraction: float = 1.0) -> list[Goal]:
    """The goals on peaks, each divided by a fraction, for the sizes that were planned."""
    goals = []
    for loss in TWO_VIEW:
        peaks = {row["n"]: row for row in report["memory"] if (row["loss"], row["implementation"]) == (loss, OURS)}
        for n, goal in MEMORY.items():
            if n in peaks:
                peak = peaks[n].get("bytes")
                value = None if peak is None else peak / MIB
                what = f"{loss}, N={n}: MiB beyond the inputs, forward+backward"
                goals.append(_goal(what, "at most", goal / fraction / MIB, value, peaks[n].get("reason", "")))
        if all(peaks.get(n, {}).get("bytes") for n in MEMORY):
            value = peaks[8192]["bytes"] / peaks[4096]["bytes"]
            goals.append(_goal(f"{loss}: memory at 8192 over memory at 4096", "at most", GROWTH, value))
    return goals


def _share_goals(report: dict[str, Any]) -> list[Goal]:
    goals = []
    for row in report["timings"]:
        if row["implementation"] == OURS and row["loss"] in TWO_VIEW and row["n"] in SHARES:
            value = row["both_share"][1] if "both_share" in row else None
            what = f"{row['loss']}, N={row['n']}, {row['regime']} allocator: share of the same run's mm"
            goals.append(_goal(what, "at least", SHARES[row["n"]], value, row.get("reason", "")))
    return goals


def _accuracy_goals(report: dict[str, Any]) -> list[Goal]:
    goals = []
    for row in report["accuracy"]:
        if row["implementation"] != OURS:
            continue
        peers = [
            other
            for other in report["accuracy"]
            if other["implementation"] not in (OURS, TILED)
            and other["status"] == "measured"
            and all(other.get(key) == row.get(key) for key in ("loss", "temperature", "kind", "dtype"))
        ]
        dtype = f", {row['dtype']}" if "dtype" in row else ""
        for part in ("loss", "gradient"):
            what = f"{row['loss']}, temperature {row['temperature']}, {row['kind']}{dtype}: error of the {part}"
            value = row.get(f"{part}_error") if row["status"] == "measured" else None
            if not peers:
                goals.append(_goal(what, "at most", ACCURACY_FLOOR, None, "no peer beside it", accuracy=True))
                continue
            best = min(peers, key=lambda peer: float(peer[f"{part}_error"]))
            goal = max(ACCURACY_FACTOR * best[f"{part}_error"], ACCURACY_FLOOR)
            goals.append(_goal(what, "at most", goal, value, row.get("reason", best["implementation"]), accuracy=True))
    return goals


def judge(report: dict[str, Any]) -> list[Goal]:
    """Every goal that the run's plan covers.

    Args:
        report: of `bench.report`, without its goals.

    Returns:
        Objects with ``what``, ``sense`` ("at least" or "at most"), ``goal``, ``value`` (None: not measured), ``met``
        (None: not measured) and ``reason`` (the peer that was best, or what is missing); ``accuracy`` is true for
        those of the accuracy table.
    """
    goals = ratio_goals(report) + _share_goals(report) + memory_goals(report)
    large = report["large"]
    if large is not None:
        peak = large.get("bytes")
        value = None if peak is None else peak / MIB
        what = f"{large['loss']}, N={large['n']}: MiB beyond the inputs, forward+backward"
        goals.append(_goal(what, "at most", LARGE_MEMORY / MIB, value, large.get("reason", "")))
    return goals + _accuracy_goals(report)


def floors(report: dict[str, Any], fraction: float) -> list[Goal]:
    """The goals on ratios and on memory, relaxed by a fraction: 0.5 asks for half a ratio and allows twice a peak."""
    return ratio_goals(report, fraction) + memory_goals(report, fraction)


def judge_device(report: dict[str, Any]) -> list[Goal]:
    """Every goal of a GPU that the run's plan covers, as `judge` gives them. They were set for an H200."""
    ours = [r for r in report["timings"] if r["implementation"] == OURS and r["loss"] in TWO_VIEW]
    narrow = [row for row in ours if row["dtype"] == "bfloat16"]
    goals = []
    for row in narrow:
        if row["n"] >= DEVICE_LEAST_ROWS:
            for part, value in DEVICE_SHARES.get(row["d"], {}).items():
                goals += [_device_share(row, part, key, value) for key in DEVICE_PRODUCTS]
    for row in narrow:
        if row["n"] in EAGER_ROWS and row["d"] == 128:
            goals.append(_eager_goal(report, row))
    return goals + _growth_goals(report) + _accuracy_goals(report)


def _named(row: dict[str, Any]) -> str:
    return f"{row['loss']}, N={row['n']}, D={row['d']}, {row['dtype']}"


def _device_share(row: dict[str, Any], part: str, key: str, goal: float) -> Goal:
    found = row.get(f"{part}_{key}")
    words = {"forward": "forward", "both": "forward+backward"}[part]
    what = f"{_named(row)}, {words}: share of {DEVICE_PRODUCTS[key]}"
    return _goal(what, "at least", goal, None if found is None else found[1], row.get("reason", ""))


def _eager_goal(report: dict[str, Any], row: dict[str, Any]) -> Goal:
    same = {key: row[key] for key in ("loss", "n", "d", "dtype")}
    peer = _row(report["timings"], implementation=CrossEntropyTf32.name, **same) or {}
    found = peer.get("both_ratio")
    what = f"{_named(row)}, forward+backward: times faster than cross_entropy in TF32"
    reason = "" if found is not None else peer.get("reason", "not timed in this run")
    return _goal(what, "at least", EAGER_RATIO, None if found is None else found[1], reason)


def per_row(report: dict[str, Any]) -> dict[tuple[str, int, str], dict[int, float]]:
    """Peaks of ours over the number of rows, in bytes, by loss, columns and dtype, then by rows."""
    found: dict[tuple[str, int, str], dict[int, float]] = {}
    for row in report["memory"]:
        if row["implementation"] == OURS and "bytes" in row:
            found.setdefault((row["loss"], row["d"], row["dtype"]), {})[row["n"]] = row["bytes"] / row["n"]
    return found


def _growth_goals(report: dict[str, Any]) -> list[Goal]:
    goals = []
    for (loss, d, dtype), peaks in per_row(report).items():
        last = max(peaks)
        if last > DEVICE_LEAST_ROWS and DEVICE_LEAST_ROWS in peaks:
            what = f"{loss}, D={d}, {dtype}: peak per row at {last} over that at {DEVICE_LEAST_ROWS}"
            goals.append(_goal(what, "at most", DEVICE_GROWTH, peaks[last] / peaks[DEVICE_LEAST_ROWS]))
    return goals
