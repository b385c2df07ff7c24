"""The search for what explains a black box's answers: recipes, temperatures, and what a sum is divided by.

Each recipe predicts the sum over the anchors for every batch; what that is divided by or multiplied with is a factor,
found afterwards. A temperature that nobody tells is found from the ratio of the answers to two batches of one
structure, in which every such factor cancels: the ratio is scanned over the logarithm of the temperature, and its
crossings are refined. Whatever passes is then held to all other batches, the gradient included.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq

from ..implementations.callable import Answer, Batch
from ..implementations.sandbox import TargetError
from .asking import Asked, Question
from .hypotheses import Base, bases
from .positives import Setting, read
from .questions import QUESTIONS, Questions
from .variants import COUNTS, FLOWS, Count, Evaluation, Recipe, reduce_anchors, temperings, variations

Tensor = torch.Tensor

CLOSE = 1e-6
"""Relative difference up to which a value or a gradient in float64 is taken for equal."""

CLOSE_SINGLE = 2e-5
"""The same where the target answers in float32."""

EXACT = 1e-10
"""Relative difference above which an explanation that is close is not the whole truth, in float64."""

CLEARLY = 1e3
"""How many times closer one explanation must be than another that is close too, to be preferred for it alone."""

GRID = torch.logspace(-3, 2, 80, dtype=torch.float64) * 1.0001
"""Temperatures at which crossings are looked for; none of them is one that people write."""

PASSED = (0.5, 0.2)
"""Temperatures that a target is asked with which takes one."""

NEAR = 0.05
"""How far the answers may be from a candidate's values, interpolated between two temperatures of the grid."""

POWERS = (0, 1, -1, 2, -2)
"""Of the temperature, which a factor may be a multiple of."""

ANOTHER = (0.5, 2.0)
"""Shares of a temperature that was found, at which the answers must not be explained as well."""

REFINED = 40
"""How many crossings are refined: the most promising ones."""

SHORTLIST = 400
"""How many candidates at temperatures that are passed are held to more than two batches."""


@dataclass(frozen=True)
class Match:
    """An explanation, held to every ordinary question.

    Attributes:
        base: the loss of the catalogue that it is, or comes from.
        recipe: its parts.
        temperatures: the temperature found for each that was passed, or for None.
        count: what the sum over the anchors is divided by.
        factor: what it is multiplied with, for each temperature that was passed.
        error: the largest relative difference of a value.
        gradient_error: the largest relative difference of a gradient; None where there is none.
        worst: the question of ``error``, the value expected there, and the value got.
        distance: of all values from the answers, relative to the answers.
        vector: whether it gives one value per anchor.
    """

    base: Base
    recipe: Recipe
    temperatures: Mapping[float | None, float]
    count: Count
    factor: Mapping[float | None, float]
    error: float
    worst: tuple[str, float, float]
    distance: float = math.inf
    gradient_error: float | None = None
    vector: bool = False
    gradient_factor: float = 1.0

    def predict(self, question: Question, policy: str = "zero", rows: Tensor | None = None) -> Tensor | None:
        """The value, or one per anchor, or None where the batch cannot be read so or the factor is not known there."""
        setting = read(question.batch, self.recipe.reading, rows)
        if setting is None:
            return None
        at = question.temperature
        temperature = self.temperature_for(at)
        each = Evaluation(setting, torch.tensor([temperature], dtype=torch.float64)).anchors(self.recipe)[0]
        reduction = "none" if self.vector else self.count.name
        factor = self.factor_for(at)
        return None if factor is None else reduce_anchors(setting, each, reduction, policy) * factor

    def temperature_for(self, passed: float | None) -> float:
        """The effective temperature where this one is passed, which may be another than those tried."""
        if passed in self.temperatures:
            return self.temperatures[passed]
        assert passed is not None
        found = {key: value for key, value in self.temperatures.items() if key is not None}
        if all(abs(value - key) <= 1e-12 * key for key, value in found.items()):
            return passed
        return next(iter(found.values()))

    def factor_for(self, passed: float | None) -> float | None:
        """The factor where this temperature is passed; None where those known are no multiples of a power of it."""
        if passed in self.factor:
            return self.factor[passed]
        assert passed is not None
        (first, one), (second, two) = list(self.factor.items())[:2]
        assert first is not None
        assert second is not None
        for power in POWERS:
            if abs(one * second**power - two * first**power) <= 1e-9 * abs(one * second**power):
                return one * (passed / first) ** power
        return None


