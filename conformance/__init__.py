"""The harness: cases, their certified truth, the implementations, the verdicts, the command line, the pytest plugin.

It needs the extra ``pairproof[verify]``; each module says at its top what it is for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _moved

if TYPE_CHECKING:
    from .pytest_plugin import parametrize

__all__ = ["parametrize"]

_moved.install()


def __getattr__(name: str) -> Any:
    """Import what pytest is needed for when it is asked for."""
    if name == "parametrize":
        try:
            from .pytest_plugin import parametrize
        except ImportError as error:
            raise ImportError(f'{error.name} is not installed: pip install "pairproof[verify]"') from None
        return parametrize
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
