"""What the signature of a target shows: how it is called, with which arrays, which options it takes; and its claim.

What a signature does not show is guessed from the names of its parameters. Every guess is noted in words.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from ..suite.catalogue import LOSSES
from .base import ARRAY_OPTIONS, Support
from .sandbox import TargetError, TargetMisused

CALLS = ("labels", "features", "views", "stacked", "pairs", "command")
ARRAYS = ("torch", "numpy", "jax")
EVERY = "*"
"""The value of a claimed option that says: it is taken by keyword, although the signature does not show it."""

TEMPERATURES = ("temperature", "tau", "logit_scale")
INVERSE = "logit_scale"
"""The name of those that means one over the temperature."""

_LABELS = {"labels", "label", "targets", "target", "y", "classes", "class_labels", "ids", "y_true", "partners"}
_PAIRS = {"positive_pairs", "pos_pairs", "pairs", "pos_indices", "positive_indices"}
_VIEWS = {
    ("query", "positive_key"),
    ("query", "key"),
    ("q", "k"),
    ("anchor", "positive"),
    ("image_features", "text_features"),
    ("image_embeddings", "text_embeddings"),
    ("embeddings", "ref_emb"),
}
_STACKED = {"embeddings", "z", "reps", "representations", "projections", "outputs", "hidden"}


class Signature:
    """The parameters of a callable: of its call and, for a class, of its constructor.

    Attributes:
        constructs: whether it is a class, which is constructed with the options that its constructor takes.
        call: the parameters of the call, without self; empty where they cannot be read.
        constructor: the parameters of the constructor; empty for anything but a class.
    """

    def __init__(self, thing: Any) -> None:
        """Read the signatures.

        Raises:
            TargetError: it cannot be called.
        """
        if not callable(thing):
            raise TargetError(f"it is {kind_of(thing)}, which cannot be called")
        self.constructs = isinstance(thing, type)
        called = thing
        if is_module(thing):
            called = thing.forward
        elif self.constructs:
            called = thing.__call__
        self.call = _parameters(called)
        self.constructor: dict[str, inspect.Parameter] = {}
        if self.constructs:
            self.call = dict(list(self.call.items())[1:])
            self.constructor = _parameters(thing)

    @property
    def named(self) -> list[inspect.Parameter]:
        """The parameters of the call that have a name of their own."""
        return [p for p in self.call.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]

    @property
    def takes_anything(self) -> bool:
        """Whether it has ``**keywords``."""
        return _takes_anything(self.call) or _takes_anything(self.constructor)

    def keyword(self, name: str) -> inspect.Parameter | None:
        """Return the parameter for an option of the catalogue."""
        words = TEMPERATURES if name == "temperature" else (name,)
        for parameters in (self.constructor, self.call):
            for word in words:
                found = parameters.get(word)
                if found is not None and found.kind in (found.POSITIONAL_OR_KEYWORD, found.KEYWORD_ONLY):
                    return found
        return None

    def bind(
        self, positional: Sequence[Any], keywords: Mapping[str, Any]
    ) -> tuple[dict[str, Any], list[Any], dict[str, Any]]:
        """Translate the catalogue's arguments.

        Args:
            positional: in the order of the call; None for one that is not given.
            keywords: options by their names in the catalogue.

        Returns:
            The keywords of the constructor, the positional arguments of the call, and its keywords.
        """
        constructor: dict[str, Any] = {}
        call: dict[str, Any] = {}
        for name, value in keywords.items():
            found = self.keyword(name)
            word = found.name if found else name
            if word == INVERSE:
                value = 1 / value
            if found and name == "base_temperature" and value is None and isinstance(found.default, (int, float)):
                # Without a base the loss is not scaled, as with a base that is the temperature.
                value = keywords.get("temperature")
            constructed = found in self.constructor.values() if found else _takes_anything(self.constructor)
            (constructor if constructed else call)[word] = value
        given = []
        variadic = any(p.kind is p.VAR_POSITIONAL for p in self.call.values())
        places = [p for p in self.named if not (variadic and p.kind is p.KEYWORD_ONLY)]
        for value, parameter in zip_longest(positional, places[: len(positional)]):
            if parameter and value is None and parameter.default is not parameter.empty:
                continue
            if parameter and parameter.kind is parameter.KEYWORD_ONLY:
                call[parameter.name] = value
            else:
                given.append(value)
        return constructor, given, call


def is_module(thing: Any) -> bool:
    """Return whether something is a torch module or a class of them."""
    return isinstance(thing, torch.nn.Module) or (isinstance(thing, type) and issubclass(thing, torch.nn.Module))


def kind_of(value: object) -> str:
    """Return the type of a value with its article."""
    if value is None:
        return "nothing"
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _parameters(called: Any) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(called).parameters)
    except (TypeError, ValueError):
        return {}


def _takes_anything(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def guess_call(signature: Signature) -> tuple[str, str]:
    """Guess how a target is called from the names of its parameters.

    Returns:
        One of ``CALLS``, and what it was guessed from.

    Raises:
        TargetMisused: the names do not show it.
    """
    names = [p.name for p in signature.named]
    words = f"the parameters ({', '.join(names)})"
    first, second, *rest = [*(name.lower() for name in names), "", ""]
    others = {second, *rest} - {""}
    if {"labels", "mask"} <= others:
        return "features", words
    if second in _LABELS:
        return "labels", words
    if second in _PAIRS:
        return "pairs", words
    if (first, second) in _VIEWS or _differ_once(first, second):
        return "views", words
    if first == "features":
        return "features", words
    if first in _STACKED and others <= {*TEMPERATURES, "reduction"}:
        return "stacked", words
    raise TargetMisused(f"how it is called does not show in {words}: say it with --call {'|'.join(CALLS[:-1])}")


def _differ_once(first: str, second: str) -> bool:
    """Return whether two names differ in one character: z_i and z_j, view_a and view_b, hidden1 and hidden2."""
    return len(first) == len(second) and sum(a != b for a, b in zip(first, second, strict=True)) == 1


def guess_arrays(thing: Any) -> tuple[str, str]:
    """Guess what a target computes with from its annotations, then from what its module imports.

    Returns:
        One of ``ARRAYS``, and what it was guessed from.

    Raises:
        TargetMisused: its module imports torch and jax both.
    """
    if is_module(thing):
        return "torch", "its class, a torch module"
    plain = inspect.unwrap(getattr(thing, "func", thing)) if callable(thing) else thing
    called = getattr(plain, "__func__", plain)
    if not inspect.isfunction(called):
        kinds = (plain if isinstance(plain, type) else type(plain)).__mro__
        called = next((vars(kind)["__call__"] for kind in kinds if "__call__" in vars(kind)), plain)
    annotations = " ".join(map(str, getattr(called, "__annotations__", {}).values()))
    for arrays, marks in (("torch", ("torch", "Tensor")), ("jax", ("jax", "jnp")), ("numpy", ("numpy", "np.", "npt."))):
        if any(mark in annotations for mark in marks):
            return arrays, "its annotations"
    values = getattr(called, "__globals__", {}).values()
    names = [v.__name__ if inspect.ismodule(v) else getattr(v, "__module__", "") if callable(v) else "" for v in values]
    packages = {str(name).partition(".")[0] for name in names}
    if {"torch", "jax"} <= packages:
        raise TargetMisused("its module imports torch and jax: say with --arrays which it is given")
    for arrays in ("torch", "jax", "numpy"):
        if arrays in packages:
            return arrays, f"what its module imports ({arrays})"
    return "numpy", "its module, which imports neither torch nor jax"


@dataclass(frozen=True)
class Claim:
    """What a target computes, as its user and its signature say.

    Attributes:
        loss: short name in the catalogue.
        call: how it is called, one of ``CALLS``.
        arrays: what it is given, one of ``ARRAYS``.
        temperature: the one that is built in; None where it is passed by keyword.
        normalised: whether the harness brings rows to norm 1 under cosine before the call.
        settings: values of options that differ from the catalogue's defaults; a tuple where several are claimed.
        passed: the catalogue's keywords that are passed, so that every value of theirs is judged.
    """

    loss: str
    call: str
    arrays: str = "torch"
    temperature: float | None = None
    normalised: bool = False
    settings: Mapping[str, object] = field(default_factory=dict)
    passed: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Refuse what contradicts itself.

        Raises:
            TargetMisused: a name is unknown, or the call cannot express the loss.
        """
        named = ((self.loss, LOSSES, "loss"), (self.call, CALLS, "call"), (self.arrays, ARRAYS, "kind of arrays"))
        for given, known, what in named:
            if given not in known:
                raise TargetMisused(f"unknown {what} {given!r}; known: {', '.join(known)}")
        calls = LOSSES[self.loss].calls
        if self.call not in calls:
            raise TargetMisused(
                f"{self.loss} cannot be computed by a target that is called with {self.call}: --call {'|'.join(calls)}"
            )

    @property
    def reduced_here(self) -> bool:
        """Whether the target returns one value per anchor, and the harness reduces them as a case requires."""
        return "reduction" not in self.passed and self.settings.get("reduction") == "none"

    @property
    def directed_here(self) -> bool:
        """Whether the target computes one direction, and the harness swaps its towers as a case requires."""
        one = self.settings.get("direction") in ("a_to_b", "b_to_a")
        return self.call == "views" and "direction" not in self.passed and one

    def values_of(self, option: str) -> tuple[object, ...] | None:
        """Return the values of an option that are judged; None for every value."""
        entry = LOSSES[self.loss]
        if (option == "reduction" and self.reduced_here) or (option == "direction" and self.directed_here):
            return entry.choices[option]
        if option in self.settings:
            found = self.settings[option]
            return found if isinstance(found, tuple) else (found,)
        return None if option in self.passed else (entry.keywords[option],)

    @property
    def support(self) -> Support:
        """The cases that are judged."""
        entry = LOSSES[self.loss]
        judged = {option: self.values_of(option) for option in (*entry.choices, "base_temperature")}
        if self.temperature is not None:
            judged = {"temperature": (self.temperature,), **judged}
        lacks = set(ARRAY_OPTIONS) - self.passed
        # What the call has no place for.
        by_partners = entry.targets == "partners" and "partners" not in self.passed
        if self.call == "features" or (by_partners and self.call != "command"):
            lacks.add("ref_embeddings")
        if by_partners and self.call not in ("labels", "command"):
            lacks.add("anchors")
        options = {option: values for option, values in judged.items() if values is not None}
        return Support((self.loss,), options, tuple(name for name in ARRAY_OPTIONS if name in lacks))


