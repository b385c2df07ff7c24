"""Reverse-mode automatic differentiation of the reference, with scalars of any type.

A ``Var`` records the operation that computed it, and ``gradient`` traverses the record backwards. If the scalars are
balls (``arb``), every entry of the gradient is a proved enclosure. At a kink, such as the maximum of two equal values,
the branch that the reference takes is differentiated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def _elementary(function: Callable[[Any], Any], slope: Callable[[Any, Any], Any]) -> Callable[[Var], Var]:
    """The method of ``Var`` for y = function(x), whose derivative is ``slope(x, y)``."""

    def apply(self: Var) -> Var:
        x = self.value
        y = function(x)
        return Var(y, (self,), lambda: (slope(x, y),))

    return apply


_INDICES = itertools.count()
"""The index of the next variable."""


class Var:
    """A value, and the operation that computed it from other variables.

    It refers only to its parents, so that unused terms are freed.

    Attributes:
        value: the value.
        index: its place in the order of computation.
        parents: the variables from which it was computed.
        slopes: the partial derivative with respect to each parent, or a function that returns them.
    """

    __slots__ = ("index", "parents", "slopes", "value")

    def __init__(self, value: Any, parents: tuple[Var, ...] = (), slopes: Any = ()) -> None:
        self.value = value
        self.parents = parents
        self.slopes = slopes
        self.index = next(_INDICES)

    def __add__(self, other: Any) -> Var:
        if isinstance(other, Var):
            return Var(self.value + other.value, (self, other), (1, 1))
        return Var(self.value + other, (self,), (1,))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Var:
        if isinstance(other, Var):
            return Var(self.value - other.value, (self, other), (1, -1))
        return Var(self.value - other, (self,), (1,))

    def __rsub__(self, other: Any) -> Var:
        return Var(other - self.value, (self,), (-1,))

    def __mul__(self, other: Any) -> Var:
        if isinstance(other, Var):
            return Var(self.value * other.value, (self, other), (other.value, self.value))
        return Var(self.value * other, (self,), (other,))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Var:
        if isinstance(other, Var):
            quotient, below = self.value / other.value, other.value
            return Var(quotient, (self, other), lambda: (1 / below, -quotient / below))
        zero = type(self.value)(0)
        # zero + other has the type of the value, so the derivative is as exact as the value.
        return Var(self.value / other, (self,), lambda: (1 / (zero + other),))

    def __rtruediv__(self, other: Any) -> Var:
        value = self.value
        quotient = other / value
        return Var(quotient, (self,), lambda: (-quotient / value,))

    def __neg__(self) -> Var:
        return Var(-self.value, (self,), (-1,))

    def __float__(self) -> float:
        return float(self.value)

    @property
    def real(self) -> Any:
        """The value, which the reference uses in comparisons."""
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
    """Create independent variables [N][D]."""
    return [[Var(x) for x in row] for row in values]


def gradient(result: Any, inputs: Sequence[Sequence[Var]]) -> list[list[Any]]:
    """The derivatives [N][D] of ``result`` with respect to ``inputs``."""
    nodes: dict[int, Var] = {}
    reached = [result] if isinstance(result, Var) else []
    while reached:
        node = reached.pop()
        if node.index not in nodes:
            nodes[node.index] = node
            reached += node.parents
    adjoints: dict[int, Any] = dict.fromkeys([result.index], 1) if nodes else {}
    for index in sorted(nodes, reverse=True):
        node = nodes[index]
        if not node.parents:
            continue
        adjoint = adjoints.pop(index)
        slopes = node.slopes() if callable(node.slopes) else node.slopes
        for parent, slope in zip(node.parents, slopes, strict=True):
            step = adjoint * slope
            adjoints[parent.index] = adjoints[parent.index] + step if parent.index in adjoints else step
    return [[adjoints.get(x.index, x.value * 0) for x in row] for row in inputs]
