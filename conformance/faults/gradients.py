"""Values that are right, mostly, and gradients that are not."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import parts
from .base import Family, github

FAMILY = Family("gradients")


def value_and_gradient(value: Tensor, gradient: Tensor) -> Tensor:
    """A number that has the value of one and the gradient of another."""
    return value.detach() + (gradient - gradient.detach())


@FAMILY.fault("supcon_epsilon", "fixtures/worked/batch_tutorial.json", of=parts.products)
def supcon_epsilon_maximum_detached(batch: parts.Batch) -> Tensor:
    """The maximum that is subtracted is detached, though the loss depends on it through the epsilon."""
    e = torch.exp(batch.s - batch.s.amax(dim=1, keepdim=True).detach()) + parts.EPSILON
    return parts.epsilon_anchors(batch, e)


@FAMILY.fault("supcon", github("KevinMusgrave/pytorch-metric-learning", "issues/282"), of=parts.cosines)
def supcon_maximum_in_one_gradient(batch: parts.Batch) -> Tensor:
    """The maximum is detached in the denominator and not in the numerator, where it does not cancel any more."""
    top = batch.s.masked_fill(~batch.other, torch.finfo(batch.s.dtype).min).amax(dim=1, keepdim=True)
    values = parts.log_sum(batch.s - top.detach(), batch.other) - (batch.s - top)
    return parts.row_means(values, batch.positive)


@FAMILY.fault("info_nce", github("facebookresearch/SLIP", "issues/31"))
def info_nce_one_tower_detached(
    view_a: Tensor, view_b: Tensor, negatives: Tensor | None = None, *, temperature: float
) -> Tensor:
    """No gradient reaches the second tower, as after a gather that does not differentiate."""
    return parts.info_nce(view_a, view_b.detach(), negatives, temperature=temperature)


@FAMILY.fault("info_nce", github("jcy132/Hneg_SRC", "issues/6"))
def info_nce_gradient_of_negatives_alone(
    view_a: Tensor, view_b: Tensor, negatives: Tensor | None = None, *, temperature: float
) -> Tensor:
    """The value is right; the gradient is that of a denominator without the positive."""
    right = parts.info_nce(view_a, view_b, negatives, temperature=temperature)

    def one_way(anchors: Tensor, keys: Tensor) -> Tensor:
        if negatives is not None:
            logits = parts.queue_logits(anchors, keys, negatives, temperature)
            return (logits[:, 1:].logsumexp(dim=1) - logits[:, 0]).mean()
        logits = parts.tower_logits(anchors, keys, temperature)
        return (parts.log_sum(logits, parts.others(len(logits)))[:, 0] - logits.diagonal()).mean()

    return value_and_gradient(right, (one_way(view_a, view_b) + one_way(view_b, view_a)) / 2)


@FAMILY.fault("supcon", of=parts.labelled)
def supcon_denominator_detached(batch: parts.Batch) -> Tensor:
    """The denominator is detached: positives are pulled, and nothing is pushed away."""
    return parts.row_means(parts.log_sum(batch.s, batch.other).detach() - batch.s, batch.positive)


@FAMILY.fault("supcon_in", of=parts.labelled)
def supcon_in_gradient_of_the_other(batch: parts.Batch) -> Tensor:
    """The value is right; the gradient is that of the mean taken outside the logarithm."""
    return value_and_gradient(parts.anchors("supcon_in", batch).mean(), parts.anchors("supcon", batch).mean())


@FAMILY.fault("nt_xent", github("mlfoundations/open_clip", "issues/616"))
def nt_xent_gradient_times_the_ranks(view_a: Tensor, view_b: Tensor, *, temperature: float) -> Tensor:
    """The gradient is multiplied by the number of ranks: here by 2."""
    loss = parts.nt_xent(view_a, view_b, temperature=temperature)
    return value_and_gradient(loss, 2 * loss)


@FAMILY.fault("nt_xent_pairwise", github("JohnGiorgi/DeCLUTR", "pull/212"))
def nt_xent_pairwise_gradient_over_the_ranks(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """The gradient is divided by the number of ranks: here by 2."""
    loss = parts.nt_xent_pairwise(embeddings, labels, temperature=temperature)
    return value_and_gradient(loss, loss / 2)


@FAMILY.fault("nt_xent_pairwise")
def nt_xent_pairwise_cosine_kept_inside(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """Cosines are clamped to 1e-6 inside [-1, 1]: rows that nearly coincide are not told apart and pull no more."""
    rows = parts.unit(embeddings)
    cosines = (rows @ rows.T).clamp(-1 + 1e-6, 1 - 1e-6)
    batch = parts.batch_of(cosines / temperature, labels[:, None] == labels)
    return parts.row_means(parts.pairwise_values(batch), batch.positive).mean()


@FAMILY.fault("nt_xent", of=parts.feature_logits)
def nt_xent_straight_through(logits: Tensor) -> Tensor:
    """Logits are clamped to [-50, 50] and the gradient goes straight through the clamp."""
    kept = parts.others(len(logits))
    clamped = value_and_gradient(logits.where(kept, 0).clamp(-50, 50), logits.where(kept, 0))
    return F.cross_entropy(clamped.masked_fill(~kept, -torch.inf), parts.stacked(len(logits)))


@FAMILY.fault("nt_bxent", github("FrozenBurning/Text2Light", "issues/10"))
def nt_bxent_no_gradient(embeddings: Tensor, positive_pairs: Tensor, *, temperature: float) -> Tensor:
    """The loss is computed where no gradient is recorded: it goes down in no training."""
    with torch.no_grad():
        return parts.nt_bxent(embeddings, positive_pairs, temperature=temperature)


@FAMILY.fault("supcon", github("HobbitLong/SupContrast", "issues/26"))
def supcon_contrast_detached(
    features: Tensor, labels: Tensor | None = None, mask: Tensor | None = None, *, temperature: float
) -> Tensor:
    """The rows that anchors are contrasted with carry no gradient, as after a gather that does not differentiate."""
    rows, same = parts.flattened(parts.unit(features), labels, mask)
    return parts.anchors("supcon", parts.batch_of(rows @ rows.T.detach() / temperature, same)).mean()
