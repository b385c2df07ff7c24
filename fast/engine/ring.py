"""The ring form: the rows of one rank against blocks of columns, which the ranks pass to each other.

A rank has n of the N rows. Its anchors are contrasted with one block of columns after the other: its own, then that of
the previous rank, and so on. While a rank computes with a block, the block travels on to the next rank.

In the forward pass, `rowwise.Sums` are added up over the blocks. With the denominator "one_positive", the blocks travel
twice, because the sums over positives need the sum over all negatives.

In the backward pass, each block is followed by its gradient, to which every rank adds its part. The gradient arrives
last at the rank that has the block.

No rank holds the rows of all ranks. Besides its own rows and their gradient, a rank holds two blocks and, in the
backward pass, the gradients of three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from . import formulas, rowwise
from .device import without_autocast
from .plan import panel_rows
from .rowwise import LonePanel, Panel, Sums
from .scaling import Scaled, by_temperature, scale_both, to_embeddings
from .spec import AnchorValues, Backend, Batch, References

SECOND = (
    'group: expected a process group or "world", and backend="exact", for second derivatives, which a Ring does not '
    "support"
)
OVERFLOW = (
    'group: expected a process group or "world" for rows whose dot products, divided by the temperature, exceed the '
    "range of float64, got a Ring"
)


class Share(Protocol):
    """How the rows of a matrix are divided among the ranks."""

    @property
    def rank(self) -> int:
        """The number of this rank."""

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of rows of each rank."""

    def pass_on(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> tuple[list[Tensor], Callable[[], None]]:
        """Start to send tensors to the next rank, and to receive as many from the previous rank.

        Args:
            tensors: what this rank sends.
            owners: for each received tensor, the rank to whose rows it belongs, which determines its length.

        Returns:
            The received tensors, and a function that waits for them.
        """


@dataclass(slots=True, kw_only=True)
class Blocks(References):
    """The columns of all ranks. ``embeddings`` are the block of this rank, or None if the columns are the rows.

    The targets have an entry for each column of all ranks.

    Args:
        share: how the columns are divided among the ranks.
    """

    share: Share


def anchor_values(batch: Batch, backend: Backend) -> AnchorValues:
    """Return the values of this rank's anchors; the gradient of its rows is that of all ranks' losses.

    Args:
        batch: the rows of this rank, in the dtype to compute in, and `Blocks` as references. Pairs have no weights.
        backend: "auto", "dense" or "tiled", which determines the size of panels.
    """
    temperature = batch.rule.temperature if isinstance(batch.rule.temperature, Tensor) else None
    inputs = batch.embeddings, batch.references.embeddings, temperature
    return AnchorValues(*_Values.apply(batch, backend, *inputs))  # type: ignore[no-untyped-call]


class _Values(torch.autograd.Function):
    """The values ``[n]``, and the numbers of positives and of negatives."""

    @staticmethod
    def forward(ctx: Any, batch: Batch, backend: Backend, *inputs: Tensor | None) -> AnchorValues:
        with without_autocast(batch.embeddings):
            found, scaled, columns, sums = evaluate(batch, backend)
        targets = batch.targets
        given = targets.given, targets.columns, targets.ignored, targets.ids, targets.column_ids
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *given, batch.anchors)
        ctx.described, ctx.saved = (batch, backend), (scaled, columns, sums)
        ctx.mark_non_differentiable(found.positives, found.negatives)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(SECOND)
        rows = ctx.saved_tensors[0]  # raises if a saved tensor was changed in place
        grad = grads[0]
        if grad is None:
            grad = ctx.saved[0].rows.new_zeros(len(rows))
        with without_autocast(rows):
            gradients = differentiate(grad, *ctx.described, *ctx.saved)
        needed = ctx.needs_input_grad[2:]
        return None, None, *(part if needs else None for part, needs in zip(gradients, needed, strict=True))


def evaluate(batch: Batch, backend: Backend) -> tuple[AnchorValues, Scaled, Scaled, Sums]:
    """Return the values, the scaled rows and columns of this rank, and the sums of its rows over all columns."""
    rule, share = batch.rule, cast(Blocks, batch.references).share
    scaled, columns = scale_both(batch)
    rows, sums = scaled.rows, Sums.empty(scaled.rows)
    for rank, block in _passing(columns.rows, share):
        for panel, logits in _panels(batch, backend, rows, block, rank):
            sums.add(panel.rows, rowwise.summed(logits, panel, rule))
    if rule.denominator == "one_positive":
        for rank, block in _passing(columns.rows, share):
            for panel, logits in _panels(batch, backend, rows, block, rank):
                of_rows = sums.of(panel.rows)
                softplus, missed = rowwise.own_sums(logits, cast(Panel, panel), rule, of_rows)
                of_rows.softplus.add_(softplus)
                of_rows.missed.add_(missed)
    values, positives, negatives = rowwise.values_of(sums, rule), sums.positives[:, 0], sums.negatives[:, 0]
    valid = formulas.counted(batch, positives, negatives)
    values = values if valid is None else torch.where(valid, values, 0.0)
    return AnchorValues(values, positives, negatives), scaled, columns, sums


