"""Cosine and dot-product similarity in loops."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .scalars import Scalar, order, total


def dot(a: Sequence[Scalar], b: Sequence[Scalar]) -> Scalar:
    """Return Σ_d a_d b_d."""
    return total(x * y for x, y in zip(a, b, strict=True))


def scaled_row(row: Sequence[Scalar]) -> list[Scalar]:
    """Return the row times a power of two, with its largest entry in [1/2, 1): exact, and squares stay in range."""
    exponent = math.frexp(max(abs(order(x)) for x in row))[1]
    half = exponent // 2
    return [x * 2.0**-half * 2.0 ** (half - exponent) for x in row]


def cosine(a: Sequence[Scalar], b: Sequence[Scalar]) -> Scalar:
    """Return Σ_d a_d b_d / (‖a‖ ‖b‖); the norms neither overflow nor underflow."""
    a, b = scaled_row(a), scaled_row(b)
    return dot(a, b) / (np.sqrt(dot(a, a)) * np.sqrt(dot(b, b)))


def similarity_matrix(
    rows: Sequence[Sequence[Scalar]], similarity: str, others: Sequence[Sequence[Scalar]] | None = None
) -> list[list[Scalar]]:
    """Return the similarity of every row with every row, [N][N], or with every row of ``others``, [N][M].

    Args:
        rows: [N][D] scalars.
        similarity: "cosine" or "dot".
        others: [M][D] scalars; ``rows`` by default.
    """
    measure = cosine if similarity == "cosine" else dot
    if others is not None:
        return [[measure(row, other) for other in others] for row in rows]
    n = len(rows)
    matrix: list[list[Scalar]] = [[None] * n for _ in range(n)]
    for i in range(n):
        for j in range(i, n):
            matrix[i][j] = matrix[j][i] = measure(rows[i], rows[j])
    return matrix
