"""What a target (a loss under test) may have computed for a case, if the loss that it claims to compute is known.

A *variant* is a loss or a modification of it. A *suspect* adds how the arguments are read, and the reduction.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, product
from typing import Any

import numpy as np
import torch

from ..implementations.base import items_of, stacked_order
from ..suite.cases import Case
from ..suite.catalogue import PUBLISHED_BASE
from ..suite.records import Expected, Matrix, Outcome, Truth
from ..truth.baseline import plain_outcome
from . import variants
from .positives import (
    CASE,
    HARD_IGNORED,
    INTERLEAVED_LABELS,
    MIXED_UP,
    POSITIVES,
    QUEUE_ADDED,
    QUEUE_IGNORED,
    STACKED_LABELS,
    Setting,
    case_setting,
    same,
    similarity_rows,
)
from .search import CLOSE_HALF
from .variants import COUNTS, DENOMINATORS, FLOWS, SIMILARITIES, Evaluation, Variant, words_of

Tensor = torch.Tensor

COSTLY = 128
"""``Case.size`` from which most of the time depends on the number of pairs."""

EXPLAINED = 0.02
"""Share of an error that may remain unexplained, for example by rounding to float16."""

EXPLAINED_BY_VALUE = 1e-4
"""``EXPLAINED`` if only one or two values are compared, because more suspects match few values by chance."""

REPRODUCED, REPRODUCED_EXACTLY = 1e-3, 1e-4
"""Relative differences up to which a suspect reproduces results, however large their error is.

