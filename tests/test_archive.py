"""The archive of the fixtures, and the programs that check NT-Xent from it in other languages."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pairproof.conformance.suite.golden import golden_files
from tools import fixtures_archive

ROOT = Path(__file__).resolve().parent.parent
LANGUAGES = {
    "js": ("node", "apt-get install nodejs", []),
    "cpp": ("c++", "apt-get install g++", ["c++", "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror"]),
    "rs": ("rustc", "apt-get install rustc", ["rustc", "--edition", "2021", "-O", "-D", "warnings"]),
}


@pytest.fixture(scope="session")
def files() -> dict[str, bytes]:
    return fixtures_archive.contents(ROOT)


@pytest.fixture(scope="session")
def few() -> dict[str, bytes]:
    """The files of an archive with one golden file; writing out and packing all takes seconds."""
    named = {"golden_files": ["golden/nt_xent.json"]}
    named["data_files"] = [*named["golden_files"], "schema/golden.schema.json"]
    with pytest.MonkeyPatch.context() as patch:
        for function, names in named.items():
            patch.setattr(fixtures_archive, function, lambda folder, names=names: names)
        return fixtures_archive.contents(ROOT)


@pytest.fixture(scope="session")
def unpacked_few(few: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_and_unpacked(few, tmp_path_factory.mktemp("few"))


@pytest.fixture(scope="session")
def unpacked(files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_and_unpacked(files, tmp_path_factory.mktemp("archive"))


def packed_and_unpacked(files: dict[str, bytes], folder: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fixtures_archive, "contents", lambda root: files)
        patch.setattr(
            fixtures_archive, "golden_files", lambda root: [one for one in golden_files(root) if one in files]
        )
        assert fixtures_archive.main(["--output", str(folder)]) == 0
    (archive,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder)
    return next(path for path in folder.iterdir() if path.is_dir())


# Large cases and a compilation take seconds.
@pytest.mark.parametrize(
    ("language", "every"),
    [("js", False), *(pytest.param(name, True, marks=pytest.mark.slow) for name in ("js", "cpp", "rs"))],
)
def test_a_program_recomputes_every_case(
    request: pytest.FixtureRequest, tmp_path: Path, language: str, *, every: bool
) -> None:
    unpacked: Path = request.getfixturevalue("unpacked" if every else "unpacked_few")
    tool, install, build = LANGUAGES[language]
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed: {install}")
    source = f"readers/nt_xent.{language}"
    command = [tool, source]
    if build:
        command = [str(tmp_path / "nt_xent")]
        subprocess.run([*build, source, "-o", *command], cwd=unpacked, check=True, timeout=300)
    cases = json.loads((unpacked / "golden/nt_xent.json").read_text())["cases"]
    if every:
        found = subprocess.run(command, cwd=unpacked, capture_output=True, text=True, timeout=600)
        assert (found.stdout, found.returncode) == (f"{len(cases)} passed, 0 failed\n", 0)

    cases = [one for one in cases if len(one["embeddings"]) <= 256]  # larger ones take most of the time
    # In four cases, change one number by a part in 10^9, or a sum of rows by a part in 10^7. Each must be reported.
    plain = [one for one in cases if set(one["keywords"]) <= {"temperature"} and set(one["arguments"]) == {"partners"}]
    loss, gradient = [one for one in plain if 0.01 < one["expected"]["loss"] < 10][:2]
    loss["expected"]["loss"] *= 1 + 1e-9
    row = max(gradient["expected"]["gradient"], key=lambda row: max(map(abs, row)))
    row[max(range(len(row)), key=lambda d: abs(row[d]))] *= 1 + 1e-9
    reference = next(one for one in cases if "gradients" in one["expected"] and one not in (loss, gradient))
    row = max(reference["expected"]["gradients"]["ref_embeddings"], key=lambda row: max(map(abs, row)))
    row[max(range(len(row)), key=lambda d: abs(row[d]))] *= 1 + 1e-9
    part = next(one for one in cases if one["id"] == "nt_xent/training-128-by-64")
    part["expected"]["gradient"]["products"][1][5] *= 1 + 1e-7
    altered = tmp_path / "altered.json"
    altered.write_text(json.dumps({"cases": cases}))
    found = subprocess.run([*command, str(altered)], cwd=unpacked, capture_output=True, text=True, timeout=600)
    lines = found.stdout.splitlines()
    expected = {
        loss["id"]: "the loss",
        gradient["id"]: "the gradient",
        part["id"]: "the gradient",
        reference["id"]: "the gradient of the references",
    }
    assert dict(re.findall(r"^(\S+): (.*) differs", found.stdout, re.MULTILINE)) == expected
    assert lines[-1] == f"{len(cases) - 4} passed, 4 failed"
    assert found.returncode == 1


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_same_files_give_the_same_bytes(request: pytest.FixtureRequest, *, every: bool) -> None:
    files: dict[str, bytes] = request.getfixturevalue("files" if every else "few")
    unpacked: Path = request.getfixturevalue("unpacked" if every else "unpacked_few")
    assert fixtures_archive.pack(files, "x") == fixtures_archive.pack(dict(reversed(files.items())), "x")
    assert {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()} == set(files)
    assert {"LICENSE", "README.md", "manifest.json", "golden/nt_xent.json", "schema/golden.schema.json"} <= set(files)
    assert {name for name in files if name.startswith("golden/")} >= set(golden_files(ROOT / "fixtures")) or not every


def changed(files: dict[str, bytes], name: str, old: str, new: str) -> dict[str, bytes]:
    text = files[name].decode()
    assert old in text
    return files | {name: text.replace(old, new, 1).encode()}


@pytest.mark.slow
def test_an_archive_that_changes_a_case_of_an_earlier_one_is_refused(files: dict[str, bytes]) -> None:
    fixtures_archive.compare(files, files)
    renamed = changed(files, "golden/nt_xent.json", '"id": "nt_xent/two-rows"', '"id": "nt_xent/two-new-rows"')
    with pytest.raises(fixtures_archive.Refused, match=r"nt_xent/two-rows: the case is missing"):
        fixtures_archive.compare(renamed, files)
    data = json.loads(files["golden/nt_xent.json"])
    data["cases"][0]["keywords"]["temperature"] = 0.75
    other = files | {"golden/nt_xent.json": json.dumps(data).encode()}
    with pytest.raises(fixtures_archive.Refused, match=r"keywords changed, so the case needs a new id"):
        fixtures_archive.compare(other, files)
    del data["cases"][0]
    fewer = files | {"golden/nt_xent.json": json.dumps(data).encode()}
    with pytest.raises(fixtures_archive.Refused, match="1 cases were added, so the version must increase"):
        fixtures_archive.compare(files, fewer)
    older = changed(files, "CHANGELOG.md", "## 2.", "## 1.")
    fixtures_archive.compare(files, changed(fewer, "CHANGELOG.md", "## 2.", "## 1."))
    with pytest.raises(fixtures_archive.Refused, match="older"):
        fixtures_archive.compare(older, files)


def test_unreadable_archives_and_changelogs_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.tar.gz").write_bytes(b"not an archive")
    assert fixtures_archive.main(["--output", str(tmp_path), "--previous", str(tmp_path / "x.tar.gz")]) == 1
    assert "cannot be read" in capsys.readouterr().err
    monkeypatch.setattr(fixtures_archive, "contents", lambda root: {"CHANGELOG.md": b"# Releases\n"})
    assert fixtures_archive.main(["--output", str(tmp_path)]) == 1
    assert "expected a heading" in capsys.readouterr().err
