"""The right formula in the wrong arithmetic: overflow, underflow, epsilons, clamps and narrow types."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from . import parts
from .base import fault, github, pml


@fault("supcon", github("Lightning-Universe/lightning-bolts", "issues/811"), of=parts.cosines)
def supcon_no_shift(batch: parts.Batch) -> Tensor:
    """Exponentials are taken without subtracting a maximum: float32 overflows below a temperature of 1/88."""
    total = parts.row_sums(torch.exp(batch.s), batch.other)[:, None]
    return parts.row_means(total.log() - batch.s, batch.positive)


@fault("supcon", github("HobbitLong/SupContrast", "issues/104"), of=parts.given)
def supcon_maximum_of_self(given: parts.Features) -> Tensor:
    """The maximum is taken with the anchor itself in the row: where it drowns the others, the logarithm is of 0."""
    rows = parts.unit(given.rows)
    s, other = rows @ rows.T / given.temperature, parts.others(len(rows))
    s = s - s.detach().amax(dim=1, keepdim=True)
    total = (torch.exp(s) * other).sum(dim=1, keepdim=True)
    return parts.row_means(total.log() - s, given.same & other)


@fault("supcon", github("WHU-AISE/TVDiag", "pull/5"), of=parts.cosines)
def supcon_epsilon_in_the_logarithm(batch: parts.Batch) -> Tensor:
    """1e-8 is added to the denominator against log 0: without a shift it outweighs sums of small exponentials."""
    s = parts.shifted(batch.s, batch.other)
    constant = batch.s.detach() - s.detach()
    values = torch.logaddexp(parts.log_sum(s, batch.other), math.log(1e-8) - constant)
    return parts.row_means(values - s, batch.positive)


@fault("nt_xent", github("Lightning-Universe/lightning-bolts", "issues/681"), of=parts.views)
def nt_xent_epsilon_twice(rows: parts.Rows) -> Tensor:
    """1e-6 is added to the sum of exponentials, and once more to what is divided by."""
    total = rows.logits.logsumexp(dim=1)
    for _ in range(2):
        total = torch.logaddexp(total, torch.tensor(1e-6, dtype=total.dtype).log())
    return total - rows.logits[rows.positive]


@fault("nt_xent", pml("losses/ntxent_loss.py"), of=parts.given)
def nt_xent_logarithm_floored(given: parts.Features) -> Tensor:
    """The smallest normal number is added inside the logarithm: no pair costs more than 87.34 in float32."""
    ratio = given.views.logits.softmax(dim=1)[given.views.positive]
    return -(ratio + torch.finfo(ratio.dtype).tiny).log()


@fault("info_nce", of=parts.ways)
def info_nce_half_products(way: parts.Way) -> parts.Way:
    """Rows are narrowed to float16 before they are multiplied, as under autocast, and widened afterwards."""

    def narrowed(rows: Tensor) -> Tensor:
        return parts.unit(rows).half().to(rows.dtype)

    queue = None if way.negatives is None else narrowed(way.negatives)
    return parts.Way(narrowed(way.anchors), narrowed(way.keys), way.temperature, queue)


@fault("supcon_in", of=parts.labelled)
def supcon_in_logarithm_of_softmax(batch: parts.Batch) -> Tensor:
    """The logarithm is taken of softmax: probabilities that underflow give log 0."""
    ratios = batch.s.masked_fill(~batch.other, -torch.inf).softmax(dim=1)
    return -(parts.row_means(ratios, batch.positive) + (batch.counts == 0)).log()


@fault("nt_xent_pairwise", of=parts.labelled)
def nt_xent_pairwise_probability_clamped(batch: parts.Batch) -> Tensor:
    """Probabilities are clamped at 1e-12 before the logarithm: a pair beyond it costs 27.6, and pulls no more."""
    probability = torch.exp(-batch.pairwise)
    return parts.row_means(-probability.clamp(min=1e-12).log(), batch.positive)


@fault("nt_bxent", github("pytorch/pytorch", "issues/103316"), of=parts.paired)
def nt_bxent_sigmoid_first(batch: parts.Batch) -> Tensor:
    """The sigmoid is taken first, then binary cross-entropy, which clamps logarithms at -100."""
    p = batch.s.sigmoid()
    costs = (F.binary_cross_entropy(p, torch.full_like(p, target), reduction="none") for target in (1, 0))
    return parts.bxent_anchors(batch, *costs)


@fault("nt_bxent", github("pytorch/pytorch", "issues/49844"), of=parts.paired)
def nt_bxent_infinite_diagonal(batch: parts.Batch) -> Tensor:
    """The diagonal's logit is set to infinity for a loss of 0, which binary cross-entropy with logits makes NaN."""
    target = (batch.positive | ~batch.other).to(batch.s.dtype)
    logits = batch.s.masked_fill(~batch.other, torch.inf)
    each = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    attracted = (each * target).sum(dim=1) / target.sum(dim=1)
    return attracted + (each * (1 - target)).sum(dim=1) / (1 - target).sum(dim=1).clamp(min=1)


