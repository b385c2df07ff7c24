"""Kinks: cases at which a loss has no gradient, because two arguments of a maximum are equal."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from ..suite.cases import Case, once, unit_rows
from ..suite.records import FLOOR, TIE, Matrix
from .intervals import CertificationError


@once
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
    integers = [[int(Fraction(x) * scale) for x in row] for row in case.embeddings.tolist()]
    largest_product = max(sum(x * x for x in row) for row in integers)
    rows = np.array(integers, dtype=np.int64 if largest_product < 2**63 else object)
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
    if not _nearly_opposite(case):
        return False

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


def _nearly_opposite(case: Case) -> bool:
    """Whether the cosine of two rows is below -0.999, so that they may be opposite."""
    unit = case.mapped(unit_rows).matrices
    return any((unit[block.left] @ unit[block.right].T).min() < -0.999 for block in case.blocks())
