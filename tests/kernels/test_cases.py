"""Judge the kernels on golden cases, as ``pairproof verify`` does; ``--all-cases`` runs all cases instead of a subset.

The subset covers every loss, flag and option. The checks that are not slow cover every kernel form and every flag, each
in one dtype. Another test checks, without running kernels, that every kernel form that any case launches is also
launched by a check that is not slow.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install triton")

from pairproof.conformance.implementations.fast import FastTriton
from pairproof.conformance.judge.options import Selection
from pairproof.conformance.judge.results import Status
from pairproof.conformance.judge.verify import judge_case
from pairproof.conformance.suite.catalogue import LOSSES


def test_kernels_agree_with_the_golden_case(case_id: str, dtype: str, cases: dict[str, tuple[Any, Any]]) -> None:
    (check,) = judge_case(*cases[case_id], [FastTriton({}, "cpu")], Selection(dtypes=(dtype,)))
    assert (check.dtype, check.status) == (dtype, Status.PASSED), (
        f"{check.case}, {check.dtype}: {check.status.value}: {check.message}; repeat: {check.repeat}"
    )


def test_every_loss_is_judged_in_every_dtype_of_the_kernels(checks: dict[tuple[str, str], bool]) -> None:
    found = {(name.split("/")[1], dtype) for (name, dtype), quick in checks.items() if quick}
    assert found == set(itertools.product(LOSSES, FastTriton.dtypes))
