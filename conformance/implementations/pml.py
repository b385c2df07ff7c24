"""pytorch-metric-learning, live: ``SupConLoss`` for supcon, ``NTXentLoss`` for both readings of NT-Xent.

Its words translated: a reducer is a reduction, ``AvgNonZeroReducer`` a mean over the anchors with a loss above 0,
``PerAnchorReducer`` a mean over each anchor's pairs first. ``NTXentLoss`` builds a matrix of pairs by pairs; larger
cases are refused for it (its issues 547, 203, 604).

``pml`` are both losses as they come; ``pml-reducers`` the same with the reducers that make our reductions;
``pml-self-supervised`` and ``pml-cross-batch-memory`` are the wrappers, which give labels to views and references to
the batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from ..suite.cases import Case, call_reference
from ..suite.records import Truth
from ..truth.evaluate import PROVE_UP_TO
from ..truth.tolerances import bounds, unit_roundoff
from .base import (
    Deviation,
    Support,
    by_views,
    exceeds,
    gradient_is_missing,
    labels_of,
    lacks_positives,
    logits,
    norms_out_of_range,
    row_norms,
)
from .files import PackagePeer

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
        # The loss is 0 to rounding, but nothing cancels the gradient of a reference that is no anchor's positive.
        rows = bounds(case, true, dtype).other_rows
        return any(exceeds(found, rows[name]) for name, found in true.other_gradients.items())
    return sum(values) / len(left) - sum(values) / len(values) > 4 * roundoff


def _shift_costs_digits(case: Case, dtype: str, true: Truth) -> bool:
    """Whether an anchor's value, on its own, is off by more than its bound because logits are shifted too far."""
    if case.option("reduction") != "none" or case.others:
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


SOURCE = "https://github.com/KevinMusgrave/pytorch-metric-learning/blob/v2.9.0/src/pytorch_metric_learning"
SUPCON = ("supcon",)
NT_XENT = ("nt_xent", "nt_xent_pairwise", "info_nce")
"""The losses that NTXentLoss computes."""

NORMS = Deviation(
    name="norms are clamped",
    condition=lambda case, dtype, true: norms_out_of_range(case, dtype, 1e-12),
    reason="CosineSimilarity divides by a norm of at least 1e-12, whose square may leave the dtype's range",
    link="https://pytorch.org/docs/stable/generated/torch.nn.functional.normalize.html",
)
SUM_OVERFLOWS = Deviation(
    name="the sum overflows",
    condition=lambda case, dtype, true: sum(true.anchors.values()) > torch.finfo(getattr(torch, dtype)).max,
    reason="the anchors are summed before they are divided by their number",
    link=f"{SOURCE}/reducers/avg_non_zero_reducer.py",
    wrong=True,
    losses=SUPCON,
)
SATURATED = Deviation(
    name="saturated logarithm",
    condition=lambda case, dtype, true: _saturates(case, dtype),
    reason="NTXentLoss adds finfo.tiny inside its logarithm: no pair costs more than 87.34 in float32 or 708.40"
    " in float64, and its gradient vanishes there",
    link=f"{SOURCE}/losses/ntxent_loss.py",
    wrong=True,
    losses=NT_XENT,
)
NO_NEGATIVES = Deviation(
    name="no negatives, no loss",
    condition=lambda case, dtype, true: any(len(p) > 1 for p in case.positives()) and _no_negatives(case),
    reason="SupConLoss returns 0 for a batch without negatives, where the loss is positive",
    link=f"{SOURCE}/losses/supcon_loss.py",
    losses=SUPCON,
)
ONE_PAIR = Deviation(
    name="one pair is no loss",
    condition=lambda case, dtype, true: sum(map(len, case.positives())) == 1 and sum(map(len, case.members())) == 2,
    reason="with at most one positive and one negative pair in all, which takes references to happen, the"
    " package returns 0",
    link=f"{SOURCE}/losses/generic_pair_loss.py",
    wrong=True,
)
DEVIATIONS = (
    Deviation(
        name="anchors without positives leave the mean",
        condition=lambda case, dtype, true: (
            case.option("no_positive") == "zero"
            and lacks_positives(case)
            and any(case.positives())
            and max(true.anchors.values()) > 0
        ),
        reason="SupConLoss averages over the anchors with a loss above 0, so one without positives is not counted",
        link=f"{SOURCE}/reducers/avg_non_zero_reducer.py",
        losses=SUPCON,
    ),
    Deviation(
        name="mean over pairs",
        condition=lambda case, dtype, true: (
            case.option("reduction") == "mean"
            and len({len(p) for p in case.positives()}) > 1
            and not _no_negatives(case)
            and max(true.anchors.values()) > 0
        ),
        reason="NTXentLoss averages over positive pairs, not over each anchor's mean: unbalanced classes differ",
        link="https://github.com/KevinMusgrave/pytorch-metric-learning/issues/6",
        losses=("nt_xent_pairwise",),
    ),
    Deviation(
        name="solved anchors leave the mean",
        condition=_solved_anchors_matter,
        reason="an anchor whose loss rounds to 0 is not counted by AvgNonZeroReducer: the mean of the others rises",
        link=f"{SOURCE}/reducers/avg_non_zero_reducer.py",
        losses=SUPCON,
    ),
    NORMS,
    SUM_OVERFLOWS,
    SATURATED,
    NO_NEGATIVES,
    ONE_PAIR,
)
"""The deviations of both losses with the reducers that they come with."""


