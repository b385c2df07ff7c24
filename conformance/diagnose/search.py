"""The search for what explains a target's answers: probes, variants, temperatures, and what a sum is divided by.

A target is called with probes, small batches that tell the catalogue's losses and options apart. Each variant
predicts the sum over the anchors for every probe; what that is divided by or multiplied with is a factor, found
afterwards. A built-in temperature is found from the ratio of the answers to two probes of one structure, in which every
such factor cancels: the ratio is scanned over the logarithm of the temperature, and its crossings are refined.
What fits is then compared with all other probes, the gradient included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import product
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq

from ..implementations.callable import Answer, Batch, Target
from ..implementations.sandbox import TargetError, within
from ..suite.catalogue import LOSSES
from .positives import FEATURES, LABELS, PAIRS, POSITIVES, VIEWS, Setting, batch_setting
from .variants import COUNTS, FLOWS, REDUCED_BY, Evaluation, Variant, reduce_anchors, temperings, variant_of, variations

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
"""Temperatures at which crossings are searched; none of them is one that people write."""

PASSED = (0.5, 0.2)
"""Temperatures that are passed to a target which takes one."""

NEAR = 0.05
"""How far the answers may be from a variant's values, interpolated between two temperatures of the grid."""

POWERS = (0, 1, -1, 2, -2)
"""Of the temperature, which a factor may be a multiple of."""

ANOTHER = (0.5, 2.0)
"""Shares of a temperature that was found, at which the answers must not be explained as well."""

REFINED = 40
"""How many crossings are refined: the most promising ones."""

SHORTLIST = 400
"""How many variants at temperatures that are passed are compared with more than two probes."""


# Probes


def drawn(seed: int, labels: Sequence[int], pull: float, columns: int = 5) -> Tensor:
    """[N, D] around their class's centre, of norms from 0.6 to 1.5 that do not depend on the class."""
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(max(labels) + 1, columns, generator=draw, dtype=torch.float64)
    noise = torch.randn(len(labels), columns, generator=draw, dtype=torch.float64)
    rows = pull * centres[torch.tensor(labels)] + noise
    norms = 0.6 + 0.9 * torch.rand(len(labels), 1, generator=draw, dtype=torch.float64)
    found: Tensor = rows / rows.norm(dim=1, keepdim=True) * norms
    return found


@dataclass(frozen=True)
class Probes:
    """The batches that a target is called with.

    Attributes:
        alike: of one structure, in which all counts are equal; the rows of a class lie nearer and nearer to each other.
        further: other ordinary ones, of other sizes.
        edges: batches that show policies.
    """

    alike: tuple[Batch, ...]
    further: tuple[Batch, ...]
    edges: tuple[Batch, ...] = ()

    @property
    def ordinary(self) -> tuple[Batch, ...]:
        """All but the edges."""
        return (*self.alike, *self.further)


def _batch(
    call: str,
    name: str,
    seed: int,
    items: Sequence[int],
    pairs: Sequence[tuple[int, int]] | None = None,
    *,
    pull: float = 0.8,
    n_views: int = 1,
    labelled: bool = False,
) -> Batch:
    """A batch of one call, from the class of every item."""
    rows = drawn(seed, [*items] * n_views, pull)
    return Batch(name, call, rows, tuple(items) if labelled else None, pairs, n_views)


def _alike(make: Callable[..., Batch], name: str, seed: int, *given: Any) -> tuple[Batch, ...]:
    """Batches of one structure, from rows that do not depend on the class to classes far apart."""
    pulls = enumerate((0.0, 0.6, 1.2, 2.0))
    return tuple(make(f"{name}, {pull:g} apart", seed + k, *given, pull=pull) for k, pull in pulls)


def _with_duplicates(batch: Batch) -> Batch:
    """Two rows of different classes and two of one class made equal."""
    rows = batch.embeddings.clone()
    rows[1] = rows[0]
    rows[5] = rows[2]
    return replace(batch, embeddings=rows)


_labels = partial(_batch, LABELS, labelled=True)
_features = partial(_batch, FEATURES, n_views=2, labelled=True)
_unlabelled = partial(_batch, FEATURES, n_views=2)
_views = partial(_batch, VIEWS, n_views=2)
_pairs = partial(_batch, PAIRS)

