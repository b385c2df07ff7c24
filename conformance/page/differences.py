"""Tables that compare the values, anchors, pairs and gradients of a failing case with the expected ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..diagnose.explain import Diagnosis
from ..diagnose.terms import Computed, computed_terms
from ..judge.check import CheckResult, Failing
from ..judge.results import BAD, Check, grouped
from ..judge.verify import Report, load_cases, truth_of
from ..suite.cases import call_reference
from ..suite.levels import Level
from ..suite.records import Matrix, Outcome
from .examples import MOST_ROWS, exp
from .findings import judged
from .plots import number

SHOWN = 40
"""Maximum number of shown cases."""

SEARCHED = 5
"""Number of cases for which ``computed_terms`` is called. Each call evaluates hundreds of variants."""

MOST_LINES = 24
"""Maximum number of rows of a table."""

BEFORE = 4
"""An excerpt of a longer table begins this many rows before the first difference."""

MOST_COLUMNS = 8
"""Maximum number of shown columns of a gradient."""

DIFFERENT = 1e-5
"""The first row with a relative difference above this value is marked, unless the check's message names a row."""

Row = tuple[str, Sequence[Any], Sequence[Any]]
"""Name of a term, expected numbers, found numbers."""


Failures = Sequence[tuple[tuple[str, str], Sequence[Check]]]
"""For each failing case: its implementation and id, and the failing checks."""


def failing_cases(found: Report | CheckResult) -> Failures:
    """Return the failing cases.

    Those of ``check`` include failing usages (other ways to call the loss), and are sorted by level, then by size.

    Args:
        found: the results of ``verify`` or of ``check``.
    """
    if not isinstance(found, CheckResult):
        bad = [one for one in found.checks if one.kind == "case" and one.status in BAD]
        return list(grouped(((one.implementation, one.case), one) for one in bad).items())
    sizes = {name: size for name, (size, _) in found.sizes.items()}
    cases = grouped(((one.implementation, one.case), one) for one in found.failures)
    return sorted(cases.items(), key=lambda x: (x[1][0].level or Level.FORMULA, sizes.get(x[0][1], math.inf)))


def failures(found: Report | CheckResult, cases: Failures) -> list[dict[str, Any]]:
    """Return the first failing cases as data of the page.

    Args:
        found: the results of ``verify`` or of ``check``.
        cases: the result of ``failing_cases``.
    """
    shown = cases[:SHOWN]
    if isinstance(found, CheckResult):
        diagnosis, words = found.diagnosis, found.diagnoses
        evidence = {key: found.failing[key[1]] for key, _ in shown if key[1] in found.failing}
    else:
        diagnosis, words, evidence = None, {}, _evaluated(found, [same[0] for _, same in shown])
    return [
        _failure(same, evidence.get(key), diagnosis, words, search=k < SEARCHED) for k, (key, same) in enumerate(shown)
    ]


def _evaluated(report: Report, checks: Sequence[Check]) -> dict[tuple[str, str], Failing]:
    """Evaluate failing checks again, because a run keeps only the loss."""
    if not checks:
        return {}
    stored = {case.id: (case, golden) for case, golden in load_cases(report.fixtures).items()}
    implementations, found = judged(report), {}
    for one in checks:
        case, golden = stored[one.case]
        with suppress(Exception):  # external code may raise anything
            outcome = implementations[one.implementation].evaluate(case, one.dtype)
            found[one.implementation, one.case] = Failing(case, truth_of(case, golden), {one.dtype: outcome})
    return found


def _failure(
    same: Sequence[Check],
    evidence: Failing | None,
    diagnosis: Diagnosis | None,
    words: Mapping[tuple[str, str], str],
    *,
    search: bool,
) -> dict[str, Any]:
    first = same[0]
    data: dict[str, Any] = {
        "implementation": first.implementation,
        "case": first.case,
        "loss": first.loss,
        "dtypes": [one.dtype for one in same],
        "message": first.message,
        "diagnosis": words.get((first.case, first.dtype), ""),
        "repeat": first.repeat,
        "sizes": evidence.case.sizes() if evidence else "",
        "computed": "",
        "tables": [],
        "batch": None,
    }
    outcome = evidence and evidence.outcomes.get(first.dtype)
    if evidence and outcome:
        computed = None
        if search:
            reasons = diagnosis.reasons if diagnosis else ()
            with suppress(Exception):  # a failure of the explanation must not hide the failure itself
                match = diagnosis.match if diagnosis else None
                computed = computed_terms(evidence.case, first.dtype, outcome, evidence.truth, reasons, match)
        data["computed"] = computed.words if computed else ""
        data["tables"] = list(_tables(evidence, outcome, computed, first.message))
        case = evidence.case
        square = len({*case.shape}) == 1 and not case.entry.two_towers
        if search and square and case.size <= MOST_ROWS and case.option("similarity") == "cosine":
            similarity = [[number(x, 3) for x in row] for row in call_reference(case).terms.similarity]
            data["batch"] = {"similarity": similarity, "positive": [list(map(int, row)) for row in case.positives()]}
    return data


