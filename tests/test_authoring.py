"""Tests of `pairproof fixtures rebuild`, `check`, `add` and `show`, on a small copy of the fixtures."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pairproof import install_command
from pairproof.conformance import cli
from pairproof.conformance import implementations as peers
from pairproof.conformance.explain import describe, find_golden
from pairproof.conformance.implementations import Unavailable, supcontrast
from pairproof.conformance.implementations.fast import Fast
from pairproof.conformance.implementations.reference import Reference
from pairproof.conformance.implementations.supcontrast import SupContrastToday, sha256
from pairproof.conformance.judge import verify as run
from pairproof.conformance.judge.options import Batch, CouldNotRun, UsageError
from pairproof.conformance.maintain import add as authoring
from pairproof.conformance.maintain import prove, rebuild, renew
from pairproof.conformance.maintain.add import Refused, make_case, read_array
from pairproof.conformance.maintain.rebuild import differences, shortened
from pairproof.conformance.suite import golden
from pairproof.conformance.suite.catalogue import LOSSES
from pairproof.conformance.suite.records import Expected
from pairproof.conformance.suite.store import FixtureError, dump_json, fixtures_at, fixtures_root, write_manifest
from pairproof.conformance.truth.certify import CertificationError

ROOT = fixtures_root()
KEPT = (
    "supcon/one-positive-balanced-tau-half",
    "supcon/lonely-nan",
    "supcon_in/one-positive-balanced-tau-half",
    "nt_xent/one-positive-balanced-tau-half",
    "nt_xent_pairwise/one-positive-balanced-tau-half",
    "nt_bxent/one-positive-balanced-tau-half",
    "supcon_epsilon/identical-tied",
    "supcon/refs-self-some",
    "info_nce/queue-tau-half",
)
RECORDED = rebuild.RECORDED
FIRST = "supcon/one-positive-balanced-tau-half"


def thin(name: str, key: str, of: str, write: Callable[[Any], str], root: Path) -> None:
    """Keep only the entries of a file that belong to the cases of ``KEPT``."""
    data = json.loads((ROOT / name).read_text(encoding="utf-8"))
    data[key] = [entry for entry in data[key] if entry[of].removeprefix("golden/") in KEPT]
    (root / name).write_text(write(data), encoding="utf-8")


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean folder of fixtures: one to three cases of each loss, two documents, three implementations."""
    root = Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("authoring") / "fixtures"))
    for path in (root / "worked").glob("*.json"):
        if path.stem not in ("batch_tutorial", "sit_article"):
            path.unlink()
    for loss in LOSSES:
        thin(f"golden/{loss}.json", "cases", "id", dump_json, root)
    thin(RECORDED, "records", "case", rebuild.compact_json, root)
    write_manifest(root)
    with pytest.MonkeyPatch.context() as patch:
        use_own_implementations(patch)
        rebuild.rebuild({}, root, processes=1)
    return root


def use_own_implementations(patch: pytest.MonkeyPatch) -> None:
    ours = (Reference, Fast, SupContrastToday)
    for module in (peers, rebuild, run):
        patch.setattr(module, "ALL", ours)
    patch.setattr(os, "cpu_count", lambda: 1)


