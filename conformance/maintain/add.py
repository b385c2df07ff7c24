"""Golden cases made of a user's batch.

A batch comes as npy (never a pickle), as csv, or as a tensor of a safetensors file. The reference's own checks decide
whether it is one.
"""

from __future__ import annotations

import csv
import importlib
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pairproof.reference import views

from ..judge.options import Batch, Selection, UsageError
from ..judge.verify import expected_counts, run
from ..suite.cases import MATRICES, Case
from ..suite.catalogue import LOSSES
from ..suite.flags import first_untrue
from ..suite.golden import (
    ARGUMENTS,
    FOLDER,
    TARGETS,
    GoldenCase,
    as_json,
    file_of,
    load_flags,
    load_golden,
)
from ..suite.progress import Progress
from ..suite.store import dump_json, fixtures_at, fixtures_root, read_json, write_atomically, write_manifest
from ..truth.certify import certify
from .rebuild import counted_without_running, failures, put_in_place, read_expected, staged, write_counts
from .renew import renew

Kind = Literal["float", "integer", "bool"]
Array = npt.NDArray[Any]

_FORMATS = "X.npy, X.csv or X.safetensors:TENSOR"
_LAYOUTS = ("interleaved", "stacked")


class Refused(UsageError):
    """A batch that is no case: the message begins with the option, or with the reference's name of the argument."""


def read_array(source: str, option: str, kind: Kind, rank: int) -> Array:
    """One array of the user's.

    Args:
        source: X.npy, X.csv or X.safetensors:TENSOR.
        option: on the command line, for the messages.
        kind: what a csv file is read as; the other formats say it themselves.
        rank: of the array, which csv does not say.

    Raises:
        Refused: the file is missing, damaged or of another format, or holds no such tensor.
    """
    name, _, tensor = source.partition(".safetensors:")
    path = Path(name + ".safetensors") if tensor else Path(source)
    where = f"{option} {source}"
    if not path.is_file():
        raise Refused(f"{where}: there is no file {path}")
    if path.suffix == ".npy":
        return _read_npy(path, where)
    if path.suffix == ".csv":
        return _read_csv(path, where, kind, rank)
    if path.suffix == ".safetensors":
        return _read_safetensors(path, tensor, where)
    raise Refused(f"{where}: expected {_FORMATS}, got {path.suffix or 'no suffix'!r}")


def _read_npy(path: Path, where: str) -> Array:
    try:
        with path.open("rb") as file:
            array: Array = np.lib.format.read_array(file, allow_pickle=False)
            return array
    except (OSError, ValueError, EOFError) as error:
        raise Refused(f"{where}: cannot be read as npy: {_first_line(error)}") from error


def _read_csv(path: Path, where: str, kind: Kind, rank: int) -> Array:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{where}: cannot be read as csv: {_first_line(error)}") from error
    rows: list[list[Any]] = []
    for k, cells in enumerate(csv.reader(io.StringIO(text)), start=1):
        if not cells:
            continue
        rows.append([_cell(cell.strip(), kind, f"{where}: line {k}") for cell in cells])
        if len(rows[-1]) != len(rows[0]):
            raise Refused(f"{where}: line {k}: has {len(rows[-1])} entries, the first line {len(rows[0])}")
    dtype = {"float": np.float64, "integer": np.int64, "bool": np.bool_}[kind]
    if not rows:
        return np.zeros((0, 2) if rank == 2 else 0, dtype=dtype)
    if rank == 1:
        if len(rows) > 1 and len(rows[0]) > 1:
            raise Refused(f"{where}: expected one line or one entry a line, got {len(rows)} lines of {len(rows[0])}")
        return np.array([cell for row in rows for cell in row], dtype=dtype)
    return np.array(rows, dtype=dtype)


def _cell(text: str, kind: Kind, where: str) -> float | int | bool:
    if kind == "bool":
        if text.lower() in ("true", "false", "1", "0"):
            return text.lower() in ("true", "1")
        raise Refused(f"{where}: expected true or false, got {text!r}")
    if kind == "integer":
        if not re.fullmatch("[+-]?[0-9]+", text):
            raise Refused(f"{where}: expected an integer, got {text!r}")
        if not -(2**63) <= int(text) < 2**63:
            raise Refused(f"{where}: expected an integer of 64 bits, got {text}")
        return int(text)
    try:
        return float(text)
    except ValueError:
        raise Refused(f"{where}: expected a number, got {text!r}") from None


