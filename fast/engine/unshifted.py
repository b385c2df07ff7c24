"""The unshifted form: panels of whole rows of exponentials without shifts of their own, for every kind of positives.

So each sum of exponentials is one reduction of the same matrix. The time for a small batch depends
on the number of operations, not on their size. Such a batch is one panel, whose matrices are kept for the backward
pass.

As in `symmetric`, rows are scaled so that their products t are logits in units of log 2. Positives and negatives are
summed separately, because a difference of sums would lose digits. If the references are anchors too, one matrix serves
both directions: the anchors of one are its rows, those of the other its columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor

from . import device, formulas
from .device import borrow, give_back
from .formulas import Row, Sums
from .scaling import Saved, both_ways, pulled, scale_both
from .spec import EPSILON, LN2, AnchorValues, Batch, Gradients, Plan, Targets

FEW_ENTRIES = 2**14
"""Up to this many entries of the matrix, labels are compared as integers."""


class Products:
    """The products of each panel's rows with all columns.

    Several panels share one buffer. Each has its own place if they are kept for the backward pass, else all have the
    same. The only panel of a small batch gets new memory.

    Args:
        rows: scaled rows ``[N, D]``.
        columns: scaled columns ``[M, D]``.
        plan: the number of rows of a panel.
        keep: whether the panels are kept.
        kept: the buffer of an earlier `Products` with ``keep``, whose panels `at` then returns.
    """

    def __init__(
        self, rows: Tensor, columns: Tensor, plan: Plan, *, keep: bool = False, kept: Tensor | None = None
    ) -> None:
        self.rows, self.turned, self.keep, self.height = rows, columns.T, keep or kept is not None, max(1, plan.rows)
        self.buffer, self.shift = kept, plan.shift
        if kept is None and self.height < len(rows):
            entries = (len(rows) if keep else self.height) * len(columns)
            self.buffer = borrow("kept" if keep else "logits", rows, entries)

    def slices(self) -> Iterator[slice]:
        """Yield the rows of each panel; in the end, give back memory that is not kept."""
        count = len(self.rows)
        for start in range(0, count, self.height):
            yield slice(start, min(start + self.height, count))
        if self.buffer is not None and not self.keep:
            give_back("logits", self.buffer)

    def at(self, here: slice) -> Tensor:
        """Return the place of a panel ``[b, M]`` in the buffer."""
        assert self.buffer is not None
        width = self.turned.shape[1]
        return self.buffer.as_strided((here.stop - here.start, width), (width, 1), here.start * width * self.keep)

    def __call__(self, here: slice) -> Tensor:
        """Return the products of the rows ``here``, ``[b, M]``, minus the shift of the plan."""
        if self.buffer is None:
            logits = self.rows @ self.turned
        else:
            logits = torch.mm(self.rows[here], self.turned, out=self.at(here))
        return logits.sub_(self.shift) if self.shift else logits


class _Numbers(NamedTuple):
    """Bounds on the number of positives of each row.

    ``lone`` is True if each row has one positive, False if each has at least two, None if neither is known.
    """

    least: float = 0
    most: float = math.inf
    lone: bool | None = None


_UNKNOWN = _Numbers()


class Panel(NamedTuple):
    """Matrices ``[b, M]`` of some anchors and all columns.

    Attributes:
        negative: the exponentials of negatives, else 0. Under "binary", e^s for a negative and e^-s for a positive.
        own: the exponentials of positives, else 0. Under "one_positive" and "epsilon", the factor of ``level`` in
            `formulas.Weights`. Unused under "binary" and for rows with at most one positive.
        positive: 1 for positives, else 0. For partners: int64 ``[b, 1]``, the column of the positive. Unused if there
            are no positives.
        numbers: bounds on the numbers of positives.
        star: under "epsilon", int64 ``[b, 1]``, the column of the row's largest exponential: under "cosine" the row
            itself, under "dot" the first on a tie. None if its weight is not used (`formulas.uses_largest`).
    """

    negative: Tensor
    own: Tensor
    positive: Tensor
    numbers: _Numbers = _UNKNOWN
    star: Tensor | None = None


class _Row(NamedTuple):
    """The sums of each row ``[N]``, whose quotients are known to be moderate, as a `formulas.Row`.

    Attributes:
        number: the number of positives, at least 1 except under "epsilon"; None if each row has at most one.
        many: the same number, never None; unused if each row has at most one positive.
        sums: sums of exponentials; under "binary", those of softplus(s) and of softplus(-s).
        lin: sum over positives of t - ``itself``.
        itself: the mean of t over positives, rounded; in `symmetric`, the product of the row with itself.
        sizes: the numbers of positives and of negatives; used only under "binary".
        lone: see `_Numbers`.
    """

    number: Tensor | None
    many: Tensor
    sums: Sums
    lin: Tensor
    itself: Tensor
    sizes: tuple[Tensor, ...] = ()
    lone: bool | None = None

    def log_negatives(self) -> Tensor:
        return self.sums.neg.log()

    def odds(self) -> Tensor:
        return (self.sums.neg / self.sums.pos).log_()

    def softplus_odds(self) -> Tensor:
        return (self.sums.neg / self.sums.pos).log1p_()

    def positives_over_mean(self) -> Tensor:
        found = self._log(self.sums.pos) - self.lin * LN2 / self.many
        return found if self.lone is False else torch.where(self.many == 1, 0.0, found)

    def negatives_over_mean(self) -> Tensor:
        return self._log(self.sums.neg) - self.lin * LN2 / self.many

    def negatives_over_positives(self, inside: str) -> Tensor:
        return self.odds() + self.many.log() if inside == "mean" else self.odds()

    def _log(self, total: Tensor) -> Tensor:
        """Return log(total / 2^itself)."""
        return (total * torch.exp2(-self.itself)).log_()

    def guarded_sum(self) -> Tensor:
        return self.sums.first

    def own_softplus(self) -> Tensor:
        return self.sums.first / self.many

    def own_missed(self) -> Tensor:
        return self.sums.missed / self.many

    def own_log_hit(self, inside: str) -> Tensor:
        boost = self.sums.boost()
        return -((self.many * boost if inside == "mean" else boost) / self.sums.first).log()

    def mean_softplus(self, sign: int, more: int) -> Tensor:
        total, number = (self.sums.neg, self.sizes[1]) if sign > 0 else (self.sums.pos, self.sizes[0])
        return total / (number + more).clamp_(min=1)


class _ExtremeRow(_Row):
    """Row sums whose quotients may be extreme."""

    def odds(self) -> Tensor:
        return _log_ratio(self.sums.neg / self.sums.pos, self.sums.neg.log() - self.sums.pos.log())

    def softplus_odds(self) -> Tensor:
        ratio = self.sums.neg / self.sums.pos
        return torch.where(ratio < _LARGE, ratio.log1p(), self.sums.neg.log() - self.sums.pos.log())

    def guarded_sum(self) -> Tensor:
        return self.softplus_odds() if self.number is None else self.sums.first

    def _log(self, total: Tensor) -> Tensor:
        """Return log(total / 2^itself); the constant is removed before the logarithm is rounded."""
        return _log_ratio(total * torch.exp2(-self.itself), total.log() - self.itself * LN2)


_LARGE = 2.0**100
"""Quotients outside 1 / _LARGE to _LARGE are not used: float32 might overflow or underflow."""


def _log_ratio(ratio: Tensor, difference: Tensor) -> Tensor:
    """Return the logarithm of a quotient, or the ``difference`` of the two logarithms if the quotient is extreme."""
    return torch.where((ratio > 1 / _LARGE) & (ratio < _LARGE), ratio.log(), difference)


def marked(targets: Targets, here: slice, count: int, columns: int) -> Tensor:
    """Return a bool mask ``[b, M]`` of the positives of the rows ``here``; self pairs may be marked too."""
    given = targets.given
    if targets.kind == "labels":
        return given[here, None] == (given if targets.columns is None else targets.columns)
    if targets.kind == "mask":
        return given[here]
    if targets.kind == "partners":
        return given[here, None] == torch.arange(columns, device=given.device)
    lines = here.stop - here.start
    marks = torch.zeros((lines + (lines < count), columns), dtype=torch.bool, device=given.device)
    if targets.kind == "pairs":
        # Pairs whose anchor is in another panel mark an extra last line, which is dropped below.
        line = given[:, 0] - here.start
        if lines < count:
            line = torch.where((line >= 0) & (line < lines), line, lines)
        marks = marks.index_put((line, given[:, 1]), marks.new_ones(()))
    return marks[:lines]


def ranks_of(batch: Batch) -> tuple[Tensor, Tensor] | None:
    """Return the positions of the rows' and the columns' labels among all sorted labels, in the computing dtype.

    Floats are compared faster on a CPU; up to 2^24, they are exact in float32. The result is None if there are no
    labels, if they are so few that sorting takes longer, or if values may not be read.
    """
    given, columns = batch.targets.given, batch.targets.columns
    if batch.targets.kind != "labels" or not device.may_read(given):
        return None
    if len(given) * len(given if columns is None else columns) <= FEW_ENTRIES:
        return None
    every = given.contiguous() if columns is None else torch.cat((given, columns))
    ranks = torch.searchsorted(torch.sort(every)[0], every).to(device.dtypes_of(batch.embeddings)[0])
    return ranks[: given.shape[0]], ranks if columns is None else ranks[given.shape[0] :]


def positives_of(batch: Batch, here: slice, logits: Tensor, ranks: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return the marks of `marked` as a matrix of 1 and 0, ``[b, M]``."""
    if ranks is not None:
        return torch.eq(ranks[0][here, None], ranks[1], out=torch.empty_like(logits))
    # On a CPU, converting bool takes several times as long as converting integers.
    marks = marked(batch.targets, here, batch.embeddings.shape[0], logits.shape[1])
    return marks.view(torch.uint8).to(logits.dtype)


