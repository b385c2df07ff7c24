"""Identify which loss a black box computes, from small batches on which the catalogue's losses differ.

The target is called with probes: batches with classes of unequal size, rows of unequal norm, views, duplicates.
``search`` finds the variant that explains all answers, with the temperature that is built in. How anchors without
positives and batches at the end of the range are treated is tested afterwards, and reported.

What no variant explains is compared with known faults; then the nearest variant is reported, and where it differs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from scipy.optimize import brentq

from ..implementations.callable import Batch, External, Target
from ..implementations.sandbox import TargetError
from ..suite.catalogue import LOSSES
from .positives import FEATURES, LABELS, PAIRS, VIEWS
from .search import (
    CLEARLY,
    CLOSE,
    CLOSE_SINGLE,
    EXACT,
    GRID,
    Match,
    Probe,
    Search,
    call_with,
    read_as,
    relative,
)
from .variants import POLICIES, words_of

Tensor = torch.Tensor

PUBLISHED_BASE = 0.07
"""The base temperature of the original SupCon code: any factor is some temperature/base, so no other is assumed."""

ROUNDING = 1e-12
"""A difference of values at the edge that is rounding alone."""


@dataclass
class Identification:
    """What a target computes.

    Attributes:
        title: of the target.
        call: how it was called.
        verdict: "match", "wrong" (recognised, and not a loss of the catalogue) or "none".
        loss: the catalogue's short name, where it is one or comes from one.
        options: its options that are not at their default.
        temperature: the one that is built in, as recovered; None where it is passed or nothing was recognised.
        factor: what the loss is multiplied with.
        wrong: what no loss of the catalogue does, in words.
        faults: names of the known faults that return the same.
        remarks: how it treats what is at the edge, and what else is to be reported.
        evidence: how closely, on how many probes.
        equals: other names for the same function.
        nearest: for "none", what comes nearest, and where it differs.
        notes: what was guessed.
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
        """0 for something that is recognised, 1 for nothing that is known."""
        return int(self.verdict == "none")

    def lines(self) -> list[str]:
        """The report."""
        lines = [f"{self.title}, called with {self.call}", *(f"  {note}" for note in self.notes)]
        if self.verdict == "none":
            lines.append("computes none of the losses that are known here, nor a known fault")
            lines += [f"  nearest: {self.nearest}"] if self.nearest else []
        else:
            options = ", ".join(f"{key}={value}" for key, value in self.options.items())
            at = ", temperature passed"
            if self.temperature is not None:
                at = f", temperature {_short(self.temperature)} (built in, recovered)"
            lines.append(f"computes {self.loss}" + (f" with {options}" if options else "") + at)
            lines += [f"  but {words}" for words in self.wrong]
        lines += [f"  known as the fault {name}" for name in self.faults]
        lines += [f"  {remark}" for remark in self.remarks]
        lines += [f"  the same function: {name}" for name in self.equals]
        return lines + [f"  evidence: {line}" for line in self.evidence]


def _short(value: float) -> str:
    """A number with as few digits as give it to 1e-8."""
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
    faults: Sequence[Any] = (),
) -> Identification:
    """Identify which loss a black box computes.

    Args:
        target: a function, a class, an instance, or an ``External``.
        call: how it is called, one of "labels", "features", "views", "stacked", "pairs"; guessed from its parameters
            when None.
        arrays: "torch", "numpy" or "jax"; guessed when None.
        limit: seconds that one answer may take.
        title: what the target is called in the report.
        faults: wrong implementations that a target which is not a loss is compared with, as
            ``pairproof.conformance.faults.FAULTS``.

    Returns:
        What it computes, as data.

    Raises:
        TargetError: it cannot be called, or returns nothing that can be used.
    """
    start = time.perf_counter()
    if isinstance(target, External):
        call, arrays = call or target.claim.call, arrays or target.claim.arrays
        target = target.target.thing if target.target else target
    if call == "command":
        raise TargetError("a command needs the name of the loss that it computes: check it with pairproof check")
    called = Target(target, call, arrays)
    found = Identification(title or called.__name__, called.call, notes=list(called.notes))
    if called.constructs:
        found.notes.append("a class: constructed anew for each probe, so what it remembers is not seen")
    try:
        search = Search(called, limit)
    except TargetError as error:
        guessed = "; ".join(called.notes)
        raise type(error)(f"{error} ({guessed})" if guessed else str(error)) from error
    unusable = _unusable(search)
    matches = [] if unusable else search.matches()
    good = [match for match in matches if match.error <= search.close]
    if unusable:
        found.remarks.append(unusable)
    if good:
        _report_match(found, search, good)
    found.remarks += [f"breaks on {name}: {error}" for name, error in search.broken.items()]
    name_faults(found, search, faults)
    if not good and not found.faults:
        _report_nearest(found, search, matches)
    found.seconds = time.perf_counter() - start
    return found


