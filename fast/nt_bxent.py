"""NT-BXent: the normalised, temperature-scaled binary cross-entropy of every pair of rows.

Let s_ij be the similarity of rows i and j divided by the temperature. P(i) is the set of positives of i among the other
rows, and N(i) the rest of the other rows. The loss of anchor i is

    sum over p in P(i) of softplus(-s_ip) / (|P(i)| + 1) + sum over n in N(i) of softplus(s_in) / |N(i)|

The 1 counts the diagonal, a positive whose loss is 0.

Source: the code of the multi-label notebook (fixtures/worked/pair_notebook.json), "NT-BXent". The notebook's formula
differs from its code and lacks a sign.
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
        positive_pairs: integers ``[M, 2]``: (i, j) makes j a positive of i, but not i a positive of j. Duplicates and
            diagonal entries are allowed and have no effect; M may be 0.
        anchors: bool ``[N]``, the rows that are anchors; None: all rows.
        ignored: bool ``[N, N]``, the pairs (row, column) that are left out of both means, positives included. May be
            asymmetric; self pairs have no effect.
        ignored_ids: integers ``[N]``; a pair of rows with equal ids is left out unless the column is a positive of the
            row. For duplicates among the negatives; needs no array of all pairs.
        temperature: number from 1e-10 to 1e10 that similarities are divided by, or a 0-dimensional tensor, which may
            require a gradient.
        base_temperature: None, or a positive number: the loss is scaled by ``temperature / base_temperature``.
        similarity: "cosine" or "dot".
        no_negative: the mean over the negatives of a row that has none: "zero" or "nan".
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
        The multi-label notebook's NT-BXent loss.
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
