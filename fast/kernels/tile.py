"""What the kernels share: a tile of logits, which of its pairs are positive, and functions of one number.

A tile holds the logits t of BM rows of one side and BN rows of the other: similarities divided by the temperature.

Rows are multiplied in one of three ways:

    RAW          bfloat16 and float16 rows as given, up to a power of two; the products are divided by the norms
    PIECES == 3  float32 rows as the sum of three bfloat16 rows: six products of pieces give a float32 product
    else         float32 rows, multiplied in TF32

Other compile-time constants:

    TERMS        the ``terms`` of the loss's `Rule`, but "binary" for "sigmoid". Some kernels get "softmax" for "out",
                 "in" and "lse", or "own" if each positive has its own denominator
    DENOMINATOR  "all", "only_negatives", or "own" if each positive has its own denominator
    SUMMED       whether the "binary" terms of a row are summed, as in the sigmoid loss, instead of averaged
    FIXED        whether no maximum is subtracted from logits; the plain kernels then use logits in units of log 2
    IDS          whether rows have ids; a pair of rows with equal ids is not a negative
    MARKS        how positives are given: "labels" (also for partners), "mask" or "pairs"
    SOME         whether only some rows are anchors
    ORDERED      whether rows are sorted by label
    LEARNED      whether the temperature is a tensor
    DIM          the padded length of a row
    BK, OUT      ``part`` and ``out`` of `table.Launch`; BM and BN are its ``rows`` and ``columns``
    GROUP        the number of columns of the plain kernel's tile; GROUP_ROWS is its number of rows
    REACH        the factor that keeps float16 weights of pairs in the normal range, see `launch`
    WIDEN        whether Triton's interpreter runs the kernels
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

LOG2E = tl.constexpr(1.4426950408889634)
EPSILON = tl.constexpr(1e-8)
"""The constant of the epsilon terms, part of the published formula of `supcon_epsilon_loss`."""
NEVER = tl.constexpr(2147483647)
"""Marks the end of a list; larger than every row number and tile number."""
CHUNK = tl.constexpr(256)
"""Number of tiles whose bounds are examined together."""


@triton.jit
def dot(a, b, acc, WIDEN: tl.constexpr):
    """Return ``acc + a @ b`` in float32; float32 factors are multiplied in TF32.

    WIDEN converts factors to float32 for the interpreter, whose bfloat16 products are wrong.
    """
    if WIDEN:
        found = tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        found = tl.dot(a, b, acc, input_precision="tf32")
    return found


@triton.jit
def load_part(x, rows, first, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Return WIDTH columns of some rows of a padded matrix ``[.., DIM]``, starting at column ``first``."""
    return tl.load(x + rows.to(tl.int64)[:, None] * DIM + (first + tl.arange(0, WIDTH))[None, :])


@triton.jit
def load_pieces(x, rows, first, pad, DIM: tl.constexpr, WIDTH: tl.constexpr, PIECES: tl.constexpr):
    """Return the three pieces of some rows; if there is only one piece, return it three times."""
    high = load_part(x, rows, first, DIM, WIDTH)
    if PIECES == 3:
        step = pad.to(tl.int64) * DIM
        middle = load_part(x + step, rows, first, DIM, WIDTH)
        low = load_part(x + 2 * step, rows, first, DIM, WIDTH)
    else:
        middle = high
        low = high
    return high, middle, low


@triton.jit
def small_parts(a0, a1, a2, b0, b1, b2, acc, WIDEN: tl.constexpr):
    """Return ``acc`` plus the product of two matrices in three pieces, without that of the first pieces."""
    acc = dot(a2, b0, acc, WIDEN)
    acc = dot(a0, b2, acc, WIDEN)
    acc = dot(a1, b1, acc, WIDEN)
    acc = dot(a1, b0, acc, WIDEN)
    return dot(a0, b1, acc, WIDEN)


@triton.jit
def of_pieces(a0, a1, a2, b0, b1, b2, acc, PIECES: tl.constexpr, WIDEN: tl.constexpr):
    """Return ``acc`` plus the product of two matrices in pieces, the smallest parts first."""
    if PIECES == 3:
        acc = small_parts(a0, a1, a2, b0, b1, b2, acc, WIDEN)
    return dot(a0, b0, acc, WIDEN)


