"""The base class of the autograd functions: what they do under the transforms of `torch.func`."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

NO_FORWARD_MODE = (
    "forward-mode differentiation (jvp) is not supported: use reverse mode, such as torch.func.jacrev, and "
    "torch.func.jacrev(torch.func.jacrev(loss)) in place of torch.func.hessian"
)


class Reverse(torch.autograd.Function):
    """An autograd function for reverse mode; under `torch.func.vmap`, it evaluates one entry at a time.

    `torch.compile` does not support functions with these methods.
    """

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        """Raise an error that names the transforms to use."""
        raise NotImplementedError(NO_FORWARD_MODE)

    @classmethod
    def vmap(cls, info: Any, places: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        """Return the stacked outputs, and the dimension along which each is stacked."""
        found = []
        for k in range(info.batch_size):
            pairs = zip(arguments, places, strict=True)  # the place of a tuple is a tuple of None
            entry = (a.select(place, k) if isinstance(place, int) else a for a, place in pairs)
            found.append(cls.apply(*entry))  # type: ignore[no-untyped-call]
        if isinstance(found[0], Tensor):
            return torch.stack(found), 0
        return tuple(torch.stack(parts) for parts in zip(*found, strict=True)), (0,) * len(found[0])
