"""Check public losses from their repositories, and record their answers: ``python tools/record_public.py FOLDER``.

FOLDER contains the repositories as OWNER+NAME, and packages of PyPI in the subfolder ``pypi``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pairproof.conformance.implementations.base import Unavailable
from pairproof.conformance.implementations.public import load_public
from pairproof.conformance.judge.public import record


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the results; return 1 if a level or a line of a report is not the expected one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("names", nargs="*", metavar="NAME", help="names of public losses; all by default")
    options, wrong = parser.parse_args(arguments), False
    for public in load_public(options.names):
        try:
            found = record(public, options.folder)
        except Unavailable as error:
            print(f"{public.name}: skipped: {error}", flush=True)
        else:
            print(*found.lines(), sep="\n", flush=True)
            wrong |= bool(found.problems)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
