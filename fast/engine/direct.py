"""The direct form: the loss of two large towers and its gradient, in one pass over panels.

The loss is the mean or the sum of all values, so its derivative with respect to every value is the same number. Each
value depends only on the logits of its own row. Hence the weights of a panel (derivatives of the values with respect to
its logits) are known as soon as its exponentials are summed. They are multiplied with the rows and the columns while
the panel is in the cache. Only these products and the scaled rows and columns are kept, so memory is linear.

Logits that are not moderate are shifted by the row's largest negative, as in `rowwise`; those of the sigmoid loss must
be moderate. With E = e^s for the logits s without the bias, p the positive of the row, and N its negatives,

    "out"      value = log(1 + neg / pos), neg = sum over N of E, pos = E_p
               weights = (E, and -neg at p) / (neg + pos)
    "sigmoid"  value = sum over N of log(1 + c E) + softplus(-s_p - bias), c = e^bias
               weights = c (E / (1 + c E), and -sigmoid(-s_p - bias) / c at p)

The factors 1 / (neg + pos) and c do not depend on the column, so they multiply the products instead of the panel.

In a loss with hardness weights, the logits of positives have another temperature: E_p is raised to a power.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .device import borrow, dtypes_of, give_back
from .plan import panel_rows
from .scaling import Saved, by_temperature, scale_both, to_embeddings
from .spec import LN2, UNSHIFTED, AnchorValues, Batch, Gradients, Plan
from .unshifted import NONE, Products

MOST_HALVED = 3
"""How often, at most, exponentials are combined in pairs before a logarithm; each time doubles rounding errors."""


class Hardened(NamedTuple):
    """Hardness weights: factors of the negatives' exponentials, through which no gradient flows.

    A negative's exponential times its weight equals an exponential at a lower temperature, that of the batch's `Rule`.

    Attributes:
        share: the lower temperature divided by the temperature of the loss, a factor of the gradient.
        again: computes the loss from rows and columns, in operations that autograd can differentiate repeatedly.
    """

    share: float
    again: Callable[[Tensor, Tensor], Tensor]


def suits(batch: Batch, largest: float) -> bool:
    """Return whether this form evaluates the mean or the sum of the values of a batch on a CPU.

    ``largest`` is an upper bound on the magnitude of the logits without the bias.
    """
    rule, kind, references = batch.rule, batch.targets.kind, batch.references
    if references.embeddings is None or references.mutual or references.own is not None:
        return False
    if rule.terms == "sigmoid":
        largest = max(largest, abs(_bias(batch)))
        return kind in ("partners", "none") and 2 * largest <= UNSHIFTED[dtypes_of(batch.embeddings)[0]]
    return kind == "partners" and rule.denominator == "all"


def _bias(batch: Batch) -> float:
    bias = batch.rule.bias
    return float(bias.detach()) if isinstance(bias, Tensor) else bias


def evaluate(
    batch: Batch, *, backward: bool, moderate: bool, hardened: Hardened | None = None
) -> tuple[AnchorValues, Saved]:
    """Return the values and, if ``backward``, the products of the weights with the rows and the columns.

    The numbers of positives and negatives are left empty. ``moderate``: whether exponentials need no shift.
    """
    rule, targets, references = batch.rule, batch.targets, batch.references
    scaled, columns = scale_both(batch)
    rows, across = scaled.rows, columns.rows
    height = panel_rows(batch, "auto")
    products, values = Products(rows, across, Plan("unshifted", height)), rows.new_empty(len(rows))
    pull = torch.empty_like(rows) if backward else NONE
    learns_columns = backward and cast(Tensor, references.embeddings).requires_grad
    pull_columns = torch.empty_like(across) if learns_columns else None
    pairs = _Pairs(rows, across, batch, height) if rule.terms == "sigmoid" else None
    partners = targets.given.unsqueeze(1) if targets.kind == "partners" else NONE
    for here in products.slices():
        panel, own = products(here), rows[here]
        if pairs is not None:
            pairs.sum(panel, here, values[here])
            if not backward:
                continue
            pairs.weigh(panel, here)
            torch.mm(panel, across, out=pull[here])
        else:
            share = 1.0 if hardened is None else hardened.share
            values[here], factor = _contrast(panel, partners[here], share, moderate=moderate)
            if not backward:
                continue
            torch.mm(panel, across, out=pull[here]).mul_(factor)
            own = own * factor
        if pull_columns is not None:
            torch.addmm(pull_columns, panel.T, own, beta=1 if here.start else 0, out=pull_columns)
    by_bias = NONE
    if pairs is not None:
        values, by_bias = pairs.finish(values), pairs.by_bias
    stats = pull, NONE if pull_columns is None else pull_columns, by_bias
    return AnchorValues(values, NONE, NONE), Saved(scaled, stats, None, columns)


def _contrast(panel: Tensor, partner: Tensor, share: float, *, moderate: bool) -> tuple[Tensor, Tensor]:
    """Return the values ``[b]`` of a panel's rows, and the factor ``[b, 1]`` of its weights.

    The weights without this factor replace the logits ``panel``. ``share`` multiplies the logits of positives.
    """
    if not moderate:
        pos = panel.gather(1, partner).mul_(share)
        values, missed, neg = shifted(panel.scatter_(1, partner, -math.inf), pos)
        panel.scatter_(1, partner, -neg)
        return values.squeeze(1), missed / neg
    pos = panel.exp_().gather(1, partner)
    if share != 1:
        pos.pow_(share)
    neg = panel.scatter_(1, partner, 0.0).sum(1, keepdim=True)
    panel.scatter_(1, partner, -neg)
    return (neg / pos).log1p_().squeeze(1), neg.add_(pos).reciprocal_()


def shifted(logits: Tensor, pos: Tensor, dim: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return the values log(1 + odds) of rows, odds / (1 + odds), and the sums of the new entries, ``[b, 1]`` each.

    The odds are the sum over negatives of e^s, divided by e^pos. ``logits`` ``[b, M]`` are -inf for all other pairs.
    They are replaced by e^(s - the row's largest logit). If ``dim`` is 0, anchors are columns, and ``pos`` and the
    results are ``[1, M]``. The sum of a row without negatives is 1.
    """
    top = logits.amax(dim, keepdim=True).clamp_(min=torch.finfo(logits.dtype).min)  # finite in a row without negatives
    neg = logits.sub_(top).mul_(1 / LN2).exp2_().sum(dim, keepdim=True).clamp_(min=1)  # base 2: see `rowwise._exp`
    odds = top.sub_(pos).add_(neg.log())
    missed = odds.sigmoid()
    return -F.logsigmoid(odds.neg_()), missed, neg


