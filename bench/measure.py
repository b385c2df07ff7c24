"""Time and memory of one form (a loss with one way of giving its positives), with one thread.

Every implementation is checked first. In each round, every peer is sampled directly before or after `pairproof.fast`,
so that other load on the machine affects both.

Each round also samples ``torch.mm`` of 512 rows with all N rows, to show what throughput is possible. On a GPU, both
factors have 8192 rows. Writing this product takes longer than computing it, so a product of square matrices is sampled
as well.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from . import truth
from .forms import DTYPES, KINDS, RECIPES, Form, Step, make
from .machine import field_bytes
from .peers import CAPTURED, OURS, Implementation, Unavailable, load, ours

Inputs = tuple[Tensor, ...]
Samples = npt.NDArray[np.float64]
Shapes = dict[str, tuple[int, int | None, int | None]]

LEAST_ROUNDS = 3
SLOW_SECONDS = 4.0
"""At least `LEAST_ROUNDS` rounds are measured, but a single one is enough if it takes `SLOW_SECONDS`."""

ROWS_TO_CHECK = 4096
"""Maximum number of rows of the float64 check. Larger batches are replaced by one of this size."""

ROUGH = 0.05
"""Largest relative error of the loss on random rows that may be due to rounding."""

PARTS = ("forward", "both")
"""What is timed: the forward pass without autograd, and forward and backward."""

OTHER_FLOPS = (2, 8)
"""Numbers of operations of `PARTS` for ``[N, M]`` logits, divided by N M D; for symmetric logits see `Clock.flops`."""

STATUS = "/proc/self/status"
CLEAR = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Writing this to clear_refs resets the peak of the resident set to the current size (see proc(5))."""


def peak_beyond(function: Callable[[], object]) -> int:
    """Return the peak growth of the resident set during one call, in bytes, exact to a few pages per thread.

    Raises:
        Unavailable: the kernel does not report the peak.
    """
    gc.collect()
    try:
        CLEAR.write_text(RESET_PEAK)
    except OSError as error:
        raise Unavailable(f"peak memory needs Linux with /proc/self/clear_refs ({error})") from None
    before = field_bytes(STATUS, "VmRSS")
    function()
    peak = field_bytes(STATUS, "VmHWM")
    if before is None or peak is None:
        raise Unavailable(f"{STATUS} has no VmRSS or no VmHWM")
    return max(0, peak - before)


def train(step: Step, inputs: Inputs) -> Tensor:
    """Run forward and backward of one step and return the loss; the inputs get new gradients."""
    for leaf in inputs:
        leaf.grad = None
    loss = step(*inputs)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


class Clock:
    """Measures the CPU time of the process. The subclass in `bench.cuda` measures the time between CUDA events."""

    products: ClassVar[Shapes] = {"mm": (512, None, None)}
    """Matrix products to compare with: rows, columns (None: N) and depth (None: D)."""

    on_device: bool = False
    """Whether timing jobs also measure peak memory. On a CPU, this takes a separate process."""

    flops: ClassVar[tuple[int, int]] = (1, 4)
    """Minimum numbers of operations of `PARTS`, divided by N^2 D, if positives are given by labels, partners or pairs.

    Computing half of the symmetric logits counts as 1. The backward pass computes them again, and takes 2 for the
    gradient.
    """

    def mark(self) -> Any:
        """Return the current time."""
        return time.process_time()

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two times."""
        return float(end - start)

    def wait(self) -> None:
        """Wait until the device has finished all work."""

    def step(self, step: Step, inputs: Inputs, repeats: int) -> tuple[float, float]:
        """Return the seconds per call of `PARTS`.

        The device is not synchronised between calls. Small steps on a GPU therefore take the time of the host, as in
        training.
        """
        with torch.no_grad():
            forward = self.call(lambda: step(*inputs), repeats)
        return forward, self.call(lambda: train(step, inputs), repeats)

    def call(self, function: Callable[[], object], repeats: int) -> float:
        """Return the seconds per call of a function."""
        self.wait()
        start = self.mark()
        for _ in range(repeats):
            function()
        end = self.mark()
        self.wait()
        return self.seconds(start, end) / repeats

    def available(self) -> int | None:
        """Return the memory of the device that one step may use, in bytes; None on a CPU."""
        return None

    def peak(self, step: Step, inputs: Inputs) -> int:
        """Return the peak memory of one step in bytes, beyond what was allocated before."""
        return peak_beyond(lambda: train(step, inputs))

    def capture(self, step: Step, inputs: Inputs) -> tuple[Callable[[], object], Tensor]:
        """Capture a training step; return a function that replays it on the current inputs, and the loss tensor.

        Raises:
            Unavailable: the device cannot capture steps.
        """
        raise Unavailable("a CPU cannot capture graphs")


@contextmanager
def precision_of(implementation: Implementation) -> Iterator[None]:
    """Allow TF32 products within the context if the implementation is measured with them."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = before or implementation.tf32
    try:
        yield
    finally:
        matmul.allow_tf32 = before


