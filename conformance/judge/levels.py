"""Levels in the results of ``check``: the level of a case, the level of a failure, and targets that compute in float32.

A result within the derived bounds passes at every level, and so does one with at most the error of the straightforward
implementation. A result beyond these, but within ``tolerances.formula_bounds``, fails at the level "digits". Any other
result fails at the level of its case.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice

import numpy as np

from ..implementations.base import Deviation
from ..implementations.callable import External
from ..suite.cases import Case
from ..suite.flags import first_untrue
from ..suite.golden import Flag, GoldenCase, load_flags
from ..suite.levels import Level
from ..suite.records import Matrix, Outcome, Truth
from ..truth.baseline import plain_outcome
from ..truth.compare import compare
from ..truth.tolerances import FORMULA_TIMES, ROUNDING_WITHIN, bounds, formula_bounds, widened
from .deviations import verdict
from .results import Check

__all__ = ["IN_FLOAT32", "Level", "computes_in_float32", "level_of", "level_of_case", "reviewed"]

IN_FLOAT32 = "float64 inputs: the target computes in float32, so its results are judged by the bounds of float32"

POLICIES = ("lonely-anchors", "rows-without-negatives")
"""Flags that raise the level of every case in which their conditions hold, whether the case has the flag or not."""

COMPUTED = (*POLICIES, "duplicate-embeddings", "low-temperature", "tiny-norms", "huge-norms")
"""Flags whose conditions determine the level of a case that has no flags, such as a worked example."""

PROBES, TRIED = 3, 20
"""Number of cases whose results must be representable in float32, and number of cases that are tried for it."""


def level_of(flags: Iterable[str]) -> Level:
    """Return the highest level among the flags of a case; ``Level.FORMULA`` if it has none.

    Args:
        flags: names of flags of ``fixtures/golden/flags.json``.

    Raises:
        KeyError: a flag is unknown.
    """
    return max((_known()[name].level for name in flags), default=Level.FORMULA)


def level_of_case(case: Case, golden: GoldenCase | None) -> Level:
    """Return the level of a case: that of its flags, and of the flags of ``POLICIES`` or ``COMPUTED`` that hold.

    Args:
        case: the case.
        golden: its golden entry, or None for a case without flags.
    """
    flags, computed = (golden.flags, POLICIES) if golden else ((), COMPUTED)
    return level_of((*flags, *(flag for flag in computed if first_untrue(case, (flag,)) is None)))


@cache
def _known() -> Mapping[str, Flag]:
    return load_flags()


def reviewed(
    check: Check, case: Case, level: Level, true: Truth, outcome: Outcome, target: External, probes: Iterable[Case]
) -> Check:
    """Return a check with its level, after comparing a result beyond the derived bounds with the wider ones.

    Args:
        check: the check, as ``judge_case`` judges it by the derived bounds.
        case: the case.
        level: the level of the case.
        true: the true results.
        outcome: the results of the target.
        target: the target.
        probes: cases for ``computes_in_float32``.
    """
    check = replace(check, level=level)
    if check.ratio is None or check.ratio <= 1:
        return check
    dtype, declared = check.dtype, [one for one in target.deviations if one.name in check.declared]
    if dtype == "float64" and _fits_float32(outcome) and computes_in_float32(target, probes):
        dtype = "float32"
        found = compare(case, true, outcome, bounds(case, true, dtype), dtype)
        check = _judged(check, found.ratio, found.first, declared)
    # No wider bound is larger than this multiple of the derived one.
    if not 1 < (check.ratio or 0) <= FORMULA_TIMES * ROUNDING_WITHIN:
        return check
    allowed, plain = bounds(case, true, dtype), plain_outcome(case, dtype)
    if (ratio := compare(case, true, outcome, widened(allowed, true, plain), dtype).ratio) <= 1:
        return _judged(check, ratio, "", declared)
    if compare(case, true, outcome, formula_bounds(allowed, true, plain), dtype).ratio <= 1:
        return replace(check, level=Level.DIGITS, rounding=True)
    return check


def _judged(check: Check, ratio: float, difference: str, declared: Sequence[Deviation]) -> Check:
    status, message = verdict(difference, declared)
    return replace(check, status=status, message=message, ratio=ratio)


def computes_in_float32(target: External, probes: Iterable[Case]) -> bool:
    """Return whether a target computes in float32 for float64 inputs. This is decided once for each target.

    Every finite value and gradient entry must be representable in float32. At least ``PROBES`` cases must have an entry
    with more than 8 significant bits, because results with fewer bits can be representable by chance.

    Args:
        target: the target.
        probes: cases, of which the first ones that the target supports are evaluated.
    """
    if target.computes_in_float32 is None:
        target.computes_in_float32 = _computes_in_float32(target, probes)
        if target.computes_in_float32:
            target.notes = (*target.notes, IN_FLOAT32)
    return target.computes_in_float32


def _computes_in_float32(target: External, probes: Iterable[Case]) -> bool:
    kept, found = dict(target.outcomes), 0
    try:
        for case in islice((one for one in probes if not target.refuses(one)), TRIED):
            try:
                outcome = target.evaluate(case, "float64")
            except Exception:
                continue
            if not _fits_float32(outcome):
                return False
            found += bool((np.frexp(_entries(outcome))[0] * 256 % 1).any())
            if found == PROBES:
                return True
        return False
    finally:
        target.outcomes.clear()
        target.outcomes.update(kept)


def _entries(outcome: Outcome) -> Matrix:
    """The finite values and gradient entries of an outcome."""
    gradients = [] if outcome.gradient is None else [outcome.gradient, *outcome.other_gradients.values()]
    entries = np.concatenate([np.array(outcome.values), *(gradient.ravel() for gradient in gradients)])
    return np.asarray(entries[np.isfinite(entries)])


@np.errstate(over="ignore")
def _fits_float32(outcome: Outcome) -> bool:
    """Whether every finite value and gradient entry of an outcome is representable in float32."""
    entries = _entries(outcome)
    return bool((entries.astype(np.float32) == entries).all())
