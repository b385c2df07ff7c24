"""The loader of the published examples: what it accepts, and its error messages."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pairproof.conformance.documents.load import Printed, WorkedFixture, dump_worked, load_worked
from pairproof.conformance.implementations.public import WHERE
from pairproof.conformance.maintain.rebuild import read_expected
from pairproof.conformance.suite import store
from pairproof.conformance.suite.catalogue import LOSSES
from pairproof.conformance.suite.golden import load_errors, load_golden
from pairproof.conformance.suite.store import (
    FixtureError,
    check_manifest,
    data_files,
    dump_json,
    fixtures_root,
    write_manifest,
)

COUNTS = {
    "batch_tutorial": (1, 0, 0, 0, 0, 1, 0, 1),
    "pair_notebook": (222, 16, 371, 52, 0, 24, 23, 1),
    "sit_article": (0, 0, 0, 0, 0, 0, 0, 0),
    "supcon_notebook": (425, 21, 0, 0, 105, 31, 31, 0),
    "vectorized_notebook": (137, 0, 36, 0, 0, 14, 14, 0),
}
"""Numbers of entries (number, infinite, mask, index, layout) and of figures (all, reproduced, artefact)."""

TESTS = {
    "monai_tests": (5, 0, 0, 0, 0, 5, 5, 0),
    "optax_tests": (3, 0, 0, 0, 0, 3, 3, 0),
    "supcon_tests": (44, 0, 0, 0, 0, 18, 18, 0),
}
"""The same of the public tests."""

CLAIMS = {"batch_tutorial": 3, "pair_notebook": 11, "sit_article": 5, "supcon_notebook": 14, "vectorized_notebook": 5}


@pytest.fixture(scope="session")
def worked() -> dict[str, WorkedFixture]:
    return {fixture.document.id: fixture for fixture in load_worked()}


@pytest.fixture(scope="session")
def small_original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the fixtures with the first cases of each golden file, because every test copies all files."""
    root = tmp_path_factory.mktemp("original") / "fixtures"
    shutil.copytree(fixtures_root(), root)
    for loss in LOSSES.values():
        data = json.loads((root / loss.golden_file).read_text(encoding="utf-8"))
        data["cases"] = data["cases"][:3]
        (root / loss.golden_file).write_text(dump_json(data), encoding="utf-8")
    write_manifest(root)
    return root


@pytest.fixture
def copy(small_original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_original, tmp_path / "fixtures"))


def error(root: Path) -> str:
    with pytest.raises(FixtureError) as caught:
        load_worked(root)
    message = str(caught.value)
    assert "\n" not in message
    return message


def edit(root: Path, name: str, change: Callable[[Any], object]) -> None:
    """Change the content of one file and renew the manifest, so that only this change is wrong."""
    path = root / "worked" / f"{name}.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(dump_worked(data), encoding="utf-8")
    write_manifest(root)


def test_every_document_is_loaded(worked: dict[str, WorkedFixture]) -> None:
    assert list(worked) == sorted(COUNTS | TESTS)
    for name, fixture in worked.items():
        assert tuple(fixture.counts.values()) == (COUNTS | TESTS)[name], name
        assert len(fixture.claims) == CLAIMS.get(name, 0), name
        assert (fixture.document.source is not None) == (name in TESTS)


def test_copy_loads_equal_examples(copy: Path) -> None:
    assert list(map(dump_worked, load_worked(copy))) == list(map(dump_worked, load_worked()))


def test_records_are_frozen(worked: dict[str, WorkedFixture]) -> None:
    fixture = worked["pair_notebook"]
    with pytest.raises(FrozenInstanceError):
        fixture.figures[0].verdict = "artefact"  # type: ignore[misc]
    with pytest.raises(TypeError):
        fixture.calls["more"] = fixture.calls["nt-xent-1.0"]  # type: ignore[index]


def test_entries_keep_the_printed_text(worked: dict[str, WorkedFixture]) -> None:
    figures = {figure.id: figure for figure in worked["supcon_notebook"].figures}
    first = dict(figures["out-12-similarity"].entries())
    assert (first[0, 0], first[0, 1], dict(figures["out-13-softmax"].entries())[0, 0]) == ("-inf", "0.8635144", "0.")
    assert dict(figures["out-14-loss"].entries()) == {(): "1.5017812656385385"}
    assert worked["pair_notebook"].calls["nt-bxent-0.01"].keywords["temperature"] == "0.01"


