"""Correct and wrong losses, composed of parts.

A ``Variant`` names one choice for each part: how positives are read, the similarity, how the temperature is applied,
the denominator, the guard (an epsilon against log 0), the form (how the pairs of an anchor become a value), and where
the gradient flows.

For logits s_ij, the members A(i) of anchor i (its positives and negatives) and its positives P(i),

    v_ip = log D_ip - s_ip                  the cost of a pair; ``denominator`` defines D_ip
    L_i  = mean over p in P(i) of v_ip      or another ``form``
    L    = sum over anchors of L_i, divided by a count (``COUNTS``)

For losses that cannot be described by parts, ``Loss.baseline`` is evaluated instead.

Each part has a table of choices. The keys are short names or descriptions of what is wrong. ``words_of`` describes the
short names. In shapes, M is the number of rows, and T the number of temperatures.

The code uses neither ``reference`` nor ``fast``, so that agreement with them is evidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from operator import attrgetter
from typing import Any

import torch

from ..suite.catalogue import LOSSES, Loss
from .positives import HARD, HARD_IGNORED, POSITIVES, QUEUE, QUEUE_ADDED, QUEUE_IGNORED, RIGHT_POSITIVES, Setting, same

Tensor = torch.Tensor

Table = Mapping[str, Callable[..., Any]]
"""The choices for one part: name and implementation."""


# Similarities: functions of (a, b, setting). They return the similarities [M, M] of the rows a and b.


def _unit(rows: Tensor, p: int = 2) -> Tensor:
    return rows.div(rows.norm(p, dim=1, keepdim=True))


def _over_views(a: Tensor, b: Tensor, setting: Setting) -> Tensor:
    """Return dot products of rows, after each column is divided by its norm over the views of the item."""
    alike = same(setting.items).to(a.dtype)
    return (a / (alike @ a**2).sqrt()) @ (b / (alike @ b**2).sqrt()).T


_distances = partial(torch.cdist, compute_mode="donot_use_mm_for_euclid_dist")


def _dot_after(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, Setting], Tensor]:
    return lambda a, b, s: change(a) @ change(b).T


QUEUE_NOT_NORMALISED = "the negatives that are passed are not normalised"

ROUNDED: Mapping[str, tuple[str, bool]] = {
    f"{products} are computed{also} in {dtype}": (dtype, bool(also))
    for dtype in ("bfloat16", "float16")
    for products in ("cosines", "dot products")
    for also in ("", " and divided by the temperature")
}
"""Similarities that are rounded to 16 bits: the dtype, and whether the logits are rounded, too."""


def _products_in(dtype: torch.dtype, change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, Setting], Tensor]:
    return lambda a, b, s: (change(a).to(dtype) @ change(b).to(dtype).T).double()


SIMILARITIES: Table = {
    "cosine": _dot_after(_unit),
    "dot": lambda a, b, s: a @ b.T,
    QUEUE_NOT_NORMALISED: lambda a, b, s: _unit(a) @ torch.where((s.items < 0)[:, None], b, _unit(b)).T,
    "rows are divided by norms over the batch (dim 0), not by their own norms": _dot_after(lambda z: z / z.norm(dim=0)),
    "rows are divided by norms over the views of an item, not by their own norms": _over_views,
    "only the anchor's row is normalised": lambda a, b, s: _unit(a) @ b.T,
    "only the row that the anchor is compared with is normalised": lambda a, b, s: a @ _unit(b).T,
    "rows are divided by their squared norm": _dot_after(lambda z: z / (z**2).sum(dim=1, keepdim=True)),
    "all rows are divided by one norm, that of the whole batch": _dot_after(lambda z: z / z.norm()),
    "rows are divided by their L1 norm, not by their L2 norm": _dot_after(partial(_unit, p=1)),
    "a softmax is applied to the rows": _dot_after(lambda z: _unit(z.softmax(dim=1))),
    "the sign of the cosine is wrong: similar rows repel each other": lambda a, b, s: -(_unit(a) @ _unit(b).T),
    "the sign of the dot products is wrong": lambda a, b, s: -(a @ b.T),
    "the absolute value of the cosine is used": lambda a, b, s: (_unit(a) @ _unit(b).T).abs(),
    "negative cosines are set to 0": lambda a, b, s: (_unit(a) @ _unit(b).T).clamp(min=0),
    "the cosine is squared": lambda a, b, s: (_unit(a) @ _unit(b).T).square(),
    "the similarity is minus the Euclidean distance": lambda a, b, s: -_distances(a, b),
    "the similarity is minus the distance of the normalised rows": lambda a, b, s: -_distances(_unit(a), _unit(b)),
    "the similarity is minus the squared Euclidean distance": lambda a, b, s: -(_distances(a, b) ** 2),
    **{
        words: _products_in(getattr(torch, dtype), _unit if words.startswith("cosines") else lambda z: z)
        for words, (dtype, _) in ROUNDED.items()
    },
}

TEMPERINGS: Table = {
    "divided": lambda t: t,
    "the temperature is applied twice": lambda t: t * t,
    "logits are multiplied by the temperature instead of divided": lambda t: 1 / t,
    "logits are divided by the square root of the temperature": torch.sqrt,
    "logits are divided by half the temperature": lambda t: t / 2,
    "logits are divided by twice the temperature": lambda t: t * 2,
    "the temperature has no effect": torch.ones_like,
}
"""Functions of the temperature that return the divisor of the similarities."""

_UNTEMPERED = "the temperature is not applied to the positive"
_UNTEMPERED_ABOVE = "the temperature is not applied to the numerator"

NUMERATORS: Table = {
    "same": lambda z, s, t: (s, s),
    _UNTEMPERED: lambda z, s, t: (z, s),
    _UNTEMPERED_ABOVE: lambda z, s, t: (z, s),
    "the temperature is not applied in the denominator": lambda z, s, t: (s, z),
    "the temperature is applied twice to the positive": lambda z, s, t: (s / t, s),
}
"""Functions of (similarities, logits, divisor). They return the log numerator, and the logits of the denominator."""


# Denominators: functions of (logits, columns, setting, divisor). They return the logarithm of a sum of exponentials.


def log_sum(s: Tensor, columns: Tensor, *_: Any) -> Tensor:
    """[T, M, 1], the logarithm of the sum of exponentials over the columns; -inf for an empty sum."""
    some = columns.any(dim=1, keepdim=True)
    inner = s.masked_fill(~columns & some, -math.inf)
    return torch.logsumexp(inner, dim=2, keepdim=True).masked_fill(~some, -math.inf)


def _over_the_anchors(s: Tensor, columns: Tensor, setting: Setting, divisor: Tensor) -> Tensor:
    columns = (columns & setting.anchors[:, None]).T
    return log_sum(s.transpose(1, 2), columns).transpose(1, 2).expand_as(s)


def _pooled(s: Tensor, columns: Tensor, setting: Setting, divisor: Tensor) -> Tensor:
    columns = columns & setting.anchors[:, None]
    return torch.logsumexp(s.masked_fill(~columns, -math.inf).flatten(1), dim=1)[:, None, None]


def _largest(s: Tensor, columns: Tensor, *_: Any) -> Tensor:
    return s.masked_fill(~columns, -math.inf).amax(dim=2, keepdim=True)


def _log_mean(s: Tensor, columns: Tensor, *_: Any) -> Tensor:
    return log_sum(s, columns) - columns.sum(dim=1).clamp(min=1).double().log()[:, None]


def _less_own(s: Tensor, columns: Tensor, setting: Setting, divisor: Tensor, kind: str = "exact") -> Tensor:
    below, own = log_sum(s, columns), 1 / divisor
    taken = {"exact": own, "float32": own.exp().float().double().log(), "e": torch.ones_like(own)}[kind]
    return below + torch.log1p(-torch.exp(taken - below))


@dataclass(frozen=True)
class Denominator:
    """The exponentials in D_ip.

    Attributes:
        words: what is wrong; empty for the denominators of the catalogue.
        columns: returns the columns in the sum, bool [M, M].
        with_positive: 1 if e^s_ip is added to the sum, -1 if it is subtracted, otherwise 0.
        own: whether the self pair is in the sum.
        leaks: returns the number of terms exp(0) that are added, [M]; None if there are none.
        combine: returns the logarithm of the sum, or what is computed instead.
    """

    words: str
    columns: Callable[[Setting], Tensor]
    with_positive: int = 0
    own: bool = False
    leaks: Callable[[Setting], Tensor] | None = None
    combine: Callable[[Tensor, Tensor, Setting, Tensor], Tensor] = log_sum

    def summed(self, setting: Setting) -> Tensor:
        """Bool [M, M], the columns in the sum, self pairs included."""
        columns = self.columns(setting)
        return columns | setting.own if self.own else columns

    def terms(self, setting: Setting) -> Tensor:
        """[M], the number of exponentials in D_ip from the anchor's row of similarities.

        Other rows, over which "axis" and "batch" sum, do not count. The self pair counts even if "subtract" removes it.
        """
        summed = 1 if self.combine is _largest else self.summed(setting).sum(dim=1)
        none = torch.zeros(len(setting.rows), dtype=torch.float64)
        return summed + self.with_positive + (self.leaks(setting) if self.leaks else none)


_member, _negative = attrgetter("member"), attrgetter("negative")


def _one(s: Setting) -> Tensor:
    return torch.ones(len(s.rows), dtype=torch.float64)


def _modified(name: str, right: Denominator) -> dict[str, Denominator]:
    """Return a correct denominator, and copies with one mistake each."""
    leak = "exp(0) of {} leaks into the denominator"
    mean = "contains the mean of the negatives, not their sum" if right.with_positive else "is a mean, not a sum"
    found = {
        name: right,
        f"{name}, self": replace(right, words="the anchor itself is kept in the denominator", own=True),
        f"{name}, leak": replace(right, words=leak.format("the diagonal"), leaks=_one),
        f"{name}, mean": replace(right, words=f"the denominator {mean}", combine=_log_mean),
    }
    if right.columns is _negative:
        words = leak.format("every masked entry")
        found[f"{name}, leaks"] = replace(right, words=words, leaks=lambda s: (~s.negative).sum(dim=1).double())
    return found


RIGHT_DENOMINATORS = ("all", "one_positive", "only_negatives")
"""The denominators of the catalogue."""

DENOMINATORS: Mapping[str, Denominator] = {
    **_modified("all", Denominator("", _member)),
    **_modified("one_positive", Denominator("", _negative, 1)),
    **_modified("only_negatives", Denominator("", _negative)),
    "all, again": Denominator("the positive is in the denominator twice", _member, 1),
    "all, decoupled": Denominator("the positive is missing from its own denominator", _member, -1),
    "positives": Denominator("the negatives are missing from the denominator", lambda s: s.positive),
    "everything": Denominator("the denominator sums over every row of the batch", lambda s: torch.ones_like(s.member)),
    "axis": Denominator("the softmax is taken over the anchors, the wrong axis", _member, combine=_over_the_anchors),
    "batch": Denominator("the denominator sums over the pairs of all anchors", _member, combine=_pooled),
    "batch, negatives": Denominator("the denominator sums the negatives of all anchors", _negative, 1, combine=_pooled),
    "subtract": Denominator("e^(1/temperature) is subtracted to remove the anchor", _member, 0, True, None, _less_own),
    "subtract, float32": Denominator(
        "e^(1/temperature), rounded to float32, is subtracted to remove the anchor, so that digits are lost",
        *(_member, 0, True, None),
        partial(_less_own, kind="float32"),
    ),
    "subtract, e": Denominator(
        "e is subtracted to remove the anchor, not e^(1/temperature)",
        *(_member, 0, True, None),
        partial(_less_own, kind="e"),
    ),
    "largest": Denominator("only the hardest negative is in the denominator", _negative, 1, combine=_largest),
    "one": Denominator("there is no denominator", lambda s: torch.zeros_like(s.member), leaks=_one),
}
"""Denominators by name. "all, self" is the correct denominator "all" with the mistake "self"."""


# Guards: epsilons against log 0

_GUARDED = {
    "ratio": "to the ratio within the logarithm",
    "below": "to the denominator",
    "both": "to the numerator and to the denominator",
    "shifted": "to the denominator after the row's maximum, self pair included, is subtracted",
    "others": "to the denominator after the row's maximum is subtracted",
    "above": "to the numerator after the row's maximum, self pair included, is subtracted",
    "each": "to every exponential and to the number of positives",
    "twice": "to the denominator and again to the ratio",
    "count": "to the number of positives",
    "terms": "to every exponential, but not to the number of positives",
}
_EPSILONS = ("1e-12", "1e-10", "1e-08", "1e-07", "1e-06", "1e-05", "1e-04", "1e-03")


def _guards(kinds: Iterable[str], sizes: Iterable[str]) -> dict[str, str]:
    sizes = tuple(sizes)
    return {f"{kind} {size}": f"an epsilon of {size} is added {_GUARDED[kind]}" for kind in kinds for size in sizes}


GUARDS: Mapping[str, str] = _guards(_GUARDED, _EPSILONS)
"""Descriptions of one epsilon and the place where it is added."""

TWO_GUARDS: Mapping[str, str] = {
    f"both {above} {below}": f"an epsilon of {above} is added to the numerator"
    + (f", and one of {below} to the denominator" if below != "0" else "")
    for above, below in product(_EPSILONS, (*_EPSILONS, "0"))
    if above != below
}
"""Descriptions of different epsilons for the numerator and the denominator (possibly 0)."""

TINY_GUARDS: Mapping[str, str] = _guards(("both", "below", "ratio"), ("1e-20", "1e-24", "1e-25", "1e-30"))
"""Guards with epsilons that change only extreme logits.

