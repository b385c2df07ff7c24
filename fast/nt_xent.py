"""NT-Xent: normalised temperature-scaled cross-entropy, with one positive per row and with every positive pair apart.

With s_ij the similarity of rows i and j over the temperature, A(i) every row but i, P(i) the positives of i and N(i)
the rest of A(i), an anchor's value is

    nt_xent           -log(e^s_ip / sum over a in A(i) of e^s_ia), p the row's partner
    nt_xent_pairwise  mean over p in P(i) of -log(e^s_ip / (e^s_ip + sum over n in N(i) of e^s_in))

Sources: Chen et al. 2020, "A Simple Framework for Contrastive Learning of Visual Representations" (SimCLR), arXiv
2002.05709, equation 1; the pairwise form is pytorch-metric-learning's ``NTXentLoss``, see that project's issue 6.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from .checks import (
    PAIR_REDUCTIONS,
    check_anchors,
    check_embeddings,
    check_options,
    check_partners,
    check_references,
)
from .engine import Backend, Batch, Policy, Rule, Similarity, anchor_values, reduced
from .supcon import labelled_loss

Reduction = Literal["mean", "sum", "none"]
PairReduction = Literal["mean", "sum", "none", "mean_pairs"]
NoPositive = Literal["zero", "drop", "nan"]


def nt_xent_loss(
    embeddings: Tensor,
    partners: Tensor,
    *,
    anchors: Tensor | None = None,
    ref_embeddings: Tensor | None = None,
    self_rows: Tensor | None = None,
    temperature: float | Tensor = 0.07,
    base_temperature: float | None = None,
    similarity: Similarity = "cosine",
    reduction: Reduction = "mean",
    validate: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """NT-Xent: the cross-entropy of every row against its one partner.

    Args:
        embeddings: floating ``[N, D]``, N >= 2, or with references N >= 1.
        partners: integers ``[N]``, each row's positive; mutual, never the row itself. `stacked_partners` and
            `interleaved_partners` make them for two views. With references, a row of those, any but the anchor itself.
        anchors: bool ``[N]``, the rows that are anchors; all of them when None.
        ref_embeddings: floating ``[M, D]``, rows that anchors are contrasted with in place of the batch: A(i) is every
            reference but the anchor itself. None: the batch.
        self_rows: integers ``[N]``, the reference that is the anchor itself, -1 where none is. None: none is.
        temperature: positive number that similarities are divided by, or a tensor without dimension, which may
            require a gradient.
        base_temperature: None, or a positive number: the loss is scaled by ``temperature / base_temperature``.
        similarity: "cosine" or "dot".
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
        Chen et al. 2020, arXiv 2002.05709, equation 1.
    """
    rule, policy = Rule("out", similarity, temperature), Policy(reduction, base_temperature)
    check_options(rule, policy, backend, validate=validate)
    least = 2 if ref_embeddings is None else 1
    sizes = check_embeddings(embeddings, similarity=similarity, validate=validate, least=least)
    references = check_references(embeddings, ref_embeddings, None, self_rows, similarity=similarity, validate=validate)
    targets = check_partners(embeddings, partners, references, validate=validate)
    if anchors is not None:
        check_anchors(embeddings, anchors)
    batch = Batch(embeddings, targets, rule, references, anchors, sizes=sizes)
    return reduced(anchor_values(batch, backend), batch, policy)


def nt_xent_pairwise_loss(
    embeddings: Tensor,
    labels: Tensor | None = None,
    *,
    positives: Tensor | None = None,
    anchors: Tensor | None = None,
    ref_embeddings: Tensor | None = None,
    ref_labels: Tensor | None = None,
    self_rows: Tensor | None = None,
    temperature: float | Tensor = 0.07,
    base_temperature: float | None = None,
    similarity: Similarity = "cosine",
    no_positive: NoPositive = "zero",
    reduction: PairReduction = "mean",
    validate: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """NT-Xent over positive pairs: each against the anchor's negatives alone.

    Args:
        embeddings: floating ``[N, D]``, N >= 2, or with references N >= 1.
        labels: integers ``[N]``; rows of equal label are each other's positives.
        positives: bool ``[N, N]`` in place of labels, with references ``[N, M]``; may be asymmetric, and an anchor's
            pair with itself is ignored.
        anchors: bool ``[N]``, the rows that are anchors; all of them when None.
        ref_embeddings: floating ``[M, D]``, rows that anchors are contrasted with in place of the batch: A(i) is every
            reference but the anchor itself. None: the batch.
        ref_labels: integers ``[M]``, the references' labels.
        self_rows: integers ``[N]``, the reference that is the anchor itself, -1 where none is. None: none is.
        temperature: positive number that similarities are divided by, or a tensor without dimension, which may
            require a gradient.
        base_temperature: None, or a positive number: the loss is scaled by ``temperature / base_temperature``.
        similarity: "cosine" or "dot".
        no_positive: what an anchor without positive adds: "zero" (counted as 0), "drop" (left out), "nan".
        reduction: "mean" or "sum" over anchors, "mean_pairs" over (anchor, positive) pairs, or "none": one value per
            anchor, the mean over its pairs, in row order.
        validate: read values for checks on devices other than the CPU too.
        backend: "auto", or how to evaluate: "dense", "tiled", "exact" or "triton", see
            `pairproof.fast.engine`.

    Returns:
        A scalar, or ``[anchors]`` under "none"; float64 for float64 embeddings, else float32.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, value, device or option.

    Source:
        pytorch-metric-learning's NTXentLoss (its "mean_pairs" mean), issue 6 of that project.
    """
    rule = Rule("out", similarity, temperature, "one_positive")
    policy = Policy(reduction, base_temperature, no_positive)
    given = embeddings, labels, positives, anchors, (ref_embeddings, ref_labels, self_rows)
    return labelled_loss(rule, policy, *given, validate, backend, PAIR_REDUCTIONS)
