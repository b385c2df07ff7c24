"""Forward, second pass: sums over positives whose terms need the anchor's sums of the first pass.

Where each positive has its own denominator, r = e^t / (e^t + sum over negatives) is its ratio, t its logit. The epsilon
terms compare each positive with the sum of all columns: e is e^(t - the largest logit of the row), and total is the sum
of e + epsilon over all columns but the row itself. Each share of the columns stores, per anchor:

    LOGS      sum of -log r;                  epsilon: of log(total / (e + epsilon))
    MISSED    sum of 1 - r;                   epsilon: of e / (e + epsilon)
    HIT       sum of r e^boost
    CURVED    sum of r (1 - r) e^boost

The factor e^boost keeps ratios in range for a row whose positives are all far below its negatives: boost is the
logarithm of the sum over negatives minus the largest logit of a positive, or 0 if that is negative.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile import (
    EPSILON,
    NEVER,
    bounds_at,
    gains_of,
    load_pieces,
    log1p,
    logits_of,
    next_marked,
    positives_of,
    products,
    sigmoid,
    softplus,
)

LINES = tl.constexpr(4)
"""Numbers that a share of the columns stores per anchor."""


@triton.jit(do_not_specialize=["n", "m", "share"])
def positives(
    x,
    y,
    x_scale,
    y_scale,
    x_label,
    y_label,
    x_self,
    y_self,
    x_bounds,
    y_bounds,
    marks,
    constants,
    stats,
    out,
    n,
    m,
    x_pad,
    y_pad,
    share,
    row_stride,
    column_stride,
    TERMS: tl.constexpr,
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
    """Store ``[shares, LINES, x_pad]``; if labels show which tiles hold only negatives, do not visit these."""
    ALL: tl.constexpr = MARKS != "labels"
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    part = tl.program_id(1)
    gain = gains_of(constants, x_scale, rows, False, RAW)
    own0, own1, own2 = load_pieces(x, rows, 0, x_pad, DIM, BK, PIECES)
    label = tl.load(x_label + rows)
    itself = tl.load(x_self + rows)
    around = tl.program_id(0) * BM // GROUP_ROWS
    label_low, label_high, self_low, self_high = bounds_at(x_bounds, around, x_pad // GROUP_ROWS)
    # own: the logarithm of the sum over negatives, and the boost. epsilon: the total, and the largest logit.
    over = tl.load(stats + 5 * n + rows, mask=rows < n, other=0.0)
    lift = tl.load(stats + 6 * n + rows, mask=rows < n, other=0.0)

    logs = tl.zeros((BM,), tl.float32)
    missed = tl.zeros((BM,), tl.float32)
    hit = tl.zeros((BM,), tl.float32)
    curved = tl.zeros((BM,), tl.float32)
    end = tl.minimum(part * share + share, tl.cdiv(m, BN))
    tile = next_marked(
        part * share - 1, end, y_bounds, y_pad // GROUP, label_low, label_high, self_low, self_high, m, BN, GROUP, ALL
    )
    while tile != NEVER:
        columns = tile * BN + tl.arange(0, BN)
        t, _, _, _ = products(own0, own1, own2, x, rows, x_pad, y, columns, y_pad, BM, BN, DIM, BK, PIECES, True, WIDEN)
        t = logits_of(t, gain, tl.load(y_scale + columns), RAW, WIDEN)
        columns_label = tl.load(y_label + columns)
        positive = positives_of(marks, rows, columns, label, columns_label, row_stride, column_stride, n, m, MARKS)
        positive = positive & (itself[:, None] != tl.load(y_self + columns)[None, :]) & (columns < m)[None, :]
        if TERMS == "own":
            against = tl.where(positive, over[:, None] - t, float("-inf"))
            log = softplus(against)
            miss = sigmoid(against)
            ratio = tl.exp(lift[:, None] - log)
            logs += tl.sum(log, 1)
            missed += tl.sum(miss, 1)
            hit += tl.sum(tl.where(positive, ratio, 0.0), 1)
            curved += tl.sum(tl.where(positive, ratio * miss, 0.0), 1)
        else:
            e = tl.exp(tl.where(positive, t - lift[:, None], 0.0))
            guarded = e + EPSILON
            logs += tl.sum(tl.where(positive, log1p((over[:, None] - guarded) / guarded), 0.0), 1)
            missed += tl.sum(tl.where(positive, e / guarded, 0.0), 1)
        tile = next_marked(
            tile, end, y_bounds, y_pad // GROUP, label_low, label_high, self_low, self_high, m, BN, GROUP, ALL
        )
    at = out + (part * LINES * x_pad + rows)
    tl.store(at, logs)
    tl.store(at + x_pad, missed)
    tl.store(at + 2 * x_pad, hit)
    tl.store(at + 3 * x_pad, curved)
