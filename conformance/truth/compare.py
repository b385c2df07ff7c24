"""Compare the results of an implementation with the truth, and name the first term that differs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pairproof.reference import Terms

from ..suite.cases import Case, row_norms
from ..suite.formulas import factors, stored_rows_of
from ..suite.records import Bounds, Matrix, Outcome, Truth
from .tolerances import accumulating, unit_roundoff
from .tolerances import bounds as derived_bounds

PAIR_ULPS = 16
"""Recorded terms of a pair may be wrong by PAIR_ULPS u (1 + |log numerator| + |log denominator|)."""

NORMAL = 1e-300
"""Smaller numerators and denominators are not compared, because underflow may have rounded them."""


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison.

    Attributes:
        ratio: the largest ratio of an error to its bound.
        first: a message about the first term whose error exceeds its bound, or "".
        ulps: the error of the loss in units in the last place.
    """

    ratio: float
    first: str
    ulps: float = math.inf


def compare(case: Case, truth: Truth, outcome: Outcome, bounds: Bounds, dtype: str = "float64") -> Comparison:
    """Compare term by term, in the order in which the loss is computed.

    Args:
        case: the case.
        truth: its certified results.
        outcome: the results of the implementation.
        bounds: the bounds on their errors.
        dtype: dtype of the inputs; the units in the last place are those of its accumulating dtype.
    """
    worst, first = 0.0, ""
    for name, expected, found, bound in _terms(case, truth, outcome, bounds):
        ratio = _ratio(expected, found, bound)
        if ratio > 1 and not first:
            first = f"{name}: expected {expected!r}, got {found!r}; the error is {_times(ratio)}"
        worst = max(worst, ratio)
    if len(outcome.values) != len(truth.values):
        return Comparison(math.inf, f"loss: expected {len(truth.values)} values, got {len(outcome.values)}")
    right, given = bounds.gradients(truth), bounds.gradients(outcome)
    constant = outcome.observed.get("frozen", ())
    for name, gradient in right.items() if given else ():
        if name in constant:
            continue
        # If there is only one gradient, messages do not name its matrix.
        what = "gradient" if len(right) == 1 else f"gradient of {name}"
        allowed, partly = bounds.rows[name], name in truth.products
        if partly:  # the rows that are not stored are those of the straightforward implementation in float64
            stored = np.isin(np.arange(len(allowed)), stored_rows_of(case.matrices[name]))
            allowed = allowed + np.where(stored, 0.0, derived_bounds(case, truth, "float64").rows[name])
        ratio, text = _gradient(what, gradient, given.get(name), allowed)
        if partly and math.isfinite(ratio):
            further = _products(what, truth.products[name], given[name], bounds.rows[name])
            ratio, text = max(ratio, further[0]), text or further[1]
        first = first or text
        worst = max(worst, ratio)
    return Comparison(worst, first, _ulps(truth.values, outcome.values, accumulating(dtype)))


def _ulps(expected: Sequence[float], found: Sequence[float], dtype: str) -> float:
    """Return the largest error of the loss in units in the last place; inf if an error is not finite."""
    number, pairs = np.dtype(dtype).type, zip(expected, found, strict=True)
    least = float(np.finfo(number).tiny)  # where subnormal numbers are flushed, the spacing near 0 is 0
    differ = [(e, f) for e, f in pairs if e != f and not (math.isnan(e) and math.isnan(f))]
    with np.errstate(over="ignore", invalid="ignore"):
        errors = [abs(f - e) / (float(np.spacing(abs(number(e)))) or least) for e, f in differ]
    return max([0.0, *(error if math.isfinite(error) else math.inf for error in errors)])


def _times(ratio: float) -> str:
    return f"{ratio:.3g} times the bound" if math.isfinite(ratio) else "not a rounding error"


def _ratio(expected: float, found: float, bound: float) -> float:
    if math.isnan(expected) or math.isnan(found):
        return 0.0 if math.isnan(expected) and math.isnan(found) else math.inf
    if not math.isfinite(found):
        return math.inf
    if found == expected:
        return 0.0
    return abs(found - expected) / bound if bound else math.inf


def _terms(case: Case, truth: Truth, outcome: Outcome, bounds: Bounds) -> Iterator[tuple[str, float, float, float]]:
    """Yield (name, true value, found value, bound) for each term of the outcome except the gradients."""
    if outcome.terms is not None and truth.similarity is not None:
        yield from _similarities(case, truth.similarity, outcome.terms, bounds.similarity())
        yield from _pairs(outcome.terms)
    if outcome.anchors is not None:
        for i, expected in truth.anchors.items():
            yield f"value of anchor {i}", expected, outcome.anchors.get(i, math.nan), bounds.anchors[i]
    for k, (expected, found) in enumerate(zip(truth.values, outcome.values, strict=False)):
        yield "loss" if len(truth.values) == 1 else f"loss, value {k}", expected, found, bounds.values[k]


