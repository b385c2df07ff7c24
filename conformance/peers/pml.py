"""pytorch-metric-learning, live: ``SupConLoss`` for supcon, ``NTXentLoss`` for both readings of NT-Xent.

Its words translated: a reducer is a reduction, ``AvgNonZeroReducer`` a mean over the anchors with a loss above 0.
``NTXentLoss`` builds a matrix of pairs by pairs; larger cases are refused for it (its issues 547, 203, 604).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from ..cases import Case, call_reference
from ..compare import Outcome
from ..oracle import PROVE_UP_TO, Truth
from ..tolerances import bounds, unit_roundoff
from .base import Deviation, Implementation, Unavailable, lonely, norms_leave, outcome_of

LARGEST_PAIRS = 4_000_000
"""Positive pairs times negative pairs above which NTXentLoss would take gigabytes."""


def _saturates(case: Case, dtype: str) -> bool:
    """Whether some pair's true loss comes within a few units of the largest that the logarithm can give."""
    if case.size > PROVE_UP_TO:
        return False
    largest = max((float(pair.value) for pair in call_reference(case).terms.pairs.values()), default=0.0)
    return largest > -math.log(torch.finfo(getattr(torch, dtype)).tiny) - 8


def _solved_anchors_matter(case: Case, dtype: str, true: Truth) -> bool:
    """Whether leaving out the anchors whose loss rounds to 0 changes the mean, or a gradient, by more than rounding."""
    positives = case.positives()
    values = [value for i, value in true.anchors.items() if positives[i]]
    roundoff = unit_roundoff(dtype)
    left = [value for value in values if value > roundoff]
    if len(left) == len(values):
        return False
    if not left:
        # The loss is 0 to rounding, but a reference that is nobody's positive has a gradient that nothing cancels.
        rows = bounds(case, true, dtype).other_rows
        return any((np.linalg.norm(found, axis=1) > rows[name]).any() for name, found in true.other_gradients.items())
    return sum(values) / len(left) - sum(values) / len(values) > 4 * roundoff


def _sum_overflows(dtype: str, true: Truth) -> bool:
    """Whether the sum of the anchors' values is too large for the dtype, though their mean is not."""
    return sum(true.anchors.values()) > torch.finfo(getattr(torch, dtype)).max


def _no_negatives(case: Case) -> bool:
    return all(len(p) == len(members) for p, members in zip(case.positives(), case.members(), strict=True))


def _one_pair_each(case: Case) -> bool:
    """Whether there are no two positive pairs and no two negative pairs, and yet something to lose."""
    positives = sum(map(len, case.positives()))
    return positives == 1 and sum(map(len, case.members())) == 2


def _no_positives(case: Case) -> bool:
    return not any(case.positives())


