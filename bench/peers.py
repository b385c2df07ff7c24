"""The implementations that are measured: `pairproof.fast`, plain torch and the peers.

`pairproof.conformance.implementations` loads all packages except Inf-CL. On a GPU, there are two compiled peers: plain
torch, and a loss from the logsumexp of FlexAttention.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pairproof import __version__, fast

from . import plain
from .forms import FORMS, RECIPES, WAYS, Form, Step

Make = Callable[..., Step]
"""Makes a step from a loaded implementation, a `Form` and a temperature, or raises `Unavailable`."""

OURS = "pairproof"
PLAIN = "plain"
TILED = "pairproof_tiled"
CAPTURED = "pairproof_captured"
"""`pairproof.fast` on a GPU: with the backend "tiled", and with a step replayed as a CUDA graph."""

SLOWEST = "pml_ntxent"
"""The peer that needs several seconds per step."""

GIB = 1 << 30
LIMIT = 8 * GIB
"""Maximum memory of one step in bytes, as estimated by `Implementation.growth`; the float64 check takes twice that."""


class Unavailable(Exception):
    """An implementation cannot be measured; the message is the reason."""


@dataclass(frozen=True)
class Implementation:
    """One implementation of some of the forms.

    Attributes:
        name: name in the report.
        title: name in tables.
        forms: keys of `forms.RECIPES`.
        make: makes its step.
        load: returns the first argument of ``make``, such as an imported package.
        version: returns the version for the report, from the result of ``load``.
        agreement: largest relative error of the float64 value. Above it, the implementation computes another loss.
        rows_to_check: maximum number of rows of the float64 check, by form.
        matrices: number of N x N matrices at the peak of one step, or a dict by loss. Measured on a CPU at 4096 rows.
        entry_bytes: minimum size of an entry of these matrices, in bytes.
        growth: for forms whose memory grows faster than N^2, (factor, power) of the peak: factor * N^power bytes.
        accelerator: whether it is measured on a GPU only.
        tf32: whether it multiplies float32 rows in TF32; it is then measured in the bfloat16 jobs only.
        compiled: whether the timed step is compiled, so that the first call is slow. The float64 check is not compiled.
        loaded: the result of ``load``.
    """

    name: str
    title: str
    forms: tuple[str, ...]
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

    def step(self, form: Form, temperature: float) -> Step:
        """Return the step that is timed."""
        return self.make(self.loaded, form, temperature, **({"compiled": True} if self.compiled else {}))

    def check_step(self, form: Form, temperature: float) -> Step:
        """Return the step that is checked in float64."""
        return self.make(self.loaded, form, temperature)

    def check_memory(self, form: str, n: int, dtype: torch.dtype, available: int | None) -> None:
        """Check that the estimated memory of one step is available.

        Args:
            form: a key of `forms.RECIPES`.
            n: number of rows.
            dtype: dtype of the embeddings.
            available: number of bytes that one step may take; None if it is not known.

        Raises:
            Unavailable: the step does not fit.
        """
        factor, power = self.growth.get(form, (0.0, 0))
        if factor * n**power > LIMIT:
            raise Unavailable(f"its memory grows as {factor:g} N^{power} bytes, here beyond {LIMIT / GIB:.0f} GiB")
        count = self.matrices if isinstance(self.matrices, float) else self.matrices[RECIPES[form].loss]
        needed = count * n * n * max(dtype.itemsize, self.entry_bytes)
        if available is not None and needed > available:
            needs = f"needs about {needed / GIB:.0f} GiB ({count:g} N x N matrices)"
            raise Unavailable(f"{needs}, where {available / GIB:.0f} GiB are free")


PEERS: dict[str, Implementation] = {}
"""All implementations by name: `pairproof.fast`, plain torch, then the peers."""

NT_XENT, SUPCON = "nt_xent, partners", "supcon, two views"
PAIRWISE, PAIRWISE_CLASSES = "nt_xent_pairwise, two views", "nt_xent_pairwise, mean over pairs"
MASKED = "supcon, mask classes"
ONE, BOTH, QUEUE = "info_nce, one direction", "info_nce, both directions", "info_nce, queue of 4096"
SIGMOID = "sigmoid, matching rows"
TWO_VIEW = (NT_XENT, SUPCON)


def _entry(name: str, title: str, forms: tuple[str, ...], **facts: Any) -> Callable[[Make], Make]:
    """Register a function as ``make`` of an implementation; the arguments are attributes of `Implementation`."""

    def enter(make: Make) -> Make:
        PEERS[name] = Implementation(name, title, forms, make, **facts)
        return make

    return enter


def _ours(backend: str) -> dict[str, Any]:
    return {"load": lambda: backend, "version": lambda backend: f"{__version__}, backend {backend}"}


def _adapted(adapter: str) -> dict[str, Any]:
    """Return ``load`` and ``version`` for a package with an adapter, given as module:class."""

    def load() -> Any:
        # Imported only in processes that need it.
        from pairproof.conformance.implementations.base import Unavailable as NotLoaded

        try:
            return pkgutil.resolve_name(f"pairproof.conformance.implementations.{adapter}")({}, "cpu")
        except NotLoaded as error:
            raise Unavailable(str(error)) from None

    return {"load": load, "version": lambda peer: str(peer.version())}


PLAIN_MATRICES = {"nt_xent": 3.1, "info_nce": 3.1, "supcon": 5.3, "supcon_in": 9.6, "supcon_epsilon": 9.6}
PLAIN_MATRICES |= {"nt_xent_pairwise": 9.6, "nt_bxent": 9.6, "sigmoid": 6.0, "hard_negative": 9.6}
PLAIN_MATRICES |= {"multiple_negatives_ranking": 9.6, "dclw": 6.0}


@_entry(CAPTURED, "captured", ())
@_entry(TILED, "tiled", tuple(FORMS), accelerator=True, **_ours("tiled"))
@_entry(OURS, "ours", tuple(RECIPES), **_ours("auto"))
def ours(backend: str, form: Form, temperature: float, **more: Any) -> Step:
    """Call the public function of the loss."""
    options = {} if backend == "auto" else {"backend": backend}
    return form.step(getattr(fast, f"{form.loss}_loss"), temperature, **options, **more)


@_entry(PLAIN, "plain", tuple(RECIPES), matrices=PLAIN_MATRICES)
def plain_torch(_: None, form: Form, temperature: float) -> Step:
    """Call the loss of `bench.plain`."""
    return form.step(getattr(plain, form.loss), temperature)


TF32: dict[str, Any] = {"accelerator": True, "tf32": True, "entry_bytes": 4}


@_entry("cross_entropy_tf32", "CE TF32", TWO_VIEW, matrices=3.1, **TF32)
@_entry("cross_entropy", "crossent.", (SUPCON, PAIRWISE), matrices=3.1)
def cross_entropy(_: None, form: Form, temperature: float) -> Step:
    """Compute NT-Xent as cross-entropy over the partners. With two rows per class, SupCon is the same loss."""
    return partial(plain.nt_xent, partners=fast.stacked_partners(form.n, form.labels.device), temperature=temperature)


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=False)


def _cross_entropy_out_of_place(z: Tensor, partners: Tensor, temperature: float) -> Tensor:
    """Compute `plain.nt_xent` so that a compiler can fuse the mask."""
    rows, y = torch.arange(len(z), device=z.device), F.normalize(z, dim=1)
    logits = (y @ y.T / temperature).masked_fill(rows[:, None] == rows[None, :], float("-inf"))
    return F.cross_entropy(logits, partners)


COMPILED: dict[str, Any] = {"accelerator": True, "compiled": True}


@_entry("cross_entropy_compiled", "compiled", (NT_XENT,), matrices=3.1, **COMPILED)
def _fused(_: None, form: Form, temperature: float, compiled: bool = False) -> Step:
    function = _compiled(_cross_entropy_out_of_place) if compiled else _cross_entropy_out_of_place
    return lambda z: function(z, form.given["partners"], temperature)


FLEX_WIDTH = 16
"""Number of columns of the attention's values, the minimum of FlexAttention's kernels."""
FLEX_BLOCK = 128
"""Block size of FlexAttention's mask, the default of the library."""


