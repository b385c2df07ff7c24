"""Losses whose formula takes weights that are functions of the similarities: with and without their derivative."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from pairproof.conformance.implementations.reference import complex_step
from pairproof.conformance.suite.cases import Case, call_reference
from pairproof.conformance.suite.catalogue import COMMON, Loss, Weights, registered
from pairproof.conformance.truth.baseline import plain_outcome, plain_weights
from pairproof.conformance.truth.certify import certify
from pairproof.conformance.truth.evaluate import sensitivity_of, truth
from pairproof.reference.batch import evaluate
from pairproof.reference.scalars import detached, log_sum_exp
from pairproof.reference.terms import cross_entropy

Tensor = torch.Tensor


def harder_weights(similarity: Any, P: Any, N: Any, *, alpha: float) -> Any:  # noqa: N803
    """e^(alpha (similarity - the mean similarity of all positives)) for each negative, and 1 for each positive."""
    positives = [similarity[i][p] for i, chosen in enumerate(P) for p in chosen]
    mean = sum(positives) / len(positives)
    return [
        [np.exp(alpha * (s - mean)) if k in N[i] else 1 + 0 * s for k, s in enumerate(row)]
        for i, row in enumerate(similarity)
    ]


def harder_anchor(s: Any, i: int, A: Any, P: Any, N: Any, *, weights: Any) -> Any:  # noqa: N803
    """Cross-entropy of the positive, each exponential multiplied by its weight."""
    (p,) = P
    weighted = [x + np.log(w) for x, w in zip(s, weights, strict=True)]
    return log_sum_exp([weighted[a] for a in A]) - s[p], [cross_entropy(s, i, p, A)]


def harder_loss(embeddings: Any, partners: Any, *, alpha: float = 1.5, **options: Any) -> Any:
    return evaluate(
        harder_anchor,
        embeddings,
        partners=partners,
        weights=partial(harder_weights, alpha=alpha),
        **{"similarity": "cosine", "base_temperature": None, **options},
    )


def harder_weights_in_torch(similarity: Tensor, member: Tensor, positive: Tensor, *, alpha: float) -> Tensor:
    return (alpha * (similarity - similarity[positive].mean())).exp().where(member & ~positive, 1.0)


def harder_baseline(logits: Tensor, member: Tensor, positive: Tensor, *, weights: Tensor) -> Tensor:
    total = (logits.exp() * weights).where(member, 0.0).sum(dim=1)
    return total.log() - logits.where(positive, 0.0).sum(dim=1)


HARDER = Loss(
    name="harder",
    module="harder",
    source="a test",
    positives_by="partners",
    keywords={**COMMON, "alpha": 1.5, "detach_weights": True, "anchors": None, "ref_embeddings": None},
    baseline=harder_baseline,
    weights=Weights(harder_weights_in_torch, ("alpha",)),
    functions={"reference": harder_loss, "formula": harder_anchor, "weights": harder_weights},
)
ROWS = np.random.default_rng(5).integers(-9, 9, (6, 3)) / 4 + 0.125
PARTNERS = [3, 4, 5, 0, 1, 2]


@pytest.fixture(autouse=True)
def catalogue() -> Iterator[None]:
    with registered(HARDER):
        yield


def case_of(detach: bool, **keywords: Any) -> Case:
    arguments: dict[str, Any] = {"partners": PARTNERS}
    return Case("harder/case", "harder", ROWS, arguments, {"detach_weights": detach, "temperature": 0.5, **keywords})


def value(rows: Any, weighted_by: Any, case: Case) -> float:
    """The sum of the losses, written out, with the weights of the rows ``weighted_by``."""

    def cosines(given: Any) -> Any:
        unit = given / np.linalg.norm(given, axis=1, keepdims=True)
        return unit @ unit.T

    c, old, total = cosines(rows), cosines(weighted_by), 0.0
    mean = np.mean([old[i, p] for i, p in enumerate(PARTNERS)])
    chosen = case.option("anchors") or [True] * 6
    for i, p in enumerate(PARTNERS):
        negatives = [k for k in range(6) if k not in (i, p)]
        terms = [math.exp(1.5 * (old[i, k] - mean) + c[i, k] / 0.5) for k in negatives]
        total += chosen[i] * (math.log(math.exp(c[i, p] / 0.5) + sum(terms)) - c[i, p] / 0.5)
    return total / (sum(chosen) if case.option("reduction") == "mean" else 1)


def quotients(case: Case, detach: bool) -> Any:
    """Central differences of ``value``; with ``detach``, the weights are those of the rows that are not moved."""
    found = np.zeros_like(ROWS)
    for place in np.ndindex(ROWS.shape):
        step = np.zeros_like(ROWS)
        step[place] = 1e-6
        ends = [value(z, ROWS if detach else z, case) for z in (ROWS + step, ROWS - step)]
        found[place] = (ends[0] - ends[1]) / 2e-6
    return found


def some_cases() -> Sequence[dict[str, Any]]:
    return {}, {"reduction": "sum"}, {"anchors": [True, False, True, True, False, True]}, {"reduction": "none"}


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("keywords", some_cases())
def test_every_gradient_is_that_of_constant_or_of_variable_weights(keywords: dict[str, Any], detach: bool) -> None:
    case = case_of(detach, **keywords)
    expected = quotients(case, detach)
    assert not np.allclose(expected, quotients(case, not detach), atol=1e-3)
    close = partial(np.testing.assert_allclose, desired=expected, atol=1e-8)
    close(certify(case).gradient)
    close(truth(case).gradient)
    close(complex_step(case)["embeddings"])
    close(plain_outcome(case, "float64").gradient)


@pytest.mark.parametrize("detach", [True, False])
def test_derivatives_by_similarities_equal_those_of_the_baseline(detach: bool) -> None:
    case = case_of(detach)
    np.testing.assert_allclose(sensitivity_of(case), plain_weights(case), atol=1e-12)
    np.testing.assert_allclose(truth(case).weights, plain_weights(case), atol=1e-12)


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("base_temperature", [None, 0.2])
def test_weights_do_not_depend_on_the_temperature(detach: bool, base_temperature: float | None) -> None:
    case = case_of(detach, base_temperature=base_temperature)
    ends = [call_reference(case, temperature=0.5 + step).loss for step in (1e-6, -1e-6)]
    assert certify(case).temperature_gradient == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-8)


def test_value_does_not_depend_on_whether_weights_are_constants() -> None:
    assert (
        certify(case_of(True)).loss == certify(case_of(False)).loss == pytest.approx(value(ROWS, ROWS, case_of(True)))
    )


def test_detached_scalars_have_no_derivative() -> None:
    assert detached(1.5) == 1.5
    assert detached(complex(2, 3)) == 2
    assert detached(np.array([1 + 2j, 3.0])).tolist() == [1, 3]
