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
    temperature: float | Tensor,
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
    if no_negative == "nan":
        values = torch.where(negatives == 0, torch.nan, values)
    if no_positive == "nan":
        values = torch.where(positives == 0, torch.nan, values)
    elif no_positive == "drop":
        counted = positives > 0 if counted is None else counted & (positives > 0)
    if reduction == "none":
        result = values if counted is None else values[counted]
    else:
        result = _reduced(values, counted, positives if reduction == "mean_pairs" else None, reduction)
    if base_temperature is not None:
        result = result * (temperature / base_temperature)
    return result.to(torch.float64 if embeddings.dtype == torch.float64 else torch.float32)


def _reduced(values: Tensor, counted: Tensor | None, weights: Tensor | None, reduction: str) -> Tensor:
    if counted is not None:
        values = torch.where(counted, values, 0.0)
        weights = torch.where(counted, 1 if weights is None else weights, 0)
    # A sum of float32 values cannot overflow in float64. That of float64 values might where its mean does not: those
    # near the dtype's end are added at 2^-64 of their size, all others as they are.
    room = None
    if values.dtype == torch.float64:
        large = values.detach().abs().amax() > torch.finfo(values.dtype).max ** 0.9
        room = torch.where(large, 2.0**-64, 1.0).to(values.dtype)
        values = values * room
    wide = None if values.device.type == "mps" else torch.float64
    if reduction == "mean_pairs" and weights is not None:
        values = values * weights
    if reduction == "mean" and weights is None:
        result = values.mean(dtype=wide)
    else:
        result = values.sum(dtype=wide)
        if reduction != "sum" and weights is not None:
            result = result / weights.sum().clamp(min=1)
    return result if room is None else result / room
