"""The record of a fault, and the decorator that declares one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

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
        link: a URL or a file of the repository where the mistake was shipped or discussed; "" if there is none.
        function: the implementation. It takes the arguments of ``call`` and a keyword ``temperature``.
        settings: the claimed options that differ from the catalogue's defaults.
        family: the kind of mistake, which is the name of its file.
        level: a case of this level or a lower one must catch it.
        right_at: the lowest and the highest temperature at which it equals the correct loss up to rounding, or None.
        because: why it equals the correct loss there.
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
        """The correct loss with the same call and default options."""
        return RIGHT[self.loss, self.call]


DECLARED: list[Fault] = []

RIGHT_AT_1: Mapping[str, Any] = {"right_at": (1.0, 1.0), "because": "Dividing by 1 changes nothing."}
"""What is declared of a fault that divides something by the temperature, or does not."""


def fault(
    loss: str,
    link: str = "",
    *,
    build: Builder | None = None,
    takes: Sequence[str] | None = None,
    level: str = "formula",
    right_at: tuple[float, float] | None = None,
    because: str = "",
    **settings: object,
) -> Callable[[_F], _F]:
    """Declare the decorated function as a fault. Its docstring is one sentence about the mistake.

    If the function returns values, the faulty loss is their mean. If it returns the input of a loss, such as a batch,
    the faulty loss is the correct loss on this input.

    Args:
        loss: the loss that it claims to be.
        link: where it was shipped or discussed.
        build: the builder in ``parts`` whose result is passed to the function; if it builds several, such as two
            directions, the function is called once for each. By default, the function gets the arguments of the call.
            Further parameters of the function, such as ``ignored``, are keywords of the call. The loss is correct if
            one of them that has no default is not given.
        takes: the optional parameters of the builder that the fault has; all by default.
        level: see `Fault`.
        right_at: see `Fault`.
        because: see `Fault`.
        **settings: the claimed options that differ from the catalogue's defaults.
    """

    def declare(function: _F) -> _F:
        stem = function.__name__.removeprefix(f"{loss}_").replace("_", "-")
        words, family = " ".join((function.__doc__ or "").split()), function.__module__.rpartition(".")[2]
        called = composed(loss, build, function, takes) if build else composed(loss, function)
        name, kept = f"{loss}/{stem}", MappingProxyType(settings)
        at = Level(level), right_at, because
        DECLARED.append(Fault(name, loss, _call(called), words, link, called, kept, family, *at))
        return function

    return declare


def _call(function: Function) -> str:
    """Infer the call from the names of the parameters."""
    calls = {"features": "features", "view_a": "views", "positive_pairs": "pairs", "labels": "labels"}
    return next(call for name, call in calls.items() if name in inspect.signature(function).parameters)


def github(repository: str, thread: str) -> str:
    """The URL of a thread or a file: ``github("owner/name", "issues/3")``."""
    return f"https://github.com/{repository}/{thread}"


def pml(path: str) -> str:
    """The URL of a file of pytorch-metric-learning 2.9.0."""
    return github("KevinMusgrave/pytorch-metric-learning", f"blob/v2.9.0/src/pytorch_metric_learning/{path}")
