"""Losses that are wrong only for some sizes of classes or some values of labels."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import SMALL, Call, wrong


def relabelled(call: Call, labels: Tensor) -> Tensor:
    """The right loss with other labels; batches with a mask of positives or references are unchanged."""
    return call() if call.labels is None or call.ref_embeddings is not None else call(labels=labels)


@wrong("supcon")
def labels_as_int8(call: Call) -> Tensor:
    """Labels are converted to int8: labels that differ by 256 become equal."""
    return call() if call.labels is None else relabelled(call, call.labels.to(torch.int8).long())


@wrong("supcon_in")
def labels_as_uint8(call: Call) -> Tensor:
    """Labels are stored as bytes: -1 equals 255."""
    return call() if call.labels is None else relabelled(call, call.labels.to(torch.uint8).long())


@wrong("nt_xent_pairwise")
def labels_as_int16(call: Call) -> Tensor:
    """Labels are converted to int16: labels that differ by 65536 become equal."""
    return call() if call.labels is None else relabelled(call, call.labels.to(torch.int16).long())


@wrong("supcon")
def labels_as_float32(call: Call) -> Tensor:
    """Labels are compared as float32: 2^24 and 2^24 + 1 become equal."""
    return call() if call.labels is None else relabelled(call, call.labels.float().double().long())


@wrong("supcon", takes=SMALL)
def labels_modulo_1000(call: Call) -> Tensor:
    """Labels are taken modulo 1000, the number of classes of ImageNet."""
    return relabelled(call, call.labels % 1000)


@wrong("supcon_in", takes=SMALL)
def labels_modulo_997(call: Call) -> Tensor:
    """Labels are hashed to 997 buckets."""
    return relabelled(call, call.labels % 997)


@wrong("nt_xent_pairwise", takes=SMALL)
def labels_without_signs(call: Call) -> Tensor:
    """The sign of a label is ignored."""
    return relabelled(call, call.labels.abs())


@wrong("supcon", takes=SMALL)
def compared_as_float32(call: Call) -> Tensor:
    """Labels of small functions, too, are compared as float32."""
    return relabelled(call, call.labels.float().double().long())


@wrong("supcon", takes=SMALL)
def ignored_label(call: Call) -> Tensor:
    """Rows with the label -100 are not anchors, as in torch's cross-entropy."""
    return call.without_anchors(call.labels == -100) if bool((call.labels != -100).any()) else call()


@wrong("supcon", takes=SMALL)
def classes_of_five(call: Call) -> Tensor:
    """If every class has exactly five rows, the loss is 5 % too large."""
    return call() * 1.05 if bool((call.sizes == 5).all()) else call()


@wrong("supcon_in", takes=SMALL)
def one_pair_and_four_alone(call: Call) -> Tensor:
    """If one class has two rows and at least four others have one, the loss is 5 % too large."""
    pair = bool(((call.sizes == 2).sum() == 2) & ((call.sizes == 1).sum() == call.n - 2))
    return call() * 1.05 if pair and call.n >= 6 else call()


@wrong("supcon_epsilon")
def labels_as_float64(call: Call) -> Tensor:
    """Labels are subtracted as float64 and compared with 0: hashes beyond 2^53 that differ by 1 become equal."""
    if call.labels is None:
        return call()
    _, labels = call.labels.double().unique(return_inverse=True)
    return relabelled(call, labels)


@wrong("supcon")
def label_difference_overflows(call: Call) -> Tensor:
    """Labels are equal if their int64 difference is at most 0 both ways, which overflows near the limits of int64."""
    labels = call.labels
    if labels is None or call.ref_embeddings is not None:
        return call()
    difference = labels[:, None] - labels
    return call(labels=None, positives=(difference <= 0) & (difference.T <= 0))


@wrong("supcon_in")
def negative_labels_are_unlabelled(call: Call) -> Tensor:
    """Negative labels mean unlabelled: such a row has no positives, and two of them are not positives of each other."""
    labels = call.labels
    if labels is None or call.ref_embeddings is not None:
        return call()
    own = -1 - torch.arange(call.n) - int(labels.abs().max())
    return call(labels=torch.where(labels < 0, own, labels))


@wrong("supcon", takes=SMALL)
def minus_one_is_ignored(call: Call) -> Tensor:
    """Rows with the label -1 are dropped from the batch, as by ignore_index."""
    keep = call.labels != -1
    return call(call.z[keep], labels=call.labels[keep]) if 1 < int(keep.sum()) < call.n else call()


@wrong("nt_xent_pairwise", takes=SMALL)
def labels_as_indices(call: Call) -> Tensor:
    """Labels are used as indices of a one-hot matrix, so a negative label counts from the end."""
    labels = call.labels
    span = int(labels.max()) + 1
    return call(labels=torch.where(labels < 0, labels + span, labels)) if 0 < span < 10**6 else call()


@wrong("supcon", takes=SMALL)
def unsorted_labels(call: Call) -> Tensor:
    """Above 12 rows, each run of equal labels is a class of its own."""
    steps = (call.labels[1:] != call.labels[:-1]).long().cumsum(0)
    return call(labels=torch.cat([steps.new_zeros(1), steps])) if call.n > 12 else call()


