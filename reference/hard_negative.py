"""Hard negatives: NT-Xent with negatives weighted by their hardness and corrected for hidden positives.

    s_ij  similarity(z_i, z_j) / temperature, where the similarity is the cosine
    A(i)  all columns except i; with references, all references except the one that is row i itself
    P(i)  {p}, the positive of i
    N(i)  the n other columns in A(i), without ignored pairs

The loss of anchor i is

    hard_negative_loss  L_i = -log( e^s_ip / (e^s_ip + M_i) )
        M_i  = max( (n g_i - τ n e^s_ip) / (1 - τ), n e^(-1/temperature) )
        g_i  = Σ_{k∈N(i)} w_ik e^s_ik / Σ_{k∈N(i)} w_ik,  w_ik = e^(β s_ik)

Hidden positives are negatives that have the class of the anchor. τ is the probability that a random row has this class.

    g_i                   the mean of e^s over the negatives, weighted by their hardness
    τ n e^s_ip            an estimate of the part of n g_i that comes from hidden positives
    n e^(-1/temperature)  the floor, the lowest possible sum of n exponentials: all cosines are -1

Gradients flow through the weights w. With β = 0, this is the debiased contrastive loss. With β = 0 and τ = 0, it is
NT-Xent. Without negatives, M_i and the loss are 0.

The definition is image/main.py of joshr17/HCL at commit 7b4647f. With β = 0, it equals main.py of chingyaoc/DCL at
commit 7d6345f. The pseudocode in the paper's appendix has two typos, according to its authors (issues 1 and 5 of
joshr17/HCL): it divides by the mean of e^s, not of w, and multiplies by β instead of using it as an exponent.

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
    """Return log( x / (n e^s_p) ) for both arguments x of the maximum in M.

    The first is log( (e^q - τ) / (1 - τ) ) with q = log g - s_p, or None if e^q <= τ. The second is
    -1/temperature - s_p.
    """
    excess, floor = log_mean(s, N, beta) - s[p], lowest - s[p]
    if tau_plus == 0:
        return excess, floor
    share = tau_plus * np.exp(-excess) if order(excess) > math.log(tau_plus) else None
    if share is None or order(share) >= 1:
        return None, floor
    return excess + np.log1p(-share) - np.log1p(zero_like(excess) - tau_plus), floor


def log_ratio(s: Row, p: int, N: Columns, **options: Any) -> Scalar:
    """Return log( M / e^s_p ), which is log n plus the larger of ``log_masses``."""
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
        embeddings: [N, D] floats, complex numbers, or intervals (balls of python-flint).
        partners: [N] integers; row partners[i] is the positive of row i. Partners are mutual, and no row is its own
            partner. stacked_partners and interleaved_partners return them for two views per item. With ref_embeddings,
            partners[i] is any row of ref_embeddings except self_rows[i].
        anchors: bool [N], the rows that are anchors; all rows by default.
        ref_embeddings: [M, D], rows to contrast anchors with instead of the batch: a memory bank, a queue, or the
            gathered rows of all devices. N may then be 1.
        self_rows: [N] integers, the row of ref_embeddings that is the anchor itself and is left out; -1 (the default)
            if there is none.
        ignored: bool [N, N], or [N, M] with ref_embeddings: the pairs (row, column) that are not negatives. They count
            neither in the weighted mean nor in n. May be asymmetric. The pair of a row and its partner must not be
            ignored.
        ignored_ids: [N] integers. Negatives with the anchor's id are left out, for example duplicates.
        ref_ignored_ids: [M] integers, the ids of ref_embeddings; give both kinds of ids or neither.
        temperature: number from 1e-10 to 1e10; logits are similarities divided by it.
        base_temperature: if given, the loss is multiplied by temperature / base_temperature.
        similarity: only "cosine", because the floor n e^(-1/temperature) is derived from the lowest cosine, -1.
        tau_plus: number in [0, 1), the probability that a negative has the class of the anchor.
        beta: number from 0 to 1e10, the exponent of the weights; 0 gives all negatives the same weight.
        reduction: "mean" or "sum" over the anchors, or "none": a list with one value per anchor.

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
