"""Run with ``pytest --pyargs pairproof.conformance --pairproof-target=... --pairproof-loss=...``."""

from __future__ import annotations

from pairproof.conformance.pytest_plugin import CaseCheck, parametrize


@parametrize()
def test_target(check: CaseCheck) -> None:
    """The target is correct on one case."""
    check()
