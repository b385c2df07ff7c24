"""Weights of pairs and anchors: values from loops, uses, policies, precision, and what the engine does with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pairproof import fast, reference
from pairproof.conformance.diagnose.explain import explain_case
from pairproof.conformance.faults import FAULTS, RIGHT
from pairproof.conformance.faults.judging import target_of as judged
from pairproof.conformance.implementations import ALL
from pairproof.conformance.implementations.callable import External
from pairproof.conformance.judge.fresh import draw
from pairproof.conformance.judge.shrink import with_rows
from pairproof.conformance.suite.cases import Case
from pairproof.conformance.suite.catalogue import WEIGHTS
from pairproof.conformance.suite.golden import load_golden
from pairproof.fast.engine import tiles_of
from pairproof.reference import scipy_losses

N = 9
LABELS = torch.tensor([0, 0, 1, 1, 1, 2, 2, 3, 0])
PARTNERS = torch.tensor([1, 0, 3, 2, 8, 6, 5, 0, 4])  # with references, partners need not be mutual


def rows(count: int = N, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def drawn(*shape: int, seed: int = 0, zeros: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    found = 3 * torch.rand(*shape, generator=generator, dtype=torch.float64)
    return found * (torch.rand(*shape, generator=generator) >= zeros)


def by_loops(
    z: Tensor,
    labels: Tensor,
    w: Tensor,
    v: Tensor,
    a: Tensor,
    *,
    temperature: float,
    denominator: str = "all",
    divisor: str = "count",
    reduction: str = "mean",
) -> float:
    """The formula of the documentation, written as loops over pairs, for weights that are not 0."""
    n = len(z)
    e = [
        [math.exp(torch.cosine_similarity(z[i], z[j], dim=0).item() / temperature) for j in range(n)] for i in range(n)
    ]
    sums, divisors = [], []
    for i in range(n):
        positives = [j for j in range(n) if j != i and labels[j] == labels[i]]
        against = sum(v[i, j].item() * e[i][j] for j in range(n) if labels[j] != labels[i])
        of_pairs = {
            p: {
                "all": sum(e[i][q] for q in positives) + against,
                "one_positive": e[i][p] + against,
                "only_negatives": against,
            }[denominator]
            for p in positives
        }
        sums.append(sum(w[i, p].item() * -math.log(e[i][p] / of_pairs[p]) for p in positives))
        divisors.append(len(positives) if divisor == "count" else sum(w[i, p].item() for p in positives))
    anchors = a.tolist()
    if reduction == "mean_pairs":
        total = sum(x * one for x, one in zip(anchors, sums, strict=True))
        return total / sum(x * d for x, d in zip(anchors, divisors, strict=True))
    values = [x * one / d if d else 0.0 for x, one, d in zip(anchors, sums, divisors, strict=True)]
    return sum(values) / (sum(anchors) if reduction == "mean" else 1)


@pytest.mark.parametrize("divisor", ["count", "weight"])
@pytest.mark.parametrize(
    ("name", "denominator", "reduction"),
    [
        ("supcon", "all", "mean"),
        ("supcon", "one_positive", "sum"),
        ("supcon", "only_negatives", "mean"),
        ("nt_xent_pairwise", "one_positive", "mean"),
        ("nt_xent_pairwise", "one_positive", "mean_pairs"),
    ],
)
def test_all_evaluations_give_the_value_of_the_loops(name: str, denominator: str, reduction: str, divisor: str) -> None:
    z, w, v, a = rows(), drawn(N, N, seed=1), drawn(N, N, seed=2), drawn(N, seed=3)
    expected = by_loops(
        z, LABELS, w, v, a, temperature=0.3, denominator=denominator, divisor=divisor, reduction=reduction
    )
    options: dict[str, Any] = {"temperature": 0.3, "weights_divisor": divisor, "reduction": reduction}
    if name == "supcon":
        options["denominator"] = denominator
    names = ("positive_weights", "negative_weights", "anchor_weights")
    arrays = {name: x.numpy() for name, x in zip(names, (w, v, a), strict=True)}
    loops = getattr(reference, f"{name}_loss")(z.tolist(), LABELS.tolist(), **arrays, **options)
    assert loops.loss == pytest.approx(expected, rel=1e-13)
    whole = getattr(scipy_losses, f"{name}_loss")(z.numpy(), LABELS.numpy(), **arrays, **options)
    assert whole.loss == pytest.approx(expected, rel=1e-13)
    tensors = dict(zip(names, (w, v, a), strict=True))
    for backend in ("auto", "dense", "tiled", "exact"):
        with tiles_of(4):
            found = getattr(fast, f"{name}_loss")(z, LABELS, **tensors, **options, backend=backend)
        assert found.item() == pytest.approx(expected, rel=1e-12), backend


CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "all": ("supcon", {"labels": LABELS, "positive_weights": drawn(N, N, seed=1, zeros=0.3)}),
    "all, negatives": ("supcon", {"labels": LABELS, "negative_weights": drawn(N, N, seed=2, zeros=0.3)}),
    "only negatives": (
        "supcon",
        {
            "labels": LABELS,
            "positive_weights": drawn(N, N, seed=1, zeros=0.5),
            "negative_weights": drawn(N, N, seed=2, zeros=0.3),
            "denominator": "only_negatives",
            "weights_divisor": "weight",
        },
    ),
    "own denominators": (
        "nt_xent_pairwise",
        {
            "labels": LABELS,
            "positive_weights": drawn(N, N, seed=1, zeros=0.3),
            "negative_weights": drawn(N, N, seed=2, zeros=0.3),
            "weights_divisor": "weight",
            "reduction": "mean_pairs",
            "anchor_weights": drawn(N, seed=3, zeros=0.3),
        },
    ),
    "references": (
        "supcon",
        {
            "positives": drawn(N, N + 2, seed=4, zeros=0.6) > 0,
            "ref_embeddings": rows(N + 2, 1),
            "self_rows": torch.tensor([0, 3, -1, -1, 5, 6, 7, 8, 10]),
            "positive_weights": drawn(N, N + 2, seed=1, zeros=0.3),
            "negative_weights": drawn(N, N + 2, seed=2, zeros=0.3),
            "ignored": drawn(N, N + 2, seed=5, zeros=0.8) > 0,
            "anchor_weights": drawn(N, seed=3),
            "no_positive": "drop",
        },
    ),
    "partners": ("nt_xent", {"partners": PARTNERS, "ref_embeddings": rows(N + 2, 1), "anchor_weights": drawn(N)}),
}


def called(name: str) -> Callable[..., Tensor]:
    loss, given = CALLS[name]
    function = getattr(fast, f"{loss}_loss")
    return lambda z, **options: function(z, **{**given, **options})


@pytest.mark.parametrize("temperature", [0.2, 2e-3])
@pytest.mark.parametrize("name", CALLS)
def test_backends_give_the_value_and_gradient_of_the_reference(name: str, temperature: float) -> None:
    loss, given = CALLS[name]
    arrays = {key: x.numpy() if isinstance(x, Tensor) else x for key, x in given.items()}
    expected = getattr(reference, f"{loss}_loss")(rows().tolist(), temperature=temperature, **arrays).loss
    whole = getattr(scipy_losses, f"{loss}_loss")(rows().numpy(), temperature=temperature, **arrays).loss
    assert whole == pytest.approx(expected, rel=1e-11)
    gradients = []
    for backend in ("auto", "dense", "tiled", "exact"):
        z = rows().requires_grad_()
        with tiles_of(4):
            found = called(name)(z, temperature=temperature, backend=backend)
            gradients.append(torch.autograd.grad(found, z)[0])
        assert found.item() == pytest.approx(expected, rel=1e-11), backend
        assert torch.allclose(gradients[0], gradients[-1], rtol=1e-9, atol=1e-11), backend
    step = torch.zeros_like(rows())
    step[2, 1] = 1e-6 * temperature
    difference = called(name)(rows() + step, temperature=temperature) - called(name)(
        rows() - step, temperature=temperature
    )
    assert (difference / (2e-6 * temperature)).item() == pytest.approx(gradients[0][2, 1].item(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", CALLS)
def test_second_derivatives_are_correct(name: str) -> None:
    z = rows().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda z: called(name)(z, temperature=0.5), (z,), fast_mode=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from torch
@pytest.mark.slow
def test_compiled_call_gives_the_same_gradient() -> None:
    z = rows().requires_grad_()
    compiled = torch.compile(called("own denominators"), fullgraph=True, backend="aot_eager")
    (found,) = torch.autograd.grad(compiled(z, temperature=0.5), z)
    (plain,) = torch.autograd.grad(called("own denominators")(z, temperature=0.5), z)
    assert torch.allclose(found, plain, rtol=1e-12, atol=1e-13)


def test_half_precision_rows_take_weights_of_both_dtypes() -> None:
    w, v, a = drawn(N, N, seed=1), drawn(N, N, seed=2), drawn(N, seed=3)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for wide in (torch.float32, torch.float64):
            z = rows(dtype=dtype).requires_grad_()
            given = {"positive_weights": w.to(wide), "negative_weights": v.to(wide), "anchor_weights": a.to(wide)}
            loss = fast.supcon_loss(z, LABELS, temperature=0.3, **given)
            (gradient,) = torch.autograd.grad(loss, z)
            exact = fast.supcon_loss(
                z.detach().double(), LABELS, temperature=0.3, **{k: x.double() for k, x in given.items()}
            )
            assert loss.dtype == torch.float32
            assert gradient.dtype == dtype
            assert loss.item() == pytest.approx(exact.item(), rel=1e-6)


@pytest.mark.parametrize("backend", ["auto", "exact"])
@pytest.mark.parametrize("name", ["positive_weights", "negative_weights", "anchor_weights"])
def test_float64_rows_keep_their_digits_with_float32_weights(name: str, backend: Any) -> None:
    weights = drawn(*([N] if name == "anchor_weights" else [N, N]), seed=1).float()
    options: dict[str, Any] = {"temperature": 0.3, "backend": backend}
    classes_of_four = torch.arange(N) // 4  # products of float32 weights with 3, the number of positives, are rounded
    for reduction in ("mean", "sum", "none", "mean_pairs", "sum_pairs", "none_pairs"):
        found, expected = (
            fast.nt_xent_pairwise_loss(rows(), classes_of_four, reduction=reduction, **{name: given}, **options)
            for given in (weights, weights.double())
        )
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=0, msg=reduction)


def test_loss_near_0_keeps_its_digits_beside_a_positive_of_weight_0() -> None:
    """The loss of row 0 is log(1 + e^(s_2 - s_1) + e^(s_3 - s_1)); its positive 2 has weight 0."""
    z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    w = torch.tensor([[0.0, 1, 0, 1], [1, 0, 0, 1], [1, 1, 0, 1], [1, 1, 1, 1]], dtype=torch.float64)
    expected = math.log1p(math.exp(-1 / 0.02) + math.exp(-2 / 0.02))
    for backend in ("auto", "exact"):
        each = fast.supcon_loss(
            z,
            torch.tensor([0, 0, 0, 1]),
            positive_weights=w,
            weights_divisor="weight",
            temperature=0.02,
            reduction="none",
            backend=backend,
        )
        assert each[0].item() == pytest.approx(expected, rel=1e-12, abs=0)
        (gradient,) = torch.autograd.grad(each[0], z)
        assert gradient[0, 1].item() == pytest.approx(math.exp(-1 / 0.02) / 0.02, rel=1e-12, abs=0)
        # Under cosine, row 2 has no gradient along itself; row 0 pushes it along the first axis.
        assert gradient[2, 0].item() == pytest.approx(math.exp(-1 / 0.02) / 0.02, rel=1e-12, abs=0)


def test_repeated_references_are_weights_of_2() -> None:
    z, references = rows(), rows(4, 1)
    positive = drawn(N, 4, seed=4) > 1.5
    twice = torch.tensor([0, 1, 2, 2, 3, 3])
    v = torch.tensor([1.0, 1.0, 2.0, 2.0], dtype=torch.float64).expand(N, 4)
    positive[:, 2:] = False
    options = {"temperature": 0.3, "no_positive": "drop"}
    found = fast.supcon_loss(z, positives=positive, ref_embeddings=references, negative_weights=v, **options)
    repeated = fast.supcon_loss(z, positives=positive[:, twice], ref_embeddings=references[twice], **options)
    assert found.item() == pytest.approx(repeated.item(), rel=1e-13)


def test_soft_targets_are_the_cross_entropy_of_torch() -> None:
    z, classes = rows(), rows(5, 1)
    targets = torch.softmax(drawn(N, 5, seed=3), dim=1)
    found = fast.supcon_loss(
        z,
        positives=torch.ones(N, 5, dtype=torch.bool),
        positive_weights=targets,
        ref_embeddings=classes,
        weights_divisor="weight",
        similarity="dot",
        temperature=0.5,
    )
    expected = torch.nn.functional.cross_entropy(z @ classes.T / 0.5, targets)
    assert found.item() == pytest.approx(expected.item(), rel=1e-13)


def test_weights_of_anchors_are_those_of_torch_cross_entropy() -> None:
    """torch weights an anchor by the weight of its class; "none" gives weighted values, and the mean divides."""
    z, classes, labels = rows(), rows(5, 1), torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3])
    weights = drawn(5, seed=7)
    options = {"ref_embeddings": classes, "similarity": "dot", "temperature": 1.0}
    for reduction in ("mean", "sum", "none"):
        found = fast.nt_xent_loss(z, labels, anchor_weights=weights[labels], reduction=reduction, **options)
        expected = torch.nn.functional.cross_entropy(z @ classes.T, labels, weight=weights, reduction=reduction)
        assert torch.allclose(found, expected, rtol=1e-13)


def test_anchor_without_weight_follows_the_policies() -> None:
    """Row 0 has positives of weight 0 only, and row 3 negatives of weight 0 only."""
    z, labels = rows(5), torch.tensor([0, 0, 0, 1, 1])
    w, v = torch.ones(5, 5, dtype=torch.float64), torch.ones(5, 5, dtype=torch.float64)
    w[0], v[3] = 0.0, 0.0
    given = {"positive_weights": w, "negative_weights": v, "denominator": "only_negatives", "reduction": "none"}
    plain = fast.supcon_loss(z, labels, denominator="only_negatives", reduction="none")
    for backend in ("auto", "tiled", "exact"):
        with tiles_of(2):
            zero = fast.supcon_loss(z, labels, **given, backend=backend)
            nan = fast.supcon_loss(z, labels, **given, no_positive="nan", no_negative="nan", backend=backend)
            drop = fast.supcon_loss(z, labels, **given, no_positive="drop", backend=backend)
        assert zero[[0, 3]].tolist() == [0.0, 0.0]
        assert torch.allclose(zero[[1, 2, 4]], plain[[1, 2, 4]], rtol=1e-13)
        assert nan.isnan().tolist() == [True, False, False, True, False]
        assert torch.equal(drop, zero[1:])


def test_values_of_pairs_are_multiplied_by_both_weights() -> None:
    z, labels = rows(), LABELS
    given: dict[str, Any] = {"negative_weights": drawn(N, N, seed=2), "temperature": 0.4}
    w, a = drawn(N, N, seed=1, zeros=0.3), drawn(N, seed=3)
    anchors, columns = ((labels[:, None] == labels) & ~torch.eye(N, dtype=torch.bool)).nonzero(as_tuple=True)
    plain = fast.nt_xent_pairwise_loss(z, labels, reduction="none_pairs", **given)
    weighted = {**given, "positive_weights": w, "anchor_weights": a}
    kept = torch.isin(anchors, (w * (labels[:, None] == labels)).fill_diagonal_(0).any(1).nonzero()[:, 0])
    for backend in ("auto", "tiled", "exact"):
        found = fast.nt_xent_pairwise_loss(z, labels, reduction="none_pairs", backend=backend, **weighted)
        assert torch.allclose(found, (plain * w[anchors, columns] * a[anchors])[kept], rtol=1e-13)
        total = fast.nt_xent_pairwise_loss(z, labels, reduction="sum_pairs", backend=backend, **weighted)
        assert total.item() == pytest.approx(found.sum().item(), rel=1e-13)


def test_triton_refuses_weights_of_pairs() -> None:
    z = rows(dtype=torch.float32)
    with pytest.raises(ValueError, match=r'^backend="triton": the kernels do not support weights of pairs'):
        fast.supcon_loss(z, LABELS, positive_weights=drawn(N, N), backend="triton")


@pytest.mark.parametrize("name", ["positive_weights", "negative_weights", "anchor_weights"])
def test_weights_that_require_a_gradient_are_refused(name: str) -> None:
    weights = drawn(*([N] if name == "anchor_weights" else [N, N])).requires_grad_()
    with pytest.raises(ValueError, match=rf"^{name}: expected a tensor without gradient, as weights are constants"):
        fast.supcon_loss(rows(), LABELS, **{name: weights})


@pytest.mark.parametrize("name", ["positive_weights", "negative_weights"])
def test_weights_must_not_change_before_the_backward_pass(name: str) -> None:
    weights = drawn(N, N)
    loss = fast.supcon_loss(rows().requires_grad_(), LABELS, **{name: weights})
    weights.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_module_passes_the_arguments_on() -> None:
    given = {"positive_weights": drawn(N, N), "anchor_weights": drawn(N)}
    found = fast.SupConLoss(temperature=0.5, weights_divisor="weight")(rows(), LABELS, **given)
    assert found == fast.supcon_loss(rows(), LABELS, temperature=0.5, weights_divisor="weight", **given)


class _Largest(TorchDispatchMode):
    """The largest number of entries of a tensor that an operation returns."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else [found]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.given:
                self.entries = max(self.entries, tensor.numel())
        return found

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.given = {tensor.untyped_storage().data_ptr() for tensor in given}