def _unusable(search: Search) -> str:
    """Why nothing can be concluded from the answers, or nothing."""
    totals = [search.answers[probe].total for probe in search.ordinary]
    if not any(math.isfinite(total) for total in totals):
        return "it returns NaN or infinity for every batch"
    if len(set(totals)) == 1:
        return f"it returns {totals[0]:g} for every batch"
    try:
        again = call_with(search.target, search.ordinary[0], search.limit).total
    except TargetError as error:
        return f"called with the same batch again, it fails: {error}"
    if relative(totals[0], again) > search.close:
        made = ", or is random when it is constructed, as it is for each probe" if search.target.constructs else ""
        return f"it returns {totals[0]:.6g} and {again:.6g} for the same batch: it is random, or remembers{made}"
    return ""


# A match


def _report_match(found: Identification, search: Search, good: list[Match]) -> None:
    closest = min(match.error for match in good)
    near = [search.with_gradient(match) for match in good if match.error <= max(closest * CLEARLY, 1e-12)]
    ranked = sorted(near, key=lambda match: _preference(match, search))
    match = ranked[0]
    found.match, found.loss = match, match.variant.loss
    found.options.update(match.variant.options)
    found.wrong += _wrong(match)
    policy = _policy(found, search, match)
    if match.vector:
        found.options["reduction"] = "none"
    elif match.count == "sum" or (_over_pairs(match) and match.variant.over_pairs):
        found.options["reduction"] = match.count
    elif match.count not in ("mean", "drop") and not _over_pairs(match):
        found.wrong.append(f"reduction: {words_of(match.count)}")
    if "no_positive" in match.variant.entry.choices and policy != "zero":
        found.options["no_positive"] = policy
    _report_temperature(found, search, match)
    _report_gradient(found, search, match)
    if match.error > EXACT and not search.single:
        found.remarks.append(
            f"close, but not the same to the last digits: something is added or cut off that changes values by"
            f" {match.error:.0e} of their size"
        )
    found.verdict = "wrong" if found.wrong else "match"
    _report_evidence(found, search, match)
    for other in ranked[1:]:
        same = len(_wrong(other)) == len(_wrong(match)) and other.plainness[0] == match.plainness[0]
        named = _named(other)
        if same and other.variant.loss != found.loss and named not in (*found.equals, _named(match)):
            found.equals.append(named)
    _probe_range(found, search, match)


def _preference(match: Match, search: Search) -> tuple[Any, ...]:
    """A key that is smaller for an explanation that is preferred."""
    gradient = match.gradient_error is not None and match.gradient_error > search.close
    loss, (scaled, place) = match.variant.entry, match.plainness
    # Views without labels are partners.
    unlabelled = search.call == FEATURES and search.probes.alike[0].labels is None
    other_way = not (unlabelled and loss.positives_by == "partners")
    order = list(LOSSES).index(loss.name)
    return gradient, len(_wrong(match)), scaled, other_way, len(match.variant.options), order, place


def _over_pairs(match: Match) -> bool:
    return match.variant.form == "sum" and match.count == "mean_pairs"


