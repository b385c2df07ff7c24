"""Supervised contrastive losses: SupCon outside the logarithm, inside the logarithm, and the batch tutorial's variant.

With s_ij = similarity(z_i, z_j) / temperature, A(i) every index but i (with references: every one of them but the row
that is i), P(i) the positives of i and N(i) the rest of A(i), anchor i contributes

    supcon_loss      L_i = mean over p in P(i) of  -log( e^s_ip / D_ip )             SupCon paper, equation 2 (L_out)
    supcon_in_loss   L_i = -log( mean over p in P(i) of  e^s_ip / D_ip )             SupCon paper, equation 3 (L_in)

where D_ip is, by ``denominator`` (the names are those of the authors' TensorFlow code),

    "all"             sum over a in A(i) of e^s_ia
    "one_positive"    e^s_ip + sum over n in N(i) of e^s_in
    "only_negatives"  sum over n in N(i) of e^s_in

    supcon_epsilon_loss  e_ij = exp(s_ij - max over j of s_ij, i itself included) + 1e-8
                         L_i = sum over p in P(i) of -log( e_ip / sum over a in A(i) of e_ia ) / (|P(i)| + 1e-8)

Sources: Khosla et al., "Supervised Contrastive Learning", arXiv 2004.11362; the batch tutorial "Implement Supervised
Contrastive Loss in a Batch with PyTorch", 31 January 2023.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .batch import NAN, Batch, prepare
from .checks import check_choice
from .similarity import largest, order, shifted_sum
from .terms import Pair, Result, Scalar

EPSILON = 1e-8


def denominator_members(batch: Batch, i: int, p: int, denominator: str) -> list[int]:
    """The rows whose exponentials D_ip sums."""
    if denominator == "all":
        return batch.others[i]
    if denominator == "one_positive":
        return sorted([p, *batch.negatives[i]])
    return batch.negatives[i]


def add_pair(batch: Batch, i: int, p: int, members: list[int]) -> Pair:
    """Evaluate -log( e^s_ip / sum over members of e^s_ia ) and record its terms."""
    s = batch.logits[i]
    largest_member, rest = shifted_sum([s[a] for a in members])
    # The positive is no member of a denominator of negatives alone, and may exceed them all.
    shift = largest_member if order(largest_member) >= order(s[p]) else s[p]
    pair = Pair(
        anchor=i,
        other=p,
        positive=True,
        members=tuple(members),
        shift=shift,
        numerator=np.exp(s[p] - shift),
        denominator=np.exp(largest_member - shift) * (1 + rest),
        log_numerator=s[p],
        log_denominator=largest_member + np.log1p(rest),
        value=(largest_member - s[p]) + np.log1p(rest),
    )
    batch.pairs[i, p] = pair
    return pair


def mean_of_values(pairs: list[Pair], zero: Scalar) -> Scalar:
    """Outside the logarithm: the mean over the positives of -log(numerator / denominator)."""
    total = zero
    for pair in pairs:
        total = total + pair.value
    return total / len(pairs)


def value_of_mean(pairs: list[Pair], zero: Scalar) -> Scalar:
    """Inside the logarithm: -log of the mean over the positives of numerator / denominator.

    The ratios are e^-value. They are taken relative to the largest of them, and as differences from it, so that
    neither very small ratios underflow nor ratios close to 1 (a solved batch) round to 1.
    """
    top = pairs[largest([-pair.value for pair in pairs])]
    total = zero
    for pair in pairs:
        total = total + np.expm1(top.value - pair.value)
    return top.value - np.log1p(total / len(pairs))


def sum_anchors(batch: Batch, *, denominator: str, no_negative: str, inside: bool) -> None:
    """Evaluate every anchor of L_out, or of L_in if ``inside``."""
    for i in batch.anchors:
        if not batch.positives[i]:
            batch.anchor_losses[i] = batch.zero
        elif denominator == "only_negatives" and not batch.negatives[i]:
            batch.anchor_losses[i] = batch.zero + (NAN if no_negative == "nan" else 0)
        else:
            pairs = [add_pair(batch, i, p, denominator_members(batch, i, p, denominator)) for p in batch.positives[i]]
            batch.anchor_losses[i] = (value_of_mean if inside else mean_of_values)(pairs, batch.zero)


def epsilon_anchors(batch: Batch) -> None:
    """Evaluate every anchor of the batch tutorial's loss."""
    for i in batch.anchors:
        s = batch.logits[i]
        maximum = s[largest(s)]
        e = [np.exp(s_ij - maximum) + EPSILON for s_ij in s]
        total = batch.zero
        for a in batch.others[i]:
            total = total + e[a]
        anchor_loss = batch.zero
        for p in batch.positives[i]:
            rest = batch.zero
            for a in batch.others[i]:
                if a != p:
                    rest = rest + e[a]
            # -log(e_p / total), with e_p taken out of the total so that a small loss keeps its digits.
            value = np.log1p(rest / e[p])
            batch.pairs[i, p] = Pair(
                anchor=i,
                other=p,
                positive=True,
                members=tuple(batch.others[i]),
                shift=maximum,
                numerator=e[p],
                denominator=total,
                log_numerator=maximum + np.log(e[p]),
                log_denominator=maximum + np.log(total),
                value=value,
            )
            anchor_loss = anchor_loss + value
        batch.anchor_losses[i] = anchor_loss / (batch.zero + len(batch.positives[i]) + EPSILON)


