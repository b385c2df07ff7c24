"""A batch of one row: it has no positives and no negatives, so that the policies give its value."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pairproof import fast, reference

LABEL = torch.tensor([7])
NO_PAIRS = torch.zeros(0, 2, dtype=torch.int64)
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "supcon": ("supcon_loss", {"labels": LABEL}),
    "supcon, self pair marked": ("supcon_loss", {"positives": torch.ones(1, 1, dtype=torch.bool)}),
    "supcon, only negatives": ("supcon_loss", {"labels": LABEL, "denominator": "only_negatives", "no_negative": "nan"}),
    "supcon_in": ("supcon_in_loss", {"labels": LABEL, "denominator": "one_positive"}),
    "supcon_epsilon": ("supcon_epsilon_loss", {"labels": LABEL}),
    "supcon_epsilon, ignored": ("supcon_epsilon_loss", {"labels": LABEL, "ignored_ids": LABEL}),
    "nt_xent_pairwise": ("nt_xent_pairwise_loss", {"labels": LABEL}),
    "nt_bxent": ("nt_bxent_loss", {"positive_pairs": NO_PAIRS}),
}


def row(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor([[1.0, 2.0, 0.5]], dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.quick(6)
def test_row_without_others_has_the_value_0_and_no_gradient(name: str, similarity: str) -> None:
    function, given = CALLS[name]
    for backend in ("auto", "dense", "tiled", "exact"):
        for dtype in (torch.float64, torch.bfloat16):
            z = row(dtype)
            value = getattr(fast, function)(z, **given, similarity=similarity, backend=backend)
            (gradient,) = torch.autograd.grad(value, z, create_graph=True)
            (again,) = torch.autograd.grad(gradient.double().sum(), z)
            assert value.item() == 0, backend
            assert not gradient.any(), backend
            assert not again.any(), backend


@pytest.mark.parametrize("name", CALLS)
def test_policies_nan_and_drop_give_nan_and_no_value(name: str) -> None:
    function, given = CALLS[name]
    policy = "no_negative" if name == "nt_bxent" else "no_positive"
    for package in (fast, reference):
        loss = getattr(package, function)
        z: Any = row().detach()
        arrays = given
        if package is reference:
            arrays = {key: x.numpy() if isinstance(x, Tensor) else x for key, x in given.items()}
            z = z.numpy()
        found = loss(z, **arrays, **{policy: "nan"})
        assert math.isnan(found if package is fast else found.loss)
        if policy == "no_positive":
            found = loss(z, **arrays, no_positive="drop", reduction="none")
            assert len(found if package is fast else found.loss) == 0


def test_losses_with_partners_need_two_rows() -> None:
    for loss in (fast.nt_xent_loss, fast.hard_negative_loss, fast.dclw_loss):
        with pytest.raises(ValueError, match=r"^embeddings: expected at least 2 rows, got shape \[1, 3\]$"):
            loss(row(), torch.tensor([0]))
