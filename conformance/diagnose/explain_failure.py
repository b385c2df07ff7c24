"""What a failing check computed instead: the variant that explains its value and its gradient, in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..implementations.base import stacked_order
from ..suite.cases import Case
from ..suite.records import Outcome, Truth
from .positives import CASE, POSITIVES, Setting, case_setting, matrix_rows, same, similarity_rows
from .variants import (
    DENOMINATORS,
    FLOWS,
    GUARDS,
    POLICIES,
    SIMILARITIES,
    Evaluation,
    Variant,
    log_sum,
    reduce_anchors,
    temperings,
    variant_of,
    variations,
    words_of,
)

Tensor = torch.Tensor

LARGEST_EXPLAINED = 80
"""The size of a case up to which its failures are explained: hundreds of variants are evaluated for each."""

EXPLAINED = 0.02
"""How much of an error may remain where value and gradient are both compared: halves are rounded that much."""

EXPLAINED_BY_VALUE = 1e-4
"""The same where there is one number alone, which one of hundreds of variants would meet by chance otherwise."""

SLIGHT = "it is off by"
"""The beginning of a text that reports lost digits and nothing else."""

DTYPE_NOISE = 1e-6
"""An error relative to the truth below which nothing in it can be explained."""

CLAMP = 1e-12
"""The least norm that torch divides by in ``normalize``."""

SQUARES_OVERFLOW = (1.8e19, 1.3e154)
"""Norms whose squares leave float32, and float64."""

SIMPLE = (2.0, 0.5, 4.0, 0.25)
"""Factors that stand in formulas by themselves, so that another number of the same size may be a coincidence."""


@dataclass(frozen=True, eq=False)
class Suspect:
    """What a target may have computed for a case.

    Attributes:
        variant: its parts.
        setting: the rows and who is compared with whom, as the target may have seen them.
        reduction: of the sum: a name of ``COUNTS``, or "none".
        policy: for anchors without positives.
        factor: what values are multiplied by.
        words: what is wrong, where the variant does not say it.
    """

    variant: Variant
    setting: Setting
    reduction: str
    policy: str
    factor: float
    words: str = ""

    def other(self, words: str = "", **parts: Any) -> Suspect:
        """The same with other parts of its variant."""
        return replace(self, variant=replace(self.variant, **parts), words=words)


class _Failure:
    """One failing check, and the suspects compared with it."""

    def __init__(self, case: Case, outcome: Outcome, truth: Truth) -> None:
        self.case, self.outcome, self.truth = case, outcome, truth
        self.loss = case.entry
        self.rows = torch.cat([torch.tensor(matrix) for matrix in case.matrices.values()]).requires_grad_()
        self.temperature = case.temperature
        base = case.option("base_temperature")
        self.right = Suspect(
            variant_of(self.loss, case.keywords),
            case_setting(case, self.rows),
            str(case.option("reduction")),
            str(case.option("no_positive") or "zero"),
            1.0 if base is None else self.temperature / float(base),
        )
        self.anchors, self.positives = case.anchors(), case.positives()
        self.alone = [i for i in self.anchors if not self.positives[i]]
        self.pairs = int(self.right.setting.counts.sum())
        self.given, self.expected = (torch.tensor(x.values, dtype=torch.float64) for x in (outcome, truth))
        self.compared = [(self.given, self.expected)]
        given, expected = _joined(case, outcome), _joined(case, truth)
        if given is not None and expected is not None:
            self.compared.append((given, expected))
        self._evaluations: dict[tuple[Setting, str], Evaluation] = {}

    def value(self, suspect: Suspect) -> Tensor:
        """[K], what the suspect gives; NaN if the rows cannot be read so, or if the number of values differs."""
        variant, unknown = suspect.variant, torch.full_like(self.given, math.nan)
        key = suspect.setting, variant.positives
        if key not in self._evaluations:
            setting = POSITIVES[variant.positives].change(suspect.setting)
            if setting is None:
                return unknown
            self._evaluations[key] = Evaluation(setting, torch.tensor([self.temperature], dtype=torch.float64))
        evaluation = self._evaluations[key]
        each = evaluation.anchors(variant)[0]
        value = reduce_anchors(evaluation.setting, each, suspect.reduction, suspect.policy) * suspect.factor
        return value.reshape(-1) if value.numel() == len(self.given) else unknown

    def remaining(self, suspect: Suspect) -> float:
        """What remains of the error, where the suspect explains value and gradient; else infinity."""
        value = self.value(suspect)
        allowed = EXPLAINED_BY_VALUE if len(self.compared) == 1 and len(value) <= 2 else EXPLAINED
        remaining = [_remaining(value.detach(), *self.compared[0])]
        if remaining[0] <= allowed and len(self.compared) > 1:
            # A value that does not depend on the rows has a gradient too.
            total = value.sum() + 0 * self.rows.sum()
            (gradient,) = torch.autograd.grad(total, self.rows, retain_graph=True)
            remaining.append(_remaining(gradient, *self.compared[1]))
        # So that NaN explains nothing.
        return max(remaining) if remaining[0] <= allowed and remaining[-1] <= EXPLAINED else math.inf

    def best(self, suspects: Iterator[Suspect]) -> str | None:
        """The suspect that explains the failure, in words: the first that no other explains twice as well."""
        least, best = math.inf, None
        for suspect in suspects:
            remaining = self.remaining(suspect)
            if remaining < least / 2:
                least, best = remaining, suspect
        return None if best is None else best.words or _words(self, best.variant)

    def read_again(self, arguments: Mapping[str, Any] | None = None, **keywords: Any) -> Setting:
        """The setting of the case with other arguments or keywords."""
        arguments, keywords = {**self.case.arguments, **(arguments or {})}, {**self.case.keywords, **keywords}
        return case_setting(replace(self.case, arguments=arguments, keywords=keywords), self.rows)

    def part(self, name: str) -> Tensor:
        """Bool [M, 1], the rows of one matrix of the case."""
        part = torch.zeros(len(self.rows), 1, dtype=torch.bool)
        part[matrix_rows(self.case)[name]] = True
        return part


def _joined(case: Case, result: Outcome | Truth) -> Tensor | None:
    """Gradients by every matrix, one after the other."""
    found = {case.first: result.gradient, **result.other_gradients}
    matrices = [matrix for name in case.matrices if (matrix := found.get(name)) is not None]
    joined = np.concatenate(matrices, dtype=np.float64) if len(matrices) == len(case.matrices) else None
    return None if joined is None or not np.isfinite(joined).all() else torch.tensor(joined)


def _error(given: Tensor, expected: Tensor) -> float:
    """How far a result is from the truth, as a share of its size."""
    away, size = float((given - expected).norm()), float(expected.norm())
    return away / size if size else math.inf if away else 0.0


def _remaining(found: Tensor, given: Tensor, expected: Tensor) -> float:
    """How far ``found`` is from the result, as a share of how far the truth is from it."""
    error, left, size = (float(x.norm()) for x in (given - expected, given - found, expected))
    noise = DTYPE_NOISE * size
    if left <= noise:
        return 0.0
    return left / max(error, noise) if max(error, noise) else math.inf


def explain_failure(case: Case, outcome: Outcome, truth: Truth) -> str | None:
    """The first differing term of a failing check, in words, as far as its value and its gradient reveal it.

    Args:
        case: the case.
        outcome: what the target returned.
        truth: the certified results.

    Returns:
        What was computed instead, or None where nothing that is known explains it.
    """
    if case.size > LARGEST_EXPLAINED or not case.anchors():
        return None
    found = _Failure(case, outcome, truth)
    if len(found.given) != len(found.expected):
        return None
    if not bool(found.given.isfinite().all()):
        return _not_finite(found) if bool(found.expected.isfinite().all()) else None
    if not bool(found.expected.isfinite().all()):
        return "a number is returned where the policy requires NaN"
    return next(filter(None, (explain(found) for explain in EXPLAINERS)), None)


# What is explained without a variant


def _not_finite(found: _Failure) -> str | None:
    """Why NaN or infinity was returned where a number is expected."""
    setting, rows, members = found.right.setting, found.rows.detach(), found.case.members()
    odd = "NaN" if bool(found.given.isnan().any()) else "infinity"
    logits = SIMILARITIES[found.right.variant.similarity](rows, rows, setting) / found.temperature
    compared = setting.member & setting.anchors[:, None]
    seen = logits.masked_fill(~compared, -math.inf)
    largest, least = float(seen.max()), float(logits.masked_fill(~compared, math.inf).min())
    overflow = f"{odd}: the largest logit is {largest:.4g}, whose exponential overflows; no maximum is subtracted"
    if found.alone:
        words = f"{_have(found.alone)} no positive, and the loss becomes {odd}: 0 divided by 0, or a logarithm of 0"
        return f"{words}; or {overflow}" if largest > 88.7 else words
    full = [i for i in found.anchors if len(found.positives[i]) == len(members[i])]
    if full:
        return f"{_have(full)} no negative, and the loss becomes {odd}"
    if bool((found.given == -math.inf).any()):
        return "minus infinity: all that a denominator sums underflows, and its logarithm is of 0"
    if largest > 88.7:
        return overflow
    own = logits.masked_fill(~setting.own, -math.inf).amax(dim=1)
    drowned = (own - seen.amax(dim=1) > 87).nonzero().reshape(-1).tolist()
    if drowned:
        return f"{odd}: the maximum of row {drowned[0]} is taken with the anchor itself in it, and all others underflow"
    if max(-least, largest) > 80:
        return f"{odd}: exponentials leave the range of the dtype; logits reach {largest:.4g}"
    return None


def _broken_gradient(found: _Failure) -> str | None:
    """A gradient that is not finite where the value is right."""
    if _error(found.given, found.expected) > DTYPE_NOISE:
        return None
    given = {found.case.first: found.outcome.gradient, **found.outcome.other_gradients}
    where = [
        f"{rows} of {len(matrix)} rows of {name}"
        for name, matrix in given.items()
        if matrix is not None and (rows := int((~np.isfinite(matrix).all(axis=1)).sum()))
    ]
    if not where:
        return None
    return (
        f"the value is right, and the gradient is NaN or infinite in {', '.join(where)}, as where a branch that"
        " torch.where does not take divides by 0 or takes its logarithm"
    )


def _slight(found: _Failure) -> str | None:
    """An error so small that every variant which is right would explain it."""
    size = max(_error(given, expected) for given, expected in found.compared)
    if size > DTYPE_NOISE:
        return None
    return (
        f"{SLIGHT} {size:.1g} of its size: the formula is right, and digits are lost on the way, or something"
        " as small is added or cut off"
    )


def _clamped_norms(found: _Failure) -> str | None:
    """Rows that are not brought to norm 1 because their norms are too small or too large to be computed so."""
    if found.right.variant.similarity != "cosine":
        return None
    rows = found.rows.detach()
    largest = rows.abs().amax(1, keepdim=True)
    norms = largest * (rows / largest).norm(dim=1, keepdim=True)
    for end in SQUARES_OVERFLOW:
        odd = ((norms < CLAMP) | (norms > end)).reshape(-1).nonzero().reshape(-1).tolist()
        unit = torch.where(norms > end, 0.0, rows / norms.clamp(min=CLAMP))
        if odd and _remaining(found.value(_dot(found, unit)), *found.compared[0]) <= EXPLAINED_BY_VALUE:
            which = f"row {odd[0]} is" if len(odd) == 1 else f"{len(odd)} rows, from row {odd[0]} on, are"
            return (
                f"{which} not brought to norm 1: a norm of {float(norms[odd[0]]):.2g} is clamped, or the squares under"
                " its root leave the range of the dtype"
            )
    return None


def _scaled(found: _Failure) -> str | None:
    """Values, and gradients, that are off by a factor; or gradients that are, alone."""
    if not found.expected.any():
        return None
    shares = (1e-3, EXPLAINED)
    factors = [_ratio(*pair, share) for pair, share in zip(found.compared, shares, strict=False) if pair[1].any()]
    factor, slope = factors[0], factors[-1]
    if factor is None or slope is None:
        return None
    if len(factors) == 1:
        simple = any(abs(factor - x) <= 1e-5 * x for x in (2.0, 0.5, float(len(found.anchors))))
        return _of_factor(found, factor) if simple else None
    if abs(factor - 1) < 1e-4 and abs(slope - 1) > 1e-3:
        if abs(slope) < 1e-9:
            return "the value is right, and no gradient flows"
        return f"the value is right, and the gradient is {slope:.6g} times the true one"
    if abs(factor - 1) > 1e-5 and abs(factor - slope) <= EXPLAINED * abs(factor - 1):
        return _of_factor(found, factor)
    return None


def _ratio(given: Tensor, expected: Tensor, share: float) -> float | None:
    """The factor between a result and the truth; None if it leaves more than a share of the error."""
    factor = float((given * expected).sum() / (expected * expected).sum())
    allowed = share * float((given - expected).norm()) + DTYPE_NOISE * float(given.norm())
    return factor if float((given - factor * expected).norm()) <= allowed else None


def _of_factor(found: _Failure, factor: float) -> str:
    """A factor in words: where it comes from, or may come from."""
    if abs(factor) < 1e-12:
        words = "the loss is 0"
    elif factor < 0:
        times = "" if abs(factor + 1) < 1e-5 else f", and are {-factor:.6g} times as large"
        words = f"values have the wrong sign{times}"
    else:
        words = f"values are {max(factor, 1 / factor):.6g} times too {'large' if factor > 1 else 'small'}"
    cause = next((text for value, text in _causes(found) if abs(factor - value) <= 1e-4 * abs(value)), None)
    if cause is None:
        return words
    return f"{words}; it may be that {cause}" if any(abs(factor - x) <= 1e-4 * x for x in SIMPLE) else cause


def _causes(found: _Failure) -> Iterator[tuple[float, str]]:
    """Factors that follow from the case, and what they come from."""
    anchors, pairs, temperature, scale = len(found.anchors), found.pairs, found.temperature, found.right.factor
    mean, counted = found.right.reduction == "mean", anchors - len(found.alone)
    total = f"the sum over {anchors} anchors is"
    if mean and anchors > 2:
        yield anchors, f"{total} not divided by their number"
    if found.right.reduction == "sum" and anchors > 2:
        yield 1 / anchors, f"{total} divided by their number, where the sum is required"
    if mean and 0 < counted < anchors:
        yield anchors / counted, _policy_words(found, "drop")
        yield counted / anchors, _policy_words(found, "zero")
    yield temperature, f"values are multiplied by the temperature, {temperature:g}"
    for base in (0.07, found.case.option("base_temperature")):
        if base:
            words = f"temperature/{float(base):g}, a base temperature that was not passed"
            yield temperature / float(base), f"values are multiplied by {words}"
    if scale != 1:
        words = "values are multiplied by base_temperature/temperature, not by temperature/base_temperature"
        yield scale**-2, words
        yield 1 / scale, "values are not multiplied by temperature/base_temperature"
    if mean and pairs not in (0, anchors):
        yield anchors / pairs, f"{total} divided by {pairs}, the number of pairs"


def _have(rows: list[int]) -> str:
    if len(rows) == 1:
        return f"anchor {rows[0]} has"
    return f"anchors {', '.join(map(str, rows[:-1]))} and {rows[-1]} have"


def _policy_words(found: _Failure, policy: str) -> str:
    """What was done with the anchors that have no positives."""
    treated, mean = {"drop": ("left out", " of the mean"), "zero": ("counted", " in the mean, as 0")}[policy]
    treated += "" if found.right.reduction == "none" else mean
    return f"{_have(found.alone)} no positive and {'was' if len(found.alone) == 1 else 'were'} {treated}"


# What is explained by a variant


def _reductions(found: _Failure) -> Iterator[Suspect]:
    """Other policies and other means than those of the case."""
    right, anchors, pairs = found.right, len(found.anchors), found.pairs
    one = right.other(form="mean") if right.variant.form == "sum" else right
    if right.reduction != "none" and right.variant.form == "mean" and pairs != anchors:
        words = f"the mean is over {pairs} pairs, not over {anchors} anchors"
        yield replace(right.other(words, form="sum"), reduction="mean_pairs", policy="zero")
    for reduction in ("none",) if right.reduction == "none" else ("mean", "sum"):
        for policy in POLICIES[:2]:
            words = f"the {reduction} over {anchors} anchors is taken, not the {right.reduction}"
            if reduction == right.reduction:
                if policy == right.policy or not found.alone:
                    continue
                words = _policy_words(found, policy)
            elif right.reduction == "mean_pairs":
                words = f"the {reduction} is over {anchors} anchors, not over {pairs} pairs"
            yield replace(one, reduction=reduction, policy=policy, words=words)
    if right.factor != 1:
        yield replace(right, factor=1.0, words="the base temperature is not applied")


def _suspects(found: _Failure) -> Iterator[Suspect]:
    """Every variation of one part, every other choice of an option, and every other reading of the arguments."""
    right, variant = found.right, found.right.variant
    # What depends on this very batch comes before the forms that agree with it there by chance.
    yield from _read_as(found, _batch_settings(found))
    yield from _read_as(found, _case_settings(found))
    for flow, words in FLOWS.items():
        if words:
            yield right.other(f"the value is right, but {words}", flow=flow)
    for name in ("cosine", "dot"):
        yield right.other(similarity=name)
    chosen = dict(variant.options)
    for option in () if variant.in_parts else found.loss.formula_options:
        value = chosen.get(option, found.loss.keywords[option])
        for choice in found.loss.choices.get(option, ()):
            words = f"{option}={choice} is computed, not {option}={value}"
            yield right.other(words, options=tuple({**chosen, option: choice}.items()))
    if variant.in_parts and not variant.binary:
        for name in ("all", "one_positive", "only_negatives"):
            yield right.other(denominator=name)
        for name in ("mean", "inside"):
            yield right.other(form=name)
        if variant.guard:
            yield right.other("no epsilon is added", guard="")
            yield right.other(FLOWS["maximum"], flow="maximum")
    for wrong in (*temperings(variant), *variations(variant, CASE)):
        # Two towers have no diagonal that could be subtracted.
        if not (found.loss.two_towers and wrong.denominator == "subtract"):
            yield replace(right, variant=wrong)
    if "negatives" in found.case.others:
        yield from _read_as(found, _queue_settings(found))
    if variant.similarity == "cosine":
        for words, rows in _other_norms(found):
            yield _dot(found, rows, words)


EXPLAINERS: tuple[Callable[[_Failure], str | None], ...] = (
    _broken_gradient,
    _slight,
    _clamped_norms,
    _scaled,
    lambda found: found.best(_reductions(found)),
    lambda found: found.best(_suspects(found)),
)
"""What explains finite values where finite ones are expected, in the order in which it is tried."""


def _dot(found: _Failure, rows: Tensor, words: str = "") -> Suspect:
    """Dot products of rows in place of the case's."""
    return replace(found.right.other(words, similarity="dot"), setting=replace(found.right.setting, rows=rows))


