"""The golden cases of ``fixtures/golden``: loaded and checked.

A case says what goes in and what must come out. Values are stored, never the seeds of a generator.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from .cases import MATRICES, Case
from .catalogue import LOSSES, Loss
from .records import Expected
from .store import FixtureError, check_manifest, fixtures_root, read_checked

FORMAT = "pairproof-golden/1"
FLAGS_FORMAT = "pairproof-golden-flags/1"
ERRORS_FORMAT = "pairproof-golden-errors/1"
FOLDER = "golden"
FLAGS = f"{FOLDER}/flags.json"
ERRORS = f"{FOLDER}/errors.json"
SCHEMA = "schema/golden.schema.json"
FLAGS_SCHEMA = "schema/golden_flags.schema.json"
ERRORS_SCHEMA = "schema/golden_errors.schema.json"
DTYPES = ("float64", "float32", "bfloat16", "float16")
EXACT_INTEGERS = 2**53
"""Integers of at least this size are written as strings: many JSON readers know only float64."""

TARGETS = ("labels", "positives", "partners", "positive_pairs")
"""The arguments of which one says who is whose positive."""

ARGUMENTS = (*TARGETS, "embeddings_b", "negatives", "ref_embeddings", "ref_labels", "self_rows")
"""What stands among the arguments of a case, in this order, whether the functions take it by position or by keyword."""

INPUT_FIELDS = ("id", "flags", "note", "embeddings", "arguments", "keywords")
COMPUTED_FIELDS = ("dtypes", "expected")

EXCEPTIONS: Mapping[str, type[Exception]] = MappingProxyType({"type": TypeError, "value": ValueError})

Fail = Callable[[str, str], NoReturn]


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
    root = fixtures_root() if root is None else root
    check_manifest(root)
    flags = read_flags(root)
    loaded: list[GoldenCase] = []
    for name in golden_files(root):
        data = read_checked(root, name, FORMAT, SCHEMA, thinned)
        loaded += _cases(name, data, flags)
    return loaded


def load_flags(root: Path | None = None) -> dict[str, Flag]:
    """Load the explanation of every flag, by its name. Raises as load_golden does."""
    root = fixtures_root() if root is None else root
    check_manifest(root)
    return read_flags(root)


def load_errors(root: Path | None = None) -> list[ErrorCase]:
    """Load every error case, once for each loss it applies to. Raises as load_golden does."""
    root = fixtures_root() if root is None else root
    check_manifest(root)
    data = read_checked(root, ERRORS, ERRORS_FORMAT, ERRORS_SCHEMA)

    def fail(path: str, message: str) -> NoReturn:
        raise FixtureError(f"{ERRORS}: {path}: {message}")

    for loss in data["good"]:
        if loss not in LOSSES:
            fail("$.good", f"unknown loss {loss!r}; known: {', '.join(LOSSES)}")
    cases = []
    seen: set[str] = set()
    for k, raw in enumerate(data["cases"]):
        path = f"$.cases[{k}]"
        if raw["id"] in seen:
            fail(f"{path}.id", f"{raw['id']!r} stands twice")
        seen.add(raw["id"])
        for loss in raw["losses"]:
            if loss not in data["good"]:
                fail(path, f"$.good has no call of {loss}")
            known = {*LOSSES[loss].embeddings, LOSSES[loss].targets, *LOSSES[loss].keywords}
            for name in (*raw["changes"], raw["expected"]["argument"]):
                if name not in known:
                    fail(path, f"{LOSSES[loss].function} has no argument {name!r}")
            given = {**data["good"][loss], **raw["changes"]}
            arguments = {
                name: _typed(f"{path}.changes.{name}", value, fail)
                for name, value in given.items()
                if value["kind"] != "absent"
            }
            cases.append(
                ErrorCase(
                    id=f"{raw['id']}/{loss}",
                    loss=loss,
                    arguments=MappingProxyType(arguments),
                    exception=EXCEPTIONS[raw["expected"]["error"]],
                    argument=raw["expected"]["argument"],
                    words=tuple(raw["expected"]["words"]),
                    note=raw["note"],
                )
            )
    return cases


def golden_files(root: Path) -> list[str]:
    """The files of cases, in the order of the catalogue. A loss without cases need not have one.

    Raises:
        FixtureError: the folder holds a file that belongs to no loss.
    """
    files = {loss.golden_file for loss in LOSSES.values()}
    found = {path.relative_to(root).as_posix() for path in (root / FOLDER).glob("*.json")}
    for name in sorted(found - files - {FLAGS, ERRORS}):
        raise FixtureError(f"{name}: belongs to no loss of the catalogue ({', '.join(LOSSES)})")
    return [loss.golden_file for loss in LOSSES.values() if loss.golden_file in found]


def file_of(loss: Loss, cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The JSON object of a loss's golden file.

    Args:
        loss: the loss.
        cases: its cases, as ``as_json`` makes them.
    """
    return {
        "format": FORMAT,
        "loss": loss.name,
        "function": loss.function,
        "source": loss.source,
        "cases": list(cases),
    }


