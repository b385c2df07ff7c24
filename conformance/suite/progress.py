"""How a long run reports what it has done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

Progress = Callable[[str, int, int], None]
"""Called with the name of a step, the number of items done, and the number of all items, which is 0 if unknown."""


def unreported(what: str, done: int, total: int) -> None:
    """Report nothing."""


def tracked(what: str, items: Iterable[T], total: int, progress: Progress | None) -> Iterator[T]:
    """Yield the items of a step. An item is reported as done when the next one is requested.

    Args:
        what: the name of the step.
        items: the items.
        total: the number of items.
        progress: called before the first item and after each item; None for no reports.
    """
    report = progress or unreported
    report(what, 0, total)
    for done, item in enumerate(items, 1):
        yield item
        report(what, done, total)
