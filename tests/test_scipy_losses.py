"""The evaluation with scipy: it gives the golden values, is independent of the loops, and finds a wrong formula."""

from __future__ import annotations

import ast
import inspect
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pairproof import reference
from pairproof.conformance.documents.load import load_worked, worked_cases
from pairproof.conformance.implementations import ALL
from pairproof.conformance.implementations.scipy_losses import ScipyLosses
from pairproof.conformance.suite.cases import Case, call_reference
from pairproof.conformance.suite.catalogue import LOSSES
from pairproof.conformance.suite.golden import GoldenCase, load_golden
from pairproof.conformance.suite.records import Truth
from pairproof.conformance.truth.compare import compare
from pairproof.conformance.truth.evaluate import PROVE_UP_TO, stored_truth, truth
from pairproof.conformance.truth.tolerances import bounds
from pairproof.reference import scalars, scipy_losses, supcon, terms

SCIPY = ScipyLosses({}, "cpu")
IMPLEMENTED = {name: loss for name, loss in LOSSES.items() if hasattr(scipy_losses, loss.function)}


@pytest.fixture(scope="module")
def golden() -> list[GoldenCase]:
    return load_golden()


def ratio(case: Case, true: Truth) -> float:
    """Return the largest error of the evaluation with scipy, divided by its bound."""
    return compare(case, true, SCIPY.evaluate(case, "float64"), bounds(case, true, "float64")).ratio


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("loss", IMPLEMENTED)
def test_golden_values_are_within_their_bounds(golden: list[GoldenCase], loss: str, step: int) -> None:
    """The usual float64 bound holds, because logits are subtracted before they are exponentiated."""
    cases = [g for g in golden if g.case.loss == loss]
    assert len(cases) > (50 if LOSSES[loss].two_towers or loss == "dclw" else 100)
    cases = cases[::step]
    worst = {g.id: ratio(g.case, stored_truth(g.case, g.expected)) for g in cases}
    assert {name: r for name, r in worst.items() if not r <= 1} == {}


def test_anchors_agree_with_the_loops(golden: list[GoldenCase]) -> None:
    """Both are within one bound of the proved value, so they are within two bounds of each other."""
    # The other cases store the values of a few anchors only.
    for g in [g for g in golden if g.case.n <= PROVE_UP_TO and not g.expected.products][::7]:
        found, loops = SCIPY.evaluate(g.case, "float64"), call_reference(g.case)
        allowed = bounds(g.case, stored_truth(g.case, g.expected), "float64")
        assert found.anchors is not None
        assert found.anchors.keys() == loops.terms.anchor_losses.keys()
        for i, value in loops.terms.anchor_losses.items():
            if not (math.isnan(value) and math.isnan(found.anchors[i])):
                assert abs(value - found.anchors[i]) <= 2 * allowed.anchors.get(i, 0.0), (g.id, i)


def test_temperature_gradients_equal_differences_of_values(golden: list[GoldenCase]) -> None:
    """The difference of two values with another temperature has a small error, and does not depend on the tape."""
    ordinary = [g for g in golden if g.case.n <= 130 and 0.05 <= g.case.temperature <= 2 and g.case.holds_in("float16")]
    chosen = [g for g in ordinary if g.expected.temperature_gradient is not None]
    assert {g.case.loss for g in chosen[::5]} == set(IMPLEMENTED)
    for g in chosen[::5]:
        step = 1e-3 * g.case.temperature

        def total(temperature: float, case: Case = g.case) -> float:
            changed = replace(case, keywords={**case.keywords, "temperature": temperature})
            return math.fsum(SCIPY.evaluate(changed, "float64").values)

        temperature, expected = g.case.temperature, g.expected.temperature_gradient
        # Richardson's extrapolation of two central differences.
        near, far = ((total(temperature + h) - total(temperature - h)) / (2 * h) for h in (step, 2 * step))
        size = (1 + math.fsum(map(abs, g.expected.values))) / temperature
        assert (4 * near - far) / 3 == pytest.approx(expected, rel=1e-6, abs=1e-8 * size), g.id


