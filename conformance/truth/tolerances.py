"""Tolerances: how far a correct implementation may be from the truth, and why. All tolerances are defined here.

A bound follows from the unit roundoff u of the accumulating dtype (float64 for float64, else float32), the derivatives
of the loss at the case, and a count of operations. One rounding of the returned result is added. No bound was raised to
make a test pass.

*Notation.* s_ij is a similarity, T the temperature, z = s / T a logit, L the loss, and R the number of rows of the
similarity matrix.

*Similarities.* Let a_ij be the sum of the absolute products in a dot product of D terms; a_ij <= 1 for rows of norm 1.
The bound on the error of s_ij is (SIMILARITY_ULPS + sqrt(D)) u a_ij. The first part is for the norms and divisions. The
second is for the sum: rounding errors accumulate like a random walk.

*The loss.* To first order, the errors of the similarities change the loss by at most the sum over all pairs of
|dL/ds_ij| times the error of s_ij. This part of the bound is *inherited*. The loss's own operations add to it. If an
anchor's value is logsumexp(z) minus the mean logit of its positives, they are:

- The logsumexp of n logits, with an error of u (1 + sqrt(n) + max |z| + 2 log n). The exponentials and their sum
  contribute 1 + sqrt(n). Rounding the logarithm contributes log n. Adding back the largest logit contributes
  max |z| + log n.
- The mean of k > 1 logits, with an error of u (1 + sqrt(k/3)) mean |z|. The j-th partial sum is about j mean |z|, and
  sqrt(1 + 4 + ... + k^2) / k is about sqrt(k/3).
- The difference and the mean over the anchors, with an error of 2 u |value|.

If the value is near 0, the logsumexp and the logit cancel, but their rounding errors do not. The inherited part does
not cover these errors, because the derivatives are near 0 too.

Some losses have other operations:

- ``supcon_in`` has the mean inside the logarithm. It is a difference of two logsumexps, each with the error above.
- ``nt_bxent`` averages softplus(z) or softplus(-z) over pairs. PyTorch computes it as z minus log sigmoid(z), both of
  size |z|. The error is u |z| for each pair, averaged like the pairs, plus LOSS_ULPS u for the functions.
- ``sigmoid`` adds n positive terms with small relative errors. The error is (LOSS_ULPS + sqrt(n)) u times the sum. The
  bias b counts as one more product of the dot product, of size T |b|.
- ``supcon_epsilon`` subtracts logarithms of exponentials plus epsilon, each up to -log(epsilon) in size. The errors are
  relative to this size.

*Mass.* In ``hard_negative``, the negatives enter the denominator as a *mass*. Let S1 and S2 be the sums over the
negatives of e^((1 + beta) z) and of e^(beta z), and let q be log(S1 / S2) minus the logit of the positive. The mass is
proportional to e^q - tau_plus, and has a floor.

- The weight of a negative is the difference of its shares in S1 and S2. The rounding errors of the sums do not cancel,
  so the bounds use the sum of both shares, the *gross* weight.
- The relative error of e^q - tau_plus is the error of q times e^q / (e^q - tau_plus). This factor, the *growth*, and
  1 + 2 beta multiply the errors of the weights.
- At the floor, the value depends only on the positive, and there is no growth.
- The bounds do not cover a mass so close to its floor that rounding decides which is larger. No golden case has such a
  mass. Some have a mass equal to the floor; their gradients are not compared.

*Weighted positives.* In ``dclw``, the logit of the positive has the weight 2 - m. If s is the similarity of a row and
its positive, m is R times the softmax of s / sigma over the R rows.

- The gross weight of s is (2 + m) / T.
- The value also changes through m. This adds m / (T sigma) times (|s| + the mean of m |s| over the rows) to the gross
  weight. Gradients with detached weights have no such part.
- An error of s changes m by that error times 2 m / sigma, and the derivative of m by twice as much. The growth is
  therefore 1 + 4 T / sigma.

*Hidden faults.* The bounds were compared with bounds of only 2u per anchor, on 138 faults. 130 faults are caught by
equally many cases. Eight are caught by one to five cases fewer, but still by at least 15.

*The gradient.* Row i of the gradient is the sum over j of V_ij y_j, where V_ij = dL/ds_ij + dL/ds_ji and y_j are the
rows. Under cosine it is divided by the norm of row i. V_ij is a softmax entry minus a share of 1/|P|. The bound adds
three errors for every j:

- the error of the similarity, amplified by 1/T in the exponential;
- the relative error sqrt(n) u of the sum of n exponentials in the denominator;
- the error of the difference, u times the share.

With references, two towers or a queue, y_j are the rows of the other matrix. If a matrix is on both sides, its two
bounds are added.

*Narrowed weights.* Fused kernels for bfloat16 and float16 compute V_ij in float32 and round it once to the dtype of the
rows, because tensor cores multiply numbers of one dtype. With the u of this dtype, the error of row i grows by u times
the sum over j of |V_ij| |y_j|. Under cosine y_j has norm 1, and the sum is divided by the norm of row i.

A subnormal weight in float16 has an error of up to half the smallest subnormal number. The kernels therefore scale the
largest upstream gradient to between 1 and 2, and multiply weights by WEIGHTS_LIFTED before rounding.

These bounds apply in bfloat16 and float16 to implementations that declare ``narrows_weights``. They are added to the
tightened bounds (see ``held_to``), because the straightforward implementation rounds no weights.

*Wider sums.* An implementation that declares ``computes_in`` float64 converts narrower rows to float64 and rounds its
results. Its bounds are those of float64, plus one rounding of the loss to the accumulating dtype and of the gradient to
the dtype of the rows. These bounds distinguish ``backend="exact"`` from the other backends.

*Levels.* ``pairproof check`` also accepts errors up to those of the straightforward torch implementation
(``baseline.py``) in the same dtype. Below the level "digits", it accepts more:

- four times the straightforward errors, because implementations round in different places;
- 16 units in the last place of every similarity, because the straightforward result is sometimes exact by chance. This
  exceeds the derived SIMILARITY_ULPS + sqrt(D) for D < 169. All parts of the bound are widened in proportion.

A straightforward error above ROUNDING_WITHIN times the derived bound is not a rounding error, and widens no bound.

*Implementations.* Other packages are judged by the derived bounds. ``fast`` may have at most twice the error of the
straightforward implementation in the same dtype, with a minimum of a few units in the last place. The straightforward
implementation runs only for results that exceed this minimum. ``pairproof verify --show bounds`` prints the
distribution of the ratio of error to bound. For ``fast``, errors up to this minimum are divided by the minimum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np

from ..suite.cases import SIGNIFICAND, Case, once
from ..suite.records import Bounds, Expected, Matrix, Outcome, Truth

SIMILARITY_ULPS = 3.0
"""Roundings of a similarity apart from its sum, in units of u: two norms, two divisions, the temperature."""

LOSS_ULPS = 2.0
"""Rounding errors of an exponential and a logarithm of size 1, in units of u."""

GRADIENT_ULPS = 4.0
"""Roundings of a weight, of the sum over rows and of the backward pass of the norm, in units of u."""

FLOOR_ULPS = 4.0
"""Units in the last place of a similarity that are always allowed, even if the straightforward result is exact."""

FORMULA_TIMES = 4.0
"""Largest error at levels below "digits", in units of the error of the straightforward implementation."""

FORMULA_ULPS = 16.0
"""Units in the last place of a similarity that are always allowed at levels below "digits"."""

ROUNDING_WITHIN = 1000.0
"""Largest error of the straightforward implementation, in units of the derived bound, that counts as rounding."""

SMALLEST_SUBNORMAL = {"float64": 2.0**-1074, "float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}

WEIGHTS_LIFTED = {"bfloat16": 1.0, "float16": 2.0**12}
"""The factor by which weights are scaled before they are rounded to a dtype."""


def unit_roundoff(dtype: str) -> float:
    """Half the distance from 1 to the next number of the dtype."""
    return 2.0 ** -SIGNIFICAND[dtype]


def accumulating(dtype: str) -> str:
    """The accumulating dtype: float64 for float64, float32 for all narrower dtypes."""
    return "float64" if dtype == "float64" else "float32"


@np.errstate(over="ignore")  # a bound beyond the range of float64 is inf
def bounds(case: Case, truth: Truth, dtype: str) -> Bounds:
    """The bounds of a case. ``dtype`` is that of the inputs and the gradient; the loss has the accumulating dtype."""
    return with_rounded_gradient(accumulated_bounds(case, truth, accumulating(dtype)), truth, dtype)


@lru_cache(maxsize=4)  # all implementations and several deviations of a case use the same bounds
@np.errstate(over="ignore")
def accumulated_bounds(case: Case, truth: Truth, dtype: str) -> Bounds:
    """The bounds of a case in the accumulating ``dtype``, before the gradient is rounded to the dtype of the rows."""
    u = unit_roundoff(dtype)
    tiny = SMALLEST_SUBNORMAL[dtype]
    dim = case.embeddings.shape[1]
    sizes = _products(case)
    per_similarity = u * (SIMILARITY_ULPS + math.sqrt(dim)) * sizes

    scale, shares = _scale(case), shares_of(case)
    gross, growth = _gross_weights(case, truth, value=True)
    inherited = gross * per_similarity
    row_inherited = np.divide(inherited.sum(axis=1), shares, out=np.zeros(len(shares)), where=shares > 0).tolist()

    def of_values(own: Matrix, of_pairs: tuple[list[float], list[float]]) -> tuple[list[float], dict[int, float]]:
        """The bounds on the values, from the roundings of each anchor's own operations, in units of u."""
        own = own * _factors(case)

        def of_value(value: float, inherited: float, own: float) -> float:
            return inherited + u * scale * own + 2 * u * abs(value) + tiny

        anchors = {i: of_value(v, row_inherited[i], float(own[i])) for i, v in truth.anchors.items()}
        if none_pairs:
            return [of_value(*parts) for parts in zip(truth.values, *of_pairs, strict=True)], anchors
        if isinstance(truth.loss, tuple):
            return [anchors[i] for i in case.counted()], anchors
        total = float((own * shares)[case.anchors()].sum())
        return [of_value(truth.loss, float(inherited.sum()), total)], anchors

    own_ulps = GRADIENT_ULPS + math.sqrt(case.shape[1])
    amplified = own_ulps + (SIMILARITY_ULPS + math.sqrt(dim)) * sizes.max(axis=1) / case.temperature
    amplified = growth * (amplified + _of_repetition(case).max(axis=1))
    sums = _amplified(case, truth, scale / case.temperature * shares * _factors(case), amplified, dtype)
    norms = {name: _divisors(m) if case.option("similarity") == "cosine" else 1.0 for name, m in case.matrices.items()}
    rows = {name: u * found / norms[name] for name, found in sums.items()}
    floor = min(FLOOR_ULPS / (SIMILARITY_ULPS + math.sqrt(dim)), 1.0)
    constant = LOSS_ULPS * (1 + 2 * math.log(1 / case.entry.epsilon) if case.entry.epsilon else 1)
    own = _own_roundings(case, truth, constant)
    none_pairs = case.option("reduction") == "none_pairs"
    of_pairs = _of_pairs(case, truth, per_similarity) if none_pairs else ([], [])
    values, anchors = of_values(own, of_pairs)
    # The floor leaves out rounding errors that are relative to the size of a logit. The sigmoid loss has none.
    if case.form != "sigmoid":
        own, of_pairs = np.full(case.shape[0], constant), (of_pairs[0], [constant * x for x in case.pair_factors()])
    least_values, least_anchors = of_values(own, of_pairs)
    least = Outcome([floor * x for x in least_values], anchors={i: floor * x for i, x in least_anchors.items()})
    return Bounds(values, anchors, rows, floor, per_similarity, least)


