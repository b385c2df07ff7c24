"""The formulas: an anchor's value, its derivative by each logit, and what a batch of values reduces to.

With s_ij the logits of anchor i, P and N its positives and negatives, n = |P| and m = |N|,

    odds   = log(sum over N of e^s / sum over P of e^s)
    share  = e^s / (the sum of e^s over N for a negative, over P for a positive)

the value of the terms "out" and "in", and its derivative by the logit of a negative and of a positive, are

    value     = contrast + log(sum over P of e^s) - mean over P of s      "out"
    value     = contrast + log n                                          "in"
    negative  =  c share,    positive = -c share + (share - 1/n)          "out"
    negative  =  c share,    positive = -c share                          "in"

where an anchor's value is -log(sum over P / sum over D) but for means, and D is

    "all"             P and N:  contrast = softplus(odds),  c = sigmoid(odds)
    "only_negatives"  N:        contrast = odds,            c = 1

With "one_positive" each positive has its own odds, o_p = log(sum over N of e^s) - s_p, and the value is the mean over P
of softplus(o_p), or -log(mean over P of sigmoid(-o_p)); w_p stands for minus the derivative by s_p:

    w_p = sigmoid(o_p) / n    "out"      w_p = sigmoid(o_p) sigmoid(-o_p) / sum over P of sigmoid(-o)    "in"
    negative  = (sum over P of w) share,    positive = -w_p

"lse" is log(sum over N of e^s), whose derivative is the share. "binary" is the sum over P of softplus(-s) / (n + 1)
plus the sum over N of softplus(s) / m. "epsilon" is "out" for logits log(e^(s - max) + epsilon), times
n / (n + epsilon). The sums are formed in no way that overflows or loses digits: each evaluation has its own `Row`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .device import dtypes_of
from .spec import EPSILON, AnchorValues, Batch, Policy, Rule


class Row(Protocol):
    """What the sums of each row say, all ``[N]`` or all ``[N, 1]``, in a form that loses no digits."""

    @property
    def number(self) -> Tensor | None:
        """How many positives, at least 1; None where each row has exactly one."""

    def log_negatives(self) -> Tensor:
        """log(sum over N of e^s)."""

    def odds(self) -> Tensor:
        """log(sum over N of e^s / sum over P of e^s)."""

    def softplus_odds(self) -> Tensor:
        """log(sum over P and N of e^s / sum over P of e^s)."""

    def positives_over_mean(self) -> Tensor:
        """log(sum over P of e^s) - mean over P of s."""

    def negatives_over_mean(self) -> Tensor:
        """log(sum over N of e^s) - mean over P of s."""

    def negatives_over_log_mean(self) -> Tensor:
        """Odds + log n."""

    def missed(self) -> Tensor:
        """sigmoid(odds): the negatives' part of the sum over P and N; a logarithm where weights are logarithms."""

    def own_log_missed(self) -> Tensor:
        """Log sigmoid(o) of each positive, ``[N, M]``."""

    def own_log_share(self) -> Tensor:
        """log(sigmoid(-o) / mean over P of sigmoid(-o)) of each positive, ``[N, M]``."""

    def own_softplus(self) -> Tensor:
        """Mean over P of softplus(o)."""

    def own_missed(self) -> Tensor:
        """Mean over P of sigmoid(o)."""

    def own_log_hit(self) -> Tensor:
        """log(mean over P of sigmoid(-o))."""

    def mean_softplus(self, sign: int, more: int) -> Tensor:
        """Sum of softplus(sign s) over N, or where the sign is -1 over P, over their number and ``more``."""

    def guarded_sum(self) -> Tensor:
        """Sum over P of -log(e_p / sum over P and N of e), e = e^(s - max) + epsilon."""


def value(rule: Rule, row: Row) -> Tensor:
    """Return the value of each row; meaningless, but finite, where the rule gives a row nothing to sum over."""
    if rule.terms == "lse":
        return row.log_negatives()
    if rule.terms == "binary":
        return row.mean_softplus(-1, 1) + row.mean_softplus(1, 0)
    if row.number is None:
        return row.odds() if rule.denominator == "only_negatives" else row.softplus_odds()
    if rule.terms == "epsilon":
        return row.guarded_sum() / (row.number + EPSILON)
    if rule.denominator == "one_positive":
        if rule.terms == "out":
            return row.own_softplus()
        # The mean of the ratios is 1 - missed, which says nothing once it rounds to 1; the other says nothing before.
        missed = row.own_missed()
        return torch.where(missed < 0.5, -torch.log1p(-missed.clamp(max=0.5)), -row.own_log_hit())
    if rule.denominator == "only_negatives":
        return row.negatives_over_mean() if rule.terms == "out" else row.negatives_over_log_mean()
    return row.softplus_odds() + (row.positives_over_mean() if rule.terms == "out" else row.number.log())


def coefficient(rule: Rule, row: Row) -> Tensor | None:
    """Return c, the derivative of the contrast by the odds; None where it is 1."""
    return None if rule.terms == "lse" or rule.denominator == "only_negatives" else row.missed()


def has_mean(rule: Rule) -> bool:
    """Whether the weight of a positive has the part ``share - 1/n``."""
    return rule.terms in ("out", "epsilon")


def own_log_weights(rule: Rule, row: Row) -> Tensor:
    """Return log(n w) of each positive, ``[N, M]``."""
    missed = row.own_log_missed()
    return missed if rule.terms == "out" else missed + row.own_log_share()


