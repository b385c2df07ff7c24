"""Jobs: what is measured in which process, and the starting of those processes."""

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
"""glibc keeps what is freed: big temporaries are not faulted in anew in every step."""

REGIMES = {"default": {}, "tuned": TUNED}
"""Of the allocator: the variables of its process's environment."""

TEMPERATURE = 0.1
COLUMNS = 128
LARGE = 65536
"""Rows above which, on a GPU, `GRADIENT_ROWS` rows of the gradient are compared with float64, not all."""

GRADIENT_ROWS = 512
CAPTURED_UP_TO = 4096
"""Rows up to which a step on a GPU is also replayed as one graph: there, starting kernels costs as much as they do."""


@dataclass(frozen=True)
class Plan:
    """What one run measures.

    Attributes:
        losses: names of `batches.LOSSES`.
        sizes: of the timings.
        memory_sizes: of the peaks.
        regimes: of the allocator.
        small: rows up to which `small_rounds` are taken.
        small_rounds: at up to so many rows.
        large_rounds: above.
        temperatures: of the accuracy table.
        large: whether the one large step is taken.
        every_peer: whether peers that need half a minute a step are timed too, and the peaks of all peers measured.
        columns: of the embeddings.
        dtypes: names of `batches.DTYPES`.
        device: "cpu", or a CUDA device. There the peaks come with the timings, so `memory_sizes` is empty.
        backend: of `pairproof.fast`.
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
        """Whether its device is the CPU."""
        return self.device == "cpu"

    def _job(self, kind: str, loss: str, n: int, **more: Any) -> Job:
        job = {"kind": kind, "loss": loss, "n": n, "d": self.columns[0], "dtype": self.dtypes[0], "regime": "default"}
        return job | {"temperature": TEMPERATURE, "device": self.device, "backend": self.backend} | more

    def timings(self) -> list[Job]:
        """One process per number of columns, dtype, size, loss and regime."""
        slow = {} if self.every_peer else {SLOWEST: "takes half a minute a step: timed in the full run only"}
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
        """One process per size, loss and implementation, under the default allocator."""
        return [
            self._job("memory", loss, n, implementation=name)
            for n, loss in product(self.memory_sizes, self.losses)
            for name in (names_for(loss) if self.every_peer else [OURS])
        ]

    def accuracies(self) -> list[Job]:
        """One process per dtype, loss and temperature."""
        rows = accuracy.ROWS if self.on_cpu else accuracy.ACCELERATOR_ROWS
        losses = [loss for loss in accuracy.LOSSES if loss in self.losses]
        return [
            self._job("accuracy", loss, rows, batches=accuracy.BATCHES, temperature=temperature, dtype=dtype)
            for dtype, loss, temperature in product(self.dtypes, losses, self.temperatures)
        ]

    def trial(self) -> Job:
        """`pairproof.fast` on a small batch: what fails here would fail in every row."""
        rows = 64 if self.on_cpu else accuracy.ACCELERATOR_ROWS
        return self._job("memory", self.losses[0], rows, implementation=OURS)

    def larges(self) -> list[Job]:
        """The one large step, if any."""
        wanted = self.large and "pairwise_classes" in self.losses
        return [self._job("memory", "pairwise_classes", LARGE, implementation=OURS, anchors=512)] if wanted else []

    def work(self) -> dict[str, list[Job]]:
        """All jobs, by the report's tables."""
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
"""On a GPU. The pairwise losses are measured when they are asked for."""

DEVICE_QUICK = replace(
    DEVICE, losses=("nt_xent", "supcon"), sizes=(4096, 16384), columns=(128,), small_rounds=7, temperatures=()
)


def describe(job: Job) -> str:
    """A job as a few words."""
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
    """Do one job in a fresh process.

    Args:
        job: of a `Plan`.

    Returns:
        The rows that the worker returned.

    Raises:
        Unavailable: the process failed; its last words.
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
"""What the rows of each kind of job have in common."""


def attempt(job: Job) -> list[dict[str, Any]]:
    """Do one job. Where its process fails, rows that say so take the place of its result.

    Args:
        job: of a `Plan`.

    Returns:
        Its rows.
    """
    same = {key: job[key] for key in KEYS[job["kind"]]}
    try:
        return [{**same, **row} for row in run(job)]
    except Unavailable as error:
        same |= {"status": "refused", "reason": str(error)}
    names = [job["implementation"]] if "implementation" in job else names_for(job["loss"], job["device"], job["dtype"])
    kinds = [{"kind": kind} for kind in KINDS] if job["kind"] == "accuracy" else [{}]
    return [{**same, **kind, "implementation": name} for kind in kinds for name in names]
