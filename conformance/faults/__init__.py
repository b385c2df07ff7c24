"""Wrong implementations of every loss, each a bug that was shipped or a common mistake; the suite catches them all.

There is one file for each kind of mistake. Each fault is built from the correct parts in ``parts.py`` and differs from
the correct loss in one detail. ``README.md``, written by ``tools/fault_table.py``, lists how many cases catch each
fault, and their flags.
"""

from __future__ import annotations

from importlib import import_module

from .base import DECLARED, Fault
from .parts import RIGHT

FAMILIES = (
    *("denominators", "averaging", "temperature", "similarity", "layout", "masks", "gradients", "numerics"),
    *("directions", "duplicates", "queue", "weights", "towers"),
)
"""The kinds of mistakes, one file each, in the order of the table."""

for _family in FAMILIES:
    import_module(f".{_family}", __name__)

FAULTS: tuple[Fault, ...] = tuple(sorted(DECLARED, key=lambda fault: FAMILIES.index(fault.family)))
"""Every fault, ordered by family and by position in the file."""

__all__ = ["FAMILIES", "FAULTS", "RIGHT", "Fault"]