UNBALANCED = (0, 1, 0, 2, 1, 0, 2, 1, 0)
TWINS = (0, 1, 2, 3, 4, 5) * 2
TWO_ALONE = (0, 1, 0, 2, 0, 3, 3)
FAR_APART = (0, 256, 2**32, 2**24, 2**24 + 1, -1) * 2
"""Labels that are one where they are narrowed to fewer bits, or to float32."""

THIRDS = (0, 1, 2) * 4
DIRECTED = ((0, 2), (2, 0), (1, 4), (4, 1), (3, 6), (5, 0), (6, 8), (7, 2), (8, 3), (0, 5), (0, 8), (2, 5), (6, 3))
OTHER_PAIRS = (
    *((0, 1), (1, 0), (2, 3), (3, 4), (4, 2), (5, 9), (6, 0), (7, 8), (8, 7), (9, 5), (10, 11), (11, 1)),
    *((0, 7), (2, 9), (2, 10), (5, 6), (9, 10), (9, 11)),
)
PARTNERS = tuple((k, (k + 4) % 8) for k in range(8))
BOTH_WAYS = ((0, 1), (1, 0), (2, 3), (3, 2), (4, 5), (5, 4))
TWICE = (*DIRECTED[:4], (5, 0), (6, 3), (7, 2), (3, 6), (0, 2), (5, 0))
ONE_FOR_ALL = ((0, 1), (0, 2), (0, 3), (1, 0), (2, 1), (3, 0))

PROBES: Mapping[str, tuple[Probes, ...]] = {
    LABELS: (
        Probes(
            _alike(_labels, "classes of 4, 3 and 2 rows", 3, UNBALANCED),
            (
                _labels("14 rows in classes of 6 to 2", 11, (3, 0, 1, 1, 0, 2, 2, 2, 0, 3, 2, 2, 3, 0)),
                _labels("pairs only, stacked", 12, TWINS),
                _with_duplicates(_labels("duplicated rows", 13, (0, 1, 0, 1, 2, 0, 2, 2, 1, 1))),
                _labels("pairs only, side by side", 14, (0, 0, 1, 1, 2, 2, 3, 3)),
            ),
            (
                _labels("two anchors without positive", 21, TWO_ALONE),
                _labels("a batch of one class", 22, (0,) * 5),
                _labels("a batch without any positive", 23, range(5)),
                replace(_labels("labels far apart", 24, TWINS), labels=FAR_APART),
                replace(_labels("rows of norm 1e-9", 25, UNBALANCED), embeddings=drawn(25, UNBALANCED, 0.8) * 1e-9),
            ),
        ),
        Probes(
            _alike(_labels, "six pairs", 31, TWINS),
            (_labels("five pairs", 36, (*range(5), *range(5))), _labels("eight pairs", 37, (*range(8), *range(8)))),
        ),
    ),
    FEATURES: (
        Probes(
            _alike(_features, "6 items of 2 views in 3 classes", 41, (0, 1, 0, 2, 0, 1)),
            (
                _features("5 items of 2 views in 3 classes", 45, (2, 1, 2, 0, 0)),
                _features("4 items of 3 views in 2 classes", 46, (0, 1, 0, 0), n_views=3),
                _features("9 items of 1 view in 3 classes", 47, UNBALANCED, n_views=1),
                _unlabelled("6 items of 2 views, no labels", 48, range(6)),
            ),
            (
                _features("one view, two anchors without positive", 49, TWO_ALONE, n_views=1),
                _features("a batch of one class", 50, (0, 0, 0)),
            ),
        ),
        Probes(
            _alike(_unlabelled, "6 items of 2 views", 51, range(6)),
            (
                _unlabelled("9 items of 2 views", 56, range(9)),
                _unlabelled("4 items of 3 views", 57, range(4), n_views=3),
                _unlabelled("3 items of 2 views", 58, range(3)),
            ),
        ),
    ),
    VIEWS: (
        Probes(
            _alike(_views, "6 items", 61, range(6)),
            (
                _views("9 items", 66, range(9)),
                _views("3 items", 67, range(3)),
                _with_duplicates(_views("duplicated rows", 68, range(7))),
                _views("12 items", 69, range(12)),
            ),
        ),
        Probes(_alike(_views, "4 items", 121, range(4)), (_views("9 items", 66, range(9)),)),
    ),
    PAIRS: (
        Probes(
            _alike(_pairs, "13 directed pairs of 9 rows", 71, THIRDS[:9], DIRECTED),
            (
                _pairs("18 directed pairs of 12 rows", 76, THIRDS, OTHER_PAIRS),
                _pairs("each of 8 rows with one partner", 77, THIRDS[:8], PARTNERS),
                _pairs("6 rows, both directions", 78, THIRDS[:6], (*BOTH_WAYS, (0, 5), (5, 0))),
            ),
            (
                _pairs("pairs listed twice", 79, THIRDS[:8], TWICE),
                _pairs("two rows without positive", 80, THIRDS[:7], DIRECTED[:6]),
                _pairs("a row without negatives", 81, THIRDS[:4], ONE_FOR_ALL),
                _pairs("a diagonal entry listed", 82, THIRDS[:6], (*BOTH_WAYS, (2, 2))),
            ),
        ),
    ),
}
"""For every call the probes in the order of preference: the first that the target accepts are used."""


