"""What the processes of `test_distributed` run. It imports little, so that they start quickly."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from pairproof import fast

warnings.filterwarnings("ignore", "torch.distributed.* is deprecated", FutureWarning)


def evaluate(calls: Sequence[tuple[str, dict[str, Any], Sequence[str]]]) -> list[Any]:
    """Evaluate losses, each in one call by all ranks.

    Args:
        calls: the name of the function, its arguments as tensors, and the names of those that get a gradient.

    Returns:
        The values and the gradients of their sum for each call, or the error as text.
    """
    found: list[Any] = []
    for name, given, leaves in calls:
        given = {**given, **{leaf: given[leaf].clone().requires_grad_() for leaf in leaves}}
        try:
            loss = getattr(fast, name)(**given, group="world")
            gradients = torch.autograd.grad(loss.sum(), [given[leaf] for leaf in leaves], materialize_grads=True)
            found.append((loss.detach().numpy(), [gradient.numpy() for gradient in gradients]))
        except (TypeError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found
