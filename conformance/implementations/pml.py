"""pytorch-metric-learning, live: ``SupConLoss`` for supcon, ``NTXentLoss`` for both readings of NT-Xent.

Its words translated: a reducer is a reduction, ``AvgNonZeroReducer`` a mean over the anchors with a loss above 0,
``PerAnchorReducer`` a mean over each anchor's pairs first. ``NTXentLoss`` builds a matrix of pairs by pairs; larger
cases are refused for it (its issues 547, 203, 604).

``pml`` are both losses as they come; ``pml-reducers`` the same with the reducers that make our reductions;
``pml-self-supervised`` and ``pml-cross-batch-memory`` are the wrappers, which give labels to views and references to
the batch.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from ..suite.cases import Case, call_reference
from ..suite.records import Outcome, Truth
from ..truth.evaluate import PROVE_UP_TO
from ..truth.tolerances import bounds, unit_roundoff
from .base import (
    Deviation,
    Implementation,
    Support,
    Unavailable,
    directed,
    gradient_is_missing,
    labels_of,
    logits,
    lonely,
    norms_leave,
    outcome_of,
    row_norms,
    stacked_views,
)

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
        return any((row_norms(found) > rows[name]).any() for name, found in true.other_gradients.items())
    return sum(values) / len(left) - sum(values) / len(values) > 4 * roundoff


def _sum_overflows(dtype: str, true: Truth) -> bool:
    """Whether the sum of the anchors' values is too large for the dtype, though their mean is not."""
    return sum(true.anchors.values()) > torch.finfo(getattr(torch, dtype)).max


def _shift_costs_digits(case: Case, dtype: str, true: Truth) -> bool:
    """Whether an anchor's value, on its own, is off by more than its bound because logits are shifted too far."""
    if case.option("reduction") != "none" or "ref_embeddings" in case.others:
        return False
    found = logits(case).astype(np.dtype(dtype))
    positive = np.array(case.positive_mask()) & ~np.eye(case.n, dtype=bool)
    shifted = found - found.max(axis=1, keepdims=True)
    others = np.where(np.eye(case.n, dtype=bool), -np.inf, shifted)
    most = others.max(axis=1, keepdims=True)
    below = most + np.log(np.exp(others - most).sum(axis=1, keepdims=True))
    values = np.where(positive, below - shifted, 0).sum(axis=1) / np.maximum(positive.sum(axis=1), 1)
    allowed = bounds(case, true, dtype).anchors
    return any(abs(values[i] - value) > allowed[i] for i, value in true.anchors.items() if positive[i].any())


def _no_negatives(case: Case) -> bool:
    return all(len(p) == len(members) for p, members in zip(case.positives(), case.members(), strict=True))


def _one_pair_each(case: Case) -> bool:
    """Whether there are no two positive pairs and no two negative pairs, and yet something to lose."""
    positives = sum(map(len, case.positives()))
    return positives == 1 and sum(map(len, case.members())) == 2


def _no_positives(case: Case) -> bool:
    return not any(case.positives())


LONELY_LEAVE = Deviation(
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
)

MEAN_OVER_PAIRS = Deviation(
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
)

NORMS = Deviation(
    name="norms are clamped",
    applies=lambda case, dtype, true: norms_leave(case, dtype, 1e-12),
    reason="CosineSimilarity divides by a norm of at least 1e-12, whose square may leave the dtype's range",
    link="https://pytorch.org/docs/stable/generated/torch.nn.functional.normalize.html",
)

SOLVED_LEAVE = Deviation(
    name="solved anchors leave the mean",
    applies=lambda case, dtype, true: case.loss == "supcon" and _solved_anchors_matter(case, dtype, true),
    reason="an anchor whose loss rounds to 0 is not counted by AvgNonZeroReducer: the mean of the others rises",
    link="https://github.com/KevinMusgrave/pytorch-metric-learning/blob/v2.9.0/src/pytorch_metric_learning/reducers/avg_non_zero_reducer.py",
)

SUM_OVERFLOWS = Deviation(
    name="the sum overflows",
    applies=lambda case, dtype, true: case.loss == "supcon" and _sum_overflows(dtype, true),
    reason="the anchors are summed before they are divided by their number",
    link="https://github.com/KevinMusgrave/pytorch-metric-learning/blob/v2.9.0/src/pytorch_metric_learning/reducers/avg_non_zero_reducer.py",
    wrong=True,
)

