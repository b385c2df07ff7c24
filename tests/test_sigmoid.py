"""The sigmoid loss: values computed by hand, every way of giving positives, and learned temperature and bias."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pairproof import fast, reference
from pairproof.conformance.diagnose.identify import identify
from pairproof.conformance.judge.check import check_loss
from pairproof.conformance.suite.golden import load_golden
from pairproof.conformance.truth.tolerances import scalar_bounds
from pairproof.fast.engine import tiles_of
from pairproof.reference import scipy_losses


class Largest(TorchDispatchMode):
    """Records the largest number of entries of any tensor."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.entries = max(self.entries, tensor.numel())
        return result


A = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
B = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
LABELS, REF_LABELS = torch.tensor([0, 2, 1, 0, 5]), torch.tensor([1, 0, 0, 2, 2, 3, 1])
PARTNERS = torch.tensor([6, 0, 0, 3, 2])
MASK = torch.tensor([[0, 1, 0, 1, 0, 0, 0], [0] * 7, [1] * 7, [0, 0, 0, 0, 0, 0, 1], [1, 0, 1, 0, 1, 0, 1]]).bool()
WAYS: list[tuple[Mapping[str, Tensor], Tensor]] = [
    ({"partners": PARTNERS}, F.one_hot(PARTNERS, 7).bool()),
    ({"labels": LABELS, "ref_labels": REF_LABELS}, LABELS[:, None] == REF_LABELS),
    ({"positives": MASK}, MASK),
]
BACKENDS = ("auto", "dense", "tiled", "exact")


def plain(a: Tensor, b: Tensor, positive: Tensor, temperature: Any, bias: Any, similarity: str) -> Tensor:
    """The cross-entropy of every pair, written as in the paper's pseudocode."""
    if similarity == "cosine":
        a, b = F.normalize(a, dim=1), F.normalize(b, dim=1)
    return -F.logsigmoid(torch.where(positive, 1.0, -1.0).to(a.dtype) * (a @ b.T / temperature + bias))


def reduced(each: Tensor, reduction: str) -> Tensor:
    return {"mean": each.sum() / len(each), "sum": each.sum(), "none": each.sum(1), "mean_pairs": each.mean()}[
        reduction
    ]


def test_lone_fitted_pair_has_the_loss_of_its_positive() -> None:
    """The logit is 1 / 0.1 - 4.25 = 5.75, and the loss is log(1 + e^-5.75), not 0."""
    row, expected = [[3.0, 4.0]], math.log1p(math.exp(-5.75))
    assert expected == pytest.approx(0.00318, abs=3e-6)
    assert reference.sigmoid_loss(row, row, bias=-4.25).loss == pytest.approx(expected, rel=1e-14)
    assert scipy_losses.sigmoid_loss(row, row, bias=-4.25).loss == pytest.approx(expected, rel=1e-14)
    for dtype, backend in itertools.product((torch.float64, torch.float32, torch.bfloat16), BACKENDS):
        z = torch.tensor(row, dtype=dtype)
        found = fast.sigmoid_loss(z, z, bias=-4.25, backend=backend)  # type: ignore[arg-type]
        assert float(found) == pytest.approx(expected, rel=1e-14 if dtype == torch.float64 else 2e-6)


def test_difference_of_sums_loses_a_fitted_pair_in_bfloat16() -> None:
    """The loss of all pairs as negatives, minus the logits of positives, as in open_clip's chunked form."""
    logit = torch.tensor(5.75, dtype=torch.bfloat16)
    assert F.softplus(logit) - logit == 0
    row = torch.tensor([[3.0, 4.0]], dtype=torch.bfloat16)
    assert float(fast.sigmoid_loss(row, row, bias=-4.25)) == pytest.approx(0.00318, abs=3e-6)


def test_equation_of_the_paper_subtracts_the_bias() -> None:
    """At the default temperature and bias, the logit of parallel rows is 10 - 10 = 0; with the other sign it is 20."""
    row = [[3.0, 4.0]]
    assert reference.sigmoid_loss(row, row).loss == pytest.approx(math.log(2), rel=1e-14)
    assert reference.sigmoid_loss(row, row, bias=10.0).loss == pytest.approx(math.log1p(math.exp(-20)), rel=1e-12)


