"""optax's ``ntxent`` on JAX: nt_xent and nt_xent_pairwise by labels, averaged over positive pairs.

It runs in its own process (``optax_lines.py``), which starts with the first case and ends with the adapter.
"""

from __future__ import annotations

import importlib.util
import math
import shlex
import sys
import weakref
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from pairproof import install_command

from ..suite.cases import Case
from ..suite.records import Outcome, Truth
from .base import Implementation, Support, Unavailable, deviation, labels_of, logits, norms_out_of_range
from .subprocess import Lines

LINK = "https://github.com/google-deepmind/optax/blob/v0.2.8/optax/losses/_self_supervised.py"
NORM_LINK = "https://github.com/google-deepmind/optax/blob/v0.2.8/optax/losses/_regression.py"

# -P keeps this folder off sys.path, where subprocess.py would shadow the standard library's.
COMMAND = shlex.join([sys.executable, "-P", str(Path(__file__).with_name("optax_lines.py"))])
LIMIT = 120.0
"""Time limit of an answer in seconds; the first answer includes the import of JAX."""


@deviation("mean over pairs", LINK, losses=("nt_xent_pairwise",))
def averages_differ(case: Case, dtype: str, true: Truth) -> bool:
    """Whether the mean over pairs differs from the mean over the means of the anchors.

    optax averages over all positive pairs, not over the means of the anchors: the two differ for classes of different
    sizes.
    """
    if case.option("reduction") != "mean" or not any(case.positives()):
        return False
    drops = case.option("no_positive") == "drop"
    sizes = {len(found) for found in case.positives() if found or not drops}
    return len(sizes) > 1 and max(true.anchors.values()) > 0


@deviation("NaN without positives", LINK, wrong=True)
def nan_without_positives(case: Case, dtype: str, true: Truth) -> bool:
    """The loss is divided by the number of positive pairs, which is 0."""
    return not any(case.positives())


@deviation("the denominator underflows", LINK, wrong=True)
def denominator_underflows(case: Case, dtype: str, true: Truth) -> bool:
    """Whether the exponentials of all negatives of an anchor underflow once the row's maximum is subtracted.

    For an anchor without negatives: whether that of its lowest positive underflows.

    The maximum of a row includes its positives. If all negatives lie far below it, their sum is 0 and the gradient is
    NaN. If a positive also lies far below it, the loss is -inf.
    """
    found, own = logits(case), np.eye(case.n, dtype=bool)
    positive = np.array(case.positive_mask()) & ~own
    negative = ~positive & ~own
    found[own] = -np.inf
    depth = found.max(axis=1, keepdims=True, initial=np.finfo(np.float64).min) - found  # no NaN for a single row
    negatives = np.where(negative, depth, np.inf).min(axis=1)
    deepest = np.where(negative.any(axis=1), negatives, np.where(positive, depth, 0).max(axis=1))
    return bool(deepest.max() > -math.log(np.finfo(dtype).tiny))


@deviation("labels have 32 bits", "https://docs.jax.dev/en/latest/default_dtypes.html")
def labels_wrap(case: Case, dtype: str, true: Truth) -> bool:
    """Whether converting the labels to int32 changes the classes; checks in float64 keep int64.

    JAX converts integers to 32 bits unless its 64-bit mode is on. Labels that differ by a multiple of 2^32 become one
    class.
    """
    labels = np.array(case.arguments.get("labels", ()), dtype=np.int64)
    kept = labels if dtype == "float64" else labels.astype(np.int32)
    return not np.array_equal(kept[:, None] == kept, labels[:, None] == labels)


@deviation("norms are clamped", NORM_LINK)
def norms_are_clamped(case: Case, dtype: str, true: Truth) -> bool:
    """Whether the square of some norm is below finfo.eps or out of the dtype's range.

    The square of a norm is clamped at finfo.eps, so rows with a norm below 3.5e-4 in float32, or 1.5e-8 in float64, do
    not get norm 1. The square may also be out of the dtype's range.
    """
    return norms_out_of_range(case, dtype, math.sqrt(np.finfo(dtype).eps))


class Optax(Implementation):
    """``optax.losses.ntxent``."""

    name = "optax"
    title = "optax's ntxent on JAX, on the CPU in its own process"
    support = Support(
        losses=("nt_xent", "nt_xent_pairwise"),
        options={"similarity": ("cosine",), "reduction": ("mean", "mean_pairs"), "no_positive": ("zero", "drop")},
        lacks=("ref_embeddings", "anchors", "base_temperature", "positives"),
    )
    deviations = (averages_differ, nan_without_positives, denominator_underflows, labels_wrap, norms_are_clamped)

    def load(self, options: Mapping[str, str]) -> None:
        """Check that JAX and optax are installed, without importing them."""
        for package in ("jax", "optax"):
            if importlib.util.find_spec(package) is None:
                raise Unavailable(f"{package} is not installed: {install_command('peers')}")
        self._lines = Lines(COMMAND)
        weakref.finalize(self, self._lines.close)

    def version(self) -> str:
        """The packages' versions."""
        return f"{version('optax')}, jax {version('jax')}"

    def evaluate(self, case: Case, dtype: str) -> Outcome:
        """Evaluate ``ntxent`` and its gradient."""
        rows, (labels, _) = case.embeddings.tolist(), labels_of(case)
        request: dict[str, Any] = {"loss": case.loss, "dtype": dtype, "options": {"temperature": case.temperature}}
        request |= {"matrices": {"embeddings": rows}, "arguments": {"labels": labels}}
        values, gradients = self._lines.ask(request, 1, LIMIT)
        return Outcome(values, np.array(gradients["embeddings"]))