Under cosine similarity at temperature 0.1, logits are at least -10. In float64, 1e-20 is only 1.5 units in the last
place of e^-10."""


# Forms: functions of ``Pairs``. They return the values of the anchors, [T, M].

_LEAK_SUM = "exp(0) of the diagonal leaks into the numerator, which is not divided by |P|"


def _smoothed() -> Table:
    """Return cross-entropies with ``label_smoothing``; the self pairs may be columns whose logits are ``mask``."""

    def value(smoothing: float, mask: float, x: Any) -> Any:
        masked = (x.below[..., 0] - mask) * (mask < 0)
        of_columns = (x.total(x.cost, x.setting.member) + masked) / (x.members + (mask < 0))
        return (1 - smoothing) * x.sum / x.n + smoothing * of_columns

    words = "the targets of the cross-entropy are smoothed: label_smoothing={:g}"
    also = f"{words}, which also counts the self pairs, masked with {{:g}}"
    known = (0.1, 0.0), (0.05, 0.0), (0.2, 0.0), (0.1, -1e4), (0.1, -1e9)
    return {(also if mask else words).format(one, mask): partial(value, one, mask) for one, mask in known}


_OUTSIDE: Table = {
    "mean": lambda x: x.sum / x.n,
    "sum": lambda x: x.sum,
    "the sum over the positives is divided by the square of their number": lambda x: x.sum / x.n**2,
    "the sum over the positives is divided by their number plus 1": lambda x: x.sum / (x.n + 1),
    "the sum over the positives is divided by the number of other rows": lambda x: x.sum / x.members,
    "the values of the pairs are multiplied, not averaged": lambda x: x.cost.where(x.positive, 1.0).prod(dim=2),
    "the log of the denominator is counted only once": lambda x: x.total(x.below) / x.n**2 - x.total(x.above) / x.n,
    "only the hardest positive is used": lambda x: x.cost.masked_fill(~x.positive, -math.inf).amax(dim=2),
    "only the easiest positive is used": lambda x: x.cost.masked_fill(~x.positive, math.inf).amin(dim=2),
    "the sum over the positives is multiplied by their number": lambda x: x.sum * x.n,
    "only the similarities of the positives are averaged; there is no denominator": lambda x: -x.total(x.above) / x.n,
    "the sum runs over all other rows, not over the positives": lambda x: x.total(x.cost, x.setting.member) / x.members,
    **_smoothed(),
}
_INSIDE: Table = {
    "inside": lambda x: x.n.log() - x.log_ratios,
    "inside, summed": lambda x: -x.log_ratios,
    "the sum of the ratios is divided by the number of positives plus 1": lambda x: (x.n + 1).log() - x.log_ratios,
    "exp(0) of the diagonal leaks into the numerator": lambda x: x.n.log() - x.leaking_log_ratios,
    _LEAK_SUM: lambda x: -x.leaking_log_ratios,
    "pooled": lambda x: x.pooled(),
    "the logarithm is missing": lambda x: -x.log_ratios.exp() / x.n,
}
_BINARY: Table = {
    "binary": lambda x: x.attract / (x.p + 1) + x.repel / x.q,
    "the diagonal is not counted among the positives": lambda x: x.attract / x.p.clamp(min=1) + x.repel / x.q,
    "the diagonal is a positive with a loss of its own": lambda x: (x.attract + x.own(-1)) / (x.p + 1) + x.repel / x.q,
    "the diagonal is counted among the negatives": (
        lambda x: x.attract / x.p.clamp(min=1) + (x.repel + x.own(1)) / (x.negatives + 1)
    ),
    "positives and negatives are summed, not averaged separately": lambda x: x.attract + x.repel,
    "positives and negatives are averaged together": lambda x: (x.attract + x.repel) / (x.p + x.negatives).clamp(min=1),
    "the negatives are missing": lambda x: x.attract / (x.p + 1),
    "the positives are missing": lambda x: x.repel / x.q,
    "the negatives are summed, not averaged": lambda x: x.attract / (x.p + 1) + x.repel,
    "the positives are summed, not averaged": lambda x: x.attract + x.repel / x.q,
    "the negatives cost -log sigmoid((1 - s)/temperature), not -log(1 - sigmoid(s/temperature))": lambda x: (
        x.attract / (x.p + 1) + x.softplus((x.similarities - 1) / x.divisor, x.setting.negative) / x.q
    ),
    "the sign of the logits is wrong": (
        lambda x: x.softplus(x.above, x.positive) / (x.p + 1) + x.softplus(-x.above, x.setting.negative) / x.q
    ),
}
_SIGMOID: Table = {
    "sigmoid": lambda x: x.attract + x.repel,
    "the bias is subtracted, not added": lambda x: x.pairs_at(x.logits - 2 * x.bias),
    "the bias has no effect": lambda x: x.pairs_at(x.logits - x.bias),
    "the bias is divided by the temperature": lambda x: x.pairs_at((x.similarities + x.bias) / x.divisor),
    "the sign of all logits is wrong": lambda x: x.pairs_at(-x.logits),
    "only the positives are summed": lambda x: x.attract,
    "only the negatives are summed": lambda x: x.repel,
    "the sums over the positives and over the negatives are averaged separately": (
        lambda x: x.attract / x.p.clamp(min=1) + x.repel / x.q
    ),
    "the sum over the pairs is divided by the square of their number": lambda x: (x.attract + x.repel) / x.members**2,
}
_MASS: Table = {
    "mass": lambda x: x.against(x.log_mean),
    "the weights of the negatives are divided by the mean of e^s, not by their own mean": (
        lambda x: x.against(x.log_negatives(1 + x.beta) - x.log_negatives(1.0))
    ),
    "the weights of the negatives are beta e^s, not e^(beta s)": (
        lambda x: x.against(torch.tensor(x.beta).double().log() + x.log_negatives(2.0) - x.log_negatives(1.0))
    ),
    "the weights of the negatives are not divided by their mean": (
        lambda x: x.against(x.log_negatives(1 + x.beta) - x.log_number)
    ),
    "the weights of the negatives are e^(beta similarity), without the temperature": lambda x: x.against(
        log_sum(x.logits + x.beta * x.similarities, x.setting.negative)[..., 0]
        - log_sum((x.beta * x.similarities).expand_as(x.logits), x.setting.negative)[..., 0]
    ),
    "all negatives have the same weight, whatever beta is": lambda x: x.against(x.log_negatives(1.0) - x.log_number),
    "the positives hidden among the negatives are not multiplied by the number of negatives": (
        lambda x: x.against(x.log_mean, hidden=x.tau_plus / x.q)
    ),
    "the positives hidden among the negatives are not subtracted": lambda x: x.against(x.log_mean, hidden=0.0),
    "the mass of the negatives is not divided by 1 - tau_plus": lambda x: x.against(x.log_mean, divisor=1.0),
    "the number of negatives is N - 1, which includes the positive": lambda x: x.against(x.log_mean, more=1),
    "the floor of the mass is that of one negative": lambda x: x.against(x.log_mean, floor=-x.log_number),
    "the mass of the negatives has no floor but 0": lambda x: x.against(x.log_mean, floor=-math.inf),
}
_WEIGHTED: Table = {
    "weighted": lambda x: x.decoupled(2 - x.rows * x.closeness.softmax(dim=-1)),
    "the softmax of the weights is not multiplied by the number of items": (
        lambda x: x.decoupled(2 - 2 * x.closeness.softmax(dim=-1))
    ),
    "the softmax of the weights is multiplied by the number of rows, twice that of items": (
        lambda x: x.decoupled(2 - 2 * x.rows * x.closeness.softmax(dim=-1))
    ),
    "the softmax of the weights runs over the columns of each row, not over the items": lambda x: x.decoupled(
        2 - x.rows / 2 * (x.closeness - log_sum(x.cosines[None] / x.sigma, x.setting.member)[..., 0]).exp()
    ),
    "the weights are those of the logits, not of the cosines": (
        lambda x: x.decoupled(2 - x.rows * (x.closeness / x.divisor[..., 0]).softmax(dim=-1))
    ),
    "the cosines of the weights are multiplied by sigma, not divided": (
        lambda x: x.decoupled(2 - x.rows * (x.closeness * x.sigma**2).softmax(dim=-1))
    ),
    "the weights are N softmax, not 2 - N softmax": lambda x: x.decoupled(x.rows * x.closeness.softmax(dim=-1)),
    "negative weights are raised to 0": (
        lambda x: x.decoupled((2 - x.rows * x.closeness.softmax(dim=-1)).clamp(min=0.0))
    ),
    "the positive is left in the denominator": lambda x: x.decoupled(
        2 - x.rows * x.closeness.softmax(dim=-1), log_sum(x.logits, x.setting.member)[..., 0]
    ),
    "the weight multiplies the whole value, not the positive term alone": lambda x: (
        (2 - x.rows * x.closeness.softmax(dim=-1)) * x.decoupled(1.0)
    ),
}
FORMS: Table = {**_OUTSIDE, **_INSIDE, **_BINARY, **_SIGMOID, **_MASS, **_WEIGHTED}

FLOWS: Mapping[str, str] = {
    "whole": "",
    "columns": "no gradient flows into the rows that anchors are contrasted with",
    "anchors": "no gradient flows into the anchors",
    "denominator": "no gradient flows through the denominator",
    "numerator": "no gradient flows through the positives",
    "negatives": "no gradient flows through the negatives",
    "weights": "no gradient flows through the weights of the negatives",
    "norm": "no gradient flows through the norms",
    "first view": "no gradient flows into the first view",
    "second view": "no gradient flows into the second view",
    "maximum": "no gradient flows through the row's maximum, though the epsilon makes the loss depend on it",
}

NAMES: Mapping[str, str] = {
    **GUARDS,
    **TWO_GUARDS,
    **TINY_GUARDS,
    **FLOWS,
    **dict.fromkeys((*RIGHT_POSITIVES, "cosine", "dot", "divided", "same", "mean", "inside", "inside, summed"), ""),
    **dict.fromkeys(("binary", "sigmoid", "mass", "weighted"), ""),
    "sum": "the sum over the positives is not divided by their number",
    "mean_pairs": "the mean is over the positive pairs",
    "pooled": "minus the logarithm of the mean over all anchors, not the mean of minus the logarithm",
}
"""What is wrong about parts with a short name, or "" for correct parts.

