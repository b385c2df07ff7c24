"""The parts of which losses are made, right ones and wrong ones, each with words for what is wrong about it.

A recipe names its parts: who is whose positive (the reading of the arguments), the similarity, what happens to the
temperature, the terms of the denominator, what guards the logarithm, how an anchor's pairs become its value, and what
the gradient flows through. They are short torch code over the logits of this module's own, in float64: neither room is
asked, so agreeing with them is evidence.

Over the rows z of a batch, with s_ij a logit, A(i) the members of i's comparison and P(i) its positives,

    v_ip = log D_ip - s_ip                  what a pair costs; D_ip as ``denominator`` says
    L_i  = mean over p in P(i) of v_ip      or what ``form`` says
    L    = sum over anchors of L_i, over a count (``Count``), times a factor
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

import torch

from .positives import READINGS, Setting

Tensor = torch.Tensor


@dataclass(frozen=True)
class Similarity:
    """A measure of two rows: ``measure(left, right, setting)`` gives [M, M]."""

    words: str
    measure: Callable[[Tensor, Tensor, Setting], Tensor]


def _unit(rows: Tensor) -> Tensor:
    found: Tensor = rows / rows.norm(dim=1, keepdim=True)
    return found


def _over_views(rows: Tensor, setting: Setting) -> Tensor:
    """Rows divided by the norm that is taken over the views of an item, column by column."""
    squares = torch.zeros(int(setting.items.max()) + 1, rows.shape[1], dtype=rows.dtype)
    squares = squares.index_add(0, setting.items, rows**2)
    return rows / squares.sqrt()[setting.items]


def _distances(left: Tensor, right: Tensor) -> Tensor:
    squares = ((left[:, None] - right[None]) ** 2).sum(dim=2)
    # The diagonal's derivative is infinite; nobody compares a row with itself there.
    apart = squares > 0
    return squares.where(apart, torch.ones_like(squares)).sqrt().where(apart, torch.zeros_like(squares))


SIMILARITIES: Mapping[str, Similarity] = MappingProxyType(
    {
        "cosine": Similarity("", lambda a, b, s: _unit(a) @ _unit(b).T),
        "dot": Similarity("", lambda a, b, s: a @ b.T),
        "columns": Similarity(
            "norms are taken over the batch, not over each row",
            lambda a, b, s: (a / a.norm(dim=0)) @ (b / b.norm(dim=0)).T,
        ),
        "over views": Similarity(
            "norms are taken over the views of an item, not over each row",
            lambda a, b, s: _over_views(a, s) @ _over_views(b, s).T,
        ),
        "left": Similarity("only the anchor's row is brought to norm 1", lambda a, b, s: _unit(a) @ b.T),
        "right": Similarity("only the other row is brought to norm 1", lambda a, b, s: a @ _unit(b).T),
        "square": Similarity(
            "rows are divided by the square of their norm",
            lambda a, b, s: (_unit(a) / a.norm(dim=1, keepdim=True)) @ (_unit(b) / b.norm(dim=1, keepdim=True)).T,
        ),
        "frobenius": Similarity(
            "one norm is taken over the whole batch, not one over each row",
            lambda a, b, s: (a / a.norm()) @ (b / b.norm()).T,
        ),
        "absolute norm": Similarity(
            "rows are divided by the sum of their absolute values, not by their norm",
            lambda a, b, s: (a / a.abs().sum(dim=1, keepdim=True)) @ (b / b.abs().sum(dim=1, keepdim=True)).T,
        ),
        "softmax": Similarity(
            "rows are put through a softmax", lambda a, b, s: _unit(a.softmax(dim=1)) @ _unit(b.softmax(dim=1)).T
        ),
        "distance": Similarity(
            "a distance is taken for the similarity: similar rows repel each other",
            lambda a, b, s: -(_unit(a) @ _unit(b).T),
        ),
        "negative dot": Similarity("the sign of the dot products is wrong", lambda a, b, s: -(a @ b.T)),
        "absolute": Similarity("the sign of the cosine is lost", lambda a, b, s: (_unit(a) @ _unit(b).T).abs()),
        "clipped": Similarity("negative cosines count as 0", lambda a, b, s: (_unit(a) @ _unit(b).T).clamp(min=0)),
        "squared": Similarity("the cosine is squared", lambda a, b, s: (_unit(a) @ _unit(b).T) ** 2),
        "euclidean": Similarity("the similarity is minus the Euclidean distance", lambda a, b, s: -_distances(a, b)),
        "unit euclidean": Similarity(
            "the similarity is minus the Euclidean distance of the normalised rows",
            lambda a, b, s: -_distances(_unit(a), _unit(b)),
        ),
        "squared euclidean": Similarity(
            "the similarity is minus the squared Euclidean distance",
            lambda a, b, s: -((a[:, None] - b[None]) ** 2).sum(dim=2),
        ),
    }
)


# What happens to the temperature

TEMPERINGS: Mapping[str, tuple[str, Callable[[Tensor], Tensor]]] = MappingProxyType(
    {
        "divided": ("", lambda t: t),
        "twice": ("the temperature is applied twice", lambda t: t * t),
        "multiplied": ("logits are multiplied by the temperature instead of divided", lambda t: 1 / t),
        "root": ("logits are divided by the square root of the temperature", lambda t: t.sqrt()),
        "half": ("logits are divided by half the temperature", lambda t: t / 2),
        "double": ("logits are divided by twice the temperature", lambda t: t * 2),
        "ignored": ("the temperature has no effect", lambda t: torch.ones_like(t)),
    }
)

NUMERATORS: Mapping[str, str] = MappingProxyType(
    {
        "same": "",
        "untempered": "the temperature is not applied to the positive",
        "untempered above": "the temperature is not applied to the numerator",
        "untempered below": "the temperature is not applied in the denominator",
        "swollen": "the temperature is applied twice to the positive",
    }
)


# Denominators


@dataclass(frozen=True)
class Denominator:
    """The exponentials that D_ip sums.

    Attributes:
        words: what is wrong about it; empty for those of the catalogue.
        columns: bool [M, M], the columns summed.
        with_positive: 1 where e^s_ip is added to them, -1 where it is taken out, 0 otherwise.
        leaks: how many times exp(0) is added to it, by row.
        special: "axis" (summed over the anchors of a column), "batch" (over every anchor), "mean" (divided by their
            number), "subtract" (e^(1/temperature) is taken off), "largest" (the largest instead of the sum).
    """

    words: str
    columns: Callable[[Setting], Tensor]
    with_positive: int = 0
    leaks: Callable[[Setting], Tensor] | None = None
    special: str = ""

    def terms(self, setting: Setting, anchor: int) -> int:
        """How many exponentials are summed for an anchor and one of its positives."""
        if self.special == "largest":
            return 1 + self.with_positive
        found = int(self.columns(setting)[anchor].sum()) + self.with_positive
        return found + (0 if self.leaks is None else int(self.leaks(setting)[anchor]))


def _one(s: Setting) -> Tensor:
    return torch.ones(len(s.rows))


def _masked_out(columns: Callable[[Setting], Tensor]) -> Callable[[Setting], Tensor]:
    """How many entries a mask multiplies to 0, whose exponential is 1."""
    return lambda s: (~columns(s)).sum(dim=1).to(torch.float64)


def _member(s: Setting) -> Tensor:
    return s.member


def _negative(s: Setting) -> Tensor:
    return s.negative


DENOMINATORS: Mapping[str, Denominator] = MappingProxyType(
    {
        "all": Denominator("", _member),
        "one_positive": Denominator("", _negative, with_positive=1),
        "only_negatives": Denominator("", _negative),
        "all, self": Denominator("the anchor itself is kept in the denominator", lambda s: s.member | s.own),
        "one_positive, self": Denominator(
            "the anchor itself is kept in the denominator", lambda s: s.negative | s.own, with_positive=1
        ),
        "only_negatives, self": Denominator(
            "the anchor itself is kept in the denominator", lambda s: s.negative | s.own
        ),
        "all, leak": Denominator("exp(0) of the diagonal leaks into the denominator", _member, leaks=_one),
        "one_positive, leak": Denominator(
            "exp(0) of the diagonal leaks into the denominator", _negative, with_positive=1, leaks=_one
        ),
        "only_negatives, leak": Denominator("exp(0) of the diagonal leaks into the denominator", _negative, leaks=_one),
        "one_positive, leaks": Denominator(
            "exp(0) of every entry that is masked leaks into the denominator",
            _negative,
            with_positive=1,
            leaks=_masked_out(_negative),
        ),
        "only_negatives, leaks": Denominator(
            "exp(0) of every entry that is masked leaks into the denominator", _negative, leaks=_masked_out(_negative)
        ),
        "all, again": Denominator("the positive is in the denominator twice", _member, with_positive=1),
        "all, decoupled": Denominator("the positive is missing from its own denominator", _member, with_positive=-1),
        "positives": Denominator("the negatives are missing from the denominator", lambda s: s.positive),
        "everything": Denominator(
            "the denominator sums over the whole batch, the anchor and rows that are no part of it included",
            lambda s: torch.ones_like(s.member),
        ),
        "axis": Denominator(
            "the softmax is taken over the wrong axis: over the anchors of a column", _member, special="axis"
        ),
        "batch": Denominator("the denominator sums over the comparisons of every anchor", _member, special="batch"),
        "batch, negatives": Denominator(
            "the denominator sums over the negatives of every anchor", _negative, with_positive=1, special="batch"
        ),
        "all, mean": Denominator("the denominator is a mean, not a sum", _member, special="mean"),
        "one_positive, mean": Denominator(
            "the denominator holds the mean of the negatives, not their sum", _negative, with_positive=1, special="mean"
        ),
        "only_negatives, mean": Denominator("the denominator is a mean, not a sum", _negative, special="mean"),
        "subtract": Denominator(
            "the anchor itself is removed by subtracting e^(1/temperature) from the sum",
            lambda s: s.member | s.own,
            special="subtract",
        ),
        "largest": Denominator(
            "only the hardest negative is in the denominator", _negative, with_positive=1, special="largest"
        ),
        "one": Denominator("there is no denominator", lambda s: torch.zeros_like(s.member), leaks=_one),
    }
)


# Guards of the logarithm

GUARD_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "ratio": "{} is added to the ratio within the logarithm",
        "below": "{} is added to the denominator",
        "shifted": "{} is added to the denominator after the row's maximum, itself included, is subtracted",
        "others": "{} is added to the denominator after the row's maximum is subtracted",
        "above": "{} is added to the numerator after the row's maximum, itself included, is subtracted",
        "each": "{} is added to every exponential",
        "twice": "{} is added to the denominator and again to the ratio",
    }
)
EPSILONS = (1e-12, 1e-10, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)


def guard_words(guard: str) -> str:
    """What a guard does, in words."""
    kind, _, epsilon = guard.partition(" ")
    return GUARD_WORDS[kind].format(f"an epsilon of {epsilon}") if guard else ""


# Forms: how the pairs of an anchor become its value

FORMS: Mapping[str, str] = MappingProxyType(
    {
        "mean": "",
        "inside": "",
        "binary": "",
        "sum": "the sum over the positives is not divided by their number",
        "twice": "the sum over the positives is divided by their number twice",
        "plus one": "the sum over the positives is divided by their number plus 1",
        "others": "the sum over the positives is divided by the number of all other rows, not of positives",
        "inside sum": "the ratios are summed inside the logarithm, not averaged: 1/|P| is missing",
        "inside plus one": "the sum of the ratios is divided by the number of positives plus 1",
        "inside leak": "exp(0) of the diagonal leaks into the numerator",
        "inside leak sum": "exp(0) of the diagonal leaks into the numerator, which is not divided by |P|",
        "pooled": "minus the logarithm of the mean over all anchors, not the mean of minus the logarithm",
        "unlogged": "the logarithm is missing",
        "sum logged": "the values of the pairs are multiplied, not averaged",
        "log once": "the logarithm of the denominator is counted once, not once per positive",
        "hardest": "only the hardest positive counts",
        "easiest": "only the easiest positive counts",
        "doubled": "the sum over the positives is multiplied by their number",
        "numerator": "the denominator is missing: only similarities of the positives are averaged",
        "all rows": "the sum runs over all other rows, positives and negatives alike",
        "binary, no self": "the diagonal is not counted among the positives",
        "binary, self": "the diagonal is counted as a positive with a loss of its own, not of 0",
        "binary, self negative": "the diagonal is taken for a negative",
        "binary, sum": "positives and negatives are summed, not averaged apart",
        "binary, together": "positives and negatives are averaged together, not apart",
        "binary, positives": "the negatives are missing",
        "binary, negatives": "the positives are missing",
        "binary, sum negatives": "the negatives are summed, not averaged",
        "binary, sum positives": "the positives are summed, not averaged",
        "binary, other": "the negatives cost -log sigmoid((1 - similarity)/temperature), not -log(1 - sigmoid)",
        "binary, swapped sign": "the sign of the logits is wrong",
    }
)

FLOWS: Mapping[str, str] = MappingProxyType(
    {
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
)


@dataclass(frozen=True)
class Recipe:
    """The parts of a hypothesis, by name."""

    reading: str = "meant"
    similarity: str = "cosine"
    tempering: str = "divided"
    numerator: str = "same"
    denominator: str = "all"
    guard: str = ""
    form: str = "mean"
    flow: str = "whole"

    def words(self) -> list[str]:
        """What is wrong, one sentence for each part that no loss of the catalogue has."""
        return [
            words
            for words in (
                READINGS[self.reading].words,
                SIMILARITIES[self.similarity].words,
                TEMPERINGS[self.tempering][0],
                NUMERATORS[self.numerator],
                DENOMINATORS[self.denominator].words,
                "" if self.guard == EPSILON_GUARD else guard_words(self.guard),
                FORMS[self.form],
                FLOWS[self.flow],
            )
            if words
        ]


EPSILON_GUARD = "each 1e-08"


class Evaluation:
    """The values of recipes in one setting, at one or more temperatures; what they share is computed once.

    Args:
        setting: the setting.
        temperature: [T].
    """

    def __init__(self, setting: Setting, temperature: Tensor) -> None:
        self.setting = setting
        self.temperature = temperature.reshape(-1, 1, 1)
        self._known: dict[tuple[object, ...], Tensor] = {}

    def _once(self, key: tuple[object, ...], make: Callable[[], Tensor]) -> Tensor:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def _similarity(self, name: str, flow: str) -> Tensor:
        return self._once(("similarity", name, flow), lambda: self._measure(name, flow))

    def _measure(self, name: str, flow: str) -> Tensor:
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
        found = SIMILARITIES[name].measure(left, right, self.setting)
        return torch.where(self.setting.negative, found.detach(), found) if flow == "negatives" else found

    def _divisor(self, recipe: Recipe) -> Tensor:
        return TEMPERINGS[recipe.tempering][1](self.temperature)

    def _logits(self, recipe: Recipe) -> Tensor:
        key = ("logits", recipe.similarity, recipe.tempering, recipe.flow)
        return self._once(key, lambda: self._similarity(recipe.similarity, recipe.flow) / self._divisor(recipe))

    def _over(self, columns: Tensor, s: Tensor) -> Tensor:
        """[T, M, 1] logarithm of the sum of exponentials over the columns; -inf over none."""
        some = columns.any(dim=1, keepdim=True)
        inner = s.masked_fill(~columns & some, -math.inf)
        return torch.logsumexp(inner, dim=2, keepdim=True).masked_fill(~some, -math.inf)

    def _log_denominator(self, recipe: Recipe) -> Tensor:
        key = ("below", recipe.similarity, recipe.tempering, recipe.numerator, recipe.denominator, recipe.flow)
        return self._once(key, lambda: self._summed(recipe))

    def _summed(self, recipe: Recipe) -> Tensor:
        """[T, M, M] or [T, M, 1], log D_ip."""
        kind, s = DENOMINATORS[recipe.denominator], self._logits(recipe)
        if recipe.numerator == "untempered below":
            s = self._similarity(recipe.similarity, recipe.flow).expand_as(s)
        columns = kind.columns(self.setting)
        below: Tensor
        if kind.special == "axis":
            below = self._over((columns & self.setting.anchors[:, None]).T, s.transpose(1, 2)).transpose(1, 2)
            below = below.expand_as(s)
        elif kind.special == "batch":
            rows = columns & self.setting.anchors[:, None]
            below = torch.logsumexp(s.masked_fill(~rows, -math.inf).flatten(1), dim=1)[:, None, None]
        elif kind.special == "largest":
            below = s.masked_fill(~columns, -math.inf).amax(dim=2, keepdim=True)
        else:
            below = self._over(columns, s)
        if kind.special == "mean":
            below = below - columns.sum(dim=1).clamp(min=1).to(torch.float64).log()[:, None]
        if kind.special == "subtract":
            below = below + torch.log1p(-torch.exp(1 / self._divisor(recipe) - below))
        with_positive = kind.with_positive
        if recipe.numerator == "untempered" and with_positive == 0 and kind.columns is _member:
            below = torch.logaddexp(_less(below, s), self._above(recipe))
        elif with_positive == 1:
            above = s if recipe.numerator == "untempered above" else self._above(recipe)
            below = torch.logaddexp(below, above)
        elif with_positive == -1:
            below = _less(below, s)
        if kind.leaks is not None:
            below = torch.logaddexp(below, kind.leaks(self.setting).to(torch.float64).log()[:, None])
        return below.detach() if recipe.flow == "denominator" else below

    def _above(self, recipe: Recipe) -> Tensor:
        """[T, M, M], the logarithm of the numerator."""
        s = self._logits(recipe)
        if recipe.numerator in ("untempered", "untempered above"):
            s = self._similarity(recipe.similarity, recipe.flow).expand_as(s)
        elif recipe.numerator == "swollen":
            s = s / self._divisor(recipe)
        return s.detach() if recipe.flow == "numerator" else s

    def pairs(self, recipe: Recipe) -> Tensor:
        """[T, M, M], what each pair costs: log D_ip less the logarithm of the numerator, guarded."""
        key = ("pairs", *(getattr(recipe, name) for name in _PAIR_PARTS))
        return self._once(key, lambda: self._guarded(recipe))

    def _guarded(self, recipe: Recipe) -> Tensor:
        below, above = self._log_denominator(recipe), self._above(recipe)
        if not recipe.guard:
            return below - above
        kind, _, text = recipe.guard.partition(" ")
        epsilon, s = float(text), self._logits(recipe)
        if kind == "ratio":
            return -torch.log(torch.exp(above - below) + epsilon)
        if kind == "below":
            return torch.log(torch.exp(below) + epsilon) - above
        if kind == "twice":
            return -torch.log(torch.exp(above) / (torch.exp(below) + epsilon) + epsilon)
        columns = self.setting.member if kind == "others" else self.setting.member | self.setting.own
        top = s.masked_fill(~columns & columns.any(dim=1, keepdim=True), -math.inf).amax(dim=2, keepdim=True)
        if kind in ("shifted", "others"):
            # A maximum that is subtracted and added again has no gradient of its own.
            top = top.detach()
            return torch.log(torch.exp(below - top) + epsilon) + top - above
        if recipe.flow == "maximum" or kind == "above":
            top = top.detach()
        numerator = torch.log(torch.exp(above - top) + epsilon)
        if kind == "above":
            return below - top - numerator
        denominator = DENOMINATORS[recipe.denominator]
        number = denominator.columns(self.setting).sum(dim=1).clamp(min=1).to(torch.float64)[:, None]
        number = number + denominator.with_positive
        return torch.log(torch.exp(below - top) + number * epsilon) - numerator

    def anchors(self, recipe: Recipe) -> Tensor:
        """[T, M], every anchor's value; 0 for rows that are no anchors, or that have no positive.

        For the form "pooled" the one value there is stands at the first anchor.
        """
        setting = self.setting
        if recipe.form.startswith("binary"):
            each = self._binary(recipe)
            return each.masked_fill(~setting.anchors, 0.0)
        positive = setting.positive & setting.anchors[:, None]
        number = setting.counts.to(torch.float64)
        some = number > 0
        if recipe.form == "all rows":
            positive, number = setting.member & setting.anchors[:, None], setting.member.sum(dim=1).to(torch.float64)
        value = self.pairs(recipe)
        if DENOMINATORS[recipe.denominator].with_positive == 0 and recipe.denominator.startswith("only_negatives"):
            some = some & setting.negative.any(dim=1)
            positive = positive & some[:, None]
        zero = torch.zeros((), dtype=torch.float64)
        least = number.clamp(min=1)
        form = recipe.form
        if form == "hardest":
            each = value.masked_fill(~positive, -math.inf).amax(dim=2)
        elif form == "easiest":
            each = value.masked_fill(~positive, math.inf).amin(dim=2)
        elif form == "log once":
            below = self._log_denominator(recipe).expand_as(value)
            below = torch.where(positive, below, zero).sum(dim=2) / least**2
            each = below - torch.where(positive, self._above(recipe), zero).sum(dim=2) / least
        elif form == "numerator":
            each = -torch.where(positive, self._above(recipe), zero).sum(dim=2) / least
        elif form == "sum logged":
            each = torch.where(positive, value, torch.ones_like(zero)).prod(dim=2)
        elif form == "pooled":
            ratio = torch.where(positive, torch.exp(-torch.where(positive, value, zero)), zero).sum(dim=2) / least
            total = -torch.log(ratio[:, some].mean(dim=1))
            each = torch.zeros_like(ratio)
            first = int(some.nonzero()[0]) if bool(some.any()) else 0
            return each.index_add(1, torch.tensor([first]), total[:, None])
        elif form.startswith("inside") or form == "unlogged":
            each = self._inside(recipe, torch.where(positive, value, zero), positive, least)
        else:
            total = torch.where(positive, value, zero).sum(dim=2)
            divisor = {
                "mean": least,
                "all rows": least,
                "sum": torch.ones_like(least),
                "twice": least**2,
                "plus one": least + 1,
                "others": setting.member.sum(dim=1).clamp(min=1).to(torch.float64),
                "doubled": 1 / least,
            }[form]
            kind, _, epsilon = recipe.guard.partition(" ")
            if kind == "each":
                divisor = divisor + float(epsilon)
            each = total / divisor
        return torch.where(some, each, zero)

    def _inside(self, recipe: Recipe, value: Tensor, positive: Tensor, least: Tensor) -> Tensor:
        """The forms that sum ratios: -log of their mean or sum, or the ratios as they are."""
        some = positive.any(dim=1, keepdim=True)
        logs = (-value).masked_fill(~positive & some, -math.inf)
        if recipe.form.startswith("inside leak"):
            # The masked diagonal's exponential, over the same denominator.
            below = self._log_denominator(recipe)[..., :1]
            logs = torch.cat([logs, (-below).expand(*logs.shape[:2], 1)], dim=2)
        inside = torch.logsumexp(logs, dim=2)
        if recipe.form == "unlogged":
            return -inside.exp() / least
        extra = {"inside": least, "inside leak": least, "inside plus one": least + 1}.get(
            recipe.form, torch.ones_like(least)
        )
        return extra.log() - inside

    def _binary(self, recipe: Recipe) -> Tensor:
        """The binary cross-entropy of every pair."""
        setting, s = self.setting, self._above(recipe)
        if recipe.form == "binary, swapped sign":
            s = -s
        zero = torch.zeros((), dtype=torch.float64)
        positive, negative = setting.positive & ~setting.own, setting.negative & ~setting.own
        form = recipe.form.removeprefix("binary").removeprefix(", ")
        if form == "self":
            positive = positive | setting.own
        elif form == "self negative":
            negative = negative | setting.own
        attract = torch.where(positive, _softplus(-s), zero).sum(dim=2)
        push = _softplus(s)
        if form == "other":
            similarity = self._similarity(recipe.similarity, recipe.flow)
            push = _softplus(-(1 - similarity) / self._divisor(recipe))
        repel = torch.where(negative, push, zero).sum(dim=2)
        counted = positive.sum(dim=1).to(torch.float64)
        against = negative.sum(dim=1).clamp(min=1).to(torch.float64)
        with_self = counted if form in ("self", "no self", "self negative") else counted + 1
        if form == "sum":
            return attract + repel
        if form == "together":
            return (attract + repel) / (counted + negative.sum(dim=1)).clamp(min=1)
        if form == "positives":
            return attract / with_self
        if form == "negatives":
            return repel / against
        if form == "sum negatives":
            return attract / with_self + repel
        if form == "sum positives":
            return attract + repel / against
        return attract / with_self.clamp(min=1) + repel / against


_PAIR_PARTS = tuple(f.name for f in fields(Recipe) if f.name not in ("form", "reading"))


def _softplus(x: Tensor) -> Tensor:
    """log(1 + e^x) to the last digit: torch's own is cut off above 20."""
    return torch.logaddexp(x, torch.zeros((), dtype=x.dtype))


