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
from scipy.special import logsumexp

from ..suite.cases import Case, call_reference
from ..suite.records import Truth
from ..truth.evaluate import PROVE_UP_TO
from ..truth.tolerances import bounds, unit_roundoff
from .base import (
    Deviation,
    Support,
    by_views,
    clamped_norms,
    deviation,
    exceeds,
    gradient_is_missing,
    gradient_of,
    labels_of,
    lacks_positives,
    logits,
)
from .files import PackagePeer

LARGEST_PAIRS = 4_000_000
"""Positive pairs times negative pairs above which NTXentLoss would take gigabytes."""


SOURCE = "https://github.com/KevinMusgrave/pytorch-metric-learning/blob/v2.9.0/src/pytorch_metric_learning"
REDUCER, SUPCON_LOSS = f"{SOURCE}/reducers/avg_non_zero_reducer.py", f"{SOURCE}/losses/supcon_loss.py"
SUPCON = ("supcon",)
NT_XENT = ("nt_xent", "nt_xent_pairwise", "info_nce")
"""The losses that NTXentLoss computes."""

NORMS = clamped_norms(1e-12, who="CosineSimilarity")


@deviation("anchors without positives leave the mean", REDUCER, losses=SUPCON)
def anchors_without_positives_leave(case: Case, dtype: str, true: Truth) -> bool:
    """Whether anchors without positives count 0 beside others above 0.

    SupConLoss averages over the anchors with a loss above 0, so one without positives is not counted.
    """
    counted = case.option("no_positive") == "zero" and lacks_positives(case)
    return counted and any(case.positives()) and max(true.anchors.values()) > 0


@deviation(
    "mean over pairs",
    "https://github.com/KevinMusgrave/pytorch-metric-learning/issues/6",
    losses=("nt_xent_pairwise",),
)
def mean_over_pairs(case: Case, dtype: str, true: Truth) -> bool:
    """Whether anchors have different numbers of positives.

    NTXentLoss averages over positive pairs, not over each anchor's mean: unbalanced classes differ.
    """
    unbalanced = case.option("reduction") == "mean" and len({len(p) for p in case.positives()}) > 1
    return unbalanced and not _no_negatives(case) and max(true.anchors.values()) > 0


@deviation("solved anchors leave the mean", REDUCER, losses=SUPCON)
def solved_anchors_leave(case: Case, dtype: str, true: Truth) -> bool:
    """Whether leaving out the anchors whose loss rounds to 0 changes the mean, or a gradient, by more than rounding.

    an anchor whose loss rounds to 0 is not counted by AvgNonZeroReducer: the mean of the others rises.
    """
    positives = case.positives()
    values = [value for i, value in true.anchors.items() if positives[i]]
    roundoff = unit_roundoff(dtype)
    left = [value for value in values if value > roundoff]
    if not left and values:
        # The loss is 0 to rounding, but nothing cancels the gradient of a reference that is no anchor's positive.
        rows = bounds(case, true, dtype).rows
        return any(exceeds(found, rows[name]) for name, found in true.other_gradients.items())
    return len(left) < len(values) and sum(values) / len(left) - sum(values) / len(values) > 4 * roundoff


@deviation("the sum overflows", REDUCER, wrong=True, losses=SUPCON)
def sum_overflows(case: Case, dtype: str, true: Truth) -> bool:
    """Whether the sum of the anchors' losses leaves the dtype's range.

    the anchors are summed before they are divided by their number.
    """
    return sum(true.anchors.values()) > float(np.finfo(dtype).max)


@deviation("saturated logarithm", f"{SOURCE}/losses/ntxent_loss.py", wrong=True, losses=NT_XENT)
def saturated(case: Case, dtype: str, true: Truth) -> bool:
    """Whether some pair's true loss comes within a few units of the largest that the logarithm can give.

    NTXentLoss adds finfo.tiny inside its logarithm: no pair costs more than 87.34 in float32 or 708.40 in float64, and
    its gradient vanishes there.
    """
    pairs = {} if case.size > PROVE_UP_TO else call_reference(case).terms.pairs
    return any(float(pair.value) > -math.log(np.finfo(dtype).tiny) - 8 for pair in pairs.values())


@deviation("no negatives, no loss", SUPCON_LOSS, losses=SUPCON)
def no_negatives(case: Case, dtype: str, true: Truth) -> bool:
    """Whether all rows are positives, and more than one of some anchor.

    SupConLoss returns 0 for a batch without negatives, where the loss is positive.
    """
    return any(len(p) > 1 for p in case.positives()) and _no_negatives(case)


@deviation("one pair is no loss", f"{SOURCE}/losses/generic_pair_loss.py", wrong=True)
def one_pair(case: Case, dtype: str, true: Truth) -> bool:
    """Whether there is one positive pair and one negative.

    with at most one positive and one negative pair in all, which takes references to happen, the package returns 0.
    """
    return sum(map(len, case.positives())) == 1 and sum(map(len, case.members())) == 2


