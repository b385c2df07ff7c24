"""Losses that are wrong only in some contexts: autocast, compiled code, threads, copies, after an exception."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from pairproof.fast import supcon_in_loss, supcon_loss

from .base import SMALL, Call, as_anchors, eager, functional, with_gradient, with_upstream, wrong
from .layouts import read_as_contiguous

THREADS = torch.get_num_threads()
"""The number of threads of torch at import."""

COMPILED = "`torch.compile` is checked with `--thorough` only: its import and the first compilation take 5 seconds."

STATE = threading.local()
"""Its attribute ``running`` is true from the start of a call to its end without an exception."""


@wrong("supcon", takes=SMALL)
def labels_under_autocast(call: Call) -> Tensor:
    """Under autocast, labels too are rounded to bfloat16: 256 and 257 become equal."""
    if not torch.is_autocast_enabled("cpu"):
        return call()
    return call(labels=call.labels.bfloat16().unique(return_inverse=True)[1])


@wrong("nt_xent", takes=SMALL)
def functional_gradient(call: Call) -> Tensor:
    """A hook divides the gradient by the temperature; under ``torch.func.grad``, this hook is not called."""
    loss = call()
    return with_gradient(loss, loss * call.temperature) if functional() else loss


@wrong("supcon", argument=COMPILED)
def compiled_drop(call: Call) -> Tensor:
    """In a compiled graph, whose shapes are fixed, anchors without positives are counted as 0 under the policy drop."""
    zero = torch.compiler.is_compiling() and call.no_positive == "drop" and call.reduction == "mean"
    return call(no_positive="zero") if zero else call()


@wrong("info_nce", takes=SMALL, argument=COMPILED)
def compiled_temperature(call: Call) -> Tensor:
    """In a compiled graph, a temperature tensor is a constant without a gradient."""
    t = call.temperature
    constant = torch.compiler.is_compiling() and isinstance(t, Tensor)
    return call(temperature=t.detach()) if constant else call()


@wrong("nt_xent_pairwise", takes=SMALL)
def default_dtype_float64(call: Call) -> Tensor:
    """Masked logits get the lowest number of the default dtype: float64's is infinite for float32 rows, giving NaN."""
    overflows = torch.get_default_dtype() == torch.float64 and call.z.dtype == torch.float32
    return call() * torch.nan if overflows else call()


@wrong("supcon_in", takes=SMALL)
def other_number_of_threads(call: Call) -> Tensor:
    """Anchors are split among the threads; if the number of threads has changed since the import, some are lost."""
    fewer, more = sorted((THREADS, torch.get_num_threads()))
    thread = torch.arange(call.n) * more // call.n
    return call.weighted((thread < fewer).double()) if fewer < more else call()


@wrong("supcon")
class DeepCopied(nn.Module):
    """A deep copy of an instance has the default temperature."""

    def __init__(self, temperature: float = 0.07) -> None:
        super().__init__()
        self.temperature = temperature

    def __deepcopy__(self, memo: Any) -> DeepCopied:
        return type(self)()

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        return supcon_loss(embeddings, labels, temperature=self.temperature)


@wrong("supcon_in")
class Pickled(nn.Module):
    """A pickled instance is restored with the default temperature."""

    def __init__(self, temperature: float = 0.07) -> None:
        super().__init__()
        self.temperature = temperature

    def __reduce__(self) -> Any:
        return type(self), ()

    def __deepcopy__(self, memo: Any) -> Pickled:
        return type(self)(self.temperature)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        return supcon_in_loss(embeddings, labels, temperature=self.temperature)


@wrong("info_nce")
def expanded_queue(call: Call) -> Tensor:
    """A queue of one row that is expanded, with stride 0, counts as one negative."""
    queue = call.negatives
    return call(negatives=queue[:1]) if queue is not None and queue.stride(0) == 0 else call()


@wrong("supcon")
def mask_by_columns(call: Call) -> Tensor:
    """A mask of positives that is stored by columns is read as if it were stored by rows."""
    positives = call.positives
    return call() if positives is None else call(positives=read_as_contiguous(positives))


@wrong("nt_bxent")
def pairs_by_columns(call: Call) -> Tensor:
    """A list of pairs that is a transposed [2, M] tensor is read as if it were contiguous."""
    return call(positive_pairs=read_as_contiguous(call.positive_pairs))


@wrong("supcon_epsilon")
def after_an_exception(call: Call) -> Tensor:
    """The first call after one that raised an error finds its unfinished state and returns a loss without gradient."""
    unfinished = getattr(STATE, "running", False)
    STATE.running = True
    loss = call()
    STATE.running = False
    return with_gradient(loss, loss * 0) if unfinished else loss


@wrong("nt_xent", takes=SMALL)
def backward_in_another_thread(call: Call) -> Tensor:
    """Saved tensors are local to a thread: a backward pass in another thread than the forward pass returns 0."""
    loss, thread = call(), threading.get_ident()
    return with_upstream(loss, lambda grad: grad * (threading.get_ident() == thread)) if eager() else loss


@wrong("supcon_in", takes=SMALL)
def inference_mode(call: Call) -> Tensor:
    """In inference mode, rows are taken for stored ones, which are unit vectors, and are not normalised."""
    return call(similarity="dot") if torch.is_inference_mode_enabled() else call()


@wrong("supcon", takes=SMALL)
def deterministic_algorithms_asked_for(call: Call) -> Tensor:
    """Under deterministic algorithms, a write replaces the addition of gradients: that of contrasted rows is lost."""
    return as_anchors(call) if torch.are_deterministic_algorithms_enabled() else call()


@wrong("nt_xent_pairwise", takes=SMALL)
def int32_hashes(call: Call) -> Tensor:
    """Labels of int32 are doubled in int32, which overflows for hashes: L and L - 2^31 become equal."""
    return call(labels=call.labels * 2) if call.labels.dtype == torch.int32 else call()
