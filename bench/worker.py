"""The process that runs one job: it reads the job as JSON from stdin and writes the rows as JSON to stdout.

With --forks, it reads one job per line and runs each in a fork, so that modules are imported once. For each job, it
writes a line with the exit status, the rows, and the last line on stderr.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import traceback
from typing import Any

import torch

from . import accuracy, cuda, measure
from .machine import field_bytes

MEMORY_LIMIT = 16 << 30
"""Maximum address space of an implementation, in bytes."""


def _limit_memory() -> None:
    """Limit the address space, so that an implementation cannot exhaust the memory of the machine."""
    available = field_bytes("/proc/meminfo", "MemAvailable")
    limit = MEMORY_LIMIT if available is None else min(MEMORY_LIMIT, int(0.85 * available))
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _prepare_device(job: dict[str, Any]) -> None:
    if ":" in job["device"]:
        torch.cuda.set_device(job["device"])
    if job["dtype"] == "tf32":  # libraries read this switch
        torch.backends.cuda.matmul.allow_tf32 = True


def run(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a job with one thread: "time", "memory" or "accuracy"."""
    torch.set_num_threads(1)
    if job["device"] == "cpu":
        _limit_memory()
        clock = measure.Clock()
    else:
        _prepare_device(job)
        clock = cuda.EventClock(job["device"])
    kinds = {"time": measure.time_form, "memory": measure.step_memory}
    return kinds[job["kind"]](job, clock) if job["kind"] in kinds else accuracy.error_rows(job)


def run_in_fork(job: dict[str, Any]) -> tuple[int, Any, str]:
    """Run a job in a fork; return its exit status, its rows and its last line on stderr."""
    with tempfile.TemporaryFile("w+") as rows, tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if child == 0:
            os.dup2(errors.fileno(), sys.stderr.fileno())
            try:
                json.dump(run(job), rows)
                rows.flush()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        rows.seek(0)
        errors.seek(0)
        lines = errors.read().strip().splitlines() or [f"exit status {status}"]
        return status, json.loads(rows.read()) if status == 0 else None, lines[-1]


def main() -> None:
    """Run the job on stdin; with --forks, all of them."""
    # Peers may print, but only results may go to stdout.
    output, sys.stdout = sys.stdout, sys.stderr
    if "--forks" not in sys.argv:
        json.dump(run(json.load(sys.stdin)), output)
        return
    for line in sys.stdin:
        print(json.dumps(run_in_fork(json.loads(line))), file=output, flush=True)


if __name__ == "__main__":
    main()
