"""The rowwise form: panels of whole rows of logits, shifted by their maxima; right for every rule and temperature.

A panel holds some anchors against all columns. Exponentials of the positives are taken relative to the row's largest
positive, those of the negatives relative to its largest negative, so that neither drowns the other: every loss is a
function of both sums, and log(sum over all / sum over positives) is a softplus of the difference of their logarithms.

The values are written in differentiable operations, which serve the second derivative as well; the weights dL_i/ds_ij
are written out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .spec import EPSILON, LN2, Rule, Targets


class Panel(NamedTuple):
    """Some anchors against all columns, ``[b, M]``.

    Attributes:
        rows: which anchors.
        positive: true where the column is a positive of the row.
        negative: true where it is a negative.
        own: true where the column is the row itself.
        some_negative: ``[b, 1]``, whether the row has a negative.
        number: ``[b, 1]``, positives per row in the computing dtype, at least 1.
    """

    rows: slice
    positive: Tensor
    negative: Tensor
    own: Tensor
    some_negative: Tensor
    number: Tensor

    def sizes(self) -> tuple[Tensor, Tensor]:
        """Return the numbers of positives and of negatives, int64 ``[b]`` each."""
        return self.positive.sum(1), self.negative.sum(1)


class LonePanel(NamedTuple):
    """Anchors with one positive or none, ``[b, M]``: columns are told by their numbers, and no mask is made.

    Attributes:
        rows: which anchors.
        columns: M.
        partner: int64 ``[b, 1]``, the positive; None: there is none.
        own: int64 ``[b, 1]``, the column that is the row itself, or else its positive; None: none is.
        left_out: int64 ``[b]``, how many columns are no negatives.
    """

    rows: slice
    columns: int
    partner: Tensor | None
    own: Tensor | None
    left_out: Tensor

    def sizes(self) -> tuple[Tensor, Tensor]:
        """Return the numbers of positives and of negatives, int64 ``[b]`` each."""
        positives = torch.full_like(self.left_out, 0 if self.partner is None else 1)
        return positives, self.columns - self.left_out

    def without(self, matrix: Tensor, value: float) -> Tensor:
        """Return a matrix ``[b, M]`` with a value where the positive and the row itself stand."""
        for column in (self.partner, self.own):
            if column is not None:
                matrix = matrix.scatter(1, column, value)
        return matrix


def panels(
    targets: Targets, own: Tensor | None, count: int, columns: int, rows: int, dtype: torch.dtype
) -> Iterator[Panel | LonePanel]:
    """Yield the panels of a batch.

    Args:
        targets: who is whose positive.
        own: int64 ``[N]``, which column is the row itself, -1 where none is; None: none is anyone's.
        count: N.
        columns: M.
        rows: of a panel.
        dtype: the computing dtype.
    """
    place = torch.arange(columns, device=targets.given.device)
    for start in range(0, count, rows):
        here = slice(start, min(start + rows, count))
        if targets.kind in ("partners", "none"):
            yield _lone_panel(targets, own, here, columns)
            continue
        positive = _positive(targets, here, columns, place)
        itself = torch.zeros_like(positive) if own is None else own[here, None] == place
        positive = positive & ~itself
        negative = ~(positive | itself)
        yield Panel(
            here,
            positive,
            negative,
            itself,
            negative.any(1, keepdim=True),
            positive.sum(1, keepdim=True).clamp(min=1).to(dtype),
        )


def _lone_panel(targets: Targets, own: Tensor | None, here: slice, columns: int) -> LonePanel:
    number = here.stop - here.start
    if targets.kind == "none":
        assert own is None, "rows without a positive are no columns"
        return LonePanel(here, columns, None, None, torch.zeros(number, dtype=torch.int64, device=targets.given.device))
    partner = targets.given[here]
    left_out = torch.ones_like(partner)
    if own is None:
        return LonePanel(here, columns, partner[:, None], None, left_out)
    itself = own[here]
    left_out = left_out + (itself >= 0)
    # A row that is no column leaves out its positive a second time.
    return LonePanel(here, columns, partner[:, None], torch.where(itself >= 0, itself, partner)[:, None], left_out)


def _positive(targets: Targets, here: slice, columns: int, place: Tensor) -> Tensor:
    """Return bool ``[b, M]``, true where the column is a positive of the row, or perhaps the row itself."""
    given = targets.given
    if targets.kind == "labels":
        return given[here, None] == (given if targets.columns is None else targets.columns)
    if targets.kind == "mask":
        return given[here]
    number = here.stop - here.start
    marks = torch.zeros((number + 1, columns), dtype=torch.bool, device=given.device)
    # Pairs of other panels' anchors mark the line too many.
    line = given[:, 0] - here.start
    line = torch.where((line >= 0) & (line < number), line, number)
    return marks.index_put((line, given[:, 1]), marks.new_ones(()))[:-1]


class _Sums(NamedTuple):
    """Both sums of exponentials as ``top + log``, ``[b, 1]``, and each pair's logit relative to the top of its kind.

    Where a row has no positive or no negative, top and log are 0.
    """

    positive_top: Tensor
    positive_log: Tensor
    negative_top: Tensor
    negative_log: Tensor
    below: Tensor

    def odds(self) -> Tensor:
        """Return log(sum over negatives / sum over positives)."""
        return (self.negative_top - self.positive_top) + (self.negative_log - self.positive_log)


def _exp(logarithms: Tensor) -> Tensor:
    """Return e^x: as a power of two it takes a quarter of the time on a CPU, and no more where it underflows."""
    return (logarithms * (1 / LN2)).exp2()


def _sums(logits: Tensor, panel: Panel) -> _Sums:
    some_positive = panel.positive.any(1, keepdim=True)
    known = logits.detach()
    of_positives, of_negatives = (
        torch.where(some, torch.where(mask, known, -math.inf).amax(1, keepdim=True), 0.0)
        for mask, some in ((panel.positive, some_positive), (panel.negative, panel.some_negative))
    )
    below = logits - torch.where(panel.positive, of_positives, of_negatives)
    below = torch.where(panel.own, 0.0, below)
    exponentials = _exp(below)
    logs = [
        torch.where(some, torch.where(mask, exponentials, 0.0).sum(1, keepdim=True), 1.0).log()
        for mask, some in ((panel.positive, some_positive), (panel.negative, panel.some_negative))
    ]
    return _Sums(of_positives, logs[0], of_negatives, logs[1], below)


def _softplus(x: Tensor) -> Tensor:
    return -F.logsigmoid(-x)


def _mean_below(logits: Tensor, top: Tensor, panel: Panel) -> Tensor:
    """Mean over positives of ``top - s``, ``[b, 1]``."""
    return torch.where(panel.positive, top - logits, 0.0).sum(1, keepdim=True) / panel.number


def _own_ratios(logits: Tensor, sums: _Sums, panel: Panel) -> tuple[Tensor, Tensor]:
    """Return -log r and log(1 - r), r = e^s / (e^s + sum over negatives), of each positive, ``[b, M]``.

    Elsewhere, and in rows without negatives, they are 0 and -inf.
    """
    counted = panel.positive & panel.some_negative
    against = torch.where(counted, (sums.negative_top - logits) + sums.negative_log, 0.0)
    return torch.where(counted, _softplus(against), 0.0), torch.where(counted, F.logsigmoid(against), -math.inf)


def _guarded(logits: Tensor, panel: Panel, star: Tensor) -> tuple[Tensor, Tensor]:
    """Return e^(s - max), ``[b, M]``, and that plus epsilon; ``star`` is where the row's maximum stands."""
    top = logits.gather(1, star)
    exponentials = _exp(logits - top)
    exponentials = torch.where(panel.own, 0.0, exponentials)
    return exponentials, torch.where(panel.own, 0.0, exponentials + EPSILON)


