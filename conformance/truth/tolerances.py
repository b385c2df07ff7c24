"""The only home of tolerances: how far a right implementation may be from the truth, and why.

Nothing here was raised until a test passed; every bound is the unit roundoff of the dtype that accumulates, times the
conditioning of the case (taken from the certified terms), times a count of operations, plus one rounding of what is
returned.

*Similarities.* A dot product of D products carries an error of at most about D u times the sum of its absolute
products, a_ij; for rows brought to norm 1 that sum is at most 1, and norm and division add a few more roundings. The
random walk of rounding errors makes the square root of D the honest figure: SIMILARITY_ULPS + sqrt(D) units u of a_ij.

*The loss.* To first order an error in s_ij moves the loss by its derivative, so the loss inherits the sum over all
pairs of |dL/ds_ij| a_ij. On top come its own operations: exponentials, a sum of at most N of them and a logarithm, each
relative to quantities of size 1 per anchor (a logarithm of a sum relative to its largest term), and the subtraction of
terms as large as the loss.

The batch tutorial's loss takes logarithms of exponentials plus epsilon, each up to -log(epsilon) in size, and
subtracts them: its own operations are rounded relative to that.

*The gradient.* Row i is a sum over j of weights V_ij = dL/dS_ij + dL/dS_ji times rows, divided by the row's norm. A
weight is a softmax entry minus a share of 1/|P|: exponentials amplify a logit's error by 1/temperature, and the
difference keeps an absolute error of one unit of the share. The bound sums both over the row.

Between two matrices (references in place of the batch, two towers, a queue) the same is said of each: an anchor's row
is a sum over its pairs of weights times the rows on the other side, and so is the row of a reference or a negative,
over the anchors that are contrasted with it. A weight's error is amplified by its anchor's logits, and a share falls
on the anchor's own positives alone; a matrix that is on both sides (a tower, in both directions) has the sum of both.

*Narrowed weights.* Fused kernels for bfloat16 and float16 rows hold a finished weight V_ij (of a batch against itself:
of both orders, added) in float32 and round it once, to the dtype of the rows, because the tensor cores multiply numbers
of one dtype. Row i's gradient is then off by at most the dtype's u times the sum over j of |V_ij| |y_j|, y_j the rows
as they are multiplied (of norm 1 under cosine), divided by the row's own norm under cosine: nothing cancels, for the
roundings know nothing of each other. In float16 a weight may be below the normal numbers, where rounding is no longer
relative: its error is then at most half the smallest subnormal, of weights that were multiplied by WEIGHTS_LIFTED
beforehand, with the largest upstream gradient brought to between 1 and 2. This belongs to implementations that declare
`narrows_weights`, and to these dtypes: rows of float32 meet their weights in float32. It is added after the bounds are
drawn in to the straightforward implementation, which rounds no weight.

*Wider sums.* An implementation that declares ``computes_in`` float64 converts narrower rows and rounds what it returns:
its bounds are those of float64, plus one rounding of the loss to the accumulating dtype and of the gradient to the
dtype of the rows. Thereby the golden cases tell ``backend="exact"`` from the other backends.

Peers are held to these bounds. ``fast`` is held to more: never worse than twice what the straightforward torch
implementation (``plain.py``) attains in the same dtype, with a floor of a few units in the last place. ``pairproof
verify`` prints how the ratios of error to bound are distributed, so that slack is visible.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ..suite.cases import SIGNIFICAND, Block, Case
from ..suite.records import Bounds, Matrix, Outcome, Truth

SIMILARITY_ULPS = 3.0
"""Roundings in a similarity beyond its sum: two norms, two divisions, the temperature, in units of u."""

LOSS_ULPS = 2.0
"""Roundings of exponential, sum and logarithm, in units of u per anchor."""

GRADIENT_ULPS = 4.0
"""Roundings of a weight and of the sum over rows, the backward pass of the norm included, in units of u."""

FLOOR_ULPS = 4.0
"""Units in the last place of a similarity that are always allowed, however lucky the straightforward road was."""

SMALLEST_SUBNORMAL = {"float64": 2.0**-1074, "float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}

SMALLEST_NORMAL = {"float64": 2.0**-1022, "float32": 2.0**-126}

WEIGHTS_LIFTED = {"bfloat16": 1.0, "float16": 2.0**12}
"""By what narrowed weights are multiplied before they are rounded: in each dtype that they are narrowed to."""


def unit_roundoff(dtype: str) -> float:
    """Half the distance from 1 to the next number of the dtype."""
    return 2.0 ** -SIGNIFICAND[dtype]


def accumulating(dtype: str) -> str:
    """The dtype in which sums are held at least: float32 for the halves."""
    return "float64" if dtype == "float64" else "float32"


def bounds(case: Case, truth: Truth, dtype: str) -> Bounds:
    """The bounds of a case in a dtype.

    Args:
        case: the case.
        truth: its certified results.
        dtype: of the inputs and of the gradient; the loss is returned in the accumulating dtype.
    """
    with np.errstate(over="ignore"):  # a bound beyond the range of float64 is no bound, and said so by inf
        return _bounds(case, truth, dtype)


def _bounds(case: Case, truth: Truth, dtype: str) -> Bounds:
    u = unit_roundoff(accumulating(dtype))
    tiny = SMALLEST_SUBNORMAL[accumulating(dtype)]
    dim = case.embeddings.shape[1]
    sizes = _products(case)
    per_similarity = u * (SIMILARITY_ULPS + math.sqrt(dim)) * sizes

    scale, divisor = _scale(case), _divisor(case)
    inherited = float(np.sum(np.abs(truth.weights) * per_similarity))
    own = u * LOSS_ULPS * scale * (1 + 2 * math.log(1 / case.entry.epsilon) if case.entry.epsilon else 1)

    def of_value(value: float, inherited: float, share: float) -> float:
        return inherited + own * share + 2 * u * abs(value) + tiny

    row_inherited = np.sum(np.abs(truth.weights) * per_similarity, axis=1) * divisor
    anchor_bounds = {i: of_value(v, float(row_inherited[i]), 1.0) for i, v in truth.anchors.items()}
    if isinstance(truth.loss, tuple):
        values = [anchor_bounds[i] for i in case.counted()]
    else:
        values = [of_value(truth.loss, inherited, len(case.anchors()) / divisor)]

    share = scale / (case.temperature * divisor)
    amplified = GRADIENT_ULPS + (SIMILARITY_ULPS + math.sqrt(dim)) * sizes.max(axis=1) / case.temperature
    if len(case.matrices) == 1:
        sums = _in_a_batch(case, truth, share, amplified)
    else:
        sums = _between_matrices(case, truth, share, amplified, SMALLEST_NORMAL[accumulating(dtype)] / u)
    gradients = {case.first: truth.gradient, **truth.other_gradients}
    rows = {name: u * found for name, found in sums.items()}
    if case.option("similarity") == "cosine":
        rows = {name: found / _norms(case.matrices[name]) for name, found in rows.items()}
    rows = {name: _rounded_rows(found, gradients.get(name), dtype) for name, found in rows.items()}
    share = FLOOR_ULPS / (SIMILARITY_ULPS + math.sqrt(dim))
    return Bounds(values, anchor_bounds, rows.pop(case.first), min(share, 1.0), per_similarity, rows)


def with_narrowed_weights(allowed: Bounds, case: Case, truth: Truth, dtype: str) -> Bounds:
    """The bounds of an implementation that rounds its finished weights to the dtype of the rows.

    Args:
        allowed: the bounds of one that does not.
        case: the case.
        truth: its certified results.
        dtype: of the inputs; only the halves narrow.
    """
    if dtype not in WEIGHTS_LIFTED:
        return allowed
    with np.errstate(over="ignore"):
        more = _narrowed(case, truth, dtype)
    other_rows = {name: rows + more[name] for name, rows in allowed.other_rows.items()}
    return replace(allowed, rows=allowed.rows + more[case.first], other_rows=other_rows)


def rounded_once(computed: Bounds, truth: Truth, dtype: str) -> Bounds:
    """The bounds of an implementation that computes in a wider dtype and rounds what it returns, once.

    Args:
        computed: its bounds in the dtype in which it computes.
        truth: the certified results.
        dtype: of the inputs and of the gradient; the loss is returned in the accumulating dtype.
    """
    returned = accumulating(dtype)

    def value(bound: float, expected: float) -> float:
        return bound + unit_roundoff(returned) * abs(expected) + SMALLEST_SUBNORMAL[returned]

    return replace(
        computed,
        values=[value(bound, expected) for bound, expected in zip(computed.values, truth.values, strict=True)],
        anchors={i: value(bound, truth.anchors[i]) for i, bound in computed.anchors.items()},
        rows=_rounded_rows(computed.rows, truth.gradient, dtype),
        other_rows={
            name: _rounded_rows(rows, truth.other_gradients.get(name), dtype)
            for name, rows in computed.other_rows.items()
        },
    )


def _rounded_rows(rows: Matrix, gradient: Matrix | None, dtype: str) -> Matrix:
    """The bounds of a gradient's rows, with its one rounding to the returned dtype, entry by entry."""
    if gradient is None:
        return rows
    rounding = unit_roundoff(dtype) * np.linalg.norm(gradient, axis=1)
    return np.asarray(rows + rounding + SMALLEST_SUBNORMAL[dtype] * math.sqrt(gradient.shape[1]))


