"""Sums, means and logarithms for all number types, without overflow or cancellation."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

Scalar = Any
"""A float, a complex number, an array of either, or an object with the same arithmetic (a ball of ``python-flint``)."""

NAN = float("nan")
EMPTY = {"zero": 0.0, "nan": NAN}
"""The mean of an empty set under the options "zero" and "nan"."""


def order(value: Scalar) -> float:
    """Return a float for comparisons: the real part, the midpoint of a ball, or the first entry of an array."""
    if isinstance(value, float):
        return value
    return float((value.item(0) if isinstance(value, np.ndarray) else value).real)


def detached(value: Scalar) -> Scalar:
    """Return the value without its derivative.

    The imaginary part of a complex number is its derivative. For variables of automatic differentiation, ``real`` is
    the value.
    """
    return value.real


def zero_like(value: Scalar) -> Scalar:
    """Return 0 in the type of the value."""
    return 0.0 + value * 0


def total(values: Iterable[Scalar], start: Scalar = None) -> Scalar:
    """Return the sum of ``start`` (by default nothing) and the values, added from left to right; 0 if it is empty.

    The rounding of ``sum`` depends on the version of Python.
    """
    items = iter(values)
    return functools.reduce(operator.add, items, next(items, 0.0) if start is None else start)


def mean(values: Sequence[Scalar], empty: str = "zero") -> Scalar:
    """Return the mean; for an empty sequence 0, or NaN if ``empty`` is "nan"."""
    return total(values) / len(values) if values else EMPTY[empty]


def log_mean_exp(values: Sequence[Scalar], empty: str = "zero") -> Scalar:
    """Return the logarithm of the mean of e^v; for an empty sequence 0, or NaN if ``empty`` is "nan".

    The result is accurate even if all exponentials are tiny, or nearly equal.
    """
    top = max(values, key=order, default=0.0)
    return top + np.log1p(mean([np.expm1(v - top) for v in values], empty))


def log_sum_exp(values: Sequence[Scalar], empty: str = "zero") -> Scalar:
    """Return the logarithm of the sum of e^v; for an empty sequence 0, or NaN if ``empty`` is "nan"."""
    if not values:
        return EMPTY[empty]
    top, rest = shifted_sum(values)
    return top + np.log1p(rest)


def largest(values: Sequence[Scalar]) -> int:
    """Return the position of the largest value, or of the first one on a tie."""
    return max(range(len(values)), key=lambda k: order(values[k]))


def shifted_sum(logits: Sequence[Scalar]) -> tuple[Scalar, Scalar]:
    """Return (shift, rest) with Σ e^s = e^shift (1 + rest), where shift is the largest logit.

    log1p(rest) has digits that 1 + rest would lose. For example, a loss of 1e-30 is not rounded to 0.
    """
    top = largest(logits)
    rest = (np.exp(s - logits[top]) for k, s in enumerate(logits) if k != top)
    return logits[top], total(rest, start=zero_like(logits[top]))


def softplus(x: Scalar) -> Scalar:
    """Return log(1 + e^x), without overflow."""
    if order(x) > 0:
        return x + np.log1p(np.exp(-x))
    return np.log1p(np.exp(x))
