"""Sums, means and counts: what is divided by what, and when the logarithm is taken."""

from __future__ import annotations

import torch
from torch import Tensor

from . import parts
from .base import fault, github, pml


@fault("supcon", of=parts.labelled)
def supcon_log_outside_the_mean(batch: parts.Batch) -> Tensor:
    """The logarithm of the positives' mean is taken, not the mean of their logarithms: this is the other SupCon."""
    return parts.anchors("supcon_in", batch)


@fault("supcon_in", of=parts.labelled)
def supcon_in_log_inside_the_mean(batch: parts.Batch) -> Tensor:
    """The mean of the positives' logarithms is taken, not the logarithm of their mean: this is the other SupCon."""
    return parts.anchors("supcon", batch)


@fault("nt_xent", github("mpatacchiola/self-supervised-relational-reasoning", "issues/3"), of=parts.views)
def nt_xent_log_of_the_batch_mean(rows: parts.Rows) -> Tensor:
    """The ratios are averaged over the batch before the logarithm is taken."""
    each = rows.logits.log_softmax(dim=1)[rows.positive]
    return torch.tensor(float(len(each)), dtype=each.dtype).log() - each.logsumexp(dim=0)


@fault("supcon_in", github("vturrisi/solo-learn", "blob/main/solo/losses/simclr.py"), of=parts.labelled)
def supcon_in_ratios_summed(batch: parts.Batch) -> Tensor:
    """The ratios inside the logarithm are summed and not divided by their number: the gradient is right."""
    value = parts.log_sum(batch.s, batch.other) - parts.log_sum(batch.s, batch.positive)
    return value[:, 0].where(batch.counts > 0, 0)


@fault("supcon", of=parts.labelled)
def supcon_divided_by_the_rows(batch: parts.Batch) -> Tensor:
    """The sum over the positives is divided by the number of rows, not by the number of positives."""
    return batch.values.where(batch.positive, 0).mean(dim=1)


@fault("supcon", github("vturrisi/solo-learn", "issues/185"), of=parts.given)
def supcon_count_of_another_row(given: parts.Features) -> Tensor:
    """The counts are broadcast along the wrong axis: a pair is divided by the positive's number of positives."""
    batch = given.cosines
    return parts.row_sums(batch.values / batch.counts.clamp(min=1), batch.positive)


@fault("supcon", github("KevinMusgrave/pytorch-metric-learning", "issues/6"), of=parts.labelled)
def supcon_mean_over_pairs(batch: parts.Batch) -> Tensor:
    """The mean runs over all positive pairs at once: anchors with many positives weigh more."""
    return batch.values.where(batch.positive, 0).sum() / batch.positive.sum().clamp(min=1)


@fault("nt_xent_pairwise", github("KevinMusgrave/pytorch-metric-learning", "issues/6"), of=parts.labelled)
def nt_xent_pairwise_mean_over_pairs(batch: parts.Batch) -> Tensor:
    """The mean runs over all positive pairs at once, where the mean of each anchor's mean is claimed."""
    return batch.pairwise.where(batch.positive, 0).sum() / batch.positive.sum().clamp(min=1)


@fault("nt_xent_pairwise", of=parts.labelled)
def nt_xent_pairwise_positives_summed(batch: parts.Batch) -> Tensor:
    """The values of an anchor's positives are summed and not averaged."""
    return parts.row_sums(batch.pairwise, batch.positive)


@fault("supcon", of=parts.labelled)
def supcon_count_plus_one(batch: parts.Batch) -> Tensor:
    """The positives are counted before the diagonal is removed from the mask: |P| + 1."""
    return parts.row_sums(batch.values, batch.positive) / (batch.counts + 1)


@fault("supcon", github("google-research/google-research", "blob/master/supcon/losses.py"), of=parts.labelled)
def supcon_divided_twice(batch: parts.Batch) -> Tensor:
    """The sum over the positives is divided by their number twice, as with one view in the authors' TensorFlow code."""
    return parts.anchors("supcon", batch) / batch.counts.clamp(min=1)


