"""What a failing check computed instead: the variant that explains its value and its gradient, in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ..implementations.base import stacked_order
from ..suite.cases import Case
from ..suite.records import Outcome, Truth
from . import variants
from .positives import CASE, POSITIVES, Setting, case_setting, matrix_rows, same, similarity_rows
from .variants import DENOMINATORS, FLOWS, SIMILARITIES, Evaluation, Variant, words_of

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

    def read(self, words: str, **parts: Any) -> Suspect:
        """The same with other parts of its setting."""
        return replace(self, setting=replace(self.setting, **parts), words=words)


class _Failure:
    """One failing check, and the suspects compared with it."""

    def __init__(self, case: Case, outcome: Outcome, truth: Truth) -> None:
        self.case, self.outcome, self.truth, self.loss = case, outcome, truth, case.entry
        self.rows = torch.cat([torch.tensor(matrix) for matrix in case.matrices.values()]).requires_grad_()
        self.temperature, base = case.temperature, case.option("base_temperature")
        variant, setting = variants.variant_of(self.loss, case.keywords), case_setting(case, self.rows)
        reduction, policy = str(case.option("reduction")), str(case.option("no_positive") or "zero")
        factor = 1.0 if base is None else self.temperature / float(base)
        self.right = Suspect(variant, setting, reduction, policy, factor)
        self.anchors, self.positives = case.anchors(), case.positives()
        self.alone = [i for i in self.anchors if not self.positives[i]]
        self.pairs = int(self.right.setting.counts.sum())
        self.given, self.expected = (torch.tensor(x.values, dtype=torch.float64) for x in (outcome, truth))
        self.compared = [(self.given, self.expected)]
        given, expected = _joined(case, outcome), _joined(case, truth)
        if given is not None and expected is not None:
            self.compared.append((given, expected))
        self._evaluations: dict[tuple[Setting, str], Evaluation | None] = {}

    def value(self, suspect: Suspect) -> Tensor:
        """[K], what the suspect gives; NaN if the rows cannot be read so, or if the number of values differs."""
        variant, key = suspect.variant, (suspect.setting, suspect.variant.positives)
        if key not in self._evaluations:
            setting = POSITIVES[variant.positives].change(suspect.setting)
            at = torch.tensor([self.temperature], dtype=torch.float64)
            self._evaluations[key] = None if setting is None else Evaluation(setting, at)
        if (evaluation := self._evaluations[key]) is not None:
            each = evaluation.anchors(variant)[0]
            value = variants.reduce_anchors(evaluation.setting, each, suspect.reduction, suspect.policy)
            if value.numel() == len(self.given):
                return value.reshape(-1) * suspect.factor
        return torch.full_like(self.given, math.nan)

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

    def best(self, suspects: Callable[[_Failure], Iterator[Suspect]]) -> str | None:
        """The suspect that explains the failure, in words: the first that no other explains twice as well."""
        least, best = math.inf, None
        for suspect in suspects(self):
            remaining = self.remaining(suspect)
            if remaining < least / 2:
                least, best = remaining, suspect
        return None if best is None else best.words or _words(self, best.variant)

    def read_again(self, words: str, arguments: Mapping[str, Any] | None = None, **keywords: Any) -> Suspect:
        """The right one, of the case with other arguments or keywords."""
        arguments, keywords = {**self.case.arguments, **(arguments or {})}, {**self.case.keywords, **keywords}
        setting = case_setting(replace(self.case, arguments=arguments, keywords=keywords), self.rows)
        return replace(self.right, setting=setting, words=words)

    def differs(self, suspect: Suspect) -> bool:
        """Whether the setting is another one than the right one."""
        right, other, masks = self.right.setting, suspect.setting, ("member", "positive", "own", "anchors")
        return other.rows is not right.rows or any(not getattr(other, x).equal(getattr(right, x)) for x in masks)

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


def _remaining(found: Tensor, given: Tensor, expected: Tensor) -> float:
    """How far ``found`` is from the result, as a share of how far the truth is from it."""
    error, left, noise = (given - expected).norm(), (given - found).norm(), DTYPE_NOISE * expected.norm()
    return 0.0 if left <= noise else float(left / error.maximum(noise))


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
    finite = bool(found.expected.isfinite().all())
    if not bool(found.given.isfinite().all()):
        return _not_finite(found) if finite else None
    if not finite:
        return "a number is returned where the policy requires NaN"
    return _slight(found) or _clamped_norms(found) or _scaled(found) or found.best(_reductions) or found.best(_suspects)


# What is explained without a variant


def _not_finite(found: _Failure) -> str | None:
    """Why NaN or infinity was returned where a number is expected."""
    setting, rows, members = found.right.setting, found.rows.detach(), found.case.members()
    odd = "NaN" if bool(found.given.isnan().any()) else "infinity"
    logits = SIMILARITIES[found.right.variant.similarity](rows, rows, setting) / found.temperature
    compared = setting.member & setting.anchors[:, None]
    seen = logits.masked_fill(~compared, -math.inf)
    largest, least = float(seen.max()), float(logits[compared].min())
    overflow = f"{odd}: the largest logit is {largest:.4g}, whose exponential overflows; no maximum is subtracted"
    if found.alone:
        words = f"{_have(found.alone)} no positive, and the loss becomes {odd}: 0 divided by 0, or a logarithm of 0"
        return f"{words}; or {overflow}" if largest > 88.7 else words
    if full := [i for i in found.anchors if len(found.positives[i]) == len(members[i])]:
        return f"{_have(full)} no negative, and the loss becomes {odd}"
    if bool((found.given == -math.inf).any()):
        return "minus infinity: all that a denominator sums underflows, and its logarithm is of 0"
    if largest > 88.7:
        return overflow
    own = logits.masked_fill(~setting.own, -math.inf).amax(dim=1)
    if drowned := (own - seen.amax(dim=1) > 87).nonzero().reshape(-1).tolist():
        return f"{odd}: the maximum of row {drowned[0]} is taken with the anchor itself in it, and all others underflow"
    far = max(-least, largest) > 80
    return f"{odd}: exponentials leave the range of the dtype; logits reach {largest:.4g}" if far else None


def _slight(found: _Failure) -> str | None:
    """A gradient that is not finite where the value is right, or an error so small that any right variant fits."""
    sizes = [float(((x - true).norm() / true.norm()).nan_to_num()) for x, true in found.compared]
    if max(sizes) > DTYPE_NOISE:
        return None
    given = {found.case.first: found.outcome.gradient, **found.outcome.other_gradients}
    broken = {name: ~np.isfinite(rows).all(axis=1) for name, rows in given.items() if rows is not None}
    if where := ", ".join(f"{odd.sum()} of {odd.size} rows of {name}" for name, odd in broken.items() if odd.any()):
        words = "as where a branch that torch.where does not take divides by 0 or takes its logarithm"
        return f"the value is right, and the gradient is NaN or infinite in {where}, {words}"
    words = "the formula is right, and digits are lost on the way, or something as small is added or cut off"
    return f"{SLIGHT} {max(sizes):.1g} of its size: {words}"


def _clamped_norms(found: _Failure) -> str | None:
    """Rows that are not brought to norm 1 because their norms are too small or too large to be computed so."""
    if found.right.variant.similarity != "cosine":
        return None
    rows = found.rows.detach()
    largest = rows.abs().amax(1, keepdim=True)
    norms = largest * (rows / largest).norm(dim=1, keepdim=True)
    for end in SQUARES_OVERFLOW:
        odd = ((norms < CLAMP) | (norms > end))[:, 0].nonzero()[:, 0].tolist()
        unit = torch.where(norms > end, 0.0, rows / norms.clamp(min=CLAMP))
        if odd and _remaining(found.value(_dot(found, unit)), *found.compared[0]) <= EXPLAINED_BY_VALUE:
            which = f"row {odd[0]} is" if len(odd) == 1 else f"{len(odd)} rows, from row {odd[0]} on, are"
            norm = f"a norm of {float(norms[odd[0]]):.2g} is clamped"
            return f"{which} not brought to norm 1: {norm}, or the squares under its root leave the range of the dtype"
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
        explained = any(abs(factor - x) <= 1e-5 * x for x in (2.0, 0.5, float(len(found.anchors))))
    elif abs(factor - 1) < 1e-4 and abs(slope - 1) > 1e-3:
        gradient = f"the gradient is {slope:.6g} times the true one" if abs(slope) >= 1e-9 else "no gradient flows"
        return f"the value is right, and {gradient}"
    else:
        explained = abs(factor - 1) > 1e-5 and abs(factor - slope) <= EXPLAINED * abs(factor - 1)
    return _of_factor(found, factor) if explained else None


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
    for value, cause in _causes(found):
        if math.isclose(factor, value, rel_tol=1e-4):
            simple = any(math.isclose(factor, x, rel_tol=1e-4) for x in SIMPLE)
            return f"{words}; it may be that {cause}" if simple else cause
    return words


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
    for base in filter(None, (0.07, found.case.option("base_temperature"))):
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
        words = f"the {reduction} over {anchors} anchors is taken, not the {right.reduction}"
        if right.reduction == "mean_pairs":
            words = f"the {reduction} is over {anchors} anchors, not over {pairs} pairs"
        for policy in ("zero", "drop"):
            if reduction != right.reduction:
                yield replace(one, reduction=reduction, policy=policy, words=words)
            elif found.alone and policy != right.policy:
                yield replace(one, policy=policy, words=_policy_words(found, policy))
    if right.factor != 1:
        yield replace(right, factor=1.0, words="the base temperature is not applied")


def _suspects(found: _Failure) -> Iterator[Suspect]:
    """Every variation of one part, every other choice of an option, and every other reading of the arguments."""
    right, variant = found.right, found.right.variant
    # What depends on this very batch comes before the forms that agree with it there by chance.
    yield from filter(found.differs, (*_batch_settings(found), *_case_settings(found)))
    for flow, words in FLOWS.items():
        if words:
            yield right.other(f"the value is right, but {words}", flow=flow)
    parts = {"similarity": ("cosine", "dot"), "denominator": variants.RIGHT_DENOMINATORS, "form": ("mean", "inside")}
    for part, names in parts.items():
        for name in names if part == "similarity" or (variant.in_parts and not variant.binary) else ():
            yield right.other(**{part: name})
    chosen = dict(variant.options)
    for option in () if variant.in_parts else found.loss.formula_options:
        value = chosen.get(option, found.loss.keywords[option])
        for choice in found.loss.choices.get(option, ()):
            words = f"{option}={choice} is computed, not {option}={value}"
            yield right.other(words, options=tuple({**chosen, option: choice}.items()))
    if variant.guard:
        yield right.other("no epsilon is added", guard="")
        yield right.other(FLOWS["maximum"], flow="maximum")
    for wrong in (*variants.temperings(variant), *variants.variations(variant, CASE)):
        # Two towers have no diagonal that could be subtracted.
        if not (found.loss.two_towers and wrong.denominator == "subtract"):
            yield replace(right, variant=wrong)
    if "negatives" in found.case.others:
        yield from filter(found.differs, _queue_settings(found))
    if variant.similarity == "cosine":
        yield from _other_norms(found)


def _dot(found: _Failure, rows: Tensor, words: str = "") -> Suspect:
    """Dot products of rows in place of the case's."""
    return found.right.read(words, rows=rows).other(words, similarity="dot")


