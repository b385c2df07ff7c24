"""The losses as `torch.nn.Module`: options are fixed, and checked, when the module is made.

A module is a class that names its function and declares, as a dataclass does, the options that the function has beside
those of every loss. The function documents these options, and the arguments of `forward`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Container
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

from torch import Tensor, nn

from .checks import check_choice, check_number, check_temperature
from .engine import Backend, Denominator, Similarity
from .info_nce import Direction, info_nce_loss
from .nt_bxent import nt_bxent_loss
from .nt_xent import PairReduction, nt_xent_loss, nt_xent_pairwise_loss
from .supcon import NoNegative, NoPositive, Reduction, supcon_epsilon_loss, supcon_in_loss, supcon_loss

Loss = Callable[..., Tensor]
Class = TypeVar("Class", bound="type[LossModule]")


def _described(function: Loss, left_out: Container[str]) -> str:
    """Return the documentation of a function without some of its arguments."""
    argument = re.compile(r"^    (\w+): .*\n(?:     .*\n)*", re.MULTILINE)
    return argument.sub(lambda entry: "" if entry[1] in left_out else entry[0], inspect.getdoc(function) or "")


def _forward(function: Loss, options: Container[str]) -> Loss:
    """Return the method that passes its arguments, and a module's options, to a function."""

    def forward(self: LossModule, *args: Any, **kwargs: Any) -> Tensor:
        return function(*args, **kwargs, **self.options())

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.signature(function)
    taken = [parameter for name, parameter in signature.parameters.items() if name not in options]
    forward.__signature__ = signature.replace(parameters=[own, *taken])  # type: ignore[attr-defined]
    forward.__doc__ = _described(function, options)
    return forward


@dataclass_transform(kw_only_default=True, eq_default=False)
def module_of(function: Loss | None = None) -> Callable[[Class], Class]:
    """Return a decorator that makes a class the module of a function; without one, a base of such classes.

    Args:
        function: a loss; its keywords that the class and its bases declare are the module's options.
    """

    def made(cls: Class) -> Class:
        dataclass(kw_only=True, eq=False, repr=False)(cls)
        options = [field.name for field in fields(cls)]
        for name in vars(cls).keys() & options:
            delattr(cls, name)  # a class attribute of that name would keep a parameter from being registered
        if function is not None:
            forward = _forward(function, options)
            cls.function, cls.forward = staticmethod(function), forward
            described = _described(function, inspect.signature(forward).parameters)
            described = re.sub(r"^Returns:\n(?:    .*\n)*\n", "", described, flags=re.MULTILINE)
            cls.__doc__ = f"{cls.__doc__}\n\n{described}"
        return cls

    return made


@module_of()
class LossModule(nn.Module):
    """Options of every loss. A temperature that is a parameter is learned with the other parameters."""

    function: ClassVar[Loss]

    temperature: float | Tensor = 0.07
    base_temperature: float | None = None
    similarity: Similarity = "cosine"
    validate: bool = False
    backend: Backend = "auto"

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Make the module ready for its options, one of which may be a parameter."""
        module = super().__new__(cls)
        nn.Module.__init__(module)
        return module

    def __post_init__(self) -> None:
        """Check the options."""
        check_temperature(self.temperature, validate=self.validate)
        if self.base_temperature is not None:
            check_number("base_temperature", self.base_temperature)
        for name, hint in get_type_hints(self.function).items():
            if get_origin(hint) is Literal:
                check_choice(name, getattr(self, name), get_args(hint))

    def options(self) -> dict[str, Any]:
        """Return the keywords that the function is called with."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def extra_repr(self) -> str:
        """Return the options as they would be written in a call; a tensor by its value."""
        options = {name: v.item() if isinstance(v, Tensor) else v for name, v in self.options().items()}
        return ", ".join(f"{name}={value!r}" for name, value in options.items())


@module_of(supcon_loss)
class SupConLoss(LossModule):
    """Module of `supcon_loss`."""

    denominator: Denominator = "all"
    no_positive: NoPositive = "zero"
    no_negative: NoNegative = "zero"
    reduction: Reduction = "mean"


@module_of(supcon_in_loss)
class SupConInLoss(LossModule):
    """Module of `supcon_in_loss`."""

    denominator: Denominator = "all"
    no_positive: NoPositive = "zero"
    no_negative: NoNegative = "zero"
    reduction: Reduction = "mean"


@module_of(supcon_epsilon_loss)
class SupConEpsilonLoss(LossModule):
    """Module of `supcon_epsilon_loss`."""

    similarity: Similarity = "dot"
    no_positive: NoPositive = "zero"
    reduction: Reduction = "mean"


@module_of(nt_xent_loss)
class NTXentLoss(LossModule):
    """Module of `nt_xent_loss`."""

    reduction: Reduction = "mean"


@module_of(nt_xent_pairwise_loss)
class NTXentPairwiseLoss(LossModule):
    """Module of `nt_xent_pairwise_loss`."""

    no_positive: NoPositive = "zero"
    reduction: PairReduction = "mean"


@module_of(nt_bxent_loss)
class NTBXentLoss(LossModule):
    """Module of `nt_bxent_loss`."""

    no_negative: NoNegative = "zero"
    reduction: Reduction = "mean"


@module_of(info_nce_loss)
class InfoNCELoss(LossModule):
    """Module of `info_nce_loss`."""

    direction: Direction = "both"
    reduction: Reduction = "mean"
