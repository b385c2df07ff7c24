"""InfoNCE with given positives, ignored pairs and weights of the directions: values computed by loops over anchors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pairproof import fast
from pairproof.conformance.suite.golden import load_golden
from pairproof.fast.engine import tiles_of

N, M = 5, 7
PARTNERS = torch.tensor([6, 0, 0, 3, 2])
LABELS, REF_LABELS = torch.tensor([0, 1, 2, 0, 9]), torch.tensor([0, 0, 1, 2, 5, 5, 1])
IDS, REF_IDS = torch.tensor([0, 1, 2, 0, 1]), torch.tensor([0, 1, 2, 3, 0, 1, 2])


def rows(count: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def mask(share: float, seed: int) -> Tensor:
    return torch.rand(N, M, generator=torch.Generator().manual_seed(seed)) < share


GIVEN: dict[str, dict[str, Tensor]] = {
    "partners": {"partners": PARTNERS},
    "labels": {"labels": LABELS, "ref_labels": REF_LABELS},
    "mask": {"positives": mask(0.4, 1)},
    "ignored": {"positives": mask(0.4, 1), "ignored": mask(0.3, 2)},
    "ids": {"partners": PARTNERS, "ignored_ids": IDS, "ref_ignored_ids": REF_IDS},
}


def anchors(
    a: Tensor, b: Tensor, given: dict[str, Tensor], temperature: float, inside: str
) -> tuple[list[float | None], list[float | None]]:
    """Return the values of the rows of a and of those of b, None for a row without positives, by loops."""
    s = (torch.nn.functional.cosine_similarity(a[:, None], b[None], dim=2) / temperature).tolist()
    lists = {name: tensor.tolist() for name, tensor in given.items()}

    def positive(i: int, j: int) -> bool:
        if "partners" in lists:
            return bool(lists["partners"][i] == j)
        if "labels" in lists:
            return bool(lists["labels"][i] == lists["ref_labels"][j])
        return bool(lists["positives"][i][j])

    def left_out(i: int, j: int) -> bool:
        if "ignored" in lists and lists["ignored"][i][j]:
            return True
        same = "ignored_ids" in lists and lists["ignored_ids"][i] == lists["ref_ignored_ids"][j]
        return same and not positive(i, j)

    def value(pairs: list[tuple[int, int]]) -> float | None:
        kept = [pair for pair in pairs if not left_out(*pair)]
        total = sum(math.exp(s[i][j]) for i, j in kept)
        ratios = [math.exp(s[i][j]) / total for i, j in kept if positive(i, j)]
        if not ratios:
            return None
        if inside == "none":
            return -sum(map(math.log, ratios)) / len(ratios)
        return -math.log(sum(ratios) / (len(ratios) if inside == "mean" else 1))

    return (
        [value([(i, j) for j in range(len(b))]) for i in range(len(a))],
        [value([(i, j) for i in range(len(a))]) for j in range(len(b))],
    )


def counted(values: list[float | None]) -> list[float]:
    return [value for value in values if value is not None]


@pytest.mark.parametrize("inside", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", GIVEN)
def test_values_are_those_of_loops_over_anchors(name: str, inside: str) -> None:
    a, b, given = rows(N, 3), rows(M, 4), GIVEN[name]
    of_a, of_b = map(counted, anchors(a, b, given, 0.5, inside))
    expected: dict[tuple[str, str], Any] = {
        ("a_to_b", "mean"): sum(of_a) / len(of_a),
        ("b_to_a", "mean"): sum(of_b) / len(of_b),
        ("both", "mean"): sum(of_a + of_b) / len(of_a + of_b),
        ("both", "sum"): sum(of_a + of_b),
        ("both", "none"): of_a + of_b,
    }
    for (direction, reduction), right in expected.items():
        for backend in ("auto", "dense", "tiled", "exact"):
            options: Any = {"direction": direction, "reduction": reduction, "backend": backend}
            with tiles_of(4):
                found = fast.info_nce_loss(a, b, **given, **options, temperature=0.5, inside_reduction=inside)
            assert found.tolist() == pytest.approx(right, rel=1e-12), (direction, reduction, backend)


@pytest.mark.parametrize("name", ["partners", "mask"])
def test_weights_multiply_the_values_of_each_direction(name: str) -> None:
    a, b, given = rows(N, 3), rows(M, 4), GIVEN[name]
    of_a, of_b = map(counted, anchors(a, b, given, 0.5, "none"))
    loss = fast.InfoNCELoss(temperature=0.5, direction_weights=(0.75, 0.25))
    found = loss(a, b, **given).item()
    assert found == pytest.approx(0.75 * sum(of_a) / len(of_a) + 0.25 * sum(of_b) / len(of_b), rel=1e-12)
    options: Any = {**given, "temperature": 0.5, "direction_weights": (0.75, 0.25)}
    weighted = [0.75 * x for x in of_a] + [0.25 * x for x in of_b]
    assert fast.info_nce_loss(a, b, **options, reduction="sum").item() == pytest.approx(sum(weighted), rel=1e-12)
    assert fast.info_nce_loss(a, b, **options, reduction="none").tolist() == pytest.approx(weighted, rel=1e-12)


ANCHOR_WEIGHTS = torch.tensor([1.0, 0.0, 2.5, 0.5, 3.0], dtype=torch.float64)
OF_EQUAL_TOWERS: dict[str, dict[str, Tensor]] = {
    "rows": {},
    "labels": {"labels": LABELS, "ref_labels": REF_LABELS[:N]},
    "ids": {"ignored_ids": IDS},
}


@pytest.mark.parametrize("name", OF_EQUAL_TOWERS)
def test_anchor_weights_are_those_of_row_k_of_both_towers(name: str) -> None:
    a, b, given = rows(N, 3), rows(N, 4), OF_EQUAL_TOWERS[name]
    described = given if "labels" in given else {"partners": torch.arange(N), **given}
    described |= {"ref_ignored_ids": IDS} if "ignored_ids" in given else {}
    sides = anchors(a, b, described, 0.5, "none")
    pairs = [[(w, x) for w, x in zip(ANCHOR_WEIGHTS.tolist(), side, strict=True) if x is not None] for side in sides]
    assert name != "labels" or any(len(side) < N for side in pairs)

    def mean(weighted: list[tuple[float, float]]) -> float:
        return sum(w * x for w, x in weighted) / sum(w for w, _ in weighted)

    expected: list[tuple[dict[str, Any], Any]] = [
        ({"direction": "a_to_b"}, mean(pairs[0])),
        ({"direction": "b_to_a"}, mean(pairs[1])),
        ({}, mean(pairs[0] + pairs[1])),
        ({"direction_weights": (0.75, 0.25)}, 0.75 * mean(pairs[0]) + 0.25 * mean(pairs[1])),
        ({"reduction": "sum"}, sum(w * x for w, x in pairs[0] + pairs[1])),
        ({"reduction": "none"}, [w * x for w, x in pairs[0] + pairs[1]]),
    ]
    for options, right in expected:
        for backend in ("auto", "tiled", "exact"):
            with tiles_of(4):
                more: Any = {"temperature": 0.5, "backend": backend, **options}
                found = fast.info_nce_loss(a, b, anchor_weights=ANCHOR_WEIGHTS, **given, **more)
            assert found.tolist() == pytest.approx(right, rel=1e-12), (options, backend)


def test_anchor_weights_multiply_the_values_with_a_queue() -> None:
    a, b, queue = rows(N, 3), rows(N, 4), rows(M, 5)
    each = fast.info_nce_loss(a, b, negatives=queue, temperature=0.5, reduction="none")
    loss = fast.InfoNCELoss(temperature=0.5)
    found = loss(a, b, negatives=queue, anchor_weights=ANCHOR_WEIGHTS)
    assert found.item() == pytest.approx((each * ANCHOR_WEIGHTS).sum().item() / 7, rel=1e-13)
    both = fast.InfoNCELoss(temperature=0.5, direction="both", reduction="sum")
    every = fast.info_nce_loss(a, b, negatives=queue, temperature=0.5, reduction="none", direction="both")
    found = both(a, b, negatives=queue, anchor_weights=ANCHOR_WEIGHTS)
    assert found.item() == pytest.approx((every * ANCHOR_WEIGHTS.repeat(2)).sum().item(), rel=1e-13)


def test_anchor_weights_of_unequal_towers_need_one_direction() -> None:
    a, b = rows(N, 3), rows(M, 4)
    options: Any = {"partners": PARTNERS, "anchor_weights": ANCHOR_WEIGHTS}
    assert fast.info_nce_loss(a, b, direction="a_to_b", **options).item() > 0
    for direction in ("both", "b_to_a"):
        with pytest.raises(ValueError, match=r"^anchor_weights: expected direction 'a_to_b' for towers of 5 and 7"):
            fast.info_nce_loss(a, b, direction=direction, **options)  # type: ignore[arg-type]


def test_rows_without_positives_follow_the_policy() -> None:
    a, b, given = rows(N, 3), rows(M, 4), GIVEN["partners"]
    of_a, of_b = anchors(a, b, given, 0.5, "none")
    every = [x or 0.0 for x in of_a + of_b]
    found = fast.info_nce_loss(a, b, **given, temperature=0.5, no_positive="zero")
    assert found.item() == pytest.approx(sum(every) / (N + M), rel=1e-12)
    values = fast.info_nce_loss(a, b, **given, temperature=0.5, no_positive="nan", reduction="none")
    assert values.isnan().tolist() == [x is None for x in of_a + of_b]


def test_mean_without_direction_weights_equals_that_with_halves_only_for_equally_many_anchors() -> None:
    a, b = rows(N, 3), rows(M, 4)
    halves: Any = {"direction_weights": (0.5, 0.5)}
    plain = fast.info_nce_loss(a, b[:N])
    assert fast.info_nce_loss(a, b[:N], **halves).item() == pytest.approx(plain.item(), rel=1e-14)
    unequal = fast.info_nce_loss(a, b, partners=PARTNERS)
    assert abs(fast.info_nce_loss(a, b, partners=PARTNERS, **halves) - unequal) > 1e-3


@pytest.mark.parametrize("name", ["ids", "ignored"])
def test_second_derivatives_are_correct(name: str) -> None:
    def loss(a: Tensor, b: Tensor) -> Tensor:
        return fast.info_nce_loss(a, b, **GIVEN[name], temperature=0.5, direction_weights=(0.75, 0.25))

    inputs = rows(N, 3).requires_grad_(), rows(M, 4).requires_grad_()
    assert torch.autograd.gradcheck(loss, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(loss, inputs, fast_mode=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from torch
def test_compiled_call_gives_the_same_gradient() -> None:
    a, b = rows(N, 3).requires_grad_(), rows(M, 4)

    def loss(a: Tensor, b: Tensor) -> Tensor:
        return fast.info_nce_loss(a, b, **GIVEN["ids"], temperature=0.5, direction_weights=(0.75, 0.25))

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found, right = (torch.autograd.grad(function(a, b), a)[0] for function in (compiled, loss))
    assert torch.allclose(found, right, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_both_directions_are_added_before_they_are_rounded(dtype: torch.dtype) -> None:
    a, b = rows(N, 3, dtype).requires_grad_(), rows(M, 4, dtype)
    wide = a.detach().double().requires_grad_()
    (found,) = torch.autograd.grad(fast.info_nce_loss(a, b, partners=PARTNERS, temperature=0.5), a)
    (right,) = torch.autograd.grad(fast.info_nce_loss(wide, b.double(), partners=PARTNERS, temperature=0.5), wide)
    assert (found.double() - right).abs().max() <= torch.finfo(dtype).eps / 2 * right.abs().max() + 1e-6


def test_golden_cases_agree_with_each_other() -> None:
    loss = {golden.id.split("/")[-1]: golden.expected.loss for golden in load_golden(losses=("info_nce",))}
    assert loss["direction-weights-halves"] == loss["two-towers-tau-half"]
    assert loss["direction-weights-zero"] == loss["a-to-b-mean"]
    assert loss["one-class-inside-mean"] == pytest.approx(math.log(4), rel=1e-15)
    assert loss["longer-second-tower-sum"] == pytest.approx(7 * float(loss["longer-second-tower"]), rel=1e-14)
    assert loss["longer-second-tower-sum"] == pytest.approx(9 * float(loss["longer-second-tower-zero"]), rel=1e-14)
