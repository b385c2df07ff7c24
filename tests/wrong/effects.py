"""Losses whose values are right, but whose call has a side effect."""

from __future__ import annotations

import random
import warnings

import numpy as np
import torch
from torch import Tensor

from .base import SMALL, Call, wrong


@wrong("supcon", takes=SMALL)
def default_dtype(call: Call) -> Tensor:
    """The default dtype of torch is set to float64 and not restored."""
    loss = call()
    torch.set_default_dtype(torch.float64)
    return loss


@wrong("supcon_in", takes=SMALL)
def gradient_mode(call: Call) -> Tensor:
    """Gradients are switched off after the call: every later backward pass of the caller fails."""
    loss = call()
    torch.set_grad_enabled(False)
    return loss


@wrong("nt_xent", takes=SMALL)
def seed(call: Call) -> Tensor:
    """The global generator of torch is seeded in every call, so that dropout repeats itself."""
    torch.manual_seed(0)
    return call()


@wrong("nt_xent_pairwise", takes=SMALL)
def draws_numbers(call: Call) -> Tensor:
    """A number is drawn from the global generator of torch in every call."""
    torch.rand(1)
    return call()


@wrong("supcon_epsilon", takes=SMALL)
def numpy_seed(call: Call) -> Tensor:
    """The global generators of numpy and of Python are seeded in every call."""
    np.random.seed(0)  # noqa: NPY002 - the mistake
    random.seed(0)
    return call()


@wrong("info_nce", takes=SMALL)
def rows_in_place(call: Call) -> Tensor:
    """Rows are normalised in place, so that the caller's tensor changes; the value is right."""
    loss = call()
    with torch.no_grad():
        call.z.div_(call.z.norm(dim=1, keepdim=True).clamp(min=1e-300))
    return loss


@wrong("supcon", takes=SMALL)
def labels_in_place(call: Call) -> Tensor:
    """The caller's labels are renumbered in place."""
    loss = call()
    call.labels.copy_(call.labels.unique(return_inverse=True)[1])
    return loss


@wrong("supcon_in")
def references_in_place(call: Call) -> Tensor:
    """The oldest reference is overwritten by the first row, as when a queue is updated in the call."""
    loss = call()
    if call.ref_embeddings is not None:
        call.ref_embeddings.data[0] = call.z.detach()[0]
    return loss


@wrong("info_nce")
def queue_in_place(call: Call) -> Tensor:
    """The queue is rolled after the call, in place."""
    loss = call()
    if call.negatives is not None:
        call.negatives.data.copy_(call.negatives.detach().roll(1, 0))
    return loss


@wrong("nt_bxent")
def pairs_in_place(call: Call) -> Tensor:
    """The list of pairs is reversed in place."""
    loss = call()
    if len(call.positive_pairs):
        call.positive_pairs.copy_(call.positive_pairs.flip(0))
    return loss


@wrong("nt_xent_pairwise", takes=SMALL)
def backward_is_called(call: Call) -> Tensor:
    """The loss calls backward itself, so the caller's gradients accumulate twice."""
    loss = call()
    if loss.requires_grad and torch.is_grad_enabled():
        loss.backward(retain_graph=True)
    return loss


@wrong("supcon", takes=SMALL)
def clears_the_gradient(call: Call) -> Tensor:
    """The gradient that the caller has accumulated on the rows is cleared."""
    if call.z.is_leaf:
        call.z.grad = None
    return call()


@wrong("nt_xent", takes=SMALL)
def requires_gradient(call: Call) -> Tensor:
    """Frozen rows are set to require a gradient."""
    loss = call()
    if call.z.is_leaf:
        call.z.requires_grad_(True)
    return loss


@wrong("info_nce", takes=SMALL)
def thread_count(call: Call) -> Tensor:
    """The number of threads of torch is changed and not restored."""
    loss = call()
    torch.set_num_threads(2 if torch.get_num_threads() == 1 else 1)
    return loss


@wrong("supcon_epsilon", takes=SMALL)
def anomaly_mode(call: Call) -> Tensor:
    """Anomaly detection is switched on and not restored, which makes every later backward pass slow."""
    loss = call()
    torch.autograd.set_detect_anomaly(True)
    return loss


@wrong("supcon_in", takes=SMALL)
def deterministic_algorithms(call: Call) -> Tensor:
    """Deterministic algorithms are switched on and not restored, so other operations of the caller raise errors."""
    loss = call()
    torch.use_deterministic_algorithms(True)
    return loss


@wrong("nt_xent_pairwise", takes=SMALL)
def warnings_filter(call: Call) -> Tensor:
    """All warnings of the process are silenced."""
    warnings.simplefilter("ignore")
    return call()


@wrong("supcon", takes=SMALL)
def numpy_errors(call: Call) -> Tensor:
    """Numpy's warnings of floating-point errors are switched off and not restored."""
    np.seterr(all="ignore")
    return call()
