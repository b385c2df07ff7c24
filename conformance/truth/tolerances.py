"""Tolerances: how far a correct implementation may be from the truth. All tolerances are defined here.

``docs/tolerances.md`` derives the bounds, which hold on every machine: no rounding error is measured.

*The bounds of a case* come from the straightforward torch implementation (``baseline.py``), evaluated in float64 with
tensors that carry bounds on the rounding errors of the accumulating dtype (``rounding.py``):

- A *value* has two errors. Its own operations, from the logits on, make the first. The second is inherited: the sum
  over its logits of the error of the logit times the derivative of the value with respect to it. A logit that is both
  in the numerator and in the denominator has one error, so the derivative includes the cancellation.
  The two sums over the negatives in ``hard_negative`` may come from separate products, so nothing cancels there. Nor
  does it where logits have errors above FIRST_ORDER.
- A *row of the gradient* has the errors of all operations, forward and backward.

Golden cases store these bounds, because evaluating them takes longer than the judged implementations.

*Narrowed weights.* Fused kernels for bfloat16 and float16 compute the derivatives with respect to the similarities in
float32 and round them once to the dtype of the rows, because tensor cores multiply numbers of one dtype. This applies
to implementations that declare ``narrows_weights``. A subnormal weight in float16 has an error of up to half the
smallest subnormal number. The kernels therefore scale the largest upstream gradient to between 1 and 2, and multiply
weights by WEIGHTS_LIFTED before rounding.

*Wider sums.* An implementation that declares ``computes_in`` float64 converts narrower rows to float64 and rounds its
results. Its bounds are those of float64, plus one rounding of the loss to the accumulating dtype and of the gradient to
the dtype of the rows. These bounds distinguish ``backend="exact"`` from the other backends.

*Levels.* Below the level "digits", ``pairproof check`` accepts FORMULA_TIMES the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import numpy as np

from ..suite.cases import SIGNIFICAND, Case, once, once_for_similarities, row_norms
from ..suite.golden import known_rounding
from ..suite.records import Bounds, Matrix, Rounding, Truth

if TYPE_CHECKING:
    from torch import Tensor

    from .rounding import Arithmetic, Bounded

P = ParamSpec("P")
R = TypeVar("R")

FORMULA_TIMES = 2.0
"""Largest error at levels below "digits", in units of the bound.

Similarities in TF32 of 256 x 768 numbers must exceed it: they have errors of up to 2.8 times the bound."""

FIRST_ORDER = 0.1
"""Largest error of a logit for which the value inherits only the derivatives times the errors of the logits."""

SMALLEST_SUBNORMAL = {
    "float64": math.ldexp(1.0, -1074),
    "float32": 2.0**-149,
    "float16": 2.0**-24,
    "bfloat16": 2.0**-133,
}

SMALLEST_NORMAL = {"float64": 2.0**-1022, "float32": 2.0**-126}

WEIGHTS_LIFTED = {"bfloat16": 1.0, "float16": 2.0**12}
"""The factor by which weights are scaled before they are rounded to a dtype."""


def unit_roundoff(dtype: str) -> float:
    """Half the distance from 1 to the next number of the dtype."""
    return 2.0 ** -SIGNIFICAND[dtype]


def lost(dtype: str) -> float:
    """The error of a result that underflows: the smallest subnormal number of the dtype.

    It is the smallest normal number if the process flushes denormals to 0; only float64 and float32 are flushed.
    """
    if dtype in SMALLEST_NORMAL and SMALLEST_NORMAL["float64"] / 2 == 0.0:
        return SMALLEST_NORMAL[dtype]
    return SMALLEST_SUBNORMAL[dtype]


def accumulating(dtype: str) -> str:
    """The accumulating dtype: float64 for float64, float32 for all narrower dtypes."""
    return "float64" if dtype == "float64" else "float32"


def bounds(case: Case, truth: Truth, dtype: str, *, narrowed: bool = False) -> Bounds:
    """The bounds of a case.

    Args:
        case: the case.
        truth: its true results.
        dtype: dtype of the inputs and the gradient. The loss has the accumulating dtype.
        narrowed: whether bfloat16 and float16 apply to the derivatives with respect to the similarities.
    """
    to = dtype if narrowed and dtype in WEIGHTS_LIFTED else ""
    return with_rounded_gradient(accumulated_bounds(case, truth, accumulating(dtype), to), truth, dtype)


def rounding_of(case: Case, dtype: str, narrowed: str = "") -> tuple[Rounding, float]:
    """The rounding errors of a case, and the factor that converts them to an accumulating dtype.

    Unless some errors are large, they are proportional to the unit roundoff, and are evaluated once for all dtypes.
    """
    known = known_rounding(case)
    for name in ("float32", dtype):
        if (name, narrowed) not in known:
            known[name, narrowed] = evaluated_rounding(case, name, narrowed)
        if known[name, narrowed].linear:
            break
    return known[name, narrowed], unit_roundoff(dtype) / unit_roundoff(name)


def _with_rules(function: Callable[P, R]) -> Callable[P, R]:
    """Apply the rules for rounding errors inside a function."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        from .rounding import Rules

        with Rules():  # type: ignore[no-untyped-call]
            return function(*args, **kwargs)

    return run