@np.errstate(over="ignore")
def temperature_bound(case: Case, truth: Truth, dtype: str) -> float:
    """The bound on ``truth.temperature_gradient``, the derivative with respect to the temperature.

    The derivative is the sum of W_ij s_ij / T, with W_ij = dL/ds_ij. Each pair adds two errors to the bound:

    * |s_ij| / T times the error of W_ij, which is the same as in the gradients of rows;
    * |W_ij| / T times the error of s_ij.

    With a base temperature, the derivative also contains L / T, and the bound contains the error of L. In a loss with
    an epsilon, s_ij is relative to the largest similarity of the row, including the self pair.

    ``truth.similarity`` must not be None. ``dtype`` is that of the inputs.
    """
    assert truth.similarity is not None
    u, temperature = unit_roundoff(accumulating(dtype)), case.temperature
    allowed, dim = bounds(case, truth, dtype), case.embeddings.shape[1]
    sizes, positives = np.abs(truth.similarity), case.positives()
    weights, growth = _gross_weights(case, truth, temperature=True)
    errors, shares, factors, parts = weights.copy(), shares_of(case), _factors(case), _parts(case)
    members = case.members()
    for i in case.anchors():
        if case.entry.epsilon:
            sizes[i] += abs(truth.similarity[i, [i, *members[i]]].max())
        if case.form == "mass":  # the floor, the logit of similarity -1, has the same weight as the positive
            sizes[i, positives[i]] += 1
        elif case.form not in ("sigmoid", "weighted"):  # a weight is a softmax entry minus a share of 1/|P|
            errors[i] += _scale(case) / temperature * shares[i] * factors[i] * parts[i]
    per_logit = (SIMILARITY_ULPS + math.sqrt(dim)) * _products(case).max(axis=1) / temperature
    per_logit = per_logit + _of_repetition(case).max(axis=1)
    errors *= (growth * (GRADIENT_ULPS + per_logit))[:, None]
    found = float((u * (errors + GRADIENT_ULPS * weights) * sizes + weights * allowed.similarity).sum())
    if case.option("base_temperature") is not None:
        found += sum(allowed.values) + GRADIENT_ULPS * u * sum(map(abs, truth.values))
    return found / temperature


