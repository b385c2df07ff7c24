"""Every form of the engine is judged by golden cases: by enough of them, and a mistake in it is found."""

from __future__ import annotations

import pytest

from pairproof.conformance.implementations.base import one_thread
from pairproof.conformance.implementations.fast import Fast, FastFrozen
from pairproof.conformance.judge.options import Selection
from pairproof.conformance.judge.verify import judge_case
from pairproof.conformance.suite.golden import GoldenCase, load_golden
from tools import engine_forms
from tools.engine_forms import LEAST, PARTS, broken, entered

Entered = dict[tuple[str, str], list[GoldenCase]]


@pytest.fixture(scope="session")
def some_by_part() -> Entered:
    """Some golden cases that enter each part: a selection, because evaluating all of them takes half a minute."""
    small = [golden for golden in load_golden() if golden.case.n >= 4 and golden.case.size <= 100]
    # Mistakes in results that are 0 cannot be seen.
    small = [one for one in small if one.expected.gradient is not None and one.expected.gradient.any()]
    more = [golden for golden in small if "many-columns" in golden.flags or "saturated" in golden.case.id]
    return entered([*small[::7], *more])


@pytest.mark.slow
def test_every_part_is_entered_by_enough_golden_cases() -> None:
    assert not {place: len(cases) for place, cases in entered(load_golden()).items() if len(cases) < LEAST}


@pytest.mark.parametrize(("form", "part"), PARTS)
def test_a_wrong_part_fails(some_by_part: Entered, form: str, part: str) -> None:
    cases = some_by_part[form, part][:6]
    implementations = [Fast({}, "cpu"), FastFrozen({}, "cpu")]
    with one_thread(), broken(form, part):
        found = [judge_case(golden.case, golden, implementations, Selection()) for golden in cases]
    failed = [[check for check in checks if check.status == "failed"] for checks in found]
    # A mistake hardly shows in a solved batch.
    assert sum(map(bool, failed)) >= len(cases) - 1 > 0
    if part == "gradient":
        assert all("gradient" in check.message for checks in failed for check in checks)


def test_a_form_that_few_cases_enter_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [golden for golden in load_golden(losses=("dclw",)) if golden.case.size <= 8]
    monkeypatch.setattr(engine_forms, "load_golden", lambda: few)
    assert engine_forms.main() == 1
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0].split() == ["form", "value", "gradient"]
    forms = ["anchored", "blocks", *({"compiled"} & engine_forms.FORMS.keys()), "direct"]
    assert f"entered by fewer than 20 golden cases: {', '.join(forms)}" in printed.err
    assert "odds" not in printed.err
