"""Wrong implementations (*faults*) of every loss. The suite catches all of them.

Each fault is a bug that was shipped or a common mistake. It is built from the correct parts in ``parts.py`` and differs
from the correct loss in one detail. ``README.md`` lists how many cases catch each fault.
"""

from __future__ import annotations

from importlib import import_module

from .base import DECLARED, Fault
from .parts import RIGHT

FAMILIES = (
    *("denominators", "averaging", "temperature", "similarity", "layout", "masks", "gradients", "numerics"),
    *("directions", "duplicates", "queue", "weights", "towers"),
)
"""The kinds of mistakes. Each has a file of this name."""

for _family in FAMILIES:
    import_module(f".{_family}", __name__)

FAULTS: tuple[Fault, ...] = tuple(sorted(DECLARED, key=lambda fault: FAMILIES.index(fault.family)))
"""Every fault, ordered by family and by position in the file."""

__all__ = ["FAMILIES", "FAULTS", "RIGHT", "Fault"]