"mean_pairs" and the guard of supcon_epsilon are correct for some losses, but have a description."""


def words_of(part: str) -> str:
    """Return what is wrong about a part, or "" for parts that are correct for some loss (exceptions: ``NAMES``)."""
    return DENOMINATORS[part].words if part in DENOMINATORS else NAMES.get(part, part)


def weights_words(a_to_b: float, b_to_a: float, right: Sequence[float]) -> str:
    """Describe the weights of the two directions; ``right`` are the right ones."""
    required = "1/2 each" if right[0] == right[1] else f"{right[0]:.6g} and {right[1]:.6g}"
    return f"the directions a_to_b and b_to_a have the weights {a_to_b:.6g} and {b_to_a:.6g}, not {required}"


REDUCED_BY = ("reduction", "no_positive", "no_negative", "weights_divisor", "zero_row")
"""Options that are not part of a variant."""


@dataclass(frozen=True)
class Variant:
    """A loss of the catalogue with its options, or a modification of it.

    Attributes:
        loss: its name in the catalogue.
        options: the options that differ from their defaults, except ``REDUCED_BY``; the direction, if not "both".
        share: the first of ``direction_weights``, for a_to_b. The weights add up to 1.

    The other attributes name the parts: keys of ``POSITIVES``, ``SIMILARITIES``, ``TEMPERINGS``, and so on.
    """

    loss: str
    options: tuple[tuple[str, Any], ...] = ()
    positives: str = "meant"
    similarity: str = "cosine"
    tempering: str = "divided"
    numerator: str = "same"
    denominator: str = "all"
    guard: str = ""
    form: str = "mean"
    flow: str = "whole"
    share: float = 0.5

    @property
    def entry(self) -> Loss:
        """The catalogue's entry of the loss."""
        return LOSSES[self.loss]

    @property
    def in_parts(self) -> bool:
        """Whether parts describe the loss; otherwise its baseline is evaluated."""
        return bool(self.entry.variant)

    def mean_of(self, reduction: str) -> float:
        """Return a factor of the divisor: 1/2 if the weighted means of both towers are added."""
        return 0.5 if reduction == "mean" and self.share != 0.5 else 1.0

    @property
    def binary(self) -> bool:
        """Whether the loss classifies every pair as positive or negative, without a softmax."""
        return self.form in _BINARY or self.form in _SIGMOID

    @property
    def by_form(self) -> bool:
        """Whether only the form varies, because the loss does not combine numerators, denominators and guards."""
        return self.binary or self.form in _MASS or self.form in _WEIGHTED

    @cached_property
    def numbers(self) -> tuple[float, ...]:
        """The options that are numbers or flags and change the pairs; 0 if the loss does not have them."""
        names = ("bias", "tau_plus", "beta", "sigma", "detach_weights", "hardness_strength")
        return tuple(float(self.number(name)) for name in names)

    def number(self, name: str) -> float:
        """Return a numeric option; 0 if the loss does not have it."""
        return float(dict(self.options).get(name, self.entry.keywords.get(name, 0.0)))

    @property
    def takes_guard(self) -> bool:
        """Whether a guard can be added to the loss."""
        return self.in_parts and not self.by_form and not self.guard

    @cached_property
    def pair_parts(self) -> tuple[str | bool, ...]:
        """The parts on which ``Pairs`` depends."""
        names = ("similarity", "tempering", "numerator", "denominator", "guard", "flow", "by_form", "numbers")
        return tuple(getattr(self, name) for name in names)

    def words(self) -> list[str]:
        """Return what is wrong: one description for each part that no loss of the catalogue has."""
        guard = "" if self.guard in [loss.variant.get("guard") for loss in LOSSES.values()] else self.guard
        parts = (self.positives, self.similarity, self.tempering, self.numerator, self.denominator)
        return list(filter(None, map(words_of, (*parts, guard, self.form, self.flow))))

    def describe(self, **reduced: str) -> str:
        """Return the loss, its options and those of ``reduced`` that it has, and what is wrong, in one line."""
        choices = {"base_temperature": (None, reduced.get("base_temperature")), **self.entry.choices}
        more = [(name, value) for name, value in reduced.items() if value in choices.get(name, ())[1:]]
        chosen = ", ".join(f"{name}={value}" for name, value in (*self.options, *more))
        wrong = "; ".join(self.words())
        return self.loss + (f" with {chosen}" if chosen else "") + (f"; but {wrong}" if wrong else "")


