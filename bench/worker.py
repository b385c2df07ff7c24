"""The fresh process: reads one job as JSON from standard input, writes its result as JSON to standard output."""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

import torch

from . import accuracy, cuda, measure
from .machine import field_bytes

MEMORY_LIMIT = 16 << 30
"""Bytes of address space that an implementation may ask for."""


def _limit_memory() -> None:
    """At most `MEMORY_LIMIT`, and less where less is free: a peer that wants more gets an error, not the machine."""
    available = field_bytes("/proc/meminfo", "MemAvailable")
    limit = MEMORY_LIMIT if available is None else min(MEMORY_LIMIT, int(0.85 * available))
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _prepare_device(job: dict[str, Any]) -> None:
    """Make the job's device the current one, and its products as precise as the job says."""
    if ":" in job["device"]:
        torch.cuda.set_device(job["device"])
    if job["dtype"] == "tf32":  # the switch that libraries look at
        torch.backends.cuda.matmul.allow_tf32 = True


def main() -> None:
    """Do the job of standard input on one thread: "time", "memory" or "accuracy"."""
    job = json.load(sys.stdin)
    # The result alone goes to standard output, whatever a peer prints.
    output, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(1)
    if job["device"] == "cpu":
        _limit_memory()
        clock = measure.Clock()
    else:
        _prepare_device(job)
        clock = cuda.EventClock(job["device"])
    kinds = {"time": measure.time_loss, "memory": measure.step_memory}
    rows = kinds[job["kind"]](job, clock) if job["kind"] in kinds else accuracy.error_rows(job)
    json.dump(rows, output)


if __name__ == "__main__":
    main()
