"""NT-Xent: the normalised, temperature-scaled cross-entropy, with one positive per anchor or for every positive pair.

Let s_ij = similarity(z_i, z_j) / temperature. A(i) is the set of all columns except i (with references, of all except
the one that is row i itself, if any), P(i) the positives of i in A(i), and N(i) the rest of A(i). The loss of anchor i
is

    nt_xent_loss           L_i = -log( e^s_ip / Σ_{a∈A(i)} e^s_ia ), P(i) = {p}
    nt_xent_pairwise_loss  L_i = 1/|P(i)| Σ_{p∈P(i)} -log( e^s_ip / (e^s_ip + Σ_{n∈N(i)} e^s_in) )

They are the same function if every anchor has exactly one positive, and only then. The second has the terms of
supcon_loss with denominator "one_positive".

Sources: Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations" (SimCLR), arXiv
2002.05709, equation 1. The second is what pytorch-metric-learning's NTXentLoss computes (issue 6 of that project), with
the mean over pairs, ``reduction="mean_pairs"`` here.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from .batch import PAIR_REDUCTIONS, evaluate
from .supcon import supcon_anchor
from .terms import Anchor, Columns, Result, Row, cross_entropy


def nt_xent_anchor(s: Row, i: int, A: Columns, P: Columns, N: Columns) -> Anchor:
    """L_i = -log( e^s_ip / Σ_{a∈A(i)} e^s_ia ), P(i) = {p}: arXiv 2002.05709, equation 1."""
    (p,) = P
    pair = cross_entropy(s, i, p, A)
    return pair.value, [pair]


def nt_xent_pairwise_anchor(s: Row, i: int, A: Columns, P: Columns, N: Columns, **weights: Any) -> Anchor:
    """L_i = 1/|P(i)| Σ_{p∈P(i)} -log( e^s_ip / (e^s_ip + Σ_{n∈N(i)} e^s_in) ), as in pytorch-metric-learning.

    ``weights`` are weights_divisor, positive_weights and negative_weights of supcon_anchor.
    """
    return supcon_anchor(s, i, A, P, N, denominator="one_positive", **weights)


def nt_xent_loss(
    embeddings: npt.ArrayLike,
    partners: npt.ArrayLike,
    *,
    anchors: npt.ArrayLike | None = None,
    ref_embeddings: npt.ArrayLike | None = None,
    self_rows: npt.ArrayLike | None = None,
    ignored: npt.ArrayLike | None = None,
    ignored_ids: npt.ArrayLike | None = None,
    ref_ignored_ids: npt.ArrayLike | None = None,
    anchor_weights: npt.ArrayLike | None = None,
    temperature: float = 0.07,
    base_temperature: float | None = None,
    similarity: str = "cosine",
    zero_row: str = "error",
    reduction: str = "mean",
) -> Result:
    """NT-Xent with exactly one positive per anchor: the cross-entropy of each row of logits.

    Example:
        >>> from pairproof.reference import stacked_partners
        >>> z = [[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]]
        >>> loss, terms = nt_xent_loss(z, stacked_partners(4), temperature=0.5)
        >>> print(f"{loss:.4f}")
        2.0302

    Args:
        embeddings: [N, D] floats; complex numbers and intervals (balls of python-flint) are accepted too.
        partners: [N] integers, the row of each row's positive: mutual, never the row itself. stacked_partners and
            interleaved_partners return them for two views per item. With ref_embeddings, partners[i] is any row of
            the references except self_rows[i], and need not be mutual. For class labels use nt_xent_pairwise_loss.
        anchors: bool [N], the rows that are anchors; all rows by default.
        ref_embeddings: [M, D], rows that anchors are contrasted with instead of the batch: a memory bank, a queue, or
            the gathered rows of all devices. N may then be 1.
        self_rows: [N] integers, the row of ref_embeddings that is anchor i and is left out, or -1; -1 by default.
        ignored: bool [N, N], with ref_embeddings [N, M]: the pairs (row, column) that are left out of numerator and
            denominator. A row and its partner must not be ignored. May be asymmetric.
        ignored_ids: [N] integers; a pair of rows with equal ids is left out unless the column is the row's partner.
        ref_ignored_ids: [M] integers, the ids of the references; with ref_embeddings, both or neither are given.
        anchor_weights: float32 or float64 [N], from 0 to 1e10: the factor of each anchor's value. The mean divides by
            the sum of the weights; it is 0 if they are all 0.
        temperature: number from 1e-10 to 1e10; logits are similarities divided by it.
        base_temperature: if given, the loss is multiplied by temperature / base_temperature.
        similarity: "cosine" or "dot".
        zero_row: how "cosine" treats a row of zeros. "error": as an error. "zero": its cosine with every row is 0, and
            its gradient is 0. Under "dot" a row of zeros is valid, and this option has no effect.
        reduction: "mean" over the anchors, "sum", or "none" (a list, one value per anchor).

    Returns:
        The loss and its terms.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value.

    Source:
        SimCLR, arXiv 2002.05709, equation 1; for references MoCo, arXiv 1911.05722.
    """
    return evaluate(nt_xent_anchor, **locals())


def nt_xent_pairwise_loss(
    embeddings: npt.ArrayLike,
    labels: npt.ArrayLike | None = None,
    *,
    positives: npt.ArrayLike | None = None,
    anchors: npt.ArrayLike | None = None,
    ref_embeddings: npt.ArrayLike | None = None,
    ref_labels: npt.ArrayLike | None = None,
    self_rows: npt.ArrayLike | None = None,
    ignored: npt.ArrayLike | None = None,
    ignored_ids: npt.ArrayLike | None = None,
    ref_ignored_ids: npt.ArrayLike | None = None,
    positive_weights: npt.ArrayLike | None = None,
    negative_weights: npt.ArrayLike | None = None,
    anchor_weights: npt.ArrayLike | None = None,
    temperature: float = 0.07,
    base_temperature: float | None = None,
    similarity: str = "cosine",
    weights_divisor: str = "count",
    no_positive: str = "zero",
    reduction: str = "mean",
) -> Result:
    """NT-Xent of every positive pair: each denominator sums that one positive and the anchor's negatives.

    Example:
        >>> z = [[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]]
        >>> loss, terms = nt_xent_pairwise_loss(z, [0, 0, 0, 1], temperature=0.5, reduction="mean_pairs")
        >>> print(f"{loss:.4f}")
        0.5777

    Args:
        embeddings: [N, D] floats; complex numbers and intervals (balls of python-flint) are accepted too.
        labels: [N] integers; rows with equal labels are positives of each other.
        positives: bool [N, N] instead of labels; may be asymmetric, and its diagonal is ignored. With ref_embeddings
            bool [N, M], and the entry at self_rows[i] is ignored.
        anchors: bool [N], the rows that are anchors; all rows by default.
        ref_embeddings: [M, D], rows that anchors are contrasted with instead of the batch: a memory bank, a queue, or
            the gathered rows of all devices. N may then be 1.
        ref_labels: [M] integers; reference a is a positive of anchor i if ref_labels[a] == labels[i].
        self_rows: [N] integers, the row of ref_embeddings that is anchor i and is left out, or -1; -1 by default.
        ignored: bool [N, N], with ref_embeddings [N, M]: the pairs (row, column) that are left out of numerator and
            denominator, positives included. May be asymmetric; self pairs have no effect.
        ignored_ids: [N] integers; a pair of rows with equal ids is left out unless the column is a positive of the row.
        ref_ignored_ids: [M] integers, the ids of the references; with ref_embeddings, both or neither are given.
        positive_weights: float32 or float64 [N, N], with ref_embeddings [N, M], from 0 to 1e10: the factor of each
            positive's -log ratio. Entries of other pairs have no effect. An anchor whose positives all have weight 0
            has no positives.
        negative_weights: the same for negatives: the factor of each negative's exponential in the denominator, such as
            how often a miner has chosen it. A negative of weight 0 is left out.
        anchor_weights: float32 or float64 [N], from 0 to 1e10: the factor of each anchor's value. The mean divides by
            the sum of the weights of the anchors that count; it is 0 if they are all 0.
        temperature: number from 1e-10 to 1e10; logits are similarities divided by it.
        base_temperature: if given, the loss is multiplied by temperature / base_temperature.
        similarity: "cosine" or "dot".
        weights_divisor: what the weighted sum over the positives is divided by: their number, "count", or the sum of
            their weights, "weight".
        no_positive: the value of an anchor without positives: "zero", "drop" (left out of the mean) or "nan". Such an
            anchor has no pairs: under "nan" it makes "mean_pairs" and "sum_pairs" NaN, else it adds nothing to them,
            and it never has an entry in "none_pairs".
        reduction: "mean" over the anchors, "sum", or "none" (a list, one value per anchor not dropped), where an
            anchor's value is the mean of its pairs; or over the positive pairs of all anchors, where large classes
            weigh more: "mean_pairs", "sum_pairs" or "none_pairs" (a list, ordered by anchor, then by column). The value
            of a pair is multiplied by its weight and by that of its anchor. "mean_pairs" divides by the sum over
            all pairs of the weight of the pair's anchor, or, with ``weights_divisor="weight"``, of the product of both
            weights.

    Returns:
        The loss and its terms.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value.

    Source:
        pytorch-metric-learning's NTXentLoss with ref_emb and ref_labels; issue 6 of that project.
    """
    return evaluate(nt_xent_pairwise_anchor, more_reductions=PAIR_REDUCTIONS, **locals())