def _read_as(found: _Failure, settings: Iterator[tuple[str, Setting]]) -> Iterator[Suspect]:
    """The settings that are not the right one."""
    right = found.right.setting
    for words, s in settings:
        masks = ((s.member, right.member), (s.positive, right.positive), (s.own, right.own), (s.anchors, right.anchors))
        if s.rows is not right.rows or not all(torch.equal(*pair) for pair in masks):
            yield replace(found.right, setting=s, words=words)


NARROWED: Mapping[str, Callable[[int], object]] = {
    "float32: large ones that lie close together": np.float32,
    "float16: large ones": lambda x: np.float16(float(x)),
    "32 bits or fewer: those that differ by a multiple of 2^32": lambda x: x % 2**32,
    "bytes: those that differ by a multiple of 256": lambda x: x % 256,
}
"""Types to which labels may be narrowed, the labels that become one class, and the label of (label)."""


def _batch_settings(found: _Failure) -> Iterator[tuple[str, Setting]]:
    """Labels that are narrowed or ignored, and rows that are lost or taken for one another."""
    case, right, n = found.case, found.right.setting, found.case.n
    labels = {name: case.arguments[name] for name in ("labels", "ref_labels") if name in case.arguments}
    for words, narrow in NARROWED.items() if labels else ():
        with np.errstate(over="ignore"):
            given = {name: [narrow(int(x)) for x in side] for name, side in labels.items()}
        yield f"labels are narrowed to {words} become one class", found.read_again(given)
    if labels:
        negative = torch.zeros(len(found.rows), dtype=torch.bool)
        negative[:n] = torch.tensor([int(x) < 0 for x in labels["labels"]])
        positive = right.positive & ~negative & ~negative[:, None]
        yield "a row with a negative label is not a positive, and has no positives", replace(right, positive=positive)
    if len(case.matrices) > 1:
        return
    if n % 2:
        kept = torch.arange(n) < n - 1
        member, positive = (mask & kept & kept[:, None] for mask in (right.member, right.positive))
        words = f"the last of {n} rows is lost: the batch is cut to an even number"
        yield words, replace(right, member=member, positive=positive, anchors=right.anchors & kept)
    unit = found.rows.detach() / found.rows.detach().norm(dim=1, keepdim=True)
    apart = (unit[:, None] != unit[None]).any(dim=2) | right.own
    words = "rows that equal the anchor are left out with it, as if they were the anchor itself"
    yield words, replace(right, member=right.member & apart, positive=right.positive & apart)
    if "partners" in case.arguments:
        view = torch.tensor(stacked_order(case)).argsort() // (n // 2)
        member = right.positive | (same(view) & right.member)
        yield "the negatives are the rows of the anchor's own view alone", replace(right, member=member)


