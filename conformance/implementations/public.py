"""Losses in public repositories, with the expected results of ``pairproof check``. Their code is not stored here.

Each loss has two files in ``public/``:

- ``NAME.toml`` names the repository, the file and its checksum, the options of ``pairproof check`` and the expected
  results. With ``like = "OTHER"``, missing fields are those of ``OTHER.toml``.
- ``answers/NAME.json`` has the losses and gradients that the code returned for some golden cases.
  ``tools/record_public.py`` writes it.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .base import Unavailable

FOLDER = Path(__file__).parent / "public"

WHERE = "PAIRPROOF_PUBLIC"
"""The environment variable for the folder of sources: git repositories as ``OWNER+NAME``, PyPI packages in ``pypi``."""

SCOPES = (ast.FunctionDef, ast.ClassDef)
"""Definitions that can be extracted, and that can contain others."""
HEADER = """from __future__ import annotations
import math
from types import SimpleNamespace
from typing import *
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, einsum, nn
"""
"""The first lines of the module with the extracted definitions."""


@dataclass(frozen=True)
class PublicLoss:
    """A public loss.

    Attributes:
        name: name of its two files.
        repository: OWNER/NAME on GitHub, or the name of a package on PyPI.
        commit: hash of the commit, or version of the package.
        file: path of the file within the repository or the package.
        sha256: checksum of the file.
        license: name of the license; "none" if the repository has none.
        computes: what it computes, in a few words.
        loss: the loss that it is checked as, short name in the catalogue.
        extracts: the definitions that are loaded from the file, as NAME, CLASS.METHOD or FUNCTION.NAME.
        target: the definition that is checked.
        level: the highest level at which it conforms; "" if there is none.
        stubs: code that the definitions need, such as a replacement of a base class.
        wrapper: code that calls the definitions if pairproof cannot call them directly.
        options: further options of ``pairproof check``.
        says: texts that the report of ``pairproof check`` must contain.
        needs: packages that the definitions import.
    """

    name: str
    repository: str
    commit: str
    file: str
    sha256: str
    license: str
    computes: str
    loss: str
    extracts: Sequence[str]
    target: str
    level: str = ""
    stubs: str = ""
    wrapper: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    says: Sequence[str] = ()
    needs: Sequence[str] = ()

    @property
    def link(self) -> str:
        """The address of the file or of the package."""
        if "/" in self.repository:
            return f"https://github.com/{self.repository}/blob/{self.commit}/{self.file}"
        return f"https://pypi.org/project/{self.repository}/{self.commit}"

    def source(self, folder: Path) -> str:
        """Return the text of the file.

        Args:
            folder: the folder of sources (see ``WHERE``).

        Raises:
            Unavailable: the file is missing or has another checksum.
        """
        if "/" in self.repository:
            place = folder / self.repository.replace("/", "+")
            command = ["git", "-C", str(place), "show", f"{self.commit}:{self.file}"]
            found = subprocess.run(command, capture_output=True, check=False).stdout if place.is_dir() else b""
        else:
            path = folder / "pypi" / self.file
            found = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(found).hexdigest() != self.sha256:
            state = "has another checksum" if found else "is missing"
            raise Unavailable(f"{self.file} of {self.repository} at {self.commit} {state} in {folder}")
        return found.decode()

    def module(self, folder: Path) -> str:
        """Return the text of a module with the stubs, the extracted definitions (undecorated) and the wrapper.

        Args:
            folder: the folder of sources (see ``WHERE``).

        Raises:
            Unavailable: the file, or a package that it needs, is missing.
        """
        if missing := [name for name in self.needs if importlib.util.find_spec(name) is None]:
            raise Unavailable(f"{self.name} needs {', '.join(missing)}")
        text = self.source(folder)
        parts, top = [HEADER, self.stubs], ast.parse(text).body
        for name in self.extracts:
            body, (*scopes, last) = top, name.split(".")
            for scope in scopes:
                body = next(node for node in body if isinstance(node, SCOPES) and node.name == scope).body
            for node in body:
                if isinstance(node, SCOPES) and node.name == last:
                    node.decorator_list = []
                    parts.append(ast.unparse(node))
                elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == last:
                    parts.append(ast.unparse(node))
        return "\n\n".join([*parts, self.wrapper])


def load_public(names: Sequence[str] = ()) -> list[PublicLoss]:
    """Return the public losses with these names; by default all, in alphabetical order.

    Raises:
        KeyError: a name is unknown.
    """
    found = {path.stem: tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.toml"))}
    given = {name: found.get(data.pop("like", ""), {}) | data for name, data in found.items()}
    return [PublicLoss(name, **given[name]) for name in names or given]
