"""Distributed losses for the tests of ``pairproof parity --world-size``: right ones, and one for each mistake.

Every rank passes its own rows. The losses are written for this purpose; the functions with a link repeat the mistake
that the thread describes.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed


class Gather(torch.autograd.Function):
    """The rows of all ranks in their order, with a gradient; the ranks may have different numbers of rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        """Pad the rows to the largest number, and gather them."""
        sizes = gathered(torch.tensor([len(rows)])).tolist()
        padded = rows.new_zeros(max(sizes), *rows.shape[1:])
        padded[: len(rows)] = rows
        found = [torch.empty_like(padded) for _ in sizes]
        distributed.all_gather(found, padded)
        ctx.start, ctx.rows = sum(sizes[: distributed.get_rank()]), len(rows)
        return torch.cat([part[:n] for part, n in zip(found, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Add the gradients of all ranks."""
        total = gradients[0].contiguous().clone()
        distributed.all_reduce(total)
        return total[ctx.start : ctx.start + ctx.rows]


class OwnShare(Gather):
    """The rows of all ranks; the gradient is that of this rank's loss only."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Return the gradient of this rank."""
        return gradients[0][ctx.start : ctx.start + ctx.rows]


class Averaged(Gather):
    """The rows of all ranks; the gradients of all ranks are averaged instead of added."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Average the gradients of all ranks."""
        return Gather.backward(ctx, *gradients) / world()


class Summed(torch.autograd.Function):
    """A number whose gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, number: Tensor) -> Tensor:
        """Return the number."""
        return number.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Add the gradients of all ranks."""
        total = gradients[0].clone()
        distributed.all_reduce(total)
        return total


def world() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1


def rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


def gathered(rows: Tensor) -> Tensor:
    """The rows of all ranks, without a gradient if there are several; all ranks have the same number of rows."""
    if world() == 1:
        return rows
    found = [torch.empty_like(rows) for _ in range(world())]
    distributed.all_gather(found, rows.detach().contiguous())
    return torch.cat(found)


def with_gradient(rows: Tensor) -> Tensor:
    """The rows of all ranks with a gradient."""
    found: Tensor = rows if world() == 1 else Gather.apply(rows)  # type: ignore[no-untyped-call]
    return found


def with_own(rows: Tensor) -> Tensor:
    """The rows of all ranks; only those of this rank have a gradient."""
    if world() == 1:
        return rows
    found = list(gathered(rows).chunk(world()))
    found[rank()] = rows
    return torch.cat(found)


def first(count: int) -> int:
    """The position of this rank's first row among the rows of all ranks."""
    counts = gathered(torch.tensor([count])).tolist()
    return int(sum(counts[: rank()]))


def clip(a: Tensor, b: Tensor, all_a: Tensor, all_b: Tensor, scale: float | Tensor, targets: Tensor) -> Tensor:
    """The mean over this rank's rows of both towers of the cross-entropy with the rows of all ranks."""
    first = F.cross_entropy(scale * a @ all_b.T, targets)
    return (first + F.cross_entropy(scale * b @ all_a.T, targets)) / 2


def right(view_a: Tensor, view_b: Tensor, temperature: float = 0.1) -> Tensor:
    """This rank's rows against those of all ranks, gathered with a gradient."""
    targets = torch.arange(len(view_a)) + first(len(view_a))
    return clip(view_a, view_b, with_gradient(view_a), with_gradient(view_b), 1 / temperature, targets)


def right_global(view_a: Tensor, view_b: Tensor, temperature: float = 0.1) -> Tensor:
    """Every rank returns the mean over the rows of all ranks."""
    a, b = with_gradient(view_a), with_gradient(view_b)
    return clip(a, b, a, b, 1 / temperature, torch.arange(len(a)))


class RightWeighted:
    """The share of this rank's rows in the mean over all rows, times the world size, for averaged gradients."""

    def __init__(self, scale: float = 10.0) -> None:
        self.scale = scale

    def __call__(self, view_a: Tensor, view_b: Tensor, process_group: Any = None) -> Tensor:
        """Return the loss; in a group, ``process_group`` must be given."""
        assert (process_group is not None) == distributed.is_initialized()
        a, b = with_gradient(view_a), with_gradient(view_b)
        targets = torch.arange(len(view_a)) + first(len(view_a))
        return clip(view_a, view_b, a, b, self.scale, targets) * len(view_a) * world() / len(a)


class LearnedScale(torch.nn.Module):
    """This rank's rows against those of all ranks, with a learned logit scale."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale_of_logits = torch.nn.Parameter(torch.tensor(2.0))

    def scale(self) -> Tensor:
        """The factor of the logits."""
        return self.log_scale_of_logits.exp()

    def forward(self, view_a: Tensor, view_b: Tensor) -> Tensor:
        """Return the loss."""
        a, b = with_gradient(view_a), with_gradient(view_b)
        targets = torch.arange(len(view_a)) + first(len(view_a))
        return clip(view_a, view_b, a, b, self.scale(), targets)


class ScaleTimesWorld(LearnedScale):
    """The gradient of the scale is added over ranks, and then averaged: as in Inf-CL's ring."""

    def scale(self) -> Tensor:
        """The factor of the logits."""
        found = super().scale()
        return found if world() == 1 else Summed.apply(found)  # type: ignore[no-any-return, no-untyped-call]


def needs_a_group(view_a: Tensor, view_b: Tensor) -> Tensor:
    """A right loss that fails without a group."""
    assert distributed.get_world_size() > 0
    return right(view_a, view_b)


def no_gather(view_a: Tensor, view_b: Tensor, temperature: float = 0.1, gather_distributed: bool = False) -> Tensor:
    """The default of several libraries: nothing is gathered."""
    if gather_distributed:
        return right(view_a, view_b, temperature)
    return clip(view_a, view_b, view_a, view_b, 1 / temperature, torch.arange(len(view_a)))


def no_gradient(view_a: Tensor, view_b: Tensor, temperature: float = 0.1) -> Tensor:
    """The gathered rows have no gradient: https://github.com/HobbitLong/SupContrast/issues/26."""
    targets = torch.arange(len(view_a)) + first(len(view_a))
    return clip(view_a, view_b, gathered(view_a), gathered(view_b), 1 / temperature, targets)


def never_a_gradient(view_a: Tensor, view_b: Tensor, temperature: float = 0.1) -> Tensor:
    """The gathered rows have no gradient in one process either."""
    targets = torch.arange(len(view_a)) + first(len(view_a))
    return clip(view_a, view_b, gathered(view_a).detach(), gathered(view_b).detach(), 1 / temperature, targets)


def not_summed(view_a: Tensor, view_b: Tensor, temperature: float = 0.1) -> Tensor:
    """The backward pass of the gather is not summed: https://github.com/lightly-ai/lightly/issues/1528."""
    targets = torch.arange(len(view_a)) + first(len(view_a))
    a, b = (OwnShare.apply(rows) if world() > 1 else rows for rows in (view_a, view_b))  # type: ignore[no-untyped-call]
    return clip(view_a, view_b, a, b, 1 / temperature, targets)


def averaged(view_a: Tensor, view_b: Tensor, temperature: float = 0.1) -> Tensor:
    """The backward pass of the gather averages over ranks, and so does the training step."""
    targets = torch.arange(len(view_a)) + first(len(view_a))
    a, b = (Averaged.apply(rows) if world() > 1 else rows for rows in (view_a, view_b))  # type: ignore[no-untyped-call]
    return clip(view_a, view_b, a, b, 1 / temperature, targets)


def one_over_world(view_a: Tensor, view_b: Tensor, temperature: float = 0.1) -> Tensor:
    """Every rank returns the loss of all rows, and only its own rows have a gradient."""
    a, b = with_own(view_a), with_own(view_b)
    return clip(a, b, a, b, 1 / temperature, torch.arange(len(a)))


def times_world(view_a: Tensor, view_b: Tensor, temperature: float = 0.1) -> Tensor:
    """A right loss, multiplied by the world size."""
    return right(view_a, view_b, temperature) * world()


def efficient(embeddings: Tensor, labels: Tensor) -> Tensor:
    """The gathered rows of other ranks have no gradient, and the loss is multiplied by the world size, as by PML."""
    return supcon(embeddings, with_own(embeddings), labels, gathered(labels), first(len(labels))) * world()


def no_offset(view_a: Tensor, view_b: Tensor, temperature: float = 0.1) -> Tensor:
    """The targets are the row numbers on this rank."""
    targets = torch.arange(len(view_a))
    return clip(view_a, view_b, with_gradient(view_a), with_gradient(view_b), 1 / temperature, targets)


def anchors_of_own_rank(view_a: Tensor, view_b: Tensor, temperature: float = 0.1) -> Tensor:
    """The rows of the second view are gathered, but not those of the first view, which are negatives too."""
    others = (view_a @ view_a.T / temperature).masked_fill(torch.eye(len(view_a), dtype=torch.bool), -torch.inf)
    logits = torch.cat([view_a @ with_gradient(view_b).T / temperature, others], 1)
    return F.cross_entropy(logits, torch.arange(len(view_a)) + first(len(view_a)))


def masked_before_scaling(view_a: Tensor, view_b: Tensor, temperature: float = 0.1) -> Tensor:
    """A right loss in which the gradient of the temperature is NaN, because masked similarities are divided by it."""
    start, n = first(len(view_a)), len(view_a)
    own = torch.arange(n * world()) == torch.arange(n)[:, None] + start
    others = (view_a @ with_gradient(view_a).T).masked_fill(own, -torch.inf)
    logits = torch.cat([view_a @ with_gradient(view_b).T, others], 1) / temperature
    return F.cross_entropy(logits, torch.arange(n) + start)


def steep(view_a: Tensor, view_b: Tensor, temperature: float = 0.1) -> Tensor:
    """A right loss that subtracts the self pair of a row of norm 1: it is strongly curved at other norms."""
    rows, columns = torch.cat([view_a, view_b]), torch.cat([with_gradient(view_a), with_gradient(view_b)])
    positives = (view_a * view_b).sum(1).repeat(2) / temperature
    others = (rows @ columns.T / temperature).exp().sum(1) - torch.exp(torch.ones(()) / temperature)
    return (others.log() - positives).mean()


def offset_without_gather(view_a: Tensor, view_b: Tensor) -> Tensor:
    """The targets have the rank's offset although nothing is gathered: https://github.com/lightly-ai/lightly/pull/1176."""
    return F.cross_entropy(10 * view_a @ view_b.T, torch.arange(len(view_a)) + len(view_a) * rank())


def own_rows_first(view_a: Tensor, view_b: Tensor, temperature: float = 0.1) -> Tensor:
    """This rank's rows precede those of the others, but the targets count them in the order of ranks."""

    def ordered(rows: Tensor) -> Tensor:
        parts = list(with_gradient(rows).chunk(world()))
        return torch.cat([parts.pop(rank()), *parts])

    targets = torch.arange(len(view_a)) + first(len(view_a))
    return clip(view_a, view_b, ordered(view_a), ordered(view_b), 1 / temperature, targets)


def ranking(anchors: Tensor, candidates: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of the anchors' candidates."""
    return F.cross_entropy(10 * anchors @ candidates.T, targets)


def right_ranking(view_a: Tensor, view_b: Tensor, hard_negatives: Tensor) -> Tensor:
    """Gathered positives, then gathered hard negatives."""
    columns = [with_gradient(view_b), with_gradient(hard_negatives.flatten(0, 1))]
    return ranking(view_a, torch.cat(columns), torch.arange(len(view_a)) + first(len(view_a)))


def negatives_as_targets(view_a: Tensor, view_b: Tensor, hard_negatives: Tensor) -> Tensor:
    """Each rank's positives precede its own negatives: https://github.com/huggingface/sentence-transformers/pull/3453."""
    columns = with_gradient(torch.cat([view_b, hard_negatives.flatten(0, 1)]))
    if world() == 1:
        columns = torch.cat([view_b, hard_negatives.flatten(0, 1)])
    return ranking(view_a, columns, torch.arange(len(view_a)) + first(len(view_a)))


def false_negatives(view_a: Tensor, view_b: Tensor, offset: int, margin: float = 0.05) -> Tensor:
    """Leave out negatives that are more similar than the positive minus a margin, but not the protected positives."""
    n, start = len(view_a), first(len(view_a))
    similarities = view_a @ with_gradient(view_b).T
    numbers, columns = torch.arange(n)[:, None], torch.arange(similarities.shape[1])
    positive = similarities[torch.arange(n), start + torch.arange(n)][:, None]
    too_similar = (similarities > positive - margin) & (columns != numbers + offset)
    return F.cross_entropy(10 * similarities.masked_fill(too_similar, -torch.inf), torch.arange(n) + start)


def right_false_negatives(view_a: Tensor, view_b: Tensor) -> Tensor:
    """The protected columns are this rank's."""
    return false_negatives(view_a, view_b, first(len(view_a)))


def protected_without_offset(view_a: Tensor, view_b: Tensor) -> Tensor:
    """The protected columns are rank 0's: https://github.com/huggingface/sentence-transformers/pull/3817."""
    return false_negatives(view_a, view_b, 0)


def protected_without_margin(view_a: Tensor, view_b: Tensor) -> Tensor:
    """The same, but no rank's own positive is left out."""
    return false_negatives(view_a, view_b, 0, margin=0)


def supcon(
    rows: Tensor, columns: Tensor, labels: Tensor, all_labels: Tensor, start: int, self_start: int | None = None
) -> Tensor:
    """SupCon of rows against columns, in which the first row has the number ``start``."""
    mine = torch.arange(len(columns)) == torch.arange(len(rows))[:, None] + (
        start if self_start is None else self_start
    )
    logits = (10 * rows @ columns.T).masked_fill(mine, -torch.inf)
    positives = (labels[:, None] == all_labels) & ~mine
    chances = logits.log_softmax(1).masked_fill(~positives, 0)
    return -(chances.sum(1) / positives.sum(1)).mean()


def right_supcon(embeddings: Tensor, labels: Tensor) -> Tensor:
    """This rank's rows against those of all ranks, gathered with a gradient."""
    return supcon(embeddings, with_gradient(embeddings), labels, with_gradient(labels), first(len(labels)))


def mask_without_offset(embeddings: Tensor, labels: Tensor) -> Tensor:
    """The mask of positives, made from the labels of this rank, is at the columns of rank 0."""
    columns, start, n = with_gradient(embeddings), first(len(labels)), len(labels)
    mine = torch.arange(len(columns)) == torch.arange(n)[:, None] + start
    positives = torch.zeros_like(mine)
    positives[:, :n] = (labels[:, None] == labels) & ~torch.eye(n, dtype=torch.bool)
    chances = (10 * embeddings @ columns.T).masked_fill(mine, -torch.inf).log_softmax(1).masked_fill(~positives, 0)
    return -(chances.sum(1) / positives.sum(1)).mean()


def self_mask_without_offset(embeddings: Tensor, labels: Tensor) -> Tensor:
    """The mask of the rows themselves is at the columns of rank 0."""
    start = first(len(labels))
    return supcon(embeddings, with_gradient(embeddings), labels, with_gradient(labels), start, 0)


def self_pair_is_positive(embeddings: Tensor, labels: Tensor, temperature: float = 0.1) -> Tensor:
    """The self pairs of the positives are removed at the columns of rank 0.

    As before https://github.com/vturrisi/solo-learn/pull/206, which also gathers as ``not_summed``.
    """
    rows = F.normalize(embeddings)
    columns = rows if world() == 1 else OwnShare.apply(rows)  # type: ignore[no-untyped-call]
    same = labels[:, None] == gathered(labels)
    chances = (rows @ columns.T / temperature).exp()
    positive = (chances * same.clone().fill_diagonal_(False)).sum(1)
    return ((positive + (chances * ~same).sum(1)) / positive).log().mean()


def no_self_mask(embeddings: Tensor, labels: Tensor) -> Tensor:
    """The self pairs are left out in one process only."""
    start = first(len(labels)) if world() == 1 else len(labels) * world()
    return supcon(embeddings, with_gradient(embeddings), labels, with_gradient(labels), start)


def views_together(view_a: Tensor, view_b: Tensor, temperature: float = 0.1) -> Tensor:
    """Both views of a rank are gathered at once, but the first views of all ranks are expected before the second ones.

    As before https://github.com/Spijkervet/SimCLR/pull/46.
    """
    rows = with_gradient(torch.cat([view_a, view_b]))
    logits = (rows @ rows.T / temperature).masked_fill(torch.eye(len(rows), dtype=torch.bool), -torch.inf)
    return F.cross_entropy(logits, torch.arange(len(rows)).roll(len(rows) // 2))


def decorrelation(view_a: Tensor, view_b: Tensor, mean: bool = True) -> Tensor:
    """Barlow Twins: columns are normalised with the statistics of the rank, and then gathered.

    As in https://github.com/lightly-ai/lightly/pull/1977. If not ``mean``, the mean of the columns is not subtracted.
    """
    a, b = (with_gradient(F.normalize(rows - mean * rows.mean(0), dim=0)) for rows in (view_a, view_b))
    difference = a.T @ b / world() - torch.eye(a.shape[1])
    return (difference.square() * (0.005 + 0.995 * torch.eye(a.shape[1]))).sum()


def hangs(view_a: Tensor, view_b: Tensor) -> Tensor:
    """Rank 0 does not gather."""
    others = view_b if rank() == 0 else gathered(view_b)
    return (view_a @ others.T).logsumexp(1).mean()


def dies(view_a: Tensor, view_b: Tensor) -> Tensor:
    """The process of rank 1 ends."""
    if rank() == 1:
        os._exit(7)
    return right(view_a, view_b)


def fails(view_a: Tensor, view_b: Tensor) -> Tensor:
    """Rank 1 raises an error."""
    if rank() == 1:
        raise ValueError("no rows on this rank")
    return right(view_a, view_b)
