"""Prove values and gradients with matrices of balls, at the size of training batches.

The similarities and the gradients are products of matrices. ``FORMULAS`` has a closed form of the value and the
derivatives of each anchor. The loops of the reference (``loops.py``) compute the same term by term, with automatic
differentiation, and tests compare both.

A kink has no gradient, so its derivatives are those of one of the two branches. See ``kinks.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from flint import arb, arb_mat

from ..suite.cases import Case
from ..suite.garbage import without_collections
from .intervals import precision
from .kinks import kink_of

BITS = 128
"""Working precision in bits: about 28 digits of the results remain."""

Rows = list[list[arb]]


@dataclass(frozen=True)
class Enclosures:
    """Balls that enclose the true results of a case.

    Derivatives are those of the sum of ``values``, and are only valid if gradients were requested.

    Attributes:
        values: the loss; or one value per counted anchor (reduction "none") or per pair ("none_pairs").
        anchors: the value of every anchor, by row.
        gradients: the gradient with respect to every float matrix, by name.
        similarity: the similarity matrix, of the case's ``shape``.
        temperature_gradient: the derivative with respect to the temperature.
        bias_gradient: the derivative with respect to the bias.
        slopes: the derivatives with respect to each anchor's row of similarities, by row.
    """

    values: list[arb]
    anchors: dict[int, arb]
    gradients: dict[str, Rows]
    similarity: Rows
    temperature_gradient: arb
    bias_gradient: arb
    slopes: Mapping[int, Sequence[arb]]


@dataclass(frozen=True)
class Anchor:
    """What the formula of an anchor takes.

    Attributes:
        case: the case.
        row: the row of the anchor.
        similarity: its row of similarities.
        exponentials: the exponential of each logit, by column.
        members, positives, negatives: A(i), P(i) and N(i).
        weights: the weight of every positive.
        number: the divisor of a sum over the positives: their number, or the sum of their weights.
        weight: the weight of the positive's logit, in the form "weighted".
        inverse: 1 / temperature.
        bias: the bias of the logits.
    """

    case: Case
    row: int
    similarity: Sequence[arb]
    exponentials: Sequence[arb]
    members: Sequence[int]
    positives: Sequence[int]
    negatives: Sequence[int]
    weights: Sequence[arb]
    number: arb
    weight: arb
    inverse: arb
    bias: float

    def logit(self, k: int) -> arb:
        """The logit of column k, without the weights of a loss."""
        return self.similarity[k] * self.inverse + self.bias

    def chosen(self, columns: Iterable[int]) -> dict[int, arb]:
        """The exponentials of some columns."""
        return {k: self.exponentials[k] for k in columns}

    @property
    def pairwise(self) -> bool:
        """Whether the value of every pair is needed."""
        return bool(self.case.option("reduction") == "none_pairs")


@dataclass
class Part:
    """The value of an anchor and its derivatives.

    Attributes:
        value: the value.
        slopes: the derivatives with respect to the logits, by column; 0 for other columns.
        pairs: the value of every pair, if ``Anchor.pairwise``: of the positives, or of A(i) in the sigmoid loss.
        lowest: the derivative with respect to the logit of the lowest possible similarity.
    """

    value: arb
    slopes: dict[int, arb]
    pairs: Sequence[arb] = ()
    lowest: arb | int = 0


Formula = Callable[[Anchor], Part]


def has_formula(case: Case) -> bool:
    """Whether ``FORMULAS`` has the formula of the loss of a case."""
    entry = case.entry
    if entry.weights and entry.name not in ("dclw", "multiple_negatives_ranking"):
        return False  # other weights than those below
    return _formula(case) is not None and (bool(entry.epsilon) or entry.variant.keys() <= {"form", "denominator"})


def _formula(case: Case) -> Formula | None:
    denominator = case.formula_options().get("denominator", case.entry.variant.get("denominator", "all"))
    return FORMULAS.get(("epsilon" if case.entry.epsilon else case.form, denominator))


def enclosures(
    case: Case, bits: int = BITS, *, gradient: bool = True, upstream: Sequence[float] | None = None
) -> Enclosures:
    """Evaluate a case whose formula is in ``FORMULAS``.

    The arguments and the result are those of ``loops.enclosures``.
    """
    formula = _formula(case)
    assert formula is not None
    with precision(bits), without_collections():
        unit, norms = normalised(case)
        parts = _by_pairs(case, partial(_products, case, norms))
        matrix = _filled(case, parts)
        exponentials = _filled(case, _by_pairs(case, partial(_exponentials, case, parts)))
        temperature, base, reduction = arb(case.temperature), case.option("base_temperature"), case.option("reduction")
        scale = arb(1) if base is None else temperature / arb(base)
        weights = None if case.option("hardness_mode") == "none" else weights_of(case, matrix)
        counted, undefined, divisors = case.counted(), case.undefined(), row_divisors(case)
        factors = {} if upstream is None else dict(zip(counted, upstream, strict=True))
        own, of_directions = case.row_weights(), case.direction_weights()
        anchors, slopes = dict[int, arb](), dict[int, list[arb]]()
        of_weights, of_pairs, moved, total = dict[int, arb](), list[arb](), arb(0), arb(0)
        for i in case.anchors():
            if i in undefined:
                anchors[i] = arb.nan()
                total += anchors[i] if i in counted else 0
                continue
            if case.option("no_positive") and not case.positives()[i]:
                anchors[i] = arb(0)
                continue
            given = _anchor(case, i, matrix[i], exponentials[i], weights[i] if weights else None)
            part = formula(given)
            weight = scale * arb(own[i]) * arb(of_directions[i])
            anchors[i] = part.value * weight
            each: Sequence[arb] = [arb(1)] * len(part.pairs) if case.form == "sigmoid" else given.weights
            of_pairs += [x * w * weight for x, w in zip(part.pairs, each, strict=True)] if given.pairwise else []
            # A reduction over pairs adds the values of the pairs, whose mean is the value of the anchor.
            share = (given.number if case.over_pairs and case.form != "sigmoid" else arb(1)) / divisors[i]
            share = share * arb(factors.get(i, 1))
            total += anchors[i] * share
            if gradient:
                per_logit = share * weight / temperature
                row = slopes[i] = [arb(0)] * case.shape[1]
                for k, slope in part.slopes.items():
                    row[k] = slope * per_logit
                moved += 0 if base is None else anchors[i] * share
                moved -= part.lowest * per_logit * (case.entry.lowest or 0)
                if case.form == "weighted" and part.slopes:
                    of_weights[i] = -given.logit(given.positives[0]) * share * weight
        of_bias = (
            sum((sum(row, arb(0)) for row in slopes.values()), arb(0)) * temperature
            if "bias" in case.entry.keywords
            else arb(0)
        )
        if gradient and of_weights and not case.detaches_weights:
            moved += _add_through_weights(case, weights or [], of_weights, matrix, slopes)
        gradients, twice = pull_back(case, unit, norms, slopes) if gradient else ({}, arb(0))
        separate = {"none": [anchors[i] for i in counted], "none_pairs": of_pairs}
        return Enclosures(
            values=separate.get(reduction, [total]),
            anchors=anchors,
            gradients=gradients,
            similarity=matrix,
            temperature_gradient=(moved - twice / 2) / temperature,
            bias_gradient=of_bias,
            slopes=slopes,
        )


def normalised(case: Case) -> tuple[dict[str, arb_mat], dict[str, list[arb]]]:
    """The rows whose products are the similarities, and their norms; under "dot" and for rows of zeros, the norm is 1.

    Under cosine, these rows are divided by their norms.
    """
    cosine, unit, norms = case.option("similarity") == "cosine", dict[str, arb_mat](), dict[str, list[arb]]()
    for name, rows in case.matrices.items():
        given = [[arb(x) for x in row] for row in rows.tolist()]
        norms[name] = [dot(row, row).sqrt() if cosine and any(x != 0 for x in row) else arb(1) for row in given]
        inverse = [1 / norm for norm in norms[name]]
        unit[name] = arb_mat(
            [[x * by for x in row] for row, by in zip(given, inverse, strict=True)] if cosine else given
        )
    return unit, norms


def _by_pairs(case: Case, function: Callable[[str, str], Rows]) -> dict[tuple[str, str], Rows]:
    """The results of a function for each pair of matrices in ``case.blocks()``.

    The result for (right, left) is the transpose of that for (left, right).
    """
    found = dict[tuple[str, str], Rows]()
    for block in case.blocks():
        pair, turned = (block.left, block.right), (block.right, block.left)
        if pair not in found:
            found[pair] = list(map(list, zip(*found[turned], strict=True))) if turned in found else function(*pair)
    return found


def _products(case: Case, norms: Mapping[str, Sequence[arb]], left: str, right: str) -> Rows:
    """The similarities of the rows of two matrices.

    The products of the rows are divided by the norms afterwards, because products of entries with few bits are fast.
    """
    one, other = (arb_mat(case.matrices[name].tolist()) for name in (left, right))
    products: Rows = (one * other.transpose()).tolist()
    if case.option("similarity") != "cosine":
        return products
    across, down = ([1 / norm for norm in norms[name]] for name in (left, right))
    return [[x * a * b for x, b in zip(row, down, strict=True)] for row, a in zip(products, across, strict=True)]


def _exponentials(case: Case, similarities: Mapping[tuple[str, str], Rows], left: str, right: str) -> Rows:
    """The exponentials of the logits of two matrices; those of one matrix are symmetric."""
    inverse, bias, found = 1 / arb(case.temperature), case.bias, list[list[arb]]()
    for i, row in enumerate(similarities[left, right]):
        known = [found[k][i] for k in range(i)] if left == right else []
        logits = [x * inverse for x in row[len(known) :]]
        found.append([*known, *((x + bias).exp() for x in logits)] if bias else [*known, *(x.exp() for x in logits)])
    return found


def similarities(case: Case) -> Rows:
    """The similarity matrix of a case, in balls."""
    return _filled(case, _by_pairs(case, partial(_products, case, normalised(case)[1])))


def _filled(case: Case, parts: Mapping[tuple[str, str], Rows]) -> Rows:
    """A matrix of the case's ``shape``, from its blocks; 0 elsewhere."""
    rows, columns = case.shape
    matrix = [[arb(0)] * columns for _ in range(rows)]
    for block in case.blocks():
        across, down = block.part
        for row, part in zip(matrix[across], parts[block.left, block.right], strict=True):
            row[down] = part
    return matrix


