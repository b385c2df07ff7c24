"""The direct form computes the loss of two large towers and its gradient in one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pairproof import fast
from pairproof.fast.engine import direct, plan, small, tiles_of

from .test_fast_torch import Largest

ROWS, COLUMNS, DIM = 70, 547, 6
BIASES = (-10.0, 3.0, 35.0)


def partners_of(rows: int, columns: int) -> Tensor:
    """Return the partner of each row; several rows can have the same partner."""
    return torch.arange(rows) * 5 % min(columns, 52)


def towers(
    rows: int = ROWS, columns: int = COLUMNS, dtype: torch.dtype = torch.float64, noise: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return random rows a and b. With ``noise``, the rows of a are noisy copies of their partners."""
    generator = torch.Generator().manual_seed(columns)
    a, b = (torch.randn(count, DIM, generator=generator, dtype=torch.float64) for count in (rows, columns))
    if noise:
        a = b[partners_of(rows, columns)] + noise * a
    return a.to(dtype).requires_grad_(), b.to(dtype).requires_grad_()


@pytest.fixture(autouse=True)
def _several_panels() -> Iterator[None]:
    with tiles_of(16):
        yield


def logits_of(a: Tensor, b: Tensor, temperature: Tensor) -> Tensor:
    return F.normalize(a, dim=1) @ F.normalize(b, dim=1).T / temperature


def cross_entropies(a: Tensor, b: Tensor, partners: Tensor, temperature: Tensor, bias: Tensor) -> Tensor:
    """The plain sigmoid loss."""
    logits = logits_of(a, b, temperature) + bias
    signs = -torch.ones_like(logits)
    signs[torch.arange(len(a)), partners] = 1.0
    return -F.logsigmoid(signs * logits).sum(1).mean()


def contrast(a: Tensor, b: Tensor, partners: Tensor, temperature: Tensor, bias: Tensor) -> Tensor:
    """The plain InfoNCE of the rows of a."""
    return F.cross_entropy(logits_of(a, b, temperature), partners) + 0 * bias


def sigmoid_loss(a: Tensor, b: Tensor, partners: Tensor, temperature: Tensor, bias: Tensor) -> Tensor:
    return fast.sigmoid_loss(a, b, partners=partners, temperature=temperature, bias=bias)


def info_nce_loss(a: Tensor, b: Tensor, partners: Tensor, temperature: Tensor, bias: Tensor) -> Tensor:
    options: dict[str, Any] = {"direction": "a_to_b", "no_positive": "zero"}
    return fast.info_nce_loss(a, b, partners=partners, temperature=temperature, **options) + 0 * bias


LOSSES = {"sigmoid": (sigmoid_loss, cross_entropies), "info_nce": (info_nce_loss, contrast)}
Loss = Callable[..., Tensor]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each evaluation of the direct form also computes the gradient."""
    found: list[bool] = []
    plain = direct.evaluate

    def recorded(batch: Any, *, backward: bool, **options: Any) -> Any:
        found.append(backward)
        return plain(batch, backward=backward, **options)

    monkeypatch.setattr(small.direct, "evaluate", recorded)
    return found


def step(loss: Loss, a: Tensor, b: Tensor, temperature: float, bias: float) -> list[Tensor]:
    """Return the loss and the gradients of all inputs."""
    learned = [torch.tensor(x, dtype=a.dtype, requires_grad=True) for x in (temperature, bias)]
    value = loss(a, b, partners_of(len(a), len(b)), *learned)
    return [value.detach(), *torch.autograd.grad(value, [a, b, *learned])]


@pytest.mark.parametrize(("rows", "columns"), [(ROWS, COLUMNS), (ROWS, 544), (530, 3)])
@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradients_are_those_of_plain_torch(
    name: str, noise: float, rows: int, columns: int, calls: list[bool]
) -> None:
    ours, plain = LOSSES[name]
    a, b = towers(rows, columns, noise=noise)
    for bias in BIASES:
        for temperature in (0.05, 0.7):
            found, expected = (step(loss, a, b, temperature, bias) for loss in (ours, plain))
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert calls == [True] * 6


@pytest.mark.parametrize("name", LOSSES)
def test_error_in_float32_is_small(name: str, calls: list[bool]) -> None:
    """Losses are small, so that a sum that loses the digits of its small terms fails."""
    ours, plain = LOSSES[name]
    for noise, bias in ((0.0, -10.0), (0.05, -13.0), (0.05, 2.0)):
        a, b = towers(dtype=torch.float32, noise=noise)
        truth = step(plain, a.detach().double().requires_grad_(), b.detach().double().requires_grad_(), 0.05, bias)
        found = step(ours, a, b, 0.05, bias)
        for one, other in zip(found[:3], truth[:3], strict=True):
            assert float((one - other).norm()) <= 4e-6 * float(other.norm())
    assert calls == [True] * 3


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_is_computed_only_if_an_input_requires_it(name: str, calls: list[bool]) -> None:
    ours, plain = LOSSES[name]
    a, b = towers()
    partners, numbers = partners_of(ROWS, COLUMNS), (torch.tensor(0.1).double(), torch.tensor(-4.0).double())
    with torch.no_grad():
        torch.testing.assert_close(ours(a, b, partners, *numbers), plain(a, b, partners, *numbers))
    assert calls == [False]
    for rows, columns in ((a, b.detach()), (a.detach(), b)):
        leaf = rows if rows.requires_grad else columns
        (found,), (expected,) = (
            torch.autograd.grad(loss(rows, columns, partners, *numbers), leaf) for loss in (ours, plain)
        )
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert calls == [False, True, True]


@pytest.mark.parametrize("name", LOSSES)
def test_second_backward_pass_and_second_derivative_are_right(name: str) -> None:
    ours, plain = LOSSES[name]
    a, b = towers()
    partners, numbers = partners_of(ROWS, COLUMNS), (torch.tensor(0.2).double(), torch.tensor(-4.0).double())
    value = ours(a, b, partners, *numbers)
    first, again = (torch.autograd.grad(3 * value, a, retain_graph=True)[0] for _ in range(2))
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    norms = []
    for loss in (ours, plain):
        (gradient,) = torch.autograd.grad(loss(a, b, partners, *numbers), a, create_graph=True)
        norms.append(torch.autograd.grad(gradient.square().sum(), (a, b)))
    torch.testing.assert_close(*norms, rtol=1e-8, atol=1e-14)


def test_memory_is_linear_in_the_rows(calls: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_sigmoid` has the same test of the sigmoid loss."""
    monkeypatch.setattr(plan._Forced, "rows", None)
    a, b = (torch.randn(2500, 4, generator=torch.Generator().manual_seed(k)).requires_grad_() for k in (0, 1))
    with Largest() as largest:
        fast.info_nce_loss(a, b, direction="a_to_b").backward()
    assert calls == [True]
    assert largest.entries <= 2**18


