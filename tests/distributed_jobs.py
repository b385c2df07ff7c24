"""What the processes of `test_distributed` run. It imports little, so that they start quickly."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pairproof import fast
from pairproof.fast import distributed
from pairproof.fast.engine import tiles_of

warnings.filterwarnings("ignore", "torch.distributed.* is deprecated", FutureWarning)


def evaluate(calls: Sequence[tuple[str, dict[str, Any], Sequence[str]]], dtype: str = "") -> list[Any]:
    """Evaluate losses, each in one call by all ranks.

    Args:
        calls: the name of the function, its arguments as tensors, and the names of those that get a gradient. With the
            argument ``create_graph``, the gradient is differentiable.
        dtype: the dtype that these are converted to; "": they are not.

    Returns:
        The values and the gradients of their sum for each call, or the error as text.
    """
    found: list[Any] = []
    for name, given, leaves in calls:
        leaf_of = {leaf: given[leaf].to(getattr(torch, dtype, given[leaf].dtype), copy=True) for leaf in leaves}
        given = {"group": "world", **given, **{leaf: tensor.requires_grad_() for leaf, tensor in leaf_of.items()}}
        again = given.pop("create_graph", False)
        try:
            with tiles_of(4):  # several panels, under "tiled"
                loss = getattr(fast, name)(**given)
            wanted = [given[leaf] for leaf in leaves]
            gradients = torch.autograd.grad(loss.sum(), wanted, create_graph=again, materialize_grads=True)
            found.append(
                (loss.detach().double().numpy(), [gradient.detach().double().numpy() for gradient in gradients])
            )
        except (TypeError, ValueError, NotImplementedError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


class Learner(torch.nn.Module):
    """An encoder and a loss with a learned temperature."""

    def __init__(self, loss: str, options: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.encoder = torch.nn.Linear(5, 4).double()
        numbers = {name: value for name, value in options.items() if name in ("temperature", "bias")}
        learned = {
            name: torch.nn.Parameter(torch.tensor(value, dtype=torch.float64)) for name, value in numbers.items()
        }
        self.loss = getattr(fast, loss)(**options | learned)

    def forward(self, rows: Sequence[torch.Tensor], given: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of the encoded rows of each tower."""
        loss: torch.Tensor = self.loss(*(self.encoder(part) for part in rows), **given)
        return loss


Step = tuple[str, dict[str, Any], Sequence[torch.Tensor], dict[str, torch.Tensor]]
"""The module of a loss, its options, the rows of each tower, and the other arguments."""


def train(steps: Sequence[Step], ddp: bool) -> list[Any]:
    """Return the value of each loss, and the mean of its parameters' gradients over the ranks, which DDP computes."""
    found = []
    for loss, options, rows, given in steps:
        model = Learner(loss, {"group": "world"} | options)
        # DDP averages only as long as the module exists.
        called = torch.nn.parallel.DistributedDataParallel(model) if ddp else model
        value = called(rows, given)
        value.backward()
        gradients = {}
        for name, parameter in model.named_parameters():
            if not ddp:
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= torch.distributed.get_world_size()
            gradients[name] = parameter.grad.numpy()
        found.append((value.item(), gradients))
    return found


def end_early(rank: int, folder: Path | None, in_a_ring: bool) -> str:
    """Evaluate a loss twice; rank 1 ends before the second time, or after the second forward pass in a ring.

    With a folder, rank 1 ends only after each of the other two has left a file there, which is after its error.

    Returns:
        On the other ranks, the error of the second time, or "".
    """
    rows = torch.randn(3, 2, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    labels = torch.tensor([0, 0, 1])
    group = fast.Ring("world") if in_a_ring else "world"
    loss = fast.supcon_loss(rows, labels, group=group)
    loss.backward()
    if in_a_ring:
        loss = fast.supcon_loss(rows, labels, group=group)
    if rank == 1:
        while folder is not None and len([*folder.glob("error-*")]) < 2:
            time.sleep(0.1)
        os._exit(0)
    distributed.NAMING_TIMEOUT = 1.0
    try:
        loss.backward() if in_a_ring else fast.supcon_loss(rows, labels, group=group)
    except RuntimeError as error:
        if folder is not None:
            (folder / f"error-{rank}").touch()
        return str(error)
    return ""


def record(calls: Sequence[tuple[str, dict[str, Any], Sequence[str]]]) -> list[Any]:
    """Return the kind and the bytes of the collective operations of each call, in its forward and its backward pass."""
    found, sent, collective, to_the_next = [], [], distributed._collective, distributed._to_the_next

    def recorded(kind: str, result: torch.Tensor, given: torch.Tensor, group: Any) -> None:
        sent.append((kind, given.numel() * given.element_size()))
        collective(kind, result, given, group)

    def passed(tensors: Sequence[torch.Tensor], found: Sequence[torch.Tensor], group: Any) -> Any:
        sent.extend(("ring", tensor.numel() * tensor.element_size()) for tensor in tensors)
        return to_the_next(tensors, found, group)

    distributed._collective, distributed._to_the_next = recorded, passed
    for name, given, leaves in calls:
        given = {"group": "world", **given, **{leaf: given[leaf].clone().requires_grad_() for leaf in leaves}}
        sent.clear()
        loss = getattr(fast, name)(**given)
        forward = list(sent)
        sent.clear()
        loss.backward()
        found.append((forward, list(sent)))
    distributed._collective, distributed._to_the_next = collective, to_the_next
    return found


def memory(calls: Sequence[tuple[str, dict[str, Any], Sequence[str]]]) -> list[int]:
    """Return the peak memory of the tensors that each call allocates in its forward and backward pass, in bytes."""
    found = []
    for name, given, leaves in calls:
        given = {**given, **{leaf: given[leaf].clone().requires_grad_() for leaf in leaves}}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            torch.autograd.grad(getattr(fast, name)(**given), [given[leaf] for leaf in leaves])
        size = most = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                size += event.nbytes()
                most = max(most, size)
        found.append(most)
    return found


def work_with_torch(rows: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the mean gradient of an encoder on its own, under `torch.compile`, under FSDP, and with accumulation."""
    from torch.distributed.fsdp import fully_shard

    found = {}
    world = torch.distributed.get_world_size()

    def encoder() -> torch.nn.Linear:
        torch.manual_seed(5)
        return torch.nn.Linear(5, 4).double()

    def loss_of(encoded: torch.Tensor) -> torch.Tensor:
        return fast.supcon_loss(encoded * 1.0, labels, temperature=0.3, group="world") * 2.0

    def averaged(model: torch.nn.Linear) -> torch.Tensor:
        gradient = model.weight.grad
        torch.distributed.all_reduce(gradient)
        return gradient / world

    model = encoder()
    loss_of(model(rows)).backward()
    found["eager"] = averaged(model)
    model = encoder()
    torch.compile(lambda given: loss_of(model(given)), backend="aot_eager")(rows).backward()
    found["compiled"] = averaged(model)
    model = encoder()
    for _ in range(3):
        (loss_of(model(rows)) / 3).backward()
    found["accumulated"] = averaged(model)
    model = encoder()
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (world,))
    fully_shard(model, mesh=mesh)
    loss_of(model(rows)).backward()
    found["sharded"] = model.weight.grad.full_tensor()
    return found
