"""The losses in plain torch, as one writes them without a library, to compare with `pairproof.fast`.

Masks are built in every call, as in training. Every anchor must have a positive. In `nt_bxent`, `hard_negative` and
`dclw`, and with the denominator "only_negatives", it also needs a negative.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

EPSILON = 1e-8


def _rows(z: Tensor, similarity: str) -> Tensor:
    return F.normalize(z, dim=1) if similarity == "cosine" else z


def _logits(z: Tensor, references: Tensor | None, temperature: float, similarity: str) -> Tensor:
    """Return the logits ``[N, M]`` of rows and references, or ``[N, N]`` of the rows."""
    y = _rows(z, similarity)
    return y @ (y if references is None else _rows(references, similarity)).T / temperature


def _diagonal(z: Tensor) -> Tensor:
    return torch.eye(len(z), dtype=torch.bool, device=z.device)


def _pairs(
    z: Tensor,
    labels: Tensor | None = None,
    positives: Tensor | None = None,
    ref_embeddings: Tensor | None = None,
    ref_labels: Tensor | None = None,
    *,
    temperature: float,
    similarity: str = "cosine",
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the logits and the masks of positives and of self pairs; references have no self pairs."""
    logits = _logits(z, ref_embeddings, temperature, similarity)
    if labels is not None and ref_labels is not None:
        return logits, labels[:, None] == ref_labels, None
    diagonal = _diagonal(z)
    same = positives if labels is None else labels[:, None] == labels
    assert same is not None  # labels or positives are given
    return logits, same & ~diagonal, diagonal


