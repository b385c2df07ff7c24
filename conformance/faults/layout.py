"""Wrong assumptions about the number of rows, and about which row is which view of which item."""

from __future__ import annotations

import torch
from torch import Tensor

from . import parts
from .base import fault, github


@fault("nt_xent", github("open-mmlab/mmselfsup", "issues/159"), build=parts.views)
def nt_xent_interleaved_partners(rows: parts.Rows) -> parts.Rows:
    """The views are stacked, but partners are neighbouring rows, as in an interleaved batch."""
    return rows._replace(target=torch.arange(len(rows.target)) ^ 1)


@fault("nt_xent", github("user0407/CLUDA", "issues/6"), build=parts.features)
def nt_xent_stacked_partners(given: parts.Features) -> parts.Rows:
    """The features [B, V, D] are flattened item by item, but partners are taken half a batch away."""
    view_a, view_b = given.features.flatten(0, 1).chunk(2)
    return parts.views(view_a, view_b, given.temperature)


@fault("nt_xent", build=parts.features)
def nt_xent_views_reshaped(given: parts.Features) -> parts.Rows:
    """The features [B, V, D] are reshaped to [V, D, B] and transposed, which mixes the entries of different rows."""
    items, views, dim = given.features.shape
    view_a, view_b = given.features.reshape(views, dim, items).transpose(1, 2)
    return parts.views(view_a, view_b, given.temperature)


@fault("nt_xent", github("sthalles/SimCLR", "issues/40"), build=parts.views)
def nt_xent_eight_rows(rows: parts.Rows) -> parts.Rows:
    """The partners are hard-coded for 8 rows: any other batch fails, such as the last one of an epoch."""
    return rows._replace(target=parts.stacked(8))


@fault("supcon", github("sthalles/SimCLR", "issues/32"), build=parts.labelled)
def supcon_one_positive(batch: parts.Batch) -> parts.Batch:
    """Only the first positive of each anchor is used: further views count as negatives."""
    return batch._replace(positive=batch.positive & (batch.positive.cumsum(dim=1) == 1))


@fault("nt_xent", github("catalyst-team/catalyst", "pull/1278"))
def nt_xent_first_view_twice(view_a: Tensor, view_b: Tensor, *, temperature: float) -> parts.Rows:
    """Both views are the first one, because of a wrong variable name."""
    return parts.views(view_a, view_a, temperature)


@fault("nt_xent", build=parts.views)
def nt_xent_off_by_one(rows: parts.Rows) -> parts.Rows:
    """The index of each partner is 1 too small (0 becomes the last row)."""
    partners = (rows.target - 1) % len(rows.target)
    return rows._replace(target=partners.where(partners != torch.arange(len(partners)), rows.target))


@fault("supcon")
def supcon_odd_row_dropped(embeddings: Tensor, labels: Tensor, *, temperature: float) -> parts.Batch:
    """The batch is cut to an even number of rows: an odd batch loses its last row."""
    even = max(len(embeddings) // 2 * 2, 1)
    return parts.labelled(embeddings[:even], labels[:even], temperature)


@fault("nt_xent_pairwise")
def nt_xent_pairwise_neighbours(embeddings: Tensor, labels: Tensor, *, temperature: float) -> parts.Batch:
    """Neighbouring rows are positives, whatever their labels."""
    return parts.labelled(embeddings, torch.arange(len(labels)) // 2, temperature)


@fault("supcon_in")
def supcon_in_runs_of_labels(embeddings: Tensor, labels: Tensor, *, temperature: float) -> parts.Batch:
    """Only consecutive equal labels form a class: a class that occurs in two places is split in two."""
    runs = torch.cat([labels.new_zeros(1), (labels[1:] != labels[:-1]).cumsum(dim=0)])
    return parts.labelled(embeddings, runs, temperature)
