"""Correct parts from which every fault is built, and the correct losses built from the same parts.

A *builder*, such as ``labelled`` or ``views``, converts the arguments of a call to the input of a loss, such as a
``Batch`` or ``Rows``. ``loss_of`` evaluates this input. One builder returns something else: ``features`` returns a
``Features``, whose properties are inputs of losses.

A fault changes one detail of a correct loss. So a case that the fault fails detects this detail.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from pairproof.reference.ranking import hard_of_documents

from ..implementations import base
from ..suite.catalogue import LOSSES

EPSILON = 1e-8
"""``supcon_epsilon`` adds this to every exponential and to the number of positives. The loss is that of a published
tutorial (fixtures/worked/batch_tutorial.json)."""

unit = base.unit
"""Rows of norm 1."""


class Batch(NamedTuple):
    """All pairs within a batch, or between two towers.

    Attributes:
        s: [N, N] logits. ``batch_of``, ``dots`` and ``labelled`` subtract the largest of each row.
        positive: [N, N], true where the column is a positive of the row. Within a batch, the diagonal is false.
        other: [N, N], true for the pairs that the loss uses. Within a batch, the diagonal is false.
    """

    s: Tensor
    positive: Tensor
    other: Tensor

    @property
    def negative(self) -> Tensor:
        """[N, N], true for the pairs in ``other`` that are not positive."""
        return self.other & ~self.positive

    @property
    def counts(self) -> Tensor:
        """[N], the number of positives of each anchor, in the dtype of the logits."""
        return self.positive.sum(dim=1).to(self.s.dtype)

    @property
    def values(self) -> Tensor:
        """[N, N], minus the log-softmax of each pair, as in SupCon."""
        return log_sum(self.s, self.other) - self.s

    @property
    def pairwise(self) -> Tensor:
        """[N, N], the loss of each pair if the denominator contains only the pair and the anchor's negatives."""
        return -F.logsigmoid(self.s - log_sum(self.s, self.negative))

    @property
    def costs(self) -> tuple[Tensor, Tensor]:
        """The cost [N, N] of each pair in NT-BXent as a positive, and as a negative."""
        return -F.logsigmoid(self.s), -F.logsigmoid(-self.s)


class Rows(NamedTuple):
    """Logits with one positive per row.

    Attributes:
        logits: [N, M].
        target: [N], the column of each row's positive.
    """

    logits: Tensor
    target: Tensor

    @property
    def positive(self) -> Tensor:
        """[N, M], true at each row's positive."""
        return F.one_hot(self.target, self.logits.shape[1]).bool()

    @property
    def negatives(self) -> Tensor:
        """[N], the logsumexp over the negatives."""
        return log_sum(self.logits, ~self.positive)[:, 0]


class Direction(NamedTuple):
    """One direction of InfoNCE.

    Attributes:
        anchors: [B, D].
        keys: [B, D], the positive of each anchor.
        temperature: divides the cosines.
        negatives: [K, D]. If None, the other keys are the negatives.
    """

    anchors: Tensor
    keys: Tensor
    temperature: float
    negatives: Tensor | None = None

    @property
    def rows(self) -> Rows:
        """Logits [B, B], positives on the diagonal; with ``negatives`` [B, 1 + K], positives in column 0."""
        anchors, keys = unit(self.anchors), unit(self.keys)
        if self.negatives is None:
            return diagonal(anchors @ keys.T / self.temperature)
        positive = (anchors * keys).sum(dim=1, keepdim=True)
        logits = torch.cat([positive, anchors @ unit(self.negatives).T], dim=1) / self.temperature
        return Rows(logits, torch.zeros(len(logits), dtype=torch.int64))


