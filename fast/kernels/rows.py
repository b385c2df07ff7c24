"""Convert embeddings to the padded rows that the kernels multiply, and gradients of rows to gradients of embeddings.

Under "cosine", float32 rows are normalised. bfloat16 and float16 rows are only scaled into range by a power of two,
which is exact; rounding normalised rows to so few digits would cost more accuracy than all later steps. The reciprocals
of their norms are applied to the float32 products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tile import LOG2E


@triton.jit
def two_to_the(exponent):
    """Return 2^exponent in float32, for normal results."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def rounded_to_tf32(x):
    """Return float32 numbers rounded to the ten fraction bits of TF32; the hardware would truncate them."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def rounded_to_bfloat16(x):
    """Return float32 numbers rounded to bfloat16, as a device rounds them; the interpreter would truncate them."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def exponent_of(largest):
    """Return the exponent of two of a float32, clamped so that the power of two and its reciprocal are normal."""
    exponent = ((largest.to(tl.int32, bitcast=True) >> 23) & 255) - 127
    return tl.minimum(tl.maximum(exponent, -120), 120)


@triton.jit
def store_bounds(bounds, label, itself, block, pad, BN: tl.constexpr, ROWS: tl.constexpr):
    """Store, for each group of ROWS of the BN rows, the smallest and largest ``label`` and ``itself``."""
    label = tl.reshape(label, (BN // ROWS, ROWS))
    itself = tl.reshape(itself.to(tl.int64), (BN // ROWS, ROWS))
    tiles = pad // ROWS
    at = bounds + block * (BN // ROWS) + tl.arange(0, BN // ROWS)
    tl.store(at, tl.min(label, 1))
    tl.store(at + tiles, tl.max(label, 1))
    tl.store(at + 2 * tiles, tl.min(itself, 1))
    tl.store(at + 3 * tiles, tl.max(itself, 1))


@triton.jit
def place_of(rows, order, n, ORDERED: tl.constexpr):
    """Return the place, in the given order, of the rows at sorted positions; past the end, that of the last row."""
    place = tl.minimum(rows, n - 1).to(tl.int64)
    if ORDERED:
        place = tl.load(order + place)
    return place


@triton.jit(do_not_specialize=["n"])
def prepare_labels(
    temperature,
    reciprocal,
    reciprocal_in_log2,
    order,
    labels,
    selves,
    constants,
    label,
    itself,
    bounds,
    n,
    pad,
    LEARNED: tl.constexpr,
    ORDERED: tl.constexpr,
    LABELS: tl.constexpr,
    SELVES: tl.constexpr,
    BM: tl.constexpr,
):
    """Store each row's ``label`` and ``itself``, and the bounds of both for tiles of 128, 64 and 32 rows.

    ``itself`` is the number of the reference that is the row itself, or -1.

    LABELS selects the labels: "given"; "paired": the smaller of the row numbers of a row and its partner; "place": the
    row number; "never": -1, which no reference has. SELVES ("place", "given" or "never") selects ``itself`` likewise.
    The first program also stores the first two constants: the factor that turns products into logits, and the same
    factor divided by log 2. The third is the bias, which is added to the logits under SUMMED (see `tile`).
    """
    block = tl.program_id(0)
    if block == 0:
        if LEARNED:
            gain = 1.0 / tl.load(temperature).to(tl.float64)
            tl.store(constants, gain.to(tl.float32))
            tl.store(constants + 1, (gain * LOG2E).to(tl.float32))
        else:
            tl.store(constants, reciprocal)
            tl.store(constants + 1, reciprocal_in_log2)
    rows = block * BM + tl.arange(0, BM)
    # Rows past the end repeat the last row's label, so that they do not change the bounds.
    known = tl.minimum(rows, n - 1)
    source = place_of(rows, order, n, ORDERED)
    if LABELS == "given":
        mine = tl.load(labels + source)
    elif LABELS == "paired":
        mine = tl.minimum(source, tl.load(labels + source))
    elif LABELS == "place":
        mine = known.to(tl.int64)
    else:
        mine = -1 - known.to(tl.int64) * 0
    if SELVES == "place":
        own = known
    elif SELVES == "given":
        own = tl.load(selves + source).to(tl.int32)
    else:
        own = -1 - known * 0
    tl.store(label + rows, mine)
    tl.store(itself + rows, own)
    store_bounds(bounds, mine, own, block, pad, BM, 128)
    store_bounds(bounds + 4 * (pad // 128), mine, own, block, pad, BM, 64)
    store_bounds(bounds + 4 * (pad // 128 + pad // 64), mine, own, block, pad, BM, 32)


@triton.jit
def load_given(given, source, places, n, dim, rows, row_stride, column_stride):
    """Return some columns of given rows in float32, with 0 past the last row or column."""
    at = source[:, None] * row_stride + places.to(tl.int64)[None, :] * column_stride
    return tl.load(given + at, mask=(rows < n)[:, None] & (places < dim)[None, :], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["n", "dim", "row_stride", "column_stride"])
def prepare(
    given,
    order,
    x,
    scale,
    power,
    n,
    dim,
    pad,
    row_stride,
    column_stride,
    COSINE: tl.constexpr,
    RAW: tl.constexpr,
    PIECES: tl.constexpr,
    ORDERED: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BM: tl.constexpr,
):
    """Store the padded rows, and the powers of two and reciprocal norms by which they are scaled."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    source = place_of(rows, order, n, ORDERED)
    lifted = tl.full((BM,), 1.0, tl.float32)
    factor = tl.full((BM,), 1.0, tl.float32)
    if COSINE:
        largest = tl.zeros((BM,), tl.float32)
        for first in range(0, DIM, WIDTH):
            places = first + tl.arange(0, WIDTH)
            part = load_given(given, source, places, n, dim, rows, row_stride, column_stride)
            largest = tl.maximum(largest, tl.max(tl.abs(part), 1))
        lifted = two_to_the(-exponent_of(largest))
        total = tl.zeros((BM,), tl.float64)
        for first in range(0, DIM, WIDTH):
            places = first + tl.arange(0, WIDTH)
            part = load_given(given, source, places, n, dim, rows, row_stride, column_stride)
            wide = (part * lifted[:, None]).to(tl.float64)
            total += tl.sum(wide * wide, 1)
        factor = tl.where(rows < n, 1.0 / tl.sqrt(tl.where(rows < n, total, 1.0)), 0.0).to(tl.float32)
    tl.store(scale + rows, factor)
    tl.store(power + rows, lifted)
    for first in range(0, DIM, WIDTH):
        places = first + tl.arange(0, WIDTH)
        part = load_given(given, source, places, n, dim, rows, row_stride, column_stride) * lifted[:, None]
        to = rows.to(tl.int64)[:, None] * DIM + places[None, :]
        if RAW:
            tl.store(x + to, part.to(x.dtype.element_ty))
        else:
            part = part * factor[:, None]
            if PIECES == 3:
                step = pad.to(tl.int64) * DIM
                high = part.to(tl.bfloat16)
                rest = part - high.to(tl.float32)
                middle = rest.to(tl.bfloat16)
                low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
                tl.store(x + to, high)
                tl.store(x + step + to, middle)
                tl.store(x + 2 * step + to, low)
            else:
                tl.store(x + to, rounded_to_tf32(part))


@triton.jit(do_not_specialize=["n", "dim", "row_stride", "column_stride", "parts"])
def finish(
    given,
    order,
    scale,
    power,
    pull,
    constants,
    largest,
    out,
    along_out,
    n,
    dim,
    pad,
    parts,
    row_stride,
    column_stride,
    COSINE: tl.constexpr,
    REACH: tl.constexpr,
    ORDERED: tl.constexpr,
    LEARNED: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BM: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Add the parts of the gradient with respect to unit rows, and convert it to the gradient of the embeddings.

    Under "cosine" the component along the row is removed; under "dot" the embeddings take the place of the unit rows.
    LEARNED: also store each row's product with its gradient, from which the derivative with respect to the temperature
    is computed.
    """
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    real = rows < n
    source = place_of(rows, order, n, ORDERED)
    factor = tl.load(scale + rows)
    lifted = tl.load(power + rows)
    # 1 / temperature, divided by REACH, times the power of two by which `coefficients` divided the upstream gradients.
    whole = tl.load(constants) * (1.0 / REACH) * two_to_the(exponent_of(tl.load(largest)))
    step = pad.to(tl.int64) * DIM

    along = tl.zeros((BM,), tl.float32)
    if COSINE or LEARNED:
        for first in range(0, DIM, WIDTH):
            places = first + tl.arange(0, WIDTH)
            unit = load_given(given, source, places, n, dim, rows, row_stride, column_stride)
            unit = unit * lifted[:, None] * factor[:, None]
            at = rows.to(tl.int64)[:, None] * DIM + places[None, :]
            total = tl.zeros((BM, WIDTH), tl.float32)
            for part in range(parts):
                total += tl.load(pull + part * step + at)
            along += tl.sum(unit * total, 1)
    if LEARNED:
        tl.store(along_out + rows, along * whole, mask=real)
    for first in range(0, DIM, WIDTH):
        places = first + tl.arange(0, WIDTH)
        inside = real[:, None] & (places < dim)[None, :]
        at = rows.to(tl.int64)[:, None] * DIM + places[None, :]
        total = tl.zeros((BM, WIDTH), tl.float32)
        for part in range(parts):
            total += tl.load(pull + part * step + at)
        if COSINE:
            unit = load_given(given, source, places, n, dim, rows, row_stride, column_stride)
            total = (total - along[:, None] * (unit * lifted[:, None] * factor[:, None])) * factor[:, None]
        total = total * whole * lifted[:, None]
        to = source[:, None] * dim + places.to(tl.int64)[None, :]
        if WIDEN and out.dtype.element_ty == tl.bfloat16:
            total = rounded_to_bfloat16(total)
        tl.store(out + to, total.to(out.dtype.element_ty), mask=inside)
