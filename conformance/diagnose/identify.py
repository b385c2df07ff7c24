"""Identify which loss a function (the *target*) computes.

The target is called with *probes*, small batches on which losses differ:

1. ``search`` looks for a *variant*, a correct or modified loss of the catalogue, that reproduces all answers.
2. If a variant is found, more probes test anchors without positives and extreme logits.
3. If no variant fits exactly, the target is compared with known faults (wrong implementations).
4. If no fault matches either, the nearest variant is reported.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from ..implementations.callable import Answer, Batch, External, Target
from ..implementations.child import load_target
from ..implementations.sandbox import TargetError
from ..suite.catalogue import PUBLISHED_BASE
from ..suite.machine import described, machine
from .explain import Known, explain
from .positives import FEATURES, HARD, LABELS, LAYOUTS, PARTNERS, QUEUE, QUEUE_ADDED, VIEWS
from .search import (
    CLEARLY,
    CLOSE,
    CLOSE_HALF,
    EXACT,
    GRID,
    Match,
    Probe,
    Search,
    Searched,
    call_with,
    crossing,
    ranked,
    read_as,
    relative,
    searched,
)
from .variants import POLICIES, REDUCED_BY, words_of

UNIT = (
    "rows: passed with norm 1, because no loss explains the answers to rows of other norms; "
    "to check the target, pass --normalised"
)

FAR = 0.02
"""Largest relative distance at which the nearest variant is reported."""

ROUNDING = 1e-12
"""Absolute difference of values up to which probes for policies and extreme logits agree."""


@dataclass
class Identification:
    """What a target computes.

    Attributes:
        title: name of the target in the report.
        call: how it was called.
        verdict: "match"; "wrong" for a modified loss or a known fault; or "none".
        loss: short name of the loss in the catalogue; "" if unknown.
        options: the options of the loss that differ from their defaults.
        temperature: the built-in temperature that was recovered; None if the target uses the temperature that is
            passed, or was not recognised.
        temperature_by: how the temperature is passed, in words.
        factor: the constant that the loss is multiplied by.
        wrong: descriptions of what differs from the loss.
        faults: names and descriptions of known faults that return the same values.
        remarks: policies, extreme logits, and other observations.
        evidence: how closely the answers agree, and on how many probes.
        names: names under which the loss is published.
        equals: other losses of the catalogue that are the same function.
        nearest: for the verdict "none", the nearest variant, and a probe on which the variant differs.
        notes: guesses that were made, such as how to call the target.
        match: the variant that reproduces the answers; None if there is none.
        seconds: duration of the identification.
        machine: what rounding errors depend on.
    """

    title: str
    call: str
    verdict: str = "none"
    loss: str = ""
    options: dict[str, str] = field(default_factory=dict)
    temperature: float | None = None
    temperature_by: str = "an argument"
    factor: float = 1.0
    wrong: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    equals: list[str] = field(default_factory=list)
    nearest: str = ""
    notes: list[str] = field(default_factory=list)
    match: Match | None = None
    seconds: float = 0.0
    machine: dict[str, str] = field(default_factory=machine)

    @property
    def exit_code(self) -> int:
        """0 if the target is recognised, otherwise 1."""
        return int(self.verdict == "none")

    def lines(self) -> list[str]:
        """The lines of the report."""
        at = f"; takes the temperature as {self.temperature_by}"
        if self.temperature is not None:
            digits = 8 if self.match is None else self.match.digits
            at = f", temperature {self.temperature:.{digits}g} (built in, recovered)"
        options = ", ".join(f"{key}={value}" for key, value in self.options.items())
        computes = f"computes {self.loss}{options and f' with {options}'}{at}"
        if self.verdict == "none":
            computes = "computes no loss of the catalogue and no known fault"
        found = {"nearest: ": [self.nearest], "but ": self.wrong, "known as the fault ": self.faults, "": self.remarks}
        found |= {"also called ": [", ".join(self.names)], "the same function: ": self.equals}
        found |= {"evidence: ": self.evidence}
        details = [f"  {prefix}{line}" for prefix, lines in found.items() for line in lines if line]
        heading = [f"{self.title}, called with {self.call}", f"  on {described(self.machine)}"]
        return [*heading, *(f"  {note}" for note in self.notes), computes, *details]


def _short(value: float) -> str:
    return f"{value:.8g}"


def identify(
    target: Any,
    *,
    call: str | None = None,
    arrays: str | None = None,
    scale: str | None = None,
    init: Mapping[str, Any] | None = None,
    result: str | None = None,
    normalised: bool = False,
    bias: float | None = None,
    limit: float | None = 60.0,
    title: str = "",
    faults: Sequence[Any] = (),
) -> Identification:
    """Identify which loss a function, class or instance computes.

    Args:
        target: a function, a class, an instance, an ``External``, or text such as "losses.py:MyLoss".
        call: how the target is called: "labels", "features", "views", "towers", "stacked", "interleaved",
            "similarities" or "pairs"; guessed from the parameters when None.
        arrays: "torch", "numpy" or "jax"; guessed when None.
        scale: the parameter that gets 1 / temperature, if its name does not show it.
        init: values of parameters of the constructor or of the function, by name.
        result: the name of the loss among several results; guessed when None.
        normalised: whether only rows of norm 1 are passed; otherwise, rows of different norms are tried first.
        bias: the bias that is built into a sigmoid loss; None tries -10 and 0.
        limit: maximum duration of one call, in seconds; None for no limit.
        title: name of the target in the report.
        faults: wrong implementations to compare with, such as ``pairproof.conformance.faults.FAULTS``, if no loss of
            the catalogue matches exactly.

    Returns:
        What the target computes.

    Raises:
        TargetError: the target cannot be called, or does not return a loss.
    """
    start = time.perf_counter()
    if isinstance(target, External):
        call, arrays = call or target.claim.call, arrays or target.claim.arrays
        target = target.spec
    if call == "command":
        raise TargetError("identify cannot run a command: use pairproof check, with the name of its loss")
    with closing(load_target(target, call, arrays, limit, scale=scale, init=init or {}, result=result)) as called:
        found = _identify(called, normalised, bias, limit, title, faults)
    found.seconds = time.perf_counter() - start
    return found


def _identify(
    called: Target, normalised: bool, bias: float | None, limit: float | None, title: str, faults: Sequence[Any]
) -> Identification:
    found = Identification(title or called.__name__, called.call, notes=list(called.notes))
    found.temperature_by = called.temperature_by
    if called.constructs:
        found.notes.append("a class: a new instance is constructed for each probe, so state is not kept between probes")
    known = Known(None, partial(searched, called, limit, normalised=normalised, bias=bias))
    search, near, fitting = explain((), known).searched or Searched()
    assert search is not None  # otherwise an error was raised
    found.remarks = [search.unusable] if search.unusable else []
    if search.unit and not normalised:
        found.notes.append(UNIT)
    if fitting:
        _report_match(found, search, fitting)
    if search.undefined and not search.unusable:
        names = ", ".join(batch.name for batch in search.undefined)
        found.remarks.append(f"left out, because it returns NaN or infinity: {names}")
    found.remarks += [f"breaks on {name}: {error}" for name, error in search.broken.items()]
    name_faults(found, search, faults)
    if called.last_death and called.last_death not in search.broken.values():
        found.remarks.append(f"breaks on other batches: {called.last_death}")
    if not fitting and not found.faults:
        _report_nearest(found, search, near)
    return found


# A match


OTHER_NEGATIVES: Mapping[tuple[str, str], str] = {
    (HARD, "queue a_to_b"): "the negatives are all hard negatives of the batch, without the other documents",
    (QUEUE, QUEUE_ADDED): "multiple_negatives_ranking has these negatives, if they are passed as its hard negatives",
}
"""Remarks on targets that have the negatives of another loss, by ``Search.call`` and ``Variant.positives``."""


def _report_match(found: Identification, search: Search, fitting: Sequence[Match]) -> None:
    match, *others = fitting
    found.match, found.loss = match, match.variant.loss
    found.options = {name: str(value) for name, value in match.variant.options}
    if search.call == QUEUE and match.variant.entry.two_towers:
        found.options.setdefault("direction", "both")  # the default with negatives is a_to_b
    found.remarks += [
        words for name, words in OTHER_NEGATIVES.items() if name == (search.call, match.variant.positives)
    ]
    found.wrong += match.words()
    policy = _policy(found, search, match)
    if match.vector or match.count in match.variant.entry.choices["reduction"][1:]:
        found.options["reduction"] = match.reduction
    elif match.count not in ("mean", "drop", "mean_pairs"):
        found.wrong.append(f"reduction: {words_of(match.count)}")
    if "no_positive" in match.variant.entry.choices and policy != "zero":
        found.options["no_positive"] = policy
    if layout := LAYOUTS.get((search.target.call, match.variant.positives)):
        found.remarks.append(f"right for {layout} views: --call {layout}")
    _report_temperature(found, search, match)
    _report_factor(found, search, match)
    _report_gradient(found, search, match)
    if search.inexactness(match):
        words = "close, but not exact: an added or clamped term may explain the relative error of"
        found.remarks.append(f"{words} {match.error:.0e}")
    found.verdict = "wrong" if found.wrong else "match"
    _report_evidence(found, search, match)
    standing = len(match.words()), match.plainness[0]
    alike = [other for other in others if (len(other.words()), other.plainness[0]) == standing]
    # Only an exact explanation of float64 answers shows that two losses are the same function.
    exact = not search.single and not search.inexactness(match)
    reduced = {name: found.options[name] for name in (*REDUCED_BY, "base_temperature") if name in found.options}
    equal = [one.variant.describe(**reduced) for one in alike if one.variant.loss != found.loss and exact]
    found.equals = list(dict.fromkeys(one if " " in one else f"{one} with its defaults" for one in equal))
    if found.verdict == "match":
        found.names = _published_names(found, search.call)
    _probe_range(found, search, match)


class Published(NamedTuple):
    """A loss under another name.

    Attributes:
        name: the other name.
        call: the call of the probes that identify the loss.
        loss: its name in the catalogue.
        options: its options that differ from their defaults.
        temperature: the temperature, if it is part of the definition.
    """

    name: str
    call: str
    loss: str
    options: Mapping[str, Any] = MappingProxyType({})
    temperature: float | None = None


_RANKING = "multiple_negatives_ranking"
_EVERY = "query_to_doc+query_to_query+doc_to_query+doc_to_doc"
_BOTH = {"directions": "query_to_doc+doc_to_query", "partition": "per_direction"}

PUBLISHED = (
    Published("SimCLR", VIEWS, "nt_xent"),
    Published("DCL", VIEWS, "supcon", {"denominator": "only_negatives"}),
    Published("DCLW", VIEWS, "dclw"),
    Published("SINCERE", LABELS, "nt_xent_pairwise"),
    Published("SuNCEt", LABELS, "supcon_in", {"inside_reduction": "sum"}),
    Published("debiased", VIEWS, "hard_negative", {"beta": 0.0}),
    Published("HCL", VIEWS, "hard_negative"),
    Published("CLIP", VIEWS, "info_nce"),
    Published("ConVIRT", VIEWS, "info_nce", {"direction_weights": (0.75, 0.25)}),
    Published("SimCSE", VIEWS, "info_nce", {"direction": "a_to_b"}),
    Published("MoCo", QUEUE, "info_nce", {"direction": "a_to_b"}),
    Published("MultipleNegativesRankingLoss", VIEWS, "info_nce", {"direction": "a_to_b"}),
    Published("MultipleNegativesRankingLoss", HARD, _RANKING),
    Published("MultipleNegativesSymmetricRankingLoss", VIEWS, "info_nce"),
    Published("MultipleNegativesSymmetricRankingLoss", HARD, _RANKING, _BOTH),
    Published("GTE", VIEWS, _RANKING, {"directions": _EVERY}),
    Published("N-pairs", VIEWS, "info_nce", {"direction": "a_to_b", "similarity": "dot"}, 1.0),
    Published("SigLIP", VIEWS, "sigmoid"),
)
"""The names in docs/names.md that probes can identify."""


def _published_names(found: Identification, call: str) -> list[str]:
    """Return the names under which a loss is published. No paper defines it for an anchor without positives."""
    own = call, found.loss, {name: value for name, value in found.options.items() if name != "no_positive"}
    return [
        one.name
        for one in PUBLISHED
        if own == (one.call, one.loss, {name: str(value) for name, value in one.options.items()})
        and (one.temperature is None or math.isclose(found.temperature or 0.0, one.temperature, rel_tol=CLOSE))
    ]


def _report_temperature(found: Identification, search: Search, match: Match) -> None:
    passed, used = zip(*match.temperatures.items(), strict=True)
    found.temperature = match.built_in
    # An inexact match has an inexact temperature.
    if None in passed or np.allclose(passed, used, rtol=max(CLOSE, CLEARLY * search.inexactness(match)), atol=0):
        return
    changed = ", ".join(f"{_short(value)} for {at:g}" for at, value in match.temperatures.items())
    ignored = f"the temperature that is passed has no effect: {_short(used[0])} is always used"
    found.wrong.append(ignored if match.built_in else f"the effective temperature is {changed}")


def _report_factor(found: Identification, search: Search, match: Match) -> None:
    """Report a factor: temperature / base temperature, another power of the temperature, or a number."""
    if match.scale is None:
        factors = ", ".join(f"{_short(factor)} at temperature {passed:g}" for passed, factor in match.factor.items())
        found.wrong.append(f"the loss is multiplied by {factors}")
        return
    share, power = match.scale
    base = 1 / share if power == 1 else match.temperatures.get(None, math.nan) / share
    known = [number for number in (1.0, PUBLISHED_BASE) if math.isclose(base, number, rel_tol=CLOSE)]
    times = _short(share)
    if power == 0:
        found.factor = share
    if power == 1 or (power == 0 and share != 1 and known):
        text = _short(known[0] if known else base)
        found.options["base_temperature"] = text
        found.remarks.append(f"the loss is multiplied by {'the temperature' if text == '1' else f'temperature/{text}'}")
    elif power:
        product = "temperature^2" if times == "1" else f"{times} * temperature^2"
        powers = {2: product, -1: f"{times}/temperature", -2: f"{times}/temperature^2"}
        found.wrong.append(f"the loss is multiplied by {powers[power]}")
    elif search.dtype in CLOSE_HALF and abs(share - 1) <= 4 * search.close:
        found.remarks.append(f"the values are {share:.3g} times those of the loss, possibly by rounding errors")
    elif share != 1:
        words = f"the values are {times} times those of the loss"
        if math.isclose(float(f"{base:.2g}"), base, rel_tol=CLOSE) and base > 0 and share not in (2, 0.5, 4, 0.25):
            words += f", or the loss is multiplied by temperature/{base:.2g}; only a passed temperature shows which"
        found.wrong.append(words)


def _report_gradient(found: Identification, search: Search, match: Match) -> None:
    if match.gradient_factor != 1:
        found.wrong.append(f"the gradient is {_short(match.gradient_factor)} times the derivative of the value")
    elif match.gradient_error is not None and match.gradient_error > search.tolerance_of_gradient(match):
        found.wrong.append(
            f"the gradient is not the derivative of the value: the relative error is {match.gradient_error:.2g}"
        )
    finite = [(probe, answer) for probe, answer in search.answers.items() if math.isfinite(answer.total)]
    broken = [probe.batch.name for probe, answer in finite if bool(_gradient(answer).isnan().any())]
    if broken:
        where = f" on {', '.join(dict.fromkeys(broken))}" if len(broken) < len(search.answers) else ""
        found.wrong.append(f"the gradient is NaN or infinite{where}, although the value is finite")
    if search.target.arrays == "torch" and not search.gives_gradient:
        found.wrong.append("no gradient flows back to the embeddings")


def _report_evidence(found: Identification, search: Search, match: Match) -> None:
    values, batches, gradient = len(search.ordinary), len(search.batches), match.gradient_error
    found.evidence.append(f"the largest relative error of {values} values on {batches} batches is {match.error:.1e}")
    reason = "no gradient could be compared" if search.gives_gradient else "the target returns no gradient"
    compared = "" if gradient is None else f"the largest relative error of their gradients is {gradient:.1e}"
    found.evidence.append(compared or f"only values were compared: {reason}")
    if search.single:
        precise = f"its values or gradients have the precision of {search.dtype}"
        found.evidence.append(f"{precise}: the tolerance is {search.close:g}, not {CLOSE:g}")


# Policies, and extreme logits


def _policy(found: Identification, search: Search, match: Match) -> str:
    """Return the policy for anchors without positives, and report it. If none fits, return "zero"."""
    edges = [probe for probe in search.answers if probe.batch in search.probes.edges]
    judged = match.count not in ("mean_pairs", "sum_pairs") and not match.variant.binary
    settings = ((probe, read_as(probe.batch, match.variant.positives)) for probe in edges if judged)
    counts = [(probe, setting.counts > 0) for probe, setting in settings if setting is not None]
    mixed = [probe for probe, some in counts if bool(some.any()) and not bool(some.all())]
    fitting = [p for p in POLICIES if not any(_difference(search, match, probe, p) for probe in mixed)]
    chosen = fitting[0] if fitting else "zero"
    if not fitting:
        found.wrong.append(_difference(search, match, mixed[0], chosen))
    elif mixed:
        words = {"zero": "counts as 0", "drop": "is left out of the mean", "nan": "makes the loss NaN"}
        found.remarks.append(f"an anchor without positives {words[chosen]}")
    remarks = [_difference(search, match, probe, chosen) for probe in edges if probe not in mixed]
    found.remarks += dict.fromkeys(filter(None, remarks))
    return chosen


def _difference(search: Search, match: Match, probe: Probe, policy: str) -> str:
    """Describe how the target differs from a match on a probe.

    Return "" if the values agree or the match predicts none.
    """
    expected = match.predict(probe, policy)
    value, given = math.nan if expected is None else float(expected.sum()), search.answers[probe].total
    if expected is None or relative(value, given) <= search.close or abs(value - given) <= ROUNDING:
        return ""
    return f"differs on {probe.name}: it returns {given:.6g} instead of {value:.6g}"


EXTREME_BATCHES: Mapping[str, tuple[str, float, tuple[tuple[float, ...], ...]]] = {
    "rows close together at a low temperature": (
        "exponentials overflow: the row's maximum is not subtracted",
        1 / 1000,
        ((1, 1.1, 1, 0.9), (1.1, 1, 0.9, 1), (0.9, 1, 1.1, 1), (1, 0.9, 1, 1.1), (1, 1, 0.9, 1.1), (1.1, 0.9, 1, 1)),
    ),
    "rows far apart at a low temperature": (
        "the row's maximum includes the self pair: all other exponentials underflow, and the logarithm of 0 is taken",
        1 / 700,
        ((1, 1, 1), (1, -1, -1.01), (-1, 1.02, -1), (-1.03, -1, 1)),
    ),
    "a distant positive and a close negative at a low temperature": (
        "exponentials underflow before the logarithm is taken: the loss of a distant positive becomes infinite",
        1 / 1000,
        ((1, 0, 0.1), (0, 1, 0.1), (0.1, 0.1, 1), (0.1, 1, 0), (0, 0.1, 1.1), (1, 0.1, 0)),
    ),
}
"""Batches with logits of about 700 or 1000.

