"""Add a user's batch to the golden cases. Arrays are read from npy (without pickle), csv, pt or safetensors files."""

from __future__ import annotations

import csv
import importlib
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pairproof import install_command
from pairproof.reference import views

from ..judge.options import Batch, Selection, TrainingBatch, UsageError
from ..judge.verify import expected_counts, run
from ..suite.cases import MASKS, MATRICES, Case, call_reference
from ..suite.catalogue import IGNORED, LOSSES, WEIGHTS, Loss, choice_of
from ..suite.flags import first_untrue
from ..suite.golden import (
    FLAGS,
    FOLDER,
    SHAPES,
    TARGETS,
    WHOLE_NUMBERS,
    as_json,
    file_of,
    is_number,
    load_flags,
    load_golden,
)
from ..suite.progress import Progress
from ..suite.records import Expected
from ..suite.store import dump_json, fixtures_at, fixtures_root, read_json, write_atomically, write_manifest
from ..truth.certify import CertificationError, certify
from ..truth.tolerances import evaluated_rounding
from .rebuild import counted_without_running, failures, put_in_place, read_expected, staged, write_counts
from .renew import renew

Array = npt.NDArray[Any]

_LAYOUTS = {"interleaved": views.interleaved_partners, "stacked": views.stacked_partners}
_ROWS = ("ref_labels", "self_rows", "anchors", *IGNORED, *WEIGHTS)


class Refused(UsageError):
    """The batch cannot be added. The message begins with the name of the invalid option or argument."""


def _require(met: object, message: str) -> None:
    if not met:
        raise Refused(message)


def read_array(source: str, option: str, name: str) -> Array:
    """Read one array from a file.

    Args:
        source: X.npy, X.csv, X.pt, X.pt:TENSOR or X.safetensors:TENSOR.
        option: the command-line option, for messages.
        name: name of the argument. It determines the dtype and rank of a csv file.

    Returns:
        The array. Floats of pt and safetensors files are converted to float64.

    Raises:
        Refused: The file cannot be read, has an unknown format, or does not contain the tensor.
    """
    named = re.fullmatch(r"(.+\.(?:pt|safetensors)):(.+)", source)
    path, tensor = (Path(named[1]), named[2]) if named else (Path(source), "")
    where = f"{option} {source}"
    _require(path.is_file(), f"{where}: there is no file {path}")
    wanted = "expected X.npy, X.csv, X.pt, X.pt:TENSOR or X.safetensors:TENSOR"
    _require(path.suffix in _READERS, f"{where}: {wanted}, got {path.suffix or 'no suffix'!r}")
    try:
        return _READERS[path.suffix](path, where, name if path.suffix == ".csv" else tensor)
    except Refused:
        raise
    except Exception as error:  # each reader raises its own exceptions for a damaged file
        words = (str(error) or type(error).__name__).splitlines()[0]
        raise Refused(f"{where}: cannot be read as {path.suffix[1:]}: {words}") from error


def _read_npy(path: Path, where: str, name: str) -> Array:
    with path.open("rb") as file:
        return np.asarray(np.lib.format.read_array(file, allow_pickle=False))


def _read_csv(path: Path, where: str, name: str) -> Array:
    dtype, read, words = _CELLS[name if name in _CELLS else "embeddings" if "D" in SHAPES[name] else "labels"]
    rows: list[list[Any]] = []
    for k, cells in enumerate(csv.reader(io.StringIO(path.read_text(encoding="utf-8-sig"))), start=1):
        row = []
        for cell in map(str.strip, cells):
            try:
                row.append(dtype(read(cell)))
            except (KeyError, ValueError, OverflowError):
                raise Refused(f"{where}: line {k}: expected {words}, got {cell!r}") from None
        if row:
            rows.append(row)
            wanted = f"expected {len(rows[0])} entries, as in the first line"
            _require(len(row) == len(rows[0]), f"{where}: line {k}: {wanted}, got {len(row)}")
    array = np.array(rows, dtype=dtype).reshape(len(rows), len(rows[0]) if rows else 2)
    if len(SHAPES.get(name, "N")) == 2:
        return array
    wanted = "expected one line, or one entry per line"
    _require(not rows or 1 in array.shape, f"{where}: {wanted}, got shape {array.shape}")
    return array.ravel()


