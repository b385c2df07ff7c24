"""The exact form: float64 on whole N x N matrices, correct over the whole range of the dtypes, and slow.

Guarantees at temperatures from 1e-3 to 1e3:

- The computing dtype is float64 for every dtype of the embeddings. Autocast and TF32 have no effect. On a device
  without float64 it is float32; the limits for float64 embeddings below then apply with float32's range.
- float32, bfloat16 and float16 embeddings: if the logits are within the range of the value's dtype, the value is
  finite. An entry of the gradient is then finite and not rounded to zero, if its true value is within the range of the
  gradient's dtype.
- float64 embeddings: the same, but tiny numbers may count as zero:
    - an entry that is more than 2^900 times smaller than the largest of its row;
    - under "dot", a product of two entries that is more than 2^900 times smaller than the product of the largest
      entries of their rows;
    - a contribution to a row of the gradient that is more than 2^1800 times smaller than the largest contribution;
    - a contribution below 2^-1800, if an anchor has several positives.
- Where contributions to an entry cancel to less than about 2^-50 of the largest, no digit is correct, and the result
  may be zero. Examples are rows whose directions differ by less than 2^-53, copies of a row under different labels, and
  upstream gradients of very different size.
- The second derivative is correct if its terms neither overflow nor underflow.

The range of a dtype includes subnormal numbers, unless they are flushed to zero.

The backward pass is written by hand, in differentiable operations. In automatic differentiation, a derivative
dL_i/ds_ij might underflow before it is multiplied by 1 / (temperature * norm). Here it remains a coefficient times the
exponential of a logarithm. Each row of the gradient is accumulated relative to its largest weight, and scaled back
last.

All losses except the binary cross-entropies are written in terms of lse_P and lse_N, the log-sum-exps over positives
and negatives. Under ``denominator="one_positive"``, the logit of the positive takes the place of lse_P.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import formulas
from .device import dtypes_of
from .rowwise import masks_of, own_columns
from .scaling import differentiable_rows
from .spec import EPSILON, LN2, AnchorValues, Batch, Rule
from .transforms import Reverse

LN2_HIGH = 355 / 512
"""log(2), rounded to so few bits that its product with an exponent is exact."""
LN2_LOW = -2.121944400546905827679e-4
"""log(2) - LN2_HIGH."""


class _Range(NamedTuple):
    factor: int
    """Largest ``|e|`` used in a factor 2^e; such factors are finite and normal."""
    boost: int
    """The largest weight of a row is accumulated as about 2^boost, so that smaller ones do not underflow."""
    saturated: int
    """For ``|e|`` above this, any number times 2^e is zero or infinity."""


_RANGES = {torch.float64: _Range(1000, 800, 2112), torch.float32: _Range(120, 64, 288)}


def anchor_values(batch: Batch) -> AnchorValues:
    """Evaluate one value per anchor; see `pairproof.fast.engine.anchor_values`."""
    embeddings, rule, others = batch.embeddings, batch.rule, batch.references.embeddings
    count = embeddings.shape[0]
    columns = count if others is None else others.shape[0]
    positive, negative, _ = masks_of(batch.targets, own_columns(batch), slice(0, count), count, columns)
    positives, negatives = positive.sum(1), negative.sum(1)
    valid = formulas.counted(batch, positives, negatives)
    rows = torch.ones_like(positives, dtype=torch.bool) if valid is None else valid
    if others is not None:
        embeddings = torch.cat((embeddings, others))
        positive, negative = (F.pad(mask, (count, 0, 0, columns)) for mask in (positive, negative))
        rows = F.pad(rows, (0, columns))
    if isinstance(rule.temperature, Tensor) or isinstance(rule.bias, Tensor):
        embeddings = differentiable_rows(embeddings.to(dtypes_of(embeddings)[1]), rule)
        if isinstance(rule.bias, Tensor):
            embeddings = torch.cat((embeddings, _bias_column(rule.bias, embeddings, count)), 1)
            rule = replace(rule, bias=0.0)
        rule = replace(rule, temperature=1.0, similarity="dot")
    evaluation: Any = _AnchorValues if torch.compiler.is_compiling() else _Transformable
    values = evaluation.apply(embeddings, positive, negative, rows, batch.targets.kind == "partners", rule)
    return AnchorValues(values[:count], positives, negatives)


def _bias_column(bias: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return a column that, appended to rows ``[N + M, D]``, adds a bias to the products of N anchors with M others.

    It holds bias / power for the anchors, and power for the others, both of similar size.
    """
    power = torch.exp2((torch.frexp(bias.detach()).exponent / 2).round()).to(rows)
    return torch.cat(((bias.to(rows) / power).expand(count, 1), power.expand(rows.shape[0] - count, 1)))


