"""How a batch shall be evaluated: in which form, in tiles of how many rows, and what is kept for the backward pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from . import device, pairs
from .device import computing_dtype
from .scaling import measure
from .spec import KERNELS, UNSHIFTED, Backend, Plan, References, Rule, Targets

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
"""Times as many rows, and as many columns, of a tile on an accelerator, which a small one would leave idle."""
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


def choose(
    embeddings: Tensor,
    targets: Targets,
    rule: Rule,
    references: References | None,
    norms: Tensor | None = None,
    *,
    backend: Backend,
) -> tuple[Plan, Targets]:
    """Choose by size, device, dtype and formula; values are looked at only where that costs no synchronisation.

    Returns:
        The plan, and the targets, which are partners in the form of pairs.

    Raises:
        ValueError: ``backend="triton"`` cannot take these embeddings.
    """
    on_device = backend == "auto" and embeddings.device.type != "cpu"
    if backend == "triton" or (on_device and KERNELS["triton"].chosen(embeddings)):
        refusal = KERNELS["triton"].refusal(embeddings)
        if refusal is not None:
            raise ValueError(f'backend="triton": {refusal}')
        return Plan("triton", tf32=device.tf32_allowed()), targets
    count = embeddings.shape[0]
    columns = count if references is None or references.embeddings is None else references.embeddings.shape[0]
    reads = device.may_read(embeddings)
    dtype = computing_dtype(embeddings)
    largest = math.inf
    if references is None and targets.kind in ("labels", "partners") and rule.terms != "epsilon":
        largest = _largest_logit(embeddings, rule, norms, reads)
    # Where positives have ratios of their own, the largest and the smallest exponential of a row meet in a quotient.
    ratios = 2 if rule.terms == "in" and rule.denominator == "one_positive" else 1
    if ratios * largest + math.log(count) <= UNSHIFTED[dtype]:
        few = backend == "dense" or (backend == "auto" and count <= PAIRS_UP_TO)
        plain = rule.denominator != "only_negatives" and 2 * largest + math.log(count) <= UNSHIFTED[dtype]
        partners = pairs.partners_of(targets) if few and plain and reads else None
        if partners is not None:
            return Plan("pairs", count, count, True, reads), Targets("partners", partners)
        rows, wide = (count, count) if backend == "dense" else tile_size(count, 1 if reads else ACCELERATOR_FACTOR)
        # The tiles hold half of all entries and the other half of the squares on the diagonal.
        keep = backend == "dense" or count * (count + rows) // 2 <= KEPT_ELEMENTS
        return Plan("symmetric", rows, wide, keep, reads), targets
    if references is None and targets.kind == "labels" and rule.terms in ("out", "in") and reads:
        partners = pairs.partners_of(targets)
        targets = targets if partners is None else Targets("partners", partners)
    if backend == "dense" or (backend == "auto" and max(count, columns) <= DENSE_UP_TO):
        return Plan("rowwise", count, columns, False, reads), targets
    entries = PANEL_ELEMENTS * (1 if reads else ACCELERATOR_FACTOR**2)
    return Plan("rowwise", _Forced.rows or max(1, entries // columns), columns, False, reads), targets


def tile_size(count: int, factor: int = 1) -> tuple[int, int]:
    """Return the rows and the columns of the tiles of ``count`` rows; the columns are a multiple of the rows."""
    if _Forced.rows is not None:
        return _Forced.rows, 2 * _Forced.rows
    if count <= NARROW_UP_TO * factor:
        return NARROW_ROWS * factor, -(-count // (NARROW_ROWS * factor)) * NARROW_ROWS * factor
    return TILE_ROWS * factor, TILE_COLUMNS * factor


def _largest_logit(embeddings: Tensor, rule: Rule, norms: Tensor | None, reads: bool) -> float:
    """Return a bound on every ``|s_ij|``, infinity where none is known without reading an accelerator's memory."""
    if isinstance(rule.temperature, Tensor):
        if not (reads and device.may_read(rule.temperature)):
            return math.inf
        temperature = float(rule.temperature.detach())
    else:
        temperature = rule.temperature
    if not temperature > 0:
        return math.inf
    if rule.similarity == "cosine":
        return 1 / temperature
    if not reads:
        return math.inf
    return float((measure(embeddings) if norms is None else norms).amax()) ** 2 / temperature
