"""The parts of which losses are made, right ones and wrong ones, each with words for what is wrong about it.

A variant names its parts: how positives are read, the similarity, what happens to the temperature, the terms of the
denominator, what guards the logarithm, how an anchor's pairs become its value, and what the gradient flows through.
They are torch code of this module's own over the logits, in float64; ``reference`` and ``fast`` are not used, so that
agreement with them is evidence. Over the rows z of a batch, with s_ij a logit, A(i) the members and P(i) the positives,

    v_ip = log D_ip - s_ip                  the cost of a pair; D_ip as ``denominator`` says
    L_i  = mean over p in P(i) of v_ip      or what ``form`` says
    L    = sum over anchors of L_i, over a count (``COUNTS``), times a factor

A loss whose catalogue entry names no parts is evaluated by the entry's baseline in place of v_ip and L_i.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch

from ..suite.catalogue import LOSSES, Loss
from .positives import POSITIVES, Setting

Tensor = torch.Tensor


@dataclass(frozen=True)
class Part:
    """One choice for a part: what is wrong about it, in words ("" for a right one), and how it is computed."""

    words: str
    of: Callable[..., Any]


# Similarities of the rows a and b: of(a, b, setting) gives [M, M]


def _unit(rows: Tensor) -> Tensor:
    found: Tensor = rows / rows.norm(dim=1, keepdim=True)
    return found


def _over_views(rows: Tensor, setting: Setting) -> Tensor:
    """Rows divided by the norm that is taken over the views of an item, column by column."""
    squares = torch.zeros(int(setting.items.max()) + 1, rows.shape[1], dtype=rows.dtype)
    return rows / squares.index_add(0, setting.items, rows**2).sqrt()[setting.items]


def _distances(a: Tensor, b: Tensor) -> Tensor:
    squares = ((a[:, None] - b[None]) ** 2).sum(dim=2)
    # The diagonal's derivative is infinite, and is kept out of the graph.
    apart = squares > 0
    return squares.where(apart, torch.ones_like(squares)).sqrt().where(apart, torch.zeros_like(squares))


def _dot_after(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, Setting], Tensor]:
    """Dot products of changed rows."""
    return lambda a, b, s: change(a) @ change(b).T


def _of_cosine(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, Setting], Tensor]:
    return lambda a, b, s: change(_unit(a) @ _unit(b).T)


SIMILARITIES: Mapping[str, Part] = {
    "cosine": Part("", _dot_after(_unit)),
    "dot": Part("", lambda a, b, s: a @ b.T),
    "columns": Part("norms are taken over the batch, not over each row", _dot_after(lambda z: z / z.norm(dim=0))),
    "over views": Part(
        "norms are taken over the views of an item, not over each row",
        lambda a, b, s: _over_views(a, s) @ _over_views(b, s).T,
    ),
    "left": Part("only the anchor's row is brought to norm 1", lambda a, b, s: _unit(a) @ b.T),
    "right": Part("only the other row is brought to norm 1", lambda a, b, s: a @ _unit(b).T),
    "square": Part(
        "rows are divided by the square of their norm",
        _dot_after(lambda z: z / (z**2).sum(dim=1, keepdim=True)),
    ),
    "frobenius": Part("one norm is taken over the whole batch, not over each row", _dot_after(lambda z: z / z.norm())),
    "absolute norm": Part(
        "rows are divided by the sum of their absolute values, not by their norm",
        _dot_after(lambda z: z / z.abs().sum(dim=1, keepdim=True)),
    ),
    "softmax": Part("rows are put through a softmax", _dot_after(lambda z: _unit(z.softmax(dim=1)))),
    "distance": Part("a distance is taken for the similarity: similar rows repel each other", _of_cosine(torch.neg)),
    "negative dot": Part("the sign of the dot products is wrong", lambda a, b, s: -(a @ b.T)),
    "absolute": Part("the sign of the cosine is lost", _of_cosine(torch.abs)),
    "clipped": Part("negative cosines count as 0", _of_cosine(lambda x: x.clamp(min=0))),
    "squared": Part("the cosine is squared", _of_cosine(torch.square)),
    "euclidean": Part("the similarity is minus the Euclidean distance", lambda a, b, s: -_distances(a, b)),
    "unit euclidean": Part(
        "the similarity is minus the Euclidean distance of the normalised rows",
        lambda a, b, s: -_distances(_unit(a), _unit(b)),
    ),
    "squared euclidean": Part(
        "the similarity is minus the squared Euclidean distance",
        lambda a, b, s: -((a[:, None] - b[None]) ** 2).sum(dim=2),
    ),
}

TEMPERINGS: Mapping[str, Part] = {
    "divided": Part("", lambda t: t),
    "twice": Part("the temperature is applied twice", lambda t: t * t),
    "multiplied": Part("logits are multiplied by the temperature instead of divided", lambda t: 1 / t),
    "root": Part("logits are divided by the square root of the temperature", torch.sqrt),
    "half": Part("logits are divided by half the temperature", lambda t: t / 2),
    "double": Part("logits are divided by twice the temperature", lambda t: t * 2),
    "ignored": Part("the temperature has no effect", torch.ones_like),
}
"""What the similarities are divided by: of(temperature)."""

NUMERATORS: Mapping[str, str] = {
    "same": "",
    "untempered": "the temperature is not applied to the positive",
    "untempered above": "the temperature is not applied to the numerator",
    "untempered below": "the temperature is not applied in the denominator",
    "swollen": "the temperature is applied twice to the positive",
}


# Denominators


def log_sum(s: Tensor, columns: Tensor, *_: Any) -> Tensor:
    """[T, M, 1] logarithm of the sum of exponentials over the columns; -inf over none."""
    some = columns.any(dim=1, keepdim=True)
    inner = s.masked_fill(~columns & some, -math.inf)
    return torch.logsumexp(inner, dim=2, keepdim=True).masked_fill(~some, -math.inf)


def _over_the_anchors(s: Tensor, columns: Tensor, setting: Setting, divisor: Tensor) -> Tensor:
    columns = (columns & setting.anchors[:, None]).T
    return log_sum(s.transpose(1, 2), columns).transpose(1, 2).expand_as(s)


def _over_the_batch(s: Tensor, columns: Tensor, setting: Setting, divisor: Tensor) -> Tensor:
    columns = columns & setting.anchors[:, None]
    return torch.logsumexp(s.masked_fill(~columns, -math.inf).flatten(1), dim=1)[:, None, None]


def _largest(s: Tensor, columns: Tensor, *_: Any) -> Tensor:
    return s.masked_fill(~columns, -math.inf).amax(dim=2, keepdim=True)


def _log_mean(s: Tensor, columns: Tensor, *_: Any) -> Tensor:
    return log_sum(s, columns) - columns.sum(dim=1).clamp(min=1).to(torch.float64).log()[:, None]


def _less_one(s: Tensor, columns: Tensor, setting: Setting, divisor: Tensor) -> Tensor:
    below = log_sum(s, columns)
    return below + torch.log1p(-torch.exp(1 / divisor - below))


@dataclass(frozen=True)
class Denominator:
    """The exponentials that D_ip sums.

    Attributes:
        words: what is wrong about it; empty for those of the catalogue.
        columns: bool [M, M], the columns summed.
        with_positive: 1 where e^s_ip is added to them, -1 where it is taken out, 0 otherwise.
        own: whether the self pair is added to them.
        leaks: how many times exp(0) is added to it, by row.
        combine: the logarithm of their sum, or what is computed instead, of(logits, columns, setting, divisor).
    """

    words: str
    columns: Callable[[Setting], Tensor]
    with_positive: int = 0
    own: bool = False
    leaks: Callable[[Setting], Tensor] | None = None
    combine: Callable[[Tensor, Tensor, Setting, Tensor], Tensor] = log_sum

    def summed(self, setting: Setting) -> Tensor:
        """Bool [M, M], the columns summed, with the self pair if it is added."""
        columns = self.columns(setting)
        return columns | setting.own if self.own else columns

    def terms(self, setting: Setting, anchor: int) -> int:
        """How many exponentials are summed for an anchor and one of its positives."""
        if self.combine is _largest:
            return 1 + self.with_positive
        found = int(self.summed(setting)[anchor].sum()) + self.with_positive
        return found + (0 if self.leaks is None else int(self.leaks(setting)[anchor]))


_member, _negative = attrgetter("member"), attrgetter("negative")


def _one(s: Setting) -> Tensor:
    return torch.ones(len(s.rows), dtype=torch.float64)


_COLUMNS = {"all": (_member, 0), "one_positive": (_negative, 1), "only_negatives": (_negative, 0)}
"""The denominators of the catalogue: their columns, and whether the positive is added."""


def _modified() -> Iterator[tuple[str, Denominator]]:
    """The denominators of the catalogue with one mistake that each of them may have."""
    for name, (columns, with_positive) in _COLUMNS.items():
        right = Denominator("", columns, with_positive)
        yield name, right
        yield f"{name}, self", replace(right, words="the anchor itself is kept in the denominator", own=True)
        leak = "exp(0) of the diagonal leaks into the denominator"
        yield f"{name}, leak", replace(right, words=leak, leaks=_one)
        if columns is _negative:
            leaks = "exp(0) of every entry that is masked leaks into the denominator"
            yield f"{name}, leaks", replace(right, words=leaks, leaks=lambda s: (~s.negative).sum(dim=1).double())
        mean = "holds the mean of the negatives, not their sum" if with_positive else "is a mean, not a sum"
        yield f"{name}, mean", replace(right, words=f"the denominator {mean}", combine=_log_mean)


DENOMINATORS: Mapping[str, Denominator] = {
    **dict(_modified()),
    "all, again": Denominator("the positive is in the denominator twice", _member, with_positive=1),
    "all, decoupled": Denominator("the positive is missing from its own denominator", _member, with_positive=-1),
    "positives": Denominator("the negatives are missing from the denominator", lambda s: s.positive),
    "everything": Denominator(
        "the denominator sums over the whole batch, the anchor and rows that are not compared included",
        lambda s: torch.ones_like(s.member),
    ),
    "axis": Denominator(
        "the softmax is taken over the wrong axis: over the anchors of a column",
        _member,
        combine=_over_the_anchors,
    ),
    "batch": Denominator("the denominator sums over the comparisons of every anchor", _member, combine=_over_the_batch),
    "batch, negatives": Denominator(
        "the denominator sums over the negatives of every anchor", _negative, 1, combine=_over_the_batch
    ),
    "subtract": Denominator(
        "the anchor itself is removed by subtracting e^(1/temperature) from the sum",
        _member,
        own=True,
        combine=_less_one,
    ),
    "largest": Denominator("only the hardest negative is in the denominator", _negative, 1, combine=_largest),
    "one": Denominator("there is no denominator", lambda s: torch.zeros_like(s.member), leaks=_one),
}


# Guards of the logarithm

_GUARD_WORDS = {
    "ratio": "{} is added to the ratio within the logarithm",
    "below": "{} is added to the denominator",
    "shifted": "{} is added to the denominator after the row's maximum, itself included, is subtracted",
    "others": "{} is added to the denominator after the row's maximum is subtracted",
    "above": "{} is added to the numerator after the row's maximum, itself included, is subtracted",
    "each": "{} is added to every exponential",
    "twice": "{} is added to the denominator and again to the ratio",
}
_EPSILONS = (1e-12, 1e-10, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)

GUARDS: Mapping[str, str] = {
    f"{kind} {epsilon:.0e}": words.format(f"an epsilon of {epsilon:.0e}")
    for kind, words in _GUARD_WORDS.items()
    for epsilon in _EPSILONS
}
"""What is added against a logarithm of 0, and where, in words."""


class Pairs:
    """The costs of the pairs of every anchor, in one setting and at T temperatures: what most forms are made of.

    Attributes:
        above: [T, M, M], the logarithm of the numerator.
        below: [T, M, M], the logarithm of the denominator.
        cost: [T, M, M], the cost of every pair.
        positive: bool [M, M], the pairs that count.
        member: bool [M, M], A(i).
        some: bool [M], the anchors that have a pair that counts.
        n: [M], the number of positives, at least 1.
        members: [M], the number of members, at least 1.
        sum: [T, M], the sum of the costs of the positives.
    """

    def __init__(self, evaluation: Evaluation, variant: Variant) -> None:
        setting = evaluation.setting
        self.above, self.cost = evaluation.above(variant), evaluation.cost(variant)
        self.below = evaluation.below(variant).expand_as(self.above)
        self.some = setting.counts > 0
        if variant.denominator.startswith("only_negatives"):
            self.some = self.some & setting.negative.any(dim=1)
        self.positive = setting.positive & (setting.anchors & self.some)[:, None]
        kind, _, epsilon = variant.guard.partition(" ")
        self.n = setting.counts.double().clamp(min=1) + (float(epsilon) if kind == "each" else 0.0)
        self.member, self.members = setting.member, setting.member.sum(dim=1).clamp(min=1)
        self.sum = self.total(self.cost)

    def total(self, values: Tensor, pairs: Tensor | None = None) -> Tensor:
        """[T, M], the sum over the positives, or over other pairs."""
        return torch.where(self.positive if pairs is None else pairs, values, 0.0).sum(dim=2)

    def log_ratios(self, *, leak: bool = False) -> Tensor:
        """[T, M], the logarithm of the sum of the positives' ratios; with that of the diagonal's exp(0) if it leaks."""
        logs = torch.where(self.positive, -self.cost, 0.0).masked_fill(~self.positive & self.some[:, None], -math.inf)
        if leak:
            logs = torch.cat([logs, -self.below[..., :1]], dim=2)
        return torch.logsumexp(logs, dim=2)

    def pooled(self) -> Tensor:
        """[T, M], minus the logarithm of the mean ratio of all anchors, as the value of the first of them."""
        value = -(self.log_ratios().exp() / self.n)[:, self.some].mean(dim=1).log()
        return value[:, None] * torch.nn.functional.one_hot(self.some.int().argmax(), len(self.some))


class BinaryPairs:
    """The binary cross-entropies of the pairs of every anchor, in one setting and at T temperatures.

    Attributes:
        s: [T, M, M], the logits.
        other: [T, M, M], (similarity - 1)/temperature.
        own, positive, negative: bool [M, M], the self pairs, and the others.
        attract: [T, M], the cost of the positives.
        repel: [T, M], the cost of the negatives.
        p: [M], the number of positives.
        q: [M], the number of negatives, at least 1.
    """

    def __init__(self, evaluation: Evaluation, variant: Variant) -> None:
        setting = evaluation.setting
        self.s = evaluation.above(variant)
        self.other = (evaluation.untempered(variant) - 1) / evaluation.divisor(variant)
        self.own = setting.own
        self.positive, self.negative = setting.positive & ~self.own, setting.negative & ~self.own
        self.attract, self.repel = self.softplus(-self.s, self.positive), self.softplus(self.s, self.negative)
        self.p, self.q = self.positive.sum(dim=1), self.negative.sum(dim=1).clamp(min=1)

    def softplus(self, logits: Tensor, pairs: Tensor) -> Tensor:
        """[T, M], the sum over pairs of log(1 + e^logit) to the last digit: torch's own is cut off above 20."""
        return torch.where(pairs, torch.logaddexp(logits, torch.zeros_like(logits)), 0.0).sum(dim=2)


