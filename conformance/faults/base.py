"""What a fault is, and how a family's file declares its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from torch import Tensor

from .parts import Made, composed

Function = Callable[..., Tensor]

_F = TypeVar("_F", bound=Callable[..., Made])


@dataclass(frozen=True)
class Fault:
    """A wrong implementation that the suite must catch.

    Attributes:
        name: of the loss and what is wrong, "supcon/self-kept".
        loss: the loss that it claims to be, by its short name in the catalogue.
        call: how it is called, one of ``signatures.CALLS``.
        words: what is wrong, in a sentence.
        link: where it was shipped or discussed: an address, or a file of the repository; "" for a classic slip.
        function: the implementation, called as ``call`` says, with a keyword ``temperature``.
        settings: the options that it claims and that are not the catalogue's defaults.
        family: the kind of mistake; the file that it stands in.
    """

    name: str
    loss: str
    call: str
    words: str
    link: str
    function: Function
    settings: Mapping[str, object]
    family: str


DECLARED: list[Fault] = []
"""Every fault that a file has declared."""


def fault(loss: str, link: str = "", *, of: Callable[..., Any] | None = None, **settings: object) -> Callable[[_F], _F]:
    """Declare the function below as a fault: its name says what is wrong, and its docstring says it in a sentence.

    The fault is the mean of the values that the function returns, or the right loss of the batch, the rows or the way
    that it returns. Its family is the file.

    Args:
        loss: the loss that it claims to be.
        link: where it was shipped or discussed.
        of: the maker in ``parts`` of what the function below is given; otherwise it is given the arguments.
        **settings: the options that it claims beside the defaults.
    """

    def declare(function: _F) -> _F:
        stem = function.__name__.removeprefix(f"{loss}_").replace("_", "-")
        words, family = " ".join((function.__doc__ or "").split()), function.__module__.rpartition(".")[2]
        called = composed(loss, of, function) if of else composed(loss, function)
        name, kept = f"{loss}/{stem}", MappingProxyType(settings)
        DECLARED.append(Fault(name, loss, _call(called), words, link, called, kept, family))
        return function

    return declare


def _call(function: Function) -> str:
    """How a function is called, by the names of its parameters."""
    calls = {"features": "features", "view_a": "views", "positive_pairs": "pairs", "labels": "labels"}
    return next(call for name, call in calls.items() if name in inspect.signature(function).parameters)


def github(repository: str, thread: str) -> str:
    """The address of a thread or a file: ``github("owner/name", "issues/3")``."""
    return f"https://github.com/{repository}/{thread}"


def pml(path: str) -> str:
    """The address of a file of pytorch-metric-learning."""
    return github("KevinMusgrave/pytorch-metric-learning", f"blob/v2.9.0/src/pytorch_metric_learning/{path}")
