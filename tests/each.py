"""A decorator that runs a test on many values, for checks that take less time than pytest needs for a test."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def each(
    names: str | Sequence[str], rows: Iterable[Any], ids: Iterable[str] | Callable[[Any], str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test once for each row, and report every row that fails.

    It takes the arguments of ``pytest.mark.parametrize`` and replaces it. All rows are one test, so that they share its
    fixtures. If rows fail, the test raises one group with the error of each; a note of the error names the row.
    """
    names = (names,) if isinstance(names, str) else tuple(names)
    rows = list(rows)
    titles = [ids(row) for row in rows] if callable(ids) else list(ids or ())
    cases = []
    for k, row in enumerate(rows):
        is_param = hasattr(row, "values") and hasattr(row, "marks")
        assert not (is_param and row.marks), "a marked row needs pytest.mark.parametrize"
        values = row.values if is_param else (row,) if len(names) == 1 else row
        title = (row.id if is_param else None) or (titles[k] if titles else "-".join(map(str, values)))
        cases.append((title, dict(zip(names, values, strict=True))))
    assert cases, "no rows"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            failed = []
            for title, values in cases:
                try:
                    test(**fixtures, **values)
                except (Exception, BaseExceptionGroup, pytest.fail.Exception) as error:
                    error.add_note(f"[{title}]")
                    failed.append((title, error))
            if failed:
                listed = ", ".join(title for title, _ in failed)
                raise BaseExceptionGroup(f"{len(failed)} of {len(cases)} rows fail: {listed}", [e for _, e in failed])

        signature = inspect.signature(test)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in names]
        assert len(kept) == len(signature.parameters) - len(names), f"the test does not take all of {names}"
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return run

    return decorate
