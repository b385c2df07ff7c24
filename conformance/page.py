"""The results of ``verify`` or of ``check`` as one HTML page. Its data are embedded as JSON; it loads no other file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from pairproof import reference
from pairproof.reference import Result

from .documents.load import WorkedFixture, worked_cases
from .implementations import ALL
from .implementations.public import load_public
from .judge.check import CONFORMS, CheckResult
from .judge.options import CouldNotRun
from .judge.results import BAD, Check, Status, counted, grouped
from .judge.verify import Report, load_cases
from .suite.cases import Case, call_reference
from .suite.catalogue import LOSSES
from .suite.golden import load_flags

FORMAT = "pairproof-page/1"
LARGEST = 3_000_000
"""Largest size of a page in bytes."""
MOST_ROWS = 12
"""Largest number of rows of a worked example that is shown, and largest size of a failing case with its anchors."""
SHOWN = 40
"""Largest number of failing cases that are shown."""
BENCH = Path(__file__).resolve().parent.parent / "bench/results/cpu.svg"
"""The plot of the benchmark. The installed package does not contain it."""
ORDER = (Status.ERRORED, Status.FAILED, Status.DEVIATES, Status.PASSED, Status.SKIPPED)
"""Statuses by importance. If the dtypes of a case have different statuses, the first of these is shown."""


def _number(value: Any, digits: int = 6) -> float | str:
    """Round a number to significant digits. Infinities and NaN become texts, because JSON does not have them."""
    x = float(value)
    return float(f"{x:.{digits}g}") if math.isfinite(x) else str(x)


def _exp(value: Any) -> float | str:
    with np.errstate(over="ignore"):
        return _number(np.exp(float(value)))


def _pairs(result: Result) -> dict[str, list[Any]]:
    """The pairs of every anchor: other, positive, members, numerator, denominator, value."""
    found: dict[str, list[Any]] = {}
    for (anchor, other), pair in result.terms.pairs.items():
        parts = _exp(pair.log_numerator), _exp(pair.log_denominator), _number(pair.value)
        found.setdefault(str(anchor), []).append([other, pair.positive, list(pair.members), *parts])
    return found


def _losses(case: Case) -> dict[str, Any]:
    """The terms of three losses on the positives of a case, and of nt_xent if the positives are mutual partners."""
    mask = case.positive_array() & case.member_array()
    options = {"temperature": case.temperature, "similarity": case.option("similarity")}
    partners = mask.argmax(axis=1)
    results: dict[str, Result] = {
        "supcon": reference.supcon_loss(case.embeddings, positives=mask, **options),
        "nt_xent_pairwise": reference.nt_xent_pairwise_loss(case.embeddings, positives=mask, **options),
        "nt_bxent": reference.nt_bxent_loss(case.embeddings, np.argwhere(mask), **options),
    }
    if (mask.sum(axis=1) == 1).all() and (partners[partners] == np.arange(case.n)).all():
        results["nt_xent"] = reference.nt_xent_loss(case.embeddings, partners, **options)
    return {
        name: {
            "function": LOSSES[name].function,
            "value": _number(results[name].loss),
            "anchors": {str(i): _number(value) for i, value in results[name].terms.anchor_losses.items()},
            "pairs": _pairs(results[name]),
        }
        for name in ("supcon", "nt_xent", "nt_xent_pairwise", "nt_bxent")
        if name in results
    }


def _view(case: Case) -> dict[str, Any]:
    """The matrices of a worked example, and the value and the terms of each loss on them."""
    terms = call_reference(case).terms
    logits = np.array([[float(x) for x in row] for row in terms.logits])
    np.fill_diagonal(logits, -math.inf)
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    softmax = exponentials / exponentials.sum(axis=1, keepdims=True)
    return {
        "id": case.id,
        "loss": case.loss,
        "temperature": case.temperature,
        "similarity": [[_number(x, 4) for x in row] for row in terms.similarity],
        "softmax": [[_number(x, 3) for x in row] for row in softmax],
        "embeddings": [[_number(x, 4) for x in row] for row in case.embeddings],
        "positive": [[int(j) for j in row] for row in terms.positives],
        "losses": _losses(case),
    }


def _is_test(fixture: WorkedFixture) -> bool:
    """Whether a document is a public test; public tests are listed last."""
    return fixture.document.source is not None


def _document(fixture: WorkedFixture, report: Report) -> dict[str, Any]:
    name = fixture.document.id
    cases = [case for case in worked_cases(fixture) if not case.entry.two_towers and case.n <= MOST_ROWS]
    return {
        "id": name,
        "title": fixture.document.title,
        "about": fixture.document.about,
        "views": [_view(case) for case in cases],
        "figures": [
            {
                "id": one.figure.id,
                "place": one.figure.place,
                "what": one.figure.what,
                "printed": one.figure.printed if isinstance(one.figure.printed, str) else "",
                "value": "" if one.value is None else repr(one.value),
                "verdict": one.verdict if one.passed else "failed",
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


def _matrix(checks: Sequence[Check]) -> dict[str, Any]:
    """For each implementation and loss: the number of checks by status, and whether a declared deviation is wrong."""
    mistakes = {kind.name: {one.name for one in kind.deviations if one.wrong} for kind in ALL}
    found: dict[str, Any] = {}
    for (who, loss), some in grouped(((one.implementation, one.loss), one) for one in checks).items():
        counts = counted(some)
        wrong = any(mistakes.get(who, set()).intersection(one.declared) for one in some)
        found.setdefault(who, {})[loss] = {**{str(status): counts[status] for status in Status}, "wrong": wrong}
    return found


def _accuracy(checks: Sequence[Check]) -> Iterator[dict[str, Any]]:
    """The median, the 90th percentile and the maximum of error / bound, for each implementation and dtype."""
    judged = ((one.implementation, one.dtype, one.ratio) for one in checks if one.status is Status.PASSED)
    groups = grouped(((who, dtype), ratio) for who, dtype, ratio in judged if ratio is not None)
    for (who, dtype), ratios in groups.items():
        median, ninety = np.quantile(ratios, [0.5, 0.9])
        numbers = {"median": _number(median, 3), "ninety": _number(ninety, 3), "worst": _number(max(ratios), 3)}
        yield {"implementation": who, "dtype": dtype, "checks": len(ratios), **numbers}


def _cases(checks: Sequence[Check]) -> Iterator[dict[str, Any]]:
    """Every case with its status for each implementation that does not skip it."""
    golden = {case.id: case for case in load_cases(())}
    for name, some in grouped((one.case, one) for one in checks).items():
        statuses = {
            who: str(min((one.status for one in same), key=ORDER.index))
            for who, same in grouped((one.implementation, one) for one in some).items()
        }
        case = golden.get(name)
        yield {
            "id": name,
            "loss": some[0].loss,
            "flags": list(some[0].flags),
            "sizes": case.sizes() if case else "",
            "statuses": {who: status for who, status in statuses.items() if status != Status.SKIPPED},
        }


def _failures(checks: Sequence[Check], diagnoses: Mapping[tuple[str, str], str]) -> Iterator[dict[str, Any]]:
    """The failing cases: the first difference, the command that repeats it, and the expected value of each anchor."""
    golden = {case.id: case for case in load_cases(())}
    bad = grouped(((one.implementation, one.case), one) for one in checks if one.status in BAD)
    for (who, name), (first, *others) in list(bad.items())[:SHOWN]:
        case = golden.get(name)
        small = case is not None and case.size <= MOST_ROWS
        result = call_reference(case) if case is not None and small else None
        yield {
            "implementation": who,
            "case": name,
            "loss": first.loss,
            "dtypes": [one.dtype for one in (first, *others)],
            "message": first.message,
            "diagnosis": diagnoses.get((name, first.dtype), ""),
            "repeat": first.repeat,
            "found": "" if first.value is None else _number(first.value),
            "anchors": {str(i): _number(value) for i, value in result.terms.anchor_losses.items()} if result else {},
            "pairs": _pairs(result) if result else {},
        }


def _public() -> Iterator[dict[str, Any]]:
    """The public losses that are not installed: what each computes, and what ``check`` reports for it."""
    for loss in load_public():
        verdict = f"conforms at {loss.level}" if loss.level else "does not conform"
        about = {"who": loss.repository, "at": loss.commit[:12], "link": loss.link, "computes": loss.computes}
        yield {**about, "loss": loss.loss, "verdict": verdict, "says": list(loss.says)}


def _deviations(checks: Sequence[Check]) -> Iterator[dict[str, Any]]:
    """The declared deviations that occurred, with the first case that shows each."""
    reasons = {(kind.name, one.name): one for kind in ALL for one in kind.deviations}
    declared = (((one.implementation, name), one) for one in checks for name in one.declared)
    for (who, name), some in grouped(declared).items():
        one = reasons.get((who, name))
        if one is not None:
            place = {"case": some[0].case, "checks": len(some)}
            yield {"who": who, "reason": one.reason, "link": one.link, "wrong": one.wrong, **place}


def data_of(found: Report | CheckResult) -> dict[str, Any]:
    """Return the data of the page.

    Args:
        found: the results of ``verify`` or of ``check``.

    Returns:
        A JSON object.
    """
    report = found.report if isinstance(found, CheckResult) else found
    checks = [one for one in report.checks if one.kind == "case"]
    data: dict[str, Any] = {
        "format": FORMAT,
        "title": "pairproof",
        "header": {name: value for name, value in report.header().items() if name not in ("copy", "fixtures")},
        "versions": dict(report.versions),
        "absent": dict(report.absent),
        "counts": {str(status): counted(report.checks)[status] for status in Status},
        "problems": list(report.problems),
        "losses": [name for name in LOSSES if any(one.loss == name for one in checks)],
        "matrix": _matrix(checks),
        "accuracy": list(_accuracy(checks)),
        "cases": list(_cases(checks)),
        "flags": {name: flag.hunts for name, flag in load_flags().items()},
    }
    if isinstance(found, CheckResult):
        levels = {
            str(level): {str(status): n for status, n in counts.items()} for level, counts in found.levels.items()
        }
        data |= {
            "title": f"{found.request.name} as {found.request.loss}",
            "good": found.verdict == CONFORMS,
            "verdict": found.summary,
            "levels": levels,
            "diagnosis": list(found.diagnosis.sentences()),
            "failures": list(_failures(found.failures, found.diagnoses)),
            "documents": [],
            "deviations": [],
            "public": [],
        }
    else:
        data |= {
            "good": report.passed,
            "verdict": "everything holds" if report.passed else "not everything holds",
            "levels": {},
            "diagnosis": [],
            "failures": list(_failures(checks, {})),
            "documents": [_document(one, report) for one in sorted(report.fixtures, key=_is_test)],
            "deviations": list(_deviations(checks)),
            "public": list(_public()),
        }
    return data


def page_of(data: Mapping[str, Any]) -> str:
    """Return the page.

    Args:
        data: the result of ``data_of``.

    Returns:
        The text of the HTML page.

    Raises:
        CouldNotRun: jinja2 is not installed.
    """
    if find_spec("jinja2") is None:
        raise CouldNotRun('jinja2 is not installed: pip install "pairproof[verify]"')
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    loader = PackageLoader("pairproof.conformance", "templates")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    embedded = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    plot = BENCH.read_text(encoding="utf-8") if BENCH.is_file() and data["documents"] else ""
    plot = plot[plot.find("<svg") :]
    return environment.get_template("page.html").render(data, embedded=Markup(embedded), plot=Markup(plot))


def write_page(found: Report | CheckResult, path: Path) -> None:
    """Write the results as one HTML page.

    Args:
        found: the results of ``verify`` or of ``check``.
        path: the file that is written.

    Raises:
        CouldNotRun: jinja2 is not installed.
        ValueError: the page is larger than ``LARGEST``.
    """
    page = page_of(data_of(found)).encode()
    if len(page) > LARGEST:
        raise ValueError(f"the page has {len(page)} bytes, more than {LARGEST}")
    path.write_bytes(page)
