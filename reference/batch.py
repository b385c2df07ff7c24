"""A batch as the losses see it: logits, who is whose positive, who is an anchor; and how anchors become a loss."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy.typing as npt

from . import checks
from .similarity import similarity_matrix
from .terms import Pair, Result, Scalar, Terms

NAN = float("nan")


@dataclass
class Batch:
    """Checked arguments of one evaluation, and the terms as they are found.

    ``similarity`` and ``logits`` are [N][N]; ``positives[i]`` is P(i); ``negatives[i]`` is N(i); ``anchors`` lists the
    rows that are anchors; ``zero`` is the number 0 of the embeddings' number type.
    """

    temperature: float
    base_temperature: float | None
    similarity: list[list[Scalar]]
    logits: list[list[Scalar]]
    positives: list[list[int]]
    negatives: list[list[int]]
    anchors: list[int]
    zero: Scalar
    pairs: dict[tuple[int, int], Pair] = field(default_factory=dict)
    anchor_losses: dict[int, Scalar] = field(default_factory=dict)

    def others(self, i: int) -> list[int]:
        """A(i): every row but i."""
        return [a for a in range(len(self.logits)) if a != i]

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


def prepare(
    embeddings: npt.ArrayLike,
    *,
    labels: object = None,
    positives: object = None,
    anchors: object,
    temperature: float,
    base_temperature: float | None,
    similarity: str,
    pairs: Iterable[tuple[int, int]] | None = None,
) -> Batch:
    """Check the arguments that all losses share and lay the batch out.

    Positives come from ``pairs`` (directed, already checked), else from ``labels`` or from the mask ``positives``,
    of which exactly one must be given. A row is never its own positive.
    """
    checks.check_choice("similarity", similarity)
    checks.check_temperature("temperature", temperature)
    if base_temperature is not None:
        checks.check_temperature("base_temperature", base_temperature)
    rows = checks.check_embeddings(embeddings, similarity)
    n = len(rows)

    if pairs is not None:
        directed = set(pairs)
        is_positive = [[(i, j) in directed for j in range(n)] for i in range(n)]
    elif (labels is None) == (positives is None):
        got = "neither" if labels is None else "both"
        raise ValueError(f"labels: expected exactly one of labels and positives, got {got}")
    elif labels is not None:
        label = checks.check_labels(labels, n)
        is_positive = [[label[i] == label[j] for j in range(n)] for i in range(n)]
    else:
        mask = checks.check_mask("positives", positives, (n, n))
        is_positive = [[bool(mask[i, j]) for j in range(n)] for i in range(n)]

    chosen = range(n) if anchors is None else [i for i in range(n) if checks.check_mask("anchors", anchors, (n,))[i]]
    return lay_out(
        similarity_matrix(rows, similarity),
        is_positive,
        anchors=list(chosen),
        temperature=float(temperature),
        base_temperature=None if base_temperature is None else float(base_temperature),
    )


def lay_out(
    similarity: list[list[Scalar]],
    is_positive: list[list[bool]],
    *,
    anchors: list[int],
    temperature: float,
    base_temperature: float | None,
) -> Batch:
    """A batch from the similarities [N][N] of its rows and the mask [N][N] of positives, its diagonal ignored."""
    n = len(similarity)
    return Batch(
        temperature=temperature,
        base_temperature=base_temperature,
        similarity=similarity,
        logits=[[s / temperature for s in line] for line in similarity],
        positives=[[j for j in range(n) if j != i and is_positive[i][j]] for i in range(n)],
        negatives=[[j for j in range(n) if j != i and not is_positive[i][j]] for i in range(n)],
        anchors=anchors,
        zero=similarity[0][0] * 0,
    )


def row_count(embeddings: npt.ArrayLike) -> int:
    """N of embeddings [N, D], for the checks of partners and pairs that come before the batch is laid out."""
    return len(checks.check_embeddings(embeddings, "dot"))
