"""From one value per row to what a loss returns: which anchors count, what the lonely ones add, mean, sum or none."""

from __future__ import annotations

import torch
from torch import Tensor

from .engine import AnchorValues


def reduce_anchors(
    evaluated: AnchorValues,
    embeddings: Tensor,
    *,
    anchors: Tensor | None,
    temperature: float,
    base_temperature: float | None,
    reduction: str,
    no_positive: str | None = None,
    no_negative: str | None = None,
) -> Tensor:
    """Apply the policies for anchors that lack positives or negatives, then the reduction and the base temperature.

    Args:
        evaluated: per-row values and the sizes of P(i) and N(i), ``[N]`` each.
        embeddings: ``[N, D]``, whose dtype decides the dtype returned: float64 for float64, else float32.
        anchors: bool ``[N]``, or None where every row is an anchor.
        temperature: the loss's temperature.
        base_temperature: None, or what the loss is scaled by: ``temperature / base_temperature``.
        reduction: "mean", "sum", "none" or "mean_pairs".
        no_positive: "zero", "drop" or "nan"; None where an anchor needs no positive.
        no_negative: "zero" or "nan"; None where an anchor needs no negative.

    Returns:
        A scalar, or one value per counted anchor under "none". Over no anchors, mean and sum are 0 with gradient 0.
    """
    values, positives, negatives = evaluated
    counted = anchors
    lonely = positives == 0
    if no_negative == "nan":
        values = torch.where(negatives == 0, torch.nan, values)
    if no_positive == "nan":
        values = torch.where(lonely, torch.nan, values)
    elif no_positive == "drop":
        counted = ~lonely if counted is None else counted & ~lonely
    if reduction == "none":
        result = values if counted is None else values[counted]
    else:
        weights = positives if reduction == "mean_pairs" else torch.ones_like(positives)
        if counted is not None:
            values = torch.where(counted, values, 0.0)
            weights = torch.where(counted, weights, 0)
        result = _weighted_sum(values, weights if reduction == "mean_pairs" else None, weights.sum(), reduction)
    if base_temperature is not None:
        result = result * (temperature / base_temperature)
    return result.to(torch.float64 if embeddings.dtype == torch.float64 else torch.float32)


def _weighted_sum(values: Tensor, weights: Tensor | None, total: Tensor, reduction: str) -> Tensor:
    # Values near the dtype's end are added at 2^-64 of their size, so that a sum does not overflow where its mean would
    # not; all others as they are, or the smallest would be rounded to zero.
    large = values.detach().abs().amax() > torch.finfo(values.dtype).max ** 0.9
    room = torch.where(large, 2.0**-64, 1.0).to(values.dtype)
    scaled = values * room
    result = (scaled if weights is None else scaled * weights).sum()
    if reduction != "sum":
        result = result / total.clamp(min=1)
    return result / room