@dataclass(frozen=True)
class Probe:
    """A batch, and the temperature that is passed with it where the target takes one."""

    batch: Batch
    temperature: float | None

    @property
    def name(self) -> str:
        """In words."""
        at = "" if self.temperature is None else f", temperature {self.temperature:g}"
        return self.batch.name + at


def call_with(target: Target, probe: Probe, limit: float | None = None) -> Answer:
    """Call a target with a probe.

    Args:
        target: the target.
        probe: the probe.
        limit: seconds that the answer may take.

    Raises:
        TargetError: it raised an error, was too slow, or did not return a loss.
    """
    keywords = {} if probe.temperature is None else {"temperature": probe.temperature}
    try:
        with within(limit):
            return target.evaluate(replace(probe.batch, keywords=keywords))
    except TargetError:
        raise
    except Exception as error:  # outside code may raise anything
        raise TargetError(f"{type(error).__name__}: {error}".splitlines()[0]) from error


@lru_cache(maxsize=10_000)
def read_as(batch: Batch, positives: str) -> Setting | None:
    """A batch with its positives read so; None where it cannot be."""
    return POSITIVES[positives].change(batch_setting(batch))


# What is searched

READ_AS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "labels": dict.fromkeys((LABELS, FEATURES, PAIRS), ("meant",)),
    "partners": {VIEWS: ("meant",), FEATURES: ("views",), LABELS: ("stacked partners", "neighbours")},
    "pairs": dict.fromkeys((LABELS, FEATURES, VIEWS, PAIRS), ("meant",)),
    "towers": dict.fromkeys((VIEWS, FEATURES), ("towers",)),
}
"""How a loss's positives may be read from the arguments of a call: by ``Loss.positives_by`` and the call."""


def known_losses(call: str) -> list[Variant]:
    """Every loss of the catalogue that a call can express, with its options."""
    found = []
    for loss in LOSSES.values():
        choices = {name: values for name, values in loss.choices.items() if name not in REDUCED_BY}
        for values in product(*choices.values()):
            variant = variant_of(loss, dict(zip(choices, values, strict=True)))
            direction = dict(variant.options).get("direction")
            for positives in READ_AS[loss.positives_by].get(call, ()):
                found.append(replace(variant, positives=f"{positives} {direction}" if direction else positives))
    return found


def _levels(known: Sequence[Variant], call: str) -> Iterator[list[Variant]]:
    """Variants in the order in which they are tried: right ones, those wrong in one part, and those wrong in two."""
    # The mean over pairs is of the pairs' own sum.
    yield [*known, *(replace(variant, form="sum") for variant in known if variant.over_pairs)]
    yield _unique(wrong for variant in known for wrong in variations(variant, call))
    yield _unique(
        second
        for variant in known
        if not variant.guard and not dict(variant.options).keys() - {"similarity", "denominator"}
        for first in variations(variant, call)
        if not first.guard and first.similarity == variant.similarity
        for second in variations(first, call)
        if not second.guard and second.similarity == variant.similarity and len(second.words()) == 2
    )


def _unique(variants: Iterable[Variant]) -> list[Variant]:
    """The first of the variants that have the same parts."""
    first: dict[Variant, Variant] = {}
    for variant in variants:
        first.setdefault(replace(variant, loss="", options=()) if variant.in_parts else variant, variant)
    return list(first.values())


