"""Repeat the documents' own operations in their dtype, on ``Rounded`` intervals.

A figure printed with all digits shows the rounding errors of its dtype. It is compared with the interval of values that
the same operations can give with any mathematical library.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import add

import numpy as np

from ..suite.cases import Case
from ..truth.intervals import Rounded

Row = Sequence[Rounded]
Matrix = Sequence[Row]


def own_loss(case: Case, arithmetic: str, slack: int, *, clamp: bool = False) -> Rounded:
    """The loss of a case, computed with the operations of its document.

    Args:
        case: the case; its exact inputs must be known.
        arithmetic: "float32" (torch, in the pair notebook) or "float64" (numpy, in the SupCon notebook).
        slack: how far exponentials and logarithms may be from correct rounding, in units in the last place.
        clamp: clamp logarithms at -100 from below, as torch's binary cross-entropy does.

    Returns:
        The interval of values that this arithmetic can give.

    Raises:
        ValueError: no document computes this loss in float32, or the temperature of a float64 case is not 1.
    """
    dtype = np.dtype(arithmetic).type
    rows = [[Rounded.number(x, dtype, slack) for x in row] for row in case.embeddings.tolist()]
    if arithmetic == "float64":
        return _numpy_loss(case, _numpy_cosines(rows))
    if case.loss == "nt_xent":
        return _cross_entropy(case, _torch_cosines(rows))
    if case.loss == "nt_bxent":
        return _binary_cross_entropy(case, _torch_cosines(rows), -100.0 if clamp else -math.inf)
    raise ValueError(f"{case.id}: no document computes {case.loss} in {arithmetic}")


def _sum(values: Iterable[Rounded]) -> Rounded:
    return reduce(add, values)


def _numpy_sum(values: Row) -> Rounded:
    """Add in the order of numpy for at most 128 numbers: eight running sums, added in pairs, then the rest."""
    if len(values) < 8:
        return _sum(values)
    whole = len(values) // 8 * 8
    running = [_sum(values[k:whole:8]) for k in range(8)]
    while len(running) > 1:
        running = [one + other for one, other in zip(running[::2], running[1::2], strict=True)]
    return _sum([*running, *values[whole:]])


def _dot(a: Row, b: Row) -> Rounded:
    return _sum(x * y for x, y in zip(a, b, strict=True))


def _numpy_cosines(rows: Matrix) -> Matrix:
    """``1 - cdist(x, x, "cosine")``, where the distance of scipy is 1 - cosine."""
    with_norms = [(row, _dot(row, row).sqrt()) for row in rows]
    return [[1 - (1 - _dot(a, b) / (x * y)) for b, y in with_norms] for a, x in with_norms]


def _torch_cosines(rows: Matrix) -> Matrix:
    """``F.cosine_similarity`` of all pairs: divide each row by its norm, then add products."""
    norms = [_dot(row, row).sqrt() for row in rows]
    units = [[x / norm for x in row] for row, norm in zip(rows, norms, strict=True)]
    return [[_dot(u, v) for v in units] for u in units]


def _softmax(row: Row, i: int) -> Row:
    """``scipy.special.softmax`` of a row whose entry i is replaced by -inf."""
    maximum = max((x for a, x in enumerate(row) if a != i), key=float)
    exponentials = [maximum * 0 if a == i else (x - maximum).exp() for a, x in enumerate(row)]
    total = _numpy_sum(exponentials)
    return [e / total for e in exponentials]


def _numpy_loss(case: Case, cosines: Matrix) -> Rounded:
    """The loss, summed in the order of the SupCon notebook."""
    if case.temperature != 1:
        raise ValueError(f"{case.id}: the notebook's sums require temperature 1, got {case.temperature}")
    anchors = []
    for i, (row, positives) in enumerate(zip(cosines, case.positives(), strict=True)):
        if case.loss == "nt_xent_pairwise":
            e = [x.exp() for x in row]
            negatives = [e[k] for k in range(case.n) if k not in (i, *positives)]
            ratios = [e[p] / _sum([e[p], *negatives]) for p in positives]
        else:
            softmax = _softmax(row, i)
            ratios = [softmax[p] for p in positives]
        total = _sum(ratio.log() for ratio in ratios)
        anchors.append(total / len(ratios) if len(ratios) > 1 else total)
    return -_sum(anchors) / case.n


def _cross_entropy(case: Case, cosines: Matrix) -> Rounded:
    """``F.cross_entropy(cosines / temperature, partners)`` with -inf on the diagonal."""
    losses = []
    for i, row in enumerate(cosines):
        logits = {a: x / case.temperature for a, x in enumerate(row) if a != i}
        maximum = max(logits.values(), key=float)
        log_sum = _sum((x - maximum).exp() for x in logits.values()).log()
        losses.append(-(logits[case.arguments["partners"][i]] - maximum - log_sum))
    return _sum(losses) / case.n


def _binary_cross_entropy(case: Case, cosines: Matrix, lowest: float) -> Rounded:
    """The pair notebook's NT-BXent: sigmoid, then ``F.binary_cross_entropy``.

    The self pair counts as a positive with loss 0. Logarithms are clamped at ``lowest`` from below.
    """
    rows = []
    for i, (row, positives) in enumerate(zip(cosines, case.positives(), strict=True)):
        sigmoids = {j: 1 / (1 + (-(x / case.temperature)).exp()) for j, x in enumerate(row) if j != i}
        attract = [-sigmoids[j].log().at_least(lowest) for j in positives]
        repel = [-(-x).log1p().at_least(lowest) for j, x in sigmoids.items() if j not in positives]
        value = _sum(repel) / len(repel)
        rows.append(_sum(attract) / (len(attract) + 1) + value if attract else value)
    return _sum(rows) / case.n
