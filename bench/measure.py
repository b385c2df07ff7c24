"""Times and memory of one loss at one size, on one thread: every implementation is checked, then alternated with ours.

A round takes each peer in turn, with a sample of ours next to each of its own, before it or after it by turns. The
ratio of the two samples of such a pair is what the machine's other business disturbs least. The same is done with
``torch.mm`` at the shape of a tile: it says what the machine could do at best in that very run. On a GPU, where writing
a tile of so few columns takes longer than multiplying it, a large square product stands beside it.
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
"""Of one sample: short steps are repeated until they take as long, and the time is reported per call."""

SLOW_ROUNDS = 5
"""Of a peer whose step takes longer than its clock's `Clock.slow_seconds`."""

ROWS_TO_CHECK = 8192
"""Of the batch, at most, whose float64 value is compared with the true one; of a larger one another is checked."""

ROUGH = 0.05
"""Relative error of the loss on random rows, in the dtype itself, above which it is wrong and not rounded."""

PARTS = ("forward", "both")
"""Of a step: the forward half with the graph recorded, and all of it."""

STATUS = "/proc/self/status"
CLEAR = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Written to clear_refs it sets the peak of the resident set back to what is resident now (proc(5))."""


def peak_beyond(function: Callable[[], object]) -> int:
    """Bytes by which the resident set grew at its largest while a function ran.

    Args:
        function: called once. What it keeps is counted, what was resident before is not.

    Returns:
        Bytes, exact to a few pages per thread.

    Raises:
        Unavailable: the kernel does not offer this figure.
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
    """Takes samples: here CPU time of this process, in `bench.cuda` time between events of a GPU."""

    products: ClassVar[Shapes] = {"mm": (384, 384, None)}
    """Rows, columns and depth (None: the embeddings' columns) of the matrix products that ours is compared with."""

    on_device: bool = False
    """Whether a timing measures the peak of memory too; on a CPU that takes a process of its own."""

    flops: ClassVar[tuple[int, int]] = (1, 4)
    """Times N*N*D: what `PARTS` need at least, each tile made anew for its gradient."""

    slow_seconds: float = 5.0
    """Of one step, above which `SLOW_ROUNDS` rounds do."""

    def mark(self) -> Any:
        """This moment."""
        return time.process_time()

    def seconds(self, start: Any, end: Any) -> float:
        """The time between two moments."""
        return float(end - start)

    def wait(self) -> None:
        """Wait until the device has done what it was given."""

    def step(self, step: Step, embeddings: Tensor, repeats: int) -> tuple[float, float]:
        """Seconds per call of the forward half of a training step, the graph recorded, and of all of it.

        All calls are queued before the device is waited for, so that its own time is measured where it is slower. Where
        the host is slower (small sizes on a GPU), the time between the moments is the host's, as it is in training.
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
        """Seconds per call of a function."""
        self.wait()
        start = self.mark()
        for _ in range(repeats):
            function()
        end = self.mark()
        self.wait()
        return self.seconds(start, end) / repeats

    def available(self) -> int | None:
        """Bytes that one step may take; None where the process itself is limited."""
        return None

    def peak(self, step: Step, embeddings: Tensor) -> int:
        """Bytes that one step takes at its peak beyond what was there before."""
        return peak_beyond(lambda: step(embeddings).backward())  # type: ignore[no-untyped-call]

    def capture(self, step: Step, embeddings: Tensor) -> tuple[Callable[[], object], Tensor]:
        """A training step as one call that does it again, whatever the embeddings now hold, and the loss it leaves.

        Raises:
            Unavailable: there is no such thing on the device.
        """
        raise Unavailable("a CPU captures no graphs")


@contextmanager
def precision_of(implementation: Implementation) -> Iterator[None]:
    """Within the context float32 products may round to TF32 if the implementation is measured so."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = before or implementation.tf32
    try:
        yield
    finally:
        matmul.allow_tf32 = before


def evaluate(step: Step, embeddings: Tensor) -> tuple[float, Tensor]:
    """Loss and gradient of one training step."""
    z = embeddings.detach().clone().requires_grad_()
    loss = step(z)
    loss.backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None  # it is a leaf
    return float(loss.detach()), z.grad


@contextmanager
def recorded(row: dict[str, Any]) -> Iterator[None]:
    """Write into a row how the code within the context ended: "measured", or "refused" and the reason."""
    row["status"] = "refused"
    try:
        yield
        row["status"] = "measured"
    except Unavailable as error:
        row["reason"] = str(error)
    except Exception as error:  # outside code may raise anything, and may run out of memory
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        out_of_memory = isinstance(error, MemoryError) or "alloc" in line
        row["reason"] = "does not fit the memory limit" if out_of_memory else f"{type(error).__name__}: {line}"


