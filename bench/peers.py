"""What is measured: `pairproof.fast` and the peers, each as a function from embeddings to a scalar loss.

Our own short versions, cross_entropy on the full matrix and the masked logsumexp, are what one would write today
without a library; they are the peers to beat.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from pairproof import __version__, fast

from .batches import Batch

Step = Callable[[Tensor], Tensor]
"""From embeddings ``[N, D]`` to the loss, a scalar."""

OURS = "pairproof"

GIB = 1 << 30


class Unavailable(Exception):
    """An implementation that cannot be measured, with the reason."""


class Implementation(ABC):
    """One implementation of some of the losses."""

    name: ClassVar[str]
    title: ClassVar[str]
    losses: ClassVar[tuple[str, ...]]

    def version(self) -> str:
        """What the report says beside its figures."""
        return f"written here, torch {torch.__version__}"

    def refuses(self, loss: str, n: int) -> str | None:
        """Why it cannot be asked for this loss at this size; None if it can."""
        return None

    def rows_to_check(self, loss: str, n: int) -> int:
        """On how many of a batch's rows its float64 value is compared."""
        return min(n, 8192)

    @abstractmethod
    def step(self, batch: Batch, temperature: float) -> Step:
        """The loss of a batch's labels or partners, as a function of its embeddings.

        Raises:
            Unavailable: it has no such loss.
        """


class Ours(Implementation):
    """`pairproof.fast`."""

    name = OURS
    title = "pairproof.fast"
    losses = ("nt_xent", "supcon", "pairwise_views", "pairwise_classes", "info_nce")

    def __init__(self, backend: str = "auto") -> None:
        self.options: dict[str, Any] = {} if backend == "auto" else {"backend": backend}
        self.backend = backend

    def version(self) -> str:
        """Ours, and the backend."""
        return f"{__version__}, backend {self.backend}"

    def step(self, batch: Batch, temperature: float, reduction: str | None = None) -> Step:
        """The public function of the loss."""
        options = {"temperature": temperature, **self.options}
        labels, partners = batch.labels, batch.partners
        if batch.loss == "nt_xent":
            return lambda z: fast.nt_xent_loss(z, partners, **options)
        if batch.loss == "supcon":
            return lambda z: fast.supcon_loss(z, labels, **options)
        if batch.loss == "info_nce":
            info_nce: Any = getattr(fast, "info_nce_loss", None)
            if info_nce is None:
                raise Unavailable("pairproof.fast has no info_nce_loss")

            def one_way(z: Tensor) -> Tensor:
                a, b = z.chunk(2)
                found: Tensor = info_nce(a, b, direction="a_to_b", **options)
                return found

            return one_way
        options["reduction"] = reduction or "mean_pairs"
        return lambda z: fast.nt_xent_pairwise_loss(z, labels, **options)


class CrossEntropy(Implementation):
    """NT-Xent as one call of cross_entropy on the matrix of all similarities."""

    name = "cross_entropy"
    title = "cross_entropy, full matrix"
    losses = ("nt_xent", "supcon", "pairwise_views")

    def step(self, batch: Batch, temperature: float) -> Step:
        """Targets are the partners; the diagonal is excluded by -inf."""
        partners = batch.partners

        def loss(z: Tensor) -> Tensor:
            y = F.normalize(z, dim=1)
            logits = y @ y.T / temperature
            return F.cross_entropy(logits.fill_diagonal_(float("-inf")), partners)

        return loss


class MaskedLogsumexp(Implementation):
    """SupCon and pairwise NT-Xent by masks and logsumexp on the matrix of all similarities."""

    name = "masked_logsumexp"
    title = "masked logsumexp"
    losses = ("supcon", "pairwise_views", "pairwise_classes")

    def step(self, batch: Batch, temperature: float) -> Step:
        """Masks are made from the labels in every call, as a training step must."""
        labels = batch.labels

        def supcon(z: Tensor) -> Tensor:
            y = F.normalize(z, dim=1)
            logits = y @ y.T / temperature
            itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
            positives = (labels[:, None] == labels[None, :]) & ~itself
            everything = logits.masked_fill(itself, float("-inf")).logsumexp(dim=1)
            return (everything - (logits * positives).sum(dim=1) / positives.sum(dim=1)).mean()

        def pairwise(z: Tensor) -> Tensor:
            y = F.normalize(z, dim=1)
            logits = y @ y.T / temperature
            same = labels[:, None] == labels[None, :]
            negatives = logits.masked_fill(same, float("-inf")).logsumexp(dim=1, keepdim=True)
            positives = same & ~torch.eye(len(z), dtype=torch.bool, device=z.device)
            return ((torch.logaddexp(logits, negatives) - logits) * positives).sum() / positives.sum()

        return supcon if batch.loss == "supcon" else pairwise


