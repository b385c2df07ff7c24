"""Directions: whose rows are anchors."""

from __future__ import annotations

import torch
from torch import Tensor

from . import parts
from .base import Family, github

FAMILY = Family("directions")


@FAMILY.fault("info_nce", "views", github("lucidrains/DALLE-pytorch", "issues/32"))
def info_nce_one_direction(view_a: Tensor, view_b: Tensor, *, temperature: float) -> Tensor:
    """Only the first tower's rows are anchors, where both directions are claimed."""
    return parts.diagonal_is_right(parts.tower_logits(view_a, view_b, temperature))


@FAMILY.fault("info_nce", "views")
def info_nce_directions_summed(
    view_a: Tensor, view_b: Tensor, negatives: Tensor | None = None, *, temperature: float
) -> Tensor:
    """The two directions are summed and not averaged."""
    return 2 * parts.info_nce(view_a, view_b, negatives, temperature=temperature)


@FAMILY.fault("info_nce", "views", direction="a_to_b")
def info_nce_softmax_over_the_batch(view_a: Tensor, view_b: Tensor, *, temperature: float) -> Tensor:
    """The softmax runs over the anchors, not over the keys: this is the other direction."""
    return -parts.tower_logits(view_a, view_b, temperature).log_softmax(dim=0).diagonal().mean()


@FAMILY.fault("nt_xent", "views", "https://github.com/google-research/simclr/blob/master/objective.py")
def nt_xent_views_summed(view_a: Tensor, view_b: Tensor, *, temperature: float) -> Tensor:
    """The means of the two views are summed: twice the mean over all rows."""
    return 2 * parts.nt_xent(view_a, view_b, temperature=temperature)


@FAMILY.fault("nt_xent", "views", github("tensorflow/similarity", "pull/262"))
def nt_xent_first_views_only(view_a: Tensor, view_b: Tensor, *, temperature: float) -> Tensor:
    """Only the first view's rows are anchors."""
    logits = parts.views_logits(view_a, view_b, temperature)
    items = len(view_a)
    return -logits.log_softmax(dim=1)[torch.arange(items), items + torch.arange(items)].mean()


@FAMILY.fault("nt_xent_pairwise", "labels")
def nt_xent_pairwise_each_pair_once(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """A pair is taken once, its first row the anchor: the upper triangle of the mask."""
    batch = parts.labelled(embeddings, labels, temperature)
    return parts.row_means(parts.pairwise_values(batch), batch.positive.triu()).mean()


@FAMILY.fault("nt_bxent", "pairs")
def nt_bxent_mean_over_the_columns(embeddings: Tensor, positive_pairs: Tensor, *, temperature: float) -> Tensor:
    """Positives and negatives are averaged over the columns of the mask, not over its rows."""
    batch = parts.paired(embeddings, positive_pairs, temperature)
    return parts.bxent_anchors(batch._replace(positive=batch.positive.T)).mean()
