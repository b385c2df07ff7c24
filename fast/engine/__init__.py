"""The engine: per-anchor values of a described loss, and their gradient.

A loss checks its arguments, describes its pairs (`SameLabel`, `PositiveMask`, `Partners`, `PairList`) and its formula
(`Rule`), asks `anchor_values`, then applies its policies and its reduction. How the values are evaluated is decided
here and nowhere else; there is one way so far, `dense`, which holds a few N x N matrices.

The range that is guaranteed, for temperatures from 1e-3 to 1e3 ("range" is that of the float dtypes, subnormal numbers
included unless they are being flushed):

- The computing dtype is float64, whatever the embeddings' dtype, so neither autocast nor TF32 reaches it. Where a
  device has no float64 it is float32, and what is said of float64 embeddings below holds with float32's range.
- float32, bfloat16, float16 embeddings: value and gradient are finite, and no entry of the gradient is rounded to zero,
  wherever the true one and the logits lie within the range of the returned dtype (under "dot", of float32).
- float64 embeddings: the same, with three limits. An entry of a row more than 2^900 times smaller than the row's
  largest may count as zero. So may, under "dot", a product of two entries more than 2^900 times smaller than the
  product of their rows' largest. So may, within one row of the gradient, a contribution more than 2^1800 times smaller
  than the row's largest, or than 1 where an anchor has several positives.
- Rounding remains rounding. Contributions to one entry that cancel to less than about 2^-50 of the largest leave no
  correct digit, and may leave zero: rows whose directions differ by less than 2^-53, rows that are each other's copies
  under opposite labels, upstream gradients of very different size.
- The second derivative is correct where its own terms neither overflow nor underflow; it is not scaled row by row.
"""

from __future__ import annotations

from torch import Tensor

from . import dense
from .description import (
    AnchorValues,
    Denominator,
    PairList,
    Pairs,
    Partners,
    PositiveMask,
    Rule,
    SameLabel,
    Similarity,
    Terms,
)

__all__ = [
    "AnchorValues",
    "Denominator",
    "PairList",
    "Pairs",
    "Partners",
    "PositiveMask",
    "Rule",
    "SameLabel",
    "Similarity",
    "Terms",
    "anchor_values",
]


def anchor_values(embeddings: Tensor, pairs: Pairs, rule: Rule, *, anchors: Tensor | None = None) -> AnchorValues:
    """Evaluate one value per anchor, differentiable with respect to the embeddings.

    Args:
        embeddings: floating ``[N, D]``, already checked.
        pairs: which pairs are positive.
        rule: the formula.
        anchors: bool ``[N]``, the rows that are anchors; all of them when None.

    Returns:
        Values in the computing dtype, and the sizes of P(i) and N(i).
    """
    return dense.anchor_values(embeddings, pairs, rule, anchors=anchors)