class OriginalSupCon(Implementation):
    """The original SupCon code, the file that bioencoder carries; it does not normalise, so that is done before it."""

    name = "supcontrast"
    title = "original SupCon code"
    losses = ("nt_xent", "supcon")

    def __init__(self) -> None:
        # The harness and what it imports: in no process but those that need the file.
        from pairproof.conformance.peers.base import Unavailable as NotLoaded
        from pairproof.conformance.peers.supcontrast import SupContrast

        try:
            self.peer = SupContrast({}, "cpu")
        except NotLoaded as error:
            raise Unavailable(str(error)) from None

    def version(self) -> str:
        """The package and its file's checksum."""
        return self.peer.version()

    def step(self, batch: Batch, temperature: float) -> Step:
        """Two views ``[N/2, 2, D]``: without labels for NT-Xent, with one label per item for SupCon."""
        code: Any = self.peer.loss(temperature=temperature, base_temperature=temperature)
        labels = batch.labels[: batch.n // 2] if batch.loss == "supcon" else None

        def loss(z: Tensor) -> Tensor:
            found: Tensor = code(torch.stack(F.normalize(z, dim=1).chunk(2), dim=1), labels=labels)
            return found

        return loss


class _MetricLearning(Implementation):
    """A loss of pytorch-metric-learning, with its defaults."""

    kind: ClassVar[str]

    def __init__(self) -> None:
        try:
            self.package: Any = importlib.import_module("pytorch_metric_learning")
            self.module: Any = importlib.import_module("pytorch_metric_learning.losses")
        except ImportError as error:
            raise Unavailable(
                f'pytorch-metric-learning is not installed ({error}): pip install "pairproof[pml]"'
            ) from None

    def version(self) -> str:
        """The package's version."""
        return f"pytorch-metric-learning {self.package.__version__}"

    def step(self, batch: Batch, temperature: float) -> Step:
        """The package's class on the batch's labels."""
        loss: Any = getattr(self.module, self.kind)(temperature=temperature)
        labels = batch.labels

        def of(z: Tensor) -> Tensor:
            found: Tensor = loss(z, labels)
            return found

        return of


class PmlSupCon(_MetricLearning):
    """Its SupConLoss."""

    name, title, losses, kind = "pml", "PML SupConLoss", ("supcon",), "SupConLoss"


class PmlNtXent(_MetricLearning):
    """Its NTXentLoss, which makes a matrix of positive pairs by pairs."""

    name, title, kind = "pml_ntxent", "PML NTXentLoss", "NTXentLoss"
    losses = ("nt_xent", "pairwise_views", "pairwise_classes")

    limit: ClassVar[float] = 8 * GIB
    """Bytes that one step may take by its measured growth; the check in float64 takes twice that."""

    def refuses(self, loss: str, n: int) -> str | None:
        """Where its memory does not fit."""
        factor, power = (1.5, 4) if loss == "pairwise_classes" else (17, 3)
        if factor * n**power > self.limit:
            return f"its memory grows as {factor} N^{power} bytes, here beyond {self.limit / GIB:.0f} GiB"
        return None

    def rows_to_check(self, loss: str, n: int) -> int:
        """Fewer where half the limit is too much in float64."""
        return min(n, 128) if loss == "pairwise_classes" else n


class InfoNcePytorch(Implementation):
    """info-nce-pytorch: one tower's rows against the other tower's."""

    name, title, losses = "info_nce_pytorch", "info-nce-pytorch", ("info_nce",)

    def __init__(self) -> None:
        try:
            self.module: Any = importlib.import_module("info_nce")
        except ImportError as error:
            raise Unavailable(f'info-nce-pytorch is not installed ({error}): pip install "pairproof[bench]"') from None

    def version(self) -> str:
        """The package's version."""
        return f"info-nce-pytorch {importlib.metadata.version('info-nce-pytorch')}"

    def step(self, batch: Batch, temperature: float) -> Step:
        """Its class on the two halves of the rows."""
        code: Any = self.module.InfoNCE(temperature=temperature)

        def loss(z: Tensor) -> Tensor:
            a, b = z.chunk(2)
            found: Tensor = code(a, b)
            return found

        return loss


class Lightly(Implementation):
    """lightly's NTXentLoss."""

    name, title, losses = "lightly", "lightly NTXentLoss", ("nt_xent",)

    def __init__(self) -> None:
        try:
            self.module: Any = importlib.import_module("lightly.loss")
        except ImportError as error:
            raise Unavailable(f"lightly is not installed ({error}); it needs torchvision") from None

    def version(self) -> str:
        """The package's version."""
        return f"lightly {importlib.metadata.version('lightly')}"

    def step(self, batch: Batch, temperature: float) -> Step:
        """Its class on the two halves of the rows."""
        code: Any = self.module.NTXentLoss(temperature=temperature)

        def loss(z: Tensor) -> Tensor:
            a, b = z.chunk(2)
            found: Tensor = code(a, b)
            return found

        return loss


PEERS: dict[str, type[Implementation]] = {
    kind.name: kind
    for kind in (
        CrossEntropy,
        MaskedLogsumexp,
        OriginalSupCon,
        PmlSupCon,
        PmlNtXent,
        InfoNcePytorch,
        Lightly,
    )
}

TITLES = {OURS: Ours.title} | {name: kind.title for name, kind in PEERS.items()}


def names_for(loss: str) -> list[str]:
    """The implementations that have a loss, ours first."""
    return [OURS, *(name for name, kind in PEERS.items() if loss in kind.losses)]


def load(name: str, backend: str = "auto") -> Implementation:
    """One implementation by name.

    Raises:
        Unavailable: it is not installed.
    """
    return Ours(backend) if name == OURS else PEERS[name]()
