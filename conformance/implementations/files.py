"""How a peer is loaded: as an installed package, or as single files, verified by checksum and loaded by path.

A package with many dependencies is installed without them into a folder of its own (``make peers``), and only its named
files are executed.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from .base import TorchImplementation, Unavailable
from .sandbox import import_file


class PackagePeer(TorchImplementation):
    """A peer that is an installed package."""

    distribution: ClassVar[str]
    """Its name in the package index."""
    modules: ClassVar[tuple[str, ...]]
    """The modules to import, all of one package."""
    extra: ClassVar[str] = "peers"
    """The extra of this package that installs it."""

    def load(self, options: Mapping[str, str]) -> None:
        """Import the modules."""
        try:
            for name in self.modules:
                importlib.import_module(name)
            self.package: Any = importlib.import_module(name.partition(".")[0])
        except ImportError as error:
            install = f'pip install "pairproof[{self.extra}]"'
            raise Unavailable(f"{self.distribution} is not installed ({error}): {install}") from None

    def version(self) -> str:
        """The package's version."""
        return version(self.distribution)


class FilePeer(TorchImplementation):
    """A peer of which single files are used."""

    requirement: ClassVar[str]
    """What pip installs it from, with its version."""
    files: ClassVar[Mapping[str, str]]
    """The SHA-256 of each file, by its path in the folder of peers; the first part is the package's own folder."""
    attribute: ClassVar[str]
    """The name of the loss in the first file."""

    def load(self, options: Mapping[str, str]) -> None:
        """Find the files, verify them, load the loss."""
        folder = Path(options.get("folder") or os.environ.get("PAIRPROOF_PEERS") or ".peers")
        for name, checksum in self.files.items():
            path = folder / name
            if not path.is_file():
                install = f"pip install --no-deps --target {folder / Path(name).parts[0]} {self.requirement}"
                raise Unavailable(f"no {path}: {install}, or set PAIRPROOF_PEERS to the folder that holds it")
            if (found := sha256(path)) != checksum:
                raise Unavailable(f"{path}: expected SHA-256 {checksum}, got {found}")
        self.path = folder / next(iter(self.files))
        self.loss: Any = getattr(self.module(), self.attribute)

    def module(self) -> Any:
        """The module that the first file is."""
        return load_file(self.path)

    def version(self) -> str:
        """The package and the checksum of its first file."""
        checksum = next(iter(self.files.values()))
        return f"{self.requirement.replace('==', ' ')}, SHA-256 {checksum[:12]}"


def sha256(path: Path) -> str:
    """Checksum of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def load_file(path: Path) -> Any:
    """Import one Python file by its path.

    Raises:
        Unavailable: there is no such file, or something that it imports is missing.
    """
    if not path.is_file():
        raise Unavailable(f"no file {path}")
    if path.suffix != ".py":
        raise Unavailable(f"{path} is not a Python file")
    try:
        return import_file(path, "pairproof_peer")
    except ImportError as error:
        raise Unavailable(f"{path} imports what is not installed: {error}") from None


def load_from_package(folder: Path, module: str, packages: Iterable[str], empty: Iterable[str] = ()) -> Any:
    """Import one module of a package by its name without executing any ``__init__.py`` of the package.

    Args:
        folder: that holds the package.
        module: its full name.
        packages: the packages that hold it and what it imports.
        empty: modules that it imports and does not use here; they stay empty.

    Raises:
        Unavailable: something that it imports is missing.
    """
    before = _forgotten(module)
    try:
        for name in (*packages, *empty):
            bare = sys.modules[name] = ModuleType(name)
            if name not in empty:
                bare.__path__ = [str(folder.joinpath(*name.split(".")))]
        return importlib.import_module(module)
    except ImportError as error:
        raise Unavailable(f"{module} imports what is not installed: {error}") from None
    finally:
        # The next import of the package must load all of it, or fail if it is not installed.
        _forgotten(module)
        sys.modules.update(before)


def _forgotten(module: str) -> dict[str, ModuleType]:
    """Take the loaded modules of a module's package out of ``sys.modules``."""
    top = module.partition(".")[0]
    return {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == top}
