"""Weighted decoupled contrastive learning (DCLW): the denominator leaves out the positive, whose term is weighted.

    s_ij  similarity(z_i, z_j) / temperature, where the similarity is the cosine
    A(i)  all columns except i; with references, all references except the one that is row i itself
    P(i)  {p}, the positive of i
    N(i)  the other columns in A(i), without ignored pairs

The loss of anchor i is

    dclw_loss  L_i = -w_i s_ip + log Σ_{n∈N(i)} e^s_in
        w_i  = 2 - e^(c_i / σ) / (1/R Σ_k e^(c_k / σ)),  c_i = similarity(z_i, z_p)

The sum over k runs over all R rows of the batch, including rows that are not anchors. So w_i = 2 - R softmax(c / σ)_i.
The closer a row is to its positive, the smaller is its weight. The mean of the weights is 1. They can be negative, down
to 2 - R/2 with two views per item. As σ grows, they approach 1, and the loss approaches DCL, which is `supcon_loss`
with denominator="only_negatives". An anchor without negatives has the loss 0.

The paper sums over both views and all items. lightly takes the mean over all rows (lightly/loss/dcl_loss.py at commit
e8d317f), as this loss does. The paper does not say whether gradients flow through the weights. In lightly they do not.
They do in raminnakhli/Decoupled-Contrastive-Learning (loss/dcl.py at commit 0b9b76d) and in nidl (nidl/losses/dcl.py at
commit efb1343), as with ``detach_weights=False``.

Source: Yeh et al., "Decoupled Contrastive Learning", arXiv 2110.06848, L_DCW with negative von Mises-Fisher weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from .batch import evaluate
from .checks import check_choice, check_range
from .scalars import Scalar, largest, total
from .terms import Anchor, Columns, Result, Row, cross_entropy


def dclw_weights(
    similarity: Sequence[Row], P: Sequence[Columns], N: Sequence[Columns], *, sigma: float = 0.5
) -> list[list[Scalar]]:
    """Return [R][1], the weights w_i = 2 - e^(c_i / σ) / (1/R Σ_k e^(c_k / σ))."""
    closeness = [row[p] / float(sigma) for row, (p,) in zip(similarity, P, strict=True)]
    top = closeness[largest(closeness)]
    e = [np.exp(c - top) for c in closeness]
    mean = total(e) / len(e)
    return [[2 - x / mean] for x in e]


def dclw_anchor(s: Row, i: int, A: Columns, P: Columns, N: Columns, *, weights: Sequence[Scalar]) -> Anchor:
    """L_i = -w_i s_ip + log Σ_{n∈N(i)} e^s_in, or 0 without negatives: arXiv 2110.06848, L_DCW."""
    (p,), (weight,) = P, weights
    if not N:
        return 0.0, []
    weighted = [weight * x if k == p else x for k, x in enumerate(s)]
    pair = cross_entropy(weighted, i, p, N)
    return pair.value, [pair]


def dclw_loss(
    embeddings: npt.ArrayLike,
    partners: npt.ArrayLike,
    *,
    anchors: npt.ArrayLike | None = None,
    ref_embeddings: npt.ArrayLike | None = None,
    self_rows: npt.ArrayLike | None = None,
    ignored: npt.ArrayLike | None = None,
    ignored_ids: npt.ArrayLike | None = None,
    ref_ignored_ids: npt.ArrayLike | None = None,
    temperature: float = 0.1,
    base_temperature: float | None = None,
    similarity: str = "cosine",
    sigma: float = 0.5,
    detach_weights: bool = True,
    reduction: str = "mean",
) -> Result:
    """DCLW: decoupled contrastive learning with positives weighted by 2 - N softmax(cosine / sigma) over the rows.

    Example:
        >>> from pairproof.reference import stacked_partners
        >>> z = [[1.0, 0.0], [0.8, 0.6], [0.6, 0.8], [-0.6, 0.8]]
        >>> loss, terms = dclw_loss(z, stacked_partners(4))
        >>> print(f"{loss:.4f}")
        6.1574

    Args:
        embeddings: [N, D] floats, complex numbers, or intervals (balls of python-flint).
        partners: [N] integers; row partners[i] is the positive of row i. Partners are mutual, and no row is its own
            partner. stacked_partners and interleaved_partners return them for two views per item. With ref_embeddings,
            partners[i] is any row of ref_embeddings except self_rows[i].
        anchors: bool [N], the rows that are anchors; all rows by default. The weights are computed from all rows.
        ref_embeddings: [M, D], rows to contrast anchors with instead of the batch: a memory bank, a queue, or the
            gathered rows of all devices. N may then be 1.
        self_rows: [N] integers, the row of ref_embeddings that is the anchor itself and is left out; -1 (the default)
            if there is none.
        ignored: bool [N, N], or [N, M] with ref_embeddings: the pairs (row, column) to leave out of the sum over the
            negatives. May be asymmetric. The pair of a row and its partner must not be ignored. The weights do not
            depend on ignored pairs.
        ignored_ids: [N] integers. Negatives with the anchor's id are left out, for example duplicates.
        ref_ignored_ids: [M] integers, the ids of ref_embeddings; give both kinds of ids or neither.
        temperature: number from 1e-10 to 1e10; logits are similarities divided by it.
        base_temperature: if given, the loss is multiplied by temperature / base_temperature.
        similarity: only "cosine", because the weights are defined for unit vectors.
        sigma: number from 1e-10 to 1e10; in the weights, similarities are divided by it.
        detach_weights: if True, no gradient flows through the weights. The value is the same.
        reduction: "mean" or "sum" over the anchors, or "none": a list with one value per anchor.

    Returns:
        The loss and its terms. The numerator of a pair is e^(w_i s_ip). An anchor without negatives has the value 0.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value.

    Source:
        DCLW, arXiv 2110.06848, and DCLWLoss of lightly.
    """
    given = locals()
    check_choice("similarity", similarity, ("cosine",))
    check_range("sigma", given.pop("sigma"))
    return evaluate(dclw_anchor, weights=partial(dclw_weights, sigma=sigma), **given)