@dataclass(frozen=True)
class Match:
    """An explanation, compared with every ordinary probe.

    Attributes:
        variant: the loss that it is, or comes from, and its parts.
        temperatures: the temperature found for each that was passed, or for None.
        count: what the sum over the anchors is divided by, a name of ``COUNTS``.
        factor: what it is multiplied with, for each temperature that was passed.
        error: the largest relative difference of a value.
        worst: the probe of ``error``, the value expected there, and the value returned.
        distance: of all values from the answers, relative to the answers.
        gradient_error: the largest relative difference of a gradient; None where there is none.
        vector: whether it gives one value per anchor.
        gradient_factor: what gradients are multiplied with beside it.
    """

    variant: Variant
    temperatures: Mapping[float | None, float]
    count: str
    factor: Mapping[float | None, float]
    error: float
    worst: tuple[str, float, float]
    distance: float = math.inf
    gradient_error: float | None = None
    vector: bool = False
    gradient_factor: float = 1.0

    @property
    def plainness(self) -> tuple[int, int]:
        """How little there is to report about factor and count: less is better."""
        scaled = any(factor != 1 for factor in self.factor.values())
        return scaled + (self.count not in PLAIN_COUNTS), list(COUNTS).index(self.count)

    def with_parts(self, **parts: Any) -> Match:
        """The same with other parts."""
        return replace(self, variant=replace(self.variant, **parts))

    def predict(self, probe: Probe, policy: str = "zero", rows: Tensor | None = None) -> Tensor | None:
        """The value, or one per anchor, or None where the batch cannot be read so or the factor is not known there."""
        setting = POSITIVES[self.variant.positives].change(batch_setting(probe.batch, rows))
        factor = self.factor_for(probe.temperature)
        if setting is None or factor is None:
            return None
        at = torch.tensor([self.temperature_for(probe.temperature)], dtype=torch.float64)
        each = Evaluation(setting, at).anchors(self.variant)[0]
        return reduce_anchors(setting, each, "none" if self.vector else self.count, policy) * factor

    def temperature_for(self, passed: float | None) -> float:
        """The effective temperature where this one is passed, which may be another than those tried."""
        if passed is None or passed in self.temperatures:
            return self.temperatures[passed]
        used = [(tried, value) for tried, value in self.temperatures.items() if tried is not None]
        return passed if all(abs(value - tried) <= 1e-12 * tried for tried, value in used) else used[0][1]

    @property
    def scale(self) -> tuple[float, int] | None:
        """(c, p) if the factor is c times the temperature to the power of p for all that were passed, else None."""
        known = [(passed, factor) for passed, factor in self.factor.items() if passed is not None]
        for power in POWERS:
            first, *others = [factor / passed**power for passed, factor in known]
            if all(abs(other - first) <= 1e-6 * abs(first) for other in others):
                return first, power
        return None

    def factor_for(self, passed: float | None) -> float | None:
        """The factor where this temperature is passed; None where those known are not multiples of a power of it."""
        if passed is None or passed in self.factor:
            return self.factor[passed]
        scale = self.scale
        return None if scale is None else scale[0] * passed ** scale[1]


PLAIN_COUNTS = ("mean", "sum", "drop", "mean_pairs")


