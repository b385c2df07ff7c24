"""The golden cases of ``fixtures/golden``: loaded and checked.

A case says what goes in and what must come out. Values are stored, never the seeds of a generator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .cases import Case
from .catalogue import LOSSES, Loss
from .flags import first_untrue
from .records import Expected, Matrix
from .store import FixtureError, check_ids, checked_root, place, read_checked, require

FORMAT = "pairproof-golden/1"
FLAGS_FORMAT = "pairproof-golden-flags/1"
ERRORS_FORMAT = "pairproof-golden-errors/1"
FOLDER = "golden"
FLAGS = f"{FOLDER}/flags.json"
SCHEMA = "schema/golden.schema.json"
ERRORS = f"{FOLDER}/errors.json"
DTYPES = ("float64", "float32", "bfloat16", "float16")
EXACT_INTEGERS = 2**53
"""Integers of at least this size are written as strings: many JSON readers know only float64."""

TARGETS = ("labels", "positives", "partners", "positive_pairs")
"""The arguments of which one says who is whose positive."""

ARGUMENTS = (*TARGETS, "embeddings_b", "negatives", "ref_embeddings", "ref_labels", "self_rows")
"""What stands among the arguments of a case, in this order, whether the functions take it by position or by keyword."""

COMPUTED_FIELDS = ("dtypes", "expected")

SHAPES: Mapping[str, str] = {
    **dict.fromkeys(("embeddings", "embeddings_a", "embeddings_b"), "ND"),
    **dict.fromkeys(("labels", "partners", "self_rows", "anchors"), "N"),
    "positives": "NM",
    "positive_pairs": "P2",
    "ref_embeddings": "MD",
    "ref_labels": "M",
    "negatives": "KD",
}
"""The shape of every array of a case, a letter for each axis. Without ref_embeddings M is N; K and P are free."""

EXCEPTIONS: Mapping[str, type[Exception]] = {"type": TypeError, "value": ValueError}


@dataclass(frozen=True)
class Flag:
    """Why cases of one kind exist: the mistake they hunt, what goes wrong with it, and where it was made."""

    name: str
    hunts: str
    effect: str
    links: tuple[str, ...]


@dataclass(frozen=True)
class GoldenCase:
    """A case with its proved results.

    Attributes:
        case: the evaluation; its id is "golden/" and the stable id of the file.
        flags: why it exists, in names that ``load_flags`` explains.
        note: what it shows, in a sentence.
        dtypes: the dtypes that hold its embeddings and all other matrices exactly.
        expected: what it must give.
    """

    case: Case
    flags: tuple[str, ...]
    note: str
    dtypes: tuple[str, ...]
    expected: Expected

    @property
    def id(self) -> str:
        """The case's id."""
        return self.case.id


@dataclass(frozen=True)
class ErrorCase:
    """A call that must be refused.

    Attributes:
        id: stable name.
        loss: short name in the catalogue.
        arguments: every argument by name: arrays as numpy arrays, everything else as it is.
        exception: what must be raised.
        argument: the name with which the message must begin.
        words: what the message must contain.
        note: what the case is for.
    """

    id: str
    loss: str
    arguments: Mapping[str, Any]
    exception: type[Exception]
    argument: str
    words: tuple[str, ...]
    note: str


def load_golden(root: Path | None = None) -> list[GoldenCase]:
    """Load every golden case, in the order of the catalogue and of its file.

    Args:
        root: a folder of fixtures; by default the installed one.

    Returns:
        The cases, checked.

    Raises:
        FixtureError: a file is altered, missing or extra, or breaks the schema, or contradicts itself. The message
            names the file and the field.
        ImportError: jsonschema is not installed.
    """
    root = checked_root(root)
    flags = read_flags(root)
    loaded: list[GoldenCase] = []
    for name in golden_files(root):
        sources = (root / file for file in (name, FLAGS, SCHEMA))
        key = (name, *(path.read_bytes() for path in sources if path.is_file()))
        if key not in _loaded:
            _loaded[key] = _load_file(root, name, flags)
        loaded += _loaded[key]
    return loaded


