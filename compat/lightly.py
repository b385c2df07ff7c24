"""``NTXentLoss``, ``DCLLoss`` and ``DCLWLoss`` of lightly, with their signatures, defaults and peculiarities.

A batch of n items has 2n normalised rows: the first views, then the second views. Let s_ij be the cosine of rows i and
j divided by the temperature, and p the other view of row i's item. The loss of row i is

    NTXentLoss                     log(sum over j != i of e^s_ij) - s_ip
    NTXentLoss with a memory bank  log(e^s_ip + sum over the bank of e^s_ij) - s_ip
    DCLLoss                        log(sum over j != i, p of e^s_ij) - w_i s_ip

``weight_fn`` returns the weights w_i; they are 1 without it. The loss is the mean over the rows; with a memory bank,
over the first views only. With ``gather_distributed``, rows are contrasted with the rows of all processes, and each
process returns the mean over its own rows.

Sources: ``lightly/loss/ntx_ent_loss.py``, ``lightly/loss/dcl_loss.py`` and ``lightly/models/modules/memory_bank.py`` of
lightly-ai/lightly at commit e8d317f, and lightly 1.6.0.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as torch_distributed

from ..fast.distributed import gather_rows
from ..fast.engine import (
    Batch,
    Denominator,
    Policy,
    References,
    Rule,
    Similarity,
    Targets,
    anchor_values,
    loss_of,
    measure,
)
from ..fast.engine.device import autocast, may_read
from .evaluation import EvaluatedBy, large, suits_engine

BareSize = Literal["infer", "error"]
WeightFunction = Callable[[Tensor, Tensor], Tensor]

SMALLEST_TEMPERATURE = 1e-8
"""``NTXentLoss`` refuses temperatures of a smaller magnitude."""
SMALLEST_NORM = 1e-12
"""`F.normalize` divides rows of a smaller norm by this number."""
LEAST_PAIRS = 2**18
"""Number of pairs (anchor, row of the memory bank) from which the engine is faster on a CPU."""
LARGEST_NORM = {torch.float64: 1e150, torch.float32: 1e18, torch.bfloat16: 1e18, torch.float16: 6e4}
"""Up to this norm, `F.normalize` computes the norm without overflow."""


def _world() -> tuple[int, int]:
    """Return the rank and the number of processes; without a process group, 0 and 1."""
    if not (torch_distributed.is_available() and torch_distributed.is_initialized()):
        return 0, 1
    return torch_distributed.get_rank(), torch_distributed.get_world_size()


def negative_mises_fisher_weights(out0: Tensor, out1: Tensor, sigma: float = 0.5) -> Tensor:
    """Return the weights of DCLW over n items, without a gradient: 2 - n softmax(out0_i . out1_i / sigma).

    Example:
        >>> import torch
        >>> from pairproof.compat.lightly import negative_mises_fisher_weights
        >>> z = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> negative_mises_fisher_weights(z, z)
        tensor([1., 1.])

    Args:
        out0: ``[n, D]``, the first views.
        out1: ``[n, D]``, the second views.
        sigma: what the dot products are divided by.

    Returns:
        ``[n]``.
    """
    products = (out0.detach() * out1.detach()).sum(1)
    return 2 - out0.shape[0] * torch.softmax(products / sigma, dim=0)


class MemoryBankModule(nn.Module):
    """``MemoryBankModule`` of lightly: a queue of rows, in which new rows replace the oldest.

    A batch that reaches the end of the bank is cut off there, and the next batch starts at the first row.

    Example:
        >>> import torch
        >>> from pairproof.compat.lightly import MemoryBankModule
        >>> bank = MemoryBankModule(size=(3, 2), feature_dim_first=False)
        >>> _, before = bank(torch.ones(2, 2), update=True)
        >>> bank.bank[:2].tolist()
        [[1.0, 1.0], [1.0, 1.0]]

    Args:
        size: the number of rows and their dimension, such as (65536, 128), or 0 for no bank. The rows are random unit
            vectors at first.
        gather_distributed: whether the rows of all processes are stored.
        feature_dim_first: True: the bank is returned as ``[D, size]``; False: as ``[size, D]``.
        bare_size: what a size without a dimension does. "infer": take the dimension of the first batch, and warn if the
            size is an int, as in lightly at commit e8d317f. "error": raise a ValueError, as in lightly 1.6.0.

    Raises:
        ValueError: a size is negative or, with ``bare_size="error"``, has no dimension or more than one.
    """

    bank: Tensor
    bank_ptr: Tensor

    def __init__(
        self,
        size: int | Sequence[int] = 65536,
        gather_distributed: bool = False,
        feature_dim_first: bool = True,
        *,
        bare_size: BareSize = "infer",
    ) -> None:
        super().__init__()
        if bare_size not in ("infer", "error"):
            raise ValueError(f"bare_size: expected one of infer, error, got {bare_size!r}")
        sizes = (size,) if isinstance(size, int) else tuple(size)
        if any(entry < 0 for entry in sizes):
            raise ValueError(f"Illegal memory bank size {size}, all entries must be non-negative.")
        if bare_size == "error" and sizes != (0,) and len(sizes) != 2:
            raise ValueError(f"Illegal memory bank size {size}, expected 0 or the number of rows and their dimension.")
        self.size = sizes
        self.gather_distributed = gather_distributed
        self.feature_dim_first = feature_dim_first
        self.register_buffer("bank", torch.empty(sizes, dtype=torch.float), persistent=False)
        self.register_buffer("bank_ptr", torch.empty(1, dtype=torch.long), persistent=False)
        if isinstance(size, int) and size > 0:
            message = (
                f"Memory bank size 'size={size}' does not specify feature dimension. It is recommended to set the"
                " feature dimension with 'size=(n, dim)' when creating the memory bank. Distributed training might"
                " fail if the feature dimension is not set."
            )
            warnings.warn(message, UserWarning, stacklevel=2)
        elif len(sizes) > 1:
            self._fill(sizes)

    def forward(
        self, output: Tensor, labels: Tensor | None = None, update: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output and a copy of the bank as it was before this call.

        Args:
            output: ``[n, D]``.
            labels: ignored.
            update: whether the output is stored.

        Returns:
            The output, and the bank ``[D, size]`` or ``[size, D]``, or None without a bank.
        """
        if self.size[0] == 0:
            return output, None
        if self.bank.ndim == 1:
            self._fill((*self.size, *output.shape[1:]))
        bank = self.bank.clone().detach()
        if update:
            self._store(output)
        return output, bank.transpose(0, -1) if self.feature_dim_first else bank

    @torch.no_grad()
    def _fill(self, size: tuple[int, ...]) -> None:
        # lightly draws the bank in the same way, so the same seed gives the same bank.
        self.bank = F.normalize(torch.randn(size).type_as(self.bank), dim=-1)
        self.bank_ptr = torch.zeros(1).type_as(self.bank_ptr)

    @torch.no_grad()
    def _store(self, rows: Tensor) -> None:
        if self.gather_distributed and _world()[1] > 1:
            rows = gather_rows(rows, group="world")
        start = int(self.bank_ptr)
        end = min(start + len(rows), self.size[0])
        self.bank[start:end] = rows[: end - start].detach()
        self.bank_ptr[0] = end % self.size[0]


