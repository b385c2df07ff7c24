"""The formulas: an anchor's value, its derivative with respect to each logit, and the reduction of a batch of values.

Let s_ij be the logits of anchor i, P and N its positives and negatives, n = |P| and m = |N|.

    odds   = log(sum over N of e^s / sum over P of e^s)
    share  = e^s / (the sum of e^s over N for a negative, over P for a positive)

For the terms "out" and "in", the value and its derivatives with respect to the logit of a negative or a positive are

    value     = contrast + log(sum over P of e^s) - mean over P of s      "out"
    value     = contrast + log n                                          "in" with the mean of the ratios
    value     = contrast                                                  "in" with their sum
    negative  =  c share,    positive = -c share + (share - 1/n)          "out"
    negative  =  c share,    positive = -c share                          "in"

The contrast is -log(sum over P of e^s / sum over D of e^s). D and c depend on the denominator:

    "all"             P and N:  contrast = softplus(odds),  c = sigmoid(odds)
    "only_negatives"  N:        contrast = odds,            c = 1

With the denominator "one_positive", each positive p has its own odds, o_p = log(sum over N of e^s) - s_p:

    value     = mean over P of softplus(o_p)                              "out"
    value     = -log(mean, or sum, over P of sigmoid(-o_p))               "in"
    w_p       = sigmoid(o_p) / n                                          "out"
    w_p       = sigmoid(o_p) sigmoid(-o_p) / sum over P of sigmoid(-o)    "in"
    negative  = (sum over P of w) share,    positive = -w_p

The other terms:

    "lse"      log(sum over N of e^s); its derivative is the share
    "binary"   sum over P of softplus(-s) / (n + 1)  +  sum over N of softplus(s) / m
    "sigmoid"  sum over P of softplus(-s)  +  sum over N of softplus(s)
    "epsilon"  n / (n + epsilon) times "out" of the logits log(e^(s - max) + epsilon), max = the row's largest logit

With weights of positives, the means over P are weighted: 1/n becomes the positive's weight divided by their sum. With
weights of negatives, s is the logit of a negative plus the logarithm of its weight.

Each form computes these sums in its own `Row`, in a way that neither overflows nor loses digits.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from .device import dtypes_of
from .spec import EPSILON, AnchorValues, Batch, Policy, Rule

SUM_OF_OWN_RATIOS = "in", "one_positive", "sum"
"""Terms, denominator and reduction for which an anchor without negatives has the value -log n instead of 0."""


class Underflow(ArithmeticError):
    """Some sums of shifted exponentials have lost digits, so that the rows need shifts of their own."""


class Row(Protocol):
    """Quantities of each row, computed without loss of digits.

    They are all ``[N]`` or all ``[N, 1]``, except those of each positive, which are ``[N, M]``.
    """

    @property
    def number(self) -> Tensor | None:
        """The number of positives, at least 1 except in "epsilon" terms; None if each row has at most one."""

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

    def negatives_over_positives(self, inside: str) -> Tensor:
        """Odds, plus log n if ``inside`` is "mean": log(sum over N of e^s / mean over P of e^s)."""

    def missed(self) -> Tensor:
        """sigmoid(odds); in `exact`, its logarithm."""

    def own_log_missed(self) -> Tensor:
        """Log sigmoid(o) of each positive, ``[N, M]``."""

    def own_log_share(self) -> Tensor:
        """log(sigmoid(-o) / mean over P of sigmoid(-o)) of each positive, ``[N, M]``."""

    def own_softplus(self) -> Tensor:
        """Mean over P of softplus(o)."""

    def own_missed(self) -> Tensor:
        """Mean over P of sigmoid(o)."""

    def own_log_hit(self, inside: str) -> Tensor:
        """Logarithm of the mean, or of the sum, over P of sigmoid(-o)."""

    def mean_softplus(self, sign: int, more: int) -> Tensor:
        """Sum of softplus(sign s) divided by (number of terms + more), over N if the sign is 1, over P if it is -1."""

    def sum_softplus(self) -> Tensor:
        """Sum over P of softplus(-s), plus the sum over N of softplus(s)."""

    def guarded_sum(self) -> Tensor:
        """Sum over P of -log(g_p / sum over P and N of g), g = e^(s - max) + epsilon."""


def value(rule: Rule, row: Row) -> Tensor:
    """Return the value of each row; meaningless if a row lacks the positives or negatives that the rule needs."""
    if rule.terms == "lse":
        return row.log_negatives()
    if rule.terms == "binary":
        return row.mean_softplus(-1, 1) + row.mean_softplus(1, 0)
    if rule.terms == "sigmoid":
        return row.sum_softplus()
    if rule.terms == "epsilon":
        return row.guarded_sum() / ((1 if row.number is None else row.number) + EPSILON)
    if row.number is None:
        return row.odds() if rule.denominator == "only_negatives" else row.softplus_odds()
    if rule.denominator == "one_positive":
        if rule.terms == "out":
            return row.own_softplus()
        # The mean of the ratios is 1 - missed. log1p(-missed) is accurate near 1, the direct logarithm elsewhere.
        missed = row.own_missed()
        near = torch.log1p(-missed.clamp(max=0.5))
        near = near if rule.inside_reduction == "mean" else near + row.number.log()
        return -torch.where(missed < 0.5, near, row.own_log_hit(rule.inside_reduction))
    if rule.denominator == "only_negatives":
        if rule.terms == "out":
            return row.negatives_over_mean()
        return row.negatives_over_positives(rule.inside_reduction)
    contrast = row.softplus_odds()
    if rule.terms == "out":
        return contrast + row.positives_over_mean()
    # Without log n, a small value keeps its digits.
    return contrast + row.number.log() if rule.inside_reduction == "mean" else contrast


def coefficient(rule: Rule, row: Row) -> Tensor | None:
    """Return c, the derivative of the contrast with respect to the odds; None if it is 1."""
    return None if rule.terms == "lse" or rule.denominator == "only_negatives" else row.missed()


def has_mean(rule: Rule) -> bool:
    """Return whether the weight of a positive contains ``share - 1/n``."""
    return rule.terms in ("out", "epsilon")


def own_log_weights(rule: Rule, row: Row) -> Tensor:
    """Return log(n w) of each positive, ``[N, M]``."""
    missed = row.own_log_missed()
    return missed if rule.terms == "out" else missed + row.own_log_share()


def uses_largest(rule: Rule) -> bool:
    """Return whether a gradient of the "epsilon" terms depends on the weight of each row's largest logit.

    Under "cosine" this logit is 1 / temperature, that of the self pair: only the temperature's gradient depends on it.
    """
    return rule.similarity == "dot" or isinstance(rule.temperature, Tensor)


class Sums(NamedTuple):
    """Sums of unshifted exponentials E = e^s per row, ``[N]`` each.

    The last three are empty, except for the denominator "one_positive" and the "epsilon" terms. They contain the ratio
    r of a positive: E / (E + neg) under "one_positive", E / (neg + pos) under "epsilon".

    Under "epsilon", E is the guarded exponential e^s + guard. The guard is epsilon times the row's largest e^s.

    Attributes:
        neg: sum over negatives of E.
        pos: sum over positives of E.
        missed: sum over positives of 1 - r. Under "epsilon", of guard / E; empty if only the weights of all pairs of a
            row give the weight of its largest logit.
        first: sum over positives of -log r for "out" and "epsilon", of r times `boost` for "in". For "epsilon" with
            partners, the positive's exponential divided by the guarded one.
        second: sum over positives of r (1 - r) times `boost` for "in"; the guard for "epsilon".
    """

    neg: Tensor
    pos: Tensor
    missed: Tensor
    first: Tensor
    second: Tensor

    def boost(self) -> Tensor:
        """Return a factor that keeps a row's ratios from underflowing if all positives are far below the negatives."""
        return torch.where(self.pos > 0, self.neg / self.pos, 1.0).clamp(min=1)


