"""Positives: how the arguments of a loss say which rows are positives, and how they are misread.

A ``Setting`` is what a target makes of the arguments: rows, the rows that each anchor is compared with, and which of
those are its positives. ``POSITIVES`` are the ways to read (and to misread) them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..implementations.callable import Batch
from ..suite.cases import Case

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Setting:
    """Rows, which of them are compared, and which are positives.

    Attributes:
        rows: [M, D], every row that takes part, as anchor or as contrast.
        member: bool [M, M], A(i).
        positive: bool [M, M], P(i); within A(i) unless it is misread.
        own: bool [M, M], the column that is the anchor itself.
        anchors: bool [M].
        items: [M], the item that a row is a view of.
        n_views: number of views of each item; the views are stacked.
    """

    rows: Tensor
    member: Tensor
    positive: Tensor
    own: Tensor
    anchors: Tensor
    items: Tensor
    n_views: int = 1

    @cached_property
    def negative(self) -> Tensor:
        """N(i): the members that are not positives."""
        return self.member & ~self.positive

    @cached_property
    def counts(self) -> Tensor:
        """|P(i)| of every row, 0 for rows that are not anchors."""
        return (self.positive & self.anchors[:, None]).sum(dim=1)

    @cached_property
    def n_items(self) -> int:
        """Number of items."""
        return len(set(self.items.tolist()))

    @cached_property
    def classes(self) -> int:
        """Number of different sets of positives, each with its anchor."""
        return len(set(map(tuple, (self.positive | self.own)[self.anchors].tolist())))


def same(labels: Tensor) -> Tensor:
    """[M, M], which rows have the same label."""
    return labels[:, None] == labels[None]


def batch_setting(batch: Batch, rows: Tensor | None = None) -> Setting:
    """The setting of a batch, its positives read rightly; of other rows in place of the batch's where given."""
    rows = batch.embeddings if rows is None else rows
    n = len(rows)
    items = torch.arange(n // batch.n_views).repeat(batch.n_views)
    if batch.call == "pairs":
        positive = torch.zeros(n, n, dtype=torch.bool)
        positive[tuple(torch.tensor(batch.positive_pairs or ()).reshape(-1, 2).T)] = True
    else:
        positive = same(items if batch.labels is None else torch.tensor(batch.labels)[items])
    own = torch.eye(n, dtype=torch.bool)
    return Setting(rows, ~own, positive & ~own, own, own.any(dim=1), items, batch.n_views)


def matrix_rows(case: Case) -> dict[str, slice]:
    """Where each matrix of a case lies when all are joined into one block of rows."""
    found, start = {}, 0
    for name, matrix in case.matrices.items():
        found[name] = slice(start, start + len(matrix))
        start += len(matrix)
    return found


def similarity_rows(case: Case) -> list[tuple[int, list[int]]]:
    """For every row of the case's similarities: its row in the block of joined matrices, and those of its columns."""
    parts, blocks = matrix_rows(case), case.blocks()
    rows = {name: list(range(part.start, part.stop)) for name, part in parts.items()}
    columns: dict[str, list[int]] = {}
    for block in blocks:
        columns.setdefault(block.left, []).extend(rows[block.right])
    return [(row, found) for left, found in columns.items() for row in rows[left]]


def case_setting(case: Case, rows: Tensor) -> Setting:
    """The setting of a case, its matrices joined into one block of rows.

    Args:
        case: the case.
        rows: [M, D], the case's matrices concatenated in their order.
    """
    m = len(rows)
    member, positive = torch.zeros(2, m, m, dtype=torch.bool)
    anchors, own = torch.zeros(m, dtype=torch.bool), torch.eye(m, dtype=torch.bool)
    mask, members, places = case.positive_mask(), case.members(), similarity_rows(case)
    for i in case.anchors():
        row, columns = places[i]
        anchors[row] = True
        member[row, [columns[j] for j in members[i]]] = True
        positive[row, [columns[j] for j in members[i] if mask[i][j]]] = True
        if "ref_embeddings" in case.others:
            own[row] = False
            own[row, [column for j, column in enumerate(columns) if j not in members[i]]] = True
    return Setting(rows, member, positive, own, anchors, torch.arange(m))


# From the right positives to others


@dataclass(frozen=True)
class Positives:
    """One way to read the positives from the arguments.

    Attributes:
        words: what is wrong about it; empty where it is right for some loss.
        calls: the calls whose arguments may be read so; "case" for what a golden case passes.
        change: the setting as it is read so, from the right one; None where it cannot be read so.
    """

    words: str
    calls: tuple[str, ...]
    change: Callable[[Setting], Setting | None]


LABELS, FEATURES, VIEWS, PAIRS, CASE = "labels", "features", "views", "pairs", "case"
_SEVERAL = (LABELS, FEATURES, PAIRS, CASE)
_ANY = (LABELS, FEATURES, VIEWS, PAIRS, CASE)


def _kept(choose: Callable[[Setting], Tensor], *, others: str = "negatives") -> Callable[[Setting], Setting]:
    """Take other positives; the right ones that are not among them are "negatives" or "left out"."""

    def change(s: Setting) -> Setting:
        chosen = choose(s)
        member = s.member & (chosen | ~s.positive) if others == "left out" else s.member
        return replace(s, positive=chosen, member=member)

    return change


def _first(mask: Tensor) -> Tensor:
    return mask & (mask.cumsum(dim=1) == 1)


def _other_view(s: Setting) -> Tensor:
    """The positives of another view; all of them where there is one view."""
    view = torch.arange(len(s.rows)) // (len(s.rows) // s.n_views)
    return s.positive & ~same(view) if s.n_views > 1 else s.positive


def _some() -> Iterator[tuple[str, Positives]]:
    """Readings that keep some of the positives of an anchor."""
    one_way = "each positive pair is counted in one direction only, as (i, j) with i < j"
    for name, words, calls, choose in (
        ("first positive", "each anchor has its first positive alone", _SEVERAL, lambda s: _first(s.positive)),
        (
            "last positive",
            "each anchor has its last positive alone",
            _SEVERAL,
            lambda s: _first(s.positive.flip(1)).flip(1),
        ),
        ("upper", one_way, _SEVERAL, lambda s: s.positive.triu()),
        ("other views", "only rows of another view are positives", (FEATURES,), _other_view),
    ):
        yield name, Positives(f"{words}; other positives are negatives", calls, _kept(choose))
        yield (
            f"{name} alone",
            Positives(f"{words}; other positives are left out", calls, _kept(choose, others="left out")),
        )


def _side_by_side(s: Setting) -> Setting:
    return replace(s, positive=same(torch.arange(len(s.rows)) // 2) & s.member)


def _in_halves(s: Setting) -> Setting | None:
    n = len(s.rows)
    return None if n % 2 else replace(s, positive=same(torch.arange(n) % (n // 2)) & s.member)


def _towers(direction: str) -> Callable[[Setting], Setting | None]:
    """Two views: rows of one are contrasted with the rows of the other and with nothing else."""

    def change(s: Setting) -> Setting | None:
        if s.n_views != 2:
            return None
        second = torch.arange(len(s.rows)) >= len(s.rows) // 2
        anchors = {"both": s.anchors, "a_to_b": ~second, "b_to_a": second}[direction]
        return replace(s, member=~same(second), positive=same(s.items) & s.member, anchors=anchors)

    return change


def _one_view(rows: Callable[[Tensor], Tensor]) -> Callable[[Setting], Setting | None]:
    """One row for each item, ``rows(views [V, B, D])``, and the items' labels."""

    def change(s: Setting) -> Setting | None:
        if s.n_views < 2:
            return None
        b = len(s.rows) // s.n_views
        found = rows(s.rows.reshape(s.n_views, b, -1))
        return Setting(found, s.member[:b, :b], s.positive[:b, :b], s.own[:b, :b], s.anchors[:b], s.items[:b])

    return change


def _first_anchors(s: Setting) -> Setting | None:
    first = torch.arange(len(s.rows)) < len(s.rows) // s.n_views
    return None if s.n_views < 2 else replace(s, anchors=first)


def _interleaved_labels(s: Setting) -> Tensor:
    """Labels repeated side by side, of rows that are stacked."""
    b, v = len(s.rows) // s.n_views, s.n_views
    alike = (s.positive | s.own)[:b, :b]
    return alike.repeat_interleave(v, 0).repeat_interleave(v, 1) & s.member


def _same_item(s: Setting) -> Tensor:
    return same(s.items) & s.member


POSITIVES: Mapping[str, Positives] = {
    "meant": Positives("", _ANY, lambda s: s),
    "views": Positives("", (FEATURES,), _kept(_same_item)),
    "towers": Positives("", (VIEWS, FEATURES), _towers("both")),
    "towers a_to_b": Positives("", (VIEWS, FEATURES), _towers("a_to_b")),
    "towers b_to_a": Positives("", (VIEWS, FEATURES), _towers("b_to_a")),
    "across": Positives("rows of the first view are compared with the second view alone", (VIEWS,), _towers("a_to_b")),
    "first view anchors": Positives("only the first view's rows are anchors", (FEATURES, VIEWS), _first_anchors),
    "stacked partners": Positives(
        "row k of the first half and row k of the second are partners, whatever the labels or partners are",
        (LABELS, CASE),
        _in_halves,
    ),
    "interleaved partners": Positives(
        "rows 2k and 2k + 1 are taken for partners: interleaved views are read where stacked ones are passed",
        (VIEWS, FEATURES),
        _side_by_side,
    ),
    "neighbours": Positives(
        "rows 2k and 2k + 1 are partners, whatever the labels or partners are", (LABELS, CASE), _side_by_side
    ),
    "interleaved labels": Positives(
        "labels are repeated side by side (interleaved) where the rows of the views are stacked",
        (FEATURES,),
        _kept(_interleaved_labels),
    ),
    **dict(_some()),
    "upper half": Positives(
        "only pairs (i, j) with i < j are compared, positives and negatives alike",
        _ANY,
        lambda s: replace(s, positive=s.positive.triu(), member=s.member.triu()),
    ),
    "swapped": Positives("positives and negatives are mixed up", _ANY, _kept(lambda s: s.negative)),
    "own": Positives(
        "the anchor itself is counted among its positives",
        _ANY,
        _kept(lambda s: s.positive | (s.own & s.anchors[:, None])),
    ),
    "first view": Positives("only the first view is used", (FEATURES,), _one_view(lambda views: views[0])),
    "averaged views": Positives(
        "the views of an item are averaged first", (FEATURES,), _one_view(lambda views: views.mean(dim=0))
    ),
    "items": Positives("the labels are ignored: only views of one item are positives", (FEATURES,), _kept(_same_item)),
    "symmetrised": Positives(
        "a pair (i, j) makes i a positive of j too",
        (PAIRS, CASE),
        _kept(lambda s: (s.positive | s.positive.T) & s.member),
    ),
    "reversed": Positives("a pair (i, j) is read as (j, i)", (PAIRS, CASE), _kept(lambda s: s.positive.T & s.member)),
}
