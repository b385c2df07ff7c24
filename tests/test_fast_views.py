"""Layouts of views in `pairproof.fast`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pairproof.fast import (
    flatten_views,
    interleaved_partners,
    nt_xent_loss,
    repeat_labels,
    split_views,
    stacked_partners,
    supcon_loss,
)

FEATURES = torch.arange(3 * 2 * 4, dtype=torch.float32).reshape(3, 2, 4)


def test_partners_follow_the_layout() -> None:
    assert interleaved_partners(6).tolist() == [1, 0, 3, 2, 5, 4]
    assert stacked_partners(6).tolist() == [3, 4, 5, 0, 1, 2]
    assert interleaved_partners(2).tolist() == stacked_partners(2).tolist() == [1, 0]
    assert interleaved_partners(4).dtype == stacked_partners(4).dtype == torch.int64
    assert interleaved_partners(4, device="meta").device.type == "meta"
    assert stacked_partners(4, device="meta").device.type == "meta"


@pytest.mark.parametrize("partners", [interleaved_partners, stacked_partners])
def test_partners_reject_odd_numbers_of_rows(partners: Callable[[int], torch.Tensor]) -> None:
    for n in (7, 1, 0, -2):
        with pytest.raises(ValueError, match=rf"^n: .*even.*got {n}$"):
            partners(n)
    for wrong in (4.0, True):
        with pytest.raises(TypeError, match=r"^n: .*integer"):
            partners(wrong)  # type: ignore[arg-type]


def test_split_views_inverts_flatten_views() -> None:
    stacked = flatten_views(FEATURES)
    assert torch.equal(stacked, torch.cat(FEATURES.unbind(1)))
    interleaved = flatten_views(FEATURES, "interleaved")
    assert torch.equal(interleaved[0], FEATURES[0, 0])
    assert torch.equal(interleaved[1], FEATURES[0, 1])
    assert torch.equal(interleaved[2], FEATURES[1, 0])
    assert torch.equal(split_views(stacked, 2), FEATURES)
    assert torch.equal(split_views(interleaved, 2, "interleaved"), FEATURES)
    assert not torch.equal(split_views(interleaved, 2), FEATURES)


def test_repeated_labels_follow_the_layout() -> None:
    labels = torch.tensor([7, 8, 9])
    assert repeat_labels(labels, 2).tolist() == [7, 8, 9, 7, 8, 9]
    assert repeat_labels(labels, 2, "interleaved").tolist() == [7, 7, 8, 8, 9, 9]


def test_loss_is_the_same_in_both_layouts() -> None:
    features = torch.randn(5, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    stacked = nt_xent_loss(flatten_views(features), stacked_partners(10))
    interleaved = nt_xent_loss(flatten_views(features, "interleaved"), interleaved_partners(10))
    mixed = nt_xent_loss(flatten_views(features), interleaved_partners(10))
    torch.testing.assert_close(stacked, interleaved, rtol=1e-13, atol=0)
    assert not torch.isclose(stacked, mixed)
    labels = torch.tensor([0, 1, 0, 2, 1])
    torch.testing.assert_close(
        supcon_loss(flatten_views(features), repeat_labels(labels, 2)),
        supcon_loss(flatten_views(features, "interleaved"), repeat_labels(labels, 2, "interleaved")),
        rtol=1e-13,
        atol=0,
    )


def test_gradients_flow_through_the_layouts() -> None:
    features = FEATURES.clone().requires_grad_()
    split_views(flatten_views(features, "interleaved") * 2, 2, "interleaved").sum().backward()
    assert features.grad is not None
    assert bool((features.grad == 2).all())


def test_bad_layouts_and_shapes_are_rejected() -> None:
    labels = torch.tensor([0, 1])
    for call in (
        lambda: flatten_views(FEATURES, "side by side"),  # type: ignore[arg-type]
        lambda: split_views(FEATURES[0], 2, "side by side"),  # type: ignore[arg-type]
        lambda: repeat_labels(labels, 2, "side by side"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=r"^layout: .*stacked, interleaved, got 'side by side'$"):
            call()
    with pytest.raises(ValueError, match=r"^features: .*\[batch, views, dim\].*\[2, 4\]"):
        flatten_views(FEATURES[0])
    with pytest.raises(ValueError, match=r"^embeddings: .*\[views \* batch, dim\]"):
        split_views(FEATURES, 2)
    with pytest.raises(ValueError, match=r"^labels: .*\[batch\]"):
        repeat_labels(FEATURES[0], 2)
    with pytest.raises(ValueError, match=r"^n_views: .*divisor.*6, got 4"):
        split_views(flatten_views(FEATURES), 4)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=r"^n_views: .*at least 1"):
            repeat_labels(labels, wrong)
    with pytest.raises(TypeError, match=r"^n_views: .*integer"):
        repeat_labels(labels, 2.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^features: .*tensor"):
        flatten_views([[1.0]])  # type: ignore[arg-type]