def check_sums(sums: Sums, number: Tensor | None, columns: int) -> None:
    """Raise `Underflow` if exponentials that underflow, of at most ``columns`` pairs, change a sum.

    ``number`` ``[N]`` are the numbers of positives; None if each row has one. Rows must have negatives.
    """
    kind = torch.finfo(sums.neg.dtype)
    least = sums.neg.amin()
    if sums.pos.numel():
        pos = sums.pos if number is None else torch.where(number > 0, sums.pos, 1.0)
        least = torch.minimum(least, pos.amin())
    if not float(least) >= columns * kind.tiny / kind.eps:
        raise Underflow


class Weights(NamedTuple):
    """The derivatives of ``sum_i grad_i L_i`` with respect to the logits of each row, as coefficients ``[N]``.

    The derivative is ``negative * E`` for a negative and ``slope * E + level`` for a positive, except:

    - Each row has at most one positive: ``level`` for a positive.
    - "one_positive": for a positive, ``level * (1 - r)`` with "out" and ``level * r (1 - r) * boost`` with "in".
    - "binary": ``negative * sigmoid(s)`` for a negative and ``level * sigmoid(-s)`` for a positive.
    - "epsilon": ``level * E * (n - 1 - q)`` for a positive, with E unguarded and q from `rest_over`. If `uses_largest`,
      ``slope`` is added for the largest logit, on which every e^(s - max) depends.
    """

    negative: Tensor
    slope: Tensor
    level: Tensor


