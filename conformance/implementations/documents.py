"""The documents' own functions, written anew so that what they do can be shown: same operations, same order."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from ..suite.cases import Case
from ..suite.records import Outcome, Truth
from ..truth.tolerances import bounds
from .base import Deviation, Implementation, clamped_norms, logits, outcome_of, stacked_order, takes_a_batch_alone


def pair_nt_xent(x: torch.Tensor, temperature: float) -> torch.Tensor:
    """The pair notebook's NT-Xent: interleaved partners of a batch that must have 8 rows."""
    cosines = F.cosine_similarity(x[None], x[:, None], dim=-1)
    cosines = cosines.masked_fill(torch.eye(len(x), dtype=torch.bool, device=x.device), float("-inf"))
    partners = torch.tensor([1, 0, 3, 2, 5, 4, 7, 6], device=x.device)
    return F.cross_entropy(cosines / temperature, partners)


def pair_nt_bxent(x: torch.Tensor, positive_pairs: torch.Tensor, temperature: float) -> torch.Tensor:
    """The pair notebook's NT-BXent: sigmoid first, then binary cross-entropy with its clamp at -100."""
    n = len(x)
    target = torch.eye(n, dtype=x.dtype, device=x.device)
    target[positive_pairs[:, 0], positive_pairs[:, 1]] = 1
    cosines = F.cosine_similarity(x[None], x[:, None], dim=-1)
    cosines = cosines.masked_fill(torch.eye(n, dtype=torch.bool, device=x.device), float("inf"))
    each = F.binary_cross_entropy((cosines / temperature).sigmoid(), target, reduction="none")
    positives = target.sum(dim=1)
    return ((each * target).sum(dim=1) / positives + (each * (1 - target)).sum(dim=1) / (n - positives)).mean()


