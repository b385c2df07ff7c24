"""pytorch-metric-learning: ``SupConLoss`` for supcon, ``NTXentLoss`` for nt_xent and nt_xent_pairwise.

Terms: a reducer is a reduction. ``AvgNonZeroReducer`` is the mean over the anchors with a loss above 0.
``PerAnchorReducer`` first averages over the pairs of each anchor.
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
from . import base
from .base import Deviation, Support, labels_of
from .files import PackagePeer

LARGEST_PAIRS = 4_000_000
"""Largest number of positive pairs times negative pairs; NTXentLoss builds this matrix (its issues 547, 203, 604)."""

REPOSITORY = "https://github.com/KevinMusgrave/pytorch-metric-learning"
SOURCE = f"{REPOSITORY}/blob/v2.9.0/src/pytorch_metric_learning"
REDUCER, SUPCON_LOSS = f"{SOURCE}/reducers/avg_non_zero_reducer.py", f"{SOURCE}/losses/supcon_loss.py"
SUPCON = ("supcon",)
NT_XENT = ("nt_xent", "nt_xent_pairwise", "info_nce")
"""The losses that NTXentLoss computes."""

NORMS = base.clamped_norms(1e-12, module="CosineSimilarity")


@base.deviation("anchors without positives are left out of the mean", REDUCER, losses=SUPCON)
def anchors_without_positives_leave(case: Case, dtype: str, true: Truth) -> bool:
    """SupConLoss averages over the anchors with a loss above 0, which leaves out anchors without positives."""
    counted = case.option("no_positive") == "zero" and base.lacks_positives(case)
    return counted and any(case.positives()) and max(true.anchors.values()) > 0


@base.deviation("mean over pairs", f"{REPOSITORY}/issues/6", losses=("nt_xent_pairwise",))
def mean_over_pairs(case: Case, dtype: str, true: Truth) -> bool:
    """Whether the mean over pairs differs from the mean over anchors.

    NTXentLoss averages over all positive pairs, not over the means of the anchors: the two differ for classes of
    different sizes.
    """
    unbalanced = case.option("reduction") == "mean" and len({len(p) for p in case.positives()}) > 1
    return unbalanced and not _no_negatives(case) and max(true.anchors.values()) > 0


@base.deviation("solved anchors are left out of the mean", REDUCER, losses=SUPCON)
def solved_anchors_leave(case: Case, dtype: str, true: Truth) -> bool:
    """Whether leaving out the anchors whose loss rounds to 0 changes the mean or a gradient by more than its bound.

    AvgNonZeroReducer leaves out anchors whose loss rounds to 0, which raises the mean.
    """
    positives = case.positives()
    values = [value for i, value in true.anchors.items() if positives[i]]
    roundoff = unit_roundoff(dtype)
    left = [value for value in values if value > roundoff]
    if not left and values:
        # The loss rounds to 0, but the gradient of a reference may still exceed its bound.
        rows = bounds(case, true, dtype).rows
        return any(base.exceeds(found, rows[name]) for name, found in true.other_gradients.items())
    change = sum(values) / len(left) - sum(values) / len(values) if left else 0.0
    return len(left) < len(values) and change > max(bounds(case, true, dtype).values)


@base.deviation("the sum overflows", REDUCER, wrong=True, losses=SUPCON)
def sum_overflows(case: Case, dtype: str, true: Truth) -> bool:
    """The losses of the anchors are summed before the sum is divided by their number, and the sum overflows."""
    return sum(true.anchors.values()) > float(np.finfo(dtype).max)


@base.deviation("saturated logarithm", f"{SOURCE}/losses/ntxent_loss.py", wrong=True, losses=NT_XENT)
def saturated(case: Case, dtype: str, true: Truth) -> bool:
    """Whether the true loss of some pair is close to, or above, the largest that NTXentLoss can return.

    NTXentLoss adds finfo.tiny inside its logarithm: the loss of a pair is at most 87.34 in float32 and 708.40 in
    float64. At this value, its gradient is 0.
    """
    limit, positives = -math.log(np.finfo(dtype).tiny) - 8, case.positives()
    # An anchor's loss is the mean over its pairs, so no pair exceeds this mean times their number.
    if all(value * max(len(positives[i]), 1) < limit for i, value in true.anchors.items()):
        return False
    pairs = {} if case.size > PROVE_UP_TO else call_reference(case).terms.pairs
    return any(float(pair.value) > limit for pair in pairs.values())


@base.deviation("0 without negatives", SUPCON_LOSS, losses=SUPCON)
def no_negatives(case: Case, dtype: str, true: Truth) -> bool:
    """SupConLoss returns 0 for a batch without negatives, although its loss is positive."""
    return any(len(p) > 1 for p in case.positives()) and _no_negatives(case)


@base.deviation("0 for a single pair", f"{SOURCE}/losses/generic_pair_loss.py", wrong=True)
def one_pair(case: Case, dtype: str, true: Truth) -> bool:
    """The package returns 0 for at most one positive and one negative pair, which occurs only with references."""
    return sum(map(len, case.positives())) == 1 and sum(map(len, case.members())) == 2


@base.deviation("a single 0 for all anchors", f"{SOURCE}/losses/base_metric_loss_function.py")
def one_zero(case: Case, dtype: str, true: Truth) -> bool:
    """Without positive pairs or without negative pairs, the package returns a single 0, not one value per anchor."""
    values = len(true.values) if case.separate else 1
    return values != 1 and (not any(case.positives()) or _no_negatives(case))


@base.deviation("the memory is detached", f"{SOURCE}/losses/cross_batch_memory.py")
def memory_is_detached(case: Case, dtype: str, true: Truth) -> bool:
    """Whether the part of the gradient that is missing exceeds the bounds.

    The memory holds detached rows, also those of the current batch. So no gradient reaches the rows that an anchor is
    contrasted with. The value and the gradient of the anchors are right.
    """
    if "ref_embeddings" in case.others:
        return base.gradient_is_missing(case, dtype, true, "ref_embeddings")
    rows = bounds(case, true, dtype).rows[case.first]
    return true.gradient is not None and base.exceeds(base.gradient_of(case, true.weights.T), rows)


def _no_negatives(case: Case) -> bool:
    return all(len(p) == len(members) for p, members in zip(case.positives(), case.members(), strict=True))


BREAKS = (NORMS, sum_overflows, saturated, no_negatives, one_pair)
DEVIATIONS = (anchors_without_positives_leave, mean_over_pairs, solved_anchors_leave, *BREAKS)
"""The deviations with the default reducers; ``BREAKS`` are those with any reducer."""


def _leaves_rows_out(case: Case) -> bool:
    return any(int(row) >= 0 for row in case.arguments.get("self_rows", ()))


def _per_anchor(case: Case) -> bool:
    return case.loss in NT_XENT and not case.over_pairs


def _pairs_do_not_fit(case: Case) -> bool:
    pairs = 0 if case.loss in SUPCON else sum(case.positive_counts())
    return pairs * (sum(case.member_counts()) - pairs) > LARGEST_PAIRS


PAIRS_FIT = ("NTXentLoss would build a pairs x pairs matrix that is too large", _pairs_do_not_fit)
ALL_REFERENCES = ("cannot exclude the row of an anchor from the references", _leaves_rows_out)
CANNOT_DROP = (
    "NTXentLoss has no option for anchors without positives",
    lambda case: case.loss in NT_XENT and case.option("no_positive") == "drop",
)
POSITIVES_IN_THE_BATCH = (
    "PerAnchorReducer builds a batch x batch matrix: IndexError for a positive outside the batch",
    lambda case: _per_anchor(case) and bool((case.member_array() & case.positive_array())[:, case.n :].any()),
)
OWN_ROWS_ONLY = (
    "can exclude only the batch's own rows from the memory, one for each anchor",
    lambda case: _leaves_rows_out(case) and _rows_before_the_batch(case) is None,
)
SUPPORT = Support(
    losses=("supcon", "nt_xent", "nt_xent_pairwise"),
    options={"denominator": ("all",), "no_positive": ("zero", "drop")},
    lacks=("anchors", "positives", "base_temperature"),
    also=(PAIRS_FIT,),
)
MEANS = {**SUPPORT.options, "reduction": ("mean", "mean_pairs")}
"""The options of the losses with the default reducers."""


class PytorchMetricLearning(PackagePeer):
    """``SupConLoss`` and ``NTXentLoss`` with their default reducers."""

    name = "pml"
    title = "pytorch-metric-learning"
    distribution = "pytorch-metric-learning"
    modules = tuple(f"pytorch_metric_learning.{name}" for name in ("losses", "distances", "reducers"))
    extra = "pml"
    support = replace(SUPPORT, options=MEANS, also=(ALL_REFERENCES, CANNOT_DROP, PAIRS_FIT))
    deviations: ClassVar[tuple[Deviation, ...]] = DEVIATIONS

    def loss(self, case: Case, **keywords: Any) -> Any:
        """Return the loss of the package with the temperature and the similarity of a case."""
        distances, losses = self.package.distances, self.package.losses
        dot = distances.DotProductSimilarity(normalize_embeddings=False)
        distance = distances.CosineSimilarity() if case.option("similarity") == "cosine" else dot
        kind = losses.SupConLoss if case.loss in SUPCON else losses.NTXentLoss
        return kind(temperature=case.temperature, distance=distance, **keywords)

    def value(self, case: Case, given: Mapping[str, torch.Tensor]) -> Any:
        """Evaluate the loss on embeddings and labels, and on references if the case has any."""
        own, others = labels_of(case)
        more = {} if others is None else {"ref_emb": given["ref_embeddings"], "ref_labels": self.integers(others)}
        return self.loss(case)(given[case.first], self.integers(own), **more)


class Reducers(PytorchMetricLearning):
    """Both losses with ``MeanReducer``, ``SumReducer`` or ``DoNothingReducer``.

    For ``NTXentLoss``, ``PerAnchorReducer`` wraps the reducer if the reduction is over anchors.
    """

    name = "pml-reducers"
    title = "pytorch-metric-learning with reducers"
    support = replace(
        SUPPORT,
        options={**SUPPORT.options, "no_positive": ("zero",)},
        also=(ALL_REFERENCES, POSITIVES_IN_THE_BATCH, PAIRS_FIT),
    )
    deviations = (*BREAKS, one_zero)

    def loss(self, case: Case, **keywords: Any) -> Any:
        """Return the loss with the reducer that corresponds to the reduction of a case."""
        reducers = self.package.reducers
        kinds = {"sum": reducers.SumReducer, "none": reducers.DoNothingReducer}
        reducer = kinds.get(case.option("reduction").removesuffix("_pairs"), reducers.MeanReducer)()
        return super().loss(case, reducer=reducers.PerAnchorReducer(reducer) if _per_anchor(case) else reducer)

    def value(self, case: Case, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Evaluate the loss; ``DoNothingReducer`` returns its values in a dictionary."""
        found = super().value(case, given)
        return torch.as_tensor(found["loss"]["losses"] if isinstance(found, dict) else found, device=self.device)


