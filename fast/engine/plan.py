"""Choose how a batch is evaluated: the form, the size of tiles and panels, and what the forward pass keeps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, cast

import torch
from torch import Tensor

from . import device
from .device import dtypes_of
from .scaling import largest_norm, shift_of
from .spec import KERNELS, UNSHIFTED, Backend, Batch, Plan, Rule, Sizes, Targets

__all__ = ["UNSHIFTED", "choose", "precision", "tile_size", "tiles_of"]

DENSE_UP_TO = 512
"""Largest number of rows, and of columns, for which "auto" evaluates the batch as one panel."""
SMALL_TOWERS = 1024
"""The same for two towers with partners, if `small` evaluates their plain mean or sum."""
NARROW_UP_TO = 1024
"""Up to this many rows, tiles are narrow bands of rows, from the diagonal to the last column."""
NARROW_ROWS = 256
"""Rows of a narrow band. With fewer rows, less of the symmetric matrix is computed twice."""
TILE_ROWS = 256
"""Rows of a tile in larger batches."""
TILE_COLUMNS = 512
"""Columns of a tile in larger batches. A tile and its rows must fit in a core's second-level cache."""
FIXED_COLUMNS = 1024
"""Columns of a tile of references that need no gradient."""
PANEL_ELEMENTS = 2**18
"""Entries of a panel: few enough for a core's second-level cache, enough for an efficient matrix product."""
LEAST_ROWS = 64
"""Fewest rows of a panel, because products of fewer rows are slow. Memory is still linear in the number of columns."""
ANCHORED_ROWS = 128
"""Rows of a panel in the anchored form."""
ACCELERATOR_FACTOR = 8
"""Tiles have this many times as many rows and columns on an accelerator, so that it is not idle."""
KEPT_ELEMENTS = 2**22
"""Largest number of exponentials that are kept for the backward pass instead of being computed again."""


LONGEST = 1e3
"""The frozen form sums the references themselves, so their largest norm must be from 1 / LONGEST to LONGEST."""
LOWEST_OF_FLOAT32 = 1e-3
"""Lowest temperature at which logits are computed in float32; the highest is its reciprocal."""
LARGEST_OF_FLOAT32 = 1e30
"""Largest bound on dot products / temperature for which they are computed in float32."""
LARGEST_LOGIT = 1e300
"""Largest bound on dot products / temperature for which float64 needs no scaling as in `exact`."""
OMITS = (
    "the kernels support ignored pairs by ids only, and not with a mask of positives or in supcon_epsilon_loss;"
    ' backend="auto" evaluates such batches without the kernels'
)
WEIGHTED = 'the kernels do not support weights of pairs; backend="auto" evaluates such batches without the kernels'
ZERO_ROWS = 'the kernels do not support zero_row="zero"; backend="auto" evaluates such batches without the kernels'


class _Forced:
    rows: int | None = None


@contextmanager
def tiles_of(rows: int) -> Iterator[None]:
    """Use tiles and panels of ``rows`` rows within the context, so that "tiled" splits small batches too.

    Args:
        rows: an even number, at least 2.
    """
    before, _Forced.rows = _Forced.rows, rows
    try:
        yield
    finally:
        _Forced.rows = before