class Hard(NamedTuple):
    """The logits of two views, and the parameters of the loss in `pairproof.reference.hard_negative`.

    Attributes:
        rows: the logits [2B, 2B] and the columns of the positives.
        temperature: divides the cosines.
        tau_plus: the probability that a negative is a hidden positive.
        beta: the exponent of the weights.
    """

    rows: Rows
    temperature: float
    tau_plus: float
    beta: float

    @property
    def negative(self) -> Tensor:
        """[2B, 2B], true for the negatives of each row."""
        return off_diagonal(len(self.rows.target)) & ~self.rows.positive

    @property
    def number(self) -> int:
        """The number of negatives of a row."""
        return len(self.rows.target) - 2

    def log_sum(self, logits: Tensor) -> Tensor:
        """[2B], the logsumexp over the negatives."""
        return log_sum(logits, self.negative)[:, 0]

    @property
    def log_mean(self) -> Tensor:
        """[2B], log g: the logarithm of the weighted mean of the negatives' exponentials."""
        s = self.rows.logits
        return self.log_sum((1 + self.beta) * s) - self.log_sum(self.beta * s)

    def against(
        self, log_mean: Tensor, *, hidden: float | None = None, number: int | None = None, floors: float | None = None
    ) -> Tensor:
        """[2B], the value -log( e^s / (e^s + M) ) of each row, where s is the logit of the positive.

        M = max( number (g - hidden e^s) / (1 - tau_plus), floors e^(-1/temperature) )

        Args:
            log_mean: [2B], log g.
            hidden: ``tau_plus`` by default.
            number: the number of negatives by default.
            floors: ``number`` by default.
        """
        own = self.rows.logits[self.rows.positive]
        number = self.number if number is None else number
        floors = number if floors is None else floors
        hidden = self.tau_plus if hidden is None else hidden
        excess = log_mean - own
        if hidden:
            above = excess > math.log(hidden)
            share = hidden * (-excess.where(above, 0.0)).exp()
            excess = (excess + torch.log1p(-share)).where(above, -torch.inf)
        log_ratio = excess - math.log(1 - self.tau_plus) + _log(number)
        return -F.logsigmoid(-log_ratio.maximum(-1 / self.temperature - own + _log(floors)))


