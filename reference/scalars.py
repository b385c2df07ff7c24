"""Arithmetic that serves every number type: sums, means and logarithms that neither overflow nor cancel."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

Scalar = Any
"""A float, a complex, an array of either, or any object with the same arithmetic (a ball of ``python-flint``)."""

NAN = float("nan")
EMPTY = {"zero": 0.0, "nan": NAN}
"""The mean over nothing, by policy."""


def order(value: Scalar) -> float:
    """The real number by which values are compared: real part of a complex, midpoint of a ball, first of an array."""
    return float(np.ravel(np.real(value))[0])


def zero_like(value: Scalar) -> Scalar:
    """The number 0 of the value's type."""
    return 0.0 + value * 0


def total(values: Iterable[Scalar], start: Scalar = 0.0) -> Scalar:
    """The sum from left to right. Python's own ``sum`` rounds floats differently from one version to the next."""
    return functools.reduce(operator.add, values, start)


def mean(values: Sequence[Scalar], empty: str = "zero") -> Scalar:
    """The mean; over nothing 0, or NaN if ``empty`` is "nan"."""
    return total(values) / len(values) if values else EMPTY[empty]


def log_mean_exp(values: Sequence[Scalar], empty: str = "zero") -> Scalar:
    """The logarithm of the mean of e^v; over nothing 0, or NaN if ``empty`` is "nan".

    The exponentials are taken as differences from the largest, so that very small ones do not underflow and ones close
    to 1 do not round to 1.
    """
    top = max(values, key=order, default=0.0)
    return top + np.log1p(mean([np.expm1(v - top) for v in values], empty))


def largest(values: Sequence[Scalar]) -> int:
    """The position of the largest value (the first of equals)."""
    return max(range(len(values)), key=lambda k: order(values[k]))


def shifted_sum(logits: Sequence[Scalar]) -> tuple[Scalar, Scalar]:
    """The sum of e^s, as (shift, rest) with sum = e^shift (1 + rest).

    The largest logit is the shift. Its own exponential is the 1, and the rest is kept apart from it, so that log1p sees
    what a rounded sum would have lost: an anchor whose loss is 1e-30 keeps it.
    """
    top = largest(logits)
    rest = (np.exp(s - logits[top]) for k, s in enumerate(logits) if k != top)
    return logits[top], total(rest, start=zero_like(logits[top]))


def softplus(x: Scalar) -> Scalar:
    """log(1 + e^x), without overflow."""
    if order(x) > 0:
        return x + np.log1p(np.exp(-x))
    return np.log1p(np.exp(x))
