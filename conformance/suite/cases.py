"""Cases: a case is one evaluation of one loss on exact inputs.

Row i of the similarity matrix is contrasted with the columns A(i). Its positives are P(i), a subset of A(i).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar, TypeVarTuple

import numpy as np
import numpy.typing as npt

from pairproof import reference
from pairproof.reference.batch import evaluate_similarities
from pairproof.reference.ranking import hard_of_documents
from pairproof.reference.scalars import zero_like
from pairproof.reference.similarity import similarity_matrix

from .catalogue import PAIR_REDUCTIONS, WEIGHTS, Loss, find_loss
from .records import Expected, Matrix, Outcome

SIGNIFICAND = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
"""Bits in the significand of each dtype, including the implicit bit."""

MATRICES = ("embeddings_b", "negatives", "hard_negatives", "ref_embeddings")
"""The arguments that are float matrices, apart from the embeddings."""

MASKS = ("positives", "anchors", "ignored")
"""The arguments that are boolean arrays."""

IDS = ("ignored_ids", "ref_ignored_ids")
"""The arguments that are ids of rows."""

COUNTED = {"negatives": "negatives", "hard_negatives": "hard negatives", "ref_embeddings": "references"}
"""The words for the rows of these matrices in messages."""


T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def once(method: Callable[[Case], T]) -> Callable[[Case], T]:
    """Cache the result of a method of a case, or of a function of a case. Callers must not change the result."""
    name = f"{method.__module__}.{method.__qualname__}"

    @functools.wraps(method)
    def stored(self: Case) -> T:
        if name not in self.__dict__:
            self.__dict__[name] = method(self)
        found: T = self.__dict__[name]
        return found

    return stored


def once_for_similarities(function: Callable[[Case, *Ts], T]) -> Callable[[Case, *Ts], T]:
    """Cache the result of a function that depends on a case only by its similarities, for all cases that share them.

    Callers must not change the result.
    """

    @functools.lru_cache(maxsize=1024)
    def stored(key: _Key[*Ts]) -> T:
        return function(key.case, *key.more)

    @functools.wraps(function)
    def found(case: Case, *more: *Ts) -> T:
        return stored(_Key((case.similarity_key(), more), case, more))

    return found


@dataclass(frozen=True)
class _Key(Generic[*Ts]):
    """A case and further arguments, equal to those of other cases that have the same similarities."""

    key: Hashable
    case: Case = field(compare=False)
    more: tuple[*Ts] = field(compare=False)


@dataclass(frozen=True)
class Block:
    """A block of the similarity matrix: every row of one matrix against every row of another.

    Attributes:
        left: name of the matrix whose rows are anchors.
        right: name of the matrix whose rows they are contrasted with.
        part: the position of the block, as an index of the similarity matrix.
    """

    left: str
    right: str
    part: tuple[slice, slice]


@dataclass(frozen=True, eq=False)
class Case:
    """One evaluation of one loss.

    Attributes:
        id: stable name, such as "golden/supcon/two-rows" or "document/call".
        loss: short name in the catalogue.
        embeddings: [N, D] float64, the exact inputs. For two towers (two encoders), the first one: embeddings_a.
        arguments: the positives, as labels, partners, positive_pairs or positives (optional for two towers). May also
            have ref_labels, self_rows, ignored, ignored_ids, ref_ignored_ids, and weights of pairs and anchors.
        keywords: the options that differ from their defaults.
        others: the other float matrices by argument: ref_embeddings [M, D], embeddings_b [M, D], negatives [K, D],
            hard_negatives [N H, D].
    """

    id: str
    loss: str
    embeddings: Matrix
    arguments: Mapping[str, Any]
    keywords: Mapping[str, Any]
    others: Mapping[str, Matrix] = field(default_factory=dict)

    @property
    def n(self) -> int:
        """Number of rows of the embeddings."""
        return len(self.embeddings)

    @property
    def entry(self) -> Loss:
        """The loss's entry in the catalogue."""
        return find_loss(self.loss)

    @functools.cached_property
    def first(self) -> str:
        """The name of the argument that takes the embeddings."""
        return self.entry.embeddings[0]

    @property
    def matrices(self) -> dict[str, Matrix]:
        """Every float matrix by the name of its argument, the embeddings first."""
        return {self.first: self.embeddings, **self.others}

    def with_options(self, **keywords: Any) -> Case:
        """The case with other values of some options."""
        return replace(self, keywords={**self.keywords, **keywords})

    def with_matrices(self, matrices: Mapping[str, Matrix], **changed: Any) -> Case:
        """The case with other matrices, by argument. Those that are not given stay; ``changed`` are further fields."""
        rows = {**self.matrices, **matrices}
        return replace(self, embeddings=rows.pop(self.first), others=rows, **changed)

    def mapped(self, change: Callable[[Matrix], Matrix], **changed: Any) -> Case:
        """The case with a function of each matrix in its place; ``changed`` are further fields."""
        return self.with_matrices({name: change(rows) for name, rows in self.matrices.items()}, **changed)

    def gradients(self, result: Expected | Outcome) -> dict[str, Matrix]:
        """The gradients of a result by matrix, the embeddings first; empty if it has none."""
        return {} if result.gradient is None else {self.first: result.gradient, **result.other_gradients}

    @property
    def size(self) -> int:
        """The square root of the number of similarities, rounded up."""
        return math.ceil(math.sqrt(math.prod(self.shape)))

    @functools.cached_property
    def shape(self) -> tuple[int, int]:
        """The shape of the similarity matrix: possible anchors, and rows that they are contrasted with.

        If both towers have anchors and differ in length, the narrower half of the matrix is padded with zeros.
        """
        if "directions" in self.entry.keywords:
            bands = self._bands()
            return self.n * len(bands), sum(block[2].shape[1] for block in bands[0])
        if self.entry.two_towers:
            sides, queue = self._sides(), len(self.others.get("negatives", ()))
            matrices = self.matrices
            return sum(len(matrices[one]) for one, _ in sides), max(len(matrices[other]) for _, other in sides) + queue
        return self.n, len(self.others.get("ref_embeddings", self.embeddings))

    def _sides(self) -> list[tuple[str, str]]:
        """The towers whose rows are anchors, each followed by the other tower."""
        sides = [("embeddings_a", "embeddings_b"), ("embeddings_b", "embeddings_a")]
        return {"both": sides, "b_to_a": sides[1:]}.get(self.option("direction"), sides[:1])

    @once
    def groups(self) -> list[range] | None:
        """The rows of each direction, or None without ``direction_weights``.

        Reduction "mean" adds the means of the directions.
        """
        if self.option("direction_weights") is None:
            return None
        return [range(self.n), range(self.n, self.shape[0])]

    @once
    def divisors(self) -> list[float]:
        """For each row, the number by which the reduction divides its value."""
        if self.groups() is None or self.option("reduction") != "mean":
            return [self.divisor()] * self.shape[0]
        weights, counted = self.row_weights(), {*self.counted()}
        sums = [math.fsum(weights[i] for i in rows if i in counted) for rows in self.groups() or ()]
        return [weight or 1.0 for weight, rows in zip(sums, self.groups() or (), strict=True) for _ in rows]

    @once
    def blocks(self) -> list[Block]:
        """The blocks of the similarity matrix, one for each pair of matrices."""
        if not self.entry.two_towers:
            return [Block(self.first, "ref_embeddings" if "ref_embeddings" in self.others else self.first, np.s_[:, :])]
        if "directions" in self.entry.keywords:
            return [
                Block(left, right, np.s_[k * self.n : (k + 1) * self.n, start : start + mask.shape[1]])
                for k, band in enumerate(self._bands())
                for start, (left, right, mask) in zip(_starts(band), band, strict=True)
            ]
        found, start, queue = list[Block](), 0, self.others.get("negatives", ())
        for one, other in self._sides():
            n, m = len(self.matrices[one]), len(self.matrices[other])
            rows = slice(start, start + n)
            found.append(Block(one, other, (rows, slice(m))))
            if len(queue):
                found.append(Block(one, "negatives", (rows, slice(m, m + len(queue)))))
            start += n
        return found

    @once
    def similarity_key(self) -> Hashable:
        """Equal for cases whose similarity matrices are equal."""
        blocks = tuple((block.left, block.right, repr(block.part)) for block in self.blocks())
        matrices = tuple((name, matrix.shape, matrix.tobytes()) for name, matrix in self.matrices.items())
        return self.option("similarity"), blocks, matrices

    @once
    def _bands(self) -> list[list[tuple[str, str, npt.NDArray[np.bool_]]]]:
        """The blocks of a loss with ``directions``: one list per band of N anchors, from left to right.

        A block is (left matrix, right matrix, mask of the pairs in A(i)).
        """
        a, b, h = "embeddings_a", "embeddings_b", "hard_negatives"
        scope, chosen = self.option("hard_negatives_scope"), self.option("directions").split("+")
        same = np.eye(self.n, dtype=bool)
        own = np.repeat(same, len(self.others.get(h, ())) // self.n, axis=1)
        queries = [(a, b, same if scope == "own_only" else same | True), (a, h, own | (scope == "batch"))]
        if "query_to_query" in chosen:
            queries.append((a, a, ~same))
        documents = []
        if "doc_to_query" in chosen:
            documents.append((b, a, same | True))
        if "doc_to_doc" in chosen:
            kind = hard_of_documents(self.option("doc_to_doc_hard"), scope)
            documents += [(b, b, ~same), *([(b, h, ~own | (kind == "all"))] if kind != "none" else [])]
        apart = self.option("partition") == "per_direction" and documents
        # Both bands need the same width, so documents also have columns of hard negatives, outside A(i).
        bands = [queries, [*documents, (b, h, own & False)]] if apart else [queries + documents]
        return [[block for block in band if block[1] != h or own.size] for band in bands]

    def sizes(self) -> str:
        """The sizes of the matrices, in words."""
        rows, width = _count(self.n, "rows"), _count(self.embeddings.shape[1], "numbers")
        words = f"{rows} of {width}"
        if self.entry.two_towers:
            m = len(self.others["embeddings_b"])
            words += " in each of two towers" if m == self.n else f" against {_count(m, 'rows')} of the other tower"
        counted = (_count(len(self.others[name]), what) for name, what in COUNTED.items() if name in self.others)
        return ", ".join([words, *counted])

    def option(self, name: str) -> Any:
        """The value of a keyword: that of the case, or the default."""
        found = self.keywords.get(name)
        return self.entry.default(name, self.others) if found is None else found

    @functools.cached_property
    def form(self) -> str:
        """How the value of an anchor is computed from its terms; see ``Loss.form``."""
        inside = self.entry.form == "mean" and self.option("inside_reduction") in ("mean", "sum")
        return "inside" if inside else self.entry.form

    @property
    def has_no_pair(self) -> bool:
        """Whether it is a batch of one row that is contrasted with no row."""
        return self.shape == (1, 1) and not self.members()[0]

    @property
    def temperature(self) -> float:
        """The temperature."""
        return float(self.option("temperature"))

    @property
    def bias(self) -> float:
        """The number added to the logits; 0 for a loss without a bias."""
        return float(self.option("bias") or 0.0)

    @property
    def lowest(self) -> dict[str, float]:
        """The keyword ``lowest`` of ``Loss.baseline``, the lowest possible logit; empty if it does not take one."""
        lowest = self.entry.lowest
        return {} if lowest is None else {"lowest": lowest / self.temperature}

    def formula_options(self) -> dict[str, Any]:
        """The options that the formula and ``Loss.baseline`` take."""
        return {name: self.option(name) for name in self.entry.formula_options}

    def weights_options(self) -> dict[str, Any]:
        """The options of the functions that compute the weights."""
        return {name: self.option(name) for name in (self.entry.weights.options if self.entry.weights else ())}

    @property
    def detaches_weights(self) -> bool:
        """Whether no gradient flows through the weights."""
        return bool(self.entry.keywords.get("detach_weights") is None or self.option("detach_weights"))

    def holds_in(self, dtype: str) -> bool:
        """Whether every input is zero or a normal number of this dtype."""
        return dtype in self.exact_dtypes()

    @once
    def exact_dtypes(self) -> list[str]:
        """The dtypes in which every input is zero or a normal number."""
        entries = np.concatenate([matrix.ravel() for matrix in self.matrices.values()])
        fraction, exponent = np.frexp(entries[entries != 0])

        def holds(dtype: str) -> bool:
            smallest = {"float16": -14, "bfloat16": -126, "float32": -126, "float64": -1022}[dtype]
            normal = (exponent > smallest) & (exponent <= 2 - smallest)
            scaled = fraction * 2.0 ** SIGNIFICAND[dtype]
            return bool((normal & (scaled == np.rint(scaled))).all())

        return list(filter(holds, SIGNIFICAND))

    @once
    def members(self) -> list[list[int]]:
        """A(i) of every row: the columns that it is contrasted with."""
        return _columns_where(self.member_array())

    @once
    def positives(self) -> list[list[int]]:
        """P(i) of every row."""
        return _columns_where(self.member_array() & self.positive_array())

    def positive_mask(self) -> list[list[bool]]:
        """``positive_array`` as nested lists."""
        found: list[list[bool]] = self.positive_array().tolist()
        return found

    @once
    def member_array(self) -> npt.NDArray[np.bool_]:
        """A(i) of every row, as a mask of the case's ``shape``."""
        found = self._columns_but_own() & ~self.ignored_array()
        of_positives, of_negatives = self.weights("positive_weights"), self.weights("negative_weights")
        positive = self.positive_array()
        if of_negatives is not None:  # a negative of weight 0 is left out
            found &= positive | (of_negatives != 0)
        if of_positives is not None:  # an anchor whose positives all have weight 0 has none
            found &= ~positive | (found & positive & (of_positives != 0)).any(axis=1, keepdims=True)
        return found

    def weights(self, name: str) -> Matrix | None:
        """The weights of pairs or anchors with this name, as an array; None if they are not given."""
        given = self.arguments.get(name)
        return None if given is None else np.array(given, dtype=np.float64)

    @once
    def row_weights(self) -> list[float]:
        """The weight of every row as an anchor. Both directions of two towers have the same weights."""
        found = self.weights("anchor_weights")
        return [1.0] * self.shape[0] if found is None else found.tolist() * (self.shape[0] // self.n)

    @once
    def direction_weights(self) -> list[float]:
        """For each row, the weight of its direction."""
        weights = self.option("direction_weights") or ()
        found = [float(weight) for rows, weight in zip(self.groups() or (), weights, strict=True) for _ in rows]
        return found or [1.0] * self.shape[0]

    @once
    def anchor_weights(self) -> list[float]:
        """For each row, the factor of its value: its weight times the weight of its direction."""
        return [own * factor for own, factor in zip(self.row_weights(), self.direction_weights(), strict=True)]

    @once
    def pair_numbers(self) -> list[float]:
        """For each row, the divisor of the sum over its positives: their number or the sum of their weights."""
        found, positive = self.weights("positive_weights"), self.member_array() & self.positive_array()
        weights = np.ones(self.shape) if found is None or self.option("weights_divisor") == "count" else found
        numbers: list[float] = weights.sum(axis=1, where=positive).tolist()
        return numbers

    def _columns_but_own(self) -> npt.NDArray[np.bool_]:
        if "directions" in self.entry.keywords:
            return np.concatenate([np.concatenate([block[2] for block in band], axis=1) for band in self._bands()])
        rows, columns = self.shape
        if self.entry.two_towers:
            found = np.zeros(self.shape, dtype=bool)
            for block in self.blocks():
                found[block.part] = True
            if "negatives" in self.others:
                # With a queue, the other tower contributes only the positive.
                found[:, : self.n] = self.positive_array()[:, : self.n]
            return found
        own: Sequence[int] = range(rows)
        if "ref_embeddings" in self.others:
            own = self.arguments.get("self_rows", [-1] * rows)
        return np.asarray(np.arange(columns) != np.array(own).reshape(-1, 1))

    def ignored_array(self) -> npt.NDArray[np.bool_]:
        """The mask of ignored pairs, of the case's ``shape``."""
        ids, of_columns = self.arguments.get("ignored_ids"), self.arguments.get("ref_ignored_ids")
        found = np.zeros(self.shape, dtype=bool)
        if self.arguments.get("ignored") is not None and "directions" in self.entry.keywords:
            mask, (rows, columns) = np.array(self.arguments["ignored"], dtype=bool), self.shape
            for k in range(rows // self.n):
                part = mask[:, k * columns : (k + 1) * columns]
                found[k * self.n : (k + 1) * self.n, : part.shape[1]] = part
        elif self.arguments.get("ignored") is not None:
            found |= self._of_each_direction(np.array(self.arguments["ignored"], dtype=bool))
        if ids is not None:
            equal = np.equal.outer(ids, ids if of_columns is None else of_columns)
            found |= self._of_each_direction(equal) & ~self.positive_array()
        return found

    def _of_each_direction(self, pairs: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Expand a mask of pairs to the case's ``shape``. Anchors of the second tower use the transposed mask."""
        if not self.entry.two_towers:
            return pairs.reshape(self.shape)
        found = np.zeros(self.shape, dtype=bool)
        for block in self.blocks():
            if block.right in self.entry.embeddings:
                found[block.part] = pairs if block.left == self.first else pairs.T
        return found

    @once
    def positive_array(self) -> npt.NDArray[np.bool_]:
        """The mask of positives, of the case's ``shape``. Positives outside A(i) are included."""
        if "directions" in self.entry.keywords:  # the positives are in the first block
            return np.tile(np.eye(self.n, self.shape[1], dtype=bool), (self.shape[0] // self.n, 1))
        labels, mask, partners = (self.arguments.get(name) for name in ("labels", "positives", "partners"))
        columns = len(self.others["embeddings_b"]) if self.entry.two_towers else self.shape[1]
        found = np.zeros((self.n, columns), dtype=bool)
        if labels is not None:
            found = np.equal.outer(labels, self.arguments.get("ref_labels", labels))
        elif mask is not None:
            found = np.array(mask, dtype=bool).reshape(found.shape)
        elif partners is not None or self.entry.two_towers:
            found[range(self.n), range(self.n) if partners is None else partners] = True
        else:
            pairs = np.array(self.arguments["positive_pairs"], dtype=np.int64).reshape(-1, 2)
            found[pairs[:, 0], pairs[:, 1]] = True
        return self._of_each_direction(np.asarray(found))

    @once
    def anchors(self) -> list[int]:
        """The rows that are anchors."""
        chosen = self.option("anchors")
        return [i for i in range(self.shape[0]) if chosen is None or chosen[i]]

    @once
    def positive_counts(self) -> list[int]:
        """|P(i)| of every row."""
        counts: list[int] = (self.member_array() & self.positive_array()).sum(axis=1).tolist()
        return counts

    @once
    def member_counts(self) -> list[int]:
        """|A(i)| of every row."""
        counts: list[int] = self.member_array().sum(axis=1).tolist()
        return counts

    @property
    def over_pairs(self) -> bool:
        """Whether the reduction is over pairs instead of anchors."""
        return self.option("reduction") in PAIR_REDUCTIONS

    @property
    def separate(self) -> bool:
        """Whether the loss is one value per anchor or per pair."""
        return self.option("reduction") in ("none", "none_pairs")

    @once
    def pairs(self) -> list[tuple[int, int]]:
        """The pairs (anchor, column) that a reduction over pairs counts, in row-major order."""
        columns = self.members() if self.entry.form == "sigmoid" else self.positives()
        return [(i, j) for i in self.anchors() for j in columns[i]]

    @once
    def divisor(self) -> float:
        """The divisor of a mean: the number of anchors or pairs, or the sum of their weights. 0 is replaced by 1.

        With ``direction_weights``, ``divisors`` applies instead.
        """
        weights, found = self.row_weights(), 1.0
        if self.option("reduction") == "mean":
            found = math.fsum(weights[i] for i in self.counted())
        elif self.option("reduction") == "mean_pairs":
            numbers = self.member_counts() if self.entry.form == "sigmoid" else self.pair_numbers()
            found = math.fsum(weights[i] * numbers[i] for i in self.anchors())
        return found or 1.0

    @once
    def undefined_values(self) -> list[bool]:
        """For each value of the loss, whether it is NaN."""
        if self.option("reduction") == "none_pairs":
            return [False] * len(self.pairs())
        undefined = self.undefined()
        return [i in undefined for i in self.counted()] if self.separate else [bool(undefined)]

    @once
    def undefined(self) -> set[int]:
        """The anchors whose value is NaN, because ``no_positive`` or ``no_negative`` is "nan"."""
        positives, members, policy = self.positive_counts(), self.member_counts(), self.option("no_positive")
        # A loss without the option ``denominator`` applies ``no_negative`` to every anchor.
        applies = self.option("no_negative") == "nan" and self.option("denominator") in (None, "only_negatives")
        without = {i for i in self.anchors() if policy and not positives[i]}
        found = {i for i in self.anchors() if applies and positives[i] == members[i]} - without
        return found | without if policy == "nan" else found

    @once
    def counted(self) -> list[int]:
        """The anchors that count: all, except those that ``no_positive="drop"`` leaves out."""
        positives = self.positive_counts()
        return [i for i in self.anchors() if positives[i] or self.option("no_positive") != "drop"]


def _starts(band: Sequence[tuple[str, str, npt.NDArray[np.bool_]]]) -> list[int]:
    """The first column of each block of a band."""
    widths = [mask.shape[1] for _, _, mask in band]
    return list(itertools.accumulate(widths[:-1], initial=0))


def called(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as a loss takes them: hard negatives [N H, D] are reshaped to [N, H, D]."""
    h = given.get("hard_negatives")
    shape = () if h is None else (len(given["embeddings_a"]), -1, len(h[0]))
    return {**given} if h is None or np.ndim(h) == 3 else {**given, "hard_negatives": h.reshape(shape)}


def _columns_where(mask: npt.NDArray[np.bool_]) -> list[list[int]]:
    """For every row, the columns where a mask is true."""
    columns = list(range(mask.shape[1]))  # the rows share these integers, which saves memory
    return [list(itertools.compress(columns, row)) for row in mask.tolist()]


def _count(number: int, what: str) -> str:
    return f"{number} {what if number != 1 else what.removesuffix('s')}"


def call_reference(case: Case, rows: Mapping[str, npt.ArrayLike] | None = None, **changed: Any) -> reference.Result:
    """Evaluate the reference on a case.

    Args:
        case: the case.
        rows: matrices that replace those of the case, by argument. Entries may be scalars of any type.
        changed: arguments and keywords that replace those of the case.
    """
    given = {**case.matrices, **(rows or {}), **case.arguments, **case.keywords, **changed}
    for name in MASKS:
        if given.get(name) is not None:
            given[name] = np.array(given[name], dtype=bool)
    for name in WEIGHTS.keys() & given.keys():
        given[name] = None if given[name] is None else np.array(given[name], dtype=np.float64)
    if "positive_pairs" in given:
        given["positive_pairs"] = np.array(given["positive_pairs"], dtype=np.int64).reshape(-1, 2)
    result: reference.Result = case.entry.reference(**called(given))
    return result


def similarities(case: Case, rows: Mapping[str, Sequence[Sequence[Any]]]) -> list[list[Any]]:
    """The similarity matrix of a case, from its matrices (by argument) with scalars of any type."""
    found = np.empty(case.shape, dtype=object)
    found[:] = zero_like(rows[case.first][0][0])
    for block in case.blocks():
        others = None if block.left == block.right else rows[block.right]
        found[block.part] = similarity_matrix(rows[block.left], case.option("similarity"), others)
    matrix: list[list[Any]] = found.tolist()
    return matrix


def reference_of_similarities(case: Case, matrix: Sequence[Sequence[Any]], **changed: Any) -> reference.Result:
    """Evaluate the reference on a case from its similarity matrix.

    Args:
        case: the case.
        matrix: the similarities, of the case's ``shape``.
        changed: arguments of ``evaluate_similarities`` that replace those of the case.
    """
    names = ("temperature", "bias", "base_temperature", "no_positive", "reduction", *case.entry.formula_options)
    options: dict[str, Any] = {name: case.option(name) for name in names}
    groups = zip(case.groups() or (), case.option("direction_weights") or (), strict=True)
    options |= {"lowest": case.entry.lowest, "groups": list(groups) or None}
    if case.entry.weights:
        weights = functools.partial(case.entry.weights_function, **case.weights_options())
        options |= {"weights": weights, "detach_weights": case.detaches_weights}
    options |= {name: case.arguments.get(name) for name in WEIGHTS}
    if "anchor_weights" in case.arguments:
        options["anchor_weights"] = case.row_weights()
    # Proofs pass the sets of one anchor at a time in ``changed``.
    if "is_positive" not in changed:
        options |= {"is_positive": case.positive_mask(), "anchors": case.anchors(), "members": case.members()}
    return evaluate_similarities(case.entry.formula, matrix, **{**options, **changed})


def unit_rows(matrix: Matrix) -> Matrix:
    """Divide rows by their norms; rows of zeros stay zero."""
    # The squares of extreme entries overflow or underflow, so rows are scaled first.
    largest = abs(matrix).max(axis=1, keepdims=True)
    scaled = matrix / np.where(largest, largest, 1.0)
    return np.asarray(scaled / np.maximum(np.linalg.norm(scaled, axis=1, keepdims=True), 1.0))


def row_norms(matrix: Matrix) -> Matrix:
    """Return the norms of rows, without overflow or underflow of squares: rows are scaled to entries below 1."""
    exponents = np.frexp(np.abs(matrix).max(axis=1, initial=0.0))[1]
    scaled = np.ldexp(matrix, -exponents[:, None])
    with np.errstate(over="ignore"):
        return np.asarray(np.ldexp(np.linalg.norm(scaled, axis=1), exponents))
