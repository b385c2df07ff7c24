"""Losses for partners, combined from the logits of positives and the odds of negatives at several temperatures.

Each loss describes the combination as a `Formula`. A small batch with moderate logits is evaluated in one panel of
unshifted exponentials, as in `small`: logits are computed once for all temperatures. Otherwise each part is evaluated
on its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from .autograd import anchor_values
from .device import may_read, without_autocast
from .formulas import is_plain, reduced
from .partners import partner_rows
from .scaling import Saved, pair_logits, pulled, scale_both
from .small import PLAIN, of_each, suits
from .spec import LN2, AnchorValues, Backend, Batch, Policy
from .transforms import Reverse
from .unshifted import NONE


class Odds(NamedTuple):
    """The parts of a loss, one entry per row: each ``[N]``, or each ``[N, 1]``.

    Attributes:
        logits: the logit s_p of each row's positive.
        odds: for each factor f of the logits, log(sum of e^(f s) over the negatives / e^(f s_p)); 0 without negatives.
        negatives: int64 ``[N]``, the size of each row's N(i), or one number, at least 1, for all rows.
    """

    logits: Tensor
    odds: Sequence[Tensor]
    negatives: Tensor | int


class Formula(Protocol):
    """How a loss combines the parts."""

    def values(self, found: Odds) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the value of each row, and what `slopes` needs.

        The values must be differentiable by autograd. Those of rows without negatives are not used.
        """

    def slopes(self, grad: Tensor, kept: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the gradients of the logits and of each odds. Not called if the temperature is a tensor.

        ``grad`` is the gradient of the values, ``kept`` the second result of `values`.
        """


def combined(batch: Batch, factors: Sequence[float], formula: Formula, policy: Policy, backend: Backend) -> Tensor:
    """Evaluate a loss, differentiable with respect to embeddings, references and temperature.

    Args:
        batch: the batch, already checked, with partners and the denominator "only_negatives".
        factors: the positive factors of the logits, the largest one first.
        formula: how the parts are combined. A row without negatives has the value 0.
        policy: how the values are reduced.
        backend: "auto", "dense", "tiled", "exact" or "triton".

    Returns:
        The loss in the computing dtype; see `reduced`.
    """
    with without_autocast(batch.embeddings):
        return _combined(batch, factors, formula, policy, backend)


def _combined(batch: Batch, factors: Sequence[float], formula: Formula, policy: Policy, backend: Backend) -> Tensor:
    columns, own = batch.references.embeddings, batch.references.own
    number = batch.embeddings.shape[0] - 2 if columns is None else columns.shape[0] - 1
    usual = backend == "auto" and own is None and not isinstance(batch.rule.temperature, Tensor)
    # With many ranks, values depend on the rows of other ranks, which `slopes` does not support.
    usual = usual and policy.ranks is None
    if usual and suits(batch, PLAIN, factors[0]) and number > 0:
        wanted = batch.embeddings.requires_grad or (columns is not None and columns.requires_grad)
        if not (wanted and torch.is_grad_enabled()):
            values = formula.values(_evaluate(batch, factors, number)[0])[0].view(-1)
            return reduced(AnchorValues(values, NONE, NONE), batch, policy)
        plain = is_plain(batch, policy)
        described = batch, factors, formula, policy if plain else None
        found: Tensor = _Small.apply(described, number, batch.embeddings, columns)  # type: ignore[no-untyped-call]
        return found if plain else reduced(AnchorValues(found, NONE, NONE), batch, policy)
    return reduced(AnchorValues(_composed(batch, factors, formula, backend), NONE, NONE), batch, policy)


def _composed(batch: Batch, factors: Sequence[float], formula: Formula, backend: Backend) -> Tensor:
    found = _parts(batch, factors, backend)
    return torch.where(cast(Tensor, found.negatives) > 0, formula.values(found)[0], 0.0)


def _parts(batch: Batch, factors: Sequence[float], backend: Backend) -> Odds:
    rule = batch.rule
    rules = (rule if factor == 1 else replace(rule, temperature=rule.temperature / factor) for factor in factors)
    found = [anchor_values(replace(batch, rule=each), backend) for each in rules]
    logits = pair_logits(batch.embeddings, partner_rows(batch), rule)
    return Odds(logits, [each.values for each in found], found[0].negatives)


def _evaluate(batch: Batch, factors: Sequence[float], number: int) -> tuple[Odds, Saved]:
    """Return the parts ``[N, 1]``, from one panel; save the sums and the exponentials of each factor."""
    scaled, columns = scale_both(batch, LN2)
    logits, column = torch.mm(scaled.rows, columns.rows.T), batch.targets.given.unsqueeze(1)
    of_positives = logits.gather(1, column)
    logits.scatter_(1, column, -math.inf)
    if batch.references.embeddings is None:
        logits.fill_diagonal_(-math.inf)
    exponentials, sums, odds = [], [], []
    for factor in factors:
        if factor is factors[-1]:  # the last exponentials take the memory of the logits
            each = (logits if factor == 1 else logits.mul_(factor)).exp2_()
        else:
            each = logits.exp2() if factor == 1 else (logits * factor).exp2_()
        of_each = of_positives.exp2() if factor == 1 else (of_positives * factor).exp2_()
        total = each.sum(1, keepdim=True)
        exponentials.append(each)
        sums.append(total)
        odds.append(of_each.reciprocal_().mul_(total).log_())
    return Odds(of_positives.mul_(LN2), odds, number), Saved(scaled, sums, exponentials, columns)


class _Small(Reverse):
    """The loss of a small batch (without a policy, the values) in eager execution."""

    @staticmethod
    def forward(
        ctx: Any,
        described: tuple[Batch, Sequence[float], Formula, Policy | None],
        number: int,
        *inputs: Tensor | None,
    ) -> Tensor:
        batch, factors, formula, policy = described
        found, saved = _evaluate(batch, factors, number)
        values, ctx.kept = formula.values(found)
        ctx.save_for_backward(*inputs, batch.targets.given)
        ctx.described, ctx.saved = described, saved
        values = values.view(-1)
        return values if policy is None else reduced(AnchorValues(values, NONE, NONE), batch, policy)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (batch, factors, formula, policy), needed, grad = ctx.described, ctx.needs_input_grad[2:], grads[0]
        rows, others, _ = ctx.saved_tensors  # raises if a saved tensor was changed in place
        again = torch.is_grad_enabled()
        gradients: Sequence[Tensor | None]
        if again or not may_read(grad):
            # Compute the loss again in differentiable operations. Differentiate with respect to views of the inputs,
            # because an input may have been computed from another one.
            with torch.enable_grad():
                views = [None if tensor is None else tensor.view_as(tensor) for tensor in (rows, others)]
                references = replace(batch.references, embeddings=views[1])
                batch = replace(batch, embeddings=cast(Tensor, views[0]), references=references)
                values = _composed(batch, factors, formula, "auto")
                if policy is not None:
                    values = reduced(AnchorValues(values, NONE, NONE), batch, policy)
            wanted = [tensor for tensor, needs in zip(views, needed, strict=True) if needs]
            found = iter(torch.autograd.grad(values, cast(list[Tensor], wanted), grad, create_graph=again))
            gradients = [next(found) if needs else None for needs in needed]
        else:
            with without_autocast(rows):
                size, grad = of_each(grad, policy, len(rows))
                slopes = formula.slopes(grad.unsqueeze(1), ctx.kept)
                gradients = _gradients(slopes, batch, factors, ctx.saved._replace(frozen=not needed[1]), size)
        return None, None, *(part if needs else None for part, needs in zip(gradients, needed, strict=False))


def _gradients(
    slopes: Sequence[Tensor], batch: Batch, factors: Sequence[float], saved: Saved, size: float | Tensor
) -> Sequence[Tensor | None]:
    """Return the gradients of embeddings and references, from those of the logits and of each odds, ``[N, 1]``."""
    symmetric, column = batch.references.embeddings is None, batch.targets.given.unsqueeze(1)
    level, *of_odds = slopes
    weight: Tensor | None = None
    for factor, slope, total, exponentials in zip(factors, of_odds, saved.stats, saved.kept, strict=True):
        slope = slope if factor == 1 else slope * factor
        level = level - slope
        coefficient = slope / total
        if symmetric:  # adding coefficients replaces adding the transposed weights
            coefficient = coefficient + coefficient.T
        # A second backward pass needs the exponentials again.
        weight = exponentials * coefficient if weight is None else weight.addcmul_(exponentials, coefficient)
    assert weight is not None
    weight.scatter_(1, column, level + level.gather(0, column) if symmetric else level)
    return pulled([(slice(0, weight.shape[0]), weight)], saved, batch, size, LN2)
