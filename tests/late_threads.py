"""Run a program with threads of gloo that get processor time last: ``python late_threads.py PROGRAM ARGUMENT...``.

A process that ends while such a thread holds a tensor then aborts often, not rarely (docs/distributed.md, "The end of
a process"). Other systems than Linux run the program as it is.
"""

import os
import runpy
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

TASKS = Path("/proc/self/task")
init_process_group, destroy_process_group = dist.init_process_group, dist.destroy_process_group


def with_late_threads(*args: Any, **kwargs: Any) -> None:
    """Create the group, and let the threads that this starts run only where a processor is idle."""
    before = {*TASKS.iterdir()}
    init_process_group(*args, **kwargs)
    for task in {*TASKS.iterdir()} - before:
        with suppress(ProcessLookupError):  # the thread has ended
            os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))
    references = sys.getrefcount(dist.group.WORLD)

    def destroy() -> None:
        """Destroy the group, or raise an error if the program still refers to it."""
        more = sys.getrefcount(dist.group.WORLD) - references
        assert more <= 0, f"{more} references to the process group"
        destroy_process_group()

    dist.destroy_process_group = destroy


if __name__ == "__main__":
    if TASKS.exists():
        dist.init_process_group = with_late_threads
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
