"""Run a function in several processes that form a process group of torch.distributed on the gloo backend."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 120


def _run(function: Callable[..., Any], rank: int, world_size: int, folder: Path, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=SECONDS)
    )
    torch.save(function(rank, world_size, *args), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(function: Callable[..., Any], world_size: int, folder: Path, *args: Any) -> list[Any]:
    """Return the results of ``function(rank, world_size, *args)`` on each rank.

    Args:
        function: a function of a module that can be imported; it returns what `torch.save` can store.
        world_size: the number of processes.
        folder: an empty folder.
        args: further arguments.
    """
    # One process imports the modules, and starts no thread; the others are forked from it.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([function.__module__, "torch.distributed.nn", "pairproof.fast"])
    ranks = [
        context.Process(target=_run, args=(function, rank, world_size, folder, args), daemon=True)
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(SECONDS)
    codes = [process.exitcode for process in ranks]
    assert codes == [0] * world_size, f"exit codes of the ranks: {codes}"
    return [torch.load(folder / f"{rank}.pt") for rank in range(world_size)]
