"""`pairproof.compat.supcontrast` against both revisions of the original code."""

from __future__ import annotations

import doctest
import math
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pairproof.compat import supcontrast as ours
from pairproof.conformance.implementations.base import Unavailable
from pairproof.conformance.implementations.files import load_file
from pairproof.conformance.implementations.supcontrast import SupContrast
from tests.snapshots import WHERE, snapshot

REVISIONS = ["zero", "nan"]
"""The value of ``no_positive`` of each revision."""
ITEMS = 7


def original(revision: str) -> Any:
    """The original class: commit 66a8fe5 from a snapshot, or the revision before pull request 142 from bioencoder."""
    if revision == "zero":
        return load_file(snapshot("SupContrast") / "losses.py").SupConLoss
    try:
        return SupContrast({}, "cpu").loss
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def engine_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "LEAST_PAIRS", {"partners": 0, "labels": 0})


@pytest.fixture(params=["engine", "plain"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    least = 0 if request.param == "engine" else math.inf
    monkeypatch.setattr(ours, "LEAST_PAIRS", {"partners": least, "labels": least})
    return str(request.param)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def targets() -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    soft, hard = torch.rand(ITEMS, ITEMS, generator=generator), torch.rand(ITEMS, ITEMS, generator=generator) < 0.4
    lonely = hard.clone()
    lonely[2] = torch.arange(ITEMS) == 2
    return {
        "none": {},
        "labels": {"labels": torch.tensor([0, 1, 2, 0, 1, 0, 4])},
        "one label, a column": {"labels": torch.zeros(ITEMS, 1, dtype=torch.int64)},
        "floating labels with NaN": {"labels": torch.tensor([0, 1, math.nan, 0, 1, 0, 1.5])},
        "bool labels": {"labels": torch.tensor([True, True, False, True, False, False, True])},
        "bool mask": {"mask": hard},
        "symmetric mask": {"mask": hard | hard.T},
        "a row without positives": {"mask": lonely},
        "soft mask": {"mask": soft},
        "negative weights": {"mask": soft - 0.3},
        "sums below 1e-6": {"mask": lonely * 1e-8},
        "float64 mask": {"mask": soft.double() / 3},
    }


def result(loss: Callable[..., Tensor], features: Tensor, **given: Tensor) -> tuple[Tensor, Tensor]:
    features = features.clone().requires_grad_()
    value = loss(features, **given)
    return value.detach(), torch.autograd.grad(value, features)[0]


def assert_equal(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], bound: float = 1e-9) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert torch.allclose(one, other, rtol=bound, atol=bound, equal_nan=True), (one, other)


@pytest.mark.parametrize("revision", REVISIONS)
@pytest.mark.parametrize("name", targets())
@pytest.mark.quick(16)
def test_loss_equals_the_originals(revision: str, name: str, form: str) -> None:
    theirs, used = original(revision), set()
    for views, mode, (temperature, base) in product((1, 2, 3), ("all", "one"), ((0.07, 0.07), (2.0, 0.5))):
        features = draw(ITEMS, views, *((2, 3) if views == 2 else (5,)), seed=views)
        # Rows that are not normalised have large norms, so that the self pair dominates.
        for given in (features, F.normalize(features.flatten(2), dim=2).view_as(features)):
            loss = ours.SupConLoss(temperature, mode, base, no_positive=revision)
            found = result(loss, given, **targets()[name])
            assert_equal(found, result(theirs(temperature, mode, base), given, **targets()[name]))
            used.add(loss.evaluated_by)
    assert form in used


def test_values_equal_those_computed_by_hand(form: str) -> None:
    features = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[1.0, 1.0]]], dtype=torch.float64)
    # Products of rows: 0 and 1, 0 and 1, 1 and 1. The first two rows are positives.
    of_first_two = math.log(1 + math.e)
    loss = ours.SupConLoss(1.0, base_temperature=0.5)
    found = loss(features, labels=torch.tensor([7, 7, 1]))
    assert found.item() == pytest.approx(2 * 2 * of_first_two / 3, rel=1e-14)
    assert loss.evaluated_by == form
    soft = torch.tensor([[9.0, 0.5, 1.0], [0, 9, 0], [0, 0, 9]])
    values = of_first_two - (0.5 * 0 + 1.0 * 1) / 1.5, 0, 0
    assert loss(features, mask=soft).item() == pytest.approx(2 * sum(values) / 3, rel=1e-14)
    before = ours.SupConLoss(1.0, no_positive="nan")
    assert before(features, labels=torch.tensor([7, 7, 1])).isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("views", "given"), [(1, "labels"), (2, "none"), (2, "labels"), (2, "soft mask")])
