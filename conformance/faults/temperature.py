"""The temperature: left out, put in twice, turned over, or scaling what it should not."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from . import parts
from .base import fault, github


@fault("info_nce", github("RElbers/info-nce-pytorch", "pull/17"), of=parts.ways)
def info_nce_positive_without_temperature(way: parts.Way) -> parts.Rows:
    """The positive's logit is not divided by the temperature; the negatives' are."""
    rows = way.rows
    return rows._replace(logits=rows.logits.where(~rows.positive, rows.logits * way.temperature))


@fault("info_nce", github("ustcllm/RecStudio", "issues/21"), of=parts.ways)
def info_nce_temperature_missing(way: parts.Way) -> parts.Way:
    """Nothing is divided by the temperature."""
    return way._replace(temperature=1.0)


@fault("nt_xent")
def nt_xent_temperature_twice(view_a: Tensor, view_b: Tensor, *, temperature: float) -> parts.Rows:
    """The rows are divided by the temperature before they are multiplied: it is applied squared."""
    return parts.of_rows(parts.unit(torch.cat([view_a, view_b])) / temperature)


@fault("info_nce", github("bowang-lab/BLEEP", "issues/5"), of=parts.ways)
def info_nce_temperature_multiplies(way: parts.Way) -> parts.Way:
    """Cosines are multiplied by the temperature where they should be divided, as the targets of BLEEP were."""
    return way._replace(temperature=1 / way.temperature)


@fault("supcon", github("HobbitLong/SupContrast", "issues/73"), of=parts.given)
def supcon_base_temperature_fixed(given: parts.Features) -> Tensor:
    """The loss is scaled by temperature / 0.07, though no base temperature was asked for."""
    return parts.loss_of("supcon", given.cosines) * given.temperature / 0.07


@fault("supcon", github("HobbitLong/SupContrast", "issues/1"))
def supcon_base_temperature_inverted(
    embeddings: Tensor, labels: Tensor, *, temperature: float, base_temperature: float | None = None
) -> Tensor:
    """The loss is scaled by base temperature / temperature, not by temperature / base temperature."""
    scale = 1.0 if base_temperature is None else base_temperature / temperature
    return parts.supcon(embeddings, labels, temperature=temperature) * scale


@fault("supcon")
def supcon_base_temperature_ignored(
    embeddings: Tensor, labels: Tensor, *, temperature: float, base_temperature: float | None = None
) -> parts.Batch:
    """A base temperature is taken and not used."""
    return parts.labelled(embeddings, labels, temperature)


@fault("supcon_in", github("google-research/google-research", "blob/master/supcon/losses.py"))
def supcon_in_scaled_by_temperature(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """The loss is multiplied by the temperature, as the authors' TensorFlow code does unless told not to."""
    return parts.loss_of("supcon_in", parts.labelled(embeddings, labels, temperature)) * temperature


@fault("nt_xent_pairwise")
def nt_xent_pairwise_temperature_on_the_loss(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """The temperature divides the loss, not the similarities."""
    return parts.loss_of("nt_xent_pairwise", parts.labelled(embeddings, labels, 1.0)) / temperature


@fault("info_nce", github("BAAI-DCAI/M3D", "issues/52"), of=parts.ways)
def info_nce_logit_scale_raw(way: parts.Way) -> parts.Rows:
    """The scale is learned as a logarithm and used without its exponential: log(1 / temperature) multiplies."""
    rows = way._replace(temperature=1.0).rows
    return rows._replace(logits=rows.logits * math.log(1 / way.temperature))


@fault("info_nce", github("openai/CLIP", "issues/46"), of=parts.ways)
def info_nce_logit_scale_capped(way: parts.Way) -> parts.Way:
    """The scale is capped at 100, in silence: no temperature below 0.01 is used."""
    return way._replace(temperature=max(way.temperature, 0.01))


@fault("info_nce", github("drboog/Lafite", "issues/25"), of=parts.ways)
def info_nce_temperature_inside_the_logarithm(way: parts.Way) -> Tensor:
    """The ratio is multiplied by the temperature inside the logarithm: a constant too much, the gradient right."""
    return parts.loss_of("info_nce", way) - math.log(way.temperature)


@fault("nt_bxent", "fixtures/worked/pair_notebook.json")
def nt_bxent_one_minus_cosine(embeddings: Tensor, positive_pairs: Tensor, *, temperature: float) -> Tensor:
    """A negative costs -log sigmoid((1 - s) / temperature), as the notebook's formula has it and its code does not."""
    batch = parts.paired(embeddings, positive_pairs, temperature)
    return parts.bxent_anchors(batch, batch.costs[0], -F.logsigmoid(1 / temperature - batch.s))


@fault("supcon_epsilon")
def supcon_epsilon_temperature_missing(embeddings: Tensor, labels: Tensor, *, temperature: float) -> parts.Batch:
    """Nothing is divided by the temperature."""
    return parts.products(embeddings, labels, 1.0)
