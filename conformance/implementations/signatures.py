"""Read the signature of a target: how it is called, with which arrays, and which options it takes; and its claim.

Whatever the signature does not state is guessed from the names of its parameters. Every guess is noted in words.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product, zip_longest
from typing import Any

import numpy as np
import torch

from ..suite.catalogue import LOSSES
from .base import ARRAY_OPTIONS, Support
from .sandbox import TargetError, TargetMisused

CALLS = ("labels", "features", "views", "stacked", "pairs", "command")
ARRAYS = ("torch", "numpy", "jax")
EVERY = "*"
"""The value of a claimed option that is taken by keyword although the signature does not show it."""

TEMPERATURES = ("temperature", "tau", "logit_scale")
INVERSE = "logit_scale"
"""The name among these that stands for one over the temperature."""

_MARKS = {"torch": ("torch", "Tensor"), "jax": ("jax", "jnp"), "numpy": ("numpy", "np.", "npt.")}
"""Words in annotations that show which arrays a target takes."""

_WORDS = (
    ("features", r"\S+(?=.* labels\b)(?=.* mask\b).*"),
    ("labels", r"\S+ (labels?|targets?|y|classes|class_labels|ids|y_true|partners)( .*)?"),
    ("pairs", r"\S+ (positive_pairs|pos_pairs|pairs|pos_indices|positive_indices)( .*)?"),
    ("views", r"(query (positive_)?key|q k|anchor positive|embeddings ref_emb)( .*)?"),
    ("views", r"image_(features|embeddings) text_\1( .*)?"),
    # z_i and z_j, view_a and view_b, hidden1 and hidden2 differ in one character.
    ("views", r"(\S*)(\S)(\S*) \1(?!\2)\S\3( .*)?"),
    ("features", r"features( .*)?"),
    (
        "stacked",
        rf"(embeddings|z|reps|representations|projections|outputs|hidden)( ({'|'.join(TEMPERATURES)}|reduction))*",
    ),
)
"""Patterns of the names of the parameters, in order, for each call; the first pattern that matches decides."""


Bound = tuple[dict[str, Any], list[Any], dict[str, Any]]


class Signature:
    """The parameters of a callable: of its call and, for a class, of its constructor.

    Attributes:
        thing: the callable.
        constructs: whether it is a class, constructed with the options that its constructor takes.
        call: the parameters of the call, without self; empty if they cannot be read.
        constructor: the parameters of the constructor; empty unless it is a class.
        named: the parameters of the call, without ``*args`` and ``**keywords``.
        takes_anything: whether the call or the constructor has ``**keywords``.
    """

    def __init__(self, thing: Any) -> None:
        """Read the signatures.

        Raises:
            TargetError: it cannot be called.
        """
        if not callable(thing):
            raise TargetError(f"it is {kind_of(thing)}, which cannot be called")
        self.thing, self.constructs = thing, isinstance(thing, type)
        called = thing.forward if is_module(thing) else thing.__call__ if self.constructs else thing
        self.call = _parameters(called)
        self.constructor = _parameters(thing) if self.constructs else {}
        if self.constructs:
            self.call.pop(next(iter(self.call), ""), None)
        self.named = [p for p in self.call.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        self.takes_anything = _takes_anything(self.call) or _takes_anything(self.constructor)

    def keyword(self, name: str) -> inspect.Parameter | None:
        """Return the parameter for an option of the catalogue."""
        words = TEMPERATURES if name == "temperature" else (name,)
        found = (own[word] for own, word in product((self.constructor, self.call), words) if word in own)
        return next((p for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)), None)

    def bind(self, positional: Sequence[Any], keywords: Mapping[str, Any]) -> Bound:
        """Translate the catalogue's arguments.

        Args:
            positional: in the order of the call; None for an argument that is not given.
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
                # A base equal to the temperature does not scale the loss, like no base.
                value = keywords.get("temperature")
            constructed = word in self.constructor if found else _takes_anything(self.constructor)
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
    """Return whether something is a torch module or a class of modules."""
    return issubclass(thing if isinstance(thing, type) else type(thing), torch.nn.Module)


def kind_of(value: object) -> str:
    """Return the name of the type of a value, with its article."""
    name = type(value).__name__
    return "nothing" if value is None else f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _parameters(called: Any) -> dict[str, inspect.Parameter]:
    with suppress(TypeError, ValueError):
        return dict(inspect.signature(called).parameters)
    return {}


