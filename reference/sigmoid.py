"""Sigmoid loss (SigLIP): the binary cross-entropy of every pair of a row of one tower and a row of the other.

Let l_ij = similarity(a_i, b_j) / temperature + bias, z_ij = 1 if row j of b is a positive of row i of a, else -1, and
σ(x) = 1 / (1 + e^-x). Anchors are the rows of a. A(i) is every row of b, except those of ignored pairs. P(i) and N(i)
are the positives and the other rows in A(i):

    sigmoid_loss  L_i = -Σ_{j∈A(i)} log σ(z_ij l_ij) = Σ_{p∈P(i)} -log σ(l_ip) + Σ_{n∈N(i)} -log σ(-l_in)

The loss is the mean over the N anchors. The formula and the sign of the bias are those of the paper's Algorithm 1, of
big_vision and of open_clip. The equation in Section 3.2 of the paper prints log 1 / (1 + e^(z_ij (-t x_i·y_j + b))), in
which the bias has the other sign.

Sources: Zhai et al., "Sigmoid Loss for Language Image Pre-Training", arXiv 2303.15343, Algorithm 1; google-research/
big_vision, trainers/proj/image_text/siglip.py; open_clip, loss.py, SigLipLoss.
"""

from __future__ import annotations

import numpy.typing as npt

from .batch import PAIR_REDUCTIONS, evaluate_towers
from .scalars import total
from .terms import Anchor, Columns, Result, Row, binary_cross_entropy


def sigmoid_anchor(s: Row, i: int, A: Columns, P: Columns, N: Columns) -> Anchor:
    """L_i = -Σ_{j∈A(i)} log σ(z_ij s_ij), z_ij = 1 for a positive, else -1: arXiv 2303.15343, Algorithm 1."""
    positives = set(P)
    pairs = [binary_cross_entropy(s, i, j, positive=j in positives) for j in A]
    return total(pair.value for pair in pairs), pairs


def sigmoid_loss(
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
    temperature: float = 0.1,
    bias: float = -10.0,
    base_temperature: float | None = None,
    similarity: str = "cosine",
    reduction: str = "mean",
) -> Result:
    """Binary cross-entropy of every pair of two towers; by default row k of b is the positive of row k of a.

    Example:
        >>> z = [[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]]
        >>> loss, terms = sigmoid_loss(z, [[0.8, 0.6], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
        >>> print(f"{loss:.4f}")
        2.3337

    Args:
        embeddings_a: [N, D] floats, complex numbers or balls; the anchors.
        embeddings_b: [M, D], the other tower; M is N unless partners, labels or positives are given.
        partners: [N] integers from 0 to M - 1, the only positive of each row of a.
        labels: [N] integers or bools; rows of b with the same label are positives.
        ref_labels: [M] integers or bools, the labels of the rows of b; by default ``labels``, if M is N.
        positives: bool [N, M], the positives of each row of a.
        ignored: bool [N, M], pairs that are left out, positives included. Without labels and positives, the one
            positive of a row of a must not be ignored.
        ignored_ids: [N] integers, such as one number per caption; a pair of rows of a and b with equal ids is left out
            unless the row of b is a positive.
        ref_ignored_ids: [M] integers, the ids of the rows of b; by default ``ignored_ids``, if M is N.
        anchor_weights: float32 or float64 [N], from 0 to 1e10: the factor of the values of each row of a and of its
            pairs. Means divide by the sum of the weights of the rows, or of the pairs; they are 0 if all are 0.
        temperature: number from 1e-10 to 1e10; similarities are divided by it.
        bias: number from -1e10 to 1e10, added to similarity / temperature.
        base_temperature: if given, the loss is multiplied by temperature / base_temperature.
        similarity: "cosine" or "dot".
        reduction: "mean": the sum of all values divided by N, the number of rows of a, even if pairs are ignored.
            "mean_pairs": the mean over the pairs that are not ignored (N M if none is); 0 if all are ignored.
            "sum" or "sum_pairs": the sum. "none": a list, one value per row of a. "none_pairs": a list, one value per
            pair that is not ignored, ordered by row of a, then by row of b.

    Returns:
        The loss and its terms.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value, or does not fit the others.

    Source:
        SigLIP, arXiv 2303.15343, Algorithm 1.
    """
    return evaluate_towers(sigmoid_anchor, more_reductions=PAIR_REDUCTIONS, **locals())
