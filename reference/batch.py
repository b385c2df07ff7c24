"""Evaluate a loss: prepare its arguments, apply its formula to every anchor, and reduce the results.

A formula computes the loss and the terms of one anchor:

    formula(s, i, A, P, N, **options) -> (L_i, [Pair, ...])

    s   the anchor's logits, one per column: similarity / temperature (+ bias)
    i   the anchor's row
    A   the columns that the anchor is contrasted with, in ascending order; within a batch, all except i
    P   the positives in A
    N   the other columns of A

Ignored pairs and negatives of weight 0 are not in A. If all positives of an anchor have weight 0, they are not in A
either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt

from . import checks
from .scalars import NAN, Scalar, detached, order, total, zero_like
from .similarity import similarity_matrix
from .terms import Anchor, Columns, Result, Row, Terms

Formula = Callable[..., Anchor]
Weights = Callable[[Sequence[Row], Sequence[Columns], Sequence[Columns]], Sequence[Row]]
"""Takes the similarities [R][C], and P and N of every row. Returns one list of weights per row."""
OVERFLOW = (
    'similarity: expected "cosine" for rows whose dot products, divided by the temperature, exceed the range of '
    "float64, got 'dot'"
)
PAIR_REDUCTIONS = ("mean_pairs", "sum_pairs", "none_pairs")
"""The reductions over pairs instead of anchors. Only some losses have them."""
ABSENT = object()
"""The default of an argument that a loss does not have."""


def evaluate(
    formula: Formula,
    embeddings: npt.ArrayLike,
    *,
    labels: object = None,
    positives: object = None,
    partners: object = ABSENT,
    positive_pairs: object = ABSENT,
    anchors: object = None,
    ref_embeddings: npt.ArrayLike | None = None,
    ref_labels: object = None,
    self_rows: object = None,
    ignored: object = None,
    ignored_ids: object = None,
    ref_ignored_ids: object = None,
    positive_weights: object = None,
    negative_weights: object = None,
    anchor_weights: object = None,
    similarity: str,
    zero_row: str = "error",
    more_reductions: Sequence[str] = (),
    **options: Any,
) -> Result:
    """Check the arguments of a loss over one batch, with or without references, and evaluate its formula.

    The positives come from ``partners`` or ``positive_pairs`` if the loss has one of these arguments. If not, exactly
    one of ``labels`` and ``positives`` must be given. ``options`` are passed to evaluate_similarities and the formula.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value, or does not fit the others.
    """
    checks.check_options({**options, "similarity": similarity, "zero_row": zero_row}, more_reductions)
    within = ref_embeddings is None
    checked = similarity if zero_row == "error" else "dot"  # rows of zeros are valid under "dot"
    # Within a batch, partners are two different rows.
    least = 2 if within and partners is not ABSENT else 1
    rows = checks.check_embeddings(embeddings, checked, least=least)
    references = checks.check_references(ref_embeddings, checked, rows, ref_labels=ref_labels, self_rows=self_rows)
    n, m = len(rows), len(rows if references is None else references)

    is_positive = None
    if partners is ABSENT and positive_pairs is ABSENT:
        is_positive = _positives_mask(labels, positives, labels if within else ref_labels, n, m)
    own = list(range(n)) if within else checks.check_self_rows(self_rows, n, m)
    if is_positive is None:
        if positive_pairs is ABSENT:
            mates = checks.check_partners(partners, n, m, own, mutual=within)
            pairs = set(enumerate(mates))
        else:
            pairs = set(checks.check_positive_pairs(positive_pairs, n))
        is_positive = [[(i, j) in pairs for j in range(m)] for i in range(n)]
    chosen = [True] * n if anchors is None else checks.check_mask("anchors", anchors, [n], per="embedding")
    mask, ids = checks.check_ignored(ignored, ignored_ids, ref_ignored_ids, n, m, within=within)
    of_positives = checks.check_weights("positive_weights", positive_weights, [n, m], per="pair")
    of_negatives = checks.check_weights("negative_weights", negative_weights, [n, m], per="pair")
    if partners is not ABSENT and mask is not None:
        checks.check_kept(mask, mates)
    others = [[a for a in range(m) if a != own[i]] for i in range(n)]
    members = _without_ignored(others, is_positive, mask, ids)
    return evaluate_similarities(
        formula,
        similarity_matrix(rows, similarity, references),
        is_positive,
        anchors=[i for i in range(n) if chosen[i]],
        members=_without_weightless(members, is_positive, of_positives, of_negatives),
        positive_weights=of_positives,
        negative_weights=of_negatives,
        anchor_weights=checks.check_weights("anchor_weights", anchor_weights, [n], per="embedding"),
        **options,
    )


def _without_weightless(
    members: Sequence[Columns],
    is_positive: Sequence[Sequence[bool]],
    positive_weights: Sequence[Sequence[float]] | None,
    negative_weights: Sequence[Sequence[float]] | None,
) -> list[Columns]:
    """Remove the negatives of weight 0 from each A(i), and the positives if all of them have weight 0."""

    def weight(i: int, a: int) -> float:
        weights = positive_weights if is_positive[i][a] else negative_weights
        return 1.0 if weights is None else weights[i][a]

    paired = [any(weight(i, a) for a in A if is_positive[i][a]) for i, A in enumerate(members)]
    return [[a for a in A if (paired[i] if is_positive[i][a] else weight(i, a))] for i, A in enumerate(members)]


def _without_ignored(
    members: Sequence[Columns],
    is_positive: Sequence[Sequence[bool]],
    ignored: Sequence[Sequence[bool]] | None,
    ids: tuple[Sequence[int], Sequence[int]] | None,
) -> list[Columns]:
    """Remove the pairs in the mask from each A(i), and the negatives with the id of the row."""

    def is_ignored(i: int, a: int) -> bool:
        if ignored is not None and ignored[i][a]:
            return True
        return ids is not None and ids[0][i] == ids[1][a] and not is_positive[i][a]

    return [[a for a in A if not is_ignored(i, a)] for i, A in enumerate(members)]


def _positives_mask(labels: object, positives: object, column_labels: object, n: int, m: int) -> list[list[bool]]:
    """Return the mask [N][M] of positives, from either labels or a mask."""
    if (labels is None) == (positives is None):
        got = "neither" if labels is None else "both"
        raise ValueError(f"labels: expected exactly one of labels and positives, got {got}")
    if labels is None:
        if column_labels is not None:
            raise ValueError("ref_labels: expected labels with it, got positives")
        mask: list[list[bool]] = checks.check_mask("positives", positives, [n, m], per="pair").tolist()
        return mask
    rows = checks.check_labels(labels, n)
    columns = checks.check_labels(column_labels, m, name="ref_labels", per="reference")
    return [[label == other for other in columns] for label in rows]


def evaluate_towers(
    formula: Formula,
    embeddings_a: npt.ArrayLike,
    embeddings_b: npt.ArrayLike,
    *,
    partners: object,
    labels: object,
    ref_labels: object,
    positives: object,
    ignored: object = None,
    ignored_ids: object = None,
    ref_ignored_ids: object = None,
    anchor_weights: object = None,
    negatives: npt.ArrayLike | None = None,
    direction: str | None = "a_to_b",
    direction_weights: object = None,
    similarity: str,
    more_reductions: Sequence[str] = (),
    **options: Any,
) -> Result:
    """Check the arguments of a loss over two towers and evaluate its formula.

    The anchors are the rows of a ("a_to_b"), those of b ("b_to_a"), or those of a and then of b ("both").

    The positive pairs come from ``partners``, ``labels`` or ``positives``. By default, row k of a and row k of b are a
    positive pair. The two rows of a pair are positives of each other.

    A(i) is every row of the other tower, without ignored pairs. With ``negatives``, A(i) is the positive of anchor i
    and the negatives. ``options`` are passed to evaluate_similarities and the formula.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or value, or does not fit the others.
    """
    if direction is None:
        direction = "both" if negatives is None else "a_to_b"
    own = {"direction": direction, "similarity": similarity}
    if "inside_reduction" in options:
        checks.check_choice("inside_reduction", options["inside_reduction"], checks.CHOICES["inside_of_towers"])
        own["inside_reduction"] = "mean"
    checks.check_options({**options, **own}, more_reductions)
    weights = checks.check_direction_weights(direction_weights, direction)
    given = {"partners": partners, "labels": labels, "positives": positives}
    named = [name for name, value in given.items() if value is not None]
    checks.check_one_target(named, ref_labels)
    if negatives is not None:
        left_out = {"ignored": ignored, "ignored_ids": ignored_ids, "ref_ignored_ids": ref_ignored_ids}
        checks.check_no_queue([*named, *(name for name, value in left_out.items() if value is not None)])
    a = checks.check_embeddings(embeddings_a, similarity, name="embeddings_a", least=1)
    b = checks.check_second_tower(embeddings_b, similarity, a, rows=not named)
    queue = [] if negatives is None else checks.check_negatives(negatives, similarity, a)
    n, m = len(a), len(b)
    mates = checks.check_partners(partners, n, m, [-1] * n, mutual=False) if partners is not None else range(n)
    if labels is not None and ref_labels is None and n == m:
        is_positive = _positives_mask(labels, None, labels, n, m)
    elif labels is not None or positives is not None:
        is_positive = _positives_mask(labels, positives, ref_labels, n, m)
    else:
        is_positive = [[j == mate for j in range(m)] for mate in mates]
    if ref_ignored_ids is None and n == m:
        ref_ignored_ids = ignored_ids
    mask, ids = checks.check_ignored(ignored, ignored_ids, ref_ignored_ids, n, m, within=False)
    if mask is not None and labels is positives is None:
        checks.check_kept(mask, mates)
    # With negatives, the positive is the only row of the other tower in A(i).
    members = [[j for j in range(m) if negatives is None or is_positive[i][j]] for i in range(n)]
    kept = [{*columns} for columns in _without_ignored(members, is_positive, mask, ids)]

    is_member = [[j in columns for j in range(m)] for columns in kept]
    back, member_back = ([list(column) for column in zip(*pairs, strict=True)] for pairs in (is_positive, is_member))
    there, and_back = (a, b, is_positive, is_member), (b, a, back, member_back)
    sides = {"both": [there, and_back], "a_to_b": [there], "b_to_a": [and_back]}[direction]
    width = max(len(other) for _, other, _, _ in sides) + len(queue)
    matrix, of_rows, contrasted = [], [], []
    for one, other, positive, member in sides:
        similarities = similarity_matrix(one, similarity, other + queue)
        empty = zero_like(similarities[0][0])
        matrix += [[*row, *[empty] * (width - len(row))] for row in similarities]
        of_rows += [[*row, *[False] * (width - len(row))] for row in positive]
        further = range(len(other), len(other) + len(queue))
        contrasted += [[*(j for j, contrasts in enumerate(row) if contrasts), *further] for row in member]
    of_anchors = checks.check_weights("anchor_weights", anchor_weights, [n], per="embedding")
    if of_anchors is not None:
        checks.check_equal_towers("anchor_weights", direction, n, m)
        options["anchor_weights"] = of_anchors * len(sides)
    if weights is not None:
        options["groups"] = [(range(n), weights[0]), (range(n, n + m), weights[1])]
    return evaluate_similarities(formula, matrix, of_rows, members=contrasted, **options)


def evaluate_similarities(
    formula: Formula,
    similarity: Sequence[Sequence[Scalar]],
    is_positive: Sequence[Sequence[bool]],
    *,
    anchors: Sequence[int] | None = None,
    members: Sequence[Columns] | None = None,
    temperature: float = 0.07,
    bias: float | None = None,
    base_temperature: float | None = None,
    no_positive: str | None = None,
    reduction: str = "mean",
    lowest: Scalar | None = None,
    groups: Sequence[tuple[Columns, float]] | None = None,
    weights: Weights | Sequence[Row] | None = None,
    detach_weights: bool = True,
    positive_weights: Sequence[Sequence[float]] | None = None,
    negative_weights: Sequence[Sequence[float]] | None = None,
    anchor_weights: Sequence[float] | None = None,
    **options: Any,
) -> Result:
    """Evaluate a formula for every anchor and reduce the results.

    Args:
        formula: computes one anchor's loss and pairs.
        similarity: [R][C] scalars, the similarity of every row with every column.
        is_positive: [R][C]; entries outside A(i) have no effect.
        anchors: the rows that are anchors; all rows by default.
        members: A(i) of every row, as columns in ascending order; by default every column except i.
        temperature: number from 1e-10 to 1e10; logits are similarities divided by it.
        bias: number that is added to the logits, if given.
        base_temperature: if given, every value is multiplied by temperature / base_temperature.
        no_positive: the value of an anchor without positives: "zero", "nan" or "drop" (the anchor is left out). By
            default, the formula computes the value.
        reduction: "mean", "sum" or "none" (a list) over the anchors. Over pairs: "mean_pairs", "sum_pairs" or
            "none_pairs" (a list, ordered by anchor, then by column). The mean of an empty set is 0.
        lowest: the lowest possible similarity. The formula receives its logit as the option ``lowest``.
        groups: a list of (rows, factor). The values of these rows are multiplied by the factor, and "mean" is the sum
            of the groups' means.
        weights: a list of weights for each row, or a function that computes these lists. The formula of anchor i
            receives list i.
        detach_weights: whether computed weights are constants without a derivative.
        positive_weights: [R][C]; the formula of anchor i receives row i.
        negative_weights: [R][C]; the formula of anchor i receives row i.
        anchor_weights: [R], the factor of each anchor's value. Means divide by the sum of the weights.
        options: further options of the formula.

    Returns:
        The loss and its terms.

    Raises:
        ValueError: the logit of a pair in A(i) is not finite.
    """

    def scaled(value: Scalar) -> Scalar:
        # Not value * (temperature / base_temperature): this quotient would be rounded to float64.
        return value if base_temperature is None else value * float(temperature) / float(base_temperature)

    rows = range(len(similarity))
    logits = [[s / float(temperature) for s in row] for row in similarity]
    if bias is not None:
        logits = [[s + float(bias) for s in row] for row in logits]
    A = members or [[a for a in range(len(row)) if a != i] for i, row in enumerate(similarity)]
    if any(isinstance(logits[i][a], float) and not math.isfinite(logits[i][a]) for i in rows for a in A[i]):
        raise ValueError(OVERFLOW)
    P = [[a for a in A[i] if is_positive[i][a]] for i in rows]
    N = [[a for a in A[i] if not is_positive[i][a]] for i in rows]

    zero = zero_like(similarity[0][0])
    if lowest is not None:
        options["lowest"] = (zero + lowest) / float(temperature)
    if callable(weights):
        weights = weights(similarity, P, N)
        if detach_weights:
            weights = [[detached(w) for w in row] for row in weights]
    without_positives: Anchor = (NAN if no_positive == "nan" else 0.0), []

    def evaluated(i: int) -> Anchor:
        given = {"weights": weights, "positive_weights": positive_weights, "negative_weights": negative_weights}
        of_row = {name: array[i] for name, array in given.items() if array is not None}
        return formula(logits[i], i, A[i], P[i], N[i], **options, **of_row)

    def weighted(i: int, value: Scalar) -> Scalar:
        return value if anchor_weights is None else value * anchor_weights[i]

    values = {
        i: evaluated(i) if P[i] or no_positive is None else without_positives
        for i in (rows if anchors is None else anchors)
    }
    factors = {i: factor for part, factor in groups or () for i in part}
    losses = {i: weighted(i, scaled(zero + value)) for i, (value, _) in values.items()}
    losses |= {i: value * factors[i] for i, value in losses.items() if i in factors}
    pairs = {(i, pair.other): pair for i, (_, found) in values.items() for pair in found}
    counted = [i for i in losses if P[i] or no_positive != "drop"]
    if reduction == "mean_pairs":
        by_weight = options.get("weights_divisor") == "weight"
        shares = [weighted(i, pair.weight if by_weight else 1.0) for (i, _), pair in pairs.items()]
    else:
        shares = [weighted(i, 1.0) for i in counted]
    terms = Terms(
        similarity=[list(row) for row in similarity],
        logits=logits,
        positives=P,
        negatives=N,
        pairs=pairs,
        anchor_losses=losses,
        counted=counted,
        scale=scaled(1.0),
        divisor=total(shares) if order(total(shares)) > 0 else 1.0,
    )
    if reduction == "none":
        return Result([losses[i] for i in counted], terms)
    if reduction in PAIR_REDUCTIONS:
        each = [weighted(i, scaled(pairs[i, j].value * pairs[i, j].weight)) for i, j in sorted(pairs)]
        if reduction == "none_pairs":
            return Result(each, terms)
        # An anchor without pairs adds its value, 0 or NaN.
        loss = total([losses[i] for i in losses if not values[i][1]] + each, zero)
        return Result(loss / terms.divisor if reduction == "mean_pairs" else loss, terms)
    if groups is not None and reduction == "mean":
        parts = [[i for i in counted if i in part] for part, _ in groups]
        sums = [(total((losses[i] for i in part), zero), total(weighted(i, 1.0) for i in part)) for part in parts]
        return Result(total((part / (weight or 1.0) for part, weight in sums), zero), terms)
    loss = total((losses[i] for i in counted), zero)
    return Result(loss / terms.divisor if reduction == "mean" else loss, terms)
