"""The findings of the HTML page: charts of known mistakes, temperature sweeps, and public losses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from pairproof import reference

from ..documents.figures import Judgement
from ..implementations import ALL, Implementation, Unavailable
from ..implementations.base import Deviation
from ..implementations.public import PublicLoss, load_public
from ..judge import public, ranges
from ..judge.check import is_above, judge_target
from ..judge.proofs import as_claimed
from ..judge.results import Check, Status, grouped, several
from ..judge.verify import Report
from ..suite.cases import Case
from ..suite.golden import GoldenCase
from ..suite.levels import Level
from ..suite.records import Expected, Outcome
from ..truth.evaluate import truth
from .plots import Chart, Line, Rule

TEMPERATURES = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.014, 0.01, 0.005, 0.002, 0.001, 0.0005)
"""The temperatures of the sweeps."""

DTYPE = "float32"
"""The dtype of the sweeps."""

BOTTOM = 1e-9
"""Smaller relative errors are drawn at this value."""


@dataclass(frozen=True)
class Finding:
    """A finding with its charts.

    Attributes:
        id: name in the page.
        title: what happens, in a few words.
        because: why, from the record of the figure or of the deviation.
        proof: the numbers that show it.
        link: where the cause is discussed or documented; "" for a finding about a document.
        charts: the charts.
    """

    id: str
    title: str
    because: str
    proof: str
    link: str
    charts: Sequence[Chart]

    def data(self) -> dict[str, Any]:
        """The finding as JSON data."""
        return {**vars(self), "charts": [chart.data() for chart in self.charts]}


def judged(report: Report) -> dict[str, Implementation]:
    """Load the implementations that a run judged, by name; unavailable ones are left out."""
    found = {}
    for kind in ALL:
        if kind.name in report.versions:
            with suppress(Unavailable):
                found[kind.name] = kind(report.selection.peers, report.selection.device)
    return found


def findings(report: Report, implementations: Mapping[str, Implementation]) -> Iterator[Finding]:
    """Yield the findings that the judged documents and implementations show.

    Args:
        report: the results of ``verify``.
        implementations: the result of ``judged``.
    """
    artefacts = {one.case: one for one in report.judgements if one.verdict == "artefact"}
    if (figure := artefacts.get("batch_tutorial/loss")) and "batch-tutorial" in implementations:
        yield _constant(figure, implementations["batch-tutorial"])
    for name, figure in artefacts.items():
        if name.startswith("pair_notebook/"):
            yield _clamp(figure)
    if "pml" in implementations:
        reasons = {one.name: one for one in implementations["pml"].deviations}
        yield _rising_mean(implementations["pml"], reasons["solved anchors are left out of the mean"])
        yield _saturation(implementations["pml"], reasons["saturated logarithm"])


def _because(figure: Judgement) -> str:
    return f"The document prints {figure.figure.printed}. {(figure.figure.instead or {}).get('because', '')}"


def _largest(outcome: Outcome) -> float:
    return 0.0 if outcome.gradient is None else float(np.abs(outcome.gradient).max())


def _constant(figure: Judgement, tutorial: Implementation) -> Finding:
    """The batch tutorial's loss on random rows times a factor. In the tutorial, the factor is 1."""
    rows, labels = np.random.default_rng(0).standard_normal((5, 192)).astype(np.float32), [0, 3, 9, 3, 1]
    factors = np.geomspace(0.01, 1, 17).tolist()
    cases = [
        Case("findings/constant", "supcon_epsilon", (np.float32(x) * rows).astype(float), {"labels": labels}, {})
        for x in factors
    ]
    outcomes = [tutorial.evaluate(case, DTYPE) for case in cases]
    values, slopes = [one.values[0] for one in outcomes], [_largest(one) for one in outcomes]
    flat = next(x for x, slope in zip(factors, slopes, strict=True) if slope == 0)
    name = f"{tutorial.name} in {DTYPE}"
    x = "factor of the rows; 1 is torch.randn, as in the tutorial"
    charts = (
        Chart("The loss of random rows against their size", x, "loss", [Line(name, _points(factors, values))], True),
        Chart(
            "The largest entry of the gradient against the size of the rows",
            *(x, "largest entry of the gradient", [Line(name, _points(factors, slopes))], True, True),
            lowest=1e-9,
        ),
    )
    proof = (
        f"Rows of standard normal numbers are multiplied by a factor. At factor 1, the loss is {values[-1]:.4f}. From"
        f" factor {flat:.2g} to 1, every entry of the gradient is exactly 0."
    )
    return Finding("constant", "A loss that does not move", _because(figure), proof, "", charts)


def _points(xs: Iterable[float], ys: Iterable[float]) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in zip(xs, ys, strict=True)]


