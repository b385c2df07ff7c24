"""Wrong implementations of every loss, each a bug that was shipped or a classic slip; the suite must catch them all.

One file for each kind of mistake. Each fault is a few lines made of the right parts in ``parts.py``, and differs from
the right loss in one thing. ``tools/fault_table.py`` writes which cases catch which fault into ``README.md``.
"""

from __future__ import annotations

from importlib import import_module

from .base import DECLARED, Fault
from .parts import RIGHT

FAMILIES = (
    "denominators",
    "averaging",
    "temperature",
    "similarity",
    "layout",
    "masks",
    "gradients",
    "numerics",
    "directions",
    "duplicates",
    "queue",
)
"""The kinds of mistakes, in the order of the table: a file each."""

for _family in FAMILIES:
    import_module(f".{_family}", __name__)

FAULTS: tuple[Fault, ...] = tuple(sorted(DECLARED, key=lambda fault: FAMILIES.index(fault.family)))
"""Every fault, by family and by its place in the file."""

__all__ = ["FAMILIES", "FAULTS", "RIGHT", "Fault"]
