"""The truth of a case: its results, rounded to float64 from narrow enclosures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
from flint import arb

from ..suite.cases import SIGNIFICAND, Case, once_for_similarities, reference_of_similarities, row_norms
from ..suite.records import Expected, Matrix, Truth
from . import autodiff as tape
from . import loops, matrices
from .intervals import PRECISION, CertificationError, precision
from .matrices import Enclosures

PROVE_UP_TO = 40
"""The largest ``Case.size``, and number of columns, that :func:`truth` proves with the loops of the reference.

Larger cases are proved with matrices, if ``matrices.py`` has the formula of their loss."""

NARROW = 2.0**-100
"""Largest radius of a result that :func:`truth` returns, relative to the size of the terms it is computed from."""

DIGITS = 2.0**-66
"""Largest radius of an anchor's value, relative to it: errors of a tiny value are judged relative to the value."""

TINIEST = 1e-300
"""Radius below which the value of an anchor is narrow in any case."""

MOST_BITS = 4096
"""Largest precision that :func:`truth` tries."""


def truth(
    case: Case, bits: int | None = None, upstream: Sequence[float] | None = None, *, by_loops: bool = True
) -> Truth:
    """Compute the truth of a case: values, similarities, gradients, and the sensitivity to each similarity.

    The precision is raised until every enclosure is narrow. The results are the midpoints.

    Args:
        case: the case.
        bits: the first precision that is tried, in bits.
        upstream: for reduction "none", the factor of each value in the sum that is differentiated; by default 1.
        by_loops: whether small cases are proved with the loops of the reference. Matrices are faster.

    Raises:
        CertificationError: an enclosure is wide even with ``MOST_BITS`` bits. The message names the result.
    """
    large = max(case.size, case.embeddings.shape[1]) > PROVE_UP_TO
    by = matrices if (large or not by_loops) and matrices.has_formula(case) else loops
    bits = bits or (matrices.BITS if large and by is matrices else PRECISION)
    found = by.enclosures(case, bits, upstream=upstream)
    while wide := _first_wide(case, found):
        if bits >= MOST_BITS:
            raise CertificationError(f"{case.id}: {wide} cannot be proved with {bits} bits")
        bits = min(4 * bits, MOST_BITS)
        found = by.enclosures(case, bits, upstream=upstream)
    with precision(bits):
        loss = tuple(float(v) for v in found.values)
        defined = not any(map(math.isnan, loss))
        gradients = {name: _rounded(rows) for name, rows in found.gradients.items()} if defined else {}
        return Truth(
            loss=loss if case.separate else loss[0],
            anchors={i: float(v) for i, v in found.anchors.items()},
            gradient=gradients.pop(case.first, None),
            similarities=partial(np.asarray, _rounded(found.similarity)),
            sensitivity=partial(_finite, _slopes(case, found)),
            other_gradients=gradients,
            temperature_gradient=float(found.temperature_gradient) if defined else None,
            bias_gradient=float(found.bias_gradient) if defined and "bias" in case.entry.keywords else None,
        )


def _first_wide(case: Case, found: Enclosures) -> str | None:
    """Return the name of the first result whose enclosure is too wide, or None if all are narrow."""

    def is_wide(value: arb, size: float) -> bool:
        return not (value.is_finite() and float(value.rad()) <= NARROW * max(size, abs(float(value))))

    counted, undefined = case.counted(), case.undefined()
    scale = case.temperature / (case.option("base_temperature") or case.temperature)

    def loses_digits(value: arb) -> bool:
        return float(value.rad()) > max(DIGITS * abs(float(value)), TINIEST)

    anchors = ((i, found.anchors[i]) for i in counted if i not in undefined)
    wide = (i for i, value in anchors if is_wide(value, scale) or loses_digits(value))
    if (anchor := next(wide, None)) is not None:
        return f"the value of anchor {anchor}"
    if any(case.undefined_values()):
        return None
    if any(is_wide(value, scale) for value in found.values):
        return "the loss"
    norms = {name: row_norms(matrix).tolist() for name, matrix in case.matrices.items()}
    cosine, longest = case.option("similarity") == "cosine", max(map(max, norms.values()))
    for name, rows in found.gradients.items():
        for i, (row, norm) in enumerate(zip(rows, norms[name], strict=True)):
            # An entry is a sum of entries of rows times weights of at most scale / temperature.
            size = scale / case.temperature * (1 / (norm or 1.0) if cosine else longest)
            if all(float(x.rad()) <= NARROW * size for x in row):  # the radius of NaN is infinite
                continue
            size = max(size, *(abs(float(x)) for x in row))
            if any(is_wide(x, size) for x in row):
                return f"row {i} of the gradient with respect to {name}"
    return None


