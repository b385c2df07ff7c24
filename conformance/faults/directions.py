"""Directions: whose rows are anchors."""

from __future__ import annotations

from torch import Tensor

from . import parts
from .base import fault, github


@fault("info_nce", github("lucidrains/DALLE-pytorch", "issues/32"))
def info_nce_one_direction(view_a: Tensor, view_b: Tensor, *, temperature: float) -> parts.Way:
    """Only the first tower's rows are anchors, where both directions are claimed."""
    return parts.Way(view_a, view_b, temperature)


@fault("info_nce", of=parts.ways)
def info_nce_directions_summed(way: parts.Way) -> Tensor:
    """The two directions are summed and not averaged."""
    return 2 * parts.loss_of("info_nce", way)


@fault("info_nce", direction="a_to_b")
def info_nce_softmax_over_the_batch(view_a: Tensor, view_b: Tensor, *, temperature: float) -> parts.Way:
    """The softmax runs over the anchors, not over the keys: this is the other direction."""
    return parts.Way(view_b, view_a, temperature)


@fault("nt_xent", github("google-research/simclr", "blob/master/objective.py"), of=parts.views)
def nt_xent_views_summed(rows: parts.Rows) -> Tensor:
    """The means of the two views are summed: twice the mean over all rows."""
    return 2 * parts.loss_of("nt_xent", rows)


@fault("nt_xent", github("tensorflow/similarity", "pull/262"), of=parts.views)
def nt_xent_first_views_only(rows: parts.Rows) -> parts.Rows:
    """Only the first view's rows are anchors."""
    items = len(rows.right) // 2
    return parts.Rows(rows.logits[:items], rows.right[:items])


@fault("nt_xent_pairwise", of=parts.labelled)
def nt_xent_pairwise_each_pair_once(batch: parts.Batch) -> Tensor:
    """A pair is taken once, its first row the anchor: the upper triangle of the mask."""
    return parts.row_means(batch.pairwise, batch.positive.triu())


@fault("nt_bxent", of=parts.paired)
def nt_bxent_mean_over_the_columns(batch: parts.Batch) -> parts.Batch:
    """Positives and negatives are averaged over the columns of the mask, not over its rows."""
    return batch._replace(positive=batch.positive.T)
