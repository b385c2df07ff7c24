"""The symmetric form: tiles of unshifted exponentials, each used for its rows and for its columns.

If logits are moderate, the matrix of unshifted exponentials is symmetric, so only tiles on and above the diagonal are
visited. Rows are sorted so that positives are neighbours. Most tiles away from the diagonal then hold only negatives,
and need no mask.

The forward pass saves a few numbers per row and, for smaller batches, the exponentials. The backward pass visits the
same tiles. It multiplies each exponential of a negative by the sum of its two rows' coefficients, and adds up to two
matrix products per tile.

Rows are scaled so that their products t are logits in units of log 2: E_ij = e^s_ij = 2^t_ij. On a CPU, 2^t takes a
quarter of the time of e^s. Values and weights follow from a row's sums of E; see `formulas`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from . import formulas, unshifted
from .device import borrow, give_back
from .formulas import Row, Sums
from .scaling import Saved, Scaled, by_temperature, scale_rows, to_embeddings
from .spec import EPSILON, LN2, AnchorValues, Batch, Gradients, Plan, Rule, Targets


class Classes(NamedTuple):
    """Rows sorted so that positives are neighbours.

    Attributes:
        order: int64 ``[N]``, the row at each sorted position.
        back: int64 ``[N]``, the sorted position of each row.
        labels: ``[N]``, equal numbers for equal labels, in sorted order; in the computing dtype. Unused if ``paired``.
        positives: int64 ``[N]``, the number of positives, in sorted order.
        paired: whether sorted positions 2k and 2k + 1 are known to be each other's only positive.
        ends: for each block of rows, the end of the columns that may hold positives. None if ``paired``, and if values
            may not be read.
    """

    order: Tensor
    back: Tensor
    labels: Tensor
    positives: Tensor
    paired: bool
    ends: list[int] | None


def sort_rows(targets: Targets, plan: Plan, dtype: torch.dtype) -> Classes:
    """Sort the rows of labels or partners ``[N]``, stably."""
    given, order = targets.given, targets.order
    count = given.shape[0]
    place = torch.arange(count, device=given.device)
    paired = targets.kind == "partners"
    if order is None:
        labels, order = torch.sort(torch.minimum(given, place) if paired else given, stable=True)
    else:
        labels = given.index_select(0, order)
    back = torch.empty_like(order)
    back[order] = place
    if paired:
        return Classes(order, back, labels, torch.ones_like(order), True, None)
    first, end = torch.searchsorted(labels, labels), torch.searchsorted(labels, labels, right=True)
    ends = [*end[plan.rows - 1 :: plan.rows].tolist(), count] if plan.reads else None
    return Classes(order, back, first.to(dtype), end - first - 1, False, ends)


class _Tile(NamedTuple):
    """A block of rows and a block of columns, on or to the right of the diagonal.

    Attributes:
        rows: the tile's rows.
        columns: the tile's columns. In the first tile of a block of rows, they begin with the same rows.
        others: the columns that are not among the rows, or None. As anchors, they use the transposed tile.
        square: the number of columns that are among the rows. They form a square on the diagonal, with both directions.
        shape: the tile's shape.
        strides: the tile's strides in a buffer.
        place: the tile's offset in a buffer that holds all tiles.
        masked: whether the tile may hold positives.
    """

    rows: slice
    columns: slice
    others: slice | None
    square: int
    shape: tuple[int, int]
    strides: tuple[int, int]
    place: int
    masked: bool

    def sides(self, first: Tensor, second: Tensor) -> Iterator[tuple[slice, int, Tensor, Tensor]]:
        """Yield for each direction: a slice of anchors, the dimension to sum over, the parts of both matrices."""
        yield self.rows, 1, first, second
        if self.others:
            yield self.others, 0, first[:, self.square :], second[:, self.square :]


def _tiles(count: int, plan: Plan, classes: Classes) -> Iterator[_Tile]:
    """Yield the tiles. Unless rows form pairs, a tile is split where the columns that may hold positives end."""
    place = 0
    for block, start in enumerate(range(0, count, plan.rows)):
        stop = min(start + plan.rows, count)
        end = stop if classes.paired else count if classes.ends is None else classes.ends[block]
        for left in range(start, count, plan.columns):
            right = min(left + plan.columns, count)
            inside = right if classes.paired else min(max(end, left), right)
            for first, last in ((left, inside), (inside, right)):
                if first < last:
                    beyond = stop if first == start else first
                    others = slice(beyond, last) if beyond < last else None
                    shape, strides = (stop - start, last - first), (last - first, 1)
                    sides = slice(start, stop), slice(first, last), others
                    yield _Tile(*sides, beyond - first, shape, strides, place, first < end)
                    place += shape[0] * shape[1]


def _same(classes: Classes, tile: _Tile) -> Tensor:
    """Return a matrix of the tile's size: 1 where the column is a positive of the row, else 0."""
    labels = classes.labels
    # On a CPU, only comparisons of floats that return floats are vectorised.
    positive = torch.eq(labels[tile.rows, None], labels[tile.columns], out=labels.new_empty(tile.shape))
    if tile.square:
        positive.diagonal().zero_()
    return positive