def test_artefacts_have_the_known_true_values(worked: dict[str, WorkedFixture]) -> None:
    found = {
        (name, figure.printed): figure.instead["value"]
        for name, fixture in worked.items()
        for figure in fixture.figures
        if figure.instead is not None
    }
    assert found == {
        ("batch_tutorial", "0.5545"): "0.55451774444795625",
        ("pair_notebook", "62.898780822753906"): "48.286442426170956",
    }


def test_incomplete_outputs_are_marked(worked: dict[str, WorkedFixture]) -> None:
    cut = {figure.id: len(list(figure.entries())) for figure in worked["pair_notebook"].figures if figure.cut}
    assert cut == {"in-101-sigmoid": 35, "in-102-negative-pairs": 51}


def test_input_of_a_figure_is_found(worked: dict[str, WorkedFixture]) -> None:
    fixture = worked["supcon_notebook"]
    figures = {figure.id: figure for figure in fixture.figures}
    assert fixture.input_of(figures["out-24-similarity"]) is fixture.inputs["embeddings_3x3"]
    assert fixture.input_of(figures["out-42-loss"]) is fixture.inputs["embeddings_2x2x2"]


def test_files_have_the_fixed_layout() -> None:
    for path in sorted((fixtures_root() / "worked").glob("*.json")):
        text = path.read_bytes().decode("utf-8")
        assert dump_worked(json.loads(text)) == text, path.name
    for fixture in load_worked():
        path = fixtures_root() / "worked" / f"{fixture.document.id}.json"
        assert dump_worked(fixture).encode("utf-8") == path.read_bytes(), path.name


def test_matrix_row_is_one_line() -> None:
    text = (fixtures_root() / "worked" / "vectorized_notebook.json").read_text(encoding="utf-8")
    assert re.search(r'^ +\["1.0000", "0.9429", "0.8513", "0.3701", "0.3550", "0.8159"\],?$', text, re.MULTILINE)


def test_writing_the_manifest_again_changes_nothing(copy: Path) -> None:
    before = (copy / "manifest.json").read_bytes()
    assert write_manifest(copy) == copy / "manifest.json"
    assert (copy / "manifest.json").read_bytes() == before
    assert sorted(path.name for path in copy.iterdir()) == sorted(path.name for path in fixtures_root().iterdir())


def test_manifest_lists_only_data_files(copy: Path) -> None:
    (copy / ".hidden").write_text("x")
    (copy / "__init__.py").write_text("")
    check_manifest(copy)
    assert not {"README.md", "manifest.json", ".hidden", "__init__.py"} & set(data_files(copy))


def test_altered_digit_is_reported(copy: Path) -> None:
    path = copy / "worked" / "pair_notebook.json"
    old = hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_bytes(path.read_bytes().replace(b'"0.6698"', b'"0.6699"', 1))
    new = hashlib.sha256(path.read_bytes()).hexdigest()
    assert error(copy) == f"worked/pair_notebook.json: altered: expected SHA-256 {old}, got {new}"


def test_only_changed_files_are_read_again(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = copy / "worked" / "pair_notebook.json"
    later_on = SimpleNamespace(time=lambda: time.time() + 60)  # files that just changed are always read
    with monkeypatch.context() as later:
        later.setattr(store, "time", later_on)
        check_manifest(copy)
        later.setattr(Path, "read_bytes", None)
        check_manifest(copy)
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    time.sleep(0.01)  # the resolution of a file's times
    path.write_bytes(path.read_bytes().replace(b'"0.6698"', b'"0.6699"', 1))
    os.utime(path, ns=times)
    assert "worked/pair_notebook.json: altered" in error(copy)


def test_missing_file_is_reported(copy: Path) -> None:
    path = copy / "worked" / "sit_article.json"
    sha = hashlib.sha256(path.read_bytes()).hexdigest()
    path.unlink()
    assert error(copy) == f"worked/sit_article.json: missing; manifest.json lists it with SHA-256 {sha}"


def test_extra_file_is_reported(copy: Path) -> None:
    (copy / "worked" / "more.json").write_text("{}")
    sha = hashlib.sha256(b"{}").hexdigest()
    assert error(copy) == f"worked/more.json: not listed in manifest.json (its SHA-256 is {sha})"


def test_missing_manifest_is_reported(copy: Path) -> None:
    (copy / "manifest.json").unlink()
    assert error(copy).startswith("manifest.json: cannot be read")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "manifest.json: $.format: expected 'pairproof-manifest/1', got None"),
        ('{"format": "pairproof-manifest/2"}', "manifest.json: $.format: expected 'pairproof-manifest/1'"),
        ('{"format": "pairproof-manifest/1", "files": []}', "manifest.json: $.files: expected an object"),
    ],
)
def test_malformed_manifest_is_reported(copy: Path, text: str, message: str) -> None:
    (copy / "manifest.json").write_text(text)
    assert error(copy).startswith(message)


