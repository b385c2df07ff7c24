"""The reference itself: its loops in float64, its gradient by the complex step."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

import pairproof

from ..suite.cases import Case, call_reference
from ..suite.records import Outcome
from ..truth.evaluate import PROVE_UP_TO
from .base import Implementation, Support, logits

STEP = 1e-9
"""The complex step, relative to the largest entry of a row and divided by the largest logit.

The relative truncation error is about the square of this number. A larger step has a larger truncation error; with a
smaller one, the product of the step and a small gradient underflows."""

AT_ONCE = 512
"""One run of the loops computes the derivatives for at most this many entries, or for one row if it has more."""

LARGEST = 70
"""Largest ``Case.size`` for which the loops run; its square is the number of similarities."""

TOO_SLOW = f"its loops take seconds above {LARGEST}² similarities; they run when the fixtures are rebuilt"


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
        """Run the loops on floats for the values and terms, and on complex numbers for the gradients.

        There are no gradients if ``case.size`` exceeds ``PROVE_UP_TO``.
        """
        result = call_reference(case)
        values = np.ravel(result.loss).astype(float).tolist()
        anchors = {i: float(v) for i, v in result.terms.anchor_losses.items()}
        gradients = complex_step(case) if case.size <= PROVE_UP_TO else {}
        return Outcome(values, gradients.pop(case.first, None), anchors, result.terms, gradients)


def complex_step(case: Case) -> dict[str, npt.NDArray[np.float64]]:
    """Return the gradient of the reference with respect to every matrix, by name.

    Entry k of the gradient is Im(L(z + i h e_k)) / h. L is the loss; for reduction "none", the sum of its values. The
    step h is ``STEP`` times the largest entry of the row, divided by the largest logit if that exceeds 1.
    """
    exact = np.concatenate(list(case.matrices.values()))
    largest = np.abs(exact).max(axis=1, keepdims=True)
    # STEP / the largest logit may be subnormal, which some processes flush to 0.
    steps = STEP * np.where(largest > 0, largest, largest.max() or 1.0) / max(1.0, float(np.abs(logits(case)).max()))
    steps = np.broadcast_to(steps, exact.shape)
    # Cosines are not differentiable at a row of zeros. By convention its gradient is 0, so it takes no step.
    taken = steps * ((largest > 0) | (case.option("similarity") == "dot"))
    ends = np.cumsum([len(matrix) for matrix in case.matrices.values()])[:-1]
    found = np.empty(exact.shape)
    height = max(1, AT_ONCE // exact.shape[1])
    for start in range(0, len(exact), height):
        block, step = exact[start : start + height], taken[start : start + height]
        # Each scalar of the block is an array with one element per entry of the block, so one run of the loops
        # differentiates with respect to all of them. Scalars of other rows are complex numbers.
        moved = np.repeat(block.reshape(-1, 1).astype(complex), block.size, axis=1)
        np.fill_diagonal(moved, (block + 1j * step).ravel())
        scalars = exact.ravel().astype(complex).tolist()
        first = start * exact.shape[1]
        scalars[first : first + block.size] = moved
        rows = np.empty(exact.shape, dtype=object)
        for k, scalar in enumerate(scalars):
            rows.flat[k] = scalar
        loss: Any = call_reference(case, dict(zip(case.matrices, np.split(rows, ends), strict=True))).loss
        total = sum(loss) if isinstance(loss, list) else loss
        imaginary = np.broadcast_to(np.imag(total), block.size).reshape(block.shape)
        found[start : start + height] = imaginary / steps[start : start + height]
    return dict(zip(case.matrices, np.split(found, ends), strict=True))
