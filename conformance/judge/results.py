"""The results of checks, and their counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from ..suite.levels import Level

K = TypeVar("K")
T = TypeVar("T")


class Status(StrEnum):
    """The verdicts; there is no vague one.

    A deviation is declared beforehand, with reason and link, and must show; a crash is ``errored``, never ``failed``.
    """

    PASSED = "passed"
    FAILED = "failed"
    DEVIATES = "deviates"
    SKIPPED = "skipped"
    ERRORED = "errored"


BAD = (Status.FAILED, Status.ERRORED)


@dataclass(frozen=True)
class Check:
    """One check done.

    Attributes:
        kind: "figure", "claim" or "case".
        implementation: who was judged; the reference for figures and claims.
        loss: short name, or "" where none is involved.
        case: id of the case, figure or claim.
        dtype: of the inputs, or "".
        status: how it ended.
        message: what was found; for a failure the first differing term and by how much.
        ratio: worst error in units of its bound, where there is one.
        value: the loss found, where there is one.
        repeat: a command that repeats the check.
        flags: why the case exists.
        ulps: worst error of the loss in units of the last place of the dtype that accumulates.
        declared: names of the declared deviations that name this check.
        level: the level at which the check counts; set only by ``check``. It is the level of the case, or
            ``Level.DIGITS`` for a failure within the bounds of the lower levels.
        rounding: whether the check is such a failure; set only by ``check``.
    """

    kind: str
    implementation: str
    loss: str
    case: str
    dtype: str
    status: Status
    message: str = ""
    ratio: float | None = None
    value: float | None = None
    repeat: str = ""
    flags: tuple[str, ...] = ()
    ulps: float | None = None
    declared: tuple[str, ...] = ()
    level: Level | None = None
    rounding: bool = False


def grouped(items: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    """The values of pairs by their keys, in the order in which they come."""
    groups: dict[K, list[T]] = {}
    for key, item in items:
        groups.setdefault(key, []).append(item)
    return groups


def counted(checks: Iterable[Check]) -> Counter[Status]:
    """How many checks ended with each status."""
    return Counter(check.status for check in checks)


def several(count: int, noun: str) -> str:
    """Return a number with its noun: "1 check", "2 checks"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def phrase(status: Status, count: int) -> str:
    """Return a number of checks with their status: "1 deviates", "2 deviate", "2 failed"."""
    return f"{count} {'deviate' if status is Status.DEVIATES and count != 1 else status}"


def tally(checks: Iterable[Check]) -> dict[str, dict[str, int]]:
    """Counts by "implementation/loss" (or by kind, for figures and claims) and status."""
    counts: dict[str, Counter[str]] = {}
    for check in checks:
        key = f"{check.implementation}/{check.loss}" if check.kind == "case" else check.kind
        counts.setdefault(key, Counter())[check.status.value] += 1
    return {key: dict(sorted(counter.items())) for key, counter in sorted(counts.items())}


def unused(declared: Iterable[str], used: Collection[str], who: str) -> list[str]:
    """Return one message for each declared deviation that matches no check.

    Args:
        declared: names of deviations.
        used: the names of those that match a check.
        who: the implementation, as messages name it.
    """
    return [f"{name}: matches no check of {who}: remove it" for name in declared if name not in used]
