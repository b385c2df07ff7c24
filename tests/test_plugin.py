"""Tests of the pytest plugin: output and exit codes of an adopter's test runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pairproof.conformance.documents import load
from pairproof.conformance.implementations import subprocess as lines
from pairproof.conformance.judge import check as judging
from pairproof.conformance.judge import verify as run
from pairproof.conformance.judge.deviations import DeclarationError, project_file, read_declarations
from pairproof.conformance.judge.verify import load_cases
from pairproof.conformance.suite.cases import Case
from pairproof.conformance.suite.golden import GoldenCase

LOSSES = """
import torch
from torch.nn import functional


def dropping(embeddings, labels, temperature=0.1):
    from pairproof.fast import supcon_loss
    return supcon_loss(embeddings, labels, temperature=temperature, no_positive="drop")


def supcon(embeddings, labels, temperature=0.1, factor=1.0):
    rows = functional.normalize(embeddings, dim=1)
    diagonal = torch.eye(len(rows), dtype=torch.bool)
    logits = (rows @ rows.T / temperature).masked_fill(diagonal, float("-inf"))
    positives = (labels[:, None] == labels) & ~diagonal
    sums = torch.log_softmax(logits, dim=1).masked_fill(~positives, 0).sum(1)
    return factor * (-sums / positives.sum(1).clamp(min=1)).mean()


def doubled(embeddings, labels, temperature=0.1):
    return supcon(embeddings, labels, temperature, 2.0)


def crashing(embeddings, labels, temperature=0.1):
    if embeddings.shape != (8, 3):
        raise RuntimeError("expected shape [8, 3]")
    return supcon(embeddings, labels, temperature)


def uncallable(embeddings, labels, temperature=0.1):
    raise RuntimeError("always fails")
"""
FEW = '["golden/supcon/temperature-1*"]'

pytestmark = pytest.mark.usefixtures("in_this_process")


@cache
def _cases(losses: tuple[str, ...] = ()) -> dict[Case, GoldenCase | None]:
    return {case: golden for case, golden in _every_case().items() if not losses or case.loss in losses}


@cache
def _every_case() -> dict[Case, GoldenCase | None]:
    return load_cases(load.load_worked())


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project with its own losses; the cases are read once for all tests."""
    _every_case()
    monkeypatch.setattr(run, "load_cases", lambda fixtures, losses=(): _cases(losses))
    monkeypatch.setattr(load, "load_worked", list)
    monkeypatch.delitem(sys.modules, "losses", raising=False)  # that of another test
    pytester.makepyfile(losses=LOSSES)
    pytester.syspathinsert()
    return pytester


Runs = Callable[..., pytest.RunResult]


@pytest.fixture
def runs(project: pytest.Pytester) -> Runs:
    """A function that runs a test file in which a loss is judged on a few cases."""

    def run_tests(target: str, arguments: str, *options: str, body: str = "check()") -> pytest.RunResult:
        project.makepyfile(
            test_own=f"""
            import losses
            import pairproof.conformance

            @pairproof.conformance.parametrize({target}{arguments})
            def test_it(check):
                {body}
            """
        )
        return project.runpytest_inprocess("test_own.py", *options)

    return run_tests


def test_a_right_loss_passes_and_is_counted(runs: Runs) -> None:
    result = runs("losses.supcon", f', loss="supcon", cases={FEW}')
    judged = result.parseoutcomes()["passed"]
    assert judged > 2
    assert set(result.parseoutcomes()) <= {"passed", "skipped"}
    result.stdout.fnmatch_lines(
        [
            "pairproof *: losses:supcon as supcon, * checks",
            f"losses:supcon as supcon: {judged} of * checks judged: {judged} passed*",
            "*call: labels, guessed from the parameters (embeddings, labels, temperature, factor)*",
            "  reading: embeddings = embeddings [[]N, D], labels = class ids [[]N], temperature = temperature",
        ]
    )
    assert result.ret == 0


