"""Read from the signature of a user's loss (a *target*) how to call it, with which arrays and options.

A ``Claim`` describes what the target computes. What the signature does not state is guessed from the names of the
parameters, and every guess is reported.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import chain, product, zip_longest
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from ..suite.cases import Case
from ..suite.catalogue import CHOICES, IGNORED, LOSSES, NUMBERS, TOWER_TARGETS, WEIGHTS, choice_of
from .base import ARRAY_OPTIONS, OPT_IN, Support, items_of
from .sandbox import TargetError, TargetMisused

CALLS = (
    *("labels", "partners", "mask", "features", "views", "one_way", "towers", "stacked", "interleaved"),
    *("similarities", "pairs", "command"),
)
OF_VIEWS = ("views", "one_way")
"""Calls that pass both views of each item.

With "one_way", only the first views are anchors, and the target is called again with the views swapped."""
ARRAYS = ("torch", "numpy", "jax")
EVERY = "*"
"""The claimed value of an option that the target takes by keyword."""

TEMPERATURES = ("temperature", "tau", "tao", "temp", "T", "t")
INVERSES = ("logit_scale", "scale", "inv_temperature", "inverse_temperature", "inv_temp", "inv_tau")
"""Names of 1 / temperature."""
LOGARITHMS = (*(f"log_{name}" for name in ("temperature", "temp", "tau", "t", *INVERSES)), "t_prime", "logt")
"""Names of log(temperature) or, for ``log_scale``, ``t_prime`` and the like, of log(1 / temperature).

The source shows which of them ``log_t`` and ``logt`` are."""

NO_TEMPERATURE = "the target takes no argument temperature (or tau, or logit_scale)"
"""Start of the message that the temperature must be claimed."""

LOG_DEFAULTS = (math.log(1 / 0.07), math.log(10))
"""Defaults that show that a scale is given by its logarithm: those of CLIP and of the sigmoid loss."""

PARTNERS = (
    *("partners", "partner", "positive_index", "positive_idx", "pos_index", "pos_idx"),
    *("partner_index", "partner_indices", "partner_idx"),
)
"""Names of parameters for the row of each row's positive."""

HARD = "hard_negatives"

ONE_EACH = "[N, D]"
"""How one hard negative of each query is passed."""

SAME_ROWS = "[N, K, D]"
"""How a queue is passed with the same rows for each anchor."""

ALIASES: Mapping[str, tuple[str, ...]] = {
    "temperature": (*TEMPERATURES, *INVERSES, *LOGARITHMS),
    "base_temperature": ("base_temperature", "base_temp"),
    "bias": ("bias", "logit_bias", "b"),
    "labels": ("labels", "label", "targets", "target", "y", "classes", "class_labels", "y_true", "ids", "lbls"),
    HARD: (
        *("hard_negatives", "hard_negs", "hard_negative_embeddings", "hard_negatives_embeddings"),
        *("hard_neg_embeddings", "embeddings_hard"),
    ),
    "negatives": (
        *("negatives", "queue", "memory_bank", "memory", "bank", "negs", "negative_keys", "negative_key"),
        *("neg_keys", "queue_features", "queue_feats"),
    ),
}
"""Names of parameters for arguments of the catalogue; other arguments have only their own name."""

_FURTHER = r"(?!(n|no|num|use)_|\w*(mask|weight|idx|indices|padding|label|sim|score|logit))(\w+_)?neg(ative)?s?(_\w+)?"
_OTHERS = {
    "labels": re.compile(r"(?!one_?hot|multi_?hot)[a-z]+_(ids|labels?|classes)"),
    "negatives": re.compile(rf"(?!\w*hard){_FURTHER}"),
    HARD: re.compile(_FURTHER),
    "temperature": re.compile(r"logit_scale_\w+"),
}
"""Other names of parameters for arguments of the catalogue; those of hard negatives only if the loss has them."""

_ITEM = "(vec|emb|embedding|feat|feature|rep|item|doc|document|passage|candidate)"
ONE_NEGATIVE = re.compile(rf"(\w+_)?neg(ative)?(_{_ITEM})?|hard_{_ITEM}s?")
"""Names of parameters for the further negatives of a loss, or for one hard negative of each query."""

FACTS: Mapping[str, tuple[str, ...]] = {
    "batch_size": ("batch_size", "batchsize", "bs", "bsz"),
    "n_views": ("n_views", "num_views", "nviews", "n_view"),
    "device": ("device",),
    "dim": ("dim", "feat_dim", "feature_dim", "embed_dim", "embedding_dim"),
    "world_size": ("world_size", "num_replicas", "n_gpus", "num_gpus"),
    "rank": ("rank", "local_rank"),
}
"""Names of parameters for facts about the batch and the process."""

ONLY_REQUIRED = ("dim", "world_size", "rank")
"""Facts that are passed only to parameters without a default."""

_DOUBTFUL = ("t", "scale", "similarity", "b")
"""Names of options that may be arrays if they are the first or second parameter."""

_NUMBERED = re.compile(r"(?P<stem>\w+)1 (?P=stem)2 ((?P=stem)3)")
"""Names of three matrices, such as ``z1``, ``z2`` and ``z3``: two towers and one hard negative of each query."""

VARIED = r"(?P<one>\S+?)_?1? (?P=one)_?(2|aug|pos|bar|hat|tilde|prime)"
"""Names of two views of which one is a variation of the other, such as ``x`` and ``x_aug``."""

_MARKS = {"torch": ("torch", "Tensor"), "jax": ("jax", "jnp"), "numpy": ("numpy", "np.", "npt.")}
"""Words in annotations that show which arrays a target takes."""


METHODS = (
    *("__call__", "forward", "loss", "get_loss", "compute_loss", "calculate_loss"),
    *("calc_loss", "compute", "calc", "cal"),
)
"""Names of methods that compute a loss; the first one that a class has is called."""

SETTINGS = ("args", "cfg", "config", "conf", "opt", "opts", "options", "hparams", "params", "self")
"""Names of parameters for an object or a mapping with settings, such as ``args.temperature``.

``self`` is one if the target is a method of a class without an instance."""

