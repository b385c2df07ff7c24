"""Weights of pairs and anchors that are applied at the wrong place or divided by the wrong sum."""

from __future__ import annotations

import torch
from torch import Tensor

from . import parts
from .base import fault, pml


@fault("supcon", build=parts.labelled, level="policies", weights_divisor="weight")
def supcon_weights_divided_by_the_count(batch: parts.Batch, positive_weights: Tensor) -> Tensor:
    """The weighted sum over the positives is divided by their number, although weights_divisor is "weight"."""
    return parts.row_means(_weighted(batch.values, positive_weights), batch.positive)


@fault("supcon", build=parts.labelled, level="policies")
def supcon_weights_divided_by_their_sum(batch: parts.Batch, positive_weights: Tensor) -> Tensor:
    """The weighted sum over the positives is divided by the sum of weights, although weights_divisor is "count"."""
    total = parts.row_sums(positive_weights, batch.positive).to(batch.s.dtype)
    return parts.row_sums(_weighted(batch.values, positive_weights), batch.positive) / total.where(total > 0, 1)


@fault("supcon", build=parts.labelled, level="policies")
def supcon_weights_inside_the_logarithm(batch: parts.Batch, positive_weights: Tensor) -> Tensor:
    """The weights multiply the ratios inside the logarithm: they add a constant and do not affect the gradient."""
    return parts.row_means(batch.values - positive_weights.log().to(batch.s.dtype), batch.positive)


@fault("supcon", build=parts.labelled, level="policies")
def supcon_zero_weight_not_in_the_denominator(batch: parts.Batch, positive_weights: Tensor) -> Tensor:
    """A positive of weight 0 is left out of the denominator too, as if the pair were ignored."""
    kept = batch.other & ~(batch.positive & (positive_weights == 0))
    values = parts.log_sum(batch.s, kept) - batch.s
    return parts.row_means(_weighted(values, positive_weights), batch.positive)


@fault("supcon", build=parts.labelled, level="policies")
def supcon_negative_weights_of_all_pairs(batch: parts.Batch, negative_weights: Tensor) -> Tensor:
    """The weights multiply the exponentials of positives in the denominator too."""
    return parts.row_means(parts.log_sum(_repeated(batch.s, negative_weights), batch.other) - batch.s, batch.positive)


@fault("supcon", build=parts.cosines, level="policies", denominator="only_negatives")
def supcon_negative_weights_of_logits(batch: parts.Batch, negative_weights: Tensor | None = None) -> Tensor:
    """The weights multiply the logits of negatives instead of their exponentials."""
    s = batch.s if negative_weights is None else _weighted(batch.s, negative_weights)
    values = parts.log_sum(s, batch.negative) - batch.s
    return parts.row_means(values, batch.positive).where(batch.negative.any(dim=1), 0)


@fault("nt_xent_pairwise", pml("losses/supcon_loss.py"), build=parts.labelled, level="policies")
def nt_xent_pairwise_repeated_negatives_once(batch: parts.Batch, negative_weights: Tensor) -> parts.Batch:
    """A negative that a miner has chosen several times counts once."""
    return batch._replace(other=batch.other & (batch.positive | (negative_weights > 0)))


@fault("nt_xent_pairwise", build=parts.labelled, level="policies")
def nt_xent_pairwise_negative_weights_squared(batch: parts.Batch, negative_weights: Tensor) -> parts.Batch:
    """The weights of negatives multiply their exponentials twice."""
    twice = _repeated(_repeated(batch.s, negative_weights), negative_weights)
    return batch._replace(s=batch.s.where(batch.positive, twice))


@fault("supcon", build=parts.labelled, level="policies")
def supcon_anchor_weights_mean_over_the_rows(batch: parts.Batch, anchor_weights: Tensor) -> Tensor:
    """The mean of the weighted values divides by the number of anchors, not by the sum of their weights."""
    return _weighted(parts.anchors("supcon", batch), anchor_weights)


@fault("supcon", build=parts.labelled, level="policies", no_positive="drop")
def supcon_anchor_weights_of_dropped_anchors(batch: parts.Batch, anchor_weights: Tensor | None = None) -> Tensor:
    """Anchors without positives are dropped, but their weights stay in the divisor of the mean."""
    values, chosen = parts.anchors("supcon", batch), batch.positive.any(dim=1)
    if anchor_weights is None:
        return values.sum() / chosen.sum().clamp(min=1)
    return _weighted(values, anchor_weights).sum() / _total(anchor_weights).to(values.dtype)


@fault("nt_xent", build=parts.labelled, level="policies")
def nt_xent_anchor_weights_mean_over_the_rows(batch: parts.Batch, anchor_weights: Tensor) -> Tensor:
    """The mean of the weighted values divides by the number of anchors, not by the sum of their weights."""
    return _weighted(parts.anchors("nt_xent", batch), anchor_weights)


@fault("nt_xent", build=parts.labelled, level="policies")
def nt_xent_anchor_weights_of_partners(batch: parts.Batch, anchor_weights: Tensor) -> Tensor:
    """The value of each anchor is multiplied by the weight of its partner."""
    values, weights = parts.anchors("nt_xent", batch), anchor_weights[batch.positive.int().argmax(dim=1)]
    return _weighted(values, weights).sum() / _total(weights).to(values.dtype)


def _weighted(values: Tensor, weights: Tensor) -> Tensor:
    return values * weights.to(values.dtype)


def _repeated(s: Tensor, weights: Tensor) -> Tensor:
    """Add log(weights) to logits, which multiplies the exponentials by the weights."""
    return s + weights.log().to(s.dtype).clamp(min=torch.finfo(s.dtype).min)


def _total(weights: Tensor) -> Tensor:
    """The sum of the weights; 1 if it is not positive."""
    total = weights.sum()
    return total.where(total > 0, 1)


@fault("sigmoid", build=parts.across, takes=("bias",), level="policies")
def sigmoid_anchor_weights_mean_over_the_rows(batch: parts.Batch, anchor_weights: Tensor) -> Tensor:
    """The sum of the weighted values is divided by the number of anchors, not by the sum of their weights."""
    return parts.anchors("sigmoid", batch) * anchor_weights


@fault("sigmoid", build=parts.across, takes=("bias",), level="policies", reduction="mean_pairs")
def sigmoid_anchor_weights_of_pairs_count_once(
    batch: parts.Batch, anchor_weights: Tensor | None = None, ignored: Tensor | None = None
) -> Tensor:
    """The mean over pairs divides by the number of pairs, not by the sum of their anchors' weights."""
    batch = batch if ignored is None else batch._replace(other=~ignored)
    values = parts.anchors("sigmoid", batch)
    return (values if anchor_weights is None else values * anchor_weights).sum() / batch.other.sum().clamp(min=1)
