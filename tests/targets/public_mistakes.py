"""Losses with the mistakes and conventions of public code, one each, for the tests of the diagnosis."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def _logits(rows, temperature):
    """The logits and the mask of self pairs."""
    unit = F.normalize(rows, dim=1)
    return unit @ unit.T / temperature, torch.eye(len(rows), dtype=torch.bool)


def _supcon_parts(embeddings, labels, temperature):
    """The sum over the positives of minus the log-prob, and the number of positives."""
    return _supcon_sums(*_logits(embeddings, temperature), labels)


def _supcon_sums(logits, own, labels):
    """The same from the logits and the mask of self pairs."""
    positives = (labels[:, None] == labels[None]) & ~own
    logs = F.log_softmax(logits.masked_fill(own, -torch.inf), dim=1)
    return -logs.where(positives, 0).sum(dim=1), positives.sum(dim=1)


def _ce(embeddings_a, embeddings_b, temperature):
    """The cross-entropies of both directions of two towers."""
    logits = F.normalize(embeddings_a, dim=1) @ F.normalize(embeddings_b, dim=1).T / temperature
    same = torch.arange(len(logits))
    return F.cross_entropy(logits, same), F.cross_entropy(logits.T, same)


def _nt_xent(z_i, z_j, temperature):
    """The values of the 2B anchors, first views first."""
    logits, own = _logits(torch.cat([z_i, z_j]), temperature)
    n = len(logits)
    return F.cross_entropy(logits.masked_fill(own, -torch.inf), torch.arange(n).roll(n // 2), reduction="none")


def divided_by_positives_plus_1(embeddings, labels, temperature=0.1):
    """Wrong: the sum over the positives is divided by |P| + 1."""
    total, number = _supcon_parts(embeddings, labels, temperature)
    return (total / (number + 1)).mean()


def divided_by_2b_minus_2(z_i, z_j, temperature=0.1):
    """Wrong: the sum over the 2B anchors is divided by 2(B - 1)."""
    return _nt_xent(z_i, z_j, temperature).sum() / (2 * (len(z_i) - 1))


def own_positive(embeddings, labels, temperature=0.1):
    """Wrong: the anchor is one of its positives, and its exponential is in the denominator."""
    logits, _ = _logits(embeddings, temperature)
    positives = labels[:, None] == labels[None]
    return (-F.log_softmax(logits, dim=1).where(positives, 0).sum(dim=1) / positives.sum(dim=1)).mean()


def sums_inside(embeddings, labels, temperature=0.1):
    """Wrong: 1/|P| is missing inside the logarithm."""
    logits, own = _logits(embeddings, temperature)
    positives = (labels[:, None] == labels[None]) & ~own
    below = logits.masked_fill(own, -torch.inf).logsumexp(dim=1)
    above = logits.masked_fill(~positives, -torch.inf).logsumexp(dim=1)
    return (below - above).where(positives.any(dim=1), 0).mean()


def without_maximum(embeddings, labels, temperature=0.1):
    """Right, but no maximum is subtracted before the exponentials."""
    logits, own = _logits(embeddings, temperature)
    positives = (labels[:, None] == labels[None]) & ~own
    logs = logits - logits.exp().masked_fill(own, 0).sum(dim=1, keepdim=True).log()
    return -(logs.where(positives, 0).sum(dim=1) / positives.sum(dim=1).clamp(min=1)).mean()


def maximum_with_the_anchor(embeddings, labels, temperature=0.1):
    """Right, but the anchor itself is masked after the row's maximum is subtracted."""
    logits, own = _logits(embeddings, temperature)
    positives = (labels[:, None] == labels[None]) & ~own
    logits = logits - logits.amax(dim=1, keepdim=True).detach()
    logs = logits - logits.exp().masked_fill(own, 0).sum(dim=1, keepdim=True).log()
    return -(logs.where(positives, 0).sum(dim=1) / positives.sum(dim=1).clamp(min=1)).mean()


def views_mixed_up(features, labels=None, mask=None, temperature=0.1):
    """Wrong: the rows are interleaved views, but the labels are repeated as for stacked views."""
    batch, views, width = features.shape
    labels = torch.arange(batch) if labels is None else labels
    total, number = _supcon_parts(features.reshape(batch * views, width), labels.repeat(views), temperature)
    return (total / number.clamp(min=1)).mean()


def interleaved(embeddings, temperature=0.1):
    """Right for interleaved views, wrong for stacked ones."""
    logits, own = _logits(embeddings, temperature)
    return F.cross_entropy(logits.masked_fill(own, -torch.inf), torch.arange(len(logits)) ^ 1)


def weighted_directions(embeddings_a, embeddings_b, temperature=0.1):
    """Wrong: the directions have weights 0.3 and 0.7."""
    a_to_b, b_to_a = _ce(embeddings_a, embeddings_b, temperature)
    return 0.3 * a_to_b + 0.7 * b_to_a


def weighted_directions_at_0_07(embeddings_a, embeddings_b):
    """The same with a built-in temperature."""
    return weighted_directions(embeddings_a, embeddings_b, 0.07)


def epsilon(embeddings, labels, temperature=0.1):
    """Inexact: 1e-8 is added to the sum of the exponentials."""
    logits, own = _logits(embeddings, temperature)
    positives = (labels[:, None] == labels[None]) & ~own
    logits = logits - logits.detach().masked_fill(own, -torch.inf).amax(dim=1, keepdim=True)
    logs = logits - (logits.exp().masked_fill(own, 0).sum(dim=1, keepdim=True) + 1e-8).log()
    return -(logs.where(positives, 0).sum(dim=1) / positives.sum(dim=1).clamp(min=1)).mean()


