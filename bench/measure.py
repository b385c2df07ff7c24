"""Times of one loss at one size: every implementation checked, then alternated with ours, one thread, process time.

A round takes each peer in turn, with a sample of ours next to each of its own, before it or after it by turns. The
ratio of the two samples of such a pair is what the machine's other business disturbs least. The same is done with
``torch.mm`` at the shape of a tile: it says what the machine could do at best in that very run. On a GPU, where writing
a tile of so few columns takes longer than multiplying it, a large square product stands beside it.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from . import truth
from .batches import DTYPES, KINDS, Batch, make_batch
from .peers import CAPTURED, OURS, Implementation, Step, Unavailable, load, names_for

TARGET_SECONDS = 0.03
"""Of one sample: short steps are repeated until they take as long, and the time is reported per call."""

SLOW_ROUNDS = 5
"""Of a peer whose step takes longer than its clock's `Clock.slow_seconds`."""

ROUGH = 0.05
"""Relative error of the loss on random rows, in the dtype itself, above which it is wrong and not rounded."""

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Written to clear_refs it sets the peak of the resident set back to what is resident now (proc(5))."""

SYMMETRIC = ("nt_xent", "supcon", "pairwise_views", "pairwise_classes")


def _status_bytes(field: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise Unavailable(f"{STATUS} has no {field}")


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
        before = _status_bytes("VmRSS")
        function()
        return max(0, _status_bytes("VmHWM") - before)
    except OSError as error:
        raise Unavailable(f"peak memory needs Linux with /proc/self/clear_refs ({error})") from None


class Clock:
    """Takes samples: here CPU time of this process, in `bench.cuda` time between events of a GPU."""

    tile: tuple[int, int] = (384, 384)
    """Rows and columns of the matrix product that stands for the machine's best."""

    square: int | None = None
    """Rows and columns of the large product that stands beside it, if one does."""

    on_device: bool = False
    """Whether a timing measures the peak of memory too; on a CPU that takes a process of its own."""

    flops: ClassVar[dict[str, int]] = {"forward": 1, "both": 4}
    """Times N*N*D: what "forward" and "both" need at least, each tile made anew for its gradient."""

    slow_seconds: float = 5.0
    """Of one step, above which `SLOW_ROUNDS` rounds do."""

    def step(self, step: Step, embeddings: Tensor, repeats: int) -> tuple[float, float]:
        """Seconds per call of the forward half of a training step, the graph recorded, and of all of it."""
        forward = both = 0.0
        for _ in range(repeats):
            embeddings.grad = None
            start = time.process_time()
            loss = step(embeddings)
            middle = time.process_time()
            loss.backward()  # type: ignore[no-untyped-call]
            end = time.process_time()
            forward += middle - start
            both += end - start
        return forward / repeats, both / repeats

    def call(self, function: Callable[[], object], repeats: int) -> float:
        """Seconds per call of a function."""
        start = time.process_time()
        for _ in range(repeats):
            function()
        return (time.process_time() - start) / repeats

    def room(self) -> int | None:
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
    if not implementation.tf32:
        yield
        return
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, True
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


def reason_of(error: BaseException) -> str:
    """An exception as one short line."""
    text = str(error).strip().splitlines()
    line = text[0] if text else type(error).__name__
    if isinstance(error, MemoryError) or "alloc" in line:
        return "does not fit the memory limit"
    return f"{type(error).__name__}: {line}"


@contextmanager
def recorded(row: dict[str, Any]) -> Iterator[None]:
    """Write into a row how what stands within the context ended: as "measured", or as "refused" with the reason."""
    row["status"] = "refused"
    try:
        yield
    except Unavailable as error:
        row["reason"] = str(error)
    except Exception as error:  # outside code may raise anything, and may run out of memory
        row["reason"] = reason_of(error)
    else:
        row["status"] = "measured"


def check_agreement(implementation: Implementation, batch: Batch, temperature: float, true: float) -> None:
    """Hold an implementation's float64 value to the true one.

    Args:
        implementation: to check.
        batch: that will be timed.
        temperature: positive number.
        true: the loss of the whole batch.

    Raises:
        Unavailable: the values differ, so it computes another loss.
    """
    rows = implementation.rows_to_check(batch.loss, batch.n)
    some = batch.first(rows).to(torch.float64)
    expected = true if some.n == batch.n else truth.loss_alone(some, temperature)
    with torch.no_grad():
        found = float(implementation.check_step(some, temperature)(some.embeddings))
    if not abs(found - expected) <= implementation.agreement * abs(expected):
        raise Unavailable(f"computes another loss: {found!r} in float64, where {expected!r} is true")


