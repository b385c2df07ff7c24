"""The published examples of ``fixtures/worked``, loaded and checked before anything computes with them.

A figure passes three checks before it is used: the manifest's checksums (nothing altered, missing or extra), the JSON
Schema (nothing of the wrong form) and the checks here (nothing that contradicts itself: shapes, precision, references,
counts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeAlias, TypeVar

import numpy as np

from ..suite.cases import Case
from ..suite.catalogue import LOSSES
from ..suite.store import FixtureError, check_manifest, dump_json, fixtures_root, read_checked
from .quantities import QUANTITIES

FORMAT = "pairproof-worked/1"
SCHEMA = "schema/worked.schema.json"
Printed: TypeAlias = "str | bool | tuple[Printed, ...]"
"""One printed thing: a scalar as its text, a mask entry as a bool, an array as nested tuples of these."""

_Record = TypeVar("_Record")

INFINITE = ("inf", "-inf")


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

    name: str
    place: str
    shape: tuple[int, int]
    decimals: int | None
    printed: Printed | None
    exact: tuple[tuple[str, ...], ...] | None
    exact_dtype: str | None
    exact_from: str

    def table(self, read: Callable[[str], Any], printed: bool = False) -> np.ndarray[Any, Any]:
        """The exact or the printed values [N, D], each text read by a function."""
        rows = np.empty(self.shape, dtype=object)
        for index, text in _entries((self.printed if printed else self.exact) or ()):
            rows[index] = read(str(text))
        return rows


@dataclass(frozen=True)
class Call:
    """One evaluation of a loss of the catalogue on one input. A temperature is the text that the document writes."""

    id: str
    loss: str
    input: str
    arguments: Mapping[str, Any]
    keywords: Mapping[str, Any]
    published_by: tuple[str, ...]


@dataclass(frozen=True)
class Instead:
    """What an artefact is in truth, and why the document printed something else."""

    value: str
    because: str


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One printed result, a scalar or an array, exactly as printed."""

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
    instead: Instead | None

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
class Counts:
    """How many printed entries there are of each kind, and how many figures of each verdict."""

    number: int
    infinite: int
    mask: int
    index: int
    layout: int
    figures: int
    reproduced: int
    artefact: int


@dataclass(frozen=True)
class WorkedFixture:
    """One document: its inputs, the losses it evaluates, every result it prints, what it claims."""

    document: Document
    inputs: Mapping[str, Input]
    calls: Mapping[str, Call]
    figures: tuple[Figure, ...]
    claims: tuple[Claim, ...]
    counts: Counts

    def input_of(self, figure: Figure) -> Input:
        """The input a figure was computed from: its own, or its call's."""
        return self.inputs[str(figure.input) if figure.call is None else self.calls[figure.call].input]


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
    root = fixtures_root() if root is None else root
    check_manifest(root)
    loaded: list[WorkedFixture] = []
    owner: dict[str, str] = {}
    for path in sorted((root / "worked").glob("*.json")):
        name = path.relative_to(root).as_posix()
        data = read_checked(root, name, FORMAT, SCHEMA)
        fixture = _fixture(data)
        _check(name, fixture, data)
        other = owner.setdefault(fixture.document.id, name)
        if other != name:
            raise FixtureError(f"{name}: $.document.id: {fixture.document.id!r} is already the id of {other}")
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
    """A loaded fixture as the JSON object it was read from, its counts taken anew."""
    return {
        "format": FORMAT,
        "document": _plain(fixture.document),
        "inputs": {name: _plain(value, without=("name",)) for name, value in fixture.inputs.items()},
        "calls": {name: _plain(value, without=("id",)) for name, value in fixture.calls.items()},
        "figures": [_plain(figure, optional=("row", "rows")) for figure in fixture.figures],
        "claims": [_plain(claim) for claim in fixture.claims],
        "counts": _plain(recount(fixture.figures)),
    }


