"""The losses as `torch.nn.Module`. Options are set and checked when the module is created.

The decorator `module_of` makes a class the module of a function. The class declares, as dataclass fields, the options
that `LossModule` lacks or that have another default. The documentation of options and arguments comes from the
function.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Container
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

from torch import Tensor, nn

from .checks import (
    check_bias,
    check_choice,
    check_direction_weights,
    check_directions,
    check_flag,
    check_number,
    check_range,
    check_temperature,
)
from .dclw import dclw_loss
from .distributed import Group, Ring, check_group, check_ring
from .engine import Backend, Denominator, InsideReduction, Similarity, WeightsDivisor, ZeroRow
from .hard_negative import Cosine, hard_negative_loss
from .info_nce import Direction, Inside, info_nce_loss
from .nt_bxent import nt_bxent_loss
from .nt_xent import PairReduction, nt_xent_loss, nt_xent_pairwise_loss
from .ranking import Directions, HardnessMode, HardOfDoc, Partition, Scope, multiple_negatives_ranking_loss
from .sigmoid import sigmoid_loss
from .supcon import NoNegative, NoPositive, Reduction, supcon_epsilon_loss, supcon_in_loss, supcon_loss

Loss = Callable[..., Tensor]
Class = TypeVar("Class", bound="type[LossModule]")


def _described(function: Loss, left_out: Container[str]) -> str:
    """Return the docstring of a function without the example and the arguments ``left_out``."""
    argument = re.compile(r"^    (\w+): .*\n(?:     .*\n)*", re.MULTILINE)
    described = re.sub(r"^Example:\n(?:    .*\n)*\n", "", inspect.getdoc(function) or "", flags=re.MULTILINE)
    return argument.sub(lambda entry: "" if entry[1] in left_out else entry[0], described)


def _forward(function: Loss, options: Container[str]) -> Loss:
    """Return a `forward` method that calls a function with the options of the module."""

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
    """Return a decorator that makes a class the module of a function.

    Args:
        function: a loss, or None for a base class. Keywords that the class or its bases declare as fields become
            options of the module; the others are arguments of `forward`.
    """

    def made(cls: Class) -> Class:
        dataclass(kw_only=True, eq=False, repr=False)(cls)
        options = [field.name for field in fields(cls)]
        for name in vars(cls).keys() & options:
            delattr(cls, name)  # a class attribute of this name would prevent registration of a parameter
        if function is not None:
            forward = _forward(function, options)
            cls.function, cls.forward = staticmethod(function), forward
            described = _described(function, inspect.signature(forward).parameters)
            described = re.sub(r"^Returns:\n(?:    .*\n)*\n", "", described, flags=re.MULTILINE)
            cls.__doc__ = f"{inspect.getdoc(cls)}\n\n{described}"
        return cls

    return made


@module_of()
class LossModule(nn.Module):
    """Base class of the loss modules. It declares the options that every loss has.

    A temperature or bias that is an `nn.Parameter` is learned; any other tensor becomes a buffer. A module with the
    group "world" can be pickled and copied; one with a process group can only be copied.
    """

    function: ClassVar[Loss]

    temperature: float | Tensor = 0.07
    base_temperature: float | None = None
    similarity: Similarity = "cosine"
    validate: bool = False
    backend: Backend = "auto"
    group: Group = None

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Initialise `nn.Module` first, because one of the options may be a parameter."""
        module = super().__new__(cls)
        nn.Module.__init__(module)
        return module

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            TypeError: an option has the wrong type.
            ValueError: a number is not in its range, a tensor is not a scalar, or an option has an unknown value.
        """
        for name, check in {"temperature": check_temperature, "bias": check_bias}.items():
            if name not in self.options():
                continue
            value = getattr(self, name)
            check(value, validate=self.validate)
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                delattr(self, name)
                self.register_buffer(name, value)
        for name in ("tau_plus", "beta", "sigma", "hardness_strength"):
            if name in self.options():
                check_range(name, getattr(self, name))
        if "detach_weights" in self.options():
            check_flag("detach_weights", self.detach_weights)
        check_group(self.group)
        if isinstance(self.group, Ring):
            check_ring(self.function.__name__, self.options())
        check_direction_weights(getattr(self, "direction_weights", None), getattr(self, "direction", None) or "both")
        if self.base_temperature is not None:
            check_number("base_temperature", self.base_temperature)
        for name, hint in get_type_hints(self.function).items():
            # An option whose default depends on other arguments is ``Literal[...] | None``.
            choices = next((kind for kind in (hint, *get_args(hint)) if get_origin(kind) is Literal), None)
            if choices is not None and (getattr(self, name) is not None or choices is hint):
                check_choice(name, getattr(self, name), get_args(choices))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle.

        Raises:
            TypeError: the group is a process group, which other processes cannot use.
        """
        if not isinstance(self.group.group if isinstance(self.group, Ring) else self.group, str | None):
            raise TypeError('group: expected "world" or None in a module that is pickled, got a process group')
        return self.__dict__

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy with the same group."""
        copied: Self = type(self).__new__(type(self))
        memo |= {id(self): copied, id(self.group): self.group}
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def options(self) -> dict[str, Any]:
        """Return the options as keyword arguments of the function."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def extra_repr(self) -> str:
        """Return the options as in a call, with tensors as numbers."""
        options = {name: v.item() if isinstance(v, Tensor) else v for name, v in self.options().items()}
        return ", ".join(f"{name}={value!r}" for name, value in options.items())


