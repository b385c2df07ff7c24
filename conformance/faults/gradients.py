"""Values that are right, mostly, and gradients that are not."""

from __future__ import annotations

import torch
from torch import Tensor

from . import parts
from .base import fault, github


def value_and_gradient(value: Tensor, gradient: Tensor) -> Tensor:
    """A number that has the value of one and the gradient of another."""
    return value.detach() + (gradient - gradient.detach())


@fault("supcon_epsilon", "fixtures/worked/batch_tutorial.json", of=parts.products)
def supcon_epsilon_maximum_detached(batch: parts.Batch) -> Tensor:
    """The maximum that is subtracted is detached, though the loss depends on it through the epsilon."""
    e = torch.exp(batch.s - batch.s.amax(dim=1, keepdim=True).detach()) + parts.EPSILON
    return parts.epsilon_anchors(batch, e)


@fault("supcon", github("KevinMusgrave/pytorch-metric-learning", "issues/282"), of=parts.cosines)
def supcon_maximum_in_one_gradient(batch: parts.Batch) -> Tensor:
    """The maximum is detached in the denominator and not in the numerator, where it does not cancel any more."""
    top = batch.s.masked_fill(~batch.other, torch.finfo(batch.s.dtype).min).amax(dim=1, keepdim=True)
    values = parts.log_sum(batch.s - top.detach(), batch.other) - (batch.s - top)
    return parts.row_means(values, batch.positive)


@fault("info_nce", github("facebookresearch/SLIP", "issues/31"))
def info_nce_one_tower_detached(
    view_a: Tensor, view_b: Tensor, negatives: Tensor | None = None, *, temperature: float
) -> parts.Made:
    """No gradient reaches the second tower, as after a gather that does not differentiate."""
    return list(parts.ways(view_a, view_b.detach(), negatives, temperature=temperature))


@fault("info_nce", github("jcy132/Hneg_SRC", "issues/6"), of=parts.ways)
def info_nce_gradient_of_negatives_alone(way: parts.Way) -> Tensor:
    """The value is right; the gradient is that of a denominator without the positive."""
    rows = way.rows
    alone = rows.negatives - rows.logits[rows.positive]
    return value_and_gradient(parts.loss_of("info_nce", rows), alone.mean())


@fault("supcon", of=parts.labelled)
def supcon_denominator_detached(batch: parts.Batch) -> Tensor:
    """The denominator is detached: positives are pulled, and nothing is pushed away."""
    return parts.row_means(parts.log_sum(batch.s, batch.other).detach() - batch.s, batch.positive)


@fault("supcon_in", of=parts.labelled)
def supcon_in_gradient_of_the_other(batch: parts.Batch) -> Tensor:
    """The value is right; the gradient is that of the mean taken outside the logarithm."""
    return value_and_gradient(parts.loss_of("supcon_in", batch), parts.loss_of("supcon", batch))


@fault("nt_xent", github("mlfoundations/open_clip", "issues/616"), of=parts.views)
def nt_xent_gradient_times_the_ranks(rows: parts.Rows) -> Tensor:
    """The gradient is multiplied by the number of ranks: here by 2."""
    loss = parts.loss_of("nt_xent", rows)
    return value_and_gradient(loss, 2 * loss)


@fault("nt_xent_pairwise", github("JohnGiorgi/DeCLUTR", "pull/212"), of=parts.labelled)
def nt_xent_pairwise_gradient_over_the_ranks(batch: parts.Batch) -> Tensor:
    """The gradient is divided by the number of ranks: here by 2."""
    loss = parts.loss_of("nt_xent_pairwise", batch)
    return value_and_gradient(loss, loss / 2)


@fault("nt_xent_pairwise")
def nt_xent_pairwise_cosine_kept_inside(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """Cosines are clamped to 1e-6 inside [-1, 1]: rows that nearly coincide are not told apart and pull no more."""
    cosines = parts.cosines(embeddings, labels, 1.0)
    batch = parts.batch_of(cosines.s.clamp(-1 + 1e-6, 1 - 1e-6) / temperature, cosines.positive)
    return parts.row_means(batch.pairwise, batch.positive)


@fault("nt_xent", of=parts.given)
def nt_xent_straight_through(given: parts.Features) -> parts.Rows:
    """Logits are clamped to [-50, 50] and the gradient goes straight through the clamp."""
    logits = given.views.logits.where(parts.others(len(given.rows)), 0)
    return parts.among_views(value_and_gradient(logits.clamp(-50, 50), logits))


@fault("nt_bxent", github("FrozenBurning/Text2Light", "issues/10"), of=parts.paired)
def nt_bxent_no_gradient(batch: parts.Batch) -> parts.Batch:
    """The loss is computed where no gradient is recorded: it goes down in no training."""
    return batch._replace(s=batch.s.detach())


@fault("supcon", github("HobbitLong/SupContrast", "issues/26"), of=parts.given)
def supcon_contrast_detached(given: parts.Features) -> parts.Batch:
    """The rows that anchors are contrasted with carry no gradient, as after a gather that does not differentiate."""
    rows = parts.unit(given.rows)
    return parts.batch_of(rows @ rows.T.detach() / given.temperature, given.same)
