"""The reference itself: its loops in float64, its gradient by the complex step."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

import pairproof

from ..suite.cases import Case, call_reference
from ..suite.records import Outcome
from ..truth.evaluate import PROVE_UP_TO
from .base import Implementation, Support

STEP = {"cosine": 1e-120, "dot": 1e-200}
"""The complex step, in units of the largest entry of a row: its square, and so the truncation error, underflows to 0.
The larger step for cosines keeps the digits of gradients down to 1e-160; dot products need the smaller one."""

LARGEST = 70
"""Largest size of a case on which the loops run."""

TOO_SLOW = f"its loops take seconds above {LARGEST} rows; they run when the fixtures are rebuilt"


class Reference(Implementation):
    """The slow loops of ``reference/``."""

    name = "reference"
    title = "pairproof.reference, loops in float64, gradient by the complex step"
    support = Support(also=((TOO_SLOW, lambda case: case.size > LARGEST),))
    dtypes = ("float64",)

    def version(self) -> str:
        """The package's version."""
        return pairproof.__version__

    def evaluate(self, case: Case, dtype: str) -> Outcome:
        """Run the loops on floats for the values and terms, and on complex directions for the gradients."""
        result = call_reference(case)
        values = np.ravel(result.loss).astype(float).tolist()
        anchors = {i: float(v) for i, v in result.terms.anchor_losses.items()}
        gradients = complex_step(case) if case.size <= PROVE_UP_TO else {}
        return Outcome(values, gradients.pop(case.first, None), anchors, result.terms, gradients)


def complex_step(case: Case) -> dict[str, npt.NDArray[np.float64]]:
    """Gradient of the reference by every matrix: the imaginary part of the loss at z + i STEP e_k, divided by STEP."""
    exact = np.concatenate(list(case.matrices.values()))
    rows = np.empty(exact.shape, dtype=object)
    largest = np.abs(exact).max(axis=1, keepdims=True)
    steps = np.broadcast_to(np.maximum(STEP[case.option("similarity")] * largest, 1e-300), exact.shape)
    for k, place in enumerate(np.ndindex(exact.shape)):
        # Each scalar is an array over all directions, so that one run of the loops differentiates by every entry.
        rows[place] = np.full(exact.size, complex(exact[place]))
        rows[place][k] += complex(0, steps[place])
    ends = np.cumsum([len(matrix) for matrix in case.matrices.values()])[:-1]
    loss: Any = call_reference(case, dict(zip(case.matrices, np.split(rows, ends), strict=True))).loss
    total = sum(loss) if isinstance(loss, list) else loss
    imaginary = np.broadcast_to(np.imag(total), exact.size).reshape(exact.shape)
    return dict(zip(case.matrices, np.split(np.asarray(imaginary / steps), ends), strict=True))