@np.errstate(over="ignore")
def bias_bound(case: Case, truth: Truth, dtype: str) -> float:
    """The bound on ``truth.bias_gradient``, which is T times the sum of dL/ds_ij."""
    u, dim = unit_roundoff(accumulating(dtype)), case.embeddings.shape[1]
    per_weight = 2 * GRADIENT_ULPS + (SIMILARITY_ULPS + math.sqrt(dim)) * _products(case).max() / case.temperature
    summed = math.sqrt(truth.weights.size)
    return float(u * (per_weight + summed) * np.abs(truth.weights).sum() * case.temperature)


@lru_cache(maxsize=4)  # the same in every dtype
def _gross_weights(
    case: Case, truth: Truth, *, value: bool = False, temperature: bool = False
) -> tuple[Matrix, Matrix]:
    """The gross weights, of the case's ``shape``, and the growth of the errors of each anchor's weights.

    In ``dclw``, the change through the weights is included for bounds on a ``value``. It is left out for the derivative
    with respect to the ``temperature``, and for gradients if the weights are detached.
    """
    gross, growth = np.abs(truth.weights), np.ones(case.shape[0])
    if case.form == "weighted":
        found, constant = _Weighted(case, truth), temperature or (case.detaches_weights and not value)
        gross[found.positive] = found.direct + (0 if constant else found.through)
        return gross, growth * (1 + 4 * case.temperature / float(case.option("sigma")))
    if case.form != "mass":
        return gross, growth
    masses, beta = _Masses(case, truth), float(case.option("beta"))
    shares = (1 + beta) * masses.shares[0] + beta * masses.shares[1] + (1 + 2 * beta) * masses.positive
    own = gross[masses.positive][:, None]
    above = masses.above[:, None]
    return np.where(above, own * shares, gross), np.where(masses.above, (1 + 2 * beta) * masses.growth, 1.0)


