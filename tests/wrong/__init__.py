"""Implementations that are wrong in one regime only and right everywhere else; ``pairproof check`` must find them all.

There is one file for each regime. ``python -m tests.wrong`` checks all of them and prints those that conform.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from .base import DECLARED, Wrong

REGIMES = (
    *("sizes", "classes", "references", "masks", "options", "upstream", "gradients", "layouts", "dtypes"),
    *("effects", "recognition", "shapes", "temperatures", "values"),
    *("training", "graph", "contexts", "data", "settings"),
)
"""The kinds of situations, one file each."""

for _regime in REGIMES:
    import_module(f".{_regime}", __name__)

WRONG: tuple[Wrong, ...] = tuple(sorted(DECLARED, key=lambda one: REGIMES.index(one.regime)))
"""Every wrong implementation, ordered by regime and by position in the file."""


def _names(file: str) -> tuple[str, ...]:
    return tuple(Path(__file__).with_name(file).read_text(encoding="utf-8").split())


MISSED = _names("missed.txt")
"""The names of those that ``check`` does not find yet; ``python -m tests.wrong --write`` writes the file."""

BEFORE = _names("before.txt")
"""The names of those that conformed when they were written."""

__all__ = ["BEFORE", "MISSED", "REGIMES", "WRONG", "Wrong"]
