"""The ranking losses of sentence-transformers, evaluated by `pairproof.fast`.

``MultipleNegativesRankingLoss``, ``MultipleNegativesSymmetricRankingLoss`` and ``GISTEmbedLoss`` have the arguments of
sentence-transformers, which need not be installed. A loss can be used in two ways:

- with a model, as in sentence-transformers: ``loss(sentence_features, labels)``. The model is called with the features
  of each column, and returns a dict with the key "sentence_embedding".
- with embeddings: ``loss.compute_loss_from_embeddings([queries, documents, *hard_negatives])``. The model may be None.
  `GISTEmbedLoss` also takes the embeddings of its guide.

Every column is ``[N, D]``: the queries, their documents, or one hard negative of each query. The scale is 1 /
temperature. Some batches are evaluated in plain torch, not by the engine of `pairproof.fast`. If the engine evaluates
half-precision embeddings, the loss is float32. Similarities are computed in float32, also under autocast.

With ``gather_across_devices``, a process contrasts its own queries with the documents of all processes. Every process
must have N rows. DistributedDataParallel averages the gradients of the processes. The average is the gradient of the
whole batch in one process, except for `GISTEmbedLoss` with ``contrast_anchors``, which contrasts queries within their
process only.

Source: sentence_transformer/losses/multiple_negatives_ranking.py and gist_embed.py of
huggingface/sentence-transformers, release 6.2.0 (commit cad2119).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from torch import Tensor, nn

from ..fast import info_nce_loss, multiple_negatives_ranking_loss
from ..fast.engine import Similarity
from ..fast.engine.device import may_read
from ..fast.ranking import Directions
from .evaluation import EvaluatedBy, evaluate, large

Direction = Literal["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"]
HardnessMode = Literal["in_batch_negatives", "hard_negatives", "all_negatives"]

ORDER: tuple[Direction, ...] = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
ONE_BLOCK_FROM = 2**15
"""Number of query-document pairs from which the engine is faster on a CPU, for one direction per denominator."""
BLOCKS_FROM = 2**17
"""The same for several directions in a denominator, and for hardness weights."""
SMALLEST_NORM = {"ranking": 1e-12, "gist": 1e-8}
"""Rows with a smaller norm are not normalised by `F.normalize` (ranking) and `nn.CosineSimilarity` (gist)."""

logger = logging.getLogger(__name__)


def cos_sim(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosines ``[N, M]`` of rows ``[N, D]`` and ``[M, D]``."""
    return F.normalize(a) @ F.normalize(b).T


def dot_score(a: Tensor, b: Tensor) -> Tensor:
    """Return the dot products ``[N, M]`` of rows ``[N, D]`` and ``[M, D]``."""
    return a @ b.T


def _engine_similarity(function: object) -> Similarity | None:
    """Return the engine's name of a similarity function, or None."""
    module, name = getattr(function, "__module__", None) or "", getattr(function, "__name__", "")
    if module != __name__ and not module.startswith("sentence_transformers.util"):
        return None
    names: dict[str, Similarity] = {"cos_sim": "cosine", "pytorch_cos_sim": "cosine", "dot_score": "dot"}
    return names.get(name)


def get_rank() -> int:
    """Return the number of this process in the default process group; 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def all_gather_with_grad(rows: Tensor) -> Tensor:
    """Return the rows of all processes; gradients flow back. Without a process group, return the rows."""
    if not (dist.is_available() and dist.is_initialized()):
        return rows
    return torch.cat(torch.distributed.nn.all_gather(rows))  # type: ignore[no-untyped-call]


@cache
def _merging() -> Callable[[Any, Iterable[Any]], list[Tensor]] | None:
    """Return sentence-transformers' function that embeds all columns in few calls, if it is installed."""
    try:
        from sentence_transformers.base.losses.merged_forward import embed_columns
    except ImportError:
        return None
    return cast("Callable[[Any, Iterable[Any]], list[Tensor]]", embed_columns)


