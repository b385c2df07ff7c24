"""The record of a fault, and the decorator that declares one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from ..suite.levels import Level
from .parts import RIGHT, Builder, Evaluable, Function, composed

_F = TypeVar("_F", bound=Callable[..., Evaluable])


@dataclass(frozen=True)
class Fault:
    """A wrong implementation that the suite must catch.

    Attributes:
        name: the loss and the mistake, such as "supcon/self-kept".
        loss: the loss that it claims to be, by its short name in the catalogue.
        call: how it is called, one of ``signatures.CALLS``.
        words: one sentence that describes the mistake.
        link: where it was shipped or discussed: an address, or a file of the repository; "" for a common mistake
            without a source.
        function: the implementation, called according to ``call``, with a keyword ``temperature``.
        settings: the options that it claims to implement, if they are not the catalogue's defaults.
        family: the kind of mistake, which is the name of its file.
        level: the level of the verdict at which a case must catch it.
        right_at: the range (lowest, highest) of temperatures at which it equals the right loss up to rounding; None if
            there is no such temperature.
        because: why it equals the right loss there.
    """

    name: str
    loss: str
    call: str
    words: str
    link: str
    function: Function
    settings: Mapping[str, object]
    family: str
    level: Level = Level.FORMULA
    right_at: tuple[float, float] | None = None
    because: str = ""

    @property
    def right(self) -> Function:
        """The correct loss with the same call, at its default options."""
        return RIGHT[self.loss, self.call]


DECLARED: list[Fault] = []
"""The faults declared so far."""


def fault(
    loss: str,
    link: str = "",
    *,
    build: Builder | None = None,
    level: str = "formula",
    right_at: tuple[float, float] | None = None,
    because: str = "",
    **settings: object,
) -> Callable[[_F], _F]:
    """Declare the decorated function as a fault; its name and its docstring, one sentence, describe the mistake.

    If the function returns values, the faulty loss is their mean. If it returns a batch, rows or directions, the faulty
    loss is the right loss evaluated on them. The family of the fault is the name of its file.

    Args:
        loss: the loss that it claims to be.
        link: where it was shipped or discussed.
        build: the builder in ``parts`` whose result the function receives, or each item if the result is a list; by
            default the function receives the arguments.
        level: the level of the verdict at which a case must catch it.
        right_at: the lowest and the highest temperature at which it equals the right loss up to rounding.
        because: why it equals the right loss there.
        **settings: the options that it claims to implement, if they are not defaults.
    """

    def declare(function: _F) -> _F:
        stem = function.__name__.removeprefix(f"{loss}_").replace("_", "-")
        words, family = " ".join((function.__doc__ or "").split()), function.__module__.rpartition(".")[2]
        called = composed(loss, build, function) if build else composed(loss, function)
        name, kept = f"{loss}/{stem}", MappingProxyType(settings)
        at = Level(level), right_at, because
        DECLARED.append(Fault(name, loss, _call(called), words, link, called, kept, family, *at))
        return function

    return declare


def _call(function: Function) -> str:
    """How a function is called, from the names of its parameters."""
    calls = {"features": "features", "view_a": "views", "positive_pairs": "pairs", "labels": "labels"}
    return next(call for name, call in calls.items() if name in inspect.signature(function).parameters)


def github(repository: str, thread: str) -> str:
    """The address of a thread or a file: ``github("owner/name", "issues/3")``."""
    return f"https://github.com/{repository}/{thread}"


def pml(path: str) -> str:
    """The address of a file of pytorch-metric-learning."""
    return github("KevinMusgrave/pytorch-metric-learning", f"blob/v2.9.0/src/pytorch_metric_learning/{path}")
