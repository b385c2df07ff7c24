"""Losses in public repositories, with the expected results of ``pairproof check`` or ``pairproof parity``.

Their code is not stored here.

Each loss has two files in ``public/``:

- ``NAME.toml`` names the repository, the file and its checksum, the options of ``pairproof check`` and the expected
  results. With ``like = "OTHER"``, missing fields are those of ``OTHER.toml``.
- ``answers/NAME.json`` has the losses and gradients that the code returned for some golden cases.
  ``tools/record_public.py`` writes it.

``public/ranks/NAME.toml`` describes a loss in several processes, with the expected results of ``pairproof parity``.
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


@dataclass(frozen=True, kw_only=True)
class PublicCode:
    """Public code, and how to call it.

    Attributes:
        name: name of the files in ``public/``.
        repository: OWNER/NAME on GitHub, or the name of a package on PyPI.
        commit: hash of the commit, or version of the package.
        file: path of the file within the repository or the package.
        sha256: checksum of the file.
        others: the checksums of other files, by path.
        license: name of the license; "none" if the repository has none.
        extracts: the definitions that are loaded from the file, as NAME, CLASS.METHOD or FUNCTION.NAME; from another
            file, PATH:NAME.
        target: the definition that is checked.
        stubs: code that the definitions need, such as a replacement of a base class.
        wrapper: code that calls the definitions if pairproof cannot call them directly.
        options: further options of the command that judges it.
        needs: packages that the definitions import.
    """

    name: str
    repository: str
    commit: str
    file: str
    sha256: str
    others: Mapping[str, str] = field(default_factory=dict)
    license: str
    extracts: Sequence[str]
    target: str
    stubs: str = ""
    wrapper: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: Sequence[str] = ()

    @property
    def link(self) -> str:
        """The address of the file or of the package."""
        if "/" in self.repository:
            return f"https://github.com/{self.repository}/blob/{self.commit}/{self.file}"
        return f"https://pypi.org/project/{self.repository}/{self.commit}"

    def source(self, folder: Path, file: str = "") -> str:
        """Return the text of a file.

        Args:
            folder: the folder of sources (see ``WHERE``).
            file: one of ``others``; by default, the file of the loss.

        Raises:
            Unavailable: the file is missing or has another checksum.
        """
        file, checksum = file or self.file, self.others.get(file, self.sha256)
        if "/" in self.repository:
            place = folder / self.repository.replace("/", "+")
            command = ["git", "-C", str(place), "show", f"{self.commit}:{file}"]
            found = subprocess.run(command, capture_output=True, check=False).stdout if place.is_dir() else b""
        else:
            path = folder / "pypi" / file
            found = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(found).hexdigest() != checksum:
            state = "has another checksum" if found else "is missing"
            raise Unavailable(f"{file} of {self.repository} at {self.commit} {state} in {folder}")
        return found.decode()

    def module(self, folder: Path) -> str:
        """Return the text of a module with the stubs, the extracted definitions and the wrapper.

        Of their decorators, only ``no_grad`` is kept.

        Args:
            folder: the folder of sources (see ``WHERE``).

        Raises:
            Unavailable: the file, or a package that it needs, is missing.
        """
        if missing := [name for name in self.needs if importlib.util.find_spec(name) is None]:
            raise Unavailable(f"{self.name} needs {', '.join(missing)}")
        parts, found = [HEADER, self.stubs], {}
        for file in ("", *self.others):
            found[file] = ast.parse(self.source(folder, file)).body
        for place in self.extracts:
            file, _, name = place.rpartition(":")
            body, (*scopes, last) = found[file], name.split(".")
            for scope in scopes:
                body = next(node for node in body if isinstance(node, SCOPES) and node.name == scope).body
            for node in body:
                if isinstance(node, SCOPES) and node.name == last:
                    node.decorator_list = [one for one in node.decorator_list if "no_grad" in ast.unparse(one)]
                    parts.append(ast.unparse(node))
                elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == last:
                    parts.append(ast.unparse(node))
        return "\n\n".join([*parts, self.wrapper])


@dataclass(frozen=True, kw_only=True)
class PublicLoss(PublicCode):
    """A public loss in one process.

    Attributes:
        computes: what it computes, in a few words.
        loss: the loss that it is checked as, short name in the catalogue.
        level: the highest level at which it conforms; "" if there is none.
        says: texts that the report of ``pairproof check`` must contain.
    """

    computes: str
    loss: str
    level: str = ""
    says: Sequence[str] = ()


WORLD_SIZES = (1, 2, 3)
"""The numbers of processes in which public losses are judged."""


@dataclass(frozen=True, kw_only=True)
class PublicRanks(PublicCode):
    """A public loss in several processes.

    Attributes:
        shown: its class or function, with options, and "before" or "after" a fix.
        agrees: the numbers of processes that agree with one process.
        mistakes: the names of the mistakes that ``pairproof parity`` finds.
        gradient: for each of ``WORLD_SIZES``, the norm of the gradient divided by that of one process.
    """

    shown: str
    agrees: Sequence[int] = WORLD_SIZES
    mistakes: Sequence[str] = ()
    gradient: Sequence[float] = (1.0, 1.0, 1.0)


def load_public(names: Sequence[str] = ()) -> list[PublicLoss]:
    """Return the public losses with these names; by default all, in alphabetical order.

    Raises:
        KeyError: a name is unknown.
    """
    return [PublicLoss(**given) for given in _read(FOLDER, names)]


def load_ranks(names: Sequence[str] = ()) -> list[PublicRanks]:
    """Return the public losses in several processes, as ``load_public`` does."""
    return [PublicRanks(**given) for given in _read(FOLDER / "ranks", names)]


def _read(folder: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    found = {path.stem: tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.toml"))}
    given = {name: found.get(data.pop("like", ""), {}) | data | {"name": name} for name, data in found.items()}
    return [given[name] for name in names or given]
