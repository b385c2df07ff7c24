"""The loss of a small batch, in one panel, with few operations and Python calls, because these take most of the time.

The module evaluates the mean or the sum over all anchors, in eager mode on a CPU. For partners, the operations are
written out here; otherwise `pairs` evaluates the panel, or `unshifted` if it supports the logits. Large batches of two
towers are passed on to `direct`, if it supports them.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import direct, formulas, pairs, rowwise, unshifted
from .device import borrow, dtypes_of, give_back
from .plan import DENSE_UP_TO, LARGEST_OF_FLOAT32, LOWEST_OF_FLOAT32, SMALL_TOWERS
from .scaling import Saved, of_ordinary_size, pulled, scale_both, shift_of
from .spec import LN2, UNSHIFTED, AnchorValues, Batch, Gradients, Plan, Policy, References, Sizes

PLAIN = Policy("mean", None)
"""The mean of all values."""


def suits(batch: Batch, policy: Policy, factor: float = 1, *, large: bool = False) -> bool:
    """Return whether this module evaluates a batch, whose logits are multiplied by ``factor``, at least 1.

    If ``large``, also return True for the large batches that `evaluate` passes on to `direct`, and for logits that are
    not moderate but need at most one shift.
    """
    rows, rule, sizes = batch.embeddings, batch.rule, batch.sizes
    others, across = batch.references.embeddings, batch.references.sizes
    if sizes is None or (others is not None and (across is None or others.dtype != rows.dtype)) or not rows.is_cpu:
        return False
    if torch._C._are_functorch_transforms_active():  # a temperature may have no value
        return False
    count = rows.shape[0] if others is None else max(rows.shape[0], others.shape[0])
    temperature, largest, moderate, shift = _range(batch, factor)
    moderate = moderate or (large and shift is not None)
    written_out = _written_out(batch)
    return (
        (
            count <= (SMALL_TOWERS if others is not None and written_out else DENSE_UP_TO)
            or (large and direct.suits(batch, largest))
        )
        and LOWEST_OF_FLOAT32 <= temperature <= 1 / LOWEST_OF_FLOAT32
        and rule.terms != "lse"
        and not (rule.similarity == "dot" and rows.dtype == torch.float64)  # the sizes of float64 rows are not norms
        and 2 * largest <= LARGEST_OF_FLOAT32
        and (written_out or rule.terms == "sigmoid" or moderate)
        and formulas.is_plain(batch, policy)
        and not torch.is_autocast_enabled("cpu")
        and forward_ad._current_level < 0
    )


def _range(batch: Batch, factor: float = 1) -> tuple[float, float, bool, int | None]:
    """Return the temperature, a bound on the logits without the bias, whether they are moderate, and their shift.

    The logits are multiplied by ``factor``, and the temperature is divided by it.
    """
    rule, sizes, across = batch.rule, cast(Sizes, batch.sizes), batch.references.sizes
    rows, others = batch.embeddings, batch.references.embeddings
    count = len(rows) if others is None else max(len(rows), len(others))
    temperature = rule.temperature
    if isinstance(temperature, Tensor):
        temperature = temperature.detach().item()
    temperature /= factor
    largest = (sizes.high * (across or sizes).high if rule.similarity == "dot" else 1) / temperature
    moderate = 2 * largest <= UNSHIFTED[dtypes_of(rows)[0]] - math.log(count)
    return temperature, largest, moderate, 0 if moderate else shift_of(rule, largest, count, rows)


def _written_out(batch: Batch) -> bool:
    rule, plain = batch.rule, batch.targets.kind == "partners" and batch.references.own is None
    return plain and rule.terms != "sigmoid" and rule.denominator != "only_negatives"


def is_direct(batch: Batch) -> bool:
    """Return whether `direct` evaluates a batch of two towers for which `suits` returned True."""
    rows, others = batch.embeddings, cast(Tensor, batch.references.embeddings)
    return not batch.references.mutual and max(len(rows), len(others)) > DENSE_UP_TO


def evaluate(batch: Batch, *, backward: bool, hardened: direct.Hardened | None = None) -> tuple[AnchorValues, Saved]:
    """Return the values of the rows, then those of references that are anchors too, and what `differentiate` needs.

    The numbers of positives and negatives are left empty. Only `direct` uses ``hardened``.
    """
    targets, references = batch.targets, batch.references
    if references.embeddings is not None and is_direct(batch):
        return direct.evaluate(batch, backward=backward, moderate=_range(batch)[2], hardened=hardened)
    if not _written_out(batch):
        plan = Plan("unshifted", len(batch.embeddings), keep=backward, reads=True, sized=False)
        if batch.rule.terms == "sigmoid":
            return pairs.evaluate(batch, plan)
        *_, moderate, shift = _range(batch)
        plan.extreme, plan.shift = not moderate, shift or 0
        try:
            return unshifted.evaluate(batch, plan)
        except formulas.Underflow:
            return rowwise.evaluate(batch, plan)
    moderate = _range(batch)[2]
    scaled, columns = scale_both(batch, LN2 if moderate else 1)
    shape = len(scaled.rows), len(columns.rows)
    buffer = borrow("kept", scaled.rows, shape[0] * shape[1])
    logits = torch.mm(scaled.rows, columns.rows.T, out=buffer.as_strided(shape, (shape[1], 1)))
    column, nothing = targets.given.unsqueeze(1), -math.inf
    if moderate:
        logits, nothing = logits.exp2_(), 0.0
    pos = logits.gather(1, column)
    logits.scatter_(1, column, nothing)
    if references.embeddings is None:
        logits.fill_diagonal_(nothing)
    stats: tuple[Tensor, ...] = (buffer,)
    if moderate:
        across = neg = logits.sum(1, keepdim=True)
        values = (neg / pos).log1p_()
        if references.mutual:
            across = logits.sum(0).unsqueeze(1)
            values = torch.cat((values, (across / pos).log1p_()))
        stats += neg, pos, across, column
    else:
        values = _shifted(logits, pos, column, references, backward=backward)
    if not backward:
        give_back("kept", buffer)
    return AnchorValues(values, unshifted.NONE, unshifted.NONE), Saved(scaled, stats, logits, columns)


def _shifted(logits: Tensor, pos: Tensor, column: Tensor, references: References, *, backward: bool) -> Tensor:
    """Return the values ``[N, 1]`` or ``[2N, 1]``; if ``backward``, replace the logits by the weights.

    The weights are the derivatives of the sum of all values. In ``logits``, positives and self pairs are -inf. The
    logits of positives are ``pos``.
    """
    across = logits.clone() if references.mutual else None
    values, missed, neg = direct.shifted(logits, pos)
    weight = logits.mul_(missed / neg) if backward else logits
    if across is not None:
        more, more_missed, neg = direct.shifted(across, pos.T, 0)
        values, missed = torch.cat((values, more.T)), missed + more_missed.T
        weight = weight.addcmul_(across, more_missed / neg) if backward else weight
    elif backward and references.embeddings is None:
        weight.copy_(weight + weight.T)
        missed = missed + missed.gather(0, column)
    if backward:
        weight.scatter_(1, column, -missed)
    return values


def differentiate(grad: Tensor, size: float, batch: Batch, saved: Saved) -> Gradients:
    """Return the gradients of embeddings, references, temperature and bias; overwrite the saved matrices.

    ``grad`` are ones, as many as there are values. ``size`` is the gradient of each value.
    """
    if batch.references.embeddings is not None and is_direct(batch):
        return direct.differentiate(size, batch, saved)
    weight = saved.kept
    if not isinstance(weight, Tensor):
        grad = grad if saved.valid is None else torch.where(saved.valid, grad, 0.0)
        differentiated = unshifted.differentiate if saved.stats else rowwise.differentiate  # it saves no sums
        if batch.rule.terms == "sigmoid":
            differentiated = pairs.differentiate
        plan = Plan("unshifted", len(batch.embeddings), keep=True, reads=True, sized=False)
        return differentiated(grad, size, batch, plan, saved)
    buffer, *stats = saved.stats
    if stats:
        _weigh(weight, batch, *stats)
    gradients = pulled([(slice(0, weight.shape[0]), weight)], saved, batch, size, LN2 if stats else 1)
    give_back("kept", buffer)
    return gradients


def _weigh(weight: Tensor, batch: Batch, neg: Tensor, pos: Tensor, across: Tensor, column: Tensor) -> None:
    """Replace unshifted exponentials by the derivatives of the sum of all values with respect to the logits."""
    share = (neg + pos).reciprocal_()
    level, other = share * neg, None
    if batch.references.embeddings is None:
        other, level = share, level + level.gather(0, column)
    elif batch.references.mutual:
        other = (across + pos).reciprocal_()
        level = level + other * across
    if other is None:
        weight.mul_(share)
    else:
        scratch = borrow("weights", weight, weight.numel())
        weight.mul_(torch.add(share, other.T, out=scratch.as_strided(weight.shape, weight.stride())))
        give_back("weights", scratch)
    weight.scatter_(1, column, level.neg_())


def of_each(grad: Tensor, policy: Policy | None, count: int) -> tuple[float | Tensor, Tensor]:
    """Return a factor, and the gradient of each of ``count`` values divided by it.

    ``grad`` is the gradient of the loss, whose ``policy`` is the mean or the sum. Without a policy, it is that of the
    values.
    """
    if policy is None:
        return of_ordinary_size(grad, reads=True)
    return grad.item() / (count if policy.reduction == "mean" else 1), grad.new_ones(count)
