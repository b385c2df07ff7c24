"""Cases: one evaluation of one loss, with exact inputs; from the worked examples and from ``fixtures/options``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pairproof import reference
from pairproof.reference.batch import evaluate_similarities
from pairproof.reference.similarity import similarity_matrix

from .catalogue import Loss, find_loss
from .records import Matrix

SIGNIFICAND = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
"""Bits of significand of each dtype, the hidden one counted."""

MATRICES = ("embeddings_b", "negatives", "ref_embeddings")
"""The float matrices that may go in beside the embeddings, by the names of their arguments."""

COUNTED = {"negatives": "negatives", "ref_embeddings": "references"}
"""What the rows of those are called whose number is their own."""


@dataclass(frozen=True)
class Block:
    """A part of the similarities: every row of one matrix against every row of another.

    Attributes:
        left: name of the matrix whose rows are anchors.
        right: name of the matrix whose rows they are contrasted with.
        row: the similarity matrix's row where the block begins.
        column: its column where the block begins.
    """

    left: str
    right: str
    row: int
    column: int


@dataclass(frozen=True, eq=False)
class Case:
    """One evaluation of one loss.

    Attributes:
        id: stable name, "document/call" or "options/name".
        loss: short name in the catalogue.
        embeddings: [N, D] float64, the exact inputs; for info_nce the first tower, embeddings_a.
        arguments: labels, partners, positive_pairs or positives; ref_labels and self_rows.
        keywords: the options that are not at their default.
        why: what the case is for.
        others: the further float matrices that go in, by argument: ref_embeddings [M, D], embeddings_b [N, D],
            negatives [K, D].
    """

    id: str
    loss: str
    embeddings: Matrix
    arguments: Mapping[str, Any]
    keywords: Mapping[str, Any]
    why: str = ""
    others: Mapping[str, Matrix] = field(default_factory=dict)

    @property
    def n(self) -> int:
        """Number of rows of the embeddings."""
        return len(self.embeddings)

    @property
    def entry(self) -> Loss:
        """The loss's entry in the catalogue."""
        return find_loss(self.loss)

    @property
    def first(self) -> str:
        """The name of the argument that the embeddings are."""
        return self.entry.embeddings[0]

    @property
    def matrices(self) -> dict[str, Matrix]:
        """Every float matrix that goes in, by the name of its argument, the embeddings first."""
        return {self.first: self.embeddings, **self.others}

    @property
    def size(self) -> int:
        """The side of a square of as many similarities: how large the case is for whoever loops over them."""
        return math.ceil(math.sqrt(math.prod(self.shape)))

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the similarities: rows that may be anchors, and rows that they are contrasted with."""
        if self.entry.two_towers:
            rows = self.n * (2 if self.option("direction") == "both" else 1)
            return rows, self.n + len(self.others.get("negatives", ()))
        return self.n, len(self.others.get("ref_embeddings", self.embeddings))

    def blocks(self) -> list[Block]:
        """The parts of the similarities by the matrices that they are of."""
        if not self.entry.two_towers:
            return [Block(self.first, "ref_embeddings" if "ref_embeddings" in self.others else self.first, 0, 0)]
        towers = [("embeddings_a", "embeddings_b"), ("embeddings_b", "embeddings_a")]
        chosen = {"both": towers, "a_to_b": towers[:1], "b_to_a": towers[1:]}[self.option("direction")]
        found = [Block(left, right, k * self.n, 0) for k, (left, right) in enumerate(chosen)]
        if "negatives" in self.others:
            found += [Block(block.left, "negatives", block.row, self.n) for block in found]
        return found

    def sizes(self) -> str:
        """What goes in, in words: rows and their width, and how many of everything else."""
        rows, width = _count(self.n, "rows"), _count(self.embeddings.shape[1], "numbers")
        words = f"{rows} of {width}{' in each of two towers' * self.entry.two_towers}"
        counted = (_count(len(self.others[name]), what) for name, what in COUNTED.items() if name in self.others)
        return ", ".join([words, *counted])

    def option(self, name: str) -> Any:
        """The value of a keyword: the case's, or the catalogue's default."""
        return self.keywords.get(name, self.entry.keywords.get(name))

    @property
    def temperature(self) -> float:
        """The temperature of the similarities."""
        return float(self.option("temperature"))

    def formula_options(self) -> dict[str, Any]:
        """The options that the formula and the baseline take."""
        return {name: self.option(name) for name in self.entry.formula_options}

    def holds_in(self, dtype: str) -> bool:
        """Whether every input is a number of this dtype, so that nothing but the implementation's error is measured."""
        smallest = {"float16": -14, "bfloat16": -126, "float32": -126, "float64": -1022}[dtype]
        entries = np.concatenate([matrix.ravel() for matrix in self.matrices.values()])
        fraction, exponent = np.frexp(entries[entries != 0])
        normal = (exponent > smallest) & (exponent <= 2 - smallest)
        return bool((normal & (fraction * 2.0 ** SIGNIFICAND[dtype] % 1 == 0)).all())

    def members(self) -> list[list[int]]:
        """A(i) of every row that may be an anchor: the columns that it is contrasted with."""
        rows, columns = self.shape
        if "negatives" in self.others:
            return [[i % self.n, *range(self.n, columns)] for i in range(rows)]
        own: Sequence[int] = range(rows)
        if self.entry.two_towers or "ref_embeddings" in self.others:
            own = self.arguments.get("self_rows", [-1] * rows)
        return [[j for j in range(columns) if j != own[i]] for i in range(rows)]

    def positives(self) -> list[list[int]]:
        """P(i) of every row that may be an anchor."""
        mask = self.positive_mask()
        return [[j for j in others if mask[i][j]] for i, others in enumerate(self.members())]

    def positive_mask(self) -> list[list[bool]]:
        """The mask of positives, of the similarities' shape, whichever way the case gives them."""
        rows, columns = self.shape
        if self.entry.two_towers:
            return [[j == i % self.n for j in range(columns)] for i in range(rows)]
        if "labels" in self.arguments:
            labels = self.arguments["labels"]
            return [[a == b for b in self.arguments.get("ref_labels", labels)] for a in labels]
        if "positives" in self.arguments:
            return [[bool(x) for x in row] for row in self.arguments["positives"]]
        if "partners" in self.arguments:
            return [[j == p for j in range(columns)] for p in self.arguments["partners"]]
        pairs = {tuple(pair) for pair in self.arguments["positive_pairs"]}
        return [[(i, j) in pairs for j in range(columns)] for i in range(rows)]

    def anchors(self) -> list[int]:
        """The rows that are anchors."""
        chosen = self.option("anchors")
        return [i for i in range(self.shape[0]) if chosen is None or chosen[i]]

    def undefined(self) -> set[int]:
        """The anchors whose value is NaN by a policy of the case; nothing else makes one NaN."""
        positives, members = self.positives(), self.members()
        policy = self.option("no_positive")
        # Without a denominator to choose, the policy for anchors without negatives always matters.
        matters = self.option("no_negative") == "nan" and self.option("denominator") in (None, "only_negatives")

        def nan(i: int) -> bool:
            if policy and not positives[i]:
                return bool(policy == "nan")
            return matters and len(positives[i]) == len(members[i])

        return set(filter(nan, self.anchors()))

    def counted(self) -> list[int]:
        """The anchors that reduction "none" returns: all, but where they are dropped those without positives."""
        positives = self.positives()
        return [i for i in self.anchors() if positives[i] or self.option("no_positive") != "drop"]


