"""What a failing check computed instead: the variant that explains its value and its gradient, in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..implementations.base import stacked_order
from ..suite.cases import Case
from ..suite.catalogue import find_loss
from ..suite.records import Matrix, Outcome, Truth
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


class _Failure:
    """One failing check, and the suspects compared with it."""

    def __init__(self, case: Case, outcome: Outcome, truth: Truth) -> None:
        self.case, self.outcome, self.truth = case, outcome, truth
        self.loss = find_loss(case.loss)
        self.rows = torch.cat([torch.tensor(matrix) for matrix in case.matrices.values()]).requires_grad_()
        self.temperature = float(case.option("temperature"))
        base = case.option("base_temperature")
        self.right = Suspect(
            variant_of(self.loss, case.keywords),
            case_setting(case, self.rows),
            str(case.option("reduction")),
            str(case.option("no_positive") or "zero"),
            1.0 if base is None else self.temperature / float(base),
        )
        positives = case.positives()
        self.alone = [i for i in case.anchors() if not positives[i]]
        self.given, self.expected = (torch.tensor(x.values, dtype=torch.float64) for x in (outcome, truth))
        self.compared = [(self.given, self.expected)]
        given, expected = (_joined(case, x.gradient, x.other_gradients) for x in (outcome, truth))
        if given is not None and expected is not None:
            self.compared.append((given, expected))
        self._evaluations: dict[tuple[Setting, str], Evaluation] = {}

    def value(self, suspect: Suspect) -> Tensor | None:
        """[K], what the suspect gives; None where the rows cannot be read so."""
        key = suspect.setting, suspect.variant.positives
        if key not in self._evaluations:
            setting = POSITIVES[key[1]].change(key[0])
            if setting is None:
                return None
            at = torch.tensor([self.temperature], dtype=torch.float64)
            self._evaluations[key] = Evaluation(setting, at)
        evaluation = self._evaluations[key]
        each = evaluation.anchors(suspect.variant)[0]
        value = reduce_anchors(evaluation.setting, each, suspect.reduction, suspect.policy)
        return (value * suspect.factor).reshape(-1)

    def explains(self, suspect: Suspect) -> float | None:
        """What remains of the error, where the suspect explains value and gradient; else None."""
        found = self.value(suspect)
        if found is None or len(found) != len(self.given) or not bool(found.isfinite().all()):
            return None
        single = len(self.compared) == 1 and len(found) <= 2
        remaining = [_remaining(found.detach(), *self.compared[0])]
        # So that NaN explains nothing.
        if not remaining[0] <= (EXPLAINED_BY_VALUE if single else EXPLAINED):
            return None
        if len(self.compared) > 1:
            gradient = torch.zeros_like(self.rows)
            if found.requires_grad:
                (gradient,) = torch.autograd.grad(found.sum(), self.rows, retain_graph=True, materialize_grads=True)
            remaining.append(_remaining(gradient, *self.compared[1]))
        return max(remaining) if remaining[-1] <= EXPLAINED else None

    @property
    def anchor(self) -> int:
        """The first anchor whose value is off where they are known, else the first."""
        for i, value in (self.outcome.anchors or {}).items():
            true = self.truth.anchors.get(i, value)
            if abs(value - true) > 1e-3 * (abs(true) + 1e-12):
                return i
        return self.case.anchors()[0]


def _joined(case: Case, gradient: Matrix | None, others: Mapping[str, Matrix]) -> Tensor | None:
    """Gradients by every matrix, one after the other."""
    found = {case.first: gradient, **others}
    if any(found.get(name) is None for name in case.matrices):
        return None
    joined = torch.cat([torch.tensor(found[name], dtype=torch.float64) for name in case.matrices])
    return joined if bool(joined.isfinite().all()) else None


def _error(given: Tensor, expected: Tensor) -> float:
    """How far a result is from the truth, as a share of its size."""
    if len(given) != len(expected):
        return math.inf
    away, size = float((given - expected).norm()), float(expected.norm())
    return away / size if size else math.inf if away else 0.0


def _remaining(found: Tensor, given: Tensor, expected: Tensor) -> float:
    """How far ``found`` is from the result, as a share of how far the truth is from it."""
    if not bool(given.isfinite().all()):
        return math.inf
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
    if case.size > LARGEST_EXPLAINED or len(case.anchors()) == 0:
        return None
    found = _Failure(case, outcome, truth)
    if not bool(found.given.isfinite().all()):
        return _not_finite(found) if bool(found.expected.isfinite().all()) else None
    if not bool(found.expected.isfinite().all()):
        return "a number is returned where the policy requires NaN"
    simple = _broken_gradient(found) or _slight(found) or _clamped_norms(found) or _scaled(found)
    if simple is not None:
        return simple
    for suspects in (_reductions(found), _suspects(found)):
        best: tuple[float, Suspect] | None = None
        for suspect in suspects:
            remaining = found.explains(suspect)
            if remaining is not None and (best is None or remaining < best[0] / 2):
                best = remaining, suspect
        if best is not None:
            return best[1].words or _words(found, best[1].variant)
    return None


# What is explained without a variant


def _not_finite(found: _Failure) -> str | None:
    """Why NaN or infinity was returned where a number is expected."""
    case, setting = found.case, found.right.setting
    odd = "NaN" if bool(found.given.isnan().any()) else "infinity"
    with torch.no_grad():
        logits = SIMILARITIES[found.right.variant.similarity](found.rows, found.rows, setting) / found.temperature
    compared = setting.member & setting.anchors[:, None]
    seen = logits.masked_fill(~compared, -math.inf)
    largest, least = float(seen.max()), float(logits.masked_fill(~compared, math.inf).min())
    overflow = f"{odd}: the largest logit is {largest:.4g}, whose exponential overflows; no maximum is subtracted"
    if found.alone:
        words = f"{_have(found.alone)} no positive, and the loss becomes {odd}: 0 divided by 0, or a logarithm of 0"
        return f"{words}; or {overflow}" if largest > 88.7 else words
    positives, members = case.positives(), case.members()
    full = [i for i in case.anchors() if len(positives[i]) == len(members[i])]
    if full:
        return f"{_have(full)} no negative, and the loss becomes {odd}"
    if bool((found.given == -math.inf).any()):
        return "minus infinity: all that a denominator sums underflows, and its logarithm is of 0"
    if largest > 88.7:
        return overflow
    own = logits.masked_fill(~setting.own, -math.inf).amax(dim=1)
    drowned = ((own - seen.amax(dim=1)) > 87).nonzero().reshape(-1).tolist()
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
        if not odd:
            continue
        unit = torch.where(norms > end, 0.0, rows / norms.clamp(min=CLAMP))
        value = found.value(_dot(found, unit))
        if value is not None and _remaining(value, found.given, found.expected) <= EXPLAINED_BY_VALUE:
            which = f"row {odd[0]} is" if len(odd) == 1 else f"{len(odd)} rows, from row {odd[0]} on, are"
            return (
                f"{which} not brought to norm 1: a norm of {float(norms[odd[0]]):.2g} is clamped, or the squares under"
                " its root leave the range of the dtype"
            )
    return None


def _scaled(found: _Failure) -> str | None:
    """Values, and gradients, that are off by a factor; or gradients that are, alone."""
    if len(found.given) != len(found.expected) or not float(found.expected.norm()):
        return None
    shares = (1e-3, EXPLAINED)
    factors = [_ratio(*pair, share) for pair, share in zip(found.compared, shares, strict=False) if pair[1].any()]
    factor, slope = factors[0], factors[-1]
    if factor is None or slope is None:
        return None
    if len(factors) == 1:
        simple = any(abs(factor - x) <= 1e-5 * x for x in (2.0, 0.5, float(len(found.case.anchors()))))
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
    anchors, pairs = len(found.case.anchors()), int(found.right.setting.counts.sum())
    mean, temperature, scale = found.right.reduction == "mean", found.temperature, found.right.factor
    counted = anchors - len(found.alone)
    if mean and anchors > 2:
        yield anchors, f"the sum over {anchors} anchors is not divided by their number"
    if found.right.reduction == "sum" and anchors > 2:
        yield 1 / anchors, f"the sum over {anchors} anchors is divided by their number, where the sum is required"
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
        yield anchors / pairs, f"the sum over {anchors} anchors is divided by {pairs}, the number of pairs"


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
    right, setting = found.right, found.right.setting
    anchors, pairs = len(found.case.anchors()), int(setting.counts.sum())
    one = replace(right, variant=replace(right.variant, form="mean")) if right.variant.form == "sum" else right
    if right.reduction == "none":
        if found.alone:
            policy = "zero" if right.policy == "drop" else "drop"
            yield replace(one, policy=policy, words=_policy_words(found, policy))
    else:
        if right.variant.form == "mean" and pairs != anchors:
            words = f"the mean is over {pairs} pairs, not over {anchors} anchors"
            over_pairs = replace(right, variant=replace(right.variant, form="sum"), reduction="mean_pairs")
            yield replace(over_pairs, policy="zero", words=words)
        for reduction in ("mean", "sum"):
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

    def other(words: str = "", **parts: Any) -> Suspect:
        return replace(right, variant=replace(variant, **parts), words=words)

    def read_as(settings: Iterable[tuple[str, Setting]]) -> Iterator[Suspect]:
        for words, setting in settings:
            if _differ(setting, right.setting):
                yield replace(right, setting=setting, words=words)

    # What depends on this very batch comes before the forms that agree with it there by chance.
    yield from read_as(_batch_settings(found))
    yield from read_as(_case_settings(found))
    for flow, words in FLOWS.items():
        if words:
            yield other(f"the value is right, but {words}", flow=flow)
    for name in ("cosine", "dot"):
        yield other(similarity=name)
    chosen = dict(variant.options)
    for option in () if variant.in_parts else found.loss.formula_options:
        value = chosen.get(option, found.loss.keywords[option])
        for choice in found.loss.choices.get(option, ()):
            words = f"{option}={choice} is computed, not {option}={value}"
            yield other(words, options=tuple({**chosen, option: choice}.items()))
    if variant.in_parts and not variant.binary:
        for name in ("all", "one_positive", "only_negatives"):
            yield other(denominator=name)
        for name in ("mean", "inside"):
            yield other(form=name)
        if variant.guard:
            yield other("no epsilon is added", guard="")
            yield other(FLOWS["maximum"], flow="maximum")
    for wrong in (*temperings(variant), *variations(variant, CASE)):
        # Two towers have no diagonal that could be subtracted.
        if not (found.loss.two_towers and wrong.denominator == "subtract"):
            yield replace(right, variant=wrong)
    if "negatives" in found.case.others:
        yield from read_as(_queue_settings(found))
    if variant.similarity == "cosine":
        for words, rows in _other_norms(found):
            yield _dot(found, rows, words)


def _dot(found: _Failure, rows: Tensor, words: str = "") -> Suspect:
    """Dot products of rows in place of the case's."""
    variant = replace(found.right.variant, similarity="dot")
    return replace(found.right, variant=variant, setting=replace(found.right.setting, rows=rows), words=words)