def epsilon_of_count(embeddings, labels, temperature=0.1):
    """Inexact: 1e-5 is added to the number of positives."""
    total, number = _supcon_parts(embeddings, labels, temperature)
    return (total / (number + 1e-5)).mean()


def half_inside(embeddings, labels, temperature=0.1):
    """Right, but computed in float16 for inputs of every dtype."""
    total, number = _supcon_parts(embeddings.half(), labels, temperature)
    return (total / number.clamp(min=1)).mean()


def bfloat16_inside(z_i, z_j, temperature=0.1):
    """Right, but computed in bfloat16 for inputs of every dtype."""
    return _nt_xent(z_i.bfloat16(), z_j.bfloat16(), temperature).mean()


def bfloat16_products(embeddings, labels, temperature=0.1):
    """Right, but the matrix product is computed in bfloat16."""
    rows = F.normalize(embeddings, dim=1)
    low, own = rows.bfloat16(), torch.eye(len(rows), dtype=torch.bool)
    total, number = _supcon_sums((low @ low.T).to(rows.dtype) / temperature, own, labels)
    return (total / number.clamp(min=1)).mean()


def float16_logits(embeddings, labels, temperature=0.1):
    """Right, but the matrix product is computed in float16, and divided by the temperature in it."""
    rows = F.normalize(embeddings, dim=1)
    low, own = rows.half(), torch.eye(len(rows), dtype=torch.bool)
    total, number = _supcon_sums((low @ low.T / temperature).to(rows.dtype), own, labels)
    return (total / number.clamp(min=1)).mean()


def policy_nan(embeddings, labels, temperature=0.1):
    """Right if anchors without positives make the loss NaN."""
    total, number = _supcon_parts(embeddings, labels, temperature)
    return (total / number).mean()


def policy_drop(embeddings, labels, temperature=0.1):
    """Right if anchors without positives are left out of the mean."""
    total, number = _supcon_parts(embeddings, labels, temperature)
    values = (total / number.clamp(min=1))[number > 0]
    return values.mean() if len(values) else values.sum()


def times_base(embeddings, labels, temperature=0.1):
    """Right with a base temperature of 0.07."""
    total, number = _supcon_parts(embeddings, labels, temperature)
    return temperature / 0.07 * (total / number.clamp(min=1)).mean()


def subtracts_self_in_float32(z_i, z_j, temperature=0.1):
    """Right for rows of norm 1, but e^(1/temperature), rounded to float32, is subtracted to remove the self pair."""
    rows = torch.cat([z_i, z_j])
    exponentials = (rows @ rows.T / temperature).exp()
    below = exponentials.sum(dim=1) - torch.full((len(rows),), 1 / temperature, dtype=torch.float64).exp().float()
    above = (torch.cat([(z_i * z_j).sum(dim=1)] * 2) / temperature).exp()
    return -(above / below).log().mean()


def decoupled_one_way(z_i, z_j, temperature=0.1):
    """Wrong: the denominator lacks the positive, only first views are anchors, and rows must have norm 1."""
    cross, own = z_i @ z_j.T / temperature, torch.eye(len(z_i), dtype=torch.bool)
    logits = torch.cat([z_i @ z_i.T / temperature, cross], dim=1).masked_fill(own.repeat(1, 2), -torch.inf)
    return (logits.logsumexp(dim=1) - cross.diagonal()).mean()


def directions_added(embeddings_a, embeddings_b, temperature=0.1):
    a, b = (F.normalize(rows, dim=1) for rows in (embeddings_a, embeddings_b))
    logits, own = a @ b.T / temperature, torch.arange(len(a))
    return F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)


def views_added(z_i, z_j, temperature=0.1):
    """As google-research's SimCLR adds them."""
    rows = F.normalize(torch.cat([z_i, z_j]), dim=1)
    logits = (rows @ rows.T / temperature).fill_diagonal_(-torch.inf)
    return 2 * F.cross_entropy(logits, torch.arange(len(rows)).roll(len(z_i)))


def raw_products_one_way(embeddings_a, embeddings_b, temperature=0.1):
    return F.cross_entropy(embeddings_a @ embeddings_b.T / temperature, torch.arange(len(embeddings_a)))


def times_2t(q, k, temperature=0.1):
    """Right with a base temperature of 0.5: the cross-entropy of one direction times 2 * temperature."""
    return 2 * temperature * _ce(q, k, temperature)[0]


def clamps_norms_at_1e_8(z_i, z_j, temperature=0.1):
    """Right, but norms below 1e-8 are clamped."""
    rows = torch.cat([z_i, z_j])
    n, own = len(rows), torch.eye(len(rows), dtype=torch.bool)
    logits = F.cosine_similarity(rows[:, None], rows[None], dim=2, eps=1e-8) / temperature
    return F.cross_entropy(logits.masked_fill(own, -torch.inf), torch.arange(n).roll(n // 2))


def prints(embeddings, labels, temperature=0.1):
    """Right; it prints a line at every call."""
    print("loss at temperature", temperature)  # noqa: T201
    total, number = _supcon_parts(embeddings, labels, temperature)
    return (total / number.clamp(min=1)).mean()


def far_from_everything(embeddings, labels, temperature=0.1):
    """Not a loss of the catalogue, and not close to one."""
    return (embeddings.abs().sum(dim=1).sqrt() * (labels + 2)).prod() / temperature


def positive_out_of_denominator(embeddings, labels, temperature=0.1):
    """Wrong: the denominator lacks the positives."""
    logits, own = _logits(embeddings, temperature)
    positives = (labels[:, None] == labels[None]) & ~own
    below = logits.masked_fill(own | positives, -torch.inf).logsumexp(dim=1, keepdim=True).clamp(min=-1e30)
    return -((logits - below).where(positives, 0).sum(dim=1) / positives.sum(dim=1).clamp(min=1)).mean()