def weights(
    rule: Rule,
    grad: Tensor,
    sums: Sums,
    number: Tensor | None,
    negatives: Tensor | None = None,
    lone: bool | None = None,
) -> Weights:
    """Return the coefficients of each row's exponentials.

    Args:
        rule: the formula.
        grad: ``[N]``, 0 for every row that `counted` leaves out.
        sums: the sums of each row.
        number: n in the computing dtype; None if each row has at most one positive.
        negatives: m; only for "binary" and "epsilon".
        lone: False if each row has at least two positives; None if that is not known.
    """
    neg, pos = sums.neg, sums.pos
    if rule.terms == "epsilon":
        many = torch.ones_like(neg) if number is None else number
        each = grad / (many + EPSILON)
        level = each / (neg + pos)
        negative = itself = level * many
        if uses_largest(rule) and sums.missed.numel():
            itself = negative * (sums.second * (many + cast(Tensor, negatives))) - each * sums.missed
        return Weights(negative, itself, -negative * neg * sums.first if number is None else level)
    if number is None and rule.terms != "lse" and rule.denominator != "only_negatives":
        negative = grad / (neg + pos)
        return Weights(negative, negative, -negative * neg)
    zero = torch.zeros_like(grad)
    if rule.terms == "lse":
        return Weights(torch.where(neg > 0, grad / neg, 0.0), zero, zero)
    if number is None:
        return Weights(torch.where(neg > 0, grad / neg, 0.0), zero, -grad)
    if negatives is not None:
        return Weights(grad / negatives.clamp(min=1), zero, -grad / (number + 1))
    if lone is False and rule.terms == "out" and rule.denominator == "all":
        negative = grad / (neg + pos)
        return Weights(negative, negative, -grad / number)
    alone, number = number <= 1, number.clamp(min=1)
    if rule.denominator == "one_positive":
        if rule.terms == "out":
            return Weights(torch.where(neg > 0, grad * sums.missed / number / neg, 0.0), zero, -grad / number)
        level = torch.where(sums.first > 0, grad / sums.first, 0.0)
        return Weights(torch.where(neg > 0, level * sums.second / neg, 0.0), zero, -level)
    # For a single positive it is -c, which the difference of two shares would round away.
    level = -grad / number
    if rule.denominator == "only_negatives":
        negative, slope, of_one = torch.where(neg > 0, grad / neg, 0.0), zero, -grad
    else:
        # Both sums are empty if a row's only column is the row itself.
        total = (neg + pos).clamp_(min=torch.finfo(neg.dtype).tiny)
        missed = neg / total
        negative = slope = grad / total
        of_one = -grad * missed
    if rule.terms == "in":
        slope, level = of_one / pos, zero
    return Weights(negative, torch.where(alone, 0.0, slope), torch.where(alone, of_one, level))