@pytest.fixture
def root(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy for each test, which replaces the installed fixtures."""
    use_own_implementations(monkeypatch)
    copy = Path(shutil.copytree(original, tmp_path / "fixtures"))
    with fixtures_at(copy):
        yield copy


def files(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def times(root: Path) -> dict[str, int]:
    return {path.relative_to(root).as_posix(): path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}


def edit(root: Path, name: str, change: Callable[[Any], object], write: Callable[[Any], str] = dump_json) -> None:
    """Change the content of a file without updating the manifest."""
    data = json.loads((root / name).read_text(encoding="utf-8"))
    change(data)
    (root / name).write_text(write(data), encoding="utf-8")


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """No text is wrapped."""
    monkeypatch.setenv("COLUMNS", "1000")


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(["fixtures", *arguments])
    return int(caught.value.code or 0)


def damage(root: Path) -> None:
    """Make every kind of change that a rebuild can repair."""

    def forget(data: Any) -> None:
        del data["cases"][0]["expected"]
        data["cases"][1]["dtypes"] = ["float64"]

    edit(root, "golden/supcon.json", forget)
    edit(root, "worked/batch_tutorial.json", lambda data: None, json.dumps)
    edit(root, "expected.json", lambda data: data["counts"]["fast/supcon"].update(passed=1), json.dumps)


# Rebuilding and checking.


@pytest.mark.slow  # the command that CI runs on all cases
def test_a_rebuild_of_a_clean_tree_changes_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, when = files(root), times(root)
    assert call("rebuild") == 0
    text = capsys.readouterr().out
    assert "fixtures: nothing changed" in text
    assert f"{RECORDED}: kept as recorded with torch " in text
    assert call("check") == 0
    assert "a rebuild would change nothing" in capsys.readouterr().out
    assert files(root) == before
    assert times(root) == when


def test_a_rebuild_repairs_damage(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, renewed = files(root), []
    monkeypatch.setattr(renew, "renew", lambda *given: renewed.append(given) or ["a table"])
    damage(root)
    (root / "manifest.json").unlink()
    damaged = files(root)
    assert call("check") == 1
    reported = capsys.readouterr().out
    for line in (
        "manifest.json: missing or damaged",
        f"golden/supcon.json: {FIRST}: expected: nothing stored, ",
        "golden/supcon.json: supcon/lonely-nan: dtypes: length 1 stored, 4 expected",
        "worked/batch_tutorial.json: the same content in another layout",
        "expected.json: fast/supcon: 1 passed",
        "fixtures: a rebuild would make 5 changes",
    ):
        assert line in reported
    assert files(root) == damaged
    assert call("rebuild") == 0
    repaired = capsys.readouterr().out.splitlines()
    assert repaired[:5] == reported.splitlines()[:5]
    assert files(root) == before
    assert (renewed, repaired[-2:]) == ([(root.parent, "supcon")], ["updated: a table", "fixtures: 5 changes"])


def test_changed_files_are_reported(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(root, "golden/supcon.json", lambda data: data["cases"][0].update(note="Another note."))
    (root / "worked" / "extra.json").write_bytes((root / "worked/sit_article.json").read_bytes())
    assert call("check") == 1
    assert "$.document.id: 'sit_article' is already the id of worked/extra.json" in capsys.readouterr().err
    (root / "worked" / "extra.json").rename(root / "golden" / "extra.txt")
    assert call("check") == 1
    lines = capsys.readouterr().out.splitlines()
    extra = sha256(root / "golden" / "extra.txt")
    assert lines[0] == f"manifest.json: golden/extra.txt: SHA-256 listed: none; found: {extra}"
    assert lines[1].startswith("manifest.json: golden/supcon.json: SHA-256 listed: ")
    (root / "golden" / "extra.txt").unlink()
    (root / "worked" / "sit_article.json").unlink()
    assert call("check") == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "worked/sit_article.json" in line]
    assert re.fullmatch("manifest.json: .*: SHA-256 listed: [0-9a-f]{64}; found: no such file", line)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "worked/batch_tutorial.json",
            lambda data: data["counts"].update(figures=7),
            "worked/batch_tutorial.json: $.counts.figures: expected 1, the number counted, got 7",
        ),
        (
            RECORDED,
            lambda data: data["records"][0].update(dtype="float8"),
            f"{RECORDED}: $.records[0].dtype: 'float8' is not one of",
        ),
        (RECORDED, lambda data: data.update(format="pairproof-recorded/2"), f"{RECORDED}: $.format: expected "),
        ("golden/errors.json", lambda data: data["cases"][0].update(why="x"), "golden/errors.json: $.cases[0]: "),
    ],
)
@pytest.mark.quick(2)
def test_an_invalid_file_is_reported_and_not_rebuilt(
    root: Path, name: str, change: Callable[[Any], object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(root, name, change)
    before = files(root)
    for command in ("check", "rebuild"):
        assert call(command) == 1
        assert f"pairproof: fixtures: {message}" in capsys.readouterr().err
    assert files(root) == before


def test_damaged_counts_are_replaced(root: Path) -> None:
    before = files(root)
    (root / "expected.json").write_text("{", encoding="utf-8")
    changes = rebuild.rebuild({}, root, processes=1, keep=False).changes
    assert "expected.json: not JSON: Expecting property name enclosed in double quotes at line 1, column 2" in changes
    rebuild.rebuild({}, root, processes=1)
    assert files(root) == before


@pytest.mark.parametrize("place", ["prove", "run", "count", "manifest", "copy", "first", "second", "full"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, pytest.param(OSError, marks=pytest.mark.slow)])
@pytest.mark.quick(3)
def test_an_interrupted_rebuild_leaves_the_old_files(
    root: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: type[BaseException]
) -> None:
    damage(root)
    before = files(root)
    right, seen = Path.replace, 0

    def stop(*_: object, **__: object) -> None:
        raise error("stopped")

    def replace(self: Path, target: Path) -> Path:
        nonlocal seen
        if target.is_relative_to(root):
            seen += 1
            if seen == 2 and place == "full":
                # From here on, files can be renamed, but nothing can be written.
                monkeypatch.setattr(Path, "write_bytes", stop)
                monkeypatch.setattr(shutil, "copy", stop)
            if seen == {"first": 1, "second": 2, "full": 2}.get(place):
                raise error("stopped")
        return right(self, target)

    if place in ("first", "second", "full"):
        monkeypatch.setattr(Path, "replace", replace)
    else:
        where, what = {
            "prove": (prove, "certify"),
            "run": (run, "run"),
            "count": (rebuild, "write_counts"),
            "manifest": (rebuild, "validate"),
            "copy": (shutil, "copy"),
        }[place]
        monkeypatch.setattr(where, what, stop)
    with pytest.raises(error, match="stopped"):
        rebuild.rebuild({}, root, processes=1)
    assert files(root) == before


@contextmanager
def full_disk(free: int) -> Iterator[None]:
    """Let the operating system refuse to write more than ``free`` bytes to any file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("free", [0, 2000])
@pytest.mark.parametrize("command", ["fixtures rebuild", "fixtures check", "fixtures add", "new-loss"])
def test_a_full_disk_is_reported_in_one_line(
    root: Path, batch: Path, capsys: pytest.CaptureFixture[str], command: str, free: int
) -> None:
    for name in ("conformance/suite/catalogue.py", "reference", "fast"):
        source, copy = ROOT.parent / name, root.parent / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, copy)
    before, code = files(root), files(root.parent / "reference")
    more = {
        "fixtures add": [*arguments("supcon", batch / "z.npy", "--labels", batch / "y.npy")[1:]],
        "new-loss": ["dcl", "--like", "nt_xent", "--source", "a test"],
    }
    with full_disk(free), pytest.raises(SystemExit) as caught:
        cli.main([*command.split(), *map(str, more.get(command, []))])
    assert caught.value.code == 3
    *steps, line = capsys.readouterr().err.splitlines()
    assert line.startswith("pairproof: could not run: [Errno 27] File too large")
    assert {*steps} <= {"pairproof: proving", "pairproof: documents", "pairproof: cases"}
    assert (files(root), files(root.parent / "reference")) == (before, code)


def test_a_script_that_fails_is_reported_in_one_line(tmp_path: Path) -> None:
    for name in (*renew.TABLES, *renew.TABLES.values(), *renew.COUNTED, renew.README):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('raise OSError(28, "No space left on device")')
    words = (
        "^the fixtures are written, but tools/peer_table.py failed: OSError: .Errno 28. No space left on device; run"
    )
    with pytest.raises(CouldNotRun, match=words):
        renew.renew(tmp_path, "supcon")


