"""InfoNCE: the cross-entropy of two towers; row k of one tower is the only positive of row k of the other.

Let s_ij = similarity(a_i, b_j) / temperature. Row i of one tower is contrasted with the rows of the other tower or, if
negatives n_1 ... n_K are given, with its positive and these negatives:

    info_nce_loss  L_i = -log( e^s_ii / Σ_j e^s_ij )
                   L_i = -log( e^s_ii / (e^s_ii + Σ_k e^(similarity(a_i, n_k) / temperature)) )

The formula is that of NT-Xent with other sets. The loss is the mean over the rows of the first tower, over those of the
second (with s_ji for s_ij), or over both.

Sources: van den Oord et al., "Representation Learning with Contrastive Predictive Coding", arXiv 1807.03748; both
directions are CLIP's, Radford et al., arXiv 2103.00020; one positive and a queue of negatives are MoCo's, He et al.,
arXiv 1911.05722, equation 1.
"""

from __future__ import annotations

import numpy.typing as npt

from .batch import evaluate_towers
from .nt_xent import nt_xent_anchor
from .terms import Result

info_nce_anchor = nt_xent_anchor


def info_nce_loss(
    embeddings_a: npt.ArrayLike,
    embeddings_b: npt.ArrayLike,
    *,
    negatives: npt.ArrayLike | None = None,
    direction: str | None = None,
    temperature: float = 0.07,
    base_temperature: float | None = None,
    similarity: str = "cosine",
    reduction: str = "mean",
) -> Result:
    """InfoNCE of two towers: row k of one tower is the positive of row k of the other.

    Example:
        >>> z = [[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]]
        >>> loss, terms = info_nce_loss(z, [[0.8, 0.6], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]], temperature=0.5)
        >>> print(f"{loss:.4f}")
        1.0532

    Args:
        embeddings_a: [N, D] floats; complex numbers and intervals (balls of python-flint) are accepted too.
        embeddings_b: [N, D], the other tower.
        negatives: [K, D], the negatives of every anchor, instead of the other tower's other rows; the same for both
            directions.
        direction: the tower whose rows are anchors: "a_to_b" (a), "b_to_a" (b), or "both" (a, then b). None: "both", or
            "a_to_b" with negatives, as in MoCo.
        temperature: number from 1e-10 to 1e10; logits are similarities divided by it.
        base_temperature: if given, the loss is multiplied by temperature / base_temperature.
        similarity: "cosine" or "dot".
        reduction: "mean" over the anchors, "sum", or "none" (a list, one value per anchor: 2N for "both").

    Returns:
        The loss and its terms.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value.

    Source:
        arXiv 1807.03748; CLIP, arXiv 2103.00020; MoCo, arXiv 1911.05722, equation 1.
    """
    return evaluate_towers(info_nce_anchor, **locals())