def _embedded(model: Callable[..., Any] | None, sentence_features: Iterable[dict[str, Tensor]]) -> list[Tensor]:
    """Return the embeddings ``[N, D]`` of each column."""
    if model is None:
        raise ValueError("model: expected a model, got None; without one, call compute_loss_from_embeddings")
    merging = _merging()
    if merging is not None:
        return merging(model, sentence_features)
    return [model(features)["sentence_embedding"] for features in sentence_features]


def _normalised_exactly(rows: Iterable[Tensor], smallest: float) -> bool:
    """Return whether all norms are at least ``smallest``, so that the library normalises the rows.

    Values on an accelerator are not read; their norms are assumed to be large enough.
    """
    readable = [each for each in rows if may_read(each)]
    return all(bool((torch.linalg.vector_norm(each.detach(), dim=1) >= smallest).all()) for each in readable)


class MultipleNegativesRankingLoss(nn.Module):
    """The cross-entropy of each query's document among the documents of the batch (InfoNCE), and its variants.

    Example:
        >>> import torch
        >>> from pairproof.compat.sentence_transformers import MultipleNegativesRankingLoss
        >>> queries = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> documents = torch.tensor([[0.8, 0.6], [0.6, 0.8]])
        >>> loss_function = MultipleNegativesRankingLoss(scale=5.0)
        >>> print(f"{loss_function.compute_loss_from_embeddings([queries, documents]):.4f}")
        0.3133

    Args:
        model: a model; None if the loss is computed from embeddings.
        scale: what similarities are multiplied by.
        similarity_fct: the similarities ``[N, M]`` of rows ``[N, D]`` and ``[M, D]``. The engine evaluates `cos_sim`
            and `dot_score`, of this module or of sentence-transformers.
        gather_across_devices: whether to contrast with the rows of all processes.
        directions: the pairs in the denominators: "query_to_doc", and any of "query_to_query", "doc_to_query",
            "doc_to_doc".
        partition_mode: "joint": one denominator for all directions. "per_direction": one for each.
        hardness_mode: the negatives whose logits are increased by ``hardness_strength`` times their similarity:
            "in_batch_negatives", "hard_negatives", "all_negatives", or None. The increase has no gradient.
        hardness_strength: a number that is at least 0.

    Attributes:
        evaluated_by: "engine" or "plain", for the last call. "plain" evaluates

            - small batches on a CPU, where it is faster
            - other similarities
            - embeddings that the engine rejects, such as NaN
            - rows with a norm below 1e-12, which `cos_sim` does not normalise
            - ``gather_across_devices`` with hardness weights, or with several directions in "joint" mode

    Raises:
        ValueError: an option has an unknown value, or does not fit the others.

    Source:
        arXiv 1705.00652; sentence_transformer/losses/multiple_negatives_ranking.py of sentence-transformers 6.2.0.
    """

    evaluated_by: EvaluatedBy = ""

    def __init__(
        self,
        model: Callable[..., Any] | None = None,
        scale: float = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = cos_sim,
        gather_across_devices: bool = False,
        directions: tuple[Direction, ...] = ("query_to_doc",),
        partition_mode: Literal["joint", "per_direction"] = "joint",
        hardness_mode: HardnessMode | None = None,
        hardness_strength: float = 0.0,
    ) -> None:
        super().__init__()
        if not scale > 0:
            raise ValueError(f"scale: expected a positive number, got {scale}")
        unknown = set(directions) - set(ORDER)
        if unknown or "query_to_doc" not in directions:
            raise ValueError(f"directions: expected query_to_doc and any of {', '.join(ORDER[1:])}, got {directions!r}")
        if partition_mode not in ("joint", "per_direction"):
            raise ValueError(f"partition_mode: expected one of joint, per_direction, got {partition_mode!r}")
        if partition_mode == "per_direction" and {"query_to_query", "doc_to_doc"} & set(directions):
            raise ValueError(
                "partition_mode: expected 'joint' with query_to_query and doc_to_doc, which contain no positives, got"
                " 'per_direction'"
            )
        if hardness_mode not in (None, "in_batch_negatives", "hard_negatives", "all_negatives"):
            modes = "None, in_batch_negatives, hard_negatives, all_negatives"
            raise ValueError(f"hardness_mode: expected one of {modes}, got {hardness_mode!r}")
        if hardness_strength < 0:
            raise ValueError(f"hardness_strength: expected a number of at least 0, got {hardness_strength}")
        if hardness_mode is not None and not hardness_strength:
            logger.warning("hardness_mode has no effect, because hardness_strength is 0")
        self.model = model
        self.scale = scale
        self.similarity_fct = similarity_fct
        self.gather_across_devices = gather_across_devices
        self.directions = tuple(directions)
        self.partition_mode = partition_mode
        self.hardness_mode = hardness_mode
        self.hardness_strength = hardness_strength

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """Embed the features of each column with the model, and return the loss.

        Args:
            sentence_features: the features of the queries, of the documents, and of each column of hard negatives.
            labels: has no effect.
        """
        return self.compute_loss_from_embeddings(_embedded(self.model, sentence_features), labels)

    def compute_loss_from_embeddings(self, embeddings: Sequence[Tensor], labels: Tensor | None = None) -> Tensor:
        """Return the loss of embeddings, a scalar.

        Args:
            embeddings: the queries, the documents, and any number of columns of hard negatives, each ``[N, D]``.
            labels: has no effect.

        Raises:
            ValueError: there are fewer than two columns.
        """
        if len(embeddings) < 2:
            raise ValueError(f"embeddings: expected at least 2 columns, got {len(embeddings)}")
        queries, documents = embeddings[0], list(embeddings[1:])
        count, first = queries.shape[0], 0
        answers, others = documents[0][:count], queries
        if self.gather_across_devices:
            first = get_rank() * count
            documents = [all_gather_with_grad(each) for each in documents]
            if len(self.directions) > 1:
                others = all_gather_with_grad(queries)
        similarity = _engine_similarity(self.similarity_fct)
        hardness = self.hardness_mode if self.hardness_strength else None
        apart = hardness is None and (len(self.directions) == 1 or self.partition_mode == "per_direction")
        wanted = similarity is not None and (apart or not self.gather_across_devices)
        wanted = wanted and large(queries, documents[0], ONE_BLOCK_FROM if apart else BLOCKS_FROM)
        if wanted and similarity == "cosine":
            wanted = _normalised_exactly([queries, *documents], SMALLEST_NORM["ranking"])

        def engine() -> Tensor:
            options: dict[str, Any] = {"temperature": 1 / self.scale, "similarity": similarity}
            if not apart:
                return multiple_negatives_ranking_loss(
                    queries,
                    documents[0],
                    hard_negatives=torch.stack(documents[1:], dim=1) if len(documents) > 1 else None,
                    directions=cast(Directions, "+".join(each for each in ORDER if each in self.directions)),
                    partition=self.partition_mode,
                    hardness_mode=hardness or "none",
                    hardness_strength=self.hardness_strength,
                    **options,
                )
            both = "doc_to_query" in self.directions
            if len(documents) == 1 and others is queries and documents[0].shape == queries.shape:
                return info_nce_loss(queries, documents[0], direction="both" if both else "a_to_b", **options)
            place = torch.arange(first, first + count, device=queries.device)
            # Each row has a positive, so no_positive has no effect. With "zero", the engine needs only one pass.
            options |= {"partners": place, "direction": "a_to_b", "no_positive": "zero"}
            contrast: Callable[..., Tensor] = partial(info_nce_loss, **options)
            loss = contrast(queries, torch.cat(documents))
            return (loss + contrast(answers, others)) / 2 if both else loss

        def plain() -> Tensor:
            return self._plain(queries, answers, others, documents, first, hardness)

        return evaluate(self, engine, plain, wanted=wanted)

    def _plain(
        self,
        queries: Tensor,
        answers: Tensor,
        others: Tensor,
        documents: list[Tensor],
        first: int,
        hardness: HardnessMode | None,
    ) -> Tensor:
        """Return the loss from the matrices of similarities.

        Args:
            queries: ``[N, D]``, those of this process.
            answers: ``[N, D]``, their documents.
            others: ``[W, D]``, the queries of all processes; not used if "query_to_doc" is the only direction.
            documents: the documents and the hard negatives of all processes, each ``[W, D]``.
            first: the row of this process's first query among all queries.
            hardness: the hardness mode, or None.
        """
        alike, candidates = self.similarity_fct, torch.cat(documents)
        rows = torch.arange(queries.shape[0], device=queries.device)
        place = rows + first
        itself = torch.arange(documents[0].shape[0], device=queries.device) == place[:, None]
        scores = alike(queries, candidates)
        logits = scores * self.scale
        if hardness:
            own = itself.repeat(1, len(documents))
            hard = torch.arange(scores.shape[1], device=queries.device) >= documents[0].shape[0]
            weighted = {"in_batch_negatives": ~own, "hard_negatives": own & hard, "all_negatives": ~own | hard}
            logits = logits + (self.hardness_strength * scores.detach()).masked_fill(~weighted[hardness], 0.0)
        blocks = [logits]
        if "query_to_query" in self.directions:
            blocks.append((alike(queries, others) * self.scale).masked_fill(itself, -torch.inf))
        if "doc_to_query" in self.directions:
            blocks.append(alike(others, answers).T * self.scale)
        if "doc_to_doc" in self.directions:
            own = itself.repeat(1, len(documents))
            blocks.append((alike(candidates, answers).T * self.scale).masked_fill(own, -torch.inf))
        if self.partition_mode == "joint":
            sums = torch.cat(blocks, dim=1).logsumexp(1)
        else:
            sums = torch.stack([block.logsumexp(1) for block in blocks]).mean(0)
        return (sums - logits[rows, place]).mean()

    def get_config_dict(self) -> dict[str, Any]:
        """Return the options."""
        names = ("scale", "gather_across_devices", "directions", "partition_mode", "hardness_mode", "hardness_strength")
        config: dict[str, Any] = {name: getattr(self, name) for name in names}
        function = self.similarity_fct
        return config | {"similarity_fct": getattr(function, "__name__", type(function).__name__)}

    @property
    def temperature(self) -> float:
        """One over the scale."""
        return 1 / self.scale


