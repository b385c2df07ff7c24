"""The layouts of views are the same in both packages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pairproof import fast, reference


@pytest.mark.parametrize("n", [2, 4, 8, 10])
def test_partners_are_the_same_in_both_packages(n: int) -> None:
    for name in ("interleaved_partners", "stacked_partners"):
        assert getattr(fast, name)(n).tolist() == getattr(reference, name)(n).tolist()


@pytest.mark.parametrize("layout", ["stacked", "interleaved"])
@pytest.mark.parametrize(("batch", "views"), [(3, 2), (2, 3), (1, 4), (5, 1)])
def test_layouts_are_the_same_in_both_packages(layout: str, batch: int, views: int) -> None:
    features = np.arange(batch * views * 2.0).reshape(batch, views, 2)
    flat = reference.flatten_views(features, layout)
    assert np.array_equal(fast.flatten_views(torch.tensor(features), layout).numpy(), flat)
    assert np.array_equal(fast.split_views(torch.tensor(flat), views, layout).numpy(), features)
    labels = list(range(10, 10 + batch))
    expected = reference.repeat_labels(labels, views, layout).tolist()
    assert fast.repeat_labels(torch.tensor(labels), views, layout).tolist() == expected
