"""Sums, means and counts: what is divided by what, and when the logarithm is taken."""

from __future__ import annotations

import torch
from torch import Tensor

from . import parts
from .base import Family, github

FAMILY = Family("averaging")


@FAMILY.fault("supcon", of=parts.labelled)
def supcon_log_outside_the_mean(batch: parts.Batch) -> Tensor:
    """The logarithm of the positives' mean is taken, not the mean of their logarithms: this is the other SupCon."""
    return parts.anchors("supcon_in", batch)


@FAMILY.fault("supcon_in", of=parts.labelled)
def supcon_in_log_inside_the_mean(batch: parts.Batch) -> Tensor:
    """The mean of the positives' logarithms is taken, not the logarithm of their mean: this is the other SupCon."""
    return parts.anchors("supcon", batch)


@FAMILY.fault("nt_xent", github("mpatacchiola/self-supervised-relational-reasoning", "issues/3"), of=parts.views_logits)
def nt_xent_log_of_the_batch_mean(logits: Tensor) -> Tensor:
    """The ratios are averaged over the batch before the logarithm is taken."""
    rows = torch.arange(len(logits))
    each = logits.log_softmax(dim=1)[rows, parts.stacked(len(logits))]
    return torch.tensor(float(len(logits)), dtype=each.dtype).log() - each.logsumexp(dim=0)


@FAMILY.fault("supcon_in", "https://github.com/vturrisi/solo-learn/blob/main/solo/losses/simclr.py", of=parts.labelled)
def supcon_in_ratios_summed(batch: parts.Batch) -> Tensor:
    """The ratios inside the logarithm are summed and not divided by their number: the gradient is right."""
    value = parts.log_sum(batch.s, batch.other) - parts.log_sum(batch.s, batch.positive)
    return value[:, 0].where(batch.positive.any(dim=1), 0)


@FAMILY.fault("supcon", of=parts.labelled)
def supcon_divided_by_the_rows(batch: parts.Batch) -> Tensor:
    """The sum over the positives is divided by the number of rows, not by the number of positives."""
    return batch.values.where(batch.positive, 0).mean(dim=1)


@FAMILY.fault("supcon", github("vturrisi/solo-learn", "issues/185"), of=parts.featured)
def supcon_count_of_another_row(batch: parts.Batch) -> Tensor:
    """The counts are broadcast along the wrong axis: a pair is divided by the positive's number of positives."""
    values = batch.values / batch.counts.clamp(min=1)
    return values.where(batch.positive, 0).sum(dim=1)


@FAMILY.fault("supcon", github("KevinMusgrave/pytorch-metric-learning", "issues/6"), of=parts.labelled)
def supcon_mean_over_pairs(batch: parts.Batch) -> Tensor:
    """The mean runs over all positive pairs at once: anchors with many positives weigh more."""
    values = batch.values.where(batch.positive, 0)
    return values.sum() / batch.positive.sum().clamp(min=1)


@FAMILY.fault("nt_xent_pairwise", github("KevinMusgrave/pytorch-metric-learning", "issues/6"), of=parts.labelled)
def nt_xent_pairwise_mean_over_pairs(batch: parts.Batch) -> Tensor:
    """The mean runs over all positive pairs at once, where the mean of each anchor's mean is claimed."""
    return parts.pairwise_values(batch).where(batch.positive, 0).sum() / batch.positive.sum().clamp(min=1)


@FAMILY.fault("nt_xent_pairwise", of=parts.labelled)
def nt_xent_pairwise_positives_summed(batch: parts.Batch) -> Tensor:
    """The values of an anchor's positives are summed and not averaged."""
    return parts.pairwise_values(batch).where(batch.positive, 0).sum(dim=1)


@FAMILY.fault("supcon", of=parts.labelled)
def supcon_count_plus_one(batch: parts.Batch) -> Tensor:
    """The positives are counted before the diagonal is removed from the mask: |P| + 1."""
    return batch.values.where(batch.positive, 0).sum(dim=1) / (batch.counts + 1)


@FAMILY.fault(
    "supcon", "https://github.com/google-research/google-research/blob/master/supcon/losses.py", of=parts.labelled
)
def supcon_divided_twice(batch: parts.Batch) -> Tensor:
    """The sum over the positives is divided by their number twice, as with one view in the authors' TensorFlow code."""
    return parts.anchors("supcon", batch) / batch.counts.clamp(min=1)


@FAMILY.fault("supcon", github("tttianhao/CLEAN", "issues/26"), of=parts.cosines)
def supcon_denominator_once(batch: parts.Batch) -> Tensor:
    """The logarithm of the denominator is added once for each anchor, not once for each positive."""
    total = parts.log_sum(batch.s, batch.other)[:, 0] - batch.s.where(batch.positive, 0).sum(dim=1)
    return (total / batch.counts.clamp(min=1)).where(batch.positive.any(dim=1), 0)