class _AnchorValues(torch.autograd.Function):
    """Per-anchor values ``[N]`` of embeddings ``[N, D]``."""

    @staticmethod
    def forward(embeddings: Tensor, positive: Tensor, negative: Tensor, rows: Tensor, lone: bool, rule: Rule) -> Tensor:
        row = _Row(embeddings, positive, negative, rows, lone, rule)
        return torch.where(row.rows, formulas.value(row.rule, row)[:, 0], 0.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:4])
        ctx.lone, ctx.rule = inputs[4:]

    @staticmethod
    def backward(ctx: Any, grad_values: Tensor) -> tuple[Tensor | None, ...]:
        embeddings, positive, negative, rows = ctx.saved_tensors
        row = _Row(embeddings, positive, negative, rows, ctx.lone, ctx.rule)
        gradient = _pull(torch.where(row.rows, grad_values, 0.0), _weights(row), row.scaled, row.temperature)
        return gradient.to(embeddings.dtype), *(None,) * 5


class _Transformable(Reverse, _AnchorValues):
    """`_AnchorValues` with rules for `torch.func`."""


class _Scaled(NamedTuple):
    """Embeddings as rows of size about one: embedding j is ``basis[j] * norm[j] * 2^exponent[j]``.

    Under "dot" there is no norm. The derivative of a logit with respect to one row then contains the other row, whose
    exponent is ``carried``. Under "cosine" the other row is a unit vector, so ``carried`` is zero.
    """

    basis: Tensor
    exponent: Tensor
    carried: Tensor
    norm: Tensor | None


def _scale_rows(embeddings: Tensor, rule: Rule) -> _Scaled:
    rows = embeddings.to(dtypes_of(embeddings)[1])
    limit = _RANGES[rows.dtype].factor
    largest = rows.detach().abs().amax(1)
    exponent = torch.frexp(largest).exponent.clamp(-limit, limit).to(rows.dtype)
    # An infinite row becomes NaN.
    rows = rows * torch.where(largest.isfinite(), torch.exp2(-exponent), math.nan)[:, None]
    if rule.similarity == "dot":
        return _Scaled(rows, exponent, exponent, None)
    if rule.zero_row == "zero":
        # For a row of zeros, an infinite norm makes the unit vector and the gradient 0.
        kept = largest != 0
        some = torch.where(kept[:, None], rows, 1.0)
        norm = torch.where(kept, (some * some).sum(1).sqrt(), math.inf)
    else:
        norm = (rows * rows).sum(1).sqrt()
    return _Scaled(rows / norm[:, None], exponent, torch.zeros_like(exponent), norm)


def _logits(scaled: _Scaled, temperature: float) -> Tensor:
    products = scaled.basis @ scaled.basis.T / temperature
    if scaled.norm is not None:
        return products
    exponent = scaled.exponent[:, None] + scaled.exponent[None, :]
    half = torch.floor(exponent / 2)
    return products * torch.exp2(half) * torch.exp2(exponent - half)


class _LogSum(NamedTuple):
    """The logarithm of a sum of exponentials, ``top + log``, both ``[N, 1]``; zero for an empty sum."""

    top: Tensor
    log: Tensor


def _log_sum(logarithms: Tensor, mask: Tensor) -> _LogSum:
    some = mask.any(1, keepdim=True)
    top = torch.where(mask, logarithms.detach(), -math.inf).amax(1, keepdim=True)
    top = torch.where(some, top, 0.0)
    # The inner `where` keeps the exponential finite. Otherwise, a second derivative would contain 0 * inf.
    exponentials = torch.where(mask, torch.where(mask, logarithms - top, 0.0).exp(), 0.0)
    return _LogSum(top, torch.where(some, exponentials.sum(1, keepdim=True), 1.0).log())


def _log_sigmoid(x: Tensor) -> Tensor:
    return F.logsigmoid(x.clamp(min=torch.finfo(x.dtype).min))


