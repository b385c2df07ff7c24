"""Write ``conformance/faults/README.md``: every fault, what is wrong with it, and how many golden cases catch it.

By default, every fault is judged again, but the last column is copied from the file. ``--named`` also computes the last
column, which takes minutes; ``--named 'nt_xent/*'`` computes it only for the faults with these names.

Exit code: 1 if ``--check`` finds that the file would change, or if ``--named`` fails for a fault; otherwise 0.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from pairproof.conformance.diagnose.explain import explain_case
from pairproof.conformance.diagnose.identify import identify
from pairproof.conformance.diagnose.suspects import SLIGHT
from pairproof.conformance.faults import FAMILIES, FAULTS, Fault
from pairproof.conformance.faults.judging import FEWEST, LARGEST, Verdict, judge, small_cases, target_of
from pairproof.conformance.implementations.sandbox import TargetError
from pairproof.conformance.suite.catalogue import LOSSES
from pairproof.conformance.truth.evaluate import stored_truth

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "conformance" / "faults" / "README.md"

FLAGS_SHOWN = 4
EXPLAINED = 12
"""Maximum number of failed cases that are explained if identify does not find the fault."""

HEADINGS = ("fault", "call", "what is wrong", "seen or discussed in", "cases", "flags of the cases", "named as")


def cells(line: str) -> list[str]:
    """Return the cells of a row. A bar within a cell is escaped by a backslash."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def line_of(row: Sequence[str]) -> str:
    """Return a row of a table."""
    return "| " + " | ".join(re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in row) + " |"


def row(fault: Fault, verdict: Verdict, named: str) -> str:
    """Return the row of a fault.

    Args:
        fault: the fault.
        verdict: the results of the cases.
        named: the last column.
    """
    caught, judged = len(verdict.caught), len(verdict.cases)
    flags = []
    for flag in verdict.ranked_flags[:FLAGS_SHOWN]:
        hits, of = verdict.flags[flag]
        flags.append(f"{flag} ({hits})" if hits == of else f"{flag} ({hits} of {of})")
    rest = len(verdict.ranked_flags) - len(flags)
    call = fault.call + "".join(f", {key}={value}" for key, value in fault.settings.items())
    shown = ", ".join(flags) + (f" and {rest} more" if rest else "")
    return line_of([f"`{fault.name}`", call, fault.words, seen_in(fault.link), f"{caught} of {judged}", shown, named])


def seen_in(link: str) -> str:
    """Return the cell of a link with a short text, such as owner/name#3 for a GitHub thread."""
    if not link:
        return "a common mistake"
    if not link.startswith("https://"):
        return f"[{Path(link).stem}](../../{link})"
    thread = re.fullmatch(r"https://github\.com/([^/]+/[^/]+)/(?:issues|pull)/(\d+)", link)
    if thread:
        return f"[{thread[1]}#{thread[2]}]({link})"
    host, *path = link.removeprefix("https://").strip("/").split("/")
    return f"[{path[1] if host == 'github.com' else host}: {path[-1]}]({link})"


def _identified(fault: Fault) -> str:
    """Return what identify finds wrong with a fault; "" if nothing."""
    try:
        # identify does not get the list of faults, because it would find each of them by its name.
        found = identify(target_of(fault), call=fault.call)
    except TargetError:
        return ""
    if found.match is None:
        return ""
    claimed = {key: str(value) for key, value in fault.settings.items()}
    words = [found.loss] if found.loss != fault.loss else []
    words += [f"{key}={value}" for key, value in found.options.items() if claimed.get(key) != value]
    words += [f"factor {found.factor:g}"] if found.factor != 1 else []
    return f"identify: {'; '.join(words + found.wrong)}" if words or found.wrong else ""


def _explained(fault: Fault, verdict: Verdict) -> str:
    """Return the explanation of a failure of a fault; "" if there is none."""
    target, slight = target_of(fault), ""
    for golden in [golden for golden in small_cases() if golden.id in verdict.caught][:EXPLAINED]:
        for dtype in filter(golden.case.holds_in, ("float64", "float32")):
            try:
                outcome = target.evaluate(golden.case, dtype)
            except Exception as error:  # a fault may raise any exception
                return f"failure: {type(error).__name__}: {error}"
            words = explain_case(golden.case, outcome, stored_truth(golden.case, golden.expected), dtype)
            if words and not words.startswith(SLIGHT):
                return f"failure: {words}"
            slight = slight or (f"failure: {words}" if words else "")
    return slight


