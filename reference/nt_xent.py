"""NT-Xent: the normalised, temperature-scaled cross-entropy, with one positive per anchor or for every positive pair.

    s_ij  similarity(z_i, z_j) / temperature
    A(i)  all columns except i; with references, all references except the one that is row i itself
    P(i)  the positives of i in A(i)
    N(i)  the other columns in A(i)

The loss of anchor i is

    nt_xent_loss           L_i = -log( e^s_ip / Σ_{a∈A(i)} e^s_ia ), P(i) = {p}
    nt_xent_pairwise_loss  L_i = 1/|P(i)| Σ_{p∈P(i)} -log( e^s_ip / (e^s_ip + Σ_{n∈N(i)} e^s_in) )

The two are equal if every anchor has exactly one positive. The second is supcon_loss with denominator "one_positive".

Sources:

    nt_xent_loss           Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations"
                           (SimCLR), arXiv 2002.05709, equation 1
    nt_xent_pairwise_loss  NTXentLoss of pytorch-metric-learning (issue 6 of that project), which averages over pairs,
                           as ``reduction="mean_pairs"`` does
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

    ``weights`` are the arguments weights_divisor, positive_weights and negative_weights of supcon_anchor.
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
        embeddings: [N, D] floats, complex numbers, or intervals (balls of python-flint).
        partners: [N] integers; row partners[i] is the positive of row i. Partners are mutual, and no row is its own
            partner. stacked_partners and interleaved_partners return them for two views per item. With ref_embeddings,
            partners[i] is any row of ref_embeddings except self_rows[i]. For class labels, use nt_xent_pairwise_loss.
        anchors: bool [N], the rows that are anchors; all rows by default.
        ref_embeddings: [M, D], rows to contrast anchors with instead of the batch: a memory bank, a queue, or the
            gathered rows of all devices. N may then be 1.
        self_rows: [N] integers, the row of ref_embeddings that is the anchor itself and is left out; -1 (the default)
            if there is none.
        ignored: bool [N, N], or [N, M] with ref_embeddings: the pairs (row, column) to leave out of the denominator.
            May be asymmetric. The pair of a row and its partner must not be ignored.
        ignored_ids: [N] integers. Negatives with the anchor's id are left out, for example duplicates.
        ref_ignored_ids: [M] integers, the ids of ref_embeddings; give both kinds of ids or neither.
        anchor_weights: float32 or float64 [N], from 0 to 1e10: the factors of the anchors' values. The mean divides by
            the sum of the weights, and is 0 if the sum is 0.
        temperature: number from 1e-10 to 1e10; logits are similarities divided by it.
        base_temperature: if given, the loss is multiplied by temperature / base_temperature.
        similarity: "cosine" or "dot".
        zero_row: for a row of zeros, "error" raises ValueError, and "zero" makes its cosines and its gradient 0. No
            effect with "dot".
        reduction: "mean" or "sum" over the anchors, or "none": a list with one value per anchor.

    Returns:
        The loss and its terms.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value.

    Source:
        SimCLR, arXiv 2002.05709, equation 1. References: MoCo, arXiv 1911.05722.
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
    """NT-Xent of every positive pair: each denominator sums one positive and the anchor's negatives.

    Example:
        >>> z = [[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]]
        >>> loss, terms = nt_xent_pairwise_loss(z, [0, 0, 0, 1], temperature=0.5, reduction="mean_pairs")
        >>> print(f"{loss:.4f}")
        0.5777

    Args:
        embeddings: [N, D] floats, complex numbers, or intervals (balls of python-flint).
        labels: [N] integers; rows with equal labels are positives of each other.
        positives: bool [N, N], or [N, M] with ref_embeddings, instead of labels: True if the column is a positive of
            the row. May be asymmetric; self pairs have no effect.
        anchors: bool [N], the rows that are anchors; all rows by default.
        ref_embeddings: [M, D], rows to contrast anchors with instead of the batch: a memory bank, a queue, or the
            gathered rows of all devices.
        ref_labels: [M] integers; reference a is a positive of anchor i if ref_labels[a] == labels[i].
        self_rows: [N] integers, the row of ref_embeddings that is the anchor itself and is left out; -1 (the default)
            if there is none.
        ignored: bool [N, N], or [N, M] with ref_embeddings: the pairs (row, column) to leave out of numerator and
            denominator, even positives. May be asymmetric; self pairs have no effect.
        ignored_ids: [N] integers. Negatives with the anchor's id are left out, for example duplicates.
        ref_ignored_ids: [M] integers, the ids of ref_embeddings; give both kinds of ids or neither.
        positive_weights: float32 or float64 [N, N], or [N, M] with ref_embeddings, from 0 to 1e10: the factors of the
            -log ratios of positives. Other entries have no effect. An anchor whose positives all have weight 0 has no
            positives.
        negative_weights: the same for negatives: the factors of their exponentials in the denominator, such as how
            often a miner chose them. A negative of weight 0 is left out.
        anchor_weights: float32 or float64 [N], from 0 to 1e10: the factors of the anchors' values. The mean divides by
            the sum of the weights of anchors that are not dropped, and is 0 if the sum is 0.
        temperature: number from 1e-10 to 1e10; logits are similarities divided by it.
        base_temperature: if given, the loss is multiplied by temperature / base_temperature.
        similarity: "cosine" or "dot".
        weights_divisor: the divisor of the weighted sum over the positives: "count" (their number) or "weight" (the sum
            of their weights).
        no_positive: the value of an anchor without positives: "zero", "nan" or "drop" (left out). "nan" also makes
            "mean_pairs" and "sum_pairs" NaN. "none_pairs" has no entry for an anchor without positives, such as
            one whose positives all have weight 0.
        reduction: "mean" or "sum" over the anchors, or "none": a list with one value per anchor that is not dropped.
            "mean_pairs", "sum_pairs" and "none_pairs" (a list, ordered by anchor, then by column) reduce over all
            positive pairs instead, so large classes weigh more. The value of each pair is multiplied by its weight and
            its anchor's weight. "mean_pairs" divides by the sum of the anchors' weights over all pairs or, with
            ``weights_divisor="weight"``, by the sum of the products of both weights.

    Returns:
        The loss and its terms.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value.

    Source:
        pytorch-metric-learning's NTXentLoss with ref_emb and ref_labels; issue 6 of that project.
    """
    return evaluate(nt_xent_pairwise_anchor, more_reductions=PAIR_REDUCTIONS, **locals())