def test_truncated_file_is_reported(copy: Path) -> None:
    path = copy / "worked" / "supcon_notebook.json"
    path.write_bytes(path.read_bytes()[:5000])
    assert error(copy).startswith("worked/supcon_notebook.json: altered: expected SHA-256")
    write_manifest(copy)
    assert re.fullmatch(r"worked/supcon_notebook\.json: not JSON: .+ at line \d+, column \d+", error(copy))


def test_file_that_is_not_utf8_is_reported(copy: Path) -> None:
    (copy / "worked" / "sit_article.json").write_bytes(b'{"format": "\xff"}')
    write_manifest(copy)
    assert error(copy).startswith("worked/sit_article.json: not UTF-8")


def test_duplicate_name_in_an_object_is_reported(copy: Path) -> None:
    (copy / "worked" / "sit_article.json").write_text('{"format": "a", "format": "b"}')
    write_manifest(copy)
    assert error(copy) == "worked/sit_article.json: duplicate name 'format' in an object"


LOADERS: dict[str, Callable[[Path], object]] = {
    "manifest.json": load_worked,
    "worked/batch_tutorial.json": load_worked,
    "worked/pair_notebook.json": load_worked,
    "golden/supcon.json": lambda root: load_golden(root, ["supcon"]),
    "golden/errors.json": load_errors,
    "expected.json": read_expected,
}
"""For each file, a function that loads it, possibly with others."""


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ('{"a": ' * 100_000 + "0" + "}" * 100_000, "nested too deeply"),
        ("1" * 4301, "Exceeds the limit"),
    ],
    ids=["deep-array", "deep-object", "long-integer"],
)
@pytest.mark.parametrize("name", ["manifest.json", "worked/pair_notebook.json", "golden/supcon.json", "expected.json"])
def test_values_that_python_cannot_read_are_reported(copy: Path, name: str, value: str, message: str) -> None:
    (copy / name).write_text(f'{{"format": {value}}}')
    if name != "manifest.json":
        write_manifest(copy)
    with pytest.raises(FixtureError, match=rf"^{re.escape(name)}: {message}[^\n]*$"):
        LOADERS[name](copy)


@pytest.mark.parametrize("depth", [100, 300, 500, 700, 900])
@pytest.mark.parametrize("name", ["manifest.json", "worked/pair_notebook.json", "golden/errors.json"])
def test_nested_lists_of_every_depth_are_reported(copy: Path, name: str, depth: int) -> None:
    data = json.loads((copy / name).read_text(encoding="utf-8"))
    for key in ("files", "claims", "cases"):
        if key in data:
            (copy / name).write_text(
                json.dumps(data | {key: 0}).replace(f'"{key}": 0', f'"{key}": {"[" * depth + "]" * depth}')
            )
    if name != "manifest.json":
        write_manifest(copy)
    with pytest.raises(FixtureError, match=f"^{re.escape(name)}: "):
        LOADERS[name](copy)


def _set(data: Any, *keys: str | int, value: object) -> None:
    for key in keys[:-1]:
        data = data[key]
    data[keys[-1]] = value


