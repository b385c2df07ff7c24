"""Scale embeddings to rows whose dot products are the logits, and map gradients back to the embeddings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.linalg import vector_norm

from . import jit
from .device import dtypes_of, traced, without_autocast
from .spec import LN2, SHIFTED, UNSHIFTED, Batch, Gradients, Rule, Sizes
from .transforms import Reverse

CONVERTED = 2**16
"""Number of entries that are converted to float64 at once, on a CPU."""
_EXPONENTS = {torch.float64: 1000, torch.float32: 120}
"""Largest ``|e|`` for which 2^e is used to scale: these powers are finite and normal."""

_ROWS = 2048
"""Number of rows for which gradients are mapped back at a time."""

MODERATE = 2.0**60
"""Norms from 1 / MODERATE to MODERATE stay in the range of float32 when multiplied by a temperature."""


class Scaled(NamedTuple):
    """Rows y with ``y_i . y_j = s_ij / unit``: embeddings divided by sqrt(temperature * unit).

    Under "cosine", they are also divided by their norm.

    Attributes:
        rows: ``[N, D]`` in the computing dtype: embedding times ``power`` times ``factor``.
        factor: ``[N, 1]``, or ``[1, 1]`` under "dot".
        power: ``[N, 1]``, powers of two that keep norms within range; None: all are 1. ``power * factor`` may overflow
            or underflow although the scaled row does not.
    """

    rows: Tensor
    factor: Tensor
    power: Tensor | None


class Saved(NamedTuple):
    """What the forward pass saves for the backward pass, in addition to the batch.

    Attributes:
        scaled: the scaled rows; sorted in the symmetric and the anchored form.
        stats: sums per row, ``[N]`` each, and other results that the form needs.
        kept: the exponentials (in `pairs`, the logits): flat, ``[N, M]`` or a list; None or empty if not kept.
        classes: the sorted order of the rows, the scaled columns, or what the kernels prepared; None: computed again.
        frozen: whether the references need no gradient.
        valid: bool ``[N]``, the rows that count (`formulas.counted`); None: all.
        pull: ``[N, D]``, only in the frozen form: the sums of the columns, weighted by their exponentials.
    """

    scaled: Scaled
    stats: Sequence[Tensor]
    kept: Any = None
    classes: Any = None
    frozen: bool = False
    valid: Tensor | None = None
    pull: Tensor | None = None


def measure(embeddings: Tensor) -> Sizes:
    """Return the sizes of embeddings ``[N, D]``; their values are read."""
    rows = embeddings.detach()
    computing, wide = dtypes_of(rows)
    # Squares of float32 numbers neither overflow nor underflow in float64.
    narrow = wide != computing
    may_compile = jit.State.failure is None and rows.dtype == torch.float32
    if may_compile and jit.readable(rows) and jit.function("measure"):
        norms = np.empty((len(rows), 1))
        return Sizes(torch.from_numpy(norms), *jit.function("measure")(jit.array(rows), norms))
    if not narrow:
        each = rows.abs().amax(1, keepdim=True)
    elif rows.numel() <= CONVERTED or not rows.is_cpu:
        each = vector_norm(rows, dim=1, keepdim=True, dtype=wide)
    else:
        # Some rows at a time, because torch converts all rows, which takes twice their memory.
        parts = torch.split(rows, max(1, CONVERTED // rows.shape[1]))
        each = torch.cat([vector_norm(part, dim=1, keepdim=True, dtype=wide) for part in parts])
    low, high = torch.aminmax(each)
    return Sizes(each, low.item(), high.item())


def largest_norm(embeddings: Tensor, sizes: Sizes | None) -> float:
    """Return the largest norm of the rows of embeddings ``[N, D]``; their values are read.

    The result may have a few rounding errors. It is infinity if a square overflows.
    """
    if sizes is not None and embeddings.dtype != torch.float64:
        return sizes.high
    return float(vector_norm(embeddings.detach(), dim=1, dtype=dtypes_of(embeddings)[0]).amax())


def scale_rows(embeddings: Tensor, rule: Rule, sizes: Sizes | None = None, unit: float = 1) -> Scaled:
    """Scale embeddings ``[N, D]`` so that the dot product of two rows is a logit.

    A rounding error of a norm affects a whole row of logits. So norms are accumulated in float64, where the device
    supports it, and rounded once, together with the temperature.

    Args:
        embeddings: floating ``[N, D]``.
        rule: the formula.
        sizes: the result of `measure`, if known.
        unit: the unit of the logits, 1 or log 2.
    """
    dtype, wide = dtypes_of(embeddings)
    temperature = rule.temperature.to(wide) if isinstance(rule.temperature, Tensor) else rule.temperature
    root = (temperature * unit) ** 0.5
    rows = embeddings.to(dtype)
    power = None
    if rule.similarity == "dot":
        factor = (torch.ones((1, 1), dtype=wide, device=rows.device) / root).to(dtype)
        return Scaled(rows * factor, factor, None)
    if wide == dtype:
        power = _power_of_two(rows.abs().amax(1, keepdim=True) if sizes is None else sizes.each, dtype)
        rows = rows * power
        norm = vector_norm(rows, dim=1, keepdim=True)
    else:
        differentiated = rows.requires_grad and torch.is_grad_enabled()
        norm = sizes.each if sizes and not differentiated else vector_norm(rows, dim=1, keepdim=True, dtype=wide)
        if sizes is None or not (sizes.low > 1 / MODERATE and sizes.high < MODERATE):
            power = _power_of_two(norm, dtype)
            rows, norm = rows * power, norm * power
    factor = (norm * root).reciprocal_().to(dtype)
    if rule.zero_row == "zero":
        factor = torch.where(norm == 0, 0.0, factor)
    return Scaled(rows * factor, factor, power)


def _power_of_two(size: Tensor, dtype: torch.dtype) -> Tensor:
    """Return powers of two that scale sizes ``[N, 1]`` to about 1."""
    limit = _EXPONENTS[dtype]
    return torch.exp2(torch.frexp(size).exponent.clamp(-limit, limit).neg_().to(dtype))


def to_embeddings(
    pull: Tensor, scaled: Scaled, rule: Rule, size: float | Tensor, dtype: torch.dtype, unit: float = 1
) -> Tensor:
    """Turn the gradient of the scaled rows, ``[N, D]``, into that of the embeddings.

    Under "cosine" the result has no component along the row.

    Args:
        pull: the gradient of the scaled rows; overwritten.
        scaled: the result of `scale_rows`.
        rule: the formula.
        size: factor of the result.
        dtype: the dtype of the result.
        unit: the unit of the logits.
    """
    if rule.similarity == "cosine":
        # Some rows at a time, because the product of all rows would need a matrix of the embeddings' size.
        few = pull.shape[0] <= _ROWS
        parts, of_rows = ([pull], [scaled.rows]) if few else [torch.split(t, _ROWS) for t in (pull, scaled.rows)]
        for part, rows in zip(parts, of_rows, strict=True):
            along = torch.linalg.vecdot(part, rows).unsqueeze(1)
            if isinstance(rule.temperature, Tensor):
                part.addcmul_(along.mul_(rule.temperature_as(part.dtype) * -unit), rows)
            else:
                part.addcmul_(along, rows, value=-unit * rule.temperature)
    pull.mul_(scaled.factor * (size * unit))
    if scaled.power is not None:
        pull.mul_(scaled.power)
    return pull if pull.dtype == dtype else pull.to(dtype)


def by_temperature(pull: Tensor, rows: Tensor, size: float | Tensor, rule: Rule, unit: float = 1) -> Tensor | None:
    """Return the gradient of the temperature, or None if the temperature is a plain number.

    It follows from ``pull``, the gradient of the rows: a logit is homogeneous of degree -1 in the temperature and of
    degree 2 in the rows.
    """
    temperature = rule.temperature
    if not isinstance(temperature, Tensor):
        return None
    total = torch.linalg.vecdot(pull, rows).sum(dtype=dtypes_of(pull)[1])
    found: Tensor = total * (size * unit) / (-2 * temperature.to(total.dtype))
    return found.to(temperature.dtype)


def scale_both(batch: Batch, unit: float = 1, scaled: Scaled | None = None) -> tuple[Scaled, Scaled]:
    """Return the scaled rows and the scaled columns: the same object if there are no references."""
    scaled = scaled or scale_rows(batch.embeddings, batch.rule, batch.sizes, unit)
    others, sizes = batch.references.embeddings, batch.references.sizes
    return scaled, scaled if others is None else scale_rows(others, batch.rule, sizes, unit)


def both_ways(weight: Tensor, batch: Batch) -> Tensor:
    """Return the weights; for a panel of all rows without references, add their transpose."""
    whole = batch.references.embeddings is None and weight.shape[0] == weight.shape[1]
    return weight + weight.T if whole else weight


def pulled(
    weighed: Iterable[tuple[slice, Tensor]], saved: Saved, batch: Batch, size: float | Tensor, unit: float = 1
) -> Gradients:
    """Multiply panels of weights with the rows and columns, and return the gradients of the inputs.

    Args:
        weighed: the rows of each panel, and its weights ``[b, M]``. For a panel of all rows without references, the
            transpose is already added (`both_ways`).
        saved: the scaled rows, the scaled columns in ``classes``, and ``frozen``.
        batch: the batch.
        size: factor of the result.
        unit: the unit of the logits.
    """
    rule, scaled, columns = batch.rule, saved.scaled, saved.classes
    rows, across, itself = scaled.rows, columns.rows, batch.references.embeddings is None
    pull = pull_columns = by_bias = None
    learns_bias = isinstance(rule.bias, Tensor)
    for here, weight in weighed:
        if learns_bias:
            total = weight.sum().to(dtypes_of(weight)[1])
            by_bias = total if by_bias is None else by_bias + total
        if weight.shape[0] == rows.shape[0]:
            pull = weight @ across
            pull_columns = None if itself or saved.frozen else weight.T @ rows
            continue
        pull = torch.zeros_like(rows) if pull is None else pull
        pull[here].addmm_(weight, across)
        if itself:
            pull.addmm_(weight.T, rows[here])
        elif not saved.frozen:
            pull_columns = torch.zeros_like(across) if pull_columns is None else pull_columns
            pull_columns.addmm_(weight.T, rows[here])
    assert pull is not None
    learned = by_temperature(pull, rows, size, rule, unit)
    if learned is not None and not itself:
        # Rows and columns contribute equally to the gradient of the temperature.
        learned = learned + learned
    dtype = batch.embeddings.dtype
    more = None if pull_columns is None else to_embeddings(pull_columns, columns, rule, size, dtype, unit)
    if by_bias is not None:
        by_bias = (by_bias * size).to(cast(Tensor, rule.bias).dtype)
    return to_embeddings(pull, scaled, rule, size, dtype, unit), more, learned, by_bias


def of_ordinary_size(grad: Tensor, *, reads: bool) -> tuple[float | Tensor, Tensor]:
    """Return a power of two, and ``grad`` ``[N]`` divided by it, so that the largest entry is about 1.

    The gradient of the embeddings is linear in ``grad``, so the factor can be multiplied back at the end. If ``reads``
    and the largest magnitude is already between 2^-20 and 2^20, the factor is 1.
    """
    largest = grad.abs().amax()
    if reads and _SMALL_GRAD < float(largest) < 1 / _SMALL_GRAD:
        return 1.0, grad
    limit = _EXPONENTS[grad.dtype]
    exponent = torch.frexp(largest).exponent.clamp(-limit, limit).to(grad.dtype)
    return torch.exp2(exponent), grad * torch.exp2(-exponent)


_SMALL_GRAD = 2.0**-20


def differentiable_rows(embeddings: Tensor, rule: Rule) -> Tensor:
    """Return the scaled rows ``[N, D]``, in operations that autograd can differentiate repeatedly."""
    rows = embeddings.to(dtypes_of(embeddings)[0])
    if rule.similarity == "cosine":
        largest = rows.detach().abs().amax(1, keepdim=True)
        rows = rows * _power_of_two(largest, rows.dtype)
        if rule.zero_row == "zero":
            kept = largest != 0
            some = torch.where(kept, rows, 1.0)
            rows = torch.where(kept, some / (some * some).sum(1, keepdim=True).sqrt(), 0.0)
        else:
            rows = rows / (rows * rows).sum(1, keepdim=True).sqrt()
    return rows / rule.temperature_as(rows.dtype) ** 0.5


def pair_logits(
    first: Tensor, second: Tensor, rule: Rule, sizes: tuple[Sizes | None, Sizes | None] = (None, None)
) -> Tensor:
    """Return the logits ``[N]`` of row i of ``first`` with row i of ``second``, both ``[N, D]``.

    They are differentiable with respect to both and to the temperature.
    """
    plain = not traced(first) and not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0
    if plain and torch.is_grad_enabled():
        temperature = rule.temperature if isinstance(rule.temperature, Tensor) else None
        found: Tensor = _PairLogits.apply(rule, sizes, first, second, temperature)  # type: ignore[no-untyped-call]
        return found
    return _products(*(scale_rows(t, rule, size).rows for t, size in zip((first, second), sizes, strict=True)))


def _products(rows: Tensor, others: Tensor) -> Tensor:
    # `torch.linalg.vecdot` is subject to autocast, this product is not.
    return (rows * others).sum(-1)


class _PairLogits(Reverse):
    """`pair_logits` in eager execution; its backward pass takes a fraction of autograd's time."""

    @staticmethod
    def forward(ctx: Any, rule: Rule, sizes: tuple[Sizes | None, Sizes | None], *inputs: Tensor | None) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.rule = rule
        pairs = zip(cast(tuple[Tensor, ...], inputs[:2]), sizes, strict=True)
        ctx.scaled = [scale_rows(rows, rule, size) for rows, size in pairs]
        return _products(*(scaled.rows for scaled in ctx.scaled))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        first, second, temperature = ctx.saved_tensors
        rule, needed = ctx.rule, ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():  # for second derivatives
            inputs = [None if t is None else t.view_as(t) for t in (first, second, temperature)]
            rule = rule if temperature is None else replace(rule, temperature=inputs[2])
            logits = _products(*(scale_rows(cast(Tensor, rows), rule).rows for rows in inputs[:2]))
            wanted = cast(list[Tensor], [t for t, needs in zip(inputs, needed, strict=True) if needs])
            found = iter(torch.autograd.grad(logits, wanted, grads[0], create_graph=True))
            return None, None, *(next(found) if needs else None for needs in needed)
        with without_autocast(first):
            grad, scaled = grads[0].unsqueeze(1), ctx.scaled
            pulls = [
                scaled[1].rows * grad if needed[0] or needed[2] else None,
                scaled[0].rows * grad if needed[1] else None,
            ]
            learned = by_temperature(cast(Tensor, pulls[0]), scaled[0].rows, 2.0, rule) if needed[2] else None
            gradients = (
                to_embeddings(cast(Tensor, pull), each, rule, 1.0, rows.dtype) if needs else None
                for pull, each, rows, needs in zip(pulls, scaled, (first, second), needed, strict=False)
            )
            return None, None, *gradients, learned


def shift_of(rule: Rule, largest: float, count: int, rows: Tensor) -> int | None:
    """Return the shift for unshifted exponentials; see `Plan.shift`.

    Args:
        rule: the formula.
        largest: an upper bound on the magnitude of the logits.
        count: the number of rows or of columns, whichever is larger.
        rows: ``[N, D]``, the rows.

    Returns:
        0 if no exponential overflows or underflows, a positive number if none overflows after the shift; None if the
        logits must be shifted by the maximum of each row.
    """
    bound = UNSHIFTED[dtypes_of(rows)[0]]
    room = bound - math.log(count)
    if rule.denominator == "one_positive" or rule.terms not in ("out", "lse"):
        # Values or weights of these formulas contain quotients of exponentials.
        return 0 if 2 * largest <= room else None
    if largest <= room:
        return 0
    return math.ceil((largest - room) / LN2) if largest <= SHIFTED * bound else None
