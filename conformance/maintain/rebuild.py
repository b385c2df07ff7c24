"""Rebuild everything that is derived in the fixtures: golden results, counts, layout, recorded peers, checksums.

The work is done in a copy of the folder. Files are replaced at the end, so that an error leaves them unchanged.
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

from ..documents.load import dump_worked, load_worked
from ..implementations import ALL
from ..implementations.supcontrast import RECORDED, RECORDED_FORMAT, TODAY_COMMIT, TODAY_SHA256, record
from ..judge import verify
from ..judge.options import CouldNotRun, Selection
from ..judge.results import BAD
from ..suite import golden, store
from ..suite.progress import Progress
from ..suite.store import MANIFEST, FixtureError
from .prove import prove_golden

LONGEST_DIFF = 40
"""Maximum number of printed lines of a difference."""


@dataclass(frozen=True)
class Rebuilt:
    """The result of a rebuild.

    Attributes:
        changes: changes to the files, one line each; empty on a clean tree.
        notes: what was kept or could not be run, one line each.
        failed: checks that fail on the rebuilt fixtures, one line each.
    """

    changes: tuple[str, ...]
    notes: tuple[str, ...]
    failed: tuple[str, ...]


def rebuild(
    peers: Mapping[str, str],
    root: Path | None = None,
    *,
    processes: int | None = None,
    progress: Progress | None = None,
    keep: bool = True,
    judge: Callable[[Selection, Progress | None], verify.Report] | None = None,
) -> Rebuilt:
    """Derive everything again and write the files that differ. On a clean tree, nothing is written.

    A failing check is counted with the status that the implementation's declarations predict: passed, or deviates. So
    the counts are right once the failure is corrected.

    Args:
        peers: paths by name: that of "supcontrast", which is recorded again, and "folder", the folder of the others.
        root: folder of fixtures; by default the installed one.
        processes: number of processes for proofs; by default one per core.
        progress: called at each step.
        keep: whether to write; otherwise the changes are only reported.
        judge: returns the report of a complete run; by default :func:`pairproof.conformance.judge.verify.run`.

    Returns:
        The changes, and the checks that fail.

    Raises:
        FixtureError: A file cannot be read, violates its schema or contradicts itself.
        CertificationError: A result cannot be proved.
        CouldNotRun: The path of a peer does not exist, or the peer has another revision than the recorded one. For
            another revision, the message lists the differences.
        UsageError: A peer is unknown.
        Unavailable: The path of a peer does not contain this peer.
    """
    verify.check_names(Selection(peers=peers))
    root = store.fixtures_root() if root is None else root
    with staged(root) as (stage, before):
        notes: list[str] = []
        changes = _renew_manifest(stage)
        changes += _lay_out_worked(stage)
        recorded = _recorded(stage)
        changes += prove_golden(stage, processes=processes, progress=progress)
        changes += _record(stage, recorded, peers.get("supcontrast"), notes)
        store.write_manifest(stage)
        selection = Selection(peers={name: path for name, path in peers.items() if name == "folder"}, thorough=True)
        report = _count(stage, changes, lambda: (judge or verify.run)(selection, progress))
        store.write_manifest(stage)
        validate(stage)
        reported = {change.partition(": ")[0] for change in changes}
        others = [name for name in _changed(stage, before) if name not in reported]
        changes += [f"{name}: {'changed' if name in before else 'new'}" for name in others]
        if keep:
            put_in_place(stage, root, before)
    return Rebuilt(tuple(changes), (*notes, *counted_without_running(report)), tuple(failures(report)))


def validate(root: Path) -> None:
    """Check every file against the manifest, its schema and itself.

    Raises:
        FixtureError: A file is invalid. The message names the file and the field.
    """
    load_worked(root)
    golden.load_golden(root)
    golden.load_errors(root)
    read_expected(root)
    _recorded(root)


def _recorded(root: Path) -> dict[str, Any]:
    """Return the recorded results of supcontrast; empty if there are none."""
    return dict(store.read_checked(root, RECORDED, RECORDED_FORMAT)) if (root / RECORDED).is_file() else {}


def read_expected(root: Path) -> dict[str, Any]:
    """Return the stored counts.

    Raises:
        FixtureError: The file is missing or invalid.
    """
    return dict(store.read_checked(root, verify.EXPECTED, verify.EXPECTED_FORMAT))


def _contents(root: Path) -> dict[str, bytes]:
    """Return the contents of all data files by name. The manifest is last."""
    return {name: (root / name).read_bytes() for name in [*store.data_files(root), MANIFEST] if (root / name).is_file()}


@contextmanager
def staged(root: Path) -> Iterator[tuple[Path, dict[str, bytes]]]:
    """Copy the fixtures to a temporary folder. Yield the copy, and the contents of its files by name."""
    with tempfile.TemporaryDirectory(prefix="pairproof-") as folder:
        stage = Path(shutil.copytree(root, Path(folder) / "fixtures"))
        yield stage, _contents(stage)


def put_in_place(stage: Path, root: Path, before: Mapping[str, bytes]) -> None:
    """Replace the files in ``root`` that differ from the copy: all of them, or none.

    Args:
        stage: the copy.
        root: the folder of fixtures.
        before: the contents of the files in ``root`` when the copy was made, by name.

    Raises:
        FixtureError: A file of ``root`` was changed by another process.
    """
    now = _contents(root)
    for name in {**before, **now}:
        if now.get(name) != before.get(name):
            raise FixtureError(f"{name}: changed by another process; nothing was written")
    changed = _changed(stage, before)
    new, old = (
        {name: (root / name).with_name(f".{Path(name).name}.{os.getpid()}.{kind}") for name in changed}
        for kind in ("new", "old")
    )
    replaced: list[str] = []
    try:
        # Everything is written before a file is replaced: on a full disk, renaming still works.
        for name in changed:
            new[name].parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(stage / name, new[name])
            if name in before:
                old[name].write_bytes(before[name])
        for name in changed:
            replaced.append(name)
            new[name].replace(root / name)
    except BaseException:
        for name in replaced:
            if name in before:
                old[name].replace(root / name)
            else:
                (root / name).unlink(missing_ok=True)
        raise
    finally:
        for temporary in (*new.values(), *old.values()):
            temporary.unlink(missing_ok=True)


def _changed(stage: Path, before: Mapping[str, bytes]) -> list[str]:
    """Return the changed files. The manifest is last: it must not list files that are not yet written."""
    return [name for name, data in _contents(stage).items() if data != before.get(name)]


def _renew_manifest(stage: Path) -> list[str]:
    """Update the checksums and report the files that did not match the manifest."""
    try:
        listed = dict(store.read_json(stage, MANIFEST)["files"])
    except (FixtureError, KeyError, TypeError, ValueError):
        store.write_manifest(stage)
        return [f"{MANIFEST}: missing or damaged"]
    store.write_manifest(stage)
    found = store.read_json(stage, MANIFEST)["files"]
    return [
        f"{MANIFEST}: {name}: SHA-256 listed: {listed.get(name, 'none')}; found: {found.get(name, 'no such file')}"
        for name in sorted({**listed, **found})
        if listed.get(name) != found.get(name)
    ]


def _lay_out_worked(stage: Path) -> list[str]:
    """Write the worked examples in the standard layout, and report the files that had another layout."""
    changes = []
    for path, fixture in zip(sorted((stage / "worked").glob("*.json")), load_worked(stage), strict=True):
        text = dump_worked(fixture)
        if path.read_bytes() != text.encode():
            store.write_atomically(path, text)
            changes.append(f"worked/{path.name}: the same content in another layout")
    store.write_manifest(stage)
    return changes


def _record(stage: Path, old: Mapping[str, Any], path: str | None, notes: list[str]) -> list[str]:
    """Record the results of supcontrast and return the changes. Without a path, only add notes."""
    with store.fixtures_at(stage):
        cases = list(verify.load_cases(load_worked()))
    if path is None:
        kept = f"kept as recorded with torch {old['torch']}" if old else "missing"
        notes.append(f"{RECORDED}: {kept}; to record it again: --peer supcontrast=PATH")
        orphans = sorted({entry["case"] for entry in old.get("records", ())} - {case.id for case in cases})
        if orphans:
            notes.append(f"{RECORDED}: has results of unknown cases: {', '.join(orphans)}")
        return []
    new = record(cases, path)
    lines = [f"{RECORDED}: {line}" for line in differences(old, new)]
    if new["commit"] is None:
        raise CouldNotRun(
            f"{path}: losses.py has SHA-256 {new['sha256']}, not that of commit {TODAY_COMMIT[:7]}"
            f" ({TODAY_SHA256}); nothing was changed. To record it, first put its commit and SHA-256 into"
            " conformance/implementations/supcontrast.py. It would change:\n" + "\n".join(shortened(lines))
        )
    (stage / RECORDED).parent.mkdir(exist_ok=True)
    store.write_atomically(stage / RECORDED, compact_json(new))
    return lines


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line per field of a recorded peer that changed, and one per case and dtype.

    Args:
        old: JSON object of a recorded peer, or an empty one.
        new: JSON object of the same peer, recorded again.
    """
    for key in new:
        if key != "records" and old.get(key) != new[key]:
            yield f"{key}: {_text(old.get(key))} -> {_text(new[key])}"
    before, after = ({(e["case"], e["dtype"]): e for e in each.get("records", ())} for each in (old, new))
    for place in {**before, **after}:
        if change := _difference(before.get(place), after.get(place)):
            yield f"{', '.join(place)}: {change}"