@_with_rules
def evaluated_rounding(case: Case, dtype: str, narrowed: str = "") -> Rounding:
    """Evaluate the rounding errors of a case in an accumulating dtype.

    If ``narrowed`` is a dtype, the derivatives with respect to the similarities are rounded to it.
    """
    import torch

    from .baseline import anchor_values, logits_of, pair_values, reduced, similarities
    from .rounding import Arithmetic, Bounded, error_of, value_of

    arithmetic = Arithmetic(unit_roundoff(dtype))
    given, exponents = _scaled_rows(case, arithmetic)
    s = similarities(case, given)
    s.register_hook(partial(_other_order, case, narrowed))  # type: ignore[no-untyped-call]
    logits = logits_of(case, s)
    total, of_all = reduced(case, s, logits)
    rows = {name: np.zeros(len(matrix)) for name, matrix in case.matrices.items()}
    if total.requires_grad:
        gradients = torch.autograd.grad(total.sum(), list(given.values()), materialize_grads=True)
        for name, gradient in zip(given, gradients, strict=True):
            rows[name] = np.ldexp(row_norms(error_of(gradient).numpy()), exponents[name])

    def inherited(given: Tensor, errors: Tensor, values_of: Callable[[Tensor], Tensor]) -> Matrix:
        """For each row of logits, the sum over its logits of their errors times the derivatives of the row's value."""
        given = given.clone().requires_grad_()
        found = values_of(given)
        slopes = torch.autograd.grad(found.sum(), given)[0] if found.requires_grad else torch.zeros_like(given)
        return np.asarray((slopes.abs() * errors).nan_to_num(nan=0.0).sum(dim=1))

    def found(of_loss: Tensor | Matrix, of_anchors: Matrix) -> Rounding:
        anchors = dict(zip(counted, of_anchors.tolist(), strict=True))
        return Rounding(np.asarray(of_loss).reshape(-1), anchors, rows, arithmetic.linear)

    with torch.no_grad():
        z, errors, similarity = value_of(logits), error_of(logits), value_of(s)
        # Without the errors of the logits; but a logit that is 0 by chance keeps an error, so that it counts in sums.
        loss, values = reduced(case, s.detach(), Bounded(z, errors * 1e-30, arithmetic))
    counted, scale = case.counted(), _scale(case)
    if case.form == "mass" or float(errors.max()) > FIRST_ORDER:
        return found(error_of(total).detach(), error_of(of_all).detach().numpy())
    of_anchors, of_loss = error_of(values).numpy(), error_of(loss).reshape(-1).numpy()
    moved = inherited(z, errors, lambda z: anchor_values(case, z, similarity))
    moved = moved * (scale * np.array(case.anchor_weights()))
    of_anchors = of_anchors + moved[counted]
    if case.option("reduction") == "none_pairs":
        chosen = [i for i, _ in case.pairs()]
        of_loss = of_loss + scale * inherited(z[chosen], errors[chosen], lambda z: pair_values(case, z))
    elif case.separate:
        of_loss = of_anchors
    else:
        of_loss = of_loss + float((shares_of(case) * moved)[counted].sum())
    return found(of_loss, of_anchors)


