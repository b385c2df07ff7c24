"""Layouts of views: which row is which view of which item. Mixing them up is a common mistake.

"stacked"
    All first views come before all second views, as in SimCLR, SupContrast and SiT (arXiv 2104.03602).
"interleaved"
    The views of an item are adjacent, as in the multi-label notebook (fixtures/worked/pair_notebook.json).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

LAYOUTS = ("stacked", "interleaved")


def _check_integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}: expected an integer, got {type(value).__name__}")


def _check_pairs(n: int) -> None:
    _check_integer("n", n)
    if n < 2 or n % 2:
        raise ValueError(f"n: expected an even number of rows, two for each item, got {n}")


def _check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}, got {layout!r}")


def _check_views(n_views: int) -> None:
    _check_integer("n_views", n_views)
    if n_views < 1:
        raise ValueError(f"n_views: expected at least 1, got {n_views}")


def interleaved_partners(n: int) -> npt.NDArray[np.int64]:
    """Return the partner of each row, for two views per item in the layout "interleaved".

    Rows 2k and 2k + 1 are partners.

    Example:
        >>> items = 3
        >>> interleaved_partners(2 * items).tolist()
        [1, 0, 3, 2, 5, 4]

    Args:
        n: number of rows, twice the number of items.

    Returns:
        [n] integers.

    Raises:
        TypeError: n is not an integer.
        ValueError: n is odd or less than 2.
    """
    _check_pairs(n)
    return np.array([i + 1 if i % 2 == 0 else i - 1 for i in range(n)])


def stacked_partners(n: int) -> npt.NDArray[np.int64]:
    """Return the partner of each row, for two views per item in the layout "stacked".

    Rows i and i + n/2 are partners.

    Example:
        >>> items = 3
        >>> stacked_partners(2 * items).tolist()
        [3, 4, 5, 0, 1, 2]

    Args:
        n: number of rows, twice the number of items.

    Returns:
        [n] integers.

    Raises:
        TypeError: n is not an integer.
        ValueError: n is odd or less than 2.
    """
    _check_pairs(n)
    return np.array([i + n // 2 if i < n // 2 else i - n // 2 for i in range(n)])


def flatten_views(features: npt.ArrayLike, layout: str = "stacked") -> npt.NDArray[Any]:
    """Return views as rows, the input of the losses.

    Example:
        >>> features = [[[1.0], [2.0]], [[3.0], [4.0]]]
        >>> flatten_views(features).tolist()
        [[1.0], [3.0], [2.0], [4.0]]
        >>> flatten_views(features, "interleaved").tolist()
        [[1.0], [2.0], [3.0], [4.0]]

    Args:
        features: [batch, views, dim]; features[b, v] is view v of item b.
        layout: "stacked": this view becomes row v * batch + b. "interleaved": it becomes row b * views + v.

    Returns:
        Embeddings [views * batch, dim].

    Raises:
        ValueError: features are not three-dimensional, or the layout is unknown.
    """
    _check_layout(layout)
    array = np.asarray(features)
    if array.ndim != 3:
        raise ValueError(f"features: expected shape [batch, views, dim], got shape {list(array.shape)}")
    batch, views, _ = array.shape
    if layout == "stacked":
        rows = [array[b, v] for v in range(views) for b in range(batch)]
    else:
        rows = [array[b, v] for b in range(batch) for v in range(views)]
    return np.array(rows, dtype=array.dtype).reshape(views * batch, array.shape[2])


def split_views(embeddings: npt.ArrayLike, n_views: int, layout: str = "stacked") -> npt.NDArray[Any]:
    """Return rows as views: the inverse of flatten_views.

    Example:
        >>> split_views([[1.0], [3.0], [2.0], [4.0]], n_views=2).tolist()
        [[[1.0], [2.0]], [[3.0], [4.0]]]

    Args:
        embeddings: [views * batch, dim].
        n_views: number of views per item.
        layout: the layout of the rows, "stacked" or "interleaved".

    Returns:
        Features [batch, views, dim].

    Raises:
        TypeError: n_views is not an integer.
        ValueError: embeddings are not two-dimensional, n_views is less than 1 or does not divide the number of rows,
            or the layout is unknown.
    """
    _check_layout(layout)
    array = np.asarray(embeddings)
    if array.ndim != 2:
        raise ValueError(f"embeddings: expected shape [views * batch, dim], got shape {list(array.shape)}")
    _check_views(n_views)
    if len(array) % n_views:
        raise ValueError(f"n_views: expected a divisor of the number of rows, {len(array)}, got {n_views}")
    batch = len(array) // n_views
    features = np.empty((batch, n_views, array.shape[1]), dtype=array.dtype)
    for b in range(batch):
        for v in range(n_views):
            features[b, v] = array[v * batch + b] if layout == "stacked" else array[b * n_views + v]
    return features


def repeat_labels(labels: Sequence[int] | npt.NDArray[Any], n_views: int, layout: str = "stacked") -> npt.NDArray[Any]:
    """Repeat the label of each item for its views, in the row order of flatten_views.

    Example:
        >>> repeat_labels([7, 8], n_views=2).tolist()
        [7, 8, 7, 8]
        >>> repeat_labels([7, 8], n_views=2, layout="interleaved").tolist()
        [7, 7, 8, 8]

    Args:
        labels: [batch], the label of each item.
        n_views: number of views per item.
        layout: the layout of the rows, "stacked" or "interleaved".

    Returns:
        Labels [views * batch].

    Raises:
        TypeError: n_views is not an integer.
        ValueError: labels are not one-dimensional, n_views is less than 1, or the layout is unknown.
    """
    _check_layout(layout)
    _check_views(n_views)
    array = np.asarray(labels)
    if array.ndim != 1:
        raise ValueError(f"labels: expected shape [batch], got shape {list(array.shape)}")
    if layout == "stacked":
        repeated = [label for _ in range(n_views) for label in array]
    else:
        repeated = [label for label in array for _ in range(n_views)]
    return np.array(repeated, dtype=array.dtype)
