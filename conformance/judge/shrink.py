"""Shrink and simplify a random batch on which a target fails, so that it can become a golden case."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..suite.cases import MASKS, Case, called
from ..suite.catalogue import IGNORED, WEIGHTS
from ..suite.golden import GoldenCase, as_json
from .fresh import ROWS, with_proof
from .levels import level_of
from .options import DRAWN_IDS
from .results import Check, Status

WORK = 200
"""Limit of the work of shrinking. One batch counts as ``1 + Case.size**2 / PAIRS``."""

PAIRS = 256
"""Number of pairs that take about as long to prove as a small batch takes in all."""

DIVISIONS = (2, 4, 8)
"""Rows and columns are removed in blocks: a half, a quarter, an eighth, and then one at a time."""


OF_PAIRS = ("positives", "ignored", "positive_weights", "negative_weights")
"""Arguments with one entry per pair."""


@dataclass
class Shrunk:
    """The smallest batch found on which a target fails.

    Attributes:
        golden: the batch with its proved results. It has the id of the random batch.
        target: the name of the target.
        folder: the folder of its arrays; None if they are not written.
    """

    golden: GoldenCase
    target: str
    folder: Path | None = None

    def arrays(self) -> dict[str, Any]:
        """Return the arrays of the batch by the names of the arguments."""
        case = self.golden.case
        arrays = called(case.matrices)
        for name, value in {**case.arguments, "anchors": case.option("anchors")}.items():
            if value is not None:
                kind = np.bool_ if name in MASKS else np.float64 if name in WEIGHTS else np.int64
                array = np.array(value, dtype=kind)
                arrays[name] = array.reshape(-1, 2) if name == "positive_pairs" else array
        return arrays

    def as_json(self) -> dict[str, Any]:
        """Return the batch as a golden case with its results, and the command that adds it."""
        golden = self.golden
        return {"case": as_json(golden.case, golden.flags, golden.note, golden.expected), "add": self.command}

    def save(self, folder: Path) -> None:
        """Write each array to an npy file. Raises an OSError if a file cannot be written."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for name, array in self.arrays().items():
            np.save(folder / f"{name}.npy", array)

    @property
    def command(self) -> str:
        """The command that adds the batch to the golden cases, with the arrays in ``folder``."""
        case, folder = self.golden.case, self.folder or Path("FOLDER")
        words = ["pairproof", "fixtures", "add", "--loss", case.loss, "--id", case.id]
        for name in self.arrays():
            option = "embeddings" if name == case.first else name.replace("_", "-")
            words += [f"--{option}", str(folder / f"{name}.npy")]
        for name, value in case.keywords.items():
            if name != "anchors" and value is not None:
                words += ["--set", f"{name}={value}"]
        words += ["--flag", next(iter(self.golden.flags), "temperature")]
        return shlex.join([*words, "--note", f"A batch on which {self.target} fails."])


def shrunk(golden: GoldenCase, fails: Callable[[GoldenCase], bool], work: float = WORK) -> GoldenCase:
    """Remove rows, columns and options from a batch while a target still fails on it.

    The level of the batch never rises. The smallest batch found within the limit of the work is returned.
    """
    if golden.case.n > ROWS[-1][1]:
        golden = halved(golden, fails)
    level = level_of(golden.flags)
    smaller = True
    while smaller:
        smaller = False
        for case in _simpler(golden.case):
            if work <= 0:
                return golden
            work -= 1 + case.size**2 / PAIRS
            try:
                found = with_proof(case)
                accepted = level_of(found.flags) <= level and fails(found)
            except Exception:  # a batch that the loss or the reference does not accept
                continue
            if accepted:
                golden, smaller = found, True
                break
    return golden


def halved(golden: GoldenCase, fails: Callable[[GoldenCase], bool]) -> GoldenCase:
    """Find the number of rows, then the number of columns, from which a target fails on a batch.

    Each bisection keeps the first rows, or columns, of the batch. Rows of a class come in pairs.
    """
    case, order = golden.case, _in_pairs(golden.case)

    def rows(case: Case, count: int) -> Case | None:
        return with_rows(case, sorted(order[:count]))

    def columns(case: Case, count: int) -> Case:
        return case.mapped(lambda rows: rows[:, :count])

    parts: tuple[tuple[int, Callable[[Case, int], Case | None]], ...] = (
        (case.n, rows),
        (case.embeddings.shape[1], columns),
    )
    for failing, part in parts:
        case, passing = golden.case, 0
        while failing - passing > 1:
            middle = (failing + passing) // 2
            found = _judged(part(case, middle), fails)
            golden, failing, passing = (found, middle, passing) if found else (golden, failing, middle)
    return golden


def _judged(case: Case | None, fails: Callable[[GoldenCase], bool]) -> GoldenCase | None:
    """The case with its proof if the target fails on it, else None."""
    try:
        found = with_proof(case) if case is not None else None
        return found if found is not None and fails(found) else None
    except Exception:  # a batch that the loss or the reference does not accept
        return None


