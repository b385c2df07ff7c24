"""The form of small batches of pairs: one matrix, each row with one positive, in as few operations as it takes.

The rows are scaled so that their products t are logits in units of log 2: a CPU takes a quarter of the time for 2^t.
With E_ij = e^s_ij = 2^t_ij, unshifted, p the row's one positive and ``neg`` the sum over all others, a value is
log(1 + neg / E_ip); its derivative by s_ij is E_ij / (neg + E_ip), and by s_ip it is -neg / (neg + E_ip). What takes
the time at a few hundred rows is the number of operations, not their size: nothing is sorted, and both directions of a
pair are put into the one matrix that meets the rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .spec import Targets
from .workspace import borrow, give_back


class Stats(NamedTuple):
    """What the forward pass leaves of each row, ``[N]`` each.

    Attributes:
        neg: the sum over all but the row and its positive of E.
        pos: E of the positive.
    """

    neg: Tensor
    pos: Tensor


def partners_of(targets: Targets) -> Tensor | None:
    """Return each row's one positive, int64 ``[N]``, or None where labels ``[N]`` are not those of pairs.

    Labels are read.
    """
    given = targets.given
    if targets.kind == "partners":
        return given
    if given.shape[0] % 2:
        return None
    labels, order = torch.sort(given)
    if not are_pairs(labels):
        return None
    order = order.view(-1, 2)
    partners = torch.empty_like(given)
    partners[order] = order.flip(1)
    return partners


def are_pairs(labels: Tensor) -> bool:
    """Whether sorted labels ``[N]``, N even, each stand exactly twice. Values are read."""
    first, second = labels.view(-1, 2).unbind(1)
    return torch.equal(first, second) and not bool((first[1:] == first[:-1]).any())


def sums(rows: Tensor, partners: Tensor, kept: Tensor | None) -> Stats:
    """Return the sums of scaled rows ``[N, D]``; ``kept`` is room for the exponentials, flat, or None."""
    count = rows.shape[0]
    column = partners[:, None]
    room = borrow("logits", rows, count * count) if kept is None else kept
    logits = torch.mm(rows, rows.T, out=room.as_strided((count, count), (count, 1)))
    pos = logits.gather(1, column).view(-1).exp2_()
    neg = _exponentials(logits, column).sum(1)
    if kept is None:
        give_back("logits", room)
    return Stats(neg, pos)


def _exponentials(logits: Tensor, column: Tensor) -> Tensor:
    """Overwrite logits by their exponentials, 0 for the row itself and for its positive, which ``column`` tells."""
    logits.exp2_().diagonal().zero_()
    return logits.scatter_(1, column, 0.0)


def values(stats: Stats) -> Tensor:
    """Return every row's value ``[N]``."""
    return (stats.neg / stats.pos).log1p_()


def pull(grad: Tensor, rows: Tensor, partners: Tensor, stats: Stats, kept: Tensor | None) -> Tensor:
    """Return the gradient ``[N, D]`` by the scaled rows of ``sum_i grad_i L_i``.

    Args:
        grad: ``[N]``.
        rows: scaled rows ``[N, D]``.
        partners: int64 ``[N]``.
        stats: what the forward pass left.
        kept: the exponentials that it kept, flat, or None.
    """
    count = rows.shape[0]
    shape, strides = (count, count), (count, 1)
    column = partners[:, None]
    combining = borrow("weights", rows, count * count)
    exponentials = _exponentials(rows @ rows.T, column) if kept is None else kept.as_strided(shape, strides)
    negative = grad / (stats.neg + stats.pos)
    level = negative * stats.neg
    combined = torch.add(negative[:, None], negative, out=combining.as_strided(shape, strides)).mul_(exponentials)
    combined.scatter_(1, column, -(level + level[partners])[:, None])
    found = combined @ rows
    give_back("weights", combining)
    return found
