"""Cosine and dot-product similarity in loops, and sums of exponentials that neither overflow nor cancel."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .terms import Scalar


def order(value: Scalar) -> float:
    """The real number by which values are compared: real part of a complex, midpoint of a ball, first of an array."""
    return float(np.ravel(np.real(value))[0])


def dot(a: Sequence[Scalar], b: Sequence[Scalar]) -> Scalar:
    """Sum over d of a_d b_d."""
    total = a[0] * b[0]
    for d in range(1, len(a)):
        total = total + a[d] * b[d]
    return total


def scaled_row(row: Sequence[Scalar]) -> list[Scalar]:
    """The row times the power of two that brings its largest entry to [1/2, 1): exact, so squares stay in range."""
    exponent = math.frexp(max(abs(order(x)) for x in row))[1]
    half = exponent // 2
    return [x * 2.0**-half * 2.0 ** (half - exponent) for x in row]


def cosine(a: Sequence[Scalar], b: Sequence[Scalar]) -> Scalar:
    """Sum over d of a_d b_d, divided by both norms; the norms neither overflow nor underflow."""
    a, b = scaled_row(a), scaled_row(b)
    return dot(a, b) / (np.sqrt(dot(a, a)) * np.sqrt(dot(b, b)))


def similarity_matrix(
    rows: Sequence[Sequence[Scalar]], similarity: str, others: Sequence[Sequence[Scalar]] | None = None
) -> list[list[Scalar]]:
    """[N][N] similarities of every row with every row, or [N][M] of every row with every other one.

    Args:
        rows: [N][D] scalars.
        similarity: "cosine" or "dot".
        others: [M][D] scalars; the rows themselves by default.
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


def largest(logits: Sequence[Scalar]) -> int:
    """The position of the largest value (the first of equals)."""
    return max(range(len(logits)), key=lambda k: order(logits[k]))


def shifted_sum(logits: Sequence[Scalar]) -> tuple[Scalar, Scalar]:
    """The sum of e^s, as (shift, rest) with sum = e^shift (1 + rest).

    The largest logit is the shift; its own exponential is the 1, and the rest is kept apart from it, so that log1p
    sees what a rounded sum would have lost: an anchor whose loss is 1e-30 keeps it.
    """
    top = largest(logits)
    rest = logits[top] * 0
    for k, s in enumerate(logits):
        if k != top:
            rest = rest + np.exp(s - logits[top])
    return logits[top], rest


def softplus(x: Scalar) -> Scalar:
    """log(1 + e^x), without overflow."""
    if order(x) > 0:
        return x + np.log1p(np.exp(-x))
    return np.log1p(np.exp(x))
