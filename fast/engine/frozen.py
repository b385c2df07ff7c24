"""The frozen form: the logarithm of the sum over references that need no gradient, such as a queue of negatives.

With E_ij = e^s_ij and scaled columns y_j, the derivative of log(sum over j of E_ij) with respect to row i is

    sum over j of E_ij y_j / sum over j of E_ij

The forward pass computes both sums from the same tile, so the backward pass only divides them. Besides the scaled rows,
one matrix of their size is kept.

The sums stay within range, because logits are moderate and norms of columns are bounded (`plan.LONGEST`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from . import formulas
from .device import borrow, dtypes_of, give_back
from .formulas import Sums
from .scaling import Saved, Scaled, by_temperature, scale_both, scale_rows, to_embeddings
from .spec import LN2, AnchorValues, Batch, Gradients, Plan
from .unshifted import NONE


def evaluate(batch: Batch, plan: Plan) -> tuple[AnchorValues, Saved]:
    """Return the values; for the backward pass also the sums of exponentials and of weighted columns."""
    scaled, columns = _scaled(batch)
    neg, pull = _sums(scaled.rows, columns, plan, backward=plan.keep)
    negatives = torch.full((len(neg),), len(columns), device=neg.device)
    valid = formulas.counted(batch, negatives, len(columns))
    values = neg.log() if valid is None else torch.where(valid, neg.log(), 0.0)
    return AnchorValues(values, torch.zeros_like(negatives), negatives), Saved(scaled, (neg,), valid=valid, pull=pull)


def _scaled(batch: Batch) -> tuple[Scaled, Tensor]:
    """Return the scaled rows and columns; under "dot" only the rows are scaled, which are usually fewer."""
    rule, others = batch.rule, cast(Tensor, batch.references.embeddings)
    if rule.similarity == "cosine":
        scaled, columns = scale_both(batch, LN2)
        return scaled, columns.rows
    # `scale_rows` divides by sqrt(temperature * log 2), which is T log 2 for the temperature T^2 log 2.
    temperature = rule.temperature_as(dtypes_of(batch.embeddings)[1])
    squared = replace(rule, temperature=temperature * temperature * LN2)
    return scale_rows(batch.embeddings, squared, batch.sizes, LN2), others.to(dtypes_of(others)[0])


def _sums(rows: Tensor, across: Tensor, plan: Plan, *, backward: bool) -> tuple[Tensor, Tensor | None]:
    """Return the sums over j of E_ij, ``[N]``, and for the backward pass of E_ij y_j, ``[N, D]``."""
    # Allocated before the tiles, see `unshifted.evaluate`.
    neg, pull = rows.new_zeros(len(rows)), torch.zeros_like(rows) if backward else None
    height, width = min(plan.rows, len(rows)), min(plan.columns, len(across))
    buffer = borrow("logits", rows, height * width)
    for here in (slice(start, start + height) for start in range(0, len(rows), height)):
        some = rows[here]
        for part in torch.split(across, width):
            shape = len(some), len(part)
            exponentials = torch.mm(some, part.T, out=buffer.as_strided(shape, (shape[1], 1))).exp2_()
            neg[here].add_(exponentials.sum(1))
            if pull is not None:
                pull[here].addmm_(exponentials, part)
    give_back("logits", buffer)
    return neg, pull


def differentiate(grad: Tensor, size: float | Tensor, batch: Batch, plan: Plan, saved: Saved) -> Gradients:
    """Return the gradients with respect to embeddings and temperature; see `symmetric.differentiate`."""
    rule, scaled, neg, pull = batch.rule, saved.scaled, saved.stats[0], saved.pull
    if pull is None:
        pull = cast(Tensor, _sums(scaled.rows, _scaled(batch)[1], plan, backward=True)[1])
    weights = formulas.weights(rule, grad, Sums(neg, neg, *[NONE] * 3), None)
    pull = pull * weights.negative.unsqueeze(1)
    learned = by_temperature(pull, scaled.rows, size, rule, LN2)
    # Rows and columns contribute equally to the gradient of the temperature.
    learned = None if learned is None else learned + learned
    return to_embeddings(pull, scaled, rule, size, batch.embeddings.dtype, LN2), None, learned, None
