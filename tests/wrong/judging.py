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
    """

    name: str
    conforms: bool
    argued: bool
    caught: int
    summary: str


def judged(one: Wrong) -> Finding:
    """Check a wrong implementation at the level at which it must fail, or at the default level if that is higher."""
    level = max(Level(one.level), DEFAULT_LEVEL).value
    result = check(Request(one.target, one.loss, level=level, seed=SEED, **one.options), explain=0)
    cases = {failure.case for failure in result.failures_required}
    return Finding(one.name, result.verdict == CONFORMS, bool(one.argument), len(cases), result.summary)
