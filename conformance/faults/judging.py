"""Faults, and the right losses beside them, put through the harness on the golden cases that their claims cover."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from ..implementations.callable import External
from ..judge.options import Selection
from ..judge.results import Check, Status
from ..judge.verify import judge_case
from ..suite.golden import GoldenCase, load_golden
from .base import Fault
from .parts import RIGHT

LARGEST = 64
"""Rows up to which a case is put to the faults: what larger ones show, these show too."""

DTYPES = ("float64", "float32")

CLEARLY = 5.0
"""How many times its bound an error must be for a case to be said to catch a fault. What is nearer to its bound, and is
an error of rounding, may fall on the other side of it on another machine."""

NEAR = 8.0
"""Within this factor of that, an error of rounding may still fall on either side."""


@dataclass(frozen=True)
class Verdict:
    """What the golden cases say of one implementation.

    Attributes:
        name: of the fault, or of the right loss.
        checks: every check that was made, in the order of the cases.
        cases: the ids of the cases that were judged.
        caught: the ids of those that failed clearly in some dtype, in the order of the cases.
        near: how many cases would catch it, or not, if errors were a few times larger or smaller.
        flags: for every flag of a case that caught it, how many cases with that flag did, and how many were judged.
    """

    name: str
    checks: Sequence[Check]
    cases: tuple[str, ...]
    caught: tuple[str, ...]
    near: int
    flags: Mapping[str, tuple[int, int]]

    @property
    def telling(self) -> list[str]:
        """The flags that caught it, those first whose cases did so most often, then those of most cases."""
        return sorted(self.flags, key=lambda flag: (-self.flags[flag][0] / self.flags[flag][1], -self.flags[flag][0]))


def target_of(fault: Fault) -> External:
    """A fault as the harness takes anybody's loss, claiming to be the loss that it is not."""
    target = External(
        fault.function, loss=fault.loss, call=fault.call, arrays="torch", settings=fault.settings, limit=None
    )
    vars(target).update(name=fault.name)
    return target


@cache
def small_cases() -> tuple[GoldenCase, ...]:
    """The golden cases that are put to the faults."""
    return tuple(golden for golden in load_golden() if golden.case.n <= LARGEST)


def judge(loss: str, faults: Iterable[Fault]) -> tuple[list[Verdict], list[Verdict]]:
    """Judge faults of one loss, and the right loss under every call that the faults are called with.

    Args:
        loss: short name in the catalogue.
        faults: of this loss.

    Returns:
        The verdicts on the faults, in their order, and on the right implementations.
    """
    faults = list(faults)
    right = [
        Fault(f"{loss}, right, called with {call}", loss, call, "", "", RIGHT[loss, call], {}, "")
        for call in dict.fromkeys(fault.call for fault in faults)
    ]
    suspects = [target_of(fault) for fault in (*faults, *right)]
    found: dict[str, list[Check]] = {suspect.name: [] for suspect in suspects}
    for golden in small_cases():
        if golden.case.loss == loss:
            # One truth and one set of bounds serve everybody who is judged on a case.
            for check in judge_case(golden.case, golden, suspects, Selection(dtypes=DTYPES)):
                found[check.implementation].append(check)
            for suspect in suspects:
                suspect.outcomes.clear()
    verdicts = [_verdict(name, checks) for name, checks in found.items()]
    return verdicts[: len(faults)], verdicts[len(faults) :]


def _verdict(name: str, checks: Sequence[Check]) -> Verdict:
    made = [check for check in checks if check.status is not Status.SKIPPED]
    cases = {check.case: check.flags for check in made}
    errors = dict.fromkeys(cases, 0.0)
    for check in made:
        # A crash has no error that could be measured, and is no matter of rounding.
        error = math.inf if check.ratio is None else check.ratio
        errors[check.case] = max(errors[check.case], error)
    caught = [case for case, error in errors.items() if error >= CLEARLY]
    near = sum(1 / NEAR < error / CLEARLY < NEAR for error in errors.values())
    judged = [flag for flags in cases.values() for flag in flags]
    hits = [flag for case in caught for flag in cases[case]]
    flags = {flag: (hits.count(flag), judged.count(flag)) for flag in dict.fromkeys(hits)}
    return Verdict(name, made, tuple(cases), tuple(caught), near, MappingProxyType(flags))
