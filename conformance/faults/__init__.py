"""Wrong implementations of every loss, each a bug that was shipped or a classic slip; the suite must catch them all.

One file for each kind of mistake. Each fault is a few lines made of the right parts in ``parts.py``, and differs from
the right loss in one thing. ``tools/fault_table.py`` writes which cases catch which fault into ``README.md``.
"""

from __future__ import annotations

from . import (
    averaging,
    denominators,
    directions,
    duplicates,
    gradients,
    layout,
    masks,
    numerics,
    queue,
    similarity,
    temperature,
)
from .base import Family, Fault
from .parts import RIGHT

FAMILIES: tuple[Family, ...] = (
    denominators.FAMILY,
    averaging.FAMILY,
    temperature.FAMILY,
    similarity.FAMILY,
    layout.FAMILY,
    masks.FAMILY,
    gradients.FAMILY,
    numerics.FAMILY,
    directions.FAMILY,
    duplicates.FAMILY,
    queue.FAMILY,
)
"""The kinds of mistakes, in the order of the table."""

FAULTS: tuple[Fault, ...] = tuple(fault for family in FAMILIES for fault in family.faults)
"""Every fault, by family and by its place in the file."""

__all__ = ["FAMILIES", "FAULTS", "RIGHT", "Family", "Fault"]
