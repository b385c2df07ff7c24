"""Weights of pairs and anchors that are applied at the wrong place or divided by the wrong sum."""

from __future__ import annotations

import torch
from torch import Tensor

from . import parts
from .base import fault, pml


@fault("supcon", level="policies", weights_divisor="weight")
def supcon_weights_divided_by_the_count(
    embeddings: Tensor, labels: Tensor, *, temperature: float, positive_weights: Tensor | None = None
) -> Tensor:
    """The weighted sum over the positives is divided by their number, although weights_divisor is "weight"."""
    batch = parts.labelled(embeddings, labels, temperature)
    return parts.row_means(_weighted(batch.values, positive_weights), batch.positive)


@fault("supcon", level="policies")
def supcon_weights_divided_by_their_sum(
    embeddings: Tensor, labels: Tensor, *, temperature: float, positive_weights: Tensor | None = None
) -> Tensor:
    """The weighted sum over the positives is divided by the sum of weights, although weights_divisor is "count"."""
    batch = parts.labelled(embeddings, labels, temperature)
    return _means(batch.values, batch.positive, positive_weights)


@fault("supcon", level="policies")
def supcon_weights_inside_the_logarithm(
    embeddings: Tensor, labels: Tensor, *, temperature: float, positive_weights: Tensor | None = None
) -> Tensor:
    """The weights multiply the ratios inside the logarithm: they add a constant and do not affect the gradient."""
    batch = parts.labelled(embeddings, labels, temperature)
    shift = 0 if positive_weights is None else positive_weights.log().to(batch.s.dtype)
    return parts.row_means(batch.values - shift, batch.positive)


@fault("supcon", level="policies")
def supcon_zero_weight_not_in_the_denominator(
    embeddings: Tensor, labels: Tensor, *, temperature: float, positive_weights: Tensor | None = None
) -> Tensor:
    """A positive of weight 0 is left out of the denominator too, as if the pair were ignored."""
    batch = parts.labelled(embeddings, labels, temperature)
    kept = batch.other if positive_weights is None else batch.other & ~(batch.positive & (positive_weights == 0))
    values = parts.log_sum(batch.s, kept) - batch.s
    return parts.row_means(_weighted(values, positive_weights), batch.positive)


@fault("supcon", level="policies")
def supcon_negative_weights_of_all_pairs(
    embeddings: Tensor, labels: Tensor, *, temperature: float, negative_weights: Tensor | None = None
) -> Tensor:
    """The weights multiply the exponentials of positives in the denominator too."""
    batch = parts.labelled(embeddings, labels, temperature)
    return parts.row_means(parts.log_sum(_repeated(batch.s, negative_weights), batch.other) - batch.s, batch.positive)


@fault("supcon", level="policies", denominator="only_negatives")
def supcon_negative_weights_of_logits(
    embeddings: Tensor, labels: Tensor, *, temperature: float, negative_weights: Tensor | None = None
) -> Tensor:
    """The weights multiply the logits of negatives instead of their exponentials."""
    batch = parts.cosines(embeddings, labels, temperature)
    values = parts.log_sum(_weighted(batch.s, negative_weights), batch.negative) - batch.s
    return parts.row_means(values, batch.positive).where(batch.negative.any(dim=1), 0)


@fault("nt_xent_pairwise", pml("losses/supcon_loss.py"), level="policies")
def nt_xent_pairwise_repeated_negatives_once(
    embeddings: Tensor, labels: Tensor, *, temperature: float, negative_weights: Tensor | None = None
) -> parts.Batch:
    """A negative that a miner has chosen several times counts once."""
    batch = parts.labelled(embeddings, labels, temperature)
    if negative_weights is None:
        return batch
    return batch._replace(other=batch.other & (batch.positive | (negative_weights > 0)))


@fault("nt_xent_pairwise", level="policies")
def nt_xent_pairwise_negative_weights_squared(
    embeddings: Tensor, labels: Tensor, *, temperature: float, negative_weights: Tensor | None = None
) -> parts.Batch:
    """The weights of negatives multiply their exponentials twice."""
    batch = parts.labelled(embeddings, labels, temperature)
    twice = _repeated(_repeated(batch.s, negative_weights), negative_weights)
    return batch._replace(s=batch.s.where(batch.positive, twice))