def test_logits_that_are_not_moderate_are_left_to_other_forms(calls: list[bool]) -> None:
    a, b = towers(dtype=torch.float32)
    partners = partners_of(ROWS, COLUMNS)
    for temperature, bias in ((0.01, -10.0), (0.1, -60.0), (0.1, 60.0)):
        numbers = torch.tensor(temperature), torch.tensor(bias)
        value, truth = (loss(a, b, partners, *numbers) for loss in LOSSES["sigmoid"])
        torch.testing.assert_close(value, truth, rtol=1e-5, atol=0)
    assert calls == []


def hardened(a: Tensor, b: Tensor, temperature: float, strength: float) -> Tensor:
    """The plain ranking loss with hardness weights."""
    cosines = F.normalize(a, dim=1) @ F.normalize(b, dim=1).T
    harder = (strength * cosines.detach()).fill_diagonal_(0.0)
    return F.cross_entropy(cosines / temperature + harder, torch.arange(len(a)))


@pytest.mark.parametrize("temperature", [0.1, 0.012, 0.0015])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_hardness_weights_are_constants(dtype: torch.dtype, temperature: float, calls: list[bool]) -> None:
    """At the lower temperatures, exponentials of float32 need a shift; at the lowest, those of float64 too."""
    limit = (1e-12 if dtype == torch.float64 else 2e-6) * 0.1 / temperature
    a, b = (x.detach().to(dtype).requires_grad_() for x in towers(520, 520))
    for strength in (0.5, 9.0):
        options: dict[str, Any] = {"hardness_mode": "all_negatives", "hardness_strength": strength}
        options["temperature"] = temperature
        value = fast.multiple_negatives_ranking_loss(a, b, **options)
        wide = [x.detach().double().requires_grad_() for x in (a, b)]
        truth = hardened(*wide, temperature, strength)
        found = [value.detach(), *torch.autograd.grad(value, [a, b], retain_graph=True)]
        expected = [truth.detach(), *torch.autograd.grad(truth, wide)]
        for one, other in zip(found, expected, strict=True):
            assert float((one - other).norm()) <= limit * float(other.norm())
        with torch.no_grad():
            assert float(fast.multiple_negatives_ranking_loss(a, b, **options)) == float(value)
        again = torch.autograd.grad(value, [a, b])
        torch.testing.assert_close(again, tuple(found[1:]), rtol=0, atol=0)
    assert calls == [True, False, True] * 2


def test_second_derivative_of_hardness_weights_is_that_of_other_forms() -> None:
    a, b = towers(520, 520)
    norms = []
    options: dict[str, Any] = {"hardness_mode": "in_batch_negatives", "hardness_strength": 3.0, "temperature": 0.2}
    for backend in ("auto", "exact"):
        value = fast.multiple_negatives_ranking_loss(a, b, backend=backend, **options)
        (gradient,) = torch.autograd.grad(value, a, create_graph=True)
        norms.append(torch.autograd.grad(gradient.square().sum(), (a, b)))
    torch.testing.assert_close(*norms, rtol=1e-8, atol=1e-14)
