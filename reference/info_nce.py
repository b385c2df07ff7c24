"""InfoNCE: the cross-entropy of two towers; by default row k of one tower is the only positive of row k of the other.

Let s_ij = similarity(a_i, b_j) / temperature. P(i) are the positives of row i of a among the rows of b, and A(i) all
rows of b. If negatives n_1 ... n_K are given, row i has one positive, and A(i) are the positive and these negatives:

    info_nce_loss  L_i = 1/|P(i)| Σ_{p∈P(i)} -log( e^s_ip / Σ_{j∈A(i)} e^s_ij )
                   L_i = -log( e^s_ii / (e^s_ii + Σ_k e^(similarity(a_i, n_k) / temperature)) )

With ``inside_reduction`` "mean" or "sum", L_i = -log of the mean or of the sum over P(i) of the ratios. The formulas
are those of SupCon with other sets. For an anchor of b, s_ji takes the place of s_ij, and its positives are the rows of
a whose positive it is. The loss is the mean over the rows of a, over those of b, or over both; with
``direction_weights`` it is the weighted sum of the two means.

Sources: van den Oord et al., "Representation Learning with Contrastive Predictive Coding", arXiv 1807.03748; both
directions are CLIP's, Radford et al., arXiv 2103.00020; their weights are ConVIRT's, Zhang et al., arXiv 2010.00747,
equation 4; one positive and a queue of negatives are MoCo's, He et al., arXiv 1911.05722, equation 1; several positives
are SupCon's, Khosla et al., arXiv 2004.11362, equations 2 and 3.
"""

from __future__ import annotations

import numpy.typing as npt

from .batch import evaluate_towers
from .supcon import supcon_anchor, supcon_in_anchor
from .terms import Anchor, Columns, Result, Row


def info_nce_anchor(s: Row, i: int, A: Columns, P: Columns, N: Columns, *, inside_reduction: str = "none") -> Anchor:
    """L_i = 1/|P(i)| Σ_{p∈P(i)} -log( e^s_ip / Σ_{j∈A(i)} e^s_ij ), or -log of the mean or the sum of the ratios.

    Source: arXiv 1807.03748, equation 4; several positives: arXiv 2004.11362, equations 2 and 3.
    """
    if inside_reduction == "none":
        return supcon_anchor(s, i, A, P, N)
    return supcon_in_anchor(s, i, A, P, N, inside_reduction=inside_reduction)


def info_nce_loss(
    embeddings_a: npt.ArrayLike,
    embeddings_b: npt.ArrayLike,
    *,
    partners: npt.ArrayLike | None = None,
    labels: npt.ArrayLike | None = None,
    ref_labels: npt.ArrayLike | None = None,
    positives: npt.ArrayLike | None = None,
    ignored: npt.ArrayLike | None = None,
    ignored_ids: npt.ArrayLike | None = None,
    ref_ignored_ids: npt.ArrayLike | None = None,
    negatives: npt.ArrayLike | None = None,
    direction: str | None = None,
    direction_weights: tuple[float, float] | None = None,
    temperature: float = 0.07,
    base_temperature: float | None = None,
    similarity: str = "cosine",
    inside_reduction: str = "none",
    no_positive: str = "drop",
    reduction: str = "mean",
) -> Result:
    """InfoNCE of two towers: by default row k of one tower is the only positive of row k of the other.

    Example:
        >>> z = [[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]]
        >>> loss, terms = info_nce_loss(z, [[0.8, 0.6], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]], temperature=0.5)
        >>> print(f"{loss:.4f}")
        1.0532

    Args:
        embeddings_a: [N, D] floats; complex numbers and intervals (balls of python-flint) are accepted too.
        embeddings_b: [M, D], the other tower; M is N unless partners, labels or positives are given.
        partners: [N] integers from 0 to M - 1, the only positive of each row of a. The positives of a row of b are the
            rows of a whose positive it is: none, one or several.
        labels: [N] integers or bools; rows of a and of b with the same label are positives of each other.
        ref_labels: [M] integers or bools, the labels of the rows of b; by default ``labels``, if M is N.
        positives: bool [N, M], the pairs of a row of a and a row of b that are positives of each other.
        ignored: bool [N, M], pairs that are left out of numerator and denominator in both directions, positives
            included; but never a row's only positive, without labels and positives.
        ignored_ids: [N] integers, such as one number per caption; a pair of rows of a and b with equal ids is left out
            unless the rows are positives of each other.
        ref_ignored_ids: [M] integers, the ids of the rows of b; by default ``ignored_ids``, if M is N.
        negatives: [K, D], the negatives of every anchor, instead of the other tower's other rows; the same for both
            directions. With them, none of the arguments from partners to ref_ignored_ids may be given.
        direction: the tower whose rows are anchors: "a_to_b" (a), "b_to_a" (b), or "both" (a, then b). None: "both", or
            "a_to_b" with negatives, as in MoCo.
        direction_weights: None, or two numbers from 0 to 1e10 with direction "both": the factors of the values of a's
            anchors and of b's. The mean is then the sum of the mean over a's anchors and the mean over b's. None: the
            mean over the anchors of both; if the towers have equally many anchors, it is that of (0.5, 0.5).
        temperature: number from 1e-10 to 1e10; logits are similarities divided by it.
        base_temperature: if given, the loss is multiplied by temperature / base_temperature.
        similarity: "cosine" or "dot".
        inside_reduction: what is done with the ratios of several positives inside the logarithm: "none", each ratio has
            its own logarithm, and the value is the mean of the logarithms; "mean" or "sum", the value is the logarithm
            of the ratios' mean or sum.
        no_positive: the value of an anchor without positives: "zero", counted as 0, "drop", left out of the mean and of
            the values, or "nan".
        reduction: "mean" over the anchors that count, "sum" of their values, or "none": a list, one value per anchor
            that counts, those of a before those of b.

    Returns:
        The loss and its terms.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value, or does not fit the others.

    Source:
        arXiv 1807.03748; CLIP, arXiv 2103.00020; weights: ConVIRT, arXiv 2010.00747, equation 4; MoCo, arXiv
        1911.05722, equation 1; several positives: arXiv 2004.11362, equations 2 and 3.
    """
    return evaluate_towers(info_nce_anchor, **locals())
