"""The pairs form: the sum of the binary cross-entropies of each row's pairs, in panels of whole rows.

The cross-entropy of a pair is softplus(x), where x is the logit of a negative, or minus the logit of a positive. Its
derivative with respect to x is sigmoid(x). Both are evaluated without cancellation and overflow, so this form is
accurate for every kind of positives, temperature and bias. An ignored pair has x = -inf, so that both are 0. A panel
holds some anchors and all columns. A small batch is one panel, which is kept for the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .rowwise import masks_of
from .scaling import Saved, pulled, scale_both
from .spec import AnchorValues, Batch, Gradients, Plan
from .unshifted import NONE, positives_of, ranks_of

LINEAR_ABOVE = 40.0
"""Above this, the difference between softplus(x) and x is less than the rounding error of float64."""

Panel = tuple[Tensor, Tensor]
"""The logits ``[b, M]``, negated for positives, and which pairs are positives.

The latter is int64 ``[b, 1]``, the column of each row's only positive, for partners without ignored pairs. Otherwise it
is ``[b, M]``, -1 for positives, 1 for negatives and 0 for ignored pairs.
"""


def _panel(products: Tensor, batch: Batch, here: slice, ranks: tuple[Tensor, Tensor] | None) -> Panel:
    """Return the panel of the rows ``here`` from their products ``[b, M]``, which are overwritten."""
    targets = batch.targets
    if targets.omits:
        positive, negative, _ = masks_of(targets, None, here, batch.embeddings.shape[0], products.shape[1])
        signs = negative.to(products.dtype) - positive.to(products.dtype)
        return _negate(products.add_(batch.rule.bias), signs).masked_fill_(signs == 0, -torch.inf), signs
    if targets.kind == "partners":
        signs = targets.given[here].unsqueeze(1)
    else:
        signs = torch.rsub(positives_of(batch, here, products, ranks), 1, alpha=2)
    return _negate(products.add_(batch.rule.bias), signs), signs


def _negate(matrix: Tensor, signs: Tensor) -> Tensor:
    """Negate the entries ``[b, M]`` of positives in place."""
    if signs.dtype == torch.int64:
        return matrix.scatter_(1, signs, matrix.gather(1, signs).neg_())
    return matrix.mul_(signs)


def evaluate(batch: Batch, plan: Plan) -> tuple[AnchorValues, Saved]:
    """Return the values, and the scaled rows and columns; also the panels if they are kept."""
    scaled, columns = scale_both(batch)
    rows, turned = scaled.rows, columns.rows.T
    count, width = rows.shape[0], turned.shape[1]
    kept, ranks = [], ranks_of(batch)
    # The results of all panels are allocated first: small tensors that outlive a panel would fragment its freed memory.
    values = rows.new_empty(count)
    number = torch.ones(count, dtype=torch.int64, device=rows.device) if plan.sized else NONE
    negatives = width - number if plan.sized else NONE
    for start in range(0, count, plan.rows):
        here = slice(start, min(start + plan.rows, count))
        panel = _panel((rows if plan.rows >= count else rows[here]) @ turned, batch, here, ranks)
        torch.sum(F.softplus(panel[0], threshold=LINEAR_ABOVE), 1, out=values[here])
        if plan.sized and panel[1].dtype != torch.int64:
            torch.sum(panel[1] < 0, 1, out=number[here])
            torch.sum(panel[1] > 0, 1, out=negatives[here])
        if plan.keep:
            kept.append(panel)
        del panel
    return AnchorValues(values, number, negatives), Saved(scaled, (), kept, columns)


def differentiate(grad: Tensor, size: float | Tensor, batch: Batch, plan: Plan, saved: Saved) -> Gradients:
    """Return the gradients with respect to all inputs; see `symmetric.differentiate`. What is kept is overwritten."""
    saved = saved if saved.classes else saved._replace(classes=scale_both(batch, scaled=saved.scaled)[1])
    rows, turned = saved.scaled.rows, saved.classes.rows.T

    def weighed() -> Iterator[tuple[slice, Tensor]]:
        count, ranks = rows.shape[0], None if saved.kept else ranks_of(batch)
        for place, start in enumerate(range(0, count, plan.rows)):
            here = slice(start, min(start + plan.rows, count))
            if saved.kept:
                yield here, _weigh(saved.kept[place], grad, batch, here)
            else:
                yield here, _weigh(_panel(rows[here] @ turned, batch, here, ranks), grad, batch, here)

    return pulled(weighed(), saved, batch, size)


def _weigh(panel: Panel, grad: Tensor, batch: Batch, here: slice) -> Tensor:
    """Return the weights ``[b, M]`` of a panel for `pulled`; the panel is overwritten."""
    signed, signs = panel
    return _negate(signed.sigmoid_().mul_(grad[here].unsqueeze(1)), signs)
