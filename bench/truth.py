"""Loss and gradient in float64. For the forms of `forms.BY_PAIRS`, they are accurate even when the loss is small.

For these forms, let u = logsumexp(s_in over the negatives n of anchor i) - s_ip. The loss of the pair (i, p) is log(1 +
e^u), and its derivative by u is 1 / (1 + e^-u). Neither formula subtracts nearly equal numbers. With one positive per
anchor, this pairwise loss equals NT-Xent and SupCon.

For the other forms, plain torch is evaluated in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from . import plain
from .forms import BY_PAIRS, Form

BLOCK = 1 << 23
"""Number of entries of a block of logits: 64 MiB in float64."""

ACCELERATOR_FACTOR = 4
"""Blocks are larger by this factor on an accelerator, so that it is not idle."""


def _pair_losses(form: Form, y: Tensor, anchors: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the losses ``[b, M]`` of the positive pairs of b anchors, 0 elsewhere, and the mask of the positives."""
    columns = torch.arange(len(y), device=y.device)[form.n if len(form.inputs) == 2 else 0 :]
    logits = y[anchors] @ y[columns].T / temperature
    same = form.labels[anchors][:, None] == form.labels[columns][None, :]
    positives = same & (anchors[:, None] != columns[None, :])
    negatives = logits.masked_fill(same, float("-inf")).logsumexp(dim=1, keepdim=True)
    u = torch.where(positives, negatives - logits, float("-inf"))
    return torch.logaddexp(torch.zeros_like(u), u), positives


def _blocks(anchors: Tensor, columns: int) -> Sequence[Tensor]:
    entries = BLOCK * (1 if anchors.device.type == "cpu" else ACCELERATOR_FACTOR)
    return torch.split(anchors, max(1, entries // columns))


def _rows(form: Form) -> Tensor:
    return torch.cat([rows.detach().to(torch.float64) for rows in form.inputs])


def _mean_over_pairs(form: Form, y: Tensor, temperature: float) -> tuple[float, int]:
    """Return the mean over all pairs, and their number. Add the gradient of the sum to ``y.grad``."""
    total, pairs = y.new_zeros(()), 0
    for some in _blocks(torch.arange(form.n, device=y.device), len(y)):
        losses, positives = _pair_losses(form, y, some, temperature)
        if y.requires_grad:
            losses.sum().backward()  # type: ignore[no-untyped-call]
        total += losses.detach().sum()
        pairs += int(positives.sum())
    return float(total) / pairs, pairs


def loss_and_gradient(form: Form, temperature: float, rows: Tensor | None = None) -> tuple[float, Tensor]:
    """Return the true loss of a batch, and its gradient ``[R, D]`` in float64.

    Args:
        form: the loss and its batch, which is already rounded to its dtype.
        temperature: positive number.
        rows: integers ``[R]``, the rows of the gradient, counted over all inputs; default all.
    """
    if form.name in BY_PAIRS:
        z = _rows(form).requires_grad_()
        y = normalize(z)
        leaf = y.detach().requires_grad_()
        loss, pairs = _mean_over_pairs(form, leaf, temperature)
        assert leaf.grad is not None  # it is a leaf
        (gradient,) = torch.autograd.grad(y, z, leaf.grad / pairs)
    else:
        wide = form.to(torch.float64)
        leaves = wide.leaves(torch.float64)
        found = wide.step(getattr(plain, form.loss), temperature)(*leaves)
        loss, gradient = float(found.detach()), torch.cat(torch.autograd.grad(found, leaves))
    return loss, gradient if rows is None else gradient[rows]


def loss_alone(form: Form, temperature: float) -> float:
    """Return the true loss, without its gradient."""
    if form.name in BY_PAIRS:
        return _mean_over_pairs(form, normalize(_rows(form)), temperature)[0]
    wide = form.to(torch.float64)
    return float(wide.step(getattr(plain, form.loss), temperature)(*wide.inputs))


def anchor_values(form: Form, temperature: float, rows: Tensor) -> Tensor:
    """Return the true values of some anchors, float64 ``[R]``: each is the mean over the anchor's pairs.

    Args:
        form: a batch of one of `forms.BY_PAIRS`.
        temperature: positive number.
        rows: integers ``[R]``, the anchors.
    """
    y = normalize(_rows(form))
    found = [_pair_losses(form, y, some, temperature) for some in _blocks(rows, len(y))]
    return torch.cat([losses.sum(dim=1) / positives.sum(dim=1) for losses, positives in found])


def errors(loss: float, gradient: Tensor, truth: tuple[float, Tensor]) -> dict[str, float]:
    """Return the relative errors of the loss, and of the gradient in the 2-norm. NaN becomes infinity."""
    true_loss, true_gradient = truth
    difference = (gradient.detach().to(torch.float64) - true_gradient).norm() / true_gradient.norm()
    found = {"loss": abs(loss - true_loss) / abs(true_loss), "gradient": float(difference)}
    return {name: value if value == value else float("inf") for name, value in found.items()}