def _clamp(figure: Judgement) -> Finding:
    """The loss of one negative pair: exact, and by a sigmoid followed by the binary cross-entropy of torch."""
    logits, fine = np.arange(0, 112, 4.0), np.arange(0, 90, 0.01)
    lines = [Line("exact: log(1 + e^s)", _points(logits, np.logaddexp(0, logits)))]
    clamped = []
    for dtype in (torch.float32, torch.float64):
        lines.append(
            Line(f"sigmoid, then binary_cross_entropy, {str(dtype)[6:]}", _points(logits, _negative(logits, dtype)))
        )
        clamped.append(next(x for x, y in zip(fine, _negative(fine, dtype), strict=True) if y == 100))
    proof = (
        f"The exact loss is {figure.value}. The loss of a negative pair is 100 for logits of {clamped[0]:.2f} or"
        f" more in float32, and of {clamped[1]:.2f} or more in float64."
    )
    title = "The loss of a negative pair against its logit"
    chart = Chart(title, "logit s", "loss of the pair", lines, rules=[Rule(100)])
    return Finding("clamp", "A logarithm that is clamped at -100", _because(figure), proof, "", (chart,))


def _negative(logits: npt.NDArray[np.float64], dtype: torch.dtype) -> list[float]:
    """The loss of negative pairs as the notebook computes it."""
    x = torch.tensor(logits, dtype=dtype).sigmoid()
    found: list[float] = F.binary_cross_entropy(x, torch.zeros_like(x), reduction="none").tolist()
    return found


def _rising_mean(pml: Implementation, reason: Deviation) -> Finding:
    """The mean loss of eight pairs that are solved one after the other, the smallest loss first.

    Rows of different pairs are orthogonal. The two rows of a solved pair have a cosine of 1, those of an unsolved pair
    0 or less.
    """
    pairs, cases = 8, []
    for solved in range(pairs):
        rows = np.zeros((2 * pairs, 2 * pairs))
        for k in range(pairs):
            cosine = 1.0 if k < solved else -k / 16
            rows[2 * k, k] = 1.0
            rows[2 * k + 1, [k, k + pairs]] = cosine, math.sqrt(1 - cosine**2)
        labels = np.repeat(np.arange(pairs), 2).tolist()
        rows = rows.astype(np.float32).astype(np.float64)
        cases.append(Case("findings/solved", "supcon", rows, {"labels": labels}, {"temperature": 0.05}))
    exact = [float(reference.supcon_loss(c.embeddings, c.arguments["labels"], temperature=0.05).loss) for c in cases]
    found = [pml.evaluate(case, DTYPE).values[0] for case in cases]
    x = range(pairs)
    lines = [
        Line("mean over all 16 anchors", _points(x, exact)),
        Line(f"{pml.name} in {DTYPE}: mean over the anchors above 0", _points(x, found)),
    ]
    chart = Chart("The loss of eight pairs while they are solved", "number of solved pairs of 8", "loss", lines)
    proof = (
        f"With {pairs - 1} of {pairs} pairs solved, the mean over all anchors has fallen from {exact[0]:.3f} to"
        f" {exact[-1]:.3f}; the returned loss has risen from {found[0]:.3f} to {found[-1]:.3f}."
    )
    return Finding("rising-mean", "A mean that rises as anchors are solved", reason.reason, proof, reason.link, [chart])


def _saturation(pml: Implementation, reason: Deviation) -> Finding:
    """Two pairs at decreasing temperatures: each row is far from its partner and close to a row of the other pair."""
    rows = np.array([[25, 0], [-15, 20], [24, 7], [-20, 15]], dtype=np.float64)
    truths, outcomes = [], []
    for temperature in 1.56 / np.arange(10, 201, 10):
        given = {"temperature": float(temperature)}
        case = Case("findings/saturated", "nt_xent", rows, {"partners": [1, 0, 3, 2]}, given)
        truths.append(truth(case))
        outcomes.append(pml.evaluate(case, DTYPE))
    exact, found = [one.values[0] for one in truths], [one.values[0] for one in outcomes]
    name = f"{pml.name} in {DTYPE}"
    values = Chart(
        "The loss that is returned against the exact loss",
        *("exact loss", "returned loss", [Line(name, _points(exact, found)), Line("exact", _points(exact, exact))]),
    )
    slopes = [
        _largest(one) / float(np.abs(true.gradient).max())  # type: ignore[arg-type]
        for one, true in zip(outcomes, truths, strict=True)
    ]
    share = Chart(
        "The size of the gradient relative to the exact gradient, against the exact loss",
        *("exact loss", "gradient / exact gradient", [Line(name, _points(exact, slopes))]),
        rules=[Rule(1)],
    )
    proof = (
        f"At an exact loss of {exact[-1]:.2f}, {found[-1]:.2f} is returned, and the largest entry of the gradient is"
        f" {_largest(outcomes[-1]):.2g}."
    )
    return Finding("saturation", "A loss that saturates", reason.reason, proof, reason.link, (values, share))


