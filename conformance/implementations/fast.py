"""Our own torch implementation, in every dtype that represents a case's inputs exactly and with each backend."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from importlib import metadata
from typing import Any, ClassVar

import torch

import pairproof
from pairproof import fast
from pairproof.fast import kernels
from pairproof.fast.engine import tiles_of

from ..suite.cases import Case
from ..suite.records import Outcome
from .base import Implementation, Unavailable, outcome_of


class Fast(Implementation):
    """The vectorised losses of ``fast/``, with the backend that they choose themselves."""

    name = "fast"
    title = "pairproof.fast, torch"
    held_to_plain = True
    dtypes: ClassVar[tuple[str, ...]] = ("float64", "float32", "bfloat16", "float16")
    backend: ClassVar[str | None] = None
    """The backend that is passed; None passes none."""

    def load(self, options: Mapping[str, str]) -> None:
        """Note whether the kernels are taken by themselves: on a CUDA device that has what they need."""
        self.narrows_weights = self.backend is None and kernels.chosen(torch.empty((2, 1), device=self.device))

    def version(self) -> str:
        """The package's version and torch's."""
        return f"{pairproof.__version__}, torch {torch.__version__}"

    def evaluate(self, case: Case, dtype: str) -> Outcome:
        """Value and gradients, and the values of all anchors from a second call."""
        given = self.tensors(case, dtype)
        loss = self._loss(case, given)
        policy = {"no_positive": "zero"} if case.option("no_positive") == "drop" else {}
        with torch.no_grad():
            each = self._loss(case, given, reduction="none", **policy)
        anchors = dict(zip(case.anchors(), each.double().cpu().tolist(), strict=True))
        return outcome_of(loss, given.pop(case.first), anchors, given)

    def _loss(self, case: Case, matrices: Mapping[str, torch.Tensor], **changed: Any) -> torch.Tensor:
        given: dict[str, Any] = {**case.keywords, **self.arrays(case), **changed}
        n, partners = case.n, [*case.arguments.get("partners", ())]
        stacked, interleaved = [*range(n // 2, n), *range(n // 2)], [i ^ 1 for i in range(n)]
        # Where a case has partners that a layout names, the helper of that name provides them.
        for layout, helper in ((stacked, fast.stacked_partners), (interleaved, fast.interleaved_partners)):
            if partners == layout and not case.others:
                given["partners"] = helper(n, device=self.device)
        if self.backend is not None:
            given["backend"] = self.backend
        with tiles_of(4) if self.backend == "tiled" else nullcontext():
            loss: torch.Tensor = case.entry.fast(**matrices, **given)
        return loss


class FastDense(Fast):
    """The same, with ``backend="dense"``."""

    name = "fast-dense"
    title = 'pairproof.fast, torch, backend="dense"'
    backend = "dense"


class FastTiled(Fast):
    """The same, with ``backend="tiled"``, and tiles so small that a case's rows lie in several of them."""

    name = "fast-tiled"
    title = 'pairproof.fast, torch, backend="tiled", 4 rows a tile'
    backend = "tiled"


class FastExact(Fast):
    """The same, with ``backend="exact"``, in float64."""

    computes_in = "float64"
    name = "fast-exact"
    title = 'pairproof.fast, torch, backend="exact"'
    backend = "exact"


class FastTriton(Fast):
    """The same, asked for the fused kernels: on a CUDA device, or in Triton's interpreter on the CPU."""

    name = "fast-triton"
    title = 'pairproof.fast, torch, backend="triton"'
    dtypes = ("float32", "bfloat16", "float16")
    anywhere = False
    narrows_weights = True
    backend = "triton"

    def load(self, options: Mapping[str, str]) -> None:
        """Check whether the kernels run here; on the CPU only the interpreter runs them."""
        refusal = kernels.refusal(torch.empty((2, 1), device=self.device))
        if refusal is not None:
            raise Unavailable(refusal)
        if torch.device(self.device).type == "cpu":
            self.environment = ("TRITON_INTERPRET=1",)

    def version(self) -> str:
        """The package's version, torch's and triton's."""
        where = "" if torch.device(self.device).type == "cuda" else ", interpreted"
        return f"{super().version()}, triton {metadata.version('triton')}{where}"
