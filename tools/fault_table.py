"""Write ``conformance/faults/README.md``: every fault, what is wrong with it, and which golden cases catch it.

As it is called, every fault is judged anew and the last column stays as it is; ``--named`` also asks identify,
and the text of failures, what is wrong, which takes minutes (``--named 'nt_xent/*'`` asks of some); ``--check`` writes
nothing, and exits 1 if the file would change.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from unittest.mock import patch

import torch

from pairproof.conformance.diagnose import hypotheses, identify
from pairproof.conformance.diagnose.explain_failure import SLIGHT
from pairproof.conformance.faults import FAMILIES, FAULTS, Fault
from pairproof.conformance.faults.judging import LARGEST, Verdict, judge, small_cases, target_of
from pairproof.conformance.implementations.sandbox import TargetError
from pairproof.conformance.suite.catalogue import LOSSES
from pairproof.conformance.truth.evaluate import stored_truth

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "conformance" / "faults" / "README.md"

FLAGS_SHOWN = 4
ASKED = 12
"""How many of the cases that catch a fault are asked what is wrong, where identify does not say."""

HEADINGS = ("fault", "call", "what is wrong", "seen or discussed in", "cases", "flags of the cases", "named as")


def cells(line: str) -> list[str]:
    """The cells of a row of a table; a bar within a cell stands behind a backslash."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def row(fault: Fault, verdict: Verdict, named: str) -> str:
    """The row of a fault.

    Args:
        fault: the fault.
        verdict: what the cases say of it.
        named: what identify, or the text of a failure, says of it.
    """
    found = [
        f"`{fault.name}`",
        fault.call + "".join(f", {key}={value}" for key, value in fault.settings.items()),
        fault.words,
        seen_in(fault.link),
        how_many(verdict),
        which(verdict),
        named,
    ]
    return "| " + " | ".join(re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in found) + " |"


def how_many(verdict: Verdict) -> str:
    """How many cases catch a fault, of those that its claim covers."""
    caught, judged = len(verdict.caught), len(verdict.cases)
    return f"**one** of {judged}" if caught == 1 else f"{caught} of {judged}"


def which(verdict: Verdict) -> str:
    """The flags whose cases catch it most often; all of those cases, or some."""
    shown = []
    for flag in verdict.telling[:FLAGS_SHOWN]:
        hits, judged = verdict.flags[flag]
        shown.append(f"{flag} ({hits})" if hits == judged else f"{flag} ({hits} of {judged})")
    rest = len(verdict.telling) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def seen_in(link: str) -> str:
    """A link in a table: a thread by its repository and number, a page by its name."""
    if not link:
        return "a classic slip"
    if not link.startswith("https://"):
        return f"[{Path(link).stem}](../../{link})"
    thread = re.fullmatch(r"https://github\.com/([^/]+/[^/]+)/(?:issues|pull)/(\d+)", link)
    if thread:
        return f"[{thread[1]}#{thread[2]}]({link})"
    host, *path = link.removeprefix("https://").strip("/").split("/")
    repository = path[1] if host == "github.com" else host
    return f"[{repository}: {path[-1]}]({link})"


def in_words(fault: Fault, verdict: Verdict) -> str:
    """What identify says is wrong with a fault, or else the text of a failure; "" where neither says anything."""
    return _identified(fault) or _diagnosed(fault, verdict)


def _identified(fault: Fault) -> str:
    # The known faults are kept from it: otherwise each would be named after itself.
    with patch.object(identify, "known_faults", tuple):
        try:
            found = identify.identify(target_of(fault), call=fault.call)
        except TargetError:
            return ""
    if found.match is None:
        return ""
    claimed = {key: str(value) for key, value in fault.settings.items()}
    said = [found.loss] if found.loss != fault.loss else []
    said += [f"{key}={value}" for key, value in found.options.items() if claimed.get(key) != value]
    said += [f"factor {found.factor:g}"] if found.factor != 1 else []
    said += found.wrong
    return f"identify: {'; '.join(said)}" if said else ""


def _diagnosed(fault: Fault, verdict: Verdict) -> str:
    target = target_of(fault)
    caught = [golden for golden in small_cases() if golden.id in verdict.caught]
    slight = ""
    for golden in caught[:ASKED]:
        for dtype in ("float64", "float32"):
            if not golden.case.holds_in(dtype):
                continue
            try:
                outcome = target.evaluate(golden.case, dtype)
            except Exception as error:  # a fault may break
                return f"failure: {type(error).__name__}: {error}"
            words = hypotheses.diagnose(golden.case, outcome, stored_truth(golden.case, golden.expected))
            if words and not words.startswith(SLIGHT):
                return f"failure: {words}"
            slight = slight or (f"failure: {words}" if words else "")
    return slight


