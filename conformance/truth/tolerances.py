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
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..suite.cases import SIGNIFICAND, Case
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


@np.errstate(over="ignore")  # a bound beyond the range of float64 is inf
def bounds(case: Case, truth: Truth, dtype: str) -> Bounds:
    """The bounds of a case in a dtype.

    Args:
        case: the case.
        truth: its certified results.
        dtype: dtype of the inputs and of the gradient; the loss has the accumulating dtype.
    """
    u = unit_roundoff(accumulating(dtype))
    tiny = SMALLEST_SUBNORMAL[accumulating(dtype)]
    dim = case.embeddings.shape[1]
    sizes = _products(case)
    per_similarity = u * (SIMILARITY_ULPS + math.sqrt(dim)) * sizes

    scale, divisor = _scale(case), _divisor(case)
    inherited = np.abs(truth.weights) * per_similarity
    own = u * LOSS_ULPS * scale * (1 + 2 * math.log(1 / case.entry.epsilon) if case.entry.epsilon else 1)

    def of_value(value: float, inherited: float, share: float) -> float:
        return inherited + own * share + 2 * u * abs(value) + tiny

    row_inherited = (inherited.sum(axis=1) * divisor).tolist()
    anchors = {i: of_value(v, row_inherited[i], 1.0) for i, v in truth.anchors.items()}
    if isinstance(truth.loss, tuple):
        values = [anchors[i] for i in case.counted()]
    else:
        values = [of_value(truth.loss, float(inherited.sum()), len(case.anchors()) / divisor)]

    amplified = GRADIENT_ULPS + (SIMILARITY_ULPS + math.sqrt(dim)) * sizes.max(axis=1) / case.temperature
    sums = _amplified(case, truth, scale / (case.temperature * divisor), amplified, accumulating(dtype))
    norms = {name: _norms(m) if case.option("similarity") == "cosine" else 1.0 for name, m in case.matrices.items()}
    rows = {name: u * found / norms[name] for name, found in sums.items()}
    floor = min(FLOOR_ULPS / (SIMILARITY_ULPS + math.sqrt(dim)), 1.0)
    return _rounded_rows(Bounds(values, anchors, rows, floor, per_similarity), truth, dtype)


@np.errstate(over="ignore")
def with_narrowed_weights(allowed: Bounds, case: Case, truth: Truth, dtype: str) -> Bounds:
    """The bounds of an implementation that rounds its finished weights to the dtype of the rows.

    Args:
        allowed: the bounds of an implementation that does not round them.
        case: the case.
        truth: its certified results.
        dtype: dtype of the inputs; only bfloat16 and float16 change the bounds.
    """
    if dtype not in WEIGHTS_LIFTED:
        return allowed
    u, cosine = unit_roundoff(dtype), case.option("similarity") == "cosine"
    share = _scale(case) / (case.temperature * _divisor(case))
    least = share * SMALLEST_SUBNORMAL[dtype] / (2 * WEIGHTS_LIFTED[dtype])
    lengths, more = _lengths(case), {name: np.zeros(len(matrix)) for name, matrix in case.matrices.items()}
    for name, weights, other in _by_matrix(case, truth.weights):
        # The rows that weights multiply. Under cosine a row is scaled by a power of two to a norm of about 1, and the
        # rest of its norm is part of the weight.
        met = case.matrices[other]
        if cosine:
            met = np.ldexp(met, 1 - np.frexp(np.abs(met).max(axis=1, keepdims=True))[1])
        more[name] += u * np.abs(weights) @ lengths[other] + least * _norms(met).sum()
    if cosine:
        more = {name: found / _norms(case.matrices[name]) for name, found in more.items()}
    return replace(allowed, rows={name: rows + more[name] for name, rows in allowed.rows.items()})


