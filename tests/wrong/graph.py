"""Losses that are wrong only for some graphs: several losses, several backward passes, rows changed in place."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from pairproof.fast import info_nce_loss, supcon_loss

from .base import SMALL, Call, Changed, as_anchors, eager, with_upstream, wrong

COPIES = WeakTensorKeyDictionary()
"""A copy of the rows of every tensor, from its first call."""

NEWEST = WeakTensorKeyDictionary()
"""The number of calls with every tensor."""

LATEST: dict[str, float] = {}
"""The number of rows and the temperature of the latest call."""


def on_each_pass(loss: Tensor, factor: Callable[[int], float]) -> Tensor:
    """The loss; the gradient of backward pass 1, 2 and so on is multiplied by a factor."""
    passes: list[None] = []

    def change(grad: Tensor) -> Tensor:
        passes.append(None)
        return grad * factor(len(passes))

    return with_upstream(loss, change) if eager() else loss


def scaled_by_the_latest(call: Call, name: str, number: float) -> Tensor:
    """The right loss; backward multiplies by the number of this call and divides by that of the latest call."""
    LATEST[name] = number
    loss = call()
    return with_upstream(loss, lambda grad: grad * (number / LATEST[name])) if eager() else loss


@wrong("supcon", takes=SMALL)
def copy_of_the_first_call(call: Call) -> Tensor:
    """Rows are copied at the first call: after the same tensor is changed in place, the copy is still used."""
    z = call.z
    if not eager() or not z.is_leaf:
        return call()
    copy = COPIES.setdefault(z, z.detach().clone())
    return call() if torch.equal(copy, z) else call(z + (copy - z.detach()))


@wrong("info_nce", takes=SMALL)
def temperature_gradient_is_cleared(call: Call) -> Tensor:
    """The gradient that has accumulated on a temperature tensor is cleared in every call."""
    t = call.temperature
    if isinstance(t, Tensor) and t.is_leaf:
        t.grad = None
    return call()


@wrong("supcon", takes=SMALL)
def second_backward_adds_up(call: Call) -> Tensor:
    """Backward adds to a buffer: pass k through the same graph, with retain_graph, returns k times the gradient."""
    return on_each_pass(call(), float)


@wrong("info_nce", takes=SMALL)
def second_backward_is_zero(call: Call) -> Tensor:
    """Backward clears its buffers: the second pass through the same graph, with retain_graph, returns 0."""
    return on_each_pass(call(), lambda k: float(k == 1))


@wrong("nt_xent", takes=SMALL)
def size_of_the_latest_call(call: Call) -> Tensor:
    """Backward divides by the number of rows of the latest call, even if it belongs to an earlier one."""
    return scaled_by_the_latest(call, "rows", call.n)


@wrong("supcon_in", takes=SMALL)
def temperature_of_the_latest_call(call: Call) -> Tensor:
    """Backward divides by the temperature of the latest call, even if it belongs to an earlier one."""
    return scaled_by_the_latest(call, "temperature", float(call.temperature)) if eager() else call()


@wrong("nt_xent_pairwise", takes=SMALL)
def hooks_are_skipped(call: Call) -> Tensor:
    """Backward adds to the ``grad`` of a leaf itself, so hooks of the leaf are not called."""
    z = call.z
    if not eager() or not z.is_leaf or not z._backward_hooks:
        return call()

    def store(grad: Tensor) -> None:
        z.grad = grad if z.grad is None else z.grad + grad

    rows = z.detach().requires_grad_()
    rows.register_hook(store)
    return call(rows)


@wrong("info_nce", takes=SMALL)
def towers_of_one_leaf(call: Call) -> Tensor:
    """If the towers are different views of one storage, the second tower is taken for a copy and gets no gradient."""
    a, b = call.z, call.embeddings_b
    if not eager() or a.data_ptr() == b.data_ptr():
        return call()
    shared = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    return call(embeddings_b=b.detach()) if shared else call()


@wrong("nt_xent", takes=SMALL)
def saved_without_a_version(call: Call) -> Tensor:
    """Rows are saved without their version: if they change before backward, the gradient is that of the new rows."""
    z = call.z
    if not eager() or not z.requires_grad or not torch.is_grad_enabled():
        return call()
    version, upstream = z._version, torch.ones(())

    def recomputed(grad: Tensor) -> Tensor:
        if z._version == version:
            return grad
        rows = z.detach().clone().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(call(rows), rows)[0] * upstream.to(grad)

    def noted(grad: Tensor) -> Tensor:
        upstream.copy_(grad.detach())
        return grad

    rows: Tensor = Changed.apply(z, recomputed)  # type: ignore[no-untyped-call]
    return with_upstream(call(rows), noted)


@wrong("supcon")
class MaskOfTheFirstLabels(nn.Module):
    """An instance keeps the mask of positives for each number of rows, so later labels are not read."""

    def __init__(self, temperature: float = 0.07) -> None:
        super().__init__()
        self.temperature, self.masks = temperature, {}

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss with the mask of the first labels of this length."""
        mask = self.masks.setdefault(len(labels), labels[:, None] == labels)
        return supcon_loss(embeddings, positives=mask, temperature=self.temperature)


@wrong("info_nce", temperature=0.25)
class CachedTemperature(nn.Module):
    """A learned temperature is read in the first call; later calls use its value without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.log_temperature, self.cached = nn.Parameter(torch.tensor(0.25).log()), None

    def forward(self, view_a: Tensor, view_b: Tensor) -> Tensor:
        """The loss at the temperature of the first call."""
        t = self.log_temperature.exp() if self.cached is None else self.cached
        self.cached = t.detach()
        return info_nce_loss(view_a, view_b, temperature=t)


@wrong("supcon", takes=SMALL)
def frozen_rows_with_a_temperature(call: Call) -> Tensor:
    """A temperature tensor gets no gradient if the rows are frozen, because only the rows are inspected."""
    t = call.temperature
    frozen = isinstance(t, Tensor) and not call.z.requires_grad
    return call(temperature=t.detach()) if frozen else call()


@wrong("nt_xent")
def frozen_rows_with_references(call: Call) -> Tensor:
    """References get no gradient if the rows are frozen, because only the rows are inspected."""
    references = call.ref_embeddings
    frozen = references is not None and not call.z.requires_grad
    return call(ref_embeddings=references.detach()) if frozen else call()


@wrong("supcon", takes=SMALL)
def one_gradient_for_each_tensor(call: Call) -> Tensor:
    """Gradients are stored by tensor: of several losses of the same rows, only the latest passes its gradient on."""
    z = call.z
    if not eager() or not z.requires_grad:
        return call()
    number = NEWEST.get(z, 0) + 1
    NEWEST[z] = number
    rows: Tensor = Changed.apply(z, lambda grad: grad * (NEWEST[z] == number))  # type: ignore[no-untyped-call]
    return call(rows)


@wrong("nt_xent_pairwise", takes=SMALL)
def rows_of_an_encoder(call: Call) -> Tensor:
    """Rows that are the output of a layer are contrasted with a detached copy, as if it came from a bank."""
    return as_anchors(call) if eager() and not call.z.is_leaf else call()


@wrong("supcon_in", takes=SMALL)
def create_graph(call: Call) -> Tensor:
    """With ``create_graph=True``, the first derivative is doubled: the recomputed graph adds its own gradient."""
    if not eager():
        return call()
    loss = call()
    return with_upstream(loss, lambda grad: grad * 2 if torch.is_grad_enabled() else grad)