def _clear(matrix: Tensor, batch: Batch, here: slice) -> Tensor:
    """Set self pairs to 0."""
    own = batch.references.own
    if batch.references.embeddings is None:
        if matrix.shape[0] == matrix.shape[1]:
            matrix.fill_diagonal_(0.0)
        else:
            matrix.diagonal(here.start).zero_()
    elif own is not None:
        own = own[here, None]
        column = own.clamp(min=0)
        matrix.scatter_(1, column, torch.where(own < 0, matrix.gather(1, column), 0.0))
    return matrix


NONE = torch.empty(0, device="cpu")
"""Stands for a sum or a matrix that the formula does not use."""


def _column(part: Tensor, here: slice) -> Tensor:
    return (part if here.stop - here.start == part.shape[0] else part[here]).unsqueeze(1)


def _others(batch: Batch, columns: int) -> int | Tensor:
    """Return the number of columns that are not the row itself: one number, or int64 ``[N]``."""
    own = batch.references.own
    if batch.references.embeddings is None:
        return columns - 1
    return columns if own is None else columns - (own >= 0).to(torch.int64)


def _numbers(number: Tensor, batch: Batch) -> _Numbers:
    """Return the least and the largest of the numbers of positives of a panel ``[b]``.

    The bounds are 0 and infinity if the panel does not hold all rows, if values may not be read, and for "binary" and
    "epsilon".
    """
    if (
        batch.rule.terms in ("binary", "epsilon")
        or number.shape[0] < batch.embeddings.shape[0]
        or not device.may_read(number)
    ):
        return _UNKNOWN
    low, high = torch.aminmax(number)
    least, most = low.item(), high.item()
    return _Numbers(least, most, False if least > 1 else True if least == most == 1 else None)


