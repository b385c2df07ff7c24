"""The rows of partners, with a gradient that is reproducible on every device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .spec import Batch
from .transforms import Reverse


def partner_rows(batch: Batch) -> Tensor:
    """Return the row ``[N, D]`` of each anchor's partner, from the references or the batch."""
    columns, partners = batch.references.embeddings, batch.targets.given
    if columns is not None:
        return columns.index_select(0, partners)
    return _of_mutual(batch.embeddings, partners)


def _of_mutual(rows: Tensor, partners: Tensor) -> Tensor:
    function: Any = _Partners if torch.compiler.is_compiling() else _Transformable
    found: Tensor = function.apply(rows, partners)
    return found


class _Partners(torch.autograd.Function):
    """The rows of mutual partners: `index_select`, whose backward pass is `index_select` too.

    Autograd would add the gradients of selected rows in no fixed order on an accelerator.
    """

    @staticmethod
    def forward(rows: Tensor, partners: Tensor) -> Tensor:
        return rows.index_select(0, partners)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (partners,) = ctx.saved_tensors
        return _of_mutual(grad, partners), None


class _Transformable(Reverse, _Partners):
    """`_Partners` with rules for `torch.func`."""
