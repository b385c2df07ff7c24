"""Check every wrong implementation: ``python -m tests.wrong [PATTERN ...]`` prints those that conform, by regime.

A wrong implementation conforms if the verdict of ``pairproof check`` at the level at which it must fail is "conforms".
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from . import BEFORE, REGIMES, WRONG
from .judging import FIRST_FILE, Finding, judged

PAGE, MISSED_FILE = (Path(__file__).with_name(name) for name in ("README.md", "missed.txt"))

HEAD = """# Wrong in one regime only

`python -m tests.wrong --write` writes this file; `tests/test_wrong.py` compares it with the lists.

Each implementation in this folder is wrong in one regime, such as batches of more than 17 rows, and right everywhere
else. `pairproof check` must find all of them. *Before* is the number that conformed when they were written;
`before.txt` lists them. *Now* is the number that conform without an argument; `missed.txt` lists them. A name stays in
`missed.txt` until a run of the command above finds it.
"""


def page(conforming: Collection[str]) -> str:
    """Return the text of the file, given the names that conform now."""
    rows = [("regime", "wrong", "before", "now", "with an argument"), ("---",) * 5]
    for regime in (*REGIMES, ""):
        some = [one for one in WRONG if not regime or one.regime == regime]
        missed = sum(one.name in conforming and not one.argument for one in some)
        numbers = len(some), sum(one.name in BEFORE for one in some), missed, sum(bool(one.argument) for one in some)
        rows.append((regime or "all", *map(str, numbers)))
    lines = [f"| {' | '.join(row)} |" for row in rows]
    argued = [f"- `{one.name}`: {one.words} {one.argument}" for one in WRONG if one.argument]
    missing = [f"- `{one.name}`: {one.words}" for one in WRONG if one.name in conforming and not one.argument]
    for title, entries in (("Not found yet:", missing), ("With an argument why it may conform:", argued)):
        lines += ["", title, "", *entries] if entries else []
    return "\n".join([HEAD, *lines]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the selected wrong implementations; return 1 if one of them conforms without an argument."""
    parser = argparse.ArgumentParser(prog="python -m tests.wrong", description=__doc__)
    parser.add_argument("patterns", nargs="*", default=["*"], help="names, such as 'sizes/*'")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--json", type=Path, help="add the results to this file, and reuse the results in it")
    parser.add_argument(
        "--write", action="store_true", help="write README.md, missed.txt and first.json, if all are checked"
    )
    options = parser.parse_args(arguments)
    before = json.loads(options.json.read_text()) if options.json and options.json.is_file() else {}
    found = {name: Finding(**facts) for name, facts in before.items()}
    end = time.monotonic() + options.seconds
    chosen = [one for one in WRONG if any(fnmatchcase(one.name, pattern) for pattern in options.patterns)]
    for one in chosen:
        if one.name in found or time.monotonic() > end:
            continue
        finding = found[one.name] = judged(one)
        sys.stdout.write(f"{one.name}: {f'fails at {finding.first}' if finding.first else 'CONFORMS'}\n")
        sys.stdout.flush()
        if options.json:
            options.json.write_text(json.dumps({name: vars(each) for name, each in found.items()}, indent=1))
    known = [found[one.name] for one in chosen if one.name in found]
    conforming = [one.name for one in known if not one.first]
    sys.stdout.write(f"{len(known)} of {len(chosen)} checked, {len(conforming)} conform\n")
    if options.write and len(known) == len(WRONG):
        missed = [one.name for one in WRONG if one.name in conforming and not one.argument]
        MISSED_FILE.write_text("".join(f"{name}\n" for name in missed), encoding="utf-8")
        first = {one.name: one.first for one in known if one.first}
        FIRST_FILE.write_text(json.dumps(first, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(conforming), encoding="utf-8")
    return int(any(not one.first and not one.argued for one in known))


if __name__ == "__main__":
    sys.exit(main())
