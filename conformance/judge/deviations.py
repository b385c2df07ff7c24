"""Declared deviations: where a project's loss is meant to differ, and why.

They are tables in ``pyproject.toml`` or in another TOML file. In a file that contains only declarations, the table may
also be called ``[[deviations]]``::

    [[tool.pairproof.deviations]]
    loss = "supcon"                                      # optional: only this loss
    target = "mylib.losses:MyLoss"                       # optional: only this target
    flag = "lonely-anchors"                              # or case = "golden/supcon/two-rows"
    dtype = "float32"                                    # optional
    reason = "anchors without positives are not counted"
    link = "https://example.org/mylib/issues/7"

A case may be a usage, such as "usage/zero-row"; flag, case and dtype may be lists. A declaration is strict:

- Every check that it names must fail.
- A complete run on its target, loss and dtype must contain at least one of these checks.
- If the target raises an error, the check of a case is an error, not a deviation; the check of a usage is a deviation.

Runs on other targets, losses or dtypes ignore the declaration.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ..implementations.base import Deviation
from ..implementations.usages import USAGES
from ..suite.cases import Case
from ..suite.catalogue import LOSSES
from ..suite.golden import DTYPES, GoldenCase
from .options import UsageError
from .results import Status

PROJECT = "pyproject.toml"
DECLARED = ". Declared: "
"""The text before the reasons, in the message of a check that deviates."""
_LISTS = ("case", "flag", "dtype")
_TEXTS = ("loss", "target", "reason", "link")


class DeclarationError(UsageError):
    """A file of declarations is malformed or names something unknown. The message names the file and the entry."""


def _require(met: bool, place: str, message: str) -> None:
    if not met:
        raise DeclarationError(f"{place}: {message}")


def verdict(difference: str, declared: Sequence[Deviation]) -> tuple[Status, str]:
    """Return the status and the message of a check.

    Args:
        difference: the first term that differs; "" if the result conforms.
        declared: the deviations that name this check.
    """
    if difference and declared:
        reasons = "; ".join(f"{one.reason} ({one.link})" for one in declared)
        return Status.DEVIATES, f"{difference}{DECLARED}{reasons}"
    if declared:
        named = declared[0].name
        return Status.FAILED, f"declared to deviate ({named}) but conforms: remove the declaration or narrow it"
    return (Status.FAILED if difference else Status.PASSED), difference


def project_file(start: Path) -> Path | None:
    """Return the nearest ``pyproject.toml``, or None if it has no table for pairproof.

    The file is searched in the folder ``start`` and its parents. The table is ``tool.pairproof`` or ``deviations``.

    Raises:
        DeclarationError: the file cannot be read, or is malformed.
    """
    near = next((path for folder in (start, *start.parents) if (path := folder / PROJECT).is_file()), None)
    return near if near is not None and _table(near)[0] is not None else None


def _table(path: Path) -> tuple[dict[str, Any] | None, str]:
    """Return the table that may contain ``deviations``, and the prefix of its keys.

    The table is None if a ``pyproject.toml`` has no table for pairproof.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DeclarationError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DeclarationError(f"{path}: is not valid TOML: {error}") from None
    nested, prefix = table, ""
    for name in ("tool", "pairproof"):
        if name not in nested:
            break
        nested = nested[name]
        _require(isinstance(nested, dict), f"{path}: {prefix}{name}", "expected a table")
        prefix = f"{prefix}{name}."
    else:
        both = "[[deviations]] and [[tool.pairproof.deviations]]"
        _require("deviations" not in table, f"{path}: {both}", "expected one of these tables, got both")
        return nested, prefix
    if path.name == PROJECT:
        return ({"deviations": table["deviations"]} if "deviations" in table else None), ""
    return table, ""


