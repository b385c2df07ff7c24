"""Backward: the gradient with respect to rows of x, ``sum over j of G_ij y_j``; the tiles of logits are recomputed.

G_ij is the sum of dL_i/ds_ij, if row i of x is an anchor, and dL_j/ds_ji, if row j of y is an anchor. L_i is the value
of anchor i times its upstream gradient, s_ij a logit. In a batch without references, both derivatives are present, so
one launch computes the complete gradient. Programs divide it: each has a panel of rows, a share of the columns and a
slab of the row length; `finish` adds the shares. Each derivative, the weight of a pair, is computed from the logit t
and the numbers that `coefficients` computes per anchor:

    a negative          NEGATIVE e^(t - NEGATIVE_TOP)
    a positive          SLOPE e^(t - SLOPE_TOP) + LEVEL
        own             LEVEL (1 - r) for "out", LEVEL r (1 - r) e^boost for "in", r as in `positives`; SLOPE holds the
                        boost, SLOPE_TOP the logarithm of the sum over negatives
    binary              NEGATIVE sigmoid(t), and SLOPE sigmoid(-t) for a positive
    epsilon             NEGATIVE e for every pair, e = e^(t - NEGATIVE_TOP), plus SLOPE e / (e + epsilon) for a
                        positive, plus LEVEL at the column of the row's largest logit; the bits of SLOPE_TOP are this
                        column as an int32

Weights of both directions are added before they are rounded to a narrower dtype and multiplied with the rows. As in the
forward pass, `gradient_plain` processes tiles that hold only negatives, and `gradient_marked` the other tiles. If
positives are given as a mask or as pairs, if rows have ids, and under "binary" and "epsilon", `gradient_marked`
processes all tiles, and `gradient_plain` does not run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rows import rounded_to_bfloat16, rounded_to_tf32
from .tile import (
    EPSILON,
    NEVER,
    begin_walk,
    bounds_at,
    gains_of,
    load_pieces,
    logits_of,
    needs_mask,
    next_marked,
    of_pieces,
    positives_of,
    products,
    sigmoid,
    softplus,
    walk,
)

COEFFICIENTS = tl.constexpr(5)
"""Number of coefficients per anchor."""


@triton.jit
def add_pull(
    g, scale, y0, y1, y2, acc, REACH: tl.constexpr, RAW: tl.constexpr, PIECES: tl.constexpr, WIDEN: tl.constexpr
):
    """Return ``acc + g @ y``.

    Under RAW, g is first multiplied by ``scale``, which normalises the rows of y, and by REACH, which keeps float16
    weights in the normal range.
    """
    if RAW:
        g = g * (scale * REACH)[None, :]
        if WIDEN and y0.dtype == tl.bfloat16:
            g = rounded_to_bfloat16(g)
        g0 = g.to(y0.dtype)
        g1 = g0
        g2 = g0
    elif PIECES == 3:
        g0 = g.to(tl.bfloat16)
        rest = g - g0.to(tl.float32)
        g1 = rest.to(tl.bfloat16)
        g2 = (rest - g1.to(tl.float32)).to(tl.bfloat16)
    else:
        g0 = rounded_to_tf32(g)
        g1 = g0
        g2 = g0
    return of_pieces(g0, g1, g2, y0, y1, y2, acc, PIECES, WIDEN)


@triton.jit(do_not_specialize=["n", "m", "share", "x_anchor", "y_anchor"])
def gradient_plain(
    x,
    y,
    x_scale,
    y_scale,
    x_bounds,
    y_bounds,
    x_coef,
    y_coef,
    constants,
    out,
    n,
    m,
    x_pad,
    y_pad,
    share,
    x_anchor,
    y_anchor,
    FIXED: tl.constexpr,
    RAW: tl.constexpr,
    PIECES: tl.constexpr,
    REACH: tl.constexpr,
    DIM: tl.constexpr,
    BK: tl.constexpr,
    OUT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Store ``[shares, x_pad, DIM]``: the gradient with respect to rows of x, from tiles that hold only negatives."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    part = tl.program_id(1)
    slab = tl.program_id(2) * OUT
    gain = gains_of(constants, x_scale, rows, FIXED, RAW)
    own0, own1, own2 = load_pieces(x, rows, 0, x_pad, DIM, BK, PIECES)
    label_low, label_high, self_low, self_high = bounds_at(x_bounds, tl.program_id(0), x_pad // BM)
    negative = tl.load(x_coef + rows)
    negative_top = tl.load(x_coef + x_pad + rows)
    acc = tl.zeros((BM, OUT), tl.float32)
    for tile in range(part * share, tl.minimum(part * share + share, tl.cdiv(m, BN))):
        columns = tile * BN + tl.arange(0, BN)
        t, y0, y1, y2 = products(
            own0, own1, own2, x, rows, x_pad, y, columns, y_pad, BM, BN, DIM, BK, PIECES, False, WIDEN
        )
        hidden = needs_mask(y_bounds, tile, y_pad // BN, label_low, label_high, self_low, self_high, m, BN)
        scale = tl.load(y_scale + columns)
        t = logits_of(t, gain, scale, RAW, WIDEN)
        across = tl.load(y_coef + columns)
        if FIXED:
            shown = tl.where(hidden, 0.0, 1.0)
            g = ((shown * negative)[:, None] + (shown * across)[None, :]) * tl.exp2(t)
        else:
            t += tl.where(hidden, float("-inf"), 0.0)
            g = tl.zeros((BM, BN), tl.float32)
            if x_anchor != 0:
                g += negative[:, None] * tl.exp(t - negative_top[:, None])
            if y_anchor != 0:
                across_top = tl.load(y_coef + y_pad + columns)
                g += across[None, :] * tl.exp(t - across_top[None, :])
        if (DIM != BK) or (OUT != DIM):
            y0, y1, y2 = load_pieces(y, columns, slab, y_pad, DIM, OUT, PIECES)
        acc = add_pull(g, scale, y0, y1, y2, acc, REACH, RAW, PIECES, WIDEN)
    at = (part * x_pad + rows).to(tl.int64)[:, None] * DIM + (slab + tl.arange(0, OUT))[None, :]
    tl.store(out + at, acc)


@triton.jit
def weights_of(
    t, positive, other, at_star, negative, negative_top, slope, slope_top, level, inside, TERMS: tl.constexpr
):
    """Return dL_i/ds of the pairs of one direction; coefficients are columns or rows that broadcast over the tile.

    ``other`` marks the pairs that count, ``at_star`` the columns of LEVEL under "epsilon". ``inside`` is 1 for "in".
    """
    if TERMS == "softmax":
        e = tl.exp(t - tl.where(positive, slope_top, negative_top))
        w = tl.where(other, e * tl.where(positive, slope, negative) + tl.where(positive, level, 0.0), 0.0)
    elif TERMS == "own":
        against = slope_top - t
        # 1 - r for "out", r (1 - r) e^boost for "in".
        log = -softplus(-against) + inside * (slope - softplus(against))
        of_positive = level * tl.exp(tl.where(positive & other, log, float("-inf")))
        of_negative = negative * tl.exp(tl.where(other & (positive == 0), t - negative_top, float("-inf")))
        w = of_positive + of_negative
    elif TERMS == "binary":
        w = tl.where(other, tl.where(positive, slope * sigmoid(-t), negative * sigmoid(t)), 0.0)
    else:
        e = tl.exp(t - negative_top)
        w = tl.where(other, negative * e + tl.where(positive, slope * (e / (e + EPSILON)), 0.0), 0.0)
        w += tl.where(at_star, level, 0.0)
    return w


@triton.jit(do_not_specialize=["n", "m", "share", "first_part", "x_anchor", "y_anchor", "inside"])
def gradient_marked(
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
    back_marks,
    back_ends,
    x_coef,
    y_coef,
    constants,
    out,
    n,
    m,
    x_pad,
    y_pad,
    share,
    first_part,
    x_anchor,
    y_anchor,
    row_stride,
    column_stride,
    inside,
    TERMS: tl.constexpr,
    SUMMED: tl.constexpr,
    IDS: tl.constexpr,
    MARKS: tl.constexpr,
    RAW: tl.constexpr,
    PIECES: tl.constexpr,
    REACH: tl.constexpr,
    DIM: tl.constexpr,
    BK: tl.constexpr,
    OUT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Store the same from the tiles that `gradient_plain` leaves out; under ALL, from all tiles."""
    ALL: tl.constexpr = MARKS != "labels" or IDS or (TERMS != "softmax" and TERMS != "own")
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    part = tl.program_id(1)
    slab = tl.program_id(2) * OUT
    gain = gains_of(constants, x_scale, rows, False, RAW)
    if SUMMED:
        bias = tl.load(constants + 2)
    own0, own1, own2 = load_pieces(x, rows, 0, x_pad, DIM, BK, PIECES)
    label = tl.load(x_label + rows)
    itself = tl.load(x_self + rows)
    around = tl.program_id(0) * BM // GROUP_ROWS
    label_low, label_high, self_low, self_high = bounds_at(x_bounds, around, x_pad // GROUP_ROWS)
    begin = part * share
    end = tl.minimum(begin + share, tl.cdiv(m, BN))
    if MARKS == "pairs":
        place, cursor, stop = begin_walk(ends, marks, rows, n, begin * BN)
        back_place, back_cursor, back_stop = begin_walk(back_ends, back_marks, rows, n, begin * BN)
    acc = tl.zeros((BM, OUT), tl.float32)
    tile = next_marked(
        begin - 1, end, y_bounds, y_pad // GROUP, label_low, label_high, self_low, self_high, m, BN, GROUP, ALL
    )
    while tile != NEVER:
        columns = tile * BN + tl.arange(0, BN)
        t, y0, y1, y2 = products(
            own0, own1, own2, x, rows, x_pad, y, columns, y_pad, BM, BN, DIM, BK, PIECES, False, WIDEN
        )
        scale = tl.load(y_scale + columns)
        t = logits_of(t, gain, scale, RAW, WIDEN)
        if SUMMED:
            t += bias
        columns_label = tl.load(y_label + columns)
        other = (itself[:, None] != tl.load(y_self + columns)[None, :]) & (columns < m)[None, :]
        if IDS:
            differ = tl.load(x_ident + rows)[:, None] != tl.load(y_ident + columns)[None, :]
        if MARKS == "pairs":
            positive, place, cursor = walk(place, cursor, stop, marks, columns, tile * BN + BN, BM, BN)
            back_positive, back_place, back_cursor = walk(
                back_place, back_cursor, back_stop, back_marks, columns, tile * BN + BN, BM, BN
            )
        g = tl.zeros((BM, BN), tl.float32)
        if x_anchor != 0:
            if MARKS != "pairs":
                positive = positives_of(
                    marks, rows, columns, label, columns_label, row_stride, column_stride, n, m, MARKS
                )
            negative = tl.load(x_coef + rows)
            negative_top = tl.load(x_coef + x_pad + rows)
            slope = tl.load(x_coef + 2 * x_pad + rows)
            slope_top = tl.load(x_coef + 3 * x_pad + rows)
            level = tl.load(x_coef + 4 * x_pad + rows)
            at_star = columns[None, :] == slope_top.to(tl.int32, bitcast=True)[:, None]
            counted = other
            if IDS:
                counted = other & (positive | differ)
            g += weights_of(
                t,
                positive,
                counted,
                at_star,
                negative[:, None],
                negative_top[:, None],
                slope[:, None],
                slope_top[:, None],
                level[:, None],
                inside,
                TERMS,
            )
        if y_anchor != 0:
            if MARKS != "pairs":
                back_positive = positives_of(
                    marks, rows, columns, label, columns_label, column_stride, row_stride, n, m, MARKS
                )
            negative = tl.load(y_coef + columns)
            negative_top = tl.load(y_coef + y_pad + columns)
            slope = tl.load(y_coef + 2 * y_pad + columns)
            slope_top = tl.load(y_coef + 3 * y_pad + columns)
            level = tl.load(y_coef + 4 * y_pad + columns)
            at_star = rows[:, None] == slope_top.to(tl.int32, bitcast=True)[None, :]
            counted = other
            if IDS:
                counted = other & (back_positive | differ)
            g += weights_of(
                t,
                back_positive,
                counted,
                at_star,
                negative[None, :],
                negative_top[None, :],
                slope[None, :],
                slope_top[None, :],
                level[None, :],
                inside,
                TERMS,
            )
        if (DIM != BK) or (OUT != DIM):
            y0, y1, y2 = load_pieces(y, columns, slab, y_pad, DIM, OUT, PIECES)
        acc = add_pull(g, scale, y0, y1, y2, acc, REACH, RAW, PIECES, WIDEN)
        tile = next_marked(
            tile, end, y_bounds, y_pad // GROUP, label_low, label_high, self_low, self_high, m, BN, GROUP, ALL
        )
    at = ((first_part + part) * x_pad + rows).to(tl.int64)[:, None] * DIM + (slab + tl.arange(0, OUT))[None, :]
    tl.store(out + at, acc)
