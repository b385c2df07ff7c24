"""Load and check the golden cases of ``fixtures/golden``.

A golden case stores the inputs and the expected results of one evaluation. A large matrix may be given by a formula
over integers (``formulas.py``); then only a part of its gradient and of the anchors is stored.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from decimal import ROUND_CEILING, Context, Decimal, localcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pairproof.reference import checks

from .cases import IDS, SIGNIFICAND, Case, once
from .catalogue import IGNORED, LOSSES, TOWER_TARGETS, WEIGHTS, Loss, choice_of
from .flags import first_untrue
from .formulas import PERIODS, Formula, stored_rows, stored_rows_of
from .levels import Level
from .records import Expected, Matrix, Rounding
from .store import (
    FixtureError,
    check_ids,
    check_schema,
    checked_root,
    content_key,
    damage_of,
    expect,
    place,
    read_checked,
    read_json,
    require,
)

FORMAT = "pairproof-golden/2"
FLAGS_FORMAT = "pairproof-golden-flags/1"
ERRORS_FORMAT = "pairproof-golden-errors/1"
FOLDER = "golden"
FLAGS = f"{FOLDER}/flags.json"
SCHEMA = "schema/golden.schema.json"
ERRORS = f"{FOLDER}/errors.json"
DTYPES = ("float64", "float32", "bfloat16", "float16")
EXACT_INTEGERS = 2**53
"""Labels of this magnitude or more are stored as strings, because many JSON readers convert numbers to float64."""

TARGETS = ("labels", "positives", "partners", "positive_pairs")
"""The arguments that give the positives. A case has exactly one of them; with two towers, at most one."""

ARGUMENTS = (
    *(*TARGETS, "embeddings_b", "negatives", "hard_negatives", "ref_embeddings", "ref_labels", "self_rows"),
    *(*IGNORED, *WEIGHTS),
)
"""The fields of ``arguments`` in the file, in order."""

ALWAYS = ("loss", "anchors", "gradient")
"""The fields of ``expected`` that every case has."""

COMPUTED_FIELDS = ("dtypes", "expected", "rounding")
"""The fields of a case that ``make fixtures`` computes."""

SHAPES: Mapping[str, str] = {
    **dict.fromkeys(("embeddings", "embeddings_a"), "ND"),
    **dict.fromkeys(("embeddings_b", "ref_embeddings"), "MD"),
    **dict.fromkeys(("negatives", "hard_negatives"), "KD"),
    **dict.fromkeys(("positives", "ignored", "positive_weights", "negative_weights"), "NM"),
    **dict.fromkeys(("labels", "partners", "self_rows", "anchors", "ignored_ids", "anchor_weights"), "N"),
    **dict.fromkeys(("ref_labels", "ref_ignored_ids"), "M"),
    "positive_pairs": "P2",
}
"""The shape of every array of a case, one character per axis.

* M is the number of references, or of rows of the second tower. M = N for a batch without references, and for two
  towers whose positives are not given.
* K and P are arbitrary. For hard_negatives, K = N H: a loss takes them as [N, H, D].
* "2" has two entries.
"""

WHOLE_NUMBERS = ("labels", "ref_labels", *IDS)
"""The arguments whose integers are only compared for equality."""

ROUNDING_DIGITS = 3
"""Bounds on rounding errors are stored with this many digits, rounded up."""

ROUNDING_UNIT = 2.0 ** -SIGNIFICAND["float32"]
"""The unit of the stored bounds is the unit roundoff; that of float32 is the unit of those in a ``Rounding``."""

EXCEPTIONS: Mapping[str, type[Exception]] = {"type": TypeError, "value": ValueError}


@dataclass(frozen=True)
class Flag:
    """The purpose of a group of cases.

    Attributes:
        name: the flag.
        level: what the cases with this flag require of an implementation.
        hunts: the mistake that these cases detect, or the property that they have.
        effect: the effect of the mistake.
        links: where the mistake was made or discussed.
    """

    name: str
    level: Level
    hunts: str
    effect: str
    links: tuple[str, ...]


@dataclass(frozen=True)
class GoldenCase:
    """A case with its proved results.

    Attributes:
        case: the case; its id is "golden/" followed by the stable id in the file.
        flags: names of flags, which ``load_flags`` explains.
        note: the purpose of the case, in one sentence.
        dtypes: the dtypes in which all its matrices are exactly representable.
        expected: the expected results.
        formulas: the formulas of the matrices that are not stored as values, by name.
    """

    case: Case
    flags: tuple[str, ...]
    note: str
    dtypes: tuple[str, ...]
    expected: Expected
    formulas: Mapping[str, Formula] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The case's id."""
        return self.case.id


