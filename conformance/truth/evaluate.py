"""Evaluate a case with the reference in ball arithmetic: enclosures of the true results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from flint import arb, arb_mat

from pairproof import reference

from ..suite.cases import SIGNIFICAND, Case, reference_of_similarities, row_norms, similarities
from ..suite.garbage import without_collections
from ..suite.records import Expected, Matrix, Truth
from . import autodiff as tape
from .closed import Form, closed_form, evaluated
from .intervals import PRECISION, precision

PROVE_UP_TO = 40
"""The largest ``Case.size`` for which every run uses the slow loops of the reference."""

NARROW = 2.0**-100
"""Largest radius of a result that :func:`truth` returns, relative to the size of the terms it is computed from."""

MOST_BITS = 4096
"""Largest precision that :func:`truth` tries."""


class CertificationError(ValueError):
    """A result cannot be proved. The message names the case and the entry."""


@dataclass(frozen=True)
class Enclosures:
    """Balls that enclose the true results of a case.

    Derivatives are those of the sum of ``values``, and are only valid if gradients were requested.

    Attributes:
        values: the loss; or one value per counted anchor (reduction "none") or per pair ("none_pairs").
        anchors: the value of every anchor, by row.
        gradients: the gradient with respect to every float matrix, by name.
        similarity: the similarity matrix, of the case's ``shape``.
        temperature_gradient: the derivative with respect to the temperature.
        bias_gradient: the derivative with respect to the bias.
        slopes: the derivatives with respect to each anchor's row of similarities, rounded to float64.
    """

    values: list[arb]
    anchors: dict[int, arb]
    gradients: dict[str, list[list[arb]]]
    similarity: list[list[arb]]
    temperature_gradient: arb
    bias_gradient: arb
    slopes: dict[int, list[float]]


def enclosures(
    case: Case,
    bits: int = PRECISION,
    *,
    gradient: bool = True,
    upstream: Sequence[float] | None = None,
    form: Form | None = None,
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
        form: a closed form, which is evaluated instead of the reference.
    """
    with precision(bits), without_collections():
        given = _balls(case)
        matrix = similarities(case, given)
        counted, reduction = case.counted(), case.option("reduction")
        factors: dict[int, Any] = {} if upstream is None else dict(zip(counted, upstream, strict=True))
        grouped = case.groups() is not None and reduction == "mean"
        if grouped:
            sums = {i: _sum(case, [k for k in rows if k in counted]) for rows in case.groups() or () for i in rows}
            factors = {i: 1 / sums[i] for i in counted}
        weights = _weights(case, matrix) if case.entry.weights else []
        anchors: dict[int, arb] = {}
        slopes: dict[int, list[arb]] = {}
        of_weights: dict[int, list[arb]] = {}
        total, moved, of_pairs = arb(0), arb(0), list[arb]()
        for i in case.anchors():
            if form:
                anchors[i], derivatives = evaluated(case, form, i, matrix[i])
                factor = arb(factors.get(i, 1))
                slopes[i] = [x * factor for x in derivatives]
                scaled = 0 if case.option("base_temperature") is None else anchors[i] * factor
                moved += scaled - _dot(slopes[i], matrix[i])
                total += anchors[i] * factor
                continue
            least = [] if case.entry.lowest is None else [arb(case.entry.lowest)]
            given_row = [matrix[i], least, weights[i] if weights else []]
            row, lowest, own_weights = tape.variables(given_row) if gradient else given_row
            part, result = _part_of_anchor(case, i, row, next(iter(lowest), None), own_weights or None)
            of_pairs += [arb(tape.value_of(value)) for value in result.loss] if reduction == "none_pairs" else []
            anchors[i] = arb(tape.value_of(result.terms.anchor_losses[i]))
            factor = arb(factors.get(i, 1))
            found = tape.gradient(part, [row, lowest, own_weights]) if gradient else [[], [], []]
            slopes[i], of_lowest, of_weights[i] = ([x * factor for x in part_of] for part_of in found)
            scaled = 0 if case.option("base_temperature") is None else arb(tape.value_of(part)) * factor
            moved += scaled - _dot(slopes[i], matrix[i]) - _dot(of_lowest, least) if gradient else 0
            total += tape.value_of(part) * factor
        divisor = arb(1) if grouped else _divisor(case)
        of_bias = sum((sum(row, arb(0)) for row in slopes.values()), arb(0)) * arb(case.temperature) / divisor
        if gradient and weights and not case.detaches_weights:
            for i, row in enumerate(_through_weights(case, matrix, of_weights)):
                slopes[i] = [a + b for a, b in zip(slopes[i], row, strict=True)] if i in slopes else row
        separate = {"none": [anchors[i] for i in counted], "none_pairs": of_pairs}
        return Enclosures(
            values=separate.get(reduction, [total / divisor]),
            anchors=anchors,
            gradients=_pull_back(case, given, slopes, divisor) if gradient else {},
            similarity=matrix,
            temperature_gradient=moved / (arb(case.temperature) * divisor),
            bias_gradient=of_bias,
            slopes={i: [float(x / divisor) for x in row] for i, row in slopes.items() if row},
        )