class PytorchMetricLearning(Implementation):
    """The two losses of pytorch-metric-learning that the notebook compares."""

    name: ClassVar[str] = "pml"
    title: ClassVar[str] = "pytorch-metric-learning, live"
    deviations: ClassVar[tuple[Deviation, ...]] = (
        Deviation(
            name="lonely anchors leave the mean",
            applies=lambda case, dtype, true: (
                case.loss == "supcon"
                and case.option("no_positive") == "zero"
                and lonely(case)
                and any(case.positives())
                and max(true.anchors.values()) > 0
            ),
            reason="SupConLoss averages over the anchors with a loss above 0, so one without positive is not counted",
            link="https://github.com/KevinMusgrave/pytorch-metric-learning/blob/v2.9.0/src/pytorch_metric_learning/reducers/avg_non_zero_reducer.py",
        ),
        Deviation(
            name="mean over pairs",
            applies=lambda case, dtype, true: (
                case.loss == "nt_xent_pairwise"
                and case.option("reduction") == "mean"
                and len({len(p) for p in case.positives()}) > 1
                and not _no_positives(case)
                and not _no_negatives(case)
                and max(true.anchors.values()) > 0
            ),
            reason="NTXentLoss averages over positive pairs, not over each anchor's mean: unbalanced classes differ",
            link="https://github.com/KevinMusgrave/pytorch-metric-learning/issues/6",
        ),
        Deviation(
            name="norms are clamped",
            applies=lambda case, dtype, true: norms_leave(case, dtype, 1e-12),
            reason="CosineSimilarity divides by a norm of at least 1e-12, whose square may leave the dtype's range",
            link="https://pytorch.org/docs/stable/generated/torch.nn.functional.normalize.html",
        ),
        Deviation(
            name="solved anchors leave the mean",
            applies=lambda case, dtype, true: case.loss == "supcon" and _solved_anchors_matter(case, dtype, true),
            reason="an anchor whose loss rounds to 0 is not counted by AvgNonZeroReducer: the mean of the others rises",
            link="https://github.com/KevinMusgrave/pytorch-metric-learning/blob/v2.9.0/src/pytorch_metric_learning/reducers/avg_non_zero_reducer.py",
        ),
        Deviation(
            name="the sum overflows",
            applies=lambda case, dtype, true: case.loss == "supcon" and _sum_overflows(dtype, true),
            reason="the anchors are summed before they are divided by their number",
            link="https://github.com/KevinMusgrave/pytorch-metric-learning/blob/v2.9.0/src/pytorch_metric_learning/reducers/avg_non_zero_reducer.py",
        ),
        Deviation(
            name="saturated logarithm",
            applies=lambda case, dtype, true: case.loss in ("nt_xent", "nt_xent_pairwise") and _saturates(case, dtype),
            reason="NTXentLoss adds finfo.tiny inside its logarithm: no pair costs more than 87.34 in float32 or 708.40"
            " in float64, and its gradient vanishes there",
            link="https://github.com/KevinMusgrave/pytorch-metric-learning/blob/v2.9.0/src/pytorch_metric_learning/losses/ntxent_loss.py",
        ),
        Deviation(
            name="no negatives, no loss",
            applies=lambda case, dtype, true: (
                case.loss == "supcon" and any(len(p) > 1 for p in case.positives()) and _no_negatives(case)
            ),
            reason="SupConLoss returns 0 for a batch without negatives, where the loss is positive",
            link="https://github.com/KevinMusgrave/pytorch-metric-learning/blob/v2.9.0/src/pytorch_metric_learning/losses/supcon_loss.py",
        ),
        Deviation(
            name="one pair is no loss",
            applies=lambda case, dtype, true: _one_pair_each(case),
            reason="with at most one positive and one negative pair in all, which takes references to happen, the"
            " package returns 0",
            link="https://github.com/KevinMusgrave/pytorch-metric-learning/blob/v2.9.0/src/pytorch_metric_learning/losses/generic_pair_loss.py",
        ),
    )

    def __init__(self, options: Mapping[str, str], device: str) -> None:
        """Import the package.

        Raises:
            Unavailable: it is not installed.
        """
        super().__init__(options, device)
        try:
            self.losses: Any = importlib.import_module("pytorch_metric_learning.losses")
            self.distances: Any = importlib.import_module("pytorch_metric_learning.distances")
            self.package: Any = importlib.import_module("pytorch_metric_learning")
        except ImportError as error:
            raise Unavailable(
                f'pytorch-metric-learning is not installed ({error}): pip install "pairproof[pml]"'
            ) from None

    def version(self) -> str:
        """The package's version."""
        return str(self.package.__version__)

    def refuses(self, case: Case) -> str | None:
        """What these two classes cannot be asked."""
        if case.loss not in ("supcon", "nt_xent", "nt_xent_pairwise"):
            return f"has no {case.loss}"
        if case.option("anchors") is not None:
            return "has no subset of anchors"
        if any(int(row) >= 0 for row in case.arguments.get("self_rows", ())):
            return "leaves no row of the references out"
        if case.option("base_temperature") is not None:
            return "has no base temperature"
        if "positives" in case.arguments:
            return "is asked with labels only"
        if case.option("reduction") not in ("mean", "mean_pairs"):
            return f"has no reduction {case.option('reduction')} of its own"
        if case.loss == "supcon" and case.option("denominator") != "all":
            return f"has no denominator {case.option('denominator')} in SupConLoss"
        if case.option("no_positive") == "nan":
            return "has no policy nan for anchors without positive"
        if case.loss == "nt_xent_pairwise" and case.option("no_positive") == "drop":
            return "NTXentLoss has no policy for anchors without positive"
        if case.loss != "supcon":
            pairs = sum(len(p) for p in case.positives())
            if pairs * (sum(len(members) for members in case.members()) - pairs) > LARGEST_PAIRS:
                return "NTXentLoss would build a matrix of pairs by pairs too large for this machine"
        return None

    def evaluate(self, case: Case, dtype: str) -> Outcome:
        """Value and gradient through the package's own classes."""
        distance = (
            self.distances.CosineSimilarity()
            if case.option("similarity") == "cosine"
            else self.distances.DotProductSimilarity(normalize_embeddings=False)
        )
        kind = self.losses.SupConLoss if case.loss == "supcon" else self.losses.NTXentLoss
        loss = kind(temperature=float(case.option("temperature")), distance=distance)
        given = self.tensors(case, dtype)
        embeddings = given.pop(case.first)
        labels, ref_labels = (
            None if side is None else torch.tensor(side, dtype=torch.int64, device=self.device)
            for side in _labels(case)
        )
        references = {"ref_emb": given["ref_embeddings"], "ref_labels": ref_labels} if given else {}
        return outcome_of(loss(embeddings, labels, **references), embeddings, others=given)


def _labels(case: Case) -> tuple[list[int], list[int] | None]:
    """Labels of the rows and of the references that say who is whose positive."""
    if "labels" in case.arguments:
        return case.arguments["labels"], case.arguments.get("ref_labels")
    partners = [int(p) for p in case.arguments["partners"]]
    if "ref_embeddings" in case.others:
        return partners, list(range(case.shape[1]))
    return [min(i, p) for i, p in enumerate(partners)], None
