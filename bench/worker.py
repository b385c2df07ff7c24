"""The process that runs one job: it reads the job as JSON from stdin and writes the rows as JSON to stdout."""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

import torch

from . import accuracy, cuda, measure
from .machine import field_bytes

MEMORY_LIMIT = 16 << 30
"""Maximum address space of an implementation, in bytes."""


def _limit_memory() -> None:
    """Limit the address space to `MEMORY_LIMIT`, or 85% of the free memory if that is less, to protect the machine."""
    available = field_bytes("/proc/meminfo", "MemAvailable")
    limit = MEMORY_LIMIT if available is None else min(MEMORY_LIMIT, int(0.85 * available))
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _prepare_device(job: dict[str, Any]) -> None:
    """Select the device of the job, and allow TF32 products if the job uses them."""
    if ":" in job["device"]:
        torch.cuda.set_device(job["device"])
    if job["dtype"] == "tf32":  # libraries read this switch
        torch.backends.cuda.matmul.allow_tf32 = True


def main() -> None:
    """Run the job on stdin with one thread: "time", "memory" or "accuracy"."""
    job = json.load(sys.stdin)
    # A peer may print: only the result may go to stdout.
    output, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(1)
    if job["device"] == "cpu":
        _limit_memory()
        clock = measure.Clock()
    else:
        _prepare_device(job)
        clock = cuda.EventClock(job["device"])
    kinds = {"time": measure.time_form, "memory": measure.step_memory}
    rows = kinds[job["kind"]](job, clock) if job["kind"] in kinds else accuracy.error_rows(job)
    json.dump(rows, output)


if __name__ == "__main__":
    main()
