"""The batches that are measured: five losses, random and trained-like embeddings."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

LOSSES = {
    "nt_xent": "NT-Xent, two views",
    "supcon": "SupCon, two per class",
    "pairwise_views": "pairwise NT-Xent, two views",
    "pairwise_classes": "pairwise NT-Xent, 10 classes",
    "info_nce": "InfoNCE, two towers, one way",
}
"""Name in options and in the report, and what it is. Losses are means: over pairs for the pairwise forms."""

KINDS = ("random", "trained")
"""Independent normal rows; rows that lie around their class's centre with a cosine of about 0.9 between them."""

DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16}
"""Name in options and in the report, and the embeddings' dtype. Under "tf32" float32 products may round to TF32."""

CLASSES = 10
NOISE = 1 / 3
"""Of a row against its centre. The cosine of two rows of one class is then 1 / (1 + 1/9) = 0.9."""


@dataclass(frozen=True)
class Batch:
    """One batch of one loss.

    Attributes:
        loss: a name of `LOSSES`.
        embeddings: floating ``[N, D]``, not normalised. For info_nce one tower's rows, then the other's.
        labels: integers ``[N]``; with two rows per class, row k and row k + N/2 share one.
        partners: integers ``[N]``: row k + N/2 for row k and back.
    """

    loss: str
    embeddings: Tensor
    labels: Tensor
    partners: Tensor

    @property
    def n(self) -> int:
        """Number of rows."""
        return len(self.embeddings)

    def to(self, dtype: torch.dtype) -> Batch:
        """The same rows in another dtype."""
        return replace(self, embeddings=self.embeddings.to(dtype))


def make_batch(loss: str, n: int, d: int, kind: str = "random", *, seed: int = 0, device: str = "cpu") -> Batch:
    """A float32 batch in which every anchor has a positive.

    Args:
        loss: a name of `LOSSES`.
        n: rows, an even number.
        d: columns.
        kind: a name of `KINDS`.
        seed: of torch's generator on the CPU; the same rows on every device.
        device: where the batch goes.

    Returns:
        The batch.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % CLASSES if loss == "pairwise_classes" else torch.arange(n // 2).repeat(2)
    embeddings = torch.randn(n, d, generator=generator)
    if kind == "trained":
        centres = torch.randn(int(labels.max()) + 1, d, generator=generator)
        embeddings = centres[labels] + NOISE * embeddings
    return Batch(loss, *(rows.to(device) for rows in (embeddings, labels, torch.arange(n).roll(n // 2))))
