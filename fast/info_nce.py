"""InfoNCE: the cross-entropy of two towers; by default, row k of one tower is the only positive of row k of the other.

Let s_ij be the similarity of row i of one tower and row j of the other, divided by the temperature. A(i) is all rows of
the other tower, without ignored pairs. P(i) is the set of positives of row i in A(i). The loss of anchor i is

    info_nce                  mean over p in P(i) of -log(e^s_ip / sum over j in A(i) of e^s_ij)
    info_nce with negatives   -log(e^s_ii / (e^s_ii + sum over n of e^s_in)), n the rows of ``negatives``

With ``inside_reduction`` "mean" or "sum", the loss is -log of the mean or sum of the ratios. With ``direction="both"``,
the default without negatives, the rows of both towers are anchors.

Sources:

- InfoNCE: van den Oord et al. 2018, "Representation Learning with Contrastive Predictive Coding", arXiv 1807.03748.
- Both directions: Radford et al. 2021 (CLIP), arXiv 2103.00020.
- Weights of the directions: Zhang et al. 2020 (ConVIRT), arXiv 2010.00747, equation 4.
- Negatives from a queue: He et al. 2020 (MoCo), arXiv 1911.05722, equation 1.
- Several positives: Khosla et al. 2020, arXiv 2004.11362, equations 2 and 3.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import (
    INSIDE_REDUCTIONS,
    across_ranks,
    check_alike,
    check_choice,
    check_direction_weights,
    check_embeddings,
    check_equal_towers,
    check_ignored_of_towers,
    check_no_queue,
    check_options,
    check_pairs_of_towers,
    check_weights,
    ranks_of,
)
from .distributed import Group
from .engine import (
    AnchorValues,
    Backend,
    Batch,
    InsideReduction,
    Policy,
    References,
    Rule,
    Similarity,
    Sizes,
    Targets,
    anchor_values,
    loss_of,
    pair_logits,
    precision,
    reduced,
)
from .engine.device import dtypes_of, traced
from .supcon import NoPositive

Direction = Literal["both", "a_to_b", "b_to_a"]
Inside = Literal["none", "mean", "sum"]
Reduction = Literal["mean", "sum", "none"]


@across_ranks
def info_nce_loss(
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
    negatives: Tensor | None = None,
    direction: Direction | None = None,
    direction_weights: tuple[float, float] | None = None,
    temperature: float | Tensor = 0.07,
    base_temperature: float | None = None,
    similarity: Similarity = "cosine",
    inside_reduction: Inside = "none",
    no_positive: NoPositive = "drop",
    reduction: Reduction = "mean",
    validate: bool = False,
    backend: Backend = "auto",
    group: Group = None,
) -> Tensor:
    """InfoNCE of two towers; by default, row k of one tower is the only positive of row k of the other.

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
        embeddings_b: floating ``[M, D]``, the other tower. M must be N unless partners, labels or positives are given.
        partners: integers ``[N]`` from 0 to M - 1: the only positive of each row of a. The positives of row j of b are
            the rows of a with partner j: none, one or several.
        labels: integers or bool ``[N]``: rows of a and b with the same label are positives of each other.
        ref_labels: integers or bool ``[M]``: the labels of the rows of b. If M is N, they default to ``labels``.
        positives: bool ``[N, M]``: whether row i of a and row j of b are positives of each other.
        ignored: bool ``[N, M]``: pairs to leave out in both directions, even positives. Without labels and positives,
            the one positive of a row of a must not be ignored.
        ignored_ids: integers ``[N]``, such as caption numbers: negatives with the same id as the anchor are left out.
            Needs no ``[N, M]`` mask.
        ref_ignored_ids: integers ``[M]``: the ids of the rows of b. If M is N, they default to ``ignored_ids``.
        anchor_weights: float32 or float64 ``[N]``, from 0 to 1e10: entry k multiplies the value of row k of a. If rows
            of b are anchors, M must be N, and entry k also multiplies the value of row k of b. The mean divides by the
            sum of the weights of the anchors that are not dropped; it is 0 if the sum is 0. Must not require a
            gradient.
        negatives: floating ``[K, D]``, K >= 1: the negatives of every anchor, in both directions, instead of the other
            rows of the other tower. Not allowed with partners, labels, positives or ignored pairs.
        direction: which rows are anchors: those of a ("a_to_b"), of b ("b_to_a"), or first those of a, then those of b
            ("both"). Defaults to "a_to_b" with negatives, as in MoCo, else to "both".
        direction_weights: two numbers from 0 to 1e10, factors of the values of the anchors of a and of b; only with
            direction "both". "mean" is then the sum of the weighted means of both towers. By default, "mean" is over
            the anchors of both towers. If both have equally many anchors, this is the same as (0.5, 0.5).
        temperature: number from 1e-10 to 1e10 that similarities are divided by. A 0-dimensional tensor may require a
            gradient.
        base_temperature: positive number; if given, the loss is multiplied by ``temperature / base_temperature``.
        similarity: "cosine" or "dot".
        inside_reduction: how the ratios r_p = e^s_ip / sum of e^s of several positives are combined. "none": the mean
            of -log r_p. "mean": -log of the mean of r_p. "sum": -log of the sum of r_p.
        no_positive: the value of an anchor without positives: "zero", "nan", or "drop" (leave the anchor out).
        reduction: "mean" or "sum" over the anchors, or "none": one value per anchor that is not dropped.
        validate: also check values on accelerators, which synchronises with the device.
        backend: "auto", "dense", "tiled", "exact" or "triton"; see `pairproof.fast.engine`.
        group: process group of torch.distributed, "world" or a `Ring`, if other processes have further rows of the
            batch; see `pairproof.fast.distributed`.

    Returns:
        A scalar, or ``[anchors]`` under "none"; float64 for float64 embeddings, else float32.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, value or device, or does not fit the others, or an option is
            unknown.

    Source:
        arXiv 1807.03748; both directions: arXiv 2103.00020; their weights: arXiv 2010.00747, equation 4; negatives:
        arXiv 1911.05722, equation 1; several positives: arXiv 2004.11362, equations 2 and 3.
    """
    if direction is None:
        direction = "both" if negatives is None else "a_to_b"
    check_choice("inside_reduction", inside_reduction, ("none", *INSIDE_REDUCTIONS))
    inside: InsideReduction = "mean" if inside_reduction == "none" else inside_reduction
    rule = Rule("out" if inside_reduction == "none" else "in", similarity, temperature, inside_reduction=inside)
    policy = Policy(reduction, base_temperature, no_positive)
    check_options(rule, policy, backend, validate=validate, direction=direction)
    weights = check_direction_weights(direction_weights, direction)
    ranks = None if group is None else ranks_of(group)
    check = partial(check_embeddings, similarity=similarity, validate=validate, least=1 if ranks is None else 0)
    a, b = embeddings_a, embeddings_b
    named = [value for value in (partners, labels, positives) if value is not None]
    of_a, of_b = check(a, name="embeddings_a"), check(b, name="embeddings_b", shape="[M, D]" if named else "[N, D]")
    shared = ranks is not None and negatives is None
    options: dict[str, bool] = {"validate": validate, "shared": shared}
    targets = check_pairs_of_towers(a, b, partners, labels, ref_labels, positives, **options)
    targets = check_ignored_of_towers(a, b, targets, ignored, ignored_ids, ref_ignored_ids, **options)
    of_anchors = check_weights(a, "anchor_weights", anchor_weights, validate=validate)
    if of_anchors is not None:
        check_equal_towers("anchor_weights", direction, a, b)
    of_negatives = None
    if negatives is not None:
        pairs = {"partners": partners, "labels": labels, "positives": positives}
        pairs |= {"ignored": ignored, "ignored_ids": ignored_ids, "ref_ignored_ids": ref_ignored_ids}
        check_no_queue([name for name, value in pairs.items() if value is not None])
        of_negatives = check(negatives, name="negatives", shape="[K, D]")
        check_alike("negatives", negatives, "embeddings_a", a)
    if ranks is not None:
        ranks.meet(a, b, least=1)
        policy = replace(policy, ranks=ranks)
    storage, (returned, wide) = a.dtype, dtypes_of(a)
    measured = (of_a, of_b) if negatives is None else (of_a, of_b, of_negatives)
    needed = "" if backend == "triton" or traced(a) else precision(rule, a, measured)
    if ranks is not None and similarity == "dot":  # the ranks have rows of different sizes
        needed = ranks.widest(needed)
    computing = wide if needed or backend == "exact" else returned
    if needed == "exact":
        backend = "exact"
    if computing != storage:
        # Rows are converted here, so that the gradients of both directions are added before they are rounded.
        a, b, negatives = a.to(computing), b.to(computing), None if negatives is None else negatives.to(computing)
    if not named:
        # Every row has a positive, so no_positive has no effect. "zero" is faster for small batches.
        policy = replace(policy, no_positive="zero")
    of_side = policy
    if of_anchors is not None:
        of_side = replace(policy, anchor_weights=of_anchors)
        policy = replace(policy, anchor_weights=torch.cat([of_anchors] * (2 if direction == "both" else 1)))
    batch = Batch(a, targets, rule, References(b, sizes=of_b), storage=storage, sizes=of_a)
    if ranks is not None and shared:
        chosen = ranks.towers(batch, direction, alike=not named)
        if len(chosen) == 1:
            return loss_of(chosen[0], policy, backend).to(returned)
        sides = [ranks.anchor_values(side, backend) for side in chosen]
    elif not named and not targets.omits and negatives is None:
        if direction == "b_to_a":
            a, b, of_a, of_b = b, a, of_b, of_a
        references = References(b, mutual=direction == "both", sizes=of_b)
        batch = Batch(a, targets, rule, references, storage=storage, sizes=of_a)
        if weights is None:
            return loss_of(batch, policy, backend).to(returned)
        halves = (part.tensor_split(2) for part in anchor_values(batch, backend))
        sides = [AnchorValues(*parts) for parts in zip(*halves, strict=True)]
    elif negatives is None:
        back = Batch(b, targets.transposed(len(b)), rule, References(a, sizes=of_a), storage=storage, sizes=of_b)
        chosen = {"both": [batch, back], "a_to_b": [batch], "b_to_a": [back]}[direction]
        if len(chosen) == 1:
            return loss_of(chosen[0], policy, backend).to(returned)
        sides = [anchor_values(side, backend) for side in chosen]
    else:
        sides = _with_queue(batch, negatives, of_negatives, direction, backend)
    if weights is None:
        return reduced(AnchorValues(*map(torch.cat, zip(*sides, strict=True))), batch, policy).to(returned)
    losses = [weight * reduced(side, batch, of_side) for weight, side in zip(weights, sides, strict=True)]
    return (torch.cat(losses) if reduction == "none" else losses[0] + losses[1]).to(returned)


def _with_queue(
    batch: Batch, negatives: Tensor, sizes: Sizes | None, direction: str, backend: Backend
) -> list[AnchorValues]:
    """Return the values of each chosen direction, with the rows of ``negatives`` in the denominators."""
    a, b, rule = batch.embeddings, cast(Tensor, batch.references.embeddings), replace(batch.rule, terms="out")
    none = Targets("none", torch.empty(0, dtype=torch.int64, device=a.device))
    queue = References(negatives, sizes=sizes)
    positives = pair_logits(a, b, rule, (batch.sizes, batch.references.sizes))
    sides = []
    for name, rows, of_rows in (("a_to_b", a, batch.sizes), ("b_to_a", b, batch.references.sizes)):
        if direction in (name, "both"):
            sums = Batch(rows, none, replace(rule, terms="lse"), queue, storage=batch.storage, sizes=of_rows)
            found = anchor_values(sums, backend)
            values = -F.logsigmoid(positives - found.values)
            sides.append(AnchorValues(values, torch.ones_like(found.positives), found.negatives))
    return sides
