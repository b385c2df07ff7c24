"""Checks of arguments. Every message names the argument, what is expected and what was given."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .scalars import Scalar, order

Matrix = list[list[Scalar]]

CHOICES = {
    "denominator": ("all", "one_positive", "only_negatives"),
    "no_positive": ("zero", "drop", "nan"),
    "no_negative": ("zero", "nan"),
    "direction": ("both", "a_to_b", "b_to_a"),
    "reduction": ("mean", "sum", "none"),
    "similarity": ("cosine", "dot"),
}


def check_options(options: Mapping[str, object], more_reductions: Sequence[str] = ()) -> None:
    """Refuse an option outside its list of values, and a temperature that is not positive."""
    for name, allowed in CHOICES.items():
        if name in options:
            check_choice(name, options[name], [*allowed, *(more_reductions if name == "reduction" else ())])
    check_temperature("temperature", options["temperature"])
    if options["base_temperature"] is not None:
        check_temperature("base_temperature", options["base_temperature"])


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Refuse an option value outside the list of allowed ones."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}")


def check_temperature(name: str, value: object) -> None:
    """Refuse anything but a positive finite number."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name}: expected a positive finite number, got {value!r}")


def check_embeddings(embeddings: npt.ArrayLike, similarity: str, *, name: str = "embeddings", least: int = 2) -> Matrix:
    """The embeddings, at least ``least`` rows of them, as nested lists of scalars, [N][D].

    Half and single precision become float64 exactly; complex and object scalars are taken as they are.
    """
    return _scalars(name, _matrix(name, embeddings, "[N, D]", least), similarity)


def check_second_tower(embeddings_b: npt.ArrayLike, similarity: str, a: Matrix) -> Matrix:
    """The second tower as nested lists of scalars; it has the shape [N, D] of the first, ``a``."""
    array = _matrix("embeddings_b", embeddings_b, "[N, D]", 1)
    shape = (len(a), len(a[0]))
    if array.shape != shape:
        raise ValueError(
            f"embeddings_b: expected the shape of embeddings_a, {list(shape)}, got shape {list(array.shape)}"
        )
    return _scalars("embeddings_b", array, similarity)


def check_negatives(negatives: npt.ArrayLike, similarity: str, a: Matrix) -> Matrix:
    """The negatives as nested lists of scalars, [K][D]: any number of rows, as wide as the first tower, ``a``."""
    return _further_rows("negatives", negatives, similarity, "[K, D]", "embeddings_a", len(a[0]))


def check_references(
    ref_embeddings: npt.ArrayLike | None, similarity: str, rows: Matrix, **described: object
) -> Matrix | None:
    """The references as nested lists of scalars, [M][D]; or None, and then none of ``described`` may be given."""
    if ref_embeddings is not None:
        return _further_rows("ref_embeddings", ref_embeddings, similarity, "[M, D]", "embeddings", len(rows[0]))
    for name, value in described.items():
        if value is not None:
            raise ValueError(f"{name}: expected ref_embeddings with it, got none")
    return None


def _further_rows(name: str, values: npt.ArrayLike, similarity: str, shape: str, like: str, columns: int) -> Matrix:
    array = _matrix(name, values, shape, 1)
    if array.shape[1] != columns:
        raise ValueError(f"{name}: expected {columns} columns as in {like}, got shape {list(array.shape)}")
    return _scalars(name, array, similarity)


def _matrix(name: str, values: npt.ArrayLike, shape: str, least: int) -> npt.NDArray[Any]:
    array = _array(name, values)
    if array.dtype.kind not in "fcO":
        raise TypeError(f"{name}: expected a floating dtype, got {array.dtype}")
    if array.ndim != 2:
        raise ValueError(f"{name}: expected shape {shape}, got {list(array.shape)}")
    if array.shape[0] < least:
        rows = "1 row" if least == 1 else f"{least} rows"
        raise ValueError(f"{name}: expected at least {rows}, got shape {list(array.shape)}")
    if array.shape[1] < 1:
        raise ValueError(f"{name}: expected at least 1 column, got shape {list(array.shape)}")
    return array


def _scalars(name: str, array: npt.NDArray[Any], similarity: str) -> Matrix:
    rows: Matrix = (array.astype(np.float64) if array.dtype.kind == "f" else array).tolist()
    for i, row in enumerate(rows):
        for x in row:
            if isinstance(x, (bool, int, str)) or x is None:
                raise TypeError(f"{name}: expected a floating dtype, got {type(x).__name__} in row {i}")
            if not (math.isfinite(order(x)) and np.isfinite(float(np.ravel(np.imag(x))[0]))):
                raise ValueError(f"{name}: expected finite values, got {x} in row {i}")
        if similarity == "cosine" and all(order(x) == 0 for x in row):
            raise ValueError(f"{name}: expected no zero vector under cosine similarity, got one in row {i}")
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


def check_labels(labels: object, n: int, *, name: str = "labels", per: str = "embedding") -> list[int]:
    """One integer (or bool) per embedding, or per reference."""
    expected = f"{name}: expected one label per {per}, shape [{n}]"
    if labels is None:
        raise ValueError(f"{expected}, got none")
    array = _integers(name, labels, "iub")
    if array.shape != (n,):
        raise ValueError(f"{expected}, got shape {list(array.shape)}")
    return [int(label) for label in array]


def check_self_rows(self_rows: object, n: int, m: int) -> list[int]:
    """For each of N embeddings the row of the M references that is the same embedding, or -1; -1 by default."""
    if self_rows is None:
        return [-1] * n
    array = _integers("self_rows", self_rows)
    if array.shape != (n,):
        raise ValueError(f"self_rows: expected one row per embedding, shape [{n}], got shape {list(array.shape)}")
    rows = [int(j) for j in array]
    for i, j in enumerate(rows):
        if not -1 <= j < m:
            raise ValueError(f"self_rows: expected rows in the range -1 to {m - 1}, got {j} in row {i}")
    return rows


def check_mask(name: str, mask: object, shape: Sequence[int]) -> npt.NDArray[np.bool_]:
    """A boolean array of the given shape."""
    array = _array(name, mask)
    if array.dtype != np.bool_:
        raise TypeError(f"{name}: expected dtype bool, got {array.dtype}")
    if array.shape != tuple(shape):
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(array.shape)}")
    return array


def check_partners(partners: object, n: int, m: int, own: Sequence[int], *, mutual: bool) -> list[int]:
    """One partner per row among M columns: in range, not the row's ``own`` column, and mutual if ``mutual``."""
    array = _integers("partners", partners)
    if array.shape != (n,):
        raise ValueError(f"partners: expected one partner per embedding, shape [{n}], got shape {list(array.shape)}")
    rows = [int(j) for j in array]
    for i, j in enumerate(rows):
        if not 0 <= j < m:
            raise ValueError(f"partners: expected rows in the range 0 to {m - 1}, got {j} in row {i}")
        if j == own[i]:
            raise ValueError(f"partners: expected another row as partner, got row {i} as partner of itself")
        if mutual and rows[j] != i:
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
