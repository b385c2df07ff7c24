"""The terms of one pair, and the record of named terms that every loss returns together with its value.

A formula is built from four kinds of pairs: cross_entropy, cross_entropy_of_exponentials, cross_entropy_of_mass and
binary_cross_entropy. Each evaluates a pair and returns all its terms. The numerator and the denominator are stored
relative to ``e^shift`` and as logarithms, because at a temperature of 1e-3 the exponentials overflow or underflow in
float64.
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
"""One anchor's set of columns: A(i), P(i) or N(i), in ascending order."""


@dataclass(frozen=True)
class Pair:
    """One pair (anchor, other) and its contribution to the loss.

    The value is -log(numerator / denominator). For binary cross-entropy, this ratio is 1 / (1 + e^x), where x is -s_io
    for a positive and s_io for a negative: the numerator is e^-shift and the denominator (1 + e^x) e^-shift. For the
    other losses, s_io and s_ia below are the formula's logits, with the weights that dclw_loss and
    multiple_negatives_ranking_loss apply to them.

    Attributes:
        anchor: the anchor's row.
        other: the column of the other member: a row of the batch, of the references or of the other tower.
        positive: whether ``other`` is a positive of ``anchor``. Only binary cross-entropy has pairs of negatives.
        members: the columns whose exponentials are summed in the denominator; empty for binary cross-entropy.
        shift: numerator and denominator are stored divided by e^shift.
        numerator: e^(s_io - shift), plus epsilon in supcon_epsilon_loss.
        denominator: Σ over the members a of e^(s_ia - shift). In supcon_epsilon_loss, epsilon is added to each term;
            negative_weights multiply the terms of negatives. In hard_negative_loss, the terms of the negatives are
            replaced by M e^-shift, where M is an estimate of their sum.
        log_numerator: log(numerator) + shift.
        log_denominator: log(denominator) + shift.
        value: -log(numerator / denominator).
        weight: the factor of the value in the anchor's loss, before the division by the number or weight of its pairs;
            1 without positive_weights.
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
"""The result of a formula: the anchor's loss L_i, and the pairs that contribute to it."""


def cross_entropy(s: Row, i: int, p: int, members: Columns) -> Pair:
    """Return the pair with the value -log( e^s_ip / Σ_{a∈members} e^s_ia ), the cross-entropy of one positive."""
    top, rest = shifted_sum([s[a] for a in members])
    # The positive need not be one of the members, and its logit may be larger than all of theirs.
    shift = top if order(top) >= order(s[p]) else s[p]
    return Pair(
        anchor=i,
        other=p,
        positive=True,
        members=tuple(members),
        shift=shift,
        numerator=np.exp(s[p] - shift),
        denominator=np.exp(top - shift) * (1 + rest),
        log_numerator=s[p],
        log_denominator=top + np.log1p(rest),
        value=(top - s[p]) + np.log1p(rest),
    )


def cross_entropy_of_exponentials(e: Mapping[int, Scalar], i: int, p: int, members: Columns, *, shift: Scalar) -> Pair:
    """Return the pair with the value -log( e_ip / Σ_{a∈members} e_ia ); p is a member, and e is relative to e^shift."""
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
        # The denominator is e_ip (1 + rest / e_ip); log1p is accurate if the loss is small.
        value=np.log1p(rest / e[p]),
    )


def binary_cross_entropy(s: Row, i: int, j: int, *, positive: bool) -> Pair:
    """Return the pair with the value -log σ(s_ij) if positive, else -log(1 - σ(s_ij)); σ(x) = 1 / (1 + e^-x)."""
    x = -s[j] if positive else s[j]
    zero = zero_like(x)
    shift = x if order(x) > 0 else zero
    return Pair(
        anchor=i,
        other=j,
        positive=positive,
        members=(),
        shift=shift,
        numerator=np.exp(-shift),
        denominator=np.exp(-shift) + np.exp(x - shift),
        log_numerator=zero,
        log_denominator=softplus(x),
        value=softplus(x),
    )


def cross_entropy_of_mass(s: Row, i: int, p: int, N: Columns, log_ratio: Scalar | None) -> Pair:
    """Return the pair with the value -log( e^s_ip / (e^s_ip + M) ), where M replaces the sum of e^s over N.

    ``log_ratio`` is log(M / e^s_ip), or None if M is 0.
    """
    zero = zero_like(s[p])
    # Numerator and denominator are relative to the larger of e^s_ip and M.
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
    """The intermediate values of a loss, by name.

    Attributes:
        similarity: the cosine or dot product of every row that may be an anchor with every column: [N][N] within a
            batch, including the diagonal, [N][M] with references. For two towers, the rows are the anchors: those of
            the first tower, then those of the second (for one direction, only those of its tower). The columns are the
            rows of the other tower, then the negatives; zeros fill up shorter rows. For multiple_negatives_ranking with
            partition "joint", the columns are those of its argument ``ignored``.
        logits: similarity / temperature, plus the bias of sigmoid_loss; in the same shape.
        positives: for each row i the sorted columns P(i).
        negatives: for each row i the sorted columns N(i).
        pairs: the pairs that were summed, by (anchor, other).
        anchor_losses: by row, the value of every anchor times its weight and that of its direction,
            including the anchors that no_positive="drop" leaves out.
        counted: the anchors that enter the reduction, in row order.
        scale: the factor of every value: temperature / base_temperature, or 1.
        divisor: what a mean divides by: the number of its anchors or pairs, or the sum of their weights; 1 if it is 0.
            With direction_weights, each direction is divided by its own sum instead.
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

    ``loss`` is a scalar. For the reduction "none" it is a list with one value per counted anchor, in row order; for
    "none_pairs", with one value per pair.
    """

    loss: Any
    terms: Terms
