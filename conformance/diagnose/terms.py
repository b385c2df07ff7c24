"""Find the values that a failing target (a loss under test) computes for each anchor and each pair."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from ..suite.cases import Case, call_reference
from ..suite.records import Expected, Outcome, Truth
from .explain import Observation, Reason
from .positives import POSITIVES, similarity_rows
from .search import Match
from .suspects import Failure, Suspect, is_explained
from .variants import Evaluation


@dataclass(frozen=True)
class Computed:
    """The values that a target computes.

    Attributes:
        words: what is wrong.
        anchors: the value of each anchor, by row. Anchors that the loss leaves out may be missing.
        pairs: (log numerator, log denominator, value) of each pair, by (anchor, column); empty for losses without
            numerators and denominators.
    """

    words: str
    anchors: Mapping[int, float]
    pairs: Mapping[tuple[int, int], tuple[float, float, float]]


def computed_terms(
    case: Case,
    dtype: str,
    outcome: Outcome,
    truth: Truth | Expected,
    reasons: Collection[Reason] = (),
    match: Match | None = None,
) -> Computed | None:
    """Return the values that a target computes for a failing case.

    Args:
        case: the case.
        dtype: the dtype in which the case fails.
        outcome: what the target returned.
        truth: the certified results.
        reasons: the reasons of a ``Diagnosis``. If there are any, only these mistakes are tried.
        match: the loss that was identified, if any.

    Returns:
        The values of a mistake that reproduces the value and the gradient. None if no mistake is found, if a value is
        not finite, or if ``is_explained(case)`` is False.
    """
    if not is_explained(case) or not case.anchors() or not all(map(math.isfinite, (*outcome.values, *truth.values))):
        return None
    evidence = Observation(case, (dtype,), outcome, truth)
    evidence.match = match
    failure = evidence.failure
    if len(failure.given) != len(failure.expected):
        return None
    own = [one for one in reasons if case.id in one.cases]
    for one in own:
        option, _, value = one.setting.partition("=")
        chosen = value in case.entry.choices.get(option, ()) and not one.also
        if chosen and evidence.has_option(one.words, option, value):
            return _of_case(one.words, replace(case, keywords={**case.keywords, option: value}))
    words = {one.words for one in own}
    for general, suspect in evidence.suspects(failure):
        if (general in words or not reasons) and failure.remaining(suspect) < math.inf:
            return _of_suspect(failure, suspect, general)
    return None


def _of_case(words: str, case: Case) -> Computed:
    terms = call_reference(case).terms
    pairs = {
        key: (float(pair.log_numerator), float(pair.log_denominator), float(pair.value))
        for key, pair in terms.pairs.items()
        if pair.members
    }
    return Computed(words, {i: float(terms.anchor_losses[i]) for i in terms.counted}, pairs)


def _of_suspect(failure: Failure, suspect: Suspect, words: str) -> Computed | None:
    variant = suspect.variant
    setting = POSITIVES[variant.positives].change(suspect.setting)
    if setting is None:
        return None
    evaluation = Evaluation(setting, suspect.temperature or failure.temperature)
    scale = failure.factor * suspect.scale
    with torch.no_grad():
        values = (evaluation.anchors(variant)[0] * scale).tolist()
    places = similarity_rows(failure.case)
    anchors = {i: values[places[i][0]] for i in failure.anchors}
    return Computed(words, anchors, dict(_pairs(failure, evaluation, suspect)))


def _pairs(
    failure: Failure, evaluation: Evaluation, suspect: Suspect
) -> Iterator[tuple[tuple[int, int], tuple[float, float, float]]]:
    variant = suspect.variant
    if not variant.in_parts or variant.by_form:
        return
    with torch.no_grad(), suppress(RuntimeError):
        pairs = evaluation.pairs_of(variant)
        above, below, cost = (
            part[0].expand(len(pairs.positive), -1) for part in (pairs.above, pairs.below, pairs.cost)
        )
        places = similarity_rows(failure.case)
        for i in failure.anchors:
            row, columns = places[i]
            for j, column in enumerate(columns):
                if pairs.positive[row, column]:
                    yield (i, j), (float(above[row, column]), float(below[row, column]), float(cost[row, column]))
