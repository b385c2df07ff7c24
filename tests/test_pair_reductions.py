"""Tests of the reductions over pairs: their order, their values by plain loops, and the gradients of every pair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pairproof import fast, reference
from pairproof.conformance.diagnose.identify import identify
from pairproof.conformance.explain import explain
from pairproof.conformance.suite.cases import Case
from pairproof.conformance.suite.golden import load_golden
from pairproof.conformance.suite.records import Bounds
from pairproof.conformance.truth.evaluate import truth
from pairproof.conformance.truth.tolerances import bounds
from pairproof.fast.engine import tiles_of
from pairproof.reference import scipy_losses

torch.manual_seed(0)
ROWS, REFS = torch.randn(11, 5, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
LABELS, REF_LABELS = torch.tensor([0, 1, 0, 2, 2, 2, 1, 3, 0, 4, 4]), torch.tensor([0, 2, 1, 5, 0, 2, 2])
ANCHORS, IGNORED = torch.rand(11) < 0.7, torch.rand(11, 11) < 0.2
SELF_ROWS = torch.tensor([0, -1, -1, 1, -1, -1, -1, -1, 4, -1, -1])
FORMS: dict[str, dict[str, Any]] = {
    "labels": {"labels": LABELS},
    "mask": {"positives": LABELS[:, None] <= LABELS},
    "some anchors, ignored pairs": {"labels": LABELS, "anchors": ANCHORS, "ignored": IGNORED},
    "ids": {"labels": LABELS, "ignored_ids": LABELS // 2},
    "references": {"labels": LABELS, "ref_embeddings": REFS, "ref_labels": REF_LABELS, "self_rows": SELF_ROWS},
    "dot": {"labels": LABELS, "similarity": "dot"},
    "base temperature": {"labels": LABELS, "base_temperature": 0.2},
}


def every_pair(z: Tensor, temperature: Any, given: dict[str, Any]) -> tuple[list[tuple[int, int]], Tensor]:
    """The pairs of pairwise NT-Xent and their values, by loops over the masks."""
    refs = given.get("ref_embeddings", z)
    if given.get("similarity") == "dot":
        s = z @ refs.T / temperature
    else:
        s = (z / z.norm(dim=1, keepdim=True)) @ (refs / refs.norm(dim=1, keepdim=True)).T / temperature
    own = given.get("self_rows", torch.arange(len(z)) if refs is z else torch.full((len(z),), -1))
    columns = given.get("ref_labels", given.get("labels"))
    mask = given["positives"] if "positives" in given else given["labels"][:, None] == columns
    places, values = [], []
    for i in range(len(z)):
        if "anchors" in given and not given["anchors"][i]:
            continue
        kept = [j for j in range(len(refs)) if j != own[i] and not ("ignored" in given and given["ignored"][i, j])]
        same = given["ignored_ids"] == given["ignored_ids"][i] if "ignored_ids" in given else torch.zeros(len(refs)) > 0
        negatives = [j for j in kept if not mask[i, j] and not same[j]]
        for p in (j for j in kept if mask[i, j]):
            places.append((i, p))
            values.append(torch.logsumexp(s[i, [p, *negatives]], 0) - s[i, p])
    scale = temperature / given["base_temperature"] if "base_temperature" in given else 1.0
    return places, torch.stack(values) * scale


def gradients(loss: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 2, len(loss), dtype=loss.dtype)
    return list(torch.autograd.grad((loss * weights).sum(), inputs, create_graph=True))


@pytest.mark.parametrize("backend", ["auto", "dense", "tiled", "exact"])
@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients_of_every_pair_are_those_of_loops(form: str, backend: Any) -> None:
    for temperature in (0.5, 0.004):
        given, tau = dict(FORMS[form]), torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
        z = ROWS.clone().requires_grad_()
        inputs = [z, tau]
        if "ref_embeddings" in given:
            given["ref_embeddings"] = REFS.clone().requires_grad_()
            inputs.append(given["ref_embeddings"])
        _, expected = every_pair(z, tau, given)
        with tiles_of(4):
            found = fast.nt_xent_pairwise_loss(z, temperature=tau, backend=backend, reduction="none_pairs", **given)
            total = fast.nt_xent_pairwise_loss(z, temperature=tau, backend=backend, reduction="sum_pairs", **given)
            got = torch.autograd.grad((found * torch.linspace(-1, 2, len(found))).sum(), inputs)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(total, expected.sum(), rtol=1e-10, atol=1e-11)
        wanted = torch.autograd.grad((expected * torch.linspace(-1, 2, len(found))).sum(), inputs)
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9 / temperature)


@pytest.mark.parametrize("form", FORMS)
def test_reference_and_scipy_have_the_pairs_of_the_mask_in_row_major_order(form: str) -> None:
    given = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in FORMS[form].items()}
    for name in ("positives", "ignored", "anchors"):
        given |= {name: np.array(given[name])} if name in given else {}
    places, expected = every_pair(ROWS, 0.5, FORMS[form])
    loss, terms = reference.nt_xent_pairwise_loss(ROWS.tolist(), temperature=0.5, reduction="none_pairs", **given)
    assert list(terms.pairs) == places
    np.testing.assert_allclose(loss, expected, rtol=1e-12)
    again = scipy_losses.nt_xent_pairwise_loss(ROWS.tolist(), temperature=0.5, reduction="none_pairs", **given)
    np.testing.assert_allclose(again.loss, expected, rtol=1e-12)


def test_nonzero_of_the_mask_returns_the_pairs() -> None:
    mask = (LABELS[:, None] == LABELS) & ~torch.eye(11, dtype=torch.bool) & ~IGNORED & ANCHORS[:, None]
    assert [tuple(pair) for pair in mask.nonzero().tolist()] == every_pair(
        ROWS, 0.5, FORMS["some anchors, ignored pairs"]
    )[0]


@pytest.mark.parametrize("backend", ["auto", "tiled", "exact"])
def test_sigmoid_has_one_value_for_each_pair_of_rows(backend: Any) -> None:
    a, b = ROWS[:6].clone().requires_grad_(), REFS.clone().requires_grad_()
    tau, bias = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.3, -2.0))
    mask = LABELS[:6, None] == REF_LABELS
    cosines = (a / a.norm(dim=1, keepdim=True)) @ (b / b.norm(dim=1, keepdim=True)).T
    expected = torch.log1p(torch.exp(-torch.where(mask, 1, -1) * (cosines / tau + bias))) * tau / 0.1
    options: dict[str, Any] = {"temperature": tau, "bias": bias, "base_temperature": 0.1, "backend": backend}
    with tiles_of(4):
        found = fast.sigmoid_loss(a, b, positives=mask, reduction="none_pairs", **options)
        got = gradients(found, [a, b, tau, bias])
    torch.testing.assert_close(found.reshape(6, 7), expected)
    for one, other in zip(got, gradients(expected.flatten(), [a, b, tau, bias]), strict=True):
        torch.testing.assert_close(one, other)
    total = fast.sigmoid_loss(a, b, positives=mask, reduction="sum_pairs", **options)
    torch.testing.assert_close(total, expected.sum())


def test_sigmoid_takes_a_mask_that_is_stored_by_columns() -> None:
    mask = LABELS[:6, None] == REF_LABELS
    stored, plain = (
        fast.sigmoid_loss(ROWS[:6], REFS, positives=given, reduction="none_pairs")
        for given in (mask.T.contiguous().T, mask)
    )
    assert stored.equal(plain)


def test_mean_over_the_pairs_of_sigmoid_is_rounded_once() -> None:
    for seed in range(20):
        chance = torch.Generator().manual_seed(seed)
        a, b = (torch.randn(n, 3, generator=chance) for n in (4, 5))
        exact = fast.sigmoid_loss(a.double(), b.double(), positives=torch.eye(4, 5) > 0, reduction="mean_pairs")
        found = fast.sigmoid_loss(a, b, positives=torch.eye(4, 5) > 0, reduction="mean_pairs", backend="exact")
        assert found.item() == exact.float().item()


def test_values_of_pairs_under_vmap_are_those_of_each_batch() -> None:
    batches = torch.stack([ROWS, ROWS.flip(1)])

    def values(rows: Tensor) -> Tensor:
        return fast.nt_xent_pairwise_loss(rows, labels=LABELS, reduction="none_pairs")

    assert torch.func.vmap(values)(batches).equal(torch.stack([values(rows) for rows in batches]))


def test_sum_and_mean_are_those_of_the_values() -> None:
    for kwargs in ({"labels": LABELS}, {"positives": FORMS["mask"]["positives"], "temperature": 0.2}):
        each, total, mean = (
            fast.nt_xent_pairwise_loss(ROWS, reduction=f"{how}_pairs", **kwargs) for how in ("none", "sum", "mean")
        )
        torch.testing.assert_close(each.sum(), total)
        torch.testing.assert_close(each.mean(), mean)


def test_anchor_without_pairs_has_no_entry_and_adds_what_its_policy_says() -> None:
    labels, z = torch.tensor([0, 0, 1, 2]), ROWS[:4]
    both = [
        fast.nt_xent_pairwise_loss(z, labels, no_positive=p, reduction="none_pairs") for p in ("zero", "drop", "nan")
    ]
    assert all(len(each) == 2 and torch.equal(each, both[0]) for each in both)
    totals = {
        p: float(fast.nt_xent_pairwise_loss(z, labels, no_positive=p, reduction="sum_pairs"))
        for p in ("zero", "drop", "nan")
    }
    assert totals["zero"] == totals["drop"] == pytest.approx(float(both[0].sum()))
    assert math.isnan(totals["nan"])
    assert reference.nt_xent_pairwise_loss(
        z.tolist(), labels.tolist(), no_positive="nan", reduction="none_pairs"
    ).loss == pytest.approx(both[2].tolist())


def test_no_pairs_give_an_empty_result_with_a_gradient_of_zero() -> None:
    for backend in ("auto", "tiled", "exact"):
        z = ROWS[:5].clone().requires_grad_()
        each = fast.nt_xent_pairwise_loss(z, torch.arange(5), reduction="none_pairs", backend=backend)
        assert each.shape == (0,)
        (found,) = torch.autograd.grad(each.sum(), z)
        assert not found.any()
        total = fast.nt_xent_pairwise_loss(z, torch.arange(5), reduction="sum_pairs", backend=backend)
        assert total.item() == 0.0
    assert reference.nt_xent_pairwise_loss(ROWS[:5].tolist(), range(5), reduction="none_pairs").loss == []


def test_pairs_without_negatives_are_zero() -> None:
    z = ROWS[:4].clone().requires_grad_()
    each = fast.nt_xent_pairwise_loss(z, torch.zeros(4, dtype=torch.int64), reduction="none_pairs")
    assert each.tolist() == [0.0] * 12
    assert not torch.autograd.grad(each.sum(), z)[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_rows_give_float32_values_and_gradients_rounded_once(dtype: torch.dtype) -> None:
    z = ROWS.to(dtype).requires_grad_()
    for temperature in (0.5, 1e-4):  # float32 does not suffice at the second
        found = fast.nt_xent_pairwise_loss(z, LABELS, temperature=temperature, reduction="none_pairs")
        assert found.dtype == torch.float32
        wide = z.detach().double().requires_grad_()
        expected = fast.nt_xent_pairwise_loss(wide, LABELS, temperature=temperature, reduction="none_pairs")
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
        (narrow,), (right,) = torch.autograd.grad(found.sum(), z), torch.autograd.grad(expected.sum(), wide)
        assert narrow.dtype == dtype
        ulp = torch.finfo(dtype).eps
        torch.testing.assert_close(narrow.double(), right, rtol=ulp, atol=float(right.abs().max()) * 2e-6)


def test_dot_products_beyond_float64_are_refused() -> None:
    a = torch.full((3, 2), 1e200, dtype=torch.float64)
    with pytest.raises(ValueError, match="similarity: expected"):
        fast.sigmoid_loss(a, a, similarity="dot", reduction="none_pairs")
    with pytest.raises(ValueError, match="similarity: expected"):
        fast.nt_xent_pairwise_loss(a, torch.tensor([0, 0, 1]), similarity="dot", reduction="none_pairs")


def test_second_derivatives_and_functional_gradients_are_right() -> None:
    labels, z = LABELS[:6], ROWS[:6, :3].clone().requires_grad_()
    weights = torch.linspace(0.5, 2, 8, dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        each = fast.nt_xent_pairwise_loss(x, labels, temperature=0.5, reduction="none_pairs", backend="tiled")
        return (each * weights[: len(each)]).sum()

    def of_towers(x: Tensor) -> Tensor:
        return fast.sigmoid_loss(x, x.flip(0), temperature=0.5, bias=-1.0, reduction="none_pairs").square().sum()

    for function in (loss, of_towers):
        assert torch.autograd.gradcheck(function, z)
        assert torch.autograd.gradgradcheck(function, z)
        plain = torch.autograd.grad(function(z), z)[0]
        torch.testing.assert_close(torch.func.grad(function)(z.detach()), plain)


def test_memory_is_linear_in_rows_and_pairs() -> None:
    rows, biggest = 3000, 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal biggest
            found = func(*args, **(kwargs or {}))
            biggest = max([biggest, *(x.numel() for x in tree_leaves(found) if isinstance(x, Tensor))])
            return found

    z = torch.randn(rows, 8, requires_grad=True)
    labels = torch.arange(rows) // 2
    with Watch():
        fast.nt_xent_pairwise_loss(z, labels, reduction="none_pairs").sum().backward()
    assert biggest < rows**2 / 10


def test_modules_take_the_reductions() -> None:
    module = fast.NTXentPairwiseLoss(reduction="none_pairs")
    assert torch.equal(module(ROWS, LABELS), fast.nt_xent_pairwise_loss(ROWS, LABELS, reduction="none_pairs"))
    assert fast.SigmoidLoss(reduction="none_pairs")(ROWS, ROWS).shape == (121,)
    with pytest.raises(ValueError, match="reduction: expected one of mean, sum, none, got 'sum_pairs'"):
        fast.SupConLoss(reduction="sum_pairs")  # type: ignore[arg-type]


def test_explanation_lists_every_pair() -> None:
    case = next(case.case for case in load_golden() if case.id == "golden/nt_xent_pairwise/lonely-nan-none-pairs")
    lines = [line for line in explain(case) if line.startswith("pair (")]
    assert len(lines) == 6
    assert lines[0] == "pair (1, 2): -log 0.1743 = 1.7472"


def each_pair(embeddings: Tensor, labels: Tensor, temperature: float) -> Tensor:
    return every_pair(embeddings, temperature, {"labels": labels})[1]


def sum_of_pairs(embeddings: Tensor, labels: Tensor, temperature: float) -> Tensor:
    return each_pair(embeddings, labels, temperature).sum()


@pytest.mark.parametrize(("function", "reduction"), [(each_pair, "none_pairs"), (sum_of_pairs, "sum_pairs")])
@pytest.mark.quick(1)
def test_identify_names_the_reduction(function: Any, reduction: str) -> None:
    found = identify(function)
    assert (found.verdict, found.loss) == ("match", "nt_xent_pairwise")
    assert found.options == {"reduction": reduction}


def test_pairs_of_a_case_are_in_row_major_order() -> None:
    case = Case("x", "nt_xent_pairwise", ROWS[:4].numpy(), {"labels": [0, 1, 0, 0]}, {"reduction": "none_pairs"})
    assert case.pairs() == [(0, 2), (0, 3), (2, 0), (2, 3), (3, 0), (3, 2)]


# Bounds


def bounded(reduction: str, labels: Sequence[int], dtype: str = "float32") -> Bounds:
    """The bounds of a case."""
    keywords = {"reduction": reduction, "temperature": 0.2}
    case = Case("x", "nt_xent_pairwise", ROWS[: len(labels)].numpy(), {"labels": list(labels)}, keywords)
    return bounds(case, truth(case), dtype)


@pytest.mark.parametrize("labels", [(0, 0, 0, 1, 1, 1), (0, 1, 0, 1, 2, 2, 3, 3), (0, 0, 0, 0, 0, 1, 1, 1, 1, 1)])
def test_bounds_of_the_mean_over_pairs_are_those_of_the_mean_if_classes_are_balanced(labels: Sequence[int]) -> None:
    pairs, anchors = bounded("mean_pairs", labels), bounded("mean", labels)
    np.testing.assert_allclose(pairs.values, anchors.values, rtol=1e-12)
    np.testing.assert_allclose([*pairs.anchors.values()], [*anchors.anchors.values()], rtol=1e-12)
    np.testing.assert_allclose(pairs.rows["embeddings"], anchors.rows["embeddings"], rtol=1e-12)


def test_bound_of_an_anchor_does_not_depend_on_the_reduction() -> None:
    labels = (0, 0, 0, 0, 0, 1, 1, 2)
    wanted = bounded("none", labels)
    for reduction in ("mean", "sum", "mean_pairs", "sum_pairs", "none_pairs"):
        found = bounded(reduction, labels)
        np.testing.assert_allclose([*found.anchors.values()], [*wanted.anchors.values()], rtol=1e-12)


def test_bounds_of_the_mean_over_pairs_add_one_division_to_those_of_the_sum() -> None:
    labels = (0, 0, 0, 0, 0, 1, 1, 2)
    mean, total = bounded("mean_pairs", labels, "float64"), bounded("sum_pairs", labels, "float64")
    for a, b in ((np.array(mean.values), np.array(total.values)), (mean.rows["embeddings"], total.rows["embeddings"])):
        assert ((a * 22 >= b) & (a * 22 <= 1.1 * b)).all()


def test_bound_of_an_anchor_with_one_pair_is_that_of_the_pair() -> None:
    labels = (0, 0, 1, 1, 2, 2)
    np.testing.assert_allclose(bounded("none_pairs", labels).values, bounded("none", labels).values, rtol=1e-12)


@pytest.mark.parametrize("backend", ["auto", "dense", "tiled"])
def test_pairs_of_float32_at_the_lowest_temperature_are_computed_in_float64(backend: Any) -> None:
    """The cosines of row 0 with its positive and its negative differ by 5e-6, of which float32 keeps two digits."""
    rows = torch.tensor([[1, 0, 0], [0.8, 0.6, 0], [0.80001, 0.6, 0], [0, 0.3, 1]], dtype=torch.float32)
    labels, wide = torch.tensor([0, 0, 1, 1]), rows.double()
    found = fast.nt_xent_pairwise_loss(rows, labels, temperature=1e-10, reduction="none_pairs", backend=backend)
    cosines = (wide @ wide.T / (wide.norm(dim=1)[:, None] * wide.norm(dim=1))).tolist()
    # At this temperature, the loss of a pair is the distance of its logit from the largest one, or 0.
    others = {(0, 1): (2, 3), (1, 0): (2, 3), (2, 3): (0, 1), (3, 2): (0, 1)}
    expected = [max(0, max(cosines[i][k] for k in ns) - cosines[i][p]) / 1e-10 for (i, p), ns in others.items()]
    assert 0 < expected[0] < 1e5
    assert found.tolist() == pytest.approx(expected, rel=1e-6)
