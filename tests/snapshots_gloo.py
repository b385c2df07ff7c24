"""A pytest plugin for pytorch-metric-learning's tests of its distributed wrapper: gloo on the CPU, and another loss.

The tests need CUDA devices, and use `ContrastiveLoss`. Without them they return at once; with this plugin, they run on
2 processes with the loss that ``PAIRPROOF_SNAPSHOT_LOSS`` names. Each process copies what it is given: on a CPU, the
parameters of the model would otherwise be in memory that all processes share, and each step would be made twice.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing

PROCESSES = 2


def worker(rank: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    function(rank, *copy.deepcopy(args))


def spawn(function: Callable[..., None], args: tuple[Any, ...], **given: Any) -> None:
    torch.multiprocessing.spawn(worker, args=(function, args), **given)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[Any]:
    from pytorch_metric_learning import losses

    module, loss = item.module, getattr(losses, os.environ["PAIRPROOF_SNAPSHOT_LOSS"])  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ContrastiveLoss", loss)
        patch.setattr(module, "mp", SimpleNamespace(spawn=spawn))
        if item.name != "test_single_proc":
            # The test returns at once if its device equals torch.device("cpu"); the string does not.
            patch.setattr(module, "TEST_DEVICE", "cpu")
            patch.setattr(torch.cuda, "device_count", lambda: PROCESSES)
        return (yield)
