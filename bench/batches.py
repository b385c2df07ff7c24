"""The batches for the measurements: five losses, with random and trained-like embeddings."""

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
"""Names in options and in the report, with descriptions. The losses are means, over pairs for the pairwise losses."""

KINDS = ("random", "trained")
"""Independent normal rows; rows around the centre of their class, with a cosine of about 0.9 between them."""

DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16}
"""Names in options and in the report, with the dtype of the embeddings. With "tf32", products may round to TF32."""

CLASSES = 10
NOISE = 1 / 3
"""Standard deviation of a row around its centre: the cosine of two rows of a class is 1 / (1 + 1/9) = 0.9."""


@dataclass(frozen=True)
class Batch:
    """One batch of one loss.

    Attributes:
        loss: a name of `LOSSES`.
        embeddings: floating ``[N, D]``, not normalised. For info_nce the rows of one tower, then those of the other.
        labels: integers ``[N]``; with two rows per class, rows k and k + N/2 have the same label.
        partners: integers ``[N]``: k + N/2 for row k, and k for row k + N/2.
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
        """Return the batch with embeddings in another dtype."""
        return replace(self, embeddings=self.embeddings.to(dtype))


def make_batch(loss: str, n: int, d: int, kind: str = "random", *, seed: int = 0, device: str = "cpu") -> Batch:
    """Make a float32 batch in which every anchor has a positive.

    Args:
        loss: a name of `LOSSES`.
        n: number of rows, even.
        d: number of columns.
        kind: a name of `KINDS`.
        seed: seed of torch's CPU generator, so that the rows are the same on every device.
        device: device of the batch.

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