NARROWED: Mapping[str, Callable[[int], object]] = {
    "float32: large ones that lie close together": np.float32,
    "float16: large ones": lambda x: np.float16(float(x)),
    "32 bits or fewer: those that differ by a multiple of 2^32": lambda x: x % 2**32,
    "bytes: those that differ by a multiple of 256": lambda x: x % 256,
}
"""Types to which labels may be narrowed, the labels that become one class, and the label of (label)."""


def _batch_settings(found: _Failure) -> Iterator[Suspect]:
    """Labels that are narrowed or ignored, and rows that are lost or taken for one another."""
    case, suspect, right, n = found.case, found.right, found.right.setting, found.case.n
    labels = {name: case.arguments[name] for name in ("labels", "ref_labels") if name in case.arguments}
    for words, narrow in NARROWED.items() if labels else ():
        with np.errstate(over="ignore"):
            given = {name: [narrow(int(x)) for x in side] for name, side in labels.items()}
        yield found.read_again(f"labels are narrowed to {words} become one class", given)
    if labels:
        negative = torch.zeros(len(found.rows), dtype=torch.bool)
        negative[:n] = torch.tensor([int(x) < 0 for x in labels["labels"]])
        positive = right.positive & ~negative & ~negative[:, None]
        yield suspect.read("a row with a negative label is not a positive, and has no positives", positive=positive)
    if len(case.matrices) > 1:
        return
    if n % 2:
        kept = torch.arange(n) < n - 1
        member, positive = (mask & kept & kept[:, None] for mask in (right.member, right.positive))
        words = f"the last of {n} rows is lost: the batch is cut to an even number"
        yield suspect.read(words, member=member, positive=positive, anchors=right.anchors & kept)
    unit = found.rows.detach() / found.rows.detach().norm(dim=1, keepdim=True)
    apart = (unit[:, None] != unit[None]).any(dim=2) | right.own
    words = "rows that equal the anchor are left out with it, as if they were the anchor itself"
    yield suspect.read(words, member=right.member & apart, positive=right.positive & apart)
    if "partners" in case.arguments:
        view = torch.tensor(stacked_order(case)).argsort() // (n // 2)
        member = right.positive | (same(view) & right.member)
        yield suspect.read("the negatives are the rows of the anchor's own view alone", member=member)


