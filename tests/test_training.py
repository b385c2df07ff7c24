"""``pairproof diagnose``: levels of a loss, bounds, and what it reports on the embeddings of a batch."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import pairproof
from pairproof import fast
from pairproof.conformance import cli
from pairproof.conformance.suite.catalogue import LOSSES
from pairproof.conformance.training import BOUNDED, NEAR, Diagnosis, diagnose, lowest_of_towers, lowest_value

FACTS = [
    # HobbitLong/SupContrast#3: 256 images, two views, temperature 0.1: (0.1 / 0.07) ln 511.
    ({"class_sizes": [2] * 256, "temperature": 0.1, "base_temperature": 0.07}, 8.909, ("collapsed",)),
    # HobbitLong/SupContrast#42: the same with 64 images.
    ({"class_sizes": [2] * 64, "temperature": 0.1, "base_temperature": 0.07}, 6.920, ("collapsed",)),
    # HobbitLong/SupContrast#21: 4 images of 4 classes, two views: ln 7. Random batches have 2.6 ± 0.6, but none agrees
    # with ln 7 to seven digits.
    ({"class_sizes": [2] * 4}, 1.9459104537963867, ("collapsed",)),
    # HobbitLong/SupContrast#118: 16 equal rows of two classes; the thread divides by 16.
    ({"class_sizes": [8, 8]}, 16 * 0.1693, ("collapsed",)),
    # The same rows in one class: equal embeddings are the best ones.
    ({"class_sizes": [16]}, 16 * 0.1693, ("lowest", "collapsed")),
]


@pytest.mark.parametrize(("given", "value", "near"), FACTS, ids=[str(value) for _, value, _ in FACTS])
def test_values_reported_in_public_threads_are_recognised(
    given: dict[str, Any], value: float, near: tuple[str, ...]
) -> None:
    found = diagnose(value=value, **given)
    assert found.near == near
    assert bool(found.problems) == (near == ("collapsed",))
    assert ("solved" in " ".join(found.hints)) == ("lowest" in near)
    assert found.levels.collapsed == pytest.approx(value, rel=1e-3)


@pytest.mark.parametrize("rows", [3, 5, 16, 50])
@pytest.mark.parametrize("temperature", [0.07, 0.5])
def test_values_near_the_lowest_of_one_class_are_all_solved(rows: int, temperature: float) -> None:
    """Equal embeddings are the best ones of one class. Rounding decides which of the two levels is higher."""
    lowest = math.log(rows - 1)
    for value in (lowest, *(round(lowest, digits) for digits in (3, 4, 5, 6)), lowest * 1.0009, lowest * 0.9991):
        found = diagnose(class_sizes=[rows], value=value, temperature=temperature)
        assert found.near[0] == "lowest"
        assert found.near[-1] == "collapsed"
        assert found.problems == ()
        # Small random batches may have this value, too.
        assert ("solved" in found.hints[0]) == (found.near == ("lowest", "collapsed"))


AT_HIGH_TEMPERATURE = [
    ({"loss": "nt_xent", "class_sizes": [2] * 128, "temperature": 0.5, "dim": 2048}, 5.5423, ("chance", "collapsed")),
    # ln 63 = 4.1431, where random embeddings have 4.148 ± 0.004.
    ({"loss": "nt_xent", "class_sizes": [2] * 32, "temperature": 1.0}, 4.1437, ("chance", "collapsed")),
    ({"class_sizes": [2] * 128, "temperature": 100.0}, 5.5413, ("lowest", "chance", "collapsed")),
]


@pytest.mark.parametrize(("given", "value", "near"), AT_HIGH_TEMPERATURE)
def test_levels_that_a_value_does_not_tell_apart_are_all_named(
    given: dict[str, Any], value: float, near: tuple[str, ...]
) -> None:
    found = diagnose(value=value, **given)
    assert found.near == near
    assert found.exit_code == 0
    (hint,) = found.hints
    *names, last = map(repr, near)
    assert hint == f"The value alone does not tell {', '.join(names)} and {last} apart: pass the embeddings."


@pytest.mark.parametrize("seeds", [12, pytest.param(40, marks=pytest.mark.slow)])
def test_random_embeddings_have_not_collapsed_at_any_temperature(seeds: int) -> None:
    for seed in range(seeds):
        rows = torch.randn(64, 512, generator=torch.Generator().manual_seed(seed))
        found = diagnose(rows, loss="nt_xent", temperature=30.0 if seed % 4 == 3 else 1.0)
        assert found.near == ("chance",)
        assert found.exit_code == 0


def test_embeddings_decide_where_the_value_does_not() -> None:
    """At temperature 300, the values of all these batches differ by less than 0.2 %."""
    labels = torch.arange(24) % 4
    corners = torch.eye(4, dtype=torch.float64)[labels]
    random = torch.randn(24, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    equal = torch.ones(24, 4, dtype=torch.float64)
    states = {"lowest": corners - 0.25, "chance": random, "collapsed": equal + 1e-3 * random, "": corners + random / 5}
    for name, rows in states.items():
        found = diagnose(rows, labels, temperature=300.0)
        assert found.near == tuple(filter(None, [name])), name
        assert found.exit_code == (name == "collapsed"), name
        assert found.value == pytest.approx(found.levels.chance, rel=0.002)


def test_towers_that_collapse_to_different_points_have_collapsed() -> None:
    points = torch.eye(6, dtype=torch.float64)
    found = diagnose(points[:1].repeat(8, 1), loss="info_nce", embeddings_b=points[1:2].repeat(8, 1), temperature=0.1)
    assert found.near == ("collapsed",)
    assert found.rows is not None
    assert found.rows.mean_cosine == pytest.approx(1)
    assert found.rows.positive_cosine == 0


@pytest.mark.parametrize(("classes", "near"), [(1, ("lowest", "collapsed")), (2, ("collapsed",))])
def test_equal_rows_are_solved_if_they_are_one_class(classes: int, near: tuple[str, ...]) -> None:
    """The gradient is 0 apart from rounding errors, which do not count."""
    row = torch.tensor([[0.3, -1.7, 0.1]], dtype=torch.float64)
    for rows in (3, 7, 12):
        found = diagnose(row.repeat(rows * classes, 1), torch.arange(rows * classes) % classes)
        assert found.near == near
        assert found.exit_code == (classes > 1)
        assert found.gradient is not None
        assert (found.gradient.norm, found.gradient.rows_without) == (0.0, rows * classes)


def test_values_of_random_embeddings_are_near_chance() -> None:
    """The mean and the deviation of too few draws are far off, and fewer than 37 of 40 values are near them."""
    levels = diagnose(class_sizes=[2] * 32, loss="nt_xent", temperature=0.2).levels
    near = 0
    for seed in range(40):
        rows = torch.randn(64, 128, generator=torch.Generator().manual_seed(seed))
        value = float(fast.nt_xent_loss(rows, fast.interleaved_partners(64), temperature=0.2))
        near += abs(value - levels.chance) < 3 * levels.spread + NEAR * levels.chance
    assert near >= 37


def test_the_lowest_value_is_not_below_itself_if_it_is_negative() -> None:
    given: dict[str, Any] = {"class_sizes": [4] * 4, "denominator": "only_negatives"}
    lowest = diagnose(**given).levels.lowest
    assert lowest is not None
    assert lowest < -16
    for value in (lowest, 1.001 * lowest):
        assert diagnose(value=value, **given).problems == ()
    (below,) = diagnose(value=lowest - 0.1, **given).problems
    assert "below the lowest" in below


def test_a_missing_base_temperature_is_named() -> None:
    found = diagnose(class_sizes=[2] * 256, temperature=0.1, value=8.909)
    assert found.near == ()
    assert not found.problems
    (hint,) = found.hints
    assert "1.429, the value is near 'collapsed'" in hint
    (hint,) = diagnose(class_sizes=[2] * 256, temperature=0.1, value=3.0).hints
    assert "1.429" not in hint


def best_found(labels: Tensor, dim: int, loss: str, temperature: float, **options: Any) -> float:
    """The lowest value that gradient descent finds."""
    rows = torch.randn(len(labels), dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rows.requires_grad_()
    optimiser = torch.optim.LBFGS([rows], max_iter=400, line_search_fn="strong_wolfe", tolerance_grad=1e-12)

    def step() -> Tensor:
        optimiser.zero_grad()
        value: Tensor = LOSSES[loss].fast(rows, labels, temperature=temperature, **options)
        value.backward()
        return value

    optimiser.step(step)
    return float(step().detach())


BATCHES = [
    ("supcon", [3, 3, 3], {}, True),
    ("supcon", [2, 2, 2, 2], {"denominator": "one_positive"}, True),
    ("supcon", [4, 4], {"denominator": "only_negatives"}, True),
    ("supcon_in", [3, 3, 3], {}, True),
    ("nt_xent_pairwise", [3, 3], {}, True),
    ("supcon", [2, 3, 5], {}, False),
    ("supcon", [1, 1, 4, 3], {}, False),
    ("supcon", [1, 4, 3], {"no_positive": "drop"}, False),
    ("supcon", [2, 6], {"denominator": "only_negatives"}, False),
    ("nt_xent_pairwise", [1, 2, 5], {}, False),
]


@pytest.mark.parametrize("temperature", [0.2, 1.0])
@pytest.mark.parametrize(("loss", "sizes", "options", "attained"), BATCHES)
@pytest.mark.quick(7)
def test_gradient_descent_finds_nothing_below_the_lowest(
    loss: str, sizes: list[int], options: dict[str, Any], attained: bool, temperature: float
) -> None:
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    levels = diagnose(class_sizes=sizes, loss=loss, dim=4, temperature=temperature, **options).levels
    assert levels.lowest is not None
    assert levels.attained == attained
    best = best_found(labels, 4, loss, temperature, **options)
    assert best >= levels.lowest - 1e-12
    # Descent reaches an attained bound; any other bound is not far below the best value found.
    assert best - levels.lowest < (1e-7 if attained else 0.2 * (levels.chance - levels.lowest))


def test_the_lowest_of_equal_classes_is_that_of_a_simplex() -> None:
    """3 classes of 4 rows: cosine -1/2 between classes."""
    expected = math.log(3 + 8 * math.exp(-1.5 / 0.3))
    assert lowest_value([(3, 8, 12)], "all", 0.3) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_the_lowest_of_towers_is_that_of_a_simplex(n: int) -> None:
    corners = torch.eye(n, dtype=torch.float64) - 1 / n
    attained = float(fast.info_nce_loss(corners, corners, temperature=0.4))
    assert lowest_of_towers(n, 0.4) == pytest.approx(attained, rel=1e-12)
    generator = torch.Generator().manual_seed(2)
    for _ in range(50):
        a, b = (torch.randn(n, 3, dtype=torch.float64, generator=generator) for _ in "ab")
        assert fast.info_nce_loss(a, a + 0.1 * b, temperature=0.4) >= attained - 1e-12


def test_every_loss_has_chance_and_collapse_and_some_a_lowest_value() -> None:
    """Chance and collapse are values of the loss itself; a bound is given exactly for the losses that have one."""
    for name, entry in LOSSES.items():
        levels = diagnose(class_sizes=[2] * 6, loss=name, dim=8).levels
        assert math.isfinite(levels.chance), name
        assert math.isfinite(levels.collapsed), name
        cosine = entry.default("similarity") == "cosine"
        assert (levels.lowest is not None) == (name in BOUNDED and cosine), name


def test_the_batch_tutorial_cannot_be_trained() -> None:
    """The off-diagonal logits are far below the maximum of the row, so 0.5545 = 2 ln 4 / 5 has gradient 0."""
    rows = torch.tensor([[100.0, 0.0], [0.0, 90.0], [-80.0, 0.0], [0.0, -70.0], [60.0, 60.0]])
    found = diagnose(rows, torch.tensor([0, 1, 0, 1, 2]), loss="supcon_epsilon", temperature=0.07)
    assert found.gradient is not None
    assert found.gradient.norm == 0
    assert "The gradient is 0, so these embeddings do not change in training." in found.problems
    assert found.lonely == 1


def batch(rows: int = 24, dim: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(rows, dim, dtype=torch.float64, generator=generator), torch.arange(rows) % 4


def test_embeddings_are_measured() -> None:
    z, labels = batch()
    z[3] = 2 * z[7]
    found = diagnose(z, labels, temperature=0.5)
    rows, gradient = found.rows, found.gradient
    assert rows is not None
    assert gradient is not None
    assert (rows.count, rows.dim, rows.zero, rows.not_finite, rows.duplicates) == (24, 6, 0, 0, 1)
    assert rows.lowest_norm == pytest.approx(float(z.norm(dim=1).min()))
    assert rows.highest_norm == pytest.approx(float(z.norm(dim=1).max()))
    cosines = torch.nn.functional.cosine_similarity(z[:, None], z[None], dim=2)
    same, others = labels[:, None] == labels, ~torch.eye(24, dtype=torch.bool)
    assert rows.positive_cosine == pytest.approx(float(cosines[same & others].mean()), rel=1e-9)
    assert rows.negative_cosine == pytest.approx(float(cosines[~same].mean()), rel=1e-9)
    leaf = z.clone().requires_grad_()
    loss = fast.supcon_loss(leaf, labels, temperature=0.5)
    loss.backward()
    assert leaf.grad is not None
    assert gradient.norm == pytest.approx(float(leaf.grad.norm()), rel=1e-9)
    assert found.value == found.computed == pytest.approx(float(loss.detach()), rel=1e-12)
    assert found.classes == 4
    assert found.positives == 5


def test_partners_and_towers_are_measured() -> None:
    z, _ = batch()
    stacked = diagnose(z, loss="nt_xent")
    assert stacked.value == pytest.approx(float(fast.nt_xent_loss(z, fast.stacked_partners(24))))
    assert stacked.rows is not None
    assert stacked.rows.positive_cosine == pytest.approx(
        float(torch.nn.functional.cosine_similarity(z[:12], z[12:]).mean())
    )
    partners = fast.interleaved_partners(24)
    assert diagnose(z, loss="nt_xent", partners=partners).value == pytest.approx(float(fast.nt_xent_loss(z, partners)))
    towers = diagnose(z[:12], loss="info_nce", embeddings_b=z[12:])
    assert towers.value == pytest.approx(float(fast.info_nce_loss(z[:12], z[12:])))
    cosines = torch.nn.functional.cosine_similarity(z[:12, None], z[None, 12:], dim=2)
    assert towers.rows is not None
    assert towers.rows.negative_cosine == pytest.approx(float((cosines.sum() - cosines.trace()) / 132))


PROBLEMS = {
    "NaN or infinite": lambda z: z.index_fill_(0, torch.tensor(2), math.nan),
    "embeddings are zero": lambda z: z.index_fill_(0, torch.tensor(2), 0.0),
    "the encoder has collapsed": lambda z: z.copy_(z[:1] + 1e-6 * z),
}


@pytest.mark.parametrize("words", PROBLEMS)
def test_problems_of_embeddings_are_reported(words: str) -> None:
    z, labels = batch()
    PROBLEMS[words](z)
    found = diagnose(z, labels, temperature=0.5)
    assert any(words in problem for problem in found.problems)
    assert found.exit_code == 1


def test_collapse_is_reported_from_the_rows_if_they_are_given() -> None:
    z, labels = batch()
    equal = z[:1] + 1e-6 * z
    level = diagnose(equal, labels, temperature=0.1).levels.collapsed
    sizes = torch.bincount(labels).tolist()
    (alone,) = diagnose(class_sizes=sizes, value=level, temperature=0.1).problems
    assert alone.count("Compare the embeddings of a batch; if they are nearly equal, restart") == 1
    (given,) = diagnose(equal, labels, temperature=0.1).problems
    assert (
        "and these are nearly equal: the encoder has collapsed, or is untrained and its rows share a direction. Check"
        in given
    )
    assert "if they are" not in given
    other, unequal = diagnose(z, labels, value=level, temperature=0.1).problems
    assert "not the loss of these embeddings" in other
    assert "these are not nearly equal: pass those of the batch with this value" in unequal
    assert "has collapsed" not in unequal


def test_embeddings_that_were_passed_are_not_asked_for_again() -> None:
    solved = torch.eye(32, 128).repeat(2, 1)
    found = diagnose(solved, loss="nt_xent", value=4.1437, temperature=1.0)
    assert found.near == ("chance", "collapsed")
    assert found.hints[0].endswith("apart: pass the embeddings of the batch with this value.")


def towers(shuffled: bool, steps: int) -> tuple[Tensor, Tensor]:
    """Two encoders that are trained on pairs, as CLIP is, or on pairs that do not belong together."""
    generator = torch.Generator().manual_seed(0)
    sizes = (32, 64), (64, 16)
    weights = [0.2 * torch.randn(*size, generator=generator) for _ in range(2) for size in sizes]
    optimizer = torch.optim.Adam([weight.requires_grad_() for weight in weights], 3e-3)
    for _ in range(steps):
        a = torch.randn(64, 32, generator=generator)
        b = a.flip(1)[torch.randperm(64, generator=generator)] if shuffled else a.flip(1)
        a, b = ((x @ first).relu() @ second for x, first, second in ((a, *weights[:2]), (b, *weights[2:])))
        optimizer.zero_grad()
        fast.info_nce_loss(a, b, temperature=0.07).backward()
        optimizer.step()
    return a.detach(), b.detach()


def test_pairs_that_do_not_belong_together_are_a_cause_of_equal_similarities() -> None:
    """Training on them leads to log N: every text is as near as every other, but the rows are not equal."""
    a, b = towers(shuffled=True, steps=150)
    found = diagnose(a, embeddings_b=b, loss="info_nce", temperature=0.07)
    assert found.value == pytest.approx(math.log(64), rel=0.05)
    assert found.near == ()
    assert found.rows.mean_cosine < 0.97
    assert "nothing has been learned yet" in found.hints[0]
    assert "as similar to its positive as to others" in found.hints[1]
    assert (
        "pairs that do not belong together. If the value stays, check that labels, views and towers" in found.hints[1]
    )
    (alone,) = diagnose(class_sizes=[2] * 64, dim=16, value=4.23, loss="info_nce", temperature=0.07).hints
    assert "one trained on pairs that do not belong together" in alone
    a, b = towers(shuffled=False, steps=150)
    trained, rolled = (diagnose(a, embeddings_b=x, loss="info_nce", temperature=0.07) for x in (b, b.roll(1, 0)))
    assert "order" not in " ".join(trained.hints)
    (above,) = rolled.hints
    assert rolled.value > rolled.levels.chance
    assert "positives are no more similar than other rows: check that labels, views and towers" in above


def test_a_zero_row_that_is_allowed_has_a_value() -> None:
    z, labels = batch()
    z[2] = 0
    found = diagnose(z, labels, temperature=0.5, zero_row="zero")
    assert found.value == pytest.approx(float(fast.supcon_loss(z, labels, temperature=0.5, zero_row="zero")), rel=1e-12)
    assert not any("zero" in problem for problem in found.problems)


def test_values_that_cannot_be_right_are_reported() -> None:
    z, labels = batch()
    (wrong,) = diagnose(z, labels, value=2.0, temperature=0.5).problems
    assert "not the loss of these embeddings" in wrong
    (below,) = diagnose(class_sizes=[4] * 4, value=0.9, temperature=0.5).problems
    assert "below the lowest" in below
    (nan,) = diagnose(class_sizes=[4] * 4, value=math.nan).problems
    assert "NaN" in nan
    assert not diagnose(class_sizes=[4] * 4, value=2.5, temperature=0.5).problems


def test_saturation_is_a_problem_and_a_solved_batch_is_not() -> None:
    _, labels = batch()
    corners = torch.eye(4, dtype=torch.float64)[labels] - 0.25
    solved = diagnose(corners, labels, temperature=0.05)
    assert solved.near == ("lowest",)
    assert not solved.problems
    assert "solved" in solved.hints[0]
    saturated = diagnose(3 * torch.eye(4)[labels], labels, similarity="dot", temperature=0.5)
    assert saturated.gradient is not None
    assert saturated.gradient.norm > 0
    (problem,) = saturated.problems
    assert "less than a millionth" in problem


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({}, ValueError, "embeddings: expected exactly one of embeddings and class_sizes, got neither"),
        ({"class_sizes": []}, ValueError, "class_sizes: expected positive numbers of rows"),
        ({"class_sizes": [3], "loss": "nt_xent"}, ValueError, "class_sizes: expected 2 for every positive pair"),
        ({"class_sizes": [2], "reduction": "sum"}, ValueError, "reduction: expected 'mean'"),
        ({"class_sizes": [2], "negatives": 3}, TypeError, "negatives: supcon_loss has no such option"),
        ({"class_sizes": [2], "anchor_weights": [0.0]}, TypeError, "anchor_weights: supcon_loss has no such option"),
        ({"class_sizes": [2], "loss": "supkon"}, ValueError, "unknown loss 'supkon'"),
        ({"class_sizes": [2], "dim": 0}, ValueError, "dim: expected at least 1"),
        ({"class_sizes": [2], "values": []}, ValueError, r"values: expected shape \[T\] .*, got shape \[0\]"),
        ({"class_sizes": [2], "values": [1.0], "value": 1.0}, ValueError, "expected at most one of value and values"),
        ({"embeddings": np.ones((4, 2))}, ValueError, "labels: required by supcon_loss"),
        ({"embeddings": np.ones(4), "labels": [0, 1, 0, 1]}, ValueError, r"embeddings: expected shape \[N, D\]"),
        ({"embeddings": np.ones((4, 2)), "labels": [0, 1]}, ValueError, "labels: expected 4 integers"),
        ({"embeddings": np.ones((3, 2)), "loss": "nt_xent"}, ValueError, "partners: required for an odd number"),
        (
            {"embeddings": np.ones((4, 2)), "labels": [0, 1, 0, 1], "partners": [1, 0, 3, 2]},
            ValueError,
            "partners: expected labels for supcon_loss",
        ),
    ],
)
def test_bad_input_raises_an_error(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        diagnose(**given)


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        ((1.2, 1.1, 0.5, 0.4), "crossed chance at step 3, and below it since"),
        ((1.2, math.nan, 0.5), "crossed chance at step 3, and below it since"),
        ((0.9, 1.1, 0.5, 1.3), "crossed chance 3 times, last at step 4, and above it since"),
        ((0.9, 0.8), "always below {chance:.4g}, chance at this temperature"),
        ((math.nan,), "all are NaN"),
    ],
)
def test_curve_names_the_step_at_which_it_crossed_chance(factors: tuple[float, ...], words: str) -> None:
    given: dict[str, Any] = {"class_sizes": [2] * 4, "temperature": 0.5}
    chance = diagnose(**given).levels.chance
    values = [factor * chance for factor in factors]
    found, last = diagnose(**given, values=np.array(values)), diagnose(**given, value=values[-1])
    assert (found.near, found.problems, found.hints) == (last.near, last.problems, last.hints)
    (line,) = (line for line in found.lines() if line.startswith("  curve "))
    words = words.format(chance=chance)
    assert line == f"  curve       {len(values)} steps from {values[0]:.6g} to {values[-1]:.6g}; {words}"


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(["diagnose", *arguments])
    return int(caught.value.code or 0)


def test_value_of_equal_embeddings_may_be_that_of_an_untrained_encoder() -> None:
    given = ({"class_sizes": [2] * 4, "value": 1.9459, "temperature": 0.5}, {"class_sizes": [2] * 256, "value": 6.2364})
    (near,), (far,) = (diagnose(**one).problems for one in given)
    assert "or is untrained and its rows share a direction; fewer than one random batch in a thousand" in near
    assert "or is untrained and its rows share a direction. Compare" in far


def test_learned_temperature_is_accepted_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    log_scale = torch.nn.Parameter(torch.tensor(2.3))
    rows, labels = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(4).repeat(2)
    learned = diagnose(rows, labels, temperature=torch.exp(-log_scale))
    assert learned == diagnose(rows, labels, temperature=torch.exp(-log_scale).item())
    assert not recwarn.list


def test_value_is_compared_with_what_it_can_become_and_computed_values_get_no_factor() -> None:
    labels, noise = torch.arange(4).repeat(25), torch.randn(100, 8, generator=torch.Generator().manual_seed(0))
    centres = torch.eye(4, 8)[labels] - torch.tensor([0.25] * 4 + [0] * 4)
    solved, near = (diagnose(centres + share * noise, labels, temperature=0.071) for share in (0.01, 0.095))
    left = solved.value - solved.levels.lowest
    assert f"The batch is solved: the loss can fall by at most {left:.2g}." in solved.hints
    # The value divided by 0.071 / 0.07 is near the lowest.
    assert "lowest" in diagnose(centres, labels, value=near.value / 0.071 * 0.07, temperature=0.071).near
    assert not near.near
    assert [hint.split(" is ")[0] for hint in near.hints] == ["The value"]


def test_value_alone_far_below_collapsed_is_not_that_of_an_untrained_encoder() -> None:
    (low,), (high,) = (diagnose(class_sizes=[2] * 256, value=value).hints for value in (0.4, 5.0))
    assert low.endswith("lowest: something has been learned.")
    assert high.endswith("pass the embeddings.")


def test_negative_value_below_the_lowest_is_not_called_possible() -> None:
    found = diagnose(class_sizes=[2] * 128, value=-0.3, temperature=0.5, denominator="only_negatives")
    assert found.problems[0].startswith("The value is below the lowest")
    assert not found.hints


def test_command_prints_and_writes_the_diagnosis(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    z, labels = batch()
    np.save(tmp_path / "z.npy", z.numpy())
    (tmp_path / "y.csv").write_text("\n".join(map(str, labels.tolist())))
    files = ["--embeddings", f"{tmp_path}/z.npy", "--labels", f"{tmp_path}/y.csv"]
    assert run(*files, "--temperature", "0.5", "--json", f"{tmp_path}/d.json") == 0
    text = capsys.readouterr().out
    expected = diagnose(z, labels, temperature=0.5)
    assert f"  chance      {expected.levels.chance:.6g}" in text
    assert json.loads((tmp_path / "d.json").read_text()) == json.loads(json.dumps(expected.as_json()))
    assert (
        run("--class-sizes", "256x2", "--value", "8.909", "--temperature", "0.1", "--set", "base_temperature=0.07") == 1
    )
    assert "the encoder has collapsed" in " ".join(capsys.readouterr().out.split())
    assert run("--loss", "nt-xent", "--embeddings", f"{tmp_path}/z.npy", "--partners", "interleaved") == 0
    value = float(fast.nt_xent_loss(z, fast.interleaved_partners(24)))
    assert f"  value       {value:.6g}" in capsys.readouterr().out
    (tmp_path / "run.csv").write_text("2.5\n2.1\n0.9\n")
    (tmp_path / "bad.csv").write_text("step,loss\n1,2.5\n")
    (tmp_path / "two.csv").write_text("1,2.5\n2,2.1\n")
    sizes = ["--class-sizes", "4x2", "--temperature", "0.5"]
    assert run(*sizes, "--values", f"{tmp_path}/run.csv", "--html", f"{tmp_path}/d.html") == 0
    assert "crossed chance at step 3, and below it since" in " ".join(capsys.readouterr().out.split())
    assert ">value 0.9</text>" in (tmp_path / "d.html").read_text(encoding="utf-8")
    for arguments, words in (
        ([*sizes, "--values", f"{tmp_path}/bad.csv"], "bad.csv: line 1: expected a number, got 'step'"),
        ([*sizes, "--values", f"{tmp_path}/two.csv"], "expected one line, or one entry per line, got shape (2, 2)"),
        ([*sizes, "--values", "losses.txt"], "--values losses.txt: there is no file losses.txt"),
        ([*sizes, "--value", "2", "--values", f"{tmp_path}/run.csv"], "expected at most one of value and values"),
        ([*sizes, "--html", f"{tmp_path}/none/d.html"], "--html: cannot write"),
        (["--class-sizes", "2y3"], "--class-sizes: expected sizes such as 10,10,12 or 256x2, got '2y3'"),
        (["--class-sizes", "2", "--set", "beta=1"], "--set beta: supcon_loss has no such option"),
        (["--embeddings", "none.npy"], "there is no file none.npy"),
        ([], "expected exactly one of --embeddings and --class-sizes, got neither"),
    ):
        assert run(*arguments) == 2
        assert words in capsys.readouterr().err


@pytest.mark.slow
def test_the_function_needs_no_optional_package() -> None:
    code = """
