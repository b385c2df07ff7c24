"""Golden cases made of a user's batch.

A batch comes as npy (never a pickle), as csv, or as a tensor of a safetensors file. The reference's own checks decide
whether it is one.
"""

from __future__ import annotations

import csv
import importlib
import io
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pairproof.reference import views

from ..judge.options import Batch, Selection, UsageError
from ..judge.verify import expected_counts, run
from ..suite.cases import MATRICES, Case
from ..suite.catalogue import LOSSES
from ..suite.flags import first_untrue
from ..suite.golden import FOLDER, SHAPES, TARGETS, as_json, file_of, load_flags, load_golden
from ..suite.progress import Progress
from ..suite.store import dump_json, fixtures_at, fixtures_root, read_json, write_atomically, write_manifest
from ..truth.certify import certify
from .rebuild import counted_without_running, failures, put_in_place, read_expected, staged, write_counts
from .renew import renew

Array = npt.NDArray[Any]

_FORMATS = "X.npy, X.csv or X.safetensors:TENSOR"
_LAYOUTS = {"interleaved": views.interleaved_partners, "stacked": views.stacked_partners}
_ROWS = ("ref_labels", "self_rows", "anchors")


class Refused(UsageError):
    """A batch that is no case: the message begins with the option, or with the reference's name of the argument."""


def _require(met: object, message: str) -> None:
    if not met:
        raise Refused(message)


def read_array(source: str, option: str, name: str) -> Array:
    """One array of the user's.

    Args:
        source: X.npy, X.csv or X.safetensors:TENSOR.
        option: on the command line, for the messages.
        name: of the argument, by which a csv file is read; the other formats say what they hold.

    Raises:
        Refused: the file is missing, damaged or of another format, or holds no such tensor.
    """
    stem, _, tensor = source.partition(".safetensors:")
    path = Path(f"{stem}.safetensors" if tensor else source)
    where = f"{option} {source}"
    _require(path.is_file(), f"{where}: there is no file {path}")
    try:
        if path.suffix == ".npy":
            with path.open("rb") as file:
                return np.asarray(np.lib.format.read_array(file, allow_pickle=False))
        if path.suffix == ".csv":
            return _table(path.read_text(encoding="utf-8-sig"), where, name)
        if path.suffix == ".safetensors":
            return _tensor(path, where, tensor)
    except Refused:
        raise
    except Exception as error:  # every reader has its own errors for a damaged file
        words = (str(error) or type(error).__name__).splitlines()[0]
        raise Refused(f"{where}: cannot be read as {path.suffix[1:]}: {words}") from error
    raise Refused(f"{where}: expected {_FORMATS}, got {path.suffix or 'no suffix'!r}")


def _table(text: str, where: str, name: str) -> Array:
    """The array of a csv file, of the rank and the kind of an argument."""
    dtype, read, words = _CELLS[name if name in _CELLS else "embeddings" if "D" in SHAPES[name] else "labels"]
    rows: list[list[Any]] = []
    for k, cells in enumerate(csv.reader(io.StringIO(text)), start=1):
        if cells:
            rows.append([])
        for cell in map(str.strip, cells):
            try:
                rows[-1].append(dtype(read(cell)))
            except (KeyError, ValueError):
                raise Refused(f"{where}: line {k}: expected {words}, got {cell!r}") from None
            except OverflowError:
                raise Refused(f"{where}: line {k}: expected {words} of 64 bits, got {cell}") from None
        width = len(rows[0]) if rows else 2
        _require(len(cells) in (0, width), f"{where}: line {k}: has {len(cells)} entries, the first line {width}")
    width = len(rows[0]) if rows else 2
    if len(SHAPES[name]) == 2:
        return np.array(rows, dtype=dtype).reshape(len(rows), width)
    wanted = "expected one line or one entry a line"
    _require(1 in (len(rows), width) or not rows, f"{where}: {wanted}, got {len(rows)} lines of {width}")
    return np.array(rows, dtype=dtype).ravel()


def _integer(text: str) -> int:
    if not re.fullmatch("[+-]?[0-9]+", text):
        raise ValueError
    return int(text)


def _boolean(text: str) -> bool:
    return {"true": True, "1": True, "false": False, "0": False}[text.lower()]


_CELLS: dict[str, tuple[type[np.generic], Callable[[str], Any], str]] = {
    "embeddings": (np.float64, float, "a number"),
    "labels": (np.int64, _integer, "an integer"),
    "positives": (np.bool_, _boolean, "true or false"),
    "anchors": (np.bool_, _boolean, "true or false"),
}
"""How a cell of csv is read: its dtype, what reads it, and what it must be, in words. All matrices are embeddings."""


def _tensor(path: Path, where: str, tensor: str) -> Array:
    """A tensor of a safetensors file."""
    try:
        safetensors: Any = importlib.import_module("safetensors")
    except ImportError:
        raise Refused(f'{where}: reading it needs safetensors: pip install "pairproof[safetensors]"') from None
    # Through torch, for numpy has no bfloat16.
    with safetensors.safe_open(str(path), framework="pt", device="cpu") as file:
        held = sorted(file.keys())
        if tensor not in held:
            found = f"no tensor {tensor!r}" if tensor else "no tensor named"
            raise Refused(f"{where}: {found}; write {path}:TENSOR, where TENSOR is one of {', '.join(held)}")
        value = file.get_tensor(tensor)
    return np.asarray((value.double() if value.is_floating_point() else value).numpy())


