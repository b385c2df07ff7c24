"""A batch as the losses see it: logits, who is whose positive, who is an anchor; and how anchors become a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy.typing as npt

from . import checks
from .similarity import similarity_matrix
from .terms import Pair, Result, Scalar, Terms

NAN = float("nan")


@dataclass
class Batch:
    """Checked arguments of one evaluation, and the terms as they are found.

    ``similarity`` and ``logits`` have a row for each row that may be an anchor and a column for each row that anchors
    are contrasted with: [N][N] within a batch. ``others[i]`` is A(i), ``positives[i]`` P(i) and ``negatives[i]`` N(i),
    all of them columns; ``anchors`` lists the rows that are anchors; ``zero`` is the number 0 of the embeddings' type.
    """

    temperature: float
    base_temperature: float | None
    similarity: list[list[Scalar]]
    logits: list[list[Scalar]]
    others: list[list[int]]
    positives: list[list[int]]
    negatives: list[list[int]]
    anchors: list[int]
    zero: Scalar
    pairs: dict[tuple[int, int], Pair] = field(default_factory=dict)
    anchor_losses: dict[int, Scalar] = field(default_factory=dict)

    def finish(self, reduction: str, no_positive: str = "zero") -> Result:
        """Scale by the base temperature, apply the policy for lonely anchors, and reduce.

        The mean is over the anchors that count; "mean_pairs" is over every (anchor, positive) pair. Over nothing at
        all both are 0.
        """

        def scaled(value: Scalar) -> Scalar:
            # Multiplied first: the quotient of the two temperatures, rounded on its own, would be another number.
            return value if self.base_temperature is None else value * self.temperature / self.base_temperature

        lonely = {i for i in self.anchors if not self.positives[i]}
        if no_positive == "nan":
            self.anchor_losses.update(dict.fromkeys(lonely, self.zero + NAN))
        counted = [i for i in self.anchors if not (no_positive == "drop" and i in lonely)]
        losses = {i: scaled(value) for i, value in self.anchor_losses.items()}
        terms = Terms(
            similarity=self.similarity,
            logits=self.logits,
            positives=self.positives,
            negatives=self.negatives,
            pairs=self.pairs,
            anchor_losses=losses,
            counted=counted,
            scale=scaled(1.0),
        )
        if reduction == "none":
            return Result([losses[i] for i in counted], terms)
        if reduction == "mean_pairs":
            total, number = self.zero, 0
            for i in self.anchors:
                if i in lonely:
                    total = total + losses[i]
                for p in self.positives[i]:
                    total = total + scaled(self.pairs[i, p].value)
                    number += 1
            return Result(total / max(number, 1), terms)
        total = self.zero
        for i in counted:
            total = total + losses[i]
        return Result(total / len(counted) if reduction == "mean" and counted else total, terms)


Relation = Callable[[int, int, list[int]], Iterable[tuple[int, int]]]
"""Checks who is whose positive: from N, M and each row's own column to directed pairs (row, column)."""


def prepare(
    embeddings: npt.ArrayLike,
    *,
    labels: object = None,
    positives: object = None,
    relation: Relation | None = None,
    ref_embeddings: npt.ArrayLike | None = None,
    ref_labels: object = None,
    self_rows: object = None,
    anchors: object,
    temperature: float,
    base_temperature: float | None,
    similarity: str,
) -> Batch:
    """Check the arguments that the losses of one batch share and lay the batch out.

    Positives come from ``relation``, else from ``labels`` (with ``ref_labels``) or from the mask ``positives``, of
    which exactly one must be given. A row is never its own positive: not on the diagonal, nor in its ``self_rows``.
    """
    check_numbers(temperature, base_temperature, similarity)
    rows = checks.check_embeddings(embeddings, similarity, least=2 if ref_embeddings is None else 1)
    references = _references(ref_embeddings, ref_labels, self_rows, similarity, columns=len(rows[0]))
    shape = n, m = len(rows), len(rows if references is None else references)

    def own_columns() -> list[int]:
        if references is None:
            return list(range(n))
        return [-1] * n if self_rows is None else checks.check_self_rows(self_rows, n, m)

    if relation is None:
        is_positive = _relatives(labels, positives, ref_labels, shape, within=references is None)
        own = own_columns()
    else:
        own = own_columns()
        pairs = set(relation(n, m, own))
        is_positive = [[(i, j) in pairs for j in range(m)] for i in range(n)]

    mask = None if anchors is None else checks.check_mask("anchors", anchors, (n,))
    return lay_out(
        similarity_matrix(rows, similarity, references),
        is_positive,
        anchors=[i for i in range(n) if mask is None or mask[i]],
        temperature=float(temperature),
        base_temperature=None if base_temperature is None else float(base_temperature),
        others=[[a for a in range(m) if a != own[i]] for i in range(n)],
    )


