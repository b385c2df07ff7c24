"""Layouts: which row is which view of which item, and how many rows there are."""

from __future__ import annotations

import torch
from torch import Tensor

from . import parts
from .base import fault, github


@fault("nt_xent", github("open-mmlab/mmselfsup", "issues/159"), of=parts.views)
def nt_xent_interleaved_partners(rows: parts.Rows) -> parts.Rows:
    """The views are stacked, and partners are sought side by side, as in an interleaved batch."""
    return rows._replace(right=torch.arange(len(rows.right)) ^ 1)


@fault("nt_xent", github("user0407/CLUDA", "issues/6"), of=parts.given)
def nt_xent_stacked_partners(given: parts.Features) -> parts.Rows:
    """The features [B, V, D] are flattened item by item, and partners are sought half a batch away."""
    view_a, view_b = given.features.flatten(0, 1).chunk(2)
    return parts.views(view_a, view_b, given.temperature)


@fault("nt_xent", of=parts.given)
def nt_xent_views_reshaped(given: parts.Features) -> parts.Rows:
    """The features [B, V, D] are reshaped to [V, D, B] and turned, which mixes the entries of different rows."""
    items, views, dim = given.features.shape
    view_a, view_b = given.features.reshape(views, dim, items).transpose(1, 2)
    return parts.views(view_a, view_b, given.temperature)


@fault("nt_xent", github("sthalles/SimCLR", "issues/40"), of=parts.views)
def nt_xent_eight_rows(rows: parts.Rows) -> parts.Rows:
    """The partners are written out for 8 rows: any other batch, the last one of an epoch too, breaks."""
    return rows._replace(right=parts.stacked(8))


@fault("supcon", github("sthalles/SimCLR", "issues/32"), of=parts.labelled)
def supcon_one_positive(batch: parts.Batch) -> parts.Batch:
    """One positive is taken for each anchor, the first: further views count as negatives."""
    return batch._replace(positive=batch.positive & (batch.positive.cumsum(dim=1) == 1))


@fault("nt_xent", github("catalyst-team/catalyst", "pull/1278"))
def nt_xent_first_view_twice(view_a: Tensor, view_b: Tensor, *, temperature: float) -> parts.Rows:
    """Both views are the first one, by a slip in a variable's name."""
    return parts.views(view_a, view_a, temperature)


@fault("nt_xent", of=parts.views)
def nt_xent_off_by_one(rows: parts.Rows) -> parts.Rows:
    """Partners are sought one row too early, as if the diagonal were gone from every row."""
    partners = (rows.right - 1) % len(rows.right)
    return rows._replace(right=partners.where(partners != torch.arange(len(partners)), rows.right))


@fault("supcon")
def supcon_odd_row_dropped(embeddings: Tensor, labels: Tensor, *, temperature: float) -> parts.Batch:
    """The batch is cut to an even number of rows: of an odd one, the last row is lost."""
    even = max(len(embeddings) // 2 * 2, 1)
    return parts.labelled(embeddings[:even], labels[:even], temperature)


@fault("nt_xent_pairwise")
def nt_xent_pairwise_neighbours(embeddings: Tensor, labels: Tensor, *, temperature: float) -> parts.Batch:
    """Rows that stand side by side are taken for positives, whatever their labels are."""
    return parts.labelled(embeddings, torch.arange(len(labels)) // 2, temperature)


@fault("supcon_in")
def supcon_in_runs_of_labels(embeddings: Tensor, labels: Tensor, *, temperature: float) -> parts.Batch:
    """Classes are taken to be runs of equal labels: a class that stands in two places is two classes."""
    runs = torch.cat([labels.new_zeros(1), (labels[1:] != labels[:-1]).cumsum(dim=0)])
    return parts.labelled(embeddings, runs, temperature)
