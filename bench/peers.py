"""What is measured: `pairproof.fast` and the peers, each as a function from embeddings to a scalar loss.

Packages are loaded by the adapters of `pairproof.conformance.implementations`. Two peers are written here, as one would
write them today without a library: cross_entropy on the full matrix and the masked logsumexp. On a GPU the first
is also measured compiled, and so is the logsumexp that FlexAttention returns.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from pairproof import __version__, fast

from .batches import DTYPES, Batch

Step = Callable[[Tensor], Tensor]
"""From embeddings ``[N, D]`` to the loss, a scalar."""

OURS = "pairproof"
TILED = "pairproof_tiled"
CAPTURED = "pairproof_captured"
"""`pairproof.fast` on a GPU beside the "auto" backend: tiles in plain torch, and a step replayed as one graph."""

GIB = 1 << 30

AGREEMENT = 1e-9
"""Relative difference of float64 values above which two implementations compute different losses."""


class Unavailable(Exception):
    """An implementation that cannot be measured, with the reason."""


class Implementation(ABC):
    """One implementation of some of the losses."""

    name: ClassVar[str]
    title: ClassVar[str]
    losses: ClassVar[tuple[str, ...]]

    accelerator: ClassVar[bool] = False
    """Whether it is measured on a GPU only."""
    dtypes: ClassVar[tuple[str, ...]] = tuple(DTYPES)
    """The job's dtypes in which it is measured."""
    given: ClassVar[torch.dtype | None] = None
    """The dtype of its embeddings, if that is not the job's."""
    tf32: ClassVar[bool] = False
    """Whether its float32 products may round to TF32 in every job."""
    compiled: ClassVar[bool] = False
    """Whether its first step is slow because it is compiled."""
    agreement: ClassVar[float] = AGREEMENT
    """Relative difference that the check allows."""
    matrices: ClassVar[float | dict[str, float]] = 0.0
    """N x N matrices of the embeddings' dtype that one step holds at its peak, or that number by loss, as measured on
    a CPU at 4096 rows; 0 if its memory is linear."""

    def version(self) -> str:
        """The version that the report shows."""
        return f"written here, torch {torch.__version__}"

    def does_not_fit(self, loss: str, n: int, dtype: torch.dtype, room: int | None) -> str | None:
        """Return why one step does not fit into a device's memory, or None if it does.

        Args:
            loss: a name of `batches.LOSSES`.
            n: rows.
            dtype: of the embeddings.
            room: bytes that one step may take; None if there is no limit beforehand.
        """
        count = self.matrices[loss] if isinstance(self.matrices, dict) else self.matrices
        needed = count * n * n * (self.given or dtype).itemsize
        if room is None or needed <= room:
            return None
        return f"needs about {needed / GIB:.0f} GiB ({count:g} N x N matrices), where {room / GIB:.0f} GiB are free"

    def refuses(self, loss: str, n: int) -> str | None:
        """Return why this loss is not measured at this size, or None if it is."""
        return None

    def rows_to_check(self, loss: str, n: int) -> int:
        """Number of rows of the batch on which its float64 value is compared."""
        return min(n, 8192)

    def check_step(self, batch: Batch, temperature: float) -> Step:
        """The step that is checked in float64. It differs where the kernels have no float64."""
        return self.step(batch, temperature)

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
        """The version and the backend."""
        return f"{__version__}, backend {self.backend}"

    def step(self, batch: Batch, temperature: float, reduction: Literal["mean_pairs", "none"] = "mean_pairs") -> Step:
        """The public function of the loss; the pairwise losses take the reduction."""
        options = {"temperature": temperature, **self.options}
        labels, partners = batch.labels, batch.partners
        if batch.loss == "nt_xent":
            return lambda z: fast.nt_xent_loss(z, partners, **options)
        if batch.loss == "supcon":
            return lambda z: fast.supcon_loss(z, labels, **options)
        if batch.loss == "info_nce":
            return lambda z: fast.info_nce_loss(*z.chunk(2), direction="a_to_b", **options)
        return lambda z: fast.nt_xent_pairwise_loss(z, labels, reduction=reduction, **options)


class OursTiled(Ours):
    """`pairproof.fast` in plain torch, where "auto" takes GPU kernels."""

    name, title, accelerator = TILED, "pairproof.fast, tiled", True

    def __init__(self) -> None:
        super().__init__("tiled")