@fault("nt_bxent", "https://pytorch.org/docs/stable/generated/torch.nn.functional.softplus.html", of=parts.paired)
def nt_bxent_softplus_linear(batch: parts.Batch) -> Tensor:
    """The softplus of torch is the identity above a threshold of 20: in float64 that is 2e-9 off."""
    return parts.bxent_anchors(batch, F.softplus(-batch.s), F.softplus(batch.s))


@fault("nt_xent_pairwise", github("google-deepmind/optax", "pull/897"), of=parts.labelled)
def nt_xent_pairwise_one_maximum_per_row(batch: parts.Batch) -> Tensor:
    """One maximum serves a whole row: a positive far below another positive has 0 over 0 in its ratio."""
    e = torch.exp(batch.s)
    total = e + parts.row_sums(e, batch.negative)[:, None]
    return parts.row_means(total.log() - e.log(), batch.positive)


@fault("info_nce", github("AdaptiveMotorControlLab/CEBRA", "issues/48"), of=parts.ways)
def info_nce_shift_of_another_row(way: parts.Way) -> parts.Made:
    """The maxima of the rows are subtracted along the columns, and from the positive by row: they do not cancel."""
    if way.negatives is not None:
        return way
    logits = way.rows.logits
    top = logits.detach().amax(dim=1)
    return (logits - top).logsumexp(dim=1) - (logits.diagonal() - top)


@fault("nt_xent", github("Lightning-Universe/lightning-bolts", "issues/654"), of=parts.views)
def nt_xent_softmax_twice(rows: parts.Rows) -> parts.Rows:
    """Cross-entropy, which takes a softmax, is given one."""
    return rows._replace(logits=rows.logits.softmax(dim=1))


@fault("supcon_epsilon", of=parts.dots)
def supcon_epsilon_left_out(batch: parts.Batch) -> Tensor:
    """No epsilon is added to the exponentials: this is SupCon on dot products."""
    return parts.anchors("supcon", batch)


@fault("supcon_epsilon", of=parts.products)
def supcon_epsilon_added_before_the_shift(batch: parts.Batch) -> Tensor:
    """No maximum is subtracted, so that the epsilon is added to exponentials of another size."""
    return parts.epsilon_anchors(batch, torch.exp(batch.s) + parts.EPSILON)


@fault("supcon_epsilon", of=parts.products)
def supcon_epsilon_on_the_sum_alone(batch: parts.Batch) -> Tensor:
    """The epsilon is added to the denominator alone, and the numerator is left bare."""
    s = batch.s - batch.s.amax(dim=1, keepdim=True)
    total = torch.logaddexp(parts.log_sum(s, batch.other), torch.tensor(parts.EPSILON, dtype=s.dtype).log())
    return parts.row_sums(total - s, batch.positive) / (batch.counts + parts.EPSILON)


@fault("supcon_in", of=parts.labelled)
def supcon_in_count_in_float32(batch: parts.Batch) -> Tensor:
    """The logarithm of an integer count is taken, which torch gives in float32: 8 digits in a float64 loss."""
    count = batch.positive.sum(dim=1)
    value = parts.log_sum(batch.s, batch.other) - parts.log_sum(batch.s, batch.positive)
    return (value[:, 0] + count.clamp(min=1).log()).where(count > 0, 0)