def dot(a: Sequence[arb], b: Sequence[arb]) -> arb:
    """The dot product of two rows."""
    return sum((x * y for x, y in zip(a, b, strict=True)), arb(0))


def pull_back(
    case: Case, unit: Mapping[str, arb_mat], norms: Mapping[str, Sequence[arb]], slopes: Mapping[int, Sequence[arb]]
) -> tuple[dict[str, Rows], arb]:
    """The gradient of every matrix, from the derivatives w_ij of the loss with respect to the similarities.

    Also returns the sum of all g . y below, which is 2 sum_ij w_ij s_ij.

    With s_ij = y_i . y_j, the gradient of row y_i is g = sum_j w_ij y_j. Under cosine y = x / |x|, and the gradient of
    x is (g - (g . y) y) / |x|.

    ``slopes`` has w_ij for all columns j, by anchor i. ``unit`` and ``norms`` are the results of ``normalised``.
    """
    cosine, nothing = case.option("similarity") == "cosine", [arb(0)] * case.shape[1]
    pairs = dict[tuple[str, str], arb_mat]()
    for block in case.blocks():
        across, down = block.part
        weights = arb_mat([slopes.get(i, nothing)[down] for i in range(case.shape[0])[across]])
        left, right = block.left, block.right
        if (right, left) in pairs:
            left, right, weights = right, left, weights.transpose()
        pairs[left, right] = pairs[left, right] + weights if (left, right) in pairs else weights
    found = {name: rows * 0 for name, rows in unit.items()}
    for (left, right), weights in pairs.items():
        if left == right:
            found[left] += (weights + weights.transpose()) * unit[left]
        else:
            found[left] += weights * unit[right]
            found[right] += weights.transpose() * unit[left]

    def of_row(g: list[arb], y: list[arb], norm: arb, nonzero: int) -> list[arb]:
        if cosine and nonzero == 0:  # the gradient of a row of zeros is 0 by convention
            return [arb(0)] * len(y)
        along, inverse = dot(g, y), 1 / norm
        sums.append(along)
        if not cosine:
            return g
        if nonzero == 1:
            # The gradient is orthogonal to the row. If only one entry of the row is nonzero, the gradient of this entry
            # is exactly 0. The formula would give a ball around 0, which takes more bits to prove.
            return [arb(0) if b != 0 else a * inverse for a, b in zip(g, y, strict=True)]
        return [(a - along * b) * inverse for a, b in zip(g, y, strict=True)]

    sums = list[arb]()
    nonzero = {name: np.count_nonzero(rows, axis=1).tolist() for name, rows in case.matrices.items()}
    gradients = {
        name: list(map(of_row, found[name].tolist(), unit[name].tolist(), norms[name], nonzero[name])) for name in unit
    }
    return gradients, sum(sums, arb(0))


