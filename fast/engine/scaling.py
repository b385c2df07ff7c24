"""Embeddings as rows whose products are the logits, and the way back to the embeddings' gradient."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .device import computing_dtype, wide_dtype
from .spec import Rule, Similarity

_EXPONENTS = {torch.float64: 1000, torch.float32: 120}
"""2^e with ``|e|`` up to here is finite and normal."""

_ROWS = 2048
"""Rows whose products with others are formed at a time."""

MODERATE = 2.0**60
"""Norms from its reciprocal up to here leave the range of float32 in no product with a temperature."""


class Scaled(NamedTuple):
    """Rows y with ``y_i . y_j = s_ij``: embeddings over the square root of the temperature, and over their norm.

    Attributes:
        rows: ``[N, D]`` in the computing dtype.
        factor: ``[N, 1]``, or ``[1, 1]`` under "dot"; a row is its embedding times ``power`` times this.
        power: ``[N, 1]``, powers of two that keep norms within range, or None where all are 1: multiplied apart from
            ``factor``, because the product of both may leave the range where the result does not.
    """

    rows: Tensor
    factor: Tensor
    power: Tensor | None


def measure(embeddings: Tensor) -> Tensor:
    """Return norms ``[N, 1]`` in float64. Squares of float32 neither overflow nor underflow there."""
    norms: Tensor = torch.linalg.vector_norm(embeddings.detach(), dim=1, keepdim=True, dtype=torch.float64)
    return norms


def scale_rows(
    embeddings: Tensor, similarity: Similarity, temperature: float | Tensor, norms: Tensor | None = None
) -> Scaled:
    """Scale embeddings ``[N, D]`` once, so that a product of rows is a logit.

    The norm is accumulated in float64 where the device has it and rounded once, together with the temperature: its
    error is common to a whole row of logits.

    Args:
        embeddings: floating ``[N, D]``.
        similarity: "cosine" or "dot".
        temperature: what similarities are divided by.
        norms: as `measure` returns them, known to be of moderate size; or None.
    """
    dtype = computing_dtype(embeddings)
    wide = wide_dtype(embeddings)
    root = temperature.to(wide).sqrt() if isinstance(temperature, Tensor) else temperature**0.5
    rows = embeddings.to(dtype)
    if similarity == "dot":
        factor = (torch.ones((1, 1), dtype=wide, device=rows.device) / root).to(dtype)
        return Scaled(rows * factor, factor, None)
    if norms is not None:
        factor = (norms * root).reciprocal_().to(dtype)
        return Scaled(rows * factor, factor, None)
    if wide != dtype:
        norm = measure(rows)
        power = _power_of_two(norm, dtype)
        return _by_parts(rows * power, norm * power, power, root)
    power = _power_of_two(rows.abs().amax(1, keepdim=True), dtype)
    rows = rows * power
    return _by_parts(rows, torch.linalg.vector_norm(rows, dim=1, keepdim=True), power, root)


def _power_of_two(size: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the powers of two that bring sizes ``[N, 1]`` to about 1."""
    limit = _EXPONENTS[dtype]
    return torch.exp2(torch.frexp(size).exponent.clamp(-limit, limit).neg_().to(dtype))


def _by_parts(rows: Tensor, norm: Tensor, power: Tensor, root: float | Tensor) -> Scaled:
    factor = (norm * root).reciprocal_().to(rows.dtype)
    return Scaled(rows.mul_(factor), factor, power)


def to_embeddings(
    pull: Tensor,
    scaled: Scaled,
    similarity: Similarity,
    temperature: float | Tensor,
    size: float | Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Turn the gradient by the scaled rows, ``[N, D]``, into that by the embeddings; ``pull`` is overwritten.

    Under cosine the component along the row vanishes.

    Args:
        pull: the gradient by the scaled rows.
        scaled: what `scale_rows` returned.
        similarity: "cosine" or "dot".
        temperature: what the rows were scaled by.
        size: what the result is multiplied by.
        dtype: of the result.
    """
    if similarity == "cosine":
        # Some rows at a time: a product of all would be one more matrix as large as the embeddings.
        for part, rows in zip(torch.split(pull, _ROWS), torch.split(scaled.rows, _ROWS), strict=True):
            along = torch.linalg.vecdot(part, rows)[:, None]
            part.addcmul_(along * temperature, rows, value=-1)
    pull.mul_(scaled.factor * size)
    if scaled.power is not None:
        pull.mul_(scaled.power)
    return pull.to(dtype)


def differentiable_rows(embeddings: Tensor, rule: Rule) -> Tensor:
    """Return the scaled rows ``[N, D]`` in operations that autograd can differentiate, more than once."""
    rows = embeddings.to(computing_dtype(embeddings))
    if rule.similarity == "cosine":
        limit = _EXPONENTS[rows.dtype]
        exponent = torch.frexp(rows.detach().abs().amax(1, keepdim=True)).exponent.clamp(-limit, limit)
        rows = rows * torch.exp2(-exponent.to(rows.dtype))
        rows = rows / (rows * rows).sum(1, keepdim=True).sqrt()
    root = rule.temperature**0.5
    return rows / (root.to(rows.dtype) if isinstance(root, Tensor) else root)


def pair_logits(first: Tensor, second: Tensor, rule: Rule) -> Tensor:
    """Return the logits of rows of equal number, ``[N]``, differentiable by both ``[N, D]`` and the temperature."""
    return (differentiable_rows(first, rule) * differentiable_rows(second, rule)).sum(1)
