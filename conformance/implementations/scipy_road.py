"""The second road of ``reference/``: whole arrays with scipy, as the notebooks write them, held against every case."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import scipy

from pairproof.reference import scipy_losses

from ..suite.cases import Case
from ..suite.records import Outcome
from .base import Implementation


class ScipyRoad(Implementation):
    """``reference/scipy_losses.py``: values and no gradient, by a formula that shares nothing with the loops."""

    name: ClassVar[str] = "scipy"
    title: ClassVar[str] = "pairproof.reference.scipy_losses, whole arrays in float64, values only"
    dtypes: ClassVar[tuple[str, ...]] = ("float64",)

    def version(self) -> str:
        """The versions of scipy and numpy."""
        return f"scipy {scipy.__version__}, numpy {np.__version__}"

    def refuses(self, case: Case) -> str | None:
        """Losses that are not written in scipy."""
        return None if hasattr(scipy_losses, case.entry.function) else f"has no {case.loss}"

    def evaluate(self, case: Case, dtype: str) -> Outcome:
        """The value, and every anchor's."""
        given: dict[str, Any] = {**case.arguments, **case.keywords}
        function = getattr(scipy_losses, case.entry.function)
        found: scipy_losses.Values = function(**case.matrices, **given)
        return Outcome(
            values=np.ravel(found.loss).tolist(),
            anchors=dict(zip(case.anchors(), found.anchors.tolist(), strict=True)),
        )
