"""The only home of tolerances: how far a right implementation may be from the truth, and why.

Nothing here was raised until a test passed; every bound is the unit roundoff of the dtype that accumulates, times the
conditioning of the case (taken from the certified terms), times a count of operations, plus one rounding of what is
returned.

*Similarities.* A dot product of D products carries an error of at most about D u times the sum of its absolute
products, a_ij; for rows brought to norm 1 that sum is at most 1, and norm and division add a few more roundings. The
random walk of rounding errors makes the square root of D the honest figure: SIMILARITY_ULPS + sqrt(D) units u of a_ij.

*The loss.* To first order an error in s_ij moves the loss by its derivative, so the loss inherits the sum over all
pairs of |dL/ds_ij| a_ij. On top come its own operations: exponentials, a sum of at most N of them and a logarithm, each
relative to quantities of size 1 per anchor (a logarithm of a sum relative to its largest term), and the subtraction of
terms as large as the loss.

The batch tutorial's loss takes logarithms of exponentials plus epsilon, each up to -log(epsilon) in size, and
subtracts them: its own operations are rounded relative to that.

*The gradient.* Row i is a sum over j of weights V_ij = dL/dS_ij + dL/dS_ji times rows, divided by the row's norm. A
weight is a softmax entry minus a share of 1/|P|: exponentials amplify a logit's error by 1/temperature, and the
difference keeps an absolute error of one unit of the share. The bound sums both over the row.

Peers are held to these bounds. ``fast`` is held to more: never worse than twice what the straightforward torch
implementation (``plain.py``) attains in the same dtype, with a floor of a few units in the last place. ``pairproof
verify`` prints how the ratios of error to bound are distributed, so that slack is visible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pairproof.reference.supcon import EPSILON

from .cases import SIGNIFICAND, Case
from .oracle import Truth

if TYPE_CHECKING:
    from .compare import Outcome

SIMILARITY_ULPS = 3.0
"""Roundings in a similarity beyond its sum: two norms, two divisions, the temperature, in units of u."""

LOSS_ULPS = 2.0
"""Roundings of exponential, sum and logarithm, in units of u per anchor."""

GRADIENT_ULPS = 4.0
"""Roundings of a weight and of the sum over rows, the backward pass of the norm included, in units of u."""

FLOOR_ULPS = 4.0
"""Units in the last place of a similarity that are always allowed, however lucky the straightforward road was."""

SMALLEST_SUBNORMAL = {"float64": 2.0**-1074, "float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}


def unit_roundoff(dtype: str) -> float:
    """Half the distance from 1 to the next number of the dtype."""
    return 2.0 ** -SIGNIFICAND[dtype]


def accumulating(dtype: str) -> str:
    """The dtype in which sums are held at least: float32 for the halves."""
    return "float64" if dtype == "float64" else "float32"


@dataclass(frozen=True)
class Bounds:
    """How far each quantity may be off: one number per value, anchor and row of the gradient.

    ``rows`` bounds the Euclidean norm of each row's error; the norm of the whole error is bounded by the norm of
    ``rows``. ``share_of_floor`` is how much of each bound no luck takes away; see ``held_to``.
    """

    values: list[float]
    anchors: dict[int, float]
    rows: npt.NDArray[np.float64]
    share_of_floor: float
    similarity: npt.NDArray[np.float64]


def bounds(case: Case, truth: Truth, dtype: str) -> Bounds:
    """The bounds of a case in a dtype.

    Args:
        case: the case.
        truth: its certified results.
        dtype: of the inputs and of the gradient; the loss is returned in the accumulating dtype.
    """
    with np.errstate(over="ignore"):  # a bound beyond the range of float64 is no bound, and said so by inf
        return _bounds(case, truth, dtype)


def _bounds(case: Case, truth: Truth, dtype: str) -> Bounds:
    u = unit_roundoff(accumulating(dtype))
    tiny = SMALLEST_SUBNORMAL[accumulating(dtype)]
    z = np.abs(case.embeddings)
    n, dim = z.shape
    temperature = float(case.option("temperature"))
    cosine = case.option("similarity") == "cosine"
    norms = np.array([math.hypot(*row) for row in z])
    products = np.ones((n, n)) if cosine else z @ z.T
    per_similarity = u * (SIMILARITY_ULPS + math.sqrt(dim)) * products

    base = case.option("base_temperature")
    scale = 1.0 if base is None else temperature / base
    anchors = case.anchors()
    divisor = _divisor(case, anchors)
    inherited = float(np.sum(np.abs(truth.weights) * per_similarity))
    own = u * LOSS_ULPS * scale * (1 + 2 * math.log(1 / EPSILON) if case.loss == "supcon_epsilon" else 1)

    def of_value(value: float, inherited: float, share: float) -> float:
        return inherited + own * share + 2 * u * abs(value) + tiny

    row_inherited = np.sum(np.abs(truth.weights) * per_similarity, axis=1) * divisor
    anchor_bounds = {i: of_value(v, float(row_inherited[i]), 1.0) for i, v in truth.anchors.items()}
    if isinstance(truth.loss, list):
        values = [anchor_bounds[i] for i in case.counted()]
    else:
        values = [of_value(truth.loss, inherited, len(anchors) / divisor)]

    lengths = np.ones(n) if cosine else norms
    weights = np.abs(truth.weights) + np.abs(truth.weights).T
    share = scale / (temperature * divisor)
    is_anchor = np.array([i in anchors for i in range(n)], dtype=float)
    uncancelled = weights @ lengths + share * (is_anchor * lengths.max() + float(is_anchor.sum()) * lengths.max() / n)
    amplified = GRADIENT_ULPS + (SIMILARITY_ULPS + math.sqrt(dim)) * products.max(axis=1) / temperature
    rows = u * amplified * uncancelled
    if cosine:
        rows = rows / norms
    if truth.gradient is not None:
        # One rounding to the returned dtype, entry by entry.
        rounding = unit_roundoff(dtype) * np.linalg.norm(truth.gradient, axis=1)
        rows = rows + rounding + SMALLEST_SUBNORMAL[dtype] * math.sqrt(dim)
    share = FLOOR_ULPS / (SIMILARITY_ULPS + math.sqrt(dim))
    return Bounds(values, anchor_bounds, rows, min(share, 1.0), per_similarity)


def held_to(allowed: Bounds, truth: Truth, plain: Outcome) -> Bounds:
    """The bounds, drawn in to twice what the straightforward implementation attains in the same dtype.

    It is sometimes exact by luck, so no bound falls below what FLOOR_ULPS units in the last place of every similarity
    make of it: a similarity's two rows are rounded, and so are their product and its quotient by the temperature.
    Where the straightforward implementation fails altogether the bounds stay as they are.

    Args:
        allowed: the a-priori bounds.
        truth: the certified results.
        plain: what the straightforward implementation gave in the same dtype.
    """

    def drawn_in(bound: float, expected: float, found: float) -> float:
        twice = 2 * abs(found - expected)
        return min(bound, max(twice, allowed.share_of_floor * bound)) if math.isfinite(twice) else bound

    anchors = plain.anchors or {}
    rows = allowed.rows
    if truth.gradient is not None and plain.gradient is not None:
        with np.errstate(invalid="ignore"):
            twice = 2 * np.linalg.norm(plain.gradient - truth.gradient, axis=1)
        rows = np.where(np.isfinite(twice), np.minimum(rows, np.maximum(twice, allowed.share_of_floor * rows)), rows)
    return Bounds(
        values=[drawn_in(b, e, f) for b, e, f in zip(allowed.values, truth.values, plain.values, strict=True)],
        anchors={i: drawn_in(b, truth.anchors[i], anchors.get(i, math.nan)) for i, b in allowed.anchors.items()},
        rows=rows,
        share_of_floor=allowed.share_of_floor,
        similarity=allowed.similarity,
    )


def _divisor(case: Case, anchors: list[int]) -> float:
    """By how much the reduction divides each anchor's contribution."""
    reduction = case.option("reduction")
    if reduction == "mean":
        return float(max(len(case.counted()), 1))
    if reduction == "mean_pairs":
        positives = case.positives()
        return float(max(sum(len(positives[i]) for i in anchors) / max(len(anchors), 1), 1))
    return 1.0