def row_divisors(case: Case) -> list[arb]:
    """The exact values of ``case.divisors()``."""
    weights, reduction, counted = [arb(x) for x in case.row_weights()], case.option("reduction"), {*case.counted()}

    def sum_of(rows: Iterable[int]) -> arb:
        found = sum((weights[i] for i in rows if i in counted), arb(0))
        return found if found != 0 else arb(1)

    if reduction == "mean":
        return [x for rows in case.groups() or [range(case.shape[0])] for x in [sum_of(rows)] * len(rows)]
    found = arb(1)
    if reduction == "mean_pairs":
        numbers = _pair_numbers(case)
        found = sum((weights[i] * numbers[i] for i in case.anchors()), arb(0))
    return [found if found != 0 else arb(1)] * case.shape[0]


def _pair_numbers(case: Case) -> list[arb]:
    """The exact values of ``case.pair_numbers()``; in the sigmoid loss, the number of all pairs of a row."""
    if case.form == "sigmoid":
        return [arb(number) for number in case.member_counts()]
    weights = case.arguments.get("positive_weights") if case.option("weights_divisor") == "weight" else None
    return [
        arb(len(columns)) if weights is None else sum((arb(weights[i][p]) for p in columns), arb(0))
        for i, columns in enumerate(case.positives())
    ]


