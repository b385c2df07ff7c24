"""``--flush-denormal``: targets and the harness run while subnormal numbers are flushed to zero."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pairproof.conformance.implementations.reference import complex_step
from pairproof.conformance.implementations.supcontrast import row_underflows
from pairproof.conformance.suite.cases import row_norms
from pairproof.conformance.suite.golden import GoldenCase, load_golden
from pairproof.conformance.truth.compare import _ulps
from pairproof.conformance.truth.evaluate import stored_truth

TARGET = """
import torch
import torch.nn.functional as F

def loss(embeddings, labels, temperature=0.1):
    assert torch.tensor(2.0**-1000, dtype=torch.float64) * 2.0**-60 == 0, "subnormal numbers are not flushed"
    own = torch.eye(len(embeddings), dtype=torch.bool)
    rows = F.normalize(embeddings, dim=1)
    logs = (rows @ rows.T / temperature).masked_fill(own, -torch.inf).log_softmax(dim=1)
    positives = (labels[:, None] == labels) & ~own
    return (-logs.masked_fill(~positives, 0).sum(dim=1) / positives.sum(dim=1).clamp(min=1)).mean()
"""


def pairproof(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pairproof.conformance.cli", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_verify_passes_where_bounds_and_norms_are_flushed(tmp_path: Path) -> None:
    # Bounds of gradients that are 0 are flushed to 0, and the largest norms have subnormal reciprocals.
    cases = ["--case", "golden/supcon/zero-row-cosine-one-positive", "--case", "golden/supcon/near-largest-float64"]
    implementations = ["--impl", "fast,fast-dense,fast-tiled,fast-exact,reference"]
    done = pairproof("verify", "--flush-denormal", *cases, *implementations, "--json", "v.json", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "v.json").read_text())
    assert report["header"]["denormals"] == "flushed"
    repeats = [check["repeat"] for check in report["checks"] if check.get("repeat")]
    assert repeats
    assert all("--flush-denormal" in repeat for repeat in repeats)


@pytest.mark.slow
def test_check_flushes_in_the_process_of_the_target(tmp_path: Path) -> None:
    (tmp_path / "target.py").write_text(TARGET)
    case = ["--case", "golden/supcon/shape-5-by-7", "--loss", "supcon", "target.py:loss"]
    done = pairproof("check", "--flush-denormal", *case, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_pytest_flushes_in_the_process_of_the_target(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(target=TARGET)
    options = [
        "--pairproof-target",
        "target.py:loss",
        "--pairproof-loss",
        "supcon",
        "--pairproof-case",
        "golden/supcon/shape-5*",
    ]
    command = ["--pyargs", "pairproof.conformance.test_target", *options]
    assert pytester.runpytest_subprocess(*command, "--pairproof-flush-denormal").ret == 0
    kept = pytester.runpytest_subprocess(*command)
    assert kept.ret != 0, kept.stdout.str()


@pytest.mark.slow
def test_flushed_constants_do_not_stay_in_bytecode(tmp_path: Path) -> None:
    (tmp_path / "target.py").write_text("TINY = 1e-310\n")
    flushing = "from pairproof.conformance.judge.verify import flush_denormal; flush_denormal(); "
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for before, expected in ((flushing, "0.0"), ("", "1e-310")):
        command = [sys.executable, "-c", f"{before}import target; print(target.TINY)"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Flush subnormal numbers during the test, and leave no bytecode with flushed constants."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    yield
    torch.set_flush_denormal(False)


def golden_case(name: str) -> GoldenCase:
    (golden,) = (one for one in load_golden() if one.id == f"golden/{name}")
    return golden


def test_errors_of_a_loss_of_0_are_counted_where_subnormal_numbers_are_flushed(flushed: None) -> None:
    assert 1e7 < _ulps([0.0], [1e-300], "float64") < math.inf


def test_reference_has_a_gradient_for_huge_logits_where_subnormal_numbers_are_flushed(flushed: None) -> None:
    golden = golden_case("nt_bxent/huge-logits-float64-none")
    found = complex_step(golden.case)
    torch.set_flush_denormal(False)
    assert golden.expected.gradient is not None
    np.testing.assert_allclose(found["embeddings"], golden.expected.gradient, rtol=1e-12)


def test_norms_do_not_depend_on_subnormal_numbers(request: pytest.FixtureRequest) -> None:
    rows = np.array([[1.5e308, 2e307], [3.0, 4.0], [3e-300, 4e-300], [0.0, 0.0], [math.inf, 1.0], [math.nan, 1.0]])
    found = row_norms(rows)
    np.testing.assert_allclose(found, [math.hypot(*row) for row in rows.tolist()], rtol=2.0**-51)
    request.getfixturevalue("flushed")
    np.testing.assert_array_equal(row_norms(rows), found)


@pytest.mark.parametrize(
    ("case", "deviates"),
    [("mixed-norms-dot", True), ("duplicate-other-class-tau-0-01", True), ("smallest-normal-norm", False)],
)
def test_original_supcon_code_loses_a_part_of_the_sum_where_subnormal_numbers_are_flushed(
    case: str, deviates: bool, request: pytest.FixtureRequest
) -> None:
    golden = golden_case(f"supcon/{case}")
    true = stored_truth(golden.case, golden.expected)
    assert not row_underflows.applies(golden.case, "float32", true)
    request.getfixturevalue("flushed")
    assert row_underflows.applies(golden.case, "float32", true) == deviates
