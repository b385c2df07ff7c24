"""Values are not read on a device, so nothing is refused there: what cannot be computed must come out as no number."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: pip install triton")

from pairproof.fast.engine import device

Tensor = torch.Tensor
BAD = 3


@pytest.fixture(autouse=True)
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device."""
    monkeypatch.setattr(device, "may_read", lambda tensor, validate=False: validate)


def spoilt(call: Any, what: float) -> Any:
    """The same call with one row that holds a NaN or an infinity, or nothing but zeros."""
    rows = call.rows.clone()
    if what:
        rows[BAD, 1] = what
    else:
        rows[BAD] = 0
    return type(call)(call.loss, rows, call.others)


@pytest.mark.parametrize(("what", "temperature"), [(math.nan, 0.2), (math.inf, 0.01), (0.0, 0.2)])
def test_what_is_no_number_elsewhere_is_none_here(call: Any, what: float, temperature: float) -> None:
    """Each value and each row of a gradient that the plain engine cannot compute, the kernels do not invent."""
    given = spoilt(call, what)
    options = {"reduction": "none", "temperature": temperature}
    found, plain = given.results(**options), given.results(backend="dense", **options)
    values, gradient = plain[0], plain[1]
    zero_is_a_row = not what and bool(values.isfinite().all())
    assert zero_is_a_row or not bool(gradient[BAD].isfinite().all())
    for mine, other in zip(found, plain, strict=True):
        lost = ~(other if other.ndim == 1 else other.sum(1)).isfinite()
        held = (mine if mine.ndim == 1 else mine.sum(1))[lost].isfinite()
        assert not bool(held.any()), f"{int(held.sum())} of {int(lost.sum())} come out as numbers"
