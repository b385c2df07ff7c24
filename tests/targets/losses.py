"""Losses as users write them, right and wrong, for the tests of ``pairproof check``."""

from __future__ import annotations

import sys
import time

import torch
import torch.nn.functional as F


def _parts(embeddings, labels, temperature):
    """The logits, the mask of self pairs and the mask of positives."""
    # Rows are scaled first, so that no square overflows or underflows.
    rows = F.normalize(embeddings / embeddings.detach().abs().amax(dim=1, keepdim=True), dim=1)
    logits = rows @ rows.T / temperature
    own = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    positives = (labels[:, None] == labels[None]) & ~own
    return logits, own, positives


def supcon(embeddings, labels, temperature=0.1):
    """Right: anchors without positives count as 0."""
    return per_anchor(embeddings, labels, temperature).mean()


def per_anchor(embeddings, labels, temperature=0.1):
    """Right, with one value per anchor."""
    logits, own, positives = _parts(embeddings, labels, temperature)
    logs = F.log_softmax(logits.masked_fill(own, float("-inf")), dim=1)
    return -logs.where(positives, 0).sum(dim=1) / positives.sum(dim=1).clamp(min=1)


def drops(embeddings, labels, temperature=0.1):
    """Right if anchors without positives are left out of the mean."""
    unmatched = ~_parts(embeddings, labels, temperature)[2].any(dim=1)
    values = per_anchor(embeddings, labels, temperature)[~unmatched]
    return values.mean() if len(values) else values.sum()


def built_in(embeddings, labels):
    """Right at temperature 0.5."""
    return supcon(embeddings, labels, 0.5)


def at_0_033(embeddings, labels):
    """Right at temperature 0.033, which no case has."""
    return supcon(embeddings, labels, 0.033)


def at_0_033_without_the_last_row(embeddings, labels):
    """Wrong for an odd number of rows."""
    even = len(embeddings) // 2 * 2
    return supcon(embeddings[:even], labels[:even], 0.033)


def one_way_at_0_37(query, key):
    """Right at temperature 0.37, with direction "a_to_b"."""
    return one_way(query, key, 0.37)


def other_way_at_0_37(query, key):
    """Wrong: the softmax runs over the anchors."""
    return one_way(key, query, 0.37)


def without_other_positives(embeddings, labels, temperature=0.1):
    """Wrong: a positive's denominator lacks the other positives."""
    logits, own, positives = _parts(embeddings, labels, temperature)
    negatives = logits.masked_fill(own | positives, float("-inf")).logsumexp(dim=1, keepdim=True)
    each = torch.logaddexp(logits, negatives.clamp(min=-1e30)) - logits
    return (each.where(positives, 0).sum(dim=1) / positives.sum(dim=1).clamp(min=1)).mean()


def mean_over_pairs(embeddings, labels, temperature=0.1):
    """Wrong: the mean over all positive pairs, not over each anchor's mean."""
    logits, own, positives = _parts(embeddings, labels, temperature)
    logs = F.log_softmax(logits.masked_fill(own, float("-inf")), dim=1)
    return -logs.where(positives, 0).sum() / positives.sum().clamp(min=1)


def detached(embeddings, labels, temperature=0.1):
    """Wrong only in its gradient."""
    return supcon(embeddings.detach(), labels, temperature) + 0 * embeddings.sum()


class _Upstream(torch.autograd.Function):
    """The identity, whose backward pass replaces the upstream gradient."""

    @staticmethod
    def forward(ctx, loss, replaced):
        ctx.replaced = replaced
        return loss.clone()

    @staticmethod
    def backward(ctx, grad_output):
        return ctx.replaced(grad_output), None


def ignores_upstream(embeddings, labels, temperature=0.1):
    """Wrong: the backward pass takes the upstream gradient for 1."""
    return _Upstream.apply(supcon(embeddings, labels, temperature), torch.ones_like)


def sign_of_upstream(embeddings, labels, temperature=0.1):
    """Wrong: the backward pass takes the sign of the upstream gradient."""
    return _Upstream.apply(supcon(embeddings, labels, temperature), torch.sign)


def dot(embeddings, labels, temperature=0.1):
    """Right for dot products, or for rows of norm 1."""
    logits = embeddings @ embeddings.T / temperature
    own = torch.eye(len(logits), dtype=torch.bool)
    positives = (labels[:, None] == labels[None]) & ~own
    logs = F.log_softmax(logits.masked_fill(own, float("-inf")), dim=1)
    return (-logs.where(positives, 0).sum(dim=1) / positives.sum(dim=1).clamp(min=1)).mean()


