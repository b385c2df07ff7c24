"""Running a library's own tests with our classes in their place, on a library that these tests invent."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests import snapshots

DOUBLE = "import torch\n\n\nclass {}(torch.nn.Module):\n    def forward(self, x):\n        return {}\n\n\n"

LIBRARY = {
    "toylib/__init__.py": "from .double import Double\n",
    "toylib/double.py": DOUBLE.format("Double", "2 * x"),
    "tests/test_double.py": (
        "import toylib, toylib.double\n\n\n"
        "def test_double():\n    assert toylib.Double()(3) == 6\n\n\n"
        "def test_sign():\n    assert toylib.double.Double()(3) > 0\n\n\n"
        "def test_wrong():\n    assert toylib.Double()(1) == 3\n"
    ),
    "ours.py": DOUBLE.format("Right", "x + x") + DOUBLE.format("Wrong", "x + 2"),
}


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the library "toylib" under the folder of snapshots."""
    files = {}
    for name, text in LIBRARY.items():
        file = tmp_path / "toylib" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        files[name] = hashlib.sha256(text.encode()).hexdigest()
    monkeypatch.setenv(snapshots.WHERE, str(tmp_path))
    monkeypatch.setitem(snapshots.LIBRARIES, "toylib", {"repository": "r", "commit": "c", "files": files})
    return tmp_path


def check(library: Path, ours: str, **given: object) -> list[str]:
    lines: list[str] = []
    snapshots.check_own_tests(
        "toylib",
        ["tests/test_double.py"],
        {"toylib:Double": ours},
        library,
        lambda name, line: lines.append(line),
        path=["."],
        **{"failing": ["test_wrong"], **given},
    )
    return lines


@pytest.mark.slow
def test_right_replacement_passes_in_every_module_of_the_library(library: Path) -> None:
    [line] = check(library, "ours:Right")
    assert line == "toylib, test_double.py: 2 passed with its own classes, 2 with ours (calls: 3 unknown)"


@pytest.mark.slow
def test_wrong_replacement_is_found(library: Path) -> None:
    with pytest.raises(AssertionError, match=r"only with the library's own classes pass \['.*test_double'\]"):
        check(library, "ours:Wrong")


@pytest.mark.parametrize(
    ("theirs", "ours", "message"),
    [
        ({"a": "passed", "b": "failed"}, {"a": "passed"}, "fail with the library's own classes: .'b'"),
        ({"a": "skipped"}, {"a": "skipped"}, "no test of test_double.py passes"),
        ({"a": "passed"}, {"a": "passed", "test_wrong": "passed"}, r"only with ours \['test_wrong'\]"),
    ],
)
def test_outcomes_that_prove_nothing_are_errors(
    library: Path, monkeypatch: pytest.MonkeyPatch, theirs: dict[str, str], ours: dict[str, str], message: str
) -> None:
    runs = iter([snapshots.Outcomes(theirs, {}), snapshots.Outcomes(ours, {"engine": 1})])
    monkeypatch.setattr(snapshots, "run", lambda *given, **more: next(runs))
    with pytest.raises(AssertionError, match=message):
        check(library, "ours:Right")


def test_replacement_that_no_test_calls_is_found(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "run", lambda *given, **more: snapshots.Outcomes({"a": "passed"}, {}))
    with pytest.raises(AssertionError, match="calls none of"):
        check(library, "ours:Right")


def test_missing_folder_and_changed_file_skip_with_the_reason(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (library / "toylib/ours.py").write_text("")
    with pytest.raises(pytest.skip.Exception, match=r"toylib/ours\.py is not that of r at c"):
        snapshots.snapshot("toylib")
    (library / "toylib/ours.py").unlink()
    with pytest.raises(pytest.skip.Exception, match=r"PAIRPROOF_SNAPSHOTS has no toylib/ours\.py: copy r at c"):
        snapshots.snapshot("toylib")
    monkeypatch.delenv(snapshots.WHERE)
    with pytest.raises(pytest.skip.Exception, match="PAIRPROOF_SNAPSHOTS is not set"):
        snapshots.snapshot("toylib")
