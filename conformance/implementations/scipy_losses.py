"""``reference/scipy_losses.py``: an independent evaluation on whole arrays with scipy, like the notebooks."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy

from pairproof.reference import scipy_losses

from ..suite.cases import Case
from ..suite.catalogue import LOSSES
from ..suite.records import Outcome
from .base import Implementation, Support


class ScipyLosses(Implementation):
    """Values without gradients, by code that shares nothing with the loops of the reference."""

    name = "scipy"
    title = "pairproof.reference.scipy_losses, whole arrays in float64, values only"
    support = Support(losses=tuple(loss.name for loss in LOSSES.values() if hasattr(scipy_losses, loss.function)))
    dtypes = ("float64",)

    def version(self) -> str:
        """The versions of scipy and numpy."""
        return f"scipy {scipy.__version__}, numpy {np.__version__}"

    def evaluate(self, case: Case, dtype: str) -> Outcome:
        """Evaluate the value, and the value of every anchor."""
        given: dict[str, Any] = {**case.matrices, **case.arguments, **case.keywords}
        found: scipy_losses.Values = getattr(scipy_losses, case.entry.function)(**given)
        anchors = dict(zip(case.anchors(), found.anchors.tolist(), strict=True))
        return Outcome(np.ravel(found.loss).tolist(), anchors=anchors)