def values(logits: Tensor, panel: Panel | LonePanel, rule: Rule) -> Tensor:
    """Return each row's value ``[b]``, differentiable by the logits ``[b, M]``.

    Meaningless, but finite, where the rule gives a row nothing to sum over.
    """
    if isinstance(panel, LonePanel):
        return _lone_values(logits, panel, rule)
    if rule.terms == "binary":
        attract = torch.where(panel.positive, _softplus(-logits), 0.0).sum(1) / (panel.positive.sum(1) + 1)
        repel = torch.where(panel.negative, _softplus(logits), 0.0).sum(1) / panel.negative.sum(1).clamp(min=1)
        return attract + repel
    if rule.terms == "epsilon":
        _, guarded = _guarded(logits, panel, logits.detach().argmax(1, keepdim=True))
        rest = guarded.sum(1, keepdim=True) - guarded
        ratios = torch.where(panel.positive, torch.log1p(rest / torch.where(panel.own, 1.0, guarded)), 0.0)
        return ratios.sum(1) / (panel.positive.sum(1).to(logits.dtype) + EPSILON)
    sums = _sums(logits, panel)
    if rule.denominator == "all":
        value = torch.where(panel.some_negative, _softplus(sums.odds()), 0.0)
        if rule.terms == "in":
            value = value + panel.number.log()
        else:
            value = value + (sums.positive_log + _mean_below(logits, sums.positive_top, panel))
    elif rule.denominator == "only_negatives":
        if rule.terms == "in":
            value = sums.odds() + panel.number.log()
        else:
            value = _mean_below(logits, sums.negative_top, panel) + sums.negative_log
    else:
        ratios, misses = _own_ratios(logits, sums, panel)
        if rule.terms == "out":
            value = ratios.sum(1, keepdim=True) / panel.number
        else:
            missed = torch.where(panel.positive, misses.exp(), 0.0).sum(1, keepdim=True) / panel.number
            hit = _log_mean(-ratios, panel)
            # The mean of the ratios is 1 - missed, which says nothing once it rounds to 1; hit says nothing before.
            value = torch.where(missed < 0.5, -torch.log1p(-missed.clamp(max=0.5)), -hit)
    return value[:, 0]