def _sum(
    logits: Tensor,
    batch: Batch,
    here: slice,
    ranks: tuple[Tensor, Tensor] | None,
    *,
    backward: bool = False,
    keep: bool = True,
) -> tuple[Panel, list[Tensor]]:
    """Return a panel and its sums ``[b]``: the fields of `Sums`, then ``lin``, ``itself`` and ``number`` of `_Row`.

    Sums that the formula does not use are empty. ``logits`` ``[b, M]`` are in units of log 2, and overwritten. If
    ``backward``, only the panel is needed; without ``keep``, only the sums are.

    Sums and logits are relative to ``itself``, the mean of t over positives. The logarithm of a sum minus the mean
    logit then keeps its digits.
    """
    rule, targets = batch.rule, batch.targets
    omits = targets.ignored is not None or targets.ids is not None  # `Targets.omits`, inlined
    none = lin = mean = NONE
    if targets.kind in ("partners", "none"):
        exponentials, pos, column = logits.exp2_(), none, none
        if targets.kind == "partners":
            column = _column(targets.given, here)
            pos = exponentials.gather(1, column).view(-1)
            exponentials.scatter_(1, column, 0.0)
        _clear(exponentials, batch, here)
        if omits:
            exponentials.masked_fill_(targets.omitted(here), 0.0)
        return Panel(exponentials, none, column), [exponentials.sum(1), pos, *[none] * 6]
    positive = _clear(positives_of(batch, here, logits, ranks), batch, here)
    if targets.ignored is not None:
        positive.masked_fill_(targets.ignored[here], 0.0)
    number = positive.sum(1)
    if rule.terms == "binary":
        sign = torch.rsub(positive, 1, alpha=2)
        exponentials = logits.mul_(sign).exp2_()
        if backward:
            return Panel(exponentials, none, positive), []
        losses = torch.log1p(exponentials, out=sign)
        own = losses * positive
        neg = _clear(losses.sub_(own), batch, here).sum(1)
        return Panel(exponentials, none, positive), [neg, own.sum(1), *[none] * 5, number]
    if rule.terms == "epsilon":
        return _guarded(logits, positive, number, batch, here, backward=backward, keep=keep)
    numbers = _numbers(number, batch)
    lone = numbers.lone
    if not (lone or backward) and rule.terms == "out" and rule.denominator != "one_positive":
        own = logits * positive
        mean = own.sum(1).div_(number.clamp(min=1))
        lin = own.addcmul_(positive, mean.unsqueeze(1), value=-1).sum(1)
        exponentials = logits.exp2_()
        torch.mul(exponentials, positive, out=own)
    else:
        exponentials = logits.exp2_()
        own = exponentials * positive
    shared = rule.denominator == "one_positive" and not lone
    negative = _clear(exponentials - own if shared else exponentials.sub_(own), batch, here)
    if omits:
        negative.masked_fill_(targets.omitted(here), 0.0)
    neg, pos = negative.sum(1), own.sum(1)
    missed = first = second = none
    if shared:
        odds = neg.unsqueeze(1) / exponentials
        whole = odds + 1
        if rule.terms == "out":
            first = torch.linalg.vecdot(odds.log1p(), positive)
            own = odds.div_(whole).mul_(positive)
            missed = own.sum(1)
        else:
            boosted = positive.mul(Sums(neg, pos, none, none, none).boost().unsqueeze(1)).div_(whole)
            first = boosted.sum(1)
            missed = torch.linalg.vecdot(odds.div_(whole), positive)
            own = boosted.mul_(odds)
            second = own.sum(1)
    return Panel(negative, own, positive, numbers), [neg, pos, missed, first, second, lin, mean, number]