class _Contender:
    """An implementation that passed the check, with its samples."""

    def __init__(self, implementation: Implementation, step: Step, embeddings: Tensor, clock: Clock) -> None:
        self.name = implementation.name
        self.implementation = implementation
        self.run = step
        self.clock = clock
        self.embeddings = embeddings
        self.samples: list[tuple[float, float]] = []
        # The first call also loads code; a second one that would take long is not spent on the estimate.
        _, estimate = clock.step(step, embeddings, 1)
        if estimate < 1.0 or implementation.compiled:
            _, estimate = clock.step(step, embeddings, 1)
        self.estimate = estimate
        self.repeats = min(1000, _repeats(estimate))

    def sample(self) -> tuple[float, float]:
        gc.collect()
        with precision_of(self.implementation):
            found = self.clock.step(self.run, self.embeddings, self.repeats)
        self.samples.append(found)
        return found


def _repeats(estimate: float) -> int:
    """How many calls make one sample of something that takes so many seconds."""
    return max(1, math.ceil(TARGET_SECONDS / max(estimate, 1e-6)))


def quartiles(values: Iterable[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    return [float(v) for v in np.percentile(list(values), [25, 50, 75])]


def _milliseconds(values: Iterable[float]) -> list[float]:
    return [1e3 * value for value in quartiles(values)]


def _sampled(job: dict[str, Any]) -> Tensor | None:
    """The rows whose gradient is compared, spread over the batch; None: all of them."""
    count, n = job["gradient_rows"], int(job["n"])
    return None if count is None else torch.arange(0, n, max(1, n // int(count)))


def _errors(loss: float, gradient: Tensor, expected: tuple[float, Tensor], job: dict[str, Any]) -> dict[str, float]:
    rows = _sampled(job)
    return truth.errors(loss, gradient if rows is None else gradient[rows.to(gradient.device)], expected)


def _prepare(
    job: dict[str, Any], batches: dict[str, Batch], truths: dict[str, tuple[float, Tensor]], clock: Clock
) -> tuple[dict[str, _Contender], dict[str, dict[str, Any]]]:
    """Load, check and warm up every implementation. Return those that are to be timed, and the rows of all."""
    temperature, batch = float(job["temperature"]), batches["random"]
    true = truths["random"][0] if truths else truth.loss_alone(batch, temperature)
    embeddings, room = batch.embeddings.clone().requires_grad_(), clock.room()
    contenders: dict[str, _Contender] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name in names_for(batch.loss, job["device"], job["dtype"]):
        row = rows[name] = {"implementation": name}
        with recorded(row):
            if name in job["skip"]:
                raise Unavailable(job["skip"][name])
            implementation = load(name, job["backend"])
            row["version"] = implementation.version()
            refused = implementation.refuses(batch.loss, batch.n)
            refused = refused or implementation.does_not_fit(batch.loss, batch.n, batch.embeddings.dtype, room)
            if refused is not None:
                raise Unavailable(refused)
            check_agreement(implementation, batch, temperature, true)
            row["errors"] = {}
            given = implementation.given or batch.embeddings.dtype
            with precision_of(implementation):
                for kind, expected in truths.items():
                    of_kind = batches[kind].to(given)
                    found = evaluate(implementation.step(of_kind, temperature), of_kind.embeddings)
                    row["errors"][kind] = _errors(*found, expected, job)
                check_roughly(row["errors"])
                own = embeddings.detach().to(given).requires_grad_()
                contenders[name] = _Contender(implementation, implementation.step(batch, temperature), own, clock)
                if clock.on_device:
                    row["bytes"] = clock.peak(contenders[name].run, own)
    return contenders, rows


def check_roughly(errors: dict[str, dict[str, float]]) -> None:
    """Hold what was computed in the dtype itself to the truth, roughly: the check in float64 saw other kernels.

    Args:
        errors: by kind of batch; losses of trained-like rows may be too small for some dtypes and are not judged.

    Raises:
        Unavailable: the loss is wrong.
    """
    error = errors.get("random", {}).get("loss", 0.0)
    if not error <= ROUGH:
        raise Unavailable(f"its loss in this dtype is {error:.0%} off")


def _product(clock: Clock, shape: tuple[int, int, int], like: Tensor) -> Callable[[], float]:
    """A sample of a matrix product of a shape (rows, columns, depth) in a tensor's dtype."""
    rows, columns, depth = shape
    a, b = (torch.randn(size, depth, device=like.device, dtype=like.dtype) for size in (rows, columns))
    out = torch.mm(a, b.T)

    def multiply() -> Tensor:
        return torch.mm(a, b.T, out=out)

    repeats = _repeats(clock.call(multiply, 20))
    return lambda: clock.call(multiply, repeats)


def _products(clock: Clock, d: int) -> dict[str, tuple[int, int, int]]:
    """What is multiplied beside ours, by name: rows, columns, depth."""
    shapes = {"mm": (*clock.tile, d)}
    return shapes if clock.square is None else shapes | {"square": (clock.square,) * 3}


def _pair(ours: _Contender, sample: Callable[[], Any], number: int) -> tuple[tuple[float, float], Any]:
    """A sample of ours and one of something else, in an order that alternates with the number of the round."""
    if number % 2:
        other = sample()
        return ours.sample(), other
    return ours.sample(), sample()


def _captured(
    job: dict[str, Any],
    ours: _Contender,
    batches: dict[str, Batch],
    truths: dict[str, tuple[float, Tensor]],
    clock: Clock,
) -> dict[str, Any]:
    """The row of our step replayed as one graph: its errors, and its time alternated with that of the step itself."""
    row: dict[str, Any] = {"implementation": CAPTURED, "version": ours.implementation.version(), "errors": {}}
    with recorded(row):
        embeddings = ours.embeddings.detach().clone().requires_grad_()
        replay, loss = clock.capture(ours.run, embeddings)
        # The random rows last: they are the ones that are timed.
        for kind in reversed(KINDS):
            with torch.no_grad():
                embeddings.copy_(batches[kind].embeddings)
            replay()
            assert embeddings.grad is not None  # the graph writes it
            if kind in truths:
                row["errors"][kind] = _errors(float(loss), embeddings.grad, truths[kind], job)
        check_roughly(row["errors"])
        repeats = _repeats(clock.call(replay, 20))
        pairs = [_pair(ours, lambda: clock.call(replay, repeats), number) for number in range(int(job["rounds"]))]
        row |= {"rounds": len(pairs), "repeats": repeats}
        row["both_ms"] = _milliseconds(theirs for _, theirs in pairs)
        row["both_ratio"] = quartiles(theirs / mine for (_, mine), theirs in pairs)
    return row


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
    loss, n, d, temperature = str(job["loss"]), int(job["n"]), int(job["d"]), float(job["temperature"])
    # Rounded to the dtype at once: the truth is that of the rows which every implementation is given.
    dtype = DTYPES[job["dtype"]]
    batches = {kind: make_batch(loss, n, d, kind, device=job["device"]).to(dtype) for kind in KINDS}
    truths = {}
    if job["errors"]:
        truths = {kind: truth.loss_and_gradient(batch, temperature, _sampled(job)) for kind, batch in batches.items()}
    contenders, rows = _prepare(job, batches, truths, clock)
    contenders = {name: found for name, found in contenders.items() if rows[name]["status"] == "measured"}
    ours = contenders.pop(OURS, None)
    if ours is None:
        for row in rows.values():
            if row["status"] == "measured":
                row |= {"status": "refused", "reason": "ours could not be measured beside it"}
        return list(rows.values())
    products = _products(clock, d)
    multiply = {name: _product(clock, shape, ours.embeddings) for name, shape in products.items()}
    pairs: dict[str, list[Any]] = {name: [] for name in (*products, *contenders)}
    gc.disable()
    for number in range(int(job["rounds"])):
        for name, sample in multiply.items():
            pairs[name].append(_pair(ours, sample, 0))
        for name, peer in contenders.items():
            if peer.estimate <= clock.slow_seconds or number < SLOW_ROUNDS:
                pairs[name].append(_pair(ours, peer.sample, number))
    gc.enable()
    for name, contender in {OURS: ours, **contenders}.items():
        rows[name] |= {"rounds": len(pairs["mm" if name == OURS else name]), "repeats": contender.repeats}
        for index, part in enumerate(("forward", "both")):
            rows[name][f"{part}_ms"] = _milliseconds(sample[index] for sample in contender.samples)
            if name != OURS:
                rows[name][f"{part}_ratio"] = quartiles(theirs[index] / mine[index] for mine, theirs in pairs[name])
    for product, shape in products.items():
        rows[OURS] |= _shares(product, shape, pairs[product], clock.flops, n * n * d if loss in SYMMETRIC else None)
    captured = [_captured(job, ours, batches, truths, clock)] if job["captured"] else []
    return [*rows.values(), *captured]


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


def _shares(
    product: str, shape: tuple[int, int, int], pairs: list[Any], flops: dict[str, int], unit: int | None
) -> dict[str, Any]:
    """What ours does a second, and what share that is of a product in the same run.

    Args:
        product: "mm" or "square".
        shape: of the product.
        pairs: (ours, seconds of one product).
        flops: how many units forward and both are.
        unit: N*N*D; None where the loss is not counted in these.
    """
    work = 2 * math.prod(shape)
    found: dict[str, Any] = {f"{product}_gflops": work / float(np.median([seconds for _, seconds in pairs])) / 1e9}
    if unit is None:
        return found
    key = "share" if product == "mm" else f"{product}_share"
    for index, part in enumerate(("forward", "both")):
        rates = [flops[part] * unit / mine[index] for mine, _ in pairs]
        shares = [rate / (work / seconds) for rate, (_, seconds) in zip(rates, pairs, strict=True)]
        if product == "mm":
            found[f"{part}_gflops"] = float(np.median(rates)) / 1e9
        found[f"{part}_{key}"] = quartiles(shares)
    return found
