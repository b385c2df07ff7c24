"""The right parts of which every fault is made, and the right losses made of the same parts.

A fault differs from the right loss of its name and call in one thing, so that whatever a case finds is that thing and
no accident of how the rest was written. ``RIGHT`` holds those right losses, which nothing may flag.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..suite.catalogue import LOSSES

EPSILON = 1e-8
"""What the batch tutorial adds to every exponential and to the number of positives."""


def unit(rows: Tensor) -> Tensor:
    """Rows of norm 1, each brought to ordinary size by powers of two first: no norm overflows or meets an epsilon."""
    exponents = torch.frexp(rows.detach().abs().amax(dim=-1, keepdim=True)).exponent
    for half in (exponents // 2, exponents - exponents // 2):
        rows = rows * torch.pow(torch.tensor(2.0, dtype=rows.dtype), -half)
    return F.normalize(rows, dim=-1)


class Batch(NamedTuple):
    """A batch contrasted with itself.

    Attributes:
        s: [N, N] logits; from each row the largest off the diagonal is taken away, as a constant.
        positive: [N, N], who is whose positive; never on the diagonal.
        other: [N, N], all pairs off the diagonal.
    """

    s: Tensor
    positive: Tensor
    other: Tensor

    @property
    def negative(self) -> Tensor:
        """[N, N], the other pairs that are not positive."""
        return self.other & ~self.positive

    @property
    def counts(self) -> Tensor:
        """[N], every anchor's number of positives, in the dtype of the logits."""
        return self.positive.sum(dim=1).to(self.s.dtype)

    @property
    def values(self) -> Tensor:
        """[N, N], the value of every pair in SupCon: minus the logarithm of its softmax; for positives only."""
        return log_sum(self.s, self.other) - self.s


def others(n: int) -> Tensor:
    """[N, N], true off the diagonal."""
    return ~torch.eye(n, dtype=torch.bool)


def shifted(s: Tensor, members: Tensor) -> Tensor:
    """Logits [N, M] less the largest member of their row, as a constant."""
    return s - s.detach().masked_fill(~members, torch.finfo(s.dtype).min).amax(dim=1, keepdim=True)


def batch_of(s: Tensor, positive: Tensor) -> Batch:
    """A batch from its logits [N, N] and its positives [N, N]."""
    other = others(len(s))
    return Batch(shifted(s, other), positive & other, other)


def labelled(embeddings: Tensor, labels: Tensor, temperature: float) -> Batch:
    """A batch of cosines whose positives are the rows of the same label."""
    rows = unit(embeddings)
    return batch_of(rows @ rows.T / temperature, labels[:, None] == labels)


def paired(embeddings: Tensor, positive_pairs: Tensor, temperature: float) -> Batch:
    """A batch of cosines, its logits as they are, whose positives are listed; a pair listed twice is one pair."""
    rows, other = unit(embeddings), others(len(embeddings))
    positive = torch.zeros_like(other)
    positive[positive_pairs[:, 0], positive_pairs[:, 1]] = True
    return Batch(rows @ rows.T / temperature, positive & other, other)


def products(embeddings: Tensor, labels: Tensor, temperature: float) -> Batch:
    """A batch of dot products, its logits as they are, whose positives are the rows of the same label."""
    other = others(len(embeddings))
    return Batch(embeddings @ embeddings.T / temperature, (labels[:, None] == labels) & other, other)


def cosines(embeddings: Tensor, labels: Tensor, temperature: float) -> Batch:
    """A batch of cosines, its logits as they are, whose positives are the rows of the same label."""
    return products(unit(embeddings), labels, temperature)