def _takes_anything(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def guess_call(signature: Signature) -> tuple[str, str]:
    """Guess how a target is called from the names of its parameters.

    Returns:
        One of ``CALLS``, and what it was guessed from.

    Raises:
        TargetMisused: no pattern matches.
    """
    names = [p.name for p in signature.named]
    words = f"the parameters ({', '.join(names)})"
    for call, pattern in _WORDS:
        if re.fullmatch(pattern, " ".join(names).lower()):
            return call, words
    raise TargetMisused(f"cannot guess how it is called from {words}: pass --call {'|'.join(CALLS[:-1])}")


def guess_arrays(thing: Any) -> tuple[str, str]:
    """Guess which arrays a target takes from its annotations, or else from the imports of its module.

    Returns:
        One of ``ARRAYS``, and what it was guessed from.

    Raises:
        TargetMisused: its module imports both torch and jax.
    """
    if is_module(thing):
        return "torch", "its class, a torch module"
    plain = inspect.unwrap(getattr(thing, "func", thing))
    called = getattr(plain, "__func__", plain)
    if not inspect.isfunction(called):
        called = (plain if isinstance(plain, type) else type(plain)).__call__
    annotations = " ".join(map(str, getattr(called, "__annotations__", {}).values()))
    shown = [arrays for arrays, marks in _MARKS.items() if any(mark in annotations for mark in marks)]
    if shown:
        return shown[0], "its annotations"
    values = getattr(called, "__globals__", {}).values()
    names = [v.__name__ if inspect.ismodule(v) else getattr(v, "__module__", "") if callable(v) else "" for v in values]
    packages = {str(name).partition(".")[0] for name in names}
    if {"torch", "jax"} <= packages:
        raise TargetMisused("its module imports both torch and jax: choose one with --arrays")
    for arrays in _MARKS:
        if arrays in packages:
            return arrays, f"what its module imports ({arrays})"
    return "numpy", "its module, which imports neither torch nor jax"


@dataclass(frozen=True)
class Claim:
    """What a target computes, according to its user and its signature.

    Attributes:
        loss: short name in the catalogue.
        call: how it is called, one of ``CALLS``.
        arrays: the arrays that it takes, one of ``ARRAYS``.
        temperature: the built-in temperature; None if it is passed by keyword.
        normalised: whether the harness normalises rows under cosine before the call.
        settings: values of options that differ from the catalogue's defaults; a tuple if several are claimed.
        passed: the keywords of the catalogue that are passed, so that all their values are judged.
    """

    loss: str
    call: str
    arrays: str = "torch"
    temperature: float | None = None
    normalised: bool = False
    settings: Mapping[str, object] = field(default_factory=dict)
    passed: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Refuse a claim that contradicts itself.

        Raises:
            TargetMisused: a name is unknown, or the call cannot express the loss.
        """
        named = ((self.loss, LOSSES, "loss"), (self.call, CALLS, "call"), (self.arrays, ARRAYS, "kind of arrays"))
        for given, known, what in named:
            if given not in known:
                raise TargetMisused(f"unknown {what} {given!r}; known: {', '.join(known)}")
        calls = LOSSES[self.loss].calls
        if self.call not in calls:
            found = f"{self.loss} cannot be computed by a target that is called with {self.call}"
            raise TargetMisused(f"{found}: --call {'|'.join(calls)}")

    @property
    def reduced_here(self) -> bool:
        """Whether the target returns one value per anchor, which the harness reduces as a case requires."""
        return "reduction" not in self.passed and self.settings.get("reduction") == "none"

    @property
    def directed_here(self) -> bool:
        """Whether the target computes one direction only, so that the harness swaps the towers if a case requires."""
        one = self.settings.get("direction") in ("a_to_b", "b_to_a")
        return self.call == "views" and "direction" not in self.passed and one

    def values_of(self, option: str) -> tuple[object, ...] | None:
        """Return the values of an option that are judged; None for every value."""
        by_harness = {"reduction": self.reduced_here, "direction": self.directed_here}
        if by_harness.get(option) or (option in self.passed and option not in self.settings):
            return None
        found = self.settings.get(option, LOSSES[self.loss].keywords[option])
        return found if isinstance(found, tuple) else (found,)

    @property
    def support(self) -> Support:
        """The cases that are judged."""
        entry = LOSSES[self.loss]
        judged = {option: self.values_of(option) for option in (*entry.choices, "base_temperature")}
        options = {option: values for option, values in judged.items() if values is not None}
        if self.temperature is not None:
            options = {"temperature": (self.temperature,), **options}
        # The call has no parameters for these.
        by_partners = entry.targets == "partners" and "partners" not in self.passed and self.call != "command"
        without = {"ref_embeddings"} if by_partners or self.call == "features" else set()
        without |= {"anchors"} if by_partners and self.call != "labels" else set()
        lacks = tuple(name for name in ARRAY_OPTIONS if name in without or name not in self.passed)
        return Support((self.loss,), options, lacks)


def complete(claim: Claim, signature: Signature | None) -> tuple[Claim, list[str]]:
    """Complete a claim about a target from the target's signature.

    Args:
        claim: the claim of the user; the value ``EVERY`` of a setting means that the option is taken by keyword.
        signature: signature of the target; None for a command.

    Returns:
        The claim, and the guesses that were made.

    Raises:
        TargetMisused: the claim contradicts the signature, or is incomplete.
    """
    settings, notes = _checked_settings(claim), list[str]()
    passed = {*claim.settings} - {*settings}
    temperature = claim.temperature
    if signature is not None:
        for name in passed:
            if signature.keyword(name) is None and not signature.takes_anything:
                raise TargetMisused(f"{name}=*: the target has no parameter {name}")
        if claim.arrays == "jax":
            notes.append("jax: 64-bit mode is on; the target is compiled if possible")
        if claim.arrays == "numpy":
            notes.append("gradient: not judged, because a numpy function returns none")
        passed = _keywords(claim, passed, signature, notes)
        temperature = _temperature(claim.temperature, signature, notes)
    claim = replace(claim, settings=settings, passed=frozenset(passed), temperature=temperature)
    if signature is not None and claim.reduced_here:
        notes.append("reduction: the target returns one value per anchor; pairproof reduces them")
    if claim.call == "features" and LOSSES[claim.loss].targets == "labels":
        notes.append("features: items have two or three views if the size of every class allows it, else one")
    if claim.directed_here:
        notes.append("direction: the target computes one; pairproof swaps the towers as cases require")
    return claim, notes


def _keywords(claim: Claim, claimed: set[str], signature: Signature, notes: list[str]) -> set[str]:
    """Return the options that are passed by keyword: those that are claimed, and those in the signature."""
    entry, passed = LOSSES[claim.loss], set(claimed)
    for name in (*entry.choices, "base_temperature", *ARRAY_OPTIONS):
        found = signature.keyword(name)
        usable = name not in ("ref_labels", "self_rows") or "ref_embeddings" in passed
        if found is None or name not in entry.keywords or name in passed or not usable:
            continue
        choices = entry.choices.get(name)
        if choices and found.default not in (found.empty, *choices):
            notes.append(f"{name}: not passed: its default {found.default!r} is not one of {', '.join(choices)}")
        else:
            passed.add(name)
    if claim.call == "features" and signature.keyword("mask") is not None and "positives" in entry.keywords:
        passed.add("positives")
    if claim.call == "labels" and entry.targets == "partners" and list(signature.call)[1:2] == ["partners"]:
        passed.add("partners")
    if passed:
        notes.append(f"passed by keyword, and judged for all values: {', '.join(sorted(passed))}")
    return passed


def _temperature(claimed: float | None, signature: Signature, notes: list[str]) -> float | None:
    """Return the built-in temperature, or None if the temperature is passed."""
    own = signature.keyword("temperature")
    if own is not None and claimed is not None:
        notes.append(f"temperature: {claimed:g} is built in, as claimed; its parameter {own.name} is not passed")
    elif own is not None and own.name != "temperature":
        notes.append(f"temperature: passed as {own.name}")
    elif own is None and claimed is None and signature.takes_anything:
        notes.append("temperature: passed, because the target takes any keyword; override with --temperature")
    if own is not None or claimed is not None or signature.takes_anything:
        return claimed
    found = None if signature.constructs else getattr(signature.thing, "temperature", None)
    if isinstance(found, torch.Tensor) and found.numel() == 1:
        found = found.item()
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        missing = "it has no parameter temperature (or tau, or logit_scale)"
        raise TargetMisused(f"{missing}: pass the temperature that is built in with --temperature")
    found = float(found)
    notes.append(f"temperature: {found!r} is built in, an attribute of the instance; override with --temperature")
    decimal = float(str(np.float32(found)))
    if decimal != found and float(np.float32(decimal)) == found:
        options = f"--temperature {decimal!r} --dtype float32"
        notes.append(f"temperature: that is {decimal!r} rounded to float32; {options} judges it as {decimal!r}")
    return found


def _checked_settings(claim: Claim) -> dict[str, object]:
    """Return the claimed options, without those whose value is ``EVERY``."""
    entry, checked = LOSSES[claim.loss], dict[str, object]()
    for name, value in claim.settings.items():
        if name == "temperature":
            raise TargetMisused("the temperature has its own option, --temperature")
        if name not in entry.keywords:
            known = ", ".join(key for key in entry.keywords if key != "temperature")
            raise TargetMisused(f"{entry.function} has no option {name!r}; known: {known}")
        if value == EVERY:
            continue
        if name in ARRAY_OPTIONS:
            raise TargetMisused(f"{name} is an array: claim {name}=*, which means that it is taken by keyword")
        values = value if isinstance(value, tuple) else (value,)
        found = tuple(_checked_value(name, one, entry.choices.get(name)) for one in values)
        checked[name] = found if len(found) > 1 else found[0]
    return checked


def _checked_value(name: str, value: object, choices: tuple[str, ...] | None) -> object:
    if choices is None:
        with suppress(ValueError):
            number = None if str(value).lower() == "none" else float(str(value))
            if number is None or math.isfinite(number):
                return number
    elif value in choices:
        return value
    expected = f"one of {', '.join(choices)}" if choices else "a number, none"
    raise TargetMisused(f"{name}: expected {expected} or *, got {value!r}")