class SelfSupervised(PytorchMetricLearning):
    """``SelfSupervisedLoss`` around ``NTXentLoss``: symmetric for two views, not symmetric for two towers."""

    name = "pml-self-supervised"
    title = "pytorch-metric-learning's SelfSupervisedLoss"
    support = Support(
        losses=("nt_xent", "info_nce"),
        options={"reduction": ("mean",)},
        lacks=("anchors", "base_temperature", "ref_embeddings", "negatives"),
        also=(PAIRS_FIT,),
    )
    deviations = (NORMS, saturated)

    def value(self, case: Case, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Evaluate the wrapper on two views, or on each direction of two towers."""
        loss = self.package.losses.SelfSupervisedLoss(self.loss(case), symmetric=not case.entry.two_towers)
        return base.by_views(case, given, lambda one, other, negatives: loss(one, other))


class CrossBatchMemory(PytorchMetricLearning):
    """``CrossBatchMemory`` around both losses. Its memory holds the references and the rows of the batch."""

    name = "pml-cross-batch-memory"
    title = "pytorch-metric-learning's CrossBatchMemory"
    support = replace(SUPPORT, options=MEANS, also=(OWN_ROWS_ONLY, CANNOT_DROP, PAIRS_FIT))
    deviations = (memory_is_detached, *DEVIATIONS)

    def value(self, case: Case, given: Mapping[str, torch.Tensor]) -> Any:
        """Fill the memory, then evaluate the loss on the batch."""
        rows, references = given[case.first], given.get("ref_embeddings")
        own, others = labels_of(case)
        labels, size, mask = self.integers(own), case.shape[1], None
        memory = self.package.losses.CrossBatchMemory(self.loss(case), rows.shape[1], memory_size=size)
        if references is not None:
            ref_labels, before = self.integers(others), _rows_before_the_batch(case)
            if not _leaves_rows_out(case):
                # Rows that the mask selects enter the memory and are not anchors.
                mask = torch.arange(size + case.n, device=self.device) < size
                rows, labels = torch.cat([references, rows]), torch.cat([ref_labels, labels])
            elif before:
                memory(references[before], ref_labels[before])
        return memory(rows, labels, enqueue_mask=mask)


def _rows_before_the_batch(case: Case) -> list[int] | None:
    """Return the indices of the references that are not rows of the batch; None if the batch is not among them."""
    own = [int(row) for row in case.arguments.get("self_rows", (-1,))]
    labels, ref_labels = labels_of(case)
    if min(own) < 0 or len(set(own)) < len(own) or ref_labels is None or "partners" in case.arguments:
        return None
    same_rows = np.array_equal(case.others["ref_embeddings"][own], case.embeddings)
    if not same_rows or [ref_labels[row] for row in own] != list(labels):
        return None
    return [row for row in range(case.shape[1]) if row not in own]
