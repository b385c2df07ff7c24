"""Derivatives of `pairproof.fast`: first and second by differences, transforms, compilation and memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from pairproof.fast import (
    nt_bxent_loss,
    nt_xent_loss,
    nt_xent_pairwise_loss,
    supcon_epsilon_loss,
    supcon_in_loss,
    supcon_loss,
)

Tensor = torch.Tensor
Call = Callable[[Tensor], Tensor]

LABELS = torch.tensor([3, -1, 3, 8, -1, 3, 3])
ONE_CLASS = torch.zeros(7, dtype=torch.int64)
ANCHORS = torch.tensor([True, False, True, True, True, True, False])
PARTNERS = torch.tensor([5, 2, 1, 4, 3, 0])
PAIRS = torch.tensor([[0, 1], [2, 4], [4, 2], [1, 1], [0, 1], [3, 0], [3, 1], [3, 2]])
ASYMMETRIC = torch.rand(7, 7, generator=torch.Generator().manual_seed(3)) < 0.4
SIMILARITIES = ("cosine", "dot")
# Short and long rows: under "dot" the maximum of some rows is the self product, of others it is not.
LENGTHS = torch.tensor([0.3, 1.0, 1.4, 0.5, 1.2, 0.2, 1.0], dtype=torch.float64)


def leaf(rows: int = 7, dim: int = 4, seed: int = 11) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows_ = torch.randn(rows, dim, dtype=torch.float64, generator=generator) * LENGTHS[:rows, None]
    return rows_.requires_grad_()


def supervised(function: Callable[..., Tensor], **extra: Iterable[object]) -> Iterable[tuple[str, int, Call]]:
    """Yield calls of a label loss: every value of the formula's options, with each kind of target."""
    targets: list[dict[str, Any]] = [
        {"labels": LABELS},
        {"labels": LABELS, "anchors": ANCHORS},
        {"labels": ONE_CLASS},
        {"positives": ASYMMETRIC},
        {"positives": ASYMMETRIC, "anchors": ANCHORS, "no_positive": "drop"},
    ]
    for values in itertools.product(*extra.values()):
        formula = dict(zip(extra, values, strict=True))
        for similarity, target in itertools.product(SIMILARITIES, targets):
            options = {"temperature": 0.4, "similarity": similarity, "reduction": "none", **formula, **target}
            name = f"{function.__name__}-{'-'.join(map(str, values))}-{similarity}-{'-'.join(target)}"
            yield name, 7, lambda z, options=options: function(z, **options)


def reduced() -> Iterable[tuple[str, int, Call]]:
    for reduction, policy in itertools.product(("mean", "sum", "mean_pairs"), ("zero", "drop")):
        options: dict[str, Any] = {"reduction": reduction, "no_positive": policy, "base_temperature": 0.3}
        for function in (nt_xent_pairwise_loss, supcon_loss, supcon_in_loss, supcon_epsilon_loss):
            if reduction != "mean_pairs" or function is nt_xent_pairwise_loss:
                name = f"{function.__name__}-{reduction}-{policy}"
                yield name, 7, lambda z, function=function, options=options: function(z, LABELS, **options)


def unsupervised() -> Iterable[tuple[str, int, Call]]:
    for similarity, anchors, reduction in itertools.product(SIMILARITIES, (None, ANCHORS), ("mean", "sum", "none")):
        options: dict[str, Any] = {"temperature": 0.4, "similarity": similarity, "reduction": reduction}
        name = f"{similarity}-{'all' if anchors is None else 'some'}-{reduction}"
        few = None if anchors is None else anchors[:6]
        yield f"nt_xent-{name}", 6, lambda z, o=options, a=few: nt_xent_loss(z, PARTNERS, anchors=a, **o)
        yield f"nt_bxent-{name}", 7, lambda z, o=options, a=anchors: nt_bxent_loss(z, PAIRS, anchors=a, **o)
    yield "nt_bxent-no pairs", 7, lambda z: nt_bxent_loss(z, PAIRS[:0])