class Module(torch.nn.Module):
    """Right; the temperature has another name, and the reduction is a keyword."""

    def __init__(self, tau=0.1, reduction="mean"):
        super().__init__()
        self.tau, self.reduction = tau, reduction

    def forward(self, embeddings, labels):
        values = per_anchor(embeddings, labels, self.tau)
        return {"mean": values.mean, "sum": values.sum, "none": values.clone}[self.reduction]()


class Instance(torch.nn.Module):
    """Right at the temperature that it is constructed with."""

    def __init__(self, temperature):
        super().__init__()
        self.temperature = temperature

    def forward(self, embeddings, labels):
        return supcon(embeddings, labels, self.temperature)


at_half = Instance(0.5)


class Features(torch.nn.Module):
    """Right for rows of norm 1; the original code's signature: [batch, views, dim], and labels, a mask or neither."""

    def __init__(self, temperature=0.07, base_temperature=0.07):
        super().__init__()
        self.temperature, self.base_temperature = temperature, base_temperature

    def forward(self, features, labels=None, mask=None):
        batch, views, _ = features.shape
        rows = torch.cat(features.unbind(dim=1))
        if mask is None:
            labels = torch.arange(batch) if labels is None else labels
            mask = labels[:, None] == labels[None]
        positives = mask.repeat(views, views).bool().fill_diagonal_(False)
        logits = rows @ rows.T / self.temperature
        own = torch.eye(len(rows), dtype=torch.bool)
        logs = F.log_softmax(logits.masked_fill(own, float("-inf")), dim=1)
        values = -logs.where(positives, 0).sum(dim=1) / positives.sum(dim=1).clamp(min=1)
        return self.temperature / self.base_temperature * values.mean()


def views(z_i, z_j, tau):
    """Right: NT-Xent of two views, one value per row, first views first."""
    rows = F.normalize(torch.cat([z_i, z_j]), dim=1)
    n = len(rows)
    logits = (rows @ rows.T / tau).masked_fill(torch.eye(n, dtype=torch.bool), float("-inf"))
    return F.cross_entropy(logits, torch.arange(n).roll(n // 2), reduction="none")


def one_way(query, key, temperature=0.1, reduction="mean"):
    """Right: InfoNCE of a query against its key."""
    logits = F.normalize(query, dim=1) @ F.normalize(key, dim=1).T / temperature
    return F.cross_entropy(logits, torch.arange(len(logits)), reduction=reduction)


def pairs(embeddings, positive_pairs, temperature):
    """Right: the binary cross-entropy of listed pairs."""
    rows = F.normalize(embeddings, dim=1)
    logits = rows @ rows.T / temperature
    own = torch.eye(len(rows), dtype=torch.bool)
    positives = torch.zeros_like(own)
    positives[positive_pairs[:, 0], positive_pairs[:, 1]] = True
    positives &= ~own
    negatives = ~positives & ~own
    attract = F.softplus(-logits).where(positives, 0).sum(dim=1) / (positives.sum(dim=1) + 1)
    return (attract + F.softplus(logits).where(negatives, 0).sum(dim=1) / negatives.sum(dim=1).clamp(min=1)).mean()


def hangs(embeddings, labels, temperature):
    """Never returns, and catches every Exception."""
    while True:
        try:
            time.sleep(0.01)
        except Exception:  # would also catch an exception that the time limit raises
            continue


def leaves(embeddings, labels, temperature):
    """Exits the process."""
    sys.exit(5)


def breaks(embeddings, labels, temperature):
    """Fails on batches of odd size."""
    if len(embeddings) % 2:
        raise RuntimeError("the batch size must be even")
    return supcon(embeddings, labels, temperature)


def returns_text(embeddings, labels, temperature):
    """Returns a loss only for batches of shape [8, 3]."""
    loss = supcon(embeddings, labels, temperature)
    return "high" if tuple(embeddings.shape) != (8, 3) else loss


def unclear(a_thing, something_else, more, temperature):
    """A signature that shows neither the call nor the arrays."""
    return a_thing, something_else, more


NOT_A_FUNCTION = 5


def stacked(embeddings, temperature):
    """Right: NT-Xent of one matrix with all first views, then all second views."""
    rows = F.normalize(embeddings, dim=1)
    logits = (rows @ rows.T / temperature).fill_diagonal_(-torch.inf)
    return F.cross_entropy(logits, torch.arange(len(rows)).roll(len(rows) // 2))


def scaled(image_features, text_features, logit_scale):
    """Right; the similarities are multiplied by one over the temperature."""
    first, second = (F.normalize(rows, dim=1) for rows in (image_features, text_features))
    logits = logit_scale * first @ second.T
    same = torch.arange(len(first))
    return (F.cross_entropy(logits, same) + F.cross_entropy(logits.T, same)) / 2