FORMS: Mapping[str, Part] = {
    "mean": Part("", lambda x: x.sum / x.n),
    "inside": Part("", lambda x: x.n.log() - x.log_ratios()),
    "binary": Part("", lambda x: x.attract / (x.p + 1) + x.repel / x.q),
    "sum": Part("the sum over the positives is not divided by their number", lambda x: x.sum),
    "twice": Part("the sum over the positives is divided by their number twice", lambda x: x.sum / x.n**2),
    "plus one": Part("the sum over the positives is divided by their number plus 1", lambda x: x.sum / (x.n + 1)),
    "others": Part(
        "the sum over the positives is divided by the number of all other rows, not of positives",
        lambda x: x.sum / x.members,
    ),
    "inside sum": Part(
        "the ratios are summed inside the logarithm, not averaged: 1/|P| is missing", lambda x: -x.log_ratios()
    ),
    "inside plus one": Part(
        "the sum of the ratios is divided by the number of positives plus 1",
        lambda x: (x.n + 1).log() - x.log_ratios(),
    ),
    "inside leak": Part(
        "exp(0) of the diagonal leaks into the numerator", lambda x: x.n.log() - x.log_ratios(leak=True)
    ),
    "inside leak sum": Part(
        "exp(0) of the diagonal leaks into the numerator, which is not divided by |P|",
        lambda x: -x.log_ratios(leak=True),
    ),
    "pooled": Part(
        "minus the logarithm of the mean over all anchors, not the mean of minus the logarithm",
        lambda x: x.pooled(),
    ),
    "unlogged": Part("the logarithm is missing", lambda x: -x.log_ratios().exp() / x.n),
    "sum logged": Part(
        "the values of the pairs are multiplied, not averaged",
        lambda x: torch.where(x.positive, x.cost, 1.0).prod(dim=2),
    ),
    "log once": Part(
        "the logarithm of the denominator is counted once, not once per positive",
        lambda x: x.total(x.below) / x.n**2 - x.total(x.above) / x.n,
    ),
    "hardest": Part("only the hardest positive counts", lambda x: x.cost.masked_fill(~x.positive, -math.inf).amax(2)),
    "easiest": Part("only the easiest positive counts", lambda x: x.cost.masked_fill(~x.positive, math.inf).amin(2)),
    "doubled": Part("the sum over the positives is multiplied by their number", lambda x: x.sum * x.n),
    "numerator": Part(
        "the denominator is missing: only similarities of the positives are averaged",
        lambda x: -x.total(x.above) / x.n,
    ),
    "all rows": Part(
        "the sum runs over all other rows, positives and negatives alike",
        lambda x: x.total(x.cost, x.member) / x.members,
    ),
    "binary, no self": Part(
        "the diagonal is not counted among the positives", lambda x: x.attract / x.p.clamp(min=1) + x.repel / x.q
    ),
    "binary, self": Part(
        "the diagonal is counted as a positive with a loss of its own, not of 0",
        lambda x: (x.attract + x.softplus(-x.s, x.own)) / (x.p + 1) + x.repel / x.q,
    ),
    "binary, self negative": Part(
        "the diagonal is taken for a negative",
        lambda x: x.attract / x.p.clamp(min=1) + (x.repel + x.softplus(x.s, x.own)) / (x.negative.sum(dim=1) + 1),
    ),
    "binary, sum": Part("positives and negatives are summed, not averaged apart", lambda x: x.attract + x.repel),
    "binary, together": Part(
        "positives and negatives are averaged together, not apart",
        lambda x: (x.attract + x.repel) / (x.p + x.negative.sum(dim=1)).clamp(min=1),
    ),
    "binary, positives": Part("the negatives are missing", lambda x: x.attract / (x.p + 1)),
    "binary, negatives": Part("the positives are missing", lambda x: x.repel / x.q),
    "binary, sum negatives": Part("the negatives are summed, not averaged", lambda x: x.attract / (x.p + 1) + x.repel),
    "binary, sum positives": Part("the positives are summed, not averaged", lambda x: x.attract + x.repel / x.q),
    "binary, other": Part(
        "the negatives cost -log sigmoid((1 - similarity)/temperature), not -log(1 - sigmoid)",
        lambda x: x.attract / (x.p + 1) + x.softplus(x.other, x.negative) / x.q,
    ),
    "binary, swapped sign": Part(
        "the sign of the logits is wrong",
        lambda x: x.softplus(x.s, x.positive) / (x.p + 1) + x.softplus(-x.s, x.negative) / x.q,
    ),
}
"""How the pairs of an anchor become its value: of(pairs) gives [T, M]."""

