"""Hard negatives: NT-Xent whose negatives are weighted by their hardness, and corrected for hidden positives.

Let s_ij = similarity(z_i, z_j) / temperature, where the similarity is the cosine. A(i) is every column except i. With
references, A(i) is every reference except the one that is row i itself. Ignored pairs are left out of A(i). P(i) = {p},
and N(i) is the n other columns of A(i). The loss of anchor i is

    hard_negative_loss  L_i = -log( e^s_ip / (e^s_ip + M_i) )
        M_i  = max( (n g_i - τ n e^s_ip) / (1 - τ), n e^(-1/temperature) )
        g_i  = Σ_{k∈N(i)} w_ik e^s_ik / Σ_{k∈N(i)} w_ik,  w_ik = e^(β s_ik)

τ is the probability that a row drawn at random has the class of the anchor. g_i is the mean of e^s over the negatives,
weighted by their hardness. τ n e^s_ip estimates the part of n g_i that comes from hidden positives: negatives with the
class of the anchor. The floor n e^(-1/temperature) is the lowest sum of n exponentials, that of rows opposite to the
anchor. Gradients flow through the weights w. With β = 0 this is the debiased contrastive loss; with β = 0 and τ = 0
it is NT-Xent. Without negatives M_i is 0, and so is the loss.

The definition is image/main.py of joshr17/HCL at commit 7b4647f. There, too, β multiplies the similarity divided by the
temperature. With β = 0 it equals main.py of chingyaoc/DCL at commit 7d6345f. The pseudocode in the appendix of the
paper divides by the mean of e^s instead of that of w, and multiplies by β instead of raising to it. Its authors call
both typos (issues 1 and 5 of joshr17/HCL).

Sources: Robinson et al., "Contrastive Learning with Hard Negative Samples" (HCL), arXiv 2010.04592; Chuang et al.,
"Debiased Contrastive Learning", arXiv 2007.00224, equations 7 and 8.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from .batch import evaluate
from .checks import check_choice
from .scalars import Scalar, order, shifted_sum, zero_like
from .terms import Anchor, Columns, Result, Row, cross_entropy_of_mass

LOWEST_COSINE = -1.0


def log_mean(s: Row, N: Columns, beta: float) -> Scalar:
    """Return log g = log( Σ_{k∈N} w_k e^s_k / Σ_{k∈N} w_k ), w_k = e^(β s_k)."""
    top, rest = shifted_sum([s[k] + beta * s[k] for k in N])
    top_of_weights, rest_of_weights = shifted_sum([beta * s[k] for k in N])
    return (top - top_of_weights) + (np.log1p(rest) - np.log1p(rest_of_weights))


def log_masses(
    s: Row, p: int, N: Columns, *, lowest: Scalar, tau_plus: float, beta: float
) -> tuple[Scalar | None, Scalar]:
    """Return log( x / (n e^s_p) ) for both arguments x of the maximum.

    The first is log( (e^q - τ) / (1 - τ) ), q = log g - s_p, or None if e^q <= τ. The second is -1/temperature - s_p.
    """
    excess, floor = log_mean(s, N, beta) - s[p], lowest - s[p]
    if tau_plus == 0:
        return excess, floor
    share = tau_plus * np.exp(-excess) if order(excess) > math.log(tau_plus) else None
    if share is None or order(share) >= 1:
        return None, floor
    return excess + np.log1p(-share) - np.log1p(zero_like(excess) - tau_plus), floor


def log_ratio(s: Row, p: int, N: Columns, **options: Any) -> Scalar:
    """Return log( M / e^s_p ): log n plus the larger of ``log_masses``."""
    debiased, floor = log_masses(s, p, N, **options)
    largest = floor if debiased is None or order(debiased - floor) <= 0 else debiased
    return np.log(zero_like(s[p]) + len(N)) + largest


def hard_negative_anchor(
    s: Row, i: int, A: Columns, P: Columns, N: Columns, *, lowest: Scalar, tau_plus: float = 0.1, beta: float = 1.0
) -> Anchor:
    """L_i = -log( e^s_ip / (e^s_ip + M_i) ): image/main.py of joshr17/HCL; ``lowest`` is -1/temperature."""
    (p,) = P
    mass = log_ratio(s, p, N, lowest=lowest, tau_plus=tau_plus, beta=beta) if N else None
    pair = cross_entropy_of_mass(s, i, p, N, mass)
    return pair.value, [pair]


def hard_negative_loss(
    embeddings: npt.ArrayLike,
    partners: npt.ArrayLike,
    *,
    anchors: npt.ArrayLike | None = None,
    ref_embeddings: npt.ArrayLike | None = None,
    self_rows: npt.ArrayLike | None = None,
    ignored: npt.ArrayLike | None = None,
    ignored_ids: npt.ArrayLike | None = None,
    ref_ignored_ids: npt.ArrayLike | None = None,
    temperature: float = 0.5,
    base_temperature: float | None = None,
    similarity: str = "cosine",
    tau_plus: float = 0.1,
    beta: float = 1.0,
    reduction: str = "mean",
) -> Result:
    """NT-Xent with negatives weighted by their hardness and corrected for hidden positives (HCL; debiased if beta=0).

    Example:
        >>> from pairproof.reference import stacked_partners
        >>> z = [[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]]
        >>> loss, terms = hard_negative_loss(z, stacked_partners(4))
        >>> print(f"{loss:.4f}")
        2.3750

    Args:
        embeddings: [N, D] floats; complex numbers and intervals (balls of python-flint) are accepted too.
        partners: [N] integers, the row of each row's positive: mutual, never the row itself. stacked_partners and
            interleaved_partners return them for two views per item. With ref_embeddings, partners[i] is any row of
            the references except self_rows[i], and need not be mutual.
        anchors: bool [N], the rows that are anchors; all rows by default.
        ref_embeddings: [M, D], rows that anchors are contrasted with instead of the batch: a memory bank, a queue, or
            the gathered rows of all devices. N may then be 1.
        self_rows: [N] integers, the row of ref_embeddings that is anchor i and is left out, or -1; -1 by default.
        ignored: bool [N, N], with ref_embeddings [N, M]: the pairs (row, column) that are not negatives: they count
            neither in the weighted mean nor in the number n of negatives. A row and its partner must not be ignored.
            May be asymmetric.
        ignored_ids: [N] integers; a pair of rows with equal ids is left out unless the column is the row's partner.
        ref_ignored_ids: [M] integers, the ids of the references; with ref_embeddings, both or neither are given.
        temperature: number from 1e-10 to 1e10; logits are similarities divided by it.
        base_temperature: if given, the loss is multiplied by temperature / base_temperature.
        similarity: only "cosine", because the floor n e^(-1/temperature) assumes -1 as the lowest similarity.
        tau_plus: number from 0 to below 1, the probability that a negative has the class of the anchor.
        beta: number from 0 to 1e10, the exponent of the weights; 0 gives all negatives the same weight.
        reduction: "mean" over the anchors, "sum", or "none" (a list, one value per anchor).

    Returns:
        The loss and its terms. An anchor without negatives has the value 0.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value.

    Source:
        HCL, arXiv 2010.04592, and image/main.py of joshr17/HCL; with beta=0 arXiv 2007.00224, equation 8.
    """
    check_choice("similarity", similarity, ("cosine",))
    return evaluate(hard_negative_anchor, lowest=LOWEST_COSINE, **locals())
