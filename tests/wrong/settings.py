"""Losses that are wrong only for some options that training code sets, alone or two together."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from .base import SMALL, Call, products, wrong


@wrong("hard_negative")
def default_tau_plus(call: Call) -> Tensor:
    """A tau_plus of 0 is taken for an unset argument: it is replaced by the default."""
    return call(tau_plus=call.tau_plus or 0.1)


@wrong("hard_negative")
def default_beta(call: Call) -> Tensor:
    """A beta of 0 is taken for an unset argument: it is replaced by the default."""
    return call(beta=call.beta or 1.0)


@wrong("sigmoid")
def default_bias(call: Call) -> Tensor:
    """A bias of 0 is taken for an unset argument: it is replaced by the default."""
    return call() if isinstance(call.bias, Tensor) else call(bias=call.bias or -10.0)


@wrong("sigmoid")
def bias_without_gradient(call: Call) -> Tensor:
    """A bias tensor gets a gradient only if the temperature is a tensor too."""
    alone = isinstance(call.bias, Tensor) and not isinstance(call.temperature, Tensor)
    return call(bias=call.bias.detach()) if alone else call()


@wrong("sigmoid", takes=("temperature", "bias"))
def logits_of_at_most_thirty(call: Call) -> Tensor:
    """Logits, bias included, are clamped to [-30, 30]."""
    logits = products(call) + call.bias
    given = (call.partners, call.labels)
    if not bool((logits.abs() > 30).any()) or any(one is not None for one in given):
        return call()
    sign = torch.where(torch.eye(call.n, dtype=torch.bool), -1.0, 1.0)
    return softplus(sign * logits.clamp(-30, 30)).sum() / call.n


@wrong("multiple_negatives_ranking")
def scale_instead_of_temperature(call: Call) -> Tensor:
    """A temperature of 1 or above is taken for the scale that similarities are multiplied by."""
    t = call.temperature
    return call(temperature=1 / t) if float(t) >= 1 and call.base_temperature is None else call()


@wrong("multiple_negatives_ranking")
def partition_under_sum(call: Call) -> Tensor:
    """With the reduction sum, the partition per_direction is ignored."""
    return call(partition="joint") if call.reduction == "sum" else call()


@wrong("dclw")
def weights_without_gradient_under_sum(call: Call) -> Tensor:
    """With the reduction sum, the weights are always constants."""
    return call(detach_weights=True) if call.reduction == "sum" else call()


@wrong("supcon_epsilon")
def base_temperature_under_sum(call: Call) -> Tensor:
    """With the reduction sum, the base temperature is ignored."""
    return call(base_temperature=None) if call.reduction == "sum" else call()


@wrong("info_nce")
def direction_weights_under_sum(call: Call) -> Tensor:
    """With the reduction sum, the weights of the directions are ignored."""
    return call(direction_weights=None) if call.reduction == "sum" else call()


@wrong("info_nce")
def inside_sum_from_b_to_a(call: Call) -> Tensor:
    """From b to a, the ratios of several positives are averaged, although their sum is claimed."""
    averaged = call.inside_reduction == "sum" and call.direction == "b_to_a"
    return call(inside_reduction="mean") if averaged else call()


@wrong("supcon_in")
def inside_sum_with_drop(call: Call) -> Tensor:
    """With the policy drop, the ratios of several positives are averaged, although their sum is claimed."""
    averaged = call.inside_reduction == "sum" and call.no_positive == "drop"
    return call(inside_reduction="mean") if averaged else call()


@wrong("nt_xent_pairwise")
def sum_of_pairs_is_a_sum_of_means(call: Call) -> Tensor:
    """The reduction sum_pairs adds the means of the anchors, not all pairs."""
    return call(reduction="sum") if call.reduction == "sum_pairs" else call()


@wrong("nt_xent_pairwise")
def order_of_pairs(call: Call) -> Tensor:
    """With the reduction none_pairs, values are ordered by the positive, then by the anchor."""
    found = call()
    pairs = call.positive.nonzero()[:, 1]
    return found[pairs.argsort(stable=True)] if call.reduction == "none_pairs" and len(pairs) == len(found) else found


@wrong("sigmoid")
def mean_of_ignored_pairs(call: Call) -> Tensor:
    """The reduction mean_pairs divides by the number of all pairs, even if some are ignored."""
    bare = call.ignored is not None and call.ignored_ids is None and call.anchor_weights is None
    if call.reduction != "mean_pairs" or not bare:
        return call()
    return call(reduction="sum") / call.ignored.numel()


@wrong("supcon")
def weights_divisor_with_drop(call: Call) -> Tensor:
    """With the policy drop, weighted positives are always divided by their number."""
    return call(weights_divisor="count") if call.no_positive == "drop" else call()


@wrong("info_nce", takes=SMALL)
def temperature_at_its_limit(call: Call) -> Tensor:
    """A temperature tensor below 0.02 gets no gradient, as if it were clamped."""
    t = call.temperature
    return call(temperature=t.detach()) if isinstance(t, Tensor) and float(t) < 0.02 else call()