def _softplus(x: Tensor) -> Tensor:
    return -_log_sigmoid(-x)


def _log_mean_above(logarithms: Tensor, over: _LogSum, mask: Tensor, count: Tensor) -> Tensor:
    """Return log(mean of e^(logarithms - over.top)) over the mask, ``[N, 1]``."""
    excess = torch.where(mask, logarithms - over.top, 0.0).expm1()
    mean = excess.sum(1, keepdim=True) / count.clamp(min=1)
    return torch.where(mean > -0.5, mean.clamp(min=-0.5).log1p(), over.log - count.clamp(min=1).log())


class _Row:
    """The logits, masks and sums of one batch, as a `formulas.Row`."""

    def __init__(
        self, embeddings: Tensor, positive: Tensor, negative: Tensor, rows: Tensor, lone: bool, rule: Rule
    ) -> None:
        assert not isinstance(rule.temperature, Tensor)
        self.scaled = scaled = _scale_rows(embeddings, rule)
        self.rows, self.lone, self.rule, self.temperature = rows, lone, rule, rule.temperature
        dtype = scaled.basis.dtype
        self.positive = positive & rows[:, None]
        self.negative = negative & rows[:, None]
        self.both = self.positive | self.negative
        self.number = self.positive.sum(1, keepdim=True).to(dtype).clamp(min=1)
        self.negatives = self.negative.sum(1, keepdim=True).to(dtype)
        self.some_negative = self.negatives > 0
        logits = _logits(scaled, rule.temperature)
        if rule.terms == "sigmoid":
            logits = logits + rule.bias
        # Unused logits, such as those of self pairs, may overflow.
        self.logits = torch.where(self.both, logits, 0.0)
        self_pair = torch.eye(rows.shape[0], dtype=torch.bool, device=rows.device)
        self.group = (positive | self_pair).float().argmax(1)
        self.log_slope: Tensor | None = None
        self.star: Tensor | None = None
        if rule.terms == "epsilon":
            self._guard(logits, rows)
        if rule.terms not in ("binary", "sigmoid"):
            self.over_negatives = _log_sum(self.logits, self.negative)
            if rule.denominator != "one_positive":
                self.over_positives = _log_sum(self.logits, self.positive)

    def _guard(self, logits: Tensor, rows: Tensor) -> None:
        """Replace logits by log(e^(s - max) + epsilon), plus a constant; store the logarithm of the derivative.

        The constant of each row cancels in the formula. It brings the row's largest results near zero, so that their
        differences keep their digits.

        The maximum includes the self pair. Under "cosine" it is therefore a constant. Under "dot", ``star`` marks the
        pair that attains it, the first one on a tie.
        """
        if self.scaled.norm is not None:
            below = self.below_self()
        else:
            compared = self.both | torch.eye(len(rows), dtype=torch.bool, device=rows.device)
            bounded = torch.where(compared, logits.clamp(max=torch.finfo(logits.dtype).max), -math.inf)
            first = (bounded == bounded.amax(1, keepdim=True)).float().argmax(1, keepdim=True)
            self.star = torch.zeros_like(self.positive).scatter(1, first, True) & rows[:, None]
            below = logits - bounded.gather(1, first)
        below = torch.where(self.both, below, 0.0)
        offset = below - math.log(EPSILON)
        near = below > -1
        of_guard = _softplus(offset)
        of_maximum = torch.where(near, (below.expm1() / (1 + EPSILON)).log1p(), of_guard - math.log1p(1 / EPSILON))
        self.logits = torch.where((near & self.both).any(1, keepdim=True), of_maximum, of_guard)
        self.log_slope = _log_sigmoid(offset)

    def below_self(self) -> Tensor:
        """Return (cosine - 1) / temperature, ``[N, N]``, without cancellation for rows that are almost equal.

        The cosine of rows closer than 1e-8 rounds to 1. So each row is grouped with the first column among its
        positives and itself. Within a group, the result is computed from the rows' differences from that column's row.
        """
        offset = self.scaled.basis - self.scaled.basis[self.group]
        squares = (offset * offset).sum(1)
        distance = (squares[:, None] + squares[None, :]) / 2 - offset @ offset.T
        same = self.group[:, None] == self.group[None, :]
        if self.rule.zero_row == "zero" and self.scaled.norm is not None:
            unit = self.scaled.norm.isfinite()
            same = same & unit[:, None] & unit
        return torch.where(same, -distance / self.temperature, self.logits - 1 / self.temperature)

    def log_negatives(self) -> Tensor:
        return self.over_negatives.top + self.over_negatives.log

    def odds(self) -> Tensor:
        negative, positive = self.over_negatives, self.over_positives
        return (negative.top - positive.top) + (negative.log - positive.log)

    def softplus_odds(self) -> Tensor:
        return torch.where(self.some_negative, _softplus(self.odds()), 0.0)

    def missed(self) -> Tensor:
        return _log_sigmoid(self.odds())

    def positives_over_mean(self) -> Tensor:
        return self.over_positives.log + self._mean_below(self.over_positives.top)

    def negatives_over_mean(self) -> Tensor:
        return self._mean_below(self.over_negatives.top) + self.over_negatives.log

    def negatives_over_positives(self, inside: str) -> Tensor:
        """Return the odds, plus log |P| for "mean"; accurate if logits are nearly equal."""
        negative = _log_mean_above(self.logits, self.over_negatives, self.negative, self.negatives)
        positive = _log_mean_above(self.logits, self.over_positives, self.positive, self.number)
        means = (self.over_negatives.top - self.over_positives.top) + (negative - positive)
        number = self.negatives.clamp(min=1)
        return means + (number if inside == "mean" else number / self.number).log()

    def _mean_below(self, top: Tensor) -> Tensor:
        """Return the mean over positives of ``top - s``, ``[N, 1]``; it overflows only if the true mean does."""
        # Scaled only near the end of the range, because small logits might underflow.
        large = self.logits.abs().amax() > 2.0 ** _RANGES[self.logits.dtype].factor
        scale = torch.where(large, 2.0**-64, 1.0).to(self.logits.dtype)
        below = torch.where(self.positive, top * scale - self.logits * scale, 0.0)
        return below.sum(1, keepdim=True) / self.number / scale

    def guarded_sum(self) -> Tensor:
        return (self.softplus_odds() + self.positives_over_mean()) * self.number

    def sum_softplus(self) -> Tensor:
        losses = _softplus(torch.where(self.positive, -self.logits, self.logits))
        return torch.where(self.both, losses, 0.0).sum(1, keepdim=True)

    def mean_softplus(self, sign: int, more: int) -> Tensor:
        mask = self.negative if sign > 0 else self.positive
        number = mask.sum(1, keepdim=True).to(self.logits.dtype) + more
        return _mean(_softplus(sign * self.logits), mask, number.clamp(min=1))

    def own_odds(self) -> Tensor:
        """Return lse_N - s_ij, ``[N, N]``, zero outside the positives."""
        negative = self.over_negatives
        return torch.where(self.positive, (negative.top - self.logits) + negative.log, 0.0)

    def own_softplus(self) -> Tensor:
        return _mean(_softplus(self.own_odds()), self.positive, self.number)

    def own_log_missed(self) -> Tensor:
        return _log_sigmoid(self.own_odds())

    def own_missed(self) -> Tensor:
        return _mean(self.own_log_missed().exp(), self.positive, self.number)

    def own_log_hit(self, inside: str) -> Tensor:
        hit = _log_sum(_log_sigmoid(-self.own_odds()), self.positive)
        return hit.top + hit.log - (self.number.log() if inside == "mean" else 0.0)

    def own_log_share(self) -> Tensor:
        """Return log(sigmoid(-o) / mean over P of sigmoid(-o)), ``[N, N]``.

        If all positives of a row are far below its negatives, lse_N is omitted: it cancels, and would hide the
        differences between positives.
        """
        odds = self.own_odds()
        nearest = torch.where(self.positive, odds.detach(), math.inf).amin(1, keepdim=True)
        hit = torch.where(nearest > 64, self.logits + _log_sigmoid(odds), _log_sigmoid(-odds))
        over = _log_sum(hit, self.positive)
        return (hit - over.top) - over.log + self.number.log()

    def share_of_negatives(self) -> Tensor:
        """Return s_ij - lse_N, ``[N, N]``, zero outside the negatives."""
        return torch.where(self.negative, (self.logits - self.over_negatives.top) - self.over_negatives.log, 0.0)

    def share_of_positives(self) -> Tensor:
        """Return s_ij - lse_P, ``[N, N]``, zero outside the positives."""
        return torch.where(self.positive, (self.logits - self.over_positives.top) - self.over_positives.log, 0.0)

    def from_even(self) -> Tensor:
        """Return q_ij - 1 / |P(i)| with q the softmax among positives, ``[N, N]``, zero outside the positives.

        With expm1, nearly equal positives keep their digits, and equal positives give 0.
        """
        guarded = self.log_slope is not None
        logits = self.logits if guarded or self.scaled.norm is None else self.below_self()
        top = torch.where(self.positive, logits.detach(), -math.inf).amax(1, keepdim=True)
        excess = torch.where(self.positive, logits - top, 0.0).expm1()
        total = excess.sum(1, keepdim=True)
        count = self.number
        return torch.where(self.positive, (excess - total / count) / (count + total).clamp(min=1), 0.0)


