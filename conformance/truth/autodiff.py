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

    def _of(self, value: Any, slope: Any, other: Any = None, other_slope: Any = None) -> Var:
        """What is made of this variable and, where it is one too, of another."""
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
        """The value itself, by which the loops compare."""
        return self.value

    def exp(self) -> Var:
        """e^x."""
        value = np.exp(self.value)
        return self._of(value, value)

    def expm1(self) -> Var:
        """e^x - 1."""
        return self._of(np.expm1(self.value), np.exp(self.value))

    def log(self) -> Var:
        """Natural logarithm."""
        return self._of(np.log(self.value), 1 / self.value)

    def log1p(self) -> Var:
        """log(1 + x)."""
        return self._of(np.log1p(self.value), 1 / (1 + self.value))

    def sqrt(self) -> Var:
        """Square root."""
        value = np.sqrt(self.value)
        return self._of(value, 1 / (2 * value))


def value_of(x: Any) -> Any:
    """The value of a variable; any other scalar as it is."""
    return x.value if isinstance(x, Var) else x


def variables(values: Sequence[Sequence[Any]]) -> list[list[Var]]:
    """Independent variables [N][D] on one new tape."""
    tape: list[Var] = []
    return [[Var(x, tape) for x in row] for row in values]


def gradient(result: Any, inputs: Sequence[Sequence[Var]]) -> list[list[Any]]:
    """The derivatives [N][D] of ``result`` by each of ``inputs``; zeros where it is no ``Var``."""
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