@pytest.mark.parametrize(
    ("name", "keys", "value"),
    [
        ("worked/batch_tutorial.json", ("calls", "supcon-epsilon", "keywords", "temperature"), "9" * 5000),
        ("worked/pair_notebook.json", ("inputs", "x", "shape"), [10**400, 2]),
        ("worked/pair_notebook.json", ("figures", 0, "decimals"), 10**400),
        ("golden/supcon.json", ("cases", 0, "embeddings", 0, 0), 10**400),
        ("golden/supcon.json", ("cases", 0, "expected", "anchors", 0), 10**400),
        ("golden/supcon.json", ("cases", 0, "expected", "loss"), 10**400),
        ("golden/supcon.json", ("cases", 0, "keywords"), {"temperature": 10**400}),
        ("golden/supcon.json", ("cases", 0, "arguments", "labels", 0), 10**400),
        ("golden/supcon.json", ("cases", 0, "arguments", "labels", 0), "9" * 5000),
        ("expected.json", ("entries", "number"), -(10**400)),
    ],
)
def test_numbers_beyond_every_dtype_are_reported(copy: Path, name: str, keys: tuple[str, ...], value: object) -> None:
    data = json.loads((copy / name).read_text(encoding="utf-8"))
    _set(data, *keys, value=value)
    (copy / name).write_text(json.dumps(data), encoding="utf-8")
    write_manifest(copy)
    with pytest.raises(FixtureError, match=rf"^{re.escape(name)}: [^\n]+$"):
        LOADERS[name](copy)


@pytest.mark.parametrize(
    "schema",
    [
        [],
        3,
        {"type": 3},
        {"$ref": "#"},
        {"$ref": "#/nowhere"},
        {"$ref": "elsewhere.json"},
        {"properties": {"a": {"pattern": "("}}},
    ],
    ids=str,
)
def test_a_malformed_schema_is_reported(copy: Path, schema: object) -> None:
    (copy / "schema" / "worked.schema.json").write_text(json.dumps(schema))
    write_manifest(copy)
    assert "schema/worked.schema.json: not a valid schema: " in error(copy) or "nested too deeply" in error(copy)


def _drop_last(data: Any) -> None:
    data["figures"][2]["printed"][3].pop()


def _transpose(data: Any) -> None:
    data["figures"][2]["printed"] = data["figures"][2]["printed"][:4]