def weights_of(case: Case, matrix: Sequence[Sequence[Any]]) -> list[list[Any]] | None:
    """The weights of every row that a loss computes from the similarities; None if it has no weights."""
    if not case.entry.weights:
        return None
    member, positive = case.member_array(), case.positive_array()
    negatives = [np.flatnonzero(row).tolist() for row in member & ~positive]
    found: list[list[Any]] = case.entry.weights_function(matrix, case.positives(), negatives, **case.weights_options())
    return found


def _anchor(case: Case, i: int, row: list[arb], e: list[arb], weights: Sequence[arb] | None) -> Anchor:
    """What the formula of anchor i takes, from its rows of similarities and of exponentials."""
    members, positives, e = case.members()[i], case.positives()[i], list(e)
    among = {*positives}
    negatives = [k for k in members if k not in among]
    of_positives, of_negatives = (case.arguments.get(name) for name in ("positive_weights", "negative_weights"))
    if of_negatives is not None:
        for k in negatives:
            e[k] = e[k] * of_negatives[i][k]
    if weights and case.form != "weighted":  # they are added to the logits
        e = [x if w == 0 else x * w.exp() for x, w in zip(e, weights, strict=True)]
    own = [arb(1) if of_positives is None else arb(of_positives[i][k]) for k in positives]
    number = sum(own, arb(0)) if case.option("weights_divisor") == "weight" else arb(len(positives))
    weight = weights[0] if weights and case.form == "weighted" else arb(1)
    return Anchor(
        case, i, row, e, members, positives, negatives, own, number, weight, 1 / arb(case.temperature), case.bias
    )


def _add_through_weights(
    case: Case,
    weights: Sequence[Sequence[arb]],
    of_weights: Mapping[int, arb],
    matrix: Rows,
    slopes: dict[int, list[arb]],
) -> arb:
    """Add the derivatives through the weights of ``dclw``. Returns the sum of their products with the similarities.

    The weights are w_i = 2 - R y_i, where y is the softmax of c / sigma over the R rows, and c_j is the similarity of
    row j and its positive. With g_i = dL/dw_i, the derivative with respect to c_j is -R / sigma y_j (g_j - sum_i g_i
    y_i).
    """
    count, sigma = len(weights), arb(case.option("sigma"))
    softmax = [(2 - w) / count for (w,) in weights]
    mean, total = sum((g * softmax[i] for i, g in of_weights.items()), arb(0)), arb(0)
    for j, (p,) in enumerate(case.positives()):
        row = slopes.setdefault(j, [arb(0)] * case.shape[1])
        through = count / sigma * softmax[j] * (mean - of_weights.get(j, arb(0)))
        row[p], total = row[p] + through, total + through * matrix[j][p]
    return total