def _less(a: Tensor, b: Tensor) -> Tensor:
    """log(e^a - e^b), where b is no more than a; -inf where they are equal."""
    gap = torch.exp((b - a).clamp(max=0))
    # At equality, nothing is left; its derivative is kept out of the graph.
    left = gap < 1
    return torch.where(left, a + torch.log1p(-torch.where(left, gap, torch.zeros_like(gap))), -math.inf)


# Counts: what the sum over the anchors is divided by


@dataclass(frozen=True)
class Count:
    """A number that a sum over anchors may be divided by."""

    name: str
    words: str
    number: Callable[[Setting], float]


COUNTS: Mapping[str, Count] = MappingProxyType(
    {
        count.name: count
        for count in (
            Count("mean", "the mean over the anchors", lambda s: float(s.anchors.sum())),
            Count("sum", "the sum over the anchors", lambda s: 1.0),
            Count("drop", "the mean over the anchors that have a positive", lambda s: float((s.counts > 0).sum())),
            Count("mean_pairs", "the mean over the positive pairs", lambda s: float(s.counts.sum())),
            Count("items", "the sum over the anchors divided by the number of items", lambda s: float(s.n_items)),
            Count("classes", "the sum over the anchors divided by the number of classes", lambda s: float(s.classes)),
            Count(
                "less one",
                "the sum over the anchors divided by their number less 1",
                lambda s: float(s.anchors.sum()) - 1,
            ),
            Count(
                "square",
                "the sum over the anchors divided by the square of their number",
                lambda s: float(s.anchors.sum()) ** 2,
            ),
            Count(
                "members",
                "the sum over the anchors divided by the number of all comparisons",
                lambda s: float((s.member & s.anchors[:, None]).sum()),
            ),
            Count(
                "negatives",
                "the sum over the anchors divided by the number of negative pairs",
                lambda s: float((s.negative & s.anchors[:, None]).sum()),
            ),
        )
    }
)