@dataclass(frozen=True, eq=False)
class Candidate:
    """A recipe that may explain the answers, and the loss that it comes from."""

    base: Base
    recipe: Recipe

    @property
    def rank(self) -> int:
        """How many parts of it are wrong."""
        return len(self.recipe.words())


class Search:
    """The answers of one target, and the recipes held against them."""

    def __init__(self, target: Asked) -> None:
        self.target = target
        self.passed: tuple[float | None, ...] = PASSED if target.passes else (None,)
        self.answers: dict[tuple[str, float | None], Answer] = {}
        self.broken: dict[str, str] = {}
        self.steep: list[Question] = []
        self.undetermined: list[Match] = []
        self.questions = self._choose()
        self.single = all(answer.single for answer in self.answers.values())
        self.close = CLOSE_SINGLE if self.single else CLOSE
        self._settings: dict[tuple[str, str], Setting | None] = {}

    def _choose(self) -> Questions:
        """The first questions that the target can be asked, and their answers."""
        failures = []
        for questions in QUESTIONS[self.target.call]():
            try:
                for passed in self.passed:
                    for batch in questions.alike:
                        self._put(Question(batch, passed))
            except TargetError as error:
                failures.append(str(error))
                continue
            for batch in (*questions.further, *questions.edges):
                for passed in self.passed:
                    try:
                        self._put(Question(batch, passed))
                    except TargetError as error:
                        self.broken[batch.name] = str(error)
                        break
            return questions
        raise TargetError(f"it cannot be asked: {'; '.join(dict.fromkeys(failures))}")

    def _put(self, question: Question) -> Answer:
        answer = self.target.ask(question)
        self.answers[question.batch.name, question.temperature] = answer
        return answer

    def answered(self, batches: Iterable[Batch]) -> list[Question]:
        """Those of the questions that were answered."""
        return [Question(b, t) for b in batches for t in self.passed if (b.name, t) in self.answers]

    @property
    def ordinary(self) -> list[Question]:
        """Every ordinary question that was answered."""
        return self.answered((*self.questions.alike, *self.questions.further))

    def answer(self, question: Question) -> Answer:
        """What the target said."""
        return self.answers[question.batch.name, question.temperature]

    def setting(self, batch: Batch, reading: str) -> Setting | None:
        """The batch as a reading sees it, made once."""
        key = (batch.name, reading)
        if key not in self._settings:
            self._settings[key] = read(batch, reading)
        return self._settings[key]

    def totals(self, candidates: Sequence[Candidate], batch: Batch, temperatures: Tensor) -> np.ndarray[Any, Any]:
        """[C, T], the sum over the anchors as each candidate predicts it; NaN where it cannot."""
        found = np.full((len(candidates), len(temperatures)), np.nan)
        evaluations: dict[str, Evaluation | None] = {}
        with torch.no_grad():
            for k, candidate in enumerate(candidates):
                reading = candidate.recipe.reading
                if reading not in evaluations:
                    setting = self.setting(batch, reading)
                    evaluations[reading] = None if setting is None else Evaluation(setting, temperatures)
                evaluation = evaluations[reading]
                if evaluation is not None:
                    found[k] = evaluation.anchors(candidate.recipe).sum(dim=1).numpy()
        return found

    # Temperatures

    def crossings(self, candidates: Sequence[Candidate], passed: float | None) -> list[tuple[float, int, float, float]]:
        """Where candidates may explain the answers: (how far off, candidate, from temperature, to temperature).

        The batches are of one structure, so any factor cancels from V_a t_b - V_b t_a. That is followed over the grid
        for the two batches that differ most; at its crossings the others must be near, too.
        """
        batches = self.questions.alike
        given = np.array([self.answers[b.name, passed].total for b in batches])
        if not np.isfinite(given).all() or not given.any():
            return []
        ends = np.stack([self.totals(candidates, batch, GRID) for batch in (batches[0], batches[-1])])
        with np.errstate(all="ignore"):
            scale = np.abs(ends).max(axis=0) * np.abs(given).max()
            first = (ends[0] * given[-1] - ends[1] * given[0]) / scale
            finite = np.isfinite(first)
            places = (np.sign(first[:, :-1]) * np.sign(first[:, 1:]) <= 0) & finite[:, :-1] & finite[:, 1:]
        kept = [int(k) for k in np.flatnonzero(places.any(axis=1))]
        if not kept:
            return []
        chosen = [candidates[k] for k in kept]
        inner = [self.totals(chosen, batch, GRID) for batch in batches[1:-1]]
        values = np.stack([ends[0][kept], *inner, ends[1][kept]])
        found = []
        for at, j in zip(*np.nonzero(places[kept]), strict=True):
            k = kept[at]
            span = first[k, j + 1] - first[k, j]
            share = 0.0 if span == 0 else -first[k, j] / span
            if not np.isfinite(values[:, at, j : j + 2]).all():
                continue
            here = values[:, at, j] + share * (values[:, at, j + 1] - values[:, at, j])
            away = disproportion(here, given)
            if away < NEAR:
                found.append((away, k, float(GRID[j]), float(GRID[j + 1])))
        return sorted(found, key=lambda item: (item[0] * (1 + candidates[item[1]].rank), item[1]))

    def refine(self, candidate: Candidate, passed: float | None, low: float, high: float) -> float | None:
        """The temperature in between at which the candidate's ratio of two answers is the target's."""
        a, b = self.questions.alike[0], self.questions.alike[-1]
        at, bt = self.answers[a.name, passed].total, self.answers[b.name, passed].total

        def off(logarithm: float) -> float:
            temperature = torch.tensor([math.exp(logarithm)], dtype=torch.float64)
            one = float(self.totals([candidate], a, temperature)[0, 0])
            two = float(self.totals([candidate], b, temperature)[0, 0])
            return (one * bt - two * at) / max(abs(one * bt) + abs(two * at), 1e-300)

        try:
            found: float = brentq(off, math.log(low) - 1e-9, math.log(high) + 1e-9, xtol=1e-15, rtol=1e-14)
            return math.exp(float(found))
        except (ValueError, RuntimeError):
            return None

    # Explanations

    def explain(self, candidate: Candidate, temperatures: Mapping[float | None, float]) -> Match | None:
        """The candidate at these temperatures held to every ordinary question, with the factor that fits best."""
        found: dict[float | None, list[tuple[Question, Setting, float, float]]] = {p: [] for p in self.passed}
        for question in self.ordinary:
            setting = self.setting(question.batch, candidate.recipe.reading)
            if setting is None:
                continue
            passed = question.temperature
            at = torch.tensor([temperatures[passed]], dtype=torch.float64)
            value = float(self.totals([candidate], question.batch, at)[0, 0])
            found[passed].append((question, setting, value, self.answer(question).total))
        vector = any(len(self.answer(q).values) > 1 for q in self.ordinary)
        best: Match | None = None
        for count in self._counts(candidate.recipe):
            match = self._held(candidate, temperatures, count, found, vector)
            if match is not None and (best is None or _better(match, best, self.close)):
                best = match
        return best

    def _counts(self, recipe: Recipe) -> list[Count]:
        counts = list(COUNTS.values())
        return [c for c in counts if c.name == "sum"] if recipe.form == "pooled" else counts

    def _held(
        self,
        candidate: Candidate,
        temperatures: Mapping[float | None, float],
        count: Count,
        found: Mapping[float | None, Sequence[tuple[Question, Setting, float, float]]],
        vector: bool,
    ) -> Match | None:
        factors: dict[float | None, float] = {}
        error, worst = 0.0, ("", math.nan, math.nan)
        squares = size = 0.0
        for passed, rows in found.items():
            ratios = [
                given * count.number(setting) / value
                for _, setting, value, given in rows
                if value != 0 and math.isfinite(value) and count.number(setting) > 0
            ]
            if not ratios:
                return None
            factors[passed] = _rounded(float(np.median(ratios)), self.close)
            for question, setting, value, given in rows:
                expected = value * factors[passed] / max(count.number(setting), 1.0)
                off = relative(expected, given)
                squares, size = squares + (expected - given) ** 2, size + given**2
                if off > error or not worst[0]:
                    error, worst = max(off, error), (question.name, expected, given)
        return Match(
            candidate.base,
            candidate.recipe,
            dict(temperatures),
            count,
            factors,
            error,
            worst,
            distance=math.sqrt(squares / max(size, 1e-300)),
            vector=vector,
        )

    def gradients(self, match: Match) -> float | None:
        """The largest relative difference of a gradient over the ordinary questions."""
        found = [self._gradient_off(match, question) for question in self.ordinary]
        known = [value for value in found if value is not None]
        return max(known) if known else None

    def _gradient_of(self, match: Match, question: Question) -> Tensor | None:
        rows = question.batch.embeddings.detach().clone().requires_grad_()
        value = match.predict(question, rows=rows)
        if value is None:
            return None
        (expected,) = torch.autograd.grad(value.sum(), rows)
        return expected * match.gradient_factor

    def _gradient_off(self, match: Match, question: Question) -> float | None:
        rows = question.batch.embeddings
        if match.recipe.guard and len(set(map(tuple, rows.tolist()))) < len(rows):
            return None  # where two rows share a maximum, its derivative is not one number
        given = self.answer(question).gradient
        if given is None or not bool(given.isfinite().all()):
            return None  # which is said apart
        expected = self._gradient_of(match, question)
        if expected is None or not bool(expected.isfinite().all()):
            return None
        size = max(float(expected.norm()), float(given.norm()))
        # A gradient that vanishes is all rounding.
        nothing = 1e-12 * abs(self.answer(question).total) / float(question.batch.embeddings.norm())
        return float((expected - given).norm()) / size if size > nothing else 0.0

    def with_gradient(self, match: Match) -> Match:
        """The match with its gradient held, or with what the gradient flows through instead."""
        held = replace(match, gradient_error=self.gradients(match))
        if held.gradient_error is None or held.gradient_error <= self.close:
            return held
        for flow in FLOWS:
            other = replace(match, recipe=replace(match.recipe, flow=flow))
            error = self.gradients(other)
            if error is not None and error <= self.close:
                return replace(other, gradient_error=error)
        ratios = [
            float((given * expected).sum() / (expected * expected).sum())
            for question in self.ordinary
            if (given := self.answer(question).gradient) is not None
            and bool(given.isfinite().all())
            and (expected := self._gradient_of(match, question)) is not None
            and float(expected.norm()) > 0
        ]
        if ratios:
            other = replace(match, gradient_factor=_rounded(float(np.median(ratios)), self.close))
            error = self.gradients(other)
            if error is not None and error <= self.close:
                return replace(other, gradient_error=error)
        return held


