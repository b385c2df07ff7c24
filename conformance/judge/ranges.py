"""Find the range in which a loss works: the temperatures, norms and logits at which it starts to break.

One batch of eight ordinary rows is judged repeatedly: at decreasing temperatures, with decreasing and increasing norms,
and, for dot products, with increasing logits. A result breaks in three cases:

- The call raises an error.
- The result is not finite.
- The relative error is above ``WIDE`` and above the effect of rounding the largest logit, or it is above 0.1.

The true loss and gradient are proved, and are ordinary numbers at each point. So a limit belongs to the implementation.
Bisection finds it to 1.1 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ..implementations.callable import External
from ..implementations.sandbox import Overtime, described
from ..implementations.signatures import Claim
from ..suite.cases import Case
from ..suite.catalogue import LOSSES
from ..suite.records import Expected, Matrix, Outcome
from ..truth.evaluate import truth
from .results import grouped

DTYPES = ("float64", "float32")
"""The dtypes whose limits are found."""

WIDE = 1e-3
"""Relative error from which a result counts as wrong. It is far above the rounding errors of moderate logits."""

FINE = 64
"""Number of steps per factor of two: limits are found to 1.1 %."""

NORM = 85
"""The norm of every row of the batch."""

UNIT = 64
"""Divisor of the rows for dot products."""

ROWS = np.array([(84, 13), (77, 36), (75, 40), (68, 51), (51, 68), (40, 75), (13, 84), (-75, -40)], dtype=np.float64)
"""[8, 2] integers. The last row is far from all others. In each row of the similarity matrix without the diagonal, the
two largest entries differ by at least 0.009, so that low temperatures make no tie."""

QUEUE = np.array([(36, -77), (-40, -75)], dtype=np.float64)
"""[2, 2] integers: the queue of a target that requires one. Its similarities are far below the largest of every row."""

LABELS, PARTNERS = (0, 1, 0, 1, 0, 1, 1, 0), (4, 5, 6, 7, 0, 1, 2, 3)

ORDINARY = 0.5
"""Temperature at which norms and logits are tried, if the target takes a temperature."""

COLDEST = 1e-4
"""Lowest temperature that is tried."""

CLIP = 0.01
"""The temperature at which CLIP limits its learned scale (100)."""

LARGEST = 100
"""The logits grow at most by a factor of 2 to this power."""

SAME = 0.03
"""Relative difference below which a limit is attributed to a known number, such as a clamp at 1e-12."""


@dataclass(frozen=True)
class Limit:
    """The point at which a loss breaks, or the fact that no such point was found.

    Attributes:
        dtype: the dtype of the rows.
        quantity: "temperature", "norm" or "logit".
        direction: the side of the limit on which the loss breaks, "below" or "above".
        at: the limit; None if none was found.
        tried: the most extreme value of the search. For "late", the value at which it stopped.
        kind: "overflow", "underflow", "nan", "infinite", "wrong", "clamped" or "error"; "late" if the target exceeded
            its time limit; "" if no limit was found.
        part: what breaks, "loss" or "gradient"; "" if no limit was found.
        message: the message of an error.
    """

    dtype: str
    quantity: str
    direction: str
    at: float | None
    tried: float
    kind: str = ""
    part: str = ""
    message: str = ""

    @property
    def words(self) -> str:
        """The limit in words, without the dtype."""
        name = {"temperature": "temperature", "norm": "norm", "logit": "logits of"}[self.quantity]
        if self.kind == "late":
            return f"{self.message} at {name} {self.tried:.3g}: the search for limits stopped"
        if self.at is None:
            return f"no error found {'down' if self.direction == 'below' else 'up'} to {name} {self.tried:.3g}"
        where = f"{self.direction} {name} {self.at:.3g}"
        state = {"nan": "is NaN", "infinite": "is infinite"}.get(self.kind, "is wrong")
        if self.quantity == "norm" and self.kind in ("clamped", "overflow", "underflow"):
            return f"norms {self.direction} {self.at:.3g} {'are clamped' if self.kind == 'clamped' else self.kind}"
        if self.kind == "overflow":
            return f"exponentials overflow {where}, and the {self.part} is not finite"
        if self.kind == "error":
            return f"raises an error {where}: {self.message}"
        return f"the {self.part} {state} {where}"

    @property
    def sentence(self) -> str:
        """The limit in words, such as "float32: norms below 1e-12 are clamped"."""
        return f"{self.dtype}: {self.words}"


def sentences(limits: Iterable[Limit]) -> list[str]:
    """Return the limits in words. Limits with the same words in several dtypes are one sentence."""
    found = grouped((limit.words, limit.dtype) for limit in limits)
    return [f"{', '.join(dtypes)}: {words}" for words, dtypes in found.items()]


def at_the_scale_of_clip(limits: Iterable[Limit]) -> str:
    """Return a sentence that names the dtypes in which a loss is wrong at the largest scale of CLIP; "" if none."""
    breaks = (one for one in limits if one.quantity == "temperature" and one.at is not None and one.at > CLIP)
    dtypes = dict.fromkeys(limit.dtype for limit in breaks)
    return f"{', '.join(dtypes)}: wrong at CLIP's largest scale, temperature {CLIP:g}" if dtypes else ""


class _Late(Exception):
    """The target exceeded its time limit."""

    def __init__(self, limit: Limit) -> None:
        super().__init__(limit)
        self.limit = limit


@dataclass(frozen=True)
class _Break:
    """The kind and the message of a ``Limit``."""

    kind: str
    message: str = ""


Breaks = dict[str, _Break]
"""How the "loss" and the "gradient" break. A part that is right has no entry."""


def find_limits(target: External, claim: Claim, dtypes: Sequence[str] = DTYPES) -> list[Limit]:
    """Find the limits of a loss that is right on ordinary inputs, in float64 and float32.

    The search stops at the first call that exceeds the time limit of the target. The last limit then reports this.

    Returns:
        The limits by dtype. Empty if the loss does not take the batch, or is wrong on it.

        - cosine similarity: the temperature, if it can be passed, and the norms, unless the harness normalises the rows
        - dot product: the size of the logits
    """
    limits: list[Limit] = []
    try:
        limits.extend(_limits(target, claim, dtypes))
    except _Late as late:
        # ``extend`` has kept the limits before it.
        limits.append(late.limit)
    return limits


def _limits(target: External, claim: Claim, dtypes: Sequence[str]) -> Iterator[Limit]:
    for similarity in claim.values_of("similarity") or LOSSES[claim.loss].choices["similarity"]:
        case, known = _case(claim, str(similarity)), dict[tuple[float, float], Expected]()
        if claim.support.refuses(case) is None:
            for dtype in (dtype for dtype in DTYPES if dtype in dtypes):
                yield from _Search(target, claim, case, dtype, known).limits()


def _case(claim: Claim, similarity: str) -> Case:
    """Return the ordinary batch with the claimed options."""
    loss, keywords = LOSSES[claim.loss], dict[str, Any]()
    for option in loss.scalars:
        values = claim.values_of(option)
        if values and loss.keywords[option] not in values:
            keywords[option] = values[0]
    if claim.direction_weights:
        keywords["direction_weights"] = claim.direction_weights
    if claim.directed_here:
        keywords["direction"] = claim.settings["direction"]
    keywords |= {"similarity": similarity, "temperature": claim.temperature or ORDINARY}
    return ordinary_case(claim.loss, keywords, claim.required)


def ordinary_case(loss: str, keywords: Mapping[str, Any], required: Collection[str] = ()) -> Case:
    """Return the ordinary batch with these options, and with the optional matrices that are required."""
    entry = LOSSES[loss]
    # Under dot product, the rows have norm 1.33, so that the logits are about as large as those of cosines.
    unit = 1 if keywords["similarity"] == "cosine" else UNIT
    rows = ROWS / unit
    if entry.two_towers:
        more = {"negatives": QUEUE / unit, "hard_negatives": np.tile(QUEUE, (2, 1)) / unit}
        more = {name: matrix for name, matrix in more.items() if name in required}
        return Case("range/towers", loss, rows[:4], {}, keywords, {"embeddings_b": rows[4:], **more})
    given = {"labels": list(LABELS), "partners": list(PARTNERS), "positive_pairs": list(enumerate(PARTNERS))}
    return Case("range/rows", loss, rows, {entry.targets: given[entry.targets]}, keywords)


def _scaled(case: Case, factor: float) -> Case:
    return case.mapped(lambda rows: factor * rows)


def _power(exponent: float) -> float:
    """Return 2^exponent rounded to eight bits, so that its product with a row is exact in float32."""
    whole = math.floor(exponent)
    return math.ldexp(round(128 * 2 ** (exponent - whole)) / 128, whole)


@dataclass
class _Search:
    """Bisections for one target, one ordinary batch and one dtype.

    ``known`` contains the proved results by temperature and factor of the rows; all dtypes share it. ``kind`` is the
    ``torch.finfo`` of the dtype. ``tried`` is the quantity that is changed, its direction and its current value.
    """

    target: External
    claim: Claim
    case: Case
    dtype: str
    known: dict[tuple[float, float], Expected]
    kind: Any = field(init=False)
    tried: tuple[str, str, float] = field(init=False)

    def __post_init__(self) -> None:
        self.kind = torch.finfo(getattr(torch, self.dtype))
        self.tried = "temperature", "below", self.case.temperature

    def limits(self) -> Iterator[Limit]:
        """Find all limits. There are none if the ordinary batch is not right."""
        if self.breaks(self.case, self.truth(self.case)):
            return
        if self.case.option("similarity") == "dot":
            yield from self.of_logits()
            return
        if self.claim.temperature is None:
            yield from self.of_temperature()
        if not self.claim.normalised:
            yield from self.of_norms("below")
            yield from self.of_norms("above")

    def truth(self, case: Case, factor: float = 1.0) -> Expected:
        """Return the proved results of a case whose rows are multiplied by a factor."""
        key = case.temperature, factor
        if key not in self.known:
            self.known[key] = truth(_scaled(case, factor))
        return self.known[key]

    def of_temperature(self) -> list[Limit]:
        def judge(exponent: float) -> Breaks:
            case = self.case.with_options(temperature=max(2.0**exponent, COLDEST))
            return self.breaks(case, self.truth(case))

        last = math.log2(COLDEST)
        exponents = [*map(float, range(-1, math.ceil(last) - 1, -1)), last]
        return self.search(judge, exponents, "temperature", "below", lambda exponent: max(2.0**exponent, COLDEST))

    def of_norms(self, direction: str) -> list[Limit]:
        """Find the norm below or above which the loss breaks, although all inputs and results are normal numbers."""
        true = self.truth(self.case)
        slopes = np.concatenate([np.abs(rows).ravel() for rows in self.case.gradients(true).values()] or [np.ones(1)])

        def ordinary(exponent: int) -> bool:
            gradient = slopes.max() / _power(exponent)
            inside = self.kind.tiny * 2**24 < gradient < self.kind.max / 2**8
            return inside and _scaled(self.case, _power(exponent)).holds_in(self.dtype)

        def judge(exponent: float) -> Breaks:
            factor = _power(exponent)
            # The loss does not depend on the norms, and the gradient is inversely proportional to them.
            gradients = {name: rows / factor for name, rows in self.case.gradients(true).items()}
            first = gradients.pop(self.case.first, None)
            return self.breaks(_scaled(self.case, factor), Expected(true.loss, {}, first, other_gradients=gradients))

        step = -1 if direction == "below" else 1
        last = next(exponent for exponent in range(1020 * step, 0, -step) if ordinary(exponent))
        exponents = np.linspace(0, last, 12).round().tolist()
        return self.search(judge, exponents, "norm", direction, lambda exponent: NORM * _power(exponent))

    def of_logits(self) -> list[Limit]:
        """Find the size of the largest logit above which the loss breaks."""

        def judge(exponent: float) -> Breaks:
            factor = _power(exponent)
            return self.breaks(_scaled(self.case, factor), self.truth(self.case, factor))

        def size(exponent: float) -> float:
            return (NORM / UNIT * _power(exponent)) ** 2 / self.case.temperature

        exponents = map(float, (*range(10), *range(10, LARGEST // 2 + 1, 8)))
        return self.search(judge, [*exponents], "logit", "above", size)

    def search(
        self,
        judge: Callable[[float], Breaks],
        exponents: Sequence[float],
        quantity: str,
        direction: str,
        size: Callable[[float], float],
    ) -> list[Limit]:
        """Find where the loss and the gradient break first on the way from ordinary to extreme exponents.

        ``judge`` takes an exponent of two and returns how the result breaks there; at the first of ``exponents``, it is
        right. ``size`` converts an exponent to the value of the quantity.

        The gradient has a limit of its own only if it breaks before the loss. If nothing breaks, the limit has ``at``
        None.
        """
        found = dict[str, tuple[float, Limit]]()

        @cache
        def judged(exponent: float) -> Breaks:
            self.tried = quantity, direction, size(exponent)
            return judge(exponent)

        for part in ("loss", "gradient"):
            for good, bad in pairwise(exponents):
                if part not in judged(bad):
                    continue
                while abs(bad - good) > 1 / FINE:
                    middle = (good + bad) / 2
                    good, bad = (good, middle) if part in judged(middle) else (middle, bad)
                broken, tried = judged(bad)[part], size(exponents[-1])
                at = size((good + bad) / 2)
                limit = Limit(self.dtype, quantity, direction, at, tried, broken.kind, part, broken.message)
                found[part] = abs(good), self.named(limit)
                break
        before = "gradient" in found and ("loss" not in found or found["gradient"][0] < found["loss"][0] - 2 / FINE)
        limits = [found[part][1] for part in ("gradient", "loss") if part in found and (part == "loss" or before)]
        return limits or [Limit(self.dtype, quantity, direction, None, size(exponents[-1]))]

    def named(self, limit: Limit) -> Limit:
        """Name the cause of a limit if it is known: a clamp, or the end of the range of the dtype."""
        assert limit.at is not None
        at, largest = limit.at, float(self.kind.max)
        if limit.quantity != "norm":
            logit = at if limit.quantity == "logit" else 1 / at
            overflows = limit.kind in ("nan", "infinite") and abs(logit / math.log(largest) - 1) < SAME
            return replace(limit, kind="overflow") if overflows else limit
        if limit.direction == "above":
            return replace(limit, kind="overflow") if abs(at / math.sqrt(largest) - 1) < SAME else limit
        least = 10.0 ** round(math.log10(at))
        if limit.kind == "wrong" and abs(at / least - 1) < SAME and self.clamps(least):
            return replace(limit, kind="clamped", at=least)
        square = at * at
        underflows = self.kind.smallest_normal * 2.0**-60 < square < 4 * self.kind.smallest_normal
        return replace(limit, kind="underflow") if underflows else limit

    def clamps(self, least: float) -> bool:
        """Return whether rows of norm ``least / 2`` are divided by ``least`` instead of by their norms."""
        factor = _power(math.log2(least / 2 / NORM))
        expected = truth(_scaled(self.case.with_options(similarity="dot"), factor / least))
        found = self.ask(_scaled(self.case, factor))
        return isinstance(found, Outcome) and _distance(expected.values, found.values) <= WIDE

    def ask(self, case: Case) -> Outcome | _Break:
        """Return the result of the target, or how it fails. Raises ``_Late`` if it exceeds its time limit."""
        try:
            return self.target.evaluate(case, self.dtype)
        except Exception as error:  # external code may raise anything
            words = next(iter(described(error).splitlines()), "")
            if isinstance(error, Overtime):
                quantity, direction, value = self.tried
                raise _Late(Limit(self.dtype, quantity, direction, None, value, "late", "", words)) from None
            return _Break("error", words)

    def breaks(self, case: Case, true: Expected) -> Breaks:
        """Return how the results of the target on a case break."""
        found = self.ask(case)
        if isinstance(found, _Break):
            return {"loss": found}
        rows = max(map(_size, case.matrices.values()))
        logit = (1.0 if case.option("similarity") == "cosine" else rows**2) / case.temperature
        # Rounding a logit x changes its exponential by about eps * x, relative to its size.
        allowed = min(max(WIDE, 16 * self.kind.eps * logit), 100 * WIDE)
        pairs = [("loss", np.array(true.values), np.array(found.values))]
        given = case.gradients(found)
        for name, expected in case.gradients(true).items():
            # A negligible gradient, such as that of a saturated loss, may be lost in rounding.
            if name in given and _size(expected) * rows > WIDE * _size(np.array(true.values)):
                pairs.append(("gradient", expected, given[name]))
        kinds = ((part, _kind(expected, result, allowed)) for part, expected, result in pairs)
        return {part: _Break(kind) for part, kind in kinds if kind}


def _size(rows: Matrix) -> float:
    """Return the Euclidean norm, without overflow or underflow of squares."""
    largest = float(np.abs(rows).max(initial=0.0))
    return largest * float(np.linalg.norm(rows / largest)) if largest else 0.0


def _distance(expected: Any, given: Any) -> float:
    """Return the norm of the difference relative to the expected norm; infinite if the shapes differ."""
    expected, given = np.asarray(expected, dtype=np.float64), np.asarray(given, dtype=np.float64)
    if expected.shape != given.shape:
        return math.inf
    with np.errstate(over="ignore"):
        return _size(given - expected) / (_size(expected) or 1.0)


def _kind(expected: Matrix, given: Matrix, allowed: float) -> str:
    """Return the kind of ``Limit`` of a result; "" if its relative error is allowed."""
    if not np.isfinite(given).all():
        return "nan" if np.isnan(given).any() else "infinite"
    return "" if _distance(expected, given) <= allowed else "wrong"
