"""Targets that interfere with their process: they cannot end a run, delay it, or change its verdict."""

from __future__ import annotations

import json
import multiprocessing.connection
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from pairproof import fast
from pairproof.conformance import cli
from pairproof.conformance.diagnose.identify import identify
from pairproof.conformance.documents import load
from pairproof.conformance.implementations import child as children
from pairproof.conformance.implementations.child import DEATHS, load_loss
from pairproof.conformance.implementations.sandbox import TargetError
from pairproof.conformance.judge import check as checking
from pairproof.conformance.judge import verify as run
from pairproof.conformance.judge.check import CheckResult, check_loss
from pairproof.conformance.judge.options import CouldNotRun
from pairproof.conformance.judge.results import Status
from pairproof.conformance.suite.cases import Case
from pairproof.conformance.suite.golden import GoldenCase

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="targets run in a child process only on Linux")

FOLDER = Path(__file__).parent / "targets"
HOSTILE = FOLDER / "hostile.py"
EVEN, ODD = "golden/supcon/two-positives", "golden/supcon/unbalanced-classes"
CASES = (ODD, EVEN, "golden/supcon/unbalanced-classes*", "golden/supcon/two-positives-default")

ERRORS = {
    "exits": "the target ended its process (exit code 0)",
    "segfaults": "the target crashed its process (signal 11, Segmentation fault)",
    "aborts": "the target crashed its process (signal 6, Aborted)",
    "kills_itself": "the target crashed its process (signal 9, Killed)",
    "kills_its_parent": "the target closed its connection and was killed",
    "blocks_the_alarm": "took longer than 0.5 s (--limit) and was killed",
    "closes_everything": "the target ended its process (exit code 0)",
    "raises_without_a_message": "raised an exception whose name or message cannot be read",
    "raises_without_a_name": "raised an exception whose name or message cannot be read",
    "raises_generator_exit": "GeneratorExit: stopped",
    "raises_keyboard_interrupt": "KeyboardInterrupt: ",
    "raises_markup": r"ValueError: [/bold] [red]a[0] \x1b[31m &<>",
    "raises_other_letters": "ValueError: größe \u2264 \\udc80 \U0001f600",
    "exits_through_its_answer": "returned a Bomb where a tensor is expected",
}
"""The error of every case with an odd number of rows, by the name of the target."""

HARMLESS = (
    *("exits_at_the_end", "leaves_a_thread", "leaves_a_process", "returns_in_two_processes", "closes_stdout"),
    *("replaces_stdout", "prints", "changes_the_process"),
)
"""Targets whose values are right."""


@cache
def _every_case() -> dict[Case, GoldenCase | None]:
    return run.load_cases(load.load_worked())