def differentiate(
    grad: Tensor, batch: Batch, backend: Backend, scaled: Scaled, columns: Scaled, sums: Sums
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of this rank's rows, of its block of columns, and of the temperature.

    The temperature's gradient of the whole batch is the sum over the ranks. ``grad`` ``[n]`` is the gradient of the
    values. The last three arguments are results of `evaluate`.
    """
    rule, share, rows = batch.rule, cast(Blocks, batch.references).share, scaled.rows
    world, valid = len(share.counts), formulas.counted(batch, sums.positives[:, 0], sums.negatives[:, 0])
    grad = grad if valid is None else torch.where(valid, grad, 0.0)
    block, pull, one = columns.rows, torch.zeros_like(rows), batch.references.embeddings is None
    home = pull if one else torch.zeros_like(block)
    carried = home
    for step in range(world + 1 if world > 1 else 1):
        rank = (share.rank - step) % world
        travelling, owners = [], []
        if step < world - 1:
            travelling, owners = [block], [(rank - 1) % world]
        if step > 1:  # send the gradient of the previous block, receive that of this block
            travelling, owners = [*travelling, carried], [*owners, rank]
        received, wait = share.pass_on(travelling, owners)
        if step < world:
            carried = torch.zeros_like(block) if step else home
            for panel, logits in _panels(batch, backend, rows, block, rank):
                here = panel.rows
                weight = rowwise.weights(logits, panel, rule, grad[here], sums.of(here))
                pull[here].addmm_(weight, block)
                carried.addmm_(weight.T, rows[here])
        wait()
        if step > 1:
            (carried if step < world else home).add_(received.pop())
        if step < world - 1:
            block = received.pop()
    dtype = batch.embeddings.dtype
    if one:
        learned = by_temperature(pull, rows, 1.0, rule)
        return to_embeddings(pull, scaled, rule, 1.0, dtype), None, learned
    # Rows and columns contribute equally to the gradient of the temperature.
    learned = by_temperature(pull, rows, 2.0, rule)
    of_columns = to_embeddings(home, columns, rule, 1.0, dtype)
    return to_embeddings(pull, scaled, rule, 1.0, dtype), of_columns, learned


def _passing(block: Tensor, share: Share) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank and its block, this rank's first, while the next block arrives."""
    world = len(share.counts)
    for step in range(world):
        rank, more = (share.rank - step) % world, step < world - 1
        received, wait = share.pass_on([block] if more else [], [(rank - 1) % world] if more else [])
        yield rank, block
        wait()
        block = received[0] if more else block


def _panels(
    batch: Batch, backend: Backend, rows: Tensor, block: Tensor, rank: int
) -> Iterator[tuple[Panel | LonePanel, Tensor]]:
    """Yield the panels of this rank's rows with the block of columns of ``rank``, and their logits."""
    if len(block):
        part = _of_block(batch, block, rank)
        for panel in rowwise.panels(part, len(block), max(1, panel_rows(part, backend))):
            yield panel, rows[panel.rows] @ block.T


def _of_block(batch: Batch, block: Tensor, rank: int) -> Batch:
    """Return the batch of this rank's rows and the block of columns of ``rank``."""
    targets, share, own = batch.targets, cast(Blocks, batch.references).share, None
    start = sum(share.counts[:rank])
    here, mine = slice(start, start + share.counts[rank]), rank == share.rank
    kind, given, columns = targets.kind, targets.given, targets.columns
    if kind == "labels":
        columns = cast(Tensor, columns)[here]
    elif kind == "mask":
        given = given[:, here]
    elif mine:  # partners are rows of the same rank
        given = given - start
    else:
        kind = "none"
    ignored = None if targets.ignored is None else targets.ignored[:, here]
    ids = None if targets.column_ids is None else targets.column_ids[here]
    if mine and batch.references.embeddings is None:
        own = torch.arange(len(block), device=block.device)
    targets = replace(targets, kind=kind, given=given, columns=columns, ignored=ignored, column_ids=ids, order=None)
    return replace(batch, targets=targets, references=References(block, own), sizes=None)