def _supcon(
    embeddings: npt.ArrayLike,
    labels: npt.ArrayLike | None,
    positives: npt.ArrayLike | None,
    anchors: npt.ArrayLike | None,
    ref_embeddings: npt.ArrayLike | None,
    ref_labels: npt.ArrayLike | None,
    self_rows: npt.ArrayLike | None,
    temperature: float,
    base_temperature: float | None,
    similarity: str,
    denominator: str,
    no_positive: str,
    no_negative: str,
    reduction: str,
    inside: bool,
) -> Result:
    check_choice("denominator", denominator)
    check_choice("no_positive", no_positive)
    check_choice("no_negative", no_negative)
    check_choice("reduction", reduction)
    batch = prepare(
        embeddings,
        labels=labels,
        positives=positives,
        anchors=anchors,
        temperature=temperature,
        base_temperature=base_temperature,
        similarity=similarity,
        ref_embeddings=ref_embeddings,
        ref_labels=ref_labels,
        self_rows=self_rows,
    )
    sum_anchors(batch, denominator=denominator, no_negative=no_negative, inside=inside)
    return batch.finish(reduction, no_positive)


def supcon_loss(
    embeddings: npt.ArrayLike,
    labels: npt.ArrayLike | None = None,
    *,
    positives: npt.ArrayLike | None = None,
    anchors: npt.ArrayLike | None = None,
    ref_embeddings: npt.ArrayLike | None = None,
    ref_labels: npt.ArrayLike | None = None,
    self_rows: npt.ArrayLike | None = None,
    temperature: float = 0.07,
    base_temperature: float | None = None,
    similarity: str = "cosine",
    denominator: str = "all",
    no_positive: str = "zero",
    no_negative: str = "zero",
    reduction: str = "mean",
) -> Result:
    """Supervised contrastive loss with the sum over positives outside the logarithm (L_out).

    Args:
        embeddings: [N, D] floats, complexes or balls.
        labels: [N] integers; rows of one label are each other's positives.
        positives: bool [N, N] in place of labels; may be asymmetric, its diagonal is ignored. With ref_embeddings
            bool [N, M], the entry at self_rows[i] ignored.
        anchors: bool [N], the rows that are anchors; all of them by default.
        ref_embeddings: [M, D], the rows that anchors are contrasted with in place of the batch itself: a memory bank,
            a queue, the gathered rows of every device. N may then be 1.
        ref_labels: [M] integers; reference a is a positive of anchor i where ref_labels[a] == labels[i].
        self_rows: [N] integers, the row of ref_embeddings that is anchor i and is left out, or -1; by default none is.
        temperature: positive; logits are similarities divided by it.
        base_temperature: if given, the loss is multiplied by temperature / base_temperature.
        similarity: "cosine" or "dot".
        denominator: "all", "one_positive" or "only_negatives".
        no_positive: what an anchor without positive adds: "zero", "drop" (it leaves the mean) or "nan".
        no_negative: what an anchor without negatives adds when the denominator is made of negatives alone: "zero"
            or "nan".
        reduction: "mean" over the anchors, "sum", or "none" (a list, one value per anchor).

    Returns:
        The loss and its terms.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape or value.

    Source:
        SupCon paper, arXiv 2004.11362, equation 2; for references MoCo, arXiv 1911.05722, and cross-batch memory,
        arXiv 1912.06798.
    """
    return _supcon(
        embeddings,
        labels,
        positives,
        anchors,
        ref_embeddings,
        ref_labels,
        self_rows,
        temperature,
        base_temperature,
        similarity,
        denominator,
        no_positive,
        no_negative,
        reduction,
        inside=False,
    )


def supcon_in_loss(
    embeddings: npt.ArrayLike,
    labels: npt.ArrayLike | None = None,
    *,
    positives: npt.ArrayLike | None = None,
    anchors: npt.ArrayLike | None = None,
    ref_embeddings: npt.ArrayLike | None = None,
    ref_labels: npt.ArrayLike | None = None,
    self_rows: npt.ArrayLike | None = None,
    temperature: float = 0.07,
    base_temperature: float | None = None,
    similarity: str = "cosine",
    denominator: str = "all",
    no_positive: str = "zero",
    no_negative: str = "zero",
    reduction: str = "mean",
) -> Result:
    """Supervised contrastive loss with the sum over positives inside the logarithm (L_in).

    Arguments, errors and result are those of supcon_loss. With denominator "one_positive" each numerator has its own
    denominator.

    Source:
        SupCon paper, arXiv 2004.11362, equation 3.
    """
    return _supcon(
        embeddings,
        labels,
        positives,
        anchors,
        ref_embeddings,
        ref_labels,
        self_rows,
        temperature,
        base_temperature,
        similarity,
        denominator,
        no_positive,
        no_negative,
        reduction,
        inside=True,
    )


def supcon_epsilon_loss(
    embeddings: npt.ArrayLike,
    labels: npt.ArrayLike | None = None,
    *,
    positives: npt.ArrayLike | None = None,
    anchors: npt.ArrayLike | None = None,
    temperature: float = 0.07,
    base_temperature: float | None = None,
    similarity: str = "dot",
    no_positive: str = "zero",
    reduction: str = "mean",
) -> Result:
    """The batch tutorial's loss: dot products, the row's maximum with the self-similarity in it, and an epsilon.

    Arguments, errors and result are those of supcon_loss, which alone takes references: the maximum of this one is
    over the batch itself. The derivative of these loops goes through the maximum; the
    tutorial detaches it.

    Source:
        The batch tutorial, 31 January 2023.
    """
    check_choice("no_positive", no_positive)
    check_choice("reduction", reduction)
    batch = prepare(
        embeddings,
        labels=labels,
        positives=positives,
        anchors=anchors,
        temperature=temperature,
        base_temperature=base_temperature,
        similarity=similarity,
    )
    epsilon_anchors(batch)
    return batch.finish(reduction, no_positive)