def variant_of(loss: Loss, options: Mapping[str, Any]) -> Variant:
    """Return a loss of the catalogue as a variant.

    ``options`` contains the options that differ from their defaults, and the direction if it is not "both".
    """
    scalars = [name for name in loss.scalars if name != "base_temperature"]
    own = dict.fromkeys(name for name in (*scalars, *loss.formula_options) if name not in REDUCED_BY)
    usual = {name: loss.default(name) for name in loss.keywords}
    given = {**usual, **options}
    chosen = tuple((name, given[name]) for name in own if given[name] != usual[name])
    named = ("similarity", "denominator") if loss.variant else ("similarity",)
    parts: dict[str, Any] = {**loss.variant, **{name: given[name] for name in named if name in given}}
    if given.get("inside_reduction") == "sum":
        parts["form"] = "inside, summed"
    return Variant(loss.name, chosen, **parts)


class Evaluation:
    """The values of variants on one batch, at one or more temperatures. Shared parts are computed once.

    Args:
        setting: the batch, after the positives are read (possibly wrongly).
        temperature: [T], or one number.
    """

    def __init__(self, setting: Setting, temperature: Tensor | float) -> None:
        self.setting = setting
        self.temperature = torch.as_tensor(temperature, dtype=torch.float64).reshape(-1, 1, 1)
        self._known: dict[tuple[str, ...], Tensor] = {}
        self._latest: tuple[tuple[Any, ...], Pairs] | None = None

    def pairs_of(self, variant: Variant) -> Pairs:
        """Return the pairs of a variant. The latest are cached, because the next variant often has the same pairs."""
        if not variant.in_parts:
            return Pairs(self, variant)
        key = variant.pair_parts
        if not self._latest or self._latest[0] != key:
            self._latest = key, Pairs(self, variant)
        return self._latest[1]

    def once(self, make: Callable[[], Tensor], variant: Variant, *parts: str) -> Tensor:
        """Return ``make()``, cached by the named parts of the variant."""
        key = (make.__name__, *(getattr(variant, part) for part in parts))
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def anchors(self, variant: Variant) -> Tensor:
        """[T, M], the value of every anchor; 0 for rows outside ``Pairs.some``.

        For the form "pooled", the first anchor has the value of the whole batch, and the other anchors have 0.
        """
        pairs = self.pairs_of(variant)
        each = FORMS[variant.form](pairs) if variant.in_parts else pairs.baseline()
        if variant.share != 0.5:
            first = self.setting.first_half.double()
            each = each * (variant.share * first + (1 - variant.share) * (1 - first))
        return torch.where(pairs.some, each, 0.0)

    def loss(self, variant: Variant, reduction: str = "mean", policy: str = "zero") -> Tensor:
        """[K], the loss at the first temperature.

        Args:
            variant: the variant.
            reduction: a key of ``COUNTS`` (one value), "none" (one value per counted anchor) or "none_pairs" (one value
                per pair; no values for forms other than "mean", "sum" and "sigmoid").
            policy: one of ``POLICIES``.
        """
        setting, each = self.setting, self.anchors(variant)[0]
        if reduction == "none_pairs":
            return self.pairs_of(variant).each(setting.anchors)
        if variant.form in _SIGMOID:
            reduction = {"mean_pairs": ALL_PAIRS, "sum_pairs": "sum"}.get(reduction, reduction)
        # Reductions over pairs weight each anchor by the number of its positives.
        each = each * setting.counts if reduction in ("mean_pairs", "sum_pairs") else each
        empty = setting.anchors & (setting.counts == 0)
        counted = setting.anchors & ~empty if policy == "drop" else setting.anchors
        values = (each.masked_fill(empty, math.nan) if policy == "nan" else each)[counted]
        if reduction == "none":
            return values
        number = float(counted.sum() if reduction == "mean" else COUNTS[reduction](setting)) * variant.mean_of(
            reduction
        )
        return values.sum(dim=0, keepdim=True) / (number if reduction in WRONG_COUNTS else max(number, 1.0))


