"""A folder of fixtures: the manifest of checksums, the JSON files and their schemas, and writing files."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from pairproof import install_command

MANIFEST_FORMAT = "pairproof-manifest/1"
MANIFEST = "manifest.json"


class FixtureError(ValueError):
    """A fixture is invalid. The message names the file, the field as a JSON path, and the problem."""


_elsewhere: ContextVar[Path | None] = ContextVar("fixtures", default=None)


def require(met: bool, path: str, message: str) -> None:
    """Raise a FixtureError unless a condition is met.

    Args:
        met: the condition.
        path: the file and, after a colon, the field.
        message: the problem if the condition is not met.
    """
    if not met:
        raise FixtureError(f"{path}: {message}")


def expect(met: bool, path: str, expected: object, found: object) -> None:
    """Raise a FixtureError with an expected and a found value, unless a condition is met.

    Args:
        met: the condition.
        path: the file and, after a colon, the field.
        expected: the expected value, or a description of it.
        found: the value found, or a description of it.
    """
    require(met, path, f"expected {expected}, got {found}")


@contextmanager
def damage_of(name: str) -> Iterator[None]:
    """Convert exceptions caused by the content of a file into a FixtureError that names the file.

    Causes are, for example, deep nesting and integers with too many digits.

    Args:
        name: name of the file, for messages.
    """
    try:
        yield
    except FixtureError:
        raise
    except RecursionError as error:
        raise FixtureError(f"{name}: nested too deeply") from error
    except UnicodeDecodeError as error:
        raise FixtureError(f"{name}: not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise FixtureError(f"{name}: not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error
    except (ArithmeticError, ValueError) as error:
        raise FixtureError(f"{name}: {str(error).splitlines()[0]}") from error


@contextmanager
def fixtures_at(root: Path) -> Iterator[None]:
    """Use the folder of fixtures ``root`` instead of the installed one, inside a ``with`` statement."""
    token = _elsewhere.set(root)
    try:
        yield
    finally:
        _elsewhere.reset(token)


def fixtures_root() -> Path:
    """The folder of the installed ``pairproof.fixtures``, or the folder given to ``fixtures_at``.

    Raises:
        FixtureError: the folder is not installed.
    """
    if (elsewhere := _elsewhere.get()) is not None:
        return elsewhere
    spec = importlib.util.find_spec("pairproof.fixtures")
    folders = spec and spec.submodule_search_locations
    if not folders:
        raise FixtureError("pairproof.fixtures: expected the folder of fixtures to be installed, found none")
    return Path(folders[0])


def checked_root(root: Path | None) -> Path:
    """Check a folder of fixtures (by default the installed one) against its manifest, and return it.

    Raises:
        FixtureError: as ``check_manifest``.
    """
    root = fixtures_root() if root is None else root
    check_manifest(root)
    return root


def data_files(root: Path) -> list[str]:
    """The data files of a folder of fixtures, as sorted paths relative to it.

    All files are data, except the manifest, the README, the changelog, Python files and caches, and hidden files.
    """
    files = {path.relative_to(root) for path in root.rglob("*") if path.is_file() and path.suffix != ".py"}
    kept = (path for path in files if not any(part.startswith((".", "__pycache__")) for part in path.parts))
    return sorted({path.as_posix() for path in kept} - {MANIFEST, "README.md", "CHANGELOG.md"})


def _checksums(root: Path) -> dict[str, str]:
    return {name: _checksum(root / name) for name in data_files(root)}


def _checksum(path: Path) -> str:
    """The SHA-256 of a file, cached until the file changes.

    A file that changed within the last 3 seconds is not cached: another change may have the same time.
    """
    status = path.stat()
    key = (path, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    if (known := _known_checksums.get(key)) is not None:
        return known
    checksum = hashlib.sha256(path.read_bytes()).hexdigest()
    if time.time() - max(status.st_mtime, status.st_ctime) > 3:
        _known_checksums[key] = checksum
    return checksum


_known_checksums: dict[tuple[Path, int, int, int, int], str] = {}
"""Checksums by path, inode, size and times of the file."""


def write_manifest(root: Path | None = None) -> Path:
    """Write ``manifest.json``, the SHA-256 of every data file, atomically.

    Args:
        root: a folder of fixtures; by default the installed one.

    Returns:
        The path of the manifest.
    """
    root = fixtures_root() if root is None else root
    write_atomically(root / MANIFEST, dump_json({"format": MANIFEST_FORMAT, "files": _checksums(root)}))
    return root / MANIFEST


def write_atomically(path: Path, text: str) -> None:
    """Replace the content of a file. Other processes read either the old text or the new text."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def check_manifest(root: Path) -> None:
    """Compare the checksum of every data file with the manifest.

    Raises:
        FixtureError: the manifest is missing or malformed, or a data file is altered, missing or not listed.
    """
    manifest = read_json(root, MANIFEST)
    _check_format(MANIFEST, manifest, MANIFEST_FORMAT)
    listed = manifest.get("files")
    right = isinstance(listed, dict) and all(isinstance(checksum, str) for checksum in listed.values())
    expect(right, f"{MANIFEST}: $.files", "an object of path to SHA-256", type(listed).__name__)
    present = _checksums(root)
    for name, actual in present.items():
        require(name in listed, name, f"not listed in {MANIFEST} (its SHA-256 is {actual})")
    for name, expected in listed.items():
        require(name in present, name, f"missing; {MANIFEST} lists it with SHA-256 {expected}")
        require(present[name] == expected, name, f"altered: expected SHA-256 {expected}, got {present[name]}")


