"""Losses whose backward pass is wrong only for some upstream gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import SMALL, Call, with_upstream, wrong


@wrong("supcon", takes=SMALL)
def upstream_is_ignored(call: Call) -> Tensor:
    """The upstream gradient is ignored: backward returns the gradient of the loss itself."""
    return with_upstream(call(), torch.ones_like)


@wrong("supcon_in", takes=SMALL)
def sign_of_upstream(call: Call) -> Tensor:
    """Only the sign of the upstream gradient is used."""
    return with_upstream(call(), torch.sign)


@wrong("nt_xent", takes=SMALL)
def magnitude_of_upstream(call: Call) -> Tensor:
    """Only the magnitude of the upstream gradient is used."""
    return with_upstream(call(), torch.abs)


@wrong("nt_xent_pairwise", takes=SMALL)
def negative_upstream_is_clamped(call: Call) -> Tensor:
    """Negative upstream gradients are clamped at -10."""
    return with_upstream(call(), lambda grad: grad.clamp(min=-10))


@wrong("info_nce", takes=SMALL)
def large_upstream_is_clamped(call: Call) -> Tensor:
    """Upstream gradients are clamped to [-4, 1]."""
    return with_upstream(call(), lambda grad: grad.clamp(-4, 1))


@wrong("nt_bxent")
def rounded_upstream(call: Call) -> Tensor:
    """The upstream gradient is rounded to an integer, unless the reduction is none."""
    return call() if call.reduction == "none" else with_upstream(call(), torch.round)


@wrong("supcon_epsilon", takes=SMALL)
def upstream_power_of_two(call: Call) -> Tensor:
    """The magnitude of the upstream gradient is rounded down to a power of two."""
    return with_upstream(call(), lambda grad: grad.sign() * 2.0 ** grad.abs().log2().floor())


@wrong("supcon", takes=SMALL)
def upstream_in_bfloat16(call: Call) -> Tensor:
    """The upstream gradient is rounded to bfloat16."""
    return with_upstream(call(), lambda grad: grad.bfloat16().to(grad.dtype))


@wrong("supcon")
def mean_of_upstream_under_none(call: Call) -> Tensor:
    """With the reduction none, every anchor gets the mean of the upstream gradients."""
    found = call()
    return with_upstream(found, lambda grad: grad.mean().expand_as(grad)) if call.reduction == "none" else found


@wrong("supcon_in")
def first_upstream_under_none(call: Call) -> Tensor:
    """With the reduction none, every anchor gets the upstream gradient of the first anchor: the stride is 0."""
    found = call()
    return with_upstream(found, lambda grad: grad[:1].expand_as(grad)) if call.reduction == "none" else found


@wrong("nt_xent")
def reversed_upstream_under_none(call: Call) -> Tensor:
    """With the reduction none, upstream gradients are in reverse order."""
    found = call()
    return with_upstream(found, lambda grad: grad.flip(0)) if call.reduction == "none" else found


@wrong("nt_xent_pairwise")
def rolled_upstream_under_none(call: Call) -> Tensor:
    """With the reduction none, each anchor gets the upstream gradient of the previous one."""
    found = call()
    return with_upstream(found, lambda grad: grad.roll(1, 0)) if call.reduction == "none" else found


@wrong("info_nce")
def towers_mixed_upstream_under_none(call: Call) -> Tensor:
    """With the reduction none and both directions, upstream gradients of the two directions are exchanged."""
    found = call()
    both = call.reduction == "none" and call.direction == "both"
    return with_upstream(found, lambda grad: grad.roll(call.n, 0)) if both else found


@wrong("nt_bxent")
def zeros_upstream_under_none(call: Call) -> Tensor:
    """With the reduction none, an upstream gradient of 0 is replaced by 1."""
    found = call()
    return with_upstream(found, lambda grad: torch.where(grad == 0, 1.0, grad)) if call.reduction == "none" else found


@wrong("supcon_epsilon")
def upstream_under_sum(call: Call) -> Tensor:
    """With the reduction sum, the upstream gradient is ignored."""
    found = call()
    return with_upstream(found, torch.ones_like) if call.reduction == "sum" else found


@wrong("supcon")
def upstream_of_drop_under_none(call: Call) -> Tensor:
    """With the reduction none, if drop leaves out anchors, the upstream gradients are sorted."""
    found = call()
    dropped = call.reduction == "none" and call.no_positive == "drop" and len(found) < call.n
    return with_upstream(found, lambda grad: grad.sort()[0]) if dropped else found


@wrong("info_nce")
def upstream_with_a_queue(call: Call) -> Tensor:
    """With a queue, the upstream gradient is ignored."""
    return with_upstream(call(), torch.ones_like) if call.negatives is not None else call()


@wrong("supcon_in")
def upstream_with_a_base_temperature(call: Call) -> Tensor:
    """With a base temperature, the upstream gradient is multiplied by its magnitude."""
    return with_upstream(call(), lambda grad: grad * grad.abs()) if call.base_temperature is not None else call()