def _read_safetensors(path: Path, tensor: str, where: str) -> Array:
    try:
        safetensors: Any = importlib.import_module("safetensors")
    except ImportError:
        raise Refused(f'{where}: reading it needs safetensors: pip install "pairproof[safetensors]"') from None
    try:
        # Through torch, for numpy has no bfloat16.
        with safetensors.safe_open(str(path), framework="pt", device="cpu") as file:
            held = sorted(file.keys())
            if tensor not in held:
                found = f"no tensor {tensor!r}" if tensor else "no tensor named"
                raise Refused(f"{where}: {found}; write {path}:TENSOR, where TENSOR is one of {', '.join(held)}")
            value = file.get_tensor(tensor)
    except (OSError, safetensors.SafetensorError) as error:
        raise Refused(f"{where}: cannot be read as safetensors: {_first_line(error)}") from error
    array: Array = (value.double() if value.is_floating_point() else value).numpy()
    return array


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def make_case(batch: Batch, why: str) -> Case:
    """The case that a batch makes, put through the reference's own checks.

    Args:
        batch: what the user names.
        why: the note.

    Raises:
        Refused: the message says what is wrong with which argument.
    """
    if batch.loss not in LOSSES:
        raise Refused(f"--loss: expected one of {', '.join(LOSSES)}, got {batch.loss!r}")
    loss = LOSSES[batch.loss]
    name = batch.id.removeprefix(f"{FOLDER}/").removeprefix(f"{batch.loss}/")
    if not re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", name):
        raise Refused(f"--id: expected words in small letters and digits joined by hyphens, got {batch.id!r}")
    first, *_ = loss.embeddings
    matrices = {first: _read_matrix(batch.embeddings, "--embeddings", first)}
    for key in MATRICES:
        source = getattr(batch, key)
        if source is not None:
            if key not in (*loss.embeddings, *loss.matrices):
                raise Refused(f"{_option(key)}: {loss.function} takes no {key}")
            matrices[key] = _read_matrix(source, _option(key), key)
        elif key in loss.embeddings:
            raise Refused(f"{batch.loss} takes {_option(key)}, got none")
    arguments = _arguments(batch, len(matrices[first]) if matrices[first].ndim else 0)
    keywords = _keywords(batch)
    try:
        loss.reference(**matrices, **arguments, **keywords)
    except (TypeError, ValueError) as error:
        raise Refused(str(error)) from error
    for key, value in arguments.items():
        if key.endswith("labels") and any(not -(2**63) <= int(x) < 2**63 for x in value):
            raise Refused(f"{key}: expected integers of 64 bits with sign")
    exact = {key: matrix.astype(np.float64) for key, matrix in matrices.items()}
    return Case(
        id=f"{FOLDER}/{batch.loss}/{name}",
        loss=batch.loss,
        embeddings=exact.pop(first),
        arguments={
            key: [int(x) for x in value] if key.endswith("labels") else value.tolist()
            for key, value in arguments.items()
        },
        keywords={
            key: option.tolist() if key == "anchors" else option
            for key, option in keywords.items()
            if key == "anchors" or option != loss.keywords[key]
        },
        why=why,
        others=exact,
    )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _read_matrix(source: str, option: str, name: str) -> Array:
    matrix = read_array(source, option, "float", 2)
    if matrix.dtype.kind in "cO" or (matrix.dtype.kind == "f" and matrix.dtype.itemsize > 8):
        raise Refused(f"{name}: expected a floating dtype of at most 64 bits, got {matrix.dtype}")
    return matrix


def _arguments(batch: Batch, n: int) -> dict[str, Array]:
    """Who is whose positive, and what belongs to the references."""
    loss = LOSSES[batch.loss]
    arguments: dict[str, Array] = dict([_target(batch, n)] if loss.targets else [])
    if not loss.targets:
        given = [name for name in TARGETS if getattr(batch, name) is not None]
        if given:
            raise Refused(f"{batch.loss} takes no {', '.join(map(_option, given))}: rows of one place are a pair")
    for name in ("ref_labels", "self_rows"):
        source = getattr(batch, name)
        if source is not None:
            if name not in loss.keywords:
                raise Refused(f"{_option(name)}: {loss.function} takes no {name}")
            arguments[name] = read_array(source, _option(name), "integer", 1)
    return arguments


def _target(batch: Batch, n: int) -> tuple[str, Array]:
    """The one argument that says which rows belong together, by its name."""
    loss = LOSSES[batch.loss]
    allowed = [loss.targets, *(["positives"] if "positives" in loss.keywords else [])]
    options = " or ".join(map(_option, allowed))
    kinds: dict[str, tuple[str | None, Kind, int]] = {
        "labels": (batch.labels, "integer", 1),
        "partners": (batch.partners, "integer", 1),
        "positive_pairs": (batch.positive_pairs, "integer", 2),
        "positives": (batch.positives, "bool", 2),
    }
    given = [name for name, (source, _, _) in kinds.items() if source is not None]
    if len(given) != 1 or given[0] not in allowed:
        got = ", ".join(map(_option, given)) or "none"
        raise Refused(f"{batch.loss} takes exactly one of {options}, got {got}")
    (name,) = given
    source, kind, rank = kinds[name]
    assert source is not None  # it is among the given
    if name == "partners" and source in _LAYOUTS:
        layout = views.interleaved_partners if source == "interleaved" else views.stacked_partners
        try:
            return name, np.asarray(layout(n))
        except ValueError as error:
            raise Refused(f"--partners {source}: {error}") from error
    return name, read_array(source, _option(name), kind, rank)


