"""setfit's copy of the original SupCon code (``setfit/losses.py``), loaded by path because it needs only torch.

The loss calls a model and normalises its output; the adapter's model returns the embeddings. Each sentence has only one
view, so the loss cannot compute NT-Xent. Terms: ``mask`` is ``positives``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch

from ..suite.cases import Case
from .base import Support, clamped_norms, targets_of
from .files import FilePeer
from .supcontrast import SUPPORT, nan_without_positives, row_underflows, temperatures


class SetFit(FilePeer):
    """``SupConLoss`` of setfit."""

    name = "setfit"
    title = "setfit's copy of the original SupCon code, losses.py"
    requirement = "setfit==1.2.0"
    files: ClassVar[Mapping[str, str]] = {
        "setfit/setfit/losses.py": "c0549bd5dba5333768edf90d2f2eb48713cccfa549416352d33a35380b91c5a8"
    }
    attribute = "SupConLoss"
    support = Support(
        losses=("supcon",), options={"similarity": ("cosine",), **SUPPORT.options}, lacks=("ref_embeddings", "anchors")
    )
    deviations = (row_underflows, nan_without_positives, clamped_norms(1e-12))

    def value(self, case: Case, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Evaluate ``SupConLoss`` with a model that returns its input."""
        rows = given[case.first]
        loss: Callable[..., torch.Tensor] = self.loss(lambda rows: {"sentence_embedding": rows}, **temperatures(case))
        return loss([rows], **targets_of(case, [(i,) for i in range(case.n)], rows))