FLOWS: Mapping[str, str] = {
    "whole": "",
    "columns": "no gradient flows into the rows that anchors are contrasted with",
    "anchors": "no gradient flows into the anchors",
    "denominator": "no gradient flows through the denominator",
    "numerator": "no gradient flows through the positives",
    "negatives": "no gradient flows through the negatives",
    "norm": "no gradient flows through the norms",
    "first view": "no gradient flows into the first view",
    "second view": "no gradient flows into the second view",
    "maximum": "no gradient flows through the row's maximum, though the epsilon makes the loss depend on it",
}


REDUCED_BY = ("reduction", "no_positive", "no_negative")
"""Options that are not part of a variant: what is done with the values of the anchors."""


@dataclass(frozen=True)
class Variant:
    """A loss of the catalogue with its options, or a variation of it, as the names of its parts.

    Attributes:
        loss: its name in the catalogue.
        options: those that are not at their default, ``REDUCED_BY`` apart.
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

    @property
    def entry(self) -> Loss:
        """The loss's entry in the catalogue."""
        return LOSSES[self.loss]

    @property
    def in_parts(self) -> bool:
        """Whether numerator, denominator, guard and form describe the loss; else its baseline takes their place."""
        return bool(self.entry.variant)

    @property
    def over_pairs(self) -> bool:
        """Whether the mean over pairs is one of the loss's reductions."""
        return "mean_pairs" in self.entry.choices["reduction"]

    def words(self) -> list[str]:
        """What is wrong, one sentence for each part that no loss of the catalogue has."""
        known = {loss.variant.get("guard") for loss in LOSSES.values()} if self.guard else {""}
        found = [
            POSITIVES[self.positives].words,
            SIMILARITIES[self.similarity].words,
            TEMPERINGS[self.tempering].words,
            NUMERATORS[self.numerator],
            DENOMINATORS[self.denominator].words,
            "" if self.guard in known else GUARDS[self.guard],
            FORMS[self.form].words,
            FLOWS[self.flow],
        ]
        return [words for words in found if words]

    def describe(self, reduction: str = "mean") -> str:
        """The loss, its options and what is wrong with it, in one line."""
        options = dict(self.options)
        if reduction in self.entry.choices["reduction"][1:]:
            options["reduction"] = reduction
        chosen = ", ".join(f"{key}={value}" for key, value in options.items())
        wrong = "; ".join(self.words())
        return self.loss + (f" with {chosen}" if chosen else "") + (f"; but {wrong}" if wrong else "")