@dataclass(frozen=True)
class ErrorCase:
    """A call that must raise an exception.

    Attributes:
        id: stable name.
        loss: short name in the catalogue.
        arguments: every argument by name; arrays are numpy arrays.
        exception: type of the exception.
        argument: name of the wrong argument; the message must begin with it.
        words: texts that the message must contain.
        compiled: the result if the values of arrays are not checked, as in a compiled graph: "error" (the same
            exception) or "nan" (NaN, or an exception).
    """

    id: str
    loss: str
    arguments: Mapping[str, Any]
    exception: type[Exception]
    argument: str
    words: tuple[str, ...]
    compiled: Literal["error", "nan"]


def load_golden(root: Path | None = None, losses: Collection[str] = ()) -> list[GoldenCase]:
    """Load and check the golden cases: losses in the order of the catalogue, cases in that of their file.

    Args:
        root: a folder of fixtures; by default the installed one.
        losses: short names of the losses whose cases are loaded; by default all.

    Raises:
        FixtureError: a file is altered, missing or extra, does not match the schema, or is inconsistent. The message
            names the file and the field.
        ImportError: the folder is not the installed one, and jsonschema is not installed.
    """
    root = checked_root(root)
    flags = read_flags(root)
    loaded: list[GoldenCase] = []
    for name in golden_files(root):
        if losses and Path(name).stem not in losses:
            continue
        key = content_key(root, (name, FLAGS, SCHEMA))
        if key not in _loaded:
            with damage_of(name):
                _loaded[key] = list(_load_file(root, name, flags))
        loaded += _loaded[key]
    return loaded


_loaded: dict[tuple[str | bool | bytes, ...], list[GoldenCase]] = {}


def _load_file(root: Path, name: str, flags: Mapping[str, Flag]) -> Iterator[GoldenCase]:
    data = read_checked(root, name, FORMAT)
    for k, (case, raw) in enumerate(zip(inputs_of(name, data, flags), data["cases"], strict=True)):
        path, dtypes, stored = f"{name}: $.cases[{k}]", _dtypes(case), raw["dtypes"]
        expect(stored == dtypes, f"{path}.dtypes", f"{dtypes}, the dtypes that represent the matrices exactly", stored)
        formulas = formulas_of(case, raw)
        expected = _expected(f"{path}.expected", case, raw["expected"], formulas)
        if "rounding" in raw:
            known_rounding(case)["float32", ""] = _rounding(f"{path}.rounding", case, raw["rounding"], expected)
        yield GoldenCase(case, tuple(raw["flags"]), raw["note"], tuple(dtypes), expected, formulas)


def formulas_of(case: Case, raw: Mapping[str, Any]) -> dict[str, Formula]:
    """The formulas of the matrices of a case that its JSON object does not store as values, by name."""
    given = {case.first: raw["embeddings"], **raw["arguments"]}
    return {name: Formula(**given[name]) for name in case.matrices if isinstance(given[name], Mapping)}


@once
def known_rounding(case: Case) -> dict[tuple[str, str], Rounding]:
    """The bounds on the rounding errors of a case that are known, those in its file included.

    The keys are the accumulating dtype and, or "", the dtype to which derivatives are rounded.
    """
    return {}


def load_flags(root: Path | None = None) -> dict[str, Flag]:
    """Load the explanation of every flag, by name. Raises the same errors as ``load_golden``."""
    return read_flags(checked_root(root))


def load_errors(root: Path | None = None) -> list[ErrorCase]:
    """Load every error case, once for each of its losses. Raises the same errors as ``load_golden``."""
    data = read_checked(checked_root(root), ERRORS, ERRORS_FORMAT)
    good = data["good"]
    for loss in good:
        require(loss in LOSSES, f"{ERRORS}: $.good", f"unknown loss {loss!r}; known: {', '.join(LOSSES)}")
    check_ids(f"{ERRORS}: $.cases", [raw["id"] for raw in data["cases"]])
    with damage_of(ERRORS):
        return list(_error_cases(data["cases"], good))