By name of the batch: the usual cause of NaN or infinity, the temperature, and the rows."""


def _probe_range(found: Identification, search: Search, match: Match) -> None:
    passed = search.target.takes_temperature
    for name, (words, temperature, rows) in EXTREME_BATCHES.items():
        # Pass a low temperature. If it is built in, use large norms instead, which matter only for dot products.
        if not (match.as_passed if passed else match.variant.similarity == "dot" and not search.unit):
            continue
        n, scale = len(rows), 1.0 if passed else math.sqrt(match.temperatures[None] / temperature)
        embeddings = scale * torch.nn.functional.normalize(torch.tensor(rows, dtype=torch.float64))
        pairs = [(k, (k + n // 2) % n) for k in range(n)]
        labels = {LABELS: [k % 2 for k in range(n)], PARTNERS: [j for _, j in pairs]}.get(search.call)
        n_views = 2 if search.call in (FEATURES, VIEWS, QUEUE, HARD) else 1
        others = {
            QUEUE: ("negatives", embeddings.flip(0)),
            HARD: ("hard_negatives", embeddings[: n // 2, None].flip(0)),
        }
        keywords = dict([others[search.call]] if search.call in others else [])
        batch = Batch(name, search.call, embeddings, labels, pairs, n_views, keywords)
        probe = Probe(batch, temperature if passed else None)
        broken, expected = search.ask([batch], [probe.temperature]), match.predict(probe)
        remark = f"breaks on {name}: {broken}" if broken else ""
        if not broken and expected is not None and bool(expected.sum().isfinite()):
            finite = math.isfinite(search.answers[probe].total)
            remark = _difference(search, match, probe, "zero") if finite else f"out of range: {words}"
        if remark and not (remark.startswith("out of range") and "out of range" in " ".join(found.remarks)):
            found.remarks.append(remark)


# No match


def _report_nearest(found: Identification, search: Search, matches: Sequence[Match]) -> None:
    """Report the nearest variant, or one that fits at several temperatures."""
    if search.undetermined:
        match = min(search.undetermined, key=lambda match: (len(match.variant.words()), match.plainness))
        why = "the answers do not depend on the temperature, so the loss has no contrast"
        found.nearest = f"{match.variant.describe()}, which gives the same values at several temperatures: {why}"
    elif matches:
        nearest = ranked(matches, lambda match: match.distance, lambda match: len(match.variant.words()))[0]
        if not nearest.distance <= FAR:
            return
        name, expected, given = nearest.worst
        at = "" if search.target.takes_temperature else f" at temperature {nearest.temperatures[None]:.4g}"
        values = f"it gives {expected:.6g}, the target {given:.6g}"
        found.nearest = f"{nearest.variant.describe()}{at}, which differs on {name}: {values}"


CALLED = {QUEUE: VIEWS, HARD: VIEWS, PARTNERS: LABELS}
"""The call of a target, by the call of its probes, if they differ.

