"""The description of one batch: which pairs are positive, which formula, against which rows, and how it is evaluated.

A description travels as it is from a loss to the code that evaluates it. It holds the caller's own tensors, never an
N x N array unless the caller gave one. The fused kernels import this module alone, and `register` themselves here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

Similarity = Literal["cosine", "dot"]
Denominator = Literal["all", "one_positive", "only_negatives"]
Terms = Literal["out", "in", "binary", "epsilon", "lse"]
Backend = Literal["auto", "dense", "tiled", "exact", "triton"]
Kind = Literal["labels", "mask", "partners", "pairs", "none"]
Form = Literal["pairs", "symmetric", "rowwise", "triton"]

EPSILON = 1e-8
"""The constant of the ``"epsilon"`` terms, part of that published formula."""
LN2 = math.log(2)
UNSHIFTED = {torch.float64: 600.0, torch.float32: 80.0}
"""Largest logit plus log N up to which exponentials need no shift: their sums and the reciprocals are then normal."""


@dataclass(frozen=True, slots=True)
class Targets:
    """The positives of each row, given in one of five ways.

    Args:
        kind: ``"labels"``: columns of equal label are positives; ``"mask"``: marked pairs are; ``"partners"``: every
            row has exactly one; ``"pairs"``: the listed ones are; ``"none"``: no column is.
        given: int64 labels ``[N]``, bool mask ``[N, M]`` (row is the anchor), int64 partners ``[N]``, int64 pairs
            ``[P, 2]`` (each an anchor and its positive; duplicates count once), or an empty tensor.
        columns: int64 labels ``[M]`` of the references, where there are any.
        order: int64 ``[N]``, the rows stably sorted by label, where labels were read.
        paired: whether labels were read that stand exactly twice each.
    """

    kind: Kind
    given: Tensor
    columns: Tensor | None = None
    order: Tensor | None = None
    paired: bool = False


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of rows, read from the CPU's memory.

    Attributes:
        each: ``[N, 1]``: float64 norms, or for float64 rows their largest magnitudes.
        low: the smallest of them; NaN where a row has NaN.
        high: the largest of them.
    """

    each: Tensor
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class References:
    """Rows that anchors are contrasted with, in place of the batch itself.

    Args:
        embeddings: floating ``[M, D]``; None: the batch itself.
        own: int64 ``[N]``, which of them is the anchor itself, -1 where none is; None: none is for any anchor.
        mutual: whether the references are anchors as well, each contrasted with the rows, ``M == N``: their values
            follow those of the rows. Positives are rows of the same number.
        sizes: of the references, where they are known.
    """

    embeddings: Tensor | None = None
    own: Tensor | None = None
    mutual: bool = False
    sizes: Sizes | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """The formula of an anchor's value.

    Args:
        terms: ``"out"``, mean over positives of the log; ``"in"``, log of the mean; ``"binary"``, cross-entropy of
            every pair; ``"epsilon"``, the tutorial's guarded exponentials; ``"lse"``, the logarithm of the sum of all
            exponentials, of which info_nce makes its loss.
        similarity: ``"cosine"`` or ``"dot"``.
        temperature: the positive number that similarities are divided by, or a tensor of no dimension.
        denominator: what a positive's numerator is divided by; read by ``"out"`` and ``"in"`` alone.
    """

    terms: Terms
    similarity: Similarity
    temperature: float | Tensor
    denominator: Denominator = "all"


@dataclass(frozen=True, slots=True)
class Policy:
    """What becomes of the anchors' values.

    Args:
        reduction: "mean", "sum", "none" or "mean_pairs".
        base_temperature: None, or what the loss is scaled by: ``temperature / base_temperature``.
        no_positive: what an anchor without positive adds: "zero", "drop" or "nan".
        no_negative: what an anchor without negative adds where it needs one: "zero" or "nan".
    """

    reduction: str
    base_temperature: float | None
    no_positive: str = "zero"
    no_negative: str = "zero"


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch, described.

    Args:
        embeddings: floating ``[N, D]``, already checked.
        targets: which pairs are positive.
        rule: the formula.
        references: the rows that anchors are contrasted with.
        anchors: bool ``[N]``, the rows that are anchors; all of them when None.
        storage: a narrower dtype that holds all entries exactly, where embeddings and references are wider than that
            so that gradients are added before they are rounded.
        sizes: of the embeddings, where they are known.
    """

    embeddings: Tensor
    targets: Targets
    rule: Rule
    references: References
    anchors: Tensor | None = None
    storage: torch.dtype | None = None
    sizes: Sizes | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """How one batch is evaluated.

    Attributes:
        form: "pairs": one matrix of unshifted exponentials, of a small batch of pairs; "symmetric": tiles of unshifted
            exponentials, each serving its rows and its columns; "rowwise": panels of whole rows, shifted by their
            maxima; "triton": fused kernels, which choose their own tiles. A backend's name leaves the choice to the
            operator: a compiled graph serves batches of every size, and does not look at values.
        rows: of a tile or of a panel.
        columns: of a tile; a panel has all.
        keep: whether the forward pass keeps the tiles' exponentials.
        reads: whether values may be read to choose a path: on an accelerator that would synchronise.
        tf32: whether the kernels may multiply float32 rows in TF32.
    """

    form: Form | Backend
    rows: int = 0
    columns: int = 0
    keep: bool = False
    reads: bool = False
    tf32: bool = False


class AnchorValues(NamedTuple):
    """The result of an evaluation, one entry per row.

    Attributes:
        values: ``[N]`` in the computing dtype. A row that is no anchor, or that its rule gives nothing to sum over, has
            value 0 and no gradient: a loss's policies decide what such a row adds.
        positives: int64 ``[N]``, the size of each row's P(i).
        negatives: int64 ``[N]``, the size of each row's N(i).
    """

    values: Tensor
    positives: Tensor
    negatives: Tensor


Gradients = tuple[Tensor, Tensor | None, Tensor | None]
"""By embeddings ``[N, D]``, references ``[M, D]`` and temperature; None where there is none."""


class Kernels(Protocol):
    """Fused kernels that evaluate a batch."""

    STATS: int
    """Numbers per anchor that the forward pass leaves for the backward pass."""

    def refusal(self, embeddings: Tensor) -> str | None:
        """Return why the kernels cannot take embeddings ``[N, D]``, or None where they can. Values are not read."""

    def chosen(self, embeddings: Tensor) -> bool:
        """Whether "auto" takes them for embeddings ``[N, D]``."""

    def forward(self, batch: Batch, plan: Plan) -> tuple[AnchorValues, Tensor]:
        """Return the values, and ``[STATS, N]`` for the backward pass."""

    def backward(self, grad: Tensor, batch: Batch, plan: Plan, stats: Tensor) -> Gradients:
        """Return the gradients from that by the values, ``[N]``, in the dtypes of what they belong to."""


KERNELS: dict[str, Kernels] = {}
"""The registered kernels, by backend."""


def register(backend: str, kernels: Kernels) -> None:
    """Let a backend, ``"triton"``, be evaluated by these kernels."""
    KERNELS[backend] = kernels
