"""Times of one loss at one size: every implementation checked, then alternated with ours, one thread, process time.

A round takes each peer in turn, with a sample of ours next to each of its own, before it or after it by turns. The
ratio of the two samples of such a pair is what the machine's other business disturbs least. The same is done with
``torch.mm`` at the shape of a tile: it says what the machine could do at best in that very run.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from . import truth
from .batches import KINDS, Batch, make_batch
from .peers import OURS, Implementation, Step, Unavailable, load, names_for

TARGET_SECONDS = 0.03
"""Of one sample: short steps are repeated until they take as long, and the time is reported per call."""

SLOW_SECONDS = 5.0
"""Of one step, above which `SLOW_ROUNDS` rounds do."""

SLOW_ROUNDS = 5

AGREEMENT = 1e-9
"""Relative difference of float64 values above which two implementations compute different losses."""

SYMMETRIC = ("nt_xent", "supcon", "pairwise_views", "pairwise_classes")


class Clock(Protocol):
    """Takes samples on one kind of device."""

    tile: tuple[int, int]
    """Rows and columns of the matrix product that stands for the machine's best."""

    flops: ClassVar[dict[str, int]]
    """Times N*N*D: what "forward" and "both" need at least, each tile made anew for its gradient."""

    def step(self, step: Step, embeddings: Tensor, repeats: int) -> tuple[float, float]:
        """Seconds per call of the forward half of a training step, and of all of it."""

    def call(self, function: Callable[[], object], repeats: int) -> float:
        """Seconds per call of a function."""


class ProcessClock:
    """CPU time of this process."""

    tile = (384, 384)
    flops: ClassVar[dict[str, int]] = {"forward": 1, "both": 4}

    def step(self, step: Step, embeddings: Tensor, repeats: int) -> tuple[float, float]:
        """Forward with the graph recorded, then backward; both are clocked in each call."""
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
        """A plain loop."""
        start = time.process_time()
        for _ in range(repeats):
            function()
        return (time.process_time() - start) / repeats


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
        found = float(implementation.step(some, temperature)(some.embeddings))
    if not abs(found - expected) <= AGREEMENT * abs(expected):
        raise Unavailable(f"computes another loss: {found!r} in float64, where {expected!r} is true")


class _Contender:
    """An implementation that passed the check, with its samples."""

    def __init__(self, name: str, step: Step, embeddings: Tensor, clock: Clock) -> None:
        self.name = name
        self.run = step
        self.clock = clock
        self.embeddings = embeddings
        self.samples: list[tuple[float, float]] = []
        # The first call also loads code; a second one that would take long is not spent on the estimate.
        _, estimate = clock.step(step, embeddings, 1)
        if estimate < 1.0:
            _, estimate = clock.step(step, embeddings, 1)
        self.estimate = estimate
        self.repeats = max(1, min(1000, math.ceil(TARGET_SECONDS / max(estimate, 1e-6))))

    def sample(self) -> tuple[float, float]:
        gc.collect()
        found = self.clock.step(self.run, self.embeddings, self.repeats)
        self.samples.append(found)
        return found


