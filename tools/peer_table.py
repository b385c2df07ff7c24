"""Write ``conformance/implementations/README.md``: what every peer computes, and where it deviates or is wrong.

The counts follow from what the peers declare, which ``pairproof verify`` holds them to: no peer is run. The version of
a peer that is not installed stays as the file has it. ``--check`` writes nothing, and exits 1 if the file would change.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pairproof.conformance.documents.load import load_worked
from pairproof.conformance.implementations import ALL, Deviation, Implementation, Unavailable
from pairproof.conformance.judge.results import Check, Status
from pairproof.conformance.judge.verify import load_cases, predicted
from pairproof.conformance.suite.cases import Case
from pairproof.conformance.suite.catalogue import LOSSES

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "conformance" / "implementations" / "README.md"

OURS = ("reference", "scipy_losses", "fast")
"""The modules whose implementations are no peers."""

PEERS: tuple[type[Implementation], ...] = tuple(kind for kind in ALL if kind.__module__.rpartition(".")[2] not in OURS)

HEADINGS = ("loss", "options and inputs it was judged with", "dtype", "conforms", "deviates", "wrong")


def met(kind: type[Implementation], check: Check) -> list[Deviation]:
    """The declared deviations that a check names."""
    return [deviation for deviation in kind.deviations if deviation.name in check.declared]


def is_wrong(kind: type[Implementation], check: Check) -> bool:
    """Whether what a check finds is declared as a mistake."""
    return any(deviation.wrong for deviation in met(kind, check))


def verdict(kind: type[Implementation], checks: Sequence[Check]) -> str:
    """In a few words how the checks of one loss, or of some of them, ended."""
    wrong = sum(is_wrong(kind, check) for check in checks)
    conform = sum(check.status is Status.PASSED for check in checks)
    deviates = len(checks) - wrong - conform
    said = [f"{number} {word}" for number, word in ((deviates, "deviate"), (wrong, "wrong")) if number]
    return ", ".join([f"{conform} conform", *said] if said else [f"conforms ({conform})"])


def options_of(cases: Sequence[Case]) -> str:
    """Which values of every option, and which inputs, there are among cases of one loss."""
    loss = LOSSES[cases[0].loss]
    said = []
    for option, choices in loss.choices.items():
        seen = [value for value in choices if any(case.option(option) == value for case in cases)]
        said.append(f"{option} {', '.join(seen)}")
    inputs = [
        name
        for name in (
            "labels",
            "positives",
            "ref_embeddings",
            "self_rows",
            "negatives",
            "anchors",
            "base_temperature",
        )
        if any(name in case.arguments or name in case.others or case.keywords.get(name) is not None for case in cases)
    ]
    return "; ".join([*said, *([f"with {', '.join(inputs)}"] if inputs else [])])


def section(kind: type[Implementation], version: str, checks: Sequence[Check], cases: Mapping[str, Case]) -> list[str]:
    """The lines of one peer."""
    version = re.sub(r"\+\w+", "", version)  # how torch was built is this machine's affair
    lines = ["", f"## {kind.name}", "", f"{kind.title} ({version}).", "", _line(HEADINGS), _line(["---"] * 6)]
    judged = [check for check in checks if check.dtype and check.status is not Status.SKIPPED]
    for loss in LOSSES:
        ours = [check for check in judged if check.loss == loss]
        if not ours:
            continue
        asked = [cases[name] for name in dict.fromkeys(check.case for check in ours)]
        for dtype in kind.dtypes:
            found = [check for check in ours if check.dtype == dtype]
            passed = sum(check.status is Status.PASSED for check in found)
            wrong = sum(is_wrong(kind, check) for check in found)
            cells = [str(passed), str(len(found) - passed - wrong), str(wrong)]
            lines.append(_line([loss, options_of(asked), dtype, *cells]))
    shown = [deviation for deviation in kind.deviations if any(deviation in met(kind, check) for check in judged)]
    if shown:
        lines += ["", "What differs, and on how many checks:", ""]
        lines += [_deviation(kind, deviation, judged) for deviation in shown]
    refused = Counter(check.message for check in checks if not check.dtype)
    reasons = {reason: n for reason, n in refused.items() if not re.fullmatch(r"has no \w+", reason)}
    if reasons:
        lines += ["", "Outside its domain, and how many cases:", ""]
        lines += [f"- {reason}: {n}" for reason, n in sorted(reasons.items(), key=lambda item: (-item[1], item[0]))]
    return lines


def _deviation(kind: type[Implementation], deviation: Deviation, judged: Sequence[Check]) -> str:
    found = [check for check in judged if deviation in met(kind, check)]
    counts = Counter((check.loss, check.dtype) for check in found)
    keys = [(loss, dtype) for loss in LOSSES for dtype in kind.dtypes]
    numbers = ", ".join(f"{' '.join(key)} {counts[key]}" for key in keys if key in counts)
    word = "wrong" if deviation.wrong else "deviates"
    return f"- **{deviation.name}** ({word}; [source]({deviation.link})): {deviation.reason}. {numbers}."


def version_of(kind: type[Implementation], before: str) -> str:
    """The version of a peer, or what the file says of one that is not installed."""
    try:
        return kind({}, "cpu").version()
    except Unavailable:
        found = re.search(rf"^{re.escape(kind.title)} \((.*)\)\.$", before, re.MULTILINE)
        return found[1] if found else "not installed"


def page(checks: Sequence[Check], versions: Mapping[str, str], cases: Mapping[str, Case]) -> str:
    """The whole file."""
    by_name = {kind.name: [check for check in checks if check.implementation == kind.name] for kind in PEERS}
    lines = [
        "# Peers: what each computes",
        "",
        "Written by `python tools/peer_table.py`; `tests/test_peers.py` holds its counts to `fixtures/expected.json`.",
        "",
        "Every peer is judged on every case that it computes, value and gradient. *Conforms* is within the bounds",
        "of `truth/tolerances.py`. *Deviates* is another convention, declared beforehand with its condition;",
        "*wrong* is declared likewise, and no convention explains it. A declared difference that does not show is a",
        "failure, so these hold for the versions named. A case is a batch with its options; a check is a case in one",
        "dtype. Cases outside the domain of a peer are skipped: each reason is listed with its number of cases.",
        "",
        _line(["peer", *LOSSES]),
        _line(["---"] * (1 + len(LOSSES))),
    ]
    for kind in PEERS:
        cells = []
        for loss in LOSSES:
            found = [c for c in by_name[kind.name] if c.loss == loss and c.dtype and c.status is not Status.SKIPPED]
            cells.append(verdict(kind, found) if found else "")
        lines.append(_line([f"[{kind.name}](#{kind.name})", *cells]))
    for kind in PEERS:
        lines += section(kind, versions[kind.name], by_name[kind.name], cases)
    return "\n".join(lines) + "\n"


def _line(found: Iterable[str]) -> str:
    return "| " + " | ".join(found) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or check it; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the file would change")
    options = parser.parse_args(arguments)
    before = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
    stored = load_cases(load_worked())
    versions = {kind.name: version_of(kind, before) for kind in PEERS}
    text = page(predicted(PEERS, stored), versions, {case.id: case for case in stored})
    if text == before:
        print("unchanged")
        return 0
    if options.check:
        print(f"{PAGE.relative_to(ROOT)} would change: python tools/peer_table.py")
        return 1
    PAGE.write_text(text, encoding="utf-8", newline="\n")
    print(f"{PAGE.relative_to(ROOT)} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
