"""Supervised contrastive losses: the mean outside the logarithm, inside it, and the tutorial's guarded variant.

With s_ij the similarity of rows i and j over the temperature, A(i) every row but i, P(i) the positives of i, N(i) the
rest of A(i), and D_ip the denominator

    "all"             sum over a in A(i) of e^s_ia
    "one_positive"    e^s_ip + sum over n in N(i) of e^s_in
    "only_negatives"  sum over n in N(i) of e^s_in

an anchor's value is

    supcon          mean over p in P(i) of -log(e^s_ip / D_ip)
    supcon_in       -log(mean over p in P(i) of e^s_ip / D_ip)
    supcon_epsilon  sum over p of -log(e_ip / sum over a in A(i) of e_ia) / (|P(i)| + epsilon)
                    with e_ij = exp(s_ij - max over all j, i included, of s_ij) + epsilon, epsilon = 1e-8

Sources: Khosla et al. 2020, "Supervised Contrastive Learning", arXiv 2004.11362, equations 2 (L_out) and 3 (L_in); the
three denominators are those of the authors' code (google-research, supcon/losses.py); supcon_epsilon is the batch
tutorial's function of 31 January 2023, whose derivative here goes through the maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from .checks import (
    REDUCTIONS,
    check_anchors,
    check_embeddings,
    check_labels_or_positives,
    check_options,
    check_references,
)
from .engine import Backend, Batch, Denominator, Policy, References, Rule, Similarity, anchor_values, reduced

Reduction = Literal["mean", "sum", "none"]
NoPositive = Literal["zero", "drop", "nan"]
NoNegative = Literal["zero", "nan"]


def supcon_loss(
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
    denominator: Denominator = "all",
    no_positive: NoPositive = "zero",
    no_negative: NoNegative = "zero",
    reduction: Reduction = "mean",
    validate: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """Supervised contrastive loss, L_out: the mean over positives of the log-probabilities.

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
        denominator: "all", "one_positive" or "only_negatives".
        no_positive: what an anchor without positive adds: "zero" (counted as 0), "drop" (left out), "nan".
        no_negative: what an anchor without negative adds under "only_negatives": "zero" or "nan".
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
        Khosla et al. 2020, arXiv 2004.11362, equation 2.
    """
    rule = Rule("out", similarity, temperature, denominator)
    policy = Policy(reduction, base_temperature, no_positive, no_negative)
    references = ref_embeddings, ref_labels, self_rows
    return labelled_loss(rule, policy, embeddings, labels, positives, anchors, references, validate, backend)


def supcon_in_loss(
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
    denominator: Denominator = "all",
    no_positive: NoPositive = "zero",
    no_negative: NoNegative = "zero",
    reduction: Reduction = "mean",
    validate: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """Supervised contrastive loss, L_in: the log of the mean over positives of the probabilities.

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
        denominator: "all", "one_positive" (each numerator has its own) or "only_negatives".
        no_positive: what an anchor without positive adds: "zero" (counted as 0), "drop" (left out), "nan".
        no_negative: what an anchor without negative adds under "only_negatives": "zero" or "nan".
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
        Khosla et al. 2020, arXiv 2004.11362, equation 3.
    """
    rule = Rule("in", similarity, temperature, denominator)
    policy = Policy(reduction, base_temperature, no_positive, no_negative)
    references = ref_embeddings, ref_labels, self_rows
    return labelled_loss(rule, policy, embeddings, labels, positives, anchors, references, validate, backend)


def supcon_epsilon_loss(
    embeddings: Tensor,
    labels: Tensor | None = None,
    *,
    positives: Tensor | None = None,
    anchors: Tensor | None = None,
    temperature: float | Tensor = 0.07,
    base_temperature: float | None = None,
    similarity: Similarity = "dot",
    no_positive: NoPositive = "zero",
    reduction: Reduction = "mean",
    validate: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """Supervised contrastive loss as the batch tutorial guards it: epsilon added to every exponential and count.

    The derivative is the true one, through the maximum. Where several logits attain a row's maximum the loss has a
    kink, and the derivative is that of the first of them in row order (the row's own counted among them).

    Args:
        embeddings: floating ``[N, D]``, N >= 2.
        labels: integers ``[N]``; rows of equal label are each other's positives.
        positives: bool ``[N, N]`` in place of labels; may be asymmetric, its diagonal is ignored.
        anchors: bool ``[N]``, the rows that are anchors; all of them when None.
        temperature: positive number that similarities are divided by, or a tensor without dimension, which may
            require a gradient.
        base_temperature: None, or a positive number: the loss is scaled by ``temperature / base_temperature``.
        similarity: "cosine" or "dot".
        no_positive: what an anchor without positive adds: "zero" (counted as 0), "drop" (left out), "nan".
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
        The batch tutorial of 31 January 2023, whose own code detaches the maximum.
    """
    rule = Rule("epsilon", similarity, temperature)
    policy = Policy(reduction, base_temperature, no_positive)
    return labelled_loss(rule, policy, embeddings, labels, positives, anchors, (None, None, None), validate, backend)


def labelled_loss(
    rule: Rule,
    policy: Policy,
    embeddings: Tensor,
    labels: Tensor | None,
    positives: Tensor | None,
    anchors: Tensor | None,
    references: tuple[Tensor | None, Tensor | None, Tensor | None],
    validate: bool,
    backend: Backend,
    reductions: Sequence[str] = REDUCTIONS,
) -> Tensor:
    """Evaluate a loss whose positives come from labels ``[N]`` or from a mask ``[N, M]``.

    Args:
        rule: the formula.
        policy: how the anchors' values are reduced.
        embeddings: as for `supcon_loss`, like those that follow.
        labels: in place of positives.
        positives: in place of labels.
        anchors: the rows that are anchors.
        references: ref_embeddings, ref_labels and self_rows.
        validate: whether values on an accelerator are read.
        backend: how to evaluate.
        reductions: the allowed ones.

    Returns:
        A scalar, or ``[anchors]`` under "none".
    """
    check_options(rule, policy, backend, validate=validate, reductions=reductions)
    ref_embeddings, ref_labels, self_rows = references
    least = 2 if ref_embeddings is None else 1
    sizes = check_embeddings(embeddings, similarity=rule.similarity, validate=validate, least=least)
    others = References()
    if ref_embeddings is not None or ref_labels is not None or self_rows is not None:
        others = check_references(embeddings, *references, similarity=rule.similarity, validate=validate)
    targets = check_labels_or_positives(embeddings, labels, positives, others, ref_labels)
    if anchors is not None:
        check_anchors(embeddings, anchors)
    batch = Batch(embeddings, targets, rule, others, anchors, sizes=sizes)
    return reduced(anchor_values(batch, backend), batch, policy)
