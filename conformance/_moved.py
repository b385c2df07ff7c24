"""Old module paths that the documentation named: importing one warns, and gives the module at its new path.

They go with the next release.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

PACKAGE = __name__.rpartition(".")[0]
MOVED = {
    "catalogue": "suite.catalogue",
    "declared": "judge.deviations",
    "fixtures": "suite.store",
    "golden": "suite.golden",
    "peers": "implementations",
    "plugin": "pytest_plugin",
    "properties": "judge.properties",
    "tolerances": "truth.tolerances",
}


class _Moved(MetaPathFinder, Loader):
    """Finds the old paths, and what lies below them."""

    def find_spec(self, fullname: str, *given: object) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if _new_path(fullname) else None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        new = _new_path(old)
        warnings.warn(f"{old} has moved to {new}", DeprecationWarning, stacklevel=2)
        sys.modules[old] = importlib.import_module(new)


def _new_path(old: str) -> str:
    first, dot, below = old.partition(f"{PACKAGE}.")[2].partition(".")
    return f"{PACKAGE}.{MOVED[first]}{dot}{below}" if first in MOVED else ""


def install() -> None:
    """Make the old paths importable."""
    sys.meta_path.insert(0, _Moved())