def test_self_pair_that_dominates_gives_nan_unless_it_is_excluded(
    dtype: torch.dtype, views: int, given: str, engine_always: None
) -> None:
    features = F.normalize(draw(ITEMS, views, 5), dim=2).to(dtype)
    temperature = {torch.float32: 0.005, torch.float64: 0.0005}[dtype]
    chosen = targets()[given]
    value, gradient = result(original("zero")(temperature, base_temperature=temperature), features, **chosen)
    assert value.isnan()
    loss = ours.SupConLoss(temperature, base_temperature=temperature)
    assert_equal(result(loss, features, **chosen), (value, gradient), 1e-5)
    assert loss.evaluated_by == "plain"
    # With ``self_in_maximum=False``, the loss does not underflow, and equals an evaluation in float64.
    loss = ours.SupConLoss(temperature, base_temperature=temperature, self_in_maximum=False)
    rows = torch.cat(features.unbind(1)).double()
    logits = (rows @ rows.T / temperature).fill_diagonal_(-math.inf)
    ratios = logits - logits.logsumexp(1, keepdim=True)
    weights = targets()["labels"]["labels"] if given == "labels" else torch.arange(ITEMS)
    weights = chosen["mask"] if given == "soft mask" else (weights[:, None] == weights).float()
    weights = weights.double().repeat(views, views).fill_diagonal_(0)
    values = -torch.where(weights > 0, weights * ratios, 0.0).sum(1) / weights.sum(1).where(weights.sum(1) > 0, 1)
    assert loss(features, **chosen).item() == pytest.approx(values.mean().item(), rel=1e-5)
    assert loss.evaluated_by == "engine"


def test_close_views_need_no_comparison_of_all_pairs(engine_always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    first = F.normalize(draw(ITEMS, 1, 5), dim=2).float()
    features = torch.cat((first, F.normalize(first + 0.1, dim=2)), 1)
    loss = ours.SupConLoss(0.01, base_temperature=0.01)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "amax", lambda *given: pytest.fail("all pairs are compared"))
        assert not loss._underflows(features, torch.cat(features.unbind(1)), ours.measure(features.flatten(0, 1)))
    assert_equal(result(loss, features), result(original("zero")(0.01, base_temperature=0.01), features), 1e-4)


def test_features_that_the_engine_rejects_give_the_originals_result(engine_always: None) -> None:
    theirs = original("zero")
    features = draw(ITEMS, 2, 5)
    broken = features.clone()
    broken[3, 1, 2] = math.nan
    large = torch.full((ITEMS, 2, 5), 1e20)
    for given, temperature in ((broken, 0.5), (large, 0.5), (features, -1.0), (features, 0.0), (features[:1, :1], 0.5)):
        loss = ours.SupConLoss(temperature)
        assert_equal(result(loss, given), result(theirs(temperature), given))
        assert loss.evaluated_by == "plain"
    assert ours.SupConLoss(0.5)(torch.ones(3, 2, 4, dtype=torch.int64)).item() == pytest.approx(
        theirs(0.5)(torch.ones(3, 2, 4, dtype=torch.int64)).item(), rel=1e-6
    )


def test_learned_temperature_and_mask_have_the_originals_gradients(form: str) -> None:
    features, mask = draw(ITEMS, 2, 5), targets()["soft mask"]["mask"]
    found = []
    for kind in (ours.SupConLoss, original("zero")):
        temperature = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
        weights = mask.clone().requires_grad_()
        loss = kind(temperature)
        gradients = torch.autograd.grad(loss(features, mask=weights), (temperature, weights))
        gradients += torch.autograd.grad(loss(features, torch.arange(ITEMS) % 3), temperature)
        found.append(gradients)
    for one, other in zip(*found, strict=True):
        bound = 1e-9 if one.dtype == torch.float64 else 1e-5  # the mask is float32
        assert torch.allclose(one, other, rtol=bound, atol=bound)