def _above(rows: Tensor, columns: Tensor, limits: Tensor) -> Tensor:
    """Return whether the cosines of rows ``[N, E]`` and ``[M, E]`` are above the limits ``[N, 1]``, bool ``[N, M]``.

    A matrix product rounds cosines differently from `F.cosine_similarity`. Cosines that are too close to the limit,
    such as those of duplicates, are therefore computed again.
    """
    smallest = SMALLEST_NORM["gist"]
    a, b = (each / torch.linalg.vector_norm(each, dim=1, keepdim=True).clamp_min(smallest) for each in (rows, columns))
    differences: Tensor = a @ b.T - limits
    found: Tensor = differences > 0
    bound = 2 * (rows.shape[1] + 4) * torch.finfo(rows.dtype).eps
    i, j = (differences.abs() <= bound).nonzero(as_tuple=True)
    found[i, j] = F.cosine_similarity(rows[i], columns[j]) > limits[i, 0]
    return found


class MultipleNegativesSymmetricRankingLoss(MultipleNegativesRankingLoss):
    """The mean of the losses from queries to documents and from documents to queries.

    It is `MultipleNegativesRankingLoss` with ``directions=("query_to_doc", "doc_to_query")`` and
    ``partition_mode="per_direction"``. sentence-transformers deprecates its class; this one does not warn.

    Example:
        >>> import torch
        >>> from pairproof.compat.sentence_transformers import MultipleNegativesSymmetricRankingLoss
        >>> queries = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> documents = torch.tensor([[0.8, 0.6], [0.6, 0.8]])
        >>> loss_function = MultipleNegativesSymmetricRankingLoss(scale=5.0)
        >>> print(f"{loss_function.compute_loss_from_embeddings([queries, documents]):.4f}")
        0.3133

    Args:
        model: a model; None if the loss is computed from embeddings.
        scale: what similarities are multiplied by.
        similarity_fct: the similarities ``[N, M]`` of rows ``[N, D]`` and ``[M, D]``.
        gather_across_devices: whether to contrast with the rows of all processes.

    Attributes:
        evaluated_by: "engine" or "plain", for the last call.

    Raises:
        ValueError: the scale is not positive.

    Source:
        multiple_negatives_symmetric_ranking.py of sentence-transformers 6.2.0.
    """

    def __init__(
        self,
        model: Callable[..., Any] | None = None,
        scale: float = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = cos_sim,
        gather_across_devices: bool = False,
    ) -> None:
        directions: tuple[Direction, ...] = ("query_to_doc", "doc_to_query")
        super().__init__(model, scale, similarity_fct, gather_across_devices, directions, "per_direction")


