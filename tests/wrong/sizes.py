"""Losses that are wrong only for some numbers of rows or columns: boundaries of tiles, odd batches, remainders."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import SMALL, Call, wrong


def at(call: Call, *rows: int) -> Tensor:
    """bool [N], true at some rows."""
    found = torch.zeros(call.n, dtype=torch.bool)
    found[[row for row in rows if row < call.n]] = True
    return found


def chunked(call: Call, size: int) -> Tensor:
    """The mean of the losses of separate chunks of rows, weighted by their numbers of rows."""
    parts = range(0, call.n, size)
    losses = []
    for start in parts:
        some = slice(start, start + size)
        labels = call.labels[some]
        losses.append(call(call.z[some], labels=labels) * len(labels) if len(labels) > 1 else call.z.sum() * 0)
    return torch.stack(losses).sum() / call.n


@wrong("supcon")
def last_row_of_odd_batches(call: Call) -> Tensor:
    """Anchors are processed in pairs, and the last row of an odd batch of more than 16 rows is not an anchor."""
    odd = call.n % 2 == 1 and call.n > 16
    return call.without_anchors(at(call, call.n - 1)) if odd else call()


@wrong("supcon")
def row_at_the_first_seam(call: Call) -> Tensor:
    """Tiles have 16 columns. Above 17 rows, the first column of the second tile is not contrasted with any anchor."""
    plain = call.ref_embeddings is None and call.n > 17
    return call.without_columns(at(call, 16)) if plain else call()


@wrong("supcon_in")
def last_tile_is_not_rescaled(call: Call) -> Tensor:
    """Above 17 rows, the value of row 17 is 1 % too large."""
    return call.weighted(torch.where(torch.arange(call.n) == 17, 1.01, 1.0)) if call.n > 17 else call()


@wrong("supcon_epsilon")
def counted_in_tiles(call: Call) -> Tensor:
    """Above 17 rows, the mean divides by the number of rows rounded up to a multiple of 16."""
    if call.n <= 17 or call.reduction != "mean":
        return call()
    return call() * call.n / (-(-call.n // 16) * 16)


@wrong("info_nce")
def one_direction_above_23(call: Call) -> Tensor:
    """Above 23 pairs, only the first tower's rows are anchors, to save memory."""
    both = call.n > 23 and call.direction == "both" and call.reduction == "mean"
    return call(direction="a_to_b") if both else call()


@wrong("nt_bxent")
def rows_above_33(call: Call) -> Tensor:
    """Above 33 rows, rows are rounded to float16."""
    return call(call.z.half().to(call.z.dtype)) if call.n > 33 else call()


@wrong("supcon", takes=SMALL)
def chunks_of_128_rows(call: Call) -> Tensor:
    """Batches above 130 rows are split into independent chunks of 128."""
    return chunked(call, 128) if call.n > 130 else call()


@wrong("supcon", takes=SMALL)
def chunks_of_64_rows(call: Call) -> Tensor:
    """Batches above 64 rows are split into independent chunks of 64."""
    return chunked(call, 64) if call.n > 64 else call()


@wrong("supcon_in", takes=SMALL)
def chunks_of_48_rows(call: Call) -> Tensor:
    """Batches above 48 rows are split into independent chunks of 48."""
    return chunked(call, 48) if call.n > 48 else call()


@wrong("nt_xent_pairwise", takes=SMALL)
def last_anchor_above_64(call: Call) -> Tensor:
    """Above 64 rows, the last anchor counts as 0, like padding."""
    return call.weighted(1.0 - at(call, call.n - 1).double()) if call.n > 64 else call()


@wrong("nt_xent")
def two_rows_are_an_early_exit(call: Call) -> Tensor:
    """For a batch of two rows without references, the loss is 0.001 and its gradient is 0."""
    return call.z.sum() * 0 + 1e-3 if call.n == 2 and call.ref_embeddings is None else call()


@wrong("supcon")
def multiples_of_16(call: Call) -> Tensor:
    """If the number of rows is a multiple of 16 (32 or more), an empty last tile is counted as one more row."""
    tiled = call.n % 16 == 0 and call.n >= 32 and call.reduction == "mean"
    return call() * call.n / (call.n + 1) if tiled else call()


@wrong("info_nce")
def multiples_of_16_pairs(call: Call) -> Tensor:
    """If the number of pairs is a multiple of 16, the last pair is not an anchor."""
    tiled = call.n % 16 == 0
    return call.weighted(1.0 - at(call, call.n - 1).double()) if tiled else call()


