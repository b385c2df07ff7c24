"""The value of every pair on its own, which the reduction "none_pairs" returns.

Logits are computed and differentiated in panels of whole rows, so memory is linear in the numbers of rows and of pairs.
Under "sigmoid", a value depends only on its logit. Otherwise it also depends on the negatives' log-sum-exp, which every
backend returns as the anchor's value if ``rule.terms`` is "lse".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from . import device
from .autograd import OVERFLOW, anchor_values
from .device import dtypes_of, without_autocast
from .plan import panel_rows, precision
from .rowwise import masks_of, own_columns
from .scaling import Saved, both_ways, differentiable_rows, of_ordinary_size, pulled, scale_both
from .spec import Backend, Batch, Gradients, Policy
from .transforms import Reverse
from .unshifted import marked

Inputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Embeddings, references, temperature and bias; None for an absent one or a plain number."""


class _Pairs(NamedTuple):
    """Pairs of a row and a column in row-major order.

    Attributes:
        rows: int64 ``[P]``; empty if ``every``.
        columns: int64 ``[P]``; empty if ``every``.
        ends: for each panel, the number of pairs up to its end.
        height: the rows of a panel.
        every: whether these are all pairs.
    """

    rows: Tensor
    columns: Tensor
    ends: list[int]
    height: int
    every: bool = False


def pair_values(batch: Batch, policy: Policy, backend: Backend) -> Tensor:
    """Return the value of every pair in row-major order, scaled by temperature / base_temperature as in `Policy`.

    Under the terms "sigmoid", there is one value for every pair that is not ignored. Otherwise there is one for every
    positive pair of an anchor: -log(e^s / (e^s + sum over N of e^s)), times the weights of the pair and of its anchor.
    An anchor without positives has no entry, whatever the policy.

    Args:
        batch: the batch, already checked.
        policy: only its base temperature and its anchor weights are used.
        backend: "auto", "dense", "tiled", "exact" or "triton".

    Returns:
        ``[P]``, float64 for float64 embeddings, else float32.

    Raises:
        ValueError: ``backend="triton"`` does not support this batch, or dot products exceed the range of float64.
    """
    rows, others = batch.embeddings, batch.references.embeddings
    if not device.traced(rows) and rows.shape[0] == 0:
        return anchor_values(batch, backend).values
    returned, wide = dtypes_of(rows)
    matrices = (batch.sizes,) if others is None else (batch.sizes, batch.references.sizes)
    needed = "" if backend == "triton" or device.traced(rows) else precision(batch.rule, rows, matrices)
    computing = wide if needed or backend == "exact" else returned
    if others is not None:
        computing = torch.promote_types(computing, dtypes_of(others)[0])
    # The gradients of sums and of logits are added before they are rounded to a narrow dtype.
    rows, others = rows.to(computing), None if others is None else others.to(computing)
    references = replace(batch.references, embeddings=others)
    batch = replace(batch, embeddings=rows, references=references, storage=batch.embeddings.dtype)
    binary = batch.rule.terms == "sigmoid"
    pairs, positive = (_all_pairs if binary and not batch.targets.omits else _some_pairs)(batch, backend)
    logits = _logits(batch, pairs)
    if needed == "exact" and not bool(logits.detach().isfinite().all()):
        raise ValueError(OVERFLOW)
    if binary:
        values = -F.logsigmoid(torch.where(positive, logits, -logits))
    else:
        rule = replace(batch.rule, terms="lse", denominator="only_negatives")
        sums_only = replace(batch, rule=rule, targets=replace(batch.targets, positive_weights=None))
        found = anchor_values(sums_only, "exact" if needed == "exact" else backend)
        sums = found.values.to(computing)
        if torch.compiler.is_compiling():
            sums = sums.index_select(0, pairs.rows)
        else:
            number = torch.bincount(pairs.rows, minlength=rows.shape[0])
            sums = _Repeated.apply(sums, number)  # type: ignore[no-untyped-call]
        some = (found.negatives > 0).index_select(0, pairs.rows)
        values = torch.where(some, -F.logsigmoid(logits - sums), 0.0)
    weights, of_anchors = [], policy.anchor_weights
    if batch.targets.positive_weights is not None:
        weights.append(batch.targets.positive_weights[pairs.rows, pairs.columns])
    if of_anchors is not None:
        weights.append(of_anchors.repeat_interleave(_width(batch)) if pairs.every else of_anchors[pairs.rows])
    for chosen in weights:  # they may not have been checked: a negative one gives NaN
        values = values * torch.where(chosen >= 0, chosen, torch.nan)
    if policy.base_temperature is not None:
        values = values * (batch.rule.temperature_as(values.dtype) / policy.base_temperature)
    return values.to(returned)


def _width(batch: Batch) -> int:
    others = batch.references.embeddings
    return (batch.embeddings if others is None else others).shape[0]


def _all_pairs(batch: Batch, backend: Backend) -> tuple[_Pairs, Tensor]:
    """Return all pairs, and whether each is positive, bool ``[P]``."""
    count, width = batch.embeddings.shape[0], _width(batch)
    height = panel_rows(batch, backend)
    stops = [min(start + height, count) for start in range(0, count, height)]
    signs = [marked(batch.targets, slice(*ends), count, width).reshape(-1) for ends in pairwise((0, *stops))]
    none = torch.empty(0, dtype=torch.int64, device=batch.embeddings.device)
    return _Pairs(none, none, [stop * width for stop in stops], height, every=True), torch.cat(signs)


