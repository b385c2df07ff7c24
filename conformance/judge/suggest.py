"""Suggest declarations of deviations for the failures of a check, as TOML."""

from __future__ import annotations

import json
from collections.abc import Iterator

from .check import CheckResult
from .options import DEFAULT_LEVEL
from .results import BAD, Check, Status, grouped

LINK = "https://"
"""The start of a link that the user completes."""


def suggested(result: CheckResult) -> list[str]:
    """Return lines of TOML that declare the failures that affect the verdict.

    There are no lines if the formula is wrong, if one of these failures is an error or is not explained, or if an
    option explains them: ``--set`` then covers random batches too, which cannot be declared. A usage above the default
    level explains itself.
    """
    diagnosis, failed = result.diagnosis, {check.case for check in result.failures_required}
    usages = {one.case: one.message for one in result.failures_required if one.kind == "usage" and _is_extreme(one)}
    explained = {case for reason in diagnosis.reasons for case in reason.cases} | usages.keys()
    if not failed or failed - explained or any(one.ordinary or one.setting for one in diagnosis.reasons):
        return []
    # Random batches have no stable ids.
    drawn = {batch.id for batch in result.fresh}
    cases = [(reason.words, {*reason.cases} - drawn) for reason in diagnosis.reasons]
    cases += [(message, {usage}) for usage, message in usages.items()]
    return [line for words, named in cases for line in _entries(result, words, named)]


def _is_extreme(check: Check) -> bool:
    return check.status is Status.FAILED and check.level is not None and check.level > DEFAULT_LEVEL


def _entries(result: CheckResult, words: str, cases: set[str]) -> Iterator[str]:
    """Yield one table for the cases that fail in every dtype, and one per dtype for those that fail in some."""
    judged = grouped((check.case, check) for check in result.judged if check.case in cases)
    groups: dict[str, list[str]] = {}
    for case, checks in judged.items():
        failing = [check.dtype for check in checks if check.status in BAD]
        for dtype in [""] if len(failing) == len(checks) else failing:
            groups.setdefault(dtype, []).append(case)
    for dtype, named in groups.items():
        where = "" if result.request.cases else _flag(result, named, dtype)
        yield "[[tool.pairproof.deviations]]"
        yield f'loss = "{result.request.loss}"'
        yield f"flag = {json.dumps(where)}" if where else f"case = {json.dumps(named, indent=4)}"
        if dtype:
            yield f'dtype = "{dtype}"'
        yield f"reason = {json.dumps(words)}"
        yield f'link = "{LINK}"'


def _flag(result: CheckResult, cases: list[str], dtype: str) -> str:
    """Return a flag that exactly these cases have among the judged ones; "" if there is none."""
    checks = [check for check in result.judged if dtype in ("", check.dtype)]
    with_flag = grouped((flag, check.case) for check in checks for flag in check.flags)
    return next((flag for flag, found in with_flag.items() if set(found) == set(cases)), "")
