"""Queues: explicit negatives in InfoNCE, and what is wrongly in them or wrongly done to them."""

from __future__ import annotations

import torch
from torch import Tensor

from . import parts
from .base import Family, github

FAMILY = Family("queue")


@FAMILY.fault("info_nce", github("lightly-ai/lightly", "issues/564"))
def info_nce_own_key_in_the_queue(
    view_a: Tensor, view_b: Tensor, negatives: Tensor | None = None, *, temperature: float
) -> Tensor:
    """The batch's keys are put into the queue before the loss is taken: each anchor's positive is a negative too."""

    def one_way(anchors: Tensor, keys: Tensor) -> Tensor:
        if negatives is None:
            return parts.diagonal_is_right(parts.tower_logits(anchors, keys, temperature))
        return parts.first_is_right(parts.queue_logits(anchors, keys, torch.cat([negatives, keys]), temperature))

    return (one_way(view_a, view_b) + one_way(view_b, view_a)) / 2


@FAMILY.fault("info_nce", github("lightly-ai/lightly", "pull/1009"))
def info_nce_queue_not_normalised(
    view_a: Tensor, view_b: Tensor, negatives: Tensor | None = None, *, temperature: float
) -> Tensor:
    """The queue's rows are normalised and the result is thrown away: their norms stay in the logits."""

    def one_way(anchors: Tensor, keys: Tensor) -> Tensor:
        if negatives is None:
            return parts.diagonal_is_right(parts.tower_logits(anchors, keys, temperature))
        logits = parts.queue_logits(anchors, keys, negatives, temperature)
        raw = parts.unit(anchors) @ negatives.T / temperature
        return parts.first_is_right(torch.cat([logits[:, :1], raw], dim=1))

    return (one_way(view_a, view_b) + one_way(view_b, view_a)) / 2


@FAMILY.fault("info_nce")
def info_nce_queue_without_temperature(
    view_a: Tensor, view_b: Tensor, negatives: Tensor | None = None, *, temperature: float
) -> Tensor:
    """The queue's logits are not divided by the temperature; the positive's is."""

    def one_way(anchors: Tensor, keys: Tensor) -> Tensor:
        if negatives is None:
            return parts.diagonal_is_right(parts.tower_logits(anchors, keys, temperature))
        logits = parts.queue_logits(anchors, keys, negatives, temperature)
        return parts.first_is_right(torch.cat([logits[:, :1], logits[:, 1:] * temperature], dim=1))

    return (one_way(view_a, view_b) + one_way(view_b, view_a)) / 2


@FAMILY.fault("info_nce", github("maple-research-lab/AdCo", "issues/6"))
def info_nce_batch_beside_the_queue(
    view_a: Tensor, view_b: Tensor, negatives: Tensor | None = None, *, temperature: float
) -> Tensor:
    """The other keys of the batch are negatives beside the queue, where the queue alone is claimed."""

    def one_way(anchors: Tensor, keys: Tensor) -> Tensor:
        logits = parts.tower_logits(anchors, keys, temperature)
        if negatives is not None:
            logits = torch.cat([logits, parts.unit(anchors) @ parts.unit(negatives).T / temperature], dim=1)
        return parts.diagonal_is_right(logits)

    return (one_way(view_a, view_b) + one_way(view_b, view_a)) / 2


@FAMILY.fault("info_nce")
def info_nce_queue_ignored(
    view_a: Tensor, view_b: Tensor, negatives: Tensor | None = None, *, temperature: float
) -> Tensor:
    """The queue is taken and not used: the batch's keys are the negatives."""
    return parts.info_nce(view_a, view_b, temperature=temperature)


@FAMILY.fault("info_nce", github("taesungp/contrastive-unpaired-translation", "issues/14"))
def info_nce_queue_detached(
    view_a: Tensor, view_b: Tensor, negatives: Tensor | None = None, *, temperature: float
) -> Tensor:
    """No gradient reaches the explicit negatives, where they are rows that are trained."""
    rest = None if negatives is None else negatives.detach()
    return parts.info_nce(view_a, view_b, rest, temperature=temperature)
