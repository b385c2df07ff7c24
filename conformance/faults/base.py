"""What a fault is, and how a family's file declares its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from types import MappingProxyType
from typing import Any, TypeVar

from torch import Tensor

Function = Callable[..., Tensor]

_F = TypeVar("_F", bound=Function)


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


@dataclass(frozen=True)
class Family:
    """The faults of one file.

    Attributes:
        name: of the kind of mistake.
        faults: in the order of the file.
    """

    name: str
    faults: list[Fault] = field(default_factory=list)

    def fault(
        self, loss: str, link: str = "", *, of: Callable[..., Any] | None = None, **settings: object
    ) -> Callable[[_F], _F]:
        """Declare the function below as a fault: its name says what is wrong, and its docstring says it in a sentence.

        Args:
            loss: the loss that it claims to be.
            link: where it was shipped or discussed.
            of: what the function below is given: this function's result on the arguments of the call. The fault is the
                mean of what it returns.
            **settings: the options that it claims beside the defaults.
        """

        def declare(function: _F) -> _F:
            stem = function.__name__.removeprefix(f"{loss}_").replace("_", "-")
            words = " ".join((function.__doc__ or "").split())
            called = function if of is None else _composed(function, of)
            kept = MappingProxyType(dict(settings))
            self.faults.append(Fault(f"{loss}/{stem}", loss, _call(called), words, link, called, kept, self.name))
            return function

        return declare


def _composed(function: Function, of: Callable[..., Any]) -> Function:
    """The mean of a function's values on what another function makes of the arguments, with that one's signature."""

    @wraps(of)
    def composed(*given: Tensor | None, **options: Any) -> Tensor:
        return function(of(*given, **options)).mean()

    composed.__name__, composed.__doc__ = function.__name__, function.__doc__
    return composed


def _call(function: Function) -> str:
    """How a function is called, by the names of its parameters."""
    calls = {"features": "features", "view_a": "views", "positive_pairs": "pairs", "labels": "labels"}
    return next(call for name, call in calls.items() if name in inspect.signature(function).parameters)


def github(repository: str, thread: str) -> str:
    """The address of a thread: ``github("owner/name", "issues/3")``."""
    return f"https://github.com/{repository}/{thread}"
