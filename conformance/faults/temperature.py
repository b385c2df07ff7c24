"""The temperature: left out, put in twice, turned over, or scaling what it should not."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from . import parts
from .base import Family, github

FAMILY = Family("temperature")


@FAMILY.fault("info_nce", github("RElbers/info-nce-pytorch", "pull/17"))
def info_nce_positive_without_temperature(
    view_a: Tensor, view_b: Tensor, negatives: Tensor | None = None, *, temperature: float
) -> Tensor:
    """The positive's logit is not divided by the temperature; the negatives' are."""

    def one_way(anchors: Tensor, keys: Tensor) -> Tensor:
        if negatives is not None:
            logits = parts.queue_logits(anchors, keys, negatives, temperature)
            return parts.first_is_right(torch.cat([logits[:, :1] * temperature, logits[:, 1:]], dim=1))
        logits = parts.tower_logits(anchors, keys, temperature)
        return parts.diagonal_is_right(logits.where(parts.others(len(logits)), logits * temperature))

    return (one_way(view_a, view_b) + one_way(view_b, view_a)) / 2


@FAMILY.fault("info_nce", github("ustcllm/RecStudio", "issues/21"))
def info_nce_temperature_missing(
    view_a: Tensor, view_b: Tensor, negatives: Tensor | None = None, *, temperature: float
) -> Tensor:
    """Nothing is divided by the temperature."""
    return parts.info_nce(view_a, view_b, negatives, temperature=1.0)


@FAMILY.fault("nt_xent")
def nt_xent_temperature_twice(view_a: Tensor, view_b: Tensor, *, temperature: float) -> Tensor:
    """The rows are divided by the temperature before they are multiplied: it is applied squared."""
    rows = parts.unit(torch.cat([view_a, view_b])) / temperature
    logits = (rows @ rows.T).masked_fill(~parts.others(len(rows)), -torch.inf)
    return F.cross_entropy(logits, parts.stacked(len(rows)))


@FAMILY.fault("info_nce", github("bowang-lab/BLEEP", "issues/5"))
def info_nce_temperature_multiplies(
    view_a: Tensor, view_b: Tensor, negatives: Tensor | None = None, *, temperature: float
) -> Tensor:
    """Cosines are multiplied by the temperature where they should be divided, as the targets of BLEEP were."""
    return parts.info_nce(view_a, view_b, negatives, temperature=1 / temperature)


@FAMILY.fault("supcon", github("HobbitLong/SupContrast", "issues/73"))
def supcon_base_temperature_fixed(
    features: Tensor, labels: Tensor | None = None, mask: Tensor | None = None, *, temperature: float
) -> Tensor:
    """The loss is scaled by temperature / 0.07, though no base temperature was asked for."""
    return parts.supcon_features(features, labels, mask, temperature=temperature) * temperature / 0.07


@FAMILY.fault("supcon", github("HobbitLong/SupContrast", "issues/1"))
def supcon_base_temperature_inverted(
    embeddings: Tensor, labels: Tensor, *, temperature: float, base_temperature: float | None = None
) -> Tensor:
    """The loss is scaled by base temperature / temperature, not by temperature / base temperature."""
    scale = 1.0 if base_temperature is None else base_temperature / temperature
    return parts.supcon(embeddings, labels, temperature=temperature) * scale


@FAMILY.fault("supcon")
def supcon_base_temperature_ignored(
    embeddings: Tensor, labels: Tensor, *, temperature: float, base_temperature: float | None = None
) -> Tensor:
    """A base temperature is taken and not used."""
    return parts.supcon(embeddings, labels, temperature=temperature)


@FAMILY.fault("supcon_in", "https://github.com/google-research/google-research/blob/master/supcon/losses.py")
def supcon_in_scaled_by_temperature(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """The loss is multiplied by the temperature, as the authors' TensorFlow code does unless told not to."""
    return parts.supcon_in(embeddings, labels, temperature=temperature) * temperature


@FAMILY.fault("nt_xent_pairwise")
def nt_xent_pairwise_temperature_on_the_loss(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """The temperature divides the loss, not the similarities."""
    return parts.nt_xent_pairwise(embeddings, labels, temperature=1.0) / temperature


@FAMILY.fault("info_nce", github("BAAI-DCAI/M3D", "issues/52"))
def info_nce_logit_scale_raw(
    view_a: Tensor, view_b: Tensor, negatives: Tensor | None = None, *, temperature: float
) -> Tensor:
    """The scale is learned as a logarithm and used without its exponential: log(1 / temperature) multiplies."""
    scale = math.log(1 / temperature)
    left, right = parts.unit(view_a) * scale, parts.unit(view_b)
    if negatives is None:
        return (parts.diagonal_is_right(left @ right.T) + parts.diagonal_is_right(right @ left.T)) / 2
    there = parts.queue_logits(view_a, view_b, negatives, 1.0)
    back = parts.queue_logits(view_b, view_a, negatives, 1.0)
    return (parts.first_is_right(there * scale) + parts.first_is_right(back * scale)) / 2


@FAMILY.fault("info_nce", github("openai/CLIP", "issues/46"))
def info_nce_logit_scale_capped(
    view_a: Tensor, view_b: Tensor, negatives: Tensor | None = None, *, temperature: float
) -> Tensor:
    """The scale is capped at 100, in silence: no temperature below 0.01 is used."""
    return parts.info_nce(view_a, view_b, negatives, temperature=max(temperature, 0.01))


@FAMILY.fault("info_nce", github("drboog/Lafite", "issues/25"))
def info_nce_temperature_inside_the_logarithm(
    view_a: Tensor, view_b: Tensor, negatives: Tensor | None = None, *, temperature: float
) -> Tensor:
    """The ratio is multiplied by the temperature inside the logarithm: a constant too much, the gradient right."""
    return parts.info_nce(view_a, view_b, negatives, temperature=temperature) - math.log(temperature)


@FAMILY.fault("nt_bxent", "fixtures/worked/pair_notebook.json")
def nt_bxent_one_minus_cosine(embeddings: Tensor, positive_pairs: Tensor, *, temperature: float) -> Tensor:
    """A negative costs -log sigmoid((1 - s) / temperature), as the notebook's formula has it and its code does not."""
    batch = parts.paired(embeddings, positive_pairs, temperature)
    as_positive, _ = parts.bxent_values(batch)
    as_negative = -F.logsigmoid(1 / temperature - batch.s)
    attracted = as_positive.where(batch.positive, 0).sum(dim=1) / (batch.counts + 1)
    return (attracted + parts.row_means(as_negative, batch.negative)).mean()


@FAMILY.fault("supcon_epsilon")
def supcon_epsilon_temperature_missing(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """Nothing is divided by the temperature."""
    return parts.supcon_epsilon(embeddings, labels, temperature=1.0)
