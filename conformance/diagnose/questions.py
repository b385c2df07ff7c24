"""What a black box is asked: small batches, each of which tells some of the catalogue's losses and options apart.

For every call there are batches of one structure, in which all counts are equal and the rows of a class lie nearer and
nearer to each other; further ordinary ones, of other sizes; and batches at the edge, where policies show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from ..implementations.callable import Batch

Tensor = torch.Tensor


def drawn(seed: int, labels: Sequence[int], pull: float, columns: int = 5) -> Tensor:
    """[N, D] around their class's centre, of norms from 0.6 to 1.5 that say nothing of the class."""
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(max(labels) + 1, columns, generator=draw, dtype=torch.float64)
    noise = torch.randn(len(labels), columns, generator=draw, dtype=torch.float64)
    rows = pull * centres[torch.tensor(labels)] + noise
    norms = 0.6 + 0.9 * torch.rand(len(labels), 1, generator=draw, dtype=torch.float64)
    found: Tensor = rows / rows.norm(dim=1, keepdim=True) * norms
    return found


PULLS = (0.0, 0.6, 1.2, 2.0)
"""How near the rows of a class are to each other, in the batches of one structure."""


@dataclass(frozen=True)
class Questions:
    """What is asked with one call: batches of one structure, further ordinary ones, and those at the edge."""

    alike: tuple[Batch, ...]
    further: tuple[Batch, ...]
    edges: tuple[Batch, ...]


UNBALANCED = (0, 1, 0, 2, 1, 0, 2, 1, 0)
OTHERWISE = (3, 0, 1, 1, 0, 2, 2, 2, 0, 3, 2, 2, 3, 0)


FAR_APART = (0, 256, 2**32, 2**24, 2**24 + 1, -1)
"""Labels that are one where they are narrowed to fewer bits, or to float32."""


def _shrunk(batch: Batch) -> Batch:
    return replace(batch, embeddings=batch.embeddings * 1e-9)


def _with_duplicates(rows: Tensor) -> Tensor:
    """Two rows of different classes and two of one class made equal."""
    rows = rows.clone()
    rows[1] = rows[0]
    rows[5] = rows[2]
    return rows


def _of_labels() -> list[Questions]:
    def ask(name: str, seed: int, labels: Sequence[int], pull: float = 0.8) -> Batch:
        return Batch(name, "labels", drawn(seed, labels, pull), tuple(labels))

    edges = (
        ask("two anchors without positive", 21, (0, 1, 0, 2, 0, 3, 3)),
        ask("a batch of one class", 22, (0, 0, 0, 0, 0)),
        ask("a batch without any positive", 23, (0, 1, 2, 3, 4)),
        replace(ask("labels far apart", 24, (0, 1, 2, 3, 4, 5) * 2), labels=FAR_APART * 2),
        _shrunk(ask("rows of norm 1e-9", 25, UNBALANCED)),
    )
    twins = (0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5)
    duplicated = ask("duplicated rows", 13, (0, 1, 0, 1, 2, 0, 2, 2, 1, 1))
    unbalanced = Questions(
        tuple(ask(f"classes of 4, 3 and 2 rows, {p:g} apart", 3 + k, UNBALANCED, p) for k, p in enumerate(PULLS)),
        (
            ask("14 rows in classes of 6 to 2", 11, OTHERWISE),
            ask("pairs only, stacked", 12, twins),
            replace(duplicated, embeddings=_with_duplicates(duplicated.embeddings)),
            ask("pairs only, side by side", 14, (0, 0, 1, 1, 2, 2, 3, 3)),
        ),
        edges,
    )
    pairs = Questions(
        tuple(ask(f"six pairs, {pull:g} apart", 31 + k, twins, pull) for k, pull in enumerate(PULLS)),
        (ask("five pairs", 36, (0, 1, 2, 3, 4, 0, 1, 2, 3, 4)), ask("eight pairs", 37, (*range(8), *range(8)))),
        (),
    )
    return [unbalanced, pairs]


