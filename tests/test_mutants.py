"""Tests of tools/mutants.py: which mutants it makes, what kills them, and whether the recorded run is consistent."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tools import mutants as tool

ROOT = Path(__file__).resolve().parent.parent


SAMPLE = """from __future__ import annotations
Either = int | str
def f(x: int | None = 1 + 2, *, name: str = "é") -> int | None:
    y: float | int = x ^ 4
    if name == "a" or y == 3:
        raise ValueError(f"{x + 1} of {y}")
    while (
        x is None
    ):
        break
    return {"é": x - 1}
@cache
def g(*, y):
    return y
TWO = 2
"""


def mutant_at(file: str, text: str, operator: str) -> Any:
    """The first mutant of a line by an operator."""
    return next(one for one in tool.mutants(file) if one.text == text and one.operator == operator)


def verdict(mutant: Any, outcome: str, check: str = "") -> Any:
    return tool.Verdict(mutant.file, mutant.line, mutant.id, mutant.change(), outcome, check, 0.1, "code")


# Making mutants.


def test_mutants_are_made_of_code_and_store_the_lines_of_their_statement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sample.py").write_text(SAMPLE, encoding="utf-8")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    found: dict[tuple[int, str], set[str]] = {}
    for one in tool.mutants("sample.py"):
        found.setdefault((one.line, str(one.lines)), set()).add(one.operator.rpartition("_")[0] or one.operator)
    assert found == {
        (3, "range(3, 13)"): {"ReplaceBinaryOperator_Add", "NumberReplacer"},
        (4, "range(4, 5)"): {"ReplaceBinaryOperator_BitXor", "NumberReplacer"},
        (5, "range(5, 6)"): {"AddNot", "NumberReplacer", "ReplaceComparisonOperator_Eq", "ReplaceOrWithAnd"},
        (8, "range(7, 10)"): {"ReplaceComparisonOperator_Is"},
        (7, "range(7, 10)"): {"AddNot"},
        (10, "range(10, 11)"): {"ReplaceBreakWithContinue"},
        (11, "range(11, 12)"): {"ReplaceBinaryOperator_Sub", "NumberReplacer"},
        (12, "range(13, 16)"): {"RemoveDecorator"},
        (15, "range(0, 0)"): {"NumberReplacer"},
    }
    order = [one.operator for one in tool.mutants("sample.py") if one.line == 5 and "Eq" in one.operator]
    assert sorted(order) == [
        f"ReplaceComparisonOperator_Eq_{to}" for to in ("Gt", "GtE", "Lt", "LtE", "NotEq", "NotEq")
    ]


@pytest.mark.parametrize(
    ("files", "number"),
    [
        (["reference/terms.py", "fast/engine/formulas.py"], 200),
        pytest.param(tool.files(), 4000, marks=pytest.mark.slow, id="all"),
    ],
)
def test_mutants_have_unique_ids_and_change_one_line(files: list[str], number: int) -> None:
    names = [one.id for file in files for one in tool.mutants(file)]
    assert len(names) == len(set(names)) > number
    for one in tool.draw(files, 8):
        compile(one.source(), one.file, "exec")
        before, _, after = one.change().removeprefix(f"{one.file}: ").partition(" becomes ")
        assert before == one.text != after


def test_an_id_depends_only_on_the_line_file_operator_and_turn() -> None:
    made = tool.Mutant("fast/supcon.py", "AddNot", 3, 40, "if a:", 0, range(40, 41))
    assert made.id == "e1cf5b5113"
    assert dataclasses.replace(made, occurrence=5, line=90, lines=range(90, 92)).id == made.id
    for other in ({"file": "fast/nt_xent.py"}, {"operator": "NumberReplacer"}, {"text": "if b:"}, {"turn": 1}):
        assert dataclasses.replace(made, **other).id != made.id


def test_a_longer_draw_contains_a_shorter_one() -> None:
    names = tool.files()
    assert {"reference/supcon.py", "fast/supcon.py", "fast/engine/exact.py", "fast/engine/__init__.py"} <= set(names)
    assert not [name for name in names if "kernels" in name or name.endswith(("modules.py", "views.py"))]
    some = ["reference/terms.py", "fast/engine/formulas.py"]
    drawn = tool.draw(some, 150)
    assert drawn == tool.draw(some, 200)[:150]
    assert len({one.id for one in drawn}) == 150
    assert set(tool.draw(["fast/engine/formulas.py"], 10**6)) == set(tool.mutants("fast/engine/formulas.py"))


# Judging them.


@pytest.fixture(scope="session")
def reference_judge() -> Any:
    judge = tool.Judge("reference", lambda name: "/two-rows" in name or name == "golden/errors/temperature-zero/supcon")
    judge.survey()
    return judge


@pytest.fixture(scope="session")
def fast_judge() -> Any:
    judge = tool.Judge("fast", lambda name: name in ("golden/supcon/two-rows", "golden/supcon/large-256-by-64"))
    judge.survey()
    return judge


def test_survey_of_some_files_records_their_lines_alone(reference_judge: Any) -> None:
    judge = tool.Judge("reference", lambda name: "/two-rows" in name or name == "golden/errors/temperature-zero/supcon")
    judge.survey(["reference/terms.py"])
    assert judge.hits == {
        place: hits for place, hits in reference_judge.hits.items() if place[0] == "reference/terms.py"
    }
    assert len(judge.hits) > 20


VALUE = "value=(top - s[p]) + log_rest,"


def test_a_wrong_value_is_killed_by_a_case(reference_judge: Any) -> None:
    mutant = mutant_at("reference/terms.py", VALUE, "ReplaceBinaryOperator_Sub_Add")
    assert 0 < len(reference_judge.order(mutant)) < len(reference_judge.checks)
    found = tool.judge_one(reference_judge, mutant)
    assert found.outcome == "killed"
    assert found.check.startswith("golden/")
    assert "times the bound" in found.check or "rounding" in found.check


def test_a_missing_validation_is_killed_by_an_error_case(reference_judge: Any) -> None:
    text = "if not (math.isfinite(number) and number > 0):"
    mutant = mutant_at("reference/checks.py", text, "ReplaceComparisonOperator_Gt_GtE")
    found = tool.judge_one(reference_judge, mutant)
    assert found.check == (
        "golden/errors/temperature-zero/supcon reference: expected temperature: ... positive, 0.0,"
        " got temperature: expected a number in the range 1e-10 to 1e+10, got 0.0"
    )


def test_an_equivalent_mutant_survives(reference_judge: Any) -> None:
    mutant = mutant_at("reference/scalars.py", "if order(x) > 0:", "ReplaceComparisonOperator_Gt_GtE")
    found = tool.judge_one(reference_judge, mutant)
    assert (found.outcome, found.check) == ("survived", f"{len(reference_judge.order(mutant))} checks")
    assert len(reference_judge.order(mutant)) >= 10


@pytest.mark.parametrize(
    ("planted", "check"),
    [
        ("import nothing_of_this_name\n", "import: ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("import os\nos._exit(3)\n", "exit status 768"),
        ("while True:\n    pass\n", "time limit"),
    ],
)
def test_code_that_does_not_run_is_killed(
    reference_judge: Any, planted: str, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant = mutant_at("reference/terms.py", VALUE, "ReplaceBinaryOperator_Add_Sub")
    text = mutant.source().replace("import numpy as np\n", f"import numpy as np\n{planted}")
    monkeypatch.setattr(tool, "PATIENCE", 0.5)
    monkeypatch.setattr(tool.Mutant, "source", lambda _: text)
    found = tool.judge_one(reference_judge, mutant)
    assert (found.outcome, found.check) == ("killed", check)


@pytest.mark.slow
def test_mutants_are_judged_with_some_cases_only(capsys: pytest.CaptureFixture[str]) -> None:
    mutant = mutant_at("reference/terms.py", VALUE, "ReplaceBinaryOperator_Sub_Add")
    assert tool.main(["--id", mutant.id, "--case", "golden/supcon/two-rows"]) == 0
    printed = capsys.readouterr().out
    assert "reference: 3 checks, 1 mutants" in printed
    assert f"killed: {mutant.id}" in printed
    assert "golden/supcon/two-rows" in printed
    with pytest.raises(SystemExit):
        tool.main(["--case", "*", "--resume", "verdicts"])


def test_an_error_of_the_tool_is_not_a_killed_mutant(reference_judge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "_outcome", lambda *_: sys.exit("broken"))
    with pytest.raises(RuntimeError, match="without an answer"):
        tool.judge_one(reference_judge, tool.mutants("reference/terms.py")[0])


@pytest.mark.slow
def test_a_process_that_waits_is_an_error(reference_judge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(*_: Any) -> NoReturn:
        tool._limit(10)
        signal.pause()
        raise AssertionError

    monkeypatch.setattr(tool, "STUCK", 1)
    monkeypatch.setattr(tool, "_outcome", waits)
    with pytest.raises(RuntimeError, match="the process waited for 1 s"):
        tool.judge_one(reference_judge, tool.mutants("reference/terms.py")[0])


def test_cases_with_too_many_rows_and_columns_are_left_out(fast_judge: Any) -> None:
    assert {check.name.split()[0] for check in fast_judge.checks} == {"golden/supcon/two-rows"}
    large = [tool.Judge(package, lambda name: name == "golden/supcon/shape-257-by-3") for package in tool.PACKAGES]
    assert [bool(judge.checks) for judge in large] == [False, True]


@pytest.mark.parametrize(
    ("file", "function", "names"),
    [
        ("fast/engine/scaling.py", "scale_rows", ("fast", "fast-dense", "fast-tiled")),
        ("fast/engine/exact.py", "_logits", ("fast-exact",)),
    ],
)
def test_every_check_of_fast_runs_the_mutated_code(
    fast_judge: Any, file: str, function: str, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = f"def {function}(*_, **__):\n    raise RuntimeError('planted')\n\ndef unused("
    planted = tool.source(file).replace(f"def {function}(", planted)
    monkeypatch.setattr(tool.Mutant, "source", lambda _: planted)
    mutant = dataclasses.replace(tool.mutants(file)[0], lines=range(0))
    checks = [check for check in fast_judge.checks if check.name.split()[1] in names]
    assert {check.name.split()[2] for check in checks} == {*tool.golden.DTYPES, "derivatives"}

    def every_failure(_: Any, mutant: Any) -> tuple[str, str]:
        loaded = tool.load_mutated(mutant)
        return "killed", "\n".join(f"{check.name}: {check.failure(loaded)}" for check in checks)

    monkeypatch.setattr(tool, "_outcome", every_failure)
    found = tool.judge_one(fast_judge, mutant).check
    assert found.splitlines() == [f"{check.name}: RuntimeError: planted" for check in checks]


# Results.


@pytest.mark.slow
def test_every_survivor_of_the_stored_run_is_explained() -> None:
    assert tool.problems(tool.stored(tool.RESULTS), tool.explanations()) == []


def test_the_stored_run_is_large_enough_and_its_report_is_current() -> None:
    verdicts, explained = tool.stored(tool.RESULTS), tool.explanations()
    assert len({one.id for one in verdicts}) == len(verdicts) == tool.COUNT
    assert {one.outcome for one in verdicts} == {"killed", "survived", "unreached"}
    assert {one.id for one in verdicts if one.outcome == "survived"} <= explained.keys()
    assert tool.score(verdicts, explained)[-1] >= tool.GOAL
    assert tool.REPORT.read_text(encoding="utf-8") == tool.report(verdicts, explained)


def test_problems_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "files", lambda: ["fast/engine/formulas.py"])
    alive, dead, *_ = tool.mutants("fast/engine/formulas.py")
    verdicts = [verdict(alive, "survived"), verdict(dead, "killed", "golden/supcon/x fast float64")]
    low, unexplained = tool.problems(verdicts, {})
    assert low == "50.0% of the mistakes are killed, expected at least 95%"
    assert unexplained.startswith(f"{alive.id} survives without an explanation: line {alive.line} of fast/engine/")
    right = {alive.id: ("range", alive.change())}
    assert tool.problems(verdicts, right) == [low]
    for wrong, message in (
        ({alive.id: ("range", "?")}, f"{alive.id} is explained but is not a mutant: ?"),
        ({"0123456789": ("range", "?")}, "0123456789 is explained but is not a mutant: ?"),
        ({dead.id: ("range", dead.change())}, f"{dead.id} is explained but was killed (golden/supcon/x fast float64)"),
    ):
        assert tool.problems(verdicts, right | wrong)[1].startswith(message)


def test_the_score_leaves_out_harmless_and_unreached_mutants() -> None:
    made = tool.mutants("fast/engine/formulas.py")[:7]
    outcomes = ["killed", "killed", "survived", "survived", "survived", "unreached", "killed"]
    explained = {made[2].id: ("equivalent", ""), made[3].id: ("range", ""), made[5].id: ("speed", "")}
    verdicts = [verdict(one, outcome) for one, outcome in zip(made, outcomes, strict=True)]
    assert tool.score(verdicts, explained) == (6, 3, 1, 3 / 5)


def test_explanations_are_read(tmp_path: Path) -> None:
    path = tmp_path / "mutants.toml"
    entry = '[[explained]]\nkind = "speed"\nwhy = "slower"\nmutants = ["0123456789 fast/x.py: a becomes b"]\n'
    path.write_text(entry, encoding="utf-8")
    assert tool.explanations(path) == {"0123456789": ("speed", "fast/x.py: a becomes b")}
    for wrong in (entry + entry, entry.replace("speed", "luck"), entry.replace("slower", "")):
        path.write_text(wrong, encoding="utf-8")
        with pytest.raises(ValueError, match="0123456789: expected one explanation with a kind of equivalent"):
            tool.explanations(path)


def test_verdicts_are_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, file = tmp_path / "verdicts", "fast/engine/formulas.py"
    made = tool.draw([file], 2)
    killed = verdict(made[0], "killed")._replace(code=tool.digest())
    path.write_text("".join(json.dumps(one) + "\n" for one in (killed, verdict(made[1], "killed"))), encoding="utf-8")
    judged_again: list[Any] = []

    def judge_all(package: str, work: list[Any], processes: int, cases: list[str]) -> list[Any]:
        judged_again.extend(work)
        return [verdict(one, "unreached") for one in work]

    monkeypatch.setattr(tool, "files", lambda: [file])
    monkeypatch.setattr(tool, "judge_all", judge_all)
    monkeypatch.setattr(tool, "explanations", dict)
    assert tool.main(["--only", file, "--count", "2", "--resume", str(path)]) == 0
    assert judged_again == [made[1]]
    assert tool.stored(path)[2] == verdict(made[1], "unreached")
    assert "1 judged, 1 killed" in capsys.readouterr().out
    monkeypatch.setattr(tool, "RESULTS", path)
    assert tool.main(["--id", made[0].id, "--survivors"]) == 0
    assert judged_again == [made[1]]


@pytest.mark.parametrize("arguments", [["--only", "fast/nothing.py"], ["--id", "0123456789"]])
def test_unknown_files_and_ids_are_rejected(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "files", lambda: ["reference/terms.py", "fast/engine/formulas.py"])
    with pytest.raises(SystemExit) as caught:
        tool.main(arguments)
    assert caught.value.code == 2
    assert f"no such file or mutant: {arguments[1]}" in capsys.readouterr().err
