"""Argument checks. Every error message names the argument, what is expected and what was given.

`pairproof.fast` has the same messages.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from .scalars import Scalar, order

Matrix = list[list[Scalar]]
LOWEST = 1e-10
"""The lowest temperature, at which float64 still determines losses to about 1e-6. The highest is 1 / LOWEST."""
VIEWS = "; flatten_views lays out [batch, views, dim] as rows"
"""Hint for embeddings with three axes."""
ROWS_NOT_ITEMS = "; stacked_partners and interleaved_partners take the number of rows, not of items"
"""Hint if there are half as many partners as rows."""
NOT_LABELS = "; partners are row numbers: for labels use nt_xent_pairwise_loss or NTXentPairwiseLoss"
"""Hint if partners repeat, as class labels do."""

CHOICES = {
    "denominator": ("all", "one_positive", "only_negatives"),
    "inside_reduction": ("mean", "sum"),
    "inside_of_towers": ("none", "mean", "sum"),
    "no_positive": ("zero", "drop", "nan"),
    "no_negative": ("zero", "nan"),
    "weights_divisor": ("count", "weight"),
    "direction": ("both", "a_to_b", "b_to_a"),
    "reduction": ("mean", "sum", "none"),
    "similarity": ("cosine", "dot"),
    "hard_negatives_scope": ("batch", "own", "own_only"),
    "doc_to_doc_hard": ("others", "all", "none"),
    "partition": ("joint", "per_direction"),
    "hardness_mode": ("none", "in_batch_negatives", "hard_negatives", "all_negatives"),
    "detach_weights": (True, False),
    "zero_row": ("error", "zero"),
}
"""The values of each option. "inside_of_towers" is inside_reduction of a loss over two towers."""

DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
"""The directions of a ranking loss, in order. The first one is required."""

RANGES = {
    "bias": (-1 / LOWEST, 1 / LOWEST, "-1e+10 to 1e+10"),
    "tau_plus": (0.0, math.nextafter(1.0, 0.0), "0 to 1, 1 excluded"),
    "beta": (0.0, 1 / LOWEST, "0 to 1e+10"),
    "hardness_strength": (0.0, 1 / LOWEST, "0 to 1e+10"),
    "sigma": (LOWEST, 1 / LOWEST, "1e-10 to 1e+10"),
    "direction_weights": (0.0, 1 / LOWEST, "0 to 1e+10"),
}
"""Numeric options other than temperatures: the lowest value, the highest value, and the range in words."""


def check_options(options: Mapping[str, object], more_reductions: Sequence[str] = ()) -> None:
    """Raise an error if an option or a temperature has an invalid value."""
    for name, allowed in CHOICES.items():
        if name in options:
            check_choice(name, options[name], [*allowed, *(more_reductions if name == "reduction" else ())])
    check_temperature("temperature", options["temperature"])
    for name in RANGES:
        if name in options:
            check_range(name, options[name])
    if options["base_temperature"] is not None:
        check_temperature("base_temperature", options["base_temperature"])


def check_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise an error unless the value is one of ``allowed``, which all have the same type."""
    if type(value) is not type(allowed[0]) or value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(map(str, allowed))}, got {value!r}")


def check_temperature(name: str, value: object) -> None:
    """Raise an error unless the value is a number from LOWEST to 1 / LOWEST."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name}: expected a positive finite number, got {value!r}")
    if not LOWEST <= number <= 1 / LOWEST:
        raise ValueError(f"{name}: expected a number in the range {LOWEST:g} to {1 / LOWEST:g}, got {value!r}")


def check_range(name: str, value: object) -> None:
    """Raise an error unless the value is a number in the range ``RANGES[name]``."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    low, high, words = RANGES[name]
    if not low <= number <= high:
        raise ValueError(f"{name}: expected a number in the range {words}, got {value!r}")


