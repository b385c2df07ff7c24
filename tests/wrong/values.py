"""Wrong for rows or logits of some values only: NaN, zero rows, norms, signs."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import SMALL, Call, wrong


@wrong("supcon", "policies", takes=SMALL)
def nan_rows(call: Call) -> Tensor:
    """Rows with NaN are replaced by zeros, and the loss is finite: a diverged model goes unnoticed."""
    bad = call.z.isnan().any(dim=1)
    if not bool(bad.any()):
        return call()
    keep = ~bad
    return call(call.z[keep], labels=call.labels[keep]) if int(keep.sum()) > 1 else call.z.nan_to_num().sum() * 0


@wrong("info_nce", "policies", takes=SMALL)
def nan_loss(call: Call) -> Tensor:
    """A NaN is replaced by 0 in the result."""
    z = call.z.nan_to_num()
    spoiled = bool(call.z.isnan().any() or call.embeddings_b.isnan().any())
    return z.sum() * 0 if spoiled else call()


@wrong("nt_xent", "policies", takes=SMALL)
def infinite_rows(call: Call) -> Tensor:
    """Infinite entries are clamped at the largest number, and the loss is finite."""
    return call(call.z.nan_to_num()) if bool(call.z.isinf().any()) else call()


@wrong("supcon_in", "policies", takes=SMALL)
def zero_rows(call: Call) -> Tensor:
    """A zero row, whose cosine does not exist, is left out and the loss is that of the other rows."""
    zero = (call.z == 0).all(dim=1)
    if not bool(zero.any()):
        return call()
    keep = ~zero
    return call(call.z[keep], labels=call.labels[keep]) if int(keep.sum()) > 1 else call.z.sum() * 0


@wrong("nt_xent_pairwise", "policies", takes=SMALL)
def zero_row_of_ones(call: Call) -> Tensor:
    """A zero row is replaced by a row of ones, to avoid a division by 0."""
    zero = (call.z == 0).all(dim=1, keepdim=True)
    return call(torch.where(zero, torch.ones_like(call.z), call.z))


@wrong("supcon", takes=SMALL)
def negative_similarities(call: Call) -> Tensor:
    """If every other similarity of an anchor is negative, its maximum is taken as 0, and a tiny sum is clamped."""
    unit = call.z / call.z.norm(dim=1, keepdim=True).clamp(min=1e-300)
    others = (unit @ unit.T).fill_diagonal_(-2).amax(dim=1) / float(call.temperature)
    return call.weighted(torch.where(others.detach() < -40, 0.5, 1.0)) if call.n > 2 else call()


@wrong("supcon_in", "range", takes=SMALL)
def value_is_capped(call: Call) -> Tensor:
    """The value of an anchor is capped at 60."""
    values = call(reduction="none").detach()
    return call.weighted(torch.where(values > 60, 60 / values.clamp(min=1), 1.0))


@wrong("nt_xent", "range", takes=SMALL)
def logits_above_80(call: Call) -> Tensor:
    """The value is infinite where one over the temperature is above 88: exponentials of float32 without a maximum."""
    large = 1 / float(call.temperature) > 88 and call.z.dtype == torch.float32
    return call() * torch.inf if large else call()


@wrong("nt_xent_pairwise", "formula", takes=SMALL)
def long_rows(call: Call) -> Tensor:
    """Rows of norm above 100 are shifted by a constant vector that grows with the norm, so their cosines change."""
    norm = call.z.norm(dim=1, keepdim=True)
    return call(call.z + (norm > 100) * (norm - 100) * 0.01 * torch.ones_like(call.z) / norm.clamp(min=1))


@wrong("info_nce", "formula", takes=SMALL)
def short_rows(call: Call) -> Tensor:
    """Norms are clamped at 0.05, too early: rows of an untrained model are shorter."""
    norm = call.z.norm(dim=1, keepdim=True)
    return call(torch.cat([call.z / norm.clamp(min=0.05)])) if bool((norm >= 0.05).all()) else short(call, norm)


def short(call: Call, norm: Tensor) -> Tensor:
    """InfoNCE of rows of the first tower that are shorter than 1 where their norm is below 0.05."""
    a = call.z / norm.clamp(min=0.05)
    b = call.embeddings_b / call.embeddings_b.norm(dim=1, keepdim=True).clamp(min=1e-300)
    return call(a, embeddings_b=b, similarity="dot")


@wrong("supcon_epsilon", takes=SMALL)
def large_dot_products(call: Call) -> Tensor:
    """Logits above 50 are clamped, in the value only."""
    logits = (call.z @ call.z.T / float(call.temperature)).detach().abs().amax()
    return call() * 1.01 if float(logits) > 50 else call()


@wrong("nt_bxent")
def equal_rows(call: Call) -> Tensor:
    """Two equal rows that are not listed as positives are taken for positives of each other."""
    z = call.z.detach()
    equal = (z[:, None] == z).all(dim=2).fill_diagonal_(False).nonzero()
    return call(positive_pairs=torch.cat([call.positive_pairs, equal])) if len(equal) else call()
