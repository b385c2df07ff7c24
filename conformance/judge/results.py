"""The result of a check, and counts of results by status."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

K = TypeVar("K")
T = TypeVar("T")


class Status(StrEnum):
    """The possible results of a check.

    A deviation is declared beforehand, with a reason and a link. A declared deviation that does not occur is a failure.
    A crash is ``errored``, never ``failed``.
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
        kind: "figure", "claim" or "case".
        implementation: name of what was judged; "reference" for figures and claims.
        loss: short name; "" if no loss is involved.
        case: id of the case, figure or claim.
        dtype: dtype of the inputs, or "".
        status: the result.
        message: details; for a failure, the first term that differs and its error.
        ratio: the largest error divided by its bound; None if nothing was compared.
        value: the loss that was returned, if there is one.
        repeat: a command that repeats the check.
        flags: names of the flags of the case.
        ulps: largest error of the loss in units in the last place of the accumulating dtype.
        declared: names of the declared deviations that name this check.
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


def grouped(items: Iterable[tuple[K, T]]) -> dict[K, list[T]]:
    """Group the values of (key, value) pairs by key, in their order."""
    groups: dict[K, list[T]] = {}
    for key, item in items:
        groups.setdefault(key, []).append(item)
    return groups


def counted(checks: Iterable[Check]) -> Counter[Status]:
    """Count the checks by status."""
    return Counter(check.status for check in checks)


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
        who: name of the implementation in messages.
    """
    return [f"{name}: matches no check of {who}: remove it" for name in declared if name not in used]