def _wrong(match: Match) -> list[str]:
    """What no loss of the catalogue does, in words."""
    if not _over_pairs(match):
        return match.variant.words()
    words = match.with_parts(form="mean").variant.words()
    return words if match.variant.over_pairs else [*words, "the mean is over the positive pairs, not over the anchors"]


def _named(match: Match) -> str:
    """The loss and its options in one line."""
    one = match.with_parts(form="mean") if _over_pairs(match) else match
    return one.variant.describe("none" if match.vector else match.count)


def _report_temperature(found: Identification, search: Search, match: Match) -> None:
    if not search.target.takes_temperature:
        found.temperature, found.factor = match.temperatures[None], match.factor[None]
        _report_factor(found, found.factor, found.temperature)
        return
    used = {passed: value for passed, value in match.temperatures.items() if passed}
    if any(abs(value - passed) > 1e-6 * value for passed, value in used.items()):
        values = list(used.values())
        if max(values) - min(values) <= 1e-6 * values[0]:
            found.wrong.append(f"the temperature that is passed has no effect: it is always {_short(values[0])}")
            found.temperature = values[0]
        else:
            changed = ", ".join(f"{_short(v)} for {p:g}" for p, v in used.items())
            found.wrong.append(f"the temperature that it uses is {changed}")
    if match.scale is None:
        factors = ", ".join(f"{_short(factor)} at {passed:g}" for passed, factor in match.factor.items())
        found.wrong.append(f"the loss is multiplied by {factors}")
        return
    share, power = match.scale
    if power == 0:
        found.factor = share
        _report_factor(found, share, None)
    elif power == 1:
        found.options["base_temperature"] = _short(1 / share)
        found.remarks.append(f"the loss is multiplied by temperature/{_short(1 / share)}")
    else:
        times = "" if abs(share - 1) <= 1e-6 else f"{_short(share)} times "
        powers = {2: f"{times}the square of the temperature", -1: f"{_short(share)}/temperature"}
        found.wrong.append(f"the loss is multiplied by {powers.get(power, f'{_short(share)}/temperature^2')}")


def _report_factor(found: Identification, factor: float, temperature: float | None) -> None:
    if factor == 1:
        return
    words = f"the values are {_short(factor)} times those of the loss"
    if temperature is not None:
        base = temperature / factor
        for known, text in ((1.0, "temperature"), (PUBLISHED_BASE, f"temperature/{PUBLISHED_BASE:g}")):
            if abs(base - known) <= CLOSE * known:
                found.options["base_temperature"] = f"{known:g}"
                found.remarks.append(f"the loss is multiplied by {'the ' * (known == 1)}{text}")
                return
        simple = factor in (2.0, 0.5, 4.0, 0.25)
        if base > 0 and abs(float(f"{base:.2g}") - base) <= CLOSE * base and not simple:
            words += f", or the loss is multiplied by temperature/{base:.2g}: pass a temperature to find out"
    found.wrong.append(words)


def _report_gradient(found: Identification, search: Search, match: Match) -> None:
    """A gradient that is not that of the value, is not finite, or is missing."""
    if match.gradient_factor != 1:
        found.wrong.append(f"the gradient is {_short(match.gradient_factor)} times that of the value")
    elif match.gradient_error is not None and match.gradient_error > search.close:
        found.wrong.append(f"the gradient is not that of the value: off by {match.gradient_error:.2g} of its size")
    answers = [(probe.batch.name, answer) for probe, answer in search.answers.items()]
    broken = [
        name
        for name, answer in answers
        if math.isfinite(answer.total) and answer.gradient is not None and not bool(answer.gradient.isfinite().all())
    ]
    if len(broken) == len(answers):
        found.wrong.append("the gradient is NaN or infinite, though the value is a number")
    elif broken:
        found.wrong.append(f"the gradient is NaN or infinite on {', '.join(dict.fromkeys(broken))}")
    if search.target.arrays == "torch" and all(answer.gradient is None for _, answer in answers):
        found.wrong.append("no gradient flows back to the embeddings")


