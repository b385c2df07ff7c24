"""Sigmoid loss (SigLIP): the binary cross-entropy of every pair of a row of a and a row of b.

Let l_ij be the similarity of row i of a and row j of b, divided by the temperature, plus the bias. P(i) is the set of
positives of row i among the rows of b, and N(i) the rest of the rows of b, both without ignored pairs. The loss of
anchor i is

    sum over p in P(i) of softplus(-l_ip) + sum over n in N(i) of softplus(l_in)

The bias is added, as in the paper's pseudocode and in public code. The paper's equation has the opposite sign.

Sources: Zhai et al. 2023, "Sigmoid Loss for Language Image Pre-Training" (SigLIP), arXiv 2303.15343, Algorithm 1;
google-research/big_vision, trainers/proj/image_text/siglip.py; open_clip's SigLipLoss.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

from torch import Tensor

from .checks import (
    PAIR_REDUCTIONS,
    across_ranks,
    check_bias,
    check_embeddings,
    check_ignored_of_towers,
    check_options,
    check_pairs_of_towers,
    check_weights,
    ranks_of,
)
from .distributed import Group
from .engine import Backend, Batch, Policy, References, Rule, Similarity, loss_of, pair_values

PairReduction = Literal["mean", "sum", "none", "mean_pairs", "sum_pairs", "none_pairs"]


@across_ranks
def sigmoid_loss(
    embeddings_a: Tensor,
    embeddings_b: Tensor,
    *,
    partners: Tensor | None = None,
    labels: Tensor | None = None,
    ref_labels: Tensor | None = None,
    positives: Tensor | None = None,
    ignored: Tensor | None = None,
    ignored_ids: Tensor | None = None,
    ref_ignored_ids: Tensor | None = None,
    anchor_weights: Tensor | None = None,
    temperature: float | Tensor = 0.1,
    bias: float | Tensor = -10.0,
    base_temperature: float | None = None,
    similarity: Similarity = "cosine",
    reduction: PairReduction = "mean",
    validate: bool = False,
    backend: Backend = "auto",
    group: Group = None,
) -> Tensor:
    """Binary cross-entropy of every pair of two towers; by default, row k of b is the positive of row k of a.

    Example:
        >>> import torch
        >>> from pairproof.fast import sigmoid_loss
        >>> z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]])
        >>> other = torch.tensor([[0.8, 0.6], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
        >>> print(f"{sigmoid_loss(z, other):.4f}")
        2.3337

    Args:
        embeddings_a: floating ``[N, D]``, N >= 1; the anchors.
        embeddings_b: floating ``[M, D]``, the other tower. M must be N unless partners, labels or positives are given.
        partners: integers ``[N]`` from 0 to M - 1: the only positive of each row of a.
        labels: integers or bool ``[N]``: the positives of a row of a are the rows of b with the same label.
        ref_labels: integers or bool ``[M]``: the labels of the rows of b. If M is N, they default to ``labels``.
        positives: bool ``[N, M]``: the positives of each row of a.
        ignored: bool ``[N, M]``: pairs to leave out, even positives. Without labels and positives, the one positive of
            a row of a must not be ignored.
        ignored_ids: integers ``[N]``, such as caption numbers: negatives with the same id as the anchor are left out.
            Needs no ``[N, M]`` mask.
        ref_ignored_ids: integers ``[M]``: the ids of the rows of b. If M is N, they default to ``ignored_ids``.
        anchor_weights: float32 or float64 ``[N]``, from 0 to 1e10: factors of the values of the rows of a, and of their
            pairs. Means divide by the sum of the weights over the rows, or over the pairs; they are 0 if the sum is 0.
            Must not require a gradient.
        temperature: number from 1e-10 to 1e10 that similarities are divided by. A 0-dimensional tensor may require a
            gradient.
        bias: number from -1e10 to 1e10 that is added to similarity / temperature. A 0-dimensional tensor may require a
            gradient.
        base_temperature: positive number; if given, the loss is multiplied by ``temperature / base_temperature``.
        similarity: "cosine" or "dot".
        reduction: "sum" and "sum_pairs": the sum over all pairs. "mean": the sum divided by N, the number of rows of a.
            "mean_pairs": the mean over the pairs that are not ignored; 0 if all are ignored. "none": one value per row
            of a. "none_pairs": one value per pair that is not ignored, ordered by row of a, then by row of b.
        validate: also check values on accelerators, which synchronises with the device.
        backend: "auto", "dense", "tiled", "exact" or "triton"; see `pairproof.fast.engine`.
        group: process group of torch.distributed, or "world", if other processes have further rows of the batch; see
            `pairproof.fast.distributed`.

    Returns:
        A scalar, ``[N]`` under "none", or ``[pairs]`` under "none_pairs"; float64 for float64 embeddings, else float32.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, value or device, or does not fit the others, or an option is
            unknown.

    Source:
        SigLIP, arXiv 2303.15343, Algorithm 1.
    """
    rule, policy = Rule("sigmoid", similarity, temperature, bias=bias), Policy(reduction, base_temperature)
    check_options(rule, policy, backend, validate=validate, reductions=PAIR_REDUCTIONS)
    check_bias(bias, validate=validate)
    ranks = None if group is None else ranks_of(group)
    check = partial(check_embeddings, similarity=similarity, validate=validate, least=1 if ranks is None else 0)
    a, b = embeddings_a, embeddings_b
    shape = "[N, D]" if partners is labels is positives is None else "[M, D]"
    of_a, of_b = check(a, name="embeddings_a"), check(b, name="embeddings_b", shape=shape)
    shared, pairs = ranks is not None, (partners, labels, ref_labels, positives)
    targets = check_pairs_of_towers(a, b, *pairs, validate=validate, shared=shared)
    targets = check_ignored_of_towers(
        a, b, targets, ignored, ignored_ids, ref_ignored_ids, validate=validate, shared=shared
    )
    policy = replace(policy, anchor_weights=check_weights(a, "anchor_weights", anchor_weights, validate=validate))
    batch = Batch(a, targets, rule, References(b, sizes=of_b), sizes=of_a)
    if ranks is not None:
        policy = replace(policy, ranks=ranks)
        ranks.meet(a, b, least=1)
        (batch,) = ranks.towers(batch, "a_to_b")
    if reduction == "none_pairs":
        return pair_values(batch, policy, backend)
    if reduction == "sum_pairs":  # an anchor's value is the sum over its pairs
        policy = replace(policy, reduction="sum")
    return loss_of(batch, policy, backend)
