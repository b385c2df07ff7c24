"""Explain cases: every term of the loss and, for a golden case, its purpose and expected results."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pairproof.reference import Pair, Result, Terms

from .documents.load import load_worked, worked_cases
from .judge.options import Selection, UsageError, meant
from .suite.cases import Case, call_reference
from .suite.catalogue import LOSSES, WEIGHTS
from .suite.formulas import stored_rows_of
from .suite.golden import ARGUMENTS, DTYPES, FOLDER, Flag, GoldenCase, load_golden
from .suite.records import Expected

DIGITS = 4
ALL_TERMS = 12
"""``describe`` prints every term of a case by default if ``Case.size`` is at most this number."""


def explain(case: Case, anchor: int | None = None) -> Iterator[str]:
    """Yield lines that show every term of a case.

    Args:
        case: the case.
        anchor: the row of one anchor; None for all anchors.

    Raises:
        UsageError: the row is not an anchor of the case.
    """
    result, anchors = call_reference(case), case.anchors()
    if anchor is not None and anchor not in anchors:
        raise UsageError(f"--anchor: expected one of {', '.join(map(str, anchors))}, got {anchor}")
    yield f"{case.id}: {case.entry.function}, {case.sizes()}"
    shown = ("temperature", "bias", "tau_plus", "beta", "sigma", "similarity")
    options = {name: case.option(name) for name in shown if name in case.entry.keywords} | dict(case.keywords)
    yield "  " + ", ".join(f"{name} {value}" for name, value in options.items())
    yield from (f"  {name} {value}" for name, value in case.arguments.items())
    if case.entry.two_towers:
        rows, columns = len(case.others["embeddings_b"]), case.shape[1]
        queue = f"; {rows} to {columns - 1} are the negatives" if "negatives" in case.others else ""
        of_tower = f"0 to {rows - 1} are " if queue or case.n == rows else ""
        yield f"  columns: {of_tower}the rows of the other tower{queue}"
    elif "ref_embeddings" in case.others:
        yield "  columns: the references"
    for i in anchors if anchor is None else [anchor]:
        yield from ("", *_anchor(case, result.terms, i))
    yield from (
        "",
        *whole(case, result),
        "  (numbers are rounded for display; the result is computed from unrounded ones)",
    )


def _exp(x: Any) -> float:
    with np.errstate(over="ignore"):
        return float(np.exp(float(x)))


def _listed(rows: Sequence[int]) -> str:
    return " ".join(map(str, rows)) or "none"


def _number(value: Any) -> str:
    x = float(value)
    return f"{x:.{DIGITS}f}" if x == 0 or 1e-3 <= abs(x) < 1e5 else f"{x:.{DIGITS - 1}e}"


def _anchor(case: Case, terms: Terms, i: int) -> Iterator[str]:
    block = next(block for block in case.blocks() if block.part[0] == np.s_[:] or i < block.part[0].stop)
    place = f" (row {i - block.part[0].start} of {block.left})" if case.entry.two_towers else ""
    yield f"anchor {i}{place}: positives {_listed(terms.positives[i])}; negatives {_listed(terms.negatives[i])}"
    for (anchor, other), pair in terms.pairs.items():
        if anchor == i:
            weight = "" if "positive_weights" not in case.arguments else f", weight {_number(pair.weight)}"
            yield f"  {_pair(case, pair, terms.similarity[i][other])}{weight}"
    weight = "" if "anchor_weights" not in case.arguments else f", with its weight {_number(case.anchor_weights()[i])}"
    policy = "" if i in terms.counted else "  (left out of the mean: no positives)"
    yield f"  value of anchor {i}{weight}: {_number(terms.anchor_losses[i])}{policy}"


def _pair(case: Case, pair: Pair, similarity: Any) -> str:
    s = f"similarity {_number(similarity)}"
    if case.entry.form in ("sigmoid", "binary"):
        sign, kind = ("-", "positive") if pair.positive else ("", "negative")
        name = "s"
        if case.entry.form == "sigmoid":
            name, logit = "logit", float(similarity) / case.temperature + case.bias
            s += f", logit {_number(logit)}"
        return f"with {pair.other} ({kind}): {s}; softplus({sign}{name}) = {_number(pair.value)}"
    # The documents print exponentials of raw logits. Shifted logits are needed if an exponential overflows or
    # underflows, or if the loss adds an epsilon.
    numerator, denominator = _exp(pair.log_numerator), _exp(pair.log_denominator)
    if case.entry.epsilon or not (0 < numerator < np.inf and 0 < denominator < np.inf):
        numerator, denominator = pair.numerator, pair.denominator
        s += f", both relative to e^{_number(pair.shift)}"
    below = f"denominator {_number(denominator)} over rows {_listed(pair.members)}"
    if case.entry.form == "mass":
        negatives = _listed([k for k in pair.members if k != pair.other])
        below = f"mass {_number(denominator - numerator)} of the negatives {negatives}"
    fraction = f"numerator {_number(numerator)}, {below}; ratio {_ratio(pair)}"
    return f"with {pair.other}: {s}; {fraction}, -log {_number(pair.value)}"


def _ratio(pair: Pair) -> str:
    return _number(_exp(-pair.value))


def whole(case: Case, result: Result) -> Iterator[str]:
    """Yield the reduction as a formula, such as ``-((log 0.1407 + log 0.1922)/2 + ...)/9 = 2.1960``.

    With reduction "none" or "none_pairs", yield one line per anchor or pair.
    """
    terms, form, reduction = result.terms, case.form, case.option("reduction")
    sign = "" if form in ("binary", "sigmoid") else "-"
    scale = "" if case.option("base_temperature") is None else f" x {_number(terms.scale)}"
    if case.over_pairs:
        summed = form == "sigmoid"
        parts = [
            _number(p.value) if summed else f"{_factor(case, p.anchor)}{_log(case, p)}"
            for _, p in sorted(terms.pairs.items())
        ]
    else:
        pairs = {i: [pair for (a, _), pair in terms.pairs.items() if a == i] for i in terms.counted}
        parts = [
            "nan" if math.isnan(terms.anchor_losses[i]) else f"{_factor(case, i)}{_part(case, of_anchor)}"
            for i, of_anchor in pairs.items()
        ]
    if reduction == "none":
        for i, part, value in zip(terms.counted, parts, result.loss, strict=True):
            factor = f"{case.direction_weights()[i]:g} x " if case.groups() else ""
            yield f"anchor {i}: {factor}{sign}({part}){scale} = {_number(value)}"
        return
    if reduction == "none_pairs":
        for place, part, value in zip(sorted(terms.pairs), parts, result.loss, strict=True):
            yield f"pair {place}: {sign}{part}{scale} = {_number(value)}"
        return
    groups = case.groups() or [range(case.shape[0])]
    sums = []
    for rows in groups:
        own = parts if len(groups) == 1 else [part for i, part in zip(terms.counted, parts, strict=True) if i in rows]
        number = _number(case.divisors()[rows[0]]) if WEIGHTS.keys() & case.arguments.keys() else len(own)
        divisor = f"/{number}" if reduction.startswith("mean") and own else ""
        factor = f"{case.direction_weights()[rows[0]]:g} x " if len(groups) > 1 else ""
        sums.append(f"{factor}{sign}({' + '.join(own) or '0'}){divisor}{scale}")
    yield f"{' + '.join(sums)} = {_number(result.loss)}"


def _part(case: Case, pairs: Sequence[Pair]) -> str:
    form = case.form
    if not pairs:
        return "0"
    if form == "sigmoid":
        return " + ".join(_number(pair.value) for pair in pairs)
    if form == "binary":
        kinds = [[_number(pair.value) for pair in pairs if pair.positive is kind] for kind in (True, False)]
        # The diagonal counts as a positive of loss 0.
        return " + ".join(f"({' + '.join(v)})/{len(v) + extra}" for v, extra in zip(kinds, (1, 0), strict=True) if v)
    if form == "inside":
        inside = " + ".join(map(_ratio, pairs))
        return f"log({inside})" if case.option("inside_reduction") == "sum" else f"log(({inside})/{len(pairs)})"
    logs = " + ".join(_log(case, pair) for pair in pairs)
    number = f"{len(pairs)}"
    if case.option("weights_divisor") == "weight" and "positive_weights" in case.arguments:
        number = _number(sum(float(pair.weight) for pair in pairs))
    return f"({logs})/{number}" if number != "1" else logs


def _log(case: Case, pair: Pair) -> str:
    weight = f"{_number(pair.weight)} x " if "positive_weights" in case.arguments else ""
    return f"{weight}log {_ratio(pair)}"


def _factor(case: Case, i: int) -> str:
    return f"{_number(case.row_weights()[i])} x " if "anchor_weights" in case.arguments else ""


def find_case(name: str) -> Case:
    """Find a case.

    Args:
        name: the id of a case, the id of a figure that shows its loss, or a name that ``find_golden`` accepts.

    Raises:
        UsageError: there is no such case, or there are several.
    """
    fixtures = load_worked()
    cases = {case.id: case for fixture in fixtures for case in worked_cases(fixture)}
    calls = {f"{one.document.id}/{it.id}": f"{one.document.id}/{it.call}" for one in fixtures for it in one.figures}
    found = cases.get(name) or cases.get(calls.get(name, ""))
    if found is None and name in calls:
        raise UsageError(f"{name} is not a loss with known inputs, so it has no terms; see: pairproof list cases")
    return found or find_golden(name, others=[*cases, *calls]).case


def find_golden(name: str, root: Path | None = None, others: Sequence[str] = ()) -> GoldenCase:
    """Find a golden case.

    Args:
        name: the id, such as "golden/supcon/two-positives". "golden/" may be omitted. The loss may be omitted, too, if
            no other loss has a case of this name.
        root: a folder of fixtures; by default the installed one.
        others: further names to suggest for a misspelt name.

    Raises:
        UsageError: there is no such case, or there are several.
    """
    cases = load_golden(root)
    found = [case for case in cases if case.id in (name, f"{FOLDER}/{name}")]
    found = found or [case for case in cases if case.id.rpartition("/")[2] == name]
    if len(found) > 1:
        raise UsageError(f"{name} is a case of several losses: {', '.join(case.id for case in found)}")
    if not found:
        names = [case.id.removeprefix(f"{FOLDER}/") for case in cases]
        near = meant(name.removeprefix(f"{FOLDER}/"), [*names, *others])
        raise UsageError(f"no {'' if others else 'golden '}case is called {name!r}; see: pairproof list cases{near}")
    return found[0]


def describe(golden: GoldenCase, flags: Mapping[str, Flag], *, terms: bool | None = None) -> Iterator[str]:
    """Yield lines that explain a golden case: its purpose, its inputs, the expected results, and how to repeat it.

    Args:
        golden: the case.
        flags: the explanation of every flag.
        terms: whether to show every term; None means only for small cases (see ``ALL_TERMS``).
    """
    case, loss = golden.case, LOSSES[golden.case.loss]
    whole = case.size <= ALL_TERMS if terms is None else terms
    yield f"{golden.id}: {loss.function}({', '.join([*case.matrices, *case.arguments])}), {loss.source}"
    yield from (f"  {golden.note}", "")
    for name in golden.flags:
        flag = flags[name]
        yield from (f"flag {name}", f"  detects: {flag.hunts}", f"  effect: {flag.effect}")
        yield from (f"  where: {_address(link)}" for link in flag.links)
    yield from ("", f"{case.sizes()}, exact in {', '.join(golden.dtypes)}")
    if others := [dtype for dtype in DTYPES if dtype not in golden.dtypes]:
        yield f"  not exact in {', '.join(others)}, so not judged in these dtypes"
    for name, matrix in case.matrices.items():
        if name in golden.formulas:
            words = ", ".join(f"{key} {value}" for key, value in asdict(golden.formulas[name]).items())
            yield f"  {name} by a formula: {words}"
        if whole or name in golden.formulas:
            yield from _matrix("row" if name == "embeddings" else f"{name}, row", matrix)
    yield from (f"  {key} {value}" for key, value in case.arguments.items())
    for key in loss.keywords:
        if key in case.keywords:
            yield f"  {key} {case.keywords[key]}"
        elif key not in (*ARGUMENTS, "anchors"):
            default = loss.default(key, case.others)
            yield f"  {key} {'not given' if default is None else default} (the default)"
    yield from ("", "expected; each number is the float64 nearest to the true value")
    yield from _results(golden.expected, case, whole)
    yield from ("", f"repeat: {Selection(cases=(golden.id,)).command()}")
    yield f"terms: pairproof explain {golden.id} --anchor {next(iter(case.anchors()), 0)}"
    if whole:
        yield from ("", *explain(case))


def _results(expected: Expected, case: Case, whole: bool) -> Iterator[str]:
    yield f"  loss {expected.loss!r}" if isinstance(expected.loss, float) else "  loss: the values of the anchors"
    values = expected.anchors
    if whole:
        yield from (f"  value of anchor {i}: {value!r}" for i, value in values.items())
    elif values:
        yield f"  values of {len(values)} anchors, from {min(values.values())} to {max(values.values())}"
    if expected.gradient is None:
        yield f"  gradient left out: {expected.gradient_left_out}"
        return
    for name, gradient in case.gradients(expected).items():
        wrt = "" if name == "embeddings" else f" with respect to {name}"
        if name in expected.products:
            yield from _matrix(f"gradient{wrt}, row", gradient, stored_rows_of(case.matrices[name]))
            yield from _matrix(f"sum of the gradient's rows{wrt} with the factors", expected.products[name])
        elif whole:
            yield from _matrix(f"gradient{wrt}, row", gradient)
        else:
            yield f"  gradient{wrt}: norm {math.hypot(*gradient.ravel().tolist())}"


def _matrix(what: str, matrix: npt.NDArray[np.float64], rows: Sequence[int] | None = None) -> Iterator[str]:
    chosen = range(len(matrix)) if rows is None else rows
    return (f"  {what} {i}: {', '.join(map(repr, matrix[i].tolist()))}" for i in chosen)


def _address(link: str) -> str:
    thread = re.fullmatch("([^/:]+/[^/:]+)#([0-9]+)", link)
    return f"https://github.com/{thread[1]}/issues/{thread[2]}" if thread else link