def _references(
    ref_embeddings: npt.ArrayLike | None, ref_labels: object, self_rows: object, similarity: str, *, columns: int
) -> list[list[Scalar]] | None:
    """The references [M][D], or None; without them nothing else of theirs may be given."""
    if ref_embeddings is not None:
        return checks.check_further_rows(
            "ref_embeddings", ref_embeddings, similarity, shape="[M, D]", columns=columns, like="embeddings"
        )
    for name, value in (("ref_labels", ref_labels), ("self_rows", self_rows)):
        if value is not None:
            raise ValueError(f"{name}: expected ref_embeddings with it, got none")
    return None


def _relatives(
    labels: object, positives: object, ref_labels: object, shape: tuple[int, int], *, within: bool
) -> list[list[bool]]:
    """The mask [N][M] of positives from labels, or from the mask that was given; ``within`` the batch, or not."""
    n, m = shape
    if (labels is None) == (positives is None):
        got = "neither" if labels is None else "both"
        raise ValueError(f"labels: expected exactly one of labels and positives, got {got}")
    if labels is None:
        if ref_labels is not None:
            raise ValueError("ref_labels: expected labels with it, got positives")
        mask = checks.check_mask("positives", positives, shape)
        return [[bool(mask[i, j]) for j in range(m)] for i in range(n)]
    label = checks.check_labels(labels, n)
    ref_label = label if within else checks.check_labels(ref_labels, m, name="ref_labels", per="reference")
    return [[label[i] == ref_label[j] for j in range(m)] for i in range(n)]


def check_numbers(temperature: object, base_temperature: object, similarity: object) -> None:
    """The options that every loss has."""
    checks.check_choice("similarity", similarity)
    checks.check_temperature("temperature", temperature)
    if base_temperature is not None:
        checks.check_temperature("base_temperature", base_temperature)


def lay_out(
    similarity: list[list[Scalar]],
    is_positive: list[list[bool]],
    *,
    anchors: list[int],
    temperature: float,
    base_temperature: float | None,
    others: Sequence[Sequence[int]] | None = None,
) -> Batch:
    """A batch from the similarities of its rows and the mask of positives.

    Args:
        similarity: [R][C]: every row that may be an anchor, with every row that anchors are contrasted with.
        is_positive: [R][C]; what it says outside A(i) is ignored.
        anchors: the rows that are anchors.
        temperature: what similarities are divided by.
        base_temperature: None, or what every value is scaled with.
        others: A(i) of every row, as columns in ascending order; by default, of square similarities, every row but i.
    """
    if others is None:
        n = len(similarity)
        others = [[a for a in range(n) if a != i] for i in range(n)]
    return Batch(
        temperature=temperature,
        base_temperature=base_temperature,
        similarity=similarity,
        logits=[[s / temperature for s in line] for line in similarity],
        others=[list(row) for row in others],
        positives=[[a for a in row if is_positive[i][a]] for i, row in enumerate(others)],
        negatives=[[a for a in row if not is_positive[i][a]] for i, row in enumerate(others)],
        anchors=anchors,
        zero=similarity[0][0] * 0,
    )
