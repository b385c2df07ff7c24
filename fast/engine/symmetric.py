"""The symmetric form: tiles of unshifted exponentials, each of which serves its rows and its columns.

Where the largest logit is known to be moderate, e^s needs no shift, and the matrix of exponentials is symmetric: only
tiles on and above the diagonal are visited. Rows are sorted so that positives are neighbours; tiles away from the
diagonal then hold negatives alone and need no mask. Forward leaves a few numbers per row; backward visits the same
tiles, multiplies each exponential by the sum of its two rows' coefficients, and adds two products of matrices.

The rows are scaled so that their products t are logits in units of log 2: a CPU takes a quarter of the time for 2^t.
With E_ij = e^s_ij = 2^t_ij, n positives per row and m negatives, the sums of a row over its negatives and positives,

    neg = sum E,   pos = sum E,   lin = sum (t - t_ii) over positives,

give every value, and every weight dL_i/ds_ij: a_i E_ij for a negative, a function of E_ij and the row for a positive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .pairs import are_pairs
from .spec import LN2, Plan, Rule, Targets
from .workspace import borrow, give_back


class Classes(NamedTuple):
    """Rows sorted so that each other's positives are neighbours.

    Attributes:
        order: int64 ``[N]``, the row that stands at each sorted place.
        back: int64 ``[N]``, the place where each row stands once sorted.
        labels: int64 ``[N]``, sorted.
        positives: int64 ``[N]``, the size of P(i), in sorted order.
        paired: whether the rows are known to be pairs, so that places 2k and 2k + 1 are each other's one positive.
        ends: the first and the last label of each block of rows, to tell which tiles hold positives; None where they
            cannot be read, or need not be.
    """

    order: Tensor
    back: Tensor
    labels: Tensor
    positives: Tensor
    paired: bool
    ends: tuple[list[int], list[int]] | None

    def may_match(self, rows: int, columns: int) -> bool:
        """Whether a block of rows may have positives in a later block or in those behind it."""
        return not self.paired and (self.ends is None or self.ends[0][columns] <= self.ends[1][rows])


class Stats(NamedTuple):
    """What the forward pass leaves of each row, ``[N]`` each, in sorted order.

    The last three serve the denominators that each positive has for itself, with r = E / (E + neg) its ratio; they are
    empty otherwise.

    Attributes:
        neg: sum over negatives of E.
        pos: sum over positives of E.
        lin: sum over positives of t - itself; for pairs, of t.
        itself: the row's product with itself, a constant near its largest t; empty for pairs.
        missed: sum over positives of 1 - r.
        first: sum over positives of -log r; inside the logarithm, of r times `_boost`.
        second: inside the logarithm, sum over positives of r (1 - r) times `_boost`.
    """

    neg: Tensor
    pos: Tensor
    lin: Tensor
    itself: Tensor
    missed: Tensor
    first: Tensor
    second: Tensor


def sort_rows(targets: Targets, plan: Plan) -> Classes:
    """Sort the rows of labels or partners ``[N]``, stably."""
    given = targets.given
    count = given.shape[0]
    place = torch.arange(count, device=given.device)
    paired = targets.kind == "partners"
    labels, order = torch.sort(torch.minimum(given, place) if paired else given, stable=True)
    back = torch.empty_like(order)
    back[order] = place
    if plan.reads and not paired and count % 2 == 0:
        paired = are_pairs(labels)
    if paired:
        return Classes(order, back, labels, torch.ones_like(order), True, None)
    first = torch.searchsorted(labels, labels)
    positives = torch.searchsorted(labels, labels, right=True) - first - 1
    ends = None
    if plan.reads:
        last = torch.tensor([stop - 1 for _, stop in blocks(count, plan.rows)])
        ends = labels[:: plan.rows].tolist(), labels[last].tolist()
    return Classes(order, back, labels, positives, False, ends)


class _Tile(NamedTuple):
    """Some rows against some columns from the diagonal on.

    Attributes:
        rows: of the tile.
        columns: of the tile; those of the first tile of some rows begin with these rows themselves.
        others: the columns that are not among the rows. To their left lies a square on the diagonal, which holds both
            directions of each pair; the others are served by the tile's transpose.
        square: how many columns lie to the left of the others.
        shape: of the tile.
        place: where the tile begins in a buffer that holds them all.
    """

    rows: slice
    columns: slice
    others: slice | None
    square: int
    shape: tuple[int, int]
    place: int

    def of(self, buffer: Tensor, place: int = 0) -> Tensor:
        """Return a flat buffer's room for the tile."""
        return buffer.as_strided(self.shape, (self.shape[1], 1), place)

    def right(self, matrix: Tensor) -> Tensor:
        """Return the part of the tile that is not the square on the diagonal."""
        return matrix[:, self.square :] if self.square else matrix


