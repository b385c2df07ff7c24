"""The bounds allow the rounding errors that every straightforward implementation has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pairproof.conformance import check_loss
from pairproof.conformance.judge.results import Status
from pairproof.conformance.judge.verify import load_cases
from pairproof.conformance.suite.levels import Level
from pairproof.conformance.truth.baseline import plain_outcome
from pairproof.conformance.truth.compare import compare
from pairproof.conformance.truth.evaluate import stored_truth
from pairproof.conformance.truth.rounding import FOLDED
from pairproof.conformance.truth.tolerances import bounds, unit_roundoff

pytestmark = pytest.mark.usefixtures("proved_once")

NORMS = {"tiny-norms", "huge-norms", "near-overflow", "mixed-norms"}
"""Flags of cases in which a norm may be clamped or overflow."""

UNSUPPORTED = {"usage/zero-row", "usage/labels-column", "usage/float16-long-rows"}
"""Inputs that some functions below are not written for: a norm of zero, labels of shape [N, 1], and rows of float16
whose squared norm overflows."""


def similar(embeddings: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The logits, and the mask of the self pairs."""
    rows = F.normalize(embeddings, dim=1)
    return rows @ rows.T / temperature, torch.eye(len(rows), dtype=torch.bool)


def with_cross_entropy(embeddings: Tensor, partners: Tensor, temperature: float = 0.07) -> Tensor:
    logits, own = similar(embeddings, temperature)
    return F.cross_entropy(logits.masked_fill(own, -torch.inf), partners)


def with_gather(embeddings: Tensor, partners: Tensor, temperature: float = 0.07) -> Tensor:
    logits, own = similar(embeddings, temperature)
    positive = logits.gather(1, partners[:, None]).squeeze(1)
    return (logits.masked_fill(own, -torch.inf).logsumexp(dim=1) - positive).mean()


def with_log_softmax(embeddings: Tensor, labels: Tensor, temperature: float = 0.07) -> Tensor:
    logits, own = similar(embeddings, temperature)
    logs = logits.masked_fill(own, -torch.inf).log_softmax(dim=1)
    positive = (labels[:, None] == labels) & ~own
    return (-logs.masked_fill(~positive, 0).sum(dim=1) / positive.sum(dim=1).clamp(min=1)).mean()


def with_einsum(embeddings: Tensor, labels: Tensor, temperature: float = 0.07) -> Tensor:
    rows = embeddings / torch.einsum("id,id->i", embeddings, embeddings).sqrt()[:, None]
    logits = torch.einsum("id,jd->ij", rows, rows) / temperature
    own = torch.eye(len(rows), dtype=torch.bool)
    positive = (labels[:, None] == labels) & ~own
    number = positive.sum(dim=1)
    mean = torch.einsum("ij,ij->i", logits, positive.to(logits.dtype)) / number.clamp(min=1)
    each = logits.masked_fill(own, -torch.inf).logsumexp(dim=1) - mean
    return torch.where(number > 0, each, 0).mean()