def _clear_pairs(matrix: Tensor) -> None:
    """Set self pairs and partners to 0, in a tile that begins with a square on the diagonal."""
    height, width = matrix.shape
    place = matrix.storage_offset()
    matrix.as_strided((height // 2, 2, 2), (2 * width + 2, width, 1), place).zero_()


def _logits(rows: Tensor, tile: _Tile, plan: Plan, buffer: Tensor) -> Tensor:
    """Return the logits of a tile, at its place in ``buffer``."""
    out = buffer.as_strided(tile.shape, tile.strides, tile.place if plan.keep else 0)
    logits = torch.mm(rows[tile.rows], rows[tile.columns].T, out=out)
    return logits.sub_(plan.shift) if plan.shift else logits


def evaluate(batch: Batch, plan: Plan) -> tuple[AnchorValues, Saved]:
    """Return the values; for the backward pass also the scaled rows, sums and exponentials, in sorted order."""
    rows, factor, power = scale_rows(batch.embeddings, batch.rule, batch.sizes, LN2)
    classes = sort_rows(batch.targets, plan, rows.dtype)
    order, back = classes.order, classes.back
    rows = rows.index_select(0, order)
    if factor.shape[0] > 1:
        factor = factor.index_select(0, order)
    power = None if power is None else power.index_select(0, order)
    count = rows.shape[0]
    height, width = min(plan.rows, count), min(plan.columns, count)
    entries = count * (count + height) // 2 if plan.keep else height * width
    buffer = borrow("kept" if plan.keep else "logits", rows, entries)
    row = _sums(rows, classes, plan, batch.rule, buffer)
    if not plan.keep:
        give_back("logits", buffer)
    if plan.shift:
        formulas.check_sums(row.sums, None if classes.paired else classes.positives, count)
    values = formulas.value(batch.rule, cast(Row, row)).index_select(0, back)
    positives = classes.positives if classes.paired else classes.positives.index_select(0, back)
    negatives = count - 1 - positives
    valid = formulas.counted(batch, positives, negatives)
    values = values if valid is None else torch.where(valid, values, 0.0)
    saved = Saved(Scaled(rows, factor, power), row.sums, buffer if plan.keep else None, classes, valid=valid)
    return AnchorValues(values, positives, negatives), saved


def _sums(rows: Tensor, classes: Classes, plan: Plan, rule: Rule, buffer: Tensor) -> unshifted._ExtremeRow:
    """Sum the exponentials of every tile; under "one_positive" and "epsilon", visit the masked tiles a second time.

    Exponentials are written to ``buffer``: 0 at self pairs and, for rows that form pairs, at partners.
    """
    neg = rows.new_zeros(rows.shape[0])
    none = neg.new_empty(0)
    if classes.paired:
        linear = torch.linalg.vecdot(rows[0::2], rows[1::2]).sub_(plan.shift)
        lin = torch.stack((linear, linear), 1).view(-1)
        pos, itself = lin.exp2(), none
    else:
        pos, lin = torch.zeros_like(neg), torch.zeros_like(neg)
        itself = torch.linalg.vecdot(rows, rows).sub_(plan.shift)
    for tile in _tiles(rows.shape[0], plan, classes):
        logits = _logits(rows, tile, plan, buffer)
        if tile.masked and not classes.paired:
            positive = _same(classes, tile)
            for place, lacking, part, mask in tile.sides(logits, positive):
                lin[place].add_(((part - itself[place].unsqueeze(lacking)) * mask).sum(lacking))
            exponentials = logits.exp2_()
            if tile.square:
                exponentials.diagonal().zero_()
            of_positives = exponentials * positive
            of_negatives = exponentials - of_positives
            for place, lacking, first, second in tile.sides(of_positives, of_negatives):
                pos[place].add_(first.sum(lacking))
                neg[place].add_(second.sum(lacking))
            continue
        exponentials = logits.exp2_()
        if tile.masked:
            _clear_pairs(exponentials)
        for place, lacking, part, _ in tile.sides(exponentials, exponentials):
            neg[place].add_(part.sum(lacking))
    sums = Sums(neg, pos, none, none, none)
    if rule.terms == "epsilon":  # no row is more similar to a row than itself
        guard = torch.linalg.vecdot(rows, rows).exp2_().mul_(EPSILON)
        guarded = pos + guard * classes.positives
        # At least 1: the sums of a batch of one row do not count, but must not be 0.
        negatives = max(rows.shape[0] - 1, 1) - classes.positives
        sums = Sums(neg + guard * negatives, guarded, guard / guarded, pos / guarded, guard)
    if classes.paired:
        return unshifted._ExtremeRow(None, none, sums, lin, itself)
    if rule.denominator == "one_positive" or rule.terms == "epsilon":
        sums = _own_sums(rows, classes, plan, rule, sums)
    number = classes.positives.to(rows.dtype).clamp_(min=1)
    return unshifted._ExtremeRow(number, number, sums, lin, itself)


def _own_sums(rows: Tensor, classes: Classes, plan: Plan, rule: Rule, sums: Sums) -> Sums:
    """Return the sums over positives that need every row's sum over its negatives."""
    over, boost = sums.neg.log2(), sums.boost()
    missed, first, second = (torch.zeros_like(over) for _ in range(3))
    for tile in _tiles(rows.shape[0], plan, classes):
        if not tile.masked:
            continue
        logits = rows[tile.rows] @ rows[tile.columns].T
        positive = _same(classes, tile)
        for place, across, part, mask in tile.sides(logits, positive):
            if rule.terms == "epsilon":
                neg, pos, guard = (t[place].unsqueeze(across) for t in (sums.neg, sums.pos, sums.second))
                rest, guarded = formulas.rest_over(part.exp2() * mask, guard, neg, pos)
                first[place].add_(rest.log1p_().mul_(mask).sum(across))
                missed[place].add_((mask * guard).div_(guarded).sum(across))
                continue
            against = (over[place].unsqueeze(across) - part) * LN2
            miss = torch.sigmoid(against)
            missed[place].add_((miss * mask).sum(across))
            if rule.terms == "out":
                first[place].sub_((F.logsigmoid(against.neg_()) * mask).sum(across))
                continue
            # A row's boost is only valid for its positives; other products could overflow.
            exponentials = part.exp2()
            whole = exponentials + sums.neg[place].unsqueeze(across)
            ratio = exponentials * mask * boost[place].unsqueeze(across) / whole
            first[place].add_(ratio.sum(across))
            second[place].add_(ratio.mul_(miss).sum(across))
    return Sums(sums.neg, sums.pos, missed, first, sums.second if rule.terms == "epsilon" else second)


def differentiate(grad: Tensor, size: float | Tensor, batch: Batch, plan: Plan, saved: Saved) -> Gradients:
    """Return the gradients with respect to embeddings and temperature, multiplied by ``size``.

    ``grad`` ``[N]`` must be 0 for every row that `formulas.counted` leaves out.
    """
    rule, rows = batch.rule, saved.scaled.rows
    classes = saved.classes or sort_rows(batch.targets, plan, rows.dtype)
    sums = Sums(*saved.stats[: len(Sums._fields)])
    number = None if classes.paired else classes.positives.to(grad.dtype)
    negatives = rows.shape[0] - 1 - classes.positives if rule.terms == "epsilon" else None
    weights = formulas.weights(rule, grad.index_select(0, classes.order), sums, number, negatives)
    pull = torch.zeros_like(rows)
    count = rows.shape[0]
    largest = min(plan.rows, count) * min(plan.columns, count)
    buffer = borrow("logits", rows, largest) if saved.kept is None else saved.kept
    combining, again = borrow("weights", rows, largest), replace(plan, keep=False)
    for tile in _tiles(count, plan, classes):
        own, across = rows[tile.rows], rows[tile.columns]
        negative = weights.negative
        combined = torch.add(
            negative[tile.rows, None], negative[tile.columns], out=combining.as_strided(tile.shape, tile.strides)
        )
        if saved.kept is None:
            exponentials = _logits(rows, tile, again, buffer).exp2_()
        else:
            exponentials = buffer.as_strided(tile.shape, tile.strides, tile.place)
        if tile.masked and not classes.paired:
            _weigh(combined, exponentials, tile, classes, sums, weights, rule)
        else:
            combined.mul_(exponentials)
            if tile.masked and saved.kept is None:
                _clear_pairs(combined)
        pull[tile.rows].addmm_(combined, across)
        if tile.others:
            pull[tile.others].addmm_(combined[:, tile.square :].T, own)
    give_back("weights", combining)
    if saved.kept is None:
        give_back("logits", buffer)
    if classes.paired:
        both = weights.level.view(-1, 2).sum(1)[:, None]
        pull[0::2].addcmul_(both, rows[1::2])
        pull[1::2].addcmul_(both, rows[0::2])
    if rule.terms == "epsilon" and formulas.uses_largest(rule):
        # The largest logit of a row is that of its self pair, which depends only on the temperature.
        pull.addcmul_((2 * weights.slope).unsqueeze(1), rows)
    learned = by_temperature(pull, rows, size, rule, LN2)
    gradient = to_embeddings(pull, saved.scaled, rule, size, batch.embeddings.dtype, LN2)
    return gradient.index_select(0, classes.back), None, learned, None


def _weigh(
    combined: Tensor,
    exponentials: Tensor,
    tile: _Tile,
    classes: Classes,
    sums: Sums,
    weights: formulas.Weights,
    rule: Rule,
) -> None:
    """Turn the coefficients of a tile's negatives into the weights of all its pairs."""
    positive = _same(classes, tile)
    square = tile.square
    # A row's coefficient is only valid for its negatives; other products could overflow.
    combined.mul_(torch.addcmul(exponentials, exponentials, positive, value=-1))
    if square:
        combined.diagonal().zero_()
    for place, lacking, part, mask in tile.sides(exponentials, positive):
        level = weights.level[place].unsqueeze(lacking)
        if rule.terms == "epsilon":
            neg, pos, guard = (t[place].unsqueeze(lacking) for t in (sums.neg, sums.pos, sums.second))
            own = part * mask
            rest, _ = formulas.rest_over(own, guard, neg, pos)
            own *= (classes.positives[place].unsqueeze(lacking) - 1 - rest).mul_(level)
        elif rule.denominator == "one_positive":
            neg = sums.neg[place].unsqueeze(lacking)
            # Adding 1 outside the positives keeps the quotient finite.
            whole = part + neg + (1 - mask)
            own = level * neg / whole
            if rule.terms == "in":
                own *= part * mask * sums.boost()[place].unsqueeze(lacking) / whole
        else:
            # A row's slope is only valid for its positives; other products could overflow.
            own = torch.addcmul(level, part * mask, weights.slope[place].unsqueeze(lacking))
        own *= mask
        if lacking:
            combined += own
            if square:
                combined[:, :square] += own[:, :square].T
        else:
            combined[:, square:].add_(own)
