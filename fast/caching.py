"""Gradient caching: the gradient of a large batch, with the activations of only one chunk of rows in memory at a time.

A contrastive loss needs the embeddings of the whole batch, so the batch cannot be split into independent ones. But the
gradient of the encoder's parameters is a sum over rows: the Jacobian of a row's embedding times the gradient of the
loss with respect to this embedding. So the encoder runs twice on every chunk of rows: first without a graph, for the
embeddings; then with a graph, to multiply the gradient of the loss by the Jacobian.

Source: Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (GradCache), arXiv
2101.06983, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.checkpoint import get_device_states, set_device_states

Encoder = Callable[[Any], Tensor]
LIMIT = 0.05
"""Largest allowed relative difference of embeddings between both passes. Compilers and autocast cause small ones."""


def cached_backward(
    loss: Callable[..., Tensor],
    *towers: tuple[Encoder, Any],
    chunk_size: int,
    backward: Callable[[Tensor], object] = Tensor.backward,
    validate: bool = False,
) -> Tensor:
    """Add the gradient of the loss of a whole batch to the ``grad`` of the parameters, one chunk of rows at a time.

    The gradients are those of ``loss(encoder(inputs)).backward()``. Torch's random numbers, for example in dropout, are
    the same in both passes. ``DistributedDataParallel`` exchanges the gradients of an encoder only once.

    Example:
        >>> import torch
        >>> from pairproof.fast import cached_backward, stacked_partners, nt_xent_loss
        >>> encoder, images = torch.nn.Linear(3, 2), torch.randn(8, 3)
        >>> loss = cached_backward(lambda z: nt_xent_loss(z, stacked_partners(8)), (encoder, images), chunk_size=2)
        >>> whole = nt_xent_loss(encoder(images), stacked_partners(8))
        >>> torch.testing.assert_close(loss, whole.detach())
        >>> torch.testing.assert_close(encoder.weight.grad, torch.autograd.grad(whole, encoder.weight)[0])

    Args:
        loss: a function of the embeddings of each tower, ``[N, ...]``, that returns a scalar. Parameters of the loss,
            such as a temperature, get gradients too.
        towers: a pair (encoder, inputs) for each tower. Inputs are a tensor ``[N, ...]``, or a tuple, list or
            dictionary of such tensors. The encoder is called with chunks of the same structure, and returns one
            embedding per row. An embedding must not depend on other rows.
        chunk_size: number of rows per call of the encoder, at least 1. Affects the result only through rounding and
            random numbers.
        backward: called with the loss, for example ``lambda loss: scaler.scale(loss).backward()`` for a gradient
            scaler.
        validate: also compare the embeddings of both passes on accelerators, which synchronises with the device.

    Returns:
        The loss, a scalar without a graph.

    Raises:
        TypeError: an argument has the wrong type, or an encoder does not return a tensor.
        ValueError: there is no tower or no row; inputs have different numbers of rows; chunk_size is less than 1; an
            encoder returns the wrong number of rows; an encoder has batch normalisation in training mode; or the loss
            is not a scalar.
        RuntimeError: an encoder returns other embeddings in the second pass, for example because it draws random
            numbers with numpy.

    Source:
        Gao et al. 2021, arXiv 2101.06983, section 3.2.
    """
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
        raise TypeError(f"chunk_size: expected an integer, got {type(chunk_size).__name__}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size: expected at least 1, got {chunk_size}")
    if not towers:
        raise ValueError("towers: expected at least one pair of an encoder and its inputs")
    for number, tower in enumerate(towers):
        _check_tower(number, tower)
    parts = [_parts(number, inputs, chunk_size) for number, (_, inputs) in enumerate(towers)]
    encoders = [encoder for encoder, _ in towers]

    states, leaves = [], []
    with torch.no_grad():
        for number, encoder in enumerate(encoders):
            rows = []
            for part in parts[number]:
                states.append(_random_state(part))
                rows.append(_encoded(number, encoder, part))
            leaves.append(torch.cat(rows))
    # Before torch's pull request 165068, autocast reuses casts of the first pass, which have no graph.
    torch.clear_autocast_cache()
    for leaf in leaves:
        leaf.requires_grad_()
    value: Any = loss(*leaves)
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"loss: expected a scalar, got {got}")
    backward(value)

    after = _random_state([part for each in parts for part in each])
    order = iter(states)
    used = [None if leaf.grad is None else encoder for encoder, leaf in zip(encoders, leaves, strict=True)]
    for number, (encoder, leaf) in enumerate(zip(encoders, leaves, strict=True)):
        chunks = torch.split(leaf, [_rows(part) for part in parts[number]])
        gradients = (
            [None] * len(chunks) if leaf.grad is None else torch.split(leaf.grad, [len(chunk) for chunk in chunks])
        )
        for k, (part, chunk, gradient) in enumerate(zip(parts[number], chunks, gradients, strict=True)):
            _set_random_state(next(order))
            # With DistributedDataParallel, only the last backward pass through an encoder exchanges gradients.
            last = k == len(chunks) - 1 and encoder not in used[number + 1 :]
            if gradient is None:
                continue
            with _without_exchange(encoder, last):
                again = _encoded(number, encoder, part)
                if again.device.type == "cpu" or validate:
                    _check_same(number, chunk.detach(), again.detach())
                if again.requires_grad:
                    torch.autograd.backward(again, gradient)
    _set_random_state(after)
    result: Tensor = value.detach()
    return result


def _check_tower(number: int, tower: Any) -> None:
    """Check that a tower is a pair (encoder, inputs), without batch normalisation in training mode."""
    if not (isinstance(tower, tuple) and len(tower) == 2 and callable(tower[0])):
        raise TypeError(f"towers[{number}]: expected a pair (encoder, inputs), got {type(tower).__name__}")
    encoder, _ = tower
    for name, module in encoder.named_modules() if isinstance(encoder, nn.Module) else ():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise ValueError(
                f"towers[{number}]: {type(module).__name__} {name!r} is in training mode, so an embedding depends on "
                "the other rows of its chunk; call its eval(), or, to accept the statistics of each chunk, pass "
                "lambda inputs: encoder(inputs)"
            )


def _rows(part: Any) -> int:
    return len(tree_flatten(part)[0][0])


def _parts(number: int, inputs: Any, chunk_size: int) -> list[Any]:
    """Check the inputs of a tower, and return them in chunks of rows."""
    leaves, _ = tree_flatten(inputs)
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0:
            got = "a scalar" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(f"towers[{number}]: expected inputs that are tensors with rows, got {got}")
    sizes = sorted({len(leaf) for leaf in leaves})
    if len(sizes) != 1 or sizes[0] == 0:
        raise ValueError(f"towers[{number}]: expected inputs with the same number of rows, at least 1, got {sizes}")
    return [
        tree_map(lambda leaf: leaf[start : start + chunk_size], inputs)  # noqa: B023
        for start in range(0, sizes[0], chunk_size)
    ]


def _encoded(number: int, encoder: Encoder, part: Any) -> Tensor:
    """Return the embeddings of a chunk, after checking their type and number."""
    rows = encoder(part)
    if not isinstance(rows, Tensor):
        raise TypeError(f"towers[{number}]: expected an encoder that returns a tensor, got {type(rows).__name__}")
    if rows.dim() == 0 or len(rows) != _rows(part):
        raise ValueError(
            f"towers[{number}]: expected an encoder that returns one embedding for each of {_rows(part)} rows, got "
            f"shape {list(rows.shape)}"
        )
    return rows


def _check_same(number: int, first: Tensor, second: Tensor) -> None:
    """Check that the relative difference of the embeddings of both passes is at most `LIMIT`."""
    difference = torch.linalg.vector_norm((second - first).float())
    if difference > LIMIT * torch.linalg.vector_norm(first.float()):
        raise RuntimeError(
            f"towers[{number}]: the encoder returns other embeddings in the second pass, so the gradient would be "
            "wrong; does it draw random numbers that are not torch's, or change its state?"
        )


def _random_state(part: Any) -> tuple[Tensor, list[int], list[Tensor], str]:
    """Return the CPU's random state, and the indices, random states and type of the accelerators of the inputs."""
    kind = next((leaf.device.type for leaf in tree_flatten(part)[0] if leaf.device.type != "cpu"), "cpu")
    devices, states = get_device_states(part) if kind != "cpu" else ([], [])
    return torch.get_rng_state(), devices, states, kind


def _set_random_state(state: tuple[Tensor, list[int], list[Tensor], str]) -> None:
    torch.set_rng_state(state[0])
    if state[1]:
        set_device_states(state[1], state[2], device_type=state[3])


def _without_exchange(encoder: Encoder, last: bool) -> AbstractContextManager[None]:
    """Return a context in which DistributedDataParallel exchanges the gradients of an encoder only if ``last``."""
    no_sync: Callable[[], AbstractContextManager[None]] | None = getattr(encoder, "no_sync", None)
    return nullcontext() if last or no_sync is None else no_sync()
