"""lightly's ``NTXentLoss``, ``DCLLoss`` and ``DCLWLoss`` (``lightly/loss/``), loaded without the rest of the package.

``NTXentLoss`` computes nt_xent. With a memory bank it computes info_nce, one direction per call. ``DCLLoss`` computes
supcon with the denominator "only_negatives", ``DCLWLoss`` computes dclw.

Terms: out0 and out1 are the two views. With a memory bank, they are the anchors and their positives, and the bank holds
the negatives.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch

from ..suite.cases import Case
from ..suite.records import Truth
from .base import Support, by_views, clamped_norms, deviation, gradient_is_missing, normalised, stacked_views
from .files import FilePeer, load_from_package

PACKAGES = ("lightly", "lightly.loss", "lightly.models", "lightly.models.modules", "lightly.utils")
UNUSED = ("lightly.models.utils",)
"""A module that needs torchvision; the memory bank imports it only to gather across processes."""

DECOUPLED = "https://github.com/lightly-ai/lightly/blob/v1.6.0/lightly/loss/dcl_loss.py"
BANK = "https://github.com/lightly-ai/lightly/blob/v1.6.0/lightly/models/modules/memory_bank.py"


@deviation("the bank is detached", BANK)
def bank_is_detached(case: Case, dtype: str, true: Truth) -> bool:
    """The memory bank is a buffer, so the negatives get no gradient. The value and the other gradients are right."""
    return gradient_is_missing(case, dtype, true, "negatives")


def _only_towers(case: Case) -> bool:
    return case.entry.two_towers and "negatives" not in case.others


class _Loss(FilePeer):
    requirement = "lightly==1.6.0"

    def module(self) -> Any:
        """Import the module without the rest of the package."""
        return load_from_package(self.path.parents[2], f"lightly.loss.{self.path.stem}", PACKAGES, UNUSED)


class Lightly(_Loss):
    """``NTXentLoss`` of lightly, without distributed processes."""

    name = "lightly"
    title = "lightly's NTXentLoss and its memory bank"
    files: ClassVar[Mapping[str, str]] = {
        "lightly/lightly/loss/ntx_ent_loss.py": "bae4e552c19f05747fdd7908eaa76c7aa14f611efcaaa28987ba6239d618c108",
        "lightly/lightly/models/modules/memory_bank.py": (
            "03e6d7cce4db1bed7eb23c9c0f49bca36c950b77d9b5d58a3de5eb484d5f7819"
        ),
        "lightly/lightly/utils/dist.py": "5ed09f6ef893fbd7e3d6ee71d091ff903929a348781b5e84df65ddb8c795b708",
    }
    attribute = "NTXentLoss"
    support = Support(
        losses=("nt_xent", "info_nce"),
        options={"similarity": ("cosine",), "reduction": ("mean",)},
        lacks=("ref_embeddings", "anchors", "base_temperature"),
        also=(("without a memory bank, the rows of both towers are negatives", _only_towers),),
    )
    deviations = (clamped_norms(1e-12), bank_is_detached)

    def value(self, case: Case, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Evaluate ``NTXentLoss``, with a memory bank that holds the negatives of the case."""

        def loss(one: torch.Tensor, other: torch.Tensor, negatives: torch.Tensor | None) -> Any:
            size = 0 if negatives is None else tuple(negatives.shape)
            module: Any = self.loss(temperature=case.temperature, memory_bank_size=size)
            if negatives is not None:
                module.memory_bank.bank = normalised(negatives, case).detach()
            return module(one, other)

        return by_views(case, given, loss)


def _two_views(case: Case) -> bool:
    """Whether the rows are pairs of views: each has exactly one positive, and is the positive of that row."""
    positives = case.positives()
    return all(len(p) == 1 and positives[p[0]] == [i] for i, p in enumerate(positives))


@deviation("one item", DECOUPLED, wrong=True)
def one_item(case: Case, dtype: str, true: Truth) -> bool:
    """Without negatives, the logarithm of an empty sum is -inf, and so is the loss."""
    return case.n == 2


class LightlyDecoupled(_Loss):
    """``DCLLoss`` and ``DCLWLoss`` of lightly, without distributed processes."""

    name = "lightly-dcl"
    title = "lightly's DCLLoss and DCLWLoss"
    files: ClassVar[Mapping[str, str]] = {
        "lightly/lightly/loss/dcl_loss.py": "b7b62f81e96f937f2f51ff0a6c3ede3a4eb49c70d96845c092a6b9a82265cebb",
        "lightly/lightly/utils/dist.py": "5ed09f6ef893fbd7e3d6ee71d091ff903929a348781b5e84df65ddb8c795b708",
    }
    attribute = "DCLLoss"
    support = Support(
        losses=("supcon", "dclw"),
        options={
            "similarity": ("cosine",),
            "denominator": ("only_negatives",),
            "reduction": ("mean",),
            "detach_weights": (True,),
        },
        lacks=("ref_embeddings", "anchors", "base_temperature"),
        also=(("has rows that are not two views of items", lambda case: not _two_views(case)),),
    )
    deviations = (clamped_norms(1e-12), one_item)

    @cached_property
    def weighted(self) -> Any:
        """The class ``DCLWLoss``."""
        return self.module().DCLWLoss

    def value(self, case: Case, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Evaluate ``DCLLoss`` or ``DCLWLoss`` on both views."""
        partners = [p for (p,) in case.positives()]
        views = stacked_views(replace(case, arguments={"partners": partners}), given[case.first])
        weighted = case.loss == "dclw"
        module = self.weighted(case.temperature, case.option("sigma")) if weighted else self.loss(case.temperature)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "To copy construct from a tensor", UserWarning)
            found: torch.Tensor = module(*views)
        return found
