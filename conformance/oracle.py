"""What a case must give: the reference's loops over balls, so that nothing is rounded but the last digit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from flint import arb

from pairproof import reference

from . import tape
from .balls import PRECISION, precision
from .cases import Case, call_reference, reference_of_similarities

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Truth:
    """The true results of a case, each rounded once to float64, and what its conditioning is made of.

    Attributes:
        loss: the value, or one value per counted anchor for reduction "none".
        anchors: every anchor's value, by row.
        gradient: [N, D], of the loss (of the sum of its values for reduction "none"); None where the loss is NaN.
        similarity: [N, N].
        pair_values: the value of every pair that was summed.
        weights: [N, N], the derivative of the loss by each similarity, both orders apart.
    """

    loss: float | list[float]
    anchors: dict[int, float]
    gradient: Matrix | None
    similarity: Matrix
    pair_values: dict[tuple[int, int], float]
    weights: Matrix

    @property
    def values(self) -> list[float]:
        """The loss as a list: one value, or one per anchor."""
        return self.loss if isinstance(self.loss, list) else [self.loss]


@dataclass(frozen=True)
class Enclosures:
    """The true results of a case as balls, for whoever proves digits.

    Attributes:
        values: the loss, alone in its list; or one per counted anchor for reduction "none".
        anchors: every anchor's value, by row.
        gradient: [N][D], of the sum of ``values``; None where it was not asked for.
    """

    values: list[arb]
    anchors: dict[int, arb]
    gradient: list[list[arb]] | None


def enclosures(case: Case, bits: int = PRECISION, *, gradient: bool = True) -> Enclosures:
    """Evaluate a case over balls and round nothing."""
    return _evaluate(case, bits, gradient)[0]


def _evaluate(case: Case, bits: int, gradient: bool) -> tuple[Enclosures, reference.Terms, bool]:
    """The enclosures, the terms, and whether the loss is one value per anchor."""
    with precision(bits):
        exact = [[arb(x) for x in row] for row in case.embeddings.tolist()]
        variables = tape.variables(exact) if gradient else None
        result = call_reference(case, _objects(variables or exact))
        values = result.loss if isinstance(result.loss, list) else [result.loss]
        derivatives: list[list[arb]] | None = None
        if variables:
            total = _total(values)
            derivatives = [[arb(0)] * len(row) for row in exact]
            if isinstance(total, tape.Var):
                derivatives = tape.gradient(total, variables)
        found = Enclosures(
            values=[arb(_lift(v)) for v in values],
            anchors={i: arb(_lift(v)) for i, v in result.terms.anchor_losses.items()},
            gradient=derivatives,
        )
        return found, result.terms, isinstance(result.loss, list)


def truth(case: Case, bits: int = PRECISION) -> Truth:
    """Evaluate a case over balls: value, terms, gradient and sensitivity to each similarity."""
    found, terms, many = _evaluate(case, bits, gradient=True)
    with precision(bits):
        loss = [float(v) for v in found.values]
        gradient = None
        if not any(math.isnan(x) for x in loss):
            gradient = np.array([[float(x) for x in row] for row in found.gradient or []])
        similarities = tape.variables([[_lift(x) for x in row] for row in terms.similarity])
        again = reference_of_similarities(case, similarities).loss
        by_similarity = _total(again if isinstance(again, list) else [again])
        weights = np.zeros((case.n, case.n))
        if isinstance(by_similarity, tape.Var):
            weights = np.array([[float(x) for x in row] for row in tape.gradient(by_similarity, similarities)])
        return Truth(
            loss=loss if many else loss[0],
            anchors={i: float(v) for i, v in found.anchors.items()},
            gradient=gradient,
            similarity=np.array([[_plain(x) for x in row] for row in terms.similarity]),
            pair_values={key: _plain(pair.value) for key, pair in terms.pairs.items()},
            weights=weights,
        )


def _objects(rows: list[list[Any]]) -> npt.NDArray[np.object_]:
    out = np.empty((len(rows), len(rows[0])), dtype=object)
    for i, row in enumerate(rows):
        for j, x in enumerate(row):
            out[i, j] = x
    return out


def _total(values: list[Any]) -> Any:
    total: Any = 0
    for v in values:
        total = v + total
    return total


def _lift(x: Any) -> Any:
    return x.value if isinstance(x, tape.Var) else x


def _plain(x: Any) -> float:
    return float(_lift(x))
