"""What the drop-in replacements share."""

from __future__ import annotations

from numbers import Real
from typing import Literal

from torch import Tensor

from ..fast.checks import LOWEST
from ..fast.engine.device import may_read

EvaluatedBy = Literal["engine", "plain"]


def suits_engine(temperature: float | Tensor) -> bool:
    """Return whether the engine has this temperature: a number, or a 0-dimensional tensor, in its range.

    The value of a tensor is read.
    """
    if isinstance(temperature, Tensor):
        scalar = temperature.ndim == 0 and temperature.is_floating_point() and may_read(temperature, validate=True)
        temperature = temperature.item() if scalar else 0.0
    return isinstance(temperature, Real) and LOWEST <= temperature <= 1 / LOWEST
