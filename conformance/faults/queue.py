"""Explicit negatives, such as a queue or hard negatives, with wrong rows or wrong treatment."""

from __future__ import annotations

import torch

from . import parts
from .base import RIGHT_AT_1, fault, github


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


@fault("info_nce", build=parts.directions, **RIGHT_AT_1)
def info_nce_queue_without_temperature(direction: parts.Direction) -> parts.Evaluable:
    """The logits of the queue are not divided by the temperature; the logit of the positive is."""
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


@fault("multiple_negatives_ranking", build=parts.ranking)
def multiple_negatives_ranking_hard_negatives_of_the_own_query_only(given: parts.Ranking) -> parts.Ranking:
    """A query is contrasted only with its own hard negatives, although all queries should share them."""
    return given._replace(hard=given.hard.where(given.own, -torch.inf))


@fault("multiple_negatives_ranking", build=parts.ranking)
def multiple_negatives_ranking_hard_negatives_shared(given: parts.Ranking) -> parts.Ranking:
    """All queries share the hard negatives, although each query should be contrasted only with its own."""
    return given._replace(hard=given.raw.hard)


@fault("multiple_negatives_ranking", build=parts.ranking)
def multiple_negatives_ranking_hard_negatives_instead_of_the_batch(given: parts.Ranking) -> parts.Ranking:
    """With hard negatives, the documents of the other queries are no longer negatives."""
    own = ~parts.off_diagonal(len(given.query_to_doc))
    kept = own | (given.hard.shape[1] == 0)
    return given._replace(query_to_doc=given.query_to_doc.where(kept, -torch.inf))


@fault("multiple_negatives_ranking", build=parts.ranking)
def multiple_negatives_ranking_batch_beside_the_own_hard_negatives(given: parts.Ranking) -> parts.Ranking:
    """The documents of the other queries are negatives, although only the query's own hard negatives should be."""
    return given._replace(query_to_doc=given.raw.query_to_doc)


@fault("multiple_negatives_ranking", build=parts.ranking)
def multiple_negatives_ranking_hard_negatives_of_another_query(given: parts.Ranking) -> parts.Ranking:
    """The hard negatives [N, H, D] are reshaped to [H, N, D], so that a query gets those of others."""
    hard = given.arguments["hard_negatives"]
    if hard is None:
        return given
    n, number, dim = hard.shape
    return given.again(hard_negatives=hard.reshape(number, n, dim).transpose(0, 1))


@fault("multiple_negatives_ranking", build=parts.ranking)
def multiple_negatives_ranking_first_hard_negative_only(given: parts.Ranking) -> parts.Ranking:
    """Only the first hard negative of each query is used, as in losses of triplets."""
    hard = given.arguments["hard_negatives"]
    return given.again(hard_negatives=None if hard is None else hard[:, :1])


@fault("multiple_negatives_ranking", build=parts.ranking)
def multiple_negatives_ranking_hard_negatives_detached(given: parts.Ranking) -> parts.Ranking:
    """No gradient reaches the hard negatives."""
    hard = given.arguments["hard_negatives"]
    return given.again(hard_negatives=None if hard is None else hard.detach())
