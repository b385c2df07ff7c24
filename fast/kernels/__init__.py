"""Fused Triton kernels: tiles of logits stay in registers, device memory holds rows and a few numbers per row.

`pairproof.fast.engine` uses them under ``backend="triton"``, and by default on CUDA devices, for batches that they
support. This module decides which embeddings they support. Of its functions, only `evaluation` imports triton.

Modules:

- `rows` converts embeddings to padded rows, and gradients of rows to gradients of embeddings.
- `sums` and `positives` are the forward pass.
- `anchors` computes values from sums, and the coefficients of the backward pass from upstream gradients.
- `gradient` is the backward pass.
- `tile` holds what the kernels share, and explains their compile-time constants.
- `launch` queues the kernels.
- `table` lists the tile sizes, and `tune` searches for faster ones on a device.
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
"""How many numbers per anchor the forward pass saves for the backward pass."""
OLDEST = (8, 0)
"""Lowest compute capability whose tensor cores support bfloat16 and TF32."""


@lru_cache(maxsize=1)
def _importable() -> bool:
    return find_spec("triton") is not None


def interpreting() -> bool:
    """Return whether ``TRITON_INTERPRET=1`` is set: Triton's interpreter runs the kernels on the CPU, slowly."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def refusal(embeddings: Tensor) -> str | None:
    """Return why the kernels do not support embeddings ``[N, D]``, or None if they do. Values are not read."""
    if embeddings.dtype not in DTYPES:
        return f"its kernels take float32, bfloat16 and float16, not {str(embeddings.dtype).removeprefix('torch.')}"
    if embeddings.shape[1] > LONGEST:
        return f"its kernels take at most {LONGEST} columns, got {embeddings.shape[1]}"
    if embeddings.device.type == "cpu" and not interpreting():
        return "it needs embeddings on a CUDA device, got cpu (TRITON_INTERPRET=1 runs the kernels on a CPU)"
    if embeddings.device.type not in ("cpu", "cuda"):
        return f"it needs embeddings on a CUDA device, got {embeddings.device.type}"
    if not _importable():
        return "triton is not installed: pip install triton"
    if embeddings.device.type == "cuda":
        if torch.version.hip is not None:
            return "its kernels support only NVIDIA devices"
        if torch.cuda.get_device_capability(embeddings.device) < OLDEST:
            return f"it needs a device of compute capability {OLDEST[0]}.{OLDEST[1]} or newer"
    return None


def chosen(embeddings: Tensor) -> bool:
    """Return whether ``backend="auto"`` uses the kernels for embeddings ``[N, D]``."""
    return embeddings.device.type == "cuda" and refusal(embeddings) is None


def evaluation() -> ModuleType:
    """Return the module that queues the kernels; it imports triton."""
    from . import launch

    return launch


def forward(batch: Batch, plan: Plan) -> tuple[AnchorValues, Tensor, Any]:
    """Queue the forward pass; return the values, the statistics and the prepared batch for the backward pass."""
    launch: Any = evaluation()
    with launch.on_device(batch.embeddings):
        problem = launch.set_up(batch, plan)
        found, stats = launch.forward(problem)
    return found, stats, problem


def backward(grad: Tensor, batch: Batch, plan: Plan, stats: Tensor, prepared: Any = None) -> Gradients:
    """Queue the backward pass; without ``prepared``, the batch is prepared again."""
    launch: Any = evaluation()
    with launch.on_device(batch.embeddings):
        problem = launch.set_up(batch, plan) if prepared is None else prepared
        gradients: Gradients = launch.backward(problem, grad, stats)
    return gradients
