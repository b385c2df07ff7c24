"""Check implementations of contrastive losses. Requires ``pip install "./pairproof[verify]"``.

* ``check_loss`` checks whether a loss is correct.
* ``identify`` recognises which loss a function computes.
* ``parity`` checks that different ways to evaluate a loss agree.
* ``parametrize`` turns a test function into one pytest test per check.
"""

from __future__ import annotations

from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pairproof import install_command

from . import _moved

if TYPE_CHECKING:
    from .diagnose.identify import identify
    from .judge.check import check_loss
    from .judge.parity import parity
    from .pytest_plugin import parametrize

__all__ = ["check_loss", "identify", "parametrize", "parity"]

HOMES = {
    "check_loss": ".judge.check",
    "identify": ".diagnose.identify",
    "parametrize": ".pytest_plugin",
    "parity": ".judge.parity",
}

_moved.install()


def __getattr__(name: str) -> Any:
    """Import a function on first use, because importing this package must not need the optional dependencies."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for package in ("pytest",) if name == "parametrize" else ("flint", "jsonschema", "rich"):
        if find_spec(package) is None:
            raise ImportError(f"{package} is not installed: {install_command('verify')}")
    function = getattr(import_module(HOMES[name], __name__), name)
    if name != "identify":
        return function
    from .faults import FAULTS

    @wraps(function)
    def with_faults(*given: Any, **options: Any) -> Any:
        # ``diagnose`` cannot import ``faults``: ``faults`` imports ``judge``, which imports ``diagnose``.
        return function(*given, **{"faults": FAULTS, **options})

    return with_faults