def test_mean_divides_by_the_number_of_anchors() -> None:
    """All logits are 0, so each of the N M pairs has the value log 2."""
    a, b = torch.eye(6)[:3], torch.eye(6)[3:5]
    for reduction, expected in (("mean", 2), ("mean_pairs", 1), ("sum", 6), ("none", [2, 2, 2])):
        options: dict[str, Any] = {"bias": 0.0, "reduction": reduction, "partners": torch.tensor([0, 1, 1])}
        if reduction == "none":
            expected = np.array(expected)
        loss = fast.sigmoid_loss(a, b, **options).numpy() / math.log(2)
        np.testing.assert_allclose(loss, expected, rtol=1e-6)


@pytest.mark.parametrize(("given", "positive"), WAYS, ids=["partners", "labels", "mask"])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_every_way_of_giving_positives_agrees_with_the_pseudocode(
    given: Mapping[str, Tensor], positive: Tensor, similarity: str
) -> None:
    """Also between towers of unequal length, and with learned temperature and bias."""
    for t, b, reduction, base in (
        (0.1, -10.0, "mean", None),
        (0.5, 2.0, "none", None),
        (0.002, -3.0, "mean_pairs", 0.3),
        (0.1, -2.0, "sum", 0.3),
    ):
        options: dict[str, Any] = {"similarity": similarity, "reduction": reduction, "base_temperature": base, **given}
        leaves = [x.detach().clone().requires_grad_() for x in (A, B, *torch.tensor([t, b], dtype=torch.float64))]
        expected = reduced(plain(leaves[0], leaves[1], positive, leaves[2], leaves[3], similarity), reduction)
        expected = expected if base is None else expected * leaves[2] / base
        gradients = torch.autograd.grad(expected.sum(), leaves)
        arrays = {name: value.numpy() for name, value in given.items()}
        for package in (reference, scipy_losses):
            numbers = package.sigmoid_loss(A.numpy(), B.numpy(), temperature=t, bias=b, **{**options, **arrays}).loss
            np.testing.assert_allclose(numbers, expected.detach().numpy(), rtol=1e-11)
        for backend in BACKENDS:
            with tiles_of(2):
                found = fast.sigmoid_loss(
                    *leaves[:2], temperature=leaves[2], bias=leaves[3], backend=backend, **options
                )
                number = fast.sigmoid_loss(A, B, temperature=t, bias=b, backend=backend, **options)
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(number, expected.detach(), rtol=1e-10, atol=1e-12)
            for own, right in zip(torch.autograd.grad(found.sum(), leaves), gradients, strict=True):
                torch.testing.assert_close(own, right, rtol=1e-9, atol=1e-11)


IDS, REF_IDS = torch.tensor([0, 1, 2, 0, 1]), torch.tensor([0, 1, 2, 3, 0, 1, 2])
IGNORED = torch.tensor([[0, 1, 0, 1, 0, 0, 0], [1] * 7, [0, 0, 1, 1, 0, 0, 1], [0] * 7, [1, 0, 0, 0, 0, 0, 1]]).bool()
EQUAL = IDS[:, None] == REF_IDS
OF_PARTNERS = F.one_hot(PARTNERS, 7).bool()
LEFT_OUT: dict[str, tuple[Mapping[str, Tensor], Tensor, Tensor]] = {
    "mask": ({"positives": MASK, "ignored": IGNORED}, MASK, ~IGNORED),
    "labels": (
        {"labels": LABELS, "ref_labels": REF_LABELS, "ignored": IGNORED},
        LABELS[:, None] == REF_LABELS,
        ~IGNORED,
    ),
    "partners": (
        {"partners": PARTNERS, "ignored": IGNORED & ~OF_PARTNERS},
        OF_PARTNERS,
        ~IGNORED | OF_PARTNERS,
    ),
    "ids of partners": (
        {"partners": PARTNERS, "ignored_ids": IDS, "ref_ignored_ids": REF_IDS},
        OF_PARTNERS,
        ~EQUAL | OF_PARTNERS,
    ),
    "ids and a mask": (
        {"positives": MASK, "ignored": IGNORED, "ignored_ids": IDS, "ref_ignored_ids": REF_IDS},
        MASK,
        ~IGNORED & (~EQUAL | MASK),
    ),
}
"""The arguments, the positives, and the pairs that are not left out."""


