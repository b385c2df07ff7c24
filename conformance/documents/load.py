"""Load and check the published examples of ``fixtures/worked``.

Every file must pass three checks:

* the manifest: no file is altered, missing or extra;
* the JSON Schema, which the installed files passed when they were written;
* the checks of this module: shapes, precision, references between entries, counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from ..suite.cases import Case
from ..suite.catalogue import LOSSES
from ..suite.golden import check_arguments
from ..suite.store import (
    check_ids,
    checked_root,
    content_key,
    damage_of,
    dump_json,
    expect,
    place,
    read_checked,
    require,
)
from .quantities import QUANTITIES

FORMAT = "pairproof-worked/1"
SCHEMA = "schema/worked.schema.json"

Printed: TypeAlias = "str | bool | tuple[Printed, ...]"
"""A printed scalar (a text, or a bool for True and False), or a printed array as nested tuples of scalars."""

INFINITE = ("inf", "-inf")
COUNTED = ("number", "infinite", "mask", "index", "layout", "figures", "reproduced", "artefact")


@dataclass(frozen=True)
class Document:
    """A published document or a public test.

    ``sha256`` is the checksum of the file from which the figures were read. ``source`` has the repository, the commit
    and the file of a public test; it is None for other documents.
    """

    id: str
    title: str
    about: str
    sha256: str
    links: tuple[str, ...]
    notes: tuple[str, ...]
    source: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Input:
    """Embeddings of a document, of ``shape`` [N, D].

    ``printed`` has the values as printed. ``exact`` has the exact values, as the shortest decimals that give the same
    float64. Either is None if the values are unknown. The schema describes every field.
    """

    place: str
    shape: tuple[int, int]
    decimals: int | None
    printed: Printed | None
    exact: tuple[tuple[str, ...], ...] | None
    exact_dtype: str | None
    exact_from: str

    def table(self, read: Callable[[str], Any], printed: bool = False) -> np.ndarray[Any, Any]:
        """The exact or the printed values, [N, D], each converted from text by ``read``."""
        values: np.ndarray[Any, Any] = np.vectorize(read, otypes=[object])(self.printed if printed else self.exact)
        return values


@dataclass(frozen=True)
class Call:
    """One evaluation of a loss of the catalogue on one input. Temperatures are texts, as in the document.

    The schema describes every field.
    """

    loss: str
    input: str
    arguments: Mapping[str, Any]
    keywords: Mapping[str, Any]
    published_by: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One printed result, a scalar or an array, exactly as printed.

    The schema describes every field. Some of them:

    * ``decimals``: the number of printed decimals.
    * ``length``: in place of ``decimals`` if all digits of the number are printed: its dtype.
    * ``within``: the largest difference that a public test accepts. None: the printed digits decide.
    * ``arithmetic``: the dtype in which the document computed the figure.
    * ``cut``: the missing part of an incomplete output.
    * ``verdict``: "reproduced" or "artefact". An artefact differs from the value of the document's formula, or does not
      depend on the input.
    * ``instead``: for an artefact, the value of the formula ("value"), and why another one is printed ("because").
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
    within: str | None = None
    length: str | None
    diagonal: str | None
    arithmetic: str
    producer: str
    printed: Printed
    cut: str | None
    verdict: str
    instead: Mapping[str, str] | None

    def entries(self) -> Iterator[tuple[tuple[int, ...], str | bool]]:
        """Every printed entry with its index, in order. A scalar has the index ()."""
        return _entries(self.printed)


@dataclass(frozen=True)
class Claim:
    """A statement of the document in words, and its verdict.

    ``words`` is a quotation, or its translation if ``original`` is given. ``figures`` has the ids of related figures.
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
    """One document: its inputs, calls, figures and claims.

    ``counts`` has the number of printed entries of each kind, and the number of figures with each verdict.
    """

    document: Document
    inputs: Mapping[str, Input]
    calls: Mapping[str, Call]
    figures: tuple[Figure, ...]
    claims: tuple[Claim, ...]
    counts: Mapping[str, int]

    def call_of(self, figure: Figure) -> Call | None:
        """The call of a figure; None if the figure depends only on its input."""
        return self.calls[figure.call] if figure.call else None

    def input_of(self, figure: Figure) -> Input:
        """The input of a figure: that of its call, or the figure's own."""
        call = self.call_of(figure)
        return self.inputs[call.input if call else str(figure.input)]


