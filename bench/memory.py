"""Memory: the peak of one training step in its own process, and the largest tensor that any operation makes."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from . import truth
from .batches import DTYPES, make_batch
from .measure import Clock, evaluate, recorded
from .peers import Step, load, ours

BUILT_IN = ("aten", "prim", "prims")


def step_memory(job: dict[str, Any], clock: Clock) -> list[dict[str, Any]]:
    """One job of kind "memory": peak of forward and backward beyond the interpreter, its libraries and the inputs.

    Args:
        job: implementation, loss, n, d, temperature, backend, dtype, device.
        clock: of the device.

    Returns:
        One row in the format that `bench.report` describes.
    """
    loss, n, temperature = str(job["loss"]), int(job["n"]), float(job["temperature"])
    row: dict[str, Any] = {"implementation": job["implementation"]}
    with recorded(row):
        implementation = load(job["implementation"], job["backend"])
        implementation.check_memory(loss, n, DTYPES[job["dtype"]], None)
        # A small step first: it loads code and lets the libraries make their own buffers, which are not the loss's.
        small, batch = (
            make_batch(loss, rows, int(job["d"]), device=job["device"]).to(DTYPES[job["dtype"]]) for rows in (64, n)
        )
        evaluate(implementation.step(small, temperature), small.embeddings)
        step, embeddings = implementation.step(batch, temperature), batch.embeddings.requires_grad_()
        started = time.process_time()
        row["bytes"] = clock.peak(step, embeddings)
        if not clock.on_device:
            row["once_ms"] = 1e3 * (time.process_time() - started)
    return [row]


def large_step(job: dict[str, Any], clock: Clock) -> list[dict[str, Any]]:
    """One job of kind "large": ours alone at a size where nothing quadratic fits; peak, time, error of some anchors.

    Args:
        job: as of step_memory, with anchors (how many are compared with float64).
        clock: of the device.

    Returns:
        One row in the format that `bench.report` describes.
    """
    (found,) = step_memory(job, clock)
    if found["status"] != "measured":
        return [found]
    n, temperature = job["n"], job["temperature"]
    batch = make_batch(job["loss"], n, job["d"])
    with torch.no_grad():
        values = ours(job["backend"], batch, temperature, reduction="none")(batch.embeddings)
    rows = torch.arange(0, n, max(1, n // job["anchors"]))
    true = truth.anchor_values(batch, temperature, rows)
    found["worst_anchor_error"] = float(((values[rows].to(torch.float64) - true).abs() / true).max())
    found["anchors_compared"] = len(rows)
    return [found]


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the largest tensor that an operation makes while this is the current mode.

    Operations that write into what they were given, and views, make nothing. A custom operation is entered: what its
    own code makes counts too. What a built-in kernel takes for itself is not seen; `peak_beyond` sees that.

    Attributes:
        largest: elements of the largest storage.
        maker: the operation that made it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0
        self.maker = "nothing"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at the storages of what it returns."""
        kwargs = kwargs or {}
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        if func.namespace in BUILT_IN:
            returned = func(*args, **kwargs)
        else:
            device = next(t.device.type for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))
            key = torch._C.DispatchKey.CPU if device == "cpu" else torch._C.DispatchKey.CUDA
            with self:
                returned = func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)
        for tensor in tree_leaves(returned):
            if not isinstance(tensor, Tensor) or tensor.untyped_storage().data_ptr() in given:
                continue
            elements = tensor.untyped_storage().nbytes() // tensor.element_size()
            if elements > self.largest:
                self.largest, self.maker = elements, str(func)
        return returned


def largest_allocation(step: Step, embeddings: Tensor) -> tuple[int, str]:
    """Elements of the largest tensor made in forward and backward of one step, and the operation that made it.

    Args:
        step: from embeddings to a scalar.
        embeddings: floating ``[N, D]``.

    Returns:
        Number of elements, and a name.
    """
    z = embeddings.detach().clone().requires_grad_()
    with Allocations() as seen:
        step(z).backward()  # type: ignore[no-untyped-call]
    return seen.largest, seen.maker