def check_one_target(given: Sequence[str], ref_labels: object) -> None:
    """Raise an error if several of partners, labels and positives are given, or ref_labels without labels."""
    if len(given) > 1:
        expected = "at most one of partners, labels and positives"
        raise ValueError(f"{given[0]}: expected {expected}, got {' and '.join(given)}")
    if ref_labels is not None and "labels" not in given:
        raise ValueError(f"ref_labels: expected labels with it, got {given[0] if given else 'none'}")


def check_direction_weights(weights: object, direction: str) -> tuple[float, float] | None:
    """Return the weights of both directions, or None if they are not given."""
    if weights is None:
        return None
    if not isinstance(weights, (tuple, list)):
        raise TypeError(f"direction_weights: expected a pair of numbers, got {type(weights).__name__}")
    if len(weights) != 2:
        raise ValueError(f"direction_weights: expected a pair of numbers, got {len(weights)} entries")
    for weight in weights:
        check_range("direction_weights", weight)
    if direction != "both":
        raise ValueError(f"direction_weights: expected direction 'both' with them, got {direction!r}")
    return float(weights[0]), float(weights[1])


def check_equal_towers(name: str, direction: str, n: int, m: int) -> None:
    """Raise an error if n != m and rows of b are anchors. Row k of b has the weight of row k of a."""
    if direction != "a_to_b" and n != m:
        raise ValueError(f"{name}: expected direction 'a_to_b' for towers of {n} and {m} rows, got {direction!r}")


def check_no_queue(given: Sequence[str]) -> None:
    """Raise an error if any argument is given that cannot be combined with negatives."""
    if given:
        raise ValueError(f"{given[0]}: expected no negatives with it: negatives take the place of the other tower")


def check_embeddings(embeddings: npt.ArrayLike, similarity: str, *, name: str = "embeddings", least: int = 2) -> Matrix:
    """Return embeddings as nested lists of scalars, [N][D], where N must be at least ``least``.

    Half and single precision are converted to float64. Complex numbers and objects keep their type.
    """
    return _scalars(name, _matrix(name, embeddings, "[N, D]", least), similarity)


def check_second_tower(embeddings_b: npt.ArrayLike, similarity: str, a: Matrix, *, rows: bool = True) -> Matrix:
    """Return the second tower as nested lists of scalars.

    It must have as many columns as the first tower, ``a``. If ``rows`` is True, it must also have as many rows.
    """
    if not rows:
        return _further_rows("embeddings_b", embeddings_b, similarity, "[M, D]", "embeddings_a", len(a[0]))
    array = _matrix("embeddings_b", embeddings_b, "[N, D]", 1)
    shape = (len(a), len(a[0]))
    if array.shape != shape:
        raise ValueError(
            f"embeddings_b: expected the shape of embeddings_a, {list(shape)}, got shape {list(array.shape)}"
        )
    return _scalars("embeddings_b", array, similarity)


def check_negatives(negatives: npt.ArrayLike, similarity: str, a: Matrix) -> Matrix:
    """Return negatives as nested lists of scalars, [K][D]. D is that of the first tower, ``a``."""
    return _further_rows("negatives", negatives, similarity, "[K, D]", "embeddings_a", len(a[0]))


def check_hard_negatives(hard_negatives: npt.ArrayLike, similarity: str, a: Matrix) -> Matrix:
    """Return hard negatives [N, H, D] as nested lists of scalars, [N H][D], in the order of their queries.

    N and D are those of the first tower, ``a``.
    """
    array = _array("hard_negatives", hard_negatives)
    if array.dtype.kind not in "fcO":
        raise TypeError(f"hard_negatives: expected a floating dtype, got {array.dtype}")
    if array.ndim != 3 or array.shape[0] != len(a) or array.shape[1] < 1:
        expected = f"shape [{len(a)}, H, {len(a[0])}], H >= 1"
        raise ValueError(f"hard_negatives: expected {expected}, got shape {list(array.shape)}")
    return _further_rows(
        "hard_negatives", array.reshape(-1, array.shape[2]), similarity, "[N, H, D]", "embeddings_a", len(a[0])
    )


