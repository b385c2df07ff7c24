"""Losses whose values are right, but whose gradients are wrong for one input or one structure."""

from __future__ import annotations

import torch
from torch import Tensor

from pairproof.fast import supcon_loss

from .base import SMALL, Call, Changed, scaled_gradient, with_gradient, wrong


@wrong("nt_xent", takes=(), temperature=0.5)
def second_view_detached(call: Call) -> Tensor:
    """No gradient reaches the second half of the rows, the second view, at a temperature that is built in."""
    half = call.n // 2
    return call(torch.cat([call.z[:half], call.z[half:].detach()]), temperature=0.5)


@wrong("info_nce", takes=("direction", "temperature", "reduction"))
def first_tower_detached_in_one_direction(call: Call) -> Tensor:
    """From b to a, tower a is detached; the values are right."""
    return call(call.z.detach()) if call.direction == "b_to_a" else call()


@wrong("supcon")
def references_detached(call: Call) -> Tensor:
    """References get no gradient, as if they came from a memory bank."""
    references = call.ref_embeddings
    return call() if references is None else call(ref_embeddings=references.detach())


@wrong("supcon_in")
def references_get_half(call: Call) -> Tensor:
    """If there are more references than rows, only as many references as rows get a gradient."""
    references = call.ref_embeddings
    if references is None or len(references) <= call.n:
        return call()
    return call(ref_embeddings=torch.cat([references[: call.n], references[call.n :].detach()]))


@wrong("nt_xent")
def self_rows_get_no_gradient(call: Call) -> Tensor:
    """References that are the self row of some anchor get no gradient."""
    references, own = call.ref_embeddings, call.self_rows
    if references is None or own is None:
        return call()
    frozen = (torch.arange(len(references))[:, None] == own).any(dim=1, keepdim=True)
    return call(ref_embeddings=torch.where(frozen, references.detach(), references))


@wrong("info_nce")
def queue_gets_no_gradient(call: Call) -> Tensor:
    """The queue gets no gradient, although it requires one."""
    queue = call.negatives
    return call() if queue is None else call(negatives=queue.detach())


@wrong("info_nce")
def queue_gets_its_gradient_twice(call: Call) -> Tensor:
    """With the direction both, the queue gets twice its gradient."""
    queue = call.negatives
    return call() if queue is None or call.direction != "both" else call(negatives=scaled_gradient(queue, 2))


def without_gradient(temperature: object) -> object:
    """The temperature without its gradient."""
    return temperature.detach() if isinstance(temperature, Tensor) else temperature


@wrong("info_nce")
def temperature_detached(call: Call) -> Tensor:
    """A temperature tensor gets no gradient."""
    return call(temperature=without_gradient(call.temperature))


@wrong("supcon")
def temperature_converted_to_a_number(call: Call) -> Tensor:
    """A temperature tensor is converted to a number, so a learned temperature never changes."""
    return call(temperature=float(call.temperature))


@wrong("supcon_in")
def temperature_gradient_has_another_sign(call: Call) -> Tensor:
    """The gradient of a temperature tensor has the wrong sign."""
    t = call.temperature
    return call(temperature=scaled_gradient(t, -1)) if isinstance(t, Tensor) and t.requires_grad else call()


@wrong("nt_xent")
def temperature_gradient_of_the_base(call: Call) -> Tensor:
    """With a base temperature, the factor temperature / base is detached from the temperature's gradient."""
    t, base = call.temperature, call.base_temperature
    if base is None or not isinstance(t, Tensor):
        return call()
    return call(base_temperature=None) * (float(t) / base)


@wrong("nt_xent_pairwise")
def temperature_gradient_lacks_its_power(call: Call) -> Tensor:
    """The gradient of a temperature tensor is multiplied by the temperature."""
    t = call.temperature
    return call(temperature=scaled_gradient(t, float(t))) if isinstance(t, Tensor) and t.requires_grad else call()


@wrong("info_nce", takes=("temperature",))
def logit_scale_without_gradient(call: Call) -> Tensor:
    """The temperature is wrapped in a new tensor, which cuts its gradient."""
    return call(temperature=torch.tensor(float(call.temperature), dtype=torch.float64))


@wrong("supcon")
def repeated_rows_get_half(call: Call) -> Tensor:
    """Rows that occur more than once get half of their gradient."""
    z = call.z
    if call.ref_embeddings is not None:
        return call()
    equal = (z[:, None] == z).all(dim=2).sum(dim=1, keepdim=True) > 1
    return call(scaled_gradient(z, torch.where(equal, 0.5, 1.0).to(z.dtype)))


@wrong("supcon_in")
def repeated_rows_get_no_gradient(call: Call) -> Tensor:
    """Rows whose cosine with another row is above 1 - 1e-12 get no gradient."""
    z = call.z
    if call.labels is None or call.ref_embeddings is not None or call.similarity != "cosine":
        return call()
    unit = z.detach() / z.detach().norm(dim=1, keepdim=True).clamp(min=1e-300)
    equal = ((unit @ unit.T) > 1 - 1e-12).fill_diagonal_(False).any(dim=1, keepdim=True)
    return call(torch.where(equal, z.detach(), z))


@wrong("nt_xent_pairwise")
def anchors_without_positives_as_negatives(call: Call) -> Tensor:
    """A row without positives gets no gradient as a negative of others."""
    z = call.z
    if call.ref_embeddings is not None:
        return call()
    return call(torch.where((call.counts > 0)[:, None], z, z.detach()))


@wrong("nt_bxent")
def rows_that_are_not_anchors(call: Call) -> Tensor:
    """Rows that are not anchors get no gradient as contrasted rows."""
    keep = call.anchors
    return call() if keep is None else call(torch.where(keep[:, None], call.z, call.z.detach()))


@wrong("supcon_epsilon")
def gradient_of_supcon(call: Call) -> Tensor:
    """At temperatures of 1 and above, the gradient ignores the epsilon."""
    if float(call.temperature) < 1 or call.positives is not None:
        return call()
    same = {k: v for k, v in call.arguments.items() if k not in ("backend", "validate")}
    return with_gradient(call(), supcon_loss(**same))


@wrong("supcon", takes=SMALL)
def gradient_of_long_rows(call: Call) -> Tensor:
    """Rows of norm above 5 get the gradient that they would have with norm 5."""
    norm = call.z.detach().norm(dim=1, keepdim=True)
    return call(scaled_gradient(call.z, (norm / 5).clamp(min=1)))


@wrong("nt_xent", takes=SMALL)
def gradient_is_clipped(call: Call) -> Tensor:
    """Each entry of the gradient of the rows is clipped to [-2, 2]."""
    return call(Changed.apply(call.z, lambda grad: grad.clamp(-2, 2)))  # type: ignore[no-untyped-call]


@wrong("info_nce", argument="Training needs first derivatives only; second derivatives are not part of the claim.")
def second_derivative(call: Call) -> Tensor:
    """The gradient cannot be differentiated again."""
    loss = call()
    if not loss.requires_grad:
        return loss

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return grad

    return Once.apply(loss)  # type: ignore[no-untyped-call,no-any-return]


@wrong("nt_xent", takes=SMALL, call="labels")
def zero_gradient_of_one_column(call: Call) -> Tensor:
    """Above 8 columns, the last column gets no gradient."""
    z = call.z
    return call(torch.cat([z[:, :-1], z[:, -1:].detach()], dim=1)) if call.d > 8 else call()
