"""The package info-nce-pytorch: ``info_nce`` for two towers, one direction per call.

Terms: queries are anchors, positive keys are the other tower. Negative keys in the mode "unpaired" are negatives that
all anchors share.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from ..suite.cases import Case
from .base import Support, by_views, clamped_norms
from .files import PackagePeer


class InfoNCEPytorch(PackagePeer):
    """The function ``info_nce`` of the package."""

    name = "info-nce-pytorch"
    title = "info-nce-pytorch"
    distribution = "info-nce-pytorch"
    modules = ("info_nce",)
    support = Support(losses=("info_nce",), options={"similarity": ("cosine",)}, lacks=("base_temperature",))
    deviations = (clamped_norms(1e-12),)

    def value(self, case: Case, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Evaluate ``info_nce`` for one direction or both."""
        loss = partial(self.package.info_nce, reduction=case.option("reduction"), negative_mode="unpaired")
        return by_views(case, given, lambda *rows: loss(*rows, case.temperature))