class _Pairs:
    """The cross-entropies of the pairs of a batch, one panel at a time.

    Attributes:
        by_bias: the sum of the weights, divided by e^bias.
    """

    def __init__(self, rows: Tensor, across: Tensor, batch: Batch, height: int) -> None:
        self.bias = _bias(batch)
        self.shift, self.one = math.exp(self.bias), rows.new_ones(())
        self.scratch = borrow("weights", rows, min(height, len(rows)) * len(across))
        self.learned, self.by_bias = isinstance(batch.rule.bias, Tensor), NONE
        self.partners: Tensor | None = None
        if batch.targets.kind == "partners":
            self.partners = batch.targets.given.unsqueeze(1)
            self.positive = rows.new_empty((len(rows), 1))

    def sum(self, panel: Tensor, here: slice, out: Tensor) -> None:
        """Sum log(1 + c E) over each row of a panel ``[b, M]``; its logits are replaced by E, or by 0 at positives.

        One logarithm serves several pairs: (1 + c E)(1 + c F) = 1 + c G with G = E + F + c E F.
        """
        if self.partners is not None:
            torch.gather(panel, 1, self.partners[here], out=self.positive[here])
        panel.exp_()
        if self.partners is not None:
            panel.scatter_(1, self.partners[here], 0.0)
        halvings = self._halvings(panel)
        whole, shift = panel.shape[1], self.shift
        width, part = whole - whole % 2**halvings, panel
        for turn in range(halvings):
            half = width // 2 ** (turn + 1)
            first, second = part[:, :half], part[:, half : 2 * half]
            target = second if turn else self.scratch.as_strided((len(panel), half), (half, 1))
            part = torch.addcmul(second, first, second, value=shift, out=target).add_(first)
        torch.sum(torch.mul(part, shift, out=part if halvings else None).log1p_(), 1, out=out)
        if width < whole:
            out += (panel[:, width:] * shift).log1p_().sum(1)

    def _halvings(self, exponentials: Tensor) -> int:
        """Return how often exponentials can be combined before their products exceed the range of the dtype."""
        largest = math.log1p(self.shift * float(exponentials.amax()))
        room, halvings = UNSHIFTED[exponentials.dtype] + min(self.bias, 0.0), 0
        while halvings < MOST_HALVED and 2 ** (halvings + 1) * largest < room:
            halvings += 1
        return halvings

    def weigh(self, panel: Tensor, here: slice) -> None:
        """Replace the exponentials of a panel ``[b, M]`` by the weights, divided by e^bias."""
        whole = self.scratch.as_strided(panel.shape, panel.stride())
        panel.div_(torch.add(self.one, panel, alpha=self.shift, out=whole))  # E / (1 + c E)
        if self.partners is not None:
            missed = self.positive[here].add(self.bias).neg_().sigmoid_()
            panel.scatter_(1, self.partners[here], missed.mul_(-1 / self.shift))
        if self.learned:
            total = panel.sum().double()
            self.by_bias = total if self.by_bias is NONE else self.by_bias.add_(total)

    def finish(self, values: Tensor) -> Tensor:
        """Return the sums over negatives plus the terms of the positives, ``[N]``."""
        give_back("weights", self.scratch)
        return values if self.partners is None else values.sub_(F.logsigmoid(self.positive.add_(self.bias)).squeeze(1))


def differentiate(size: float, batch: Batch, saved: Saved) -> Gradients:
    """Return the gradients of embeddings, references, temperature and bias; what is saved is overwritten.

    ``size`` is the gradient of each value.
    """
    rule, dtype, (pull, pull_columns, total) = batch.rule, batch.embeddings.dtype, saved.stats
    size = size * math.exp(_bias(batch)) if rule.terms == "sigmoid" else size
    learned = by_temperature(pull, saved.scaled.rows, size, rule)
    # Rows and columns contribute equally to the gradient of the temperature.
    learned = None if learned is None else learned + learned
    by_bias = (total * size).to(rule.bias.dtype) if isinstance(rule.bias, Tensor) else None
    more = to_embeddings(pull_columns, saved.classes, rule, size, dtype) if pull_columns is not NONE else None
    return to_embeddings(pull, saved.scaled, rule, size, dtype), more, learned, by_bias
