"""Keep Python's garbage collector, which searches for reference cycles, from traversing objects that stay."""

from __future__ import annotations

import gc
import multiprocessing
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Suspend the garbage collector in a ``with`` block that creates many objects, but hardly any cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def forked(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of forked processes, which share what is already loaded and leave Ctrl-C to this process."""
    gc.freeze()
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), _ignore_interrupts)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        gc.unfreeze()


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
