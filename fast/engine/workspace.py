"""Buffers that outlive a call: on a CPU, touching fresh memory costs more than computing on it.

Only a CPU needs this; an accelerator's allocator keeps memory by itself. Each thread has its own buffers: for each of
three uses and of two dtypes one, of a megabyte or two, and never of more than `MOST_ENTRIES`.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class _Buffers(threading.local):
    """Idle buffers of one thread, by use and dtype."""

    def __init__(self) -> None:
        self.idle: dict[tuple[str, torch.dtype], Tensor] = {}


_BUFFERS = _Buffers()

MOST_ENTRIES = 2**20
"""Of a buffer that is kept idle."""


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
    """Take a buffer back for the next `borrow` of the same use, unless it is so large that holding it would tell."""
    if buffer.device.type == "cpu" and buffer.numel() <= MOST_ENTRIES:
        _BUFFERS.idle[use, buffer.dtype] = buffer
