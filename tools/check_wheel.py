"""Check that a wheel contains every file of the package folders, and nothing else.

A subpackage that ``pyproject.toml`` does not list is missing from a wheel, but not from an editable install.
"""

from __future__ import annotations

import sys
import tomllib
import zipfile
from collections import Counter
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent


def expected_files(root: Path) -> set[str]:
    """Return the files that the wheel must contain, apart from its metadata.

    Args:
        root: The repository. Its ``pyproject.toml`` maps import names to folders.

    Returns:
        Paths in the wheel, such as ``pairproof/fast/supcon.py``, without caches and hidden files.
    """
    mapping: dict[str, str] = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    expected = set()
    for package, folder in mapping.items():
        for path in (root / folder).rglob("*"):
            inside = path.relative_to(root / folder)
            if path.is_file() and not any(part == "__pycache__" or part.startswith(".") for part in inside.parts):
                expected.add(str(PurePosixPath(*package.split("."), *inside.parts)))
    return expected


def differences(wheel: Path, root: Path) -> list[str]:
    """Return one line for each file that is missing from the wheel or does not belong in it."""
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if not PurePosixPath(name).parts[0].endswith(".dist-info")}
    expected = expected_files(root)
    missing = [f"missing from the wheel: {name}" for name in sorted(expected - found)]
    surplus = [f"does not belong in the wheel: {name}" for name in sorted(found - expected)]
    return missing + surplus


def main(arguments: list[str]) -> int:
    """Check the wheel named on the command line; return the exit code."""
    if len(arguments) != 1:
        print(f"expected the path of one wheel, got {len(arguments)}: {' '.join(arguments)}", file=sys.stderr)
        return 2
    wheel = Path(arguments[0])
    wrong = differences(wheel, ROOT)
    if wrong:
        print(*wrong, sep="\n", file=sys.stderr)
        return 1
    folders = Counter("/".join(name.split("/")[:-1][:2]) for name in expected_files(ROOT))
    print(wheel.name, "contains", ", ".join(f"{folder} ({count} files)" for folder, count in sorted(folders.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
