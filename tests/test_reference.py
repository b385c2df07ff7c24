"""The reference: closed forms, terms, layouts of views, number types, and gradients without a second formula."""

from __future__ import annotations

import doctest
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flint import arb

from pairproof import reference
from pairproof.conformance.implementations.reference import complex_step
from pairproof.conformance.suite.cases import Case
from pairproof.conformance.truth.evaluate import truth

ROWS = np.array([[1.0, 0.5, -0.25], [0.75, -1.0, 0.5], [-0.5, 0.25, 1.5], [1.25, 1.0, 0.125], [-1.0, -0.5, 0.375]])
LABELS = [0, 1, 0, 1, 0]


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_loss_of_identical_rows_is_the_logarithm_of_the_number_of_others(n: int) -> None:
    rows = np.ones((n, 3))
    for loss in (reference.supcon_loss, reference.supcon_in_loss):
        assert loss(rows, [7] * n, temperature=0.5).loss == pytest.approx(math.log(n - 1), abs=1e-15)


def test_tiny_loss_is_not_rounded_to_zero() -> None:
    rows = np.array([[1.0, 0], [1, 0], [-1, 0], [-1, 0]])
    loss = reference.nt_xent_loss(rows, [1, 0, 3, 2], temperature=0.05).loss
    assert loss == pytest.approx(2 * math.exp(-40), rel=1e-14)


def test_loss_is_correct_if_squares_overflow_or_underflow() -> None:
    plain = reference.supcon_loss(ROWS, LABELS).loss
    for scale in (1e-200, 1e200, 5e-324 / 2.0**-40):
        assert reference.supcon_loss(ROWS * scale, LABELS).loss == pytest.approx(plain, rel=1e-12)
    mixed = ROWS * np.array([1e-300, 1, 1e300, 1e-5, 1e100])[:, None]
    assert reference.supcon_loss(mixed, LABELS).loss == pytest.approx(plain, rel=1e-14)


def test_terms_add_up_to_the_loss() -> None:
    result = reference.supcon_loss(ROWS, LABELS, temperature=0.5)
    terms = result.terms
    assert terms.positives[0] == [2, 4]
    assert terms.negatives[0] == [1, 3]
    pair = terms.pairs[0, 2]
    assert pair.members == (1, 2, 3, 4)
    denominator = sum(math.exp(terms.logits[0][a]) for a in pair.members)
    assert math.exp(pair.log_denominator) == pytest.approx(denominator, rel=1e-14)
    assert pair.value == pytest.approx(-math.log(math.exp(pair.log_numerator) / denominator), rel=1e-14)
    assert pair.value == pytest.approx(-math.log(pair.numerator / pair.denominator), rel=1e-13)
    assert terms.anchor_losses[0] == pytest.approx((pair.value + terms.pairs[0, 4].value) / 2, rel=1e-15)
    assert result.loss == pytest.approx(sum(terms.anchor_losses.values()) / 5, rel=1e-15)
    assert terms.counted == [0, 1, 2, 3, 4]


def test_three_denominators_give_three_losses() -> None:
    values = {
        d: reference.supcon_loss(ROWS, LABELS, denominator=d).loss for d in ("all", "one_positive", "only_negatives")
    }
    assert len({round(v, 9) for v in values.values()}) == 3
    pairwise = reference.nt_xent_pairwise_loss(ROWS, LABELS).loss
    assert values["one_positive"] == pytest.approx(pairwise, rel=1e-15)


def test_anchors_without_positives_follow_the_policy() -> None:
    labels = [0, 0, 1, 2, 2]
    each = reference.supcon_loss(ROWS, labels, reduction="none").loss
    assert len(each) == 5
    assert each[2] == 0
    assert reference.supcon_loss(ROWS, labels).loss == pytest.approx(sum(each) / 5, rel=1e-15)
    assert reference.supcon_loss(ROWS, labels, no_positive="drop").loss == pytest.approx(sum(each) / 4, rel=1e-15)
    assert math.isnan(reference.supcon_loss(ROWS, labels, no_positive="nan").loss)
    assert len(reference.supcon_loss(ROWS, labels, no_positive="drop", reduction="none").loss) == 4


def test_mean_over_no_anchors_is_zero() -> None:
    for options in ({"anchors": np.zeros(5, dtype=bool)}, {"no_positive": "drop"}):
        labels = LABELS if "anchors" in options else [0, 1, 2, 3, 4]
        assert reference.supcon_loss(ROWS, labels, **options).loss == 0
    assert reference.nt_xent_pairwise_loss(ROWS, [0, 1, 2, 3, 4], reduction="mean_pairs").loss == 0


