"""Losses published in notebooks, tutorials and repositories, rewritten with the same operations in the same order.

The links are in ``fixtures/worked``, one file per document, such as ``pair_notebook.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from ..suite.cases import Case
from ..suite.records import Truth
from ..truth.tolerances import bounds
from . import base
from .base import Support, TorchImplementation

EIGHT = [1, 0, 3, 2, 5, 4, 7, 6]
"""The partners that the pair notebook hard-codes."""

ROWS = ("nt_xent_loss requires 8 interleaved rows", lambda case: [*case.arguments.get("partners", EIGHT)] != EIGHT)
NEGATIVES = (
    "nt_bxent_loss divides by the number of negatives, which must not be 0",
    lambda case: case.n - 1 in case.positive_counts(),
)
LARGEST = 4_000_000
"""Largest N N D: cosine_similarity builds matrices of this size, up to 0.5 GB each for the golden cases above it."""

FITS = ("builds N x N x D matrices that are too large", lambda case: case.n**2 * case.embeddings.shape[1] > LARGEST)


def pair_nt_xent(x: torch.Tensor, temperature: float) -> torch.Tensor:
    """The pair notebook's NT-Xent, for 8 rows with interleaved partners."""
    cosines = F.cosine_similarity(x[None], x[:, None], dim=-1).fill_diagonal_(float("-inf"))
    return F.cross_entropy(cosines / temperature, torch.tensor(EIGHT, device=x.device))


def pair_nt_bxent(x: torch.Tensor, positive_pairs: torch.Tensor, temperature: float) -> torch.Tensor:
    """The pair notebook's NT-BXent: a sigmoid, then binary cross-entropy, which clamps logarithms at -100."""
    n = len(x)
    target = torch.eye(n, dtype=x.dtype, device=x.device)
    target[positive_pairs[:, 0], positive_pairs[:, 1]] = 1
    cosines = F.cosine_similarity(x[None], x[:, None], dim=-1).fill_diagonal_(float("inf"))
    each = F.binary_cross_entropy((cosines / temperature).sigmoid(), target, reduction="none")
    positives = target.sum(dim=1)
    return ((each * target).sum(dim=1) / positives + (each * (1 - target)).sum(dim=1) / (n - positives)).mean()


