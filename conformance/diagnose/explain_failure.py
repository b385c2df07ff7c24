"""What a failing check computed instead: the recipe that explains its value and its gradient, in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..suite.cases import Case
from ..suite.records import Matrix, Outcome, Truth
from .positives import CASE_READINGS, READINGS, Setting, case_setting, same
from .variants import (
    DENOMINATORS,
    EPSILON_GUARD,
    FLOWS,
    FORMS,
    NUMERATORS,
    POLICIES,
    SIMILARITIES,
    STEMS,
    TEMPERINGS,
    Evaluation,
    Recipe,
    guard_words,
    reduce_anchors,
    temperings,
    variations,
)

Tensor = torch.Tensor

LARGEST_DIAGNOSED = 80
"""The size of a case up to which its failures are diagnosed: hundreds of hypotheses are evaluated for each."""

EXPLAINED = 0.02
"""How much of a departure may remain where value and gradient are both compared: halves are rounded that much."""

EXPLAINED_BY_VALUE = 1e-4
"""The same where there is one number alone, which hundreds of hypotheses would hit by chance otherwise."""

SLIGHT = "it is off by"
"""How a text begins that finds nothing but lost digits."""

DTYPE_NOISE = 1e-6
"""A departure relative to the truth below which there is nothing to be explained in it."""


@dataclass(frozen=True, eq=False)
class Suspect:
    """What a target may have computed for a case.

    Attributes:
        recipe: its parts; the reading is in ``setting``.
        setting: who is compared with whom, as the target may have seen it.
        reduction: of the sum: a name of ``COUNTS``, or "none".
        policy: for anchors without positive.
        words: what is wrong, where the recipe does not tell.
        scale: what values are multiplied with.
    """

    recipe: Recipe
    setting: Setting
    reduction: str
    policy: str
    words: str = ""
    scale: float = 1.0


def case_recipe(case: Case) -> Recipe:
    """The loss of a case as a recipe."""
    recipe = Recipe(similarity=str(case.option("similarity")))
    if case.loss in ("supcon", "supcon_in"):
        form = "mean" if case.loss == "supcon" else "inside"
        return replace(recipe, denominator=str(case.option("denominator")), form=form)
    if case.loss == "nt_xent_pairwise":
        form = "sum" if case.option("reduction") == "mean_pairs" else "mean"
        return replace(recipe, denominator="one_positive", form=form)
    if case.loss == "nt_bxent":
        return replace(recipe, form="binary")
    return replace(recipe, guard=EPSILON_GUARD) if case.loss == "supcon_epsilon" else recipe


def case_rows(case: Case) -> Tensor:
    """[M, D], the matrices of a case one after the other, as a leaf that requires a gradient."""
    return torch.cat([torch.tensor(matrix) for matrix in case.matrices.values()]).requires_grad_()


class _Diagnosis:
    """One failing check, and the suspects held against it."""

    def __init__(self, case: Case, outcome: Outcome, truth: Truth) -> None:
        self.case, self.outcome, self.truth = case, outcome, truth
        self.rows = case_rows(case)
        self.right = case_setting(case, self.rows)
        self.recipe = case_recipe(case)
        self.temperature = float(case.option("temperature"))
        base = case.option("base_temperature")
        self.scale = 1.0 if base is None else self.temperature / float(base)
        self.reduction = str(case.option("reduction"))
        self.policy = str(case.option("no_positive") or "zero")
        self._evaluations: dict[int, tuple[Setting, Evaluation]] = {}
        self.given = torch.tensor(outcome.values, dtype=torch.float64)
        self.expected = torch.tensor(truth.values, dtype=torch.float64)
        self.given_gradient = _joined(case, outcome.gradient, outcome.other_gradients)
        self.true_gradient = _joined(case, truth.gradient, truth.other_gradients)

    def value(self, suspect: Suspect, rows: Tensor | None = None) -> Tensor:
        """What the suspect gives."""
        key = id(suspect.setting)
        if key not in self._evaluations:
            at = torch.tensor([self.temperature], dtype=torch.float64)
            self._evaluations[key] = suspect.setting, Evaluation(suspect.setting, at)
        each = self._evaluations[key][1].anchors(suspect.recipe)[0]
        return reduce_anchors(suspect.setting, each, suspect.reduction, suspect.policy) * suspect.scale

    def explains(self, suspect: Suspect) -> float | None:
        """What remains of the departure, where the suspect explains value and gradient; else None."""
        found = self.value(suspect).reshape(-1)
        if len(found) != len(self.given) or not bool(found.isfinite().all()):
            return None
        allowed = EXPLAINED if self.given_gradient is not None or len(found) > 2 else EXPLAINED_BY_VALUE
        remaining = _remaining(found.detach(), self.given, self.expected)
        # So that NaN explains nothing.
        if not remaining <= allowed:
            return None
        if self.given_gradient is None or self.true_gradient is None:
            return remaining
        gradient = torch.zeros_like(self.rows)
        if found.requires_grad:
            (gradient,) = torch.autograd.grad(found.sum(), self.rows, retain_graph=True, materialize_grads=True)
        left = _remaining(gradient, self.given_gradient, self.true_gradient)
        return max(remaining, left) if left <= EXPLAINED else None

    @property
    def broken(self) -> str:
        """What to say of a gradient that is no number where the value is right; else nothing."""
        given = {self.case.first: self.outcome.gradient, **self.outcome.other_gradients}
        odd = {
            name: int((~np.isfinite(matrix).all(axis=1)).sum())
            for name, matrix in given.items()
            if matrix is not None and not np.isfinite(matrix).all()
        }
        right = len(self.given) == len(self.expected) and _departure(self.given, self.expected) <= DTYPE_NOISE
        if not odd or not right:
            return ""
        where = ", ".join(f"{rows} of {len(self.case.matrices[name])} rows of {name}" for name, rows in odd.items())
        return (
            f"the value is right, and the gradient is NaN or infinite in {where}, as where a branch that torch.where"
            " does not take divides by 0 or takes its logarithm"
        )

    @property
    def slight(self) -> str:
        """What to say of a departure so small that every hypothesis which is right would explain it; else nothing."""
        sizes = [_departure(self.given, self.expected)] if len(self.given) == len(self.expected) else [math.inf]
        if self.given_gradient is not None and self.true_gradient is not None:
            sizes.append(_departure(self.given_gradient, self.true_gradient))
        if max(sizes) > DTYPE_NOISE:
            return ""
        return (
            f"{SLIGHT} {max(sizes):.1g} of its size: the formula is right, and digits are lost on the way, or something"
            " as small is added or cut off"
        )

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


def _departure(given: Tensor, expected: Tensor) -> float:
    """How far what was given is from the truth, as a share of its size."""
    away, size = float((given - expected).norm()), float(expected.norm())
    return away / size if size else math.inf if away else 0.0


def _remaining(found: Tensor, given: Tensor, expected: Tensor) -> float:
    """How far ``found`` is from what was given, as a share of how far the truth is from it."""
    if not bool(given.isfinite().all()):
        return math.inf
    departure, left, size = (float(x.norm()) for x in (given - expected, given - found, expected))
    noise = DTYPE_NOISE * size
    if left <= noise:
        return 0.0
    return left / max(departure, noise) if max(departure, noise) else math.inf


def diagnose(case: Case, outcome: Outcome, truth: Truth) -> str | None:
    """The first differing term of a failing check, in words, as far as its value and its gradient reveal it.

    Args:
        case: the case.
        outcome: what the target gave.
        truth: what it should have given.

    Returns:
        What was computed instead, or None where nothing that is known explains it.
    """
    if case.size > LARGEST_DIAGNOSED or len(case.anchors()) == 0:
        return None
    found = _Diagnosis(case, outcome, truth)
    if not bool(found.given.isfinite().all()):
        return _not_finite(found)
    if not bool(found.expected.isfinite().all()):
        return "a number is returned where the policy asks for NaN"
    if found.broken:
        return found.broken
    if found.slight:
        return found.slight
    simple = _norms(found) or _scaled(found)
    if simple is not None:
        return simple
    best: tuple[float, Suspect] | None = None
    for suspects in (_reduced(found), _suspects(found)):
        for suspect in suspects:
            remaining = found.explains(suspect)
            if remaining is not None and (best is None or remaining < best[0] / 2):
                best = remaining, suspect
        if best is not None:
            return best[1].words or _words(found, best[1])
    return None


CLAMP = 1e-12
"""The least norm that torch divides by in ``normalize``."""

SQUARES_OVERFLOW = (1.8e19, 1.3e154)
"""Norms whose squares leave float32, and float64."""


def _norms(found: _Diagnosis) -> str | None:
    """Rows that are not brought to norm 1 because their norms are too small or too large to be computed so."""
    if found.recipe.similarity != "cosine":
        return None
    rows = found.rows.detach()
    largest = rows.abs().amax(1, keepdim=True)
    norms = largest * (rows / largest).norm(dim=1, keepdim=True)
    for end in SQUARES_OVERFLOW:
        odd = ((norms < CLAMP) | (norms > end)).reshape(-1).nonzero().reshape(-1).tolist()
        if not odd:
            continue
        unit = torch.where(norms > end, 0.0, rows / norms.clamp(min=CLAMP))
        setting = case_setting(found.case, unit)
        suspect = Suspect(
            replace(found.recipe, similarity="dot"), setting, found.reduction, found.policy, "", found.scale
        )
        value = found.value(suspect).reshape(-1)
        if len(value) == len(found.given) and _remaining(value, found.given, found.expected) <= EXPLAINED_BY_VALUE:
            which = f"row {odd[0]} is" if len(odd) == 1 else f"{len(odd)} rows, from row {odd[0]} on, are"
            size = float(norms[odd[0]])
            return (
                f"{which} not brought to norm 1: a norm of {size:.2g} is clamped, or the squares under its root leave"
                " the range of the dtype"
            )
    return None


def _times_words(factor: float) -> str:
    if abs(factor) < 1e-12:
        return "the loss is 0"
    if factor < 0:
        wrong_sign = "values have the wrong sign"
        return wrong_sign if abs(factor + 1) < 1e-5 else f"{wrong_sign}, and are {-factor:.6g} times as large"
    larger, share = ("large", factor) if abs(factor) > 1 else ("small", 1 / factor)
    return f"values are {share:.6g} times too {larger}"


def _scaled(found: _Diagnosis) -> str | None:
    """Values, and gradients, that are off by a factor; or gradients that are, alone."""
    given, expected = found.given, found.expected
    if len(given) != len(expected) or not float(expected.norm()):
        return None
    factor = float((given * expected).sum() / (expected * expected).sum())
    value_fits = float((given - factor * expected).norm()) <= 1e-3 * float((given - expected).norm()) + (
        DTYPE_NOISE * float(given.norm())
    )
    if found.given_gradient is None or found.true_gradient is None or not float(found.true_gradient.norm()):
        simple = any(abs(factor - x) <= 1e-5 * x for x in (2.0, 0.5, float(len(found.case.anchors()))))
        return _of_factor(found, factor) if simple and value_fits else None
    true, grad = found.true_gradient, found.given_gradient
    slope = float((grad * true).sum() / (true * true).sum())
    allowed = max(EXPLAINED * float((grad - true).norm()), DTYPE_NOISE * float(true.norm()))
    if float((grad - slope * true).norm()) > allowed:
        return None
    if not value_fits:
        return None
    if abs(factor - 1) < 1e-4 and abs(slope - 1) > 1e-3:
        if abs(slope) < 1e-9:
            return "the value is right, and no gradient flows"
        return f"the value is right, and the gradient is {slope:.6g} times the true one"
    if abs(factor - 1) > 1e-5 and abs(factor - slope) <= EXPLAINED * abs(factor - 1):
        return _of_factor(found, factor)
    return None


SIMPLE = (2.0, 0.5, 4.0, 0.25)
"""Factors that stand in formulas by themselves, so that what else is as large may be a coincidence."""


def _of_factor(found: _Diagnosis, factor: float) -> str:
    """A factor in words: where it comes from, or that this may be where."""
    words, cause = _times_words(factor), _cause_of(found, factor)
    if cause is None:
        return words
    return f"{words}; it may be that {cause}" if any(abs(factor - x) <= 1e-4 * x for x in SIMPLE) else cause


def _cause_of(found: _Diagnosis, factor: float) -> str | None:
    """What of the case is as large as a factor, in words."""
    case = found.case
    anchors, pairs = len(case.anchors()), int(found.right.counts.sum())
    temperature = found.temperature
    if found.reduction == "mean" and abs(factor - anchors) <= 1e-4 * anchors and anchors > 2:
        return f"the sum over {anchors} anchors is not divided by their number"
    if found.reduction == "sum" and abs(factor * anchors - 1) <= 1e-4 and anchors > 2:
        return f"the sum over {anchors} anchors is divided by their number, where the sum is asked for"
    counted = int((found.right.counts > 0).sum())
    if found.reduction == "mean" and 0 < counted < anchors and abs(factor * counted - anchors) <= 1e-4 * anchors:
        return _left_out(found)
    if found.reduction == "mean" and 0 < counted < anchors and abs(factor * anchors - counted) <= 1e-4 * counted:
        return _counted_anyway(found)
    if abs(factor - temperature) <= 1e-4 * temperature:
        return f"values are multiplied by the temperature, {temperature:g}"
    for base in (0.07, found.case.option("base_temperature")):
        if base and abs(factor * float(base) - temperature) <= 1e-4 * temperature:
            return f"values are multiplied by temperature/{float(base):g}, a base temperature that is not asked for"
    if found.scale != 1 and abs(factor * found.scale * found.scale - 1) <= 1e-4:
        return "values are multiplied by base_temperature/temperature, not by temperature/base_temperature"
    if found.scale != 1 and abs(factor * found.scale - 1) <= 1e-4:
        return "values are not multiplied by temperature/base_temperature"
    if pairs and found.reduction == "mean" and abs(factor * pairs - anchors) <= 1e-4 * anchors and pairs != anchors:
        return f"the sum over {anchors} anchors is divided by {pairs}, the number of pairs"
    return None


def _lonely(found: _Diagnosis) -> list[int]:
    positives = found.case.positives()
    return [i for i in found.case.anchors() if not positives[i]]


def _named(rows: list[int]) -> str:
    if len(rows) == 1:
        return f"anchor {rows[0]} has"
    return f"anchors {', '.join(map(str, rows[:-1]))} and {rows[-1]} have"


def _left_out(found: _Diagnosis) -> str:
    rows = _lonely(found)
    were = "was" if len(rows) == 1 else "were"
    return f"{_named(rows)} no positive and {were} left out of the mean"


def _counted_anyway(found: _Diagnosis) -> str:
    rows = _lonely(found)
    were = "was" if len(rows) == 1 else "were"
    return f"{_named(rows)} no positive and {were} counted in the mean, as 0"


def _not_finite(found: _Diagnosis) -> str | None:
    """Why NaN or infinity came back where a number is due."""
    if not bool(found.expected.isfinite().all()):
        return None
    case = found.case
    odd = "NaN" if bool(found.given.isnan().any()) else "infinity"
    setting, positives = found.right, case.positives()
    with torch.no_grad():
        at = torch.tensor([found.temperature], dtype=torch.float64)
        logits = (SIMILARITIES[found.recipe.similarity].measure(found.rows, found.rows, setting) / at).detach()
    seen = logits.masked_fill(~(setting.member & setting.anchors[:, None]), -math.inf)
    largest = float(seen.max())
    overflow = f"{odd}: the largest logit is {largest:.4g}, whose exponential overflows; no maximum is subtracted"
    if _lonely(found):
        words = f"{_named(_lonely(found))} no positive, and the loss becomes {odd}: 0 divided by 0, or a logarithm of 0"
        return f"{words}; or {overflow}" if largest > 88.7 else words
    alone = [i for i, members in enumerate(case.members()) if i in case.anchors() and len(positives[i]) == len(members)]
    if alone:
        return f"{_named(alone)} no negative, and the loss becomes {odd}"
    if bool((found.given == -math.inf).any()):
        return "minus infinity: all that a denominator sums underflows, and its logarithm is of 0"
    if largest > 88.7:
        return overflow
    own = logits.masked_fill(~setting.own, -math.inf).amax(dim=1)
    drowned = ((own - seen.amax(dim=1)) > 87).nonzero().reshape(-1).tolist()
    if drowned:
        return f"{odd}: the maximum of row {drowned[0]} is taken with the anchor itself in it, and all others underflow"
    if -float(seen.masked_fill(seen == -math.inf, math.inf).min()) > 80 or largest > 80:
        return f"{odd}: exponentials leave the range of the dtype; logits reach {largest:.4g}"
    return None


def _reduced(found: _Diagnosis) -> Iterator[Suspect]:
    """Other policies and other means than the case asks for."""
    case, setting = found.case, found.right
    anchors, pairs = len(case.anchors()), int(setting.counts.sum())
    one = replace(found.recipe, form="mean" if found.recipe.form == "sum" else found.recipe.form)
    if found.reduction != "none":
        if found.recipe.form == "mean" and pairs != anchors:
            yield Suspect(
                replace(one, form="sum"),
                setting,
                "mean_pairs",
                "zero",
                f"the mean is over {pairs} pairs, not over {anchors} anchors",
                found.scale,
            )
        for reduction in ("mean", "sum"):
            for policy in POLICIES[:2]:
                if (reduction, policy) == (found.reduction, found.policy):
                    continue
                if reduction == found.reduction and not _lonely(found):
                    continue
                words = f"the {reduction} over {anchors} anchors is taken, not the {found.reduction}"
                if reduction == found.reduction or found.reduction == "mean_pairs":
                    words = _left_out(found) if policy == "drop" and _lonely(found) else words
                    if policy == "zero" and found.policy == "drop" and _lonely(found):
                        words = _counted_anyway(found)
                    if found.reduction == "mean_pairs" and not _lonely(found):
                        words = f"the mean is over {anchors} anchors, not over {pairs} pairs"
                yield Suspect(one, setting, reduction, policy, words, found.scale)
    elif _lonely(found):
        policy = "zero" if found.policy == "drop" else "drop"
        words = _counted_anyway(found).replace("in the mean, as 0", "") if policy == "zero" else _left_out(found)
        yield Suspect(one, setting, "none", policy, words.replace(" of the mean", ""), found.scale)
    if found.scale != 1:
        yield Suspect(found.recipe, setting, found.reduction, found.policy, "the base temperature is not applied", 1.0)


def _suspects(found: _Diagnosis) -> Iterator[Suspect]:
    """Every modification of one part, and every other choice of an option."""
    recipe, setting = found.recipe, found.right

    def suspect(other: Recipe, seen: Setting = setting, words: str = "") -> Suspect:
        return Suspect(other, seen, found.reduction, found.policy, words, found.scale)

    # What hangs on this very batch comes before the forms that agree with it there by chance.
    yield from (suspect(recipe, seen, words) for seen, words in _of_labels(found))
    for flow in FLOWS:
        if flow != "whole":
            yield suspect(replace(recipe, flow=flow), words=f"the value is right, but {FLOWS[flow]}")
    for name in ("cosine", "dot"):
        yield suspect(replace(recipe, similarity=name))
    if not recipe.form.startswith("binary"):
        for name in STEMS:
            yield suspect(replace(recipe, denominator=name))
        for name in ("mean", "inside"):
            yield suspect(replace(recipe, form=name))
        if recipe.guard:
            yield suspect(replace(recipe, guard=""), words="no epsilon is added")
            yield suspect(replace(recipe, flow="maximum"), words=FLOWS["maximum"])
    for other in (*temperings(recipe), *variations(recipe, "")):
        # Two towers have no diagonal that could be subtracted.
        if not (found.case.loss == "info_nce" and other.denominator.startswith("subtract")):
            yield suspect(other)
    for name, change in CASE_READINGS.items():
        if name != "meant":
            yield suspect(recipe, change(setting), READINGS[name].words)
    yield from (suspect(recipe, seen, words) for seen, words in _case_settings(found))
    if "negatives" in found.case.others:
        yield from (suspect(*rest) for rest in _of_queue(found))
    if recipe.similarity == "cosine":
        dot = replace(recipe, similarity="dot")
        yield from (suspect(dot, replace(setting, rows=rows), words) for rows, words in _of_norms(found))


def _case_settings(found: _Diagnosis) -> Iterator[tuple[Setting, str]]:
    """Other readings of what the case passes beside labels."""
    case, rows = found.case, found.rows
    n = case.n
    if case.option("anchors") is not None:
        everyone = replace(case, keywords={**case.keywords, "anchors": None})
        yield case_setting(everyone, rows), f"all {n} rows are anchors, not the {len(case.anchors())} that are chosen"
    if "self_rows" in case.arguments:
        arguments = {key: value for key, value in case.arguments.items() if key != "self_rows"}
        words = "the reference that is the anchor itself is not left out"
        yield case_setting(replace(case, arguments=arguments), rows), words
    if case.loss == "info_nce":
        for direction in ("both", "a_to_b", "b_to_a"):
            if direction != case.option("direction"):
                other = replace(case, keywords={**case.keywords, "direction": direction})
                anchors = {"both": f"all {2 * n} rows", "a_to_b": f"the {n} rows of a", "b_to_a": f"the {n} rows of b"}
                asked = anchors[str(case.option("direction"))]
                yield case_setting(other, rows), f"the anchors are {anchors[direction]}, not {asked}"
        if "negatives" not in case.others:
            seen = found.right
            words = "rows of the same tower are in the denominator too"
            yield replace(seen, member=~torch.eye(len(rows), dtype=torch.bool) & seen.anchors[:, None]), words
    if case.loss == "nt_xent" and "ref_embeddings" not in case.others and n % 2 == 0:
        for words, order in _orders(case):
            place = torch.empty(n, dtype=torch.int64)
            place[torch.tensor(order)] = torch.arange(n)
            for kind, item in (("side by side", place // 2), ("stacked", place % (n // 2))):
                positive = same(item) & found.right.member
                if not torch.equal(positive, found.right.positive):
                    yield replace(found.right, positive=positive), f"views are taken to lie {kind}, {words}"


def _of_labels(found: _Diagnosis) -> Iterator[tuple[Setting, str]]:
    """Labels that are narrowed, or not looked at, and rows that are lost or taken for one another."""
    case, right = found.case, found.right
    if "labels" in case.arguments:
        sides = [name for name in ("labels", "ref_labels") if name in case.arguments]
        narrowed: dict[str, Callable[[int], object]] = {
            "labels are narrowed to float32: large ones that lie close together become one class": np.float32,
            "labels are narrowed to float16: large ones become one class": lambda x: np.float64(x).astype(np.float16),
            "labels are narrowed to 32 bits or fewer: those that differ by a multiple of 2^32 become one class": (
                lambda x: x % 2**32
            ),
            "labels are narrowed to bytes: those that differ by a multiple of 256 become one class": lambda x: x % 256,
        }
        for words, narrow in narrowed.items():
            with np.errstate(over="ignore"):
                seen = {name: [narrow(int(x)) for x in case.arguments[name]] for name in sides}
            numbers = {value: k for k, value in enumerate(dict.fromkeys(v for side in seen.values() for v in side))}
            given = {name: [numbers[value] for value in side] for name, side in seen.items()}
            yield from _if_other(
                right, case_setting(replace(case, arguments={**case.arguments, **given}), found.rows), words
            )
        if any(int(x) < 0 for x in case.arguments["labels"]):
            positive = right.positive.clone()
            for k, label in enumerate(case.arguments["labels"]):
                if int(label) < 0:
                    positive[k] = False
                    positive[:, k] = False
            yield replace(right, positive=positive), "a row with a negative label is nobody's positive, and has none"
    if len(case.matrices) > 1:
        return
    n = case.n
    if n % 2:
        kept = torch.arange(n) < n - 1
        cut = replace(
            right,
            member=right.member & kept & kept[:, None],
            positive=right.positive & kept & kept[:, None],
            anchors=right.anchors & kept,
        )
        yield cut, f"the last of {n} rows is lost: the batch is cut to an even number"
    unit = found.rows.detach() / found.rows.detach().norm(dim=1, keepdim=True)
    equal = (unit[:, None] == unit[None]).all(dim=2) & ~right.own
    if bool((equal & right.member).any()):
        words = "rows that equal the anchor are left out with it, as if they were the anchor itself"
        yield replace(right, member=right.member & ~equal, positive=right.positive & ~equal), words
    place = torch.arange(n)
    beside = same(place // 2) & right.member
    if "labels" in case.arguments:
        words = "rows that stand side by side are taken for positives, whatever their labels are"
        yield from _if_other(right, replace(right, positive=beside), words)
    if case.loss == "nt_xent" and not case.others:
        view = torch.empty(n, dtype=torch.int64)
        _, order = next(_orders(case))
        view[torch.tensor(order)] = torch.arange(n) // (n // 2)
        alone = replace(right, member=right.positive | (same(view) & right.member))
        yield from _if_other(right, alone, "the negatives are the rows of the anchor's own view alone")


def _if_other(right: Setting, seen: Setting, words: str) -> Iterator[tuple[Setting, str]]:
    if not (torch.equal(right.positive, seen.positive) and torch.equal(right.member, seen.member)):
        yield seen, words


def _parts(case: Case) -> dict[str, slice]:
    """Where each matrix lies among the joined rows."""
    found, start = {}, 0
    for name, matrix in case.matrices.items():
        found[name] = slice(start, start + len(matrix))
        start += len(matrix)
    return found


def _of_queue(found: _Diagnosis) -> Iterator[tuple[Recipe, Setting, str]]:
    """What becomes of explicit negatives."""
    right, parts, recipe = found.right, _parts(found.case), found.recipe
    queue = torch.zeros(len(found.rows), dtype=torch.bool)
    queue[parts["negatives"]] = True
    # The rows of the tower in which an anchor's positive is.
    tower = torch.zeros_like(right.member)
    for name in ("embeddings_a", "embeddings_b"):
        inside = torch.zeros(len(found.rows), dtype=torch.bool)
        inside[parts[name]] = True
        tower |= (right.positive & inside).any(dim=1)[:, None] & inside
    ignored = replace(right, member=tower & right.anchors[:, None])
    yield recipe, ignored, "the negatives that are passed are not used: the other keys of the batch are negatives"
    beside = replace(right, member=(right.member | tower) & right.anchors[:, None])
    yield recipe, beside, "the other keys of the batch are negatives beside those that are passed"
    detached = torch.where(queue[:, None], found.rows.detach(), found.rows)
    yield recipe, replace(right, rows=detached), "the value is right, but no gradient flows into the negatives"
    if recipe.similarity != "cosine":
        return
    unit = found.rows / found.rows.norm(dim=1, keepdim=True)
    dot = replace(recipe, similarity="dot")
    lengths = (
        (found.rows, "the negatives that are passed are not normalised"),
        (unit * found.temperature, "the temperature is not applied to the negatives that are passed"),
    )
    for rows, words in lengths:
        yield dot, replace(right, rows=torch.where(queue[:, None], rows, unit)), words


def _of_norms(found: _Diagnosis) -> Iterator[tuple[Tensor, str]]:
    """Rows that are brought to other lengths than 1, some of them or all."""
    unit = found.rows / found.rows.norm(dim=1, keepdim=True)
    if found.case.loss == "info_nce":
        parts = _parts(found.case)
        for name, other in (("embeddings_a", "embeddings_b"), ("embeddings_b", "embeddings_a")):
            rows = unit.clone()
            rows[parts[other]] = found.rows[parts[other]]
            yield rows, f"only {name} is normalised, and {other} is not"
    centred = found.rows - found.rows.mean(dim=1, keepdim=True)
    spread = (centred**2).mean(dim=1, keepdim=True).sqrt()
    yield centred / spread, "rows go through a layer norm: they are centred, and of norm sqrt(D)"
    yield centred / centred.norm(dim=1, keepdim=True), "rows are centred before they are normalised"


def _orders(case: Case) -> Iterator[tuple[str, list[int]]]:
    partners = [int(p) for p in case.arguments["partners"]]
    first = [i for i, p in enumerate(partners) if i < p]
    yield "where they are stacked: anchors have wrong partners", first + [partners[i] for i in first]
    yield "whatever the partners are", list(range(case.n))


def _words(found: _Diagnosis, suspect: Suspect) -> str:
    """What differs between a case and a suspect, counted at one anchor."""
    right, other = found.recipe, suspect.recipe
    if other.similarity != right.similarity:
        if other.similarity == "dot":
            return "similarities are raw dot products: rows are not brought to norm 1"
        if other.similarity == "cosine":
            return "rows are brought to norm 1, where raw dot products are asked for"
        return f"similarities: {SIMILARITIES[other.similarity].words}"
    if other.tempering != right.tempering:
        return f"{TEMPERINGS[other.tempering][0]} ({found.temperature:g})"
    if other.numerator != right.numerator:
        return f"{NUMERATORS[other.numerator]} ({found.temperature:g})"
    if other.denominator != right.denominator:
        return _denominator_words(found, right.denominator, other.denominator)
    if other.guard != right.guard:
        return guard_words(other.guard)
    if other.form == "inside":
        return "the mean over the positives is taken inside the logarithm, not outside it"
    if other.form == "mean" and right.form == "inside":
        return "the mean over the positives is taken outside the logarithm, not inside it"
    anchor = found.anchor
    counts = len(found.case.positives()[anchor])
    return f"{FORMS[other.form]} (anchor {anchor} has {counts})"


def _denominator_words(found: _Diagnosis, right: str, other: str) -> str:
    """Which terms are missing from a denominator, and which are too many."""
    case, setting = found.case, found.right
    expected, given = DENOMINATORS[right], DENOMINATORS[other]
    candidates = [found.anchor, *case.anchors()]
    rows = _rows_of_anchors(case)
    for i in candidates:
        row = rows[i]
        wanted, seen = expected.terms(setting, row), given.terms(setting, row)
        if wanted == seen and not given.special:
            continue
        if not case.positives()[i]:
            continue
        counted = f"{seen} term{'' if seen == 1 else 's'} instead of {wanted}"
        of = f"the denominator of anchor {i}"
        if other == "one":
            return given.words
        if given.special or given.leaks is not None:
            return given.words if given.special else f"{given.words} of anchor {i}: {counted}"
        others = given.columns(setting)[row] & ~expected.columns(setting)[row]
        own = bool((others & setting.own[row]).any())
        if own and not bool((others & setting.positive[row]).any()):
            return f"{of} holds the anchor itself: {counted}"
        if (right, other) in (("all", "one_positive"), ("all", "only_negatives"), ("one_positive", "only_negatives")):
            lacks = "its own positive" if right == "one_positive" else "the other positives"
            return f"{of} lacks {'the positives' if (right, other) == ('all', 'only_negatives') else lacks}: {counted}"
        if (right, other) in (("one_positive", "all"), ("only_negatives", "all")):
            return f"{of} holds {'the other' if right == 'one_positive' else 'the'} positives: {counted}"
        if (right, other) == ("only_negatives", "one_positive"):
            return f"{of} holds the positive itself: {counted}"
        return f"{given.words or of} (anchor {i}: {counted})"
    return given.words or f"the denominator is {other}, not {right}"


def _rows_of_anchors(case: Case) -> dict[int, int]:
    """The row of the joined matrices for each row of the case's similarities."""
    starts, m = {}, 0
    for name, matrix in case.matrices.items():
        starts[name] = m
        m += len(matrix)
    return {
        block.row + k: starts[block.left] + k for block in case.blocks() for k in range(len(case.matrices[block.left]))
    }