def _in_pairs(case: Case) -> list[int]:
    """The rows of a batch in an order in which partners, and two rows of a class, follow each other."""
    classes = case.arguments.get("labels") or range(case.n)
    if "partners" in case.arguments and "ref_embeddings" not in case.others and not case.entry.two_towers:
        classes = [min(i, j) for i, j in enumerate(case.arguments["partners"])]
    seen, first, keys = Counter[int](), dict[int, int](), list[tuple[int, int]]()
    for label in classes:
        keys.append((seen[label] // 2, first.setdefault(label, len(first))))
        seen[label] += 1
    return sorted(range(case.n), key=lambda i: keys[i])


def smallest_failure(
    drawn: Sequence[GoldenCase], checks: Sequence[Check], fails: Callable[[GoldenCase], bool], target: str
) -> Shrunk | None:
    """Shrink a failing random batch, unless a stored case of its level or a lower one also fails.

    Args:
        drawn: the random batches on which the target fails.
        checks: all checks.
        fails: returns whether the target fails on a batch.
        target: the name of the target.

    Returns:
        The smallest batch that was found, or None if no batch is shrunk.
    """
    stored = [one.level for one in checks if one.status is Status.FAILED and not one.case.startswith(DRAWN_IDS)]
    for golden in sorted(drawn, key=lambda golden: golden.case.n):
        if not any(level is not None and level <= level_of(golden.flags) for level in stored):
            return Shrunk(shrunk(golden, fails), target)
    return None


def _simpler(case: Case) -> Iterator[Case]:
    """Yield simpler batches: with fewer rows, columns, options or arguments, or with signs in place of entries."""
    for kept in _parts(case.n, 2):
        if (found := with_rows(case, kept)) is not None:
            yield found
    for name in ("ref_embeddings", "negatives", *(("embeddings_b",) if case.arguments else ())):
        if name in case.others:
            for kept in _parts(len(case.others[name]), 1):
                if (found := _with_others(case, name, kept)) is not None:
                    yield found
    for kept in _parts(case.embeddings.shape[1], 1):
        yield case.with_matrices({name: rows[:, kept] for name, rows in case.matrices.items()})
    for name in case.keywords:
        if name != "temperature":
            yield replace(case, keywords={key: value for key, value in case.keywords.items() if key != name})
    for name in {"negatives", "hard_negatives"} & case.others.keys():
        others = {other: rows for other, rows in case.others.items() if other != name}
        if not case.entry.unfit({**case.keywords, **others}):
            yield replace(case, others=others)
    for left_out in (IGNORED, WEIGHTS):
        if left_out.keys() & case.arguments.keys():
            kept_arguments = {name: value for name, value in case.arguments.items() if name not in left_out}
            yield replace(case, arguments=kept_arguments)
    signs = {name: np.sign(rows) for name, rows in case.matrices.items()}
    if any((signs[name] != rows).any() for name, rows in case.matrices.items()):
        yield case.with_matrices(signs)


def _parts(count: int, least: int) -> Iterator[list[int]]:
    """Yield the indices that remain if a block of them is removed. At least ``least`` remain."""
    for size in dict.fromkeys([*(-(-count // k) for k in DIVISIONS), 1]):
        for start in range(0, count, size):
            kept = [i for i in range(count) if not start <= i < start + size]
            if len(kept) >= least:
                yield kept


def with_rows(case: Case, kept: Sequence[int]) -> Case | None:
    """Return the case with some of its rows, or None if none remain.

    A row is removed together with its partner.
    """
    within = "ref_embeddings" not in case.others and not (case.entry.two_towers and case.arguments)
    if "partners" in case.arguments and within:
        kept = [i for i in kept if case.arguments["partners"][i] in kept]
        if not kept:
            return None
    place = {row: k for k, row in enumerate(kept)}
    arguments: dict[str, Any] = {}
    for name, value in case.arguments.items():
        if name in ("ref_labels", "ref_ignored_ids"):
            arguments[name] = value
        elif name == "positive_pairs":
            arguments[name] = [(place[i], place[j]) for i, j in value if i in place and j in place]
        elif name == "partners" and within:
            arguments[name] = [place[value[i]] for i in kept]
        elif name in OF_PAIRS and within:
            arguments[name] = [[value[i][j] for j in kept] for i in kept]
        else:
            arguments[name] = [value[i] for i in kept]
    keywords = dict(case.keywords)
    if keywords.get("anchors") is not None:
        keywords["anchors"] = [keywords["anchors"][i] for i in kept]
    paired = case.entry.two_towers and within  # rows of both towers are removed together
    others = {name: rows[kept] if paired and name == "embeddings_b" else rows for name, rows in case.others.items()}
    if "hard_negatives" in others:
        hard = others["hard_negatives"]
        others["hard_negatives"] = hard.reshape(case.n, -1, hard.shape[1])[kept].reshape(-1, hard.shape[1])
    return replace(case, embeddings=case.embeddings[kept], arguments=arguments, keywords=keywords, others=others)


def _with_others(case: Case, name: str, kept: Sequence[int]) -> Case | None:
    """Return the case with some of its references or negatives; None if a partner or a self row would be removed.

    A self row of -1 means that the anchor is not among the references.
    """
    place = {-1: -1, **{row: k for k, row in enumerate(kept)}}
    arguments = dict(case.arguments)
    if name in ("ref_embeddings", "embeddings_b"):
        if any(row not in place for key in ("partners", "self_rows") for row in arguments.get(key, ())):
            return None
        for key in ("partners", "self_rows"):
            if key in arguments:
                arguments[key] = [place[row] for row in arguments[key]]
        for key in ("ref_labels", "ref_ignored_ids"):
            if key in arguments:
                arguments[key] = [arguments[key][k] for k in kept]
        for key in OF_PAIRS:
            if key in arguments:
                arguments[key] = [[row[k] for k in kept] for row in arguments[key]]
    return replace(case, arguments=arguments, others={**case.others, name: case.others[name][kept]})