def read_declarations(path: Path) -> dict[str, dict[str, Any]]:
    """Read and validate the entries of a TOML file.

    Args:
        path: a TOML file with a table ``tool.pairproof.deviations`` or ``deviations``. A file with ``deviations`` may
            contain nothing else, unless it is a ``pyproject.toml``.

    Returns:
        The entries in the order of the file, by place, such as "pyproject.toml, tool.pairproof.deviations 1". The
        values of ``case``, ``flag`` and ``dtype`` are tuples. Empty if the file has no entries.

    Raises:
        DeclarationError: the file is missing or malformed, or a key of an entry is missing, unknown or wrong.
    """
    table, prefix = _table(path)
    for name in table or ():
        _require(name == "deviations", f"{path}: {prefix}{name}", "unknown; known: deviations")
    entries = (table or {}).get("deviations", [])
    tables = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
    _require(tables, f"{path}: {prefix}deviations", f"expected a list of tables, [[{prefix}deviations]]")
    places = [f"{path.name}, {prefix}deviations {k + 1}" for k in range(len(entries))]
    return {place: _entry(entry, place) for place, entry in zip(places, entries, strict=True)}


def _entry(entry: Mapping[str, Any], place: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in entry.items():
        _require(name in (*_TEXTS, *_LISTS), f"{place}: {name}", f"unknown; known: {', '.join((*_TEXTS, *_LISTS))}")
        several = name in _LISTS
        texts = value if several and isinstance(value, list) else [value]
        right = bool(texts) and all(isinstance(text, str) and text.strip() for text in texts)
        expected = f"expected a text{' or a list of texts' if several else ''}, got {value!r}"
        _require(right, f"{place}: {name}", expected)
        found[name] = tuple(texts) if several else value
    for name in ("reason", "link"):
        _require(name in found, place, f"{name} is missing: every deviation needs a reason and a link")
    _require(("case" in found) != ("flag" in found), place, "expected either case (one or more ids) or flag")
    return found


@cache
def _nearest(name: str, names: tuple[str, ...]) -> list[str]:
    """Return the most similar name in a list; empty if none is similar. Cached, because the search is slow."""
    return difflib.get_close_matches(name, names, 1)


def deviations(
    entries: Mapping[str, Mapping[str, Any]], cases: Mapping[Case, GoldenCase | None]
) -> tuple[Deviation, ...]:
    """Return the deviations that the entries of a file declare.

    Args:
        entries: the entries of ``read_declarations``, by place.
        cases: every case of the suite, with its golden entry if it has one.

    Raises:
        DeclarationError: a loss, case, usage, flag or dtype is unknown.
    """
    flags = {case: set(golden.flags if golden else ()) for case, golden in cases.items()}
    usages = {one.id for one in USAGES}
    ids = {case.id for case in cases} | usages
    known = {"loss": LOSSES, "case": ids, "flag": set().union(*flags.values()), "dtype": DTYPES}

    def declared(place: str, entry: Mapping[str, Any]) -> Deviation:
        for what, names in known.items():
            given = entry.get(what, ())
            for name in [given] if isinstance(given, str) else given:
                near = [] if name in names else _nearest(name, tuple(sorted(names)))
                _require(name in names, place, f"unknown {what} {name!r}{''.join(f'; meant {x}?' for x in near)}")
        named, flagged = entry.get("case", ()), entry.get("flag", ())
        chosen = {case.id: case.loss for case in cases if case.id in named or not flags[case].isdisjoint(flagged)}
        losses = [*chosen.values(), *(LOSSES if usages.intersection(named) else ())]
        return Deviation(
            place,
            lambda case, dtype, true: case.id in chosen,
            entry["reason"],
            entry["link"],
            target=entry.get("target", ""),
            losses=frozenset(loss for loss in losses if entry.get("loss", loss) == loss),
            dtypes=frozenset(entry["dtype"]) if "dtype" in entry else None,
            usages=usages.intersection(named),
        )

    return tuple(declared(place, entry) for place, entry in entries.items())