class _Rows(NamedTuple):
    """The rows of both views, and the columns that they are contrasted with.

    Attributes:
        rows: ``[2n, D]``, the first views before the second views.
        columns: the rows themselves, or those of all W processes, ``[W * 2n, D]``.
        own: int64 ``[2n]``, the column of the row itself.
        partners: int64 ``[2n]``, the column of the positive.
        normalised: whether rows and columns are normalised.
    """

    rows: Tensor
    columns: Tensor
    own: Tensor
    partners: Tensor
    normalised: bool


class _TwoViews(nn.Module):
    def __init__(self, temperature: float | Tensor, gather_distributed: bool) -> None:
        super().__init__()
        if gather_distributed and not torch_distributed.is_available():
            raise ValueError("gather_distributed: expected a torch with torch.distributed, which is not available")
        self.temperature = temperature
        self.gather_distributed = gather_distributed
        self.evaluated_by: EvaluatedBy = ""

    def _rows(self, out0: Tensor, out1: Tensor, *, normalised: bool = False) -> _Rows:
        """Concatenate the views ``[n, D]``, and gather the rows of all processes if ``gather_distributed`` is set."""
        rows = torch.cat((out0, out1))
        own = torch.arange(len(rows), device=rows.device)
        partners = own.roll(len(out0))
        rank, processes = _world() if self.gather_distributed else (0, 1)
        if processes == 1:
            return _Rows(rows, rows, own, partners, normalised)
        rows = rows if normalised else F.normalize(rows, dim=1)
        columns, first = gather_rows(rows, group="world"), rank * len(rows)
        if len(columns) != processes * len(rows):
            got = f"got {len(out0)} of {len(columns) // 2} in all"
            raise ValueError(f"out0: expected the same number of rows in each of the {processes} processes, {got}")
        return _Rows(rows, columns, own + first, partners + first, normalised=True)

    def _mean(self, given: _Rows, denominator: Denominator) -> Tensor:
        """Return the mean loss over the rows, with weights 1."""
        loss = self._by_engine(given, denominator)
        self.evaluated_by = "plain" if loss is None else "engine"
        return _plain(given, denominator, self.temperature).mean() if loss is None else loss

    def _by_engine(self, given: _Rows, denominator: Denominator) -> Tensor | None:
        """Return the mean, or None if the engine does not support the configuration or the values."""
        rows, columns, normalised = given.rows, given.columns, given.normalised
        if not suits_engine(rows, self.temperature):
            return None
        if denominator == "only_negatives" and len(columns) == 2:
            return None  # without negatives, lightly's loss is -inf
        references = References() if columns is rows else References(columns, given.own)
        similarity: Similarity = "dot"
        sizes = measure(rows) if may_read(rows) else None
        if sizes is not None and not sizes.high < math.inf:
            return None
        if not normalised:
            # The engine normalises the rows, unless `F.normalize` would clamp a norm or overflow.
            if sizes is not None and sizes.low > SMALLEST_NORM and sizes.high < LARGEST_NORM[rows.dtype]:
                similarity = "cosine"
            else:
                rows, sizes = F.normalize(rows, dim=1), None
        rule = Rule("out", similarity, self.temperature, denominator)
        batch = Batch(rows, Targets("partners", given.partners), rule, references, sizes=sizes)
        return _as_lightly(loss_of(batch, Policy("mean", None), "auto"), given.rows)