def dump_json(value: Any, longest: float = float("inf")) -> str:
    """Serialise a value as JSON in a fixed layout: one line per field, and one per row of a matrix.

    Args:
        value: a JSON value; tuples are written as arrays.
        longest: a list gets one line per entry if one of its entries is longer than this many characters.

    Returns:
        The text, ending in a newline.
    """
    nested = (list, tuple, Mapping)

    def in_lines(value: Any) -> bool:
        if not isinstance(value, nested):
            return False
        kinds = {*map(type, value)}  # most rows consist of thousands of floats
        return any(issubclass(kind, nested) for kind in kinds) or (
            longest < float("inf") and any(len(str(x)) > longest for x in value)
        )

    def write(value: Any, indent: str) -> str:
        inner = indent + " "
        if isinstance(value, Mapping) and value:
            lines = [f"{inner}{json.dumps(key)}: {write(item, inner)}" for key, item in value.items()]
            return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
        if in_lines(value):
            return "[\n" + ",\n".join(inner + write(item, inner) for item in value) + f"\n{indent}]"
        return json.dumps(value, ensure_ascii=False)

    return write(value, "") + "\n"


def read_json(root: Path, name: str) -> Any:
    """Read a JSON file of a folder of fixtures.

    Raises:
        FixtureError: the file cannot be read or parsed, or an object has a duplicate name.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            require(key not in seen, name, f"duplicate name {key!r} in an object")
            seen[key] = value
        return seen

    try:
        with damage_of(name):
            return json.loads((root / name).read_text(encoding="utf-8"), object_pairs_hook=unique)
    except OSError as error:
        raise FixtureError(f"{name}: cannot be read: {error.strerror}") from error


def _check_format(name: str, data: Any, expected: str) -> None:
    found = data.get("format") if isinstance(data, dict) else None
    got = repr(found) if isinstance(found, str) or found is None else type(found).__name__
    expect(found == expected, f"{name}: $.format", repr(expected), got)


def _first_rows(value: Any) -> Any:
    """JSON in which every matrix of numbers has only its first row."""
    if isinstance(value, Mapping):
        return {key: _first_rows(item) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    matrix = all(isinstance(row, list) and all(type(x) in (int, float) for x in row) for row in value)
    return value[:1] if matrix else list(map(_first_rows, value))


def check_schema(root: Path, name: str, data: Any, expected: str, loosen: Callable[[Any], Any] = dict) -> None:
    """Validate the content of a file against the schema of its format.

    Validation is slow, so only the first row of a matrix of numbers is validated. The loaders check shapes and
    integers.

    Args:
        root: a folder of fixtures. The schema of the format "pairproof-golden-flags/1", for example, is
            schema/golden_flags.schema.json.
        name: name of the file, for messages.
        data: content of the file.
        expected: format of the file.
        loosen: function that is applied to the schema before validation; by default a copy.

    Raises:
        FixtureError: the content has another format or does not match the schema, or the schema is malformed.
        ImportError: jsonschema is not installed.
    """
    _check_format(name, data, expected)
    kind = expected.removeprefix("pairproof-").partition("/")[0].replace("-", "_")
    file = f"schema/{kind}.schema.json"
    schema = read_json(root, file)
    require(isinstance(schema, dict), file, "not a valid schema: expected an object")
    try:
        jsonschema: Any = importlib.import_module("jsonschema")
    except ImportError as error:
        raise ImportError(f"loading the fixtures needs jsonschema: {install_command('verify')}") from error
    try:
        rules, rows = json.dumps(loosen(schema)), _first_rows(data)
        # Commands validate the same content several times.
        digest = hashlib.sha256(f"{rules}\n{json.dumps(rows)}".encode()).digest()
        if digest in _valid:
            return
        wrong = jsonschema.exceptions.best_match(_validator(rules).iter_errors(rows))
    except RecursionError as error:
        raise FixtureError(f"{name}: nested too deeply for {file}") from error
    except Exception as error:  # a malformed schema raises exceptions of many types
        words = getattr(error, "message", str(error) or type(error).__name__).splitlines()[0]
        raise FixtureError(f"{file}: not a valid schema: {words}") from error
    if wrong is not None:
        raise FixtureError(f"{name}: {wrong.json_path}: {wrong.message}")
    _valid.add(digest)


@functools.lru_cache(maxsize=32)
def _validator(schema: str) -> Any:
    """Return the validator of a schema, given as JSON."""
    validator = importlib.import_module("jsonschema").Draft202012Validator
    rules = json.loads(schema)
    validator.check_schema(rules)
    return validator(rules)


_valid: set[bytes] = set()
"""Digests of schemas with content that they validate."""


def content_key(root: Path, names: Iterable[str]) -> tuple[str | bool | bytes, ...]:
    """A cache key for what is loaded from files, with the content of each file."""
    files = [name for name in names if (root / name).is_file()]
    return (is_installed(root), *files, *((root / name).read_bytes() for name in files))


def is_installed(root: Path) -> bool:
    """Return whether a folder of fixtures is the installed one."""
    return _elsewhere.get() is None and root == fixtures_root()


def read_checked(root: Path, name: str, expected: str) -> Any:
    """Read a JSON file of a folder of fixtures and validate it against its schema.

    The installed files are not validated again: they were validated when they were written, and the manifest shows
    that they have not changed.

    Args:
        root: a folder of fixtures.
        name: path of the file, relative to ``root``.
        expected: format of the file.

    Raises:
        FixtureError: the file cannot be read, has another format, or does not match the schema.
        ImportError: the folder is not the installed one, and jsonschema is not installed.
    """
    data = read_json(root, name)
    if is_installed(root):
        _check_format(name, data, expected)
    else:
        check_schema(root, name, data, expected)
    return data


def place(index: Iterable[int]) -> str:
    """Format an index for a message: [0][3]."""
    return "".join(f"[{k}]" for k in index)


def check_ids(path: str, ids: Sequence[str]) -> None:
    """Raise a FixtureError if an id occurs twice. ``path`` names the file and the list."""
    for k, identity in enumerate(ids):
        require(identity not in ids[:k], f"{path}[{k}].id", f"duplicate id {identity!r}")