def accumulated_bounds(case: Case, truth: Truth, dtype: str, narrowed: str = "") -> Bounds:
    """The bounds of a case in the accumulating ``dtype``, before the gradient is rounded to the dtype of the rows.

    If ``narrowed`` is a dtype, the derivatives with respect to the similarities are rounded to it.
    """
    u, tiny, (found, factor) = unit_roundoff(dtype), lost(dtype), rounding_of(case, dtype, narrowed)
    # The effect of results that underflow: products and exponentials.
    cosine, number = case.option("similarity") == "cosine", sum(case.shape) * case.embeddings.shape[1]
    norms = {name: row_norms(matrix) for name, matrix in case.matrices.items()}
    longest = 1.0 if cosine else max(float(norm.max()) for norm in norms.values())
    steepest: float = number * (1 + _scale(case) / case.temperature) / (case.entry.epsilon or 1.0)
    # A subnormal exponential may have lost all digits.
    most = SMALLEST_NORMAL[dtype] * steepest * longest
    underflow = {name: most / np.where(norm * cosine, norm, 1.0) for name, norm in norms.items()}

    def of_value(error: float, value: float) -> float:
        return factor * error + 2 * u * abs(value) + tiny * steepest

    return Bounds(
        values=[of_value(error, value) for error, value in zip(found.values.tolist(), truth.values, strict=True)],
        anchors={i: of_value(found.anchors.get(i, 0.0), value) for i, value in truth.anchors.items()},
        rows={name: factor * rows + underflow[name] for name, rows in found.rows.items()},
        similarity=partial(_similarity_bounds, case, dtype),
    )


@once_for_similarities
@_with_rules
def _similarity_bounds(case: Case, dtype: str) -> Matrix:
    from .baseline import similarities
    from .rounding import Arithmetic, error_of

    given, _ = _scaled_rows(case, Arithmetic(unit_roundoff(dtype)))
    errors = error_of(similarities(case, given)).detach().numpy()
    return np.asarray(errors + lost(dtype) * sum(case.shape) * case.embeddings.shape[1])


def _other_order(case: Case, narrowed: str, slopes: Bounded) -> Bounded:
    """Add the errors of other ways to compute the derivatives with respect to the similarities.

    In a cross-entropy, the derivatives of a row add up to 0. Those of its positives may be computed from the others.
    """
    import torch

    from .rounding import Bounded

    size, error = slopes.value.abs(), slopes.error
    if case.entry.form not in ("binary", "sigmoid"):
        positive = torch.from_numpy(case.positive_array() & case.member_array())
        own = (size + error).where(positive, 0.0)  # a derivative that is 0 by chance has an error
        share = (own / own.sum(dim=1, keepdim=True)).nan_to_num(nan=0.0)
        error = error + share * error.where(~positive, 0.0).sum(dim=1, keepdim=True)
    if narrowed:
        largest = _scale(case) / case.temperature * max(map(abs, (shares_of(case) * case.anchor_weights()).tolist()))
        error = error + unit_roundoff(narrowed) * size
        error += largest * SMALLEST_SUBNORMAL[narrowed] / (2 * WEIGHTS_LIFTED[narrowed])
    return Bounded(slopes.value, error, slopes.arithmetic)


