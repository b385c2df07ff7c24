"""Old paths of modules: importing one warns and returns the module from its new path.

The next release removes the old paths.
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
    """Finds the modules with old paths and their submodules."""

    def find_spec(self, fullname: str, *given: object) -> ModuleSpec | None:
        first, dot, below = fullname.partition(f"{PACKAGE}.")[2].partition(".")
        new = f"{PACKAGE}.{MOVED.get(first)}{dot}{below}"
        return ModuleSpec(fullname, self, loader_state=new) if first in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__
        old, new = module.__name__, module.__spec__.loader_state
        warnings.warn(f"{old} has moved to {new}", DeprecationWarning, stacklevel=2)
        sys.modules[old] = importlib.import_module(new)


def install() -> None:
    """Make the old paths importable."""
    sys.meta_path.insert(0, _Moved())
