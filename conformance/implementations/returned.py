"""Find the loss in what a user's code returns: a tuple, list, mapping or dataclass, or logits and labels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from .sandbox import TargetError

NAMES = ("loss", "total_loss", "total", "contrastive_loss", "losses")
"""Names of the loss among several results, most likely first."""

LOGITS = "logits and labels"
"""The result of ``choose`` for logits and labels, whose cross-entropy is the loss."""


def parts_of(returned: Any) -> dict[str, Any] | None:
    """Return the results of a tuple, a list, a mapping or a dataclass by name or position; None for anything else."""
    fields = dataclasses.fields(returned) if dataclasses.is_dataclass(returned) else ()
    attributes = {} if isinstance(returned, type) else {one.name: getattr(returned, one.name) for one in fields}
    if isinstance(returned, Mapping):
        return {str(name): value for name, value in returned.items()} or attributes
    if isinstance(returned, (tuple, list)):
        names = getattr(returned, "_fields", range(len(returned)))
        return {str(name): value for name, value in zip(names, returned, strict=True)}
    return attributes or None


def choose(parts: Mapping[str, Any], size: Callable[[Any], int | None]) -> str:
    """Return the name of the loss among several results, or ``LOGITS``.

    Args:
        parts: the results by name.
        size: returns the number of floating-point numbers in a result; None for anything else.

    Raises:
        TargetError: no result can be the loss, or several can.
    """
    sizes = {name: found for name, value in parts.items() if (found := size(value))}
    lower = {name.lower(): name for name in sizes}
    for name in NAMES:
        if name in lower:
            return lower[name]
    if len(named := [name for name in sizes if name.lower().endswith("loss")]) == 1:
        return named[0]
    if _is_logits(parts):
        return LOGITS
    for single in (True, False):
        few = [name for name in sizes if (sizes[name] == 1) is single]
        differentiable = [name for name in few if getattr(parts[name], "requires_grad", False)]
        if few:
            if len(only := differentiable or few) == 1:
                return only[0]
            break
    several = "more than one may be the loss" if sizes else "none is a loss"
    shown = ", ".join(f"{name} ({_shape(value)})" for name, value in parts.items())
    raise TargetError(f"returned {len(parts)} results, and {several}: {shown}; name it with --result NAME")


def take(parts: Mapping[str, Any], name: str) -> Any:
    """Return the result with this name, or the cross-entropy if the name is ``LOGITS``.

    Raises:
        TargetError: there is no result with this name.
    """
    if name == LOGITS and _is_logits(parts):
        logits, labels = parts.values()
        if isinstance(logits, torch.Tensor):
            return torch.nn.functional.cross_entropy(logits, torch.as_tensor(labels).long())
        logs = np.asarray(logits) - np.logaddexp.reduce(np.asarray(logits), axis=1, keepdims=True)
        return -logs[np.arange(len(logs)), np.asarray(labels)].mean()
    if name not in parts:
        raise TargetError(f"returned no {name}; its results are {', '.join(parts)}")
    return parts[name]


def note(name: str, parts: Mapping[str, Any]) -> str:
    """Return the message that reports which result is judged."""
    if name == LOGITS:
        return "result: logits and labels; their mean cross-entropy is judged"
    return f"result: {name}, of {', '.join(parts)}; override with --result"


def _is_logits(parts: Mapping[str, Any]) -> bool:
    """Whether the results are logits [N, C] and integer labels [N]."""
    if len(parts) != 2:
        return False
    logits, labels = parts.values()
    shapes: list[tuple[int, ...]] = [tuple(getattr(value, "shape", ())) for value in (logits, labels)]
    integers = str(getattr(labels, "dtype", "")).rpartition(".")[2].startswith(("int", "uint"))
    floats = "float" in str(getattr(logits, "dtype", ""))
    return floats and integers and len(shapes[0]) == 2 and len(shapes[1]) == 1 and shapes[0][0] == shapes[1][0]


def _shape(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"shape {list(shape)}"
