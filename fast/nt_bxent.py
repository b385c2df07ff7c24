"""NT-BXent: the normalised, temperature-scaled binary cross-entropy of every pair of rows.

Let s_ij be the similarity of rows i and j divided by the temperature. P(i) is the set of positives of i among the other
rows, and N(i) the rest of the other rows. The loss of anchor i is

    sum over p in P(i) of softplus(-s_ip) / (|P(i)| + 1) + sum over n in N(i) of softplus(s_in) / |N(i)|

The 1 counts the self pair as a positive, whose loss is 0.

Source: the code of a notebook on multi-label losses (fixtures/worked/pair_notebook.json). The formula printed there
differs from the code and lacks a sign.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from .checks import (
    across_ranks,
    check_anchors,
    check_embeddings,
    check_ignored,
    check_options,
    check_positive_pairs,
    ranks_of,
)
from .distributed import Group
from .engine import Backend, Batch, Policy, References, Rule, Similarity, loss_of

Reduction = Literal["mean", "sum", "none"]
NoNegative = Literal["zero", "nan"]


@across_ranks
def nt_bxent_loss(
    embeddings: Tensor,
    positive_pairs: Tensor,
    *,
    anchors: Tensor | None = None,
    ignored: Tensor | None = None,
    ignored_ids: Tensor | None = None,
    temperature: float | Tensor = 0.07,
    base_temperature: float | None = None,
    similarity: Similarity = "cosine",
    no_negative: NoNegative = "zero",
    reduction: Reduction = "mean",
    validate: bool = False,
    backend: Backend = "auto",
    group: Group = None,
) -> Tensor:
    """Binary cross-entropy of every pair, with separate means over the positives and the negatives of each row.

    Example:
        >>> import torch
        >>> from pairproof.fast import nt_bxent_loss
        >>> z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]])
        >>> loss = nt_bxent_loss(z, torch.tensor([[0, 1], [1, 0], [2, 3]]), temperature=0.5)
        >>> print(f"{loss:.4f}")
        0.9560

    Args:
        embeddings: floating ``[N, D]``, N >= 1.
        positive_pairs: integers ``[M, 2]``: (i, j) makes j a positive of i, but not i of j. Duplicates and pairs (i, i)
            have no effect. M may be 0.
        anchors: bool ``[N]``: which rows are anchors; by default, all.
        ignored: bool ``[N, N]``: pairs (anchor, other row) to leave out of both means, even positives. May be
            asymmetric; self pairs have no effect.
        ignored_ids: integers ``[N]``: negatives with the same id as the anchor are left out, for example duplicates.
            Needs no ``[N, N]`` mask.
        temperature: number from 1e-10 to 1e10 that similarities are divided by. A 0-dimensional tensor may require a
            gradient.
        base_temperature: positive number; if given, the loss is multiplied by ``temperature / base_temperature``.
        similarity: "cosine" or "dot".
        no_negative: the mean over the negatives of a row that has none: "zero" or "nan".
        reduction: "mean" or "sum" over the anchors, or "none": one value per anchor, in row order.
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
        NT-BXent in the notebook of fixtures/worked/pair_notebook.json.
    """
    rule = Rule("binary", similarity, temperature)
    policy = Policy(reduction, base_temperature, no_negative=no_negative)
    check_options(rule, policy, backend, validate=validate)
    ranks = None if group is None else ranks_of(group)
    shared = ranks is not None
    sizes = check_embeddings(embeddings, similarity=similarity, validate=validate, least=0 if shared else 1)
    targets = check_positive_pairs(embeddings, positive_pairs, validate=validate, shared=shared)
    if anchors is not None:
        check_anchors(embeddings, anchors)
    if ignored is not None or ignored_ids is not None:
        left_out = ignored, ignored_ids
        targets = check_ignored(embeddings, targets, References(), *left_out, validate=validate, shared=shared)
    batch = Batch(embeddings, targets, rule, References(), anchors, sizes=sizes)
    if ranks is not None:
        batch, policy = ranks.shared(batch, policy, backend)
    return loss_of(batch, policy, backend)
