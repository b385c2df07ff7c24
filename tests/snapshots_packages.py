"""A pytest plugin for libraries whose packages import more than is installed.

``PAIRPROOF_SNAPSHOT_PACKAGES`` names packages, separated by commas. Each is found on the path, but its ``__init__.py``
is not executed, so that the modules of the package can be imported one by one. A name that ends in ":MODULE" imports
this module of the package first.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

for _given in os.environ["PAIRPROOF_SNAPSHOT_PACKAGES"].split(","):
    _name, _, _module = _given.partition(":")
    _folders = [Path(folder, *_name.split(".")) for folder in sys.path]
    _package = sys.modules[_name] = ModuleType(_name)
    _package.__path__ = [str(folder) for folder in _folders if (folder / "__init__.py").is_file()]
    _parent, _, _last = _name.rpartition(".")
    if _parent:
        setattr(sys.modules[_parent], _last, _package)
    if _module:
        importlib.import_module(f"{_name}.{_module}")
