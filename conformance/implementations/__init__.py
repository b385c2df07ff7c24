"""The implementations that pairproof checks. To add one, add its file to this folder and its name to ``MODULES``."""

from importlib import import_module

from .base import Deviation, Implementation, Unavailable

MODULES = (
    *("reference", "scipy_losses", "fast", "pml", "supcontrast", "setfit", "info_nce_pytorch", "infonce"),
    *("optax_ntxent", "open_clip", "lightly", "sentence_transformers", "documents"),
)
"""The modules that define implementations, in the order of reports."""


def _named(module: str) -> list[type[Implementation]]:
    """Return the implementations in a module. Classes without a ``name`` are base classes."""
    found = vars(import_module(f"{__name__}.{module}"))
    ours = [kind for kind in found.values() if isinstance(kind, type) and kind.__module__ == found["__name__"]]
    return [kind for kind in ours if issubclass(kind, Implementation) and "name" in vars(kind)]


ALL: tuple[type[Implementation], ...] = tuple(kind for module in MODULES for kind in _named(module))

__all__ = ["ALL", "Deviation", "Implementation", "Unavailable"]
