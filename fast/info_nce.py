"""InfoNCE of two towers: each row of one against the rows of the other, the row of its own number the one positive.

With s_ij the similarity of row i of one tower and row j of the other over the temperature, an anchor's value is

    info_nce                  -log(e^s_ii / sum over j of e^s_ij)
    info_nce with negatives   -log(e^s_ii / (e^s_ii + sum over n of e^s_in)), n the rows of ``negatives``

where with ``direction="both"`` the rows of both towers are anchors.

Sources: van den Oord et al. 2018, "Representation Learning with Contrastive Predictive Coding", arXiv 1807.03748; both
directions: Radford et al. 2021 (CLIP), arXiv 2103.00020; one positive and a queue: He et al. 2020 (MoCo), arXiv
1911.05722, equation 1.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import check_alike, check_embeddings, check_options
from .engine import AnchorValues, Backend, References, Rule, Similarity, Targets, anchor_values, pair_logits
from .reduction import reduce_anchors

Direction = Literal["both", "a_to_b", "b_to_a"]
Reduction = Literal["mean", "sum", "none"]


def info_nce_loss(
    embeddings_a: Tensor,
    embeddings_b: Tensor,
    *,
    negatives: Tensor | None = None,
    direction: Direction = "both",
    temperature: float | Tensor = 0.07,
    base_temperature: float | None = None,
    similarity: Similarity = "cosine",
    reduction: Reduction = "mean",
    validate: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """InfoNCE of two towers, in one direction or both.

    Args:
        embeddings_a: floating ``[N, D]``, N >= 1.
        embeddings_b: floating ``[N, D]``; row k is the positive of row k of ``embeddings_a``, and the other way round.
        negatives: floating ``[K, D]``, K >= 1: every anchor's negatives, in place of the other tower's other rows.
        direction: whose rows are anchors: "both", "a_to_b" (rows of a), "b_to_a" (rows of b).
        temperature: positive number that similarities are divided by, or a tensor without dimension, which may
            require a gradient.
        base_temperature: None, or a positive number: the loss is scaled by ``temperature / base_temperature``.
        similarity: "cosine" or "dot".
        reduction: "mean" or "sum" over anchors, or "none": one value per anchor, the rows of a before those of b.
        validate: read values for checks on devices other than the CPU too.
        backend: "auto", or how to evaluate: "dense", "tiled", "exact" or "triton", see
            `pairproof.fast.engine`.

    Returns:
        A scalar, or ``[anchors]`` under "none"; float64 for float64 embeddings, else float32.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, value, device or option.

    Source:
        arXiv 1807.03748; both directions: arXiv 2103.00020; negatives: arXiv 1911.05722, equation 1.
    """
    check_options(
        temperature,
        base_temperature,
        similarity=similarity,
        reduction=reduction,
        direction=direction,
        backend=backend,
        validate=validate,
    )
    a, _ = check_embeddings(embeddings_a, similarity=similarity, validate=validate, name="embeddings_a", least=1)
    b, _ = check_embeddings(embeddings_b, similarity=similarity, validate=validate, name="embeddings_b", least=1)
    if a.shape != b.shape:
        raise ValueError(
            f"embeddings_b: expected the shape of embeddings_a, {list(a.shape)}, got shape {list(b.shape)}"
        )
    check_alike("embeddings_b", b, "embeddings_a", a)
    if negatives is not None:
        negatives, _ = check_embeddings(
            negatives, similarity=similarity, validate=validate, name="negatives", shape="[K, D]", least=1
        )
        check_alike("negatives", negatives, "embeddings_a", a)
    returned = a
    if a.dtype in (torch.float16, torch.bfloat16):
        # The gradients of both directions meet before they are rounded to a narrow dtype.
        a, b, negatives = a.float(), b.float(), None if negatives is None else negatives.float()
    rule, held = Rule("out", similarity, temperature), returned.dtype
    if negatives is not None:
        sides = {"both": [(a, b), (b, a)], "a_to_b": [(a, b)], "b_to_a": [(b, a)]}[direction]
        parts = [_against_queue(*side, negatives, rule, held, backend) for side in sides]
        evaluated = AnchorValues(*(torch.cat(pair) for pair in zip(*parts, strict=True)))
    else:
        rows, others = (b, a) if direction == "b_to_a" else (a, b)
        own = torch.arange(a.shape[0], device=a.device)
        references = References(others, mutual=direction == "both")
        evaluated = anchor_values(
            rows, Targets("partners", own), rule, references=references, held=held, backend=backend
        )
    return reduce_anchors(
        evaluated,
        returned,
        anchors=None,
        temperature=temperature,
        base_temperature=base_temperature,
        reduction=reduction,
    )


def _against_queue(
    anchors: Tensor, others: Tensor, negatives: Tensor, rule: Rule, held: torch.dtype, backend: Backend
) -> AnchorValues:
    none = Targets("none", torch.empty(0, dtype=torch.int64, device=anchors.device))
    rule_of_sum = Rule("lse", rule.similarity, rule.temperature)
    found = anchor_values(anchors, none, rule_of_sum, references=References(negatives), held=held, backend=backend)
    own_logits = pair_logits(anchors, others, rule)
    values = -F.logsigmoid(own_logits - found.values)
    return AnchorValues(values, torch.ones_like(found.positives), found.negatives)
