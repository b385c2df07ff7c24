"""The shared form: the rows of one rank against those of all ranks, where positives are symmetric.

A rank has n of the N rows. In the forward pass it sums the exponentials of its own anchors in panels ``[b, N]``, as
`unshifted` does.

The gradient of a row comes from its own loss and from the losses of all other anchors. For rows i and j, both parts
contain the same exponential, times coefficients of i in one part and of j in the other. So in the backward pass the
ranks exchange only coefficients, at most three numbers per row. Each rank then computes the whole gradient of its own
rows.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
from torch import Tensor

from . import device, formulas, unshifted
from .formulas import Sums
from .plan import choose
from .scaling import Saved, by_temperature, scale_both, to_embeddings
from .spec import LN2, AnchorValues, Backend, Batch, Plan

SECOND = (
    'group: expected backend="exact" for second derivatives of this loss with a group; other backends exchange only '
    "coefficients of the first derivative"
)


class Share(Protocol):
    """The rows that each rank has."""

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the rows of all ranks ``[N, ...]`` from those of this rank ``[n, ...]``, without a gradient."""


def suits(batch: Batch, backend: Backend) -> bool:
    """Return whether this form evaluates a batch that has no references yet.

    The result is the same on all ranks.
    """
    rule, targets = batch.rule, batch.targets
    plain = rule.terms == "out" and rule.denominator == "all" and rule.similarity == "cosine"
    symmetric = targets.kind in ("labels", "partners") and not targets.omits and not targets.weighted
    return plain and symmetric and batch.embeddings.is_cpu and backend in ("auto", "dense", "tiled")


def planned(batch: Batch, backend: Backend) -> tuple[Plan, Batch] | None:
    """Return the result of `choose` for the rows of all ranks as references; None if logits may be too large."""
    temperature = batch.rule.temperature
    if isinstance(temperature, Tensor) and not device.may_read(temperature):
        return None
    plan, batch = choose(batch, backend)
    return (plan, batch) if plan.form == "unshifted" else None


def anchor_values(batch: Batch, plan: Plan, share: Share) -> AnchorValues:
    """Return the values of this rank's anchors; the gradient of its rows is that of all ranks' losses.

    Args:
        batch: the rows of this rank; the references are the rows of all ranks, without a gradient.
        plan: the result of `planned`.
        share: the rows that each rank has.
    """
    temperature = batch.rule.temperature if isinstance(batch.rule.temperature, Tensor) else None
    return AnchorValues(*_Values.apply(batch, plan, share, batch.embeddings, temperature))  # type: ignore[no-untyped-call]


class _Values(torch.autograd.Function):
    """The values ``[n]``, and the numbers of positives and of negatives."""

    @staticmethod
    def forward(ctx: Any, batch: Batch, plan: Plan, share: Share, *inputs: Tensor | None) -> AnchorValues:
        with device.without_autocast(batch.embeddings):
            if len(batch.embeddings):
                found, saved = unshifted.evaluate(batch, plan)
            else:
                found, saved = _of_no_rows(batch)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, batch.targets.given, batch.targets.columns, batch.anchors)
        ctx.described, ctx.saved = (batch, plan, share), saved
        ctx.mark_non_differentiable(found.positives, found.negatives)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(SECOND)
        (batch, plan, share), saved, rows = ctx.described, ctx.saved, ctx.saved_tensors[0]
        # The panels are overwritten: another backward pass computes them again.
        ctx.saved = saved._replace(kept=None)
        grad = grads[0]
        if grad is None:
            grad = saved.scaled.rows.new_zeros(len(rows))
        with device.without_autocast(rows):
            gradients = differentiate(grad, batch, plan, saved, share)
        needed = ctx.needs_input_grad[3:]
        return None, None, None, *(part if needs else None for part, needs in zip(gradients, needed, strict=True))


def differentiate(grad: Tensor, batch: Batch, plan: Plan, saved: Saved, share: Share) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of this rank's rows and of the temperature.

    The temperature's gradient of the whole batch is the sum over the ranks. ``grad`` ``[n]`` is the gradient of the
    values.
    """
    rule, rows, across = batch.rule, saved.scaled.rows, cast(Any, saved.classes).rows
    lone = batch.targets.kind == "partners"
    *sums, number = saved.stats[: len(Sums._fields) + 1]
    grad = grad if saved.valid is None else torch.where(saved.valid, grad, 0.0)
    mine = formulas.weights(rule, grad, Sums(*sums), None if lone else number)
    parts = (mine.negative, mine.level) if lone else (mine.negative, mine.level, mine.slope)
    columns = share.gather(torch.stack(parts, 1)).T
    pull = torch.zeros_like(rows)
    for here, panel in unshifted.panels(batch, plan, saved):
        negative, level, *slope = (
            part[here, None] + of_columns for part, of_columns in zip(parts, columns, strict=True)
        )
        weight = panel.negative.mul_(negative)
        if lone:
            weight.scatter_(1, panel.positive, level.gather(1, panel.positive))
        else:
            weight.addcmul_(panel.own, slope[0]).addcmul_(panel.positive, level)
        torch.mm(weight, across, out=pull[here])
    learned = by_temperature(pull, rows, 1.0, rule, LN2)
    return to_embeddings(pull, saved.scaled, rule, 1.0, batch.embeddings.dtype, LN2), learned


def _of_no_rows(batch: Batch) -> tuple[AnchorValues, Saved]:
    scaled, columns = scale_both(batch, LN2)
    none, whole = scaled.rows.new_empty(0), torch.empty(0, dtype=torch.int64, device=scaled.rows.device)
    return AnchorValues(none, whole, whole), Saved(scaled, [none] * (len(Sums._fields) + 1), None, columns)