import sys
for name in ("rich", "typer", "jsonschema", "flint", "pytest", "hypothesis"):
    sys.modules[name] = None
import pairproof
assert "torch" not in sys.modules
print(pairproof.diagnose(class_sizes=[2] * 4, value=1.9459).near)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert found.stdout == "('collapsed',)\n"
    assert isinstance(pairproof.diagnose(class_sizes=[2]), Diagnosis)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"class_sizes": [2] * 256, "value": 4.0}, "The value is 43% of the way from random embeddings to the lowest"),
        ({"class_sizes": [2] * 256, "value": 8.0}, "The value is above that of random embeddings"),
        ({"class_sizes": [16] * 16, "value": -0.5, "denominator": "only_negatives"}, "A negative value is possible"),
    ],
)
def test_value_between_levels_is_put_into_words(given: dict[str, Any], words: str) -> None:
    found = diagnose(**given)
    assert not found.near
    assert found.exit_code == 0
    assert any(hint.startswith(words) for hint in found.hints), found.hints


@pytest.mark.parametrize(
    ("apart", "words"),
    [
        (1.0, "nothing has been learned yet"),
        (0.2, "something has been learned, if the value was higher before the first step"),
    ],
)
def test_rows_that_share_a_direction_have_learned_only_if_positives_are_alike(apart: float, words: str) -> None:
    draw = torch.Generator().manual_seed(0)
    towers = (2 * torch.ones(32) + torch.randn(2, 128, 32, generator=draw)).double()
    rows, others = towers[0], torch.lerp(towers[0], towers[1], apart)
    found = diagnose(rows, embeddings_b=others, loss="info_nce", temperature=0.1)
    assert found.levels.collapsed < found.value < found.levels.chance or apart < 1
    (hint,) = (hint for hint in found.hints if "of the way" in hint)
    assert hint.endswith(f"{words}.")


