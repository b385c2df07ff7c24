"""Which loss does a black box compute? Asked with small batches that tell the catalogue's losses apart.

The target answers a few questions: batches with classes of unequal size, rows of unequal norm, views, duplicates.
``search`` finds the recipe that explains all answers, with the temperature that is built in. How anchors without
positive and batches at the end of the range are treated is asked afterwards, and said.

What no recipe explains is compared with the wrong implementations of ``faults``, by name; then the nearest recipe is
told, and where it departs. A function that is none of them is said to be none.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from scipy.optimize import brentq

from ..implementations.callable import Batch
from ..implementations.sandbox import TargetError, TargetMisused, find
from .asking import Asked, Question
from .hypotheses import bases, describe
from .search import (
    CLEARLY,
    CLOSE,
    CLOSE_SINGLE,
    EXACT,
    GRID,
    PASSED,
    Match,
    Search,
    matches_of,
    plainness,
    relative,
)
from .variants import POLICIES

Tensor = torch.Tensor

PUBLISHED_BASE = 0.07
"""The base temperature of the original SupCon code: any factor is some temperature/base, so another is not believed."""

ROUNDING = 1e-12
"""A difference of values at the edge that is none."""

NOT_KNOWN, MISUSED, COULD_NOT_RUN = 1, 2, 3


@dataclass
class Identification:
    """What a target computes.

    Attributes:
        title: of the target.
        call: how it was called.
        verdict: "match", "wrong" (recognised, and no loss of the catalogue) or "none".
        loss: the catalogue's short name, where it is one or comes from one.
        options: its options that are not at their default.
        temperature: the one that is built in, as recovered; None where it is passed or nothing was recognised.
        factor: what the loss is multiplied with.
        wrong: what no loss of the catalogue does, in words.
        faults: names of the known faults that answer the same.
        remarks: how it treats what is at the edge, and what else is to be said.
        evidence: how closely, on how many questions.
        equals: other names for the same function.
        nearest: for "none", what comes nearest, and where it departs.
        match: the explanation.
        seconds: how long it took.
    """

    title: str
    call: str
    verdict: str = "none"
    loss: str = ""
    options: dict[str, str] = field(default_factory=dict)
    temperature: float | None = None
    factor: float = 1.0
    wrong: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    equals: list[str] = field(default_factory=list)
    nearest: str = ""
    notes: list[str] = field(default_factory=list)
    match: Match | None = None
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """0 for something that is recognised, 1 for what is none of them."""
        return 0 if self.verdict != "none" else NOT_KNOWN

    def lines(self) -> list[str]:
        """The report."""
        said = [f"{self.title}, called with {self.call}"]
        said += [f"  {note}" for note in self.notes]
        if self.verdict == "none":
            said.append("computes none of the losses that are known here, nor a known fault")
            if self.nearest:
                said.append(f"  nearest: {self.nearest}")
        else:
            options = ", ".join(f"{key}={value}" for key, value in self.options.items())
            at = ", temperature passed" if self.temperature is None else f", temperature {_short(self.temperature)}"
            said.append(f"computes {self.loss}" + (f" with {options}" if options else "") + at)
            if self.temperature is not None:
                said[-1] += " (built in, recovered)"
            said += [f"  but {words}" for words in self.wrong]
        said += [f"  known as the fault {name}" for name in self.faults]
        said += [f"  {remark}" for remark in self.remarks]
        said += [f"  the same function: {name}" for name in self.equals]
        said += [f"  evidence: {line}" for line in self.evidence]
        return said


def _short(value: float) -> str:
    """A number with as few digits as tell it to 1e-8."""
    for digits in range(1, 12):
        text = f"{value:.{digits}g}"
        if abs(float(text) - value) <= 1e-8 * abs(value):
            return text if "e+" not in text else f"{float(text):g}"
    return repr(value)


def identify(
    target: Any,
    *,
    call: str | None = None,
    arrays: str | None = None,
    limit: float | None = 60.0,
    title: str = "",
    notes: Sequence[str] = (),
) -> Identification:
    """Say which loss a black box computes.

    Args:
        target: a function, a class, an instance, or an ``External``.
        call: how it is called, one of "labels", "features", "views", "stacked", "pairs"; guessed from its parameters
            when None.
        arrays: "torch", "numpy" or "jax"; guessed when None.
        limit: seconds that one answer may take.
        title: what the target is called in the report.
        notes: what was guessed before.

    Raises:
        TargetError: it cannot be called, or answers nothing that can be used.
    """
    start = time.perf_counter()
    asked = Asked(target, call=call, arrays=arrays, limit=limit, notes=notes)
    found = Identification(title or asked.door.__name__, asked.called, notes=list(asked.notes))
    try:
        search = Search(asked)
    except TargetError as error:
        said = "; ".join(note for note in asked.notes if "guessed" in note)
        raise type(error)(f"{error} ({said})" if said else str(error)) from error
    told = _unusable(search)
    if told:
        found.remarks.append(told)
    matches = [] if told else matches_of(search)
    good = [match for match in matches if match.error <= search.close]
    if good:
        _say_match(found, search, good)
    found.remarks += [f"breaks on {name}: {error}" for name, error in search.broken.items()]
    _name_faults(found, search)
    if not good and not found.faults:
        _say_nearest(found, search, matches)
        _say_undetermined(found, search)
    found.seconds = time.perf_counter() - start
    return found


def _unusable(search: Search) -> str:
    """Why nothing can be told from the answers, or nothing."""
    totals = [search.answer(question).total for question in search.ordinary]
    if not any(math.isfinite(total) for total in totals):
        return "it answers every batch with NaN or infinity"
    if len(set(totals)) == 1:
        return f"it answers every batch with {totals[0]:g}"
    question = search.ordinary[0]
    try:
        again = search.target.ask(question)
    except TargetError as error:
        return f"asked the same batch again, it does not answer: {error}"
    once, twice = search.answer(question).total, again.total
    if relative(once, twice) > search.close:
        made = (
            ", or is random when it is constructed, as it is for each question" if search.target.door.constructs else ""
        )
        return f"it answers the same batch with {once:.6g} and with {twice:.6g}: it is random, or remembers{made}"
    return ""


def _say_undetermined(found: Identification, search: Search) -> None:
    """What explains the answers at any temperature: similarities, which no contrast enters."""
    if not search.undetermined:
        return
    match = min(search.undetermined, key=lambda match: (len(match.recipe.words()), plainness(match)))
    found.nearest = (
        f"{describe(match.base, match.recipe)}, which gives the same at more than one temperature: the answers hold"
        " none, and the loss contrasts nothing"
    )


def _say_broken_gradients(found: Identification, search: Search) -> None:
    """Batches on which the value is a number and the gradient is none."""
    asked = search.answered((*search.questions.alike, *search.questions.further, *search.questions.edges))
    answers = [(question, search.answer(question)) for question in asked]
    broken = [
        question.batch.name
        for question, answer in answers
        if math.isfinite(answer.total) and answer.gradient is not None and not bool(answer.gradient.isfinite().all())
    ]
    if len(broken) == len(answers):
        found.wrong.append("the gradient is NaN or infinite, though the value is a number")
    elif broken:
        found.wrong.append(f"the gradient is NaN or infinite on {', '.join(dict.fromkeys(broken))}")


def _say_match(found: Identification, search: Search, good: list[Match]) -> None:
    closest = min(match.error for match in good)
    near = [match for match in good if match.error <= max(closest * CLEARLY, 1e-12)]
    with_gradient = [search.with_gradient(match) for match in near]
    ranked = sorted(with_gradient, key=lambda match: _preference(match, search))
    match = ranked[0]
    found.match, found.loss = match, match.base.loss
    found.wrong += _wrong(match)
    policy = _policy(found, search, match)
    _say_reduction(found, match)
    found.options = {**match.base.options, **found.options}
    if match.base.policies and policy != "zero":
        found.options["no_positive"] = policy
    _say_temperature(found, search, match)
    if match.gradient_factor != 1:
        found.wrong.append(f"the gradient is {_short(match.gradient_factor)} times that of the value")
    elif match.gradient_error is not None and match.gradient_error > search.close:
        found.wrong.append(f"the gradient is not that of the value: off by {match.gradient_error:.2g} of its size")
    _say_broken_gradients(found, search)
    if search.target.arrays == "torch" and not any(answer.gradient is not None for answer in search.answers.values()):
        found.wrong.append("no gradient flows back to the embeddings")
    if match.error > EXACT and not search.single:
        found.remarks.append(
            f"close, but not the same to the last digits: something is added or cut off that changes values by"
            f" {match.error:.0e} of their size"
        )
    found.verdict = "wrong" if found.wrong else "match"
    _say_evidence(found, search, match)
    for other in ranked[1:]:
        same = len(_wrong(other)) == len(_wrong(match)) and plainness(other)[0] == plainness(match)[0]
        same = same and other.error <= search.close and other.base.loss != match.base.loss
        if same and _named(other) not in (*found.equals, _named(match)):
            found.equals.append(_named(other))
    _probe_range(found, search, match)


def _preference(match: Match, search: Search) -> tuple[Any, ...]:
    gradient = match.gradient_error is not None and match.gradient_error > search.close
    order = [base.loss for base in bases(search.target.call)]
    views_only = search.questions.alike[0].labels is None and search.target.call == "features"
    wanted = 0 if views_only and match.base.loss == "nt_xent" else 1
    plain, place = plainness(match)
    options = len(match.base.options)
    return gradient, len(_wrong(match)), plain, wanted, options, order.index(match.base.loss), place


def _over_pairs(match: Match) -> bool:
    return match.recipe.form == "sum" and match.count.name == "mean_pairs"


def _wrong(match: Match) -> list[str]:
    """What no loss of the catalogue does, in words."""
    if not _over_pairs(match):
        return match.recipe.words()
    words = replace(match.recipe, form="mean").words()
    return words if match.base.pairs else [*words, "the mean is over the positive pairs, not over the anchors"]


def _named(match: Match) -> str:
    """The loss and its options in one line."""
    recipe = replace(match.recipe, form="mean") if _over_pairs(match) else match.recipe
    return describe(match.base, recipe, "none" if match.vector else match.count.name)


def _say_reduction(found: Identification, match: Match) -> None:
    if match.vector:
        found.options["reduction"] = "none"
    elif match.count.name == "sum" or (_over_pairs(match) and match.base.pairs):
        found.options["reduction"] = match.count.name
    elif match.count.name not in ("mean", "drop") and not _over_pairs(match):
        found.wrong.append(f"reduction: {match.count.words}")


def _say_temperature(found: Identification, search: Search, match: Match) -> None:
    factors = dict(match.factor)
    if search.target.passes:
        if any(abs(value - passed) > 1e-6 * value for passed, value in match.temperatures.items() if passed):
            values = list(match.temperatures.values())
            if max(values) - min(values) <= 1e-6 * values[0]:
                found.wrong.append(f"the temperature that is passed has no effect: it is always {_short(values[0])}")
                found.temperature = values[0]
            else:
                told = ", ".join(f"{_short(v)} for {p:g}" for p, v in match.temperatures.items() if p)
                found.wrong.append(f"the temperature that it uses is {told}")
        one, two = (factors[p] for p in PASSED)
        if abs(one - two) > 1e-6 * abs(one):
            share = one / PASSED[0]
            if abs(two / PASSED[1] - share) <= 1e-6 * abs(share):
                found.options["base_temperature"] = _short(1 / share)
                found.remarks.append(f"the loss is multiplied by temperature/{_short(1 / share)}")
                return
            inverse, square = one * PASSED[0], one / PASSED[0] ** 2
            if abs(two * PASSED[1] - inverse) <= 1e-6 * abs(inverse):
                found.wrong.append(f"the loss is multiplied by {_short(inverse)}/temperature")
            elif abs(two / PASSED[1] ** 2 - square) <= 1e-6 * abs(square):
                times = "" if abs(square - 1) <= 1e-6 else f"{_short(square)} times "
                found.wrong.append(f"the loss is multiplied by {times}the square of the temperature")
            else:
                told = f"{_short(one)} at {PASSED[0]}, {_short(two)} at {PASSED[1]}"
                found.wrong.append(f"the loss is multiplied by {told}")
            return
        found.factor = one
        _say_factor(found, one, None)
        return
    found.temperature = match.temperatures[None]
    found.factor = factors[None]
    _say_factor(found, factors[None], found.temperature)


def _say_factor(found: Identification, factor: float, temperature: float | None) -> None:
    if factor == 1:
        return
    words = f"the values are {_short(factor)} times those of the loss"
    if temperature is not None:
        if abs(factor - temperature) <= CLOSE * temperature:
            found.options["base_temperature"] = "1"
            found.remarks.append("the loss is multiplied by the temperature")
            return
        base = temperature / factor
        if abs(base - PUBLISHED_BASE) <= CLOSE * PUBLISHED_BASE:
            found.options["base_temperature"] = f"{PUBLISHED_BASE:g}"
            found.remarks.append(f"the loss is multiplied by temperature/{PUBLISHED_BASE:g}")
            return
        simple = factor in (2.0, 0.5, 4.0, 0.25)
        if base > 0 and abs(float(f"{base:.2g}") - base) <= CLOSE * base and not simple:
            words += f", or the loss is multiplied by temperature/{base:.2g}: ask with a temperature that is passed"
    found.wrong.append(words)


def _policy(found: Identification, search: Search, match: Match) -> str:
    """What is done at the edge: the policy for lonely anchors, and remarks on what no policy explains."""
    chosen = "zero"
    edges = search.answered(search.questions.edges)
    lonely = [
        question
        for question in edges
        if (setting := search.setting(question.batch, match.recipe.reading)) is not None
        and bool((setting.counts == 0).any())
        and bool((setting.counts > 0).any())
        and not match.recipe.form.startswith("binary")
    ]
    if lonely and not _over_pairs(match):
        fitting = [p for p in POLICIES if all(_agrees(search, match, question, p) for question in lonely)]
        if fitting:
            chosen = fitting[0]
            words = {"zero": "counts as 0", "drop": "is left out of the mean", "nan": "makes the loss NaN"}[chosen]
            found.remarks.append(f"an anchor without positive {words}")
        else:
            found.wrong.append(_departure(search, match, lonely[0], "zero"))
    for question in edges:
        if question in lonely or _agrees(search, match, question, chosen):
            continue
        given = search.answer(question).total
        expected = match.predict(question, chosen)
        if expected is None:
            continue
        if math.isnan(given) and math.isnan(float(expected.sum())):
            continue
        remark = _departure(search, match, question, chosen)
        if remark not in found.remarks:
            found.remarks.append(remark)
    return chosen


def _agrees(search: Search, match: Match, question: Question, policy: str) -> bool:
    expected = match.predict(question, policy)
    answer = search.answer(question)
    if expected is None:
        return False
    value = float(expected.sum())
    return relative(value, answer.total) <= search.close or abs(value - answer.total) <= ROUNDING


def _departure(search: Search, match: Match, question: Question, policy: str) -> str:
    expected = match.predict(question, policy)
    value = math.nan if expected is None else float(expected.sum())
    return f"departs on {question.name}: {search.answer(question).total:.6g} where the loss is {value:.6g}"


def _say_evidence(found: Identification, search: Search, match: Match) -> None:
    batches = {question.batch.name for question in search.ordinary}
    found.evidence.append(
        f"{len(search.ordinary)} values on {len(batches)} batches, the worst off by {match.error:.1e} of its size"
    )
    if match.gradient_error is not None:
        found.evidence.append(f"as many gradients, the worst off by {match.gradient_error:.1e} of its norm")
    elif any(answer.gradient is not None for answer in search.answers.values()):
        found.evidence.append("values alone: no gradient could be compared")
    else:
        found.evidence.append("values alone: it gives no gradient")
    if search.single:
        found.evidence.append(f"it answers in float32, so {CLOSE_SINGLE:g} is asked, not {CLOSE:g}")


STEEP: tuple[tuple[str, str, tuple[tuple[float, ...], ...], float], ...] = (
    (
        "rows close together at a low temperature",
        "exponentials overflow: the row's maximum is not subtracted",
        ((1, 1.1, 1, 0.9), (1.1, 1, 0.9, 1), (0.9, 1, 1.1, 1), (1, 0.9, 1, 1.1), (1, 1, 0.9, 1.1), (1.1, 0.9, 1, 1)),
        1 / 1000,
    ),
    (
        "rows far apart at a low temperature",
        "the row's maximum is taken with the anchor itself in it: all others underflow, and the logarithm is of 0",
        ((1, 1, 1), (1, -1, -1.01), (-1, 1.02, -1), (-1.03, -1, 1)),
        1 / 700,
    ),
    (
        "a positive far away and a negative near, at a low temperature",
        "exponentials underflow before the logarithm is taken: a pair that costs hundreds is lost",
        ((1, 0, 0.1), (0, 1, 0.1), (0.1, 0.1, 1), (0.1, 1, 0), (0, 0.1, 1.1), (1, 0.1, 0)),
        1 / 1000,
    ),
)
"""Batches whose logits reach 700 or 1000: what each is, what it means where the answer is no number, its rows, and the
temperature."""


def _probe_range(found: Identification, search: Search, match: Match) -> None:
    """What becomes of the loss at the end of the range: overflow, or logarithms of 0."""
    for name, words, rows, temperature in STEEP:
        question = _steep(search, match, name, torch.tensor(rows, dtype=torch.float64), temperature)
        if question is None:
            continue
        try:
            answer = search.target.ask(question)
        except TargetError as error:
            found.remarks.append(f"breaks on {name}: {error}")
            continue
        expected = match.predict(question)
        if expected is None or not math.isfinite(float(expected.sum())):
            continue
        value = float(expected.sum())
        overflows = any(remark.startswith("out of range") for remark in found.remarks)
        if not math.isfinite(answer.total) and not overflows:
            found.remarks.append(f"out of range: {words}")
        elif math.isfinite(answer.total) and relative(value, answer.total) > search.close:
            found.remarks.append(f"departs on {name}: {answer.total:.6g} where the loss is {value:.6g}")
        search.answers[question.batch.name, question.temperature] = answer
        search.steep.append(question)


def _steep(search: Search, match: Match, name: str, rows: Tensor, temperature: float) -> Question | None:
    """A batch whose logits are steep: by the temperature that is passed, or by the norms of dot products."""
    rows = rows / rows.norm(dim=1, keepdim=True)
    n = len(rows)
    passed: float | None = temperature
    if not search.target.passes:
        passed = None
        if match.recipe.similarity != "dot":
            return None
        rows = rows * math.sqrt(match.temperature_for(None) / temperature)
    elif match.temperature_for(temperature) != temperature:
        return None
    call = search.target.call
    labels = tuple(k % 2 for k in range(n)) if call == "labels" else None
    pairs = tuple((k, (k + n // 2) % n) for k in range(n)) if call == "pairs" else None
    return Question(Batch(name, call, rows, labels, pairs, 2 if call in ("features", "views") else 1), passed)


def _say_nearest(found: Identification, search: Search, matches: list[Match]) -> None:
    if not matches:
        return
    nearest = min(matches, key=lambda match: (match.distance, len(match.recipe.words())))
    name, expected, given = nearest.worst
    at = next(iter(nearest.temperatures.values()))
    tempered = "" if search.target.passes else f" at temperature {at:.4g}"
    found.nearest = (
        f"{describe(nearest.base, nearest.recipe)}{tempered}, which departs on {name}:"
        f" it gives {expected:.6g}, the target {given:.6g}"
    )
    found.match = None


# Faults


def known_faults() -> Sequence[Any]:
    """The wrong implementations of ``faults``, or nothing where that package is not there."""
    try:
        return tuple(importlib.import_module("pairproof.conformance.faults").FAULTS)
    except (ImportError, AttributeError):
        return ()


def _name_faults(found: Identification, search: Search) -> None:
    """Name the faults that answer every question as the target does, where the right loss does not."""
    exact = found.match is not None and (found.match.error <= EXACT or search.single)
    odd = any(remark.startswith(("departs", "out of range", "breaks")) for remark in found.remarks)
    if found.verdict == "match" and exact and not odd:
        return
    close = search.close if found.match is None or exact else min(search.close, found.match.error / CLEARLY)
    for fault in known_faults():
        if fault.call != search.target.call:
            continue
        try:
            if _same_answers(search, fault, found, close):
                found.faults.append(f"{fault.name}: {fault.words}")
        except Exception:  # a fault may break on a batch, and is then another than the target
            continue
    if found.faults and found.verdict == "none":
        found.verdict = "wrong"
        found.loss = next(fault.loss for fault in known_faults() if found.faults[0].startswith(f"{fault.name}:"))


def _same_answers(search: Search, fault: Any, found: Identification, close: float) -> bool:
    wrong = Asked(fault.function, call=search.target.call, arrays="torch", limit=None)
    temperature = found.temperature
    if not search.target.passes and temperature is None:
        temperature = _solved_fault(search, wrong)
        if temperature is None:
            return False
    questions = search.questions
    everything = search.answered((*questions.alike, *questions.further, *questions.edges)) + search.steep
    for question in everything:
        answer = search.answer(question)
        at = question.temperature if search.target.passes else temperature
        other = wrong.ask(Question(question.batch, at))
        if len(other.values) != len(answer.values) or relative(other.total, answer.total) > close:
            return False
        if answer.gradient is not None and other.gradient is not None:
            if not bool(answer.gradient.isfinite().all()):
                if bool(other.gradient.isfinite().all()):
                    return False
                continue
            size = max(float(answer.gradient.norm()), 1e-9 * abs(answer.total))
            if not float((answer.gradient - other.gradient).norm()) <= 10 * search.close * size:
                return False
        if (answer.gradient is None) != (other.gradient is None) and search.target.arrays == "torch":
            return False
    if found.temperature is None and not search.target.passes:
        found.temperature = temperature
    return True


def _solved_fault(search: Search, wrong: Asked) -> float | None:
    """The temperature at which a fault gives the target's answer to one batch, and near enough to the next."""
    first, second = search.questions.alike[-1], search.questions.alike[0]
    given = search.answers[first.name, None].total
    other = search.answers[second.name, None].total

    def off(logarithm: float) -> float:
        return wrong.ask(Question(first, math.exp(logarithm))).total - given

    grid = [math.log(float(t)) for t in GRID[::4]]
    values = [off(x) for x in grid]
    for low, high, a, b in zip(grid, grid[1:], values, values[1:], strict=False):
        if not (math.isfinite(a) and math.isfinite(b)) or a * b > 0:
            continue
        root = math.exp(float(brentq(off, low, high, xtol=1e-14, rtol=1e-13)))
        if relative(wrong.ask(Question(second, root)).total, other) <= search.close:
            return root
    return None


# The command


def identify_command(
    spec: str,
    *,
    call: str | None = None,
    arrays: str | None = None,
    limit: float | None = 60.0,
) -> tuple[list[str], int]:
    """``pairproof identify TARGET``.

    Args:
        spec: "package.module:attribute" or "file.py:attribute".
        call: how it is called; guessed when None.
        arrays: with what; guessed when None.
        limit: seconds that one answer may take.

    Returns:
        What is to be printed, and the exit code: 0 recognised, 1 none of the losses known here, 2 how it is
        called must be said, 3 it cannot be asked.
    """
    try:
        found = identify(find(spec), call=call, arrays=arrays, limit=limit, title=spec)
    except TargetError as error:
        return [f"{spec}: {error}"], MISUSED if isinstance(error, TargetMisused) else COULD_NOT_RUN
    return [*found.lines(), f"  {found.seconds:.1f} s"], found.exit_code