def _gradient(inputs: Inputs) -> Tensor:
    return torch.cat([leaf.grad for leaf in inputs if leaf.grad is not None])


def evaluate(step: Step, inputs: Inputs) -> tuple[float, Tensor]:
    """Return the loss and the gradient of all inputs of one training step."""
    loss = float(train(step, inputs))
    return loss, _gradient(inputs)


@contextmanager
def recorded(row: dict[str, Any]) -> Iterator[None]:
    """Set the status of a row: "measured", or "refused" with the reason if the block raises an exception."""
    row["status"] = "refused"
    try:
        yield
        row["status"] = "measured"
    except Unavailable as error:
        row["reason"] = str(error)
    except Exception as error:  # a peer may raise any exception
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        out_of_memory = isinstance(error, MemoryError) or "alloc" in line
        row["reason"] = "does not fit into the memory limit" if out_of_memory else f"{type(error).__name__}: {line}"


def check_agreement(implementation: Implementation, form: Form, temperature: float, true: float) -> None:
    """Compare an implementation's float64 value with the true loss of a batch.

    Raises:
        Unavailable: the values differ, so the implementation computes another loss.
    """
    wide = form.to(torch.float64)
    with torch.no_grad():
        found = float(implementation.check_step(wide, temperature)(*wide.inputs))
    if not abs(found - true) <= implementation.agreement * abs(true):
        raise Unavailable(f"computes another loss: {found!r} in float64, expected {true!r}")


def check_roughly(loss: float, true: float) -> None:
    """Check the loss of random rows in the measured dtype: the float64 check may have run other kernels.

    Raises:
        Unavailable: the relative error is above `ROUGH`.
    """
    error = abs(loss - true) / abs(true)
    if not error <= ROUGH:
        raise Unavailable(f"its loss in this dtype is wrong by {error:.0%}")


def quartiles(values: Sequence[float] | Samples) -> list[float]:
    """Return the lower quartile, the median and the upper quartile."""
    found: list[float] = np.percentile(values, [25, 50, 75]).tolist()
    return found


def _quartiles_of_parts(key: str, figures: Samples) -> dict[str, list[float]]:
    return {f"{part}_{key}": quartiles(column) for part, column in zip(PARTS, figures.T, strict=True)}


def _repeats(estimate: float, target: float) -> int:
    """Return how many calls take ``target`` seconds, if one takes ``estimate`` seconds."""
    return min(1000, max(1, math.ceil(target / max(estimate, 1e-6))))


