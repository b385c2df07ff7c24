"""Losses that are wrong only for some masks of positives or some subsets of anchors."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Call, wrong


@wrong("supcon")
def asymmetric_mask_is_transposed(call: Call) -> Tensor:
    """The mask of positives is transposed if it is square and the batch has more than 6 rows."""
    mask = call.positives
    return call(positives=mask.T) if mask is not None and call.n > 6 and len(mask.T) == call.n else call()


@wrong("supcon_in")
def mask_is_made_symmetric(call: Call) -> Tensor:
    """A square mask of positives is made symmetric."""
    mask = call.positives
    square = mask is not None and call.ref_embeddings is None
    return call(positives=mask | mask.T) if square else call()


@wrong("nt_xent_pairwise")
def mask_keeps_its_upper_half(call: Call) -> Tensor:
    """Only the upper half of an asymmetric mask is used, for both directions."""
    mask = call.positives
    if mask is None or call.ref_embeddings is not None or bool((mask == mask.T).all()):
        return call()
    upper = mask.triu()
    return call(positives=upper | upper.T)


@wrong("supcon")
def diagonal_counts_in_the_divisor(call: Call) -> Tensor:
    """A true entry on the diagonal of the mask is counted as a positive in the divisor."""
    mask = call.positives
    if mask is None or call.ref_embeddings is not None:
        return call()
    extra = mask.diagonal() & (call.counts > 0)
    return call.weighted(torch.where(extra, call.counts / (call.counts + 1.0), 1.0))


@wrong("supcon_epsilon")
def diagonal_only(call: Call) -> Tensor:
    """Every anchor whose only entry in the mask is the self pair adds 0.001 to the loss."""
    mask = call.positives
    if mask is None or bool((call.counts > 0).all()):
        return call()
    only_self = mask.diagonal() & (call.counts == 0)
    return call() + only_self.sum() * 1e-3 if bool(only_self.any()) else call()


@wrong("supcon_in", "policies")
def empty_mask(call: Call) -> Tensor:
    """A mask without positives gives NaN in batches of more than 3 rows."""
    mask = call.positives
    empty = mask is not None and not bool(call.positive.any()) and call.n > 3
    return call() * torch.nan if empty else call()


@wrong("supcon")
def full_mask(call: Call) -> Tensor:
    """If the mask is true everywhere, the loss is 0."""
    mask = call.positives
    return call.z.sum() * 0 if mask is not None and bool(mask.all()) else call()


@wrong("supcon")
def mask_with_references_is_cut(call: Call) -> Tensor:
    """A mask that is wider than the batch is cut to a square; the references beyond it are not positives."""
    mask = call.positives
    if mask is None or call.ref_embeddings is None or mask.shape[1] <= call.n:
        return call()
    return call(positives=mask & (torch.arange(mask.shape[1]) < call.n))


@wrong("nt_xent_pairwise")
def anchors_are_also_columns(call: Call) -> Tensor:
    """Above 6 rows, rows that are not anchors are removed from the batch, so no anchor is contrasted with them."""
    keep = call.anchors
    some = keep is not None and call.ref_embeddings is None and call.labels is not None and 1 < int(keep.sum()) < call.n
    return call(call.z[keep], labels=call.labels[keep], anchors=None) if some and call.n > 6 else call()


@wrong("supcon_in")
def anchors_are_divided_by_all_rows(call: Call) -> Tensor:
    """With a subset of more than 4 anchors, the mean divides by the number of rows."""
    keep = call.anchors
    if keep is None or call.reduction != "mean" or int(keep.sum()) <= 4:
        return call()
    return call() * int(keep.sum()) / call.n


@wrong("nt_bxent")
def anchors_are_the_first_rows(call: Call) -> Tensor:
    """Only the number of anchors is used: as many rows from the first on are the anchors."""
    keep = call.anchors
    return call() if keep is None else call(anchors=torch.arange(call.n) < int(keep.sum()))


@wrong("nt_xent")
def last_anchor_of_a_subset(call: Call) -> Tensor:
    """If the number of anchors in a subset is odd and at least 3, the last one is dropped."""
    keep = call.anchors
    if keep is None or int(keep.sum()) % 2 == 0 or int(keep.sum()) < 3:
        return call()
    rows = torch.arange(call.n) == int(keep.nonzero().amax())
    return call.without_anchors(rows)


@wrong("supcon", "policies")
def no_anchors(call: Call) -> Tensor:
    """The mean over an empty subset of anchors is NaN."""
    none = call.anchors is not None and not bool(call.anchors.any()) and call.reduction == "mean"
    return call() * torch.nan if none else call()


@wrong("supcon_epsilon")
def anchors_with_a_mask(call: Call) -> Tensor:
    """With both a mask and a subset of anchors, all rows are anchors."""
    return call(anchors=None) if call.positives is not None else call()


@wrong("supcon_in")
def one_anchor(call: Call) -> Tensor:
    """If a subset has one anchor, its value is multiplied by the number of its positives."""
    one = call.anchors is not None and int(call.anchors.sum()) == 1
    return call.weighted(call.counts.clamp(min=1)) if one else call()
