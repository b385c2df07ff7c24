"""The terms of one pair, and the record of terms that every loss returns with its value.

Formulas call cross_entropy, cross_entropy_of_exponentials, cross_entropy_of_mass or binary_cross_entropy for each pair.
Numerator and denominator are stored divided by ``e^shift``, and as logarithms. At a temperature of 1e-3, the
exponentials themselves would overflow or underflow in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .scalars import Scalar, order, shifted_sum, softplus, total, zero_like

Row = Sequence[Scalar]
"""One anchor's logits, s."""
Columns = Sequence[int]
"""A set of columns, A(i), P(i) or N(i), in ascending order."""


@dataclass(frozen=True)
class Pair:
    """One pair (anchor, other) and its contribution to the loss.

    Let i be the anchor, o the other column, and s the logits. dclw_loss and multiple_negatives_ranking_loss apply their
    weights to the logits first.

    In binary cross-entropy, numerator / denominator is 1 / (1 + e^x), where x is -s_io for a positive and s_io for a
    negative. ``members`` is then empty.

    Attributes:
        anchor: the anchor's row.
        other: a column: a row of the batch, of the references or of the other tower.
        positive: whether ``other`` is a positive of ``anchor``; False only in binary cross-entropy.
        members: the columns that the denominator sums over.
        shift: numerator and denominator are stored divided by e^shift.
        numerator: e^(s_io - shift), plus epsilon in supcon_epsilon_loss.
        denominator: Σ over the members a of e^(s_ia - shift). supcon_epsilon_loss adds epsilon to each term.
            negative_weights multiply the terms of negatives. hard_negative_loss replaces the sum over the negatives by
            M e^-shift, where M is an estimate of their sum.
        log_numerator: log(numerator) + shift.
        log_denominator: log(denominator) + shift.
        value: -log(numerator / denominator).
        weight: the weight of the positive, which multiplies the value in the anchor's loss; 1 without positive_weights.
    """

    anchor: int
    other: int
    positive: bool
    members: tuple[int, ...]
    shift: Scalar
    numerator: Scalar
    denominator: Scalar
    log_numerator: Scalar
    log_denominator: Scalar
    value: Scalar
    weight: Scalar = 1.0


Anchor = tuple[Scalar, list[Pair]]
"""The result of a formula: the loss L_i of the anchor, and its pairs."""


def cross_entropy(s: Row, i: int, p: int, members: Columns) -> Pair:
    """Return the pair with the value -log( e^s_ip / Σ_{a∈members} e^s_ia )."""
    top, rest = shifted_sum([s[a] for a in members])
    # If the positive is not a member, its logit may be larger than those of all members.
    shift = top if order(top) >= order(s[p]) else s[p]
    log_rest = np.log1p(rest)
    return Pair(
        anchor=i,
        other=p,
        positive=True,
        members=tuple(members),
        shift=shift,
        numerator=np.exp(s[p] - shift),
        denominator=np.exp(top - shift) * (1 + rest),
        log_numerator=s[p],
        log_denominator=top + log_rest,
        value=(top - s[p]) + log_rest,
    )


def cross_entropy_of_exponentials(e: Mapping[int, Scalar], i: int, p: int, members: Columns, *, shift: Scalar) -> Pair:
    """Return the pair with the value -log( e_ip / Σ_{a∈members} e_ia ).

    p is one of the members. The exponentials e are already divided by e^shift.
    """
    denominator = total(e[a] for a in members)
    rest = total((e[a] for a in members if a != p), start=zero_like(e[p]))
    return Pair(
        anchor=i,
        other=p,
        positive=True,
        members=tuple(members),
        shift=shift,
        numerator=e[p],
        denominator=denominator,
        log_numerator=shift + np.log(e[p]),
        log_denominator=shift + np.log(denominator),
        # The denominator is e_ip (1 + rest / e_ip). log1p is accurate for a small loss.
        value=np.log1p(rest / e[p]),
    )


def binary_cross_entropy(s: Row, i: int, j: int, *, positive: bool) -> Pair:
    """Return the pair with the value -log σ(s_ij) if positive, else -log(1 - σ(s_ij)); σ(x) = 1 / (1 + e^-x)."""
    x = -s[j] if positive else s[j]
    zero = zero_like(x)
    shift = x if order(x) > 0 else zero
    numerator, value = np.exp(-shift), softplus(x)
    return Pair(
        anchor=i,
        other=j,
        positive=positive,
        members=(),
        shift=shift,
        numerator=numerator,
        denominator=numerator + np.exp(x - shift),
        log_numerator=zero,
        log_denominator=value,
        value=value,
    )


def cross_entropy_of_mass(s: Row, i: int, p: int, N: Columns, log_ratio: Scalar | None) -> Pair:
    """Return the pair with the value -log( e^s_ip / (e^s_ip + M) ), where M replaces the sum of e^s over N.

    ``log_ratio`` is log(M / e^s_ip), or None if M is 0.
    """
    zero = zero_like(s[p])
    # Numerator and denominator are divided by the larger of e^s_ip and M.
    above = zero if log_ratio is None or order(log_ratio) <= 0 else log_ratio
    mass, value = (zero, zero) if log_ratio is None else (np.exp(log_ratio - above), softplus(log_ratio))
    return Pair(
        anchor=i,
        other=p,
        positive=True,
        members=tuple(sorted([p, *N])),
        shift=s[p] + above,
        numerator=np.exp(-above),
        denominator=np.exp(-above) + mass,
        log_numerator=s[p],
        log_denominator=s[p] + value,
        value=value,
    )


@dataclass(frozen=True)
class Terms:
    """The intermediate values of a loss.

    Rows and columns are those of the matrix of similarities:

    - one batch: [N][N], including the diagonal; with references, [N][M].
    - two towers: the rows are the anchors, those of the first tower before those of the second. The columns are the
      rows of the other tower, then the negatives. Shorter rows are filled with zeros.
    - multiple_negatives_ranking_loss with partition "joint": the columns are those of its argument ``ignored``.

    Attributes:
        similarity: the cosine or dot product of every row with every column.
        logits: similarity / temperature, plus the bias of sigmoid_loss.
        positives: for each row i, the sorted columns P(i).
        negatives: for each row i, the sorted columns N(i).
        pairs: the pairs of all anchors, by (anchor, other).
        anchor_losses: the value of every anchor, by row, multiplied by the weights of the anchor and of its direction.
            Anchors that no_positive="drop" leaves out are included.
        counted: the anchors that enter the reduction, in row order.
        scale: temperature / base_temperature, which multiplies every value, or 1.
        divisor: the divisor of a mean: the number of its anchors or pairs, or the sum of their weights. It is 1 if that
            is 0. With direction_weights, each direction is divided by its own sum instead.
    """

    similarity: list[list[Scalar]]
    logits: list[list[Scalar]]
    positives: list[list[int]]
    negatives: list[list[int]]
    pairs: dict[tuple[int, int], Pair]
    anchor_losses: dict[int, Scalar]
    counted: list[int]
    scale: Scalar
    divisor: Scalar


class Result(NamedTuple):
    """A loss and its terms: ``loss, terms = supcon_loss(...)``.

    ``loss`` is a scalar. With reduction "none", it is a list with one value per counted anchor, in row order. With
    "none_pairs", it is a list with one value per pair.
    """

    loss: Any
    terms: Terms
