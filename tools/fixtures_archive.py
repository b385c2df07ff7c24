"""Pack the fixtures into an archive for readers in any language.

The archive contains the data files and their checksums, the README, the changelog, the license and the programs in
``readers/``. Matrices that are given by a formula are written out as rows. The same files always give the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import json
import re
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pairproof.conformance.suite.formulas import Formula
from pairproof.conformance.suite.golden import golden_files, load_golden
from pairproof.conformance.suite.store import MANIFEST, data_files, dump_json

ROOT = Path(__file__).resolve().parent.parent
INPUTS = ("embeddings", "arguments", "keywords")
"""The fields of a published case that must not change."""


class Refused(ValueError):
    """The archive cannot be made."""


def version_of(changelog: str) -> tuple[int, int]:
    """Return the newest version in a changelog: the first heading such as ``## 1.0``.

    Raises:
        Refused: there is no such heading.
    """
    found = re.search(r"^## (\d+)\.(\d+)$", changelog, re.MULTILINE)
    if not found:
        raise Refused("fixtures/CHANGELOG.md: expected a heading such as ## 1.0")
    return int(found[1]), int(found[2])


def contents(root: Path) -> dict[str, bytes]:
    """Return the files of the archive by their path in it.

    Args:
        root: the repository.
    """
    fixtures = root / "fixtures"
    names = [*data_files(fixtures), MANIFEST, "README.md", "CHANGELOG.md"]
    files = {name: (fixtures / name).read_bytes() for name in names}
    manifest = json.loads(files[MANIFEST])
    for name in golden_files(fixtures):
        files[name] = written_out(files[name])
        manifest["files"][name] = hashlib.sha256(files[name]).hexdigest()
    files[MANIFEST] = dump_json(manifest).encode()
    files |= {f"readers/{path.name}": path.read_bytes() for path in (root / "readers").iterdir()}
    return {"LICENSE": (root / "LICENSE").read_bytes(), **files}


def written_out(text: bytes) -> bytes:
    """Return the JSON text of a golden file in which the rows of every matrix are written out."""
    data = json.loads(text)
    for case in data["cases"]:
        for holder in (case, case["arguments"]):
            for name, value in holder.items():
                if isinstance(value, dict) and "seed" in value:
                    holder[name] = Formula(**value).matrix().tolist()
    return dump_json(data).encode()


def pack(files: Mapping[str, bytes], folder: str) -> bytes:
    """Return a tar.gz with the files in one folder. Equal files give equal bytes."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=6, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as archive,
    ):
        for name in sorted(files):
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size = len(files[name])
            archive.addfile(entry, io.BytesIO(files[name]))
    return packed.getvalue()


def unpack(path: Path) -> dict[str, bytes]:
    """Return the files of an archive by their path in its folder.

    Raises:
        Refused: the file cannot be read as an archive.
    """
    try:
        with tarfile.open(path) as archive:
            members = [member for member in archive if member.isfile()]
            read = ((member.name.partition("/")[2], archive.extractfile(member)) for member in members)
            return {name: file.read() for name, file in read if file}
    except (OSError, tarfile.TarError) as error:
        raise Refused(f"--previous: {path} cannot be read: {error}") from error


def golden_cases(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return every golden case by its id."""
    loaded = [json.loads(text) for name, text in files.items() if name.startswith("golden/")]
    return {case["id"]: case for data in loaded for case in data.get("cases", ()) if "embeddings" in case}


def compare(files: Mapping[str, bytes], before: Mapping[str, bytes]) -> None:
    """Check the cases and the version against an earlier archive.

    Raises:
        Refused: the version is older, a case was added without a new version, or a case is missing or changed without
            a new format (the first number of the version).
    """
    version, earlier = (version_of(one["CHANGELOG.md"].decode()) for one in (files, before))
    if version < earlier:
        raise Refused(f"version {version[0]}.{version[1]} is older than that of the earlier archive")
    cases, old = golden_cases(files), golden_cases(before)
    if version[0] == earlier[0]:
        for name, case in old.items():
            if name not in cases:
                raise Refused(f"{name}: the case is missing; only a new format may leave out cases")
            changed = [field for field in INPUTS if case[field] != cases[name][field]]
            if changed:
                raise Refused(f"{name}: {changed[0]} changed, so the case needs a new id")
    added = len(cases.keys() - old.keys())
    if added and version == earlier:
        raise Refused(f"{added} cases were added, so the version must increase in fixtures/CHANGELOG.md")


def main(arguments: list[str] | None = None) -> int:
    """Write the archive; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "dist", metavar="FOLDER", help="default: dist")
    parser.add_argument("--previous", type=Path, metavar="FILE", help="an earlier archive whose cases must be kept")
    options = parser.parse_args(arguments)
    try:
        earlier = unpack(options.previous) if options.previous else None
        load_golden()  # validates the files and their checksums
        files = contents(ROOT)
        version = version_of(files["CHANGELOG.md"].decode())
        formats = {json.loads(files[name])["format"] for name in golden_files(ROOT / "fixtures")}
        wrong = [name for name in formats if not name.endswith(f"/{version[0]}")]
        if wrong:
            raise Refused(f"fixtures/CHANGELOG.md: version {version[0]}.{version[1]}, but the format is {wrong[0]}")
        if earlier:
            compare(files, earlier)
    except Refused as error:
        print(f"fixtures-archive: {error}", file=sys.stderr)
        return 1
    name = f"pairproof-fixtures-{version[0]}.{version[1]}"
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{name}.tar.gz"
    path.write_bytes(pack(files, name))
    print(f"{path}: {len(golden_cases(files))} golden cases, {path.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
