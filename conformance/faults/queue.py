"""Queues: explicit negatives in InfoNCE, and what is wrongly in them or wrongly done to them."""

from __future__ import annotations

import torch

from . import parts
from .base import fault, github


@fault("info_nce", github("lightly-ai/lightly", "issues/564"), of=parts.ways)
def info_nce_own_key_in_the_queue(way: parts.Way) -> parts.Way:
    """The batch's keys are put into the queue before the loss is taken: each anchor's positive is a negative too."""
    return way if way.negatives is None else way._replace(negatives=torch.cat([way.negatives, way.keys]))


@fault("info_nce", github("lightly-ai/lightly", "pull/1009"), of=parts.ways)
def info_nce_queue_not_normalised(way: parts.Way) -> parts.Made:
    """The queue's rows are normalised and the result is thrown away: their norms stay in the logits."""
    if way.negatives is None:
        return way
    raw = parts.unit(way.anchors) @ way.negatives.T / way.temperature
    return way.rows._replace(logits=torch.cat([way.rows.logits[:, :1], raw], dim=1))


@fault("info_nce", of=parts.ways)
def info_nce_queue_without_temperature(way: parts.Way) -> parts.Made:
    """The queue's logits are not divided by the temperature; the positive's is."""
    if way.negatives is None:
        return way
    rows = way.rows
    return rows._replace(logits=rows.logits.where(rows.positive, rows.logits * way.temperature))


@fault("info_nce", github("maple-research-lab/AdCo", "issues/6"), of=parts.ways)
def info_nce_batch_beside_the_queue(way: parts.Way) -> parts.Rows:
    """The other keys of the batch are negatives beside the queue, where the queue alone is claimed."""
    batch = way._replace(negatives=None).rows
    if way.negatives is None:
        return batch
    return batch._replace(logits=torch.cat([batch.logits, way.rows.logits[:, 1:]], dim=1))


@fault("info_nce", of=parts.ways)
def info_nce_queue_ignored(way: parts.Way) -> parts.Way:
    """The queue is taken and not used: the batch's keys are the negatives."""
    return way._replace(negatives=None)


@fault("info_nce", github("taesungp/contrastive-unpaired-translation", "issues/14"), of=parts.ways)
def info_nce_queue_detached(way: parts.Way) -> parts.Way:
    """No gradient reaches the explicit negatives, where they are rows that are trained."""
    return way if way.negatives is None else way._replace(negatives=way.negatives.detach())
