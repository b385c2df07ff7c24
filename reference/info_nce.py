"""InfoNCE: the cross-entropy of two towers; row k of one is the one positive of row k of the other.

With s_ij = similarity(a_i, b_j) / temperature, row i of one tower is contrasted with the other tower, or with its
positive and the negatives n_1 ... n_K where they are given:

    info_nce_loss  L_i = -log( e^s_ii / Σ_j e^s_ij )
                   L_i = -log( e^s_ii / (e^s_ii + Σ_k e^(similarity(a_i, n_k) / temperature)) )

This is NT-Xent's formula with other sets. The loss is the mean over the rows of the first tower, over those of the
second (s_ji for s_ij), or over both. Sources: van den Oord et al., "Representation Learning with Contrastive Predictive
Coding", arXiv 1807.03748; both directions are CLIP's, Radford et al., arXiv 2103.00020; one positive and a queue of
negatives are MoCo's, He et al., arXiv 1911.05722, equation 1.
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
    direction: str = "both",
    temperature: float = 0.07,
    base_temperature: float | None = None,
    similarity: str = "cosine",
    reduction: str = "mean",
) -> Result:
    """InfoNCE of two towers: row k of one is the positive of row k of the other.

    Example:
        >>> z = [[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]]
        >>> loss, terms = info_nce_loss(z, [[0.8, 0.6], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]], temperature=0.5)
        >>> print(f"{loss:.4f}")
        1.0532

    Args:
        embeddings_a: [N, D] floats, complex numbers or balls.
        embeddings_b: [N, D], the other tower.
        negatives: [K, D], what every anchor is contrasted with in place of the other rows of the other tower, the same
            for both directions.
        direction: whose rows are anchors: "both" (those of a, then those of b), "a_to_b" (those of a) or "b_to_a".
        temperature: positive; logits are similarities divided by it.
        base_temperature: if given, the loss is multiplied by temperature / base_temperature.
        similarity: "cosine" or "dot".
        reduction: "mean" over the anchors, "sum", or "none" (a list, one value per anchor: 2N for "both").

    Returns:
        The loss and its terms.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape or value.

    Source:
        arXiv 1807.03748; CLIP, arXiv 2103.00020; MoCo, arXiv 1911.05722, equation 1.
    """
    return evaluate_towers(info_nce_anchor, **locals())
