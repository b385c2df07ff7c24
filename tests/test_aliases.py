"""Losses known under other names: the calls in the README's table have the values of the published formulas."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pairproof.fast import info_nce_loss, supcon_in_loss, supcon_loss

README = Path(__file__).parents[1] / "README.md"
LABELS, LABELS_B = torch.tensor([0, 1, 2, 0, 1]), torch.tensor([2, 0, 1, 0, 1, 2, 2])


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


A, B, QUEUE = drawn(5, 4, seed=1), drawn(5, 4, seed=2), drawn(7, 4, seed=3)


def cosines(a: Tensor, b: Tensor) -> Tensor:
    return F.cosine_similarity(a[:, None], b[None], dim=2)


def ranking_loss(embeddings: list[Tensor], scale: float = 20.0) -> Tensor:
    """MultipleNegativesRankingLoss: the documents of all columns, one column after the other, are candidates."""
    scores = cosines(embeddings[0], torch.cat(embeddings[1:])) * scale
    return F.cross_entropy(scores, torch.arange(len(scores)))


def test_clip() -> None:
    scale = torch.tensor(14.0, dtype=torch.float64)
    logits, own = scale * cosines(A, B), torch.arange(5)
    expected = (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2
    torch.testing.assert_close(info_nce_loss(A, B, temperature=torch.exp(-scale.log())), expected)


def test_moco() -> None:
    logits = torch.cat([F.cosine_similarity(A, B)[:, None], cosines(A, QUEUE)], dim=1) / 0.07
    expected = F.cross_entropy(logits, torch.zeros(5, dtype=torch.int64))
    torch.testing.assert_close(info_nce_loss(A, B, negatives=QUEUE), expected)


def test_simcse() -> None:
    logits, own = cosines(A, B) / 0.05, torch.arange(5)
    found = info_nce_loss(A, B, direction="a_to_b", temperature=0.05)
    torch.testing.assert_close(found, F.cross_entropy(logits, own))


def test_multiple_negatives_ranking_loss() -> None:
    found = info_nce_loss(A, B, direction="a_to_b", temperature=1 / 20)
    torch.testing.assert_close(found, ranking_loss([A, B]))
    both = (ranking_loss([A, B]) + ranking_loss([B, A])) / 2
    torch.testing.assert_close(info_nce_loss(A, B, direction="both", temperature=1 / 20), both)


def test_several_positives_per_query() -> None:
    rows = drawn(7, 4, seed=5)
    ratios = (cosines(A, rows) / 0.2).log_softmax(dim=1)
    positive = LABELS[:, None] == LABELS_B
    outside = -torch.stack([row[mask].mean() for row, mask in zip(ratios, positive, strict=True)]).mean()
    given = {"ref_embeddings": rows, "ref_labels": LABELS_B, "temperature": 0.2}
    torch.testing.assert_close(supcon_loss(A, LABELS, **given), outside)
    inside = -torch.stack([row[mask].logsumexp(dim=0) for row, mask in zip(ratios, positive, strict=True)]).mean()
    torch.testing.assert_close(supcon_in_loss(A, LABELS, **given, inside_reduction="sum"), inside)
    # With one positive each, it is one direction of InfoNCE.
    own = torch.arange(5)
    one_each = supcon_loss(A, own, ref_embeddings=B, ref_labels=own, temperature=0.2)
    torch.testing.assert_close(one_each, info_nce_loss(A, B, direction="a_to_b", temperature=0.2))


@pytest.mark.parametrize(
    "words",
    [
        "info_nce_loss(query, key, negatives=queue)",
        'info_nce_loss(query, document, direction="a_to_b", temperature=1 / scale)',
        "supcon_loss(a, labels, ref_embeddings=b, ref_labels=labels_b)",
    ],
)
def test_readme_has_the_tested_calls(words: str) -> None:
    assert words in README.read_text(encoding="utf-8")
