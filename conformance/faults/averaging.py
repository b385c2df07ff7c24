"""Wrong sums, means and counts, and logarithms taken at the wrong place."""

from __future__ import annotations

import torch
from torch import Tensor

from . import parts
from .base import fault, github, pml


@fault("supcon", build=parts.labelled)
def supcon_log_outside_the_mean(batch: parts.Batch) -> Tensor:
    """The loss is the logarithm of a mean over positives, not the mean of logarithms: this is supcon_in."""
    return parts.anchors("supcon_in", batch)


@fault("supcon_in", build=parts.labelled)
def supcon_in_log_inside_the_mean(batch: parts.Batch) -> Tensor:
    """The loss is a mean of logarithms over positives, not the logarithm of their mean: this is supcon."""
    return parts.anchors("supcon", batch)


@fault("nt_xent", github("mpatacchiola/self-supervised-relational-reasoning", "issues/3"), build=parts.views)
def nt_xent_log_of_the_batch_mean(rows: parts.Rows) -> Tensor:
    """The ratios are averaged over the batch before the logarithm is taken."""
    each = rows.logits.log_softmax(dim=1)[rows.positive]
    return torch.tensor(float(len(each)), dtype=each.dtype).log() - each.logsumexp(dim=0)


@fault("supcon_in", github("vturrisi/solo-learn", "blob/main/solo/losses/simclr.py"), build=parts.labelled)
def supcon_in_ratios_summed(batch: parts.Batch) -> Tensor:
    """The ratios inside the logarithm are summed instead of averaged: the gradient is right, the value is wrong."""
    value = parts.log_sum(batch.s, batch.other) - parts.log_sum(batch.s, batch.positive)
    return value[:, 0].where(batch.counts > 0, 0)


@fault("supcon_in", inside_reduction="sum", build=parts.labelled)
def supcon_in_ratios_averaged(batch: parts.Batch) -> parts.Batch:
    """The ratios inside the logarithm are averaged, although inside_reduction is "sum"."""
    return batch


@fault(
    "supcon_in",
    github("vturrisi/solo-learn", "blob/main/solo/losses/simclr.py"),
    inside_reduction="sum",
    build=parts.labelled,
    level="policies",
)
def supcon_in_summed_without_positives_infinite(batch: parts.Batch) -> Tensor:
    """The ratios are summed, and an anchor without positives has the loss -log 0, which is infinite."""
    inside = batch.s.masked_fill(~batch.positive, -torch.inf).logsumexp(dim=1)
    return parts.log_sum(batch.s, batch.other)[:, 0] - inside


@fault("supcon", build=parts.labelled)
def supcon_divided_by_the_rows(batch: parts.Batch) -> Tensor:
    """The sum over the positives is divided by the number of rows, not by the number of positives."""
    return batch.values.where(batch.positive, 0).mean(dim=1)


@fault("supcon", github("vturrisi/solo-learn", "issues/185"), build=parts.features)
def supcon_count_of_another_row(given: parts.Features) -> Tensor:
    """The counts are broadcast along the wrong axis: the term of a pair (i, p) is divided by |P(p)|, not |P(i)|."""
    batch = given.cosines
    return parts.row_sums(batch.values / batch.counts.clamp(min=1), batch.positive)


@fault("supcon", github("KevinMusgrave/pytorch-metric-learning", "issues/6"), build=parts.labelled)
def supcon_mean_over_pairs(batch: parts.Batch) -> Tensor:
    """The mean runs over all positive pairs at once: anchors with many positives weigh more."""
    return batch.values.where(batch.positive, 0).sum() / batch.positive.sum().clamp(min=1)


@fault("nt_xent_pairwise", github("KevinMusgrave/pytorch-metric-learning", "issues/6"), build=parts.labelled)
def nt_xent_pairwise_mean_over_pairs(batch: parts.Batch) -> Tensor:
    """The mean runs over all positive pairs at once, not over the means of the anchors."""
    return batch.pairwise.where(batch.positive, 0).sum() / batch.positive.sum().clamp(min=1)


@fault("nt_xent_pairwise", build=parts.labelled, reduction="sum_pairs")
def nt_xent_pairwise_sum_pairs_over_anchors(batch: parts.Batch) -> Tensor:
    """sum_pairs sums the means of the anchors instead of the values of the pairs."""
    return parts.anchors("nt_xent_pairwise", batch).sum()


@fault("nt_xent_pairwise", build=parts.labelled, reduction="sum_pairs")
def nt_xent_pairwise_sum_pairs_once_for_both_orders(batch: parts.Batch) -> Tensor:
    """sum_pairs counts the pairs (i, j) and (j, i) as one."""
    return batch.pairwise.where(batch.positive.triu(), 0).sum()