@module_of(supcon_loss)
class SupConLoss(LossModule):
    """The module of `supcon_loss`.

    Example:
        >>> import torch
        >>> from pairproof.fast import SupConLoss
        >>> z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]])
        >>> loss_function = SupConLoss(temperature=0.5)
        >>> print(f"{loss_function(z, torch.tensor([0, 0, 1, 1])):.4f}")
        0.4302
    """

    zero_row: ZeroRow = "error"
    denominator: Denominator = "all"
    weights_divisor: WeightsDivisor = "count"
    no_positive: NoPositive = "zero"
    no_negative: NoNegative = "zero"
    reduction: Reduction = "mean"


@module_of(supcon_in_loss)
class SupConInLoss(LossModule):
    """The module of `supcon_in_loss`.

    Example:
        >>> import torch
        >>> from pairproof.fast import SupConInLoss
        >>> z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]])
        >>> loss_function = SupConInLoss(temperature=0.5)
        >>> print(f"{loss_function(z, torch.tensor([0, 0, 0, 1])):.4f}")
        0.7517
    """

    denominator: Denominator = "all"
    inside_reduction: InsideReduction = "mean"
    no_positive: NoPositive = "zero"
    no_negative: NoNegative = "zero"
    reduction: Reduction = "mean"


@module_of(supcon_epsilon_loss)
class SupConEpsilonLoss(LossModule):
    """The module of `supcon_epsilon_loss`.

    Example:
        >>> import torch
        >>> from pairproof.fast import SupConEpsilonLoss
        >>> z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]])
        >>> loss_function = SupConEpsilonLoss(temperature=0.5)
        >>> print(f"{loss_function(z, torch.tensor([0, 0, 1, 1])):.4f}")
        0.4302
    """

    similarity: Similarity = "dot"
    no_positive: NoPositive = "zero"
    reduction: Reduction = "mean"


@module_of(nt_xent_loss)
class NTXentLoss(LossModule):
    """The module of `nt_xent_loss`.

    Example:
        >>> import torch
        >>> from pairproof.fast import NTXentLoss, stacked_partners
        >>> z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]])
        >>> loss_function = NTXentLoss(temperature=0.5)
        >>> print(f"{loss_function(z, stacked_partners(4)):.4f}")
        2.0302
    """

    zero_row: ZeroRow = "error"
    reduction: Reduction = "mean"


@module_of(nt_xent_pairwise_loss)
class NTXentPairwiseLoss(LossModule):
    """The module of `nt_xent_pairwise_loss`.

    Example:
        >>> import torch
        >>> from pairproof.fast import NTXentPairwiseLoss
        >>> z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]])
        >>> loss_function = NTXentPairwiseLoss(temperature=0.5)
        >>> print(f"{loss_function(z, torch.tensor([0, 0, 0, 1])):.4f}")
        0.4333
    """

    weights_divisor: WeightsDivisor = "count"
    no_positive: NoPositive = "zero"
    reduction: PairReduction = "mean"