def _mean(values: Tensor, mask: Tensor, count: Tensor) -> Tensor:
    """Return the sum of ``values`` over ``mask`` divided by ``count``, ``[N, 1]``."""
    large = values.abs().amax() > 2.0 ** (_RANGES[values.dtype].factor - 64)
    room = torch.where(large, 2.0**-64, 1.0).to(values.dtype)
    return torch.where(mask, values * room, 0.0).sum(1, keepdim=True) / count / room


class _WeightTerm(NamedTuple):
    """One term of the weights dL_i/ds_ij: ``coefficient * exp(logarithm)`` inside ``mask``, else 0; all ``[N, N]``.

    The weights of a loss are the sum of one or two terms.
    """

    coefficient: Tensor
    logarithm: Tensor
    mask: Tensor


def _weights(row: _Row) -> list[_WeightTerm]:
    rule, dtype = row.rule, row.logits.dtype
    if rule.terms == "lse":
        return [_WeightTerm(row.negative.to(dtype), row.share_of_negatives(), row.both)]
    if rule.terms == "epsilon":
        return [_guarded_weights(row)]
    sign = torch.where(row.positive, -1.0, 1.0).to(dtype)
    terms = []
    both = row.both
    if rule.terms == "sigmoid":
        positive, negative = _log_sigmoid(-row.logits), _log_sigmoid(row.logits)
    elif rule.terms == "binary":
        positives = row.positive.sum(1, keepdim=True).to(dtype)
        positive = _log_sigmoid(-row.logits) - (positives + 1).log()
        negative = _log_sigmoid(row.logits) - row.negatives.clamp(min=1).log()
    elif rule.denominator == "one_positive":
        positive = formulas.own_log_weights(rule, row) - row.number.log()
        total = _log_sum(positive, row.positive)
        negative = row.share_of_negatives() + (total.top + total.log)
    else:
        positive, negative = row.share_of_positives(), row.share_of_negatives()
        c = formulas.coefficient(rule, row)
        if c is not None:
            positive, negative, both = positive + c, negative + c, both & row.some_negative
            if formulas.has_mean(rule) and not row.lone:
                even = row.positive & (row.number > 1)
                terms.append(_WeightTerm(row.from_even(), torch.zeros_like(row.logits), even))
        elif formulas.has_mean(rule):
            positive = -row.number.log()  # the weight is -1/n
    return [_WeightTerm(sign, torch.where(row.positive, positive, negative), both), *terms]


