"""The implementations that are measured, `pairproof.fast` and its peers, as functions from embeddings to a scalar loss.

Packages are loaded by the adapters of `pairproof.conformance.implementations`. Two peers are defined here, as users
write them without a library: cross_entropy on the full matrix, and the masked logsumexp. On a GPU, two compiled peers
are measured as well: the first of these, and the logsumexp that FlexAttention returns.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from pairproof import __version__, fast

from .batches import LOSSES, Batch

Step = Callable[[Tensor], Tensor]
"""From embeddings ``[N, D]`` to the loss, a scalar."""

Make = Callable[..., Step]
"""Makes a step from what an implementation loads, a batch and a temperature.

It raises `Unavailable` if the implementation does not have the loss.
"""

OURS = "pairproof"
TILED = "pairproof_tiled"
CAPTURED = "pairproof_captured"
"""Further ways to run `pairproof.fast` on a GPU: tiles in plain torch, and a step replayed as a CUDA graph."""

SLOWEST = "pml_ntxent"
"""The peer that needs several seconds per step."""

GIB = 1 << 30
LIMIT = 8 * GIB
"""Maximum memory of one step in bytes, as estimated from its measured growth; the float64 check takes twice that."""


class Unavailable(Exception):
    """An implementation cannot be measured; the message is the reason."""


@dataclass(frozen=True)
class Implementation:
    """One implementation of some of the losses.

    Attributes:
        name: name in the report.
        title: name in tables and the plot.
        colour: colour of its line in the plot.
        losses: names of `batches.LOSSES`.
        make: makes its step.
        load: returns the first argument of ``make``, such as an imported package.
        version: returns the version for the report, from the result of ``load``.
        agreement: relative difference of float64 values above which it computes another loss.
        rows_to_check: maximum number of rows whose float64 value is compared, by loss.
        matrices: number of N x N matrices at the peak of one step, as measured on a CPU at 4096 rows; or by loss.
        entry_bytes: minimum size of an entry of these matrices in bytes, if larger than that of the embeddings.
        growth: factor and power of N of its peak in bytes, by loss, if it grows faster than N x N matrices.
        accelerator: whether it is measured on a GPU only.
        tf32: whether it is measured in the bfloat16 jobs only, with float32 rows and TF32 products.
        compiled: whether the timed step is compiled; the first call is then slow. The float64 check runs the same code
            without compilation.
        loaded: the result of ``load``.
    """

    name: str
    title: str
    colour: str
    losses: tuple[str, ...]
    make: Make
    load: Callable[[], Any] = lambda: None
    version: Callable[[Any], str] = lambda _: f"written here, torch {torch.__version__}"
    agreement: float = 1e-9
    rows_to_check: Mapping[str, int] = field(default_factory=dict)
    matrices: float | Mapping[str, float] = 0.0
    entry_bytes: int = 0
    growth: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    accelerator: bool = False
    tf32: bool = False
    compiled: bool = False
    loaded: Any = None

    def step(self, batch: Batch, temperature: float) -> Step:
        """Return the step that is timed."""
        return self.make(self.loaded, batch, temperature, **({"compiled": True} if self.compiled else {}))

    def check_step(self, batch: Batch, temperature: float) -> Step:
        """Return the step that is checked in float64."""
        return self.make(self.loaded, batch, temperature)

    def check_memory(self, loss: str, n: int, dtype: torch.dtype, available: int | None) -> None:
        """Check that one step fits into memory, by an estimate.

        Args:
            loss: a name of `batches.LOSSES`.
            n: number of rows.
            dtype: dtype of the embeddings.
            available: maximum memory of one step in bytes; None if it is not known.

        Raises:
            Unavailable: the step does not fit.
        """
        factor, power = self.growth.get(loss, (0.0, 0))
        if factor * n**power > LIMIT:
            raise Unavailable(f"its memory grows as {factor:g} N^{power} bytes, here beyond {LIMIT / GIB:.0f} GiB")
        count = self.matrices if isinstance(self.matrices, float) else self.matrices[loss]
        needed = count * n * n * max(dtype.itemsize, self.entry_bytes)
        if available is not None and needed > available:
            needs = f"needs about {needed / GIB:.0f} GiB ({count:g} N x N matrices)"
            raise Unavailable(f"{needs}, where {available / GIB:.0f} GiB are free")


PEERS: dict[str, Implementation] = {}
"""All implementations by name, `pairproof.fast` first."""

TWO_VIEW = ("nt_xent", "supcon")


def _entry(name: str, title: str, colour: str, losses: tuple[str, ...], **facts: Any) -> Callable[[Make], Make]:
    """Register a function as ``make`` of an implementation; the arguments are attributes of `Implementation`."""

    def enter(make: Make) -> Make:
        PEERS[name] = Implementation(name, title, colour, losses, make, **facts)
        return make

    return enter


def _ours(backend: str) -> dict[str, Any]:
    return {"load": lambda: backend, "version": lambda backend: f"{__version__}, backend {backend}"}


def _adapted(adapter: str) -> dict[str, Any]:
    """Return ``load`` and ``version`` for a package that has an adapter, given as module:class."""

    def load() -> Any:
        # Import the adapters and their dependencies only in processes that need them.
        from pairproof.conformance.implementations.base import Unavailable as NotLoaded

        try:
            return pkgutil.resolve_name(f"pairproof.conformance.implementations.{adapter}")({}, "cpu")
        except NotLoaded as error:
            raise Unavailable(str(error)) from None

    return {"load": load, "version": lambda peer: str(peer.version())}


@_entry(CAPTURED, "pairproof.fast, captured as a graph", "#000000", ())
@_entry(TILED, "pairproof.fast, tiled", "#777777", tuple(LOSSES), accelerator=True, **_ours("tiled"))
@_entry(OURS, "pairproof.fast", "#000000", tuple(LOSSES), **_ours("auto"))
def ours(
    backend: str, batch: Batch, temperature: float, reduction: Literal["mean_pairs", "none"] = "mean_pairs"
) -> Step:
    """Call the public function of the loss; the reduction applies to the pairwise losses."""
    options: dict[str, Any] = {"temperature": temperature} | ({} if backend == "auto" else {"backend": backend})
    labels, partners = batch.labels, batch.partners
    if batch.loss == "nt_xent":
        return lambda z: fast.nt_xent_loss(z, partners, **options)
    if batch.loss == "supcon":
        return lambda z: fast.supcon_loss(z, labels, **options)
    if batch.loss == "info_nce":
        return lambda z: fast.info_nce_loss(*z.chunk(2), direction="a_to_b", **options)
    return lambda z: fast.nt_xent_pairwise_loss(z, labels, reduction=reduction, **options)


def _logits(z: Tensor, temperature: float) -> Tensor:
    y = F.normalize(z, dim=1)
    return y @ y.T / temperature


TF32: dict[str, Any] = {"accelerator": True, "tf32": True, "entry_bytes": 4}


@_entry("cross_entropy_tf32", "cross_entropy, float32 rows, TF32", "#004c78", TWO_VIEW, matrices=3.1, **TF32)
@_entry("cross_entropy", "cross_entropy, full matrix", "#0072b2", (*TWO_VIEW, "pairwise_views"), matrices=3.1)
def cross_entropy(_: None, batch: Batch, temperature: float) -> Step:
    """NT-Xent as cross-entropy on the matrix of all logits: the targets are the partners, the diagonal is -inf."""
    return lambda z: F.cross_entropy(_logits(z, temperature).fill_diagonal_(float("-inf")), batch.partners)


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=False)


def _cross_entropy_out_of_place(z: Tensor, partners: Tensor, temperature: float) -> Tensor:
    """Compute the same as `cross_entropy`, in a form that lets a compiler fuse the mask of the diagonal."""
    rows = torch.arange(len(z), device=z.device)
    logits = _logits(z, temperature).masked_fill(rows[:, None] == rows[None, :], float("-inf"))
    return F.cross_entropy(logits, partners)


COMPILED: dict[str, Any] = {"accelerator": True, "compiled": True}


@_entry("cross_entropy_compiled", "cross_entropy, compiled", "#6fb7e9", ("nt_xent",), matrices=3.1, **COMPILED)
def _fused(_: None, batch: Batch, temperature: float, compiled: bool = False) -> Step:
    function = _compiled(_cross_entropy_out_of_place) if compiled else _cross_entropy_out_of_place
    return lambda z: function(z, batch.partners, temperature)


FLEX_WIDTH = 16
"""Number of columns of the values: the minimum for matrix products in FlexAttention's kernels."""
FLEX_BLOCK = 128
"""Number of rows and columns of a block of its mask, the default of the library."""