def as_written(text: str) -> dict[str, list[str]]:
    """The cells of every fault's row in the file, by its name."""
    rows = [cells(line) for line in text.splitlines() if line.startswith("| `")]
    return {found[0].strip("`"): found for found in rows}


def table(verdicts: Mapping[str, Verdict], named: Mapping[str, str]) -> str:
    """The whole file.

    Args:
        verdicts: of every fault, by its name.
        named: what every fault is named as.
    """
    lines = [
        "# Faults: what the suite must catch",
        "",
        *_introduction(verdicts, named),
        "",
        *_counts("family", [family.name for family in FAMILIES], Counter(fault.family for fault in FAULTS)),
        "",
        *_counts("loss", LOSSES, Counter(fault.loss for fault in FAULTS)),
    ]
    for loss in LOSSES:
        lines += ["", f"## {loss}", "", _line(HEADINGS), _line(["---"] * len(HEADINGS))]
        lines += [row(fault, verdicts[fault.name], named.get(fault.name, "")) for fault in FAULTS if fault.loss == loss]
    return "\n".join(lines) + "\n"


def _introduction(verdicts: Mapping[str, Verdict], named: Mapping[str, str]) -> list[str]:
    linked = sum(bool(fault.link) for fault in FAULTS)
    once = [fault.name for fault in FAULTS if len(verdicts[fault.name].caught) == 1]
    single = ", ".join(f"`{name}`" for name in once) if once else "none"
    said = sum(bool(named.get(fault.name)) for fault in FAULTS)
    return [
        "Written by `python tools/fault_table.py`; `tests/test_faults.py` holds it to what the tool would write.",
        "",
        f"{len(FAULTS)} wrong implementations, {linked} of them seen or discussed in public. Each differs from a right",
        "loss in one thing, and the right loss passes every case under the same adapter. The golden cases of up to",
        f"{LARGEST} rows that a fault's claim covers were run in float64 and float32; a case counts where an error is",
        "clearly beyond its bound. Behind a flag stands how many of its cases caught the fault, and of how many, where",
        "not of all that were judged.",
        "",
        f"Caught by one case only, which hints at a case that is missing: {single}.",
        "",
        f"Of {said} the last column tells what `identify` said, without recourse to this list, or else the text of a",
        "failure; whether that names what is wrong is for the reader to judge.",
    ]


def _counts(what: str, names: Iterable[str], counts: Mapping[str, int]) -> list[str]:
    chosen = list(names)
    numbers = [str(counts[name]) for name in chosen]
    return [_line([what, *chosen]), _line(["---"] * (len(chosen) + 1)), _line(["faults", *numbers])]


def _line(found: Sequence[str]) -> str:
    return "| " + " | ".join(found) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table, or check it; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the file would change")
    parser.add_argument(
        "--named", nargs="*", metavar="PATTERN", help="ask anew what is wrong with faults of these names"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    verdicts: dict[str, Verdict] = {}
    for loss in LOSSES:
        verdicts |= {v.name: v for v in judge(loss, [fault for fault in FAULTS if fault.loss == loss])[0]}
    before = TABLE.read_text(encoding="utf-8") if TABLE.is_file() else ""
    named = {name: found[-1].replace(r"\|", "|") for name, found in as_written(before).items()}
    broken = 0
    for fault in FAULTS if options.named is not None else ():
        if options.named and not any(fnmatchcase(fault.name, pattern) for pattern in options.named):
            continue
        try:
            named[fault.name] = in_words(fault, verdicts[fault.name])
        except Exception as error:  # the others are asked all the same, and the exit code tells
            named[fault.name], broken = "", broken + 1
            print(f"{fault.name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        print(f"{fault.name}: {named[fault.name] or 'not named'}", flush=True)
    text = table(verdicts, named)
    if text == before:
        print("unchanged")
        return 1 if broken else 0
    if options.check:
        print(f"{TABLE.relative_to(ROOT)} would change: python tools/fault_table.py")
        return 1
    TABLE.write_text(text, encoding="utf-8", newline="\n")
    print(f"{TABLE.relative_to(ROOT)} written")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
