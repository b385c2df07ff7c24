"""Public losses that are recorded, not installed: their sources, how to call them, and what ``check`` must report.

Each loss has two files in ``public/``. ``NAME.toml`` names the repository, the file and its checksum, the options of
``pairproof check``, and the expected results; it contains no code of the repository. The fields that it lacks are taken
from the file that it names as ``like``. ``answers/NAME.json`` contains the loss and the gradients that the code
returned for some golden cases. ``tools/record_public.py`` writes the answers.
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
"""The environment variable that names a folder with git repositories, each as ``OWNER+NAME``, and with packages of PyPI
in ``pypi``."""

SCOPES = (ast.FunctionDef, ast.ClassDef)
"""Functions and classes: both can be extracted, and can contain definitions that are extracted."""
HEADER = """from __future__ import annotations
import math
from types import SimpleNamespace
from typing import *
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, einsum, nn
"""
"""The imports of the module that contains the extracted definitions."""


@dataclass(frozen=True)
class PublicLoss:
    """A public loss.

    Attributes:
        name: name of its two files.
        repository: OWNER/NAME on GitHub, or the name of a package on PyPI.
        commit: hash of the commit, or version of the package.
        file: path of the file within the repository or the package.
        sha256: checksum of the file.
        license: name of its license; "none" if the repository has none.
        computes: what it computes, in a few words.
        loss: the loss that it is checked as, short name in the catalogue.
        extracts: the definitions that are loaded, as NAME, CLASS.METHOD or FUNCTION.NAME; without the rest of the file.
        target: the definition that is checked.
        level: the highest level at which it conforms; "" if it does not conform at any level.
        stubs: code that the definitions need, such as a replacement of a base class.
        wrapper: code that calls the definitions, for a target that pairproof cannot call directly.
        options: further options of ``pairproof check``.
        says: parts of what ``pairproof check`` reports: reasons for failures, limits, the dtype in which it computes.
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
        """The address of the file."""
        if "/" in self.repository:
            return f"https://github.com/{self.repository}/blob/{self.commit}/{self.file}"
        return f"https://pypi.org/project/{self.repository}/{self.commit}"

    def source(self, folder: Path) -> str:
        """Return the text of the file.

        Args:
            folder: folder with the repositories, each as OWNER+NAME, and with the packages of PyPI in ``pypi``.

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
        """Return the text of a module: the stubs, the extracted definitions without their decorators, and the wrapper.

        Args:
            folder: the argument of ``source``.

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
    """Return the public losses of these names, in this order; by default all, in alphabetical order.

    Raises:
        KeyError: there is no loss of a name.
    """
    found = {path.stem: tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.toml"))}
    given = {name: found.get(data.pop("like", ""), {}) | data for name, data in found.items()}
    return [PublicLoss(name, **given[name]) for name in names or given]
