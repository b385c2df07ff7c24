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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..implementations.base import Deviation
from ..suite.cases import Case
from ..suite.catalogue import LOSSES
from ..suite.golden import DTYPES, GoldenCase
from ..truth.evaluate import Truth

PROJECT = "pyproject.toml"
TOOL = "pairproof"
_LISTS = ("case", "flag", "dtype")
_TEXTS = ("loss", "target", "reason", "link")


class DeclarationError(ValueError):
    """A file of declarations that cannot be read as one; the message names the file and the entry."""


@dataclass(frozen=True)
class Declaration:
    """One declared deviation.

    Attributes:
        place: file and number, by which messages name it.
        reason: why the results differ.
        link: where that is discussed or written down.
        cases: ids of cases; nothing means those of the flags.
        flags: flags of cases; nothing means the cases that are named.
        dtypes: nothing means all.
        loss: short name; nothing means any.
        target: as it is named; nothing means any.
        losses: those that have a case which it names; nothing means that this was not looked up.
    """

    place: str
    reason: str
    link: str
    cases: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    loss: str = ""
    target: str = ""
    losses: tuple[str, ...] = ()

    def names(self, case: str, flags: Collection[str], dtype: str) -> bool:
        """Whether a check of the right loss and target is one of those that must fail."""
        chosen = case in self.cases if self.cases else any(flag in flags for flag in self.flags)
        return chosen and (not self.dtypes or dtype in self.dtypes)

    def of(self, loss: str, target: str) -> bool:
        """Whether it speaks of this loss of this target."""
        return self.loss in ("", loss) and self.target in ("", target) and (not self.losses or loss in self.losses)

    def in_any(self, dtypes: Collection[str]) -> bool:
        """Whether it speaks of one of these dtypes."""
        return not self.dtypes or not set(self.dtypes).isdisjoint(dtypes)


def project_file(*starts: Path) -> Path | None:
    """The nearest ``pyproject.toml`` upwards from each of some folders in turn, if it has a table tool.pairproof.

    Raises:
        DeclarationError: it is no TOML.
    """
    for start in starts:
        near = next((path for folder in (start, *start.parents) if (path := folder / PROJECT).is_file()), None)
        if near is not None and TOOL in _tools(_toml(near), near):
            return near
    return None


def _tools(data: dict[str, Any], path: Path) -> dict[str, Any]:
    tools = data.get("tool", {})
    if not isinstance(tools, dict):
        raise DeclarationError(f"{path}: tool: expected a table")
    return tools


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DeclarationError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DeclarationError(f"{path}: is no TOML: {error}") from None


