"""Sums, means and counts: what is divided by what, and when the logarithm is taken."""

from __future__ import annotations

import torch
from torch import Tensor

from . import parts
from .base import Family, github

FAMILY = Family("averaging")


@FAMILY.fault("supcon", "labels")
def supcon_log_outside_the_mean(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """The logarithm of the positives' mean is taken, not the mean of their logarithms: this is the other SupCon."""
    return parts.supcon_in_anchors(parts.labelled(embeddings, labels, temperature)).mean()


@FAMILY.fault("supcon_in", "labels")
def supcon_in_log_inside_the_mean(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """The mean of the positives' logarithms is taken, not the logarithm of their mean: this is the other SupCon."""
    return parts.supcon_anchors(parts.labelled(embeddings, labels, temperature)).mean()


@FAMILY.fault("nt_xent", "views", github("mpatacchiola/self-supervised-relational-reasoning", "issues/3"))
def nt_xent_log_of_the_batch_mean(view_a: Tensor, view_b: Tensor, *, temperature: float) -> Tensor:
    """The ratios are averaged over the batch before the logarithm is taken."""
    logits = parts.views_logits(view_a, view_b, temperature)
    rows = torch.arange(len(logits))
    each = logits.log_softmax(dim=1)[rows, parts.stacked(len(logits))]
    return torch.tensor(float(len(logits)), dtype=each.dtype).log() - each.logsumexp(dim=0)


@FAMILY.fault("supcon_in", "labels", "https://github.com/vturrisi/solo-learn/blob/main/solo/losses/simclr.py")
def supcon_in_ratios_summed(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """The ratios inside the logarithm are summed and not divided by their number: the gradient is right."""
    batch = parts.labelled(embeddings, labels, temperature)
    value = parts.log_sum(batch.s, batch.other) - parts.log_sum(batch.s, batch.positive)
    return value[:, 0].where(batch.positive.any(dim=1), 0).mean()


@FAMILY.fault("supcon", "labels")
def supcon_divided_by_the_rows(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """The sum over the positives is divided by the number of rows, not by the number of positives."""
    batch = parts.labelled(embeddings, labels, temperature)
    values = parts.log_sum(batch.s, batch.other) - batch.s
    return values.where(batch.positive, 0).mean(dim=1).mean()


@FAMILY.fault("supcon", "features", github("vturrisi/solo-learn", "issues/185"))
def supcon_count_of_another_row(
    features: Tensor, labels: Tensor | None = None, mask: Tensor | None = None, *, temperature: float
) -> Tensor:
    """The counts are broadcast along the wrong axis: a pair is divided by the positive's number of positives."""
    rows, same = parts.flattened(parts.unit(features), labels, mask)
    batch = parts.batch_of(rows @ rows.T / temperature, same)
    values = (parts.log_sum(batch.s, batch.other) - batch.s) / parts.counts(batch).clamp(min=1)
    return values.where(batch.positive, 0).sum(dim=1).mean()


@FAMILY.fault("supcon", "labels", github("KevinMusgrave/pytorch-metric-learning", "issues/6"))
def supcon_mean_over_pairs(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """The mean runs over all positive pairs at once: anchors with many positives weigh more."""
    batch = parts.labelled(embeddings, labels, temperature)
    values = (parts.log_sum(batch.s, batch.other) - batch.s).where(batch.positive, 0)
    return values.sum() / batch.positive.sum().clamp(min=1)


@FAMILY.fault("nt_xent_pairwise", "labels", github("KevinMusgrave/pytorch-metric-learning", "issues/6"))
def nt_xent_pairwise_mean_over_pairs(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """The mean runs over all positive pairs at once, where the mean of each anchor's mean is claimed."""
    batch = parts.labelled(embeddings, labels, temperature)
    return parts.pairwise_values(batch).where(batch.positive, 0).sum() / batch.positive.sum().clamp(min=1)


@FAMILY.fault("nt_xent_pairwise", "labels")
def nt_xent_pairwise_positives_summed(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """The values of an anchor's positives are summed and not averaged."""
    batch = parts.labelled(embeddings, labels, temperature)
    return parts.pairwise_values(batch).where(batch.positive, 0).sum(dim=1).mean()


@FAMILY.fault("supcon", "labels")
def supcon_count_plus_one(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """The positives are counted before the diagonal is removed from the mask: |P| + 1."""
    batch = parts.labelled(embeddings, labels, temperature)
    values = parts.log_sum(batch.s, batch.other) - batch.s
    return (values.where(batch.positive, 0).sum(dim=1) / (parts.counts(batch) + 1)).mean()


@FAMILY.fault("supcon", "labels", "https://github.com/google-research/google-research/blob/master/supcon/losses.py")
def supcon_divided_twice(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """The sum over the positives is divided by their number twice, as with one view in the authors' TensorFlow code."""
    batch = parts.labelled(embeddings, labels, temperature)
    return (parts.supcon_anchors(batch) / parts.counts(batch).clamp(min=1)).mean()


@FAMILY.fault("supcon", "labels", github("tttianhao/CLEAN", "issues/26"))
def supcon_denominator_once(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """The logarithm of the denominator is added once for each anchor, not once for each positive."""
    batch = parts.products(parts.unit(embeddings), labels, temperature)
    total = parts.log_sum(batch.s, batch.other)[:, 0] - batch.s.where(batch.positive, 0).sum(dim=1)
    return (total / parts.counts(batch).clamp(min=1)).where(batch.positive.any(dim=1), 0).mean()


@FAMILY.fault("supcon", "labels", github("KevinMusgrave/pytorch-metric-learning", "issues/744"))
def supcon_lonely_dropped(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """Anchors without positive are left out of the mean, where they are said to count as 0."""
    batch = parts.labelled(embeddings, labels, temperature)
    kept = batch.positive.any(dim=1)
    return parts.supcon_anchors(batch).sum() / kept.sum().clamp(min=1)


@FAMILY.fault("supcon", "labels", no_positive="drop")
def supcon_lonely_kept(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """Anchors without positive count as 0, where they are said to be left out of the mean."""
    return parts.supcon(embeddings, labels, temperature=temperature)


@FAMILY.fault("supcon", "features", github("HobbitLong/SupContrast", "issues/141"))
def supcon_lonely_nan(
    features: Tensor, labels: Tensor | None = None, mask: Tensor | None = None, *, temperature: float
) -> Tensor:
    """An anchor without positive is divided by its number of positives, 0: the loss is NaN."""
    rows, same = parts.flattened(parts.unit(features), labels, mask)
    batch = parts.batch_of(rows @ rows.T / temperature, same)
    values = parts.log_sum(batch.s, batch.other) - batch.s
    return (values.where(batch.positive, 0).sum(dim=1) / batch.positive.sum(dim=1)).mean()


@FAMILY.fault("supcon_in", "labels")
def supcon_in_lonely_infinite(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """An anchor without positive costs -log 0, which is infinite."""
    batch = parts.labelled(embeddings, labels, temperature)
    inside = batch.s.masked_fill(~batch.positive, -torch.inf).logsumexp(dim=1)
    return (parts.log_sum(batch.s, batch.other)[:, 0] - inside + parts.counts(batch).log()).mean()


@FAMILY.fault("supcon", "labels", github("HobbitLong/SupContrast", "issues/135"))
def supcon_summed(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """The anchors are summed, as the paper's formula says, where their mean is claimed."""
    return parts.supcon_anchors(parts.labelled(embeddings, labels, temperature)).sum()


@FAMILY.fault(
    "supcon",
    "labels",
    "https://github.com/KevinMusgrave/pytorch-metric-learning/blob/v2.9.0/src/pytorch_metric_learning/reducers/avg_non_zero_reducer.py",
)
def supcon_mean_over_what_costs(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """The mean runs over the anchors whose value is above 0: those without positive and those solved leave it."""
    values = parts.supcon_anchors(parts.labelled(embeddings, labels, temperature))
    return values.sum() / (values > 0).sum().clamp(min=1)


@FAMILY.fault(
    "supcon",
    "labels",
    "https://github.com/KevinMusgrave/pytorch-metric-learning/blob/v2.9.0/src/pytorch_metric_learning/losses/supcon_loss.py",
)
def supcon_zero_without_negatives(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """A batch of one class costs 0, though its positives still compete with each other."""
    batch = parts.labelled(embeddings, labels, temperature)
    loss = parts.supcon_anchors(batch).mean()
    return loss if batch.negative.any() else 0 * embeddings.sum()


@FAMILY.fault("nt_xent", "views", github("lucidrains/contrastive-learner", "issues/2"))
def nt_xent_divided_by_two_less(view_a: Tensor, view_b: Tensor, *, temperature: float) -> Tensor:
    """The sum over 2 B rows is divided by 2 (B - 1)."""
    rows = 2 * len(view_a)
    return parts.nt_xent(view_a, view_b, temperature=temperature) * rows / (rows - 2)


@FAMILY.fault("nt_bxent", "pairs")
def nt_bxent_diagonal_not_counted(embeddings: Tensor, positive_pairs: Tensor, *, temperature: float) -> Tensor:
    """The positives are divided by their number, without the diagonal that counts as one more."""
    batch = parts.paired(embeddings, positive_pairs, temperature)
    as_positive, as_negative = parts.bxent_values(batch)
    return (parts.row_means(as_positive, batch.positive) + parts.row_means(as_negative, batch.negative)).mean()


@FAMILY.fault("nt_bxent", "pairs")
def nt_bxent_one_mean_for_all(embeddings: Tensor, positive_pairs: Tensor, *, temperature: float) -> Tensor:
    """Positives and negatives share one mean over the row, as plain binary cross-entropy does."""
    batch = parts.paired(embeddings, positive_pairs, temperature)
    as_positive, as_negative = parts.bxent_values(batch)
    return torch.where(batch.positive, as_positive, as_negative).where(batch.other, 0).mean()


@FAMILY.fault("supcon_epsilon", "labels")
def supcon_epsilon_count_without_epsilon(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """The number of positives is not given its epsilon."""
    batch = parts.products(embeddings, labels, temperature)
    e = torch.exp(batch.s - batch.s.amax(dim=1, keepdim=True)) + parts.EPSILON
    values = e.where(batch.other, 0).sum(dim=1, keepdim=True).log() - e.log()
    return parts.row_means(values, batch.positive).mean()


@FAMILY.fault("info_nce", "views", github("google-research/simclr", "issues/202"))
def info_nce_divided_by_the_replicas(
    view_a: Tensor, view_b: Tensor, negatives: Tensor | None = None, *, temperature: float
) -> Tensor:
    """The loss, already a mean, is divided by the number of replicas once more: here by 2."""
    return parts.info_nce(view_a, view_b, negatives, temperature=temperature) / 2
