"""Anybody's loss as an implementation: found by name, called the way its signature says, its gradient mapped back.

A target is a function, a class that is constructed with its options, an instance, or a command in any language that
speaks JSON lines (``lines.py`` says how). What its signature does not tell is guessed from the names of its parameters,
and every guess is noted in words.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch

from ..suite.cases import Case
from ..suite.catalogue import LOSSES
from ..truth.compare import Outcome
from .base import Deviation, Implementation, items_of, lonely, normalised, stacked_order
from .subprocess import LineError, Lines

CALLS = ("labels", "features", "views", "stacked", "pairs", "command")
ARRAYS = ("torch", "numpy", "jax")

_LABELLED = ("supcon", "supcon_in", "nt_xent_pairwise", "supcon_epsilon", "nt_xent")
EXPRESSES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "labels": _LABELLED,
        "features": _LABELLED,
        "views": ("nt_xent", "info_nce"),
        "stacked": ("nt_xent",),
        "pairs": ("nt_bxent",),
        "command": tuple(LOSSES),
    }
)
"""The losses that each call can express."""

STRUCTURE: Mapping[str, str] = MappingProxyType(
    {
        "anchors": "subset of anchors",
        "positives": "mask of positives",
        "ref_embeddings": "references in place of the batch",
        "ref_labels": "labels of references",
        "self_rows": "row of the references to leave out",
        "negatives": "queue of negatives",
    }
)
"""Keywords of the catalogue that bring arrays, in words: cases that have one go to whoever takes it by keyword."""

TEMPERATURES = ("temperature", "tau", "logit_scale")
SCALE = "logit_scale"
"""The word of those that is one over the temperature."""
HALVES = ("bfloat16", "float16")
EVERY = "*"
"""The value that says of an option: it is taken by keyword, whatever the signature shows."""

_LABEL_NAMES = (
    "labels",
    "label",
    "targets",
    "target",
    "y",
    "classes",
    "class_labels",
    "ids",
    "y_true",
    "partners",
)
_PAIR_NAMES = ("positive_pairs", "pos_pairs", "pairs", "pos_indices", "positive_indices")
_VIEW_NAMES = (
    ("query", "positive_key"),
    ("query", "key"),
    ("q", "k"),
    ("anchor", "positive"),
    ("image_features", "text_features"),
    ("image_embeddings", "text_embeddings"),
    ("embeddings", "ref_emb"),
)
_STACKED_NAMES = ("embeddings", "z", "reps", "representations", "projections", "outputs", "hidden")


class TargetError(ValueError):
    """A target that cannot be loaded or called; the message says what to do."""


class TargetMisused(TargetError):
    """What was said of a target contradicts it, or too little was said; the message says what to say."""


class _OutOfTime(BaseException):
    """Raised by the alarm. No Exception, so that a target which catches those does not catch it."""


@dataclass(frozen=True)
class Claim:
    """What a target says that it computes.

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

    @property
    def reduced_here(self) -> bool:
        """Whether the target returns one value per anchor, and the harness reduces them as a case asks."""
        return "reduction" not in self.passed and self.settings.get("reduction") == "none"

    @property
    def turned_here(self) -> bool:
        """Whether the target goes in one direction, and the harness turns the towers round as a case asks."""
        one = self.settings.get("direction") in ("a_to_b", "b_to_a")
        return self.call == "views" and "direction" not in self.passed and one

    def values_of(self, option: str) -> tuple[object, ...] | None:
        """The values of an option that are judged; None for every value."""
        if option in self.settings:
            found = self.settings[option]
            if (option == "reduction" and self.reduced_here) or (option == "direction" and self.turned_here):
                return LOSSES[self.loss].choices[option]
            return found if isinstance(found, tuple) else (found,)
        return None if option in self.passed else (LOSSES[self.loss].keywords[option],)