class _Package(PackagePeer):
    """The package, and what all of its losses take."""

    distribution: ClassVar[str] = "pytorch-metric-learning"
    modules: ClassVar[tuple[str, ...]] = tuple(
        f"pytorch_metric_learning.{name}" for name in ("losses", "distances", "reducers")
    )
    extra: ClassVar[str] = "pml"

    def loss(self, case: Case, **keywords: Any) -> Any:
        """The package's loss for a case, with its temperature and its similarity."""
        distances = self.package.distances
        distance = (
            distances.CosineSimilarity()
            if case.option("similarity") == "cosine"
            else distances.DotProductSimilarity(normalize_embeddings=False)
        )
        kind = self.package.losses.SupConLoss if case.loss in SUPCON else self.package.losses.NTXentLoss
        return kind(temperature=case.temperature, distance=distance, **keywords)

    def labels(self, case: Case) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Labels of the rows, and of the references or None."""
        own, others = labels_of(case)
        return self.integers(own), None if others is None else self.integers(others)

    def call(self, loss: Any, case: Case, given: Mapping[str, torch.Tensor]) -> Any:
        """Call a loss on embeddings and labels, and on the references if the case has them."""
        labels, ref_labels = self.labels(case)
        references = given.get("ref_embeddings")
        more = {} if references is None else {"ref_emb": references, "ref_labels": ref_labels}
        return loss(given[case.first], labels, **more)


def _leaves_rows_out(case: Case) -> bool:
    return any(int(row) >= 0 for row in case.arguments.get("self_rows", ()))


def _pairs_fit(case: Case) -> str | None:
    """The size that NTXentLoss cannot hold."""
    pairs = 0 if case.loss in SUPCON else sum(len(p) for p in case.positives())
    if pairs * (sum(len(members) for members in case.members()) - pairs) <= LARGEST_PAIRS:
        return None
    return "NTXentLoss would build a matrix of pairs by pairs too large for this machine"


def _all_references(case: Case) -> str | None:
    return "leaves no row of the references out" if _leaves_rows_out(case) else None


def _mean_over_pairs(case: Case) -> str | None:
    drops = case.loss in NT_XENT and case.option("no_positive") == "drop"
    return "NTXentLoss has no policy for anchors without positive" if drops else None


def _positives_in_the_batch(case: Case) -> str | None:
    beyond = any(j >= case.n for found in case.positives() for j in found)
    if not (_per_anchor(case) and beyond):
        return None
    return "PerAnchorReducer makes a matrix of batch by batch: IndexError for a positive that lies beyond it"


def _per_anchor(case: Case) -> bool:
    return case.loss in NT_XENT and case.option("reduction") != "mean_pairs"


def _own_rows_only(case: Case) -> str | None:
    if not _leaves_rows_out(case) or _rows_before_the_batch(case) is not None:
        return None
    return "leaves out of the memory the batch's own rows only, one for each anchor"


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
    deviations: ClassVar[tuple[Deviation, ...]] = DEVIATIONS

    def value(self, case: Case, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The package's own classes."""
        found: torch.Tensor = self.call(self.loss(case), case, given)
        return found


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
            condition=_shift_costs_digits,
            reason="SupConLoss subtracts the row's maximum, self pair included: once all others lie far below,"
            " a small loss is the difference of two large numbers",
            link=f"{SOURCE}/losses/supcon_loss.py",
            wrong=True,
            losses=SUPCON,
        ),
        Deviation(
            name="one zero for all",
            condition=lambda case, dtype, true: (
                case.option("reduction") == "none"
                and len(true.values) > 1
                and (not any(case.positives()) or _no_negatives(case))
            ),
            reason="without positive or without negative pairs the package returns one 0, not one value per anchor",
            link=f"{SOURCE}/losses/base_metric_loss_function.py",
        ),
    )

    def value(self, case: Case, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Both losses with the reducer that makes the case's reduction."""
        reducers = self.package.reducers
        kinds = {"sum": reducers.SumReducer, "none": reducers.DoNothingReducer}
        reducer = kinds.get(case.option("reduction"), reducers.MeanReducer)()
        if _per_anchor(case):
            reducer = reducers.PerAnchorReducer(reducer=reducer)
        found = self.call(self.loss(case, reducer=reducer), case, given)
        if isinstance(found, dict):  # what DoNothingReducer returns
            found = found["loss"]["losses"]
        return torch.as_tensor(found, device=self.device)


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

    def value(self, case: Case, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The wrapper around two views, or around each direction of two towers."""
        loss = self.package.losses.SelfSupervisedLoss(self.loss(case), symmetric=not case.entry.two_towers)
        return by_views(case, given, lambda one, other, negatives: loss(one, other))


class CrossBatchMemory(_Package):
    """``CrossBatchMemory`` around both losses: a memory that holds the references, the batch's own rows among them."""

    name: ClassVar[str] = "pml-cross-batch-memory"
    title: ClassVar[str] = "pytorch-metric-learning's CrossBatchMemory around both losses, live"
    support = replace(SUPPORT, options=MEANS, also=(_own_rows_only, _mean_over_pairs, _pairs_fit))
    deviations: ClassVar[tuple[Deviation, ...]] = (
        Deviation(
            name="the memory is detached",
            condition=lambda case, dtype, true: (
                gradient_is_missing(case, dtype, true, "ref_embeddings")
                if "ref_embeddings" in case.others
                else _gradient_through_columns_is_missing(case, dtype, true)
            ),
            reason="rows are detached when they enter the memory, the batch's own included: nothing flows into what an"
            " anchor is contrasted with; value and the anchors' side of the gradient are right",
            link=f"{SOURCE}/losses/cross_batch_memory.py",
        ),
        *DEVIATIONS,
    )

    def value(self, case: Case, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The step in which the memory holds what the case contrasts its batch with."""
        rows, references = given[case.first], given.get("ref_embeddings")
        labels, ref_labels = self.labels(case)
        size = case.shape[1]
        memory = self.package.losses.CrossBatchMemory(self.loss(case), rows.shape[1], memory_size=size)
        mask = None
        if references is not None and ref_labels is not None:
            before = _rows_before_the_batch(case)
            if not _leaves_rows_out(case):
                # What a mask enqueues is contrasted with, and is no anchor.
                mask = torch.arange(size + case.n, device=self.device) < size
                rows, labels = torch.cat([references, rows]), torch.cat([ref_labels, labels])
            elif before:
                memory(references[before], ref_labels[before])
        found: torch.Tensor = memory(rows, labels, enqueue_mask=mask)
        return found


def _rows_before_the_batch(case: Case) -> list[int] | None:
    """The references that a former batch left; None if the others are not the batch itself, each row at its place."""
    own = [int(row) for row in case.arguments.get("self_rows", (-1,))]
    labels, ref_labels = labels_of(case)
    if min(own) < 0 or len(set(own)) < len(own) or ref_labels is None or "partners" in case.arguments:
        return None
    same_rows = np.array_equal(case.others["ref_embeddings"][own], case.embeddings)
    if not same_rows or [ref_labels[row] for row in own] != list(labels):
        return None
    return [row for row in range(case.shape[1]) if row not in own]


def _gradient_through_columns_is_missing(case: Case, dtype: str, true: Truth) -> bool:
    """Whether the gradient that rows get as positives or negatives of others is beyond what rounding explains."""
    if true.gradient is None:
        return False
    norms = row_norms(case.embeddings)[:, None]
    cosine = case.option("similarity") == "cosine"
    rows = case.embeddings / norms if cosine else case.embeddings
    grad = true.weights.T @ rows
    if cosine:
        grad = (grad - (grad * rows).sum(axis=1, keepdims=True) * rows) / norms
    return exceeds(grad, bounds(case, true, dtype).rows)