def rest_over(exponentials: Tensor, guard: Tensor, neg: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
    """Return (neg + pos - g) / g, and g, the guarded exponentials ``[b, M]``; see `Sums`.

    For a single positive, pos - g is exactly 0, so a small quotient keeps its digits.
    """
    found = exponentials + guard
    return (pos - found).add_(neg).div_(found), found


def counted(batch: Batch, positives: Tensor, negatives: Tensor | int, *, all_positive: bool = False) -> Tensor | None:
    """Return which rows are anchors with the positives and negatives that the rule needs, bool ``[N]``; None: all rows.

    Args:
        batch: the batch.
        positives: ``[N]``, the numbers of positives. Unused for partners, and under "binary", "sigmoid" and "lse".
        negatives: ``[N]``, the numbers of negatives, or one positive number for all rows.
        all_positive: whether all rows are known to have positives; ``positives`` is then unused.
    """
    rule, rows = batch.rule, batch.anchors
    if not all_positive and rule.terms not in ("binary", "sigmoid", "lse") and batch.targets.kind != "partners":
        some = positives > 0
        rows = some if rows is None else rows & some
    needs_negatives = rule.terms == "lse" or (rule.terms in ("out", "in") and rule.denominator != "all")
    if needs_negatives and isinstance(negatives, Tensor):
        some = negatives > 0
        rows = some if rows is None else rows & some
    return rows


def is_plain(batch: Batch, policy: Policy) -> bool:
    """Return whether the loss is the plain mean or sum over all rows, without weights, omitted pairs or policies."""
    usual = policy.no_positive == policy.no_negative == "zero" and policy.base_temperature is None
    targets = batch.targets
    every = batch.anchors is None and targets.ignored is None and targets.ids is None
    every = every and targets.positive_weights is None and targets.negative_weights is None
    every = every and policy.anchor_weights is None
    rule = batch.rule
    every = every and (rule.terms, rule.denominator, rule.inside_reduction) != SUM_OF_OWN_RATIOS
    return usual and policy.reduction in ("mean", "sum") and every


def reduced(found: AnchorValues, batch: Batch, policy: Policy) -> Tensor:
    """Apply the policies, the reduction and the base temperature.

    Returns:
        A scalar; under "none", one value per anchor, without those that "drop" leaves out. If no anchor is left, mean
        and sum are 0 with gradient 0.
    """
    values, positives, negatives = found
    rule, rows = batch.rule, batch.anchors
    if (rule.terms, rule.denominator, rule.inside_reduction) == SUM_OF_OWN_RATIOS:
        # Without negatives every ratio is 1.
        alone = -positives.clamp(min=1).to(values.dtype).log()
        values = torch.where(negatives == 0, alone, values)
    if policy.no_negative == "nan" and (rule.terms == "binary" or rule.denominator == "only_negatives"):
        without = negatives == 0
        # An anchor without positives and negatives follows `no_positive`, which "binary" does not have.
        values = torch.where(without if rule.terms == "binary" else without & (positives > 0), torch.nan, values)
    if policy.no_positive == "nan":
        values = torch.where(positives == 0, torch.nan, values)
    elif policy.no_positive == "drop":
        rows = positives > 0 if rows is None else rows & (positives > 0)
    weights = policy.anchor_weights
    if weights is not None:
        exact = weights.to(torch.promote_types(weights.dtype, values.dtype))
        weights = torch.where(exact >= 0, exact, torch.nan)  # they may not have been checked
    if policy.reduction == "none":
        values = values if weights is None else values * weights
        result = values if rows is None else values[rows]
    else:
        if rows is not None:
            values = torch.where(rows, values, 0.0)
        # A sum of float64 values may overflow although their mean does not, so values near the end of the range are
        # scaled.
        scale = None
        if values.dtype == torch.float64 and policy.ranks is None:
            large = values.detach().abs().amax() > torch.finfo(torch.float64).max ** 0.9
            scale = torch.where(large, 2.0**-64, 1.0).to(torch.float64)
            values = values * scale
        if weights is not None:
            values = values * weights
        wide = None if values.device.type == "mps" else torch.float64
        if policy.reduction == "mean" and rows is None and weights is None and policy.ranks is None:
            result = values.mean(dtype=wide)
        else:
            if policy.reduction in ("mean_pairs", "sum_pairs"):
                number = positives
                if rule.terms == "sigmoid":  # a value is already the sum over its pairs
                    number = positives + negatives
                else:
                    values = values * positives
                weights = number if weights is None else weights * number
            if rows is not None:
                weights = torch.where(rows, 1 if weights is None else weights, 0)
            if policy.ranks is not None:
                total: Tensor | int = len(values) if weights is None else weights.sum(dtype=wide)
                mean = policy.reduction in ("mean", "mean_pairs")
                result = policy.ranks.reduced(values, total, mean=mean, dtype=wide)
            else:
                result = values.sum(dtype=wide)
            if policy.ranks is None and policy.reduction in ("mean", "mean_pairs") and weights is not None:
                total = weights.sum(dtype=wide if weights.is_floating_point() else None)
                result = result / torch.where(total > 0, total, 1)
        result = result if scale is None else result / scale
    if policy.base_temperature is not None:
        result = result * (rule.temperature_as(result.dtype) / policy.base_temperature)
    return result.to(dtypes_of(batch.embeddings)[0])
