"""The losses of ``reference/scipy_losses.py``: an independent evaluation on whole arrays with scipy."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import scipy

from ..suite.cases import Case, called
from ..suite.records import Outcome
from .base import Implementation


class ScipyLosses(Implementation):
    """Values without gradients. The code shares nothing with the loops of the reference."""

    name = "scipy"
    title = "pairproof.reference.scipy_losses, whole arrays in float64, values only"
    dtypes = ("float64",)

    @property
    def formulas(self) -> Any:
        """The module, imported on first use, because its parts of scipy import slowly."""
        return importlib.import_module("pairproof.reference.scipy_losses")

    def version(self) -> str:
        """The versions of scipy and numpy."""
        return f"scipy {scipy.__version__}, numpy {np.__version__}"

    def refuses(self, case: Case) -> str | None:
        """Return the reason to skip a case, if the module lacks its loss."""
        return None if hasattr(self.formulas, case.entry.function) else f"has no {case.loss}"

    def evaluate(self, case: Case, dtype: str) -> Outcome:
        """Evaluate the value of the loss and of every anchor."""
        given: dict[str, Any] = {**case.matrices, **case.arguments, **case.keywords}
        found = getattr(self.formulas, case.entry.function)(**called(given))
        anchors = dict(zip(case.anchors(), found.anchors.tolist(), strict=True))
        return Outcome(np.ravel(found.loss).tolist(), anchors=anchors)
