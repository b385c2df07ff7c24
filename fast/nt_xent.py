"""NT-Xent: the normalised, temperature-scaled cross-entropy, with one positive per anchor or for every positive pair.

Let s_ij be the similarity of rows i and j divided by the temperature. A(i) is all rows except i; with ref_embeddings,
it is all rows of ref_embeddings except self_rows[i]. P(i) is the set of positives of i in A(i), and N(i) the rest of
A(i). The loss of anchor i is

    nt_xent           -log(e^s_ip / sum over a in A(i) of e^s_ia), p the partner of i
    nt_xent_pairwise  mean over p in P(i) of -log(e^s_ip / (e^s_ip + sum over n in N(i) of e^s_in))

Sources:

- nt_xent: Chen et al. 2020, "A Simple Framework for Contrastive Learning of Visual Representations" (SimCLR), arXiv
  2002.05709, equation 1.
- nt_xent_pairwise: pytorch-metric-learning's ``NTXentLoss``; see issue 6 of that project.
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
        embeddings: floating ``[N, D]``, N >= 2, or N >= 1 with ref_embeddings. Below, M is the number of rows of
            ref_embeddings if given, else N.
        partners: integers ``[N]``: partners[i] is the positive of row i. Without ref_embeddings, partners are mutual,
            and no row is its own partner. For two views per item, use `stacked_partners` or `interleaved_partners`.
            With ref_embeddings, partners[i] is any row of ref_embeddings except self_rows[i]. For class labels, use
            `nt_xent_pairwise_loss`.
        anchors: bool ``[N]``: which rows are anchors; by default, all.
        ref_embeddings: floating ``[M, D]``: rows to contrast anchors with instead of the batch, such as a memory bank,
            a queue, or the gathered rows of all devices.
        self_rows: integers ``[N]``: the row of ref_embeddings that is row i itself and is left out. -1, the default,
            means none.
        ignored: bool ``[N, M]``: pairs (anchor, other row) to leave out of numerator and denominator. May be
            asymmetric. A row and its partner must not be ignored.
        ignored_ids: integers ``[N]``: negatives with the same id as the anchor are left out, for example duplicates.
            Needs no ``[N, M]`` mask.
        ref_ignored_ids: integers ``[M]``: the ids of ref_embeddings; required with ref_embeddings and ignored_ids.
        anchor_weights: float32 or float64 ``[N]``, from 0 to 1e10: factors of the values of the anchors. The mean
            divides by the sum of the weights of the anchors; it is 0 if the sum is 0. Must not require a gradient.
        temperature: number from 1e-10 to 1e10 that similarities are divided by. A 0-dimensional tensor may require a
            gradient.
        base_temperature: positive number; if given, the loss is multiplied by ``temperature / base_temperature``.
        similarity: "cosine" or "dot".
        zero_row: how to treat a row of zeros. "error": raise an error under "cosine". "zero": its cosines and its
            gradient are 0. Under "dot", rows of zeros are always valid.
        reduction: "mean" or "sum" over the anchors, or "none": one value per anchor, in row order.
        validate: also check values on accelerators, which synchronises with the device.
        backend: "auto", "dense", "tiled", "exact" or "triton"; see `pairproof.fast.engine`.
        group: process group of torch.distributed, "world" or a `Ring`, if other processes have further rows of the
            batch; see `pairproof.fast.distributed`.

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
    # With zero_row="zero", rows of zeros are as valid as for dot products.
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
    """NT-Xent of every positive pair; each denominator has this one positive and the negatives of the anchor.

    Example:
        >>> import torch
        >>> from pairproof.fast import nt_xent_pairwise_loss
        >>> z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]])
        >>> loss = nt_xent_pairwise_loss(z, torch.tensor([0, 0, 0, 1]), temperature=0.5, reduction="mean_pairs")
        >>> print(f"{loss:.4f}")
        0.5777

    Args:
        embeddings: floating ``[N, D]``, N >= 1. Below, M is the number of rows of ref_embeddings if given, else N.
        labels: integers ``[N]``; rows with equal labels are positives of each other.
        positives: bool ``[N, M]``, instead of labels: entry (i, j) says whether j is a positive of i. May be
            asymmetric; self pairs have no effect.
        anchors: bool ``[N]``: which rows are anchors; by default, all.
        ref_embeddings: floating ``[M, D]``: rows to contrast anchors with instead of the batch, such as a memory bank,
            a queue, or the gathered rows of all devices.
        ref_labels: integers ``[M]``: the labels of ref_embeddings.
        self_rows: integers ``[N]``: the row of ref_embeddings that is row i itself and is left out. -1, the default,
            means none.
        ignored: bool ``[N, M]``: pairs (anchor, other row) to leave out of numerator and denominator, even positives.
            May be asymmetric; self pairs have no effect.
        ignored_ids: integers ``[N]``: negatives with the same id as the anchor are left out, for example duplicates.
            Needs no ``[N, M]`` mask.
        ref_ignored_ids: integers ``[M]``: the ids of ref_embeddings; required with ref_embeddings and ignored_ids.
        positive_weights: float32 or float64 ``[N, M]``, from 0 to 1e10: factors of the terms -log(e^s / denominator) of
            the positives. Other entries have no effect. An anchor whose positives all have weight 0 counts as an anchor
            without positives. Must not require a gradient.
        negative_weights: the same for negatives: factors of the exponentials in the denominator, such as how often a
            miner chose each negative. A negative of weight 0 is left out.
        anchor_weights: float32 or float64 ``[N]``, from 0 to 1e10: factors of the values of the anchors. The mean
            divides by the sum of the weights of the anchors that are not dropped; it is 0 if the sum is 0. Must not
            require a gradient.
        temperature: number from 1e-10 to 1e10 that similarities are divided by. A 0-dimensional tensor may require a
            gradient.
        base_temperature: positive number; if given, the loss is multiplied by ``temperature / base_temperature``.
        similarity: "cosine" or "dot".
        weights_divisor: the weighted sum over the positives is divided by their number, "count", or by the sum of their
            weights, "weight".
        no_positive: the value of an anchor without positives: "zero", "nan", or "drop" (leave the anchor out). "nan"
            also makes "mean_pairs" and "sum_pairs" NaN.
        reduction: "mean" or "sum" over the anchors, or "none": one value per anchor that is not dropped, in row order.
            The value of an anchor is the mean over its pairs. "mean_pairs" and "sum_pairs" are over the positive pairs
            of all anchors. "none_pairs": one value per positive pair, in the order of ``mask.nonzero()`` for a mask of
            these pairs. An anchor whose ``positive_weights`` are all 0 has no positives, so its pairs have no value.
            The value of a pair is multiplied by its weight and by the weight of its anchor. "mean_pairs"
            divides by the sum of the anchor weights over all pairs or, with ``weights_divisor="weight"``, by the sum of
            the products of both weights.
        validate: also check values on accelerators, which synchronises with the device.
        backend: "auto", "dense", "tiled", "exact" or "triton"; see `pairproof.fast.engine`.
        group: process group of torch.distributed, "world" or a `Ring`, if other processes have further rows of the
            batch; see `pairproof.fast.distributed`.

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
