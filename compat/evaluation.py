"""The choice between the engine of `pairproof.fast` and straightforward torch code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from torch import Tensor

from ..fast.checks import LOWEST
from ..fast.engine.device import may_read

EvaluatedBy = Literal["", "engine", "plain"]
"""What evaluated the last call of a loss; empty before the first call."""


class Evaluated(Protocol):
    """A loss that records what evaluated it."""

    evaluated_by: EvaluatedBy


def evaluate(loss: Evaluated, engine: Callable[[], Tensor], plain: Callable[[], Tensor], *, wanted: bool) -> Tensor:
    """Return the value of the engine, or of plain code if the engine is not wanted or rejects the arguments.

    The engine rejects NaN, for example, where the libraries return NaN.

    Args:
        loss: the module whose attribute ``evaluated_by`` is set.
        engine: a call of a loss of `pairproof.fast`.
        plain: the same loss in straightforward torch code.
        wanted: whether the engine supports this configuration, and is faster for this size.
    """
    if wanted:
        try:
            value = engine()
        except (TypeError, ValueError):
            pass
        else:
            loss.evaluated_by = "engine"
            return value
    loss.evaluated_by = "plain"
    return plain()


def large(rows: Tensor, columns: Tensor, least: int) -> bool:
    """Return whether there are at least ``least`` pairs of a row and a column, or the rows are on an accelerator.

    For fewer pairs on a CPU, calling the engine's operations takes longer than plain code.
    """
    return not rows.is_cpu or rows.shape[0] * columns.shape[0] >= least


def suits_engine(rows: Tensor, temperature: float | Tensor) -> bool:
    """Return whether the engine supports the shape and dtype of rows ``[N, D]``, and the temperature.

    If the temperature is a tensor, it must be 0-dimensional, and its value is read.
    """
    if isinstance(temperature, Tensor):
        scalar = temperature.ndim == 0 and temperature.is_floating_point() and may_read(temperature, validate=True)
        temperature = temperature.item() if scalar else 0.0
    return min(rows.shape) > 0 and rows.is_floating_point() and LOWEST <= temperature <= 1 / LOWEST
