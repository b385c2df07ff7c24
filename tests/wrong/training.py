"""Losses that are wrong only at the sizes of training: more than 32 rows and more than 9 columns together."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize, softplus

from .base import (
    SMALL,
    Call,
    as_anchors,
    logits_of_others,
    products,
    weight_of_positive,
    wide,
    with_gradient,
    with_weights,
    wrong,
)


def large(call: Call, rows: int = 32) -> bool:
    """Whether there are more than some rows and 9 columns, without references and without weights of anchors."""
    square = call.embeddings_b is None or len(call.embeddings_b) == call.n
    other = (call.ref_embeddings, call.anchor_weights, call.direction_weights)
    return call.n > rows and call.d > 9 and square and all(one is None for one in other)


def chunk(call: Call, size: int) -> Tensor:
    """int [N], the chunk of every row."""
    return torch.arange(call.n) // size


def chunk_sizes(call: Call, size: int) -> Tensor:
    """int [N], the number of rows of the chunk of every row."""
    return chunk(call, size).bincount()[chunk(call, size)]


def remainder(call: Call, size: int) -> Tensor:
    """bool [N], the rows of an incomplete last chunk."""
    return chunk_sizes(call, size) < size


def last(call: Call, size: int) -> Tensor:
    """float64 [N], 1 for the rows of the last chunk."""
    return (chunk(call, size) == chunk(call, size).max()).double()


@wrong("supcon", takes=SMALL)
def equal_weights_of_chunks(call: Call) -> Tensor:
    """The means of chunks of 64 anchors are averaged with equal weights, although the last chunk is smaller."""
    sizes = chunk_sizes(call, 64)
    return call.weighted(call.n / (-(-call.n // 64) * sizes)) if large(call, 64) else call()


@wrong("nt_xent", takes=SMALL)
def last_incomplete_chunk(call: Call) -> Tensor:
    """Above 128 rows, anchors after the last full chunk of 128 count as 0."""
    return call.weighted((~remainder(call, 128)).double()) if large(call, 128) else call()


@wrong("supcon_in")
def last_chunk_detached(call: Call) -> Tensor:
    """Above 32 rows, rows after the last full chunk of 32 get no gradient."""
    z = call.z
    return call(torch.where(remainder(call, 32)[:, None], z.detach(), z)) if large(call) else call()


@wrong("nt_xent_pairwise", takes=SMALL)
def float16_accumulator(call: Call) -> Tensor:
    """Above 128 rows, the values of anchors are added in float16."""
    if not large(call, 128):
        return call()
    values = call(reduction="none")
    return values.half().cumsum(0)[-1].to(values.dtype) / call.n


@wrong("supcon", takes=SMALL)
def duplicates_removed(call: Call) -> Tensor:
    """Above 64 rows, rows that equal an earlier row with the same label are removed."""
    if not large(call, 64):
        return call()
    rows = call.z.detach().unique(dim=0, return_inverse=True)[1]
    again = (rows[:, None] == rows) & (call.labels[:, None] == call.labels)
    kept = ~again.tril(-1).any(dim=1)
    return call(call.z[kept], labels=call.labels[kept])


@wrong("info_nce")
def queue_cut_to_the_batch(call: Call) -> Tensor:
    """Above 32 pairs, a queue that is longer than the batch is cut to the length of the batch."""
    cut = large(call) and call.negatives is not None
    return call(negatives=call.negatives[: call.n]) if cut else call()


@wrong("nt_xent", takes=SMALL)
def partners_in_int8(call: Call) -> Tensor:
    """Partners are stored in int8: above 128 rows they become negative and count from the end."""
    stored = call.partners.to(torch.int8).long() % call.n
    return cross_entropy(logits_of_others(call), stored) if large(call, 128) else call()


@wrong("nt_bxent")
def pairs_in_int16(call: Call) -> Tensor:
    """Pair (i, j) is stored as i N + j in int16: above 181 rows, positive pairs beyond 32767 are lost."""
    pairs = call.positive_pairs
    kept = pairs[:, 0].long() * call.n + pairs[:, 1] < 2**15
    return call(positive_pairs=pairs[kept]) if large(call, 181) else call()


@wrong("supcon_epsilon")
def columns_beyond_512(call: Call) -> Tensor:
    """Above 32 rows, only the first 512 columns are used."""
    return call(call.z[:, :512]) if large(call) else call()


@wrong("nt_xent_pairwise")
def gradient_of_the_last_columns(call: Call) -> Tensor:
    """Above 32 rows and 64 columns, the columns after the last multiple of 64 get no gradient."""
    z, full = call.z, call.d // 64 * 64
    rest = torch.cat([z[:, :full], z[:, full:].detach()], dim=1)
    return call(rest) if large(call) and call.d > 64 else call()


@wrong("supcon_in")
def norms_of_256_columns(call: Call) -> Tensor:
    """Above 32 rows and 256 columns, the norm of a row is computed from its first 256 columns."""
    if not large(call) or call.d <= 256 or call.similarity != "cosine":
        return call()
    z = wide(call.z)
    return call(z / z[:, :256].norm(dim=1, keepdim=True), similarity="dot")


@wrong("nt_xent", takes=SMALL)
def last_block_of_products(call: Call) -> Tensor:
    """Above 32 rows, products are added in blocks of 256 columns and the last incomplete block is left out."""
    unit = normalize(wide(call.z), dim=1)[:, : call.d // 256 * 256]
    return call(unit, similarity="dot") if large(call) and call.d > 256 else call()


@wrong("supcon")
def dropped_anchors_of_chunks(call: Call) -> Tensor:
    """With the policy drop, chunks of 64 rows drop their own anchors, and the means of chunks have equal weights."""
    bare = call.ignored is None and call.positive_weights is None and call.anchors is None
    if not large(call, 64) or not bare or call.no_positive != "drop" or call.reduction != "mean":
        return call()
    kept = call.counts > 0
    each = torch.zeros(-(-call.n // 64)).index_add(0, chunk(call, 64), kept.float())
    return call.weighted(kept.sum() / ((each > 0).sum() * each[chunk(call, 64)].clamp(min=1)))


@wrong("nt_xent", takes=SMALL)
def maximum_of_the_first_tile(call: Call) -> Tensor:
    """Above 64 rows, the sum over the first 64 columns is not rescaled if a later column has a larger logit."""
    if not large(call, 64):
        return call()
    logits = logits_of_others(call)
    first, largest = logits[:, :64].amax(dim=1, keepdim=True), logits.amax(dim=1, keepdim=True)
    sums = (logits[:, :64] - first).exp().sum(dim=1) + (logits[:, 64:] - largest).exp().sum(dim=1)
    return (sums.log() + largest[:, 0] - logits[torch.arange(call.n), call.partners]).mean()


@wrong("info_nce", takes=SMALL)
def second_direction_by_chunks(call: Call) -> Tensor:
    """Above 128 pairs, rows of the second tower are contrasted only within chunks of 128 pairs."""
    if not large(call, 128):
        return call()
    parts = zip(call.z.split(128), call.embeddings_b.split(128), strict=True)
    backward = sum(call(a, embeddings_b=b, direction="b_to_a", reduction="sum") for a, b in parts)
    return (call(direction="a_to_b") + backward / call.n) / 2


@wrong("nt_xent", takes=SMALL)
def hardest_negatives(call: Call) -> Tensor:
    """Above 66 rows, the denominator of an anchor has only its partner and its 32 largest logits."""
    if not large(call, 66):
        return call()
    logits = logits_of_others(call)
    kept = logits >= logits.detach().topk(32, dim=1)[0][:, -1:]
    kept |= torch.arange(call.n) == call.partners[:, None]
    return cross_entropy(logits.masked_fill(~kept, -torch.inf), call.partners)


@wrong("supcon_in", takes=SMALL)
def table_of_32_positives(call: Call) -> Tensor:
    """An anchor has a table of 32 positives: further ones are missing in the sum, but counted in the divisor."""
    if not large(call):
        return call()
    positive = call.positive
    table = positive & (positive.cumsum(dim=1) <= 32)
    missing = (call.counts.clamp(min=1) / table.sum(dim=1).clamp(min=1)).log()
    return call(labels=None, positives=table) + missing.mean()


@wrong("supcon")
def borders_of_tiles(call: Call) -> Tensor:
    """Tiles of 64 columns include their end: above 64 rows, negatives 64, 128 and so on are counted twice."""
    if not large(call, 64):
        return call()
    twice = 1 + (torch.arange(call.n) % 64 == 0).double() * (torch.arange(call.n) > 0)
    weights = twice.expand(call.n, call.n)
    return call(negative_weights=weights if call.negative_weights is None else weights * call.negative_weights)


@wrong("info_nce", takes=SMALL)
def last_gradient_of_keys(call: Call) -> Tensor:
    """Above 64 pairs, each chunk of 64 pairs overwrites the gradient of the second tower."""
    if not large(call, 64):
        return call()
    frozen = call.changed(embeddings_a=call.z.detach(), temperature=float(call.temperature))
    right = call(embeddings_b=call.embeddings_b.detach())
    return with_gradient(call(), right + frozen.weighted(last(call, 64)))


@wrong("nt_bxent", takes=SMALL)
def negatives_in_uint8(call: Call) -> Tensor:
    """The number of negatives is counted in uint8, which overflows above 255."""
    count = call.negative.sum(dim=1)
    if not large(call) or not bool((count > 255).any()):
        return call()
    logits = products(call)
    positives = (softplus(-logits) * call.positive).sum(dim=1) / (call.counts + 1)
    return (positives + (softplus(logits) * call.negative).sum(dim=1) / (count % 256).clamp(min=1)).mean()


@wrong("hard_negative")
def weights_buffer_of_256(call: Call) -> Tensor:
    """The buffer of hardness weights has 256 rows: the negatives of later anchors are not weighted."""
    if not large(call, 256):
        return call()
    early = (torch.arange(call.n) < 256).double()
    return call.weighted(early) + call.changed(beta=0.0).weighted(1 - early)


@wrong("dclw", takes=SMALL)
def weights_of_chunks(call: Call) -> Tensor:
    """Above 64 rows, the weights of positives are normalised within chunks of 64 rows."""
    return with_weights(call, weight_of_positive(call, chunk(call, 64))) if large(call, 64) else call()


@wrong("multiple_negatives_ranking")
def hard_negatives_of_the_last_chunk(call: Call) -> Tensor:
    """Above 32 queries, queries after the last full chunk of 32 are contrasted with no hard negatives."""
    plain = call.hard_negatives is not None and call.hard_negatives_scope == "batch" and call.ignored is None
    if not large(call) or not plain:
        return call()
    rest = remainder(call, 32).double()
    return call.weighted(1 - rest) + call.changed(hard_negatives=None).weighted(rest)


@wrong("sigmoid")
def positives_of_each_block(call: Call) -> Tensor:
    """Above 64 pairs, each block of 64 x 64 pairs has positives on its own diagonal."""
    given = (call.partners, call.labels, call.positives)
    if not large(call, 64) or any(one is not None for one in given):
        return call()
    place = torch.arange(call.n) % 64
    return call(positives=place[:, None] == place)


@wrong("info_nce", takes=SMALL)
def targets_without_offset(call: Call) -> Tensor:
    """Above 64 pairs, the targets of every chunk of 64 anchors are 0 to 63, without the chunk's offset."""
    if not large(call, 64):
        return call()
    targets = torch.arange(call.n) == (torch.arange(call.n) % 64)[:, None]
    forward = call(direction="a_to_b", positives=targets)
    return (forward + call(direction="b_to_a", positives=targets.T)) / 2


