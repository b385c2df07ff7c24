"""What a case must give: the reference's loops over balls, so that nothing is rounded but the last digit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from flint import arb

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
        smallest_bits: bits of relative accuracy left in the least accurate enclosure.
    """

    loss: float | list[float]
    anchors: dict[int, float]
    gradient: Matrix | None
    similarity: Matrix
    pair_values: dict[tuple[int, int], float]
    weights: Matrix
    smallest_bits: int

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
    with precision(bits):
        exact = [[arb(x) for x in row] for row in case.embeddings.tolist()]
        rows = tape.variables(exact) if gradient else exact
        result = call_reference(case, _objects(rows))
        values = result.loss if isinstance(result.loss, list) else [result.loss]
        total = _total(values)
        derivatives: list[list[arb]] | None = None
        if isinstance(total, tape.Var):
            derivatives = tape.gradient(total, rows)
        elif gradient:
            derivatives = [[arb(0)] * len(row) for row in rows]
        return Enclosures(
            values=[arb(_lift(v)) for v in values],
            anchors={i: arb(_lift(v)) for i, v in result.terms.anchor_losses.items()},
            gradient=derivatives,
        )


def truth(case: Case, bits: int = PRECISION) -> Truth:
    """Evaluate a case over balls: value, terms, gradient and sensitivity to each similarity."""
    with precision(bits):
        rows = tape.variables([[arb(x) for x in row] for row in case.embeddings.tolist()])
        result = call_reference(case, _objects(rows))
        values = result.loss if isinstance(result.loss, list) else [result.loss]
        loss = [_plain(v) for v in values]
        total = _total(values)
        enclosures = [v.value for v in values if isinstance(v, tape.Var)]
        gradient = None
        if isinstance(total, tape.Var) and not any(math.isnan(x) for x in loss):
            derivatives = tape.gradient(total, rows)
            gradient = np.array([[float(x) for x in row] for row in derivatives])
            enclosures += [x for row in derivatives for x in row if isinstance(x, arb)]
        elif not any(math.isnan(x) for x in loss):
            gradient = np.zeros_like(case.embeddings)
        terms = result.terms
        matrix = [[_lift(x) for x in row] for row in terms.similarity]
        similarities = tape.variables(matrix)
        again = reference_of_similarities(case, similarities).loss  # type: ignore[arg-type]
        by_similarity = _total(again if isinstance(again, list) else [again])
        weights = np.zeros((case.n, case.n))
        if isinstance(by_similarity, tape.Var):
            weights = np.array([[float(x) for x in row] for row in tape.gradient(by_similarity, similarities)])
        return Truth(
            loss=loss if isinstance(result.loss, list) else loss[0],
            anchors={i: _plain(v) for i, v in terms.anchor_losses.items()},
            gradient=gradient,
            similarity=np.array([[float(x) for x in row] for row in matrix]),
            pair_values={key: _plain(pair.value) for key, pair in terms.pairs.items()},
            weights=weights,
            smallest_bits=min((_bits(x) for x in enclosures), default=bits),
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


def _bits(x: arb) -> int:
    """Bits of accuracy: relative for large numbers, absolute for small ones."""
    return int(x.rel_one_accuracy_bits())