def load_worked(root: Path | None = None) -> list[WorkedFixture]:
    """Load and check every worked example, in the order of the file names.

    Args:
        root: a folder of fixtures; by default the installed one.

    Raises:
        FixtureError: a file is altered, missing or extra, does not match the schema, or is inconsistent.
        ImportError: ``root`` is not the installed folder, and jsonschema is not installed.
    """
    root = checked_root(root)
    loaded: list[WorkedFixture] = []
    owner: dict[str, str] = {}
    for path in sorted((root / "worked").glob("*.json")):
        name = path.relative_to(root).as_posix()
        key = content_key(root, (name, SCHEMA))
        if key not in _loaded:
            data = read_checked(root, name, FORMAT)
            with damage_of(name):
                fixture = _fixture(data)
                _check(f"{name}: $", fixture)
            _loaded[key] = fixture
        fixture = _loaded[key]
        other = owner.setdefault(fixture.document.id, name)
        require(other == name, f"{name}: $.document.id", f"{fixture.document.id!r} is already the id of {other}")
        loaded.append(fixture)
    return loaded


_loaded: dict[tuple[str | bool | bytes, ...], WorkedFixture] = {}


def dump_worked(fixture: WorkedFixture | Mapping[str, Any]) -> str:
    """Serialise a worked example as JSON in a fixed layout: one line per field, and one per row of a matrix.

    Args:
        fixture: a loaded worked example, or its JSON object.

    Returns:
        The text, ending in a newline.
    """
    data = {"format": FORMAT, **_plain(fixture)} if isinstance(fixture, WorkedFixture) else fixture
    return dump_json(data, longest=40)


def _plain(value: Any) -> Any:
    """Convert records to JSON objects. Optional fields that are None are left out."""
    if is_dataclass(value):
        optional = {field.name for field in fields(value) if field.default is None}
        value = {key: item for key, item in vars(value).items() if item is not None or key not in optional}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return list(map(_plain, value)) if isinstance(value, tuple) else value


def recount(figures: tuple[Figure, ...]) -> dict[str, int]:
    """Count the figures by verdict, and the printed entries by kind. Infinite numbers are a kind of their own."""
    tally = Counter([figure.verdict for figure in figures] + ["figures"] * len(figures))
    for figure in figures:
        for _, entry in figure.entries():
            tally["infinite" if figure.kind == "number" and entry in INFINITE else figure.kind] += 1
    return {name: tally[name] for name in COUNTED}


def worked_cases(fixture: WorkedFixture) -> list[Case]:
    """The cases of a document: one for each call whose exact inputs are known."""
    return [
        case_of(f"{fixture.document.id}/{name}", call, fixture.inputs[call.input])
        for name, call in fixture.calls.items()
        if fixture.inputs[call.input].exact is not None
    ]


def case_of(identity: str, call: Call, source: Input) -> Case:
    """The case of a call. Its embeddings are 0 if the exact inputs are unknown."""
    keywords = {key: float(v) if key.endswith("temperature") else v for key, v in call.keywords.items()}
    embeddings = np.zeros(source.shape) if source.exact is None else np.array(source.exact, dtype=np.float64)
    return Case(identity, call.loss, embeddings, call.arguments, keywords)


def _frozen(value: Any) -> Any:
    """Convert JSON arrays to tuples and JSON objects to read-only mappings."""
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
    """Check what a schema cannot express."""
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
            require(reference in figures, f"{top}.claims[{k}].figures[{j}]", f"unknown figure {reference!r}")
    for key, found in recount(fixture.figures).items():
        expect(fixture.counts[key] == found, f"{top}.counts.{key}", f"{found}, the number counted", fixture.counts[key])


def _check_input(path: str, value: Input) -> None:
    for key, table in (("printed", value.printed), ("exact", value.exact)):
        if table is not None:
            shape = _shape(f"{path}.{key}", table)
            expect(shape == value.shape, f"{path}.{key}", f"shape {list(value.shape)}", list(shape))
    _check_decimals(f"{path}.printed", value.printed or (), value.decimals)
    # An exact value must be written in full, and round to the printed value.
    half, printed = Fraction(1, 2 * 10**value.decimals) if value.decimals else 0, dict(_entries(value.printed or ()))
    for index, text in _entries(value.exact or ()):
        where, shown = f"{path}.exact{place(index)}", printed.get(index)
        _check_length(where, str(text), str(value.exact_dtype))
        rounds = shown is None or abs(Fraction(float(text)) - Fraction(str(shown))) <= half
        require(rounds, where, f"{text} does not round to the printed {shown}")


