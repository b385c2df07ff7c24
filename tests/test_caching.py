"""Gradient caching gives the gradients of the whole batch, for every size of the chunks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pairproof.fast import cached_backward, info_nce_loss, supcon_loss

X = torch.randn(10, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(10) // 2
SIZES = [1, 3, 5, 10, 64]


def encoder_of(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), *more, nn.Linear(5, 4)).double()


def supcon(z: Tensor) -> Tensor:
    return supcon_loss(z, LABELS)


def gradients(module: nn.Module) -> list[Tensor]:
    """Return the gradients of the parameters, and remove them."""
    found = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    assert all(one is not None for one in found)
    return found  # type: ignore[return-value]


def assert_same(found: list[Tensor], expected: list[Tensor], **tolerance: float) -> None:
    tolerance = tolerance or {"rtol": 1e-12, "atol": 1e-12}
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("size", SIZES)
def test_gradients_are_those_of_the_whole_batch(size: int) -> None:
    encoder = encoder_of()
    whole = supcon(encoder(X))
    whole.backward()
    expected = gradients(encoder)
    value = cached_backward(supcon, (encoder, X), chunk_size=size)
    assert not value.requires_grad
    torch.testing.assert_close(value, whole.detach(), rtol=1e-14, atol=0)
    assert_same(gradients(encoder), expected)


@pytest.mark.parametrize("size", SIZES)
def test_dropout_is_the_same_in_both_passes(size: int) -> None:
    encoder = encoder_of(nn.Dropout(0.4))
    torch.manual_seed(5)
    whole = supcon(torch.cat([encoder(part) for part in X.split(size)]))
    whole.backward()
    expected, next_number = gradients(encoder), torch.rand(1)
    torch.manual_seed(5)
    value = cached_backward(supcon, (encoder, X), chunk_size=size)
    torch.testing.assert_close(value, whole.detach(), rtol=1e-14, atol=0)
    assert_same(gradients(encoder), expected)
    assert torch.rand(1) == next_number  # as without a cache, numbers are drawn once


def test_random_numbers_of_the_loss_are_drawn_once() -> None:
    encoder = encoder_of(nn.Dropout(0.4))

    def noisy(z: Tensor) -> Tensor:
        return supcon(z + torch.randn_like(z))

    torch.manual_seed(5)
    noisy(encoder(X)).backward()
    expected, next_number = gradients(encoder), torch.rand(1)
    torch.manual_seed(5)
    cached_backward(noisy, (encoder, X), chunk_size=10)
    assert_same(gradients(encoder), expected)
    assert torch.rand(1) == next_number


@pytest.mark.parametrize("shared", [False, True])
def test_two_towers_and_a_learned_temperature_get_the_gradients_of_the_whole_batch(shared: bool) -> None:
    first = encoder_of(nn.Dropout(0.2))
    second = first if shared else encoder_of(nn.Linear(5, 5))
    log_scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
    every = nn.ModuleList([first, second, nn.ParameterList([log_scale])])

    def clip(a: Tensor, b: Tensor) -> Tensor:
        return info_nce_loss(a, b, temperature=torch.exp(-log_scale))

    torch.manual_seed(6)
    a = torch.cat([first(part) for part in X.split(4)])
    b = torch.cat([second(part) for part in (X + 1).split(4)])
    clip(a, b).backward()
    expected = gradients(every)
    torch.manual_seed(6)
    cached_backward(clip, (first, X), (second, X + 1), chunk_size=4)
    assert_same(gradients(every), expected)


def test_gradients_are_added_and_inputs_may_be_nested() -> None:
    encoder = encoder_of()

    def encode(inputs: dict[str, Any]) -> Tensor:
        assert len(inputs["rows"]) == len(inputs["more"][0]) <= 4
        return encoder(inputs["rows"] + inputs["more"][0])

    (3 * supcon(encoder(X))).backward()
    expected = gradients(encoder)
    halves = {"rows": X / 2, "more": (X / 2,)}
    cached_backward(supcon, (encode, halves), chunk_size=4)
    cached_backward(supcon, (encode, halves), chunk_size=4, backward=lambda loss: (2 * loss).backward())
    assert_same(gradients(encoder), expected)


def test_no_more_rows_than_a_chunk_have_a_graph() -> None:
    encoder = encoder_of()
    with_graph = []
    encoder.register_forward_hook(
        lambda _, given, rows: with_graph.append(len(given[0])) if rows.requires_grad else None
    )
    cached_backward(supcon, (encoder, X), chunk_size=4)
    assert with_graph == [4, 4, 2]


def test_autocast_keeps_the_gradients_of_the_parameters() -> None:
    encoder, rows = encoder_of().float(), X.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        supcon(encoder(rows)).backward()
    expected = gradients(encoder)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cached_backward(supcon, (encoder, rows), chunk_size=3)
    assert_same(gradients(encoder), expected, rtol=0.05, atol=0.02 * max(float(one.abs().max()) for one in expected))


class Counted(nn.Module):
    """An encoder with the method of ``DistributedDataParallel`` that suspends the exchange of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.exchanges, self.exchange = encoder_of(), 0, True
        self.layer[0].weight.register_post_accumulate_grad_hook(self.count)

    def count(self, _: Tensor) -> None:
        self.exchanges += self.exchange

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.exchange = False
        yield
        self.exchange = True

    def forward(self, rows: Tensor) -> Tensor:
        return self.layer(rows)