def _report_evidence(found: Identification, search: Search, match: Match) -> None:
    batches = {probe.batch.name for probe in search.ordinary}
    found.evidence.append(
        f"{len(search.ordinary)} values on {len(batches)} batches, the worst off by {match.error:.1e} of its size"
    )
    if match.gradient_error is not None:
        found.evidence.append(f"as many gradients, the worst off by {match.gradient_error:.1e} of its norm")
    else:
        some = any(answer.gradient is not None for answer in search.answers.values())
        reason = "no gradient could be compared" if some else "it gives no gradient"
        found.evidence.append(f"values alone: {reason}")
    if search.single:
        found.evidence.append(f"it answers in float32, so {CLOSE_SINGLE:g} is allowed in place of {CLOSE:g}")


# The edges


def _policy(found: Identification, search: Search, match: Match) -> str:
    """The policy for anchors without positives; and remarks on what no policy explains."""
    chosen = "zero"
    edges = search.answered(search.probes.edges)
    judged = not _over_pairs(match) and not match.variant.binary
    alone = _with_some_alone(match, edges) if judged else []
    if alone:
        fitting = [p for p in POLICIES if all(_difference(search, match, probe, p) == "" for probe in alone)]
        if fitting:
            chosen = fitting[0]
            words = {"zero": "counts as 0", "drop": "is left out of the mean", "nan": "makes the loss NaN"}[chosen]
            found.remarks.append(f"an anchor without positive {words}")
        else:
            found.wrong.append(_difference(search, match, alone[0], "zero"))
    remarks = [_difference(search, match, probe, chosen) for probe in edges if probe not in alone]
    found.remarks += [remark for remark in dict.fromkeys(remarks) if remark]
    return chosen


def _with_some_alone(match: Match, probes: Iterable[Probe]) -> list[Probe]:
    """The probes in which some anchors have positives and others have none."""
    found = []
    for probe in probes:
        setting = read_as(probe.batch, match.variant.positives)
        if setting is not None and 0 < int((setting.counts > 0).sum()) < len(setting.counts):
            found.append(probe)
    return found


def _difference(search: Search, match: Match, probe: Probe, policy: str) -> str:
    """How the target differs from a match on a probe, in words; "" where it does not, or nothing is expected."""
    expected = match.predict(probe, policy)
    if expected is None:
        return ""
    value, given = float(expected.sum()), search.answers[probe].total
    if relative(value, given) <= search.close or abs(value - given) <= ROUNDING:
        return ""
    return f"differs on {probe.name}: {given:.6g} where the loss is {value:.6g}"


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
"""Batches whose logits reach 700 or 1000: the name of each, what it means if the answer is not finite, its rows, and
the temperature."""


def _probe_range(found: Identification, search: Search, match: Match) -> None:
    """What becomes of the loss at the end of the range: overflow, or logarithms of 0."""
    for name, words, rows, temperature in STEEP:
        probe = _steep(search, match, name, torch.tensor(rows, dtype=torch.float64), temperature)
        if probe is None:
            continue
        try:
            finite = math.isfinite(search.ask(probe).total)
        except TargetError as error:
            found.remarks.append(f"breaks on {name}: {error}")
            continue
        expected = match.predict(probe)
        if expected is None or not bool(expected.sum().isfinite()):
            continue
        if finite:
            remark = _difference(search, match, probe, "zero")
            found.remarks += [remark] if remark else []
        elif not any(remark.startswith("out of range") for remark in found.remarks):
            found.remarks.append(f"out of range: {words}")


