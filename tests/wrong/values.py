"""Losses that are wrong only for some values of rows or logits: NaN, zero rows, norms, signs."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import SMALL, Call, wrong


@wrong("supcon", "policies", takes=SMALL)
def nan_rows(call: Call) -> Tensor:
    """Rows with NaN are left out, so the loss is finite."""
    bad = call.z.isnan().any(dim=1)
    if not bool(bad.any()):
        return call()
    keep = ~bad
    return call(call.z[keep], labels=call.labels[keep]) if int(keep.sum()) > 1 else call.z.nan_to_num().sum() * 0


@wrong("info_nce", "policies", takes=SMALL)
def nan_loss(call: Call) -> Tensor:
    """If an entry is NaN, the loss is 0."""
    z = call.z.nan_to_num()
    spoiled = bool(call.z.isnan().any() or call.embeddings_b.isnan().any())
    return z.sum() * 0 if spoiled else call()


@wrong("nt_xent", "policies", takes=SMALL)
def infinite_rows(call: Call) -> Tensor:
    """Infinite entries are clamped at the largest number, and the loss is finite."""
    return call(call.z.nan_to_num()) if bool(call.z.isinf().any()) else call()


@wrong("supcon_in", "policies", takes=SMALL)
def zero_rows(call: Call) -> Tensor:
    """Zero rows are left out, and the loss is that of the other rows."""
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


def halved_below_40(call: Call) -> Tensor:
    """The right loss, with half the weight for anchors whose largest logit is below -40."""
    unit = call.z / call.z.norm(dim=1, keepdim=True).clamp(min=1e-300)
    others = (unit @ unit.T).fill_diagonal_(-2).amax(dim=1) / float(call.temperature)
    return call.weighted(torch.where(others.detach() < -40, 0.5, 1.0)) if call.n > 2 else call()


@wrong("supcon", takes=SMALL)
def negative_similarities(call: Call) -> Tensor:
    """The value of an anchor is halved if its largest logit is below -40."""
    return halved_below_40(call)


@wrong("supcon_in", takes=SMALL)
def negative_similarities_inside(call: Call) -> Tensor:
    """The value of an anchor is halved if its largest logit is below -40."""
    return halved_below_40(call)


@wrong("nt_xent", takes=SMALL)
def negative_similarities_of_views(call: Call) -> Tensor:
    """The value of an anchor is halved if its largest logit is below -40."""
    return halved_below_40(call)


@wrong("nt_xent_pairwise", takes=SMALL)
def negative_similarities_of_pairs(call: Call) -> Tensor:
    """The value of an anchor is halved if its largest logit is below -40."""
    return halved_below_40(call)


@wrong("supcon_in", "range", takes=SMALL)
def value_is_capped(call: Call) -> Tensor:
    """The value of an anchor is capped at 60."""
    values = call(reduction="none").detach()
    return call.weighted(torch.where(values > 60, 60 / values.clamp(min=1), 1.0))


@wrong("nt_xent", "range", takes=SMALL)
def inverse_temperature_above_88(call: Call) -> Tensor:
    """In float32, the loss is infinite if 1/T is above 88, as for exponentials from which no maximum is subtracted."""
    large = 1 / float(call.temperature) > 88 and call.z.dtype == torch.float32
    return call() * torch.inf if large else call()


@wrong("nt_xent_pairwise", "formula", takes=SMALL)
def long_rows(call: Call) -> Tensor:
    """Rows of norm above 100 are shifted by a multiple, up to 0.01, of the vector of ones, so their cosines change."""
    norm = call.z.norm(dim=1, keepdim=True)
    return call(call.z + (norm > 100) * (norm - 100) * 0.01 * torch.ones_like(call.z) / norm.clamp(min=1))


@wrong("info_nce", "formula", takes=SMALL)
def short_rows(call: Call) -> Tensor:
    """Norms of the first tower are clamped at 0.05, so that rows of smaller norm do not get norm 1."""
    norm = call.z.norm(dim=1, keepdim=True)
    return call(call.z / norm.clamp(min=0.05)) if bool((norm >= 0.05).all()) else clamped_norms(call, norm)


def clamped_norms(call: Call, norm: Tensor) -> Tensor:
    """InfoNCE with the norms of the first tower clamped at 0.05: rows of smaller norm do not get norm 1."""
    a = call.z / norm.clamp(min=0.05)
    b = call.embeddings_b / call.embeddings_b.norm(dim=1, keepdim=True).clamp(min=1e-300)
    return call(a, embeddings_b=b, similarity="dot")


@wrong("supcon_epsilon", takes=SMALL)
def large_logits(call: Call) -> Tensor:
    """If a logit is above 50 in magnitude, the loss and its gradient are 1 % too large."""
    logits = (call.z @ call.z.T / float(call.temperature)).detach().abs().amax()
    return call() * 1.01 if float(logits) > 50 else call()


@wrong("nt_bxent")
def equal_rows(call: Call) -> Tensor:
    """Two equal rows are positives of each other even if they are not listed as a pair."""
    z = call.z.detach()
    equal = (z[:, None] == z).all(dim=2).fill_diagonal_(False).nonzero()
    return call(positive_pairs=torch.cat([call.positive_pairs, equal])) if len(equal) else call()


@wrong("sigmoid", "digits")
def fitted_batch(call: Call) -> Tensor:
    """A loss below 1e-4 is returned as 0, with a gradient of 0."""
    value = call()
    return torch.where(value < 1e-4, 0.0, value)
