"""Judge the faults, and the correct losses built from the same parts, on the golden cases."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Any

from ..implementations.callable import External
from ..judge.levels import Level, level_of
from ..judge.options import Selection
from ..judge.proofs import as_claimed
from ..judge.results import Check, Status
from ..judge.verify import judge_case
from ..suite.catalogue import LOSSES
from ..suite.golden import GoldenCase, load_golden
from .base import Fault
from .parts import RIGHT

LARGEST = 64
"""Maximum number of rows of a case; larger cases catch no further faults."""

DTYPES = ("float64", "float32")

CLEARLY = 5.0
"""A case catches a fault if the error is at least this many times its bound.

The rounding errors of another machine change the error by at most two bounds, so the fault is caught there too.
"""

FEWEST = 3
"""Minimum number of cases that must catch each fault, so that no fault depends on a single case."""

NEAR = 8.0
"""If error / bound is between ``CLEARLY / NEAR`` and ``CLEARLY * NEAR``, other bounds may change the outcome."""


@dataclass(frozen=True)
class Verdict:
    """The result of judging one implementation on the golden cases.

    Attributes:
        name: name of the fault, or of the correct loss.
        checks: the checks that were not skipped, in the order of the cases.
        cases: ids of the cases that were judged.
        caught: ids of the cases that failed clearly in some dtype, in the order of the cases.
        near: number of cases whose outcome would change if errors were ``NEAR`` times larger or smaller.
        flags: for each flag of these cases, how many cases with this flag caught it, and how many were judged.
        level: the lowest level of the cases that caught it; None if there are none.
    """

    name: str
    checks: Sequence[Check]
    cases: tuple[str, ...]
    caught: tuple[str, ...]
    near: int
    flags: Mapping[str, tuple[int, int]]
    level: Level | None

    @property
    def ranked_flags(self) -> list[str]:
        """The flags, sorted by the share of their cases that caught it, then by the number."""
        return sorted(self.flags, key=lambda flag: (-self.flags[flag][0] / self.flags[flag][1], -self.flags[flag][0]))


def target_of(fault: Fault, temperature: float | None = None) -> External:
    """Return the adapter of a fault. If ``temperature`` is given, the fault uses it in every case."""
    function = fault.function if temperature is None else partial(fault.function, temperature=temperature)
    # With explicit negatives, the default is one direction, but faults evaluate both.
    both = {"direction": "both"} if "direction" in LOSSES[fault.loss].keywords else {}
    settings = {**both, **fault.settings}
    options: dict[str, Any] = {"call": fault.call, "arrays": "torch", "settings": settings, "limit": None}
    target = External(function, loss=fault.loss, temperature=temperature, **options)
    vars(target).update(name=fault.name)
    return target


@cache
def small_cases() -> tuple[GoldenCase, ...]:
    """The golden cases that faults are judged on."""
    return tuple(golden for golden in load_golden() if golden.case.n <= LARGEST)


def judge(
    loss: str,
    faults: Iterable[Fault],
    temperature: float | None = None,
    every: int = 1,
    until_caught: Collection[str] = (),
    every_right: int = 1,
) -> tuple[list[Verdict], list[Verdict]]:
    """Judge faults of one loss, and the correct loss for every call that the faults use.

    Args:
        loss: short name in the catalogue.
        faults: faults of this loss.
        temperature: if given, all implementations use it, and each case is proved again at this temperature.
        every: 1 judges all cases, 2 every second case, and so on.
        until_caught: names of faults that are judged only until a case of their level or below catches them.
        every_right: like ``every``, for the correct implementations; of the cases that the faults are judged on.

    Returns:
        The verdicts on the faults, in their order, and on the correct implementations.
    """
    faults = list(faults)
    right = [
        Fault(f"{loss}, right, called with {call}", loss, call, "", "", RIGHT[loss, call], {}, "")
        for call in dict.fromkeys(fault.call for fault in faults)
    ]
    targets = [target_of(fault, temperature) for fault in (*faults, *right)]
    found: dict[str, list[Check]] = {target.name: [] for target in targets}
    claims = {str(target.claim.settings): target.claim for target in targets}
    levels, done = {fault.name: fault.level for fault in faults if fault.name in until_caught}, set[str]()
    names = {fault.name for fault in faults}
    for k, golden in enumerate([golden for golden in small_cases() if golden.case.loss == loss][::every]):
        here = [one for one in targets if one.name not in done and (one.name in names or k % every_right == 0)]
        # Targets with the same claim share the truth and the bounds of a case.
        for settings, claim in claims.items():
            if not (same := [one for one in here if str(one.claim.settings) == settings]):
                continue
            case, proved = (golden.case, golden) if temperature is None else as_claimed(golden.case, golden, claim)
            for check in judge_case(case, proved, same, Selection(dtypes=DTYPES)):
                found[check.implementation].append(check)
                level = levels.get(check.implementation)
                if level is not None and _error(check) >= CLEARLY and level_of(check.flags) <= level:
                    done.add(check.implementation)
        for target in targets:
            target.outcomes.clear()
    verdicts = [_verdict(name, checks) for name, checks in found.items()]
    return verdicts[: len(faults)], verdicts[len(faults) :]


def _error(check: Check) -> float:
    """The error in units of the bound; infinity for a crash."""
    if check.status is Status.SKIPPED:
        return 0.0
    return math.inf if check.ratio is None else check.ratio


def _verdict(name: str, checks: Sequence[Check]) -> Verdict:
    made = [check for check in checks if check.status is not Status.SKIPPED]
    cases = {check.case: check.flags for check in made}
    errors = dict.fromkeys(cases, 0.0)
    for check in made:
        errors[check.case] = max(errors[check.case], _error(check))
    caught = [case for case, error in errors.items() if error >= CLEARLY]
    near = sum(1 / NEAR < error / CLEARLY < NEAR for error in errors.values())
    judged = [flag for flags in cases.values() for flag in flags]
    hits = [flag for case in caught for flag in cases[case]]
    flags = {flag: (hits.count(flag), judged.count(flag)) for flag in dict.fromkeys(hits)}
    level = min((level_of(cases[case]) for case in caught), default=None)
    return Verdict(name, made, tuple(cases), tuple(caught), near, MappingProxyType(flags), level)
