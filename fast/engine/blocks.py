"""Small batches of a ranking loss: all directions in one panel of unshifted exponentials, as in `small`.

    rows of the panel    queries, then documents (only for doc_to_doc)
    columns              queries (only for query_to_query), documents, hard negatives

The pairs of documents with queries are in the block of document rows and query columns. If the panel has no such block,
they are in its transpose, the block of query rows and document columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .device import borrow, give_back, may_read, without_autocast
from .formulas import is_plain, reduced
from .plan import SMALL_TOWERS
from .scaling import Scaled, by_temperature, scale_rows, to_embeddings
from .small import PLAIN, of_each, suits
from .spec import LN2, AnchorValues, Batch, Policy, References, Rule, Sizes, Targets
from .transforms import Reverse
from .unshifted import NONE

_TARGETS = Targets("partners", torch.empty(0, dtype=torch.int64, device="cpu"))


def together(sizes: Sequence[Sizes | None]) -> Sizes | None:
    """Return the sizes of concatenated rows; None if some are not known."""
    known = [size for size in sizes if size]
    if len(known) < len(sizes):
        return None
    return Sizes(torch.cat([size.each for size in known]), min(s.low for s in known), max(s.high for s in known))


class Directions(NamedTuple):
    """What is contrasted in addition to queries with documents.

    Attributes:
        query_to_query: whether queries are contrasted with the other queries.
        doc_to_query: whether documents are contrasted with the queries.
        doc_to_doc: whether documents are contrasted with each other, and with each other's hard negatives.
        apart: whether doc_to_query has its own denominator. The other two directions are then not used.
    """

    query_to_query: bool
    doc_to_query: bool
    doc_to_doc: bool
    apart: bool


def loss_of(
    rows: Sequence[Tensor],
    sizes: Sequence[Sizes | None],
    rule: Rule,
    directions: Directions,
    policy: Policy,
    again: Callable[..., Tensor],
) -> Tensor | None:
    """Return the loss, or None if the batch is not evaluated here.

    Args:
        rows: queries ``[N, D]``, documents ``[N, D]`` and, if any, hard negatives ``[N H, D]``, already checked.
        sizes: the sizes of the rows.
        rule: the formula, with similarity and temperature.
        directions: what is contrasted.
        policy: how the values are reduced: one per query and, under `Directions.apart`, one per document.
        again: computes the values in differentiable operations from queries, documents, hard negatives and temperature.
            Absent hard negatives are None, and so is a temperature that is a plain number.
    """
    whole, (queries, documents) = together(sizes), rows[:2]
    if whole is None or sum(map(len, rows)) > SMALL_TOWERS:
        return None
    described = Batch(queries, _TARGETS, rule, References(documents, sizes=whole), sizes=whole)
    if not suits(described, PLAIN):
        return None
    learned = rule.temperature if isinstance(rule.temperature, Tensor) else None
    inputs = queries, documents, rows[2] if len(rows) > 2 else None, learned
    if not (torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs)):
        panel = _evaluate(torch.cat(tuple(rows)), len(queries), rule, whole, directions)
        give_back("kept", panel.buffer)
        return reduced(AnchorValues(_value(panel, directions), NONE, NONE), described, policy)
    plain = is_plain(described, policy)
    given = whole, directions, again, described, policy if plain else None
    found: Tensor = _Small.apply(given, *inputs)  # type: ignore[no-untyped-call]
    return found if plain else reduced(AnchorValues(found, NONE, NONE), described, policy)


_Given = tuple[Sizes, Directions, Callable[..., Tensor], Batch, Policy | None]


class _Panel(NamedTuple):
    """The evaluated panel, with R rows and C columns.

    Attributes:
        scaled: all rows, scaled.
        first: the number of rows that are not columns, 0 or N.
        exponentials: ``[R, C]``, 0 for positive pairs and for pairs that are left out.
        buffer: the memory of the exponentials.
        pos: ``[N, 1]``, the exponential of each query and its document.
        neg: ``[N, 1]``, the sum of each query's row; if documents are rows too, plus that of its document's row.
        across: ``[N, 1]``, the sum of each document's column over the queries; None if it is not used.
    """

    scaled: Scaled
    first: int
    exponentials: Tensor
    buffer: Tensor
    pos: Tensor
    neg: Tensor
    across: Tensor | None


def _evaluate(rows: Tensor, n: int, rule: Rule, sizes: Sizes, directions: Directions) -> _Panel:
    scaled = scale_rows(rows, rule, sizes, LN2)
    height = 2 * n if directions.doc_to_doc else n
    first = 0 if directions.query_to_query else n
    columns, own = scaled.rows[first:], n - first  # the first column of the documents
    shape = height, len(columns)
    buffer = borrow("kept", scaled.rows, shape[0] * shape[1])
    exponentials = torch.mm(scaled.rows[:height], columns.T, out=buffer.as_strided(shape, (shape[1], 1))).exp2_()
    of_queries = exponentials[:n]
    positives = of_queries.diagonal(own)
    pos = positives.clone().unsqueeze(1)
    positives.zero_()
    if own:
        of_queries.fill_diagonal_(0.0)
    if directions.doc_to_doc:
        of_documents = exponentials[n:]
        of_documents.diagonal(own).zero_()
        hard = of_documents[:, own + n :]
        if hard.shape[1]:
            hard.view(n, n, -1).diagonal().zero_()
        if own and directions.doc_to_query:
            of_documents.fill_diagonal_(0.0)
        elif own:
            of_documents[:, :n].zero_()
    neg, across = exponentials.sum(1, keepdim=True), None
    if directions.doc_to_doc:
        neg = neg[:n] + neg[n:]
    if directions.doc_to_query and not (own and directions.doc_to_doc):
        across = of_queries[:, own : own + n].sum(0).unsqueeze(1)
    return _Panel(scaled, first, exponentials, buffer, pos, neg, across)


def _value(panel: _Panel, directions: Directions) -> Tensor:
    """Return the values ``[N]``, or ``[2N]`` under `Directions.apart`."""
    pos, neg, across = panel.pos, panel.neg, panel.across
    if directions.apart:
        assert across is not None
        return torch.cat((neg / pos, across / pos)).log1p_().view(-1)
    odds = (neg if across is None else neg + across) / pos
    # With doc_to_query, the denominator contains the positive twice.
    return (odds.add_(1) if directions.doc_to_query else odds).log1p_().view(-1)


def _differentiate(
    grad: Tensor,
    size: float | Tensor,
    panel: _Panel,
    rule: Rule,
    directions: Directions,
    dtype: torch.dtype,
    *,
    frozen: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of all rows and of the temperature; the exponentials are overwritten.

    ``grad`` is the gradient of the values, divided by ``size``. If ``frozen``, the hard negatives need no gradient.
    """
    scaled, first, weight, _, pos, neg, across = panel
    n, height, rows = len(pos), weight.shape[0], scaled.rows
    grad, own = grad.unsqueeze(1), n - first
    if across is not None and not directions.apart:
        neg = neg + across
    share = grad[:n] / torch.add(neg, pos, alpha=2 if directions.doc_to_query and not directions.apart else 1)
    level, of_columns = share * neg, share
    if directions.apart:
        assert across is not None
        of_columns = grad[n:] / (across + pos)
        level.addcmul_(of_columns, across)
    level = level.neg_().view(-1)
    if height == len(rows) == weight.shape[1] and (directions.doc_to_query or not own):
        # In a symmetric panel, adding the coefficients replaces adding the transposed weights.
        coefficients = share.repeat(2, 1)
        weight.mul_(coefficients + coefficients.T)
        weight.diagonal(n).copy_(level)
        weight.diagonal(-n).copy_(level)
        pull = weight @ rows
    else:
        added = None
        if across is not None:
            block = weight[:n, own : own + n]
            added = block * of_columns.T
        weight.view(-1, n, weight.shape[1]).mul_(share)
        if added is not None:
            block += added
        weight[:n].diagonal(own).copy_(level)
        if frozen and not isinstance(rule.temperature, Tensor):  # without the rows of the hard negatives
            of_rows, factor, power = scaled
            factor = factor if len(factor) == 1 else factor[: 2 * n]
            scaled = Scaled(of_rows[: 2 * n], factor, None if power is None else power[: 2 * n])
        of_rows = weight @ rows[first:]
        of_columns = weight[:, : len(scaled.rows) - first].T @ rows[:height]
        if first == height:
            pull = torch.cat((of_rows, of_columns))
        else:
            pull = torch.zeros_like(scaled.rows)
            pull[:height] = of_rows
            pull[first:] += of_columns
    learned = by_temperature(pull, scaled.rows, size, rule, LN2)
    return to_embeddings(pull, scaled, rule, size, dtype, LN2), learned