class _Weighted:
    """The weights of the positives in ``dclw``, computed in float64 to scale the tolerances.

    Attributes:
        positive: bool, of the case's ``shape``.
        own: [R], the logits of the positives.
        m: [R], R times the softmax of s / sigma, where s are the similarities of rows to their positives.
        direct: [R], the gross derivative with respect to s at constant weights.
        through: [R], the gross derivative through the weights.
    """

    def __init__(self, case: Case, truth: Truth) -> None:
        similarity = _similarities(case) if truth.similarity is None else truth.similarity
        sigma, member = float(case.option("sigma")), case.member_array()
        self.positive = case.positive_array() & member
        closeness = similarity[self.positive] / sigma
        e = np.exp(closeness - closeness.max())
        self.own, self.m = similarity[self.positive] / case.temperature, e / e.mean()
        self.largest = float(np.abs(closeness).max())
        counted = np.zeros(case.shape[0], dtype=bool)
        counted[case.anchors()] = True
        share = (counted & (member & ~self.positive).any(axis=1)) * _scale(case) * shares_of(case)
        self.direct = share * (2 + self.m) / case.temperature
        sizes = share * np.abs(self.own)
        self.through = self.m / sigma * (sizes + (sizes * self.m).mean())

    def roundings(self) -> Matrix:
        """[R], the rounding errors of the weighted logits, in units of u."""
        per_weight = 4 + math.sqrt(len(self.m)) + 2 * self.largest
        found: Matrix = np.abs(self.own) * (2 + self.m + per_weight * self.m)
        return found


