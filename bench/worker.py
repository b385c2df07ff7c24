"""The fresh process: reads one job as JSON from standard input, writes its result as JSON to standard output."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch

MEMORY_LIMIT = 16 << 30
"""Bytes of address space that an implementation may ask for."""


def _limit_memory() -> None:
    """At most `MEMORY_LIMIT`, and less where less is free: a peer that wants more gets an error, not the machine."""
    available = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    )
    limit = min(MEMORY_LIMIT, int(0.85 * available))
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _prepare_device(job: dict[str, Any]) -> None:
    """Make the job's device the current one, and its products as precise as the job says."""
    if ":" in job["device"]:
        torch.cuda.set_device(job["device"])
    if job["dtype"] == "tf32":  # the switch that libraries look at
        torch.backends.cuda.matmul.allow_tf32 = True


def run(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Do one job: "time", "memory", "large" or "accuracy"."""
    from . import accuracy, cuda, measure, memory

    clock = measure.Clock() if job["device"] == "cpu" else cuda.EventClock(job["device"])
    kinds = {"time": measure.time_loss, "memory": memory.step_memory, "large": memory.large_step}
    return kinds[job["kind"]](job, clock) if job["kind"] in kinds else accuracy.error_rows(job)


def main() -> None:
    """Run the job of standard input on one thread."""
    job = json.load(sys.stdin)
    # The result alone goes to standard output, whatever a peer prints.
    output, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(1)
    if job["device"] == "cpu":
        _limit_memory()
    else:
        _prepare_device(job)
    json.dump(run(job), output)


if __name__ == "__main__":
    main()