class External(Implementation):
    """Anybody's loss, as a claim describes it.

    Attributes:
        claim: what it says that it computes.
        notes: what was guessed, in words.
        gradients_judged: whether it gives gradients; None before a call has shown it.
        outcomes: what it gave, by case and dtype, for whoever explains a failure; whoever judges many cases empties it.
    """

    name: ClassVar[str] = "target"
    title: ClassVar[str] = "the target"

    def __init__(
        self,
        function: Callable[..., Any] | Lines,
        claim: Claim,
        title: str = "",
        *,
        device: str = "cpu",
        limit: float | None = None,
        notes: Sequence[str] = (),
        version: str = "",
    ) -> None:
        """Take a function that goes by the catalogue's words.

        Args:
            function: called as ``claim.call`` says, with the temperature and ``claim.passed`` by keyword; for
                "command" a ``Lines``.
            claim: what it computes.
            title: what it is, for the run's header.
            device: torch device of the arrays.
            limit: seconds that a case may take; None for no limit.
            notes: what was guessed, in words.
            version: which copy is tested.

        Raises:
            TargetMisused: the call cannot express the loss.
        """
        super().__init__({}, device)
        _check_claim(claim)
        self.function, self.claim, self.limit = function, claim, limit
        self.described = title or getattr(function, "__name__", type(function).__name__)
        self.notes = tuple(notes)
        self.gradients_judged: bool | None = None if claim.call == "command" else claim.arrays != "numpy"
        self.outcomes: dict[tuple[str, str], Outcome] = {}
        self._version = version
        self._compiled = True
        self._answered = False

    def version(self) -> str:
        """Which copy is tested."""
        return self._version or self.described

    def close(self) -> None:
        """End a command."""
        if isinstance(self.function, Lines):
            self.function.close()

    def refuses(self, case: Case) -> str | None:
        """Why a case is not judged, in words that are the same for cases of one kind."""
        claim = self.claim
        if case.loss != claim.loss:
            return f"is checked as {claim.loss}"
        if claim.temperature is not None and float(case.option("temperature")) != claim.temperature:
            return f"has the temperature {claim.temperature!r} built in"
        for option in (*LOSSES[case.loss].choices, "base_temperature"):
            value, values = case.option(option), claim.values_of(option)
            if values is not None and value not in values and _matters(case, option):
                return (
                    f"{option}={value} is not claimed"
                    if option in LOSSES[case.loss].choices
                    else f"{option} is not claimed"
                )
        for keyword, words in STRUCTURE.items():
            given = keyword in case.arguments or keyword in case.others or case.option(keyword) is not None
            if given and keyword not in claim.passed:
                return f"takes no {words} (keyword {keyword})"
        return None if claim.call == "command" else _inexpressible(case, claim)

    def evaluate(self, case: Case, dtype: str) -> Outcome:
        """Value and gradient of a case, mapped back to its rows.

        Raises:
            TargetError: what came back is no loss, or it did not come back in time.
        """
        outcome = self.outcomes[case.id, dtype] = self._evaluate(case, dtype)
        return outcome

    def _evaluate(self, case: Case, dtype: str) -> Outcome:
        leaves = self.tensors(case, dtype)
        prepared = leaves
        if self.claim.normalised:
            prepared = {name: normalised(matrix, case) for name, matrix in leaves.items()}
        if self.claim.call == "command":
            return self._of_command(case, dtype, leaves, prepared)
        with within(self.limit), within_memory() if self.device == "cpu" else nullcontext():
            positional, keywords, rows = self._arguments(case, prepared)
            keywords |= self._options(case)
            if self.claim.arrays == "torch":
                loss, gradients = self._with_torch(leaves, positional, keywords, case, rows)
            elif self.claim.arrays == "numpy":
                loss, gradients = self._with_numpy(dtype, positional, keywords, case, rows)
            else:
                loss, gradients = self._with_jax(leaves, dtype, positional, keywords, case, rows)
            told = self._told(loss, case)
            if told is None and "reduction" in self.claim.passed and _tells_all(case) and len(loss) == 1:
                told = self._asked_for_each(case, dtype, prepared)
        return _outcome(case, self._reduced(loss, case), gradients, told)

    def _options(self, case: Case, **changed: Any) -> dict[str, Any]:
        """The keywords that are not arrays."""
        names = [*LOSSES[case.loss].choices, "base_temperature"]
        options = {name: case.option(name) for name in names if name in self.claim.passed}
        if self.claim.temperature is None:
            options["temperature"] = float(case.option("temperature"))
        return options | changed

    def _arguments(
        self, case: Case, given: Mapping[str, torch.Tensor]
    ) -> tuple[list[Any], dict[str, Any], list[int] | None]:
        """What is passed by position and by keyword, as tensors; and the row that each of a batch's values is of."""
        rows = given[case.first]
        keywords: dict[str, Any] = {name: given[name] for name in case.others if name in self.claim.passed}
        for name in ("ref_labels", "self_rows"):
            if name in case.arguments:
                keywords[name] = self._integers(case.arguments[name])
        if case.option("anchors") is not None:
            keywords["anchors"] = torch.tensor(case.option("anchors"), dtype=torch.bool, device=self.device)
        order = None
        if case.loss == "nt_xent" and self.claim.call in ("features", "views", "stacked"):
            first = stacked_order(case)
            order = first.tolist()
            if self.claim.call == "stacked":
                return [rows[torch.as_tensor(first, device=self.device)]], keywords, order
            views = rows[torch.as_tensor(first, device=self.device)].chunk(2)
            return ([torch.stack(views, dim=1)] if self.claim.call == "features" else list(views)), keywords, order
        if self.claim.call == "views":
            return [rows, given["embeddings_b"]], keywords, order
        if self.claim.call == "pairs":
            return [rows, self._integers(case.arguments["positive_pairs"]).reshape(-1, 2)], keywords, order
        if self.claim.call == "features":
            items = items_of(case)
            some = [item[0] for item in items]
            if "labels" in case.arguments:
                keywords["labels"] = self._integers([case.arguments["labels"][i] for i in some])
            else:
                mask = torch.tensor(case.arguments["positives"], dtype=rows.dtype, device=self.device)[some][:, some]
                if len(items[0]) > 1:
                    mask.fill_diagonal_(1)
                keywords["mask"] = mask
            by_view = [list(view) for view in zip(*items, strict=True)]
            return [torch.stack([rows[view] for view in by_view], dim=1)], keywords, [*chain(*by_view)]
        if "positives" in case.arguments:
            keywords["positives"] = torch.tensor(case.arguments["positives"], dtype=torch.bool, device=self.device)
            return [rows, None], keywords, order
        if case.loss == "nt_xent":
            partners = [int(p) for p in case.arguments["partners"]]
            if "partners" not in self.claim.passed:
                partners = [min(i, p) for i, p in enumerate(partners)]
            return [rows, self._integers(partners)], keywords, order
        return [rows, self._integers(case.arguments["labels"])], keywords, order

    def _integers(self, values: Any) -> torch.Tensor:
        return torch.tensor([[int(x) for x in v] if isinstance(v, Sequence) else int(v) for v in values]).to(
            self.device, torch.int64
        )

    def _call(self, case: Case, positional: Sequence[Any], keywords: dict[str, Any]) -> Any:
        """Call the function; one that goes in one direction with its towers turned round, or both ways, as it takes."""
        assert not isinstance(self.function, Lines)
        if not (self.claim.turned_here and case.loss == "info_nce"):
            return self.function(*positional, **keywords)
        first, second = positional
        wanted, own = case.option("direction"), self.claim.settings["direction"]
        if wanted != "both":
            towers = (first, second) if wanted == own else (second, first)
            return self.function(*towers, **keywords)
        # The anchors of the first tower come before those of the second.
        towers = (first, second) if own == "a_to_b" else (second, first)
        one, other = self.function(*towers, **keywords), self.function(*towers[::-1], **keywords)
        reduction = keywords.get("reduction", self.claim.settings.get("reduction", "mean"))
        if reduction == "none":
            return _joined(one, other)
        return (one + other) / 2 if reduction == "mean" else one + other

    def _with_torch(
        self,
        leaves: Mapping[str, torch.Tensor],
        positional: list[Any],
        keywords: dict[str, Any],
        case: Case,
        rows: list[int] | None,
    ) -> tuple[list[float], dict[str, Any]]:
        loss = self._call(case, positional, keywords)
        if not isinstance(loss, torch.Tensor):
            raise TargetError(f"returned {_kind(loss)} where a tensor is expected{_hint(loss)}")
        if not loss.is_floating_point():
            raise TargetError(f"returned a tensor of {loss.dtype} where floating-point numbers are expected")
        values = loss.detach().double().cpu().reshape(-1).tolist()
        gradients = [torch.zeros_like(leaf) for leaf in leaves.values()]
        if loss.requires_grad:
            flat = loss.reshape(-1)
            weights = torch.tensor(self._weights(case, values), dtype=loss.dtype, device=loss.device)
            total = (flat * weights).sum() if len(weights) == len(flat) else flat.sum()
            gradients = list(torch.autograd.grad(total, list(leaves.values()), materialize_grads=True))
        found = {name: g.double().cpu().numpy() for name, g in zip(leaves, gradients, strict=True)}
        return _in_order(values, rows, case), found

    def _with_numpy(
        self, dtype: str, positional: list[Any], keywords: dict[str, Any], case: Case, rows: list[int] | None
    ) -> tuple[list[float], dict[str, Any]]:
        if dtype == "bfloat16":
            raise TargetError("numpy has no bfloat16")
        loss = self._call(
            case, [_numpy(value) for value in positional], {name: _numpy(value) for name, value in keywords.items()}
        )
        return _in_order(_floats(loss), rows, case), {}

    def _with_jax(
        self,
        leaves: Mapping[str, torch.Tensor],
        dtype: str,
        positional: list[Any],
        keywords: dict[str, Any],
        case: Case,
        rows: list[int] | None,
    ) -> tuple[list[float], dict[str, Any]]:
        jax = import_jax()
        numpy = jax.numpy

        def array(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            found = value.detach().cpu()
            if value.is_floating_point():
                return numpy.asarray(found.double().numpy()).astype(dtype)
            return numpy.asarray(found.numpy())

        places: list[tuple[Any, torch.Tensor]] = [
            *((k, value) for k, value in enumerate(positional) if _differentiable(value)),
            *((name, value) for name, value in keywords.items() if _differentiable(value)),
        ]
        fixed = [array(value) for value in positional]
        named = {name: array(value) for name, value in keywords.items()}

        def total(given: list[Any]) -> tuple[Any, Any]:
            args, kwargs = list(fixed), dict(named)
            for (place, _), value in zip(places, given, strict=True):
                if isinstance(place, int):
                    args[place] = value
                else:
                    kwargs[place] = value
            loss = numpy.asarray(self._call(case, args, kwargs))
            flat = loss.reshape(-1)
            weights = self._weights(case, [0.0] * len(flat))
            if len(weights) != len(flat):
                return flat.sum(), loss
            return (flat * numpy.asarray(weights, dtype=flat.dtype)).sum(), loss

        taken, given = jax.value_and_grad(total, has_aux=True), [array(value) for _, value in places]
        if self._compiled:
            # Compiled whole it takes a third of the time; a function that looks at values cannot be.
            try:
                (_, loss), found = jax.jit(taken)(given)
            except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
                self._compiled = False
        if not self._compiled:
            (_, loss), found = taken(given)
        back = [
            torch.tensor(np.asarray(g.astype("float64"))).to(value.device, value.dtype)
            for g, (_, value) in zip(found, places, strict=True)
        ]
        gradients = torch.autograd.grad(
            [value for _, value in places], list(leaves.values()), grad_outputs=back, materialize_grads=True
        )
        mapped = {name: g.double().cpu().numpy() for name, g in zip(leaves, gradients, strict=True)}
        return _in_order(_floats(np.asarray(loss.astype("float64"))), rows, case), mapped

    def _of_command(
        self, case: Case, dtype: str, leaves: Mapping[str, torch.Tensor], prepared: Mapping[str, torch.Tensor]
    ) -> Outcome:
        assert isinstance(self.function, Lines)
        matrices = {name: matrix.detach().double().cpu().tolist() for name, matrix in prepared.items()}
        options = {
            name: case.option(name) for name in LOSSES[case.loss].keywords if name not in (*case.others, *STRUCTURE)
        }
        arguments = {name: _plain(value) for name, value in case.arguments.items()}
        if case.option("anchors") is not None:
            arguments["anchors"] = [bool(x) for x in case.option("anchors")]
        request = {
            "loss": case.loss,
            "dtype": dtype,
            "matrices": matrices,
            "arguments": arguments,
            "options": options,
        }
        expected = len(case.counted()) if self.claim.reduced_here or case.option("reduction") == "none" else 1
        try:
            values, gradients = self.function.ask(request, expected, self.limit)
        except LineError as error:
            raise TargetError(str(error)) from None
        told = self._told(values, case)
        if self._answered and bool(gradients) != self.gradients_judged:
            now, before = ("gradients", "none") if gradients else ("no gradients", "some")
            raise TargetError(f"gave {now} where it gave {before} before: they are judged in all answers or in none")
        self._answered, self.gradients_judged = True, bool(gradients)
        if not gradients:
            return _outcome(case, self._reduced(values, case), {}, told)
        weights = self._weights(case, values)
        if len(set(weights)) > 1:
            # Only the gradient of the values' sum was given, and the case weighs them differently.
            return _outcome(case, self._reduced(values, case), {}, told)
        factor = weights[0] if weights else 1.0
        back = [
            torch.tensor(gradients[name], dtype=torch.float64).to(value.device, value.dtype) * factor
            for name, value in prepared.items()
        ]
        if not self.claim.normalised:
            mapped = {name: np.array(gradients[name], dtype=np.float64) * factor for name in leaves}
        else:
            given = torch.autograd.grad(list(prepared.values()), list(leaves.values()), grad_outputs=back)
            mapped = {name: g.double().cpu().numpy() for name, g in zip(leaves, given, strict=True)}
        return _outcome(case, self._reduced(values, case), mapped, told)

    def _weights(self, case: Case, values: Sequence[float]) -> list[float]:
        """What each returned value is multiplied by before they are summed: 1, unless the harness reduces them."""
        if not self.claim.reduced_here:
            return [1.0] * len(values)
        counted, reduction = case.counted(), case.option("reduction")
        if reduction == "mean":
            return [1 / len(counted)] * len(counted)
        if reduction == "mean_pairs":
            sizes = [len(case.positives()[i]) for i in counted]
            return [size / max(sum(sizes), 1) for size in sizes]
        return [1.0] * len(counted)

    def _reduced(self, values: list[float], case: Case) -> list[float]:
        """The values as the case wants them."""
        if not self.claim.reduced_here:
            return values
        if len(values) != len(case.counted()):
            raise TargetError(f"returned {len(values)} values where {len(case.counted())} anchors are counted")
        if case.option("reduction") == "none":
            return values
        return [float(np.dot(values, self._weights(case, values))) if values else 0.0]

    def _told(self, values: list[float], case: Case) -> dict[int, float] | None:
        """Every anchor's value, where there is one of each."""
        if not (self.claim.reduced_here or case.option("reduction") == "none") or not _tells_all(case):
            return None
        return dict(zip(case.counted(), values, strict=True)) if len(values) == len(case.counted()) else None

    def _asked_for_each(self, case: Case, dtype: str, prepared: Mapping[str, torch.Tensor]) -> dict[int, float] | None:
        """Every anchor's value from a second call with reduction "none", from whoever knows that."""
        if "none" not in (self.claim.values_of("reduction") or ("none",)):
            return None
        positional, keywords, rows = self._arguments(case, {name: z.detach() for name, z in prepared.items()})
        keywords |= self._options(case, reduction="none")
        try:
            if self.claim.arrays == "torch":
                with torch.no_grad():
                    values = self._call(case, positional, keywords).double().cpu().reshape(-1).tolist()
                values = _in_order(values, rows, case)
            elif self.claim.arrays == "numpy":
                values, _ = self._with_numpy(dtype, positional, keywords, case, rows)
            else:
                return None
        except Exception:  # it was asked for more than the case asks
            return None
        return dict(zip(case.counted(), values, strict=True)) if len(values) == len(case.counted()) else None


class ExternalInHalves(External):
    """The same, judged in bfloat16 and float16 too: for whoever asks for it."""

    dtypes: ClassVar[tuple[str, ...]] = ("float64", "float32", *HALVES)


def load(
    spec: object,
    *,
    loss: str,
    call: str | None = None,
    arrays: str | None = None,
    temperature: float | None = None,
    normalised: bool | None = None,
    settings: Mapping[str, object] = MappingProxyType({}),
    limit: float | None = 60.0,
    device: str = "cpu",
    halves: bool = False,
    deviations: tuple[Deviation, ...] = (),
) -> External:
    """Find a target and say how it is called.

    Args:
        spec: "package.module:attribute" or "file.py:attribute"; for the call "command" a shell command line; or the
            function, class or instance itself.
        loss: short name in the catalogue.
        call: one of ``CALLS``; guessed from the names of the parameters when None.
        arrays: one of ``ARRAYS``; guessed from annotations and imports when None.
        temperature: the one that is built in, for a target that takes none by keyword.
        normalised: whether the harness brings rows to norm 1 under cosine; None is no.
        settings: the options that it claims, by name; the value "*" says that it takes the option by keyword.
        limit: seconds that a case may take; None for no limit.
        device: torch device.
        halves: whether it is judged in bfloat16 and float16 too.
        deviations: what is declared of it beforehand.

    Raises:
        TargetError: it cannot be loaded.
        TargetMisused: what is said of it contradicts it, or is too little.
    """
    _check_names(loss, call, arrays)
    kind: type[External] = ExternalInHalves if halves else External
    if deviations:
        kind = type(kind.__name__, (kind,), {"deviations": deviations})
    if call == "command":
        if not isinstance(spec, str):
            raise TargetMisused(f"call: command is a shell command line, and {describe(spec)} is none")
        claim = _command_claim(loss, temperature, bool(normalised), settings)
        notes = ["call: command, one JSON object per line"]
        return kind(Lines(spec), claim, spec, device=device, limit=limit, notes=notes)
    found = find(spec) if isinstance(spec, str) else spec
    door = Door(found, device)
    notes = []
    if call is None:
        call, words = guess_call(door.signature)
        notes.append(f"call: {call}, guessed from {words}; --call says otherwise")
    if arrays is None:
        arrays, words = guess_arrays(found)
        notes.append(f"arrays: {arrays}, guessed from {words}; --arrays says otherwise")
    if arrays == "jax":
        import_jax()
        notes.append("jax: 64-bit numbers are switched on; compiled where it can be")
    if arrays == "numpy":
        notes.append("gradient: not judged, for a numpy function gives none")
    claim, more = _claim(door, loss, call, arrays, temperature, bool(normalised), settings)
    return kind(door, claim, describe(spec), device=device, limit=limit, notes=[*notes, *more], version=_copy(found))


def describe(spec: object) -> str:
    """A target in words: as it was named, or by its module and its name where it was given itself."""
    if isinstance(spec, str):
        return spec
    named = spec if hasattr(spec, "__qualname__") else type(spec)
    return f"{getattr(named, '__module__', '?')}:{getattr(named, '__qualname__', type(spec).__name__)}"


def from_function(
    function: Callable[..., Any],
    *,
    loss: str,
    call: str,
    title: str = "",
    arrays: str = "torch",
    temperature: float | None = None,
    normalised: bool = False,
    settings: Mapping[str, object] = MappingProxyType({}),
) -> External:
    """A target that is at hand. The arguments are those of ``load``; there is no limit of time.

    Raises:
        TargetMisused: what is said of it contradicts it, or is too little.
    """
    _check_names(loss, call, arrays)
    door = Door(function, "cpu")
    claim, notes = _claim(door, loss, call, arrays, temperature, normalised, settings)
    return External(door, claim, title or door.__name__, notes=notes)


class Door:
    """A function, an instance or a class, called in the catalogue's words.

    A class is constructed for every call, with the options that its constructor takes; the others go to the call.
    """

    def __init__(self, thing: Any, device: str) -> None:
        """Read the signatures.

        Raises:
            TargetError: it cannot be called.
        """
        self.thing, self.device = thing, device
        self.__name__ = str(getattr(thing, "__name__", type(thing).__name__))
        self.made = isinstance(thing, type)
        if not callable(thing):
            raise TargetError(f"it is {_kind(thing)}, which cannot be called")
        if isinstance(thing, torch.nn.Module):
            thing.to(device)
        called = thing
        if self.made:
            called = thing.forward if issubclass(thing, torch.nn.Module) else thing.__call__
        elif isinstance(thing, torch.nn.Module):
            called = thing.forward
        self.signature = _signature(called, bound=self.made)
        self.constructor = _signature(thing, bound=False) if self.made else {}

    def keyword(self, name: str) -> tuple[str, inspect.Parameter] | None:
        """Where an option of the catalogue goes in: "call" or "constructor", and its parameter."""
        for place, parameters in (("constructor", self.constructor), ("call", self.signature)):
            for word in TEMPERATURES if name == "temperature" else (name,):
                found = parameters.get(word)
                if found is not None and found.kind in (found.POSITIONAL_OR_KEYWORD, found.KEYWORD_ONLY):
                    return place, found
        return None

    @property
    def takes_anything(self) -> bool:
        """Whether it has ``**keywords``."""
        return any(p.kind is p.VAR_KEYWORD for p in (*self.signature.values(), *self.constructor.values()))

    def __call__(self, *positional: Any, **keywords: Any) -> Any:
        """Call it, every keyword by its own word and at its own place."""
        to_call: dict[str, Any] = {}
        to_constructor: dict[str, Any] = {}
        for name, value in keywords.items():
            place, word = "call", name
            found = self.keyword(name)
            if found is not None:
                place, word = found[0], found[1].name
                default = found[1].default
                if word == SCALE:
                    value = 1 / value
                if name == "base_temperature" and value is None and isinstance(default, (int, float)):
                    # Without a base the loss is not scaled, which is to say: the base is the temperature.
                    value = keywords.get("temperature")
            elif any(p.kind is p.VAR_KEYWORD for p in self.constructor.values()):
                place = "constructor"
            (to_constructor if place == "constructor" else to_call)[word] = value
        called = self.thing
        if self.made:
            called = self.thing(**to_constructor)
            if isinstance(called, torch.nn.Module):
                called.to(self.device)
        return called(*self._by_position(positional, to_call), **to_call)

    def _by_position(self, positional: tuple[Any, ...], keywords: dict[str, Any]) -> list[Any]:
        """What goes in by position; a parameter that is keyword-only is moved, a None that has a default left out."""
        parameters = [p for p in self.signature.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        given = list(positional)
        while given and len(given) <= len(parameters):
            last = parameters[len(given) - 1]
            if given[-1] is None and last.default is not last.empty:
                given.pop()
            elif last.kind is last.KEYWORD_ONLY:
                keywords[last.name] = given.pop()
            else:
                break
        return given


def find(spec: str) -> Any:
    """The object that "package.module:attribute" or "file.py:attribute" names.

    Raises:
        TargetError: there is none, or its module cannot be imported.
    """
    name, _, attribute = spec.rpartition(":")
    if not name or not attribute:
        raise TargetMisused(f"{spec!r}: expected package.module:attribute or file.py:attribute")
    try:
        found: Any = _load_file(Path(name)) if name.endswith(".py") else _load_module(name)
    except TargetError:
        raise
    except ImportError as error:
        raise TargetError(f"{name} imports what is not here: {error}{_install(error)}") from None
    except (Exception, SystemExit) as error:
        raise TargetError(f"{name} cannot be imported: {type(error).__name__}: {error}") from None
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise TargetError(f"{name} has no {attribute}") from None
        except Exception as error:  # a module may import what it has only when it is asked for it
            raise TargetError(f"{name}: {attribute}: {type(error).__name__}: {error}") from None
    return found


def guess_call(parameters: Mapping[str, inspect.Parameter]) -> tuple[str, str]:
    """How a function is called, by the names of its parameters; and what that was guessed from.

    Raises:
        TargetMisused: the names do not tell.
    """
    names = [p.name for p in parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    words = f"the parameters ({', '.join(names)})"
    lower = [name.lower() for name in names]
    if "mask" in lower and "labels" in lower and lower[0] != "labels":
        return "features", words
    if len(lower) >= 2:
        first, second = lower[:2]
        if second in _LABEL_NAMES:
            return "labels", words
        if second in _PAIR_NAMES:
            return "pairs", words
        if (first, second) in _VIEW_NAMES or _differ_once(first, second):
            return "views", words
    if lower[:1] == ["features"]:
        return "features", words
    if lower[:1] and lower[0] in _STACKED_NAMES and not set(lower[1:]) - {*TEMPERATURES, "reduction"}:
        return "stacked", words
    raise TargetMisused(f"how it is called does not show in {words}: say it with --call {'|'.join(CALLS[:-1])}")


def guess_arrays(thing: Any) -> tuple[str, str]:
    """What a function computes with, by its annotations, then by what its module imports; and what that shows in.

    Raises:
        TargetMisused: its module imports torch and jax both, or jax and numpy arrays cannot be told apart.
    """
    if isinstance(thing, torch.nn.Module) or (isinstance(thing, type) and issubclass(thing, torch.nn.Module)):
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
    values = {**getattr(called, "__globals__", {})}
    tops = {
        str(getattr(value, "__name__", "")).partition(".")[0] for value in values.values() if inspect.ismodule(value)
    }
    tops |= {str(getattr(value, "__module__", "")).partition(".")[0] for value in values.values() if callable(value)}
    if "torch" in tops and "jax" in tops:
        raise TargetMisused("its module imports torch and jax: say with --arrays which it is given")
    for arrays in ("torch", "jax", "numpy"):
        if arrays in tops:
            return arrays, f"what its module imports ({arrays})"
    return "numpy", "its module, which imports neither torch nor jax"


def import_jax() -> Any:
    """jax, with 64-bit numbers switched on.

    Raises:
        TargetError: it is not installed.
    """
    try:
        jax = importlib.import_module("jax")
        importlib.import_module("jax.numpy")
    except ImportError as error:
        raise TargetError(f"jax is needed to call it and is not here ({error}): pip install jax") from None
    jax.config.update("jax_enable_x64", True)
    return jax


@contextmanager
def within(limit: float | None) -> Iterator[None]:
    """Let what is inside take so many seconds, in the main thread and where there are alarms; else without limit.

    An alarm reaches Python code and what returns to it; it does not end a call that never does.

    Raises:
        TargetError: the time is up, or what is inside wants to end the process.
    """
    alarmed = limit is not None and math.isfinite(limit) and hasattr(signal, "setitimer")
    if not alarmed or threading.current_thread() is not threading.main_thread():
        with _not_exiting():
            yield
        return
    assert limit is not None

    def stop(*_: object) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    # Once more every second: an alarm that rings where exceptions are swallowed must ring again.
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, limit, 1.0)
    try:
        try:
            with _not_exiting():
                yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, remaining, interval)
            signal.signal(signal.SIGALRM, before)
    except _OutOfTime:
        signal.setitimer(signal.ITIMER_REAL, remaining, interval)
        signal.signal(signal.SIGALRM, before)
        raise TargetError(f"took longer than {limit:g} s (--limit)") from None


MEMORY_SHARE = 0.85
"""Of the memory that is free, which a case may take: a loss that builds pairs by pairs must not take the machine."""


@contextmanager
def within_memory() -> Iterator[None]:
    """Let what is inside map so much more memory, where the system bounds that (Linux); else without limit.

    Raises:
        TargetError: it wanted more.
    """
    room = _free_memory()
    if room is None:
        yield
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + int(MEMORY_SHARE * room)
    bounds = [bound for bound in (most, before, hard) if bound != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(bounds), hard))
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "allocate memory" not in str(error):
            raise
        gigabytes = MEMORY_SHARE * room / 2**30
        raise TargetError(f"wanted more memory than the {gigabytes:.2g} GiB that a case may take here") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))


