"""``pairproof.fast``, with each backend, in every dtype that represents the inputs of a case exactly."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from importlib import metadata
from typing import Any, ClassVar

import numpy as np
import torch

import pairproof
from pairproof import fast
from pairproof.fast import kernels
from pairproof.fast.engine import tiles_of

from ..suite.cases import Case, called
from ..suite.records import Outcome
from .base import Implementation, Support, Unavailable, outcome_of

SMALL_TILES_UP_TO = 130
"""Largest ``Case.size`` for which the backend "tiled" uses tiles of 4 rows; larger cases use tiles of 64 rows."""


BACKENDS = ("fast-dense", "fast-tiled", "fast-exact")
"""The implementations with a fixed backend that run on every machine."""


class Fast(Implementation):
    """The losses of ``pairproof.fast``, with the default backend."""

    name = "fast"
    title = "pairproof.fast, torch"
    dtypes: ClassVar[tuple[str, ...]] = ("float64", "float32", "bfloat16", "float16")
    backend: ClassVar[str | None] = None
    """The value of the keyword ``backend``; None to leave it out."""

    def load(self, options: Mapping[str, str]) -> None:
        """Determine ``narrows_weights``: whether the default backend uses the GPU kernels on this device."""
        self.narrows_weights = self.backend is None and kernels.chosen(torch.empty((2, 1), device=self.device))

    def version(self) -> str:
        """The package's version and torch's."""
        return f"{pairproof.__version__}, torch {torch.__version__}"

    def evaluate(self, case: Case, dtype: str) -> Outcome:
        """Evaluate the value, the gradients and the values of all anchors, with a second call if necessary."""
        leaves = self.tensors(case, dtype)
        given = {**self.keywords(case), **leaves}
        loss, dropped = self.loss(case, given), case.option("no_positive") == "drop"
        each = loss.detach()
        if dropped or case.option("reduction") != "none":
            policy = {"no_positive": "zero"} if dropped else {}
            with torch.no_grad():
                each = self.loss(case, {**given, "reduction": "none", **policy})
        anchors = dict(zip(case.anchors(), each.double().cpu().tolist(), strict=True))
        return outcome_of(loss, leaves, anchors)

    def keywords(self, case: Case) -> dict[str, Any]:
        """The arguments of a case that are not float matrices."""
        given = {**case.keywords, **self.arrays(case)}
        n, partners = case.n, case.arguments.get("partners")
        if partners is not None and not case.others:
            # Use the helpers for the two usual layouts, so that they are tested too.
            if [*partners] == [*range(n // 2, n), *range(n // 2)]:
                given["partners"] = fast.stacked_partners(n, device=self.device)
            elif [*partners] == [i ^ 1 for i in range(n)]:
                given["partners"] = fast.interleaved_partners(n, device=self.device)
        if self.backend is not None:
            given["backend"] = self.backend
        return given

    def loss(self, case: Case, given: Mapping[str, Any]) -> torch.Tensor:
        """The loss of a case with these arguments."""
        rows = 4 if case.size <= SMALL_TILES_UP_TO else 64
        with tiles_of(rows) if self.backend == "tiled" else nullcontext():
            loss: torch.Tensor = case.entry.fast(**called(given))
        return loss


class FastDense(Fast):
    """The losses of ``pairproof.fast`` with ``backend="dense"``."""

    name = "fast-dense"
    alternates = BACKENDS
    title = 'pairproof.fast, torch, backend="dense"'
    backend = "dense"


class FastTiled(Fast):
    """The losses of ``pairproof.fast`` with ``backend="tiled"`` and several small tiles per case."""

    name = "fast-tiled"
    alternates = BACKENDS
    title = 'pairproof.fast, torch, backend="tiled", tiles of 4 or 64 rows'
    backend = "tiled"


class FastExact(Fast):
    """The losses of ``pairproof.fast`` with ``backend="exact"``, which computes in float64."""

    computes_in = "float64"
    name = "fast-exact"
    alternates = BACKENDS
    title = 'pairproof.fast, torch, backend="exact"'
    backend = "exact"


class FastFrozen(Fast):
    """The losses of ``pairproof.fast``, with the gradient of one matrix at a time, as with a queue of negatives."""

    name = "fast-frozen"
    title = "pairproof.fast, torch, one gradient at a time"
    dtypes = ("float64", "float32")
    support = Support(also=(("has a single matrix, which needs a gradient", lambda case: not case.others),))

    def evaluate(self, case: Case, dtype: str) -> Outcome:
        """Evaluate the value once, and the gradient of each matrix in a call of its own."""
        leaves, found = self.tensors(case, dtype), dict[str, Outcome]()
        for name, leaf in leaves.items():
            given = {**self.keywords(case), **{other: tensor.detach() for other, tensor in leaves.items()}, name: leaf}
            found[name] = outcome_of(self.loss(case, given), {name: leaf})
        first = found.pop(case.first)
        others = {name: outcome.gradient for name, outcome in found.items() if outcome.gradient is not None}
        return Outcome(first.values, first.gradient, other_gradients=others)


def products_exceed_float32(case: Case) -> bool:
    """Whether, under dot similarity, a product of two entries or a logit may exceed the range of float32."""
    if case.option("similarity") != "dot":
        return False
    rows = np.concatenate(list(case.matrices.values()))
    with np.errstate(over="ignore"):
        products, squares = np.abs(rows).max(initial=0.0) ** 2, (rows**2).sum(1).max(initial=0.0)
        return bool(max(products, squares / case.temperature) > np.finfo(np.float32).max)


def ignores_without_kernels(case: Case) -> bool:
    """Whether the kernels refuse the ignored pairs of a case.

    They refuse masks of ignored pairs, and ids in supcon_epsilon or with a mask of positives.
    """
    ids = "ignored_ids" in case.arguments
    return "ignored" in case.arguments or (ids and ("positives" in case.arguments or case.entry.epsilon != 0))


def weights_pairs(case: Case) -> bool:
    """Whether pairs have weights in a case."""
    return not {"positive_weights", "negative_weights"}.isdisjoint(case.arguments)


class FastTriton(Fast):
    """The losses of ``pairproof.fast`` with the fused kernels, on a CUDA device or interpreted on the CPU."""

    name = "fast-triton"
    title = 'pairproof.fast, torch, backend="triton"'
    dtypes = ("float32", "bfloat16", "float16")
    support = Support(
        also=(
            ("products exceed float32, in which the kernels compute", products_exceed_float32),
            (
                "the kernels support ignored pairs by ids only, and not with a mask of positives or in supcon_epsilon",
                ignores_without_kernels,
            ),
            ("the kernels do not support weights of pairs", weights_pairs),
            ("the kernels do not support rows of zeros", lambda case: case.option("zero_row") == "zero"),
        )
    )
    anywhere = False
    narrows_weights = True
    backend = "triton"

    def load(self, options: Mapping[str, str]) -> None:
        """Check whether the kernels can run. On the CPU, they need the interpreter."""
        refusal = kernels.refusal(torch.empty((2, 1), device=self.device))
        if refusal is not None:
            raise Unavailable(refusal)
        if torch.device(self.device).type == "cpu":
            self.environment = ("TRITON_INTERPRET=1",)

    def version(self) -> str:
        """The package's version, torch's and triton's."""
        where = "" if torch.device(self.device).type == "cuda" else ", interpreted"
        return f"{super().version()}, triton {metadata.version('triton')}{where}"
