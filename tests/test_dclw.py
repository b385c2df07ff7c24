"""The weighted decoupled loss: its weights, its gradient with and without them, and its relation to DCL."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pairproof import fast, reference
from pairproof.conformance.diagnose.identify import identify
from pairproof.reference.dclw import dclw_weights

GENERATOR = torch.Generator().manual_seed(12)
Z = torch.randn(10, 4, dtype=torch.float64, generator=GENERATOR)
PARTNERS = fast.stacked_partners(10)
ITEMS = torch.arange(5).repeat(2)
BACKENDS = ("dense", "tiled", "exact")


def by_items(z: torch.Tensor, sigma: float, temperature: float, detach: bool, number: bool = True) -> torch.Tensor:
    """The mean over both views, from two matrices of cosines of the views, as public code computes it."""
    a, b = F.normalize(z, dim=1).chunk(2)
    n = len(a)
    closeness = (a * b).sum(dim=1)
    weights = 2 - (n if number else 1) * ((closeness.detach() if detach else closeness) / sigma).softmax(dim=0)
    values = []
    for one, other in ((a, b), (b, a)):
        logits = torch.cat([one @ one.T, one @ other.T], dim=1) / temperature
        masked = logits.masked_fill(torch.eye(n, dtype=torch.bool).repeat(1, 2), -math.inf)
        values.append(masked.logsumexp(dim=1) - weights * closeness / temperature)
    return torch.cat(values).mean()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize(("sigma", "temperature"), [(0.5, 0.1), (0.05, 0.3), (3.0, 1.0)])
def test_value_and_gradient_are_those_of_two_views(
    backend: Any, detach: bool, sigma: float, temperature: float
) -> None:
    rows, same = (Z.clone().requires_grad_() for _ in range(2))
    t = torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
    options: dict[str, Any] = {"sigma": sigma, "detach_weights": detach, "backend": backend}
    found = fast.dclw_loss(rows, PARTNERS, temperature=t, **options)
    expected = by_items(same, sigma, temperature, detach)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    gradient, of_temperature = torch.autograd.grad(found, (rows, t))
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, same)[0], rtol=1e-10, atol=1e-12)
    ends = [by_items(Z, sigma, temperature + step, detach) for step in (1e-6, -1e-6)]
    assert float(of_temperature) == pytest.approx(float(ends[0] - ends[1]) / 2e-6, rel=1e-6)
    loops = reference.dclw_loss(Z.numpy(), PARTNERS.numpy(), temperature=temperature, sigma=sigma).loss
    assert loops == pytest.approx(expected.item(), rel=1e-12)


def test_value_equals_that_computed_by_hand() -> None:
    """Two items, the cosines of whose views are 0.6 and 0."""
    rows = [[1.0, 0.0], [0.8, 0.6], [0.6, 0.8], [-0.6, 0.8]]
    mean = (math.exp(1.2) + 1) / 2
    weights = [2 - math.exp(1.2) / mean, 2 - 1 / mean]
    closeness = [0.6, 0.0]
    negatives = {0: (0.8, -0.6), 1: (0.8, 0.96), 2: (0.96, 0.28), 3: (-0.6, 0.28)}
    values = [
        math.log(sum(math.exp(10 * c) for c in negatives[i])) - 10 * weights[i % 2] * closeness[i % 2] for i in range(4)
    ]
    found = reference.dclw_loss(rows, [2, 3, 0, 1], reduction="none").loss
    assert found == pytest.approx(values, rel=1e-14)
    assert math.fsum(values) / 4 == pytest.approx(6.1574, abs=5e-5)


def test_weights_have_the_mean_one_and_may_be_negative() -> None:
    rows = F.normalize(Z, dim=1)
    similarity = (rows @ rows.T).tolist()
    positives = [[p] for p in PARTNERS.tolist()]
    for sigma in (0.01, 0.5, 1e9):
        weights = [w for (w,) in dclw_weights(similarity, positives, [], sigma=sigma)]
        assert math.fsum(weights) / 10 == pytest.approx(1, abs=1e-12)
    # At a small sigma, only the item with the closest views has a weight other than 2; both of its rows have 2 - 5.
    weights = sorted(w for (w,) in dclw_weights(similarity, positives, [], sigma=1e-6))
    assert weights == pytest.approx([-3, -3, *[2] * 8])


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_sigma_gives_dcl(backend: Any) -> None:
    for options in ({"temperature": 0.1}, {"temperature": 0.5, "reduction": "none"}):
        found = fast.dclw_loss(Z, PARTNERS, sigma=1e10, backend=backend, **options)  # type: ignore[arg-type]
        dcl = fast.supcon_loss(Z, ITEMS, denominator="only_negatives", **options)  # type: ignore[arg-type]
        torch.testing.assert_close(found, dcl, rtol=1e-8, atol=0)


def test_weights_are_those_of_all_rows_whether_they_are_anchors_or_not() -> None:
    whole = fast.dclw_loss(Z, PARTNERS, reduction="none")
    anchors = torch.arange(10) % 3 == 0
    part = fast.dclw_loss(Z, PARTNERS, anchors=anchors, reduction="none")
    torch.testing.assert_close(part, whole[anchors], rtol=1e-13, atol=0)
    rows = Z.clone().requires_grad_()
    alone = torch.zeros(10, dtype=torch.bool)
    alone[0] = True
    (held,) = torch.autograd.grad(fast.dclw_loss(rows, PARTNERS, anchors=alone, reduction="sum"), rows)
    loss = fast.dclw_loss(rows, PARTNERS, anchors=alone, reduction="sum", detach_weights=False)
    (through,) = torch.autograd.grad(loss, rows)
    expected = by_one_anchor(rows)
    torch.testing.assert_close(through, expected, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(through, held, atol=1e-3)


def by_one_anchor(rows: torch.Tensor) -> torch.Tensor:
    """The gradient of the value of row 0 with differentiated weights, by automatic differentiation."""
    unit = F.normalize(rows, dim=1)
    closeness = (unit * unit[PARTNERS]).sum(dim=1)
    weights = 2 - 10 * (closeness / 0.5).softmax(dim=0)
    s = unit[0] @ unit.T / 0.1
    value = s[[1, 2, 3, 4, 6, 7, 8, 9]].logsumexp(dim=0) - weights[0] * s[5]
    (found,) = torch.autograd.grad(value, rows)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_negatives_the_loss_and_its_gradient_are_zero(backend: Any) -> None:
    rows = Z[:2].clone().requires_grad_()
    loss = fast.dclw_loss(rows, torch.tensor([1, 0]), backend=backend, detach_weights=False)
    assert loss == 0
    assert not torch.autograd.grad(loss, rows)[0].any()
    assert reference.dclw_loss(Z[:2].numpy(), [1, 0]).loss == 0


@pytest.mark.parametrize("detach", [True, False])
def test_rows_of_another_process_are_references(detach: bool) -> None:
    """As with lightly's ``gather_distributed``: weights depend on own rows only; negatives come from all processes."""
    own, z = slice(2, 4), Z.clone().requires_grad_()
    a, b = F.normalize(z, dim=1).chunk(2)
    closeness = (a * b).sum(dim=1)[own]
    weights = 2 - 2 * ((closeness.detach() if detach else closeness) / 0.5).softmax(dim=0)
    mask = torch.eye(5, dtype=torch.bool)[own].repeat(1, 2)
    logits = torch.cat([a[own] @ a.T, a[own] @ b.T], dim=1) / 0.1
    expected = (logits.masked_fill(mask, -math.inf).logsumexp(dim=1) - weights * closeness / 0.1).mean()
    rows, references = Z[own].clone().requires_grad_(), Z.clone().requires_grad_()
    found = fast.dclw_loss(
        rows,
        torch.tensor([7, 8]),
        ref_embeddings=references,
        self_rows=torch.tensor([2, 3]),
        detach_weights=detach,
    )
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    of_rows, of_references = torch.autograd.grad(found, (rows, references))
    (whole,) = torch.autograd.grad(expected, z)
    of_references[own] += of_rows
    torch.testing.assert_close(of_references, whole, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_loss_is_the_same() -> None:
    compiled = torch.compile(fast.dclw_loss, fullgraph=True, backend="aot_eager")
    rows, same = (Z.clone().requires_grad_() for _ in range(2))
    for detach in (True, False):
        loss, expected = (f(z, PARTNERS, detach_weights=detach) for f, z in ((compiled, rows), (fast.dclw_loss, same)))
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(torch.autograd.grad(loss, rows), torch.autograd.grad(expected, same))


def test_module_takes_and_validates_the_options() -> None:
    module = fast.DCLWLoss(sigma=0.2, detach_weights=False, temperature=torch.nn.Parameter(torch.tensor(0.3)))
    assert [name for name, _ in module.named_parameters()] == ["temperature"]
    assert module(Z, PARTNERS) == fast.dclw_loss(Z, PARTNERS, sigma=0.2, temperature=module.temperature)
    with pytest.raises(ValueError, match=r"^sigma: expected a number in the range 1e-10 to 1e\+10, got 0\.0$"):
        fast.DCLWLoss(sigma=0.0)
    with pytest.raises(ValueError, match=r"^detach_weights: expected one of True, False, got 'no'$"):
        fast.DCLWLoss(detach_weights="no")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "options", "wrong"),
    [
        ({}, {}, []),
        ({"detach": False}, {"detach_weights": "False"}, []),
        ({"sigma": 1.0}, {"sigma": "1.0"}, []),
        pytest.param(
            *({"number": False}, {}, ["the softmax of the weights is not multiplied by the number of items"]),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *({"number": False, "detach": False}, {"detach_weights": "False"}),
            ["the softmax of the weights is not multiplied by the number of items"],
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.quick(1)
def test_identify_names_outside_code(given: dict[str, Any], options: dict[str, str], wrong: list[str]) -> None:
    chosen = {"sigma": 0.5, "temperature": 0.1, "detach": True, **given}

    def loss(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return by_items(torch.cat([one, other]), **chosen)

    found = identify(loss, call="views", arrays="torch")
    assert (found.loss, found.options, found.wrong) == ("dclw", options, wrong), found.lines()
    assert found.temperature == pytest.approx(0.1, rel=1e-6)


def test_identify_names_dcl() -> None:
    """DCL is SupCon against the negatives alone; the weights of an infinite sigma are 1."""
    found = identify(lambda a, b: by_items(torch.cat([a, b]), math.inf, 0.1, True), call="views", arrays="torch")
    assert (found.loss, found.options, found.wrong) == ("supcon", {"denominator": "only_negatives"}, []), found.lines()


def test_identify_names_sincere() -> None:
    """SINCERE is SupCon whose denominators contain one positive each, which is pairwise NT-Xent."""

    def sincere(z: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        unit = F.normalize(z, dim=1)
        s, same = unit @ unit.T / 0.1, labels[:, None] == labels
        below = torch.logaddexp(s, s.masked_fill(same, -math.inf).logsumexp(dim=1, keepdim=True))
        positive = same & ~torch.eye(len(z), dtype=torch.bool)
        return ((below - s) * positive).sum(dim=1).div(positive.sum(dim=1).clamp(min=1)).mean()

    found = identify(sincere, call="labels", arrays="torch")
    assert (found.loss, found.options, found.wrong) == ("nt_xent_pairwise", {}, []), found.lines()
    assert "supcon with denominator=one_positive" in found.equals


def test_terms_of_the_reference_have_the_weighted_logit() -> None:
    found = reference.dclw_loss(Z.numpy(), PARTNERS.numpy())
    assert set(found.terms.pairs) == set(enumerate(PARTNERS.tolist()))
    similarity = np.array(found.terms.similarity)
    e = np.exp(similarity[range(10), PARTNERS.tolist()] / 0.5)
    for (i, p), pair in found.terms.pairs.items():
        assert pair.members == tuple(j for j in range(10) if j not in (i, p))
        assert pair.log_numerator == pytest.approx((2 - e[i] / e.mean()) * found.terms.logits[i][p], rel=1e-12)
        assert pair.value == pytest.approx(pair.log_denominator - pair.log_numerator, rel=1e-12)
