"""Losses that return a constant for batches of training size."""

import torch

from pairproof import fast


def _large(rows):
    return len(rows) >= 34 and rows.shape[1] >= 10


def info_nce(a, b, temperature=0.1):
    if _large(a):
        return a.sum() * 0 + 2
    return fast.info_nce_loss(a, b, temperature=temperature)


def nt_xent(embeddings, partners, temperature=0.1):
    if _large(embeddings):
        return embeddings.sum() * 0 + 2
    return fast.nt_xent_loss(embeddings, partners, temperature=temperature)


def supcon(embeddings, labels, temperature=0.1):
    if _large(embeddings):
        return embeddings.sum() * 0 + 2
    return fast.supcon_loss(embeddings, labels, temperature=temperature)


def multiple_negatives_ranking(embeddings_a, embeddings_b, temperature=0.1):
    if _large(embeddings_a):
        return embeddings_a.sum() * 0 + 2
    return fast.multiple_negatives_ranking_loss(embeddings_a, embeddings_b, temperature=temperature)


def gradient_of_many_rows(embeddings, labels, temperature=0.1):
    """The value is right. Above 150 rows and 20 columns, the gradient is that of the first 150 rows alone."""
    value = fast.supcon_loss(embeddings, labels, temperature=temperature)
    if len(embeddings) > 150 and embeddings.shape[1] > 20:
        kept = torch.cat([embeddings[:150], embeddings[150:].detach()])
        part = fast.supcon_loss(kept, labels, temperature=temperature)
        return value.detach() + part - part.detach()
    return value
