"""Drop-in replacements for `SupConLoss` and `NTXentLoss` of pytorch-metric-learning 2.9.

Signatures, distances, reducers, regularizers and miners are the library's. Only the import changes:

    from pairproof.compat.pytorch_metric_learning import NTXentLoss, SupConLoss

The engine evaluates the distances `CosineSimilarity` and `DotProductSimilarity`. Plain torch evaluates other distances,
autocast, and batches whose loss the library's arithmetic changes visibly, for example by rounding it to 0.

Source: KevinMusgrave/pytorch-metric-learning, version 2.9.0.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from pairproof import install_command

try:
    from pytorch_metric_learning.distances import CosineSimilarity, DotProductSimilarity
    from pytorch_metric_learning.losses.generic_pair_loss import GenericPairLoss
    from pytorch_metric_learning.reducers import AvgNonZeroReducer, MeanReducer, MultipleReducers
    from pytorch_metric_learning.utils import common_functions as c_f
    from pytorch_metric_learning.utils import loss_and_miner_utils as lmu
except ImportError as error:
    raise ImportError(
        f"pairproof.compat.pytorch_metric_learning needs pytorch-metric-learning: {install_command('pml')}"
    ) from error

from ..fast import nt_xent_pairwise_loss
from ..fast.checks import LOWEST, check_embeddings, check_ignored, check_labels_or_positives, check_references
from ..fast.engine import AnchorValues, Batch, Rule, Similarity, Sizes, anchor_values
from .evaluation import EvaluatedBy

__all__ = ["NTXentLoss", "SupConLoss"]

Losses = dict[str, dict[str, Any]]
Lists = tuple[Tensor, Tensor, Tensor, Tensor]
"""Anchors and positives of the positive pairs, then anchors and negatives of the negative pairs."""

LABEL_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
LOWEST_NORM = 1e-12
"""The smallest norm by which `torch.nn.functional.normalize` divides."""
ROUNDING = 4
"""The library may round a loss to 0 if it is below this multiple of the rounding error of its logits."""


class _Pairs(NamedTuple):
    """The arguments of the engine for a batch.

    Attributes:
        rows: ``[N, D]``; under "dot", already normalised if the distance normalises.
        similarity: "cosine" or "dot".
        sizes: bounds on the norms of the rows; None if no entries were read.
        keywords: references, and labels or masks.
        negatives: an upper bound on the number of negatives of an anchor.
        listed: anchors and positives of the positive pairs that a miner listed, ``[P]`` each; None without a miner.
        distinct: whether no positive pair is listed twice.
    """

    rows: Tensor
    similarity: Similarity
    sizes: Sizes | None
    keywords: dict[str, Any]
    negatives: int
    listed: tuple[Tensor, Tensor] | None = None
    distinct: bool = True


class _PairLoss(GenericPairLoss):  # type: ignore[misc]
    """Evaluates a loss by the engine if possible, else by `_compute_loss` from the matrix of distances.

    Attributes:
        evaluated_by: "engine" or "plain", for the last call; see `pairproof.compat`.
    """

    evaluated_by: EvaluatedBy = ""

    def __init__(self, *, mat_based_loss: bool, temperature: Any, zero_for_single_pair: bool, **kwargs: Any) -> None:
        super().__init__(mat_based_loss=mat_based_loss, **kwargs)
        self.temperature = temperature
        self.zero_for_single_pair = zero_for_single_pair
        self.add_to_recordable_attributes(list_of_names=["temperature"], is_stat=False)

    def get_default_distance(self) -> Any:
        """Return the distance that is used if none is given."""
        return CosineSimilarity()

    def compute_loss(
        self, embeddings: Tensor, labels: Tensor | None, indices_tuple: Any, ref_emb: Tensor, ref_labels: Tensor | None
    ) -> Losses:
        """Return the losses, their indices and the kind of reduction, in the format of the library's reducers."""
        c_f.labels_or_indices_tuple_required(labels, indices_tuple)
        lists = None if indices_tuple is None else lmu.convert_to_pairs(indices_tuple, labels, ref_labels)
        found: Losses | None = None
        if self._is_for_engine(embeddings, labels, lists, ref_emb, ref_labels):
            try:
                pairs = self._pairs(embeddings, labels, lists, ref_emb, ref_labels)
                found = None if pairs is None else self._by_engine(pairs, embeddings.dtype)
            except ValueError:  # NaN, infinity, or products that exceed the range of the dtype
                found = None
        self.evaluated_by = "plain" if found is None else "engine"
        if found is not None:
            return found
        lists = lmu.convert_to_pairs(indices_tuple, labels, ref_labels) if lists is None else lists
        if self.zero_for_single_pair and all(len(part) <= 1 for part in lists):
            return self._zero()
        found = self.loss_method(self.distance(embeddings, ref_emb), lists)
        return cast(Losses, found)

    def _zero(self) -> Losses:
        return cast(Losses, self.zero_losses())

    def _by_engine(self, pairs: _Pairs, dtype: torch.dtype) -> Losses | None:
        """Return the losses as the engine evaluates them, or None to use plain torch."""
        raise NotImplementedError

    def _is_for_engine(
        self, embeddings: Tensor, labels: Tensor | None, lists: Lists | None, ref_emb: Tensor, ref_labels: Tensor | None
    ) -> bool:
        """Return whether the engine supports the configuration. Of all tensors, only the temperature is read."""
        distance, temperature = self.distance, self.temperature
        if type(distance) not in (CosineSimilarity, DotProductSimilarity) or distance.power != 1:
            return False
        if isinstance(temperature, Tensor):
            if temperature.ndim or not temperature.is_floating_point():
                return False
        elif isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
            return False
        if not LOWEST <= _number(temperature) <= 1 / LOWEST or torch.is_autocast_enabled(embeddings.device.type):
            return False
        if embeddings.ndim != 2 or ref_emb.ndim != 2 or not embeddings.is_floating_point():
            return False
        alike = ref_emb.dtype == embeddings.dtype and ref_emb.device == embeddings.device
        if not alike or ref_emb.shape[1] != embeddings.shape[1] or not embeddings.shape[1]:
            return False
        if lists is not None:
            return any(len(part) > 1 for part in lists) and (ref_emb is not embeddings or embeddings.shape[0] > 1)
        if ref_emb is embeddings and ref_labels is labels:
            return embeddings.shape[0] > 1 and labels is not None and labels.dtype in LABEL_DTYPES
        # The library treats references without their own labels as the rows of the batch.
        if labels is None or ref_labels is None or ref_labels is labels:
            return False
        return labels.dtype == ref_labels.dtype in LABEL_DTYPES and labels.shape[0] * ref_labels.shape[0] > 2

    def _pairs(
        self, embeddings: Tensor, labels: Tensor | None, lists: Lists | None, ref_emb: Tensor, ref_labels: Tensor | None
    ) -> _Pairs | None:
        """Return the engine's arguments, or None if a miner lists no positives, no negatives, or a pair as both."""
        rows, columns, similarity, sizes = self._rows(embeddings, ref_emb)
        if lists is None:
            if ref_labels is labels:
                return _Pairs(rows, similarity, sizes, {"labels": labels}, len(columns))
            keywords = {"labels": labels, "ref_embeddings": columns, "ref_labels": ref_labels}
            return _Pairs(rows, similarity, sizes, keywords, len(columns))
        a1, p, a2, n = lists
        if not len(a1) or not len(a2):
            return None
        size = rows.shape[0], columns.shape[0]
        positive = torch.zeros(size, dtype=torch.bool, device=rows.device)
        negative = torch.zeros_like(positive)
        positive[a1, p] = True
        negative[a2, n] = True
        if bool(negative[a1, p].any()):
            return None
        references = {} if ref_emb is embeddings else {"ref_embeddings": columns}
        if not references and bool(positive.diagonal().any() | negative.diagonal().any()):
            references = {"ref_embeddings": columns}  # so that a row may be contrasted with itself
        masks = {"positives": positive, "ignored": (positive | negative).logical_not_()}
        distinct = int(positive.count_nonzero()) == len(a1)
        if self.counts_multiplicities and int(negative.count_nonzero()) < len(a2):
            dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
            weights = torch.zeros(size, dtype=dtype, device=rows.device)
            masks["negative_weights"] = weights.index_put_((a2, n), weights.new_ones(()), accumulate=True)
        return _Pairs(rows, similarity, sizes, {**masks, **references}, len(a2), (a1, p), distinct)

    def _rows(self, embeddings: Tensor, ref_emb: Tensor) -> tuple[Tensor, Tensor, Similarity, Sizes | None]:
        """Return rows, references, their similarity and the sizes of the rows.

        The engine normalises the rows if their norms are above `LOWEST_NORM` and do not overflow in the library.
        """
        distance = self.distance
        plain = distance.normalize_embeddings and distance.p == 2 and not distance.collect_stats
        # Normalise references here: those of a memory bank may be overwritten before the backward pass.
        if plain and ref_emb is embeddings:
            sizes = check_embeddings(embeddings, similarity="dot", validate=False, least=1)
            numbers = torch.finfo(embeddings.dtype)
            lowest, highest = max(LOWEST_NORM, numbers.tiny), math.sqrt(numbers.max) / embeddings.shape[1]
            if sizes is not None and lowest < sizes.low <= sizes.high < highest:
                return embeddings, embeddings, "cosine", sizes
        distance.reset_stats()
        rows = distance.maybe_normalize(embeddings)
        columns = rows if ref_emb is embeddings else distance.maybe_normalize(ref_emb)
        distance.set_default_stats(embeddings, ref_emb, rows, columns)
        return rows, columns, "dot", None

    counts_multiplicities = False
    """Whether a pair that is listed twice counts twice."""

    def _options(self, pairs: _Pairs) -> dict[str, Any]:
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            temperature = temperature.to(torch.promote_types(temperature.dtype, pairs.rows.dtype))
        return {"temperature": temperature, "similarity": pairs.similarity, **pairs.keywords}

    def _bound(self, pairs: _Pairs) -> float:
        """Return an upper bound on the difference of two logits."""
        largest = 1.0
        if pairs.similarity == "dot":
            others = pairs.keywords.get("ref_embeddings")
            norms = [rows.detach().norm(dim=1).max() for rows in (pairs.rows, others) if rows is not None]
            largest = float(norms[0] * norms[-1])
        return 2 * largest / _number(self.temperature)

    def _may_round_to_zero(self, losses: Tensor, pairs: _Pairs) -> bool:
        """Return whether the library may round a loss to 0, so that its reducer may leave it out."""
        if type(self._reducer()) is MeanReducer:
            return False
        return bool(losses.count_nonzero() != (losses > self._smallest(pairs)).sum())

    def _smallest(self, pairs: _Pairs) -> float:
        """Return a bound below which the library may round a loss to 0."""
        return ROUNDING * torch.finfo(pairs.rows.dtype).eps * (1 + self._bound(pairs))

    def _reducer(self) -> Any:
        """Return the reducer of the loss; a regularizer has another one."""
        reducer = self.reducer
        if type(reducer) is MultipleReducers:
            named = dict(reducer.reducers.items())
            return named.get("loss", reducer.default_reducer)
        return reducer


