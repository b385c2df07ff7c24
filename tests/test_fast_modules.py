"""Module faces of ``pairproof.fast``: the same options, defaults and results as the functions."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pairproof import fast
from pairproof.fast import (
    NTBXentLoss,
    NTXentLoss,
    NTXentPairwiseLoss,
    SupConEpsilonLoss,
    SupConInLoss,
    SupConLoss,
    nt_bxent_loss,
    nt_xent_loss,
    nt_xent_pairwise_loss,
    supcon_epsilon_loss,
    supcon_in_loss,
    supcon_loss,
)

Z = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
LABELS = torch.tensor([0, 0, 1, 1, 1, 2])
ANCHORS = torch.tensor([True, True, False, True, True, True])
OPTIONS: dict[str, Any] = {"temperature": 0.3, "base_temperature": 0.1, "similarity": "dot", "reduction": "sum"}
PAIRS: list[tuple[type[torch.nn.Module], Callable[..., torch.Tensor], torch.Tensor, dict[str, Any]]] = [
    (
        SupConLoss,
        supcon_loss,
        LABELS,
        {"denominator": "only_negatives", "no_positive": "drop", "no_negative": "nan"},
    ),
    (
        SupConInLoss,
        supcon_in_loss,
        LABELS,
        {"denominator": "one_positive", "no_positive": "drop", "no_negative": "nan"},
    ),
    (SupConEpsilonLoss, supcon_epsilon_loss, LABELS, {"similarity": "cosine", "no_positive": "drop"}),
    (NTXentPairwiseLoss, nt_xent_pairwise_loss, LABELS, {"reduction": "mean_pairs", "no_positive": "drop"}),
    (NTXentLoss, nt_xent_loss, torch.tensor([1, 0, 3, 2, 5, 4]), {}),
    (NTBXentLoss, nt_bxent_loss, torch.tensor([[0, 1], [3, 2]]), {"no_negative": "nan"}),
]


@pytest.mark.parametrize(("module", "function", "targets", "extra"), PAIRS)
def test_module_equals_function(
    module: type[torch.nn.Module],
    function: Callable[..., torch.Tensor],
    targets: torch.Tensor,
    extra: dict[str, Any],
) -> None:
    assert torch.equal(module()(Z, targets), function(Z, targets))
    options = {**OPTIONS, **extra, "validate": True}
    made = module(**options)
    plain = function(Z, targets, **options)
    assert torch.equal(made(Z, targets), plain)
    assert not torch.equal(made(Z, targets), function(Z, targets))
    assert torch.equal(made(Z, targets, anchors=ANCHORS), function(Z, targets, anchors=ANCHORS, **options))
    assert torch.equal(pickle.loads(pickle.dumps(made))(Z, targets), plain)
    for key, value in options.items():
        assert f"{key}={value!r}" in repr(made)
    assert not list(made.parameters())


@pytest.mark.parametrize(("module", "function", "targets", "extra"), PAIRS)
def test_options_are_keywords_with_the_function_s_defaults(
    module: type[torch.nn.Module],
    function: Callable[..., torch.Tensor],
    targets: torch.Tensor,
    extra: dict[str, Any],
) -> None:
    taken = dict(inspect.signature(module.__init__).parameters)
    taken.pop("self")
    wanted = {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if "Tensor" not in str(parameter.annotation) or name == "temperature"
    }
    assert {name: parameter.default for name, parameter in taken.items()} == {
        name: parameter.default for name, parameter in wanted.items()
    }
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in taken.values())
    assert set(extra) <= set(wanted)


def test_modules_take_a_mask() -> None:
    mask = LABELS[:, None] == LABELS[None, :]
    for module in (SupConLoss, SupConInLoss, SupConEpsilonLoss, NTXentPairwiseLoss):
        torch.testing.assert_close(module()(Z, positives=mask), module()(Z, LABELS))
        exact = module(backend="exact")
        assert torch.equal(exact(Z, positives=mask), exact(Z, LABELS))


def test_everything_exported_is_there_and_described() -> None:
    for name in fast.__all__:
        assert getattr(fast, name).__doc__
