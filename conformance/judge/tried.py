"""Find out which claims about a target were tried: options and their values."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict

from ..implementations.base import ARRAY_OPTIONS, matters
from ..implementations.signatures import SAME_ROWS, Claim
from ..suite.cases import Case
from ..suite.catalogue import LOSSES
from .proofs import case_as_claimed
from .results import several


class Tried:
    """The values of the claimed options in the judged cases, and the cases that were too slow to prove."""

    def __init__(self, claim: Claim) -> None:
        entry = LOSSES[claim.loss]
        self._claim = claim
        self._arrays = [name for name in ARRAY_OPTIONS if name in claim.passed]
        self._values: dict[str, tuple[object, ...]] = {}
        for name in (*entry.choices, "base_temperature"):
            if name in claim.passed or name in claim.settings:
                self._values[name] = claim.values_of(name) or entry.choices.get(name, ())
        self._seen: defaultdict[str, set[object]] = defaultdict(set)
        self._slow, self._batches, self._largest = list[int](), Counter[str](), (0, 0)

    def note_skipped(self, case: Case, why: str, *, drawn: bool) -> None:
        """Note a skipped case or, if ``drawn``, a skipped random batch with the reason ``why``."""
        if drawn:
            self._batches[why] += 1
        elif self._claim.support.refuses(case):
            changed = case_as_claimed(case, self._claim, thorough=True)
            if self._claim.support.refuses(changed) is None:
                self._slow.append(case.size)

    def note(self, case: Case) -> None:
        """Note the options of a judged case that affect its result."""
        self._largest = max(self._largest, case.embeddings.shape, key=math.prod)
        given = {**case.arguments, **case.others, **case.keywords}
        for name in self._arrays:
            if given.get(name) is not None:
                self._seen[name].add(True)
        for name in self._values:
            if matters(case, name):
                self._seen[name].add(case.option(name))

    def _passing(self, name: str) -> str:
        """Name a loss that passes further negatives, if the name of a parameter says so; "" if there is none."""
        words, towers = name.lower(), LOSSES[self._claim.loss].two_towers
        matrix = "hard_negatives" if "hard" in words else "negatives" if re.search("neg|queue|bank", words) else ""
        loss = next((one for one, it in LOSSES.items() if matrix in it.matrices and it.two_towers == towers), "")
        return f" (--loss {loss} passes it)" * bool(loss)

    def missing(self) -> list[str]:
        """Return what no judged case tried.

        Returns:
            Options as ``option=value``, or only the name if the values are not listed. Then the number of skipped
            random batches by reason, the number of cases that need ``--thorough``, and the largest batch that was
            judged.
        """
        found = [f"{name}, which is never passed{self._passing(name)}" for name in sorted(self._claim.unused)]
        found += [name for name in self._arrays if name not in self._seen]
        if self._claim.queue == SAME_ROWS:
            own = "--loss multiple_negatives_ranking --set hard_negatives_scope=own_only"
            found.append(f"different negatives for each anchor ({own} passes them)")
        for name, values in self._values.items():
            found += [f"{name}={value}" for value in values if value is not None and value not in self._seen[name]]
            if not values and not self._seen[name]:
                found.append(name)
        found += [f"{count} of the random batches ({why})" for why, count in self._batches.items()]
        if self._slow:
            sizes = f"{several(len(self._slow), 'case')} of up to {max(self._slow)}^2 similarities"
            found.append(f"{sizes}, whose results take long to prove for an option that the loss fixes (--thorough)")
        if any(self._largest):
            found.append("batches larger than {} x {} (rows x columns)".format(*self._largest))
        return found
