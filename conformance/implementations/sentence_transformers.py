"""sentence-transformers' ``MultipleNegativesRankingLoss``, its file and those of its similarities, without the package.

Terms: queries are the anchors and documents the other tower; the scale is one over the temperature; "query_to_doc" is
the direction from a to b, and "doc_to_query" the other. The loss cannot leave out "query_to_doc": for the direction
from b to a of info_nce, the towers are swapped. Hard negatives are columns of documents, one per query each; they are
added to the other documents of the batch, and do not replace them, so the negatives of info_nce are not supported.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch

from ..suite.cases import Case, called
from .base import Support, clamped_norms
from .files import FilePeer, load_from_package

TOP = "sentence_transformers"
LOSSES = f"{TOP}.sentence_transformer.losses"
PACKAGES = (TOP, f"{TOP}.util", f"{TOP}.base", f"{TOP}.base.losses", f"{TOP}.sentence_transformer", LOSSES)
UNUSED = (
    *(f"{TOP}.base.losses.merged_forward", f"{TOP}.base.losses.merged_forward.embed_columns"),
    *(f"{TOP}.sentence_transformer.model", f"{TOP}.sentence_transformer.model.SentenceTransformer"),
    *(f"{TOP}.util.{name}" for name in ("all_gather_with_grad", "cos_sim", "get_rank", "similarity_fct_name")),
)
"""What the file of the loss imports to run the model and to gather across processes, and the default similarity, which
the adapter passes explicitly: ``util`` exports it from ``similarity.py``."""

STUBS: Mapping[str, Mapping[str, Any]] = {
    "sklearn": {},
    "sklearn.metrics": {"pairwise_distances": None},
    "transformers": {},
    "transformers.utils": {
        "is_torchdynamo_compiling": None,
        "logging": SimpleNamespace(get_logger=logging.getLogger),
    },
}
"""What ``similarity.py`` imports from other packages, for its logger and for similarities that are not used here."""


@contextmanager
def _stubbed() -> Iterator[None]:
    """Replace other packages by modules with the names of ``STUBS``."""
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


class SentenceTransformers(FilePeer):
    """``MultipleNegativesRankingLoss`` of sentence-transformers, without distributed processes and hardness weights."""

    name = "sentence-transformers"
    title = "its MultipleNegativesRankingLoss"
    requirement = "sentence-transformers==6.2.0"
    files: ClassVar[Mapping[str, str]] = {
        "sentence-transformers/sentence_transformers/sentence_transformer/losses/multiple_negatives_ranking.py": (
            "589a44dd31826ef5a945d7138bbe4b085263dc070dbbc684f2131303f470e29b"
        ),
        "sentence-transformers/sentence_transformers/util/similarity.py": (
            "eb3508514bbded02bfc7ad5f07e39ee114a5e4eb03b18d79436b2316f5cc1edb"
        ),
        "sentence-transformers/sentence_transformers/util/tensor.py": (
            "3a1b314211ce265f2adfcde96b3b28f6332373bc07bf1b43394c44de9595c0b7"
        ),
    }
    attribute = "MultipleNegativesRankingLoss"
    support = Support(
        losses=("info_nce", "multiple_negatives_ranking"),
        options={"reduction": ("mean",), "hard_negatives_scope": ("batch",)},
        lacks=("negatives", "base_temperature"),
    )
    deviations = (clamped_norms(1e-12),)

    def module(self) -> Any:
        """Import the loss and the similarities without the rest of the package."""
        folder = self.path.parents[3]
        with _stubbed():
            similarity = load_from_package(folder, f"{TOP}.util.similarity", PACKAGES)
        self.similarities = {"cosine": similarity.cos_sim, "dot": similarity.dot_score}
        return load_from_package(folder, f"{LOSSES}.multiple_negatives_ranking", PACKAGES, UNUSED)

    def value(self, case: Case, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Evaluate ``MultipleNegativesRankingLoss`` on the embeddings, without a model."""
        queries, documents = given["embeddings_a"], given["embeddings_b"]
        if case.option("direction") == "b_to_a":
            queries, documents = documents, queries
        options: dict[str, Any] = {}
        if case.loss == "multiple_negatives_ranking":
            options = {"directions": tuple(case.option("directions").split("+"))}
            options["partition_mode"] = case.option("partition")
            options["hardness_strength"] = case.option("hardness_strength")
            options["hardness_mode"] = None if case.option("hardness_mode") == "none" else case.option("hardness_mode")
        elif case.option("direction") == "both":
            options = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
        module: Any = self.loss(None, 1 / case.temperature, self.similarities[case.option("similarity")], **options)
        hard = called(given).get("hard_negatives")
        columns = [] if hard is None else list(hard.unbind(dim=1))
        loss: torch.Tensor = module.compute_loss_from_embeddings([queries, documents, *columns], None)
        return loss
