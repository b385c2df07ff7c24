"""Write ``conformance/implementations/README.md``: what every peer computes, and where it deviates or is wrong.

No peer is run. Counts are read from ``--report``, a file of ``pairproof verify --thorough --json``. For peers that are
not in the report, counts follow from the declared deviations. The versions of peers that are not installed are
copied from the existing README.

Exit code: 1 if ``--check`` finds that the file would change; 2 if the report cannot be used; otherwise 0.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from run_report import read_report

from pairproof.conformance.documents.load import load_worked
from pairproof.conformance.implementations import ALL, Implementation, Unavailable
from pairproof.conformance.implementations.public import load_public
from pairproof.conformance.judge.options import UsageError
from pairproof.conformance.judge.results import Check
from pairproof.conformance.judge.verify import load_cases, predicted
from pairproof.conformance.suite.cases import Case
from pairproof.conformance.suite.catalogue import LOSSES

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "conformance" / "implementations" / "README.md"

OURS = ("reference", "scipy_losses", "fast")
"""The modules whose implementations belong to pairproof."""

PEERS: tuple[type[Implementation], ...] = tuple(kind for kind in ALL if kind.__module__.rpartition(".")[2] not in OURS)
INPUTS = ("labels", "positives", "ref_embeddings", "self_rows", "negatives", "anchors", "base_temperature")

HEAD = """# Peers: what each computes

`python tools/peer_table.py` writes this file; `tests/test_peers.py` compares its counts with `fixtures/expected.json`.

A *peer* is a public implementation, a *case* is a batch with its options, and a *check* is a case in one dtype. The
value and the gradient of a peer are checked on every case that it supports. A check *conforms* if its errors are within
the bounds of `conformance/truth/tolerances.py`. It *deviates* if the peer follows another convention, and is *wrong* if
no convention explains the difference. Every difference is declared in the adapter, with the condition under which it
occurs. A declared difference that does not occur is a failure, so the tables are correct for the versions given.
"""


def outcomes(kind: type[Implementation], checks: Sequence[Check]) -> Counter[str]:
    """Count the checks that conform, deviate and are wrong."""
    wrong = {one.name for one in kind.deviations if one.wrong}
    return Counter(
        "wrong" if wrong.intersection(one.declared) else "deviate" if one.declared else "conform" for one in checks
    )


def summary(counts: Counter[str]) -> str:
    """Describe the outcomes of one loss in a few words; "" if the loss is not judged."""
    words = [f"{counts[word]} {word}" for word in ("deviate", "wrong") if counts[word]]
    if not words:
        return f"conforms ({counts['conform']})" if counts else ""
    return ", ".join([f"{counts['conform']} conform", *words])


def options_of(loss: str, cases: Sequence[Case]) -> str:
    """Describe the options and inputs that occur in the cases of one loss."""
    parts = []
    for option, choices in LOSSES[loss].choices.items():
        values = {case.option(option) for case in cases}
        parts.append(f"{option} {', '.join(str(choice) for choice in choices if choice in values)}")
    given = {name for case in cases for name in (*case.arguments, *case.others)}
    given |= {name for case in cases for name, value in case.keywords.items() if value is not None}
    inputs = ", ".join(name for name in INPUTS if name in given)
    return "; ".join([*parts, f"with {inputs}"] if inputs else parts)


def section(kind: type[Implementation], version: str, checks: Sequence[Check], cases: Mapping[str, Case]) -> list[str]:
    """Return the lines of one peer: counts, differences, and reasons for skipped cases."""
    lines = ["", f"## {kind.name}", "", f"{kind.title} ({version}).", ""]
    lines += [row("loss", "options and inputs in the cases", "dtype", "conforms", "deviates", "wrong")]
    lines += [row(*["---"] * 6)]
    judged = list(judged_of(checks))
    for loss in LOSSES:
        ours = [one for one in judged if one.loss == loss]
        options = options_of(loss, [cases[one.case] for one in ours])
        for dtype in kind.dtypes if ours else ():
            counts = outcomes(kind, [one for one in ours if one.dtype == dtype])
            lines.append(row(loss, options, dtype, *(str(counts[word]) for word in ("conform", "deviate", "wrong"))))
    differences = []
    for one in kind.deviations:
        met = Counter((check.loss, check.dtype) for check in judged if one.name in check.declared)
        keys = [(loss, dtype) for loss in LOSSES for dtype in kind.dtypes if (loss, dtype) in met]
        numbers = ", ".join(f"{loss} {dtype} {met[loss, dtype]}" for loss, dtype in keys)
        text = f"**{one.name}** ({'wrong' if one.wrong else 'deviates'}; [source]({one.link})): {one.reason}"
        differences += [f"- {text}. {numbers}."] if met else []
    skipped = (one.message for one in checks if not one.dtype)
    refused = Counter(reason for reason in skipped if not re.fullmatch(r"does not compute \w+", reason))
    reasons = [f"- {reason}: {n}" for reason, n in sorted(refused.items(), key=lambda item: (-item[1], item[0]))]
    lines += ["", "Differences, and the number of checks:", "", *differences] if differences else []
    return lines + (["", "Not supported, and the number of cases:", "", *reasons] if reasons else [])


PUBLIC = """
## Public losses

