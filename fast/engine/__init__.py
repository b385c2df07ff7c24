"""The engine: per-anchor values of a described loss, and their gradient.

A loss checks its arguments, describes its pairs (`Targets`, `References`) and its formula (`Rule`), asks
`anchor_values`, then applies its policies and its reduction. How the values are evaluated is decided here and nowhere
else, by `plan`:

- pairs of a few hundred rows in one matrix and as few operations as it takes;
- symmetric tiles of unshifted exponentials, where logits are known to be moderate and labels or partners can be sorted;
- panels of whole rows, shifted by their maxima, for everything else;
- ``backend="dense"`` takes one tile or panel for all, ``"tiled"`` bounds them, so that memory is linear in the number
  of rows; ``"auto"`` takes the whole up to 512 rows;
- ``backend="triton"`` takes the fused kernels of `pairproof.fast.kernels`, on CUDA devices, where "auto" does so too;
- ``backend="exact"`` computes in float64 on whole matrices, whatever the dtype, over the whole range of the dtypes.

float64 embeddings are computed in float64, all others in float32. Values and gradients are right, within the bounds of
the conformance suite, at temperatures from 1e-3 to 1e3. Weights of pairs below the range of the computing dtype count
as zero; "exact" alone keeps them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import evaluate, exact
from .plan import choose, tiles_of
from .scaling import MODERATE, measure, pair_logits
from .spec import (
    AnchorValues,
    Backend,
    Denominator,
    References,
    Rule,
    Similarity,
    Targets,
    Terms,
)

__all__ = [
    "MODERATE",
    "AnchorValues",
    "Backend",
    "Denominator",
    "References",
    "Rule",
    "Similarity",
    "Targets",
    "Terms",
    "anchor_values",
    "measure",
    "pair_logits",
    "tiles_of",
]


def anchor_values(
    embeddings: Tensor,
    targets: Targets,
    rule: Rule,
    *,
    references: References | None = None,
    anchors: Tensor | None = None,
    norms: Tensor | None = None,
    held: torch.dtype | None = None,
    backend: Backend = "auto",
) -> AnchorValues:
    """Evaluate one value per anchor, differentiable by embeddings, references and temperature.

    Args:
        embeddings: floating ``[N, D]``, already checked.
        targets: which pairs are positive.
        rule: the formula.
        references: the rows that anchors are contrasted with; the batch itself when None.
        anchors: bool ``[N]``, the rows that are anchors; all of them when None.
        norms: what `measure` returned for the embeddings, all between 1 / `MODERATE` and `MODERATE`; None where that is
            not known.
        held: a narrower dtype that holds all entries exactly, where embeddings and references are wider than that so
            that gradients meet before they are rounded.
        backend: "auto", "dense", "tiled", "exact" or "triton".

    Returns:
        Values in the computing dtype, and the sizes of P(i) and N(i).
    """
    if references is not None and references.mutual:
        return _mutual_values(embeddings, targets, rule, references, held, backend)
    if backend == "exact":
        return exact.anchor_values(embeddings, targets, rule, references=references, anchors=anchors)
    if torch.compiler.is_compiling():
        return evaluate.anchor_values(
            embeddings, targets, rule, backend, references=references, anchors=anchors, norms=norms, held=held
        )
    plan, targets = choose(embeddings, targets, rule, references, norms, backend=backend)
    return evaluate.anchor_values(
        embeddings, targets, rule, plan, references=references, anchors=anchors, norms=norms, held=held
    )


def _mutual_values(
    embeddings: Tensor,
    targets: Targets,
    rule: Rule,
    references: References,
    held: torch.dtype | None,
    backend: Backend,
) -> AnchorValues:
    """Evaluate two towers: the kernels take both directions together, everything else one behind the other."""
    if backend != "exact" and not torch.compiler.is_compiling():
        plan, targets = choose(embeddings, targets, rule, references, backend=backend)
        if plan.form == "triton":
            return evaluate.anchor_values(
                embeddings, targets, rule, plan, references=references, anchors=None, norms=None, held=held
            )
    assert references.embeddings is not None
    parts = [
        anchor_values(rows, targets, rule, references=References(others), held=held, backend=backend)
        for rows, others in ((embeddings, references.embeddings), (references.embeddings, embeddings))
    ]
    return AnchorValues(*(torch.cat(pair) for pair in zip(*parts, strict=True)))
