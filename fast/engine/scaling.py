"""Embeddings as rows whose products are the logits, and the way back to the embeddings' gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from .device import dtypes_of
from .spec import Rule, Sizes

_EXPONENTS = {torch.float64: 1000, torch.float32: 120}
"""2^e with ``|e|`` up to here is finite and normal."""

_ROWS = 2048
"""Rows whose products with others are formed at a time."""

MODERATE = 2.0**60
"""Norms from its reciprocal up to here leave the range of float32 in no product with a temperature."""


class Scaled(NamedTuple):
    """Rows y with ``y_i . y_j = s_ij / unit``: embeddings over the root of temperature times unit, and their norm.

    Attributes:
        rows: ``[N, D]`` in the computing dtype.
        factor: ``[N, 1]``, or ``[1, 1]`` under "dot"; a row is its embedding times ``power`` times this.
        power: ``[N, 1]``, powers of two that keep norms within range, or None where all are 1: multiplied apart from
            ``factor``, because the product of both may leave the range where the result does not.
    """

    rows: Tensor
    factor: Tensor
    power: Tensor | None


class Saved(NamedTuple):
    """What the backward pass needs of the forward pass, beside the batch.

    Attributes:
        scaled: the rows, in the symmetric form sorted.
        stats: sums per row, ``[N]`` each, as the form knows them.
        kept: exponentials, flat; None where they are not kept.
        classes: the order of the rows; None where there is none, and where it is to be found anew.
    """

    scaled: Scaled
    stats: Sequence[Tensor]
    kept: Tensor | None = None
    classes: Any = None


def measure(embeddings: Tensor) -> Sizes:
    """Return the sizes of embeddings ``[N, D]``; their values are read."""
    rows = embeddings.detach()
    computing, wide = dtypes_of(rows)
    # Squares of float32 neither overflow nor underflow in float64.
    narrow = wide != computing
    each = vector_norm(rows, dim=1, keepdim=True, dtype=wide) if narrow else rows.abs().amax(1, keepdim=True)
    low, high = torch.aminmax(each)
    return Sizes(each, float(low), float(high))


def largest_norm(embeddings: Tensor, sizes: Sizes | None) -> float:
    """Return the largest norm of rows; their values are read."""
    if sizes is not None and embeddings.dtype != torch.float64:
        return sizes.high
    return float(vector_norm(embeddings.detach(), dim=1, dtype=torch.float64).amax())


def scale_rows(embeddings: Tensor, rule: Rule, sizes: Sizes | None = None, unit: float = 1) -> Scaled:
    """Scale embeddings ``[N, D]`` once, so that a product of rows is a logit.

    The norm is accumulated in float64 where the device has it and rounded once, together with the temperature: its
    error is common to a whole row of logits.

    Args:
        embeddings: floating ``[N, D]``.
        rule: the formula, with similarity and temperature.
        sizes: what `measure` returned for them; None where that is not known.
        unit: of the logits, 1 or log 2.
    """
    dtype, wide = dtypes_of(embeddings)
    temperature = rule.temperature * unit
    root = temperature.to(wide).sqrt() if isinstance(temperature, Tensor) else temperature**0.5
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
        norm = vector_norm(rows, dim=1, keepdim=True, dtype=wide) if sizes is None else sizes.each
        if sizes is None or not (sizes.low > 1 / MODERATE and sizes.high < MODERATE):
            power = _power_of_two(norm, dtype)
            rows, norm = rows * power, norm * power
    factor = (norm * root).reciprocal_().to(dtype)
    return Scaled(rows * factor if power is None else rows.mul_(factor), factor, power)


def _power_of_two(size: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the powers of two that bring sizes ``[N, 1]`` to about 1."""
    limit = _EXPONENTS[dtype]
    return torch.exp2(torch.frexp(size).exponent.clamp(-limit, limit).neg_().to(dtype))


def to_embeddings(
    pull: Tensor, scaled: Scaled, rule: Rule, size: float | Tensor, dtype: torch.dtype, unit: float = 1
) -> Tensor:
    """Turn the gradient by the scaled rows, ``[N, D]``, into that by the embeddings; ``pull`` is overwritten.

    Under cosine the component along the row vanishes.

    Args:
        pull: the gradient by the scaled rows.
        scaled: what `scale_rows` returned.
        rule: the formula.
        size: what the result is multiplied by.
        dtype: of the result.
        unit: of the logits.
    """
    if rule.similarity == "cosine":
        # Some rows at a time: a product of all would be one more matrix as large as the embeddings.
        for part, rows in zip(torch.split(pull, _ROWS), torch.split(scaled.rows, _ROWS), strict=True):
            along = torch.linalg.vecdot(part, rows)[:, None]
            part.addcmul_(along * (rule.temperature * unit), rows, value=-1)
    pull.mul_(scaled.factor * (size * unit))
    if scaled.power is not None:
        pull.mul_(scaled.power)
    return pull.to(dtype)


def by_temperature(pull: Tensor, rows: Tensor, size: float | Tensor, rule: Rule, unit: float = 1) -> Tensor | None:
    """Return the gradient by the temperature: a logit is homogeneous in it of degree -1, in the rows of degree 2."""
    temperature = rule.temperature
    if not isinstance(temperature, Tensor):
        return None
    total = torch.linalg.vecdot(pull, rows).sum(dtype=dtypes_of(pull)[1])
    found: Tensor = total * (size * unit) / (-2 * temperature.to(total.dtype))
    return found.to(temperature.dtype)


def of_ordinary_size(grad: Tensor, *, reads: bool) -> tuple[float | Tensor, Tensor]:
    """Return a power of two and ``grad`` ``[N]`` over it, about one in size: the gradient is linear in it."""
    largest = grad.abs().amax()
    if reads and _SMALL_GRAD < float(largest) < 1 / _SMALL_GRAD:
        return 1.0, grad
    limit = _EXPONENTS[grad.dtype]
    exponent = torch.frexp(largest).exponent.clamp(-limit, limit).to(grad.dtype)
    return torch.exp2(exponent), grad * torch.exp2(-exponent)


_SMALL_GRAD = 2.0**-20


def differentiable_rows(embeddings: Tensor, rule: Rule) -> Tensor:
    """Return the scaled rows ``[N, D]`` in operations that autograd can differentiate, more than once."""
    rows = embeddings.to(dtypes_of(embeddings)[0])
    if rule.similarity == "cosine":
        rows = rows * _power_of_two(rows.detach().abs().amax(1, keepdim=True), rows.dtype)
        rows = rows / (rows * rows).sum(1, keepdim=True).sqrt()
    root = rule.temperature**0.5
    return rows / (root.to(rows.dtype) if isinstance(root, Tensor) else root)


def pair_logits(first: Tensor, second: Tensor, rule: Rule) -> Tensor:
    """Return the logits of rows of equal number, ``[N]``, differentiable by both ``[N, D]`` and the temperature."""
    return (differentiable_rows(first, rule) * differentiable_rows(second, rule)).sum(1)