def _mean(given: Anchor, denominator: Sequence[int]) -> Part:
    """L = (Σ_P w / d) log Σ_D e^s - Σ_P w s / d, where D is the denominator and d the number of positives."""
    if not denominator or not given.positives:
        return Part(arb(0), {})
    e, count = given.chosen(denominator), sum(given.weights, arb(0)) / given.number
    total = sum(e.values(), arb(0))
    inverse, pulled = count / total, arb(0)
    slopes = {k: x * inverse for k, x in e.items()}
    for k, w in zip(given.positives, given.weights, strict=True):
        share = w / given.number
        pulled += given.logit(k) * share
        slopes[k] = slopes.get(k, 0) - share
    return Part(total.log() * count - pulled, slopes)


def _one_positive(given: Anchor) -> Part:
    """L = Σ_P w log(1 + e^-s_p Σ_N e^s) / d."""
    e = given.chosen(given.negatives)
    total = sum(e.values(), arb(0))
    ratios = [total / given.exponentials[k] for k in given.positives]
    pairs, shares = [(1 + ratio).log() for ratio in ratios], [w / given.number for w in given.weights]
    among = zip(given.positives, ratios, shares, strict=True)
    slopes = {k: -ratio / (1 + ratio) * share for k, ratio, share in among}
    if e:
        inverse = -sum(slopes.values(), arb(0)) / total
        slopes |= {k: x * inverse for k, x in e.items()}
    return Part(dot(pairs, shares), slopes, pairs)


def _log_count(given: Anchor) -> arb:
    """What the mean of the ratios adds to their sum: log |P|."""
    return arb(0) if given.case.option("inside_reduction") == "sum" else arb(len(given.positives)).log()


def _inside(given: Anchor, denominator: Sequence[int]) -> Part:
    """L = log Σ_D e^s - log Σ_P e^s, and + log |P| for the mean of the ratios."""
    if not denominator or not given.positives:
        return Part(arb(0), {})
    e, own = given.chosen(denominator), given.chosen(given.positives)
    total, among = sum(e.values(), arb(0)), sum(own.values(), arb(0))
    inverse = 1 / total
    slopes = {k: x * inverse for k, x in e.items()}
    for k, x in own.items():
        slopes[k] = slopes.get(k, 0) - x / among
    return Part((total / among).log() + _log_count(given), slopes)


def _inside_one_positive(given: Anchor) -> Part:
    """L = -log Σ_P e^s_p / (e^s_p + Σ_N e^s), and + log |P| for the mean of the ratios."""
    e, own = given.chosen(given.negatives), given.chosen(given.positives)
    total = sum(e.values(), arb(0))
    ratios = {k: x / (x + total) for k, x in own.items()}
    among = sum(ratios.values(), arb(0))
    slopes = {k: -x * (1 - x) / among for k, x in ratios.items()}
    if e:
        inverse = -sum(slopes.values(), arb(0)) / total
        slopes |= {k: x * inverse for k, x in e.items()}
    return Part(_log_count(given) - among.log(), slopes)


def _binary(given: Anchor) -> Part:
    """L = Σ_P log(1 + e^-s) / (|P| + 1) + Σ_N log(1 + e^s) / |N|; in the sigmoid loss without the divisors."""
    alone, value, slopes, of_pairs = given.case.form == "sigmoid", arb(0), dict[int, arb](), dict[int, arb]()
    parts = (-1, given.positives, len(given.positives) + 1), (1, given.negatives, len(given.negatives))
    for sign, columns, number in parts:
        # The logarithm of the product of all 1 + e is the sum of their logarithms.
        product, share = arb(1), arb(sign) / (1 if alone else number or 1)
        for k in columns:
            e = given.exponentials[k] if sign > 0 else 1 / given.exponentials[k]
            above = 1 + e
            product *= above
            slopes[k] = e / above * share
            if given.pairwise:
                of_pairs[k] = above.log()
        value += product.log() * share * sign
    return Part(value, slopes, [of_pairs[k] for k in given.members] if given.pairwise else ())


