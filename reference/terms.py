"""The record of named terms that every loss returns beside its value.

Numerators and denominators are kept relative to ``e^shift`` and as logarithms, because at a temperature of 1e-3 the
exponentials themselves leave the range of float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

Scalar = Any
"""A float, a complex, an array of either, or any object with the same arithmetic (a ball of ``python-flint``)."""


@dataclass(frozen=True)
class Pair:
    """One pair (anchor, other) and what it contributes.

    Attributes:
        anchor: row of the anchor.
        other: column of the other member (a row of the batch, of the references, of the other tower), a positive unless
            ``positive`` is false (binary cross-entropy also sums over the negatives).
        positive: whether ``other`` is a positive of ``anchor``.
        members: the columns whose exponentials the denominator sums (empty for binary cross-entropy).
        shift: the logit by which numerator and denominator are scaled.
        numerator: e^(s_io - shift); ``log_numerator`` is s_io itself.
        denominator: sum over the members a of e^(s_ia - shift); ``log_denominator`` is its logarithm plus ``shift``.
        value: -log(numerator / denominator), or the pair's softplus for binary cross-entropy.
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


@dataclass(frozen=True)
class Terms:
    """Everything a loss is made of, by name.

    Attributes:
        similarity: cosine or dot product of every row that may be an anchor with every row that anchors are contrasted
            with: [N][N] within a batch (the diagonal too), [N][M] with references. For info_nce the rows are the first
            tower's and then the second's (those of one direction alone, if it is asked for), the columns the N rows of
            the other tower and then the K negatives.
        logits: of the same shape, similarity / temperature.
        positives: for each row i the sorted columns P(i).
        negatives: for each row i the sorted columns N(i).
        pairs: the pairs that were summed, by (anchor, other).
        anchor_losses: the value of every anchor, by row, before the policy for lonely anchors drops any.
        counted: the anchors that enter the mean, in row order.
        scale: what every value was multiplied by: temperature / base_temperature, or 1.
    """

    similarity: list[list[Scalar]]
    logits: list[list[Scalar]]
    positives: list[list[int]]
    negatives: list[list[int]]
    pairs: dict[tuple[int, int], Pair]
    anchor_losses: dict[int, Scalar]
    counted: list[int]
    scale: Scalar


class Result(NamedTuple):
    """A loss and its terms: ``loss, terms = supcon_loss(...)``.

    ``loss`` is a scalar, or for ``reduction="none"`` a list with one value per counted anchor, in row order.
    """

    loss: Any
    terms: Terms
