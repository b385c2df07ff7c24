"""Configuration of Sphinx. tools/build_docs.py copies this file beside the pages."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pairproof

project = "pairproof"
author = "pairproof contributors"
version = release = pairproof.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
# In docstrings, single backticks mark code, and "Source:" is a section.
default_role = "code"
napoleon_custom_sections = ["Source"]
napoleon_google_docstring = True
autodoc_member_order = "bysource"
autodoc_typehints = "none"

html_theme = "furo"
html_title = f"pairproof {release}"
html_show_copyright = html_show_sphinx = False


def _escape_bars(app: Any, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Escape bars, as in |P(i)|: reStructuredText would read them as substitutions."""
    for k, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            lines[k] = re.sub(r"``.*?``|\|", lambda part: "\\|" if part[0] == "|" else part[0], line)


def _signature_of_class(
    app: Any, what: str, name: str, found: Any, options: Any, signature: str, returns: str
) -> tuple[str, str] | None:
    """Return the signature that ``inspect`` reports for a class. Sphinx would show that of ``__new__``."""
    if what != "class":
        return None
    parameters = inspect.signature(found).parameters.values()
    plain = [one.replace(annotation=inspect.Parameter.empty) for one in parameters]
    return str(inspect.Signature(plain)), ""


def setup(app: Any) -> None:
    """Register the two functions above with autodoc."""
    app.connect("autodoc-process-docstring", _escape_bars)
    app.connect("autodoc-process-signature", _signature_of_class)