def _every_tile(count: int, rows: int, columns: int) -> Iterator[_Tile]:
    place = 0
    for start, stop in blocks(count, rows):
        for first in range(start, count, columns):
            last = min(first + columns, count)
            beyond = stop if first == start else first
            others = slice(beyond, last) if beyond < last else None
            shape = (stop - start, last - first)
            yield _Tile(slice(start, stop), slice(first, last), others, beyond - first, shape, place)
            place += shape[0] * shape[1]


@lru_cache(maxsize=32)
def _few_tiles(count: int, rows: int, columns: int) -> tuple[_Tile, ...]:
    return tuple(_every_tile(count, rows, columns))


def _tiles(count: int, plan: Plan) -> Iterable[_Tile]:
    """Return the tiles; where they are few, making them anew would cost as much as a small one."""
    few = count <= 8 * plan.rows
    return (_few_tiles if few else _every_tile)(count, plan.rows, plan.columns)


def _masked(tile: _Tile, classes: Classes, plan: Plan) -> bool:
    """Whether the tile may hold a positive, or a row's pair with itself."""
    return tile.square > 0 or classes.may_match(tile.rows.start // plan.rows, tile.columns.start // plan.rows)


def _room(rows: Tensor, plan: Plan) -> int:
    """Return the entries of the largest tile."""
    return min(plan.rows, rows.shape[0]) * min(plan.columns, rows.shape[0])


def blocks(count: int, rows: int) -> list[tuple[int, int]]:
    """Return where each block of rows starts and where it stops."""
    return [(start, min(start + rows, count)) for start in range(0, count, rows)]


def kept_size(count: int, plan: Plan) -> int:
    """Return how many exponentials the forward pass keeps."""
    return sum((stop - start) * (count - start) for start, stop in blocks(count, plan.rows))


def _same(classes: Classes, tile: _Tile, dtype: torch.dtype) -> Tensor:
    """Return 1 where row and column are each other's positives, else 0, as a matrix of the tile's size."""
    labels = classes.labels
    positive = (labels[tile.rows, None] == labels[None, tile.columns]).to(dtype)
    if tile.square:
        positive.diagonal().zero_()
    return positive


def _add_sums(into: Tensor, tile: _Tile, matrix: Tensor) -> None:
    """Add a tile's row sums to its rows, and its column sums to the columns that its transpose serves."""
    into[tile.rows].add_(matrix.sum(1))
    if tile.others:
        into[tile.others].add_(tile.right(matrix).sum(0))


def _clear_pairs(matrix: Tensor) -> None:
    """Put 0 where sorted pairs meet themselves and each other, in a tile whose left is a square on the diagonal."""
    height, width = matrix.shape
    place = matrix.storage_offset()
    matrix.as_strided((height // 2, 2, 2), (2 * width + 2, width, 1), place).zero_()


def sums(rows: Tensor, classes: Classes, plan: Plan, rule: Rule, kept: Tensor | None) -> Stats:
    """Visit every tile once and sum; a second time the masked ones, where a positive's own denominator needs it.

    Args:
        rows: scaled rows ``[N, D]``, sorted.
        classes: their order and labels.
        plan: size of the tiles.
        rule: the formula.
        kept: room for the exponentials, flat, or None. What is kept is 0 where a row meets itself, and in pairs where
            it meets its partner.
    """
    neg = rows.new_zeros(rows.shape[0])
    if classes.paired:
        linear = torch.linalg.vecdot(rows[0::2], rows[1::2])
        lin = torch.stack((linear, linear), 1).view(-1)
        pos = lin.exp2()
        itself = neg.new_empty(0)
    else:
        pos, lin = torch.zeros_like(neg), torch.zeros_like(neg)
        itself = torch.linalg.vecdot(rows, rows)
    turned = rows.T
    scratch = borrow("logits", rows, _room(rows, plan)) if kept is None else kept
    for tile in _tiles(rows.shape[0], plan):
        room = tile.of(scratch, 0 if kept is None else tile.place)
        logits = torch.mm(rows[tile.rows], turned[:, tile.columns], out=room)
        masked = _masked(tile, classes, plan)
        if masked and not classes.paired:
            positive = _same(classes, tile, rows.dtype)
            for place, lacking, part, mask in _sides(tile, logits, positive):
                lin[place].add_(((part - itself[place].unsqueeze(lacking)) * mask).sum(lacking))
            exponentials = logits.exp2_()
            if tile.square:
                exponentials.diagonal().zero_()
            of_positives = exponentials * positive
            _add_sums(pos, tile, of_positives)
            _add_sums(neg, tile, exponentials - of_positives)
            continue
        exponentials = logits.exp2_()
        if masked:
            _clear_pairs(exponentials)
        _add_sums(neg, tile, exponentials)
    if kept is None:
        give_back("logits", scratch)
    stats = Stats(neg, pos, lin, itself, *(neg.new_empty(0),) * 3)
    if _own_denominator(rule, classes):
        return _own_denominators(rows, classes, plan, rule, stats)
    return stats


def _own_denominator(rule: Rule, classes: Classes) -> bool:
    """Whether positives of one row have different denominators; the one positive of a pair is in everyone's."""
    return rule.terms in ("out", "in") and rule.denominator == "one_positive" and not classes.paired


def _own_denominators(rows: Tensor, classes: Classes, plan: Plan, rule: Rule, stats: Stats) -> Stats:
    """Visit the masked tiles once more, now that every row's sum over its negatives is known."""
    over, boost = stats.neg.log2(), _boost(stats)
    missed, first, second = (torch.zeros_like(over) for _ in range(3))
    for tile in _tiles(rows.shape[0], plan):
        if not _masked(tile, classes, plan):
            continue
        logits = rows[tile.rows] @ rows[tile.columns].T
        positive = _same(classes, tile, rows.dtype)
        for place, across, part, mask in _sides(tile, logits, positive):
            against = (over[place].unsqueeze(across) - part) * LN2
            miss = torch.sigmoid(against)
            missed[place].add_((miss * mask).sum(across))
            if rule.terms == "out":
                first[place].sub_((F.logsigmoid(against.neg_()) * mask).sum(across))
                continue
            # A boost is fit for the exponentials of its row's positives alone.
            exponentials = part.exp2()
            whole = exponentials + stats.neg[place].unsqueeze(across)
            ratio = exponentials * mask * boost[place].unsqueeze(across) / whole
            first[place].add_(ratio.sum(across))
            second[place].add_(ratio.mul_(miss).sum(across))
    return stats._replace(missed=missed, first=first, second=second)


def _sides(tile: _Tile, matrix: Tensor, mask: Tensor) -> Iterator[tuple[slice, int, Tensor, Tensor]]:
    """Yield whom a tile serves as anchors: their place, the dimension they lack, and the part of matrix and mask."""
    yield tile.rows, 1, matrix, mask
    if tile.others:
        yield tile.others, 0, tile.right(matrix), tile.right(mask)


def _boost(stats: Stats) -> Tensor:
    """Return a factor for a row's ratios: where all its positives are far below its negatives they would underflow."""
    return torch.where(stats.pos > 0, stats.neg / stats.pos, 1.0).clamp(min=1)


def values(stats: Stats, positives: Tensor, rule: Rule, classes: Classes) -> Tensor:
    """Return every row's value ``[N]``; meaningless where the rule gives a row nothing to sum over.

    Args:
        stats: the sums.
        positives: ``[N]`` in the computing dtype.
        rule: the formula.
        classes: the rows' order and labels.
    """
    neg, pos, lin = stats.neg, stats.pos, stats.lin
    if classes.paired:
        return (neg.log2() - lin) * LN2 if rule.denominator == "only_negatives" else _log_of_one_plus_ratio(neg, pos)
    positives = positives.clamp(min=1)
    if _own_denominator(rule, classes):
        if rule.terms == "out":
            return stats.first / positives
        # The mean of the ratios is 1 - missed, which says nothing once it rounds to 1; the other says nothing before.
        missed = stats.missed / positives
        return torch.where(missed < 0.5, -torch.log1p(-missed), (positives * _boost(stats) / stats.first).log())
    linear = lin * LN2
    own = torch.where(positives == 1, linear, _log_relative(pos, stats.itself))
    if rule.denominator == "only_negatives":
        others = _log_relative(neg, stats.itself)
        return others - (own - positives.log() if rule.terms == "in" else linear / positives)
    value = _log_of_one_plus_ratio(neg, pos)
    return value + (positives.log() if rule.terms == "in" else own - linear / positives)


def _log_relative(total: Tensor, constant: Tensor) -> Tensor:
    """Return log(total / 2^constant), so that logarithms near the constant cancel before they are rounded."""
    relative = total * torch.exp2(-constant)
    return torch.where(relative > 1 / _LARGE, relative.log(), total.log() - constant * LN2)


def _log_of_one_plus_ratio(neg: Tensor, pos: Tensor) -> Tensor:
    """Return log(1 + neg / pos)."""
    ratio = neg / pos
    return torch.where(ratio < _LARGE, ratio.log1p(), neg.log() - pos.log())


_LARGE = 2.0**100
"""Quotients from its reciprocal up to here have lost no digit to the range of float32."""


class Weights(NamedTuple):
    """The derivatives of ``sum_i grad_i L_i`` by the logits of each row, as coefficients ``[N]``.

    A negative weighs ``negative * E``. A positive weighs ``slope * E + level``; where each positive has its own
    denominator ``level * (1 - r)``, or inside the logarithm ``level * r (1 - r) * boost``.
    """

    negative: Tensor
    slope: Tensor
    level: Tensor


def weights(grad: Tensor, stats: Stats, positives: Tensor, rule: Rule, classes: Classes) -> Weights:
    """Return the coefficients of each row's weights.

    Args:
        grad: ``[N]``, 0 for every row that is no anchor or has nothing to sum over.
        stats: the sums.
        positives: ``[N]`` in the computing dtype.
        rule: the formula.
        classes: the rows' order and labels.
    """
    neg, pos = stats.neg, stats.pos
    if classes.paired and rule.denominator != "only_negatives":
        negative = grad / (neg + pos)
        return Weights(negative, negative, -negative * neg)
    zero = torch.zeros_like(grad)
    alone = positives <= 1
    positives = positives.clamp(min=1)
    per_positive = torch.where(alone, 0.0, grad / pos)
    if _own_denominator(rule, classes):
        if rule.terms == "out":
            return Weights(torch.where(neg > 0, grad * stats.missed / positives / neg, 0.0), zero, -grad / positives)
        level = torch.where(stats.first > 0, grad / stats.first, 0.0)
        return Weights(torch.where(neg > 0, level * stats.second / neg, 0.0), zero, -level)
    if rule.denominator == "only_negatives":
        negative = torch.where(neg > 0, grad / neg, 0.0)
        if rule.terms == "in":
            return Weights(negative, -per_positive, torch.where(alone, -grad, 0.0))
        return Weights(negative, zero, -grad / positives)
    total = neg + pos
    missed = neg / total
    if rule.terms == "in":
        return Weights(grad / total, -per_positive * missed, torch.where(alone, -grad * missed, 0.0))
    return Weights(
        grad / total, torch.where(alone, 0.0, grad / total), torch.where(alone, -grad * missed, -grad / positives)
    )


def pull(
    grad: Tensor,
    rows: Tensor,
    classes: Classes,
    stats: Stats,
    positives: Tensor,
    plan: Plan,
    rule: Rule,
    kept: Tensor | None,
) -> Tensor:
    """Return the gradient ``[N, D]`` by the scaled rows of ``sum_i grad_i L_i``.

    Args:
        grad: ``[N]`` in sorted order, 0 for every row that is no anchor or has nothing to sum over.
        rows: scaled rows ``[N, D]``, sorted.
        classes: their order and labels.
        stats: what the forward pass left.
        positives: ``[N]`` in the computing dtype.
        plan: size of the tiles.
        rule: the formula.
        kept: the exponentials that the forward pass kept, flat, or None.
    """
    weight = weights(grad, stats, positives, rule, classes)
    negative = weight.negative
    boost = _boost(stats) if rule.terms == "in" else grad
    out = torch.zeros_like(rows)
    turned = rows.T
    room = _room(rows, plan)
    scratch = borrow("logits", rows, room) if kept is None else kept
    combining = borrow("weights", rows, room)
    for tile in _tiles(rows.shape[0], plan):
        own, across = rows[tile.rows], rows[tile.columns]
        combined = torch.add(negative[tile.rows, None], negative[tile.columns], out=tile.of(combining))
        if kept is None:
            exponentials = torch.mm(own, turned[:, tile.columns], out=tile.of(scratch)).exp2_()
        else:
            exponentials = tile.of(scratch, tile.place)
        masked = _masked(tile, classes, plan)
        if masked and not classes.paired:
            _weigh(combined, exponentials, tile, classes, stats, weight, rule, boost)
        else:
            combined.mul_(exponentials)
            if masked and kept is None:
                _clear_pairs(combined)
        out[tile.rows].addmm_(combined, across)
        if tile.others:
            out[tile.others].addmm_(tile.right(combined).T, own)
    give_back("weights", combining)
    if kept is None:
        give_back("logits", scratch)
    if classes.paired:
        both = weight.level.view(-1, 2).sum(1)[:, None]
        out[0::2].addcmul_(both, rows[1::2])
        out[1::2].addcmul_(both, rows[0::2])
    return out


def _weigh(
    combined: Tensor,
    exponentials: Tensor,
    tile: _Tile,
    classes: Classes,
    stats: Stats,
    weight: Weights,
    rule: Rule,
    boost: Tensor,
) -> None:
    """Turn the coefficients of a tile's negatives into the weights of all its pairs."""
    positive = _same(classes, tile, combined.dtype)
    square = tile.square
    # A coefficient is fit for the exponentials of its row's negatives alone: the product might overflow elsewhere.
    combined.mul_(torch.addcmul(exponentials, exponentials, positive, value=-1))
    if square:
        combined.diagonal().zero_()
    for place, lacking, part, mask in _sides(tile, exponentials, positive):
        level = weight.level[place].unsqueeze(lacking)
        if _own_denominator(rule, classes):
            neg = stats.neg[place].unsqueeze(lacking)
            # Where there is no positive a 1 keeps the quotient finite.
            whole = part + neg + (1 - mask)
            own = level * neg / whole
            if rule.terms == "in":
                own *= part * mask * boost[place].unsqueeze(lacking) / whole
        else:
            # A slope is fit for the exponentials of its row's positives alone.
            own = torch.addcmul(level, part * mask, weight.slope[place].unsqueeze(lacking))
        own *= mask
        if lacking:
            combined += own
            if square:
                combined[:, :square] += own[:, :square].T
        else:
            tile.right(combined).add_(own)
