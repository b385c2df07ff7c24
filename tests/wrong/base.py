"""The record of a wrong implementation, the decorator that declares one, and the right losses that they are built from.

A wrong implementation calls the right loss, ``pairproof.fast``, with other arguments or changes its result, but only in
its own regime. Outside this regime it returns the right loss, so only a check that enters the regime can find it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from pairproof.conformance.suite.catalogue import LOSSES

SMALL = ("temperature",)
"""The keywords of a short user function."""


@dataclass(frozen=True)
class Wrong:
    """A wrong implementation.

    Attributes:
        name: the regime and the mistake, such as "sizes/last-row-of-odd-batches".
        regime: the kind of situation in which it is wrong; the name of its file.
        words: one sentence or two that describe the mistake.
        loss: the loss that it claims to compute, by its short name in the catalogue.
        level: the level of the verdict at which it must fail.
        target: the function, class or instance to check.
        options: the options of ``check_loss``.
        argument: why it may conform; "" if it must not.
    """

    name: str
    regime: str
    words: str
    loss: str
    level: str
    target: Any
    options: Mapping[str, Any]
    argument: str = ""


DECLARED: list[Wrong] = []
"""The wrong implementations declared so far."""


class Call:
    """The arguments of one call, by the catalogue's names, and the right loss of them.

    The arguments are attributes: ``call.labels`` is None if the loss has no labels.
    """

    def __init__(self, loss: str, arguments: Mapping[str, Any]) -> None:
        self.loss, self.entry, self.arguments = loss, LOSSES[loss], dict(arguments)

    def __getattr__(self, name: str) -> Any:
        return self.arguments.get(name)

    def __call__(self, z: Tensor | None = None, **changed: Any) -> Tensor:
        """The right loss, with some arguments replaced; ``z`` replaces the first matrix."""
        first = {} if z is None else {self.entry.embeddings[0]: z}
        result: Tensor = self.entry.fast(**{**self.arguments, **first, **changed})
        return result

    def changed(self, **arguments: Any) -> Call:
        """The same call with other arguments."""
        return Call(self.loss, {**self.arguments, **arguments})

    @property
    def z(self) -> Tensor:
        """[N, D], the first matrix."""
        rows: Tensor = self.arguments[self.entry.embeddings[0]]
        return rows

    @property
    def n(self) -> int:
        """The number of rows of the first matrix."""
        return len(self.z)

    @property
    def d(self) -> int:
        """The number of columns."""
        return self.z.shape[1]

    @property
    def positive(self) -> Tensor:
        """bool [N, M], the positives of every row; a self pair is not positive."""
        references = self.n if self.ref_embeddings is None else len(self.ref_embeddings)
        own = torch.arange(self.n) if self.ref_embeddings is None else self.self_rows
        if self.positives is not None:
            mask = self.positives.bool().clone()
        elif self.positive_pairs is not None:
            mask = torch.zeros(self.n, self.n, dtype=torch.bool)
            mask[self.positive_pairs[:, 0], self.positive_pairs[:, 1]] = True
        elif self.partners is not None:
            mask = torch.arange(references) == self.partners[:, None]
        elif self.labels is not None:
            mask = self.labels[:, None] == (self.labels if self.ref_labels is None else self.ref_labels)
        else:
            return torch.eye(self.n, dtype=torch.bool)
        return mask if own is None else mask & (torch.arange(references) != own[:, None])

    @property
    def negative(self) -> Tensor:
        """bool [N, M], the rows that are neither positives nor the anchor itself."""
        own = torch.arange(self.n) if self.ref_embeddings is None else self.self_rows
        mask = ~self.positive
        return mask if own is None else mask & (torch.arange(mask.shape[1]) != own[:, None])

    @property
    def counts(self) -> Tensor:
        """[N], the number of positives of every row."""
        return self.positive.sum(dim=1)

    @property
    def sizes(self) -> Tensor:
        """[N], the number of rows with the same label as each row."""
        return (self.labels[:, None] == self.labels).sum(dim=1)

    def without_anchors(self, rows: Tensor) -> Tensor:
        """The right loss, where some rows, bool [N], are not anchors."""
        chosen = torch.ones(self.n, dtype=torch.bool) if self.anchors is None else self.anchors.bool()
        return self(anchors=chosen & ~rows)

    def without_columns(self, rows: Tensor) -> Tensor:
        """The right loss, where no anchor is contrasted with some rows, bool [N]; for losses with labels or a mask."""
        keep = ~rows
        own = torch.where(keep, keep.cumsum(0) - 1, -1)
        by = {"positives": self.positives[:, keep]} if self.positives is not None else {"ref_labels": self.labels[keep]}
        return self(ref_embeddings=self.z[keep], self_rows=own, **by)

    def weighted(self, weights: Tensor) -> Tensor:
        """The right loss, with the value of each anchor multiplied by its weight, [N]; for InfoNCE, [N] or [2N]."""
        values = self(reduction="none", **({"no_positive": "zero"} if self.no_positive == "drop" else {}))
        rows = torch.arange(self.n) if self.anchors is None else self.anchors.bool().nonzero()[:, 0]
        if self.entry.two_towers:
            rows = torch.arange(self.n).repeat(len(values) // self.n)
        counts = None if self.entry.two_towers else self.counts[rows]
        values = values * weights[rows].to(values)
        if self.no_positive == "drop":
            kept = ~self(reduction="none", no_positive="nan").isnan()
            values, rows = values[kept], rows[kept]
            counts = counts if counts is None else counts[kept]
        if self.reduction == "none":
            return values
        if self.reduction == "none_pairs":
            return self() * weights[rows].repeat_interleave(counts)
        if self.reduction in ("mean_pairs", "sum_pairs"):
            total = (values * counts).sum()
            return total / counts.sum().clamp(min=1) if self.reduction == "mean_pairs" else total
        total = values.sum()
        return total if self.reduction == "sum" else total / max(1, len(values))


Function = Callable[[Call], Tensor]


def wrong(
    loss: str,
    level: str = "formula",
    *,
    takes: tuple[str, ...] | None = None,
    argument: str = "",
    **options: Any,
) -> Callable[[Any], Any]:
    """Declare the decorated function of a ``Call``, or a class, as a wrong implementation; its docstring describes it.

    Args:
        loss: the loss that it claims to compute.
        level: the level at which it must fail.
        takes: the keywords in its signature; None for all of the loss.
        argument: why it may conform.
        **options: options of ``check_loss``.
    """

    def declare(thing: Any) -> Any:
        regime = thing.__module__.rpartition(".")[2]
        words = " ".join((thing.__doc__ or "").split())
        target = thing if isinstance(thing, type) else target_of(loss, thing, takes)
        name = f"{regime}/{thing.__name__.replace('_', '-')}"
        kept = MappingProxyType(options)
        DECLARED.append(Wrong(name, regime, words, loss, level, target, kept, argument))
        return thing

    return declare


def target_of(loss: str, function: Function, takes: tuple[str, ...] | None = None) -> Callable[..., Tensor]:
    """Return a function with the parameters of the right loss that calls ``function`` with a ``Call``."""
    full = inspect.signature(LOSSES[loss].fast)
    kept = [
        p
        for p in full.parameters.values()
        if p.name not in ("backend", "validate")
        and (takes is None or p.default is p.empty or p.name in (*takes, "labels"))
    ]
    signature = full.replace(parameters=kept)

    def target(*given: Any, **keywords: Any) -> Tensor:
        bound = full.bind(*given, **keywords)
        bound.apply_defaults()
        return function(Call(loss, bound.arguments))

    target.__name__ = target.__qualname__ = function.__name__
    target.__module__ = function.__module__
    target.__doc__ = function.__doc__
    target.__annotations__ = {p.name: p.annotation for p in kept} | {"return": "Tensor"}
    vars(target)["__signature__"] = signature
    return target


class Changed(torch.autograd.Function):
    """The identity; ``backward`` passes the gradient through a function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.change(grad), None