The first holds for ``Failure.strict`` if they or the suspect are rounded to less than float64."""

SLIGHT = "the formula is right, but digits are lost"
"""Start of an explanation for rounding errors."""

SAME_DIGITS = f"{SLIGHT}: a straightforward evaluation in float64 gives the same result"
NOT_NAN = "a number is returned, but the case's policy requires NaN"

ROUNDED_GRADIENT = {dtype: 10 * close for dtype, close in CLOSE_HALF.items()}
"""Relative error of a gradient that rounding explains, by dtype, if rounding also explains the value."""

DTYPE_NOISE = 1e-6
"""Relative error up to which a difference is attributed to rounding."""

CLAMPS = (1e-12, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3)
"""Lower limits of norms in torch's ``normalize``, in torch's ``cosine_similarity``, and in other code."""

ADDED_TO_NORMS = (1e-10, 1e-8, 1e-7, 1e-6, 1e-5)
"""Numbers that public losses add to norms, or to their squares."""

SQUARES_OVERFLOW = (1.8e19, 1.3e154)
"""Norms whose squares overflow in float32 and in float64."""

OVERFLOWS = 88.7
"""Logits above this number have exponentials that overflow in float32."""

NO_POSITIVES = "the loss is NaN or infinite if an anchor has no positives"
WITHOUT_POSITIVES = "if no anchor has positives"
NO_NEGATIVES = "the loss is NaN or infinite if an anchor has no negatives"
OVERFLOW = "the loss is NaN or infinite where logits are large"
UNDERFLOW = "the loss is NaN or infinite where exponentials underflow"
CANCELLED = "the loss is minus infinity where a positive dominates the sum of exponentials from which it is subtracted"
HIDDEN = (
    "the loss is NaN or infinite where the logit of a self pair exceeds all other logits of its row by more than 87"
)

QUEUE_DETACHED = "the value is right, but no gradient flows into the negatives"

NOT_FINITE = (NO_POSITIVES, NO_NEGATIVES, UNDERFLOW, CANCELLED, HIDDEN, OVERFLOW)

ORDINARY_LOGIT = 10
"""Largest absolute logit at temperature 0.1 under cosine similarity."""

SIMPLE = (2.0, 0.5, 4.0, 0.25)
"""Factors that a formula may contain. A cause with one of these factors is only reported as possible."""


@dataclass(frozen=True, eq=False)
class Suspect:
    """What a target may have computed for a case.

    Attributes:
        variant: the variant of the loss.
        read_as: computes ``setting`` once. Most suspects are not tested on most cases.
        reduction: a key of ``COUNTS``, "none" or "none_pairs".
        policy: one of ``variants.POLICIES``.
        words: what is wrong; "" if only the variant is wrong.
        general: ``words`` without the numbers of this case; "" if ``words`` has no such numbers.
        scale: factor of the values.
        temperature: the temperature; None for that of the case.
        loss: the loss of the catalogue that takes other pairs as this suspect does; "" if there is none.
    """

    variant: Variant
    read_as: Callable[[], Setting]
    reduction: str
    policy: str
    words: str = ""
    general: str = ""
    scale: float = 1.0
    temperature: float | None = None
    loss: str = ""

    @property
    def setting(self) -> Setting:
        """The rows and pairs, as the target may have read them."""
        return self.read_as()

    def other(self, words: str = "", **parts: Any) -> Suspect:
        """Return a copy whose variant has other parts."""
        return replace(self, variant=replace(self.variant, **parts), words=words)

    def read(self, words: str, general: str = "", **parts: Any) -> Suspect:
        """Return a copy whose setting has other parts."""
        read_as = cache(lambda: replace(self.setting, **parts))
        return replace(self, read_as=read_as, words=words, general=general)


class Failure:
    """One failing check, and the comparison of suspects with it.

    Attributes:
        right: the suspect that computes the case correctly.
        given: [K], the values that the target returned.
        expected: [K], the true values.
        compared: (given, expected) of the values and, if they are complete and finite, of the gradients.
        factor: temperature / base temperature; 1 without a base temperature.
        empty: the anchors without positives.
        pairs: number of positive pairs.
        floors: absolute differences of values and of gradients that are always attributed to rounding.
        strict: whether a suspect must reproduce results that are rounded to less than float64.
    """

    strict = False

    def __init__(self, case: Case, outcome: Outcome, truth: Truth | Expected, noise: float = DTYPE_NOISE) -> None:
        """Read the case.

        Args:
            case: the case.
            outcome: what the target returned.
            truth: the certified results.
            noise: relative difference that is attributed to rounding.
        """
        self.noise = noise
        self.case, self.outcome, self.truth, self.loss = case, outcome, truth, case.entry
        self.rows = torch.cat([torch.tensor(matrix) for matrix in case.matrices.values()]).requires_grad_()
        self.temperature, base = case.temperature, case.option("base_temperature")
        options = {**case.keywords, "direction": case.option("direction")}
        variant, setting = variants.variant_of(self.loss, options), case_setting(case, self.rows)
        reduction, policy = str(case.option("reduction")), str(case.option("no_positive") or "zero")
        self.factor = 1.0 if base is None else self.temperature / float(base)
        self.right = Suspect(variant, lambda: setting, reduction, policy)
        self.anchors, self.positives = case.anchors(), case.positives()
        self.empty = [i for i in self.anchors if not self.positives[i]]
        self.pairs = int(setting.counts.sum())
        self.given, self.expected = (torch.tensor(x.values, dtype=torch.float64) for x in (outcome, truth))
        self.compared = [(self.given, self.expected)]
        matrices = ([case.embeddings[:0], *_gradients(case, x).values()] for x in (outcome, truth))
        given, expected = (torch.tensor(np.concatenate(found)) for found in matrices)
        frozen = [self.part(name) for name in outcome.observed.get("frozen", ())]
        self._constant = torch.stack(frozen).any(dim=0) if frozen else None
        # If the terms of a gradient cancel, their rounding errors remain.
        size = float(self.expected.abs().nan_to_num().sum() / (self.temperature * self.rows.detach().norm()))
        self.floors = (0.0, noise / 10 * size if math.isfinite(size) else 0.0)
        if len(given) == len(expected) == len(self.rows) and bool((given + expected).isfinite().all()):
            self.compared.append((given, self._moving(expected)))
        self._sizes: dict[int, tuple[Tensor, Tensor]] = {}
        self._evaluations: dict[tuple[Setting, str, float, bool], Evaluation | None] = {}

    def value(self, suspect: Suspect) -> Tensor:
        """[K], the values of a suspect; NaN if it does not apply, or has another number of values."""
        variant, temperature = suspect.variant, suspect.temperature or self.temperature
        key = suspect.setting, variant.positives, temperature, torch.is_grad_enabled()
        if key not in self._evaluations:
            setting = POSITIVES[variant.positives].change(suspect.setting)
            self._evaluations[key] = None if setting is None else Evaluation(setting, temperature)
        evaluation = self._evaluations[key]
        value = evaluation.loss(variant, suspect.reduction, suspect.policy) if evaluation else self.given[:0]
        same = len(value) == len(self.given)
        return value * (self.factor * suspect.scale) if same else torch.full_like(self.given, math.nan)

    def remaining(self, suspect: Suspect) -> float:
        """Return the share of the error that a suspect leaves; infinity if it does not explain value and gradient."""
        with torch.no_grad():  # few values agree, and a graph takes time
            value = self.value(suspect)
        allowed = EXPLAINED_BY_VALUE if len(self.compared) == 1 and len(value) <= 2 else EXPLAINED
        dtype, _ = variants.ROUNDED.get(suspect.variant.similarity, ("", False))
        remaining = [self.left(value, 0, rounded=bool(dtype))]
        if remaining[0] <= allowed and len(self.compared) > 1:
            # With 0 * rows, autograd also accepts values that do not depend on the rows.
            total = self.value(suspect).sum() + 0 * self.rows.sum()
            (gradient,) = torch.autograd.grad(total, self.rows, retain_graph=True)
            remaining.append(self.left(gradient, 1, rounded=bool(dtype)))
            given = self.compared[1][0]
            if dtype and (gradient - given).norm() <= ROUNDED_GRADIENT[dtype] * given.norm():
                remaining[1] = 0.0
        # NaN makes both comparisons False.
        return max(remaining) if remaining[0] <= allowed and remaining[-1] <= EXPLAINED else math.inf

    def without(self, suspect: Suspect, *, gradient: bool) -> Outcome:
        """Return the results of the target without the effect of a suspect: target - (suspect - right).

        Args:
            suspect: a suspect with the setting of ``right``.
            gradient: whether to include the gradients.
        """
        case, places = self.case, similarity_rows(self.case)
        pair = [self.value(one) for one in (suspect, self.right)]
        values = self.given - (pair[0] - pair[1]).detach()
        anchors = None
        if self.outcome.anchors is not None:
            evaluation = Evaluation(self.right.setting, self.temperature)
            more, right = (evaluation.anchors(one.variant)[0].detach() for one in (suspect, self.right))
            effect = ((more - right) * self.factor).tolist()
            anchors = {i: value - effect[places[i][0]] for i, value in self.outcome.anchors.items()}
        found = Outcome(values.tolist(), anchors=anchors)
        if not gradient or self.outcome.gradient is None:
            return found
        slopes = [torch.autograd.grad(value.sum(), self.rows, retain_graph=True)[0] for value in pair]
        parts = torch.split(slopes[0] - slopes[1], [len(matrix) for matrix in case.matrices.values()])
        effects = dict(zip(case.matrices, parts, strict=True))
        gradients = {name: rows - effects[name].numpy() for name, rows in _gradients(case, self.outcome).items()}
        return replace(found, gradient=gradients.pop(case.first), other_gradients=gradients)

    def _moving(self, gradient: Tensor) -> Tensor:
        """Return a gradient with rows of 0 for matrices that the target treats as constant, as claimed."""
        return gradient if self._constant is None else gradient.masked_fill(self._constant, 0.0)

    def left(self, found: Tensor, place: int, *, rounded: bool = False) -> float:
        """Return |given - found| / |given - expected|, or 0 if |given - found| is only noise.

        Args:
            found: values or a gradient, which may explain the result.
            place: 0 compares values, 1 compares gradients.
            rounded: whether ``found`` is rounded to 16 bits.
        """
        given, expected = self.compared[place]
        found = self._moving(found) if place == 1 else found
        if place not in self._sizes:
            self._sizes[place] = (given - expected).norm(), expected.norm()
        (error, size), left = self._sizes[place], (given - found).norm()
        noise = (self.noise * size).clamp(min=self.floors[place])
        exact = self.noise < DTYPE_NOISE and not rounded
        most = REPRODUCED_EXACTLY if exact else REPRODUCED if self.strict else math.inf
        if left > (most * given.norm()).maximum(noise):
            return math.inf
        return 0.0 if left <= noise else float(left / error.maximum(noise))

    def read_again(self, words: str, arguments: Mapping[str, Any] | None = None, **keywords: Any) -> Suspect:
        """Return ``right``, with the setting of other arguments or keywords."""
        arguments, keywords = {**self.case.arguments, **(arguments or {})}, {**self.case.keywords, **keywords}
        case = replace(self.case, arguments=arguments, keywords=keywords)
        return replace(self.right, read_as=cache(lambda: case_setting(case, self.rows)), words=words)

    def part(self, name: str) -> Tensor:
        """Bool [M, 1], which rows belong to a matrix of the case."""
        sizes = [len(matrix) for matrix in self.case.matrices.values()]
        return torch.tensor(np.repeat([other == name for other in self.case.matrices], sizes))[:, None]


def _gradients(case: Case, result: Outcome | Truth | Expected) -> dict[str, Matrix]:
    found = {case.first: result.gradient, **result.other_gradients}
    return {name: np.asarray(found[name], np.float64) for name in case.matrices if found.get(name) is not None}


def work_of(case: Case) -> float:
    """Return the work of testing one suspect on a case; 1 on a small case."""
    return 1 + (case.size / COSTLY) ** 2


def is_explained(case: Case) -> bool:
    """Return whether failures of a case can be explained.

    * It must have no ``hardness_mode``.
    * Each anchor must have one row of similarities, without repeated columns.
    """
    bands: dict[int, list[tuple[str, str]]] = {}
    for block in case.blocks():
        bands.setdefault(block.part[0].start or 0, []).append((block.left, block.right))
    one_row = all(len(set(band)) == len(band) and len({left for left, _ in band}) == 1 for band in bands.values())
    return one_row and case.option("hardness_mode") in (None, "none")


def other_weights(found: Failure) -> Iterator[str]:
    """Yield mistakes with the weights of a case that explain the failure; none for a case without weights."""
    for words, case, factor in _reweighted(found.case):
        outcome = plain_outcome(case, "float64")
        compared = [torch.tensor(outcome.values)]
        if len(found.compared) > 1:
            compared.append(torch.tensor(np.concatenate([*_gradients(case, outcome).values()])))
        if all(len(x) == len(y) for x, (y, _) in zip(compared, found.compared, strict=True)) and all(
            found.left(factor * x, place) <= EXPLAINED for place, x in enumerate(compared)
        ):
            yield words


def _reweighted(case: Case) -> Iterator[tuple[str, Case, float]]:
    """Yield mistakes with the weights of a case: (words, other case, factor).

    The result of the mistake is the correct result of the other case, times the factor.
    """
    names = {"positive_weights": "positives", "negative_weights": "negatives", "anchor_weights": "anchors"}
    given = {name: np.array(case.arguments[name]) for name in names if name in case.arguments}

    def changed(name: str, weights: Matrix | None) -> Case:
        arguments = {**case.arguments, name: None if weights is None else weights.tolist()}
        return replace(case, arguments={key: x for key, x in arguments.items() if x is not None})

    for name, weights in given.items():
        yield f"the weights of {names[name]} have no effect", changed(name, None), 1.0
        yield f"the weights of {names[name]} are applied twice", changed(name, weights**2), 1.0
        if weights.ndim == 2 and len(weights) == weights.shape[1]:
            yield f"the weights of {names[name]} are read by columns", changed(name, weights.T), 1.0
    if "negative_weights" in given:
        once = (given["negative_weights"] > 0).astype(float)
        yield "negatives with a weight above 0 count once, whatever it is", changed("negative_weights", once), 1.0
    if "positive_weights" in given:
        divisor = case.option("weights_divisor")
        other, by = ("weight", "sum of weights") if divisor == "count" else ("count", "number")
        words = f"the weighted sum over the positives is divided by their {by}: weights_divisor={other} is computed"
        yield words, replace(case, keywords={**case.keywords, "weights_divisor": other}), 1.0
    if "anchor_weights" in given and case.option("reduction") == "mean" and case.counted() and not case.groups():
        counted = case.counted()
        words = "the mean divides by the number of anchors, not by the sum of their weights"
        yield words, case, sum(case.row_weights()[i] for i in counted) / len(counted)


# Explanations without a variant


def largest_logit(found: Failure, similarity: str) -> float:
    """Return the largest logit of a pair that the loss compares, under a similarity of ``SIMILARITIES``."""
    setting, rows = found.right.setting, found.rows.detach()
    logits = SIMILARITIES[similarity](rows, rows, setting) / found.temperature
    return float(logits[setting.member & setting.anchors[:, None]].max())


def not_finite(found: Failure) -> Iterator[tuple[str, str]]:
    """Explain NaN or infinity where a finite number is expected.

    Yields:
        The explanation for all cases, and for this case. Two causes may explain the same case.
    """
    setting, rows, members = found.right.setting, found.rows.detach(), found.case.members()
    minus = bool((found.given == -math.inf).any())
    value = "NaN" if bool(found.given.isnan().any()) else "minus infinity" if minus else "infinity"
    logits = SIMILARITIES[found.right.variant.similarity](rows, rows, setting) / found.temperature
    compared = setting.member & setting.anchors[:, None]
    seen = logits.masked_fill(~compared, -math.inf)
    largest, least = float(seen.max()), float(logits.masked_fill(~compared, math.inf).min())
    overflow = f"{value}: the largest logit is {largest:.4g}, and exponentials overflow"
    gaps = (seen.amax(dim=1, keepdim=True) - logits)[setting.positive & compared]
    if value == "infinity" and bool((gaps > OVERFLOWS).any()):
        overflow += ", or that of a positive underflows before the logarithm"
    if found.empty:
        words = f"{_have(found.empty)} no positives, and the loss becomes {value}: 0 divided by 0, or a logarithm of 0"
        yield NO_POSITIVES, f"{words}; or {overflow}" if largest > OVERFLOWS else words
        return
    if full := [i for i in found.anchors if len(found.positives[i]) == len(members[i])]:
        yield NO_NEGATIVES, f"{_have(full)} no negatives, and the loss becomes {value}"
        return
    overflows = largest > OVERFLOWS and not minus
    if overflows:
        yield OVERFLOW, overflow
    # If the maximum is subtracted, nothing overflows, but the self pair may hide the others. Two towers have none.
    own = logits.masked_fill(~setting.own | found.case.entry.two_towers, -math.inf).amax(dim=1)
    hidden = (own - seen.amax(dim=1) > 87).nonzero().reshape(-1).tolist()
    if hidden:
        words = f"{value}: the self pair of row {hidden[0]} has the largest logit, and the other exponentials underflow"
        yield HIDDEN, f"{words}; leave it out before the maximum is taken"
    if overflows:
        return
    reach = max(-least, largest)
    # The significand, and the exponent below which an exponential is 0, with or without a maximum that is subtracted.
    bits, lowest = (53, 745) if found.noise < DTYPE_NOISE else (24, 103)
    if minus and max(reach, largest - least) < lowest:
        ahead = seen.amax(dim=1) - seen.masked_fill(setting.positive, -math.inf).amax(dim=1)
        if bool((ahead > bits * math.log(2)).any()):
            yield CANCELLED, "minus infinity: the difference is rounded to 0; leave the positive out before the sum"
    elif minus:
        yield UNDERFLOW, "minus infinity: every term of a denominator underflows, and the logarithm of 0 is taken"
    elif reach > 80:
        yield UNDERFLOW, f"{value}: exponentials overflow or underflow in the dtype; logits reach {largest:.4g}"


LOST = "the formula is right, but digits are lost, or a tiny number is added or clamped"
BROKEN_GRADIENT = "the value is right, but the gradient is NaN or infinite"


def slight(found: Failure) -> tuple[str, str] | None:
    """Explain rounding errors, and gradients that are not finite although the value is correct.

    Returns:
        The explanation for all cases, and for this case; None if the failure is neither.
    """
    sizes = [float(((x - true).norm() / true.norm()).nan_to_num()) for x, true in found.compared]
    if max(sizes) > DTYPE_NOISE:
        return None
    broken = {name: ~np.isfinite(rows).all(axis=1) for name, rows in _gradients(found.case, found.outcome).items()}
    if where := ", ".join(f"{rows.sum()} of {rows.size} rows of {name}" for name, rows in broken.items() if rows.any()):
        words = "possibly because a branch that torch.where discards divides by 0 or takes the logarithm of 0"
        return BROKEN_GRADIENT, f"{BROKEN_GRADIENT} in {where}, {words}"
    return LOST, f"{LOST}: the relative error is {max(sizes):.1g}"


NORMS = "rows are not normalised where their norm is clamped, or its square underflows or overflows"


EXTREME = (NORMS, LOST, BROKEN_GRADIENT, *NOT_FINITE)
"""Reasons that are not about the formula."""


def clamped_norms(found: Failure) -> tuple[str, str] | None:
    """Explain rows that are not normalised because their norm is clamped, underflows or overflows.

    Returns:
        The explanation for all cases, and for this case; None if this does not explain the values.
    """
    if found.right.variant.similarity != "cosine":
        return None
    rows = found.rows.detach()
    largest = rows.abs().amax(1, keepdim=True)
    norms = largest * (rows / largest).norm(dim=1, keepdim=True)
    for end, clamp in product(SQUARES_OVERFLOW, CLAMPS):
        bad = ((norms < clamp) | (norms > end))[:, 0].nonzero()[:, 0].tolist()
        unit = torch.where(norms > end, 0.0, rows / norms.clamp(min=clamp))
        if bad and found.left(found.value(_dot(found, unit)).detach(), 0) <= EXPLAINED_BY_VALUE:
            which = f"row {bad[0]} is" if len(bad) == 1 else f"{len(bad)} rows, including row {bad[0]}, are"
            norm = float(norms[bad[0]])
            small = f"the norm {norm:.2g} is clamped, or its square underflows"
            large = "the norm overflows" if math.isinf(norm) else f"the square of the norm {norm:.2g} overflows"
            return NORMS, f"{which} not normalised: {small if norm < clamp else large}"
    return None


def factors_of(found: Failure) -> tuple[float, float] | None:
    """Return the factors by which the values and the gradient are wrong; None if factors do not explain them.

    If only the gradient is wrong, the first factor is 1. Otherwise, both factors are equal.
    """
    if not found.expected.any():
        return None
    shares = (1e-3, EXPLAINED)
    factors = [_ratio(*pair, share) for pair, share in zip(found.compared, shares, strict=False) if pair[1].any()]
    factor, slope = factors[0], factors[-1]
    if factor is None or slope is None:
        return None
    if len(factors) > 1 and abs(factor - 1) < 1e-4 and abs(slope - 1) > 1e-3:
        return 1.0, slope
    if abs(factor - 1) <= 1e-5 or abs(factor - slope) > EXPLAINED * abs(factor - 1):
        return None
    return factor, factor


def gradient_words(slope: float) -> str:
    """Describe a gradient that is wrong by a factor although the value is correct."""
    gradient = f"the gradient is {slope:.6g} times the true one" if abs(slope) >= 1e-9 else "the gradient is 0"
    return f"the value is right, but {gradient}"


def factor_words(factor: float) -> str:
    """Describe values that are wrong by a factor."""
    if abs(factor) < 1e-12:
        return "the loss is 0"
    if factor < 0:
        times = "" if abs(factor + 1) < 1e-5 else f", and are {-factor:.6g} times as large"
        return f"values have the wrong sign{times}"
    return f"values are {max(factor, 1 / factor):.6g} times too {'large' if factor > 1 else 'small'}"


def _ratio(given: Tensor, expected: Tensor, share: float) -> float | None:
    """Return the factor between a result and the truth; None if the factor leaves more than ``share`` of the error."""
    factor = float((given * expected).sum() / (expected * expected).sum())
    allowed = share * float((given - expected).norm()) + DTYPE_NOISE * float(given.norm())
    return factor if float((given - factor * expected).norm()) <= allowed else None


def causes(found: Failure) -> Iterator[tuple[float, str, str]]:
    """Yield possible wrong factors: (factor, cause, cause without the numbers of this case)."""
    anchors, pairs, temperature, scale = len(found.anchors), found.pairs, found.temperature, found.factor
    mean, counted = found.right.reduction == "mean", anchors - len(found.empty)
    number = counted if found.right.policy == "drop" else anchors
    total, sums = f"the sum over {number} anchors is", "the sum over the anchors is"
    if mean and number > 2:
        yield number, f"{total} not divided by their number", f"{sums} not divided by their number"
    if found.right.reduction == "sum" and number > 2:
        words = "divided by their number, but the sum is required"
        yield 1 / number, f"{total} {words}", f"{sums} {words}"
    if mean and 0 < counted < anchors:
        had = f"{_have(found.empty)} no positives and {'was' if len(found.empty) == 1 else 'were'}"
        remedy = " (if intended: --set no_positive=drop)" * ("no_positive" in found.case.entry.choices)
        general = "anchors without positives are"
        yield anchors / counted, f"{had} left out of the mean{remedy}", f"{general} left out of the mean"
        yield counted / anchors, f"{had} counted in the mean, as 0", f"{general} counted in the mean, as 0"
    words = "values are multiplied by"
    yield temperature, f"{words} the temperature, {temperature:g}", f"{words} the temperature"
    for base in map(float, filter(None, (PUBLISHED_BASE, found.case.option("base_temperature")))):
        cause = f"{words} temperature/{base:g}, a base temperature not required here"
        yield temperature / base, cause, cause
    if scale != 1:
        cause = f"{words} base_temperature/temperature, not by its inverse"
        yield scale**-2, cause, cause
        cause = "values are not multiplied by temperature/base_temperature"
        yield 1 / scale, cause, cause
    if mean and pairs not in (0, number):
        yield (
            number / pairs,
            f"{total} divided by {pairs}, the number of pairs",
            f"{sums} divided by the number of pairs",
        )


def _have(rows: list[int]) -> str:
    *first, last = rows
    return f"anchors {', '.join(map(str, first))} and {last} have" if first else f"anchor {last} has"


# Explanations by a variant


def suspects(found: Failure) -> Iterator[Suspect]:
    """Yield suspects with one mistake."""
    right, variant, anchors, pairs = found.right, found.right.variant, len(found.anchors), found.pairs
    if right.reduction in ("mean_pairs", "sum_pairs"):
        summed = right.reduction == "sum_pairs"
        words = "divided by their number, but the sum is required" if summed else "not divided by their number"
        other = "mean_pairs" if summed else "sum_pairs"
        yield replace(right, reduction=other, words=f"the sum over the pairs is {words}")
        for reduction, policy in (("mean", "zero"), ("mean", "drop"), ("sum", "zero")):
            words = f"the {reduction} is over {anchors} anchors, not over {pairs} pairs"
            general = f"the {reduction} is over the anchors, not over the pairs"
            yield replace(right, reduction=reduction, policy=policy, words=words, general=general)
    elif not found.case.separate and variant.form == "mean":
        general = "the mean is over the positive pairs, not over the anchors"
        words = general if pairs == anchors else f"the mean is over {pairs} pairs, not over {anchors} anchors"
        yield replace(right, reduction="mean_pairs", policy="zero", words=words, general=general)
    if right.reduction == "mean":
        for count in (name for name in COUNTS if name in variants.WRONG_COUNTS):
            # A pair is a class: both directions, or both views, have an anchor for it.
            halves = count == variants.BY_CLASSES and 2 * COUNTS[count](right.setting) == anchors
            words = variants.ADDED.get(found.loss.positives_by, count) if halves else count
            yield replace(right, reduction=count, words=words)
    # Misread arguments come first, because a wrong form may have the same result by chance.
    yield from (*_batch_settings(found), *_case_settings(found))
    for flow, words in FLOWS.items():
        if words:
            yield right.other(f"the value is right, but {words}", flow=flow)
    forms = ("mean", "inside", "inside, summed")
    parts = {"similarity": ("cosine", "dot"), "denominator": variants.RIGHT_DENOMINATORS, "form": forms}
    for part, names in parts.items():
        for name in names if part == "similarity" or (variant.in_parts and not variant.by_form) else ():
            yield right.other(**{part: name})
    chosen = dict(variant.options)
    for option in () if variant.in_parts else found.loss.formula_options:
        value = chosen.get(option, found.loss.keywords[option])
        for choice in found.loss.choices.get(option, ()):
            words = f"{option}={choice} is computed instead of {option}={value}"
            yield right.other(words, options=tuple({**chosen, option: choice}.items()))
    if variant.guard:
        yield right.other("no epsilon is added", guard="")
        yield right.other(FLOWS["maximum"], flow="maximum")
    yield from (replace(right, variant=wrong) for wrong in _wrong_variants(variant, found.loss.two_towers))
    yield from tiny_epsilons(found)
    if variant.similarity == "cosine":
        yield from _other_norms(found)


@cache
def _wrong_variants(right: Variant, two_towers: bool) -> Sequence[Variant]:
    """Variants with one mistake. Two towers have no self pairs to subtract."""
    every = (*variants.temperings(right), *variants.variations(right, CASE))
    return [wrong for wrong in every if not (two_towers and wrong.denominator.startswith("subtract"))]


def tiny_epsilons(found: Failure) -> Iterator[Suspect]:
    """Yield ``TINY_GUARDS`` if the case has extreme logits."""
    variant, setting = found.right.variant, found.right.setting
    if not variant.takes_guard:
        return
    rows = found.rows.detach()
    logits = SIMILARITIES[variant.similarity](rows, rows, setting) / found.temperature
    compared = setting.member & setting.anchors[:, None]
    largest = logits.where(compared, 0.0).amax(dim=1, keepdim=True).clamp(min=0)
    if bool((compared & (largest - logits > ORDINARY_LOGIT)).any()):
        yield from (found.right.other(guard=guard) for guard in variants.TINY_GUARDS)


def _dot(found: Failure, rows: Tensor, words: str = "") -> Suspect:
    """Return the suspect that computes dot products of these rows."""
    return found.right.read(words, rows=rows).other(words, similarity="dot")


NARROWED: Mapping[str, Callable[[int], object]] = {
    "float32: large labels that lie close together": np.float32,
    "float16: large labels": lambda x: np.float16(float(x)),
    "32 bits or fewer: labels that differ by a multiple of 2^32": lambda x: x % 2**32,
    "8 bits: labels that differ by a multiple of 256": lambda x: x % 256,
}
"""Conversions of labels to narrower types, by a description of the type and of the labels that become equal."""


CLAMPED_TEMPERATURES = (0.01, 1.0, 2.0, 5.0, 10.0)
"""Lowest temperatures of public losses that clamp them. A learned scale is often limited to 1 to 100."""


def _batch_settings(found: Failure) -> Iterator[Suspect]:
    case, suspect, right, n = found.case, found.right, found.right.setting, found.case.n
    limits = [("below", it) for it in CLAMPED_TEMPERATURES if it > found.temperature]
    for side, limit in (*limits, *[("above", 1.0)] * (found.temperature > 1)):
        words = f"the temperature is {limit:g}, not {found.temperature:g}"
        yield replace(suspect, temperature=limit, words=words, general=f"temperatures {side} {limit:g} are clamped")
    labels = {name: case.arguments[name] for name in ("labels", "ref_labels") if name in case.arguments}
    for words, narrow in NARROWED.items() if labels else ():
        with np.errstate(over="ignore"):
            given = {name: [narrow(int(x)) for x in side] for name, side in labels.items()}
        if len({*chain(*given.values())}) == len({*chain(*labels.values())}):
            continue  # no labels become equal
        yield found.read_again(f"labels are narrowed to {words} become one class", given)
    if labels and min(labels["labels"]) < 0:
        negative = torch.zeros(len(found.rows), dtype=torch.bool)
        negative[:n] = torch.tensor([int(x) < 0 for x in labels["labels"]])
        positive = right.positive & ~negative & ~negative[:, None]
        yield suspect.read("rows with a negative label are not positives, and have none", positive=positive)
    if len(case.matrices) > 1:
        return
    if labels and len((items := items_of(case))[0]) > 1:
        yield from _mixed_up_views(found, items)
    if n % 2:
        kept = torch.arange(n) < n - 1
        member, positive = (mask & kept & kept[:, None] for mask in (right.member, right.positive))
        words = f"the last of {n} rows is dropped: the batch is cut to an even number of rows"
        general = "the last row is dropped if their number is odd"
        yield suspect.read(words, general, member=member, positive=positive, anchors=right.anchors & kept)
    unit = found.rows.detach() / found.rows.detach().norm(dim=1, keepdim=True)
    _, number = np.unique(unit.numpy(), axis=0, return_inverse=True)
    apart = ~same(torch.from_numpy(number)) | right.own
    words = "rows that equal the anchor are left out, as if they were the anchor itself"
    if not bool(apart.all()):
        yield suspect.read(words, member=right.member & apart, positive=right.positive & apart)
    if "partners" in case.arguments:
        view = torch.tensor(stacked_order(case)).argsort() // (n // 2)
        member = right.positive | (same(view) & right.member)
        yield suspect.read("only rows of the anchor's own view are negatives", member=member)


def _mixed_up_views(found: Failure, items: Sequence[tuple[int, ...]]) -> Iterator[Suspect]:
    """Yield mixed layouts: rows of stacked views with labels of interleaved views, and the reverse."""
    labels, b, views = found.case.arguments["labels"], len(items), len(items[0])
    interleaved = [row for item in items for row in item]
    stacked = [item[v] for v in range(views) for item in items]
    orders = (
        (STACKED_LABELS, interleaved, [place % b for place in range(b * views)]),
        (INTERLEAVED_LABELS, stacked, [place // views for place in range(b * views)]),
    )
    for words, rows, places in orders:
        given = {row: labels[items[place][0]] for row, place in zip(rows, places, strict=True)}
        yield found.read_again(words, {"labels": [given[row] for row in range(found.case.n)]})


def _case_settings(found: Failure) -> Iterator[Suspect]:
    case, suspect, right, n = found.case, found.right, found.right.setting, found.case.n
    if case.option("anchors") is not None:
        words = f"all {n} rows are anchors, not only the {len(found.anchors)} chosen"
        every = found.read_again(words, anchors=None)
        yield replace(every, general="all rows are anchors, not only those that are chosen")
    if "self_rows" in case.arguments:
        yield found.read_again("the reference row that is the anchor itself is not excluded", {"self_rows": [-1] * n})
    for name, pairs in (("ignored", "ignored pairs"), ("ignored_ids", "pairs of rows with equal ids")):
        if name in case.arguments:
            yield found.read_again(f"{pairs} are not left out", {name: None})
    if "direction" in found.loss.keywords:
        m = len(case.others["embeddings_b"])
        anchors = {"both": f"all {n + m} rows", "a_to_b": f"the {n} rows of a", "b_to_a": f"the {m} rows of b"}
        for direction, name in anchors.items():
            words = f"the anchors are {name}, not {anchors[case.option('direction')]}"
            general = f"the anchors are {re.sub(' [0-9]+ ', ' ', name)}"
            yield replace(found.read_again(words, direction=direction), general=general)
        if "negatives" not in case.others:
            member = ~torch.eye(n + m, dtype=torch.bool) & right.anchors[:, None]
            words = "the denominator also contains rows of the anchor's own tower"
            loss = "nt_xent" if case.option("direction") == "both" else ""
            yield replace(suspect.read(words, member=member), loss=loss)
    if "partners" in case.arguments and "ref_embeddings" not in case.others:
        yield mixed_up(found)
    if "hard_negatives" in case.others:
        yield suspect.read(HARD_IGNORED, member=right.member & ~found.part("hard_negatives").T)
    if "negatives" in case.others:
        b, queue = found.part("embeddings_b")[:, 0], found.part("negatives")
        # The tower of the anchor's positive.
        tower = torch.where((right.positive & b).any(dim=1)[:, None], b, ~b & ~queue[:, 0]) & right.anchors[:, None]
        yield suspect.read(QUEUE_IGNORED, member=tower)
        yield suspect.read(QUEUE_ADDED, member=right.member | tower)
        detached = torch.where(queue, found.rows.detach(), found.rows)
        yield suspect.read(QUEUE_DETACHED, rows=detached)


def mixed_up(found: Failure) -> Suspect:
    """Return the suspect that reads stacked views of partners as interleaved ones."""
    item, right = torch.tensor(stacked_order(found.case)).argsort() // 2, found.right
    return right.read(MIXED_UP, positive=same(item) & right.setting.member)


def _other_norms(found: Failure) -> Iterator[Suspect]:
    rows, dot = found.rows, partial(_dot, found)
    norms = rows.norm(dim=1, keepdim=True)
    unit = rows / norms
    for epsilon in ADDED_TO_NORMS:
        yield dot(rows / (norms + epsilon), f"{epsilon:g} is added to the norms")
        yield dot(rows / (norms**2 + epsilon).sqrt(), f"{epsilon:g} is added to the squared norms")
    if "negatives" in found.case.others:
        queue = found.part("negatives")
        yield dot(torch.where(queue, rows, unit), variants.QUEUE_NOT_NORMALISED)
        tempered = torch.where(queue, unit * found.temperature, unit)
        yield dot(tempered, "the temperature is not applied to the negatives that are passed")
    if found.loss.two_towers:
        for name, other in (found.loss.embeddings, found.loss.embeddings[::-1]):
            yield dot(torch.where(found.part(other), rows, unit), f"only {name} is normalised; {other} is not")
    centred = rows - rows.mean(dim=1, keepdim=True)
    layer = centred / (centred**2).mean(dim=1, keepdim=True).sqrt()
    yield dot(layer, "a layer norm is applied to the rows: they are centred and have norm sqrt(D)")
    yield found.right.read("rows are centred before they are normalised", rows=centred)


# Descriptions

CHOICES: Mapping[str, str] = {
    "dot": "similarities are raw dot products: rows are not normalised",
    "cosine": "rows are normalised, but raw dot products are required",
    "inside": "the mean over the positives is taken inside the logarithm, not outside it",
    "inside, summed": "the ratios are summed inside the logarithm, not averaged: 1/|P| is missing",
    "mean": "the mean over the positives is taken outside the logarithm, not inside it",
}
"""Descriptions of parts that are wrong for a case, but correct for another loss or option."""


PARTS = ("positives", "similarity", "tempering", "numerator", "denominator", "guard", "form", "flow")


def words_for_case(found: Failure, other: Variant) -> str:
    """Describe how a variant differs from the loss of the case, with counts at one anchor."""
    right, anchor = found.right.variant, _first_wrong_anchor(found)
    part = next((name for name in PARTS if getattr(other, name) != getattr(right, name)), None)
    if part is None:
        return "; ".join(other.words())
    choice = getattr(other, part)
    if part == "denominator":
        return _denominator_words(found, right.denominator, choice)
    details = dict.fromkeys(("tempering", "numerator"), f" ({found.temperature:g})")
    count = len(found.positives[anchor])
    details["form"] = f" (anchor {anchor} has {count} positive{'s' * (count != 1)})"
    known = OTHER_FORMS.get((right.form, choice)) or CHOICES.get(choice)
    return known or words_of(choice) + details.get(part, "")


OTHER_DENOMINATORS: Mapping[tuple[str, str], str] = {
    ("all", "one_positive"): "lacks the other positives",
    ("all", "only_negatives"): "lacks the positives",
    ("one_positive", "only_negatives"): "lacks its own positive",
    ("one_positive", "all"): "contains the other positives",
    ("only_negatives", "all"): "contains the positives",
    ("only_negatives", "one_positive"): "contains the positive itself",
}
"""How two correct denominators differ, by (required, computed)."""


OTHER_FORMS: Mapping[tuple[str, str], str] = {
    ("inside, summed", "inside"): "the ratios are averaged inside the logarithm, not summed",
}
"""How two correct forms differ, by (required, computed). ``CHOICES`` has the other descriptions."""


def general_words(found: Failure, suspect: Suspect) -> str:
    """Describe a suspect without the numbers of one case."""
    if suspect.general or suspect.words:
        return suspect.general or suspect.words
    return _words_of_variant(found.right.variant, suspect.variant)


@cache
def _words_of_variant(right: Variant, other: Variant) -> str:
    differ = [
        (getattr(right, name), choice) for name in PARTS if (choice := getattr(other, name)) != getattr(right, name)
    ]
    return "; ".join(_general_words(part, choice) for part, choice in differ)


def right_elsewhere(right: Variant, other: Variant) -> list[str]:
    """Describe the parts of a variant that are correct for another loss or option, but wrong here."""
    pairs = ((getattr(right, name), getattr(other, name)) for name in PARTS)
    return [words for one, choice in pairs if one != choice and (words := _words_elsewhere(one, choice))]


def _words_elsewhere(right: str, other: str) -> str:
    name, _, mistake = other.partition(", ")
    base = name if mistake in ("self", "leak", "leaks", "mean") else other
    if (right, base) in OTHER_DENOMINATORS:
        return f"the denominator {OTHER_DENOMINATORS[right, base]}"
    return OTHER_FORMS.get((right, other)) or CHOICES.get(other, "")


def _general_words(right: str, other: str) -> str:
    both = [words_of(other)] * (other in DENOMINATORS) + [_words_elsewhere(right, other)]
    return "; ".join(filter(None, both)) or words_of(other) or f"{other} instead of {right}"


def _first_wrong_anchor(found: Failure) -> int:
    """Return the first anchor that is known to be wrong, or else the first anchor."""
    true, given = found.truth.anchors, found.outcome.anchors or {}
    wrong = (i for i, x in given.items() if i in true and abs(x - true[i]) > 1e-3 * (abs(true[i]) + 1e-12))
    return next(wrong, found.anchors[0])


def _denominator_words(found: Failure, right: str, other: str) -> str:
    """Describe a wrong denominator, with the number of terms at one anchor."""
    expected, given, places = DENOMINATORS[right], DENOMINATORS[other], similarity_rows(found.case)
    counts = torch.stack([kind.terms(found.right.setting) for kind in (given, expected)], dim=1).int().tolist()
    comparable = given.combine is expected.combine and other != "one"
    for i in (_first_wrong_anchor(found), *found.anchors) if comparable else ():
        seen, wanted = counts[places[i][0]]
        if seen == wanted or not found.positives[i]:
            continue
        counted = f"{seen} term{'' if seen == 1 else 's'} instead of {wanted}"
        difference = "contains the anchor itself" if given.own else OTHER_DENOMINATORS.get((right, other))
        if difference:
            return f"the denominator of anchor {i} {difference}: {counted}"
        return f"{given.words} of anchor {i}: {counted}" if given.leaks else f"{given.words} (anchor {i}: {counted})"
    return given.words or f"the denominator is {other}, not {right}"