def test_the_failure_of_a_wrong_loss_shows_case_explanation_and_repeat_command(runs: Runs) -> None:
    result = runs("losses.doubled", f', loss="supcon", cases={FEW}')
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "golden/supcon/temperature-1* float64: failed: *expected *, got *",
            "values are 2 times too large",
            "flags of the case: *",
            "repeat: pytest 'test_own.py::test_it[[]golden/supcon/temperature-1*-float64]'",
            "  for the reasons that failures have in common: pairproof check losses:doubled --loss supcon --case *",
        ]
    )
    # Other programs cannot import the module of a test.
    result = runs("lambda *given: 2 * losses.supcon(*given)", f', loss="supcon", cases={FEW}')
    assert result.parseoutcomes()["failed"] > 1
    assert "in common" not in result.stdout.str()


def test_only_the_first_failures_are_explained(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "EXPLAINED", 1)
    output = runs("losses.doubled", f', loss="supcon", cases={FEW}', "-rN").stdout.str()
    failed = output.count("failed: loss: expected")
    assert failed > 1
    assert output.count("values are 2 times too large") == 1
    assert (
        output.count("only the first 1 failures of a run are explained; to explain this one, run it alone")
        == failed - 1
    )


def test_an_exception_is_reported_as_errored(runs: Runs) -> None:
    result = runs("losses.crashing", f', loss="supcon", cases={FEW}')
    result.stdout.fnmatch_lines(["*float64: errored: RuntimeError: expected shape [[]8, 3]"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_a_target_that_cannot_be_called_is_one_error_of_collection(runs: Runs) -> None:
    result = runs("losses.uncallable", f', loss="supcon", cases={FEW}')
    assert result.parseoutcomes() == {"errors": 1}
    result.stdout.fnmatch_lines(["pairproof: losses:uncallable as supcon: called with labels *RuntimeError: always*"])


EXTREME = '["golden/supcon/temperature-1", "golden/supcon/tiny-norms-float64"]'


@pytest.mark.parametrize(
    ("argument", "options", "required"),
    [
        ("", [], False),
        ("", ["--pairproof-level=range"], True),
        (', level="range"', [], True),
        (', level="formula"', ["--pairproof-level=range"], False),
    ],
)
def test_a_failure_above_the_level_is_skipped(
    runs: Runs, argument: str, options: list[str], required: bool, tmp_path: Path
) -> None:
    path, level = tmp_path / "report.xml", "formula" if argument and not required else "policies"
    arguments = f', loss="supcon", cases={EXTREME}, dtypes="float64", checks=2{argument}'
    result = runs("losses.supcon", arguments, f"--junit-xml={path}", *options)
    assert result.parseoutcomes() == {"passed": 1, "failed" if required else "skipped": 1}
    ends = "1 failed, 1 passed" if required else f"1 failed above {level}, 1 passed"
    result.stdout.fnmatch_lines([f"losses:supcon as supcon: 2 of 2 checks judged: {ends}"])
    assert (result.ret == 0) is not required
    assert (f"failed at the level range, above {level}: loss: expected" in path.read_text()) is not required


def test_an_unknown_level_is_refused(runs: Runs) -> None:
    for argument, option in ((', level="hard"', "-q"), ("", "--pairproof-level=hard")):
        result = runs("losses.supcon", f', loss="supcon", cases={FEW}{argument}', option)
        assert "pairproof: unknown level 'hard'; known: formula, policies, range, digits" in result.stdout.str()
        assert result.ret == pytest.ExitCode.INTERRUPTED


def test_a_test_can_pass_the_target_to_check(runs: Runs) -> None:
    result = runs("", f'loss="supcon", cases={FEW}', body="check(losses.supcon)")
    result.stdout.fnmatch_lines(["losses:supcon as supcon: * checks judged: *"])
    assert result.ret == 0
    without = runs("", f'loss="supcon", cases={FEW}')
    without.stdout.fnmatch_lines(["no target: check(MyLoss), or --pairproof-target=*"])
    assert without.ret == pytest.ExitCode.TESTS_FAILED


def test_a_test_that_does_not_call_check_fails(runs: Runs) -> None:
    result = runs("losses.supcon", f', loss="supcon", cases={FEW}', body="assert check is not None")
    result.stdout.fnmatch_lines(["the test did not call check(), so nothing was judged"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_the_number_of_checks_is_asserted(runs: Runs) -> None:
    judged = runs("losses.supcon", f', loss="supcon", cases={FEW}').parseoutcomes()["passed"]
    exact = runs("losses.supcon", f', loss="supcon", cases={FEW}, checks={judged}')
    assert exact.ret == 0
    other = runs("losses.supcon", f', loss="supcon", cases={FEW}, checks={judged + 1}')
    other.stdout.fnmatch_lines([f"ERROR *: {judged} checks were judged, expected {judged + 1}"])
    assert other.ret == pytest.ExitCode.TESTS_FAILED
    filtered = runs("losses.supcon", f', loss="supcon", cases={FEW}, checks={judged + 1}', "-k", "float64")
    filtered.stdout.fnmatch_lines(["*did not run: counts are not asserted"])
    assert filtered.ret == 0


def test_a_run_without_judged_checks_fails(runs: Runs) -> None:
    result = runs("losses.supcon", ', loss="supcon", cases=["golden/supcon/refs-shape-*"]')
    result.stdout.fnmatch_lines(["ERROR losses:supcon as supcon: none of its checks could be judged"])
    assert set(result.parseoutcomes()) == {"skipped"}
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def declared(project: pytest.Pytester, *entries: str) -> None:
    text = "\n".join(f"[[tool.pairproof.deviations]]\n{entry}" for entry in entries)
    (project.path / "pyproject.toml").write_text(text)


REASON = 'reason = "it is doubled"\nlink = "https://example.org/7"'


def test_a_declared_deviation_must_be_found(runs: Runs, project: pytest.Pytester) -> None:
    case = "golden/supcon/temperature-1"
    assert case in {one.id for one in _cases()}
    declared(project, f'case = "{case}"\n{REASON}')
    wrong = runs("losses.doubled", f', loss="supcon", cases=["{case}"]', "-rx")
    assert set(wrong.parseoutcomes()) == {"xfailed"}
    wrong.stdout.fnmatch_lines(["XFAIL *Declared: it is doubled (https://example.org/7)*"])
    assert wrong.ret == 0
    right = runs("losses.supcon", f', loss="supcon", cases=["{case}"]')
    right.stdout.fnmatch_lines(["*declared to deviate (pyproject.toml, tool.pairproof.deviations 1) but conforms*"])
    assert "straightforward" not in right.stdout.str()
    assert right.ret == pytest.ExitCode.TESTS_FAILED


MARKS = {
    "mark": """
        import pytest
        def pytest_collection_modifyitems(items):
            for item in items:
                item.add_marker(pytest.mark.xfail)
        """,
    "fixture": """
        import pytest
        @pytest.fixture(autouse=True)
        def excuse(request):
            request.node.add_marker(pytest.mark.xfail(reason="later"))
        """,
    "hook": """
        import pytest
        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_makereport(item, call):
            report = yield
            report.outcome = "passed"
            return report
        """,
}


@pytest.mark.parametrize("way", MARKS)
@pytest.mark.quick(1)
def test_wrong_results_that_do_not_fail_their_tests_are_counted(runs: Runs, project: pytest.Pytester, way: str) -> None:
    project.makeconftest(MARKS[way])
    result = runs("losses.doubled", f', loss="supcon", cases={FEW}, level="digits"')
    outcomes = {"passed": 10} if way == "hook" else {"xfailed": 6, "skipped": 4}
    assert result.parseoutcomes() == outcomes
    lines = [
        "losses:doubled as supcon: 6 of 10 checks judged: 6 failed, 4 skipped",
        "  6 undeclared failures did not fail their tests, because of marks or hooks",
    ]
    header = "expected to fail, by xfail marks: 10 of 10 checks"
    result.stdout.fnmatch_lines([header, *lines] if way == "mark" else lines)
    assert (header in result.stdout.str()) == (way == "mark")
    assert (
        "did not fail"
        not in runs("losses.doubled", f', loss="supcon", cases={FEW}, level="digits"', "--noconftest").stdout.str()
    )


def test_a_run_of_declared_deviations_counts_none_as_undeclared(runs: Runs, project: pytest.Pytester) -> None:
    declared(project, f'case = "golden/supcon/temperature-1"\n{REASON}')
    result = runs("losses.doubled", ', loss="supcon", cases=["golden/supcon/temperature-1"]')
    assert "expected to fail" not in result.stdout.str()
    assert "did not fail" not in result.stdout.str()
    assert result.ret == 0


def test_a_declaration_that_matches_no_check_is_an_error(
    runs: Runs, project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fewer(fixtures: object, losses: tuple[str, ...] = ()) -> dict[Case, GoldenCase | None]:
        """The whole suite of the loss consists of these cases."""
        words = ("tiny-norms", "lonely-nan", "temperature")
        kept = (case for case in _cases(losses) if case.loss != "supcon_epsilon" or any(w in case.id for w in words))
        return {case: _cases()[case] for case in kept}

    monkeypatch.setattr(run, "load_cases", fewer)
    monkeypatch.setattr(judging, "EXPLAINED", 0)
    declared(
        project,
        f'case = "golden/supcon_epsilon/lonely-nan-drop-by-anchors"\n{REASON}',
        f'flag = "tiny-norms"\nloss = "nt_xent"\n{REASON}',
        # This run judges neither of these.
        f'case = "golden/nt_xent/temperature-1"\n{REASON}',
        f'flag = "tiny-norms"\nloss = "supcon_epsilon"\ndtype = "float16"\n{REASON}',
    )
    arguments = ', loss="supcon_epsilon", settings={"similarity": "cosine"}, fuzz=0'
    error = "ERROR pyproject.toml, tool.pairproof.deviations 1: matches no check of losses:crashing as supcon_epsilon"
    whole = runs("losses.crashing", arguments)
    assert [line for line in whole.outlines if line.startswith("ERROR")] == [f"{error}: remove it"]
    some = runs("losses.crashing", arguments, "-k", "temperature")
    assert not [line for line in some.outlines if line.startswith("ERROR")]


def test_pyargs_runs_the_checks_without_a_test_file(project: pytest.Pytester) -> None:
    options = ["--pyargs", "pairproof.conformance", "--pairproof-target=losses:supcon", "--pairproof-loss=supcon"]
    options += ["--pairproof-case=golden/supcon/temperature-1*", "--import-mode=importlib"]
    result = project.runpytest_inprocess(*options)
    judged = result.parseoutcomes()["passed"]
    result.stdout.fnmatch_lines(["pairproof *: losses:supcon as supcon", f"losses:supcon as supcon: {judged} of *"])
    assert result.ret == 0


@pytest.mark.parametrize(
    ("asserted", "processes"), [(2, 1), *(pytest.param(count, 2, marks=pytest.mark.slow) for count in (2, 3))]
)
@pytest.mark.slow
def test_the_results_of_all_processes_are_counted_together(
    project: pytest.Pytester, asserted: int, processes: int
) -> None:
    options = ["--pyargs", "pairproof.conformance", "--pairproof-target=losses:supcon", "--pairproof-loss=supcon"]
    options += ["--pairproof-case=golden/supcon/temperature-1*", "--pairproof-dtype=float64", "-n", str(processes)]
    shared = project.runpytest_inprocess(*options, "--import-mode=importlib", f"--pairproof-checks={asserted}")
    output = shared.stdout.str()
    assert "losses:supcon as supcon: 3 of 5 checks judged" in output
    assert ("3 checks were judged, expected 2" in output) == (asserted == 2)
    assert shared.ret == (asserted == 2)


def test_each_mark_and_parameter_has_its_own_counts(runs: Runs, project: pytest.Pytester) -> None:
    """Two marks and a parameter with two values give four groups of checks; each group is counted separately."""
    project.makepyfile(
        test_twice=f"""
        import losses
        import pytest
        import pairproof.conformance

        CASE = "golden/supcon/temperature-1"

        @pytest.mark.parametrize("again", [1, 2])
        @pairproof.conformance.parametrize(losses.supcon, loss="supcon", cases={FEW}, dtypes="float64", checks=3)
        @pairproof.conformance.parametrize(losses.supcon, loss="supcon", cases=f"{{CASE}}*", dtypes="float64", checks=4)
        def test_it(check, again):
            check()
        """
    )
    result = project.runpytest_inprocess("test_twice.py")
    text = result.stdout.str()
    assert "did not run" not in text
    assert text.count("losses:supcon as supcon: 3 of 5 checks judged") == 4
    assert text.count("ERROR losses:supcon as supcon: 3 checks were judged, expected 4") == 1
    assert result.ret == pytest.ExitCode.TESTS_FAILED


@pytest.mark.slow
def test_a_declaration_can_be_matched_by_another_test_of_the_target(runs: Runs, project: pytest.Pytester) -> None:
    declared(project, f'flag = "tiny-norms"\nloss = "supcon_epsilon"\n{REASON}')
    project.makepyfile(
        test_two="""
        import losses
        import pairproof.conformance

        OPTIONS = {"loss": "supcon_epsilon", "fuzz": 0}

        @pairproof.conformance.parametrize(losses.crashing, settings={"similarity": "cosine"}, **OPTIONS)
        def test_one(check):
            check()

        @pairproof.conformance.parametrize(losses.crashing, settings={"reduction": "sum"}, **OPTIONS)
        def test_other(check):
            check()
        """
    )
    flags = {flag for golden in _cases().values() if golden for flag in golden.flags if "epsilon" in golden.id}
    assert "tiny-norms" in flags
    assert not [line for line in project.runpytest_inprocess("test_two.py").outlines if line.startswith("ERROR")]


def test_an_option_that_no_test_uses_is_an_error(runs: Runs) -> None:
    result = runs("losses.supcon", f', loss="supcon", cases={FEW}', "--pairproof-checks=3")
    result.stdout.fnmatch_lines(["ERROR --pairproof-checks: no test used it*"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_the_command_line_keeps_the_other_arguments_of_a_mark(runs: Runs) -> None:
    result = runs("", f'loss="supcon", cases={FEW}', "--pairproof-target=losses:supcon", "--pairproof-dtype=float64")
    result.stdout.fnmatch_lines(["losses:supcon as supcon: 3 of 5 checks judged: *"])
    assert result.ret == 0


def test_declarations_for_another_target_are_reported(runs: Runs, project: pytest.Pytester) -> None:
    declared(project, f'flag = "tiny-norms"\ntarget = "losses:sucpon"\n{REASON}')
    result = runs("losses.supcon", f', loss="supcon", cases={FEW}')
    result.stdout.fnmatch_lines(
        ["declaration not used, because losses:sucpon was not judged in this run: pyproject.toml, *"]
    )
    assert result.ret == 0


def test_an_unavailable_device_fails_its_tests(runs: Runs) -> None:
    result = runs("losses.supcon", f', loss="supcon", cases={FEW}, device="nowhere"')
    result.stdout.fnmatch_lines(["losses:supcon cannot be judged: device 'nowhere' cannot be used: *"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_a_target_that_no_call_fits_is_one_error_at_collection(runs: Runs) -> None:
    target = "lambda outputs, epoch, temperature: outputs['embeddings']"
    result = runs(target, f', loss="supcon", cases={FEW}')
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        [
            "*pairproof: *<lambda> as supcon: called with labels on a small batch, it fails: *",
            "    def adapted_target(embeddings, labels, temperature):",
        ]
    )


@pytest.mark.parametrize("named", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_command_is_started_once_and_terminated(runs: Runs, monkeypatch: pytest.MonkeyPatch, named: bool) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Watched(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            started.append(self)

    monkeypatch.setattr(lines.subprocess, "Popen", Watched)
    command = f"{sys.executable} {Path(__file__).parent / 'targets' / 'command.py'} right"
    arguments = f', loss="supcon", call="command", cases={FEW}'
    # The same text, as a new object in each test.
    body = "check()" if named else f"check(' '.join({command.split()}))"
    result = runs(repr(command) if named else "None", arguments, body=body)
    assert result.parseoutcomes().get("passed", 0) > 2
    assert result.ret == 0
    assert [process.poll() is not None for process in started] == [True]


@pytest.mark.parametrize("options", [[], pytest.param(["-n", "2"], marks=pytest.mark.slow)])
def test_checks_that_no_test_calls_are_reported(
    runs: Runs, project: pytest.Pytester, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three causes: the test skips, a fixture skips, or the checks are split between two targets."""
    project.makeconftest("import pytest\n@pytest.fixture\ndef skips():\n    pytest.skip('by the fixture')")
    arguments = f', loss="supcon", cases={FEW}, checks=999'
    skips = runs("losses.supcon", arguments, *options, body="import pytest; pytest.skip('by the test')")
    assert skips.ret == pytest.ExitCode.TESTS_FAILED
    skips.stdout.fnmatch_lines(
        [
            "losses:supcon as supcon: * tests ended before their check",
            "ERROR losses:supcon as supcon: none of its checks was judged",
            "ERROR losses:supcon as supcon: 0 checks were judged, expected 999",
        ]
    )
    source = Path("test_own.py").read_text().replace("(check)", "(check, skips)")
    project.makepyfile(test_own=source)
    result = project.runpytest_inprocess("test_own.py", *options)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["ERROR losses:supcon as supcon: none of its checks was judged"])
    split = "check(losses.supcon if check.dtype == 'float64' else losses.per)"
    project.makepyfile(
        losses=LOSSES + "\n\nper = lambda embeddings, labels, temperature=0.1: supcon(embeddings, labels, temperature)"
    )
    both = runs("None", arguments, *options, body=split)
    assert both.ret == pytest.ExitCode.TESTS_FAILED
    (line,) = [line for line in both.outlines if line.startswith("ERROR")]
    assert line.endswith("checks were judged, expected 999")
    assert "losses:supcon as supcon" in line


def test_a_target_that_no_test_uses_is_an_error(project: pytest.Pytester) -> None:
    project.makepyfile(test_other="def test_other():\n    pass")
    options = ["--pairproof-target=losses:nobody", "--pairproof-loss=supkon"]
    result = project.runpytest_inprocess("test_other.py", *options)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["ERROR --pairproof-target: no test used it; to run the checks: pytest --pyargs *"])
    assert project.runpytest_inprocess("test_other.py", "--collect-only", *options).ret == 0


def test_a_command_without_gradients_is_reported(runs: Runs) -> None:
    command = f"{sys.executable} {Path(__file__).parent / 'targets' / 'command.py'} values"
    result = runs(repr(command), f', loss="supcon", call="command", cases={FEW}')
    assert result.ret == 0
    result.stdout.fnmatch_lines(["  gradients were not judged: the target returns none"])


def test_a_pattern_that_matches_no_case_is_an_error(runs: Runs) -> None:
    result = runs(
        "losses.supcon", ', loss="supcon", cases=["golden/supcon/temperature-1*", "golden/supcon/temprature"]'
    )
    assert "no case of supcon matches golden/supcon/temprature" in result.stdout.str()
    assert result.ret == pytest.ExitCode.INTERRUPTED


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "--pairproof-target is missing"),
        (["--pairproof-target=losses:supcon"], "--pairproof-loss is missing"),
        (["--pairproof-target=losses:supcon", "--pairproof-loss=subcon"], "unknown loss 'subcon'"),
        (
            ["--pairproof-target=losses:supcon", "--pairproof-loss=supcon", "--pairproof-case=nothing"],
            "no case of supcon matches nothing",
        ),
        (
            ["--pairproof-target=losses:supcon", "--pairproof-loss=supcon", "--pairproof-set=x"],
            "expected KEY=VALUE, got 'x'",
        ),
        (
            ["--pairproof-target=losses:supcon", "--pairproof-loss=supcon", "--pairproof-deviations=none.toml"],
            "none.toml: cannot be read",
        ),
    ],
)
@pytest.mark.quick(3)
def test_wrong_options_are_reported(project: pytest.Pytester, options: list[str], words: str) -> None:
    result = project.runpytest_inprocess("--pyargs", "pairproof.conformance", "--import-mode=importlib", *options)
    assert words in result.stdout.str() + result.stderr.str()
    assert result.ret in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERRUPTED)


def test_an_unknown_target_is_reported(project: pytest.Pytester) -> None:
    options = ["--pairproof-target=losses:nobody", "--pairproof-loss=supcon", "--pairproof-case=*temperature-1"]
    result = project.runpytest_inprocess("--pyargs", "pairproof.conformance", "--import-mode=importlib", *options)
    result.stdout.fnmatch_lines(["losses:nobody cannot be judged: losses has no attribute 'nobody'"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


OTHERS = "[tool.other]\na = 1\n[project]\nname = 'b'\n"
ENTRY = 'case = "golden/supcon/temperature-1"\n' + REASON


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("pyproject.toml", "[tool.pairproof]\nchecks = 3", "tool.pairproof.checks: unknown"),
        ("pyproject.toml", "[tool]\npairproof = 3", "expected a table"),
        ("pyproject.toml", "tool = 3", "tool: expected a table"),
        ("own.toml", "deviations = 3", "expected a list of tables"),
        ("own.toml", "[[deviations]]\n" + REASON, "own.toml, deviations 1: expected either case"),
        ("own.toml", f'[[deviations]]\nflag = "x"\n{ENTRY}', "expected either case (one or more ids) or flag"),
        ("own.toml", '[[deviations]]\ncase = "x"\nlink = "y"', "reason is missing"),
        ("own.toml", '[[deviations]]\ncase = "x"\nreason = "y"', "link is missing"),
        ("own.toml", "[[deviations]]\ncase = []\n" + REASON, "case: expected a text or a list of texts"),
        ("own.toml", "[[deviations]]\nwhy = 1\n" + ENTRY, "why: unknown; known"),
        ("own.toml", "[[deviations]]\nloss = 1\n" + ENTRY, "loss: expected a text, got 1"),
        ("own.toml", "[[deviations", "is not valid TOML"),
        ("own.toml", "[tool.other]\na = 1", "own.toml: tool: unknown; known: deviations"),
        ("own.toml", f"[[deviations]]\n{ENTRY}\n[[tool.pairproof.deviations]]\n{ENTRY}", "got both"),
        ("pyproject.toml", f"[[deviations]]\n{ENTRY}\n[tool.pairproof]", "got both"),
    ],
)
def test_a_malformed_declaration_is_an_error(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DeclarationError) as caught:
        read_declarations(path)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "table", "more"),
    [
        ("own.toml", "deviations", ""),
        *(
            (name, "tool.pairproof.deviations", more)
            for name in ("pyproject.toml", "own.toml")
            for more in ("", OTHERS)
        ),
        *(("pyproject.toml", "deviations", more) for more in ("", OTHERS)),
    ],
)
def test_declarations_are_read_from_both_tables(tmp_path: Path, name: str, table: str, more: str) -> None:
    path = tmp_path / name
    path.write_text(f"{more}[[{table}]]\n{ENTRY}\n[[{table}]]\n{ENTRY}")
    assert list(read_declarations(path)) == [f"{name}, {table} 1", f"{name}, {table} 2"]
    assert project_file(tmp_path) == (path if name == "pyproject.toml" else None)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (
            f'case = "golden/supcon/temperature-11111"\n{REASON}',
            "unknown case 'golden/supcon/temperature-11111'; meant",
        ),
        (f'flag = "tiny-norm"\n{REASON}', "unknown flag 'tiny-norm'; meant tiny-norms?"),
        (f'flag = "tiny-norms"\nloss = "sup"\n{REASON}', "unknown loss 'sup'"),
        (f'flag = "tiny-norms"\ndtype = "float31"\n{REASON}', "unknown dtype 'float31'"),
        (f'case = "usage/zero-rows"\n{REASON}', "unknown case 'usage/zero-rows'; meant usage/zero-row?"),
    ],
)
def test_a_declaration_with_an_unknown_name_is_an_error(
    runs: Runs, project: pytest.Pytester, entry: str, words: str
) -> None:
    declared(project, entry)
    result = runs("losses.supcon", f', loss="supcon", cases={FEW}')
    assert words in result.stdout.str()
    assert result.ret == pytest.ExitCode.INTERRUPTED  # no test ran


def test_option_that_explains_a_failure_is_named_as_parametrize_takes_it(runs: Runs) -> None:
    result = runs("losses.dropping", ', loss="supcon", cases=["golden/supcon/lonely-*"]')
    assert "(if intended: settings={'no_positive': 'drop'})" in " ".join(result.stdout.str().split())


@pytest.mark.slow
def test_collection_imports_neither_scipy_nor_jsonschema(pytester: pytest.Pytester) -> None:
    """To collect fast, the plugin loads only the cases of the tested loss, and no module that is slow to import."""
    pytester.makepyfile(
        """
        import pairproof.conformance

        @pairproof.conformance.parametrize("losses:supcon", loss="supcon", dtypes="float64")
        def test_it(check):
            check()
        """
    )
    pytester.makeconftest(
        """
        import sys

        def pytest_collection_finish(session):
            inputs = [item.callspec.params["check"].inputs for item in session.items]
            cases = {one.loss for one in inputs if hasattr(one, "loss")}
            loaded = {"scipy.special", "scipy.spatial", "jsonschema", "hypothesis", "rich"} & set(sys.modules)
            print("collected cases of", *sorted(cases), "with", *sorted(loaded))
        """
    )
    result = pytester.runpytest_subprocess("--collect-only", "-q", "-s", "-p", "no:hypothesispytest")
    result.stdout.fnmatch_lines(["collected cases of supcon with"])


LOADED = ("", "._moved", ".judge", ".judge.options", ".judge.results", ".pytest_plugin", ".suite", ".suite.levels")
PRINT_MODULES = """
import sys

def pytest_unconfigure():
    heavy = {"flint", "numpy", "rich", "scipy", "torch", "typer"} & set(sys.modules)
    print("heavy:", sorted(heavy), *sorted(name for name in sys.modules if name.startswith("pairproof.conformance")))
"""


@pytest.mark.parametrize("options", [[], ["--help"]])
def test_a_run_without_checks_imports_only_the_plugin_and_its_options(tmp_path: Path, options: list[str]) -> None:
    """pytest loads the plugin in every project where pairproof is installed."""
    (tmp_path / "conftest.py").write_text(PRINT_MODULES)
    (tmp_path / "test_other.py").write_text("def test_other():\n    pass")
    command = [sys.executable, "-m", "pytest", "-p", "no:hypothesispytest", "-q", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert f"heavy: [] {' '.join(f'pairproof.conformance{name}' for name in LOADED)}\n" in done.stdout


@pytest.mark.usefixtures("own_process")
def test_usages_and_side_effects_are_judged(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    result = runs('"targets.usages:wrong_in_bfloat16"', ', loss="supcon", cases="usage/*float16"')
    result.assert_outcomes(failed=1, passed=2)
    assert any("failed: rows of bfloat16: loss: expected" in line for line in result.outlines)
    result = runs('"targets.usages:draws_from_numpy"', f', loss="supcon", cases={FEW}, dtypes="float64"')
    assert any("failed: it changes the state of numpy's global random generator" in line for line in result.outlines)