def disproportion(values: np.ndarray[Any, Any], given: np.ndarray[Any, Any]) -> float:
    """How far two vectors are from being proportional, relative to the second."""
    if not (np.isfinite(values).all() and np.isfinite(given).all()):
        return math.inf
    tops = float(np.abs(values).max()), float(np.abs(given).max())
    if min(tops) < 1e-300:
        return math.inf
    values, given = values / tops[0], given / tops[1]
    values, given = values / np.linalg.norm(values), given / np.linalg.norm(given)
    scale = float(values @ given)
    return float(np.linalg.norm(scale * values - given))


def relative(expected: float, given: float) -> float:
    """How far two numbers are apart, relative to the larger; 0 for two that are NaN."""
    if math.isnan(expected) and math.isnan(given):
        return 0.0
    if not (math.isfinite(expected) and math.isfinite(given)):
        return 0.0 if expected == given else math.inf
    size = max(abs(expected), abs(given))
    return abs(expected - given) / size if size > 1e-300 else 0.0


def _rounded(factor: float, close: float) -> float:
    """A factor as the simple number that it is within rounding of."""
    for simple in (1.0, 2.0, 0.5, -1.0, 4.0, 0.25):
        if abs(factor - simple) <= close * abs(simple):
            return simple
    return factor


PLAIN_COUNTS = ("mean", "sum", "drop", "mean_pairs")


