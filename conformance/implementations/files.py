"""Peers that are installed packages, and peers that are single files of a package.

``make peers`` installs each package of the second kind into its own folder, without its dependencies. The adapter
verifies the checksums of the files that it needs, and executes only these files.
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

from pairproof import install_command

from .base import TorchImplementation, Unavailable
from .sandbox import import_file


class PackagePeer(TorchImplementation):
    """A peer that is an installed package."""

    distribution: ClassVar[str]
    """Name on PyPI."""
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
            install = install_command(self.extra)
            raise Unavailable(f"{self.distribution} is not installed ({error}): {install}") from None

    def version(self) -> str:
        """The package's version."""
        return self.installed


class FilePeer(TorchImplementation):
    """A peer that consists of single files of a package."""

    requirement: ClassVar[str]
    """The requirement for pip, with the version."""
    files: ClassVar[Mapping[str, str]]
    """The SHA-256 of each file, by its path below the folder of peers, such as "setfit/setfit/losses.py"."""
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
    """Import one module of a package without executing any ``__init__.py`` of the package.

    Args:
        folder: the folder that contains the package.
        module: the full name of the module.
        packages: the packages that contain the module and its imports.
        empty: modules to replace by empty ones, because they are imported but not needed.

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
        # Later imports of the package must not find these stubs.
        _unload(module)
        sys.modules.update(before)


def _unload(module: str) -> dict[str, ModuleType]:
    """Remove the package of a module from ``sys.modules``; return the removed modules."""
    top = module.partition(".")[0]
    return {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == top}