class Pairs:
    """The pairs of one batch as one variant computes them, at T temperatures.

    Attributes:
        divisor: [T, 1, 1], the divisor of the similarities.
        similarities: [M, M].
        logits: [T, M, M], similarities / ``divisor`` + bias.
        above: [T, M, M], the logarithm of the numerator.
        some: bool [M], the anchors that have a value: all for binary forms and baselines, otherwise those with
            positives. The denominator "only_negatives" also requires negatives.
        positive: bool [M, M], the positive pairs of the anchors in ``some``.
        n: [M], the number of positives, at least 1, plus the epsilon of the guards "each" and "count".
    """

    def __init__(self, evaluation: Evaluation, variant: Variant) -> None:
        self.evaluation, self.variant, self.setting = evaluation, variant, evaluation.setting
        setting = self.setting
        self.divisor = TEMPERINGS[variant.tempering](evaluation.temperature)
        self.similarities = evaluation.once(self._similarities, variant, "similarity", "flow")
        self.bias, self.tau_plus, self.beta, self.sigma, self.detach_weights, strength = variant.numbers
        self.logits = self.similarities / self.divisor + self.bias
        dtype, also = ROUNDED.get(variant.similarity, ("", False))
        if also:
            # Dividing a 16-bit tensor by a number uses float32 internally.
            divided = self.similarities.float() / self.divisor.float()
            self.logits = (divided + self.bias).to(getattr(torch, dtype)).double()
        untempered = self.similarities.expand_as(self.logits)
        self.above, self._inner = NUMERATORS[variant.numerator](untempered, self.logits, self.divisor)
        if strength and setting.harder is not None:
            self._inner = self._inner + (strength * self.similarities.detach()).where(setting.harder, 0.0)
        if variant.flow == "numerator":
            self.above = self.above.detach()
        self.some = setting.counts > 0 if variant.in_parts and not variant.binary else setting.anchors
        if variant.denominator.startswith("only_negatives"):
            self.some = self.some & setting.negative.any(dim=1)
        self.positive = setting.positive & self.some[:, None] & ~(setting.own & variant.binary)
        kind, _, epsilon = variant.guard.partition(" ")
        self.n = setting.counts.double().clamp(min=1) + (float(epsilon) if kind in ("each", "count") else 0.0)

    @cached_property
    def members(self) -> Tensor:
        """[M], the number of members, at least 1."""
        return self.setting.member.sum(dim=1).clamp(min=1)

    @cached_property
    def p(self) -> Tensor:
        """[M], the number of positives."""
        return self.positive.sum(dim=1)

    @cached_property
    def negatives(self) -> Tensor:
        """[M], the number of negatives."""
        return self.setting.negative.sum(dim=1)

    @property
    def q(self) -> Tensor:
        """[M], the number of negatives, at least 1."""
        return self.negatives.clamp(min=1)

    @cached_property
    def attract(self) -> Tensor:
        """[T, M], the sum of the binary cross-entropies of the positives."""
        return self.softplus(-self.above, self.positive)

    @cached_property
    def repel(self) -> Tensor:
        """[T, M], the sum of the binary cross-entropies of the negatives."""
        return self.softplus(self.above, self.setting.negative)

    def pairs_at(self, logits: Tensor) -> Tensor:
        """[T, M], the sum of the binary cross-entropies of all pairs, for other logits."""
        return self.softplus(-logits, self.positive) + self.softplus(logits, self.setting.negative)

    @cached_property
    def log_number(self) -> Tensor:
        """[M], the logarithm of the number of negatives, at least 0."""
        return self.q.double().log()

    def log_negatives(self, factor: float) -> Tensor:
        """[T, M], the logarithm of the sum of e^(factor s) over the logits s of the negatives."""
        return log_sum(factor * self.logits, self.setting.negative)[..., 0]

    @cached_property
    def log_mean(self) -> Tensor:
        """[T, M], the logarithm of the mean of e^s over the negatives, weighted by e^(beta s)."""
        if self.variant.flow != "weights":
            return self.log_negatives(1 + self.beta) - self.log_negatives(self.beta)
        still = self.beta * self.logits.detach()
        sums = (log_sum(s, self.setting.negative)[..., 0] for s in (self.logits + still, still))
        return next(sums) - next(sums)

    def against(
        self,
        log_mean: Tensor,
        *,
        hidden: Tensor | float | None = None,
        divisor: float | None = None,
        more: int = 0,
        floor: Tensor | float = 0.0,
    ) -> Tensor:
        """[T, M], log(1 + mass / e^s) for the logit s of the positive.

        This is the loss of `pairproof.reference.hard_negative`. The mass of n negatives is

            n * max((mean - hidden e^s) / divisor, floor),    floor = e^(-1/temperature)

        Args:
            log_mean: [T, M], the logarithm of the mean of the negatives' exponentials.
            hidden: [M], the share of positives among the negatives; tau_plus by default.
            divisor: what the difference is divided by; 1 - tau_plus by default.
            more: what is added to n.
            floor: [M], what is added to the logarithm of the floor.
        """
        own = self.total(self.logits)
        hidden = torch.as_tensor(self.tau_plus if hidden is None else hidden, dtype=torch.float64)
        excess = _less(log_mean - own, hidden.log().expand_as(own))
        excess = excess - math.log(1 - self.tau_plus if divisor is None else divisor)
        lowest = (self.variant.entry.lowest or 0.0) / self.divisor[..., 0]
        log_ratio = excess.maximum(lowest - own + floor) + (self.q + more).double().log()
        value = torch.logaddexp(log_ratio, torch.zeros_like(log_ratio))
        return torch.where(self.negatives > 0, value, 0.0)

    @property
    def rows(self) -> int:
        """The number of rows, twice the number of items."""
        return len(self.setting.rows)

    @cached_property
    def cosines(self) -> Tensor:
        """[M, M], the similarities for the weights, detached if the weights are."""
        return self.similarities.detach() if self.detach_weights else self.similarities

    @cached_property
    def closeness(self) -> Tensor:
        """[1, M], the similarity of every row to its positive, divided by sigma."""
        return self.cosines.where(self.setting.positive, 0.0).sum(dim=1)[None] / self.sigma

    def decoupled(self, weights: Tensor | float, below: Tensor | None = None) -> Tensor:
        """[T, M], the logarithm of the denominator minus the weighted logit of the positive.

        Args:
            weights: [1, M], or one number.
            below: [T, M], the logarithm of the denominator; by default the sum over the negatives.
        """
        below = self.log_negatives(1.0) if below is None else below
        return torch.where(self.negatives > 0, below - weights * self.total(self.logits), 0.0)

    def _similarities(self) -> Tensor:
        name, flow, rows = self.variant.similarity, self.variant.flow, self.setting.rows
        still, first = rows.detach(), self.setting.first_half[:, None]
        left = still if flow == "anchors" else rows
        right = still if flow == "columns" else rows
        if flow in ("first view", "second view"):
            left = right = torch.where(first == (flow == "first view"), still, rows)
        elif flow == "norm":
            # Divide by constant norms, so that the cosine becomes a dot product.
            left = right = rows / still.norm(dim=1, keepdim=True)
            name = "dot" if name == "cosine" else name
        found: Tensor = SIMILARITIES[name](left, right, self.setting)
        return torch.where(self.setting.negative, found.detach(), found) if flow == "negatives" else found

    @cached_property
    def below(self) -> Tensor:
        """[T, M, M], log D_ip."""
        parts = ("similarity", "tempering", "numerator", "denominator", "flow", "numbers")
        return self.evaluation.once(self._below, self.variant, *parts).expand_as(self.logits)

    def _below(self) -> Tensor:
        kind, s, numerator = DENOMINATORS[self.variant.denominator], self._inner, self.variant.numerator
        columns = kind.summed(self.setting)
        if self.setting.added is not None and kind.combine is not _over_the_anchors:
            partner = self.setting.positive.int().argmax(dim=1)
            columns = torch.cat([columns, self.setting.added[partner] & self.setting.anchors[:, None]], dim=1)
            s = torch.cat([s, s[:, partner]], dim=2)
        below, rows = kind.combine(s, columns, self.setting, self.divisor), len(self.setting.rows)
        untempered = numerator == _UNTEMPERED and kind.columns is _member and kind.with_positive == 0
        others = None
        if untempered or kind.with_positive == -1:
            others = _without_each(s, columns) if kind.combine is log_sum else _less(below, s)
            others = others[..., :rows]
        if others is not None and untempered:
            below = torch.logaddexp(others, self.above)
        elif kind.with_positive == 1:
            below = torch.logaddexp(below, s[..., :rows] if numerator == _UNTEMPERED_ABOVE else self.above)
        elif others is not None:
            below = others
        if kind.leaks is not None:
            below = torch.logaddexp(below, kind.leaks(self.setting).log()[:, None])
        return below.detach() if self.variant.flow == "denominator" else below

    @cached_property
    def cost(self) -> Tensor:
        """[T, M, M], the cost of each pair, with epsilons."""
        # The denominator of a row without a value may be empty, and an epsilon would make its gradient NaN.
        below, above = self.below.masked_fill(~self.some[:, None], 0.0), self.above
        kind, *sizes = (self.variant.guard or "none 0").split()
        epsilon = float(sizes[-1])
        if kind in ("below", "twice", "both"):
            below = _plus(below, epsilon)
        if kind == "both":
            above = _plus(above, float(sizes[0]))
        if kind in ("ratio", "twice"):
            above = _plus(above, epsilon, below)
        if kind in ("shifted", "others", "above", "each", "terms"):
            columns = self.setting.member if kind == "others" else self.setting.member | self.setting.own
            top = _largest(self.logits, columns | ~columns.any(dim=1, keepdim=True))
            # With an epsilon, the loss depends on the maximum. The maximum has a gradient only for "each" and "terms".
            top = top if kind in ("each", "terms") and self.variant.flow != "maximum" else top.detach()
            above = _plus(above, epsilon, top) if kind in ("above", "each", "terms") else above
            terms = DENOMINATORS[self.variant.denominator].terms(self.setting).clamp(min=1)[:, None]
            below = (
                below if kind == "above" else _plus(below, epsilon * (terms if kind in ("each", "terms") else 1.0), top)
            )
        return below.sub(above)

    def total(self, values: Tensor, pairs: Tensor | None = None) -> Tensor:
        """[T, M], the sum over the positives or over other pairs."""
        return torch.where(self.positive if pairs is None else pairs, values, 0.0).sum(dim=2)

    @cached_property
    def sum(self) -> Tensor:
        """[T, M], the sum of the costs of the positives."""
        return self.total(self.cost)

    @cached_property
    def log_ratios(self) -> Tensor:
        """[T, M], the logarithm of the sum of the ratios of the positives."""
        return torch.logsumexp(self._log_ratios, dim=2)

    @cached_property
    def leaking_log_ratios(self) -> Tensor:
        """[T, M], as ``log_ratios``, with an exp(0) that leaks from the diagonal into the sum."""
        return torch.logsumexp(torch.cat([self._log_ratios, -self.below[..., :1]], dim=2), dim=2)

    @cached_property
    def _log_ratios(self) -> Tensor:
        return torch.where(self.positive, -self.cost, 0.0).masked_fill(~self.positive & self.some[:, None], -math.inf)

    def pooled(self) -> Tensor:
        """[T, M], minus the logarithm of the mean ratio of all anchors, stored for the first anchor."""
        value = -(self.log_ratios.exp() / self.n)[:, self.some].mean(dim=1).log()
        return value[:, None] * torch.nn.functional.one_hot(self.some.int().argmax(), len(self.some))

    def softplus(self, logits: Tensor, pairs: Tensor) -> Tensor:
        """[T, M], the sum over pairs of log(1 + e^logit). Torch's softplus is linear above 20, so it is not used."""
        return self.total(torch.logaddexp(logits, torch.zeros_like(logits)), pairs)

    def own(self, sign: int) -> Tensor:
        """[T, M], the cross-entropy of the self pair as a negative (sign 1) or positive (sign -1)."""
        return self.softplus(sign * self.above, self.setting.own)

    def each(self, anchors: Tensor) -> Tensor:
        """[K], the cost of each pair of these anchors at the first temperature, ordered by anchor, then by column."""
        if self.variant.form == "sigmoid":
            signed = torch.where(self.positive, -self.above, self.above)[0]
            chosen = (self.positive | self.setting.negative) & anchors[:, None]
            return torch.logaddexp(signed, torch.zeros_like(signed))[chosen]
        chosen = self.positive & anchors[:, None] & (self.variant.form in ("mean", "sum"))
        return self.cost[0][chosen]

    def baseline(self) -> Tensor:
        """[T, M], the value of every row for a loss that is not described by parts."""
        entry = self.variant.entry
        given = {**entry.keywords, **dict(self.variant.options)}
        options = {name: given[name] for name in entry.formula_options}
        member, positive = self.setting.member, self.setting.positive
        lowest = [{} if entry.lowest is None else {"lowest": entry.lowest / t} for t in self.divisor[:, 0, 0]]
        if entry.weights:
            of_weights = {name: given[name] for name in entry.weights.options}
            weights = entry.weights.baseline(self.similarities, member, positive, **of_weights)
            options["weights"] = weights if given.get("detach_weights") is False else weights.detach()
        values = zip(self.logits, lowest, strict=True)
        return torch.stack([entry.baseline(s, member, positive, **options, **more) for s, more in values])