SATURATED = Deviation(
    name="saturated logarithm",
    applies=lambda case, dtype, true: case.loss != "supcon" and _saturates(case, dtype),
    reason="NTXentLoss adds finfo.tiny inside its logarithm: no pair costs more than 87.34 in float32 or 708.40"
    " in float64, and its gradient vanishes there",
    link="https://github.com/KevinMusgrave/pytorch-metric-learning/blob/v2.9.0/src/pytorch_metric_learning/losses/ntxent_loss.py",
    wrong=True,
)

NO_NEGATIVES = Deviation(
    name="no negatives, no loss",
    applies=lambda case, dtype, true: (
        case.loss == "supcon" and any(len(p) > 1 for p in case.positives()) and _no_negatives(case)
    ),
    reason="SupConLoss returns 0 for a batch without negatives, where the loss is positive",
    link="https://github.com/KevinMusgrave/pytorch-metric-learning/blob/v2.9.0/src/pytorch_metric_learning/losses/supcon_loss.py",
)

ONE_PAIR = Deviation(
    name="one pair is no loss",
    applies=lambda case, dtype, true: _one_pair_each(case),
    reason="with at most one positive and one negative pair in all, which takes references to happen, the"
    " package returns 0",
    link="https://github.com/KevinMusgrave/pytorch-metric-learning/blob/v2.9.0/src/pytorch_metric_learning/losses/generic_pair_loss.py",
    wrong=True,
)


class _Package(Implementation):
    """The package, and what all of its losses take."""

    def __init__(self, options: Mapping[str, str], device: str) -> None:
        """Import the package.

        Raises:
            Unavailable: it is not installed.
        """
        super().__init__(options, device)
        try:
            self.losses: Any = importlib.import_module("pytorch_metric_learning.losses")
            self.distances: Any = importlib.import_module("pytorch_metric_learning.distances")
            self.reducers: Any = importlib.import_module("pytorch_metric_learning.reducers")
            self.package: Any = importlib.import_module("pytorch_metric_learning")
        except ImportError as error:
            raise Unavailable(
                f'pytorch-metric-learning is not installed ({error}): pip install "pairproof[pml]"'
            ) from None

    def version(self) -> str:
        """The package's version."""
        return str(self.package.__version__)

    def loss(self, case: Case, **keywords: Any) -> Any:
        """The package's loss for a case, with its temperature and its similarity."""
        distance = (
            self.distances.CosineSimilarity()
            if case.option("similarity") == "cosine"
            else self.distances.DotProductSimilarity(normalize_embeddings=False)
        )
        kind = self.losses.SupConLoss if case.loss == "supcon" else self.losses.NTXentLoss
        return kind(temperature=float(case.option("temperature")), distance=distance, **keywords)

    def labels(self, case: Case) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Labels of the rows, and of the references or None."""
        own, others = labels_of(case)
        found = torch.tensor(own, dtype=torch.int64, device=self.device)
        return found, None if others is None else torch.tensor(others, dtype=torch.int64, device=self.device)


def _leaves_rows_out(case: Case) -> bool:
    return any(int(row) >= 0 for row in case.arguments.get("self_rows", ()))


def _pairs_fit(case: Case) -> str | None:
    """The size that NTXentLoss cannot hold."""
    pairs = 0 if case.loss == "supcon" else sum(len(p) for p in case.positives())
    if pairs * (sum(len(members) for members in case.members()) - pairs) <= LARGEST_PAIRS:
        return None
    return "NTXentLoss would build a matrix of pairs by pairs too large for this machine"


def _all_references(case: Case) -> str | None:
    return "leaves no row of the references out" if _leaves_rows_out(case) else None


def _mean_over_pairs(case: Case) -> str | None:
    drops = case.loss == "nt_xent_pairwise" and case.option("no_positive") == "drop"
    return "NTXentLoss has no policy for anchors without positive" if drops else None


def _positives_in_the_batch(case: Case) -> str | None:
    beyond = any(j >= case.n for found in case.positives() for j in found)
    if not (_per_anchor(case) and beyond):
        return None
    return "PerAnchorReducer makes a matrix of batch by batch: IndexError for a positive that lies beyond it"


def _per_anchor(case: Case) -> bool:
    return case.loss != "supcon" and case.option("reduction") != "mean_pairs"


def _own_rows_only(case: Case) -> str | None:
    if not _leaves_rows_out(case) or _rows_before_the_batch(case) is not None:
        return None
    return "leaves out of the memory the batch's own rows only, each for itself"


SUPPORT = Support(
    losses=("supcon", "nt_xent", "nt_xent_pairwise"),
    options={"denominator": ("all",), "no_positive": ("zero", "drop")},
    lacks=("anchors", "positives", "base_temperature"),
    also=(_pairs_fit,),
)
MEANS = {**SUPPORT.options, "reduction": ("mean", "mean_pairs")}
"""The options of the losses with the reducers that they come with."""


class PytorchMetricLearning(_Package):
    """The two losses of pytorch-metric-learning that the notebook compares."""

    name: ClassVar[str] = "pml"
    title: ClassVar[str] = "pytorch-metric-learning, live"
    support = replace(SUPPORT, options=MEANS, also=(_all_references, _mean_over_pairs, _pairs_fit))
    deviations: ClassVar[tuple[Deviation, ...]] = (
        LONELY_LEAVE,
        MEAN_OVER_PAIRS,
        NORMS,
        SOLVED_LEAVE,
        SUM_OVERFLOWS,
        SATURATED,
        NO_NEGATIVES,
        ONE_PAIR,
    )

    def evaluate(self, case: Case, dtype: str) -> Outcome:
        """Value and gradient through the package's own classes."""
        given = self.tensors(case, dtype)
        embeddings = given.pop(case.first)
        labels, ref_labels = self.labels(case)
        references = {"ref_emb": given["ref_embeddings"], "ref_labels": ref_labels} if given else {}
        return outcome_of(self.loss(case)(embeddings, labels, **references), embeddings, others=given)