@triton.jit
def products(
    own0,
    own1,
    own2,
    x,
    rows,
    x_pad,
    y,
    columns,
    y_pad,
    BM: tl.constexpr,
    BN: tl.constexpr,
    DIM: tl.constexpr,
    BK: tl.constexpr,
    PIECES: tl.constexpr,
    APART: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Return the products of rows of x and rows of y, and the pieces of y's rows if DIM == BK.

    If DIM == BK, ``own0`` to ``own2`` hold the rows of x. Otherwise both sides are loaded, BK columns at a time.

    Tensor cores do not round sums but truncate them, which costs digits whenever a small product is added to a large
    sum. Under APART, all small parts are therefore added first, in a loop of their own: in the forward pass, errors
    become three to four times smaller for 512 columns and more. In the backward pass, registers would be spilled.
    """
    found = tl.zeros((BM, BN), tl.float32)
    if DIM == BK:
        y0, y1, y2 = load_pieces(y, columns, 0, y_pad, DIM, BK, PIECES)
        found = of_pieces(own0, own1, own2, tl.trans(y0), tl.trans(y1), tl.trans(y2), found, PIECES, WIDEN)
    else:
        y0 = own0
        y1 = own1
        y2 = own2
        if APART and PIECES == 3:
            for k in range(0, DIM, BK):
                x0, x1, x2 = load_pieces(x, rows, k, x_pad, DIM, BK, PIECES)
                part0, part1, part2 = load_pieces(y, columns, k, y_pad, DIM, BK, PIECES)
                found = small_parts(x0, x1, x2, tl.trans(part0), tl.trans(part1), tl.trans(part2), found, WIDEN)
            for k in range(0, DIM, BK):
                high, part = load_part(x, rows, k, DIM, BK), load_part(y, columns, k, DIM, BK)
                found = dot(high, tl.trans(part), found, WIDEN)
        else:
            for k in range(0, DIM, BK):
                x0, x1, x2 = load_pieces(x, rows, k, x_pad, DIM, BK, PIECES)
                part0, part1, part2 = load_pieces(y, columns, k, y_pad, DIM, BK, PIECES)
                found = of_pieces(x0, x1, x2, tl.trans(part0), tl.trans(part1), tl.trans(part2), found, PIECES, WIDEN)
    return found, y0, y1, y2


@triton.jit
def gains_of(constants, x_scale, rows, FIXED: tl.constexpr, RAW: tl.constexpr):
    """Return the factor that turns products into logits, under RAW one per row; under FIXED, in units of log 2.

    A GPU has an instruction for 2^t, while e^t needs an additional multiplication. Without FIXED, logits may be near
    the end of the range of float32, and units of log 2 would overflow.
    """
    if FIXED:
        gain = tl.load(constants + 1)
    else:
        gain = tl.load(constants)
    if RAW:
        gain = tl.load(x_scale + rows) * gain
    return gain


@triton.jit
def logits_of(products, gain, column_scale, RAW: tl.constexpr, WIDEN: tl.constexpr):
    """Return the logits of products. ``gain`` and ``column_scale`` are those of `gains_of` and of the columns.

    The logits are rounded. Otherwise the compiler would fuse this multiplication with the subtraction of the maximum,
    but the maximum itself is rounded: the largest logit minus the maximum would be a rounding error instead of 0.
    """
    if RAW:
        products = products * gain[:, None]
        factor = column_scale[None, :]
    else:
        factor = gain
    if WIDEN:
        found = products * factor
    else:
        found = libdevice.mul_rn(products, factor)
    return found


@triton.jit
def bounds_at(bounds, tile, tiles):
    """Return the smallest and largest ``label`` of a tile of rows, and the smallest and largest ``itself``."""
    label_low = tl.load(bounds + tile)
    label_high = tl.load(bounds + tiles + tile)
    self_low = tl.load(bounds + 2 * tiles + tile)
    self_high = tl.load(bounds + 3 * tiles + tile)
    return label_low, label_high, self_low, self_high


@triton.jit
def needs_mask(bounds, tile, tiles, label_low, label_high, self_low, self_high, m, BN: tl.constexpr):
    """Return whether tiles of BN columns may hold a positive or a self pair of some rows, or reach past the end."""
    first_label, last_label, first_self, last_self = bounds_at(bounds, tile, tiles)
    labels = (first_label <= label_high) & (last_label >= label_low)
    selves = (first_self <= self_high) & (last_self >= self_low)
    return labels | selves | (tile * BN + BN > m)


@triton.jit
def next_marked(
    after,
    end,
    bounds,
    tiles,
    label_low,
    label_high,
    self_low,
    self_high,
    m,
    BN: tl.constexpr,
    GROUP: tl.constexpr,
    ALL: tl.constexpr,
):
    """Return the next tile of BN columns to visit, after ``after`` and before ``end``, or NEVER if there is none.

    Under ALL every tile is visited, otherwise each tile inside a tile of GROUP columns that needs a mask. GROUP is the
    tile size of the plain kernel: this kernel must visit exactly the columns that the plain kernel hides.
    """
    if ALL:
        found = tl.where(after + 1 < end, after + 1, NEVER)
    else:
        found = after * 0 + NEVER
        first = after + 1
        while (first < end) & (found == NEVER):
            place = first + tl.arange(0, CHUNK)
            around = tl.minimum(place // (GROUP // BN), tiles - 1)
            marked = needs_mask(bounds, around, tiles, label_low, label_high, self_low, self_high, m, GROUP)
            found = tl.min(tl.where(marked & (place < end), place, NEVER), 0)
            first += CHUNK
    return found


@triton.jit
def positives_of(marks, rows, columns, label, columns_label, row_stride, column_stride, n, m, MARKS: tl.constexpr):
    """Return which pairs are positives, by labels or by a mask of bytes; self pairs are not excluded."""
    if MARKS == "labels":
        found = label[:, None] == columns_label[None, :]
    else:
        at = rows.to(tl.int64)[:, None] * row_stride + columns.to(tl.int64)[None, :] * column_stride
        found = tl.load(marks + at, mask=(rows < n)[:, None] & (columns < m)[None, :], other=0) != 0
    return found


@triton.jit
def walk(place, cursor, stop, marks, columns, limit, BM: tl.constexpr, BN: tl.constexpr):
    """Return which columns before ``limit`` are listed for each row, and the new positions in the lists."""
    listed = tl.zeros((BM, BN), tl.int1)
    while tl.max((place < limit).to(tl.int32), 0) != 0:
        listed = listed | (columns[None, :] == place[:, None])
        cursor += (place < limit).to(tl.int32)
        place = tl.load(marks + cursor, mask=cursor < stop, other=NEVER)
    return listed, place, cursor


@triton.jit
def begin_walk(ends, marks, rows, n, first):
    """Return each row's first listed column from ``first`` on, its position in the list, and the end of the list."""
    cursor = tl.load(ends + rows, mask=rows < n, other=0)
    stop = tl.load(ends + rows + 1, mask=rows < n, other=0)
    place = tl.load(marks + cursor, mask=cursor < stop, other=NEVER)
    while tl.max((place < first).to(tl.int32), 0) != 0:
        cursor += (place < first).to(tl.int32)
        place = tl.load(marks + cursor, mask=cursor < stop, other=NEVER)
    return place, cursor, stop


@triton.jit
def series_of_log1p(e):
    """Return log(1 + e) for 0 <= e <= 1, within a few ulp, from the series of 2 artanh z with z = e / (2 + e)."""
    z = e / (2.0 + e)
    s = z * z
    series = 1 / 13 + s * (1 / 15)
    series = 1 / 11 + s * series
    series = 1 / 9 + s * series
    series = 1 / 7 + s * series
    series = 1 / 5 + s * series
    series = 1 / 3 + s * series
    return 2.0 * z * (1.0 + s * series)


@triton.jit
def softplus(t):
    """Return log(1 + e^t)."""
    return tl.maximum(t, 0.0) + series_of_log1p(tl.exp(-tl.abs(t)))


@triton.jit
def sigmoid(t):
    """Return e^t / (1 + e^t)."""
    e = tl.exp(-tl.abs(t))
    return tl.where(t >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def log1p(x):
    """Return log(1 + x) for x >= 0."""
    u = 1.0 + x
    # The logarithm of the rounded sum, plus a correction for the rounding.
    return tl.log(u) + (x - (u - 1.0)) / u
