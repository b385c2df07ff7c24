"""Cosine and dot-product similarity in loops."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .scalars import Scalar, order, total, zero_like


def dot(a: Sequence[Scalar], b: Sequence[Scalar]) -> Scalar:
    """Return Σ_d a_d b_d."""
    return total(x * y for x, y in zip(a, b, strict=True))


def scaled_row(row: Sequence[Scalar]) -> list[Scalar]:
    """Return the row times a power of two, so that its largest magnitude is in [1/2, 1).

    Scaling is exact, except that entries far below the largest may underflow. There are two factors, because a single
    power of two could overflow.
    """
    exponent = math.frexp(max(abs(order(x)) for x in row))[1]
    half = exponent // 2
    for factor in (2.0**-half, 2.0 ** (half - exponent)):
        row = row if factor == 1 else [x * factor for x in row]
    return list(row)


def norm(row: Sequence[Scalar]) -> Scalar:
    """Return ‖a‖ = sqrt(Σ_d a_d²)."""
    return np.sqrt(dot(row, row))


def norm_or_one(row: Sequence[Scalar]) -> Scalar:
    """Return ‖a‖, or 1 for a row of zeros, so that its cosines are 0."""
    return norm(row) if any(np.any(x != 0) for x in row) else zero_like(row[0]) + 1


def similarity_matrix(
    rows: Sequence[Sequence[Scalar]], similarity: str, others: Sequence[Sequence[Scalar]] | None = None
) -> list[list[Scalar]]:
    """Return the similarity of every row a with every row b, [N][N], or with every row b of ``others``, [N][M].

    The cosine is Σ_d a_d b_d / (‖a‖ ‖b‖), or 0 if a or b is a row of zeros. The dot product is Σ_d a_d b_d.

    Args:
        rows: [N][D] scalars.
        similarity: "cosine" or "dot".
        others: [M][D] scalars; ``rows`` by default.
    """
    columns = rows if others is None else others
    if similarity == "cosine":
        # Scaling does not change cosines, but keeps the norms from overflow and underflow.
        rows, columns = list(map(scaled_row, rows)), list(map(scaled_row, columns))
        row_norms, column_norms = list(map(norm_or_one, rows)), list(map(norm_or_one, columns))

    def measure(i: int, j: int) -> Scalar:
        product = dot(rows[i], columns[j])
        return product / (row_norms[i] * column_norms[j]) if similarity == "cosine" else product

    matrix: list[list[Scalar]] = [[None] * len(columns) for _ in rows]
    for i, row in enumerate(matrix):
        for j in range(0 if others is not None else i, len(columns)):
            row[j] = measure(i, j)
            if others is None:
                matrix[j][i] = row[j]
    return matrix
