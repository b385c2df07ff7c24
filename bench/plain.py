"""The losses in plain torch, as they are written without a library, and how long `pairproof.fast` takes beside them.

    python -m bench.plain --size 64,256,1024

Prints, for each way of giving the positives and each N, the time of plain torch divided by that of `pairproof.fast`,
for forward and backward together and for the forward pass without autograd. Embeddings have 128 columns in float32, and
the temperature is 0.1. Both run in this process on one thread, in turn; the median of the ratios of process times is
printed. Masks are built inside the clock, as in training.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
import typer
from rich.table import Table
from torch import Tensor

from pairproof import fast

from .jobs import COLUMNS, TEMPERATURE
from .report import open_console

CLASSES = 10
QUEUE = 4096
"""Number of rows of the queue."""
SAMPLE = 0.01
"""Seconds that one sample takes at least."""

Loss = Callable[..., Tensor]
"""From one or two matrices ``[N, D]`` to the loss, a scalar."""


class Form(NamedTuple):
    """One way of giving the positives of one loss.

    Attributes:
        inputs: matrices ``[N, D]`` that get a gradient.
        plain: the loss in plain torch.
        ours: the loss of `pairproof.fast`.
    """

    inputs: tuple[Tensor, ...]
    plain: Loss
    ours: Loss


def _logits(a: Tensor, b: Tensor) -> Tensor:
    return F.normalize(a, dim=1) @ F.normalize(b, dim=1).T / TEMPERATURE


def _own_logits(z: Tensor) -> Tensor:
    y = F.normalize(z, dim=1)
    return y @ y.T / TEMPERATURE


def _diagonal(z: Tensor) -> Tensor:
    return torch.eye(len(z), dtype=torch.bool, device=z.device)


def supcon(mask: Tensor, z: Tensor) -> Tensor:
    """SupCon with a bool mask ``[N, N]`` of positives, in which self pairs may be marked."""
    logits, diagonal = _own_logits(z), _diagonal(z)
    positives = mask & ~diagonal
    log_ratios = logits - logits.masked_fill(diagonal, float("-inf")).logsumexp(dim=1, keepdim=True)
    return -((log_ratios * positives).sum(dim=1) / positives.sum(dim=1).clamp(min=1)).mean()


def supcon_labels(labels: Tensor, z: Tensor) -> Tensor:
    """SupCon with labels ``[N]``."""
    return supcon(labels[:, None] == labels, z)


def nt_xent(partners: Tensor, z: Tensor) -> Tensor:
    """NT-Xent as cross-entropy; the partners ``[N]`` are the classes."""
    return F.cross_entropy(_own_logits(z).fill_diagonal_(float("-inf")), partners)


def nt_xent_pairwise(labels: Tensor, z: Tensor) -> Tensor:
    """Pairwise NT-Xent with labels ``[N]``; the mean over the anchors of the mean over the positives."""
    logits, same = _own_logits(z), labels[:, None] == labels
    positives = same & ~_diagonal(z)
    losses = F.softplus(logits.masked_fill(same, float("-inf")).logsumexp(dim=1, keepdim=True) - logits)
    return ((losses * positives).sum(dim=1) / positives.sum(dim=1).clamp(min=1)).mean()


def nt_bxent(pairs: Tensor, z: Tensor) -> Tensor:
    """NT-BXent with positive pairs ``[M, 2]``."""
    logits, diagonal = _own_logits(z), _diagonal(z)
    positives = torch.zeros_like(diagonal)
    positives[pairs[:, 0], pairs[:, 1]] = True
    positives &= ~diagonal
    negatives = ~(positives | diagonal)
    of_positives = (F.softplus(-logits) * positives).sum(dim=1) / (positives.sum(dim=1) + 1)
    return (of_positives + (F.softplus(logits) * negatives).sum(dim=1) / negatives.sum(dim=1).clamp(min=1)).mean()


def info_nce(a: Tensor, b: Tensor) -> Tensor:
    """InfoNCE of two towers, with the rows of the first as anchors."""
    return F.cross_entropy(_logits(a, b), torch.arange(len(a), device=a.device))


def info_nce_both(a: Tensor, b: Tensor) -> Tensor:
    """InfoNCE of two towers in both directions, as in CLIP."""
    logits, rows = _logits(a, b), torch.arange(len(a), device=a.device)
    return (F.cross_entropy(logits, rows) + F.cross_entropy(logits.T, rows)) / 2


def info_nce_queue(queue: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """InfoNCE with a queue of negatives ``[K, D]``, as in MoCo."""
    a, b = F.normalize(a, dim=1), F.normalize(b, dim=1)
    logits = torch.cat([(a * b).sum(dim=1, keepdim=True), a @ F.normalize(queue, dim=1).T], dim=1) / TEMPERATURE
    return F.cross_entropy(logits, torch.zeros(len(a), dtype=torch.int64, device=a.device))


def forms(n: int, dtype: torch.dtype = torch.float32) -> dict[str, Form]:
    """Make a batch of every form.

    Args:
        n: number of rows, a multiple of 8.
        dtype: dtype of the rows.

    Returns:
        The forms by name.
    """
    generator = torch.Generator().manual_seed(0)
    z, other, queue = (torch.randn(rows, COLUMNS, generator=generator).to(dtype) for rows in (n, n, QUEUE))
    partners = fast.stacked_partners(n)
    pairs = torch.stack((torch.arange(n), partners), 1)
    labels = {"two views": torch.arange(n // 2).repeat(2), f"{CLASSES} classes": torch.arange(n) % CLASSES}
    labels["8 per class"] = torch.arange(n) // 8
    ten = labels[f"{CLASSES} classes"]
    drawn = torch.rand(n, n, generator=generator) < 1 / CLASSES
    masks = {"of classes": ten[:, None] == ten, "symmetric": drawn | drawn.T, "asymmetric": drawn}
    here = partial(partial, temperature=TEMPERATURE)
    found = {}
    for name, given in labels.items():
        found[f"supcon, {name}"] = Form((z,), partial(supcon_labels, given), here(fast.supcon_loss, labels=given))
    for name, mask in masks.items():
        found[f"supcon, mask {name}"] = Form((z,), partial(supcon, mask), here(fast.supcon_loss, positives=mask))
    found["nt_xent"] = Form((z,), partial(nt_xent, partners), here(fast.nt_xent_loss, partners=partners))
    for name, given in labels.items():
        ours = here(fast.nt_xent_pairwise_loss, labels=given)
        found[f"nt_xent_pairwise, {name}"] = Form((z,), partial(nt_xent_pairwise, given), ours)
    found["nt_bxent"] = Form((z,), partial(nt_bxent, pairs), here(fast.nt_bxent_loss, positive_pairs=pairs))
    found["info_nce, both ways"] = Form((z, other), info_nce_both, here(fast.info_nce_loss))
    found["info_nce, one way"] = Form((z, other), info_nce, here(fast.info_nce_loss, direction="a_to_b"))
    ours = here(fast.info_nce_loss, direction="a_to_b", negatives=queue)
    found[f"info_nce, queue of {QUEUE}"] = Form((z, other), partial(info_nce_queue, queue), ours)
    return found


def forward(loss: Loss, inputs: tuple[Tensor, ...]) -> Tensor:
    """Evaluate a loss without autograd."""
    with torch.no_grad():
        return loss(*inputs)


def step(loss: Loss, inputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Evaluate a loss and return the gradients of its inputs."""
    leaves = [rows.detach().requires_grad_() for rows in inputs]
    loss(*leaves).backward()  # type: ignore[no-untyped-call]
    return tuple(leaf.grad for leaf in leaves)


