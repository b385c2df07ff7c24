"""The choice of how a batch is evaluated: in which form, in tiles of how many rows, and what the forward pass keeps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from . import device, symmetric
from .scaling import largest_norm
from .spec import KERNELS, UNSHIFTED, Backend, Batch, Plan

__all__ = ["UNSHIFTED", "choose", "tile_size", "tiles_of"]

PAIRS_UP_TO = 320
"""Rows up to which pairs are held in one matrix, where tiles would be so small that their number is what costs."""
DENSE_UP_TO = 512
"""Rows up to which "auto" takes one panel for all."""
NARROW_UP_TO = 1024
"""Rows up to which a tile takes all columns from the diagonal on."""
NARROW_ROWS = 128
"""Rows of such a tile: the fewer, the less of the matrix is computed twice."""
TILE_ROWS = 256
"""Rows of a tile of more rows than these."""
TILE_COLUMNS = 512
"""Columns of a tile: it must stay, with its rows, in a core's second-level cache."""
PANEL_ELEMENTS = 2**18
"""Entries of one panel of whole rows: few enough to bound memory, enough rows for a matrix product to be efficient."""
ACCELERATOR_FACTOR = 8
"""Factor by which tiles have more rows, and more columns, on an accelerator, so that it is not idle."""
KEPT_ELEMENTS = 2**20
"""Exponentials that may be kept from the forward pass for the backward pass, which then need not recompute them."""


class _Forced:
    rows: int | None = None


@contextmanager
def tiles_of(rows: int) -> Iterator[None]:
    """Within the context "tiled" uses tiles and panels of so many rows, so that small batches have seams as well.

    Args:
        rows: an even number, at least 2.
    """
    before, _Forced.rows = _Forced.rows, rows
    try:
        yield
    finally:
        _Forced.rows = before


def choose(batch: Batch, backend: Backend) -> tuple[Plan, Batch]:
    """Choose by size, device, dtype and formula; values are looked at only where that costs no synchronisation.

    Returns:
        The plan, and the batch, whose targets are partners in the form of pairs.

    Raises:
        ValueError: ``backend="triton"`` cannot take these embeddings.
    """
    embeddings, rule, targets = batch.embeddings, batch.rule, batch.targets
    if backend == "triton" or (backend == "auto" and embeddings.is_cuda and KERNELS["triton"].chosen(embeddings)):
        refusal = KERNELS["triton"].refusal(embeddings)
        if refusal is not None:
            raise ValueError(f'backend="triton": {refusal}')
        return Plan("triton", tf32=device.tf32_allowed()), batch
    others, count = batch.references.embeddings, embeddings.shape[0]
    columns = count if others is None else others.shape[0]
    reads = device.may_read(embeddings)
    if others is None and targets.kind == "labels" and rule.terms in ("out", "in") and reads:
        targets = symmetric.read_labels(targets)
        batch = replace(batch, targets=targets)
    paired = reads and (targets.paired or targets.kind == "partners")
    # The largest |s_ij|: infinity where it is not known without reading an accelerator's memory.
    largest, temperature = math.inf, rule.temperature
    if isinstance(temperature, Tensor):
        temperature = float(temperature.detach()) if reads and device.may_read(temperature) else 0.0
    if others is None and targets.kind in ("labels", "partners") and rule.terms != "epsilon" and temperature > 0:
        if rule.similarity == "cosine":
            largest = 1 / temperature
        elif reads:
            largest = largest_norm(embeddings, batch.sizes) ** 2 / temperature
    unshifted = UNSHIFTED[device.dtypes_of(embeddings)[0]] - math.log(count)
    # Where positives have ratios of their own, the largest and the smallest exponential of a row meet in a quotient.
    if largest * (2 if rule.terms == "in" and rule.denominator == "one_positive" else 1) <= unshifted:
        few = backend == "dense" or (backend == "auto" and count <= PAIRS_UP_TO)
        if few and paired and rule.denominator != "only_negatives" and 2 * largest <= unshifted:
            batch = replace(batch, targets=symmetric.as_partners(targets)) if targets.paired else batch
            return Plan("pairs", count, count, True, reads), batch
        rows, wide = (count, count) if backend == "dense" else tile_size(count, 1 if reads else ACCELERATOR_FACTOR)
        # The tiles hold half of all entries and the other half of the squares on the diagonal.
        keep = backend == "dense" or count * (count + rows) // 2 <= KEPT_ELEMENTS
        return Plan("symmetric", rows, wide, keep, reads), batch
    if targets.paired:
        batch = replace(batch, targets=symmetric.as_partners(targets))
    if backend == "dense" or (backend == "auto" and max(count, columns) <= DENSE_UP_TO):
        return Plan("rowwise", count, columns, False, reads), batch
    entries = PANEL_ELEMENTS * (1 if reads else ACCELERATOR_FACTOR**2)
    return Plan("rowwise", _Forced.rows or max(1, entries // columns), columns, False, reads), batch


def tile_size(count: int, factor: int = 1) -> tuple[int, int]:
    """Return the rows and the columns of the tiles of ``count`` rows; the columns are a multiple of the rows."""
    if _Forced.rows is not None:
        return _Forced.rows, 2 * _Forced.rows
    if count <= NARROW_UP_TO * factor:
        return NARROW_ROWS * factor, -(-count // (NARROW_ROWS * factor)) * NARROW_ROWS * factor
    return TILE_ROWS * factor, TILE_COLUMNS * factor