def complete(said: Claim, thing: Any, signature: Signature | None) -> tuple[Claim, list[str]]:
    """Complete a claim about a target from the target's signature.

    Args:
        said: the claim, its settings as they were said: the value ``EVERY`` says that the option is taken by keyword.
        thing: the target.
        signature: of the target; None for a command.

    Returns:
        The claim, and what was guessed.

    Raises:
        TargetMisused: what is said contradicts the signature, or is too little.
    """
    settings, passed = _checked_settings(said)
    notes: list[str] = []
    temperature = said.temperature
    if signature is not None:
        for name in passed:
            if signature.keyword(name) is None and not signature.takes_anything:
                raise TargetMisused(f"{name}=*: it takes no keyword {name}")
        passed = _passed(signature, said, passed, notes)
        if passed:
            notes.append(f"passed by keyword, every value of theirs judged: {', '.join(sorted(passed))}")
        temperature = _temperature(thing, signature, temperature, notes)
    claim = replace(said, temperature=temperature, settings=MappingProxyType(settings), passed=frozenset(passed))
    if signature is not None and claim.reduced_here:
        notes.append("reduction: it returns one value per anchor; mean and sum are taken here")
    if claim.call == "features" and LOSSES[claim.loss].targets == "labels":
        notes.append(
            "features: rows are given as two or three views of an item where every class divides so, else as one"
        )
    if claim.directed_here:
        notes.append("direction: it computes one; it is called with its towers swapped, or both ways, as cases require")
    return claim, notes


