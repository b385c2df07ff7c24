"""The rowwise form: panels of whole rows of logits, shifted by their maxima; correct for every rule and temperature.

Exponentials of positives are relative to the row's largest positive, those of negatives to its largest negative, so
that neither sum loses precision. log(sum over all / sum over positives) is then the softplus of the difference of the
two logarithms. The terms "binary", "sigmoid" and "epsilon" do not use these sums.

The values are computed in differentiable operations, which also serve the second derivative.

The columns may come in blocks, as in `ring`. `summed` returns the sums over one block, and `Sums.add` adds them to
those of other blocks. Values and weights then follow from the sums over all columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from . import formulas
from .device import dtypes_of
from .formulas import Row
from .scaling import Saved, both_ways, pulled, scale_both
from .spec import EPSILON, LN2, AnchorValues, Batch, Gradients, Plan, Rule, Targets
from .unshifted import NONE, marked


class PairWeights(NamedTuple):
    """The weights of the pairs of a panel, in the computing dtype.

    A positive of weight 0 is left out of the panel's masks. Under the denominator "all", which contains its
    exponential, it becomes a negative of weight 1.

    Attributes:
        share: ``[b, M]``, the weights of positives divided by their sum, else 0; None if positives have no weights.
        factor: ``[b, 1]``, the factor of a row's value: the mean weight of its positives; None: 1.
        shift: ``[b, M]``, added to the logits: the logarithms of the negatives' weights, else 0. None if negatives have
            no weights.
        sizes: the numbers of positives and of negatives, ``[b]`` each, as in `AnchorValues`.
    """

    share: Tensor | None
    factor: Tensor | None
    shift: Tensor | None
    sizes: tuple[Tensor, Tensor]


class Panel(NamedTuple):
    """Some anchors and all columns, ``[b, M]``.

    Attributes:
        rows: the anchors' rows.
        positive: bool ``[b, M]``.
        negative: bool ``[b, M]``.
        own: bool ``[b, M]``, all other pairs: self pairs, ignored pairs and pairs left out by weight 0.
        some_negative: bool ``[b, 1]``, whether the row has a negative.
        number: ``[b, 1]``, positives per row in the computing dtype, at least 1.
        weights: the weights of pairs; None if there are none.
        ignored: bool ``[b, M]``, the pairs of ``own`` except the self pairs. Only for "epsilon" with ignored pairs,
            else None.
    """

    rows: slice
    positive: Tensor
    negative: Tensor
    own: Tensor
    some_negative: Tensor
    number: Tensor
    weights: PairWeights | None = None
    ignored: Tensor | None = None

    def sizes(self) -> tuple[Tensor, Tensor]:
        """Return the numbers of positives and of negatives ``[b]``, as in `AnchorValues`."""
        return (self.positive.sum(1), self.negative.sum(1)) if self.weights is None else self.weights.sizes

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of ``values`` over positives, weighted if they have weights, ``[b, 1]``."""
        share = None if self.weights is None else self.weights.share
        if share is None:
            return torch.where(self.positive, values, 0.0).sum(1, keepdim=True) / self.number
        return torch.where(self.positive, share * values, 0.0).sum(1, keepdim=True)

    def shares(self) -> Tensor:
        """Return the share of each positive in the mean, ``[b, 1]`` or ``[b, M]``."""
        share = None if self.weights is None else self.weights.share
        return 1 / self.number if share is None else share


class LonePanel(NamedTuple):
    """Anchors with at most one positive, ``[b, M]``; column indices take the place of masks.

    Attributes:
        rows: the anchors' rows.
        columns: M.
        partner: int64 ``[b, 1]``, the column of the positive; None if the rows have no positives.
        own: int64 ``[b, 1]``, the column of the row itself, or of its positive if the row is not a column. None if no
            row is.
        left_out: int64 ``[b]``, how many columns are not negatives.
    """

    rows: slice
    columns: int
    partner: Tensor | None
    own: Tensor | None
    left_out: Tensor

    def sizes(self) -> tuple[Tensor, Tensor]:
        """Return the numbers of positives and of negatives, int64 ``[b]`` each."""
        positives = torch.full_like(self.left_out, 0 if self.partner is None else 1)
        return positives, self.columns - self.left_out

    def without(self, matrix: Tensor, value: float) -> Tensor:
        """Return a matrix ``[b, M]`` with ``value`` at each row's positive and at its self pair."""
        for column in (self.partner, self.own):
            if column is not None:
                matrix = matrix.scatter(1, column, value)
        return matrix


