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

AT_ONCE = 2048
"""Number of entries by which one run of the loops differentiates; arrays of more directions exceed a core's caches."""

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
    largest = np.abs(exact).max(axis=1, keepdims=True)
    steps = np.broadcast_to(np.maximum(STEP[case.option("similarity")] * largest, 1e-300), exact.shape)
    ends = np.cumsum([len(matrix) for matrix in case.matrices.values()])[:-1]
    found = np.empty(exact.shape)
    height = max(1, AT_ONCE // exact.shape[1])
    for start in range(0, len(exact), height):
        block = exact[start : start + height]
        rows = np.empty(exact.shape, dtype=object)
        for place in np.ndindex(exact.shape):
            # Each scalar is an array over all directions, so that one run of the loops differentiates by every entry of
            # the block. An array with one element, which is broadcast, is enough for the entries of other rows.
            k = (place[0] - start) * exact.shape[1] + place[1]
            rows[place] = np.full(block.size if 0 <= k < block.size else 1, complex(exact[place]))
            if 0 <= k < block.size:
                rows[place][k] += complex(0, steps[place])
        loss: Any = call_reference(case, dict(zip(case.matrices, np.split(rows, ends), strict=True))).loss
        total = sum(loss) if isinstance(loss, list) else loss
        imaginary = np.broadcast_to(np.imag(total), block.size).reshape(block.shape)
        found[start : start + height] = imaginary / steps[start : start + height]
    return dict(zip(case.matrices, np.split(found, ends), strict=True))