WRONG: dict[str, tuple[str, Callable[[Any], object], str]] = {
    "unknown version": (
        "sit_article",
        lambda d: d.update(format="pairproof-worked/2"),
        "$.format: expected 'pairproof-worked/1', got 'pairproof-worked/2'",
    ),
    "additional field": ("pair_notebook", lambda d: d["figures"][3].update(note="x"), "$.figures[3]: Additional prop"),
    "additional top-level field": ("pair_notebook", lambda d: d.update(more=1), "$: Additional properties"),
    "missing field": ("pair_notebook", lambda d: d["figures"][3].pop("verdict"), "$.figures[3]: 'verdict' is a requ"),
    "a number that is not text": (
        "vectorized_notebook",
        lambda d: d["figures"][13].update(printed=1.757),
        "$.figures[13].printed: 1.757 is not",
    ),
    "artefact without instead": (
        "vectorized_notebook",
        lambda d: d["figures"][13].update(verdict="artefact"),
        "$.figures[13].instead: None is not of type 'object'",
    ),
    "unknown loss": (
        "vectorized_notebook",
        lambda d: d["calls"]["nt-xent"].update(loss="triplet"),
        "$.calls['nt-xent'].loss: expected one of supcon, ",
    ),
    "wrong count": (
        "vectorized_notebook",
        lambda d: d["counts"].update(number=136),
        "$.counts.number: expected 137, the number counted, got 136",
    ),
    "wrong count of figures": (
        "pair_notebook",
        lambda d: d["counts"].update(artefact=0),
        "$.counts.artefact: expected 1, the number counted, got 0",
    ),
    "unknown call": (
        "vectorized_notebook",
        lambda d: d["figures"][13].update(call="nt-xent-2"),
        "$.figures[13].call: unknown call 'nt-xent-2'",
    ),
    "unknown input": (
        "vectorized_notebook",
        lambda d: d["figures"][0].update(input="batch_3"),
        "$.figures[0].input: unknown input 'batch_3'",
    ),
    "unknown input of a call": (
        "vectorized_notebook",
        lambda d: d["calls"]["nt-xent"].update(input="batch_3"),
        "$.calls['nt-xent'].input: unknown input 'batch_3'",
    ),
    "unknown figure of a claim": (
        "vectorized_notebook",
        lambda d: d["claims"][0].update(figures=["x"]),
        "$.claims[0].figures[0]: unknown figure 'x'",
    ),
    "duplicate id of a figure": (
        "vectorized_notebook",
        lambda d: d["figures"][13].update(id="positives"),
        "$.figures[13].id: duplicate id 'positives'",
    ),
    "duplicate id of a claim": (
        "sit_article",
        lambda d: d["claims"].append(d["claims"][0]),
        "$.claims[5].id: duplicate id 'same-as-infonce'",
    ),
    "duplicate id of a document": (
        "vectorized_notebook",
        lambda d: d["document"].update(id="sit_article"),
        "$.document.id: 'sit_article' is already the id of worked/sit_article.json",
    ),
    "ragged": (
        "pair_notebook",
        _drop_last,
        "$.figures[2].printed[3]: expected shape [8], like the first entry, got [7]",
    ),
    "wrong shape": ("pair_notebook", _transpose, "$.figures[2].printed: expected shape [8, 8] for 'similarity', got"),
    "too many decimals": (
        "pair_notebook",
        lambda d: d["figures"][7].update(printed="2.85550"),
        "$.figures[7].printed: expected at most 4 decimals, got 2.85550",
    ),
    "too few decimals": (
        "pair_notebook",
        lambda d: d["figures"][7].update(printed="2.855"),
        "$.figures[7].printed: no entry has the declared 4 decimals",
    ),
    "not all digits of its dtype": (
        "pair_notebook",
        lambda d: d["figures"][8].update(printed="167.33396911621095"),
        "$.figures[8].printed: expected 167.33396911621094, a float32 printed in full, got 167.33396911621095",
    ),
    "infinity off the diagonal": (
        "pair_notebook",
        lambda d: d["figures"][3]["printed"][0].reverse(),
        "$.figures[3].printed[0][7]: -inf is allowed only on the diagonal",
    ),
    "kind that does not match the quantity": (
        "pair_notebook",
        lambda d: d["figures"][2].update(kind="mask"),
        "$.figures[2].kind: expected 'number' for 'similarity', got 'mask'",
    ),
    "invalid mask entry": (
        "pair_notebook",
        lambda d: d["figures"][0]["printed"][0].__setitem__(0, "2."),
        "$.figures[0].printed[0][0]: '2.' is not a valid mask entry",
    ),
    "exact value that does not round to the printed one": (
        "pair_notebook",
        lambda d: d["inputs"]["x"]["printed"][0].__setitem__(0, "-0.2387"),
        "$.inputs.x.exact[0][0]: -0.2385765165090561 does not round to the printed -0.2387",
    ),
    "exact value that is not a float32": (
        "pair_notebook",
        lambda d: d["inputs"]["x"]["exact"][0].__setitem__(0, "-0.2385765165090562"),
        "$.inputs.x.exact[0][0]: expected -0.2385765165090561, a float32 printed in full, got -0.2385765165090562",
    ),
    "input of another shape": (
        "pair_notebook",
        lambda d: d["inputs"]["x"].update(shape=[8, 3]),
        "$.inputs.x.printed: expected shape [8, 3], got [8, 2]",
    ),
    "argument of another loss": (
        "pair_notebook",
        lambda d: d["calls"]["nt-xent-1.0"].update(arguments={"labels": [0] * 8}),
        "$.calls['nt-xent-1.0'].arguments.labels: nt_xent_loss has no such argument",
    ),
    "keyword of another loss": (
        "pair_notebook",
        lambda d: d["calls"]["nt-xent-1.0"]["keywords"].update(denominator="all"),
        "$.calls['nt-xent-1.0'].keywords.denominator: nt_xent_loss has no such keyword",
    ),
    "wrong number of labels": (
        "supcon_notebook",
        lambda d: d["calls"]["supcon-2x2"]["arguments"]["labels"].pop(),
        "$.calls['supcon-2x2'].arguments.labels: expected shape [4], got [3]",
    ),
    "partners not mutual": (
        "vectorized_notebook",
        lambda d: d["calls"]["nt-xent"]["arguments"]["partners"].__setitem__(0, 4),
        "$.calls['nt-xent'].arguments.partners: expected mutual partners, got 4 in row 0 but 1 in row 4",
    ),
    "pair out of range": (
        "pair_notebook",
        lambda d: d["calls"]["nt-bxent-1.0"]["arguments"]["positive_pairs"].__setitem__(2, [0, 8]),
        "$.calls['nt-bxent-1.0'].arguments.positive_pairs: expected rows in the range 0 to 7, got [0, 8] at position 2",
    ),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.quick(11)
def test_wrong_content_is_reported(copy: Path, what: str) -> None:
    name, change, message = WRONG[what]
    edit(copy, name, change)
    assert error(copy).startswith(f"worked/{name}.json: {message}")


def test_missing_jsonschema_is_an_error_only_for_a_copy_of_the_fixtures(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed fixtures are not validated when they are loaded, so they do not need jsonschema."""
    edit(copy, "pair_notebook", lambda d: d["document"].__setitem__("title", "Another title"))
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(ImportError, match=re.escape('pip install "./pairproof[verify]"')):
        load_worked(copy)
    assert len(load_worked()) == len(COUNTS | TESTS)


@pytest.fixture(scope="session")
def texts() -> dict[str, str]:
    """The texts of the documents by checksum."""
    named = os.environ.get("PAIRPROOF_SEEDS")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "seeds"
    if not named and not folder.is_dir():
        pytest.skip("the source documents are not available: set PAIRPROOF_SEEDS to their folder")
    assert folder.is_dir(), f"PAIRPROOF_SEEDS: no such folder: {folder}"
    files = [path.read_bytes() for path in sorted(folder.glob("*.txt"))]
    return {hashlib.sha256(content).hexdigest(): content.decode("utf-8") for content in files}


def _pattern(printed: Printed, last: bool = False) -> str:
    """A regular expression for a printed array. With ``last``, its closing brackets are missing in the document."""
    if not isinstance(printed, tuple):
        return re.escape(str(printed)) + r"(?![\d.]*\d)"
    items = [_pattern(item, last and position == len(printed) - 1) for position, item in enumerate(printed)]
    return r"\[\s*" + r"\s*,\s*".join(items) + ("" if last else r"\s*\]")


@pytest.mark.parametrize("name", COUNTS)
def test_every_figure_is_printed_in_the_document(
    worked: dict[str, WorkedFixture], texts: dict[str, str], name: str
) -> None:
    fixture = worked[name]
    assert fixture.document.sha256 in texts, f"no file in the folder has the checksum of {name}"
    text = texts[fixture.document.sha256]
    position = 0
    for figure in fixture.figures:
        found = re.compile(r"(?<![\d.-])" + _pattern(figure.printed, figure.cut is not None)).search(text, position)
        assert found, f"{figure.id} is not in the document after the previous figure"
        position = found.end()
    for key, value in fixture.inputs.items():
        if value.printed is not None and value.decimals is not None:
            assert re.search(_pattern(value.printed), text), key
    for link in fixture.document.links:
        assert link in text, link


@pytest.mark.parametrize("name", TESTS)
def test_every_figure_is_printed_in_the_lines_of_the_public_test(worked: dict[str, WorkedFixture], name: str) -> None:
    document = worked[name].document
    assert document.source is not None
    place = Path(os.environ.get(WHERE, "/nowhere")) / document.source["repository"].replace("/", "+")
    if not place.is_dir():
        pytest.skip(f"{WHERE} names no folder with {place.name}")
    command = ["git", "-C", str(place), "show", f"{document.source['commit']}:{document.source['file']}"]
    content = subprocess.run(command, check=True, capture_output=True).stdout
    assert hashlib.sha256(content).hexdigest() == document.sha256
    lines = content.decode("utf-8").splitlines()
    for figure in worked[name].figures:
        first, last = (int(number) for number in (re.findall(r"\d+", figure.place) * 2)[:2])
        text, position = "\n".join(lines[first - 1 : last]), 0
        for _, entry in figure.entries():
            found = re.compile(r"(?<![\d.-])" + _pattern(str(entry))).search(text, position)
            assert found, f"{figure.id}: {entry} is not in {figure.place}"
            position = found.end()


@pytest.mark.parametrize("name", COUNTS)
def test_every_claim_is_in_the_document(worked: dict[str, WorkedFixture], texts: dict[str, str], name: str) -> None:
    fixture = worked[name]
    text = " ".join(texts[fixture.document.sha256].split())
    for claim in fixture.claims:
        position = 0
        for piece in (claim.original or claim.words).split(" ... "):
            position = text.find(piece, position)
            assert position >= 0, f"{claim.id}: {piece}"