def _case_settings(found: _Failure) -> Iterator[tuple[str, Setting]]:
    """Other readings of what the case passes beside labels."""
    case, right, n = found.case, found.right.setting, found.case.n
    if case.option("anchors") is not None:
        words = f"all {n} rows are anchors, not the {len(found.anchors)} that are chosen"
        yield words, found.read_again(anchors=None)
    if "self_rows" in case.arguments:
        yield "the reference that is the anchor itself is not left out", found.read_again({"self_rows": [-1] * n})
    if found.loss.two_towers:
        anchors = {"both": f"all {2 * n} rows", "a_to_b": f"the {n} rows of a", "b_to_a": f"the {n} rows of b"}
        for direction, name in anchors.items():
            words = f"the anchors are {name}, not {anchors[case.option('direction')]}"
            yield words, found.read_again(direction=direction)
        if "negatives" not in case.others:
            member = ~torch.eye(2 * n, dtype=torch.bool) & right.anchors[:, None]
            yield "rows of the same tower are in the denominator too", replace(right, member=member)
    if "partners" in case.arguments and "ref_embeddings" not in case.others:
        item = torch.tensor(stacked_order(case)).argsort() // 2
        words = "views are taken to lie side by side, where they are stacked: anchors have wrong partners"
        yield words, replace(right, positive=same(item) & right.member)