@pytest.mark.slow
def test_no_matrix_of_all_pairs_is_made_besides_the_weights() -> None:
    count = 700
    z, labels = rows(count).requires_grad_(), torch.arange(count) % 7
    w, v = drawn(count, count, seed=1), drawn(count, count, seed=2)
    with tiles_of(32), _Largest(w, v) as largest:
        loss = fast.supcon_loss(z, labels, positive_weights=w, negative_weights=v, backend="tiled", validate=False)
        loss.backward()
    assert 0 < largest.entries <= 32 * count + 1


def case(**arguments: Any) -> Case:
    return Case("drawn/supcon", "supcon", rows().numpy(), {"labels": LABELS.tolist(), **arguments}, {})


GIVEN = {
    "positive_weights": drawn(N, N, seed=1).tolist(),
    "negative_weights": drawn(N, N, seed=2).tolist(),
    "anchor_weights": drawn(N, seed=3).tolist(),
}


@pytest.mark.parametrize("name", GIVEN)
def test_peers_and_targets_without_the_parameter_skip_weights(name: str) -> None:
    one = case(**{name: GIVEN[name]})
    ours = ("reference", "scipy_losses", "fast")
    peers = [kind for kind in ALL if kind.__module__.rpartition(".")[2] not in ours]
    assert peers
    assert all(kind.support.refuses(one) for kind in peers)
    assert External(RIGHT["supcon", "labels"], loss="supcon").refuses(one) == f"has no parameter {name}"
    target = External(fast.supcon_loss, loss="supcon")
    assert target.refuses(one) is None
    assert {*WEIGHTS, "weights_divisor"} <= target.claim.passed