def _similarities(
    case: Case, expected: Matrix, terms: Terms, allowed: Matrix
) -> Iterator[tuple[str, float, float, float]]:
    """Yield two recorded similarities: the first one whose error exceeds its bound, and that of the largest ratio."""
    what = "rows" if len(case.matrices) == 1 else "anchor and column"
    found = np.array(terms.similarity, dtype=float)
    if found.shape != expected.shape:
        raise ValueError(f"similarities of shape {list(expected.shape)} are expected, not {list(found.shape)}")
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(found == expected, 0.0, np.abs(found - expected) / allowed)
    wrong = ~(ratios <= 1)
    for at in (np.argmax(wrong), np.argmax(np.where(np.isnan(ratios), np.inf, ratios))):
        i, j = (int(k) for k in np.unravel_index(at, ratios.shape))
        yield f"similarity of {what} {i} and {j}", float(expected[i, j]), float(found[i, j]), float(allowed[i, j])


def _pairs(terms: Terms) -> Iterator[tuple[str, float, float, float]]:
    """Yield terms that compare the recorded value of each pair with log(denominator / numerator)."""
    u = unit_roundoff("float64")
    for (i, j), pair in terms.pairs.items():
        value, above, below = float(pair.value), float(pair.log_numerator), float(pair.log_denominator)
        bound = PAIR_ULPS * u * (1 + abs(above) + abs(below))
        yield f"logarithms of the numerator and the denominator of pair ({i}, {j})", value, below - above, bound
        numerator, denominator = float(pair.numerator), float(pair.denominator)
        if numerator > NORMAL and denominator > NORMAL:
            ratio = math.log(denominator) - math.log(numerator)
            yield f"numerator and denominator of pair ({i}, {j})", value, ratio, bound + PAIR_ULPS * u * abs(value)


def _gradient(what: str, expected: Matrix, found: Matrix | None, rows: Matrix) -> tuple[float, str]:
    """Return the largest ratio of a row's error to its bound, and a message about the first one above 1, or ""."""
    if found is None or found.shape != expected.shape:
        got = "none" if found is None else list(found.shape)
        return math.inf, f"{what}: expected shape {list(expected.shape)}, got {got}"
    if not np.isfinite(found).all():
        row = int(np.argmin(np.isfinite(found).all(axis=1)))
        return math.inf, f"{_of_row(what, row)}: expected finite numbers, got {found[row].tolist()}"
    errors = row_norms(found - expected)
    # The bound of a gradient that is 0 may be a subnormal number, or 0 if subnormal numbers are flushed.
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        ratios = np.where(errors == 0, 0.0, errors / rows)
    worst = float(ratios.max())
    if worst <= 1:
        return worst, ""
    row = int(np.argmax(ratios > 1))
    column = int(np.argmax(np.abs(found[row] - expected[row])))
    where, wanted, actual = _of_row(what, row), float(expected[row, column]), float(found[row, column])
    error = f"worst at column {column}, expected {wanted!r}, got {actual!r}"
    return worst, f"{where}: {error}; the row's error is {_times(float(ratios[row]))}"


def _products(what: str, expected: Matrix, found: Matrix, rows: Matrix) -> tuple[float, str]:
    """Compare the products of a gradient with ``formulas.factors``; return their largest ratio and a message, or "".

    The error of a product is at most the sum of the errors of the rows times their factors. Each term of a product is
    rounded once.
    """
    worst, text = 0.0, ""
    for k, (of_rows, right) in enumerate(zip(factors(len(rows)), expected, strict=True)):
        terms = of_rows[:, None] * found
        product = np.array([math.fsum(column) for column in terms.T.tolist()])
        bound = float(of_rows @ rows) + unit_roundoff("float64") * float(row_norms(terms).sum())
        error = math.hypot(*(product - right).tolist())
        ratio = error / bound if error else 0.0
        if ratio > 1 and not text:
            text = f"product {k} of the rows of the {what} with their factors: the error is {_times(ratio)}"
        worst = max(worst, ratio)
    return worst, text


def _of_row(what: str, row: int) -> str:
    return f"{what} of row {row}" if what == "gradient" else f"{what}, row {row}"
