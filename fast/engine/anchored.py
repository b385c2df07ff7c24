"""The anchored form: panels of unshifted exponentials whose rows are the anchors only.

It is used if at most half of the rows are anchors; `symmetric` would also compute the pairs of the other rows.

Anchors and columns are both sorted by label. The positives of a panel's anchors then lie in one band of columns, and
only this band is masked. The rest is as in `symmetric`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor

from . import formulas, symmetric, unshifted
from .device import borrow, give_back
from .formulas import Row, Sums
from .scaling import Saved, Scaled, by_temperature, scale_rows, to_embeddings
from .spec import LN2, AnchorValues, Batch, Gradients, Plan, Targets
from .symmetric import Classes
from .unshifted import NONE

MOST_MARKS = 2**19
"""Largest size of all bands together for which the matrices of positives are kept for the backward pass."""


class _Band(NamedTuple):
    """The anchors of a panel, and the columns that may hold their positives.

    Attributes:
        rows: the panel's anchors, a slice of the sorted anchors.
        columns: the band, a slice of the sorted rows.
        own: int64 ``[b, 1]``, the position of each anchor among the sorted rows.
        positive: ``[b, width of the band]``, 1 for positives, else 0; None: not stored.
    """

    rows: slice
    columns: slice
    own: Tensor
    positive: Tensor | None = None


class _Anchors(NamedTuple):
    """The sorted rows, and the anchors among them.

    Attributes:
        classes: the sorted rows. The label of a row is the position of the first row of its class.
        places: int64 ``[n]``, the positions of the anchors.
        bands: the panels.
    """

    classes: Classes
    places: Tensor
    bands: list[_Band]


def _anchors(batch: Batch, plan: Plan, dtype: torch.dtype) -> _Anchors:
    targets = batch.targets
    if targets.kind == "partners":
        number = torch.arange(len(targets.given), device=targets.given.device)
        targets = Targets("labels", torch.minimum(targets.given, number))
    classes = symmetric.sort_rows(targets, plan, dtype)
    places = cast(Tensor, batch.anchors).index_select(0, classes.order).nonzero().view(-1)
    first = classes.labels.index_select(0, places).to(torch.int64)
    ends = first + classes.positives.index_select(0, places) + 1
    starts, bands = range(0, len(places), plan.rows), []
    lows, highs = first[:: plan.rows].tolist(), [*ends[plan.rows - 1 :: plan.rows].tolist(), *ends[-1:].tolist()]
    for start, low, high in zip(starts, lows, highs, strict=False):
        rows = slice(start, min(start + plan.rows, len(places)))
        bands.append(_Band(rows, slice(low, high), places[rows, None]))
    if sum(len(band.own) * (band.columns.stop - band.columns.start) for band in bands) <= MOST_MARKS:
        bands = [band._replace(positive=_positives(classes.labels, band)) for band in bands]
    return _Anchors(classes, places, bands)


def _positives(labels: Tensor, band: _Band) -> Tensor:
    """Return `_Band.positive`; ``labels`` are those of all rows, sorted."""
    if band.positive is not None:
        return band.positive
    of_anchors, of_columns = labels.index_select(0, band.own.view(-1)), labels[band.columns]
    # On a CPU, only comparisons of floats that return floats are vectorised.
    positive = torch.eq(of_anchors[:, None], of_columns, out=labels.new_empty((len(of_anchors), len(of_columns))))
    return positive.scatter_(1, band.own - band.columns.start, 0.0)


def _products(mine: Tensor, rows: Tensor, bands: list[_Band], buffer: Tensor, *, keep: bool) -> Iterator[Tensor]:
    """Yield the products of each panel's anchors with all columns, in the same memory unless ``keep``."""
    width, turned = len(rows), rows.T
    for band in bands:
        shape = len(band.own), width
        out = buffer.as_strided(shape, (width, 1), band.rows.start * width * keep)
        yield torch.mm(mine[band.rows], turned, out=out)