def panels(batch: Batch, plan: Plan, saved: Saved) -> Iterator[tuple[slice, Panel]]:
    """Yield the rows of each panel and the panel, kept or computed again, for the backward pass.

    The panel's matrices may be overwritten; the next panel may use the same memory.
    """
    flat = saved.kept if isinstance(saved.kept, Tensor) else None
    again = flat is None and not saved.kept
    products, ranks = (
        Products(saved.scaled.rows, saved.classes.rows, plan, kept=flat),
        ranks_of(batch) if again else None,
    )
    for here in products.slices():
        if again:
            yield here, _sum(products(here), batch, here, ranks, backward=True)[0]
        elif flat is None:
            yield here, saved.kept[0]
        else:
            column = _column(batch.targets.given, here) if batch.targets.kind == "partners" else NONE
            yield here, Panel(products.at(here), NONE, column)


def _guarded(
    logits: Tensor, positive: Tensor, number: Tensor, batch: Batch, here: slice, *, backward: bool, keep: bool
) -> tuple[Panel, list[Tensor]]:
    """Return the result of `_sum` under "epsilon"."""
    if batch.rule.similarity == "cosine":  # no row is more similar to a row than itself
        own = batch.references.own
        star = torch.arange(here.start, here.stop, device=logits.device) if own is None else own[here]
        star = star.unsqueeze(1)
    else:
        star = logits.argmax(1, keepdim=True)
    exponentials = logits.exp2_()
    guard = exponentials.gather(1, star).mul_(EPSILON)
    own = _clear(exponentials, batch, here) * positive
    negative, many = exponentials - own, number.unsqueeze(1)
    pos = own.sum(1, keepdim=True).addcmul_(guard, many)
    others = max(logits.shape[1] - 1, 1)  # 1 for one row, whose sums do not count but must not be 0
    neg = negative.sum(1, keepdim=True).addcmul_(guard, others - many)
    rest, _ = formulas.rest_over(exponentials, guard, neg, pos)
    first = NONE if backward else torch.linalg.vecdot(rest.log1p(), positive)
    if keep:
        own.mul_(many - 1 - rest)
    sums = [neg.view(-1), pos.view(-1), NONE, first, guard.view(-1)]
    largest = star if formulas.uses_largest(batch.rule) else None
    return Panel(negative, own, positive, star=largest), [*sums, NONE, NONE, number]


