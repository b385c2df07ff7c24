"""Directions: whose rows are anchors."""

from __future__ import annotations

import torch
from torch import Tensor

from . import parts
from .base import Family, github

FAMILY = Family("directions")


@FAMILY.fault("info_nce", github("lucidrains/DALLE-pytorch", "issues/32"), of=parts.tower_logits)
def info_nce_one_direction(logits: Tensor) -> Tensor:
    """Only the first tower's rows are anchors, where both directions are claimed."""
    return parts.diagonal_is_right(logits)


@FAMILY.fault("info_nce")
def info_nce_directions_summed(
    view_a: Tensor, view_b: Tensor, negatives: Tensor | None = None, *, temperature: float
) -> Tensor:
    """The two directions are summed and not averaged."""
    return 2 * parts.info_nce(view_a, view_b, negatives, temperature=temperature)


@FAMILY.fault("info_nce", direction="a_to_b", of=parts.tower_logits)
def info_nce_softmax_over_the_batch(logits: Tensor) -> Tensor:
    """The softmax runs over the anchors, not over the keys: this is the other direction."""
    return -logits.log_softmax(dim=0).diagonal()


@FAMILY.fault("nt_xent", "https://github.com/google-research/simclr/blob/master/objective.py")
def nt_xent_views_summed(view_a: Tensor, view_b: Tensor, *, temperature: float) -> Tensor:
    """The means of the two views are summed: twice the mean over all rows."""
    return 2 * parts.nt_xent(view_a, view_b, temperature=temperature)


@FAMILY.fault("nt_xent", github("tensorflow/similarity", "pull/262"))
def nt_xent_first_views_only(view_a: Tensor, view_b: Tensor, *, temperature: float) -> Tensor:
    """Only the first view's rows are anchors."""
    logits = parts.views_logits(view_a, view_b, temperature)
    items = len(view_a)
    return -logits.log_softmax(dim=1)[torch.arange(items), items + torch.arange(items)].mean()


@FAMILY.fault("nt_xent_pairwise", of=parts.labelled)
def nt_xent_pairwise_each_pair_once(batch: parts.Batch) -> Tensor:
    """A pair is taken once, its first row the anchor: the upper triangle of the mask."""
    return parts.row_means(parts.pairwise_values(batch), batch.positive.triu())


@FAMILY.fault("nt_bxent", of=parts.paired)
def nt_bxent_mean_over_the_columns(batch: parts.Batch) -> Tensor:
    """Positives and negatives are averaged over the columns of the mask, not over its rows."""
    return parts.bxent_anchors(batch._replace(positive=batch.positive.T))
