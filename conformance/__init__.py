"""The harness: cases, their certified truth, the implementations, the verdicts, the command line, the pytest plugin.

It needs the extra ``pairproof[verify]``. ``check_loss`` judges a loss, ``identify`` recognises one, and both return
their results as data. ``parametrize`` makes pytest tests of a check.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from . import _moved

if TYPE_CHECKING:
    from .diagnose.identify import identify
    from .judge.check import check_loss
    from .pytest_plugin import parametrize

__all__ = ["check_loss", "identify", "parametrize"]

_HOMES = {"check_loss": "judge.check", "identify": "diagnose.identify", "parametrize": "pytest_plugin"}

_moved.install()


def __getattr__(name: str) -> Any:
    """Import a function when it is used, so that the base install imports this package."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        if name != "identify":
            return found
        # Faults depend on ``judge``, and so on ``diagnose``, which therefore does not import them.
        return functools.partial(found, faults=importlib.import_module(f"{__name__}.faults").FAULTS)
    except ImportError as error:
        raise ImportError(f'{error.name} is not installed: pip install "pairproof[verify]"') from None
