"""Jobs: what is measured, each in its own process, and how the processes are started."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from . import accuracy
from .forms import COLUMNS, CORNERS, FORMS, KINDS, RECIPES, TEMPERATURE
from .peers import (
    MASKED,
    NT_XENT,
    ONE,
    OURS,
    PAIRWISE,
    PAIRWISE_CLASSES,
    PLAIN,
    SLOWEST,
    SUPCON,
    TWO_VIEW,
    Unavailable,
    names_for,
)

Job = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent

TUNED = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "8589934592"}
"""Settings with which glibc keeps freed memory, so that large temporaries do not cause page faults in every step."""

REGIMES = {"default": {}, "tuned": TUNED}
"""Regimes of the allocator: the environment variables of the process."""

LARGE = 65536
"""Number of rows of one large step of a full run. Beyond it, only `GRADIENT_ROWS` rows of a gradient are checked."""

GRADIENT_ROWS = 512
QUICK_SIZES = (64, 256, 1024)
"""Numbers of rows of a quick run, and of the forms in `CORNERS` in a full run."""

PEERS_UP_TO = 4096
"""Number of rows up to which peers are timed on a CPU, with the default allocator, unless sizes are selected."""

CAPTURED_UP_TO = 4096
"""Number of rows up to which a step on a GPU is also replayed as a CUDA graph: launching kernels dominates there."""


@dataclass(frozen=True)
class Plan:
    """What one run measures.

    Attributes:
        forms: names of `forms.RECIPES`.
        sizes: numbers of rows for the timings.
        regimes: names of `REGIMES`, each with the sizes that are timed; an empty tuple means all sizes.
        memory_sizes: numbers of rows for the peaks of memory; the peers are measured at the first of them only.
        memory_forms: names of `forms.FORMS`, for the peaks of memory.
        rounds: maximum number of rounds.
        pair_seconds: total duration of the rounds with one peer; a slow peer gets fewer rounds.
        sample_seconds: duration of one sample; short steps are repeated.
        errors_up_to: number of rows up to which errors are measured with the timings.
        temperatures: temperatures of the accuracy table.
        full: whether to measure all peers in every form, their memory, and a step of `LARGE` rows. If not, peers other
            than plain torch are timed only in the forms `TWO_VIEW` and `PAIRWISE`, and `SLOWEST` only in `PAIRWISE`.
        columns: numbers of columns of the embeddings.
        dtypes: names of `forms.DTYPES`.
        device: "cpu" or a CUDA device. On CUDA, timings measure memory too, so `memory_sizes` is empty.
        backend: backend of `pairproof.fast`.
    """

    forms: tuple[str, ...] = (*FORMS, *CORNERS)
    sizes: tuple[int, ...] = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    regimes: tuple[tuple[str, tuple[int, ...]], ...] = (("default", ()), ("tuned", (256, 1024, 4096)))
    memory_sizes: tuple[int, ...] = (4096, 8192)
    memory_forms: tuple[str, ...] = tuple(FORMS)
    rounds: int = 11
    pair_seconds: float = 4.0
    sample_seconds: float = 0.02
    errors_up_to: int = 1024
    temperatures: tuple[float, ...] = accuracy.TEMPERATURES
    full: bool = True
    columns: tuple[int, ...] = (COLUMNS,)
    dtypes: tuple[str, ...] = ("float32",)
    device: str = "cpu"
    backend: str = "auto"

    @property
    def on_cpu(self) -> bool:
        """Whether the device is the CPU."""
        return self.device == "cpu"

    def _job(self, kind: str, form: str, **more: Any) -> Job:
        dtype = RECIPES[form].dtype or self.dtypes[0]
        job = {"kind": kind, "form": form, "d": self.columns[0], "dtype": dtype, "regime": "default"}
        return job | {"temperature": RECIPES[form].temperature, "device": self.device, "backend": self.backend} | more

    def timings(self) -> list[Job]:
        """Return the timing jobs: one per form, number of columns, dtype and regime; on a GPU also per size.

        On a CPU, sizes without peers have a job of their own. Plain torch is measured at every size.
        """
        found = []
        for form, d, dtype, (regime, only) in product(self.forms, self.columns, self.dtypes, self.regimes):
            sizes = [n for n in self.sizes if (n in only or not only) and n <= RECIPES[form].up_to]
            if form in CORNERS and self.sizes == Plan.sizes:
                sizes = list(QUICK_SIZES)
            small = [n for n in sizes if self.sizes != Plan.sizes or (regime == "default" and n <= PEERS_UP_TO)]
            parts = [small, [n for n in sizes if n not in small]] if self.on_cpu else [[n] for n in sizes]
            for some in filter(None, parts):
                job = self._job("time", form, regime=regime, sizes=some)
                job |= {} if form in CORNERS else {"d": d, "dtype": dtype}
                job |= {key: getattr(self, key) for key in ("rounds", "pair_seconds", "sample_seconds")}
                # `accuracy` measures errors at low temperatures, where the truth of other forms may round to 0.
                measured = regime == "default" and job["temperature"] == TEMPERATURE
                job["errors_up_to"] = self.errors_up_to if measured else 0
                job["gradient_rows"] = GRADIENT_ROWS if max(some) > LARGE else None
                job["captured"] = 0 if self.on_cpu else CAPTURED_UP_TO
                job["forked"] = self.on_cpu and not self.full and regime == "default"
                job["names"] = (
                    names_for(form, self.device, dtype) if some is small or not self.on_cpu else [OURS, PLAIN]
                )
                if not self.full:
                    skipped = () if form == PAIRWISE else (SLOWEST,)
                    beside = job["names"] if form in (*TWO_VIEW, PAIRWISE) else (OURS, PLAIN)
                    job["names"] = [name for name in beside if name not in skipped]
                if form in FORMS or regime == "default":
                    found.append(job)
        return found

    def memories(self) -> list[Job]:
        """Return the memory jobs: one per size, form and implementation, with the default allocator."""
        return [
            self._job("memory", form, n=n, implementation=name)
            for n, form in product(self.memory_sizes, self.memory_forms)
            if form in self.forms and n <= RECIPES[form].up_to
            for name in (names_for(form) if self.full and n == self.memory_sizes[0] else [OURS])
        ]

    def accuracies(self) -> list[Job]:
        """Return the accuracy jobs: one per dtype, form and temperature."""
        rows = accuracy.ROWS if self.on_cpu else accuracy.ACCELERATOR_ROWS
        forms = [form for form in accuracy.FORMS if form in self.forms]
        return [
            self._job("accuracy", form, n=rows, temperature=temperature, dtype=dtype, batches=accuracy.BATCHES)
            | {"names": accuracy.names(form, self.device, dtype)}
            for dtype, form, temperature in product(self.dtypes, forms, self.temperatures)
        ]

    def trial(self) -> Job:
        """Return a job that runs `pairproof.fast` on a small batch, to fail early."""
        rows = 64 if self.on_cpu else accuracy.ACCELERATOR_ROWS
        return self._job("memory", self.forms[0], n=rows, implementation=OURS)

    def larges(self) -> list[Job]:
        """Return the job of the step with `LARGE` rows, if the plan has it."""
        wanted = self.full and self.memory_sizes and PAIRWISE_CLASSES in self.forms
        return [self._job("memory", PAIRWISE_CLASSES, n=LARGE, implementation=OURS, anchors=512)] if wanted else []

    def work(self) -> dict[str, list[Job]]:
        """Return all jobs, by table of the report."""
        memory, accuracy = self.memories(), self.accuracies()
        return {"timings": self.timings(), "memory": memory, "accuracy": accuracy, "large": self.larges()}


FULL = Plan()
QUICK = replace(FULL, forms=tuple(FORMS), sizes=QUICK_SIZES, regimes=(("default", ()),), full=False, temperatures=())
QUICK = replace(QUICK, memory_sizes=(4096,), memory_forms=(*TWO_VIEW, MASKED), errors_up_to=0)
QUICK = replace(QUICK, rounds=7, pair_seconds=2.0, sample_seconds=0.01)

DEVICE_SIZES, DEVICE_DTYPES = (1024, 4096, 16384, 65536, 262144), ("float32", "tf32", "bfloat16")
UNLIMITED = 1 << 30
DEVICE = Plan((NT_XENT, SUPCON, ONE), DEVICE_SIZES, (("default", ()),), memory_sizes=())
DEVICE = replace(DEVICE, columns=(128, 512), dtypes=DEVICE_DTYPES, device="cuda")
DEVICE = replace(DEVICE, temperatures=(0.01, 0.05, 0.1, 1.0), pair_seconds=30.0, errors_up_to=UNLIMITED)
"""The plan for a GPU. Other forms are measured only if they are selected."""

DEVICE_QUICK = replace(DEVICE, forms=TWO_VIEW, sizes=(4096, 16384), columns=(128,), rounds=7, temperatures=())


def describe(job: Job) -> str:
    """Describe a job in a few words."""
    words = [job["form"], f"N={','.join(map(str, job['sizes']))}" if "sizes" in job else f"N={job['n']}"]
    if job["device"] != "cpu":
        words += [f"D={job['d']}", job["dtype"]]
    elif job["kind"] == "time" and job["regime"] != "default":
        words.append(f"{job['regime']} allocator")
    if job["kind"] == "memory":
        words.append(f"memory of {job['implementation']}")
    elif job["kind"] == "accuracy":
        words.append(f"errors at temperature {job['temperature']}")
    return ", ".join(words)


def _environment(regime: str) -> dict[str, str]:
    """Return the environment variables of a process that measures under a regime of the allocator."""
    found = {k: v for k, v in os.environ.items() if k not in TUNED}
    found |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **REGIMES[regime]}
    found.setdefault("PAIRPROOF_PEERS", str(ROOT / ".peers"))
    return found


WORKER = [sys.executable, "-m", "bench.worker"]


@cache
def _forks() -> subprocess.Popen[str]:
    """Start the process that runs forked jobs. It ends with this process."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    found = subprocess.Popen([*WORKER, "--forks"], text=True, cwd=ROOT, env=_environment("default"), **pipes)
    atexit.register(found.communicate)  # closes its stdin and waits
    return found