def _cross_entropy(z: Tensor, partners: Tensor, temperature: float) -> Tensor:
    """NT-Xent on the full matrix, without writing in place, so that a compiler can fuse the mask of the diagonal."""
    y = F.normalize(z, dim=1)
    rows = torch.arange(len(z), device=z.device)
    logits = (y @ y.T / temperature).masked_fill(rows[:, None] == rows[None, :], float("-inf"))
    return F.cross_entropy(logits, partners)


class CrossEntropy(Implementation):
    """NT-Xent as one call of cross_entropy on the matrix of all similarities."""

    name = "cross_entropy"
    title = "cross_entropy, full matrix"
    losses: ClassVar[tuple[str, ...]] = ("nt_xent", "supcon", "pairwise_views")
    matrices = 3.1

    def step(self, batch: Batch, temperature: float) -> Step:
        """Targets are the partners; the diagonal is excluded by -inf."""
        partners = batch.partners

        def loss(z: Tensor) -> Tensor:
            y = F.normalize(z, dim=1)
            logits = y @ y.T / temperature
            return F.cross_entropy(logits.fill_diagonal_(float("-inf")), partners)

        return loss


class CrossEntropyTf32(CrossEntropy):
    """The same on float32 rows with TF32 products, in the bfloat16 jobs."""

    name, title = "cross_entropy_tf32", "cross_entropy, float32 rows, TF32"
    losses: ClassVar[tuple[str, ...]] = ("nt_xent", "supcon")
    accelerator, dtypes, given, tf32 = True, ("bfloat16",), torch.float32, True


class CompiledCrossEntropy(CrossEntropy):
    """The same under torch.compile, for one loss: the code of the others is the same."""

    name, title = "cross_entropy_compiled", "cross_entropy, compiled"
    losses: ClassVar[tuple[str, ...]] = ("nt_xent",)
    accelerator, compiled = True, True

    @cached_property
    def function(self) -> Any:
        """The compiled function, shared by all steps."""
        return torch.compile(_cross_entropy, dynamic=False)

    def step(self, batch: Batch, temperature: float) -> Step:
        """The compiled function."""
        return self._step(self.function, batch, temperature)

    def check_step(self, batch: Batch, temperature: float) -> Step:
        """The same code, not compiled: a second compilation for float64 would show nothing more."""
        return self._step(_cross_entropy, batch, temperature)

    @staticmethod
    def _step(function: Callable[..., Tensor], batch: Batch, temperature: float) -> Step:
        return lambda z: function(z, batch.partners, temperature)


class FlexAttention(Implementation):
    """NT-Xent by FlexAttention's logsumexp: attention of the rows over all other rows.

    The attention's output is not used, so its values are as narrow as the kernels take them, and have no gradient.
    The gradient flows through the logsumexp, by queries and by keys; on a CPU there is none.
    """

    name, title, losses = "flex_attention", "FlexAttention's logsumexp, compiled", ("nt_xent",)
    accelerator, compiled = True, True

    width: ClassVar[int] = 16
    """Columns of the values: the fewest that a matrix product of its kernels takes."""
    block: ClassVar[int] = 128
    """Rows and columns of a block of its mask: the library's default."""

    def __init__(self) -> None:
        self.module = _module("torch.nn.attention.flex_attention", f"torch {torch.__version__} has no FlexAttention")
        request = getattr(self.module, "AuxRequest", None)
        # The older keyword is deprecated where there is the newer one.
        self.requested: dict[str, Any] = {"return_lse": True} if request is None else {"return_aux": request(lse=True)}

    @cached_property
    def function(self) -> Any:
        """The compiled function, shared by all steps."""
        return torch.compile(self.module.flex_attention, dynamic=False)

    def everyone_else(self, n: int, device: torch.device) -> Any:
        """The mask that excludes the diagonal. Only blocks on the diagonal look at single pairs.

        Where its blocks divide the rows it is written down block by block: the library would make it from N x N
        booleans, 64 GiB of them at 262144 rows.
        """
        count, rest = divmod(n, self.block)
        if rest or count == 1:
            return self.module.create_block_mask(_not_itself, None, None, n, n, device=str(device))
        one = torch.ones(1, 1, count, dtype=torch.int32, device=device)
        # Row r lists r first, then the others in turn.
        listed = torch.arange(count, dtype=torch.int32, device=device)
        blocks = ((listed[:, None] + listed[None, :]) % count)[None, None]
        others = blocks.roll(-1, dims=-1)
        return self.module.BlockMask.from_kv_blocks(
            one, blocks.contiguous(), (count - 1) * one, others.contiguous(), self.block, _not_itself
        )

    def step(self, batch: Batch, temperature: float) -> Step:
        """The compiled function, forward and backward.

        Raises:
            Unavailable: there is no backward on the batch's device.
        """
        if batch.embeddings.device.type == "cpu":
            raise Unavailable("FlexAttention has no backward on a CPU")
        return self._step(self.function, batch, temperature)

    def check_step(self, batch: Batch, temperature: float) -> Step:
        """Not compiled: plain operations, which take float64."""
        return self._step(self.module.flex_attention, batch, temperature)

    def _step(self, function: Any, batch: Batch, temperature: float) -> Step:
        partners, mask = batch.partners, self.everyone_else(batch.n, batch.embeddings.device)

        def loss(z: Tensor) -> Tensor:
            y = F.normalize(z, dim=1)
            rows, values = y[None, None], y[None, None, :, : self.width].detach()
            _, found = function(rows, rows, values, block_mask=mask, scale=1 / temperature, **self.requested)
            everyone = getattr(found, "lse", found)[0, 0]
            if z.requires_grad and torch.is_grad_enabled() and not everyone.requires_grad:
                raise Unavailable(f"FlexAttention of torch {torch.__version__} gives its logsumexp no gradient")
            wide = y.to(everyone.dtype)
            mean: Tensor = (everyone - (wide * wide[partners]).sum(dim=1) / temperature).mean()
            return mean

        return loss