@wrong("supcon_in")
def first_three_positives(call: Call) -> Tensor:
    """Above 8 rows, only the first three positives of an anchor are kept; the others become negatives."""
    positive = call.positive
    if int(positive.sum(dim=1).amax()) <= 3 or call.n <= 8:
        return call()
    return call(labels=None, ref_labels=None, positives=positive & (positive.cumsum(dim=1) <= 3))


@wrong("supcon", takes=SMALL)
def more_than_eight_positives(call: Call) -> Tensor:
    """The number of positives is capped at 8 in the divisor."""
    return call.weighted(call.counts.clamp(min=1) / call.counts.clamp(1, 8))


@wrong("nt_xent_pairwise", takes=SMALL)
def more_than_sixteen_positives(call: Call) -> Tensor:
    """The value of an anchor with more than 16 positives is multiplied by 16 and divided by their number."""
    return call.weighted(torch.where(call.counts > 16, 16 / call.counts.clamp(min=1), 1.0))


@wrong("supcon_in", takes=SMALL)
def counts_in_int8(call: Call) -> Tensor:
    """The number of positives is counted in int8, which overflows for a class of 129 rows."""
    return call.weighted(call.counts / call.counts.to(torch.int8).clamp(min=1))


@wrong("supcon", takes=SMALL)
def counts_in_uint8(call: Call) -> Tensor:
    """The number of positives is counted in uint8: a class of 257 rows has 0 positives."""
    return call.weighted(call.counts.to(torch.uint8).bool() | (call.counts == 0))


@wrong("supcon", takes=SMALL)
def one_class(call: Call) -> Tensor:
    """For a batch of one class, the loss is 0 from 6 rows on."""
    single = len(call.labels.unique()) == 1 and call.n >= 6
    return call.z.sum() * 0 if single else call()


@wrong("supcon_in", takes=SMALL)
def one_large_class(call: Call) -> Tensor:
    """Above 8 rows, the anchors of a class with more than three quarters of the rows count as 0."""
    heavy = call.sizes * 4 > 3 * call.n
    return call.weighted(1.0 - heavy.double()) if call.n > 8 else call()


@wrong("supcon", takes=SMALL)
def classes_of_exactly_two(call: Call) -> Tensor:
    """If a class has five rows or more, the first anchor of every class of two rows counts as 0."""
    pair = (call.sizes == 2) & (call.labels[:, None] == call.labels).triu(1).any(dim=1)
    return call.weighted(1.0 - pair.double()) if int(call.sizes.max()) >= 5 else call()


@wrong("supcon_epsilon", "policies", takes=SMALL)
def all_labels_distinct(call: Call) -> Tensor:
    """Above 8 rows, if all labels are distinct, the labels are replaced by pairs of consecutive rows."""
    distinct = len(call.labels.unique()) == call.n and call.n > 8
    return call(labels=torch.arange(call.n) // 2) if distinct else call()


@wrong("nt_xent_pairwise", takes=SMALL)
def more_than_ten_classes(call: Call) -> Tensor:
    """If all labels are from 0 to 999, they are taken modulo 10, as for a dataset of ten classes."""
    labels = call.labels
    small = int(labels.min()) >= 0 and int(labels.max()) < 1000
    return call(labels=labels % 10) if small else call()


@wrong("supcon", takes=SMALL)
def more_than_sixteen_classes(call: Call) -> Tensor:
    """With more than 16 classes, the classes after the sixteenth are merged."""
    _, labels = call.labels.unique(return_inverse=True)
    return call(labels=labels.clamp(max=16)) if len(labels.unique()) > 16 else call()


@wrong("supcon_in", takes=SMALL)
def unequal_classes(call: Call) -> Tensor:
    """If more than 12 rows form classes of different sizes, anchors are weighted by one over the size of the class."""
    if call.n <= 12 or len(call.sizes.unique()) == 1:
        return call()
    weights = 1 / call.sizes.double()
    return call.weighted(weights / weights.mean())


@wrong("nt_bxent")
def many_pairs_of_one_row(call: Call) -> Tensor:
    """A row with more than 6 positives is weighted as if it had 6."""
    return call.weighted(torch.where(call.counts > 6, (call.counts + 1) / 7, 1.0))


@wrong("nt_bxent")
def no_pairs_above_eight_rows(call: Call) -> Tensor:
    """A batch of more than 8 rows without any positive pair returns 0."""
    return call.z.sum() * 0 if len(call.positive_pairs) == 0 and call.n > 8 else call()


@wrong("nt_bxent")
def pairs_listed_three_times(call: Call) -> Tensor:
    """The value of an anchor counts twice if one of its pairs is listed three times or more."""
    pairs, times = call.positive_pairs.unique(dim=0, return_counts=True)
    anchors = torch.zeros(call.n, dtype=torch.bool)
    anchors[pairs[times > 2][:, 0]] = True
    return call.weighted(1.0 + anchors.double()) if bool(anchors.any()) else call()
