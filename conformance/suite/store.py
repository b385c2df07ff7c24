"""A folder of fixtures: its manifest of checksums, its JSON and schemas, and how files are written."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

MANIFEST_FORMAT = "pairproof-manifest/1"
MANIFEST = "manifest.json"


class FixtureError(ValueError):
    """A fixture that cannot be trusted: the message names the file, the field as a JSON path, and what is wrong."""


_elsewhere: ContextVar[Path | None] = ContextVar("fixtures", default=None)


def require(met: bool, path: str, message: str) -> None:
    """Raise a FixtureError unless a condition is met.

    Args:
        met: the condition.
        path: the file and, after a colon, the field.
        message: what is wrong where the condition is not met.
    """
    if not met:
        raise FixtureError(f"{path}: {message}")


@contextmanager
def fixtures_at(root: Path) -> Iterator[None]:
    """Let another folder stand for the installed one inside a ``with``.

    Args:
        root: a folder of fixtures.
    """
    token = _elsewhere.set(root)
    try:
        yield
    finally:
        _elsewhere.reset(token)


def fixtures_root() -> Path:
    """The folder of the installed ``pairproof.fixtures``, or the one that ``fixtures_at`` names.

    Raises:
        FixtureError: the folder is not installed.
    """
    elsewhere = _elsewhere.get()
    if elsewhere is not None:
        return elsewhere
    spec = importlib.util.find_spec("pairproof.fixtures")
    folders = spec and spec.submodule_search_locations
    if not folders:
        raise FixtureError("pairproof.fixtures: expected the folder of fixtures to be installed, found none")
    return Path(folders[0])


def checked_root(root: Path | None) -> Path:
    """A folder of fixtures, by default the installed one, held to its manifest. Raises as check_manifest does."""
    root = fixtures_root() if root is None else root
    check_manifest(root)
    return root


def data_files(root: Path) -> list[str]:
    """Every data file of a folder of fixtures, as sorted paths relative to it.

    Data is everything but the manifest itself, the README, Python's own files, and files whose name begins with a dot.
    """
    files = {path.relative_to(root) for path in root.rglob("*") if path.is_file() and path.suffix != ".py"}
    kept = (path for path in files if not any(part.startswith((".", "__pycache__")) for part in path.parts))
    return sorted({path.as_posix() for path in kept} - {MANIFEST, "README.md"})


def _checksums(root: Path) -> dict[str, str]:
    return {name: hashlib.sha256((root / name).read_bytes()).hexdigest() for name in data_files(root)}


def write_manifest(root: Path | None = None) -> Path:
    """Write ``manifest.json``: the SHA-256 of every data file. Atomic: a reader sees the old one or the new one.

    Args:
        root: a folder of fixtures; by default the installed one.

    Returns:
        The path of the manifest.
    """
    root = fixtures_root() if root is None else root
    write_atomically(root / MANIFEST, dump_json({"format": MANIFEST_FORMAT, "files": _checksums(root)}))
    return root / MANIFEST


def write_atomically(path: Path, text: str) -> None:
    """Replace a file whole: a reader sees the old text or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def check_manifest(root: Path) -> None:
    """Hold every data file to the manifest.

    Raises:
        FixtureError: the manifest is missing or malformed, or a file is altered, missing or not listed.
    """
    manifest = read_json(root, MANIFEST)
    _check_format(MANIFEST, manifest, MANIFEST_FORMAT)
    listed = manifest.get("files")
    wanted = "expected an object of path to SHA-256"
    require(isinstance(listed, dict), f"{MANIFEST}: $.files", f"{wanted}, got {type(listed).__name__}")
    present = _checksums(root)
    for name, actual in present.items():
        require(name in listed, name, f"not listed in {MANIFEST} (its SHA-256 is {actual})")
    for name, expected in listed.items():
        require(name in present, name, f"missing; {MANIFEST} lists it with SHA-256 {expected}")
        require(present[name] == expected, name, f"altered: expected SHA-256 {expected}, got {present[name]}")


