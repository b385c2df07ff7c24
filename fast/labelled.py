"""What the losses of labels have in common: check the arguments, describe the pairs, evaluate, reduce."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .checks import (
    REDUCTIONS,
    check_anchors,
    check_embeddings,
    check_labels_or_positives,
    check_options,
    check_references,
)
from .engine import Backend, Denominator, Rule, Similarity, Terms, anchor_values
from .reduction import reduce_anchors


def labelled_loss(
    terms: Terms,
    embeddings: Tensor,
    labels: Tensor | None,
    *,
    positives: Tensor | None,
    anchors: Tensor | None,
    temperature: float | Tensor,
    base_temperature: float | None,
    similarity: Similarity,
    no_positive: str,
    reduction: str,
    validate: bool,
    backend: Backend,
    denominator: Denominator = "all",
    no_negative: str = "zero",
    reductions: Sequence[str] = REDUCTIONS,
    ref_embeddings: Tensor | None = None,
    ref_labels: Tensor | None = None,
    self_rows: Tensor | None = None,
) -> Tensor:
    """Evaluate a loss whose positives come from labels ``[N]`` or from a mask ``[N, M]``.

    Args and errors are those of `pairproof.fast.supcon_loss`; ``terms`` is the formula and ``reductions`` are the
    allowed ones.

    Returns:
        A scalar, or ``[anchors]`` under "none".
    """
    check_options(
        temperature,
        base_temperature,
        similarity=similarity,
        denominator=denominator,
        no_positive=no_positive,
        no_negative=no_negative,
        reduction=reduction,
        reductions=reductions,
        backend=backend,
        validate=validate,
    )
    least = 2 if ref_embeddings is None else 1
    embeddings, norms = check_embeddings(embeddings, similarity=similarity, validate=validate, least=least)
    references = check_references(
        embeddings, ref_embeddings, self_rows, ref_labels=ref_labels, similarity=similarity, validate=validate
    )
    targets = check_labels_or_positives(embeddings, labels, positives, references=references, ref_labels=ref_labels)
    anchors = check_anchors(embeddings, anchors)
    rule = Rule(terms, similarity, temperature, denominator)
    return reduce_anchors(
        anchor_values(embeddings, targets, rule, references=references, anchors=anchors, norms=norms, backend=backend),
        embeddings,
        anchors=anchors,
        temperature=temperature,
        base_temperature=base_temperature,
        reduction=reduction,
        no_positive=no_positive,
        no_negative=no_negative if denominator == "only_negatives" else None,
    )