def _mass(given: Anchor) -> Part:
    """L = log(e^s_p + M) - s_p, where M is the larger of the debiased mass and its floor.

    The debiased mass is n (g - τ e^s_p) / (1 - τ), with g = Σ_N w e^s / Σ_N w and w = e^(β s). The floor is n e^lowest.
    """
    if not given.negatives:
        return Part(arb(0), {})
    case, (p,), count = given.case, given.positives, len(given.negatives)
    tau, beta, lowest = (arb(x) for x in (case.option("tau_plus"), case.option("beta"), case.entry.lowest))
    own, e = given.exponentials[p], given.chosen(given.negatives)
    hardness = e if beta == 1 else {k: (beta * given.logit(k)).exp() for k in e}
    products = {k: x * hardness[k] for k, x in e.items()}
    below = sum(hardness.values(), arb(0))
    mean, each = sum(products.values(), arb(0)) / below, count / (1 - tau)
    debiased, floor = each * (mean - tau * own), count * (lowest / arb(case.temperature)).exp()
    mass = debiased.max(floor)
    inverse, value = 1 / (own + mass), ((own + mass) / own).log()
    if debiased > floor:
        of_products, of_hardness = (1 + beta) * each / below * inverse, beta * mean * each / below * inverse
        slopes = {k: x * of_products - hardness[k] * of_hardness for k, x in products.items()}
        return Part(value, {**slopes, p: (own - tau * own * each) * inverse - 1})
    if debiased < floor or kink_of(case):
        return Part(value, {p: own * inverse - 1}, lowest=mass * inverse)
    return Part(value, {p: arb.nan()})  # more bits are needed


def _weighted(given: Anchor) -> Part:
    """L = log Σ_N e^s - w s_p."""
    if not given.negatives:
        return Part(arb(0), {})
    (p,), e = given.positives, given.chosen(given.negatives)
    total = sum(e.values(), arb(0))
    inverse = 1 / total
    slopes = {k: x * inverse for k, x in e.items()}
    return Part(total.log() - given.weight * given.logit(p), {**slopes, p: -given.weight})


def _epsilon(given: Anchor) -> Part:
    """L = Σ_P (log Σ_A x - log x_p) / (|P| + ε), where x = e^(s - top) + ε, and top is the largest s."""
    case, s, largest, near = given.case, given.similarity, given.row, list[int]()
    if case.option("similarity") != "cosine":  # the cosine of the self pair, 1, is the largest
        compared = sorted({given.row, *given.members})
        largest = max(compared, key=lambda k: float(s[k]))
        near = [k for k in compared if k != largest and not s[k] < s[largest]]
    top = given.exponentials[largest]
    for k in near:
        top = top.union(given.exponentials[k])
    inverse, epsilon = 1 / top, arb(case.entry.epsilon)
    e = {k: x * inverse for k, x in given.chosen(given.members).items()}
    total = sum(e.values(), arb(0)) + epsilon * len(e)
    count, number = len(given.positives) + epsilon, len(given.positives)
    value = number * total.log() - sum(((e[p] + epsilon).log() for p in given.positives), arb(0))
    share = number / (total * count)
    slopes = {k: x * share for k, x in e.items()}
    for p in given.positives:
        slopes[p] -= e[p] / (e[p] + epsilon) / count
    # The value depends only on differences from the largest logit, so the derivatives add up to 0.
    rest = sum(slopes.values(), arb(0)) if not near or kink_of(case) else arb.nan()  # NaN: more bits are needed
    slopes[largest] = slopes.get(largest, 0) - rest
    return Part(value / count, slopes)


FORMULAS: Mapping[tuple[str, str], Formula] = {
    ("mean", "all"): lambda given: _mean(given, given.members),
    ("mean", "one_positive"): _one_positive,
    ("mean", "only_negatives"): lambda given: _mean(given, given.negatives),
    ("inside", "all"): lambda given: _inside(given, given.members),
    ("inside", "one_positive"): _inside_one_positive,
    ("inside", "only_negatives"): lambda given: _inside(given, given.negatives),
    ("binary", "all"): _binary,
    ("sigmoid", "all"): _binary,
    ("mass", "all"): _mass,
    ("weighted", "all"): _weighted,
    ("epsilon", "all"): _epsilon,
}
"""The value and the derivatives of an anchor, by the form of the loss (``Loss.form``) and its denominator."""
