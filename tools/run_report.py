"""Read a report of ``pairproof verify --thorough --json``, to use its results without a second run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pairproof
from pairproof.conformance.documents.load import INFINITE, load_worked
from pairproof.conformance.implementations import ALL
from pairproof.conformance.judge.options import Selection, UsageError
from pairproof.conformance.judge.results import Check, Status
from pairproof.conformance.judge.verify import Report, load_cases
from pairproof.conformance.report import FORMAT
from pairproof.conformance.suite.store import MANIFEST, data_files, fixtures_root

DEVIATIONS = {kind.name: kind.deviations for kind in ALL}


class Recorded(Report):
    """A complete run, read from a report; its figures are not recomputed."""

    def entries(self) -> dict[str, int]:
        """Return by kind how many numbers the documents print. A complete run judges all of them."""
        figures = [figure for fixture in load_worked() for figure in fixture.figures]
        counts = Counter("infinite" if entry in INFINITE else one.kind for one in figures for _, entry in one.entries())
        return dict(sorted(counts.items()))


def read_report(path: Path) -> Recorded:
    """Read a report and check that it belongs to the installed fixtures.

    Raises:
        UsageError: the file cannot be read, the run was not complete or did not pass, or a file was changed after it.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: expected JSON written by pairproof verify --thorough --json, got {error}") from None
    data = data if isinstance(data, dict) else {}
    root = fixtures_root()
    header = {"pairproof": pairproof.__version__, "fixtures": str(root), "device": "cpu"}
    files = [root / name for name in (*data_files(root), MANIFEST)]
    files += [one for name in ("conformance", "fast", "reference") for one in (root.parent / name).rglob("*.py")]
    for met, words in (
        (data.get("format") == FORMAT, f"the format is not {FORMAT}"),
        (data.get("passed") is True, "the run did not pass"),
        (header.items() <= data.get("header", {}).items(), f"the header does not contain {header}"),
        (max(one.stat().st_mtime for one in files) <= path.stat().st_mtime, "a file was changed after the run"),
    ):
        if not met:
            raise UsageError(f"{path}: {words}; write it with: pairproof verify --thorough --json {path}")
    report = Recorded(Selection(), [_check(entry) for entry in data["checks"]], absent=data["absent"])
    found = {check.case for check in report.checks if check.kind == "case"}
    if found != {case.id for case in load_cases(load_worked())}:
        raise UsageError(
            f"{path}: the run does not cover all cases; write it with: pairproof verify --thorough --json {path}"
        )
    return report


def _check(entry: Mapping[str, Any]) -> Check:
    """Return a check of the report, with the deviations that its message names."""
    _, _, reasons = entry["message"].partition(". Declared: ")
    declared = [
        one.name for one in DEVIATIONS.get(entry["implementation"], ()) if f"{one.reason} ({one.link})" in reasons
    ]
    changed = {"status": Status(entry["status"]), "flags": tuple(entry["flags"]), "declared": tuple(declared)}
    return Check(**{**entry, **changed})