def _error_cases(entries: Sequence[Mapping[str, Any]], good: Mapping[str, Any]) -> Iterator[ErrorCase]:
    for k, raw in enumerate(entries):
        path, expected = f"{ERRORS}: $.cases[{k}]", raw["expected"]
        error, argument, words = EXCEPTIONS[expected["error"]], expected["argument"], tuple(expected["words"])
        for loss in raw["losses"]:
            require(loss in good, path, f"$.good has no call of {loss}")
            known = (*LOSSES[loss].embeddings, LOSSES[loss].targets, *LOSSES[loss].keywords)
            for name in (*raw["changes"], argument):
                require(name in known, path, f"{LOSSES[loss].function} has no argument {name!r}")
            given = {name: x for name, x in {**good[loss], **raw["changes"]}.items() if x["kind"] != "absent"}
            arguments = {name: _typed(f"{path}.changes.{name}", value) for name, value in given.items()}
            yield ErrorCase(f"{raw['id']}/{loss}", loss, arguments, error, argument, words, expected["compiled"])


def golden_files(root: Path) -> list[str]:
    """The files of golden cases, in the order of the catalogue. A loss without cases may have no file.

    Raises:
        FixtureError: the folder has a file that belongs to no loss of the catalogue.
    """
    files = [loss.golden_file for loss in LOSSES.values()]
    found = sorted(path.relative_to(root).as_posix() for path in (root / FOLDER).glob("*.json"))
    for name in found:
        require(name in (*files, FLAGS, ERRORS), name, f"belongs to no loss of the catalogue ({', '.join(LOSSES)})")
    return [name for name in files if name in found]