@wrong("supcon", takes=SMALL)
def window_of_128(call: Call) -> Tensor:
    """Rows that are more than 128 rows apart are not positives of each other."""
    near = (torch.arange(call.n)[:, None] - torch.arange(call.n)).abs() <= 128
    return call(labels=None, positives=call.positive & near) if large(call, 129) else call()


@wrong("supcon", takes=SMALL)
def recomputed_at_the_default_temperature(call: Call) -> Tensor:
    """Above 128 rows, the backward pass recomputes the logits with the default temperature."""
    return with_gradient(call(), call(temperature=0.07)) if large(call, 128) else call()


@wrong("supcon_in", takes=SMALL)
def gradient_as_anchors(call: Call) -> Tensor:
    """Above 128 rows, rows get their gradient as anchors, but not as contrasted rows."""
    return as_anchors(call) if large(call, 128) else call()


@wrong("supcon")
def last_chunk_first_under_none(call: Call) -> Tensor:
    """With the reduction none and more than 64 rows, the values of the last incomplete chunk of 64 come first."""
    found = call()
    return found.roll(call.n % 64, 0) if call.reduction == "none" and large(call, 64) else found


@wrong("nt_xent")
def sum_of_means(call: Call) -> Tensor:
    """With the reduction sum and more than 64 rows, the means of chunks of 64 anchors are added."""
    summed = call.reduction == "sum" and large(call, 64)
    return call.weighted(1 / chunk_sizes(call, 64)) if summed else call()


@wrong("info_nce", takes=SMALL)
def temperature_gradient_of_the_last_chunk(call: Call) -> Tensor:
    """Above 64 pairs, a temperature tensor gets the gradient of the last chunk of 64 anchors only."""
    t = call.temperature
    if not large(call, 64) or not isinstance(t, Tensor):
        return call()
    frozen = call.changed(embeddings_a=call.z.detach(), embeddings_b=call.embeddings_b.detach())
    return with_gradient(call(), call(temperature=t.detach()) + frozen.weighted(last(call, 64)))


@wrong("supcon_epsilon")
def ignored_columns_beyond_128(call: Call) -> Tensor:
    """Above 128 rows, the mask of ignored pairs is read up to column 128."""
    if not large(call, 128) or call.ignored is None:
        return call()
    return call(ignored=call.ignored & (torch.arange(call.n) < 128))