class Ranking(NamedTuple):
    """The logits between queries, documents and hard negatives. The logit of a pair that does not count is -inf.

    Attributes:
        query_to_doc: [N, N], the positives on the diagonal.
        hard: [N, N H], from queries to hard negatives, those of query 0 first; H may be 0.
        query_to_query: [N, N].
        doc_to_query: [N, N].
        doc_to_doc: [N, N].
        doc_to_hard: [N, N H].
        chosen: names of the directions that the loss uses.
        partition: "joint" (one denominator) or "per_direction".
        hard_of_doc: "others", "all" or "none", the hard negatives of documents.
        arguments: the arguments of ``ranking``.
        raw: a ``Ranking`` with the logits of all pairs, without hardness.
    """

    query_to_doc: Tensor
    hard: Tensor
    query_to_query: Tensor
    doc_to_query: Tensor
    doc_to_doc: Tensor
    doc_to_hard: Tensor
    chosen: tuple[str, ...]
    partition: str
    hard_of_doc: str
    arguments: Mapping[str, Any]
    raw: Any = None

    def again(self, **changed: Any) -> Ranking:
        """Return the result of ``ranking`` with some changed arguments."""
        return ranking(**{**self.arguments, **changed})

    @property
    def own(self) -> Tensor:
        """[N, N H], true at the query's own hard negatives."""
        n, columns = self.hard.shape
        return torch.eye(n, dtype=torch.bool).repeat_interleave(columns // n, dim=1)

    @property
    def blocks(self) -> dict[str, Tensor]:
        """The logits of each chosen direction."""
        every = {
            "query_to_doc": torch.cat([self.query_to_doc, self.hard], dim=1),
            "query_to_query": self.query_to_query,
            "doc_to_query": self.doc_to_query,
            "doc_to_doc": torch.cat([self.doc_to_doc, self.doc_to_hard], dim=1),
        }
        return {name: logits for name, logits in every.items() if name in self.chosen}

    @property
    def rows(self) -> Evaluable:
        """One matrix of logits, or one per direction, with the positives on the diagonal."""
        found = list(self.blocks.values())
        return diagonal(torch.cat(found, dim=1)) if self.partition == "joint" else [diagonal(s) for s in found]


class Decoupled(NamedTuple):
    """The logits of two views, and the parameters of the weighted decoupled loss (DCLW).

    Attributes:
        rows: the logits [2B, 2B] and the columns of the positives.
        temperature: divides the cosines.
        sigma: divides the cosines from which the weights are computed.
        detach: whether the weights are constants.
    """

    rows: Rows
    temperature: float
    sigma: float
    detach: bool

    @property
    def own(self) -> Tensor:
        """[2B], the logits of the positives."""
        return self.rows.logits[self.rows.positive]

    @property
    def closeness(self) -> Tensor:
        """[2B], the cosines of the positives, divided by sigma."""
        return self.own * self.temperature / self.sigma

    @property
    def weights(self) -> Tensor:
        """[2B], the weights of the positives."""
        return self.held(2 - len(self.own) * self.closeness.softmax(dim=0))

    def held(self, weights: Tensor) -> Tensor:
        """Detach weights [2B] if ``detach``."""
        return weights.detach() if self.detach else weights

    def against(self, weights: Tensor, columns: Tensor | None = None) -> Tensor:
        """[2B], the value of each row.

        Args:
            weights: [2B], the weights of the positives.
            columns: [2B, 2B], true for the terms of the denominator; the negatives by default.
        """
        negative = off_diagonal(len(self.own)) & ~self.rows.positive
        below = log_sum(self.rows.logits, negative if columns is None else columns)[:, 0]
        return (below - weights * self.own).where(negative.any(dim=1), 0)


def _log(number: float) -> float:
    return math.log(number) if number else -math.inf


class Each(NamedTuple):
    """A loss that is one value per anchor or per pair: ``values`` [K]."""

    values: Tensor


class Sides(NamedTuple):
    """The pairs of two towers, with the anchors of the first tower and with those of the second."""

    there: Batch
    back: Batch


Evaluable: TypeAlias = Tensor | Batch | Sides | Rows | Direction | Hard | Decoupled | Ranking | Each | list["Evaluable"]
"""What a builder or a fault returns: an input of a loss, values, or a loss. The losses of a list are averaged."""

Builder: TypeAlias = Callable[..., Any]
Function: TypeAlias = Callable[..., Tensor]


def loss_of(loss: str, found: Evaluable) -> Tensor:
    """Evaluate the correct loss on an input. Tensors of values are averaged; ``Each`` is returned as it is."""
    if isinstance(found, Ranking):
        return loss_of(loss, found.rows)
    if isinstance(found, list):
        return torch.stack([loss_of(loss, each) for each in found]).mean()
    if isinstance(found, Each):
        return found.values
    if isinstance(found, Sides):
        return torch.cat([info_nce_values(side) for side in found]).mean()
    if isinstance(found, Direction):
        found = found.rows
    if isinstance(found, Rows):
        return F.cross_entropy(*found)
    if isinstance(found, Hard):
        return found.against(found.log_mean).mean()
    if isinstance(found, Decoupled):
        return found.against(found.weights).mean()
    return (anchors(loss, found) if isinstance(found, Batch) else found).mean()


def composed(
    loss: str,
    build: Builder,
    function: Callable[..., Evaluable] = lambda built: built,
    takes: Sequence[str] | None = None,
) -> Function:
    """Return the loss of ``function(build(...))`` as a function with the parameters of ``build``.

    If ``build`` returns a list, ``function`` is applied to each item. Further parameters of ``function`` become
    keywords, by default None. Without one that ``function`` requires, the result is the loss of ``build(...)``.

    Args:
        loss: short name in the catalogue.
        build: returns an input of the loss.
        function: changes this input.
        takes: the optional parameters of ``build`` to keep; all by default.
    """
    further = [*inspect.signature(function).parameters.values()][1:]

    @wraps(build)
    def called(*given: Tensor | None, **options: Any) -> Tensor:
        found = {p.name: options.pop(p.name, None) for p in further}
        own = {name: value for name, value in found.items() if value is not None}
        built = build(*given, **options)
        if any(p.default is p.empty and p.name not in own for p in further):
            return loss_of(loss, built)
        changed = [function(each, **own) for each in built] if isinstance(built, list) else function(built, **own)
        return loss_of(loss, changed)

    every = inspect.signature(build).parameters.values()
    kept = [p for p in every if takes is None or p.default is p.empty or p.name in takes]
    added = [p.replace(kind=p.KEYWORD_ONLY, default=None if p.default is p.empty else p.default) for p in further]
    vars(called)["__signature__"] = inspect.Signature([*kept, *added])
    return called


def off_diagonal(n: int) -> Tensor:
    """[N, N], true off the diagonal."""
    return ~torch.eye(n, dtype=torch.bool)


def shifted(s: Tensor, members: Tensor) -> Tensor:
    """Subtract the largest member of each row from logits [N, M]. No gradient flows through the subtracted number."""
    return s - s.detach().masked_fill(~members, torch.finfo(s.dtype).min).amax(dim=1, keepdim=True)


def batch_of(s: Tensor, positive: Tensor) -> Batch:
    """A batch of shifted logits, from logits [N, N] and a mask of positives [N, N]."""
    other = off_diagonal(len(s))
    return Batch(shifted(s, other), positive & other, other)


def dots(embeddings: Tensor, labels: Tensor, temperature: float) -> Batch:
    """A batch of shifted dot products. Rows with equal labels are positives."""
    return batch_of(embeddings @ embeddings.T / temperature, labels[:, None] == labels)


def labelled(embeddings: Tensor, labels: Tensor, temperature: float) -> Batch:
    """A batch of shifted cosines. Rows with equal labels are positives."""
    return dots(unit(embeddings), labels, temperature)


def products(embeddings: Tensor, labels: Tensor, temperature: float) -> Batch:
    """A batch of unshifted dot products. Rows with equal labels are positives."""
    return dots(embeddings, labels, temperature)._replace(s=embeddings @ embeddings.T / temperature)


def cosines(embeddings: Tensor, labels: Tensor, temperature: float) -> Batch:
    """A batch of unshifted cosines. Rows with equal labels are positives."""
    return products(unit(embeddings), labels, temperature)


def paired(embeddings: Tensor, positive_pairs: Tensor, temperature: float) -> Batch:
    """A batch of unshifted cosines with listed positives. A pair listed twice counts once."""
    rows, other = unit(embeddings), off_diagonal(len(embeddings))
    positive = torch.zeros_like(other)
    positive[positive_pairs[:, 0], positive_pairs[:, 1]] = True
    return Batch(rows @ rows.T / temperature, positive & other, other)


class Features(NamedTuple):
    """The arguments of a call with features [B, V, D]. Without labels and mask, each item is a class."""

    features: Tensor
    labels: Tensor | None
    mask: Tensor | None
    temperature: float

    @property
    def rows(self) -> Tensor:
        """[V B, D], all first views first."""
        return self.features.transpose(0, 1).flatten(0, 1)

    @property
    def same(self) -> Tensor:
        """[V B, V B], true for pairs of the same class, or for positives in the mask."""
        items, views, _ = self.features.shape
        labels = torch.arange(items) if self.labels is None else self.labels
        mask = labels[:, None] == labels if self.mask is None else self.mask
        return mask.bool().repeat(views, views)

    @property
    def dots(self) -> Batch:
        """A batch of shifted dot products of the rows."""
        return batch_of(self.rows @ self.rows.T / self.temperature, self.same)

    @property
    def cosines(self) -> Batch:
        """A batch of shifted cosines of the rows."""
        return self._replace(features=unit(self.features)).dots

    @property
    def views(self) -> Rows:
        """The logits of two views."""
        view_a, view_b = self.features.unbind(dim=1)
        return views(view_a, view_b, self.temperature)


def features(
    features: Tensor, labels: Tensor | None = None, mask: Tensor | None = None, *, temperature: float
) -> Features:
    """The arguments of a call with features, unchanged."""
    return Features(features, labels, mask, temperature)


def views(view_a: Tensor, view_b: Tensor, temperature: float) -> Rows:
    """The logits [2B, 2B] of the cosines of stacked views."""
    return of_rows(unit(torch.cat([view_a, view_b])), temperature)


def of_rows(rows: Tensor, temperature: float = 1.0) -> Rows:
    """The logits [2B, 2B] of the dot products of stacked views."""
    return among_views(rows @ rows.T / temperature)


def among_views(logits: Tensor) -> Rows:
    """Logits [2B, 2B] of stacked views, with the diagonal masked."""
    return Rows(logits.masked_fill(~off_diagonal(len(logits)), -torch.inf), stacked(len(logits)))


def stacked(n: int) -> Tensor:
    """[N], the partner of every row if all first views come before all second views."""
    return (torch.arange(n) + n // 2) % n


def directions(view_a: Tensor, view_b: Tensor, negatives: Tensor | None = None, *, temperature: float) -> Evaluable:
    """Both directions of InfoNCE between two towers, with or without a queue."""
    return [Direction(view_a, view_b, temperature, negatives), Direction(view_b, view_a, temperature, negatives)]


def towers(view_a: Tensor, view_b: Tensor, *, temperature: float) -> Evaluable:
    """Both directions of InfoNCE between two towers, without a queue."""
    return directions(view_a, view_b, temperature=temperature)


def across(
    view_a: Tensor,
    view_b: Tensor,
    *,
    temperature: float,
    bias: float = -10.0,
    similarity: str = "cosine",
    labels: Tensor | None = None,
    ref_labels: Tensor | None = None,
    positives: Tensor | None = None,
    partners: Tensor | None = None,
) -> Batch:
    """All pairs of two towers; the bias is added to the logits. By default the positives are on the diagonal."""
    a, b = (unit(view_a), unit(view_b)) if similarity == "cosine" else (view_a, view_b)
    s = a @ b.T / temperature + bias
    if labels is not None:
        positives = labels[:, None] == (labels if ref_labels is None else ref_labels)
    elif positives is None:
        columns = torch.arange(len(s)) if partners is None else partners
        positives = columns[:, None] == torch.arange(s.shape[1])
    return Batch(s, positives, torch.ones_like(s, dtype=torch.bool))


def both_sides(
    view_a: Tensor,
    view_b: Tensor,
    negatives: Tensor | None = None,
    *,
    temperature: float,
    partners: Tensor | None = None,
    labels: Tensor | None = None,
    ref_labels: Tensor | None = None,
    positives: Tensor | None = None,
    ignored: Tensor | None = None,
    ignored_ids: Tensor | None = None,
    ref_ignored_ids: Tensor | None = None,
) -> Sides:
    """The pairs of two towers that are not ignored, with anchors of the first and of the second tower.

    With explicit negatives, the first column is the positive, and the others are the negatives.
    """
    if negatives is not None:
        rows = [Direction(*pair, temperature, negatives).rows for pair in ((view_a, view_b), (view_b, view_a))]
        return Sides(*(Batch(one.logits, one.positive, torch.ones_like(one.positive)) for one in rows))
    targets: dict[str, Any] = {"partners": partners, "labels": labels, "ref_labels": ref_labels, "positives": positives}
    s, positive, other = across(view_a, view_b, temperature=temperature, bias=0.0, **targets)
    if ignored is not None:
        other = other & ~ignored
    if ignored_ids is not None:
        ids = ignored_ids if ref_ignored_ids is None else ref_ignored_ids
        other = other & ((ignored_ids[:, None] != ids) | positive)
    positive = positive & other
    return Sides(Batch(s, positive, other), Batch(s.T, positive.T, other.T))


def info_nce_values(side: Batch, inside_reduction: str = "none") -> Tensor:
    """[K], the InfoNCE values of the anchors with positives."""
    values = LOSSES["info_nce"].baseline(side.s, side.other, side.positive, inside_reduction=inside_reduction)
    return values[side.positive.any(dim=1)]


def info_nce(
    sides: Sides, direction_weights: tuple[float, float] | None = None, inside_reduction: str = "none"
) -> Tensor:
    """InfoNCE of both directions: the mean over all anchors, or the weighted sum of the means of the directions."""
    values = [info_nce_values(side, inside_reduction) for side in sides]
    if direction_weights is None:
        return torch.cat(values).sum() / max(sum(map(len, values)), 1)
    means = [each.sum() / max(len(each), 1) for each in values]
    return direction_weights[0] * means[0] + direction_weights[1] * means[1]


def hard(view_a: Tensor, view_b: Tensor, *, temperature: float, tau_plus: float = 0.1, beta: float = 1.0) -> Hard:
    """The logits of the cosines of stacked views, for the loss with hard negatives."""
    rows = unit(torch.cat([view_a, view_b]))
    return Hard(Rows(rows @ rows.T / temperature, stacked(len(rows))), temperature, tau_plus, beta)


def ranking(
    view_a: Tensor,
    view_b: Tensor,
    hard_negatives: Tensor | None = None,
    *,
    temperature: float,
    hard_negatives_scope: str = "batch",
    directions: str = "query_to_doc",
    partition: str = "joint",
    doc_to_doc_hard: str | None = None,
    ignored: Tensor | None = None,
    hardness_mode: str = "none",
    hardness_strength: float = 0.0,
    similarity: str = "cosine",
    left_out: float = -torch.inf,
    harder: Callable[[str, Tensor], Tensor] | None = None,
    flows: bool = False,
    divided: bool = False,
) -> Ranking:
    """The logits between queries, documents and hard negatives, by direction.

    Only faults pass the last four arguments:

        left_out: the logit of ignored pairs.
        harder: replaces ``harder_columns``.
        flows: whether a gradient flows through the hardness.
        divided: whether the hardness strength is divided by the temperature.
    """
    arguments = locals()
    rows = [view_a, view_b, view_a[:0] if hard_negatives is None else hard_negatives.flatten(0, 1)]
    a, b, h = map(unit, rows) if similarity == "cosine" else rows
    pairs = [(a, b), (a, h), (a, a), (b, a), (b, b), (b, h)]
    raw = [left @ right.T / temperature for left, right in pairs]
    chosen, other, shared = tuple(directions.split("+")), off_diagonal(len(a)), hard_negatives_scope == "batch"
    hard_of_doc = hard_of_documents(doc_to_doc_hard, hard_negatives_scope)

    def made(found: list[Tensor], raw: Ranking | None = None) -> Ranking:
        a_b, a_h, a_a, b_a, b_b, b_h = found
        return Ranking(a_b, a_h, a_a, b_a, b_b, b_h, chosen, partition, hard_of_doc, arguments, raw)

    own = made(raw).own
    of_documents = {"others": ~own, "all": own | True, "none": own & False}[hard_of_doc]
    kept = [~other | (hard_negatives_scope != "own_only"), own | shared, other, other | True, other, of_documents]
    whole, strength = torch.cat(raw[:2], dim=1), hardness_strength * (1 if divided else temperature)
    penalty = strength * (whole if flows else whole.detach())
    chosen_columns = (harder or harder_columns)(hardness_mode, own)
    of_queries = (whole + penalty.where(chosen_columns, 0.0)).tensor_split([len(a)], dim=1)
    found = [s.where(mask, -torch.inf) for s, mask in zip([*of_queries, *raw[2:]], kept, strict=True)]
    if ignored is not None:
        blocks = [0, 1, *(k for k, name in enumerate(Ranking._fields[:5]) if k > 1 and name in chosen)]
        blocks += [5] if hard_of_doc != "none" and "doc_to_doc" in chosen else []
        for k, mask in zip(blocks, torch.split(ignored, [found[k].shape[1] for k in blocks], dim=1), strict=True):
            found[k] = found[k].where(~mask | ~kept[k], left_out)
    return made(found, made(raw))


def harder_columns(mode: str, own: Tensor) -> Tensor:
    """[N, N + N H], true at documents and hard negatives with hardness. ``own`` [N, N H] is ``Ranking.own``."""
    other = off_diagonal(len(own))
    in_batch, hard = torch.cat([other, ~own], dim=1), torch.cat([other & False, own], dim=1)
    return {"none": in_batch & False, "in_batch_negatives": in_batch, "hard_negatives": hard}.get(mode, in_batch | hard)


def decoupled(
    view_a: Tensor, view_b: Tensor, *, temperature: float, sigma: float = 0.5, detach_weights: bool = True
) -> Decoupled:
    """The logits of the cosines of stacked views, for the weighted decoupled loss."""
    rows = unit(torch.cat([view_a, view_b]))
    return Decoupled(Rows(rows @ rows.T / temperature, stacked(len(rows))), temperature, sigma, detach_weights)


def hard_values(batch: Batch, temperature: float) -> Tensor:
    """[N], the values of the loss with hard negatives."""
    return LOSSES["hard_negative"].baseline(batch.s, batch.other, batch.positive, lowest=-1 / temperature)


def decoupled_weights(batch: Batch, temperature: float, sigma: float = 0.5) -> Tensor:
    """[N, 1], the weights of the weighted decoupled loss."""
    closeness = batch.s[batch.positive][:, None] * (temperature / sigma)
    return 2 - len(closeness) * closeness.softmax(dim=0)


def decoupled_values(batch: Batch, weights: Tensor) -> Tensor:
    """[N], the values of the weighted decoupled loss."""
    return LOSSES["dclw"].baseline(batch.s, batch.other, batch.positive, weights=weights)


def hard_of_items(embeddings: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    """[N], the values of the loss with hard negatives. The two rows of an item have the same label."""
    return hard_values(cosines(embeddings, labels, temperature), temperature)


def decoupled_of_items(
    embeddings: Tensor, labels: Tensor, *, temperature: float, sigma: float = 0.5, detach_weights: bool = True
) -> Tensor:
    """[N], the values of the weighted decoupled loss. The two rows of an item have the same label."""
    batch = cosines(embeddings, labels, temperature)
    weights = decoupled_weights(batch, temperature, sigma)
    return decoupled_values(batch, weights.detach() if detach_weights else weights)


def diagonal(logits: Tensor) -> Rows:
    """Logits [B, B] with the positives on the diagonal."""
    return Rows(logits, torch.arange(len(logits)))


def without(batch: Batch, ignored: Tensor) -> Batch:
    """The batch without the ignored pairs."""
    return batch._replace(positive=batch.positive & ~ignored, other=batch.other & ~ignored)


def log_sum(s: Tensor, members: Tensor) -> Tensor:
    """[N, 1], the logsumexp over each row's members; a huge negative number without members."""
    return s.masked_fill(~members, torch.finfo(s.dtype).min).logsumexp(dim=1, keepdim=True)


def row_sums(values: Tensor, members: Tensor) -> Tensor:
    """[N], the sum over each row's members."""
    return values.where(members, 0).sum(dim=1)


def row_means(values: Tensor, members: Tensor) -> Tensor:
    """[N], the mean over each row's members; 0 for a row without members."""
    return row_sums(values, members) / members.sum(dim=1).clamp(min=1)


def anchors(loss: str, batch: Batch) -> Tensor:
    """[N], the value of every anchor. Without positives it is 0, except for nt_bxent and sigmoid."""
    return LOSSES[loss].baseline(batch.s, batch.other, batch.positive)


def bxent_anchors(batch: Batch, as_positive: Tensor, as_negative: Tensor) -> Tensor:
    """[N], the value of every anchor in NT-BXent, from the costs of the pairs as positives and as negatives."""
    return row_sums(as_positive, batch.positive) / (batch.counts + 1) + row_means(as_negative, batch.negative)


def exponentials(batch: Batch) -> Tensor:
    """[N, N], e^(s - maximum of the row) + epsilon, as in ``supcon_epsilon``."""
    return torch.exp(batch.s - batch.s.amax(dim=1, keepdim=True)) + EPSILON


def epsilon_anchors(batch: Batch, e: Tensor) -> Tensor:
    """[N], the value of every anchor in ``supcon_epsilon``. ``e`` is like the result of ``exponentials``."""
    total = row_sums(e, batch.other).where(batch.other.any(dim=1), 1.0)
    return row_sums(total.log()[:, None] - e.log(), batch.positive) / (batch.counts + EPSILON)


def supcon(embeddings: Tensor, labels: Tensor, *, temperature: float, base_temperature: float | None = None) -> Tensor:
    """SupCon with labels."""
    scale = 1.0 if base_temperature is None else temperature / base_temperature
    return scale * loss_of("supcon", labelled(embeddings, labels, temperature))


RIGHT: Mapping[tuple[str, str], Function] = {
    ("supcon", "labels"): supcon,
    ("supcon", "features"): composed("supcon", features, lambda given: given.cosines),
    ("supcon_in", "labels"): composed("supcon_in", labelled),
    ("nt_xent", "labels"): composed("nt_xent", labelled),
    ("nt_xent", "views"): composed("nt_xent", views),
    ("nt_xent", "features"): composed("nt_xent", features, lambda given: given.views),
    ("nt_xent_pairwise", "labels"): composed("nt_xent_pairwise", labelled),
    ("nt_bxent", "pairs"): composed("nt_bxent", paired),
    ("supcon_epsilon", "labels"): composed("supcon_epsilon", products),
    ("info_nce", "views"): composed("info_nce", both_sides, info_nce),
    ("sigmoid", "views"): composed("sigmoid", across),
    ("hard_negative", "views"): composed("hard_negative", hard),
    ("multiple_negatives_ranking", "views"): composed("multiple_negatives_ranking", ranking),
    ("dclw", "views"): composed("dclw", decoupled),
    ("hard_negative", "labels"): composed("hard_negative", hard_of_items),
    ("dclw", "labels"): composed("dclw", decoupled_of_items),
}
"""The correct losses by name and call. They pass every case."""
