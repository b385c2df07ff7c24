"""Time tiles near those of the committed table on this device, and write the fastest to a file.

    python -m pairproof.fast.kernels.tune --rows 65536 --columns 128 --dtype bfloat16 --output tiles.json
    PAIRPROOF_KERNEL_TABLE=tiles.json python train.py

Each kernel is timed within the complete pass that contains it. Candidates are timed in turn over several rounds and
compared by their medians, so that a device that slows down affects all of them alike. An existing output file is
extended.

Exit codes: 0, done; 2, wrong usage; 3, no CUDA device on which the kernels run.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engine.spec import Batch, Plan, References, Rule, Targets
from . import evaluation, refusal
from .table import (
    KERNELS,
    LONGEST,
    PLAIN,
    Kernel,
    Key,
    Kind,
    Launch,
    disagreements,
    instead,
    launch_of,
    read,
    violations,
    written,
)

Timer = Callable[[Key, Sequence[Launch]], list[float | None]]
"""Return the milliseconds of each tile of one kernel, None for a tile that does not run."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CLEARLY = 0.98
"""A tile replaces another if it takes at most this fraction of its time; smaller differences are noise."""
STEPS = 3
"""How many times the search continues from the best tile so far."""
MASK_ROWS = 16384
"""Largest number of rows of a batch with a mask, which takes one byte per pair."""


class Timed(NamedTuple):
    """A tile, the milliseconds of the pass with it, and the milliseconds with the tile that the search started from."""

    launch: Launch
    milliseconds: float
    before: float


