"""lightly's ``NTXentLoss`` (``lightly/loss/ntx_ent_loss.py``), loaded without the rest of the package.

Its words translated: out0 and out1 are the first and the second views, or the two towers; with a memory bank they are
the anchors and their positives, and the bank holds the negatives. Both directions are two calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ..suite.cases import Case
from ..suite.records import Outcome
from .base import (
    Deviation,
    Implementation,
    clamped_norms,
    directed,
    gradient_is_missing,
    normalised,
    outcome_of,
    stacked_views,
    takes_a_batch_alone,
)
from .files import load_from_package, peer_file

VERSION = "1.6.0"
FOLDER = "lightly"
FILES = {
    "lightly/loss/ntx_ent_loss.py": "bae4e552c19f05747fdd7908eaa76c7aa14f611efcaaa28987ba6239d618c108",
    "lightly/models/modules/memory_bank.py": "03e6d7cce4db1bed7eb23c9c0f49bca36c950b77d9b5d58a3de5eb484d5f7819",
    "lightly/utils/dist.py": "5ed09f6ef893fbd7e3d6ee71d091ff903929a348781b5e84df65ddb8c795b708",
}
PACKAGES = ("lightly", "lightly.loss", "lightly.models", "lightly.models.modules", "lightly.utils")
UNUSED = ("lightly.models.utils",)
"""What the memory bank asks for a gather among processes only; it needs torchvision."""


class Lightly(Implementation):
    """``NTXentLoss`` of lightly, live, in one process."""

    name: ClassVar[str] = "lightly"
    title: ClassVar[str] = "lightly's NTXentLoss, ntx_ent_loss.py and its memory_bank.py"
    deviations: ClassVar[tuple[Deviation, ...]] = (
        clamped_norms(1e-12),
        Deviation(
            name="the bank is detached",
            applies=lambda case, dtype, true: gradient_is_missing(case, dtype, true, "negatives"),
            reason="the memory bank is a buffer, so that the negatives get no gradient; value and the towers'"
            " gradients are right",
            link="https://github.com/lightly-ai/lightly/blob/v1.6.0/lightly/models/modules/memory_bank.py",
        ),
    )

    def __init__(self, options: Mapping[str, str], device: str) -> None:
        """Find the files, verify them, load them.

        Raises:
            Unavailable: they are not there, not those files, or lack what they import.
        """
        super().__init__(options, device)
        found = [
            peer_file(options, f"{FOLDER}/{name}", checksum, f"lightly=={VERSION}") for name, checksum in FILES.items()
        ]
        module = load_from_package(found[0].parents[2], "lightly.loss.ntx_ent_loss", PACKAGES, UNUSED)
        self.loss: Any = module.NTXentLoss

    def version(self) -> str:
        """The package and the checksum of the loss's file."""
        return f"lightly {VERSION}, SHA-256 {FILES['lightly/loss/ntx_ent_loss.py'][:12]}"

    def refuses(self, case: Case) -> str | None:
        """What the class cannot be asked."""
        if case.loss not in ("nt_xent", "info_nce"):
            return f"has no {case.loss}"
        alone = takes_a_batch_alone(case)
        if alone is not None:
            return alone
        if case.loss == "info_nce" and "negatives" not in case.others:
            return "contrasts two towers with a memory bank only: without one, the rows of both are negatives"
        if case.option("similarity") != "cosine":
            return "always normalises"
        if case.option("reduction") != "mean":
            return f"has no reduction {case.option('reduction')}"
        if case.option("anchors") is not None:
            return "has no subset of anchors"
        return "has no base temperature" if case.option("base_temperature") is not None else None

    def evaluate(self, case: Case, dtype: str) -> Outcome:
        """Value and gradients of ``NTXentLoss``; the bank is filled with the case's negatives."""
        given = self.tensors(case, dtype)
        temperature = float(case.option("temperature"))
        if case.loss == "nt_xent":
            embeddings = given[case.first]
            return outcome_of(self.loss(temperature=temperature)(*stacked_views(case, embeddings)), embeddings)

        def loss(one: torch.Tensor, other: torch.Tensor, negatives: torch.Tensor | None) -> torch.Tensor:
            assert negatives is not None  # refused otherwise
            module = self.loss(temperature=temperature, memory_bank_size=tuple(negatives.shape))
            module.memory_bank.bank = normalised(negatives, case).detach()
            found: torch.Tensor = module(one, other)
            return found

        value = directed(case, given, loss)
        return outcome_of(value, given.pop(case.first), others=given)