def _weights(case: Case, matrix: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The weights of every row, from the similarities."""
    member, positive = case.member_array(), case.positive_array()
    negatives = [np.flatnonzero(row).tolist() for row in member & ~positive]
    found: list[list[Any]] = case.entry.weights_function(matrix, case.positives(), negatives, **case.weights_options())
    return found


def _through_weights(
    case: Case, matrix: Sequence[Sequence[arb]], slopes: Mapping[int, Sequence[arb]]
) -> list[list[arb]]:
    """The derivatives with respect to the similarities, from the derivatives with respect to the weights."""
    variables = tape.variables(matrix)
    weights = _weights(case, variables)
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


def _sum(case: Case, anchors: Sequence[int]) -> arb:
    """The exact sum of the weights of some anchors; 1 if it is 0."""
    weights = case.row_weights()
    found = sum((arb(weights[i]) for i in anchors), arb(0))
    return found if found != 0 else arb(1)


def _divisor(case: Case) -> arb:
    """The exact value of ``case.divisor()``."""
    weights, reduction = [arb(x) for x in case.row_weights()], case.option("reduction")
    found = arb(1)
    if reduction == "mean":
        return _sum(case, case.counted())
    if reduction == "mean_pairs":
        by_weight = case.option("weights_divisor") == "weight" and "positive_weights" in case.arguments
        own = case.arguments["positive_weights"] if by_weight else None
        found = sum((weights[i] * (own[i][j] if own else 1) for i, j in case.pairs()), arb(0))
    return found if found != 0 else arb(1)


def _pull_back(
    case: Case, given: Mapping[str, list[list[arb]]], slopes: Mapping[int, list[arb]], divisor: arb
) -> dict[str, list[list[arb]]]:
    """The gradient of every matrix, from the derivatives w_ij of the loss with respect to the similarities.

    With s_ij = y_i . y_j, the gradient of row y_i is g = sum_j w_ij y_j. Under cosine y = x / |x|, and the gradient of
    x is (g - (g . y) y) / |x|.

    ``slopes`` has divisor * w_ij for all columns j, by anchor i.
    """
    cosine = case.option("similarity") == "cosine"
    norms = {
        name: [_dot(x, x).sqrt() if cosine and any(a != 0 for a in x) else arb(1) for x in rows]
        for name, rows in given.items()
    }
    unit = {
        name: arb_mat([[x / norm for x in row] for row, norm in zip(rows, norms[name], strict=True)])
        for name, rows in given.items()
    }
    found = {name: rows * 0 for name, rows in unit.items()}
    nothing = [arb(0)] * case.shape[1]
    for block in case.blocks():
        across, down = block.part
        weights = arb_mat([slopes.get(i, nothing)[down] for i in range(case.shape[0])[across]])
        found[block.left] += weights * unit[block.right]
        found[block.right] += weights.transpose() * unit[block.left]

    def of_row(g: list[arb], y: list[arb], norm: arb) -> list[arb]:
        if cosine and all(b == 0 for b in y):  # the gradient of a row of zeros is 0 by convention
            return [arb(0)] * len(y)
        along = _dot(g, y) if cosine else arb(0)
        # The gradient is orthogonal to the row. If only one entry of the row is nonzero, the gradient of this entry is
        # exactly 0. The formula would give a ball around 0, which takes more bits to prove.
        axis = cosine and sum(b != 0 for b in y) == 1
        return [arb(0) if axis and b != 0 else (a - along * b) / (norm * divisor) for a, b in zip(g, y, strict=True)]

    return {name: list(map(of_row, found[name].tolist(), unit[name].tolist(), norms[name])) for name in given}


def _dot(a: Sequence[arb], b: Sequence[arb]) -> arb:
    return sum((x * y for x, y in zip(a, b, strict=True)), arb(0))


def _balls(case: Case) -> dict[str, list[list[arb]]]:
    return {name: [[arb(x) for x in row] for row in matrix.tolist()] for name, matrix in case.matrices.items()}


def truth(
    case: Case, bits: int = PRECISION, upstream: Sequence[float] | None = None, form: Form | None = None
) -> Truth:
    """Compute the truth of a case: values, similarities, gradients, and the sensitivity to each similarity.

    The precision is raised until every enclosure is narrow. The results are the midpoints.

    Args:
        case: the case.
        bits: the first precision that is tried.
        upstream: for reduction "none", the factor of each value in the sum that is differentiated; by default 1.
        form: a closed form, which is evaluated instead of the reference.

    Raises:
        CertificationError: an enclosure is wide even with ``MOST_BITS`` bits. The message names the result.
    """
    found = enclosures(case, bits, upstream=upstream, form=form)
    while wide := _first_wide(case, found):
        if bits >= MOST_BITS:
            raise CertificationError(f"{case.id}: {wide} cannot be proved with {bits} bits")
        bits = min(4 * bits, MOST_BITS)
        found = enclosures(case, bits, upstream=upstream, form=form)
    with precision(bits):
        loss = tuple(float(v) for v in found.values)
        defined = not any(map(math.isnan, loss))
        gradients = {name: _rounded(rows) for name, rows in found.gradients.items()} if defined else {}
        sensitivities = np.zeros(case.shape)
        for i, row in found.slopes.items():
            sensitivities[i] = np.where(np.isfinite(row), row, 0.0)
        return Truth(
            loss=loss if case.separate else loss[0],
            anchors={i: float(v) for i, v in found.anchors.items()},
            gradient=gradients.pop(case.first, None),
            similarity=_rounded(found.similarity),
            weights=sensitivities,
            other_gradients=gradients,
            temperature_gradient=float(found.temperature_gradient) if defined else None,
            bias_gradient=float(found.bias_gradient) if defined and "bias" in case.entry.keywords else None,
        )


def _first_wide(case: Case, found: Enclosures) -> str | None:
    """Return the name of the first result whose enclosure is too wide, or None if all are narrow."""

    def is_wide(value: arb, size: float) -> bool:
        return not (value.is_finite() and float(value.rad()) <= NARROW * max(size, abs(float(value))))

    counted, undefined = case.counted(), case.undefined()
    scale = case.temperature / (case.option("base_temperature") or case.temperature)
    wide = (i for i in counted if i not in undefined and is_wide(found.anchors[i], scale))
    if (anchor := next(wide, None)) is not None:
        return f"the value of anchor {anchor}"
    if any(case.undefined_values()):
        return None
    if any(is_wide(value, scale) for value in found.values):
        return "the loss"
    norms = {name: row_norms(matrix).tolist() for name, matrix in case.matrices.items()}
    cosine, longest = case.option("similarity") == "cosine", max(map(max, norms.values()))
    for name, rows in found.gradients.items():
        for i, (row, norm) in enumerate(zip(rows, norms[name], strict=True)):
            # An entry is a sum of entries of rows times weights of at most scale / temperature.
            size = scale / case.temperature * (1 / (norm or 1.0) if cosine else longest)
            size = max(size, *(abs(float(x)) for x in row))
            if any(is_wide(x, size) for x in row):
                return f"row {i} of the gradient with respect to {name}"
    return None


def stored_truth(case: Case, expected: Expected) -> Truth:
    """The truth of a golden case, from its stored and proved results. A ``Truth`` is returned as it is."""
    if isinstance(expected, Truth):
        return expected
    similarity, weights = not_stored(case)
    return Truth(**vars(expected), similarity=similarity, weights=weights)


@lru_cache(maxsize=1024)  # several implementations, dtypes and tests use the same case
def not_stored(case: Case) -> tuple[Matrix | None, Matrix]:
    """Return the true similarities and the derivative of the loss with respect to each, as read-only matrices.

    The derivatives only scale the tolerances. For cases larger than ``PROVE_UP_TO``, the similarities are None, and the
    derivatives are those of the straightforward implementation.
    """
    if case.size > PROVE_UP_TO:
        from .baseline import plain_weights  # imports torch, which not every command needs

        return None, _finite(plain_weights(case))
    with precision():
        matrix = similarities(case, _balls(case))
        similarity, weights = _rounded(matrix), _by_closed_form(case, matrix)
    if weights is None:
        variables = tape.variables(similarity.tolist())
        with np.errstate(all="ignore"):
            loss = reference_of_similarities(case, variables).loss
            weights = _rounded(tape.gradient(sum(loss) if isinstance(loss, list) else loss, variables))
    similarity.setflags(write=False)
    return similarity, _finite(weights)


def _finite(matrix: Matrix) -> Matrix:
    """Replace entries that are not finite by 0. The result is read-only."""
    found = np.where(np.isfinite(matrix), matrix, 0.0)
    found.setflags(write=False)
    return found


def _by_closed_form(case: Case, matrix: Sequence[Sequence[arb]]) -> Matrix | None:
    """The derivative of the loss with respect to each similarity; None without a closed form, or if it is inexact."""
    if (form := closed_form(case)) is None:
        return None
    found, divisor = np.zeros(case.shape), float(_divisor(case))
    for i in case.anchors():
        _, slopes = evaluated(case, form, i, matrix[i])
        if any(x.rel_accuracy_bits() < SIGNIFICAND["float64"] for x in slopes):
            return None
        found[i] = [float(x) / divisor for x in slopes]
    return found


def _rounded(rows: Sequence[Sequence[Any]]) -> Matrix:
    return np.array([[float(x) for x in row] for row in rows])