class _Masses:
    """The masses of all anchors in ``hard_negative``, computed in float64 to scale the tolerances.

    Attributes:
        positive: bool, of the case's ``shape``.
        shares: two matrices of the case's ``shape``, the softmax of (1 + beta) z and that of beta z over the negatives,
            where z are the logits.
        above: bool [R], the rows whose mass is above its floor.
        growth: [R], e^q / (e^q - tau_plus).
    """

    def __init__(self, case: Case, truth: Truth) -> None:
        similarity = _similarities(case) if truth.similarity is None else truth.similarity
        self.case, self.logits = case, similarity / case.temperature
        tau_plus, self.beta = float(case.option("tau_plus")), float(case.option("beta"))
        self.positive = case.positive_array() & case.member_array()
        negative = case.member_array() & ~self.positive
        self.number = negative.sum(axis=1)
        self.own = self.logits[self.positive]
        self.shares, sums = [], []
        for factor in (1 + self.beta, self.beta):
            z = np.where(negative, factor * self.logits, -np.inf)
            top = z.max(axis=1, keepdims=True, initial=-1e300)
            e = np.exp(z - top)
            total = np.maximum(e.sum(axis=1, keepdims=True), 1e-300)
            self.shares.append(e / total)
            sums.append((top + np.log(total))[:, 0])
        excess = np.where(self.number > 0, sums[0] - sums[1], 0.0) - self.own
        share = np.minimum(tau_plus * np.exp(np.minimum(-excess, 700.0)), 1.0)
        with np.errstate(divide="ignore"):
            debiased, self.growth = excess + np.log1p(-share) - math.log1p(-tau_plus), 1 / (1 - share)
        floor = case.lowest["lowest"] - self.own
        self.above = (debiased > floor) & (self.number > 0)
        # The derivative of softplus multiplies the errors of the logarithm of the mass.
        log_ratio = np.maximum(debiased, floor) + np.log(np.maximum(self.number, 1))
        self.slope = np.where(self.number > 0, np.exp(-np.logaddexp(0.0, -log_ratio)), 0.0)

    def roundings(self) -> Matrix:
        """[R], the rounding errors of each value's operations after the logits, in units of u."""
        largest = np.abs(self.logits).max(axis=1, where=self.case.member_array(), initial=0.0)
        number = np.maximum(self.number, 1)
        of_sums = sum(
            1 + np.sqrt(number) + factor * largest + 2 * np.log(number)
            for factor in (1 + self.beta, *([self.beta] if self.beta else []))
        )
        of_floor = 1 + np.abs(self.own) + 1 / self.case.temperature + 2 * np.log(number)
        found: Matrix = self.slope * np.where(self.above, np.where(self.above, self.growth, 1.0) * of_sums, of_floor)
        return found


@lru_cache(maxsize=4)  # the same in every dtype
def _own_roundings(case: Case, truth: Truth, constant: float) -> Matrix:
    """Return the error of each row's value from the operations after the logits, in units of u."""
    own = np.full(case.shape[0], constant)
    if case.entry.epsilon:
        return own
    if case.form == "sigmoid":
        for i, value in truth.anchors.items():
            own[i] = (LOSS_ULPS + math.sqrt(case.shape[1])) * abs(value) / _scale(case)
        return own
    if case.form == "mass":
        return own + _Masses(case, truth).roundings()
    if case.form == "weighted":
        own += _Weighted(case, truth).roundings()
    sizes = np.abs(_similarities(case) if truth.similarity is None else truth.similarity) / case.temperature
    sizes = sizes + _of_repetition(case)
    members, positives = case.members(), case.positives()
    for i in case.anchors():
        z, chosen = sizes[i], positives[i]
        others = sorted({*members[i]} - {*chosen})
        if case.form == "binary":
            own[i] += z[chosen].sum() / (len(chosen) + 1) + (z[others].mean() if others else 0)
        elif chosen:
            if case.form == "weighted":
                own[i] += _of_log_sum(z[others]) if others else 0
                continue
            summed = others if case.option("denominator") == "only_negatives" else members[i]
            own[i] = _of_log_sum(z[summed]) if summed else constant
            if case.form == "inside":
                own[i] += _of_log_sum(z[chosen])
            elif len(chosen) > 1:
                own[i] += (1 + math.sqrt(len(chosen) / 3)) * float(z[chosen].mean())
    return own


