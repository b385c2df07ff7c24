"""What the figures should reach on a CPU and on an H200, and whether they do.

A ratio is a peer's time over ours, the median of pairs; "best peer" is the one with the smallest ratio. A goal whose
figures are missing is not met and not missed: ``met`` is None and ``reason`` says what is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .peers import OURS, TILED, TWO_VIEW

MIB = 1 << 20
GIB = 1 << 30
ULP = 2.0**-23

PARTS = {"forward": "forward", "both": "forward+backward"}


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
Row = dict[str, Any]


def _goal(what: str, sense: str, goal: float, value: float | None, reason: str = "", **more: Any) -> Goal:
    met = None if value is None else (value >= goal if sense == "at least" else value <= goal)
    return {"what": what, "sense": sense, "goal": goal, "value": value, "met": met, "reason": reason, **more}


def _select(rows: list[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def _median(row: Row, key: str) -> float | None:
    return row[key][1] if key in row else None


def _best(rows: list[Row], key: str) -> Row:
    """The row with the smallest median ratio; if none was measured, a row that says why."""
    measured = [row for row in rows if key in row]
    if measured:
        return min(measured, key=lambda row: float(row[key][1]))
    return next((row for row in rows if "reason" in row), {"reason": "not timed in this run"})


def ratio_goals(report: Row, fraction: float = 1.0) -> list[Goal]:
    """The goals on ratios for the sizes and regimes that were planned, each multiplied by a fraction."""
    goals = []
    for rule, loss in [(ratio, loss) for ratio in RATIOS for loss in ratio.losses]:
        for regime, value in rule.goals.items():
            keys = {"loss": loss, "n": rule.n, "regime": regime}
            rows = _select(report["timings"], **keys)
            if rows:
                any_peer = rule.against == "best"
                peers = rows if any_peer else _select(rows, implementation=rule.against)
                row = _best(peers, f"{rule.part}_ratio")
                reason = str(row.get("reason", row.get("implementation", "") if any_peer else ""))
                what = f"{loss}, N={rule.n}, {PARTS[rule.part]}, {regime} allocator: times faster than {rule.against}"
                ratio = _median(row, f"{rule.part}_ratio")
                goals.append(_goal(what, "at least", fraction * value, ratio, reason, **keys))
    return goals


def _memory_goal(row: Row, goal: float) -> Goal:
    value = row["bytes"] / MIB if "bytes" in row else None
    what = f"{row['loss']}, N={row['n']}: MiB beyond the inputs, forward+backward"
    return _goal(what, "at most", goal / MIB, value, row.get("reason", ""))


def memory_goals(report: Row, fraction: float = 1.0) -> list[Goal]:
    """The goals on peaks, each divided by a fraction, for the sizes that were planned."""
    goals = []
    for loss in TWO_VIEW:
        peaks = {row["n"]: row for row in _select(report["memory"], loss=loss, implementation=OURS)}
        goals += [_memory_goal(peaks[n], goal / fraction) for n, goal in MEMORY.items() if n in peaks]
        if all("bytes" in peaks.get(n, {}) for n in MEMORY):
            value = peaks[8192]["bytes"] / peaks[4096]["bytes"]
            goals.append(_goal(f"{loss}: memory at 8192 over memory at 4096", "at most", GROWTH, value))
    return goals


def _ours(report: Row) -> list[Row]:
    return [row for row in report["timings"] if row["implementation"] == OURS and row["loss"] in TWO_VIEW]


def _share_goals(report: Row) -> list[Goal]:
    return [
        _goal(
            f"{row['loss']}, N={row['n']}, {row['regime']} allocator: share of the same run's mm",
            "at least",
            SHARES[row["n"]],
            _median(row, "both_share"),
            row.get("reason", ""),
        )
        for row in _ours(report)
        if row["n"] in SHARES
    ]


def _accuracy_goals(report: Row) -> list[Goal]:
    goals = []
    for row in _select(report["accuracy"], implementation=OURS):
        same = {key: row.get(key) for key in ("loss", "temperature", "kind", "dtype")}
        peers = _select(report["accuracy"], status="measured", **same)
        peers = [peer for peer in peers if peer["implementation"] not in (OURS, TILED)]
        named = f"{row['loss']}, temperature {row['temperature']}, {row['kind']}, {row.get('dtype', 'float32')}"
        for part in ("loss_error", "gradient_error"):
            goal, reason = ACCURACY_FLOOR, "no peer beside it"
            value = row.get(part) if peers else None
            if peers:
                best = min(peers, key=lambda peer: float(peer[part]))
                goal = max(ACCURACY_FACTOR * best[part], ACCURACY_FLOOR)
                reason = str(row.get("reason", best["implementation"]))
            what = f"{named}: error of the {part.removesuffix('_error')}"
            goals.append(_goal(what, "at most", goal, value, reason, accuracy=True))
    return goals


def judge(report: Row) -> list[Goal]:
    """Every goal that the run's plan covers.

    Args:
        report: of `bench.report`, without its goals.

    Returns:
        Objects with ``what``, ``sense`` ("at least" or "at most"), ``goal``, ``value`` (None: not measured), ``met``
        (None: not measured) and ``reason`` (the peer that was best, or what is missing); ``accuracy`` is true for
        those of the accuracy table.
    """
    large = [] if report["large"] is None else [_memory_goal(report["large"], LARGE_MEMORY)]
    return ratio_goals(report) + _share_goals(report) + memory_goals(report) + large + _accuracy_goals(report)


def floors(report: Row, fraction: float) -> list[Goal]:
    """The goals on ratios and on memory, relaxed by a fraction: 0.5 asks for half a ratio and allows twice a peak."""
    return ratio_goals(report, fraction) + memory_goals(report, fraction)


def judge_device(report: Row) -> list[Goal]:
    """Every goal of a GPU that the run's plan covers, as `judge` gives them. They were set for an H200."""
    shares, ratios = [], []
    for row in _select(_ours(report), dtype="bfloat16"):
        keys = {key: row[key] for key in ("loss", "n", "d", "dtype")}
        named = f"{row['loss']}, N={row['n']}, D={row['d']}, {row['dtype']}"
        if row["n"] >= DEVICE_LEAST_ROWS:
            for part, value in DEVICE_SHARES.get(row["d"], {}).items():
                for key, product in DEVICE_PRODUCTS.items():
                    what = f"{named}, {PARTS[part]}: share of {product}"
                    share = _median(row, f"{part}_{key}")
                    shares.append(_goal(what, "at least", value, share, row.get("reason", "")))
        if row["n"] in EAGER_ROWS and row["d"] == 128:
            peer = _best(_select(report["timings"], implementation="cross_entropy_tf32", **keys), "both_ratio")
            what = f"{named}, {PARTS['both']}: times faster than cross_entropy in TF32"
            ratio = _median(peer, "both_ratio")
            ratios.append(_goal(what, "at least", EAGER_RATIO, ratio, peer.get("reason", "")))
    return shares + ratios + _growth_goals(report) + _accuracy_goals(report)


def per_row(report: Row) -> dict[tuple[str, int, str], dict[int, float]]:
    """Peaks of ours over the number of rows, in bytes, by loss, columns and dtype, then by rows."""
    found: dict[tuple[str, int, str], dict[int, float]] = {}
    for row in _select(report["memory"], implementation=OURS):
        if "bytes" in row:
            found.setdefault((row["loss"], row["d"], row["dtype"]), {})[row["n"]] = row["bytes"] / row["n"]
    return found


def _growth_goals(report: Row) -> list[Goal]:
    return [
        _goal(
            f"{loss}, D={d}, {dtype}: peak per row at {max(peaks)} over that at {DEVICE_LEAST_ROWS}",
            "at most",
            DEVICE_GROWTH,
            peaks[max(peaks)] / peaks[DEVICE_LEAST_ROWS],
        )
        for (loss, d, dtype), peaks in per_row(report).items()
        if max(peaks) > DEVICE_LEAST_ROWS and DEVICE_LEAST_ROWS in peaks
    ]