def _cases(_: object, losses: tuple[str, ...] = ()) -> dict[Case, GoldenCase | None]:
    return {case: golden for case, golden in _every_case().items() if not losses or case.loss in losses}


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Load the cases once, let targets import ``losses``, and check that no process or thread is left."""
    _every_case()
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    monkeypatch.syspath_prepend(FOLDER)
    for module in (checking, run):
        monkeypatch.setattr(module, "load_cases", _cases)
    monkeypatch.setattr(checking, "load_worked", list)
    monkeypatch.setattr(load, "load_worked", list)
    before = set(_children()), threading.active_count()
    yield
    # Other tests import a different module of this name.
    sys.modules.pop("losses", None)
    assert (set(_children()), threading.active_count()) == before


@pytest.fixture
def in_vain(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each time limit that ran out while this process waited for a target."""
    ran_out: list[float] = []

    def wait(connections: list[Any], timeout: float | None = None) -> list[Any]:
        ready = multiprocessing.connection.wait(connections, timeout)
        ran_out.extend(filter(None, [] if ready else [timeout]))
        return ready

    monkeypatch.setattr(children, "wait", wait)
    return ran_out


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill a target that blocks its alarm soon after the time limit."""
    monkeypatch.setattr(children, "PATIENCE", 0.5)


def _children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def results_of(result: CheckResult) -> dict[tuple[str, str], tuple[str, str]]:
    """The status and the message of each judged check."""
    return {(check.case, check.dtype): (check.status.value, check.message) for check in result.judged}


def expected(error: str) -> dict[tuple[str, str], tuple[str, str]]:
    """The checks of ``CASES`` if every case with an odd number of rows ends with an error."""
    cases = {ODD: ("errored", error), EVEN: ("passed", ""), f"{EVEN}-default": ("passed", "")}
    return {(case, dtype): end for case, end in cases.items() for dtype in ("float64", "float32")}


def each(names: Iterable[str], quick: Collection[str]) -> list[Any]:
    """Every target by its name, and as an imported function, which is slow except for those in ``quick``."""
    return [
        pytest.param(name, imported, id=f"{name}-{way}", marks=[pytest.mark.slow] * (imported and name not in quick))
        for name in names
        for imported, way in ((False, "named"), (True, "imported"))
    ]


def target(name: str, imported: bool) -> Any:
    spec = f"{HOSTILE}:{name}"
    return children.find(spec) if imported else spec


@pytest.mark.parametrize(("name", "imported"), each(ERRORS, ("segfaults", "kills_its_parent", "raises_markup")))
@pytest.mark.quick(6)
def test_error_of_a_hostile_target_is_reported_and_other_cases_are_judged(
    name: str, imported: bool, in_vain: list[float], request: pytest.FixtureRequest
) -> None:
    if name == "blocks_the_alarm":
        request.getfixturevalue("impatient")
    result = check_loss(target(name, imported), "supcon", cases=CASES, limit=0.5)
    assert results_of(result) == expected(ERRORS[name])
    assert (result.verdict, result.exit_code) == ("does not conform", 1)
    # One time limit per check that ends with an error: for an answer, or for the exit code of an ended process.
    assert len(in_vain) <= 2
    assert sum(in_vain) <= 2 * (0.5 + children.PATIENCE if name == "blocks_the_alarm" else children.BRIEFLY)


@pytest.mark.parametrize(("name", "imported"), each(HARMLESS, ("exits_at_the_end", "changes_the_process")))
@pytest.mark.quick(4)
def test_target_that_interferes_conforms_if_its_values_are_right(
    name: str, imported: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    result = check_loss(target(name, imported), "supcon", cases=CASES)
    assert result.verdict == "conforms", results_of(result)
    output, errors = capfd.readouterr()
    assert output == ""
    assert errors.count("conforms: a fake verdict\n") == (1 if name == "prints" else 0)


@pytest.mark.usefixtures("verdict_only")
def test_patched_functions_do_not_reach_the_comparison() -> None:
    before = torch.linalg.vector_norm
    result = check_loss(f"{HOSTILE}:patches_torch", "supcon", cases=CASES)
    assert {check.case for check in result.failures if check.status is Status.FAILED} == {ODD}
    assert all(check.ratio is not None and check.ratio > 1e6 for check in result.failures)
    assert torch.linalg.vector_norm is before


def test_target_that_always_dies_is_given_up() -> None:
    def dies(embeddings: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
        os._exit(7)

    result = check_loss(dies, "supcon", cases=("golden/supcon/t[!r]*", "golden/supcon/trained*"))
    assert result.verdict == "could not run"
    messages = [check.message for check in result.judged]
    assert messages[:DEATHS] == ["the target ended its process (exit code 7)"] * DEATHS
    last = f"gave up after {DEATHS} deaths of the process in a row; the last: {messages[0]}"
    assert set(messages[DEATHS:]) == {last}


@pytest.mark.parametrize(
    ("name", "imported"),
    [
        ("exits", True),
        pytest.param("blocks_the_alarm", False, marks=pytest.mark.slow),
        pytest.param("exits", False, marks=pytest.mark.slow),
        pytest.param("segfaults", True, marks=pytest.mark.slow),
    ],
)
def test_identify_reports_the_error_and_the_loss(name: str, imported: bool, request: pytest.FixtureRequest) -> None:
    if name == "blocks_the_alarm":
        request.getfixturevalue("impatient")
    found = identify(target(name, imported), limit=0.5)
    assert (found.verdict, found.loss) == ("match", "supcon")
    error = ERRORS[name]
    assert any(remark.startswith("breaks on") and remark.endswith(error) for remark in found.remarks)


def test_identify_raises_if_the_target_always_dies() -> None:
    def dies(embeddings: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        os._exit(0)

    with pytest.raises(TargetError, match=r"cannot be called with any probe: the target ended its process"):
        identify(dies)


@pytest.mark.parametrize(
    "names",
    [("exits", "segfaults", "blocks_the_alarm", "raises_markup"), pytest.param((*ERRORS,), marks=pytest.mark.slow)],
    ids=["some", "all"],
)
@pytest.mark.slow
def test_plugin_reports_the_errors_and_judges_the_other_cases(
    names: tuple[str, ...], pytester: pytest.Pytester, impatient: None
) -> None:
    pytester.makepyfile(
        "import pairproof.conformance\n"
        + "".join(
            f"""
