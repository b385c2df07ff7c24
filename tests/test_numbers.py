"""The number types of the harness: intervals of printed decimals, rounded arithmetic, reverse-mode derivatives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flint import arb
from hypothesis import given, settings
from hypothesis import strategies as st

from pairproof.conformance.suite.cases import Case, call_reference
from pairproof.conformance.suite.golden import GoldenCase, load_golden
from pairproof.conformance.truth import autodiff as tape
from pairproof.conformance.truth.intervals import Rounded, ball, exact, precision
from pairproof.conformance.truth.loops import enclosures

ordinary = st.floats(min_value=-1e3, max_value=1e3, width=32)


@pytest.mark.slow
@given(ordinary, ordinary)
@settings(deadline=None, derandomize=True, max_examples=300)
def test_ieee_operations_equal_those_of_numpy(a: float, b: float) -> None:
    """With slack 0, the interval of + - * / and sqrt contains only the IEEE result."""
    for dtype in (np.float32, np.float64):
        x, y = Rounded.number(a, dtype, 0), Rounded.number(b, dtype, 0)
        with np.errstate(all="ignore"), precision():
            pairs = [(x + y, dtype(a) + dtype(b)), (x - y, dtype(a) - dtype(b)), (x * y, dtype(a) * dtype(b))]
            if b:
                pairs.append((x / y, dtype(a) / dtype(b)))
            if a >= 0:
                pairs.append((x.sqrt(), np.sqrt(dtype(a))))
        for found, expected in pairs:
            assert found.lower == found.upper == float(expected), (dtype, a, b)


@given(st.floats(min_value=-80, max_value=80, width=32))
@settings(deadline=None, derandomize=True, max_examples=300)
def test_intervals_with_slack_contain_the_results_of_torch_and_numpy(a: float) -> None:
    """The published documents compute with torch in float32 and with numpy in float64."""
    for dtype, name in ((np.float32, torch.float32), (np.float64, torch.float64)):
        x = Rounded.number(a, dtype, 1)
        value = torch.tensor([a], dtype=name)
        with precision():
            assert float(torch.exp(value)) in x.exp()
            if a > 0:
                assert float(torch.log(value)) in x.log()
                assert float(torch.log1p(value)) in x.log1p()
            if dtype is np.float64:
                assert float(np.exp(a)) in x.exp()


def test_saturation_and_infinities_are_enclosed() -> None:
    with precision():
        x = Rounded.number(98.0, np.float32, 1)
        sigmoid = 1 / (1 + (-x).exp())
        assert sigmoid.lower == sigmoid.upper == 1.0
        assert (-sigmoid).log1p().upper == -np.inf
        assert (-sigmoid).log1p().at_least(-100.0).lower == -100.0
        assert (1 / (1 + x.exp())).upper == 0.0
        touching_zero = Rounded(0.0, 1e-8, np.float32, 1)
        assert not touching_zero.log().is_bounded


def test_ball_contains_every_number_that_rounds_to_its_decimal() -> None:
    with precision():
        printed = ball("-1.0192", 4)
        assert printed.contains(arb("-1.01915001"))
        assert printed.contains(exact("-1.01924999"))
        assert not printed.contains(exact("-1.0193"))
        assert exact("0.1") * 10 - 1 == arb(0) or abs(exact("0.1") * 10 - 1) < arb(2) ** -200
        with pytest.raises(ValueError, match="finite decimal"):
            exact("inf")


def test_inputs_are_rounded_to_the_dtype() -> None:
    number = Rounded.number(0.1, np.float32, 0)
    assert number.lower == number.upper == float(np.float32(0.1))


def _every_operation(x: Any, y: Any) -> Any:
    """Compute a value from x and y with every operation of the tape; constants occur on both sides."""
    a = np.exp(x) * y - 2 / y + np.log(y) / 3
    return np.sqrt(a * a + 1) + np.log1p(y * y) - np.expm1(-x) + (1 - x) * (y - 5) + (-x) / y


@given(st.floats(0.1, 3), st.floats(0.1, 3))
@settings(deadline=None, derandomize=True, max_examples=100)
def test_tape_agrees_with_the_complex_step(a: float, b: float) -> None:
    ((x, y),) = tape.variables([[a, b]])
    ((dx, dy),) = tape.gradient(_every_operation(x, y), [[x, y]])
    h = 1e-200
    assert dx == pytest.approx(_every_operation(complex(a, h), complex(b, 0)).imag / h, rel=1e-12)
    assert dy == pytest.approx(_every_operation(complex(a, 0), complex(b, h)).imag / h, rel=1e-12)


def test_tape_over_balls_encloses_the_derivative() -> None:
    with precision():
        ((x,),) = tape.variables([[arb(2)]])
        ((slope,),) = tape.gradient(x.exp() * x, [[x]])
        true = 3 * arb(2).exp()
        assert slope.overlaps(true)
        assert slope.rad() < arb(2) ** -200


def test_unused_variable_has_derivative_zero() -> None:
    ((x, y),) = tape.variables([[1.0, 2.0]])
    assert tape.gradient(x * 2, [[x, y]]) == [[2.0, 0.0]]


SMALL = [golden for golden in load_golden() if golden.case.size <= 12][::9]


@pytest.mark.parametrize(
    "golden",
    [
        pytest.param(golden, id=golden.id, marks=pytest.mark.slow if k % 3 else ())
        for k, golden in enumerate(SMALL[::9])
    ],
)
def test_enclosures_overlap_the_results_of_a_tape_of_the_whole_loss(golden: GoldenCase) -> None:
    """``enclosures`` differentiates one anchor at a time, and the similarities by a formula."""
    case, wants_gradient = golden.case, golden.expected.gradient is not None
    found = enclosures(case, gradient=wants_gradient)
    with precision():
        values, gradient = _whole_tape(case)
        assert len(values) == len(found.values)
        for value, enclosure in zip(values, found.values, strict=True):
            assert enclosure.overlaps(value)
            assert not enclosure.is_finite() or enclosure.rad() <= 2.0**-180 * (1 + abs(enclosure).abs_upper())
        if wants_gradient:
            rows = [row for matrix in found.gradients.values() for row in matrix]
            for expected, enclosed in zip(gradient, rows, strict=True):
                assert all(x.overlaps(arb(y)) for x, y in zip(enclosed, expected, strict=True))


def _whole_tape(case: Case) -> tuple[list[Any], list[list[Any]]]:
    """The values and the gradients of all matrices, from one tape that begins at the embeddings."""
    variables = tape.variables([[arb(x) for x in row] for matrix in case.matrices.values() for row in matrix.tolist()])
    rows, given = iter(variables), {}
    for name, matrix in case.matrices.items():
        given[name] = np.array([next(rows) for _ in matrix], dtype=object)
    loss = call_reference(case, given).loss
    values = loss if isinstance(loss, list) else [loss]
    return [arb(tape.value_of(v)) for v in values], tape.gradient(sum(values), variables)