def _narrowed(case: Case, truth: Truth, dtype: str) -> dict[str, Matrix]:
    """By row of every matrix: how far narrowed weights may move its gradient."""
    u, cosine = unit_roundoff(dtype), case.option("similarity") == "cosine"
    share = _scale(case) / (case.temperature * _divisor(case))
    least = share * SMALLEST_SUBNORMAL[dtype] / (2 * WEIGHTS_LIFTED[dtype])
    norms = {name: _norms(matrix) for name, matrix in case.matrices.items()}
    lengths = _lengths(case)
    # What a weight meets: under cosine a row brought to ordinary size by a power of two, whose norm the weight has.
    met = {name: _of_ordinary_size(matrix) if cosine else norms[name] for name, matrix in case.matrices.items()}
    sums = {name: np.zeros(len(matrix)) for name, matrix in case.matrices.items()}

    def add(name: str, weights: Matrix, other: str) -> None:
        sums[name] += u * np.abs(weights) @ lengths[other] + least * met[other].sum()

    for block in case.blocks():
        part = _part(truth.weights, block, case)
        if block.left == block.right:
            add(block.left, part + part.T, block.right)
        else:
            add(block.left, part, block.right)
            add(block.right, part.T, block.left)
    return {name: found / norms[name] if cosine else found for name, found in sums.items()}


