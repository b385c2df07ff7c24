"""pairproof: a verification suite for contrastive losses.

The subpackages ``reference``, ``fast``, ``compat``, ``conformance`` and ``fixtures`` are the folders of these names at
the top of the repository. ``import pairproof`` imports none of them. ``pairproof.diagnose`` reports whether the value
of a loss is plausible for a batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .conformance.training import diagnose

__all__ = ["diagnose"]
__version__ = "0.1.0"


def install_command(extras: str) -> str:
    """Return the command that installs pairproof with these extras, for messages.

    pairproof is on no package index, so the command names the path of its clone.
    """
    return f'pip install "./pairproof[{extras}]" (./pairproof is the path of the clone)'


def __getattr__(name: str) -> Any:
    """Import ``diagnose`` on first use, because it imports torch."""
    if name != "diagnose":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .conformance.training import diagnose

    return diagnose
