"""Any loss, case by case: ``pytest --pyargs pairproof.conformance --pairproof-target=... --pairproof-loss=...``."""

from __future__ import annotations

from pairproof.conformance.pytest_plugin import CaseCheck, parametrize


@parametrize()
def test_target(check: CaseCheck) -> None:
    """The target of the command line conforms on a case."""
    check()