@pairproof.conformance.parametrize({f"{HOSTILE}:{name}"!r}, loss="supcon", cases={CASES}, limit=0.5)
def test_{name}(check):
    check()
"""
            for name in names
        )
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    number = len(names)
    result.assert_outcomes(failed=2 * number, passed=4 * number, skipped=2 * number)
    lines = [line for line in result.outlines if line.startswith(f"{ODD} float64: errored: ")]
    assert [line.partition(" errored: ")[2] for line in lines] == [ERRORS[name] for name in names]


@pytest.mark.slow
def test_plugin_judges_a_local_function_with_the_state_of_its_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        f"""
        import os
        import torch
        import pairproof.conformance
        from pairproof import fast

        @pairproof.conformance.parametrize(loss="supcon", cases={CASES})
        def test_it(check, monkeypatch):
            monkeypatch.setenv("SEEN", check.case)

            def loss(embeddings: torch.Tensor, labels, temperature):
                if os.environ["SEEN"] != check.case or len(embeddings) % 2:
                    os._exit(0)
                return fast.supcon_loss(embeddings, labels, temperature=temperature)

            check(loss)
        """
    )
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(failed=2, passed=4, skipped=2)


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    line = [sys.executable, "-m", "pairproof.conformance.cli", *arguments]
    given = {**os.environ, "COLUMNS": "1000", **environment}
    return subprocess.run(line, env=given, capture_output=True, timeout=600, check=False)


ALL = [word for case in CASES for word in ("--case", case)]


@pytest.mark.parametrize(
    ("spec", "hostile", "code", "words"),
    [
        pytest.param("hostile.py:exits", "", 1, "the target ended its process (exit code 0)", marks=pytest.mark.slow),
        pytest.param("hostile.py:leaves_a_thread", "", 0, "conforms at level ", marks=pytest.mark.slow),
        *(
            pytest.param("hostile_import.py:wrong", *others, marks=pytest.mark.slow)
            for others in (
                ("exits_at_the_end", 1, "does not conform at level "),
                ("exits", 3, "the target ended its process (exit code 0)"),
                ("leaves_a_thread", 1, "does not conform at level "),
                ("patches_torch", 1, "does not conform at level "),
            )
        ),
    ],
)
def test_command_sets_its_own_exit_code(spec: str, hostile: str, code: int, words: str) -> None:
    ended = command("check", f"{FOLDER / spec}", "--loss", "supcon", *ALL, HOSTILE=hostile)
    assert ended.returncode == code
    assert words in (ended.stdout + ended.stderr).decode()
    assert b"Traceback" not in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    "locale",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        pytest.param({"PYTHONUTF8": "1"}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_messages_are_printed_and_written_in_any_locale(locale: dict[str, str], tmp_path: Path) -> None:
    """The target's module also tries to set the exit code when the process ends."""
    target, locale = f"{FOLDER / 'hostile_import.py'}:raises_other_letters", locale | {"HOSTILE": "exits_at_the_end"}
    files = ["--json", str(tmp_path / "a.json"), "--junit", str(tmp_path / "a.xml")]
    ended = command("check", target, "--loss", "supcon", *ALL, *files, **locale)
    assert (ended.returncode, b"Traceback" in ended.stderr) == (1, False)
    assert b"ValueError: gr" in ended.stdout
    message = ERRORS["raises_other_letters"]
    report = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert message in {check.get("message") for check in report["checks"]}
    errors = ElementTree.parse(tmp_path / "a.xml").getroot().iter("error")
    assert {error.get("message") for error in errors} == {message}


