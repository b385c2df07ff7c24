"""Repeat the audit of public losses in several processes: ``python tools/audit_ranks.py FOLDER``.

FOLDER contains the repositories as OWNER+NAME. Without FOLDER, no loss is run, and the table in ``docs/distributed.md``
is written from the recorded results.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from peer_table import row

from pairproof.conformance.implementations.base import Unavailable
from pairproof.conformance.implementations.public import WORLD_SIZES, PublicRanks, load_ranks
from pairproof.conformance.judge.options import CouldNotRun
from pairproof.conformance.judge.public import judge_ranks

PAGE = Path(__file__).resolve().parent.parent / "docs" / "distributed.md"

HEAD = ("repository", "loss", "agrees at W", "mistake", "gradient at W = 2, 3")


def cells(one: PublicRanks) -> tuple[str, ...]:
    """Return the cells of a row of the table."""
    link = f"{one.repository} [{one.commit[:8]}]({one.link})"
    sizes, mistakes = ", ".join(map(str, one.agrees)) or "none", "; ".join(one.mistakes)
    norms = ", ".join(f"{norm:.3g}" for norm in one.gradient[1:] if norm == norm)  # NaN if the loss fails
    return link, one.shown, sizes, mistakes, "" if len(one.agrees) == len(WORLD_SIZES) else norms


def table() -> str:
    """Return the lines of the table."""
    rows = [cells(one) for one in sorted(load_ranks(), key=lambda one: (one.repository.lower(), one.shown, one.name))]
    return "".join(row(*each) + "\n" for each in (HEAD, ["---"] * len(HEAD), *rows))


def page(before: str) -> str:
    """Return the text of the page with a new table."""
    return re.sub(rf"{re.escape(row(*HEAD))}\n(\|.*\n)*", lambda _: table(), before)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the results; return 1 if a verdict is not the expected one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", nargs="?")
    parser.add_argument("names", nargs="*", metavar="NAME", help="names of the files in public/ranks; all by default")
    options, wrong = parser.parse_args(arguments), False
    if options.folder is None:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8", newline="\n")
    for one in load_ranks(options.names) if options.folder else ():
        try:
            found = judge_ranks(one, options.folder)
        except (Unavailable, CouldNotRun) as error:
            print(f"{one.name}: skipped: {error}", flush=True)
            wrong |= isinstance(error, CouldNotRun)
        else:
            print(f"{one.name}:", *found.lines(), sep="\n", flush=True)
            wrong |= bool(found.problems)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
