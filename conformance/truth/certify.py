"""Certify results: prove that every result of a case is the float64 nearest to the true value.

The reference is evaluated in ball arithmetic: every number is an enclosure, an interval that contains the true value.
The precision is 128 bits, then 256, 512 and so on, until both ends of every enclosure round to the same float64.

An exact 0 is proved when its enclosure lies within 2^-1076 of 0. The nearest float64 is then 0.

The reference takes minutes on cases whose ``Case.size`` is above ``LOOPS_UP_TO``. They are proved with the closed form
of their loss in ``closed.py``, if there is one. Tests compare both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction

import numpy as np
from flint import arb

from ..suite.cases import Case
from ..suite.records import BY_CHOICE, FLOOR, NAN_LOSS, TIE, Expected, Matrix
from .closed import closed_form
from .evaluate import CertificationError as CertificationError
from .evaluate import enclosures
from .intervals import PRECISION, precision

PRECISIONS = (128, 256, 512, 1024, 2048, 4096, 8192)
"""Precisions in bits, tried in turn. An exact 0 needs about 1100 bits, and more if large numbers cancel."""

LOOPS_UP_TO = 258
"""Cases above this ``Case.size`` are proved with the closed form of the loss, if there is one."""

ZERO = -1076
"""Numbers of magnitude at most 2^ZERO round to 0: half of the smallest positive float64 is 2^-1075."""


def certify(case: Case, *, gradient: bool = True) -> Expected:
    """Prove every result of a case.

    Args:
        case: the case.
        gradient: whether to prove the gradient too. If not, it is left out with the reason ``BY_CHOICE``.

    Returns:
        The results, each the float64 nearest to its true value.

    Raises:
        CertificationError: a result cannot be proved at the last precision, or two different candidates for a maximum
            are equal in float64.
    """
    left_out = NAN_LOSS if any(case.undefined_values()) else kink_of(case) or (None if gradient else BY_CHOICE)
    for bits in PRECISIONS[:-1]:
        with suppress(CertificationError):
            return _proved(case, bits, left_out)
    return _proved(case, PRECISIONS[-1], left_out)


def kink_of(case: Case) -> str | None:
    """The reason for leaving out the gradient if the loss has a kink at the case, or None."""
    return (FLOOR if case.entry.form == "mass" else TIE) if maximum_is_tied(case) else None


def maximum_is_tied(case: Case) -> bool:
    """Whether the loss has a kink at the case, because two arguments of a maximum are equal.

    * ``supcon_epsilon``: the largest dot product of an anchor's row may occur twice. Under cosine, the maximum is
      always 1 (the self-similarity), so there is no kink.
    * ``hard_negative``: the mass of an anchor's negatives (M in its formula) may be equal to its floor.

    Raises:
        CertificationError: the reference, which compares in float64, would choose the wrong maximum.
    """
    if case.entry.form == "mass":
        return floor_is_reached(case)
    if not case.entry.epsilon:
        return False
    # Exact products of the rows as integers, in units of 1 / scale^2.
    scale = max(x.as_integer_ratio()[1] for x in case.embeddings.ravel().tolist())
    rows = np.array([[int(Fraction(x) * scale) for x in row] for row in case.embeddings.tolist()], dtype=object)
    products: list[list[int]] = (rows @ rows.T).tolist()
    positives, members = case.positives(), case.members()
    tied = False
    for i in (i for i in case.anchors() if positives[i]):
        if case.option("similarity") == "cosine":
            for j in members[i]:
                # A cosine whose square is at most 1 - 2^-51 rounds to less than 1.
                most = products[i][i] * products[j][j]
                if products[i][j] > 0 and most * (2**51 - 1) < products[i][j] ** 2 * 2**51 != most * 2**51:
                    raise CertificationError(f"{case.id}: rows {i} and {j} are too close to parallel")
            continue
        compared = sorted([i, *members[i]])
        top = max(products[i][j] for j in compared)
        largest = [j for j in compared if products[i][j] == top]
        rounded = [j for j in compared if products[i][j] / scale**2 == top / scale**2]
        if largest != rounded:
            raise CertificationError(f"{case.id}: the largest products of row {i} are equal in float64")
        tied = tied or len(largest) > 1
    return tied


def floor_is_reached(case: Case) -> bool:
    """Whether the mass of an anchor's negatives is equal to its floor.

    By the Lindemann-Weierstrass theorem, two sums of rational numbers times exponentials of algebraic numbers are equal
    only if they have the same terms. Equality therefore requires that all negatives are opposite to the anchor. Unless
    tau_plus is 0, the positive must be opposite too.
    """

    def exact(matrix: Matrix) -> list[list[Fraction]]:
        return [list(map(Fraction, row)) for row in matrix.tolist()]

    def product(x: Sequence[Fraction], y: Sequence[Fraction]) -> Fraction:
        return sum((a * b for a, b in zip(x, y, strict=True)), Fraction(0))

    rows = exact(case.embeddings)
    columns = exact(case.others["ref_embeddings"]) if "ref_embeddings" in case.others else rows

    def opposite(i: int, k: int) -> bool:
        found = product(rows[i], columns[k])
        return found < 0 and found**2 == product(rows[i], rows[i]) * product(columns[k], columns[k])

    def reached(i: int) -> bool:
        (p,) = case.positives()[i]
        negatives = [k for k in case.members()[i] if k != p]
        return (
            bool(negatives)
            and all(opposite(i, k) for k in negatives)
            and (not case.option("tau_plus") or opposite(i, p))
        )

    return any(map(reached, case.anchors()))


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


def _proved(case: Case, bits: int, left_out: str | None) -> Expected:
    """Prove the results with this many bits, or raise a CertificationError that names the first unproved entry."""
    form = closed_form(case) if case.size > LOOPS_UP_TO else None
    found = enclosures(case, bits, gradient=left_out is None, form=form)
    counted, undefined = case.counted(), case.undefined()

    def prove(value: arb, name: str) -> float:
        proved = nearest(value)
        if proved is None:
            raise CertificationError(f"{case.id}: {name} cannot be proved with {bits} bits")
        return proved

    def prove_rows(name: str, rows: Sequence[Sequence[arb]]) -> Matrix:
        by = "" if name == case.first else f" with respect to {name}"
        entry = "the gradient's entry [{}, {}]{}"
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
    return Expected(loss, anchors, gradients.pop(case.first, None), left_out, gradients, of_temperature, of_bias)
