"""Published losses as small programs write them, by the names of docs/names.md, for the tests of identification."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def cosines(a, b):
    return F.normalize(a, dim=1) @ F.normalize(b, dim=1).T


def other_rows(logits):
    return logits.masked_fill(torch.eye(len(logits), dtype=torch.bool), -math.inf)


def simclr(z_i, z_j, temperature=0.5):
    rows = torch.cat([z_i, z_j])
    return F.cross_entropy(other_rows(cosines(rows, rows) / temperature), torch.arange(len(rows)).roll(len(z_i)))


def dcl(z1, z2, temperature=0.1):
    own = torch.eye(len(z1), dtype=torch.bool)
    values = []
    for rows, others in ((z1, z2), (z2, z1)):
        across, within = cosines(rows, others) / temperature, cosines(rows, rows) / temperature
        negatives = torch.cat([across.masked_fill(own, -math.inf), within.masked_fill(own, -math.inf)], dim=1)
        values.append(negatives.logsumexp(dim=1) - across.diagonal())
    return torch.cat(values).mean()


def dclw(z1, z2, temperature=0.1, sigma=0.5):
    pairs = F.cosine_similarity(z1, z2).detach()
    weights = 2 - len(z1) * (pairs / sigma).softmax(dim=0)
    own = torch.eye(len(z1), dtype=torch.bool)
    values = []
    for rows, others in ((z1, z2), (z2, z1)):
        across, within = cosines(rows, others) / temperature, cosines(rows, rows) / temperature
        negatives = torch.cat([across.masked_fill(own, -math.inf), within.masked_fill(own, -math.inf)], dim=1)
        values.append(negatives.logsumexp(dim=1) - weights * across.diagonal())
    return torch.cat(values).mean()


def hcl(z1, z2, temperature=0.5, tau_plus=0.1, beta=1.0):
    rows = torch.cat([z1, z2])
    n = len(rows)
    e = (cosines(rows, rows) / temperature).exp()
    kept = ~torch.eye(len(z1), dtype=torch.bool).repeat(2, 2)
    negatives = e[kept].view(n, -1)
    positive = torch.cat([e.diagonal(len(z1)), e.diagonal(-len(z1))])
    weights = negatives**beta
    mass = (weights * negatives).sum(dim=1) / weights.mean(dim=1)
    mass = ((mass - tau_plus * (n - 2) * positive) / (1 - tau_plus)).clamp(min=(n - 2) * math.exp(-1 / temperature))
    return -(positive / (positive + mass)).log().mean()


def debiased(z1, z2, temperature=0.5, tau_plus=0.1):
    return hcl(z1, z2, temperature, tau_plus, 0.0)


def sincere(embeddings, labels, temperature=0.1):
    logits = other_rows(cosines(embeddings, embeddings) / temperature)
    alike = labels[:, None] == labels
    below = logits.masked_fill(alike, -math.inf).logsumexp(dim=1, keepdim=True)
    costs = torch.logaddexp(logits, below) - logits
    positive = alike & (logits > -math.inf)
    return (costs.masked_fill(~positive, 0).sum(dim=1) / positive.sum(dim=1).clamp(min=1)).mean()


def suncet(embeddings, labels, temperature=0.1):
    logs = other_rows(cosines(embeddings, embeddings) / temperature).log_softmax(dim=1)
    alike = labels[:, None] == labels
    some = alike.sum(dim=1) > 1
    values = -logs.masked_fill(~alike, -math.inf)[some].logsumexp(dim=1)
    return values.sum() / len(labels)


def n_pairs(anchors, positives):
    return F.cross_entropy(anchors @ positives.T, torch.arange(len(anchors)))


def simcse(z1, z2, temp=0.05):
    sims = F.cosine_similarity(z1[:, None], z2[None], dim=-1) / temp
    return F.cross_entropy(sims, torch.arange(len(sims)))


def convirt(image_features, text_features, temperature=0.1):
    logits = cosines(image_features, text_features) / temperature
    rows = torch.arange(len(logits))
    return 0.75 * F.cross_entropy(logits, rows) + 0.25 * F.cross_entropy(logits.T, rows)


def clip(image_features, text_features, logit_scale):
    logits = logit_scale * cosines(image_features, text_features)
    rows = torch.arange(len(logits))
    return (F.cross_entropy(logits, rows) + F.cross_entropy(logits.T, rows)) / 2


def moco(q, k, queue, temperature=0.07):
    q, k, queue = (F.normalize(rows, dim=1) for rows in (q, k, queue))
    logits = torch.cat([(q * k).sum(dim=1, keepdim=True), q @ queue.T], dim=1) / temperature
    return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.int64))


def siglip(image_features, text_features, temperature=0.1, bias=-10.0):
    logits = cosines(image_features, text_features) / temperature + bias
    signs = 2 * torch.eye(len(logits)) - 1
    return -F.logsigmoid(signs * logits).sum() / len(logits)


def mnrl(anchors, positives, scale=20.0):
    return F.cross_entropy(scale * cosines(anchors, positives), torch.arange(len(anchors)))


def symmetric(anchors, positives, scale=20.0):
    scores = scale * cosines(anchors, positives)
    rows = torch.arange(len(scores))
    return (F.cross_entropy(scores, rows) + F.cross_entropy(scores.T, rows)) / 2


def gte(queries, documents, temperature=0.01):
    across = cosines(queries, documents) / temperature
    blocks = [across, across.T, other_rows(cosines(queries, queries) / temperature)]
    blocks.append(other_rows(cosines(documents, documents) / temperature))
    return (torch.cat(blocks, dim=1).logsumexp(dim=1) - across.diagonal()).mean()


def with_other_queries(queries, documents, temperature=0.05):
    across = cosines(queries, documents) / temperature
    scores = torch.cat([across, other_rows(cosines(queries, queries) / temperature)], dim=1)
    return F.cross_entropy(scores, torch.arange(len(scores)))


def mnrl_with_hard_negatives(anchors, positives, hard_negatives, scale=20.0):
    candidates = torch.cat([positives, hard_negatives.flatten(0, 1)])
    return F.cross_entropy(scale * cosines(anchors, candidates), torch.arange(len(anchors)))


def symmetric_with_hard_negatives(anchors, positives, hard_negatives, scale=20.0):
    candidates = torch.cat([positives, hard_negatives.flatten(0, 1)])
    rows = torch.arange(len(anchors))
    scores = scale * cosines(anchors, candidates)
    return (F.cross_entropy(scores, rows) + F.cross_entropy(scores[:, : len(rows)].T, rows)) / 2


def own_hard_negatives(anchors, positives, hard_negatives, temperature=0.05):
    own = F.cosine_similarity(anchors[:, None], hard_negatives, dim=2) / temperature
    scores = torch.cat([cosines(anchors, positives) / temperature, own], dim=1)
    return F.cross_entropy(scores, torch.arange(len(scores)))


def own_hard_negatives_only(anchors, positives, hard_negatives, temperature=0.05):
    candidates = torch.cat([positives[:, None], hard_negatives], dim=1)
    scores = F.cosine_similarity(anchors[:, None], candidates, dim=2) / temperature
    return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64))


def hardened(queries, documents, temperature=0.05, strength=9.0):
    similarities = cosines(queries, documents)
    own = torch.eye(len(queries), dtype=torch.bool)
    scores = similarities / temperature + (strength * similarities.detach()).masked_fill(own, 0.0)
    return F.cross_entropy(scores, torch.arange(len(scores)))