def evaluate(batch: Batch, plan: Plan) -> tuple[AnchorValues, Saved]:
    """Return the values, those of mutual references last; also the sums and kept panels for the backward pass."""
    rule, kind = batch.rule, batch.targets.kind
    scaled, columns = scale_both(batch, LN2)
    rows, count, width = scaled.rows, len(scaled.rows), len(columns.rows)
    products = Products(rows, columns.rows, plan, keep=plan.keep)
    kept, across, numbers, ranks = [], None, _UNKNOWN, ranks_of(batch)
    # Allocated before the panels: small tensors that outlive a panel would fragment its freed memory.
    every = None if plan.rows >= count else rows.new_empty((len(Sums._fields) + 3, count))
    part: list[Tensor] = []
    omits = batch.targets.ignored is not None or batch.targets.ids is not None
    remaining, across_remaining = NONE, None
    if omits:
        remaining = torch.empty(count, dtype=torch.int64, device=rows.device)
    for here in products.slices():
        panel, part = _sum(products(here), batch, here, ranks, keep=plan.keep)
        if every is not None:
            part = [whole[here].copy_(one) if one is not NONE else one for whole, one in zip(every, part, strict=True)]
        numbers = panel.numbers
        if batch.references.mutual:
            total = panel.negative.sum(0)
            across = total if across is None else across.add_(total)
        if omits:  # exponentials are not 0, so the other entries are the negatives
            remaining[here] = torch.count_nonzero(panel.negative, 1)
            if batch.references.mutual:
                found = torch.count_nonzero(panel.negative, 0)
                across_remaining = found if across_remaining is None else across_remaining.add_(found)
        if plan.keep and every is None:
            kept.append(panel)
        del panel
    if every is not None:
        part = [whole if one is not NONE else one for whole, one in zip(every, part, strict=True)]
    *sums, lin, mean, number = part
    if across is not None:
        sums[:2] = torch.cat((sums[0], across)), sums[1].repeat(2)
    whole = Sums(*sums)
    if plan.shift:
        formulas.check_sums(whole, number if number.numel() else None, width)
    others = _others(batch, width)
    positives, many = number, None
    negatives: int | Tensor
    if omits:
        negatives = remaining if across_remaining is None else torch.cat((remaining, across_remaining))
    elif kind in ("partners", "none"):
        negatives = others - 1 if kind == "partners" else others
        if isinstance(negatives, int) and (plan.sized or negatives <= 0):
            negatives = torch.full((whole.neg.shape[0],), negatives, device=rows.device)
    elif plan.sized or rule.terms == "binary" or isinstance(others, Tensor) or numbers.most >= others:
        negatives = others - number
    else:
        negatives = 1  # at least: all that `counted` needs to know
    lone = numbers.lone
    if kind not in ("partners", "none"):
        many = None if lone else number if numbers.least > 0 or rule.terms == "epsilon" else number.clamp(min=1)
    of_rows = _ExtremeRow if plan.extreme else _Row
    row = of_rows(many, number if many is None else many, whole, lin, mean, (number, cast(Tensor, negatives)), lone)
    values = formulas.value(rule, cast(Row, row))
    if plan.shift and rule.terms == "lse":  # the other values do not depend on the shift
        values = values + plan.shift * LN2
    # With "epsilon", value and weights of a row without positives are 0 anyway.
    valid = formulas.counted(batch, number, negatives, all_positive=numbers.least > 0 or rule.terms == "epsilon")
    values = values if valid is None else torch.where(valid, values, 0.0)
    saved = Saved(scaled, (*sums, number), products.buffer if plan.keep and not kept else kept, columns, valid=valid)
    if not plan.sized:
        return AnchorValues(values, NONE, NONE), saved
    negatives = cast(Tensor, negatives)
    if kind in ("partners", "none"):
        positives = torch.full_like(negatives, 1 if kind == "partners" else 0)
    return AnchorValues(values, positives.to(torch.int64), negatives.to(torch.int64)), saved


