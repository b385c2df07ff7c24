"""Run a function in several processes that form a process group of torch.distributed on the gloo backend."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

LIMIT = 300
"""Seconds after which the processes are ended, so that a test never hangs."""


def run_ranks(folder: Path, world: int, function: Callable[..., Any], arguments: Sequence[Any], **options: Any) -> Any:
    """Call ``function(*arguments[rank])`` in each of ``world`` processes, and return the results by rank.

    The processes are forked from a server that has imported `tests.preloaded`, so that they start quickly.

    Args:
        folder: an empty folder for the results.
        world: the number of processes.
        function: a function of a module that processes can import.
        arguments: the arguments of each rank.
        options: ``timeout``, that of the process group in seconds; ``survive``: whether a rank may end without a
            result, which is then None; ``limit``: in place of `LIMIT`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    timeout = options.get("timeout", 60)
    # Arguments are pickled here, because multiprocessing would pass each tensor by a file descriptor.
    processes = [
        context.Process(target=_run, args=(folder, rank, world, timeout, function, pickle.dumps(arguments[rank])))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + options.get("limit", LIMIT)
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    results, errors = [], []
    for rank in range(world):
        path = folder / f"{rank}.pickle"
        if not path.exists():
            assert options.get("survive"), f"rank {rank} has ended without a result"
            results.append(None)
            continue
        found, error = pickle.loads(path.read_bytes())
        results.append(found)
        if error:
            errors.append(f"rank {rank}: {error}")
    assert not errors, "\n".join(errors)
    return results


def on_ranks(function: Callable[..., Any], world_size: int, folder: Path, *args: Any) -> list[Any]:
    """Return the results of ``function(rank, world_size, *args)`` on each rank.

    Args:
        function: a function of a module that can be imported; it returns what can be pickled.
        world_size: the number of processes.
        folder: an empty folder.
        args: further arguments.
    """
    arguments = [(rank, world_size, *args) for rank in range(world_size)]
    found: list[Any] = run_ranks(folder, world_size, function, arguments)
    return found


def _run(folder: Path, rank: int, world: int, timeout: float, function: Callable[..., Any], arguments: bytes) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout))
    result: tuple[Any, str]
    try:
        result = function(*pickle.loads(arguments)), ""
    except Exception:
        result = None, traceback.format_exc()
    part = folder / f"{rank}.part"
    part.write_bytes(pickle.dumps(result))
    part.rename(folder / f"{rank}.pickle")
    dist.destroy_process_group()
