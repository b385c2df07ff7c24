"""Layouts of views: which row is which view of which item. Mixing them up is the most common mistake with these losses.

Stacked (SimCLR's reference code, SupContrast, SiT): all first views, then all second views. Interleaved (the pair
notebook): the views of one item side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

LAYOUTS = ("stacked", "interleaved")


def _check_integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}: expected an integer, got {value!r} of type {type(value).__name__}")


def _check_pairs(n: int) -> None:
    _check_integer("n", n)
    if n < 2 or n % 2:
        raise ValueError(f"n: expected an even number of rows, at least 2, got {n}")


def _check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}, got {layout!r}")


def _check_views(count: int, n_views: int) -> None:
    _check_integer("n_views", n_views)
    if n_views < 1 or count % n_views:
        raise ValueError(f"n_views: expected a divisor of the number of rows, {count}, got {n_views}")


def interleaved_partners(n: int) -> npt.NDArray[np.int64]:
    """Partners [N] when two views lie side by side: 1, 0, 3, 2, ...

    Raises:
        TypeError: n is not an integer.
        ValueError: n is odd or less than 2.
    """
    _check_pairs(n)
    return np.array([i + 1 if i % 2 == 0 else i - 1 for i in range(n)])


def stacked_partners(n: int) -> npt.NDArray[np.int64]:
    """Partners [N] when all first views come before all second views: n/2, n/2 + 1, ..., 0, 1, ...

    Raises:
        TypeError: n is not an integer.
        ValueError: n is odd or less than 2.
    """
    _check_pairs(n)
    return np.array([i + n // 2 if i < n // 2 else i - n // 2 for i in range(n)])


def flatten_views(features: npt.ArrayLike, layout: str = "stacked") -> npt.NDArray[Any]:
    """Features [batch, views, dim] as embeddings [views * batch, dim].

    Raises:
        ValueError: features are not three-dimensional; the layout is unknown.
    """
    _check_layout(layout)
    array = np.asarray(features)
    if array.ndim != 3:
        raise ValueError(f"features: expected shape [batch, views, dim], got {list(array.shape)}")
    batch, views, _ = array.shape
    if layout == "stacked":
        rows = [array[b, v] for v in range(views) for b in range(batch)]
    else:
        rows = [array[b, v] for b in range(batch) for v in range(views)]
    return np.array(rows, dtype=array.dtype).reshape(views * batch, array.shape[2])


def split_views(embeddings: npt.ArrayLike, n_views: int, layout: str = "stacked") -> npt.NDArray[Any]:
    """Embeddings [views * batch, dim] as features [batch, views, dim]: the inverse of flatten_views.

    Raises:
        ValueError: embeddings are not two-dimensional; n_views does not divide their number; the layout is unknown.
    """
    _check_layout(layout)
    array = np.asarray(embeddings)
    if array.ndim != 2:
        raise ValueError(f"embeddings: expected shape [N, D], got {list(array.shape)}")
    _check_views(len(array), n_views)
    batch = len(array) // n_views
    features = np.empty((batch, n_views, array.shape[1]), dtype=array.dtype)
    for b in range(batch):
        for v in range(n_views):
            features[b, v] = array[v * batch + b] if layout == "stacked" else array[b * n_views + v]
    return features


def repeat_labels(labels: Sequence[int] | npt.NDArray[Any], n_views: int, layout: str = "stacked") -> npt.NDArray[Any]:
    """Labels [batch] of items as labels [views * batch] of their views.

    Raises:
        TypeError: n_views is not an integer.
        ValueError: labels are not one-dimensional; n_views is less than 1; the layout is unknown.
    """
    _check_layout(layout)
    _check_integer("n_views", n_views)
    if n_views < 1:
        raise ValueError(f"n_views: expected at least 1, got {n_views}")
    array = np.asarray(labels)
    if array.ndim != 1:
        raise ValueError(f"labels: expected shape [batch], got {list(array.shape)}")
    if layout == "stacked":
        repeated = [label for _ in range(n_views) for label in array]
    else:
        repeated = [label for label in array for _ in range(n_views)]
    return np.array(repeated, dtype=array.dtype)