DENOMINATORS = ("all", "one_positive", "only_negatives")
CASES = [
    *supervised(supcon_loss, denominator=DENOMINATORS),
    *supervised(supcon_in_loss, denominator=DENOMINATORS),
    *supervised(supcon_epsilon_loss),
    *supervised(nt_xent_pairwise_loss),
    *reduced(),
    *unsupervised(),
]


# 3 does not divide any number of options or targets, so every third case has each of them.
@pytest.mark.parametrize(
    ("rows", "call"),
    [
        pytest.param(rows, call, id=name, marks=pytest.mark.slow if number % 3 else ())
        for number, (name, rows, call) in enumerate(CASES)
    ],
)
@pytest.mark.quick(14)
def test_first_and_second_derivatives_equal_differences(rows: int, call: Call) -> None:
    embeddings = leaf(rows, dim=3)
    assert gradcheck(call, embeddings, fast_mode=True)
    assert gradgradcheck(call, embeddings, fast_mode=True)


WHOLE: dict[str, Call] = {
    "supcon": lambda z: supcon_loss(z, positives=ASYMMETRIC[:5, :5], anchors=ANCHORS[:5]),
    "supcon_in": lambda z: supcon_in_loss(z, LABELS[:5], denominator="one_positive", reduction="none"),
    "supcon_epsilon": lambda z: supcon_epsilon_loss(z, LABELS[:5], temperature=0.2),
    "nt_xent": lambda z: nt_xent_loss(z[:4], torch.tensor([1, 0, 3, 2]), reduction="none"),
    "nt_xent_pairwise": lambda z: nt_xent_pairwise_loss(z, LABELS[:5], reduction="mean_pairs"),
    "nt_bxent": lambda z: nt_bxent_loss(z, PAIRS, reduction="none"),
}


@pytest.mark.parametrize("name", list(WHOLE))
def test_complete_jacobians_equal_differences(name: str) -> None:
    """Every entry of both derivatives; the test above checks random projections."""
    embeddings = leaf(5, dim=2)
    assert gradcheck(WHOLE[name], embeddings)
    assert gradgradcheck(WHOLE[name], embeddings)


def test_maximum_is_the_self_product_of_some_rows_only() -> None:
    logits = (leaf() @ leaf().T).detach()
    own = logits.argmax(1) == torch.arange(7)
    assert bool(own.any())
    assert not bool(own.all())


