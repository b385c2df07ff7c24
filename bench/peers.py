"""What is measured: `pairproof.fast` and the peers, each as a function from embeddings to a scalar loss.

Our own short versions, cross_entropy on the full matrix and the masked logsumexp, are what one would write today
without a library; they are the peers to beat. On an accelerator the first is measured compiled as well, and so is
FlexAttention, whose logsumexp is a fused road to the same loss.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar

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
"""Our own on a GPU beside the "auto" backend: the tiles in plain torch, and a step replayed as one graph."""

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
    """Whether it is measured on an accelerator alone."""
    dtypes: ClassVar[tuple[str, ...]] = tuple(DTYPES)
    """The job's dtypes in which it is measured."""
    given: ClassVar[torch.dtype | None] = None
    """The dtype its rows are given in, whatever the job's."""
    tf32: ClassVar[bool] = False
    """Whether its float32 products may round to TF32, whatever the job's."""
    compiled: ClassVar[bool] = False
    """Whether its first step takes long because it is compiled."""
    agreement: ClassVar[float] = AGREEMENT
    """Relative difference that the check allows."""

    def version(self) -> str:
        """What the report says beside its figures."""
        return f"written here, torch {torch.__version__}"

    def matrices(self, loss: str) -> float:
        """How many N x N matrices of the embeddings' dtype one step holds at its peak, by estimate; 0 if none."""
        return 0.0

    def does_not_fit(self, loss: str, n: int, dtype: torch.dtype, room: int | None) -> str | None:
        """Why it cannot be asked for this size on a device with so much memory; None if it can.

        Args:
            loss: a name of `batches.LOSSES`.
            n: rows.
            dtype: of the embeddings.
            room: bytes that one step may take; None where that is not bounded beforehand.
        """
        count = self.matrices(loss)
        needed = count * n * n * (self.given or dtype).itemsize
        if room is None or needed <= room:
            return None
        return f"needs about {needed / GIB:.0f} GiB ({count:g} N x N matrices), where {room / GIB:.0f} GiB are free"

    def refuses(self, loss: str, n: int) -> str | None:
        """Why it cannot be asked for this loss at this size; None if it can."""
        return None

    def rows_to_check(self, loss: str, n: int) -> int:
        """On how many of a batch's rows its float64 value is compared."""
        return min(n, 8192)

    def check_step(self, batch: Batch, temperature: float) -> Step:
        """What is checked in float64: the step itself, or where its kernels have no float64 the formula they follow."""
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


class OursTiled(Ours):
    """`pairproof.fast` in plain torch, where "auto" takes kernels of its own."""

    name, title, accelerator = TILED, "pairproof.fast, tiled", True

    def __init__(self) -> None:
        super().__init__("tiled")


class CrossEntropy(Implementation):
    """NT-Xent as one call of cross_entropy on the matrix of all similarities."""

    name = "cross_entropy"
    title = "cross_entropy, full matrix"
    losses: ClassVar[tuple[str, ...]] = ("nt_xent", "supcon", "pairwise_views")

    def matrices(self, loss: str) -> float:
        """As measured on a CPU at 4096 rows."""
        return 3.1

    def step(self, batch: Batch, temperature: float) -> Step:
        """Targets are the partners; the diagonal is excluded by -inf."""
        partners = batch.partners

        def loss(z: Tensor) -> Tensor:
            y = F.normalize(z, dim=1)
            logits = y @ y.T / temperature
            return F.cross_entropy(logits.fill_diagonal_(float("-inf")), partners)

        return loss


class CrossEntropyTf32(CrossEntropy):
    """The same on the rows in float32 with TF32 products, beside bfloat16: what one has without narrow embeddings."""

    name, title = "cross_entropy_tf32", "cross_entropy, float32 rows, TF32"
    losses: ClassVar[tuple[str, ...]] = ("nt_xent", "supcon")
    accelerator, dtypes, given, tf32 = True, ("bfloat16",), torch.float32, True


class CompiledCrossEntropy(CrossEntropy):
    """cross_entropy on the full matrix under torch.compile; for one loss alone, since the others' is the same code."""

    name, title = "cross_entropy_compiled", "cross_entropy, compiled"
    losses: ClassVar[tuple[str, ...]] = ("nt_xent",)
    accelerator, compiled = True, True

    @cached_property
    def function(self) -> Any:
        """One for every step, so that it is compiled once."""
        return torch.compile(_cross_entropy, dynamic=False)

    def step(self, batch: Batch, temperature: float) -> Step:
        """The compiled function."""
        function, partners = self.function, batch.partners

        def loss(z: Tensor) -> Tensor:
            found: Tensor = function(z, partners, temperature)
            return found

        return loss

    def check_step(self, batch: Batch, temperature: float) -> Step:
        """The same code, not compiled: compiling it once more for float64 would tell no more."""
        return lambda z: _cross_entropy(z, batch.partners, temperature)


