"""Loss and gradient in float64, by blocks of anchors, in a form that is accurate when the loss is small.

With u_ip = logsumexp of the negatives of anchor i - s_ip, the loss of the pair (i, p) is log(1 + e^u), and the factor
in its derivative is 1 / (1 + e^-u). Neither has a cancelling difference. This is the pairwise loss; with one positive
per anchor, NT-Xent and SupCon are equal to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from .batches import Batch

BLOCK = 1 << 23
"""Number of entries of a block of logits: 64 MiB in float64."""

ACCELERATOR_FACTOR = 4
"""Factor by which blocks are larger on an accelerator, so that it is not idle."""


def _pair_losses(batch: Batch, y: Tensor, anchors: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the losses ``[b, M]`` of the pairs of some anchors, 0 for pairs that are not positive, and the mask."""
    columns = torch.arange(batch.n, device=y.device)[batch.n // 2 if batch.loss == "info_nce" else 0 :]
    logits = y[anchors] @ y[columns].T / temperature
    same = batch.labels[anchors][:, None] == batch.labels[columns][None, :]
    positives = same & (anchors[:, None] != columns[None, :])
    negatives = logits.masked_fill(same, float("-inf")).logsumexp(dim=1, keepdim=True)
    u = torch.where(positives, negatives - logits, float("-inf"))
    return torch.logaddexp(torch.zeros_like(u), u), positives


def _blocks(anchors: Tensor, columns: int) -> Sequence[Tensor]:
    """Split anchors into runs with at most `BLOCK` logits each."""
    entries = BLOCK * (1 if anchors.device.type == "cpu" else ACCELERATOR_FACTOR)
    return torch.split(anchors, max(1, entries // columns))


def _mean_over_pairs(batch: Batch, y: Tensor, temperature: float) -> tuple[float, int]:
    """Return the mean over the pairs of all anchors and the number of pairs; ``y.grad`` is the gradient of the sum."""
    total, pairs = y.new_zeros(()), 0
    anchors = torch.arange(batch.n // 2 if batch.loss == "info_nce" else batch.n, device=y.device)
    for some in _blocks(anchors, batch.n):
        losses, positives = _pair_losses(batch, y, some, temperature)
        if y.requires_grad:
            losses.sum().backward()  # type: ignore[no-untyped-call]
        total += losses.detach().sum()
        pairs += int(positives.sum())
    return float(total) / pairs, pairs


def loss_and_gradient(batch: Batch, temperature: float, rows: Tensor | None = None) -> tuple[float, Tensor]:
    """Return the true mean over pairs and its gradient at the rounded embeddings of the batch.

    Args:
        batch: of any loss. With one positive per anchor, the mean over pairs is the mean over anchors.
        temperature: positive number.
        rows: integers ``[R]``, the rows of the gradient; default all.

    Returns:
        The loss, and its gradient ``[R, D]`` in float64.
    """
    z = batch.embeddings.detach().to(torch.float64).requires_grad_()
    y = normalize(z)
    leaf = y.detach().requires_grad_()
    loss, pairs = _mean_over_pairs(batch, leaf, temperature)
    assert leaf.grad is not None  # it is a leaf
    (gradient,) = torch.autograd.grad(y, z, leaf.grad / pairs)
    return loss, gradient if rows is None else gradient[rows]


def loss_alone(batch: Batch, temperature: float) -> float:
    """Return the true mean over pairs, without its gradient."""
    return _mean_over_pairs(batch, normalize(batch.embeddings.detach().to(torch.float64)), temperature)[0]


def anchor_values(batch: Batch, temperature: float, rows: Tensor) -> Tensor:
    """Return the true means over the pairs of some anchors.

    Args:
        batch: of any loss.
        temperature: positive number.
        rows: integers ``[R]``, the anchors.

    Returns:
        Float64 ``[R]``.
    """
    y = normalize(batch.embeddings.detach().to(torch.float64))
    found = [_pair_losses(batch, y, some, temperature) for some in _blocks(rows, batch.n)]
    return torch.cat([losses.sum(dim=1) / positives.sum(dim=1) for losses, positives in found])


def errors(loss: float, gradient: Tensor, truth: tuple[float, Tensor]) -> dict[str, float]:
    """Return the relative error of the loss and that of the gradient in the 2-norm; NaN is reported as infinite."""
    true_loss, true_gradient = truth
    difference = (gradient.detach().to(torch.float64) - true_gradient).norm() / true_gradient.norm()
    found = {"loss": abs(loss - true_loss) / abs(true_loss), "gradient": float(difference)}
    return {name: value if value == value else float("inf") for name, value in found.items()}
