"""The quantities that figures (numbers and tables that a document prints) show: kind, shape, and computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pairproof import reference
from pairproof.reference import scalars

Evaluation = Any
"""A ``figures.Evaluation``. It cannot be imported here, because ``figures`` imports this module."""


@dataclass(frozen=True)
class Quantity:
    """A quantity that figures show.

    Attributes:
        kind: "number", "mask", "index" or "layout".
        shape: axes separated by spaces. The input is [N, D]; its rows are B items with V views each. M is the number of
            ``positive_pairs``. ``rows`` is the number of rows that the figure shows.
        compute: function from an evaluation to a scalar or nested sequences.
    """

    kind: str
    shape: str
    compute: Callable[[Evaluation], Any]


def _softmax(row: Sequence[Any], i: int) -> list[Any]:
    shift, rest = scalars.shifted_sum([x for a, x in enumerate(row) if a != i])
    return [0 if a == i else (x - shift).exp() / (1 + rest) for a, x in enumerate(row)]


def _split(e: Evaluation, rows: Any) -> Any:
    """Reshape rows [N, D] to [B, V, D]. The figure determines V."""
    return reference.split_views(rows, 1 + max(index[1] for index, _ in e.figure.entries())).tolist()


def _exponentials(e: Evaluation, name: str) -> list[Any]:
    """For every positive pair, the exponential of the term with this name."""
    return [getattr(e.result.terms.pairs[pair], name).exp() for pair in e.positive_pairs]


def _means_over_views(e: Evaluation) -> list[Any]:
    """For each item, the mean of the losses of its views. The figure has one entry per item."""
    losses, items = e.result.terms.anchor_losses, len(e.figure.printed)
    return [sum(losses[i] for i in range(b, e.n, items)) * items / e.n for b in range(items)]


def _square(entry: Callable[[Evaluation, int, int], Any], kind: str = "mask") -> Quantity:
    """A quantity of shape [N, N], given by a function for its entries."""
    return Quantity(kind, "N N", lambda e: [[entry(e, i, j) for j in range(e.n)] for i in range(e.n)])


_OFF_DIAGONAL = _square(lambda e, i, j: i != j)
_POSITIVE = _square(lambda e, i, j: i == j or (i, j) in e.positive_pairs)

QUANTITIES: Mapping[str, Quantity] = {
    "similarity": Quantity("number", "N N", lambda e: e.cosines),
    "softmax": Quantity("number", "N N", lambda e: [_softmax(row, i) for i, row in enumerate(e.logits)]),
    "sigmoid": _square(lambda e, i, j: 1 if i == j else 1 / (1 + (-e.logits[i][j]).exp()), "number"),
    "exp_similarity": _square(lambda e, i, j: 0 if i == j else e.logits[i][j].exp(), "number"),
    "similarity_row": Quantity("number", "N", lambda e: e.cosines[e.figure.row]),
    "normalised": Quantity("number", "rows D", lambda e: e.units[slice(*(e.figure.rows or (e.n,)))]),
    "normalised_features": Quantity("number", "B V D", lambda e: _split(e, e.units)),
    "first_to_second": Quantity("number", "N/2", lambda e: [e.cosines[i][i + e.n // 2] for i in range(e.n // 2)]),
    "second_to_first": Quantity("number", "N/2", lambda e: [e.cosines[i][i - e.n // 2] for i in range(e.n // 2, e.n)]),
    "positives": Quantity("number", "N", lambda e: [e.cosines[i][p] for i, p in e.positive_pairs]),
    "exp_positives": Quantity("number", "N", lambda e: _exponentials(e, "log_numerator")),
    "denominators": Quantity("number", "N", lambda e: _exponentials(e, "log_denominator")),
    "denominator": Quantity("number", "", lambda e: _exponentials(e, "log_denominator")[e.figure.row]),
    "anchor_losses": Quantity("number", "N", lambda e: [e.result.terms.anchor_losses[i] for i in range(e.n)]),
    "item_losses": Quantity("number", "B", _means_over_views),
    "loss": Quantity("number", "", lambda e: e.result.loss),
    "features": Quantity("layout", "B V D", lambda e: _split(e, e.source.table(str, printed=True))),
    "eye": _square(lambda e, i, j: i == j),
    "not_eye": _OFF_DIAGONAL,
    "positives_mask": _POSITIVE,
    "negatives_mask": _OFF_DIAGONAL,
    "target": _POSITIVE,
    "negative_pairs": _square(lambda e, i, j: i != j and (i, j) not in e.positive_pairs),
    "one_hot_partners": _square(lambda e, i, j: (i, j) in e.positive_pairs),
    "partners": Quantity("index", "N", lambda e: reference.interleaved_partners(e.n).tolist()),
    "partners_column": Quantity("index", "N 1", lambda e: reference.interleaved_partners(e.n)[:, None]),
    "positive_pairs_with_diagonal": Quantity(
        "index", "M+N 2", lambda e: [*e.call.arguments["positive_pairs"], *([i, i] for i in range(e.n))]
    ),
}
"""Every quantity by its name in the fixtures."""