@fault("nt_xent_pairwise", build=parts.labelled, reduction="none_pairs")
def nt_xent_pairwise_none_pairs_by_columns(batch: parts.Batch) -> parts.Each:
    """none_pairs is ordered by column, then by anchor."""
    return parts.Each(batch.pairwise.T[batch.positive.T])


@fault("nt_xent_pairwise", build=parts.labelled, reduction="none_pairs")
def nt_xent_pairwise_none_pairs_divided(batch: parts.Batch) -> parts.Each:
    """none_pairs divides the value of each pair by |P(i)|, the number of positives of its anchor."""
    return parts.Each((batch.pairwise / batch.counts[:, None].clamp(min=1))[batch.positive])


@fault("nt_xent_pairwise", build=parts.labelled)
def nt_xent_pairwise_positives_summed(batch: parts.Batch) -> Tensor:
    """The values of an anchor's positives are summed instead of averaged."""
    return parts.row_sums(batch.pairwise, batch.positive)


@fault("supcon", build=parts.labelled)
def supcon_count_plus_one(batch: parts.Batch) -> Tensor:
    """The positives are counted before the diagonal is removed from the mask: |P| + 1."""
    return parts.row_sums(batch.values, batch.positive) / (batch.counts + 1)


@fault("supcon", github("google-research/google-research", "blob/master/supcon/losses.py"), build=parts.labelled)
def supcon_divided_twice(batch: parts.Batch) -> Tensor:
    """The sum over positives is divided by the square of their number, as in the authors' code for one view."""
    return parts.anchors("supcon", batch) / batch.counts.clamp(min=1)


@fault("supcon", github("tttianhao/CLEAN", "issues/26"), build=parts.cosines)
def supcon_denominator_once(batch: parts.Batch) -> Tensor:
    """The logarithm of the denominator is added once for each anchor, not once for each positive."""
    total = parts.log_sum(batch.s, batch.other)[:, 0] - parts.row_sums(batch.s, batch.positive)
    return (total / batch.counts.clamp(min=1)).where(batch.counts > 0, 0)


@fault("supcon", github("KevinMusgrave/pytorch-metric-learning", "issues/744"), build=parts.labelled, level="policies")
def supcon_without_positives_dropped(batch: parts.Batch) -> Tensor:
    """Anchors without positives are left out of the mean, although no_positive is "zero"."""
    return parts.anchors("supcon", batch).sum() / (batch.counts > 0).sum().clamp(min=1)


@fault("supcon", no_positive="drop", build=parts.labelled, level="policies")
def supcon_without_positives_kept(batch: parts.Batch) -> parts.Batch:
    """Anchors without positives count as 0 in the mean, although no_positive is "drop"."""
    return batch


@fault("supcon", github("HobbitLong/SupContrast", "issues/141"), build=parts.features, level="policies")
def supcon_without_positives_nan(given: parts.Features) -> Tensor:
    """The term of an anchor without positives is 0 / 0, so the loss is NaN."""
    batch = given.cosines
    return parts.row_sums(batch.values, batch.positive) / batch.positive.sum(dim=1)


@fault("supcon_in", build=parts.labelled, level="policies")
def supcon_in_without_positives_nan(batch: parts.Batch) -> Tensor:
    """An anchor without positives has the loss -log(0 / 0), which is NaN."""
    inside = batch.s.masked_fill(~batch.positive, -torch.inf).logsumexp(dim=1)
    return parts.log_sum(batch.s, batch.other)[:, 0] - inside + batch.counts.log()


@fault("supcon", github("HobbitLong/SupContrast", "issues/135"), build=parts.labelled)
def supcon_summed(batch: parts.Batch) -> Tensor:
    """The anchors' values are summed, as in the paper's formula, although the reduction is the mean."""
    return parts.anchors("supcon", batch).sum()


@fault("supcon", pml("reducers/avg_non_zero_reducer.py"), build=parts.labelled)
def supcon_mean_over_nonzero(batch: parts.Batch) -> Tensor:
    """The mean is taken only over anchors with a value above 0."""
    values = parts.anchors("supcon", batch)
    return values.sum() / (values > 0).sum().clamp(min=1)


@fault("supcon", pml("losses/supcon_loss.py"), build=parts.labelled, level="policies")
def supcon_zero_without_negatives(batch: parts.Batch) -> Tensor:
    """A batch of one class has the loss 0, although its positives still compete with each other."""
    return parts.anchors("supcon", batch) if batch.negative.any() else 0 * batch.s