def _count(number: int, what: str) -> str:
    return f"{number} {what if number != 1 else what.removesuffix('s')}"


def call_reference(case: Case, rows: Mapping[str, npt.ArrayLike] | None = None, **changed: Any) -> reference.Result:
    """The reference's loss and terms for a case, on its matrices or on other scalars in their place.

    Args:
        case: the case.
        rows: every float matrix by the name of its argument, in place of the case's.
        changed: arguments and keywords in place of the case's.
    """
    given = {**case.matrices, **(rows or {}), **case.arguments, **case.keywords, **changed}
    for name in ("positives", "anchors"):
        if given.get(name) is not None:
            given[name] = np.array(given[name], dtype=bool)
    if "positive_pairs" in given:
        given["positive_pairs"] = np.array(given["positive_pairs"], dtype=np.int64).reshape(-1, 2)
    result: reference.Result = case.entry.reference(**given)
    return result


def similarities(case: Case, rows: Mapping[str, Sequence[Sequence[Any]]]) -> list[list[Any]]:
    """The similarities of a case, of its ``shape``, over any scalars.

    Args:
        case: the case.
        rows: every float matrix by the name of its argument.
    """
    found: list[list[Any]] = [[None] * case.shape[1] for _ in range(case.shape[0])]
    for block in case.blocks():
        others = None if block.left == block.right else rows[block.right]
        for i, line in enumerate(similarity_matrix(rows[block.left], case.option("similarity"), others)):
            found[block.row + i][block.column : block.column + len(line)] = line
    return found


def reference_of_similarities(case: Case, matrix: Sequence[Sequence[Any]]) -> reference.Result:
    """The reference's loss and terms for a case whose similarities, of its ``shape``, are given."""
    names = ("temperature", "base_temperature", "no_positive", "reduction", *case.entry.formula_options)
    options: dict[str, Any] = {name: case.option(name) for name in names}
    options |= {"anchors": case.anchors(), "members": case.members()}
    return evaluate_similarities(case.entry.formula, matrix, case.positive_mask(), **options)
