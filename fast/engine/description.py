"""What a loss tells the engine: which pairs are positive, which formula an anchor's value follows.

Nothing here says how the values are computed. A description holds the caller's own tensors, never an N x N array unless
the caller gave one, so that an engine is free to sort labels into bands, to walk tiles, or to build a mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

Similarity = Literal["cosine", "dot"]
Denominator = Literal["all", "one_positive", "only_negatives"]
Terms = Literal["out", "in", "binary", "epsilon"]

EPSILON = 1e-8
"""The constant of the ``"epsilon"`` terms, part of that published formula."""


@dataclass(frozen=True, slots=True)
class SameLabel:
    """Rows of equal label are each other's positives.

    Args:
        labels: int64 ``[N]``, any values, in any order.
    """

    labels: Tensor


@dataclass(frozen=True, slots=True)
class PositiveMask:
    """Pairs marked true are positive; the mask may be asymmetric and its diagonal means nothing.

    Args:
        positives: bool ``[N, N]``, row is the anchor.
    """

    positives: Tensor


@dataclass(frozen=True, slots=True)
class Partners:
    """Every row has exactly one positive.

    Args:
        partners: int64 ``[N]``, mutual, never the row itself.
    """

    partners: Tensor


@dataclass(frozen=True, slots=True)
class PairList:
    """The listed pairs are positive; duplicates count once and diagonal entries mean nothing.

    Args:
        pairs: int64 ``[M, 2]``, each an anchor and its positive.
    """

    pairs: Tensor


Pairs = SameLabel | PositiveMask | Partners | PairList


@dataclass(frozen=True, slots=True)
class Rule:
    """The formula of an anchor's value, in the words of the published losses.

    Args:
        terms: ``"out"``, mean over positives of the log; ``"in"``, log of the mean; ``"binary"``, cross-entropy of
            every pair; ``"epsilon"``, the tutorial's guarded exponentials.
        similarity: ``"cosine"`` or ``"dot"``.
        temperature: the positive number that similarities are divided by.
        denominator: what a positive's numerator is divided by; read by ``"out"`` and ``"in"`` alone.
    """

    terms: Terms
    similarity: Similarity
    temperature: float
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