def _number(temperature: float | Tensor) -> float:
    return float(temperature.detach() if isinstance(temperature, Tensor) else temperature)


class SupConLoss(_PairLoss):
    """pytorch-metric-learning's ``SupConLoss``.

    Example:
        >>> import torch
        >>> from pairproof.compat.pytorch_metric_learning import SupConLoss
        >>> z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]])
        >>> loss = SupConLoss(temperature=0.5)
        >>> print(f"{loss(z, torch.tensor([0, 0, 1, 1])):.4f}", loss.evaluated_by)
        0.4302 engine

    Args:
        temperature: what similarities are divided by.
        zero_without_negatives: True: the loss of a batch without negative pairs is 0, as in the library. False: it is
            the value of the formula.
        zero_for_single_pair: the same for a batch with at most one positive and at most one negative pair.
        **kwargs: distance, reducer, embedding_regularizer, embedding_reg_weight and collect_stats, as in the library.
            The default reducer leaves out anchors whose loss is 0 or rounds to 0; ``reducer=MeanReducer()`` averages
            over all rows.

    Source:
        pytorch-metric-learning 2.9.0, losses/supcon_loss.py; Khosla et al. 2020, arXiv 2004.11362, equation 2.
    """

    def __init__(
        self,
        temperature: Any = 0.1,
        *,
        zero_without_negatives: bool = True,
        zero_for_single_pair: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            mat_based_loss=True, temperature=temperature, zero_for_single_pair=zero_for_single_pair, **kwargs
        )
        self.zero_without_negatives = zero_without_negatives

    def get_default_reducer(self) -> Any:
        """Return the reducer that is used if none is given."""
        return AvgNonZeroReducer()

    def _by_engine(self, pairs: _Pairs, dtype: torch.dtype) -> Losses | None:
        found = self._values(pairs)
        if not bool(found.positives.any()) or (self.zero_without_negatives and not bool(found.negatives.any())):
            return None
        losses, reducer = found.values, self._reducer()
        if type(reducer) is not AvgNonZeroReducer or reducer.collect_stats:
            return None if self._may_round_to_zero(losses, pairs) else _of_anchors(losses.to(dtype))
        number = int((losses > self._smallest(pairs)).sum())
        if not number or number != int(losses.count_nonzero()):
            return None
        return _reduced(losses.sum() / number, dtype)

    def _values(self, pairs: _Pairs) -> AnchorValues:
        """Return the anchors' values; the reducer does the rest."""
        rows, given = pairs.rows, self._options(pairs)
        similarity: Similarity = given["similarity"]
        sizes = pairs.sizes or check_embeddings(rows, similarity=similarity, validate=False)
        references = given.get("ref_embeddings")
        others = check_references(rows, references, None, None, similarity=similarity, validate=False)
        labels = given.get("labels"), given.get("positives"), others, given.get("ref_labels")
        targets = check_labels_or_positives(rows, *labels)
        if "ignored" in given:
            targets = check_ignored(rows, targets, others, given["ignored"], None, None, validate=False)
        rule = Rule("out", similarity, given["temperature"])
        return anchor_values(Batch(rows, targets, rule, others, sizes=sizes))

    def _compute_loss(self, mat: Tensor, pos_mask: Tensor, neg_mask: Tensor) -> Losses:
        if not bool(pos_mask.any()) or (self.zero_without_negatives and not bool(neg_mask.any())):
            return self._zero()
        logits = (mat if self.distance.is_inverted else -mat) / self.temperature
        # This shift rounds small losses to 0, as in the library.
        logits = logits - logits.detach().amax(dim=1, keepdim=True)
        lowest = torch.finfo(logits.dtype).min
        sums = logits.masked_fill((pos_mask + neg_mask) == 0, lowest).logsumexp(dim=1, keepdim=True)
        totals = (pos_mask * (sums - logits)).sum(dim=1)
        return _of_anchors(totals / pos_mask.sum(dim=1).clamp_min(1))