def _plain(given: _Rows, denominator: Denominator, temperature: float | Tensor) -> Tensor:
    """Return the losses ``[2n]`` of the rows, with weights 1, from the matrix of all pairs."""
    rows, columns = given.rows, given.columns
    if not given.normalised:
        rows = columns = F.normalize(rows, dim=1)
    positives = (rows * columns.index_select(0, given.partners)).sum(1) / temperature
    logits = rows @ columns.T / temperature
    logits = logits.scatter_(1, given.own[:, None], -math.inf)
    if denominator == "only_negatives":
        logits = logits[:, :0] if len(columns) == 2 else logits.scatter_(1, given.partners[:, None], -math.inf)
    return logits.logsumexp(1) - positives


def _as_lightly(loss: Tensor, rows: Tensor) -> Tensor:
    """Convert a loss to the dtype that lightly returns."""
    return loss if autocast(rows) else loss.to(rows.dtype)


def _check_views(out0: Tensor, out1: Tensor) -> None:
    if out0.ndim != 2 or out0.shape != out1.shape:
        got = f"got shapes {list(out0.shape)} and {list(out1.shape)}"
        raise ValueError(f"out0: expected the first views, shape [n, D], and out1 of the same shape, {got}")
    if out0.dtype != out1.dtype and not autocast(out0):
        raise RuntimeError(f"out1: expected the dtype of out0, {out0.dtype}, got {out1.dtype}")