class Sums(NamedTuple):
    """Sums of unshifted exponentials E = e^s per row, ``[N]`` each.

    The last three serve the denominators that each positive has for itself, with r = E / (E + neg) its ratio; they are
    empty otherwise.

    Attributes:
        neg: sum over negatives of E.
        pos: sum over positives of E.
        missed: sum over positives of 1 - r.
        first: sum over positives of -log r; inside the logarithm, of r times `boost`.
        second: inside the logarithm, sum over positives of r (1 - r) times `boost`.
    """

    neg: Tensor
    pos: Tensor
    missed: Tensor
    first: Tensor
    second: Tensor

    def boost(self) -> Tensor:
        """Return a factor for a row's ratios: where all positives are far below the negatives they would underflow."""
        return torch.where(self.pos > 0, self.neg / self.pos, 1.0).clamp(min=1)


class Weights(NamedTuple):
    """The derivatives of ``sum_i grad_i L_i`` by the logits of each row, as coefficients ``[N]``.

    A negative weighs ``negative * E``. A positive weighs ``slope * E + level``; where each positive has its own
    denominator ``level * (1 - r)``, or inside the logarithm ``level * r (1 - r) * boost``.
    """

    negative: Tensor
    slope: Tensor
    level: Tensor


def weights(rule: Rule, grad: Tensor, sums: Sums, number: Tensor | None) -> Weights:
    """Return the coefficients of each row's exponentials.

    Args:
        rule: the formula.
        grad: ``[N]``, 0 for every row that is no anchor or has nothing to sum over.
        sums: of each row.
        number: n in the computing dtype, or None where each row has exactly one positive.
    """
    neg, pos = sums.neg, sums.pos
    if number is None and rule.denominator != "only_negatives":
        negative = grad / (neg + pos)
        return Weights(negative, negative, -negative * neg)
    zero = torch.zeros_like(grad)
    if number is None:
        return Weights(torch.where(neg > 0, grad / neg, 0.0), zero, -grad)
    alone, number = number <= 1, number.clamp(min=1)
    if rule.denominator == "one_positive":
        if rule.terms == "out":
            return Weights(torch.where(neg > 0, grad * sums.missed / number / neg, 0.0), zero, -grad / number)
        level = torch.where(sums.first > 0, grad / sums.first, 0.0)
        return Weights(torch.where(neg > 0, level * sums.second / neg, 0.0), zero, -level)
    # One positive alone weighs -c, which the difference of two shares would round away.
    per_positive, level = grad / pos, -grad / number
    if rule.denominator == "only_negatives":
        negative, slope, of_one = torch.where(neg > 0, grad / neg, 0.0), zero, -grad
    else:
        missed = neg / (neg + pos)
        negative = slope = grad / (neg + pos)
        per_positive, of_one = per_positive * missed, -grad * missed
    if rule.terms == "in":
        slope, level = -per_positive, zero
    return Weights(negative, torch.where(alone, 0.0, slope), torch.where(alone, of_one, level))


def counted(batch: Batch, positives: Tensor, negatives: Tensor) -> Tensor | None:
    """Return which rows are anchors with something to sum over, bool ``[N]``, or None where all are by construction."""
    rule, rows = batch.rule, batch.anchors
    if rule.terms not in ("binary", "lse") and batch.targets.kind != "partners":
        some = positives > 0
        rows = some if rows is None else rows & some
    if rule.terms == "lse" or (rule.terms in ("out", "in") and rule.denominator != "all"):
        some = negatives > 0
        rows = some if rows is None else rows & some
    return rows


def reduced(found: AnchorValues, batch: Batch, policy: Policy) -> Tensor:
    """Apply the policies for anchors that lack positives or negatives, then the reduction and the base temperature.

    Returns:
        A scalar, or one value per counted anchor under "none". Over no anchors, mean and sum are 0 with gradient 0.
    """
    values, positives, negatives = found
    rule = batch.rule
    rows = batch.anchors
    if policy.no_negative == "nan" and (rule.terms == "binary" or rule.denominator == "only_negatives"):
        values = torch.where(negatives == 0, torch.nan, values)
    if policy.no_positive == "nan":
        values = torch.where(positives == 0, torch.nan, values)
    elif policy.no_positive == "drop":
        rows = positives > 0 if rows is None else rows & (positives > 0)
    if policy.reduction == "none":
        result = values if rows is None else values[rows]
    else:
        if rows is not None:
            values = torch.where(rows, values, 0.0)
        # A sum of float32 values cannot overflow in float64. That of float64 values might where its mean does not:
        # those near the dtype's end are added at 2^-64 of their size, all others as they are.
        scale = None
        if values.dtype == torch.float64:
            large = values.detach().abs().amax() > torch.finfo(torch.float64).max ** 0.9
            scale = torch.where(large, 2.0**-64, 1.0).to(torch.float64)
            values = values * scale
        wide = None if values.device.type == "mps" else torch.float64
        if policy.reduction == "mean" and rows is None:
            result = values.mean(dtype=wide)
        else:
            weights = positives if policy.reduction == "mean_pairs" else None
            if weights is not None:
                values = values * weights
            if rows is not None:
                weights = torch.where(rows, 1 if weights is None else weights, 0)
            result = values.sum(dtype=wide)
            if policy.reduction != "sum" and weights is not None:
                result = result / weights.sum().clamp(min=1)
        result = result if scale is None else result / scale
    if policy.base_temperature is not None:
        result = result * (rule.temperature / policy.base_temperature)
    return result.to(dtypes_of(batch.embeddings)[0])
