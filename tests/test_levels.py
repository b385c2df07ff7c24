"""Levels: of flags, of cases, and in the results of ``check``."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pairproof.conformance.judge.levels import Level, level_of
from pairproof.conformance.suite.golden import FLAGS, load_flags, load_golden
from pairproof.conformance.suite.store import FixtureError, fixtures_root, write_manifest

FORMULA, POLICIES, RANGE, DIGITS = Level


def test_levels_are_ordered_from_formula_to_digits() -> None:
    assert FORMULA < POLICIES < RANGE < DIGITS
    assert sorted([DIGITS, POLICIES, RANGE, FORMULA]) == [FORMULA, POLICIES, RANGE, DIGITS]
    assert POLICIES >= FORMULA
    assert not POLICIES <= FORMULA
    assert FORMULA <= FORMULA >= FORMULA


def test_every_flag_has_exactly_one_level_and_every_level_has_flags_and_cases() -> None:
    raw = json.loads((fixtures_root() / FLAGS).read_text(encoding="utf-8"))["flags"]
    assert {name: Level(flag["level"]) for name, flag in raw.items()} == {
        name: flag.level for name, flag in load_flags().items()
    }
    assert {flag.level for flag in load_flags().values()} == set(Level)
    assert {level_of(case.flags) for case in load_golden()} == set(Level)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), FORMULA),
        (("temperature", "unbalanced-classes"), FORMULA),
        (("temperature", "lonely-anchors"), POLICIES),
        (("low-temperature", "lonely-anchors"), RANGE),
        (("trained-like", "low-temperature", "duplicate-embeddings"), DIGITS),
    ],
)
def test_level_of_a_case_is_the_highest_of_its_flags(flags: tuple[str, ...], expected: Level) -> None:
    assert level_of(flags) is expected


def test_unknown_flag_has_no_level() -> None:
    with pytest.raises(KeyError, match="mystery"):
        level_of(("mystery",))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"level": None}, "'level' is a required property"), ({"level": "hard"}, "'hard' is not one of")],
)
def test_flag_with_a_missing_or_unknown_level_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    for name in ("golden", "schema"):
        shutil.copytree(fixtures_root() / name, tmp_path / name)
    path = tmp_path / FLAGS
    data = json.loads(path.read_text(encoding="utf-8"))
    flag = data["flags"]["solved"] | change
    data["flags"]["solved"] = {name: value for name, value in flag.items() if value is not None}
    path.write_text(json.dumps(data), encoding="utf-8")
    write_manifest(tmp_path)
    with pytest.raises(FixtureError, match=message):
        load_flags(tmp_path)