def _steep(search: Search, match: Match, name: str, rows: Tensor, temperature: float) -> Probe | None:
    """A batch whose logits are steep: by the temperature that is passed, or by the norms of dot products."""
    rows = rows / rows.norm(dim=1, keepdim=True)
    n = len(rows)
    if search.target.takes_temperature:
        if match.temperature_for(temperature) != temperature:
            return None
    elif match.variant.similarity != "dot":
        return None
    else:
        rows = rows * math.sqrt(match.temperature_for(None) / temperature)
    labels = tuple(k % 2 for k in range(n)) if search.call == LABELS else None
    pairs = tuple((k, (k + n // 2) % n) for k in range(n)) if search.call == PAIRS else None
    batch = Batch(name, search.call, rows, labels, pairs, 2 if search.call in (FEATURES, VIEWS) else 1)
    return Probe(batch, temperature if search.target.takes_temperature else None)


# No match


def _report_nearest(found: Identification, search: Search, matches: list[Match]) -> None:
    """What comes nearest; before that, what explains the answers at any temperature: similarities without contrast."""
    if search.undetermined:
        match = min(search.undetermined, key=lambda match: (len(match.variant.words()), match.plainness))
        found.nearest = (
            f"{match.variant.describe()}, which gives the same at more than one temperature: the answers do not"
            " depend on it, and the loss contrasts nothing"
        )
    elif matches:
        nearest = min(matches, key=lambda match: (match.distance, len(match.variant.words())))
        name, expected, given = nearest.worst
        at = "" if search.target.takes_temperature else f" at temperature {nearest.temperatures[None]:.4g}"
        found.nearest = (
            f"{nearest.variant.describe()}{at}, which differs on {name}:"
            f" it gives {expected:.6g}, the target {given:.6g}"
        )


def name_faults(found: Identification, search: Search, faults: Sequence[Any]) -> None:
    """Name the faults that return what the target does for every probe, where the right loss does not."""
    exact = found.match is not None and (found.match.error <= EXACT or search.single)
    odd = any(remark.startswith(("differs", "out of range", "breaks")) for remark in found.remarks)
    if found.verdict == "match" and exact and not odd:
        return
    close = search.close if found.match is None or exact else min(search.close, found.match.error / CLEARLY)
    for fault in faults:
        if fault.call != search.call:
            continue
        try:
            same = _same_answers(search, Target(fault.function, search.call, "torch"), found, close)
        except Exception:  # a fault may break on a batch, and then differs from the target
            continue
        if same:
            found.faults.append(f"{fault.name}: {fault.words}")
            if found.verdict == "none":
                found.verdict, found.loss = "wrong", fault.loss


def _same_answers(search: Search, fault: Target, found: Identification, close: float) -> bool:
    passed = search.target.takes_temperature
    built_in = None if passed else found.temperature or _solved(search, fault)
    if not passed and built_in is None:
        return False
    for probe, answer in search.answers.items():
        other = call_with(fault, Probe(probe.batch, probe.temperature if passed else built_in))
        if len(other.values) != len(answer.values) or relative(other.total, answer.total) > close:
            return False
        given, expected = answer.gradient, other.gradient
        if given is None or expected is None:
            if (given is None) != (expected is None) and search.target.arrays == "torch":
                return False
        elif not bool(given.isfinite().all()):
            if bool(expected.isfinite().all()):
                return False
        elif not float((given - expected).norm()) <= 10 * search.close * max(
            float(given.norm()), 1e-9 * abs(answer.total)
        ):
            return False
    if not passed:
        found.temperature = built_in
    return True


def _solved(search: Search, fault: Target) -> float | None:
    """The temperature at which a fault returns the target's value for one probe, and near enough for the next."""
    first, second = search.probes.alike[-1], search.probes.alike[0]
    given, other = (search.answers[Probe(batch, None)].total for batch in (first, second))

    def off(logarithm: float) -> float:
        return call_with(fault, Probe(first, math.exp(logarithm))).total - given

    grid = [math.log(float(t)) for t in GRID[::4]]
    values = [off(x) for x in grid]
    for low, high, a, b in zip(grid, grid[1:], values, values[1:], strict=False):
        if math.isfinite(a) and math.isfinite(b) and a * b <= 0:
            root = math.exp(float(brentq(off, low, high, xtol=1e-14, rtol=1e-13)))
            if relative(call_with(fault, Probe(second, root)).total, other) <= search.close:
                return root
    return None
