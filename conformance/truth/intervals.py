"""Number types on which the loops run: balls with proved radii, and floating-point arithmetic seen as balls.

``ball`` makes an ``arb`` (a real interval of arbitrary precision) of a printed decimal, half a printed unit wide either
side. ``Rounded`` is arithmetic in float32 or float64 over such balls: every result is rounded as that format rounds it,
so that the outcome encloses whatever a program using the same operations in that format can print.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from functools import partialmethod
from typing import Any

import numpy as np

try:
    from flint import arb, ctx
except ImportError as error:  # pragma: no cover - the base install has no harness
    raise ImportError('the conformance harness needs python-flint: pip install "pairproof[verify]"') from error

PRECISION = 256
"""Bits of working precision: far more than the 53 of any figure, so that only the inputs' width remains."""


@contextmanager
def precision(bits: int = PRECISION) -> Iterator[None]:
    """Work with this many bits inside the block."""
    with ctx.workprec(bits):
        yield


def exact(text: str) -> arb:
    """The rational that a decimal text spells, to working precision."""
    sign, digits, exponent = Decimal(text).as_tuple()
    if not isinstance(exponent, int):
        raise ValueError(f"expected a finite decimal, got {text!r}")
    value = arb(int("".join(map(str, digits)))) * arb(10) ** exponent
    return -value if sign else value


def ball(text: str, decimals: int) -> arb:
    """All numbers that print as ``text`` with this many decimals: half a unit of the last place either side."""
    value, half = exact(text), arb(10) ** -decimals / 2
    return (value - half).union(value + half)


@dataclass(slots=True, eq=False)
class Rounded:
    """A real interval whose ends are numbers of a floating-point format, and the arithmetic of that format.

    ``+ - * /`` and ``sqrt`` round the exact result to nearest, as IEEE 754 demands; rounding is monotone, so rounding
    both ends encloses the rounded result. ``exp``, ``log`` and ``log1p`` are rounded likewise and then widened by
    ``slack`` units in the last place either side, because mathematical libraries differ there. With slack 0 and exact
    inputs the interval is a single number: the result of correctly rounded arithmetic. A logarithm of an interval
    that touches 0 is unbounded (NaN); of the number 0 itself it is -inf.
    """

    __array_ufunc__ = None
    lower: float
    upper: float
    dtype: type[np.floating[Any]]
    slack: int

    @classmethod
    def number(cls, value: float, dtype: type[np.floating[Any]], slack: int) -> Rounded:
        """One number of the format."""
        rounded = float(dtype(value))
        return cls(rounded, rounded, dtype, slack)

    @property
    def ball(self) -> arb:
        """The interval as a ball; NaN if it is unbounded."""
        if not self.is_bounded:
            return arb.nan()
        return arb(self.lower).union(arb(self.upper))

    @property
    def is_bounded(self) -> bool:
        """Whether both ends are finite numbers."""
        return math.isfinite(self.lower) and math.isfinite(self.upper)

    def __contains__(self, value: float) -> bool:
        return self.lower <= value <= self.upper

    def _apply(self, operation: Callable[..., Any], *others: Rounded | float, library: bool = False) -> Rounded:
        operands = [self, *(o if isinstance(o, Rounded) else Rounded.number(o, self.dtype, self.slack) for o in others)]
        if all(o.is_bounded for o in operands):
            value = operation(*(o.ball for o in operands))
            if value.is_finite():
                slack = self.slack if library else 0
                lower = _outward(value.lower(), self.dtype, -math.inf, slack)
                upper = _outward(value.upper(), self.dtype, math.inf, slack)
                return Rounded(lower, upper, self.dtype, self.slack)
        if all(o.lower == o.upper for o in operands):
            # Infinities, and the logarithm of 0: IEEE arithmetic says what these single numbers give.
            with np.errstate(all="ignore"):
                result = float(operation(*(self.dtype(o.lower) for o in operands)))
            return Rounded(result, result, self.dtype, self.slack)
        return Rounded(math.nan, math.nan, self.dtype, self.slack)

    __add__ = __radd__ = partialmethod(_apply, operator.add)
    __sub__ = partialmethod(_apply, operator.sub)
    __rsub__ = partialmethod(_apply, lambda a, b: b - a)
    __mul__ = __rmul__ = partialmethod(_apply, operator.mul)
    __truediv__ = partialmethod(_apply, operator.truediv)
    __rtruediv__ = partialmethod(_apply, lambda a, b: b / a)
    sqrt = partialmethod(_apply, np.sqrt)
    exp = partialmethod(_apply, np.exp, library=True)
    log = partialmethod(_apply, np.log, library=True)
    log1p = partialmethod(_apply, np.log1p, library=True)

    def __neg__(self) -> Rounded:
        return Rounded(-self.upper, -self.lower, self.dtype, self.slack)

    def __float__(self) -> float:
        return self.lower / 2 + self.upper / 2

    @property
    def real(self) -> Rounded:
        """The number itself: it is real."""
        return self

    def at_least(self, bound: float) -> Rounded:
        """The larger of the value and ``bound``, as a clamp computes it."""
        return Rounded(max(self.lower, bound), max(self.upper, bound), self.dtype, self.slack)


def _outward(end: arb, dtype: type[np.floating[Any]], towards: float, slack: int) -> float:
    """Round one end of an interval to the format, never inwards, and widen it by ``slack`` units."""
    once = float(end)
    if dtype is not np.float64 and once != end:
        # Rounding twice, to float64 and then to the format, may go the other way at a tie: so the first goes outwards.
        once = float(np.nextafter(once, towards))
    with np.errstate(over="ignore"):
        rounded = dtype(once)
        if np.isfinite(rounded):
            # What overflows by far overflows in every library.
            for _ in range(slack):
                rounded = np.nextafter(rounded, dtype(towards))
    return float(rounded)


def rounded_inputs(
    values: np.ndarray[Any, Any], dtype: type[np.floating[Any]], slack: int
) -> np.ndarray[Any, np.dtype[np.object_]]:
    """An array of the format's numbers as an object array of Rounded."""
    rounded = [Rounded.number(float(x), dtype, slack) for x in values.flat]
    return np.array(rounded, dtype=object).reshape(values.shape)
