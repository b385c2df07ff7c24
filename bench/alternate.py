"""Time two implementations in turn, for the benchmarks of `pairproof.compat`."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping

from .measure import Clock

SECONDS = 1.0
"""Approximate duration of a comparison in seconds; slow steps take longer."""
LEAST = 7
"""Minimum number of samples of each implementation."""
SAMPLE = 0.01
"""Approximate duration of a sample of the slower step, in seconds. Short steps are repeated."""


def alternated(steps: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Sample two steps in turn, in alternating order.

    Args:
        steps: forward and backward of "theirs" and of "ours".

    Returns:
        "theirs" and "ours": the median times in milliseconds. "ratio": the median of theirs / ours over pairs of
        neighbouring samples.
    """
    clock = Clock()
    slowest = max(clock.call(step, 3) for step in steps.values())
    repeats = max(1, int(SAMPLE / slowest))
    samples: dict[str, list[float]] = {side: [] for side in steps}
    gc.disable()
    for turn in range(max(LEAST, int(SECONDS / (2 * slowest * repeats)))):
        for side in sorted(steps, reverse=bool(turn % 2)):
            samples[side].append(clock.call(steps[side], repeats))
    ratios = [one / other for one, other in zip(samples["theirs"], samples["ours"], strict=True)]
    medians = {side: 1e3 * statistics.median(times) for side, times in samples.items()}
    return {**medians, "ratio": statistics.median(ratios)}