def read_declarations(path: Path) -> list[Declaration]:
    """Read the declarations of a TOML file.

    Args:
        path: a ``pyproject.toml``, whose table is tool.pairproof, or another file, which holds nothing else.

    Returns:
        The declarations in their order; none where a ``pyproject.toml`` has no such table.

    Raises:
        DeclarationError: the file is missing or malformed, or an entry says too little, too much or the wrong thing.
    """
    data: Any = _toml(path)
    prefix = ""
    if path.name == PROJECT:
        prefix = f"tool.{TOOL}."
        data = _tools(data, path).get(TOOL, {})
    if not isinstance(data, dict):
        raise DeclarationError(f"{path}: tool.{TOOL}: expected a table")
    for name in data:
        if name != "deviations":
            raise DeclarationError(f"{path}: {prefix}{name}: unknown; known: deviations")
    entries = data.get("deviations", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DeclarationError(f"{path}: {prefix}deviations: expected a list of tables, [[{prefix}deviations]]")
    return [_declaration(entry, f"{path.name}, {prefix}deviations {k + 1}") for k, entry in enumerate(entries)]


def _declaration(entry: Mapping[str, Any], place: str) -> Declaration:
    for name in entry:
        if name not in (*_LISTS, *_TEXTS):
            raise DeclarationError(f"{place}: {name}: unknown; known: {', '.join((*_TEXTS, *_LISTS))}")
    texts = {name: entry.get(name, "") for name in _TEXTS}
    for name, text in texts.items():
        if not isinstance(text, str) or (name in entry and not text.strip()):
            raise DeclarationError(f"{place}: {name}: expected a text, got {text!r}")
    for name in ("reason", "link"):
        if not texts[name]:
            raise DeclarationError(f"{place}: {name} is missing: a deviation without it cannot be judged by others")
    lists = {name: _texts(entry[name], f"{place}: {name}") if name in entry else () for name in _LISTS}
    if bool(lists["case"]) == bool(lists["flag"]):
        raise DeclarationError(f"{place}: expected a case (ids) or a flag, one of both")
    return Declaration(
        place,
        texts["reason"],
        texts["link"],
        cases=lists["case"],
        flags=lists["flag"],
        dtypes=lists["dtype"],
        loss=texts["loss"],
        target=texts["target"],
    )


def _texts(value: object, place: str) -> tuple[str, ...]:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not found or not all(isinstance(text, str) and text for text in found):
        raise DeclarationError(f"{place}: expected a text or a list of texts, got {value!r}")
    return tuple(found)


def check_names(declarations: Iterable[Declaration], cases: Mapping[Case, GoldenCase | None]) -> None:
    """Refuse a declaration that names what does not exist.

    Args:
        declarations: to check.
        cases: every case of the suite, with its golden entry where it has one.

    Raises:
        DeclarationError: a loss, case, flag or dtype is unknown.
    """
    ids = {case.id for case in cases}
    flags = {flag for golden in cases.values() if golden for flag in golden.flags}
    for one in declarations:
        for names, known, what in (
            ((one.loss,) if one.loss else (), LOSSES, "loss"),
            (one.cases, ids, "case"),
            (one.flags, flags, "flag"),
            (one.dtypes, DTYPES, "dtype"),
        ):
            for name in names:
                if name not in known:
                    near = difflib.get_close_matches(name, known, 1)
                    hint = f"; meant {near[0]}?" if near else ""
                    raise DeclarationError(f"{one.place}: unknown {what} {name!r}{hint}")


def looked_up(declarations: Iterable[Declaration], cases: Mapping[Case, GoldenCase | None]) -> list[Declaration]:
    """Declarations that know which losses they speak of: those of their cases.

    Args:
        declarations: as they were read.
        cases: every case of the suite, with its golden entry where it has one.
    """

    def losses(one: Declaration) -> tuple[str, ...]:
        dtype = (one.dtypes or tuple(DTYPES))[0]
        found = {
            case.loss for case, golden in cases.items() if one.names(case.id, golden.flags if golden else (), dtype)
        }
        return tuple(sorted(found))

    return [replace(one, losses=losses(one)) for one in declarations]


def deviations(
    declarations: Iterable[Declaration], loss: str, target: str, cases: Mapping[Case, GoldenCase | None]
) -> tuple[Deviation, ...]:
    """What is declared of one loss of one target, in the form in which peers declare.

    Args:
        declarations: all of them.
        loss: short name in the catalogue.
        target: as it is named.
        cases: every case of the suite, with its golden entry where it has one.
    """
    flags = {case.id: golden.flags if golden else () for case, golden in cases.items()}

    def form(one: Declaration) -> Deviation:
        def applies(case: Case, dtype: str, true: Truth) -> bool:
            return one.names(case.id, flags.get(case.id, ()), dtype)

        return Deviation(one.place, applies, one.reason, one.link)

    return tuple(form(one) for one in declarations if one.of(loss, target))


def unused(
    declarations: Sequence[Declaration], loss: str, target: str, dtypes: Collection[str], met: Collection[str]
) -> list[str]:
    """What to say of the declarations of one loss of one target that no check met.

    Args:
        declarations: all of them.
        loss: short name in the catalogue.
        target: as it is named.
        dtypes: that were judged.
        met: the places of those that some check met.
    """
    return [
        f"{one.place}: meets no check of {target} as {loss}: remove it"
        for one in declarations
        if one.of(loss, target) and one.in_any(dtypes) and one.place not in met
    ]
