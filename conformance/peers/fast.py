"""Our own torch implementation, in every dtype that holds a case's inputs."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

import pairproof
from pairproof import fast

from ..cases import Case
from ..catalogue import LOSSES
from ..compare import Outcome
from .base import Implementation, outcome_of


def _stacked(n: int) -> list[int]:
    return [*range(n // 2, n), *range(n // 2)]


def _interleaved(n: int) -> list[int]:
    return [i + 1 - 2 * (i % 2) for i in range(n)]


PARTNERS = {"stacked_partners": _stacked, "interleaved_partners": _interleaved}


class Fast(Implementation):
    """The vectorised losses of ``fast/``."""

    name: ClassVar[str] = "fast"
    title: ClassVar[str] = "pairproof.fast, torch"
    held_to_plain: ClassVar[bool] = True
    dtypes: ClassVar[tuple[str, ...]] = ("float64", "float32", "bfloat16", "float16")

    def version(self) -> str:
        """The package's version and torch's."""
        return f"{pairproof.__version__}, torch {torch.__version__}"

    def refuses(self, case: Case) -> str | None:
        """Nothing is refused."""
        return None

    def evaluate(self, case: Case, dtype: str) -> Outcome:
        """Value and gradient, and the values of all anchors from a second call."""
        embeddings = self.tensor(case, dtype)
        loss = self._loss(case, embeddings)
        policy = {"no_positive": "zero"} if case.option("no_positive") == "drop" else {}
        with torch.no_grad():
            each = self._loss(case, embeddings, reduction="none", **policy)
        return outcome_of(loss, embeddings, dict(zip(case.anchors(), each.double().cpu().tolist(), strict=True)))

    def _loss(self, case: Case, embeddings: torch.Tensor, **changed: Any) -> torch.Tensor:
        given: dict[str, Any] = {**case.keywords, **changed}
        for name, value in case.arguments.items():
            dtype = torch.bool if name == "positives" else torch.int64
            given[name] = torch.tensor(value, dtype=dtype, device=self.device)
        for layout in (fast.stacked_partners, fast.interleaved_partners):
            # Where a case has partners that a layout names, the helper of that name provides them.
            if "partners" in given and list(case.arguments["partners"]) == PARTNERS[layout.__name__](case.n):
                given["partners"] = layout(case.n, device=self.device)
        if "positive_pairs" in given:
            given["positive_pairs"] = given["positive_pairs"].reshape(-1, 2)
        if given.get("anchors") is not None:
            given["anchors"] = torch.tensor(given["anchors"], dtype=torch.bool, device=self.device)
        loss: torch.Tensor = getattr(fast, LOSSES[case.loss].function)(embeddings, **given)
        return loss
