"""infonce 0.3, live: ``InfoNCE`` for NT-Xent of two views, ``SupervisedInfoNCE`` for SupCon inside the logarithm.

Its words translated: features are embeddings, a target is labels. ``SupervisedInfoNCE`` sets positives against the
negatives alone, under one logarithm: that is supcon_in with the denominator "only_negatives".
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from ..suite.cases import Case
from ..suite.records import Outcome, Truth
from ..truth.tolerances import bounds
from .base import (
    Deviation,
    Implementation,
    Unavailable,
    clamped_norms,
    outcome_of,
    row_norms,
    stacked_views,
    takes_a_batch_alone,
)

LINK = "https://pypi.org/project/infonce/0.3/"


def leaking(rows: torch.Tensor, positive: torch.Tensor, temperature: float) -> torch.Tensor:
    """What ``SupervisedInfoNCE`` computes, spelled out: both sums have a 1 too many, and neither is averaged.

    A similarity that does not count is multiplied by 0: the anchor's own becomes exp(0), another is pushed down by
    1000.

    Args:
        rows: [N, D].
        positive: [N, N], whether two rows are of one class; the diagonal is set.
        temperature: of the similarities.
    """
    similarity = F.normalize(rows, dim=1) @ F.normalize(rows, dim=1).T / temperature
    own = torch.eye(len(rows), dtype=torch.bool)
    pushed = torch.tensor(-1000.0, dtype=rows.dtype)
    kept = torch.where(own, 0.0, torch.where(positive, similarity, pushed))
    others = torch.where(own, 0.0, torch.where(positive, pushed, similarity))
    return (torch.logsumexp(others, dim=1) - torch.logsumexp(kept, dim=1)).mean()


def _leaks(case: Case, dtype: str, true: Truth) -> bool:
    """Whether what leaks moves the value or the gradient by more than its bound."""
    if case.loss != "supcon_in":
        return False
    rows = torch.tensor(case.embeddings, dtype=torch.float64, requires_grad=True)
    value = leaking(rows, torch.tensor(case.positive_mask()), float(case.option("temperature")))
    (gradient,) = torch.autograd.grad(value, rows)
    allowed = bounds(case, true, dtype)
    if not abs(value.item() - true.values[0]) <= allowed.values[0]:
        return True
    if true.gradient is None:
        return False
    return bool((row_norms(gradient.numpy() - true.gradient) > allowed.rows).any())


class InfoNCEPackage(Implementation):
    """The two losses of the package."""

    name: ClassVar[str] = "infonce"
    title: ClassVar[str] = "infonce, live"
    deviations: ClassVar[tuple[Deviation, ...]] = (
        clamped_norms(1e-12),
        Deviation(
            name="the diagonal leaks",
            applies=_leaks,
            reason="SupervisedInfoNCE multiplies the anchor's own similarity by 0 and leaves it in both sums, where it"
            " counts as exp(0) = 1, and sums the positives where they are averaged",
            link=LINK,
            wrong=True,
        ),
    )

    def __init__(self, options: Mapping[str, str], device: str) -> None:
        """Import the package.

        Raises:
            Unavailable: it is not installed.
        """
        super().__init__(options, device)
        try:
            self.package: Any = importlib.import_module("infonce")
        except ImportError as error:
            raise Unavailable(f'infonce is not installed ({error}): pip install "pairproof[peers]"') from None

    def version(self) -> str:
        """The package's version."""
        return version("infonce")

    def refuses(self, case: Case) -> str | None:
        """What the two classes cannot be asked."""
        if case.loss not in ("nt_xent", "supcon_in"):
            return f"has no {case.loss}"
        alone = takes_a_batch_alone(case)
        if alone is not None:
            return alone
        if case.loss == "supcon_in" and case.option("denominator") != "only_negatives":
            return f"has no denominator {case.option('denominator')}: its negatives stand alone below the line"
        if case.option("similarity") != "cosine":
            return "always normalises"
        if case.option("reduction") != "mean":
            return f"has no reduction {case.option('reduction')}"
        for option, words in (("anchors", "subset of anchors"), ("base_temperature", "base temperature")):
            if case.option(option) is not None:
                return f"has no {words}"
        if "positives" in case.arguments:
            return "is asked with labels only"
        return "has no policies" if {"no_positive", "no_negative"} & set(case.keywords) else None

    def evaluate(self, case: Case, dtype: str) -> Outcome:
        """Value and gradient of either class."""
        embeddings, temperature = self.tensor(case, dtype), float(case.option("temperature"))
        if case.loss == "nt_xent":
            views = torch.cat(stacked_views(case, embeddings))
            return outcome_of(self.package.InfoNCE(temperature)(views), embeddings)
        labels = torch.tensor(case.arguments["labels"], dtype=torch.int64, device=self.device)
        return outcome_of(self.package.SupervisedInfoNCE(temperature, supervised=True)(embeddings, labels), embeddings)
