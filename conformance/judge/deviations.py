"""Where an adopter's loss knowingly deviates: written down in their own project, with a reason, and held to.

In ``pyproject.toml`` under ``[[tool.pairproof.deviations]]``, in any other TOML file under ``[[deviations]]``::

    [[tool.pairproof.deviations]]
    loss = "supcon"                                      # optional: only this loss
    target = "mylib.losses:MyLoss"                       # optional: only this target
    flag = "lonely-anchors"                              # or  case = "golden/supcon/..."; one, or a list
    dtype = "float32"                                    # optional: one, or a list
    reason = "anchors without positive are not counted"
    link = "https://example.org/mylib/issues/7"

A declaration is strict: every check that it names must fail, and one that names no check of a loss and a dtype that
are judged is an error. One whose target, loss or dtype is not judged is no error, for it may be judged elsewhere. A
crash is no deviation: it stays an error.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..implementations.base import Deviation
from ..suite.cases import Case
from ..suite.catalogue import LOSSES
from ..suite.golden import DTYPES, GoldenCase
from ..suite.records import Truth
from .options import UsageError
from .results import Status

PROJECT = "pyproject.toml"
TOOL = "pairproof"
_LISTS = ("case", "flag", "dtype")
_TEXTS = ("loss", "target", "reason", "link")


class DeclarationError(UsageError):
    """A file of declarations is malformed or names what does not exist; the message names the file and the entry."""


def verdict(difference: str, declared: Sequence[Deviation]) -> tuple[Status, str]:
    """How a check ends that was judged, and its message.

    Args:
        difference: the first differing term; empty if the result conforms.
        declared: the deviations that name this check.
    """
    if difference and declared:
        reasons = "; ".join(f"{one.reason} ({one.link})" for one in declared)
        return Status.DEVIATES, f"{difference}. Declared: {reasons}"
    if declared:
        named = declared[0].name
        return Status.FAILED, f"declared to deviate ({named}) but conforms: remove the declaration or narrow it"
    return (Status.FAILED if difference else Status.PASSED), difference


def project_file(*starts: Path) -> Path | None:
    """The nearest ``pyproject.toml`` upwards from each of some folders in turn, if it has a table tool.pairproof.

    Raises:
        DeclarationError: the file is not TOML.
    """
    for start in starts:
        near = next((path for folder in (start, *start.parents) if (path := folder / PROJECT).is_file()), None)
        if near is not None and TOOL in _table(_toml(near), "tool", str(near)):
            return near
    return None


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DeclarationError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DeclarationError(f"{path}: is no TOML: {error}") from None


def _table(data: Mapping[str, Any], key: str, place: str) -> dict[str, Any]:
    table = data.get(key, {})
    if not isinstance(table, dict):
        raise DeclarationError(f"{place}: {key}: expected a table")
    return table


def read_declarations(path: Path) -> dict[str, dict[str, Any]]:
    """Read and validate the entries of a TOML file.

    Args:
        path: a ``pyproject.toml``, whose table is tool.pairproof, or another file, which holds nothing else.

    Returns:
        The entries by their places, in their order; each has the keys of the file, with a tuple for every list. Empty
        if a ``pyproject.toml`` has no such table.

    Raises:
        DeclarationError: the file is missing or malformed, or an entry lacks a key, or has an unknown or wrong one.
    """
    data, prefix = _toml(path), ""
    if path.name == PROJECT:
        data, prefix = _table(_table(data, "tool", str(path)), TOOL, f"{path}: tool"), f"tool.{TOOL}."
    for name in data:
        if name != "deviations":
            raise DeclarationError(f"{path}: {prefix}{name}: unknown; known: deviations")
    entries = data.get("deviations", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DeclarationError(f"{path}: {prefix}deviations: expected a list of tables, [[{prefix}deviations]]")
    places = [f"{path.name}, {prefix}deviations {k + 1}" for k in range(len(entries))]
    return {place: _entry(entry, place) for place, entry in zip(places, entries, strict=True)}


def _entry(entry: Mapping[str, Any], place: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in entry.items():
        if name in _TEXTS:
            if not isinstance(value, str) or not value.strip():
                raise DeclarationError(f"{place}: {name}: expected a text, got {value!r}")
            found[name] = value
        elif name in _LISTS:
            texts = [value] if isinstance(value, str) else value
            if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
                raise DeclarationError(f"{place}: {name}: expected a text or a list of texts, got {value!r}")
            found[name] = tuple(texts)
        else:
            raise DeclarationError(f"{place}: {name}: unknown; known: {', '.join((*_TEXTS, *_LISTS))}")
    for name in ("reason", "link"):
        if name not in found:
            raise DeclarationError(f"{place}: {name} is missing: a deviation without it cannot be judged by others")
    if ("case" in found) == ("flag" in found):
        raise DeclarationError(f"{place}: expected a case (ids) or a flag, one of both")
    return found


def deviations(
    entries: Mapping[str, Mapping[str, Any]], cases: Mapping[Case, GoldenCase | None]
) -> tuple[Deviation, ...]:
    """The deviations that the entries of a file declare.

    Args:
        entries: as they were read, by place.
        cases: every case of the suite, with its golden entry where it has one.

    Raises:
        DeclarationError: a loss, case, flag or dtype is unknown.
    """
    flags = {case: set(golden.flags if golden else ()) for case, golden in cases.items()}
    known = {
        "loss": LOSSES,
        "case": {case.id for case in cases},
        "flag": set().union(*flags.values()),
        "dtype": DTYPES,
    }

    def declared(place: str, entry: Mapping[str, Any]) -> Deviation:
        for what, names in known.items():
            given = entry.get(what, ())
            for name in [given] if isinstance(given, str) else given:
                if name not in names:
                    near = difflib.get_close_matches(name, names, 1)
                    hint = f"; meant {near[0]}?" if near else ""
                    raise DeclarationError(f"{place}: unknown {what} {name!r}{hint}")
        chosen = [
            case
            for case in cases
            if case.id in entry.get("case", ()) or not flags[case].isdisjoint(entry.get("flag", ()))
        ]
        return Deviation(
            place,
            _names({case.id for case in chosen}),
            entry["reason"],
            entry["link"],
            target=entry.get("target", ""),
            losses=frozenset(case.loss for case in chosen if entry.get("loss", case.loss) == case.loss),
            dtypes=frozenset(entry["dtype"]) if "dtype" in entry else None,
        )

    return tuple(declared(place, entry) for place, entry in entries.items())


def _names(cases: set[str]) -> Callable[[Case, str, Truth], bool]:
    return lambda case, dtype, true: case.id in cases