def recount(figures: tuple[Figure, ...]) -> Counts:
    """Count the printed entries by kind (infinities apart) and the figures by verdict."""
    tally = dict.fromkeys((field.name for field in fields(Counts)), 0)
    for figure in figures:
        tally["figures"] += 1
        tally[figure.verdict] += 1
        for _, entry in figure.entries():
            tally["infinite" if figure.kind == "number" and entry in INFINITE else figure.kind] += 1
    return Counts(**tally)


def _plain(value: Any, without: tuple[str, ...] = (), optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """A frozen record as a JSON object in the order of its fields."""
    plain: dict[str, Any] = {}
    for field in fields(value):
        content = getattr(value, field.name)
        if field.name in without or (field.name in optional and content is None):
            continue
        plain[field.name] = _plain(content) if isinstance(content, Instead) else content
    return plain


def worked_cases(fixture: WorkedFixture) -> list[Case]:
    """One case per call of a document whose inputs are known exactly."""
    return [
        case_of(call, fixture.inputs[call.input], f"{fixture.document.id}/{call.id}")
        for call in fixture.calls.values()
        if fixture.inputs[call.input].exact is not None
    ]


def case_of(call: Call, source: Input, identity: str = "") -> Case:
    """The case of one call; its embeddings are 0 where they are unknown."""
    keywords = {key: float(v) if key.endswith("temperature") else v for key, v in call.keywords.items()}
    embeddings = np.zeros(source.shape) if source.exact is None else np.array(source.exact, dtype=np.float64)
    return Case(identity or call.id, call.loss, embeddings, call.arguments, keywords, why="a worked example")


def _frozen(value: Any) -> Any:
    """JSON arrays as tuples, JSON objects as read-only mappings."""
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return MappingProxyType({key: _frozen(item) for key, item in value.items()})
    return value


def _record(kind: type[_Record], value: Mapping[str, Any], **more: Any) -> _Record:
    return kind(**{key: _frozen(item) for key, item in {**value, **more}.items()})


def _figure(value: Mapping[str, Any]) -> Figure:
    instead = value["instead"]
    return _record(Figure, value, instead=None if instead is None else Instead(**instead))


def _fixture(data: Mapping[str, Any]) -> WorkedFixture:
    return WorkedFixture(
        document=_record(Document, data["document"]),
        inputs=MappingProxyType({name: _record(Input, value, name=name) for name, value in data["inputs"].items()}),
        calls=MappingProxyType({name: _record(Call, value, id=name) for name, value in data["calls"].items()}),
        figures=tuple(map(_figure, data["figures"])),
        claims=tuple(_record(Claim, claim) for claim in data["claims"]),
        counts=Counts(**data["counts"]),
    )


def _entries(printed: Printed, index: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], str | bool]]:
    if isinstance(printed, tuple):
        for position, item in enumerate(printed):
            yield from _entries(item, (*index, position))
    else:
        yield index, printed


def _check(name: str, fixture: WorkedFixture, data: Mapping[str, Any]) -> None:
    """Everything that a schema cannot say. Raises FixtureError."""

    def fail(path: str, message: str) -> NoReturn:
        raise FixtureError(f"{name}: {path}: {message}")

    for key, value in fixture.inputs.items():
        _check_input(f"$.inputs.{key}", value, fail)
    for key, call in fixture.calls.items():
        _check_call(f"$.calls['{key}']", call, fixture.inputs, fail)
    for group in ("figures", "claims"):
        seen: set[str] = set()
        for position, item in enumerate(data[group]):
            if item["id"] in seen:
                fail(f"$.{group}[{position}].id", f"{item['id']!r} stands twice")
            seen.add(item["id"])
    for position, figure in enumerate(fixture.figures):
        _check_figure(f"$.figures[{position}]", figure, fixture, fail)
    figures = {figure.id for figure in fixture.figures}
    for position, claim in enumerate(fixture.claims):
        for place, reference in enumerate(claim.figures):
            if reference not in figures:
                fail(f"$.claims[{position}].figures[{place}]", f"no figure has the id {reference!r}")
    counted = recount(fixture.figures)
    for field in fields(Counts):
        written, found = getattr(fixture.counts, field.name), getattr(counted, field.name)
        if written != found:
            fail(f"$.counts.{field.name}", f"says {written}, the figures give {found}")