class Reducers(_Package):
    """Both losses with ``MeanReducer``, ``SumReducer``, ``DoNothingReducer``, and ``PerAnchorReducer`` around them."""

    name: ClassVar[str] = "pml-reducers"
    title: ClassVar[str] = "pytorch-metric-learning with the reducers that make our reductions, live"
    support = replace(
        SUPPORT,
        options={**SUPPORT.options, "no_positive": ("zero",)},
        also=(_all_references, _positives_in_the_batch, _pairs_fit),
    )
    deviations: ClassVar[tuple[Deviation, ...]] = (
        NORMS,
        SUM_OVERFLOWS,
        SATURATED,
        NO_NEGATIVES,
        ONE_PAIR,
        Deviation(
            name="small losses lose their digits",
            applies=lambda case, dtype, true: case.loss == "supcon" and _shift_costs_digits(case, dtype, true),
            reason="SupConLoss subtracts the row's maximum with the anchor itself in it: once all others lie far below,"
            " a small loss is the difference of two large numbers",
            link="https://github.com/KevinMusgrave/pytorch-metric-learning/blob/v2.9.0/src/pytorch_metric_learning/losses/supcon_loss.py",
            wrong=True,
        ),
        Deviation(
            name="one zero for all",
            applies=lambda case, dtype, true: (
                case.option("reduction") == "none"
                and len(true.values) > 1
                and (not any(case.positives()) or _no_negatives(case))
            ),
            reason="without positive or without negative pairs the package returns one 0, not one value per anchor",
            link="https://github.com/KevinMusgrave/pytorch-metric-learning/blob/v2.9.0/src/pytorch_metric_learning/losses/base_metric_loss_function.py",
        ),
    )

    def evaluate(self, case: Case, dtype: str) -> Outcome:
        """Value and gradient with the case's reduction."""
        kinds = {"sum": self.reducers.SumReducer, "none": self.reducers.DoNothingReducer}
        reducer = kinds.get(case.option("reduction"), self.reducers.MeanReducer)()
        if _per_anchor(case):
            reducer = self.reducers.PerAnchorReducer(reducer=reducer)
        given = self.tensors(case, dtype)
        embeddings = given.pop(case.first)
        labels, ref_labels = self.labels(case)
        references = {"ref_emb": given["ref_embeddings"], "ref_labels": ref_labels} if given else {}
        found = self.loss(case, reducer=reducer)(embeddings, labels, **references)
        if isinstance(found, dict):  # what DoNothingReducer hands on
            found = torch.as_tensor(found["loss"]["losses"], device=self.device)
        return outcome_of(found, embeddings, others=given)