@once
def _of_repetition(case: Case) -> Matrix:
    """|log v| for the weights v of negatives, whose logarithm is added to the logits; 0 without weights."""
    weights = case.weights("negative_weights")
    if weights is None:
        return np.zeros(case.shape)
    return np.abs(np.log(np.where(case.positive_array() | (weights == 0), 1.0, weights)))


def _of_log_sum(z: Matrix) -> float:
    """The error of the logsumexp of logits of these sizes, in units of u."""
    return 1 + math.sqrt(len(z)) + float(z.max()) + 2 * math.log(len(z))


def _of_pairs(case: Case, truth: Truth, per_similarity: Matrix) -> tuple[list[float], list[float]]:
    """Return the error that the value of each pair inherits, and the error of its own operations in units of u.

    The derivative of a value v with respect to its own logit is 1 - e^-v in magnitude. In a softmax cross-entropy, the
    derivatives with respect to the logits of the negatives add up to the same magnitude.
    """
    logits = (_similarities(case) if truth.similarity is None else truth.similarity) / case.temperature
    negative, scale = case.member_array() & ~case.positive_array(), _scale(case)
    inherited, own = [], []
    factors = case.pair_factors()
    for (i, j), value, factor in zip(case.pairs(), np.array(truth.values) / scale, factors, strict=True):
        value = value / factor if factor else 0.0
        of_logits, others = per_similarity[i, j], negative[i].nonzero()[0]
        if case.form == "sigmoid":
            own.append((LOSS_ULPS + 1) * value)
        else:
            own.append(_of_log_sum(np.abs(logits[i, [j, *others]])))
            if len(others):
                e = np.exp(logits[i, others] - logits[i, others].max())
                of_logits += e @ per_similarity[i, others] / e.sum()
        inherited.append(float(-np.expm1(-value) * factor * scale / case.temperature * of_logits))
    return inherited, [factor * x for factor, x in zip(factors, own, strict=True)]


@once
def _similarities(case: Case) -> Matrix:
    """The similarity matrix, of the case's ``shape``, in float64."""
    found, cosine = np.zeros(case.shape), case.option("similarity") == "cosine"
    rows = {name: m / _divisors(m)[:, None] if cosine else m for name, m in case.matrices.items()}
    for block in case.blocks():
        found[block.part] = rows[block.left] @ rows[block.right].T
    return found


@np.errstate(over="ignore")
def with_narrowed_weights(allowed: Bounds, case: Case, truth: Truth, dtype: str) -> Bounds:
    """The bounds of an implementation that rounds its finished weights to the dtype of the rows.

    ``allowed`` are the bounds without this rounding. Only bfloat16 and float16 change them.
    """
    if dtype not in WEIGHTS_LIFTED:
        return allowed
    u, cosine = unit_roundoff(dtype), case.option("similarity") == "cosine"
    shares = shares_of(case) * _factors(case)
    share = _scale(case) / case.temperature * float(shares[case.anchors()].max(initial=0.0))
    least = share * SMALLEST_SUBNORMAL[dtype] / (2 * WEIGHTS_LIFTED[dtype])
    narrowed = _gross_weights(case, truth)[0] if case.form in ("mass", "weighted") else truth.weights
    lengths, more = _lengths(case), {name: np.zeros(len(matrix)) for name, matrix in case.matrices.items()}
    for name, weights, other in _by_matrix(case, narrowed):
        # Under cosine, kernels scale a row by a power of two, so that its largest entry is between 1 and 2. The rest of
        # the norm is part of the weight.
        multiplied = case.matrices[other]
        if cosine:
            exponents = np.frexp(np.abs(multiplied).max(axis=1, keepdims=True))[1]
            multiplied = np.ldexp(multiplied, 1 - exponents)
        more[name] += u * np.abs(weights) @ lengths[other] + least * _norms(multiplied).sum()
    if cosine:
        more = {name: found / _divisors(case.matrices[name]) for name, found in more.items()}
    return replace(allowed, rows={name: rows + more[name] for name, rows in allowed.rows.items()})


