"""Random batches with many rows and many columns, as training has them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pairproof import fast
from pairproof.conformance.implementations.callable import External
from pairproof.conformance.implementations.signatures import Claim
from pairproof.conformance.judge import proofs
from pairproof.conformance.judge.check import check_loss
from pairproof.conformance.judge.fresh import (
    FEW_CLASSES,
    MANY_ENTRIES,
    MOST_SIMILARITIES,
    THOROUGH_ROWS,
    TRAINING_COLUMNS,
    TRAINING_ROWS,
    FreshBatch,
    draw_training,
    fresh_batches,
    training_sizes,
)
from pairproof.conformance.judge.options import Request
from pairproof.conformance.judge.shrink import _in_pairs, halved
from pairproof.conformance.suite.cases import Case
from pairproof.conformance.suite.catalogue import LOSSES
from pairproof.conformance.suite.golden import DTYPES, GoldenCase

pytestmark = pytest.mark.usefixtures("proved_once", "in_this_process")

FILE = Path(__file__).parent / "targets" / "training_size.py"
NUMBERS = range(len(TRAINING_ROWS))


def _claim(loss: str) -> Claim:
    return External(LOSSES[loss].fast, loss=loss).claim


def test_sizes_cover_rows_and_columns_together() -> None:
    for seed in range(200):
        sizes = training_sizes(seed)
        assert all(low <= n <= high for (n, _), (low, high) in zip(sizes, TRAINING_ROWS + THOROUGH_ROWS, strict=True))
        columns = [d for _, d in sizes[: len(TRAINING_ROWS)]]
        for low, high in TRAINING_COLUMNS:
            assert sum(low <= d <= high for d in columns) == 2
        assert not any(abs(d - 2**k) <= 1 for _, d in sizes for k in range(11))
        assert sum(n * d > MANY_ENTRIES for n, d in sizes[: len(TRAINING_ROWS)]) <= 1
    assert len({tuple(training_sizes(seed)) for seed in range(200)}) == 200


def test_training_batches_come_with_the_random_batches() -> None:
    def numbers(**options: object) -> Counter[bool]:
        return Counter(batch.training for batch in fresh_batches(Request("a:b", "supcon", seed=3, **options)))  # type: ignore[arg-type]

    assert numbers() == {False: 80, True: 6}
    assert numbers(fuzz=5) == {False: 5, True: 6}
    assert numbers(fuzz=0) == {}
    assert numbers(thorough=True) == {False: 80, True: 8}
    assert numbers(cases=("training-3-*",)) == {True: 6}
    assert Request("a:b", "supcon", cases=("training-12-3",)).with_seed(5).seed == 12


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "loss", [pytest.param(loss, marks=() if loss == "supcon" else pytest.mark.slow) for loss in LOSSES]
)
def test_training_batches_have_their_size_and_suit_the_claim(loss: str, seed: int) -> None:
    claim = _claim(loss)
    for number in NUMBERS:
        case = draw_training(claim, seed, number)
        low, high = TRAINING_ROWS[number]
        assert low <= case.n <= high
        assert case.embeddings.shape[1] == training_sizes(seed)[number][1]
        assert claim.support.refuses(case) is None
        assert all(case.holds_in(dtype) for dtype in DTYPES)
        assert math.prod(case.shape) <= 1.1 * MOST_SIMILARITIES
        again = draw_training(claim, seed, number)
        assert proofs.digest_of(again) == proofs.digest_of(case)


@pytest.mark.slow
def test_kinds_of_training_batches_differ() -> None:
    """References, masks, subsets of anchors, weights and ignored pairs occur, and anchors without positives."""
    cases = [draw_training(_claim("supcon"), seed, number) for seed in (2, 3) for number in NUMBERS]
    given = Counter(name for case in cases for name in {**case.arguments, **case.others, **case.keywords})
    for name in ("ref_embeddings", "positives", "labels", "anchors", "self_rows", "denominator"):
        assert given[name], name
    assert given["ignored"] + given["ignored_ids"]
    without = [sum(not count for count in case.positive_counts()) for case in cases]
    assert all(count for place, count in enumerate(without) if place % 3 == 1)
    assert all(0 in without_here for without_here in (without[k : k + 6] for k in (0, 6)))
    assert not any(any(case.undefined_values()) for case in cases)
    towers = [draw_training(_claim("info_nce"), seed, number) for seed in (2, 3) for number in NUMBERS]
    queues = [len(case.others["negatives"]) for case in towers if "negatives" in case.others]
    assert max(queues) > 40
    assert any(case.option("direction") == "both" for case in towers)


@pytest.mark.parametrize("loss", ["supcon", "supcon_in", "nt_xent_pairwise", "supcon_epsilon"])
@pytest.mark.parametrize("seeds", [8, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.quick(1)
def test_plain_batch_has_large_classes_and_leaves_out_rows_without_positives(loss: str, seeds: int) -> None:
    for seed in range(seeds):
        case = draw_training(_claim(loss), seed, FEW_CLASSES)
        counts = case.positive_counts()
        assert max(counts) >= 40
        assert 1 <= sum(not count for count in counts) <= 8
        assert case.option("reduction") == "mean"
        assert not case.others
        if "drop" in case.entry.choices["no_positive"]:
            assert case.option("no_positive") == "drop"


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["supcon", "nt_xent"])
def test_every_reduction_occurs_without_references(loss: str) -> None:
    for seed in range(3):
        cases = [draw_training(_claim(loss), seed, number) for number in (1, 2, 3, 5)]
        alone = {str(case.option("reduction")) for case in cases if "ref_embeddings" not in case.others}
        assert {str(case.option("reduction")) for case in cases} == {"mean", "sum", "none"}
        assert alone >= {"sum", "none"}


@pytest.mark.slow
def test_batch_with_too_many_similarities_gets_fewer_rows() -> None:
    every = "query_to_doc+query_to_query+doc_to_query+doc_to_doc"
    claim = External(
        fast.multiple_negatives_ranking_loss, loss="multiple_negatives_ranking", settings={"directions": every}
    ).claim
    case = draw_training(claim, 0, 5)
    assert case.n < TRAINING_ROWS[5][0]
    assert 0.5 * MOST_SIMILARITIES < math.prod(case.shape) <= MOST_SIMILARITIES


def test_proofs_of_training_batches_are_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    batch = FreshBatch("nt_xent", 0, 0, training=True)
    claim = _claim("nt_xent")
    assert batch.proved(claim) is batch.proved(claim)  # one proof for all dtypes
    assert batch.proved(_claim("nt_xent")) is not batch.proved(claim)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("loss", ["info_nce", "nt_xent", "supcon", "multiple_negatives_ranking"])
@pytest.mark.slow
def test_constant_at_training_size_is_refused_and_named(loss: str) -> None:
    result = check_loss(f"{FILE}:{loss}", loss, arrays="torch", cases=("golden/*", "training-*"), seed=0)
    assert result.verdict == "does not conform"
    stored = {f"golden/{loss}/large", f"golden/{loss}/training"}
    assert {check.case.partition("-")[0] for check in result.failures} <= {"training"} | stored
    assert result.wrong_from == "wrong from N = 34, D = 10"
    assert result.wrong_from in result.summary
    assert result.diagnosis.reasons == []
    assert result.shrunk is not None
    assert result.shrunk.golden.case.embeddings.shape == (34, 10)


def _with_self_pairs(embeddings: Tensor, labels: Tensor, temperature: float = 0.1) -> Tensor:
    """SupCon, which keeps the anchor in the denominator in batches of 100 rows or more."""
    if len(embeddings) < 100:
        return fast.supcon_loss(embeddings, labels, temperature=temperature)
    rows = torch.nn.functional.normalize(embeddings, dim=1)
    logs = (rows @ rows.T / temperature).log_softmax(dim=1)
    positive = (labels[:, None] == labels).fill_diagonal_(False)
    return -((logs * positive).sum(dim=1) / positive.sum(dim=1).clamp(min=1)).mean()


@pytest.mark.parametrize("batches", ["[12]", pytest.param("*", marks=pytest.mark.slow)])
def test_mistake_that_starts_at_training_size_is_explained(batches: str) -> None:
    result = check_loss(_with_self_pairs, "supcon", cases=(f"training-*-{batches}",), seed=0, dtypes="float64")
    assert result.wrong_from
    (reason,) = result.diagnosis.reasons
    assert reason.words == "the anchor itself is kept in the denominator"
    assert result.diagnosis.unexplained == 0


@pytest.mark.slow
def test_wrong_gradient_of_many_rows_is_refused_and_named() -> None:
    result = check_loss(f"{FILE}:gradient_of_many_rows", "supcon", cases=("training-*",), seed=0, dtypes="float64")
    assert result.verdict == "does not conform"
    assert result.wrong_from.startswith("wrong from N = 151, D = ")


@pytest.mark.parametrize("batches", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_right_loss_conforms_at_training_size(batches: int) -> None:
    result = check_loss(fast.info_nce_loss, "info_nce", cases=(f"training-*-[0-{batches - 1}]",), seed=1)
    assert result.verdict == "conforms"
    assert len(result.judged) == 2 * batches
    n, d = max(training_sizes(1)[:batches], key=math.prod)
    assert result.untried[-1] == f"batches larger than {n} x {d} (rows x columns)"


# Halving.


def _fails_from(rows: int, columns: int) -> Callable[[GoldenCase], bool]:
    return lambda golden: golden.case.n >= rows and golden.case.embeddings.shape[1] >= columns


@pytest.mark.parametrize("loss", ["supcon", "nt_xent", "nt_bxent", "info_nce"])
def test_halving_finds_the_size_from_which_a_target_fails(loss: str) -> None:
    rng = np.random.default_rng(0)
    rows = np.round(rng.normal(size=(60, 30)) * 16) / 16
    arguments = {
        "supcon": {"labels": [k % 15 for k in range(60)]},
        "nt_xent": {"partners": [(k + 30) % 60 for k in range(60)]},
        "nt_bxent": {"positive_pairs": [(k, (k + 30) % 60) for k in range(60)]},
        "info_nce": {},
    }[loss]
    others = {"embeddings_b": rows[:, ::-1].copy()} if loss == "info_nce" else {}
    case = Case("training-0-0", loss, rows, arguments, {"temperature": 0.5}, others)
    golden = GoldenCase(case, (), "", ("float64",), proofs.prove(case))
    found = halved(golden, _fails_from(34, 10)).case
    assert found.embeddings.shape == (34, 10)
    if loss in ("supcon", "nt_xent"):
        assert all(found.positive_counts())
        assert sorted(_in_pairs(case)) == list(range(60))
