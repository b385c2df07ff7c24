"""The diagnosis of ``pairproof check`` names mistakes that were found in public code."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from pairproof import fast
from pairproof.conformance import report
from pairproof.conformance.diagnose.explain import Diagnosis, Known, Observation, Reason, explain, proposed, redraw
from pairproof.conformance.diagnose.identify import identify
from pairproof.conformance.diagnose.search import Match, _levels, drawn
from pairproof.conformance.diagnose.suspects import CANCELLED, HIDDEN, OVERFLOW, UNDERFLOW, Failure, not_finite
from pairproof.conformance.diagnose.variants import QUEUE_NOT_NORMALISED, SIMILARITIES, Variant, variant_of
from pairproof.conformance.implementations.callable import External
from pairproof.conformance.implementations.child import PRINTED
from pairproof.conformance.judge.check import CheckResult, check_loss
from pairproof.conformance.judge.fresh import draw_training
from pairproof.conformance.judge.results import Status
from pairproof.conformance.judge.suggest import suggested
from pairproof.conformance.suite.cases import Case
from pairproof.conformance.suite.catalogue import LOSSES
from pairproof.conformance.suite.golden import load_golden
from pairproof.conformance.suite.levels import Level
from pairproof.conformance.suite.records import Outcome
from pairproof.conformance.truth.evaluate import truth

sys.path.insert(0, str(Path(__file__).parent / "targets"))
import public_mistakes as public
import published
import readings

SOME = ("golden/{}/[a-dlu]*", "golden/{}/shape-[3-8]-*")
TABLE = [
    ("divided_by_positives_plus_1", "supcon", "the sum over the positives is divided by their number plus 1", ""),
    (
        "divided_by_2b_minus_2",
        "nt_xent",
        "the sum over the anchors is divided by their number minus 2: by 2(B - 1)",
        "",
    ),
    (
        "own_positive",
        "supcon",
        "the anchor itself is counted among its positives; the anchor itself is kept in the",
        "",
    ),
    (
        "sums_inside",
        "supcon_in",
        "the ratios are summed inside the logarithm, not averaged: 1/|P| is missing",
        "inside_reduction=sum",
    ),
    ("views_mixed_up", "supcon", "labels are repeated for stacked views, but views are interleaved", ""),
    ("interleaved", "nt_xent", "stacked views are read as interleaved", ""),
    (
        "weighted_directions",
        "info_nce",
        "the directions a_to_b and b_to_a have the weights 0.3 and 0.7, not 1/2 each",
        "direction_weights=0.3,0.7",
    ),
    ("epsilon", "supcon", "an epsilon of 1e-08 is added to the denominator after the row's maximum is subtracted", ""),
    ("epsilon_of_count", "supcon", "an epsilon of 1e-05 is added to the number of positives", ""),
    ("half_inside", "supcon", "the formula is right, but the target computes in float16 for inputs of every dtype", ""),
    (
        "bfloat16_inside",
        "nt_xent",
        "the formula is right, but the target computes in bfloat16 for inputs of every dtype",
        "",
    ),
    ("bfloat16_products", "supcon", "cosines are computed in bfloat16", ""),
    ("float16_logits", "supcon", "cosines are computed and divided by the temperature in float16", ""),
    ("policy_nan", "supcon", "anchors without positives make the loss NaN", "no_positive=nan"),
    ("policy_drop", "supcon", "anchors without positives are left out of the mean", "no_positive=drop"),
    ("times_base", "supcon", "values are multiplied by temperature/0.07", "base_temperature=0.07"),
    ("positive_out_of_denominator", "supcon", "the denominator lacks the positives", "denominator=only_negatives"),
    (
        "subtracts_self_in_float32",
        "nt_xent",
        "e^(1/temperature), rounded to float32, is subtracted to remove the anchor, so that digits are lost",
        "",
    ),
    (
        "decoupled_one_way",
        "nt_xent",
        "only rows of the first view are anchors; the denominator lacks the positives",
        "",
    ),
    ("times_2t", "info_nce", "values are multiplied by temperature/0.5", "base_temperature=0.5"),
    ("directions_added", "info_nce", "the values of both directions are added, not averaged", ""),
    ("views_added", "nt_xent", "the means over the two views are added, not averaged", ""),
]
FAST = {
    "divided_by_positives_plus_1",
    "weighted_directions",
    "policy_nan",
    "subtracts_self_in_float32",
}
OPTIONS: dict[str, dict[str, object]] = {
    "subtracts_self_in_float32": {"normalised": True},
    "decoupled_one_way": {"normalised": True},
    "times_2t": {"settings": {"direction": "a_to_b"}},
}


def checked(name: str, loss: str, *cases: str, **options: object) -> CheckResult:
    chosen = tuple(case.format(loss) for case in cases)
    return check_loss(getattr(public, name), loss, cases=chosen, seed=1, **options)  # type: ignore[arg-type]


pytestmark = pytest.mark.usefixtures("in_this_process")


@pytest.mark.parametrize(
    ("name", "loss", "words", "setting"),
    [pytest.param(*row, marks=() if row[0] in FAST else pytest.mark.slow) for row in TABLE],
)
@pytest.mark.quick(1)
def test_first_reason_is_the_mistake(name: str, loss: str, words: str, setting: str) -> None:
    cases = ("golden/{}/*",) if name == "times_2t" else SOME
    result = checked(name, loss, *cases, **OPTIONS.get(name, {}))
    (reason, *_), found = result.diagnosis.reasons, result.diagnosis
    assert reason.words.startswith(words)
    assert reason.setting == setting
    assert found.unexplained <= 0.1 * found.failing
    assert len(reason.cases) >= 0.6 * found.failing
    assert f"explains {len(reason.cases)} of {found.failing} failing cases" in found.sentences()[0]
    assert reason.words in result.summary


def crossed(z_i: torch.Tensor, z_j: torch.Tensor, temperature: float = 0.5) -> torch.Tensor:
    """The stacked views against the swapped ones: the positives are on the diagonal, and the anchor is not."""
    rows = torch.nn.functional.normalize(torch.cat([z_i, z_j]), dim=1)
    logits = rows @ rows.roll(len(z_i), dims=0).T / temperature
    others = logits.masked_fill(torch.eye(len(rows), dtype=torch.bool), -torch.inf)
    return (others.logsumexp(dim=1) - logits.diagonal()).mean()


@pytest.mark.slow
def test_both_differences_of_a_denominator_are_named() -> None:
    found = check_loss(crossed, "nt_xent", cases=("golden/nt_xent/[a-d]*",), seed=1)
    assert found.diagnosis.reasons[0].words == (
        "the anchor itself is kept in the denominator; the denominator lacks the positives"
    )


def test_products_that_are_exact_are_not_said_to_be_rounded() -> None:
    """Two mistakes at once: raw dot products, and one direction. Many stored rows have products exact in bfloat16."""
    result = checked("raw_products_one_way", "info_nce", "golden/{}/[a-d]*")
    (reason,) = result.diagnosis.reasons
    assert reason.words == "the target computes info_nce with similarity=dot, direction=a_to_b"
    assert reason.intended == "--loss info_nce --set similarity=dot --set direction=a_to_b"
    assert result.diagnosis.unexplained == 0


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda loss: loss * math.nan, "the loss is NaN for every batch"),
        (lambda loss: 0 * loss + 1.5, "the loss is the constant 1.5 for every batch"),
        slow(
            lambda loss: loss * math.inf,
            "the loss is infinite for every batch"
            " (often because a positive, such as the self pair, is masked with -inf)",
        ),
        slow(lambda loss: 0 * loss, "the loss is the constant 0 for every batch"),
        slow(lambda loss: -loss, "values have the wrong sign"),
        slow(lambda loss: loss.detach() + 0 * loss, "the value is right, but the gradient is 0"),
    ],
)
def test_loss_without_information_is_described(change: Callable[[torch.Tensor], torch.Tensor], words: str) -> None:
    def target(embeddings: torch.Tensor, labels: torch.Tensor, temperature: float = 0.07) -> torch.Tensor:
        return change(fast.supcon_loss(embeddings, labels, temperature=temperature))

    cases = ("golden/supcon/shape-[3-8]-*", "golden/supcon/lonely*", "golden/supcon/two-positives")
    (reason,) = check_loss(target, "supcon", cases=cases, fuzz=0).diagnosis.reasons
    assert reason.words == words


@pytest.mark.slow
def test_loss_is_not_called_constant_if_a_passing_case_has_another_value() -> None:
    def target(embeddings: torch.Tensor, labels: torch.Tensor, temperature: float = 0.07) -> torch.Tensor:
        right = fast.supcon_loss(embeddings, labels, temperature=temperature)
        return right if len(embeddings) < 6 else 0 * right

    cases = ("golden/supcon/shape-[3-8]-*", "golden/supcon/two-positives", "golden/supcon/labels-*")
    result = check_loss(target, "supcon", cases=cases, fuzz=0)
    assert result.diagnosis.failing > 2
    assert [reason.words for reason in result.diagnosis.reasons] == ["the loss is 0"]


@pytest.mark.parametrize(
    ("loss", "claim", "options", "intended"),
    [
        ("supcon_in", "supcon", {}, "--loss supcon_in"),
        slow("supcon_in", "supcon", {"inside_reduction": "sum"}, "--loss supcon_in --set inside_reduction=sum"),
        slow("supcon", "supcon_in", {}, "--loss supcon"),
        slow("nt_xent_pairwise", "supcon", {}, "--set denominator=one_positive"),
    ],
)
def test_another_loss_of_the_catalogue_is_named(
    loss: str, claim: str, options: dict[str, object], intended: str
) -> None:
    def target(embeddings: torch.Tensor, labels: torch.Tensor, temperature: float = 0.07) -> torch.Tensor:
        right: torch.Tensor = getattr(fast, f"{loss}_loss")(embeddings, labels, temperature=temperature, **options)
        return right

    cases = tuple(f"golden/{claim}/{name}" for name in ("shape-[3-8]-*", "two-positives", "labels-*"))
    found = check_loss(target, claim, cases=cases, fuzz=0).diagnosis
    assert f"{found.reasons[0].words} (if intended: {intended}): explains" in found.sentences()[0]


def test_dcl_of_two_views_is_named_as_a_loss_of_labels() -> None:
    def dcl(view_a: torch.Tensor, view_b: torch.Tensor, temperature: float = 0.1) -> torch.Tensor:
        rows, items = torch.cat([view_a, view_b]), torch.arange(len(view_a)).repeat(2)
        return fast.supcon_loss(rows, items, denominator="only_negatives", temperature=temperature)

    (reason,) = check_loss(dcl, "nt_xent", cases=("golden/nt_xent/two-views-*",), fuzz=0).diagnosis.reasons
    assert reason.words == "the denominator lacks the positives"
    assert reason.intended == "--loss supcon --set denominator=only_negatives"


def supcon_with(
    divisor: float = 1.0,
    *,
    own: bool = False,
    detached: bool = False,
    epsilon: float = 0.0,
    mean: bool = False,
    more: int = 0,
    pairs: bool = False,
    twice: bool = False,
) -> Callable[..., torch.Tensor]:
    """SupCon with some of these mistakes."""

    def target(embeddings: torch.Tensor, labels: torch.Tensor, temperature: float = 0.1) -> torch.Tensor:
        rows = torch.nn.functional.normalize(embeddings, dim=1)
        diagonal = torch.eye(len(rows), dtype=torch.bool)
        logits = rows @ (rows.detach() if detached else rows).T / temperature ** (2 if twice else 1)
        others = logits if own else logits.masked_fill(diagonal, -torch.inf)
        below = torch.logaddexp(others.logsumexp(dim=1, keepdim=True), torch.tensor(epsilon).double().log())
        below = below - math.log(len(rows) - 1) if mean else below
        positives = (labels[:, None] == labels) & ~diagonal
        number, sums = positives.sum(dim=1), ((below - logits) * positives).sum(dim=1)
        value = sums.sum() / number.sum() if pairs else (sums / (number + more).clamp(min=1)).mean()
        return value / divisor

    return target


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "words"),
    [
        slow(
            supcon_with(twice=True, more=1),
            "the temperature is applied twice; the sum over the positives is divided by their number plus 1",
        ),
        slow(
            supcon_with(own=True, pairs=True),
            "the anchor itself is kept in the denominator; the mean is over the positive pairs, not over the anchors",
        ),
        slow(
            supcon_with(epsilon=1e-3, detached=True),
            "an epsilon of 1e-03 is added to the denominator; "
            "no gradient flows into the rows that anchors are contrasted with",
        ),
        (supcon_with(0.5, mean=True), "the denominator is a mean, not a sum; values are 2 times too large"),
    ],
)
def test_both_of_two_mistakes_are_named(target: Callable[..., torch.Tensor], words: str) -> None:
    cases = tuple(f"golden/supcon/{name}" for name in ("shape-[3-8]-*", "two-positives", "labels-*", "unbalanced-*"))
    found = check_loss(target, "supcon", cases=cases, fuzz=0).diagnosis
    assert found.reasons[0].words == words
    assert found.unexplained <= 0.1 * found.failing


def test_factor_of_a_loss_of_one_direction_is_named() -> None:
    def target(a: torch.Tensor, b: torch.Tensor, temperature: float = 0.1) -> torch.Tensor:
        return 2 * fast.info_nce_loss(a, b, temperature=temperature, direction="a_to_b")

    found = check_loss(target, "info_nce", call="views", cases=("golden/info_nce/[a-d]*",), fuzz=0).diagnosis
    assert found.reasons[0].words == "the anchors are only the rows of the first tower; values are 2 times too large"
    assert found.unexplained == 0


def test_sum_of_one_direction_times_a_power_of_the_temperature_is_named() -> None:
    # At temperature 1 the power is 1, and pairproof swaps the towers for b_to_a and averages both directions.
    def target(q: torch.Tensor, k: torch.Tensor, queue: torch.Tensor, temperature: float = 0.1) -> torch.Tensor:
        given: Any = {"negatives": queue, "direction": "a_to_b", "reduction": "sum", "temperature": temperature}
        return fast.info_nce_loss(q, k, **given) / temperature

    names = ("golden/info_nce/*queue-mean", "golden/info_nce/queue-temperature-*", "golden/info_nce/*-queue")
    result = check_loss(target, "info_nce", cases=(*names, "fresh-0-*"), fuzz=30, seed=0)
    (reason,) = (found := result.diagnosis).reasons
    summed = "the values of the anchors are summed, not averaged"
    assert reason.words == f"{summed}; values are multiplied by temperature^-1"
    assert found.unexplained == 0
    assert {one.case.option("direction") for one in load_golden() if one.id in reason.cases} == {
        "a_to_b",
        "b_to_a",
        "both",
    }


def test_factor_is_not_called_a_base_temperature_if_all_cases_have_one_temperature() -> None:
    def added(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return 2 * fast.info_nce_loss(a, b, temperature=0.07)

    found = check_loss(added, "info_nce", temperature=0.07, cases=("golden/info_nce/[a-p]*",), fuzz=0).diagnosis
    assert found.reasons[0].words == "the values of both directions are added, not averaged"


@pytest.mark.parametrize(
    ("mask", "words"),
    [(0.0, "label_smoothing=0.1"), (-1e4, "label_smoothing=0.1, which also counts the self pairs, masked with -10000")],
)
def test_smoothed_targets_are_named(mask: float, words: str) -> None:
    def towers(a: torch.Tensor, b: torch.Tensor, temperature: float = 0.1) -> torch.Tensor:
        logits = torch.nn.functional.normalize(a) @ torch.nn.functional.normalize(b).T / temperature
        smoothed: Any = partial(torch.nn.functional.cross_entropy, target=torch.arange(len(a)), label_smoothing=0.1)
        return (smoothed(logits) + smoothed(logits.T)) / 2

    def views(z_i: torch.Tensor, z_j: torch.Tensor, temperature: float = 0.1) -> torch.Tensor:
        rows, n = torch.nn.functional.normalize(torch.cat([z_i, z_j])), len(z_i)
        logits = (rows @ rows.T / temperature).fill_diagonal_(mask)
        return torch.nn.functional.cross_entropy(logits, torch.arange(2 * n).roll(n), label_smoothing=0.1)

    target, loss = (views, "nt_xent") if mask else (towers, "info_nce")
    (reason,) = check_loss(target, loss, call="views", cases=(f"golden/{loss}/[a-p]*",), fuzz=0).diagnosis.reasons
    assert reason.words == f"the targets of the cross-entropy are smoothed: {words}"


@pytest.mark.slow
def test_other_number_is_named() -> None:
    def target(a: torch.Tensor, b: torch.Tensor, temperature: float = 0.1) -> torch.Tensor:
        return fast.sigmoid_loss(a, b, temperature=temperature)

    claimed = {"settings": {"bias": 0.0}, "cases": ("golden/sigmoid/[e-l]*",)}
    found = check_loss(target, "sigmoid", call="views", fuzz=0, **claimed).diagnosis
    assert found.reasons[0].words == "bias=-10 is computed"
    assert found.unexplained == 0


def observed(target: Callable[..., torch.Tensor], name: str) -> tuple[Observation, Callable[[Case, str], Outcome]]:
    """Return what a target returns for a golden case, and the function that evaluates other cases."""
    judged = External(target, loss=name.partition("/")[0])
    (golden,) = [one for one in load_golden(losses=[judged.claim.loss]) if one.case.id == f"golden/{name}"]
    outcome = judged.evaluate(golden.case, "float64")
    return Observation(golden.case, ("float64",), outcome, golden.expected), judged.evaluate


def test_mistake_explains_a_gradient_of_zero() -> None:
    def over_all_pairs(a: torch.Tensor, b: torch.Tensor, temperature: float, bias: float) -> torch.Tensor:
        return fast.sigmoid_loss(a, b, temperature=temperature, bias=bias, reduction="sum") / len(a) ** 2

    found = explain([observed(over_all_pairs, "sigmoid/identical")[0]], Known(["reduction"]))
    assert [(one.words, one.setting) for one in found.reasons] == [
        ("the mean is over the pairs, not over the anchors", "reduction=mean_pairs")
    ]


@pytest.mark.parametrize("name", ["trained-like-queue", "queue-temperature-0-01", "solved-queue"])
def test_mistake_is_found_where_a_difference_of_exponentials_would_lose_digits(name: str) -> None:
    def untempered(q: torch.Tensor, k: torch.Tensor, negatives: torch.Tensor, temperature: float) -> torch.Tensor:
        q, k, negatives = (torch.nn.functional.normalize(rows, dim=1) for rows in (q, k, negatives))
        positive = (q * k).sum(dim=1, keepdim=True)
        return (torch.cat([positive, q @ negatives.T / temperature], dim=1).logsumexp(dim=1) - positive[:, 0]).mean()

    failure, _ = observed(untempered, f"info_nce/{name}")
    assert "the temperature is not applied to the positive" in [
        one.words for one in explain([failure], Known()).reasons
    ]


def test_loss_that_is_nan_only_without_any_positive_is_described_as_such() -> None:
    def over_the_pairs(embeddings: torch.Tensor, labels: torch.Tensor, temperature: float = 0.1) -> torch.Tensor:
        positives = (labels[:, None] == labels).fill_diagonal_(False).sum(dim=1)
        values = fast.supcon_loss(embeddings, labels, temperature=temperature, reduction="none")
        return (values * positives).sum() / positives.sum()

    result = check_loss(over_the_pairs, "supcon", seed=1440177156, cases=("golden/supcon/*", "fresh-*"))
    assert [one.words for one in result.diagnosis.reasons] == [
        "the mean is over the positive pairs, not over the anchors",
        "the loss is NaN or infinite if no anchor has positives",
    ]
    assert result.diagnosis.unexplained == 0, "also where the batch has as many pairs as anchors"


def test_reason_must_hold_for_random_rows() -> None:
    """On the stored rows, which have few bits, the target returns what another mistake returns."""

    def target(embeddings: torch.Tensor, labels: torch.Tensor, temperature: float = 0.1) -> torch.Tensor:
        stored = bool((embeddings.bfloat16() == embeddings).all())
        return supcon_with(own=stored, more=1 - stored)(embeddings, labels, temperature)

    failure, evaluate = observed(target, "supcon/unbalanced-classes")
    assert [one.words for one in explain([failure], Known()).reasons] == [
        "the anchor itself is kept in the denominator"
    ]
    assert explain([failure], Known(evaluate=evaluate)).reasons == []
    (reason,) = explain([observed(supcon_with(own=True), "supcon/unbalanced-classes")[0]], Known()).reasons
    assert reason.words == "the anchor itself is kept in the denominator"


def test_reason_must_hold_at_training_size() -> None:
    def target(embeddings: torch.Tensor, labels: torch.Tensor, temperature: float = 0.1) -> torch.Tensor:
        large = len(embeddings) > 32
        return supcon_with(own=not large, more=int(large))(embeddings, labels, temperature)

    failure, evaluate = observed(target, "supcon/unbalanced-classes")
    claim = External(target, loss="supcon").claim
    known = Known(evaluate=evaluate, training=lambda: draw_training(claim, 0, 0))
    assert explain([failure], replace(known, training=lambda: None)).reasons
    assert explain([failure], known).reasons == []


def test_random_rows_tell_all_similarities_apart() -> None:
    """On the stored rows, products in bfloat16 are exact."""

    def pairs_alike(one: Observation) -> set[frozenset[str]]:
        found = {}
        for name in SIMILARITIES.keys() - {QUEUE_NOT_NORMALISED}:
            found[name] = one.failure.value(one.failure.right.other(similarity=name)).detach()
        return {frozenset(pair) for pair in combinations(found, 2) if torch.allclose(*(found[name] for name in pair))}

    failure, evaluate = observed(supcon_with(own=True), "supcon/sparse-two-classes")
    redrawn = redraw(failure.case, failure, Known(evaluate=evaluate))
    assert redrawn
    assert frozenset(("dot", "dot products are computed in bfloat16")) in pairs_alike(failure)
    assert pairs_alike(redrawn) == set()


def matched(variant: Variant, factor: float = 1.0) -> Match:
    """The identified loss of a target with a temperature argument."""
    return Match(variant, {0.5: 0.5, 0.2: 0.2}, "mean", {0.5: factor, 0.2: factor}, 0.0, ("", 0.0, 0.0), 0.0, False)


def failure_of(loss: str, arguments: dict[str, object], value: Callable[[torch.Tensor], torch.Tensor]) -> Failure:
    rows = drawn(17, [0] * 8, 0.0)
    case = Case("mine", loss, rows.numpy(), arguments, {"temperature": 0.4})
    leaf = rows.clone().requires_grad_()
    found = value(leaf)
    (gradient,) = torch.autograd.grad(found, leaf)
    return Failure(case, Outcome([found.item()], gradient.numpy()), truth(case))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda weights: None, "the weights of positives have no effect"),
        (torch.square, "the weights of positives are applied twice"),
    ],
)
def test_mistake_with_weights_is_named(change: Callable[[torch.Tensor], torch.Tensor | None], words: str) -> None:
    """The variants have no weights, so none of them can be the reason."""

    def target(
        embeddings: torch.Tensor,
        labels: torch.Tensor,
        positive_weights: torch.Tensor | None = None,
        temperature: float = 0.07,
    ) -> torch.Tensor:
        weights = None if positive_weights is None else change(positive_weights)
        return fast.supcon_loss(embeddings, labels, positive_weights=weights, temperature=temperature)

    found = check_loss(target, "supcon", cases=("golden/supcon/*weight*",), fuzz=0).diagnosis
    assert [reason.words for reason in found.reasons] == [words]
    assert found.unexplained == 0


def test_factor_beside_a_mistake_is_named() -> None:
    labels = [0, 0, 0, 1, 1, 1, 1, 2]

    def doubled_mean(rows: torch.Tensor) -> torch.Tensor:
        right = fast.supcon_loss(rows, torch.tensor(labels), temperature=0.4)
        return 2 * (right - math.log(7) * 7 / 8)  # one of 8 anchors has no positives

    variant = replace(variant_of(LOSSES["supcon"], {}), denominator="all, mean")
    failure = failure_of("supcon", {"labels": labels}, doubled_mean)
    words, suspect = proposed(matched(variant, 2.0), failure) or ("", failure.right)
    assert failure.remaining(suspect) < math.inf
    assert words == "the denominator is a mean, not a sum; values are 2 times too large"


def test_what_is_claimed_is_no_reason_but_another_temperature_is() -> None:
    labels = [0, 0, 0, 1, 1, 1, 1, 2]
    failure = failure_of("supcon", {"labels": labels}, lambda z: fast.supcon_loss(z, torch.tensor(labels)))
    identified = matched(variant_of(LOSSES["supcon"], {}))
    assert proposed(identified, failure) is None
    for temperatures in ({0.5: 0.07, 0.2: 0.07}, {None: 0.070000001}):
        factor = dict.fromkeys(temperatures, 1.0)
        words, suspect = proposed(replace(identified, temperatures=temperatures, factor=factor), failure) or ("", None)
        assert words == "the temperature is always 0.07, whatever is passed"
        assert suspect is not None
        assert failure.remaining(suspect) < 1e-6


class OfOneTemperature(torch.nn.Module):
    """CLIP with a learned scale. The constructor ignores the temperature that is passed."""

    def __init__(self, **_: object) -> None:
        super().__init__()
        self.logit_scale = torch.nn.Parameter(torch.tensor(1 / 0.07).log())

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return fast.info_nce_loss(a, b, temperature=1 / self.logit_scale.exp().item())


@pytest.mark.slow
def test_temperature_that_is_always_used_is_named() -> None:
    cases = ("golden/info_nce/shape-[3-9]-*", "golden/info_nce/orthogonal")
    found = check_loss(OfOneTemperature, "info_nce", cases=cases, fuzz=0, dtypes=("float64",)).diagnosis
    (reason,) = found.reasons
    assert reason.words == "the temperature is always 0.07, whatever is passed"
    assert reason.intended == "--loss info_nce --temperature 0.07"
    assert found.unexplained == 0


def test_slight_error_that_a_reason_predicts_is_explained_by_it() -> None:
    clear, slight = (
        observed(supcon_with(epsilon=1e-8), f"supcon/{name}")[0] for name in ("orthogonal", "shape-63-by-5")
    )
    words = "an epsilon of 1e-08 is added to the denominator"
    (reason,) = explain([clear, slight], Known()).reasons
    assert (reason.words, len(reason.cases)) == (words, 2)
    assert not any(words in one.words for one in explain([slight], Known()).reasons)
    other = observed(supcon_with(epsilon=1e-9), "supcon/shape-63-by-5")[0]
    assert [len(one.cases) for one in explain([clear, other], Known()).reasons] == [1]


def test_reason_must_reproduce_the_results_in_float64() -> None:
    """The self pair is removed by subtracting e, as at temperature 1. At lower temperatures, most of it is left."""

    def target(z_i: torch.Tensor, z_j: torch.Tensor, temperature: float = 0.1) -> torch.Tensor:
        rows = torch.nn.functional.normalize(torch.cat([z_i, z_j]), dim=1)
        logits, n = rows @ rows.T / temperature, len(rows)
        return ((logits.exp().sum(dim=1) - math.e).log() - logits[range(n), torch.arange(n).roll(n // 2)]).mean()

    (reason,) = explain([observed(target, "nt_xent/shape-16-by-8")[0]], Known()).reasons
    assert reason.words == "e is subtracted to remove the anchor, not e^(1/temperature)"

    def nearly(embeddings: torch.Tensor, labels: torch.Tensor, temperature: float = 0.1) -> torch.Tensor:
        return 1.002 * supcon_with(own=True)(embeddings, labels, temperature)

    for function, left in ((nearly, math.inf), (supcon_with(own=True), 0.0)):
        failure = observed(function, "supcon/orthogonal")[0].failure
        assert failure.remaining(failure.right.other(denominator="all, self")) == left


def test_gradient_that_does_not_flow_is_named_for_values_in_float32() -> None:
    """If rows are normalised before the call, the gradient is not one of float32."""

    def target(embeddings: torch.Tensor, labels: torch.Tensor, temperature: float = 0.1) -> torch.Tensor:
        return supcon_with(detached=True)(embeddings, labels, temperature).float()

    failures = [observed(target, f"supcon/{name}")[0] for name in ("two-positives", "orthogonal", "unbalanced-classes")]
    (reason,) = explain(failures, Known()).reasons
    assert reason.words == "the value is right, but no gradient flows into the rows that anchors are contrasted with"
    assert len(reason.cases) == 3


def leaks_above_and_below(embeddings: torch.Tensor, labels: torch.Tensor, temperature: float = 0.07) -> torch.Tensor:
    """Logits of the diagonal are set to 0 instead of minus infinity."""
    rows, own = torch.nn.functional.normalize(embeddings, dim=1), torch.eye(len(embeddings), dtype=torch.bool)
    logits = (rows @ rows.T / temperature).masked_fill(own, 0.0)
    alike = labels[:, None] == labels
    above, below = (logits.masked_fill(other & ~own, -torch.inf) for other in (~alike, alike))
    return (below.logsumexp(dim=1) - above.logsumexp(dim=1)).mean()


@pytest.mark.slow
def test_two_mistakes_in_another_loss_are_named() -> None:
    cases = ("golden/supcon/labels-[nu]*", "golden/supcon/two-positives", "golden/supcon/unbalanced-*")
    found = check_loss(leaks_above_and_below, "supcon", cases=cases, fuzz=0, dtypes=("float64",)).diagnosis
    assert found.unexplained == 0
    assert found.reasons[0].words == (
        "exp(0) of the diagonal leaks into the denominator; exp(0) of the diagonal leaks into the numerator, "
        "which is not divided by |P|; the denominator lacks the positives"
    )


def test_two_mistakes_in_another_loss_than_the_claimed_one_are_searched() -> None:
    *_, once, twice = _levels("labels", None, variant_of(LOSSES["supcon"], {}))
    assert {variant.loss for variant in once} == {"supcon"}
    assert {"supcon", "supcon_in"} <= {variant.loss for variant in twice}


def test_loss_of_two_towers_is_recognised_in_cases_of_partners() -> None:
    def towers(rows: torch.Tensor) -> torch.Tensor:
        return fast.info_nce_loss(rows[:4], rows[4:], temperature=0.4, direction="a_to_b")

    variant = variant_of(LOSSES["info_nce"], {"direction": "a_to_b"})
    failure = failure_of("nt_xent", {"partners": [4, 5, 6, 7, 0, 1, 2, 3]}, towers)
    identified = matched(replace(variant, positives="towers a_to_b"))
    words, suspect = proposed(identified, failure) or ("", failure.right)
    assert failure.remaining(suspect) < math.inf
    assert words == "the target computes info_nce with direction=a_to_b"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("claim", "intended"), [("nt_xent", "--loss info_nce --set direction=a_to_b"), ("info_nce", "--loss nt_xent")]
)
def test_loss_of_partners_and_loss_of_towers_are_told_apart(claim: str, intended: str) -> None:
    def one_way(z_i: torch.Tensor, z_j: torch.Tensor, temperature: float = 0.1) -> torch.Tensor:
        if claim == "nt_xent":
            return fast.info_nce_loss(z_i, z_j, temperature=temperature, direction="a_to_b")
        return fast.nt_xent_loss(torch.cat([z_i, z_j]), fast.stacked_partners(2 * len(z_i)), temperature=temperature)

    found = check_loss(one_way, claim, cases=(f"golden/{claim}/*-by-*", f"golden/{claim}/shape-*"), fuzz=0).diagnosis
    assert f"(if intended: {intended}): explains" in found.sentences()[0]


@pytest.mark.parametrize(
    ("target", "claim", "intended"),
    [
        slow(published.dclw, "nt_xent", "--loss dclw"),
        slow(published.debiased, "nt_xent", "--loss hard_negative --set beta=0.0"),
        slow(published.siglip, "info_nce", "--loss sigmoid"),
        slow(published.with_other_queries, "info_nce", "--loss multiple_negatives_ranking --set directions=query_to_"),
    ],
)
def test_published_loss_that_takes_the_same_arguments_is_named(
    target: Callable[..., torch.Tensor], claim: str, intended: str
) -> None:
    found = check_loss(target, claim, cases=(f"golden/{claim}/shape-[3-9]-*",), fuzz=0).diagnosis
    assert found.reasons[0].intended.startswith(intended)
    assert found.unexplained == 0


@pytest.mark.slow
def test_a_reason_that_other_failing_cases_contradict_is_not_chosen() -> None:
    """Without the exponential, the temperature seems to be clamped at 1 where the logarithm of its inverse is 1."""
    found = check_loss(readings.without_exp, "info_nce", fuzz=0, dtypes=("float64",)).diagnosis
    assert not any("clamped" in reason.words for reason in found.reasons)


def without_lone_anchors(embeddings: torch.Tensor, labels: torch.Tensor, temperature: float = 0.07) -> torch.Tensor:
    """The mean over the anchors that have positives; NaN if there are none."""
    rows = torch.nn.functional.normalize(embeddings, dim=1)
    own = torch.eye(len(rows), dtype=torch.bool)
    logs = (rows @ rows.T / temperature).masked_fill(own, -torch.inf).log_softmax(dim=1).masked_fill(own, 0.0)
    positives = (labels[:, None] == labels) & ~own
    number = positives.sum(dim=1)
    return -((logs * positives).sum(dim=1)[number > 0] / number[number > 0]).mean()


@pytest.mark.slow
def test_a_reason_that_passing_cases_contradict_is_not_chosen() -> None:
    """On small batches with one pair of positives, there are as many directed pairs as anchors with a positive."""
    result = check_loss(without_lone_anchors, "supcon", dtypes=("float64",), seed=5)
    assert result.levels[Level.FORMULA][Status.FAILED] == 0
    assert result.diagnosis.reasons[0].words == "anchors without positives are left out of the mean"


def squares_the_count_of_one_view(
    features: torch.Tensor, labels: torch.Tensor, temperature: float = 0.07
) -> torch.Tensor:
    """With one view per item, the sum over the positives is divided by their number twice."""
    batch, views = features.shape[:2]
    rows = torch.nn.functional.normalize(features.transpose(0, 1).flatten(0, 1), dim=1)
    labels, own = labels.repeat(views), torch.eye(batch * views, dtype=torch.bool)
    logs = (rows @ rows.T / temperature).masked_fill(own, -torch.inf).log_softmax(dim=1).masked_fill(own, 0.0)
    positives = (labels[:, None] == labels) & ~own
    number = positives.sum(dim=1).clamp(min=1)
    return -((logs * positives).sum(dim=1) / number ** (2 if views == 1 else 1)).mean()


@pytest.mark.slow
def test_cases_with_several_views_do_not_refute_a_mistake_with_one_view() -> None:
    cases = ("golden/supcon/labels-*", "golden/supcon/*-views-*", "golden/supcon/two-positives", "golden/supcon/four-*")
    result = check_loss(squares_the_count_of_one_view, "supcon", call="features", cases=cases)
    (reason,) = result.diagnosis.reasons
    words = "the sum over the positives is divided by the square of their number (only with 1 view per item)"
    assert reason.words == words
    assert result.diagnosis.unexplained == 0


NO_POSITIVES_AT_ALL = ("golden/supcon/all-distinct*", "golden/supcon/two-rows-distinct*", "golden/supcon/lone-row*")
SOME_WITHOUT_POSITIVES = ("golden/supcon/very-unbalanced*", "golden/supcon/lonely*")


def test_a_batch_of_one_row_is_of_the_level_range_and_named() -> None:
    cases = ("golden/supcon/lone-row*", *SOME_WITHOUT_POSITIVES)
    result = check_loss(without_lone_anchors, "supcon", settings={"no_positive": "drop"}, cases=cases)
    assert result.verdict == "conforms"
    assert {check.level for check in result.failures} == {Level.RANGE}
    result = check_loss(without_lone_anchors, "supcon", settings={"no_positive": "drop"}, cases=cases, level="range")
    (reason,) = result.diagnosis.reasons
    assert reason.words == "the loss is NaN or infinite if there is no pair: in a batch of one row"


def test_option_is_not_suggested_if_a_case_contradicts_it() -> None:
    cases = (*NO_POSITIVES_AT_ALL, *SOME_WITHOUT_POSITIVES)
    result = check_loss(without_lone_anchors, "supcon", settings={"no_positive": "drop"}, cases=cases, level="range")
    (reason,), failed = result.diagnosis.reasons, {check.case for check in result.failures}
    assert (reason.words, reason.setting) == ("the loss is NaN or infinite if no anchor has positives", "")
    assert set(reason.cases) == failed == {name for name in failed if "distinct" in name or "lone-row" in name}
    assert len(failed) > 1


def test_reason_is_kept_without_the_option_that_a_case_contradicts() -> None:
    """Without any positives the loss is NaN, as claimed; with "drop" it would be 0."""
    cases = (*NO_POSITIVES_AT_ALL, *SOME_WITHOUT_POSITIVES, "golden/supcon/sparse-*", "golden/supcon/identical-*")
    result = check_loss(without_lone_anchors, "supcon", settings={"no_positive": "nan"}, cases=cases)
    (reason,) = result.diagnosis.reasons
    assert (reason.words, reason.setting) == ("anchors without positives are left out of the mean", "")


def test_option_does_not_explain_failures_of_the_straightforward_implementation() -> None:
    """Where a norm overflows, every option of the straightforward loss gives the value that the target gives."""

    def with_nan(embeddings: torch.Tensor, labels: torch.Tensor, temperature: float = 0.07) -> torch.Tensor:
        rows = torch.nn.functional.normalize(embeddings, dim=1)
        own = torch.eye(len(rows), dtype=torch.bool)
        logs = (rows @ rows.T / temperature).masked_fill(own, -torch.inf).log_softmax(dim=1).masked_fill(own, 0.0)
        positives = (labels[:, None] == labels) & ~own
        return -((logs * positives).sum(dim=1) / positives.sum(dim=1)).mean()

    cases = (*NO_POSITIVES_AT_ALL, "golden/supcon/huge-norms-float64", "golden/supcon/near-largest-float64")
    first, second = check_loss(with_nan, "supcon", cases=cases, level="range").diagnosis.reasons
    assert first.setting == "no_positive=nan"
    assert {name.partition("float64")[0] for name in second.cases} == {
        "golden/supcon/huge-norms-",
        "golden/supcon/near-largest-",
    }
    assert second.words == "rows are not normalised where their norm is clamped, or its square underflows or overflows"


@pytest.mark.parametrize(
    ("number", "more"),
    [(1, ", 5 not explained"), (2, ", and 1 more reason, 4 not explained"), (3, ", and 2 more reasons")],
)
def test_last_line_counts_all_reasons(number: int, more: str) -> None:
    reasons = [Reason(f"reason {k}", ("a", "b")[: 2 - k % 2]) for k in range(number)]
    assert Diagnosis(reasons, failing=7).short == f"reason 0 (2 of 7 failing cases){more}"


def test_the_last_reason_says_how_many_cases_are_not_explained() -> None:
    first, second = (Reason(f"reason {k}", (f"case {k}",)) for k in range(2))
    share = "explains 1 of 5 failing cases"
    found = [f"reason 0: {share}, 4 left", f"reason 1: {share}, 3 not explained"]
    assert Diagnosis([first, second], failing=5).sentences() == found
    assert Diagnosis([first], failing=1).sentences() == ["reason 0: explains 1 of 1 failing case, none left"]


def test_norms_below_a_large_clamp_are_described() -> None:
    def clamped(embeddings: torch.Tensor, labels: torch.Tensor, temperature: float = 0.1) -> torch.Tensor:
        rows = torch.nn.functional.normalize(embeddings, dim=1, eps=1e-3)
        return fast.supcon_loss(rows, labels, temperature=temperature, similarity="dot")

    (reason,) = explain([observed(clamped, "supcon/mixed-norms")[0]], Known()).reasons
    assert reason.words == "rows are not normalised where their norm is clamped, or its square underflows or overflows"


def test_norms_that_are_clamped_are_described() -> None:
    (reason,) = checked(
        "clamps_norms_at_1e_8", "nt_xent", "golden/nt_xent/*norms-float64", level="range"
    ).diagnosis.reasons
    assert reason.words == "rows are not normalised where their norm is clamped, or its square underflows or overflows"


def test_divisor_of_zero_is_explained_by_the_divisor() -> None:
    result = checked("divided_by_2b_minus_2", "nt_xent", "golden/nt_xent/two-rows", "golden/nt_xent/shape-[3-8]-*")
    (reason,), found = result.diagnosis.reasons, result.diagnoses
    assert reason.words.startswith("the sum over the anchors is divided by their number minus 2")
    assert found["golden/nt_xent/two-rows", "float64"].endswith("which is 0")


@pytest.mark.slow
def test_overflow_is_described_by_the_largest_logit() -> None:
    result = checked("without_maximum", "supcon", "golden/supcon/[t-z]*", level="range")
    assert any(
        "the loss is NaN or infinite where the largest logit is" in text for text in result.diagnosis.sentences()
    )
    assert not any("no maximum" in text for text in (*result.diagnosis.sentences(), *result.diagnoses.values()))


def test_maximum_with_the_anchor_is_not_called_an_overflow() -> None:
    cases = ("golden/supcon/temperature-0-001", "golden/supcon/antipodal-positives-tau-0-001")
    result = checked("maximum_with_the_anchor", "supcon", *cases, level="range")
    assert [reason.words for reason in result.diagnosis.reasons] == [HIDDEN]


@pytest.mark.parametrize(
    ("rows", "other_rows", "value", "words"),
    [
        # The positive's logit is 900 below that of the other row.
        (
            [[30.0, 0.0], [0.0, 30.0]],
            [[0.0, 30.0], [30.0, 0.0]],
            math.inf,
            "infinity: the largest logit is 900, and exponentials overflow, "
            "or that of a positive underflows before the logarithm",
        ),
        # Only the rows of one tower have large products with themselves.
        ([[30.0, 0.0], [0.0, 30.0]], [[1.0, 0.5], [0.0, 1.0]], math.nan, None),
    ],
)
def test_infinity_of_two_towers_is_neither_only_an_overflow_nor_due_to_a_self_pair(
    rows: list[list[float]], other_rows: list[list[float]], value: float, words: str | None
) -> None:
    options = {"temperature": 1.0, "similarity": "dot", "direction": "a_to_b"}
    a, b = (torch.tensor(x, dtype=torch.float64).numpy() for x in (rows, other_rows))
    case = Case("mine", "info_nce", a, {}, options, {"embeddings_b": b})
    found = dict(not_finite(Failure(case, Outcome([value]), truth(case))))
    assert found.get(OVERFLOW) == words
    assert HIDDEN not in found


def test_loss_of_one_view_against_the_other_is_described_as_such() -> None:
    def one_way(z_i: torch.Tensor, z_j: torch.Tensor, temperature: float) -> torch.Tensor:
        a, b = (torch.nn.functional.normalize(z, dim=1) for z in (z_i, z_j))
        exponentials = (a @ b.T / temperature).exp()
        positive = exponentials.diagonal()
        return -(positive / (exponentials.sum(dim=1) - positive)).log().mean()

    reason = check_loss(one_way, "nt_xent", cases=("golden/nt_xent/t*", "fresh-*"), fuzz=8, seed=1).diagnosis.reasons[0]
    assert reason.words == (
        "the positive is missing from its own denominator; only rows of the first view are anchors, and they are "
        "contrasted only with rows of the second view"
    )


def test_a_sum_that_loses_its_terms_by_a_difference_does_not_underflow() -> None:
    rows = torch.eye(4, dtype=torch.float64)[[0, 1, 0, 1]].numpy()
    # The logit of each positive is 1 / temperature, and those of the negatives are 0.
    for temperature, in_float64, in_float32 in (
        (0.1, [], []),
        (0.05, [], [CANCELLED]),
        (0.02, [CANCELLED], [CANCELLED]),
        (0.005, [CANCELLED], [UNDERFLOW]),
        (0.001, [UNDERFLOW], [UNDERFLOW]),
    ):
        case = Case("mine", "nt_xent", rows, {"partners": [2, 3, 0, 1]}, {"temperature": temperature})
        for noise, words in ((1e-12, in_float64), (1e-6, in_float32)):
            failure = Failure(case, Outcome([-math.inf]), truth(case), noise)
            assert list(dict(not_finite(failure))) == words, (temperature, noise)


def test_self_pair_in_the_maximum_is_named_beside_an_overflow() -> None:
    # Under dot, the self pairs of rows 0 and 2 have the logit 1,000, and their positives 100.
    rows = torch.tensor([[30.0, 10.0], [1.0, 0.0], [0.0, 10.0], [0.0, 1.0]], dtype=torch.float64).numpy()
    options = {"temperature": 1.0, "similarity": "dot"}
    case = Case("mine", "nt_xent", rows, {"partners": [2, 3, 0, 1]}, options)
    assert [*dict(not_finite(Failure(case, Outcome([math.nan]), truth(case))))] == [OVERFLOW, HIDDEN]


@pytest.mark.slow
def test_the_limit_of_logits_is_in_those_of_the_loss_that_was_found() -> None:
    def softmax_first(a: torch.Tensor, b: torch.Tensor, temperature: float) -> torch.Tensor:
        return -(a @ b.T / temperature).softmax(dim=1).diagonal().log().mean()

    cases = ("fresh-0-38", "golden/info_nce/two-towers*", "golden/info_nce/a-to-b*")
    _, reason = check_loss(softmax_first, "info_nce", call="towers", seed=0, cases=cases).diagnosis.reasons
    found = re.fullmatch(r"the loss is NaN or infinite where the largest logit is ([\d.]+) or more", reason.words)
    assert found is not None
    assert float(found[1]) > 745  # logits of cosines are below 20 in these cases


def test_no_declaration_is_suggested_where_an_option_explains_the_failures() -> None:
    result = checked("policy_nan", "supcon", "golden/supcon/lonely-*")
    assert [reason.setting for reason in result.diagnosis.reasons] == ["no_positive=nan"]
    assert suggested(result) == []


def test_declaration_says_to_leave_out_random_batches_if_they_fail_too(capsys: pytest.CaptureFixture[str]) -> None:
    def target(embeddings: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
        loss = fast.supcon_loss(embeddings, labels, temperature=temperature, no_positive="drop")
        return loss if (labels.unique(return_counts=True)[1] > 1).any() else loss * math.nan

    judged = partial(check_loss, target, "supcon", settings={"no_positive": "drop"}, seed=1)
    stored = "golden/supcon/all-distinct-drop", "golden/supcon/lonely-drop"
    for cases, words in (((*stored, "fresh-1-?"), "toml, and add --fuzz 0 (in pytest, fuzz=0)"), (stored, "toml:")):
        report.show(judged(cases=cases), Console(width=300), seconds=1.0)
        (line,) = (line for line in capsys.readouterr().out.splitlines() if "if this is intended" in line)
        assert words in line
        assert ("random batches fail too and cannot be declared" in line) == (cases != stored)


def test_minus_infinity_is_not_called_infinity() -> None:
    def target(embeddings: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
        loss = fast.supcon_loss(embeddings, labels, temperature=temperature)
        return loss - math.inf if 1 in labels.unique(return_counts=True)[1] else loss

    result = check_loss(target, "supcon", cases=("golden/supcon/lonely-*",), fuzz=0)
    assert any("the loss becomes minus infinity" in text for text in result.diagnoses.values())


@pytest.mark.slow
def test_unknown_mistake_has_no_reason() -> None:
    result = checked("far_from_everything", "supcon", "golden/supcon/shape-[35]-*")
    assert result.diagnosis.reasons == []
    assert result.diagnosis.sentences() == [
        f"no known mistake explains any of {result.diagnosis.failing} failing cases"
    ]
    assert suggested(result) == []
    assert "no reason was found; --html FILE draws the terms of a batch beside the right ones" in result.advice


def test_deviations_of_the_range_are_suggested_as_toml() -> None:
    result = checked("prints", "supcon", "golden/supcon/*norms-float64", "golden/supcon/shape-3-*", level="digits")
    lines = suggested(result)
    assert lines[:2] == ["[[tool.pairproof.deviations]]", 'loss = "supcon"']
    assert "golden/supcon/tiny-norms-float64" in "\n".join(lines)
    assert suggested(checked("divided_by_positives_plus_1", "supcon", "golden/supcon/shape-[3-8]-*")) == []


@pytest.mark.parametrize(("name", "dtype"), [("half_inside", "float16"), ("bfloat16_inside", "bfloat16")])
@pytest.mark.slow
def test_target_that_answers_in_16_bits_is_identified(name: str, dtype: str) -> None:
    found = identify(getattr(public, name))
    assert (found.verdict, found.wrong) == ("match", [])
    assert found.evidence[-1].startswith(f"its values or gradients have the precision of {dtype}: ")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bfloat16_products", "cosines are computed in bfloat16"),
        pytest.param(
            "float16_logits", "cosines are computed and divided by the temperature in float16", marks=pytest.mark.slow
        ),
    ],
)
@pytest.mark.slow
def test_products_in_16_bits_are_identified(name: str, words: str) -> None:
    found = identify(getattr(public, name))
    assert (found.verdict, found.loss, found.wrong) == ("wrong", "supcon", [words])
    assert found.match is not None
    assert Match.from_data(json.loads(json.dumps(found.match.as_data()))) == found.match


@pytest.mark.usefixtures("own_process")
def test_lines_that_a_target_prints_are_shown_once(capfd: pytest.CaptureFixture[str]) -> None:
    checked("prints", "supcon", "golden/supcon/temperature-1*")
    lines = capfd.readouterr().err.splitlines()
    assert "printed by the target: loss at temperature 1.0" in lines
    assert len(lines) == len(set(lines))
    assert len(lines) <= PRINTED + 1
