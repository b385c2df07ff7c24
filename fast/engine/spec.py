"""The description of one batch: its positive pairs, its formula, its references, and how it is evaluated.

It holds the caller's tensors, and an N x N array only if the caller passed one. The fused kernels import no other
module of the engine, and are registered here with `register`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor

Similarity = Literal["cosine", "dot"]
Denominator = Literal["all", "one_positive", "only_negatives"]
InsideReduction = Literal["mean", "sum"]
WeightsDivisor = Literal["count", "weight"]
ZeroRow = Literal["error", "zero"]
Terms = Literal["out", "in", "binary", "sigmoid", "epsilon", "lse"]
Backend = Literal["auto", "dense", "tiled", "exact", "triton"]
Kind = Literal["labels", "mask", "partners", "pairs", "none"]
Form = Literal["unshifted", "symmetric", "rowwise", "pairs", "frozen", "anchored", "triton"]

EPSILON = 1e-8
"""The constant in the published formula of `supcon_epsilon_loss`."""
LN2 = math.log(2)
UNSHIFTED = {torch.float64: 600.0, torch.float32: 80.0}
"""Largest value of max |logit| + log N for which exponentials need no shift.

Sums of exponentials and their reciprocals are then normal numbers.
"""
SHIFTED = 1.375
"""Logits of up to this many times `UNSHIFTED` may need only one shift for all pairs; see `Plan.shift`."""


@dataclass(slots=True)
class Targets:
    """The positives of each row, the pairs that are left out, and the weights of pairs.

    Args:
        kind: how positives are given: ``"labels"``, ``"mask"``, ``"partners"`` (exactly one positive for every row),
            ``"pairs"`` (a list) or ``"none"`` (there are no positives).
        given: int64 labels ``[N]``, bool mask ``[N, M]`` (row is the anchor), int64 partners ``[N]``, int64 pairs ``[P,
            2]`` (each an anchor and its positive; duplicates count once), or an empty tensor.
        columns: int64 labels ``[M]`` of the references, for the kind ``"labels"``.
        order: int64 ``[N]``, the rows in stable order of their labels, or with partners side by side. None: not known.
        ignored: bool ``[N, M]``, pairs that are neither positives nor negatives.
        ids: int64 ``[N]``; a pair whose row and column have equal ids is not a negative.
        column_ids: int64 ``[M]``, the ids of the references.
        positive_weights: float32 or float64 ``[N, M]``, the factors of the positives' cross-entropies; None: all 1.
        negative_weights: float32 or float64 ``[N, M]``, the factors of the negatives' exponentials; None: all 1.
    """

    kind: Kind
    given: Tensor
    columns: Tensor | None = None
    order: Tensor | None = None
    ignored: Tensor | None = None
    ids: Tensor | None = None
    column_ids: Tensor | None = None
    positive_weights: Tensor | None = None
    negative_weights: Tensor | None = None

    @property
    def weighted(self) -> bool:
        """Whether pairs have weights, which only the kinds "labels" and "mask" allow."""
        return self.positive_weights is not None or self.negative_weights is not None

    def transposed(self, columns: int) -> Targets:
        """Return the targets with rows and references exchanged; not for the kind "pairs" or for weights.

        ``columns`` is M, the number of references.
        """
        kind, given, others = self.kind, self.given, self.columns
        if kind == "labels":
            given, others = cast(Tensor, others), given
        elif kind == "mask":
            given = given.T
        elif kind == "partners":
            # Label each reference with its number. The label of a row is then its partner.
            kind, given, others = "labels", torch.arange(columns, device=given.device), given
        ignored = None if self.ignored is None else self.ignored.T
        return Targets(kind, given, others, ignored=ignored, ids=self.column_ids, column_ids=self.ids)

    @property
    def omits(self) -> bool:
        """Whether some pairs may be neither positives nor negatives."""
        return self.ignored is not None or self.ids is not None

    def omitted(self, here: slice) -> Tensor:
        """Return a bool mask ``[b, M]`` of the pairs of the rows ``here`` that are ignored or have equal ids."""
        if self.ids is None:
            assert self.ignored is not None
            return self.ignored[here]
        equal = self.ids[here, None] == (self.ids if self.column_ids is None else self.column_ids)
        return equal if self.ignored is None else equal | self.ignored[here]


@dataclass(slots=True)
class Sizes:
    """The sizes of rows, measured from their values.

    Attributes:
        each: ``[N, 1]``, the norm of each row in float64. For float64 rows, and on devices without float64, the largest
            magnitude in each row.
        low: the smallest size; NaN if a row contains NaN.
        high: the largest size; NaN if a row contains NaN.
    """

    each: Tensor
    low: float
    high: float


@dataclass(slots=True)
class References:
    """The rows that anchors are contrasted with: references, or the batch itself.

    Args:
        embeddings: floating ``[M, D]``; None: the batch itself.
        own: int64 ``[N]``, the reference that is the anchor itself, or -1; None: all -1.
        mutual: whether the references are anchors too, each contrasted with the rows. Then ``M == N``, and row i and
            reference i are each other's positive. The values of the references follow those of the rows.
        sizes: the sizes of the references, if known.
    """

    embeddings: Tensor | None = None
    own: Tensor | None = None
    mutual: bool = False
    sizes: Sizes | None = None


@dataclass(slots=True)
class Rule:
    """The formula of an anchor's value.

    Args:
        terms: ``"out"``: the mean over the positives of -log of their ratios. ``"in"``: -log of the mean or of the sum
            of the ratios. ``"binary"``: the binary cross-entropies of all pairs, averaged over positives and over
            negatives (see `formulas`). ``"sigmoid"``: their sum. ``"epsilon"``: "out" with the epsilon of
            `supcon_epsilon_loss`. ``"lse"``: the log-sum-exp of the negatives, a part of other losses.
        similarity: ``"cosine"`` or ``"dot"``.
        temperature: the positive number that similarities are divided by, or a 0-dimensional tensor.
        denominator: what a positive's e^s is divided by in its ratio; only for ``"out"`` and ``"in"``.
        inside_reduction: whether ``"in"`` takes the mean or the sum of the ratios.
        bias: what is added to similarity / temperature, a number or a 0-dimensional tensor; only for ``"sigmoid"``.
        weights_divisor: what the weighted sum over the positives is divided by: their number, ``"count"``, or the sum
            of their weights, ``"weight"``.
        zero_row: how ``"cosine"`` treats a row of zeros. ``"error"``: invalid; if values were not checked, its logits
            are NaN. ``"zero"``: its cosines and its gradient are 0.
    """

    terms: Terms
    similarity: Similarity
    temperature: float | Tensor
    denominator: Denominator = "all"
    inside_reduction: InsideReduction = "mean"
    bias: float | Tensor = 0.0
    weights_divisor: WeightsDivisor = "count"
    zero_row: ZeroRow = "error"

    def temperature_as(self, dtype: torch.dtype) -> float | Tensor:
        """Return the temperature; a tensor in ``dtype``, because its own dtype may be too coarse."""
        return self.temperature.to(dtype) if isinstance(self.temperature, Tensor) else self.temperature


class Ranks(Protocol):
    """The processes that a batch is distributed over."""

    def reduced(self, values: Tensor, weights: Tensor | int, *, mean: bool, dtype: torch.dtype | None) -> Tensor:
        """Return the sum of the values of all ranks, or their mean.

        Args:
            values: this rank's values, already multiplied by their weights.
            weights: the sum of this rank's weights.
            mean: whether to divide by the sum of all weights.
            dtype: the dtype of sums.
        """

    def anchor_values(self, batch: Batch, backend: Backend) -> AnchorValues:
        """Return the values of this rank's anchors."""