def stacked_criterion(z_i: torch.Tensor, z_j: torch.Tensor, temperature: float) -> torch.Tensor:
    """SiT's ContrastiveLoss and the vectorized notebook's Criterion. No maximum is subtracted before exp."""
    rows = torch.cat([F.normalize(z_i, dim=1), F.normalize(z_j, dim=1)])
    n = len(rows)
    matrix = F.cosine_similarity(rows[:, None], rows[None], dim=2)
    positives = torch.cat([matrix.diagonal(n // 2), matrix.diagonal(-(n // 2))])
    others = 1 - torch.eye(n, dtype=rows.dtype, device=rows.device)
    denominators = (others * torch.exp(matrix / temperature)).sum(dim=1)
    return -torch.log(torch.exp(positives / temperature) / denominators).sum() / n


def batch_tutorial(x: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
    """The batch tutorial's loss of dot products, with a detached maximum and an epsilon in two places."""
    logits = F.linear(x, x) / temperature
    maximum = logits.max(dim=1, keepdim=True)[0]
    e = torch.exp(logits - maximum.detach()) + 1e-8
    not_self = 1 - torch.eye(len(x), dtype=x.dtype, device=x.device)
    positives = (labels[:, None] == labels[None]) * not_self
    each = -torch.log(e / (e * not_self).sum(dim=1, keepdim=True))
    return ((each * positives).sum(dim=1) / (positives.sum(dim=1) + 1e-8)).mean()


def pair_notebook(case: Case, x: torch.Tensor) -> torch.Tensor:
    """Evaluate a case of nt_xent or nt_bxent with the pair notebook's function."""
    if "partners" in case.arguments:
        return pair_nt_xent(x, case.temperature)
    pairs = torch.tensor(case.arguments["positive_pairs"], dtype=torch.int64, device=x.device).reshape(-1, 2)
    return pair_nt_bxent(x, pairs, case.temperature)


class _Document(TorchImplementation):
    def version(self) -> str:
        return f"as the document prints it, torch {torch.__version__}"


SUPPORT = Support(
    options={"similarity": ("cosine",), "reduction": ("mean",)}, lacks=("ref_embeddings", "anchors", "base_temperature")
)


CANCELS = "https://github.com/pytorch/pytorch/issues/49844"


@base.deviation("1 - sigmoid cancels", CANCELS, wrong=True, losses=("nt_bxent",))
def sigmoid_cancels(case: Case, dtype: str, true: Truth) -> bool:
    """Whether computing the sigmoid first, in this dtype, changes the loss or the gradient by more than its bound.

    1 - sigmoid(s) loses digits as s grows. Once the sigmoid rounds to 1, the logarithm is clamped at -100: the notebook
    prints 62.8988 instead of 48.2864.
    """
    number, allowed = np.dtype(dtype).type, bounds(case, true, dtype)
    diagonal = np.eye(case.n, dtype=bool)
    s = base.logits(case).astype(number)
    positive = np.array(case.positive_mask()) | diagonal
    counts = np.where(positive, positive.sum(axis=1)[:, None], np.maximum((~positive).sum(axis=1), 1)[:, None])
    with np.errstate(all="ignore"):
        sigmoid = 1 / (1 + np.exp(-s))
        taken = -np.maximum(np.where(positive, np.log(sigmoid), np.log1p(-sigmoid)), -100)
    proper = np.logaddexp(0, np.where(positive, -s, s).astype(np.float64))
    if abs((np.where(diagonal, 0, taken - proper) / counts).sum() / case.n) > allowed.values[0]:
        return True
    # The backward pass divides by max(sigmoid * (1 - sigmoid), 1e-12). So positives with very low logits, and negatives
    # with very high ones, lose their gradients.
    wrong = ~diagonal & np.where(positive, s < 0, s > 0)
    lost = np.where(wrong, 1 - np.minimum((sigmoid * (1 - sigmoid)).astype(np.float64) / 1e-12, 1), 0)
    weights = lost * np.where(positive, -1, 1) / counts / (case.n * case.temperature)
    return base.exceeds(base.gradient_of(case, weights + weights.T), allowed.rows[case.first])


class PairNotebook(_Document):
    """The pair notebook's two functions."""

    name = "pair-notebook"
    title = "the pair notebook's nt_xent_loss and nt_bxent_loss"
    support = replace(SUPPORT, losses=("nt_xent", "nt_bxent"), also=(FITS, ROWS, NEGATIVES))
    deviations = (base.clamped_norms(1e-8, "cosine_similarity"), sigmoid_cancels)

    def value(self, case: Case, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Evaluate the notebook's function."""
        return pair_notebook(case, given[case.first])


@base.deviation("exponentials overflow", "https://github.com/Sara-Ahmed/SiT", wrong=True)
def exponentials_overflow(case: Case, dtype: str, true: Truth) -> bool:
    """Whether the exponential of a logit, or a denominator divided by its numerator, overflows in the dtype.

    No maximum is subtracted before exp. In float32, the loss overflows at temperatures below about 1/88, and the
    gradient below about 1/44.
    """
    largest = 709.78 if dtype == "float64" else 88.72
    return bool(max(base.logits(case).max(), *true.anchors.values()) > largest)


class StackedCriterion(_Document):
    """The criterion of SiT, which is also that of the vectorized notebook."""

    name = "stacked-criterion"
    title = "SiT's ContrastiveLoss, the vectorized notebook's Criterion"
    support = replace(SUPPORT, losses=("nt_xent",), also=(FITS,))
    deviations = (base.clamped_norms(1e-12), exponentials_overflow)

    def value(self, case: Case, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Evaluate the criterion on the two views."""
        first, second = base.stacked_views(case, given[case.first])
        return stacked_criterion(first, second, case.temperature)


DETACHED = "https://github.com/KevinMusgrave/pytorch-metric-learning/issues/282"


@base.deviation("the maximum is detached", DETACHED, wrong=True)
def maximum_is_detached(case: Case, dtype: str, true: Truth) -> bool:
    """Whether the tutorial's loss, evaluated in float64, differs from the proved results by more than the bounds.

    The row's maximum is detached, although the epsilon makes the loss depend on it.
    """
    labels = torch.tensor(case.arguments["labels"])
    return base.differs(lambda x: batch_tutorial(x, labels, case.temperature), case, dtype, true)


class BatchTutorial(_Document):
    """The batch tutorial's loss."""

    name = "batch-tutorial"
    title = "the batch tutorial's ContrastiveLoss"
    support = Support(
        losses=("supcon_epsilon",),
        options={"similarity": ("dot",), "reduction": ("mean",), "no_positive": ("zero",)},
        lacks=(*SUPPORT.lacks, "positives"),
    )
    deviations = (maximum_is_detached,)

    def value(self, case: Case, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Evaluate the loss on the labels of the case."""
        return batch_tutorial(given[case.first], self.arrays(case)["labels"], case.temperature)
