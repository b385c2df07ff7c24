"""NT-Xent: the normalised, temperature-scaled cross-entropy, with one positive per anchor or for every positive pair.

Let s_ij be the similarity of rows i and j divided by the temperature. A(i) is the set of all rows except i. With
references, it is the set of all references except the one that is row i itself, if there is one. P(i) is the set of
positives of i in A(i), and N(i) the rest of A(i). The loss of anchor i is

    nt_xent           -log(e^s_ip / sum over a in A(i) of e^s_ia), p the row's partner
    nt_xent_pairwise  mean over p in P(i) of -log(e^s_ip / (e^s_ip + sum over n in N(i) of e^s_in))

Sources: Chen et al. 2020, "A Simple Framework for Contrastive Learning of Visual Representations" (SimCLR), arXiv
2002.05709, equation 1. The pairwise form is pytorch-metric-learning's ``NTXentLoss``; see issue 6 of that project.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from torch import Tensor

from .checks import (
    PAIR_REDUCTIONS,
    across_ranks,
    check_anchors,
    check_embeddings,
    check_ignored,
    check_options,
    check_partners,
    check_references,
    check_weights,
    ranks_of,
)
from .distributed import Group
from .engine import Backend, Batch, Policy, Rule, Similarity, WeightsDivisor, ZeroRow, loss_of
from .supcon import labelled_loss

Reduction = Literal["mean", "sum", "none"]
PairReduction = Literal["mean", "sum", "none", "mean_pairs", "sum_pairs", "none_pairs"]
NoPositive = Literal["zero", "drop", "nan"]


@across_ranks
def nt_xent_loss(
    embeddings: Tensor,
    partners: Tensor,
    *,
    anchors: Tensor | None = None,
    ref_embeddings: Tensor | None = None,
    self_rows: Tensor | None = None,
    ignored: Tensor | None = None,
    ignored_ids: Tensor | None = None,
    ref_ignored_ids: Tensor | None = None,
    anchor_weights: Tensor | None = None,
    temperature: float | Tensor = 0.07,
    base_temperature: float | None = None,
    similarity: Similarity = "cosine",
    zero_row: ZeroRow = "error",
    reduction: Reduction = "mean",
    validate: bool = False,
    backend: Backend = "auto",
    group: Group = None,
) -> Tensor:
    """NT-Xent with exactly one positive per anchor: the cross-entropy of each row of logits.

    Example:
        >>> import torch
        >>> from pairproof.fast import nt_xent_loss, stacked_partners
        >>> z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]])
        >>> loss = nt_xent_loss(z, stacked_partners(4), temperature=0.5)
        >>> print(f"{loss:.4f}")
        2.0302

    Args:
        embeddings: floating ``[N, D]``, N >= 2, or with references N >= 1.
        partners: integers ``[N]``, the row of each row's positive: mutual, never the row itself. `stacked_partners` and
            `interleaved_partners` return them for two views per item. With references, partners[i] is any row of the
            references except self_rows[i], and need not be mutual. For class labels use `nt_xent_pairwise_loss`.
        anchors: bool ``[N]``, the rows that are anchors; None: all rows.
        ref_embeddings: floating ``[M, D]``, rows that anchors are contrasted with instead of the batch: a memory bank,
            a queue, or the gathered rows of all devices. None: the batch.
        self_rows: integers ``[N]``, the reference that is the anchor itself and is left out, or -1; None: all -1.
        ignored: bool ``[N, N]``, with references ``[N, M]``: the pairs (row, column) that are left out of numerator and
            denominator. A row and its partner must not be ignored. May be asymmetric.
        ignored_ids: integers ``[N]``; a pair of rows with equal ids is left out unless the column is the row's
            partner. For duplicates among the negatives; needs no array of all pairs.
        ref_ignored_ids: integers ``[M]``, the ids of the references; with references, both or neither are given.
        anchor_weights: float32 or float64 ``[N]``, from 0 to 1e10: the factor of each anchor's value. The mean divides
            by the sum of the weights of the anchors; it is 0 if they are all 0. Weights are constants, and must not
            require a gradient.
        temperature: number from 1e-10 to 1e10 that similarities are divided by, or a 0-dimensional tensor, which may
            require a gradient.
        base_temperature: None, or a positive number: the loss is scaled by ``temperature / base_temperature``.
        similarity: "cosine" or "dot".
        zero_row: how "cosine" treats a row of zeros. "error": as an error. "zero": its cosine with every row is 0, and
            its gradient is 0. Under "dot" a row of zeros is valid, and this option has no effect.
        reduction: "mean" or "sum" over the anchors, or "none": one value per anchor, in row order.
        validate: also check values on devices other than the CPU, which synchronises with the device.
        backend: "auto", "dense", "tiled", "exact" or "triton"; see `pairproof.fast.engine`.
        group: the processes that have the other rows of the batch: a process group of torch.distributed, or "world";
            None: this process has all rows. See `pairproof.fast.distributed`.

    Returns:
        A scalar, or ``[anchors]`` under "none"; float64 for float64 embeddings, else float32.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, value or device, or an option is unknown.

    Source:
        Chen et al. 2020, arXiv 2002.05709, equation 1.
    """
    rule, policy = Rule("out", similarity, temperature, zero_row=zero_row), Policy(reduction, base_temperature)
    check_options(rule, policy, backend, validate=validate)
    ranks = None if group is None else ranks_of(group)
    shared = ranks is not None and ref_embeddings is None
    least = 0 if ranks is not None else 2 if ref_embeddings is None else 1
    # With zero_row="zero", rows of zeros are valid, as for dot products.
    checked = "dot" if rule.zero_row == "zero" else rule.similarity
    sizes = check_embeddings(embeddings, similarity=checked, validate=validate, least=least)
    references = check_references(embeddings, ref_embeddings, None, self_rows, similarity=checked, validate=validate)
    targets = check_partners(embeddings, partners, references, validate=validate)
    if anchors is not None:
        check_anchors(embeddings, anchors)
    if anchor_weights is not None:
        policy = replace(
            policy, anchor_weights=check_weights(embeddings, "anchor_weights", anchor_weights, validate=validate)
        )
    if ignored is not None or ignored_ids is not None or ref_ignored_ids is not None:
        left_out = ignored, ignored_ids, ref_ignored_ids
        targets = check_ignored(embeddings, targets, references, *left_out, validate=validate, shared=shared)
    batch = Batch(embeddings, targets, rule, references, anchors, sizes=sizes)
    if ranks is not None:
        batch, policy = ranks.shared(batch, policy, backend)
    return loss_of(batch, policy, backend)


@across_ranks
def nt_xent_pairwise_loss(
    embeddings: Tensor,
    labels: Tensor | None = None,
    *,
    positives: Tensor | None = None,
    anchors: Tensor | None = None,
    ref_embeddings: Tensor | None = None,
    ref_labels: Tensor | None = None,
    self_rows: Tensor | None = None,
    ignored: Tensor | None = None,
    ignored_ids: Tensor | None = None,
    ref_ignored_ids: Tensor | None = None,
    positive_weights: Tensor | None = None,
    negative_weights: Tensor | None = None,
    anchor_weights: Tensor | None = None,
    temperature: float | Tensor = 0.07,
    base_temperature: float | None = None,
    similarity: Similarity = "cosine",
    weights_divisor: WeightsDivisor = "count",
    no_positive: NoPositive = "zero",
    reduction: PairReduction = "mean",
    validate: bool = False,
    backend: Backend = "auto",
    group: Group = None,
) -> Tensor:
    """NT-Xent of every positive pair: each denominator sums that one positive and the anchor's negatives.

    Example:
        >>> import torch
        >>> from pairproof.fast import nt_xent_pairwise_loss
        >>> z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]])
        >>> loss = nt_xent_pairwise_loss(z, torch.tensor([0, 0, 0, 1]), temperature=0.5, reduction="mean_pairs")
        >>> print(f"{loss:.4f}")
        0.5777

    Args:
        embeddings: floating ``[N, D]``, N >= 1.
        labels: integers ``[N]``; rows with equal labels are positives of each other.
        positives: bool ``[N, N]`` instead of labels, with references ``[N, M]``; may be asymmetric, and self pairs are
            ignored.
        anchors: bool ``[N]``, the rows that are anchors; None: all rows.
        ref_embeddings: floating ``[M, D]``, rows that anchors are contrasted with instead of the batch: a memory bank,
            a queue, or the gathered rows of all devices. None: the batch.
        ref_labels: integers ``[M]``, the labels of the references.
        self_rows: integers ``[N]``, the reference that is the anchor itself and is left out, or -1; None: all -1.
        ignored: bool ``[N, N]``, with references ``[N, M]``: the pairs (row, column) that are left out of numerator and
            denominator, positives included. May be asymmetric; self pairs have no effect.
        ignored_ids: integers ``[N]``; a pair of rows with equal ids is left out unless the column is a positive of the
            row. For duplicates among the negatives; needs no array of all pairs.
        ref_ignored_ids: integers ``[M]``, the ids of the references; with references, both or neither are given.
        positive_weights: float32 or float64 ``[N, N]``, with references ``[N, M]``, from 0 to 1e10: the factor of each
            positive's -log ratio. Entries of other pairs have no effect. An anchor whose positives all have weight 0
            has no positives. Weights are constants, and must not require a gradient.
        negative_weights: the same for negatives: the factor of each negative's exponential in the denominator, such as
            how often a miner has chosen it. A negative of weight 0 is left out.
        anchor_weights: float32 or float64 ``[N]``, from 0 to 1e10: the factor of each anchor's value. The mean divides
            by the sum of the weights of the anchors that count; it is 0 if they are all 0.
        temperature: number from 1e-10 to 1e10 that similarities are divided by, or a 0-dimensional tensor, which may
            require a gradient.
        base_temperature: None, or a positive number: the loss is scaled by ``temperature / base_temperature``.
        similarity: "cosine" or "dot".
        weights_divisor: what the weighted sum over the positives is divided by: their number, "count", or the sum of
            their weights, "weight".
        no_positive: the value of an anchor without positives: "zero", "drop" (left out of the mean) or "nan". Such an
            anchor has no pairs: under "nan" it makes "mean_pairs" and "sum_pairs" NaN, else it adds nothing to them,
            and it never has an entry in "none_pairs".
        reduction: "mean" or "sum" over the anchors, or "none": one value per anchor that is not dropped, in row order.
            An anchor's value is the mean over its pairs. "mean_pairs" and "sum_pairs" are over the positive pairs of
            all anchors. "none_pairs": one value per pair, ordered by anchor, then by column. If P is the bool mask
            ``[N, N]``, with references ``[N, M]``, of the positives of the anchors, without self pairs and ignored
            pairs, ``P.nonzero()`` returns the pairs in this order. The value of a pair is multiplied by its weight and
            by that of its anchor. "mean_pairs" divides by the sum over all pairs of the weight of the
            pair's anchor, or, with ``weights_divisor="weight"``, of the product of both weights.
        validate: also check values on devices other than the CPU, which synchronises with the device.
        backend: "auto", "dense", "tiled", "exact" or "triton"; see `pairproof.fast.engine`.
        group: the processes that have the other rows of the batch: a process group of torch.distributed, or "world";
            None: this process has all rows. See `pairproof.fast.distributed`.

    Returns:
        A scalar, or ``[anchors]`` under "none", or ``[pairs]`` under "none_pairs"; float64 for float64 embeddings, else
        float32.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, value or device, or an option is unknown.

    Source:
        pytorch-metric-learning's NTXentLoss, with reduction "mean_pairs"; issue 6 of that project.
    """
    rule = Rule("out", similarity, temperature, "one_positive", weights_divisor=weights_divisor)
    policy = Policy(reduction, base_temperature, no_positive)
    references, left_out = (ref_embeddings, ref_labels, self_rows), (ignored, ignored_ids, ref_ignored_ids)
    given = embeddings, labels, positives, anchors, references, left_out
    weights = positive_weights, negative_weights, anchor_weights
    return labelled_loss(rule, policy, *given, validate, backend, group, PAIR_REDUCTIONS, weights)