@fault("supcon", github("tttianhao/CLEAN", "issues/26"), of=parts.cosines)
def supcon_denominator_once(batch: parts.Batch) -> Tensor:
    """The logarithm of the denominator is added once for each anchor, not once for each positive."""
    total = parts.log_sum(batch.s, batch.other)[:, 0] - parts.row_sums(batch.s, batch.positive)
    return (total / batch.counts.clamp(min=1)).where(batch.counts > 0, 0)


@fault("supcon", github("KevinMusgrave/pytorch-metric-learning", "issues/744"), of=parts.labelled)
def supcon_lonely_dropped(batch: parts.Batch) -> Tensor:
    """Anchors without positive are left out of the mean, where they are said to count as 0."""
    return parts.anchors("supcon", batch).sum() / (batch.counts > 0).sum().clamp(min=1)


@fault("supcon", no_positive="drop", of=parts.labelled)
def supcon_lonely_kept(batch: parts.Batch) -> parts.Batch:
    """Anchors without positive count as 0, where they are said to be left out of the mean."""
    return batch


@fault("supcon", github("HobbitLong/SupContrast", "issues/141"), of=parts.given)
def supcon_lonely_nan(given: parts.Features) -> Tensor:
    """An anchor without positive is divided by its number of positives, 0: the loss is NaN."""
    batch = given.cosines
    return parts.row_sums(batch.values, batch.positive) / batch.positive.sum(dim=1)


@fault("supcon_in", of=parts.labelled)
def supcon_in_lonely_infinite(batch: parts.Batch) -> Tensor:
    """An anchor without positive costs -log 0, which is infinite."""
    inside = batch.s.masked_fill(~batch.positive, -torch.inf).logsumexp(dim=1)
    return parts.log_sum(batch.s, batch.other)[:, 0] - inside + batch.counts.log()


@fault("supcon", github("HobbitLong/SupContrast", "issues/135"), of=parts.labelled)
def supcon_summed(batch: parts.Batch) -> Tensor:
    """The anchors are summed, as the paper's formula says, where their mean is claimed."""
    return parts.anchors("supcon", batch).sum()


@fault("supcon", pml("reducers/avg_non_zero_reducer.py"), of=parts.labelled)
def supcon_mean_over_what_costs(batch: parts.Batch) -> Tensor:
    """The mean runs over the anchors whose value is above 0: those without positive and those solved leave it."""
    values = parts.anchors("supcon", batch)
    return values.sum() / (values > 0).sum().clamp(min=1)


@fault("supcon", pml("losses/supcon_loss.py"), of=parts.labelled)
def supcon_zero_without_negatives(batch: parts.Batch) -> Tensor:
    """A batch of one class costs 0, though its positives still compete with each other."""
    return parts.anchors("supcon", batch) if batch.negative.any() else 0 * batch.s


@fault("nt_xent", github("lucidrains/contrastive-learner", "issues/2"), of=parts.views)
def nt_xent_divided_by_two_less(rows: parts.Rows) -> Tensor:
    """The sum over 2 B rows is divided by 2 (B - 1)."""
    return parts.loss_of("nt_xent", rows) * len(rows.logits) / (len(rows.logits) - 2)


@fault("nt_bxent", of=parts.paired)
def nt_bxent_diagonal_not_counted(batch: parts.Batch) -> Tensor:
    """The positives are divided by their number, without the diagonal that counts as one more."""
    as_positive, as_negative = batch.costs
    return parts.row_means(as_positive, batch.positive) + parts.row_means(as_negative, batch.negative)


@fault("nt_bxent", of=parts.paired)
def nt_bxent_one_mean_for_all(batch: parts.Batch) -> Tensor:
    """Positives and negatives share one mean over the row, as plain binary cross-entropy does."""
    return torch.where(batch.positive, *batch.costs).where(batch.other, 0)


@fault("supcon_epsilon", of=parts.products)
def supcon_epsilon_count_without_epsilon(batch: parts.Batch) -> Tensor:
    """The number of positives is not given its epsilon."""
    e = parts.exponentials(batch)
    return parts.row_means(parts.row_sums(e, batch.other)[:, None].log() - e.log(), batch.positive)


@fault("info_nce", github("google-research/simclr", "issues/202"), of=parts.ways)
def info_nce_divided_by_the_replicas(way: parts.Way) -> Tensor:
    """The loss, already a mean, is divided by the number of replicas once more: here by 2."""
    return parts.loss_of("info_nce", way) / 2
