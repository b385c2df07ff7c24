"""Wrong gradients, in most cases with the right value."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import parts
from .base import fault, github


def value_and_gradient(value: Tensor, gradient: Tensor) -> Tensor:
    """A tensor with the value of the first argument and the gradient of the second."""
    return value.detach() + (gradient - gradient.detach())


@fault("supcon_epsilon", "fixtures/worked/batch_tutorial.json", build=parts.products)
def supcon_epsilon_maximum_detached(batch: parts.Batch) -> Tensor:
    """The subtracted maximum is detached, although the loss depends on it through the epsilon."""
    e = torch.exp(batch.s - batch.s.amax(dim=1, keepdim=True).detach()) + parts.EPSILON
    return parts.epsilon_anchors(batch, e)


@fault("supcon", github("KevinMusgrave/pytorch-metric-learning", "issues/282"), build=parts.cosines)
def supcon_maximum_in_one_gradient(batch: parts.Batch) -> Tensor:
    """The maximum is detached in the denominator but not in the numerator, so its gradient does not cancel."""
    top = batch.s.masked_fill(~batch.other, torch.finfo(batch.s.dtype).min).amax(dim=1, keepdim=True)
    values = parts.log_sum(batch.s - top.detach(), batch.other) - (batch.s - top)
    return parts.row_means(values, batch.positive)


@fault("info_nce", github("facebookresearch/SLIP", "issues/31"))
def info_nce_one_tower_detached(
    view_a: Tensor, view_b: Tensor, negatives: Tensor | None = None, *, temperature: float
) -> parts.Evaluable:
    """No gradient reaches the second tower, as after a gather that is not differentiable."""
    return parts.directions(view_a, view_b.detach(), negatives, temperature=temperature)


@fault("info_nce", github("jcy132/Hneg_SRC", "issues/6"), build=parts.directions)
def info_nce_gradient_of_negatives_only(direction: parts.Direction) -> Tensor:
    """The value is right; the gradient is that of the loss whose denominator lacks the positive."""
    rows = direction.rows
    wrong = rows.negatives - rows.logits[rows.positive]
    return value_and_gradient(parts.loss_of("info_nce", rows), wrong.mean())


@fault("supcon", build=parts.labelled)
def supcon_denominator_detached(batch: parts.Batch) -> Tensor:
    """The denominator is detached: positives attract, but nothing repels."""
    return parts.row_means(parts.log_sum(batch.s, batch.other).detach() - batch.s, batch.positive)


@fault("supcon_in", build=parts.labelled)
def supcon_in_gradient_of_supcon(batch: parts.Batch) -> Tensor:
    """The value is right; the gradient is that of supcon, whose mean is outside the logarithm."""
    return value_and_gradient(parts.loss_of("supcon_in", batch), parts.loss_of("supcon", batch))


@fault("nt_xent", github("mlfoundations/open_clip", "issues/616"), build=parts.views)
def nt_xent_gradient_times_the_ranks(rows: parts.Rows) -> Tensor:
    """The gradient is multiplied by the number of ranks, here 2."""
    loss = parts.loss_of("nt_xent", rows)
    return value_and_gradient(loss, 2 * loss)


@fault("nt_xent_pairwise", github("JohnGiorgi/DeCLUTR", "pull/212"), build=parts.labelled)
def nt_xent_pairwise_gradient_over_the_ranks(batch: parts.Batch) -> Tensor:
    """The gradient is divided by the number of ranks, here 2."""
    loss = parts.loss_of("nt_xent_pairwise", batch)
    return value_and_gradient(loss, loss / 2)


@fault("nt_xent_pairwise")
def nt_xent_pairwise_cosine_clamped(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """Cosines are clamped to [-1 + 1e-6, 1 - 1e-6]: pairs of nearly parallel or opposite rows add no gradient."""
    cosines = parts.cosines(embeddings, labels, 1.0)
    batch = parts.batch_of(cosines.s.clamp(-1 + 1e-6, 1 - 1e-6) / temperature, cosines.positive)
    return parts.row_means(batch.pairwise, batch.positive)


@fault(
    "nt_xent",
    build=parts.features,
    level="range",
    right_at=(0.02, math.inf),
    because="The size of a logit is at most 1/T, and so at most 50.",
)
def nt_xent_straight_through(given: parts.Features) -> parts.Rows:
    """Logits are clamped to [-50, 50], and the gradient ignores the clamp (straight-through)."""
    logits = given.views.logits.where(parts.off_diagonal(len(given.rows)), 0)
    return parts.among_views(value_and_gradient(logits.clamp(-50, 50), logits))


@fault("nt_bxent", github("FrozenBurning/Text2Light", "issues/10"), build=parts.paired)
def nt_bxent_no_gradient(batch: parts.Batch) -> parts.Batch:
    """The loss is computed without recording gradients, so that training has no effect."""
    return batch._replace(s=batch.s.detach())


@fault("supcon", github("HobbitLong/SupContrast", "issues/26"), build=parts.features)
def supcon_contrast_detached(given: parts.Features) -> parts.Batch:
    """The rows that anchors are contrasted with are detached, as after a gather that is not differentiable."""
    rows = parts.unit(given.rows)
    return parts.batch_of(rows @ rows.T.detach() / given.temperature, given.same)


@fault("hard_negative", build=parts.hard)
def hard_negative_weights_detached(given: parts.Hard) -> Tensor:
    """The value is right, but the weights of the negatives are detached: part of the gradient is missing."""
    s = given.rows.logits
    still = given.beta * s.detach()
    return given.against(given.log_sum(s + still) - given.log_sum(still))


@fault(
    "dclw",
    github("raminnakhli/Decoupled-Contrastive-Learning", "blob/0b9b76db81c465a6489598553facab7686927b13/loss/dcl.py"),
    build=parts.decoupled,
)
def dclw_weights_differentiated(given: parts.Decoupled) -> Tensor:
    """The value is right, but weights that should be constants are differentiated."""
    return given.against(given._replace(detach=False).weights)


@fault("dclw", github("lightly-ai/lightly", "blob/v1.6.0/lightly/loss/dcl_loss.py"), build=parts.decoupled)
def dclw_weights_detached(given: parts.Decoupled) -> Tensor:
    """The value is right, but weights that should be differentiated are constants."""
    return given.against(given._replace(detach=True).weights)


@fault("multiple_negatives_ranking", build=parts.ranking)
def multiple_negatives_ranking_gradient_through_the_hardness(given: parts.Ranking) -> parts.Ranking:
    """The weights of the negatives are not detached: a gradient flows through them too."""
    return given.again(flows=True)
