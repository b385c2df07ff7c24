"""The decorator of `tests/each.py`."""

from __future__ import annotations

import inspect

import pytest

from tests.each import each


def test_every_row_runs_and_every_failure_is_named() -> None:
    seen = []

    @each("letter", ["a", "b"])
    @each(("number", "square"), [pytest.param(2, 4, id="two"), (3, 8), (4, 15)])
    def check(letter: str, number: int, square: int, given: str) -> None:
        seen.append((given, letter, number))
        if number == 4:
            pytest.fail("four")
        assert number**2 == square

    assert list(inspect.signature(check).parameters) == ["given"]
    with pytest.raises(BaseExceptionGroup, match="2 of 2 rows fail: a, b") as caught:
        check(given="x")
    assert seen == [("x", letter, number) for letter in "ab" for number in (2, 3, 4)]
    inner = caught.value.exceptions[1]
    assert isinstance(inner, BaseExceptionGroup)
    assert inner.message == "2 of 3 rows fail: 3-8, 4-15"
    assert inner.__notes__ == ["[b]"]
    wrong, failed = inner.exceptions
    assert isinstance(wrong, AssertionError)
    assert (wrong.__notes__, failed.__notes__) == (["[3-8]"], ["[4-15]"])


def test_rows_that_cannot_be_run_are_refused() -> None:
    with pytest.raises(AssertionError, match="no rows"):
        each("x", [])
    with pytest.raises(AssertionError, match="a marked row"):
        each("x", [pytest.param(1, marks=pytest.mark.slow)])
    with pytest.raises(AssertionError, match="does not take"):
        each("x", [1])(lambda y: None)