@dataclass(slots=True)
class Policy:
    """How the anchors' values are reduced to the loss.

    Args:
        reduction: "mean", "sum", "none", "mean_pairs", "sum_pairs" or "none_pairs".
        base_temperature: a positive number scales the loss by ``temperature / base_temperature``; None does not.
        no_positive: the value of an anchor without positives: "zero", "drop" (left out) or "nan".
        no_negative: the value of an anchor without negatives if its formula needs one: "zero" or "nan".
        anchor_weights: float32 or float64 ``[N]``, the factors of the anchors' values; None: all 1.
        ranks: the processes whose anchors are reduced together; None: one process.
    """

    reduction: str
    base_temperature: float | None
    no_positive: str = "zero"
    no_negative: str = "zero"
    anchor_weights: Tensor | None = None
    ranks: Ranks | None = None


@dataclass(slots=True)
class Batch:
    """The description of one batch.

    Args:
        embeddings: floating ``[N, D]``, already checked.
        targets: which pairs are positive.
        rule: the formula.
        references: the rows that anchors are contrasted with.
        anchors: bool ``[N]``, the rows that are anchors; None: all rows.
        storage: the original dtype of the rows, if they were converted to a wider one so that gradients are summed
            before they are rounded.
        sizes: the sizes of the embeddings, if known.
    """

    embeddings: Tensor
    targets: Targets
    rule: Rule
    references: References
    anchors: Tensor | None = None
    storage: torch.dtype | None = None
    sizes: Sizes | None = None


