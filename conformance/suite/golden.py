"""The golden cases of ``fixtures/golden``: loaded and checked.

A case says what goes in and what must come out. Values are stored, never the seeds of a generator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from .cases import Case
from .catalogue import LOSSES, Loss
from .flags import first_untrue
from .records import Expected
from .store import FixtureError, check_format, check_manifest, fixtures_root, read_checked, read_json, schema_validator

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

COMPUTED_FIELDS = ("dtypes", "expected")

SHAPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "embeddings": ("N", "D"),
        "embeddings_a": ("N", "D"),
        "embeddings_b": ("N", "D"),
        "negatives": ("K", "D"),
        "ref_embeddings": ("M", "D"),
        "labels": ("N",),
        "partners": ("N",),
        "positives": ("N", "M"),
        "positive_pairs": ("P", "2"),
        "ref_labels": ("M",),
        "self_rows": ("N",),
        "anchors": ("N",),
    }
)
"""The shape of every array of a case. Without ref_embeddings M is N; K and P are free."""

EXCEPTIONS: Mapping[str, type[Exception]] = MappingProxyType({"type": TypeError, "value": ValueError})


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
    for loss in data["good"]:
        if loss not in LOSSES:
            raise FixtureError(f"{ERRORS}: $.good: unknown loss {loss!r}; known: {', '.join(LOSSES)}")
    _check_ids(f"{ERRORS}: $", data["cases"])
    cases = []
    for k, raw in enumerate(data["cases"]):
        path = f"{ERRORS}: $.cases[{k}]"
        for loss in raw["losses"]:
            if loss not in data["good"]:
                raise FixtureError(f"{path}: $.good has no call of {loss}")
            known = {*LOSSES[loss].embeddings, LOSSES[loss].targets, *LOSSES[loss].keywords}
            for name in (*raw["changes"], raw["expected"]["argument"]):
                if name not in known:
                    raise FixtureError(f"{path}: {LOSSES[loss].function} has no argument {name!r}")
            given = {**data["good"][loss], **raw["changes"]}
            arguments = {
                name: _typed(f"{path}.changes.{name}", value)
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
        "keywords": dict(case.keywords),
        "expected": results,
    }


def _number(x: float) -> float | str:
    return x if math.isfinite(x) else repr(x)


def _integers(value: Any) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_integers(item) for item in value]
    return str(value) if not isinstance(value, bool) and abs(value) >= EXACT_INTEGERS else value


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
    data = read_json(root, name)
    check_format(name, data, FORMAT)
    schema = read_json(root, SCHEMA)
    case = schema["$defs"]["case"]
    case["required"] = [field for field in case["required"] if field not in COMPUTED_FIELDS]
    case["properties"] |= dict.fromkeys(COMPUTED_FIELDS, True)
    schema_validator(schema)(name, thinned(data))
    return data


def read_flags(root: Path) -> dict[str, Flag]:
    """The explanation of every flag, by its name; the manifest is not checked."""
    data = read_checked(root, FLAGS, FLAGS_FORMAT, FLAGS_SCHEMA)
    return {
        name: Flag(name, flag["hunts"], flag["effect"], tuple(flag["links"])) for name, flag in data["flags"].items()
    }


def _cases(name: str, data: Any, flags: Mapping[str, Flag]) -> list[GoldenCase]:
    loaded = []
    for k, (case, raw) in enumerate(zip(inputs_of(name, data, flags), data["cases"], strict=True)):
        path = f"{name}: $.cases[{k}]"
        held = [dtype for dtype in DTYPES if case.holds_in(dtype)]
        if raw["dtypes"] != held:
            raise FixtureError(
                f"{path}.dtypes: expected {held}, the dtypes that hold the embeddings, got {raw['dtypes']}"
            )
        expected = _expected(f"{path}.expected", case, raw["expected"])
        loaded.append(GoldenCase(case, tuple(raw["flags"]), raw["note"], tuple(raw["dtypes"]), expected))
    return loaded


def inputs_of(name: str, data: Any, flags: Mapping[str, Flag]) -> list[Case]:
    """The cases of a file without their results, everything checked that a schema cannot say.

    Args:
        name: of the file.
        data: its content, which the schema allows.
        flags: the explanation of every flag.
    """
    loss = LOSSES[Path(name).stem]
    for key, wanted in (("loss", loss.name), ("function", loss.function)):
        if data[key] != wanted:
            raise FixtureError(f"{name}: $.{key}: expected {wanted!r}, got {data[key]!r}")
    _check_ids(f"{name}: $", data["cases"])
    cases = []
    for k, raw in enumerate(data["cases"]):
        path = f"{name}: $.cases[{k}]"
        if not raw["id"].startswith(f"{loss.name}/"):
            raise FixtureError(f"{path}.id: expected {loss.name!r}, a slash and a name, got {raw['id']!r}")
        cases.append(_case(path, loss, raw))
        for j, flag in enumerate(raw["flags"]):
            if flag not in flags:
                raise FixtureError(f"{path}.flags[{j}]: {FLAGS} does not explain {flag!r}")
        untrue = first_untrue(cases[-1], raw["flags"])
        if untrue is not None:
            raise FixtureError(f"{path}.flags: {untrue}")
    return cases


def _check_ids(path: str, cases: Sequence[Mapping[str, Any]]) -> None:
    seen: set[str] = set()
    for k, raw in enumerate(cases):
        if raw["id"] in seen:
            raise FixtureError(f"{path}.cases[{k}].id: {raw['id']!r} stands twice")
        seen.add(raw["id"])


def _case(path: str, loss: Loss, raw: Mapping[str, Any]) -> Case:
    """The case of an entry."""
    given = {loss.embeddings[0]: raw["embeddings"], **raw["arguments"]}
    _check_arguments(f"{path}.arguments", loss, given)
    keywords = _keywords(f"{path}.keywords", loss, raw["keywords"])
    if len(raw["embeddings"]) < 2 and "ref_embeddings" not in given and not loss.two_towers:
        raise FixtureError(f"{path}.embeddings: expected at least 2 rows, got {len(raw['embeddings'])}")
    sizes = {"2": 2}
    if "ref_embeddings" in given:
        sizes["M"] = len(given["ref_embeddings"])
    arrays: dict[str, Any] = {}
    for name, value in (given | {name: x for name, x in keywords.items() if name == "anchors"}).items():
        group = "keywords." if name == "anchors" else "" if name == loss.embeddings[0] else "arguments."
        where = f"{path}.{group}{'embeddings' if name == loss.embeddings[0] else name}"
        if name.endswith("labels"):
            value = [_label(f"{where}[{i}]", x) for i, x in enumerate(value)]
        arrays[name] = _array(where, name, value, sizes)
        sizes.setdefault("M", sizes["N"])
    _check_rows(f"{path}.arguments", arrays, sizes["N"], sizes["M"])
    matrices = {name: arrays[name] for name in (*loss.embeddings, *loss.matrices) if name in given}
    if keywords.get("similarity", loss.keywords["similarity"]) == "cosine":
        for name, matrix in matrices.items():
            where = "embeddings" if name == loss.embeddings[0] else f"arguments.{name}"
            for i in np.flatnonzero(~matrix.any(axis=1)):
                raise FixtureError(f"{path}.{where}[{i}]: a zero vector has no cosine")
    return Case(
        f"golden/{raw['id']}",
        loss.name,
        matrices.pop(loss.embeddings[0]),
        {
            name: arrays[name].tolist() if name.endswith("labels") else value
            for name, value in raw["arguments"].items()
            if name not in matrices
        },
        keywords,
        why=raw["note"],
        others=matrices,
    )


def _check_arguments(path: str, loss: Loss, given: Mapping[str, Any]) -> None:
    """That a case has the arguments of its loss: the positives in one way, and what belongs to references with them."""
    for name in given:
        if name not in (*loss.embeddings, loss.targets, *loss.keywords):
            raise FixtureError(f"{path}.{name}: {loss.function} has no such argument")
    targets = [name for name in TARGETS if name in given]
    if len(targets) != bool(loss.targets):
        wanted = [name for name in TARGETS if name == loss.targets or name in loss.keywords]
        raise FixtureError(f"{path}: expected exactly one of {', '.join(wanted)}, got {', '.join(targets) or 'none'}")
    references = "ref_embeddings" in given
    belongs = {"ref_labels": references and "labels" in given, "self_rows": references}
    for name, allowed in belongs.items():
        if name in given and not allowed:
            raise FixtureError(f"{path}.{name}: nothing that it belongs to is given")
    needed = [*loss.embeddings, *(["ref_labels"] if belongs["ref_labels"] else [])]
    for name in needed:
        if name not in given:
            raise FixtureError(f"{path}: expected {name!r}, got none")


def _keywords(path: str, loss: Loss, raw: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in raw.items():
        if key not in loss.keywords or key in ARGUMENTS:
            raise FixtureError(f"{path}.{key}: {loss.function} has no such keyword")
        choices = loss.choices.get(key)
        if choices and value not in choices:
            raise FixtureError(f"{path}.{key}: expected one of {', '.join(choices)}, got {value!r}")
        if not choices and isinstance(value, str):
            raise FixtureError(f"{path}.{key}: expected a number, got {value!r}")
        if value == loss.keywords[key]:
            raise FixtureError(f"{path}.{key}: {value!r} is the default, which is left out")
    return {key: float(value) if key.endswith("temperature") else value for key, value in raw.items()}


def _array(path: str, name: str, value: Any, sizes: dict[str, int]) -> npt.NDArray[Any]:
    """An array of a case, of the shape that ``SHAPES`` gives it; sizes that are new are entered."""
    dtype = np.float64 if "D" in SHAPES[name] else None
    try:
        array: npt.NDArray[Any] = np.array(value, dtype=dtype)
    except ValueError:
        raise FixtureError(f"{path}: expected a matrix, got rows of different lengths") from None
    if not len(array) and name == "positive_pairs":
        array = np.zeros((0, 2), dtype=np.int64)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        where = "".join(f"[{i}]" for i in np.argwhere(~np.isfinite(array))[0])
        raise FixtureError(f"{path}{where}: expected a finite number")
    symbols = SHAPES[name]
    expected = tuple(sizes.get(symbol, found) for symbol, found in zip(symbols, array.shape, strict=False))
    if len(array.shape) != len(symbols) or array.shape != expected:
        raise FixtureError(f"{path}: expected shape {list(expected)}, got {list(array.shape)}")
    sizes.update(zip(symbols, array.shape, strict=True))
    return array


def _label(path: str, value: Any) -> int:
    """A label as an integer. Those that float64 cannot hold apart are written as strings."""
    number = int(value)
    if isinstance(value, str) != (abs(number) >= EXACT_INTEGERS) or not -(2**63) <= number < 2**63:
        raise FixtureError(f"{path}: expected an integer below 2^53 or the digits of a larger int64, got {value!r}")
    return number


def _check_rows(path: str, arrays: Mapping[str, npt.NDArray[Any]], n: int, columns: int) -> None:
    """That partners, pairs and self_rows are rows, and that no row is its own partner."""
    self_rows = arrays.get("self_rows", np.full(n, -1))
    wrong: dict[str, Any] = {"self_rows": (self_rows < -1) | (self_rows >= columns)}
    if "positive_pairs" in arrays:
        pairs = arrays["positive_pairs"]
        wrong["positive_pairs"] = ((pairs < 0) | (pairs >= n)).any(axis=1)
    if "partners" in arrays:
        partners = arrays["partners"]
        wrong["partners"] = (partners < 0) | (partners >= columns) | (partners == self_rows)
        if "ref_embeddings" not in arrays and not wrong["partners"].any():
            wrong["partners"] = (partners == np.arange(n)) | (partners[partners] != np.arange(n))
    for name, bad in wrong.items():
        for i in np.flatnonzero(bad):
            value = arrays[name][i].tolist()
            raise FixtureError(
                f"{path}.{name}[{i}]: {value} is out of range{', the row itself, or not mutual' * (name == 'partners')}"
            )


def _expected(path: str, case: Case, raw: Mapping[str, Any]) -> Expected:
    counted, undefined = case.counted(), case.undefined()
    nan = [i in undefined for i in counted]
    many = case.option("reduction") == "none"
    if isinstance(raw["loss"], list) != many:
        raise FixtureError(f"{path}.loss: expected {'a list' if many else 'one value'}, got {raw['loss']!r}")
    values = _values(f"{path}.loss", raw["loss"] if many else [raw["loss"]], nan if many else [any(nan)])
    anchors = _values(f"{path}.anchors", raw["anchors"], nan)
    gradients: dict[str, npt.NDArray[np.float64]] = {}
    if raw["gradient"] is not None:
        stored = {case.first: raw["gradient"], **raw.get("gradients", {})}
        if set(stored) != set(case.matrices):
            wanted, got = (", ".join(set(names) - {case.first}) or "nothing" for names in (case.others, stored))
            raise FixtureError(f"{path}.gradients: expected the gradients by {wanted}, got by {got}")
        for name, rows in stored.items():
            where = f"{path}.gradient" if name == case.first else f"{path}.gradients.{name}"
            sizes = dict(zip(SHAPES[name], case.matrices[name].shape, strict=True))
            gradients[name] = _array(where, name, rows, sizes)
    return Expected(
        loss=values if many else values[0],
        anchors=dict(zip(counted, anchors, strict=True)),
        gradient=gradients.pop(case.first, None),
        gradient_left_out=raw.get("gradient_left_out"),
        other_gradients=gradients,
    )


def _values(path: str, entries: Sequence[Any], nan: Sequence[bool]) -> tuple[float, ...]:
    """Results, finite except where they must be NaN."""
    values = tuple(map(float, entries))
    if len(values) != len(nan):
        raise FixtureError(f"{path}: expected a list of {len(nan)}, one value per counted anchor, got {len(values)}")
    for entry, value, undefined in zip(entries, values, nan, strict=True):
        if math.isnan(value) != undefined or math.isinf(value):
            raise FixtureError(f"{path}: expected {'nan' if undefined else 'a finite number'}, got {entry!r}")
    return values


def _typed(path: str, value: Mapping[str, Any]) -> Any:
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
        raise FixtureError(f"{path}: expected {math.prod(shape)} values for shape {list(shape)}, got {len(entries)}")
    return np.array([float(x) if isinstance(x, str) else x for x in entries], dtype=value["dtype"]).reshape(shape)