def ratio(form: Form, part: Callable[[Loss, tuple[Tensor, ...]], object], rounds: int) -> tuple[float, float, float]:
    """Measure plain torch and `pairproof.fast` in turn.

    Args:
        form: what is measured.
        part: `forward` or `step`.
        rounds: number of samples of each.

    Returns:
        Seconds of plain torch and of `pairproof.fast`, and the ratio of the first to the second; medians.
    """

    def seconds(loss: Loss, times: int) -> float:
        start = time.process_time()
        for _ in range(times):
            part(loss, form.inputs)
        return (time.process_time() - start) / times

    seconds(form.ours, 2), seconds(form.plain, 1)  # warm up
    times = max(1, round(SAMPLE / max(seconds(form.plain, 1), 1e-6)))
    samples = []
    for turn in range(rounds):
        order = (form.plain, form.ours) if turn % 2 else (form.ours, form.plain)
        taken = {loss: seconds(loss, times) for loss in order}
        samples.append((taken[form.plain], taken[form.ours], taken[form.plain] / taken[form.ours]))
    plain, ours, ratios = (statistics.median(column) for column in zip(*samples, strict=True))
    return plain, ours, ratios


def main(
    size: Annotated[str, typer.Option("--size", "-n", help="Numbers of rows, multiples of 8.")] = "64,256,1024",
    form: Annotated[str, typer.Option("--form", "-f", help="Only forms whose name contains this.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each implementation.")] = 15,
) -> None:
    """Print the time of plain torch divided by that of pairproof.fast; below 1, pairproof.fast is slower."""
    torch.set_num_threads(1)
    sizes = [int(word) for word in size.split(",")]
    output = open_console()
    table = Table("form", *(f"{part} {n}" for n in sizes for part in ("f+b", "forward")))
    rows: dict[str, list[str]] = {}
    for n in sizes:
        for name, one in forms(n).items():
            if form in name:
                for part in (step, forward):
                    plain, ours, found = ratio(one, part, rounds)
                    rows.setdefault(name, []).append(f"{found:.2f} ({1e3 * plain:.2f}/{1e3 * ours:.2f} ms)")
    for name, cells in sorted(rows.items(), key=lambda row: min(float(cell.split()[0]) for cell in row[1][::2])):
        table.add_row(name, *cells)
    output.print(table)


if __name__ == "__main__":
    typer.run(main)
