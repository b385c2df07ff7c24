"""Reverse-mode automatic differentiation with scalars of any type, for the gradient of the reference's loops.

A ``Var`` records the operation that computed it; ``gradient`` goes through the record backwards. With ``arb`` scalars
every entry of the gradient is a proved enclosure. At a kink, such as the maximum of two equal values, the branch that
the loops take is differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def _elementary(function: Callable[[Any], Any], slope: Callable[[Any, Any], Any]) -> Callable[[Var], Var]:
    """The method of ``Var`` for an elementary function y of x, with its derivative ``slope(x, y)``."""

    def apply(self: Var) -> Var:
        value = function(self.value)
        return self._of(value, slope(self.value, value))

    return apply


class Var:
    """A value, and its partial derivatives with respect to the variables from which it was computed."""

    __slots__ = ("index", "parents", "tape", "value")

    def __init__(self, value: Any, tape: list[Var], parents: tuple[tuple[Var, Any], ...] = ()) -> None:
        self.value = value
        self.tape = tape
        self.parents = parents
        self.index = len(tape)
        tape.append(self)

    def _of(self, value: Any, slope: Any, other: Any = None, other_slope: Any = None) -> Var:
        """A variable computed from this one and, if ``other`` is a ``Var``, from another one."""
        parents = ((self, slope), (other, other_slope)) if isinstance(other, Var) else ((self, slope),)
        return Var(value, self.tape, parents)

    def __add__(self, other: Any) -> Var:
        return self._of(self.value + value_of(other), 1, other, 1)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Var:
        return self._of(self.value - value_of(other), 1, other, -1)

    def __rsub__(self, other: Any) -> Var:
        return self._of(other - self.value, -1)

    def __mul__(self, other: Any) -> Var:
        return self._of(self.value * value_of(other), value_of(other), other, self.value)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Var:
        below = other.value if isinstance(other, Var) else self.value * 0 + other
        quotient = self.value / value_of(other)
        return self._of(quotient, 1 / below, other, -quotient / below)

    def __rtruediv__(self, other: Any) -> Var:
        quotient = other / self.value
        return self._of(quotient, -quotient / self.value)

    def __neg__(self) -> Var:
        return self._of(-self.value, -1)

    def __float__(self) -> float:
        return float(self.value)

    @property
    def real(self) -> Any:
        """The value, which the loops use in comparisons."""
        return self.value

    exp = _elementary(np.exp, lambda x, y: y)
    expm1 = _elementary(np.expm1, lambda x, y: np.exp(x))
    log = _elementary(np.log, lambda x, y: 1 / x)
    log1p = _elementary(np.log1p, lambda x, y: 1 / (1 + x))
    sqrt = _elementary(np.sqrt, lambda x, y: 1 / (2 * y))


def value_of(x: Any) -> Any:
    """The value of a variable; any other scalar as it is."""
    return x.value if isinstance(x, Var) else x


def variables(values: Sequence[Sequence[Any]]) -> list[list[Var]]:
    """Create independent variables [N][D] on one new tape."""
    tape: list[Var] = []
    return [[Var(x, tape) for x in row] for row in values]


def gradient(result: Any, inputs: Sequence[Sequence[Var]]) -> list[list[Any]]:
    """The derivatives [N][D] of ``result`` with respect to ``inputs``; zeros if it is not a ``Var``."""
    adjoints: dict[int, Any] = {result.index: 1} if isinstance(result, Var) else {}
    for node in reversed(result.tape[: result.index + 1]) if isinstance(result, Var) else ():
        adjoint = adjoints.get(node.index) if node.parents else None
        if adjoint is None:
            continue
        del adjoints[node.index]
        for parent, slope in node.parents:
            step = adjoint * slope
            adjoints[parent.index] = adjoints[parent.index] + step if parent.index in adjoints else step
    return [[adjoints.get(x.index, x.value * 0) for x in row] for row in inputs]