def check_agreement(implementation: Implementation, batch: Batch, temperature: float, true: float) -> None:
    """Compare an implementation's float64 value with the true one.

    Args:
        implementation: to check.
        batch: that will be timed.
        temperature: positive number.
        true: the loss of the whole batch.

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
        raise Unavailable(f"computes another loss: {found!r} in float64, where {expected!r} is true")


def check_roughly(errors: dict[str, dict[str, float]]) -> None:
    """Compare what was computed in the dtype itself with the truth, roughly: the float64 check ran other kernels.

    Args:
        errors: by kind of batch; losses of trained-like rows may be too small for some dtypes and are not judged.

    Raises:
        Unavailable: the loss is wrong.
    """
    error = errors.get("random", {}).get("loss", 0.0)
    if not error <= ROUGH:
        raise Unavailable(f"its loss in this dtype is {error:.0%} off")


def quartiles(values: Sequence[float] | Samples) -> list[float]:
    """Lower quartile, median, upper quartile."""
    found: list[float] = np.percentile(values, [25, 50, 75]).tolist()
    return found


def _quartiles_of_parts(key: str, figures: Samples) -> dict[str, list[float]]:
    """The quartiles of figures ``[rounds, 2]``, by the name of each of `PARTS` with a key."""
    return {f"{part}_{key}": quartiles(column) for part, column in zip(PARTS, figures.T, strict=True)}


def _repeats(estimate: float) -> int:
    """How many calls make one sample of something that takes so many seconds."""
    return max(1, math.ceil(TARGET_SECONDS / max(estimate, 1e-6)))


class _Contender:
    """An implementation that passed the checks, with its samples."""

    def __init__(self, implementation: Implementation, step: Step, embeddings: Tensor, clock: Clock) -> None:
        self.implementation, self.run, self.embeddings, self.clock = implementation, step, embeddings, clock
        self.samples: list[tuple[float, float]] = []
        # The first call also loads code; a second one that would take long is not spent on the estimate.
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
        """A sample of this and one of something else, in an order that alternates with the number of the round."""
        if number % 2:
            other = sample()
            return self.sample(), other
        return self.sample(), sample()


class _Timing:
    """One job: its batches, their truths, and the rows of what is measured."""

    def __init__(self, job: dict[str, Any], clock: Clock) -> None:
        self.job, self.clock, self.temperature = job, clock, float(job["temperature"])
        n, d, dtype = job["n"], job["d"], DTYPES[job["dtype"]]
        # Rounded to the dtype at once: the truth is that of the rows which every implementation is given.
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
        """Our step replayed as one graph: its errors, and its time alternated with that of the step itself."""
        embeddings = ours.embeddings.detach().clone().requires_grad_()
        replay, loss = self.clock.capture(ours.run, embeddings)
        # The random rows last: they are the ones that are timed.
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
        """A sample of a matrix product of a shape (rows, columns, depth) in the embeddings' dtype."""
        rows, columns, depth = shape
        a, b = (self.batch.embeddings.new_empty(size, depth).normal_() for size in (rows, columns))
        out = torch.mm(a, b.T)

        def multiply() -> Tensor:
            return torch.mm(a, b.T, out=out)

        repeats = _repeats(self.clock.call(multiply, 20))
        return lambda: self.clock.call(multiply, repeats)


def time_loss(job: dict[str, Any], clock: Clock) -> list[dict[str, Any]]:
    """One job of kind "time".

    Args:
        job: loss, n, d, temperature, rounds, dtype, device, backend, errors (whether to compute them), skip (names
            that are not measured, with the reason), gradient_rows (how many rows of the gradient are compared, None
            for all) and captured (whether the step is replayed as a graph too).
        clock: of the device.

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
            rows[name] |= {"status": "refused", "reason": "ours could not be measured beside it"}
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
        if job["loss"] != "info_nce":  # its two towers are not counted in N*N*D
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
    """One job of kind "memory": peak of forward and backward beyond the interpreter, its libraries and the inputs.

    Args:
        job: implementation, loss, n, d, temperature, backend, dtype, device; of ours also anchors, if the values of so
            many are compared with float64.
        clock: of the device.

    Returns:
        One row in the format that `bench.report` describes.
    """
    loss, n, temperature = str(job["loss"]), int(job["n"]), float(job["temperature"])
    row: dict[str, Any] = {"implementation": job["implementation"]}
    with recorded(row):
        implementation = load(job["implementation"], job["backend"])
        dtype = DTYPES[job["dtype"]]
        implementation.check_memory(loss, n, dtype, None)
        # A small step first: it loads code and lets the libraries make their own buffers, which are not the loss's.
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
    """The rows of one job that was done in several processes, as one row per implementation.

    Args:
        runs: the rows of each process, of the same implementations in the same order.

    Returns:
        The rows of the first, where each figure of a time, a ratio or a share is the median of all processes'. A row
        that one of the processes refused is that process's.
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
