"""Time and memory of one loss at one size, with one thread.

Every implementation is checked first. In each round, every peer is sampled next to a sample of `pairproof.fast`, before
or after it in turn. The ratio of such a pair depends least on other load of the machine. ``torch.mm`` at the shape of a
tile is sampled in the same way: it shows the best possible throughput in the same run. On a GPU, writing such a product
takes longer than computing it, so a large square product is measured as well.
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
from .batches import DTYPES, KINDS, Batch, make_batch
from .machine import field_bytes
from .peers import CAPTURED, OURS, Implementation, Step, Unavailable, load, names_for, ours

Samples = npt.NDArray[np.float64]
Shapes = dict[str, tuple[int, int, int | None]]

TARGET_SECONDS = 0.03
"""Duration of one sample: short steps are repeated, and the time is reported per call."""

SLOW_ROUNDS = 5
"""Number of rounds for a peer whose step takes longer than `Clock.slow_seconds`."""

ROWS_TO_CHECK = 8192
"""Maximum number of rows for the comparison in float64. For a larger batch, a batch of this size is compared."""

ROUGH = 0.05
"""Relative error of the loss on random rows, in the measured dtype, above which it is not a rounding error."""

PARTS = ("forward", "both")
"""Parts of a step: the forward pass with autograd, and the whole step."""

STATUS = "/proc/self/status"
CLEAR = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Written to clear_refs, it resets the peak of the resident set to the current size (see proc(5))."""


