"""Layouts of several views of one batch: which row is whose partner, and ``[batch, views, dim]`` to flat and back.

"stacked" holds all first views, then all second views, as SupContrast's ``cat(unbind(features, dim=1))`` and the SimCLR
paper's code do; "interleaved" holds the views of one item side by side, as SimCLR's equation numbers them. Mixing them
up is the commonest mistake with these losses.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .checks import check_choice

Layout = Literal["stacked", "interleaved"]
LAYOUTS = ("stacked", "interleaved")


def interleaved_partners(n: int, device: torch.device | str | None = None) -> Tensor:
    """Return the partners 1, 0, 3, 2, ... of two views per item, side by side.

    Args:
        n: number of rows, even, at least 2.
        device: where the result lives.

    Returns:
        int64 ``[n]``.

    Raises:
        TypeError: n is no integer.
        ValueError: n is odd or smaller than 2.
    """
    _check_even(n)
    return torch.arange(n, device=device) ^ 1


def stacked_partners(n: int, device: torch.device | str | None = None) -> Tensor:
    """Return the partners of two stacked views: row i goes with row i + n/2, modulo n.

    Args:
        n: number of rows, even, at least 2.
        device: where the result lives.

    Returns:
        int64 ``[n]``.

    Raises:
        TypeError: n is no integer.
        ValueError: n is odd or smaller than 2.
    """
    _check_even(n)
    return (torch.arange(n, device=device) + n // 2) % n


def flatten_views(features: Tensor, layout: Layout = "stacked") -> Tensor:
    """Flatten views ``[B, V, D]`` to embeddings ``[V * B, D]``.

    Args:
        features: ``[B, V, D]``, view v of item b at ``[b, v]``.
        layout: "stacked" puts it at row ``v * B + b``, "interleaved" at row ``b * V + v``.

    Returns:
        Embeddings ``[V * B, D]``.

    Raises:
        TypeError: features is no tensor.
        ValueError: features has another rank, or the layout is unknown.
    """
    check_choice("layout", layout, LAYOUTS)
    _check_rank("features", features, 3, "[B, V, D]")
    return (features.transpose(0, 1) if layout == "stacked" else features).reshape(-1, features.shape[2])


def split_views(embeddings: Tensor, n_views: int, layout: Layout = "stacked") -> Tensor:
    """Split embeddings ``[V * B, D]`` into views ``[B, V, D]``; the inverse of `flatten_views`.

    Args:
        embeddings: ``[V * B, D]``.
        n_views: V, at least 1, a divisor of the number of rows.
        layout: how the rows are ordered, see `flatten_views`.

    Returns:
        Features ``[B, V, D]``.

    Raises:
        TypeError: embeddings is no tensor, or n_views no integer.
        ValueError: a wrong rank, n_views that does not divide the rows, or an unknown layout.
    """
    check_choice("layout", layout, LAYOUTS)
    _check_rank("embeddings", embeddings, 2, "[V * B, D]")
    _check_views(n_views)
    rows, dim = embeddings.shape
    if rows % n_views:
        raise ValueError(f"n_views: expected a divisor of the number of rows, {rows}, got {n_views}")
    items = rows // n_views
    if layout == "stacked":
        return embeddings.reshape(n_views, items, dim).transpose(0, 1)
    return embeddings.reshape(items, n_views, dim)


def repeat_labels(labels: Tensor, n_views: int, layout: Layout = "stacked") -> Tensor:
    """Repeat labels ``[B]`` for every view, in the order that `flatten_views` gives the rows.

    Args:
        labels: ``[B]``.
        n_views: V, at least 1.
        layout: see `flatten_views`.

    Returns:
        Labels ``[V * B]``.

    Raises:
        TypeError: labels is no tensor, or n_views no integer.
        ValueError: a wrong rank, n_views below 1, or an unknown layout.
    """
    check_choice("layout", layout, LAYOUTS)
    _check_rank("labels", labels, 1, "[B]")
    _check_views(n_views)
    return labels.repeat(n_views) if layout == "stacked" else labels.repeat_interleave(n_views)


def _check_even(n: int) -> None:
    if isinstance(n, bool) or not isinstance(n, int):
        raise TypeError(f"n: expected an integer, got {type(n).__name__}")
    if n < 2 or n % 2:
        raise ValueError(f"n: expected an even number of rows, at least 2, got {n}")


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