def _better(a: Match, b: Match, close: float) -> bool:
    """Whether one explanation of the same recipe is to be preferred."""
    fits = a.error <= close, b.error <= close
    if fits[0] != fits[1] or not any(fits):
        return a.error < b.error
    return plainness(a) < plainness(b)


def plainness(match: Match) -> tuple[int, int]:
    """How little there is to say about factor and count: less is better."""
    plain = all(factor == 1 for factor in match.factor.values())
    return (0 if plain else 1) + (0 if match.count.name in PLAIN_COUNTS else 1), list(COUNTS).index(match.count.name)


def _candidates(call: str) -> Iterator[list[Candidate]]:
    """Candidates in the order in which they are tried: what is right, what differs in one part, what differs in two."""
    known = bases(call)
    # The mean over pairs is of the pairs' own sum.
    sums = [Candidate(base, replace(base.recipe, form="sum")) for base in known if base.pairs]
    yield [*(Candidate(base, base.recipe) for base in known), *sums]
    single = [Candidate(base, recipe) for base in known for recipe in variations(base.recipe, call)]
    yield list(_unique(single))
    main = [b for b in known if b.recipe.guard == "" and not b.options.keys() - {"similarity", "denominator"}]
    double = (
        Candidate(base, second)
        for base in main
        for first in variations(base.recipe, call)
        if not first.guard and first.similarity == base.recipe.similarity
        for second in variations(first, call)
        if not second.guard and second.similarity == base.recipe.similarity and len(second.words()) == 2
    )
    yield list(_unique(double))