def _cross_entropy(z: Tensor, partners: Tensor, temperature: float) -> Tensor:
    """Without writing in place, so that the compiler can fuse the exclusion of the diagonal."""
    y = F.normalize(z, dim=1)
    rows = torch.arange(len(z), device=z.device)
    logits = (y @ y.T / temperature).masked_fill(rows[:, None] == rows[None, :], float("-inf"))
    return F.cross_entropy(logits, partners)


class FlexAttention(Implementation):
    """NT-Xent by FlexAttention's logsumexp: attention of the rows over themselves, themselves excluded.

    What attention returns is thrown away, so the values are as narrow as its kernels take them, without a gradient.
    The gradient goes through the logsumexp alone, by queries and by keys; on a CPU there is none.
    """

    name, title, losses = "flex_attention", "FlexAttention's logsumexp, compiled", ("nt_xent",)
    accelerator, compiled = True, True

    width: ClassVar[int] = 16
    """Columns of the values: the fewest that a matrix product of its kernels takes."""
    block: ClassVar[int] = 128
    """Rows and columns of a block of its mask, by its own default."""

    def __init__(self) -> None:
        try:
            self.module: Any = importlib.import_module("torch.nn.attention.flex_attention")
        except ImportError as error:
            raise Unavailable(f"torch {torch.__version__} has no FlexAttention ({error})") from None
        request = getattr(self.module, "AuxRequest", None)
        # The older keyword is deprecated where there is the newer one.
        self.asked: dict[str, Any] = {"return_lse": True} if request is None else {"return_aux": request(lse=True)}

    @cached_property
    def function(self) -> Any:
        """One for every step, so that it is compiled once."""
        return torch.compile(self.module.flex_attention, dynamic=False)

    def version(self) -> str:
        """Torch's."""
        return f"torch {torch.__version__}"

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
            _, found = function(rows, rows, values, block_mask=mask, scale=1 / temperature, **self.asked)
            everyone = getattr(found, "lse", found)[0, 0]
            if z.requires_grad and torch.is_grad_enabled() and not everyone.requires_grad:
                raise Unavailable(f"FlexAttention of torch {torch.__version__} gives its logsumexp no gradient")
            wide = y.to(everyone.dtype)
            mean: Tensor = (everyone - (wide * wide[partners]).sum(dim=1) / temperature).mean()
            return mean

        return loss


def _not_itself(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Which pairs count, as FlexAttention asks."""
    return row != column


class MaskedLogsumexp(Implementation):
    """SupCon and pairwise NT-Xent by masks and logsumexp on the matrix of all similarities."""

    name = "masked_logsumexp"
    title = "masked logsumexp"
    losses = ("supcon", "pairwise_views", "pairwise_classes")

    def matrices(self, loss: str) -> float:
        """As measured on a CPU at 4096 rows."""
        return 5.3 if loss == "supcon" else 9.6

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
        from pairproof.conformance.implementations.base import Unavailable as NotLoaded
        from pairproof.conformance.implementations.supcontrast import SupContrast

        try:
            self.peer = SupContrast({}, "cpu")
        except NotLoaded as error:
            raise Unavailable(str(error)) from None

    def matrices(self, loss: str) -> float:
        """As measured on a CPU at 4096 rows."""
        return 8.1

    def does_not_fit(self, loss: str, n: int, dtype: torch.dtype, room: int | None) -> str | None:
        """By the size of float32: its masks are that, and what is multiplied with them becomes it."""
        return super().does_not_fit(loss, n, torch.promote_types(dtype, torch.float32), room)

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

    def matrices(self, loss: str) -> float:
        """As measured on a CPU at 4096 rows."""
        return 11.9


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

    def matrices(self, loss: str) -> float:
        """As measured on a CPU at 4096 rows: its matrices are of one tower by the other."""
        return 0.8

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

    def matrices(self, loss: str) -> float:
        """As measured on a CPU at 8192 rows."""
        return 3.2

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


class InfCl(Implementation):
    """Inf-CL (DAMO-NLP-SG/Inf-CLIP): Triton kernels that round float32 to TF32, whatever dtype they are given."""

    name, title, losses = "inf_cl", "Inf-CL", ("info_nce",)
    accelerator = True

    agreement = 1e-2
    """There is no float64 to check: what it computes is told from another loss, not from an inexact one."""

    widest: ClassVar[int] = 256
    """Columns that its kernels take at a time, by its own default."""

    def __init__(self) -> None:
        try:
            self.module: Any = importlib.import_module("inf_cl")
        except ImportError as error:
            raise Unavailable(f"Inf-CL is not installed ({error}): pip install inf-cl") from None

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
    """The implementations of a loss that are measured on a device in a dtype, ours first."""
    peers = {name: kind for name, kind in PEERS.items() if loss in kind.losses and dtype in kind.dtypes}
    return [OURS, *(name for name, kind in peers.items() if device != "cpu" or not kind.accelerator)]


def load(name: str, backend: str = "auto") -> Implementation:
    """One implementation by name.

    Raises:
        Unavailable: it is not installed.
    """
    return Ours(backend) if name == OURS else PEERS[name]()