_loaded: dict[tuple[str | bytes, ...], list[GoldenCase]] = {}
"""The cases of each file by its name and content, the flags and the schema: a process checks the same content once."""


def _load_file(root: Path, name: str, flags: Mapping[str, Flag]) -> list[GoldenCase]:
    data = read_checked(root, name, FORMAT, thinned)
    loaded: list[GoldenCase] = []
    for k, (case, raw) in enumerate(zip(inputs_of(name, data, flags), data["cases"], strict=True)):
        path = f"{name}: $.cases[{k}]"
        held, stored = _dtypes(case), raw["dtypes"]
        wanted = f"expected {held}, the dtypes that hold the embeddings"
        require(stored == held, f"{path}.dtypes", f"{wanted}, got {stored}")
        expected = _expected(f"{path}.expected", case, raw["expected"])
        loaded.append(GoldenCase(case, tuple(raw["flags"]), raw["note"], tuple(held), expected))
    return loaded


def load_flags(root: Path | None = None) -> dict[str, Flag]:
    """Load the explanation of every flag, by its name. Raises as load_golden does."""
    return read_flags(checked_root(root))


def load_errors(root: Path | None = None) -> list[ErrorCase]:
    """Load every error case, once for each loss it applies to. Raises as load_golden does."""
    data = read_checked(checked_root(root), ERRORS, ERRORS_FORMAT)
    good = data["good"]
    for loss in good:
        require(loss in LOSSES, f"{ERRORS}: $.good", f"unknown loss {loss!r}; known: {', '.join(LOSSES)}")
    check_ids(f"{ERRORS}: $.cases", [raw["id"] for raw in data["cases"]])
    cases = []
    for k, raw in enumerate(data["cases"]):
        path, expected = f"{ERRORS}: $.cases[{k}]", raw["expected"]
        for loss in raw["losses"]:
            require(loss in good, path, f"$.good has no call of {loss}")
            known = (*LOSSES[loss].embeddings, LOSSES[loss].targets, *LOSSES[loss].keywords)
            for name in (*raw["changes"], expected["argument"]):
                require(name in known, path, f"{LOSSES[loss].function} has no argument {name!r}")
            arguments = {
                name: _typed(f"{path}.changes.{name}", value)
                for name, value in {**good[loss], **raw["changes"]}.items()
                if value["kind"] != "absent"
            }
            error, words = EXCEPTIONS[expected["error"]], tuple(expected["words"])
            identity = f"{raw['id']}/{loss}"
            cases.append(ErrorCase(identity, loss, arguments, error, expected["argument"], words, raw["note"]))
    return cases


def golden_files(root: Path) -> list[str]:
    """The files of cases, in the order of the catalogue. A loss without cases need not have one.

    Raises:
        FixtureError: the folder holds a file that belongs to no loss.
    """
    files = [loss.golden_file for loss in LOSSES.values()]
    found = sorted(path.relative_to(root).as_posix() for path in (root / FOLDER).glob("*.json"))
    for name in found:
        known = name in (*files, FLAGS, ERRORS)
        require(known, name, f"belongs to no loss of the catalogue ({', '.join(LOSSES)})")
    return [name for name in files if name in found]


