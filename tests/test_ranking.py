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
from pairproof.conformance.implementations import Unavailable
from pairproof.conformance.implementations import sentence_transformers as peer
from pairproof.conformance.suite.cases import Case
from pairproof.conformance.suite.catalogue import LOSSES
from pairproof.conformance.suite.golden import load_golden

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


def by_hand(hard: bool, scope: str, directions: str, partition: str, hard_of_doc: str | None) -> list[float]:
    """The value of every anchor, term by term as in multiple_negatives_ranking.py."""
    q, d = QUERIES, DOCUMENTS
    found: list[list[float]] = [[], []]
    for i in range(N):
        query_to_doc = [(q[i], d[j]) for j in range(N) if scope != "own_only" or j == i]
        if hard:
            query_to_doc += [(q[i], HARD[j, k]) for j in range(N) for k in range(H) if scope == "batch" or j == i]
        doc_to_doc = [(d[i], d[j]) for j in range(N) if j != i]
        kind = hard_of_doc or {"batch": "others"}.get(scope, "none")
        if hard and kind != "none":
            doc_to_doc += [(d[i], HARD[j, k]) for j in range(N) for k in range(H) if j != i or kind == "all"]
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
    (hard, scope, directions, partition, hard_of_doc)
    for hard, scope, directions, partition, hard_of_doc in itertools.product(
        (False, True),
        *(ENTRY.choices[name] for name in ("hard_negatives_scope", "directions", "partition")),
        (None, *ENTRY.choices["doc_to_doc_hard"]),
    )
    if (hard_of_doc is None or (hard and "doc_to_doc" in directions))
    and not ENTRY.unfit(
        {
            "hard_negatives": hard or None,
            "hard_negatives_scope": scope,
            "directions": directions,
            "partition": partition,
        }
    )
]


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.quick(1)
def test_value_of_every_combination_is_that_of_the_formula(reduction: str) -> None:
    assert len(COMBINATIONS) == 50 + 3 * 4 * 3
    for combination in COMBINATIONS:
        hard, scope, directions, partition, hard_of_doc = combination
        options: dict[str, Any] = {"hard_negatives_scope": scope, "directions": directions, "partition": partition}
        options |= {"doc_to_doc_hard": hard_of_doc, "temperature": T, "reduction": reduction}
        each = by_hand(*combination)
        expected = {"none": each, "mean": [math.fsum(each) / len(each)], "sum": [math.fsum(each)]}[reduction]
        rows = [QUERIES, DOCUMENTS, HARD]
        a, b, h = (z.numpy() for z in rows)
        found = reference.multiple_negatives_ranking_loss(a, b, hard_negatives=h if hard else None, **options).loss
        assert np.ravel(found).tolist() == pytest.approx(expected, rel=1e-12), options
        given = {"hard_negatives": HARD if hard else None, **options}
        for backend in BACKENDS:
            value = fast.multiple_negatives_ranking_loss(QUERIES, DOCUMENTS, **given, backend=backend)
            assert value.reshape(-1).tolist() == pytest.approx(expected, rel=1e-12), (options, backend)


def test_hard_negatives_of_documents_have_the_values_of_the_libraries() -> None:
    """Directions query_to_doc and doc_to_doc: sentence-transformers is others, ms-swift all, and GISTEmbed none."""
    given: Any = {"directions": "query_to_doc+doc_to_doc", "temperature": 0.5}
    for scope, expected in (("batch", (1.615709, 1.770847, 1.491317)), ("own", (1.575339, 1.734058, 1.442630))):
        for kind, value in zip(ENTRY.choices["doc_to_doc_hard"], expected, strict=True):
            found = reference.multiple_negatives_ranking_loss(
                [[1.0, 0.0], [0.0, 1.0]],
                [[0.8, 0.6], [0.6, 0.8]],
                hard_negatives=[[[0.96, 0.28]], [[-0.6, 0.8]]],
                hard_negatives_scope=scope,
                doc_to_doc_hard=kind,
                **given,
            )
            assert float(found.loss) == pytest.approx(value, abs=1e-6)


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


@pytest.mark.parametrize(
    "scope", ["own", *(pytest.param(name, marks=pytest.mark.slow) for name in ("batch", "own_only"))]
)
@pytest.mark.slow
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


