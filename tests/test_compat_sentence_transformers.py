"""`pairproof.compat.sentence_transformers` against the classes of sentence-transformers."""

from __future__ import annotations

import doctest
import logging
import math
import sys
import unittest
from collections.abc import Callable, Sequence
from itertools import chain, combinations, product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from pairproof.compat import sentence_transformers as ours
from pairproof.conformance.implementations import sentence_transformers as peer
from pairproof.conformance.implementations.base import Unavailable
from pairproof.conformance.implementations.files import load_from_package
from pairproof.fast import cached_backward
from tests.ranks import on_ranks
from tests.snapshots import check_own_tests

EXACT = 1e-9
"""Relative bound on differences in float64, values and gradients."""


class Tokenizer:
    """A tokenizer of transformers: each character is a token."""

    def __init__(self, letters: str = "abcdef") -> None:
        self.letters = letters

    def get_vocab(self) -> dict[str, int]:
        return {letter: number for number, letter in enumerate(self.letters)}

    def batch_decode(self, ids: Any, skip_special_tokens: bool) -> list[str]:
        return ["".join(self.letters[number] for number in row) for row in ids]


def loaded(folder: Path) -> SimpleNamespace:
    """The classes of sentence-transformers, from its files, without the packages that they import."""
    util, top = f"{peer.TOP}.util", f"{peer.TOP}.sentence_transformer"
    before = sys.modules.get("transformers")
    transformers = sys.modules["transformers"] = ModuleType("transformers")
    transformers.PreTrainedTokenizerBase = Tokenizer  # type: ignore[attr-defined]
    try:
        unused = (*peer.UNUSED, f"{util}.batch_to_device", f"{top}.modules", f"{top}.modules.StaticEmbedding")
        ranking, gist = (
            load_from_package(folder, f"{peer.LOSSES}.{name}", peer.PACKAGES, unused)
            for name in ("multiple_negatives_ranking", "gist_embed")
        )
    finally:
        del sys.modules["transformers"]
        if before is not None:
            sys.modules["transformers"] = before
    gist.StaticEmbedding = int
    gist.batch_to_device = lambda features, device: features
    for module in (ranking, gist):
        module.embed_columns = lambda model, columns: [model(each)["sentence_embedding"] for each in columns]
        module.get_rank = lambda: dist.get_rank() if dist.is_initialized() else 0
        module.all_gather_with_grad = lambda rows: torch.cat(torch.distributed.nn.all_gather(rows))
    return SimpleNamespace(
        MultipleNegativesRankingLoss=ranking.MultipleNegativesRankingLoss, GISTEmbedLoss=gist.GISTEmbedLoss
    )


@pytest.fixture(scope="session")
def folder() -> Path:
    try:
        return peer.SentenceTransformers({}, "cpu").path.parents[3]
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def theirs(folder: Path) -> SimpleNamespace:
    return loaded(folder)