@module_of(nt_bxent_loss)
class NTBXentLoss(LossModule):
    """The module of `nt_bxent_loss`.

    Example:
        >>> import torch
        >>> from pairproof.fast import NTBXentLoss
        >>> z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]])
        >>> loss_function = NTBXentLoss(temperature=0.5)
        >>> print(f"{loss_function(z, torch.tensor([[0, 1], [1, 0], [2, 3]])):.4f}")
        0.9560
    """

    no_negative: NoNegative = "zero"
    reduction: Reduction = "mean"


@module_of(info_nce_loss)
class InfoNCELoss(LossModule):
    """The module of `info_nce_loss`.

    Example:
        >>> import torch
        >>> from pairproof.fast import InfoNCELoss
        >>> z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]])
        >>> loss_function = InfoNCELoss(temperature=0.5)
        >>> print(f"{loss_function(z, z.flip(0)):.4f}")
        2.7132
    """

    direction: Direction | None = None
    direction_weights: tuple[float, float] | None = None
    inside_reduction: Inside = "none"
    no_positive: NoPositive = "drop"
    reduction: Reduction = "mean"


@module_of(sigmoid_loss)
class SigmoidLoss(LossModule):
    """The module of `sigmoid_loss`.

    Example:
        >>> import torch
        >>> from pairproof.fast import SigmoidLoss
        >>> z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]])
        >>> loss_function = SigmoidLoss(bias=-5.0)
        >>> print(f"{loss_function(z, z):.4f}")
        3.7187
    """

    temperature: float | Tensor = 0.1
    bias: float | Tensor = -10.0
    reduction: PairReduction = "mean"


@module_of(hard_negative_loss)
class HardNegativeLoss(LossModule):
    """The module of `hard_negative_loss`.

    Example:
        >>> import torch
        >>> from pairproof.fast import HardNegativeLoss, stacked_partners
        >>> z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]])
        >>> loss_function = HardNegativeLoss(beta=0.5)
        >>> print(f"{loss_function(z, stacked_partners(4)):.4f}")
        2.2969
    """

    temperature: float | Tensor = 0.5
    similarity: Cosine = "cosine"
    tau_plus: float = 0.1
    beta: float = 1.0
    reduction: Reduction = "mean"


@module_of(multiple_negatives_ranking_loss)
class MultipleNegativesRankingLoss(LossModule):
    """The module of `multiple_negatives_ranking_loss`.

    Example:
        >>> import torch
        >>> from pairproof.fast import MultipleNegativesRankingLoss
        >>> z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0], [-0.6, 0.8]])
        >>> loss_function = MultipleNegativesRankingLoss(temperature=0.5, directions="query_to_doc+doc_to_query")
        >>> print(f"{loss_function(z, z.flip(0)):.4f}")
        3.4063
    """

    temperature: float | Tensor = 0.05
    hard_negatives_scope: Scope = "batch"
    directions: Directions = "query_to_doc"
    partition: Partition = "joint"
    doc_to_doc_hard: HardOfDoc | None = None
    hardness_mode: HardnessMode = "none"
    hardness_strength: float = 0.0
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        """Check the options, and that the partition fits the directions.

        Raises:
            TypeError: an option has the wrong type.
            ValueError: an option is invalid, or the partition does not fit the directions.
        """
        super().__post_init__()
        check_directions(self.directions, self.partition, "batch", self.doc_to_doc_hard, None)


@module_of(dclw_loss)
class DCLWLoss(LossModule):
    """The module of `dclw_loss`.

    Example:
        >>> import torch
        >>> from pairproof.fast import DCLWLoss, stacked_partners
        >>> z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8], [-0.6, 0.8]])
        >>> loss_function = DCLWLoss(sigma=1.0)
        >>> print(f"{loss_function(z, stacked_partners(4)):.4f}")
        5.4202
    """

    temperature: float | Tensor = 0.1
    similarity: Cosine = "cosine"
    sigma: float = 0.5
    detach_weights: bool = True
    reduction: Reduction = "mean"
