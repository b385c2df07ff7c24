"""SupCon with the sum over positives outside or inside the logarithm, and the batch tutorial's variant.

    s_ij  similarity(z_i, z_j) / temperature
    A(i)  all columns except i; with references, all references except the one that is row i itself
    P(i)  the positives of i in A(i)
    N(i)  the other columns in A(i)

The loss of anchor i is

    supcon_loss          L_i = 1/|P(i)| Σ_{p∈P(i)} -log( e^s_ip / D_ip )                           (L_out)
    supcon_in_loss       L_i = -log( 1/|P(i)| Σ_{p∈P(i)} e^s_ip / D_ip )                           (L_in)
    supcon_epsilon_loss  L_i = 1/(|P(i)| + ε) Σ_{p∈P(i)} -log( e_ip / Σ_{a∈A(i)} e_ia )
                         with e_ij = exp( s_ij - max_k s_ik ) + ε, where k is in A(i) or i itself, and ε = 1e-8

The argument ``denominator`` selects D_ip, with the names of the authors' TensorFlow code:

    "all"             Σ_{a∈A(i)} e^s_ia
    "one_positive"    e^s_ip + Σ_{n∈N(i)} e^s_in
    "only_negatives"  Σ_{n∈N(i)} e^s_in

With positive weights w_ip,

    supcon_loss          L_i = 1/d_i Σ_{p∈P(i)} w_ip · -log( e^s_ip / D_ip )
        d_i = |P(i)|, or Σ_{p∈P(i)} w_ip with ``weights_divisor="weight"``

Negative weights v_in multiply the exponentials e^s_in of negatives in D_ip. The exponentials of positives have no
weights. Negatives of weight 0 are not in A(i). If all positives of an anchor have weight 0, they are not in A(i)
either. All weights are constants.

With ``inside_reduction="sum"``, supcon_in_loss leaves out 1/|P(i)|, which subtracts log |P(i)| from L_i.

Sources: Khosla et al., "Supervised Contrastive Learning", arXiv 2004.11362, equations 2 and 3; the batch tutorial
"Implement Supervised Contrastive Loss in a Batch with PyTorch", 31 January 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from .batch import evaluate
from .scalars import Scalar, largest, log_mean_exp, log_sum_exp, mean, softplus, total, zero_like
from .terms import Anchor, Columns, Pair, Result, Row, cross_entropy, cross_entropy_of_exponentials

EPSILON = 1e-8


def denominator_members(denominator: str, p: int, A: Columns, N: Columns) -> Columns:
    """Return the columns whose exponentials are summed in D_ip."""
    return {"all": A, "one_positive": sorted([p, *N]), "only_negatives": N}[denominator]


def cross_entropies(s: Row, i: int, A: Columns, P: Columns, N: Columns, denominator: str) -> list[Pair]:
    """Return the pairs with values -log( e^s_ip / D_ip ), or none if D_ip is an empty sum."""
    members = {p: denominator_members(denominator, p, A, N) for p in P}
    return [cross_entropy(s, i, p, members[p]) for p in P if members[p]]


def supcon_anchor(
    s: Row,
    i: int,
    A: Columns,
    P: Columns,
    N: Columns,
    *,
    denominator: str = "all",
    no_negative: str = "zero",
    weights_divisor: str = "count",
    positive_weights: Sequence[float] | None = None,
    negative_weights: Sequence[float] | None = None,
) -> Anchor:
    """L_i = 1/|P(i)| Σ_{p∈P(i)} -log( e^s_ip / D_ip ): arXiv 2004.11362, equation 2 (L_out).

    With positive weights w, L_i = 1/d_i Σ_{p∈P(i)} w_ip · -log( e^s_ip / D_ip ), where d_i is |P(i)| or Σ w_ip.
    """
    if negative_weights is not None:
        s = repeated(s, N, negative_weights)
    pairs = cross_entropies(s, i, A, P, N, denominator)
    if positive_weights is None or not pairs:
        return mean([pair.value for pair in pairs], empty=no_negative), pairs
    pairs = [replace(pair, weight=zero_like(pair.value) + positive_weights[pair.other]) for pair in pairs]
    divisor = len(pairs) if weights_divisor == "count" else total(pair.weight for pair in pairs)
    return total(pair.weight * pair.value for pair in pairs) / divisor, pairs


def repeated(s: Row, N: Columns, v: Sequence[float]) -> list[Scalar]:
    """Add log v_n to the logits of negatives. Their exponentials are then v_n e^s_n."""
    return [s_n + np.log(zero_like(s_n) + v[n]) if n in N else s_n for n, s_n in enumerate(s)]


def supcon_in_anchor(
    s: Row,
    i: int,
    A: Columns,
    P: Columns,
    N: Columns,
    *,
    denominator: str = "all",
    inside_reduction: str = "mean",
    no_negative: str = "zero",
) -> Anchor:
    """L_i = -log( 1/|P(i)| Σ_{p∈P(i)} e^s_ip / D_ip ): arXiv 2004.11362, equation 3 (L_in).

    If ``inside_reduction`` is "sum", L_i = -log( Σ_{p∈P(i)} e^s_ip / D_ip ).
    """
    pairs = cross_entropies(s, i, A, P, N, denominator)
    log_ratios = [-pair.value for pair in pairs]
    if inside_reduction == "mean":
        return -log_mean_exp(log_ratios, empty=no_negative), pairs
    if denominator == "all":
        # The sum of the ratios is 1 / (1 + Σ_{n∈N(i)} e^s_in / Σ_{p∈P(i)} e^s_ip). softplus is accurate near 0.
        return softplus(log_sum_exp([s[n] for n in N]) - log_sum_exp([s[p] for p in P])) if N else 0.0, pairs
    return -log_sum_exp(log_ratios, empty=no_negative), pairs


def supcon_epsilon_anchor(s: Row, i: int, A: Columns, P: Columns, N: Columns) -> Anchor:
    """L_i = 1/(|P(i)| + ε) Σ_{p∈P(i)} -log( e_ip / Σ_{a∈A(i)} e_ia ): the batch tutorial."""
    compared = sorted([i, *A])
    maximum = s[compared[largest([s[k] for k in compared])]]
    e = {a: np.exp(s[a] - maximum) + EPSILON for a in A}
    pairs = [cross_entropy_of_exponentials(e, i, p, A, shift=maximum) for p in P]
    return total(pair.value for pair in pairs) / (zero_like(maximum) + len(P) + EPSILON), pairs


def supcon_loss(
    embeddings: npt.ArrayLike,
    labels: npt.ArrayLike | None = None,
    *,
    positives: npt.ArrayLike | None = None,
    anchors: npt.ArrayLike | None = None,
    ref_embeddings: npt.ArrayLike | None = None,
    ref_labels: npt.ArrayLike | None = None,
    self_rows: npt.ArrayLike | None = None,
    ignored: npt.ArrayLike | None = None,
    ignored_ids: npt.ArrayLike | None = None,
    ref_ignored_ids: npt.ArrayLike | None = None,
    positive_weights: npt.ArrayLike | None = None,
    negative_weights: npt.ArrayLike | None = None,
    anchor_weights: npt.ArrayLike | None = None,
    temperature: float = 0.07,
    base_temperature: float | None = None,
    similarity: str = "cosine",
    zero_row: str = "error",
    denominator: str = "all",
    weights_divisor: str = "count",
    no_positive: str = "zero",
    no_negative: str = "zero",
    reduction: str = "mean",
) -> Result:
    """Supervised contrastive loss with the sum over positives outside the logarithm (L_out).

    Example:
        >>> z = [[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]]
        >>> loss, terms = supcon_loss(z, [0, 0, 1, 1], temperature=0.5)
        >>> print(f"{loss:.4f}")
        0.4302

    Args:
        embeddings: [N, D] floats, complex numbers, or intervals (balls of python-flint).
        labels: [N] integers; rows with equal labels are positives of each other.
        positives: bool [N, N], or [N, M] with ref_embeddings, instead of labels: True if the column is a positive of
            the row. May be asymmetric; self pairs have no effect.
        anchors: bool [N], the rows that are anchors; all rows by default.
        ref_embeddings: [M, D], rows to contrast anchors with instead of the batch: a memory bank, a queue, or the
            gathered rows of all devices.
        ref_labels: [M] integers; reference a is a positive of anchor i if ref_labels[a] == labels[i].
        self_rows: [N] integers, the row of ref_embeddings that is the anchor itself and is left out; -1 (the default)
            if there is none.
        ignored: bool [N, N], or [N, M] with ref_embeddings: the pairs (row, column) to leave out of numerator and
            denominator, even positives. May be asymmetric; self pairs have no effect.
        ignored_ids: [N] integers. Negatives with the anchor's id are left out, for example duplicates.
        ref_ignored_ids: [M] integers, the ids of ref_embeddings; give both kinds of ids or neither.
        positive_weights: float32 or float64 [N, N], or [N, M] with ref_embeddings, from 0 to 1e10: the factors of the
            -log ratios of positives. Other entries have no effect. An anchor whose positives all have weight 0 has no
            positives.
        negative_weights: the same for negatives: the factors of their exponentials in the denominator, such as how
            often a miner chose them. A negative of weight 0 is left out.
        anchor_weights: float32 or float64 [N], from 0 to 1e10: the factors of the anchors' values. The mean divides by
            the sum of the weights of anchors that are not dropped, and is 0 if the sum is 0.
        temperature: number from 1e-10 to 1e10; logits are similarities divided by it.
        base_temperature: if given, the loss is multiplied by temperature / base_temperature.
        similarity: "cosine" or "dot".
        zero_row: for a row of zeros, "error" raises ValueError, and "zero" makes its cosines and its gradient 0. No
            effect with "dot".
        denominator: what the denominator of a positive sums over: "all" (positives and negatives), "one_positive" (this
            positive and the negatives) or "only_negatives".
        weights_divisor: the divisor of the weighted sum over the positives: "count" (their number) or "weight" (the sum
            of their weights).
        no_positive: the value of an anchor without positives: "zero", "nan" or "drop" (left out).
        no_negative: with "only_negatives", the value of an anchor without negatives: "zero" or "nan".
        reduction: "mean" or "sum" over the anchors, or "none": a list with one value per anchor that is not dropped.

    Returns:
        The loss and its terms.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value.

    Source:
        SupCon paper, arXiv 2004.11362, equation 2. References: MoCo, arXiv 1911.05722, and cross-batch memory, arXiv
        1912.06798.
    """
    return evaluate(supcon_anchor, **locals())


def supcon_in_loss(
    embeddings: npt.ArrayLike,
    labels: npt.ArrayLike | None = None,
    *,
    positives: npt.ArrayLike | None = None,
    anchors: npt.ArrayLike | None = None,
    ref_embeddings: npt.ArrayLike | None = None,
    ref_labels: npt.ArrayLike | None = None,
    self_rows: npt.ArrayLike | None = None,
    ignored: npt.ArrayLike | None = None,
    ignored_ids: npt.ArrayLike | None = None,
    ref_ignored_ids: npt.ArrayLike | None = None,
    temperature: float = 0.07,
    base_temperature: float | None = None,
    similarity: str = "cosine",
    denominator: str = "all",
    inside_reduction: str = "mean",
    no_positive: str = "zero",
    no_negative: str = "zero",
    reduction: str = "mean",
) -> Result:
    """Supervised contrastive loss with the sum over positives inside the logarithm (L_in).

    Example:
        >>> z = [[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]]
        >>> loss, terms = supcon_in_loss(z, [0, 0, 0, 1], temperature=0.5)
        >>> print(f"{loss:.4f}")
        0.7517

    Args:
        embeddings: [N, D] floats, complex numbers, or intervals (balls of python-flint).
        labels: [N] integers; rows with equal labels are positives of each other.
        positives: bool [N, N], or [N, M] with ref_embeddings, instead of labels: True if the column is a positive of
            the row. May be asymmetric; self pairs have no effect.
        anchors: bool [N], the rows that are anchors; all rows by default.
        ref_embeddings: [M, D], rows to contrast anchors with instead of the batch: a memory bank, a queue, or the
            gathered rows of all devices.
        ref_labels: [M] integers; reference a is a positive of anchor i if ref_labels[a] == labels[i].
        self_rows: [N] integers, the row of ref_embeddings that is the anchor itself and is left out; -1 (the default)
            if there is none.
        ignored: bool [N, N], or [N, M] with ref_embeddings: the pairs (row, column) to leave out of numerator and
            denominator, even positives. May be asymmetric; self pairs have no effect.
        ignored_ids: [N] integers. Negatives with the anchor's id are left out, for example duplicates.
        ref_ignored_ids: [M] integers, the ids of ref_embeddings; give both kinds of ids or neither.
        temperature: number from 1e-10 to 1e10; logits are similarities divided by it.
        base_temperature: if given, the loss is multiplied by temperature / base_temperature.
        similarity: "cosine" or "dot".
        denominator: what the denominator of a positive sums over: "all" (positives and negatives), "one_positive" (this
            positive and the negatives) or "only_negatives".
        inside_reduction: "mean" or "sum" of the ratios inside the logarithm. With "sum", the value is smaller by
            log |P(i)|, and the gradient is the same.
        no_positive: the value of an anchor without positives: "zero", "nan" or "drop" (left out).
        no_negative: with "only_negatives", the value of an anchor without negatives: "zero" or "nan".
        reduction: "mean" or "sum" over the anchors, or "none": a list with one value per anchor that is not dropped.

    Returns:
        The loss and its terms.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value.

    Source:
        SupCon paper, arXiv 2004.11362, equation 3. Public code with "sum": ``simclr_loss_func`` of vturrisi/solo-learn
        at commit 9187ea3, ``init_suncet_loss`` of facebookresearch/suncet at commit 731547d, and ``SupConLossV2`` of
        megvii-research/FSCE at commit 94ba3f4.
    """
    return evaluate(supcon_in_anchor, **locals())


def supcon_epsilon_loss(
    embeddings: npt.ArrayLike,
    labels: npt.ArrayLike | None = None,
    *,
    positives: npt.ArrayLike | None = None,
    anchors: npt.ArrayLike | None = None,
    ignored: npt.ArrayLike | None = None,
    ignored_ids: npt.ArrayLike | None = None,
    temperature: float = 0.07,
    base_temperature: float | None = None,
    similarity: str = "dot",
    no_positive: str = "zero",
    reduction: str = "mean",
) -> Result:
    """The batch tutorial's supervised contrastive loss: 1e-8 is added to every exponential and every |P(i)|.

    The maximum of each row of logits is subtracted first. It includes the self pair, but no ignored pairs. The gradient
    of this loss flows through the maximum; the tutorial detaches it.

    Example:
        >>> z = [[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]]
        >>> loss, terms = supcon_epsilon_loss(z, [0, 0, 1, 1], temperature=0.5)
        >>> print(f"{loss:.4f}")
        0.4302

    Args:
        embeddings: [N, D] floats, complex numbers, or intervals (balls of python-flint).
        labels: [N] integers; rows with equal labels are positives of each other.
        positives: bool [N, N], instead of labels: True if the column is a positive of the row. May be asymmetric; the
            diagonal has no effect.
        anchors: bool [N], the rows that are anchors; all rows by default.
        ignored: bool [N, N], the pairs (row, column) to leave out of numerator, denominator and maximum, even
            positives. May be asymmetric; the diagonal has no effect.
        ignored_ids: [N] integers. Negatives with the anchor's id are left out, for example duplicates.
        temperature: number from 1e-10 to 1e10; logits are similarities divided by it.
        base_temperature: if given, the loss is multiplied by temperature / base_temperature.
        similarity: "cosine" or "dot".
        no_positive: the value of an anchor without positives: "zero", "nan" or "drop" (left out).
        reduction: "mean" or "sum" over the anchors, or "none": a list with one value per anchor that is not dropped.

    Returns:
        The loss and its terms.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value.

    Source:
        The batch tutorial, 31 January 2023.
    """
    return evaluate(supcon_epsilon_anchor, **locals())