def _of_features() -> list[Questions]:
    def ask(name: str, seed: int, labels: Sequence[int] | None, items: int, views: int, pull: float = 0.8) -> Batch:
        classes = list(labels if labels is not None else range(items)) * views
        given = None if labels is None else tuple(labels)
        return Batch(name, "features", drawn(seed, classes, pull), given, n_views=views)

    classes = (0, 1, 0, 2, 0, 1)
    labelled = Questions(
        tuple(
            ask(f"6 items of 2 views in 3 classes, {p:g} apart", 41 + k, classes, 6, 2, p) for k, p in enumerate(PULLS)
        ),
        (
            ask("5 items of 2 views in 3 classes", 45, (2, 1, 2, 0, 0), 5, 2),
            ask("4 items of 3 views in 2 classes", 46, (0, 1, 0, 0), 4, 3),
            ask("9 items of 1 view in 3 classes", 47, UNBALANCED, 9, 1),
            ask("6 items of 2 views, no labels", 48, None, 6, 2),
        ),
        (
            ask("one view, two anchors without positive", 49, (0, 1, 0, 2, 0, 3, 3), 7, 1),
            ask("a batch of one class", 50, (0, 0, 0), 3, 2),
        ),
    )
    alone = Questions(
        tuple(ask(f"6 items of 2 views, {p:g} apart", 51 + k, None, 6, 2, p) for k, p in enumerate(PULLS)),
        (
            ask("9 items of 2 views", 56, None, 9, 2),
            ask("4 items of 3 views", 57, None, 4, 3),
            ask("3 items of 2 views", 58, None, 3, 2),
        ),
        (),
    )
    return [labelled, alone]


def _of_views() -> list[Questions]:
    def ask(name: str, seed: int, items: int, pull: float = 0.8) -> Batch:
        return Batch(name, "views", drawn(seed, list(range(items)) * 2, pull), n_views=2)

    duplicated = ask("duplicated rows", 68, 7)
    return [
        Questions(
            tuple(ask(f"6 items, {pull:g} apart", 61 + k, 6, pull) for k, pull in enumerate(PULLS)),
            (
                ask("9 items", 66, 9),
                ask("3 items", 67, 3),
                replace(duplicated, embeddings=_with_duplicates(duplicated.embeddings)),
                ask("12 items", 69, 12),
            ),
            (),
        ),
        Questions(
            tuple(ask(f"4 items, {pull:g} apart", 121 + k, 4, pull) for k, pull in enumerate(PULLS)),
            (ask("9 items", 66, 9),),
            (),
        ),
    ]


DIRECTED = ((0, 2), (2, 0), (1, 4), (4, 1), (3, 6), (5, 0), (6, 8), (7, 2), (8, 3), (0, 5), (0, 8), (2, 5), (6, 3))
OTHER_PAIRS = (
    *((0, 1), (1, 0), (2, 3), (3, 4), (4, 2), (5, 9), (6, 0), (7, 8), (8, 7), (9, 5), (10, 11), (11, 1)),
    *((0, 7), (2, 9), (2, 10), (5, 6), (9, 10), (9, 11)),
)


def _of_pairs() -> list[Questions]:
    def ask(name: str, seed: int, n: int, pairs: Sequence[tuple[int, int]], pull: float = 0.8) -> Batch:
        return Batch(name, "pairs", drawn(seed, [k % 3 for k in range(n)], pull), positive_pairs=tuple(pairs))

    return [
        Questions(
            tuple(
                ask(f"13 directed pairs of 9 rows, {p:g} apart", 71 + k, 9, DIRECTED, p) for k, p in enumerate(PULLS)
            ),
            (
                ask("18 directed pairs of 12 rows", 76, 12, OTHER_PAIRS),
                ask("each of 8 rows with one partner", 77, 8, [(k, (k + 4) % 8) for k in range(8)]),
                ask("6 rows, both directions", 78, 6, [(0, 1), (1, 0), (2, 3), (3, 2), (4, 5), (5, 4), (0, 5), (5, 0)]),
            ),
            (
                ask("pairs listed twice", 79, 8, [*DIRECTED[:4], (5, 0), (6, 3), (7, 2), (3, 6), (0, 2), (5, 0)]),
                ask("two rows without positive", 80, 7, DIRECTED[:6]),
                ask("a row without negatives", 81, 4, [(0, 1), (0, 2), (0, 3), (1, 0), (2, 1), (3, 0)]),
                ask("a diagonal entry listed", 82, 6, [(0, 1), (1, 0), (2, 3), (3, 2), (4, 5), (5, 4), (2, 2)]),
            ),
        )
    ]


QUESTIONS: Mapping[str, Callable[[], list[Questions]]] = MappingProxyType(
    {"labels": _of_labels, "features": _of_features, "views": _of_views, "pairs": _of_pairs}
)