def panels(batch: Batch, columns: int, rows: int) -> Iterator[Panel | LonePanel]:
    """Yield the panels of a batch with M = ``columns``, each of ``rows`` rows."""
    targets, own, count = batch.targets, own_columns(batch), batch.embeddings.shape[0]
    dtype = dtypes_of(batch.embeddings)[0]
    for start in range(0, count, rows):
        here = slice(start, min(start + rows, count))
        lone = targets.kind in ("partners", "none") and not targets.omits
        if lone and batch.rule.terms not in ("sigmoid", "epsilon"):
            yield _lone_panel(targets, own, here, columns)
        else:
            positive, negative, itself = masks_of(targets, own, here, count, columns)
            number = positive.sum(1, keepdim=True).clamp(min=1).to(dtype)
            weights = ignored = None
            if targets.omits and batch.rule.terms == "epsilon":
                ignored = (
                    itself if own is None else itself & (own[here, None] != torch.arange(columns, device=own.device))
                )
            if targets.weighted:
                positive, negative, weights = _weighted(batch, here, positive, negative)
                itself = ~(positive | negative)
            yield Panel(here, positive, negative, itself, negative.any(1, keepdim=True), number, weights, ignored)


def dtype_of_positives(batch: Batch) -> torch.dtype:
    """Return the dtype of `AnchorValues.positives`."""
    by_weight = batch.targets.positive_weights is not None and batch.rule.weights_divisor == "weight"
    return dtypes_of(batch.embeddings)[1] if by_weight else torch.int64


def _weighted(batch: Batch, here: slice, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor, PairWeights]:
    """Return the masks of a panel, changed as `PairWeights` describes, and the weights of its pairs."""
    targets, rule, (dtype, wide) = batch.targets, batch.rule, dtypes_of(batch.embeddings)
    of_positives, of_negatives = targets.positive_weights, targets.negative_weights
    number, counted = positive.sum(1), negative.sum(1)
    share = factor = shift = None
    if of_negatives is not None:
        exact = of_negatives[here].to(torch.promote_types(of_negatives.dtype, dtype))
        shift = torch.where(negative, exact.log(), 0.0).to(dtype)  # NaN for a weight below 0
    if of_positives is not None:
        weights = torch.where(positive, of_positives[here], 0.0).to(torch.promote_types(of_positives.dtype, dtype))
        weights = torch.where(weights >= 0, weights, torch.nan)  # it may not have been checked
        total = weights.sum(1, keepdim=True)
        share = (weights / torch.where(total == 0, 1.0, total)).to(dtype)
        if rule.weights_divisor == "count":
            factor = (total / number.clamp(min=1)[:, None]).to(dtype)
        else:
            number = total[:, 0].to(wide)
        if rule.denominator == "all":
            negative = negative | (positive & (weights == 0))
        positive = positive & (weights != 0)
    return positive, negative, PairWeights(share, factor, shift, (number, counted))


