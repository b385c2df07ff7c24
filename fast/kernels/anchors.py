"""Per anchor: compute values from sums, and the coefficients of the backward pass from sums and upstream gradients.

Each array consists of a few lines, with one number per row in each line. The formulas are those of the published
losses, in a form that stays accurate for losses near 0: log((first + second) / second) of two sums is computed as
log1p(first / second), or as a difference of logarithms if this ratio exceeds `LARGE`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .positives import LINES as POSITIVE_LINES
from .rows import exponent_of, place_of, two_to_the
from .sums import LINES
from .tile import EPSILON, log1p

LARGE = tl.constexpr(2.0**100)
"""Largest quotient that is used; larger quotients are treated as infinite, because float32 might overflow."""
COUNTED = tl.constexpr(11)
"""The line of the stats that is 1 for anchors that count, and 0 for all other rows."""
BY_BIAS = tl.constexpr(5)
"""The line of the stats that holds the derivative of each value with respect to the bias, under SUMMED (see `tile`)."""


@triton.jit
def ratio_of(first, first_top, second, second_top):
    """Return first e^first_top / (second e^second_top): 0 if either sum is 0, infinity if the ratio exceeds LARGE.

    The tops were subtracted from the logits of the sums. A sum of exponentials that are shifted by their largest logit
    is at least 1. A sum of unshifted exponentials may be small; its top is 0, and the other sum is then neither very
    small nor very large.
    """
    some = (first != 0) & (second != 0)
    apart = tl.where(some, first_top - second_top, 0.0)
    ratio = tl.where(some, first, 0.0) / tl.where(some, second, 1.0) * tl.exp(tl.minimum(apart, 87.0))
    return tl.where((apart > 87.0) | (ratio > LARGE), float("inf"), ratio)


@triton.jit
def log_of_one_plus_ratio(first, first_top, second, second_top):
    """Return log(1 + first e^first_top / (second e^second_top)), or 0 if either sum is 0."""
    ratio = ratio_of(first, first_top, second, second_top)
    far = ratio == float("inf")
    logs = tl.log(tl.where(far, first, 1.0)) - tl.log(tl.where(far, second, 1.0))
    return tl.where(far, tl.where(far, first_top - second_top, 0.0) + logs, log1p(tl.where(far, 0.0, ratio)))


@triton.jit(do_not_specialize=["n", "m", "parts", "averaged"])
def combine(
    sums,
    stats,
    itself,
    anchors,
    omitted,
    order,
    values,
    positives,
    negatives,
    n,
    m,
    pad,
    parts,
    averaged,
    TERMS: tl.constexpr,
    SUMMED: tl.constexpr,
    IDS: tl.constexpr,
    DENOMINATOR: tl.constexpr,
    FIXED: tl.constexpr,
    SOME: tl.constexpr,
    ORDERED: tl.constexpr,
    BM: tl.constexpr,
):
    """Add the shares of `sums_plain` and `sums_marked`; compute the values of the losses that need no second pass.

    ``averaged`` is 1 if the ratios of the "in" terms are averaged, and 0 if they are summed.

    The lines of the stats: 0 to 4 are FIRST, SECOND, NUMBER, FIRST_TOP and SECOND_TOP of `sums`. 5 and 6 are
    inputs of `positives`, which explains them: the logarithm of the sum over negatives and the boost (epsilon: the
    total and the largest logit); under "binary", 5 is the number of negatives, or under SUMMED the sum of BELOW. 7 to
    10 are the lines of `positives`. 11 is 1 for rows that count and 0 for others; only this line has the rows in their
    given order, all other lines have them in sorted order. `tile` explains SUMMED, FIXED and IDS.
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    real = rows < n
    source = place_of(rows, order, n, ORDERED)

    first = tl.zeros((BM,), tl.float32)
    second = tl.zeros((BM,), tl.float32)
    below = tl.zeros((BM,), tl.float32)
    number = tl.zeros((BM,), tl.float32)
    first_top = tl.full((BM,), float("-inf"), tl.float32)
    second_top = tl.full((BM,), float("-inf"), tl.float32)
    if TERMS == "epsilon":
        second_top = tl.zeros((BM,), tl.float32)
    if FIXED:
        first_top = tl.zeros((BM,), tl.float32)
    for part in range(parts):
        at = sums + (part * LINES * pad + rows)
        more = tl.load(at)
        if TERMS == "binary":
            first += more
            second += tl.load(at + pad)
            below += tl.load(at + 2 * pad)
        else:
            top = tl.load(at + 4 * pad)
            if TERMS == "epsilon":
                second_top = tl.where(top > first_top, tl.load(at + 5 * pad), second_top)
            if FIXED:
                first += more * tl.exp(tl.where(top == float("-inf"), 0.0, top - first_top))
            else:
                highest = tl.maximum(first_top, top)
                shift = tl.where(highest == float("-inf"), 0.0, highest)
                first = first * tl.exp(first_top - shift) + more * tl.exp(top - shift)
                first_top = highest
            if TERMS != "epsilon":
                counted_here = tl.load(at + 3 * pad)
                top = tl.load(at + 5 * pad)
                highest = tl.maximum(second_top, top)
                shift = tl.where(highest == float("-inf"), 0.0, highest)
                second = second * tl.exp(second_top - shift) + tl.load(at + pad) * tl.exp(top - shift)
                below += tl.where(number > 0, number * (shift - second_top), 0.0) + tl.load(at + 2 * pad)
                below += tl.where(counted_here > 0, counted_here * (shift - top), 0.0)
                second_top = highest
        number += tl.load(at + 3 * pad)
    own = tl.load(itself + rows)
    others = m - number.to(tl.int32) - ((own >= 0) & (own < m)).to(tl.int32)
    if IDS:
        others -= tl.load(omitted + rows)

    valid = real
    if SOME:
        valid = valid & (tl.load(anchors + source) != 0)
    if TERMS != "binary" and TERMS != "lse":
        valid = valid & (number > 0)
    if TERMS == "lse" or ((TERMS == "out" or TERMS == "in") and DENOMINATOR != "all"):
        valid = valid & (others > 0)
    tl.store(positives + source, number.to(tl.int64), mask=real)
    tl.store(negatives + source, others.to(tl.int64), mask=real)
    tl.store(stats + COUNTED * n + source, valid.to(tl.float32), mask=real)

    total = tl.maximum(number, 1.0)
    over = tl.where(first != 0, first_top + tl.log(tl.where(first != 0, first, 1.0)), float("-inf"))
    lift = tl.where((first != 0) & (second != 0), tl.maximum(over - second_top, 0.0), 0.0)
    if TERMS == "binary":
        first_top = tl.zeros((BM,), tl.float32)
        second_top = first_top
        over = others.to(tl.float32)
        if SUMMED:
            over = below
        lift = first_top
    if TERMS == "epsilon":
        over = first + EPSILON * (m - 1)
        lift = first_top
    tl.store(stats + rows, first, mask=real)
    tl.store(stats + n + rows, second, mask=real)
    tl.store(stats + 2 * n + rows, number, mask=real)
    tl.store(stats + 3 * n + rows, first_top, mask=real)
    tl.store(stats + 4 * n + rows, second_top, mask=real)
    tl.store(stats + 5 * n + rows, over, mask=real)
    tl.store(stats + 6 * n + rows, lift, mask=real)

    if DENOMINATOR != "own" and TERMS != "epsilon":
        for line in range(7, 11):  # an operator must not return uninitialised memory
            tl.store(stats + line * n + rows, tl.zeros((BM,), tl.float32), mask=real)
        if SUMMED:
            value = second + first
        elif TERMS == "binary":
            value = second / (number + 1.0) + first / tl.maximum(others, 1).to(tl.float32)
        elif TERMS == "lse":
            value = over
        else:
            log_first = tl.log(tl.where(first != 0, first, 1.0))
            log_second = tl.log(tl.where(second != 0, second, 1.0))
            if DENOMINATOR == "only_negatives":
                value = (first_top - second_top) + log_first
                if TERMS == "in":
                    value += averaged * tl.log(total) - log_second
                else:
                    value += below / total
            else:
                # In float64, because the terms may be larger than their sum. It is cheap: one evaluation per row.
                wide, wide_top = second.to(tl.float64), second_top.to(tl.float64)
                value = log_of_one_plus_ratio(first.to(tl.float64), first_top.to(tl.float64), wide, wide_top)
                if TERMS == "in":
                    value += averaged * tl.log(total.to(tl.float64))
                else:
                    value += tl.log(tl.where(second != 0, wide, 1.0)) + below.to(tl.float64) / total
        tl.store(values + source, tl.where(valid, value, 0.0), mask=real)


