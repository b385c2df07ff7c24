"""Check that a tag is the version of the package, and that the changelog has a section on it."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def notes_of(tag: str, root: Path) -> str:
    """Return the changelog's section on the version of a tag.

    Args:
        tag: such as v0.1.0.
        root: the repository.

    Raises:
        ValueError: the tag is not the version, or the changelog has no text on it.
    """
    version = re.findall(r'^__version__ = "(.*)"$', (root / "src/pairproof/__init__.py").read_text(), re.MULTILINE)[0]
    if tag != f"v{version}":
        raise ValueError(f"the tag is {tag}, but the version of src/pairproof/__init__.py is {version}")
    sections = re.split(r"^## \[(.*?)\].*$", (root / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    notes = dict(zip(sections[1::2], sections[2::2], strict=True)).get(version, "").strip()
    if not notes:
        raise ValueError(f"CHANGELOG.md: expected a section ## [{version}] with text")
    return notes


def main(arguments: list[str] | None = None) -> int:
    """Check the tag; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tag", help="such as v0.1.0")
    parser.add_argument("--notes", type=Path, metavar="FILE", help="write the section of the changelog to this file")
    options = parser.parse_args(arguments)
    try:
        notes = notes_of(options.tag, ROOT)
    except ValueError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    if options.notes:
        options.notes.write_text(notes + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
