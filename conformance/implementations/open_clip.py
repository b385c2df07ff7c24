"""open_clip's ``ClipLoss`` (``open_clip/loss.py``), loaded by path: torch is all that it needs.

Its words translated: image features and text features are the two towers, the logit scale is one over the temperature.
It takes dot products; under cosine similarity the rows are normalised for it, as its models do. ``SigLipLoss``, in the
same file, is none of the catalogue's losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..suite.cases import Case
from ..suite.records import Outcome
from .base import Implementation, normalised, outcome_of
from .files import load_file, peer_file

VERSION = "3.3.0"
FILE = "open_clip_torch/open_clip/loss.py"
SHA256 = "f34d79c1edc257fc2c459d22d403de27003c9e2e05b4f671c39c1e2b15098f7a"


class OpenClip(Implementation):
    """``ClipLoss`` of open_clip, live, in one process."""

    name: ClassVar[str] = "open-clip"
    title: ClassVar[str] = "open_clip's ClipLoss, loss.py"

    def __init__(self, options: Mapping[str, str], device: str) -> None:
        """Find the file, verify it, load it.

        Raises:
            Unavailable: it is not there, not that file, or lacks what it imports.
        """
        super().__init__(options, device)
        self.loss: Any = load_file(peer_file(options, FILE, SHA256, f"open-clip-torch=={VERSION}")).ClipLoss

    def version(self) -> str:
        """The package and the checksum of the file."""
        return f"open-clip-torch {VERSION}, SHA-256 {SHA256[:12]}"

    def refuses(self, case: Case) -> str | None:
        """What the class cannot be asked."""
        if case.loss != "info_nce":
            return f"has no {case.loss}"
        if "negatives" in case.others:
            return "has no further negatives"
        if case.option("direction") != "both":
            return "always takes both directions"
        if case.option("reduction") != "mean":
            return f"has no reduction {case.option('reduction')}"
        return "has no base temperature" if case.option("base_temperature") is not None else None

    def evaluate(self, case: Case, dtype: str) -> Outcome:
        """Value and gradients of ``ClipLoss``."""
        given = self.tensors(case, dtype)
        first, second = (normalised(given[name], case) for name in ("embeddings_a", "embeddings_b"))
        value = self.loss()(first, second, 1 / float(case.option("temperature")))
        return outcome_of(value, given.pop(case.first), others=given)
