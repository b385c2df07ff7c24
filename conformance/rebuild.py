"""Rebuild what the fixtures derive from the rest: recorded peers, expected counts, the manifest of checksums."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .fixtures import data_files, fixtures_root, load_worked, write_manifest
from .peers import ALL
from .peers.supcontrast import RECORDED, record
from .run import EXPECTED, CouldNotRun, Selection, expected_counts, load_cases, run


def rebuild(peers: Mapping[str, str], *, check: bool = False) -> list[str]:
    """Write every derived file whose content differs from what is there.

    Args:
        peers: paths by peer name; with "supcontrast" the recorded values are taken anew.
        check: write nothing lasting; only say what would change.

    Returns:
        One line per file that changed, or would.

    Raises:
        CouldNotRun: an implementation is absent, so that the counts would be short.
    """
    root = fixtures_root()
    before = {
        name: (root / name).read_bytes() for name in [*data_files(root), "manifest.json"] if (root / name).is_file()
    }
    try:
        write_manifest(root)
        if "supcontrast" in peers:
            cases = list(load_cases(load_worked(root)))
            replace(root / RECORDED, compact_json(record(cases, peers["supcontrast"])))
            write_manifest(root)
        report = run(Selection(required=tuple(kind.name for kind in ALL)))
        if report.absent:
            raise CouldNotRun(f"the counts need every implementation; absent: {', '.join(report.absent)}")
        replace(root / EXPECTED, json.dumps(expected_counts(report), indent=1) + "\n")
        write_manifest(root)
        after = {name: (root / name).read_bytes() for name in [*data_files(root), "manifest.json"]}
    finally:
        if check:
            _restore(root, before)
    return [
        f"{name}: {'changed' if name in before else 'new'}" for name, data in after.items() if before.get(name) != data
    ]


def _restore(root: Path, before: Mapping[str, bytes]) -> None:
    for name in data_files(root):
        if name not in before:
            (root / name).unlink()
    for name, data in before.items():
        if (root / name).read_bytes() != data:
            replace(root / name, data.decode())


def replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{os.getpid()}"
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def compact_json(data: dict[str, Any]) -> str:
    """JSON with one line per record, so that a change of behaviour reads as a short diff."""
    head = {key: value for key, value in data.items() if key != "records"}
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    records = ",\n".join("  " + json.dumps(entry) for entry in data["records"])
    return "{\n" + "\n".join(lines) + '\n "records": [\n' + records + "\n ]\n}\n"
