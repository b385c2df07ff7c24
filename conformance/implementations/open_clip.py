"""open_clip's ``ClipLoss`` and ``SigLipLoss``.

Their file, ``open_clip/loss.py``, needs only torch, so it is loaded without the package.

Terms: image features and text features are the two towers; the logit scale is one over the temperature, and the logit
bias is the bias. Both losses take dot products; under cosine similarity the adapter normalises the rows, as the models
of open_clip do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from ..suite.cases import Case
from .base import Support, normalised
from .files import FilePeer


class OpenClip(FilePeer):
    """``ClipLoss`` and ``SigLipLoss`` of open_clip, without distributed processes."""

    name = "open-clip"
    title = "open_clip's ClipLoss and SigLipLoss, loss.py"
    requirement = "open-clip-torch==3.3.0"
    files: ClassVar[Mapping[str, str]] = {
        "open_clip_torch/open_clip/loss.py": "f34d79c1edc257fc2c459d22d403de27003c9e2e05b4f671c39c1e2b15098f7a"
    }
    attribute = "ClipLoss"
    support = Support(
        losses=("info_nce", "sigmoid"),
        options={"direction": ("both",), "reduction": ("mean",)},
        lacks=("negatives", "base_temperature"),
    )

    def load(self, options: Mapping[str, str]) -> None:
        """Load the file, and both losses from it."""
        super().load(options)
        self.losses = {"info_nce": self.loss, "sigmoid": self.module().SigLipLoss}

    def value(self, case: Case, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Evaluate the loss on both towers."""
        first, second = (normalised(given[name], case) for name in ("embeddings_a", "embeddings_b"))
        bias = (case.bias,) if case.loss == "sigmoid" else ()
        loss: torch.Tensor = self.losses[case.loss]()(first, second, 1 / case.temperature, *bias)
        return loss