def _check_input(path: str, value: Input, fail: Callable[[str, str], NoReturn]) -> None:
    for key in ("printed", "exact"):
        table = getattr(value, key)
        if table is not None:
            shape = _shape(f"{path}.{key}", table, fail)
            if shape != value.shape:
                fail(f"{path}.{key}", f"has shape {list(shape)}, the input {list(value.shape)}")
    if value.printed is not None:
        _check_decimals(f"{path}.printed", value.printed, value.decimals, fail)
    if value.exact is None:
        return
    # An exact value must be the text of a number of its dtype, and round to what the document prints.
    half = Fraction(0) if value.decimals is None else Fraction(1, 2 * 10**value.decimals)
    printed = dict(_entries(value.printed)) if value.printed is not None else {}
    for index, text in _entries(value.exact):
        where = f"{path}.exact{_indices(index)}"
        _check_length(where, str(text), str(value.exact_dtype), fail)
        if index in printed and abs(Fraction(float(text)) - Fraction(str(printed[index]))) > half:
            fail(where, f"{text} does not round to the printed {printed[index]}")


def _check_call(path: str, call: Call, inputs: Mapping[str, Input], fail: Callable[[str, str], NoReturn]) -> None:
    if call.loss not in LOSSES:
        fail(f"{path}.loss", f"expected one of {', '.join(LOSSES)}, got {call.loss!r}")
    loss = LOSSES[call.loss]
    if call.input not in inputs:
        fail(f"{path}.input", f"no input is called {call.input!r}")
    if tuple(call.arguments) != (loss.targets,):
        fail(f"{path}.arguments", f"expected {loss.targets!r} for {call.loss}, got {', '.join(call.arguments)}")
    for keyword in call.keywords:
        if keyword not in loss.keywords:
            fail(f"{path}.keywords.{keyword}", f"{loss.function} has no such keyword")
    count = inputs[call.input].shape[0]
    target = call.arguments[loss.targets]
    if loss.targets != "positive_pairs" and len(target) != count:
        fail(f"{path}.arguments.{loss.targets}", f"expected one per embedding, {count}, got {len(target)}")
    if loss.targets == "partners":
        for i, partner in enumerate(target):
            if not 0 <= partner < count or partner == i or target[partner] != i:
                fail(f"{path}.arguments.partners[{i}]", f"{partner} is out of range, itself, or not mutual")
    if loss.targets == "positive_pairs":
        for i, pair in enumerate(target):
            if not all(0 <= end < count for end in pair):
                fail(f"{path}.arguments.positive_pairs[{i}]", f"{list(pair)} is out of range for {count} embeddings")


