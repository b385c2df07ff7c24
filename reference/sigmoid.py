"""Sigmoid loss (SigLIP): the binary cross-entropy of every pair of rows of two towers.

    l_ij  similarity(a_i, b_j) / temperature + bias
    z_ij  1 if row j of b is a positive of row i of a, else -1
    σ(x)  1 / (1 + e^-x)
    A(i)  all rows of b, without ignored pairs
    P(i)  the positives of row i of a in A(i)
    N(i)  the other rows in A(i)

The loss of row i of a is

    sigmoid_loss  L_i = -Σ_{j∈A(i)} log σ(z_ij l_ij) = Σ_{p∈P(i)} -log σ(l_ip) + Σ_{n∈N(i)} -log σ(-l_in)

The bias has the sign of the paper's Algorithm 1, of big_vision and of open_clip. It has the opposite sign in the
paper's Section 3.2, log 1 / (1 + e^(z_ij (-t x_i·y_j + b))).

Sources: Zhai et al., "Sigmoid Loss for Language Image Pre-Training", arXiv 2303.15343, Algorithm 1; siglip.py in
trainers/proj/image_text of google-research/big_vision; SigLipLoss in loss.py of open_clip.
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
        embeddings_a: [N, D] floats, complex numbers, or intervals (balls of python-flint); the anchors.
        embeddings_b: [M, D], the other tower; M must be N unless partners, labels or positives are given.
        partners: [N] integers from 0 to M - 1; row partners[i] of b is the only positive of row i of a.
        labels: [N] integers or bools; the positives of a row of a are the rows of b with its label.
        ref_labels: [M] integers or bools, the labels of the rows of b; by default ``labels``, if M is N.
        positives: bool [N, M]; entry [i, j] is True if row j of b is a positive of row i of a.
        ignored: bool [N, M], the pairs to leave out, even positives. With partners or by default, the one positive of a
            row of a must not be ignored.
        ignored_ids: [N] integers, such as one number per caption. Negatives with the anchor's id are left out.
        ref_ignored_ids: [M] integers, the ids of the rows of b; by default ``ignored_ids``, if M is N.
        anchor_weights: float32 or float64 [N], from 0 to 1e10. The values of a row of a and of its pairs are multiplied
            by the weight of the row. Means divide by the sum of these weights, and are 0 if the sum is 0.
        temperature: number from 1e-10 to 1e10; similarities are divided by it.
        bias: number from -1e10 to 1e10, added to similarity / temperature.
        base_temperature: if given, the loss is multiplied by temperature / base_temperature.
        similarity: "cosine" or "dot".
        reduction: "mean": the sum over all pairs, divided by N even if pairs are ignored. "mean_pairs": the mean over
            the pairs that are not ignored, or 0 without such pairs. "sum" or "sum_pairs": the sum over all pairs.
            "none": a list with one value per row of a. "none_pairs": a list with one value per pair that is not
            ignored, ordered by row of a, then by row of b.

    Returns:
        The loss and its terms.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value, or does not fit the others.

    Source:
        SigLIP, arXiv 2303.15343, Algorithm 1.
    """
    return evaluate_towers(sigmoid_anchor, more_reductions=PAIR_REDUCTIONS, **locals())
