"""Wrong directions: anchors that are missing or exchanged, and directions or views that are not averaged."""

from __future__ import annotations

import torch
from torch import Tensor

from . import parts
from .base import fault, github


@fault("info_nce", github("lucidrains/DALLE-pytorch", "issues/32"))
def info_nce_one_direction(view_a: Tensor, view_b: Tensor, *, temperature: float) -> parts.Direction:
    """Only the first tower's rows are anchors, although the loss has both directions."""
    return parts.Direction(view_a, view_b, temperature)


@fault("info_nce", build=parts.directions)
def info_nce_directions_summed(direction: parts.Direction) -> Tensor:
    """The two directions are summed instead of averaged."""
    return 2 * parts.loss_of("info_nce", direction)


@fault("info_nce", direction="a_to_b")
def info_nce_softmax_over_the_batch(view_a: Tensor, view_b: Tensor, *, temperature: float) -> parts.Direction:
    """The softmax runs over the anchors instead of the keys: this is the other direction."""
    return parts.Direction(view_b, view_a, temperature)


@fault("nt_xent", github("google-research/simclr", "blob/master/objective.py"), build=parts.views)
def nt_xent_views_summed(rows: parts.Rows) -> Tensor:
    """The means of the two views are summed, which gives twice the mean over all rows."""
    return 2 * parts.loss_of("nt_xent", rows)


@fault("nt_xent", github("tensorflow/similarity", "pull/262"), build=parts.views)
def nt_xent_first_views_only(rows: parts.Rows) -> parts.Rows:
    """Only the first view's rows are anchors."""
    items = len(rows.target) // 2
    return parts.Rows(rows.logits[:items], rows.target[:items])


@fault("nt_xent_pairwise", build=parts.labelled)
def nt_xent_pairwise_each_pair_once(batch: parts.Batch) -> Tensor:
    """Each pair counts once, with its first row as anchor: only the upper triangle of the mask is used."""
    return parts.row_means(batch.pairwise, batch.positive.triu())


@fault("nt_bxent", build=parts.paired, level="policies")
def nt_bxent_mean_over_the_columns(batch: parts.Batch) -> parts.Batch:
    """Positives and negatives are averaged within each column of the mask instead of within each row."""
    return batch._replace(positive=batch.positive.T)


@fault("multiple_negatives_ranking", build=parts.ranking)
def multiple_negatives_ranking_directions_summed(given: parts.Ranking) -> Tensor:
    """The means of the directions are summed instead of averaged."""
    return parts.loss_of("multiple_negatives_ranking", given) * (1 if given.partition == "joint" else len(given.blocks))


@fault("multiple_negatives_ranking", build=parts.ranking)
def multiple_negatives_ranking_denominators_per_direction(given: parts.Ranking) -> Tensor:
    """Each direction has its own denominator, which may lack the positive: the term may be negative."""
    positive = given.query_to_doc.diagonal()
    return torch.stack([s.logsumexp(dim=1) - positive for s in given.blocks.values()]).mean(dim=0)


@fault("multiple_negatives_ranking", build=parts.ranking)
def multiple_negatives_ranking_joint_denominator(given: parts.Ranking) -> parts.Ranking:
    """All directions share one denominator, although each should have its own."""
    return given._replace(partition="joint")


@fault("multiple_negatives_ranking", build=parts.ranking)
def multiple_negatives_ranking_doc_to_query_not_transposed(given: parts.Ranking) -> parts.Ranking:
    """The direction from documents to queries reuses the logits from queries to documents, not transposed."""
    return given._replace(doc_to_query=given.raw.query_to_doc)


@fault("multiple_negatives_ranking", build=parts.ranking)
def multiple_negatives_ranking_documents_against_hard_negatives(given: parts.Ranking) -> parts.Ranking:
    """The direction from documents to queries also contrasts each document with the hard negatives."""
    return given._replace(doc_to_query=torch.cat([given.doc_to_query, given.raw.doc_to_hard], dim=1))