def quartiles(values: Sequence[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    return [float(v) for v in np.percentile(np.asarray(values), [25, 50, 75])]


def _prepare(
    job: dict[str, Any], batch: Batch, others: dict[str, Batch], clock: Clock
) -> tuple[dict[str, _Contender], list[dict[str, Any]]]:
    """Load, check and warm up every implementation; their rows, those of the refused ones with the reason."""
    temperature = float(job["temperature"])
    truths = {"random": truth.loss_and_gradient(batch, temperature)} if job["errors"] else {}
    true = truths["random"][0] if truths else truth.loss_alone(batch, temperature)
    if job["errors"]:
        truths |= {kind: truth.loss_and_gradient(other, temperature) for kind, other in others.items()}
    embeddings = batch.embeddings.clone().requires_grad_()
    contenders: dict[str, _Contender] = {}
    rows: list[dict[str, Any]] = []
    for name in names_for(batch.loss):
        row: dict[str, Any] = {"implementation": name, "status": "refused"}
        rows.append(row)
        if name in job["skip"]:
            row["reason"] = job["skip"][name]
            continue
        try:
            implementation = load(name, job["backend"])
            row["version"] = implementation.version()
            refused = implementation.refuses(batch.loss, batch.n)
            if refused is not None:
                raise Unavailable(refused)
            check_agreement(implementation, batch, temperature, true)
            row["errors"] = {}
            for kind, expected in truths.items():
                of_kind = {"random": batch, **others}[kind]
                step = implementation.step(of_kind, temperature)
                row["errors"][kind] = truth.errors(*evaluate(step, of_kind.embeddings), expected)
            contenders[name] = _Contender(name, implementation.step(batch, temperature), embeddings, clock)
        except Unavailable as error:
            row["reason"] = str(error)
        except Exception as error:  # outside code may raise anything, and may run out of memory
            row["reason"] = reason_of(error)
        else:
            row["status"] = "measured"
    return contenders, rows


def _alternate(ours: _Contender, peers: list[_Contender], clock: Clock, d: int, rounds: int) -> dict[str, list[Any]]:
    """The rounds: for every peer its pairs (ours, peer), and under "mm" the pairs (ours, seconds of one product)."""
    a, b = (torch.randn(size, d, device=ours.embeddings.device, dtype=ours.embeddings.dtype) for size in clock.tile)
    out = torch.mm(a, b.T)
    estimate = clock.call(lambda: torch.mm(a, b.T, out=out), 20)
    repeats = max(1, math.ceil(TARGET_SECONDS / max(estimate, 1e-6)))
    pairs: dict[str, list[Any]] = {"mm": [], **{peer.name: [] for peer in peers}}
    for number in range(rounds):
        pairs["mm"].append((ours.sample(), clock.call(lambda: torch.mm(a, b.T, out=out), repeats)))
        for peer in peers:
            if peer.estimate > SLOW_SECONDS and number >= SLOW_ROUNDS:
                continue
            if number % 2:
                theirs = peer.sample()
                pairs[peer.name].append((ours.sample(), theirs))
            else:
                pairs[peer.name].append((ours.sample(), peer.sample()))
    return pairs


def time_loss(job: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """One job of kind "time".

    Args:
        job: loss, n, d, temperature, rounds, dtype, device, backend, errors (whether to compute them), skip (names
            that are not measured, with the reason).
        clock: of the device.

    Returns:
        ``{"rows": [...]}``, one row per implementation, in the format that `bench.report` describes.
    """
    loss, n, d = str(job["loss"]), int(job["n"]), int(job["d"])
    # Rounded to the dtype at once: the truth is that of the rows which everyone is given.
    made = {kind: make_batch(loss, n, d, kind, device=job["device"]).to(getattr(torch, job["dtype"])) for kind in KINDS}
    batch = made.pop("random")
    contenders, rows = _prepare(job, batch, made, clock)
    ours = contenders.pop(OURS, None)
    if ours is None:
        for row in rows:
            if row["status"] == "measured":
                row |= {"status": "refused", "reason": "ours could not be measured beside it"}
        return {"rows": rows}
    gc.disable()
    pairs = _alternate(ours, list(contenders.values()), clock, d, int(job["rounds"]))
    gc.enable()
    by_name = {row["implementation"]: row for row in rows}
    for contender in [ours, *contenders.values()]:
        forward, both = zip(*contender.samples, strict=True)
        by_name[contender.name] |= {
            "rounds": len(pairs[contender.name if contender is not ours else "mm"]),
            "repeats": contender.repeats,
            "forward_ms": [1e3 * v for v in quartiles(forward)],
            "both_ms": [1e3 * v for v in quartiles(both)],
        }
    for name in contenders:
        by_name[name] |= {
            "forward_ratio": quartiles([theirs[0] / mine[0] for mine, theirs in pairs[name]]),
            "both_ratio": quartiles([theirs[1] / mine[1] for mine, theirs in pairs[name]]),
        }
    product = 2 * clock.tile[0] * clock.tile[1] * d
    by_name[OURS]["mm_gflops"] = product / float(np.median([seconds for _, seconds in pairs["mm"]])) / 1e9
    if loss in SYMMETRIC:
        work = [clock.flops["forward"] * n * n * d, clock.flops["both"] * n * n * d]
        for index, name in enumerate(("forward", "both")):
            rates = [work[index] / mine[index] for mine, _ in pairs["mm"]]
            shares = [rate / (product / seconds) for rate, (_, seconds) in zip(rates, pairs["mm"], strict=True)]
            by_name[OURS] |= {f"{name}_gflops": float(np.median(rates)) / 1e9, f"{name}_share": quartiles(shares)}
    return {"rows": rows}
