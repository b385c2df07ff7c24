"""SupCon with the sum over positives outside or inside the logarithm, and the batch tutorial's variant of it.

Let s_ij = similarity(z_i, z_j) / temperature. A(i) is the set of all columns except i. With references, it is the set
of all references except the one that is row i itself, if there is one. P(i) is the set of positives of i in A(i), and
N(i) is the rest of A(i). The loss of anchor i is

    supcon_loss          L_i = 1/|P(i)| Σ_{p∈P(i)} -log( e^s_ip / D_ip )                           (L_out)
    supcon_in_loss       L_i = -log( 1/|P(i)| Σ_{p∈P(i)} e^s_ip / D_ip )                           (L_in)
    supcon_epsilon_loss  L_i = 1/(|P(i)| + ε) Σ_{p∈P(i)} -log( e_ip / Σ_{a∈A(i)} e_ia )
                         with e_ij = exp( s_ij - max_k s_ik ) + ε, where k is in A(i) or i itself, and ε = 1e-8

The argument ``denominator`` selects D_ip (the names are those of the authors' TensorFlow code):

    "all"             Σ_{a∈A(i)} e^s_ia
    "one_positive"    e^s_ip + Σ_{n∈N(i)} e^s_in
    "only_negatives"  Σ_{n∈N(i)} e^s_in

With weights w_ip = positive_weights[i][p] and v_in = negative_weights[i][n], which are constants,

    supcon_loss          L_i = 1/d_i Σ_{p∈P(i)} w_ip · -log( e^s_ip / D_ip )

where d_i is |P(i)|, or Σ_{p∈P(i)} w_ip with ``weights_divisor="weight"``. In D_ip, the exponential e^s_in of a negative
is multiplied by v_in. The exponentials of positives are not weighted. A(i) does not contain negatives of weight 0. It
contains positives of weight 0, unless all positives of the anchor have weight 0. Such an anchor has no positives.

With ``inside_reduction="sum"``, supcon_in_loss leaves out 1/|P(i)|. This subtracts the constant log |P(i)| from L_i.

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
    """Return the pairs with values -log( e^s_ip / D_ip ), for every p in P(i) whose D_ip has members."""
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

    With ``positive_weights``, w, L_i = 1/d_i Σ_{p∈P(i)} w_ip · -log( e^s_ip / D_ip ), where d_i is |P(i)| or Σ w_ip.
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
    """Return the logits with log v_n added to those of negatives, whose exponentials are then v_n e^s_n."""
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
        # The sum of the ratios is 1 / (1 + Σ_{n∈N(i)} e^s_in / Σ_{p∈P(i)} e^s_ip): a loss near 0 keeps its digits.
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
        embeddings: [N, D] floats; complex numbers and intervals (balls of python-flint) are accepted too.
        labels: [N] integers; rows with equal labels are positives of each other.
        positives: bool [N, N] instead of labels; may be asymmetric, and its diagonal is ignored. With ref_embeddings
            bool [N, M], and the entry at self_rows[i] is ignored.
        anchors: bool [N], the rows that are anchors; all rows by default.
        ref_embeddings: [M, D], rows that anchors are contrasted with instead of the batch: a memory bank, a queue, or
            the gathered rows of all devices. N may then be 1.
        ref_labels: [M] integers; reference a is a positive of anchor i if ref_labels[a] == labels[i].
        self_rows: [N] integers, the row of ref_embeddings that is anchor i and is left out, or -1; -1 by default.
        ignored: bool [N, N], with ref_embeddings [N, M]: the pairs (row, column) that are left out of numerator and
            denominator, positives included. May be asymmetric; self pairs have no effect.
        ignored_ids: [N] integers; a pair of rows with equal ids is left out unless the column is a positive of the row.
        ref_ignored_ids: [M] integers, the ids of the references; with ref_embeddings, both or neither are given.
        positive_weights: float32 or float64 [N, N], with ref_embeddings [N, M], from 0 to 1e10: the factor of each
            positive's -log ratio. Entries of other pairs have no effect. An anchor whose positives all have weight 0
            has no positives.
        negative_weights: the same for negatives: the factor of each negative's exponential in the denominator, such as
            how often a miner has chosen it. A negative of weight 0 is left out.
        anchor_weights: float32 or float64 [N], from 0 to 1e10: the factor of each anchor's value. The mean divides by
            the sum of the weights of the anchors that count; it is 0 if they are all 0.
        temperature: number from 1e-10 to 1e10; logits are similarities divided by it.
        base_temperature: if given, the loss is multiplied by temperature / base_temperature.
        similarity: "cosine" or "dot".
        zero_row: how "cosine" treats a row of zeros. "error": as an error. "zero": its cosine with every row is 0, and
            its gradient is 0. Under "dot" a row of zeros is valid, and this option has no effect.
        denominator: what is summed in the denominator of a positive: "all" (positives and negatives), "one_positive"
            (this positive and the negatives) or "only_negatives".
        weights_divisor: what the weighted sum over the positives is divided by: their number, "count", or the sum of
            their weights, "weight".
        no_positive: the value of an anchor without positives: "zero", "drop" (left out of the mean) or "nan".
        no_negative: the value of an anchor without negatives under denominator "only_negatives": "zero" or "nan".
        reduction: "mean" over the anchors, "sum", or "none" (a list, one value per anchor not dropped).

    Returns:
        The loss and its terms.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value.

    Source:
        SupCon paper, arXiv 2004.11362, equation 2; for references MoCo, arXiv 1911.05722, and cross-batch memory,
        arXiv 1912.06798.
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
        embeddings: [N, D] floats; complex numbers and intervals (balls of python-flint) are accepted too.
        labels: [N] integers; rows with equal labels are positives of each other.
        positives: bool [N, N] instead of labels; may be asymmetric, and its diagonal is ignored. With ref_embeddings
            bool [N, M], and the entry at self_rows[i] is ignored.
        anchors: bool [N], the rows that are anchors; all rows by default.
        ref_embeddings: [M, D], rows that anchors are contrasted with instead of the batch: a memory bank, a queue, or
            the gathered rows of all devices. N may then be 1.
        ref_labels: [M] integers; reference a is a positive of anchor i if ref_labels[a] == labels[i].
        self_rows: [N] integers, the row of ref_embeddings that is anchor i and is left out, or -1; -1 by default.
        ignored: bool [N, N], with ref_embeddings [N, M]: the pairs (row, column) that are left out of numerator and
            denominator, positives included. May be asymmetric; self pairs have no effect.
        ignored_ids: [N] integers; a pair of rows with equal ids is left out unless the column is a positive of the row.
        ref_ignored_ids: [M] integers, the ids of the references; with ref_embeddings, both or neither are given.
        temperature: number from 1e-10 to 1e10; logits are similarities divided by it.
        base_temperature: if given, the loss is multiplied by temperature / base_temperature.
        similarity: "cosine" or "dot".
        denominator: what is summed in the denominator of a positive: "all" (positives and negatives), "one_positive"
            (this positive and the negatives) or "only_negatives".
        inside_reduction: "mean" of the ratios inside the logarithm, or "sum", which leaves out 1/|P(i)|: the value is
            smaller by log |P(i)|, and the gradient is the same.
        no_positive: the value of an anchor without positives: "zero", "drop" (left out of the mean) or "nan".
        no_negative: the value of an anchor without negatives under denominator "only_negatives": "zero" or "nan".
        reduction: "mean" over the anchors, "sum", or "none" (a list, one value per anchor not dropped).

    Returns:
        The loss and its terms.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value.

    Source:
        SupCon paper, arXiv 2004.11362, equation 3. The "sum" is what public code computes: ``simclr_loss_func`` of
        vturrisi/solo-learn at commit 9187ea3, ``init_suncet_loss`` of facebookresearch/suncet at commit 731547d, and
        ``SupConLossV2`` of megvii-research/FSCE at commit 94ba3f4.
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
    """The batch tutorial's supervised contrastive loss: an epsilon is added to every exponential and every |P(i)|.

    Logits are relative to the row's maximum, which includes the self-similarity, but no ignored pair. The derivative of
    this loss includes that of the maximum; the tutorial detaches the maximum.

    Example:
        >>> z = [[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]]
        >>> loss, terms = supcon_epsilon_loss(z, [0, 0, 1, 1], temperature=0.5)
        >>> print(f"{loss:.4f}")
        0.4302

    Args:
        embeddings: [N, D] floats; complex numbers and intervals (balls of python-flint) are accepted too.
        labels: [N] integers; rows with equal labels are positives of each other.
        positives: bool [N, N] instead of labels; may be asymmetric, and its diagonal is ignored.
        anchors: bool [N], the rows that are anchors; all rows by default.
        ignored: bool [N, N], the pairs (row, column) that are left out of numerator, denominator and maximum, positives
            included. May be asymmetric; self pairs have no effect.
        ignored_ids: [N] integers; a pair of rows with equal ids is left out unless the column is a positive of the row.
        temperature: number from 1e-10 to 1e10; logits are similarities divided by it.
        base_temperature: if given, the loss is multiplied by temperature / base_temperature.
        similarity: "cosine" or "dot".
        no_positive: the value of an anchor without positives: "zero", "drop" (left out of the mean) or "nan".
        reduction: "mean" over the anchors, "sum", or "none" (a list, one value per anchor not dropped).

    Returns:
        The loss and its terms.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value.

    Source:
        The batch tutorial, 31 January 2023.
    """
    return evaluate(supcon_epsilon_anchor, **locals())
