"""Similarities: norms left out, taken along the wrong axis, clamped, or kept from the gradient."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import parts
from .base import fault, github


@fault("supcon", github("HobbitLong/SupContrast", "issues/50"), of=parts.given)
def supcon_not_normalised(given: parts.Features) -> parts.Batch:
    """The features are taken to be of norm 1, and are not brought to it."""
    return given.dots


@fault("info_nce", github("moein-shariatnia/OpenAI-CLIP", "issues/16"), of=parts.towers)
def info_nce_not_normalised(way: parts.Way) -> parts.Rows:
    """Dot products are used where cosines are claimed."""
    return parts.diagonal(way.anchors @ way.keys.T / way.temperature)


@fault("nt_xent", github("HobbitLong/SupContrast", "issues/10"), of=parts.given)
def nt_xent_normalised_over_the_views(given: parts.Features) -> Tensor:
    """The features [B, V, D] are normalised over the views, not over their own dimension."""
    return parts.anchors("supcon", given._replace(features=F.normalize(given.features, dim=1)).dots)


@fault("nt_xent")
def nt_xent_normalised_over_the_batch(view_a: Tensor, view_b: Tensor, *, temperature: float) -> parts.Rows:
    """Each column is brought to norm 1, not each row."""
    return parts.of_rows(F.normalize(torch.cat([view_a, view_b]), dim=0), temperature)


@fault("info_nce", github("Shathe/SemiSeg-Contrastive", "issues/2"))
def info_nce_one_tower_normalised(view_a: Tensor, view_b: Tensor, *, temperature: float) -> parts.Made:
    """Only the first tower is normalised."""
    logits = parts.unit(view_a) @ view_b.T / temperature
    return [parts.diagonal(logits), parts.diagonal(logits.T)]


@fault("supcon")
def supcon_norm_detached(embeddings: Tensor, labels: Tensor, *, temperature: float) -> parts.Batch:
    """Rows are divided by norms that no gradient goes through: the value is right, the gradient is not."""
    unit = parts.unit(embeddings).detach()
    norms = (embeddings.detach() * unit).sum(dim=1, keepdim=True)
    # The value is that of the right rows, whatever the norms are rounded to.
    return parts.dots(unit + (embeddings - embeddings.detach()) / norms, labels, temperature)


@fault("nt_xent", github("lightly-ai/lightly", "issues/1259"))
def nt_xent_norm_plus_epsilon(view_a: Tensor, view_b: Tensor, *, temperature: float) -> parts.Rows:
    """An epsilon of 1e-8 is added to every norm: rows of small norm are not brought to norm 1."""
    rows = torch.cat([view_a, view_b])
    return parts.of_rows(rows / (rows.norm(dim=1, keepdim=True) + 1e-8), temperature)


@fault("nt_bxent", "https://pytorch.org/docs/stable/generated/torch.nn.functional.normalize.html")
def nt_bxent_norms_clamped(embeddings: Tensor, positive_pairs: Tensor, *, temperature: float) -> parts.Batch:
    """Norms are taken as they are and clamped from below: very small and very large rows do not come to norm 1."""
    rows = F.normalize(embeddings, dim=1)
    return parts.paired(embeddings, positive_pairs, temperature)._replace(s=rows @ rows.T / temperature)


@fault("supcon")
def supcon_squared_norm(embeddings: Tensor, labels: Tensor, *, temperature: float) -> parts.Batch:
    """Rows are divided by their squared norm: the square root is missing."""
    return parts.dots(embeddings / (embeddings * embeddings).sum(dim=1, keepdim=True), labels, temperature)


@fault("supcon_in")
def supcon_in_sum_norm(embeddings: Tensor, labels: Tensor, *, temperature: float) -> parts.Batch:
    """Rows are divided by the sum of their absolute entries, not by their Euclidean norm."""
    return parts.dots(F.normalize(embeddings, p=1, dim=1), labels, temperature)


@fault("info_nce", github("lucidrains/CoCa-pytorch", "issues/10"), of=parts.towers)
def info_nce_layer_norm(way: parts.Way) -> parts.Rows:
    """Rows go through a layer norm, which centres them and leaves them at norm sqrt(D), in place of norm 1."""
    anchors, keys = (F.layer_norm(rows, rows.shape[1:]) for rows in (way.anchors, way.keys))
    return parts.diagonal(anchors @ keys.T / way.temperature)


@fault("nt_xent", github("p3i0t/SimCLR-CIFAR10", "issues/6"))
def nt_xent_cosine_clamped(view_a: Tensor, view_b: Tensor, *, temperature: float) -> parts.Rows:
    """Cosines are clamped at 1e-7 from below: rows that point away from each other are not told apart."""
    rows = parts.unit(torch.cat([view_a, view_b]))
    return parts.among_views((rows @ rows.T).clamp(min=1e-7) / temperature)


@fault("nt_xent_pairwise")
def nt_xent_pairwise_squared_distance(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """Minus the squared distance of normalised rows, 2 s - 2, serves as similarity: the temperature is halved."""
    batch = parts.labelled(embeddings, labels, temperature / 2)
    return parts.row_means(batch.pairwise, batch.positive)


@fault("supcon_epsilon")
def supcon_epsilon_normalised(embeddings: Tensor, labels: Tensor, *, temperature: float) -> parts.Batch:
    """Rows are normalised, where the dot products of rows as they are are claimed."""
    return parts.cosines(embeddings, labels, temperature)