def _differ(a: Setting, b: Setting) -> bool:
    names = ("member", "positive", "own", "anchors")
    return a.rows is not b.rows or any(not torch.equal(getattr(a, name), getattr(b, name)) for name in names)


NARROWED: Mapping[str, Callable[[int], object]] = {
    "labels are narrowed to float32: large ones that lie close together become one class": np.float32,
    "labels are narrowed to float16: large ones become one class": lambda x: np.float64(x).astype(np.float16),
    "labels are narrowed to 32 bits or fewer: those that differ by a multiple of 2^32 become one class": (
        lambda x: x % 2**32
    ),
    "labels are narrowed to bytes: those that differ by a multiple of 256 become one class": lambda x: x % 256,
}


def _batch_settings(found: _Failure) -> Iterator[tuple[str, Setting]]:
    """Labels that are narrowed or ignored, and rows that are lost or taken for one another."""
    case, right, n = found.case, found.right.setting, found.case.n
    labels = {name: case.arguments[name] for name in ("labels", "ref_labels") if name in case.arguments}
    for words, narrow in NARROWED.items() if labels else ():
        with np.errstate(over="ignore"):
            seen = {name: [narrow(int(x)) for x in side] for name, side in labels.items()}
        numbers = {value: k for k, value in enumerate(dict.fromkeys(v for side in seen.values() for v in side))}
        given = {name: [numbers[value] for value in side] for name, side in seen.items()}
        yield words, case_setting(replace(case, arguments={**case.arguments, **given}), found.rows)
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

    def again(**keywords: Any) -> Setting:
        return case_setting(replace(case, keywords={**case.keywords, **keywords}), found.rows)

    if case.option("anchors") is not None:
        yield f"all {n} rows are anchors, not the {len(case.anchors())} that are chosen", again(anchors=None)
    if "self_rows" in case.arguments:
        arguments = {key: value for key, value in case.arguments.items() if key != "self_rows"}
        other = case_setting(replace(case, arguments=arguments), found.rows)
        yield "the reference that is the anchor itself is not left out", other
    if found.loss.two_towers:
        anchors = {"both": f"all {2 * n} rows", "a_to_b": f"the {n} rows of a", "b_to_a": f"the {n} rows of b"}
        for direction, name in anchors.items():
            yield f"the anchors are {name}, not {anchors[case.option('direction')]}", again(direction=direction)
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
    b, queue = (_part(found, name)[:, 0] for name in ("embeddings_b", "negatives"))
    # The rows of the tower in which an anchor's positive is.
    tower = torch.where((right.positive & b).any(dim=1)[:, None], b, ~b & ~queue) & right.anchors[:, None]
    words = "the negatives that are passed are not used: the other keys of the batch are negatives"
    yield words, replace(right, member=tower)
    words = "the other keys of the batch are negatives beside those that are passed"
    yield words, replace(right, member=right.member | tower)
    detached = torch.where(queue[:, None], rows.detach(), rows)
    yield "the value is right, but no gradient flows into the negatives", replace(right, rows=detached)


