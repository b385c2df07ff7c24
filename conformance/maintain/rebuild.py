"""Rebuild all that the fixtures derive: golden results, counts, layout, recorded peers, checksums.

Everything is made in a copy of the folder. Only when all of it is there do the files that differ take the place of the
old ones, each whole; whatever fails or interrupts before that has changed nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..documents.load import dump_worked, load_worked
from ..implementations import ALL
from ..implementations.supcontrast import RECORDED, RECORDED_FORMAT, TODAY_COMMIT, TODAY_SHA256, record
from ..judge.options import CouldNotRun, Selection, UsageError
from ..judge.results import BAD
from ..judge.verify import EXPECTED, EXPECTED_FORMAT, Report, expected_counts, load_cases, run, show_counts
from ..suite import golden
from ..suite.progress import Progress
from ..suite.store import (
    MANIFEST,
    FixtureError,
    data_files,
    fixtures_at,
    fixtures_root,
    read_checked,
    read_json,
    write_atomically,
    write_manifest,
)
from .prove import prove_golden

PEERS = ("supcontrast", "folder")
LONGEST_DIFF = 40
"""Lines of a difference that are shown; the rest is counted."""


@dataclass(frozen=True)
class Rebuilt:
    """What a rebuild changes, or would.

    Attributes:
        changes: one line per change; empty on a clean tree.
        notes: what was kept or left out, and what does not hold on the rebuilt fixtures.
    """

    changes: tuple[str, ...]
    notes: tuple[str, ...]


def rebuild(
    peers: Mapping[str, str],
    root: Path | None = None,
    *,
    processes: int | None = None,
    progress: Progress | None = None,
    keep: bool = True,
    judge: Callable[[Selection, Progress | None], Report] | None = None,
) -> Rebuilt:
    """Make everything anew and write what differs. On a clean tree this writes nothing.

    Args:
        peers: paths by peer name: with "supcontrast" its values are recorded anew, "folder" says where the others lie.
        root: a folder of fixtures; by default the installed one.
        processes: how many processes prove; by default one per core.
        progress: called at each step.
        keep: whether to write; otherwise only what would change is found.
        judge: returns the report of a whole run; by default everything is run.

    Returns:
        What changed.

    Raises:
        FixtureError: a file cannot be read, breaks its schema or contradicts itself.
        CertificationError: a result cannot be proved.
        CouldNotRun: the peer is of a revision that is not the recorded one. The message says how it differs.
        UsageError: a peer is unknown.
        Unavailable: the path of a peer holds no such peer.
    """
    for name in peers:
        if name not in PEERS:
            raise UsageError(f"unknown peer with a path {name!r}; known: {', '.join(PEERS)}")
    root = fixtures_root() if root is None else root
    with staged(root) as (stage, before):
        notes: list[str] = []
        changes = _renew_manifest(stage)
        changes += _lay_out_worked(stage)
        recorded = _recorded(stage)
        changes += prove_golden(stage, processes=processes, progress=progress)
        changes += _record(stage, recorded, peers.get(PEERS[0]), notes)
        write_manifest(stage)
        changes += _count(stage, peers, notes, progress, judge or run)
        write_manifest(stage)
        validate(stage)
        reported = {change.partition(": ")[0] for change in changes}
        changes += [f"{name}: {said}" for name, said in _differing(stage, before) if name not in reported]
        if keep:
            put_in_place(stage, root, before)
    return Rebuilt(tuple(changes), tuple(notes))


def validate(root: Path) -> None:
    """Hold every file to the manifest, to its schema and to itself.

    Raises:
        FixtureError: the message names the file and the field.
    """
    load_worked(root)
    golden.load_golden(root)
    golden.load_errors(root)
    read_expected(root)
    _recorded(root)


def _recorded(root: Path) -> dict[str, Any]:
    """What the peer returned, as recorded; empty where nothing is."""
    return dict(read_checked(root, RECORDED, RECORDED_FORMAT)) if (root / RECORDED).is_file() else {}


def read_expected(root: Path) -> dict[str, Any]:
    """The counts on file.

    Raises:
        FixtureError: they are missing, or are none.
    """
    return dict(read_checked(root, EXPECTED, EXPECTED_FORMAT))


@contextmanager
def staged(root: Path) -> Iterator[tuple[Path, dict[str, bytes]]]:
    """A copy of a folder of fixtures in which to work, and what every file held when it was made."""
    before = {name: (root / name).read_bytes() for name in [*data_files(root), MANIFEST] if (root / name).is_file()}
    with tempfile.TemporaryDirectory(prefix="pairproof-") as folder:
        stage = Path(folder) / "fixtures"
        for name, data in before.items():
            (stage / name).parent.mkdir(parents=True, exist_ok=True)
            (stage / name).write_bytes(data)
        yield stage, before


def put_in_place(stage: Path, root: Path, before: Mapping[str, bytes]) -> None:
    """Let the files of a copy that differ take the place of the old ones: all of them, or none.

    Args:
        stage: the copy.
        root: the folder of fixtures.
        before: what every file of ``root`` held when the copy was made.

    Raises:
        FixtureError: a file of ``root`` was changed by someone else meanwhile.
    """
    for name in [*data_files(root), MANIFEST]:
        present = (root / name).read_bytes() if (root / name).is_file() else None
        if present != before.get(name):
            raise FixtureError(f"{name}: changed by someone else meanwhile; nothing was written")
    names = [name for name, _ in _differing(stage, before)]
    temporaries = {name: (root / name).with_name(f".{Path(name).name}.{os.getpid()}") for name in names}
    begun: list[str] = []
    try:
        for name, temporary in temporaries.items():
            temporary.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(stage / name, temporary)
        for name, temporary in temporaries.items():
            begun.append(name)
            temporary.replace(root / name)
    except BaseException:
        for name in begun:
            if name in before:
                temporaries[name].write_bytes(before[name])
                temporaries[name].replace(root / name)
            else:
                (root / name).unlink(missing_ok=True)
        raise
    finally:
        for temporary in temporaries.values():
            temporary.unlink(missing_ok=True)


def _differing(stage: Path, before: Mapping[str, bytes]) -> Iterator[tuple[str, str]]:
    """The files of a copy that are not as they were, the manifest last: a reader must not trust it too early."""
    for name in [*data_files(stage), MANIFEST]:
        if (stage / name).read_bytes() != before.get(name):
            yield name, "changed" if name in before else "new"


def _renew_manifest(stage: Path) -> list[str]:
    """Renew the checksums, and say which files were not those that the manifest lists."""
    try:
        listed = dict(read_json(stage, MANIFEST)["files"])
    except (FixtureError, KeyError, TypeError, ValueError):
        write_manifest(stage)
        return [f"{MANIFEST}: missing or damaged"]
    write_manifest(stage)
    present = read_json(stage, MANIFEST)["files"]
    lines = []
    for name in sorted({**listed, **present}):
        if name not in present:
            lines.append(f"{MANIFEST}: {name}: listed, but there is no such file")
        elif listed.get(name) != present[name]:
            altered = f"altered: SHA-256 {listed.get(name)} listed, {present[name]} found"
            lines.append(f"{MANIFEST}: {name}: {altered if name in listed else 'not listed'}")
    return lines


def _lay_out_worked(stage: Path) -> list[str]:
    """Write the worked examples in their one layout. Their counts are held to the figures by the loader."""
    changes = []
    for path, fixture in zip(sorted((stage / "worked").glob("*.json")), load_worked(stage), strict=True):
        text = dump_worked(fixture)
        if path.read_bytes() != text.encode():
            write_atomically(path, text)
            changes.append(f"worked/{path.name}: the same content in another layout")
    write_manifest(stage)
    return changes


def _record(stage: Path, old: Mapping[str, Any], path: str | None, notes: list[str]) -> list[str]:
    """Record the peer whose path is given; without a path say what was kept."""
    with fixtures_at(stage):
        cases = list(load_cases(load_worked()))
    if path is None:
        kept = f"kept as recorded with torch {old['torch']}" if old else "not there"
        notes.append(f"{RECORDED}: {kept}; to record it anew: --peer supcontrast=PATH")
        orphans = sorted({entry["case"] for entry in old.get("records", ())} - {case.id for case in cases})
        if orphans:
            notes.append(f"{RECORDED}: no case is called {', '.join(orphans)}")
        return []
    new = record(cases, path)
    lines = [f"{RECORDED}: {line}" for line in differences(old, new)]
    if new["commit"] is None:
        raise CouldNotRun(
            f"{path}: losses.py has SHA-256 {new['sha256']}, not that of commit {TODAY_COMMIT[:7]}"
            f" ({TODAY_SHA256}); nothing was changed. To record it, first put its commit and SHA-256 into"
            " conformance/implementations/supcontrast.py. It would change:\n" + "\n".join(shortened(lines))
        )
    text = compact_json(new)
    if lines or (stage / RECORDED).read_bytes() != text.encode():
        (stage / RECORDED).parent.mkdir(exist_ok=True)
        write_atomically(stage / RECORDED, text)
    return lines


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """How the recorded behaviour of a peer changed: one line per field, and one per case and dtype.

    Args:
        old: the JSON object of a recorded peer, or an empty one.
        new: the same peer, recorded anew.
    """
    for key in new:
        if key != "records" and old.get(key) != new[key]:
            yield f"{key}: {_text(old.get(key))} -> {_text(new[key])}"
    before, after = ({(e["case"], e["dtype"]): e for e in each.get("records", ())} for each in (old, new))
    for place in {**before, **after}:
        change = _changed(before.get(place), after.get(place))
        if change:
            yield f"{', '.join(place)}: {change}"


def _changed(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> str:
    """What one record became; empty if it is the same."""
    if new is None:
        return "no longer recorded"
    values = ", ".join(map(_text, new["values"]))
    if old is None:
        return f"recorded for the first time: value {values}"
    parts = [f"value {', '.join(map(_text, old['values']))} -> {values}"] if old["values"] != new["values"] else []
    if old["gradient"] != new["gradient"]:
        was, now = (np.array(entry["gradient"], dtype=object) for entry in (old, new))
        if was.shape != now.shape:
            return "; ".join([*parts, f"gradient of shape {list(was.shape)} -> {list(now.shape)}"])
        differ = np.argwhere(was != now)
        i, d = differ[0]
        change = f"{_text(was[i, d])} -> {_text(now[i, d])} ({len(differ)} of {was.size} entries differ)"
        parts = [*(parts or ["value the same"]), f"gradient [{i}, {d}] {change}"]
    return "; ".join(parts)


def _text(value: Any) -> str:
    return "nothing" if value is None else str(value)


def shortened(lines: Sequence[str]) -> list[str]:
    """The first ``LONGEST_DIFF`` lines, and how many more there are."""
    more = len(lines) - LONGEST_DIFF
    return [*lines[:LONGEST_DIFF], f"... and {more} more"] if more > 0 else list(lines)


def _count(
    stage: Path,
    peers: Mapping[str, str],
    notes: list[str],
    progress: Progress | None,
    judge: Callable[[Selection, Progress | None], Report],
) -> list[str]:
    """Run everything on the copy and write how many checks of each kind there are."""
    changes: list[str] = []
    try:
        stored = read_expected(stage)
    except FixtureError as error:
        stored = {"counts": {}, "entries": {}}
        changes.append(str(error))
    (stage / EXPECTED).unlink(missing_ok=True)
    write_manifest(stage)
    with fixtures_at(stage):
        report = judge(Selection(peers={name: path for name, path in peers.items() if name == "folder"}), progress)
        found = expected_counts(report, load_cases(load_worked()))
    notes += counted_without_running(report)
    if not changes:
        was, now = ({**each["counts"], "printed entries": each["entries"]} for each in (stored, found))
        for key in sorted({**was, **now}, key=lambda key: (key == "printed entries", key)):
            if was.get(key) != now.get(key):
                changes.append(f"{EXPECTED}: {key}: {show_counts(was.get(key))} -> {show_counts(now.get(key))}")
    write_counts(stage, found)
    notes += failures(report)
    return changes


def counted_without_running(report: Report) -> list[str]:
    """One line per implementation whose counts follow from its declarations, because it is absent."""
    names = {kind.name for kind in ALL if kind.anywhere}
    return [
        f"{name}: counted by what it declares, without running it: {reason}"
        for name, reason in report.absent.items()
        if name in names
    ]


def write_counts(stage: Path, counts: Mapping[str, Any]) -> None:
    """Write ``expected.json`` into a copy of the fixtures."""
    write_atomically(stage / EXPECTED, json.dumps(counts, indent=1) + "\n")


def failures(report: Report) -> list[str]:
    """One line per check of a run that does not hold, with the command that repeats it."""
    return [
        f"does not hold: {', '.join(filter(None, (check.case, check.implementation, check.dtype)))}: {check.message};"
        f" repeat: {check.repeat}"
        for check in report.checks
        if check.status in BAD
    ]


def compact_json(data: Mapping[str, Any]) -> str:
    """JSON with one line per record, so that a change of behaviour reads as a short diff."""
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in data.items() if key != "records"]
    records = ",\n".join("  " + json.dumps(entry) for entry in data["records"])
    return "{\n" + "\n".join(lines) + '\n "records": [\n' + records + "\n ]\n}\n"