def of_pairs(own: Tensor, positive_pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the masks of positives and of negatives."""
    positive = torch.zeros_like(own)
    positive[positive_pairs[:, 0], positive_pairs[:, 1]] = True
    positive &= ~own
    return positive, ~positive & ~own


def with_binary_cross_entropy(embeddings: Tensor, positive_pairs: Tensor, temperature: float = 0.07) -> Tensor:
    logits, own = similar(embeddings, temperature)
    positive, negative = of_pairs(own, positive_pairs)
    each = F.binary_cross_entropy_with_logits(logits, positive.to(logits.dtype), reduction="none")
    attracted = (each * positive).sum(dim=1) / (positive.sum(dim=1) + 1)
    repelled = (each * negative).sum(dim=1) / negative.sum(dim=1).clamp(min=1)
    return (attracted + repelled).mean()


def with_softplus(embeddings: Tensor, positive_pairs: Tensor, temperature: float = 0.07) -> Tensor:
    logits, own = similar(embeddings, temperature)
    positive, negative = of_pairs(own, positive_pairs)
    attracted = (F.softplus(-logits) * positive).sum(dim=1) / (positive.sum(dim=1) + 1)
    repelled = (F.softplus(logits) * negative).sum(dim=1) / negative.sum(dim=1).clamp(min=1)
    return (attracted + repelled).mean()


def with_numpy(embeddings: Any, labels: Any, temperature: float = 0.07) -> Any:
    rows = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    logits = rows @ rows.T / rows.dtype.type(temperature)
    np.fill_diagonal(logits, -np.inf)
    largest = logits.max(axis=1, keepdims=True)
    logs = logits - (largest + np.log(np.exp(logits - largest).sum(axis=1, keepdims=True)))
    positive = labels[:, None] == labels
    np.fill_diagonal(positive, False)
    number = np.maximum(positive.sum(axis=1), 1).astype(rows.dtype)
    return -(np.where(positive, logs, 0).sum(axis=1, dtype=rows.dtype) / number).mean()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("chosen", "least"),
    [
        (("golden/*/s[ao]*", "golden/*/[tu]*", "fresh-0-?"), 30),
        pytest.param((), 100, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("function", "loss", "arrays"),
    [
        pytest.param(with_cross_entropy, "nt_xent", "torch", marks=pytest.mark.slow),
        pytest.param(with_gather, "nt_xent", "torch", marks=pytest.mark.slow),
        pytest.param(with_log_softmax, "supcon", "torch", marks=pytest.mark.slow),
        pytest.param(with_einsum, "supcon", "torch", marks=pytest.mark.slow),
        (with_binary_cross_entropy, "nt_bxent", "torch"),
        (with_numpy, "supcon", "numpy"),
    ],
)
@pytest.mark.quick(1)
def test_straightforward_implementation_passes_every_case_with_ordinary_norms(
    function: Callable[..., Any], loss: str, arrays: str, chosen: tuple[str, ...], least: int
) -> None:
    checked = check_loss(function, loss=loss, arrays=arrays, seed=0, cases=chosen)
    judged = [check for check in checked.judged if check.case not in UNSUPPORTED]
    ordinary = [check for check in judged if NORMS.isdisjoint(check.flags)]
    if function is with_binary_cross_entropy:
        # sigmoid(logit) - 1 loses its digits there, which is a failure at the level digits, and at no lower one.
        fitted = [check for check in ordinary if "fitted-pairs" in check.flags]
        assert {check.level for check in fitted} <= {Level.DIGITS}
        ordinary = [check for check in ordinary if check not in fitted]
    assert len(ordinary) > least
    assert {
        (check.case, check.dtype, check.message) for check in ordinary if check.status is not Status.PASSED
    } == set()


def test_softplus_of_torch_conforms_with_findings_above_the_required_level() -> None:
    """``F.softplus`` is the identity above 20, which is an error of 2e-9. The baseline does not have this error."""
    checked = check_loss(with_softplus, loss="nt_bxent", cases=("golden/*/trained-like*", "golden/*/shape-3*"))
    assert checked.verdict == "conforms"
    assert {check.dtype for check in checked.failures_above} == {"float64"}
    cases = {case.id: (case, golden) for case, golden in load_cases([], ("nt_bxent",)).items()}
    case, golden = cases["golden/nt_bxent/trained-like-tau-0-03"]
    assert golden is not None
    true = stored_truth(case, golden.expected)
    plain = plain_outcome(case, "float64")
    assert compare(case, true, plain, bounds(case, true, "float64")).ratio <= 1


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        *(("supcon", name) for name in ("trained-like-tau-0-05", "collapsed-classes-default", "solved-pairs")),
        *(("nt_bxent", name) for name in ("trained-like-tau-0-05", "solved-pairs")),
        *(("info_nce", name) for name in ("trained-like", "solved", "identical-queue")),
    ],
)
def test_bounds_allow_a_few_roundings_of_the_size_of_a_logit(loss: str, name: str) -> None:
    """Beyond the errors of the similarities, the bound allows a few roundings of the size 1/temperature, not more."""
    cases = {case.id: (case, golden) for case, golden in load_cases([], (loss,)).items()}
    case, golden = cases[f"golden/{loss}/{name}"]
    assert golden is not None
    true = stored_truth(case, golden.expected)
    for dtype in ("float64", "float32"):
        found = bounds(case, true, dtype)
        # A similarity has its own error, and that of the division by the temperature.
        divided = FOLDED * unit_roundoff(dtype) * np.abs(true.similarity)
        inherited = (np.abs(true.weights) * (found.similarity() + divided)).sum()
        own = (found.values[0] - inherited) / unit_roundoff(dtype) - 2 * abs(golden.expected.values[0])
        # The logits of k positives are added with k - 1 roundings of this size.
        roundings = 3 + max(map(len, case.positives()))
        assert 0.3 / case.temperature < own < roundings / case.temperature + 8 * np.log(case.n)
