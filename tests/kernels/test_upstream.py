"""Upstream gradients of the kernels: of any size, and those that must be ignored."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: pip install triton")

from pairproof.fast import engine, supcon_in_loss, supcon_loss
from pairproof.fast.engine import Batch, References, Rule, Targets

Tensor = torch.Tensor
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
"""Tolerances relative to a gradient's largest entry; in half precision, the weights and the result are rounded."""


def upstream_of(count: int) -> Tensor:
    """Return upstream gradients that are all different, of both signs, some of them 0."""
    return torch.where(torch.arange(count) % 5 == 4, 0.0, torch.linspace(-1, 2, count) + 0.07)


@pytest.mark.quick(6)
def test_upstream_gradients_of_any_size_are_applied(call: Any, calls: dict[str, Any]) -> None:
    """A factor of the upstream gradient is a factor of the result: exactly for powers of two, else up to rounding."""
    dtype = DTYPES[list(calls.values()).index(call) % len(DTYPES)]
    given = [matrix.to(dtype, copy=True).requires_grad_() for matrix in (call.rows, *call.others)]
    values = call.loss(*given, backend="triton", reduction="none", temperature=0.3)
    up = upstream_of(len(values))

    def gradients_of_size(size: float) -> list[Tensor]:
        return [g.float() for g in torch.autograd.grad(values, given, up * size, retain_graph=True)]

    exact = call.results(torch.float64, backend="exact", reduction="none", temperature=0.3, upstream=up)
    found = gradients_of_size(1.0)
    torch.testing.assert_close(values.detach().double(), exact[0], rtol=1e-5, atol=1e-5)
    for one, true in zip(found, exact[1:], strict=True):
        limit = ROUNDING[dtype] * float(true.abs().max()) + 1e-9
        torch.testing.assert_close(one.double(), true, rtol=0, atol=limit)
    # For float16, only sizes that it can represent.
    sizes = (2.0**-3, 2.0**4) if dtype == torch.float16 else (2.0**-60, 2.0**90)
    for size in sizes:
        for one, other in zip(gradients_of_size(size), found, strict=True):
            normal = other.abs() * size >= torch.finfo(dtype).tiny
            assert torch.equal(one[normal], (other * size)[normal])
    for size in () if dtype == torch.float16 else (1e-30, 1e30):
        for one, other in zip(gradients_of_size(size), found, strict=True):
            limit = ROUNDING[dtype] * float(other.abs().max()) + 1e-12
            torch.testing.assert_close(one / size, other, rtol=0, atol=limit)
    assert not any(bool(one.any()) for one in gradients_of_size(0.0))


LABELS = torch.where(torch.arange(35) == 17, -5, torch.arange(35) % 2 * 2**40)
SOME = torch.arange(35) != 7
RULE = Rule("out", "cosine", 0.2)
NOT_COUNTED = {
    "labels": (lambda z: supcon_loss(z, LABELS, reduction="none", backend="triton"), 17),
    "mask": (lambda z: supcon_in_loss(z, positives=LABELS[:, None] == LABELS, reduction="none", backend="triton"), 17),
    "own": (lambda z: supcon_in_loss(z, LABELS, denominator="one_positive", reduction="none", backend="triton"), 17),
    "steep": (lambda z: supcon_loss(z, LABELS, temperature=0.005, reduction="none", backend="triton"), 17),
    "anchors": (
        lambda z: engine.anchor_values(Batch(z, Targets("labels", LABELS), RULE, References(), SOME), "triton").values,
        7,
    ),
    "partners": (
        lambda z: (
            engine.anchor_values(
                Batch(z[:34], Targets("partners", torch.arange(34) ^ 1), RULE, References(), SOME[:34]), "triton"
            ).values
        ),
        7,
    ),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if number % len(DTYPES) == k else pytest.mark.slow)
        for number, name in enumerate(NOT_COUNTED)
        for k, dtype in enumerate(DTYPES)
    ],
)
def test_upstream_gradients_of_rows_that_do_not_count_are_ignored(name: str, dtype: torch.dtype) -> None:
    """They may be infinite, so they must not be multiplied by 0, and they must not determine the scale."""
    loss, row = NOT_COUNTED[name]
    leaf = torch.randn(35, 6, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    values = loss(leaf)
    assert not bool(values[row])
    ones = torch.ones_like(values)
    ones[row] = 0
    (true,) = torch.autograd.grad(values, leaf, ones, retain_graph=True)
    assert bool(true.isfinite().all())
    assert bool(true.any())
    for strange in (1e30, float("inf"), float("nan")):
        ones[row] = strange
        (found,) = torch.autograd.grad(values, leaf, ones, retain_graph=True)
        assert torch.equal(found, true), strange