POLICIES = ("zero", "drop", "nan")


def reduce_anchors(setting: Setting, each: Tensor, reduction: str, policy: str = "zero") -> Tensor:
    """Every anchor's value [M] as a loss: over the count that ``reduction`` names, or one by one for "none"."""
    lonely = setting.anchors & (setting.counts == 0)
    if policy == "nan":
        each = torch.where(lonely, math.nan, each)
    counted = setting.anchors & ~lonely if policy == "drop" else setting.anchors
    if reduction == "none":
        return each[counted]
    if reduction == "mean" and policy == "drop":
        return each[counted].sum() / max(int(counted.sum()), 1)
    return each[setting.anchors].sum() / max(COUNTS[reduction].number(setting), 1.0)


def variations(recipe: Recipe, call: str) -> Iterator[Recipe]:
    """Every recipe that differs from this one in one part that no loss of the catalogue has."""
    if recipe.form.startswith("binary"):
        forms = [name for name in FORMS if name.startswith("binary, ")]
        denominators: list[str] = []
        guards: list[str] = []
        numerators: list[str] = []
    else:
        forms = [name for name, words in FORMS.items() if words and not name.startswith("binary")]
        if recipe.form == "inside":
            forms = [name for name in forms if name.startswith(("inside", "pooled", "unlogged"))]
        else:
            forms = [name for name in forms if not name.startswith("inside leak")] + ["inside leak"]
        stem = recipe.denominator
        denominators = [
            name
            for name, kind in DENOMINATORS.items()
            if kind.words and (name.partition(",")[0] == stem or name.partition(",")[0] not in STEMS)
        ]
        guards = [] if recipe.guard else [f"{kind} {epsilon:.0e}" for kind in GUARD_WORDS for epsilon in EPSILONS]
        numerators = [name for name in NUMERATORS if name != "same"]
    for name, reading in READINGS.items():
        if call in reading.calls and reading.words and name != recipe.reading and recipe.reading == "meant":
            yield replace(recipe, reading=name)
    for name, similarity in SIMILARITIES.items():
        if similarity.words:
            yield replace(recipe, similarity=name)
    for name in numerators:
        yield replace(recipe, numerator=name)
    for name in denominators:
        yield replace(recipe, denominator=name)
    for name in guards:
        yield replace(recipe, guard=name)
    for name in forms:
        yield replace(recipe, form=name)


STEMS = ("all", "one_positive", "only_negatives")


def temperings(recipe: Recipe) -> Iterator[Recipe]:
    """The recipe with everything that may go wrong with the temperature of all logits."""
    for name in TEMPERINGS:
        if name != recipe.tempering:
            yield replace(recipe, tempering=name)
