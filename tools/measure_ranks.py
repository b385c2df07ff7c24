"""Measure what the ranks of a group send, and how long they take, for losses with and without exchanged gradients.

    .venv/bin/python tools/measure_ranks.py --world 2 4 --rows 2048 --dim 128

Each line is one loss on one number of ranks, on this machine, with gloo and one thread per rank: the milliseconds of a
step, forward and backward, and the bytes that a rank sends in it if collective operations are rings, also as a share of
N D numbers, the rows of all ranks. The path "coefficients" is the default; the path "gradients" gathers rows with a
gradient, as losses do whose positives are not symmetric. Both are measured alternately.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pairproof.fast import distributed, info_nce_loss, nt_xent_loss, sigmoid_loss, stacked_partners, supcon_loss
from pairproof.fast.engine import shared

FACTORS: dict[str, Callable[[int], float]] = {
    "all_gather": lambda world: world - 1,
    "reduce_scatter": lambda world: (world - 1) / world,
    "all_reduce": lambda world: 2 * (world - 1) / world,
}
"""What a rank sends in a ring, relative to the size of its argument."""
LOSSES = ("supcon", "nt_xent", "info_nce", "sigmoid")


def step(loss: str, rows: Tensor) -> None:
    """Run one step of a loss on the rows of this rank."""
    n = len(rows)
    if loss == "supcon":
        value = supcon_loss(rows, torch.arange(n) % 10, temperature=0.1, group="world")
    elif loss == "nt_xent":
        value = nt_xent_loss(rows, stacked_partners(n), temperature=0.1, group="world")
    elif loss == "info_nce":
        value = info_nce_loss(rows[: n // 2], rows[n // 2 :], temperature=0.1, group="world")
    else:
        value = sigmoid_loss(rows[: n // 2], rows[n // 2 :], temperature=0.1, group="world")
    torch.autograd.grad(value, rows)


def measure(rank: int, world: int, total: int, dim: int, rounds: int, folder: str) -> None:
    """Measure all losses in one process; rank 0 prints."""
    warnings.filterwarnings("ignore", "torch.distributed.* is deprecated", FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{world}", rank=rank, world_size=world)
    n = total // world
    rows = torch.randn(n, dim, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    sent: list[tuple[str, float]] = []
    collective, suits = distributed._collective, shared.suits

    def counted(kind: str, found: Tensor, given: Tensor, group: Any) -> None:
        sent.append((kind, given.numel() * given.element_size() * FACTORS[kind](world)))
        collective(kind, found, given, group)

    distributed._collective = counted
    for loss in LOSSES:
        paths = {"coefficients": suits, "gradients": lambda *_: False}
        if loss in ("info_nce", "sigmoid"):
            del paths["coefficients"]
        times: dict[str, list[float]] = {path: [] for path in paths}
        traffic = {}
        for _ in range(rounds + 1):
            for path, chosen in paths.items():
                shared.suits = chosen
                sent.clear()
                dist.barrier()
                start = time.perf_counter()
                step(loss, rows)
                times[path].append(time.perf_counter() - start)
                traffic[path] = {kind: sum(size for k, size in sent if k == kind) for kind, _ in sent}
        for path in paths:
            if rank == 0:
                words = ", ".join(f"{kind} {size:,.0f} B" for kind, size in traffic[path].items())
                share = sum(traffic[path].values()) / (total * dim * rows.element_size())
                took = statistics.median(times[path][1:]) * 1e3
                print(f"{loss:9} {world} ranks {path:13} {took:8.1f} ms   {share:6.3f} N D: {words}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Start the processes of each world size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks")
    parser.add_argument("--rows", type=int, default=2048, help="rows of all ranks together")
    parser.add_argument("--dim", type=int, default=128, help="columns")
    parser.add_argument("--rounds", type=int, default=7, help="steps of each path that are timed")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        for world in options.world:
            given = (world, options.rows, options.dim, options.rounds, folder)
            processes = [context.Process(target=measure, args=(rank, *given)) for rank in range(world)]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            assert not any(process.exitcode for process in processes), "a rank failed"


if __name__ == "__main__":
    main()
