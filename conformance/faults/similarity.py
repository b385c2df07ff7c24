"""Similarities whose norms are missing, taken along the wrong axis, clamped, or detached."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import parts
from .base import fault, github


@fault("supcon", github("HobbitLong/SupContrast", "issues/50"), build=parts.features)
def supcon_not_normalised(given: parts.Features) -> parts.Batch:
    """The features are assumed to have norm 1 and are not normalised."""
    return given.dots


@fault("info_nce", github("moein-shariatnia/OpenAI-CLIP", "issues/16"), build=parts.towers)
def info_nce_not_normalised(direction: parts.Direction) -> parts.Rows:
    """Dot products are used instead of cosines."""
    return parts.diagonal(direction.anchors @ direction.keys.T / direction.temperature)


@fault("nt_xent", github("HobbitLong/SupContrast", "issues/10"), build=parts.features)
def nt_xent_normalised_over_the_views(given: parts.Features) -> Tensor:
    """The features [B, V, D] are normalised over the axis of views, not over the last axis."""
    return parts.anchors("supcon", given._replace(features=F.normalize(given.features, dim=1)).dots)


@fault("nt_xent")
def nt_xent_normalised_over_the_batch(view_a: Tensor, view_b: Tensor, *, temperature: float) -> parts.Rows:
    """The columns are normalised instead of the rows."""
    return parts.of_rows(F.normalize(torch.cat([view_a, view_b]), dim=0), temperature)


@fault("info_nce", github("Shathe/SemiSeg-Contrastive", "issues/2"))
def info_nce_one_tower_normalised(view_a: Tensor, view_b: Tensor, *, temperature: float) -> parts.Evaluable:
    """Only the first tower is normalised."""
    logits = parts.unit(view_a) @ view_b.T / temperature
    return [parts.diagonal(logits), parts.diagonal(logits.T)]


@fault("supcon")
def supcon_norm_detached(embeddings: Tensor, labels: Tensor, *, temperature: float) -> parts.Batch:
    """Rows are divided by detached norms: the value is right, the gradient is wrong."""
    unit = parts.unit(embeddings).detach()
    norms = (embeddings.detach() * unit).sum(dim=1, keepdim=True)
    # The second summand is exactly 0, so the value is that of the normalised rows.
    return parts.dots(unit + (embeddings - embeddings.detach()) / norms, labels, temperature)


@fault("nt_xent", github("lightly-ai/lightly", "issues/1259"))
def nt_xent_norm_plus_epsilon(view_a: Tensor, view_b: Tensor, *, temperature: float) -> parts.Rows:
    """An epsilon of 1e-8 is added to every norm: rows of small norm do not get norm 1."""
    rows = torch.cat([view_a, view_b])
    return parts.of_rows(rows / (rows.norm(dim=1, keepdim=True) + 1e-8), temperature)


@fault("nt_bxent", "https://pytorch.org/docs/stable/generated/torch.nn.functional.normalize.html", level="range")
def nt_bxent_norms_clamped(embeddings: Tensor, positive_pairs: Tensor, *, temperature: float) -> parts.Batch:
    """Norms are clamped from below, and may underflow or overflow: rows of extreme norm do not get norm 1."""
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


@fault("info_nce", github("lucidrains/CoCa-pytorch", "issues/10"), build=parts.towers)
def info_nce_layer_norm(direction: parts.Direction) -> parts.Rows:
    """Rows go through a layer norm, which centres them and gives them norm sqrt(D) instead of 1."""
    anchors, keys = (F.layer_norm(rows, rows.shape[1:]) for rows in (direction.anchors, direction.keys))
    return parts.diagonal(anchors @ keys.T / direction.temperature)


@fault("nt_xent", github("p3i0t/SimCLR-CIFAR10", "issues/6"))
def nt_xent_cosine_clamped(view_a: Tensor, view_b: Tensor, *, temperature: float) -> parts.Rows:
    """Cosines are clamped at 1e-7 from below: all negative cosines count the same."""
    rows = parts.unit(torch.cat([view_a, view_b]))
    return parts.among_views((rows @ rows.T).clamp(min=1e-7) / temperature)


@fault("nt_xent_pairwise")
def nt_xent_pairwise_squared_distance(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """The similarity is minus the squared distance of normalised rows, 2 s - 2, which halves the temperature."""
    batch = parts.labelled(embeddings, labels, temperature / 2)
    return parts.row_means(batch.pairwise, batch.positive)


@fault("supcon_epsilon")
def supcon_epsilon_normalised(embeddings: Tensor, labels: Tensor, *, temperature: float) -> parts.Batch:
    """Rows are normalised, although the loss is defined on dot products."""
    return parts.cosines(embeddings, labels, temperature)


@fault("supcon", level="range", zero_row="zero")
def supcon_zero_row_gradient_is_nan(embeddings: Tensor, labels: Tensor, *, temperature: float) -> parts.Batch:
    """A row of zeros is divided by its norm, and a torch.where then replaces the NaN by 0: its gradient is NaN."""
    norms = (embeddings * embeddings).sum(dim=1, keepdim=True).sqrt()
    return parts.dots(torch.where(norms > 0, embeddings / norms, 0.0), labels, temperature)


@fault(
    "supcon",
    "https://pytorch.org/docs/stable/generated/torch.nn.functional.normalize.html",
    level="range",
    zero_row="zero",
)
def supcon_zero_row_norm_clamped(embeddings: Tensor, labels: Tensor, *, temperature: float) -> parts.Batch:
    """F.normalize clamps the norm of a row of zeros to 1e-12: the value is right, its gradient is of size 1e12."""
    return parts.dots(F.normalize(embeddings, dim=1), labels, temperature)


@fault("supcon", level="range", zero_row="zero")
def supcon_zero_row_left_out(embeddings: Tensor, labels: Tensor, *, temperature: float) -> parts.Batch:
    """A row of zeros is left out of the denominators of rows with other labels."""
    kept = embeddings.detach().any(dim=1)
    norms = embeddings.norm(dim=1, keepdim=True).where(kept[:, None], 1.0)
    batch = parts.dots((embeddings / norms).where(kept[:, None], 0.0), labels, temperature)
    return batch._replace(other=batch.other & (kept | batch.positive))


@fault("nt_xent", level="range", zero_row="zero")
def nt_xent_zero_row_along_the_diagonal(view_a: Tensor, view_b: Tensor, *, temperature: float) -> parts.Rows:
    """An epsilon is added to the entries before the division: a row of zeros gets a unit vector of equal entries."""
    rows = torch.cat([view_a, view_b]) + 1e-12
    return parts.of_rows(rows / rows.norm(dim=1, keepdim=True), temperature)
