"""The option ``inside_reduction`` of supcon_in: the value with the sum, its digits, and its gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pairproof import reference
from pairproof.conformance.explain import explain
from pairproof.conformance.suite.cases import Case
from pairproof.fast import SupConInLoss, supcon_in_loss
from pairproof.fast.engine import tiles_of

DENOMINATORS = ("all", "one_positive", "only_negatives")
LABELS = torch.tensor([0, 1, 0, 2, 1, 0, 1, 0, 3, 3, 1])
"""Classes of 4, 4, 1 and 2 rows."""
NUMBER = torch.tensor([3.0, 3.0, 3.0, 1.0, 3.0, 3.0, 3.0, 3.0, 1.0, 1.0, 3.0], dtype=torch.float64)
"""The number of positives of each row, or 1 if it has none."""


def rows(seed: int = 0) -> Tensor:
    return torch.randn(11, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def value(z: Tensor, **options: Any) -> Tensor:
    with tiles_of(4):
        return supcon_in_loss(z, LABELS, **{"reduction": "none", **options})


@pytest.mark.parametrize("backend", ["auto", "dense", "tiled", "exact"])
@pytest.mark.parametrize("denominator", DENOMINATORS)
@pytest.mark.parametrize("temperature", [0.5, 2e-3])
def test_sum_is_less_by_the_logarithm_of_the_number_and_has_the_same_gradient(
    backend: str, denominator: str, temperature: float
) -> None:
    gradients, values = [], []
    for inside in ("mean", "sum"):
        z = rows().requires_grad_()
        options = {"denominator": denominator, "temperature": temperature, "backend": backend}
        values.append(value(z, inside_reduction=inside, **options))
        gradients.append(torch.autograd.grad(values[-1].sum(), z)[0])
    torch.testing.assert_close(values[1], values[0] - NUMBER.log(), rtol=1e-12, atol=1e-12)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_reference_and_fast_agree(denominator: str) -> None:
    options = {"denominator": denominator, "inside_reduction": "sum", "reduction": "none", "temperature": 0.3}
    expected = reference.supcon_in_loss(rows().numpy(), LABELS.numpy(), **options).loss
    assert value(rows(), **options).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("backend", ["auto", "dense", "tiled", "exact"])
@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_small_value_keeps_its_digits(backend: str, scale: float) -> None:
    """Two classes of four at right angles: the value is log(1 + 4/3 e^-gap), about 1e-10 or e^-400."""
    centre = torch.eye(2, dtype=torch.float64).repeat_interleave(4, 0)
    gap = 20.0 * scale
    with tiles_of(4):
        found = supcon_in_loss(
            centre,
            torch.arange(8) // 4,
            temperature=1 / gap,
            inside_reduction="sum",
            reduction="none",
            backend=backend,
        )
    assert found.tolist() == pytest.approx([math.log1p(4 / 3 * math.exp(-gap))] * 8, rel=1e-9)


def test_learned_temperature_and_second_derivatives_are_those_of_the_mean() -> None:
    found = []
    for inside in ("mean", "sum"):
        z, t = rows().requires_grad_(), torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
        loss = supcon_in_loss(z, LABELS, temperature=t, inside_reduction=inside, denominator="one_positive")
        first = torch.autograd.grad(loss, (z, t), create_graph=True)
        found.append((*first, *torch.autograd.grad(first[0].square().sum() + first[1] ** 2, (z, t))))
    for mean, total in zip(*found, strict=True):
        torch.testing.assert_close(total, mean, rtol=1e-12, atol=1e-14)


def test_module_takes_and_validates_the_option() -> None:
    module = SupConInLoss(inside_reduction="sum", temperature=0.5)
    assert "inside_reduction='sum'" in repr(module)
    assert torch.equal(module(rows(), LABELS), supcon_in_loss(rows(), LABELS, temperature=0.5, inside_reduction="sum"))
    with pytest.raises(ValueError, match="inside_reduction: expected one of mean, sum, got 'max'"):
        SupConInLoss(inside_reduction="max")  # type: ignore[arg-type]


def test_explanation_shows_the_sum_without_a_divisor() -> None:
    z = rows().numpy()[:4]
    case = Case("test/inside", "supcon_in", z, {"labels": [0, 0, 0, 1]}, {"inside_reduction": "sum"})
    whole = next(line for line in explain(case) if line.startswith("-(log("))
    assert "log((" not in whole
    assert ")/3" not in whole
    assert whole.count("log(") == 3


@pytest.mark.parametrize("backend", ["auto", "dense", "tiled", "exact"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_sum_of_own_ratios_without_negatives_is_the_number_of_positives(backend, reduction) -> None:
    """Each ratio is e^s / e^s = 1; also for one anchor among others, with another class of a single row."""
    for labels in ([0] * 4, [0, 0, 0, 1]):
        z, keep = rows()[:4].requires_grad_(), torch.tensor(labels) == 0
        ignored = ~keep[None] & keep[:, None]
        options = {"inside_reduction": "sum", "denominator": "one_positive", "ignored": ignored, "anchors": keep}
        loss = supcon_in_loss(z, torch.tensor(labels), reduction=reduction, backend=backend, **options)
        torch.testing.assert_close(loss, torch.full_like(loss, -math.log(int(keep.sum()) - 1)))
        assert not torch.autograd.grad(loss.sum(), z)[0].any()