def file_of(loss: Loss, cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The JSON object of a loss's golden file. The ``cases`` are returned by ``as_json``."""
    return {"format": FORMAT, "loss": loss.name, "function": loss.function, "source": loss.source, "cases": list(cases)}


def as_json(
    case: Case,
    flags: Sequence[str],
    note: str,
    expected: Expected,
    formulas: Mapping[str, Formula] = MappingProxyType({}),
    rounding: Rounding | None = None,
) -> dict[str, Any]:
    """The JSON object of a golden case; see ``GoldenCase`` for the arguments.

    ``rounding`` are the bounds on the rounding errors in float32. They are not stored if they depend on the dtype.
    """

    def gradient(name: str, matrix: Matrix) -> Any:
        if name not in expected.products:
            return matrix.tolist()
        rows = stored_rows_of(case.matrices[name])
        return {"rows": rows, "values": matrix[rows].tolist(), "products": expected.products[name].tolist()}

    values, anchors = ([_number(x) for x in found] for found in (expected.values, expected.anchors.values()))
    results = {
        "loss": values if isinstance(expected.loss, tuple) else values[0],
        "anchors": {"rows": [*expected.anchors], "values": anchors} if case.first in formulas else anchors,
        "gradient": None if expected.gradient is None else gradient(case.first, expected.gradient),
        "gradient_left_out": expected.gradient_left_out,
        "gradients": {name: gradient(name, matrix) for name, matrix in expected.other_gradients.items()},
        "temperature_gradient": expected.temperature_gradient,
        "bias_gradient": expected.bias_gradient,
    }
    given = {name: np.asarray(value).tolist() for name, value in {**case.arguments, **case.matrices}.items()}
    given |= {name: asdict(formula) for name, formula in formulas.items()}
    for name in given.keys() & {*WHOLE_NUMBERS}:
        given[name] = [str(label) if abs(label) >= EXACT_INTEGERS else label for label in given[name]]
    stored = {
        "id": case.id.removeprefix("golden/"),
        "flags": list(flags),
        "note": note,
        "dtypes": _dtypes(case),
        "embeddings": given.pop(case.first),
        "arguments": {name: given[name] for name in sorted(given, key=ARGUMENTS.index)},
        "keywords": dict(case.keywords),
        "expected": {key: value for key, value in results.items() if key in ALWAYS or value not in (None, {})},
    }
    if rounding and rounding.linear:
        stored["rounding"] = {
            "loss": [*map(_rounded_up, rounding.values)],
            "anchors": [_rounded_up(rounding.anchors[i]) for i in expected.anchors],
        }
        if expected.gradient is not None:
            rows = {name: [*map(_rounded_up, rows)] for name, rows in rounding.rows.items()}
            stored["rounding"]["rows"] = rows
    return stored


def _rounded_up(error: float) -> float | int:
    """A bound in units of the unit roundoff, rounded up to a number with few digits.

    Bounds of different machines differ by up to 10^-11 of their size. A number that is just above a step is rounded
    down, so that they store the same.
    """
    with localcontext(Context(prec=ROUNDING_DIGITS, rounding=ROUND_CEILING)):
        found = +Decimal(float(error) / ROUNDING_UNIT * (1 - 1e-9))
    return int(found) if found == int(found) and found < 10**6 else float(found)


def _dtypes(case: Case) -> list[str]:
    return [dtype for dtype in DTYPES if case.holds_in(dtype)]


def _number(x: float) -> float | str:
    return x if math.isfinite(x) else repr(x)


def read_inputs(root: Path, name: str) -> Any:
    """Read a golden file whose computed fields may be missing or wrong. Raises the same errors as ``read_checked``."""

    def loosen(schema: Any) -> Any:
        case = schema["$defs"]["case"]
        case["required"] = [field for field in case["required"] if field not in COMPUTED_FIELDS]
        case["properties"] |= dict.fromkeys(COMPUTED_FIELDS, True)
        return schema

    data = read_json(root, name)
    check_schema(root, name, data, FORMAT, loosen)
    return data


def read_flags(root: Path) -> dict[str, Flag]:
    """Read the explanation of every flag, by name, without checking the manifest."""
    data = read_checked(root, FLAGS, FLAGS_FORMAT)
    return {
        name: Flag(name, Level(flag["level"]), flag["hunts"], flag["effect"], tuple(flag["links"]))
        for name, flag in data["flags"].items()
    }


def inputs_of(name: str, data: Any, flags: Mapping[str, Flag]) -> list[Case]:
    """The cases of a golden file without their results. Checks what a schema cannot express.

    Args:
        name: name of the file, relative to the folder of fixtures.
        data: content of the file, valid according to the schema.
        flags: the explanation of every flag.

    Raises:
        FixtureError: the content is inconsistent.
    """
    loss = LOSSES[Path(name).stem]
    for key, wanted in (("loss", loss.name), ("function", loss.function)):
        expect(data[key] == wanted, f"{name}: $.{key}", repr(wanted), repr(data[key]))
    check_ids(f"{name}: $.cases", [raw["id"] for raw in data["cases"]])
    cases = []
    for k, raw in enumerate(data["cases"]):
        path, prefix = f"{name}: $.cases[{k}]", f"{loss.name}/"
        expect(raw["id"].startswith(prefix), f"{path}.id", f"{prefix!r} and a name", repr(raw["id"]))
        cases.append(_case(path, loss, raw))
        for j, flag in enumerate(raw["flags"]):
            require(flag in flags, f"{path}.flags[{j}]", f"{FLAGS} does not explain {flag!r}")
        untrue = first_untrue(cases[-1], raw["flags"])
        require(untrue is None, f"{path}.flags", str(untrue))
    return cases


def _case(path: str, loss: Loss, raw: Mapping[str, Any]) -> Case:
    """Build the case of an entry, without its results."""
    first = loss.embeddings[0]
    given = {
        name: Formula(**value).matrix() if isinstance(value, Mapping) else value
        for name, value in {first: raw["embeddings"], **raw["arguments"]}.items()
    }
    keywords = _keywords(f"{path}.keywords", loss, raw["keywords"], raw["arguments"])
    cosine = keywords.get("similarity", loss.keywords["similarity"]) == "cosine"
    cosine = cosine and keywords.get("zero_row", "error") == "error"
    arrays = check_arguments(path, loss, given, cosine)
    matrices = {name: arrays.pop(name) for name in list(arrays) if "D" in SHAPES[name]}
    n = len(matrices[first])
    _array(f"{path}.keywords.anchors", "anchors", keywords.get("anchors", [True] * n), {"N": n})
    arguments = {name: array.tolist() for name, array in arrays.items()}
    return Case(f"golden/{raw['id']}", loss.name, matrices.pop(first), arguments, keywords, matrices)


def check_arguments(path: str, loss: Loss, given: Mapping[str, Any], cosine: bool) -> dict[str, npt.NDArray[Any]]:
    """Check the arguments of a loss in a fixture: their names, shapes, numbers and rows.

    Args:
        path: the file and the field of the case or call.
        loss: the loss.
        given: the embeddings and the other arguments, by name, as nested sequences.
        cosine: whether to refuse zero vectors.

    Returns:
        The arguments as arrays.

    Raises:
        FixtureError: an argument is unknown, missing or invalid.
    """
    taken, first = (*loss.embeddings, loss.targets, *loss.keywords), loss.embeddings[0]
    for name in given:
        require(name in taken, f"{path}.arguments.{name}", f"{loss.function} has no such argument")
    for name in loss.embeddings:
        require(name in given, f"{path}.arguments", f"expected {name!r}, got none")
    targets, known = ([name for name in TARGETS if name in names] for names in (given, taken))
    least = bool(loss.targets)
    wanted, got = f"{'exactly' if least else 'at most'} one of {', '.join(known)}", ", ".join(targets) or "none"
    expect(least <= len(targets) <= bool(known), f"{path}.arguments", wanted, got)
    within = "ref_embeddings" not in given and not loss.two_towers
    labels = "labels" in given and not within
    others = next((name for name in ("ref_embeddings", "embeddings_b") if name in given and (least or targets)), first)
    n, m = len(given[first]), len(given[others])
    require("self_rows" not in given or not within, f"{path}.arguments.self_rows", "requires ref_embeddings")
    wanted = "expected if and only if labels and either ref_embeddings or embeddings_b are given"
    alike = labels and loss.two_towers and n == m  # both towers have the same labels by default
    require(alike or ("ref_labels" in given) == labels, f"{path}.arguments.ref_labels", wanted)
    wanted = "expected if and only if ignored_ids and either ref_embeddings or embeddings_b are given"
    ids = "ignored_ids" in given and not within
    alike = ids and loss.two_towers and n == m  # both towers have the same ids by default
    require(alike or ("ref_ignored_ids" in given) == ids, f"{path}.arguments.ref_ignored_ids", wanted)
    for name in {*IGNORED, *TOWER_TARGETS} & given.keys() if "negatives" in given else ():
        raise FixtureError(f"{path}.arguments.{name}: not allowed with negatives")
    for name in WEIGHTS.keys() & given.keys():
        given = {**given, name: np.array(given[name], dtype=np.float64)}
    fewest = 2 if within and loss.positives_by == "partners" else 1
    expect(n >= fewest, f"{path}.embeddings", f"at least {fewest} rows", n)
    hard = len(given.get("hard_negatives", ())) if n else 0
    expect(not (n and hard % n), f"{path}.arguments.hard_negatives", f"a multiple of {n} rows", hard)
    sizes, arrays = {"2": 2, "N": n, "M": m}, {}
    for name, value in given.items():
        where = f"{path}.embeddings" if name == first else f"{path}.arguments.{name}"
        ranked = name == "ignored" and "directions" in loss.keywords  # the number of columns depends on the directions
        arrays[name] = _array(where, name, value, {"N": n} if ranked else sizes)
        for i in np.flatnonzero(~arrays[name].any(axis=1)) if cosine and "D" in SHAPES[name] else ():
            raise FixtureError(f"{where}[{i}]: a zero vector has no cosine similarity")
    try:
        own = list(range(n)) if within else checks.check_self_rows(arrays.get("self_rows"), n, m)
        if "partners" in arrays:
            checks.check_partners(arrays["partners"], n, m, own, mutual=within)
        if "ignored" in arrays and loss.positives_by in ("partners", "towers") and {"partners"} >= {*targets}:
            partners = arrays["partners"].tolist() if "partners" in arrays else range(n)
            checks.check_kept(arrays["ignored"].tolist(), partners)
        for name in WEIGHTS.keys() & arrays.keys():
            checks.check_weights(name, arrays[name], arrays[name].shape, per="pair")
        if "positive_pairs" in arrays:
            checks.check_positive_pairs(arrays["positive_pairs"], n)
    except (TypeError, ValueError) as error:
        raise FixtureError(f"{path}.arguments.{error}") from error
    return arrays


def _keywords(path: str, loss: Loss, raw: Mapping[str, Any], arguments: Collection[str]) -> dict[str, Any]:
    for key, value in raw.items():
        where, choices = f"{path}.{key}", loss.choices.get(key, ())
        require(key in loss.keywords and key not in ARGUMENTS, where, f"{loss.function} has no such keyword")
        wanted = f"one of {', '.join(map(str, choices))}" if choices else "a number"
        known = value in choices and choice_of(value, choices) == value
        expect(known if choices else not isinstance(value, str), where, wanted, repr(value))
        default = loss.default(key, arguments)
        # A default that depends on the arguments may be stored.
        left_out = value == default == loss.default(key)
        require(not left_out, where, f"{value!r} is the default; leave out keywords with default values")
        require(not isinstance(value, float) or math.isfinite(value), where, "expected a finite number")
        if key == "direction_weights":
            both = raw.get("direction", loss.default("direction", arguments)) == "both"
            require(both, where, "requires direction both")
    return {key: float(value) if is_number(loss, key) else value for key, value in raw.items()}


def is_number(loss: Loss, key: str) -> bool:
    """Return whether a keyword of a loss is a number."""
    return key.endswith("temperature") or isinstance(loss.keywords[key], float)


def _array(path: str, name: str, value: Any, sizes: dict[str, int]) -> npt.NDArray[Any]:
    """Convert an argument to an array and check its shape. New axes are added to ``sizes``."""
    matrix = "D" in SHAPES[name]
    if name in WHOLE_NUMBERS:
        value = [_label(f"{path}[{i}]", x) for i, x in enumerate(value)]
    try:
        array: npt.NDArray[Any] = np.array(value, dtype=np.float64 if matrix else None if len(value) else int)
        array = array if len(array) else array.reshape([0] + [sizes.get(axis, 0) for axis in SHAPES[name][1:]])
        for axis, size in zip(SHAPES[name], array.shape, strict=True):
            sizes.setdefault(axis, size)
    except ValueError:
        raise FixtureError(f"{path}: expected a matrix, got rows of different lengths") from None
    for index in np.argwhere(~np.isfinite(array)) if matrix else ():
        raise FixtureError(f"{path}{place(index)}: expected a finite number")
    expected, found = [sizes[axis] for axis in SHAPES[name]], [*array.shape]
    expect(found == expected, path, f"shape {expected}", found)
    return array


def _label(path: str, value: Any) -> int:
    """Convert a label to an integer. Labels that float64 may round are strings in the file."""
    number = int(value)
    right = isinstance(value, str) == (abs(number) >= EXACT_INTEGERS) and -(2**63) <= number < 2**63
    expect(right, path, "an integer below 2^53 or the digits of a larger int64", repr(value))
    return number


def stored_anchors(case: Case, formulas: Collection[str]) -> list[int]:
    """The anchors whose values are stored: all that count, or some of them if a formula gives the embeddings."""
    counted = case.counted()
    return [counted[k] for k in stored_rows(len(counted))] if case.first in formulas else counted


def _expected(path: str, case: Case, raw: Mapping[str, Any], formulas: Collection[str]) -> Expected:
    counted, undefined = stored_anchors(case, formulas), case.undefined()
    loss, many = raw["loss"], case.separate
    expect(isinstance(loss, list) == many, f"{path}.loss", "a list" if many else "one value", repr(loss))
    values = _values(f"{path}.loss", loss if many else [loss], case.undefined_values())
    of_anchors = raw["anchors"]
    if case.first in formulas:
        expect(of_anchors["rows"] == counted, f"{path}.anchors.rows", counted, of_anchors["rows"])
        of_anchors = of_anchors["values"]
    anchors = _values(f"{path}.anchors", of_anchors, [i in undefined for i in counted])
    gradients: dict[str, Matrix] = {}
    products: dict[str, Matrix] = {}
    if raw["gradient"] is not None:
        others = raw.get("gradients", {})
        wanted, got = (", ".join(names) or "no matrix" for names in (case.others, others))
        expect(
            others.keys() == case.others.keys(), f"{path}.gradients", f"gradients for {wanted}", f"gradients for {got}"
        )
        for name, rows in {case.first: raw["gradient"], **others}.items():
            where = f"{path}.gradient" if name == case.first else f"{path}.gradients.{name}"
            sizes = dict(zip(SHAPES[name], case.matrices[name].shape, strict=True))
            if name in formulas:
                gradients[name], products[name] = _part(where, name, rows, case.matrices[name])
            else:
                gradients[name] = _array(where, name, rows, sizes)
    by_row = dict(zip(counted, anchors, strict=True))
    biased = bool(gradients) and "bias" in case.entry.keywords
    wanted = f"present if and only if there is a gradient and {case.entry.function} has a bias"
    require(("bias_gradient" in raw) == biased, f"{path}.bias_gradient", wanted)
    return Expected(
        values if many else values[0],
        by_row,
        gradients.pop(case.first, None),
        raw.get("gradient_left_out"),
        gradients,
        raw.get("temperature_gradient"),
        raw.get("bias_gradient"),
        products,
    )


def _rounding(path: str, case: Case, raw: Mapping[str, Any], expected: Expected) -> Rounding:
    """Read the bounds on the rounding errors of a case; those of a gradient that is left out are 0."""
    sizes = {"loss": len(expected.values), "anchors": len(expected.anchors)}
    found = {name: ROUNDING_UNIT * np.array(raw[name], dtype=np.float64) for name in sizes}
    left_out = expected.gradient is None
    given = {name: [0.0] * len(matrix) for name, matrix in case.matrices.items()} if left_out else raw.get("rows", {})
    rows = {name: ROUNDING_UNIT * np.array(given.get(name, ()), dtype=np.float64) for name in case.matrices}
    for name, size in sizes.items():
        expect(found[name].shape == (size,), f"{path}.{name}", f"{size} numbers", len(raw[name]))
    for name, matrix in case.matrices.items():
        expect(rows[name].shape == (len(matrix),), f"{path}.rows.{name}", f"{len(matrix)} numbers", len(rows[name]))
    anchors = dict(zip(expected.anchors, found["anchors"].tolist(), strict=True))
    return Rounding(found["loss"], anchors, rows)


def _part(path: str, name: str, raw: Mapping[str, Any], matrix: Matrix) -> tuple[Matrix, Matrix]:
    """Read a gradient of which some rows are stored, and its products. The other rows are NaN."""
    rows, shape = stored_rows_of(matrix), SHAPES[name]
    sizes = {shape[0]: len(rows), shape[1]: matrix.shape[1]}
    expect(raw["rows"] == rows, f"{path}.rows", rows, raw["rows"])
    found = np.full(matrix.shape, np.nan)
    found[rows] = _array(f"{path}.values", name, raw["values"], {**sizes})
    return found, _array(f"{path}.products", name, raw["products"], sizes | {shape[0]: len(PERIODS)})


def _values(path: str, entries: Sequence[Any], nan: Sequence[bool]) -> tuple[float, ...]:
    """Convert results to numbers. They must be NaN where ``nan`` is true, and finite elsewhere."""
    expect(
        len(entries) == len(nan), path, f"a list of {len(nan)}, one value per counted anchor or per pair", len(entries)
    )
    for entry, undefined in zip(entries, nan, strict=True):
        right = math.isnan(float(entry)) if undefined else math.isfinite(float(entry))
        expect(right, path, "nan" if undefined else "a finite number", repr(entry))
    return tuple(map(float, entries))


def _typed(path: str, value: Mapping[str, Any]) -> Any:
    """Convert an argument of an error case."""
    if value["kind"] != "array":
        entry = value.get("value")
        return float(entry) if value["kind"] == "number" and isinstance(entry, str) else entry
    shape, entries = value["shape"], value["values"]
    expect(len(entries) == math.prod(shape), path, f"{math.prod(shape)} values for shape {shape}", len(entries))
    return np.array(entries, dtype=value["dtype"]).reshape(shape)
