"""NT-BXent: the binary cross-entropy of every pair, for several positives per row.

With s_ij the similarity of rows i and j over the temperature, P(i) the positives of i and N(i) all other rows but i, an
anchor's value is

    sum over p in P(i) of softplus(-s_ip) / (|P(i)| + 1) + sum over n in N(i) of softplus(s_in) / |N(i)|

where the 1 stands for the diagonal, which counts as a positive of loss 0.

Source: the multi-label notebook, "NT-BXent", in its code's form (its formula in print differs and lacks a sign).
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from .checks import check_anchors, check_embeddings, check_options, check_positive_pairs
from .engine import Backend, Batch, Policy, References, Rule, Similarity, anchor_values, reduced

Reduction = Literal["mean", "sum", "none"]
NoNegative = Literal["zero", "nan"]


def nt_bxent_loss(
    embeddings: Tensor,
    positive_pairs: Tensor,
    *,
    anchors: Tensor | None = None,
    temperature: float | Tensor = 0.07,
    base_temperature: float | None = None,
    similarity: Similarity = "cosine",
    no_negative: NoNegative = "zero",
    reduction: Reduction = "mean",
    validate: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """NT-BXent: binary cross-entropy of every pair, positives and negatives averaged apart, per row.

    Args:
        embeddings: floating ``[N, D]``, N >= 2.
        positive_pairs: integers ``[M, 2]``, each an anchor and its positive (directed); duplicates count once, diagonal
            entries are ignored, and there may be none at all.
        anchors: bool ``[N]``, the rows that are anchors; all of them when None.
        temperature: positive number that similarities are divided by, or a tensor without dimension, which may
            require a gradient.
        base_temperature: None, or a positive number: the loss is scaled by ``temperature / base_temperature``.
        similarity: "cosine" or "dot".
        no_negative: what the negatives' part of a row without negatives adds: "zero" or "nan".
        reduction: "mean" or "sum" over anchors, or "none": one value per anchor, in row order.
        validate: read values for checks on devices other than the CPU too.
        backend: "auto", or how to evaluate: "dense", "tiled", "exact" or "triton", see
            `pairproof.fast.engine`.

    Returns:
        A scalar, or ``[anchors]`` under "none"; float64 for float64 embeddings, else float32.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, value, device or option.

    Source:
        The multi-label notebook's NT-BXent loss.
    """
    rule = Rule("binary", similarity, temperature)
    policy = Policy(reduction, base_temperature, no_negative=no_negative)
    check_options(rule, policy, backend, validate=validate)
    sizes = check_embeddings(embeddings, similarity=similarity, validate=validate)
    targets = check_positive_pairs(embeddings, positive_pairs, validate=validate)
    if anchors is not None:
        check_anchors(embeddings, anchors)
    batch = Batch(embeddings, targets, rule, References(), anchors, sizes=sizes)
    return reduced(anchor_values(batch, backend), batch, policy)