@pytest.mark.slow
def test_compiled_loss_is_the_loss() -> None:
    compiled = torch.compile(fast.multiple_negatives_ranking_loss, fullgraph=True, backend="aot_eager")
    given: Any = {"hard_negatives": HARD, "directions": ALL, "temperature": T}
    torch.testing.assert_close(
        compiled(QUERIES, DOCUMENTS, **given), fast.multiple_negatives_ranking_loss(QUERIES, DOCUMENTS, **given)
    )


def test_only_own_hard_negatives_are_required_by_their_scope() -> None:
    for package in (fast, reference):
        rows = QUERIES if package is fast else QUERIES.numpy()
        with pytest.raises(ValueError, match=r"^hard_negatives_scope: expected batch or own if hard_negatives is None"):
            package.multiple_negatives_ranking_loss(rows, rows, hard_negatives_scope="own_only")


# Ignored pairs, and GISTEmbed.

GUIDE = [torch.randn(*z.shape[:-1], 4, dtype=torch.float64, generator=GENERATOR) for z in (QUERIES, DOCUMENTS, HARD)]
GUIDE[0] = GUIDE[0] + 0.8 * GUIDE[1]  # queries are near their documents, but for some of them a negative is nearer
GIST = "query_to_doc+query_to_query+doc_to_doc"


def gist_by_hand(number_of_hard: int, strategy: str, margin: float) -> float:
    """GISTEmbed with loops: a negative whose guided similarity exceeds that of the pair, less a margin, is left out."""
    (q, d, h), (gq, gd, gh) = (QUERIES, DOCUMENTS, HARD), GUIDE
    values = []
    for i in range(N):
        own = cosine(gq[i], gd[i])
        limit = own - margin * (abs(own) if strategy == "relative" else 1)
        pairs = [(q[i], d[j], gq[i], gd[j]) for j in range(N) if j != i]
        pairs += [(q[i], q[j], gq[i], gq[j]) for j in range(N) if j != i]
        pairs += [(d[i], d[j], gd[i], gd[j]) for j in range(N) if j != i]
        pairs += [(q[i], h[j, k], gq[i], gh[j, k]) for j in range(N) for k in range(number_of_hard)]
        rest = sum(math.exp(cosine(x, y) / 0.1) for x, y, u, v in pairs if not cosine(u, v) > limit)
        values.append(math.log1p(rest / math.exp(cosine(q[i], d[i]) / 0.1)))
    return math.fsum(values) / N


GIST_OPTIONS = [("absolute", 0.0), ("absolute", 0.1), ("absolute", -0.2), ("relative", 0.05), ("relative", 0.5)]


def gist_loss(number_of_hard: int, strategy: Any, margin: float, leaves: Any = (QUERIES, DOCUMENTS, HARD)) -> Tensor:
    a, b, h = leaves
    hard = {} if not number_of_hard else {"hard_negatives": h[:, :number_of_hard]}
    guide = GUIDE[2][:, :number_of_hard] if hard else None
    masks = fast.gist_masks(*GUIDE[:2], guide, directions=GIST, margin_strategy=strategy, margin=margin)
    return fast.multiple_negatives_ranking_loss(a, b, **hard, directions=GIST, ignored=masks, temperature=0.1)


@pytest.mark.parametrize(("strategy", "margin"), GIST_OPTIONS)
def test_gist_masks_give_the_loss_of_gistembed(strategy: str, margin: float) -> None:
    masks = fast.gist_masks(*GUIDE[:2], directions=GIST, margin_strategy=strategy, margin=margin)  # type: ignore[arg-type]
    different = ~torch.eye(N, dtype=torch.bool).repeat(1, 3)
    assert bool(masks[different].any())
    assert not bool(masks[different].all())
    for number in (0, 1, H):
        found = float(gist_loss(number, strategy, margin))
        assert found == pytest.approx(gist_by_hand(number, strategy, margin), rel=1e-12)


def of_live_gist(columns: Any, guides: Any, strategy: str, margin: float) -> Tensor:
    """GISTEmbedLoss of the installed file, with models that return these embeddings."""
    try:
        live = peer.GistSentenceTransformers({}, "cpu")
    except Unavailable as error:
        pytest.skip(str(error))
    return live.of_columns(columns, guides, temperature=0.1, margin_strategy=strategy, margin=margin)


