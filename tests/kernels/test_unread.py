"""Values are not read on a device, so bad rows are not rejected there: their results must be NaN or infinite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: pip install triton")

from pairproof import fast
from pairproof.conformance.suite.catalogue import LOSSES
from pairproof.conformance.suite.golden import load_errors
from pairproof.fast.engine import device

Tensor = torch.Tensor
BAD = 3
QUICK = ("supcon", "nt_xent", "nt_bxent")
"""Losses of the three kinds of targets."""


@pytest.fixture(autouse=True)
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable reading of values, as on a device."""
    monkeypatch.setattr(device, "may_read", lambda tensor, validate=False: validate)


def spoilt(call: Any, what: float) -> Any:
    """Return the same call with one row that contains NaN or an infinity, or only zeros."""
    rows = call.rows.clone()
    if what:
        rows[BAD, 1] = what
    else:
        rows[BAD] = 0
    return type(call)(call.loss, rows, call.others)


@pytest.mark.parametrize(
    ("what", "temperature"), [(math.nan, 0.2), pytest.param(math.inf, 0.01, marks=pytest.mark.slow), (0.0, 0.2)]
)
@pytest.mark.quick(12)
def test_bad_rows_give_nan_as_in_the_torch_engine(
    call: Any, what: float, temperature: float, request: pytest.FixtureRequest
) -> None:
    """Where a value or a gradient row of the torch engine is not finite, that of the kernels is not finite either.

    With ids, or for each pair, some values do not depend on the bad row, and are finite under "exact".
    """
    given = spoilt(call, what)
    options = {"reduction": "none", "temperature": temperature}
    found, plain = given.results(**options), given.results(backend="dense", **options)
    values, gradient = plain[0], plain[1]
    zero_is_a_row = not what and bool(values.isfinite().all())
    assert zero_is_a_row or not bool(gradient[BAD].isfinite().all())
    if any(word in request.node.callspec.id for word in ("ids", "each pair")):
        plain[0] = torch.where(plain[0].isfinite(), plain[0], given.results(backend="exact", **options)[0].float())
    for mine, other in zip(found, plain, strict=True):
        lost = ~(other if other.ndim == 1 else other.sum(1)).isfinite()
        finite = (mine if mine.ndim == 1 else mine.sum(1))[lost].isfinite()
        assert not bool(finite.any()), f"{int(finite.sum())} of {int(lost.sum())} are finite"


@pytest.mark.parametrize(
    "loss", [loss if loss in QUICK else pytest.param(loss, marks=pytest.mark.slow) for loss in LOSSES]
)
def test_error_cases_whose_values_are_not_checked_give_nan(loss: str) -> None:
    """If more than a value is wrong, they may also raise the exception of the case."""
    values = []
    for case in load_errors():
        if case.loss != loss or case.compiled != "nan":
            continue
        given = {name: torch.from_numpy(v) if hasattr(v, "shape") else v for name, v in case.arguments.items()}
        given = {name: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v for name, v in given.items()}
        try:
            values.append(getattr(fast, LOSSES[loss].function)(**given, backend="triton"))
        except case.exception:
            continue
    assert len(values) >= 4
    assert all(bool(value.isnan()) for value in values)
