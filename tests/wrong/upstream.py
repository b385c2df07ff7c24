"""A custom backward pass that is wrong for some upstream gradients only."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import SMALL, Call, with_upstream, wrong


def only(call: Call, reduction: str) -> bool:
    """Whether the reduction is this one; losses have no reduction among their parameters if it is built in."""
    return bool(call.reduction == reduction)


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
    """Upstream gradients above 1 are clipped: they are clamped to [-4, 1]."""
    return with_upstream(call(), lambda grad: grad.clamp(-4, 1))


@wrong("nt_bxent")
def rounded_upstream(call: Call) -> Tensor:
    """The upstream gradient is rounded to an integer of a loss scaler, unless the reduction is none."""
    return call() if only(call, "none") else with_upstream(call(), torch.round)


@wrong("supcon_epsilon", takes=SMALL)
def upstream_power_of_two(call: Call) -> Tensor:
    """The upstream gradient is taken as a power of two, the exponent of a loss scaler."""
    return with_upstream(call(), lambda grad: grad.sign() * 2.0 ** grad.abs().log2().floor())


@wrong("supcon", takes=SMALL)
def upstream_in_bfloat16(call: Call) -> Tensor:
    """The upstream gradient is rounded to bfloat16."""
    return with_upstream(call(), lambda grad: grad.bfloat16().to(grad.dtype))


@wrong("supcon")
def mean_of_upstream_under_none(call: Call) -> Tensor:
    """Under none, every anchor gets the mean of the upstream gradients."""
    found = call()
    return with_upstream(found, lambda grad: grad.mean().expand_as(grad)) if only(call, "none") else found


@wrong("supcon_in")
def first_upstream_under_none(call: Call) -> Tensor:
    """Under none, every anchor gets the upstream gradient of the first anchor: the stride is 0."""
    found = call()
    return with_upstream(found, lambda grad: grad[:1].expand_as(grad)) if only(call, "none") else found


@wrong("nt_xent")
def reversed_upstream_under_none(call: Call) -> Tensor:
    """Under none, upstream gradients are in reverse order."""
    found = call()
    return with_upstream(found, lambda grad: grad.flip(0)) if only(call, "none") else found


@wrong("nt_xent_pairwise")
def rolled_upstream_under_none(call: Call) -> Tensor:
    """Under none, each anchor gets the upstream gradient of the next one."""
    found = call()
    return with_upstream(found, lambda grad: grad.roll(1, 0)) if only(call, "none") else found


@wrong("info_nce")
def towers_mixed_upstream_under_none(call: Call) -> Tensor:
    """Under none in both directions, upstream gradients of the two directions are exchanged."""
    found = call()
    both = only(call, "none") and call.direction == "both"
    return with_upstream(found, lambda grad: grad.roll(call.n, 0)) if both else found


@wrong("nt_bxent")
def zeros_upstream_under_none(call: Call) -> Tensor:
    """Under none, an anchor with upstream gradient 0 gets 1: zeros are taken for missing."""
    found = call()
    return with_upstream(found, lambda grad: torch.where(grad == 0, 1.0, grad)) if only(call, "none") else found


@wrong("supcon_epsilon")
def upstream_under_sum(call: Call) -> Tensor:
    """Under sum, the upstream gradient is ignored."""
    found = call()
    return with_upstream(found, torch.ones_like) if only(call, "sum") else found


@wrong("supcon")
def upstream_of_drop_under_none(call: Call) -> Tensor:
    """Under none with drop, upstream gradients are scattered to the first rows, not to the rows with positives."""
    found = call()
    dropped = only(call, "none") and call.no_positive == "drop" and len(found) < call.n
    return with_upstream(found, lambda grad: grad.sort()[0]) if dropped else found


@wrong("info_nce")
def upstream_with_a_queue(call: Call) -> Tensor:
    """With a queue, the upstream gradient is ignored."""
    return with_upstream(call(), torch.ones_like) if call.negatives is not None else call()


@wrong("supcon_in")
def upstream_with_a_base_temperature(call: Call) -> Tensor:
    """With a base temperature, the upstream gradient is applied twice."""
    return with_upstream(call(), lambda grad: grad * grad.abs()) if call.base_temperature is not None else call()
