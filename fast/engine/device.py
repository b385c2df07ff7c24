"""What depends on the device: the dtype to compute in, whether values may be read, and reusable CPU buffers.

On a CPU, the first access to new memory is slow, so each thread keeps some buffers between calls: at most one per use
and dtype. An accelerator's allocator does this itself.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

MOST_ENTRIES = 2**22
"""Largest number of entries of an idle buffer: 16 MiB in float32."""


def dtypes_of(tensor: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype to compute in, and a wide dtype for the few results that need more precision.

    The first is float64 for float64 tensors, else float32. The second is float64 if the device supports it.
    """
    computing = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return computing, torch.float32 if tensor.device.type == "mps" else torch.float64


def tf32_allowed() -> bool:
    """Return whether torch's settings allow TF32 in products of float32 matrices on CUDA devices."""
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if precision is None:  # torch before 2.9
        return bool(torch.backends.cuda.matmul.allow_tf32)
    return bool(precision == "tf32")


_TRACING = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)


def traced(tensor: Tensor) -> bool:
    """Return whether tensors have no values: they are fake, or a graph is compiled, exported or traced."""
    if torch.compiler.is_compiling() or isinstance(tensor, FakeTensor):
        return True
    return torch._C._len_torch_dispatch_stack() > 0 and any(map(torch._C._get_dispatch_mode, _TRACING))


def may_read(tensor: Tensor, validate: bool = False) -> bool:
    """Return whether the values of a tensor may be read.

    Reading from an accelerator would wait for all queued work, so it is allowed there only with ``validate``. Values
    are never read while a graph is traced, nor under `torch.func.vmap`.
    """
    if traced(tensor) or tensor.is_meta or not (validate or tensor.is_cpu):
        return False
    if torch._C._are_functorch_transforms_active():
        while torch._C._functorch.is_gradtrackingtensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        return not torch._C._functorch.is_batchedtensor(tensor)
    return True


def autocast(tensor: Tensor) -> bool:
    """Return whether autocast is enabled for the device of a tensor."""
    kind = tensor.device.type
    return (kind == "cpu" or torch.amp.is_autocast_available(kind)) and torch.is_autocast_enabled(kind)


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which autocast is disabled for the device of a tensor."""
    return torch.autocast(tensor.device.type, enabled=False) if autocast(tensor) else nullcontext()


class _Buffers(threading.local):
    """The idle buffers of one thread, by use and dtype."""

    def __init__(self) -> None:
        self.idle: dict[tuple[str, torch.dtype], Tensor] = {}


_BUFFERS = _Buffers()


def borrow(use: str, like: Tensor, entries: int) -> Tensor:
    """Return a flat, uninitialised buffer of at least ``entries`` numbers, with the dtype and device of ``like``.

    `give_back` returns it for reuse. Otherwise it is freed like any tensor.
    """
    if like.device.type != "cpu":
        return like.new_empty(entries)
    idle = _BUFFERS.idle.pop((use, like.dtype), None)
    if idle is not None and idle.numel() >= entries:
        return idle
    # A buffer created in inference mode could not be written to outside it.
    with torch.inference_mode(False):
        return torch.empty(entries, dtype=like.dtype, device=like.device)


def give_back(use: str, buffer: Tensor) -> None:
    """Keep a buffer for the next `borrow` with the same use, unless it is larger than `MOST_ENTRIES`."""
    if buffer.device.type == "cpu" and buffer.numel() <= MOST_ENTRIES and not isinstance(buffer, FakeTensor):
        _BUFFERS.idle[use, buffer.dtype] = buffer
