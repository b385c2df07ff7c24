"""InfoNCE: the cross-entropy of two towers; by default row k of one tower is the only positive of row k of the other.

Let s_ij = similarity(a_i, b_j) / temperature. A(i) is every row of b, except those of ignored pairs. P(i) is the set of
positives of row i of a in A(i). The loss of anchor i is

    info_nce_loss  L_i = 1/|P(i)| Σ_{p∈P(i)} -log( e^s_ip / Σ_{j∈A(i)} e^s_ij )

With ``inside_reduction`` "mean" or "sum", L_i is -log of the mean or of the sum of the ratios over P(i). If negatives
n_1 ... n_K are given, the positive of row i of a is row i of b, and the other rows of b are left out:

                   L_i = -log( e^s_ii / (e^s_ii + Σ_k e^(similarity(a_i, n_k) / temperature)) )

The formulas are those of SupCon with other sets. If row j of b is an anchor, its logits are s_ij for the rows i of a.
Its positives are the rows of a that have row j as a positive. The loss is the mean over the rows of a, over the rows of
b, or over both. With ``direction_weights``, it is the weighted sum of the two means.

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
    anchor_weights: npt.ArrayLike | None = None,
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
        partners: [N] integers from 0 to M - 1, the only positive of each row of a. Row j of b has as positives the rows
            of a with partner j: none, one or several.
        labels: [N] integers or bools; rows of a and of b with the same label are positives of each other.
        ref_labels: [M] integers or bools, the labels of the rows of b; by default ``labels``, if M is N.
        positives: bool [N, M], the pairs of a row of a and a row of b that are positives of each other.
        ignored: bool [N, M], pairs that are left out of numerator and denominator in both directions, positives
            included. Without labels and positives, the one positive of a row of a must not be ignored.
        ignored_ids: [N] integers, such as one number per caption; a pair of rows of a and b with equal ids is left out
            unless the rows are positives of each other.
        ref_ignored_ids: [M] integers, the ids of the rows of b; by default ``ignored_ids``, if M is N.
        anchor_weights: float32 or float64 [N], from 0 to 1e10: entry k is the factor of the value of row k of a and, if
            the rows of b are anchors, of row k of b. M must then be N. The mean divides by the sum of the weights of
            the anchors that count; it is 0 if they are all 0.
        negatives: [K, D], the negatives of every anchor, in both directions. They replace the other rows of the other
            tower. With them, none of the arguments from partners to ref_ignored_ids may be given.
        direction: the tower whose rows are anchors: "a_to_b" (a), "b_to_a" (b), or "both" (a, then b). None: "a_to_b"
            if negatives are given, as in MoCo, else "both".
        direction_weights: None, or two numbers from 0 to 1e10 with direction "both": the factors of the values of a's
            anchors and of b's. The reduction "mean" is then the sum of both towers' means, each times its factor. None:
            all factors are 1, and the mean is over the anchors of both towers. This equals the mean with (0.5, 0.5) if
            both towers have the same number of anchors.
        temperature: number from 1e-10 to 1e10; logits are similarities divided by it.
        base_temperature: if given, the loss is multiplied by temperature / base_temperature.
        similarity: "cosine" or "dot".
        inside_reduction: how the ratios e^s_ip / Σ e^s of several positives are combined. "none": the value is the
            mean of -log of each ratio. "mean": -log of the mean of the ratios. "sum": -log of their sum.
        no_positive: the value of an anchor without positives: "zero" (counted as 0), "drop" (left out of the mean and
            of the values of "none") or "nan".
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
