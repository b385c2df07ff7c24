"""Reverse-mode differentiation over any scalar: the gradient of the reference's own loops, over balls if need be.

A ``Var`` records what it was made of; ``gradient`` walks the record backwards. Over ``arb`` every entry comes with a
proved enclosure. Kinks (the larger of two equal values) are not seen: the branch taken is differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class Var:
    """A value and the partial derivatives by which it hangs on earlier ones."""

    __slots__ = ("index", "parents", "tape", "value")

    def __init__(self, value: Any, tape: list[Var], parents: tuple[tuple[Var, Any], ...] = ()) -> None:
        self.value = value
        self.tape = tape
        self.parents = parents
        self.index = len(tape)
        tape.append(self)

    def _unary(self, value: Any, slope: Any) -> Var:
        return Var(value, self.tape, ((self, slope),))

    def __add__(self, other: Any) -> Var:
        if isinstance(other, Var):
            return Var(self.value + other.value, self.tape, ((self, 1), (other, 1)))
        return self._unary(self.value + other, 1)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Var:
        if isinstance(other, Var):
            return Var(self.value - other.value, self.tape, ((self, 1), (other, -1)))
        return self._unary(self.value - other, 1)

    def __rsub__(self, other: Any) -> Var:
        return self._unary(other - self.value, -1)

    def __mul__(self, other: Any) -> Var:
        if isinstance(other, Var):
            return Var(self.value * other.value, self.tape, ((self, other.value), (other, self.value)))
        return self._unary(self.value * other, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Var:
        if isinstance(other, Var):
            quotient = self.value / other.value
            return Var(quotient, self.tape, ((self, 1 / other.value), (other, -quotient / other.value)))
        return self._unary(self.value / other, 1 / (self.value * 0 + other))

    def __rtruediv__(self, other: Any) -> Var:
        quotient = other / self.value
        return self._unary(quotient, -quotient / self.value)

    def __neg__(self) -> Var:
        return self._unary(-self.value, -1)

    def __float__(self) -> float:
        return float(self.value)

    @property
    def real(self) -> Any:
        """The value itself, by which the loops compare."""
        return self.value

    def exp(self) -> Var:
        """e^x."""
        value = np.exp(self.value)
        return self._unary(value, value)

    def expm1(self) -> Var:
        """e^x - 1."""
        return self._unary(np.expm1(self.value), np.exp(self.value))

    def log(self) -> Var:
        """Natural logarithm."""
        return self._unary(np.log(self.value), 1 / self.value)

    def log1p(self) -> Var:
        """log(1 + x)."""
        return self._unary(np.log1p(self.value), 1 / (1 + self.value))

    def sqrt(self) -> Var:
        """Square root."""
        value = np.sqrt(self.value)
        return self._unary(value, 1 / (2 * value))


def variables(values: Sequence[Sequence[Any]]) -> list[list[Var]]:
    """Independent variables [N][D] on one new tape."""
    tape: list[Var] = []
    return [[Var(x, tape) for x in row] for row in values]


def gradient(result: Var, inputs: Sequence[Sequence[Var]]) -> list[list[Any]]:
    """The derivatives [N][D] of ``result`` by each of ``inputs``."""
    adjoints: dict[int, Any] = {result.index: 1}
    for node in reversed(result.tape[: result.index + 1]):
        adjoint = adjoints.get(node.index) if node.parents else None
        if adjoint is None:
            continue
        del adjoints[node.index]
        for parent, slope in node.parents:
            step = adjoint * slope
            adjoints[parent.index] = adjoints[parent.index] + step if parent.index in adjoints else step
    return [[adjoints.get(x.index, x.value * 0) for x in row] for row in inputs]
