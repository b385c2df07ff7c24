"""What a loss may be: every loss of the catalogue, its options, and one wrong part in each of them.

``recipes`` has the parts; here they are put together under the catalogue's names. ``diagnose`` asks them what a
failing check computed instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import MappingProxyType

import torch

from ..implementations.callable import Batch
from ..suite.catalogue import LOSSES
from .explain_failure import diagnose
from .positives import FEATURES, LABELS, PAIRS, VIEWS, read
from .variants import EPSILON_GUARD, FLOWS, POLICIES, Evaluation, Recipe, reduce_anchors, temperings, variations

Tensor = torch.Tensor

__all__ = ["Base", "Hypothesis", "bases", "describe", "diagnose", "hypotheses", "predict_with"]

Predict = Callable[[Batch, "float | Tensor"], Tensor]


@dataclass(frozen=True)
class Hypothesis:
    """One thing that a loss may be.

    Attributes:
        name: short and unique among those of one call: the parts.
        words: what it computes, in a sentence.
        predict: ``predict(batch, temperature)`` gives its value, a float64 scalar, or one value per anchor for the
            reduction "none"; differentiable by the batch's embeddings.
        loss: the loss of the catalogue that it is, or comes from.
        options: the options of that loss that are not at their default.
        recipe: its parts.
        reduction: the name of the count that the sum is divided by, or "none".
        policy: what an anchor without positive adds: "zero", "drop" or "nan".
        factor: what the value is multiplied by.
        wrong: what no loss of the catalogue does, one sentence each; empty for the right ones.
    """

    name: str
    words: str
    predict: Predict = field(compare=False)
    loss: str = ""
    options: Mapping[str, str] = field(default_factory=dict, compare=False)
    recipe: Recipe = field(default_factory=Recipe)
    reduction: str = "mean"
    policy: str = "zero"
    factor: float = 1.0
    wrong: tuple[str, ...] = ()


@dataclass(frozen=True)
class Base:
    """A loss of the catalogue with its options, as a recipe.

    Attributes:
        loss: the short name.
        options: those that are not at their default, the similarity, the reduction and the policy apart.
        recipe: its parts, with cosine similarity.
        pairs: whether "mean_pairs" is one of its reductions.
        policies: whether it has policies for anchors without positive.
    """

    loss: str
    options: Mapping[str, str]
    recipe: Recipe
    pairs: bool = False
    policies: bool = True

    def with_similarity(self, similarity: str) -> Base:
        """The same with another similarity, said among the options where it is not the default."""
        default = LOSSES[self.loss].keywords["similarity"]
        options = dict(self.options) if similarity == default else {**self.options, "similarity": similarity}
        return replace(self, options=options, recipe=replace(self.recipe, similarity=similarity))


@cache
def bases(call: str) -> tuple[Base, ...]:
    """Every loss of the catalogue that can be asked with a call, with its options, both similarities."""
    found = []
    supervised = call in (LABELS, FEATURES, PAIRS)
    if call == VIEWS:
        found.append(Base("nt_xent", {}, Recipe(), policies=False))
    if call == FEATURES:
        found.append(Base("nt_xent", {}, Recipe(reading="views"), policies=False))
    if call in (VIEWS, FEATURES):
        found += [
            Base(
                "info_nce",
                {} if direction == "both" else {"direction": direction},
                Recipe(reading="towers" if direction == "both" else f"towers {direction}"),
                policies=False,
            )
            for direction in ("both", "a_to_b", "b_to_a")
        ]
    if call == PAIRS:
        found.append(Base("nt_bxent", {}, Recipe(form="binary"), policies=False))
    if supervised:
        for loss, form in (("supcon", "mean"), ("supcon_in", "inside")):
            found += [
                Base(
                    loss,
                    {} if denominator == "all" else {"denominator": denominator},
                    Recipe(denominator=denominator, form=form),
                )
                for denominator in ("all", "one_positive", "only_negatives")
            ]
        found.append(Base("nt_xent_pairwise", {}, Recipe(denominator="one_positive"), pairs=True))
        found.append(Base("supcon_epsilon", {}, Recipe(guard=EPSILON_GUARD)))
    if call == LABELS:
        found.append(Base("nt_xent", {}, Recipe(reading="stacked partners"), policies=False))
        found.append(Base("nt_xent", {}, Recipe(reading="neighbours"), policies=False))
    if call in (LABELS, FEATURES, VIEWS):
        found.append(Base("nt_bxent", {}, Recipe(form="binary"), policies=False))
    return tuple(base.with_similarity(similarity) for base in found for similarity in ("cosine", "dot"))


def predict_with(recipe: Recipe, reduction: str, policy: str, factor: float) -> Predict:
    """A prediction from parts: see ``Hypothesis.predict``."""

    def predict(batch: Batch, temperature: float | Tensor) -> Tensor:
        setting = read(batch, recipe.reading)
        if setting is None:
            raise ValueError(f"batch {batch.name!r}: cannot be read as {recipe.reading!r}")
        at = torch.as_tensor(temperature, dtype=torch.float64).reshape(1)
        return reduce_anchors(setting, Evaluation(setting, at).anchors(recipe)[0], reduction, policy) * factor

    return predict


def describe(base: Base, recipe: Recipe, reduction: str = "mean", policy: str = "zero") -> str:
    """A loss, its options and what is wrong with it, in one line."""
    options = dict(base.options)
    if reduction in ("sum", "none", "mean_pairs"):
        options["reduction"] = reduction
    if base.policies and policy != "zero":
        options["no_positive"] = policy
    said = ", ".join(f"{key}={value}" for key, value in options.items())
    wrong = recipe.words()
    return base.loss + (f" with {said}" if said else "") + (f"; but {'; '.join(wrong)}" if wrong else "")


def _hypothesis(base: Base, recipe: Recipe, reduction: str, policy: str) -> Hypothesis:
    parts = [base.loss, *(f"{f.name}={getattr(recipe, f.name)}" for f in fields(Recipe)), reduction, policy]
    given = recipe
    # The mean over pairs is of the pairs' own sum.
    if reduction == "mean_pairs" and recipe.form == "mean":
        given = replace(recipe, form="sum")
    options = dict(base.options)
    if reduction != "mean":
        options["reduction"] = reduction
    if base.policies and policy != "zero":
        options["no_positive"] = policy
    return Hypothesis(
        name="/".join(parts),
        words=describe(base, recipe, reduction, policy),
        predict=predict_with(given, reduction, policy, 1.0),
        loss=base.loss,
        options=MappingProxyType(options),
        recipe=given,
        reduction=reduction,
        policy=policy,
        wrong=tuple(recipe.words()),
    )


def hypotheses(loss: str | None = None, call: str = LABELS, *, wrong: bool = True) -> Iterator[Hypothesis]:
    """The catalogue, its options, and every modification of one part.

    Args:
        loss: only this loss, by its short name.
        call: how the target is asked.
        wrong: whether the modifications come too.
    """
    for base in bases(call):
        if loss is not None and base.loss != loss:
            continue
        reductions = ("mean", "sum", "none", "mean_pairs") if base.pairs else ("mean", "sum", "none")
        for reduction in reductions:
            for policy in POLICIES if base.policies else ("zero",):
                yield _hypothesis(base, base.recipe, reduction, policy)
        if wrong:
            for recipe in (*variations(base.recipe, call), *temperings(base.recipe)):
                yield _hypothesis(base, recipe, "mean", "zero")
            for flow in FLOWS:
                if flow != "whole":
                    yield _hypothesis(base, replace(base.recipe, flow=flow), "mean", "zero")
