"""Prove all golden cases again, in parallel, and rewrite the files that differ."""

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
from ..suite.records import BY_CHOICE, Expected, Rounding
from ..suite.store import damage_of, dump_json, fixtures_root, write_atomically, write_manifest
from ..truth.certify import certify
from ..truth.tolerances import evaluated_rounding


def prove_golden(
    root: Path | None = None, *, processes: int | None = None, progress: Progress | None = None
) -> list[str]:
    """Prove every golden case again and write the files that changed. On a clean tree, nothing is written.

    Files are written only after all proofs are done, and each file is replaced atomically.

    Args:
        root: folder of fixtures; by default the installed one.
        processes: number of processes; by default one per core.
        progress: called at each step.

    Returns:
        The changes, one line each.

    Raises:
        FixtureError: A file cannot be read, or a case is invalid.
        CertificationError: A result cannot be proved.
    """
    root = fixtures_root() if root is None else root
    flags = golden.read_flags(root)
    stored = {name: golden.read_inputs(root, name) for name in golden.golden_files(root)}
    jobs: list[tuple[str, Any, Case]] = []
    for name, data in stored.items():
        with damage_of(name):
            cases = golden.inputs_of(name, data, flags)
        jobs += [(name, raw, case) for case, raw in zip(cases, data["cases"], strict=True)]
    formulas = [golden.formulas_of(case, raw) for _, raw, case in jobs]
    wanted = [(case, _proves_gradient(raw), (*parts,)) for (_, raw, case), parts in zip(jobs, formulas, strict=True)]
    proved = prove(wanted, processes=processes, progress=progress)
    rebuilt: dict[str, list[Any]] = {name: [] for name in stored}
    found: dict[str, list[str]] = {name: [] for name in stored}
    for (name, raw, case), (expected, rounding), parts in zip(jobs, proved, formulas, strict=True):
        rebuilt[name].append(golden.as_json(case, raw["flags"], raw["note"], expected, parts, rounding))
        found[name] += (f"{name}: {raw['id']}: {change}" for change in _differences(raw, rebuilt[name][-1]))
    texts = {name: dump_json(golden.file_of(LOSSES[data["loss"]], rebuilt[name])) for name, data in stored.items()}
    texts = {name: text for name, text in texts.items() if (root / name).read_bytes() != text.encode()}
    for name, text in texts.items():
        write_atomically(root / name, text)
    if texts:
        write_manifest(root)
    return [line for name in texts for line in found[name] or [f"{name}: the same content in another layout"]]


def _proves_gradient(raw: Mapping[str, Any]) -> bool:
    """Whether the gradient of a stored case is proved. It is not if the author left it out."""
    stored = raw.get("expected")
    return not (isinstance(stored, Mapping) and stored.get("gradient_left_out") == BY_CHOICE)


def prove(
    cases: Sequence[tuple[Case, bool, tuple[str, ...]]],
    *,
    processes: int | None = None,
    progress: Progress | None = None,
) -> list[tuple[Expected, Rounding]]:
    """Certify the results of cases, and evaluate bounds on their rounding errors, in parallel.

    Args:
        cases: for each case, whether to prove its gradient, and the names of the matrices that a formula gives.
        processes: number of processes; by default one per core. With 1, no process is started.
        progress: called at each step.

    Returns:
        The results and the bounds in float32, in the order of the cases.

    Raises:
        CertificationError: A result cannot be proved.
    """
    processes = processes or os.cpu_count() or 1
    if processes == 1 or len(cases) < 2:
        return list(tracked("proving", map(_certified, cases), len(cases), progress))
    # The most expensive cases start first. If one started last, the other processes would be idle.
    order = sorted(range(len(cases)), key=lambda k: -_cost(*cases[k][:2]))
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        proved = pool.map(_certified, [cases[k] for k in order])
        results = dict(zip(order, tracked("proving", proved, len(cases), progress), strict=True))
    return [results[k] for k in range(len(cases))]


def _certified(job: tuple[Case, bool, tuple[str, ...]]) -> tuple[Expected, Rounding]:
    case, gradient, formulas = job
    return certify(case, gradient=gradient, formulas=formulas), evaluated_rounding(case, "float32")


def _cost(case: Case, gradient: bool) -> int:
    pairs = sum(map(len, case.positives()))
    sums = pairs * case.shape[1]
    products = case.n * sum(matrix.size for matrix in case.matrices.values())
    return (sums + products) * (5 if gradient else 1)


def _differences(stored: Mapping[str, Any], rebuilt: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield one line per field that differs. For a list, the line has the first entry that differs."""
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
        return f"{where}: length {len(old)} stored, {len(new)} expected"
    return f"{where}: {_short(old)} stored, {_short(new)} expected"


def _short(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