def variant_of(loss: Loss, options: Mapping[str, Any]) -> Variant:
    """A loss of the catalogue with its options, as a variant.

    Args:
        loss: the loss.
        options: those that are not at their default.
    """
    own = [name for name in (*loss.choices, *loss.formula_options) if name not in REDUCED_BY]
    chosen = {name: options[name] for name in own if options.get(name, loss.keywords[name]) != loss.keywords[name]}
    given = {**loss.keywords, **options}
    parts: dict[str, Any] = {**loss.variant, "similarity": given["similarity"]}
    if loss.variant and "denominator" in given:
        parts["denominator"] = given["denominator"]
    # The mean over pairs is of the pairs' own sum.
    if loss.variant and given["reduction"] == "mean_pairs":
        parts["form"] = "sum"
    return Variant(loss.name, tuple(chosen.items()), **parts)


class Evaluation:
    """The values of variants in one setting, at one or more temperatures; what they share is computed once.

    Args:
        setting: the setting, its positives as they are read or misread.
        temperature: [T].
    """

    def __init__(self, setting: Setting, temperature: Tensor) -> None:
        self.setting = setting
        self.temperature = temperature.reshape(-1, 1, 1)
        self._known: dict[tuple[object, ...], Tensor] = {}

    def _once(self, make: Callable[[Variant], Tensor], variant: Variant, *parts: str) -> Tensor:
        """What depends on some parts of a variant alone."""
        key = (make.__name__, *(getattr(variant, part) for part in parts))
        if key not in self._known:
            self._known[key] = make(variant)
        return self._known[key]

    def untempered(self, variant: Variant) -> Tensor:
        """[M, M], the similarities."""
        return self._once(self._similarity, variant, "similarity", "flow")

    def _similarity(self, variant: Variant) -> Tensor:
        name, flow = variant.similarity, variant.flow
        left = right = self.setting.rows
        if flow == "columns":
            right = right.detach()
        elif flow == "anchors":
            left = left.detach()
        elif flow in ("first view", "second view"):
            second = torch.arange(len(left)) >= len(left) // 2
            kept = second if flow == "first view" else ~second
            left = right = torch.where(kept[:, None], left, left.detach())
        elif flow == "norm":
            # Divided once more by the norm as it is: the value is 1 over it, the gradient that of the undivided rows.
            left = right = left / left.norm(dim=1, keepdim=True).detach()
            name = "dot" if name == "cosine" else name
        found: Tensor = SIMILARITIES[name].of(left, right, self.setting)
        return torch.where(self.setting.negative, found.detach(), found) if flow == "negatives" else found

    def divisor(self, variant: Variant) -> Tensor:
        """[T, 1, 1], what similarities are divided by."""
        found: Tensor = TEMPERINGS[variant.tempering].of(self.temperature)
        return found

    def logits(self, variant: Variant) -> Tensor:
        """[T, M, M], similarities over temperature."""
        return self._once(self._tempered, variant, "similarity", "tempering", "flow")

    def _tempered(self, variant: Variant) -> Tensor:
        return self.untempered(variant) / self.divisor(variant)

    def above(self, variant: Variant) -> Tensor:
        """[T, M, M], the logarithm of the numerator."""
        above = self.logits(variant)
        if variant.numerator in ("untempered", "untempered above"):
            above = self.untempered(variant).expand_as(above)
        elif variant.numerator == "swollen":
            above = above / self.divisor(variant)
        return above.detach() if variant.flow == "numerator" else above

    def below(self, variant: Variant) -> Tensor:
        """[T, M, M] or [T, M, 1], log D_ip."""
        return self._once(self._summed, variant, "similarity", "tempering", "numerator", "denominator", "flow")

    def _summed(self, variant: Variant) -> Tensor:
        kind, s = DENOMINATORS[variant.denominator], self.logits(variant)
        if variant.numerator == "untempered below":
            s = self.untempered(variant).expand_as(s)
        below = kind.combine(s, kind.summed(self.setting), self.setting, self.divisor(variant))
        if variant.numerator == "untempered" and kind.columns is _member and kind.with_positive == 0:
            below = torch.logaddexp(_less(below, s), self.above(variant))
        elif kind.with_positive == 1:
            below = torch.logaddexp(below, s if variant.numerator == "untempered above" else self.above(variant))
        elif kind.with_positive == -1:
            below = _less(below, s)
        if kind.leaks is not None:
            below = torch.logaddexp(below, kind.leaks(self.setting).log()[:, None])
        return below.detach() if variant.flow == "denominator" else below

    def cost(self, variant: Variant) -> Tensor:
        """[T, M, M], what each pair costs: log D_ip less the logarithm of the numerator, guarded."""
        parts = ("similarity", "tempering", "numerator", "denominator", "guard", "flow")
        return self._once(self._guarded, variant, *parts)

    def _guarded(self, variant: Variant) -> Tensor:
        below, above = self.below(variant), self.above(variant)
        if not variant.guard:
            return below - above
        kind, _, text = variant.guard.partition(" ")
        epsilon, s = float(text), self.logits(variant)
        if kind == "ratio":
            return -torch.log(torch.exp(above - below) + epsilon)
        if kind == "below":
            return torch.log(torch.exp(below) + epsilon) - above
        if kind == "twice":
            return -torch.log(torch.exp(above) / (torch.exp(below) + epsilon) + epsilon)
        columns = self.setting.member if kind == "others" else self.setting.member | self.setting.own
        top = s.masked_fill(~columns & columns.any(dim=1, keepdim=True), -math.inf).amax(dim=2, keepdim=True)
        # A maximum that is subtracted and added again has no gradient of its own.
        if kind != "each" or variant.flow == "maximum":
            top = top.detach()
        if kind in ("shifted", "others"):
            return torch.log(torch.exp(below - top) + epsilon) + top - above
        numerator = torch.log(torch.exp(above - top) + epsilon)
        if kind == "above":
            return below - top - numerator
        denominator = DENOMINATORS[variant.denominator]
        number = denominator.summed(self.setting).sum(dim=1).clamp(min=1).double()[:, None] + denominator.with_positive
        return torch.log(torch.exp(below - top) + number * epsilon) - numerator

    def anchors(self, variant: Variant) -> Tensor:
        """[T, M], every anchor's value; 0 for rows that are not anchors, or that have no positive.

        For the form "pooled" the one value there is stands at the first anchor.
        """
        setting = self.setting
        if not variant.in_parts:
            baseline, chosen = variant.entry.baseline, dict(variant.options)
            options = {name: chosen.get(name, variant.entry.keywords[name]) for name in variant.entry.formula_options}
            each = torch.stack([baseline(s, setting.member, setting.positive, **options) for s in self.logits(variant)])
            return torch.where(setting.anchors, each, 0.0)
        if variant.form.startswith("binary"):
            return torch.where(setting.anchors, FORMS[variant.form].of(BinaryPairs(self, variant)), 0.0)
        pairs = Pairs(self, variant)
        return torch.where(pairs.some, FORMS[variant.form].of(pairs), 0.0)