@pytest.mark.parametrize(("strategy", "margin"), [one for one in GIST_OPTIONS if one[1] >= 0])
def test_gist_masks_give_the_loss_and_gradient_of_the_installed_file(strategy: str, margin: float) -> None:
    for number in (0, 1):
        results = []
        for function in (gist_loss, None):
            leaves = [z.detach().clone().requires_grad_() for z in (QUERIES, DOCUMENTS, HARD[:, :1])][: 2 + number]
            if function is None:
                columns = [*leaves[:2], *(z[:, 0] for z in leaves[2:])]
                guide = [*GUIDE[:2], GUIDE[2][:, 0]][: 2 + number]
                value = of_live_gist(columns, guide, strategy, margin)
            else:
                value = function(number, strategy, margin, [*leaves, HARD][:3])
            results.append((value, *torch.autograd.grad(value, leaves)))
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize(
    ("seeds", "shape", "dtype"),
    [
        (100, (8, 13), torch.float32),
        pytest.param(1, (256, 32_768), torch.float64, marks=pytest.mark.slow),
    ],
)
def test_another_copy_of_the_document_is_not_left_out_at_margin_0(
    similarity: Any, seeds: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Products of matrices and sums of products differ in their last bits, more with more columns."""
    n = shape[0]
    pairs = torch.arange(n)
    for seed in range(seeds):
        a, b = torch.randn(2, *shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).abs()
        b[n // 2 :], a[5] = b[: n // 2], b[5]  # copies of documents, and a query that is its document
        h = b[:, None].clone()  # the hard negatives are the documents
        masks = fast.gist_masks(a, b, h, similarity=similarity, directions="query_to_doc")
        documents, hard = masks[:, :n], masks[:, n:]
        assert not documents[pairs, (pairs + n // 2) % n].any()
        assert not hard[pairs, pairs].any()
        assert not hard[pairs, (pairs + n // 2) % n].any()


def test_masks_of_narrow_guides_are_those_of_the_same_rows_in_float32() -> None:
    guide = [rows.bfloat16() for rows in GUIDE]
    found = fast.gist_masks(*guide, directions=GIST)
    assert torch.equal(found, fast.gist_masks(*(rows.float() for rows in guide), directions=GIST))


def test_masks_of_a_guide_have_the_columns_of_the_scope_and_its_similarity() -> None:
    own: Any = {"hard_negatives_scope": "own", "directions": GIST}
    masks = fast.gist_masks(*GUIDE, **own, margin=0.1)
    assert masks.shape == (N, N + N * H + 2 * N)
    torch.testing.assert_close(masks, fast.gist_masks(*GUIDE, directions=GIST, margin=0.1)[:, : masks.shape[1]])
    given: Any = {"hard_negatives": HARD, "temperature": 0.1, **own}
    found = fast.multiple_negatives_ranking_loss(QUERIES, DOCUMENTS, **given, ignored=masks)
    assert found < fast.multiple_negatives_ranking_loss(QUERIES, DOCUMENTS, **given)
    longer = GUIDE[1] * torch.tensor([[1.0], [1.0], [1.0], [4.0]])
    dot = fast.gist_masks(GUIDE[0], longer, directions="query_to_doc", similarity="dot")
    products = GUIDE[0] @ longer.T
    torch.testing.assert_close(dot, products > products.diagonal()[:, None])
    assert not torch.equal(dot, fast.gist_masks(GUIDE[0], longer, directions="query_to_doc"))


def test_installed_gistembed_keeps_self_pairs_where_the_guides_of_query_and_document_coincide() -> None:
    """A declared deviation: 1 > 1 is False, so its code contrasts such a row with itself, at cosine 1."""
    guide = [torch.eye(2, dtype=torch.float64)] * 2
    a, b = QUERIES[:2], DOCUMENTS[:2]
    live = float(of_live_gist([a, b], guide, "absolute", 0.0))
    masks = fast.gist_masks(*guide, directions=GIST)
    assert not masks.any()
    found = fast.multiple_negatives_ranking_loss(
        a, b, directions=GIST, ignored=masks, temperature=0.1, reduction="none"
    )
    with_self_pairs = [
        math.log(math.exp(float(value)) + 2 * math.exp((1 - cosine(x, y)) / 0.1))
        for value, x, y in zip(found, a, b, strict=True)
    ]
    assert live == pytest.approx(sum(with_self_pairs) / 2, rel=1e-12)
    assert live > float(found.mean()) + 0.1


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"guide_a": None}, TypeError, "guide_a: expected a tensor, got NoneType"),
        ({"guide_b": GUIDE[1].long()}, TypeError, "guide_b: expected a floating dtype, got torch.int64"),
        ({"guide_b": GUIDE[1].float()}, TypeError, "guide_b: expected the dtype of guide_a, torch.float64"),
        ({"guide_a": GUIDE[0][0]}, ValueError, "guide_a: expected shape"),
        ({"guide_b": GUIDE[1][:3]}, ValueError, "guide_b: expected the shape of guide_a"),
        ({"guide_b": GUIDE[1] * torch.nan}, ValueError, "guide_b: expected finite values"),
        ({"guide_a": GUIDE[0] * 0}, ValueError, "guide_a: expected no zero row"),
        ({"guide_hard_negatives": GUIDE[1]}, ValueError, "guide_hard_negatives: expected shape"),
        ({"guide_hard_negatives": GUIDE[2][:3]}, ValueError, "guide_hard_negatives: expected shape"),
        ({"guide_hard_negatives": GUIDE[2][..., :1]}, ValueError, "guide_hard_negatives: expected .* columns"),
        ({"margin": "0.1"}, TypeError, "margin: expected a number, got str"),
        ({"margin": math.inf}, ValueError, "margin: expected a finite number, got inf"),
        ({"margin_strategy": "percent"}, ValueError, "margin_strategy: "),
        ({"directions": "doc_to_query"}, ValueError, "directions: "),
    ],
)
def test_arguments_of_gist_masks_are_checked(given: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=f"^{words}"):
        fast.gist_masks(**{"guide_a": GUIDE[0], "guide_b": GUIDE[1], "directions": GIST, **given})


GUIDED = [f"golden/multiple_negatives_ranking/{name}" for name in ("gist", "ignored-documents")]


@pytest.mark.parametrize("case", [one.case for one in load_golden() if one.case.id in GUIDED], ids=lambda case: case.id)
def test_guides_of_the_peer_give_the_mask_of_a_case(case: Case) -> None:
    guides = peer._guides(case)
    more = [guides[2][:, None]] if len(guides) > 2 else []
    masks = fast.gist_masks(*guides[:2], *more, directions=case.option("directions"))
    own = torch.eye(case.n, dtype=torch.bool)
    pairs = ~torch.cat([own, *([own & False] * len(more)), *([own] * case.option("directions").count("+"))], dim=1)
    ignored = torch.tensor(case.arguments["ignored"])[:, : pairs.shape[1]]
    assert bool((masks[:, : pairs.shape[1]] == ignored)[pairs].all())
    assert 0 < int(ignored[pairs].sum()) < int(pairs.sum())


def test_mask_that_keeps_only_the_positive_gives_0_or_ln_2() -> None:
    kept = torch.eye(N, dtype=torch.bool)
    both = torch.cat([kept, torch.zeros(N, N * H, dtype=torch.bool), kept], dim=1)
    for mask, directions, expected in (
        (both[:, : N + N * H], "query_to_doc", 0.0),
        (both, TWO_WAYS, math.log(2)),
    ):
        for backend in BACKENDS:
            a, b, h = (z.clone().requires_grad_() for z in (QUERIES, DOCUMENTS, HARD))
            found = fast.multiple_negatives_ranking_loss(
                a,
                b,
                hard_negatives=h,
                directions=directions,  # type: ignore[arg-type]
                ignored=~mask,
                backend=backend,  # type: ignore[arg-type]
            )
            assert float(found.detach()) == pytest.approx(expected, abs=1e-15)
            assert all(not bool(g.abs().max() > 1e-14) for g in torch.autograd.grad(found, (a, b, h)))


def test_ignored_positive_is_refused() -> None:
    for column, partition in ((1, "joint"), (N + 1, "per_direction")):
        mask = torch.zeros(N, 2 * N, dtype=torch.bool)
        mask[1, column] = True
        for package in (fast, reference):
            given = [z if package is fast else z.numpy() for z in (QUERIES, DOCUMENTS, mask)]
            with pytest.raises(ValueError, match=r"^ignored: .* got True in row 1$"):
                package.multiple_negatives_ranking_loss(
                    *given[:2], ignored=given[2], directions=TWO_WAYS, partition=partition
                )


# Hardness.


@pytest.mark.parametrize("mode", ["in_batch_negatives", "hard_negatives", "all_negatives"])
@pytest.mark.parametrize("scope", ["batch", "own", "own_only"])
def test_hardness_multiplies_exponentials_by_constants(mode: str, scope: str) -> None:
    """The gradient is that of the loss whose weights, e^(strength cosine), are held fixed."""
    strength = 2.5
    inputs = [z.clone().requires_grad_() for z in (QUERIES, DOCUMENTS, HARD, torch.tensor(T).double())]
    a, b, h, temperature = inputs
    unit_a, unit_b, unit_h = (z / z.norm(dim=-1, keepdim=True) for z in (a, b, h))
    to_documents, to_hard = unit_a @ unit_b.T, torch.einsum("id,jkd->ijk", unit_a, unit_h)
    values = []
    for i in range(N):
        total = torch.zeros((), dtype=torch.float64)
        for j in range(N):
            cosines = [(to_documents[i, j], "" if j == i else "in_batch_negatives")] * (scope != "own_only" or j == i)
            kind = "hard_negatives" if j == i else "in_batch_negatives"
            cosines += [(to_hard[i, j, k], kind) for k in range(H) if scope == "batch" or j == i]
            for cos, name in cosines:
                weighted = bool(name) and mode in (name, "all_negatives")
                total = total + (cos / temperature).exp() * (strength * cos.detach() * weighted).exp()
        values.append(total.log() - to_documents[i, i] / temperature)
    expected = torch.stack(values).mean()
    options: Any = {"hard_negatives_scope": scope, "hardness_mode": mode, "hardness_strength": strength}
    for backend in BACKENDS:
        found = fast.multiple_negatives_ranking_loss(
            a, b, hard_negatives=h, temperature=temperature, **options, backend=backend
        )
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        for mine, right in zip(derivatives(found, inputs), derivatives(expected, inputs), strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-13)


def test_gradient_of_hardness_weights_that_is_differentiated_does_not_use_autocast() -> None:
    found = []
    options: Any = {"hardness_mode": "in_batch_negatives", "hardness_strength": 2.5, "temperature": T}
    for enabled in (False, True):
        inputs = [z.float().requires_grad_() for z in (QUERIES, DOCUMENTS)]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss = fast.multiple_negatives_ranking_loss(*inputs, **options)
            first = torch.autograd.grad(loss, inputs, create_graph=True)
        squares = sum(((x * x).sum() for x in first), torch.zeros(()))
        found.append([*first, *torch.autograd.grad(squares, inputs)])
    for without, within in zip(*found, strict=True):
        torch.testing.assert_close(within, without, rtol=0, atol=0)


def derivatives(loss: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """The gradient, and the gradient of the sum of its squares."""
    first = torch.autograd.grad(loss, inputs, create_graph=True)
    second = torch.autograd.grad(sum(((x * x).sum() for x in first), torch.zeros(())), inputs, retain_graph=True)
    return [*(x.detach() for x in first), *second]


@pytest.mark.parametrize("backend", BACKENDS)
def test_hardness_weights_are_constants_in_second_derivatives_without_hard_negatives(backend: Any) -> None:
    strength, inputs = 2.5, [z.clone().requires_grad_() for z in (QUERIES, DOCUMENTS)]
    unit_a, unit_b = (z / z.norm(dim=1, keepdim=True) for z in inputs)
    cosines = unit_a @ unit_b.T
    weights = (strength * cosines.detach()).fill_diagonal_(0.0)
    expected = torch.nn.functional.cross_entropy(cosines / T + weights, torch.arange(N))
    options: Any = {"hardness_mode": "in_batch_negatives", "hardness_strength": strength, "backend": backend}

    def loss(a: Tensor, b: Tensor) -> Tensor:
        return fast.multiple_negatives_ranking_loss(a, b, temperature=T, **options)

    for mine, right in zip(derivatives(loss(*inputs), inputs), derivatives(expected, inputs), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-13)
    transformed = torch.func.grad(lambda a: (torch.func.grad(loss)(a, DOCUMENTS) ** 2).sum())(QUERIES)
    (gradient,) = torch.autograd.grad(expected, inputs[:1], create_graph=True)
    torch.testing.assert_close(
        transformed, torch.autograd.grad((gradient**2).sum(), inputs[0])[0], rtol=1e-10, atol=1e-13
    )