def _part(found: _Failure, name: str) -> Tensor:
    """Bool [M, 1], the rows of one matrix of the case."""
    part = torch.zeros(len(found.rows), 1, dtype=torch.bool)
    part[matrix_rows(found.case)[name]] = True
    return part


def _other_norms(found: _Failure) -> Iterator[tuple[str, Tensor]]:
    """Rows that are brought to other norms than 1, some of them or all."""
    rows = found.rows
    unit = rows / rows.norm(dim=1, keepdim=True)
    if "negatives" in found.case.others:
        queue = _part(found, "negatives")
        yield "the negatives that are passed are not normalised", torch.where(queue, rows, unit)
        words = "the temperature is not applied to the negatives that are passed"
        yield words, torch.where(queue, unit * found.temperature, unit)
    if found.loss.two_towers:
        for name, other in (found.loss.embeddings, found.loss.embeddings[::-1]):
            yield f"only {name} is normalised, and {other} is not", torch.where(_part(found, other), rows, unit)
    centred = rows - rows.mean(dim=1, keepdim=True)
    spread = (centred**2).mean(dim=1, keepdim=True).sqrt()
    yield "rows go through a layer norm: they are centred, and of norm sqrt(D)", centred / spread
    yield "rows are centred before they are normalised", centred / centred.norm(dim=1, keepdim=True)