def _queue_settings(found: _Failure) -> Iterator[tuple[str, Setting]]:
    """What becomes of explicit negatives."""
    right, rows = found.right.setting, found.rows
    b, queue = (found.part(name)[:, 0] for name in ("embeddings_b", "negatives"))
    # The rows of the tower in which an anchor's positive is.
    tower = torch.where((right.positive & b).any(dim=1)[:, None], b, ~b & ~queue) & right.anchors[:, None]
    words = "the negatives that are passed are not used: the other keys of the batch are negatives"
    yield words, replace(right, member=tower)
    words = "the other keys of the batch are negatives beside those that are passed"
    yield words, replace(right, member=right.member | tower)
    detached = torch.where(queue[:, None], rows.detach(), rows)
    yield "the value is right, but no gradient flows into the negatives", replace(right, rows=detached)


def _other_norms(found: _Failure) -> Iterator[tuple[str, Tensor]]:
    """Rows that are brought to other norms than 1, some of them or all."""
    rows = found.rows
    unit = rows / rows.norm(dim=1, keepdim=True)
    if "negatives" in found.case.others:
        queue = found.part("negatives")
        yield "the negatives that are passed are not normalised", torch.where(queue, rows, unit)
        words = "the temperature is not applied to the negatives that are passed"
        yield words, torch.where(queue, unit * found.temperature, unit)
    if found.loss.two_towers:
        for name, other in (found.loss.embeddings, found.loss.embeddings[::-1]):
            yield f"only {name} is normalised, and {other} is not", torch.where(found.part(other), rows, unit)
    centred = rows - rows.mean(dim=1, keepdim=True)
    spread = (centred**2).mean(dim=1, keepdim=True).sqrt()
    yield "rows go through a layer norm: they are centred, and of norm sqrt(D)", centred / spread
    yield "rows are centred before they are normalised", centred / centred.norm(dim=1, keepdim=True)