def _passed(signature: Signature, said: Claim, known: set[str], notes: list[str]) -> set[str]:
    """Return the options that the signature takes by keyword, and those known to be."""
    entry, call, passed = LOSSES[said.loss], said.call, set(known)
    for name in (*entry.choices, "base_temperature", *ARRAY_OPTIONS):
        found = signature.keyword(name)
        beside = name not in ("ref_labels", "self_rows") or "ref_embeddings" in passed
        if found is None or name not in entry.keywords or name in passed or not beside:
            continue
        choices = entry.choices.get(name, ())
        if choices and found.default is not found.empty and found.default not in choices:
            notes.append(f"{name}: its default {found.default!r} is none of {', '.join(choices)}, so it is not passed")
        else:
            passed.add(name)
    if call == "features" and signature.keyword("mask") is not None and "positives" in entry.keywords:
        passed.add("positives")
    if call == "labels" and entry.targets == "partners" and list(signature.call)[1:2] == ["partners"]:
        passed.add("partners")
    return passed


def _temperature(thing: Any, signature: Signature, said: float | None, notes: list[str]) -> float | None:
    """Return the temperature that is built in, or None where it is passed."""
    own = signature.keyword("temperature")
    if said is not None:
        if own is not None:
            notes.append(f"temperature: {said:g} built in, as said; its parameter {own.name} is left alone")
        return said
    if own is not None:
        if own.name != "temperature":
            notes.append(f"temperature: passed as {own.name}")
        return None
    if signature.takes_anything:
        notes.append("temperature: passed, for it takes any keyword; --temperature says otherwise")
        return None
    attribute = None if signature.constructs else getattr(thing, "temperature", None)
    if isinstance(attribute, torch.Tensor) and attribute.numel() == 1:
        attribute = float(attribute.detach())
    if isinstance(attribute, bool) or not isinstance(attribute, (int, float)):
        raise TargetMisused(
            "it has no parameter temperature (or tau, or logit_scale): say with --temperature which one is built in"
        )
    found = float(attribute)
    notes.append(f"temperature: {found!r} built in, the instance's attribute; --temperature says otherwise")
    meant = float(str(np.float32(found)))
    if meant != found and float(np.float32(meant)) == found:
        notes.append(
            f"temperature: that is {meant!r} as float32 holds it: --temperature {meant!r} --dtype float32"
            " judges it as such"
        )
    return found