def _guarded_weights(row: _Row) -> _WeightTerm:
    assert row.log_slope is not None
    missed = torch.where(row.some_negative, torch.sigmoid(row.odds()), 0.0)
    positive = row.from_even() - missed * row.share_of_positives().exp()
    negative = missed * row.share_of_negatives().exp()
    coefficient = torch.where(row.positive, positive, torch.where(row.negative, negative, 0.0))
    coefficient = coefficient * (row.number / (row.number + EPSILON))
    if row.star is None:
        return _WeightTerm(coefficient, row.log_slope, row.both)
    # Raising the maximum lowers all other logits relative to it. Its weight is minus the sum of the others.
    others = row.both & ~row.star
    top = torch.where(others, row.log_slope.detach(), -math.inf).amax(1, keepdim=True)
    top = torch.where(top.isfinite(), top, 0.0)
    relative = torch.where(others, torch.where(others, row.log_slope - top, 0.0).exp() * coefficient, 0.0)
    coefficient = torch.where(row.star, -relative.sum(1, keepdim=True), coefficient)
    return _WeightTerm(coefficient, torch.where(row.star, top, row.log_slope), row.both | row.star)


def _pull(grad_values: Tensor, terms: list[_WeightTerm], scaled: _Scaled, temperature: float) -> Tensor:
    """Return the gradient ``[N, D]`` of ``sum_i grad_values[i] * L_i`` in the computing dtype."""
    room = _RANGES[scaled.basis.dtype]
    exponent = torch.frexp(grad_values.detach()).exponent.clamp(-room.factor, room.factor).to(grad_values.dtype)
    mantissa = (grad_values * torch.exp2(-exponent))[:, None]
    upstream = torch.where(grad_values.detach() == 0, -math.inf, exponent)[:, None]
    carried = scaled.carried[None, :]
    weights = [_split_power(term) for term in terms]
    # Row i of the gradient is the sum over j of (W_ij + W_ji) times row j of the basis.
    # `scale` is the exponent of the largest term of each row. `own` holds W scaled for its rows, `others` W scaled for
    # its columns.
    scale = torch.full_like(grad_values, -math.inf)
    for term, (_, power) in zip(terms, weights, strict=True):
        level = torch.where(term.mask, power, -math.inf) + upstream
        scale = torch.maximum(scale, torch.maximum((level + carried).amax(1), (level + carried.T).amax(0)))
    scale = torch.where(scale.isfinite(), scale, 0.0)
    lift = exponent[:, None] + room.boost
    # The clamp affects only anchors whose upstream gradient is zero, which the scale ignores.
    limit = room.boost + 64
    own, others = torch.zeros_like(level), torch.zeros_like(level)
    for weight, power in weights:
        weight = weight * mantissa
        own = own + weight * torch.exp2((power + (lift + carried - scale[:, None])).clamp(max=limit))
        others = others + weight * torch.exp2((power + (lift + carried.T - scale[None, :])).clamp(max=limit))
    # The weights are added before the product: if they cancel for a large row, its rounding error would hide small
    # rows.
    gradient = (own + others.T) @ scaled.basis
    scale = scale - room.boost
    if scaled.norm is not None:
        gradient = _off_row(gradient, scaled.basis) / scaled.norm[:, None]
        scale = scale - scaled.exponent
    return _times_power(gradient / temperature, scale[:, None])


