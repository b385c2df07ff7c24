"""The published examples of ``fixtures/worked``, loaded and checked before anything computes with them.

A figure passes three checks before it is used: the manifest's checksums (nothing altered, missing or extra), the JSON
Schema (nothing of the wrong form) and the checks here (nothing that contradicts itself: shapes, precision, references,
counts).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from ..suite.cases import Case
from ..suite.catalogue import LOSSES
from ..suite.store import check_ids, checked_root, dump_json, place, read_checked, require
from .quantities import QUANTITIES

FORMAT = "pairproof-worked/1"
Printed: TypeAlias = "str | bool | tuple[Printed, ...]"
"""One printed thing: a scalar as its text, a mask entry as a bool, an array as nested tuples of these."""

INFINITE = ("inf", "-inf")
COUNTED = ("number", "infinite", "mask", "index", "layout", "figures", "reproduced", "artefact")


@dataclass(frozen=True)
class Document:
    """Where the figures were published. ``sha256`` is that of the text file they were read from."""

    id: str
    title: str
    about: str
    sha256: str
    links: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Input:
    """Embeddings as the document gives them, ``shape`` [N, D].

    ``printed`` is None where the document never prints them; ``exact`` holds the values themselves, as the shortest
    float64 texts, where they are known.
    """

    place: str
    shape: tuple[int, int]
    decimals: int | None
    printed: Printed | None
    exact: tuple[tuple[str, ...], ...] | None
    exact_dtype: str | None
    exact_from: str

    def table(self, read: Callable[[str], Any], printed: bool = False) -> np.ndarray[Any, Any]:
        """The exact or the printed values [N, D], each text read by a function."""
        values: np.ndarray[Any, Any] = np.vectorize(read, otypes=[object])(self.printed if printed else self.exact)
        return values


@dataclass(frozen=True)
class Call:
    """One evaluation of a loss of the catalogue on one input. A temperature is the text that the document writes."""

    loss: str
    input: str
    arguments: Mapping[str, Any]
    keywords: Mapping[str, Any]
    published_by: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One printed result, a scalar or an array, exactly as printed.

    ``instead`` says of an artefact what it is in truth ("value"), and why the document printed something else
    ("because").
    """

    id: str
    place: str
    what: str
    call: str | None
    input: str | None
    quantity: str
    row: int | None = None
    rows: tuple[int, int] | None = None
    kind: str
    decimals: int | None
    length: str | None
    diagonal: str | None
    arithmetic: str
    producer: str
    printed: Printed
    cut: str | None
    verdict: str
    instead: Mapping[str, str] | None

    def entries(self) -> Iterator[tuple[tuple[int, ...], str | bool]]:
        """Every printed entry with its index, in the order of the page; a scalar has the index ()."""
        return _entries(self.printed)


@dataclass(frozen=True)
class Claim:
    """A statement that the document makes in words, judged.

    ``words`` are the document's own, or a translation where ``original`` holds the document's own. ``figures`` names
    the figures that bear on it.
    """

    id: str
    place: str
    words: str
    original: str | None
    figures: tuple[str, ...]
    verdict: str
    because: str


@dataclass(frozen=True)
class WorkedFixture:
    """One document: its inputs, the losses it evaluates, every result it prints, what it claims.

    ``counts`` says how many printed entries there are of each kind, and how many figures of each verdict.
    """

    document: Document
    inputs: Mapping[str, Input]
    calls: Mapping[str, Call]
    figures: tuple[Figure, ...]
    claims: tuple[Claim, ...]
    counts: Mapping[str, int]

    def call_of(self, figure: Figure) -> Call | None:
        """The call that a figure belongs to, or None if it depends on its input alone."""
        return self.calls[figure.call] if figure.call else None

    def input_of(self, figure: Figure) -> Input:
        """The input a figure was computed from: its own, or its call's."""
        call = self.call_of(figure)
        return self.inputs[call.input if call else str(figure.input)]


