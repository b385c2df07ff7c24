"""Our own torch implementation, in every dtype that represents a case's inputs exactly and with each backend."""

from __future__ import annotations

from collections.abc import Mapping
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


def _stacked(n: int) -> list[int]:
    return [*range(n // 2, n), *range(n // 2)]


def _interleaved(n: int) -> list[int]:
    return [i + 1 - 2 * (i % 2) for i in range(n)]


PARTNERS = {"stacked_partners": _stacked, "interleaved_partners": _interleaved}


class Fast(Implementation):
    """The vectorised losses of ``fast/``, with the backend that they choose themselves."""

    name: ClassVar[str] = "fast"
    title: ClassVar[str] = "pairproof.fast, torch"
    held_to_plain: ClassVar[bool] = True
    dtypes: ClassVar[tuple[str, ...]] = ("float64", "float32", "bfloat16", "float16")
    backend: ClassVar[str | None] = None
    """The backend that is passed; None passes none."""

    @property
    def narrows_weights(self) -> bool:
        """Whether the kernels are taken by themselves: on a CUDA device that has what they need."""
        return self.backend is None and kernels.chosen(torch.empty((2, 1), device=self.device))

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
        given: dict[str, Any] = {**case.keywords, **changed}
        for name, value in case.arguments.items():
            dtype = torch.bool if name == "positives" else torch.int64
            given[name] = torch.tensor(value, dtype=dtype, device=self.device)
        for layout in (fast.stacked_partners, fast.interleaved_partners):
            # Where a case has partners that a layout names, the helper of that name provides them.
            if (
                "partners" in given
                and not case.others
                and list(case.arguments["partners"]) == PARTNERS[layout.__name__](case.n)
            ):
                given["partners"] = layout(case.n, device=self.device)
        if "positive_pairs" in given:
            given["positive_pairs"] = given["positive_pairs"].reshape(-1, 2)
        if given.get("anchors") is not None:
            given["anchors"] = torch.tensor(given["anchors"], dtype=torch.bool, device=self.device)
        if self.backend is not None:
            given["backend"] = self.backend
        loss: torch.Tensor = case.entry.fast(**matrices, **given)
        return loss


class FastDense(Fast):
    """The same, with ``backend="dense"``."""

    name: ClassVar[str] = "fast-dense"
    title: ClassVar[str] = 'pairproof.fast, torch, backend="dense"'
    backend: ClassVar[str | None] = "dense"


class FastTiled(Fast):
    """The same, with ``backend="tiled"``, and tiles so small that a case's rows lie in several of them."""

    name: ClassVar[str] = "fast-tiled"
    title: ClassVar[str] = 'pairproof.fast, torch, backend="tiled", 4 rows a tile'
    backend: ClassVar[str | None] = "tiled"

    def _loss(self, case: Case, matrices: Mapping[str, torch.Tensor], **changed: Any) -> torch.Tensor:
        with tiles_of(4):
            return super()._loss(case, matrices, **changed)


class FastExact(Fast):
    """The same, with ``backend="exact"``, in float64."""

    computes_in: ClassVar[str | None] = "float64"
    name: ClassVar[str] = "fast-exact"
    title: ClassVar[str] = 'pairproof.fast, torch, backend="exact"'
    backend: ClassVar[str | None] = "exact"


class FastTriton(Fast):
    """The same, asked for the fused kernels: on a CUDA device, or in Triton's interpreter on the CPU."""

    name: ClassVar[str] = "fast-triton"
    title: ClassVar[str] = 'pairproof.fast, torch, backend="triton"'
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float16")
    anywhere: ClassVar[bool] = False
    backend: ClassVar[str | None] = "triton"

    def load(self, options: Mapping[str, str]) -> None:
        """Check whether the kernels run here."""
        refusal = kernels.refusal(torch.empty((2, 1), device=self.device))
        if refusal is not None:
            raise Unavailable(refusal)

    @property
    def environment(self) -> tuple[str, ...]:
        """On the CPU only the interpreter runs kernels."""
        return ("TRITON_INTERPRET=1",) if torch.device(self.device).type == "cpu" else ()

    @property
    def narrows_weights(self) -> bool:
        """They do."""
        return True

    def version(self) -> str:
        """The package's version, torch's and triton's."""
        where = "" if torch.device(self.device).type == "cuda" else ", interpreted"
        return f"{super().version()}, triton {metadata.version('triton')}{where}"
