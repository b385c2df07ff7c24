"""The level of a case, from its flags: :class:`Level`, :func:`level_of`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

from ..suite.golden import Flag, load_flags
from ..suite.levels import Level

__all__ = ["Level", "level_of"]


def level_of(flags: Iterable[str]) -> Level:
    """Return the highest level among the flags of a case; ``Level.FORMULA`` if it has none.

    Args:
        flags: names of flags of ``fixtures/golden/flags.json``.

    Raises:
        KeyError: a flag is unknown.
    """
    return max((_known()[name].level for name in flags), default=Level.FORMULA)


@cache
def _known() -> Mapping[str, Flag]:
    return load_flags()
