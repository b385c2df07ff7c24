"""Evaluate a case with the loops of the reference in ball arithmetic: enclosures of the true results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flint import arb

from pairproof import reference

from ..suite.cases import Case, reference_of_similarities, similarities
from ..suite.garbage import without_collections
from . import autodiff as tape
from .intervals import PRECISION, precision
from .matrices import Enclosures, Rows, dot, normalised, pull_back, row_divisors, weights_of


def enclosures(
    case: Case, bits: int = PRECISION, *, gradient: bool = True, upstream: Sequence[float] | None = None
) -> Enclosures:
    """Evaluate a case in ball arithmetic.

    The reference evaluates one anchor at a time, and ``autodiff`` differentiates the anchor's part of the loss with
    respect to its row of similarities. Memory is therefore proportional to the number of similarities.

    The logits are s_ij / T + bias, and a base temperature multiplies the loss by T / base_temperature. Hence::

        dL/dT = -sum_ij (dL/ds_ij) s_ij / T     (with a base temperature: + L / T)
        dL/dbias = T sum_ij (dL/ds_ij)

    Weights of a loss (``catalogue.Weights``) are constants in both formulas, because they do not depend on T. If the
    formula takes the lowest possible logit, the lowest possible similarity counts as one more s_ij.

    Args:
        case: the case.
        bits: the working precision.
        gradient: whether gradients are computed.
        upstream: for reduction "none", the factor of each value in the sum that is differentiated; by default 1.
    """
    with precision(bits), without_collections():
        matrix = similarities_in_balls(case)
        counted, reduction, divisors = case.counted(), case.option("reduction"), row_divisors(case)
        factors: dict[int, Any] = {} if upstream is None else dict(zip(counted, upstream, strict=True))
        weights = weights_of(case, matrix) or []
        anchors: dict[int, arb] = {}
        slopes: dict[int, list[arb]] = {}
        of_weights: dict[int, list[arb]] = {}
        total, moved, of_pairs = arb(0), arb(0), list[arb]()
        for i in case.anchors():
            least = [] if case.entry.lowest is None else [arb(case.entry.lowest)]
            given_row = [matrix[i], least, weights[i] if weights else []]
            row, lowest, own_weights = tape.variables(given_row) if gradient else given_row
            part, result = _part_of_anchor(case, i, row, next(iter(lowest), None), own_weights or None)
            of_pairs += [arb(tape.value_of(value)) for value in result.loss] if reduction == "none_pairs" else []
            anchors[i] = arb(tape.value_of(result.terms.anchor_losses[i]))
            factor = arb(factors.get(i, 1)) / divisors[i]
            found = tape.gradient(part, [row, lowest, own_weights]) if gradient else [[], [], []]
            slopes[i], of_lowest, of_weights[i] = ([x * factor for x in part_of] for part_of in found)
            scaled = 0 if case.option("base_temperature") is None else arb(tape.value_of(part)) * factor
            moved += scaled - dot(slopes[i], matrix[i]) - dot(of_lowest, least) if gradient else 0
            total += tape.value_of(part) * factor
        of_bias = sum((sum(row, arb(0)) for row in slopes.values()), arb(0)) * arb(case.temperature)
        if gradient and weights and not case.detaches_weights:
            for i, row in enumerate(_through_weights(case, matrix, of_weights)):
                slopes[i] = [a + b for a, b in zip(slopes[i], row, strict=True)] if i in slopes else row
        separate = {"none": [anchors[i] for i in counted], "none_pairs": of_pairs}
        return Enclosures(
            values=separate.get(reduction, [total]),
            anchors=anchors,
            gradients=pull_back(case, *normalised(case), slopes)[0] if gradient else {},
            similarity=matrix,
            temperature_gradient=moved / arb(case.temperature),
            bias_gradient=of_bias,
            slopes={i: row for i, row in slopes.items() if row},
        )


def _through_weights(
    case: Case, matrix: Sequence[Sequence[arb]], slopes: Mapping[int, Sequence[arb]]
) -> list[list[arb]]:
    """The derivatives with respect to the similarities, from the derivatives with respect to the weights."""
    variables = tape.variables(matrix)
    weights = weights_of(case, variables) or []
    total = sum((w * slope for i, row in slopes.items() for w, slope in zip(weights[i], row, strict=True)), arb(0))
    return tape.gradient(total, variables)


def _part_of_anchor(
    case: Case, i: int, row: Sequence[Any], lowest: Any = None, weights: Sequence[Any] | None = None
) -> tuple[Any, reference.Result]:
    """Evaluate the reference on anchor i alone, given its row of similarities.

    Returns:
        What the anchor adds to the loss before the division of a mean, and the result of the reference.
    """
    # The other rows are not anchors, so a constant entry and empty sets are enough for them.
    other = [tape.value_of(row[0])]
    mask, members = case.positive_array()[i].tolist(), case.members()[i]
    rows, each = range(case.shape[0]), case.option("reduction") == "none_pairs"
    result = reference_of_similarities(
        case,
        [row if k == i else other for k in rows],
        is_positive=[mask if k == i else [] for k in rows],
        anchors=[i],
        members=[members if k == i else [] for k in rows],
        reduction="none_pairs" if each else "sum_pairs" if case.over_pairs else "sum",
        lowest=lowest,
        weights=None if weights is None else [weights] * len(rows),
    )
    return sum(result.loss, tape.value_of(row[0]) * 0) if each else result.loss, result


def similarities_in_balls(case: Case) -> Rows:
    """The similarity matrix as the reference computes it, in balls."""
    return similarities(
        case, {name: [[arb(x) for x in row] for row in z.tolist()] for name, z in case.matrices.items()}
    )