def dump_json(value: Any, longest: float = float("inf")) -> str:
    """The text of a JSON value, the same for the same content: one line per field, one per row of a matrix.

    Args:
        value: what JSON can hold, tuples included.
        longest: a list with a longer entry than this gets a line for each entry.

    Returns:
        The text, ending in a newline.
    """

    def write(value: Any, indent: str) -> str:
        inner = indent + " "
        if isinstance(value, Mapping) and value:
            lines = [f"{inner}{json.dumps(key)}: {write(item, inner)}" for key, item in value.items()]
            return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
        nested = (list, tuple, Mapping)
        if isinstance(value, nested) and any(isinstance(x, nested) or len(str(x)) > longest for x in value):
            return "[\n" + ",\n".join(inner + write(item, inner) for item in value) + f"\n{indent}]"
        return json.dumps(value, ensure_ascii=False)

    return write(value, "") + "\n"


def read_json(root: Path, name: str) -> Any:
    """The content of one file of a folder of fixtures.

    Raises:
        FixtureError: the file cannot be read, is not JSON, or says one name twice in an object.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            require(key not in seen, name, f"the name {key!r} stands twice in one object")
            seen[key] = value
        return seen

    try:
        return json.loads((root / name).read_text(encoding="utf-8"), object_pairs_hook=unique)
    except OSError as error:
        raise FixtureError(f"{name}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FixtureError(f"{name}: not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise FixtureError(f"{name}: not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error


Change = Callable[[Any], Any]


def _same(value: Any) -> Any:
    return value


def _check_format(name: str, data: Any, expected: str) -> None:
    found = data.get("format") if isinstance(data, dict) else None
    require(found == expected, f"{name}: $.format", f"expected {expected!r}, got {found!r}")


def check_schema(root: Path, name: str, data: Any, expected: str, loosen: Change = _same) -> None:
    """Hold the content of a file to its format and to the format's schema.

    Args:
        root: a folder of fixtures. The schema of "pairproof-golden-flags/1" is its schema/golden_flags.schema.json.
        name: of the file, for the message.
        data: its content.
        expected: its format.
        loosen: makes another schema of the format's.

    Raises:
        FixtureError: the content is of another format or breaks the schema.
        ImportError: jsonschema is not installed.
    """
    _check_format(name, data, expected)
    kind = expected.removeprefix("pairproof-").partition("/")[0].replace("-", "_")
    schema = loosen(read_json(root, f"schema/{kind}.schema.json"))
    try:
        jsonschema: Any = importlib.import_module("jsonschema")
    except ImportError as error:
        raise ImportError('loading the fixtures needs jsonschema: pip install "pairproof[verify]"') from error
    wrong = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(data))
    if wrong is not None:
        raise FixtureError(f"{name}: {wrong.json_path}: {wrong.message}")


def read_checked(root: Path, name: str, expected: str, thin: Change = _same, loosen: Change = _same) -> Any:
    """The content of one file of a folder of fixtures, of the format that it must have, held to its schema.

    Args:
        root: a folder of fixtures.
        name: the file, relative to it.
        expected: its format.
        thin: leaves out what need not be held to the schema.
        loosen: as in ``check_schema``.

    Raises:
        FixtureError: the file cannot be read, is of another format, or breaks the schema.
    """
    data = read_json(root, name)
    check_schema(root, name, thin(data), expected, loosen)
    return data


def place(index: Iterable[int]) -> str:
    """An index as a message writes it after a name: [0][3]."""
    return "".join(f"[{k}]" for k in index)


def check_ids(path: str, ids: Sequence[str]) -> None:
    """Raise a FixtureError where an id stands twice in a list of entries.

    Args:
        path: the file and the list.
        ids: of its entries.
    """
    for k, identity in enumerate(ids):
        require(identity not in ids[:k], f"{path}[{k}].id", f"{identity!r} stands twice")
