"""The documents' own operations in the format they used, step by step, over ``Rounded`` intervals.

A figure printed to the full length of its format shows that format's rounding as well as the loss. It is judged against
what the same operations can give in that format, whatever mathematical library rounds their exponentials.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..truth.intervals import Rounded, rounded_inputs
from .load import Call, Input

Row = Sequence[Rounded]


def own_loss(call: Call, source: Input, arithmetic: str, slack: int, *, clamp: bool = False) -> Rounded:
    """The loss of a call as its document computes it.

    Args:
        call: the evaluation.
        source: its input, whose exact values are known.
        arithmetic: "float32" (the pair notebook's torch) or "float64" (the SupCon notebook's numpy).
        slack: units in the last place by which exponentials and logarithms may differ from correct rounding.
        clamp: bound logarithms below at -100, as torch's binary cross-entropy does.

    Returns:
        The interval of values that this arithmetic can give.
    """
    dtype = np.float32 if arithmetic == "float32" else np.float64
    values = np.array([[float(x) for x in row] for row in source.exact or ()])
    rows = rounded_inputs(values, dtype, slack)
    temperature = float(call.keywords["temperature"])
    if arithmetic == "float64":
        return _numpy_loss(call, _numpy_cosines(rows), temperature)
    cosines = _torch_cosines(rows)
    if call.loss == "nt_xent":
        return _cross_entropy(cosines, call.arguments["partners"], temperature)
    if call.loss == "nt_bxent":
        return _binary_cross_entropy(cosines, call.arguments["positive_pairs"], temperature, clamp)
    raise ValueError(f"{call.id}: no document computes {call.loss} in {arithmetic}")


def _sum(values: Sequence[Rounded]) -> Rounded:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def _numpy_sum(values: Sequence[Rounded]) -> Rounded:
    """The order of numpy's sums of fewer than 128: eight running sums, joined in pairs, then the rest."""
    if len(values) < 8:
        return _sum(values)
    running = list(values[:8])
    whole = len(values) // 8 * 8
    for start in range(8, whole, 8):
        running = [running[k] + values[start + k] for k in range(8)]
    joined = ((running[0] + running[1]) + (running[2] + running[3])) + (
        (running[4] + running[5]) + (running[6] + running[7])
    )
    return _sum([joined, *values[whole:]])


def _numpy_cosines(rows: np.ndarray[Any, Any]) -> list[list[Rounded]]:
    """``1 - cdist(x, x, "cosine")``: scipy's distance is itself 1 - cosine."""
    n = len(rows)
    norms = [_sum([x * x for x in row]).sqrt() for row in rows]
    return [
        [
            1 - (1 - _sum([a * b for a, b in zip(rows[i], rows[j], strict=True)]) / (norms[i] * norms[j]))
            for j in range(n)
        ]
        for i in range(n)
    ]


def _softmax(row: Row, i: int) -> list[Rounded]:
    """``scipy.special.softmax`` of a row whose diagonal entry is -inf: e^(x - max) over its sum, 0 on the diagonal."""
    others = [a for a in range(len(row)) if a != i]
    maximum = row[max(others, key=lambda a: float(row[a]))]
    zero = (row[others[0]] - row[others[0]]) * 0
    exponentials = [zero if a == i else (row[a] - maximum).exp() for a in range(len(row))]
    total = _numpy_sum(exponentials)
    return [e / total for e in exponentials]


def _numpy_loss(call: Call, cosines: list[list[Rounded]], temperature: float) -> Rounded:
    """The hand-written sums of the SupCon notebook, in its order; its temperature is 1."""
    if temperature != 1:
        raise ValueError(f"{call.id}: the notebook's sums are written for temperature 1, got {temperature}")
    n = len(cosines)
    positives = _positives(call, n)
    negatives = [[j for j in range(n) if j != i and j not in positives[i]] for i in range(n)]

    def log_ratio(i: int, p: int) -> Rounded:
        if call.loss == "nt_xent_pairwise":
            numerator = cosines[i][p].exp()
            return (numerator / _sum([numerator, *(cosines[i][k].exp() for k in negatives[i])])).log()
        return softmax[i][p].log()

    softmax = [_softmax(row, i) for i, row in enumerate(cosines)]
    anchors = []
    for i in range(n):
        total = _sum([log_ratio(i, p) for p in positives[i]])
        anchors.append(total / len(positives[i]) if len(positives[i]) > 1 else total)
    return -_sum(anchors) / n


def _positives(call: Call, n: int) -> list[list[int]]:
    if "partners" in call.arguments:
        return [[int(p)] for p in call.arguments["partners"]]
    labels = call.arguments["labels"]
    return [[j for j in range(n) if j != i and labels[j] == labels[i]] for i in range(n)]


def _torch_cosines(rows: np.ndarray[Any, Any]) -> list[list[Rounded]]:
    """``F.cosine_similarity`` of all pairs: each row over its norm, then the sum of products."""
    units = []
    for row in rows:
        norm = _sum([x * x for x in row]).sqrt()
        units.append([x / norm for x in row])
    return [[_sum([a * b for a, b in zip(u, v, strict=True)]) for v in units] for u in units]


def _cross_entropy(cosines: list[list[Rounded]], partners: Sequence[int], temperature: float) -> Rounded:
    """``F.cross_entropy(cosines / temperature, partners)`` with -inf on the diagonal."""
    losses = []
    for i, row in enumerate(cosines):
        logits = {a: x / temperature for a, x in enumerate(row) if a != i}
        maximum = max(logits.values(), key=float)
        log_sum = _sum([(x - maximum).exp() for x in logits.values()]).log()
        losses.append(-(logits[partners[i]] - maximum - log_sum))
    return _sum(losses) / len(losses)


def _binary_cross_entropy(
    cosines: list[list[Rounded]], positive_pairs: Sequence[Sequence[int]], temperature: float, clamp: bool
) -> Rounded:
    """The multi-label loss: sigmoid, then ``F.binary_cross_entropy``; the infinite diagonal adds a positive of 0."""
    n = len(cosines)
    rows = []
    log: Callable[[Rounded], Rounded] = (lambda x: x.log().at_least(-100.0)) if clamp else (lambda x: x.log())
    log1p: Callable[[Rounded], Rounded] = (lambda x: x.log1p().at_least(-100.0)) if clamp else (lambda x: x.log1p())
    for i in range(n):
        positives = {j for a, j in positive_pairs if a == i} | {i}
        sigmoids = {j: 1 / (1 + (-(cosines[i][j] / temperature)).exp()) for j in range(n) if j != i}
        positive = [-log(sigmoids[j]) for j in sorted(positives - {i})]
        negative = [-log1p(-sigmoids[j]) for j in range(n) if j not in positives]
        row = _sum(negative) / len(negative)
        rows.append(_sum(positive) / len(positives) + row if positive else row)
    return _sum(rows) / n