def _without(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Return the logsumexp ``[N, 1]`` of the logits that are not masked."""
    kept = logits if mask is None else logits.masked_fill(mask, float("-inf"))
    return kept.logsumexp(dim=1, keepdim=True)


def _negatives(logits: Tensor, positives: Tensor, diagonal: Tensor | None) -> Tensor:
    return _without(logits, positives if diagonal is None else positives | diagonal)


def _log_ratios(logits: Tensor, positives: Tensor, diagonal: Tensor | None, denominator: str) -> Tensor:
    if denominator == "all":
        return logits - _without(logits, diagonal)
    negatives = _negatives(logits, positives, diagonal)
    return logits - (negatives if denominator == "only_negatives" else torch.logaddexp(logits, negatives))


def _reduced(losses: Tensor, reduction: str) -> Tensor:
    return losses.mean() if reduction == "mean" else losses.sum() if reduction == "sum" else losses


def supcon(z: Tensor, *, denominator: str = "all", reduction: str = "mean", **given: Any) -> Tensor:
    """SupCon with the mean over positives outside the logarithm."""
    logits, positives, diagonal = _pairs(z, **given)
    log_ratios = _log_ratios(logits, positives, diagonal, denominator)
    return _reduced(-(log_ratios * positives).sum(dim=1) / positives.sum(dim=1), reduction)


def supcon_in(z: Tensor, *, denominator: str = "all", reduction: str = "mean", **given: Any) -> Tensor:
    """SupCon with the mean over positives inside the logarithm."""
    logits, positives, diagonal = _pairs(z, **given)
    log_ratios = _log_ratios(logits, positives, diagonal, denominator)
    counts = positives.sum(dim=1, dtype=logits.dtype)
    return _reduced(counts.log() - _without(log_ratios, ~positives)[:, 0], reduction)


def supcon_epsilon(z: Tensor, *, reduction: str = "mean", **given: Any) -> Tensor:
    """SupCon with an epsilon added to every exponential and to the number of positives."""
    logits, positives, diagonal = _pairs(z, **given)
    assert diagonal is not None  # there are no references
    exponentials = (logits - logits.amax(dim=1, keepdim=True)).exp() + EPSILON
    log_ratios = exponentials.log() - exponentials.masked_fill(diagonal, 0).sum(dim=1, keepdim=True).log()
    counts = positives.sum(dim=1, dtype=logits.dtype)
    return _reduced(-(log_ratios * positives).sum(dim=1) / (counts + EPSILON), reduction)


def nt_xent(
    z: Tensor,
    partners: Tensor,
    *,
    ref_embeddings: Tensor | None = None,
    temperature: float,
    similarity: str = "cosine",
    reduction: str = "mean",
) -> Tensor:
    """NT-Xent as cross-entropy; the partners ``[N]`` are the classes."""
    logits = _logits(z, ref_embeddings, temperature, similarity)
    if ref_embeddings is None:
        logits = logits.fill_diagonal_(float("-inf"))
    return F.cross_entropy(logits, partners, reduction=reduction)


def nt_xent_pairwise(z: Tensor, *, reduction: str = "mean", **given: Any) -> Tensor:
    """Pairwise NT-Xent; with the reduction "mean_pairs", the mean over all positive pairs."""
    logits, positives, diagonal = _pairs(z, **given)
    losses = F.softplus(_negatives(logits, positives, diagonal) - logits) * positives
    if reduction == "mean_pairs":
        return losses.sum() / positives.sum()
    return _reduced(losses.sum(dim=1) / positives.sum(dim=1), reduction)


def nt_bxent(
    z: Tensor, positive_pairs: Tensor, *, temperature: float, similarity: str = "cosine", reduction: str = "mean"
) -> Tensor:
    """NT-BXent with positive pairs ``[P, 2]``."""
    logits, diagonal = _logits(z, None, temperature, similarity), _diagonal(z)
    positives = torch.zeros_like(diagonal)
    positives[positive_pairs[:, 0], positive_pairs[:, 1]] = True
    positives &= ~diagonal
    negatives = ~(positives | diagonal)
    of_positives = (F.softplus(-logits) * positives).sum(dim=1) / (positives.sum(dim=1) + 1)
    return _reduced(of_positives + (F.softplus(logits) * negatives).sum(dim=1) / negatives.sum(dim=1), reduction)


def info_nce(
    a: Tensor,
    b: Tensor,
    *,
    negatives: Tensor | None = None,
    direction: str = "both",
    temperature: float,
    similarity: str = "cosine",
    reduction: str = "mean",
) -> Tensor:
    """InfoNCE of two towers in one direction or both (CLIP), or with a queue of negatives ``[K, D]`` (MoCo)."""
    a, b = _rows(a, similarity), _rows(b, similarity)
    if negatives is not None:
        positive = (a * b).sum(dim=1, keepdim=True)
        logits = torch.cat([positive, a @ _rows(negatives, similarity).T], dim=1) / temperature
        return F.cross_entropy(logits, torch.zeros(len(a), dtype=torch.int64, device=a.device), reduction=reduction)
    logits, rows = a @ b.T / temperature, torch.arange(len(a), device=a.device)
    loss = F.cross_entropy(logits, rows, reduction=reduction)
    return loss if direction == "a_to_b" else (loss + F.cross_entropy(logits.T, rows, reduction=reduction)) / 2


def sigmoid(
    a: Tensor,
    b: Tensor,
    *,
    labels: Tensor | None = None,
    temperature: float,
    bias: float = -10.0,
    similarity: str = "cosine",
    reduction: str = "mean",
) -> Tensor:
    """The sigmoid loss of two towers; the rows of both have the labels ``[N]``, by default the row numbers."""
    logits = _logits(a, b, temperature, similarity) + bias
    positives = _diagonal(a) if labels is None else labels[:, None] == labels
    signs = 2 * positives.to(logits.dtype) - 1
    return _reduced(-F.logsigmoid(signs * logits).sum(dim=1), reduction)


def hard_negative(
    z: Tensor,
    partners: Tensor,
    *,
    ref_embeddings: Tensor | None = None,
    temperature: float,
    tau_plus: float = 0.1,
    beta: float = 1.0,
    similarity: str = "cosine",
    reduction: str = "mean",
) -> Tensor:
    """The loss of hard negatives, computed from exponentials as in the paper."""
    logits = _logits(z, ref_embeddings, temperature, similarity)
    positives = F.one_hot(partners, logits.shape[1]).bool()
    negatives = ~positives if ref_embeddings is not None else ~(positives | _diagonal(z))
    number = negatives.sum(dim=1, dtype=logits.dtype)
    positive = logits[positives].exp()
    weights = (beta * logits).exp() * negatives
    mean = (weights * logits.exp()).sum(dim=1) / weights.sum(dim=1)
    mass = (number * mean - tau_plus * number * positive) / (1 - tau_plus)
    mass = mass.clamp(min=number * math.exp(-1 / temperature))
    return _reduced(-(positive / (positive + mass)).log(), reduction)


def multiple_negatives_ranking(
    a: Tensor,
    b: Tensor,
    *,
    hard_negatives: Tensor | None = None,
    directions: str = "query_to_doc",
    temperature: float,
    similarity: str = "cosine",
    reduction: str = "mean",
) -> Tensor:
    """The ranking loss of sentence-transformers, with one log-sum-exp over all directions."""
    a, b = _rows(a, similarity), _rows(b, similarity)
    documents = b if hard_negatives is None else torch.cat([b, _rows(hard_negatives.flatten(0, 1), similarity)])
    logits, same = [a @ documents.T / temperature], _diagonal(a)
    if "query_to_query" in directions:
        logits.append((a @ a.T / temperature).masked_fill(same, -math.inf))
    if "doc_to_query" in directions:
        logits.append(b @ a.T / temperature)
    if "doc_to_doc" in directions:
        logits.append((b @ b.T / temperature).masked_fill(same, -math.inf))
    return _reduced(torch.cat(logits, dim=1).logsumexp(dim=1) - logits[0].diagonal(), reduction)


def dclw(
    z: Tensor,
    partners: Tensor,
    *,
    ref_embeddings: Tensor | None = None,
    temperature: float,
    sigma: float = 0.5,
    similarity: str = "cosine",
    reduction: str = "mean",
) -> Tensor:
    """Weighted decoupled contrastive learning (DCLW). The weights have no gradient."""
    logits = _logits(z, ref_embeddings, temperature, similarity)
    positives = F.one_hot(partners, logits.shape[1]).bool()
    others = positives if ref_embeddings is not None else positives | _diagonal(z)
    positive = logits[positives]
    weights = 2 - len(z) * (positive.detach() * temperature / sigma).softmax(dim=0)
    return _reduced(logits.masked_fill(others, -math.inf).logsumexp(dim=1) - weights * positive, reduction)
