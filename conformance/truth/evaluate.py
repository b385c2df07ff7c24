"""What a case must give: the reference's loops over balls, so that nothing is rounded but the last digit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flint import arb

from pairproof import reference

from ..suite.cases import Case, call_reference, reference_of_similarities, similarities
from ..suite.records import Expected, Matrix, Truth
from . import autodiff as tape
from .intervals import PRECISION, precision

PROVE_UP_TO = 40
"""Rows up to which the loops are run anew for sensitivities, terms and complex steps."""


@dataclass(frozen=True)
class Enclosures:
    """The true results of a case as balls, for whoever proves digits.

    Attributes:
        values: the loss, alone in its list; or one per counted anchor for reduction "none".
        anchors: every anchor's value, by row.
        gradient: [N][D], of the sum of ``values``; None where it was not asked for.
        other_gradients: the same by each further matrix, by its name.
    """

    values: list[arb]
    anchors: dict[int, arb]
    gradient: list[list[arb]] | None
    other_gradients: Mapping[str, list[list[arb]]] = field(default_factory=dict)


def enclosures(case: Case, bits: int = PRECISION, *, gradient: bool = True) -> Enclosures:
    """Evaluate a case over balls and round nothing."""
    return _evaluate(case, bits, gradient)[0]


def _evaluate(case: Case, bits: int, gradient: bool) -> tuple[Enclosures, reference.Terms, bool]:
    """The enclosures, the terms, and whether the loss is one value per anchor."""
    with precision(bits):
        exact = {name: [[arb(x) for x in row] for row in matrix.tolist()] for name, matrix in case.matrices.items()}
        # One record holds the rows of every matrix, so that one walk backwards differentiates by all of them.
        variables = tape.variables([row for rows in exact.values() for row in rows]) if gradient else None
        given = exact if variables is None else _apart(exact, variables)
        result = call_reference(case, {name: np.array(rows, dtype=object) for name, rows in given.items()})
        values = result.loss if isinstance(result.loss, list) else [result.loss]
        derivatives: dict[str, list[list[arb]]] = {}
        if variables:
            total: Any = sum(values)
            derivatives = {name: [[arb(0)] * len(row) for row in rows] for name, rows in exact.items()}
            if isinstance(total, tape.Var):
                derivatives = _apart(exact, tape.gradient(total, variables))
        found = Enclosures(
            values=[arb(_lift(v)) for v in values],
            anchors={i: arb(_lift(v)) for i, v in result.terms.anchor_losses.items()},
            gradient=derivatives.pop(case.first, None),
            other_gradients=derivatives,
        )
        return found, result.terms, isinstance(result.loss, list)


def _apart(matrices: Mapping[str, Sequence[Any]], rows: Sequence[Any]) -> dict[str, Any]:
    """Rows that stand one matrix after the other, given back to their matrices."""
    apart, begin = {}, 0
    for name, matrix in matrices.items():
        apart[name] = rows[begin : begin + len(matrix)]
        begin += len(matrix)
    return apart


def truth(case: Case, bits: int = PRECISION) -> Truth:
    """Prove a case on the spot: value, terms, gradient, and sensitivity to each similarity."""
    found, terms, many = _evaluate(case, bits, gradient=True)
    with precision(bits):
        loss = [float(v) for v in found.values]
        defined = not any(math.isnan(x) for x in loss)
        return Truth(
            loss=tuple(loss) if many else loss[0],
            anchors={i: float(v) for i, v in found.anchors.items()},
            gradient=_rounded(found.gradient or []) if defined else None,
            similarity=_rounded(terms.similarity),
            weights=weights(case),
            other_gradients={name: _rounded(rows) for name, rows in found.other_gradients.items()} if defined else {},
        )


def stored_truth(case: Case, expected: Expected) -> Truth:
    """The truth of a golden case: its stored results, which were proved when the fixtures were made.

    Args:
        case: the case.
        expected: what its file holds.
    """
    similarity = None
    if case.size <= PROVE_UP_TO:
        with precision():
            rows = {name: [[arb(x) for x in row] for row in matrix.tolist()] for name, matrix in case.matrices.items()}
            similarity = _rounded(similarities(case, rows))
    return Truth(**vars(expected), similarity=similarity, weights=weights(case))


def weights(case: Case) -> Matrix:
    """How sensitive the loss is to each similarity: its derivative, of the case's ``shape``, both orders apart.

    They scale the tolerances, so float64 serves. Above ``PROVE_UP_TO`` rows the loops take too long, and each anchor
    is given the most it can have, 2 / temperature, spread over its row.
    """
    if case.size > PROVE_UP_TO:
        anchors = case.anchors()
        most = np.zeros(case.shape)
        most[anchors] = 2 / (float(case.option("temperature")) * case.shape[1])
        return most if case.option("reduction") in ("sum", "none") else most / max(len(anchors), 1)
    matrix = similarities(case, {name: rows.tolist() for name, rows in case.matrices.items()})
    variables = tape.variables(matrix)
    with np.errstate(all="ignore"):
        loss = reference_of_similarities(case, variables).loss
        total: Any = sum(loss) if isinstance(loss, list) else loss
        if not isinstance(total, tape.Var):
            return np.zeros(case.shape)
        found = _rounded(tape.gradient(total, variables))
    return np.where(np.isfinite(found), found, 0.0)


def _rounded(rows: Sequence[Sequence[Any]]) -> Matrix:
    return np.array([[float(x) for x in row] for row in rows])


def _lift(x: Any) -> Any:
    return x.value if isinstance(x, tape.Var) else x
