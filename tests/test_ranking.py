"""The loss of queries, documents and hard negatives, compared with loops over the formula of sentence-transformers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pairproof import fast, reference
from pairproof.conformance.suite.catalogue import LOSSES

ENTRY = LOSSES["multiple_negatives_ranking"]
N, H = 4, 2
GENERATOR = torch.Generator().manual_seed(5)
QUERIES, DOCUMENTS = (torch.randn(N, 3, dtype=torch.float64, generator=GENERATOR) for _ in range(2))
HARD = torch.randn(N, H, 3, dtype=torch.float64, generator=GENERATOR)
TWO_WAYS, ALL = "query_to_doc+doc_to_query", "query_to_doc+query_to_query+doc_to_query+doc_to_doc"
BACKENDS = ("auto", "dense", "tiled", "exact")
T = 0.3


def cosine(x: Tensor, y: Tensor) -> float:
    return float(x @ y / (x.norm() * y.norm()))


def by_hand(hard: bool, scope: str, directions: str, partition: str) -> list[float]:
    """The value of every anchor, term by term as in multiple_negatives_ranking.py."""
    q, d = QUERIES, DOCUMENTS
    found: list[list[float]] = [[], []]
    for i in range(N):
        query_to_doc = [(q[i], d[j]) for j in range(N) if scope != "own_only" or j == i]
        if hard:
            query_to_doc += [(q[i], HARD[j, k]) for j in range(N) for k in range(H) if scope == "batch" or j == i]
        doc_to_doc = [(d[i], d[j]) for j in range(N) if j != i]
        if hard and scope == "batch":
            doc_to_doc += [(d[i], HARD[j, k]) for j in range(N) for k in range(H) if j != i]
        terms = {
            "query_to_doc": query_to_doc,
            "query_to_query": [(q[i], q[j]) for j in range(N) if j != i],
            "doc_to_query": [(d[i], q[j]) for j in range(N)],
            "doc_to_doc": doc_to_doc,
        }
        positive = cosine(q[i], d[i]) / T
        sums = [sum(math.exp(cosine(x, y) / T) for x, y in terms[name]) for name in directions.split("+")]
        for k, total in enumerate([sum(sums)] if partition == "joint" else sums):
            found[k].append(math.log(total) - positive)
    return found[0] + found[1]


COMBINATIONS = [
    (hard, scope, directions, partition)
    for hard, scope, directions, partition in itertools.product(
        (False, True), *(ENTRY.choices[name] for name in ("hard_negatives_scope", "directions", "partition"))
    )
    if not ENTRY.unfit(
        {
            "hard_negatives": hard or None,
            "hard_negatives_scope": scope,
            "directions": directions,
            "partition": partition,
        }
    )
]


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_value_of_every_combination_is_that_of_the_formula(reduction: str) -> None:
    assert len(COMBINATIONS) == 50
    for hard, scope, directions, partition in COMBINATIONS:
        options: dict[str, Any] = {"hard_negatives_scope": scope, "directions": directions, "partition": partition}
        options |= {"temperature": T, "reduction": reduction}
        each = by_hand(hard, scope, directions, partition)
        expected = {"none": each, "mean": [math.fsum(each) / len(each)], "sum": [math.fsum(each)]}[reduction]
        rows = [QUERIES, DOCUMENTS, HARD]
        a, b, h = (z.numpy() for z in rows)
        found = reference.multiple_negatives_ranking_loss(a, b, hard_negatives=h if hard else None, **options).loss
        assert np.ravel(found).tolist() == pytest.approx(expected, rel=1e-12), options
        given = {"hard_negatives": HARD if hard else None, **options}
        for backend in BACKENDS:
            value = fast.multiple_negatives_ranking_loss(QUERIES, DOCUMENTS, **given, backend=backend)
            assert value.reshape(-1).tolist() == pytest.approx(expected, rel=1e-12), (options, backend)


@pytest.mark.parametrize(("scope", "columns"), [("batch", N + N * H), ("own", N + H), ("own_only", 1 + H)])
def test_equal_rows_give_the_logarithm_of_the_number_of_terms(scope: str, columns: int) -> None:
    rows, hard = torch.ones(N, 3), torch.ones(N, H, 3)
    found = fast.multiple_negatives_ranking_loss(
        rows,
        rows,
        hard_negatives=hard,
        hard_negatives_scope=scope,  # type: ignore[arg-type]
        reduction="none",
    )
    torch.testing.assert_close(found, torch.full((N,), math.log(columns)))


def test_mean_divides_by_the_queries_and_per_direction_by_queries_and_documents() -> None:
    for directions, partition, anchors in (
        ("query_to_doc", "joint", N),
        (TWO_WAYS, "joint", N),
        (TWO_WAYS, "per_direction", 2 * N),
        (ALL, "joint", N),
    ):
        options: Any = {"hard_negatives": HARD, "directions": directions, "partition": partition, "temperature": T}
        mean, total, each = (
            fast.multiple_negatives_ranking_loss(QUERIES, DOCUMENTS, **options, reduction=reduction)
            for reduction in ("mean", "sum", "none")
        )
        assert len(each) == anchors
        torch.testing.assert_close(mean * anchors, total)
        torch.testing.assert_close(each.sum(), total)


def test_info_nce_is_this_loss() -> None:
    for direction, options in (
        ("a_to_b", {}),
        ("both", {"directions": TWO_WAYS, "partition": "per_direction"}),
    ):
        same: Any = {"temperature": T, "reduction": "none"}
        expected = fast.info_nce_loss(QUERIES, DOCUMENTS, direction=direction, **same)  # type: ignore[arg-type]
        found = fast.multiple_negatives_ranking_loss(QUERIES, DOCUMENTS, **options, **same)  # type: ignore[arg-type]
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)


def test_fitted_pairs_of_gte_cost_ln_2_and_do_not_fall_below() -> None:
    """Both views of a pair are the positive, so its softmax is at most one half."""
    rows = torch.eye(5, dtype=torch.float64)
    found = fast.multiple_negatives_ranking_loss(rows, rows, directions=ALL, temperature=0.01)
    assert float(found) == pytest.approx(math.log(2), rel=1e-14)
    assert float(fast.multiple_negatives_ranking_loss(rows, rows, temperature=0.01)) < 1e-40


def test_own_hard_negatives_are_independent_of_other_queries() -> None:
    hard = HARD.clone().requires_grad_()
    each = fast.multiple_negatives_ranking_loss(
        QUERIES, DOCUMENTS, hard_negatives=hard, hard_negatives_scope="own", reduction="none"
    )
    (gradient,) = torch.autograd.grad(each[1], hard)
    assert [bool(rows.any()) for rows in gradient] == [False, True, False, False]


def test_small_loss_keeps_its_digits() -> None:
    """Negatives orthogonal to the query: log1p of 2 e^(-1/T), 2e-13 and far below a rounding error of 1 in float32."""
    a = torch.eye(3)
    expected = math.log1p(2 * math.exp(-1 / 0.0333) + math.exp(-2 / 0.0333))
    for scope in ("batch", "own"):
        found = fast.multiple_negatives_ranking_loss(
            a[:1].repeat(2, 1),
            a[:1].repeat(2, 1),
            hard_negatives=torch.stack([a[1], a[2], -a[0]]).repeat(2, 1, 1),
            hard_negatives_scope="own_only",
            temperature=0.0333,
        )
        assert float(found) == pytest.approx(expected, rel=1e-5), scope


@pytest.mark.parametrize("scope", ["batch", "own", "own_only"])
def test_gradients_agree_with_finite_differences(scope: Any) -> None:
    inputs = tuple(z.clone().requires_grad_() for z in (QUERIES, DOCUMENTS, HARD, torch.tensor(T).double()))

    def loss(a: Tensor, b: Tensor, h: Tensor, temperature: Tensor) -> Tensor:
        return fast.multiple_negatives_ranking_loss(
            a, b, hard_negatives=h, hard_negatives_scope=scope, directions=ALL, temperature=temperature
        )

    assert torch.autograd.gradcheck(loss, inputs)
    assert torch.autograd.gradgradcheck(loss, inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_all_directions_are_added_before_they_are_rounded(dtype: torch.dtype) -> None:
    given = [z.to(dtype) for z in (QUERIES, DOCUMENTS, HARD)]
    found = []
    for kind in (dtype, torch.float64):
        a, b, h = (z.to(kind).detach().requires_grad_() for z in given)
        fast.multiple_negatives_ranking_loss(a, b, hard_negatives=h, directions=ALL, temperature=T).backward()
        found.append((a.grad, b.grad, h.grad))
    for narrow, wide in zip(*found, strict=True):
        assert narrow is not None
        assert wide is not None
        step = torch.finfo(dtype).eps * wide.abs().clamp(min=2.0**-14) * 0.51
        assert bool(((narrow.double() - wide).abs() <= step + 1e-6).all())


def test_compiled_loss_is_the_loss() -> None:
    compiled = torch.compile(fast.multiple_negatives_ranking_loss, fullgraph=True, backend="aot_eager")
    given: Any = {"hard_negatives": HARD, "directions": ALL, "temperature": T}
    torch.testing.assert_close(
        compiled(QUERIES, DOCUMENTS, **given), fast.multiple_negatives_ranking_loss(QUERIES, DOCUMENTS, **given)
    )


def test_only_own_hard_negatives_are_required_by_their_scope() -> None:
    for package in (fast, reference):
        rows = QUERIES if package is fast else QUERIES.numpy()
        with pytest.raises(ValueError, match=r"^hard_negatives_scope: expected batch or own without hard_negatives"):
            package.multiple_negatives_ranking_loss(rows, rows, hard_negatives_scope="own_only")