def test_base_temperature_scales_the_loss() -> None:
    plain = reference.supcon_loss(ROWS, LABELS, temperature=0.1)
    scaled = reference.supcon_loss(ROWS, LABELS, temperature=0.1, base_temperature=0.07)
    assert scaled.loss == pytest.approx(plain.loss * 0.1 / 0.07, rel=1e-14)
    assert scaled.terms.anchor_losses[3] == pytest.approx(plain.terms.anchor_losses[3] * 0.1 / 0.07, rel=1e-14)


def test_layouts_of_views_give_the_same_loss() -> None:
    assert reference.interleaved_partners(6).tolist() == [1, 0, 3, 2, 5, 4]
    assert reference.stacked_partners(6).tolist() == [3, 4, 5, 0, 1, 2]
    features = np.arange(24.0).reshape(3, 2, 4)
    for layout in ("stacked", "interleaved"):
        flat = reference.flatten_views(features, layout)
        assert np.array_equal(reference.split_views(flat, 2, layout), features)
        labels = reference.repeat_labels([5, 6, 7], 2, layout)
        partners = reference.stacked_partners(6) if layout == "stacked" else reference.interleaved_partners(6)
        assert [labels[p] for p in partners] == labels.tolist()
        by_label = reference.nt_xent_pairwise_loss(flat, labels).loss
        assert reference.nt_xent_loss(flat, partners).loss == pytest.approx(by_label, rel=1e-14)
    assert np.array_equal(reference.flatten_views(features)[:3], features[:, 0])


CASES = [
    Case("a", "supcon", ROWS, {"labels": LABELS}, {"temperature": 0.3}),
    Case("b", "supcon_in", ROWS, {"labels": LABELS}, {"denominator": "one_positive", "base_temperature": 0.07}),
    Case("c", "nt_xent", ROWS[:4], {"partners": [2, 3, 0, 1]}, {"similarity": "dot"}),
    Case("d", "nt_xent_pairwise", ROWS, {"labels": [0, 0, 0, 1, 1]}, {"reduction": "mean_pairs"}),
    Case("e", "nt_bxent", ROWS, {"positive_pairs": [[0, 1], [3, 2]]}, {"reduction": "none"}),
    Case("f", "supcon_epsilon", ROWS, {"labels": LABELS}, {"temperature": 0.2}),
    Case(
        "g",
        "supcon",
        ROWS,
        {"labels": LABELS, "ref_labels": [0, 1, 1, 0], "self_rows": [-1, 2, -1, 0, -1]},
        {"temperature": 0.3},
        others={"ref_embeddings": ROWS[1:] * 0.75 + 0.125},
    ),
    Case(
        "h",
        "info_nce",
        ROWS[:4],
        {},
        {"temperature": 0.3},
        others={"embeddings_b": ROWS[1:] * 0.75 + 0.125, "negatives": ROWS[:2] + 0.25},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.loss}-{c.id}")
def test_complex_step_equals_the_gradient_over_balls(case: Case) -> None:
    true = truth(case)
    assert true.gradient is not None
    stepped = complex_step(case)
    assert stepped.keys() == case.matrices.keys()
    for name, gradient in {case.first: true.gradient, **true.other_gradients}.items():
        assert np.abs(gradient).max() > 1e-3
        np.testing.assert_allclose(stepped[name], gradient, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.loss}-{c.id}")
def test_differences_approach_the_gradient(case: Case) -> None:
    """An independent evaluation of the derivative, which shares no code with the tape."""
    true = truth(case)
    assert true.gradient is not None
    step = 1e-6
    for i, d in [(0, 0), (2, 1), (3, 2)]:

        def value(shift: float, i: int = i, d: int = d) -> float:
            moved = case.embeddings.copy()
            moved[i, d] += shift
            return math.fsum(truth(replace(case, embeddings=moved)).values)

        assert (value(step) - value(-step)) / (2 * step) == pytest.approx(true.gradient[i, d], rel=1e-5, abs=1e-8)


@pytest.mark.parametrize(
    "module", [reference.supcon, reference.nt_xent, reference.nt_bxent, reference.info_nce, reference.views]
)
def test_docstring_examples_run(module: Any) -> None:
    failed, attempted = doctest.testmod(module)
    assert (failed, attempted > 0) == (0, True)


def test_balls_remain_narrow() -> None:
    rows: Any = np.array([[arb(x) for x in row] for row in ROWS.tolist()], dtype=object)
    loss = reference.supcon_loss(rows, LABELS).loss
    assert loss.rel_accuracy_bits() > 30
    assert (
        loss.contains(arb(reference.supcon_loss(ROWS, LABELS).loss))
        or abs(float(loss) - reference.supcon_loss(ROWS, LABELS).loss) < 1e-14
    )