@triton.jit(do_not_specialize=["n", "parts", "averaged"])
def combine_positives(
    shares, stats, order, values, n, pad, parts, averaged, TERMS: tl.constexpr, ORDERED: tl.constexpr, BM: tl.constexpr
):
    """Add the shares of `positives`, store the sums in lines 7 to 10 of the stats, and compute the remaining values."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    real = rows < n
    source = place_of(rows, order, n, ORDERED)
    logs = tl.zeros((BM,), tl.float32)
    missed = tl.zeros((BM,), tl.float32)
    hit = tl.zeros((BM,), tl.float32)
    curved = tl.zeros((BM,), tl.float32)
    for part in range(parts):
        at = shares + (part * POSITIVE_LINES * pad + rows)
        logs += tl.load(at)
        missed += tl.load(at + pad)
        hit += tl.load(at + 2 * pad)
        curved += tl.load(at + 3 * pad)
    tl.store(stats + 7 * n + rows, logs, mask=real)
    tl.store(stats + 8 * n + rows, missed, mask=real)
    tl.store(stats + 9 * n + rows, hit, mask=real)
    tl.store(stats + 10 * n + rows, curved, mask=real)
    number = tl.load(stats + 2 * n + rows, mask=real, other=0.0)
    total = tl.maximum(number, 1.0)
    if TERMS == "out":
        value = logs / total
    elif TERMS == "in":
        # The loss is -log of the mean ratio, 1 - share. log1p is accurate if the ratio is near 1, log otherwise.
        share = missed / total
        lift = tl.load(stats + 6 * n + rows, mask=real, other=0.0)
        rare = lift + tl.log(total) - tl.log(tl.where(hit != 0, hit, 1.0))
        # -log(1 - share) is log1p(share / (1 - share)).
        value = tl.where(share < 0.5, log1p(tl.where(share < 0.5, share / (1.0 - share), 0.0)), rare)
        value -= (1.0 - averaged) * tl.log(total)
    else:
        value = logs / (number + EPSILON)
    valid = real & (tl.load(stats + COUNTED * n + source) != 0)
    tl.store(values + source, tl.where(valid, value, 0.0), mask=real)


@triton.jit(do_not_specialize=["n"])
def coefficients(
    grad,
    largest,
    stats,
    order,
    out,
    n,
    pad,
    TERMS: tl.constexpr,
    SUMMED: tl.constexpr,
    DENOMINATOR: tl.constexpr,
    ORDERED: tl.constexpr,
    BM: tl.constexpr,
):
    """Compute the coefficients that `gradient` describes, from upstream gradients scaled to about 1.

    NEGATIVE, SLOPE and LEVEL of rows that do not count are 0.
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    real = rows < n
    source = place_of(rows, order, n, ORDERED)
    valid = real & (tl.load(stats + COUNTED * n + source) != 0)
    up = tl.load(grad + source, mask=valid, other=0.0).to(tl.float32)
    up = up * two_to_the(-exponent_of(tl.load(largest)))
    first = tl.load(stats + rows, mask=real, other=0.0)
    second = tl.load(stats + n + rows, mask=real, other=0.0)
    number = tl.load(stats + 2 * n + rows, mask=real, other=0.0)
    first_top = tl.load(stats + 3 * n + rows, mask=real, other=0.0)
    second_top = tl.load(stats + 4 * n + rows, mask=real, other=0.0)
    total = tl.maximum(number, 1.0)
    per_first = tl.where(valid & (first != 0), 1.0 / tl.where(first != 0, first, 1.0), 0.0)
    per_second = tl.where(valid & (second != 0), 1.0 / tl.where(second != 0, second, 1.0), 0.0)
    alone = number <= 1.0
    slope = tl.zeros((BM,), tl.float32)
    level = tl.zeros((BM,), tl.float32)
    if SUMMED:
        negative = up
        slope = -up
    elif TERMS == "binary":
        negative = up / tl.maximum(tl.load(stats + 5 * n + rows, mask=real, other=0.0), 1.0)
        slope = -up / (number + 1.0)
    elif TERMS == "lse":
        negative = up * per_first
    elif TERMS == "epsilon":
        guarded = tl.load(stats + 5 * n + rows, mask=real, other=0.0)
        each = up / (number + EPSILON)
        negative = each * number / tl.where(valid, guarded, 1.0)
        slope = -each
        level = -(negative * first - each * tl.load(stats + 8 * n + rows, mask=real, other=0.0))
    elif DENOMINATOR == "own":
        second_top = tl.load(stats + 5 * n + rows, mask=real, other=0.0)
        if TERMS == "out":
            negative = up * (tl.load(stats + 8 * n + rows, mask=real, other=0.0) / total) * per_first
            level = -up / total
        else:
            hit = tl.load(stats + 9 * n + rows, mask=real, other=0.0)
            level = tl.where(hit != 0, -up / tl.where(hit != 0, hit, 1.0), 0.0)
            negative = -level * tl.load(stats + 10 * n + rows, mask=real, other=0.0) * per_first
            slope = tl.load(stats + 6 * n + rows, mask=real, other=0.0)
    elif DENOMINATOR == "only_negatives":
        negative = up * per_first
        if TERMS == "in":
            slope = tl.where(alone, 0.0, -up * per_second)
            level = tl.where(alone, -up, 0.0)
        else:
            level = -up / total
    else:
        ratio = ratio_of(first, first_top, second, second_top)
        kept = 1.0 / (1.0 + ratio)
        missed = tl.where(ratio == float("inf"), 1.0, ratio * kept)
        negative = up * missed * per_first
        if TERMS == "in":
            slope = tl.where(alone, 0.0, -up * missed * per_second)
            level = tl.where(alone, -up * missed, 0.0)
        else:
            slope = tl.where(alone, 0.0, up * kept * per_second)
            level = tl.where(alone, -up * missed, -up / total)
    tl.store(out + rows, tl.where(valid, negative, 0.0))
    tl.store(out + pad + rows, tl.where(valid & (first_top > float("-inf")), first_top, float("inf")))
    tl.store(out + 2 * pad + rows, tl.where(valid, slope, 0.0))
    tl.store(out + 3 * pad + rows, second_top)
    tl.store(out + 4 * pad + rows, tl.where(valid, level, 0.0))