def _less(a: Tensor, b: Tensor) -> Tensor:
    """log(e^a - e^b), where b is no more than a; -inf where they are equal."""
    gap = torch.exp((b - a).clamp(max=0))
    # At equality nothing is left; its derivative is kept out of the graph.
    left = gap < 1
    return torch.where(left, a + torch.log1p(-torch.where(left, gap, torch.zeros_like(gap))), -math.inf)


# Reductions

COUNTS: Mapping[str, Part] = {
    "mean": Part("the mean over the anchors", lambda s: s.anchors.sum()),
    "sum": Part("the sum over the anchors", lambda s: 1),
    "drop": Part("the mean over the anchors that have a positive", lambda s: (s.counts > 0).sum()),
    "mean_pairs": Part("the mean over the positive pairs", lambda s: s.counts.sum()),
    "items": Part("the sum over the anchors divided by the number of items", lambda s: s.n_items),
    "classes": Part("the sum over the anchors divided by the number of classes", lambda s: s.classes),
    "less one": Part("the sum over the anchors divided by their number less 1", lambda s: s.anchors.sum() - 1),
    "square": Part("the sum over the anchors divided by the square of their number", lambda s: s.anchors.sum() ** 2),
    "members": Part(
        "the sum over the anchors divided by the number of all comparisons",
        lambda s: (s.member & s.anchors[:, None]).sum(),
    ),
    "negatives": Part(
        "the sum over the anchors divided by the number of negative pairs",
        lambda s: (s.negative & s.anchors[:, None]).sum(),
    ),
}
"""What the sum over the anchors may be divided by: of(setting)."""