def _without_each(s: Tensor, columns: Tensor) -> Tensor:
    """Return the logarithms of the sums of e^s over the columns without each of them. No digits cancel."""
    nothing = -1e30  # with -inf, the gradient would be NaN
    s = torch.where(columns, s, nothing)
    before = torch.nn.functional.pad(s.logcumsumexp(-1), (1, 0), value=nothing)[..., :-1]
    after = torch.nn.functional.pad(s.flip(-1).logcumsumexp(-1), (1, 0), value=nothing)[..., :-1].flip(-1)
    others = torch.logaddexp(before, after)
    return torch.where(others > nothing / 2, others, -math.inf)


def _less(a: Tensor, b: Tensor) -> Tensor:
    """Return log(e^a - e^b) for b <= a; -inf if a equals b."""
    gap = torch.exp((b - a).clamp(max=0))
    # If a equals b, avoid log 0, whose derivative is infinite.
    left = gap < 1
    return torch.where(left, a + torch.log1p(-torch.where(left, gap, 0.0)), -math.inf)


def _plus(logarithm: Tensor, amount: Tensor | float, top: Tensor | float = 0.0) -> Tensor:
    """Return log(e^(logarithm - top) + amount) + top."""
    return torch.log(torch.exp(logarithm - top).add(amount)).add(top)