def _difference(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> str:
    if new is None:
        return "no longer recorded"
    values = ", ".join(map(_text, new["values"]))
    if old is None:
        return f"recorded for the first time: value {values}"
    parts = [f"value {', '.join(map(_text, old['values']))} -> {values}"] if old["values"] != new["values"] else []
    if old["gradient"] != new["gradient"]:
        entries = (enumerate(record["gradient"]) for record in (old, new))
        was, now = ({(i, d): x for i, row in rows for d, x in enumerate(row)} for rows in entries)
        differ = [place for place in {**was, **now} if was.get(place) != now.get(place)]
        change = (
            f"{_text(was.get(differ[0]))} -> {_text(now.get(differ[0]))} ({len(differ)} of {len(was)} entries differ)"
        )
        parts = [*(parts or ["value the same"]), f"gradient {list(differ[0])} {change}"]
    return "; ".join(parts)


def _text(value: Any) -> str:
    return "nothing" if value is None else str(value)


def shortened(lines: Sequence[str]) -> list[str]:
    """Return the first ``LONGEST_DIFF`` lines, and the number of the others."""
    more = len(lines) - LONGEST_DIFF
    return [*lines[:LONGEST_DIFF], f"... and {more} more"] if more > 0 else list(lines)


def _count(stage: Path, changes: list[str], judge: Callable[[], verify.Report]) -> verify.Report:
    """Run everything on the copy, write the counts of checks, and append their changes to ``changes``."""
    stored = None
    try:
        stored = read_expected(stage)
    except FixtureError as error:
        changes.append(str(error))
    (stage / verify.EXPECTED).unlink(missing_ok=True)
    store.write_manifest(stage)
    with store.fixtures_at(stage):
        report = judge()
        found = verify.expected_counts(report, verify.load_cases(load_worked()))
    if stored:
        was, now = ({**each["counts"], verify.PRINTED: each["entries"]} for each in (stored, found))
        for key in {**was, **now}:
            old, new = (verify.show_counts(each.get(key)) for each in (was, now))
            changes += [f"{verify.EXPECTED}: {key}: {old} -> {new}"] if old != new else []
    write_counts(stage, found)
    return report


def counted_without_running(report: verify.Report) -> list[str]:
    """Return one line for each absent implementation. Its counts follow from its declarations."""
    return [
        f"{kind.name}: not run, so its counts follow from its declarations: {report.absent[kind.name]}"
        for kind in ALL
        if kind.anywhere and kind.name in report.absent
    ]


def write_counts(stage: Path, counts: Mapping[str, Any]) -> None:
    """Write ``expected.json`` into a copy of the fixtures."""
    store.write_atomically(stage / verify.EXPECTED, json.dumps(counts, indent=1) + "\n")


def failures(report: verify.Report) -> list[str]:
    """Return one line for each failed check, with the command that repeats it."""
    return [
        f"failed: {', '.join(filter(None, (check.case, check.implementation, check.dtype)))}: {check.message};"
        f" repeat: {check.repeat}"
        for check in report.checks
        if check.status in BAD
    ]


def compact_json(data: Mapping[str, Any]) -> str:
    """Return JSON with one line per record, so that a diff shows the changed records."""
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in data.items() if key != "records"]
    records = ",\n".join("  " + json.dumps(entry) for entry in data["records"])
    return "{\n" + "\n".join(lines) + '\n "records": [\n' + records + "\n ]\n}\n"