def stacked_criterion(z_i: torch.Tensor, z_j: torch.Tensor, temperature: float) -> torch.Tensor:
    """SiT's ContrastiveLoss and the vectorized notebook's Criterion: exponentials without a shift, sum over 2N."""
    rows = torch.cat([F.normalize(z_i, dim=1), F.normalize(z_j, dim=1)])
    n = len(rows)
    matrix = F.cosine_similarity(rows[:, None], rows[None], dim=2)
    positives = torch.cat([matrix.diagonal(n // 2), matrix.diagonal(-(n // 2))])
    others = 1 - torch.eye(n, dtype=rows.dtype, device=rows.device)
    denominators = (others * torch.exp(matrix / temperature)).sum(dim=1)
    return -torch.log(torch.exp(positives / temperature) / denominators).sum() / n


def batch_tutorial(x: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
    """The batch tutorial's loss: dot products, the row's maximum detached, epsilon in two places."""
    logits = F.linear(x, x) / temperature
    maximum = logits.max(dim=1, keepdim=True)[0]
    e = torch.exp(logits - maximum.detach()) + 1e-8
    not_self = 1 - torch.eye(len(x), dtype=x.dtype, device=x.device)
    positives = (labels[:, None] == labels[None]) * not_self
    each = -torch.log(e / (e * not_self).sum(dim=1, keepdim=True))
    return ((each * positives).sum(dim=1) / (positives.sum(dim=1) + 1e-8)).mean()


def run_in_float32(case: Case) -> float:
    """What the pair notebook's own functions print for a case on this machine."""
    x = torch.tensor(case.embeddings, dtype=torch.float32)
    temperature = float(case.option("temperature"))
    if case.loss == "nt_xent":
        return float(pair_nt_xent(x, temperature))
    return float(pair_nt_bxent(x, torch.tensor(case.arguments["positive_pairs"], dtype=torch.int64), temperature))


class _Document(Implementation):
    """A function that takes the embeddings, a target and the temperature, and nothing else."""

    losses: ClassVar[tuple[str, ...]]

    def version(self) -> str:
        """Written from the document."""
        return f"as the document prints it, torch {torch.__version__}"

    def refuses(self, case: Case) -> str | None:
        """What the document's function cannot be asked."""
        if case.loss not in self.losses:
            return f"has no {case.loss}"
        alone = takes_a_batch_alone(case)
        if alone is not None:
            return alone
        for option in ("anchors", "base_temperature"):
            if case.option(option) is not None:
                return f"has no {option}"
        if case.option("reduction") != "mean":
            return f"has no reduction {case.option('reduction')}"
        return self.also_refuses(case)

    def also_refuses(self, case: Case) -> str | None:
        """What this one in particular cannot be asked."""
        return "normalises its rows" if case.option("similarity") != "cosine" else None


def _cancels(case: Case, dtype: str, true: Truth) -> bool:
    """Whether a sigmoid taken first, in this dtype, moves the loss or the gradient by more than its bound."""
    number, allowed = np.dtype(dtype).type, bounds(case, true, dtype)
    diagonal = np.eye(case.n, dtype=bool)
    s = logits(case).astype(number)
    positive = np.array(case.positive_mask()) | diagonal
    counts = np.where(positive, positive.sum(axis=1)[:, None], np.maximum((~positive).sum(axis=1), 1)[:, None])
    with np.errstate(all="ignore"):
        sigmoid = 1 / (1 + np.exp(-s))
        taken = -np.maximum(np.where(positive, np.log(sigmoid), np.log1p(-sigmoid)), -100)
    proper = np.logaddexp(0, np.where(positive, -s, s).astype(np.float64))
    if abs((np.where(diagonal, 0, taken - proper) / counts).sum() / case.n) > allowed.values[0]:
        return True
    # Backwards, binary cross-entropy divides by sigmoid (1 - sigmoid), but by no less than 1e-12: a pair far on the
    # wrong side loses its pull, and rows whose pull is lost show it.
    wrong = ~diagonal & np.where(positive, s < 0, s > 0)
    lost = np.where(wrong, 1 - np.minimum((sigmoid * (1 - sigmoid)).astype(np.float64) / 1e-12, 1), 0)
    weights = lost * np.where(positive, -1, 1) / counts / (case.n * float(case.option("temperature")))
    norms = np.array([[math.hypot(*row)] for row in case.embeddings.tolist()])
    unit = case.embeddings / norms
    pull = (weights + weights.T) @ unit
    missing = (pull - (pull * unit).sum(axis=1, keepdims=True) * unit) / norms
    return bool((np.linalg.norm(missing, axis=1) > allowed.rows).any())


class PairNotebook(_Document):
    """The pair notebook's two functions."""

    name: ClassVar[str] = "pair-notebook"
    title: ClassVar[str] = "the pair notebook's nt_xent_loss and nt_bxent_loss"
    losses: ClassVar[tuple[str, ...]] = ("nt_xent", "nt_bxent")
    deviations: ClassVar[tuple[Deviation, ...]] = (
        clamped_norms(1e-8, "cosine_similarity"),
        Deviation(
            name="1 - sigmoid cancels",
            applies=lambda case, dtype, true: case.loss == "nt_bxent" and _cancels(case, dtype, true),
            reason="1 - sigmoid(s) keeps fewer and fewer digits, and none once the sigmoid rounds to 1, where the"
            " logarithm is clamped at -100: 62.8988 is printed for 48.2864",
            link="https://github.com/pytorch/pytorch/issues/49844",
            wrong=True,
        ),
    )

    def also_refuses(self, case: Case) -> str | None:
        """NT-Xent's targets are written out for 8 interleaved rows."""
        if case.loss == "nt_xent" and list(case.arguments["partners"]) != [1, 0, 3, 2, 5, 4, 7, 6]:
            return "nt_xent_loss is written for 8 interleaved rows"
        if case.loss == "nt_bxent" and any(len(p) == case.n - 1 for p in case.positives()):
            return "nt_bxent_loss divides by the number of negatives of every row"
        return super().also_refuses(case)

    def evaluate(self, case: Case, dtype: str) -> Outcome:
        """Value and gradient."""
        x = self.tensor(case, dtype)
        temperature = float(case.option("temperature"))
        if case.loss == "nt_xent":
            return outcome_of(pair_nt_xent(x, temperature), x)
        pairs = torch.tensor(case.arguments["positive_pairs"], dtype=torch.int64, device=self.device).reshape(-1, 2)
        return outcome_of(pair_nt_bxent(x, pairs, temperature), x)


class StackedCriterion(_Document):
    """SiT's and the vectorized notebook's criterion, which are one."""

    name: ClassVar[str] = "stacked-criterion"
    title: ClassVar[str] = "SiT's ContrastiveLoss and the vectorized notebook's Criterion"
    losses: ClassVar[tuple[str, ...]] = ("nt_xent",)
    deviations: ClassVar[tuple[Deviation, ...]] = (
        clamped_norms(1e-12),
        Deviation(
            name="exponentials overflow",
            applies=lambda case, dtype, true: _overflows(case, dtype),
            reason="exponentiates without subtracting a maximum: float32 overflows below a temperature of about 1/88",
            link="https://github.com/Sara-Ahmed/SiT",
            wrong=True,
        ),
    )

    def evaluate(self, case: Case, dtype: str) -> Outcome:
        """Value and gradient, the rows put in stacked order."""
        x = self.tensor(case, dtype)
        first, second = x[torch.as_tensor(stacked_order(case), device=self.device)].chunk(2)
        return outcome_of(stacked_criterion(first, second, float(case.option("temperature"))), x)


def _overflows(case: Case, dtype: str) -> bool:
    return bool(logits(case).max() > (709.78 if dtype == "float64" else 88.72))


class BatchTutorial(_Document):
    """The batch tutorial's loss."""

    name: ClassVar[str] = "batch-tutorial"
    title: ClassVar[str] = "the batch tutorial's ContrastiveLoss"
    losses: ClassVar[tuple[str, ...]] = ("supcon_epsilon",)
    deviations: ClassVar[tuple[Deviation, ...]] = (
        Deviation(
            name="the maximum is detached",
            applies=lambda case, dtype, true: _detaching_shows(case, dtype, true),
            reason="no gradient flows through the row's maximum, though the epsilon makes the loss depend on it",
            link="https://github.com/KevinMusgrave/pytorch-metric-learning/issues/282",
            wrong=True,
        ),
    )

    def also_refuses(self, case: Case) -> str | None:
        """It takes labels and dot products, and has no policies."""
        if case.option("similarity") != "dot":
            return "never normalises"
        if "labels" not in case.arguments:
            return "takes labels only"
        return None if case.option("no_positive") == "zero" else "has no policy for anchors without positive"

    def evaluate(self, case: Case, dtype: str) -> Outcome:
        """Value and gradient."""
        x = self.tensor(case, dtype)
        return outcome_of(_tutorial(case, x), x)


def _tutorial(case: Case, x: torch.Tensor) -> torch.Tensor:
    labels = torch.tensor(case.arguments["labels"], dtype=torch.int64, device=x.device)
    return batch_tutorial(x, labels, float(case.option("temperature")))


def _detaching_shows(case: Case, dtype: str, true: Truth) -> bool:
    """Whether the derivative past a detached maximum is off the true one by more than its bound."""
    if true.gradient is None:
        return False
    x = torch.tensor(case.embeddings, dtype=torch.float64, requires_grad=True)
    (detached,) = torch.autograd.grad(_tutorial(case, x), x)
    errors = np.linalg.norm(detached.numpy() - true.gradient, axis=1)
    return bool((errors > bounds(case, true, dtype).rows).any())


DOCUMENTS: tuple[type[Implementation], ...] = (PairNotebook, StackedCriterion, BatchTutorial)
