"""Explicit negatives of InfoNCE, such as a queue, with wrong rows or wrong treatment."""

from __future__ import annotations

import torch

from . import parts
from .base import fault, github


@fault("info_nce", github("lightly-ai/lightly", "issues/564"), build=parts.directions)
def info_nce_own_key_in_the_queue(direction: parts.Direction) -> parts.Direction:
    """The batch's keys enter the queue before the loss is computed: each anchor's positive is also a negative."""
    _, keys, _, queue = direction
    return direction if queue is None else direction._replace(negatives=torch.cat([queue, keys]))


@fault("info_nce", github("lightly-ai/lightly", "pull/1009"), build=parts.directions)
def info_nce_queue_not_normalised(direction: parts.Direction) -> parts.Evaluable:
    """The result of normalising the queue is discarded: the norms of its rows stay in the logits."""
    if direction.negatives is None:
        return direction
    raw = parts.unit(direction.anchors) @ direction.negatives.T / direction.temperature
    return direction.rows._replace(logits=torch.cat([direction.rows.logits[:, :1], raw], dim=1))


@fault("info_nce", build=parts.directions, right_at=(1.0, 1.0), because="Dividing by 1 changes nothing.")
def info_nce_queue_without_temperature(direction: parts.Direction) -> parts.Evaluable:
    """The queue's logits are not divided by the temperature, the positive's is."""
    if direction.negatives is None:
        return direction
    rows = direction.rows
    return rows._replace(logits=rows.logits.where(rows.positive, rows.logits * direction.temperature))


@fault("info_nce", github("maple-research-lab/AdCo", "issues/6"), build=parts.directions)
def info_nce_batch_beside_the_queue(direction: parts.Direction) -> parts.Rows:
    """The other keys of the batch are negatives too, although the queue should hold all negatives."""
    batch = direction._replace(negatives=None).rows
    if direction.negatives is None:
        return batch
    return batch._replace(logits=torch.cat([batch.logits, direction.rows.logits[:, 1:]], dim=1))


@fault("info_nce", build=parts.directions)
def info_nce_queue_ignored(direction: parts.Direction) -> parts.Direction:
    """The queue is accepted and ignored: the batch's keys are the negatives."""
    return direction._replace(negatives=None)


@fault("info_nce", github("taesungp/contrastive-unpaired-translation", "issues/14"), build=parts.directions)
def info_nce_queue_detached(direction: parts.Direction) -> parts.Direction:
    """No gradient reaches the explicit negatives, although they may be trained."""
    return direction if direction.negatives is None else direction._replace(negatives=direction.negatives.detach())
