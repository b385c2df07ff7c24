"""Gather the rows of all processes, with a gradient."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


def world() -> tuple[int, int]:
    """Return the rank of this process and the number of processes: 0 and 1 without a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def gather(rows: Tensor) -> Tensor:
    """Return the rows ``[W * N, D]`` of all W processes, in order of their ranks; those of this one have a gradient.

    The gradient of rows is the sum of those that all processes compute for them. All processes must call this function,
    with rows of the same shape and dtype, and all must differentiate their results or none.

    Args:
        rows: ``[N, D]``.
    """
    return cast(Tensor, _Gather.apply(rows))  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        _, size = world()
        found = rows.new_empty((size * rows.shape[0], *rows.shape[1:]))
        dist.all_gather(list(found.chunk(size)), rows.contiguous())
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        rank, size = world()
        grad = grads[0].contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(size)[rank]
