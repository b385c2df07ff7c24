"""What a case must give, what an implementation gave, and how far the two may differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from pairproof.reference import Terms

Matrix = npt.NDArray[np.float64]

NAN_LOSS = "the loss is NaN"
TIE = "two entries of a row are equal and its largest: the loss has a kink there"
BY_CHOICE = "by choice: the batch is large"
LEFT_OUT = (NAN_LOSS, TIE, BY_CHOICE)
"""Every reason for which a gradient may be left out."""


@dataclass(frozen=True)
class Expected:
    """What a case must give, each number the float64 nearest to the true one.

    Attributes:
        loss: the value, or one value per counted anchor for reduction "none".
        anchors: the value of every counted anchor, by row.
        gradient: [N, D] of the loss (of the sum of its values for reduction "none"), or None.
        gradient_left_out: why there is no gradient, or None.
        other_gradients: the gradient by each further matrix, by its name; empty where there is no gradient.
    """

    loss: float | tuple[float, ...]
    anchors: dict[int, float]
    gradient: Matrix | None
    gradient_left_out: str | None = None
    other_gradients: Mapping[str, Matrix] = field(default_factory=dict)

    @property
    def values(self) -> tuple[float, ...]:
        """The loss as a tuple: one value, or one per counted anchor."""
        return self.loss if isinstance(self.loss, tuple) else (self.loss,)


@dataclass(frozen=True, kw_only=True)
class Truth(Expected):
    """What a case must give, with what its conditioning is made of.

    Attributes:
        similarity: of the case's ``shape``, or None for a batch so large that it is not recomputed.
        weights: of the case's ``shape``, the derivative of the loss by each similarity, both orders apart.
    """

    similarity: Matrix | None
    weights: Matrix


@dataclass(frozen=True)
class Outcome:
    """What an implementation gave for a case.

    Attributes:
        values: the loss, or one value per counted anchor for reduction "none".
        gradient: [N, D] by the embeddings, of the loss or of the sum of its values; None where it has none.
        anchors: every anchor's value by row, if the implementation reports them.
        terms: the reference's record.
        other_gradients: by each further float matrix of the case, by its name; empty where it has no ``gradient``.
    """

    values: list[float]
    gradient: Matrix | None = None
    anchors: dict[int, float] | None = None
    terms: Terms | None = None
    other_gradients: Mapping[str, Matrix] = field(default_factory=dict)


@dataclass(frozen=True)
class Bounds:
    """How far each quantity may be off: one number per value, anchor and row of a gradient.

    ``rows`` bounds the Euclidean norm of each row's error, by the name of the matrix, the embeddings first; the norm of
    the whole error is bounded by the norm of a matrix's ``rows``. ``share_of_floor`` is how much of each bound no luck
    takes away; see ``held_to``.
    """

    values: list[float]
    anchors: dict[int, float]
    rows: Mapping[str, Matrix]
    share_of_floor: float
    similarity: Matrix

    def gradients(self, result: Expected | Outcome) -> dict[str, Matrix]:
        """The gradients of a result by the names of ``rows``; empty where it has none."""
        return {} if result.gradient is None else {next(iter(self.rows)): result.gradient, **result.other_gradients}

    def map_values(self, function: Callable[..., Matrix], *results: Expected | Outcome) -> Bounds:
        """The bounds with those of values and anchors made anew, of each and of what the results have in its place."""
        anchors = ([(result.anchors or {}).get(i, math.nan) for i in self.anchors] for result in results)
        values = function(*map(np.array, (self.values, *(result.values for result in results)))).tolist()
        of_anchors = function(*map(np.array, (list(self.anchors.values()), *anchors))).tolist()
        return replace(self, values=values, anchors=dict(zip(self.anchors, of_anchors, strict=True)))

    def map_rows(self, function: Callable[..., Matrix], *results: Expected | Outcome) -> Bounds:
        """The bounds with those of rows made anew, of each and of the results' gradients, where all have one."""
        found = [self.gradients(result) for result in results]
        common = [name for name in self.rows if all(name in gradients for gradients in found)]
        changed = {name: function(self.rows[name], *(gradients[name] for gradients in found)) for name in common}
        return replace(self, rows={**self.rows, **changed})