def _run_in_fork(job: Job) -> tuple[int, Any, str]:
    """Run a job in a fork of a process that has imported torch: the import takes longer than measuring a small batch.

    Returns:
        The exit status, the rows and the last line on stderr.
    """
    forks = _forks()
    assert forks.stdin is not None
    assert forks.stdout is not None
    try:
        forks.stdin.write(f"{json.dumps(job)}\n")
        forks.stdin.flush()
        status, rows, last = json.loads(forks.stdout.readline())
    except (OSError, ValueError):
        _forks.cache_clear()
        return 1, None, "the process that runs forked jobs has ended"
    return status, rows, last


def run(job: Job) -> list[dict[str, Any]]:
    """Run one job in its own process: a fresh one, or a fork.

    Args:
        job: a job of a `Plan`.

    Returns:
        The rows that the worker returned.

    Raises:
        Unavailable: the process failed; the message has its last line on stderr.
    """
    if job.get("forked"):
        status, found, last = _run_in_fork(job)
        if status != 0:
            raise Unavailable(f"{describe(job)}: {last}")
        return list(found)
    process = subprocess.run(
        WORKER,
        input=json.dumps(job),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=_environment(job["regime"]),
        check=False,
    )
    if process.returncode != 0:
        words = process.stderr.strip().splitlines() or [f"exit status {process.returncode}"]
        raise Unavailable(f"{describe(job)}: {words[-1]}")
    rows: list[dict[str, Any]] = json.loads(process.stdout)
    return rows


SHAPE = ("form", "d", "dtype")
KEYS = {"time": (*SHAPE, "regime"), "memory": SHAPE, "accuracy": (*SHAPE, "temperature")}
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
    names = [job["implementation"]] if "implementation" in job else job["names"]
    parts = {"time": [{"n": n} for n in job.get("sizes", ())], "accuracy": [{"kind": kind} for kind in KINDS]}
    parts["memory"] = [{"n": job.get("n")}]
    return [{**same, **part, "implementation": name} for part in parts[job["kind"]] for name in names]
