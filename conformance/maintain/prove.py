"""Prove golden cases anew: every result, in parallel, and what differs from the files."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from ..suite import golden
from ..suite.cases import Case
from ..suite.catalogue import LOSSES
from ..suite.progress import Progress, tracked
from ..suite.records import BY_CHOICE, Expected
from ..suite.store import check_schema, dump_json, fixtures_root, write_atomically, write_manifest
from ..truth.certify import certify


def prove_golden(
    root: Path | None = None, *, processes: int | None = None, progress: Progress | None = None
) -> list[str]:
    """Prove every golden case anew and write what changed. On a clean tree this writes nothing.

    Everything is computed before anything is written, and each file is replaced whole, so that an interrupted or
    failing run leaves the old files.

    Args:
        root: a folder of fixtures; by default the installed one.
        processes: how many processes prove; by default one per core.
        progress: called at each step.

    Returns:
        What changed, one line per change.

    Raises:
        FixtureError: a file cannot be read or a case cannot be evaluated as it is written.
        CertificationError: a result cannot be proved.
    """
    root = fixtures_root() if root is None else root
    flags = golden.read_flags(root)
    files: dict[str, Any] = {}
    jobs: list[tuple[Case, bool]] = []
    for name in golden.golden_files(root):
        files[name] = data = golden.read_inputs(root, name)
        for case, raw in zip(golden.inputs_of(name, data, flags), data["cases"], strict=True):
            stored = raw.get("expected")
            chosen = isinstance(stored, Mapping) and stored.get("gradient_left_out") == BY_CHOICE
            jobs.append((case, not chosen))
    proved = iter(zip(jobs, prove(jobs, processes=processes, progress=progress), strict=True))
    texts: dict[str, str] = {}
    changes: list[str] = []
    for name, data in files.items():
        loss, cases, differing = LOSSES[data["loss"]], [], len(changes)
        for raw in data["cases"]:
            (case, _), expected = next(proved)
            cases.append(golden.as_json(case, raw["flags"], raw["note"], expected))
            changes += (f"{name}: {raw['id']}: {change}" for change in _differences(raw, cases[-1]))
        rebuilt = golden.file_of(loss, cases)
        check_schema(root, name, rebuilt, golden.FORMAT)
        text = dump_json(rebuilt)
        if (root / name).read_bytes() != text.encode():
            texts[name] = text
            if len(changes) == differing:
                changes.append(f"{name}: the same content in another layout")
    for name, text in texts.items():
        write_atomically(root / name, text)
    if texts:
        write_manifest(root)
    return changes


def prove(
    cases: Sequence[tuple[Case, bool]], *, processes: int | None = None, progress: Progress | None = None
) -> list[Expected]:
    """Certify many cases, each with or without its gradient, in parallel.

    Args:
        cases: the cases, and whether the gradient of each is wanted.
        processes: how many processes; by default one per core. With one, nothing is started.
        progress: called at each step.

    Returns:
        The results, in the order of the cases.

    Raises:
        CertificationError: a result cannot be proved.
    """
    processes = processes or os.cpu_count() or 1
    if processes == 1 or len(cases) < 2:
        return list(tracked("proving", map(_certified, cases), len(cases), progress))
    # The dearest first, or a large one begun last would run alone.
    order = sorted(range(len(cases)), key=lambda k: -_cost(*cases[k]))
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        proved = pool.map(_certified, [cases[k] for k in order])
        results = dict(zip(order, tracked("proving", proved, len(cases), progress), strict=True))
    return [results[k] for k in range(len(cases))]


def _certified(job: tuple[Case, bool]) -> Expected:
    return certify(job[0], gradient=job[1])


def _cost(case: Case, gradient: bool) -> int:
    pairs = sum(map(len, case.positives()))
    sums = pairs * case.shape[1]
    products = case.n * sum(matrix.size for matrix in case.matrices.values())
    return (sums + products) * (5 if gradient else 1)


def _differences(stored: Mapping[str, Any], rebuilt: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """One line per field that differs, the first differing entry of a list alone."""
    for key in {**stored, **rebuilt}:
        old, new = stored.get(key), rebuilt.get(key)
        where = f"{path}{key}"
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, f"{where}.")
        elif old != new:
            yield _difference(where, old, new)


def _difference(where: str, old: Any, new: Any) -> str:
    if isinstance(old, list) and isinstance(new, list):
        for k, (before, after) in enumerate(zip(old, new, strict=False)):
            if before != after:
                return _difference(f"{where}[{k}]", before, after)
        return f"{where}: {len(old)} stored, {len(new)} expected"
    return f"{where}: {_short(old)} stored, {_short(new)} expected"


def _short(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