def _free_memory() -> int | None:
    """Bytes that are free; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


@contextmanager
def _not_exiting() -> Iterator[None]:
    try:
        yield
    except SystemExit as error:
        raise TargetError(f"wanted to end the process: SystemExit({error.code!r})") from None
    except (Exception, KeyboardInterrupt, GeneratorExit, _OutOfTime):
        raise
    except BaseException as error:  # such as a panic of a library written in another language
        raise TargetError(f"{type(error).__name__}: {error}".splitlines()[0]) from None


def _check_names(loss: str, call: str | None, arrays: str | None) -> None:
    for given, known, what in ((loss, LOSSES, "loss"), (call, CALLS, "call"), (arrays, ARRAYS, "kind of arrays")):
        if given is not None and given not in known:
            raise TargetMisused(f"unknown {what} {given!r}; known: {', '.join(known)}")


def _check_claim(claim: Claim) -> None:
    _check_names(claim.loss, claim.call, claim.arrays)
    if claim.loss not in EXPRESSES[claim.call]:
        calls = [call for call, losses in EXPRESSES.items() if claim.loss in losses]
        raise TargetMisused(
            f"{claim.loss} cannot be asked of a target that is called with {claim.call}: --call {'|'.join(calls)}"
        )


def _claim(
    door: Door,
    loss: str,
    call: str,
    arrays: str,
    temperature: float | None,
    normalised: bool,
    settings: Mapping[str, object],
) -> tuple[Claim, list[str]]:
    """The claim of a Python target, and what was guessed for it."""
    notes = []
    entry = LOSSES[loss]
    wanted, everything = _checked_settings(loss, settings)
    for name in everything:
        if door.keyword(name) is None and not door.takes_anything:
            raise TargetMisused(f"{name}=*: it takes no keyword {name}")
    passed = set(everything)
    for name in (*entry.choices, "base_temperature", *STRUCTURE):
        found = door.keyword(name)
        if name in ("ref_labels", "self_rows") and "ref_embeddings" not in passed:
            continue
        if found is None or (name not in entry.keywords) or name in passed:
            continue
        default, choices = found[1].default, entry.choices.get(name)
        if choices is not None and default is not inspect.Parameter.empty and default not in choices:
            notes.append(f"{name}: its default {default!r} is none of {', '.join(choices)}, so it is not passed")
            continue
        passed.add(name)
    if call == "features" and door.keyword("mask") is not None and "positives" in entry.keywords:
        passed.add("positives")
    if loss == "nt_xent" and call == "labels" and list(door.signature)[1:2] == ["partners"]:
        passed.add("partners")
    if passed:
        notes.append(f"passed by keyword, every value of theirs judged: {', '.join(sorted(passed))}")
    own = door.keyword("temperature")
    if temperature is None and own is None and door.takes_anything:
        notes.append("temperature: passed, for it takes any keyword; --temperature says otherwise")
    elif temperature is None and own is None:
        attribute = getattr(door.thing, "temperature", None) if not door.made else None
        if isinstance(attribute, torch.Tensor) and attribute.numel() == 1:
            attribute = float(attribute.detach())
        if isinstance(attribute, (int, float)) and not isinstance(attribute, bool):
            temperature = float(attribute)
            notes.append(
                f"temperature: {temperature!r} built in, the instance's attribute; --temperature says otherwise"
            )
            meant = float(str(np.float32(temperature)))
            if meant != temperature and float(np.float32(meant)) == temperature:
                notes.append(
                    f"temperature: that is {meant!r} as float32 holds it: --temperature {meant!r} --dtype float32"
                    " judges it as such"
                )
        else:
            raise TargetMisused(
                "it has no parameter temperature (or tau, or logit_scale): say with --temperature which one is built in"
            )
    elif temperature is not None and own is not None:
        notes.append(f"temperature: {temperature:g} built in, as said; its parameter {own[1].name} is left alone")
    elif own is not None and own[1].name != "temperature":
        notes.append(f"temperature: passed as {own[1].name}")
    claim = Claim(loss, call, arrays, temperature, normalised, MappingProxyType(wanted), frozenset(passed))
    if claim.reduced_here:
        notes.append("reduction: it returns one value per anchor; mean and sum are taken here")
    if call == "features" and loss != "nt_xent":
        notes.append(
            "features: rows are given as two or three views of an item where every class divides so, else as one"
        )
    if claim.turned_here:
        notes.append(
            "direction: it goes one way; it is called with its towers turned round, or both ways, as cases ask"
        )
    return claim, notes


def _command_claim(loss: str, temperature: float | None, normalised: bool, settings: Mapping[str, object]) -> Claim:
    wanted, everything = _checked_settings(loss, settings)
    return Claim(loss, "command", "numpy", temperature, normalised, MappingProxyType(wanted), frozenset(everything))


def _checked_settings(loss: str, settings: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """The options that are claimed, and those that are said to be taken by keyword."""
    entry = LOSSES[loss]
    wanted: dict[str, object] = {}
    everything = []
    for name, value in settings.items():
        if name == "temperature":
            raise TargetMisused("temperature is said with --temperature")
        if name not in entry.keywords:
            known = ", ".join(key for key in entry.keywords if key != "temperature")
            raise TargetMisused(f"{entry.function} has no option {name!r}; known: {known}")
        if value == EVERY:
            everything.append(name)
            continue
        if name in STRUCTURE:
            raise TargetMisused(f"{name} is an array: only {name}=* can be said of it, that it is taken by keyword")
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


def _matters(case: Case, option: str) -> bool:
    """Whether the value of an option changes anything in a case."""
    if option == "no_positive":
        return lonely(case)
    if option == "no_negative":
        positives, members = case.positives(), case.members()
        return any(len(positives[i]) == len(members[i]) for i in case.anchors())
    if option == "base_temperature":
        base = case.option(option)
        return base is not None and float(base) != float(case.option("temperature"))
    return True


def _inexpressible(case: Case, claim: Claim) -> str | None:
    """Why the call cannot say what a case is."""
    if claim.call == "features" and "ref_embeddings" in case.others:
        return "takes features, which say nothing of references"
    if case.loss != "nt_xent":
        return None
    if claim.call in ("features", "views", "stacked"):
        if case.option("anchors") is not None:
            return "takes views, which say nothing of anchors"
        return "takes views, which say nothing of references" if case.others else None
    if "ref_embeddings" in case.others and "partners" not in claim.passed:
        return "takes labels, which do not say which reference is whose partner"
    return None


def _tells_all(case: Case) -> bool:
    """Whether the values that are returned are those of all anchors."""
    return case.counted() == case.anchors()


def _in_order(values: list[float], rows: list[int] | None, case: Case) -> list[float]:
    """One value per anchor, brought from the order of the views to that of the case's rows."""
    counted = case.counted()
    if rows is None or len(values) != len(counted) or len(values) == 1:
        return values
    found = dict(zip((row for row in rows if row in set(counted)), values, strict=True))
    return [found[row] for row in counted]


