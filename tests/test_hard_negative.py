"""The loss of hard negatives: values computed by hand, its special cases, its floor, and every way of evaluating it."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pairproof import fast, reference
from pairproof.conformance.suite.cases import Case
from pairproof.conformance.truth.kinks import floor_is_reached
from pairproof.fast.engine import tiles_of
from pairproof.reference import scipy_losses

Z = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
BANK = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
PARTNERS = torch.tensor([3, 4, 5, 0, 1, 2])
BANK_PARTNERS, OWN = torch.tensor([1, 0, 4, 4, 2, 3]), torch.tensor([0, -1, 2, -1, -1, 1])
BACKENDS = ("auto", "dense", "tiled", "exact")
OPTIONS = [(0.5, 0.1, 1.0), (0.5, 0.0, 0.0), (1.0, 0.3, 0.0), (0.2, 0.02, 2.0), (5.0, 0.1, 0.5), (0.07, 0.1, 1.0)]
"""Temperature, tau_plus and beta; at the last temperature some masses are at their floor."""


def plain(z: Tensor, partners: Tensor, columns: Tensor, own: Tensor, t: Any, tau_plus: float, beta: float) -> Tensor:
    """The value of each row from exponentials and their means, as the papers write it."""
    s = F.normalize(z, dim=1) @ F.normalize(columns, dim=1).T / t
    place = torch.arange(s.shape[1])
    negative = (place != partners[:, None]) & (place != own[:, None])
    number = negative.sum(1).double()
    of_positive = s.gather(1, partners[:, None])[:, 0].exp()
    weights = torch.where(negative, (beta * s).exp(), 0.0)
    mean = (weights * s.exp()).sum(1) / weights.sum(1)
    mass = (number * mean - tau_plus * number * of_positive) / (1 - tau_plus)
    return -(of_positive / (of_positive + mass.maximum(number * (-1 / torch.as_tensor(t)).exp()))).log()


def test_value_of_orthogonal_negatives_is_that_computed_by_hand() -> None:
    """The exponential of a positive is e^2, that of a negative is 1: the mass is 2 (1 - 0.1 e^2) / 0.9."""
    rows = [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]
    expected = math.log1p(2 * (1 - 0.1 * math.e**2) / 0.9 / math.e**2)
    debiased_only = math.log1p(2 * math.exp(-2 - 2))  # 1 - 0.2 e^2 is negative: the floor applies
    for tau_plus, value in ((0.1, expected), (0.2, debiased_only)):
        for beta in (0.0, 1.0, 3.0):  # all negatives are equal, so that their weights have no effect
            found = reference.hard_negative_loss(rows, [2, 3, 0, 1], tau_plus=tau_plus, beta=beta)
            assert found.loss == pytest.approx(value, rel=1e-14)
            z = torch.tensor(rows)
            loss = fast.hard_negative_loss(z, torch.tensor([2, 3, 0, 1]), tau_plus=tau_plus, beta=beta)
            assert float(loss) == pytest.approx(value, rel=5e-6)


def test_weights_are_powers_of_the_exponentials_at_the_temperature() -> None:
    """The logits of the negatives are 1 and 0, that of the positive is 0; the weights with beta 2 are e^2 and 1."""
    rows, bank = [[1.0, 0.0]], [[0.0, 1.0], [1.0, 0.0], [0.0, -1.0]]
    mean = (math.exp(2 + 1) + 1) / (math.exp(2) + 1)
    options: dict[str, Any] = {"ref_embeddings": bank, "temperature": 1.0, "tau_plus": 0.0, "beta": 2.0}
    assert reference.hard_negative_loss(rows, [0], **options).loss == pytest.approx(math.log1p(2 * mean), rel=1e-14)


@pytest.mark.parametrize(("t", "tau_plus", "beta"), OPTIONS)
@pytest.mark.parametrize("referenced", [False, True])
@pytest.mark.quick(4)
def test_all_evaluations_agree_with_the_formula(t: float, tau_plus: float, beta: float, referenced: bool) -> None:
    """Values and gradients, also with respect to the references and to the temperature."""
    partners, own = (BANK_PARTNERS, OWN) if referenced else (PARTNERS, torch.arange(6))
    given: dict[str, Any] = {"self_rows": own} if referenced else {}
    options = {"tau_plus": tau_plus, "beta": beta}
    for reduction, base in (("mean", None), ("none", 0.3), ("sum", None)):
        leaves = [
            x.clone().requires_grad_()
            for x in (Z, torch.tensor(t, dtype=torch.float64), *([BANK] if referenced else []))
        ]
        each = plain(leaves[0], partners, leaves[-1] if referenced else leaves[0], own, leaves[1], tau_plus, beta)
        each = each if base is None else each * leaves[1] / base
        expected = each if reduction == "none" else getattr(each, reduction)()
        gradients = torch.autograd.grad(expected.sum(), leaves)
        more = {"reduction": reduction, "base_temperature": base, **options}
        arrays = {name: value.numpy() for name, value in given.items()}
        arrays |= {"ref_embeddings": BANK.numpy()} if referenced else {}
        for package in (reference, scipy_losses):
            found = package.hard_negative_loss(Z.numpy(), partners.numpy(), temperature=t, **arrays, **more).loss
            np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-11, atol=1e-14)
        for backend in BACKENDS:
            bank = {"ref_embeddings": leaves[2]} if referenced else {}
            with tiles_of(2):
                loss = fast.hard_negative_loss(
                    leaves[0], partners, temperature=leaves[1], backend=backend, **bank, **given, **more
                )
            torch.testing.assert_close(loss, expected, rtol=1e-11, atol=1e-13)
            for own_part, right in zip(torch.autograd.grad(loss.sum(), leaves), gradients, strict=True):
                torch.testing.assert_close(own_part, right, rtol=1e-9, atol=1e-11)


def test_without_weights_and_hidden_positives_it_is_nt_xent() -> None:
    for t, reduction in itertools.product((0.01, 0.5, 5.0), ("mean", "none")):
        options: dict[str, Any] = {"temperature": t, "reduction": reduction}
        found = fast.hard_negative_loss(Z, PARTNERS, tau_plus=0.0, beta=0.0, **options)
        torch.testing.assert_close(found, fast.nt_xent_loss(Z, PARTNERS, **options), rtol=1e-12, atol=1e-14)
        rows, partners = Z.numpy(), PARTNERS.numpy()
        same = reference.hard_negative_loss(rows, partners, tau_plus=0.0, beta=0.0, **options).loss
        np.testing.assert_allclose(same, reference.nt_xent_loss(rows, partners, **options).loss, rtol=1e-13)


def test_weight_of_a_tiny_beta_is_one() -> None:
    for beta in (1e-300, 1e-40, 1e-20):
        found = fast.hard_negative_loss(Z, PARTNERS, beta=beta)
        torch.testing.assert_close(found, fast.hard_negative_loss(Z, PARTNERS, beta=0.0), rtol=1e-13, atol=0)


def test_two_rows_have_no_negatives_and_the_loss_0() -> None:
    z = torch.tensor([[1.0, 2.0], [0.5, -1.0]], requires_grad=True)
    for beta, backend in itertools.product((0.0, 1.0), BACKENDS):
        loss = fast.hard_negative_loss(z, torch.tensor([1, 0]), beta=beta, backend=backend)  # type: ignore[arg-type]
        (gradient,) = torch.autograd.grad(loss, z)
        assert float(loss.detach()) == 0
        assert not gradient.any()
    assert reference.hard_negative_loss(z.detach().numpy(), [1, 0]).loss == 0


def test_colder_exponentials_decide_the_dtype() -> None:
    """The temperature is above 0.001, the lowest one of float32, but temperature / (1 + beta) is not."""
    rows = (torch.ones(3) + 0.02 * Z).float()
    values = [
        fast.hard_negative_loss(rows, PARTNERS, temperature=0.0012, beta=1.0, reduction="none", backend=backend)
        for backend in ("auto", "exact")
    ]
    assert torch.equal(*values)  # computed in float64, rounded once


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("beta", [0.0, 2.0])
def test_nothing_overflows_at_low_temperatures(dtype: torch.dtype, beta: float) -> None:
    """At temperature 0.01 the exponentials of (1 + beta) s are up to e^300, and the floor is e^-100."""
    z = Z.to(dtype).requires_grad_()
    wide = z.detach().double().requires_grad_()
    for tau_plus in (0.0, 0.1):
        options: dict[str, Any] = {"temperature": 0.01, "tau_plus": tau_plus, "beta": beta}
        loss, right = (fast.hard_negative_loss(rows, PARTNERS, **options) for rows in (z, wide))
        assert float(loss.detach()) == pytest.approx(float(right.detach()), rel=1e-5)
        (found,), (expected,) = torch.autograd.grad(loss, z), torch.autograd.grad(right, wide)
        # bfloat16 has 8 bits: the gradient is rounded once.
        allowed = 2.0**-8 if dtype == torch.bfloat16 else 1e-4
        assert float((found.double() - expected).norm()) <= allowed * float(expected.norm())


@pytest.mark.parametrize("backend", ["auto", pytest.param("exact", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_first_and_second_derivatives_are_those_of_the_value(backend: str) -> None:
    def loss(z: Tensor, bank: Tensor, temperature: Tensor) -> Tensor:
        options: dict[str, Any] = {"ref_embeddings": bank, "self_rows": OWN[:3], "backend": backend, "tau_plus": 0.05}
        return fast.hard_negative_loss(z, BANK_PARTNERS[:3], temperature=temperature, **options)

    leaves = [x.clone().requires_grad_() for x in (Z[:3], BANK, torch.tensor(0.7).double())]
    with tiles_of(2):
        assert torch.autograd.gradcheck(loss, leaves)
        assert torch.autograd.gradgradcheck(loss, leaves)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_reaches_the_loss_where_values_are_not_read(backend: str) -> None:
    rows = torch.stack((Z, Z.clone()))
    rows[1, 2, 0] = math.nan

    def values(z: Tensor) -> Tensor:
        return fast.hard_negative_loss(z, PARTNERS, reduction="none", backend=backend)  # type: ignore[arg-type]

    assert torch.func.vmap(values)(rows).isnan().all(1).tolist() == [False, True]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_call_equals_the_eager_one() -> None:
    compiled = torch.compile(fast.hard_negative_loss, fullgraph=True, backend="aot_eager")
    z, same = (Z.clone().requires_grad_() for _ in range(2))
    loss, expected = compiled(z, PARTNERS, beta=0.5), fast.hard_negative_loss(same, PARTNERS, beta=0.5)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, z), torch.autograd.grad(expected, same))


def test_temperature_of_a_narrow_dtype_is_not_rounded_again() -> None:
    temperature = torch.tensor(0.3, dtype=torch.bfloat16)
    found = fast.hard_negative_loss(Z.float(), PARTNERS, temperature=temperature, beta=0.7)
    expected = fast.hard_negative_loss(Z, PARTNERS, temperature=float(temperature), beta=0.7)
    assert float(found) == pytest.approx(float(expected), rel=1e-6)


def test_module_takes_and_validates_the_options() -> None:
    module = fast.HardNegativeLoss(beta=2.0, tau_plus=0.02, temperature=torch.nn.Parameter(torch.tensor(0.5)))
    assert [name for name, _ in module.named_parameters()] == ["temperature"]
    other = fast.HardNegativeLoss(beta=2.0, tau_plus=0.02, temperature=0.5)
    assert other(Z, PARTNERS) == fast.hard_negative_loss(Z, PARTNERS, beta=2.0, tau_plus=0.02)
    torch.testing.assert_close(module(Z, PARTNERS), other(Z, PARTNERS), rtol=1e-14, atol=0)
    for name, value, words in (
        ("beta", -1.0, "0 to 1e+10, got -1.0"),
        ("tau_plus", 1.0, "0 to 1, 1 excluded, got 1.0"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(f'{name}: expected a number in the range {words}')}$"):
            fast.HardNegativeLoss(**{name: value})
    with pytest.raises(ValueError, match=r"^similarity: expected one of cosine, got 'dot'$"):
        fast.HardNegativeLoss(similarity="dot")  # type: ignore[arg-type]


def test_floor_is_reached_only_where_all_negatives_are_opposite() -> None:
    """A row near the opposite has a cosine that rounds to -1, but its mass is not the floor."""
    up, down, near = [3.0, 4.0], [-6.0, -8.0], [-3.0, -4.0 + 2.0**-40]
    for rows, tau_plus, expected in (
        ([up, down, up, down], 0.0, True),
        ([up, down, up, down], 0.1, False),
        ([up, near, up, near], 0.0, False),
    ):
        case = Case("c", "hard_negative", np.array(rows), {"partners": [2, 3, 0, 1]}, {"tau_plus": tau_plus})
        assert floor_is_reached(case) is expected


def test_terms_of_the_reference_are_the_positive_and_the_mass() -> None:
    found = reference.hard_negative_loss(Z.numpy(), PARTNERS.numpy())
    assert set(found.terms.pairs) == set(enumerate(PARTNERS.tolist()))
    for (i, p), pair in found.terms.pairs.items():
        assert pair.members == tuple(j for j in range(6) if j != i)
        assert pair.log_numerator == found.terms.logits[i][p]
        mass = math.exp(pair.log_denominator) - math.exp(pair.log_numerator)
        assert pair.value == pytest.approx(math.log1p(mass / math.exp(pair.log_numerator)), rel=1e-12)
        assert pair.value == pytest.approx(-math.log(pair.numerator / pair.denominator), rel=1e-12)
