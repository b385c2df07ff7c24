"""The verdict of ``pairproof check`` on a wrong implementation."""

from __future__ import annotations

from dataclasses import dataclass

from pairproof.conformance.judge.check import CONFORMS, check
from pairproof.conformance.judge.options import DEFAULT_LEVEL, Request
from pairproof.conformance.suite.levels import Level

from .base import Wrong

SEED = 0
"""The seed of the random batches, so that the verdict is the same in every run."""


@dataclass
class Finding:
    """The result of checking one wrong implementation.

    Attributes:
        name: its name.
        conforms: whether the verdict is "conforms".
        argued: whether an argument says why it may.
        caught: number of cases that failed.
        summary: the last line of ``pairproof check``.
        first: the first case that failed, or "".
    """

    name: str
    conforms: bool
    argued: bool
    caught: int
    summary: str
    first: str


def judged(one: Wrong, *cases: str) -> Finding:
    """Check a wrong implementation at the level at which it must fail, or at the default level if that is higher.

    Args:
        one: the wrong implementation.
        cases: the cases; all if none is given.
    """
    level = max(Level(one.level), DEFAULT_LEVEL).value
    result = check(Request(one.target, one.loss, level=level, seed=SEED, cases=cases, **one.options), explain=0)
    failing = list(dict.fromkeys(failure.case for failure in result.failures_required))
    conforms, first = result.verdict == CONFORMS, next(iter(failing), "")
    return Finding(one.name, conforms, bool(one.argument), len(failing), result.summary, first)
