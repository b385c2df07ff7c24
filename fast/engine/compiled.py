"""The compiled form: small batches of float32 rows on a CPU, in functions of `rows_numba` around torch's products.

It evaluates the plain mean or sum over all anchors, in eager mode, for logits of any size. The gradient of the scaled
rows is computed in the forward pass.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from . import formulas, jit
from .device import without_autocast
from .plan import DENSE_UP_TO, LOWEST_OF_FLOAT32
from .scaling import MODERATE, by_temperature
from .spec import LN2, UNSHIFTED, Batch, Gradients, Policy, Sizes

_KINDS = {"labels": jit.LABELS, "mask": jit.MASK, "partners": jit.PARTNERS}
_NO_INTEGERS: Any = np.empty(0, np.int64)
_NO_MASK: Any = np.empty((0, 0), np.bool_)


class Rows(NamedTuple):
    """Rows ``[N, D]`` divided by their norms and by the root of the temperature times the unit of the logits.

    Attributes:
        tensor: the scaled rows.
        array: the same, as an array.
        factor: ``[N]``, what the rows were multiplied by, as an array.
    """

    tensor: Tensor
    array: Any
    factor: Any


class Saved(NamedTuple):
    """What the forward pass saves for the backward pass, in addition to the batch.

    Attributes:
        rows: the scaled rows.
        columns: the scaled columns: the same object if there are no references.
        of_rows: ``[N, D]``, the gradient of the scaled rows, from the sum of all values.
        of_columns: ``[M, D]``, that of the references; None if they need none.
        of_bias: the derivative of the sum of all values with respect to the bias.
        share: the derivative of the loss with respect to each value.
    """

    rows: Rows
    columns: Rows
    of_rows: Tensor
    of_columns: Tensor | None
    of_bias: float
    share: float


def suits(batch: Batch, policy: Policy) -> bool:
    """Return whether this form evaluates a batch; the functions it needs are then compiled."""
    rule, references, targets = batch.rule, batch.references, batch.targets
    if batch.sizes is None or not _usual(batch.embeddings, batch.sizes):
        return False
    if references.embeddings is not None and not _usual(references.embeddings, references.sizes):
        return False
    given = (targets.given, targets.columns, rule.temperature, rule.bias)
    return (
        all(jit.readable(tensor) for tensor in given if isinstance(tensor, Tensor))
        and references.own is None
        and rule.similarity == "cosine"
        and rule.zero_row == "error"
        and formulas.is_plain(batch, policy)
        and LOWEST_OF_FLOAT32 <= _number(rule.temperature) <= 1 / LOWEST_OF_FLOAT32
        and (name := _function_of(batch)) is not None
        and all(map(jit.function, ("scale", "project", "add_transposed", name)))
    )


def _usual(rows: Tensor, sizes: Sizes | None) -> bool:
    moderate = sizes is not None and sizes.low > 1 / MODERATE and sizes.high < MODERATE
    return moderate and rows.dtype == torch.float32 and len(rows) <= DENSE_UP_TO and jit.readable(rows)


def _function_of(batch: Batch) -> str | None:
    """Return the name of the function that evaluates the rows of a batch; None if there is none."""
    rule, kind = batch.rule, batch.targets.kind
    if kind in _KINDS and rule.terms == "sigmoid":
        return "crossed"
    if kind not in _KINDS or rule.terms not in ("out", "in"):
        return None
    if kind != "partners":
        return "marked" if rule.denominator == "all" else None
    if rule.denominator == "only_negatives":
        return None
    # One function evaluates both directions of two towers if logits need no shift.
    bound = UNSHIFTED[torch.float32] - math.log(len(batch.embeddings))
    return "mutual" if batch.references.mutual and bound * _number(rule.temperature) >= 2 else "lone"


def _number(value: float | Tensor) -> float:
    return value.detach().item() if isinstance(value, Tensor) else value


def _unit(batch: Batch) -> float:
    """Return the unit of the logits."""
    return 1.0 if batch.rule.terms == "sigmoid" else LN2


def evaluate(batch: Batch, policy: Policy, *, backward: bool) -> tuple[Tensor, Saved | None]:
    """Return the loss and, if ``backward``, what `differentiate` needs."""
    references = batch.references
    root = math.sqrt(_number(batch.rule.temperature) * _unit(batch))
    rows = columns = _scaled(batch.embeddings, cast(Sizes, batch.sizes), root)
    if references.embeddings is not None:
        columns = _scaled(references.embeddings, cast(Sizes, references.sizes), root)
    count = len(rows.tensor) * (2 if references.mutual else 1)
    share = 1 / count if policy.reduction == "mean" else 1.0
    with without_autocast(rows.tensor):
        logits = torch.mm(rows.tensor, columns.tensor.T)
        total, of_bias = _weigh(logits, batch, weigh=backward)
        loss = torch.scalar_tensor(total * share, dtype=torch.float32, device="cpu")
        if not backward:
            return loss, None
        of_rows, of_columns = torch.mm(logits, columns.tensor), None
        if columns is not rows and cast(Tensor, references.embeddings).requires_grad:
            of_columns = torch.mm(logits.T, rows.tensor)
    return loss, Saved(rows, columns, of_rows, of_columns, of_bias, share)


def _scaled(rows: Tensor, sizes: Sizes, root: float) -> Rows:
    tensor, factor = torch.empty_like(rows, memory_format=torch.contiguous_format), np.empty(len(rows), np.float32)
    found = Rows(tensor, tensor.numpy(), factor)
    jit.function("scale")(jit.array(rows), sizes.each.numpy(), root, found.array, factor)
    return found


def _weigh(logits: Tensor, batch: Batch, *, weigh: bool) -> tuple[float, float]:
    """Return the sum of the values, and its derivative with respect to the bias.

    If ``weigh``, replace the logits ``[N, M]`` by the derivatives of the sum. Without references, their transpose is
    added.
    """
    rule, targets, panel = batch.rule, batch.targets, logits.numpy()
    itself, kind, name = batch.references.embeddings is None, _KINDS[targets.kind], _function_of(batch)
    found = jit.function(cast(str, name))
    if name == "mutual":
        return found(panel, weigh), 0.0
    given, columns, mask, other = jit.array(targets.given), _NO_INTEGERS, _NO_MASK, panel
    if kind == jit.MASK:
        given, mask = columns, given
    elif kind == jit.LABELS:
        columns = given if targets.columns is None else jit.array(targets.columns)
    if name == "crossed":
        return cast(tuple[float, float], found(panel, kind, given, columns, mask, _number(rule.bias), weigh))
    if name == "marked":
        inside = jit.OUT if rule.terms == "out" else jit.MEAN if rule.inside_reduction == "mean" else jit.SUM
        total = found(panel, kind, given, columns, mask, itself, inside, weigh)
    elif batch.references.mutual:
        other = logits.T.contiguous().numpy()
        total = found(panel, given, itself, weigh) + found(other, given, itself, weigh)
    else:
        total = found(panel, given, itself, weigh)
    if weigh and (itself or batch.references.mutual):
        jit.function("add_transposed")(panel, other, itself)
    return total, 0.0


def differentiate(grad: float, batch: Batch, saved: Saved) -> Gradients:
    """Return the gradients of embeddings, references, temperature and bias from that of the loss, ``grad``."""
    rule, unit, size = batch.rule, _unit(batch), grad * saved.share
    with without_autocast(saved.of_rows):
        learned = by_temperature(saved.of_rows, saved.rows.tensor, size, rule, unit)
    if learned is not None and saved.columns is not saved.rows:
        learned = learned + learned  # rows and columns contribute equally
    of_bias = rule.bias.new_tensor(saved.of_bias * size) if isinstance(rule.bias, Tensor) else None
    others = None if saved.of_columns is None else _projected(saved.of_columns, saved.columns, size * unit)
    return _projected(saved.of_rows, saved.rows, size * unit), others, learned, of_bias


def _projected(grad: Tensor, rows: Rows, size: float) -> Tensor:
    found = torch.empty_like(grad)
    jit.function("project")(grad.numpy(), rows.array, rows.factor, size, found.numpy())
    return found
