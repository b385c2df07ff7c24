"""Losses that are wrong only for some temperatures or some ways to pass them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pairproof.fast import info_nce_loss, nt_xent_loss, supcon_in_loss, supcon_loss
from pairproof.fast.views import stacked_partners

from .base import SMALL, Call, with_gradient, wrong


@wrong("supcon", takes=SMALL)
def above_one(call: Call) -> Tensor:
    """Temperatures above 1 are clamped at 1."""
    return call(temperature=min(float(call.temperature), 1.0))


@wrong("nt_xent", takes=SMALL)
def below_a_twentieth(call: Call) -> Tensor:
    """Temperatures below 0.05 are clamped at 0.05."""
    return call(temperature=max(float(call.temperature), 0.05))


@wrong("info_nce", "range", takes=SMALL)
def below_a_hundredth(call: Call) -> Tensor:
    """Temperatures below 0.01 are clamped at 0.01, as in CLIP."""
    return call(temperature=max(float(call.temperature), 0.01))


@wrong("supcon_in", takes=SMALL)
def between_two_and_eight(call: Call) -> Tensor:
    """Temperatures between 2 and 8 are clamped at 2."""
    t = float(call.temperature)
    return call(temperature=2.0 if 2 < t < 8 else t)


@wrong("nt_xent_pairwise", takes=SMALL)
def integers(call: Call) -> Tensor:
    """Temperatures above 1 are rounded to an integer."""
    t = float(call.temperature)
    return call(temperature=float(round(t)) if t > 1 else t)


@wrong("nt_bxent")
def four_decimals(call: Call) -> Tensor:
    """Temperatures are rounded to four decimals."""
    return call(temperature=max(round(float(call.temperature), 4), 1e-4))


@wrong("supcon_epsilon", takes=SMALL)
def divisor_at_low_temperatures(call: Call) -> Tensor:
    """At temperatures between 0.02 and 0.04, the mean divides by the number of rows minus 1."""
    return call() * call.n / (call.n - 1) if 0.02 < float(call.temperature) < 0.04 else call()


@wrong("nt_xent_pairwise", takes=SMALL)
def floor_at_a_fiftieth(call: Call) -> Tensor:
    """Temperatures below 0.02 are clamped at 0.02."""
    return call(temperature=max(float(call.temperature), 0.02))


@wrong("nt_xent", takes=SMALL)
def logits_of_at_most_fifty(call: Call) -> Tensor:
    """Logits are clamped at 50."""
    z = torch.nn.functional.normalize(call.z, dim=1)
    logits = (z @ z.T / call.temperature).clamp(max=50.0)
    own = torch.eye(call.n, dtype=torch.bool)
    loss = torch.nn.functional.cross_entropy(logits.masked_fill(own, -torch.inf), call.partners)
    return loss if bool((z @ z.T / call.temperature).masked_fill(own, 0.0).max() > 50) else call()


@wrong("supcon", takes=(), temperature=2.5)
def first_row_at_a_built_in_temperature(call: Call) -> Tensor:
    """In batches of more than 20 rows, no anchor is contrasted with the first row; the temperature 2.5 is built in."""
    if call.n <= 20:
        return call(temperature=2.5)
    return Call(call.loss, {**call.arguments, "temperature": 2.5}).without_columns(torch.arange(call.n) == 0)


@wrong("info_nce", takes=(), temperature=0.37)
def other_direction_at_a_built_in_temperature(call: Call) -> Tensor:
    """Both directions are claimed; with a built-in temperature of 0.37, only one is computed for 3 pairs."""
    return call(temperature=0.37, direction="a_to_b" if call.n == 3 else "both")


@wrong("info_nce", takes=(), temperature=0.033, settings={"direction": "a_to_b"})
def wrong_axis(call: Call) -> Tensor:
    """The softmax runs over the wrong axis: a_to_b is claimed and b_to_a is computed."""
    return call(temperature=0.033, direction="b_to_a")


@wrong("supcon", "policies", takes=(), temperature=0.37)
def nan_at_a_built_in_temperature(call: Call) -> Tensor:
    """Anchors without positives give NaN, although the policy zero is claimed; the temperature is built in."""
    return call(temperature=0.37, no_positive="nan")


@wrong("nt_xent", takes=(), call="labels", temperature=0.033)
def norms_at_a_built_in_temperature(call: Call) -> Tensor:
    """In batches of more than 9 rows, rows have norm 0.99 instead of 1; the temperature 0.033 is built in."""
    if call.n <= 9:
        return call(temperature=0.033)
    rows = call.z / call.z.norm(dim=1, keepdim=True).clamp(min=1e-300)
    return call(0.99 * rows, temperature=0.033, similarity="dot")


@wrong("supcon_in", takes=(), temperature=0.033)
def last_row_at_a_built_in_temperature(call: Call) -> Tensor:
    """The last row of an odd batch is not an anchor; the temperature is built in."""
    odd = call.n % 2 == 1 and call.n > 2
    rows = torch.arange(call.n) >= (call.n - 1 if odd else call.n)
    return Call(call.loss, {**call.arguments, "temperature": 0.033}).without_anchors(rows)


@wrong("info_nce", temperature=0.25)
class LearnedButDetached(nn.Module):
    """The temperature is a parameter of the module, and the loss is computed from its detached value."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.25))

    def forward(self, view_a: Tensor, view_b: Tensor) -> Tensor:
        """The loss without a gradient of the temperature."""
        return info_nce_loss(view_a, view_b, temperature=self.temperature.detach())


@wrong("supcon", temperature=0.25)
class LearnedWithAnotherGradient(nn.Module):
    """The temperature is a parameter of the module; its gradient is divided by the temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.25))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss; the temperature's gradient is divided by the temperature."""
        t = with_gradient(self.temperature, self.temperature / self.temperature.detach())
        return supcon_loss(embeddings, labels, temperature=t)


@wrong("nt_xent", temperature=0.25)
class LearnedWithHalfTheGradient(nn.Module):
    """The temperature is a parameter of the module; its gradient is halved, as by ``torch.maximum`` on a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.25))

    def forward(self, view_a: Tensor, view_b: Tensor) -> Tensor:
        """The loss of stacked views."""
        rows = torch.cat([view_a, view_b])
        t = 0.5 * (self.temperature + self.temperature.detach())
        return nt_xent_loss(rows, stacked_partners(len(rows)), temperature=t)


@wrong("supcon_in")
def temperature_given_as_a_tensor(call: Call) -> Tensor:
    """A temperature that is a tensor is rounded to two decimals."""
    t = call.temperature
    return call(temperature=round(float(t), 2)) if isinstance(t, Tensor) else call()


@wrong("supcon_in")
class OneAsDefault(nn.Module):
    """A temperature of 1, which the constructor takes for an unset argument, is replaced by 0.07."""

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.temperature = 0.07 if temperature == 1.0 else temperature

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        return supcon_in_loss(embeddings, labels, temperature=self.temperature)
