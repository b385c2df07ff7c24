"""An independent evaluation of every loss with whole arrays and scipy. It computes values, but no terms.

This file shares no code with the loops in this package, and does not check arguments. It guards against wrong formulas
in the loops, which interval arithmetic would not notice. It follows the SupCon notebook, which has

    mat = 1 - cdist(z, z, "cosine");  np.fill_diagonal(mat, -np.inf);  softmax_mat = softmax(mat, axis=1)
    SupCon   -(log(softmax_mat[0, 3]) + log(softmax_mat[0, 6])) / 2, and so on for every row      (its In [24] to [26])
    NT-Xent  -(log(e^mat[0, 3] / (e^mat[0, 3] + Σ over the negatives n of e^mat[0, n])) + ...) / 2       (its In [27])

This file also divides ``mat`` by the temperature, uses masks instead of indices, and rewrites the logarithms:

    log(softmax(mat))            mat - max - logsumexp(mat - max)
    log(e^s / (e^s + e^r))       log_expit(s - r),  r = logsumexp over the negatives
    log(e^s / e^r)               s - r
    log(sigmoid(s))              log_expit(s)
    log(1 - sigmoid(s))          log_expit(-s)

The right-hand sides subtract logits before they exponentiate, so nothing overflows. The error of a loss near 0 is about
1e-16, however large the logits are.

With references, cdist(z, references) replaces cdist(z, z), and the entries at self_rows are -inf instead of the
diagonal. Two towers use cdist(a, b), and no entry is -inf.

Sources (JSON files are in fixtures/worked):

    the SupCon notebook       In [12] to [27], supcon_notebook.json; arXiv 2004.11362, equations 2 and 3; SimCLR, arXiv
                              2002.05709, equation 1
    the multi-label notebook  In [98] and [103], pair_notebook.json
    the batch tutorial        31 January 2023, batch_tutorial.json
    references, two towers    MoCo, arXiv 1911.05722, equation 1; CLIP, arXiv 2103.00020, figure 3; SigLIP, arXiv
                              2303.15343, Algorithm 1
    hard negatives            arXiv 2010.04592 and arXiv 2007.00224
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.spatial.distance import cdist
from scipy.special import log_expit, log_softmax, logsumexp

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


class Values(NamedTuple):
    """The loss, which is an array for the reductions "none" and "none_pairs", and the value of every anchor."""

    loss: float | Array
    anchors: Array


def _mat(
    embeddings: npt.ArrayLike, similarity: str, temperature: float, references: npt.ArrayLike | None = None
) -> Array:
    """Return similarities divided by the temperature, [N, N], or [N, M] with references."""
    z = np.asarray(embeddings, dtype=np.float64)
    r = z if references is None else np.asarray(references, dtype=np.float64)
    if similarity == "dot":
        return np.asarray(z @ r.T / temperature)
    # Squares in cdist could overflow. Scaling by a power of two does not change a cosine.
    z, r = (np.ldexp(x, -np.frexp(np.abs(x).max(axis=1, keepdims=True))[1]) for x in (z, r))
    with np.errstate(invalid="ignore"):
        cosines = 1 - cdist(z, r, "cosine")
    # cdist returns NaN for a row of zeros. Its cosines are 0 by convention.
    return np.where(z.any(axis=1)[:, None] & r.any(axis=1), cosines, 0.0) / temperature


def _others(mat: Array, referring: bool, self_rows: npt.ArrayLike | None = None) -> Mask:
    """Return A as a mask: all columns but the diagonal, or all references but ``self_rows``."""
    n, m = mat.shape
    own = np.full(n, -1) if self_rows is None else np.asarray(self_rows)
    return np.asarray(np.arange(m) != (own if referring else np.arange(n))[:, None])


def _masks(
    others: Mask,
    labels: npt.ArrayLike | None,
    positives: npt.ArrayLike | None,
    ref_labels: npt.ArrayLike | None = None,
    *left_out: npt.ArrayLike | None,
) -> tuple[Mask, Mask]:
    """Return P and N as masks [N, N] or [N, M], without ignored pairs.

    ``left_out`` are the arguments of _ignored.
    """
    if labels is not None:
        mask = np.equal.outer(labels, labels if ref_labels is None else ref_labels)
    else:
        mask = np.array(positives, dtype=bool)
    others = others & ~_ignored(mask, *left_out)
    return mask & others, ~mask & others


def _ignored(
    is_positive: Mask,
    ignored: npt.ArrayLike | None = None,
    ignored_ids: npt.ArrayLike | None = None,
    ref_ignored_ids: npt.ArrayLike | None = None,
) -> Mask:
    """Return a mask of the ignored pairs: those in ``ignored``, and negatives with equal ids."""
    mask = np.zeros_like(is_positive) if ignored is None else np.array(ignored, dtype=bool)
    if ignored_ids is None:
        return mask
    equal = np.equal.outer(ignored_ids, ignored_ids if ref_ignored_ids is None else ref_ignored_ids)
    return np.asarray(mask | (equal & ~is_positive))


def _mean(values: Array, mask: Mask) -> Array:
    """Return the mean of every row over a mask, or 0 if the mask is empty."""
    return np.asarray(values.sum(axis=1, where=mask) / np.maximum(mask.sum(axis=1), 1))


def _log_softmax(mat: Array, others: Mask) -> Array:
    """Return the log-softmax of every row over ``others``."""
    # A row without others keeps all its columns, because -inf - -inf is NaN. Its result is not used.
    mat = np.where(others | ~others.any(axis=1, keepdims=True), mat, -np.inf)
    mat = mat - mat.max(axis=1, keepdims=True)
    return np.asarray(mat - logsumexp(mat, axis=1, keepdims=True))


def _log_ratios(mat: Array, others: Mask, negatives: Mask, denominator: str) -> Array:
    """Return log(e^s_ij / denominator), [N, N] or [N, M], which is infinite for "only_negatives" without negatives."""
    if denominator == "all":
        return _log_softmax(mat, others)
    rest = logsumexp(np.where(negatives, mat, -np.inf), axis=1, keepdims=True)
    return np.asarray(log_expit(mat - rest) if denominator == "one_positive" else mat - rest)


def _values(
    each: Array,
    anchors: npt.ArrayLike | None,
    temperature: float,
    base_temperature: float | None,
    reduction: str,
    no_positive: str = "zero",
    unpaired: Any = False,
    pairs: tuple[Array, Mask, Array] | None = None,
    weights: npt.ArrayLike | None = None,
) -> Values:
    """Apply no_positive and base_temperature, select the anchors and reduce.

    each      the value of every row
    unpaired  the rows without positives
    pairs     for reductions over pairs: the weighted value of every pair, a mask of the pairs that exist, and the
              share of every row in the divisor of "mean_pairs"
    weights   the factor of every row
    """
    each = np.where(unpaired, np.nan if no_positive == "nan" else 0.0, each)
    if base_temperature is not None:
        each = each * temperature / base_temperature
    chosen = np.ones(len(each), dtype=bool) if anchors is None else np.asarray(anchors, dtype=bool)
    factors = np.ones(len(each)) if weights is None else np.asarray(weights, dtype=np.float64)
    each = each * factors
    rows = chosen & ~unpaired if no_positive == "drop" else chosen
    counted = each[rows]
    if reduction == "none":
        return Values(counted, each[chosen])
    if pairs is not None and reduction.endswith("_pairs"):
        kept = pairs[1] & chosen[:, None]
        of_pairs = (pairs[0] * factors[:, None])[kept] * (temperature / (base_temperature or temperature))
        if reduction == "none_pairs":
            return Values(of_pairs, each[chosen])
        # An anchor without positives adds 0 or NaN.
        total = of_pairs.sum() + np.sum(each, where=chosen & unpaired)
        number = np.sum(factors * pairs[2], where=chosen) if reduction == "mean_pairs" else 1
    else:
        total, number = counted.sum(), factors[rows].sum() if reduction == "mean" else 1
    return Values(float(total / (number or 1)), each[chosen])


def _weighted(
    mat: Array,
    is_positive: Mask,
    is_negative: Mask,
    positive_weights: npt.ArrayLike | None,
    negative_weights: npt.ArrayLike | None,
) -> tuple[Array, Mask, Mask, Array]:
    """Return mat, P, N and the positive weights.

    log(weight) is added to the logits of negatives. P and N lose the pairs that their weights leave out.
    """
    weights = np.ones_like(mat) if positive_weights is None else np.asarray(positive_weights, dtype=np.float64)
    if negative_weights is not None:
        repeats = np.asarray(negative_weights, dtype=np.float64)
        is_negative = is_negative & (repeats > 0)
        mat = mat + np.log(repeats, where=is_negative, out=np.zeros_like(mat))
    return (
        mat,
        is_positive & (weights.max(axis=1, keepdims=True, where=is_positive, initial=0.0) > 0),
        is_negative,
        weights,
    )


def _weighted_mean(values: Array, mask: Mask, weights: Array, weights_divisor: str) -> tuple[Array, Array]:
    """Return the weighted mean of every row over the mask, and its divisor: the number or the weight of its terms."""
    number = mask.sum(axis=1) if weights_divisor == "count" else weights.sum(axis=1, where=mask)
    parts = np.multiply(values, weights, where=mask & (weights > 0), out=np.zeros_like(values))
    return parts.sum(axis=1) / np.where(number == 0, 1.0, number), number


def supcon_loss(
    embeddings: npt.ArrayLike,
    labels: npt.ArrayLike | None = None,
    *,
    positives: npt.ArrayLike | None = None,
    anchors: npt.ArrayLike | None = None,
    ref_embeddings: npt.ArrayLike | None = None,
    ref_labels: npt.ArrayLike | None = None,
    self_rows: npt.ArrayLike | None = None,
    ignored: npt.ArrayLike | None = None,
    ignored_ids: npt.ArrayLike | None = None,
    ref_ignored_ids: npt.ArrayLike | None = None,
    positive_weights: npt.ArrayLike | None = None,
    negative_weights: npt.ArrayLike | None = None,
    anchor_weights: npt.ArrayLike | None = None,
    temperature: float = 0.07,
    base_temperature: float | None = None,
    similarity: str = "cosine",
    zero_row: str = "error",
    denominator: str = "all",
    weights_divisor: str = "count",
    no_positive: str = "zero",
    no_negative: str = "zero",
    reduction: str = "mean",
) -> Values:
    """-(log(softmax_mat[i, p]) + log(softmax_mat[i, q]) + ...) / |P(i)|. Source: the SupCon notebook, In [26]."""
    mat = _mat(embeddings, similarity, temperature, ref_embeddings)
    others = _others(mat, ref_embeddings is not None, self_rows)
    left_out = ignored, ignored_ids, ref_ignored_ids
    is_positive, is_negative = _masks(others, labels, positives, ref_labels, *left_out)
    given = positive_weights, negative_weights
    mat, is_positive, is_negative, weights = _weighted(mat, is_positive, is_negative, *given)
    log_ratios = _log_ratios(mat, is_positive | is_negative, is_negative, denominator)
    each, _ = _weighted_mean(-log_ratios, is_positive, weights, weights_divisor)
    if denominator == "only_negatives":
        each = np.where(is_negative.any(axis=1), each, np.nan if no_negative == "nan" else 0.0)
    unpaired = ~is_positive.any(axis=1)
    return _values(
        each, anchors, temperature, base_temperature, reduction, no_positive, unpaired, weights=anchor_weights
    )


def supcon_in_loss(
    embeddings: npt.ArrayLike,
    labels: npt.ArrayLike | None = None,
    *,
    positives: npt.ArrayLike | None = None,
    anchors: npt.ArrayLike | None = None,
    ref_embeddings: npt.ArrayLike | None = None,
    ref_labels: npt.ArrayLike | None = None,
    self_rows: npt.ArrayLike | None = None,
    ignored: npt.ArrayLike | None = None,
    ignored_ids: npt.ArrayLike | None = None,
    ref_ignored_ids: npt.ArrayLike | None = None,
    temperature: float = 0.07,
    base_temperature: float | None = None,
    similarity: str = "cosine",
    denominator: str = "all",
    inside_reduction: str = "mean",
    no_positive: str = "zero",
    no_negative: str = "zero",
    reduction: str = "mean",
) -> Values:
    """-log((softmax_mat[i, p] + softmax_mat[i, q] + ...) / |P(i)|), without |P(i)| if ``inside_reduction`` is "sum".

    Source: arXiv 2004.11362, equation 3.
    """
    mat = _mat(embeddings, similarity, temperature, ref_embeddings)
    others = _others(mat, ref_embeddings is not None, self_rows)
    left_out = ignored, ignored_ids, ref_ignored_ids
    is_positive, is_negative = _masks(others, labels, positives, ref_labels, *left_out)
    unpaired = ~is_positive.any(axis=1)
    log_ratios = _log_ratios(mat, is_positive | is_negative, is_negative, denominator)
    # All ratios of a row may underflow, so they are divided by the largest.
    top = log_ratios.max(axis=1, keepdims=True, initial=-np.inf, where=is_positive)
    usable = is_positive & np.isfinite(top)
    ratios = np.exp(np.subtract(log_ratios, top, where=usable, out=np.full_like(log_ratios, -np.inf)))
    inside = ratios.sum(axis=1, where=is_positive) if inside_reduction == "sum" else _mean(ratios, is_positive)
    each = -np.log(inside, where=inside > 0, out=np.zeros_like(inside)) - top[:, 0]
    if denominator == "only_negatives":
        each = np.where(is_negative.any(axis=1), each, np.nan if no_negative == "nan" else 0.0)
    return _values(each, anchors, temperature, base_temperature, reduction, no_positive, unpaired)


def supcon_epsilon_loss(
    embeddings: npt.ArrayLike,
    labels: npt.ArrayLike | None = None,
    *,
    positives: npt.ArrayLike | None = None,
    anchors: npt.ArrayLike | None = None,
    ignored: npt.ArrayLike | None = None,
    ignored_ids: npt.ArrayLike | None = None,
    temperature: float = 0.07,
    base_temperature: float | None = None,
    similarity: str = "dot",
    no_positive: str = "zero",
    reduction: str = "mean",
) -> Values:
    """Sum over p of -log(e[i, p] / sum over a != i of e[i, a]) / (|P(i)| + 1e-8). Source: the batch tutorial."""
    mat = _mat(embeddings, similarity, temperature)
    is_positive, is_negative = _masks(_others(mat, False), labels, positives, None, ignored, ignored_ids)
    compared = is_positive | is_negative | np.eye(len(mat), dtype=bool)
    top = mat.max(axis=1, keepdims=True, initial=-np.inf, where=compared)
    e = np.exp(np.where(compared, mat - top, 0)) + 1e-8
    total = e.sum(axis=1, keepdims=True, where=is_positive | is_negative)
    cost = -np.log(e / np.where(total == 0, 1, total))
    number = is_positive.sum(axis=1)
    each = cost.sum(axis=1, where=is_positive) / (number + 1e-8)
    return _values(each, anchors, temperature, base_temperature, reduction, no_positive, number == 0)


def nt_xent_loss(
    embeddings: npt.ArrayLike,
    partners: npt.ArrayLike,
    *,
    anchors: npt.ArrayLike | None = None,
    ref_embeddings: npt.ArrayLike | None = None,
    self_rows: npt.ArrayLike | None = None,
    ignored: npt.ArrayLike | None = None,
    ignored_ids: npt.ArrayLike | None = None,
    ref_ignored_ids: npt.ArrayLike | None = None,
    anchor_weights: npt.ArrayLike | None = None,
    temperature: float = 0.07,
    base_temperature: float | None = None,
    similarity: str = "cosine",
    zero_row: str = "error",
    reduction: str = "mean",
) -> Values:
    """-log(softmax_mat[i, partners[i]]). Sources: the SupCon notebook, In [14]; the multi-label one, In [98]."""
    mat = _mat(embeddings, similarity, temperature, ref_embeddings)
    others = _others(mat, ref_embeddings is not None, self_rows)
    rows, columns = np.arange(len(mat)), np.asarray(partners, dtype=np.int64)
    is_positive = np.arange(mat.shape[1]) == columns[:, None]
    others = others & ~_ignored(is_positive, ignored, ignored_ids, ref_ignored_ids)
    each = -_log_softmax(mat, others)[rows, columns]
    return _values(each, anchors, temperature, base_temperature, reduction, weights=anchor_weights)


def nt_xent_pairwise_loss(
    embeddings: npt.ArrayLike,
    labels: npt.ArrayLike | None = None,
    *,
    positives: npt.ArrayLike | None = None,
    anchors: npt.ArrayLike | None = None,
    ref_embeddings: npt.ArrayLike | None = None,
    ref_labels: npt.ArrayLike | None = None,
    self_rows: npt.ArrayLike | None = None,
    ignored: npt.ArrayLike | None = None,
    ignored_ids: npt.ArrayLike | None = None,
    ref_ignored_ids: npt.ArrayLike | None = None,
    positive_weights: npt.ArrayLike | None = None,
    negative_weights: npt.ArrayLike | None = None,
    anchor_weights: npt.ArrayLike | None = None,
    temperature: float = 0.07,
    base_temperature: float | None = None,
    similarity: str = "cosine",
    weights_divisor: str = "count",
    no_positive: str = "zero",
    reduction: str = "mean",
) -> Values:
    """-log(e^s_ip / (e^s_ip + sum over n in N(i) of e^s_in)), averaged. Source: the SupCon notebook, In [27]."""
    mat = _mat(embeddings, similarity, temperature, ref_embeddings)
    others = _others(mat, ref_embeddings is not None, self_rows)
    left_out = ignored, ignored_ids, ref_ignored_ids
    is_positive, is_negative = _masks(others, labels, positives, ref_labels, *left_out)
    given = positive_weights, negative_weights
    mat, is_positive, is_negative, weights = _weighted(mat, is_positive, is_negative, *given)
    log_ratios = _log_ratios(mat, is_positive | is_negative, is_negative, "one_positive")
    each, number = _weighted_mean(-log_ratios, is_positive, weights, weights_divisor)
    unpaired, options = ~is_positive.any(axis=1), (anchors, temperature, base_temperature, reduction, no_positive)
    return _values(each, *options, unpaired, (-log_ratios * weights, is_positive, number), anchor_weights)


def _target(
    mat: Array,
    partners: npt.ArrayLike | None,
    labels: npt.ArrayLike | None,
    ref_labels: npt.ArrayLike | None,
    positives: npt.ArrayLike | None,
) -> Mask:
    """Return the mask of positives, [N, M]; by default the diagonal."""
    if labels is not None:
        return np.equal.outer(labels, labels if ref_labels is None else ref_labels)
    if positives is not None:
        return np.array(positives, dtype=bool)
    place = np.arange(mat.shape[1])
    return np.asarray((place if partners is None else np.asarray(partners, dtype=np.int64))[:, None] == place)


def info_nce_loss(
    embeddings_a: npt.ArrayLike,
    embeddings_b: npt.ArrayLike,
    *,
    partners: npt.ArrayLike | None = None,
    labels: npt.ArrayLike | None = None,
    ref_labels: npt.ArrayLike | None = None,
    positives: npt.ArrayLike | None = None,
    ignored: npt.ArrayLike | None = None,
    ignored_ids: npt.ArrayLike | None = None,
    ref_ignored_ids: npt.ArrayLike | None = None,
    anchor_weights: npt.ArrayLike | None = None,
    negatives: npt.ArrayLike | None = None,
    direction: str | None = None,
    direction_weights: tuple[float, float] | None = None,
    temperature: float = 0.07,
    base_temperature: float | None = None,
    similarity: str = "cosine",
    inside_reduction: str = "none",
    no_positive: str = "drop",
    reduction: str = "mean",
) -> Values:
    """-log(softmax_mat[i, p]) of mat and of its transpose, averaged.

    With negatives, the softmax of anchor i is over mat[i, i] and the negatives.

    Source: arXiv 2103.00020, figure 3; arXiv 1911.05722, equation 1.
    """
    mat = _mat(embeddings_a, similarity, temperature, embeddings_b)
    direction = direction or ("both" if negatives is None else "a_to_b")
    is_positive = _target(mat, partners, labels, ref_labels, positives)
    kept = ~_ignored(is_positive, ignored, ignored_ids, ref_ignored_ids)
    each = []
    for name, tower, logits, positive, others in (
        ("a_to_b", embeddings_a, mat, is_positive & kept, kept),
        ("b_to_a", embeddings_b, mat.T, (is_positive & kept).T, kept.T),
    ):
        if direction not in ("both", name):
            continue
        if negatives is not None:
            queue = _mat(tower, similarity, temperature, negatives)
            logits = np.column_stack([np.diag(logits), queue])
            others = np.ones_like(logits, dtype=bool)
            positive = others & (np.arange(logits.shape[1]) == 0)
        log_ratios = _log_softmax(logits, others)
        if inside_reduction == "none":
            values = _mean(-log_ratios, positive)
        else:
            inside = np.where(positive.any(axis=1, keepdims=True), np.where(positive, log_ratios, -np.inf), 0.0)
            values = -logsumexp(inside, axis=1)
            if inside_reduction == "mean":
                values = values + np.log(np.maximum(positive.sum(axis=1), 1))
        each.append((values, ~positive.any(axis=1)))
    options = temperature, base_temperature, reduction, no_positive
    if direction_weights is None:
        values, unpaired = map(np.concatenate, zip(*each, strict=True))
        of_both = None if anchor_weights is None else np.tile(anchor_weights, len(each))
        return _values(values, None, *options, unpaired, weights=of_both)
    weighted = [weight * values for weight, (values, _) in zip(direction_weights, each, strict=True)]
    parts = [
        _values(values, None, *options, unpaired, weights=anchor_weights)
        for values, (_, unpaired) in zip(weighted, each, strict=True)
    ]
    losses, anchors = ([part[k] for part in parts] for k in (0, 1))
    return Values(np.concatenate(losses) if reduction == "none" else sum(losses), np.concatenate(anchors))


def nt_bxent_loss(
    embeddings: npt.ArrayLike,
    positive_pairs: npt.ArrayLike,
    *,
    anchors: npt.ArrayLike | None = None,
    ignored: npt.ArrayLike | None = None,
    ignored_ids: npt.ArrayLike | None = None,
    temperature: float = 0.07,
    base_temperature: float | None = None,
    similarity: str = "cosine",
    no_negative: str = "zero",
    reduction: str = "mean",
) -> Values:
    """Mean of -log(sigmoid(s)) over the targets of a row, plus mean of -log(1 - sigmoid(s)) over its other columns.

    The diagonal of ``mat`` is infinite, which makes it a target of loss 0. Source: the multi-label notebook, In [103].
    """
    mat = _mat(embeddings, similarity, temperature)
    np.fill_diagonal(mat, np.inf)
    target = np.eye(len(mat), dtype=bool)
    target[tuple(np.asarray(positive_pairs, dtype=np.int64).reshape(-1, 2).T)] = True
    kept = ~_ignored(target, ignored, ignored_ids) | np.eye(len(mat), dtype=bool)
    target, other = target & kept, ~target & kept
    each = _mean(-log_expit(mat), target) + _mean(-log_expit(-mat), other)
    if no_negative == "nan":
        each = np.where(other.any(axis=1), each, np.nan)
    return _values(each, anchors, temperature, base_temperature, reduction)


def sigmoid_loss(
    embeddings_a: npt.ArrayLike,
    embeddings_b: npt.ArrayLike,
    *,
    partners: npt.ArrayLike | None = None,
    labels: npt.ArrayLike | None = None,
    ref_labels: npt.ArrayLike | None = None,
    positives: npt.ArrayLike | None = None,
    ignored: npt.ArrayLike | None = None,
    ignored_ids: npt.ArrayLike | None = None,
    ref_ignored_ids: npt.ArrayLike | None = None,
    anchor_weights: npt.ArrayLike | None = None,
    temperature: float = 0.1,
    bias: float = -10.0,
    base_temperature: float | None = None,
    similarity: str = "cosine",
    reduction: str = "mean",
) -> Values:
    """-log(sigmoid(z * (mat + bias))), summed over each row; z is 1 for positives, else -1.

    Source: arXiv 2303.15343, Algorithm 1.
    """
    mat = _mat(embeddings_a, similarity, temperature, embeddings_b)
    target = _target(mat, partners, labels, ref_labels, positives)
    cost = -log_expit(np.where(target, 1, -1) * (mat + bias))
    kept = ~_ignored(target, ignored, ignored_ids, ref_ignored_ids)
    pairs = cost, kept, kept.sum(axis=1)
    options = temperature, base_temperature, reduction
    return _values(cost.sum(axis=1, where=kept), None, *options, pairs=pairs, weights=anchor_weights)


def hard_negative_loss(
    embeddings: npt.ArrayLike,
    partners: npt.ArrayLike,
    *,
    anchors: npt.ArrayLike | None = None,
    ref_embeddings: npt.ArrayLike | None = None,
    self_rows: npt.ArrayLike | None = None,
    ignored: npt.ArrayLike | None = None,
    ignored_ids: npt.ArrayLike | None = None,
    ref_ignored_ids: npt.ArrayLike | None = None,
    temperature: float = 0.5,
    base_temperature: float | None = None,
    similarity: str = "cosine",
    tau_plus: float = 0.1,
    beta: float = 1.0,
    reduction: str = "mean",
) -> Values:
    """-log(pos / (pos + Ng)), with the names of image/main.py of joshr17/HCL, and with all terms divided by pos.

    So neg is e^(mat - positive). Its weights are softmax(beta * mat) over the negatives. The logarithm of
    (weighted mean of neg) - tau_plus is a logsumexp of two terms with the factors 1 and -1.

    Source: arXiv 2010.04592; arXiv 2007.00224, equation 8.
    """
    mat = _mat(embeddings, similarity, temperature, ref_embeddings)
    others = _others(mat, ref_embeddings is not None, self_rows)
    is_positive = np.arange(mat.shape[1]) == np.asarray(partners, dtype=np.int64)[:, None]
    positive = mat[is_positive]
    others &= ~is_positive & ~_ignored(is_positive, ignored, ignored_ids, ref_ignored_ids)
    number = others.sum(axis=1)
    some = others | (number == 0)[:, None]
    log_weights = log_softmax(np.where(some, beta * mat, -np.inf), axis=1)
    log_mean = logsumexp(np.where(some, log_weights + (mat - positive[:, None]), -np.inf), axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.stack([log_mean, np.full_like(log_mean, np.log(tau_plus))])
        log_mass = logsumexp(terms, axis=0, b=np.array([[1.0], [-1.0]])) - np.log1p(-tau_plus)
    # log_mass is NaN if the corrected sum is negative. fmax then returns the floor.
    log_mass = np.fmax(log_mass, -1 / temperature - positive)
    each = np.where(number > 0, np.logaddexp(0, log_mass + np.log(np.maximum(number, 1))), 0.0)
    return _values(each, anchors, temperature, base_temperature, reduction)


def multiple_negatives_ranking_loss(
    embeddings_a: npt.ArrayLike,
    embeddings_b: npt.ArrayLike,
    *,
    hard_negatives: npt.ArrayLike | None = None,
    hard_negatives_scope: str = "batch",
    directions: str = "query_to_doc",
    partition: str = "joint",
    doc_to_doc_hard: str | None = None,
    ignored: npt.ArrayLike | None = None,
    hardness_mode: str = "none",
    hardness_strength: float = 0.0,
    temperature: float = 0.05,
    base_temperature: float | None = None,
    similarity: str = "cosine",
    reduction: str = "mean",
) -> Values:
    """log_z - positive_scores, where log_z is the logsumexp over all directions ("joint") or over each of them.

    As in multiple_negatives_ranking.py, pairs that do not count are -inf.

    Source: arXiv 2308.03281, section 3.3; sentence-transformers.
    """
    a, b = np.asarray(embeddings_a, dtype=np.float64), np.asarray(embeddings_b, dtype=np.float64)
    n, dim = a.shape
    h = np.empty((0, dim)) if hard_negatives is None else np.asarray(hard_negatives, dtype=np.float64).reshape(-1, dim)
    same, own = np.eye(n, dtype=bool), np.repeat(np.eye(n, dtype=bool), len(h) // n, axis=1)

    def scores(rows: Array, columns: Array, left_out: Mask) -> Array:
        if not len(columns):
            return np.empty((n, 0))
        return np.where(left_out, -np.inf, _mat(rows, similarity, temperature, columns))

    query_to_doc = [
        scores(a, b, ~same & (hard_negatives_scope == "own_only")),
        scores(a, h, ~own & (hard_negatives_scope != "batch")),
    ]
    mats = {
        "query_to_doc": np.hstack(query_to_doc),
        "query_to_query": scores(a, a, same),
        "doc_to_query": scores(b, a, same & False),
        "doc_to_doc": scores(b, b, same),
    }
    of_documents = doc_to_doc_hard or ("others" if hard_negatives_scope == "batch" else "none")
    if of_documents != "none":
        mats["doc_to_doc"] = np.hstack([mats["doc_to_doc"], scores(b, h, own & (of_documents == "others"))])
    positive = np.diag(mats["query_to_doc"])
    if hardness_mode != "none":
        # The hardness penalty of multiple_negatives_ranking.py.
        in_batch, own_hard = np.hstack([~same, ~own]), np.hstack([same & False, own])
        harder = {"in_batch_negatives": in_batch, "hard_negatives": own_hard, "all_negatives": in_batch | own_hard}
        counted = harder[hardness_mode] & np.isfinite(mats["query_to_doc"])
        mats["query_to_doc"][counted] *= 1 + hardness_strength * temperature
    chosen = [mats[name] for name in directions.split("+")]
    if ignored is not None:
        ends = np.cumsum([mat.shape[1] for mat in chosen])[:-1]
        masks = np.split(np.asarray(ignored, dtype=bool), ends, axis=1)
        chosen = [np.where(mask, -np.inf, mat) for mask, mat in zip(masks, chosen, strict=True)]
    together = [np.hstack(chosen)] if partition == "joint" else chosen
    # Logits relative to the positive keep the digits of a small loss.
    each = []
    for mat in together:
        relative = mat - positive[:, None]
        relative[np.arange(n), np.arange(n)] = -np.inf  # the first block's diagonal is the positive
        with np.errstate(divide="ignore"):
            each.append(np.logaddexp(0, logsumexp(np.column_stack([relative, np.full(n, -np.inf)]), axis=1)))
    return _values(np.concatenate(each), None, temperature, base_temperature, reduction)


def dclw_loss(
    embeddings: npt.ArrayLike,
    partners: npt.ArrayLike,
    *,
    anchors: npt.ArrayLike | None = None,
    ref_embeddings: npt.ArrayLike | None = None,
    self_rows: npt.ArrayLike | None = None,
    ignored: npt.ArrayLike | None = None,
    ignored_ids: npt.ArrayLike | None = None,
    ref_ignored_ids: npt.ArrayLike | None = None,
    temperature: float = 0.1,
    base_temperature: float | None = None,
    similarity: str = "cosine",
    sigma: float = 0.5,
    detach_weights: bool = True,
    reduction: str = "mean",
) -> Values:
    """-(2 - N softmax(cos / sigma)) mat[i, partners[i]] + log(sum over the other columns of e^mat).

    Source: arXiv 2110.06848, L_DCW.
    """
    mat = _mat(embeddings, similarity, temperature, ref_embeddings)
    others = _others(mat, ref_embeddings is not None, self_rows)
    rows, columns = np.arange(len(mat)), np.asarray(partners, dtype=np.int64)
    cosines = _mat(embeddings, similarity, 1.0, ref_embeddings)[rows, columns]
    weights = 2 - np.exp(np.log(len(mat)) + log_softmax(cosines / sigma))
    others[rows, columns] = False
    if ignored is not None:
        others &= ~np.array(ignored, dtype=bool)
    if ignored_ids is not None:
        others &= np.not_equal.outer(ignored_ids, ignored_ids if ref_ignored_ids is None else ref_ignored_ids)
    number = others.sum(axis=1)
    negatives = np.where(others | (number == 0)[:, None], mat, -np.inf)
    each = np.where(number > 0, logsumexp(negatives, axis=1) - weights * mat[rows, columns], 0.0)
    return _values(each, anchors, temperature, base_temperature, reduction)
