"""What depends on where tensors live: in which dtype to compute, and whether their values may be read."""

from __future__ import annotations

import torch
from torch import Tensor


def computing_dtype(embeddings: Tensor) -> torch.dtype:
    """Return float64 for float64 embeddings, else float32."""
    return torch.float64 if embeddings.dtype == torch.float64 else torch.float32


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """Return float64 where the device has it, for what is worth a few roundings less."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def tf32_allowed() -> bool:
    """Whether the user allows CUDA products of float32 matrices to be made in TF32, by torch's own switches."""
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if precision is None:  # torch before 2.9
        return bool(torch.backends.cuda.matmul.allow_tf32)
    return bool(precision == "tf32")


def may_read(tensor: Tensor) -> bool:
    """Whether values may decide how to go on: on an accelerator, reading them would wait for all that is queued."""
    return tensor.device.type == "cpu"