def test_figures_of_the_notebook_are_reproduced() -> None:
    """Out[14], Out[26], Out[27] and others are float64 results of the same scipy calls, printed in full."""
    full_length = 0
    for fixture in load_worked():
        if fixture.document.id != "supcon_notebook":
            continue
        for case in worked_cases(fixture):
            (value,) = SCIPY.evaluate(case, "float64").values
            for figure in fixture.figures:
                called = f"{fixture.document.id}/{figure.call}" == case.id and figure.quantity == "loss"
                if called and len(str(figure.printed)) > 15:
                    full_length += 1
                    assert value == pytest.approx(float(figure.printed), rel=4 * 2.0**-52)
    assert full_length == 6


@pytest.mark.parametrize("loss", IMPLEMENTED.values(), ids=list(IMPLEMENTED))
def test_signatures_equal_those_of_the_loops(loss: Any) -> None:
    found, loops = (inspect.signature(getattr(module, loss.function)) for module in (scipy_losses, reference))
    assert list(found.parameters.values()) == list(loops.parameters.values())


def test_module_does_not_import_pairproof() -> None:
    tree = ast.parse(Path(scipy_losses.__file__).read_text())
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(str(node.module).split(".")[0])
    assert imported == {"__future__", "typing", "numpy", "scipy"}


def test_implementation_is_part_of_every_verification() -> None:
    assert ScipyLosses in ALL
    assert not ScipyLosses.deviations


ROWS = np.array([[1.0, 0.5, -0.25], [0.75, -1.0, 0.5], [-0.5, 0.25, 1.5], [1.25, 1.0, 0.125], [-1.0, -0.5, 0.375]])
CASE = Case("test/scipy", "supcon", ROWS, {"labels": [0, 1, 0, 1, 0]}, {"temperature": 0.5})


@pytest.mark.parametrize(
    ("place", "name", "mistake"),
    [
        ("members", "cross_entropy", lambda s, i, p, members: terms.cross_entropy(s, i, p, range(len(s)))),
        ("mean", "mean", lambda values, empty: scalars.total(values)),
        ("inside", "mean", lambda values, empty: -scalars.log_mean_exp([-v for v in values], empty)),
    ],
)
def test_wrong_formula_in_the_loops_is_found(
    monkeypatch: pytest.MonkeyPatch, place: str, name: str, mistake: Any
) -> None:
    """A proof runs the same loops and would prove a wrong value; the independent evaluation differs from it."""
    assert ratio(CASE, truth(CASE)) <= 1
    monkeypatch.setattr(supcon, name, mistake)
    assert ratio(CASE, truth(CASE)) > 1e6