def _keywords(batch: Batch) -> dict[str, Any]:
    loss = LOSSES[batch.loss]
    known = [key for key in loss.keywords if key not in (*ARGUMENTS, "anchors")]
    keywords: dict[str, Any] = {}
    for key, text in batch.settings.items():
        if key not in known:
            raise Refused(f"--set {key}: {loss.function} has no such option; it has {', '.join(known)}")
        keywords[key] = _temperature(key, text) if key.endswith("temperature") else text
    if batch.anchors is not None:
        if "anchors" not in loss.keywords:
            raise Refused(f"--anchors: {loss.function} takes no anchors")
        keywords["anchors"] = read_array(batch.anchors, "--anchors", "bool", 1)
    return keywords


def _temperature(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise Refused(f"{key}: expected a number, got {text!r}") from None


@dataclass(frozen=True)
class Added:
    """A case made golden.

    Attributes:
        entry: its JSON object, as the golden file holds it.
        notes: the checks that do not hold on it, and what else to know.
    """

    entry: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def add(
    batch: Batch,
    flags: Sequence[str],
    note: str,
    root: Path | None = None,
    *,
    gradient: bool = True,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Added:
    """Prove a batch and append it to the golden cases of its loss; renew counts and checksums.

    Args:
        batch: what the user names.
        flags: why the case exists, in names that ``golden/flags.json`` explains.
        note: what the case shows, one line.
        root: a folder of fixtures; by default the installed one.
        gradient: whether the gradient is proved as well.
        dry_run: write nothing.
        progress: told of each step.

    Returns:
        What was added, or would be.

    Raises:
        Refused: the batch is no case, or its id or content is taken, or a flag is unknown.
        FixtureError: the fixtures cannot be trusted as they are.
        CertificationError: a result cannot be proved.
    """
    root = fixtures_root() if root is None else root
    note = note.strip()
    if not note or "\n" in note:
        raise Refused("--note: expected one line that says what the case shows")
    known = load_flags(root)
    for flag in flags:
        if flag not in known:
            raise Refused(f"--flag: unknown flag {flag!r}; known: {', '.join(known)}")
    if not flags or len(set(flags)) < len(flags):
        raise Refused(f"--flag: expected at least one flag, each once; known: {', '.join(known)}")
    case = make_case(batch, note)
    untrue = first_untrue(case, flags)
    if untrue is not None:
        raise Refused(f"--flag: {untrue}")
    _refuse_known(case, load_golden(root))
    if progress is not None:
        progress("proving", 0, 1)
    entry = as_json(case, flags, note, certify(case, gradient=gradient))
    if dry_run:
        return Added(entry)
    name = case.entry.golden_file
    with staged(root) as (stage, before):
        data = read_json(stage, name) if name in before else file_of(case.entry, [])
        data["cases"].append(entry)
        write_atomically(stage / name, dump_json(data))
        write_manifest(stage)
        with fixtures_at(stage):
            report = run(Selection(losses=(case.loss,), cases=(case.id,)), progress)
            added = next(golden for golden in load_golden() if golden.id == case.id)
            found = expected_counts(report, {case: added})
        counts = read_expected(stage)
        for key, new in found["counts"].items():
            stored = counts["counts"].get(key, {})
            total = {status: stored.get(status, 0) + new.get(status, 0) for status in {**stored, **new}}
            counts["counts"][key] = dict(sorted(total.items()))
        counts["counts"] = dict(sorted(counts["counts"].items()))
        write_counts(stage, counts)
        write_manifest(stage)
        put_in_place(stage, root, before)
    notes = [*failures(report), *counted_without_running(report)]
    return Added(entry, (*notes, *(f"renewed: {name}" for name in renew(root.parent, case.loss))))


def _refuse_known(case: Case, cases: Sequence[GoldenCase]) -> None:
    for other in cases:
        if other.id == case.id:
            raise Refused(f"--id: {case.id} exists; an id is never used for another case")
        same = (
            other.case.loss == case.loss
            and other.case.matrices.keys() == case.matrices.keys()
            and all(np.array_equal(matrix, case.matrices[key]) for key, matrix in other.case.matrices.items())
            and _comparable(other.case) == _comparable(case)
        )
        if same:
            raise Refused(f"{other.id} is this very evaluation; see: pairproof fixtures show {other.id}")


def _comparable(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    return dict(case.arguments), {key: value for key, value in case.keywords.items() if value is not None}
