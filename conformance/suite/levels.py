"""The levels of cases, from ordinary batches to cases about rounding."""

from __future__ import annotations

from enum import StrEnum


class Level(StrEnum):
    """What a case requires of an implementation. Levels are ordered, and each includes the lower ones.

    Attributes:
        FORMULA: the value and the gradient on ordinary inputs.
        POLICIES: anchors without positives or without negatives, empty sets, duplicates, layouts, label values.
        RANGE: extreme temperatures, norms and logits.
        DIGITS: results that are nearly as small as the rounding error of the dtype.
    """

    FORMULA = "formula"
    POLICIES = "policies"
    RANGE = "range"
    DIGITS = "digits"

    @property
    def rank(self) -> int:
        """The position of the level, from 0."""
        return list(Level).index(self)

    # Without these methods, levels would be compared alphabetically, as texts.
    def __lt__(self, other: str) -> bool:
        return self.rank < Level(other).rank

    def __le__(self, other: str) -> bool:
        return self.rank <= Level(other).rank

    def __gt__(self, other: str) -> bool:
        return self.rank > Level(other).rank

    def __ge__(self, other: str) -> bool:
        return self.rank >= Level(other).rank
