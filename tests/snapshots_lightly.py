"""A pytest plugin for lightly's tests: stand-ins for the packages that they import and that are not installed.

- ``pytest_mock``: the fixture ``mocker``, whose ``patch.object`` is that of `unittest.mock`.
- ``torchvision``, and parts of lightly that need it: empty, because no loss uses them.
- ``pytorch_lightning``: ``Trainer.fit`` trains in two processes on gloo, this one and a copy of it, with
  DistributedDataParallel and a `DistributedSampler`, as lightning does.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def stand_in(name: str, **attributes: Any) -> None:
    """Add a module with these attributes."""
    module = sys.modules[name] = ModuleType(name)
    module.__path__ = []
    for attribute, value in attributes.items():
        setattr(module, attribute, value)


class Mocker:
    """The part of ``pytest_mock.MockerFixture`` that the tests use."""

    def __init__(self) -> None:
        self.patch, self.started = self, []

    def object(self, *given: Any, **options: Any) -> Any:
        patcher = mock.patch.object(*given, **options)
        self.started.append(patcher)
        return patcher.start()


@pytest.fixture
def mocker() -> Iterator[Mocker]:
    found = Mocker()
    yield found
    for patcher in reversed(found.started):
        patcher.stop()


class Step(nn.Module):
    """A model whose forward pass is its training step."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, *given: Any) -> torch.Tensor:
        return self.model.training_step(*given)


class Trainer:
    """The part of lightning's ``Trainer`` that the tests use."""

    def __init__(self, devices: int, accelerator: str, strategy: Any, max_epochs: int) -> None:
        assert (devices, accelerator) == (2, "cpu")
        self.devices, self.epochs = devices, max_epochs

    def fit(self, model: Any, train_dataloaders: DataLoader) -> None:
        with tempfile.TemporaryDirectory() as folder:
            child = os.fork()
            rank = 1 if child == 0 else 0
            try:
                store = f"file://{folder}/store"
                dist.init_process_group("gloo", init_method=store, rank=rank, world_size=self.devices)
                self.train(model, train_dataloaders, rank)
                dist.barrier()
            except BaseException:
                if child == 0:
                    os._exit(1)
                raise
            if child == 0:
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    def train(self, model: Any, loader: DataLoader, rank: int) -> None:
        sampler = DistributedSampler(loader.dataset, self.devices, rank, shuffle=True, drop_last=True)
        loader = DataLoader(loader.dataset, loader.batch_size, sampler=sampler, drop_last=True)
        wrapped, optimizer = DistributedDataParallel(Step(model)), model.configure_optimizers()
        for epoch in range(self.epochs):
            sampler.set_epoch(epoch)
            for place, batch in enumerate(loader):
                optimizer.zero_grad()
                wrapped(batch, place).backward()
                optimizer.step()


stand_in("pytest_mock", MockerFixture=Mocker)
stand_in("torchvision")
stand_in("torchvision.ops", StochasticDepth=nn.Module)
stand_in("torchvision.datasets", FakeData=None)
stand_in("pytorch_lightning", LightningModule=nn.Module, Trainer=Trainer, seed_everything=lambda seed, workers: None)
stand_in("pytorch_lightning.strategies")
stand_in("pytorch_lightning.strategies.ddp", DDPStrategy=lambda find_unused_parameters: None)
stand_in("lightly.data", LightlyDataset=None)
stand_in("lightly.transforms")
stand_in("lightly.transforms.torchvision_v2_compatibility", torchvision_transforms=None)
stand_in("tests.utils.benchmarking.test_benchmark_module", _DummyModel=None)
# `snapshots_packages` does not execute the package's `__init__.py`, so this class is imported here.
sys.modules["lightly.loss"].NTXentLoss = importlib.import_module("lightly.loss.ntx_ent_loss").NTXentLoss  # type: ignore[attr-defined]
