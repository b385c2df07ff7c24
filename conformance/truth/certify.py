"""Certify results: prove that every result of a case is the float64 nearest to the true value.

The reference is evaluated in ball arithmetic: every number is an enclosure, an interval that contains the true value.
The precision is 128 bits, then 256, 512 and so on, until both ends of every enclosure round to the same float64.

An exact 0 is proved when its enclosure lies within 2^-1076 of 0. The nearest float64 is then 0.

The loops of the reference take minutes on cases whose ``Case.size`` is above ``LOOPS_UP_TO``. These cases, and those
with matrices that a formula gives, are proved in ``matrices.py`` if it knows their loss. Tests compare both.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from contextlib import suppress

import numpy as np
from flint import arb, arb_mat

from ..suite.cases import Case
from ..suite.formulas import factors, stored_rows_of
from ..suite.golden import stored_anchors
from ..suite.records import BY_CHOICE, NAN_LOSS, Expected, Matrix
from . import loops, matrices
from .intervals import PRECISION, precision
from .intervals import CertificationError as CertificationError
from .kinks import kink_of

PRECISIONS = (128, 256, 512, 1024, 2048, 4096, 8192)
"""Precisions in bits, tried in turn. An exact 0 needs about 1100 bits, and more if large numbers cancel."""

LOOPS_UP_TO = 258
"""Cases above this ``Case.size`` are proved with matrices, if ``matrices.py`` has the formula of their loss."""

ZERO = -1076
"""Numbers of magnitude at most 2^ZERO round to 0: half of the smallest positive float64 is 2^-1075."""


def certify(case: Case, *, gradient: bool = True, formulas: Collection[str] = ()) -> Expected:
    """Prove every result of a case.

    Args:
        case: the case.
        gradient: whether to prove the gradient too. If not, it is left out with the reason ``BY_CHOICE``.
        formulas: the names of the matrices that a formula gives: only a part of the results is proved (see
            ``Expected.products``).

    Returns:
        The results, each the float64 nearest to its true value.

    Raises:
        CertificationError: a result cannot be proved at the last precision, or two different candidates for a maximum
            are equal in float64.
    """
    left_out = NAN_LOSS if any(case.undefined_values()) else kink_of(case) or (None if gradient else BY_CHOICE)
    for bits in PRECISIONS[:-1]:
        with suppress(CertificationError):
            return _proved(case, bits, left_out, formulas)
    return _proved(case, PRECISIONS[-1], left_out, formulas)


def nearest(value: arb) -> float | None:
    """The float64 nearest to every number of an enclosure, or None if they round to different float64."""
    if not value.is_finite():
        return None
    # The ends of a ball are rounded outwards, so the working precision must be higher than that of the ball.
    with precision(max(PRECISION, value.bits() + 64)):
        if value.abs_upper() <= arb((1, ZERO)):
            return 0.0
        bounds = (value.lower(), value.upper())
    ends = []
    for end in bounds:
        mantissa, exponent = (int(x) for x in end.man_exp())
        if not ZERO <= mantissa.bit_length() + exponent <= 1024 or mantissa == 0:
            return None
        # Python rounds the quotient of integers once, also to subnormal numbers.
        ends.append(float(mantissa * 2**exponent) if exponent >= 0 else mantissa / 2**-exponent)
    return ends[0] + 0.0 if ends[0] == ends[1] else None


def _proved(case: Case, bits: int, left_out: str | None, formulas: Collection[str]) -> Expected:
    """Prove the results with this many bits, or raise a CertificationError that names the first unproved entry."""
    by = matrices if (formulas or case.size > LOOPS_UP_TO) and matrices.has_formula(case) else loops
    found = by.enclosures(case, bits, gradient=left_out is None)
    counted, undefined = stored_anchors(case, formulas), case.undefined()
    products = dict[str, Matrix]()

    def prove(value: arb, name: str) -> float:
        proved = nearest(value)
        if proved is None:
            raise CertificationError(f"{case.id}: {name} cannot be proved with {bits} bits")
        return proved

    def prove_rows(name: str, rows: Sequence[Sequence[arb]]) -> Matrix:
        by = "" if name == case.first else f" with respect to {name}"
        entry = "the gradient's entry [{}, {}]{}"
        if name in formulas:
            with precision(bits):
                whole = arb_mat(factors(len(rows)).tolist()) * arb_mat(rows)
            of = "product [{}, {}] of the gradient{}"
            products[name] = np.array(
                [[prove(x, of.format(k, d, by)) for d, x in enumerate(row)] for k, row in enumerate(whole.tolist())]
            )
            found = np.full((len(rows), len(rows[0])), np.nan)
            for i in stored_rows_of(case.matrices[name]):
                found[i] = [prove(x, entry.format(i, d, by)) for d, x in enumerate(rows[i])]
            return found
        return np.array([[prove(x, entry.format(i, d, by)) for d, x in enumerate(row)] for i, row in enumerate(rows)])

    anchors = {i: math.nan if i in undefined else prove(found.anchors[i], f"the value of anchor {i}") for i in counted}
    pairs = zip(case.undefined_values(), found.values, strict=True)
    values = [math.nan if undefined else prove(value, "the loss") for undefined, value in pairs]
    gradients = {name: prove_rows(name, rows) for name, rows in found.gradients.items()}
    loss = tuple(values) if case.separate else values[0]
    words = "the derivative with respect to the"
    of_temperature = prove(found.temperature_gradient, f"{words} temperature") if gradients else None
    biased = gradients and "bias" in case.entry.keywords
    of_bias = prove(found.bias_gradient, f"{words} bias") if biased else None
    first = gradients.pop(case.first, None)
    return Expected(loss, anchors, first, left_out, gradients, of_temperature, of_bias, products)
