"""Measure the time, memory and traffic of losses on the ranks of a group.

    .venv/bin/python tools/measure_ranks.py --world 2 4 --rows 2048 --dim 128

The ranks use gloo and one thread each. Each line of output is for one loss, number of ranks and path:

- the milliseconds of a step (forward and backward);
- the peak memory of the tensors that rank 0 allocates in a step;
- the bytes that a rank sends in a step, if collective operations are rings.

Memory and bytes are relative to N D numbers, the rows of all ranks. A path is a way to exchange rows:

    coefficients  gathers rows, and later the coefficients of the gradient (`pairproof.fast.engine.shared`); the
                  default of supcon and nt_xent
    gradients     gathers rows with a gradient; the default of other losses
    ring          passes rows from rank to rank (`Ring`)
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pairproof.fast import (
    Ring,
    distributed,
    info_nce_loss,
    nt_xent_loss,
    nt_xent_pairwise_loss,
    sigmoid_loss,
    stacked_partners,
    supcon_loss,
)
from pairproof.fast.engine import shared

FACTORS: dict[str, Callable[[int], float]] = {
    "all_gather": lambda world: world - 1,
    "reduce_scatter": lambda world: (world - 1) / world,
    "all_reduce": lambda world: 2 * (world - 1) / world,
    "ring": lambda world: 1,
}
"""Bytes that a rank sends in a ring / bytes of the operation's argument."""
PATHS = {
    "supcon": ("coefficients", "gradients", "ring"),
    "nt_xent": ("coefficients", "gradients", "ring"),
    "nt_xent_pairwise": ("gradients", "ring"),
    "info_nce": ("gradients", "ring"),
    "sigmoid": ("gradients",),
}


def step(loss: str, rows: Tensor, group: Ring | str) -> None:
    """Run one step of a loss on the rows of this rank."""
    n = len(rows)
    if loss == "supcon":
        value = supcon_loss(rows, torch.arange(n) % 10, temperature=0.1, group=group)
    elif loss == "nt_xent":
        value = nt_xent_loss(rows, stacked_partners(n), temperature=0.1, group=group)
    elif loss == "nt_xent_pairwise":
        value = nt_xent_pairwise_loss(rows, torch.arange(n) % 10, temperature=0.1, group=group)
    elif loss == "info_nce":
        value = info_nce_loss(rows[: n // 2], rows[n // 2 :], temperature=0.1, group=group)
    else:
        value = sigmoid_loss(rows[: n // 2], rows[n // 2 :], temperature=0.1, group=group)
    torch.autograd.grad(value, rows)


def largest(run: Callable[[], None]) -> int:
    """Return the peak memory of all tensors that a function allocates, in bytes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    size = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            size += event.nbytes()
            most = max(most, size)
    return most


def measure(rank: int, world: int, losses: Sequence[str], total: int, dim: int, rounds: int, folder: str) -> None:
    """Measure all losses in one process; rank 0 prints."""
    warnings.filterwarnings("ignore", "torch.distributed.* is deprecated", FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{world}", rank=rank, world_size=world)
    n = total // world
    rows = torch.randn(n, dim, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    sent: list[tuple[str, float]] = []
    collective, to_the_next, suits = distributed._collective, distributed._to_the_next, shared.suits

    def counted(kind: str, found: Tensor, given: Tensor, group: Any) -> None:
        sent.append((kind, given.numel() * given.element_size() * FACTORS[kind](world)))
        collective(kind, found, given, group)

    def passed(tensors: Sequence[Tensor], found: Sequence[Tensor], group: Any) -> Callable[[], None]:
        sent.extend(("ring", tensor.numel() * tensor.element_size() * FACTORS["ring"](world)) for tensor in tensors)
        return to_the_next(tensors, found, group)

    distributed._collective, distributed._to_the_next = counted, passed
    whole = total * dim * rows.element_size()
    for loss in losses:
        times: dict[str, list[float]] = {path: [] for path in PATHS[loss]}
        traffic, memory = {}, {}
        for number in range(rounds + 1):
            for path in PATHS[loss]:
                shared.suits = suits if path == "coefficients" else lambda *_: False
                group = Ring() if path == "ring" else "world"
                sent.clear()
                dist.barrier()
                if number == 0:
                    memory[path] = largest(lambda loss=loss, group=group: step(loss, rows, group))  # type: ignore[misc]
                    traffic[path] = {kind: sum(size for k, size in sent if k == kind) for kind, _ in sent}
                    continue
                start = time.perf_counter()
                step(loss, rows, group)
                times[path].append(time.perf_counter() - start)
        for path in PATHS[loss]:
            if rank == 0:
                words = ", ".join(f"{kind} {size:,.0f} B" for kind, size in traffic[path].items())
                share = sum(traffic[path].values()) / whole
                took = statistics.median(times[path]) * 1e3
                held = f"holds {memory[path] / whole:6.3f} N D, sends {share:6.3f} N D"
                print(f"{loss:16} {world} ranks {path:13} {took:8.1f} ms   {held}: {words}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Start the processes of each world size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks")
    parser.add_argument("--rows", type=int, default=2048, help="rows of all ranks together")
    parser.add_argument("--dim", type=int, default=128, help="columns")
    parser.add_argument("--rounds", type=int, default=7, help="steps of each path that are timed")
    parser.add_argument("--loss", nargs="+", choices=PATHS, default=list(PATHS), help="losses")
    options = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would print when it starts and stops
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        for world in options.world:
            given = (world, options.loss, options.rows, options.dim, options.rounds, folder)
            processes = [context.Process(target=measure, args=(rank, *given)) for rank in range(world)]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            assert not any(process.exitcode for process in processes), "a rank failed"


if __name__ == "__main__":
    main()
