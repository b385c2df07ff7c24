"""setfit's copy of the original SupCon code (``setfit/losses.py``), loaded by path: torch is all that it needs.

Its words translated: a model is given instead of features, so the embeddings come from one that hands out what it is
given; a mask is positives. It normalises, and makes the one view of every sentence the only one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ..suite.cases import Case
from ..suite.records import Outcome
from .base import Deviation, Implementation, clamped_norms, lonely, outcome_of, takes_a_batch_alone
from .files import load_file, peer_file
from .supcontrast import NAN_FOR_THE_LONELY, ROW_DROWNS

VERSION = "1.2.0"
FILE = "setfit/setfit/losses.py"
SHA256 = "c0549bd5dba5333768edf90d2f2eb48713cccfa549416352d33a35380b91c5a8"


class SetFit(Implementation):
    """``SupConLoss`` of setfit, live."""

    name: ClassVar[str] = "setfit"
    title: ClassVar[str] = "setfit's copy of the original SupCon code, losses.py"
    deviations: ClassVar[tuple[Deviation, ...]] = (ROW_DROWNS, NAN_FOR_THE_LONELY, clamped_norms(1e-12))

    def __init__(self, options: Mapping[str, str], device: str) -> None:
        """Find the file, verify it, load it.

        Raises:
            Unavailable: it is not there, not that file, or lacks what it imports.
        """
        super().__init__(options, device)
        self.loss: Any = load_file(peer_file(options, FILE, SHA256, f"setfit=={VERSION}")).SupConLoss

    def version(self) -> str:
        """The package and the checksum of the file."""
        return f"setfit {VERSION}, SHA-256 {SHA256[:12]}"

    def refuses(self, case: Case) -> str | None:
        """What the class cannot be asked."""
        if case.loss == "nt_xent":
            return "has no nt_xent: it knows one view, so that without labels nobody has a positive"
        if case.loss != "supcon":
            return f"has no {case.loss}"
        alone = takes_a_batch_alone(case)
        if alone is not None:
            return alone
        if case.option("similarity") != "cosine":
            return "always normalises"
        if case.option("reduction") != "mean":
            return f"has no reduction {case.option('reduction')}"
        if case.option("denominator") != "all":
            return f"has no denominator {case.option('denominator')}"
        if case.option("anchors") is not None:
            return "has no subset of anchors"
        if lonely(case) and case.option("no_positive") == "drop":
            return "does not drop anchors without positive"
        return None

    def evaluate(self, case: Case, dtype: str) -> Outcome:
        """Value and gradient of ``SupConLoss``."""
        temperature, base = float(case.option("temperature")), case.option("base_temperature")
        loss = self.loss(
            lambda rows: {"sentence_embedding": rows},
            temperature=temperature,
            base_temperature=temperature if base is None else base,
        )
        embeddings = self.tensor(case, dtype)
        if "labels" in case.arguments:
            labels = torch.tensor(case.arguments["labels"], dtype=torch.int64, device=self.device)
            return outcome_of(loss([embeddings], labels=labels), embeddings)
        mask = torch.tensor(case.arguments["positives"], dtype=embeddings.dtype, device=self.device)
        return outcome_of(loss([embeddings], mask=mask), embeddings)
