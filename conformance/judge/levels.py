"""Levels in the results of ``check``: the level of a case, and the level at which a result fails.

A result passes if it is within the bounds of its case. Any other result fails:

- at the level "digits" if it is within ``tolerances.formula_bounds``, which are wider,
- at the level "range" if a tiny epsilon inside a logarithm explains it,
- at the level of its case otherwise.

A target that computes in float32 is judged by the bounds of float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, islice, takewhile

import numpy as np

from ..diagnose.suspects import Failure, is_explained, tiny_epsilons
from ..diagnose.variants import words_of
from ..implementations.base import Deviation
from ..implementations.callable import External
from ..suite.cases import Case
from ..suite.catalogue import LOSSES, WEIGHTS
from ..suite.flags import first_untrue, strains_float32
from ..suite.golden import Flag, GoldenCase, load_flags
from ..suite.levels import Level
from ..suite.records import Bounds, Matrix, Outcome, Truth
from ..truth.baseline import plain_outcome
from ..truth.compare import compare
from ..truth.evaluate import truth
from ..truth.tolerances import bounds, formula_bounds, unit_roundoff
from .deviations import verdict
from .results import Check

__all__ = ["IN_FLOAT32", "Level", "in_float32", "level_of", "level_of_case", "reviewed"]

IN_FLOAT32 = "float64 inputs: the target computes in float32, so its results are judged by the bounds of float32"
_ROUNDS = "float64 inputs: the target rounds the {} to float32, so its results are judged by the bounds of float32"
ROUNDS_TEMPERATURE, ROUNDS_BIAS = map(_ROUNDS.format, ("temperature", "bias"))

ROUNDS_WEIGHTS = (
    "float64 inputs: the target rounds 1/|P| or the weights to float32, so its results are judged by the bounds of "
    "float32"
)

POLICIES = ("lonely-anchors", "rows-without-negatives")
"""Flags that raise the level of every case that meets their conditions, even if the case does not have the flag."""

COMPUTED = (*POLICIES, "duplicate-embeddings", "low-temperature", "tiny-norms", "huge-norms")
"""Flags that determine the level of a case without flags, such as a worked example."""

PROBES, TRIED = 3, 20
"""Number of cases that must show that a target computes in float32, and largest number of cases to try."""

NEAR = 0.01
"""A tiny epsilon explains a failure only if every value x has an error of at most NEAR * (1 + abs(x))."""

ROUNDED = 2.0**-20
"""Largest relative change of a temperature if it, or its logarithm, is stored in float32."""


def level_of(flags: Iterable[str]) -> Level:
    """Return the highest level among flags; ``Level.FORMULA`` if there are none.

    Args:
        flags: names of flags of ``fixtures/golden/flags.json``.

    Raises:
        KeyError: a flag is unknown.
    """
    return max((_known()[name].level for name in flags), default=Level.FORMULA)


def level_of_case(case: Case, golden: GoldenCase | None, dtype: str = "float64") -> Level:
    """Return the level of a case: the highest level of its own flags and of the computed flags that hold for it.

    The computed flags are ``POLICIES`` for a golden case, and ``COMPUTED`` for another case. The level is at least
    "range" for a batch of one row without a pair, where most public code is NaN, and, in dtypes other than float64, for
    a case whose exponentials leave the range of float32.
    """
    flags, computed = (golden.flags, POLICIES) if golden else ((), COMPUTED)
    found = level_of((*flags, *(flag for flag in computed if first_untrue(case, (flag,)) is None)))
    extreme = case.has_no_pair or (dtype != "float64" and strains_float32(case))
    return max(found, Level.RANGE) if extreme else found


@cache
def _known() -> Mapping[str, Flag]:
    return load_flags()


def reviewed(
    check: Check,
    case: Case,
    golden: GoldenCase | None,
    true: Truth,
    outcome: Outcome,
    target: External,
    probes: Iterable[Case],
) -> Check:
    """Compare a result beyond the derived bounds with wider bounds, and return its check with the level.

    Args:
        check: the check, judged by the derived bounds.
        case: the case.
        golden: its golden entry, if it has one.
        true: the true results.
        outcome: the results of the target.
        target: the target.
        probes: cases that show whether the target computes in float32.
    """
    level = level_of_case(case, golden, check.dtype)
    check = replace(check, level=level)
    if check.ratio is None or check.ratio <= 1:
        return check
    dtype, declared = check.dtype, [one for one in target.deviations if one.name in check.declared]
    if dtype == "float64" and in_float32(target, outcome, probes):
        dtype = "float32"
        level = level_of_case(case, golden, dtype)
        check = replace(check, level=level)
        found = compare(case, true, outcome, bounds(case, true, dtype), dtype)
        check = _judged(check, found.ratio, found.first, declared)
    if (check.ratio or 0) <= 1:
        return check
    wider = formula_bounds(bounds(case, true, dtype))
    if compare(case, true, outcome, wider, dtype).ratio <= 1:
        return replace(check, level=Level.DIGITS, rounding=True)
    if level < Level.RANGE and (guard := _tiny_epsilon(case, true, outcome, wider, dtype)):
        words, least = words_of(guard), float(guard.split()[1]) / unit_roundoff(dtype)
        note = f"{words}: failures that it explains count at the level {Level.RANGE}"
        target.notes = tuple(dict.fromkeys((*target.notes, note)))
        explained = f"{words}: it changes numbers below {least:.1g} by more than the rounding error of {dtype}"
        return replace(check, level=Level.RANGE, message=f"{check.message}; {explained}")
    return check


def _tiny_epsilon(case: Case, true: Truth, outcome: Outcome, allowed: Bounds, dtype: str) -> str:
    """Return the tiny epsilon (a *guard* in ``diagnose/variants.py``) that explains a result; "" if none does.

    Without the epsilon, the result must be within the bounds ``allowed``.
    """
    if not is_explained(case):
        return ""
    if len(outcome.values) != len(true.values) or not np.allclose(outcome.values, true.values, NEAR, NEAR):
        return ""
    found = Failure(case, outcome, true)
    for suspect in tiny_epsilons(found):
        left = (found.without(suspect, gradient=gradient) for gradient in (False, True))
        if all(compare(case, true, one, allowed, dtype).ratio <= 1 for one in left):
            return suspect.variant.guard
    return ""


def _judged(check: Check, ratio: float, difference: str, declared: Sequence[Deviation]) -> Check:
    status, message = verdict(difference, declared)
    return replace(check, status=status, message=message, ratio=ratio)


def in_float32(target: External, outcome: Outcome, probes: Iterable[Case]) -> bool:
    """Return whether a result for float64 inputs is judged as float32.

    The first call for a target evaluates the probes and stores the reason, or "", in ``target.in_float32``.
    """
    if target.in_float32 is None:
        kept = dict(target.outcomes)
        ordinary = (one for one in probes if not target.refuses(one))
        chosen = [*islice(ordinary, TRIED)]
        target.in_float32 = IN_FLOAT32 if _is_shown(_computes_in_float32(target, chosen)) else ""
        passed = target.claim.temperature is None
        rounds = _rounds(target, chosen, "temperature") if passed else _rounds_built_in(target, chosen)
        if not target.in_float32 and _is_shown(rounds):
            target.in_float32 = ROUNDS_TEMPERATURE
        if not target.in_float32 and _is_shown(_rounds(target, chosen, "bias")):
            target.in_float32 = ROUNDS_BIAS
        if not target.in_float32 and _is_shown(_rounds_weights(target, chain(chosen, ordinary))):
            target.in_float32 = ROUNDS_WEIGHTS
        target.outcomes.clear()
        target.outcomes.update(kept)
        target.notes = (*target.notes, *filter(None, [target.in_float32]))
    fits = target.in_float32 == IN_FLOAT32 and _fits_float32(target, outcome)
    return fits or target.in_float32 in (ROUNDS_TEMPERATURE, ROUNDS_BIAS, ROUNDS_WEIGHTS)


def _is_shown(verdicts: Iterable[bool]) -> bool:
    """Return whether the first ``PROBES`` verdicts are true. Nothing is evaluated after a false one."""
    return len([*islice(takewhile(bool, verdicts), PROBES)]) == PROBES


def _computes_in_float32(target: External, probes: Iterable[Case]) -> Iterator[bool]:
    """Yield for each case whether its finite values are all representable in float32.

    A case does not count if all its values have at most 8 significant bits, because such values are often representable
    by chance. The gradient is not tested: it stays in float64 if a loss only rounds its similarities to float32.
    """
    for case in probes:
        if (outcome := _evaluated(target, case)) is None:
            continue
        if not _fits_float32(target, outcome):
            yield False
        elif (np.frexp(_finite(target, outcome))[0] * 256 % 1).any():
            yield True


def _rounds(target: External, probes: Iterable[Case], option: str) -> Iterator[bool]:
    """Yield for each case whether rounding a number, such as the temperature, to float32 leaves its values unchanged.

    A number of float32 is first increased by a part that float32 loses. A case does not count if its number is 0, or if
    a number 1 % higher also changes nothing.
    """
    for case in probes if option in LOSSES[target.claim.loss].keywords else ():
        given = float(case.option(option))
        rounded = float(np.float32(given))
        given = given * (1 + 2.0**-26) if rounded == given else given
        tried = (case.with_options(**{option: x}) for x in (given, rounded, rounded * 1.01))
        if not given or None in (outcomes := [_evaluated(target, one) for one in tried]):
            continue
        values, same, other = (one.values for one in outcomes if one)
        if values != same:
            yield False
        elif values != other:
            yield True


def _rounds_built_in(target: External, probes: Iterable[Case]) -> Iterator[bool]:
    """Yield for each case whether its values are explained by one temperature close to the claimed one.

    The temperature is computed from the first case. Its relative difference from the claimed one may be at most
    ``ROUNDED``. It must explain 99 % of the largest error of each case.
    """
    used = 0.0
    for case in probes:
        if (outcome := _evaluated(target, case)) is None:
            continue
        claimed = case.temperature
        at, returned = _plain(case, claimed), np.array(outcome.values)
        slopes = (_plain(case, claimed * (1 + ROUNDED)) - at) / (claimed * ROUNDED)
        if at.shape != returned.shape or not np.isfinite([at, returned]).all() or not slopes.any():
            continue
        if not used:
            steepest = np.argmax(abs(slopes))
            used = claimed + float((returned - at)[steepest] / slopes[steepest])
        close = 0 < abs(used / claimed - 1) <= ROUNDED
        yield close and not abs(returned - _plain(case, used)).max() > abs(returned - at).max() / 100


def _rounds_weights(target: External, probes: Iterable[Case]) -> Iterator[bool]:
    """Yield for each case whether weights rounded to float32 explain its results to float64 bounds.

    A case counts if its number of rows is not a power of two, no case of this size has counted, and rounding changes
    its weights.
    """
    sizes = set[int]()
    for case in probes:
        rounded = _with_rounded_weights(case) if case.n & (case.n - 1) and case.n not in sizes else None
        if rounded is None or (outcome := _evaluated(target, case)) is None:
            continue
        true = truth(rounded)
        sizes.add(case.n)
        yield not compare(rounded, true, outcome, bounds(rounded, true, "float64"), "float64").ratio > 1


def _with_rounded_weights(case: Case) -> Case | None:
    """Return a case whose weights, or the factors 1/|P| of its positives, are rounded to float32; None if none changes.

    Factors are rounded as weights of positives, which are divided by their number.
    """
    given = {name: np.array(case.arguments[name], dtype=np.float64) for name in WEIGHTS if name in case.arguments}
    rounded = {name: weights.astype(np.float32).astype(np.float64) for name, weights in given.items()}
    if (
        not given
        and "weights_divisor" in case.entry.keywords
        and not case.others
        and case.arguments.keys() == {"labels"}
    ):
        positives = case.positives()
        given["positive_weights"] = np.ones((case.n, case.n))
        counts = np.array([max(len(positives[i]), 1) for i in range(case.n)], dtype=np.float64)[:, None]
        factors = (1 / counts).astype(np.float32).astype(np.float64)
        rounded["positive_weights"] = np.broadcast_to(factors * counts, (case.n, case.n))
    if all((rounded[name] == weights).all() for name, weights in given.items()):
        return None
    return replace(case, arguments={**case.arguments, **{name: one.tolist() for name, one in rounded.items()}})


def _plain(case: Case, temperature: float) -> Matrix:
    """Return the values of the straightforward implementation in float64 at another temperature."""
    return np.array(plain_outcome(case.with_options(temperature=temperature), "float64").values)


def _evaluated(target: External, case: Case) -> Outcome | None:
    try:
        return target.evaluate(case, "float64")
    except Exception:  # external code may raise anything
        return None


def _finite(target: External, outcome: Outcome) -> Matrix:
    """Return the finite values that a target returned: one per anchor if the harness reduces them."""
    returned = outcome.anchors.values() if outcome.anchors and target.claim.reduced_here else outcome.values
    values = np.array([*returned])
    return np.asarray(values[np.isfinite(values)])


@np.errstate(over="ignore")
def _fits_float32(target: External, outcome: Outcome) -> bool:
    values = _finite(target, outcome)
    return bool((values.astype(np.float32) == values).all())