@deviation("small losses lose their digits", SUPCON_LOSS, wrong=True, losses=SUPCON)
def shift_costs_digits(case: Case, dtype: str, true: Truth) -> bool:
    """Whether an anchor's value, on its own, is off by more than its bound because logits are shifted too far.

    SupConLoss subtracts the row's maximum, self pair included: once all others lie far below, a small loss is the
    difference of two large numbers.
    """
    if case.option("reduction") != "none" or case.others:
        return False
    found, own = logits(case).astype(np.dtype(dtype)), np.eye(case.n, dtype=bool)
    positive = np.array(case.positive_mask()) & ~own
    shifted = found - found.max(axis=1, keepdims=True)
    below = logsumexp(np.where(own, -np.inf, shifted), axis=1, keepdims=True)
    values = np.where(positive, below - shifted, 0).sum(axis=1) / np.maximum(positive.sum(axis=1), 1)
    allowed = bounds(case, true, dtype).anchors
    return any(abs(values[i] - value) > allowed[i] for i, value in true.anchors.items() if positive[i].any())


@deviation("one zero for all", f"{SOURCE}/losses/base_metric_loss_function.py")
def one_zero(case: Case, dtype: str, true: Truth) -> bool:
    """Whether the values of the anchors of a batch without positives, or without negatives, are asked for.

    without positive or without negative pairs the package returns one 0, not one value per anchor.
    """
    values = len(true.values) if case.option("reduction") == "none" else 1
    return values > 1 and (not any(case.positives()) or _no_negatives(case))


@deviation("the memory is detached", f"{SOURCE}/losses/cross_batch_memory.py")
def memory_is_detached(case: Case, dtype: str, true: Truth) -> bool:
    """Whether the gradient that rows get as positives or negatives of others is beyond what rounding explains.

    rows are detached when they enter the memory, the batch's own included: nothing flows into what an anchor is
    contrasted with; value and the anchors' side of the gradient are right.
    """
    if "ref_embeddings" in case.others:
        return gradient_is_missing(case, dtype, true, "ref_embeddings")
    return true.gradient is not None and exceeds(
        gradient_of(case, true.weights.T), bounds(case, true, dtype).rows[case.first]
    )


def _no_negatives(case: Case) -> bool:
    return all(len(p) == len(members) for p, members in zip(case.positives(), case.members(), strict=True))


BREAKS = (NORMS, sum_overflows, saturated, no_negatives, one_pair)
DEVIATIONS = (anchors_without_positives_leave, mean_over_pairs, solved_anchors_leave, *BREAKS)
"""The deviations of both losses with any reducers, and with those that they come with."""


def _leaves_rows_out(case: Case) -> bool:
    return any(int(row) >= 0 for row in case.arguments.get("self_rows", ()))


def _per_anchor(case: Case) -> bool:
    return case.loss in NT_XENT and case.option("reduction") != "mean_pairs"


def _pairs_do_not_fit(case: Case) -> bool:
    pairs = 0 if case.loss in SUPCON else sum(len(p) for p in case.positives())
    return pairs * (sum(len(members) for members in case.members()) - pairs) > LARGEST_PAIRS


PAIRS_FIT = ("NTXentLoss would build a matrix of pairs by pairs too large for this machine", _pairs_do_not_fit)
ALL_REFERENCES = ("leaves no row of the references out", _leaves_rows_out)
MEAN_OVER_PAIRS = (
    "NTXentLoss has no policy for anchors without positive",
    lambda case: case.loss in NT_XENT and case.option("no_positive") == "drop",
)
POSITIVES_IN_THE_BATCH = (
    "PerAnchorReducer makes a matrix of batch by batch: IndexError for a positive that lies beyond it",
    lambda case: _per_anchor(case) and any(j >= case.n for found in case.positives() for j in found),
)
OWN_ROWS_ONLY = (
    "leaves out of the memory the batch's own rows only, one for each anchor",
    lambda case: _leaves_rows_out(case) and _rows_before_the_batch(case) is None,
)
SUPPORT = Support(
    losses=("supcon", "nt_xent", "nt_xent_pairwise"),
    options={"denominator": ("all",), "no_positive": ("zero", "drop")},
    lacks=("anchors", "positives", "base_temperature"),
    also=(PAIRS_FIT,),
)
MEANS = {**SUPPORT.options, "reduction": ("mean", "mean_pairs")}
"""The options of the losses with the reducers that they come with."""


