"""Tests of zero_row: a row of zeros has cosine 0 with every row, and the gradient 0.

The expected results are those of a batch in which each row of zeros points along an axis of its own, which no other row
has: the cosines are the same, and no formula of the option is needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pairproof import fast, reference
from pairproof.fast.engine import tiles_of
from pairproof.reference import scipy_losses

torch.manual_seed(0)
ROWS, REFS = torch.randn(8, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
ROWS[[2, 5]] = 0.0
REFS[1] = 0.0
LABELS, REF_LABELS = torch.tensor([0, 1, 0, 1, 0, 2, 2, 0]), torch.tensor([0, 0, 1, 2, 1])
PARTNERS = torch.tensor([4, 5, 6, 7, 0, 1, 2, 3])
ZEROS: dict[str, Any] = {"zero_row": "zero"}


def on_axes_of_their_own(*matrices: Tensor) -> list[Tensor]:
    """The matrices with a new column for each row: 1 in a row of zeros, in the column of this row, and 0 elsewhere."""
    count, before, found = sum(map(len, matrices)), 0, []
    for rows in matrices:
        more = torch.zeros((len(rows), count), dtype=rows.dtype)
        places = torch.arange(len(rows))
        more[places, before + places] = (rows == 0).all(1).to(rows.dtype)
        found.append(torch.cat([rows, more], 1))
        before += len(rows)
    return found


def value_and_gradients(
    loss: Any, targets: Tensor, matrices: list[Tensor], temperature: float, learned: bool = True, **options: Any
) -> tuple[Tensor, list[Tensor]]:
    leaves = [rows.clone().requires_grad_() for rows in matrices]
    tau = torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
    more = {"ref_embeddings": leaves[1]} if len(leaves) > 1 else {}
    with tiles_of(4):
        value = loss(leaves[0], targets, temperature=tau if learned else temperature, **more, **options)
        return value, list(torch.autograd.grad(value, [*leaves, tau] if learned else leaves))


CASES = [
    (fast.supcon_loss, LABELS, [ROWS], {}),
    (fast.supcon_loss, LABELS, [ROWS], {"denominator": "one_positive", "anchors": LABELS != 1}),
    (fast.supcon_loss, LABELS, [ROWS], {"denominator": "only_negatives", "reduction": "sum"}),
    (fast.supcon_loss, LABELS, [ROWS, REFS], {"ref_labels": REF_LABELS}),
    (fast.nt_xent_loss, PARTNERS, [ROWS], {}),
    (fast.nt_xent_loss, PARTNERS % 5, [ROWS, REFS], {"base_temperature": 0.2}),
]


@pytest.mark.parametrize("backend", ["auto", "dense", "tiled", "exact"])
@pytest.mark.parametrize(("loss", "targets", "matrices", "options"), CASES)
def test_row_of_zeros_is_a_row_orthogonal_to_all_others(
    loss: Any, targets: Tensor, matrices: list[Tensor], options: dict[str, Any], backend: str
) -> None:
    for temperature in (0.5, 0.002):
        call: dict[str, Any] = {**options, "temperature": temperature, "backend": backend}
        found, got = value_and_gradients(loss, targets, matrices, **call, **ZEROS)
        plain, of_plain = value_and_gradients(loss, targets, matrices, **call, **ZEROS, learned=False)
        torch.testing.assert_close(plain, found, rtol=1e-12, atol=1e-12)
        for one, other in zip(of_plain, got, strict=False):  # a temperature that is a number is evaluated by other code
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9 / temperature)
        expected, wanted = value_and_gradients(loss, targets, on_axes_of_their_own(*matrices), **call)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(got[-1], wanted[-1], rtol=1e-9, atol=1e-9)
        for rows, one, other in zip(matrices, got, wanted, strict=False):
            zero = (rows == 0).all(1)
            assert not one[zero].any()
            torch.testing.assert_close(one[~zero], other[~zero, :4], rtol=1e-9, atol=1e-9 / temperature)


def test_reference_and_scipy_agree_with_rows_on_axes_of_their_own() -> None:
    for name, targets in (("supcon_loss", LABELS), ("nt_xent_loss", PARTNERS)):
        (padded,) = on_axes_of_their_own(ROWS)
        expected = getattr(reference, name)(padded.tolist(), targets.tolist(), temperature=0.3).loss
        for package in (reference, scipy_losses):
            found = getattr(package, name)(ROWS.tolist(), targets.tolist(), temperature=0.3, zero_row="zero").loss
            assert found == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_rows_of_zeros_are_right_and_get_no_gradient(dtype: torch.dtype) -> None:
    z = ROWS.to(dtype).requires_grad_()
    loss = fast.supcon_loss(z, LABELS, temperature=0.5, zero_row="zero")
    expected = fast.supcon_loss(z.detach().double(), LABELS, temperature=0.5, zero_row="zero")
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0.0)
    (gradient,) = torch.autograd.grad(loss, z)
    assert bool(gradient.isfinite().all())
    assert not gradient[[2, 5]].any()


def test_second_derivative_is_finite_and_zero_at_rows_of_zeros() -> None:
    for backend in ("auto", "exact"):
        z = ROWS.clone().requires_grad_()
        (first,) = torch.autograd.grad(fast.supcon_loss(z, LABELS, backend=backend, **ZEROS), z, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), z)
        assert bool(second.isfinite().all())
        assert not second[[2, 5]].any()


def test_all_rows_zero_have_equal_logits() -> None:
    z = torch.zeros((4, 3), requires_grad=True)
    loss = fast.supcon_loss(z, torch.tensor([0, 0, 1, 1]), zero_row="zero")
    assert loss.item() == pytest.approx(np.log(3))
    assert not torch.autograd.grad(loss, z)[0].any()


def test_default_is_an_error_and_dot_ignores_the_option() -> None:
    with pytest.raises(ValueError, match="no zero row under cosine similarity, got zeros in row 2"):
        fast.supcon_loss(ROWS, LABELS)
    with pytest.raises(ValueError, match="ref_embeddings: expected no zero row"):
        fast.nt_xent_loss(ROWS[:2], torch.tensor([0, 2]), ref_embeddings=REFS)
    plain = fast.supcon_loss(ROWS, LABELS, similarity="dot", temperature=2.0)
    assert torch.equal(plain, fast.supcon_loss(ROWS, LABELS, similarity="dot", temperature=2.0, **ZEROS))


def test_values_that_are_not_read_are_nan_by_default() -> None:
    mapped = torch.func.vmap(lambda z, **kw: fast.supcon_loss(z, LABELS, **kw))
    assert bool(mapped(ROWS[None]).isnan().all())
    torch.testing.assert_close(mapped(ROWS[None], **ZEROS)[0], fast.supcon_loss(ROWS, LABELS, **ZEROS))


def test_modules_take_and_validate_the_option() -> None:
    module = fast.SupConLoss(zero_row="zero")
    assert torch.equal(module(ROWS, LABELS), fast.supcon_loss(ROWS, LABELS, **ZEROS))
    with pytest.raises(ValueError, match="zero_row: expected one of error, zero, got 'nan'"):
        fast.NTXentLoss(zero_row="nan")  # type: ignore[arg-type]
