"""Every fault is caught, the right losses pass, and the table has the verdicts."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import torch

from pairproof.conformance.faults import FAMILIES, FAULTS, RIGHT
from pairproof.conformance.faults.judging import CLEARLY, FEWEST, Verdict, judge
from pairproof.conformance.judge.results import BAD, Status
from pairproof.conformance.suite.catalogue import LOSSES
from pairproof.conformance.suite.golden import load_flags
from tools import fault_table as table

ROOT = Path(__file__).resolve().parent.parent


@cache
def judged(loss: str) -> tuple[list[Verdict], list[Verdict]]:
    """The verdicts on the faults of a loss and on the right implementations, computed once."""
    return judge(loss, [fault for fault in FAULTS if fault.loss == loss])


# One test per loss, not one per fault, because tests may run in several processes. A test below judges some cases.
@pytest.mark.slow
@pytest.mark.parametrize("loss", dict.fromkeys(fault.loss for fault in FAULTS))
def test_every_fault_is_caught_and_the_table_lists_the_cases(loss: str) -> None:
    faults, right = judged(loss)
    flags, levels = load_flags(), {fault.name: fault.level for fault in FAULTS}
    for verdict in faults:
        assert len(verdict.caught) >= FEWEST, f"{verdict.name} is caught only by {verdict.caught}"
        failed = {check.case for check in verdict.checks if check.status in BAD}
        assert set(verdict.caught) <= failed
        assert verdict.flags
        assert verdict.flags.keys() <= flags.keys()
        assert verdict.level <= levels[verdict.name], verdict.name
    assert right
    for verdict in right:
        assert len(verdict.checks) >= 100, verdict.name
        wrong = [f"{c.case} {c.dtype}: {c.message}" for c in verdict.checks if c.status is not Status.PASSED]
        assert not wrong, f"{verdict.name}: {wrong[:3]}"
    _assert_as_written(loss, faults)


def judged_at(loss: str, temperature: float, every: int) -> None:
    """Assert that the faults of a loss are caught if this temperature is built in, unless they equal the right loss."""
    faults = [fault for fault in FAULTS if fault.loss == loss]
    right_here = {one.name for one in faults if one.right_at and one.right_at[0] <= temperature <= one.right_at[1]}
    until_caught = {one.name for one in faults} - right_here
    found, right = judge(loss, faults, temperature, every, until_caught, every_right=3)
    for fault, verdict in zip(faults, found, strict=True):
        if fault.name in right_here:
            # A single row has only itself, whose term the fault may need.
            caught = [case for case in verdict.caught if "/lone-row" not in case]
            assert not caught, f"{fault.name} is caught by {caught[:3]}: correct its right_at"
        elif every == 1:
            assert verdict.level is not None, f"{fault.name} passes all {len(verdict.cases)} cases"
            # A fault that is right at some temperatures shows in fewer cases near them.
            assert fault.right_at or verdict.level <= fault.level, fault.name
    if every > 1:
        assert sum(bool(verdict.caught) for verdict in found) >= 0.8 * len(found)
    for verdict in right:
        assert all(check.status is Status.PASSED for check in verdict.checks), verdict.name


BUILT_IN = (0.033, 0.37, 2.5)
"""Temperatures that no golden case has."""


def test_sample_of_built_in_temperatures_catches_the_faults() -> None:
    judged_at("supcon_epsilon", 0.37, every=6)


@pytest.mark.slow
@pytest.mark.parametrize("loss", dict.fromkeys(fault.loss for fault in FAULTS))
@pytest.mark.parametrize("temperature", BUILT_IN)
def test_built_in_temperature_catches_every_fault(loss: str, temperature: float) -> None:
    judged_at(loss, temperature, every=1)


def _assert_as_written(loss: str, verdicts: list[Verdict]) -> None:
    text = table.TABLE.read_text(encoding="utf-8")
    section = text.split(f"## {loss}\n")[1].split("\n## ")[0]
    written = table.as_written(section)
    faults = [fault for fault in FAULTS if fault.loss == loss]
    assert list(written) == [fault.name for fault in faults], "python tools/fault_table.py"
    for fault, verdict in zip(faults, verdicts, strict=True):
        found = written[fault.name]
        expected = table.cells(table.row(fault, verdict, found[-1]))
        if verdict.near:
            # The rounding of another machine may change the outcome of cases whose error is near the threshold.
            more = table.caught_by(expected) - table.caught_by(found)
            assert abs(more) <= verdict.near, f"{fault.name}: python tools/fault_table.py"
            expected[4:6] = found[4:6]
        assert found == expected, "python tools/fault_table.py"


def test_table_lists_all_faults() -> None:
    text = table.TABLE.read_text(encoding="utf-8")
    assert text.startswith("# Faults: what the suite must catch\n")
    written = table.as_written(text)
    assert [fault.name for loss in LOSSES for fault in FAULTS if fault.loss == loss] == list(written)
    named = sum(bool(row[-1]) for row in written.values())
    assert f"\nThe last column has an entry for {named} faults: " in text
    linked = sum(bool(fault.link) for fault in FAULTS)
    assert f"\nThe table lists {len(FAULTS)} wrong implementations, {linked} of them seen or discussed" in text


def test_several_cases_catch_each_fault() -> None:
    written = table.as_written(table.TABLE.read_text(encoding="utf-8"))
    few = {name: table.caught_by(row) for name, row in written.items() if table.caught_by(row) < FEWEST}
    assert not few, "add a case that differs in kind from those that catch the fault"


def test_faults_are_described() -> None:
    assert len(FAULTS) >= 60
    assert len({fault.loss for fault in FAULTS}) >= 7
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)
    for fault in FAULTS:
        assert re.fullmatch(rf"{fault.loss}/[a-z0-9]+(-[a-z0-9]+)*", fault.name)
        assert fault.call in LOSSES[fault.loss].calls
        assert (fault.loss, fault.call) in RIGHT
        assert fault.words.endswith(".")
        assert fault.words.count(". ") == 0
        assert not fault.link or fault.link.startswith("https://") or (ROOT / fault.link).is_file()
        assert fault.settings.keys() <= LOSSES[fault.loss].keywords.keys()
        assert bool(fault.because) == (fault.right_at is not None)
        if fault.right_at is not None:
            low, high = fault.right_at
            assert low <= high, fault.name
            assert fault.because.endswith("."), fault.name
    assert set(FAMILIES) == {fault.family for fault in FAULTS}


@pytest.mark.parametrize("name", ["supcon/no-shift", "nt_xent_pairwise/probability-clamped"])
def test_fault_is_right_at_the_lowest_temperature_of_its_range(name: str) -> None:
    # As many rows as the largest random batch; row 0 and its positive are opposite, and all others are equal to row 0.
    (fault,) = [fault for fault in FAULTS if fault.name == name]
    assert fault.right_at is not None
    rows = torch.tensor([[1.0, 0.0]] * 258 + [[-1.0, 0.0]])
    labels = torch.tensor([0] + [1] * 257 + [0])
    found, right = (
        f(rows, labels, temperature=fault.right_at[0]) for f in (fault.function, RIGHT[fault.loss, fault.call])
    )
    torch.testing.assert_close(found, right, rtol=1e-5, atol=0)


def test_right_loss_is_not_caught() -> None:
    # A fault whose function is right must pass: the verdict is on the function.
    (fault,) = [fault for fault in FAULTS if fault.name == "supcon_in/count-in-float32"]
    right = type(fault)(**{**vars(fault), "function": RIGHT[fault.loss, fault.call]})
    (verdict,), _ = judge(fault.loss, [right], every=5)
    assert len(verdict.checks) >= 20
    assert not verdict.caught
    assert max(check.ratio or 0.0 for check in verdict.checks) < 1 < CLEARLY
