"""Jobs: what is measured, each in its own process, and how the processes are started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from . import accuracy
from .batches import DTYPES, KINDS, LOSSES
from .peers import OURS, SLOWEST, Unavailable, names_for

Job = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent

TUNED = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "8589934592"}
"""Settings with which glibc keeps freed memory, so that large temporaries cause no page faults in every step."""

REGIMES = {"default": {}, "tuned": TUNED}
"""Regimes of the allocator: the environment variables of the process."""

TEMPERATURE = 0.1
COLUMNS = 128
LARGE = 65536
"""Number of rows above which only `GRADIENT_ROWS` rows of the gradient are compared with float64."""

GRADIENT_ROWS = 512
CAPTURED_UP_TO = 4096
"""Number of rows up to which a step on a GPU is also replayed as a CUDA graph: launching kernels dominates there."""


@dataclass(frozen=True)
class Plan:
    """What one run measures.

    Attributes:
        losses: names of `batches.LOSSES`.
        sizes: numbers of rows for the timings.
        memory_sizes: numbers of rows for the peaks of memory.
        regimes: names of `REGIMES`.
        small: number of rows up to which `small_rounds` rounds are measured.
        small_rounds: number of rounds up to `small` rows.
        large_rounds: number of rounds above `small` rows.
        temperatures: temperatures of the accuracy table.
        large: whether to measure the one step with `LARGE` rows.
        every_peer: whether to time peers that need half a minute per step, and to measure the memory of all peers.
        columns: numbers of columns of the embeddings.
        dtypes: names of `batches.DTYPES`.
        device: "cpu" or a CUDA device. On CUDA, timings measure memory too, so `memory_sizes` is empty.
        backend: backend of `pairproof.fast`.
    """

    losses: tuple[str, ...] = tuple(LOSSES)
    sizes: tuple[int, ...] = (256, 1024, 4096, 8192)
    memory_sizes: tuple[int, ...] = (256, 1024, 4096, 8192)
    regimes: tuple[str, ...] = tuple(REGIMES)
    small: int = 1024
    small_rounds: int = 15
    large_rounds: int = 5
    temperatures: tuple[float, ...] = accuracy.TEMPERATURES
    large: bool = True
    every_peer: bool = True
    columns: tuple[int, ...] = (COLUMNS,)
    dtypes: tuple[str, ...] = ("float32",)
    device: str = "cpu"
    backend: str = "auto"

    @property
    def on_cpu(self) -> bool:
        """Whether the device is the CPU."""
        return self.device == "cpu"

    def _job(self, kind: str, loss: str, n: int, **more: Any) -> Job:
        job = {"kind": kind, "loss": loss, "n": n, "d": self.columns[0], "dtype": self.dtypes[0], "regime": "default"}
        return job | {"temperature": TEMPERATURE, "device": self.device, "backend": self.backend} | more

    def timings(self) -> list[Job]:
        """Return the timing jobs: one per number of columns, dtype, size, loss and regime."""
        slow = {} if self.every_peer else {SLOWEST: "takes half a minute per step; it is timed in the full run only"}
        found = []
        for d, dtype, n, loss, regime in product(self.columns, self.dtypes, self.sizes, self.losses, self.regimes):
            job = self._job("time", loss, n, d=d, dtype=dtype, regime=regime)
            job["rounds"] = self.small_rounds if n <= self.small else self.large_rounds
            job["errors"] = regime == "default" and (n <= LARGE or not self.on_cpu)
            job["gradient_rows"] = GRADIENT_ROWS if n > LARGE else None
            job["captured"] = not self.on_cpu and n <= CAPTURED_UP_TO
            job["skip"] = slow if loss == "pairwise_classes" else {}
            found.append(job)
        return found

    def memories(self) -> list[Job]:
        """Return the memory jobs: one per size, loss and implementation, with the default allocator."""
        return [
            self._job("memory", loss, n, implementation=name)
            for n, loss in product(self.memory_sizes, self.losses)
            for name in (names_for(loss) if self.every_peer else [OURS])
        ]

    def accuracies(self) -> list[Job]:
        """Return the accuracy jobs: one per dtype, loss and temperature."""
        rows = accuracy.ROWS if self.on_cpu else accuracy.ACCELERATOR_ROWS
        losses = [loss for loss in accuracy.LOSSES if loss in self.losses]
        return [
            self._job("accuracy", loss, rows, batches=accuracy.BATCHES, temperature=temperature, dtype=dtype)
            for dtype, loss, temperature in product(self.dtypes, losses, self.temperatures)
        ]

    def trial(self) -> Job:
        """Return a job that runs `pairproof.fast` on a small batch, to fail early."""
        rows = 64 if self.on_cpu else accuracy.ACCELERATOR_ROWS
        return self._job("memory", self.losses[0], rows, implementation=OURS)

    def larges(self) -> list[Job]:
        """Return the job of the step with `LARGE` rows, if the plan has it."""
        wanted = self.large and "pairwise_classes" in self.losses
        return [self._job("memory", "pairwise_classes", LARGE, implementation=OURS, anchors=512)] if wanted else []

    def work(self) -> dict[str, list[Job]]:
        """Return all jobs, by table of the report."""
        memory, accuracy = self.memories(), self.accuracies()
        return {"timings": self.timings(), "memory": memory, "accuracy": accuracy, "large": self.larges()}


FULL = Plan()
QUICK = Plan(
    sizes=(256, 1024),
    memory_sizes=(4096,),
    regimes=("default",),
    small_rounds=7,
    temperatures=(0.05, 0.1),
    large=False,
    every_peer=False,
)
FLOORS = replace(QUICK, losses=("nt_xent", "supcon", "pairwise_views"), temperatures=())

DEVICE = Plan(
    losses=("nt_xent", "supcon", "info_nce"),
    sizes=(1024, 4096, 16384, 65536, 262144),
    memory_sizes=(),
    regimes=("default",),
    small=65536,
    temperatures=(0.01, 0.05, 0.1, 1.0),
    large=False,
    columns=(128, 512),
    dtypes=tuple(DTYPES),
    device="cuda",
)
"""The plan for a GPU. The pairwise losses are measured only if they are selected."""

DEVICE_QUICK = replace(
    DEVICE, losses=("nt_xent", "supcon"), sizes=(4096, 16384), columns=(128,), small_rounds=7, temperatures=()
)


def describe(job: Job) -> str:
    """Describe a job in a few words."""
    words = [LOSSES[job["loss"]], f"N={job['n']}"]
    if job["device"] != "cpu":
        words += [f"D={job['d']}", job["dtype"]]
    elif job["kind"] == "time":
        words.append(f"{job['regime']} allocator")
    if job["kind"] == "memory":
        words.append(f"memory of {job['implementation']}")
    elif job["kind"] == "accuracy":
        words.append(f"errors at temperature {job['temperature']}")
    return ", ".join(words)


def run(job: Job) -> list[dict[str, Any]]:
    """Run one job in a fresh process.

    Args:
        job: a job of a `Plan`.

    Returns:
        The rows that the worker returned.

    Raises:
        Unavailable: the process failed; the message has its last line on stderr.
    """
    environment = {k: v for k, v in os.environ.items() if k not in TUNED}
    environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **REGIMES[job["regime"]]}
    environment.setdefault("PAIRPROOF_PEERS", str(ROOT / ".peers"))
    command, given = [sys.executable, "-m", "bench.worker"], json.dumps(job)
    process = subprocess.run(
        command, input=given, capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    if process.returncode != 0:
        words = process.stderr.strip().splitlines() or [f"exit status {process.returncode}"]
        raise Unavailable(f"{describe(job)}: {words[-1]}")
    rows: list[dict[str, Any]] = json.loads(process.stdout)
    return rows


SHAPE = ("loss", "n", "d", "dtype")
KEYS = {"time": (*SHAPE, "regime"), "memory": SHAPE, "accuracy": ("loss", "d", "dtype", "temperature")}
"""By kind of job, the keys that all its rows share."""


def attempt(job: Job) -> list[dict[str, Any]]:
    """Run one job. If its process fails, return rows with the status "refused" and the reason.

    Args:
        job: a job of a `Plan`.

    Returns:
        The rows of the job.
    """
    same = {key: job[key] for key in KEYS[job["kind"]]}
    try:
        return [{**same, **row} for row in run(job)]
    except Unavailable as error:
        same |= {"status": "refused", "reason": str(error)}
    names = [job["implementation"]] if "implementation" in job else names_for(job["loss"], job["device"], job["dtype"])
    kinds = [{"kind": kind} for kind in KINDS] if job["kind"] == "accuracy" else [{}]
    return [{**same, **kind, "implementation": name} for kind in kinds for name in names]
