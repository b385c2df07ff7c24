"""Evaluate a case with the reference in ball arithmetic: enclosures of the true results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from flint import arb

from pairproof import reference

from ..suite.cases import Case, call_reference, reference_of_similarities, similarities
from ..suite.records import Expected, Matrix, Truth
from . import autodiff as tape
from .intervals import PRECISION, precision

PROVE_UP_TO = 40
"""The largest ``Case.size`` for which loops compute sensitivities, terms and complex steps."""


@dataclass(frozen=True)
class Enclosures:
    """Balls that enclose the true results of a case.

    Attributes:
        values: a list of the loss, or of one value per counted anchor for reduction "none".
        anchors: the value of every anchor, by row.
        gradients: [N][D] for every matrix, of the sum of ``values``; empty if they were not requested.
        terms: the terms of the reference.
    """

    values: list[arb]
    anchors: dict[int, arb]
    gradients: dict[str, list[list[arb]]]
    terms: reference.Terms


def enclosures(
    case: Case, bits: int = PRECISION, *, gradient: bool = True, upstream: Sequence[float] | None = None
) -> Enclosures:
    """Evaluate a case in ball arithmetic, with this many bits.

    Args:
        case: the case.
        bits: the working precision.
        gradient: whether gradients are computed.
        upstream: the factor of each value in the sum that is differentiated; by default 1.
    """
    with precision(bits):
        given = _balls(case)
        if gradient:
            # All matrices share one tape, so that one backward pass gives the gradients of all of them.
            variables = tape.variables([row for rows in given.values() for row in rows])
            given = _split(given, variables)
        result = call_reference(case, {name: np.array(rows, dtype=object) for name, rows in given.items()})
        values = result.loss if isinstance(result.loss, list) else [result.loss]
        total = sum(values) if upstream is None else sum(v * w for v, w in zip(values, upstream, strict=True))
        return Enclosures(
            values=[arb(tape.value_of(v)) for v in values],
            anchors={i: arb(tape.value_of(v)) for i, v in result.terms.anchor_losses.items()},
            gradients=_split(given, tape.gradient(total, variables)) if gradient else {},
            terms=result.terms,
        )


def _balls(case: Case) -> dict[str, Any]:
    return {name: [[arb(x) for x in row] for row in matrix.tolist()] for name, matrix in case.matrices.items()}


def _split(matrices: Mapping[str, Sequence[Any]], rows: Sequence[Any]) -> dict[str, Any]:
    """Split a sequence of the rows of all matrices into the matrices."""
    left = iter(rows)
    return {name: list(islice(left, len(matrix))) for name, matrix in matrices.items()}


def truth(case: Case, bits: int = PRECISION, upstream: Sequence[float] | None = None) -> Truth:
    """Compute the truth of a case: values, similarities, gradients, and the sensitivity to each similarity.

    Args:
        case: the case.
        bits: the working precision.
        upstream: for reduction "none", the factor of each value in the sum that is differentiated; by default 1.
    """
    found = enclosures(case, bits, upstream=upstream)
    sensitivities = weights(case)
    if upstream is not None:
        # The value of an anchor depends only on the similarities in its own row.
        sensitivities[case.counted()] *= np.array(upstream)[:, None]
    with precision(bits):
        loss = tuple(float(v) for v in found.values)
        defined = not any(map(math.isnan, loss))
        gradients = {name: _rounded(rows) for name, rows in found.gradients.items()} if defined else {}
        return Truth(
            loss=loss if case.option("reduction") == "none" else loss[0],
            anchors={i: float(v) for i, v in found.anchors.items()},
            gradient=gradients.pop(case.first, None),
            similarity=_rounded(found.terms.similarity),
            weights=sensitivities,
            other_gradients=gradients,
        )


def temperature_gradient(case: Case, bits: int = PRECISION) -> float:
    """Compute the derivative of a loss (of the sum of its values) with respect to the temperature.

    Every loss is a function f of the logits s_ij / T, multiplied by T / base_temperature if there is one. Its
    derivative is therefore -sum_ij (dL/ds_ij) s_ij / T, plus L / T if there is a base temperature.
    """
    with precision(bits):
        matrix = similarities(case, _balls(case))
        variables = tape.variables(matrix)
        loss = reference_of_similarities(case, variables).loss
        total = sum(loss) if isinstance(loss, list) else loss
        slopes = tape.gradient(total, variables)
        moved = sum(w * s for rows in zip(slopes, matrix, strict=True) for w, s in zip(*rows, strict=True))
        scaled = 0 if case.option("base_temperature") is None else arb(tape.value_of(total))
        return float((scaled - moved) / arb(case.temperature))


def stored_truth(case: Case, expected: Expected) -> Truth:
    """The truth of a golden case from its stored results, which were proved when the fixtures were made.

    Args:
        case: the case.
        expected: the results that are stored in its file.
    """
    similarity = None
    if case.size <= PROVE_UP_TO:
        with precision():
            similarity = _rounded(similarities(case, _balls(case)))
    return Truth(**vars(expected), similarity=similarity, weights=weights(case))


def weights(case: Case) -> Matrix:
    """The derivative of the loss with respect to each similarity, of the case's ``shape``.

    They are only used to scale the tolerances, so they are computed in float64. For cases larger than ``PROVE_UP_TO``
    the loops are too slow; each anchor then gets the largest possible sum, 2 / temperature, spread over its row.
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
        found = _rounded(tape.gradient(sum(loss) if isinstance(loss, list) else loss, variables))
    return np.where(np.isfinite(found), found, 0.0)


def _rounded(rows: Sequence[Sequence[Any]]) -> Matrix:
    return np.array([[float(x) for x in row] for row in rows])
