"""The reference itself, in float64: its loops against their own proof, its gradient by the complex step."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

import pairproof

from ..cases import Case, call_reference
from ..compare import Outcome
from ..oracle import PROVE_UP_TO
from .base import Implementation

STEP = 1e-200
"""The complex step: so small that its square vanishes, and with it the truncation error."""


LARGEST = 70
"""Rows up to which the loops are run."""


class Reference(Implementation):
    """The slow loops of ``reference/``."""

    name: ClassVar[str] = "reference"
    title: ClassVar[str] = "pairproof.reference, loops in float64, gradient by the complex step"
    dtypes: ClassVar[tuple[str, ...]] = ("float64",)

    def version(self) -> str:
        """The package's version."""
        return pairproof.__version__

    def refuses(self, case: Case) -> str | None:
        """Batches on which the loops take seconds."""
        if case.n > LARGEST:
            return f"its loops take seconds above {LARGEST} rows; rebuilding the fixtures runs them"
        return None

    def evaluate(self, case: Case, dtype: str) -> Outcome:
        """Run the loops once on floats for the values and terms, once on complex directions for the gradient."""
        result = call_reference(case)
        values = result.loss if isinstance(result.loss, list) else [result.loss]
        return Outcome(
            values=[float(v) for v in values],
            gradient=complex_step(case) if case.n <= PROVE_UP_TO else None,
            anchors={i: float(v) for i, v in result.terms.anchor_losses.items()},
            terms=result.terms,
        )


def complex_step(case: Case) -> npt.NDArray[np.float64]:
    """Gradient [N, D] of the reference: the imaginary part of the loss at z + i STEP e_k, over STEP, for every k."""
    n, dim = case.embeddings.shape
    rows = np.empty((n, dim), dtype=object)
    steps = STEP * np.maximum(np.abs(case.embeddings), 1e-100)
    for k, (i, d) in enumerate(np.ndindex(n, dim)):
        # One scalar is an array over all N D directions: one run of the loops differentiates by every entry.
        scalar = np.full(n * dim, complex(case.embeddings[i, d]))
        scalar[k] += complex(0, steps[i, d])
        rows[i, d] = scalar
    loss: Any = call_reference(case, rows).loss
    total = sum(loss) if isinstance(loss, list) else loss
    imaginary = np.broadcast_to(np.imag(total), n * dim).reshape(n, dim)
    return np.asarray(imaginary / steps)