def load_worked(root: Path | None = None) -> list[WorkedFixture]:
    """Load every worked example, in the order of the file names.

    Args:
        root: a folder of fixtures; by default the installed one.

    Returns:
        One ``WorkedFixture`` per file of ``worked/``, checked.

    Raises:
        FixtureError: a file is altered, missing or extra, or breaks the schema, or contradicts itself.
        ImportError: jsonschema is not installed.
    """
    root = checked_root(root)
    loaded: list[WorkedFixture] = []
    owner: dict[str, str] = {}
    for path in sorted((root / "worked").glob("*.json")):
        name = path.relative_to(root).as_posix()
        fixture = _fixture(read_checked(root, name, FORMAT))
        _check(f"{name}: $", fixture)
        other = owner.setdefault(fixture.document.id, name)
        taken = f"{fixture.document.id!r} is already the id of {other}"
        require(other == name, f"{name}: $.document.id", taken)
        loaded.append(fixture)
    return loaded


def dump_worked(fixture: WorkedFixture | Mapping[str, Any]) -> str:
    """The text of a worked fixture, the same for the same content: one line per matrix row, one per field.

    Args:
        fixture: a loaded fixture, or the JSON object itself.

    Returns:
        The text, ending in a newline.
    """
    return dump_json(as_json(fixture) if isinstance(fixture, WorkedFixture) else fixture, longest=40)


def as_json(fixture: WorkedFixture) -> dict[str, Any]:
    """A loaded fixture as the JSON object it was read from."""
    return {"format": FORMAT, **_plain(fixture)}


def _plain(value: Any) -> Any:
    """Records as JSON objects in the order of their fields, without rows that a figure lacks."""
    if is_dataclass(value):
        value = {key: item for key, item in vars(value).items() if item is not None or key not in ("row", "rows")}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return list(map(_plain, value)) if isinstance(value, tuple) else value


def recount(figures: tuple[Figure, ...]) -> dict[str, int]:
    """Count the printed entries by kind (infinities apart) and the figures by verdict."""
    tally = Counter(figure.verdict for figure in figures)
    tally["figures"] = len(figures)
    for figure in figures:
        for _, entry in figure.entries():
            tally["infinite" if figure.kind == "number" and entry in INFINITE else figure.kind] += 1
    return {name: tally[name] for name in COUNTED}


def worked_cases(fixture: WorkedFixture) -> list[Case]:
    """One case per call of a document whose inputs are known exactly."""
    return [
        case_of(f"{fixture.document.id}/{name}", call, fixture.inputs[call.input])
        for name, call in fixture.calls.items()
        if fixture.inputs[call.input].exact is not None
    ]


def case_of(identity: str, call: Call, source: Input) -> Case:
    """The case of one call; its embeddings are 0 where they are unknown."""
    keywords = {key: float(v) if key.endswith("temperature") else v for key, v in call.keywords.items()}
    embeddings = np.zeros(source.shape) if source.exact is None else np.array(source.exact, dtype=np.float64)
    return Case(identity, call.loss, embeddings, call.arguments, keywords, why="a worked example")


def _frozen(value: Any) -> Any:
    """JSON arrays as tuples, JSON objects as read-only mappings."""
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    return MappingProxyType({k: _frozen(v) for k, v in value.items()}) if isinstance(value, dict) else value


def _fixture(data: Any) -> WorkedFixture:
    data = _frozen(data)
    return WorkedFixture(
        document=Document(**data["document"]),
        inputs=_frozen({name: Input(**value) for name, value in data["inputs"].items()}),
        calls=_frozen({name: Call(**value) for name, value in data["calls"].items()}),
        figures=tuple(Figure(**figure) for figure in data["figures"]),
        claims=tuple(Claim(**claim) for claim in data["claims"]),
        counts=data["counts"],
    )