def _unique(candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    seen = set()
    for candidate in candidates:
        if candidate.recipe not in seen:
            seen.add(candidate.recipe)
            yield candidate


def matches_of(search: Search) -> list[Match]:
    """Explanations, the good ones where there are any; else the nearest that were met."""
    near: list[Match] = []
    for level, candidates in enumerate(_candidates(search.target.call)):
        found: list[Match] = []
        if search.target.passes:
            found = _as_passed(search, candidates, tempered=level == 0)
        if not search.target.passes or (level == 0 and not any(match.error <= search.close for match in found)):
            found += _solved(search, candidates)
        near += found
        good = [match for match in near if match.error <= search.close]
        # What is close and not exact is not believed before every recipe with one wrong part was tried: an epsilon.
        if good and (level > 0 or min(match.error for match in good) < EXACT or search.single):
            return near
    return near


def _as_passed(search: Search, candidates: Sequence[Candidate], *, tempered: bool) -> list[Match]:
    """Explanations in which the temperature that is passed is used, rightly or, if ``tempered``, wrongly."""
    tried = [*candidates]
    if tempered:
        tried += [Candidate(c.base, recipe) for c in candidates for recipe in temperings(c.recipe)]
    at = torch.tensor(PASSED, dtype=torch.float64)
    batches = (search.questions.alike[0], search.questions.alike[-1], *search.questions.alike[1:-1])
    given = np.array([[search.answers[b.name, p].total for p in PASSED] for b in batches])

    def ranked(chosen: Sequence[Candidate], asked: Sequence[Batch]) -> list[Candidate]:
        values = np.stack([search.totals(chosen, batch, at) for batch in asked])
        off = [
            max(disproportion(values[:, k, j], given[: len(asked), j]) for j in range(len(PASSED)))
            for k in range(len(chosen))
        ]
        return [chosen[k] for k in np.argsort(np.array(off), kind="stable")]

    shortlist = ranked(tried, batches[:2])[:SHORTLIST]
    explained = (
        search.explain(candidate, {p: p for p in PASSED}) for candidate in ranked(shortlist, batches)[:REFINED]
    )
    return [match for match in explained if match is not None]


def _solved(search: Search, candidates: Sequence[Candidate]) -> list[Match]:
    """Explanations with a temperature of their own, whatever is passed."""
    found = []
    first, *others = search.passed
    for _, k, low, high in search.crossings(candidates, first)[:REFINED]:
        candidate = candidates[k]
        temperatures: dict[float | None, float] = {}
        at = search.refine(candidate, first, low, high)
        if at is None:
            continue
        temperatures[first] = at
        for passed in others:
            nearest = search.crossings([candidate], passed)
            refined = search.refine(candidate, passed, *nearest[0][2:]) if nearest else None
            if refined is not None:
                temperatures[passed] = refined
        if len(temperatures) == len(search.passed):
            match = search.explain(candidate, temperatures)
            if match is None:
                continue
            if match.error <= search.close and _at_another_temperature(search, candidate, temperatures):
                search.undetermined.append(match)
            else:
                found.append(match)
    return found


def _at_another_temperature(search: Search, candidate: Candidate, temperatures: Mapping[float | None, float]) -> bool:
    """Whether the answers are explained as well by another temperature, so that none can be told from them.

    Where exponentials saturate, or there is no sum of them, the temperature is a factor of the value and no more.
    """
    others = (
        search.explain(candidate, {passed: share * at for passed, at in temperatures.items()}) for share in ANOTHER
    )
    return any(other is not None and other.error <= search.close for other in others)