_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_BOOLEAN = (np.bool_, lambda text: _BOOLEANS[text.lower()], "true or false")
_CELLS: dict[str, tuple[type[np.generic], Callable[[str], Any], str]] = {
    "embeddings": (np.float64, float, "a number"),
    "labels": (np.int64, int, "a 64-bit integer"),
    "values": (np.float64, float, "a number"),
    **dict.fromkeys(WEIGHTS, (np.float64, float, "a number")),
    **dict.fromkeys(MASKS, _BOOLEAN),
}
"""How csv cells are read: the dtype, the parser, and the expected content.

"embeddings" is for all matrices of embeddings, "labels" for all integers, "values" for the losses of a run."""


def _read_safetensors(path: Path, where: str, tensor: str) -> Array:
    try:
        safetensors: Any = importlib.import_module("safetensors")
    except ImportError:
        raise Refused(f"{where}: this format requires safetensors: {install_command('safetensors')}") from None
    # With torch, because numpy has no bfloat16.
    with safetensors.safe_open(str(path), framework="pt", device="cpu") as file:
        _require(tensor in file.keys(), _no_tensor(path, where, file.keys()))  # noqa: SIM118 - a file is no mapping
        return _values_of(file.get_tensor(tensor))


def _read_pt(path: Path, where: str, tensor: str) -> Array:
    import torch

    found = torch.load(path, map_location="cpu", weights_only=True)
    if tensor or isinstance(found, dict):
        _require(
            isinstance(found, dict), f"{where}: there are no named tensors in the file, but one {type(found).__name__}"
        )
        names = [name for name, value in found.items() if isinstance(value, torch.Tensor)]
        _require(tensor in names, _no_tensor(path, where, names))
        found = found[tensor]
    _require(isinstance(found, torch.Tensor), f"{where}: expected a tensor, got {type(found).__name__}")
    return _values_of(found.detach())


def _no_tensor(path: Path, where: str, names: Iterable[str]) -> str:
    return f"{where}: no such tensor; write {path}:TENSOR with one of {', '.join(sorted(names))}"


def _values_of(tensor: Any) -> Array:
    return np.asarray((tensor.double() if tensor.is_floating_point() else tensor).numpy())


_READERS: dict[str, Callable[[Path, str, str], Array]] = {
    ".npy": _read_npy,
    ".csv": _read_csv,
    ".pt": _read_pt,
    ".safetensors": _read_safetensors,
}
"""The reader of each format: ``reader(path, start of messages, name of the tensor or argument)``."""


