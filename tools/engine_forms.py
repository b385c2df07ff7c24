"""Count by how many golden cases each form of ``pairproof.fast.engine`` is entered with the default backend on a CPU.

A form has two parts, the value and the gradient. The forms of several processes, ``shared`` and ``ring``, are not
counted: no golden case starts processes.

Exit code: 1 if a part of a form is entered by fewer than 20 cases; otherwise 0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

from torch import Tensor

from pairproof.conformance.implementations.base import Implementation, one_thread
from pairproof.conformance.implementations.fast import Fast, FastFrozen
from pairproof.conformance.suite.golden import GoldenCase, load_golden
from pairproof.fast.engine import AnchorValues, Odds, autograd, jit

LEAST = 20
"""Smallest number of golden cases that enter each part of a form."""

USUAL = ("evaluate", "differentiate")
FORMS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("small", "direct", "unshifted", "symmetric", "anchored", "frozen", "pairs", "rowwise"), USUAL),
    "odds": ("_evaluate", "_gradients"),
    "blocks": ("_value", "_differentiate"),
    "pair_values": ("_logits", "_gradients"),
    "exact": ("anchor_values", "_pull"),
    **({} if jit.refusal() else {"compiled": USUAL}),
}
"""For each module of the engine that evaluates batches of one process: its functions for the value and the gradient."""

PARTS = [(form, part) for form in FORMS for part in ("value", "gradient")]
"""Both parts of every form."""

Wrapper = Callable[[str, str, Callable[..., Any]], Callable[..., Any]]


@contextmanager
def wrapped(wrapper: Wrapper) -> Iterator[None]:
    """Replace the functions of every form by ``wrapper(form, part, function)`` within the context."""
    with ExitStack() as stack:
        for form, names in FORMS.items():
            module = import_module(f"pairproof.fast.engine.{form}")
            pair = tuple(
                wrapper(*place, getattr(module, name)) for place, name in zip(_parts(form), names, strict=True)
            )
            for name, function in zip(names, pair, strict=True):
                stack.enter_context(patch.object(module, name, function))
            if form in autograd._FORMS:
                stack.enter_context(patch.dict(autograd._FORMS, {form: pair}))
        yield


def _parts(form: str) -> list[tuple[str, str]]:
    return [place for place in PARTS if place[0] == form]


def entered(cases: Sequence[GoldenCase]) -> dict[tuple[str, str], list[GoldenCase]]:
    """Return the cases that enter each part of each form, in float64 or float32."""
    found = {place: dict[str, GoldenCase]() for place in PARTS}
    now: GoldenCase
    passed_on: list[bool] = []

    def recorded(form: str, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            passed_on[:] = [True] * len(passed_on)
            passed_on.append(False)
            try:
                return function(*arguments, **keywords)
            finally:
                # ``small`` passes some batches on to another form.
                if not passed_on.pop():
                    found[form, part][now.id] = now

        return call

    implementations: list[Implementation] = [Fast({}, "cpu"), FastFrozen({}, "cpu")]
    with one_thread(), wrapped(recorded):
        for now in cases:
            for one in implementations:
                for dtype in filter(now.case.holds_in, () if one.refuses(now.case) else ("float64", "float32")):
                    one.evaluate(now.case, dtype)
    return {place: list(chosen.values()) for place, chosen in found.items()}


@contextmanager
def broken(form: str, part: str, factor: float = 1.5) -> Iterator[None]:
    """Multiply one part of one form by ``factor`` within the context."""

    def changed(result: Any) -> Any:
        if isinstance(result, Tensor):
            return result * factor
        if isinstance(result, AnchorValues):
            return result._replace(values=result.values * factor)
        if isinstance(result, Odds):
            return result._replace(odds=[odds * factor for odds in result.odds])
        return tuple(map(changed, result)) if type(result) in (tuple, list) else result

    def wrapper(of_form: str, of_part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            return changed(function(*arguments, **keywords))

        return call if (of_form, of_part) == (form, part) else function

    with wrapped(wrapper):
        yield


def main() -> int:
    """Print the numbers; return the exit code."""
    numbers = {place: len(cases) for place, cases in entered(load_golden()).items()}
    print(f"{'form':12} {'value':>6} {'gradient':>9}")
    for form in FORMS:
        value, gradient = (numbers[place] for place in _parts(form))
        print(f"{form:12} {value:6} {gradient:9}")
    few = sorted({form for (form, _), number in numbers.items() if number < LEAST})
    if few:
        print(f"engine-forms: entered by fewer than {LEAST} golden cases: {', '.join(few)}", file=sys.stderr)
    return 1 if few else 0


if __name__ == "__main__":
    sys.exit(main())