def _of_ordinary_size(matrix: Matrix) -> Matrix:
    """The norms of rows after a power of two has brought each one's largest entry to between 1 and 2."""
    return np.array([math.hypot(*(x / 2.0 ** (math.frexp(max(map(abs, row)))[1] - 1) for x in row)) for row in matrix])


def _norms(matrix: Matrix) -> Matrix:
    return np.array([math.hypot(*row) for row in matrix])


def _lengths(case: Case) -> dict[str, Matrix]:
    """The norms of the rows of every matrix as they are multiplied."""
    cosine = case.option("similarity") == "cosine"
    return {name: np.ones(len(matrix)) if cosine else _norms(matrix) for name, matrix in case.matrices.items()}


def _part(matrix: Matrix, block: Block, case: Case) -> Matrix:
    """The entries of a matrix of the case's shape that belong to a block."""
    rows, columns = len(case.matrices[block.left]), len(case.matrices[block.right])
    return matrix[block.row : block.row + rows, block.column : block.column + columns]


def _scale(case: Case) -> float:
    """By how much the base temperature multiplies the loss."""
    base = case.option("base_temperature")
    return 1.0 if base is None else case.temperature / float(base)


def _products(case: Case) -> Matrix:
    """The sums of absolute products of which the similarities are made; 1 under cosine."""
    products = np.ones(case.shape)
    if case.option("similarity") == "cosine":
        return products
    for block in case.blocks():
        _part(products, block, case)[:] = np.abs(case.matrices[block.left]) @ np.abs(case.matrices[block.right]).T
    return products