def choose(
    batch: Batch, backend: Backend, *, backward: bool = True, fixed: bool = False, shifts: bool = False
) -> tuple[Plan, Batch]:
    """Choose a plan by size, device, dtype and formula; also by values, if they may be read.

    Args:
        batch: the batch.
        backend: any backend except "exact".
        backward: whether a backward pass may follow; otherwise no exponentials are kept.
        fixed: whether it is known that the references need no gradient.
        shifts: whether the form may subtract one number from all logits; see `Plan.shift`.

    Returns:
        The plan and the batch, whose labels may have been replaced by partners.

    Raises:
        ValueError: ``backend="triton"`` does not support this batch.
    """
    embeddings, rule, targets = batch.embeddings, batch.rule, batch.targets
    omits = targets.omits
    guarded = omits and rule.terms == "epsilon"
    masked = targets.ignored is not None or guarded or (omits and targets.kind == "mask")
    weighted = WEIGHTED if targets.weighted else None
    lacking = weighted or (
        OMITS if masked else ZERO_ROWS if rule.zero_row == "zero" and rule.similarity == "cosine" else None
    )
    if backend == "triton" or (
        backend == "auto" and embeddings.is_cuda and not lacking and KERNELS["triton"].chosen(embeddings)
    ):
        refusal = lacking or KERNELS["triton"].refusal(embeddings)
        if refusal is not None:
            raise ValueError(f'backend="triton": {refusal}')
        return Plan("triton", tf32=device.tf32_allowed()), batch
    others, count = batch.references.embeddings, embeddings.shape[0]
    columns = count if others is None else others.shape[0]
    reads = device.may_read(embeddings) and device.may_read(targets.given)
    one = _is_one_tile(count, columns, backend)
    height = panel_rows(batch, backend)
    keep = height == count or (targets.kind in ("partners", "none") and count * columns <= KEPT_ELEMENTS)
    if rule.terms == "sigmoid":
        # Cross-entropies need a second matrix, which must fit in the cache together with the panel.
        height = height if height == count else max(min(height, LEAST_ROWS), height // 2)
        return Plan("pairs", height, columns, backward and keep, reads), batch
    if targets.weighted or guarded:
        return Plan("rowwise", height, columns, False, reads), batch
    tiles = others is None and targets.kind in ("labels", "partners") and rule.terms in ("out", "in", "epsilon")
    tiles = tiles and not omits
    # Tiles do not find the largest dot product of each row, which "epsilon" needs.
    tiles = tiles and not (rule.terms == "epsilon" and rule.similarity == "dot")
    # An upper bound on |s_ij|; infinity if it would have to be read from an accelerator.
    largest, temperature, across = math.inf, rule.temperature, 1.0
    if isinstance(temperature, Tensor):
        temperature = float(temperature.detach()) if device.may_read(temperature) else 0.0
    if temperature > 0:
        if rule.similarity == "cosine":
            largest = 1 / temperature
        elif reads:
            sizes = largest_norm(embeddings, batch.sizes)
            across = sizes if others is None else largest_norm(others, batch.references.sizes)
            largest = sizes * across / temperature
    unshifted = UNSHIFTED[device.dtypes_of(embeddings)[0]] - math.log(max(count, columns))
    alone = targets.kind == "none" and rule.terms == "lse" and batch.references.own is None and not omits
    if alone and fixed and 2 * largest <= unshifted and 1 / LONGEST <= across <= LONGEST:
        rows, wide = (count, columns) if backend == "dense" else fixed_tile(1 if reads else ACCELERATOR_FACTOR)
        return Plan("frozen", rows, wide, backward, reads), batch
    some = tiles and reads and batch.anchors is not None and rule.terms == "out" and rule.denominator == "all"
    if some and largest <= unshifted and _are_few(cast(Tensor, batch.anchors)):
        rows = count if backend == "dense" else _Forced.rows or ANCHORED_ROWS
        return Plan("anchored", rows, columns, backward, reads), batch
    shift = shift_of(rule, largest, max(count, columns), embeddings)
    if shift and (not shifts or omits or not reads or batch.references.mutual):
        shift = None
    if shift is not None and (one or not tiles) and not (omits and rule.terms == "binary"):
        extreme = 2 * largest > unshifted
        return Plan("unshifted", height, columns, backward and keep, reads, extreme=extreme, shift=shift), batch
    if tiles and targets.kind == "labels" and reads:
        targets = read_labels(targets)
        batch = Batch(embeddings, targets, rule, batch.references, batch.anchors, batch.storage, batch.sizes)
    # "in" with "one_positive" takes the logarithm of quotients of exponentials.
    bound = largest * (2 if rule.terms == "in" and rule.denominator == "one_positive" else 1)
    if tiles and (shift is not None or bound <= unshifted):
        rows, wide = (count, count) if backend == "dense" else tile_size(count, 1 if reads else ACCELERATOR_FACTOR)
        # Half of the matrix, but whole squares on the diagonal.
        keep = backward and (backend == "dense" or count * (count + rows) // 2 <= KEPT_ELEMENTS)
        return Plan("symmetric", rows, wide, keep, reads, extreme=True, shift=shift or 0), batch
    return Plan("rowwise", height, columns, False, reads), batch


def _are_few(anchors: Tensor) -> bool:
    """Return whether at most half of the rows are known to be anchors, and all exponentials can be kept."""
    if not device.may_read(anchors):  # batched by `torch.func.vmap`
        return False
    number, count = int(anchors.sum()), len(anchors)
    return 2 * number <= count and number * count <= KEPT_ELEMENTS


def _is_one_tile(count: int, columns: int, backend: Backend) -> bool:
    return backend == "dense" or (backend == "auto" and max(count, columns) <= DENSE_UP_TO)


def panel_rows(batch: Batch, backend: Backend) -> int:
    """Return the number of rows of a panel that has all columns."""
    embeddings, others = batch.embeddings, batch.references.embeddings
    count = embeddings.shape[0]
    columns = count if others is None else others.shape[0]
    if _is_one_tile(count, columns, backend):
        return count
    reads = device.may_read(embeddings) and device.may_read(batch.targets.given)
    entries = PANEL_ELEMENTS * (1 if reads else ACCELERATOR_FACTOR**2)
    # With one positive in the denominator, each pair has its own odds, in further matrices of a panel.
    least = LEAST_ROWS // 2 if batch.rule.denominator == "one_positive" else LEAST_ROWS
    return _Forced.rows or max(least, entries // columns)


def precision(rule: Rule, rows: Tensor, sizes: Sequence[Sizes | None]) -> Literal["", "float64", "exact"]:
    """Return the precision that the logits need, if it exceeds the computing dtype.

    Args:
        rule: the formula.
        rows: one of the matrices of rows.
        sizes: the sizes of all matrices of rows. If any is None (not known), only the temperature is considered.

    Returns:
        "float64" if float32 is not sufficient; "exact" if dot products may exceed the range of float64; else "".
    """
    double, temperature = dtypes_of(rows)[0] == torch.float64, rule.temperature
    if isinstance(temperature, Tensor):
        temperature = float(temperature.detach()) if device.may_read(temperature) else 1.0
    outside = temperature < LOWEST_OF_FLOAT32 or temperature > 1 / LOWEST_OF_FLOAT32
    if rule.similarity == "dot" and all(sizes):
        high = max(size.high for size in sizes if size)
        largest = high * high * rows.shape[1] / temperature
        if double and largest > LARGEST_LOGIT:
            return "exact"
        outside = outside or largest > LARGEST_OF_FLOAT32
    return "float64" if outside and not double else ""


def read_labels(targets: Targets) -> Targets:
    """Return partners if each label occurs twice, else the labels with their sorted order. Values are read."""
    labels, order = torch.sort(targets.given, stable=True)
    if len(labels) % 2 or not torch.equal(labels[0::2], labels[1::2]) or bool((labels[1:-1:2] == labels[2::2]).any()):
        return Targets("labels", targets.given, None, order)
    across = order.view(-1, 2).flip(1).view(-1)
    return Targets("partners", torch.empty_like(order).scatter_(0, order, across), None, order)


def tile_size(count: int, factor: int = 1) -> tuple[int, int]:
    """Return the rows and columns of a tile for a batch of ``count`` rows; columns are a multiple of rows."""
    if _Forced.rows is not None:
        return _Forced.rows, 2 * _Forced.rows
    if count <= NARROW_UP_TO * factor:
        return NARROW_ROWS * factor, -(-count // (NARROW_ROWS * factor)) * NARROW_ROWS * factor
    return TILE_ROWS * factor, TILE_COLUMNS * factor


def fixed_tile(factor: int = 1) -> tuple[int, int]:
    """Return the rows and columns of a tile of references that need no gradient."""
    if _Forced.rows is not None:
        return _Forced.rows, 2 * _Forced.rows
    return TILE_ROWS * factor, FIXED_COLUMNS * factor