# Reductions

ALL_PAIRS = "the sum over the anchors is divided by the number of all pairs"

BY_CLASSES = "the sum over the anchors is divided by the number of classes"
ADDED = {
    "towers": "the values of both directions are added, not averaged",
    "partners": "the means over the two views are added, not averaged",
}
"""``BY_CLASSES`` in other words, if there are half as many classes as anchors: by how positives are given."""

COUNTS: Table = {
    "mean": lambda s: s.anchors.sum(),
    "sum": lambda s: 1,
    "drop": lambda s: (s.counts > 0).sum(),
    "mean_pairs": lambda s: s.counts.sum(),
    "sum_pairs": lambda s: 1,
    "the sum over the anchors is divided by the number of positive pairs": lambda s: s.counts.sum(),
    "the sum over the anchors is divided by the number of items": lambda s: len(s.items[s.items >= 0].unique()),
    BY_CLASSES: (lambda s: len((s.positive | s.own)[s.anchors].unique(dim=0))),
    "the sum over the anchors is divided by their number minus 1": lambda s: s.anchors.sum() - 1,
    "the sum over the anchors is divided by their number minus 2: by 2(B - 1) for B pairs": lambda s: (
        s.anchors.sum() - 2
    ),
    "the sum over the anchors is divided by the square of their number": lambda s: s.anchors.sum() ** 2,
    ALL_PAIRS: lambda s: s.member[s.anchors].sum(),
    "the sum over the anchors is divided by the number of negative pairs": lambda s: s.negative[s.anchors].sum(),
}
"""Functions of the setting that return what the sum over the anchors is divided by."""