def as_json(case: Case, flags: Sequence[str], note: str, expected: Expected) -> dict[str, Any]:
    """A case and its results as the JSON object of a golden file.

    Args:
        case: the case; its id begins with "golden/".
        flags: names that ``flags.json`` explains.
        note: what the case shows.
        expected: its results.
    """
    results: dict[str, Any] = {
        "loss": [_number(x) for x in expected.loss] if isinstance(expected.loss, tuple) else _number(expected.loss),
        "anchors": [_number(x) for x in expected.anchors.values()],
        "gradient": None if expected.gradient is None else expected.gradient.tolist(),
    }
    if expected.gradient_left_out is not None:
        results["gradient_left_out"] = expected.gradient_left_out
    if expected.other_gradients:
        results["gradients"] = {name: matrix.tolist() for name, matrix in expected.other_gradients.items()}
    given = {name: _integers(value) for name, value in case.arguments.items()}
    given |= {name: matrix.tolist() for name, matrix in case.others.items()}
    return {
        "id": case.id.removeprefix("golden/"),
        "flags": list(flags),
        "note": note,
        "dtypes": [dtype for dtype in DTYPES if case.holds_in(dtype)],
        "embeddings": case.embeddings.tolist(),
        "arguments": {name: given[name] for name in sorted(given, key=ARGUMENTS.index)},
        "keywords": {name: _plain(value) for name, value in case.keywords.items()},
        "expected": results,
    }


def _number(x: float) -> float | str:
    return x if math.isfinite(x) else repr(x)


def _integers(value: Any) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_integers(item) for item in value]
    return str(value) if not isinstance(value, bool) and abs(value) >= EXACT_INTEGERS else value


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def thinned(data: Any) -> Any:
    """A golden file with one row of each matrix: the numbers are checked here, a hundred times faster than a schema."""
    if not isinstance(data, dict) or not isinstance(data.get("cases"), list):
        return data

    def thin(matrix: Any) -> Any:
        plain = isinstance(matrix, list) and all(isinstance(row, list) for row in matrix)
        return matrix[:1] if plain else matrix

    def thin_in(fields: Any, names: Collection[str]) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {key: thin(value) if key in names else value for key, value in fields.items()}

    cases = []
    for raw in data["cases"]:
        if isinstance(raw, dict):
            raw = thin_in(raw, ("embeddings",))
            if "arguments" in raw:
                raw["arguments"] = thin_in(raw["arguments"], MATRICES)
            if isinstance(raw.get("expected"), dict):
                raw["expected"] = thin_in(raw["expected"], ("gradient",))
                if "gradients" in raw["expected"]:
                    raw["expected"]["gradients"] = thin_in(raw["expected"]["gradients"], MATRICES)
        cases.append(raw)
    return {**data, "cases": cases}


def read_flags(root: Path) -> dict[str, Flag]:
    """The explanation of every flag, by its name; the manifest is not checked."""
    data = read_checked(root, FLAGS, FLAGS_FORMAT, FLAGS_SCHEMA)
    return {
        name: Flag(name, flag["hunts"], flag["effect"], tuple(flag["links"])) for name, flag in data["flags"].items()
    }


