"""setfit's copy of the original SupCon code (``setfit/losses.py``), loaded by path: torch is all that it needs.

Its words translated: a model takes the place of features, so the model here returns the embeddings it is given; a mask
is positives. It normalises, and takes one view of every sentence, so that without labels no anchor has a positive: it
has no NT-Xent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch

from ..suite.cases import Case
from .base import Support, clamped_norms, targets_of
from .files import FilePeer
from .supcontrast import SUPPORT, nan_without_positives, row_underflows


class SetFit(FilePeer):
    """``SupConLoss`` of setfit, live."""

    name = "setfit"
    title = "setfit's copy of the original SupCon code, losses.py"
    requirement = "setfit==1.2.0"
    files: ClassVar[Mapping[str, str]] = {
        "setfit/setfit/losses.py": "c0549bd5dba5333768edf90d2f2eb48713cccfa549416352d33a35380b91c5a8"
    }
    attribute = "SupConLoss"
    support = Support(
        losses=("supcon",),
        options={"similarity": ("cosine",), **SUPPORT.options},
        lacks=("ref_embeddings", "anchors"),
    )
    deviations = (row_underflows, nan_without_positives, clamped_norms(1e-12))

    def value(self, case: Case, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """``SupConLoss`` around a model that returns what it is given."""
        base, rows = case.option("base_temperature"), given[case.first]
        loss: Callable[..., torch.Tensor] = self.loss(
            lambda features: {"sentence_embedding": features},
            temperature=case.temperature,
            base_temperature=case.temperature if base is None else base,
        )
        return loss([rows], **targets_of(case, [(i,) for i in range(case.n)], rows))