def masks_of(
    targets: Targets, own: Tensor | None, here: slice, count: int, columns: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return three bool masks ``[b, M]`` of the rows ``here``: positives, negatives, and all other pairs."""
    positive = marked(targets, here, count, columns)
    place = torch.arange(columns, device=positive.device)
    itself = torch.zeros_like(positive) if own is None else own[here, None] == place
    positive = positive & ~itself
    if not targets.omits and not targets.weighted:
        return positive, ~(positive | itself), itself
    if targets.ignored is not None:
        positive = positive & ~targets.ignored[here]
    neither = itself & ~positive
    if targets.omits:
        neither = (itself | targets.omitted(here)) & ~positive
    negative = ~(positive | neither)
    if targets.negative_weights is not None:  # a negative of weight 0 is left out
        negative = negative & (targets.negative_weights[here] != 0)
    if targets.positive_weights is not None:  # a row whose positives all have weight 0 has none
        positive = positive & (positive & (targets.positive_weights[here] != 0)).any(1, keepdim=True)
    return positive, negative, ~(positive | negative)


def _lone_panel(targets: Targets, own: Tensor | None, here: slice, columns: int) -> LonePanel:
    number = here.stop - here.start
    if targets.kind == "none":
        # Here every row is a column, or none is.
        left_out = torch.full((number,), int(own is not None), dtype=torch.int64, device=targets.given.device)
        return LonePanel(here, columns, None, None if own is None else own[here, None], left_out)
    partner = targets.given[here]
    left_out = torch.ones_like(partner)
    if own is None:
        return LonePanel(here, columns, partner[:, None], None, left_out)
    itself = own[here]
    left_out = left_out + (itself >= 0)
    return LonePanel(here, columns, partner[:, None], torch.where(itself >= 0, itself, partner)[:, None], left_out)


def _exp(logarithms: Tensor) -> Tensor:
    """Return e^x as a power of two: four times as fast on a CPU, and not slower where it underflows."""
    return (logarithms * (1 / LN2)).exp2()


def _softplus(x: Tensor) -> Tensor:
    return -F.logsigmoid(-x)


class Sums(NamedTuple):
    """The sums of rows over the columns of one or of several panels, ``[b, 1]`` each; 0 if they are empty.

    Attributes:
        positives: int64, the number of positives.
        negatives: int64, the number of negatives.
        positive_top: the largest logit of a positive.
        positive: sum over positives of e^(s - positive_top).
        negative_top: the largest logit of a negative.
        negative: sum over negatives of e^(s - negative_top).
        below: sum over positives of positive_top - s.
        softplus: sum over positives of softplus(o), o = log(sum over all negatives of e^s) - s. Only `own_sums`
            computes it.
        missed: sum over positives of sigmoid(o). Only `own_sums` computes it.
    """

    positives: Tensor
    negatives: Tensor
    positive_top: Tensor
    positive: Tensor
    negative_top: Tensor
    negative: Tensor
    below: Tensor
    softplus: Tensor
    missed: Tensor

    @classmethod
    def empty(cls, rows: Tensor) -> Sums:
        """Return the sums over no columns, for rows ``[b, D]``."""
        whole = (rows.new_zeros((len(rows), 1), dtype=torch.int64) for _ in range(2))
        return cls(*whole, *(rows.new_zeros((len(rows), 1)) for _ in cls._fields[2:]))

    def of(self, here: slice) -> Sums:
        """Return the sums of the rows ``here``."""
        return Sums(*(part[here] for part in self))

    def add(self, here: slice, more: Sums) -> None:
        """Add the sums of the rows ``here`` over other columns, except ``softplus`` and ``missed``."""
        known = self.of(here)
        top, rise, more_rise = _raised(known.positive_top, known.positives, more.positive_top, more.positives)
        known.below.add_(known.positives * rise).add_(more.below + more.positives * more_rise)
        known.positive.mul_(_exp(-rise)).add_(more.positive * _exp(-more_rise))
        known.positive_top.copy_(top)
        top, rise, more_rise = _raised(known.negative_top, known.negatives, more.negative_top, more.negatives)
        known.negative.mul_(_exp(-rise)).add_(more.negative * _exp(-more_rise))
        known.negative_top.copy_(top)
        known.positives.add_(more.positives)
        known.negatives.add_(more.negatives)


def _raised(top: Tensor, number: Tensor, more: Tensor, more_number: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the larger of two sums' largest logits, and how much it exceeds each; 0 for an empty sum."""
    found = torch.where(number == 0, more, torch.where(more_number == 0, top, torch.maximum(top, more)))
    return found, torch.where(number == 0, 0.0, found - top), torch.where(more_number == 0, 0.0, found - more)


class _Total:
    """Rows ``[b, 1]`` whose sums over all columns are known, as a `formulas.Row`.

    The log-sum-exp of positives is ``positive_top + positive_log``, both 0 for an empty sum. Negatives likewise.
    """

    def __init__(self, sums: Sums) -> None:
        self.sums, self.number = sums, sums.positives.clamp(min=1).to(sums.below.dtype)
        self.some_negative = sums.negatives > 0
        self.positive_top, self.negative_top = sums.positive_top, sums.negative_top
        self.positive_log = torch.where(sums.positives > 0, sums.positive, 1.0).log()
        self.negative_log = torch.where(self.some_negative, sums.negative, 1.0).log()

    def log_negatives(self) -> Tensor:
        return self.negative_top + self.negative_log

    def odds(self) -> Tensor:
        return (self.negative_top - self.positive_top) + (self.negative_log - self.positive_log)

    def softplus_odds(self) -> Tensor:
        return torch.where(self.some_negative, _softplus(self.odds()), 0.0)

    def missed(self) -> Tensor:
        return torch.where(self.some_negative, torch.sigmoid(self.odds()), 0.0)

    def positives_over_mean(self) -> Tensor:
        return self.positive_log + self._mean_below(self.positive_top)

    def negatives_over_mean(self) -> Tensor:
        return self._mean_below(self.negative_top) + self.negative_log

    def negatives_over_positives(self, inside: str) -> Tensor:
        return self.odds() + self.number.log() if inside == "mean" else self.odds()

    def _mean_below(self, top: Tensor) -> Tensor:
        """Return the mean over positives of ``top - s``."""
        return (top - self.positive_top) + self.sums.below / self.number

    def own_softplus(self) -> Tensor:
        return self.sums.softplus / self.number


class _Row(_Total):
    """The logits of a panel ``[b, M]`` and the sums of each row ``[b, 1]``, as a `formulas.Row`.

    Without ``sums`` over all columns, the panel must have all columns.
    """

    def __init__(self, logits: Tensor, panel: Panel, rule: Rule, sums: Sums | None = None) -> None:
        # The maximum that "epsilon" subtracts does not include ignored pairs.
        self.logits = logits if panel.ignored is None else logits.masked_fill(panel.ignored, -math.inf)
        self.panel = panel
        if sums is not None:
            super().__init__(sums)
            self.below = self._below()
            return
        self.number = panel.positive.sum(1, keepdim=True).to(logits.dtype) if rule.terms == "epsilon" else panel.number
        self.some_negative = panel.some_negative
        if rule.terms in ("binary", "sigmoid", "epsilon"):
            return
        masks = (panel.positive, panel.positive.any(1, keepdim=True)), (panel.negative, panel.some_negative)
        known = logits.detach()
        self.positive_top, self.negative_top = (
            torch.where(some, torch.where(mask, known, -math.inf).amax(1, keepdim=True), 0.0) for mask, some in masks
        )
        self.below = self._below()
        exponentials = _exp(self.below)
        self.positive_sum, self.negative_sum = (
            torch.where(some, torch.where(mask, exponentials, 0.0).sum(1, keepdim=True), 1.0) for mask, some in masks
        )
        self.positive_log, self.negative_log = self.positive_sum.log(), self.negative_sum.log()

    def _below(self) -> Tensor:
        """Return the logits minus the largest of the row's positives or negatives; 0 for all other pairs."""
        below = self.logits - torch.where(self.panel.positive, self.positive_top, self.negative_top)
        return torch.where(self.panel.own, 0.0, below)

    def summed(self) -> Sums:
        positives, negatives = (number[:, None] for number in self.panel.sizes())
        parts = torch.where(positives > 0, self.positive_sum, 0.0), self.negative_top
        found = (self.positive_top, *parts, torch.where(negatives > 0, self.negative_sum, 0.0), -self._sum(self.below))
        return Sums(positives, negatives, *found, NONE, NONE)

    def _mean_below(self, top: Tensor) -> Tensor:
        return self.panel.mean(top - self.logits)

    def _sum(self, values: Tensor) -> Tensor:
        """Sum ``values`` over positives, ``[b, 1]``."""
        return torch.where(self.panel.positive, values, 0.0).sum(1, keepdim=True)

    def _own(self, side: Callable[[Tensor], Tensor], elsewhere: float) -> Tensor:
        """Return ``side(odds)`` of each positive, ``[b, M]``; ``elsewhere`` for all other pairs.

        Positives of rows without negatives get ``elsewhere`` too.
        """
        counted = self.panel.positive & self.some_negative
        odds = torch.where(counted, (self.negative_top - self.logits) + self.negative_log, 0.0)
        return torch.where(counted, side(odds), elsewhere)

    def own_softplus(self) -> Tensor:
        return self.panel.mean(self._own(_softplus, 0.0))

    def own_log_missed(self) -> Tensor:
        return self._own(F.logsigmoid, -math.inf)

    def own_missed(self) -> Tensor:
        return self._sum(self.own_log_missed().exp()) / self.number

    def own_log_hit(self, inside: str) -> Tensor:
        hit = -self._own(_softplus, 0.0)
        return self._log_mean(hit) if inside == "mean" else self._log_mean(hit, 1.0)

    def own_log_share(self) -> Tensor:
        hit = -self._own(_softplus, 0.0)
        return hit - self._log_mean(hit)

    def _log_mean(self, logarithms: Tensor, number: Tensor | float | None = None) -> Tensor:
        """Return the logarithm of the mean over positives of ``e^logarithms``, ``[b, 1]``; 0 for no positives.

        ``number`` replaces the number of positives.
        """
        positive = self.panel.positive
        top = torch.where(positive, logarithms.detach(), -math.inf).amax(1, keepdim=True)
        top = torch.where(top == -math.inf, 0.0, top)
        total = _exp(torch.where(positive, logarithms - top, -math.inf)).sum(1, keepdim=True)
        return top + torch.where(total > 0, total / (self.number if number is None else number), 1.0).log()

    def mean_softplus(self, sign: int, more: int) -> Tensor:
        mask = self.panel.negative if sign > 0 else self.panel.positive
        number = (mask.sum(1, keepdim=True) + more).clamp(min=1)
        losses = -F.logsigmoid(self.logits if sign < 0 else -self.logits)
        return torch.where(mask, losses, 0.0).sum(1, keepdim=True) / number

    def sum_softplus(self) -> Tensor:
        # Logits of pairs that do not count may overflow.
        signed = torch.where(self.panel.own, 0.0, torch.where(self.panel.positive, -self.logits, self.logits))
        return torch.where(self.panel.own, 0.0, _softplus(signed)).sum(1, keepdim=True)

    def guarded(self, star: Tensor) -> tuple[Tensor, Tensor]:
        """Return e^(s - max), 0 at self pairs, and the same plus epsilon; ``star`` is the column of the maximum."""
        own = self.panel.own
        top = self.logits.gather(1, star)
        # top - top is 0, or NaN if the maximum is infinite, which makes the value NaN too.
        exponentials = torch.where(own, 0.0, _exp(self.logits - (top + (top - top).detach())))
        return exponentials, torch.where(own, 0.0, exponentials + EPSILON)

    def guarded_sum(self) -> Tensor:
        _, guarded = self.guarded(self.logits.detach().argmax(1, keepdim=True))
        rest = guarded.sum(1, keepdim=True) - guarded
        return self._sum(torch.log1p(rest / torch.where(self.panel.own, 1.0, guarded)))


class _LoneRow:
    """The logits ``[b, M]`` of anchors with at most one positive, and each anchor's sum over its negatives.

    The logarithm of this sum is ``top + log``, ``[b, 1]``.
    """

    number = None

    def __init__(self, logits: Tensor, panel: LonePanel, sums: Sums | None = None) -> None:
        rest = panel.without(logits, -math.inf)
        # Counts tell which rows have negatives, so that a sum that is NaN makes the value NaN.
        self.some = (panel.left_out < panel.columns)[:, None] if sums is None else sums.negatives > 0
        self.top = (
            torch.where(self.some, rest.detach().amax(1, keepdim=True), 0.0) if sums is None else sums.negative_top
        )
        self.parts = _exp(rest - self.top)
        self.total = torch.where(self.some, self.parts.sum(1, keepdim=True) if sums is None else sums.negative, 1.0)
        self.log = self.total.log()
        self.positive = None if panel.partner is None else logits.gather(1, panel.partner)
        if sums is not None:
            self.positive = sums.positive_top

    def summed(self, panel: LonePanel) -> Sums:
        positives, negatives = (number[:, None] for number in panel.sizes())
        none, one = torch.zeros_like(self.top), positives.to(self.top.dtype)
        top, negative = none if self.positive is None else self.positive, torch.where(self.some, self.total, 0.0)
        return Sums(positives, negatives, top, one, self.top, negative, none, NONE, NONE)

    def log_negatives(self) -> Tensor:
        return self.top + self.log

    def odds(self) -> Tensor:
        return (self.top - cast(Tensor, self.positive)) + self.log

    def softplus_odds(self) -> Tensor:
        return torch.where(self.some, _softplus(self.odds()), 0.0)

    def missed(self) -> Tensor:
        return torch.where(self.some, torch.sigmoid(self.odds()), 0.0)


def values(logits: Tensor, panel: Panel | LonePanel, rule: Rule) -> Tensor:
    """Return each row's value ``[b]``, differentiable with respect to the logits ``[b, M]``.

    It is finite but meaningless if a row lacks the positives or negatives that the rule needs.
    """
    if isinstance(panel, LonePanel):
        return formulas.value(rule, cast(Row, _LoneRow(logits, panel)))[:, 0]
    found = formulas.value(rule, cast(Row, _Row(_shifted(logits, panel), panel, rule)))
    factor = None if panel.weights is None else panel.weights.factor
    return (found if factor is None else found * factor)[:, 0]


def summed(logits: Tensor, panel: Panel | LonePanel, rule: Rule) -> Sums:
    """Return the sums over the columns of a panel from its logits ``[b, M]``; not for weights of pairs."""
    return _LoneRow(logits, panel).summed(panel) if isinstance(panel, LonePanel) else _Row(logits, panel, rule).summed()


def own_sums(logits: Tensor, panel: Panel, rule: Rule, sums: Sums) -> tuple[Tensor, Tensor]:
    """Return ``softplus`` and ``missed`` of `Sums` for a panel, from the other sums over all columns."""
    row = _Row(logits, panel, rule, sums)
    return row._sum(row._own(_softplus, 0.0)), row._sum(row.own_log_missed().exp())


def values_of(sums: Sums, rule: Rule) -> Tensor:
    """Return the values ``[b]`` of rows from their sums over all columns; see `values`."""
    return formulas.value(rule, cast(Row, _Total(sums)))[:, 0]


def _shifted(logits: Tensor, panel: Panel) -> Tensor:
    shift = None if panel.weights is None else panel.weights.shift
    return logits if shift is None else logits + shift


def weights(logits: Tensor, panel: Panel | LonePanel, rule: Rule, grad: Tensor, sums: Sums | None = None) -> Tensor:
    """Return ``grad_i dL_i/ds_ij``, ``[b, M]``.

    ``grad`` ``[b]`` must be 0 for every row that `formulas.counted` leaves out. If the panel does not have all columns,
    ``sums`` are those over all columns.
    """
    up = grad[:, None]
    if isinstance(panel, LonePanel):
        return _lone_weights(_LoneRow(logits, panel, sums), panel, rule, up)
    row = _Row(_shifted(logits, panel), panel, rule, sums)
    shares = panel.shares() if sums is None else 1 / row.number
    if panel.weights is not None and panel.weights.factor is not None:
        up = up * panel.weights.factor
    if rule.terms == "binary":
        positive = torch.sigmoid(-logits) * (-up / (panel.positive.sum(1, keepdim=True) + 1))
        negative = torch.sigmoid(logits) * (up / panel.negative.sum(1, keepdim=True).clamp(min=1))
    elif rule.terms == "epsilon":
        return _guarded_weights(row, up)
    elif rule.terms == "lse":
        return torch.where(panel.negative, _exp(row.below - row.negative_log) * up, 0.0)
    else:
        c: Tensor | None
        if rule.denominator == "one_positive":
            positive = formulas.own_log_weights(rule, row).exp() * shares
            positive = torch.where(panel.positive, positive, 0.0)
            c = positive.sum(1, keepdim=True) if sums is None else sums.missed / row.number
        else:
            c = formulas.coefficient(rule, row)
            share = _exp(row.below - row.positive_log)
            positive = share if c is None else share * c
            if formulas.has_mean(rule):
                # Where c is 1, share - (share - 1/n) is 1/n.
                positive = shares if c is None else positive - (share - shares)
        positive = -positive * up
        negative = _exp(row.below - row.negative_log) * (up if c is None else c * up)
    return torch.where(panel.positive, positive, torch.where(panel.negative, negative, 0.0))


def _guarded_weights(row: _Row, up: Tensor) -> Tensor:
    logits, number = row.logits, row.number
    star = logits.argmax(1, keepdim=True)
    exponentials, guarded = row.guarded(star)
    total = guarded.sum(1, keepdim=True)
    share = exponentials / torch.where(total == 0, 1.0, total)  # 0 if all other pairs are ignored
    through = share * number - torch.where(row.panel.positive, exponentials / (exponentials + EPSILON), 0.0)
    through = through * (up / (number + EPSILON))
    # Raising the maximum lowers all other logits relative to it.
    at_star = torch.arange(logits.shape[1], device=logits.device) == star
    return through - torch.where(at_star, through.sum(1, keepdim=True), 0.0)


def _lone_weights(row: _LoneRow, panel: LonePanel, rule: Rule, up: Tensor) -> Tensor:
    c = formulas.coefficient(rule, cast(Row, row))
    up = up if c is None else up * c
    found = panel.without(row.parts.mul_(torch.where(row.some, up / row.total, 0.0)), 0.0)
    return found if panel.partner is None else found.scatter_(1, panel.partner, -up)


def own_columns(batch: Batch) -> Tensor | None:
    """Return the column that is the row itself, int64 ``[N]``, or -1; None if no row is a column."""
    rows, references = batch.embeddings, batch.references
    return torch.arange(len(rows), device=rows.device) if references.embeddings is None else references.own


def evaluate(batch: Batch, plan: Plan) -> tuple[AnchorValues, Saved]:
    """Return the values; for the backward pass also the scaled rows and columns."""
    scaled, columns = scale_both(batch)
    rows, turned = scaled.rows, columns.rows.T
    # Allocated before the panels: small tensors that outlive a panel would fragment its freed memory.
    found, negatives = rows.new_empty(rows.shape[0]), torch.empty(rows.shape[0], dtype=torch.int64, device=rows.device)
    positives = torch.empty_like(negatives, dtype=dtype_of_positives(batch))
    for panel in panels(batch, turned.shape[1], plan.rows):
        found[panel.rows] = values(rows[panel.rows] @ turned, panel, batch.rule)
        positives[panel.rows], negatives[panel.rows] = panel.sizes()
    valid = formulas.counted(batch, positives, negatives)
    found = found if valid is None else torch.where(valid, found, 0.0)
    return AnchorValues(found, positives, negatives), Saved(scaled, (), None, columns, valid=valid)


def differentiate(grad: Tensor, size: float | Tensor, batch: Batch, plan: Plan, saved: Saved) -> Gradients:
    """Return the gradients with respect to embeddings, references and temperature; see `symmetric.differentiate`."""
    saved = saved if saved.classes else saved._replace(classes=scale_both(batch, scaled=saved.scaled)[1])
    rows, turned = saved.scaled.rows, saved.classes.rows.T
    every = panels(batch, turned.shape[1], plan.rows)
    weighed = ((p.rows, both_ways(weights(rows[p.rows] @ turned, p, batch.rule, grad[p.rows]), batch)) for p in every)
    return pulled(weighed, saved, batch, size)