class SelfSupervised(_Package):
    """``SelfSupervisedLoss`` around ``NTXentLoss``: two views for nt_xent, not symmetric for two towers."""

    name: ClassVar[str] = "pml-self-supervised"
    title: ClassVar[str] = "pytorch-metric-learning's SelfSupervisedLoss around NTXentLoss, live"
    support = Support(
        losses=("nt_xent", "info_nce"),
        options={"reduction": ("mean",)},
        lacks=("anchors", "base_temperature", "ref_embeddings", "negatives"),
        also=(_pairs_fit,),
    )
    deviations: ClassVar[tuple[Deviation, ...]] = (NORMS, SATURATED)

    def evaluate(self, case: Case, dtype: str) -> Outcome:
        """Value and gradients through the wrapper."""
        given = self.tensors(case, dtype)
        loss = self.losses.SelfSupervisedLoss(self.loss(case), symmetric=case.loss == "nt_xent")
        if case.loss == "nt_xent":
            embeddings = given[case.first]
            return outcome_of(loss(*stacked_views(case, embeddings)), embeddings)

        def one_way(one: torch.Tensor, other: torch.Tensor, negatives: torch.Tensor | None) -> torch.Tensor:
            found: torch.Tensor = loss(one, other)
            return found

        value = directed(case, given, one_way)
        return outcome_of(value, given.pop(case.first), others=given)


class CrossBatchMemory(_Package):
    """``CrossBatchMemory`` around both losses: a memory that holds the references, the batch's own rows among them."""

    name: ClassVar[str] = "pml-cross-batch-memory"
    title: ClassVar[str] = "pytorch-metric-learning's CrossBatchMemory around both losses, live"
    support = replace(SUPPORT, options=MEANS, also=(_own_rows_only, _mean_over_pairs, _pairs_fit))
    deviations: ClassVar[tuple[Deviation, ...]] = (
        Deviation(
            name="the memory is detached",
            applies=lambda case, dtype, true: (
                gradient_is_missing(case, dtype, true, "ref_embeddings")
                if "ref_embeddings" in case.others
                else _pull_of_others_is_missing(case, dtype, true)
            ),
            reason="rows are detached when they enter the memory, the batch's own included: nothing flows into what an"
            " anchor is contrasted with; value and the anchors' side of the gradient are right",
            link="https://github.com/KevinMusgrave/pytorch-metric-learning/blob/v2.9.0/src/pytorch_metric_learning/losses/cross_batch_memory.py",
        ),
        *PytorchMetricLearning.deviations,
    )

    def evaluate(self, case: Case, dtype: str) -> Outcome:
        """Value and gradients of the step in which the memory holds what the case contrasts its batch with."""
        given = self.tensors(case, dtype)
        embeddings = given.pop(case.first)
        labels, ref_labels = self.labels(case)
        size = case.shape[1]
        loss = self.losses.CrossBatchMemory(self.loss(case), case.embeddings.shape[1], memory_size=size)
        if ref_labels is None:
            return outcome_of(loss(embeddings, labels), embeddings)
        references = given["ref_embeddings"]
        if not _leaves_rows_out(case):
            # What is enqueued by a mask is contrasted with, and no anchor.
            mask = torch.arange(size + case.n, device=self.device) < size
            both, labels = torch.cat([references, embeddings]), torch.cat([ref_labels, labels])
            return outcome_of(loss(both, labels, enqueue_mask=mask), embeddings, others=given)
        before = _rows_before_the_batch(case)
        if before:
            loss(references[before], ref_labels[before])
        return outcome_of(loss(embeddings, labels), embeddings, others=given)


def _rows_before_the_batch(case: Case) -> list[int] | None:
    """The references that a former batch left, where all others are the batch itself, in the memory since this step.

    None where the references are no such memory.
    """
    own = [int(row) for row in case.arguments["self_rows"]]
    labels, ref_labels = labels_of(case)
    if min(own) < 0 or len(set(own)) < len(own) or ref_labels is None or case.loss == "nt_xent":
        return None
    same_rows = np.array_equal(case.others["ref_embeddings"][own], case.embeddings)
    if not same_rows or [ref_labels[row] for row in own] != list(labels):
        return None
    return [row for row in range(case.shape[1]) if row not in own]


def _pull_of_others_is_missing(case: Case, dtype: str, true: Truth) -> bool:
    """Whether a batch's gradient misses something without what rows get as positives or negatives of others."""
    if true.gradient is None:
        return False
    norms = row_norms(case.embeddings)[:, None]
    cosine = case.option("similarity") == "cosine"
    rows = case.embeddings / norms if cosine else case.embeddings
    pull = true.weights.T @ rows
    if cosine:
        pull = (pull - (pull * rows).sum(axis=1, keepdims=True) * rows) / norms
    return bool((row_norms(pull) > bounds(case, true, dtype).rows).any())
