"""What an adapter must say: what it computes, what it does not, where it knowingly deviates."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from ..cases import Case
from ..compare import Outcome
from ..oracle import Truth


class Unavailable(Exception):
    """An implementation is not installed here; the message says what to install or name."""


@dataclass(frozen=True)
class Deviation:
    """A declared difference: on the cases and dtypes that ``applies`` picks, given the truth, the result must be wrong.

    A declared deviation that does not show is a failure, and one that no case of a full run meets is an error: a
    declaration must never outlive its reason.
    """

    name: str
    applies: Callable[[Case, str, Truth], bool]
    reason: str
    link: str


class Implementation(ABC):
    """One implementation of some of the losses.

    Attributes:
        name: by which the command line knows it.
        title: what it is, for the run's header.
        dtypes: in which it is run.
        deviations: declared differences.
        held_to_plain: whether it may be no worse than twice the straightforward torch implementation.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    dtypes: ClassVar[tuple[str, ...]] = ("float64", "float32")
    deviations: ClassVar[tuple[Deviation, ...]] = ()
    held_to_plain: ClassVar[bool] = False

    def __init__(self, options: Mapping[str, str], device: str) -> None:
        """Load the implementation.

        Args:
            options: paths that the user gave, by peer name.
            device: torch device on which to run.

        Raises:
            Unavailable: it cannot be loaded.
        """
        self.device = device

    @abstractmethod
    def version(self) -> str:
        """Which copy is tested."""

    @abstractmethod
    def refuses(self, case: Case) -> str | None:
        """Why this case is not for it: a loss or an option that it does not have. None if it claims the case."""

    @abstractmethod
    def evaluate(self, case: Case, dtype: str) -> Outcome:
        """Value and gradient of a case."""

    def tensor(self, case: Case, dtype: str) -> torch.Tensor:
        """The embeddings [N, D] as a leaf tensor that requires a gradient."""
        values = torch.tensor(case.embeddings, dtype=torch.float64)
        return values.to(self.device, getattr(torch, dtype)).requires_grad_()


def outcome_of(loss: torch.Tensor, embeddings: torch.Tensor, anchors: dict[int, float] | None = None) -> Outcome:
    """The outcome of a torch loss, its gradient taken (of the sum, for one value per anchor)."""
    values = loss.detach().double().cpu().reshape(-1).tolist()
    gradient = torch.zeros_like(embeddings)
    if loss.requires_grad:
        (gradient,) = torch.autograd.grad(loss.sum(), embeddings)
    return Outcome(values=values, gradient=gradient.double().cpu().numpy(), anchors=anchors)


def normalised(embeddings: torch.Tensor, case: Case) -> torch.Tensor:
    """Rows of norm 1 under cosine similarity, for implementations that leave it to the caller.

    Each row is first brought to ordinary size by a power of two, so that no norm overflows or meets an epsilon.
    """
    if case.option("similarity") != "cosine":
        return embeddings
    exponents = torch.frexp(embeddings.detach().abs().amax(dim=1, keepdim=True)).exponent
    halves = torch.stack([exponents // 2, exponents - exponents // 2])
    for half in halves:
        embeddings = embeddings * torch.pow(torch.tensor(2.0, dtype=embeddings.dtype), -half)
    return torch.nn.functional.normalize(embeddings, dim=1)


def norms_leave(case: Case, dtype: str, smallest: float) -> bool:
    """Whether a row's norm is below ``smallest``, or its square leaves the range of the dtype, under cosine."""
    if case.option("similarity") != "cosine":
        return False
    info = torch.finfo(getattr(torch, dtype))
    norms = [math.hypot(*row) for row in case.embeddings.tolist()]
    return min(norms) < smallest or max(norms) > math.sqrt(info.max) or min(norms) < math.sqrt(info.tiny)


def stacked_order(case: Case) -> np.ndarray[Any, np.dtype[np.int64]]:
    """An order of rows in which the partners of a case are stacked: first views, then second views."""
    partners = [int(p) for p in case.arguments["partners"]]
    first = [i for i, p in enumerate(partners) if i < p]
    return np.array(first + [partners[i] for i in first])


def logits(case: Case) -> npt.NDArray[np.float64]:
    """Similarities over the temperature, [N, N], with the similarities' own diagonal."""
    z = case.embeddings
    if case.option("similarity") == "cosine":
        z = z / np.max(np.abs(z), axis=1, keepdims=True)
        z = z / np.linalg.norm(z, axis=1, keepdims=True)
    with np.errstate(over="ignore"):
        return np.asarray(z @ z.T / float(case.option("temperature")))


def lonely(case: Case) -> bool:
    """Whether some anchor has no positive."""
    positives = case.positives()
    return any(not positives[i] for i in case.anchors())
