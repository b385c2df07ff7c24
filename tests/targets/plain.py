"""The reference's loops as numpy targets: ``supcon`` takes every option, ``nt_xent`` labels and the temperature."""

from __future__ import annotations

import numpy as np

from pairproof import reference


def supcon(embeddings: np.ndarray, labels: np.ndarray | None = None, **options) -> np.ndarray:
    """The loss of the reference, without its terms."""
    return np.asarray(reference.supcon_loss(embeddings, labels, **options).loss)


def nt_xent(embeddings: np.ndarray, labels: np.ndarray, temperature: float) -> float:
    """NT-Xent of the reference; every label occurs twice, and the partner of a row is the other row with its label."""
    partners = [
        int(np.flatnonzero((labels == label) & (np.arange(len(labels)) != i))[0]) for i, label in enumerate(labels)
    ]
    return float(reference.nt_xent_loss(embeddings, np.array(partners), temperature=temperature).loss)
