"""The losses of this project."""

from __future__ import annotations

import torch
from torch.nn import functional


class SupConLoss(torch.nn.Module):
    """Supervised contrastive loss, averaged over all anchors. An anchor without positives has the value 0."""

    def __init__(self, temperature: float = 0.1) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, embeddings: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = functional.normalize(embeddings, dim=1)
        self_pairs = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
        logits = (rows @ rows.T / self.temperature).masked_fill(self_pairs, float("-inf"))
        log_probabilities = functional.log_softmax(logits, dim=1)
        positives = (labels[:, None] == labels[None, :]) & ~self_pairs
        sums = log_probabilities.masked_fill(~positives, 0).sum(1)
        return (-sums / positives.sum(1).clamp(min=1)).mean()


def nt_xent(view_a: torch.Tensor, view_b: torch.Tensor, temperature: float = 0.5) -> torch.Tensor:
    """NT-Xent of two views. Row i of both views is the same item."""
    rows = functional.normalize(torch.cat([view_a, view_b]), dim=1)
    count = len(view_a)
    self_pairs = torch.eye(2 * count, dtype=torch.bool, device=rows.device)
    logits = (rows @ rows.T / temperature).masked_fill(self_pairs, float("-inf"))
    partners = torch.arange(2 * count, device=rows.device).roll(count)
    return functional.cross_entropy(logits, partners)