def sweeps(losses: Iterable[str], implementations: Mapping[str, Implementation]) -> Iterator[dict[str, Any]]:
    """Yield the chart and the table of a temperature sweep for each loss.

    A loss that no implementation computes is left out. The batch and the allowed error are those of
    ``judge/ranges.py``.

    Args:
        losses: the losses.
        implementations: the result of ``judged``.
    """
    present = [one for one in implementations.values() if DTYPE in one.dtypes]
    for loss in losses:
        options = ({"temperature": temperature, "similarity": "cosine"} for temperature in TEMPERATURES)
        cases = [ranges.ordinary_case(loss, keywords) for keywords in options]
        able = [one for one in present if not any(map(one.refuses, cases))]
        if not able:
            continue
        truths = [truth(case) for case in cases]
        found = {one.name: [_errors(one, case, true) for case, true in zip(cases, truths, strict=True)] for one in able}
        yield _sweep(loss, found)


def _errors(one: Implementation, case: Case, true: Expected) -> tuple[float, float]:
    """The relative errors of value and gradient; infinite if a result is not finite or the call fails."""
    try:
        outcome = one.evaluate(case, DTYPE)
    except Exception:  # external code may raise anything
        return math.inf, math.inf
    value = _distance(np.array(true.values), np.array(outcome.values))
    found = case.gradients(outcome)
    pairs = [(rows, found[name]) for name, rows in case.gradients(true).items() if found]
    return value, max((_distance(*pair) for pair in pairs), default=0.0)


def _distance(expected: Any, found: Any) -> float:
    if expected.shape != found.shape or not np.isfinite(found).all():
        return math.inf
    size = float(np.linalg.norm(expected))
    return float(np.linalg.norm(found - expected)) / (size or 1.0)


def _sweep(loss: str, found: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, Any]:
    """The chart of a loss, and where each implementation breaks.

    Implementations with equal errors share a line. The chart leaves out those that are wrong even at the highest
    temperature, because they compute another loss.
    """
    eps = float(np.finfo(DTYPE).eps)
    allowed = [min(max(ranges.WIDE, 16 * eps / t), 100 * ranges.WIDE) for t in TEMPERATURES]
    same = grouped((tuple(tuple(f"{x:.1g}" for x in both) for both in errors), name) for name, errors in found.items())
    rows, lines, right, different = [], [], list[str](), list[str]()
    for names in same.values():
        errors = found[names[0]]
        wrong = [next((k for k, both in enumerate(errors) if not both[part] <= allowed[k]), None) for part in (0, 1)]
        points = [(t, max(both)) for t, both in zip(TEMPERATURES, errors, strict=True)]
        if wrong == [None, None]:
            right += names
            continue
        if 0 in wrong:
            different += names
            continue
        lines.append(Line(", ".join(names), points[::-1]))
        places = [
            None if k is None else {"at": TEMPERATURES[k], "error": _shown(errors[k][part])}
            for part, k in enumerate(wrong)
        ]
        rows.append({"who": names, "value": places[0], "gradient": places[1]})
    if right:
        worst = [max(max(found[name][k]) for name in right) for k in range(len(TEMPERATURES))]
        name = f"largest error of the {several(len(right), 'implementation')} without a break"
        lines.append(Line(name, _points(TEMPERATURES[::-1], worst[::-1]), faint=True))
    title = f"{loss}: relative error of value and gradient against the temperature, in {DTYPE}"
    rules = Rule(ranges.WIDE), Rule(1)
    chart = Chart(title, "temperature", "larger relative error", lines, True, True, BOTTOM, rules)
    return {"loss": loss, "chart": chart.data(), "breaks": rows, "right": right, "different": different}


def _shown(error: float) -> float | str:
    return float(f"{error:.2g}") if math.isfinite(error) else "not finite"


def public_losses(stored: Mapping[Case, GoldenCase | None]) -> Iterator[dict[str, Any]]:
    """Yield for each public loss what it computes, what ``check`` reports, and a failing case.

    Args:
        stored: the cases with their golden entries, as ``load_cases`` returns them.
    """
    golden = {case.id: one for case, one in stored.items() if one}
    for loss in load_public():
        verdict = f"conforms at level {loss.level}" if loss.level else "does not conform"
        about = {"who": loss.repository, "at": loss.commit[:12], "link": loss.link, "computes": loss.computes}
        shown = None if loss.level else _first_failure(loss, golden)
        where = {"case": shown.case, "message": shown.message} if shown else {"case": "", "message": ""}
        yield {**about, "loss": loss.loss, "verdict": verdict, "says": list(loss.says), **where}


def _first_failure(loss: PublicLoss, golden: Mapping[str, GoldenCase]) -> Check | None:
    """The first recorded answer that fails at a required level, preferably with a true loss other than 0."""
    request, target, data = public.recorded(loss)
    first = None
    for name in data["answers"]:
        case, claimed = as_claimed(golden[name].case, golden[name], target.claim)
        for one in judge_target(request, target, case, claimed, target.dtypes, ()):
            if one.status is Status.FAILED and not is_above(one, Level.POLICIES):
                first = first or replace(one, case=name)
                if claimed and any(value != 0 for value in claimed.expected.values):
                    return replace(one, case=name)
    return first