def rounded_once(computed: Bounds, truth: Truth, dtype: str) -> Bounds:
    """The bounds of an implementation that computes in a wider dtype and rounds its results once.

    ``computed`` are its bounds in the wider dtype. ``dtype`` is that of the inputs and the gradient; the loss has the
    accumulating dtype.
    """
    u, tiny = unit_roundoff(accumulating(dtype)), SMALLEST_SUBNORMAL[accumulating(dtype)]
    rounded = computed.map_values(lambda bound, expected: bound + u * np.abs(expected) + tiny, truth)
    return with_rounded_gradient(rounded, truth, dtype)


@np.errstate(over="ignore")
def with_rounded_gradient(computed: Bounds, truth: Truth, dtype: str) -> Bounds:
    """Add one rounding of every entry of the gradients to the bounds."""
    u, tiny = unit_roundoff(dtype), SMALLEST_SUBNORMAL[dtype]
    return computed.map_rows(
        lambda rows, found: rows + u * np.linalg.norm(found, axis=1) + tiny * math.sqrt(found.shape[1]), truth
    )


def _by_matrix(case: Case, pairs: Matrix) -> Iterator[tuple[str, Matrix, str]]:
    """Split a matrix of the case's ``shape`` into blocks.

    Yields:
        The name of a float matrix, the entries of ``pairs`` for its rows, and the name of the matrix of the columns. If
        both are the same matrix, the entries (i, j) and (j, i) are added.
    """
    for block in case.blocks():
        part = pairs[block.part]
        if block.left == block.right:
            yield block.left, part + part.T, block.right
        else:
            yield block.left, part, block.right
            yield block.right, part.T, block.left


def _norms(matrix: Matrix) -> Matrix:
    return np.array([math.hypot(*row) for row in matrix.tolist()])


def _divisors(matrix: Matrix) -> Matrix:
    """The norms of the rows. The norm of a row of zeros is infinity here, because its gradient is 0."""
    norms = _norms(matrix)
    return np.where(norms == 0, np.inf, norms)


@once
def _lengths(case: Case) -> dict[str, Matrix]:
    """The norms of the rows of every matrix; 1 under cosine."""
    cosine = case.option("similarity") == "cosine"
    return {name: np.ones(len(matrix)) if cosine else _norms(matrix) for name, matrix in case.matrices.items()}


def _scale(case: Case) -> float:
    """The factor temperature / base_temperature of the loss."""
    base = case.option("base_temperature")
    return 1.0 if base is None else case.temperature / float(base)


@once
def _products(case: Case) -> Matrix:
    """The sums a_ij of the absolute products, of the case's ``shape``; 1 under cosine. A bias adds T |b|."""
    cosine = case.option("similarity") == "cosine"
    products = np.full(case.shape, float(cosine))
    for block in () if cosine else case.blocks():
        products[block.part] = np.abs(case.matrices[block.left]) @ np.abs(case.matrices[block.right]).T
    return products + case.temperature * abs(case.bias)


def _amplified(case: Case, truth: Truth, shares: Matrix, amplified: Matrix, dtype: str) -> dict[str, Matrix]:
    """Return, for every row of every matrix, the error of its gradient in units of u, before the division by its norm.

    ``shares``, [R], are the derivatives of the loss with respect to each row's value, divided by T. ``amplified``, [R],
    are the relative errors of each row's weights, in units of u.
    """
    lengths, positives, anchors, parts = _lengths(case), case.positives(), case.anchors(), _parts(case)
    # In the forms "mass" and "weighted", the growth applies to each anchor's weights.
    within = len(case.matrices) == 1 and case.form not in ("mass", "weighted")
    errors, _ = _gross_weights(case, truth)
    # The rounding error of a subnormal exponential is absolute, and its result may be 0.
    errors = errors + shares[:, None] * (float(np.finfo(dtype).tiny) / unit_roundoff(dtype))
    if not within:
        for i in anchors if case.form not in ("sigmoid", "mass", "weighted") else ():
            if case.form == "mean":
                errors[i] += shares[i] * parts[i]
            else:
                # The share of a positive in a sum of exponentials is at most 1.
                errors[i, positives[i]] += shares[i]
        errors = errors * amplified[:, None]
    sums = {name: np.zeros(len(matrix)) for name, matrix in case.matrices.items()}
    for name, part, other in _by_matrix(case, errors):
        sums[name] += part @ lengths[other]
    if within:
        # The weights of a row contain its own share as an anchor, and the shares of the anchors whose positive it is.
        own = np.zeros(case.n)
        own[anchors] = shares[anchors]
        longest, as_positive = lengths[case.first].max(), own @ parts
        sums[case.first] = amplified * (sums[case.first] + (own + as_positive) * longest)
    return sums