@fault("nt_xent", github("lucidrains/contrastive-learner", "issues/2"), build=parts.views)
def nt_xent_divided_by_two_less(rows: parts.Rows) -> Tensor:
    """The sum over 2 B rows is divided by 2 (B - 1)."""
    return parts.loss_of("nt_xent", rows) * len(rows.logits) / (len(rows.logits) - 2)


@fault("nt_bxent", build=parts.paired)
def nt_bxent_diagonal_not_counted(batch: parts.Batch) -> Tensor:
    """The sum over positives is divided by their number, without adding 1 for the diagonal."""
    as_positive, as_negative = batch.costs
    return parts.row_means(as_positive, batch.positive) + parts.row_means(as_negative, batch.negative)


@fault("nt_bxent", build=parts.paired)
def nt_bxent_one_mean_for_all(batch: parts.Batch) -> Tensor:
    """Positives and negatives share one mean over the row, as in plain binary cross-entropy."""
    return torch.where(batch.positive, *batch.costs).where(batch.other, 0)


@fault("supcon_epsilon", build=parts.products)
def supcon_epsilon_count_without_epsilon(batch: parts.Batch) -> Tensor:
    """No epsilon is added to the number of positives."""
    e = parts.exponentials(batch)
    return parts.row_means(parts.row_sums(e, batch.other)[:, None].log() - e.log(), batch.positive)


@fault("info_nce", github("google-research/simclr", "issues/202"), build=parts.directions)
def info_nce_divided_by_the_replicas(direction: parts.Direction) -> Tensor:
    """The loss, which is already a mean, is divided again by the number of replicas, here 2."""
    return parts.loss_of("info_nce", direction) / 2


@fault("sigmoid", github("google-research/big_vision", "issues/115"), build=parts.across)
def sigmoid_divided_by_the_cube(batch: parts.Batch) -> Tensor:
    """The sum over all pairs of N anchors is divided by N^3 instead of N."""
    return parts.anchors("sigmoid", batch).sum() / len(batch.s) ** 3


@fault("hard_negative", build=parts.hard)
def hard_negative_hidden_positives_not_counted(given: parts.Hard) -> Tensor:
    """tau_plus times the positive's exponential is subtracted from the sum once, not once for each negative."""
    return given.against(given.log_mean, hidden=given.tau_plus / max(given.number, 1))


@fault("hard_negative", build=parts.hard)
def hard_negative_number_includes_the_positive(given: parts.Hard) -> Tensor:
    """The number of negatives includes the positive: it is 2B - 1 instead of 2B - 2."""
    return given.against(given.log_mean, number=given.number + 1)


@fault(
    "dclw",
    github("raminnakhli/Decoupled-Contrastive-Learning", "blob/50991ef39009ce9397824eb3ecd74a05f009ff38/loss/dcl.py"),
    build=parts.decoupled,
)
def dclw_softmax_not_multiplied(given: parts.Decoupled) -> Tensor:
    """The softmax in the weights is not multiplied by the number of items: the mean weight is near 2 instead of 1."""
    return given.against(given.held(2 - 2 * given.closeness.softmax(dim=0)))


@fault("dclw", build=parts.decoupled)
def dclw_softmax_over_columns(given: parts.Decoupled) -> Tensor:
    """The softmax in the weights runs over the similarities of each row, not over the positives of the batch."""
    s = given.rows.logits * given.temperature / given.sigma
    columns = parts.log_sum(s, parts.off_diagonal(len(s)))[:, 0]
    return given.against(given.held(2 - len(s) / 2 * (given.closeness - columns).exp()))


@fault("dclw", github("lightly-ai/lightly", "pull/1827"), build=parts.decoupled)
def dclw_negative_weights_clamped(given: parts.Decoupled) -> Tensor:
    """Weights below 0 are raised to 0, as first proposed for lightly: their mean is no longer 1."""
    return given.against(given.weights.clamp(min=0))


@fault("supcon", github("lightly-ai/lightly", "pull/1827"), build=parts.features, denominator="only_negatives")
def supcon_negatives_of_each_view_apart(given: parts.Features) -> Tensor:
    """The negatives are summed per view, and the logarithms of these sums are added: the loss is too large."""
    rows, same = parts.unit(given.rows), given.same
    s, other = rows @ rows.T / given.temperature, parts.off_diagonal(len(rows))
    view, negative = torch.arange(len(rows)) // len(given.features), other & ~same
    below = torch.stack([parts.log_sum(s, negative & (view == v)) for v in range(given.features.shape[1])]).sum(dim=0)
    return parts.row_means(below - s, same & other).where(negative.any(dim=1), 0)
