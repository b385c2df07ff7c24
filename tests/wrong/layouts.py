"""Losses that are wrong only for some layouts of arrays, some kinds of labels or some ways to call them."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn

from pairproof.fast import info_nce_loss, supcon_in_loss, supcon_loss

from .base import SMALL, Call, wrong

REFUSED = "It raises an error that names the layout or the dtype, and the report lists this usage as not tried."


def read_as_contiguous(z: Tensor) -> Tensor:
    """Return the rows that a kernel reads if it assumes that they are contiguous."""
    return z if z.is_contiguous() else z.as_strided(z.shape, (z.shape[1], 1), z.storage_offset())


@wrong("supcon", takes=SMALL)
def rows_by_columns(call: Call) -> Tensor:
    """Rows are read as if they were contiguous, even if they are a transposed matrix."""
    return call(read_as_contiguous(call.z))


@wrong("nt_xent_pairwise", takes=SMALL)
def rows_behind_a_stride(call: Call) -> Tensor:
    """Rows with gaps between them in memory are read as if they were contiguous."""
    z = call.z
    return call(read_as_contiguous(z)) if z.stride(1) == 1 and z.stride(0) != z.shape[1] else call()


@wrong("supcon_in", takes=SMALL, argument=REFUSED)
def view_of_the_rows(call: Call) -> Tensor:
    """The rows are flattened with view, which raises an error if they are not contiguous."""
    return call(call.z.view(-1).view(call.n, call.d))


@wrong("info_nce")
def second_tower_by_columns(call: Call) -> Tensor:
    """The second tower is read as if it were contiguous."""
    return call(embeddings_b=read_as_contiguous(call.embeddings_b))


@wrong("info_nce")
def queue_by_columns(call: Call) -> Tensor:
    """A queue that is stored by columns, as in MoCo, is read as if it were stored by rows."""
    queue = call.negatives
    return call() if queue is None else call(negatives=read_as_contiguous(queue))


@wrong("supcon")
def references_behind_a_stride(call: Call) -> Tensor:
    """Strided references are read as if they were contiguous."""
    references = call.ref_embeddings
    return call() if references is None else call(ref_embeddings=read_as_contiguous(references))


@wrong("nt_bxent")
def storage_offset(call: Call) -> Tensor:
    """The offset of the rows in their storage is ignored."""
    z = call.z
    return call(z.as_strided(z.shape, z.stride(), 0)) if z.storage_offset() else call()


@wrong("supcon", takes=SMALL)
def int32_labels(call: Call) -> Tensor:
    """Only every second label of int32 labels is read; the rest is filled with the first label."""
    labels = call.labels
    if labels.dtype != torch.int32:
        return call()
    return call(labels=torch.cat([labels[::2], labels[:1].expand(call.n - len(labels[::2]))]).long())


@wrong("supcon_in", takes=SMALL)
def uint8_labels(call: Call) -> Tensor:
    """Labels of uint8 are treated as a mask, so that all labels except 0 are equal."""
    labels = call.labels
    return call(labels=labels.bool().long() if labels.dtype == torch.uint8 else labels.long())


@wrong("nt_xent_pairwise", takes=SMALL, argument=REFUSED)
def bool_labels(call: Call) -> Tensor:
    """Bool labels raise an error, because they are subtracted."""
    labels = call.labels
    return call(labels=(labels - labels[:1]) if labels.dtype == torch.bool else labels.long())


@wrong("supcon_epsilon", takes=SMALL)
def labels_behind_a_stride(call: Call) -> Tensor:
    """Strided labels are read as if they were contiguous."""
    labels = call.labels
    return call(labels=labels.as_strided(labels.shape, (1,), labels.storage_offset()))


@wrong("supcon", "range", takes=SMALL)
def labels_of_one_column(call: Call) -> Tensor:
    """Labels of the shape [N, 1] are compared by broadcasting, so that all rows are positives."""
    labels = call.labels
    return call(labels=labels[:, 0] * 0 if labels.dim() == 2 else labels)


@wrong("supcon", takes=SMALL)
def frozen_rows(call: Call) -> Tensor:
    """Rows that require no gradient raise an error, because a hook is registered."""
    call.z.register_hook(lambda grad: grad)
    return call()


@wrong("info_nce", takes=SMALL)
def frozen_first_tower(call: Call) -> Tensor:
    """If only the second tower requires a gradient, the loss has none: only the first tower is inspected."""
    with torch.set_grad_enabled(call.z.requires_grad and torch.is_grad_enabled()):
        return call()


@wrong("info_nce", takes=("negatives", "temperature"))
def frozen_queue(call: Call) -> Tensor:
    """A queue that requires no gradient raises an error."""
    if call.negatives is not None:
        call.negatives.register_hook(lambda grad: grad)
    return call()


@wrong("supcon", takes=SMALL)
def no_grad_mode(call: Call) -> Tensor:
    """Without gradient mode, the loss is 0: values are computed in the backward pass."""
    return call() if torch.is_grad_enabled() else call() * 0


@wrong("info_nce", takes=SMALL)
def towers_that_share_memory(call: Call) -> Tensor:
    """If both towers are the same tensor, the loss is halved."""
    same = call.z.data_ptr() == call.embeddings_b.data_ptr()
    return call() * 0.5 if same else call()


@wrong("supcon")
def references_that_are_the_batch(call: Call) -> Tensor:
    """If the references are the same tensor as the rows, self pairs are excluded even without self rows."""
    references = call.ref_embeddings
    same = references is not None and references.data_ptr() == call.z.data_ptr() and call.self_rows is None
    return call(self_rows=torch.arange(call.n)) if same else call()


@wrong("supcon", takes=SMALL)
def other_threads(call: Call) -> Tensor:
    """In another thread, a thread-local buffer is empty and the loss is 0."""
    return call() if threading.current_thread() is threading.main_thread() else call() * 0


@wrong("supcon")
class SecondCall(nn.Module):
    """From the second call on, an instance subtracts the mean entry of the previous call's embeddings."""

    def __init__(self, temperature: float = 0.07) -> None:
        super().__init__()
        self.temperature, self.mean = temperature, None

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss of the embeddings minus the mean entry of the previous call's embeddings."""
        rows = embeddings if self.mean is None else embeddings - self.mean
        self.mean = embeddings.detach().mean()
        return supcon_loss(rows, labels, temperature=self.temperature)


@wrong("supcon_in")
class EvaluationMode(nn.Module):
    """In evaluation mode, the loss is not divided by the temperature."""

    def __init__(self, temperature: float = 0.07) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss; the temperature is 1 in evaluation mode."""
        return supcon_in_loss(embeddings, labels, temperature=self.temperature if self.training else 1.0)


@wrong("info_nce")
class CachedLabels(nn.Module):
    """An instance keeps the number of pairs of its first call as the divisor of all later calls."""

    def __init__(self, temperature: float = 0.07) -> None:
        super().__init__()
        self.temperature, self.pairs = temperature, 0

    def forward(self, view_a: Tensor, view_b: Tensor) -> Tensor:
        """The sum over the pairs, divided by the cached number."""
        self.pairs = self.pairs or len(view_a)
        return info_nce_loss(view_a, view_b, temperature=self.temperature) * len(view_a) / self.pairs
