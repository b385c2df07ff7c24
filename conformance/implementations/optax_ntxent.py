"""optax's ``ntxent`` on JAX, live: both readings of NT-Xent, by labels, averaged over positive pairs.

It runs in a process of its own (``optax_lines.py`` says why), which is started with the first case and ends with ours.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shlex
import sys
import weakref
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import numpy as np

from ..suite.cases import Case
from ..suite.records import Outcome, Truth
from .base import Implementation, Support, Unavailable, deviation, labels_of, logits, norms_out_of_range
from .subprocess import Lines

LINK = "https://github.com/google-deepmind/optax/blob/v0.2.8/optax/losses/_self_supervised.py"
NORM_LINK = "https://github.com/google-deepmind/optax/blob/v0.2.8/optax/losses/_regression.py"

# -P keeps this folder off sys.path, where its subprocess.py would hide Python's.
COMMAND = shlex.join([sys.executable, "-P", str(Path(__file__).with_name("optax_lines.py"))])
LIMIT = 120.0
"""Seconds for an answer, the import of JAX included."""


@deviation("mean over pairs", LINK, losses=("nt_xent_pairwise",))
def averages_differ(case: Case, dtype: str, true: Truth) -> bool:
    """Whether the mean over pairs is not the mean of the anchors' means.

    averages over positive pairs, not over each anchor's mean: unbalanced classes differ.
    """
    if case.option("reduction") != "mean" or not any(case.positives()):
        return False
    drops = case.option("no_positive") == "drop"
    sizes = {len(found) for found in case.positives() if found or not drops}
    return len(sizes) > 1 and max(true.anchors.values()) > 0


@deviation("NaN without positives", LINK, wrong=True)
def nan_without_positives(case: Case, dtype: str, true: Truth) -> bool:
    """Whether no anchor has a positive.

    divides by the number of positive pairs, which is 0.
    """
    return not any(case.positives())


@deviation("the denominator underflows", LINK, wrong=True)
def denominator_underflows(case: Case, dtype: str, true: Truth) -> bool:
    """Whether every exponential of some denominator is 0 once its row's maximum is subtracted.

    A denominator with negatives is also divided by for pairs that are not positive, where 0 makes the gradient NaN.
    Without negatives that is masked, and only a positive that lies as low is lost.

    one maximum per row, over the positives too: where it lies far above all negatives their sum is 0; the gradient is
    NaN, and the loss -inf if another positive lies as low.
    """
    found, own = logits(case), np.eye(case.n, dtype=bool)
    positive = np.array(case.positive_mask()) & ~own
    negative = ~positive & ~own
    found[own] = -np.inf
    depth = found.max(axis=1, keepdims=True) - found
    negatives = np.where(negative, depth, np.inf).min(axis=1)
    deepest = np.where(negative.any(axis=1), negatives, np.where(positive, depth, 0).max(axis=1))
    return bool(deepest.max() > -math.log(np.finfo(dtype).tiny))


@deviation("labels have 32 bits", "https://docs.jax.dev/en/latest/default_dtypes.html")
def labels_wrap(case: Case, dtype: str, true: Truth) -> bool:
    """Whether labels of 32 bits, which are what JAX has unless it computes in float64, are other classes.

    JAX keeps 32 bits of an integer unless it is set to 64: labels that differ by a multiple of 2^32 become one class.
    """
    labels = np.array(case.arguments.get("labels", ()), dtype=np.int64)
    kept = labels if dtype == "float64" else labels.astype(np.int32)
    return not np.array_equal(kept[:, None] == kept, labels[:, None] == labels)


@deviation("norms are clamped", NORM_LINK)
def norms_are_clamped(case: Case, dtype: str, true: Truth) -> bool:
    """Whether the square of a norm is below finfo.eps, or leaves the dtype's range.

    the square of a norm is clamped at finfo.eps: a row shorter than 3.5e-4 in float32, or 1.5e-8 in float64, is not
    normalised; and that square may leave the dtype's range.
    """
    return norms_out_of_range(case, dtype, math.sqrt(np.finfo(dtype).eps))


class Optax(Implementation):
    """``optax.losses.ntxent``."""

    name = "optax"
    title = "optax's ntxent on JAX, live on the CPU in a process of its own"
    support = Support(
        losses=("nt_xent", "nt_xent_pairwise"),
        options={"similarity": ("cosine",), "reduction": ("mean", "mean_pairs"), "no_positive": ("zero", "drop")},
        lacks=("ref_embeddings", "anchors", "base_temperature", "positives"),
    )
    deviations = (averages_differ, nan_without_positives, denominator_underflows, labels_wrap, norms_are_clamped)

    def load(self, options: Mapping[str, str]) -> None:
        """See whether JAX and optax are installed; neither is imported into this process."""
        for package in ("jax", "optax"):
            if importlib.util.find_spec(package) is None:
                raise Unavailable(f'{package} is not installed: pip install "pairproof[peers]"')
        self._lines: dict[int, Lines] = {}

    def version(self) -> str:
        """The packages' versions."""
        return f"{version('optax')}, jax {version('jax')}"

    def evaluate(self, case: Case, dtype: str) -> Outcome:
        """Value and gradient of ``ntxent``, by ``jax.value_and_grad``."""
        labels, _ = labels_of(case)
        request = {
            "loss": case.loss,
            "dtype": dtype,
            "matrices": {"embeddings": case.embeddings.tolist()},
            "arguments": {"labels": labels},
            "options": {"temperature": case.temperature},
        }
        values, gradients = self._process().ask(request, 1, LIMIT)
        return Outcome(values, np.array(gradients["embeddings"]))

    def _process(self) -> Lines:
        """The command, which a forked process must not share with the one that it comes from."""
        owner = os.getpid()
        if owner not in self._lines:
            lines = self._lines[owner] = Lines(COMMAND)
            weakref.finalize(self, _close, lines, owner)
        return self._lines[owner]


def _close(lines: Lines, owner: int) -> None:
    if os.getpid() == owner:
        lines.close()