These losses are recorded, not installed. `public/` names the repository, commit, file and checksum of each, and
contains its answers to some golden cases, but none of its code. `pairproof verify --public` judges the answers; if
`PAIRPROOF_PUBLIC` names a folder with the repositories, it checks the code itself. The level is the highest one at
which the loss conforms ([levels](../../docs/judging.md#levels)), or "none".
"""


def public_section() -> list[str]:
    """Return the lines about the public losses."""
    lines = [
        PUBLIC,
        row("public loss", "repository", "license", "computes", "checked as", "level", "what check reports"),
    ]
    lines.append(row(*["---"] * 7))
    for one in load_public():
        options = ", ".join(f"{name}={value}" for name, value in one.options.get("settings", {}).items())
        checked = f"{one.loss}, {options}" if options else one.loss
        link = f"[{one.repository}]({one.link}) {one.commit[:12]}"
        cells = one.name, link, one.license, one.computes, checked, one.level or "none", "; ".join(one.says)
        lines.append(row(*(cell.replace("|", "\\|") for cell in cells)))
    return lines


def judged_of(checks: Sequence[Check]) -> Iterator[Check]:
    """Return the checks that are not skipped."""
    return (one for one in checks if one.dtype and one.status != "skipped")


def version_of(kind: type[Implementation], before: str) -> str:
    """Return the version of a peer: the installed one, the one in the file, or "not installed"."""
    try:
        return re.sub(r"\+\w+", "", kind({}, "cpu").version())  # drop the local version of torch, such as +cpu
    except Unavailable:
        found = re.search(rf"^{re.escape(kind.title)} \((.*)\)\.$", before, re.MULTILINE)
        return found[1] if found else "not installed"


def row(*cells: str) -> str:
    """Return a row of a table."""
    return "| " + " | ".join(cells) + " |"


def page(before: str, found: Sequence[Check] = ()) -> str:
    """Return the new text of the file, from its old text and the checks of a run."""
    stored = load_cases(load_worked())
    run = {one.implementation for one in found}
    checks = [*found, *predicted([kind for kind in PEERS if kind.name not in run], stored)]
    cases = {case.id: case for case in stored}
    lines, sections = [HEAD, row("peer", *LOSSES), row(*["---"] * (1 + len(LOSSES)))], []
    for kind in PEERS:
        ours = [one for one in checks if one.implementation == kind.name]
        counts = [outcomes(kind, [one for one in judged_of(ours) if one.loss == loss]) for loss in LOSSES]
        lines.append(row(f"[{kind.name}](#{kind.name})", *map(summary, counts)))
        sections += section(kind, version_of(kind, before), ours, cases)
    return "\n".join([*lines, *sections, *public_section()]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file, or check it; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the file would change")
    parser.add_argument("--report", type=Path, help="take the counts from this file of verify --thorough --json")
    options = parser.parse_args(arguments)
    try:
        found = read_report(options.report).checks if options.report else []
    except UsageError as error:
        parser.error(str(error))
    before = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
    text = page(before, found)
    if text != before and not options.check:
        PAGE.write_text(text, encoding="utf-8", newline="\n")
    name = PAGE.relative_to(ROOT)
    print("unchanged" if text == before else f"{name} {'would change' if options.check else 'written'}")
    return int(text != before and options.check)


if __name__ == "__main__":
    sys.exit(main())