@_with_rules
def scalar_bounds(case: Case, dtype: str) -> tuple[float, float]:
    """The bounds on the derivatives with respect to the temperature and to the bias, which is 0 without a bias."""
    import torch

    from .baseline import logits_of, reduced, similarities
    from .rounding import Arithmetic, Bounded, error_of, value_of

    arithmetic = Arithmetic(unit_roundoff(accumulating(dtype)))
    given, _ = _scaled_rows(case, arithmetic)
    numbers = (torch.tensor(x, dtype=torch.float64) for x in (case.temperature, case.bias))
    temperature, bias = scalars = [Bounded(x, arithmetic.u * x.abs(), arithmetic).requires_grad_() for x in numbers]
    s = similarities(case, given)
    loss, _ = reduced(case, s, logits_of(case, s, temperature, bias), temperature)
    if not loss.requires_grad:
        return 0.0, 0.0
    found = torch.autograd.grad(loss.sum(), scalars, materialize_grads=True)
    tiny = lost(accumulating(dtype))
    of_temperature, of_bias = (float(error_of(x) + arithmetic.u * value_of(x).abs()) + tiny for x in found)
    return of_temperature, of_bias


def _scaled_rows(case: Case, arithmetic: Arithmetic) -> tuple[dict[str, Tensor], dict[str, Matrix]]:
    """The matrices of a case, without errors, and the exponents of the powers of two by which rows are multiplied.

    Under cosine, the largest entry of each row is scaled to between 1 and 2, so that no norm overflows.
    """
    import torch

    from .rounding import Bounded

    cosine = case.option("similarity") == "cosine"
    given, exponents = dict[str, torch.Tensor](), dict[str, Matrix]()
    for name, matrix in case.matrices.items():
        exponents[name] = (1 - np.frexp(np.abs(matrix).max(axis=1))[1]) * int(cosine)
        rows = torch.from_numpy(np.ldexp(matrix, exponents[name][:, None]))
        given[name] = Bounded(rows, torch.zeros_like(rows), arithmetic).requires_grad_()
    return given, exponents


def _scale(case: Case) -> float:
    """The factor temperature / base_temperature of the loss."""
    base = case.option("base_temperature")
    return 1.0 if base is None else case.temperature / float(base)


@once
def shares_of(case: Case) -> Matrix:
    """[R], the derivative of the loss with respect to the value of each row, if the row is an anchor that counts.

    The value is a mean over pairs, so a reduction over pairs counts it once for each pair. In the sigmoid loss, it is a
    sum over pairs and is counted once.
    """
    found = np.ones(case.shape[0])
    if case.over_pairs and case.form != "sigmoid":
        found = np.array(case.pair_numbers())
    found /= np.array(case.divisors())
    return found


def rounded_once(computed: Bounds, truth: Truth, dtype: str) -> Bounds:
    """The bounds of an implementation that computes in a wider dtype and rounds its results once.

    ``computed`` are its bounds in the wider dtype. ``dtype`` is that of the inputs and the gradient; the loss has the
    accumulating dtype.
    """
    u, tiny = unit_roundoff(accumulating(dtype)), lost(accumulating(dtype))
    rounded = computed.map_values(lambda bound, expected: bound + u * np.abs(expected) + tiny, truth)
    return with_rounded_gradient(rounded, truth, dtype)


@np.errstate(over="ignore")
def with_rounded_gradient(computed: Bounds, truth: Truth, dtype: str) -> Bounds:
    """Add one rounding of every entry of the gradients to the bounds."""
    u, tiny = unit_roundoff(dtype), lost(dtype)
    return computed.map_rows(lambda rows, found: rows + u * row_norms(found) + tiny * math.sqrt(found.shape[1]), truth)


def formula_bounds(allowed: Bounds) -> Bounds:
    """The bounds at levels below "digits"."""
    return allowed.times(FORMULA_TIMES)
