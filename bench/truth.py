"""Loss and gradient in float64, by blocks of anchors, in forms that lose no digits where the loss is small.

With u_ip = (log of the sum of an anchor's negatives) - s_ip, one pair's loss is log(1 + e^u), and the factor in its
derivative is 1 / (1 + e^-u): neither subtracts what nearly cancels. That is the pairwise loss, and with one positive
per anchor NT-Xent and SupCon are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .batches import Batch

BLOCK = 1 << 23
"""Entries of a block of logits: 64 MiB of float64."""

ACCELERATOR_FACTOR = 4
"""Factor by which blocks are larger on an accelerator, so that it is not idle."""


def _normalised(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows ``[N, D]`` at length 1, and their lengths ``[N, 1]``, in float64."""
    rows = rows.detach().to(torch.float64)
    norms = rows.norm(dim=1, keepdim=True)
    return rows / norms, norms


def _blocks(rows: Tensor, columns: int) -> list[Tensor]:
    """Rows in runs whose logits are at most `BLOCK` entries."""
    entries = BLOCK * (1 if rows.device.type == "cpu" else ACCELERATOR_FACTOR)
    length = max(1, entries // columns)
    return [rows[start : start + length] for start in range(0, len(rows), length)]


def _towers(batch: Batch) -> tuple[slice, slice]:
    """The rows that are anchors, and those that they are contrasted with."""
    if batch.loss == "info_nce":
        return slice(0, batch.n // 2), slice(batch.n // 2, batch.n)
    return slice(0, batch.n), slice(0, batch.n)


def _block(batch: Batch, y: Tensor, rows: Tensor, columns: slice, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits ``[b, M]`` with positives and self as -inf, the log of their row sums ``[b, 1]``, the positives' mask."""
    logits = y[rows] @ y[columns].T / temperature
    same = batch.labels[rows][:, None] == batch.labels[columns][None, :]
    positives = same.clone()
    if batch.loss != "info_nce":
        positives[torch.arange(len(rows), device=rows.device), rows] = False
    negatives = logits.masked_fill(same, float("-inf"))
    return logits, negatives.logsumexp(dim=1, keepdim=True), positives


def loss_and_gradient(batch: Batch, temperature: float, rows: Tensor | None = None) -> tuple[float, Tensor]:
    """The true mean over pairs and its gradient at the batch's own (rounded) embeddings.

    Args:
        batch: any loss; with one positive per anchor the mean over pairs is the mean over anchors.
        temperature: positive number.
        rows: integers ``[R]``, the rows of the gradient; by default all of them. Few rows take a third of the time.

    Returns:
        The loss, and its gradient ``[R, D]`` in float64.
    """
    y, norms = _normalised(batch.embeddings)
    anchors, columns = _towers(batch)
    indices = torch.arange(batch.n, device=y.device)
    rows = indices if rows is None else rows.to(y.device)
    sums, factors = y.new_zeros(batch.n, 1), y.new_zeros(batch.n, 1)
    total, pairs = y.new_zeros(()), 0
    for some in _blocks(indices[anchors], len(y[columns])):
        logits, negative, positives = _block(batch, y, some, columns, temperature)
        u = torch.where(positives, negative - logits, float("-inf"))
        total += torch.logaddexp(torch.zeros_like(u), u).sum()
        pairs += int(positives.sum())
        sums[some], factors[some] = negative, u.sigmoid().sum(dim=1, keepdim=True)
    slope = y.new_zeros(len(rows), y.shape[1])
    for places in _blocks(torch.arange(len(rows), device=y.device), batch.n):
        for part in (_as_anchors, _as_columns):
            slope[places] += part(batch, y, sums, factors, rows[places], temperature)
    slope /= temperature * pairs
    tangent = slope - (slope * y[rows]).sum(dim=1, keepdim=True) * y[rows]
    return float(total) / pairs, tangent / norms[rows]


def _as_anchors(batch: Batch, y: Tensor, sums: Tensor, factors: Tensor, rows: Tensor, temperature: float) -> Tensor:
    """What some rows' own values add to their derivative ``[R, D]``; nothing where a row is no anchor."""
    anchors, columns = _towers(batch)
    logits, _, positives = _block(batch, y, rows, columns, temperature)
    apart = batch.labels[rows][:, None] != batch.labels[columns][None, :]
    derivative = (logits - sums[rows]).exp() * apart * factors[rows] - (sums[rows] - logits).sigmoid() * positives
    return (derivative @ y[columns]) * (rows < len(y[anchors]))[:, None]


def _as_columns(batch: Batch, y: Tensor, sums: Tensor, factors: Tensor, rows: Tensor, temperature: float) -> Tensor:
    """What all anchors' values add to the derivative ``[R, D]`` of some rows; nothing where a row is no column."""
    anchors, columns = _towers(batch)
    indices = torch.arange(batch.n, device=y.device)[anchors]
    logits = y[anchors] @ y[rows].T / temperature
    same = batch.labels[anchors][:, None] == batch.labels[rows][None, :]
    positives = same & (indices[:, None] != rows[None, :])
    shares = (logits - sums[anchors]).exp() * ~same * factors[anchors]
    derivative = shares - (sums[anchors] - logits).sigmoid() * positives
    return (derivative.T @ y[anchors]) * (rows >= (columns.start or 0))[:, None]


def loss_alone(batch: Batch, temperature: float) -> float:
    """The true mean over pairs, without its gradient."""
    return loss_and_gradient(batch, temperature, torch.zeros(0, dtype=torch.int64))[0]


def anchor_values(batch: Batch, temperature: float, rows: Tensor) -> Tensor:
    """The true means over the pairs of some anchors.

    Args:
        batch: any loss.
        temperature: positive number.
        rows: integers ``[R]``, the anchors.

    Returns:
        Float64 ``[R]``.
    """
    y, _ = _normalised(batch.embeddings)
    _, columns = _towers(batch)
    values = []
    for some in _blocks(rows, len(y[columns])):
        logits, negative, positives = _block(batch, y, some, columns, temperature)
        u = negative - logits
        losses = torch.logaddexp(torch.zeros_like(u), u) * positives
        values.append(losses.sum(dim=1) / positives.sum(dim=1))
    return torch.cat(values)


def errors(loss: float, gradient: Tensor, truth: tuple[float, Tensor]) -> dict[str, float]:
    """Relative errors of a loss and of the norm of its gradient's difference; infinite where either is not finite."""
    true_loss, true_gradient = truth
    difference = (gradient.detach().to(torch.float64) - true_gradient).norm() / true_gradient.norm()
    found = {"loss": abs(loss - true_loss) / abs(true_loss), "gradient": float(difference)}
    return {name: value if value == value else float("inf") for name, value in found.items()}