def test_negatives_as_far_apart_as_possible_are_named() -> None:
    labels = torch.arange(64) // 4
    corners = (torch.eye(16, dtype=torch.float64) - 1 / 16).repeat_interleave(4, 0)
    words = "The mean cosine to negatives, -0.06667, is as low as it can be"
    assert any(hint.startswith(words) for hint in diagnose(corners, labels).hints)
    for rows in (
        torch.eye(16).repeat_interleave(4, 0),
        torch.randn(64, 512, generator=torch.Generator().manual_seed(0)),
    ):
        assert not any(hint.startswith("The mean cosine") for hint in diagnose(rows, labels).hints)
    # Negatives that are as low as their positives allow become lower with closer positives.
    apart = torch.nn.functional.normalize(torch.eye(8, dtype=torch.float64) - 1 / 8)
    assert not any(hint.startswith("The mean cosine") for hint in diagnose(apart, torch.arange(8) // 2).hints)


@pytest.mark.parametrize(("size", "named"), [(1.0, False), (1.9, False), (2.1, True), (0.4, True), (30.0, True)])
def test_rows_that_are_not_normalised_are_named_under_dot_products(size: float, named: bool) -> None:
    rows = torch.nn.functional.normalize(torch.randn(8, 16, generator=torch.Generator().manual_seed(0))) * size
    for similarity in ("dot", "cosine"):
        hints = diagnose(rows, torch.arange(8) // 2, similarity=similarity).hints
        found = [hint for hint in hints if hint.startswith("Rows are not normalised: their norms are ")]
        assert len(found) == (named and similarity == "dot")


def test_value_of_a_queue_starts_low_and_rises_to_that_of_equal_embeddings() -> None:
    """MoCo before anything is learned: keys that are nearly equal replace the random rows of the queue."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.nn.functional.normalize(torch.randn(513, 64, dtype=torch.float64, generator=generator))
    keys, rows = rows[512:] + 1e-3 * rows, rows[:512]
    found = [
        diagnose(
            keys[:8], loss="info_nce", embeddings_b=keys[8:16], negatives=torch.cat([keys[1:][:filled], rows[filled:]])
        )
        for filled in (0, 256, 512)
    ]
    assert [one.near for one in found] == [("started",), (), ("collapsed",)]
    values = [one.value for one in found if one.value is not None]
    assert values == sorted(values)
    assert values[-1] == pytest.approx(math.log1p(512), rel=1e-3)
    assert "The value is that of a new queue, whose rows are random" in found[0].hints[0]
    assert found[1].hints[0].endswith("unless rows of the queue are still random: then the value rises.")
    assert [one.exit_code for one in found] == [0, 0, 1]
    rows_of_new = found[0].rows
    assert rows_of_new is not None
    assert rows_of_new.count == 8 + 8 + 512
    assert rows_of_new.negative_cosine == pytest.approx(float((keys[:8] @ rows.T).mean()), rel=1e-2)


def test_value_of_a_queue_is_recognised_from_its_length() -> None:
    given: dict[str, Any] = {
        "loss": "info_nce",
        "class_sizes": [2] * 8,
        "negatives": 4096,
        "dim": 32,
        "temperature": 0.2,
    }
    levels = diagnose(**given).levels
    assert levels.collapsed == pytest.approx(math.log1p(4096))
    assert levels.started is not None
    assert levels.lowest is not None
    assert levels.lowest < levels.started < levels.collapsed < levels.chance
    assert not levels.attained
    for value, near in ((8.318, "collapsed"), (levels.started, "started"), (levels.chance, "chance")):
        assert diagnose(value=value, **given).near == (near,)
    one = torch.ones(2, 3, dtype=torch.float64)
    opposite = diagnose(one, loss="info_nce", embeddings_b=one, negatives=-one, temperature=0.5)
    assert opposite.value == pytest.approx(opposite.levels.lowest, rel=1e-12)
    assert opposite.value == pytest.approx(math.log1p(2 * math.exp(-4)), rel=1e-12)
    both = diagnose(one, loss="info_nce", embeddings_b=one, negatives=-one, direction="both")
    assert diagnose(one, loss="info_nce", embeddings_b=one, negatives=-one).value == both.value
    assert diagnose(class_sizes=[2] * 8, loss="info_nce").levels.started is None
    # At a low temperature, a new queue has nearly the lowest value.
    assert diagnose(value=0.02, **{**given, "temperature": 0.07}).near == ("lowest", "started")


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"class_sizes": [2], "loss": "info_nce", "negatives": 0}, ValueError, "negatives: expected a positive number"),
        (
            {"class_sizes": [2], "loss": "info_nce", "negatives": torch.ones(2, 3)},
            ValueError,
            "negatives: expected a p",
        ),
        (
            {"embeddings": torch.ones(2, 3), "embeddings_b": torch.ones(2, 3), "loss": "info_nce", "negatives": 2},
            ValueError,
            "negatives: expected shape",
        ),
    ],
)
def test_bad_queue_raises_an_error(given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        diagnose(**given)


def test_command_takes_a_queue_as_a_file_or_as_a_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generator = torch.Generator().manual_seed(3)
    files = {name: tmp_path / f"{name}.npy" for name in ("embeddings", "embeddings-b", "negatives")}
    for name, path in files.items():
        np.save(path, torch.randn(16 if name == "negatives" else 4, 8, generator=generator).numpy())
    given = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    for options in (given, ["--class-sizes", "4x2", "--negatives", "16", "--dim", "8"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["diagnose", "--loss", "info_nce", *options])
        assert ended.value.code == 0
        lines = capsys.readouterr().out.splitlines()
        assert any(line.startswith(f"  collapsed   {math.log1p(16):.6g}") for line in lines)
        assert any(line.startswith("  started     ") for line in lines)


def test_negatives_of_equal_towers_as_far_apart_as_possible_are_named() -> None:
    corners = torch.eye(8, dtype=torch.float64) - 1 / 8
    words = "The mean cosine to negatives, -0.1429, is as low as it can be"
    assert any(hint.startswith(words) for hint in diagnose(corners, loss="info_nce", embeddings_b=corners).hints)
    for other in (torch.eye(8, dtype=torch.float64), -corners):
        found = diagnose(torch.eye(8, dtype=torch.float64), loss="info_nce", embeddings_b=other)
        assert not any(hint.startswith("The mean cosine") for hint in found.hints)
