"""SupCon with the sum over positives outside or inside the logarithm, and a tutorial's variant.

Let s_ij be the similarity of rows i and j divided by the temperature. A(i) is all rows except i; with ref_embeddings,
it is all rows of ref_embeddings except self_rows[i]. P(i) is the set of positives of i in A(i), and N(i) the rest of
A(i). The denominator D_ip is

    "all"             sum over a in A(i) of e^s_ia
    "one_positive"    e^s_ip + sum over n in N(i) of e^s_in
    "only_negatives"  sum over n in N(i) of e^s_in

With negative_weights, each e^s_in is multiplied by its weight. The loss of anchor i is

    supcon          mean over p in P(i) of -log(e^s_ip / D_ip)
    supcon_in       -log(mean over p in P(i) of e^s_ip / D_ip), or -log of the sum
    supcon_epsilon  sum over p in P(i) of -log(e_ip / sum over a in A(i) of e_ia) / (|P(i)| + epsilon)
                    with e_ij = exp(s_ij - max of s_ik over k in A(i) and k = i) + epsilon, epsilon = 1e-8

With positive_weights w_p, supcon is the sum over P(i) of -w_p log(e^s_ip / D_ip), divided by |P(i)| or the sum of w_p.

Sources:

- Khosla et al. 2020, "Supervised Contrastive Learning", arXiv 2004.11362, equations 2 (L_out) and 3 (L_in).
- The three denominators: the authors' code, google-research, supcon/losses.py.
- supcon_epsilon: a tutorial of 31 January 2023 (fixtures/worked/batch_tutorial.json). The tutorial detaches the
  maximum; the gradient here includes that of the maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from torch import Tensor

from .checks import (
    REDUCTIONS,
    across_ranks,
    check_anchors,
    check_embeddings,
    check_ignored,
    check_labels_or_positives,
    check_options,
    check_references,
    check_weights,
    ranks_of,
)
from .distributed import Group
from .engine import (
    Backend,
    Batch,
    Denominator,
    InsideReduction,
    Policy,
    Rule,
    Similarity,
    WeightsDivisor,
    ZeroRow,
    loss_of,
    pair_values,
)

Reduction = Literal["mean", "sum", "none"]
NoPositive = Literal["zero", "drop", "nan"]
NoNegative = Literal["zero", "nan"]


@across_ranks
def supcon_loss(
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
    zero_row: ZeroRow = "error",
    denominator: Denominator = "all",
    weights_divisor: WeightsDivisor = "count",
    no_positive: NoPositive = "zero",
    no_negative: NoNegative = "zero",
    reduction: Reduction = "mean",
    validate: bool = False,
    backend: Backend = "auto",
    group: Group = None,
) -> Tensor:
    """Supervised contrastive loss with the sum over positives outside the logarithm (L_out).

    Example:
        >>> import torch
        >>> from pairproof.fast import supcon_loss
        >>> z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]])
        >>> loss = supcon_loss(z, torch.tensor([0, 0, 1, 1]), temperature=0.5)
        >>> print(f"{loss:.4f}")
        0.4302

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
        zero_row: how to treat a row of zeros. "error": raise an error under "cosine". "zero": its cosines and its
            gradient are 0. Under "dot", rows of zeros are always valid.
        denominator: what the denominator of a positive sums: "all" (positives and negatives), "one_positive" (this
            positive and the negatives) or "only_negatives".
        weights_divisor: the weighted sum over the positives is divided by their number, "count", or by the sum of their
            weights, "weight".
        no_positive: the value of an anchor without positives: "zero", "nan", or "drop" (leave the anchor out).
        no_negative: the value of an anchor without negatives under "only_negatives": "zero" or "nan".
        reduction: "mean" or "sum" over the anchors, or "none": one value per anchor that is not dropped, in row order.
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
        Khosla et al. 2020, arXiv 2004.11362, equation 2.
    """
    rule = Rule("out", similarity, temperature, denominator, weights_divisor=weights_divisor, zero_row=zero_row)
    policy = Policy(reduction, base_temperature, no_positive, no_negative)
    references, left_out = (ref_embeddings, ref_labels, self_rows), (ignored, ignored_ids, ref_ignored_ids)
    given = embeddings, labels, positives, anchors, references, left_out
    weights = positive_weights, negative_weights, anchor_weights
    return labelled_loss(rule, policy, *given, validate, backend, group, weights=weights)


@across_ranks
def supcon_in_loss(
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
    temperature: float | Tensor = 0.07,
    base_temperature: float | None = None,
    similarity: Similarity = "cosine",
    denominator: Denominator = "all",
    inside_reduction: InsideReduction = "mean",
    no_positive: NoPositive = "zero",
    no_negative: NoNegative = "zero",
    reduction: Reduction = "mean",
    validate: bool = False,
    backend: Backend = "auto",
    group: Group = None,
) -> Tensor:
    """Supervised contrastive loss with the sum over positives inside the logarithm (L_in).

    Example:
        >>> import torch
        >>> from pairproof.fast import supcon_in_loss
        >>> z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]])
        >>> loss = supcon_in_loss(z, torch.tensor([0, 0, 0, 1]), temperature=0.5)
        >>> print(f"{loss:.4f}")
        0.7517

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
        temperature: number from 1e-10 to 1e10 that similarities are divided by. A 0-dimensional tensor may require a
            gradient.
        base_temperature: positive number; if given, the loss is multiplied by ``temperature / base_temperature``.
        similarity: "cosine" or "dot".
        denominator: what the denominator of a positive sums: "all" (positives and negatives), "one_positive" (this
            positive and the negatives) or "only_negatives".
        inside_reduction: "mean" or "sum" of the ratios inside the logarithm. With "sum", the value is smaller by log
            |P(i)|, and the gradient is the same.
        no_positive: the value of an anchor without positives: "zero", "nan", or "drop" (leave the anchor out).
        no_negative: the value of an anchor without negatives under "only_negatives": "zero" or "nan".
        reduction: "mean" or "sum" over the anchors, or "none": one value per anchor that is not dropped, in row order.
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
        Khosla et al. 2020, arXiv 2004.11362, equation 3. Public code computes the "sum": ``simclr_loss_func`` of
        vturrisi/solo-learn at commit 9187ea3, ``init_suncet_loss`` of facebookresearch/suncet at commit 731547d, and
        ``SupConLossV2`` of megvii-research/FSCE at commit 94ba3f4.
    """
    rule = Rule("in", similarity, temperature, denominator, inside_reduction)
    policy = Policy(reduction, base_temperature, no_positive, no_negative)
    references, left_out = (ref_embeddings, ref_labels, self_rows), (ignored, ignored_ids, ref_ignored_ids)
    given = embeddings, labels, positives, anchors, references, left_out
    return labelled_loss(rule, policy, *given, validate, backend, group)


@across_ranks
def supcon_epsilon_loss(
    embeddings: Tensor,
    labels: Tensor | None = None,
    *,
    positives: Tensor | None = None,
    anchors: Tensor | None = None,
    ignored: Tensor | None = None,
    ignored_ids: Tensor | None = None,
    temperature: float | Tensor = 0.07,
    base_temperature: float | None = None,
    similarity: Similarity = "dot",
    no_positive: NoPositive = "zero",
    reduction: Reduction = "mean",
    validate: bool = False,
    backend: Backend = "auto",
    group: Group = None,
) -> Tensor:
    """Supervised contrastive loss of a tutorial, with 1e-8 added to every exponential and to |P(i)|.

    The maximum of each row is subtracted from its logits. The maximum includes the self pair, but no ignored pairs. The
    gradient includes that of the maximum, which the tutorial detaches. If several logits are equal to the maximum, the
    gradient flows through the first.

    Example:
        >>> import torch
        >>> from pairproof.fast import supcon_epsilon_loss
        >>> z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]])
        >>> loss = supcon_epsilon_loss(z, torch.tensor([0, 0, 1, 1]), temperature=0.5)
        >>> print(f"{loss:.4f}")
        0.4302

    Args:
        embeddings: floating ``[N, D]``, N >= 1.
        labels: integers ``[N]``; rows with equal labels are positives of each other.
        positives: bool ``[N, N]``, instead of labels: entry (i, j) says whether j is a positive of i. May be
            asymmetric; self pairs have no effect.
        anchors: bool ``[N]``: which rows are anchors; by default, all.
        ignored: bool ``[N, N]``: pairs (anchor, other row) to leave out of numerator, denominator and maximum, even
            positives. May be asymmetric; self pairs have no effect.
        ignored_ids: integers ``[N]``: negatives with the same id as the anchor are left out, for example duplicates.
            Needs no ``[N, N]`` mask.
        temperature: number from 1e-10 to 1e10 that similarities are divided by. A 0-dimensional tensor may require a
            gradient.
        base_temperature: positive number; if given, the loss is multiplied by ``temperature / base_temperature``.
        similarity: "cosine" or "dot".
        no_positive: the value of an anchor without positives: "zero", "nan", or "drop" (leave the anchor out).
        reduction: "mean" or "sum" over the anchors, or "none": one value per anchor that is not dropped, in row order.
        validate: also check values on accelerators, which synchronises with the device.
        backend: "auto", "dense", "tiled", "exact" or "triton"; see `pairproof.fast.engine`.
        group: process group of torch.distributed, or "world", if other processes have further rows of the batch; see
            `pairproof.fast.distributed`.

    Returns:
        A scalar, or ``[anchors]`` under "none"; float64 for float64 embeddings, else float32.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, value or device, or an option is unknown.

    Source:
        The tutorial of 31 January 2023 in fixtures/worked/batch_tutorial.json.
    """
    rule = Rule("epsilon", similarity, temperature)
    policy = Policy(reduction, base_temperature, no_positive)
    given = embeddings, labels, positives, anchors, (None, None, None), (ignored, ignored_ids, None)
    return labelled_loss(rule, policy, *given, validate, backend, group)


def labelled_loss(
    rule: Rule,
    policy: Policy,
    embeddings: Tensor,
    labels: Tensor | None,
    positives: Tensor | None,
    anchors: Tensor | None,
    references: tuple[Tensor | None, Tensor | None, Tensor | None],
    left_out: tuple[Tensor | None, Tensor | None, Tensor | None],
    validate: bool,
    backend: Backend,
    group: Group,
    reductions: Sequence[str] = REDUCTIONS,
    weights: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
) -> Tensor:
    """Check the arguments of a loss with labels or positives, and evaluate it.

    The arguments are those of `supcon_loss`. Three tuples group them:

        references  ref_embeddings, ref_labels, self_rows
        left_out    ignored, ignored_ids, ref_ignored_ids
        weights     positive_weights, negative_weights, anchor_weights

    ``reductions`` are the allowed reductions.
    """
    check_options(rule, policy, backend, validate=validate, reductions=reductions)
    ref_embeddings, ref_labels, _ = references
    ranks = None if group is None else ranks_of(group)
    shared = ranks is not None and ref_embeddings is None
    # With zero_row="zero", rows of zeros are as valid as for dot products.
    similarity = "dot" if rule.zero_row == "zero" else rule.similarity
    least = 1 if ranks is None else 0
    sizes = check_embeddings(embeddings, similarity=similarity, validate=validate, least=least)
    others = check_references(embeddings, *references, similarity=similarity, validate=validate)
    targets = check_labels_or_positives(embeddings, labels, positives, others, ref_labels, shared=shared)
    if anchors is not None:
        check_anchors(embeddings, anchors)
    ignored, ids, ref_ids = left_out
    if ignored is not None or ids is not None or ref_ids is not None:
        targets = check_ignored(embeddings, targets, others, ignored, ids, ref_ids, validate=validate, shared=shared)
    of_positives, of_negatives, of_anchors = weights
    if not (of_positives is None and of_negatives is None and of_anchors is None):
        check = partial(check_weights, embeddings, validate=validate, shared=shared)
        targets = replace(
            targets,
            positive_weights=check("positive_weights", of_positives, others),
            negative_weights=check("negative_weights", of_negatives, others),
        )
        policy = replace(policy, anchor_weights=check("anchor_weights", of_anchors, None))
    batch = Batch(embeddings, targets, rule, others, anchors, sizes=sizes)
    if ranks is not None:
        batch, policy = ranks.shared(batch, policy, backend)
    return pair_values(batch, policy, backend) if policy.reduction == "none_pairs" else loss_of(batch, policy, backend)
