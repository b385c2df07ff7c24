"""Losses that are wrong only for some references, queues or self rows."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Call, wrong


def first(call: Call, count: int, wanted: Tensor | None = None) -> Tensor:
    """The right loss with only the first ``count`` references; self rows beyond them become -1."""
    own = call.self_rows
    by = {"positives": call.positives[:, :count]} if call.positives is not None else {}
    by |= {"ref_labels": call.ref_labels[:count]} if call.ref_labels is not None else {}
    by |= {} if own is None else {"self_rows": torch.where(own < count, own, -1)}
    return call(ref_embeddings=call.ref_embeddings[:count], **by)


@wrong("supcon")
def first_eight_references(call: Call) -> Tensor:
    """At most 8 references are used."""
    return call() if call.ref_embeddings is None else first(call, 8)


@wrong("supcon_in")
def first_sixteen_references(call: Call) -> Tensor:
    """At most 16 references are used."""
    return call() if call.ref_embeddings is None else first(call, 16)


@wrong("nt_xent_pairwise")
def last_reference_is_dropped(call: Call) -> Tensor:
    """With more than 10 references, the last one is dropped."""
    count = 0 if call.ref_embeddings is None else len(call.ref_embeddings)
    return first(call, count - 1) if count > 10 else call()


@wrong("supcon")
def fewer_references_than_anchors(call: Call) -> Tensor:
    """If there are fewer references than anchors, only as many anchors as references are used."""
    count = call.n if call.ref_embeddings is None else len(call.ref_embeddings)
    return call.without_anchors(torch.arange(call.n) >= count) if 1 < count < call.n else call()


@wrong("supcon_in")
def references_equal_rows(call: Call) -> Tensor:
    """If there are as many references as rows, and more than 5, the diagonal is masked even without self rows."""
    square = call.ref_embeddings is not None and len(call.ref_embeddings) == call.n and call.self_rows is None
    return call(self_rows=torch.arange(call.n)) if square and call.n > 5 else call()


@wrong("nt_xent_pairwise")
def self_rows_are_ignored_beyond_16(call: Call) -> Tensor:
    """Self rows are ignored with more than 16 references."""
    many = call.ref_embeddings is not None and len(call.ref_embeddings) > 16
    return call(self_rows=None) if many else call()


@wrong("supcon")
def self_rows_of_two_rows(call: Call) -> Tensor:
    """A reference that is the self row of two anchors is left out only for the first of them."""
    own = call.self_rows
    if own is None:
        return call()
    again = ((own[:, None] == own) & (own >= 0)[:, None]).tril(-1).any(dim=1)
    return call(self_rows=torch.where(again, -1, own))


@wrong("supcon_in")
def self_row_zero_is_none(call: Call) -> Tensor:
    """Above 6 rows, a self row of 0 is ignored, because it is tested as a truth value."""
    own = call.self_rows
    return call() if own is None or call.n <= 6 else call(self_rows=torch.where(own == 0, -1, own))


@wrong("supcon")
def last_self_row_is_none(call: Call) -> Tensor:
    """Above 4 rows, a self row that is the last reference is ignored."""
    own = call.self_rows
    if own is None:
        return call()
    return call(self_rows=torch.where(own == len(call.ref_embeddings) - 1, -1, own)) if call.n > 4 else call()


@wrong("nt_xent")
def self_row_none_is_the_last(call: Call) -> Tensor:
    """If some anchors have a self row, -1 masks the last reference, as a negative index, unless it is the partner."""
    own = call.self_rows
    if own is None or call.ref_embeddings is None or int(own.min()) >= 0 or int(own.max()) < 0:
        return call()
    last = len(call.ref_embeddings) - 1
    return call(self_rows=torch.where((own < 0) & (call.partners != last), last, own))


@wrong("nt_xent")
def partner_beyond_16(call: Call) -> Tensor:
    """With references, an anchor whose partner has an index above 15 counts as 0."""
    return call.weighted(1.0 - (call.partners > 15).double()) if call.ref_embeddings is not None else call()


@wrong("info_nce")
def first_eight_of_the_queue(call: Call) -> Tensor:
    """Only the first 8 rows of the queue are used."""
    return call() if call.negatives is None else call(negatives=call.negatives[:8])


@wrong("info_nce")
def last_of_the_queue(call: Call) -> Tensor:
    """The last row of a queue of more than 5 rows is dropped."""
    queue = call.negatives
    return call() if queue is None or len(queue) <= 5 else call(negatives=queue[:-1])


@wrong("info_nce")
def queue_as_long_as_the_batch(call: Call) -> Tensor:
    """The first row of a queue with as many rows as the batch, 3 or more, is dropped."""
    queue = call.negatives
    if queue is None or len(queue) != call.n or call.n < 3:
        return call()
    return call(negatives=queue[1:])


@wrong("info_nce")
def queue_and_batch(call: Call) -> Tensor:
    """A queue of more than 20 rows is appended to the batch's keys instead of replacing them as negatives."""
    queue = call.negatives
    if queue is None or len(queue) <= 20:
        return call()
    return call(negatives=torch.cat([queue, call.embeddings_b]))


@wrong("info_nce")
def queue_is_normalised_under_dot(call: Call) -> Tensor:
    """The queue is normalised even if similarities are dot products."""
    queue = call.negatives
    if queue is None or call.similarity != "dot":
        return call()
    return call(negatives=queue / queue.norm(dim=1, keepdim=True).clamp(min=1e-30))


@wrong("info_nce", takes=("negatives", "temperature"))
def queue_is_never_read(call: Call) -> Tensor:
    """The queue is a parameter that is never read, and the other keys are the negatives."""
    return call(negatives=None)


@wrong("info_nce", takes=("negatives", "temperature"), settings={"direction": "a_to_b"})
def queue_is_rounded_to_float32(call: Call) -> Tensor:
    """The queue is rounded to float32, the dtype of the buffer that holds it."""
    queue = call.negatives
    return call(negatives=None if queue is None else queue.float().to(queue.dtype), direction="a_to_b")


@wrong("supcon", "policies")
def anchors_without_positives_among_references(call: Call) -> Tensor:
    """With references, anchors without positives are dropped from the mean, although the policy is zero."""
    zero = call.ref_embeddings is not None and call.no_positive == "zero"
    return call(no_positive="drop") if zero else call()


@wrong("supcon_in", "policies")
def one_reference(call: Call) -> Tensor:
    """With a single reference, the loss is 1 and has no gradient."""
    one = call.ref_embeddings is not None and len(call.ref_embeddings) == 1
    return call.z.sum() * 0 + 1.0 if one else call()


@wrong("supcon")
def references_of_other_norms(call: Call) -> Tensor:
    """References are normalised even if similarities are dot products."""
    references = call.ref_embeddings
    if references is None or call.similarity != "dot":
        return call()
    return call(ref_embeddings=references / references.norm(dim=1, keepdim=True).clamp(min=1e-30))


@wrong("supcon")
def one_anchor_with_references(call: Call) -> Tensor:
    """With references, a batch of one anchor gives the sum over its positives instead of the mean."""
    one = call.n == 1 and call.ref_embeddings is not None
    return call.weighted(call.counts.clamp(min=1)) if one else call()


@wrong("multiple_negatives_ranking")
def third_hard_negative(call: Call) -> Tensor:
    """Without a mask of ignored pairs, only the first two hard negatives of each query are used."""
    hard = call.hard_negatives
    return call() if hard is None or call.ignored is not None else call(hard_negatives=hard[:, :2])
