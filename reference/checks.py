"""What an argument must be. Every message names the argument, what is expected and what was got."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .similarity import order
from .terms import Scalar

CHOICES = {
    "similarity": ("cosine", "dot"),
    "denominator": ("all", "one_positive", "only_negatives"),
    "no_positive": ("zero", "drop", "nan"),
    "no_negative": ("zero", "nan"),
    "reduction": ("mean", "sum", "none"),
}


def check_choice(name: str, value: object, *more: str) -> None:
    """Refuse an option value outside the list of allowed ones."""
    allowed = (*CHOICES[name], *more)
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}")


def check_temperature(name: str, value: object) -> None:
    """Refuse anything but a positive finite number."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a number, got {value!r} of type {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name}: expected a positive finite number, got {value!r}")


def check_embeddings(embeddings: npt.ArrayLike, similarity: str) -> list[list[Scalar]]:
    """The embeddings as nested lists of scalars, [N][D].

    Half and single precision become float64 exactly; complex and object scalars are taken as they are.
    """
    array = _array("embeddings", embeddings)
    if array.dtype.kind not in "fcO":
        raise TypeError(f"embeddings: expected a floating dtype, got {array.dtype}")
    if array.ndim != 2:
        raise ValueError(f"embeddings: expected shape [N, D], got {list(array.shape)}")
    if array.shape[0] < 2:
        raise ValueError(f"embeddings: expected at least 2 rows, got shape {list(array.shape)}")
    if array.shape[1] < 1:
        raise ValueError(f"embeddings: expected at least 1 column, got shape {list(array.shape)}")
    rows: list[list[Scalar]] = (array.astype(np.float64) if array.dtype.kind == "f" else array).tolist()
    for i, row in enumerate(rows):
        for x in row:
            if isinstance(x, (bool, int, str)) or x is None:
                raise TypeError(f"embeddings: expected a floating dtype, got {type(x).__name__} in row {i}")
            if not (math.isfinite(order(x)) and np.isfinite(float(np.ravel(np.imag(x))[0]))):
                raise ValueError(f"embeddings: expected finite values, got {x} in row {i}")
        if similarity == "cosine" and all(order(x) == 0 for x in row):
            raise ValueError(f"embeddings: expected no zero vector under cosine similarity, got one in row {i}")
    return rows


def _array(name: str, values: object) -> npt.NDArray[Any]:
    try:
        return np.asarray(values)
    except ValueError:
        raise ValueError(f"{name}: expected a rectangular array, got rows of different lengths") from None


def _integers(name: str, values: object, kinds: str = "iu") -> npt.NDArray[Any]:
    array = _array(name, values)
    # An empty list has no dtype of its own; an empty array does.
    if array.dtype.kind not in kinds and (array.size or isinstance(values, np.ndarray)):
        raise TypeError(f"{name}: expected integers, got dtype {array.dtype}")
    return array


def check_labels(labels: object, n: int) -> list[int]:
    """One integer (or bool) per embedding."""
    array = _integers("labels", labels, "iub")
    if array.shape != (n,):
        raise ValueError(f"labels: expected one label per embedding, shape [{n}], got shape {list(array.shape)}")
    return [int(label) for label in array]


def check_mask(name: str, mask: object, shape: Sequence[int]) -> npt.NDArray[np.bool_]:
    """A boolean array of the given shape."""
    array = _array(name, mask)
    if array.dtype != np.bool_:
        raise TypeError(f"{name}: expected dtype bool, got {array.dtype}")
    if array.shape != tuple(shape):
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(array.shape)}")
    return array


def check_partners(partners: object, n: int) -> list[int]:
    """One partner per row: in range, not the row itself, mutual."""
    array = _integers("partners", partners)
    if array.shape != (n,):
        raise ValueError(f"partners: expected one partner per embedding, shape [{n}], got shape {list(array.shape)}")
    rows = [int(j) for j in array]
    for i, j in enumerate(rows):
        if not 0 <= j < n:
            raise ValueError(f"partners: expected rows in the range 0 to {n - 1}, got {j} in row {i}")
        if j == i:
            raise ValueError(f"partners: expected another row as partner, but row {i} has itself")
        if rows[j] != i:
            raise ValueError(f"partners: expected mutual partners, but row {i} has {j} and row {j} has {rows[j]}")
    return rows


def check_positive_pairs(positive_pairs: object, n: int) -> list[tuple[int, int]]:
    """Directed pairs of rows, in range."""
    array = _integers("positive_pairs", positive_pairs)
    if array.ndim != 2 or array.shape[1] != 2:
        raise ValueError(f"positive_pairs: expected shape [M, 2], got {list(array.shape)}")
    pairs = [(int(i), int(j)) for i, j in array]
    for k, (i, j) in enumerate(pairs):
        if not (0 <= i < n and 0 <= j < n):
            raise ValueError(f"positive_pairs: expected rows in the range 0 to {n - 1}, got ({i}, {j}) at position {k}")
    return pairs
