"""The right parts of which every fault is made, and the right losses made of the same parts.

A maker makes of the arguments what a loss is evaluated on: a ``Batch``, ``Rows`` of logits, or the ``Way`` of either
direction. ``loss_of`` evaluates it. A fault differs from the right loss of its name and call in one thing, so that
whatever a case finds is that thing and no accident of how the rest was written. ``RIGHT`` holds the right losses, which
nothing may flag.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

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

    @property
    def pairwise(self) -> Tensor:
        """[N, N], the value of every pair against its anchor's negatives; for positives only."""
        return -F.logsigmoid(self.s - log_sum(self.s, self.negative))

    @property
    def costs(self) -> tuple[Tensor, Tensor]:
        """[N, N] each, what a pair costs in NT-BXent as a positive and as a negative."""
        return -F.logsigmoid(self.s), -F.logsigmoid(-self.s)


class Rows(NamedTuple):
    """Logits of which one in each row is the positive.

    Attributes:
        logits: [N, M].
        right: [N], the column of each row's positive.
    """

    logits: Tensor
    right: Tensor

    @property
    def positive(self) -> Tensor:
        """[N, M], true for each row's positive."""
        return F.one_hot(self.right, self.logits.shape[1]).bool()

    @property
    def negatives(self) -> Tensor:
        """[N], the logarithm of the sum of the negatives' exponentials."""
        return log_sum(self.logits, ~self.positive)[:, 0]


class Way(NamedTuple):
    """One direction of InfoNCE.

    Attributes:
        anchors: [B, D].
        keys: [B, D], each anchor's positive; without ``negatives`` the other rows are its negatives.
        temperature: of the cosines.
        negatives: [K, D], or None.
    """

    anchors: Tensor
    keys: Tensor
    temperature: float
    negatives: Tensor | None = None

    @property
    def rows(self) -> Rows:
        """Logits [B, B] whose diagonal is the positive; with negatives [B, 1 + K] whose first column is."""
        anchors, keys = unit(self.anchors), unit(self.keys)
        if self.negatives is None:
            return diagonal(anchors @ keys.T / self.temperature)
        positive = (anchors * keys).sum(dim=1, keepdim=True)
        logits = torch.cat([positive, anchors @ unit(self.negatives).T], dim=1) / self.temperature
        return Rows(logits, torch.zeros(len(logits), dtype=torch.int64))


Made: TypeAlias = Tensor | Batch | Rows | Way | list["Made"]
"""What a maker makes or a fault returns: something that a loss is evaluated on, or its values; a list is averaged."""


def loss_of(loss: str, made: Made) -> Tensor:
    """The right loss of what a maker makes; the mean of values."""
    if isinstance(made, Tensor):
        return made.mean()
    if isinstance(made, list):
        return torch.stack([loss_of(loss, each) for each in made]).mean()
    if isinstance(made, Batch):
        return anchors(loss, made).mean()
    rows = made.rows if isinstance(made, Way) else made
    return F.cross_entropy(rows.logits, rows.right)


def composed(
    loss: str, of: Callable[..., Any], function: Callable[[Any], Made] = lambda made: made
) -> Callable[..., Tensor]:
    """The loss of what a function makes of what a maker makes, called as the maker is."""

    @wraps(of)
    def called(*given: Tensor | None, **options: Any) -> Tensor:
        made = of(*given, **options)
        return loss_of(loss, [function(each) for each in made] if isinstance(made, list) else function(made))

    return called


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


def dots(embeddings: Tensor, labels: Tensor, temperature: float) -> Batch:
    """A batch of dot products whose positives are the rows of the same label."""
    return batch_of(embeddings @ embeddings.T / temperature, labels[:, None] == labels)


def labelled(embeddings: Tensor, labels: Tensor, temperature: float) -> Batch:
    """A batch of cosines whose positives are the rows of the same label."""
    return dots(unit(embeddings), labels, temperature)


def products(embeddings: Tensor, labels: Tensor, temperature: float) -> Batch:
    """A batch of dot products, its logits as they are, whose positives are the rows of the same label."""
    return dots(embeddings, labels, temperature)._replace(s=embeddings @ embeddings.T / temperature)


def cosines(embeddings: Tensor, labels: Tensor, temperature: float) -> Batch:
    """A batch of cosines, its logits as they are, whose positives are the rows of the same label."""
    return products(unit(embeddings), labels, temperature)


def paired(embeddings: Tensor, positive_pairs: Tensor, temperature: float) -> Batch:
    """A batch of cosines, its logits as they are, whose positives are listed; a pair listed twice is one pair."""
    rows, other = unit(embeddings), others(len(embeddings))
    positive = torch.zeros_like(other)
    positive[positive_pairs[:, 0], positive_pairs[:, 1]] = True
    return Batch(rows @ rows.T / temperature, positive & other, other)


