"""Report what ``make fixtures`` would change, without running the implementations again.

The counts of checks come from a report of ``pairproof verify --thorough --json``. All else is recomputed in a copy.

Exit code: 0 nothing would change; 1 something would change; 2 the report cannot be used.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from run_report import read_report

from pairproof.conformance.judge.options import UsageError
from pairproof.conformance.maintain.rebuild import rebuild, shortened


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the fixtures with a rebuild; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="file written by pairproof verify --thorough --json")
    options = parser.parse_args(arguments)
    try:
        report = read_report(options.report)
    except UsageError as error:
        parser.error(str(error))
    found = rebuild({}, keep=False, judge=lambda selection, progress: report)
    print("\n".join([*shortened(found.changes), *shortened(found.notes)]))
    changes = len(found.changes)
    print(f"fixtures: make fixtures would {f'make {changes} changes' if changes else 'change nothing'}")
    return int(bool(changes))


if __name__ == "__main__":
    sys.exit(main())