def _some_pairs(batch: Batch, backend: Backend) -> tuple[_Pairs, Tensor]:
    """Return the anchors' positive pairs (with "sigmoid", all that count), and whether each is positive."""
    count, width, own = batch.embeddings.shape[0], _width(batch), own_columns(batch)
    found, signs = [], []
    height = panel_rows(batch, backend)
    for start in range(0, count, height):
        here = slice(start, min(start + height, count))
        positive, negative, _ = masks_of(batch.targets, own, here, count, width)
        chosen = positive | negative if batch.rule.terms == "sigmoid" else positive
        if batch.anchors is not None:
            chosen = chosen & batch.anchors[here, None]
        rows, columns = chosen.nonzero(as_tuple=True)
        found.append(torch.stack((rows + start, columns)))
        signs.append(positive[rows, columns])
    ends = list(accumulate(part.shape[1] for part in found))
    rows, columns = torch.cat(found, 1)
    return _Pairs(rows, columns, ends, height), torch.cat(signs)


def _logits(batch: Batch, pairs: _Pairs) -> Tensor:
    if torch.compiler.is_compiling():
        with without_autocast(batch.embeddings):
            return _dense(batch, pairs)
    rule, others = batch.rule, batch.references.embeddings
    numbers = (number if isinstance(number, Tensor) else None for number in (rule.temperature, rule.bias))
    found: Tensor = _Logits.apply(batch, pairs, batch.embeddings, others, *numbers)  # type: ignore[no-untyped-call]
    return found


def _with(batch: Batch, inputs: Inputs) -> Batch:
    rows, others, temperature, bias = inputs
    rule = batch.rule if temperature is None else replace(batch.rule, temperature=temperature)
    rule = rule if bias is None else replace(rule, bias=bias)
    return replace(batch, embeddings=rows, references=replace(batch.references, embeddings=others), rule=rule)


def _dense(batch: Batch, pairs: _Pairs) -> Tensor:
    """Compute the logits in differentiable operations on the whole matrix."""
    others = batch.references.embeddings
    rows = differentiable_rows(batch.embeddings, batch.rule)
    logits = rows @ (rows if others is None else differentiable_rows(others, batch.rule)).T
    if batch.rule.terms == "sigmoid":
        logits = logits + batch.rule.bias
    return logits.view(-1) if pairs.every else logits[pairs.rows, pairs.columns]


class _Logits(Reverse):
    """The logits of pairs; only the second derivative needs the whole matrix."""

    @staticmethod
    def forward(batch: Batch, pairs: _Pairs, *inputs: Tensor | None) -> Tensor:
        batch = _with(batch, cast(Inputs, inputs))
        with without_autocast(batch.embeddings):
            scaled, columns = scale_both(batch)
            found, begin = scaled.rows.new_empty(pairs.ends[-1]), 0
            for place, end in enumerate(pairs.ends):
                start = place * pairs.height
                panel = scaled.rows[start : start + pairs.height] @ columns.rows.T
                here = slice(begin, end)
                found[here] = (panel if pairs.every else panel[pairs.rows[here] - start, pairs.columns[here]]).view(-1)
                begin = end
        return found.add_(batch.rule.bias) if batch.rule.terms == "sigmoid" else found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.described = inputs[:2]
        ctx.save_for_backward(*inputs[2:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (batch, pairs), inputs, needed = ctx.described, ctx.saved_tensors, ctx.needs_input_grad[2:]
        gradients: Sequence[Tensor | None]
        with without_autocast(grad):
            if torch.is_grad_enabled():
                places = [place for place, tensor in enumerate(inputs) if tensor is not None]

                def dense(*given: Tensor) -> Tensor:
                    one = dict(zip(places, given, strict=True))
                    return _dense(_with(batch, cast(Inputs, tuple(map(one.get, range(len(inputs)))))), pairs)

                found = torch.func.vjp(dense, *(inputs[place] for place in places))[1](grad)
                one = dict(zip(places, found, strict=True))
                gradients = [one.get(place) for place in range(len(inputs))]
            else:
                gradients = _gradients(grad, _with(batch, inputs), pairs, frozen=not needed[1])
        return None, None, *(part if needs else None for part, needs in zip(gradients, needed, strict=True))


def _gradients(grad: Tensor, batch: Batch, pairs: _Pairs, *, frozen: bool) -> Gradients:
    scaled, columns = scale_both(batch)
    size, grad = of_ordinary_size(grad, reads=device.may_read(grad)) if len(grad) else (1.0, grad)
    count, width = scaled.rows.shape[0], columns.rows.shape[0]

    def weighed() -> Iterator[tuple[slice, Tensor]]:
        for place, (begin, end) in enumerate(pairwise((0, *pairs.ends))):
            here = slice(place * pairs.height, min((place + 1) * pairs.height, count))
            if pairs.every:
                yield here, grad[begin:end].view(-1, width)
                continue
            weight = grad.new_zeros((here.stop - here.start, width))
            weight[pairs.rows[begin:end] - here.start, pairs.columns[begin:end]] = grad[begin:end]
            yield here, both_ways(weight, batch)

    return pulled(weighed(), Saved(scaled, (), None, columns, frozen=frozen), batch, size)


class _Repeated(Reverse):
    """Values ``[N]``, each repeated a number of times, with a deterministic backward pass."""

    @staticmethod
    def forward(values: Tensor, number: Tensor) -> Tensor:
        return values.repeat_interleave(number)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (number,) = ctx.saved_tensors
        return torch.segment_reduce(grad.contiguous(), "sum", lengths=number, unsafe=True), None