def file_of(loss: Loss, cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The JSON object of a loss's golden file.

    Args:
        loss: the loss.
        cases: its cases, as ``as_json`` makes them.
    """
    return {"format": FORMAT, "loss": loss.name, "function": loss.function, "source": loss.source, "cases": list(cases)}


def as_json(case: Case, flags: Sequence[str], note: str, expected: Expected) -> dict[str, Any]:
    """A case and its results as the JSON object of a golden file.

    Args:
        case: the case; its id begins with "golden/".
        flags: names that ``flags.json`` explains.
        note: what the case shows.
        expected: its results.
    """
    values = [_number(x) for x in expected.values]
    results = {
        "loss": values if isinstance(expected.loss, tuple) else values[0],
        "anchors": list(map(_number, expected.anchors.values())),
        "gradient": None if expected.gradient is None else expected.gradient.tolist(),
        "gradient_left_out": expected.gradient_left_out,
        "gradients": {name: matrix.tolist() for name, matrix in expected.other_gradients.items()},
    }
    given = {name: np.asarray(value).tolist() for name, value in {**case.arguments, **case.others}.items()}
    for name in {"labels", "ref_labels"} & given.keys():
        given[name] = [str(label) if abs(label) >= EXACT_INTEGERS else label for label in given[name]]
    return {
        "id": case.id.removeprefix("golden/"),
        "flags": list(flags),
        "note": note,
        "dtypes": _dtypes(case),
        "embeddings": case.embeddings.tolist(),
        "arguments": {name: given[name] for name in sorted(given, key=ARGUMENTS.index)},
        "keywords": dict(case.keywords),
        "expected": {key: value for key, value in results.items() if value or key in ("loss", "anchors", "gradient")},
    }


def _dtypes(case: Case) -> list[str]:
    return [dtype for dtype in DTYPES if case.holds_in(dtype)]


def _number(x: float) -> float | str:
    return x if math.isfinite(x) else repr(x)


def thinned(value: Any) -> Any:
    """JSON whose matrices of numbers have one row; the rest of them is checked faster than a schema does it."""
    if isinstance(value, Mapping):
        return {key: thinned(item) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    if all(isinstance(row, list) and all(type(x) in (int, float) for x in row) for row in value):
        return value[:1]
    return [thinned(item) for item in value]


def read_inputs(root: Path, name: str) -> Any:
    """The content of a golden file, of which what can be computed may be missing or wrong."""

    def loosen(schema: Any) -> Any:
        case = schema["$defs"]["case"]
        case["required"] = [field for field in case["required"] if field not in COMPUTED_FIELDS]
        case["properties"] |= dict.fromkeys(COMPUTED_FIELDS, True)
        return schema

    return read_checked(root, name, FORMAT, thinned, loosen)


def read_flags(root: Path) -> dict[str, Flag]:
    """The explanation of every flag, by its name; the manifest is not checked."""
    data = read_checked(root, FLAGS, FLAGS_FORMAT)
    return {name: Flag(name, **{**flag, "links": tuple(flag["links"])}) for name, flag in data["flags"].items()}


def inputs_of(name: str, data: Any, flags: Mapping[str, Flag]) -> list[Case]:
    """The cases of a file without their results, everything checked that a schema cannot say.

    Args:
        name: of the file.
        data: its content, which the schema allows.
        flags: the explanation of every flag.
    """
    loss = LOSSES[Path(name).stem]
    for key, wanted in (("loss", loss.name), ("function", loss.function)):
        require(data[key] == wanted, f"{name}: $.{key}", f"expected {wanted!r}, got {data[key]!r}")
    check_ids(f"{name}: $.cases", [raw["id"] for raw in data["cases"]])
    cases = []
    for k, raw in enumerate(data["cases"]):
        path, identity = f"{name}: $.cases[{k}]", raw["id"]
        right = identity.startswith(f"{loss.name}/")
        require(right, f"{path}.id", f"expected {loss.name!r}, a slash and a name, got {identity!r}")
        cases.append(_case(path, loss, raw))
        for j, flag in enumerate(raw["flags"]):
            require(flag in flags, f"{path}.flags[{j}]", f"{FLAGS} does not explain {flag!r}")
        untrue = first_untrue(cases[-1], raw["flags"])
        require(untrue is None, f"{path}.flags", str(untrue))
    return cases


def _case(path: str, loss: Loss, raw: Mapping[str, Any]) -> Case:
    """The case of an entry."""
    first = loss.embeddings[0]
    given = {first: raw["embeddings"], **raw["arguments"]}
    _check_arguments(f"{path}.arguments", loss, given)
    keywords = _keywords(f"{path}.keywords", loss, raw["keywords"])
    n = len(given[first])
    enough = n >= 2 or "ref_embeddings" in given or loss.two_towers
    require(enough, f"{path}.embeddings", f"expected at least 2 rows, got {n}")
    sizes = {"2": 2, "N": n, "M": len(given.get("ref_embeddings", given[first]))}
    _array(f"{path}.keywords.anchors", "anchors", keywords.get("anchors", [True] * n), sizes)
    cosine = keywords.get("similarity", loss.keywords["similarity"]) == "cosine"
    matrices: dict[str, Matrix] = {}
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, value in given.items():
        where = f"{path}.embeddings" if name == first else f"{path}.arguments.{name}"
        array = _array(where, name, value, sizes)
        (matrices if "D" in SHAPES[name] else arrays)[name] = array
        for i in np.flatnonzero(~array.any(axis=1)) if cosine and name in matrices else ():
            raise FixtureError(f"{where}[{i}]: a zero vector has no cosine")
    _check_rows(f"{path}.arguments", arrays, n, sizes["M"], alone="ref_embeddings" not in given)
    arguments = {name: array.tolist() for name, array in arrays.items()}
    return Case(f"golden/{raw['id']}", loss.name, matrices.pop(first), arguments, keywords, raw["note"], matrices)


def _check_arguments(path: str, loss: Loss, given: Mapping[str, Any]) -> None:
    """That a case has the arguments of its loss: the positives in one way, and what belongs to references with them."""
    taken = (*loss.embeddings, loss.targets, *loss.keywords)
    for name in given:
        require(name in taken, f"{path}.{name}", f"{loss.function} has no such argument")
    targets = [name for name in TARGETS if name in given]
    wanted = ", ".join(name for name in TARGETS if name in taken)
    right = len(targets) == bool(loss.targets)
    require(right, path, f"expected exactly one of {wanted}, got {', '.join(targets) or 'none'}")
    references = "ref_embeddings" in given
    labels = references and "labels" in given
    for name, allowed in (("ref_labels", labels), ("self_rows", references)):
        require(allowed or name not in given, f"{path}.{name}", "nothing that it belongs to is given")
    for name in (*loss.embeddings, *["ref_labels"] * labels):
        require(name in given, path, f"expected {name!r}, got none")


def _keywords(path: str, loss: Loss, raw: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in raw.items():
        where, choices = f"{path}.{key}", loss.choices.get(key, ())
        require(key in loss.keywords and key not in ARGUMENTS, where, f"{loss.function} has no such keyword")
        wanted = f"one of {', '.join(choices)}" if choices else "a number"
        right = value in choices if choices else not isinstance(value, str)
        require(right, where, f"expected {wanted}, got {value!r}")
        require(value != loss.keywords[key], where, f"{value!r} is the default, which is left out")
    return {key: float(value) if key.endswith("temperature") else value for key, value in raw.items()}


def _array(path: str, name: str, value: Any, sizes: dict[str, int]) -> npt.NDArray[Any]:
    """An array of a case, of the shape that ``SHAPES`` gives it; sizes that are new are entered."""
    matrix = "D" in SHAPES[name]
    if name.endswith("labels"):
        value = [_label(f"{path}[{i}]", x) for i, x in enumerate(value)]
    try:
        array: npt.NDArray[Any] = np.array(value, dtype=np.float64 if matrix else None)
        array = array if len(array) else array.reshape([0] + [sizes.get(axis, 0) for axis in SHAPES[name][1:]])
        for axis, size in zip(SHAPES[name], array.shape, strict=True):
            sizes.setdefault(axis, size)
    except ValueError:
        raise FixtureError(f"{path}: expected a matrix, got rows of different lengths") from None
    for index in np.argwhere(~np.isfinite(array)) if matrix else ():
        raise FixtureError(f"{path}{place(index)}: expected a finite number")
    expected, found = [sizes[axis] for axis in SHAPES[name]], [*array.shape]
    require(found == expected, path, f"expected shape {expected}, got {found}")
    return array


def _label(path: str, value: Any) -> int:
    """A label as an integer. Those that float64 cannot hold apart are written as strings."""
    number = int(value)
    right = isinstance(value, str) == (abs(number) >= EXACT_INTEGERS) and -(2**63) <= number < 2**63
    require(right, path, f"expected an integer below 2^53 or the digits of a larger int64, got {value!r}")
    return number


def _check_rows(path: str, arrays: Mapping[str, npt.NDArray[Any]], n: int, columns: int, alone: bool) -> None:
    """That partners, pairs and self_rows are rows, and that no row is its own partner; alone means no references."""
    own = arrays.get("self_rows", np.arange(n) if alone else np.full(n, -1))
    wrong: dict[str, Any] = {"self_rows": own >= columns}
    if "positive_pairs" in arrays:
        pairs = arrays["positive_pairs"]
        wrong["positive_pairs"] = ((pairs < 0) | (pairs >= n)).any(axis=1)
    if "partners" in arrays:
        partners = arrays["partners"]
        wrong["partners"] = (partners >= columns) | (partners == own)
        if alone:
            wrong["partners"] |= partners[partners % n] != own
    for name, bad in wrong.items():
        more = ", the row itself, or not mutual" if name == "partners" else ""
        for i in np.flatnonzero(bad):
            raise FixtureError(f"{path}.{name}[{i}]: {arrays[name][i].tolist()} is out of range{more}")


def _expected(path: str, case: Case, raw: Mapping[str, Any]) -> Expected:
    counted, undefined = case.counted(), case.undefined()
    nan = [i in undefined for i in counted]
    loss, many = raw["loss"], case.option("reduction") == "none"
    require(
        isinstance(loss, list) == many, f"{path}.loss", f"expected {'a list' if many else 'one value'}, got {loss!r}"
    )
    values = _values(f"{path}.loss", loss if many else [loss], nan if many else [any(nan)])
    anchors = _values(f"{path}.anchors", raw["anchors"], nan)
    gradients: dict[str, Matrix] = {}
    if raw["gradient"] is not None:
        others = raw.get("gradients", {})
        wanted, got = (", ".join(names) or "nothing" for names in (case.others, others))
        right = others.keys() == case.others.keys()
        require(right, f"{path}.gradients", f"expected the gradients by {wanted}, got by {got}")
        for name, rows in {case.first: raw["gradient"], **others}.items():
            where = f"{path}.gradient" if name == case.first else f"{path}.gradients.{name}"
            gradients[name] = _array(where, name, rows, dict(zip(SHAPES[name], case.matrices[name].shape, strict=True)))
    left_out = raw.get("gradient_left_out")
    by_row = dict(zip(counted, anchors, strict=True))
    return Expected(values if many else values[0], by_row, gradients.pop(case.first, None), left_out, gradients)


def _values(path: str, entries: Sequence[Any], nan: Sequence[bool]) -> tuple[float, ...]:
    """Results, finite except where they must be NaN."""
    found = len(entries)
    require(found == len(nan), path, f"expected a list of {len(nan)}, one value per counted anchor, got {found}")
    for entry, undefined in zip(entries, nan, strict=True):
        right = math.isnan(float(entry)) if undefined else math.isfinite(float(entry))
        require(right, path, f"expected {'nan' if undefined else 'a finite number'}, got {entry!r}")
    return tuple(map(float, entries))


def _typed(path: str, value: Mapping[str, Any]) -> Any:
    """An argument of an error case."""
    if value["kind"] != "array":
        entry = value.get("value")
        return float(entry) if value["kind"] == "number" and isinstance(entry, str) else entry
    shape, entries = value["shape"], value["values"]
    count = math.prod(shape)
    require(len(entries) == count, path, f"expected {count} values for shape {shape}, got {len(entries)}")
    return np.array(entries, dtype=value["dtype"]).reshape(shape)