@dataclass(slots=True)
class Plan:
    """How one batch is evaluated.

    Attributes:
        form: a form, as listed in `pairproof.fast.engine`, or "triton" for the fused kernels. The name of another
            backend means that the operator in `autograd` chooses the form when it runs: a compiled graph must not
            depend on the values or on the size of the batch.
        rows: the number of rows of a tile or a panel.
        columns: the number of columns of a tile; a panel has all columns.
        keep: whether the forward pass keeps the exponentials; in the frozen form, the sums of weighted columns.
        reads: whether values may be read to choose a path; reading would synchronise an accelerator.
        tf32: whether the kernels may multiply float32 rows in TF32.
        sized: whether the forward pass returns the numbers of positives and of negatives.
        extreme: whether quotients of sums of unshifted exponentials may overflow or underflow.
        shift: what is subtracted from all logits, in units of log 2, before their unshifted exponentials are summed. If
            it is not 0, the form raises `formulas.Underflow` if a sum loses digits.
    """

    form: Form | Backend
    rows: int = 0
    columns: int = 0
    keep: bool = False
    reads: bool = False
    tf32: bool = False
    sized: bool = True
    extreme: bool = False
    shift: int = 0


class AnchorValues(NamedTuple):
    """The result of an evaluation, one entry per row.

    Attributes:
        values: ``[N]`` in the computing dtype. A row that is not an anchor, or lacks the positives or negatives that
            the rule needs, has the value 0 and no gradient. The policies of the loss decide what the row contributes.
        positives: int64 ``[N]``, the size of P(i), the set of each row's positives. If `Rule.weights_divisor` is
            "weight", the sum of their weights instead, in the wide dtype (`device.dtypes_of`).
        negatives: int64 ``[N]``, the size of N(i), the set of each row's negatives. Both are empty if `Plan.sized` is
            False.
    """

    values: Tensor
    positives: Tensor
    negatives: Tensor


Gradients = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Gradients with respect to embeddings ``[N, D]``, references ``[M, D]``, temperature and bias; None if absent."""


class Kernels(Protocol):
    """Fused kernels that evaluate a batch."""

    STATS: int
    """Number of values per anchor that the forward pass saves for the backward pass."""

    def refusal(self, embeddings: Tensor) -> str | None:
        """Return why the kernels do not support embeddings ``[N, D]``, else None. Values are not read."""

    def chosen(self, embeddings: Tensor) -> bool:
        """Return whether "auto" uses the kernels for embeddings ``[N, D]``."""

    def forward(self, batch: Batch, plan: Plan) -> tuple[AnchorValues, Tensor, Any]:
        """Return the values, and for the backward pass statistics ``[STATS, N]`` and the prepared batch."""

    def backward(self, grad: Tensor, batch: Batch, plan: Plan, stats: Tensor, prepared: Any = None) -> Gradients:
        """Return the gradients, each in its input's dtype; ``grad`` ``[N]`` is the gradient of the values.

        The batch is prepared again if ``prepared`` is None.
        """


KERNELS: dict[str, Kernels] = {}


def register(backend: str, kernels: Kernels) -> None:
    """Register the kernels of a backend, such as ``"triton"``."""
    KERNELS[backend] = kernels