def different_rows(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Return whether FlexAttention keeps a pair."""
    return row != column


def mask_without_diagonal(flex: Any, n: int, device: torch.device) -> Any:
    """Return FlexAttention's mask that excludes the diagonal.

    The library would build the mask from N x N booleans, 64 GiB at 262144 rows. If the rows fill two or more blocks
    exactly, the mask is built here block by block.
    """
    count, rest = divmod(n, FLEX_BLOCK)
    if rest or count == 1:
        return flex.create_block_mask(different_rows, None, None, n, n, device=str(device))
    one = torch.ones(1, 1, count, dtype=torch.int32, device=device)
    # Row r of blocks lists block r, which contains the diagonal, then the others.
    listed = torch.arange(count, dtype=torch.int32, device=device)
    blocks = ((listed[:, None] + listed[None, :]) % count)[None, None]
    others = blocks.roll(-1, dims=-1).contiguous()
    return flex.BlockMask.from_kv_blocks(
        one, blocks.contiguous(), (count - 1) * one, others, FLEX_BLOCK, different_rows
    )


FLEX = {"load": lambda: importlib.import_module("torch.nn.attention.flex_attention"), **COMPILED}


@_entry("flex_attention", "flex", (NT_XENT,), **FLEX)
def flex_attention(flex: Any, form: Form, temperature: float, compiled: bool = False) -> Step:
    """NT-Xent with the logsumexp of FlexAttention: attention of each row over all other rows.

    The attention's output is not used, so its values are narrow and have no gradient.
    """
    device, partners = form.labels.device, form.given["partners"]
    if compiled and device.type == "cpu":
        raise Unavailable("FlexAttention has no backward on a CPU")
    function = _compiled(flex.flex_attention) if compiled else flex.flex_attention
    mask = mask_without_diagonal(flex, form.n, device)
    # return_lse is deprecated in versions of torch with return_aux.
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


# The masks of SupContrast are float32, and so are products with them.
SUPCONTRAST = {"matrices": 8.1, "entry_bytes": 4, **_adapted("supcontrast:SupContrast")}


SUPCONTRAST_FORMS = (NT_XENT, *(f"supcon, {way}" for way in WAYS["supcon_epsilon"]))  # without references


@_entry("supcontrast", "original", SUPCONTRAST_FORMS, **SUPCONTRAST)
def _supcontrast(peer: Any, form: Form, temperature: float) -> Step:
    """Call the code with one view ``[N, 1, D]`` and labels or a mask; for NT-Xent, with two views ``[B, 2, D]``."""
    code = peer.loss(temperature=temperature, base_temperature=temperature)
    if form.name == NT_XENT:
        return lambda z: code(torch.stack(F.normalize(z, dim=1).chunk(2), dim=1))
    given = {"labels": form.given.get("labels"), "mask": form.given.get("positives")}
    return lambda z: code(F.normalize(z, dim=1)[:, None], **given)


PML = _adapted("pml:PytorchMetricLearning")
GROWTH = {NT_XENT: (17, 3), PAIRWISE: (17, 3), PAIRWISE_CLASSES: (1.5, 4)}
"""Growth of PML's NTXentLoss, whose matrix has a row for each positive pair."""
PML_NTXENT: dict[str, Any] = {"growth": GROWTH, "rows_to_check": {PAIRWISE_CLASSES: 128}, **PML}
PML_FORMS = (SUPCON, "supcon, 10 classes", "supcon, 8 per class", "supcon, references")


@_entry(SLOWEST, "PML", tuple(GROWTH), **PML_NTXENT)
@_entry("pml", "PML", PML_FORMS, matrices=11.9, **PML)
def _pml(peer: Any, form: Form, temperature: float) -> Step:
    losses = peer.package.losses
    loss = (losses.SupConLoss if form.loss == "supcon" else losses.NTXentLoss)(temperature=temperature)
    labels = form.given.get("labels", form.labels)
    if "ref_labels" in form.given:
        return lambda z, references: loss(z, labels, ref_emb=references, ref_labels=form.given["ref_labels"])
    return lambda z: loss(z, labels)


@_entry("info_nce_pytorch", "info-nce", (ONE, BOTH, QUEUE), matrices=1.6, **_adapted("info_nce_pytorch:InfoNCEPytorch"))
def _info_nce_pytorch(peer: Any, form: Form, temperature: float) -> Step:
    code = peer.package.InfoNCE(temperature=temperature, negative_mode="unpaired")
    if form.name == BOTH:
        return lambda a, b: (code(a, b) + code(b, a)) / 2
    return lambda a, b: code(a, b, form.given.get("negatives"))


@_entry("open_clip", "open_clip", (BOTH, SIGMOID), matrices=6.0, **_adapted("open_clip:OpenClip"))
def _open_clip(peer: Any, form: Form, temperature: float) -> Step:
    code, options = peer.losses[form.loss](), (1 / temperature, *((-10.0,) if form.loss == "sigmoid" else ()))
    return lambda a, b: code(F.normalize(a, dim=1), F.normalize(b, dim=1), *options)


INF_CL_WIDTH = 256
"""Number of columns that the kernels of Inf-CL process at a time by default."""


def _load_inf_cl() -> Any:
    try:
        return importlib.import_module("inf_cl")
    except ImportError as error:
        raise Unavailable(f"Inf-CL is not installed ({error}): pip install inf-cl") from None


INF_CL: dict[str, Any] = {"load": _load_inf_cl, "version": lambda _: f"inf-cl {importlib.metadata.version('inf-cl')}"}


# Inf-CL has no float64, so its value is only roughly right.
@_entry("inf_cl", "Inf-CL", (ONE,), agreement=1e-2, accelerator=True, **INF_CL)
def _inf_cl(module: Any, form: Form, temperature: float) -> Step:
    """Call the single-device function of DAMO-NLP-SG/Inf-CLIP. Its kernels use TF32 for every dtype."""
    columns = form.inputs[0].shape[1]
    width = min(columns, INF_CL_WIDTH)
    if form.inputs[0].device.type != "cuda":
        raise Unavailable("Inf-CL's kernels need a CUDA device")
    if columns % width or width & (width - 1):
        raise Unavailable(f"Inf-CL's kernels do not take {columns} columns")

    def loss(a: Tensor, b: Tensor) -> Tensor:
        a, b = F.normalize(a, dim=1), F.normalize(b, dim=1)
        found: Tensor = module.cal_flash_loss(a, b, scale=1 / temperature, head_dim=width)
        return found.mean()

    return loss


@_entry("lightly", "lightly", (NT_XENT, QUEUE), matrices=3.2, **_adapted("lightly:Lightly"))
def _lightly(peer: Any, form: Form, temperature: float) -> Step:
    """With a queue, call the loss of two towers with the queue as memory bank; else the loss of two views."""
    queue = form.given.get("negatives")
    code = peer.loss(temperature=temperature, memory_bank_size=0 if queue is None else tuple(queue.shape))
    if queue is None:
        return lambda z: code(*z.chunk(2))
    code.memory_bank.bank = F.normalize(queue, dim=1)
    return lambda a, b: code(a, b)


def names_for(form: str, device: str = "cpu", dtype: str = "float32") -> list[str]:
    """Return the implementations of a form that are measured on a device in a dtype, `pairproof.fast` first."""
    peers = [peer for peer in PEERS.values() if form in peer.forms and not (peer.tf32 and dtype != "bfloat16")]
    return [peer.name for peer in peers if device != "cpu" or not peer.accelerator]


def load(name: str, backend: str = "auto") -> Implementation:
    """Load an implementation by name; the backend applies to `OURS`.

    Raises:
        Unavailable: the implementation is not installed.
    """
    return replace(PEERS[name], loaded=backend if name == OURS else PEERS[name].load())