class GISTEmbedLoss(nn.Module):
    """The ranking loss of queries and documents, without the negatives that a guide model considers too similar.

    Let p_i be the guide's cosine of query i and document i. A pair of query i with another row, or of document i with
    another document, is left out if the guide's cosine of the pair is above the limit

        p_i - margin            under "absolute"
        p_i - margin * |p_i|    under "relative"

    The pair of query i and document i itself is never left out.

    Example:
        >>> import torch
        >>> from pairproof.compat.sentence_transformers import GISTEmbedLoss
        >>> queries = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> documents = torch.tensor([[0.8, 0.6], [0.6, 0.8]])
        >>> guide = [torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.6, 0.8], [0.0, 1.0]])]
        >>> loss_function = GISTEmbedLoss(temperature=0.2, margin=0.5, contrast_anchors=False, contrast_positives=False)
        >>> print(f"{loss_function.compute_loss_from_embeddings([queries, documents], guide):.4f}")
        0.1566

    Args:
        model: a model; None if the loss is computed from embeddings.
        guide: the guide model; None if the loss is computed from embeddings. The texts are tokenized again for the
            guide if its vocabulary differs or its maximum length is smaller.
        temperature: what cosines are divided by.
        margin_strategy: "absolute" or "relative".
        margin: how far the limit is below p_i; under "relative", as a fraction of |p_i|.
        contrast_anchors: whether queries are contrasted with the other queries.
        contrast_positives: whether documents are contrasted with the other documents.
        gather_across_devices: whether to contrast with the documents of all processes.
        contrast_self: True: as in sentence-transformers, a row is contrasted with itself if the limit is at least 1,
            for example if the guide embeds a query and its document equally and the margin is 0. False: a row is never
            contrasted with itself.

    Attributes:
        evaluated_by: "engine" or "plain", for the last call. "plain" evaluates

            - batches in which a row is contrasted with itself
            - ``gather_across_devices``
            - another ``similarity_fct`` or ``cross_entropy_loss``
            - embeddings that the engine rejects, such as NaN
            - rows with a norm below 1e-8, which `nn.CosineSimilarity` does not normalise

    Raises:
        ValueError: an option has an unknown value, or a model has no tokenizer with a vocabulary.

    Source:
        arXiv 2402.16829; sentence_transformer/losses/gist_embed.py of sentence-transformers 6.2.0.
    """

    evaluated_by: EvaluatedBy = ""
    contrast_self: bool = True

    def __init__(
        self,
        model: Any = None,
        guide: Any = None,
        temperature: float = 0.01,
        margin_strategy: Literal["absolute", "relative"] = "absolute",
        margin: float = 0.0,
        contrast_anchors: bool = True,
        contrast_positives: bool = True,
        gather_across_devices: bool = False,
        *,
        contrast_self: bool = True,
    ) -> None:
        super().__init__()
        if margin_strategy not in ("absolute", "relative"):
            raise ValueError(f"margin_strategy: expected one of absolute, relative, got {margin_strategy!r}")
        if (model is None) != (guide is None):
            raise ValueError("guide: expected a guide if and only if there is a model")
        self.must_retokenize = False
        for name, each in {"model": model, "guide": guide}.items():
            if each is not None and not hasattr(getattr(each, "tokenizer", None), "get_vocab"):
                raise ValueError(f"{name}: expected a model with a tokenizer, got {type(each).__name__}")
        if model is not None:
            same = model.tokenizer.get_vocab() == guide.tokenizer.get_vocab()
            self.must_retokenize = not same or guide.max_seq_length < model.max_seq_length
        if self.must_retokenize:
            self.tokenizer = model.tokenizer
        self.model = model
        self.guide = guide
        self.temperature = temperature
        self.similarity_fct: nn.Module = nn.CosineSimilarity(dim=-1)
        self.margin_strategy = margin_strategy
        self.margin = margin
        self.contrast_anchors = contrast_anchors
        self.contrast_positives = contrast_positives
        self.gather_across_devices = gather_across_devices
        self.contrast_self = contrast_self
        self.cross_entropy_loss: nn.Module = nn.CrossEntropyLoss()

    def sim_matrix(self, embed1: Tensor, embed2: Tensor) -> Tensor:
        """Return the similarities ``[N, M]`` of rows ``[N, D]`` and ``[M, D]``."""
        found: Tensor = self.similarity_fct(embed1.unsqueeze(1), embed2.unsqueeze(0))
        return found

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """Embed the features of each column with both models, and return the loss.

        Args:
            sentence_features: the features of the queries, of the documents, and of the hard negatives, if any.
            labels: has no effect.
        """
        columns = list(sentence_features)
        # Models write their results into the features.
        copies = [dict(features) for features in columns]
        embeddings = _embedded(self.model, columns)
        with torch.no_grad():
            if self.must_retokenize:
                copies = [self._tokenized_again(features) for features in copies]
            guided = _embedded(self.guide, copies)
        return self.compute_loss_from_embeddings(embeddings, guided)

    def _tokenized_again(self, features: dict[str, Tensor]) -> dict[str, Any]:
        """Return the features of the same texts for the guide."""
        ids: Any = features["input_ids"]
        if "cu_seq_lens_q" in features:  # all texts in one row, and where each starts
            bounds, flat = features["cu_seq_lens_q"].tolist(), ids[0].tolist()
            ids = [flat[start:end] for start, end in pairwise(bounds)]
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        given, device = self.guide.preprocess(texts), self.guide.device
        return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}

    def compute_loss_from_embeddings(self, embeddings: Sequence[Tensor], guide_embeddings: Sequence[Tensor]) -> Tensor:
        """Return the loss of embeddings, a scalar.

        Args:
            embeddings: the queries, the documents and, if any, the hard negatives, each ``[N, D]``.
            guide_embeddings: the guide's embeddings of the same columns, each ``[N, E]``.

        Raises:
            ValueError: there are not two or three columns, or the numbers of columns differ.
        """
        if len(embeddings) not in (2, 3) or len(guide_embeddings) != len(embeddings):
            given = f"{len(embeddings)} and {len(guide_embeddings)} of the guide"
            raise ValueError(f"embeddings: expected 2 or 3 columns, and as many of the guide, got {given}")
        queries, *documents = embeddings
        of_queries, *of_documents = (each.detach() for each in guide_embeddings)
        wanted = (
            type(self.similarity_fct) is nn.CosineSimilarity and type(self.cross_entropy_loss) is nn.CrossEntropyLoss
        )
        wanted = wanted and not self.gather_across_devices and may_read(queries, validate=True)
        wanted = wanted and _normalised_exactly(embeddings, SMALLEST_NORM["gist"])
        masks = self._left_out(of_queries, of_documents) if wanted else {}
        for name in ("query_to_query", "doc_to_doc"):
            if name in masks and not self.contrast_self:
                masks[name].fill_diagonal_(True)
            wanted = wanted and (name not in masks or bool(masks[name].diagonal().all()))

        def engine() -> Tensor:
            chosen = [name for name in ORDER if name in masks]
            return multiple_negatives_ranking_loss(
                queries,
                documents[0],
                hard_negatives=documents[1].unsqueeze(1) if len(documents) == 2 else None,
                directions=cast(Directions, "+".join(chosen)),
                ignored=torch.cat([*masks.values()], dim=1),
                temperature=self.temperature,
            )

        return evaluate(self, engine, partial(self._plain, queries, documents, of_queries, of_documents), wanted=wanted)

    def _limits(self, positives: Tensor) -> Tensor:
        """Return the limit of each query ``[N, 1]``, given the guide's similarities of the positives ``[N]``."""
        below = positives.abs() * self.margin if self.margin_strategy == "relative" else self.margin
        return (positives - below).unsqueeze(1)

    def _left_out(self, of_queries: Tensor, of_documents: list[Tensor]) -> dict[str, Tensor]:
        """Return the masks of the left-out pairs, in the order of `multiple_negatives_ranking_loss`."""
        first = of_documents[0]
        limits = self._limits(F.cosine_similarity(of_queries, first))
        masks = {"query_to_doc": _above(of_queries, first, limits).fill_diagonal_(False)}
        if len(of_documents) == 2:
            masks["hard"] = _above(of_queries, of_documents[1], limits)
        if self.contrast_anchors:
            masks["query_to_query"] = _above(of_queries, of_queries, limits)
        if self.contrast_positives:
            masks["doc_to_doc"] = _above(first, first, limits)
            if len(of_documents) == 2:
                # GISTEmbedLoss does not contrast documents with hard negatives.
                masks["doc_to_hard"] = torch.ones_like(masks["hard"])
        return masks

    def _plain(
        self, queries: Tensor, documents: list[Tensor], of_queries: Tensor, of_documents: list[Tensor]
    ) -> Tensor:
        count, first = queries.shape[0], 0
        if self.gather_across_devices:
            first = get_rank() * count
            documents, of_documents = ([all_gather_with_grad(x) for x in each] for each in (documents, of_documents))
        answers, of_answers = documents[0][first : first + count], of_documents[0][first : first + count]
        alike = self.sim_matrix(of_queries, of_documents[0])
        limits = self._limits(alike.diagonal(first))
        positives = torch.zeros_like(alike, dtype=torch.bool)
        positives.diagonal(first).fill_(True)
        scores = [self.sim_matrix(queries, documents[0]).masked_fill((alike > limits) & ~positives, -torch.inf)]
        if self.contrast_anchors:
            left_out = self.sim_matrix(of_queries, of_queries) > limits
            left_out = left_out if self.contrast_self else left_out.fill_diagonal_(True)
            scores.append(self.sim_matrix(queries, queries).masked_fill(left_out, -torch.inf))
        if self.contrast_positives:
            left_out = self.sim_matrix(of_answers, of_documents[0]) > limits
            left_out = left_out if self.contrast_self else left_out | positives
            scores.append(self.sim_matrix(answers, documents[0]).masked_fill(left_out, -torch.inf))
        if len(documents) == 2:
            left_out = self.sim_matrix(of_queries, of_documents[1]) > limits
            scores.append(self.sim_matrix(queries, documents[1]).masked_fill(left_out, -torch.inf))
        place = torch.arange(first, first + count, device=queries.device)
        loss: Tensor = self.cross_entropy_loss(torch.cat(scores, dim=1) / self.temperature, place)
        return loss

    def get_config_dict(self) -> dict[str, Any]:
        """Return the guide and the options, except ``contrast_self``."""
        names = ("guide", "temperature", "margin_strategy", "margin", "contrast_anchors", "contrast_positives")
        return {name: getattr(self, name) for name in (*names, "gather_across_devices")}