class Search:
    """The answers of one target, and the variants compared with them.

    Attributes:
        target: the target.
        limit: seconds that one answer may take.
        known: the losses of the catalogue that the call can express.
        passed: the temperatures that are passed; None alone where the target takes none.
        probes: the probes that it accepts.
        answers: what it returned for each.
        broken: the batches that it does not accept, and why.
        undetermined: explanations that hold at any temperature.

    Raises:
        TargetError: it accepts no probes.
    """

    def __init__(self, target: Target, limit: float | None = 60.0) -> None:
        self.target, self.limit = target, limit
        self.call = VIEWS if target.call == "stacked" else target.call
        self.passed: tuple[float | None, ...] = PASSED if target.takes_temperature else (None,)
        self.answers: dict[Probe, Answer] = {}
        self.broken: dict[str, str] = {}
        self.undetermined: list[Match] = []
        self.known = known_losses(self.call)
        self.probes = self._choose()
        self.single = all(answer.single for answer in self.answers.values())
        self.close = CLOSE_SINGLE if self.single else CLOSE

    def _choose(self) -> Probes:
        """The first probes that the target accepts, and its answers."""
        failures = []
        for probes in PROBES[self.call]:
            try:
                for passed in self.passed:
                    for batch in probes.alike:
                        self.ask(Probe(batch, passed))
            except TargetError as error:
                failures.append(str(error))
                continue
            for batch in (*probes.further, *probes.edges):
                try:
                    for passed in self.passed:
                        self.ask(Probe(batch, passed))
                except TargetError as error:
                    self.broken[batch.name] = str(error)
            return probes
        raise TargetError(f"it cannot be called with any probe: {'; '.join(dict.fromkeys(failures))}")

    def ask(self, probe: Probe) -> Answer:
        """Call the target, and keep the answer."""
        self.answers[probe] = call_with(self.target, probe, self.limit)
        return self.answers[probe]

    def answered(self, batches: Iterable[Batch]) -> list[Probe]:
        """The probes of these batches that were answered."""
        probes = [Probe(batch, passed) for batch in batches for passed in self.passed]
        return [probe for probe in probes if probe in self.answers]

    @property
    def ordinary(self) -> list[Probe]:
        """Every ordinary probe that was answered."""
        return self.answered(self.probes.ordinary)

    def totals(self, tried: Sequence[Variant], batch: Batch, temperatures: Tensor) -> np.ndarray[Any, Any]:
        """[V, T], the sum over the anchors as each variant predicts it; NaN where it cannot."""
        found = np.full((len(tried), len(temperatures)), np.nan)
        evaluations: dict[str, Evaluation] = {}
        with torch.no_grad():
            for k, variant in enumerate(tried):
                setting = read_as(batch, variant.positives)
                if setting is not None:
                    evaluation = evaluations.setdefault(variant.positives, Evaluation(setting, temperatures))
                    found[k] = evaluation.anchors(variant).sum(dim=1).numpy()
        return found

    # Temperatures

    def crossings(self, tried: Sequence[Variant], passed: float | None) -> list[tuple[float, int, float, float]]:
        """Where variants may explain the answers: (how far off, variant, from temperature, to temperature).

        The probes are of one structure, so any factor cancels from V_a t_b - V_b t_a. That is followed over the grid
        for the two probes that differ most; at its crossings the others must be near, too.
        """
        batches = self.probes.alike
        given = np.array([self.answers[Probe(b, passed)].total for b in batches])
        if not np.isfinite(given).all() or not given.any():
            return []
        ends = np.stack([self.totals(tried, batch, GRID) for batch in (batches[0], batches[-1])])
        with np.errstate(all="ignore"):
            scale = np.abs(ends).max(axis=0) * np.abs(given).max()
            first = (ends[0] * given[-1] - ends[1] * given[0]) / scale
            finite = np.isfinite(first)
            places = (np.sign(first[:, :-1]) * np.sign(first[:, 1:]) <= 0) & finite[:, :-1] & finite[:, 1:]
        kept = [int(k) for k in np.flatnonzero(places.any(axis=1))]
        if not kept:
            return []
        inner = [self.totals([tried[k] for k in kept], batch, GRID) for batch in batches[1:-1]]
        values = np.stack([ends[0][kept], *inner, ends[1][kept]])
        found = []
        for at, j in zip(*np.nonzero(places[kept]), strict=True):
            k = kept[at]
            span = first[k, j + 1] - first[k, j]
            share = 0.0 if span == 0 else -first[k, j] / span
            if np.isfinite(values[:, at, j : j + 2]).all():
                here = values[:, at, j] + share * (values[:, at, j + 1] - values[:, at, j])
                away = disproportion(here, given)
                if away < NEAR:
                    found.append((away, k, float(GRID[j]), float(GRID[j + 1])))
        return sorted(found, key=lambda item: (item[0] * (1 + len(tried[item[1]].words())), item[1]))

    def refine(self, variant: Variant, passed: float | None, low: float, high: float) -> float | None:
        """The temperature in between at which the variant's ratio of two answers is the target's."""
        a, b = self.probes.alike[0], self.probes.alike[-1]
        at, bt = self.answers[Probe(a, passed)].total, self.answers[Probe(b, passed)].total

        def off(logarithm: float) -> float:
            temperature = torch.tensor([math.exp(logarithm)], dtype=torch.float64)
            one, two = (float(self.totals([variant], batch, temperature)[0, 0]) for batch in (a, b))
            return (one * bt - two * at) / max(abs(one * bt) + abs(two * at), 1e-300)

        try:
            return math.exp(float(brentq(off, math.log(low) - 1e-9, math.log(high) + 1e-9, xtol=1e-15, rtol=1e-14)))
        except (ValueError, RuntimeError):
            return None

    # Explanations

    def explain(self, variant: Variant, temperatures: Mapping[float | None, float]) -> Match | None:
        """The variant at these temperatures compared with every ordinary probe, with the factor that fits best."""
        found: dict[float | None, list[tuple[Probe, Setting, float, float]]] = {p: [] for p in self.passed}
        for probe in self.ordinary:
            setting = read_as(probe.batch, variant.positives)
            if setting is not None:
                at = torch.tensor([temperatures[probe.temperature]], dtype=torch.float64)
                value = float(self.totals([variant], probe.batch, at)[0, 0])
                found[probe.temperature].append((probe, setting, value, self.answers[probe].total))
        counts = ["sum"] if variant.form == "pooled" else list(COUNTS)
        compared = [self._compared(variant, temperatures, count, found) for count in counts]
        matches = [match for match in compared if match is not None]
        fitting = [match for match in matches if match.error <= self.close]
        if fitting:
            return min(fitting, key=lambda match: match.plainness)
        return min(matches, key=lambda match: match.error, default=None)

    def _compared(
        self,
        variant: Variant,
        temperatures: Mapping[float | None, float],
        count: str,
        found: Mapping[float | None, Sequence[tuple[Probe, Setting, float, float]]],
    ) -> Match | None:
        factors: dict[float | None, float] = {}
        compared: list[tuple[str, float, float]] = []
        for passed, rows in found.items():
            number, value, given = np.array([[COUNTS[count](s), value, given] for _, s, value, given in rows]).T
            usable = (value != 0) & np.isfinite(value) & (number > 0)
            if not usable.any():
                return None
            ratios = (given * number)[usable] / value[usable]
            factors[passed] = _rounded(float(np.median(ratios)), self.close)
            expected = value * factors[passed] / np.maximum(number, 1)
            names = [probe.name for probe, *_ in rows]
            compared += zip(names, expected.tolist(), given.tolist(), strict=True)
        errors = [relative(expected, given) for _, expected, given in compared]
        worst = int(np.argmax(errors))
        away, size = (math.hypot(*x) for x in zip(*((e - g, g) for _, e, g in compared), strict=True))
        match = Match(variant, dict(temperatures), count, factors, errors[worst], compared[worst])
        return replace(match, distance=away / max(size, 1e-150), vector=self.vector)

    @cached_property
    def vector(self) -> bool:
        """Whether the target returns one value per anchor."""
        return any(len(self.answers[probe].values) > 1 for probe in self.ordinary)

    # Gradients

    def _gradients(self, match: Match) -> Iterator[tuple[Probe, Tensor, Tensor]]:
        """For every ordinary probe with a finite gradient: the gradient, and the one expected."""
        for probe in self.ordinary:
            given = self.answers[probe].gradient
            if given is None or not bool(given.isfinite().all()):
                continue  # which is reported apart
            rows = probe.batch.embeddings.detach().clone().requires_grad_()
            value = match.predict(probe, rows=rows)
            if value is not None:
                (expected,) = torch.autograd.grad(value.sum(), rows)
                yield probe, given, expected * match.gradient_factor

    def gradient_error(self, match: Match) -> float | None:
        """The largest relative difference of a gradient over the ordinary probes; None where there is none."""
        errors = []
        for probe, given, expected in self._gradients(match):
            rows = probe.batch.embeddings
            shared_maximum = match.variant.guard and len(set(map(tuple, rows.tolist()))) < len(rows)
            # Where two rows share a maximum, its derivative is not one number.
            if shared_maximum or not bool(expected.isfinite().all()):
                continue
            size = max(float(expected.norm()), float(given.norm()))
            # A gradient that vanishes is all rounding.
            nothing = 1e-12 * abs(self.answers[probe].total) / float(rows.norm())
            errors.append(float((expected - given).norm()) / size if size > nothing else 0.0)
        return max(errors, default=None)

    def with_gradient(self, match: Match) -> Match:
        """The match with its gradient compared, or with what the gradient flows through instead."""
        compared = replace(match, gradient_error=self.gradient_error(match))
        if compared.gradient_error is None or compared.gradient_error <= self.close:
            return compared
        others = [match.with_parts(flow=flow) for flow in FLOWS]
        ratios = [
            float((given * expected).sum() / (expected * expected).sum())
            for _, given, expected in self._gradients(match)
            if float(expected.norm()) > 0
        ]
        if ratios:
            others.append(replace(match, gradient_factor=_rounded(float(np.median(ratios)), self.close)))
        for other in others:
            error = self.gradient_error(other)
            if error is not None and error <= self.close:
                return replace(other, gradient_error=error)
        return compared

    # The search

    def matches(self) -> list[Match]:
        """Explanations, the good ones where there are any; else the nearest that were found."""
        near: list[Match] = []
        for level, tried in enumerate(_levels(self.known, self.call)):
            found: list[Match] = []
            if self.target.takes_temperature:
                found = self._as_passed(tried, tempered=level == 0)
            if not self.target.takes_temperature or (level == 0 and not any(m.error <= self.close for m in found)):
                found += self._solved(tried)
            near += found
            good = [match for match in near if match.error <= self.close]
            # What is close and not exact is accepted once every variant with one wrong part was tried: an epsilon.
            if good and (level > 0 or min(match.error for match in good) < EXACT or self.single):
                break
        return near

    def _as_passed(self, tried: Sequence[Variant], *, tempered: bool) -> list[Match]:
        """Explanations in which the temperature that is passed is used, rightly or, if ``tempered``, wrongly."""
        if tempered:
            tried = [*tried, *(wrong for variant in tried for wrong in temperings(variant))]
        at = torch.tensor(PASSED, dtype=torch.float64)
        alike = self.probes.alike
        batches = (alike[0], alike[-1], *alike[1:-1])
        given = np.array([[self.answers[Probe(b, p)].total for p in PASSED] for b in batches])

        def ranked(chosen: Sequence[Variant], n: int) -> list[Variant]:
            values = np.stack([self.totals(chosen, batch, at) for batch in batches[:n]])
            off = [
                max(disproportion(values[:, k, j], given[:n, j]) for j in range(len(PASSED)))
                for k in range(len(chosen))
            ]
            return [chosen[k] for k in np.argsort(np.array(off), kind="stable")]

        shortlist = ranked(ranked(tried, 2)[:SHORTLIST], len(batches))[:REFINED]
        explained = [self.explain(variant, {p: p for p in PASSED}) for variant in shortlist]
        return [match for match in explained if match is not None]

    def _solved(self, tried: Sequence[Variant]) -> list[Match]:
        """Explanations with a temperature of their own, whatever is passed."""
        found: list[Match] = []
        first, *others = self.passed
        for _, k, low, high in self.crossings(tried, first)[:REFINED]:
            solved = {first: self.refine(tried[k], first, low, high)}
            for passed in others if solved[first] is not None else ():
                nearest = self.crossings([tried[k]], passed)
                solved[passed] = self.refine(tried[k], passed, *nearest[0][2:]) if nearest else None
            temperatures = {passed: at for passed, at in solved.items() if at is not None}
            match = self.explain(tried[k], temperatures) if len(temperatures) == len(self.passed) else None
            if match is not None:
                anywhere = match.error <= self.close and self._at_another_temperature(match)
                (self.undetermined if anywhere else found).append(match)
        return found

    def _at_another_temperature(self, match: Match) -> bool:
        """Whether another temperature explains the answers as well, so that they do not determine it.

        Where exponentials saturate, or are not summed, the temperature is a factor of the value and nothing else.
        """
        for share in ANOTHER:
            temperatures = {passed: share * at for passed, at in match.temperatures.items()}
            other = self.explain(match.variant, temperatures)
            if other is not None and other.error <= self.close:
                return True
        return False


def disproportion(values: np.ndarray[Any, Any], given: np.ndarray[Any, Any]) -> float:
    """How far two vectors are from being proportional, relative to the second."""
    if not (np.isfinite(values).all() and np.isfinite(given).all()):
        return math.inf
    tops = float(np.abs(values).max()), float(np.abs(given).max())
    if min(tops) < 1e-300:
        return math.inf
    values, given = values / tops[0], given / tops[1]
    values, given = values / np.linalg.norm(values), given / np.linalg.norm(given)
    return float(np.linalg.norm(float(values @ given) * values - given))


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