def check_directions(
    directions: object, partition: object, scope: object, doc_to_doc_hard: object, hard_negatives: object
) -> list[str]:
    """Return the chosen directions. Raise an error for an unknown option, or for one that does not fit the others."""
    check_choice("hard_negatives_scope", scope, CHOICES["hard_negatives_scope"])
    if doc_to_doc_hard is not None:
        check_choice("doc_to_doc_hard", doc_to_doc_hard, CHOICES["doc_to_doc_hard"])
    check_choice("partition", partition, CHOICES["partition"])
    further = [chain for size in range(4) for chain in combinations(DIRECTIONS[1:], size)]
    check_choice("directions", directions, ["+".join((DIRECTIONS[0], *chain)) for chain in further])
    chosen = str(directions).split("+")
    if partition == "per_direction" and {"query_to_query", "doc_to_doc"} & {*chosen}:
        expected = '"joint" with query_to_query or doc_to_doc, which have no positives'
        raise ValueError(f"partition: expected {expected}, got 'per_direction'")
    if scope == "own_only" and hard_negatives is None:
        raise ValueError("hard_negatives_scope: expected batch or own if hard_negatives is None, got 'own_only'")
    return chosen


def check_references(
    ref_embeddings: npt.ArrayLike | None, similarity: str, rows: Matrix, **described: object
) -> Matrix | None:
    """Return the references as nested lists of scalars, [M][D], or None if there are none.

    The arguments in ``described`` require references.
    """
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
        hint = VIEWS if name == "embeddings" and array.ndim == 3 else ""
        raise ValueError(f"{name}: expected shape {shape}, got shape {list(array.shape)}{hint}")
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
            if not (math.isfinite(order(x)) and (isinstance(x, float) or math.isfinite(order(np.imag(x))))):
                raise ValueError(f"{name}: expected finite values, got NaN or infinity in row {i}")
        if similarity == "cosine" and all(order(x) == 0 for x in row):
            raise ValueError(f"{name}: expected no zero row under cosine similarity, got zeros in row {i}")
    return rows


def _array(name: str, values: object) -> npt.NDArray[Any]:
    try:
        return np.asarray(values)
    except ValueError:
        raise ValueError(f"{name}: expected a rectangular array, got rows of different lengths") from None


def _integers(name: str, values: object, kinds: str = "iu") -> npt.NDArray[Any]:
    array = _array(name, values)
    # An empty list is accepted, although numpy makes it float64. An empty array must have an integer dtype.
    if array.dtype.kind not in kinds and (array.size or isinstance(values, np.ndarray)):
        raise TypeError(f"{name}: expected an integer dtype, got {array.dtype}")
    return array


def check_labels(
    labels: object, n: int, *, name: str = "labels", per: str = "embedding", what: str = "label"
) -> list[int]:
    """Return labels or ids (integers or bools) as a list of N integers."""
    expected = f"{name}: expected one {what} per {per}, shape [{n}]"
    if labels is None:
        raise ValueError(f"{expected}, got none")
    array = _integers(name, labels, "iub")
    if array.shape != (n,):
        raise ValueError(f"{expected}, got shape {list(array.shape)}")
    return [int(label) for label in array]


def check_self_rows(self_rows: object, n: int, m: int) -> list[int]:
    """Return for each of N embeddings the reference that is the same row, or -1. None means -1 for all."""
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


def check_mask(name: str, mask: object, shape: Sequence[int], *, per: str) -> npt.NDArray[np.bool_]:
    """Return a mask as a boolean array of the given shape."""
    array = _array(name, mask)
    if array.dtype != np.bool_:
        raise TypeError(f"{name}: expected dtype bool, got {array.dtype}")
    if array.shape != tuple(shape):
        raise ValueError(f"{name}: expected one flag per {per}, shape {list(shape)}, got shape {list(array.shape)}")
    return array