def flattened(features: Tensor, labels: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Features [B, V, D] as stacked rows [V B, D], and who is of one class [V B, V B]; by default an item alone."""
    items, views, _ = features.shape
    if mask is None:
        labels = torch.arange(items) if labels is None else labels
        mask = labels[:, None] == labels
    return features.transpose(0, 1).flatten(0, 1), mask.bool().repeat(views, views)


def featured(
    features: Tensor, labels: Tensor | None = None, mask: Tensor | None = None, *, temperature: float
) -> Batch:
    """A batch of cosines of features [B, V, D], by labels, or a mask."""
    rows, same = flattened(unit(features), labels, mask)
    return batch_of(rows @ rows.T / temperature, same)


def log_sum(s: Tensor, members: Tensor) -> Tensor:
    """[N, 1], the logarithm of the sum of the members' exponentials; a huge negative number where there is none."""
    return s.masked_fill(~members, torch.finfo(s.dtype).min).logsumexp(dim=1, keepdim=True)


def row_means(values: Tensor, members: Tensor) -> Tensor:
    """[N], the mean of each row's members; 0 where there is none."""
    return values.where(members, 0).sum(dim=1) / members.sum(dim=1).clamp(min=1)


def anchors(loss: str, batch: Batch) -> Tensor:
    """[N], every anchor's value of a loss of the catalogue; 0 without positives."""
    return LOSSES[loss].baseline(batch.s, batch.other, batch.positive)


def pairwise_values(batch: Batch) -> Tensor:
    """[N, N], the value of every pair against its anchor's negatives; for positives only."""
    return -F.logsigmoid(batch.s - log_sum(batch.s, batch.negative))


def views_logits(view_a: Tensor, view_b: Tensor, temperature: float) -> Tensor:
    """Logits [2B, 2B] of stacked views, the diagonal out of the way."""
    rows = unit(torch.cat([view_a, view_b]))
    return (rows @ rows.T / temperature).masked_fill(~others(len(rows)), -torch.inf)


def feature_logits(
    features: Tensor, labels: Tensor | None = None, mask: Tensor | None = None, *, temperature: float
) -> Tensor:
    """Logits [2B, 2B] of features [B, 2, D], stacked, the diagonal out of the way."""
    view_a, view_b = features.unbind(dim=1)
    return views_logits(view_a, view_b, temperature)


def stacked(n: int) -> Tensor:
    """[N], every row's partner where all first views stand before all second views."""
    return (torch.arange(n) + n // 2) % n


def bxent_values(batch: Batch) -> tuple[Tensor, Tensor]:
    """[N, N] each, what a pair costs as a positive and as a negative."""
    return -F.logsigmoid(batch.s), -F.logsigmoid(-batch.s)


def bxent_anchors(batch: Batch) -> Tensor:
    """[N], every anchor's value of NT-BXent; the catalogue's own loses digits where torch's softplus is linear."""
    as_positive, as_negative = bxent_values(batch)
    attracted = as_positive.where(batch.positive, 0).sum(dim=1) / (batch.counts + 1)
    return attracted + row_means(as_negative, batch.negative)


def epsilon_anchors(batch: Batch, e: Tensor) -> Tensor:
    """[N], every anchor's value of the batch tutorial's loss, of its exponentials plus epsilon."""
    values = e.where(batch.other, 0).sum(dim=1, keepdim=True).log() - e.log()
    return values.where(batch.positive, 0).sum(dim=1) / (batch.counts + EPSILON)


def tower_logits(view_a: Tensor, view_b: Tensor, temperature: float) -> Tensor:
    """Logits [B, B] of the rows of one tower against those of the other."""
    return unit(view_a) @ unit(view_b).T / temperature


def queue_logits(view_a: Tensor, view_b: Tensor, negatives: Tensor, temperature: float) -> Tensor:
    """Logits [B, 1 + K] of one tower's rows: against their positives, then against the negatives."""
    positive = (unit(view_a) * unit(view_b)).sum(dim=1, keepdim=True)
    return torch.cat([positive, unit(view_a) @ unit(negatives).T], dim=1) / temperature


def first_is_right(logits: Tensor) -> Tensor:
    """Cross-entropy of logits whose first column is the positive."""
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64))


def diagonal_is_right(logits: Tensor) -> Tensor:
    """Cross-entropy of logits whose diagonal is the positive."""
    return F.cross_entropy(logits, torch.arange(len(logits)))


def _right(loss: str, batch: Callable[..., Batch]) -> Callable[..., Tensor]:
    """A loss of the catalogue on the batch that a function makes of the arguments."""

    @wraps(batch)
    def right(*given: Tensor | None, **options: Any) -> Tensor:
        return anchors(loss, batch(*given, **options)).mean()

    return right


def supcon(embeddings: Tensor, labels: Tensor, *, temperature: float, base_temperature: float | None = None) -> Tensor:
    """SupCon, by labels."""
    scale = 1.0 if base_temperature is None else temperature / base_temperature
    return scale * anchors("supcon", labelled(embeddings, labels, temperature)).mean()


def nt_bxent(embeddings: Tensor, positive_pairs: Tensor, *, temperature: float) -> Tensor:
    """NT-BXent."""
    return bxent_anchors(paired(embeddings, positive_pairs, temperature)).mean()


def nt_xent(view_a: Tensor, view_b: Tensor, *, temperature: float) -> Tensor:
    """NT-Xent of two views."""
    logits = views_logits(view_a, view_b, temperature)
    return F.cross_entropy(logits, stacked(len(logits)))


def nt_xent_features(
    features: Tensor, labels: Tensor | None = None, mask: Tensor | None = None, *, temperature: float
) -> Tensor:
    """NT-Xent of the views of [B, 2, D]."""
    return nt_xent(*features.unbind(dim=1), temperature=temperature)


supcon_features = _right("supcon", featured)
supcon_in = _right("supcon_in", labelled)
nt_xent_pairwise = _right("nt_xent_pairwise", labelled)
supcon_epsilon = _right("supcon_epsilon", products)


def info_nce(view_a: Tensor, view_b: Tensor, negatives: Tensor | None = None, *, temperature: float) -> Tensor:
    """InfoNCE of two towers, or of two towers and a queue, in both directions."""
    if negatives is None:
        logits = tower_logits(view_a, view_b, temperature)
        return (diagonal_is_right(logits) + diagonal_is_right(logits.T)) / 2
    there = first_is_right(queue_logits(view_a, view_b, negatives, temperature))
    return (there + first_is_right(queue_logits(view_b, view_a, negatives, temperature))) / 2


RIGHT: Mapping[tuple[str, str], Callable[..., Tensor]] = MappingProxyType(
    {
        ("supcon", "labels"): supcon,
        ("supcon", "features"): supcon_features,
        ("supcon_in", "labels"): supcon_in,
        ("nt_xent", "views"): nt_xent,
        ("nt_xent", "features"): nt_xent_features,
        ("nt_xent_pairwise", "labels"): nt_xent_pairwise,
        ("nt_bxent", "pairs"): nt_bxent,
        ("supcon_epsilon", "labels"): supcon_epsilon,
        ("info_nce", "views"): info_nce,
    }
)
"""The right implementation for every loss and call that some fault claims."""
