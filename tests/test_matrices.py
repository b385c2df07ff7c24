"""Proofs by matrices of balls against the loops of the reference, which share no formula."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from flint import arb

from pairproof.conformance.suite.cases import Case
from pairproof.conformance.suite.catalogue import LOSSES
from pairproof.conformance.suite.golden import GoldenCase, load_golden
from pairproof.conformance.suite.records import FLOOR, TIE
from pairproof.conformance.truth import evaluate, loops, matrices
from pairproof.conformance.truth.evaluate import CertificationError, truth
from pairproof.conformance.truth.kinks import kink_of


def _differs(case: Case, upstream: list[float] | None = None) -> list[str]:
    """The names of the results whose enclosures by loops and by matrices do not overlap."""
    one, other = (by.enclosures(case, 256, upstream=upstream) for by in (loops, matrices))

    def same(first: list[arb], second: list[arb]) -> bool:
        return len(first) == len(second) and all(
            a.overlaps(b) or (math.isnan(float(a)) and math.isnan(float(b))) for a, b in zip(first, second, strict=True)
        )

    pairs = {"values": (one.values, other.values)}
    pairs["anchors"] = tuple([found.anchors[i] for i in case.anchors()] for found in (one, other))
    if not any(case.undefined_values()) and kink_of(case) is None:
        pairs["temperature"] = ([one.temperature_gradient], [other.temperature_gradient])
        if "bias" in case.entry.keywords:
            pairs["bias"] = ([one.bias_gradient], [other.bias_gradient])
        for name, rows in one.gradients.items():
            pairs[name] = list(itertools.chain(*rows)), list(itertools.chain(*other.gradients[name]))
    return [name for name, (first, second) in pairs.items() if not same(first, second)]


def _small(most: int) -> list[GoldenCase]:
    return [golden for golden in load_golden() if golden.case.size <= most]


def test_every_golden_case_has_a_formula() -> None:
    assert all(matrices.has_formula(golden.case) for golden in load_golden())


def test_matrices_agree_with_the_loops_on_a_sample() -> None:
    sample = _small(10)[::25]
    assert {golden.case.loss for golden in sample} == set(LOSSES)
    assert len(sample) > 60
    for golden in sample:
        assert _differs(golden.case) == [], golden.id


@pytest.mark.slow
def test_matrices_agree_with_the_loops_on_all_small_cases() -> None:
    sample = _small(evaluate.PROVE_UP_TO)
    assert len(sample) > 2000
    for golden in sample:
        assert _differs(golden.case) == [], golden.id


def test_matrices_agree_with_the_loops_on_the_gradient_of_a_weighted_sum() -> None:
    chance, compared = random.Random(0), 0
    for golden in _small(8)[::8]:
        case = golden.case
        if case.option("reduction") == "none" and case.counted():
            assert _differs(case, [chance.uniform(-2, 2) for _ in case.counted()]) == [], golden.id
            compared += 1
    assert compared > 10


def test_cases_at_a_kink_are_left_out_by_name() -> None:
    """At a kink, the matrices prove the value; the gradient is left out. Near a kink, more bits decide."""
    tie = Case("tie", "supcon_epsilon", np.array([[1.0, 0.0], [1.0, 0.0], [0.5, 0.5], [0.5, -0.5]]),
               {"labels": [0, 0, 1, 1]}, {"temperature": 1.0})  # fmt: skip
    assert kink_of(tie) == TIE
    assert _differs(tie) == []
    opposite = Case("floor", "hard_negative", np.array([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [-1.0, 0.0]]),
                    {"partners": [1, 0, 3, 2]}, {"temperature": 0.5, "tau_plus": 0.0})  # fmt: skip
    assert kink_of(opposite) == FLOOR
    assert _differs(opposite) == []
    near = replace(tie, embeddings=tie.embeddings * [[1.0], [1.0 + 2.0**-50], [1.0], [1.0]])
    assert kink_of(near) is None
    found = matrices.enclosures(near, 30)
    assert not all(x.is_finite() for row in found.gradients["embeddings"] for x in row)
    assert evaluate._first_wide(near, found) is not None
    assert _differs(near) == []


# Training size.


def _case(loss: str, n: int, d: int, **keywords: object) -> Case:
    rng = np.random.default_rng(0)

    def rows() -> np.ndarray:
        return np.round(rng.standard_normal((n, d)) * 64) / 64

    arguments = {
        "labels": {"labels": [i // 4 for i in range(n)]},
        "partners": {"partners": [i ^ 1 for i in range(n)]},
        "positive_pairs": {"positive_pairs": [(i, i ^ 1) for i in range(n)]},
        "": {},
    }[LOSSES[loss].targets]
    others = {"embeddings_b": rows()} if LOSSES[loss].two_towers else {}
    return Case("training", loss, rows(), arguments, keywords, others)


@pytest.mark.parametrize("loss", [pytest.param(name, marks=pytest.mark.slow) for name in LOSSES])
@pytest.mark.quick(2)
def test_training_batch_is_proved_to_28_digits(loss: str) -> None:
    """Values and gradients have a radius of at most 1e-28, and equal those of the fast package."""
    extra: dict[str, object] = {"detach_weights": False} if loss == "dclw" else {}
    if loss == "multiple_negatives_ranking":
        extra = {"directions": "query_to_doc+doc_to_query", "hardness_mode": "all_negatives", "hardness_strength": 1.0}
    temperature = 20.0 if LOSSES[loss].epsilon else 0.1
    case = _case(loss, 96, 48, temperature=temperature, **extra)
    found = matrices.enclosures(case)
    assert all(float(x.rad()) <= 1e-28 * abs(float(x)) for x in found.values)
    for rows in found.gradients.values():
        largest = max(abs(float(x)) for row in rows for x in row)
        assert all(float(x.rad()) <= 1e-28 * largest for row in rows for x in row)
    true = truth(case)
    given = {name: torch.tensor(z, requires_grad=True) for name, z in case.matrices.items()}
    arguments = {name: torch.tensor(value) for name, value in case.arguments.items()}
    value = LOSSES[loss].fast(*given.values(), *arguments.values(), **case.keywords)
    value.backward()
    assert value.item() == pytest.approx(true.loss, rel=1e-12)
    for name, z in given.items():
        gradient = true.gradient if name == case.first else true.other_gradients[name]
        assert gradient is not None
        np.testing.assert_allclose(z.grad, gradient, rtol=1e-9, atol=1e-12 * np.abs(gradient).max())


@pytest.mark.parametrize("loss", ["hard_negative", "nt_xent"])
def test_digits_of_tiny_values_are_proved(loss: str) -> None:
    """In a solved batch at a low temperature, values are far below one unit in the last place of their terms."""
    case = _case(loss, 64, 48, temperature=0.0137)
    case = replace(case, embeddings=case.embeddings[::2].repeat(2, axis=0) + case.embeddings / 1024)
    found, right = truth(case), truth(case, bits=1024)
    assert min(right.anchors.values()) < 1e-22
    for i, value in right.anchors.items():
        assert found.anchors[i] == pytest.approx(value, rel=2.0**-52)
    np.testing.assert_allclose(found.gradient, right.gradient, rtol=1e-14, atol=0)


def test_weights_of_a_loss_without_a_formula_come_from_the_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    case = _case("supcon", 8, 3)
    expected = truth(case)
    monkeypatch.setattr(matrices, "FORMULAS", {})
    assert not matrices.has_formula(case)
    np.testing.assert_allclose(evaluate.sensitivity_of(replace(case)), expected.weights, rtol=1e-9, atol=1e-15)


def test_result_that_stays_wide_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "PROVE_UP_TO", 0)
    monkeypatch.setattr(evaluate, "MOST_BITS", 60)
    with pytest.raises(CertificationError, match="training: the value of anchor 0 cannot be proved with 60 bits"):
        truth(_case("nt_xent", 8, 3), bits=60)
