"""The values and weights of each row of a small batch in float32, as functions that Numba compiles.

The formulas are those of `formulas` for the terms "out" and "in" with the denominator "all", and for "sigmoid". As in
`rowwise`, the exponentials of positives and of negatives are relative to their own largest logit, so the functions
serve every temperature. Logits are replaced by the weights, the derivatives of the values; those of "out" and "in" are
in units of log 2.

`compiled` is the only module that imports this one, because Numba is optional. With ``NUMBA_DISABLE_JIT=1`` the
functions run as Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

from .jit import LABELS, MASK, MEAN, OUT
from .spec import LN2

Matrix = npt.NDArray[np.float32]
Row = npt.NDArray[np.float32]
Norms = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

TILE = 16
"""Rows and columns of a block that is transposed at once."""

_LOG2E = np.float32(1 / LN2)
_LOWEST = np.float32(-3e38)
_LEAST_PART = np.float32(2.0**-100)
"""Exponentials below this part of a row's largest one have the weight 0: the others would be subnormal numbers."""
_ZERO, _ONE, _TWO, _HALF = np.float32(0), np.float32(1), np.float32(2), np.float32(0.5)
_LEAST, _BIAS, _BITS = np.float32(-126), np.int32(127), np.int32(23)
# A polynomial of 2^x for |x| <= 1/2, whose relative error is 3e-9. Its value at 0 is rounded to 1.
_POLYNOMIAL = np.polynomial.Chebyshev.interpolate(np.exp2, 6, (-0.5, 0.5)).convert(kind=np.polynomial.Polynomial)
_, _C1, _C2, _C3, _C4, _C5, _C6 = _POLYNOMIAL.coef.astype(np.float32)
# The coefficients of atanh(x) / x, in powers of x^2.
_A1, _A2, _A3, _A4 = np.float32(1 / 3), np.float32(1 / 5), np.float32(1 / 7), np.float32(1 / 9)
_A5, _A6, _A7 = np.float32(1 / 11), np.float32(1 / 13), np.float32(1 / 15)

_OPTIONS: dict[str, Any] = {"error_model": "numpy", "nogil": True}
_SUMS = {**_OPTIONS, "fastmath": {"contract", "nsz", "reassoc"}}
_FINITE = {**_OPTIONS, "fastmath": {"contract", "nnan", "nsz", "reassoc"}}
"""For functions whose numbers are all finite."""


F = TypeVar("F", bound=Callable[..., Any])


def _jit(options: dict[str, Any]) -> Callable[[F], F]:
    return cast(Callable[[F], F], numba.njit(**options))


@_jit(_FINITE)
def _exp2(x: Any) -> Any:
    """Return 2^x for a float32 x up to 127; 0 if it is not a normal number."""
    near = max(x, _LEAST)
    whole = np.floor(near + _HALF)
    rest = near - whole
    found = _C6 * rest + _C5
    found = found * rest + _C4
    found = found * rest + _C3
    found = found * rest + _C2
    found = found * rest + _C1
    found = found * rest + _ONE
    found = found * np.int32((np.int32(whole) + _BIAS) << _BITS).view(np.float32)
    return found if x >= _LEAST else _ZERO


@_jit(_OPTIONS)
def _contrast(odds: float) -> tuple[float, float, float]:
    """Return softplus(odds), sigmoid(odds) and sigmoid(-odds)."""
    if odds > 0:
        small = math.exp(-odds)
        return odds + math.log1p(small), 1 / (1 + small), small / (1 + small)
    small = math.exp(odds)
    return math.log1p(small), small / (1 + small), 1 / (1 + small)