class Features(NamedTuple):
    """The arguments of a call with features [B, V, D], and with labels or a mask; by default an item is alone."""

    features: Tensor
    labels: Tensor | None
    mask: Tensor | None
    temperature: float

    @property
    def rows(self) -> Tensor:
        """[V B, D], stacked."""
        return self.features.transpose(0, 1).flatten(0, 1)

    @property
    def same(self) -> Tensor:
        """[V B, V B], who is of one class."""
        items, views, _ = self.features.shape
        labels = torch.arange(items) if self.labels is None else self.labels
        mask = labels[:, None] == labels if self.mask is None else self.mask
        return mask.bool().repeat(views, views)

    @property
    def dots(self) -> Batch:
        """The batch of their dot products."""
        return batch_of(self.rows @ self.rows.T / self.temperature, self.same)

    @property
    def cosines(self) -> Batch:
        """The batch of their cosines."""
        return self._replace(features=unit(self.features)).dots

    @property
    def views(self) -> Rows:
        """The logits of two views."""
        view_a, view_b = self.features.unbind(dim=1)
        return views(view_a, view_b, self.temperature)


def given(
    features: Tensor, labels: Tensor | None = None, mask: Tensor | None = None, *, temperature: float
) -> Features:
    """The arguments of a call with features, as they are."""
    return Features(features, labels, mask, temperature)


def views(view_a: Tensor, view_b: Tensor, temperature: float) -> Rows:
    """The logits [2B, 2B] of the cosines of stacked views."""
    return of_rows(unit(torch.cat([view_a, view_b])), temperature)


def of_rows(rows: Tensor, temperature: float = 1.0) -> Rows:
    """The logits [2B, 2B] of the dot products of stacked views."""
    return among_views(rows @ rows.T / temperature)


def among_views(logits: Tensor) -> Rows:
    """Logits [2B, 2B] of stacked views, the diagonal out of the way."""
    return Rows(logits.masked_fill(~others(len(logits)), -torch.inf), stacked(len(logits)))


def stacked(n: int) -> Tensor:
    """[N], every row's partner where all first views stand before all second views."""
    return (torch.arange(n) + n // 2) % n


def ways(view_a: Tensor, view_b: Tensor, negatives: Tensor | None = None, *, temperature: float) -> list[Way]:
    """Both directions of InfoNCE, of two towers, or of two towers and a queue."""
    return [Way(view_a, view_b, temperature, negatives), Way(view_b, view_a, temperature, negatives)]


def towers(view_a: Tensor, view_b: Tensor, *, temperature: float) -> list[Way]:
    """Both directions of InfoNCE, of two towers alone."""
    return ways(view_a, view_b, temperature=temperature)


def diagonal(logits: Tensor) -> Rows:
    """Logits [B, B] whose diagonal is the positive."""
    return Rows(logits, torch.arange(len(logits)))


def log_sum(s: Tensor, members: Tensor) -> Tensor:
    """[N, 1], the logarithm of the sum of the members' exponentials; a huge negative number where there is none."""
    return s.masked_fill(~members, torch.finfo(s.dtype).min).logsumexp(dim=1, keepdim=True)


def row_sums(values: Tensor, members: Tensor) -> Tensor:
    """[N], the sum of each row's members."""
    return values.where(members, 0).sum(dim=1)


def row_means(values: Tensor, members: Tensor) -> Tensor:
    """[N], the mean of each row's members; 0 where there is none."""
    return row_sums(values, members) / members.sum(dim=1).clamp(min=1)


def anchors(loss: str, batch: Batch) -> Tensor:
    """[N], every anchor's value of a loss of the catalogue; 0 without positives."""
    if loss == "nt_bxent":  # the catalogue's own loses digits where torch's softplus is linear
        return bxent_anchors(batch, *batch.costs)
    return LOSSES[loss].baseline(batch.s, batch.other, batch.positive)


def bxent_anchors(batch: Batch, as_positive: Tensor, as_negative: Tensor) -> Tensor:
    """[N], every anchor's value of NT-BXent, of what each pair costs."""
    return row_sums(as_positive, batch.positive) / (batch.counts + 1) + row_means(as_negative, batch.negative)


def exponentials(batch: Batch) -> Tensor:
    """[N, N], the batch tutorial's exponentials plus epsilon."""
    return torch.exp(batch.s - batch.s.amax(dim=1, keepdim=True)) + EPSILON


def epsilon_anchors(batch: Batch, e: Tensor) -> Tensor:
    """[N], every anchor's value of the batch tutorial's loss, of its exponentials plus epsilon."""
    values = row_sums(e, batch.other)[:, None].log() - e.log()
    return row_sums(values, batch.positive) / (batch.counts + EPSILON)


def supcon(embeddings: Tensor, labels: Tensor, *, temperature: float, base_temperature: float | None = None) -> Tensor:
    """SupCon, by labels."""
    scale = 1.0 if base_temperature is None else temperature / base_temperature
    return scale * loss_of("supcon", labelled(embeddings, labels, temperature))


RIGHT: Mapping[tuple[str, str], Callable[..., Tensor]] = MappingProxyType(
    {
        ("supcon", "labels"): supcon,
        ("supcon", "features"): composed("supcon", given, lambda made: made.cosines),
        ("supcon_in", "labels"): composed("supcon_in", labelled),
        ("nt_xent", "views"): composed("nt_xent", views),
        ("nt_xent", "features"): composed("nt_xent", given, lambda made: made.views),
        ("nt_xent_pairwise", "labels"): composed("nt_xent_pairwise", labelled),
        ("nt_bxent", "pairs"): composed("nt_bxent", paired),
        ("supcon_epsilon", "labels"): composed("supcon_epsilon", products),
        ("info_nce", "views"): composed("info_nce", ways),
    }
)
"""The right implementation for every loss and call that some fault claims."""
