"""Layouts: which row is which view of which item, and how many rows there are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import parts
from .base import Family, github

FAMILY = Family("layout")


@FAMILY.fault("nt_xent", github("open-mmlab/mmselfsup", "issues/159"), of=parts.views_logits)
def nt_xent_interleaved_partners(logits: Tensor) -> Tensor:
    """The views are stacked, and partners are sought side by side, as in an interleaved batch."""
    return F.cross_entropy(logits, torch.arange(len(logits)) ^ 1)


@FAMILY.fault("nt_xent", github("user0407/CLUDA", "issues/6"))
def nt_xent_stacked_partners(
    features: Tensor, labels: Tensor | None = None, mask: Tensor | None = None, *, temperature: float
) -> Tensor:
    """The features [B, V, D] are flattened item by item, and partners are sought half a batch away."""
    view_a, view_b = features.flatten(0, 1).chunk(2)
    logits = parts.views_logits(view_a, view_b, temperature)
    return F.cross_entropy(logits, parts.stacked(len(logits)))


@FAMILY.fault("nt_xent")
def nt_xent_views_reshaped(
    features: Tensor, labels: Tensor | None = None, mask: Tensor | None = None, *, temperature: float
) -> Tensor:
    """The features [B, V, D] are reshaped to [V, D, B] and turned, which mixes the entries of different rows."""
    items, views, dim = features.shape
    view_a, view_b = features.reshape(views, dim, items).transpose(1, 2)
    return parts.nt_xent(view_a, view_b, temperature=temperature)


@FAMILY.fault("nt_xent", github("sthalles/SimCLR", "issues/40"), of=parts.views_logits)
def nt_xent_eight_rows(logits: Tensor) -> Tensor:
    """The partners are written out for 8 rows: any other batch, the last one of an epoch too, breaks."""
    return F.cross_entropy(logits, parts.stacked(8))


@FAMILY.fault("supcon", github("sthalles/SimCLR", "issues/32"), of=parts.labelled)
def supcon_one_positive(batch: parts.Batch) -> Tensor:
    """One positive is taken for each anchor, the first: further views count as negatives."""
    first = batch.positive & (batch.positive.cumsum(dim=1) == 1)
    return parts.anchors("supcon", batch._replace(positive=first))


@FAMILY.fault("nt_xent", github("catalyst-team/catalyst", "pull/1278"))
def nt_xent_first_view_twice(view_a: Tensor, view_b: Tensor, *, temperature: float) -> Tensor:
    """Both views are the first one, by a slip in a variable's name."""
    return parts.nt_xent(view_a, view_a, temperature=temperature)


@FAMILY.fault("nt_xent", of=parts.views_logits)
def nt_xent_off_by_one(logits: Tensor) -> Tensor:
    """Partners are sought one row too early, as if the diagonal were gone from every row."""
    partners = (parts.stacked(len(logits)) - 1) % len(logits)
    clash = partners == torch.arange(len(logits))
    return F.cross_entropy(logits, partners.where(~clash, parts.stacked(len(logits))))


@FAMILY.fault("supcon")
def supcon_odd_row_dropped(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """The batch is cut to an even number of rows: of an odd one, the last row is lost."""
    even = max(len(embeddings) // 2 * 2, 1)
    return parts.supcon(embeddings[:even], labels[:even], temperature=temperature)


@FAMILY.fault("nt_xent_pairwise")
def nt_xent_pairwise_neighbours(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """Rows that stand side by side are taken for positives, whatever their labels are."""
    return parts.nt_xent_pairwise(embeddings, torch.arange(len(labels)) // 2, temperature=temperature)


@FAMILY.fault("supcon_in")
def supcon_in_runs_of_labels(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """Classes are taken to be runs of equal labels: a class that stands in two places is two classes."""
    runs = torch.cat([labels.new_zeros(1), (labels[1:] != labels[:-1]).cumsum(dim=0)])
    return parts.supcon_in(embeddings, runs, temperature=temperature)