@_jit(_FINITE)
def _mark(mark: Row, i: int, kind: int, given: Integers, columns: Integers, mask: Mask) -> None:
    """Write 1 for the positives of row ``i`` into ``mark`` ``[M]``, and 0 for the other columns.

    Args:
        mark: the result.
        i: the row.
        kind: how positives are given: `LABELS`, `MASK` or `PARTNERS`.
        given: ``[N]``: labels, or the column of each row's positive (`PARTNERS`).
        columns: ``[M]``, the labels of the columns (`LABELS`).
        mask: ``[N, M]`` (`MASK`).
    """
    if kind == LABELS:
        label = given[i]
        for j in range(len(mark)):
            mark[j] = _ONE if columns[j] == label else _ZERO
    elif kind == MASK:
        row = mask[i]
        for j in range(len(mark)):
            mark[j] = row[j]
    else:
        mark[:] = _ZERO
        mark[given[i]] = _ONE


def measure(rows: Matrix, norms: Norms) -> tuple[float, float]:
    """Write the norms of the rows ``[N, D]``; return the smallest and the largest, NaN if a row contains NaN."""
    low, high, known = math.inf, 0.0, True
    for i in range(rows.shape[0]):
        row, square = rows[i], 0.0
        for k in range(len(row)):
            square += np.float64(row[k]) * np.float64(row[k])
        norm = math.sqrt(square)
        norms[i, 0] = norm
        low, high, known = min(low, norm), max(high, norm), known and not math.isnan(norm)
    return (low, high) if known else (math.nan, math.nan)


def are_mutual(partners: Integers) -> bool:
    """Return whether the partner of each row ``[N]`` is another row, whose partner it is."""
    count = len(partners)
    for i in range(count):
        other = partners[i]
        if other < 0 or other >= count or other == i or partners[other] != i:
            return False
    return True


def scale(rows: Matrix, norms: Norms, root: float, scaled: Matrix, factor: Row) -> None:
    """Divide the rows ``[N, D]`` by their norms and by ``root``; ``factor`` ``[N]`` receives 1 / divisor."""
    for i in range(rows.shape[0]):
        row, to, one = rows[i], scaled[i], np.float32(1 / (norms[i, 0] * root))
        factor[i] = one
        for k in range(len(row)):
            to[k] = row[k] * one


def project(grad: Matrix, scaled: Matrix, factor: Row, size: float, of_rows: Matrix) -> None:
    """Turn the gradient of the scaled rows ``[N, D]`` into that of the rows, multiplied by ``size``.

    The result has no component along the row. In float64, because that component may be most of the gradient.
    """
    for i in range(grad.shape[0]):
        row, of_row, to, along, square = grad[i], scaled[i], of_rows[i], 0.0, 0.0
        for k in range(len(row)):
            along += np.float64(row[k]) * np.float64(of_row[k])
            square += np.float64(of_row[k]) * np.float64(of_row[k])
        less, one = along / square, np.float64(factor[i]) * size
        for k in range(len(row)):
            to[k] = np.float32((np.float64(row[k]) - less * np.float64(of_row[k])) * one)


def add_transposed(matrix: Matrix, other: Matrix, same: bool) -> None:
    """Add the transpose of ``other`` to ``matrix``, both ``[N, N]``; ``same``: they are the same matrix."""
    count = matrix.shape[0]
    for top in range(0, count, TILE):
        for left in range(top if same else 0, count, TILE):
            for i in range(top, min(top + TILE, count)):
                for j in range(max(left, i) if same else left, min(left + TILE, count)):
                    total = matrix[i, j] + other[j, i]
                    matrix[i, j] = total
                    if same:
                        matrix[j, i] = total