def _not_itself(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Which pairs count, in the form that FlexAttention wants."""
    return row != column


class MaskedLogsumexp(Implementation):
    """SupCon and pairwise NT-Xent by masks and logsumexp on the matrix of all similarities."""

    name = "masked_logsumexp"
    title = "masked logsumexp"
    losses = ("supcon", "pairwise_views", "pairwise_classes")
    matrices: ClassVar[dict[str, float]] = {"supcon": 5.3, "pairwise_views": 9.6, "pairwise_classes": 9.6}

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


class _Adapted(Implementation):
    """A package that an adapter of the harness loads."""

    adapter: ClassVar[str]
    """Module and class of the adapter."""

    def __init__(self) -> None:
        # The harness and what it imports are loaded only in processes that need them.
        from pairproof.conformance.implementations.base import Unavailable as NotLoaded

        module, _, name = self.adapter.partition(":")
        kind: Any = getattr(importlib.import_module(f"pairproof.conformance.implementations.{module}"), name)
        try:
            self.peer = kind({}, "cpu")
        except NotLoaded as error:
            raise Unavailable(str(error)) from None

    def version(self) -> str:
        """The adapter's version."""
        return str(self.peer.version())


class OriginalSupCon(_Adapted):
    """The original SupCon code. It does not normalise, so its embeddings are normalised first."""

    name, title, adapter = "supcontrast", "original SupCon code", "supcontrast:SupContrast"
    losses = ("nt_xent", "supcon")
    matrices = 8.1

    def does_not_fit(self, loss: str, n: int, dtype: torch.dtype, room: int | None) -> str | None:
        """By the size of float32: its masks are float32, and so are the products with them."""
        return super().does_not_fit(loss, n, torch.promote_types(dtype, torch.float32), room)

    def step(self, batch: Batch, temperature: float) -> Step:
        """Two views ``[N/2, 2, D]``: without labels for NT-Xent, with one label per item for SupCon."""
        code: Any = self.peer.loss(temperature=temperature, base_temperature=temperature)
        labels = batch.labels[: batch.n // 2] if batch.loss == "supcon" else None
        return lambda z: code(torch.stack(F.normalize(z, dim=1).chunk(2), dim=1), labels=labels)


class PmlSupCon(_Adapted):
    """SupConLoss of pytorch-metric-learning, with its defaults."""

    name, title, adapter = "pml", "PML SupConLoss", "pml:PytorchMetricLearning"
    losses: ClassVar[tuple[str, ...]] = ("supcon",)
    matrices: ClassVar[float] = 11.9
    kind: ClassVar[str] = "SupConLoss"

    def step(self, batch: Batch, temperature: float) -> Step:
        """The package's class on the batch's labels."""
        loss: Any = getattr(self.peer.package.losses, self.kind)(temperature=temperature)
        return lambda z: loss(z, batch.labels)


class PmlNtXent(PmlSupCon):
    """Its NTXentLoss, which makes a matrix of positive pairs by pairs."""

    name, title, kind = "pml_ntxent", "PML NTXentLoss", "NTXentLoss"
    losses = ("nt_xent", "pairwise_views", "pairwise_classes")
    matrices = 0.0

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


class InfoNcePytorch(_Adapted):
    """info-nce-pytorch: one tower's rows against the other tower's."""

    name, title, adapter = "info_nce_pytorch", "info-nce-pytorch", "info_nce_pytorch:InfoNCEPytorch"
    losses = ("info_nce",)
    matrices = 0.8

    def step(self, batch: Batch, temperature: float) -> Step:
        """Its class on the two halves of the rows."""
        code: Any = self.peer.package.InfoNCE(temperature=temperature)
        return lambda z: code(*z.chunk(2))


class Lightly(_Adapted):
    """lightly's NTXentLoss."""

    name, title, adapter = "lightly", "lightly NTXentLoss", "lightly:Lightly"
    losses = ("nt_xent",)
    matrices = 3.2

    def step(self, batch: Batch, temperature: float) -> Step:
        """Its class on the two halves of the rows."""
        code: Any = self.peer.loss(temperature=temperature)
        return lambda z: code(*z.chunk(2))


class InfCl(Implementation):
    """Inf-CL (DAMO-NLP-SG/Inf-CLIP): Triton kernels that round float32 to TF32 in every dtype."""

    name, title, losses = "inf_cl", "Inf-CL", ("info_nce",)
    accelerator = True

    agreement = 1e-2
    """It has no float64: the check tells it from another loss, not from an inexact one."""

    widest: ClassVar[int] = 256
    """Columns that its kernels take at a time by default."""

    def __init__(self) -> None:
        self.module = _module("inf_cl", "Inf-CL is not installed", ": pip install inf-cl")

    def version(self) -> str:
        """The package's version."""
        return f"inf-cl {importlib.metadata.version('inf-cl')}"

    def step(self, batch: Batch, temperature: float) -> Step:
        """Its function for one device on the two halves of the rows.

        Raises:
            Unavailable: the batch is on the CPU, or its columns are no multiple of what the kernels take.
        """
        columns = batch.embeddings.shape[1]
        width = min(columns, self.widest)
        if batch.embeddings.device.type != "cuda":
            raise Unavailable("Inf-CL's kernels need a CUDA device")
        if columns % width or width & (width - 1):
            raise Unavailable(f"Inf-CL's kernels do not take {columns} columns")

        def loss(z: Tensor) -> Tensor:
            a, b = F.normalize(z, dim=1).chunk(2)
            found: Tensor = self.module.cal_flash_loss(a, b, scale=1 / temperature, head_dim=width)
            return found.mean()

        return loss


def _module(name: str, absent: str, remedy: str = "") -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Unavailable(f"{absent} ({error}){remedy}") from None


PEERS: dict[str, type[Implementation]] = {
    kind.name: kind
    for kind in (
        OursTiled,
        CrossEntropy,
        CrossEntropyTf32,
        CompiledCrossEntropy,
        FlexAttention,
        MaskedLogsumexp,
        OriginalSupCon,
        PmlSupCon,
        PmlNtXent,
        InfoNcePytorch,
        InfCl,
        Lightly,
    )
}

TITLES = {OURS: Ours.title} | {name: kind.title for name, kind in PEERS.items()}
TITLES[CAPTURED] = "pairproof.fast, captured as a graph"


def names_for(loss: str, device: str = "cpu", dtype: str = "float32") -> list[str]:
    """The implementations of a loss that are measured on a device in a dtype, `pairproof.fast` first."""
    peers = {name: kind for name, kind in PEERS.items() if loss in kind.losses and dtype in kind.dtypes}
    return [OURS, *(name for name, kind in peers.items() if device != "cpu" or not kind.accelerator)]


def load(name: str, backend: str = "auto") -> Implementation:
    """One implementation by name.

    Raises:
        Unavailable: it is not installed.
    """
    return Ours(backend) if name == OURS else PEERS[name]()