class _Contender:
    """An implementation that has passed the checks, with its samples."""

    def __init__(self, implementation: Implementation, step: Step, inputs: Inputs, clock: Clock, target: float) -> None:
        self.implementation, self.run, self.inputs, self.clock = implementation, step, inputs, clock
        self.samples: list[tuple[float, float]] = []
        # The first call also loads code. Time a second one, unless the first took long.
        self.estimate = sum(clock.step(step, inputs, 1))
        if self.estimate < 1.0 or implementation.compiled:
            self.estimate = sum(clock.step(step, inputs, 1))
        self.repeats = _repeats(self.estimate, target)

    def sample(self) -> tuple[float, float]:
        gc.collect()
        with precision_of(self.implementation):
            self.samples.append(self.clock.step(self.run, self.inputs, self.repeats))
        return self.samples[-1]

    def beside(self, sample: Callable[[], Any], number: int) -> tuple[tuple[float, float], Any]:
        """Sample this and something else; the order alternates between rounds."""
        if number % 2:
            other = sample()
            return self.sample(), other
        return self.sample(), sample()


class _Timing:
    """A timing job at one size: its batches and their true values.

    ``checked`` maps a number of rows to the true loss and to the names of the implementations that agree with it.
    """

    def __init__(self, job: dict[str, Any], n: int, clock: Clock, checked: dict[int, tuple[float, set[str]]]) -> None:
        self.job, self.n, self.clock, self.temperature = job, n, clock, float(job["temperature"])
        self.dtype = DTYPES[job["dtype"]]
        self.form = self.batch("random", n)
        # The rows whose gradient is compared, spread over the inputs.
        rows = len(self.form.labels)
        self.compared = torch.arange(0, rows, max(1, rows // (job["gradient_rows"] or rows)), device=job["device"])
        self.truths = {
            kind: truth.loss_and_gradient(self.batch(kind, n), self.temperature, self.compared)
            for kind in (KINDS if n <= job["errors_up_to"] else ())
        }
        self.checked = checked
        if self.truths:
            checked[n] = self.truths["random"][0], set()

    def batch(self, kind: str, n: int) -> Form:
        """Make a batch, rounded to the dtype. True values are computed from the rounded rows."""
        return make(self.job["form"], n, self.job["d"], kind, device=self.job["device"]).to(self.dtype)

    def errors(self, kind: str, loss: float, gradient: Tensor) -> dict[str, float]:
        return truth.errors(loss, gradient[self.compared], self.truths[kind])

    def prepare(self, name: str, row: dict[str, Any]) -> _Contender:
        """Load, check and warm up an implementation."""
        implementation = load(name, self.job["backend"])
        row["version"] = implementation.version(implementation.loaded)
        implementation.check_memory(self.form.name, self.n, self.dtype, self.clock.available())
        rows = min(self.n, implementation.rows_to_check.get(self.form.name, ROWS_TO_CHECK))
        some = self.form if rows == self.n else self.batch("random", rows)
        if rows not in self.checked:
            with torch.no_grad():
                self.checked[rows] = truth.loss_alone(some, self.temperature), set()
        true, agreeing = self.checked[rows]
        if name not in agreeing:
            check_agreement(implementation, some, self.temperature, true)
            agreeing.add(name)
        given = torch.float32 if implementation.tf32 else self.dtype
        row["errors"] = {}
        with precision_of(implementation):
            # The random rows come last, because they are timed.
            for kind in (*reversed(list(self.truths)), "random"):
                form = self.batch(kind, self.n).to(given)
                step, inputs = implementation.step(form, self.temperature), form.leaves(given)
                if kind in self.truths and kind not in row["errors"]:
                    row["errors"][kind] = self.errors(kind, *evaluate(step, inputs))
            if self.n in self.checked:
                with torch.no_grad():
                    check_roughly(float(step(*inputs)), self.checked[self.n][0])
            contender = _Contender(implementation, step, inputs, self.clock, self.job["sample_seconds"])
            if self.clock.on_device:
                row["bytes"] = self.clock.peak(step, inputs)
        return contender

    def captured(self, ours: _Contender, row: dict[str, Any]) -> None:
        """Measure our step replayed as a CUDA graph: its errors, and its time next to the step's."""
        inputs = tuple(rows.detach().clone().requires_grad_() for rows in ours.inputs)
        replay, loss = self.clock.capture(ours.run, inputs)
        for kind in reversed(KINDS):
            with torch.no_grad():
                for rows, new in zip(inputs, self.batch(kind, self.n).inputs, strict=True):
                    rows.copy_(new)
            replay()
            if kind in self.truths:
                row["errors"][kind] = self.errors(kind, float(loss), _gradient(inputs))
        check_roughly(float(loss), self.checked[self.n][0])
        repeats = _repeats(self.clock.call(replay, 20), self.job["sample_seconds"])
        pairs = [ours.beside(lambda: self.clock.call(replay, repeats), number) for number in range(self.job["rounds"])]
        row |= {"rounds": len(pairs), "repeats": repeats}
        row["both_ms"] = quartiles([1e3 * theirs for _, theirs in pairs])
        row["both_ratio"] = quartiles([theirs / mine for (_, mine), theirs in pairs])

    def product(self, shape: tuple[int, int, int]) -> Callable[[], float]:
        """Return a function that samples the product of matrices ``[rows, depth]`` and ``[depth, columns]``."""
        rows, columns, depth = shape
        a, b = (self.form.inputs[0].new_empty(size, depth).normal_() for size in (rows, columns))
        out = torch.mm(a, b.T)

        def multiply() -> Tensor:
            return torch.mm(a, b.T, out=out)

        repeats = _repeats(self.clock.call(multiply, 20), self.job["sample_seconds"])
        return lambda: self.clock.call(multiply, repeats)

    def rounds(self, estimate: float) -> int:
        """Return the number of rounds, given the estimated seconds of one."""
        least = LEAST_ROUNDS if estimate < SLOW_SECONDS else 1
        return min(int(self.job["rounds"]), max(least, int(self.job["pair_seconds"] / estimate)))

    def run(self) -> list[dict[str, Any]]:
        rows: dict[str, dict[str, Any]] = {}
        peers: dict[str, _Contender] = {}
        for name in self.job["names"]:
            rows[name] = {"n": self.n, "implementation": name}
            with recorded(rows[name]):
                peers[name] = self.prepare(name, rows[name])
        ours = peers.pop(OURS, None)
        if ours is None:
            for name in peers:
                rows[name] |= {"status": "refused", "reason": "pairproof could not be measured next to it"}
            return list(rows.values())
        d = self.form.inputs[0].shape[1]
        shapes = {name: (a, b or self.n, depth or d) for name, (a, b, depth) in self.clock.products.items()}
        products = {name: self.product(shape) for name, shape in shapes.items()}
        rounds = {name: self.rounds(ours.estimate + peer.estimate) for name, peer in peers.items()}
        pairs: dict[str, list[Any]] = {name: [] for name in (*products, *peers)}
        gc.collect()
        gc.freeze()  # makes gc.collect() in the samples fast
        gc.disable()
        for number in range(max(rounds.values(), default=self.job["rounds"])):
            if not peers:
                ours.sample()
            for name, peer in peers.items():
                if number < rounds[name]:
                    pairs[name].append(ours.beside(peer.sample, number))
            for name, sample in products.items():
                pairs[name].append((ours.samples[-1], sample()))
        gc.enable()
        gc.unfreeze()
        for name, contender in {OURS: ours, **peers}.items():
            rows[name] |= {"rounds": len(pairs["mm" if name == OURS else name]), "repeats": contender.repeats}
            rows[name] |= _quartiles_of_parts("ms", 1e3 * np.array(contender.samples))
            if name != OURS:
                mine, theirs = np.array(pairs[name]).swapaxes(0, 1)
                rows[name] |= _quartiles_of_parts("ratio", theirs / mine)
        flops = self.clock.flops if RECIPES[self.form.name].group == "labels" else OTHER_FLOPS
        given = self.form.given
        columns = len(given.get("negatives", given.get("ref_embeddings", self.form.inputs[-1])))
        for name, shape in shapes.items():
            work, seconds = 2 * math.prod(shape), np.array([[second] for _, second in pairs[name]])
            rows[OURS][f"{name}_gflops"] = work / float(np.median(seconds)) / 1e9
            rates = np.array(flops) * self.n * columns * d / np.array([mine for mine, _ in pairs[name]])
            rows[OURS] |= _quartiles_of_parts("share" if name == "mm" else f"{name}_share", rates / (work / seconds))
        if self.job["captured"] and self.n <= self.job["captured"]:
            version = ours.implementation.version(ours.implementation.loaded)
            rows[CAPTURED] = {"n": self.n, "implementation": CAPTURED, "version": version, "errors": {}}
            with recorded(rows[CAPTURED]):
                self.captured(ours, rows[CAPTURED])
        return list(rows.values())


def time_form(job: dict[str, Any], clock: Clock) -> list[dict[str, Any]]:
    """Run a job of kind "time".

    Args:
        job: form, sizes, names (of implementations), d, temperature, dtype, device, backend, rounds, and

            - pair_seconds: total duration of the rounds with one peer; a slow peer gets fewer rounds
            - sample_seconds: duration of one sample; short steps are repeated
            - errors_up_to: number of rows up to which errors are measured
            - gradient_rows: number of rows of the gradient to compare, None for all
            - captured: number of rows up to which the step is also replayed as a CUDA graph
        clock: the clock of the device.

    Returns:
        One row per size and implementation, in the format of `bench.report`; on a GPU with ``bytes``.
    """
    checked: dict[int, tuple[float, set[str]]] = {}
    return [row for n in job["sizes"] for row in _Timing(job, n, clock, checked).run()]


def step_memory(job: dict[str, Any], clock: Clock) -> list[dict[str, Any]]:
    """Run a job of kind "memory": peak of forward and backward beyond the interpreter, its libraries and the inputs.

    Args:
        job: implementation, form, n, d, temperature, backend, dtype, device; for pairproof optionally anchors, the
            number of anchors whose values are compared with float64.
        clock: the clock of the device.

    Returns:
        One row in the format of `bench.report`.
    """
    n, temperature, dtype = int(job["n"]), float(job["temperature"]), DTYPES[job["dtype"]]
    row: dict[str, Any] = {"n": n, "implementation": job["implementation"]}
    with recorded(row):
        implementation = load(job["implementation"], job["backend"])
        implementation.check_memory(job["form"], n, dtype, None)
        # A small step loads code and allocates the buffers of libraries, so that they are not counted.
        small, form = (make(job["form"], rows, job["d"], device=job["device"]).to(dtype) for rows in (64, n))
        evaluate(implementation.step(small, temperature), small.leaves(dtype))
        step, inputs = implementation.step(form, temperature), form.leaves(dtype)
        started = time.process_time()
        row["bytes"] = clock.peak(step, inputs)
        if not clock.on_device:
            row["once_ms"] = 1e3 * (time.process_time() - started)
        if "anchors" in job:
            with torch.no_grad():
                values = ours(job["backend"], form, temperature, reduction="none")(*form.inputs)
            rows = torch.arange(0, n, max(1, n // job["anchors"]))
            true = truth.anchor_values(form, temperature, rows)
            row["worst_anchor_error"] = float(((values[rows].to(torch.float64) - true).abs() / true).max())
            row["anchors_compared"] = len(rows)
    return [row]


def median_of_processes(runs: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Combine the rows of one job from several processes.

    Args:
        runs: the rows of each process, with the same implementations in the same order.

    Returns:
        One row per implementation. Each time, ratio and share is the median over all processes. If a process refused
        the implementation, the row of that process is returned.
    """
    rows = []
    for same in zip(*runs, strict=True):
        refused = next((row for row in same if row["status"] != "measured"), None)
        row = dict(refused or same[0])
        if refused is None:
            for key in [key for key in row if key.endswith(("_ms", "_ratio", "_share"))]:
                row[key] = np.median([other[key] for other in same], axis=0).tolist()
            row["processes"] = len(same)
        rows.append(row)
    return rows