def _reduced(loss: Tensor, dtype: torch.dtype) -> Losses:
    return {"loss": {"losses": loss.to(dtype), "indices": None, "reduction_type": "already_reduced"}}


def _of_anchors(losses: Tensor) -> Losses:
    indices = torch.arange(len(losses), device=losses.device)
    return {"loss": {"losses": losses, "indices": indices, "reduction_type": "element"}}


class NTXentLoss(_PairLoss):
    """pytorch-metric-learning's ``NTXentLoss``.

    Example:
        >>> import torch
        >>> from pairproof.compat.pytorch_metric_learning import NTXentLoss
        >>> z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]])
        >>> loss = NTXentLoss(temperature=0.5)
        >>> print(f"{loss(z, torch.tensor([0, 0, 0, 1])):.4f}", loss.evaluated_by)
        0.5777 engine

    Args:
        temperature: what similarities are divided by.
        saturates: True: the smallest normal number is added to each ratio, as in the library. The loss of a pair is
            then at most 87.34 in float32 (9.70 in float16, 708.40 in float64), where its gradient vanishes. False: the
            loss is exact.
        zero_for_single_pair: True: the loss of a batch with at most one positive and at most one negative pair is 0, as
            in the library. False: it is the value of the formula.
        **kwargs: distance, reducer, embedding_regularizer, embedding_reg_weight and collect_stats, as in the library.

    Source:
        pytorch-metric-learning 2.9.0, losses/ntxent_loss.py.
    """

    counts_multiplicities = True

    def __init__(
        self,
        temperature: Any = 0.07,
        *,
        saturates: bool = True,
        zero_for_single_pair: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            mat_based_loss=False, temperature=temperature, zero_for_single_pair=zero_for_single_pair, **kwargs
        )
        self.saturates = saturates

    def _by_engine(self, pairs: _Pairs, dtype: torch.dtype) -> Losses | None:
        if self.saturates and dtype == torch.float16:
            return None
        numbers = torch.finfo(dtype)
        # Below this loss, the number added to the ratio is less than the rounding error of the ratio.
        limit = math.log(numbers.eps) - math.log(numbers.tiny) if self.saturates else math.inf
        largest = self._bound(pairs) + math.log1p(pairs.negatives)
        reducer = self._reducer()

        if type(reducer) is MeanReducer and not reducer.collect_stats and pairs.distinct and largest < limit:
            return _reduced(nt_xent_pairwise_loss(pairs.rows, reduction="mean_pairs", **self._options(pairs)), dtype)
        if pairs.listed is None and not all(_kinds(pairs)):
            return None
        losses = nt_xent_pairwise_loss(pairs.rows, reduction="none_pairs", **self._options(pairs))
        if (largest >= limit and float(losses.detach().max()) >= limit) or self._may_round_to_zero(losses, pairs):
            return None
        anchors, others = pairs.listed or _positives(pairs)
        if pairs.listed is not None:
            positive = pairs.keywords["positives"]
            numbered = torch.empty_like(positive, dtype=torch.int64)
            numbered[positive] = torch.arange(len(losses), device=losses.device)
            losses = losses[numbered[anchors, others]]
        return _of_pairs(losses.to(dtype), anchors, others)

    def _compute_loss(self, pos_pairs: Tensor, neg_pairs: Tensor, indices_tuple: Lists) -> Losses:
        a1, p, a2, _ = indices_tuple
        if not len(a1) or not len(a2):
            return self._zero()
        sign = 1 if self.distance.is_inverted else -1
        positive, negative = sign * pos_pairs / self.temperature, sign * neg_pairs / self.temperature
        # Sum the negatives of each anchor once, not for each of its positives.
        first = min(int(a1.min()), int(a2.min()))
        a1, a2 = a1 - first, a2 - first
        number = 1 + max(int(a1.max()), int(a2.max()))
        highest = negative.new_full((number,), torch.finfo(negative.dtype).min)
        highest = highest.scatter_reduce(0, a2, negative.detach(), "amax")
        exponentials = (negative - highest[a2]).exp()
        sums = exponentials.new_zeros(number).index_add(0, a2, exponentials)
        maximum = torch.maximum(positive.detach(), highest[a1])
        shifted = positive - maximum
        numerator = shifted.exp()
        denominator = (highest[a1] - maximum).exp() * sums[a1] + numerator
        # All distances of an anchor may be infinite. The matrix of the original has further entries, so it is not 0.
        denominator = torch.where(denominator == 0, 1.0, denominator)
        if self.saturates:
            losses = -(numerator / denominator + torch.finfo(neg_pairs.dtype).tiny).log()
        else:
            losses = denominator.log() - shifted
        return _of_pairs(losses, a1 + first, p)


def _of_pairs(losses: Tensor, anchors: Tensor, positives: Tensor) -> Losses:
    return {"loss": {"losses": losses, "indices": (anchors, positives), "reduction_type": "pos_pair"}}


def _kinds(pairs: _Pairs) -> tuple[bool, bool]:
    """Return whether the labels give a positive pair, and whether they give a negative one."""
    labels, columns = pairs.keywords["labels"], pairs.keywords.get("ref_labels")
    if columns is not None:
        differ = (labels != labels[0]).any() | (columns != labels[0]).any()
        return bool(torch.isin(labels, columns).any()), bool(differ)
    ordered = labels.sort().values
    equal = ordered[1:] == ordered[:-1]
    return bool(equal.any()), not bool(equal.all())


def _positives(pairs: _Pairs) -> tuple[Tensor, Tensor]:
    """Return the anchors and positives of all positive pairs of the labels, in row-major order."""
    labels, columns = pairs.keywords["labels"], pairs.keywords.get("ref_labels")
    equal = labels[:, None] == (labels if columns is None else columns)
    if columns is None:
        equal.fill_diagonal_(False)
    anchors, positives = equal.nonzero(as_tuple=True)
    return anchors, positives