def make_case(batch: Batch) -> Case:
    """Make a case from a batch. The reference validates it.

    Args:
        batch: the files and options of the batch.

    Returns:
        The case, with float64 matrices.

    Raises:
        Refused: An argument is invalid.
    """
    _require(batch.loss in LOSSES, f"--loss: expected one of {', '.join(LOSSES)}, got {batch.loss!r}")
    loss = LOSSES[batch.loss]
    name = batch.id.removeprefix(f"{FOLDER}/").removeprefix(f"{batch.loss}/")
    wanted = f"--id: expected lower-case words and digits joined by hyphens, got {batch.id!r}"
    _require(re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", name), wanted)
    first, arrays = loss.embeddings[0], _arrays(batch)
    keywords = read_settings(loss, batch.settings)
    try:
        loss.reference(**arrays, **keywords)
    except (TypeError, ValueError) as error:
        raise Refused(str(error)) from error
    for key in sorted(arrays.keys() & {*WHOLE_NUMBERS}):
        _require(max(map(int, arrays[key]), default=0) < 2**63, f"{key}: expected signed 64-bit integers")
        arrays[key] = arrays[key].astype(np.int64)
    matrices = {key: arrays.pop(key).astype(np.float64) for key in (first, *MATRICES) if key in arrays}
    matrices = {key: matrix.reshape(-1, matrix.shape[-1]) for key, matrix in matrices.items()}
    arguments = {key: array.tolist() for key, array in arrays.items()}
    keywords = {key: option for key, option in keywords.items() if option != loss.default(key, matrices)}
    if "anchors" in arguments:
        keywords["anchors"] = arguments.pop("anchors")
    return Case(f"{FOLDER}/{batch.loss}/{name}", batch.loss, matrices.pop(first), arguments, keywords, matrices)


def read_settings(loss: Loss, settings: Mapping[str, str]) -> dict[str, Any]:
    """Convert the options of a loss from texts. Numbers become floats.

    Raises:
        Refused: The loss has no such option, or a number is expected.
    """
    keywords: dict[str, Any] = {}
    known = [key for key in loss.keywords if key not in SHAPES]
    for key, text in settings.items():
        _require(key in known, f"--set {key}: {loss.function} has no such option; its options: {', '.join(known)}")
        try:
            chosen = choice_of(text, loss.choices.get(key, ()))
            if key == "direction_weights":
                keywords[key] = [float(part) for part in text.strip("[]()").split(",")]
            else:
                keywords[key] = float(text) if is_number(loss, key) else text if chosen is None else chosen
        except ValueError:
            raise Refused(f"{key}: expected a number, got {text!r}") from None
    return keywords


def read_training(batch: TrainingBatch) -> dict[str, Any]:
    """Read the files and options of ``pairproof diagnose``, and return the arguments of ``diagnose``.

    Raises:
        Refused: A file cannot be read, or the loss has no such option.
    """
    _require(batch.loss in LOSSES, f"--loss: expected one of {', '.join(LOSSES)}, got {batch.loss!r}")
    given: dict[str, Any] = {
        "loss": batch.loss,
        "value": batch.value,
        **read_settings(LOSSES[batch.loss], batch.settings),
    }
    given |= {"class_sizes": batch.class_sizes or None} | ({} if batch.dim is None else {"dim": batch.dim})
    sources = {name: getattr(batch, name) for name in ("embeddings", "labels", "partners", "embeddings_b", "values")}
    for name, source in sources.items():
        if source is not None and not (name == "partners" and source in _LAYOUTS):
            given[name] = read_array(source, _option(name), name)
    if batch.partners in _LAYOUTS and "embeddings" in given:
        given["partners"] = _laid_out(batch.partners, len(given["embeddings"]))
    if batch.negatives is not None:
        number = batch.class_sizes and batch.negatives.isdecimal()
        given["negatives"] = int(batch.negatives) if number else read_array(batch.negatives, "--negatives", "negatives")
    return given


def _arrays(batch: Batch) -> dict[str, Array]:
    """Read the arrays of a batch, by argument name."""
    loss = LOSSES[batch.loss]
    first = loss.embeddings[0]
    sources = {first: batch.embeddings} | {key: getattr(batch, key) for key in (*MATRICES, *_ROWS, *TARGETS)}
    sources = {key: source for key, source in sources.items() if source is not None}
    for key in loss.embeddings:
        _require(key in sources, f"{batch.loss} needs {_option(key)}")
    for key in sources:
        taken = key in (*loss.embeddings, *loss.keywords, *TARGETS)
        _require(taken, f"{_option(key)}: {loss.function} has no argument {key}")
    given = [key for key in TARGETS if key in sources]
    allowed = [key for key in TARGETS if key == loss.targets or key in loss.keywords]
    number = "exactly one of " if loss.targets else "at most one of "
    wanted = f"{number * (len(allowed) > 1)}{' or '.join(map(_option, allowed))}"
    wanted = wanted or "no labels or other targets, because row i of one tower belongs to row i of the other"
    right = bool(loss.targets) <= len(given) <= bool(allowed) and set(given) <= set(allowed)
    _require(right, f"{batch.loss} takes {wanted}; got {', '.join(map(_option, given)) or 'none'}")
    layout = sources.pop("partners") if sources.get("partners") in _LAYOUTS else ""
    arrays = {
        key: read_array(source, "--embeddings" if key == first else _option(key), key)
        for key, source in sources.items()
    }
    for key, dtype in {key: array.dtype for key, array in arrays.items() if "D" in SHAPES[key]}.items():
        wide = dtype.kind == "c" or dtype.itemsize > 8
        _require(not wide, f"{key}: expected a floating-point dtype of at most 64 bits, got {dtype}")
    if layout:
        arrays["partners"] = _laid_out(layout, arrays[first].shape[0] if arrays[first].ndim else 0)
    return arrays


def _laid_out(layout: str, rows: int) -> Array:
    """Return the partners of a batch whose views have a layout of this name."""
    try:
        return np.asarray(_LAYOUTS[layout](rows))
    except ValueError as error:
        raise Refused(f"--partners {layout}: {error}") from error


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class Added:
    """A case that was added.

    Attributes:
        entry: the JSON object of the case in the golden file.
        notes: failed checks, absent implementations, and other updated files, one line each.
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
    """Prove the results of a batch, and add it to the golden cases of its loss.

    Counts, checksums and other derived files are updated too.

    Args:
        batch: the files and options of the batch.
        flags: names of flags from ``golden/flags.json``: the reasons for the case.
        note: what the case shows, in one line.
        root: folder of fixtures; by default the installed one.
        gradient: whether to prove the gradient too.
        dry_run: whether to return the case without writing anything.
        progress: called at each step.

    Returns:
        The case, and notes for the author.

    Raises:
        Refused: The batch is invalid, its id or content exists already, or a flag is unknown or does not apply.
        FixtureError: The stored fixtures are invalid.
        CertificationError: A result cannot be proved.
        CouldNotRun: A derived file outside the fixtures cannot be updated; the case is already added.
    """
    root = fixtures_root() if root is None else root
    note = note.strip()
    _require(note and "\n" not in note, "--note: expected one line that says what the case shows")
    known = load_flags(root)
    for flag in flags:
        advice = f"known: {', '.join(known)}; to add a flag, describe it in {root / FLAGS}"
        _require(flag in known, f"--flag: unknown flag {flag!r}; {advice}")
    _require(0 < len(flags) == len(set(flags)), f"--flag: expected at least one, each once; known: {', '.join(known)}")
    case = make_case(batch)
    untrue = first_untrue(case, flags)
    _require(untrue is None, f"--flag: {untrue}")
    for other in load_golden(root):
        _require(other.id != case.id, f"--id: {case.id} exists; choose another id")
        same = f"{other.id} has the same inputs and options; to see it: pairproof fixtures show {other.id}"
        _require(_content(other.case) != _content(case), same)
    if progress is not None:
        progress("proving", 0, 1)
    expected = certify(case, gradient=gradient)
    _compare_slopes(case, expected)
    entry = as_json(case, flags, note, expected, rounding=evaluated_rounding(case, "float32"))
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
            new = expected_counts(report, {case: added})["counts"]
        stored = read_expected(stage)
        old = stored["counts"]
        sums = {key: Counter(old.get(key, {})) + Counter(new.get(key, {})) for key in sorted({**old, **new})}
        write_counts(stage, stored | {"counts": {key: dict(sorted(total.items())) for key, total in sums.items()}})
        write_manifest(stage)
        put_in_place(stage, root, before)
    notes = [*failures(report), *counted_without_running(report)]
    if progress is not None:
        progress("the case is written; updating tables and counts", 0, 0)
    return Added(entry, (*notes, *(f"updated: {name}" for name in renew(root.parent, case.loss))))


def _compare_slopes(case: Case, expected: Expected) -> None:
    """Compare the proved temperature gradient with a difference quotient of the reference.

    A formula may depend on the temperature in a way that `truth.evaluate` does not know. The proof is then wrong.

    Raises:
        CertificationError: they differ by more than the error of the quotient.
    """
    found, temperature, step = expected.temperature_gradient, case.temperature, 2.0**-13
    if found is None or not math.isfinite(found) or not 1e-9 < temperature < 1e9:
        return
    above, below = (
        float(np.sum(call_reference(case, temperature=temperature * (1 + sign * step)).loss)) for sign in (1, -1)
    )
    quotient = (above - below) / (2 * step * temperature)
    if not abs(quotient - found) <= 0.01 * abs(found) + 1e-6 * (abs(above) + 1) / temperature:
        raise CertificationError(
            f"{case.id}: the proof gives {found:.6g} for the derivative with respect to the temperature, but a"
            f" difference quotient of the reference is {quotient:.6g}: truth/evaluate.py does not know this formula"
        )


def _content(case: Case) -> tuple[Any, ...]:
    matrices = {name: matrix.tolist() for name, matrix in case.matrices.items()}
    keywords = {key: value for key, value in case.keywords.items() if value is not None}
    return case.loss, matrices, dict(case.arguments), keywords
