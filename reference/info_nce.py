"""InfoNCE: the cross-entropy of two towers; by default row k of one tower is the only positive of row k of the other.

    s_ij  similarity(a_i, b_j) / temperature
    A(i)  all rows of b, without ignored pairs
    P(i)  the positives of row i of a in A(i)

The loss of row i of a is

    info_nce_loss  L_i = 1/|P(i)| Σ_{p∈P(i)} -log( e^s_ip / Σ_{j∈A(i)} e^s_ij )

With ``inside_reduction`` "mean" or "sum", L_i is -log of the mean or of the sum of the ratios over P(i). With negatives
n_1 ... n_K, row i of b is the positive, and the other rows of b are left out:

                   L_i = -log( e^s_ii / (e^s_ii + Σ_k e^(similarity(a_i, n_k) / temperature)) )

The loss of a row of b is the same with a and b exchanged. The mean is over the rows of a, over the rows of b, or over
both. With ``direction_weights``, it is the weighted sum of the two means.

Sources:

    the loss                  van den Oord et al., "Representation Learning with Contrastive Predictive Coding",
                              arXiv 1807.03748
    both directions           CLIP, Radford et al., arXiv 2103.00020
    weights of directions     ConVIRT, Zhang et al., arXiv 2010.00747, equation 4
    a queue of negatives      MoCo, He et al., arXiv 1911.05722, equation 1
    several positives         SupCon, Khosla et al., arXiv 2004.11362, equations 2 and 3
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
        embeddings_a: [N, D] floats, complex numbers, or intervals (balls of python-flint).
        embeddings_b: [M, D], the other tower; M must be N unless partners, labels or positives are given.
        partners: [N] integers from 0 to M - 1; row partners[i] of b is the only positive of row i of a. The positives
            of row j of b are the rows of a with partner j: none, one or several.
        labels: [N] integers or bools; rows of a and of b with the same label are positives of each other.
        ref_labels: [M] integers or bools, the labels of the rows of b; by default ``labels``, if M is N.
        positives: bool [N, M]; entry [i, j] makes row i of a and row j of b positives of each other.
        ignored: bool [N, M], the pairs to leave out of numerator and denominator in both directions, even positives.
            With partners or by default, the one positive of a row of a must not be ignored.
        ignored_ids: [N] integers, such as one number per caption. Negatives with the anchor's id are left out.
        ref_ignored_ids: [M] integers, the ids of the rows of b; by default ``ignored_ids``, if M is N.
        anchor_weights: float32 or float64 [N], from 0 to 1e10: the factors of the anchors' values. Row k of a and row k
            of b have the same weight, so M must be N if rows of b are anchors. The mean divides by the sum of the
            weights of anchors that are not dropped, and is 0 if the sum is 0.
        negatives: [K, D], the negatives of every anchor, in both directions. They replace the other rows of the other
            tower, and cannot be combined with the arguments from partners to ref_ignored_ids.
        direction: the rows that are anchors: "a_to_b" (of a), "b_to_a" (of b) or "both". By default "both", or "a_to_b"
            with negatives, as in MoCo.
        direction_weights: two numbers from 0 to 1e10, for direction "both": the factors of the values of a and of b.
            "mean" is then the weighted sum of the two means. By default, "mean" is over the anchors of both towers.
            This equals (0.5, 0.5) if both have the same number of anchors.
        temperature: number from 1e-10 to 1e10; logits are similarities divided by it.
        base_temperature: if given, the loss is multiplied by temperature / base_temperature.
        similarity: "cosine" or "dot".
        inside_reduction: how the ratios e^s_ip / Σ e^s of several positives are combined. "none": the mean of -log of
            each ratio. "mean": -log of the mean of the ratios. "sum": -log of their sum.
        no_positive: the value of an anchor without positives: "zero", "nan" or "drop" (left out).
        reduction: "mean" or "sum" over the anchors, or "none": a list with one value per anchor that is not dropped,
            those of a before those of b.

    Returns:
        The loss and its terms.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value, or does not fit the others.

    Source:
        arXiv 1807.03748. Both directions: CLIP, arXiv 2103.00020. Their weights: ConVIRT, arXiv 2010.00747, equation 4.
        Negatives: MoCo, arXiv 1911.05722, equation 1. Several positives: arXiv 2004.11362, equations 2 and 3.
    """
    return evaluate_towers(info_nce_anchor, **locals())
