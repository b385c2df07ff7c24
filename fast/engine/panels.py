"""The products of panels of rows with all columns, in memory that panels, passes and calls reuse."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .device import borrow, give_back
from .spec import Plan


class Products:
    """The products of each panel's rows with all columns.

    Several panels are computed in one buffer: each at its own place if they are kept for the backward pass, else all at
    the same place. The only panel of a small batch gets new memory.

    Args:
        rows: scaled rows ``[N, D]``.
        columns: scaled columns ``[M, D]``.
        plan: the number of rows of a panel.
        keep: whether the panels are kept.
        kept: the buffer of a `Products` that kept its panels; `at` then returns them.
    """

    def __init__(
        self, rows: Tensor, columns: Tensor, plan: Plan, *, keep: bool = False, kept: Tensor | None = None
    ) -> None:
        self.rows, self.turned, self.keep, self.height = rows, columns.T, keep or kept is not None, max(1, plan.rows)
        self.buffer = kept
        if kept is None and self.height < len(rows):
            entries = (len(rows) if keep else self.height) * len(columns)
            self.buffer = borrow("kept" if keep else "logits", rows, entries)

    def slices(self) -> Iterator[slice]:
        """Yield the rows of each panel; afterwards, memory that is not kept is given back."""
        count = len(self.rows)
        for start in range(0, count, self.height):
            yield slice(start, min(start + self.height, count))
        if self.buffer is not None and not self.keep:
            give_back("logits", self.buffer)

    def at(self, here: slice) -> Tensor:
        """Return the place of a panel ``[b, M]`` in the buffer."""
        assert self.buffer is not None
        width = self.turned.shape[1]
        return self.buffer.as_strided((here.stop - here.start, width), (width, 1), here.start * width * self.keep)

    def __call__(self, here: slice) -> Tensor:
        """Return the products of the rows ``here``, ``[b, M]``."""
        if self.buffer is None:
            return self.rows @ self.turned
        return torch.mm(self.rows[here], self.turned, out=self.at(here))
