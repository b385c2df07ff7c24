"""Embeddings that the kernels of `pairproof.fast` reject, keyword-only arguments, and values that are not checked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pairproof import fast
from pairproof.conformance.suite.catalogue import LOSSES
from pairproof.conformance.suite.golden import ErrorCase, load_errors
from pairproof.fast import (
    kernels,
    nt_bxent_loss,
    nt_xent_loss,
    nt_xent_pairwise_loss,
    supcon_epsilon_loss,
    supcon_in_loss,
    supcon_loss,
)
from pairproof.fast.engine import device, tiles_of

Tensor = torch.Tensor
ERRORS = load_errors()
Loss = Callable[..., Tensor]
Z = torch.tensor([[1.0, 2.0], [0.5, -1.0], [-2.0, 0.1], [0.3, 0.4]])
LABELLED = (supcon_loss, supcon_in_loss, supcon_epsilon_loss, nt_xent_pairwise_loss)
GOOD: dict[Loss, dict[str, Any]] = {
    **{loss: {"labels": torch.tensor([0, 0, 1, 1])} for loss in LABELLED},
    nt_xent_loss: {"partners": torch.tensor([1, 0, 3, 2])},
    nt_bxent_loss: {"positive_pairs": torch.tensor([[0, 1], [2, 3]])},
}


def refused(loss: Loss, rows: Tensor, **arguments: Any) -> str:
    with pytest.raises(ValueError, match=r'^backend="triton": ') as caught:
        loss(rows, **arguments, backend="triton")
    return str(caught.value).removeprefix('backend="triton": ')


@pytest.mark.parametrize("loss", list(GOOD))
def test_kernels_report_which_embeddings_they_reject(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every loss the error is a ValueError that names the embeddings that the kernels accept."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    expected = "it needs embeddings on a CUDA device, got cpu (TRITON_INTERPRET=1 runs the kernels on a CPU)"
    assert refused(loss, Z, **GOOD[loss]) == expected
    assert "take float32, bfloat16 and float16, not float64" in refused(loss, Z.double(), **GOOD[loss])
    assert "take at most 1024 columns, got 1025" in refused(loss, torch.ones(4, 1025), **GOOD[loss])
    on_meta = {key: value.to("meta") if isinstance(value, Tensor) else value for key, value in GOOD[loss].items()}
    assert refused(loss, Z.to("meta"), **on_meta) == "it needs embeddings on a CUDA device, got meta"


def test_missing_triton_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(kernels, "_importable", lambda: False)
    assert refused(supcon_loss, Z, **GOOD[supcon_loss]) == "triton is not installed: pip install triton"
    # The default backend does not need triton.
    assert bool(supcon_loss(Z, **GOOD[supcon_loss]).isfinite())


def test_kernels_are_chosen_only_on_request_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    given = (Z, Z.double(), Z.to(torch.float8_e4m3fn), torch.ones(4, 2000))
    assert all(kernels.refusal(rows) for rows in given)
    assert not any(kernels.chosen(rows) for rows in given)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(kernels, "_importable", lambda: True)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert kernels.refusal(Z.to(dtype)) is None
        # The interpreter is for tests, so "auto" does not choose it.
        assert not kernels.chosen(Z.to(dtype))


@pytest.mark.parametrize("loss", list(GOOD))
def test_arguments_after_the_second_are_keyword_only(loss: Loss) -> None:
    with pytest.raises(TypeError, match="positional"):
        loss(Z, *GOOD[loss].values(), None)


def test_values_are_not_read_on_the_meta_device() -> None:
    loss = supcon_loss(torch.empty(4, 2, device="meta"), torch.zeros(4, dtype=torch.int64, device="meta"))
    assert loss.shape == ()
    assert loss.device.type == "meta"


def unread(case: ErrorCase, backend: str) -> float | None:
    """Return the value of a call whose values are not checked, or None if it raises the right exception."""
    arguments = {name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for name, v in case.arguments.items()}
    try:
        return float(getattr(fast, LOSSES[case.loss].function)(**arguments, backend=backend))
    except case.exception as error:
        right = case.compiled == "nan" or str(error).startswith(f"{case.argument}:")
        return None if right else math.inf


INDICES = ("partners", "self_rows", "positive_pairs", "ignored")
"""Arguments whose values are checked in compiled graphs, but not on an accelerator."""


@pytest.mark.parametrize("backend", ["auto", "dense", "tiled", "exact"])
def test_error_cases_without_checks_of_values_give_nan_or_the_error(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "may_read", lambda tensor, validate=False: validate)
    counts = Counter[str]()
    for case in ERRORS:
        if case.compiled == "error" and case.argument in INDICES:
            continue
        with tiles_of(2):
            value = unread(case, backend)
        assert value is None or (case.compiled == "nan" and math.isnan(value)), (case.id, value)
        counts[case.compiled] += value is not None or case.compiled == "error"
    assert counts["nan"] == 107
    assert counts["error"] > 300


QUICK_INDICES = {
    "ignored-partner": "dclw",
    "partners-shared": "hard_negative",
    "positive-pairs-negative": "nt_bxent",
    "self-rows-far-too-large-of-partners": "nt_xent",
}
"""Mistakes that are found within one graph, and the loss for which ``make test`` compiles each of them."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=case.id, marks=() if QUICK_INDICES.get(case.id.split("/")[1]) == case.loss else pytest.mark.slow
        )
        for case in ERRORS
        if case.argument in INDICES and case.exception is ValueError
    ],
)
@pytest.mark.slow
def test_compiled_graph_rejects_the_same_rows(case: ErrorCase) -> None:
    """A wrong shape is found when the graph is compiled, wrong values when it runs."""
    torch._dynamo.reset()
    names = [name for name, value in case.arguments.items() if isinstance(value, np.ndarray)]
    rest = {name: value for name, value in case.arguments.items() if name not in names}

    def call(*matrices: Tensor) -> Tensor:
        return getattr(fast, LOSSES[case.loss].function)(**dict(zip(names, matrices, strict=True)), **rest)

    given = [torch.from_numpy(case.arguments[name]) for name in names]
    with pytest.raises(ValueError, match=rf"^{case.argument}: ") as caught:
        torch.compile(call, backend="eager", fullgraph=case.id.split("/")[1] in QUICK_INDICES)(*given)
    assert all(word in str(caught.value) for word in case.words)