def different_rows(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Return whether a pair counts, in the form that FlexAttention expects."""
    return row != column


def mask_without_diagonal(flex: Any, n: int, device: torch.device) -> Any:
    """Return FlexAttention's mask that excludes the diagonal. Only blocks on the diagonal evaluate single pairs.

    If the number of rows is a multiple of the block size, the mask is built block by block: the library would build
    it from N x N booleans, which take 64 GiB at 262144 rows.
    """
    count, rest = divmod(n, FLEX_BLOCK)
    if rest or count == 1:
        return flex.create_block_mask(different_rows, None, None, n, n, device=str(device))
    one = torch.ones(1, 1, count, dtype=torch.int32, device=device)
    # Row r lists r first, then the others in turn.
    listed = torch.arange(count, dtype=torch.int32, device=device)
    blocks = ((listed[:, None] + listed[None, :]) % count)[None, None]
    others = blocks.roll(-1, dims=-1).contiguous()
    return flex.BlockMask.from_kv_blocks(
        one, blocks.contiguous(), (count - 1) * one, others, FLEX_BLOCK, different_rows
    )


FLEX = {"load": lambda: importlib.import_module("torch.nn.attention.flex_attention"), **COMPILED}


@_entry("flex_attention", "FlexAttention's logsumexp, compiled", "#f0e442", ("nt_xent",), **FLEX)
def flex_attention(flex: Any, batch: Batch, temperature: float, compiled: bool = False) -> Step:
    """NT-Xent with the logsumexp of FlexAttention: attention of each row over all other rows.

    The output of the attention is not used, so the values have the minimum number of columns and no gradient. The
    gradient flows through the logsumexp to queries and keys. On a CPU, FlexAttention has no gradient.
    """
    if compiled and batch.embeddings.device.type == "cpu":
        raise Unavailable("FlexAttention has no backward on a CPU")
    function = _compiled(flex.flex_attention) if compiled else flex.flex_attention
    partners, mask = batch.partners, mask_without_diagonal(flex, batch.n, batch.embeddings.device)
    # The older keyword is deprecated where the newer one exists.
    newer = hasattr(flex, "AuxRequest")
    requested = {"return_aux": flex.AuxRequest(lse=True)} if newer else {"return_lse": True}

    def loss(z: Tensor) -> Tensor:
        y = F.normalize(z, dim=1)
        rows, values = y[None, None], y[None, None, :, :FLEX_WIDTH].detach()
        _, found = function(rows, rows, values, block_mask=mask, scale=1 / temperature, **requested)
        denominators: Tensor = getattr(found, "lse", found)[0, 0]
        if z.requires_grad and torch.is_grad_enabled() and not denominators.requires_grad:
            raise Unavailable(f"FlexAttention of torch {torch.__version__} gives its logsumexp no gradient")
        wide = y.to(denominators.dtype)
        return (denominators - (wide * wide[partners]).sum(dim=1) / temperature).mean()

    return loss


MASKED_LOSSES = {"supcon": 5.3, "pairwise_views": 9.6, "pairwise_classes": 9.6}


@_entry("masked_logsumexp", "masked logsumexp", "#009e73", tuple(MASKED_LOSSES), matrices=MASKED_LOSSES)
def masked_logsumexp(_: None, batch: Batch, temperature: float) -> Step:
    """SupCon and pairwise NT-Xent with masks on all logits, computed from the labels in every call as in training."""
    labels = batch.labels

    def loss(z: Tensor) -> Tensor:
        logits = _logits(z, temperature)
        same, diagonal = labels[:, None] == labels[None, :], torch.eye(len(z), dtype=torch.bool, device=z.device)
        positives = same & ~diagonal
        if batch.loss == "supcon":
            denominators = logits.masked_fill(diagonal, float("-inf")).logsumexp(dim=1)
            return (denominators - (logits * positives).sum(dim=1) / positives.sum(dim=1)).mean()
        negatives = logits.masked_fill(same, float("-inf")).logsumexp(dim=1, keepdim=True)
        return ((torch.logaddexp(logits, negatives) - logits) * positives).sum() / positives.sum()

    return loss


# Its masks are float32, and so are products with the masks.
SUPCONTRAST = {"matrices": 8.1, "entry_bytes": 4, **_adapted("supcontrast:SupContrast")}


@_entry("supcontrast", "original SupCon code", "#d55e00", TWO_VIEW, **SUPCONTRAST)
def _supcontrast(peer: Any, batch: Batch, temperature: float) -> Step:
    """Call the code with two normalised views ``[N/2, 2, D]``; for SupCon also with one label per item."""
    code = peer.loss(temperature=temperature, base_temperature=temperature)
    labels = batch.labels[: batch.n // 2] if batch.loss == "supcon" else None
    return lambda z: code(torch.stack(F.normalize(z, dim=1).chunk(2), dim=1), labels=labels)


PML = _adapted("pml:PytorchMetricLearning")
GROWTH = {"nt_xent": (17, 3), "pairwise_views": (17, 3), "pairwise_classes": (1.5, 4)}
"""Growth of PML's NTXentLoss, which makes a matrix with a row for each positive pair."""
NT_XENT: dict[str, Any] = {"growth": GROWTH, "rows_to_check": {"pairwise_classes": 128}, **PML}


@_entry(SLOWEST, "PML NTXentLoss", "#e69f00", tuple(GROWTH), **NT_XENT)
@_entry("pml", "PML SupConLoss", "#cc79a7", ("supcon",), matrices=11.9, **PML)
def _pml(peer: Any, batch: Batch, temperature: float) -> Step:
    losses = peer.package.losses
    loss = (losses.SupConLoss if batch.loss == "supcon" else losses.NTXentLoss)(temperature=temperature)
    return lambda z: loss(z, batch.labels)


INFO_NCE = _adapted("info_nce_pytorch:InfoNCEPytorch")


@_entry("info_nce_pytorch", "info-nce-pytorch", "#56b4e9", ("info_nce",), matrices=0.8, **INFO_NCE)
def _info_nce_pytorch(peer: Any, batch: Batch, temperature: float) -> Step:
    code = peer.package.InfoNCE(temperature=temperature)
    return lambda z: code(*z.chunk(2))


INF_CL_WIDTH = 256
"""Number of columns that the kernels of Inf-CL process at a time by default."""


def _load_inf_cl() -> Any:
    try:
        return importlib.import_module("inf_cl")
    except ImportError as error:
        raise Unavailable(f"Inf-CL is not installed ({error}): pip install inf-cl") from None


INF_CL: dict[str, Any] = {"load": _load_inf_cl, "version": lambda _: f"inf-cl {importlib.metadata.version('inf-cl')}"}


# It has no float64, so the check detects another loss but not an inexact one.
@_entry("inf_cl", "Inf-CL", "#8c564b", ("info_nce",), agreement=1e-2, accelerator=True, **INF_CL)
def _inf_cl(module: Any, batch: Batch, temperature: float) -> Step:
    """Call the function for one device of DAMO-NLP-SG/Inf-CLIP. Its Triton kernels use TF32 for every dtype."""
    columns = batch.embeddings.shape[1]
    width = min(columns, INF_CL_WIDTH)
    if batch.embeddings.device.type != "cuda":
        raise Unavailable("Inf-CL's kernels need a CUDA device")
    if columns % width or width & (width - 1):
        raise Unavailable(f"Inf-CL's kernels do not take {columns} columns")

    def loss(z: Tensor) -> Tensor:
        a, b = F.normalize(z, dim=1).chunk(2)
        found: Tensor = module.cal_flash_loss(a, b, scale=1 / temperature, head_dim=width)
        return found.mean()

    return loss


@_entry("lightly", "lightly NTXentLoss", "#999999", ("nt_xent",), matrices=3.2, **_adapted("lightly:Lightly"))
def _lightly(peer: Any, batch: Batch, temperature: float) -> Step:
    code = peer.loss(temperature=temperature)
    return lambda z: code(*z.chunk(2))


def names_for(loss: str, device: str = "cpu", dtype: str = "float32") -> list[str]:
    """Return the implementations of a loss that are measured on a device in a dtype, `pairproof.fast` first."""
    peers = [peer for peer in PEERS.values() if loss in peer.losses and not (peer.tf32 and dtype != "bfloat16")]
    return [peer.name for peer in peers if device != "cpu" or not peer.accelerator]


def load(name: str, backend: str = "auto") -> Implementation:
    """Load an implementation by name; the backend applies to `pairproof.fast`.

    Raises:
        Unavailable: the implementation is not installed.
    """
    return replace(PEERS[name], loaded=backend if name == OURS else PEERS[name].load())
