"""What depends on where tensors live: the dtype to compute in, whether values may be read, and buffers of a CPU.

On a CPU, touching fresh memory costs more than computing on it, so some buffers outlive a call; an accelerator's
allocator keeps memory by itself. Each thread has its own buffers: for each of three uses and of two dtypes one, of a
megabyte or two, and never of more than `MOST_ENTRIES`.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

MOST_ENTRIES = 2**20
"""Of a buffer that is kept idle."""


def dtypes_of(tensor: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype to compute in, and a wide one for what is worth a few roundings less.

    The first is float64 for float64, else float32; the second float64 where the device has it.
    """
    computing = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return computing, torch.float32 if tensor.device.type == "mps" else torch.float64


def tf32_allowed() -> bool:
    """Whether the user allows CUDA products of float32 matrices to be made in TF32, by torch's own switches."""
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if precision is None:  # torch before 2.9
        return bool(torch.backends.cuda.matmul.allow_tf32)
    return bool(precision == "tf32")


def may_read(tensor: Tensor, validate: bool = False) -> bool:
    """Whether values may decide how to go on: on an accelerator, reading them would wait for all that is queued.

    They are read there for checks alone, where ``validate`` requests it, and never while a graph is compiled.
    """
    if torch.compiler.is_compiling() or tensor.device.type == "meta":
        return False
    return validate or tensor.device.type == "cpu"


class _Buffers(threading.local):
    """Idle buffers of one thread, by use and dtype."""

    def __init__(self) -> None:
        self.idle: dict[tuple[str, torch.dtype], Tensor] = {}


_BUFFERS = _Buffers()


def borrow(use: str, like: Tensor, entries: int) -> Tensor:
    """Return a flat buffer of ``entries`` numbers of any value, of the dtype and on the device of ``like``.

    It belongs to the caller until `give_back`; what is never given back is freed like any tensor.
    """
    if like.device.type != "cpu":
        return like.new_empty(entries)
    idle = _BUFFERS.idle.pop((use, like.dtype), None)
    if idle is not None and idle.numel() >= entries:
        return idle
    # A buffer made in inference mode could not be written to outside it.
    with torch.inference_mode(False):
        return torch.empty(entries, dtype=like.dtype)


def give_back(use: str, buffer: Tensor) -> None:
    """Keep a buffer for the next `borrow` of the same use, unless it is so large that it would waste memory."""
    if buffer.device.type == "cpu" and buffer.numel() <= MOST_ENTRIES:
        _BUFFERS.idle[use, buffer.dtype] = buffer