def differentiate(grad: Tensor, size: float | Tensor, batch: Batch, plan: Plan, saved: Saved) -> Gradients:
    """Return the gradients with respect to embeddings, references and temperature; see `symmetric.differentiate`."""
    saved = saved if saved.classes else saved._replace(classes=scale_both(batch, LN2, saved.scaled)[1])
    *sums, number = saved.stats[: len(Sums._fields) + 1]
    lone, some = None, None if batch.targets.kind in ("partners", "none") else number
    if some is not None and plan.rows >= len(grad):
        lone = (saved.kept[0].numbers if saved.kept else _numbers(number, batch)).lone
        some = None if lone else some
    negatives = _others(batch, len(saved.classes.rows)) - number if batch.rule.terms in ("binary", "epsilon") else None
    weights = formulas.weights(batch.rule, grad, Sums(*sums), some, negatives, lone)

    weighed = ((here, _weigh(panel, weights, batch, here)) for here, panel in panels(batch, plan, saved))
    return pulled(weighed, saved, batch, size, LN2)


def _weigh(panel: Panel, weights: formulas.Weights, batch: Batch, here: slice) -> Tensor:
    """Return the weights ``[b, M]`` of a panel for `pulled`; the panel's matrices may be overwritten."""
    rule, kind = batch.rule, batch.targets.kind
    count = batch.embeddings.shape[0]
    negative, level = _column(weights.negative, here), _column(weights.level, here)
    if rule.terms == "binary":
        exponentials = panel.negative
        weight = torch.lerp(negative, level, panel.positive).mul_(exponentials).div_(exponentials.add_(1))
        return both_ways(_clear(weight, batch, here), batch)
    slope = level if kind in ("partners", "none") else _column(weights.slope, here)
    # Here a positive's weight is not slope * E + level.
    own_ratios = rule.terms == "epsilon" or (rule.denominator == "one_positive" and not panel.numbers.lone)
    own_ratios = own_ratios and kind != "partners"
    symmetric = batch.references.embeddings is None and level.shape[0] == count
    symmetric = symmetric and kind in ("labels", "partners", "none")
    symmetric = symmetric and batch.targets.ignored is None
    scratch = None
    if batch.references.mutual:
        scratch = borrow("weights", negative, panel.negative.numel())
        of_columns, negative = (
            weights.negative[count:],
            scratch.as_strided(panel.negative.shape, panel.negative.stride()),
        )
        torch.add(_column(weights.negative, here), of_columns, out=negative)
        level = level + _column(weights.level[count:], here)
    elif symmetric and not own_ratios:
        # In a symmetric panel, adding the coefficients replaces adding the transposed weights.
        negative = negative + weights.negative
        if kind == "partners":
            level = level + level.gather(0, panel.positive)
        else:
            slope, level = slope + weights.slope, level + weights.level
    weight = panel.negative.mul_(negative)
    if scratch is not None:
        give_back("weights", scratch)
    if kind == "partners":
        weight.scatter_(1, panel.positive, level)
        return weight if symmetric else both_ways(weight, batch)
    if kind == "none":
        return weight if symmetric else both_ways(weight, batch)
    if own_ratios:
        weight.addcmul_(panel.own, level)
        if panel.star is not None:  # raising the largest logit lowers all others relative to it
            weight.scatter_add_(1, panel.star, weight.sum(1, keepdim=True).neg_())
        return both_ways(weight, batch)
    if not panel.numbers.lone:
        weight.addcmul_(panel.own, slope)
    weight.addcmul_(panel.positive, level)
    return weight if symmetric else both_ways(weight, batch)