# A variant in words

CHOICES: Mapping[str, str] = {
    "dot": "similarities are raw dot products: rows are not brought to norm 1",
    "cosine": "rows are brought to norm 1, where raw dot products are required",
    "inside": "the mean over the positives is taken inside the logarithm, not outside it",
    "mean": "the mean over the positives is taken outside the logarithm, not inside it",
}
"""Parts that are right for another loss or option: what is wrong where they take the place of the case's."""


def _words(found: _Failure, other: Variant) -> str:
    """What differs between a case and a variant, counted at one anchor."""
    right = found.right.variant
    parts = ("positives", "similarity", "tempering", "numerator", "denominator", "guard", "form")
    part = next(name for name in parts if getattr(other, name) != getattr(right, name))
    choice = getattr(other, part)
    if part == "denominator":
        return _denominator_words(found, right.denominator, choice)
    if choice in CHOICES:
        return CHOICES[choice]
    words = GUARDS[choice] if part == "guard" else words_of(choice)
    if part == "similarity":
        return f"similarities: {words}"
    if part in ("tempering", "numerator"):
        return f"{words} ({found.temperature:g})"
    anchor = _odd_anchor(found)
    return f"{words} (anchor {anchor} has {len(found.positives[anchor])})" if part == "form" else words


OTHER_DENOMINATORS: Mapping[tuple[str, str], str] = {
    ("all", "one_positive"): "lacks the other positives",
    ("all", "only_negatives"): "lacks the positives",
    ("one_positive", "only_negatives"): "lacks its own positive",
    ("one_positive", "all"): "holds the other positives",
    ("only_negatives", "all"): "holds the positives",
    ("only_negatives", "one_positive"): "holds the positive itself",
}
"""What a denominator of the catalogue lacks or holds where another is right: by the right one and the other."""


