"""InfoNCE: the cross-entropy of two towers; row k of one tower is the only positive of row k of the other.

Let s_ij be the similarity of row i of one tower and row j of the other, divided by the temperature. The loss of anchor
i is

    info_nce                  -log(e^s_ii / sum over j of e^s_ij)
    info_nce with negatives   -log(e^s_ii / (e^s_ii + sum over n of e^s_in)), n the rows of ``negatives``

With ``direction="both"``, the default without negatives, the rows of both towers are anchors.

Sources: van den Oord et al. 2018, "Representation Learning with Contrastive Predictive Coding", arXiv 1807.03748; both
directions: Radford et al. 2021 (CLIP), arXiv 2103.00020; one positive and a queue: He et al. 2020 (MoCo), arXiv
1911.05722, equation 1.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import check_alike, check_embeddings, check_options
from .engine import (
    AnchorValues,
    Backend,
    Batch,
    Policy,
    References,
    Rule,
    Similarity,
    Targets,
    anchor_values,
    loss_of,
    pair_logits,
    precision,
    reduced,
)
from .engine.device import dtypes_of, traced

Direction = Literal["both", "a_to_b", "b_to_a"]
Reduction = Literal["mean", "sum", "none"]


def info_nce_loss(
    embeddings_a: Tensor,
    embeddings_b: Tensor,
    *,
    negatives: Tensor | None = None,
    direction: Direction | None = None,
    temperature: float | Tensor = 0.07,
    base_temperature: float | None = None,
    similarity: Similarity = "cosine",
    reduction: Reduction = "mean",
    validate: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """InfoNCE of two towers: row k of one tower is the positive of row k of the other.

    Example:
        >>> import torch
        >>> from pairproof.fast import info_nce_loss
        >>> z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]])
        >>> other = torch.tensor([[0.8, 0.6], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
        >>> loss = info_nce_loss(z, other, temperature=0.5)
        >>> print(f"{loss:.4f}")
        1.0532

    Args:
        embeddings_a: floating ``[N, D]``, N >= 1.
        embeddings_b: floating ``[N, D]``, the other tower.
        negatives: floating ``[K, D]``, K >= 1, the negatives of every anchor, instead of the other tower's other rows;
            the same for both directions.
        direction: the tower whose rows are anchors: "a_to_b" (a), "b_to_a" (b), or "both" (a, then b). None: "both", or
            "a_to_b" with negatives, as in MoCo.
        temperature: number from 1e-10 to 1e10 that similarities are divided by, or a 0-dimensional tensor, which may
            require a gradient.
        base_temperature: None, or a positive number: the loss is scaled by ``temperature / base_temperature``.
        similarity: "cosine" or "dot".
        reduction: "mean" or "sum" over the anchors, or "none": one value per anchor, those of a before those of b.
        validate: also check values on devices other than the CPU, which synchronises with the device.
        backend: "auto", "dense", "tiled", "exact" or "triton"; see `pairproof.fast.engine`.

    Returns:
        A scalar, or ``[anchors]`` under "none"; float64 for float64 embeddings, else float32.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, value or device, or an option is unknown.

    Source:
        arXiv 1807.03748; both directions: arXiv 2103.00020; negatives: arXiv 1911.05722, equation 1.
    """
    if direction is None:
        direction = "both" if negatives is None else "a_to_b"
    rule, policy = Rule("out", similarity, temperature), Policy(reduction, base_temperature)
    check_options(rule, policy, backend, validate=validate, direction=direction)
    check = partial(check_embeddings, similarity=similarity, validate=validate, least=1)
    a, b = embeddings_a, embeddings_b
    of_a, of_b = check(a, name="embeddings_a"), check(b, name="embeddings_b")
    if a.shape != b.shape:
        raise ValueError(
            f"embeddings_b: expected the shape of embeddings_a, {list(a.shape)}, got shape {list(b.shape)}"
        )
    check_alike("embeddings_b", b, "embeddings_a", a)
    of_negatives = None
    if negatives is not None:
        of_negatives = check(negatives, name="negatives", shape="[K, D]")
        check_alike("negatives", negatives, "embeddings_a", a)
    storage, (returned, wide) = a.dtype, dtypes_of(a)
    measured = (of_a, of_b) if negatives is None else (of_a, of_b, of_negatives)
    needed = "" if backend == "triton" or traced(a) else precision(rule, a, measured)
    computing = wide if needed or backend == "exact" else returned
    if needed == "exact":
        backend = "exact"
    if computing != storage:
        # The gradients of both directions are added before they are rounded to a narrow dtype.
        a, b, negatives = a.to(computing), b.to(computing), None if negatives is None else negatives.to(computing)
    if direction == "b_to_a":
        a, b, of_a, of_b = b, a, of_b, of_a
    both, own = direction == "both", torch.arange(a.shape[0], device=a.device)
    references = References(b, mutual=both, sizes=of_b)
    batch = Batch(a, Targets("partners", own), rule, references, storage=storage, sizes=of_a)
    if negatives is None:
        return loss_of(batch, policy, backend).to(returned)
    none = Targets("none", torch.empty(0, dtype=torch.int64, device=a.device))
    sums = replace(rule, terms="lse")
    queue = References(negatives, sizes=of_negatives)
    parts = []
    positives = pair_logits(a, b, rule, (of_a, of_b))
    for rows, sizes in ((a, of_a), (b, of_b))[: 2 if both else 1]:
        found = anchor_values(Batch(rows, none, sums, queue, storage=storage, sizes=sizes), backend)
        values = -F.logsigmoid(positives - found.values)
        parts.append(AnchorValues(values, torch.ones_like(found.positives), found.negatives))
    return reduced(AnchorValues(*map(torch.cat, zip(*parts, strict=True))), batch, policy).to(returned)