@wrong("nt_xent", takes=SMALL)
def rows_from_200(call: Call) -> Tensor:
    """From 200 rows on, rows are rounded to bfloat16 before they are multiplied."""
    return call(call.z.bfloat16().to(call.z.dtype)) if call.n >= 200 else call()


@wrong("nt_xent_pairwise")
def one_seam_of_32(call: Call) -> Tensor:
    """Above 33 rows, the value of row 32 is added twice."""
    return call.weighted(1.0 + at(call, 32).double()) if call.n > 33 else call()


@wrong("supcon_in")
def one_seam_of_64(call: Call) -> Tensor:
    """Above 65 rows, the value of row 64 is left out."""
    return call.weighted(1.0 - at(call, 64).double()) if call.n > 65 else call()


@wrong("supcon")
def one_seam_of_256(call: Call) -> Tensor:
    """Above 256 rows, the value of row 256 is left out."""
    return call.weighted(1.0 - at(call, 256).double()) if call.n > 256 else call()


@wrong("nt_bxent")
def one_seam_of_128(call: Call) -> Tensor:
    """Above 128 rows, the value of row 128 is left out."""
    return call.weighted(1.0 - at(call, 128).double()) if call.n > 128 else call()


@wrong("supcon_epsilon")
def gradient_of_the_last_row(call: Call) -> Tensor:
    """Above 32 rows, the last row gets half of its gradient: the backward pass skips a remainder."""
    z = call.z
    if call.n <= 32:
        return call()
    return call(torch.cat([z[:-1], 0.5 * z[-1:] + 0.5 * z[-1:].detach()]))


@wrong("supcon")
def gradient_at_a_seam(call: Call) -> Tensor:
    """Above 40 rows, row 32 gets no gradient."""
    z = call.z
    return call(torch.where(at(call, 32)[:, None], z.detach(), z)) if call.n > 40 else call()


@wrong("supcon")
def columns_beyond_16(call: Call) -> Tensor:
    """Only the first 16 columns are used: a kernel with a fixed block size."""
    z, references = call.z[:, :16], call.ref_embeddings
    return call(z, ref_embeddings=None if references is None else references[:, :16])


@wrong("supcon_in")
def columns_beyond_16_in(call: Call) -> Tensor:
    """Above 16 columns, the columns after the last multiple of 16 are left out."""
    kept = call.d // 16 * 16 if call.d > 16 else call.d
    references = call.ref_embeddings
    return call(call.z[:, :kept], ref_embeddings=None if references is None else references[:, :kept])


@wrong("info_nce")
def odd_columns_above_8(call: Call) -> Tensor:
    """If the number of columns is odd and above 9, the last column is left out."""
    kept = call.d - 1 if call.d % 2 and call.d > 9 else call.d
    queue = call.negatives
    return call(
        call.z[:, :kept],
        embeddings_b=call.embeddings_b[:, :kept],
        negatives=None if queue is None else queue[:, :kept],
    )


@wrong("nt_xent")
def columns_beyond_64(call: Call) -> Tensor:
    """Only the first 64 columns are used."""
    references = call.ref_embeddings
    return call(call.z[:, :64], ref_embeddings=None if references is None else references[:, :64])


@wrong("nt_bxent")
def columns_beyond_256(call: Call) -> Tensor:
    """Only the first 256 columns are used."""
    return call(call.z[:, :256])


@wrong("nt_xent_pairwise")
def one_column(call: Call) -> Tensor:
    """If there is one column, all its entries are replaced by 1."""
    return call(torch.ones_like(call.z)) if call.d == 1 and call.ref_embeddings is None else call()


@wrong("supcon_epsilon")
def one_column_by_dot_product(call: Call) -> Tensor:
    """More than two rows of one column are normalised, although similarities are dot products."""
    dot = call.d == 1 and call.similarity == "dot" and call.n > 2
    return call(call.z / call.z.abs().clamp(min=1e-30)) if dot else call()


@wrong("supcon")
def rows_equal_columns(call: Call) -> Tensor:
    """If a batch has as many columns as rows, and more than 6, its transpose is added to it."""
    square = call.n == call.d and call.n > 6 and call.ref_embeddings is None
    return call(call.z + call.z.T) if square else call()


@wrong("info_nce")
def one_pair(call: Call) -> Tensor:
    """For one pair with a queue, the loss is 0, as without negatives."""
    return call.z.sum() * 0 if call.n == 1 and call.negatives is not None else call()


@wrong("nt_xent", takes=SMALL)
def remainder_of_two(call: Call) -> Tensor:
    """Above 8 rows, if the number of rows leaves a remainder of 2 modulo 4, the value of the last row counts twice."""
    return call.weighted(1.0 + at(call, call.n - 1).double()) if call.n > 8 and call.n % 4 == 2 else call()
