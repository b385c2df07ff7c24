"""The results of checks, and their counts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from ..suite.levels import Level

K = TypeVar("K")
T = TypeVar("T")


class Status(StrEnum):
    """The status of a check.

    - ``DEVIATES``: a failure that was declared beforehand, with a reason and a link.
    - ``FAILED``: any other failure, and a declared failure that does not occur.
    - ``ERRORED``: the implementation raised an error.
    """

    PASSED = "passed"
    FAILED = "failed"
    DEVIATES = "deviates"
    SKIPPED = "skipped"
    ERRORED = "errored"


BAD = (Status.FAILED, Status.ERRORED)


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        kind: "figure", "claim", "case" or "usage" (a way to call the target, such as under autocast).
        implementation: name of the implementation or target; the reference for figures and claims.
        loss: short name in the catalogue; "" for a claim, and for a figure that calls no loss.
        case: id of the case, figure, claim, usage or side effect.
        dtype: dtype of the inputs; "" for a figure, a claim, or a case that the implementation does not support.
        status: the status.
        message: the finding. For a failure, the first term that differs and its error.
        ratio: the largest error in units of its bound; None if no numbers were compared.
        value: the computed loss, if it is one number.
        repeat: a command that repeats the check.
        flags: names of the flags of the case.
        ulps: the largest error of the loss in units in the last place; None if no numbers were compared. These are
            units of float64 for float64 inputs, and of float32 otherwise.
        declared: names of the declared deviations that apply to this check.
        level: the level at which the check counts; set only by ``check``. A failure can count at another level than
            that of its case (see :mod:`.levels`).
        rounding: whether rounding errors alone explain the failure, at ``Level.DIGITS``; set only by ``check``.
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
    """Group (key, value) pairs by key. Keys and values keep their order."""
    groups: dict[K, list[T]] = {}
    for key, item in items:
        groups.setdefault(key, []).append(item)
    return groups


def counted(checks: Iterable[Check]) -> Counter[Status]:
    """Return the number of checks with each status."""
    return Counter(check.status for check in checks)


def plain(value: Any) -> Any:
    """Convert a non-finite number to a string, because JSON has none."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def several(count: int, noun: str) -> str:
    """Return a number with its noun, such as "1 check" or "2 checks"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def phrase(status: Status, count: int, noun: str = "") -> str:
    """Return a number of checks with their status: "1 deviates", "2 deviate" or, with a noun, "2 checks failed"."""
    number = several(count, noun) if noun else count
    return f"{number} {'deviate' if status is Status.DEVIATES and count != 1 else status}"


def tally(checks: Iterable[Check]) -> dict[str, dict[str, int]]:
    """Return the number of checks by key and by status.

    The key is "implementation/loss" for cases, and the kind for other checks.
    """
    counts: dict[str, Counter[str]] = {}
    for check in checks:
        key = f"{check.implementation}/{check.loss}" if check.kind == "case" else check.kind
        counts.setdefault(key, Counter())[check.status.value] += 1
    return {key: dict(sorted(counter.items())) for key, counter in sorted(counts.items())}


def unused(declared: Iterable[str], used: Collection[str], who: str) -> list[str]:
    """Return one message for each declared deviation that matches no check.

    Args:
        declared: names of deviations.
        used: the names of the deviations that match a check.
        who: the name of the implementation in messages.
    """
    return [f"{name}: matches no check of {who}: remove it" for name in declared if name not in used]
