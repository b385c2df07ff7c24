"""Hard negatives: NT-Xent with negatives weighted by their hardness and corrected for hidden positives.

Hidden positives are negatives with the class of the anchor. Let s_ij be the cosine of rows i and j divided by the
temperature, and p the positive of anchor i. The n negatives N(i) are all other rows except p and those of ignored
pairs. With t = tau_plus and b = beta, the loss of anchor i is

    log(1 + mass / e^s_ip)
    mass = max((n g - t n e^s_ip) / (1 - t), n e^(-1/temperature))
    g    = (sum over N(i) of w e^s) / (sum over N(i) of w),  w = e^(b s)

The gradient includes that of the weights w. Without negatives, the mass and the loss are 0.

The engine evaluates log(sum over N(i) of e^(f s) / e^(f s_ip)) for f = 1 + b and f = b. The difference is
q = log(g / e^s_ip). Then

    log(mass / e^s_ip) = log n + max(q + log(1 - t e^-q) - log(1 - t), -1/temperature - s_ip)

which does not overflow at any temperature. With b = 0, the second sum is n.

Accuracy: the error of q is a few units in the last place of (1 + 2b) / temperature. If e^q is close to t, the mass is
ill-conditioned, and the error is multiplied by 1 / (1 - t e^-q). If the mass is its minimum n e^(-1/temperature), the
loss is as accurate as NT-Xent.

Sources:

- HCL: Robinson et al. 2021, "Contrastive Learning with Hard Negative Samples", arXiv 2010.04592; image/main.py of
  joshr17/HCL at commit 7b4647f.
- With b = 0: Chuang et al. 2020, "Debiased Contrastive Learning", arXiv 2007.00224; main.py of chingyaoc/DCL at commit
  7d6345f.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import (
    across_ranks,
    check_anchors,
    check_choice,
    check_embeddings,
    check_ignored,
    check_options,
    check_partners,
    check_range,
    check_references,
    ranks_of,
)
from .distributed import Group
from .engine import Backend, Batch, Odds, Policy, Rule, combined, precision
from .engine.device import dtypes_of, traced

Cosine = Literal["cosine"]
Reduction = Literal["mean", "sum", "none"]

NEGLIGIBLE_BETA = 1e-30
"""With a smaller beta, all weights are 1 in float64, because no logit exceeds 1e10."""


@across_ranks
def hard_negative_loss(
    embeddings: Tensor,
    partners: Tensor,
    *,
    anchors: Tensor | None = None,
    ref_embeddings: Tensor | None = None,
    self_rows: Tensor | None = None,
    ignored: Tensor | None = None,
    ignored_ids: Tensor | None = None,
    ref_ignored_ids: Tensor | None = None,
    temperature: float | Tensor = 0.5,
    base_temperature: float | None = None,
    similarity: Cosine = "cosine",
    tau_plus: float = 0.1,
    beta: float = 1.0,
    reduction: Reduction = "mean",
    validate: bool = False,
    backend: Backend = "auto",
    group: Group = None,
) -> Tensor:
    """NT-Xent with negatives weighted by their hardness and corrected for hidden positives (HCL; debiased if beta=0).

    Example:
        >>> import torch
        >>> from pairproof.fast import hard_negative_loss, stacked_partners
        >>> z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]])
        >>> loss = hard_negative_loss(z, stacked_partners(4))
        >>> print(f"{loss:.4f}")
        2.3750

    Args:
        embeddings: floating ``[N, D]``, N >= 2, or N >= 1 with ref_embeddings. Below, M is the number of rows of
            ref_embeddings if given, else N.
        partners: integers ``[N]``: partners[i] is the positive of row i. Without ref_embeddings, partners are mutual,
            and no row is its own partner. For two views per item, use `stacked_partners` or `interleaved_partners`.
            With ref_embeddings, partners[i] is any row of ref_embeddings except self_rows[i].
        anchors: bool ``[N]``: which rows are anchors; by default, all.
        ref_embeddings: floating ``[M, D]``: rows to contrast anchors with instead of the batch, such as a memory bank,
            a queue, or the gathered rows of all devices.
        self_rows: integers ``[N]``: the row of ref_embeddings that is row i itself and is left out. -1, the default,
            means none.
        ignored: bool ``[N, M]``: pairs (anchor, other row) that do not count as negatives. May be asymmetric. A row and
            its partner must not be ignored.
        ignored_ids: integers ``[N]``: negatives with the same id as the anchor are left out, for example duplicates.
            Needs no ``[N, M]`` mask.
        ref_ignored_ids: integers ``[M]``: the ids of ref_embeddings; required with ref_embeddings and ignored_ids.
        temperature: number from 1e-10 to 1e10 that similarities are divided by. A 0-dimensional tensor may require a
            gradient.
        base_temperature: positive number; if given, the loss is multiplied by ``temperature / base_temperature``.
        similarity: only "cosine", because the loss assumes that the lowest similarity is -1.
        tau_plus: number from 0 to below 1, the probability that a negative has the class of the anchor.
        beta: number from 0 to 1e10, the exponent of the weights. With 0, all negatives have the same weight.
        reduction: "mean" or "sum" over the anchors, or "none": one value per anchor, in row order.
        validate: also check values on accelerators, which synchronises with the device.
        backend: "auto", "dense", "tiled", "exact" or "triton"; see `pairproof.fast.engine`.
        group: process group of torch.distributed, or "world", if other processes have further rows of the batch; see
            `pairproof.fast.distributed`.

    Returns:
        A scalar, or ``[anchors]`` under "none"; float64 for float64 embeddings, else float32.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, value or device, or an option is unknown.

    Source:
        arXiv 2010.04592, and image/main.py of joshr17/HCL; with beta=0 arXiv 2007.00224, equation 8.
    """
    rule, policy = Rule("out", similarity, temperature, "only_negatives"), Policy(reduction, base_temperature)
    check_choice("similarity", similarity, ("cosine",))
    check_options(rule, policy, backend, validate=validate)
    check_range("tau_plus", tau_plus)
    check_range("beta", beta)
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

    # Rows are converted here, so that their gradients through sums and positives are added first and rounded once.
    returned, computing = dtypes_of(embeddings)
    if isinstance(temperature, Tensor):
        temperature = temperature.to(computing)  # a quotient of a narrow dtype would be rounded
        rule = replace(rule, temperature=temperature)
    cold = replace(rule, temperature=temperature / (1 + beta))
    if backend != "exact" and (backend == "triton" or traced(embeddings) or not precision(cold, embeddings, ())):
        others = embeddings if references.embeddings is None else references.embeddings
        computing = torch.promote_types(returned, dtypes_of(others)[0])
    rows, columns = embeddings.to(computing), references.embeddings
    if columns is not None:
        columns = columns.to(computing)
        references = replace(references, embeddings=columns)
    batch = Batch(rows, targets, rule, references, anchors, storage=embeddings.dtype, sizes=sizes)
    if ranks is not None:
        batch, policy = ranks.shared(batch, policy)
    factors = (1 + beta, beta) if beta >= NEGLIGIBLE_BETA else (1.0,)
    formula = _Debiased(temperature, tau_plus, weighted=len(factors) > 1)
    return combined(batch, factors, formula, policy, backend).to(returned)


@dataclass(slots=True)
class _Debiased:
    """The formula of the loss, for `combined`.

    ``weighted`` says whether there is a second sum, that of the weights.
    """

    temperature: float | Tensor
    tau_plus: float
    weighted: bool

    def values(self, found: Odds) -> tuple[Tensor, Sequence[Tensor]]:
        number, tau_plus = found.negatives, self.tau_plus
        log_number = math.log(number) if isinstance(number, int) else number.clamp(min=1).to(found.logits.dtype).log()
        q, rest = found.odds[0] - (found.odds[1] if self.weighted else log_number), math.log1p(-tau_plus)
        floor = (rest - 1 / self.temperature) - found.logits
        # The comparisons are False for NaN, so that NaN stays NaN.
        if tau_plus:
            lowest = math.log(tau_plus)
            # The clamps keep the gradient finite.
            share = torch.exp(lowest - q.clamp(min=lowest)).clamp(max=1 - torch.finfo(q.dtype).eps)
            debiased = q + torch.log1p(-share)
            at_floor = (q <= lowest) | (debiased <= floor)
        else:
            share, debiased, at_floor = torch.zeros_like(q), q, q <= floor
        log_ratio = torch.where(at_floor, floor, debiased) + (log_number - rest)
        return -F.logsigmoid(-log_ratio), (log_ratio, at_floor, share)

    def slopes(self, grad: Tensor, kept: Sequence[Tensor]) -> Sequence[Tensor]:
        log_ratio, at_floor, share = kept
        grad = grad * log_ratio.sigmoid()
        of_q = (grad / (1 - share)).masked_fill_(at_floor, 0.0)
        of_logits = torch.where(at_floor, -grad, 0.0)
        return (of_logits, of_q, -of_q) if self.weighted else (of_logits, of_q)
