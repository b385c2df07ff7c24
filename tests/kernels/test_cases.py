"""Judge the kernels on golden cases, as ``pairproof verify`` does; ``--all-cases`` runs all cases instead of a subset.

The subset covers every loss, flag and option. Each of its cases is judged in one dtype; the other dtypes are slow.
Another test checks, without running kernels, that every kernel form that any case launches is also launched by a check
that is not slow.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install triton")

from pairproof.conformance.implementations.fast import FastTriton
from pairproof.conformance.judge.options import Selection
from pairproof.conformance.judge.results import Status
from pairproof.conformance.judge.verify import judge_case


def test_kernels_agree_with_the_golden_case(case_id: str, dtype: str, cases: dict[str, tuple[Any, Any]]) -> None:
    (check,) = judge_case(*cases[case_id], [FastTriton({}, "cpu")], Selection(dtypes=(dtype,)))
    assert (check.dtype, check.status) == (dtype, Status.PASSED), (
        f"{check.case}, {check.dtype}: {check.status.value}: {check.message}; repeat: {check.repeat}"
    )


def test_every_dtype_of_the_kernels_is_judged(quick_checks: list[tuple[str, str]]) -> None:
    assert {dtype for _, dtype in quick_checks} == set(FastTriton.dtypes)