def _cases(name: str, data: Any, flags: Mapping[str, Flag]) -> list[GoldenCase]:
    def fail(path: str, message: str) -> NoReturn:
        raise FixtureError(f"{name}: {path}: {message}")

    loaded = []
    for k, (case, raw) in enumerate(zip(inputs_of(name, data), data["cases"], strict=True)):
        path = f"$.cases[{k}]"
        check_flags(name, k, raw["flags"], flags)
        held = [dtype for dtype in DTYPES if case.holds_in(dtype)]
        if raw["dtypes"] != held:
            fail(f"{path}.dtypes", f"expected {held}, the dtypes that hold the embeddings, got {raw['dtypes']}")
        expected = _expected(f"{path}.expected", case, raw["expected"], fail)
        loaded.append(GoldenCase(case, tuple(raw["flags"]), raw["note"], tuple(raw["dtypes"]), expected))
    return loaded


def check_flags(name: str, k: int, used: Sequence[str], flags: Mapping[str, Flag]) -> None:
    """Raise a FixtureError where a flag of a file's case k is not explained."""
    for j, flag in enumerate(used):
        if flag not in flags:
            raise FixtureError(f"{name}: $.cases[{k}].flags[{j}]: {FLAGS} does not explain {flag!r}")


def inputs_of(name: str, data: Any) -> list[Case]:
    """The cases of a file without their results, everything checked that a schema cannot say."""

    def fail(path: str, message: str) -> NoReturn:
        raise FixtureError(f"{name}: {path}: {message}")

    stem = Path(name).stem
    if data.get("loss") != stem:
        fail("$.loss", f"expected {stem!r}, the file's stem, got {data.get('loss')!r}")
    loss = LOSSES[stem]
    if data.get("function") != loss.function:
        fail("$.function", f"expected {loss.function!r}, got {data.get('function')!r}")
    if not isinstance(data.get("cases"), list):
        fail("$.cases", "expected a list")
    cases = []
    seen: set[str] = set()
    for k, raw in enumerate(data["cases"]):
        path = f"$.cases[{k}]"
        if not isinstance(raw, Mapping):
            fail(path, "expected an object")
        for key in INPUT_FIELDS:
            if key not in raw:
                fail(path, f"expected {key!r}, got none")
        for key in raw:
            if key not in (*INPUT_FIELDS, *COMPUTED_FIELDS):
                fail(f"{path}.{key}", "no case has such a field")
        identity = raw["id"]
        if not isinstance(identity, str) or not re.fullmatch(f"{stem}/[a-z0-9]+(-[a-z0-9]+)*", identity):
            fail(f"{path}.id", f"expected {stem!r}, a slash and a name in small letters and hyphens, got {identity!r}")
        if identity in seen:
            fail(f"{path}.id", f"{identity!r} stands twice")
        seen.add(identity)
        embeddings = _matrix(f"{path}.embeddings", raw["embeddings"], fail)
        given = raw["arguments"] if isinstance(raw["arguments"], Mapping) else {}
        if len(embeddings) < 2 and not any(name in given for name in MATRICES):
            fail(f"{path}.embeddings", f"expected at least 2 rows, got {len(embeddings)}")
        keywords = _keywords(f"{path}.keywords", stem, raw["keywords"], len(embeddings), fail)
        others = _others(f"{path}.arguments", stem, raw["arguments"], embeddings.shape, fail)
        columns = len(others.get("ref_embeddings", embeddings))
        arguments = _arguments(f"{path}.arguments", stem, raw["arguments"], len(embeddings), columns, fail)
        case = Case(f"golden/{identity}", stem, embeddings, arguments, keywords, why=raw["note"], others=others)
        if case.option("similarity") == "cosine":
            for where, matrix in {"embeddings": embeddings, **{f"arguments.{k}": v for k, v in others.items()}}.items():
                for i, row in enumerate(matrix):
                    if not row.any():
                        fail(f"{path}.{where}[{i}]", "a zero vector has no cosine")
        cases.append(case)
    return cases


def _matrix(path: str, rows: Any, fail: Fail) -> npt.NDArray[np.float64]:
    """Finite numbers [N, D]."""
    if not isinstance(rows, list) or not rows:
        fail(path, "expected a matrix of numbers")
    for i, row in enumerate(rows):
        if not isinstance(row, list) or not row:
            fail(f"{path}[{i}]", "expected a row of numbers")
        if len(row) != len(rows[0]):
            fail(f"{path}[{i}]", f"has {len(row)} entries, the first row {len(rows[0])}")
        for d, x in enumerate(row):
            if type(x) is not float and type(x) is not int:
                fail(f"{path}[{i}][{d}]", f"expected a number, got {x!r}")
            if not math.isfinite(x):
                fail(f"{path}[{i}][{d}]", f"expected a finite number, got {x!r}")
    return np.array(rows, dtype=np.float64)