def _tables(evidence: Failing, outcome: Outcome, computed: Computed | None, message: str) -> Iterator[dict[str, Any]]:
    case, truth = evidence.case, evidence.truth
    several = len(truth.values) != 1
    rows: list[Row] = [
        (f"loss, value {k}" if several else "loss", [expected], [found])
        for k, (expected, found) in enumerate(zip(truth.values, outcome.values, strict=False))
    ]
    yield _table("The loss", "returned", ["value"], rows, message)
    found = outcome.anchors or (computed.anchors if computed else None)
    if found is not None:
        what = "returned" if outcome.anchors else "as computed"
        rows = [(f"value of anchor {i}", [x], [found.get(i)]) for i, x in truth.anchors.items()]
        yield _table("The values of the anchors", what, ["value"], rows, message)
    if case.size <= MOST_ROWS:
        terms = {key: pair for key, pair in call_reference(case).terms.pairs.items() if pair.members}
        wrong = computed.pairs if computed else {}
        keys = list(dict.fromkeys([*terms, *wrong]))
        columns = ["numerator", "denominator", "-log of the ratio"]
        nothing = [None] * len(columns)

        def expected(key: tuple[int, int]) -> Sequence[Any]:
            pair = terms.get(key)
            return [exp(pair.log_numerator), exp(pair.log_denominator), float(pair.value)] if pair else nothing

        def given(key: tuple[int, int]) -> Sequence[Any]:
            parts = wrong.get(key)
            return [exp(parts[0]), exp(parts[1]), parts[2]] if parts else nothing

        rows = [(f"anchor {i} with {j}", expected((i, j)), given((i, j))) for i, j in sorted(keys)]
        if rows:
            yield _table("The pairs", "as computed" if wrong else "", columns, rows, message)
    yield from _gradients(case.gradients(truth), case.gradients(outcome), message)


def _gradients(true: Mapping[str, Matrix], given: Mapping[str, Matrix], message: str) -> Iterator[dict[str, Any]]:
    """Yield one table for each matrix."""
    for key, expected in true.items() if given else ():
        found = given[key]
        if expected.shape != found.shape:
            continue
        of_row = "gradient of row {}" if len(true) == 1 else f"gradient of {key}, row {{}}"
        columns = [str(k) for k in range(min(expected.shape[1], MOST_COLUMNS))]
        rows: list[Row] = [
            (of_row.format(i), expected[i, :MOST_COLUMNS].tolist(), found[i, :MOST_COLUMNS].tolist())
            for i in range(len(expected))
        ]
        left = expected.shape[1] - len(columns)
        more = f"; {left} more columns are not shown" if left else ""
        yield _table(f"The gradient with respect to {key}{more}", "returned", columns, rows, message)


def _table(title: str, found: str, columns: Sequence[str], rows: Sequence[Row], message: str) -> dict[str, Any]:
    """A table with one row marked: the one that the message names, otherwise the first that differs.

    ``found`` is the heading of the found numbers; "" if there are none.
    """
    named = next((k for k, row in enumerate(rows) if message.startswith(f"{row[0]}:")), None)
    first = next((k for k, row in enumerate(rows) if _differ(row)), None) if named is None and found else named
    start = 0 if len(rows) <= MOST_LINES else max(0, min((first or 0) - BEFORE, len(rows) - MOST_LINES))
    shown = rows[start : start + MOST_LINES]
    return {
        "title": title,
        "found": found,
        "columns": list(columns),
        "rows": [
            {
                "name": name,
                "expected": [_cell(x) for x in expected],
                "found": [_cell(x) for x in given] if found else [],
                "first": first is not None and start + k == first,
            }
            for k, (name, expected, given) in enumerate(shown)
        ],
        "left_out": len(rows) - len(shown),
    }


def _cell(value: Any) -> Any:
    return value if value is None or isinstance(value, str) else number(value, 7)


def _differ(row: Row) -> bool:
    """Whether a term differs by more than rounding."""
    _, expected, found = row
    pairs = [(float(x), float(y)) for x, y in zip(expected, found, strict=True) if x is not None and y is not None]
    if len(pairs) < len(expected):
        return True
    size = max((abs(x) for x, _ in pairs if math.isfinite(x)), default=0.0)
    return any(not (x == y or (math.isnan(x) and math.isnan(y)) or abs(x - y) <= DIFFERENT * size) for x, y in pairs)
