"""Records: the expected results of a case, the results of an implementation, and the bounds on their difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from pairproof.reference import Terms

Matrix = npt.NDArray[np.float64]

NAN_LOSS = "the loss is NaN"
TIE = "the two largest entries of a row are equal: the loss has a kink there"
FLOOR = "the mass of an anchor's negatives is equal to its floor: the loss has a kink there"
BY_CHOICE = "by choice: the batch is large"
LEFT_OUT = (NAN_LOSS, TIE, FLOOR, BY_CHOICE)
"""Every reason for leaving out a gradient."""


@dataclass(frozen=True, eq=False)
class Expected:
    """The expected results of a case, each the float64 nearest to the true value.

    If the loss has several values, derivatives are those of their sum.

    Attributes:
        loss: the value. For reduction "none", one value per counted anchor (``Case.counted``); for "none_pairs", one
            value per pair.
        anchors: the value of every counted anchor, by row.
        gradient: [N, D], the gradient with respect to the embeddings, or None.
        gradient_left_out: why there is no gradient, or None.
        other_gradients: the gradients with respect to the other matrices, by name; empty without ``gradient``.
        temperature_gradient: the derivative with respect to the temperature; None without ``gradient``.
        bias_gradient: the derivative with respect to the bias; None without ``gradient`` or without a bias.
        products: for each large gradient of which only some rows are stored, by name: [2, D], the products of the whole
            gradient with ``formulas.factors``. The other rows of this gradient are NaN, and ``anchors`` has only some
            anchors.
    """

    loss: float | tuple[float, ...]
    anchors: dict[int, float]
    gradient: Matrix | None
    gradient_left_out: str | None = None
    other_gradients: Mapping[str, Matrix] = field(default_factory=dict)
    temperature_gradient: float | None = None
    bias_gradient: float | None = None
    products: Mapping[str, Matrix] = field(default_factory=dict)

    @property
    def values(self) -> tuple[float, ...]:
        """The loss as a tuple."""
        return self.loss if isinstance(self.loss, tuple) else (self.loss,)


@dataclass(frozen=True, eq=False, kw_only=True)
class Truth(Expected):
    """The expected results of a case, and its sensitivity to rounding errors.

    The rows of a gradient that are not stored (see ``products``) are those of the straightforward implementation.

    Attributes:
        similarities: computes ``similarity``, which only checks of the reference need.
        sensitivity: computes ``weights``, which few checks need.
    """

    similarities: Callable[[], Matrix | None]
    sensitivity: Callable[[], Matrix]

    @cached_property
    def similarity(self) -> Matrix | None:
        """The similarity matrix, of the case's ``shape``; None for large batches."""
        return self.similarities()

    @cached_property
    def weights(self) -> Matrix:
        """The derivative of the loss with respect to each similarity, of the case's ``shape``.

        s_ij and s_ji are separate entries.
        """
        return self.sensitivity()


@dataclass(frozen=True)
class Outcome:
    """The results of an implementation on a case.

    Attributes:
        values: the loss. For reduction "none", one value per counted anchor; for "none_pairs", one value per pair.
        gradient: [N, D], the gradient of the sum of ``values`` with respect to the embeddings; None if unavailable.
        anchors: the value of every anchor by row, if the implementation reports them.
        terms: the terms, if the implementation is the reference.
        other_gradients: the gradients with respect to the other matrices, by name; empty without ``gradient``.
        observed: side effects and further results of a user's loss, as JSON data; see ``implementations.usages``. The
            gradients of the matrices in "frozen" are zero, as claimed.
    """

    values: list[float]
    gradient: Matrix | None = None
    anchors: dict[int, float] | None = None
    terms: Terms | None = None
    other_gradients: Mapping[str, Matrix] = field(default_factory=dict)
    observed: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Rounding:
    """Bounds on the rounding errors of the straightforward evaluation of a case, in one dtype.

    Attributes:
        values: [V], for each value of the loss.
        anchors: for the value of each anchor that counts, by row.
        rows: for every matrix, the embeddings first: for the Euclidean norm of each row of its gradient.
        linear: whether the errors are proportional to the unit roundoff of the dtype.
    """

    values: Matrix
    anchors: Mapping[int, float]
    rows: Mapping[str, Matrix]
    linear: bool = True


@dataclass(frozen=True)
class Bounds:
    """Bounds on the error of each quantity: one number per value, anchor and row of a gradient.

    Attributes:
        values: bounds on the error of each value of the loss.
        anchors: bounds on the error of each anchor's value, by row.
        rows: for every matrix, the embeddings first: bounds on the Euclidean norm of the error of each row of its
            gradient.
        similarity: computes bounds on the error of each similarity, of the case's ``shape``, which few checks need.
    """

    values: list[float]
    anchors: dict[int, float]
    rows: Mapping[str, Matrix]
    similarity: Callable[[], Matrix]

    def gradients(self, result: Expected | Outcome) -> dict[str, Matrix]:
        """The gradients of a result by the names of ``rows``; empty if it has none."""
        return {} if result.gradient is None else {next(iter(self.rows)): result.gradient, **result.other_gradients}

    def times(self, factor: float) -> Bounds:
        """Multiply the bounds on values, anchors and rows."""
        return replace(
            self,
            values=[factor * bound for bound in self.values],
            anchors={i: factor * bound for i, bound in self.anchors.items()},
            rows={name: factor * rows for name, rows in self.rows.items()},
        )

    def map_values(self, function: Callable[..., Matrix], *results: Expected | Outcome) -> Bounds:
        """Replace each bound on a value or anchor by ``function(bound, *entries)``, with one entry per result."""
        anchors = ([(result.anchors or {}).get(i, math.nan) for i in self.anchors] for result in results)
        values = function(*map(np.array, (self.values, *(result.values for result in results)))).tolist()
        of_anchors = function(*map(np.array, (list(self.anchors.values()), *anchors))).tolist()
        return replace(self, values=values, anchors=dict(zip(self.anchors, of_anchors, strict=True)))

    def map_rows(self, function: Callable[..., Matrix], *results: Expected | Outcome) -> Bounds:
        """Replace the bounds on rows by ``function(bounds, *gradients)``, for each gradient that all results have."""
        found = [self.gradients(result) for result in results]
        common = [name for name in self.rows if all(name in gradients for gradients in found)]
        changed = {name: function(self.rows[name], *(gradients[name] for gradients in found)) for name in common}
        return replace(self, rows={**self.rows, **changed})
