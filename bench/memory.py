"""Memory: the peak of one training step in its own process, and the largest tensor that any operation makes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from . import truth
from .batches import make_batch
from .measure import reason_of
from .peers import OURS, Ours, Step, Unavailable, load

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Written to clear_refs it sets the peak of the resident set back to what is resident now (proc(5))."""

BUILT_IN = ("aten", "prim", "prims")


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


def step_memory(job: dict[str, Any]) -> dict[str, Any]:
    """One job of kind "memory": peak of forward and backward beyond the interpreter, its libraries and the inputs.

    Args:
        job: implementation, loss, n, d, temperature, backend.

    Returns:
        ``{"row": {...}}`` in the format that `bench.report` describes.
    """
    name, loss, n, d = str(job["implementation"]), str(job["loss"]), int(job["n"]), int(job["d"])
    row: dict[str, Any] = {"implementation": name, "loss": loss, "n": n, "status": "refused"}
    try:
        implementation = load(name, job["backend"])
        refused = implementation.refuses(loss, n)
        if refused is not None:
            raise Unavailable(refused)
        # A small step first: it loads code and lets the libraries make their own buffers, which are not the loss's.
        small = make_batch(loss, 64, d)
        z = small.embeddings.requires_grad_()
        implementation.step(small, job["temperature"])(z).backward()  # type: ignore[no-untyped-call]
        batch = make_batch(loss, n, d)
        embeddings = batch.embeddings.requires_grad_()
        step = implementation.step(batch, job["temperature"])
        started = time.process_time()
        row["bytes"] = peak_beyond(lambda: step(embeddings).backward())  # type: ignore[no-untyped-call]
        row["once_ms"] = 1e3 * (time.process_time() - started)
        row["status"] = "measured"
    except Unavailable as error:
        row["reason"] = str(error)
    except Exception as error:  # outside code may raise anything, and may run out of memory
        row["reason"] = reason_of(error)
    return {"row": row}


def large_step(job: dict[str, Any]) -> dict[str, Any]:
    """One job of kind "large": ours alone at a size where nothing quadratic fits; peak, time, error of some anchors.

    Args:
        job: loss, n, d, temperature, backend, anchors (how many are compared with float64).

    Returns:
        ``{"row": {...}}`` in the format that `bench.report` describes.
    """
    found = step_memory({**job, "implementation": OURS})["row"]
    if found["status"] != "measured":
        return {"row": found}
    n, temperature = int(job["n"]), float(job["temperature"])
    batch = make_batch(job["loss"], n, job["d"])
    with torch.no_grad():
        values = Ours(job["backend"]).step(batch, temperature, reduction="none")(batch.embeddings)
    rows = torch.arange(0, n, max(1, n // int(job["anchors"])))
    true = truth.anchor_values(batch, temperature, rows)
    found["worst_anchor_error"] = float(((values[rows].to(torch.float64) - true).abs() / true).max())
    found["anchors_compared"] = len(rows)
    return {"row": found}


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