def test_random_batches_have_weights_only_for_targets_that_take_them() -> None:
    ours = External(fast.supcon_loss, loss="supcon").claim
    batches = [draw(ours, 0, number) for number in range(40)]
    assert {name for one in batches for name in one.arguments} >= {*WEIGHTS}
    assert any("weights_divisor" in one.keywords for one in batches)
    assert all("positive_weights" in one.arguments for one in batches if "weights_divisor" in one.keywords)
    plain = External(RIGHT["supcon", "labels"], loss="supcon").claim
    assert all(WEIGHTS.keys().isdisjoint(draw(plain, 0, number).arguments) for number in range(8))


def test_shrinking_keeps_the_weights_of_the_remaining_rows() -> None:
    kept = [0, 2, 5]
    found = with_rows(case(**GIVEN), kept)
    assert found is not None
    for name, value in GIVEN.items():
        array = np.array(value)
        expected = array[kept] if array.ndim == 1 else array[np.ix_(kept, kept)]
        assert found.arguments[name] == expected.tolist()


WORDS = {
    "supcon/weights-divided-by-the-count": "weights_divisor=count is computed",
    "supcon/weights-divided-by-their-sum": "weights_divisor=weight is computed",
    "supcon/anchor-weights-mean-over-the-rows": "divides by the number of anchors",
    "nt_xent/anchor-weights-mean-over-the-rows": "divides by the number of anchors",
    "nt_xent_pairwise/repeated-negatives-once": "count once",
    "nt_xent_pairwise/negative-weights-squared": "the weights of negatives are applied twice",
}


