"""Judge the kernels on golden cases, as ``pairproof verify`` does; ``--all-cases`` runs all cases instead of a subset.

The subset covers every loss, flag and option. Another test checks, without running kernels, that every kernel form
that any case launches is also launched by a case of the subset.
"""

from __future__ import annotations

from functools import cache

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install triton")

from pairproof.conformance.documents.load import load_worked
from pairproof.conformance.implementations.fast import FastTriton
from pairproof.conformance.judge.options import Selection
from pairproof.conformance.judge.results import Status
from pairproof.conformance.judge.verify import judge_case, load_cases
from pairproof.conformance.suite.cases import Case
from pairproof.conformance.suite.golden import GoldenCase
from pairproof.conformance.suite.subset import covering


@cache
def cases() -> dict[str, tuple[Case, GoldenCase | None]]:
    return {case.id: (case, golden) for case, golden in load_cases(load_worked()).items()}


@cache
def chosen() -> list[str]:
    return [case.id for case in covering(dict(cases().values()))]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case_id" in metafunc.fixturenames:
        every = metafunc.config.getoption("--all-cases", default=False)
        metafunc.parametrize("case_id", list(cases()) if every else chosen())


def test_kernels_agree_with_the_golden_case(case_id: str) -> None:
    case, golden = cases()[case_id]
    checks = judge_case(case, golden, [FastTriton({}, "cpu")], Selection())
    assert [check.dtype for check in checks] == list(FastTriton.dtypes)
    for check in checks:
        assert check.status is (Status.PASSED if case.holds_in(check.dtype) else Status.SKIPPED), (
            f"{check.case}, {check.dtype}: {check.status.value}: {check.message}; repeat: {check.repeat}"
        )