def check_weights(name: str, weights: object, shape: Sequence[int], *, per: str) -> list[Any] | None:
    """Return weights of the given shape as nested lists, or None if they are not given."""
    if weights is None:
        return None
    array = _array(name, weights)
    if array.dtype not in (np.float32, np.float64):
        raise TypeError(f"{name}: expected dtype float32 or float64, got {array.dtype}")
    if array.shape != tuple(shape):
        raise ValueError(f"{name}: expected one weight per {per}, shape {list(shape)}, got shape {list(array.shape)}")
    for place in np.argwhere(~((array >= 0) & (array <= 1 / LOWEST))):
        value = array[tuple(place)]
        raise ValueError(f"{name}: expected numbers in the range 0 to {1 / LOWEST:g}, got {value:g} in row {place[0]}")
    found: list[Any] = array.tolist()
    return found


def check_ignored(
    ignored: object, ignored_ids: object, ref_ignored_ids: object, n: int, m: int, *, within: bool
) -> tuple[list[list[bool]] | None, tuple[list[int], list[int]] | None]:
    """Return the mask [N][M] of ignored pairs, and the ids of rows and columns. Each is None if not given.

    With ``within``, the columns are the rows of the batch, and have the same ids.
    """
    mask = None if ignored is None else check_mask("ignored", ignored, [n, m], per="pair").tolist()
    if ref_ignored_ids is not None and (within or ignored_ids is None):
        needed = "ref_embeddings" if within else "ignored_ids"
        raise ValueError(f"ref_ignored_ids: expected {needed} with it, got none")
    if ignored_ids is None:
        return mask, None
    ids = check_labels(ignored_ids, n, name="ignored_ids", what="id")
    if within:
        return mask, (ids, ids)
    return mask, (ids, check_labels(ref_ignored_ids, m, name="ref_ignored_ids", per="reference", what="id"))


def check_kept(ignored: Sequence[Sequence[bool]], partners: Sequence[int]) -> None:
    """Raise an error if the mask ignores the pair of a row and its partner."""
    for i, j in enumerate(partners):
        if ignored[i][j]:
            raise ValueError(f"ignored: expected False for every row and its positive, got True in row {i}")


def check_partners(partners: object, n: int, m: int, own: Sequence[int], *, mutual: bool) -> list[int]:
    """Return the partner of each row, which is one of M columns.

    The checks are made in this order, each for all rows: partners are in range, no row has its ``own`` column as
    partner, and partners are mutual (if ``mutual``).
    """
    array = _integers("partners", partners)
    if array.shape != (n,):
        hint = ROWS_NOT_ITEMS if array.shape == (n / 2,) else ""
        raise ValueError(
            f"partners: expected one partner per embedding, shape [{n}], got shape {list(array.shape)}{hint}"
        )
    rows = [int(j) for j in array]
    hint = NOT_LABELS if mutual and len(set(rows)) < n else ""
    for i, j in enumerate(rows):
        if not 0 <= j < m:
            raise ValueError(f"partners: expected rows in the range 0 to {m - 1}, got {j} in row {i}{hint}")
    for i, j in enumerate(rows):
        if j == own[i]:
            raise ValueError(f"partners: expected another row as partner, got row {i} as partner of itself{hint}")
    for i, j in enumerate(rows):
        if mutual and rows[j] != i:
            raise ValueError(f"partners: expected mutual partners, got {j} in row {i} but {rows[j]} in row {j}{hint}")
    return rows


def check_positive_pairs(positive_pairs: object, n: int) -> list[tuple[int, int]]:
    """Return pairs (i, j) of rows, in which j is a positive of i."""
    array = _integers("positive_pairs", positive_pairs)
    if array.ndim != 2 or array.shape[1] != 2:
        raise ValueError(f"positive_pairs: expected shape [M, 2], got shape {list(array.shape)}")
    pairs = [(int(i), int(j)) for i, j in array]
    for k, (i, j) in enumerate(pairs):
        if not (0 <= i < n and 0 <= j < n):
            raise ValueError(f"positive_pairs: expected rows in the range 0 to {n - 1}, got [{i}, {j}] at position {k}")
    return pairs