def _check_call(path: str, call: Call, inputs: Mapping[str, Input]) -> None:
    expect(call.loss in LOSSES, f"{path}.loss", f"one of {', '.join(LOSSES)}", repr(call.loss))
    require(call.input in inputs, f"{path}.input", f"unknown input {call.input!r}")
    loss = LOSSES[call.loss]
    for keyword, value in call.keywords.items():
        require(keyword in loss.keywords, f"{path}.keywords.{keyword}", f"{loss.function} has no such keyword")
        finite = not keyword.endswith("temperature") or math.isfinite(float(value))
        require(finite, f"{path}.keywords.{keyword}", "expected a finite number")
    check_arguments(path, loss, {loss.embeddings[0]: np.ones(inputs[call.input].shape), **call.arguments}, False)


def _check_figure(path: str, figure: Figure, fixture: WorkedFixture) -> None:
    require(figure.call in (None, *fixture.calls), f"{path}.call", f"unknown call {figure.call!r}")
    require(figure.input in (None, *fixture.inputs), f"{path}.input", f"unknown input {figure.input!r}")
    kind, quantity, cut = figure.kind, QUANTITIES[figure.quantity], figure.cut is not None
    expect(kind == quantity.kind, f"{path}.kind", f"{quantity.kind!r} for {figure.quantity!r}", repr(kind))
    shape = _shape(f"{path}.printed", figure.printed, cut)
    expected = _expected_shape(figure, quantity.shape, shape, fixture)
    fits = shape[1:] == expected[1:] and shape[:1] <= expected[:1] if cut else shape == expected
    wanted = f"{'at most ' * cut}shape {list(expected)} for {figure.quantity!r}"
    expect(fits, f"{path}.printed", wanted, list(shape))
    count = fixture.input_of(figure).shape[0]
    require((figure.row or 0) < count, f"{path}.row", f"{figure.row} is out of range for {count} rows")
    for index, entry in figure.entries():
        where = f"{path}.printed{place(index)}"
        allowed = {"mask": entry in (True, False, "0", "1", "0.", "1."), "index": str(entry).isdigit()}
        right = allowed.get(kind, not isinstance(entry, bool))
        require(right, where, f"{entry!r} is not a valid {kind} entry")
        if figure.length is not None:
            _check_length(where, str(entry), figure.length)
        right = entry not in INFINITE or (figure.diagonal == entry and len(index) == 2 and index[0] == index[1])
        require(right, where, f"{entry} is allowed only on the diagonal of a figure whose diagonal is {entry}")
    needed, given = int(kind in ("number", "layout")), 2 - [figure.decimals, figure.length].count(None)
    expect(given == needed, f"{path}.decimals", f"{needed} of the fields decimals and length for kind {kind!r}", given)
    if figure.decimals is not None:
        _check_decimals(f"{path}.printed", figure.printed, figure.decimals)


def _shape(path: str, printed: Printed, cut: bool = False) -> tuple[int, ...]:
    """The shape of nested tuples. If the output is ``cut`` off, its last row may be shorter."""
    if not isinstance(printed, tuple):
        return ()
    last = len(printed) - 1
    shapes = [_shape(f"{path}[{i}]", item, cut and i == last) for i, item in enumerate(printed)]
    first = shapes[0]
    for i, shape in enumerate(shapes):
        shorter = cut and i == last and len(shape) == len(first) and shape <= first
        expect(shape == first or shorter, f"{path}[{i}]", f"shape {list(first)}, like the first entry", list(shape))
    return (len(printed), *first)


def _expected_shape(figure: Figure, symbols: str, shape: tuple[int, ...], fixture: WorkedFixture) -> tuple[int, ...]:
    count, width = fixture.input_of(figure).shape
    call = fixture.call_of(figure)
    # The figure shows the number of views, which must divide the number of rows.
    views = shape[1] if len(shape) == 3 and count % shape[1] == 0 else 1
    if symbols == "B" and shape and count % shape[0] == 0:
        views = count // shape[0]
    pairs = len(call.arguments.get("positive_pairs", ())) if call else 0
    first, end = figure.rows or (0, count)
    sizes = {"N": count, "N/2": count // 2, "D": width, "V": views, "B": count // views, "M+N": pairs + count}
    sizes |= {"rows": end - first, "1": 1, "2": 2}
    return tuple(sizes[symbol] for symbol in symbols.split())


def _check_decimals(path: str, printed: Printed, decimals: int | None) -> None:
    declared, most = decimals or 0, 0
    for index, entry in _entries(printed):
        found = len(str(entry).partition(".")[2])
        most = max(most, found)
        expect(found <= declared, f"{path}{place(index)}", f"at most {declared} decimals", entry)
    require(most == declared, path, f"no entry has the declared {declared} decimals")


def _check_length(path: str, text: str, dtype: str) -> None:
    """Check that a text is what ``repr`` prints for a value of the dtype, converted to float64."""
    value = float(np.dtype(dtype).type(text))
    expect(repr(value) == text, path, f"{value!r}, a {dtype} printed in full", text)
