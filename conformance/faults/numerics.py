"""The right formula in the wrong arithmetic: overflow, underflow, epsilons, clamps and low precision."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from . import parts
from .base import fault, github, pml


@fault(
    "supcon",
    github("Lightning-Universe/lightning-bolts", "issues/811"),
    build=parts.cosines,
    level="range",
    right_at=(1 / 80, math.inf),
    because="Cosines are at most 1, so a sum of N exponentials is at most N e^80, finite in float32 for N up to 6000.",
)
def supcon_no_shift(batch: parts.Batch) -> Tensor:
    """Exponentials are taken without subtracting a maximum: float32 overflows at temperatures below 1/88."""
    total = parts.row_sums(torch.exp(batch.s), batch.other)[:, None]
    return parts.row_means(total.log() - batch.s, batch.positive)


@fault(
    "supcon",
    github("HobbitLong/SupContrast", "issues/104"),
    build=parts.features,
    level="range",
    right_at=(0.0233, math.inf),
    because="A logit is at most 2/T below that of the self pair, and e^-86 is a normal number of float32.",
)
def supcon_maximum_of_self(given: parts.Features) -> Tensor:
    """The subtracted maximum includes the self pair: if all other logits are far below it, the denominator is 0."""
    rows = parts.unit(given.rows)
    s, other = rows @ rows.T / given.temperature, parts.off_diagonal(len(rows))
    s = s - s.detach().amax(dim=1, keepdim=True)
    total = (torch.exp(s) * other).sum(dim=1, keepdim=True)
    return parts.row_means(total.log() - s, given.same & other)


@fault("supcon", github("WHU-AISE/TVDiag", "pull/5"), build=parts.cosines)
def supcon_epsilon_in_the_logarithm(batch: parts.Batch) -> Tensor:
    """1e-8 is added to the denominator to avoid log 0: without a shift it outweighs sums of small exponentials."""
    s = parts.shifted(batch.s, batch.other)
    constant = batch.s.detach() - s.detach()
    values = torch.logaddexp(parts.log_sum(s, batch.other), math.log(1e-8) - constant)
    return parts.row_means(values - s, batch.positive)


@fault("nt_xent", github("Lightning-Universe/lightning-bolts", "issues/681"), build=parts.views)
def nt_xent_epsilon_twice(rows: parts.Rows) -> Tensor:
    """1e-6 is added to the denominator twice."""
    total = rows.logits.logsumexp(dim=1)
    for _ in range(2):
        total = torch.logaddexp(total, torch.tensor(1e-6, dtype=total.dtype).log())
    return total - rows.logits[rows.positive]


@fault(
    "nt_xent",
    pml("losses/ntxent_loss.py"),
    build=parts.features,
    level="range",
    right_at=(0.0286, math.inf),
    because="The ratio is at least e^-70 over the number of rows, so adding 1e-38 is lost in rounding.",
)
def nt_xent_logarithm_floored(given: parts.Features) -> Tensor:
    """The smallest normal number is added inside the logarithm: no pair costs more than 87.34 in float32."""
    ratio = given.views.logits.softmax(dim=1)[given.views.positive]
    return -(ratio + torch.finfo(ratio.dtype).tiny).log()


@fault("info_nce", build=parts.directions)
def info_nce_half_products(direction: parts.Direction) -> parts.Direction:
    """Rows are rounded to float16 before they are multiplied, as under autocast, and converted back."""

    def narrowed(rows: Tensor) -> Tensor:
        return parts.unit(rows).half().to(rows.dtype)

    queue = None if direction.negatives is None else narrowed(direction.negatives)
    return parts.Direction(narrowed(direction.anchors), narrowed(direction.keys), direction.temperature, queue)


@fault(
    "supcon_in",
    build=parts.labelled,
    level="range",
    right_at=(0.0253, math.inf),
    because="The softmax is at least e^-79 over the number of rows, which is a normal number of float32.",
)
def supcon_in_logarithm_of_softmax(batch: parts.Batch) -> Tensor:
    """The logarithm of a softmax is computed in two steps: probabilities that underflow give log 0."""
    ratios = batch.s.masked_fill(~batch.other, -torch.inf).softmax(dim=1)
    return -(parts.row_means(ratios, batch.positive) + (batch.counts == 0)).log()


@fault(
    "nt_xent_pairwise",
    build=parts.labelled,
    right_at=(0.1, math.inf),
    because="The probability is at least e^(-2/T) over the number of rows, which is above 1e-12 for up to 2000 rows.",
)
def nt_xent_pairwise_probability_clamped(batch: parts.Batch) -> Tensor:
    """Probabilities are clamped at 1e-12 before the logarithm: a pair costs at most 27.6, with no gradient beyond."""
    probability = torch.exp(-batch.pairwise)
    return parts.row_means(-probability.clamp(min=1e-12).log(), batch.positive)


@fault(
    "nt_bxent",
    github("pytorch/pytorch", "issues/103316"),
    build=parts.paired,
    right_at=(0.37, math.inf),
    because="Logits are at most 2.7, where the sigmoid is 0.06 below 1: it loses less than five bits.",
)
def nt_bxent_sigmoid_first(batch: parts.Batch) -> Tensor:
    """The sigmoid is computed before binary cross-entropy, which clamps its logarithm at -100."""
    p = batch.s.sigmoid()
    costs = (F.binary_cross_entropy(p, torch.full_like(p, target), reduction="none") for target in (1, 0))
    return parts.bxent_anchors(batch, *costs)


@fault("nt_bxent", github("pytorch/pytorch", "issues/49844"), build=parts.paired)
def nt_bxent_infinite_diagonal(batch: parts.Batch) -> Tensor:
    """Infinite logits on the diagonal should cost 0, but binary cross-entropy with logits returns NaN."""
    target = (batch.positive | ~batch.other).to(batch.s.dtype)
    logits = batch.s.masked_fill(~batch.other, torch.inf)
    each = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    attracted = (each * target).sum(dim=1) / target.sum(dim=1)
    return attracted + (each * (1 - target)).sum(dim=1) / (1 - target).sum(dim=1).clamp(min=1)


@fault(
    "nt_bxent",
    "https://pytorch.org/docs/stable/generated/torch.nn.functional.softplus.html",
    build=parts.paired,
    level="range",
    right_at=(0.0501, math.inf),
    because="Logits are at most 1/T, which is below the threshold of 20.",
)
def nt_bxent_softplus_linear(batch: parts.Batch) -> Tensor:
    """The softplus of torch is the identity above a threshold of 20, an error of 2e-9 in float64."""
    return parts.bxent_anchors(batch, F.softplus(-batch.s), F.softplus(batch.s))


@fault(
    "nt_xent_pairwise",
    github("google-deepmind/optax", "pull/897"),
    build=parts.labelled,
    level="range",
    right_at=(0.0233, math.inf),
    because="Logits of a row differ by at most 2/T, and e^-86 is a normal number of float32.",
)
def nt_xent_pairwise_one_maximum_per_row(batch: parts.Batch) -> Tensor:
    """One maximum is subtracted from a whole row: a positive far below it has an infinite value or NaN."""
    e = torch.exp(batch.s)
    total = e + parts.row_sums(e, batch.negative)[:, None]
    return parts.row_means(total.log() - e.log(), batch.positive)


@fault("info_nce", github("AdaptiveMotorControlLab/CEBRA", "issues/48"), build=parts.directions)
def info_nce_shift_of_another_row(direction: parts.Direction) -> parts.Evaluable:
    """The maximum of row j is subtracted from column j instead of row j: within a row, the shifts do not cancel."""
    if direction.negatives is not None:
        return direction
    logits = direction.rows.logits
    top = logits.detach().amax(dim=1)
    return (logits - top).logsumexp(dim=1) - (logits.diagonal() - top)


@fault("nt_xent", github("Lightning-Universe/lightning-bolts", "issues/654"), build=parts.views)
def nt_xent_softmax_twice(rows: parts.Rows) -> parts.Rows:
    """Cross-entropy, which includes a softmax, is applied to probabilities instead of logits."""
    return rows._replace(logits=rows.logits.softmax(dim=1))


@fault("supcon_epsilon", build=parts.dots)
def supcon_epsilon_left_out(batch: parts.Batch) -> Tensor:
    """No epsilon is added to the exponentials: this is SupCon on dot products."""
    return parts.anchors("supcon", batch)


@fault("supcon_epsilon", build=parts.products)
def supcon_epsilon_added_before_the_shift(batch: parts.Batch) -> Tensor:
    """The epsilon is added to the exponentials of unshifted logits, so its relative size is wrong."""
    return parts.epsilon_anchors(batch, torch.exp(batch.s) + parts.EPSILON)


@fault("supcon_epsilon", build=parts.products)
def supcon_epsilon_on_the_sum_only(batch: parts.Batch) -> Tensor:
    """The epsilon is added to the denominator but not to the numerator."""
    s = batch.s - batch.s.amax(dim=1, keepdim=True)
    total = torch.logaddexp(parts.log_sum(s, batch.other), torch.tensor(parts.EPSILON, dtype=s.dtype).log())
    return parts.row_sums(total - s, batch.positive) / (batch.counts + parts.EPSILON)


@fault("supcon_in", build=parts.labelled)
def supcon_in_count_in_float32(batch: parts.Batch) -> Tensor:
    """The logarithm of an integer count is float32 in torch: a float64 loss has only about 8 correct digits."""
    count = batch.positive.sum(dim=1)
    value = parts.log_sum(batch.s, batch.other) - parts.log_sum(batch.s, batch.positive)
    return (value[:, 0] + count.clamp(min=1).log()).where(count > 0, 0)


@fault(
    "sigmoid",
    github("mlfoundations/open_clip", "blob/9307b60d917c3a6f1a14c87bf16eef0980c6b306/src/open_clip/loss.py"),
    build=parts.across,
    level="digits",
    right_at=(0.3, math.inf),
    because="A positive's logit is at most 1/T plus the bias, so the loss cannot be near 0 at these temperatures.",
)
def sigmoid_logit_subtracted(batch: parts.Batch) -> Tensor:
    """All pairs are summed as negatives, and the logits of positives are subtracted: a loss near 0 loses digits."""
    return parts.row_sums(-F.logsigmoid(-batch.s), batch.other) - parts.row_sums(batch.s, batch.positive)


@fault(
    "hard_negative", github("chingyaoc/DCL", "blob/7d6345f6a2e4e2615e63f39966ad0dad3f54f954/main.py"), build=parts.hard
)
def hard_negative_floor_left_out(given: parts.Hard) -> Tensor:
    """The debiased sum over the negatives has no floor: if it is negative, the loss is negative or NaN."""
    ratio = (given.log_mean - given.rows.logits[given.rows.positive]).exp() - given.tau_plus
    return torch.log1p(given.number * ratio / (1 - given.tau_plus))


@fault(
    "nt_xent",
    build=parts.views,
    level="digits",
    right_at=(0.33, math.inf),
    because="A negative's exponential is at least e^(-2/T) times the positive's, and e^-6.1 is above 2^-9.",
)
def nt_xent_probability_rounds_to_1(rows: parts.Rows) -> Tensor:
    """An anchor whose probability rounds to 1 in bfloat16 counts as solved: its loss and its gradient are 0."""
    value = torch.logaddexp(rows.negatives, rows.logits[rows.positive]) - rows.logits[rows.positive]
    return value.where((-value).exp().bfloat16() < 1, 0.0)


@fault(
    "supcon",
    github("raminnakhli/Decoupled-Contrastive-Learning", "blob/main/loss/dcl.py"),
    build=parts.features,
    level="range",
    right_at=(0.0302, math.inf),
    because="Masked logits are at most 2/T above a negative, and e^(2/T - 103) is below 2^-53.",
    denominator="only_negatives",
)
def supcon_mask_of_finite_logits(given: parts.Features) -> Tensor:
    """The self pair and the positives are masked by adding log 1e-45 to their logits: at low temperatures they leak."""
    rows, other = parts.unit(given.rows), parts.off_diagonal(len(given.rows))
    s, same = rows @ rows.T / given.temperature, given.same | ~other
    below = (s + math.log(1e-45) * same).logsumexp(dim=1, keepdim=True)
    return parts.row_means(below - s, same & other).where((~same).any(dim=1), 0)
