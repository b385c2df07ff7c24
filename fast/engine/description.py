"""What a loss tells the engine: which pairs are positive, which formula an anchor's value follows.

Nothing here says how the values are computed. A description holds the caller's own tensors, never an N x N array unless
the caller gave one, so that an engine is free to sort labels, to walk tiles, or to build a mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

Similarity = Literal["cosine", "dot"]
Denominator = Literal["all", "one_positive", "only_negatives"]
Terms = Literal["out", "in", "binary", "epsilon", "lse"]
Backend = Literal["auto", "dense", "tiled", "exact", "triton"]
Kind = Literal["labels", "mask", "partners", "pairs", "none"]

EPSILON = 1e-8
"""The constant of the ``"epsilon"`` terms, part of that published formula."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Who is whose positive, in one of five ways.

    Args:
        kind: ``"labels"``: columns of equal label are positives; ``"mask"``: marked pairs are; ``"partners"``: every
            row has exactly one; ``"pairs"``: the listed ones are; ``"none"``: no column is.
        given: int64 labels ``[N]``, bool mask ``[N, M]`` (row is the anchor), int64 partners ``[N]``, int64 pairs
            ``[P, 2]`` (each an anchor and its positive; duplicates count once), or an empty tensor.
        columns: int64 labels ``[M]`` of the references, where there are any.
    """

    kind: Kind
    given: Tensor
    columns: Tensor | None = None


@dataclass(frozen=True, slots=True)
class References:
    """Rows that anchors are contrasted with, in place of the batch itself.

    Args:
        embeddings: floating ``[M, D]``.
        own: int64 ``[N]``, which of them is the anchor itself, -1 where none is; None: none is anyone's.
        norms: what is said of `norms` in `pairproof.fast.engine.anchor_values`.
        mutual: whether the references are anchors as well, each contrasted with the rows, ``M == N``: their values
            follow those of the rows. Each other's positives are rows of the same number.
    """

    embeddings: Tensor
    own: Tensor | None = None
    norms: Tensor | None = None
    mutual: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """The formula of an anchor's value, in the words of the published losses.

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


class AnchorValues(NamedTuple):
    """What an engine answers, one entry per row.

    Attributes:
        values: ``[N]`` in the computing dtype. A row that is no anchor, or that its rule gives nothing to sum over, has
            value 0 and no gradient: what such a row shall add is the loss's decision.
        positives: int64 ``[N]``, the size of each row's P(i).
        negatives: int64 ``[N]``, the size of each row's N(i).
    """

    values: Tensor
    positives: Tensor
    negatives: Tensor