def peak_beyond(function: Callable[[], object]) -> int:
    """Return the peak growth of the resident set while a function runs.

    Args:
        function: called once.

    Returns:
        Number of bytes beyond those resident before the call, exact to a few pages per thread.

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


class Clock:
    """Takes samples. This class measures the CPU time of the process, `bench.cuda` the time between CUDA events."""

    products: ClassVar[Shapes] = {"mm": (384, 384, None)}
    """Rows, columns and depth (None: the columns of the embeddings) of the matrix products for the comparison."""

    on_device: bool = False
    """Whether a timing job also measures peak memory; on a CPU, this needs a separate process."""

    flops: ClassVar[tuple[int, int]] = (1, 4)
    """Minimum number of operations of `PARTS`, in units of N*N*D, if each tile is recomputed for its gradient."""

    slow_seconds: float = 5.0
    """Duration of a step above which only `SLOW_ROUNDS` rounds are measured."""

    def mark(self) -> Any:
        """Return the current time."""
        return time.process_time()

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two times."""
        return float(end - start)

    def wait(self) -> None:
        """Wait until the device has finished all work."""

    def step(self, step: Step, embeddings: Tensor, repeats: int) -> tuple[float, float]:
        """Return the seconds per call of the forward pass of a training step, with autograd, and of the whole step.

        All calls are queued before synchronising. If the device is slower than the host, this measures the time of the
        device. If the host is slower (small sizes on a GPU), it measures the time of the host, as in training.
        """
        moments = []
        self.wait()
        for _ in range(repeats):
            embeddings.grad = None
            start = self.mark()
            loss = step(embeddings)
            middle = self.mark()
            loss.backward()  # type: ignore[no-untyped-call]
            moments.append((start, middle, self.mark()))
        self.wait()
        forward = sum(self.seconds(start, middle) for start, middle, _ in moments)
        both = sum(self.seconds(start, end) for start, _, end in moments)
        return forward / repeats, both / repeats

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
        """Return the maximum memory of one step in bytes; None if the limit of the process applies."""
        return None

    def peak(self, step: Step, embeddings: Tensor) -> int:
        """Return the peak memory of one step in bytes, beyond what was allocated before."""
        return peak_beyond(lambda: step(embeddings).backward())  # type: ignore[no-untyped-call]

    def capture(self, step: Step, embeddings: Tensor) -> tuple[Callable[[], object], Tensor]:
        """Capture a training step; return a function that replays it on the current embeddings, and the loss tensor.

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


def evaluate(step: Step, embeddings: Tensor) -> tuple[float, Tensor]:
    """Return the loss and the gradient of one training step."""
    z = embeddings.detach().clone().requires_grad_()
    loss = step(z)
    loss.backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None  # it is a leaf
    return float(loss.detach()), z.grad


@contextmanager
def recorded(row: dict[str, Any]) -> Iterator[None]:
    """Set the status of a row to "measured", or to "refused" with the reason if the code within the context fails."""
    row["status"] = "refused"
    try:
        yield
        row["status"] = "measured"
    except Unavailable as error:
        row["reason"] = str(error)
    except Exception as error:  # a peer may raise any exception, and may run out of memory
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        out_of_memory = isinstance(error, MemoryError) or "alloc" in line
        row["reason"] = "does not fit into the memory limit" if out_of_memory else f"{type(error).__name__}: {line}"


def check_agreement(implementation: Implementation, batch: Batch, temperature: float, true: float) -> None:
    """Compare an implementation's float64 value with the true one.

    Args:
        implementation: to check.
        batch: the batch that will be timed.
        temperature: positive number.
        true: the true loss of the whole batch.

    Raises:
        Unavailable: the values differ, so it computes another loss.
    """
    rows, device = implementation.rows_to_check.get(batch.loss, ROWS_TO_CHECK), str(batch.embeddings.device)
    expected, some = true, batch.to(torch.float64)
    if batch.n > rows:
        some = make_batch(batch.loss, rows, batch.embeddings.shape[1], device=device).to(torch.float64)
        expected = truth.loss_alone(some, temperature)
    with torch.no_grad():
        found = float(implementation.check_step(some, temperature)(some.embeddings))
    if not abs(found - expected) <= implementation.agreement * abs(expected):
        raise Unavailable(f"computes another loss: {found!r} in float64, expected {expected!r}")


def check_roughly(errors: dict[str, dict[str, float]]) -> None:
    """Check that the error in the measured dtype is not too large; the float64 check may have run other kernels.

    Args:
        errors: by kind of batch. Only random rows are judged: losses of trained-like rows may be too small for a dtype.

    Raises:
        Unavailable: the loss is wrong.
    """
    error = errors.get("random", {}).get("loss", 0.0)
    if not error <= ROUGH:
        raise Unavailable(f"its loss in this dtype is wrong by {error:.0%}")


def quartiles(values: Sequence[float] | Samples) -> list[float]:
    """Return the lower quartile, the median and the upper quartile."""
    found: list[float] = np.percentile(values, [25, 50, 75]).tolist()
    return found


def _quartiles_of_parts(key: str, figures: Samples) -> dict[str, list[float]]:
    """Return the quartiles of figures ``[rounds, 2]`` for each of `PARTS`, with a key as the suffix of the name."""
    return {f"{part}_{key}": quartiles(column) for part, column in zip(PARTS, figures.T, strict=True)}


def _repeats(estimate: float) -> int:
    """Return the number of calls for one sample, given the estimated seconds per call."""
    return max(1, math.ceil(TARGET_SECONDS / max(estimate, 1e-6)))


class _Contender:
    """An implementation that has passed the checks, with its samples."""

    def __init__(self, implementation: Implementation, step: Step, embeddings: Tensor, clock: Clock) -> None:
        self.implementation, self.run, self.embeddings, self.clock = implementation, step, embeddings, clock
        self.samples: list[tuple[float, float]] = []
        # The first call also loads code, so a second one is timed unless it takes long.
        _, self.estimate = clock.step(step, embeddings, 1)
        if self.estimate < 1.0 or implementation.compiled:
            _, self.estimate = clock.step(step, embeddings, 1)
        self.repeats = min(1000, _repeats(self.estimate))

    def sample(self) -> tuple[float, float]:
        gc.collect()
        with precision_of(self.implementation):
            self.samples.append(self.clock.step(self.run, self.embeddings, self.repeats))
        return self.samples[-1]

    def beside(self, sample: Callable[[], Any], number: int) -> tuple[tuple[float, float], Any]:
        """Take a sample of this and one of something else; the order alternates with the number of the round."""
        if number % 2:
            other = sample()
            return self.sample(), other
        return self.sample(), sample()


class _Timing:
    """A timing job: its batches and their true values."""

    def __init__(self, job: dict[str, Any], clock: Clock) -> None:
        self.job, self.clock, self.temperature = job, clock, float(job["temperature"])
        n, d, dtype = job["n"], job["d"], DTYPES[job["dtype"]]
        # Round to the dtype first: the true values are those of the rows that every implementation gets.
        self.batches = {kind: make_batch(job["loss"], n, d, kind, device=job["device"]).to(dtype) for kind in KINDS}
        self.batch = self.batches["random"]
        # The rows whose gradient is compared, spread over the batch.
        self.compared = torch.arange(0, n, max(1, n // (job["gradient_rows"] or n)), device=job["device"])
        self.truths = {
            kind: truth.loss_and_gradient(batch, self.temperature, self.compared)
            for kind, batch in self.batches.items()
            if job["errors"]
        }
        self.true = self.truths["random"][0] if self.truths else truth.loss_alone(self.batch, self.temperature)

    def errors(self, kind: str, loss: float, gradient: Tensor) -> dict[str, float]:
        return truth.errors(loss, gradient[self.compared], self.truths[kind])

    def prepare(self, name: str, row: dict[str, Any]) -> _Contender:
        """Load, check and warm up an implementation."""
        if name in self.job["skip"]:
            raise Unavailable(self.job["skip"][name])
        implementation = load(name, self.job["backend"])
        row["version"] = implementation.version(implementation.loaded)
        dtype = self.batch.embeddings.dtype
        implementation.check_memory(self.batch.loss, self.batch.n, dtype, self.clock.available())
        check_agreement(implementation, self.batch, self.temperature, self.true)
        given = torch.float32 if implementation.tf32 else dtype
        row["errors"] = {}
        with precision_of(implementation):
            for kind in self.truths:
                batch = self.batches[kind].to(given)
                step = implementation.step(batch, self.temperature)
                row["errors"][kind] = self.errors(kind, *evaluate(step, batch.embeddings))
            check_roughly(row["errors"])
            embeddings = self.batch.embeddings.detach().to(given, copy=True).requires_grad_()
            step = implementation.step(self.batch, self.temperature)
            contender = _Contender(implementation, step, embeddings, self.clock)
            if self.clock.on_device:
                row["bytes"] = self.clock.peak(step, embeddings)
        return contender

    def captured(self, ours: _Contender, row: dict[str, Any]) -> None:
        """Measure our step replayed as a CUDA graph: its errors, and its time next to that of the step."""
        embeddings = ours.embeddings.detach().clone().requires_grad_()
        replay, loss = self.clock.capture(ours.run, embeddings)
        # The random rows come last, since they are timed.
        for kind in reversed(KINDS):
            with torch.no_grad():
                embeddings.copy_(self.batches[kind].embeddings)
            replay()
            assert embeddings.grad is not None  # the graph writes it
            if kind in self.truths:
                row["errors"][kind] = self.errors(kind, float(loss), embeddings.grad)
        check_roughly(row["errors"])
        repeats = _repeats(self.clock.call(replay, 20))
        pairs = [ours.beside(lambda: self.clock.call(replay, repeats), number) for number in range(self.job["rounds"])]
        row |= {"rounds": len(pairs), "repeats": repeats}
        row["both_ms"] = quartiles([1e3 * theirs for _, theirs in pairs])
        row["both_ratio"] = quartiles([theirs / mine for (_, mine), theirs in pairs])

    def product(self, shape: tuple[int, int, int]) -> Callable[[], float]:
        """Return a function that samples a matrix product of a shape (rows, columns, depth) in the measured dtype."""
        rows, columns, depth = shape
        a, b = (self.batch.embeddings.new_empty(size, depth).normal_() for size in (rows, columns))
        out = torch.mm(a, b.T)

        def multiply() -> Tensor:
            return torch.mm(a, b.T, out=out)

        repeats = _repeats(self.clock.call(multiply, 20))
        return lambda: self.clock.call(multiply, repeats)


def time_loss(job: dict[str, Any], clock: Clock) -> list[dict[str, Any]]:
    """Run a job of kind "time".

    Args:
        job: loss, n, d, temperature, rounds, dtype, device, backend, errors (whether to compute them), skip (names
            that are not measured, with the reason), gradient_rows (number of rows of the gradient to compare, None
            for all) and captured (whether to replay the step as a CUDA graph too).
        clock: the clock of the device.

    Returns:
        One row per implementation, in the format that `bench.report` describes; on a GPU with ``bytes``.
    """
    timing = _Timing(job, clock)
    rows: dict[str, dict[str, Any]] = {}
    peers: dict[str, _Contender] = {}
    for name in names_for(job["loss"], job["device"], job["dtype"]):
        rows[name] = {"implementation": name}
        with recorded(rows[name]):
            peers[name] = timing.prepare(name, rows[name])
    ours = peers.pop(OURS, None)
    if ours is None:
        for name in peers:
            rows[name] |= {"status": "refused", "reason": "pairproof could not be measured next to it"}
        return list(rows.values())
    shapes = {name: (*shape[:2], shape[2] or job["d"]) for name, shape in clock.products.items()}
    products = {name: timing.product(shape) for name, shape in shapes.items()}
    pairs: dict[str, list[Any]] = {name: [] for name in (*products, *peers)}
    gc.disable()
    for number in range(job["rounds"]):
        for name, sample in products.items():
            pairs[name].append(ours.beside(sample, 0))
        for name, peer in peers.items():
            if peer.estimate <= clock.slow_seconds or number < SLOW_ROUNDS:
                pairs[name].append(ours.beside(peer.sample, number))
    gc.enable()
    for name, contender in {OURS: ours, **peers}.items():
        rows[name] |= {"rounds": len(pairs["mm" if name == OURS else name]), "repeats": contender.repeats}
        rows[name] |= _quartiles_of_parts("ms", 1e3 * np.array(contender.samples))
        if name != OURS:
            mine, theirs = np.array(pairs[name]).swapaxes(0, 1)
            rows[name] |= _quartiles_of_parts("ratio", theirs / mine)
    for name, shape in shapes.items():
        work, seconds = 2 * math.prod(shape), np.array([[second] for _, second in pairs[name]])
        rows[OURS][f"{name}_gflops"] = work / float(np.median(seconds)) / 1e9
        if job["loss"] != "info_nce":  # the operations of two towers are not N*N*D
            rates = np.array(clock.flops) * job["n"] ** 2 * job["d"] / np.array([mine for mine, _ in pairs[name]])
            key = "share" if name == "mm" else f"{name}_share"
            rows[OURS] |= _quartiles_of_parts(key, rates / (work / seconds))
            if name == "mm":
                for part, rate in zip(PARTS, np.median(rates, axis=0), strict=True):
                    rows[OURS][f"{part}_gflops"] = float(rate) / 1e9
    if job["captured"]:
        version = ours.implementation.version(ours.implementation.loaded)
        rows[CAPTURED] = {"implementation": CAPTURED, "version": version, "errors": {}}
        with recorded(rows[CAPTURED]):
            timing.captured(ours, rows[CAPTURED])
    return list(rows.values())


def step_memory(job: dict[str, Any], clock: Clock) -> list[dict[str, Any]]:
    """Run a job of kind "memory": peak of forward and backward beyond the interpreter, its libraries and the inputs.

    Args:
        job: implementation, loss, n, d, temperature, backend, dtype, device; for pairproof optionally anchors, the
            number of anchors whose values are compared with float64.
        clock: the clock of the device.

    Returns:
        One row in the format that `bench.report` describes.
    """
    loss, n, temperature = str(job["loss"]), int(job["n"]), float(job["temperature"])
    row: dict[str, Any] = {"implementation": job["implementation"]}
    with recorded(row):
        implementation = load(job["implementation"], job["backend"])
        dtype = DTYPES[job["dtype"]]
        implementation.check_memory(loss, n, dtype, None)
        # A small step first, to load code and allocate the buffers of libraries, which do not belong to the loss.
        small, batch = (make_batch(loss, rows, job["d"], device=job["device"]).to(dtype) for rows in (64, n))
        evaluate(implementation.step(small, temperature), small.embeddings)
        step, embeddings = implementation.step(batch, temperature), batch.embeddings.requires_grad_()
        started = time.process_time()
        row["bytes"] = clock.peak(step, embeddings)
        if not clock.on_device:
            row["once_ms"] = 1e3 * (time.process_time() - started)
        if "anchors" in job:
            with torch.no_grad():
                values = ours(job["backend"], batch, temperature, reduction="none")(batch.embeddings)
            rows = torch.arange(0, n, max(1, n // job["anchors"]))
            true = truth.anchor_values(batch, temperature, rows)
            row["worst_anchor_error"] = float(((values[rows].to(torch.float64) - true).abs() / true).max())
            row["anchors_compared"] = len(rows)
    return [row]


def median_of_processes(runs: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Combine the rows of one job from several processes into one row per implementation.

    Args:
        runs: the rows of each process, with the same implementations in the same order.

    Returns:
        The rows of the first process, in which each time, ratio and share is the median over all processes. If a
        process refused an implementation, its row is returned.
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