class PytorchMetricLearning(PackagePeer):
    """The two losses of pytorch-metric-learning that the notebook compares."""

    name = "pml"
    title = "pytorch-metric-learning, live"
    distribution = "pytorch-metric-learning"
    modules = tuple(f"pytorch_metric_learning.{name}" for name in ("losses", "distances", "reducers"))
    extra = "pml"
    support = replace(SUPPORT, options=MEANS, also=(ALL_REFERENCES, MEAN_OVER_PAIRS, PAIRS_FIT))
    deviations: ClassVar[tuple[Deviation, ...]] = DEVIATIONS

    def loss(self, case: Case, **keywords: Any) -> Any:
        """The package's loss for a case, with its temperature and its similarity."""
        distances, losses = self.package.distances, self.package.losses
        dot = distances.DotProductSimilarity(normalize_embeddings=False)
        distance = distances.CosineSimilarity() if case.option("similarity") == "cosine" else dot
        kind = losses.SupConLoss if case.loss in SUPCON else losses.NTXentLoss
        return kind(temperature=case.temperature, distance=distance, **keywords)

    def value(self, case: Case, given: Mapping[str, torch.Tensor]) -> Any:
        """The loss of embeddings and labels, and of the references if the case has them."""
        own, others = labels_of(case)
        more = {} if others is None else {"ref_emb": given["ref_embeddings"], "ref_labels": self.integers(others)}
        return self.loss(case)(given[case.first], self.integers(own), **more)


class Reducers(PytorchMetricLearning):
    """Both losses with ``MeanReducer``, ``SumReducer``, ``DoNothingReducer``, and ``PerAnchorReducer`` around them."""

    name = "pml-reducers"
    title = "pytorch-metric-learning with the reducers that make our reductions, live"
    support = replace(
        SUPPORT,
        options={**SUPPORT.options, "no_positive": ("zero",)},
        also=(ALL_REFERENCES, POSITIVES_IN_THE_BATCH, PAIRS_FIT),
    )
    deviations = (*BREAKS, shift_costs_digits, one_zero)

    def loss(self, case: Case, **keywords: Any) -> Any:
        """The loss with the reducer that makes the case's reduction."""
        reducers = self.package.reducers
        kinds = {"sum": reducers.SumReducer, "none": reducers.DoNothingReducer}
        reducer = kinds.get(case.option("reduction"), reducers.MeanReducer)()
        return super().loss(case, reducer=reducers.PerAnchorReducer(reducer) if _per_anchor(case) else reducer)

    def value(self, case: Case, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """As above, out of what ``DoNothingReducer`` returns."""
        found = super().value(case, given)
        return torch.as_tensor(found["loss"]["losses"] if isinstance(found, dict) else found, device=self.device)


class SelfSupervised(PytorchMetricLearning):
    """``SelfSupervisedLoss`` around ``NTXentLoss``: two views for nt_xent, not symmetric for two towers."""

    name = "pml-self-supervised"
    title = "pytorch-metric-learning's SelfSupervisedLoss around NTXentLoss, live"
    support = Support(
        losses=("nt_xent", "info_nce"),
        options={"reduction": ("mean",)},
        lacks=("anchors", "base_temperature", "ref_embeddings", "negatives"),
        also=(PAIRS_FIT,),
    )
    deviations = (NORMS, saturated)

    def value(self, case: Case, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The wrapper around two views, or around each direction of two towers."""
        loss = self.package.losses.SelfSupervisedLoss(self.loss(case), symmetric=not case.entry.two_towers)
        return by_views(case, given, lambda one, other, negatives: loss(one, other))


class CrossBatchMemory(PytorchMetricLearning):
    """``CrossBatchMemory`` around both losses: a memory that holds the references, the batch's own rows among them."""

    name = "pml-cross-batch-memory"
    title = "pytorch-metric-learning's CrossBatchMemory around both losses, live"
    support = replace(SUPPORT, options=MEANS, also=(OWN_ROWS_ONLY, MEAN_OVER_PAIRS, PAIRS_FIT))
    deviations = (memory_is_detached, *DEVIATIONS)

    def value(self, case: Case, given: Mapping[str, torch.Tensor]) -> Any:
        """The step in which the memory holds what the case contrasts its batch with."""
        rows, references = given[case.first], given.get("ref_embeddings")
        own, others = labels_of(case)
        labels, size, mask = self.integers(own), case.shape[1], None
        memory = self.package.losses.CrossBatchMemory(self.loss(case), rows.shape[1], memory_size=size)
        if references is not None:
            ref_labels, before = self.integers(others), _rows_before_the_batch(case)
            if not _leaves_rows_out(case):
                # What a mask enqueues is contrasted with, and is no anchor.
                mask = torch.arange(size + case.n, device=self.device) < size
                rows, labels = torch.cat([references, rows]), torch.cat([ref_labels, labels])
            elif before:
                memory(references[before], ref_labels[before])
        return memory(rows, labels, enqueue_mask=mask)


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