class NTXentLoss(_TwoViews):
    """``NTXentLoss`` of lightly: SimCLR or, with a memory bank, MoCo.

    Example:
        >>> import torch
        >>> from pairproof.compat.lightly import NTXentLoss
        >>> loss_function = NTXentLoss(temperature=0.5)
        >>> loss = loss_function(torch.tensor([[1.0, 0.0], [0.8, 0.6]]), torch.tensor([[0.0, 1.0], [-0.6, 0.8]]))
        >>> print(f"{loss:.4f}")
        2.0302
        >>> loss_function.evaluated_by
        'engine'

    Args:
        temperature: what cosines are divided by: a number, which may be negative, or a tensor.
        memory_bank_size: the number of rows of the memory bank and their dimension, or 0 for none; see
            `MemoryBankModule`.
        gather_distributed: whether the rows of all processes are negatives or, with a memory bank, are stored in it.
            All processes must have the same number of rows.
        bare_size: see `MemoryBankModule`.

    Attributes:
        memory_bank: a `MemoryBankModule`. It stores the second views if the first views require a gradient.
        evaluated_by: "engine" or "plain", for the last call; see `pairproof.compat`.

    Raises:
        ValueError: the temperature is below 1e-8 in magnitude, the memory bank size is invalid, or torch.distributed is
            not available for ``gather_distributed``.

    Source:
        lightly-ai/lightly at commit e8d317f, ``lightly/loss/ntx_ent_loss.py``; the same in lightly 1.6.0.
    """

    def __init__(
        self,
        temperature: float | Tensor = 0.5,
        memory_bank_size: int | Sequence[int] = 0,
        gather_distributed: bool = False,
        *,
        bare_size: BareSize = "infer",
    ) -> None:
        super().__init__(temperature, gather_distributed)
        if -SMALLEST_TEMPERATURE < temperature < SMALLEST_TEMPERATURE:
            raise ValueError(f"Illegal temperature: abs({temperature}) < 1e-8")
        self.memory_bank = MemoryBankModule(memory_bank_size, gather_distributed, bare_size=bare_size)

    def forward(self, out0: Tensor, out1: Tensor) -> Tensor:
        """Return the mean loss over the rows or, with a memory bank, over the first views.

        Args:
            out0: ``[n, D]``, the first views.
            out1: ``[n, D]``, the second views.

        Raises:
            ValueError: the views are not matrices of the same shape.
            RuntimeError: their dtypes differ, or the memory bank has another dtype or dimension.
        """
        _check_views(out0, out1)
        if self.memory_bank.size[0] == 0:
            return self._mean(self._rows(out0, out1), "all")
        out0, out1 = F.normalize(out0, dim=1), F.normalize(out1, dim=1)
        out1, bank = self.memory_bank(out1, update=out0.requires_grad)
        negatives = bank.to(out0.device).T
        positives = (out0 * out1).sum(1) / self.temperature
        if (
            large(out0, negatives, LEAST_PAIRS)
            and suits_engine(out0, self.temperature)
            and negatives.dtype == out0.dtype
        ):
            self.evaluated_by = "engine"
            none = Targets("none", torch.empty(0, dtype=torch.int64, device=out0.device))
            batch = Batch(out0, none, Rule("lse", "dot", self.temperature), References(negatives))
            sums = anchor_values(batch).values
        else:
            self.evaluated_by = "plain"
            sums = (out0 @ negatives.T / self.temperature).logsumexp(1)
        return _as_lightly(-F.logsigmoid(positives - sums).mean(), out0)


