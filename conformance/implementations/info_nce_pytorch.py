"""info-nce-pytorch, live: ``info_nce`` for two towers, one direction at a time.

Its words translated: queries are anchors, positive keys the other tower, negative keys in the mode "unpaired" the
negatives that all anchors share. Both directions are two calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from ..suite.cases import Case
from .base import Deviation, Support, by_views, clamped_norms
from .files import PackagePeer


class InfoNCEPytorch(PackagePeer):
    """The function ``info_nce`` of the package."""

    name: ClassVar[str] = "info-nce-pytorch"
    title: ClassVar[str] = "info-nce-pytorch, live"
    distribution: ClassVar[str] = "info-nce-pytorch"
    modules: ClassVar[tuple[str, ...]] = ("info_nce",)
    support = Support(losses=("info_nce",), options={"similarity": ("cosine",)}, lacks=("base_temperature",))
    deviations: ClassVar[tuple[Deviation, ...]] = (clamped_norms(1e-12),)

    def value(self, case: Case, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """``info_nce`` of one direction or both."""

        def loss(one: torch.Tensor, other: torch.Tensor, negatives: torch.Tensor | None) -> torch.Tensor:
            found: torch.Tensor = self.package.info_nce(
                one, other, negatives, case.temperature, reduction=case.option("reduction"), negative_mode="unpaired"
            )
            return found

        return by_views(case, given, loss)
