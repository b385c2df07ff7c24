"""open_clip's ``ClipLoss`` and ``SigLipLoss`` (``open_clip/loss.py``), loaded without the rest of the package.

Terms: image features and text features are the two towers. The logit scale is 1 / temperature, the logit bias the bias.

Both losses take dot products. Under cosine similarity the adapter normalises the rows, as open_clip's models do.
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
        """Load both losses from the file."""
        super().load(options)
        self.losses = {"info_nce": self.loss, "sigmoid": self.module().SigLipLoss}

    def value(self, case: Case, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Evaluate the loss on both towers."""
        first, second = (normalised(given[name], case) for name in ("embeddings_a", "embeddings_b"))
        bias = (case.bias,) if case.loss == "sigmoid" else ()
        loss: torch.Tensor = self.losses[case.loss]()(first, second, 1 / case.temperature, *bias)
        return loss