WRONG_COUNTS = COUNTS.keys() - {"mean", "sum", "drop", "mean_pairs", "sum_pairs"}
"""Counts that no loss of the catalogue uses."""

POLICIES = ("zero", "drop", "nan")
"""An anchor without positives counts as 0, is left out of the mean, or makes the loss NaN."""


# Enumeration


def variations(variant: Variant, call: str, kept: Collection[str] = ()) -> Iterator[Variant]:
    """Yield variants with one more mistake. The parts ``kept`` do not change."""
    others: dict[str, Iterable[Any]] = {"similarity": [x for x in SIMILARITIES if x != QUEUE_NOT_NORMALISED]}
    if call == HARD:
        others["positives"] = (HARD_IGNORED,)
    if call == QUEUE and variant.positives == "queue a_to_b":
        others = {"similarity": SIMILARITIES, "positives": (QUEUE_IGNORED, QUEUE_ADDED)}
    if variant.in_parts and not variant.by_form:
        others["numerator"] = NUMERATORS
        right = {*RIGHT_DENOMINATORS} - {variant.denominator}
        others["denominator"] = [name for name in DENOMINATORS if name.partition(",")[0] not in right]
        others["guard"] = GUARDS if variant.takes_guard else ()
        forms = (name for name in (*_OUTSIDE, *_INSIDE) if name != _LEAK_SUM)
        others["form"] = _INSIDE if variant.form in _INSIDE else forms
    elif variant.in_parts:
        others["form"] = next(table for table in (_SIGMOID, _BINARY, _MASS, _WEIGHTED) if variant.form in table)
    if variant.positives == "meant":
        others["positives"] = [name for name, part in POSITIVES.items() if call in part.calls]
    changed = {part: names for part, names in others.items() if part not in kept}
    changes = ((part, name) for part, names in changed.items() for name in names if words_of(name))
    yield from (replace(variant, **{part: name}) for part, name in changes)


def temperings(variant: Variant) -> Iterator[Variant]:
    """Yield variants with another use of the temperature in all logits."""
    yield from (replace(variant, tempering=name) for name in TEMPERINGS if name != variant.tempering)