def _entries(printed: Printed, index: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], str | bool]]:
    if isinstance(printed, tuple):
        for position, item in enumerate(printed):
            yield from _entries(item, (*index, position))
    else:
        yield index, printed


def _check(top: str, fixture: WorkedFixture) -> None:
    """Everything that a schema cannot say. Raises FixtureError."""
    for key, value in fixture.inputs.items():
        _check_input(f"{top}.inputs.{key}", value)
    for key, call in fixture.calls.items():
        _check_call(f"{top}.calls['{key}']", call, fixture.inputs)
    figures = [figure.id for figure in fixture.figures]
    check_ids(f"{top}.figures", figures)
    check_ids(f"{top}.claims", [claim.id for claim in fixture.claims])
    for k, figure in enumerate(fixture.figures):
        _check_figure(f"{top}.figures[{k}]", figure, fixture)
    for k, claim in enumerate(fixture.claims):
        for j, reference in enumerate(claim.figures):
            require(reference in figures, f"{top}.claims[{k}].figures[{j}]", f"no figure has the id {reference!r}")
    for key, found in recount(fixture.figures).items():
        written = fixture.counts[key]
        require(written == found, f"{top}.counts.{key}", f"says {written}, the figures give {found}")


def _check_input(path: str, value: Input) -> None:
    for key, table in (("printed", value.printed), ("exact", value.exact)):
        if table is not None:
            shape = _shape(f"{path}.{key}", table)
            require(shape == value.shape, f"{path}.{key}", f"has shape {list(shape)}, the input {list(value.shape)}")
    _check_decimals(f"{path}.printed", value.printed or (), value.decimals)
    # An exact value must be the text of a number of its dtype, and round to what the document prints.
    half = Fraction(1, 2 * 10**value.decimals) if value.decimals else Fraction(0)
    printed = dict(_entries(value.printed or ()))
    for index, text in _entries(value.exact or ()):
        where = f"{path}.exact{place(index)}"
        _check_length(where, str(text), str(value.exact_dtype))
        shown = printed.get(index)
        rounds = shown is None or abs(Fraction(float(text)) - Fraction(str(shown))) <= half
        require(rounds, where, f"{text} does not round to the printed {shown}")


def _check_call(path: str, call: Call, inputs: Mapping[str, Input]) -> None:
    require(call.loss in LOSSES, f"{path}.loss", f"expected one of {', '.join(LOSSES)}, got {call.loss!r}")
    loss = LOSSES[call.loss]
    require(call.input in inputs, f"{path}.input", f"no input is called {call.input!r}")
    given = ", ".join(call.arguments)
    require(given == loss.targets, f"{path}.arguments", f"expected {loss.targets!r} for {call.loss}, got {given}")
    for keyword in call.keywords:
        require(keyword in loss.keywords, f"{path}.keywords.{keyword}", f"{loss.function} has no such keyword")
    where, target, count = f"{path}.arguments.{given}", call.arguments[given], inputs[call.input].shape[0]
    if given == "positive_pairs":
        for i, pair in enumerate(target):
            require(max(pair) < count, f"{where}[{i}]", f"{list(pair)} is out of range for {count} embeddings")
        return
    require(len(target) == count, where, f"expected one per embedding, {count}, got {len(target)}")
    for i, partner in enumerate(target if given == "partners" else ()):
        mutual = partner < count and partner != i and target[partner] == i
        require(mutual, f"{where}[{i}]", f"{partner} is out of range, itself, or not mutual")


