"""pairproof: a verification suite for contrastive losses.

The parts of this package are folders at the top of the repository: ``pairproof.reference`` in ``reference/``,
``pairproof.fast`` in ``fast/``, ``pairproof.compat`` in ``compat/``, ``pairproof.conformance`` in ``conformance/`` and
``pairproof.fixtures`` in ``fixtures/``. ``pyproject.toml`` maps them; importing this module does not import them.
``pairproof.diagnose`` reports which value of a loss is plausible for a batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .conformance.training import diagnose

__all__ = ["diagnose"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import ``diagnose`` on first use, so that importing this module does not import torch."""
    if name != "diagnose":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .conformance.training import diagnose

    return diagnose