def test_identify_command_sets_its_own_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOSTILE", "exits")
    with pytest.raises(SystemExit) as caught:
        cli.main(["identify", f"{FOLDER / 'hostile_import.py'}:wrong"])
    assert caught.value.code == 3
    assert "the target ended its process (exit code 0)" in capsys.readouterr().err


def test_loading_has_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "LOADING", 0.5)
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(1000)\n")
    with pytest.raises(CouldNotRun, match=r"^took longer than 0\.5 s to load and was killed$"):
        check_loss(f"{tmp_path / 'slow.py'}:loss", "supcon", limit=0.1)


def test_warnings_of_a_target_are_repeated_once_with_their_file() -> None:
    def warns(embeddings: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
        warnings.warn(f"{len(embeddings)} rows: not for production", FutureWarning, stacklevel=1)
        return fast.supcon_loss(embeddings, labels, temperature=temperature)

    with pytest.warns(FutureWarning, match="not for production") as caught:
        assert check_loss(warns, "supcon", cases=(EVEN, ODD)).verdict == "conforms"
    assert [Path(one.filename).name for one in caught] == ["test_isolation.py"]


@pytest.mark.parametrize("reason", ["CUDA is in use and does not survive a fork", "win32 has no safe fork"])
def test_target_runs_in_this_process_with_a_note_if_no_fork_is_possible(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason.startswith("CUDA"):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    else:
        monkeypatch.setattr(children.sys, "platform", "win32")
    seen: list[int] = []

    def loss(embeddings: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
        seen.append(len(embeddings))
        return fast.supcon_loss(embeddings, labels, temperature=temperature)

    result = check_loss(loss, "supcon", cases=(EVEN,))
    note = f"process: the target runs in the process that judges it: {reason}"
    assert (result.verdict, result.notes[-1], len(seen)) == ("conforms", note, 3)  # one of them is the trial
    assert note in identify(loss).notes


def test_target_ends_if_the_judging_process_is_killed(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(
        "import os, pathlib\n"
        "def loss(embeddings, labels, temperature):\n"
        f"    pathlib.Path({str(tmp_path / 'new')!r}).write_text(f'{{os.getpid()}} {{os.getppid()}}')\n"
        f"    os.rename({str(tmp_path / 'new')!r}, {str(tmp_path / 'processes')!r})\n"
        "    while True:\n"
        "        pass\n"
    )
    fork = multiprocessing.get_context("fork")
    judge = fork.Process(target=load_loss, args=(f"{tmp_path / 'endless.py'}:loss",), kwargs={"loss": "supcon"})
    judge.start()
    while not (tmp_path / "processes").exists() and judge.is_alive():
        time.sleep(0.1)
    judge.kill()
    judge.join()
    processes = [Path("/proc", number) for number in (tmp_path / "processes").read_text().split()]
    # The test hangs if nothing ends them.
    while any(map(_runs, processes)):
        time.sleep(0.1)


def _runs(process: Path) -> bool:
    """Whether a process exists and is not a zombie, which only its parent can remove."""
    try:
        return process.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_check_command_prints_the_errors_of_hostile_targets(capsys: pytest.CaptureFixture[str]) -> None:
    for name, error in list(ERRORS.items())[-4:]:
        with pytest.raises(SystemExit) as caught:
            cli.main(["check", f"{HOSTILE}:{name}", "--loss", "supcon", "--limit", "0.5", *ALL])
        assert caught.value.code == 1
        assert error.rstrip() in capsys.readouterr().out
