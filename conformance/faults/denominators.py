"""Denominators that sum too much, too little, or something else."""

from __future__ import annotations

import torch
from torch import Tensor

from . import parts
from .base import fault, github


@fault("supcon", of=parts.labelled)
def supcon_self_kept(batch: parts.Batch) -> Tensor:
    """The denominator keeps the anchor itself: the diagonal is removed from the positives alone."""
    everyone = torch.ones_like(batch.other)
    return parts.row_means(parts.log_sum(batch.s, everyone) - batch.s, batch.positive)


@fault("nt_xent")
def nt_xent_self_kept(view_a: Tensor, view_b: Tensor, *, temperature: float) -> parts.Rows:
    """The denominator keeps the anchor itself: nothing masks the diagonal of the logits."""
    rows = parts.unit(torch.cat([view_a, view_b]))
    return parts.Rows(rows @ rows.T / temperature, parts.stacked(len(rows)))


@fault("supcon", github("zhoujiahuan1991/CVPR2024-FCS", "issues/3"), of=parts.labelled)
def supcon_other_positives_dropped(batch: parts.Batch) -> Tensor:
    """The denominator of a pair lacks the other positives of its anchor."""
    return parts.row_means(batch.pairwise, batch.positive)


@fault("supcon_in", of=parts.labelled)
def supcon_in_other_positives_dropped(batch: parts.Batch) -> Tensor:
    """Each ratio inside the logarithm has a denominator of its own, without the other positives."""
    inside = parts.log_sum(-batch.pairwise, batch.positive)[:, 0]
    return (batch.counts.clamp(min=1).log() - inside).where(batch.counts > 0, 0)


@fault("supcon", github("HobbitLong/SupContrast", "issues/64"), of=parts.labelled)
def supcon_positives_dropped(batch: parts.Batch) -> Tensor:
    """The denominator sums the negatives alone, as the paper's supplement can be read."""
    values = parts.row_means(parts.log_sum(batch.s, batch.negative) - batch.s, batch.positive)
    return values.where(batch.negative.any(dim=1), 0)


@fault("nt_xent", github("amazon-science/sccl", "issues/27"), of=parts.views)
def nt_xent_positive_dropped(rows: parts.Rows) -> Tensor:
    """The denominator sums the negatives alone: the positive is divided by what it is not part of."""
    return rows.negatives - rows.logits[rows.positive]


@fault("nt_xent", github("torchgeo/torchgeo", "pull/1208"))
def nt_xent_other_view_only(view_a: Tensor, view_b: Tensor, *, temperature: float) -> parts.Way:
    """A row is contrasted with the other view alone, and only rows of the first view are anchors."""
    return parts.Way(view_a, view_b, temperature)


@fault("nt_xent", of=parts.views)
def nt_xent_own_view_only(rows: parts.Rows) -> parts.Rows:
    """The negatives are those of the anchor's own view: the rows of the other view are left out."""
    first = rows.right >= len(rows.right) // 2
    kept = (first[:, None] == first) | rows.positive
    return rows._replace(logits=rows.logits.masked_fill(~kept, -torch.inf))


@fault("supcon_in", "https://pypi.org/project/infonce/", of=parts.cosines)
def supcon_in_diagonal_is_exp_0(batch: parts.Batch) -> Tensor:
    """The diagonal's logit is set to 0 and exponentiated: e^0 = 1 stands in the numerator and in the denominator."""
    s, eye = batch.s.where(batch.other, 0), ~batch.other
    value = parts.log_sum(s, batch.other | eye) - parts.log_sum(s, batch.positive | eye)
    return (value[:, 0] + batch.counts.clamp(min=1).log()).where(batch.counts > 0, 0)


@fault("nt_xent", github("taesungp/contrastive-unpaired-translation", "issues/34"))
def nt_xent_diagonal_is_minus_ten(view_a: Tensor, view_b: Tensor, *, temperature: float) -> parts.Rows:
    """The diagonal's cosine is set to -10 and not to minus infinity: at a high temperature it is still there."""
    rows = parts.views(view_a, view_b, temperature)
    return rows._replace(logits=rows.logits.where(parts.others(len(rows.logits)), -10 / temperature))


@fault("supcon", of=parts.labelled)
def supcon_mean_of_exponentials(batch: parts.Batch) -> Tensor:
    """The denominator is the mean of the exponentials, not their sum: the gradient is right, the value is not."""
    mean = parts.log_sum(batch.s, batch.other) - batch.other.sum(dim=1, keepdim=True).to(batch.s.dtype).log()
    return parts.row_means(mean - batch.s, batch.positive)


@fault("nt_xent_pairwise", github("KevinMusgrave/pytorch-metric-learning", "issues/699"), of=parts.labelled)
def nt_xent_pairwise_other_positives_kept(batch: parts.Batch) -> Tensor:
    """The denominator of a pair holds the other positives of its anchor too: this is SupCon."""
    return parts.anchors("supcon", batch)


@fault("nt_xent_pairwise", of=parts.labelled)
def nt_xent_pairwise_positive_dropped(batch: parts.Batch) -> Tensor:
    """The denominator of a pair sums the negatives alone, without the pair itself."""
    return supcon_positives_dropped(batch)


@fault("supcon_epsilon", of=parts.products)
def supcon_epsilon_self_kept(batch: parts.Batch) -> Tensor:
    """The denominator keeps the anchor itself."""
    return parts.epsilon_anchors(batch._replace(other=torch.ones_like(batch.other)), parts.exponentials(batch))


@fault("nt_bxent", of=parts.paired)
def nt_bxent_positives_among_negatives(batch: parts.Batch) -> Tensor:
    """The negatives' mean runs over every other row, the positives included."""
    as_positive, as_negative = batch.costs
    return parts.row_sums(as_positive, batch.positive) / (batch.counts + 1) + parts.row_means(as_negative, batch.other)


@fault("info_nce", of=parts.ways)
def info_nce_positive_twice(way: parts.Way) -> parts.Way:
    """The positive stands in the denominator twice: as the first column, and among the keys that follow."""
    return way._replace(negatives=way.keys) if way.negatives is None else way


@fault("info_nce", github("Seonghoon-Yu/MoCov2_Pytorch_tutorial", "issues/2"), of=parts.ways)
def info_nce_every_sum_for_every_anchor(way: parts.Way) -> parts.Made:
    """A column of positives plus a row of sums is a matrix: every anchor is divided by every anchor's sum."""
    if way.negatives is None:
        return way
    positive, negatives = way.rows.logits.tensor_split([1], dim=1)
    return torch.logaddexp(positive, negatives.logsumexp(dim=1)) - positive
