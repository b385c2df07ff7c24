"""Weighted decoupled contrastive learning (DCLW): no positive in the denominator, and weighted positive terms.

Let s_ij be the cosine of rows i and j divided by the temperature, p the positive of anchor i, and c_i their cosine.
N(i) is all rows except i and p; with ref_embeddings, it is all rows of ref_embeddings except p and self_rows[i].
Ignored pairs are left out of N(i). R is the number of rows of the batch. The loss of anchor i is

    log(sum over n in N(i) of e^s_in) - w_i s_ip
    w_i = 2 - m_i,  m_i = R softmax(c / sigma)_i over the rows of the batch

The weights are constants, unless ``detach_weights`` is False. An anchor without negatives has the loss 0. As sigma
grows, all w_i approach 1, and the loss approaches DCL: `supcon_loss` with denominator="only_negatives".

The engine evaluates log(sum over n in N(i) of e^s_in) - s_ip, to which (m_i - 1) s_ip is added.

Source: Yeh et al. 2022, "Decoupled Contrastive Learning", arXiv 2110.06848, the loss L_DCW. The paper sums over the
rows. DCLWLoss of lightly (commit e8d317f) takes the mean, with constant weights, and so does this loss. Gradients flow
through the weights in raminnakhli/Decoupled-Contrastive-Learning (commit 0b9b76d) and in nidl (commit efb1343).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor

from .checks import (
    across_ranks,
    check_anchors,
    check_choice,
    check_embeddings,
    check_flag,
    check_ignored,
    check_options,
    check_partners,
    check_range,
    check_references,
    ranks_of,
)
from .distributed import Group, Share
from .engine import Backend, Batch, Odds, Policy, Rule, combined, precision
from .engine.device import dtypes_of, traced

Cosine = Literal["cosine"]
Reduction = Literal["mean", "sum", "none"]


@across_ranks
def dclw_loss(
    embeddings: Tensor,
    partners: Tensor,
    *,
    anchors: Tensor | None = None,
    ref_embeddings: Tensor | None = None,
    self_rows: Tensor | None = None,
    ignored: Tensor | None = None,
    ignored_ids: Tensor | None = None,
    ref_ignored_ids: Tensor | None = None,
    temperature: float | Tensor = 0.1,
    base_temperature: float | None = None,
    similarity: Cosine = "cosine",
    sigma: float = 0.5,
    detach_weights: bool = True,
    reduction: Reduction = "mean",
    validate: bool = False,
    backend: Backend = "auto",
    group: Group = None,
) -> Tensor:
    """Decoupled contrastive learning with weighted positives (DCLW).

    The weight of the positive of row i is 2 - N softmax(c / sigma)_i, where c are the cosines of the N positive pairs.

    Example:
        >>> import torch
        >>> from pairproof.fast import dclw_loss, stacked_partners
        >>> z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8], [-0.6, 0.8]])
        >>> loss = dclw_loss(z, stacked_partners(4))
        >>> print(f"{loss:.4f}")
        6.1574

    Args:
        embeddings: floating ``[N, D]``, N >= 2, or N >= 1 with ref_embeddings. Below, M is the number of rows of
            ref_embeddings if given, else N.
        partners: integers ``[N]``: partners[i] is the positive of row i. Without ref_embeddings, partners are mutual,
            and no row is its own partner. For two views per item, use `stacked_partners` or `interleaved_partners`.
            With ref_embeddings, partners[i] is any row of ref_embeddings except self_rows[i].
        anchors: bool ``[N]``: which rows are anchors; by default, all. The weights are computed from all rows.
        ref_embeddings: floating ``[M, D]``: rows to contrast anchors with instead of the batch, such as a memory bank,
            a queue, or the gathered rows of all devices.
        self_rows: integers ``[N]``: the row of ref_embeddings that is row i itself and is left out. -1, the default,
            means none.
        ignored: bool ``[N, M]``: pairs (anchor, other row) to leave out of the sum over the negatives. May be
            asymmetric. A row and its partner must not be ignored. The weights are the same with and without ignored
            pairs.
        ignored_ids: integers ``[N]``: negatives with the same id as the anchor are left out, for example duplicates.
            Needs no ``[N, M]`` mask.
        ref_ignored_ids: integers ``[M]``: the ids of ref_embeddings; required with ref_embeddings and ignored_ids.
        temperature: number from 1e-10 to 1e10 that similarities are divided by. A 0-dimensional tensor may require a
            gradient.
        base_temperature: positive number; if given, the loss is multiplied by ``temperature / base_temperature``.
        similarity: only "cosine", because the weights are defined for unit vectors.
        sigma: number from 1e-10 to 1e10 that cosines are divided by in the weights.
        detach_weights: whether the weights are constants, without a gradient. The value of the loss is the same.
        reduction: "mean" or "sum" over the anchors, or "none": one value per anchor, in row order.
        validate: also check values on accelerators, which synchronises with the device.
        backend: "auto", "dense", "tiled", "exact" or "triton"; see `pairproof.fast.engine`.
        group: process group of torch.distributed, or "world", if other processes have further rows of the batch; see
            `pairproof.fast.distributed`.

    Returns:
        A scalar, or ``[anchors]`` under "none"; float64 for float64 embeddings, else float32. An anchor without
        negatives has the value 0.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, value or device, or an option is unknown.

    Source:
        arXiv 2110.06848, and DCLWLoss of lightly.
    """
    rule, policy = Rule("out", similarity, temperature, "only_negatives"), Policy(reduction, base_temperature)
    check_choice("similarity", similarity, ("cosine",))
    check_options(rule, policy, backend, validate=validate)
    check_range("sigma", sigma)
    check_flag("detach_weights", detach_weights)
    ranks = None if group is None else ranks_of(group)
    shared = ranks is not None and ref_embeddings is None
    least = 0 if ranks is not None else 2 if ref_embeddings is None else 1
    sizes = check_embeddings(embeddings, similarity=similarity, validate=validate, least=least)
    references = check_references(embeddings, ref_embeddings, None, self_rows, similarity=similarity, validate=validate)
    targets = check_partners(embeddings, partners, references, validate=validate)
    if anchors is not None:
        check_anchors(embeddings, anchors)
    if ignored is not None or ignored_ids is not None or ref_ignored_ids is not None:
        left_out = ignored, ignored_ids, ref_ignored_ids
        targets = check_ignored(embeddings, targets, references, *left_out, validate=validate, shared=shared)

    # Rows are converted here, so that their gradients through negatives and through positives are added unrounded.
    returned, computing = dtypes_of(embeddings)
    if isinstance(temperature, Tensor):
        temperature = temperature.to(computing)  # a quotient of a narrow dtype would be rounded
        rule = replace(rule, temperature=temperature)
    if backend != "exact" and (backend == "triton" or traced(embeddings) or not precision(rule, embeddings, ())):
        others = embeddings if references.embeddings is None else references.embeddings
        computing = torch.promote_types(returned, dtypes_of(others)[0])
    rows = embeddings.to(computing)
    if references.embeddings is not None:
        references = replace(references, embeddings=references.embeddings.to(computing))
    batch = Batch(rows, targets, rule, references, anchors, storage=embeddings.dtype, sizes=sizes)
    if ranks is not None:
        batch, policy = ranks.shared(batch, policy)
    formula = _Weighted(temperature, sigma, detach_weights, None if ranks is None else ranks.first)
    return combined(batch, (1.0,), formula, policy, backend).to(returned)


@dataclass(slots=True)
class _Weighted:
    """The formula of the loss, for `combined`.

    ``share`` says which rows each process has; None: one process has all rows.
    """

    temperature: float | Tensor
    sigma: float
    detach: bool
    share: Share | None

    def values(self, found: Odds) -> tuple[Tensor, Sequence[Tensor]]:
        cosines = found.logits * self.temperature
        weighing = (cosines.detach() if self.detach else cosines) / self.sigma
        if self.share is None:
            multiples = torch.softmax(weighing, dim=0) * len(weighing)
        else:
            multiples = torch.softmax(self.share.rows(weighing), dim=0)[self.share.here] * self.share.total
        excess = multiples - 1
        return found.odds[0] + excess * found.logits, (excess, multiples, found.logits)

    def slopes(self, grad: Tensor, kept: Sequence[Tensor]) -> Sequence[Tensor]:
        excess, multiples, logits = kept
        of_logits = excess * grad
        if not self.detach:
            inner = logits * grad
            inner -= (multiples * inner).mean()
            of_logits.addcmul_(multiples, inner, value=cast(float, self.temperature) / self.sigma)
        return of_logits, grad