def _keywords(path: str, name: str, raw: Any, n: int, fail: Fail) -> dict[str, Any]:
    loss = LOSSES[name]
    if not isinstance(raw, Mapping):
        fail(path, "expected an object")
    keywords: dict[str, Any] = {}
    for key, value in raw.items():
        where = f"{path}.{key}"
        if key not in loss.keywords or key in ARGUMENTS:
            fail(where, f"{loss.function} has no such keyword")
        if key in loss.choices:
            if value not in loss.choices[key]:
                fail(where, f"expected one of {', '.join(loss.choices[key])}, got {value!r}")
        elif key == "anchors":
            if not isinstance(value, list) or len(value) != n or any(type(x) is not bool for x in value):
                fail(where, f"expected {n} booleans")
        elif type(value) not in (int, float) or not (math.isfinite(value) and value > 0):
            fail(where, f"expected a positive finite number, got {value!r}")
        if value == loss.keywords[key]:
            fail(where, f"{value!r} is the default, which is left out")
        keywords[key] = float(value) if key.endswith("temperature") else value
    return keywords


def _others(path: str, name: str, raw: Any, shape: tuple[int, ...], fail: Fail) -> dict[str, npt.NDArray[np.float64]]:
    """The float matrices beside the embeddings, by name."""
    loss = LOSSES[name]
    if not isinstance(raw, Mapping):
        fail(path, "expected an object")
    for key in loss.embeddings[1:]:
        if key not in raw:
            fail(path, f"expected {key!r}, got none")
    others: dict[str, npt.NDArray[np.float64]] = {}
    for key in MATRICES:
        if key not in raw:
            continue
        if key not in (*loss.embeddings, *loss.matrices):
            fail(f"{path}.{key}", f"{loss.function} has no such argument")
        others[key] = _matrix(f"{path}.{key}", raw[key], fail)
        wanted = shape if key in loss.embeddings else (len(others[key]), shape[1])
        if others[key].shape != wanted:
            fail(f"{path}.{key}", f"expected shape {list(wanted)}, got {list(others[key].shape)}")
    return others


def _arguments(path: str, name: str, raw: Mapping[str, Any], n: int, columns: int, fail: Fail) -> dict[str, Any]:
    """Who is whose positive, and which reference is which anchor; ``columns`` rows are contrasted with."""
    loss = LOSSES[name]
    allowed = [key for key in (loss.targets, "positives") if key and (key == loss.targets or key in loss.keywords)]
    given = [key for key in raw if key in TARGETS]
    if len(given) != (1 if allowed else 0) or any(key not in allowed for key in given):
        fail(path, f"expected one of {', '.join(allowed)}" if allowed else f"{loss.function} takes no {given[0]}")
    further = []
    if "ref_embeddings" in raw:
        further = ["ref_labels"] if given == ["labels"] else []
        for key in further:
            if key not in raw:
                fail(path, f"expected {key!r} with ref_embeddings and labels, got none")
        further.append("self_rows")
    found: dict[str, Any] = {}
    for key, value in raw.items():
        if key in MATRICES:
            continue
        if key not in (*given, *further):
            fail(f"{path}.{key}", "no such argument, or nothing that it belongs to")
        found[key] = _argument(f"{path}.{key}", key, value, n, columns, raw, fail)
    return found


