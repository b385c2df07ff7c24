"""info-nce-pytorch, live: ``info_nce`` for two towers, one direction at a time.

Its words translated: queries are anchors, positive keys the other tower, negative keys in the mode "unpaired" the
negatives that all anchors share. Both directions are two calls.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, ClassVar

import torch

from ..suite.cases import Case
from ..suite.records import Outcome
from .base import Deviation, Implementation, Unavailable, clamped_norms, directed, outcome_of


class InfoNCEPytorch(Implementation):
    """The function ``info_nce`` of the package."""

    name: ClassVar[str] = "info-nce-pytorch"
    title: ClassVar[str] = "info-nce-pytorch, live"
    deviations: ClassVar[tuple[Deviation, ...]] = (clamped_norms(1e-12),)

    def __init__(self, options: Mapping[str, str], device: str) -> None:
        """Import the package.

        Raises:
            Unavailable: it is not installed.
        """
        super().__init__(options, device)
        try:
            self.package: Any = importlib.import_module("info_nce")
        except ImportError as error:
            raise Unavailable(f'info-nce-pytorch is not installed ({error}): pip install "pairproof[peers]"') from None

    def version(self) -> str:
        """The package's version."""
        return version("info-nce-pytorch")

    def refuses(self, case: Case) -> str | None:
        """What the function cannot be asked."""
        if case.loss != "info_nce":
            return f"has no {case.loss}"
        if case.option("similarity") != "cosine":
            return "always normalises"
        return "has no base temperature" if case.option("base_temperature") is not None else None

    def evaluate(self, case: Case, dtype: str) -> Outcome:
        """Value and gradients of ``info_nce``."""
        given = self.tensors(case, dtype)

        def loss(one: torch.Tensor, other: torch.Tensor, negatives: torch.Tensor | None) -> torch.Tensor:
            found: torch.Tensor = self.package.info_nce(
                one,
                other,
                negatives,
                temperature=float(case.option("temperature")),
                reduction=case.option("reduction"),
                negative_mode="unpaired",
            )
            return found

        value = directed(case, given, loss)
        return outcome_of(value, given.pop(case.first), others=given)