def _case_settings(found: _Failure) -> Iterator[Suspect]:
    """Other readings of what the case passes beside labels."""
    case, right, n = found.case, found.right.setting, found.case.n
    if case.option("anchors") is not None:
        words = f"all {n} rows are anchors, not the {len(found.anchors)} that are chosen"
        yield found.read_again(words, anchors=None)
    if "self_rows" in case.arguments:
        yield found.read_again("the reference that is the anchor itself is not left out", {"self_rows": [-1] * n})
    if found.loss.two_towers:
        anchors = {"both": f"all {2 * n} rows", "a_to_b": f"the {n} rows of a", "b_to_a": f"the {n} rows of b"}
        for direction, name in anchors.items():
            words = f"the anchors are {name}, not {anchors[case.option('direction')]}"
            yield found.read_again(words, direction=direction)
        if "negatives" not in case.others:
            member = ~torch.eye(2 * n, dtype=torch.bool) & right.anchors[:, None]
            yield found.right.read("rows of the same tower are in the denominator too", member=member)
    if "partners" in case.arguments and "ref_embeddings" not in case.others:
        item = torch.tensor(stacked_order(case)).argsort() // 2
        words = "views are taken to lie side by side, where they are stacked: anchors have wrong partners"
        yield found.right.read(words, positive=same(item) & right.member)


