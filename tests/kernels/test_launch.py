"""How kernels are queued: every form runs, memory is linear in the rows, and old contents do not affect results."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: pip install triton")

from pairproof.conformance.implementations.fast import FastTriton
from pairproof.conformance.suite.cases import Case
from pairproof.fast import supcon_loss
from pairproof.fast.engine import device
from pairproof.fast.kernels import launch
from tools import compile_kernels as tool

ROOT = Path(__file__).resolve().parent.parent.parent

Tensor = torch.Tensor
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def test_kernels_run_in_the_interpreter() -> None:
    assert launch.interpreted()


def poisoned(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a buffer filled with NaN, or with integers that are not valid row numbers."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max - 5, dtype=dtype)


@pytest.mark.quick(6)
def test_uninitialised_memory_does_not_affect_results(
    call: Any, calls: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = DTYPES[list(calls.values()).index(call) % len(DTYPES)]
    clean = call.results(dtype, reduction="none")
    monkeypatch.setattr(launch, "empty", poisoned)
    for found, true in zip(call.results(dtype, reduction="none"), clean, strict=True):
        assert bool(true.isfinite().all())
        assert torch.equal(found, true)


def test_poisoned_buffers_hold_no_valid_numbers() -> None:
    like = torch.zeros(1)
    assert bool(poisoned((3,), like, torch.float32).isnan().all())
    assert int(poisoned((3,), like, torch.int32).min()) > 2**30


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    "name",
    [
        *("supcon_loss all", "pairs"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("supcon_in_loss one_positive", "epsilon", "queue")),
    ],
)
def test_number_of_shares_changes_only_rounding(
    name: str, calls: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results do not depend on the number of programs per panel, and two equal runs are bitwise equal."""

    def shared(most: int) -> Callable[..., Any]:
        def split(tile: Any, x: Any, y: Any) -> Any:
            panels, tiles = -(-x.count // tile.rows), -(-y.count // tile.columns)
            share = -(-tiles // min(most, tiles))
            return launch._Split(panels, share, -(-tiles // share))

        return split

    found = []
    for most in (1, 1, 2, 5):
        monkeypatch.setattr(launch, "_split", shared(most))
        found.append(calls[name].results(reduction="none", temperature=0.2))
    for first, second in zip(*found[:2], strict=True):
        assert torch.equal(first, second)
    for others in found[2:]:
        for one, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=2e-6 * float(one.abs().max()))


Queued = list[tuple[Any, dict[str, Any]]]


def of_cases(checks: Iterable[tuple[Case, str]]) -> None:
    peer = FastTriton({}, "cpu")
    for case, dtype in checks:
        if case.holds_in(dtype):
            peer.evaluate(case, dtype)


def of_calls(calls: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every call in every dtype, at moderate, low and learned temperatures, with some or all rows as anchors."""
    learned = torch.tensor(0.1, requires_grad=True)
    some = torch.arange(calls["supcon_loss all"].rows.shape[0]) % 3 != 0
    for call, dtype, temperature in itertools.product(calls.values(), DTYPES, (0.2, 0.01, learned)):
        call.results(dtype, reduction="none", temperature=temperature)
        with contextlib.suppress(TypeError, ValueError):  # losses without anchors, or with fewer rows
            call.results(dtype, reduction="none", temperature=temperature, anchors=some)
    monkeypatch.setattr(device, "tf32_allowed", lambda: True)
    for call in calls.values():
        call.results(reduction="none")


def form_of(kernel: Any, given: dict[str, Any]) -> str:
    """Return a kernel's name and the flags of its form, which the tile and the dtype of tiles do not change."""
    left_out = {"BM", "BN", "BK", "OUT", "GROUP", "GROUP_ROWS", "DIM", "WIDTH", "WIDEN"}
    left_out |= {"RAW", "PIECES", "REACH"} if "BN" in kernel.arg_names else set()
    flags = [f"{name}={given[name]}" for name in kernel.arg_names if name.isupper() and name not in left_out]
    return " ".join([kernel.fn.__name__, *flags])


@pytest.mark.parametrize("all_cases", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_kernel_form_is_run(
    all_cases: bool,
    queued: Queued,
    calls: dict[str, Any],
    cases: dict[str, tuple[Case, Any]],
    checks: dict[tuple[str, str], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The dry run queues the same kernel forms as the cases and calls of these tests."""

    def forms() -> set[str]:
        found = {form_of(kernel, given) for kernel, given in queued}
        queued.clear()
        return found

    known = set()
    for kind, dtype in tool.DTYPES.items():
        with tool.dry_run(kind, 16, 90) as noted:
            for call in tool.calls(dtype, "cpu"):
                with contextlib.suppress(ValueError):
                    call().sum().backward()
        known |= {form_of(kernel, given) for kernel, given in noted}
    of_cases((cases[name][0], dtype) for (name, dtype), quick in checks.items() if quick)
    chosen = forms()
    if all_cases:
        of_cases(itertools.product((case for case, _ in cases.values()), FastTriton.dtypes))
    else:
        of_cases((cases[name][0], dtype) for name, dtype in checks)
    every = forms()
    assert chosen == every, f"no quick check runs {', '.join(map(str, every - chosen))}"
    of_calls(calls, monkeypatch)
    found = every | forms()
    assert found <= known, f"tools/compile_kernels.py does not know {', '.join(map(str, found - known))}"
    assert known <= found, f"no test runs {', '.join(map(str, known - found))}"


def bytes_of(count: int, monkeypatch: pytest.MonkeyPatch, dim: int = 16) -> dict[str, list[int]]:
    """Return the bytes of every buffer that a step of ``count`` rows allocates, by the kind of targets."""
    place = torch.arange(count)
    allocated: list[int] = []
    right = launch.empty

    def noted(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
        memory = right(shape, like, dtype)
        allocated.append(memory.numel() * memory.element_size())
        return memory.zero_()

    monkeypatch.setattr(launch, "empty", noted)
    found: dict[str, list[int]] = {}
    mask = (place[:, None] % 7 == place % 7) if count <= 2048 else None
    calls: dict[str, dict[str, Any]] = {
        "labels": {"labels": place % 7},
        "own": {"labels": place % 7, "denominator": "one_positive"},
        "mask": {"positives": mask},
        "references": {
            "labels": place % 7,
            "ref_embeddings": torch.ones(count - 5, dim, requires_grad=True),
            "ref_labels": torch.arange(count - 5) % 7,
        },
    }
    for (name, given), dtype in itertools.product(calls.items(), DTYPES):
        given = {k: v.to(dtype) if k == "ref_embeddings" else v for k, v in given.items()}
        allocated.clear()
        z = torch.ones(count, dim, dtype=dtype, requires_grad=True)
        supcon_loss(z, **given, backend="triton", reduction="sum").backward()
        found[f"{name}, {dtype}"] = list(allocated)
    monkeypatch.setattr(launch, "empty", right)
    return found


@pytest.mark.usefixtures("queued")
def test_memory_is_linear_in_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    dim = 16
    small, middle, large = (bytes_of(count, monkeypatch, dim) for count in (256, 512, 1024))
    for name in small:
        totals = [sum(sizes[name]) for sizes in (small, middle, large)]
        assert 1.9 < totals[1] / totals[0] < 2.1, name
        assert 1.9 < totals[2] / totals[1] < 2.1, name
        # The largest buffer has partial gradients of the rows: from at most two kernels, for two shares of the columns.
        assert max(large[name]) <= 4 * (1024 + 128) * dim * 4, name


def test_rows_are_prepared_once_per_step(queued: list[tuple[Any, dict[str, Any]]]) -> None:
    """The backward pass uses the rows that the forward pass prepared, and may run twice."""
    z = torch.ones(8, 16, requires_grad=True)
    value = supcon_loss(z, torch.arange(8) % 3, backend="triton")
    value.backward(retain_graph=True)
    value.backward()
    names = [kernel.fn.__name__ for kernel, _ in queued]
    assert names.count("prepare") == 1
    assert names.count("gradient_plain") == 2
