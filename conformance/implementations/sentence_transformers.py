"""sentence-transformers' ranking losses, loaded from single files without the package.

Terms:

- Queries are the anchors, documents the other tower. The scale is 1 / temperature.
- "query_to_doc" is the direction from a to b, "doc_to_query" that from b to a. The loss always includes "query_to_doc",
  so the adapter swaps the towers for cases of info_nce from b to a.
- Hard negatives are further columns of documents, each with one document per query. They are added to the other
  documents of the batch. Cases with the negatives of info_nce, which replace the other documents, are not
  supported.

The cached losses and ``GISTEmbedLoss`` call a model; here, it returns the rows of the case. ``GISTEmbedLoss`` also
calls a second model, the guide: it leaves out the pairs whose cosine in the guide's embeddings exceeds that of the
query and its document.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch

from pairproof.reference.ranking import hard_of_documents

from ..suite.cases import Case, called
from .base import Support, clamped_norms
from .files import FilePeer, load_from_package

TOP = "sentence_transformers"
LOSSES = f"{TOP}.sentence_transformer.losses"
PACKAGES = (TOP, f"{TOP}.util", f"{TOP}.base", f"{TOP}.base.losses", f"{TOP}.sentence_transformer", LOSSES)
UNUSED = (
    *(f"{TOP}.base.losses.merged_forward", f"{TOP}.base.losses.merged_forward.embed_columns"),
    *(f"{TOP}.sentence_transformer.model", f"{TOP}.sentence_transformer.model.SentenceTransformer"),
    f"{TOP}.sentence_transformer.SentenceTransformer",
    *(f"{TOP}.sentence_transformer.modules", f"{TOP}.sentence_transformer.modules.StaticEmbedding"),
    *(f"{TOP}.util.{name}" for name in ("all_gather_with_grad", "batch_to_device", "get_rank")),
    *(f"{TOP}.util.{name}" for name in ("cos_sim", "similarity_fct_name")),
)
"""Unneeded imports of the files: they run models, gather across processes, or are the default similarity."""

STUBS: Mapping[str, Mapping[str, Any]] = {
    "sklearn": {},
    "sklearn.metrics": {"pairwise_distances": None},
    "packaging": {},
    "packaging.version": {"Version": None},
    "tqdm": {"tqdm": lambda found, **_: found, "trange": lambda *ends, **_: range(*ends)},
    "transformers": {"PreTrainedTokenizerBase": object},
    "transformers.utils": {"is_torchdynamo_compiling": None, "logging": SimpleNamespace(get_logger=logging.getLogger)},
}
"""Substitutes for the names that the files import from other packages."""


@contextmanager
def _stubbed() -> Iterator[None]:
    """Replace other packages by ``STUBS``."""
    before = {name: sys.modules.get(name) for name in STUBS}
    try:
        for name, attributes in STUBS.items():
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(attributes)
        yield
    finally:
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


FOLDER = "sentence-transformers/sentence_transformers"
LOSS_FILES: Mapping[str, str] = {
    "multiple_negatives_ranking": "589a44dd31826ef5a945d7138bbe4b085263dc070dbbc684f2131303f470e29b",
    "multiple_negatives_symmetric_ranking": "77d0618cff08ffa8a3f6b906dfd64ce6b92f151bd133573a734a64cfe95b2a8c",
    "cached_multiple_negatives_ranking": "13bb849c271d2e9fa2e91e996747e6952f73200bc621e2eaa69caf31bf6c0d49",
    "gist_embed": "beda26b4cec16b49056e07254585ccf71fa511426c3346f57d24902eb6f67b3f",
    "cached_gist_embed": "95cbe19941bfe5b88a755920723254d0a9a8921d30bd52fe7c57c8c472c82de8",
}
"""The SHA-256 of the file of each loss."""
FILES: Mapping[str, str] = {
    "util/similarity": "eb3508514bbded02bfc7ad5f07e39ee114a5e4eb03b18d79436b2316f5cc1edb",
    "util/tensor": "3a1b314211ce265f2adfcde96b3b28f6332373bc07bf1b43394c44de9595c0b7",
    "base/losses/gradcache": "573c6587c188c8e3c2ddd1711ef6b8a09b182511ed93b27d331d4cefa734bfba",
}
"""The SHA-256 of the other files."""
SIMILARITIES = ("util/similarity", "util/tensor")


def _files(*losses: str, others: Iterable[str] = ()) -> dict[str, str]:
    """Return the checksums of the files of losses, the first one in front, and of other files."""
    return {
        **{f"{FOLDER}/sentence_transformer/losses/{name}.py": LOSS_FILES[name] for name in losses},
        **{f"{FOLDER}/{name}.py": FILES[name] for name in others},
    }


class _Loss(FilePeer):
    requirement = "sentence-transformers==6.2.0"

    def module(self) -> Any:
        """Import the module of the loss, make it call models directly, and declare that they have no static rows."""
        with _stubbed():
            loaded = load_from_package(self.path.parents[3], f"{LOSSES}.{self.path.stem}", PACKAGES, UNUSED)
        loaded.embed_columns = lambda model, columns: [model(rows)["sentence_embedding"] for rows in columns]
        loaded.has_static_embedding_input = lambda model: False
        return loaded

    def columns(self, case: Case, given: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the queries, the documents, and one matrix for each hard negative of a query."""
        queries, documents = given["embeddings_a"], given["embeddings_b"]
        if case.option("direction") == "b_to_a":
            queries, documents = documents, queries
        hard = called(given).get("hard_negatives")
        return [queries, documents, *(() if hard is None else hard.unbind(dim=1))]