def test_a_file_changed_during_the_rebuild_is_not_overwritten(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damage(root)
    right = rebuild.validate

    def meanwhile(stage: Path) -> None:
        right(stage)
        (root / "golden/flags.json").write_text("{}", encoding="utf-8")

    monkeypatch.setattr(rebuild, "validate", meanwhile)
    supcon = (root / "golden/supcon.json").read_bytes()
    with pytest.raises(FixtureError, match=r"golden/flags\.json: changed by another process; nothing was written"):
        rebuild.rebuild({}, root, processes=1)
    assert (root / "golden/flags.json").read_text(encoding="utf-8") == "{}"
    assert (root / "golden/supcon.json").read_bytes() == supcon


class Absent(Fast):
    """An implementation that is not installed."""

    name = "absent"

    def __init__(self, options: Any, device: str) -> None:
        raise Unavailable("not here: get it somewhere")


def test_an_absent_implementation_is_counted_as_declared(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def as_absent(data: Any) -> None:
        for key in [key for key in data["counts"] if key.startswith("fast/")]:
            data["counts"][f"absent/{key.removeprefix('fast/')}"] = data["counts"][key]

    edit(root, "expected.json", as_absent)
    before = files(root)
    for module in (peers, rebuild, run):
        monkeypatch.setattr(module, "ALL", (Reference, Fast, SupContrastToday, Absent))
    assert call("rebuild") == 0
    text = capsys.readouterr().out
    assert "absent: not run, so its counts follow from its declarations: not here: get it somewhere" in text
    assert json.loads(files(root)["expected.json"])["counts"] == json.loads(before["expected.json"])["counts"]


def test_a_failed_check_is_reported_with_exit_code_1(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pairproof import fast

    right = fast.nt_bxent_loss
    monkeypatch.setattr(fast, "nt_bxent_loss", lambda *a, **k: -right(*a, **k))
    before = files(root)
    for command, words in (("check", "a rebuild would change nothing"), ("rebuild", "nothing changed")):
        assert call(command) == 1
        lines = capsys.readouterr().out.splitlines()
        failed = [line for line in lines if line.startswith("failed: ")]
        assert failed[0].startswith("failed: golden/nt_bxent/one-positive-balanced-tau-half, fast, float64: ")
        assert all("; repeat: pairproof verify --case golden/nt_bxent/" in line for line in failed)
        counted = "the stored counts of checks assume that they pass or deviate as declared"
        advice = "correct the implementations or declare the deviations, then run this command again"
        assert lines[-2:] == [
            f"fixtures: {words}",
            f"fixtures: {len(failed)} checks failed; {counted}; {advice}",
        ]
    # The counts are those of the corrected implementation.
    assert files(root) == before


# A peer whose results changed.

PEER = """
import torch

class SupConLoss:
    def __init__(self, temperature, base_temperature, contrast_mode):
        self.temperature = temperature

    def __call__(self, features, labels=None, mask=None):
        {body}
"""


def peer(folder: Path, body: str) -> Path:
    path = folder / "losses.py"
    path.write_text(PEER.format(body=body), encoding="utf-8")
    return path


def test_an_unknown_revision_is_compared_and_not_recorded(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(root)
    peer(tmp_path, "return (features * 2).sum()")
    for command in ("rebuild", "check"):
        assert call(command, "--peer", f"supcontrast={tmp_path}") == 3
        text = capsys.readouterr().err
        assert "not that of commit 66a8fe5" in text
        assert "nothing was changed" in text
        assert f"{RECORDED}: commit: {supcontrast.TODAY_COMMIT} -> nothing" in text
        (line,) = [x for x in text.splitlines() if f"golden/{FIRST}, float64: " in x]
        assert " value " in line
        assert "; gradient [0, 0] " in line
    assert files(root) == before


def test_a_new_revision_is_recorded_with_its_difference(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = peer(tmp_path, "return (features * 2).sum()")
    monkeypatch.setattr(supcontrast, "TODAY_SHA256", supcontrast.sha256(path))
    before = files(root)
    # The new results are recorded; they are wrong, so that checks fail.
    assert call("rebuild", "--peer", f"supcontrast={tmp_path}") == 1
    text = capsys.readouterr().out
    assert f"{RECORDED}: sha256: " in text
    assert f"{RECORDED}: golden/{FIRST}, float32: value " in text
    assert f"failed: golden/{FIRST}, supcontrast-today, float32: " in text
    assert "checks failed; the stored counts of checks assume that they pass or deviate as declared; correct" in text
    after = files(root)
    assert {name for name in after if after[name] != before[name]} == {RECORDED, "manifest.json"}
    for command, given in (("check", tmp_path), ("rebuild", path)):
        assert call(command, "--peer", f"supcontrast={given}") == 1
        assert "fixtures: nothing changed" in (text := capsys.readouterr().out) or "would change nothing" in text
    assert files(root) == after


def test_recorded_values_do_not_depend_on_the_number_of_threads(root: Path, tmp_path: Path) -> None:
    peer(tmp_path, "return (features * torch.get_num_threads()).sum()")
    (case,) = [case.case for case in golden.load_golden(root) if case.id == f"golden/{FIRST}"]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        (found, _) = supcontrast.record([case], str(tmp_path))["records"]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    rows = case.embeddings / np.linalg.norm(case.embeddings, axis=1, keepdims=True)
    assert found["values"] == pytest.approx([rows.sum()], rel=1e-13)


def test_an_exception_of_a_peer_is_reported(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(root)
    peer(tmp_path, "raise RuntimeError('out of paper')")
    assert call("rebuild", "--peer", f"supcontrast={tmp_path}") == 3
    text = capsys.readouterr().err
    assert "losses.py fails on golden/supcon/" in text
    assert "RuntimeError: out of paper" in text
    assert call("rebuild", "--peer", "supkontrast=x") == 2
    assert "unknown peer with a path 'supkontrast'; known: supcontrast, folder" in capsys.readouterr().err
    assert files(root) == before


def test_each_difference_is_one_line() -> None:
    def entry(case: str, value: float | str, gradient: list[list[float]]) -> dict[str, Any]:
        return {"case": case, "dtype": "float32", "values": [value], "gradient": gradient}

    old = {
        "torch": "2.12.0",
        "records": [entry("a", 1.0, [[0.5, 1.0]]), entry("b", 1.0, [[1.0], [2.0]]), entry("c", 1.0, [[1.0]])],
    }
    new = {
        "torch": "2.13.0",
        "records": [entry("a", 1.5, [[0.5, 1.25]]), entry("b", 1.0, [[1.0], [3.0]]), entry("d", "nan", [[1.0]])],
    }
    assert list(differences(old, new)) == [
        "torch: 2.12.0 -> 2.13.0",
        "a, float32: value 1.0 -> 1.5; gradient [0, 1] 1.0 -> 1.25 (1 of 2 entries differ)",
        "b, float32: value the same; gradient [1, 0] 2.0 -> 3.0 (1 of 2 entries differ)",
        "c, float32: no longer recorded",
        "d, float32: recorded for the first time: value nan",
    ]
    assert list(differences(old, old)) == []
    assert list(differences({}, {"torch": "2.13.0", "records": []})) == ["torch: nothing -> 2.13.0"]
    assert shortened(["x"] * 42)[-2:] == ["x", "... and 2 more"]
    assert shortened(["x"] * 40) == ["x"] * 40


# Adding a case.

EMBEDDINGS = np.array([[1.0, 0.5], [0.75, -0.25], [-1.0, 0.125], [0.5, 0.5], [-0.5, 2.0]])
LABELS = np.array([7, 7, -3, -3, 9])
ALWAYS = ("--flag", "trained-like,hard-positive", "--note", "The batch of a user.")


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    """The folder of a batch as npy and csv."""
    folder = tmp_path / "batch"
    folder.mkdir()
    np.save(folder / "z.npy", EMBEDDINGS.astype(np.float32))
    np.save(folder / "y.npy", LABELS)
    (folder / "z.csv").write_text("\n".join(",".join(map(str, row)) for row in EMBEDDINGS.tolist()) + "\n")
    (folder / "y.csv").write_text("7, 7, -3, -3, 9\n")
    return folder


def arguments(loss: str, embeddings: object, *more: object, name: str = "mine") -> list[str]:
    return ["add", "--loss", loss, "--embeddings", str(embeddings), "--id", name, *map(str, more), *ALWAYS]


def test_add_appends_a_proved_case(root: Path, batch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(root)
    options = (
        "--labels",
        batch / "y.npy",
        "--temperature",
        "0.5",
        "--set",
        "no_positive=drop",
        "--set",
        "reduction=mean",
    )
    assert call(*arguments("supcon", batch / "z.npy", *options)) == 0
    printed = capsys.readouterr()
    assert "fixtures: golden/supcon/mine is proved and written" in printed.out
    steps = [f"pairproof: {step}" for step in ("proving", "documents", "cases")]
    assert printed.err.splitlines() == [*steps, "pairproof: the case is written; updating tables and counts"]
    after = files(root)
    assert {name for name in after if after[name] != before.get(name)} == {
        "expected.json",
        "golden/supcon.json",
        "manifest.json",
    }
    old, new = before["golden/supcon.json"].decode(), after["golden/supcon.json"].decode()
    assert new.startswith(old.rstrip("}]\n "))

    added = find_golden("mine", root)
    assert added.id == "golden/supcon/mine"
    assert added.case.embeddings.tolist() == EMBEDDINGS.tolist()
    assert added.case.arguments == {"labels": LABELS.tolist()}
    assert added.case.keywords == {"temperature": 0.5, "no_positive": "drop"}
    assert added.flags == ("trained-like", "hard-positive")
    assert added.dtypes == ("float64", "float32", "bfloat16", "float16")
    rows = EMBEDDINGS / np.linalg.norm(EMBEDDINGS, axis=1, keepdims=True)
    logits = rows @ rows.T / 0.5
    np.fill_diagonal(logits, -np.inf)
    softmax = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    right = -np.log(softmax[[0, 1, 2, 3], [1, 0, 3, 2]])
    np.testing.assert_allclose(list(added.expected.anchors.values()), right, rtol=1e-14)
    assert added.expected.loss == pytest.approx(right.mean(), rel=1e-14)

    # The counts equal those of a rebuild.
    assert rebuild.rebuild({}, root, processes=1, keep=False).changes == ()
    assert call(*arguments("supcon", batch / "z.npy", *options)) == 2
    assert "--id: golden/supcon/mine exists; choose another id" in capsys.readouterr().err
    assert call(*arguments("supcon", batch / "z.npy", *options, name="golden/supcon/other")) == 2
    same = "golden/supcon/mine has the same inputs and options; to see it: pairproof fixtures show golden/supcon/mine"
    assert same in capsys.readouterr().err
    assert files(root) == after


def test_every_format_gives_the_same_case(batch: Path) -> None:
    pytest.importorskip("safetensors", reason=f"safetensors is not installed: {install_command('safetensors')}")
    from safetensors.torch import save_file

    tensors = {"z": torch.tensor(EMBEDDINGS, dtype=torch.bfloat16), "y": torch.tensor(LABELS)}
    save_file(tensors, batch / "all.safetensors")
    torch.save({**tensors, "step": 7}, batch / "all.pt")
    torch.save(torch.nn.Parameter(tensors["z"]), batch / "z.pt")
    torch.save(tensors["y"], batch / "y.pt")
    cases = [
        make_case(Batch("supcon", "mine", str(batch / z), str(batch / y)))
        for z, y in (
            *((f"z.{suffix}", f"y.{suffix}") for suffix in ("npy", "csv", "pt")),
            *((f"all.{suffix}:z", f"all.{suffix}:y") for suffix in ("safetensors", "pt")),
        )
    ]
    for case in cases:
        assert case.embeddings.dtype == np.float64
        assert case.embeddings.tolist() == EMBEDDINGS.tolist()
        assert case.arguments == cases[0].arguments == {"labels": [7, 7, -3, -3, 9]}
    for name in ("all.safetensors", "all.safetensors:x", "all.pt", "all.pt:step"):
        with pytest.raises(Refused, match=r"no such tensor; write .*all\.(safetensors|pt):TENSOR with one of y, z$"):
            make_case(Batch("supcon", "mine", str(batch / name), str(batch / "y.npy")))
    torch.save([1.0], batch / "list.pt")
    torch.save(Path("code"), batch / "code.pt")
    for name, words in (
        ("z.pt:z", "no named tensors"),
        ("list.pt", "expected a tensor, got list"),
        ("code.pt", "cannot be read as pt: Weights only load failed"),
    ):
        with pytest.raises(Refused, match=words):
            read_array(f"{batch}/{name}", "--embeddings", "embeddings")
    (batch / "bad.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(Refused, match="cannot be read as safetensors: "):
        read_array(f"{batch}/bad.safetensors:z", "--embeddings", "embeddings")


def test_without_safetensors_the_error_says_what_to_install(batch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    (batch / "all.safetensors").write_bytes(b"")
    with pytest.raises(Refused, match=r'this format requires safetensors: pip install "\./pairproof\[safetensors\]"'):
        read_array(f"{batch}/all.safetensors:z", "--embeddings", "embeddings")


def test_add_takes_every_kind_of_target_and_mask(root: Path, batch: Path) -> None:
    four = batch / "four.npy"
    np.save(four, EMBEDDINGS[:4])
    (batch / "mask.csv").write_text("0,1,0,0\n0,0,1,0\ntrue,false,False,1\n0,0,0,0\n")
    (batch / "pairs.csv").write_text("0,1\n2,3\n")
    (batch / "none.csv").write_text("")
    (batch / "anchors.csv").write_text("1\n0\n1\n1\n")
    (batch / "huge.csv").write_text(f"{2**60}\n{2**60}\n1\n{-(2**63)}\n")
    for loss, option, name in (
        ("supcon_in", "positives", "mask.csv"),
        ("nt_bxent", "positive-pairs", "pairs.csv"),
        ("nt_bxent", "positive-pairs", "none.csv"),
        ("nt_xent_pairwise", "labels", "huge.csv"),
    ):
        words = (f"--{option}", batch / name, "--anchors", batch / "anchors.csv")
        assert call(*arguments(loss, four, *words, name=f"from-{Path(name).stem}")) == 0
    for layout, partners in (("interleaved", [1, 0, 3, 2]), ("stacked", [2, 3, 0, 1])):
        assert call(*arguments("nt_xent", four, "--partners", layout, "--no-gradient", name=layout)) == 0
        added = find_golden(f"nt_xent/{layout}", root)
        assert added.case.arguments == {"partners": partners}
        assert added.expected.gradient_left_out == "by choice: the batch is large"
    mask = find_golden("from-mask", root).case
    assert mask.positives() == [[1], [2], [0, 3], []]
    assert mask.anchors() == [0, 2, 3]
    assert find_golden("from-pairs", root).case.arguments == {"positive_pairs": [[0, 1], [2, 3]]}
    assert find_golden("from-none", root).case.arguments == {"positive_pairs": []}
    assert find_golden("from-huge", root).case.arguments == {"labels": [2**60, 2**60, 1, -(2**63)]}
    assert rebuild.rebuild({}, root, processes=1, keep=False).changes == ()


def test_add_takes_references_towers_and_negatives(root: Path, batch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(root)
    references, second, queue = EMBEDDINGS[::-1] * 0.5, EMBEDDINGS * [1.0, -2.0], -EMBEDDINGS[1:4]
    np.save(batch / "references.npy", references[:3])
    np.save(batch / "second.npy", second)
    np.save(batch / "queue.npy", queue.astype(np.float32))
    (batch / "ref-labels.csv").write_text("7\n-3\n7\n")
    (batch / "self-rows.csv").write_text("-1\n2\n-1\n-1\n0\n")
    (batch / "mask.csv").write_text("1,0,0\n0,1,1\n0,0,0\n1,1,1\n0,1,0\n")
    refs = ("--ref-embeddings", batch / "references.npy", "--self-rows", batch / "self-rows.csv")
    labels = ("--labels", batch / "y.npy", "--ref-labels", batch / "ref-labels.csv")
    assert call(*arguments("supcon", batch / "z.npy", *refs, *labels, name="referenced")) == 0
    assert call(*arguments("supcon_in", batch / "z.npy", *refs, "--positives", batch / "mask.csv", name="masked")) == 0
    (batch / "partners.csv").write_text("0\n1\n1\n2\n2\n")
    assert call(*arguments("nt_xent", batch / "z.npy", *refs, "--partners", batch / "partners.csv", name="bank")) == 0
    towers = ("--embeddings-b", batch / "second.npy")
    assert call(*arguments("info_nce", batch / "z.npy", *towers, "--set", "direction=b_to_a", name="towers")) == 0
    assert call(*arguments("info_nce", batch / "z.npy", *towers, "--negatives", batch / "queue.npy", name="moco")) == 0
    assert capsys.readouterr().out.count(" is proved and written") == 5

    case = find_golden("referenced", root)
    assert case.case.others["ref_embeddings"].tolist() == references[:3].tolist()
    assert case.case.arguments == {"labels": LABELS.tolist(), "ref_labels": [7, -3, 7], "self_rows": [-1, 2, -1, -1, 0]}
    assert case.case.members() == [[0, 1, 2], [0, 1], [0, 1, 2], [0, 1, 2], [1, 2]]
    assert case.case.positives() == [[0, 2], [0], [1], [1], []]
    assert case.expected.other_gradients["ref_embeddings"].shape == (3, 2)
    assert find_golden("masked", root).case.positives() == [[0], [1], [], [0, 1, 2], [1]]
    assert find_golden("bank", root).case.positives() == [[0], [1], [1], [2], [2]]
    moco, towers_found = find_golden("moco", root), find_golden("towers", root)
    assert moco.case.arguments == {}
    assert moco.case.others["negatives"].tolist() == queue.tolist()
    assert towers_found.case.keywords == {"direction": "b_to_a"}

    # The value by its formula: every row of the second tower is contrasted with the first tower.
    a, b = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (EMBEDDINGS, second))
    logits = b @ a.T / 0.07
    right = np.log(np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1)) + logits.max(axis=1)
    assert towers_found.expected.loss == pytest.approx(float((right - np.diag(logits)).mean()), rel=1e-13)

    assert rebuild.rebuild({}, root, processes=1, keep=False).changes == ()
    assert call(*arguments("info_nce", batch / "z.npy", *towers, "--negatives", batch / "queue.npy", name="again")) == 2
    assert "golden/info_nce/moco has the same inputs and options" in capsys.readouterr().err
    for more in ((), ("--negatives", batch / "second.npy")):
        assert call(*arguments("info_nce", batch / "z.npy", *towers, *more, "--dry-run", name="another")) == 0
    assert set(files(root)) == set(before)


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        ("supcon", {"embeddings-b": "z.npy"}, "--embeddings-b: supcon_loss has no argument embeddings_b"),
        ("nt_bxent", {"ref-embeddings": "z.npy"}, "--ref-embeddings: nt_bxent_loss has no argument ref_embeddings"),
        ("supcon", {"labels": "y.npy", "self-rows": "y.npy"}, "self_rows: expected ref_embeddings with it, got none"),
        (
            "supcon",
            {"labels": "y.npy", "ref-embeddings": "z.npy"},
            "ref_labels: expected one label per reference, shap",
        ),
        (
            "supcon",
            {"labels": "y.npy", "ref-embeddings": "z.npy", "ref-labels": "y.npy", "self-rows": "y.npy"},
            "self_rows: expected rows in the range -1 to 4, got 7 in row 0",
        ),
        (
            "nt_xent",
            {"partners": "y.npy", "ref-labels": "y.npy"},
            "--ref-labels: nt_xent_loss has no argument ref_labels",
        ),
        (
            "supcon",
            {"labels": "y.npy", "ref-embeddings": "y.npy"},
            "ref_embeddings: expected a floating dtype, got int",
        ),
        ("info_nce", {}, "info_nce needs --embeddings-b"),
        (
            "multiple_negatives_ranking",
            {"embeddings-b": "z.npy", "labels": "y.npy"},
            "multiple_negatives_ranking takes no labels or other targets, because row i of one tower belongs",
        ),
        ("info_nce", {"embeddings-b": "z.npy", "anchors": "y.npy"}, "--anchors: info_nce_loss has no argument anchors"),
        (
            "info_nce",
            {"embeddings-b": "z.npy", "set": "direction=up"},
            "direction: expected one of both, a_to_b, b_to_a",
        ),
        (
            "info_nce",
            {"embeddings-b": "z.npy", "set": "negatives=1"},
            "--set negatives: info_nce_loss has no such option; its options: temperature, ",
        ),
        ("info_nce", {"embeddings-b": "z.npy", "negatives": "no.npy"}, "--negatives "),
    ],
)
def test_invalid_references_and_towers_are_reported_in_one_line(
    root: Path, batch: Path, loss: str, options: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(root)
    words = [str(batch / value) if value.endswith(".npy") else value for value in options.values()]
    given = [word for pair in zip((f"--{name}" for name in options), words, strict=True) for word in pair]
    assert call(*arguments(loss, batch / "z.npy", *given)) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"pairproof: {message}")
    assert text.count("\n") == 1
    assert files(root) == before


def test_a_dry_run_prints_the_case_and_changes_nothing(
    root: Path, batch: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(root)
    monkeypatch.setattr(rebuild, "ALL", (Absent,))
    assert call(*arguments("supcon_in", batch / "z.csv", "--labels", batch / "y.csv", "--dry-run")) == 0
    entry = json.loads(capsys.readouterr().out)
    assert entry["id"] == "supcon_in/mine"
    assert entry["note"] == "The batch of a user."
    assert entry["embeddings"] == EMBEDDINGS.tolist()
    assert math.isfinite(entry["expected"]["loss"])
    assert np.shape(entry["expected"]["gradient"]) == EMBEDDINGS.shape
    assert files(root) == before


def write(path: Path, content: object) -> Path:
    if isinstance(content, str):
        path = path.with_suffix(".csv")
        path.write_text(content)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, np.asarray(content), allow_pickle=True)
    return path


@pytest.mark.parametrize(
    ("embeddings", "labels", "message"),
    [
        ([1.0, 2.0], [0, 0], "embeddings: expected shape [N, D], got shape [2]"),
        (1.0, [0, 0], "embeddings: expected shape [N, D], got shape []"),
        (EMBEDDINGS[:4], [0, 0, 1], "labels: expected one label per embedding, shape [4], got shape [3]"),
        (EMBEDDINGS[:4], [0.0, 0, 1, 1], "labels: expected an integer dtype, got float64"),
        (EMBEDDINGS[:4], "0\n0\n1.5\n1\n", "line 3: expected a 64-bit integer, got '1.5'"),
        (EMBEDDINGS[:4], f"0\n0\n{2**63}\n1\n", f"line 3: expected a 64-bit integer, got '{2**63}'"),
        (EMBEDDINGS[:4], np.array([0, 0, 1, 2**63], dtype=np.uint64), "labels: expected signed 64-bit integers"),
        (EMBEDDINGS[:2], "0,1\n0,1\n", "expected one line, or one entry per line, got shape (2, 2)"),
        ([[1.0, math.nan], [1.0, 1.0]], [0, 0], "embeddings: expected finite values, got NaN or infinity in row 0"),
        ([[1.0, 1.0], [0.0, 0.0]], [0, 0], "got zeros in row 1"),
        ([[1, 2], [3, 4]], [0, 0], "embeddings: expected a floating dtype, got int64"),
        ([[1j, 2], [3, 4]], [0, 0], "embeddings: expected a floating-point dtype of at most 64 bits, got complex128"),
        (
            np.eye(2, dtype=np.longdouble),
            [0, 0],
            "embeddings: expected a floating-point dtype of at most 64 bits, got ",
        ),
        (np.array([{}, 1]), [0, 0], "cannot be read as npy: Object arrays cannot be loaded"),
        (b"PK nothing", [0, 0], "cannot be read as npy: the magic string is not correct"),
        (b"\x93NUMPY\x01", [0, 0], "cannot be read as npy: "),
        ("1,2\n3\n", [0, 0], "line 2: expected 2 entries, as in the first line, got 1"),
        ("a,b\n1,2\n3,4\n", [0, 0], "line 1: expected a number, got 'a'"),
        ("", [0, 0], "embeddings: expected at least 1 row, got shape [0, 2]"),
    ],
)
def test_an_invalid_batch_is_reported_in_one_line(
    root: Path, tmp_path: Path, embeddings: object, labels: object, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(root)
    z, y = write(tmp_path / "z.npy", embeddings), write(tmp_path / "y.npy", labels)
    assert call(*arguments("supcon", z, "--labels", y)) == 2
    text = capsys.readouterr().err
    assert text.startswith("pairproof: ")
    assert text.count("\n") == 1
    assert message in text
    assert files(root) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--loss": "supkon"}, "--loss: expected one of supcon, "),
        ({"--id": "My Batch"}, "--id: expected lower-case words and digits joined by hyphens, got 'My Batch'"),
        ({"--id": "nt_xent/mine"}, "--id: expected lower-case words"),
        ({"--id": "lonely-nan"}, "--id: golden/supcon/lonely-nan exists; choose another id"),
        ({"--flag": "mystery"}, "--flag: unknown flag 'mystery'; known: every-anchor-paired, agreement, "),
        ({"--flag": "queue"}, "--flag: golden/supcon/mine: the flag 'queue' needs a case in which negatives is given"),
        ({"--note": " "}, "--note: expected one line that says what the case shows"),
        ({"--note": "two\nlines"}, "--note: expected one line"),
        ({"--embeddings": "nowhere.npy"}, "--embeddings nowhere.npy: there is no file nowhere.npy"),
        ({"--embeddings": __file__}, "expected X.npy, X.csv, X.pt, X.pt:TENSOR or X.safetensors:TENSOR, got '.py'"),
        ({"--partners": "stacked"}, "supcon takes exactly one of --labels or --positives; got --labels, --partners"),
        ({"--labels": None}, "supcon takes exactly one of --labels or --positives; got none"),
        ({"--loss": "nt_xent"}, "nt_xent takes --partners; got --labels"),
        ({"--loss": "nt_xent", "--labels": None, "--partners": "stacked"}, "--partners stacked: n: expected an even"),
        ({"--temperature": "cold"}, "temperature: expected a number, got 'cold'"),
        ({"--temperature": "0"}, "temperature: expected a positive finite number, got 0.0"),
        ({"--set": "margin=1"}, "--set margin: supcon_loss has no such option; its options: temperature, "),
        ({"--set": "denominator=none"}, "denominator: expected one of all, one_positive, only_negatives, got 'none'"),
        ({"--anchors": "y"}, "anchors: expected dtype bool, got int64"),
    ],
)
def test_invalid_options_are_reported_in_one_line(
    root: Path, batch: Path, changes: dict[str, str | None], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(root)
    given = {
        "--loss": "supcon",
        "--embeddings": str(batch / "z.npy"),
        "--labels": str(batch / "y.npy"),
        "--id": "mine",
        "--flag": "no-positive",
        "--note": "A note.",
        **changes,
    }
    if given.get("--anchors"):
        given["--anchors"] = str(batch / "y.npy")
    assert call("add", *(word for pair in given.items() if pair[1] is not None for word in pair)) == 2
    text = capsys.readouterr().err
    assert message in text
    assert text.count("\n") == 1
    assert files(root) == before


def test_add_reports_checks_that_fail_on_the_new_case(
    root: Path, batch: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pairproof import fast

    monkeypatch.setattr(fast, "supcon_loss", lambda embeddings, *a, **k: embeddings.sum())
    assert call(*arguments("supcon", batch / "z.npy", "--labels", batch / "y.npy")) == 0
    text = capsys.readouterr().out
    assert "failed: golden/supcon/mine, fast, float64: " in text
    assert "repeat: pairproof verify --case golden/supcon/mine --impl fast --dtype float64" in text


@pytest.mark.parametrize("place", ["certify", "run", "load_golden", "put_in_place", "write_counts"])
def test_an_interrupted_add_leaves_the_old_files(
    root: Path, batch: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    before = files(root)

    def stop(*_: object, **__: object) -> None:
        raise CertificationError("stopped")

    monkeypatch.setattr(authoring, place, stop)
    with pytest.raises(CertificationError, match="stopped"):
        authoring.add(Batch("supcon", "mine", str(batch / "z.npy"), str(batch / "y.npy")), ["no-positive"], "A note.")
    assert files(root) == before


def test_a_wrong_derivative_by_the_temperature_is_not_called_proved(
    root: Path, batch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof of a formula that depends on the temperature in another way than through its logits is wrong."""
    before, certify = files(root), authoring.certify

    def wrong(*given: Any, **more: Any) -> Expected:
        found = certify(*given, **more)
        return replace(found, temperature_gradient=1.05 * found.temperature_gradient)

    monkeypatch.setattr(authoring, "certify", wrong)
    given = Batch("supcon", "mine", str(batch / "z.npy"), str(batch / "y.npy"))
    with pytest.raises(CertificationError, match=r"^golden/supcon/mine: .* does not know this formula$"):
        authoring.add(given, ["no-positive"], "A note.")
    assert files(root) == before


def test_add_needs_no_optional_peer(root: Path, batch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rebuild, run):
        monkeypatch.setattr(module, "ALL", (Fast, Absent))
    added = authoring.add(
        Batch("supcon", "mine", str(batch / "z.npy"), str(batch / "y.npy")), ["trained-like"], "A note."
    )
    assert added.notes == ("absent: not run, so its counts follow from its declarations: not here: get it somewhere",)
    counts = json.loads((root / "expected.json").read_text())["counts"]
    assert counts["absent/supcon"] == {"passed": 4}


@pytest.mark.slow
def test_the_tables_and_counts_of_a_checkout_are_updated(tmp_path: Path) -> None:
    top = ROOT.parent
    shutil.copytree(top / "tools", tmp_path / "tools")
    shutil.copytree(top / "examples", tmp_path / "examples")
    names = [renew.COUNTED[0], *renew.TABLES.values()]
    for name in (renew.README, *names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(top / name, tmp_path / name)
    assert renew.renew(tmp_path, "supcon_epsilon") == []
    names += renew.COUNTED[1:]
    before = {name: (tmp_path / name).read_text() for name in names}
    for name, text in before.items():
        # Reduce one number by 1. In the table of faults, only the section of the loss is updated.
        section = text.partition("## supcon_epsilon") if "faults" in name else ("", "", text)
        number = r"(checks=)(\d+)" if name in renew.COUNTED else r"( of |conforms \()(\d+)"
        changed = re.sub(number, lambda match: f"{match[1]}{int(match[2]) - 1}", section[2], count=1)
        assert changed != section[2], name
        (tmp_path / name).write_text("".join((*section[:2], changed)))
    assert renew.renew(tmp_path, "supcon_epsilon") == [*renew.TABLES.values(), *renew.COUNTED]
    assert {name: (tmp_path / name).read_text() for name in names} == before


@pytest.mark.slow
def test_the_counts_in_the_sample_of_the_readme_are_updated(tmp_path: Path) -> None:
    text, readme = (ROOT.parent / "README.md").read_text(), tmp_path / "README.md"
    wrong = re.sub(
        r"\d+(\s+)(checks\s+passed|failed)\b", r"1\1\2", re.sub(r"explains \d+ of \d+", "explains 3 of 4", text)
    )
    readme.write_text(wrong)
    assert ": explains 3 of 4 failing cases" in wrong
    assert "; 1 checks passed, 1 failed, 1 failed above this level in " in " ".join(wrong.split())
    renew._sample(readme)
    seconds = re.compile(r" in [\d.]+ s$", re.MULTILINE)
    assert seconds.sub("", readme.read_text()) == seconds.sub("", text)


def test_add_refuses_changed_fixtures(root: Path, batch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(root, "golden/supcon.json", lambda data: data["cases"][0].update(note="Another note."))
    assert call(*arguments("nt_xent", batch / "z.npy", "--labels", batch / "y.npy")) == 1
    assert "golden/supcon.json: altered: " in capsys.readouterr().err


# Showing a case.


def test_show_explains_a_case(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("lonely-nan", "supcon/lonely-nan", "golden/supcon/lonely-nan"):
        assert call("show", name) == 0
        text = capsys.readouterr().out
        assert text.startswith("golden/supcon/lonely-nan: supcon_loss(embeddings, labels), Khosla")
    for line in (
        "flag lonely-anchors",
        "  detects: An anchor without positive",
        "  where: https://github.com/HobbitLong/SupContrast/issues/142",
        "  no_positive nan",
        "  temperature 0.4",
        "  similarity cosine (the default)",
        "  labels [0, 0, 1, 2]",
        "exact in float64, float32, bfloat16, float16",
        "  loss nan",
        "  value of anchor 2: nan",
        "  gradient left out: the loss is NaN",
        "repeat: pairproof verify --case golden/supcon/lonely-nan",
        "anchor 0: positives 1; negatives 2 3",
    ):
        assert line in text
    assert call("show", "info_nce/queue-tau-half", "--terms") == 0
    text = capsys.readouterr().out
    found = find_golden("info_nce/queue-tau-half")
    for line in (
        "golden/info_nce/queue-tau-half: info_nce_loss(embeddings_a, embeddings_b, negatives), van den Oord",
        "4 rows of 3 numbers in each of two towers, 5 negatives, exact in float64",
        f"  negatives, row 4: {found.case.others['negatives'][4, 0]!s}, ",
        f"  gradient with respect to embeddings_b, row 3: {found.expected.other_gradients['embeddings_b'][3, 0]!s}, ",
        "  direction both",
        "anchor 4 (row 0 of embeddings_b): positives 0; negatives 4 5 6 7 8",
    ):
        assert line in text
    assert "negatives not given" not in text
    case = find_golden(FIRST)
    assert call("show", FIRST, "--no-terms") == 0
    text = capsys.readouterr().out
    assert f"  loss {case.expected.loss!r}" in text
    assert f"  gradient: norm {np.linalg.norm(case.expected.gradient)}" in text
    assert "positives" not in text.partition("terms: ")[2]
    assert call("show", FIRST, "--terms") == 0
    text = capsys.readouterr().out
    assert f"  gradient, row 1: {case.expected.gradient.tolist()[1][0]!r}, " in text
    assert f"  row 0: {case.case.embeddings[0].tolist()[0]!r}, " in text


def test_show_reports_unknown_and_ambiguous_names(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("show", "nobody") == 2
    assert "no golden case is called 'nobody'; see: pairproof list" in capsys.readouterr().err
    assert call("show", "one-positive-balanced-tau-half") == 2
    assert "is a case of several losses: golden/supcon/one-positive" in capsys.readouterr().err
    with pytest.raises(UsageError):
        find_golden("nobody", root)


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_every_case_of_the_real_fixtures_can_be_shown(step: int) -> None:
    flags = golden.load_flags()
    for case in golden.load_golden()[::step]:
        if case.case.n <= 4:
            assert sum(1 for _ in describe(case, flags, terms=True)) > 20, case.id


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--help") == 0
    text = capsys.readouterr().out
    for command in ("rebuild", "check", "add", "show"):
        assert command in text
