"""Peers of which single files are used: found in a folder, verified by checksum, loaded by path.

A package that would bring half a machine with it is installed without what it depends on, into a folder of its own
(``make peers``), and only the named files of it are ever executed.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from .base import Unavailable


def peer_file(options: Mapping[str, str], name: str, checksum: str, package: str) -> Path:
    """The path of a peer's file, verified.

    Args:
        options: paths that the user gave, by peer name; "folder" says where the peers lie.
        name: path within that folder, whose first part is the folder of the package.
        checksum: its SHA-256.
        package: what pip installs it from, with its version.

    Raises:
        Unavailable: it is not there, or not that file.
    """
    folder = Path(options.get("folder") or os.environ.get("PAIRPROOF_PEERS") or ".peers")
    path = folder / name
    if not path.is_file():
        target = folder / Path(name).parts[0]
        raise Unavailable(
            f"no {path}: pip install --no-deps --target {target} {package},"
            " or name the folder that holds it with PAIRPROOF_PEERS"
        )
    found = sha256(path)
    if found != checksum:
        raise Unavailable(f"{path}: expected SHA-256 {checksum}, got {found}")
    return path


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
    spec = importlib.util.spec_from_file_location(f"pairproof_peer_{path.stem}_{abs(hash(str(path)))}", path)
    if spec is None or spec.loader is None:
        raise Unavailable(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise Unavailable(f"{path} imports what is not installed: {error}") from None
    return module


def load_from_package(folder: Path, module: str, packages: Iterable[str], empty: Iterable[str] = ()) -> Any:
    """Import one module of a package by its name, while no ``__init__.py`` of the package is executed.

    Args:
        folder: that holds the package.
        module: its full name.
        packages: the packages on the way to it and to what it imports, each of which is only a folder.
        empty: modules that it imports and does not use here; they stay empty.

    Raises:
        Unavailable: something that it imports is missing.
    """
    top = module.partition(".")[0]
    before = {name: sys.modules.pop(name) for name in _within(top)}
    try:
        for name in (*packages, *empty):
            bare = ModuleType(name)
            if name not in empty:
                bare.__path__ = [str(folder.joinpath(*name.split(".")))]
            sys.modules[name] = bare
        return importlib.import_module(module)
    except ImportError as error:
        raise Unavailable(f"{module} imports what is not installed: {error}") from None
    finally:
        # Whoever imports the package next must get the whole of it, or be told that it is not installed.
        for name in _within(top):
            del sys.modules[name]
        sys.modules.update(before)


def _within(top: str) -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == top]