def held_to(allowed: Bounds, truth: Truth, plain: Expected | Outcome) -> Bounds:
    """Tighten bounds to twice the error of the straightforward implementation in the same dtype.

    No bound falls below the effect of FLOOR_ULPS units in the last place of every similarity, because the
    straightforward result is sometimes exact by chance. The four units are for the two rows, their product, and the
    division by the temperature. Where the straightforward result is not finite, the bound does not change.

    Args:
        allowed: the derived bounds.
        truth: the certified results.
        plain: the straightforward results.
    """

    def tightened(bound: Matrix, floor: Matrix, error: Matrix) -> Matrix:
        return np.where(np.isfinite(error), np.minimum(bound, np.maximum(2 * error, floor)), bound)

    return _with_errors(tightened, allowed, truth, plain)


def widened(allowed: Bounds, truth: Truth, plain: Outcome, times: float = 1.0, ulps: float = 0.0) -> Bounds:
    """Widen bounds to a multiple of the error of the straightforward implementation in the same dtype.

    Args:
        allowed: the derived bounds.
        truth: the certified results.
        plain: the straightforward results.
        times: the multiple of the straightforward error that is allowed, if the error is at most ROUNDING_WITHIN times
            the bound.
        ulps: units in the last place of every similarity that are always allowed.
    """

    def wider(bound: Matrix, floor: Matrix, error: Matrix) -> Matrix:
        rounding = np.where(error <= ROUNDING_WITHIN * bound, error, 0.0)
        return np.maximum(bound, np.maximum(times * rounding, ulps / FLOOR_ULPS * allowed.share_of_floor * bound))

    return _with_errors(wider, allowed, truth, plain)


def formula_bounds(allowed: Bounds, truth: Truth, plain: Outcome) -> Bounds:
    """The bounds at levels below "digits": see ``widened``."""
    return widened(allowed, truth, plain, FORMULA_TIMES, FORMULA_ULPS)


def _with_errors(
    change: Callable[[Matrix, Matrix, Matrix], Matrix], allowed: Bounds, truth: Truth, plain: Expected | Outcome
) -> Bounds:
    """Replace each bound by ``change(bound, effect of FLOOR_ULPS, straightforward error)``."""

    def of_values(bound: Matrix, floor: Matrix, expected: Matrix, found: Matrix) -> Matrix:
        return change(bound, floor, np.abs(found - expected))

    def of_rows(bound: Matrix, expected: Matrix, found: Matrix) -> Matrix:
        return change(bound, allowed.share_of_floor * bound, np.linalg.norm(found - expected, axis=1))

    with np.errstate(all="ignore"):
        return allowed.map_values(of_values, allowed.least, truth, plain).map_rows(of_rows, truth, plain)


@once
def shares_of(case: Case) -> Matrix:
    """[R], the derivative of the loss with respect to the value of each row, if the row is an anchor that counts.

    The value is a mean over pairs, so a reduction over pairs counts it once for each pair. In the sigmoid loss, it is a
    sum over pairs and is counted once.
    """
    found = np.ones(case.shape[0])
    if case.over_pairs and case.form != "sigmoid":
        found = np.array(case.pair_numbers())
    found /= np.array(case.divisors())
    return found


@once
def _parts(case: Case) -> Matrix:
    """The share of each positive in the mean over the positives of its row; 0 elsewhere."""
    weights, positive = case.weights("positive_weights"), case.positive_array() & case.member_array()
    found = positive * (np.ones(case.shape) if weights is None else weights)
    totals = found.sum(axis=1, keepdims=True)
    return np.asarray(found / np.where(totals == 0, 1.0, totals))


@once
def _factors(case: Case) -> Matrix:
    """[R], the factor of each anchor's value: its weight, times the mean weight of its positives.

    If ``weights_divisor`` is "weight", the factor is only the anchor's weight.
    """
    found, weights = np.array(case.anchor_weights()), case.weights("positive_weights")
    if weights is not None and case.option("weights_divisor") == "count":
        totals = weights.sum(axis=1, where=case.member_array() & case.positive_array())
        found = found * totals / np.maximum(case.pair_numbers(), 1)
    return found