def lone(logits: Matrix, partners: Integers, itself: bool, weigh: bool) -> float:
    """Return the sum of the values of rows with one positive each; if ``weigh``, replace the logits by the weights.

    Args:
        logits: ``[N, M]``, overwritten.
        partners: ``[N]``, the column of each row's positive.
        itself: whether column i is row i, and left out.
        weigh: whether weights are needed.
    """
    total = 0.0
    for i in range(logits.shape[0]):
        row, partner = logits[i], partners[i]
        positive = row[partner]
        row[partner] = _LOWEST
        if itself:
            row[i] = _LOWEST
        top = _LOWEST
        for j in range(len(row)):
            top = max(top, row[j])
        if top == _LOWEST:  # no negatives
            row[:] = _ZERO
            continue
        neg = _ZERO
        for j in range(len(row)):
            part = _exp2(row[j] - top)
            row[j] = part
            neg += part
        value, missed, _ = _contrast((np.float64(top) - np.float64(positive)) * LN2 + math.log(neg))
        total += value
        if weigh:
            share = np.float32(missed / neg)
            for j in range(len(row)):
                part = row[j]
                row[j] = part * share if part >= _LEAST_PART else _ZERO
            row[partner] = np.float32(-missed)
    return total


def mutual(logits: Matrix, weigh: bool) -> float:
    """Return the sum of the values of the rows and the columns, whose only positive is the one with the same number.

    Sums of unshifted exponentials of the logits ``[N, N]``, and their quotients, must be normal numbers. If ``weigh``,
    the logits are replaced by the weights.
    """
    count, total = len(logits), 0.0
    pos, neg, across = np.empty(count, np.float32), np.empty(count, np.float32), np.zeros(count, np.float32)
    for i in range(count):
        row, some = logits[i], _ZERO
        for j in range(count):
            row[j] = _exp2(row[j])
        pos[i] = row[i]
        row[i] = _ZERO
        for j in range(count):
            some += row[j]
            across[j] += row[j]
        neg[i] = some
    for i in range(count):
        positive, negatives, of_column = np.float64(pos[i]), np.float64(neg[i]), np.float64(across[i])
        total += math.log1p(negatives / positive) + math.log1p(of_column / positive)
        one, other = 1 / (negatives + positive), 1 / (of_column + positive)
        neg[i], across[i], pos[i] = one, other, negatives * one + of_column * other
    if weigh:
        for i in range(count):
            row, one = logits[i], neg[i]
            for j in range(count):
                row[j] *= one + across[j]
            row[i] = -pos[i]
    return total


def marked(
    logits: Matrix,
    kind: int,
    given: Integers,
    columns: Integers,
    mask: Mask,
    itself: bool,
    inside: int,
    weigh: bool,
) -> float:
    """Return the sum of the values of rows with any number of positives; see `lone` and `_mark`.

    A row without positives has the value 0 and the weights 0. ``inside`` is one of `OUT`, `MEAN` and `SUM`.
    """
    mark, total = np.empty(logits.shape[1], np.float32), 0.0
    for i in range(logits.shape[0]):
        row = logits[i]
        _mark(mark, i, kind, given, columns, mask)
        if itself:
            mark[i] = _ZERO
            row[i] = _LOWEST
        top, top_negative, number = _LOWEST, _LOWEST, _ZERO
        for j in range(len(row)):
            logit, one = row[j], mark[j]
            number += one
            top = max(top, logit if one > _ZERO else _LOWEST)
            top_negative = max(top_negative, _LOWEST if one > _ZERO else logit)
        if number == _ZERO:
            row[:] = _ZERO
            continue
        if top_negative == _LOWEST:  # no negatives: the exponential of a left out column is still 0
            top_negative = _ZERO
        below, pos, neg = _ZERO, _ZERO, _ZERO
        for j in range(len(row)):
            one = mark[j]
            rise = row[j] - (top if one > _ZERO else top_negative)
            part = _exp2(rise)
            row[j] = part
            below += rise * one
            pos += part * one
            neg += part * (_ONE - one)
        value, missed, hit = 0.0, 0.0, 1.0
        if neg > _ZERO:
            odds = (np.float64(top_negative) - np.float64(top)) * LN2 + math.log(neg) - math.log(pos)
            value, missed, hit = _contrast(odds)
        if inside == OUT and number > _ONE:
            value += math.log(pos) - np.float64(below) / number * LN2
        elif inside == MEAN:
            value += math.log(number)
        total += value
        if not weigh:
            continue
        share = np.float32(missed / neg) if neg > _ZERO else _ZERO
        slope, level = _ZERO, np.float32(-missed)
        if inside != OUT:
            slope, level = np.float32(-missed / pos), _ZERO
        elif number > _ONE:
            slope, level = np.float32(hit / pos), -_ONE / number
        for j in range(len(row)):
            one, part = mark[j], row[j]
            part = part if part >= _LEAST_PART else _ZERO
            row[j] = part * (slope if one > _ZERO else share) + level * one
        if itself:
            row[i] = _ZERO
    return total