def stored_truth(case: Case, expected: Expected) -> Truth:
    """The truth of a golden case, from its stored and proved results. A ``Truth`` is returned as it is."""
    if isinstance(expected, Truth):
        return expected
    if expected.products:
        from .baseline import plain_outcome  # imports torch, which not every command needs

        plain = plain_outcome(case, "float64")
        assert expected.gradient is not None
        assert plain.gradient is not None
        others = {
            name: _completed(matrix, plain.other_gradients[name]) for name, matrix in expected.other_gradients.items()
        }
        expected = replace(expected, gradient=_completed(expected.gradient, plain.gradient), other_gradients=others)
    return Truth(**vars(expected), similarities=partial(similarity_of, case), sensitivity=partial(sensitivity_of, case))


def _completed(matrix: Matrix, other: Matrix) -> Matrix:
    """A gradient in which the rows that are not stored are those of ``other``."""
    return np.where(np.isnan(matrix), other, matrix)


@once_for_similarities
def similarity_of(case: Case) -> Matrix | None:
    """The true similarities, as a read-only matrix.

    None for cases larger than ``PROVE_UP_TO``, because no check of a large case needs them.
    """
    if case.size > PROVE_UP_TO:
        return None
    with precision():
        found = _rounded(matrices.similarities(case))
    found.setflags(write=False)
    return found


@lru_cache(maxsize=1024)  # several dtypes and tests use the same case
def sensitivity_of(case: Case) -> Matrix:
    """The derivative of the loss with respect to each similarity, as a read-only matrix.

    For cases larger than ``PROVE_UP_TO``, it is that of the straightforward implementation, because no check of a
    large case needs its last digits.
    """
    if case.size > PROVE_UP_TO:
        from .baseline import plain_weights  # imports torch, which not every command needs

        return _finite(plain_weights(case))
    return _finite(_weights(case) if matrices.has_formula(case) else _weights_by_loops(case))


def _weights(case: Case) -> Matrix:
    """The derivative of the loss with respect to each similarity, with as many bits as its digits need."""
    bits = matrices.BITS
    found = matrices.enclosures(case, bits)
    while bits < MOST_BITS and not all(is_exact(x) for row in found.slopes.values() for x in row):
        bits *= 4
        found = matrices.enclosures(case, bits)
    return _slopes(case, found)


def _slopes(case: Case, found: Enclosures) -> Matrix:
    """The derivatives with respect to each similarity, as numbers."""
    slopes = np.zeros(case.shape)
    for i, row in found.slopes.items():
        slopes[i] = [float(x) for x in row]
    return slopes


def _weights_by_loops(case: Case) -> Matrix:
    """The derivative of the loss with respect to each similarity, for a loss that ``matrices.py`` does not have."""
    similarity = similarity_of(case)
    assert similarity is not None
    with precision(), np.errstate(all="ignore"):
        variables = tape.variables(similarity.tolist())
        loss = reference_of_similarities(case, variables).loss
        return _rounded(tape.gradient(sum(loss) if isinstance(loss, list) else loss, variables))


def is_exact(value: arb) -> bool:
    """Whether a ball has the digits of a float64, or rounds to 0."""
    return value.is_zero() or value.rel_accuracy_bits() >= SIGNIFICAND["float64"] or float(value.abs_upper()) == 0.0


def _finite(matrix: Matrix) -> Matrix:
    """Replace entries that are not finite by 0. The result is read-only."""
    found = np.where(np.isfinite(matrix), matrix, 0.0)
    found.setflags(write=False)
    return found


def _rounded(rows: Sequence[Sequence[Any]]) -> Matrix:
    return np.array([[float(x) for x in row] for row in rows])
