"""Print the oldest versions that pyproject.toml allows, as constraints for pip."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
EXTRAS = ("verify", "pml", "safetensors")


def oldest(text: str) -> list[str]:
    """Return a constraint for each dependency in the text of a pyproject.toml, and for those of ``EXTRAS``.

    Raises:
        ValueError: a dependency has no lower limit.
    """
    project = tomllib.loads(text)["project"]
    extras = project.get("optional-dependencies", {name: [] for name in EXTRAS})
    found = []
    for one in [*project["dependencies"], *(one for extra in EXTRAS for one in extras[extra])]:
        match = re.fullmatch(r"([\w-]+)(?:>=([\d.]+)|(==[\d.*]+))", one)
        if match is None:
            raise ValueError(f"{one}: expected a lower limit, such as numpy>=2.0")
        name, least, exact = match.groups()
        found.append(f"{name}{exact or f'=={least}'}")
    return found


if __name__ == "__main__":
    sys.stdout.write("\n".join(oldest(PYPROJECT.read_text(encoding="utf-8"))) + "\n")