def _odd_anchor(found: _Failure) -> int:
    """The first anchor whose value is off where they are known, else the first."""
    true, given = found.truth.anchors, found.outcome.anchors or {}
    off = (i for i, x in given.items() if i in true and abs(x - true[i]) > 1e-3 * (abs(true[i]) + 1e-12))
    return next(off, found.anchors[0])


def _denominator_words(found: _Failure, right: str, other: str) -> str:
    """Which terms are missing from a denominator, and which are too many."""
    setting, expected, given = found.right.setting, DENOMINATORS[right], DENOMINATORS[other]
    if given.combine is not log_sum or other == "one":
        return given.words
    places = similarity_rows(found.case)
    for i in (_odd_anchor(found), *found.anchors):
        row = places[i][0]
        wanted, seen = expected.terms(setting, row), given.terms(setting, row)
        if wanted == seen or not found.positives[i]:
            continue
        counted = f"{seen} term{'' if seen == 1 else 's'} instead of {wanted}"
        if given.leaks is not None:
            return f"{given.words} of anchor {i}: {counted}"
        of = f"the denominator of anchor {i}"
        added = given.summed(setting)[row] & ~expected.summed(setting)[row]
        if bool((added & setting.own[row]).any()) and not bool((added & setting.positive[row]).any()):
            return f"{of} holds the anchor itself: {counted}"
        if (right, other) in OTHER_DENOMINATORS:
            return f"{of} {OTHER_DENOMINATORS[right, other]}: {counted}"
        return f"{given.words} (anchor {i}: {counted})"
    return given.words or f"the denominator is {other}, not {right}"
