"""NT-BXent: the normalised, temperature-scaled binary cross-entropy of every pair of rows.

With s_ij = similarity(z_i, z_j) / temperature and sigma the logistic function, a positive pair costs
-log sigma(s_ij) = softplus(-s_ij), a negative pair -log(1 - sigma(s_ij)) = softplus(s_ij), and row i

    L_i = sum over p in P(i) of softplus(-s_ip) / (|P(i)| + 1)  +  sum over n in N(i) of softplus(s_in) / |N(i)|

The 1 counts the diagonal: it is a positive whose loss is 0. Source: the multi-label notebook's *code*; its formula
prints sigma((1 - s) / temperature) for negatives, which is another function, and lacks the minus sign.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .batch import NAN, Batch, prepare
from .checks import check_choice, check_positive_pairs
from .similarity import order, softplus
from .terms import Pair, Result


def _add_pair(batch: Batch, i: int, j: int, positive: bool) -> Pair:
    """The binary cross-entropy of one pair: -log of 1 / (1 + e^x), with x = -s for a positive and s for a negative."""
    s = batch.logits[i][j]
    x = -s if positive else s
    shift = x if order(x) > 0 else batch.zero
    pair = Pair(
        anchor=i,
        other=j,
        positive=positive,
        members=(),
        shift=shift,
        numerator=np.exp(-shift),
        denominator=np.exp(-shift) + np.exp(x - shift),
        log_numerator=batch.zero,
        log_denominator=softplus(x),
        value=softplus(x),
    )
    batch.pairs[i, j] = pair
    return pair


def nt_bxent_anchors(batch: Batch, *, no_negative: str) -> None:
    """Evaluate every row: positives and negatives averaged apart, the diagonal counted among the positives."""
    for i in batch.anchors:
        positive, negative = batch.zero, batch.zero
        for p in batch.positives[i]:
            positive = positive + _add_pair(batch, i, p, positive=True).value
        for n in batch.negatives[i]:
            negative = negative + _add_pair(batch, i, n, positive=False).value
        if batch.negatives[i]:
            negative = negative / len(batch.negatives[i])
        elif no_negative == "nan":
            negative = negative + NAN
        batch.anchor_losses[i] = positive / (len(batch.positives[i]) + 1) + negative


def nt_bxent_loss(
    embeddings: npt.ArrayLike,
    positive_pairs: npt.ArrayLike,
    *,
    anchors: npt.ArrayLike | None = None,
    temperature: float = 0.07,
    base_temperature: float | None = None,
    similarity: str = "cosine",
    no_negative: str = "zero",
    reduction: str = "mean",
) -> Result:
    """Binary cross-entropy of every pair, positives and negatives averaged apart in each row.

    Args:
        embeddings: [N, D] floats, complexes or balls.
        positive_pairs: [M, 2] integers: (i, j) makes j a positive of i, not i one of j. Duplicates and diagonal
            entries are allowed and change nothing.
        anchors: bool [N], the rows that are summed; all of them by default.
        temperature: positive; logits are similarities divided by it.
        base_temperature: if given, the loss is multiplied by temperature / base_temperature.
        similarity: "cosine" or "dot".
        no_negative: what the negatives of a row without any add: "zero" or "nan".
        reduction: "mean" over the rows, "sum", or "none" (a list, one value per row).

    Returns:
        The loss and its terms.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape or value.

    Source:
        The multi-label notebook, cell 103.
    """
    check_choice("no_negative", no_negative)
    check_choice("reduction", reduction)
    batch = prepare(
        embeddings,
        relation=lambda n, m, own: check_positive_pairs(positive_pairs, n),
        anchors=anchors,
        temperature=temperature,
        base_temperature=base_temperature,
        similarity=similarity,
    )
    nt_bxent_anchors(batch, no_negative=no_negative)
    return batch.finish(reduction)