def test_half_precision_returns_float32(engine_always: None) -> None:
    features = F.normalize(draw(20, 2, 8), dim=2)
    labels = torch.arange(20) % 4
    exact = ours.SupConLoss(0.5)(features, labels)
    for dtype in (torch.bfloat16, torch.float16):
        loss, theirs = ours.SupConLoss(0.5), original("zero")(0.5)
        found, expected = loss(features.to(dtype), labels), theirs(features.to(dtype), labels)
        assert found.dtype == expected.dtype == torch.float32
        assert abs(found - exact) <= abs(expected - exact) + 2**-6
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ours.SupConLoss(0.5)(features.float(), labels).item() == pytest.approx(exact.item(), rel=1e-2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"features": torch.ones(3, 4)}, r"^features: expected shape \[batch, views, \.\.\.\], got shape \[3, 4\]$"),
        (
            {"features": torch.ones(3, 2, 4), "labels": torch.arange(3), "mask": torch.eye(3)},
            "^labels: expected at most one of labels and mask, got both$",
        ),
        (
            {"features": torch.ones(3, 2, 4), "labels": torch.arange(4)},
            "^labels: expected one label per item, 3, got 4$",
        ),
    ],
)
def test_bad_input_raises_a_value_error_as_the_original_does(arguments: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ours.SupConLoss()(**arguments)
    with pytest.raises(ValueError, match=r"."):
        original("nan")()(**arguments)


def test_invalid_options_and_shapes_are_rejected() -> None:
    features = draw(3, 2, 2, 4)
    with pytest.raises(ValueError, match=r"^contrast_mode: expected one of all, one, got 'two'$"):
        ours.SupConLoss(contrast_mode="two")(features)
    with pytest.raises(ValueError, match=r"^no_positive: expected one of zero, nan, got 'drop'$"):
        ours.SupConLoss(no_positive="drop")
    for kind in (ours.SupConLoss, original("nan")):
        for mask in (torch.ones(2, 2), torch.ones(3, 2), torch.ones(4, 4)):
            with pytest.raises(RuntimeError):
                kind()(features, mask=mask)
        with pytest.raises(RuntimeError):  # not contiguous
            kind()(features.transpose(2, 3))


def test_engine_is_used_from_its_size_on() -> None:
    loss, one = ours.SupConLoss(), ours.SupConLoss(contrast_mode="one")
    for items, of_none, of_labels, of_one in (
        (32, "plain", "plain", "plain"),
        (64, "engine", "plain", "plain"),
        (182, "engine", "engine", "plain"),
        (256, "engine", "engine", "engine"),
    ):
        features, labels = F.normalize(draw(items, 2, 16).float(), dim=2), torch.arange(items) % 5
        for module, given, expected in ((loss, None, of_none), (loss, labels, of_labels), (one, labels, of_one)):
            module(features, given)
            assert module.evaluated_by == expected
    loss(features, mask=labels[:, None] == labels)
    assert loss.evaluated_by == "engine"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, while it compiles
def test_compiled_loss_equals_eager() -> None:
    features, labels = F.normalize(draw(ITEMS, 2, 5), dim=2).float(), torch.arange(ITEMS) % 3
    for options in ({}, {"self_in_maximum": False}):
        loss = ours.SupConLoss(**options)
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        assert_equal(
            result(compiled, features, labels=labels), result(ours.SupConLoss(**options), features, labels=labels), 1e-5
        )


def test_docstring_examples_run() -> None:
    failed, attempted = doctest.testmod(ours)
    assert failed == 0
    assert attempted > 0


def test_the_repository_has_no_tests() -> None:
    # Otherwise they should run with our class.
    snapshot("SupContrast")
    assert not [*(Path(os.environ[WHERE]) / "SupContrast").rglob("*test*.py")]