def caught_by(row: Sequence[str]) -> int:
    """Return the number of cases that catch a fault, from the cells of its row."""
    return int(row[4].split()[0])


def as_written(text: str) -> dict[str, list[str]]:
    """Return the cells of every row in the file, by the name of the fault."""
    rows = [cells(line) for line in text.splitlines() if line.startswith("| `")]
    return {found[0].strip("`"): found for found in rows}


def table(rows: Mapping[str, str]) -> str:
    """Return the text of the file.

    Args:
        rows: the row of every fault, by its name.
    """
    linked = sum(bool(fault.link) for fault in FAULTS)
    listed = [fault for loss in LOSSES for fault in FAULTS if fault.loss == loss]
    named = sum(bool(cells(text)[-1]) for text in rows.values())
    text = f"""# Faults: what the suite must catch

This file is written by `python tools/fault_table.py`; `tests/test_faults.py` checks that it is up to date.

The table lists {len(FAULTS)} wrong implementations, {linked} of them seen or discussed in public. Each differs from a
correct loss in one detail, and the correct loss passes every case with the same adapter. A fault is judged in
float64 and float32 on the golden cases with up to {LARGEST} rows whose options it supports. A case catches the
fault if an error is clearly beyond its bound; at least {FEWEST} cases must catch each fault. A *flag* of a case names a
mistake that the case can reveal. After a flag, "2 of 5" means that 2 of the 5 judged cases with this flag catch the
fault, and "2" that all 2 do.

The last column has an entry for {named} faults: the result of `identify`, which is not given this list, or, if
`identify` finds no difference, the explanation of a failed case. No test checks that the entry describes the fault.
"""
    families = Counter(fault.family for fault in FAULTS)
    counted = Counter(fault.loss for fault in FAULTS)
    losses = {loss: counted[loss] for loss in LOSSES if loss in counted}
    for what, counts in (("family", {name: families[name] for name in FAMILIES}), ("loss", losses)):
        summary = ([what, *counts], ["---"] * (len(counts) + 1), ["faults", *map(str, counts.values())])
        text += "\n" + "\n".join(map(line_of, summary)) + "\n"
    for loss in losses:
        lines = [rows[fault.name] for fault in listed if fault.loss == loss]
        text += "\n".join(["", f"## {loss}", "", line_of(HEADINGS), line_of(["---"] * len(HEADINGS)), *lines, ""])
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table, or check it; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the file would change")
    parser.add_argument("--loss", choices=[*LOSSES], help="judge only the faults of this loss; keep the other rows")
    parser.add_argument("--named", nargs="*", metavar="PATTERN", help="compute the last column of these faults")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    before = TABLE.read_text(encoding="utf-8") if TABLE.is_file() else ""
    written = as_written(before)
    chosen = [fault for fault in FAULTS if options.loss in (None, fault.loss)]
    verdicts: dict[str, Verdict] = {}
    for loss in {fault.loss for fault in chosen}:
        verdicts |= {v.name: v for v in judge(loss, [fault for fault in chosen if fault.loss == loss])[0]}
    named = {name: found[-1].replace(r"\|", "|") for name, found in written.items()}
    broken, patterns = 0, ["*"] if options.named == [] else options.named or []
    for fault in [fault for fault in chosen if any(fnmatchcase(fault.name, pattern) for pattern in patterns)]:
        try:
            named[fault.name] = _identified(fault) or _explained(fault, verdicts[fault.name])
        except Exception as error:  # continue with the others; the exit code reports it
            named[fault.name], broken = "", 1
            print(f"{fault.name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        print(f"{fault.name}: {named[fault.name] or 'not named'}", flush=True)
    rows = {fault.name: line_of(written[fault.name]) for fault in FAULTS if fault.name not in verdicts}
    rows |= {fault.name: row(fault, verdicts[fault.name], named.get(fault.name, "")) for fault in chosen}
    text, name = table(rows), TABLE.relative_to(ROOT)
    if text != before and not options.check:
        TABLE.write_text(text, encoding="utf-8", newline="\n")
    changed = f"{name} would change; run python tools/fault_table.py" if options.check else f"{name} written"
    print("unchanged" if text == before else changed)
    return 1 if text != before and options.check else broken


if __name__ == "__main__":
    sys.exit(main())