def _outcome(case: Case, values: list[float], gradients: dict[str, Any], anchors: dict[int, float] | None) -> Outcome:
    rest = dict(gradients)
    return Outcome(values, rest.pop(case.first, None), anchors, other_gradients=rest)


def _differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _numpy(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value


def _joined(one: Any, other: Any) -> Any:
    """Two rows of values, one after the other."""
    if isinstance(one, torch.Tensor):
        return torch.cat([one.reshape(-1), other.reshape(-1)])
    if isinstance(one, (np.ndarray, list, tuple)):
        return np.concatenate([np.ravel(one), np.ravel(other)])
    return import_jax().numpy.concatenate([one.reshape(-1), other.reshape(-1)])


def _floats(loss: Any) -> list[float]:
    try:
        found = np.asarray(loss)
        if found.dtype.kind not in "fiu":
            raise TypeError
        return [float(x) for x in found.reshape(-1)]
    except (TypeError, ValueError):
        raise TargetError(f"returned {_kind(loss)} where a number or an array is expected{_hint(loss)}") from None


def _plain(value: Any) -> Any:
    """Lists of integers, for JSON."""
    if isinstance(value, (Sequence, np.ndarray)):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool) else bool(value) if isinstance(value, np.bool_) else int(value)


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _hint(value: object) -> str:
    return ": name a function that returns the loss alone" if isinstance(value, (tuple, list, Mapping)) else ""


