"""Fused Triton kernels: tiles of logits stay in registers, device memory holds rows and a few numbers per row.

`pairproof.fast.engine` asks for them with ``backend="triton"``, and by itself on CUDA devices. This module says whether
they can run; everything that imports triton lies behind `evaluation`.

Layout: `rows` makes embeddings ready and turns gradients back; `sums` and `positives` are the forward pass; `anchors`
makes values of sums, and coefficients of gradients; `gradient` is the backward pass; `tile` is what they share;
`launch` queues them; `table` says in which tiles.
"""

from __future__ import annotations

import os
from functools import lru_cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..engine.spec import AnchorValues, Batch, Gradients, Plan
from .table import LONGEST

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STATS = 12
"""Numbers per anchor that the forward pass leaves for the backward pass."""
OLDEST = (8, 0)
"""Compute capability from which the tensor cores have bfloat16 and TF32."""


@lru_cache(maxsize=1)
def _importable() -> bool:
    return find_spec("triton") is not None


def interpreting() -> bool:
    """Whether ``TRITON_INTERPRET=1`` asks for Triton's interpreter, which runs the kernels on the CPU, slowly."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def refusal(embeddings: Tensor) -> str | None:
    """Return why the kernels cannot take embeddings ``[N, D]``, or None where they can. Values are not read."""
    if embeddings.dtype not in DTYPES:
        return f"its kernels take float32, bfloat16 and float16, not {str(embeddings.dtype).removeprefix('torch.')}"
    if embeddings.shape[1] > LONGEST:
        return f"its kernels take at most {LONGEST} columns, got {embeddings.shape[1]}"
    if embeddings.device.type == "cpu" and not interpreting():
        return "it needs embeddings on a CUDA device, got cpu (with TRITON_INTERPRET=1 its interpreter takes those)"
    if embeddings.device.type not in ("cpu", "cuda"):
        return f"it needs embeddings on a CUDA device, got {embeddings.device.type}"
    if not _importable():
        return "triton is not installed: pip install triton"
    if embeddings.device.type == "cuda":
        if torch.version.hip is not None:
            return "its kernels were made for NVIDIA's devices"
        if torch.cuda.get_device_capability(embeddings.device) < OLDEST:
            return f"it needs a device of compute capability {OLDEST[0]}.{OLDEST[1]} or newer"
    return None


def chosen(embeddings: Tensor) -> bool:
    """Whether embeddings ``[N, D]`` are evaluated by the kernels where nothing else is asked for."""
    return embeddings.device.type == "cuda" and refusal(embeddings) is None


def evaluation() -> ModuleType:
    """Return the module that queues the kernels; it imports triton."""
    from . import launch

    return launch


def forward(batch: Batch, plan: Plan) -> tuple[AnchorValues, Tensor]:
    """Queue the forward pass: the rows are made ready, and the backward pass makes them ready anew."""
    launch: Any = evaluation()
    with launch.on_device(batch.embeddings):
        found: tuple[AnchorValues, Tensor] = launch.forward(launch.set_up(batch, plan))
    return found


def backward(grad: Tensor, batch: Batch, plan: Plan, stats: Tensor) -> Gradients:
    """Queue the backward pass."""
    launch: Any = evaluation()
    with launch.on_device(batch.embeddings):
        gradients: Gradients = launch.backward(launch.set_up(batch, plan), grad, stats)
    return gradients