def test_gradients_are_exchanged_once() -> None:
    encoder = Counted()
    cached_backward(supcon, (encoder, X), chunk_size=3)
    assert encoder.exchanges == 1
    cached_backward(info_nce_loss, (encoder, X), (encoder, X + 1), chunk_size=3)
    assert encoder.exchanges == 2
    # The last tower of the encoder has no gradient.
    cached_backward(lambda first, _: supcon(first), (encoder, X), (encoder, X + 1), chunk_size=3)
    assert encoder.exchanges == 3


def test_a_frozen_tower_gets_no_gradient() -> None:
    first, second = encoder_of(), encoder_of().requires_grad_(False)
    cached_backward(info_nce_loss, (first, X), (second, X), chunk_size=4)
    assert all(one.abs().sum() > 0 for one in gradients(first)[:-1])
    assert all(parameter.grad is None for parameter in second.parameters())


def test_random_numbers_that_do_not_come_from_torch_raise_an_error() -> None:
    encoder = encoder_of()
    message = "the encoder returns other embeddings in the second pass"
    with pytest.raises(RuntimeError, match=message):
        cached_backward(supcon, (lambda rows: encoder(rows) * random.random(), X), chunk_size=4)


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (TypeError, "chunk_size: expected an integer, got float", {"chunk_size": 2.0}),
        (ValueError, "chunk_size: expected at least 1, got 0", {"chunk_size": 0}),
        (ValueError, "towers: expected at least one pair", {"towers": []}),
        (TypeError, r"towers\[0\]: expected a pair \(encoder, inputs\), got Tensor", {"towers": [X]}),
        (TypeError, r"towers\[0\]: expected inputs that are tensors with rows, got str", {"towers": [(len, "rows")]}),
        (ValueError, r"the same number of rows, at least 1, got \[9, 10\]", {"towers": [(encoder_of(), (X, X[1:]))]}),
        (ValueError, r"the same number of rows, at least 1, got \[0\]", {"towers": [(encoder_of(), X[:0])]}),
        (TypeError, "an encoder that returns a tensor, got int", {"towers": [(len, X)]}),
        (ValueError, r"one embedding for each of 3 rows, got shape \[6\]", {"towers": [(lambda x: x.sum(0), X)]}),
        (ValueError, r"BatchNorm1d '2' is in training mode", {"towers": [(encoder_of(nn.BatchNorm1d(5)), X)]}),
        (ValueError, r"loss: expected a scalar, got shape \[10\]", {"loss": lambda z: z.sum(1)}),
        (ValueError, "loss: expected a scalar, got float", {"loss": lambda z: float(z.detach().sum())}),
    ],
)
def test_invalid_arguments_are_rejected(error: type[Exception], message: str, change: dict[str, Any]) -> None:
    given = {"loss": supcon, "towers": [(encoder_of(), X)], "chunk_size": 3} | change
    with pytest.raises(error, match=message):
        cached_backward(given["loss"], *given["towers"], chunk_size=given["chunk_size"])


def test_batch_normalisation_in_evaluation_mode_is_accepted() -> None:
    encoder = encoder_of(nn.BatchNorm1d(5)).eval()
    supcon(encoder(X)).backward()
    expected = gradients(encoder)
    cached_backward(supcon, (encoder, X), chunk_size=3)
    assert_same(gradients(encoder), expected)