def _check_figure(path: str, figure: Figure, fixture: WorkedFixture, fail: Callable[[str, str], NoReturn]) -> None:
    if figure.call is not None and figure.call not in fixture.calls:
        fail(f"{path}.call", f"no call has the id {figure.call!r}")
    if figure.call is None and figure.input not in fixture.inputs:
        fail(f"{path}.input", f"no input is called {figure.input!r}")
    quantity = QUANTITIES[figure.quantity]
    if figure.kind != quantity.kind:
        fail(f"{path}.kind", f"expected {quantity.kind!r} for the quantity {figure.quantity!r}, got {figure.kind!r}")

    shape = _shape(f"{path}.printed", figure.printed, fail, cut=figure.cut is not None)
    call = None if figure.call is None else fixture.calls[figure.call]
    expected = _expected_shape(figure, quantity.shape, shape, fixture.input_of(figure), call)
    if figure.cut is None and shape != expected:
        fail(f"{path}.printed", f"expected shape {list(expected)} for {figure.quantity!r}, got {list(shape)}")
    if figure.cut is not None and (shape[1:] != expected[1:] or shape[0] > expected[0]):
        fail(f"{path}.printed", f"expected the beginning of shape {list(expected)}, got {list(shape)}")
    if figure.row is not None and not 0 <= figure.row < fixture.input_of(figure).shape[0]:
        fail(f"{path}.row", f"{figure.row} is not a row of the input")

    for index, entry in figure.entries():
        where = f"{path}.printed{_indices(index)}"
        if isinstance(entry, bool) != (figure.kind == "mask") and not (figure.kind == "mask" and entry in _BITS):
            fail(where, f"{entry!r} is no entry of a figure of kind {figure.kind!r}")
        if figure.kind == "index" and not str(entry).isdigit():
            fail(where, f"{entry!r} is no index")
        if figure.length is not None:
            _check_length(where, str(entry), figure.length, fail)
        if entry in INFINITE and not (figure.diagonal == entry and len(index) == 2 and index[0] == index[1]):
            fail(where, f"{entry} stands where the diagonal is not said to hold it")
    if figure.kind in ("number", "layout") and (figure.decimals is None) == (figure.length is None):
        fail(f"{path}.decimals", "expected exactly one of decimals and length")
    if figure.kind in ("mask", "index") and (figure.decimals is not None or figure.length is not None):
        fail(f"{path}.decimals", f"a figure of kind {figure.kind!r} has neither decimals nor length")
    if figure.decimals is not None:
        _check_decimals(f"{path}.printed", figure.printed, figure.decimals, fail)


_BITS = ("0", "1", "0.", "1.")


def _shape(path: str, printed: Printed, fail: Callable[[str, str], NoReturn], cut: bool = False) -> tuple[int, ...]:
    """The shape of nested tuples. Ragged is an error, except in the last row of a figure whose output is cut off."""
    if not isinstance(printed, tuple):
        return ()
    last = len(printed) - 1
    shapes = [_shape(f"{path}[{i}]", item, fail, cut and i == last) for i, item in enumerate(printed)]
    first = shapes[0] if shapes else ()
    for i, shape in enumerate(shapes):
        shorter = cut and i == last and len(shape) == len(first) and shape <= first
        if shape != first and not shorter:
            fail(f"{path}[{i}]", f"has shape {list(shape)}, the entries before it {list(first)}")
    return (len(printed), *first)


def _expected_shape(
    figure: Figure, symbols: tuple[str, ...], shape: tuple[int, ...], value: Input, call: Call | None
) -> tuple[int, ...]:
    count, width = value.shape
    # The number of views is that of the figure itself, if it divides the batch.
    views = shape[1] if len(shape) == 3 and shape[1] and count % shape[1] == 0 else 1
    pairs = len(call.arguments.get("positive_pairs", ())) if call is not None else 0
    first, end = figure.rows or (0, count)
    sizes = {"N": count, "N/2": count // 2, "D": width, "V": views, "B": count // views, "M+N": pairs + count}
    sizes |= {"rows": end - first, "1": 1, "2": 2}
    return tuple(sizes[symbol] for symbol in symbols)


def _check_decimals(path: str, printed: Printed, decimals: int | None, fail: Callable[[str, str], NoReturn]) -> None:
    """The precision belongs to the array: no entry may have more decimals than it says, and some entry has as many."""
    most = 0
    for index, entry in _entries(printed):
        found = len(str(entry).partition(".")[2])
        most = max(most, found)
        if found > (decimals or 0):
            fail(f"{path}{_indices(index)}", f"{entry} has {found} decimals, the array {decimals or 0}")
    if most < (decimals or 0):
        fail(path, f"no entry has the {decimals} decimals that the array is said to have")


def _check_length(path: str, text: str, dtype: str, fail: Callable[[str, str], NoReturn]) -> None:
    """The text must be what Python prints for a value of that dtype, to its full length."""
    number = float(text)
    value = float(np.float32(number)) if dtype == "float32" else number
    if repr(value) != text:
        fail(path, f"{text} is not the full length of a {dtype}: expected {value!r}")


def _indices(index: tuple[int, ...]) -> str:
    return "".join(f"[{i}]" for i in index)