def make_case(batch: Batch, why: str) -> Case:
    """The case that a batch makes, put through the reference's own checks.

    Args:
        batch: what the user names.
        why: the note.

    Raises:
        Refused: the message says what is wrong with which argument.
    """
    _require(batch.loss in LOSSES, f"--loss: expected one of {', '.join(LOSSES)}, got {batch.loss!r}")
    loss = LOSSES[batch.loss]
    name = batch.id.removeprefix(f"{FOLDER}/").removeprefix(f"{batch.loss}/")
    wanted = f"--id: expected words in small letters and digits joined by hyphens, got {batch.id!r}"
    _require(re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", name), wanted)
    first, arrays = loss.embeddings[0], _arrays(batch)
    keywords: dict[str, Any] = {}
    known = [key for key in loss.keywords if key not in SHAPES]
    for key, text in batch.settings.items():
        _require(key in known, f"--set {key}: {loss.function} has no such option; it has {', '.join(known)}")
        try:
            keywords[key] = float(text) if key.endswith("temperature") else text
        except ValueError:
            raise Refused(f"{key}: expected a number, got {text!r}") from None
    try:
        loss.reference(**arrays, **keywords)
    except (TypeError, ValueError) as error:
        raise Refused(str(error)) from error
    for key, value in arrays.items():
        held = not key.endswith("labels") or all(-(2**63) <= int(x) < 2**63 for x in value)
        _require(held, f"{key}: expected integers of 64 bits with sign")
    matrices = {key: arrays.pop(key).astype(np.float64) for key in (first, *MATRICES) if key in arrays}
    arguments = {key: list(map(int, x)) if key.endswith("labels") else x.tolist() for key, x in arrays.items()}
    keywords = {key: option for key, option in keywords.items() if option != loss.keywords[key]}
    if "anchors" in arguments:
        keywords["anchors"] = arguments.pop("anchors")
    embeddings = matrices.pop(first)
    return Case(f"{FOLDER}/{batch.loss}/{name}", batch.loss, embeddings, arguments, keywords, why, matrices)


def _arrays(batch: Batch) -> dict[str, Array]:
    """The arrays of a batch by the names of their arguments: those that the loss takes."""
    loss = LOSSES[batch.loss]
    first = loss.embeddings[0]
    sources = {first: batch.embeddings} | {key: getattr(batch, key) for key in (*MATRICES, *_ROWS, *TARGETS)}
    sources = {key: source for key, source in sources.items() if source is not None}
    for key in loss.embeddings:
        _require(key in sources, f"{batch.loss} takes {_option(key)}, got none")
    for key in sources:
        taken = key in (*loss.embeddings, *loss.keywords, *TARGETS)
        _require(taken, f"{_option(key)}: {loss.function} takes no {key}")
    given = [key for key in TARGETS if key in sources]
    allowed = [key for key in TARGETS if key == loss.targets or key in loss.keywords]
    got, one_of = ", ".join(map(_option, given)) or "none", " or ".join(map(_option, allowed))
    _require(allowed or not given, f"{batch.loss} takes no {got}: rows of one place are a pair")
    right = not allowed or (len(given) == 1 and given[0] in allowed)
    _require(right, f"{batch.loss} takes exactly one of {one_of}, got {got}")
    layout = _LAYOUTS.get(sources["partners"]) if "partners" in sources else None
    if layout:
        del sources["partners"]
    arrays = {
        key: read_array(source, "--embeddings" if key == first else _option(key), key)
        for key, source in sources.items()
    }
    for key, dtype in {key: array.dtype for key, array in arrays.items() if "D" in SHAPES[key]}.items():
        wide = dtype.kind in "cO" or (dtype.kind == "f" and dtype.itemsize > 8)
        _require(not wide, f"{key}: expected a floating dtype of at most 64 bits, got {dtype}")
    if layout:
        try:
            arrays["partners"] = np.asarray(layout(arrays[first].shape[0] if arrays[first].ndim else 0))
        except ValueError as error:
            raise Refused(f"--partners {batch.partners}: {error}") from error
    return arrays


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


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
    _require(note and "\n" not in note, "--note: expected one line that says what the case shows")
    known = load_flags(root)
    for flag in flags:
        _require(flag in known, f"--flag: unknown flag {flag!r}; known: {', '.join(known)}")
    once = 0 < len(flags) == len(set(flags))
    _require(once, f"--flag: expected at least one flag, each once; known: {', '.join(known)}")
    case = make_case(batch, note)
    untrue = first_untrue(case, flags)
    _require(untrue is None, f"--flag: {untrue}")
    for other in load_golden(root):
        _require(other.id != case.id, f"--id: {case.id} exists; an id is never used for another case")
        new = _evaluation(other.case) != _evaluation(case)
        _require(new, f"{other.id} is this very evaluation; see: pairproof fixtures show {other.id}")
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
            total = Counter(counts["counts"].get(key, {})) + Counter(new)
            counts["counts"][key] = dict(sorted(total.items()))
        counts["counts"] = dict(sorted(counts["counts"].items()))
        write_counts(stage, counts)
        write_manifest(stage)
        put_in_place(stage, root, before)
    notes = [*failures(report), *counted_without_running(report)]
    return Added(entry, (*notes, *(f"renewed: {name}" for name in renew(root.parent, case.loss))))


def _evaluation(case: Case) -> tuple[Any, ...]:
    """What a case evaluates, to be compared."""
    matrices = {name: matrix.tolist() for name, matrix in case.matrices.items()}
    keywords = {key: value for key, value in case.keywords.items() if value is not None}
    return case.loss, matrices, dict(case.arguments), keywords
