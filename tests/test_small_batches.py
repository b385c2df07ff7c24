"""Small batches of the losses that combine several sums: one panel, whose gradients are computed by formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from pairproof import fast
from pairproof.fast.engine import blocks, direct, odds
from pairproof.fast.engine.plan import DENSE_UP_TO, UNSHIFTED

N, D = 10, 6
GENERATOR = torch.Generator().manual_seed(21)
ROWS, BANK = (torch.randn(n, D, dtype=torch.float64, generator=GENERATOR) for n in (N, 7))
CLOSE = torch.cat([ROWS[: N // 2], 0.7 * ROWS[: N // 2] + torch.linspace(0, 1, N // 2)[:, None] * ROWS[N // 2 :]])
PARTNERS = fast.stacked_partners(N)
OF_BANK = torch.tensor([0, 3, 6, 3, 2, 1, 1, 5, 4, 0])


def hard_negative(rows: Tensor, bank: Tensor | None = None, **options: Any) -> Tensor:
    given = {"partners": PARTNERS} if bank is None else {"partners": OF_BANK, "ref_embeddings": bank}
    return fast.hard_negative_loss(rows, **{"temperature": 0.3, **given, **options})


def dclw(rows: Tensor, bank: Tensor | None = None, **options: Any) -> Tensor:
    given = {"partners": PARTNERS} if bank is None else {"partners": OF_BANK, "ref_embeddings": bank}
    return fast.dclw_loss(rows, **{"temperature": 0.3, **given, **options})


LOSSES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "hard negatives": (hard_negative, (ROWS,)),
    "hard negatives, several at the floor": (partial(hard_negative, beta=0.5), (CLOSE,)),
    "hard negatives, not debiased": (partial(hard_negative, tau_plus=0.0, beta=2.5), (ROWS,)),
    "hard negatives, without weights": (partial(hard_negative, beta=0.0), (ROWS,)),
    "hard negatives, references": (hard_negative, (ROWS, BANK)),
    "dclw": (dclw, (ROWS,)),
    "dclw, references": (dclw, (ROWS, BANK)),
    "dclw, weights with gradient": (partial(dclw, detach_weights=False), (ROWS,)),
    "dclw, weights with gradient, references": (partial(dclw, detach_weights=False), (ROWS, BANK)),
}
RANKED = ("query_to_query", "doc_to_query", "doc_to_doc")
CHOSEN = ["+".join(("query_to_doc", *names)) for k in range(4) for names in combinations(RANKED, k)]
"""Every combination of directions of the ranking loss."""
HARD = torch.randn(N, 2, D, dtype=torch.float64, generator=GENERATOR)
OTHER = 0.5 * ROWS + torch.randn(N, D, dtype=torch.float64, generator=GENERATOR)


def ranking(a: Tensor, b: Tensor, hard: Tensor | None = None, **options: Any) -> Tensor:
    return fast.multiple_negatives_ranking_loss(a, b, hard_negatives=hard, **{"temperature": 0.3, **options})


for chosen in CHOSEN:
    LOSSES[f"ranking, {chosen}"] = partial(ranking, directions=chosen), (ROWS, OTHER)
    LOSSES[f"ranking with hard negatives, {chosen}"] = partial(ranking, directions=chosen), (ROWS, OTHER, HARD)
    if chosen in ("query_to_doc", "query_to_doc+doc_to_query"):
        for name, rows in (("ranking", (ROWS, OTHER)), ("ranking with hard negatives", (ROWS, OTHER, HARD))):
            LOSSES[f"{name}, {chosen}, per direction"] = (
                partial(ranking, directions=chosen, partition="per_direction"),
                rows,
            )
every = pytest.mark.parametrize(("loss", "inputs"), LOSSES.values(), ids=LOSSES.keys())


def leaves(inputs: tuple[Tensor, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [rows.to(dtype, copy=True).requires_grad_() for rows in inputs]


@pytest.fixture
def panels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules that evaluated a panel, one for each call of a loss."""
    found: list[str] = []
    for module in (odds, blocks):

        def recorded(*given: Any, apply: Any = module._Small.apply, name: str = module.__name__) -> Any:
            found.append(name.split(".")[-1])
            return apply(*given)

        monkeypatch.setattr(module._Small, "apply", recorded)
    return found


