"""The terms of one case, written out as the notebooks do: pairs, numerators, denominators, and the whole sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pairproof.reference import Pair, Result

from .suite.cases import Case, call_reference

DIGITS = 4


def explain(case: Case, anchor: int | None = None) -> Iterator[str]:
    """Lines that spell a case out.

    Args:
        case: the case.
        anchor: one row, or None for all of them.

    Raises:
        ValueError: the row is no anchor of the case.
    """
    result = call_reference(case)
    anchors = case.anchors()
    if anchor is not None and anchor not in anchors:
        raise ValueError(f"anchor: expected one of {', '.join(map(str, anchors))}, got {anchor}")
    columns = _columns(case)
    yield f"{case.id}: {case.entry.function}, {case.sizes()}"
    options = {"temperature": case.option("temperature"), "similarity": case.option("similarity"), **case.keywords}
    yield "  " + ", ".join(f"{name} {value}" for name, value in options.items())
    for name, value in case.arguments.items():
        yield f"  {name} {value}"
    if columns:
        yield f"  columns: {columns}"
    for i in anchors if anchor is None else [anchor]:
        yield ""
        yield from _anchor(case, result, i)
    yield ""
    yield from _whole(case, result)
    yield "  (each printed number is rounded; the sum is not)"


def _columns(case: Case) -> str:
    """What the numbers of positives and negatives count, where that is not the batch itself."""
    if case.entry.two_towers:
        queue = len(case.others.get("negatives", ()))
        tower = f"0 to {case.n - 1} the rows of the other tower"
        return f"{tower}, {case.n} to {case.n + queue - 1} the negatives" if queue else tower
    return "the references" if "ref_embeddings" in case.others else ""


def _name(case: Case, i: int) -> str:
    """An anchor, and which row of which matrix it is where that is not clear."""
    if not case.entry.two_towers:
        return f"anchor {i}"
    block = next(block for block in case.blocks() if block.row <= i < block.row + case.n)
    return f"anchor {i} (row {i - block.row} of {block.left})"


def _exp(x: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.exp(x))


def _rows(rows: Sequence[int]) -> str:
    return " ".join(map(str, rows)) if rows else "none"


def _number(value: float) -> str:
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.{DIGITS - 1}e}"
    return f"{value:.{DIGITS}f}"


def _anchor(case: Case, result: Result, i: int) -> Iterator[str]:
    terms = result.terms
    yield f"{_name(case, i)}: positives {_rows(terms.positives[i])}; negatives {_rows(terms.negatives[i])}"
    pairs = [pair for (a, _), pair in terms.pairs.items() if a == i]
    for pair in pairs:
        yield f"  {_pair(case, pair, float(terms.similarity[i][pair.other]))}"
    policy = "" if i in terms.counted else "  (left out of the mean: no positive)"
    yield f"  value of anchor {i}: {_number(float(terms.anchor_losses[i]))}{policy}"


def _pair(case: Case, pair: Pair, similarity: float) -> str:
    s = f"similarity {_number(similarity)}"
    if case.entry.form == "binary":
        sign, kind = ("-", "positive") if pair.positive else ("", "negative")
        return f"with {pair.other} ({kind}): {s}; softplus({sign}s) = {_number(float(pair.value))}"
    # As the document writes them, unless the exponentials leave the range of float64.
    numerator, denominator = _exp(float(pair.log_numerator)), _exp(float(pair.log_denominator))
    if case.entry.epsilon or not (0 < numerator < np.inf and 0 < denominator < np.inf):
        numerator, denominator = float(pair.numerator), float(pair.denominator)
        s += f", both relative to e^{_number(float(pair.shift))}"
    ratio = _exp(-float(pair.value))
    return (
        f"with {pair.other}: {s}; numerator {_number(numerator)}, denominator {_number(denominator)}"
        f" over rows {_rows(pair.members)}; ratio {_number(ratio)}, -log {_number(float(pair.value))}"
    )


def _whole(case: Case, result: Result) -> Iterator[str]:
    """The whole sum on one line: -((log 0.1407 + log 0.1922)/2 + ...)/9 = 2.1960."""
    terms = result.terms
    parts = []
    for i in terms.counted:
        pairs = [pair for (a, _), pair in terms.pairs.items() if a == i]
        if not pairs:
            parts.append("0")
        elif case.entry.form == "binary":
            parts.append(_binary(pairs))
        elif case.entry.form == "inside":
            ratios = " + ".join(_number(_exp(-float(p.value))) for p in pairs)
            parts.append(f"log(({ratios})/{len(pairs)})")
        else:
            logs = " + ".join(f"log {_number(_exp(-float(p.value)))}" for p in pairs)
            parts.append(f"({logs})/{len(pairs)}" if len(pairs) > 1 else logs)
    sign = "" if case.entry.form == "binary" else "-"
    count = len(terms.counted)
    scale = "" if case.option("base_temperature") is None else f" x {_number(float(terms.scale))}"
    reduction = case.option("reduction")
    if reduction == "none":
        for i, part, value in zip(terms.counted, parts, result.loss, strict=True):
            yield f"anchor {i}: {sign}({part}){scale} = {_number(float(value))}"
        return
    if reduction == "mean_pairs":
        pairs = [pair for pair in terms.pairs.values() if pair.positive]
        logs = " + ".join(f"log {_number(_exp(-float(p.value)))}" for p in pairs)
        yield f"-({logs})/{max(len(pairs), 1)}{scale} = {_number(float(result.loss))}"
        return
    divisor = f"/{count}" if reduction == "mean" and count else ""
    yield f"{sign}({' + '.join(parts) or '0'}){divisor}{scale} = {_number(float(result.loss))}"


def _binary(pairs: Sequence[Pair]) -> str:
    positive = [_number(float(p.value)) for p in pairs if p.positive]
    negative = [_number(float(p.value)) for p in pairs if not p.positive]
    parts = [f"({' + '.join(positive)})/{len(positive) + 1}"] if positive else []
    parts += [f"({' + '.join(negative)})/{len(negative)}"] if negative else []
    return " + ".join(parts)