class _Small(Reverse):
    """The loss (without a policy, the values) in eager execution."""

    @staticmethod
    def forward(ctx: Any, given: _Given, *inputs: Tensor | None) -> Tensor:
        sizes, directions, _, batch, policy = given
        rows = [tensor for tensor in inputs[:3] if tensor is not None]
        panel = _evaluate(torch.cat(rows), len(rows[0]), batch.rule, sizes, directions)
        values = _value(panel, directions)
        ctx.save_for_backward(*inputs)
        ctx.given, ctx.count, ctx.panel = given, len(values), panel
        return values if policy is None else reduced(AnchorValues(values, NONE, NONE), batch, policy)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (sizes, directions, composed, batch, policy), inputs, grad = ctx.given, ctx.saved_tensors, grads[0]
        needed = ctx.needs_input_grad[1:]
        again = torch.is_grad_enabled()
        if again or not may_read(grad):
            # Compute the loss again in differentiable operations. Differentiate with respect to views of the inputs,
            # because an input may have been computed from another one.
            with torch.enable_grad():
                views = [None if tensor is None else tensor.view_as(tensor) for tensor in inputs]
                loss = composed(*views)
                if policy is not None:
                    loss = reduced(AnchorValues(loss, NONE, NONE), batch, policy)
            wanted = [tensor for tensor, needs in zip(views, needed, strict=True) if needs and tensor is not None]
            found = iter(torch.autograd.grad(loss, wanted, grad, create_graph=again))
            return None, *(next(found) if needs else None for needs in needed)
        rows = [tensor for tensor in inputs[:3] if tensor is not None]
        n, frozen = len(rows[0]), len(rows) > 2 and not needed[2]
        with without_autocast(grad):
            panel, ctx.panel = ctx.panel, None
            if panel is None:  # overwritten by the first backward pass
                panel = _evaluate(torch.cat(rows), n, batch.rule, sizes, directions)
            size, grad = of_each(grad, policy, ctx.count)
            pull, learned = _differentiate(grad, size, panel, batch.rule, directions, rows[0].dtype, frozen=frozen)
            give_back("kept", panel.buffer)
        gradients = pull[:n], pull[n : 2 * n], pull[2 * n :], learned
        return None, *(g if needs else None for g, needs in zip(gradients, needed, strict=True))