def random_call(rng: np.random.Generator, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a random call with references or with two towers, with random options."""
    loss = LOSSES[name]
    n, m, dim = (int(rng.integers(1, most)) for most in (6, 8, 5))
    options: dict[str, Any] = {key: values[rng.integers(len(values))] for key, values in loss.choices.items()}
    options["temperature"] = float(rng.choice([0.07, 0.5, 2.0]))
    options["base_temperature"] = None if rng.random() < 0.5 else 0.25
    if "beta" in loss.keywords:
        options |= {"beta": float(rng.choice([0.0, 0.5, 1.0, 2.0])), "tau_plus": float(rng.choice([0.0, 0.1, 0.3]))}
    if "sigma" in loss.keywords:
        options["sigma"] = float(rng.choice([0.1, 0.5, 2.0]))
    rows, others = rng.standard_normal((n, dim)), rng.standard_normal((m, dim))
    if name == "info_nce":
        return (rows, rng.standard_normal((n, dim))), options | {"negatives": None if rng.random() < 0.5 else others}
    if name == "multiple_negatives_ranking":
        options["hardness_strength"] = float(rng.choice([0.0, 1.0, 5.0]))
        hard = None if rng.random() < 0.3 else rng.standard_normal((n, 2, dim))
        return (rows, rng.standard_normal((n, dim))), loss.fitting({**options, "hard_negatives": hard})
    options["anchors"] = None if rng.random() < 0.5 else rng.random(n) < 0.7
    # A partner must not be the anchor itself, so another reference must exist.
    own = rng.integers(-1, 0 if loss.targets == "partners" and m == 1 else m, n)
    options |= {"ref_embeddings": others, "self_rows": own}
    if loss.targets == "partners":
        return (rows, [int(rng.choice([a for a in range(m) if a != j])) for j in own]), options
    if rng.random() < 0.3:
        options["self_rows"] = None
    if rng.random() < 0.5:
        return (rows,), options | {"positives": rng.random((n, m)) < 0.4}
    return (rows, rng.integers(0, 3, n)), options | {"ref_labels": rng.integers(0, 3, m)}


@pytest.mark.parametrize("loss", [name for name, loss in IMPLEMENTED.items() if loss.matrices])
@pytest.mark.quick(3)
def test_random_references_and_towers_agree_with_the_loops(loss: str) -> None:
    """Logits are at most about 15 / 0.07: 1e-11 exceeds their rounding error, but not the error of a wrong formula."""
    rng = np.random.default_rng(20260731)
    sizes = set()
    for _ in range(300):
        arguments, options = random_call(rng, loss)
        found = getattr(scipy_losses, LOSSES[loss].function)(*arguments, **options)
        loops = getattr(reference, LOSSES[loss].function)(*arguments, **options)
        np.testing.assert_allclose(found.anchors, list(loops.terms.anchor_losses.values()), rtol=1e-11, atol=1e-11)
        np.testing.assert_allclose(found.loss, loops.loss, rtol=1e-11, atol=1e-11)
        sizes |= {len(others) for others in loops.terms.positives} | {-len(n) for n in loops.terms.negatives}
    assert sizes >= ({1, 0, -1, -2} if LOSSES[loss].targets != "labels" else {0, 1, 2, -1, -2})


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e160, 1e300])
def test_loss_is_correct_if_squares_overflow_or_underflow(scale: float) -> None:
    plain, scaled = (scipy_losses.supcon_loss(rows, [0, 1, 0, 1, 0]).loss for rows in (ROWS, ROWS * scale))
    assert scaled == pytest.approx(plain, rel=1e-13)


def test_loss_near_zero_has_an_absolute_error_of_half_an_ulp_of_one() -> None:
    """At temperature 1e-3 logits are 1000; their rounding error, 1e-13, must not remain in a loss of 0."""
    rows = np.array([[1.0, 0.25], [1.0, 0.25], [-1.0, 0.5], [-1.0, 0.5]])
    for function in (scipy_losses.supcon_loss, scipy_losses.supcon_in_loss, scipy_losses.nt_xent_pairwise_loss):
        assert 0 <= function(rows, [0, 0, 1, 1], temperature=1e-3).loss <= 2.0**-53


def test_empty_selections_give_zero() -> None:
    none = np.zeros(5, dtype=bool)
    for reduction, expected in (("mean", 0.0), ("sum", 0.0), ("mean_pairs", 0.0)):
        found = scipy_losses.nt_xent_pairwise_loss(ROWS, [0, 1, 0, 1, 0], anchors=none, reduction=reduction)
        assert found.loss == expected
        assert not len(found.anchors)
    assert len(np.ravel(scipy_losses.supcon_loss(ROWS, [0, 1, 0, 1, 0], anchors=none, reduction="none").loss)) == 0
    dropped = scipy_losses.supcon_loss(ROWS, range(5), no_positive="drop")
    assert dropped.loss == 0
    assert dropped.anchors.tolist() == [0.0] * 5
    assert math.isnan(scipy_losses.nt_bxent_loss(ROWS[:2], [(0, 1)], no_negative="nan").loss)