@pytest.mark.parametrize("name", WORDS)
def test_mistake_is_explained(name: str) -> None:
    (fault,) = [fault for fault in FAULTS if fault.name == name]
    target = judged(fault)
    weighted = [
        golden
        for golden in load_golden(losses=[fault.loss])
        if not WEIGHTS.keys().isdisjoint(golden.case.arguments) and not target.refuses(golden.case)
    ]
    found = []
    for golden in weighted:
        outcome = target.evaluate(golden.case, "float64")
        if abs(outcome.values[0] - golden.expected.values[0]) > 1e-6:
            found.append(explain_case(golden.case, outcome, golden.expected))
    assert found
    assert any(WORDS[name] in (words or "") for words in found), found


@pytest.mark.parametrize("package", [fast, reference], ids=["fast", "reference"])
def test_the_largest_weight_and_the_largest_numbers_are_accepted(package: Any) -> None:
    """1e10 is the end of the ranges of weights, of ``beta`` and of ``hardness_strength``."""
    z, largest = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-0.6, 0.8]], dtype=torch.float64), 1e10
    partners, weights = torch.tensor([1, 0, 3, 2]), torch.full((4, 4), largest, dtype=torch.float64)
    a, b = z[::2], z[1::2]
    if package is reference:
        z, a, b, partners, weights = (x.numpy() for x in (z, a, b, partners, weights))

    def value(found: Any) -> float:
        return float(found if package is fast else found.loss)

    labels = partners // 2
    once = value(package.supcon_loss(z, labels))
    assert value(package.supcon_loss(z, labels, positive_weights=weights)) == pytest.approx(largest * once, rel=1e-12)
    assert 0 < value(package.hard_negative_loss(z, partners, beta=largest)) < 10
    ranked = package.multiple_negatives_ranking_loss
    hardest = value(ranked(a, b, hardness_mode="in_batch_negatives", hardness_strength=largest))
    # The cosines of the queries with their negatives are -0.6 and 0.8, so that only the second negative counts.
    assert hardest == pytest.approx((0.0 + largest * 0.8) / 2, rel=1e-8)