@FAMILY.fault("supcon", github("KevinMusgrave/pytorch-metric-learning", "issues/744"), of=parts.labelled)
def supcon_lonely_dropped(batch: parts.Batch) -> Tensor:
    """Anchors without positive are left out of the mean, where they are said to count as 0."""
    kept = batch.positive.any(dim=1)
    return parts.anchors("supcon", batch).sum() / kept.sum().clamp(min=1)


@FAMILY.fault("supcon", no_positive="drop")
def supcon_lonely_kept(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """Anchors without positive count as 0, where they are said to be left out of the mean."""
    return parts.supcon(embeddings, labels, temperature=temperature)


@FAMILY.fault("supcon", github("HobbitLong/SupContrast", "issues/141"), of=parts.featured)
def supcon_lonely_nan(batch: parts.Batch) -> Tensor:
    """An anchor without positive is divided by its number of positives, 0: the loss is NaN."""
    return batch.values.where(batch.positive, 0).sum(dim=1) / batch.positive.sum(dim=1)


@FAMILY.fault("supcon_in", of=parts.labelled)
def supcon_in_lonely_infinite(batch: parts.Batch) -> Tensor:
    """An anchor without positive costs -log 0, which is infinite."""
    inside = batch.s.masked_fill(~batch.positive, -torch.inf).logsumexp(dim=1)
    return parts.log_sum(batch.s, batch.other)[:, 0] - inside + batch.counts.log()


@FAMILY.fault("supcon", github("HobbitLong/SupContrast", "issues/135"), of=parts.labelled)
def supcon_summed(batch: parts.Batch) -> Tensor:
    """The anchors are summed, as the paper's formula says, where their mean is claimed."""
    return parts.anchors("supcon", batch).sum()


@FAMILY.fault(
    "supcon",
    "https://github.com/KevinMusgrave/pytorch-metric-learning/blob/v2.9.0/src/pytorch_metric_learning/reducers/avg_non_zero_reducer.py",
    of=parts.labelled,
)
def supcon_mean_over_what_costs(batch: parts.Batch) -> Tensor:
    """The mean runs over the anchors whose value is above 0: those without positive and those solved leave it."""
    values = parts.anchors("supcon", batch)
    return values.sum() / (values > 0).sum().clamp(min=1)


@FAMILY.fault(
    "supcon",
    "https://github.com/KevinMusgrave/pytorch-metric-learning/blob/v2.9.0/src/pytorch_metric_learning/losses/supcon_loss.py",
)
def supcon_zero_without_negatives(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """A batch of one class costs 0, though its positives still compete with each other."""
    batch = parts.labelled(embeddings, labels, temperature)
    loss = parts.anchors("supcon", batch).mean()
    return loss if batch.negative.any() else 0 * embeddings.sum()


@FAMILY.fault("nt_xent", github("lucidrains/contrastive-learner", "issues/2"))
def nt_xent_divided_by_two_less(view_a: Tensor, view_b: Tensor, *, temperature: float) -> Tensor:
    """The sum over 2 B rows is divided by 2 (B - 1)."""
    rows = 2 * len(view_a)
    return parts.nt_xent(view_a, view_b, temperature=temperature) * rows / (rows - 2)


@FAMILY.fault("nt_bxent", of=parts.paired)
def nt_bxent_diagonal_not_counted(batch: parts.Batch) -> Tensor:
    """The positives are divided by their number, without the diagonal that counts as one more."""
    as_positive, as_negative = parts.bxent_values(batch)
    return parts.row_means(as_positive, batch.positive) + parts.row_means(as_negative, batch.negative)


@FAMILY.fault("nt_bxent", of=parts.paired)
def nt_bxent_one_mean_for_all(batch: parts.Batch) -> Tensor:
    """Positives and negatives share one mean over the row, as plain binary cross-entropy does."""
    as_positive, as_negative = parts.bxent_values(batch)
    return torch.where(batch.positive, as_positive, as_negative).where(batch.other, 0)


@FAMILY.fault("supcon_epsilon", of=parts.products)
def supcon_epsilon_count_without_epsilon(batch: parts.Batch) -> Tensor:
    """The number of positives is not given its epsilon."""
    e = torch.exp(batch.s - batch.s.amax(dim=1, keepdim=True)) + parts.EPSILON
    values = e.where(batch.other, 0).sum(dim=1, keepdim=True).log() - e.log()
    return parts.row_means(values, batch.positive)


@FAMILY.fault("info_nce", github("google-research/simclr", "issues/202"))
def info_nce_divided_by_the_replicas(
    view_a: Tensor, view_b: Tensor, negatives: Tensor | None = None, *, temperature: float
) -> Tensor:
    """The loss, already a mean, is divided by the number of replicas once more: here by 2."""
    return parts.info_nce(view_a, view_b, negatives, temperature=temperature) / 2
