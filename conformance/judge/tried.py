"""Which claims about a target were tried: the options that it claims or takes, and the values that cases gave them."""

from __future__ import annotations

from collections import defaultdict

from ..implementations.base import ARRAY_OPTIONS, matters
from ..implementations.signatures import Claim
from ..suite.cases import Case
from ..suite.catalogue import LOSSES


class Tried:
    """The claimed options with the values that the judged cases gave them.

    Args:
        claim: what the target computes.
    """

    def __init__(self, claim: Claim) -> None:
        entry = LOSSES[claim.loss]
        self._arrays = [name for name in ARRAY_OPTIONS if name in claim.passed]
        self._values: dict[str, tuple[object, ...]] = {}
        for name in (*entry.choices, "base_temperature"):
            if name in claim.passed or name in claim.settings:
                self._values[name] = claim.values_of(name) or entry.choices.get(name, ())
        self._seen: defaultdict[str, set[object]] = defaultdict(set)

    def note(self, case: Case) -> None:
        """Note the options of a judged case, except those that do not affect its result."""
        given = {**case.arguments, **case.others, **case.keywords}
        for name in self._arrays:
            if given.get(name) is not None:
                self._seen[name].add(True)
        for name in self._values:
            if matters(case, name):
                self._seen[name].add(case.option(name))

    def missing(self) -> list[str]:
        """Return the claims that no judged case tried, as ``option=value``, or as the name of an array."""
        found = [name for name in self._arrays if name not in self._seen]
        for name, values in self._values.items():
            found += [f"{name}={value}" for value in values if value is not None and value not in self._seen[name]]
            if not values and not self._seen[name]:
                found.append(name)
        return found
