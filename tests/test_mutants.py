"""The mutation tool: what it makes, what kills it, and that what is on file of its last run holds together."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module
    spec.loader.exec_module(module)
    return module


tool = load()


def mutant_at(file: str, text: str, operator: str) -> Any:
    """The mutant of a line by an operator."""
    (found, *_) = [one for one in tool.mutants(file) if one.text == text and one.operator == operator]
    return found


# Making mutants.


def test_a_place_is_code_and_no_annotation() -> None:
    text = """from __future__ import annotations
Either = int | str
def f(x: int | None = 1 + 2, *, name: str = "é") -> int | None:
    y: float | int = x | 4
    if name == "a" or y == 3:
        raise ValueError(f"{x + 1} of {y}")
    return {"é": x - 1}
def g(*, y):
    return y
"""
    anatomy = tool._Anatomy(text)
    lines = text.splitlines()
    expected = {
        (2, "|"): True,
        (3, "| None ="): True,
        (3, "+"): False,
        (3, "| None:"): True,
        (4, "| int"): True,
        (4, "| 4"): False,
        (6, "+"): True,
        (7, "-"): False,
        (8, "*"): True,
    }
    for (line, sign), dead in expected.items():
        operator = f"ReplaceBinaryOperator_{'BitOr_BitAnd' if '|' in sign else 'Add_Sub'}"
        assert anatomy.dead(line, lines[line - 1].index(sign), operator) is dead, sign
    name, number = lines[4].index("=="), lines[4].rindex("==")
    assert anatomy.dead(5, name, "ReplaceComparisonOperator_Eq_Lt")
    assert not anatomy.dead(5, name, "ReplaceComparisonOperator_Eq_NotEq")
    assert not anatomy.dead(5, number, "ReplaceComparisonOperator_Eq_Lt")


def test_a_statement_is_its_header_and_knows_whether_a_call_runs_it() -> None:
    anatomy = tool._Anatomy(
        "A = (\n    1\n)\n@d\ndef f(x=1):\n    if (\n        x\n    ):\n        return 2\n    return 3\n"
    )
    expected = {2: ((1, 3), False), 4: ((4, 5), False), 5: ((5, 10), True), 7: ((6, 8), True), 9: ((9, 9), True)}
    assert {line: anatomy.statement(line) for line in expected} == expected


def test_every_mutant_compiles_differs_and_has_a_name_of_its_own() -> None:
    names = [one.id for file in tool.files() for one in tool.mutants(file)]
    assert len(names) == len(set(names)) > 5000
    for one in tool.draw(tool.files(), 8, seed=1):
        text = one.source()
        assert text != tool.source(one.file)
        compile(text, one.file, "exec")
        before, after = one.change()
        assert before != after


def test_a_name_does_not_depend_on_other_lines() -> None:
    made = tool.Mutant("fast/supcon.py", "AddNot", 3, 40, 4, "if a:", 0, (40, 40), True)
    assert made.id == "e1cf5b5113"
    moved = dataclasses.replace(made, occurrence=5, line=90, column=8, lines=(90, 91))
    assert moved.id == made.id
    for other in ({"file": "fast/nt_xent.py"}, {"operator": "NumberReplacer"}, {"text": "if b:"}, {"turn": 1}):
        assert dataclasses.replace(made, **other).id != made.id


def test_the_draw_is_the_same_for_the_same_seed_and_takes_from_every_file() -> None:
    drawn = tool.draw(tool.files(), 400, seed=7)
    assert drawn == tool.draw(tool.files(), 400, seed=7)
    assert {one.id for one in drawn} != {one.id for one in tool.draw(tool.files(), 400, seed=8)}
    assert len({one.id for one in drawn}) == len(drawn)
    assert set(drawn) < set(tool.draw(tool.files(), 500, seed=7))
    every = {file: len(tool.mutants(file)) for file in tool.files()}
    for file, number in every.items():
        assert 0 <= sum(one.file == file for one in drawn) - 400 * number / sum(every.values()) < 1
    assert set(tool.draw(["fast/engine/formulas.py"], 10**6, seed=7)) == set(tool.mutants("fast/engine/formulas.py"))


def test_the_losses_and_the_engine_are_mutated_and_the_kernels_are_not() -> None:
    names = tool.files()
    assert {"reference/supcon.py", "fast/supcon.py", "fast/engine/exact.py", "fast/engine/__init__.py"} <= set(names)
    assert not [name for name in names if "kernels" in name or name.endswith("modules.py")]


# Judging them.


@pytest.fixture(scope="module")
def reference_judge() -> Any:
    judge = tool.Judge("reference", lambda name: "/two-rows" in name or name == "golden/errors/temperature-zero/supcon")
    judge.survey(lambda done, of: None)
    return judge


@pytest.fixture(scope="module")
def fast_judge() -> Any:
    return tool.Judge("fast", lambda name: name == "golden/supcon/two-rows")


def verdict(judge: Any, mutant: Any, text: str | None = None) -> Any:
    ((found, said),) = tool.judge_all(judge, [mutant], 1, None if text is None else {mutant.id: text})
    assert found is mutant
    return said


VALUE = "value=(top - s[p]) + np.log1p(rest),"


def test_a_wrong_value_is_killed_by_a_case_that_is_named(reference_judge: Any) -> None:
    mutant = mutant_at("reference/terms.py", VALUE, "ReplaceBinaryOperator_Sub_Add")
    said = verdict(reference_judge, mutant)
    assert said.how == "case"
    assert said.check.startswith("golden/")
    assert said.check.endswith(" reference float64")
    assert "times the bound" in said.message or "rounding" in said.message
    assert 0 < said.asked < len(reference_judge.checks)


def test_a_check_that_is_gone_is_killed_by_an_error_case(reference_judge: Any) -> None:
    text = "if not (math.isfinite(number) and number > 0):"
    (mutant,) = [
        one for one in tool.mutants("reference/checks.py") if one.text == text and one.operator.endswith("_Gt_GtE")
    ]
    assert verdict(reference_judge, mutant).check == "golden/errors/temperature-zero/supcon reference"


def test_what_is_equivalent_survives_every_check_that_comes_by(reference_judge: Any) -> None:
    mutant = mutant_at("reference/scalars.py", "if order(x) > 0:", "ReplaceComparisonOperator_Gt_GtE")
    said = verdict(reference_judge, mutant)
    assert said.how == "survived"
    mutant = mutant_at("reference/terms.py", VALUE, "ReplaceBinaryOperator_Add_Sub")
    said = verdict(reference_judge, mutant, tool.source(mutant.file) + "\n# another file, the same code\n")
    assert said.how == "survived"
    assert said.asked > 10


@pytest.mark.parametrize(
    ("planted", "how"),
    [
        ("import nothing_of_this_name\n", "import"),
        ("import os\nos._exit(3)\n", "crash"),
        ("while True:\n    pass\n", "time"),
    ],
)
def test_what_does_not_run_is_told_apart(
    reference_judge: Any, planted: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "PATIENCE", 0.5)
    mutant = mutant_at("reference/terms.py", VALUE, "ReplaceBinaryOperator_Add_Sub")
    text = tool.source(mutant.file).replace("import numpy as np\n", f"import numpy as np\n{planted}")
    assert verdict(reference_judge, mutant, text).how == how


def test_every_road_of_fast_runs_the_mutated_code(fast_judge: Any) -> None:
    planted = "\n\ndef {}(*_, **__):\n    raise RuntimeError('planted')\n"
    for file, name, roads in (
        (
            "fast/engine/scaling.py",
            "scale_rows",
            ("fast", "fast-dense", "fast-tiled", "fast-learned", "fast-learned-tiled"),
        ),
        ("fast/engine/exact.py", "_logits", ("fast-exact", "fast-learned-exact")),
    ):
        mutant = next(iter(tool.mutants(file)))
        assert verdict(fast_judge, mutant, tool.source(file) + "\n# the same code\n").how == "survived"
        for road in roads:
            judge = copy.copy(fast_judge)
            judge.checks = [check for check in fast_judge.checks if f" {road} " in check.name]
            said = verdict(judge, mutant, tool.source(file) + planted.format(name))
            assert (said.how, said.message) == ("case", "RuntimeError: planted"), road


# What is on file.


def committed() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(tool.RESULTS.read_text(encoding="utf-8"))
    return data


def test_the_run_on_file_is_large_enough_and_every_survivor_is_explained() -> None:
    data, explained = committed(), tool.explanations()
    records = data["mutants"]
    assert data["format"] == "pairproof-mutants/1"
    assert len({one["id"] for one in records}) == len(records)
    total = tool.score(records, explained)
    assert total.judged >= tool.LEAST
    assert total.of_mistakes >= tool.GOAL
    assert {one["how"] for one in records} <= set(tool.ENDED)
    assert tool.problems(records, explained) == []
    assert tool.REPORT.read_text(encoding="utf-8") == tool.report(data, explained)


def test_problems_are_told() -> None:
    alive, dead, *_ = tool.mutants("fast/engine/formulas.py")
    records = [
        tool.record(alive, tool.Verdict("survived", asked=3)),
        tool.record(dead, tool.Verdict("case", "golden/supcon/x fast float64", "wrong")),
    ]
    low, unexplained = tool.problems(records, {})
    assert low == "50.0% of the mistakes are killed, 95% is the least"
    assert unexplained.startswith(f"{alive.id} survives unexplained: fast/engine/formulas.py:")

    def explain(mutant: str, told: str = "?") -> dict[str, Any]:
        return {mutant: tool.Explanation(mutant, told, "range", "because")}

    right = explain(alive.id, tool.describe(alive))
    assert tool.problems(records, right) == [low]
    assert "is explained as ?, and is" in tool.problems(records, explain(alive.id))[1]
    assert "and did not survive (golden/supcon/x fast float64)" in tool.problems(records, right | explain(dead.id))[1]
    assert "and no mutant" in tool.problems(records, right | explain("0123456789"))[1]


def test_what_is_no_mistake_and_what_no_check_comes_by_is_left_out_of_the_score() -> None:
    names = [one.id for one in tool.mutants("fast/engine/formulas.py")[:8]]
    ends = ["case", "time", "import", "survived", "survived", "survived", "unreached", "case"]
    records = [{"id": name, "how": how} for name, how in zip(names, ends, strict=True)]
    kinds = {names[3]: "equivalent", names[4]: "range", names[5]: "speed"}
    explained = {name: tool.Explanation(name, "", kind, "because") for name, kind in kinds.items()}
    total = tool.score(records, explained)
    assert (total.judged, total.killed, total.harmless) == (7, 4, 2)
    assert (total.of_all, total.of_mistakes) == (4 / 7, 4 / 5)


def test_verdicts_are_kept(tmp_path: Path) -> None:
    mutant, path = tool.mutants("fast/engine/formulas.py")[0], tmp_path / "session"
    said = tool.Verdict("case", "golden/supcon/x fast float64", "wrong", 3, 0.5)
    tool._Session(path).add(mutant, said)
    assert tool._Session(path).known == {mutant.id: said}


def test_the_killed_of_the_run_on_file_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mutants.json"
    monkeypatch.setattr(tool, "RESULTS", path)
    assert tool._killed_before() == {}
    alive, dead, *_ = tool.mutants("fast/engine/formulas.py")
    verdicts = {alive: tool.Verdict("survived"), dead: tool.Verdict("case", "golden/supcon/x fast float64")}
    path.write_text(json.dumps({"mutants": [tool.record(*pair) for pair in verdicts.items()]}), encoding="utf-8")
    assert tool._killed_before() == {dead.id: verdicts[dead]}


def test_explanations_are_read(tmp_path: Path) -> None:
    path = tmp_path / "mutants.toml"
    entry = '[[explained]]\nkind = "speed"\nwhy = "slower"\nmutants = ["0123456789 fast/x.py: a -> b"]\n'
    path.write_text(entry, encoding="utf-8")
    (found,) = tool.explanations(path).values()
    assert found == tool.Explanation("0123456789", "fast/x.py: a -> b", "speed", "slower")
    path.write_text(entry + entry, encoding="utf-8")
    with pytest.raises(ValueError, match="explained twice"):
        tool.explanations(path)
    path.write_text(entry.replace("speed", "luck"), encoding="utf-8")
    with pytest.raises(ValueError, match="expected a kind of equivalent"):
        tool.explanations(path)


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert tool.main(["--list", "--count", "12", "--only", "fast/engine/formulas.py"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 12
    assert all(" fast/engine/formulas.py:" in line and " -> " in line for line in lines)
    session = tmp_path / "session"
    session.write_text("of other code\n", encoding="utf-8")
    for arguments, word in (
        (["--only", "fast/nothing.py"], "expected a file of"),
        (["--count", "0"], "at least 1"),
        (["--id", "0123456789"], "no mutant"),
        (["--resume", str(session)], "belongs to other code"),
    ):
        with pytest.raises(SystemExit) as caught:
            tool.main(arguments)
        assert caught.value.code == 2
        assert word in capsys.readouterr().err