def _differ_once(first: str, second: str) -> bool:
    """Whether two names are one but for a character: z_i and z_j, view_a and view_b, hidden1 and hidden2."""
    return len(first) == len(second) and sum(a != b for a, b in zip(first, second, strict=True)) == 1


def _signature(called: Any, *, bound: bool) -> dict[str, inspect.Parameter]:
    """The parameters of a callable, without its self; nothing where they cannot be read."""
    try:
        parameters = dict(inspect.signature(called).parameters)
    except (TypeError, ValueError):
        return {}
    if bound and parameters:
        parameters.pop(next(iter(parameters)))
    return parameters


def _load_module(name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return importlib.import_module(name)


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise TargetError(f"no file {path}")
    # Registered and found as `python file.py` would: with the modules beside it.
    name = f"pairproof_target_{path.stem}_{abs(hash(str(path.resolve())))}"
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _install(error: ImportError) -> str:
    """What helps. Nothing is said to be installed by a name that may be misspelt: anyone may own it on an index."""
    if not isinstance(error, ModuleNotFoundError):
        return ""
    return f" (python looks in {Path.cwd()} and where packages are installed)"


def _copy(found: Any) -> str:
    """The file that a target comes from, and its package's version where it has one."""
    plain = inspect.unwrap(found) if inspect.isfunction(found) else found
    module = inspect.getmodule(plain) or inspect.getmodule(type(plain))
    version = getattr(sys.modules.get((module.__name__ if module else "").partition(".")[0]), "__version__", "")
    file = getattr(module, "__file__", None)
    return ", ".join(filter(None, (str(file) if file else "", f"version {version}" if version else "")))