# A variant in words


def _words(found: _Failure, other: Variant) -> str:
    """What differs between a case and a variant, counted at one anchor."""
    right = found.right.variant
    if other.positives != right.positives:
        return words_of(other.positives)
    if other.similarity != right.similarity:
        if other.similarity == "dot":
            return "similarities are raw dot products: rows are not brought to norm 1"
        if other.similarity == "cosine":
            return "rows are brought to norm 1, where raw dot products are required"
        return f"similarities: {words_of(other.similarity)}"
    if other.tempering != right.tempering:
        return f"{words_of(other.tempering)} ({found.temperature:g})"
    if other.numerator != right.numerator:
        return f"{words_of(other.numerator)} ({found.temperature:g})"
    if other.denominator != right.denominator:
        return _denominator_words(found, right.denominator, other.denominator)
    if other.guard != right.guard:
        return GUARDS[other.guard]
    if other.form == "inside":
        return "the mean over the positives is taken inside the logarithm, not outside it"
    if other.form == "mean" and right.form == "inside":
        return "the mean over the positives is taken outside the logarithm, not inside it"
    return f"{words_of(other.form)} (anchor {found.anchor} has {len(found.case.positives()[found.anchor])})"


OTHER_DENOMINATORS: Mapping[tuple[str, str], str] = {
    ("all", "one_positive"): "lacks the other positives",
    ("all", "only_negatives"): "lacks the positives",
    ("one_positive", "only_negatives"): "lacks its own positive",
    ("one_positive", "all"): "holds the other positives",
    ("only_negatives", "all"): "holds the positives",
    ("only_negatives", "one_positive"): "holds the positive itself",
}
"""What a denominator of the catalogue lacks or holds where another is right: by the right one and the other."""


def _denominator_words(found: _Failure, right: str, other: str) -> str:
    """Which terms are missing from a denominator, and which are too many."""
    case, setting = found.case, found.right.setting
    expected, given = DENOMINATORS[right], DENOMINATORS[other]
    if given.combine is not log_sum or other == "one":
        return given.words
    positives, places = case.positives(), similarity_rows(case)
    for i in (found.anchor, *case.anchors()):
        row = places[i][0]
        wanted, seen = expected.terms(setting, row), given.terms(setting, row)
        if wanted == seen or not positives[i]:
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