def crossed(
    logits: Matrix, kind: int, given: Integers, columns: Integers, mask: Mask, bias: float, weigh: bool
) -> tuple[float, float]:
    """Return the sum of the binary cross-entropies of all pairs, and its derivative with respect to the bias.

    The logits ``[N, M]`` without the ``bias`` are natural, and replaced by the weights if ``weigh``. For the other
    arguments, see `_mark`.
    """
    mark, total, slope, added = np.empty(logits.shape[1], np.float32), 0.0, 0.0, np.float32(bias)
    for i in range(logits.shape[0]):
        row, losses, weights = logits[i], _ZERO, _ZERO
        _mark(mark, i, kind, given, columns, mask)
        for j in range(len(row)):
            sign = _ONE - mark[j] - mark[j]
            x = (row[j] + added) * sign
            small = _exp2(-abs(x) * _LOG2E)
            # log(1 + u) = 2 atanh(u / (2 + u))
            part = small / (small + _TWO)
            square = part * part
            series = _A7 * square + _A6
            series = series * square + _A5
            series = series * square + _A4
            series = series * square + _A3
            series = series * square + _A2
            series = series * square + _A1
            series = series * square + _ONE
            losses += max(x, _ZERO) + (part + part) * series
            mark[j] = (_ONE if x > _ZERO else small) / (_ONE + small) * sign
        total += np.float64(losses)
        if weigh:
            for j in range(len(row)):
                row[j] = mark[j]
                weights += mark[j]
            slope += np.float64(weights)
    return total, slope


SIGNATURES: dict[str, str] = {
    "measure": "UniTuple(float64, 2)(float32[:, ::1], float64[:, ::1])",
    "are_mutual": "boolean(int64[::1])",
    "scale": "void(float32[:, ::1], float64[:, ::1], float64, float32[:, ::1], float32[::1])",
    "project": "void(float32[:, ::1], float32[:, ::1], float32[::1], float64, float32[:, ::1])",
    "add_transposed": "void(float32[:, ::1], float32[:, ::1], boolean)",
    "lone": "float64(float32[:, ::1], int64[::1], boolean, boolean)",
    "mutual": "float64(float32[:, ::1], boolean)",
    "marked": ("float64(float32[:, ::1], int64, int64[::1], int64[::1], boolean[:, ::1], boolean, int64, boolean)"),
    "crossed": (
        "UniTuple(float64, 2)(float32[:, ::1], int64, int64[::1], int64[::1], boolean[:, ::1], float64, boolean)"
    ),
}
"""The types of each function that `compiled` calls."""


def ready(name: str) -> Any:
    """Compile one function of `SIGNATURES`.

    Machine code is kept on disk, beside this file or in Numba's folder of the user, if one of them can be written to.
    """
    options = _SUMS if name == "measure" else _FINITE
    for cache in (True, True, False):
        function: Any = None
        try:
            function = numba.njit(cache=cache, **options)(globals()[name])
            if not numba.config.DISABLE_JIT:
                function.compile(SIGNATURES[name])
                function.disable_compile()
            break
        except Exception:  # no folder can be written to, or a file in it is damaged
            if not cache:
                raise
            with suppress(Exception):
                function._cache.flush()
    return function