class _Ranking(_Loss):
    def module(self) -> Any:
        with _stubbed():
            similarity = load_from_package(self.path.parents[3], f"{TOP}.util.similarity", PACKAGES)
        self.similarities = {"cosine": similarity.cos_sim, "dot": similarity.dot_score}
        return super().module()

    def options(self, case: Case) -> dict[str, Any]:
        if case.loss == "info_nce":
            both = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
            return both if case.option("direction") == "both" else {}
        mode = case.option("hardness_mode")
        return {
            "directions": tuple(case.option("directions").split("+")),
            "partition_mode": case.option("partition"),
            "hardness_strength": case.option("hardness_strength"),
            "hardness_mode": None if mode == "none" else mode,
        }

    def constructed(self, case: Case, model: Any, **options: Any) -> Any:
        return self.loss(model, 1 / case.temperature, self.similarities[case.option("similarity")], **options)


class SentenceTransformers(_Ranking):
    """``MultipleNegativesRankingLoss`` of sentence-transformers, without distributed processes."""

    name = "sentence-transformers"
    title = "MultipleNegativesRankingLoss"
    files: ClassVar[Mapping[str, str]] = _files("multiple_negatives_ranking", others=SIMILARITIES)
    attribute = "MultipleNegativesRankingLoss"
    support = Support(
        losses=("info_nce", "multiple_negatives_ranking"),
        options={"reduction": ("mean",), "hard_negatives_scope": ("batch",), "doc_to_doc_hard": (None, "others")},
        lacks=("negatives", "base_temperature"),
    )
    deviations = (clamped_norms(1e-12),)

    def value(self, case: Case, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Evaluate ``MultipleNegativesRankingLoss`` on the embeddings, without a model."""
        module = self.constructed(case, None, **self.options(case))
        loss: torch.Tensor = module.compute_loss_from_embeddings(self.columns(case, given), None)
        return loss


class SymmetricSentenceTransformers(_Ranking):
    """``MultipleNegativesSymmetricRankingLoss``: ``MultipleNegativesRankingLoss`` in two directions."""

    name = "sentence-transformers-symmetric"
    title = "MultipleNegativesSymmetricRankingLoss"
    files: ClassVar[Mapping[str, str]] = _files(
        "multiple_negatives_symmetric_ranking", "multiple_negatives_ranking", others=SIMILARITIES
    )
    attribute = "MultipleNegativesSymmetricRankingLoss"
    support = Support(
        losses=("multiple_negatives_ranking",),
        options={
            "reduction": ("mean",),
            "hard_negatives_scope": ("batch",),
            "directions": ("query_to_doc+doc_to_query",),
            "partition": ("per_direction",),
            "doc_to_doc_hard": (None, "others"),
            "hardness_mode": ("none",),
        },
        lacks=("base_temperature",),
    )

    def value(self, case: Case, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Evaluate the loss on the embeddings, without a model."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The MultipleNegativesSymmetricRankingLoss is deprecated")
            module = self.constructed(case, None)
        loss: torch.Tensor = module.compute_loss_from_embeddings(self.columns(case, given), None)
        return loss


class _Model:
    """A model that returns its input, with the attributes that the losses use."""

    tokenizer = SimpleNamespace(get_vocab=dict)
    max_seq_length = 1

    def __init__(self, returns: str = "rows") -> None:
        self.returns = returns

    def __call__(self, features: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sentence_embedding": features[self.returns]}


class _Cached(torch.autograd.Function):
    """Make ``torch.autograd.grad`` work for a loss whose backward pass writes to the attribute ``grad``."""

    @staticmethod
    def forward(ctx: Any, loss: Callable[[list[torch.Tensor]], Any], *columns: torch.Tensor) -> torch.Tensor:
        ctx.leaves = [column.detach().requires_grad_() for column in columns]
        with torch.enable_grad():
            ctx.loss = loss(ctx.leaves)
        found: torch.Tensor = ctx.loss.detach()
        return found

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        ctx.loss.backward(*upstream)
        return None, *(leaf.grad for leaf in ctx.leaves)


class CachedSentenceTransformers(_Ranking):
    """``CachedMultipleNegativesRankingLoss``, with at most three mini-batches."""

    name = "sentence-transformers-cached"
    title = "CachedMultipleNegativesRankingLoss"
    dtypes = ("float64",)  # one dtype suffices, because the formula is that of the loss without mini-batches
    files: ClassVar[Mapping[str, str]] = _files(
        "cached_multiple_negatives_ranking", "multiple_negatives_ranking", others=FILES
    )
    attribute = "CachedMultipleNegativesRankingLoss"
    support = Support(
        losses=("multiple_negatives_ranking",),
        options={"reduction": ("mean",), "hard_negatives_scope": ("batch",), "doc_to_doc_hard": (None, "others")},
        lacks=("base_temperature",),
    )
    deviations = (clamped_norms(1e-12),)

    def value(self, case: Case, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Evaluate the loss with a model that returns the embeddings."""
        module = self.constructed(case, _Model(), **self.options(case), mini_batch_size=-(-case.n // 3))
        columns = self.columns(case, given)
        loss: torch.Tensor = _Cached.apply(  # type: ignore[no-untyped-call]
            lambda leaves: module([{"rows": leaf} for leaf in leaves], None), *columns
        )
        return loss


class GistSentenceTransformers(_Loss):
    """``GISTEmbedLoss``, with guides that leave out the ignored pairs of a case and all self pairs.

    If the guide's embeddings of a query and its document are equal, the loss contrasts rows with themselves. The guides
    here have no equal embeddings; tests/test_ranking.py tests a guide that has.
    """

    name = "sentence-transformers-gist"
    title = "GISTEmbedLoss"
    dtypes = ("float64",)
    files: ClassVar[Mapping[str, str]] = _files("gist_embed")
    attribute = "GISTEmbedLoss"
    support = Support(
        losses=("multiple_negatives_ranking",),
        options={
            "similarity": ("cosine",),
            "reduction": ("mean",),
            "hard_negatives_scope": ("batch",),
            "partition": ("joint",),
            "doc_to_doc_hard": (None, "others", "none"),
            "hardness_mode": ("none",),
            "directions": (
                "query_to_doc",
                "query_to_doc+query_to_query",
                "query_to_doc+doc_to_doc",
                "query_to_doc+query_to_query+doc_to_doc",
            ),
        },
        lacks=("base_temperature",),
        also=(
            ("has several hard negatives per query", lambda case: len(_hard(case)) > case.n),
            ("contrasts documents with hard negatives", lambda case: not _ignored(case).get("doc_to_hard", TRUE).all()),
            ("has more than 64 rows", lambda case: case.n > 64),  # N^2 D products at once
            ("has a mask that no guide gives", lambda case: any((m != m.T).any() for m in _within(case))),
        ),
        takes=("ignored",),
    )
    deviations = (clamped_norms(1e-12),)

    def value(self, case: Case, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Evaluate the loss with a model that returns the embeddings, and a guide that gives the ignored pairs."""
        further = case.option("directions")
        contrast = {"contrast_anchors": "query_to_query" in further, "contrast_positives": "doc_to_doc" in further}
        columns = self.columns(case, given)
        return self.of_columns(columns, _guides(case), temperature=case.temperature, **contrast)

    def of_columns(
        self, columns: Iterable[torch.Tensor], guides: Iterable[torch.Tensor], **options: Any
    ) -> torch.Tensor:
        """Evaluate the loss with a model that returns ``columns`` and a guide that returns ``guides``."""
        module: Any = self.loss(_Model(), _Model("guide"), **options)
        loss: torch.Tensor = module(_features(columns, guides), None)
        return loss


class CachedGistSentenceTransformers(GistSentenceTransformers):
    """``CachedGISTEmbedLoss``, with at most three mini-batches."""

    name = "sentence-transformers-cached-gist"
    title = "CachedGISTEmbedLoss"
    files: ClassVar[Mapping[str, str]] = _files("cached_gist_embed", others=["base/losses/gradcache"])
    attribute = "CachedGISTEmbedLoss"

    def of_columns(
        self, columns: Iterable[torch.Tensor], guides: Iterable[torch.Tensor], **options: Any
    ) -> torch.Tensor:
        """Evaluate the loss with a model that returns ``columns`` and a guide that returns ``guides``."""
        rows, guides = list(columns), list(guides)
        module: Any = self.loss(_Model(), _Model("guide"), mini_batch_size=-(-len(rows[0]) // 3), **options)
        loss: torch.Tensor = _Cached.apply(  # type: ignore[no-untyped-call]
            lambda leaves: module(_features(leaves, guides), None), *rows
        )
        return loss


def _features(columns: Iterable[torch.Tensor], guides: Iterable[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Return the input of a loss with a guide: what the model and the guide return."""
    return [{"rows": rows, "guide": guide} for rows, guide in zip(columns, guides, strict=True)]


Mask = np.ndarray[Any, np.dtype[np.bool_]]
TRUE: Mask = np.ones((1, 1), dtype=bool)


def _hard(case: Case) -> Any:
    return case.others.get("hard_negatives", ())


def _ignored(case: Case) -> dict[str, Mask]:
    """Return the mask of ignored pairs, split into named blocks of columns; all False without ``ignored``."""
    n, hard, further = case.n, len(_hard(case)), case.option("directions").split("+")[1:]
    widths = {"query_to_doc": n, "hard": hard, **dict.fromkeys(further, n)}
    kind = hard_of_documents(case.option("doc_to_doc_hard"), case.option("hard_negatives_scope"))
    widths |= {"doc_to_hard": hard} if "doc_to_doc" in further and hard and kind != "none" else {}
    given = case.arguments.get("ignored")
    mask = np.zeros((n, sum(widths.values())), dtype=bool) if given is None else np.array(given, dtype=bool)
    return dict(zip(widths, np.split(mask, np.cumsum([*widths.values()])[:-1], axis=1), strict=True))


def _within(case: Case) -> list[Mask]:
    """Return the masks of pairs of two queries and of two documents."""
    return [mask for name, mask in _ignored(case).items() if name in ("query_to_query", "doc_to_doc")]


def _guides(case: Case) -> list[torch.Tensor]:
    """Return guide embeddings of queries, documents and hard negatives that give the mask of a case.

    The cosines are c for a query and its document, 2c for an ignored pair, and 0 for other pairs, with a small c.
    """
    n, ignored = case.n, _ignored(case)
    number = 3 if len(_hard(case)) else 2
    sides = {"query_to_doc": (0, 1), "hard": (0, 2), "query_to_query": (0, 0), "doc_to_doc": (1, 1)}
    wanted = np.zeros((number * n, number * n))
    for name, (left, right) in sides.items():
        if name in ignored and ignored[name].size:
            wanted[left * n : (left + 1) * n, right * n : (right + 1) * n] = 2.0 * ignored[name]
    np.fill_diagonal(wanted[:n, n:], 1.0)
    np.fill_diagonal(wanted, 0.0)
    wanted = np.maximum(wanted, wanted.T)
    cosines = np.eye(number * n) + wanted / (2 * wanted.sum(axis=1).max())
    return [torch.tensor(rows) for rows in np.split(np.linalg.cholesky(cosines), number)]
