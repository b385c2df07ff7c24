"""Loss and gradient in float64. For the forms of `forms.BY_PAIRS` they are accurate even when the loss is small.

Let u_ip = logsumexp(s_in over the negatives n of anchor i) - s_ip. The loss of the pair (i, p) is log(1 + e^u), and the
factor in its derivative is 1 / (1 + e^-u). In neither do nearly equal numbers cancel. This is the pairwise loss; with
one positive per anchor, NT-Xent and SupCon are equal to it. It is computed one block of anchors at a time. For the
other forms, plain torch is evaluated in float64.
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
"""Factor by which blocks are larger on an accelerator, so that it is not idle."""


def _pair_losses(form: Form, y: Tensor, anchors: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the losses ``[b, M]`` of the pairs of some anchors, 0 for pairs that are not positive, and the mask."""
    columns = torch.arange(len(y), device=y.device)[form.n if len(form.inputs) == 2 else 0 :]
    logits = y[anchors] @ y[columns].T / temperature
    same = form.labels[anchors][:, None] == form.labels[columns][None, :]
    positives = same & (anchors[:, None] != columns[None, :])
    negatives = logits.masked_fill(same, float("-inf")).logsumexp(dim=1, keepdim=True)
    u = torch.where(positives, negatives - logits, float("-inf"))
    return torch.logaddexp(torch.zeros_like(u), u), positives


def _blocks(anchors: Tensor, columns: int) -> Sequence[Tensor]:
    """Split anchors into blocks of at most `BLOCK` logits; `ACCELERATOR_FACTOR` times as many on an accelerator."""
    entries = BLOCK * (1 if anchors.device.type == "cpu" else ACCELERATOR_FACTOR)
    return torch.split(anchors, max(1, entries // columns))


def _rows(form: Form) -> Tensor:
    """Return the rows of all inputs in float64."""
    return torch.cat([rows.detach().to(torch.float64) for rows in form.inputs])


def _mean_over_pairs(form: Form, y: Tensor, temperature: float) -> tuple[float, int]:
    """Return the mean over the pairs of all anchors and the number of pairs; ``y.grad`` is the gradient of the sum."""
    total, pairs = y.new_zeros(()), 0
    for some in _blocks(torch.arange(form.n, device=y.device), len(y)):
        losses, positives = _pair_losses(form, y, some, temperature)
        if y.requires_grad:
            losses.sum().backward()  # type: ignore[no-untyped-call]
        total += losses.detach().sum()
        pairs += int(positives.sum())
    return float(total) / pairs, pairs


def loss_and_gradient(form: Form, temperature: float, rows: Tensor | None = None) -> tuple[float, Tensor]:
    """Return the true loss and its gradient at the batch's embeddings, which are already rounded to its dtype.

    Args:
        form: a batch of any form.
        temperature: positive number.
        rows: integers ``[R]``, the rows of the gradient, counted over all inputs; default all.

    Returns:
        The loss, and its gradient ``[R, D]`` in float64.
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
    """Return the true means over the pairs of some anchors.

    Args:
        form: a batch of one of `forms.BY_PAIRS`.
        temperature: positive number.
        rows: integers ``[R]``, the anchors.

    Returns:
        Float64 ``[R]``.
    """
    y = normalize(_rows(form))
    found = [_pair_losses(form, y, some, temperature) for some in _blocks(rows, len(y))]
    return torch.cat([losses.sum(dim=1) / positives.sum(dim=1) for losses, positives in found])


def errors(loss: float, gradient: Tensor, truth: tuple[float, Tensor]) -> dict[str, float]:
    """Return the relative error of the loss and that of the gradient in the 2-norm; NaN is reported as infinite."""
    true_loss, true_gradient = truth
    difference = (gradient.detach().to(torch.float64) - true_gradient).norm() / true_gradient.norm()
    found = {"loss": abs(loss - true_loss) / abs(true_loss), "gradient": float(difference)}
    return {name: value if value == value else float("inf") for name, value in found.items()}