def _checked_settings(said: Claim) -> tuple[dict[str, object], set[str]]:
    """Return the options that are claimed, and those that are said to be taken by keyword."""
    entry = LOSSES[said.loss]
    wanted: dict[str, object] = {}
    everything = set()
    for name, value in said.settings.items():
        if name == "temperature":
            raise TargetMisused("temperature is said with --temperature")
        if name not in entry.keywords:
            known = ", ".join(key for key in entry.keywords if key != "temperature")
            raise TargetMisused(f"{entry.function} has no option {name!r}; known: {known}")
        if value == EVERY:
            everything.add(name)
            continue
        if name in ARRAY_OPTIONS:
            raise TargetMisused(f"{name} is an array: claim {name}=*, that it is taken by keyword")
        values = value if isinstance(value, tuple) else (value,)
        found = tuple(_checked_value(name, one, entry.choices.get(name)) for one in values)
        wanted[name] = found if len(found) > 1 else found[0]
    return wanted, everything


def _checked_value(name: str, value: object, choices: tuple[str, ...] | None) -> object:
    if choices is not None:
        if value not in choices:
            raise TargetMisused(f"{name}: expected one of {', '.join(choices)} or *, got {value!r}")
        return value
    if value is None or str(value).lower() == "none":
        return None
    try:
        number = float(str(value))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise TargetMisused(f"{name}: expected a number, none or *, got {value!r}")
    return number