def _argument(path: str, key: str, value: Any, n: int, columns: int, raw: Mapping[str, Any], fail: Fail) -> Any:
    references = "ref_embeddings" in raw
    if not isinstance(value, list):
        fail(path, "expected a list")
    if key == "positive_pairs":
        for k, pair in enumerate(value):
            good = isinstance(pair, list) and len(pair) == 2 and all(type(x) is int and 0 <= x < n for x in pair)
            if not good:
                fail(f"{path}[{k}]", f"expected two rows in the range 0 to {n - 1}, got {pair!r}")
        return value
    count, what = (columns, "reference") if key == "ref_labels" else (n, "embedding")
    if len(value) != count:
        fail(path, f"expected one entry per {what}, {count}, got {len(value)}")
    for i, x in enumerate(value):
        where = f"{path}[{i}]"
        if key == "positives":
            if not isinstance(x, list) or len(x) != columns or any(type(entry) is not bool for entry in x):
                fail(where, f"expected {columns} booleans")
        elif key == "self_rows":
            if type(x) is not int or not -1 <= x < columns:
                fail(where, f"expected a row in the range -1 to {columns - 1}, got {x!r}")
        elif key == "partners" and references:
            own = raw.get("self_rows", [-1] * n)
            if type(x) is not int or not 0 <= x < columns or (isinstance(own, list) and own[i : i + 1] == [x]):
                fail(where, f"{x!r} is out of range, or the row itself")
        elif key == "partners":
            if type(x) is not int or not 0 <= x < n or x == i or value[x] != i:
                fail(where, f"{x!r} is out of range, the row itself, or not mutual")
        elif isinstance(x, str):
            digits = re.fullmatch("-?[1-9][0-9]*", x)
            if not digits or abs(int(x)) < EXACT_INTEGERS or not -(2**63) <= int(x) < 2**63:
                fail(where, f"expected the digits of an int64 of 2^53 or beyond, got {x!r}")
        elif type(x) is not int or abs(x) >= EXACT_INTEGERS:
            fail(where, f"expected an integer below 2^53 or its digits in a string, got {x!r}")
    return [int(x) for x in value] if key.endswith("labels") else value


def _expected(path: str, case: Case, raw: Mapping[str, Any], fail: Fail) -> Expected:
    counted = case.counted()
    nan = case.undefined()
    undefined = [i in nan for i in counted]

    def value(where: str, x: Any, nan: bool) -> float:
        number = float(x)
        if nan != math.isnan(number) or (not nan and not math.isfinite(number)):
            fail(where, f"expected {'nan' if nan else 'a finite number'}, got {x!r}")
        return number

    def values(where: str, entries: Any) -> tuple[float, ...]:
        if not isinstance(entries, list) or len(entries) != len(counted):
            fail(where, f"expected a list of {len(counted)}, one value per counted anchor")
        return tuple(value(f"{where}[{k}]", x, nan) for k, (x, nan) in enumerate(zip(entries, undefined, strict=True)))

    loss: float | tuple[float, ...]
    if case.option("reduction") == "none":
        loss = values(f"{path}.loss", raw["loss"])
    elif isinstance(raw["loss"], list):
        fail(f"{path}.loss", "expected one value, got a list")
    else:
        loss = value(f"{path}.loss", raw["loss"], any(undefined))
    left_out = raw.get("gradient_left_out")
    if (raw["gradient"] is None) != (left_out is not None):
        fail(f"{path}.gradient", "expected a gradient, or null and gradient_left_out with the reason")
    gradients: dict[str, npt.NDArray[np.float64]] = {}
    if raw["gradient"] is not None:
        by_others = raw.get("gradients", {})
        if set(by_others) != set(case.others):
            named = ", ".join(case.others) or "nothing"
            fail(f"{path}.gradients", f"expected the gradients by {named}, got {', '.join(by_others) or 'none'}")
        for where, name in {"gradient": case.first, **{f"gradients.{name}": name for name in case.others}}.items():
            stored = raw["gradient"] if name == case.first else by_others[name]
            gradients[name] = _matrix(f"{path}.{where}", stored, fail)
            shape = case.matrices[name].shape
            if gradients[name].shape != shape:
                fail(f"{path}.{where}", f"expected shape {list(shape)}, got {list(gradients[name].shape)}")
    return Expected(
        loss=loss,
        anchors=dict(zip(counted, values(f"{path}.anchors", raw["anchors"]), strict=True)),
        gradient=gradients.pop(case.first, None),
        gradient_left_out=left_out,
        other_gradients=gradients,
    )


def _typed(path: str, value: Mapping[str, Any], fail: Fail) -> Any:
    """An argument of an error case."""
    kind = value["kind"]
    if kind == "none":
        return None
    if kind == "number":
        return float(value["value"]) if isinstance(value["value"], str) else value["value"]
    if kind != "array":
        return value["value"]
    shape = tuple(value["shape"])
    entries = value["values"]
    if len(entries) != math.prod(shape):
        fail(path, f"expected {math.prod(shape)} values for shape {list(shape)}, got {len(entries)}")
    return np.array([float(x) if isinstance(x, str) else x for x in entries], dtype=value["dtype"]).reshape(shape)
