"""Losses whose values are right, but whose result has a wrong shape."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import SMALL, Call, wrong


@wrong("supcon", "policies", takes=SMALL)
def one_element(call: Call) -> Tensor:
    """A mean has the shape [1]."""
    return call().reshape(1)


@wrong("nt_xent", "policies", takes=SMALL)
def one_by_one(call: Call) -> Tensor:
    """A mean has the shape [1, 1]."""
    return call().reshape(1, 1)


@wrong("supcon_in", "policies")
def column(call: Call) -> Tensor:
    """With the reduction none, the result has the shape [N, 1]: added to a vector it gives a matrix."""
    return call()[:, None] if call.reduction == "none" else call()


@wrong("nt_xent_pairwise", "policies")
def row(call: Call) -> Tensor:
    """With the reduction none, the result has the shape [1, N]."""
    return call()[None] if call.reduction == "none" else call()


@wrong("info_nce", "policies")
def two_columns(call: Call) -> Tensor:
    """With the reduction none and both directions, the result has the shape [2, N]."""
    found = call()
    both = call.reduction == "none" and call.direction == "both"
    return found.reshape(2, -1) if both else found


@wrong("nt_bxent")
def one_anchor_under_none(call: Call) -> Tensor:
    """With the reduction none, a single anchor gives a scalar."""
    found = call()
    return found.sum() if call.reduction == "none" and len(found) == 1 else found


@wrong("supcon_epsilon", "policies")
def sum_of_one_element(call: Call) -> Tensor:
    """With the reduction sum, the result has the shape [1]."""
    return call().reshape(1) if call.reduction == "sum" else call()


@wrong("supcon")
def other_rows_under_none(call: Call) -> Tensor:
    """With the reduction none and a subset of anchors, rows that are not anchors are in the result as 0."""
    if call.reduction != "none" or call.anchors is None or call.no_positive == "drop":
        return call()
    found = call()
    return torch.zeros(call.n, dtype=found.dtype).masked_scatter(call.anchors.bool(), found)