def reduced_without(each: Tensor, kept: Tensor, reduction: str) -> Tensor:
    each = torch.where(kept, each, 0.0)
    by_pairs = {"mean_pairs": each.sum() / kept.sum(), "sum_pairs": each.sum(), "none_pairs": each[kept]}
    return by_pairs[reduction] if reduction in by_pairs else reduced(each, reduction)


@pytest.mark.parametrize("name", LEFT_OUT)
@pytest.mark.parametrize("reduction", ["mean", "none", "mean_pairs", "sum_pairs", "none_pairs"])
def test_ignored_pairs_are_left_out_of_every_reduction(name: str, reduction: str) -> None:
    """The values and the gradients of all inputs, also of the temperature and the bias."""
    given, positive, kept = LEFT_OUT[name]
    assert not kept.all()
    numbers = torch.tensor([0.5, -1.0], dtype=torch.float64)
    leaves = [x.detach().clone().requires_grad_() for x in (A, B, *numbers)]
    expected = reduced_without(plain(*leaves[:2], positive, *leaves[2:], "cosine"), kept, reduction)
    upstream = torch.linspace(1, 2, expected.numel(), dtype=torch.float64).view_as(expected)
    gradients = torch.autograd.grad(expected, leaves, upstream)
    arrays = {key: value.numpy() for key, value in given.items()}
    for package in (reference, scipy_losses):
        found = package.sigmoid_loss(A.numpy(), B.numpy(), temperature=0.5, bias=-1.0, reduction=reduction, **arrays)
        np.testing.assert_allclose(found.loss, expected.detach().numpy(), rtol=1e-12)
    for backend in BACKENDS:
        with tiles_of(2):
            options: dict[str, Any] = {**given, "reduction": reduction, "backend": backend}
            own = fast.sigmoid_loss(*leaves[:2], temperature=leaves[2], bias=leaves[3], **options)
            torch.testing.assert_close(own, expected, rtol=1e-11, atol=1e-13)
            for one, right in zip(torch.autograd.grad(own, leaves, upstream), gradients, strict=True):
                torch.testing.assert_close(one, right, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("left_out", [{}, {"ignored": IGNORED}], ids=["all pairs", "ignored pairs"])
@pytest.mark.parametrize("reduction", ["mean", "none", "mean_pairs", "sum_pairs", "none_pairs"])
def test_anchor_weights_multiply_the_values_of_rows_and_of_their_pairs(
    reduction: str, left_out: Mapping[str, Tensor]
) -> None:
    weights = torch.tensor([0.5, 3.0, 0.0, 1.0, 2.5], dtype=torch.float64)
    kept = ~left_out["ignored"] if left_out else torch.ones(5, 7, dtype=torch.bool)
    z = A.clone().requires_grad_()
    each = torch.where(kept, plain(z, B, MASK, 0.5, -1.0, "cosine") * weights[:, None], 0.0)
    expected = {
        "mean": each.sum() / weights.sum(),
        "none": each.sum(1),
        "mean_pairs": each.sum() / (kept.sum(1) * weights).sum(),
        "sum_pairs": each.sum(),
        "none_pairs": each[kept],
    }[reduction]
    upstream = torch.linspace(1, 2, expected.numel(), dtype=torch.float64).view_as(expected)
    (right,) = torch.autograd.grad(expected, z, upstream)
    module = fast.SigmoidLoss(temperature=0.5, bias=-1.0, reduction=reduction)  # type: ignore[arg-type]
    for backend in BACKENDS:
        module.backend = backend  # type: ignore[assignment]
        with tiles_of(2):
            found = module(z, B, positives=MASK, anchor_weights=weights, **left_out)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
            torch.testing.assert_close(torch.autograd.grad(found, z, upstream)[0], right, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("reduction", ["mean", "mean_pairs", "sum"])
def test_all_pairs_ignored_gives_zero(reduction: str) -> None:
    z, options = A.clone().requires_grad_(), {"positives": MASK, "ignored": torch.ones(5, 7, dtype=torch.bool)}
    for backend in BACKENDS:
        loss = fast.sigmoid_loss(z, B, reduction=reduction, backend=backend, **options)  # type: ignore[arg-type]
        assert loss.item() == 0
        assert not torch.autograd.grad(loss, z)[0].any()
    none: Any = {**options, "reduction": "none_pairs"}
    assert fast.sigmoid_loss(z, B, **none).shape == (0,)
    assert reference.sigmoid_loss(A.numpy(), B.numpy(), **{k: v.numpy() for k, v in options.items()}).loss == 0


def test_product_of_an_ignored_pair_may_overflow() -> None:
    """The logit of the ignored pair is 1e20 in float32, and the other logits are small."""
    a, b = torch.tensor([[1e10, 0.0], [0.0, 1.0]]).requires_grad_(), torch.tensor([[0.0, 1.0], [1e10, 0.0]])
    ignored = torch.tensor([[False, True], [False, False]])
    loss = fast.sigmoid_loss(a, b, positives=~ignored, ignored=ignored, similarity="dot", bias=-2.0, temperature=1.0)
    losses = [math.log1p(math.exp(-logit)) for logit in (-2.0, -1.0, -2.0)]
    assert float(loss.detach()) == pytest.approx(sum(losses) / 2, rel=1e-6)
    assert bool(torch.autograd.grad(loss, a)[0].isfinite().all())


@pytest.mark.parametrize("name", ["ids of partners", "mask"])
@pytest.mark.parametrize("reduction", ["mean", "mean_pairs", "none_pairs"])
def test_second_derivatives_do_not_contain_ignored_pairs(name: str, reduction: str) -> None:
    def loss(a: Tensor, temperature: Tensor, bias: Tensor) -> Tensor:
        options: dict[str, Any] = {**LEFT_OUT[name][0], "reduction": reduction}
        return fast.sigmoid_loss(a, B, temperature=temperature, bias=bias, **options)

    leaves = [x.clone().requires_grad_() for x in (A, torch.tensor(0.5).double(), torch.tensor(-1.0).double())]
    assert torch.autograd.gradcheck(loss, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(loss, leaves, fast_mode=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
def test_ignored_pairs_compile_as_one_graph() -> None:
    def loss(a: Tensor, bias: Tensor) -> Tensor:
        options: dict[str, Any] = {**LEFT_OUT["ids of partners"][0], "reduction": "mean_pairs"}
        return fast.sigmoid_loss(a, B, bias=bias, **options)

    found = []
    for call in (torch.compile(loss, fullgraph=True, backend="aot_eager"), loss):
        leaves = [x.clone().requires_grad_() for x in (A, torch.tensor(-3.0).double())]
        value = call(*leaves)
        found.append([value.detach(), *torch.autograd.grad(value, leaves)])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


def test_ids_of_the_first_tower_are_those_of_both_towers_of_equal_length() -> None:
    both = fast.sigmoid_loss(A, B[:5], ignored_ids=IDS, ref_ignored_ids=IDS)
    assert torch.equal(fast.sigmoid_loss(A, B[:5], ignored_ids=IDS), both)
    assert not torch.equal(fast.sigmoid_loss(A, B[:5]), both)


def test_default_positive_is_the_row_of_the_same_number() -> None:
    for given in ({"partners": torch.arange(5)}, {"labels": torch.arange(5)}, {"positives": torch.eye(5).bool()}):
        assert torch.equal(fast.sigmoid_loss(A, B[:5]), fast.sigmoid_loss(A, B[:5], **given))  # type: ignore[arg-type]
        arrays = {name: value.numpy() for name, value in given.items()}
        same = reference.sigmoid_loss(A.numpy(), B[:5].numpy(), **arrays).loss
        assert same == reference.sigmoid_loss(A.numpy(), B[:5].numpy()).loss


def test_labels_of_the_first_tower_are_those_of_both_towers_of_equal_length() -> None:
    both = fast.sigmoid_loss(A, B[:5], labels=LABELS, ref_labels=LABELS)
    assert torch.equal(fast.sigmoid_loss(A, B[:5], labels=LABELS), both)


def test_labels_of_two_dtypes_are_equal_by_value() -> None:
    """The largest uint64 label differs from the int64 label -1, although their bits are equal."""
    labels = torch.tensor([2**64 - 1, 0, 0, 3, 3], dtype=torch.uint64)
    other = torch.tensor([-1, 0, 7, 3, 3, -1, 0])
    positive = torch.tensor([[x == y for y in other.tolist()] for x in (2**64 - 1, 0, 0, 3, 3)])
    expected = fast.sigmoid_loss(A, B, positives=positive)
    assert torch.equal(fast.sigmoid_loss(A, B, labels=labels, ref_labels=other), expected)


@pytest.mark.parametrize("backend", ["auto", "exact"])
def test_first_and_second_derivatives_are_those_of_the_value(backend: str) -> None:
    def loss(a: Tensor, b: Tensor, temperature: Tensor, bias: Tensor) -> Tensor:
        options: dict[str, Any] = {"positives": MASK[:2, 2:5], "backend": backend}
        return fast.sigmoid_loss(a, b, temperature=temperature, bias=bias, **options)

    leaves = [
        x.clone().requires_grad_()
        for x in (A[:2, :2], B[:3, :2], torch.tensor(0.5).double(), torch.tensor(-1.0).double())
    ]
    with tiles_of(2):
        assert torch.autograd.gradcheck(loss, leaves)
        assert torch.autograd.gradgradcheck(loss, leaves)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_reaches_the_loss_where_values_are_not_read(backend: str) -> None:
    """Under vmap values are not checked; a NaN in one row must not be lost among the other pairs."""
    rows = torch.stack((A, A.clone()))
    rows[1, 2, 0] = math.nan
    found = torch.func.vmap(lambda a: fast.sigmoid_loss(a, A, backend=backend))(rows)  # type: ignore[arg-type]
    assert found.isnan().tolist() == [False, True]


@pytest.mark.parametrize("name", ["temperature", "bias"])
def test_invalid_tensor_gives_nan_where_values_are_not_read(name: str) -> None:
    bad = torch.tensor([0.5, math.nan, math.inf])
    found = torch.func.vmap(lambda value: fast.sigmoid_loss(A, A, **{name: value}))(bad)  # type: ignore[arg-type]
    assert found.isnan().tolist() == [False, True, True]


def test_fitted_rows_keep_their_gradient_in_half_precision() -> None:
    """The losses of fitted pairs are about e^-9; a difference of sums near 10 would lose them in float32."""
    z = torch.eye(8).repeat(1, 2)[:, :12].bfloat16().requires_grad_()
    loss = fast.sigmoid_loss(z, z.detach(), temperature=0.05, bias=-10.0)
    assert float(loss.detach()) == pytest.approx(8 * math.log1p(math.exp(-10)), rel=1e-5)
    wide = z.detach().double().requires_grad_()
    fast.sigmoid_loss(wide, z.detach().double(), temperature=0.05, bias=-10.0).backward()
    loss.backward()
    assert z.grad is not None
    assert wide.grad is not None
    assert float((z.grad.double() - wide.grad).norm()) <= 2.0**-8 * float(wide.grad.norm())


def test_module_learns_temperature_and_bias() -> None:
    bias, temperature = (torch.nn.Parameter(torch.tensor(x)) for x in (-10.0, 0.1))
    module = fast.SigmoidLoss(bias=bias, temperature=temperature, reduction="mean_pairs")
    assert dict(module.named_parameters()) == {"bias": bias, "temperature": temperature}
    module(A, B, positives=MASK).backward()
    assert bias.grad is not None
    assert temperature.grad is not None
    assert module(A, B, positives=MASK) == fast.sigmoid_loss(
        A, B, positives=MASK, bias=-10.0, temperature=0.10000000149011612, reduction="mean_pairs"
    )
    buffered = fast.SigmoidLoss(bias=torch.tensor(-3.0))
    assert list(buffered.state_dict()) == ["bias"]
    with pytest.raises(ValueError, match=r"^bias: expected a number in the range -1e\+10 to 1e\+10, got nan$"):
        fast.SigmoidLoss(bias=math.nan)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", ["auto", pytest.param("exact", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_learned_bias_compiles_as_one_graph(backend: str) -> None:
    def loss(a: Tensor, b: Tensor, temperature: Tensor, bias: Tensor) -> Tensor:
        options: dict[str, Any] = {"temperature": temperature, "bias": bias, "backend": backend}
        return fast.sigmoid_loss(a, b, partners=PARTNERS, reduction="mean_pairs", **options)

    found = []
    for call in (torch.compile(loss, fullgraph=True, backend="aot_eager"), loss):
        leaves = [x.clone().requires_grad_() for x in (A, B, torch.tensor(0.2).double(), torch.tensor(-3.0).double())]
        value = call(*leaves)
        found.append([value.detach(), *torch.autograd.grad(value, leaves)])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_bias_may_have_another_dtype(dtype: torch.dtype) -> None:
    bias = torch.tensor(-2.5, dtype=dtype, requires_grad=True)
    value = fast.sigmoid_loss(A.float(), B[:5].float(), bias=bias)
    value.backward()
    torch.testing.assert_close(value.detach(), fast.sigmoid_loss(A.float(), B[:5].float(), bias=-2.5))
    assert bias.grad is not None
    assert bias.grad.dtype == dtype


@pytest.mark.parametrize(
    "given",
    [{}, {"labels": torch.arange(3000) // 7}, {"ignored_ids": torch.arange(3000) // 3}],
    ids=["matching rows", "labels", "ignored ids"],
)
@pytest.mark.quick(1)
def test_memory_is_linear_in_the_rows(given: Mapping[str, Tensor]) -> None:
    """At a low temperature too, no tensor has as many entries as there are pairs."""
    z, w = (torch.randn(3000, 4, generator=torch.Generator().manual_seed(k)).requires_grad_() for k in (0, 1))
    for temperature in (0.1, 0.005):
        with Largest() as largest:
            fast.sigmoid_loss(z, w, temperature=temperature, **given).backward()  # type: ignore[arg-type]
        assert largest.entries <= 2**18


@pytest.mark.parametrize("backend", BACKENDS)
def test_graph_may_run_backward_twice(backend: str) -> None:
    """The first backward pass overwrites what the forward pass kept."""
    for given, _ in WAYS:
        z = A.clone().requires_grad_()
        for reduction in ("mean", "none"):
            options: dict[str, Any] = {**given, "reduction": reduction, "backend": backend, "bias": -1.0}
            values = fast.sigmoid_loss(z, B, **options)
            first, again = (torch.autograd.grad(values.sum(), z, retain_graph=True)[0] for _ in range(2))
            torch.testing.assert_close(first, again, rtol=1e-14, atol=0)


def test_terms_of_the_reference_are_every_pair_with_its_logit() -> None:
    found = reference.sigmoid_loss(A.numpy(), B.numpy(), partners=PARTNERS.numpy(), temperature=0.5, bias=-2.0)
    assert set(found.terms.pairs) == set(itertools.product(range(5), range(7)))
    cosines = (F.normalize(A, dim=1) @ F.normalize(B, dim=1).T).numpy()
    np.testing.assert_allclose(found.terms.logits, cosines / 0.5 - 2, rtol=1e-12, atol=1e-14)
    assert all(pair.positive == (int(PARTNERS[i]) == j) for (i, j), pair in found.terms.pairs.items())
    assert [len(row) for row in found.terms.positives] == [1] * 5


def test_fast_has_the_stored_bias_gradient() -> None:
    cases = [golden for golden in load_golden(losses=("sigmoid",)) if golden.case.n <= 40]
    assert len(cases) > 50
    for golden in cases:
        case, bias = golden.case, torch.tensor(golden.case.bias, dtype=torch.float64, requires_grad=True)
        given = {name: torch.tensor(value) for name, value in {**case.matrices, **case.arguments}.items()}
        fast.sigmoid_loss(**{**given, **case.keywords, "bias": bias}).sum().backward()
        assert bias.grad is not None
        assert golden.expected.bias_gradient is not None
        error = abs(float(bias.grad) - golden.expected.bias_gradient)
        assert error <= scalar_bounds(case, "float64")[1], case.id


def of_labels_and_masks(
    image: Tensor,
    text: Tensor,
    temperature: float = 0.1,
    bias: float = -10.0,
    labels: Tensor | None = None,
    ref_labels: Tensor | None = None,
    positives: Tensor | None = None,
    partners: Tensor | None = None,
) -> Tensor:
    """The sum of all pairs divided by the number of anchors."""
    if labels is not None:
        positives = labels[:, None] == (labels if ref_labels is None else ref_labels)
    elif positives is None:
        columns = torch.arange(len(image)) if partners is None else partners
        positives = F.one_hot(columns, len(text)).bool()
    return plain(image, text, positives, temperature, bias, "cosine").sum() / len(image)


OF_LABELS = ("golden/sigmoid/labels*", "golden/sigmoid/mask*", "golden/sigmoid/*partners", "golden/sigmoid/*tower*")


@pytest.mark.usefixtures("in_this_process", "verdict_only")
def test_check_passes_the_positives_of_two_towers() -> None:
    """Also between towers of unequal length; without such parameters these cases are skipped."""
    result = check_loss(of_labels_and_masks, "sigmoid", cases=OF_LABELS)
    assert result.verdict == "conforms"
    judged = {one.case for one in result.judged}
    assert judged >= {f"golden/sigmoid/{name}" for name in ("labels", "labels-of-both", "partners", "mask")}
    assert judged >= {f"golden/sigmoid/{name}-second-tower" for name in ("longer", "shorter")}

    def wrong(image: Tensor, text: Tensor, temperature: float = 0.1, bias: float = -10.0, labels: Any = None) -> Tensor:
        return of_labels_and_masks(image, text, temperature, bias, None if labels is None else labels.flip(0))

    result = check_loss(wrong, "sigmoid", cases=OF_LABELS)
    assert [one.case for one in result.failures] == ["golden/sigmoid/labels"] * 2
    reasons = " ".join(one.message for one in result.checks if one.case == "golden/sigmoid/mask")
    assert "has no parameter positives" in reasons


@pytest.mark.usefixtures("in_this_process")
def test_identify_recognises_a_built_in_bias() -> None:
    def siglip(image: Tensor, text: Tensor, temperature: float = 0.1) -> Tensor:
        return of_labels_and_masks(image, text, temperature, -4.5)

    found = identify(siglip, bias=-4.5)
    assert (found.verdict, found.loss, found.options) == ("match", "sigmoid", {"bias": "-4.5"})


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process")
def test_identify_does_not_recognise_a_bias_that_is_not_passed() -> None:
    def siglip(image: Tensor, text: Tensor, temperature: float = 0.1) -> Tensor:
        return of_labels_and_masks(image, text, temperature, -4.5)

    assert identify(siglip).verdict == "none"


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("used", "words"),
    [
        (lambda b: b, []),
        pytest.param(lambda b: -b, ["the bias is subtracted, not added"], marks=pytest.mark.slow),
        (lambda b: 0.0, ["the bias has no effect"]),
    ],
    ids=["right", "subtracted", "ignored"],
)
@pytest.mark.quick(1)
@pytest.mark.slow
def test_identify_passes_a_bias(used: Any, words: list[str]) -> None:
    def siglip(image: Tensor, text: Tensor, temperature: float = 0.1, bias: float = -10.0) -> Tensor:
        return of_labels_and_masks(image, text, temperature, used(bias))

    found = identify(siglip)
    assert (found.loss, found.wrong) == ("sigmoid", words)
