"""Matrices that a golden case gives by a formula over integers, and what is stored of large results.

``fixtures/README.md`` defines the formula and the factors for readers in any language.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from .records import Matrix

MODULUS, MULTIPLIER = 2**31 - 1, 48271
"""The sequence of integers is x_k = MULTIPLIER x_(k-1) mod MODULUS."""

STORED = 8
"""Largest number of rows of a large gradient, and of anchors, that are stored."""

PERIODS = 31, 37
"""The factors of row i in the two products of a gradient are 16 + i mod 31 and 16 + i mod 37.

No two of the first 1147 rows have the same pair of factors. The factors are similar in size, so that the products show
an error of any row equally well."""

LOWEST_FACTOR = 16


@dataclass(frozen=True)
class Formula:
    """A matrix of integers times a power of two. Entry (i, d) is (own(i, d) + center(i mod groups, d)) 2^exponent.

    ``own`` and ``center`` are integers from -64 to 63, in row-major order the values of :func:`integers`.

    Attributes:
        rows, columns: the shape.
        groups: the number of centers. Rows of the same group are similar.
        seed, group_seed: the starts of the sequences of ``own`` and ``center``.
        exponent: the exponent of the power of two.
    """

    rows: int
    columns: int
    groups: int
    seed: int
    group_seed: int
    exponent: int

    def matrix(self) -> Matrix:
        """The matrix, [rows, columns]."""
        own = integers(self.seed, self.rows * self.columns).reshape(self.rows, self.columns)
        centers = integers(self.group_seed, self.groups * self.columns).reshape(self.groups, self.columns)
        return np.ldexp((own + centers[np.arange(self.rows) % self.groups]).astype(np.float64), self.exponent)


def integers(seed: int, count: int) -> npt.NDArray[np.int64]:
    """The first integers of the sequence that starts with x_0 = ``seed``: floor(x_k / 2^24) - 64 for k from 1."""
    return _powers(count) * seed % MODULUS // 2**24 - 64


@lru_cache(maxsize=1)
def _powers(count: int) -> npt.NDArray[np.int64]:
    """The powers of MULTIPLIER with exponents from 1 to ``count``, modulo MODULUS."""
    found = np.array([MULTIPLIER], dtype=np.int64)
    while len(found) < count:
        found = np.concatenate([found, found * found[-1] % MODULUS])
    return found[:count]


def stored_rows(count: int, first: Iterable[int] = ()) -> list[int]:
    """The rows of a large result that are stored, in ascending order.

    These are the first row, the last row, those in ``first``, and then the rows at and before 256, 128, 64 and 32, in
    this order, until there are ``STORED``.
    """
    sides = (row for size in (256, 128, 64, 32) for row in (size, size - 1))
    rows = dict.fromkeys(row for row in (0, count - 1, *first, *sides) if 0 <= row < count)
    return sorted([*rows][:STORED])


def stored_rows_of(matrix: Matrix) -> list[int]:
    """The rows of the gradient with respect to a matrix that are stored: ``stored_rows`` with the shortest row."""
    return stored_rows(len(matrix), [int(np.argmin((matrix**2).sum(axis=1)))])


def factors(count: int) -> npt.NDArray[np.int64]:
    """The factors of the rows of a gradient in its two products, [2, count]."""
    return np.asarray(LOWEST_FACTOR + np.arange(count) % np.array(PERIODS)[:, None])
