"""Layouts of views: which row is which view of which item. Mixing up the layouts is a common mistake.

- "stacked": all first views come before all second views, as in SupContrast's ``cat(unbind(features, dim=1))`` and in
  the SimCLR paper's code.
- "interleaved": the views of one item are adjacent, as in the equation of the SimCLR paper.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .checks import check_choice

Layout = Literal["stacked", "interleaved"]
LAYOUTS = ("stacked", "interleaved")


def interleaved_partners(n: int, device: torch.device | str | None = None) -> Tensor:
    """Return the partner of each row, for two views per item in the layout "interleaved".

    Rows 2k and 2k + 1 are partners: 1, 0, 3, 2, ...

    Example:
        >>> from pairproof.fast import interleaved_partners
        >>> items = 3
        >>> interleaved_partners(2 * items)
        tensor([1, 0, 3, 2, 5, 4])

    Args:
        n: number of rows, twice the number of items.
        device: the device of the result.

    Returns:
        int64 ``[n]``.

    Raises:
        TypeError: n is not an integer.
        ValueError: n is odd or less than 2.
    """
    _check_even(n)
    return torch.arange(n, device=device) ^ 1


def stacked_partners(n: int, device: torch.device | str | None = None) -> Tensor:
    """Return the partner of each row, for two views per item in the layout "stacked".

    Rows i and i + n/2 are partners: n/2, n/2 + 1, ..., 0, 1, ...

    Example:
        >>> from pairproof.fast import stacked_partners
        >>> items = 3
        >>> stacked_partners(2 * items)
        tensor([3, 4, 5, 0, 1, 2])

    Args:
        n: number of rows, twice the number of items.
        device: the device of the result.

    Returns:
        int64 ``[n]``.

    Raises:
        TypeError: n is not an integer.
        ValueError: n is odd or less than 2.
    """
    _check_even(n)
    return (torch.arange(n, device=device) + n // 2) % n


def flatten_views(features: Tensor, layout: Layout = "stacked") -> Tensor:
    """Lay out views as rows, the input of the losses.

    Example:
        >>> import torch
        >>> from pairproof.fast import flatten_views
        >>> features = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])
        >>> flatten_views(features).tolist()
        [[1.0], [3.0], [2.0], [4.0]]
        >>> flatten_views(features, "interleaved").tolist()
        [[1.0], [2.0], [3.0], [4.0]]

    Args:
        features: ``[batch, views, dim]``; ``features[b, v]`` is view v of item b.
        layout: row of view v of item b: ``v * batch + b`` for "stacked", ``b * views + v`` for "interleaved".

    Returns:
        Embeddings ``[views * batch, dim]``.

    Raises:
        TypeError: features are not a tensor.
        ValueError: features are not three-dimensional, or the layout is unknown.
    """
    check_choice("layout", layout, LAYOUTS)
    _check_rank("features", features, 3, "[batch, views, dim]")
    return (features.transpose(0, 1) if layout == "stacked" else features).reshape(-1, features.shape[2])


def split_views(embeddings: Tensor, n_views: int, layout: Layout = "stacked") -> Tensor:
    """Group rows into views; the inverse of `flatten_views`.

    Example:
        >>> import torch
        >>> from pairproof.fast import split_views
        >>> split_views(torch.tensor([[1.0], [3.0], [2.0], [4.0]]), n_views=2).tolist()
        [[[1.0], [2.0]], [[3.0], [4.0]]]

    Args:
        embeddings: ``[views * batch, dim]``.
        n_views: number of views per item.
        layout: the layout of the rows, "stacked" or "interleaved".

    Returns:
        Features ``[batch, views, dim]``.

    Raises:
        TypeError: embeddings are not a tensor, or n_views is not an integer.
        ValueError: embeddings are not two-dimensional, n_views is less than 1 or does not divide the number of rows,
            or the layout is unknown.
    """
    check_choice("layout", layout, LAYOUTS)
    _check_rank("embeddings", embeddings, 2, "[views * batch, dim]")
    _check_views(n_views)
    rows, dim = embeddings.shape
    if rows % n_views:
        raise ValueError(f"n_views: expected a divisor of the number of rows, {rows}, got {n_views}")
    items = rows // n_views
    if layout == "stacked":
        return embeddings.reshape(n_views, items, dim).transpose(0, 1)
    return embeddings.reshape(items, n_views, dim)


def repeat_labels(labels: Tensor, n_views: int, layout: Layout = "stacked") -> Tensor:
    """Repeat the label of each item for each view, in the row order of `flatten_views`.

    Example:
        >>> import torch
        >>> from pairproof.fast import repeat_labels
        >>> repeat_labels(torch.tensor([7, 8]), n_views=2)
        tensor([7, 8, 7, 8])
        >>> repeat_labels(torch.tensor([7, 8]), n_views=2, layout="interleaved")
        tensor([7, 7, 8, 8])

    Args:
        labels: ``[batch]``, the label of each item.
        n_views: number of views per item.
        layout: the layout of the rows, "stacked" or "interleaved".

    Returns:
        Labels ``[views * batch]``.

    Raises:
        TypeError: labels are not a tensor, or n_views is not an integer.
        ValueError: labels are not one-dimensional, n_views is less than 1, or the layout is unknown.
    """
    check_choice("layout", layout, LAYOUTS)
    _check_rank("labels", labels, 1, "[batch]")
    _check_views(n_views)
    return labels.repeat(n_views) if layout == "stacked" else labels.repeat_interleave(n_views)


def _check_even(n: int) -> None:
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"n: expected an integer, got {type(n).__name__}")
    if n < 2 or n % 2:
        raise ValueError(f"n: expected an even number of rows, two for each item, got {n}")


def _check_views(n_views: int) -> None:
    if isinstance(n_views, bool) or not isinstance(n_views, int):
        raise TypeError(f"n_views: expected an integer, got {type(n_views).__name__}")
    if n_views < 1:
        raise ValueError(f"n_views: expected at least 1, got {n_views}")


def _check_rank(name: str, value: Tensor, rank: int, shape: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
    if value.ndim != rank:
        raise ValueError(f"{name}: expected shape {shape}, got shape {list(value.shape)}")
