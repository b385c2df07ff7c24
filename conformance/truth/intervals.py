"""Interval arithmetic: balls of arbitrary precision, and floating-point arithmetic on intervals.

A ball (``arb``) is a real interval of arbitrary precision. ``Rounded`` is float32 or float64 arithmetic on intervals: a
result encloses all results of programs with the same operations in that dtype.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, cast

import numpy as np

from pairproof import install_command

try:
    from flint import arb, ctx
except ImportError as error:  # pragma: no cover - the base install has no harness
    raise ImportError(f"the conformance harness needs python-flint: {install_command('verify')}") from error

PRECISION = 256
"""Working precision in bits, so high that the width of a result is due only to the width of the inputs."""


class CertificationError(ValueError):
    """A result cannot be proved. The message names the case and the entry."""


def precision(bits: int = PRECISION) -> AbstractContextManager[None]:
    """A context manager that sets the working precision."""
    return cast("AbstractContextManager[None]", ctx.workprec(bits))


def exact(text: str) -> arb:
    """Convert a decimal text to a ball, to working precision. Raises a ValueError if it is not finite."""
    sign, digits, exponent = Decimal(text).as_tuple()
    if not isinstance(exponent, int):
        raise ValueError(f"expected a finite decimal, got {text!r}")
    value = arb(int("".join(map(str, digits)))) * arb(10) ** exponent
    return -value if sign else value


def ball(text: str, decimals: int) -> arb:
    """The ball of all numbers that round to ``text``, which has this many decimals."""
    value, half = exact(text), arb(10) ** -decimals / 2
    return (value - half).union(value + half)


def _operation(operation: Callable[..., Any], library: bool = False) -> Callable[..., Rounded]:
    """The method of ``Rounded`` for an operation. If ``library``, its result is widened by the slack."""

    def apply(self: Rounded, *others: Rounded | float) -> Rounded:
        operands = [self, *(o if isinstance(o, Rounded) else Rounded.number(o, self.dtype, self.slack) for o in others)]
        if all(o.is_bounded for o in operands):
            value = operation(*(o.ball for o in operands))
            if value.is_finite():
                slack = self.slack if library else 0
                lower = _outward(value.lower(), self.dtype, -math.inf, slack)
                upper = _outward(value.upper(), self.dtype, math.inf, slack)
                return Rounded(lower, upper, self.dtype, self.slack)
        if all(o.lower == o.upper for o in operands):
            # For single numbers, IEEE 754 defines the result at infinity, and the logarithm of 0.
            with np.errstate(all="ignore"):
                result = float(operation(*(self.dtype(o.lower) for o in operands)))
            return Rounded(result, result, self.dtype, self.slack)
        return Rounded(math.nan, math.nan, self.dtype, self.slack)

    return apply


@dataclass(slots=True, eq=False)
class Rounded:
    """A real interval whose ends are floating-point numbers of a dtype, with the arithmetic of that dtype.

    ``+ - * /`` and ``sqrt`` round to nearest, as IEEE 754 requires. Rounding is monotone, so the rounded ends enclose
    the rounded result. ``exp``, ``log`` and ``log1p`` also widen their result by ``slack`` units in the last place on
    either side, because mathematical libraries differ. With slack 0 and exact inputs, the interval is a single number,
    the correctly rounded result.

    The logarithm of an interval that contains 0 is unbounded (NaN). The logarithm of the number 0 is -inf.

    Attributes:
        lower: the lower end.
        upper: the upper end.
        dtype: the floating-point dtype.
        slack: units in the last place by which ``exp``, ``log`` and ``log1p`` are widened.
    """

    __array_ufunc__ = None
    lower: float
    upper: float
    dtype: type[np.floating[Any]]
    slack: int

    @classmethod
    def number(cls, value: float, dtype: type[np.floating[Any]], slack: int) -> Rounded:
        """A single number, rounded to the dtype."""
        rounded = float(dtype(value))
        return cls(rounded, rounded, dtype, slack)

    @property
    def ball(self) -> arb:
        """The interval as a ball, or NaN if it is unbounded."""
        return arb(self.lower).union(arb(self.upper)) if self.is_bounded else arb.nan()

    @property
    def is_bounded(self) -> bool:
        """Whether both ends are finite numbers."""
        return math.isfinite(self.lower) and math.isfinite(self.upper)

    def __contains__(self, value: float) -> bool:
        return self.lower <= value <= self.upper

    __add__ = __radd__ = _operation(operator.add)
    __sub__ = _operation(operator.sub)
    __rsub__ = _operation(lambda a, b: b - a)
    __mul__ = __rmul__ = _operation(operator.mul)
    __truediv__ = _operation(operator.truediv)
    __rtruediv__ = _operation(lambda a, b: b / a)
    sqrt = _operation(np.sqrt)
    exp = _operation(np.exp, library=True)
    log = _operation(np.log, library=True)
    log1p = _operation(np.log1p, library=True)

    def __neg__(self) -> Rounded:
        return Rounded(-self.upper, -self.lower, self.dtype, self.slack)

    def __float__(self) -> float:
        return self.lower / 2 + self.upper / 2

    @property
    def real(self) -> Rounded:
        """The interval itself, as for any real number."""
        return self

    def at_least(self, bound: float) -> Rounded:
        """The maximum of the value and ``bound``."""
        return Rounded(max(self.lower, bound), max(self.upper, bound), self.dtype, self.slack)


def _outward(end: arb, dtype: type[np.floating[Any]], towards: float, slack: int) -> float:
    """Round one end of an interval to the dtype, and move it outwards by ``slack`` units in the last place."""
    once = float(end)
    if dtype is not np.float64 and once != end:
        # Rounding twice, to float64 and to the dtype, may round a tie inwards. So the first rounding is outwards.
        once = float(np.nextafter(once, towards))
    with np.errstate(over="ignore"):
        rounded = dtype(once)
        # A result that overflows in correctly rounded arithmetic overflows in every library.
        for _ in range(slack if np.isfinite(rounded) else 0):
            rounded = np.nextafter(rounded, dtype(towards))
    return float(rounded)
