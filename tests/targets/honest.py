"""Right losses as textbooks and libraries write them. Each conforms at the level of policies."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def simclr(z_i, z_j, temperature=0.5):
    z = F.normalize(torch.cat([z_i, z_j]), dim=1)
    logits = z @ z.T / temperature
    logits.fill_diagonal_(-torch.inf)
    return F.cross_entropy(logits, torch.arange(len(z)).roll(len(z_i)))


def simclr_unshifted(z_i, z_j, temperature=0.5):
    """No maximum is subtracted before the exponential."""
    z = F.normalize(torch.cat([z_i, z_j]), dim=1)
    exponentials = torch.exp(z @ z.T / temperature)
    others = ~torch.eye(len(z), dtype=torch.bool)
    denominators = exponentials.masked_select(others).view(len(z), -1).sum(dim=1)
    positives = torch.exp((z * z.roll(len(z_i), 0)).sum(dim=1) / temperature)
    return -torch.log(positives / denominators).mean()


def supcon(embeddings, labels, temperature=0.1):
    z = F.normalize(embeddings, dim=1)
    own = torch.eye(len(z), dtype=torch.bool)
    positives = (labels[:, None] == labels[None, :]) & ~own
    log_probabilities = (z @ z.T / temperature).masked_fill(own, -torch.inf).log_softmax(dim=1)
    sums = log_probabilities.masked_fill(~positives, 0).sum(dim=1)
    return -(sums / positives.sum(dim=1).clamp(min=1)).mean()


def clip(image_features, text_features, logit_scale):
    logits = logit_scale * F.normalize(image_features, dim=1) @ F.normalize(text_features, dim=1).T
    rows = torch.arange(len(logits))
    return (F.cross_entropy(logits, rows) + F.cross_entropy(logits.T, rows)) / 2


def nt_bxent(embeddings, positive_pairs, temperature=0.5):
    """The diagonal counts as a positive whose loss is 0."""
    z = F.normalize(embeddings, dim=1)
    own = torch.eye(len(z), dtype=torch.bool)
    targets = torch.zeros_like(own)
    targets[positive_pairs[:, 0], positive_pairs[:, 1]] = True
    targets |= own
    terms = F.binary_cross_entropy_with_logits(z @ z.T / temperature, targets.to(z.dtype), reduction="none")
    terms = terms.masked_fill(own, 0)
    of_positives = terms.masked_fill(~targets, 0).sum(dim=1) / targets.sum(dim=1)
    return (of_positives + terms.masked_fill(targets, 0).sum(dim=1) / (~targets).sum(dim=1).clamp(min=1)).mean()


def moco(query, key, queue, temperature=0.2):
    query, key, queue = (F.normalize(rows, dim=1) for rows in (query, key, queue))
    logits = torch.cat([(query * key).sum(dim=1, keepdim=True), query @ queue.T], dim=1) / temperature
    return F.cross_entropy(logits, torch.zeros(len(query), dtype=torch.long))