def evaluate(batch: Batch, plan: Plan) -> tuple[AnchorValues, Saved]:
    """Return the values; for the backward pass also the scaled rows, sums and exponentials, in sorted order."""
    rows, factor, power = scale_rows(batch.embeddings, batch.rule, batch.sizes, LN2)
    anchors = _anchors(batch, plan, rows.dtype)
    (order, back), places, count = anchors.classes[:2], anchors.places, len(rows)
    rows = rows.index_select(0, order)
    factor = factor if len(factor) == 1 else factor.index_select(0, order)
    power = None if power is None else power.index_select(0, order)
    mine = rows.index_select(0, places)
    buffer = borrow("kept" if plan.keep else "logits", rows, (len(mine) if plan.keep else plan.rows) * count)
    neg, pos, lin = (rows.new_empty(len(mine)) for _ in range(3))
    itself = torch.linalg.vecdot(mine, mine)
    products = _products(mine, rows, anchors.bands, buffer, keep=plan.keep)
    for band, logits in zip(anchors.bands, products, strict=True):
        here, (low, high) = band.rows, (band.columns.start, band.columns.stop)
        positive = _positives(anchors.classes.labels, band)
        part = logits[:, band.columns]
        lin[here] = (part - itself[here, None]).mul_(positive).sum(1)
        exponentials = logits.exp2_().scatter_(1, band.own, 0.0)
        of_positives = part * positive
        pos[here] = of_positives.sum(1)
        negatives = torch.sub(part, of_positives, out=of_positives).sum(1)
        neg[here] = negatives.add_(exponentials[:, :low].sum(1)).add_(exponentials[:, high:].sum(1))
    if not plan.keep:
        give_back("logits", buffer)
    positives = anchors.classes.positives
    number = positives.index_select(0, places).to(rows.dtype).clamp_(min=1)
    row = unshifted._ExtremeRow(number, number, Sums(neg, pos, NONE, NONE, NONE), lin, itself)
    found = _spread(formulas.value(batch.rule, cast(Row, row)), places, count).index_select(0, back)
    positives = positives.index_select(0, back)
    negatives = count - 1 - positives
    valid = formulas.counted(batch, positives, negatives)
    values = found if valid is None else torch.where(valid, found, 0.0)
    stats = [_spread(part, places, count) for part in (neg, pos)]
    kept = buffer if plan.keep else None
    return AnchorValues(values, positives, negatives), Saved(
        Scaled(rows, factor, power), stats, kept, anchors, valid=valid
    )


def _spread(part: Tensor, places: Tensor, count: int) -> Tensor:
    """Return ``[count]`` numbers: ``part`` at the anchors' ``places``, else 0."""
    return part.new_zeros(count).scatter_(0, places, part)


def differentiate(grad: Tensor, size: float | Tensor, batch: Batch, plan: Plan, saved: Saved) -> Gradients:
    """Return the gradients with respect to embeddings and temperature; see `symmetric.differentiate`."""
    rule, rows = batch.rule, saved.scaled.rows
    anchors = saved.classes or _anchors(batch, plan, rows.dtype)
    places, classes = anchors.places, anchors.classes
    mine = rows.index_select(0, places)
    neg, pos = (part.index_select(0, places) for part in saved.stats[:2])
    number = classes.positives.index_select(0, places).to(grad.dtype)
    upstream = grad.index_select(0, classes.order.index_select(0, places))
    weights = formulas.weights(rule, upstream, Sums(neg, pos, NONE, NONE, NONE), number)
    alone = (number <= 1).to(grad.dtype)
    some_alone = bool(alone.any())
    pull, of_anchors = torch.zeros_like(rows), torch.empty_like(mine)
    kept, width = saved.kept, len(rows)
    buffer = borrow("logits", rows, plan.rows * width) if kept is None else kept
    products = None if kept is not None else _products(mine, rows, anchors.bands, buffer, keep=False)
    for band in anchors.bands:
        here = band.rows
        if products is None:
            weight = buffer.as_strided((len(band.own), width), (width, 1), here.start * width)
        else:
            weight = next(products).exp2_().scatter_(1, band.own, 0.0)
        weight.mul_(weights.negative[here, None])
        part, positive = weight[:, band.columns], _positives(classes.labels, band)
        if some_alone:  # the weight of a single positive is `level` alone
            part.mul_(torch.rsub(positive * alone[here, None], 1))
        part.addcmul_(positive, weights.level[here, None])
        torch.mm(weight, rows, out=of_anchors[here])
        pull.addmm_(weight.T, mine[here])
    if kept is None:
        give_back("logits", buffer)
    pull.index_add_(0, places, of_anchors)
    learned = by_temperature(pull, rows, size, rule, LN2)
    gradient = to_embeddings(pull, saved.scaled, rule, size, batch.embeddings.dtype, LN2)
    return gradient.index_select(0, classes.back), None, learned, None