@fault("supcon", level="policies")
def supcon_anchor_weights_mean_over_the_rows(
    embeddings: Tensor, labels: Tensor, *, temperature: float, anchor_weights: Tensor | None = None
) -> Tensor:
    """The mean of the weighted values divides by the number of anchors, not by the sum of their weights."""
    values = parts.anchors("supcon", parts.labelled(embeddings, labels, temperature))
    return _weighted(values, anchor_weights)


@fault("supcon", level="policies", no_positive="drop")
def supcon_anchor_weights_of_dropped_anchors(
    embeddings: Tensor, labels: Tensor, *, temperature: float, anchor_weights: Tensor | None = None
) -> Tensor:
    """Anchors without positives are dropped, but their weights stay in the divisor of the mean."""
    batch = parts.labelled(embeddings, labels, temperature)
    values, chosen = parts.anchors("supcon", batch), batch.positive.any(dim=1)
    if anchor_weights is None:
        return values.sum() / chosen.sum().clamp(min=1)
    return _weighted(values, anchor_weights).sum() / _total(anchor_weights).to(values.dtype)


@fault("nt_xent", level="policies")
def nt_xent_anchor_weights_mean_over_the_rows(
    embeddings: Tensor, labels: Tensor, *, temperature: float, anchor_weights: Tensor | None = None
) -> Tensor:
    """The mean of the weighted values divides by the number of anchors, not by the sum of their weights."""
    values = parts.anchors("nt_xent", parts.labelled(embeddings, labels, temperature))
    return _weighted(values, anchor_weights)


@fault("nt_xent", level="policies")
def nt_xent_anchor_weights_of_partners(
    embeddings: Tensor, labels: Tensor, *, temperature: float, anchor_weights: Tensor | None = None
) -> Tensor:
    """The value of each anchor is multiplied by the weight of its partner."""
    batch = parts.labelled(embeddings, labels, temperature)
    values = parts.anchors("nt_xent", batch)
    if anchor_weights is None:
        return values
    weights = anchor_weights[batch.positive.int().argmax(dim=1)]
    return _weighted(values, weights).sum() / _total(weights).to(values.dtype)


def _weighted(values: Tensor, weights: Tensor | None) -> Tensor:
    return values if weights is None else values * weights.to(values.dtype)


def _repeated(s: Tensor, weights: Tensor | None) -> Tensor:
    """Add log(weights) to logits, which multiplies the exponentials by the weights."""
    return s if weights is None else s + weights.log().to(s.dtype).clamp(min=torch.finfo(s.dtype).min)


def _means(values: Tensor, members: Tensor, weights: Tensor | None) -> Tensor:
    """[N], the weighted mean over each row's members; 0 if the weights sum to 0."""
    if weights is None:
        return parts.row_means(values, members)
    total = parts.row_sums(weights, members).to(values.dtype)
    return parts.row_sums(_weighted(values, weights), members) / total.where(total > 0, 1)


def _total(weights: Tensor) -> Tensor:
    """The sum of the weights; 1 if it is not positive."""
    total = weights.sum()
    return total.where(total > 0, 1)


@fault("sigmoid", level="policies")
def sigmoid_anchor_weights_mean_over_the_rows(
    view_a: Tensor, view_b: Tensor, *, temperature: float, bias: float = -10.0, anchor_weights: Tensor | None = None
) -> Tensor:
    """The sum of the weighted values is divided by the number of anchors, not by the sum of their weights."""
    values = parts.anchors("sigmoid", parts.across(view_a, view_b, temperature=temperature, bias=bias))
    return values if anchor_weights is None else values * anchor_weights


@fault("sigmoid", level="policies", reduction="mean_pairs")
def sigmoid_anchor_weights_of_pairs_count_once(
    view_a: Tensor,
    view_b: Tensor,
    *,
    temperature: float,
    bias: float = -10.0,
    anchor_weights: Tensor | None = None,
    ignored: Tensor | None = None,
) -> Tensor:
    """The mean over pairs divides by the number of pairs, not by the sum of their anchors' weights."""
    batch = parts.across(view_a, view_b, temperature=temperature, bias=bias)
    batch = batch if ignored is None else batch._replace(other=~ignored)
    values = parts.anchors("sigmoid", batch)
    return (values if anchor_weights is None else values * anchor_weights).sum() / batch.other.sum().clamp(min=1)