Bound = tuple[dict[str, Any], list[Any], dict[str, Any]]

FACTS_IN_WORDS = {
    **{"batch_size": "batch size", "n_views": "number of views", "device": "device", "dim": "D"},
    **{"world_size": "1", "rank": "0"},
}


@dataclass(frozen=True)
class Pack:
    """A parameter whose value is made of several values: a mapping, an object with attributes, or a pair.

    Attributes:
        name: the name of the parameter.
        kind: what it gets, in words.
        keys: the names of the values that the source reads from it.
        paths: for each key, the path of the attribute in an object, such as "loss.temperature".
    """

    name: str
    kind: str
    keys: tuple[str, ...]
    paths: tuple[str, ...]

    def pack(self, values: dict[str, Any]) -> dict[str, Any]:
        """Replace the values of the keys by that of the parameter."""
        own = {key: values.pop(key) for key in self.keys if key in values}
        made: Any = own if self.kind == "mapping" else (*own.values(),)
        if self.kind == "object":
            made = _nested(self._by_path(own), lambda parts: SimpleNamespace(**parts))
        return {self.name: made, **values}

    def _by_path(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {path: values[key] for key, path in zip(self.keys, self.paths, strict=True) if key in values}

    def code(self, texts: Mapping[str, str]) -> str:
        """Return the code of its value from the code of the values."""
        if self.kind == "object":
            return str(_nested(self._by_path(texts), _namespace_code))
        if self.kind == "mapping":
            pairs = (f'"{key}": {text}' for key, text in texts.items())
            return f"{{{', '.join(pairs)}}}"
        return f"({', '.join(texts.values())})"


def _nested(values: Mapping[str, Any], make: Callable[[dict[str, Any]], Any]) -> Any:
    """Make an object from values by path, such as "loss.temperature", and the objects inside it."""
    parts = {path: value for path, value in values.items() if "." not in path}
    for outer in dict.fromkeys(path.partition(".")[0] for path in values if "." in path):
        inner = {path.removeprefix(f"{outer}."): it for path, it in values.items() if path.startswith(f"{outer}.")}
        parts[outer] = _nested(inner, make)
    return make(parts)


def _namespace_code(parts: Mapping[str, Any]) -> str:
    return f"types.SimpleNamespace({', '.join(f'{key}={text}' for key, text in parts.items())})"


class Signature:
    """The parameters of a callable: of its call and, for a class, of its constructor.

    Attributes:
        thing: the callable.
        init: the values that the user gives to parameters, by name.
        constructs: whether it is a class.
        of_constructor: whether its constructor takes the arrays.
        call: the parameters of the call, without self; empty if they cannot be read.
        constructor: the parameters of the constructor; empty unless it is a class.
        named: the parameters of the call, without ``*args`` and ``**keywords``.
        packs: the parameters that are made of several values, which replace them in ``call`` and ``constructor``.
        takes_anything: whether the call or the constructor has ``**keywords``.
        further: the further negatives that the loss takes, "negatives" or "hard_negatives"; "" if none or unknown. A
            parameter called ``negative`` gets them.
        scale: the parameter that gets 1 / temperature although its name does not show it; "" if there is none.
    """

    def __init__(self, thing: Any, init: Mapping[str, Any] = MappingProxyType({}), scale: str = "") -> None:
        """Read the signatures.

        Raises:
            TargetError: it cannot be called.
            TargetMisused: ``init`` or ``scale`` names an unknown parameter.
        """
        if not callable(thing):
            raise TargetError(f"it is {kind_of(thing)}, which cannot be called")
        self.thing, self.init, self.constructs, self.scale = thing, dict(init), isinstance(thing, type), scale
        self._logarithms: dict[str, bool] = {}
        self.further = ""
        self.call = _parameters(_called(thing))
        self.constructor = _parameters(thing) if self.constructs else {}
        if self.constructs:
            self.call.pop(next(iter(self.call), ""), None)
        self.of_constructor = self.constructs and not self.call
        if self.of_constructor:  # the constructor takes the rows
            self.call, self.constructor = self.constructor, {}
        self.packs = [*self._read_packs()]
        self.named = [p for p in self.call.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        self.takes_anything = _takes_anything(self.call) or _takes_anything(self.constructor)
        known = [name for name in (*self.constructor, *self.call) if name not in ("args", "kwargs")]
        for option, names in (("init", [*self.init]), ("scale", [scale] * bool(scale))):
            for name in names:
                if name not in known and not (option == "init" and self.takes_anything):
                    raise TargetMisused(
                        f"--{option} {name}: the target has no such parameter; it has {', '.join(known)}"
                    )

    def _read_packs(self) -> Iterator[Pack]:
        """Replace parameters that are made of several values by these values, and yield the parameters.

        The first parameter may be a pair, or the only required one a mapping. Settings may be an object or a mapping.
        """
        called = _source_of(_called(getattr(self.thing, "func", self.thing)))
        required = [p.name for p in self.call.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        for own, source in ((self.constructor, self.source), (self.call, called)):
            for name, p in [*own.items()]:
                first, keys, kind = own is self.call and required[:1] == [name], list[str](), ""
                settings = name.lower() in SETTINGS and p.default is p.empty
                if settings or (first and len(required) == 1):
                    keys, kind = re.findall(rf"""\b{name}\[["'](\w+)["']\]""", source), "mapping"
                if settings and not keys:
                    keys, kind = re.findall(rf"\b{name}\.(\w+(?:\.\w+)*)\b(?!\()", source), "object"
                if first and not keys:
                    whole = f"{source}\n{self.source}"  # another method may take the pair apart
                    pair = re.search(rf"^\s*\(?(\w+), *(\w+)\)? *= *{name}\s*(?:#.*)?$", whole, re.MULTILINE)
                    both = re.search(rf"\b{name}\[0\].*\b{name}\[1\]", source, re.DOTALL) and f"{name}." not in source
                    if pair or both or re.search(r"(?i)(tuple|list|sequence)\[.*tensor", str(p.annotation)):
                        keys, kind = [*pair.groups()] if pair else [f"{name}_1", f"{name}_2"], "pair"
                if keys:
                    paths = {path.rpartition(".")[2]: path for path in keys}
                    made = {key: inspect.Parameter(key, inspect.Parameter.POSITIONAL_OR_KEYWORD) for key in paths}
                    others = {it: one for it, one in own.items() if it not in (name, *made)}
                    own.clear()
                    own.update(made | others if first else others | made)
                    yield Pack(name, kind, (*made,), (*paths.values(),))

    def keyword(self, name: str) -> inspect.Parameter | None:
        """Return the parameter for an option of the catalogue; None if there is none or the user gives its value."""
        words, own = ALIASES.get(name, (name,)), [*map(plain_name, (*self.constructor, *self.call))]
        if self.further == HARD and name == "negatives":
            return None
        if self.further == name:
            words = (*words, *filter(ONE_NEGATIVE.fullmatch, own))
            if name == HARD:
                words = (*words, *ALIASES["negatives"], *self.third)
        if name in _OTHERS and (name != HARD or self.further == name):
            words = (*words, *filter(_OTHERS[name].fullmatch, own))
        if name == "temperature" and self.scale:
            words = (plain_name(self.scale),)
        found = self._named(*words)
        usable = (p for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        if name in (HARD, "negatives"):
            arrays = {p.name: p for p in usable if not isinstance(p.default, (int, float, str))}
            clear = len(arrays) == 1 or not arrays.keys().isdisjoint(ALIASES[name])
            usable = (p for p in arrays.values() if clear)
        return next((p for p in usable if p.name not in self.init and not self._doubtful(p)), None)

    @cached_property
    def third(self) -> list[str]:
        """The name of the third of three numbered matrices; [] unless the first required parameters are such."""
        named = " ".join(plain_name(p.name) for p in self.named[:3] if p.default is p.empty)
        found = _NUMBERED.fullmatch(named)
        return [found[2]] if found else []

    def _named(self, *words: str) -> Iterator[inspect.Parameter]:
        """Yield the parameters of the constructor, then those of the call, in the order of their names in ``words``."""
        for own, word in product(self._by_plain_name, words):
            yield from own.get(word, ())

    @cached_property
    def _by_plain_name(self) -> tuple[dict[str, list[inspect.Parameter]], ...]:
        """The parameters of the constructor, and those of the call, by their plain names; each call needs many."""
        found: tuple[dict[str, list[inspect.Parameter]], ...] = {}, {}
        for own, by_name in zip((self.constructor, self.call), found, strict=True):
            for p in own.values():
                by_name.setdefault(plain_name(p.name), []).append(p)
        return found

    def _doubtful(self, parameter: inspect.Parameter) -> bool:
        """Whether a parameter with the name of an option may be an array: it is required, and first or second."""
        required = parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        names = " ".join(snake_case(p.name) for p in self.named[:2])
        rows = re.fullmatch(rf"{VARIED}|(q|quer|anchor)\S* positives", names)
        towers = names == "x y" and any(name.startswith("y_") for name in self.call)
        doubtful = parameter.name in _DOUBTFUL or rows is not None or towers
        return doubtful and required and any(parameter is p for p in self.named[:2])

    @cached_property
    def places(self) -> list[inspect.Parameter]:
        """The parameters for embeddings, labels and the like: those that are no option and no fact."""
        taken = [self.keyword(name) for name in ("temperature", "negatives", HARD, *SCALARS)]
        facts = chain(*FACTS.values(), ALIASES["negatives"], ALIASES[HARD])
        names = {*self.init, *(p.name for p in (*taken, *self._named(*facts)) if p)}
        names |= {key for pack in self.packs if pack.name.lower() in SETTINGS for key in pack.keys}
        names |= {p.name for p in self.labels_of_views}
        arrays = (p for p in self.named if not isinstance(p.default, (int, float, str)))
        return [p for p in arrays if p.name not in names and not is_ignored(p)]

    @cached_property
    def labels_of_views(self) -> list[inspect.Parameter]:
        """The required parameters for the labels of the first and of the second view; [] unless there are both."""
        own = [p for p in self.named if p.default is p.empty and _OTHERS["labels"].fullmatch(plain_name(p.name))]
        views = [p.name.partition("_")[0] for p in self.named if p not in own]
        own = [p for p in own if p.name.partition("_")[0] in views and p.name not in (*self.init, *TOWER_TARGETS)]
        return own if len(own) == 2 else []

    @property
    def labels_first(self) -> bool:
        """Whether the names show that the labels come before the embeddings."""
        named = [snake_case(p.name) in (*ALIASES["labels"], *PARTNERS) for p in self.places[:2]]
        return named == [True, False]

    @property
    def takes_negative_mask(self) -> bool:
        """Whether the third array is a mask of negatives, by its name."""
        return any(re.fullmatch(r"(\w+_)?neg(ative)?s?(_\w+)?", p.name.lower()) for p in self.places[2:3])

    def takes_row_numbers(self, name: str) -> bool:
        """Whether the source passes a parameter to a cross-entropy as its targets, which are numbers of rows."""
        return (
            re.search(rf"(?i)(entropy|criterion|\bce|loss)\w*\([^\n]*, *(target=)?{name} *[,)]", self.source)
            is not None
        )

    @cached_property
    def documentation(self) -> str:
        """The name and the docstrings of the target, in lower case."""
        plain = inspect.unwrap(getattr(self.thing, "func", self.thing))
        kind = plain if isinstance(plain, type) or inspect.isroutine(plain) else type(plain)
        called = _called(kind) if isinstance(kind, type) and not inspect.isroutine(plain) else None
        texts = (getattr(one, name, None) for one in (kind, called) for name in ("__name__", "__doc__"))
        # A class without a docstring may inherit that of a library.
        inherited = {text for base in getattr(kind, "__mro__", ())[1:] if (text := base.__doc__)}
        return " ".join(text for text in texts if isinstance(text, str) and text not in inherited).lower()

    def requires(self, name: str) -> bool:
        """Whether the target has a required parameter for an option of the catalogue."""
        found = self.keyword(name)
        return found is not None and found.default is found.empty

    def bind(
        self, positional: Sequence[Any], keywords: Mapping[str, Any], facts: Mapping[str, Any] = {}, dtype: Any = None
    ) -> Bound:
        """Translate the catalogue's arguments to those of the target.

        Required parameters that are ignored (``is_ignored``) get None.

        Args:
            positional: in the order of the call; None for an argument that is not given.
            keywords: options by their names in the catalogue.
            facts: facts about the batch, by their names in ``FACTS``.
            dtype: the dtype in which the temperature and the bias are passed as tensors; None for floats.

        Returns:
            The keywords of the constructor, the positional arguments of the call, and the keywords of the call.
        """
        constructor, given, call = self._bind(positional, keywords, facts, dtype)
        if self.packs:
            call = {**{p.name: value for p, value in zip(self.named, given, strict=False)}, **call}
            given = []
        for pack in self.packs:
            if any(key in self.constructor for key in pack.keys):
                constructor = pack.pack(constructor)
            else:
                call = pack.pack(call)
        if self.of_constructor:
            return {**{p.name: value for p, value in zip(self.named, given, strict=False)}, **call}, [], {}
        return constructor, given, call

    def _bind(
        self, positional: Sequence[Any], keywords: Mapping[str, Any], facts: Mapping[str, Any], dtype: Any
    ) -> Bound:
        """Do the same as ``bind``, without packing values."""
        constructor: dict[str, Any] = {}
        call: dict[str, Any] = {}

        def give(name: str, value: Any) -> None:
            anywhere = name not in self.call and _takes_anything(self.constructor)
            (constructor if name in self.constructor or anywhere else call)[name] = value

        for name, value in self.init.items():
            give(name, value)
        places = self.places
        for fact, value in facts.items():
            for own in self._named(*FACTS[fact]):
                wanted = fact not in ONLY_REQUIRED or own.default is own.empty
                if wanted and own.name not in self.init and not any(own is p for p in places):
                    (constructor if self.constructor.get(own.name) is own else call)[own.name] = value
        for name, value in keywords.items():
            found = self.keyword(name)
            if found is None:
                give(name, value)
                continue
            if name == "temperature":
                value = self.given_temperature(found.name, value)
            if name in ("temperature", "bias") and dtype is not None:
                value = _as_tensor(value, dtype)
            if name == "base_temperature" and value is None and isinstance(found.default, (int, float)):
                # A base temperature of None means the temperature.
                value = keywords.get("temperature")
            (constructor if found.name in self.constructor else call)[found.name] = value
            if name == "labels":
                call |= {p.name: value for p in self.labels_of_views}
        given: list[Any] = []
        variadic = any(p.kind is p.VAR_POSITIONAL for p in self.call.values())
        places = [p for p in places if not (variadic and p.kind is p.KEYWORD_ONLY) and p.name not in call]
        for value, parameter in zip_longest(positional, places[: len(positional)]):
            if parameter and value is None and parameter.default is not parameter.empty:
                continue
            in_place = parameter is None or (len(given) < len(self.named) and parameter is self.named[len(given)])
            if in_place and (parameter is None or parameter.kind is not parameter.KEYWORD_ONLY):
                given.append(value)
            else:
                call[parameter.name] = value
        return constructor, given, {**{p.name: None for p in self.named if is_ignored(p)}, **call}

    def arguments(
        self,
        positional: Sequence[str],
        keywords: Mapping[str, str],
        facts: Mapping[str, str] = FACTS_IN_WORDS,
        dtype: str | None = None,
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Return what ``bind`` passes to each parameter of the constructor and of the call, in words or as code."""
        constructor, given, call = self._bind(positional, keywords, facts, dtype)
        for k, value in enumerate(given):
            call = {self.named[k].name if k < len(self.named) else f"*{k}": value, **call}
        ordered = {name: call[name] for name in self.call if name in call}
        return constructor, {**ordered, **call}

    def given_temperature(self, word: str, temperature: Any) -> Any:
        """Convert the temperature to the value of a parameter, such as a logarithm or an inverse; also in words."""
        logarithm = self.is_logarithm(word)
        if isinstance(temperature, str):
            value = f"1 / {temperature}" if self.inverted(word) else temperature
            return f"log({value})" if logarithm else value
        value = 1 / temperature if self.inverted(word) else temperature
        return torch.as_tensor(value, dtype=torch.float64).log() if logarithm else value

    @property
    def fixed_temperature(self) -> float | None:
        """The temperature that the user gives in ``init``, or None."""
        word = next((word for word in self.init if plain_name(word) in ALIASES["temperature"]), "")
        return self._as_temperature(word, self.init.get(word))

    @property
    def default_temperature(self) -> float | None:
        """The default of the parameter for the temperature, as a temperature; None if it is not a number."""
        own = self.keyword("temperature")
        return None if own is None else self._as_temperature(own.name, own.default)

    def _as_temperature(self, word: str, value: Any) -> float | None:
        """Convert the value of a parameter to a temperature; None if it is not a number."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        number = math.exp(value) if self.is_logarithm(word) else float(value)
        return (1 / number if self.inverted(word) else number) if number > 0 else None

    def inverted(self, word: str) -> bool:
        """Whether a parameter is 1 / temperature or log(1 / temperature)."""
        plain = plain_name(word)
        if plain in ("log_t", "logt") or (plain in TEMPERATURES and self.is_logarithm(word)):
            below = rf"(/ *\(?[\w.]*exp\(?|exp\( *-) *(self\.)?{word}\b|/ *\(?(self\.)?{word}\.exp\("
            return re.search(below, self.source) is None
        return plain.removeprefix("log_") not in TEMPERATURES or word == self.scale

    def is_logarithm(self, word: str) -> bool:
        """Whether a parameter is a logarithm of the temperature or its inverse.

        The name, the default or exp in the source show it.
        """
        if word not in self._logarithms:  # reading the source takes long
            self._logarithms[word] = self._read_as_logarithm(word)
        return self._logarithms[word]

    def _read_as_logarithm(self, word: str) -> bool:
        plain = plain_name(word)
        if plain in LOGARITHMS:
            return True
        if plain not in (*INVERSES, *TEMPERATURES) and word != self.scale and not plain.startswith("logit_scale_"):
            return False
        default = getattr({**self.call, **self.constructor}.get(word), "default", None)
        known = isinstance(default, float) and any(abs(default - it) < 1e-3 for it in LOG_DEFAULTS)
        return known or _is_exponentiated(word, self.source, getattr(_function_of(self.thing), "__globals__", {}))

    @cached_property
    def source(self) -> str:
        """The source of the function or the class; "" if it cannot be read."""
        plain = inspect.unwrap(getattr(self.thing, "func", self.thing))
        scripted = hasattr(plain, "code") and hasattr(plain, "graph")
        return _source_of(plain if inspect.isroutine(plain) or isinstance(plain, type) or scripted else type(plain))


SCALARS = (*NUMBERS, *CHOICES)
"""The options of the catalogue that are not arrays, without the temperature."""


@cache
def snake_case(name: str) -> str:
    """Return the name of a parameter in lower case with underscores, "batch_size" for "batchSize"; one letter as is."""
    return name if len(name) == 1 else re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


@cache
def plain_name(name: str) -> str:
    """Return the name of a parameter as ``snake_case`` does, "temperature" also for "init_temperature" and the like."""
    return re.sub(r"^init(ial)?_|_init(ial)?(_value)?$", "", snake_case(name))


def _as_tensor(value: Any, dtype: Any) -> Any:
    """Return a number as a tensor, also in code. A logarithm already is one."""
    if isinstance(value, str):
        return value if value.startswith("log(") else f"torch.as_tensor({value}, dtype={dtype})"
    return value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=dtype)


def is_module(thing: Any) -> bool:
    """Return whether something is a torch module or a subclass of ``torch.nn.Module``."""
    return issubclass(thing if isinstance(thing, type) else type(thing), torch.nn.Module)


def kind_of(value: object) -> str:
    """Return the name of the type of a value, with its article."""
    name = type(value).__name__
    return "nothing" if value is None else f"an {name}" if name[0] in "aeiou" else f"a {name}"


_LIMITS = {"clamp", "clamp_max", "clamp_min", "clip", "minimum", "maximum", "min", "max"}
_COPIES = {"float", "double", "to", "type_as", "squeeze", "view", "reshape", "item", "tensor", "as_tensor", "Parameter"}
"""Functions and methods whose result is still a logarithm if their first operand is one."""


def _is_exponentiated(word: str, source: str, known: Mapping[str, Any], depth: int = 3) -> bool:
    """Return whether a source takes the exponential of a variable or an attribute, possibly after limiting it.

    Args:
        word: the name of the variable.
        source: the source of a function or a class.
        known: the names in the module of the source. Functions among them are followed ``depth`` times.
        depth: see ``known``.
    """
    try:
        nodes = [*ast.walk(ast.parse(textwrap.dedent(source)))]
    except SyntaxError:  # for example a lambda that ends in the middle of a line
        return re.search(rf"\bexp\(\s*(self\.)?{word}\s*[),]|\b{word}\.exp\(", source) is not None
    names = {word}
    own = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}

    def operands(call: ast.Call) -> list[ast.expr]:
        of_method = [call.func.value] if isinstance(call.func, ast.Attribute) else []
        return [*of_method, *call.args, *(it.value for it in call.keywords)]

    def is_one(node: ast.expr) -> bool:
        if isinstance(node, ast.UnaryOp):
            return is_one(node.operand)
        if isinstance(node, ast.Call):
            return _name(node.func) in _LIMITS | _COPIES and any(map(is_one, operands(node)))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            return "ones(" in ast.unparse(node) and (is_one(node.left) or is_one(node.right))
        return _name(node) in names

    def in_helper(call: ast.Call) -> bool:
        """Return whether a function takes the exponential of its argument, which is the variable."""
        name = _name(call.func)
        if not depth or name in _LIMITS | _COPIES or not any(map(is_one, operands(call))):
            return False
        text = ast.unparse(own[name]) if name in own else _source_of(known.get(name))
        parameters = [*own[name].args.args] if name in own else []
        listed = [it.arg for it in parameters if it.arg != "self"] or [*_parameters(known.get(name))]
        pairs = [*zip(listed, call.args, strict=False), *((it.arg, it.value) for it in call.keywords)]
        given = [parameter for parameter, value in pairs if parameter and is_one(value)]
        return any(_is_exponentiated(it, text, known, depth - 1) for it in given)

    for node in nodes:
        if isinstance(node, ast.Assign) and is_one(node.value):
            names |= {_name(target) for target in node.targets}
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    direct = (one for call in calls if _name(call.func) in ("exp", "exp_") for one in operands(call))
    return any(map(is_one, direct)) or any(map(in_helper, calls))


def _source_of(thing: Any) -> str:
    """Return the source of a function, a class or a TorchScript function; "" if it cannot be read."""
    with suppress(OSError, TypeError, RuntimeError):
        return str(thing.code) if hasattr(thing, "graph") else inspect.getsource(inspect.unwrap(thing))
    return ""


def _name(node: ast.expr) -> str:
    """Return the name of a variable or an attribute; "" for another expression."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _called(thing: Any) -> Any:
    """Return the function that runs when a callable, or an instance of a class, is called."""
    if is_module(thing):
        kind: Any = thing if isinstance(thing, type) else type(thing)
        return thing.forward if kind.__call__ is torch.nn.Module.__call__ else thing.__call__
    if not isinstance(thing, type):
        return thing
    name = method_of(thing)
    return next(vars(kind)[name] for kind in thing.__mro__ if name in vars(kind))


def method_of(kind: type) -> str:
    """Return the name of the method of a class that computes the loss.

    Raises:
        TargetError: it has none.
    """
    known = {name for one in kind.__mro__ for name in vars(one)}
    if found := next((name for name in METHODS if name in known), ""):
        return found
    raise TargetError(f"instances of its class {kind.__name__} cannot be called: it has none of {', '.join(METHODS)}")


def _parameters(called: Any) -> dict[str, inspect.Parameter]:
    if arguments := getattr(getattr(called, "schema", None), "arguments", None):  # TorchScript
        kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
        given = [one for one in arguments if one.name != "self"]
        defaults = {one.name: one.default_value if one.has_default_value() else empty for one in given}
        return {
            one.name: inspect.Parameter(one.name, kind, default=defaults[one.name], annotation=str(one.type))
            for one in given
        }
    with suppress(TypeError, ValueError):
        return dict(inspect.signature(called).parameters)
    return {}


def is_ignored(parameter: inspect.Parameter) -> bool:
    """Whether the name of a required parameter shows that the target does not use it; ``self`` is no setting then."""
    return (parameter.name.startswith("_") or parameter.name == "self") and parameter.default is parameter.empty


def _takes_anything(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _function_of(thing: Any) -> Any:
    """Return the Python function that runs when a target is called."""
    plain = inspect.unwrap(getattr(thing, "func", thing))
    called = getattr(plain, "__func__", plain)
    if inspect.isfunction(called) or hasattr(called, "schema"):
        return called
    return _called(plain if isinstance(plain, type) else type(plain))


def guess_arrays(thing: Any) -> tuple[tuple[str, ...], str]:
    """Guess which arrays a target takes.

    Returns:
        The kinds of arrays (``ARRAYS``) to try in turn, and what they were guessed from. There is only one if the class
        or annotations show it. Otherwise, torch comes first, then jax if the module imports it. If jax is not
        installed, it is left out.
    """
    if is_module(thing):
        return ("torch",), "its class, a torch module"
    called = _function_of(thing)
    annotations = " ".join(map(str, getattr(called, "__annotations__", {}).values()))
    shown = [arrays for arrays, marks in _MARKS.items() if any(mark in annotations for mark in marks)]
    if shown:
        return (shown[0],), "its annotations"
    values = getattr(called, "__globals__", {}).values()
    names = [v.__name__ if inspect.ismodule(v) else getattr(v, "__module__", "") if callable(v) else "" for v in values]
    packages = {str(name).partition(".")[0] for name in names}
    kinds = [it for it in ARRAYS if it != "jax" or importlib.util.find_spec("jax")]
    return tuple(sorted(kinds, key=lambda it: (it != "torch", it == "numpy" and "jax" in packages))), ""


def _check_name(what: str, given: str, known: Collection[str]) -> None:
    if given not in known:
        raise TargetMisused(f"unknown {what} {given!r}; known: {', '.join(known)}")


def check_call(call: str | None, arrays: str | None) -> None:
    """Check the name of a call and the name of a kind of arrays; None is allowed.

    Raises:
        TargetMisused: a name is unknown.
    """
    for what, given, known in (("call", call, CALLS), ("kind of arrays", arrays, ARRAYS)):
        if given is not None:
            _check_name(what, given, known)


@dataclass(frozen=True)
class Claim:
    """What a target computes, according to its user and its signature.

    Attributes:
        loss: short name in the catalogue.
        call: how it is called, one of ``CALLS``.
        arrays: the arrays that it takes, one of ``ARRAYS``.
        temperature: the built-in temperature; None if it is passed by keyword.
        normalised: whether pairproof normalises rows under cosine similarity before the call.
        settings: the values of options that the user claims, or sets in the target; a tuple if several are claimed.
        passed: the keywords of the catalogue that are passed. All their values are judged.
        required: the passed arrays that the target requires. Only cases with these arrays are judged.
        default_temperature: the temperature that the target uses if none is passed; None if it has no such default.
        unused: the parameters with the default None that are never passed.
        unlabelled: whether it gets views without the labels that the loss takes.
        queue: how the queue or the hard negatives are passed; see ``forms.Form``.
    """

    loss: str
    call: str
    arrays: str = "torch"
    temperature: float | None = None
    normalised: bool = False
    settings: Mapping[str, object] = field(default_factory=dict)
    passed: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()
    default_temperature: float | None = None
    unused: frozenset[str] = frozenset()
    unlabelled: bool = False
    queue: str = ""

    def __post_init__(self) -> None:
        """Check that the claim does not contradict itself.

        Raises:
            TargetMisused: a name is unknown, or the call cannot express the loss.
        """
        _check_name("loss", self.loss, LOSSES)
        check_call(self.call, self.arrays)
        calls = LOSSES[self.loss].calls
        if self.call not in calls:
            found = f"{self.loss} cannot be computed by a target that is called with {self.call}"
            raise TargetMisused(f"{found}: pass --call {'|'.join(call for call in calls if call != 'command')}")

    @property
    def reduced_here(self) -> bool:
        """Whether the target returns one value per anchor, and pairproof reduces them."""
        return "reduction" not in self.passed and self.settings.get("reduction") == "none"

    @property
    def adds_bias(self) -> bool:
        """Whether pairproof adds the bias to the similarities, because the target gets logits."""
        takes = "bias" in LOSSES[self.loss].keywords and "bias" not in {*self.passed, *self.settings}
        return takes and self.call == "similarities"

    @property
    def directed_here(self) -> bool:
        """Whether the target computes only one direction, and pairproof swaps the towers for the other."""
        one = self.settings.get("direction") in ("a_to_b", "b_to_a")
        towers = self.call in ("views", "towers", "similarities")
        return towers and "direction" not in self.passed and one

    @property
    def direction_weights(self) -> tuple[float, ...]:
        """The claimed weights of the directions; () if none are claimed."""
        found: Any = self.settings.get("direction_weights", ((),))
        return tuple(found[0])

    def values_of(self, option: str) -> tuple[object, ...] | None:
        """Return the values of an option that are judged; None for every value."""
        by_harness = {"direction": self.directed_here}
        by_harness["similarity"] = self.call == "similarities"
        by_harness["bias"] = self.adds_bias
        if option == "reduction" and self.reduced_here:  # the values of the anchors do not determine those of the pairs
            return tuple(value for value in LOSSES[self.loss].choices[option] if value != "none_pairs")
        if by_harness.get(option) or (option in self.passed and option not in self.settings):
            return None
        found = self.settings.get(option, LOSSES[self.loss].keywords[option])
        return found if isinstance(found, tuple) else (found,)

    @property
    def support(self) -> Support:
        """The cases that are judged."""
        entry = LOSSES[self.loss]
        judged = {option: self.values_of(option) for option in entry.scalars}
        options = {option: values for option, values in judged.items() if values is not None}
        if self.direction_weights:
            options["direction_weights"] = (self.direction_weights,)
        if self.temperature is not None:
            options = {"temperature": (self.temperature,), **options}
        # The arrays that this call cannot pass.
        by_partners = entry.targets == "partners" and self.call not in ("partners", "command")
        one_matrix = self.call in ("mask", "features") or (self.call in OF_VIEWS and not entry.two_towers)
        without = {"ref_embeddings"} if by_partners or one_matrix else set()
        without |= {"anchors"} if by_partners and self.call not in ("labels", "mask") else set()
        # For other calls, pairproof reorders the rows or swaps the towers, so weights and ignored pairs would not fit.
        in_order = self.call in ("labels", "partners", "mask", "pairs", "towers", "command")
        in_order = in_order or (self.call == "views" and entry.two_towers)
        in_order = in_order and not self.directed_here
        without |= set() if in_order else {*IGNORED, *WEIGHTS, "direction_weights"}
        arrays = dict.fromkeys((*ARRAY_OPTIONS, *(TOWER_TARGETS if entry.two_towers else ())))
        lacks = tuple(name for name in arrays if name not in options and (name in without or name not in self.passed))
        also = [(f"has no {name}, which the target requires", _without(name)) for name in sorted(self.required)]
        if self.unlabelled:
            also.append(("not every class has two rows, the views of an item", _has_no_pairs))
        elif self.call in OF_VIEWS and entry.targets == "labels":
            also.append(("its items do not have two views", lambda case: len(items_of(case)[0]) != 2))
        if self.queue == ONE_EACH:
            several = ("has several hard negatives of each query", lambda c: len(c.others.get(HARD, ())) > c.n)
            also.append(several)
        if self.call == "mask":
            also.append(("its mask has a true diagonal", _has_true_diagonal))
        return Support((self.loss,), options, lacks, tuple(also), tuple(self.passed & {*OPT_IN, *TOWER_TARGETS}))


def _has_no_pairs(case: Case) -> bool:
    return "labels" not in case.arguments or {*Counter(case.arguments["labels"]).values()} != {2}


def _has_true_diagonal(case: Case) -> bool:
    return "positives" in case.arguments and bool(np.diagonal(case.arguments["positives"]).any())


def _without(name: str) -> Callable[[Case], bool]:
    return lambda case: {**case.keywords, **case.arguments, **case.others}.get(name) is None


def complete(claim: Claim, signature: Signature | None) -> tuple[Claim, list[str]]:
    """Complete a claim from the signature of the target.

    Args:
        claim: the user's claim; a setting with the value ``EVERY`` is taken by keyword.
        signature: signature of the target; None for a command.

    Returns:
        The claim, and what was guessed, in words.

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
        _from_init(claim, signature, settings, notes)
        passed = _keywords(claim, passed, signature, notes)
        temperature = _temperature(claim, signature, notes)
        arrays = (*ARRAY_OPTIONS, *(TOWER_TARGETS if LOSSES[claim.loss].two_towers else ()))
        required = {name for name in arrays if name in passed and signature.requires(name)}
        required -= {"labels"}  # one class per item is passed to a target that requires labels
        if "negatives" in required and "direction" not in {*settings, *passed}:
            settings["direction"] = LOSSES[claim.loss].default("direction", required)
            notes.append("direction: a_to_b is claimed, the default with negatives, which the target requires")
        at = signature.default_temperature
        several = claim.call in ("features", *OF_VIEWS) and LOSSES[claim.loss].targets == "labels"
        unlabelled = several and signature.keyword("labels") is None and not signature.takes_anything
        claim = replace(claim, unlabelled=unlabelled, required=frozenset(required), default_temperature=at)
        if unlabelled:
            notes.append("labels: none are passed; only batches whose classes are pairs of views are judged")
    claim = replace(claim, settings=settings, passed=frozenset(passed), temperature=temperature)
    if signature is not None and claim.reduced_here:
        notes.append("reduction: the target returns one value per anchor; pairproof reduces them")
    if claim.call == "features" and LOSSES[claim.loss].targets == "labels" and not claim.unlabelled:
        views = (
            "an item has two views if the size of every class is even, else three if every size is divisible by three"
        )
        notes.append(f"features: {views}, else one")
    if claim.call == "one_way":
        notes.append("call: only first views are anchors; pairproof also calls the target with the views swapped")
    if claim.adds_bias:
        notes.append("bias: added to the similarities before the call; override with --set bias=NUMBER")
    if claim.directed_here:
        notes.append("direction: the target computes one; pairproof swaps the towers as cases require")
    return claim, notes


def _from_init(claim: Claim, signature: Signature, settings: dict[str, object], notes: list[str]) -> None:
    """Claim the options that the user sets with ``init``."""
    entry = LOSSES[claim.loss]
    for name in entry.scalars:
        value = next((signature.init[word] for word in ALIASES.get(name, (name,)) if word in signature.init), EVERY)
        if name not in settings and value != EVERY:
            with suppress(TargetMisused):
                settings[name] = _checked_value(name, value, entry.choices.get(name))
                notes.append(f"{name}: {settings[name]} is claimed, because --init sets it")
    weights = {name: value for name, value in signature.init.items() if re.search(r"(?i)lam|alpha|weight", name)}
    for name, value in weights.items() if "direction_weights" in {*entry.keywords} - {*settings} else ():
        if re.search(rf"\b{name}\)? *\*[^\n]*\( *1(\.0?)? *- *(self\.)?{name}\b", signature.source):
            with suppress(TypeError, ValueError):
                settings["direction_weights"] = ((float(value), 1 - float(value)),)
                notes.append(f"direction_weights: {value},{1 - float(value):g} is claimed, because --init sets {name}")


def _keywords(claim: Claim, claimed: set[str], signature: Signature, notes: list[str]) -> set[str]:
    """Return the options to pass by keyword: the claimed ones and those in the signature."""
    entry, passed = LOSSES[claim.loss], set(claimed)
    of_towers = TOWER_TARGETS if entry.two_towers else {}
    rows_with_labels = "labels" if entry.two_towers else "ref_embeddings"
    for name in dict.fromkeys((*entry.scalars, *of_towers, *ARRAY_OPTIONS)):
        found = signature.keyword(name)
        usable = name not in ("ref_labels", "self_rows") or rows_with_labels in passed
        usable = usable and (name != "ref_ignored_ids" or entry.two_towers or "ref_embeddings" in passed)
        if name in of_towers:
            # Other calls pass something else as labels, and an alias may be the name of another array.
            usable = usable and claim.call in ("views", "towers") and found is not None and found.name == name
            usable = usable and not (name == "labels" and signature.takes_row_numbers(name))
        if found is None or name not in entry.keywords or name in passed or not usable:
            continue
        choices = entry.choices.get(name)
        if choices and found.default not in (found.empty, entry.keywords[name], *choices):
            why = f"its default {found.default!r} is not one of {', '.join(map(str, choices))}"
            notes.append(f"{name}: not passed: {why}; if it takes these, pass --set {name}=*")
        else:
            passed.add(name)
            if found.name != name:
                notes.append(f"{name}: passed as {found.name}")
            if choices is None and found.default not in (found.empty, None, entry.keywords[name]):
                usual = entry.keywords[name]
                notes.append(f"{name}: always passed; a call without it computes {found.default!r}, not {usual!r}")
    masked = claim.call == "features" and signature.keyword("mask") is not None and "positives" in entry.keywords
    if masked and not signature.requires("labels"):  # a mask and labels contradict each other
        passed.add("positives")
    passed |= {"partners": {"partners"}, "mask": {"positives"} & {*entry.keywords}}.get(claim.call, set())
    if passed:
        notes.append(f"passed by keyword, and judged for all values: {', '.join(sorted(passed))}")
    return passed


def _temperature(claim: Claim, signature: Signature, notes: list[str]) -> float | None:
    """Return the built-in temperature; None if the temperature is passed."""
    own, claimed = signature.keyword("temperature"), claim.temperature
    if claimed is None and (fixed := signature.fixed_temperature) is not None:
        notes.append(f"temperature: {fixed:g} is built in, because --init sets it")
        return fixed
    default = signature.default_temperature
    unequal = default is not None and not math.isclose(default, claimed or default)
    if own is not None and claimed is not None and (unequal or own.default is own.empty):
        signature.init[own.name] = signature.given_temperature(own.name, claimed)
        notes.append(f"temperature: {claimed:g} is passed as {own.name}, as claimed")
    elif own is not None and claimed is not None:
        notes.append(f"temperature: {claimed:g} is built in, as claimed; its parameter {own.name} is not passed")
    elif own is not None and signature.is_logarithm(own.name):
        inverse = "1/" if signature.inverted(own.name) else ""
        notes.append(f"temperature: passed as {own.name}, with the value log({inverse}temperature)")
    elif own is not None and own.name != "temperature":
        notes.append(f"temperature: passed as {own.name}")
    elif own is None and claimed is None and claim.call == "similarities":
        notes.append("temperature: similarities are divided by it before the call; override with --temperature")
        return None
    elif own is None and claimed is None and signature.takes_anything:
        notes.append("temperature: passed, because the target takes any keyword; override with --temperature")
    if own is not None or claimed is not None or signature.takes_anything:
        return claimed
    attributes = (getattr(signature.thing, name, None) for name in TEMPERATURES[:-1])
    found = None if signature.constructs else next((it for it in attributes if it is not None), None)
    if isinstance(found, torch.Tensor) and found.numel() == 1:
        found = found.item()
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        floats = (p for p in (*signature.constructor.values(), *signature.named) if isinstance(p.default, float))
        known = [p.name for p in floats if p.default > 1]
        scale = f", or name the parameter that is 1/temperature with --scale {'|'.join(known)}" if known else ""
        raise TargetMisused(
            f"{NO_TEMPERATURE}: pass the temperature that is built in with --temperature (1 if none is){scale}"
        )
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
            having = [loss for loss, other in LOSSES.items() if name in other.keywords]
            elsewhere = f"; of {', '.join(having)}: --loss" if having else ""
            raise TargetMisused(f"{entry.function} has no option {name!r}; known: {known}{elsewhere}")
        if value == EVERY:
            continue
        if name == "direction_weights":
            checked[name] = (_checked_weights(value),)  # one claimed value
            continue
        if name in ARRAY_OPTIONS:
            raise TargetMisused(f"{name} is an array: claim {name}=*, which means that it is taken by keyword")
        values = value if isinstance(value, tuple) else (value,)
        found = tuple(_checked_value(name, one, entry.choices.get(name)) for one in values)
        checked[name] = found if len(found) > 1 else found[0]
    return checked


def _checked_weights(value: object) -> tuple[float, ...]:
    """Return the weights of the two directions from a text such as "0.75,0.25", or from two numbers."""
    parts: Any = value.strip("()[] ").split(",") if isinstance(value, str) else value
    with suppress(TypeError, ValueError):
        found = tuple(map(float, parts))
        if len(found) == 2 and all(0 <= weight < math.inf for weight in found):
            return found
    raise TargetMisused(f"direction_weights: expected two numbers such as 0.75,0.25 or *, got {value!r}")


def _checked_value(name: str, value: object, choices: tuple[object, ...] | None) -> object:
    if choices is None:
        with suppress(ValueError):
            number = None if str(value).lower() == "none" else float(str(value))
            if number is None or math.isfinite(number):
                return number
    elif (found := choice_of(value, choices)) is not None:
        return found
    expected = f"one of {', '.join(map(str, choices))}" if choices else "a number, none"
    raise TargetMisused(f"{name}: expected {expected} or *, got {value!r}")
