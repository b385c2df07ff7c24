"""Forward, first pass: sums over the columns of each anchor. A program has BM anchors and visits tiles of BN columns.

Two kernels share the work. `sums_plain` treats every tile as if it held only negatives, and leaves the other tiles out
of its sums; it needs no mask and few registers. `sums_marked` visits the tiles that may hold a positive or a self pair,
or that reach past the last column. If positives are given as a mask or as pairs, if rows have ids, and under "binary"
and "epsilon", `sums_marked` visits all tiles, and `sums_plain` does not run. Each share of the columns stores, per
anchor, with t the logits (`tile` explains SUMMED, FIXED and IDS):

    FIRST        sum over negatives of e^(t - FIRST_TOP);   binary: of softplus(t)
                 epsilon: sum over all columns but the row itself of e^(t - FIRST_TOP)
    SECOND       sum over positives of e^(t - SECOND_TOP);  binary: of softplus(-t)
    BELOW        sum over positives of SECOND_TOP - t;      SUMMED: the derivative of FIRST + SECOND by the bias
    NUMBER       of positives
    FIRST_TOP    the largest t of a negative, in `sums_plain` 0 under FIXED;   epsilon: the largest t of any column
    SECOND_TOP   the largest t of a positive;   epsilon: the first column with the largest t, as the bits of an int32

Under IDS, a pair of rows with equal ids is not a negative. `omitted` counts these pairs, because the other kernels
would need more registers to do so.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile import (
    NEVER,
    begin_walk,
    bounds_at,
    gains_of,
    load_pieces,
    logits_of,
    needs_mask,
    next_marked,
    positives_of,
    products,
    series_of_log1p,
    sigmoid,
    walk,
)

LINES = tl.constexpr(6)
"""Numbers that a share of the columns stores per anchor."""


@triton.jit
def exponentials_below(top, t):
    """Return the new maximum of ``top`` and each row of t, and e^top and e^t relative to it; all logits may be -inf."""
    highest = tl.maximum(top, tl.max(t, 1))
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    return highest, tl.exp(top - shift), tl.exp(t - shift[:, None])


@triton.jit(do_not_specialize=["n", "m", "share"])
def sums_plain(
    x,
    y,
    x_scale,
    y_scale,
    x_bounds,
    y_bounds,
    constants,
    out,
    n,
    m,
    x_pad,
    y_pad,
    share,
    FIXED: tl.constexpr,
    RAW: tl.constexpr,
    PIECES: tl.constexpr,
    DIM: tl.constexpr,
    BK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Store ``[shares, LINES, x_pad]``, the sums over tiles that hold only negatives."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    part = tl.program_id(1)
    gain = gains_of(constants, x_scale, rows, FIXED, RAW)
    own0, own1, own2 = load_pieces(x, rows, 0, x_pad, DIM, BK, PIECES)
    label_low, label_high, self_low, self_high = bounds_at(x_bounds, tl.program_id(0), x_pad // BM)
    if FIXED:
        top = tl.zeros((BM,), tl.float32)
    else:
        top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    for tile in range(part * share, tl.minimum(part * share + share, tl.cdiv(m, BN))):
        columns = tile * BN + tl.arange(0, BN)
        t, _, _, _ = products(own0, own1, own2, x, rows, x_pad, y, columns, y_pad, BM, BN, DIM, BK, PIECES, True, WIDEN)
        hidden = needs_mask(y_bounds, tile, y_pad // BN, label_low, label_high, self_low, self_high, m, BN)
        t = logits_of(t, gain, tl.load(y_scale + columns), RAW, WIDEN)
        if FIXED:
            total += tl.where(hidden, 0.0, tl.sum(tl.exp2(t), 1))
        else:
            top, kept, e = exponentials_below(top, t + tl.where(hidden, float("-inf"), 0.0))
            total = total * kept + tl.sum(e, 1)
    at = out + (part * LINES * x_pad + rows)
    tl.store(at, total)
    tl.store(at + x_pad, tl.zeros((BM,), tl.float32))
    tl.store(at + 2 * x_pad, tl.zeros((BM,), tl.float32))
    tl.store(at + 3 * x_pad, tl.zeros((BM,), tl.float32))
    tl.store(at + 4 * x_pad, top)
    tl.store(at + 5 * x_pad, tl.full((BM,), float("-inf"), tl.float32))


@triton.jit(do_not_specialize=["n", "m", "share", "first_part"])
def sums_marked(
    x,
    y,
    x_scale,
    y_scale,
    x_label,
    y_label,
    x_self,
    y_self,
    x_ident,
    y_ident,
    x_bounds,
    y_bounds,
    marks,
    ends,
    constants,
    out,
    n,
    m,
    x_pad,
    y_pad,
    share,
    first_part,
    row_stride,
    column_stride,
    TERMS: tl.constexpr,
    SUMMED: tl.constexpr,
    IDS: tl.constexpr,
    MARKS: tl.constexpr,
    RAW: tl.constexpr,
    PIECES: tl.constexpr,
    DIM: tl.constexpr,
    BK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Store the same for the tiles that `sums_plain` hides, or under ALL for all tiles."""
    ALL: tl.constexpr = TERMS != "softmax" or MARKS != "labels" or IDS
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    part = tl.program_id(1)
    gain = gains_of(constants, x_scale, rows, False, RAW)
    if SUMMED:
        bias = tl.load(constants + 2)
    own0, own1, own2 = load_pieces(x, rows, 0, x_pad, DIM, BK, PIECES)
    label = tl.load(x_label + rows)
    itself = tl.load(x_self + rows)
    if IDS:
        ident = tl.load(x_ident + rows)
    around = tl.program_id(0) * BM // GROUP_ROWS
    label_low, label_high, self_low, self_high = bounds_at(x_bounds, around, x_pad // GROUP_ROWS)

    first = tl.zeros((BM,), tl.float32)
    second = tl.zeros((BM,), tl.float32)
    below = tl.zeros((BM,), tl.float32)
    number = tl.zeros((BM,), tl.float32)
    first_top = tl.full((BM,), float("-inf"), tl.float32)
    second_top = tl.full((BM,), float("-inf"), tl.float32)
    star = tl.full((BM,), NEVER, tl.int32)

    begin = part * share
    end = tl.minimum(begin + share, tl.cdiv(m, BN))
    if MARKS == "pairs":
        place, cursor, stop = begin_walk(ends, marks, rows, n, begin * BN)
    tile = next_marked(
        begin - 1, end, y_bounds, y_pad // GROUP, label_low, label_high, self_low, self_high, m, BN, GROUP, ALL
    )
    while tile != NEVER:
        columns = tile * BN + tl.arange(0, BN)
        t, _, _, _ = products(own0, own1, own2, x, rows, x_pad, y, columns, y_pad, BM, BN, DIM, BK, PIECES, True, WIDEN)
        t = logits_of(t, gain, tl.load(y_scale + columns), RAW, WIDEN)
        if SUMMED:
            t += bias
        if MARKS == "pairs":
            positive, place, cursor = walk(place, cursor, stop, marks, columns, tile * BN + BN, BM, BN)
        else:
            columns_label = tl.load(y_label + columns)
            positive = positives_of(marks, rows, columns, label, columns_label, row_stride, column_stride, n, m, MARKS)
        other = (itself[:, None] != tl.load(y_self + columns)[None, :]) & (columns < m)[None, :]
        positive = positive & other
        if IDS:
            other = other & (positive | (ident[:, None] != tl.load(y_ident + columns)[None, :]))
        found = tl.sum(positive.to(tl.float32), 1)
        if TERMS == "softmax":
            first_top, kept, e = exponentials_below(first_top, tl.where(other & (positive == 0), t, float("-inf")))
            first = first * kept + tl.sum(e, 1)
            before = second_top
            second_top, kept, e = exponentials_below(second_top, tl.where(positive, t, float("-inf")))
            second = second * kept + tl.sum(e, 1)
            below += tl.where(number > 0, number * (second_top - before), 0.0)
            below += tl.sum(tl.where(positive, second_top[:, None] - t, 0.0), 1)
        elif TERMS == "binary":
            rest = series_of_log1p(tl.exp(-tl.abs(t)))
            first += tl.sum(tl.where(other & (positive == 0), rest + tl.maximum(t, 0.0), 0.0), 1)
            second += tl.sum(tl.where(positive, rest + tl.maximum(-t, 0.0), 0.0), 1)
            if SUMMED:
                below += tl.sum(tl.where(positive, -sigmoid(-t), tl.where(other, sigmoid(t), 0.0)), 1)
        else:
            real = tl.where((columns < m)[None, :], t, float("-inf"))
            highest = tl.max(real, 1)
            here = tl.min(tl.where(real == highest[:, None], columns[None, :], NEVER), 1)
            star = tl.where(highest > first_top, here, star)
            first_top, kept, e = exponentials_below(first_top, real)
            first = first * kept + tl.sum(tl.where(other, e, 0.0), 1)
        number += found
        tile = next_marked(
            tile, end, y_bounds, y_pad // GROUP, label_low, label_high, self_low, self_high, m, BN, GROUP, ALL
        )
    if TERMS == "epsilon":
        second_top = star.to(tl.float32, bitcast=True)
    at = out + ((first_part + part) * LINES * x_pad + rows)
    tl.store(at, first)
    tl.store(at + x_pad, second)
    tl.store(at + 2 * x_pad, below)
    tl.store(at + 3 * x_pad, number)
    tl.store(at + 4 * x_pad, first_top)
    tl.store(at + 5 * x_pad, second_top)


@triton.jit(do_not_specialize=["n", "m"])
def omitted(
    x_label,
    y_label,
    x_self,
    y_self,
    x_ident,
    y_ident,
    marks,
    ends,
    out,
    n,
    m,
    MARKS: tl.constexpr,
    BM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Store ``[x_pad]``: for each row, how many pairs with an equal id are neither positives nor the self pair."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    label = tl.load(x_label + rows)
    itself = tl.load(x_self + rows)
    ident = tl.load(x_ident + rows)
    found = tl.zeros((BM,), tl.int32)
    if MARKS == "pairs":
        place, cursor, stop = begin_walk(ends, marks, rows, n, 0)
    for first in range(0, m, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        inside = columns < m
        if MARKS == "pairs":
            positive, place, cursor = walk(place, cursor, stop, marks, columns, first + COLUMNS, BM, COLUMNS)
        else:
            positive = label[:, None] == tl.load(y_label + columns, mask=inside, other=0)[None, :]
        others = (itself[:, None] != tl.load(y_self + columns, mask=inside, other=0)[None, :]) & inside[None, :]
        equal = ident[:, None] == tl.load(y_ident + columns, mask=inside, other=0)[None, :]
        found += tl.sum((others & equal & (positive == 0)).to(tl.int32), 1)
    tl.store(out + rows, found)