A queue or hard negatives are passed with two views; partners are passed in place of labels."""


def name_faults(found: Identification, search: Search, faults: Sequence[Any]) -> None:
    """Name the faults that reproduce the target on every probe, unless the target matches a loss exactly.

    Some faults are equal to the correct loss on all probes, because they are wrong only for options that no probe has,
    such as weights, or at lower temperatures. These faults are not named.
    """
    exact = found.match is not None and (found.match.error <= EXACT or search.single)
    differs = any(remark.startswith(("differs", "out of range", "breaks")) for remark in found.remarks)
    if found.verdict == "match" and exact and not differs:
        return
    close = search.close if found.match is None or exact else min(search.close, found.match.error / CLEARLY)
    for fault in faults:
        # A fault that raises an error does not match.
        with suppress(Exception):
            if (
                fault.call == CALLED.get(search.call, search.call)
                and _same_answers(search, fault.function, found, close)
                and not _is_right(search, fault, found, close)
            ):
                found.faults.append(f"{fault.name}: {fault.words}")
                if found.verdict == "none":
                    found.verdict, found.loss = "wrong", fault.loss


def _is_right(search: Search, fault: Any, found: Identification, close: float) -> bool:
    """Return whether the correct loss behaves like the fault: it has the same answers and rejects the same batches."""
    with suppress(Exception):
        refused = [_refused(search, function, found) for function in (fault.function, fault.right)]
        return refused[0] == refused[1] and _same_answers(search, fault.right, found, close)
    return False


def _refused(search: Search, function: Any, found: Identification) -> set[str]:
    """Return the names of the batches that both the target and a function reject."""
    called, refused = Target(function, CALLED.get(search.call, search.call), "torch"), set[str]()
    batches = [batch for batch in (*search.probes.further, *search.probes.edges) if batch.name in search.broken]
    for probe in (Probe(batch, at or found.temperature) for batch in batches for at in search.passed):
        try:
            call_with(called, probe)
        except TargetError:
            refused.add(probe.batch.name)
    return refused


def _same_answers(search: Search, function: Any, found: Identification, close: float) -> bool:
    fault = Target(function, CALLED.get(search.call, search.call), "torch")
    built_in = None if search.target.takes_temperature else found.temperature or _solve_temperature(search, fault)
    for probe, answer in search.answers.items():
        other = call_with(fault, Probe(probe.batch, probe.temperature or built_in))
        if len(other.values) != len(answer.values) or relative(other.total, answer.total) > close:
            return False
        # Targets without torch may return no gradient.
        judged = answer.gradient is not None or search.target.arrays == "torch"
        if judged and relative(_gradient(other), _gradient(answer), 1e-12 * abs(answer.total)) > 10 * search.close:
            return False
    found.temperature = built_in or found.temperature
    return True


def _gradient(answer: Answer) -> torch.Tensor:
    """Return the flattened gradient: [inf] if missing, [nan] if not finite."""
    flat = torch.tensor([math.inf]) if answer.gradient is None else answer.gradient.flatten()
    return flat if answer.gradient is None or bool(flat.isfinite().all()) else torch.tensor([math.nan])


def _solve_temperature(search: Search, fault: Target) -> float:
    """Return the temperature at which a fault reproduces two answers of the target.

    Raises:
        TargetError: there is no such temperature.
    """
    first, second = search.probes.alike[-1], search.probes.alike[0]
    given, other = (search.answers[Probe(batch, None)].total for batch in (first, second))

    def difference(temperature: float) -> float:
        return call_with(fault, Probe(first, temperature)).total - given

    for (low, a), (high, b) in pairwise((temperature, difference(temperature)) for temperature in GRID[::4]):
        root = crossing(difference, low, high) if -math.inf < a * b <= 0 else None
        if root is not None and relative(call_with(fault, Probe(second, root)).total, other) <= search.close:
            return root
    raise TargetError("no temperature gives the target's values")