def _log_mean(logarithms: Tensor, panel: Panel) -> Tensor:
    """Return the logarithm of the mean over positives of ``e^logarithms``, ``[b, 1]``; 0 without positives."""
    top = torch.where(panel.positive, logarithms.detach(), -math.inf).amax(1, keepdim=True)
    top = torch.where(top == -math.inf, 0.0, top)
    below = torch.where(panel.positive, logarithms - top, -math.inf)
    total = _exp(below)
    total = total.sum(1, keepdim=True)
    return top + torch.where(total > 0, total / panel.number, 1.0).log()


def weights(logits: Tensor, panel: Panel | LonePanel, rule: Rule, grad: Tensor) -> Tensor:
    """Return ``grad_i dL_i/ds_ij``, ``[b, M]``.

    Args:
        logits: ``[b, M]``.
        panel: who is whose positive.
        rule: the formula.
        grad: ``[b]``, 0 for every row that is no anchor or has nothing to sum over.
    """
    up = grad[:, None]
    if isinstance(panel, LonePanel):
        return _lone_weights(logits, panel, rule, up)
    if rule.terms == "binary":
        attract = torch.sigmoid(-logits) * (-up / (panel.positive.sum(1, keepdim=True) + 1))
        repel = torch.sigmoid(logits) * (up / panel.negative.sum(1, keepdim=True).clamp(min=1))
        return _chosen(panel, attract, repel)
    if rule.terms == "epsilon":
        return _guarded_weights(logits, panel, up)
    sums = _sums(logits, panel)
    negative = _exp(sums.below - sums.negative_log)
    if rule.denominator == "one_positive":
        ratios, misses = _own_ratios(logits, sums, panel)
        if rule.terms == "in":
            misses = misses - (ratios + _log_mean(-ratios, panel))
        positive = misses.exp() / panel.number
        positive = torch.where(panel.positive, positive, 0.0)
        return _chosen(panel, -positive * up, negative * (positive.sum(1, keepdim=True) * up))
    share = _exp(sums.below - sums.positive_log)
    if rule.denominator == "only_negatives":
        positive = share if rule.terms == "in" else 1 / panel.number
        return _chosen(panel, -positive * up, negative * up)
    missed = torch.where(panel.some_negative, torch.sigmoid(sums.odds()), 0.0)
    positive = -share * missed
    if rule.terms == "out":
        positive = positive + (share - 1 / panel.number)
    return _chosen(panel, positive * up, negative * (missed * up))


def _chosen(panel: Panel, positive: Tensor, negative: Tensor) -> Tensor:
    return torch.where(panel.positive, positive, torch.where(panel.negative, negative, 0.0))


def _guarded_weights(logits: Tensor, panel: Panel, up: Tensor) -> Tensor:
    """Weights of the epsilon terms: through the exponentials, and through the maximum at the place where it stands."""
    star = logits.argmax(1, keepdim=True)
    exponentials, guarded = _guarded(logits, panel, star)
    number = panel.positive.sum(1, keepdim=True).to(logits.dtype)
    share = exponentials / guarded.sum(1, keepdim=True)
    through = share * number - torch.where(panel.positive, exponentials / (exponentials + EPSILON), 0.0)
    through = through * (up / (number + EPSILON))
    # Raising the maximum lowers every logit relative to it.
    at_star = torch.arange(logits.shape[1], device=logits.device) == star
    return through - torch.where(at_star, through.sum(1, keepdim=True), 0.0)


def _over_negatives(logits: Tensor, panel: LonePanel) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum over negatives as ``top`` and the sum relative to it, ``[b, 1]``, and its parts ``[b, M]``.

    What is left out has no part; without a negative the sum is 0.
    """
    rest = panel.without(logits, -math.inf)
    top = rest.detach().amax(1, keepdim=True)
    top = torch.where(top == -math.inf, 0.0, top)
    parts = _exp(rest - top)
    some = (panel.left_out < panel.columns)[:, None]
    return top, torch.where(some, parts.sum(1, keepdim=True), 0.0), parts


def _lone_values(logits: Tensor, panel: LonePanel, rule: Rule) -> Tensor:
    top, total, _ = _over_negatives(logits, panel)
    some = total > 0
    log = top + torch.where(some, total, 1.0).log()
    if panel.partner is None:
        return log[:, 0]
    against = (top - logits.gather(1, panel.partner)) + torch.where(some, total, 1.0).log()
    value = against if rule.denominator == "only_negatives" else torch.where(some, _softplus(against), 0.0)
    return value[:, 0]


def _lone_weights(logits: Tensor, panel: LonePanel, rule: Rule, up: Tensor) -> Tensor:
    top, total, parts = _over_negatives(logits, panel)
    some = total > 0
    if panel.partner is not None and rule.denominator != "only_negatives":
        against = (top - logits.gather(1, panel.partner)) + torch.where(some, total, 1.0).log()
        up = up * torch.where(some, torch.sigmoid(against), 0.0)
    found = panel.without(parts.mul_(torch.where(some, up / total, 0.0)), 0.0)
    return found if panel.partner is None else found.scatter_(1, panel.partner, -up)