@every
@pytest.mark.quick(10)
def test_panel_agrees_with_separate_evaluations(
    loss: Callable[..., Tensor], inputs: tuple[Tensor, ...], panels: list[str]
) -> None:
    for options in ({}, {"reduction": "sum"}, {"reduction": "none"}, {"base_temperature": 0.5}):
        rows = leaves(inputs)
        found = loss(*rows, **options)
        assert len(panels) == 1
        with torch.no_grad():
            assert torch.equal(loss(*rows, **options), found)
        assert torch.equal(loss(*inputs, **options), found)
        assert len(panels) == 1
        upstream = torch.linspace(-1.0, 2.0, found.numel(), dtype=torch.float64) if found.ndim else None
        gradients = torch.autograd.grad(found, rows, upstream)
        panels.clear()
        expected = loss(*rows, backend="exact", **options)
        assert not panels
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
        for ours, right in zip(gradients, torch.autograd.grad(expected, rows, upstream), strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("chosen", CHOSEN)
@pytest.mark.parametrize("hard", [None, HARD], ids=["", "hard negatives"])
@pytest.mark.quick(6)
def test_gradients_with_learned_temperature_and_frozen_rows_equal_the_exact_ones(
    chosen: str, hard: Tensor | None, panels: list[str]
) -> None:
    for frozen in (0, 1, 2):
        rows = leaves((ROWS, OTHER) if hard is None else (ROWS, OTHER, hard))
        if frozen < len(rows):
            rows[frozen].requires_grad_(requires_grad=False)
        temperature = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
        for given in (temperature, 0.3):
            wanted = [x for x in (*rows, given) if isinstance(x, Tensor) and x.requires_grad]
            options: dict[str, Any] = {"directions": chosen, "temperature": given}
            gradients = torch.autograd.grad(ranking(*rows, **options), wanted)
            assert panels == ["blocks"]
            panels.clear()
            expected = torch.autograd.grad(ranking(*rows, backend="exact", **options), wanted)
            for ours, right in zip(gradients, expected, strict=True):
                torch.testing.assert_close(ours, right, rtol=1e-10, atol=1e-13)


def test_dot_products_in_float32_are_right(panels: list[str]) -> None:
    options: dict[str, Any] = {"directions": CHOSEN[-1], "similarity": "dot", "temperature": 2.0}
    rows = leaves((ROWS, OTHER, HARD), torch.float32)
    found = ranking(*rows, **options)
    assert panels == ["blocks"]
    expected = ranking(*rows, backend="exact", **options)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    for ours, right in zip(torch.autograd.grad(found, rows), torch.autograd.grad(expected, rows), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-7)


def test_one_query_has_no_negatives() -> None:
    for chosen in CHOSEN:
        rows = leaves((ROWS[:1], OTHER[:1]))
        found = ranking(*rows, directions=chosen)
        right = math.log(2) if "doc_to_query" in chosen else 0.0  # the denominator contains the positive twice
        assert float(found.detach()) == pytest.approx(right, rel=1e-15)
        for gradient in torch.autograd.grad(found, rows):
            assert not gradient.any()


def test_some_masses_are_at_the_floor_and_some_are_not() -> None:
    loss, inputs = LOSSES["hard negatives, several at the floor"]
    each, other = (loss(*inputs, reduction="none", tau_plus=tau_plus) for tau_plus in (0.1, 0.11))
    assert 0 < int(each.isclose(other, rtol=1e-13).sum()) < N  # at the floor, tau_plus has no effect


@pytest.mark.parametrize("name", [name for name in LOSSES if not name.startswith("ranking") or "per direction" in name])
@pytest.mark.quick(5)
def test_second_derivatives_equal_differences(name: str) -> None:
    loss, inputs = LOSSES[name]
    if loss is dclw:  # its weights are constants for the gradient, but differences of the gradient change them
        loss = partial(dclw, sigma=1e10)
    assert torch.autograd.gradgradcheck(loss, leaves(tuple(rows[..., :2] for rows in inputs)), fast_mode=True)


@every
def test_backward_passes_may_be_repeated(loss: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
    rows = leaves(inputs)
    found = loss(*rows, reduction="none")
    upstream = torch.rand(3, len(found), dtype=torch.float64, generator=GENERATOR)
    each = [torch.autograd.grad(found, rows, one, retain_graph=True) for one in upstream]
    together = torch.func.vmap(lambda one: torch.autograd.grad(found, rows, one, retain_graph=True))(upstream)
    for place, parts in enumerate(zip(*each, strict=True)):
        torch.testing.assert_close(together[place], torch.stack(parts), rtol=1e-10, atol=1e-13)


@every
@pytest.mark.parametrize("scale", [2.0**-100, 2.0**100])
def test_gradient_is_proportional_to_that_of_the_loss(
    loss: Callable[..., Tensor], inputs: tuple[Tensor, ...], scale: float
) -> None:
    rows = leaves(inputs, torch.float32)
    found = loss(*rows, temperature=0.2)
    usual = torch.autograd.grad(found, rows, retain_graph=True)
    for ours, right in zip(torch.autograd.grad(found, rows, torch.tensor(scale)), usual, strict=True):
        torch.testing.assert_close(ours.double() / scale, right.double(), rtol=1e-5, atol=1e-7)


@every
def test_narrow_rows_get_a_gradient_that_is_rounded_once(
    loss: Callable[..., Tensor], inputs: tuple[Tensor, ...]
) -> None:
    rows = leaves(inputs, torch.bfloat16)
    wide = leaves(tuple(row.detach() for row in rows), torch.float32)
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            gradients = torch.autograd.grad(loss(*rows), rows)
        for ours, right in zip(gradients, torch.autograd.grad(loss(*wide), wide), strict=True):
            torch.testing.assert_close(ours, right.bfloat16(), rtol=2.0**-7, atol=1e-6)


@every
def test_rows_that_were_changed_after_the_forward_pass_are_refused(
    loss: Callable[..., Tensor], inputs: tuple[Tensor, ...]
) -> None:
    rows = leaves(inputs)
    copies = [row * 1.0 for row in rows]
    found = loss(*copies)
    copies[-1].detach().add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.backward()


@pytest.mark.usefixtures("torch_operations")
@pytest.mark.parametrize("temperature", [0.001, 0.01, 0.02])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("noise", [0.0, 0.1, 10.0], ids=["solved", "trained", "random"])
@pytest.mark.quick(6)
def test_exponentials_out_of_range_are_shifted(
    temperature: float, dtype: torch.dtype, noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At these temperatures e^(1/T) exceeds float32, at the lowest also float64."""
    count, rows, columns = 40, 40, 40 + DENSE_UP_TO
    generator = torch.Generator().manual_seed(3)
    a, more = (torch.randn(n, 16, generator=generator, dtype=torch.float64) for n in (columns, columns))
    b = (a + noise * more).to(dtype).requires_grad_()
    a = a[:rows].to(dtype).requires_grad_()
    scale = torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
    partners = torch.arange(count).roll(count // 2)
    losses: dict[str, Callable[..., Tensor]] = {
        "both": lambda x, y, **more: fast.info_nce_loss(x, y[:count], temperature=scale, direction="both", **more),
        "one": lambda x, y, **more: fast.info_nce_loss(x, y[:count], temperature=scale, direction="a_to_b", **more),
        "nt_xent": lambda x, y, **more: fast.nt_xent_loss(x + 0 * y[:count], partners, temperature=scale, **more),
        "direct": lambda x, y, **more: fast.info_nce_loss(
            x, y, partners=partners, temperature=scale, direction="a_to_b", no_positive="zero", **more
        ),
    }
    shifts: list[int] = []
    original = direct.shifted
    monkeypatch.setattr(direct, "shifted", lambda *given: shifts.append(1) or original(*given))
    for name, loss in losses.items():
        shifts.clear()
        found = loss(a, b)
        limit = UNSHIFTED[dtype] - math.log(columns if name == "direct" else count)
        assert bool(shifts) == (2 / temperature > limit), name
        gradients = torch.autograd.grad(found, (a, b, scale))
        wide = (a.detach().double().requires_grad_(), b.detach().double().requires_grad_())
        right = loss(*wide, backend="exact")
        bound = 4 * torch.finfo(dtype).eps / temperature
        torch.testing.assert_close(found.double(), right, rtol=bound, atol=torch.finfo(dtype).tiny)
        for ours, exact in zip(gradients, torch.autograd.grad(right, (*wide, scale)), strict=True):
            atol = bound * float(exact.abs().max()) + 1e-30
            torch.testing.assert_close(ours.double(), exact, rtol=0, atol=atol)
        with torch.no_grad():
            assert torch.equal(loss(a, b), found)


def test_a_row_without_negatives_needs_no_shift() -> None:
    rows = torch.eye(2, 3, requires_grad=True)
    loss = fast.nt_xent_loss(rows, torch.tensor([1, 0]), temperature=0.01)
    assert loss.item() == 0.0
    assert torch.equal(torch.autograd.grad(loss, rows)[0], torch.zeros(2, 3))