def _queue_settings(found: _Failure) -> Iterator[Suspect]:
    """What becomes of explicit negatives."""
    suspect, right, rows = found.right, found.right.setting, found.rows
    b, queue = found.part("embeddings_b")[:, 0], found.part("negatives")
    # The rows of the tower in which an anchor's positive is.
    tower = torch.where((right.positive & b).any(dim=1)[:, None], b, ~b & ~queue[:, 0]) & right.anchors[:, None]
    batch = "the other keys of the batch are negatives"
    yield suspect.read(f"the negatives that are passed are not used: {batch}", member=tower)
    yield suspect.read(f"{batch} beside those that are passed", member=right.member | tower)
    detached = torch.where(queue, rows.detach(), rows)
    yield suspect.read("the value is right, but no gradient flows into the negatives", rows=detached)


def _other_norms(found: _Failure) -> Iterator[Suspect]:
    """Rows that are brought to other norms than 1, some of them or all."""
    rows, dot = found.rows, partial(_dot, found)
    unit = rows / rows.norm(dim=1, keepdim=True)
    if "negatives" in found.case.others:
        queue, negatives = found.part("negatives"), "the negatives that are passed"
        yield dot(torch.where(queue, rows, unit), f"{negatives} are not normalised")
        tempered = torch.where(queue, unit * found.temperature, unit)
        yield dot(tempered, f"the temperature is not applied to {negatives}")
    if found.loss.two_towers:
        for name, other in (found.loss.embeddings, found.loss.embeddings[::-1]):
            yield dot(torch.where(found.part(other), rows, unit), f"only {name} is normalised, and {other} is not")
    centred = rows - rows.mean(dim=1, keepdim=True)
    layer = centred / (centred**2).mean(dim=1, keepdim=True).sqrt()
    yield dot(layer, "rows go through a layer norm: they are centred, and of norm sqrt(D)")
    yield found.right.read("rows are centred before they are normalised", rows=centred)


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
    right, anchor = found.right.variant, _odd_anchor(found)
    parts = ("positives", "similarity", "tempering", "numerator", "denominator", "guard", "form")
    part = next(name for name in parts if getattr(other, name) != getattr(right, name))
    choice = getattr(other, part)
    if part == "denominator":
        return _denominator_words(found, right.denominator, choice)
    if choice in CHOICES:
        return CHOICES[choice]
    before = "similarities: " if part == "similarity" else ""
    after = f" ({found.temperature:g})" if part in ("tempering", "numerator") else ""
    after = f" (anchor {anchor} has {len(found.positives[anchor])})" if part == "form" else after
    return f"{before}{words_of(choice)}{after}"


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
    if given.combine is not expected.combine or other == "one":
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
        added = given.summed(setting)[row] & ~expected.summed(setting)[row]
        difference = OTHER_DENOMINATORS.get((right, other))
        if bool((added & setting.own[row]).any()) and not bool((added & setting.positive[row]).any()):
            difference = "holds the anchor itself"
        if difference:
            return f"the denominator of anchor {i} {difference}: {counted}"
        return f"{given.words} (anchor {i}: {counted})"
    return given.words or f"the denominator is {other}, not {right}"
