"""Wrong handling of pairs that are listed twice and of equal rows."""

from __future__ import annotations

import torch
from torch import Tensor

from . import parts
from .base import fault, github


@fault("nt_bxent", level="policies")
def nt_bxent_repeated_pairs_counted(embeddings: Tensor, positive_pairs: Tensor, *, temperature: float) -> Tensor:
    """A pair listed twice counts twice, in the sum and in the number of positives."""
    batch = parts.paired(embeddings, positive_pairs, temperature)
    pairs, ones = positive_pairs.unbind(dim=1), torch.ones(len(positive_pairs), dtype=batch.s.dtype)
    times = torch.zeros_like(batch.s).index_put(pairs, ones, accumulate=True).where(batch.positive, 0)
    as_positive, as_negative = batch.costs
    attracted = (as_positive * times).sum(dim=1) / (times.sum(dim=1) + 1)
    return attracted + parts.row_means(as_negative, batch.negative)


@fault("nt_bxent", level="policies")
def nt_bxent_listed_diagonal_counted(embeddings: Tensor, positive_pairs: Tensor, *, temperature: float) -> parts.Batch:
    """A listed pair (i, i) counts as a positive, in addition to the diagonal, which always counts."""
    batch = parts.paired(embeddings, positive_pairs, temperature)
    listed = torch.zeros_like(batch.positive).index_put(positive_pairs.unbind(dim=1), torch.tensor(True))
    return batch._replace(positive=listed)


@fault("supcon", level="policies")
def supcon_equal_rows_taken_for_self(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """The self pair is found by its cosine of 1: every row that equals the anchor is left out too."""
    batch, rows = parts.labelled(embeddings, labels, temperature), parts.unit(embeddings)
    other = batch.other & (rows @ rows.T < 1 - 1e-6)
    values = parts.row_means(parts.log_sum(batch.s, other) - batch.s, batch.positive & other)
    return values.where(other.any(dim=1), 0)


@fault("info_nce", github("huggingface/sentence-transformers", "issues/3189"), build=parts.towers, level="policies")
def info_nce_equal_keys_dropped(direction: parts.Direction) -> parts.Rows:
    """A key that equals the positive is left out as a false negative, although no option requests it."""
    keys = parts.unit(direction.keys.detach())
    equal = (keys @ keys.T > 1 - 1e-6) & parts.off_diagonal(len(keys))
    return parts.diagonal(direction.rows.logits.masked_fill(equal, -torch.inf))