def test_gradient_uses_the_first_of_equal_maxima() -> None:
    """Rows 0 and 2 both attain row 1's maximum; the derivative uses row 0."""
    embeddings = torch.tensor([[2.0, 1.0], [1.0, 0.2], [2.0, 1.0], [-1.0, 0.5]], dtype=torch.float64)
    labels, anchors = torch.tensor([0, 1, 0, 1]), torch.tensor([False, True, False, False])
    found = torch.func.grad(lambda z: supcon_epsilon_loss(z, labels, anchors=anchors, temperature=0.3))(embeddings)
    larger = embeddings.clone()
    larger[0] *= 1 + 1e-12
    beside = torch.func.grad(lambda z: supcon_epsilon_loss(z, labels, anchors=anchors, temperature=0.3))(larger)
    torch.testing.assert_close(found, beside, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(found[0], found[2])


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("loss", [supcon_loss, supcon_in_loss, supcon_epsilon_loss, nt_xent_pairwise_loss])
def test_functional_gradient_equals_backward(loss: Callable[..., Tensor], similarity: str) -> None:
    embeddings = leaf()
    loss(embeddings, LABELS, similarity=similarity).backward()
    found = torch.func.grad(lambda z: loss(z, LABELS, similarity=similarity))(embeddings.detach())
    assert embeddings.grad is not None
    assert bool((found != 0).any())
    # Backward divides by the number of anchors last.
    torch.testing.assert_close(found, embeddings.grad, rtol=1e-13, atol=1e-14)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forward_mode_raises_instead_of_giving_zero() -> None:
    embeddings = leaf().detach()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        supcon_loss(forward_ad.make_dual(embeddings, torch.ones_like(embeddings)), LABELS)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_without_anchors_is_zero_with_zero_gradient(reduction: str) -> None:
    no_anchors = torch.zeros(7, dtype=torch.bool)
    distinct = torch.arange(7)
    calls: list[Call] = [
        lambda z: supcon_loss(z, LABELS, anchors=no_anchors, reduction=reduction),
        lambda z: supcon_in_loss(z, LABELS, anchors=no_anchors, reduction=reduction, no_positive="nan"),
        lambda z: supcon_loss(z, distinct, no_positive="drop", reduction=reduction),
        lambda z: supcon_epsilon_loss(z, distinct, no_positive="drop", reduction=reduction),
        lambda z: nt_xent_pairwise_loss(z, distinct, no_positive="drop", reduction="mean_pairs"),
        lambda z: nt_xent_pairwise_loss(z, distinct, reduction="mean_pairs"),
        lambda z: nt_xent_loss(z[:6], PARTNERS, anchors=no_anchors[:6], reduction=reduction),
        lambda z: nt_bxent_loss(z, PAIRS, anchors=no_anchors, reduction=reduction),
    ]
    for call in calls:
        embeddings = leaf()
        loss = call(embeddings)
        loss.backward()
        assert loss.item() == 0
        assert embeddings.grad is not None
        assert bool((embeddings.grad == 0).all())


def every_loss(labels: Tensor, partners: Tensor, pairs: Tensor, **options: Any) -> list[Call]:
    return [
        *(
            lambda z, f=f, d=d: f(z, labels, denominator=d, **options)
            for f in (supcon_loss, supcon_in_loss)
            for d in DENOMINATORS
        ),
        lambda z: supcon_epsilon_loss(z, labels, **options),
        lambda z: nt_xent_pairwise_loss(z, labels, reduction="mean_pairs", **options),
        lambda z: nt_xent_loss(z, partners, **options),
        lambda z: nt_bxent_loss(z, pairs, **options),
    ]


@pytest.mark.parametrize("backend", ["auto", "dense", "tiled", "exact"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_loss_and_gradient_have_the_right_dtypes_and_are_accurate(
    dtype: torch.dtype, similarity: str, backend: str
) -> None:
    temperature, rounded = 0.5, leaf(6).detach().to(dtype)
    options: dict[str, Any] = {"similarity": similarity, "temperature": temperature}
    # "exact" computes in float64 and rounds its results. The others compute in float32: a logit is a sum of D products
    # of rounded factors. Its error changes the value of one anchor, of the N that are averaged, by the same amount.
    size = 1.0 if similarity == "cosine" else float((rounded.double() @ rounded.double().T).abs().max())
    logit = 2.0**-24 * (3 + rounded.shape[1] ** 0.5) * size / temperature
    allowance = 0.0 if backend == "exact" or dtype == torch.float64 else logit
    length = 1.0 if similarity == "cosine" else float(rounded.double().norm(dim=1).max())
    truth = every_loss(LABELS[:6], PARTNERS, PAIRS, **options)
    for call, true_call in zip(every_loss(LABELS[:6], PARTNERS, PAIRS, backend=backend, **options), truth, strict=True):
        embeddings = rounded.clone().requires_grad_()
        exact = rounded.clone().double().requires_grad_()
        loss, true = call(embeddings), true_call(exact)
        loss.backward()
        true.backward()
        assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert embeddings.grad is not None
        assert exact.grad is not None
        assert embeddings.grad.dtype == dtype
        torch.testing.assert_close(loss.double(), true, rtol=2.0**-23, atol=allowance / len(rounded))
        torch.testing.assert_close(
            embeddings.grad.double(),
            exact.grad,
            rtol=torch.finfo(dtype).eps,
            atol=1e-7 + allowance * length / (temperature * len(rounded)),
        )


def test_autocast_changes_nothing() -> None:
    embeddings = leaf().detach().float()
    plain = supcon_loss(embeddings, LABELS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = supcon_loss(embeddings, LABELS)
    assert torch.equal(plain, under)


class _Largest(TorchDispatchMode):
    """Records the largest number of entries of any tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.entries = max(self.entries, tensor.numel(), tensor.untyped_storage().nbytes() // 8)
        return result


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_no_tensor_of_the_exact_backend_is_larger_than_n_by_n(similarity: str) -> None:
    count, dim = 24, 20
    place = torch.arange(count)
    pairs = torch.stack([place, (place + 7) % count], 1)
    for call in every_loss(place % 5, place ^ 1, pairs, similarity=similarity, backend="exact"):
        embeddings = torch.randn(count, dim, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with _Largest() as largest:
            call(embeddings).backward()
        assert count * count <= largest.entries <= max(count * count, count * dim)


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_permuting_the_batch_permutes_values_and_gradient(similarity: str) -> None:
    order = torch.randperm(7, generator=torch.Generator().manual_seed(5))
    inverse = order.argsort()
    moved_pairs = inverse[PAIRS]
    moved_mask = ASYMMETRIC[order][:, order]
    calls: list[tuple[Call, Call]] = []
    for loss in (supcon_loss, supcon_in_loss, supcon_epsilon_loss, nt_xent_pairwise_loss):
        options: dict[str, Any] = {"similarity": similarity, "reduction": "none"}
        calls += [
            (lambda z, f=loss, o=options: f(z, LABELS, **o), lambda z, f=loss, o=options: f(z, LABELS[order], **o)),
            (
                lambda z, f=loss, o=options: f(z, positives=ASYMMETRIC, **o),
                lambda z, f=loss, o=options: f(z, positives=moved_mask, **o),
            ),
        ]
    calls.append(
        (
            lambda z: nt_bxent_loss(z, PAIRS, similarity=similarity, reduction="none"),
            lambda z: nt_bxent_loss(z, moved_pairs, similarity=similarity, reduction="none"),
        )
    )
    weights = torch.linspace(0.5, 2.0, 7, dtype=torch.float64)
    for call, moved_call in calls:
        embeddings = leaf()
        moved = embeddings.detach()[order].requires_grad_()
        values, moved_values = call(embeddings), moved_call(moved)
        torch.testing.assert_close(moved_values, values[order], rtol=1e-12, atol=1e-12)
        values.backward(weights)
        moved_values.backward(weights[order])
        assert embeddings.grad is not None
        torch.testing.assert_close(moved.grad, embeddings.grad[order], rtol=1e-11, atol=1e-12)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
def test_loss_compiles_as_one_graph() -> None:
    """Values are not read during compilation, so compiled code does not check them and returns NaN for a zero row."""
    compiled: Callable[..., Tensor] = torch.compile(nt_xent_loss, fullgraph=True, backend="aot_eager")
    embeddings, same = leaf(6), leaf(6)
    loss, expected = compiled(embeddings, PARTNERS), nt_xent_loss(same, PARTNERS)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(embeddings.grad, same.grad)
    zeroed = leaf(6).detach()
    zeroed[2] = 0
    assert bool(compiled(zeroed.requires_grad_(), PARTNERS).isnan())


def test_without_float64_the_exact_backend_computes_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    from pairproof.fast.engine import exact as engine

    exact = leaf()
    supcon_loss(exact, LABELS, backend="exact").backward()
    monkeypatch.setattr(engine, "dtypes_of", lambda tensor: (torch.float32, torch.float32))
    embeddings = exact.detach().float().requires_grad_()
    loss = supcon_loss(embeddings, LABELS, backend="exact")
    loss.backward()
    assert loss.dtype == torch.float32
    assert exact.grad is not None
    assert embeddings.grad is not None
    torch.testing.assert_close(embeddings.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)


def test_a_backward_pass_that_fails_leaves_the_next_one_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass overwrites the matrix that the forward pass keeps."""
    embeddings = torch.randn(12, 5, dtype=torch.float64, generator=torch.manual_seed(0), requires_grad=True)
    loss = supcon_loss(embeddings, torch.arange(12) % 3, temperature=0.5)
    (expected,) = torch.autograd.grad(loss, embeddings, retain_graph=True)
    again = supcon_loss(embeddings, torch.arange(12) % 3, temperature=0.5)

    def fails(weighed: Iterable[object], *others: object) -> None:
        list(weighed)
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr("pairproof.fast.engine.unshifted.pulled", fails)
        with pytest.raises(MemoryError):
            torch.autograd.grad(again, embeddings, retain_graph=True)
    (found,) = torch.autograd.grad(again, embeddings)
    torch.testing.assert_close(found, expected)
