"""Who is whose positive: how the arguments of a loss are read, and how they are misread.

A batch is what a target is asked; a setting is what it makes of it: rows, whom each anchor is compared with, and which
of those are its positives. ``READINGS`` are the ways from one to the other, the wrong ones with words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

import torch

from ..implementations.callable import Batch
from ..suite.cases import Case

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Setting:
    """Rows, and who is compared with whom.

    Attributes:
        rows: [M, D], every row that takes part, on whichever side.
        member: bool [M, M], A(i).
        positive: bool [M, M], P(i); within A(i) unless a reading is wrong about it.
        own: bool [M, M], the column that is the anchor itself.
        anchors: bool [M].
        items: [M], of which item a row is a view.
        n_items: how many items the caller passed.
        classes: how many classes there are.
    """

    rows: Tensor
    member: Tensor
    positive: Tensor
    own: Tensor
    anchors: Tensor
    items: Tensor
    n_items: int
    classes: int

    @cached_property
    def negative(self) -> Tensor:
        """N(i): what A(i) holds beside the positives."""
        return self.member & ~self.positive

    @cached_property
    def counts(self) -> Tensor:
        """|P(i)| of every row, 0 for those that are no anchors."""
        return (self.positive & self.anchors[:, None]).sum(dim=1)


# Readings: from the arguments to who is whose positive


@dataclass(frozen=True)
class Reading:
    """One way to read what is passed.

    ``words`` are empty where it is the right one; ``losses`` are those that it belongs to.
    """

    name: str
    words: str
    calls: tuple[str, ...]
    make: Callable[[Batch, Tensor], Setting | None]


def _setting(
    rows: Tensor,
    positive: Tensor,
    *,
    member: Tensor | None = None,
    anchors: Tensor | None = None,
    items: Tensor | None = None,
    keep_own: bool = False,
) -> Setting:
    n = len(rows)
    own = torch.eye(n, dtype=torch.bool)
    member = ~own if member is None else member
    return Setting(
        rows,
        member,
        positive if keep_own else positive & member,
        own,
        torch.ones(n, dtype=torch.bool) if anchors is None else anchors,
        torch.arange(n) if items is None else items,
        n if items is None else len(set(items.tolist())),
        len({tuple(line) for line in (positive | own).tolist()}),
    )


def _labels_of(batch: Batch) -> Tensor:
    """A label for every row: those that are passed, or the item's number."""
    n = len(batch.embeddings)
    if batch.call == "labels":
        return torch.tensor(batch.labels)
    items = torch.arange(n // batch.n_views) if batch.labels is None else torch.tensor(batch.labels)
    return items.repeat(batch.n_views)


def _items_of(batch: Batch) -> Tensor:
    n = len(batch.embeddings)
    return torch.arange(n // batch.n_views).repeat(batch.n_views)


def same(labels: Tensor) -> Tensor:
    """[M, M], which rows have one label."""
    return labels[:, None] == labels[None]


def _mask(batch: Batch) -> Tensor:
    """Positives as they are meant, the diagonal not yet taken out of them."""
    if batch.call != "pairs":
        return same(_labels_of(batch))
    n = len(batch.embeddings)
    mask = torch.zeros(n, n, dtype=torch.bool)
    for i, j in batch.positive_pairs or ():
        mask[i, j] = True
    return mask


def _meant(batch: Batch, rows: Tensor) -> Setting:
    return _setting(rows, _mask(batch), items=_items_of(batch))


def _partnered(labels: Callable[[int], Tensor]) -> Callable[[Batch, Tensor], Setting | None]:
    def make(batch: Batch, rows: Tensor) -> Setting | None:
        n = len(rows)
        return None if n % 2 else _setting(rows, same(labels(n)), items=_items_of(batch))

    return make


def _chosen(choose: Callable[[Tensor], Tensor], *, others: str) -> Callable[[Batch, Tensor], Setting | None]:
    """A reading that keeps one positive of each row; the further ones are "negatives" or "left out"."""

    def make(batch: Batch, rows: Tensor) -> Setting | None:
        right = _meant(batch, rows)
        picked = choose(right.positive)
        member = right.member if others == "negatives" else right.member & (picked | ~right.positive)
        return _setting(rows, picked, member=member, items=right.items)

    return make


def _first(mask: Tensor) -> Tensor:
    return mask & (mask.cumsum(dim=1) == 1)


def _last(mask: Tensor) -> Tensor:
    return _first(mask.flip(1)).flip(1)


def _upper(mask: Tensor) -> Tensor:
    return mask.triu(1)


def _masked(change: Callable[[Batch, Tensor], Tensor], *, keep_own: bool = False) -> Callable[..., Setting | None]:
    """A reading with other positives than those that are meant."""

    def make(batch: Batch, rows: Tensor) -> Setting | None:
        return _setting(rows, change(batch, _mask(batch)), items=_items_of(batch), keep_own=keep_own)

    return make


def _anchored(batch: Batch, rows: Tensor) -> Setting | None:
    if batch.n_views < 2:
        return None
    right = _meant(batch, rows)
    return replace(right, anchors=torch.arange(len(rows)) < len(rows) // batch.n_views)


def _first_view(batch: Batch, rows: Tensor) -> Setting | None:
    if batch.n_views < 2 or batch.labels is None:
        return None
    b = len(rows) // batch.n_views
    return _setting(rows[:b], same(torch.tensor(batch.labels)))


def _averaged(batch: Batch, rows: Tensor) -> Setting | None:
    if batch.n_views < 2 or batch.labels is None:
        return None
    return _setting(rows.reshape(batch.n_views, -1, rows.shape[1]).mean(dim=0), same(torch.tensor(batch.labels)))


def _crossed(direction: str) -> Callable[[Batch, Tensor], Setting | None]:
    """Two towers: rows of one are contrasted with the rows of the other and with nothing else."""

    def make(batch: Batch, rows: Tensor) -> Setting | None:
        if batch.n_views != 2:
            return None
        second = torch.arange(len(rows)) >= len(rows) // 2
        items = _items_of(batch)
        anchors = {"both": None, "a_to_b": ~second, "b_to_a": second}[direction]
        return _setting(rows, same(items), member=second[:, None] != second[None], anchors=anchors, items=items)

    return make


def _other_view(batch: Batch, mask: Tensor) -> Tensor:
    """Only the positives in another view."""
    n = len(mask)
    view = torch.arange(n) // (n // batch.n_views)
    return mask & (view[:, None] != view[None]) if batch.n_views > 1 else mask


def _mismatched(batch: Batch, mask: Tensor) -> Tensor:
    """Labels repeated side by side, of rows that are stacked."""
    if batch.n_views < 2:
        return mask
    items = _labels_of(batch)[: len(mask) // batch.n_views]
    return same(items.repeat_interleave(batch.n_views))


LABELS, FEATURES, VIEWS, PAIRS = "labels", "features", "views", "pairs"

READINGS: Mapping[str, Reading] = MappingProxyType(
    {
        reading.name: reading
        for reading in (
            Reading("meant", "", (LABELS, FEATURES, VIEWS, PAIRS), _meant),
            Reading("views", "", (FEATURES,), _masked(lambda batch, mask: same(_items_of(batch)))),
            Reading("towers", "", (VIEWS, FEATURES), _crossed("both")),
            Reading("towers a_to_b", "", (VIEWS, FEATURES), _crossed("a_to_b")),
            Reading("towers b_to_a", "", (VIEWS, FEATURES), _crossed("b_to_a")),
            Reading(
                "across",
                "rows of the first view are compared with those of the second alone",
                (VIEWS,),
                _crossed("a_to_b"),
            ),
            Reading("first view anchors", "only the first view's rows are anchors", (FEATURES, VIEWS), _anchored),
            Reading(
                "stacked partners",
                "the labels are not looked at: row k of the first half and row k of the second are partners",
                (LABELS,),
                _partnered(lambda n: torch.arange(n // 2).repeat(2)),
            ),
            Reading(
                "interleaved partners",
                "rows 2k and 2k + 1 are taken for partners: interleaved views are read where stacked ones are passed",
                (VIEWS, FEATURES),
                _partnered(lambda n: torch.arange(n) // 2),
            ),
            Reading(
                "neighbours",
                "the labels are not looked at: rows 2k and 2k + 1 are partners",
                (LABELS,),
                _partnered(lambda n: torch.arange(n) // 2),
            ),
            Reading(
                "interleaved labels",
                "labels are repeated side by side (interleaved) where the rows of the views are stacked",
                (FEATURES,),
                _masked(_mismatched),
            ),
            Reading(
                "first positive",
                "each anchor has its first positive alone; further positives are negatives",
                (LABELS, FEATURES, PAIRS),
                _chosen(_first, others="negatives"),
            ),
            Reading(
                "last positive",
                "each anchor has its last positive alone; further positives are negatives",
                (LABELS, FEATURES, PAIRS),
                _chosen(_last, others="negatives"),
            ),
            Reading(
                "first positive alone",
                "each anchor has its first positive alone; further positives are left out everywhere",
                (LABELS, FEATURES, PAIRS),
                _chosen(_first, others="left out"),
            ),
            Reading(
                "upper",
                "each positive pair is counted in one direction only, as (i, j) with i < j; the other is a negative",
                (LABELS, FEATURES, PAIRS),
                _chosen(_upper, others="negatives"),
            ),
            Reading(
                "upper alone",
                "each positive pair is counted in one direction only, as (i, j) with i < j",
                (LABELS, FEATURES, PAIRS),
                _chosen(_upper, others="left out"),
            ),
            Reading(
                "upper half",
                "only pairs (i, j) with i < j are looked at, positives and negatives alike",
                (LABELS, FEATURES, VIEWS, PAIRS),
                lambda batch, rows: _setting(
                    rows,
                    _mask(batch),
                    member=torch.ones(len(rows), len(rows), dtype=torch.bool).triu(1),
                    items=_items_of(batch),
                ),
            ),
            Reading(
                "swapped",
                "positives and negatives are mixed up",
                (LABELS, FEATURES, VIEWS, PAIRS),
                _masked(lambda batch, mask: ~mask),
            ),
            Reading(
                "own",
                "the anchor itself is counted among its positives",
                (LABELS, FEATURES, VIEWS, PAIRS),
                _masked(lambda batch, mask: mask | torch.eye(len(mask), dtype=torch.bool), keep_own=True),
            ),
            Reading("first view", "only the first view is looked at", (FEATURES,), _first_view),
            Reading("averaged views", "the views of an item are averaged first", (FEATURES,), _averaged),
            Reading(
                "other views",
                "only rows of another view are positives; those of the same view and class are negatives",
                (FEATURES,),
                _masked(_other_view),
            ),
            Reading(
                "other views alone",
                "only rows of another view are positives; those of the same view and class are left out",
                (FEATURES,),
                lambda batch, rows: _setting(
                    rows,
                    _other_view(batch, _mask(batch)),
                    member=~torch.eye(len(rows), dtype=torch.bool) & (_other_view(batch, _mask(batch)) | ~_mask(batch)),
                    items=_items_of(batch),
                ),
            ),
            Reading(
                "items",
                "the labels are not looked at: only views of the same item are positives",
                (FEATURES,),
                _masked(lambda batch, mask: same(_items_of(batch))),
            ),
            Reading(
                "symmetrised",
                "a pair (i, j) makes i a positive of j too",
                (PAIRS,),
                _masked(lambda batch, mask: mask | mask.T),
            ),
            Reading("reversed", "a pair (i, j) is read as (j, i)", (PAIRS,), _masked(lambda batch, mask: mask.T)),
        )
    }
)


def case_setting(case: Case, rows: Tensor) -> Setting:
    """The setting of a case: every matrix that goes in, one after the other, as one block of rows.

    Args:
        case: the case.
        rows: [M, D], the case's matrices concatenated in their order.
    """
    starts: dict[str, int] = {}
    m = 0
    for name, matrix in case.matrices.items():
        starts[name] = m
        m += len(matrix)
    # Columns of the case's similarities, as rows of the block: they differ from one side of two towers to the other.
    where: dict[int, list[int]] = {}
    anchor_rows: dict[int, int] = {}
    blocks = case.blocks()
    for block in blocks:
        columns = [starts[block.right] + k for k in range(len(case.matrices[block.right]))]
        for k in range(len(case.matrices[block.left])):
            where.setdefault(block.row + k, []).extend(columns)
            anchor_rows[block.row + k] = starts[block.left] + k
    member = torch.zeros(m, m, dtype=torch.bool)
    positive = torch.zeros(m, m, dtype=torch.bool)
    anchors = torch.zeros(m, dtype=torch.bool)
    own = torch.eye(m, dtype=torch.bool)
    mask, members = case.positive_mask(), case.members()
    for i in case.anchors():
        row = anchor_rows[i]
        anchors[row] = True
        member[row, [where[i][j] for j in members[i]]] = True
        positive[row, [where[i][j] for j in members[i] if mask[i][j]]] = True
        left = set(range(len(where[i]))) - set(members[i])
        if "ref_embeddings" in case.others:
            own[row] = False
            own[row, [where[i][j] for j in left]] = True
    classes = len({tuple(line) for line in (positive | own)[anchors].tolist()})
    return Setting(rows, member, positive, own, anchors, torch.arange(m), case.n, classes)


def _repositive(setting: Setting, positive: Tensor, member: Tensor | None = None) -> Setting:
    return replace(setting, positive=positive, member=setting.member if member is None else member)


CASE_READINGS: Mapping[str, Callable[[Setting], Setting]] = MappingProxyType(
    {
        "meant": lambda s: s,
        "first positive": lambda s: _repositive(s, _first(s.positive)),
        "last positive": lambda s: _repositive(s, _last(s.positive)),
        "first positive alone": lambda s: _repositive(
            s, _first(s.positive), s.member & (_first(s.positive) | ~s.positive)
        ),
        "upper": lambda s: _repositive(s, _upper(s.positive)),
        "upper alone": lambda s: _repositive(s, _upper(s.positive), s.member & (_upper(s.positive) | ~s.positive)),
        "upper half": lambda s: _repositive(s, _upper(s.positive), _upper(s.member)),
        "swapped": lambda s: _repositive(s, s.negative),
        "own": lambda s: _repositive(s, s.positive | (s.own & s.anchors[:, None])),
        "symmetrised": lambda s: _repositive(s, (s.positive | s.positive.T) & s.member),
        "reversed": lambda s: _repositive(s, s.positive.T & s.member),
    }
)
"""The readings of a case, whose positives are already told apart."""


def read(batch: Batch, reading: str, rows: Tensor | None = None) -> Setting | None:
    """The setting of a batch as a reading sees it, or None where it cannot be read so."""
    return READINGS[reading].make(batch, batch.embeddings if rows is None else rows)