class DCLLoss(_TwoViews):
    """``DCLLoss`` of lightly: decoupled contrastive learning, without the positive in the denominator.

    Example:
        >>> import torch
        >>> from pairproof.compat.lightly import DCLLoss
        >>> loss_function = DCLLoss(temperature=0.5)
        >>> loss = loss_function(torch.tensor([[1.0, 0.0], [0.8, 0.6]]), torch.tensor([[0.0, 1.0], [-0.6, 0.8]]))
        >>> print(f"{loss:.4f}")
        1.8860

    Args:
        temperature: what cosines are divided by: a number, which may be negative, or a tensor.
        weight_fn: a function of the normalised first and second views ``[n, D]`` that returns the weights ``[n]`` of
            the first views. With the views exchanged, it returns those of the second views. None: all weights are 1.
        gather_distributed: whether the rows of all processes are negatives. All processes must have the same number of
            rows. ``weight_fn`` gets only the rows of its own process.

    Attributes:
        evaluated_by: "engine" or "plain", for the last call; see `pairproof.compat`.

    Raises:
        ValueError: torch.distributed is not available for ``gather_distributed``.

    Source:
        lightly-ai/lightly at commit e8d317f, ``lightly/loss/dcl_loss.py``; the same in lightly 1.6.0.
    """

    def __init__(
        self,
        temperature: float | Tensor = 0.1,
        weight_fn: WeightFunction | None = None,
        gather_distributed: bool = False,
    ) -> None:
        super().__init__(temperature, gather_distributed)
        self.weight_fn = weight_fn

    def forward(self, out0: Tensor, out1: Tensor) -> Tensor:
        """Return the mean loss over the rows of both views; -inf if there is only one item.

        Args:
            out0: ``[n, D]``, the first views.
            out1: ``[n, D]``, the second views.

        Raises:
            ValueError: the views are not matrices of the same shape.
            RuntimeError: their dtypes differ.
        """
        _check_views(out0, out1)
        if not self.weight_fn:
            return self._mean(self._rows(out0, out1), "only_negatives")
        out0, out1 = F.normalize(out0, dim=1), F.normalize(out1, dim=1)
        loss = self._mean(self._rows(out0, out1, normalised=True), "only_negatives")
        positives = (out0 * out1).sum(1) / self.temperature
        # The loss was computed with weights 1.
        excess = 2 - self.weight_fn(out0, out1) - self.weight_fn(out1, out0)
        return loss + (positives * excess).mean() / 2


class DCLWLoss(DCLLoss):
    """``DCLWLoss`` of lightly: `DCLLoss` with the weights of `negative_mises_fisher_weights`.

    Example:
        >>> import torch
        >>> from pairproof.compat.lightly import DCLWLoss
        >>> loss_function = DCLWLoss()
        >>> loss = loss_function(torch.tensor([[1.0, 0.0], [0.8, 0.6]]), torch.tensor([[0.6, 0.8], [-0.6, 0.8]]))
        >>> print(f"{loss:.4f}")
        6.1574

    Args:
        temperature: what cosines are divided by: a number, which may be negative, or a tensor.
        sigma: what cosines are divided by in the weights.
        gather_distributed: see `DCLLoss`.

    Attributes:
        evaluated_by: "engine" or "plain", for the last call; see `pairproof.compat`.

    Raises:
        ValueError: torch.distributed is not available for ``gather_distributed``.

    Source:
        lightly-ai/lightly at commit e8d317f, ``lightly/loss/dcl_loss.py``; the same in lightly 1.6.0.
    """

    def __init__(self, temperature: float | Tensor = 0.1, sigma: float = 0.5, gather_distributed: bool = False) -> None:
        super().__init__(temperature, partial(negative_mises_fisher_weights, sigma=sigma), gather_distributed)