def candidates(key: Key, launch: Launch) -> list[Launch]:
    """Return a tile and its neighbours: with a size, the warps or both halved or doubled, or one stage more or less.

    All obey the rules of the table, and fit the current tiles of the other kernels of their pass.
    """
    found = [launch]
    for name in ("rows", "columns", "part", "out", "warps"):
        number = getattr(launch, name)
        found += [launch._replace(**{name: other}) for other in (number // 2, number * 2)]
    found += [launch._replace(stages=launch.stages + step) for step in (-1, 1)]
    found += [
        launch._replace(rows=launch.rows // 2, warps=launch.warps // 2),
        launch._replace(rows=launch.rows * 2, warps=launch.warps * 2),
        launch._replace(columns=launch.columns * 2, warps=launch.warps * 2),
    ]
    if not key.kernel.startswith("gradient"):
        found = [one for one in found if one.out == launch.out]
    return [one for one in dict.fromkeys(found) if not violations(key.kernel, one, key.dim) and _fits(key, one)]


def _fits(key: Key, launch: Launch) -> bool:
    """Return whether a tile fits the current tiles of the other kernels of its pass."""
    if key.kernel in PLAIN:
        return not disagreements(key.kernel, launch, _now(key._replace(kernel=PLAIN[key.kernel])))
    return not any(
        disagreements(marked, _now(key._replace(kernel=marked)), launch)
        for marked, plain in PLAIN.items()
        if plain == key.kernel
    )


def _now(key: Key) -> Launch:
    return launch_of(*key)


def best_of(key: Key, timer: Timer) -> Timed:
    """Search for the fastest tile of one kernel, starting from its current tile.

    Args:
        key: the kernel, and what its tile depends on.
        timer: see `Timer`.

    Raises:
        RuntimeError: the current tile does not run.
    """
    best = _now(key)
    before = last = math.inf
    for step in range(STEPS):
        tried = candidates(key, best)
        found = timer(key, tried)
        now = found[0]
        if now is None:
            raise RuntimeError(f"{key.kernel}: the tile {best} does not run on this device")
        before = before if step else now
        last, at = min((time, place) for place, time in enumerate(found) if time is not None)
        if last > CLEARLY * now:
            return Timed(best, now, before)
        best = tried[at]
    return Timed(best, last, before)


def tune(kernels: Sequence[Kernel], kind: Kind, dim: int, capability: int, timer: Timer) -> dict[Key, Timed]:
    """Search for the fastest tiles of some kernels, one after the other; each search uses the tiles already found.

    Args:
        kernels: the kernels, in any order; plain kernels are tuned first.
        kind: how rows are multiplied.
        dim: the padded length of a row.
        capability: the compute capability times ten.
        timer: see `Timer`.
    """
    found: dict[Key, Timed] = {}
    for kernel in sorted(kernels, key=lambda kernel: (kernel in PLAIN, KERNELS.index(kernel))):
        key = Key(kernel, kind, dim, capability)
        with instead({key: timed.launch for key, timed in found.items()}):
            found[key] = best_of(key, timer)
    return found


@dataclass(frozen=True)
class EventTimer:
    """Times passes over a synthetic batch with events on the current stream.

    Attributes:
        rows: N; at most `MASK_ROWS` with a mask.
        columns: D.
        dtype: the dtype of the embeddings.
        tf32: whether float32 rows are multiplied in TF32.
        rounds: how many times each candidate is timed.
        device: the device.
    """

    rows: int
    columns: int
    dtype: torch.dtype
    tf32: bool
    rounds: int
    device: str = "cuda"

    def __call__(self, key: Key, launches: Sequence[Launch]) -> list[float | None]:
        """Return the median time of each tile in milliseconds; None for a tile that does not compile or run."""
        step = self.pass_with(key.kernel)
        times: list[list[float] | None] = []
        for launch in launches:
            with instead({key: launch}):
                try:
                    step()
                    torch.cuda.synchronize()
                except Exception as reason:
                    if "out of memory" in str(reason):
                        raise
                    times.append(None)
                    continue
                times.append([])
        for _ in range(self.rounds):
            for launch, taken in zip(launches, times, strict=True):
                if taken is None:
                    continue
                with instead({key: launch}):
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                    begin.record()
                    step()
                    end.record()
                    end.synchronize()
                    taken.append(begin.elapsed_time(end))
        return [None if taken is None else statistics.median(taken) for taken in times]

    def pass_with(self, kernel: Kernel) -> Callable[[], object]:
        """Return a function that runs the pass of a kernel, on a batch where that kernel does most of the work."""
        marked = kernel in PLAIN
        rows = min(self.rows, MASK_ROWS) if marked else self.rows
        embeddings = torch.randn(rows, self.columns, device=self.device).to(self.dtype)
        labels = torch.arange(rows, device=self.device) // 2
        targets = Targets("mask", labels[:, None] == labels) if marked else Targets("labels", labels)
        rule = Rule("out", "cosine", 0.1, "one_positive" if marked else "all")
        queue: Any = evaluation()
        problem = queue.set_up(Batch(embeddings, targets, rule, References()), Plan("triton", tf32=self.tf32))
        found, stats = queue.forward(problem)
        grad: Tensor = torch.ones_like(found.values)
        if kernel.startswith("gradient"):
            return lambda: queue.backward(problem, grad, stats)
        return lambda: queue.forward(problem)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pairproof.fast.kernels.tune",
        description="Time tiles around the committed table on this device; write the best as a file for"
        " PAIRPROOF_KERNEL_TABLE.",
    )
    parser.add_argument("--rows", type=int, default=65536, help="N (default: %(default)s)")
    parser.add_argument("--columns", type=int, default=128, help="D (default: %(default)s)")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16", help="default: %(default)s")
    parser.add_argument("--tf32", action="store_true", help="float32 rows are multiplied in TF32")
    parser.add_argument("--kernel", choices=KERNELS, action="append", help="tune only this kernel (repeatable)")
    parser.add_argument("--rounds", type=int, default=15, help="timed runs of each candidate (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="JSON file to write or extend")
    return parser


def main(arguments: Sequence[str], timer: Timer | None = None, capability: int | None = None) -> int:
    """Tune the kernels that the command line requests, and print the results.

    Args:
        arguments: the command line.
        timer: replaces the timer of CUDA events.
        capability: replaces the device's compute capability; needed with a timer.

    Returns:
        The exit code.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    dtype = DTYPES[options.dtype]
    if options.tf32 and dtype != torch.float32:
        parser.error(f"--tf32: expected --dtype float32 with it, got {options.dtype}")
    for name, least, most in (("rows", 2, None), ("columns", 1, LONGEST), ("rounds", 1, None)):
        number = getattr(options, name)
        if number < least or (most is not None and number > most):
            parser.error(f"--{name}: expected at least {least}{f', at most {most}' if most else ''}, got {number}")
    device = "no device: an injected timer"
    if timer is None:
        reason = _unusable(dtype)
        if reason is not None:
            sys.stderr.write(f"tune: {reason}\n")
            return 3
        device = torch.cuda.get_device_name()
        timer = EventTimer(options.rows, options.columns, dtype, tf32=options.tf32, rounds=options.rounds)
    if capability is None:
        major, minor = torch.cuda.get_device_capability()
        capability = 10 * major + minor
    queue: Any = evaluation()
    kind: Kind = queue.kind_of(dtype, tf32=options.tf32)
    dim = queue.padded_dim(options.columns)
    held = read(options.output) if options.output is not None and options.output.exists() else {}
    with instead(held):
        found = tune(options.kernel or KERNELS, kind, dim, capability, timer)
    for key, timed in found.items():
        rows, columns, *rest = timed.launch
        tile = f"{rows}x{columns} part {rest[0]} out {rest[1]} warps {rest[2]} stages {rest[3]}"
        sys.stdout.write(f"{key.kernel:16} {tile:48} {timed.milliseconds:9.3f} ms, before {timed.before:9.3f} ms\n")
    if options.output is not None:
        tiles = {**held, **{key: timed.launch for key, timed in found.items()}}
        options.output.write_text(written(tiles, f"{device}, torch {torch.__version__}"))
        sys.stdout.write(f"written: {options.output}\n")
    return 0


def _unusable(dtype: torch.dtype) -> str | None:
    """Return why this device cannot time kernels, or None if it can."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device here, and there is nothing to time without one"
    return refusal(torch.empty((1, 1), dtype=dtype, device="cuda"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
