"""The worked examples of the HTML page: the matrices of each batch, and the terms of each loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pairproof.reference import Pair, Result

from ..documents.figures import Judgement
from ..documents.load import WorkedFixture, worked_cases
from ..explain import whole
from ..judge.results import grouped, several
from ..judge.verify import Report
from ..suite.cases import Case, call_reference
from ..suite.catalogue import LOSSES
from .plots import number

FOUR = ("supcon", "nt_xent", "nt_xent_pairwise", "nt_bxent")
"""The losses whose terms are shown for every batch."""

MOST_ROWS = 12
"""Maximum number of rows of a shown batch, and maximum ``Case.size`` of a failing case whose pairs are shown."""


def exp(value: Any) -> float | str:
    """The exponential of a number, rounded."""
    with np.errstate(over="ignore"):
        return number(np.exp(float(value)))


def pairs_of(result: Result) -> dict[str, list[Any]]:
    """By anchor, one list per pair: [other row, whether positive, members, numerator, denominator, value, ratio]."""
    found: dict[str, list[Any]] = {}
    for (anchor, other), pair in result.terms.pairs.items():
        found.setdefault(str(anchor), []).append([other, pair.positive, list(pair.members), *_parts(pair)])
    return found


def _parts(pair: Pair) -> Sequence[Any]:
    if not pair.members:  # a loss that classifies every pair has no ratios
        return None, None, number(pair.value), None
    return exp(pair.log_numerator), exp(pair.log_denominator), number(pair.value), exp(-pair.value)


def _terms(case: Case, calls: Sequence[str]) -> dict[str, Any]:
    """The value and the terms of a case, and the calls of the document that compute them."""
    result = call_reference(case)
    options = {name: value for name, value in case.keywords.items() if name not in ("temperature", "similarity")}
    ignored = [[int(i), int(j)] for i, j in np.argwhere(case.ignored_array()) if i != j]
    described = [f"{name}={list(v) if isinstance(v, tuple) else v}" for name, v in options.items()]
    described += [several(len(ignored), "ignored pair")] * bool(ignored)
    return {
        "label": case.entry.function + (f" ({', '.join(described)})" if described else ""),
        "form": case.form,
        "ignored": ignored,
        "calls": list(calls),
        "value": number(result.loss),
        "expression": next(iter(whole(case, result))),
        "anchors": {str(i): number(value) for i, value in result.terms.anchor_losses.items()},
        "pairs": pairs_of(result),
    }


def _four(case: Case) -> Iterator[Case]:
    """One case per loss in ``FOUR``, with the positives of a case. nt_xent needs mutual partners."""
    mask, ignored = case.positive_array() & case.member_array(), case.ignored_array()
    partners = mask.argmax(axis=1)
    arguments: dict[str, dict[str, Any]] = {
        "supcon": {"positives": mask.tolist()},
        "nt_xent_pairwise": {"positives": mask.tolist()},
        "nt_bxent": {"positive_pairs": np.argwhere(mask).tolist()},
    }
    if (mask.sum(axis=1) == 1).all() and (partners[partners] == np.arange(case.n)).all():
        arguments["nt_xent"] = {"partners": partners.tolist()}
    options = {"temperature": case.temperature, "similarity": case.option("similarity")}
    left_out = {"ignored": ignored.tolist()} if ignored.any() else {}
    for name in FOUR:
        if name in arguments:
            yield Case(case.id, name, case.embeddings, arguments[name] | left_out, options)


def _same(one: Case, other: Case) -> bool:
    """Whether two cases of one batch have the same loss, pairs and value."""
    if one.loss != other.loss:
        return False
    a, b = call_reference(one), call_reference(other)
    alike = {key: pair.members for key, pair in a.terms.pairs.items()}
    return alike == {key: pair.members for key, pair in b.terms.pairs.items()} and bool(
        np.allclose(float(a.loss), float(b.loss), rtol=1e-12, atol=0)
    )


def _batch(case: Case) -> tuple[Any, ...]:
    """A key that all calls on one batch share."""
    positives, ignored = (case.positive_array() & case.member_array()).tobytes(), case.ignored_array().tobytes()
    rows = case.embeddings.shape, case.embeddings.tobytes()
    return *rows, positives, ignored, case.temperature, case.option("similarity")


def _view(cases: Sequence[Case]) -> dict[str, Any]:
    """The matrices of a batch, and the terms of each loss."""
    case = cases[0]
    terms = call_reference(case).terms
    logits = np.array([[float(x) for x in row] for row in terms.logits])
    np.fill_diagonal(logits, -math.inf)
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    softmax = exponentials / exponentials.sum(axis=1, keepdims=True)
    losses, left = dict[str, Any](), list(cases)
    for one in _four(case):
        same = [call for call in left if _same(call, one)]
        left = [call for call in left if call not in same]
        losses[one.loss] = _terms(one, [call.id for call in same])
    losses |= {call.id.rpartition("/")[2]: _terms(call, [call.id]) for call in left}
    return {
        "id": case.id,
        "calls": [one.id for one in cases],
        "temperature": case.temperature,
        "product": "cosine" if case.option("similarity") == "cosine" else "dot product",
        "embeddings": [[number(x, 4) for x in row] for row in case.embeddings],
        "similarity": [[number(x, 4) for x in row] for row in terms.similarity],
        "softmax": [[number(x, 3) for x in row] for row in softmax],
        "positive": [[int(j) for j in row] for row in case.positives()],
        "lacks": [LOSSES[name].function for name in FOUR if name not in losses],
        "first": next(name for name, loss in losses.items() if loss["calls"]),
        "losses": losses,
    }


def _certified(judgement: Judgement) -> str:
    """The certified value of a figure; if its verdict is "artefact", the value recorded for it; else ""."""
    if judgement.value is None and judgement.verdict == "artefact" and judgement.figure.instead:
        return f"{float(judgement.figure.instead['value']):.9g}"
    return "" if judgement.value is None else repr(judgement.value)


def _digits_differ(judgement: Judgement) -> bool:
    """Whether a reproduced figure differs from the certified value, rounded to the printed decimals."""
    printed = judgement.figure.printed
    if judgement.value is None or judgement.verdict != "reproduced" or not isinstance(printed, str):
        return False
    return abs(judgement.value - float(printed)) > 0.5000001 * 10.0 ** -len(printed.partition(".")[2])


def document(fixture: WorkedFixture, report: Report) -> dict[str, Any]:
    """Return the batches, figures and claims of a document, with their verdicts.

    Args:
        fixture: the document.
        report: the results of ``verify``.
    """
    name = fixture.document.id
    cases = worked_cases(fixture)
    shown = [case for case in cases if not case.entry.two_towers and case.n <= MOST_ROWS]
    batches: Mapping[Any, list[Case]] = grouped((_batch(case), case) for case in shown)
    return {
        "id": name,
        "title": fixture.document.title,
        "about": fixture.document.about,
        "views": [_view(some) for some in batches.values()],
        "left_out": [case.id for case in cases if case not in shown],
        "figures": [
            {
                "id": one.case,
                "call": f"{name}/{one.figure.call}" if one.figure.quantity in ("loss", "item_losses") else "",
                "place": one.figure.place,
                "what": one.figure.what,
                "printed": one.figure.printed if isinstance(one.figure.printed, str) else "",
                "value": _certified(one),
                "verdict": one.verdict if one.passed else "failed",
                "rounded": one.figure.arithmetic if one.passed and _digits_differ(one) else "",
                "because": (one.figure.instead or {}).get("because", ""),
            }
            for one in report.judgements
            if one.document == name
        ],
        "claims": [
            {"words": one.claim.words, "verdict": one.verdict, "because": one.claim.because, "evidence": one.evidence}
            for one in report.claims
            if one.document == name
        ],
    }
