"""Temperatures that are missing, applied twice, inverted, or applied to the wrong quantity."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from . import parts
from .base import RIGHT_AT_1, fault, github


@fault("info_nce", github("RElbers/info-nce-pytorch", "pull/17"), build=parts.directions, **RIGHT_AT_1)
def info_nce_positive_without_temperature(direction: parts.Direction) -> parts.Rows:
    """The positive's logit is not divided by the temperature; the negatives' are."""
    rows = direction.rows
    return rows._replace(logits=rows.logits.where(~rows.positive, rows.logits * direction.temperature))


@fault("info_nce", github("ustcllm/RecStudio", "issues/21"), build=parts.directions, **RIGHT_AT_1)
def info_nce_temperature_missing(direction: parts.Direction) -> parts.Direction:
    """The logits are not divided by the temperature."""
    return direction._replace(temperature=1.0)


@fault("nt_xent", **RIGHT_AT_1)
def nt_xent_temperature_twice(view_a: Tensor, view_b: Tensor, *, temperature: float) -> parts.Rows:
    """Both rows of a product are divided by the temperature, so that it is applied twice."""
    return parts.of_rows(parts.unit(torch.cat([view_a, view_b])) / temperature)


@fault(
    "info_nce",
    github("bowang-lab/BLEEP", "issues/5"),
    build=parts.directions,
    right_at=(1.0, 1.0),
    because="Multiplying and dividing by 1 are the same.",
)
def info_nce_temperature_multiplies(direction: parts.Direction) -> parts.Direction:
    """Cosines are multiplied by the temperature instead of divided by it, as in BLEEP's targets."""
    return direction._replace(temperature=1 / direction.temperature)


@fault(
    "supcon",
    github("HobbitLong/SupContrast", "issues/73"),
    build=parts.features,
    right_at=(0.07, 0.07),
    because="The factor 0.07 / 0.07 is 1.",
)
def supcon_base_temperature_fixed(given: parts.Features) -> Tensor:
    """The loss is scaled by temperature / 0.07, although no base temperature is given."""
    return parts.loss_of("supcon", given.cosines) * given.temperature / 0.07


@fault("supcon", github("HobbitLong/SupContrast", "issues/1"))
def supcon_base_temperature_inverted(
    embeddings: Tensor, labels: Tensor, *, temperature: float, base_temperature: float | None = None
) -> Tensor:
    """The loss is scaled by base temperature / temperature instead of the reciprocal."""
    scale = 1.0 if base_temperature is None else base_temperature / temperature
    return parts.supcon(embeddings, labels, temperature=temperature) * scale


@fault("supcon")
def supcon_base_temperature_ignored(
    embeddings: Tensor, labels: Tensor, *, temperature: float, base_temperature: float | None = None
) -> parts.Batch:
    """The base temperature is accepted and ignored."""
    return parts.labelled(embeddings, labels, temperature)


@fault(
    "supcon_in",
    github("google-research/google-research", "blob/master/supcon/losses.py"),
    right_at=(1.0, 1.0),
    because="Multiplying by 1 changes nothing.",
)
def supcon_in_scaled_by_temperature(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """The loss is multiplied by the temperature, as the authors' TensorFlow code does by default."""
    return parts.loss_of("supcon_in", parts.labelled(embeddings, labels, temperature)) * temperature


@fault("nt_xent_pairwise", **RIGHT_AT_1)
def nt_xent_pairwise_temperature_on_the_loss(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """The temperature divides the loss instead of the similarities."""
    return parts.loss_of("nt_xent_pairwise", parts.labelled(embeddings, labels, 1.0)) / temperature


@fault("info_nce", github("BAAI-DCAI/M3D", "issues/52"), build=parts.directions)
def info_nce_logit_scale_raw(direction: parts.Direction) -> parts.Rows:
    """The logarithm of the scale is used without exp: similarities are multiplied by log(1 / temperature)."""
    rows = direction._replace(temperature=1.0).rows
    return rows._replace(logits=rows.logits * math.log(1 / direction.temperature))


@fault(
    "info_nce",
    github("openai/CLIP", "issues/46"),
    build=parts.directions,
    level="range",
    right_at=(0.01, math.inf),
    because="The scale is at most 100, so the cap has no effect.",
)
def info_nce_logit_scale_capped(direction: parts.Direction) -> parts.Direction:
    """The scale is silently capped at 100, as CLIP caps the scale that it learns: lower temperatures act as 0.01."""
    return direction._replace(temperature=max(direction.temperature, 0.01))


@fault(
    "info_nce",
    github("drboog/Lafite", "issues/25"),
    build=parts.directions,
    right_at=(1.0, 1.0),
    because="Multiplying by 1 changes nothing.",
)
def info_nce_temperature_inside_the_logarithm(direction: parts.Direction) -> Tensor:
    """The ratio is multiplied by the temperature inside the logarithm: only the gradient is right."""
    return parts.loss_of("info_nce", direction) - math.log(direction.temperature)


@fault("nt_bxent", "fixtures/worked/pair_notebook.json")
def nt_bxent_one_minus_cosine(embeddings: Tensor, positive_pairs: Tensor, *, temperature: float) -> Tensor:
    """A negative costs -log sigmoid((1 - s) / temperature), as in the notebook's formula but not in its code."""
    batch = parts.paired(embeddings, positive_pairs, temperature)
    return parts.bxent_anchors(batch, batch.costs[0], -F.logsigmoid(1 / temperature - batch.s))


@fault("supcon_epsilon", **RIGHT_AT_1)
def supcon_epsilon_temperature_missing(embeddings: Tensor, labels: Tensor, *, temperature: float) -> parts.Batch:
    """The dot products are not divided by the temperature."""
    return parts.products(embeddings, labels, 1.0)


@fault("sigmoid", "https://arxiv.org/abs/2303.15343")
def sigmoid_bias_subtracted(view_a: Tensor, view_b: Tensor, *, temperature: float, bias: float = -10.0) -> parts.Batch:
    """The bias is subtracted, as in the equation that the paper prints, not added as in its pseudocode."""
    return parts.across(view_a, view_b, temperature=temperature, bias=-bias)


@fault("hard_negative", build=parts.hard)
def hard_negative_exponent_without_temperature(given: parts.Hard) -> Tensor:
    """The weights are powers of e^cosine, not of e^(cosine / temperature)."""
    s, exponent = given.rows.logits, given.beta * given.temperature * given.rows.logits
    return given.against(given.log_sum(s + exponent) - given.log_sum(exponent))


@fault("dclw", build=parts.decoupled)
def dclw_weights_of_logits(given: parts.Decoupled) -> Tensor:
    """The weights are computed from the logits, so cosines are divided by both the temperature and sigma."""
    return given.against(given.held(2 - len(given.own) * (given.closeness / given.temperature).softmax(dim=0)))


@fault("multiple_negatives_ranking", build=parts.ranking, **RIGHT_AT_1)
def multiple_negatives_ranking_hardness_over_the_temperature(given: parts.Ranking) -> parts.Ranking:
    """The hardness strength multiplies the logit instead of the similarity, so it is divided by the temperature."""
    return given.again(divided=True)