def _in_a_batch(case: Case, truth: Truth, share: float, amplified: Matrix) -> dict[str, Matrix]:
    """By row of a batch that is contrasted with itself: what its gradient's error is u times."""
    n = case.n
    anchors = case.anchors()
    lengths = _lengths(case)[case.first]
    weights = np.abs(truth.weights) + np.abs(truth.weights).T
    is_anchor = np.array([i in anchors for i in range(n)], dtype=float)
    uncancelled = weights @ lengths + share * (is_anchor * lengths.max() + float(is_anchor.sum()) * lengths.max() / n)
    return {case.first: amplified * uncancelled}


def _between_matrices(case: Case, truth: Truth, share: float, amplified: Matrix, lost: float) -> dict[str, Matrix]:
    """By row of every matrix, where the anchors are contrasted with other rows: what its gradient's error is u times.

    ``lost`` is the smallest normal number of the accumulating dtype, in units of u.
    """
    lengths, positives = _lengths(case), case.positives()
    # What an exponential below the normal numbers is rounded to is relative to nothing, and may be 0.
    errors = np.abs(truth.weights) + share * lost
    for i in case.anchors():
        for p in positives[i]:
            # Inside the logarithm a positive's share is its own part of all positives' exponentials: at most 1.
            errors[i, p] += share / len(positives[i]) if case.entry.form == "mean" else share
    errors = errors * amplified[:, None]
    sums = {name: np.zeros(len(matrix)) for name, matrix in case.matrices.items()}
    for block in case.blocks():
        part = _part(errors, block, case)
        sums[block.left] += part @ lengths[block.right]
        sums[block.right] += part.T @ lengths[block.left]
    return sums


def held_to(allowed: Bounds, truth: Truth, plain: Outcome) -> Bounds:
    """The bounds, drawn in to twice what the straightforward implementation attains in the same dtype.

    It is sometimes exact by luck, so no bound falls below what FLOOR_ULPS units in the last place of every similarity
    make of it: a similarity's two rows are rounded, and so are their product and its quotient by the temperature.
    Where the straightforward implementation fails altogether the bounds stay as they are.

    Args:
        allowed: the a-priori bounds.
        truth: the certified results.
        plain: what the straightforward implementation gave in the same dtype.
    """

    def drawn_in(bound: float, expected: float, found: float) -> float:
        twice = 2 * abs(found - expected)
        return min(bound, max(twice, allowed.share_of_floor * bound)) if math.isfinite(twice) else bound

    def rows_drawn_in(rows: Matrix, expected: Matrix | None, found: Matrix | None) -> Matrix:
        if expected is None or found is None:
            return rows
        with np.errstate(invalid="ignore"):
            twice = 2 * np.linalg.norm(found - expected, axis=1)
        return np.where(np.isfinite(twice), np.minimum(rows, np.maximum(twice, allowed.share_of_floor * rows)), rows)

    anchors = plain.anchors or {}
    return Bounds(
        values=[drawn_in(b, e, f) for b, e, f in zip(allowed.values, truth.values, plain.values, strict=True)],
        anchors={i: drawn_in(b, truth.anchors[i], anchors.get(i, math.nan)) for i, b in allowed.anchors.items()},
        rows=rows_drawn_in(allowed.rows, truth.gradient, plain.gradient),
        share_of_floor=allowed.share_of_floor,
        similarity=allowed.similarity,
        other_rows={
            name: rows_drawn_in(rows, truth.other_gradients.get(name), plain.other_gradients.get(name))
            for name, rows in allowed.other_rows.items()
        },
    )


def _divisor(case: Case) -> float:
    """By how much the reduction divides each anchor's contribution."""
    reduction = case.option("reduction")
    if reduction == "mean":
        return float(max(len(case.counted()), 1))
    if reduction == "mean_pairs":
        anchors, positives = case.anchors(), case.positives()
        return float(max(sum(len(positives[i]) for i in anchors) / max(len(anchors), 1), 1))
    return 1.0