def with_upstream(loss: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """The loss, whose backward pass sees a changed upstream gradient."""
    result: Tensor = Changed.apply(loss, change)  # type: ignore[no-untyped-call]
    return result


def with_gradient(value: Tensor, gradient: Tensor) -> Tensor:
    """A tensor with the value of the first argument and the gradient of the second."""
    return value.detach() + (gradient - gradient.detach())


def scaled_gradient(x: Tensor, factor: Tensor | float) -> Tensor:
    """The same values; the gradient is multiplied by a factor."""
    return Changed.apply(x, lambda grad: grad * factor)  # type: ignore[no-untyped-call,no-any-return]


def eager() -> bool:
    """Whether the call is neither compiled nor transformed by ``torch.func``."""
    return not torch.compiler.is_compiling() and not functional()


def functional() -> bool:
    """Whether the call is transformed by ``torch.func``."""
    return torch._C._functorch.maybe_current_level() is not None  # type: ignore[attr-defined]


def as_anchors(call: Call) -> Tensor:
    """The right loss; rows get the part of their gradient that they get as anchors; for losses with labels."""
    own = torch.arange(call.n)
    return with_gradient(call(), call(ref_embeddings=call.z.detach(), ref_labels=call.labels, self_rows=own))


def wide(z: Tensor) -> Tensor:
    """The rows in float32 if they have half precision."""
    return z.float() if z.dtype in (torch.bfloat16, torch.float16) else z


def products(call: Call) -> Tensor:
    """[N, M], the logits, self pairs included; M is the number of rows of the second matrix."""
    a, b = wide(call.z), wide(call.z if call.embeddings_b is None else call.embeddings_b)
    if call.similarity == "cosine":
        a, b = torch.nn.functional.normalize(a, dim=1), torch.nn.functional.normalize(b, dim=1)
    logits: Tensor = a @ b.T / call.temperature
    return logits


def logits_of_others(call: Call) -> Tensor:
    """[N, N], the logits; those of self pairs are minus infinity."""
    return products(call).masked_fill(torch.eye(call.n, dtype=torch.bool), -torch.inf)


def weight_of_positive(call: Call, groups: Tensor | None = None) -> Tensor:
    """[N], n softmax(c / sigma) in DCLW, over all n rows or over the n rows of each group; groups is int [N]."""
    c = (products(call)[torch.arange(call.n), call.partners] * call.temperature).detach()
    e = (c / call.sigma).exp()
    groups = torch.zeros(call.n, dtype=torch.long) if groups is None else groups
    sums = torch.zeros(int(groups.max()) + 1, dtype=e.dtype).index_add(0, groups, e)
    return e * groups.bincount()[groups] / sums[groups]


def with_weights(call: Call, weights: Tensor) -> Tensor:
    """DCLW with the mean over all rows, where 2 minus some weights, [N], are the weights of the positives."""
    positive = products(call)[torch.arange(call.n), call.partners]
    return call() + ((weights - weight_of_positive(call)).detach() * positive).mean()
