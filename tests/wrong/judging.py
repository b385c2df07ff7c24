"""The verdict of ``pairproof check`` on a wrong implementation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pairproof.conformance.judge import check as checking
from pairproof.conformance.judge.options import DEFAULT_LEVEL, Request
from pairproof.conformance.judge.results import BAD, Check
from pairproof.conformance.judge.usages import UsageJudge
from pairproof.conformance.suite.levels import Level

from .base import Wrong

SEED = 0
"""The seed of the random batches, so that the verdict is the same in every run."""

FIRST_FILE = Path(__file__).with_name("first.json")
"""The first case that fails, by the name of a wrong implementation. ``python -m tests.wrong --write`` writes it."""


@dataclass
class Finding:
    """The result of checking one wrong implementation.

    Attributes:
        name: its name.
        argued: whether an argument says why it may conform.
        first: the first case that failed, or "" if it conforms.
    """

    name: str
    argued: bool
    first: str


class _Failed(Exception):
    """Ends a check at its first failure."""


def judged(one: Wrong, *cases: str) -> Finding:
    """Check a wrong implementation, until a case fails, which decides the verdict.

    Args:
        one: the wrong implementation. It must fail at its level, or at the default level if that is higher.
        cases: the cases; all if none is given.
    """
    level = max(Level(one.level), DEFAULT_LEVEL)
    request = Request(one.target, one.loss, level=level.value, seed=SEED, cases=cases, **one.options)
    of_case, of_usage = checking.judge_target, UsageJudge.check

    def passed(check: Check | None) -> Check | None:
        if check is not None and check.status in BAD and not checking.is_above(check, level):
            raise _Failed(check.case)
        return check

    def judge_target(*given: Any) -> Iterator[Check | None]:
        return map(passed, of_case(*given))

    def judge_usage(*given: Any) -> Check | None:
        return passed(of_usage(*given))

    with patch.object(checking, "judge_target", judge_target), patch.object(UsageJudge, "check", judge_usage):
        try:
            failures = checking.check(request, explain=0).failures_required
        except _Failed as failed:
            return Finding(one.name, bool(one.argument), str(failed))
    return Finding(one.name, bool(one.argument), failures[0].case if failures else "")


def refused(one: Wrong) -> bool:
    """Whether a check refuses a wrong implementation.

    The case that failed first in the latest full check is judged before all others. Side effects show only in calls, so
    the golden cases are called too.
    """
    known = json.loads(FIRST_FILE.read_text(encoding="utf-8")).get(one.name, "")
    first = (known, f"golden/{one.loss}/*") if known.startswith("side-effects/") else (known,)
    return bool((known and judged(one, *first).first) or judged(one).first)