@pytest.fixture(params=["engine", "plain"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    least = 0 if request.param == "engine" else math.inf
    monkeypatch.setattr(ours, "ONE_BLOCK_FROM", least)
    monkeypatch.setattr(ours, "BLOCKS_FROM", least)
    return str(request.param)


def columns(number: int, rows: int = 7, dim: int = 5, seed: int = 0) -> list[torch.Tensor]:
    """Queries, documents that are near their query for even rows, and hard negatives."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(number, rows, dim, generator=generator, dtype=torch.float64)
    drawn[1, ::2] = drawn[0, ::2] + 0.4 * drawn[1, ::2]
    return list(drawn)


def result(loss: Callable[..., torch.Tensor], embeddings: Sequence[torch.Tensor], *more: Any) -> list[torch.Tensor]:
    given = [each.clone().requires_grad_() for each in embeddings]
    value = loss(given, *more)
    return [value.detach(), *torch.autograd.grad(value, given)]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor], bound: float = EXACT) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        # A gradient of 0 is computed as a sum of rounding errors of logits up to 100.
        assert (one - other).norm() <= bound * other.norm() + 1e-12, (one, other)


FURTHER = ("query_to_query", "doc_to_query", "doc_to_doc")
DIRECTIONS = [("query_to_doc", *some) for some in chain(*(combinations(FURTHER, count) for count in range(4)))]
HARDNESS = [(None, 0.0), ("in_batch_negatives", 3.0), ("hard_negatives", 5.0), ("all_negatives", 1.5)]
SIMILARITIES = {"cosine": ours.cos_sim, "dot": ours.dot_score}


SETTINGS = list(product(SIMILARITIES.values(), (20.0, 1.0), (2, 3, 4)))
"""The similarity, the scale, and the number of columns."""


@pytest.mark.parametrize("settings", [SETTINGS[1::5], pytest.param(SETTINGS, marks=pytest.mark.slow)], ids=len)
@pytest.mark.parametrize("directions", DIRECTIONS, ids="+".join)
@pytest.mark.parametrize("partition", ["joint", "per_direction"])
@pytest.mark.parametrize("hardness", HARDNESS, ids=str)
@pytest.mark.quick(43)
def test_ranking_loss_equals_sentence_transformers(
    theirs: Any,
    form: str,
    directions: tuple[Any, ...],
    partition: Any,
    hardness: tuple[Any, float],
    settings: list[tuple[Any, float, int]],
) -> None:
    options = dict(zip(("hardness_mode", "hardness_strength"), hardness, strict=True))
    options |= {"directions": directions[::-1], "partition_mode": partition}
    if partition == "per_direction" and {"query_to_query", "doc_to_doc"} & set(directions):
        for library in (ours, theirs):
            with pytest.raises(ValueError, match="query_to_query"):
                library.MultipleNegativesRankingLoss(None, 20.0, ours.cos_sim, **options)
        return
    for function, scale, number in settings:
        for rows in (1, 7):
            loss, original = (
                library.MultipleNegativesRankingLoss(None, scale, function, **options) for library in (ours, theirs)
            )
            given = columns(number, rows)
            expected = result(original.compute_loss_from_embeddings, given, None)
            assert_equal(result(loss.compute_loss_from_embeddings, given), expected)
            assert loss.evaluated_by == form
            assert loss.temperature == original.temperature


def test_symmetric_loss_equals_that_computed_by_hand(form: str) -> None:
    queries = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    documents = torch.tensor([[0.6, 0.8], [0.0, 1.0]], dtype=torch.float64)
    # Logits at scale 5: [[3, 0], [4, 5]].
    of_queries = math.log1p(math.exp(-3)) + math.log1p(math.exp(-1))
    of_documents = math.log1p(math.exp(1)) + math.log1p(math.exp(-5))
    loss = ours.MultipleNegativesSymmetricRankingLoss(scale=5.0)
    found = loss.compute_loss_from_embeddings([queries, documents])
    assert found.item() == pytest.approx((of_queries + of_documents) / 4, rel=1e-14)
    assert loss.evaluated_by == form
    one = ours.MultipleNegativesRankingLoss(scale=5.0).compute_loss_from_embeddings([queries, documents])
    assert one.item() == pytest.approx(of_queries / 2, rel=1e-14)


def test_more_documents_than_queries_give_the_librarys_result(theirs: Any, form: str) -> None:
    queries, documents, hard = columns(3)
    given = [queries[:4], documents, hard[:2]]
    loss, original = (each.MultipleNegativesRankingLoss(None, 20.0, ours.cos_sim) for each in (ours, theirs))
    assert_equal(
        result(loss.compute_loss_from_embeddings, given), result(original.compute_loss_from_embeddings, given, None)
    )
    assert loss.evaluated_by == form


@pytest.mark.parametrize("directions", [("query_to_doc",), DIRECTIONS[-1]], ids=len)
def test_rows_and_similarities_that_the_engine_rejects_give_the_librarys_result(
    theirs: Any, monkeypatch: pytest.MonkeyPatch, directions: tuple[Any, ...]
) -> None:
    monkeypatch.setattr(ours, "ONE_BLOCK_FROM", 0)
    monkeypatch.setattr(ours, "BLOCKS_FROM", 0)
    zero, tiny, broken = columns(3), columns(3), columns(3)
    zero[0][2] = 0
    tiny[1][3] *= 1e-14
    broken[2][1, 1] = math.nan

    def near(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return -torch.cdist(a, b)

    for given, function in ((zero, ours.cos_sim), (tiny, ours.cos_sim), (columns(3), near)):
        loss, original = (
            library.MultipleNegativesRankingLoss(None, 4.0, function, directions=directions)
            for library in (ours, theirs)
        )
        if function is near and len(directions) > 1:
            continue  # the derivative of the distance between a row and itself is NaN
        expected = result(original.compute_loss_from_embeddings, given, None)
        assert_equal(result(loss.compute_loss_from_embeddings, given), expected)
        assert loss.evaluated_by == "plain"
    loss = ours.MultipleNegativesRankingLoss(directions=directions)
    assert loss.compute_loss_from_embeddings(broken).isnan()
    assert loss.evaluated_by == "plain"
    assert loss.compute_loss_from_embeddings(columns(3)).isfinite()
    assert loss.evaluated_by == "engine"


def test_similarities_of_the_library_are_known() -> None:
    def cos_sim() -> None: ...

    assert ours._engine_similarity(cos_sim) is None
    cos_sim.__module__ = "sentence_transformers.util.similarity"
    assert ours._engine_similarity(cos_sim) == "cosine"
    assert ours._engine_similarity(torch.nn.CosineSimilarity()) is None


def test_engine_is_used_from_its_size_on() -> None:
    one = ours.MultipleNegativesRankingLoss()
    several = ours.MultipleNegativesRankingLoss(directions=("query_to_doc", "doc_to_doc"))
    for rows, by in ((128, ("plain", "plain")), (256, ("engine", "plain")), (512, ("engine", "engine"))):
        for loss in (one, several):
            loss.compute_loss_from_embeddings(columns(2, rows))
        assert (one.evaluated_by, several.evaluated_by) == by


def test_invalid_options_are_reported() -> None:
    wrong = {
        "scale: expected a positive number, got 0": {"scale": 0},
        r"directions: expected query_to_doc and any of .*, got \(\)": {"directions": ()},
        r"directions: .* got \('query_to_doc', 'all'\)": {"directions": ("query_to_doc", "all")},
        "directions: .* got .'doc_to_query'": {"directions": ("doc_to_query",)},
        "partition_mode: expected one of joint, per_direction, got 'none'": {"partition_mode": "none"},
        "hardness_mode: expected one of None, .* got 'all'": {"hardness_mode": "all"},
        "hardness_strength: expected a number of at least 0, got -1": {"hardness_strength": -1},
    }
    for message, options in wrong.items():
        with pytest.raises(ValueError, match=message):
            ours.MultipleNegativesRankingLoss(**options)  # type: ignore[arg-type]
    for message, options in {
        "margin_strategy: expected one of absolute, relative, got 'none'": {"margin_strategy": "none"},
        "guide: expected a guide if and only if there is a model": {"model": SimpleNamespace(tokenizer=Tokenizer())},
        "model: expected a model with a tokenizer, got SimpleNamespace": {
            "model": SimpleNamespace(),
            "guide": SimpleNamespace(tokenizer=Tokenizer()),
        },
    }.items():
        with pytest.raises(ValueError, match=message):
            ours.GISTEmbedLoss(**options)  # type: ignore[arg-type]
    loss, gist = ours.MultipleNegativesRankingLoss(), ours.GISTEmbedLoss()
    with pytest.raises(ValueError, match="embeddings: expected at least 2 columns, got 1"):
        loss.compute_loss_from_embeddings(columns(2)[:1])
    for one, other in ((2, 3), (4, 4)):
        with pytest.raises(ValueError, match=f"2 or 3 columns, and as many of the guide, got {one} and {other} of"):
            gist.compute_loss_from_embeddings(columns(one), columns(other))
    for each in (loss, gist):
        with pytest.raises(ValueError, match=r"model: expected a model, .* call compute_loss_from_embeddings"):
            each([{}, {}])
    with unittest.TestCase().assertLogs(level=logging.WARNING) as logged:
        ours.MultipleNegativesRankingLoss(hardness_mode="all_negatives")
    assert any("hardness_mode has no effect" in line for line in logged.output)


def test_docstring_examples_run() -> None:
    failed, attempted = doctest.testmod(ours)
    assert failed == 0
    assert attempted > 0


# Models


class Model(torch.nn.Module):
    """An embedding for each token, averaged."""

    def __init__(self, letters: str = "abcdef", seed: int = 0, longest: int = 9) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.nn.Parameter(torch.randn(len(letters), 4, generator=generator, dtype=torch.float64))
        self.tokenizer, self.max_seq_length, self.device = Tokenizer(letters), longest, torch.device("cpu")

    def preprocess(self, texts: list[str]) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[self.tokenizer.letters.index(one) for one in text] for text in texts])}

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        features["sentence_embedding"] = self.weight[features["input_ids"]].mean(1)
        return features

    def __getitem__(self, index: int) -> torch.nn.Module:
        return self


TEXTS = ["abca", "bcde", "fedc"], ["abcc", "bbde", "ffdc"], ["aaaa", "efef", "dcba"]


@pytest.mark.parametrize("number", [2, 3])
def test_loss_of_a_model_equals_sentence_transformers(theirs: Any, number: int) -> None:
    models = {"same": (Model(), Model(seed=1)), "letters": (Model(), Model("fabcde", seed=1))}
    models["longer"] = Model(longest=9), Model(seed=1, longest=5)
    for name, (model, guide) in models.items():
        values = []
        for library in (ours, theirs):
            gist = library.GISTEmbedLoss(model, guide, temperature=0.3)
            assert gist.must_retokenize == (name != "same")
            ranking = library.MultipleNegativesRankingLoss(model, 3.0, ours.cos_sim)
            for loss in (ranking, gist):
                value = loss([model.preprocess(texts) for texts in TEXTS[:number]], None)
                values.append([value.detach(), *torch.autograd.grad(value, model.weight)])
        assert_equal(values[0], values[2])
        assert_equal(values[1], values[3])
        assert guide.weight.grad is None


def test_texts_in_one_row_are_tokenized_again_one_by_one(theirs: Any) -> None:
    def flat(texts: list[str]) -> dict[str, torch.Tensor]:
        ids = model.preprocess(texts)["input_ids"]
        return {"input_ids": ids.view(1, -1), "cu_seq_lens_q": torch.arange(0, ids.numel() + 1, ids.shape[1])}

    model, guide = Model(), Model("fabcde", seed=1)
    model.forward = lambda features: {  # type: ignore[method-assign]
        "sentence_embedding": model.weight[features["input_ids"].view(3, -1)].mean(1)
    }
    found, expected = (
        library.GISTEmbedLoss(model, guide, temperature=0.3)([flat(texts) for texts in TEXTS[:2]], None)
        for library in (ours, theirs)
    )
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)


def test_cached_backward_computes_the_gradient_of_the_whole_batch() -> None:
    model, loss = Model(), ours.MultipleNegativesRankingLoss(scale=3.0)
    sentence_features = [model.preprocess(texts) for texts in TEXTS]
    whole = loss.compute_loss_from_embeddings([model(dict(each))["sentence_embedding"] for each in sentence_features])
    expected = [whole.detach(), *torch.autograd.grad(whole, model.weight)]
    value = cached_backward(
        lambda *embeddings: loss.compute_loss_from_embeddings(embeddings),
        *((lambda features: model(features)["sentence_embedding"], features) for features in sentence_features),
        chunk_size=2,
    )
    assert model.weight.grad is not None
    assert_equal([value, model.weight.grad], expected)


# GISTEmbed


def gists(theirs: Any, **options: Any) -> tuple[Any, Callable[..., torch.Tensor]]:
    """Our loss, and theirs as a function of embeddings and the guide's embeddings."""
    model = SimpleNamespace(tokenizer=Tokenizer(), max_seq_length=1)
    original = theirs.GISTEmbedLoss(model, model, **options)

    def of_embeddings(embeddings: list[torch.Tensor], guide: list[torch.Tensor]) -> torch.Tensor:
        original.model = lambda features: {"sentence_embedding": embeddings[features["column"]]}
        original.guide = lambda features: {"sentence_embedding": guide[features["column"]]}
        value: torch.Tensor = original([{"column": number} for number in range(len(embeddings))], None)
        return value

    return ours.GISTEmbedLoss(**options), of_embeddings


@pytest.mark.parametrize("strategy", ["absolute", "relative"])
@pytest.mark.parametrize("margin", [0.0, 0.1, -0.05])
@pytest.mark.parametrize(("anchors", "positives"), list(product([False, True], repeat=2)))
@pytest.mark.quick(8)
def test_gist_equals_sentence_transformers(
    theirs: Any, strategy: str, margin: float, anchors: bool, positives: bool
) -> None:
    options = {"margin_strategy": strategy, "margin": margin, "temperature": 0.05}
    loss, original = gists(theirs, contrast_anchors=anchors, contrast_positives=positives, **options)
    for number, rows, seed in product((2, 3), (1, 2, 9), range(3)):
        given, guide = columns(number, rows, seed=seed), columns(number, rows, 8, seed + 10)
        expected = result(original, given, guide)
        assert_equal(result(loss.compute_loss_from_embeddings, given, guide), expected)
        # With a negative margin, the limit of a close pair is above 1.
        assert loss.evaluated_by == "engine" or margin < 0


def test_gist_equals_the_loss_computed_by_hand() -> None:
    # The guide's cosines of queries and documents are [[0.6, 0], [0.8, 1]]; of documents, 0.8; of queries, 0.
    given = [torch.tensor(rows, dtype=torch.float64) for rows in ([[1.0, 0.0], [0.0, 1.0]], [[0.8, 0.6], [0.6, 0.8]])]
    guide = [torch.tensor(rows, dtype=torch.float64) for rows in ([[1.0, 0.0], [0.0, 1.0]], [[0.6, 0.8], [0.0, 1.0]])]
    # Logits: 4 of each positive, 3 of each other query and document, 0 between queries, 4.8 between documents.
    # Query 0 leaves out the pair of documents. At margin 0.3, query 1 leaves out this pair and document 0.
    for margin, of_second in ((0.0, math.exp(-1) + math.exp(-4) + math.exp(0.8)), (0.3, math.exp(-4))):
        loss = ours.GISTEmbedLoss(temperature=0.2, margin=margin, contrast_self=False)
        expected = (math.log1p(math.exp(-1) + math.exp(-4)) + math.log1p(of_second)) / 2
        assert loss.compute_loss_from_embeddings(given, guide).item() == pytest.approx(expected, rel=1e-12)
        assert loss.evaluated_by == "engine"
    # At margin 0, the limit of query 1 is 1. The self pairs of query 1 and of its document do not exceed it.
    of_second = math.exp(-1) + math.exp(-4) + math.exp(0.8) + 2 * math.exp(1)
    loss = ours.GISTEmbedLoss(temperature=0.2)
    expected = (math.log1p(math.exp(-1) + math.exp(-4)) + math.log1p(of_second)) / 2
    assert loss.compute_loss_from_embeddings(given, guide).item() == pytest.approx(expected, rel=1e-12)
    assert loss.evaluated_by == "plain"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("dim", [3, 40, 384])
def test_gist_decides_about_duplicates_as_sentence_transformers(theirs: Any, dtype: torch.dtype, dim: int) -> None:
    by = set()
    for seed, options in product(range(6), ({}, {"contrast_anchors": False, "contrast_positives": False})):
        loss, original = gists(theirs, temperature=0.5, **options)
        given = [each.to(dtype) for each in columns(3, 12, dim, seed)]
        guide = [each.to(dtype) for each in columns(3, 12, dim, seed + 20)]
        for each in (*given, *guide):
            each[5] = each[2]
        guide[1][7] = guide[0][7]  # the limit of this query is 1
        guide[1][8:] = guide[1][4:8]
        found = result(loss.compute_loss_from_embeddings, given, guide)
        assert_equal(found, result(original, given, guide), EXACT if dtype == torch.float64 else 2e-5)
        by.add(loss.evaluated_by)
    assert by == {"engine", "plain"}


def test_gist_of_rows_that_the_engine_rejects_gives_the_librarys_result(theirs: Any) -> None:
    loss, original = gists(theirs, temperature=0.5)
    guide = columns(3, seed=3)
    zero, tiny, broken = columns(3), columns(3), columns(3)
    zero[0][2] = 0
    tiny[1][3] *= 1e-10
    broken[2][1, 1] = math.nan
    for given in (zero, tiny):
        assert_equal(result(loss.compute_loss_from_embeddings, given, guide), result(original, given, guide))
        assert loss.evaluated_by == "plain"
    assert loss.compute_loss_from_embeddings(broken, guide).isnan()
    smoothed = ours.GISTEmbedLoss(temperature=0.5)
    del smoothed.cross_entropy_loss
    smoothed.cross_entropy_loss = lambda scores, labels: F.cross_entropy(scores, labels) * 2
    double = smoothed.compute_loss_from_embeddings(columns(3), guide)
    assert smoothed.evaluated_by == "plain"
    assert double.item() == pytest.approx(2 * loss.compute_loss_from_embeddings(columns(3), guide).item(), rel=1e-12)
    assert loss.evaluated_by == "engine"
    # Without self pairs, the plain form equals the engine.
    never = ours.GISTEmbedLoss(temperature=0.5, margin=-3.0, contrast_self=False)
    by_engine = result(never.compute_loss_from_embeddings, columns(3), guide)
    assert never.evaluated_by == "engine"
    given, of_guide = ([each.clone().requires_grad_() for each in columns(3)], guide)
    value = never._plain(given[0], given[1:], of_guide[0], of_guide[1:])
    assert_equal([value.detach(), *torch.autograd.grad(value, given)], by_engine)


# Several processes


ROWS = 5
RANKING = [
    {"directions": directions, "partition_mode": partition, "hardness_mode": mode, "hardness_strength": strength}
    for directions, partition, mode, strength in (
        (("query_to_doc",), "joint", None, 0.0),
        (("query_to_doc", "doc_to_query"), "per_direction", None, 0.0),
        (("query_to_doc",), "joint", "all_negatives", 2.0),
        (DIRECTIONS[-1], "joint", None, 0.0),
        (DIRECTIONS[-1], "joint", "all_negatives", 2.0),
    )
]


def of_rank(rank: int, world_size: int, folder: Path) -> list[dict[str, list[torch.Tensor]]]:
    """For each configuration, the value and the projection's gradient of their class and of both forms of ours."""
    theirs, found = loaded(folder), []
    given, guide = (
        [each.chunk(world_size)[rank] for each in columns(3, ROWS * world_size, 5, seed)] for seed in (0, 1)
    )
    for options in (*RANKING, {}):
        one = {}
        for kind, least in {"theirs": 0, "engine": 0, "plain": math.inf}.items():
            ours.ONE_BLOCK_FROM = ours.BLOCKS_FROM = least  # type: ignore[assignment]
            projection = torch.eye(5, dtype=torch.float64).requires_grad_()
            embeddings = [each @ projection for each in given]
            if options:
                library = theirs if kind == "theirs" else ours
                loss = library.MultipleNegativesRankingLoss(None, 20.0, ours.cos_sim, True, **options)
                value = loss.compute_loss_from_embeddings(embeddings, None)
            elif kind == "theirs":
                value = gists(theirs, temperature=0.1, gather_across_devices=True)[1](embeddings, guide)
            else:
                loss = ours.GISTEmbedLoss(temperature=0.1, gather_across_devices=True)
                value = loss.compute_loss_from_embeddings(embeddings, guide)
            one[kind] = [value.detach(), *torch.autograd.grad(value, projection)]
            if kind != "theirs":
                apart = options == RANKING[0] or options == RANKING[1]
                assert loss.evaluated_by == (kind if apart else "plain")
        found.append(one)
    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_processes_equal_sentence_transformers_and_one_process(folder: Path, world_size: int, tmp_path: Path) -> None:
    ranks = on_ranks(of_rank, world_size, tmp_path, folder)
    for number, options in enumerate((*RANKING, {})):
        for kind in ("engine", "plain"):
            for rank in ranks:
                assert_equal(rank[number][kind], rank[number]["theirs"])
            mean = [torch.stack(each).mean(0) for each in zip(*(rank[number][kind] for rank in ranks), strict=True)]
            projection = torch.eye(5, dtype=torch.float64).requires_grad_()
            if options:
                given = [each @ projection for each in columns(3, ROWS * world_size, 5)]
                value = ours.MultipleNegativesRankingLoss(**options).compute_loss_from_embeddings(given)
                assert_equal(mean, [value.detach(), *torch.autograd.grad(value, projection)])


@pytest.mark.slow
def test_own_tests_of_gist_pass(tmp_path: Path, record_property: Any) -> None:
    module = "pairproof.compat.sentence_transformers"
    check_own_tests(
        "sentence-transformers",
        ["tests/sentence_transformer/losses/test_gist_embed.py"],
        # The tests replace functions of the module.
        {
            f"{peer.LOSSES}:gist_embed": "pairproof.compat:sentence_transformers",
            f"{peer.LOSSES}:GISTEmbedLoss": f"{module}:GISTEmbedLoss",
        },
        tmp_path,
        record_property,
        environment={"PYTEST_ADDOPTS": "--noconftest"},  # the library's conftest imports what is not installed
        plugins=["snapshots_sentence_transformers", module],  # the second is only imported
        limit=120,
    )