def _check_figure(path: str, figure: Figure, fixture: WorkedFixture) -> None:
    require(figure.call in (None, *fixture.calls), f"{path}.call", f"no call has the id {figure.call!r}")
    require(figure.input in (None, *fixture.inputs), f"{path}.input", f"no input is called {figure.input!r}")
    kind, quantity, cut = figure.kind, QUANTITIES[figure.quantity], figure.cut is not None
    wanted = f"expected {quantity.kind!r} for the quantity {figure.quantity!r}, got {kind!r}"
    require(kind == quantity.kind, f"{path}.kind", wanted)

    shape = _shape(f"{path}.printed", figure.printed, cut)
    expected = _expected_shape(figure, quantity.shape, shape, fixture)
    fits = shape[1:] == expected[1:] and shape[:1] <= expected[:1] if cut else shape == expected
    wanted = f"expected {'the beginning of ' * cut}shape {list(expected)} for {figure.quantity!r}"
    require(fits, f"{path}.printed", f"{wanted}, got {list(shape)}")
    count = fixture.input_of(figure).shape[0]
    require((figure.row or 0) < count, f"{path}.row", f"{figure.row} is not a row of the input")

    for index, entry in figure.entries():
        where = f"{path}.printed{place(index)}"
        allowed = {"mask": entry in (True, False, "0", "1", "0.", "1."), "index": str(entry).isdigit()}
        right = allowed.get(kind, not isinstance(entry, bool))
        require(right, where, f"{entry!r} is not a valid {kind} entry")
        if figure.length is not None:
            _check_length(where, str(entry), figure.length)
        right = entry not in INFINITE or (figure.diagonal == entry and len(index) == 2 and index[0] == index[1])
        require(right, where, f"{entry} is allowed only on a diagonal that the figure declares to hold it")
    missing, wanted = (1, "exactly one") if kind in ("number", "layout") else (2, "neither")
    right = [figure.decimals, figure.length].count(None) == missing
    require(right, f"{path}.decimals", f"a figure of kind {kind!r} has {wanted} of decimals and length")
    if figure.decimals is not None:
        _check_decimals(f"{path}.printed", figure.printed, figure.decimals)


def _shape(path: str, printed: Printed, cut: bool = False) -> tuple[int, ...]:
    """The shape of nested tuples. Ragged is an error, except in the last row of a figure whose output is cut off."""
    if not isinstance(printed, tuple):
        return ()
    last = len(printed) - 1
    shapes = [_shape(f"{path}[{i}]", item, cut and i == last) for i, item in enumerate(printed)]
    first = shapes[0]
    for i, shape in enumerate(shapes):
        shorter = cut and i == last and len(shape) == len(first) and shape <= first
        message = f"has shape {list(shape)}, the entries before it {list(first)}"
        require(shape == first or shorter, f"{path}[{i}]", message)
    return (len(printed), *first)


def _expected_shape(figure: Figure, symbols: str, shape: tuple[int, ...], fixture: WorkedFixture) -> tuple[int, ...]:
    count, width = fixture.input_of(figure).shape
    call = fixture.call_of(figure)
    # The number of views is that of the figure itself, if it divides the batch.
    views = shape[1] if len(shape) == 3 and count % shape[1] == 0 else 1
    pairs = len(call.arguments.get("positive_pairs", ())) if call else 0
    first, end = figure.rows or (0, count)
    sizes = {"N": count, "N/2": count // 2, "D": width, "V": views, "B": count // views, "M+N": pairs + count}
    sizes |= {"rows": end - first, "1": 1, "2": 2}
    return tuple(sizes[symbol] for symbol in symbols.split())


def _check_decimals(path: str, printed: Printed, decimals: int | None) -> None:
    """The precision belongs to the array: no entry may have more decimals than it says, and some entry has as many."""
    said, most = decimals or 0, 0
    for index, entry in _entries(printed):
        found = len(str(entry).partition(".")[2])
        most = max(most, found)
        require(found <= said, f"{path}{place(index)}", f"{entry} has {found} decimals, the array {said}")
    require(most == said, path, f"no entry has {said} decimals, the number that is declared")


def _check_length(path: str, text: str, dtype: str) -> None:
    """The text must be what Python prints for a value of that dtype, to its full length."""
    value = float(np.dtype(dtype).type(text))
    require(repr(value) == text, path, f"{text} is not the full length of a {dtype}: expected {value!r}")
