"""How the arguments of a loss determine the positives, and how implementations misread them.

A ``Setting`` stores the positives and the negatives of every anchor. ``POSITIVES`` lists right and wrong ways to read
the positives from the arguments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np
import numpy.typing as npt
import torch

from ..implementations.base import stacked_order
from ..implementations.callable import Batch
from ..suite.cases import Case
from ..suite.catalogue import LOSSES

Tensor = torch.Tensor

LABELS, FEATURES, VIEWS, PAIRS, CASE = "labels", "features", "views", "pairs", "case"
PARTNERS, QUEUE, HARD = "partners", "queue", "hard"
"""The calls: which arguments the loss takes.

"queue" stands for two views and a queue of negatives, "hard" for two views and hard negatives, "case" for a ``Case``.
"""


@dataclass(frozen=True, eq=False)
class Setting:
    """The rows of a batch, and the pairs that a loss compares. M is the number of rows.

    Attributes:
        rows: [M, D], all rows: anchors, and the rows that they are contrasted with.
        member: bool [M, M]; row i marks A(i), the positives and negatives of anchor i.
        positive: bool [M, M]; row i marks P(i), the positives of anchor i. Misread positives may lie outside A(i).
        own: bool [M, M], the self pairs.
        anchors: bool [M], the rows that are anchors.
        items: [M], the item that a row is a view of; -1 for queued rows.
        n_views: number of views of each item.
        queued: number of queued rows or hard negatives, which come last.
        views: [M], the view that each row is; None if the views are stacked.
        added: bool [M, M]; pair (p, j), if marked, is added to the denominator of each anchor with the positive p.
        harder: bool [M, M], the pairs whose exponentials are multiplied by e^(hardness_strength * similarity).
    """

    rows: Tensor
    member: Tensor
    positive: Tensor
    own: Tensor
    anchors: Tensor
    items: Tensor
    n_views: int = 1
    queued: int = 0
    views: Tensor | None = None
    added: Tensor | None = None
    harder: Tensor | None = None

    @cached_property
    def negative(self) -> Tensor:
        """N(i), the members that are not positives."""
        return self.member & ~self.positive

    @cached_property
    def counts(self) -> Tensor:
        """|P(i)| of every row; 0 for rows that are not anchors."""
        return (self.positive & self.anchors[:, None]).sum(dim=1)

    @property
    def view(self) -> Tensor:
        """[M], the view that each row is; ``n_views`` for queued rows."""
        if self.views is not None:
            return self.views
        items = (len(self.rows) - self.queued) // self.n_views
        return (torch.arange(len(self.rows)) // items).clamp(max=self.n_views)

    @property
    def first_half(self) -> Tensor:
        """Bool [M], the rows of the first of two stacked views."""
        return torch.arange(len(self.rows)) < (len(self.rows) - self.queued) // 2


def same(labels: Tensor) -> Tensor:
    """[M, M], the pairs of rows with equal labels."""
    return labels[:, None] == labels[None]


def batch_setting(batch: Batch, rows: Tensor | None = None) -> Setting:
    """Return the setting of a batch, with the positives read correctly.

    ``rows`` [N, D] replace the embeddings of the batch. For a queue or hard negatives, members, positives and anchors
    are empty until an entry of ``POSITIVES`` sets them.
    """
    rows = batch.embeddings if rows is None else rows
    n = len(rows)
    if batch.call in (QUEUE, HARD):
        queue = batch.keywords["negatives"] if batch.call == QUEUE else batch.keywords["hard_negatives"].flatten(0, 1)
        items = torch.cat([torch.arange(n // 2).repeat(2), torch.full((len(queue),), -1)])
        nothing = torch.zeros(len(items), len(items), dtype=torch.bool)
        return Setting(torch.cat([rows, queue]), nothing, nothing, nothing, items < 0, items, 2, len(queue))
    items, own = torch.arange(n // batch.n_views).repeat(batch.n_views), torch.eye(n, dtype=torch.bool)
    if batch.call in (PAIRS, PARTNERS):
        positive = torch.zeros(n, n, dtype=torch.bool)
        pairs = batch.positive_pairs if batch.call == PAIRS else list(enumerate(batch.labels or ()))
        positive[tuple(torch.tensor(pairs or ()).reshape(-1, 2).T)] = True
    else:
        positive = same(items if batch.labels is None else torch.tensor(batch.labels)[items])
    return Setting(rows, ~own, positive & ~own, own, own.any(dim=1), items, batch.n_views)


def similarity_rows(case: Case) -> list[tuple[int, npt.NDArray[np.int64]]]:
    """Return (anchor, columns) for each row of similarities, as row indices into the concatenated matrices."""
    places = iter(range(sum(map(len, case.matrices.values()))))
    rows = {name: [next(places) for _ in matrix] for name, matrix in case.matrices.items()}
    columns: dict[int, list[int]] = defaultdict(list)
    first: dict[int, str] = {}
    for block in case.blocks():
        band = block.part[0].start or 0
        columns[band] += rows[block.right]
        first.setdefault(band, block.left)
    arrays = {band: np.array(found, dtype=np.int64) for band, found in columns.items()}
    return [(row, found) for band, found in arrays.items() for row in rows[first[band]]]


def case_setting(case: Case, rows: Tensor) -> Setting:
    """Return the setting of a case. ``rows`` [M, D] are the concatenated matrices of the case."""
    m = len(rows)
    member, positive = np.zeros((2, m, m), dtype=bool)
    anchors, own = np.zeros(m, dtype=bool), np.eye(m, dtype=bool)
    members, places = case.member_array(), similarity_rows(case)
    positives = members & case.positive_array()
    for i in case.anchors():
        row, columns = places[i]
        anchors[row] = True
        for mask, chosen in ((member, members[i]), (positive, positives[i])):
            mask[row, columns[chosen[: len(columns)]]] = True
        if "ref_embeddings" in case.others:
            own[row] = False
            own[row, columns] = ~member[row, columns]
    stacked = "partners" in case.arguments and not case.others
    views = torch.tensor(stacked_order(case)).argsort() // (m // 2) if stacked else None
    masks = [torch.from_numpy(mask) for mask in (member, positive, own, anchors)]
    return Setting(rows, masks[0], masks[1], masks[2], masks[3], torch.arange(m), views=views)


# Ways to read the positives


@dataclass(frozen=True)
class Positives:
    """One way to read the positives from the arguments.

    Attributes:
        calls: the calls to which this way applies.
        change: maps the correct setting to the setting that is read in this way, or to None if that is impossible.
    """

    calls: tuple[str, ...]
    change: Callable[[Setting], Setting | None]


_SEVERAL = (LABELS, FEATURES, PAIRS, CASE)
_ANY = (*_SEVERAL, VIEWS, PARTNERS)


def _chosen(choose: Callable[[Setting], Tensor], *calls: str) -> Positives:
    """Choose other positives; the members stay the same."""
    return Positives(calls or _ANY, lambda s: replace(s, positive=choose(s)))


def _some(words: str, choose: Callable[[Setting], Tensor], *calls: str) -> dict[str, Positives]:
    """Keep some of the positives. The others become negatives (first entry) or are left out (second entry)."""

    def without(s: Setting) -> Setting:
        return replace(s, positive=choose(s), member=s.member & (choose(s) | ~s.positive))

    return {
        f"{words}; the other positives are treated as negatives": _chosen(choose, *(calls or _SEVERAL)),
        f"{words}; the other positives are left out": Positives(calls or _SEVERAL, without),
    }


def _first(mask: Tensor) -> Tensor:
    return mask & (mask.cumsum(dim=1) == 1)


def _other_view(s: Setting) -> Tensor:
    return s.positive & ~same(s.view) if s.n_views > 1 else s.positive


def _adjacent(s: Setting) -> Tensor:
    return same(torch.arange(len(s.rows)) // 2) & s.member


def _in_halves(s: Setting) -> Setting | None:
    n = len(s.rows)
    return None if n % 2 else replace(s, positive=same(torch.arange(n) % (n // 2)) & s.member)


def _same_item(s: Setting) -> Tensor:
    return same(s.items) & s.member


def _towers(direction: str, *calls: str) -> Positives:
    """Contrast the rows of one view only with the rows of the other view."""

    def change(s: Setting) -> Setting | None:
        anchors = {"both": s.anchors, "a_to_b": s.view == 0, "b_to_a": s.view == 1}[direction]
        found = replace(s, member=~same(s.view), anchors=anchors)
        return replace(found, positive=_same_item(found)) if s.n_views == 2 else None

    return Positives(calls or (VIEWS, FEATURES), change)


def _queue(direction: str, *calls: str, queue: bool = True, keys: bool = False) -> Positives:
    """Contrast rows with their positive, the queue (if ``queue``), and all rows of the other view (if ``keys``)."""

    def change(s: Setting) -> Setting:
        anchors = {"both": s.view < 2, "a_to_b": s.view == 0, "b_to_a": s.view == 1}[direction]
        other = ~same(s.view) & (s.view < 2) & anchors[:, None]
        positive = other & same(s.items)
        member = (positive | (s.view == 2) & queue | other & keys) & anchors[:, None]
        return replace(s, member=member, positive=positive, anchors=anchors)

    return Positives(calls or (QUEUE,), change)


RANKING_OPTIONS = ("directions", "partition", "hard_negatives_scope", "hardness_mode", "doc_to_doc_hard")
"""The options of multiple_negatives_ranking that choose the pairs."""


def ranking_reading(*options: str) -> str:
    """Return the key in ``POSITIVES`` for values of ``RANKING_OPTIONS``."""
    return f"ranking {', '.join(options)}"


def _ranking(directions: str, partition: str, scope: str, mode: str, hard_of_doc: str) -> Positives:
    """Contrast queries (first views) with documents (second views) and with hard negatives."""
    apart = partition == "per_direction"

    def change(s: Setting) -> Setting | None:
        if s.n_views != 2:
            return None
        n = (len(s.rows) - s.queued) // 2
        # Hard negatives belong to the item of their query, although their ``items`` are -1.
        owners = torch.cat([torch.arange(n).repeat(2), torch.arange(s.queued) // max(s.queued // n, 1)])
        query, document, hard = ((s.view == kind)[None] for kind in range(3))
        own = same(owners)
        every, nothing = torch.ones_like(own), torch.zeros_like(own)
        to_doc = document & (own if scope == "own_only" else every) | hard & (every if scope == "batch" else own)
        hard_of_documents = {"others": hard & ~own, "all": hard & every, "none": nothing}
        columns = {
            "query_to_query": query & ~own,
            "doc_to_query": query & every,
            "doc_to_doc": document & ~own | hard_of_documents[hard_of_doc],
        }
        chosen = {name: mask if name in directions else nothing for name, mask in columns.items()}
        harder = {"in_batch_negatives": ~own, "hard_negatives": hard & own, "all_negatives": hard | ~own}
        of_documents = document.T & (chosen["doc_to_query"] | chosen["doc_to_doc"])
        of_queries = query.T & (to_doc | chosen["query_to_query"])
        return replace(
            s,
            member=of_queries | of_documents if apart else of_queries,
            positive=own & (query.T & document | document.T & query & torch.tensor(apart)),
            anchors=s.view < (2 if apart else 1),
            added=None if apart else of_documents,
            harder=query.T & to_doc & harder.get(mode, nothing),
        )

    return Positives((VIEWS, HARD), change)


def _one_view(rows: Callable[[Tensor], Tensor]) -> Positives:
    """Use one row per item. ``rows`` maps the views [V, B, D] to rows [B, D]."""

    def change(s: Setting) -> Setting | None:
        b = len(s.rows) // s.n_views
        found = rows(s.rows.reshape(s.n_views, b, -1))
        member, positive, own = (mask[:b, :b] for mask in (s.member, s.positive, s.own))
        return Setting(found, member, positive, own, s.anchors[:b], s.items[:b]) if s.n_views > 1 else None

    return Positives((FEATURES,), change)


def _first_anchors(s: Setting) -> Setting | None:
    return replace(s, anchors=s.anchors & (s.view == 0)) if s.n_views > 1 or s.views is not None else None


def _interleaved_labels(s: Setting) -> Tensor:
    """Return the positives if labels are repeated for interleaved views, but the views are stacked."""
    rows = torch.arange(len(s.rows)) // s.n_views
    return (s.positive | s.own)[rows][:, rows] & s.member


def _stacked_labels(s: Setting) -> Tensor:
    """Return the positives if labels are repeated for stacked views, but the views are interleaved."""
    rows, items = torch.arange(len(s.rows)), len(s.rows) // s.n_views
    labelled = (rows % items * s.n_views + rows // items) % items
    return (s.positive | s.own)[labelled][:, labelled] & s.member


INTERLEAVED_LABELS, STACKED_LABELS = (
    f"labels are repeated for {labels} views, but views are {rows}"
    for labels, rows in (("interleaved", "stacked"), ("stacked", "interleaved"))
)

MIXED_UP = "stacked views are read as interleaved"
HARD_IGNORED = "the hard negatives that are passed have no effect"
QUEUE_IGNORED = "the negatives that are passed are replaced by the other keys of the batch"
QUEUE_ADDED = "the other keys of the batch are added to the negatives"

STACKED, ADJACENT = (
    f"rows {rows} are treated as partners, whatever labels or partners are passed"
    for rows in ("k and k + N/2", "2k and 2k + 1")
)

_RANKING = {
    ranking_reading(*options): _ranking(*options)
    for options in product(*(LOSSES["multiple_negatives_ranking"].choices[name] for name in RANKING_OPTIONS))
}

RIGHT_POSITIVES = (
    *("meant", "views", "towers", "towers a_to_b", "towers b_to_a"),
    *("queue", "queue a_to_b", "queue b_to_a"),
    *_RANKING,
)
"""The ways that are right for some loss."""

FIRST_VIEW = "only rows of the first view are anchors"

_ACROSS = "only rows of the {} view are anchors, and they are contrasted only with rows of the {} view"
TOWERS = {
    "towers": "rows are contrasted only with rows of the other view",
    "towers a_to_b": _ACROSS.format("first", "second"),
    "towers b_to_a": _ACROSS.format("second", "first"),
}
"""Descriptions of what is right for a loss of two towers, but wrong for a loss of one matrix with two views."""

LAYOUTS: Mapping[tuple[str, str], str] = {
    ("views", FIRST_VIEW): "one_way",
    ("stacked", MIXED_UP): "interleaved",
    ("interleaved", MIXED_UP): "stacked",
}
"""The call for which a target is right, by the call and the mistake that it has then."""

POSITIVES: Mapping[str, Positives] = {
    "meant": Positives(_ANY, lambda s: s),
    "views": _chosen(_same_item, FEATURES),
    "towers": _towers("both"),
    "towers a_to_b": _towers("a_to_b"),
    "towers b_to_a": _towers("b_to_a"),
    "queue": _queue("both"),
    "queue a_to_b": _queue("a_to_b", QUEUE, HARD),
    "queue b_to_a": _queue("b_to_a"),
    **_RANKING,
    HARD_IGNORED: _queue("a_to_b", HARD, queue=False, keys=True),
    QUEUE_IGNORED: _queue("a_to_b", queue=False, keys=True),
    QUEUE_ADDED: _queue("a_to_b", keys=True),
    "rows of the first view are contrasted only with rows of the second view": _towers("a_to_b", VIEWS),
    FIRST_VIEW: Positives((FEATURES, VIEWS, CASE), _first_anchors),
    STACKED: Positives((LABELS, PARTNERS, CASE), _in_halves),
    MIXED_UP: _chosen(_adjacent, VIEWS, FEATURES),
    ADJACENT: _chosen(_adjacent, LABELS, PARTNERS, CASE),
    INTERLEAVED_LABELS: _chosen(_interleaved_labels, FEATURES),
    STACKED_LABELS: _chosen(_stacked_labels, FEATURES),
    **_some("only the first positive of each anchor is used", lambda s: _first(s.positive)),
    **_some("only the last positive of each anchor is used", lambda s: _first(s.positive.flip(1)).flip(1)),
    **_some("each positive pair is counted in one direction only, as (i, j) with i < j", lambda s: s.positive.triu()),
    **_some("only rows of another view are positives", _other_view, FEATURES),
    "only pairs (i, j) with i < j are compared, positives and negatives alike": (
        Positives(_ANY, lambda s: replace(s, positive=s.positive.triu(), member=s.member.triu()))
    ),
    "positives and negatives are swapped": _chosen(lambda s: s.negative),
    "the anchor itself is counted among its positives": _chosen(lambda s: s.positive | (s.own & s.anchors[:, None])),
    "only the first view is used": _one_view(lambda views: views[0]),
    "the views of an item are averaged first": _one_view(lambda views: views.mean(dim=0)),
    "the labels are ignored: only views of one item are positives": _chosen(_same_item, FEATURES),
    "a pair (i, j) is also read as (j, i)": _chosen(lambda s: (s.positive | s.positive.T) & s.member, PAIRS, CASE),
    "a pair (i, j) is read as (j, i)": _chosen(lambda s: s.positive.T & s.member, PAIRS, CASE),
}
"""Ways to read the positives. Keys are the names of ``RIGHT_POSITIVES``, or descriptions of what is wrong."""