POLICIES = ("zero", "drop", "nan")
"""What an anchor without positives adds: 0, nothing (it is left out of the mean), or NaN."""


def reduce_anchors(setting: Setting, each: Tensor, reduction: str, policy: str = "zero") -> Tensor:
    """Every anchor's value [M] as a loss: over the count that ``reduction`` names, or one by one for "none"."""
    alone = setting.anchors & (setting.counts == 0)
    if policy == "nan":
        each = torch.where(alone, math.nan, each)
    counted = setting.anchors & ~alone if policy == "drop" else setting.anchors
    if reduction == "none":
        return each[counted]
    number = counted.sum() if reduction == "mean" else COUNTS[reduction].of(setting)
    return each[counted].sum() / max(float(number), 1.0)


# Enumeration


def variations(variant: Variant, call: str) -> Iterator[Variant]:
    """Every variant that differs from this one in one part that no loss of the catalogue has."""
    others: dict[str, list[Any]] = {"similarity": _wrong(SIMILARITIES)}
    binary = variant.form.startswith("binary")
    if variant.in_parts and not binary:
        others["numerator"] = [name for name, words in NUMERATORS.items() if words]
        stems = {name: name.partition(",")[0] for name in _wrong(DENOMINATORS)}
        others["denominator"] = [k for k, stem in stems.items() if stem == variant.denominator or stem not in _COLUMNS]
        others["guard"] = [] if variant.guard else list(GUARDS)
    if variant.in_parts:
        forms = [name for name in _wrong(FORMS) if name.startswith("binary") == binary]
        inside = ("inside", "pooled", "unlogged") if variant.form == "inside" else ()
        others["form"] = [k for k in forms if (k.startswith(inside) if inside else k != "inside leak sum")]
    if variant.positives == "meant":
        others["positives"] = [name for name, part in POSITIVES.items() if part.words and call in part.calls]
    for part, names in others.items():
        for name in names:
            yield replace(variant, **{part: name})


def _wrong(table: Mapping[str, Any]) -> list[str]:
    return [name for name, part in table.items() if part.words]


def temperings(variant: Variant) -> Iterator[Variant]:
    """The variant with every mistake in the temperature of all logits."""
    for name in TEMPERINGS:
        if name != variant.tempering:
            yield replace(variant, tempering=name)
