"""The pairs form: the sum of the binary cross-entropies of each row's pairs, in panels of whole rows.

The cross-entropy of a pair is softplus(x), where x is the logit of a negative, or minus the logit of a positive. Its
derivative with respect to x is sigmoid(x). Both are accurate for all positives, temperatures and biases. An ignored
pair has x = -inf, so that both are 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .device import borrow, give_back
from .rowwise import masks_of
from .scaling import Saved, pulled, scale_both
from .spec import AnchorValues, Batch, Gradients, Plan
from .unshifted import NONE, Products, positives_of, ranks_of

LOWEST_LOG = {torch.float64: -700.0, torch.float32: -87.0}
"""The smallest x for which e^x is a normal number, rounded up."""
LINEAR_ABOVE = 40.0
"""Above this, softplus(x) and x differ by less than the rounding error of float64."""
FEW = 2**14
"""Up to this number of pairs, the time depends on the number of operations, not on their size."""
MOST_COMBINED = 8
"""Largest number of exponentials that one logarithm combines; doubling it doubles the rounding errors."""

Panel = tuple[Tensor, Tensor]
"""The logits ``[b, M]``, negated for positives, and which pairs are positives.

For partners without ignored pairs, the latter is int64 ``[b, 1]``, the column of each row's positive. Otherwise it is
``[b, M]``, -1 for positives, 1 for negatives and 0 for ignored pairs.
"""


def _signs(logits: Tensor, batch: Batch, here: slice, ranks: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return the second part of `Panel`; the logits only give shape and dtype."""
    targets = batch.targets
    if targets.omits:
        positive, negative, _ = masks_of(targets, None, here, batch.embeddings.shape[0], logits.shape[1])
        return negative.to(logits.dtype) - positive.to(logits.dtype)
    if targets.kind == "partners":
        return targets.given[here].unsqueeze(1)
    return torch.rsub(positives_of(batch, here, logits, ranks), 1, alpha=2)


def _panel(products: Tensor, batch: Batch, here: slice, ranks: tuple[Tensor, Tensor] | None) -> Panel:
    signs = _signs(products, batch, here, ranks)
    signed = _negate(products.add_(batch.rule.bias), signs)
    return signed.masked_fill_(signs == 0, -torch.inf) if batch.targets.omits else signed, signs


def _negate(matrix: Tensor, signs: Tensor) -> Tensor:
    """Negate a matrix ``[b, M]`` at the positives, in place; set it to 0 at ignored pairs, whose sign is 0."""
    if signs.dtype == torch.int64:
        return matrix.scatter_(1, signs, matrix.gather(1, signs).neg_())
    return matrix.mul_(signs)


def evaluate(batch: Batch, plan: Plan) -> tuple[AnchorValues, Saved]:
    """Return the values; for the backward pass also the scaled rows and columns, and any kept panels."""
    scaled, columns = scale_both(batch)
    rows, count, width = scaled.rows, len(scaled.rows), len(columns.rows)
    products, kept, ranks = Products(rows, columns.rows, plan, keep=plan.keep), [], ranks_of(batch)
    # Allocated before the panels: small tensors that outlive a panel would fragment its freed memory.
    values = rows.new_empty(count)
    number = torch.ones(count, dtype=torch.int64, device=rows.device) if plan.sized else NONE
    negatives = width - number if plan.sized else NONE
    for here in products.slices():
        panel = _panel(products(here), batch, here, ranks)
        _softplus_sum(panel[0], out=values[here])
        if plan.sized and panel[1].dtype != torch.int64:
            torch.sum(panel[1] < 0, 1, out=number[here])
            torch.sum(panel[1] > 0, 1, out=negatives[here])
        if plan.keep and products.buffer is None:
            kept.append(panel)
        del panel
    saved = Saved(scaled, (), products.buffer if plan.keep and not kept else kept, columns)
    return AnchorValues(values, number, negatives), saved


def _softplus_sum(x: Tensor, out: Tensor) -> None:
    """Sum softplus(x) over each row of ``[b, M]``.

    With u = e^-|x|, softplus(x) is max(x, 0) + log(1 + u). One logarithm serves several pairs: (1 + u)(1 + v) = 1 + (u
    + v (1 + u)).
    """
    if x.numel() <= FEW:
        torch.sum(F.softplus(x, threshold=LINEAR_ABOVE), 1, out=out)
        return
    scratch, width = borrow("weights", x, x.numel()), x.shape[1]
    part = scratch.as_strided(x.shape, (width, 1))
    torch.sum(torch.clamp(x, min=0, out=part), 1, out=out)
    # -|x| is x - 2 max(x, 0). Exponentials that are not normal numbers are slow; they count as 0.
    lowest = LOWEST_LOG[x.dtype]
    torch.threshold_(torch.sub(x, part, alpha=2, out=part).clamp_(min=lowest).exp_(), 1.01 * math.exp(lowest), 0.0)
    while width % 2 == 0 and width > x.shape[1] // MOST_COMBINED:
        width //= 2
        first, second = part[:, :width], part[:, width:]
        part = first.add_(second.addcmul_(first, second))
    out.add_(part.log1p_().sum(1))
    give_back("weights", scratch)


def differentiate(grad: Tensor, size: float | Tensor, batch: Batch, plan: Plan, saved: Saved) -> Gradients:
    """Return the gradients with respect to all inputs; see `symmetric.differentiate`. What is kept is overwritten."""
    saved = saved if saved.classes else saved._replace(classes=scale_both(batch, scaled=saved.scaled)[1])
    flat = saved.kept if isinstance(saved.kept, Tensor) else None
    products = Products(saved.scaled.rows, saved.classes.rows, plan, kept=flat)
    ranks = ranks_of(batch) if flat is not None or not saved.kept else None

    def weighed() -> Iterator[tuple[slice, Tensor]]:
        for here in products.slices():
            if flat is not None:
                panel = products.at(here), _signs(products.at(here), batch, here, ranks)
            else:
                panel = saved.kept[0] if saved.kept else _panel(products(here), batch, here, ranks)
            yield here, _weigh(panel, grad, batch, here)

    return pulled(weighed(), saved, batch, size)


def _weigh(panel: Panel, grad: Tensor, batch: Batch, here: slice) -> Tensor:
    """Return the weights ``[b, M]`` of a panel, which is overwritten."""
    signed, signs = panel
    return _negate(signed.sigmoid_().mul_(grad[here].unsqueeze(1)), signs)
