"""Duplicates: pairs listed twice, rows that are equal, and a row taken for another."""

from __future__ import annotations

import torch
from torch import Tensor

from . import parts
from .base import Family, github

FAMILY = Family("duplicates")


@FAMILY.fault("nt_bxent")
def nt_bxent_repeated_pairs_counted(embeddings: Tensor, positive_pairs: Tensor, *, temperature: float) -> Tensor:
    """A pair listed twice weighs twice, among the values and among the counts."""
    batch = parts.paired(embeddings, positive_pairs, temperature)
    times = torch.zeros_like(batch.s)
    times.index_put_(positive_pairs.unbind(dim=1), torch.ones(len(positive_pairs), dtype=times.dtype), accumulate=True)
    times = times.where(batch.positive, 0)
    as_positive, as_negative = parts.bxent_values(batch)
    attracted = (as_positive * times).sum(dim=1) / (times.sum(dim=1) + 1)
    return (attracted + parts.row_means(as_negative, batch.negative)).mean()


@FAMILY.fault("nt_bxent")
def nt_bxent_listed_diagonal_counted(embeddings: Tensor, positive_pairs: Tensor, *, temperature: float) -> Tensor:
    """A listed pair of a row with itself counts as a positive, beside the diagonal that counts already."""
    batch = parts.paired(embeddings, positive_pairs, temperature)
    listed = positive_pairs[positive_pairs[:, 0] == positive_pairs[:, 1]]
    positive = batch.positive.clone()
    positive[listed[:, 0], listed[:, 1]] = True
    return parts.bxent_anchors(batch._replace(positive=positive)).mean()


@FAMILY.fault("supcon")
def supcon_equal_rows_taken_for_self(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """The anchor itself is found by its cosine of 1: every row that equals it is left out with it."""
    rows = parts.unit(embeddings)
    batch = parts.labelled(embeddings, labels, temperature)
    other = batch.other & (rows @ rows.T < 1 - 1e-6)
    values = parts.row_means(parts.log_sum(batch.s, other) - batch.s, batch.positive & other)
    return values.where(other.any(dim=1), 0).mean()


@FAMILY.fault("info_nce", github("huggingface/sentence-transformers", "issues/3189"))
def info_nce_equal_keys_dropped(view_a: Tensor, view_b: Tensor, *, temperature: float) -> Tensor:
    """A key that equals the positive is left out as a false negative, though no such thing was asked for."""

    def one_way(anchors: Tensor, keys: Tensor) -> Tensor:
        logits = parts.tower_logits(anchors, keys, temperature)
        rows = parts.unit(keys.detach())
        equal = (rows @ rows.T > 1 - 1e-6) & parts.others(len(rows))
        return parts.diagonal_is_right(logits.masked_fill(equal, -torch.inf))

    return (one_way(view_a, view_b) + one_way(view_b, view_a)) / 2