def rounded_once(computed: Bounds, truth: Truth, dtype: str) -> Bounds:
    """The bounds of an implementation that computes in a wider dtype and rounds what it returns, once.

    Args:
        computed: its bounds in the dtype in which it computes.
        truth: the certified results.
        dtype: of the inputs and of the gradient; the loss is returned in the accumulating dtype.
    """
    u, tiny = unit_roundoff(accumulating(dtype)), SMALLEST_SUBNORMAL[accumulating(dtype)]
    rounded = computed.map_values(lambda bound, expected: bound + u * np.abs(expected) + tiny, truth)
    return _rounded_rows(rounded, truth, dtype)


def _rounded_rows(computed: Bounds, truth: Truth, dtype: str) -> Bounds:
    """The bounds with the gradients' one rounding to the returned dtype, entry by entry."""
    u, tiny = unit_roundoff(dtype), SMALLEST_SUBNORMAL[dtype]
    return computed.map_rows(
        lambda rows, found: rows + u * np.linalg.norm(found, axis=1) + tiny * math.sqrt(found.shape[1]), truth
    )


def _by_matrix(case: Case, pairs: Matrix) -> Iterator[tuple[str, Matrix, str]]:
    """What every matrix meets in which other one: its entries of a matrix of the case's shape.

    Where it meets itself, the entries of both orders are added.
    """
    for block in case.blocks():
        part = pairs[block.part]
        if block.left == block.right:
            yield block.left, part + part.T, block.right
        else:
            yield block.left, part, block.right
            yield block.right, part.T, block.left


def _norms(matrix: Matrix) -> Matrix:
    return np.array([math.hypot(*row) for row in matrix])


def _lengths(case: Case) -> dict[str, Matrix]:
    """The norms of the rows of every matrix as they are multiplied."""
    cosine = case.option("similarity") == "cosine"
    return {name: np.ones(len(matrix)) if cosine else _norms(matrix) for name, matrix in case.matrices.items()}


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
        products[block.part] = np.abs(case.matrices[block.left]) @ np.abs(case.matrices[block.right]).T
    return products


def _amplified(case: Case, truth: Truth, share: float, amplified: Matrix, dtype: str) -> dict[str, Matrix]:
    """By row of every matrix: what its gradient's error is u times, u the unit roundoff of the accumulating dtype."""
    lengths, positives, anchors = _lengths(case), case.positives(), case.anchors()
    errors, alone = np.abs(truth.weights), len(case.matrices) == 1
    if not alone:
        # What an exponential below the normal numbers is rounded to is relative to nothing, and may be 0.
        errors = errors + share * (SMALLEST_NORMAL[dtype] / unit_roundoff(dtype))
        for i in anchors:
            # Inside the logarithm a positive's share is its own part of all positives' exponentials: at most 1.
            errors[i, positives[i]] += share / (max(len(positives[i]), 1) if case.entry.form == "mean" else 1)
        errors = errors * amplified[:, None]
    sums = {name: np.zeros(len(matrix)) for name, matrix in case.matrices.items()}
    for name, part, other in _by_matrix(case, errors):
        sums[name] += part @ lengths[other]
    if alone:
        is_anchor, longest = np.isin(range(case.n), anchors).astype(float), lengths[case.first].max()
        shares = share * (is_anchor * longest + float(is_anchor.sum()) * longest / case.n)
        sums[case.first] = amplified * (sums[case.first] + shares)
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

    def drawn_in(bound: Matrix, expected: Matrix, found: Matrix) -> Matrix:
        error = found - expected
        twice = 2 * (np.linalg.norm(error, axis=1) if error.ndim == 2 else np.abs(error))
        return np.where(np.isfinite(twice), np.minimum(bound, np.maximum(twice, allowed.share_of_floor * bound)), bound)

    with np.errstate(all="ignore"):
        return allowed.map_values(drawn_in, truth, plain).map_rows(drawn_in, truth, plain)


def _divisor(case: Case) -> float:
    """By how much the reduction divides each anchor's contribution."""
    reduction = case.option("reduction")
    if reduction == "mean":
        return float(max(len(case.counted()), 1))
    if reduction == "mean_pairs":
        anchors, positives = case.anchors(), case.positives()
        return float(max(sum(len(positives[i]) for i in anchors) / max(len(anchors), 1), 1))
    return 1.0