def _split_power(term: _WeightTerm) -> tuple[Tensor, Tensor]:
    """Return a term's weights as a number near the coefficient and an exponent of two, ``[N, N]`` each.

    The power of two is exact, so weights that cancel still cancel after scaling.
    """
    # A weight of e^-4000 is zero in float64, whatever it is multiplied by.
    logarithm = torch.where(term.mask, term.logarithm, 0.0).clamp(min=-4000)
    power = (logarithm.detach() / LN2).round()
    weight = ((logarithm - power * LN2_HIGH) - power * LN2_LOW).exp()
    return torch.where(term.mask, term.coefficient, 0.0) * weight, power


def _off_row(vectors: Tensor, units: Tensor) -> Tensor:
    """Subtract from each row of ``vectors`` its component along the unit row of ``units``; both ``[N, D]``.

    If a unit row u is almost parallel to axis k, entry k of ``v - (v.u) u`` would be lost to cancellation. It is
    computed from the other entries of u, whose squares add up to 1 - u_k^2.
    """
    axis = torch.zeros_like(units, dtype=torch.bool).scatter(1, units.detach().abs().argmax(1, keepdim=True), True)
    rest = torch.where(axis, 0.0, units)
    along_rest = (vectors * rest).sum(1, keepdim=True)
    on_axis = torch.where(axis, vectors * units, 0.0).sum(1, keepdim=True)
    return torch.where(
        axis,
        vectors * (rest * rest).sum(1, keepdim=True) - units * along_rest,
        vectors - (on_axis + along_rest) * units,
    )


def _times_power(values: Tensor, exponent: Tensor) -> Tensor:
    """Return ``values * 2^exponent``, in steps that overflow or underflow only if the result does."""
    limit = _RANGES[values.dtype].saturated
    exponent = exponent.clamp(-limit, limit)
    third = torch.trunc(exponent / 3)
    step = torch.exp2(third)
    return values * step * step * torch.exp2(exponent - 2 * third)
