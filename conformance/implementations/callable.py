"""The adapter for a user's loss (a *target*): a function, an instance, or a class that is constructed with options.

``Target`` calls it on a ``Batch``, with torch, numpy or jax arrays. ``External`` evaluates cases with a target, or with
a command in any language (``subprocess.py``).
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from ..suite.cases import Case, called
from ..suite.catalogue import IGNORED, LOSSES, TOWER_TARGETS, WEIGHTS
from ..suite.records import Outcome
from ..truth.tolerances import shares_of
from .base import (
    Deviation,
    Implementation,
    directed,
    gradients_of,
    items_of,
    joined,
    labels_of,
    normalised,
    targets_of,
    unusable,
)
from .forms import Form, Reading, cannot_be_called, listed, other_readings, plausible_forms, reading, trial_case
from .gpu import ON_CPU, OnCPU, lacks_gpu
from .returned import choose, note, parts_of, take
from .sandbox import (
    JaxLost,
    NoCallFits,
    Overtime,
    TargetError,
    TargetMisused,
    copy_of,
    describe,
    described,
    find,
    within,
    within_memory,
)
from .signatures import (
    HARD,
    OF_VIEWS,
    ONE_NEGATIVE,
    Claim,
    Signature,
    check_call,
    complete,
    guess_arrays,
    is_module,
    kind_of,
    method_of,
)
from .subprocess import Lines
from .usages import BY_NAME, NotApplicable, NotJudged, Use

Tensor = torch.Tensor

PROBED_AS = {**dict.fromkeys(("stacked", "interleaved", "towers", "one_way"), "views"), "mask": "labels"}
"""``Target.probed_as`` by call; ``Target.call_as`` handles the other calls."""

REQUIRED: Mapping[str, tuple[str, str]] = {
    "queue": ("info_nce", "negatives"),
    "hard": ("multiple_negatives_ranking", "hard_negatives"),
}
"""For calls with two views and a third matrix: a loss that takes this matrix, and its keyword."""

LATE = 3
"""After this number of calls of one kind exceeded the time limit, no more calls of this kind are run.

The kinds are small batches, large batches and usages (``usages.py``)."""

SMALL = 40
"""Largest ``Case.size`` of a small batch (see ``LATE``)."""

TRIAL_TEMPERATURE = 0.5
"""Temperature of trial calls, unless the target has a built-in one."""

TRIAL_NUMBERS: Mapping[str, Mapping[str, float]] = {"bias": {"bias": -10.0}, "tau_plus": {"tau_plus": 0.1, "beta": 1.0}}
"""Keywords of trial calls, by the parameter that requires them. Keywords that the target does not take are left out."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Embeddings and their positives.

    Attributes:
        name: name of the batch in messages.
        call: how it is passed, as in ``Target.call`` or ``Target.probed_as``.
        embeddings: [N, D]; with several views, all first views precede all second views.
        labels: labels of the rows, or of the items for "features"; None if no labels are passed.
        positive_pairs: directed pairs, for "pairs".
        n_views: number of views of each item.
        keywords: further arguments, by their names in the catalogue.
        first: number of rows of the first of two towers; None if both have the same number.
    """

    name: str
    call: str
    embeddings: Tensor
    labels: Sequence[int] | None = None
    positive_pairs: Sequence[Sequence[int]] | None = None
    n_views: int = 1
    keywords: Mapping[str, Any] = field(default_factory=dict)
    first: int | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the batch and the process, by their names in ``FACTS``."""
        (n, dim), device = self.embeddings.shape, self.embeddings.device
        sizes = {"batch_size": self.first or n // self.n_views, "n_views": self.n_views, "dim": dim}
        return {**sizes, "device": device, "world_size": 1, "rank": 0}

    def arguments(self, call: str) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional arguments and the keywords for a target with this call."""
        rows, keywords = self.embeddings, dict(self.keywords)
        integers = partial(torch.tensor, dtype=torch.int64, device=rows.device)
        if call == "pairs":
            return [rows, integers(self.positive_pairs or ()).reshape(-1, 2)], keywords
        labels, items = None if self.labels is None else integers(self.labels), len(rows) // self.n_views
        if call == "mask":
            positives = keywords.pop("positives", None)
            if positives is None and labels is not None:
                positives = (labels[:, None] == labels).fill_diagonal_(False)
            return [rows, positives], keywords
        # A target may change slices in place, but not the outputs of torch.chunk.
        views = [rows[k * items : (k + 1) * items] for k in range(self.n_views)]
        if call in ("features", "towers", *OF_VIEWS) and labels is not None:
            keywords["labels"] = labels
        if self.first is not None:
            return [rows[: self.first], rows[self.first :]], keywords
        if call == "features":
            return [torch.stack(views, dim=1)], keywords
        if call == "similarities":
            matrix = views[0] @ views[-1].T
            labels = torch.arange(len(matrix), device=rows.device) if labels is None else labels
            return [matrix, labels], keywords
        positional: dict[str, list[Any]] = {name: [rows, labels] for name in ("labels", "partners")}
        positional["stacked"] = [rows]
        positional |= {name: [*views] for name in (*OF_VIEWS, "towers")}
        positional["interleaved"] = [torch.stack(views, 1).flatten(0, 1)]
        return positional[call], keywords


@dataclass(frozen=True, eq=False)
class Answer:
    """What a target returns for a batch.

    Attributes:
        values: [K] float64; one value, or one per anchor or per pair.
        gradient: float64, gradient of ``total`` with respect to the embeddings; None if the target has none.
    """

    values: Tensor
    gradient: Tensor | None

    @property
    def total(self) -> float:
        """The sum of the values."""
        return float(self.values.sum())

    @property
    def finite(self) -> bool:
        """Whether the values and the gradient, if there is one, are finite."""
        return all(bool(part.isfinite().all()) for part in (self.values, self.gradient) if part is not None)

    @property
    def single(self) -> bool:
        """Whether every finite value is representable in float32."""
        known = self.values[self.values.isfinite()]
        return bool((known.float().double() == known).all())


class Target:
    """A user's loss, called with the arguments of the catalogue.

    A class is constructed anew for every call. Its constructor gets the options that it takes; the call gets the rest.

    Attributes:
        thing: the function, the instance or the class.
        signature: its parameters.
        constructs: whether it is a class.
        takes_temperature: whether a temperature can be passed.
        temperature_by: how it is passed, in words.
        trial_keywords: further keywords of trial calls and of ``pairproof identify``, from ``TRIAL_NUMBERS``.
        forms: the plausible ways to call it, the best guess first.
        form: the way in which it is called now.
        call: the call of this form, one of ``CALLS``.
        probed_as: the kind of batches that ``pairproof identify`` passes: one of ``CALLS``, "partners", or a key of
            ``REQUIRED``.
        arrays: the arrays that it takes, one of ``ARRAYS``.
        result: the name of the loss among several results; None if it returns one result, or was not called yet.
        strict: whether a torch target must return a tensor.
        grouped: whether a process group of this process alone was started for it.
        on_cpu: whether it moves tensors to a GPU and runs on the CPU, because there is no GPU.
    """

    def __init__(
        self,
        thing: Any,
        call: str | None = None,
        arrays: str | None = None,
        *,
        strict: bool = False,
        loss: str = "",
        init: Mapping[str, Any] = MappingProxyType({}),
        result: str | None = None,
        spec: object = None,
        scale: str | None = None,
    ) -> None:
        """Read the signature; guess the call and the arrays if they are None.

        Args:
            thing: the function, the instance or the class.
            call: how it is called; guessed if None.
            arrays: the arrays that it takes; guessed if None.
            strict: whether a torch target must return a tensor.
            loss: the loss that it should compute; "" if unknown.
            init: values of parameters of the constructor or of the function, by name.
            result: the name of the loss among several results; guessed if None.
            spec: the target as the user named it.
            scale: the parameter that gets 1 / temperature, if its name does not show it.

        Raises:
            TargetError: it cannot be called, or jax is needed and not installed.
            TargetMisused: the call cannot be guessed or is unknown, or ``init`` or ``scale`` names an unknown
                parameter.
        """
        check_call(call, arrays)
        self.signature = Signature(thing, init, scale or "")
        matrices = LOSSES[loss].matrices if loss in LOSSES else ()
        self.signature.further = next((name for name in ("negatives", HARD) if name in matrices), "")
        third = "".join(p.name.lower() for p in self.signature.named[2:3])
        if not loss and (ONE_NEGATIVE.fullmatch(third) or third in self.signature.third):
            self.signature.further = HARD
        self.thing, self.spec = thing, thing if spec is None else spec
        self.constructs = self.signature.constructs
        self.__name__ = str(getattr(thing, "__name__", type(thing).__name__))
        kinds, words = ((arrays,), "") if arrays else guess_arrays(thing)
        guess = "" if arrays else f"guessed from {words}" if words else "the first kind that raises no error"
        self.forms = plausible_forms(self.signature, call, loss, kinds, guess)
        self._open, self._strict, self._result = len(kinds) > 1, strict, result
        self.call_as(0)
        if arrays == "jax":
            import_jax()

    def call_as(self, form: int, result: str | None = None) -> None:
        """Select the form of later calls.

        Args:
            form: index in ``forms``.
            result: the name of the loss among several results, if an earlier call found it.
        """
        self.form: Form = self.forms[form]
        self.call, self.result, self.arrays = self.form.call, result or self._result, self.form.arrays
        self.strict = self._strict and self.arrays == "torch"
        self._result_note, self._failed, self.use = "", "", Use()
        self._changed = self.grouped = self.on_cpu = False
        self.probed_as = PROBED_AS.get(self.call, self.call)
        if self.call == "similarities":
            labelled = len(self.signature.places) > 1 and self.form.labels != "transposed"
            self.probed_as = "labels" if labelled else "views"
        elif self.probed_as == "views" and self.signature.requires("negatives"):
            self.probed_as = "queue"
        elif self.probed_as == "views" and self.signature.requires("hard_negatives"):
            self.probed_as = "hard"
        takes = self.signature.keyword
        numbers = [values for name, values in TRIAL_NUMBERS.items() if takes(name)]
        self.trial_keywords = {name: x for values in numbers for name, x in values.items() if takes(name)}
        own = self.signature.keyword("temperature")
        self.takes_temperature = self.call == "similarities" or own is not None
        of_constructor = own is not None and self.signature.constructor.get(own.name) is own
        self.temperature_by = "an argument of its constructor" if of_constructor else "an argument"
        if own is None and self.takes_temperature:
            self.temperature_by = "the divisor of the similarities that it gets"
        self.notes = self._notes()

    def _notes(self) -> tuple[str, ...]:
        changed = "arguments: the target changes them in place; it gets copies" if self._changed else ""
        packed = [f"arguments: passed as one {it.kind} with {', '.join(it.keys)}" for it in self.signature.packs]
        group = "process group: one of a single process, because the target requires one" if self.grouped else ""
        device = ON_CPU if self.on_cpu else ""
        return tuple(filter(None, (*self.form.notes, *packed, self._failed, self._result_note, changed, group, device)))

    @property
    def choice(self) -> tuple[int, str | None]:
        """The arguments of ``call_as`` for the current form."""
        return self.forms.index(self.form), self.result

    def settle(self, attempt: Callable[[int], Tensor] | None = None, limit: float | None = None) -> None:
        """Choose the first form in which a small batch raises no error.

        A form that exceeds the time limit is kept, and no other form is tried.

        A target that compares labels with their transpose expects the shape [N, 1], because a vector [N] equals its
        transpose. This shape is tried next. If all other forms fail, the vector is kept.

        Args:
            attempt: calls the target in the form with a given index, and returns the values. By default, the target is
                called with a small batch that fits the call.
            limit: time limit of the default ``attempt`` in seconds; None for no limit.

        Raises:
            JaxLost: the target takes arrays of jax, whose threads are missing here.
            NoCallFits: every form raises an error, and none compares labels with their transpose.
            TargetMisused: an option contradicts the target, or is missing.
        """
        failures: list[tuple[Form, str]] = []
        waiting = [form for form in self.forms if form.tensors == self.forms[0].tensors]
        while waiting:
            form = waiting.pop(0)
            index = self.forms.index(form)
            self.call_as(index)
            try:
                self.strict |= self._open and self.arrays == "torch"
                with _NoTransposedVector():
                    values = attempt(index) if attempt else self._try(limit)
                self.strict = self._strict and self.arrays == "torch"
                trial = trial_case("supcon", {})
                # One value, one per anchor, or one per pair (pairwise NT-Xent, sigmoid).
                pairs = {"labels": len(trial.pairs()), "views": (trial.n // 2) ** 2}.get(self.probed_as)
                if len(values) > trial.n and len(values) != pairs:
                    raise TargetError(f"returned {len(values)} values")
            except Overtime:
                return
            except Exception as error:  # external code may raise any exception
                # Numpy is tried before jax unless the source names jax.
                of_jax = isinstance(error, JaxLost) and all(tried.arrays != "numpy" for tried, _ in failures)
                if of_jax or (isinstance(error, TargetMisused) and not failures):
                    raise
                fits = not form.tensors and form.of_tensors in self.forms
                if fits and "'float' object has no attribute" in described(error):
                    waiting.insert(0, form.of_tensors)
                    continue
                failures.append((form, described(error)))
                if isinstance(error, _TransposedVector):
                    shapes = ("one-hot",) if "multiplied" in str(error) else ("column", "one-hot")
                    waiting.sort(key=partial(_is_later, form, shapes))
            else:
                self._failed = _why_not(failures, form)
                self.notes = self._notes()
                if attempt is None:
                    named = [*["temperature"] * self.takes_temperature, *self.trial_keywords]
                    named += REQUIRED.get(self.probed_as, ())[1:]
                    self.notes += (listed(reading(self.signature, self.form, named)),)
                return
        flat = next((k for k, (_, error) in enumerate(failures) if error.startswith(_TransposedVector.__name__)), None)
        self.call_as(0 if flat is None else self.forms.index(failures[flat][0]))
        if flat is not None:
            return
        raise NoCallFits("\n".join(cannot_be_called(self.spec, self.signature, failures)))

    def other_readings(self, loss: str) -> list[Reading]:
        """Return the other readings of the signature that the source supports, for the loss that it should compute."""
        return [*other_readings(self.signature, self.form, loss)]

    def _try(self, limit: float | None) -> Tensor:
        """Return the values for a small batch that fits the call."""
        case = trial_case("nt_bxent", {})
        n_views = 2 if self.probed_as in ("features", "views", "queue", "hard") else 1
        loss = {"labels": "supcon", "partners": "nt_xent"}.get(self.probed_as)
        labels = next(iter(trial_case(loss, {}).arguments.values())) if loss else None
        keywords: dict[str, Any] = {"temperature": TRIAL_TEMPERATURE} if self.takes_temperature else {}
        keywords |= self.trial_keywords
        if self.probed_as in REQUIRED:
            loss, name = REQUIRED[self.probed_as]
            keywords[name] = torch.tensor(called(trial_case(loss, {}, [name], self.form.queue).matrices)[name])
        pairs = case.arguments["positive_pairs"]
        # Some losses raise an error if the rows are not normalised.
        rows = torch.nn.functional.normalize(torch.tensor(case.embeddings)).requires_grad_()
        batch = Batch("trial", self.probed_as, rows, labels, pairs, n_views, keywords)
        with within(limit):
            return self.loss(batch)

    def evaluate(self, batch: Batch, limit: float | None = None) -> Answer:
        """Call it on a batch of torch tensors; return its values and their gradient.

        Args:
            batch: the batch.
            limit: time limit in seconds, or None.

        Raises:
            TargetError: the result is not a loss, or the call took too long.
        """
        rows = batch.embeddings.detach().clone().requires_grad_()
        with within(limit):
            loss = self.loss(replace(batch, embeddings=rows))
            gradient = gradients_of(loss, {"": rows})[""] if loss.requires_grad else None
            return Answer(loss.detach(), gradient)

    @property
    def last_death(self) -> str:
        """Always "", because the target runs in this process."""
        return ""

    def close(self) -> None:
        """Do nothing, because the target runs in this process."""

    def loss(self, batch: Batch) -> Tensor:
        """Call it on a batch of torch tensors; return its differentiable values, [K] float64.

        Raises:
            TargetError: the result is not a loss.
        """
        positional, keywords = self._arguments(batch)
        places, given = len(positional), [*positional, *keywords.values()]
        dtype = torch.promote_types(batch.embeddings.dtype, torch.float32) if self.form.tensors else None

        def call(*arrays: Any) -> Any:
            options = dict(zip(keywords, arrays[places:], strict=True))
            constructor, given, others = self.signature.bind(arrays[:places], options, batch.facts, dtype)
            with OnCPU() if self.on_cpu else nullcontext():
                called = self._constructed(constructor) if self.constructs else self.thing
                if is_module(called) and any(x.device != batch.embeddings.device for x in _state_of(called)):
                    called.to(batch.embeddings.device)
                if not callable(called):
                    called = getattr(called, method_of(type(called)))
                return self._taken(self.use.call(called, given, others))

        if self.arrays == "jax":
            found: Any = _Jax.apply(call, *given)  # type: ignore[no-untyped-call]
        else:
            given = [*map(_numpy, given)] if self.arrays == "numpy" else given
            try:
                found = call(*given)
            except (AssertionError, RuntimeError, ValueError) as error:
                if "process group has not been initialized" in str(error):
                    _start_group()
                    self.grouped = True
                elif self.on_cpu or not lacks_gpu(str(error)):
                    raise
                else:
                    self.on_cpu = True
                found = call(*given)
            self._changed |= "changed-input" in self.use.seen
        loss: Tensor = found if isinstance(found, Tensor) else self._values(found)
        if not loss.is_floating_point():
            raise TargetError(f"returned a tensor of {loss.dtype} where floating-point numbers are expected")
        return self.use.result(loss, self.arrays).double().cpu().reshape(-1)

    def _constructed(self, options: Mapping[str, Any]) -> Any:
        """Construct the target. What it draws, usually first values of parameters, is no side effect; a seed is one."""
        state, seed = torch.get_rng_state(), torch.initial_seed()
        found = self.thing(**options)
        if torch.initial_seed() == seed and not self.signature.of_constructor:
            torch.set_rng_state(state)
        return found

    def _arguments(self, batch: Batch) -> tuple[list[Any], dict[str, Any]]:
        """Return copies of the positional arguments and the keywords of a batch, in the current form."""
        copies = {name: x.clone() if isinstance(x, Tensor) else x for name, x in batch.keywords.items()}
        batch = replace(batch, embeddings=batch.embeddings.clone(), keywords=copies)
        labelled = batch.labels is not None or "labels" in batch.keywords
        if self.form.several and not labelled and self.signature.requires("labels"):
            # One class per item means the same as no labels.
            batch = replace(batch, labels=range(batch.first or len(batch.embeddings) // batch.n_views))
        positional, keywords = self.use.arguments(*batch.arguments(self.call))
        shaped = partial(self.form.shaped, rows=positional[0])
        if self.call == "similarities":
            if self.signature.keyword("temperature") is None and "temperature" in keywords:
                positional[0] = positional[0] / keywords.pop("temperature")
            if self.signature.keyword("bias") is None and "bias" in keywords:
                positional[0] = positional[0] + keywords.pop("bias")
            if self.form.labels == "transposed":
                positional[1] = positional[0].T
            positional = positional[: max(len(self.signature.places), 1)]
        if self.call in ("labels", "partners", "mask", "similarities"):
            name = "mask" if self.call == "mask" else "labels"
            positional[1:] = [shaped(name, value) for value in positional[1:]]
            if self.call == "mask" and self.signature.takes_negative_mask:
                negative = (positional[1] == 0).fill_diagonal_(False)
                positional.append(shaped(name, negative))
            if self.signature.labels_first:
                positional.reverse()
        return positional, {name: shaped(name, value) for name, value in keywords.items()}

    def _taken(self, returned: Any) -> Any:
        parts = parts_of(returned)
        if parts is None or (isinstance(returned, list) and not self.strict and all(map(_is_number, returned))):
            if self._result is not None:
                self._result_note = f"result: it returns a single one, so --result {self._result} has no effect"
            return returned
        if self.result is None:
            self.result = choose(parts, self._size)
        self._result_note = note(self.result, parts)
        return take(parts, self.result)

    def _size(self, value: Any) -> int | None:
        """Return the size of an array of floats; None for anything else."""
        if isinstance(value, Tensor):
            return value.numel() if value.is_floating_point() else None
        if self.strict or not (isinstance(value, float) or "float" in str(getattr(value, "dtype", ""))):
            return None
        return int(getattr(value, "size", 1))

    def _values(self, returned: Any) -> Tensor:
        if self._open and self.arrays == "numpy" and type(returned).__module__.startswith("jax"):
            raise TargetError("returned an array of jax for arrays of numpy")
        if not self.strict:
            with suppress(TypeError, ValueError, RuntimeError):
                numbers = np.asarray(returned)
                if numbers.dtype.kind in "fiu":
                    return torch.tensor(numbers.astype(np.float64))
        expected = "a tensor" if self.strict else "a number or an array"
        raise TargetError(f"returned {kind_of(returned)} where {expected} is expected")


def _is_later(failed: Form, shapes: Sequence[str], other: Form) -> tuple[bool, bool]:
    """Return the key by which forms are sorted, so that the failed form with another shape of labels comes first."""
    return (other.call, other.arrays) != (failed.call, failed.arrays), other.labels not in shapes


def _why_not(failures: Sequence[tuple[Form, str]], form: Form) -> str:
    """Return the note on the first guess, which fails, if another call or other arrays are used; "" otherwise."""
    if not failures:
        return ""
    (first, error), *_ = failures
    if first.arrays != form.arrays:
        return f"arrays: not {first.arrays}, because that fails: {error}"
    return f"call: not {first.call}, because that fails: {error}" if first.call != form.call else ""


class _TransposedVector(Exception):
    """The target combines labels with their transpose, so it expects labels [N, 1] or one-hot labels [N, C]."""


class _NoTransposedVector(TorchFunctionMode):
    """Raise ``_TransposedVector`` if the body compares a vector of integers with its transpose, or multiplies them.

    A column of integers that is multiplied by its transpose raises the same error: only one-hot labels fit.
    """

    def __init__(self) -> None:
        super().__init__()
        self._integers: list[Tensor] = []
        self._transposed: list[Tensor] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        vectors = all(isinstance(x, Tensor) and x.dim() == 1 for x in args)
        columns = vectors or all(isinstance(x, Tensor) and x.dim() == 2 and 1 in x.shape for x in args)
        if any(x is y for x in args for y in self._transposed):
            if function in (torch.eq, Tensor.eq, Tensor.__eq__) and vectors:
                raise _TransposedVector("a vector of labels is transposed")
            if function in (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm) and columns:
                raise _TransposedVector("labels are multiplied by their transpose")
        getter = function in (Tensor.t, torch.t, Tensor.T.__get__)  # type: ignore[attr-defined]
        with warnings.catch_warnings() if getter else nullcontext():
            if getter:
                warnings.simplefilter("ignore")  # torch warns that a vector is transposed
            found = function(*args, **(kwargs or {}))
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is not None and isinstance(found, Tensor):
            integers = not first.is_floating_point() or any(first is x for x in self._integers)
            if integers and getter:
                self._transposed.append(found)
            elif integers and function in (Tensor.float, Tensor.double, Tensor.to):
                self._integers.append(found)
        return found


class _Jax(torch.autograd.Function):
    """Call a jax function on torch tensors and other arguments; jax computes the gradients."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], *given: Any) -> Tensor:
        jax, arrays = import_jax(), dict(enumerate(map(_jax, given)))
        ctx.leaves = [k for k in arrays if ctx.needs_input_grad[k + 1]]

        def differentiate(*leaves: Any) -> Any:
            def values(*now: Any) -> Any:
                return jax.numpy.asarray(function(*(arrays | dict(zip(ctx.leaves, now, strict=True))).values()))

            return jax.vjp(values, *leaves)

        inputs = [arrays[k] for k in ctx.leaves]
        # Compiled functions are three times as fast, but functions that branch on values cannot be compiled.
        try:
            loss, ctx.pull_back = jax.jit(differentiate)(*inputs)
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
            loss, ctx.pull_back = differentiate(*inputs)
        ctx.dtype, ctx.device = loss.dtype, given[0].device
        return _from_jax(loss)

    @staticmethod
    def backward(ctx: Any, *weights: Tensor) -> Any:
        found = iter(ctx.pull_back(import_jax().numpy.asarray(weights[0].numpy(), dtype=ctx.dtype)))
        return tuple(_from_jax(next(found)).to(ctx.device) if needed else None for needed in ctx.needs_input_grad)


def import_jax() -> Any:
    """Import jax in 64-bit mode.

    Raises:
        JaxLost: its threads are missing here.
        TargetError: it is not installed.
    """
    if _threads.lost:
        raise JaxLost("jax is in use and does not survive a fork")
    try:
        jax = importlib.import_module("jax")
    except ImportError as error:
        raise TargetError(f"jax is needed to call it but is not installed ({error}): pip install jax") from None
    jax.config.update("jax_enable_x64", True)
    return jax


@dataclass
class _Threads:
    """The threads of this process that a fork of it does not have.

    Attributes:
        group: whether those of the process group that ``_start_group`` has started run.
        lost: whether this process is a fork without those of jax.
    """

    group: bool = False
    lost: bool = False

    def before_fork(self) -> None:
        """End the process group."""
        if self.group and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        self.group = False

    def after_fork(self) -> None:
        """Note that the threads of jax are missing, if it has started any."""
        bridge = sys.modules.get("jax._src.xla_bridge")
        self.lost |= bridge is not None and bridge.backends_are_initialized()


_threads = _Threads()
os.register_at_fork(before=_threads.before_fork, after_in_child=_threads.after_fork)


def _start_group() -> None:
    """Start a process group of this process alone. It ends before the next fork, which its threads do not survive."""
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    _threads.group = True


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) or np.ndim(value) == 0 == getattr(value, "ndim", None)


def _state_of(module: torch.nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())


def _numpy(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else value


def _jax(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    # numpy has no bfloat16.
    found = import_jax().numpy.asarray(_numpy(value.double() if value.is_floating_point() else value))
    return found.astype(str(value.dtype).removeprefix("torch."))


def _from_jax(array: Any) -> Tensor:
    return torch.tensor(np.asarray(array.astype("float64")))


def _kind_of(case: Case) -> str:
    """Return the kind of a call without a usage (see ``LATE``)."""
    return f"batches of {'up to' if case.size <= SMALL else 'more than'} {SMALL} rows"


class External(Implementation):
    """A user's loss, judged by what the user says that it computes (``Claim``).

    Attributes:
        spec: the target as the user named it.
        target: the target; None for a command, and for a target in a child process.
        command: the command; None for a target.
        claim: what it computes.
        notes: what was guessed, in words.
        gradients_judged: whether it returns gradients; None until a command has answered.
        outcomes: what it returned, by case and dtype, until the caller clears it.
        in_float32: why results for float64 inputs are judged as float32; "" if they are not, None if not yet known.
        readings: other readings of the signature that the source supports.
        frozen: the matrices that it may treat as constant.
    """

    name: ClassVar[str] = "target"
    title: ClassVar[str] = "the target"
    in_float32: str | None = None
    frozen: Sequence[str] = ()
    readings: tuple[Reading, ...] = ()

    def __init__(
        self,
        spec: object,
        *,
        loss: str,
        call: str | None = None,
        arrays: str | None = None,
        temperature: float | None = None,
        normalised: bool | None = None,
        frozen: Sequence[str] = (),
        settings: Mapping[str, object] = MappingProxyType({}),
        init: Mapping[str, Any] = MappingProxyType({}),
        result: str | None = None,
        scale: str | None = None,
        limit: float | None = 60.0,
        device: str = "cpu",
        dtypes: tuple[str, ...] = Implementation.dtypes,
        deviations: tuple[Deviation, ...] = (),
    ) -> None:
        """Import a target and determine how it is called.

        Args:
            spec: the function, class or instance; or "package.module:attribute" or "file.py:attribute"; or a shell
                command line for the call "command".
            loss: short name in the catalogue.
            call: one of ``CALLS``; guessed from the names of the parameters if None.
            arrays: one of ``ARRAYS``; guessed from annotations and imports if None.
            temperature: the built-in temperature of a target that takes none by keyword.
            normalised: whether pairproof normalises rows under cosine similarity before the call; None means no.
            frozen: the matrices that it may treat as constant.
            settings: the claimed options, by name; "*" means that the target takes the option by keyword.
            init: values of parameters of the constructor or of the function, by name.
            result: the name of the loss among several results; guessed if None.
            scale: the parameter that gets 1 / temperature, if its name does not show it.
            limit: time limit of a case in seconds; None for no limit.
            device: torch device.
            dtypes: the dtypes in which it is judged.
            deviations: declared differences.

        Raises:
            TargetError: it cannot be loaded, or the device cannot be used.
            TargetMisused: an option contradicts it, or an option is missing.
        """
        super().__init__({}, device)
        if reason := unusable(device):
            raise TargetError(reason)
        # Other implementations have these as class attributes.
        vars(self).update(dtypes=dtypes, deviations=deviations)
        self.spec, self.limit, self.frozen, self._version = spec, limit, frozen, describe(spec)
        self.target: Target | None = None
        self.command: Lines | None = None
        self.outcomes: dict[tuple[str, str], Outcome] = {}
        if call != "command":
            thing = find(spec) if isinstance(spec, str) else spec
            more: dict[str, Any] = {"init": init, "result": result, "spec": spec, "scale": scale}
            self.target = Target(thing, call, arrays, strict=True, loss=loss, **more)
            self._version = copy_of(thing) or self._version
            call, arrays = self.target.call, self.target.arrays
        elif isinstance(spec, str):
            self.command, arrays = Lines(spec), "numpy"
        else:
            raise TargetMisused(f"call: command needs a shell command line, got {describe(spec)}")
        halves = [dtype for dtype in dtypes if dtype not in Implementation.dtypes]
        if halves and normalised:
            raise TargetMisused(f"rows of norm 1 are not exactly representable in {halves[0]}: use --raw or float32")
        self._claimed = Claim(loss, call, arrays, temperature, bool(normalised), settings)
        self.gradients_judged: bool | None = None
        self._complete()

    def _complete(self) -> None:
        """Complete the claim from the signature, for the current form."""
        signature: Signature | None = None
        notes: tuple[str, ...] = ("call: command, one JSON object per line",)
        if self.target:
            form = self.target.form
            self._claimed = replace(self._claimed, call=form.call, arrays=form.arrays, queue=form.queue)
            signature, notes = self.target.signature, self.target.notes
            if "bfloat16" in self.dtypes and self.target.arrays == "numpy":
                raise TargetMisused("numpy has no bfloat16")
            self.gradients_judged = self.target.arrays != "numpy"
        self.claim, more = complete(self._claimed, signature)
        self.notes, self.support = (*notes, *more), self.claim.support
        if self.target and signature:
            own = {"partners": "partners", "mask": "positives"}.get(self.claim.call)
            given = [name for name in sorted(self.claim.passed) if name != own]
            given += ["temperature"] * (self.claim.temperature is None) + ["bias"] * self.claim.adds_bias
            found = reading(signature, self.target.form, given, self.claim.loss)
            optional = (p for p in (*signature.constructor.values(), *signature.named) if p.default is None)
            unused = frozenset(p.name for p in optional if p.name not in {*found, *signature.init})
            self.notes, self.claim = (*self.notes, listed(found)), replace(self.claim, unused=unused)
            self.readings = tuple(self.target.other_readings(self.claim.loss))

    def refuses(self, case: Case) -> str | None:
        """Return the reason to skip a case, or None. A case is also skipped if too many calls of its kind were late."""
        if "embeddings_b" in self.frozen and self.claim.directed_here and case.option("direction") != "a_to_b":
            return "pairproof would swap the towers, and --frozen makes one of them constant"
        return super().refuses(case) or self.not_run(_kind_of(case))

    @cached_property
    def late(self) -> Counter[str]:
        """The number of calls that exceeded the time limit, by kind."""
        return Counter()

    def not_run(self, kind: str) -> str | None:
        """Return the reason to skip calls of a kind (see ``LATE``); None unless too many were late."""
        if self.late[kind] < LATE:
            return None
        return f"not run: {LATE} {kind} took longer than {self.limit:g} s (--limit)"

    @contextmanager
    def _counting_late(self, case: Case, usage: str) -> Iterator[None]:
        try:
            yield
        except Overtime:
            self.late["usages" if usage else _kind_of(case)] += 1
            raise

    def call_as(self, form: int, result: str | None = None) -> None:
        """Select the form of later calls; the arguments are those of ``Target.call_as``."""
        if self.target and (form, result) != self.target.choice:
            self.target.call_as(form, result)
            self._complete()

    def settle(self) -> None:
        """Choose the first form in which a small batch raises no error, as ``Target.settle`` does.

        Raises:
            NoCallFits: every form raises an error.
        """
        if self.target is None:
            return

        def attempt(optional: Collection[str], _: int) -> Tensor:
            self._complete()
            options = {name: values[0] for name, values in self.support.options.items()}
            queue = self.target.form.queue if self.target else ""
            matrices = {*required, *optional}
            case = trial_case(self.claim.loss, {"temperature": TRIAL_TEMPERATURE, **options}, matrices, queue)
            errors = []
            for dtype in self.dtypes:
                with within(self.limit):
                    try:
                        return self._loss(case, self._given(case, self.tensors(case, dtype)))
                    except Exception as error:  # external code may raise any exception
                        errors.append(error)
            raise errors[0]

        required = self.claim.required
        optional = {"negatives", HARD} & self.claim.passed - required
        try:
            self.target.settle(partial(attempt, optional))
        except NoCallFits:
            if not optional:
                raise
            self.target.settle(partial(attempt, ()))
        self._complete()

    def _given(self, case: Case, leaves: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the case's matrices, normalised if the claim or the call "similarities" requires it."""
        unit = self.claim.normalised or self.claim.call == "similarities"
        return {name: normalised(z, case) for name, z in leaves.items()} if unit else leaves

    def version(self) -> str:
        """Return which copy of the target is judged: its file and version, or else its name."""
        return self._version

    def close(self) -> None:
        """End the process of a command."""
        if self.command:
            self.command.close()

    def evaluate(self, case: Case, dtype: str, usage: str = "") -> Outcome:
        """Return the value and the gradients of a case.

        Args:
            case: the case.
            dtype: dtype of the rows.
            usage: name of the usage (``usages.py``) under which the target is called; "" for an ordinary call.

        Raises:
            TargetError: the result is not a loss, or takes too long.
        """
        with self._counting_late(case, usage):
            return self._evaluated(case, dtype, usage)

    def _evaluated(self, case: Case, dtype: str, usage: str) -> Outcome:
        leaves = self.tensors(case, dtype)
        each = case.separate or self.claim.reduced_here
        use = Use(BY_NAME[usage], leaves, case.temperature, case.bias, each)
        given = self._given(case, leaves)
        # Commands are limited in ``subprocess.py``.
        limited = self.device == "cpu" and not self.command
        with within(None if self.command else self.limit), within_memory() if limited else nullcontext():
            if self.command:
                values, gradients = self._ask(case, dtype, given)
                if gradients and self.claim.normalised:
                    products = [(z.double().cpu() * gradients[name]).sum() for name, z in given.items()]
                    gradients = gradients_of(torch.stack(products), leaves)
            else:
                try:
                    with self._target_used(use):
                        loss, gradients = use.differentiated(
                            lambda rows: self._loss(case, self._given(case, rows)),
                            partial(self._shares, case),
                            judged=bool(self.gradients_judged),
                        )
                except NotApplicable as error:
                    return Outcome([], observed={"applies": False, "notes": [str(error)]})
                except NotJudged as error:
                    return Outcome([], observed={"notes": [str(error)]})
                values = loss.detach()
            anchors = self._anchors(case, values, given)
        if self.claim.reduced_here:
            shares = self._shares(case, values)
            values = values if case.separate else torch.tensor([values.numpy() @ shares.numpy()])
        observed = use.observed(gradients)
        found = {name: gradient.numpy() for name, gradient in gradients.items()}
        if constant := [name for name in self.frozen if name in found and not found[name].any()]:
            observed["frozen"] = constant
        outcome = Outcome(values.tolist(), found.pop(case.first, None), anchors, None, found, observed)
        self.outcomes[case.id, dtype] = outcome
        return outcome

    @contextmanager
    def _target_used(self, use: Use) -> Iterator[None]:
        """Apply a usage to the calls of the target in the body, and record their side effects."""
        assert self.target is not None
        self.target.use = use
        passed = self.target.signature.keyword(use.usage.scalar or "temperature")
        use.documented = passed is not None and "Tensor" in str(passed.annotation)
        try:
            with warnings.catch_warnings() if use.usage.scalar else nullcontext():
                if use.usage.scalar:
                    # If the target, or its constructor, reads the scalar as a number, the missing gradient reveals it.
                    warnings.filterwarnings("ignore", "Converting a tensor with requires_grad")
                with use:
                    yield
        finally:
            self.target.use = Use()

    def _loss(self, case: Case, given: Mapping[str, Tensor], **changed: Any) -> Tensor:
        """Return the values, [K] float64, in the order of the case's anchors or pairs."""
        assert self.target is not None
        batches, rows = self.batches(case, given, **changed)
        reduction = batches[0].keywords.get("reduction", self.claim.settings.get("reduction", "mean"))
        loss = joined([self.target.loss(batch) for batch in batches], reduction)
        wanted: list[Any] = case.pairs() if reduction == "none_pairs" else case.counted()
        if reduction == "none_pairs" and rows:
            order = sorted(wanted, key=lambda pair: [rows.index(row) for row in pair])
        else:
            order = [row for row in rows if row in set(wanted)]
        return loss[[order.index(one) for one in wanted]] if rows and len(loss) == len(order) > 1 else loss

    def batches(self, case: Case, given: Mapping[str, Tensor], **changed: Any) -> tuple[list[Batch], list[int]]:
        """Return the batches for the target, and the new order of the case's rows ([] if unchanged)."""
        claim, rows, arrays = self.claim, given[case.first], self.arrays(case)
        passed = [name for name in case.entry.scalars if name in claim.passed or (name == "bias" and claim.adds_bias)]
        matrices = called(given)
        keywords: dict[str, Any] = {name: matrices[name] for name in case.others if name in claim.passed}
        keywords |= {name: case.option(name) for name in passed} | changed
        passed_on = ("ref_labels", "self_rows", "anchors", *IGNORED, *WEIGHTS)
        keywords |= {name: arrays[name] for name in passed_on if name in arrays}
        if case.option("direction_weights") is not None and "direction_weights" in claim.passed:
            keywords["direction_weights"] = case.option("direction_weights")
        if claim.temperature is None:
            keywords["temperature"] = case.temperature
        batch = Batch(case.id, claim.call, rows, keywords=keywords)
        if "embeddings_b" in given:
            towers = rows, given["embeddings_b"]
            keywords |= {name: arrays[name] for name in TOWER_TARGETS if name in arrays}
            batch = replace(batch, keywords=keywords, first=None if len(towers[1]) == len(rows) else len(rows))
            step = -1 if claim.directed_here and claim.settings["direction"] == "b_to_a" else 1
            pairs = directed(case, towers) if claim.directed_here else [towers]
            return [replace(batch, embeddings=torch.cat(pair[::step]), n_views=2) for pair in pairs], []
        by_items = case.entry.targets == "partners" or claim.call in ("features", *OF_VIEWS)
        if by_items and claim.call not in ("labels", "partners", "mask"):
            items = items_of(case)
            order, targets = [*chain(*zip(*items, strict=True))], targets_of(case, items, rows)
            n_views = 1 if claim.call == "similarities" else len(items[0])
            labels = None if n_views > 1 else [*range(len(items))] * len(items[0])
            batch = replace(batch, labels=labels if claim.call == "similarities" else None)
            batch = replace(batch, keywords=keywords | ({} if claim.unlabelled else targets), n_views=n_views)
            orders = [order, order[len(items) :] + order[: len(items)]][: 2 if claim.call == "one_way" else 1]
            return [replace(batch, embeddings=rows[one]) for one in orders], order
        if "positives" in arrays:
            keywords["positives"] = arrays["positives"]
        elif "positive_pairs" in arrays:
            batch = replace(batch, positive_pairs=case.arguments["positive_pairs"])
        else:
            by_partners = "partners" in claim.passed
            batch = replace(batch, labels=case.arguments["partners"] if by_partners else labels_of(case)[0])
        return [batch], []

    def _anchors(self, case: Case, values: Tensor, given: Mapping[str, Tensor]) -> dict[int, float] | None:
        """Return the value of every anchor, if necessary by a second call with reduction "none"; None if unknown."""
        claim, counted = self.claim, case.counted()
        each = claim.reduced_here or case.option("reduction") == "none"
        takes_none = "reduction" in claim.passed and "none" in (claim.values_of("reduction") or ("none",))
        if self.target and takes_none and not each and len(values) == 1 and claim.arrays != "jax":
            # This call is optional, so its errors are ignored.
            with suppress(Exception), torch.no_grad():
                values, each = self._loss(case, given, reduction="none"), True
        known = each and len(values) == len(counted) and counted == case.anchors()
        return dict(zip(counted, values.tolist(), strict=True)) if known else None

    def _shares(self, case: Case, values: Tensor) -> Tensor:
        """Return the weight of each value in the loss; 1 unless pairproof reduces the values."""
        if not self.claim.reduced_here:
            return torch.ones_like(values)
        counted = case.counted()
        if len(values) != len(counted):
            raise TargetError(f"returned {len(values)} values, expected one for each of {len(counted)} anchors")
        return values.new_tensor(shares_of(case)[counted].tolist())

    def _ask(self, case: Case, dtype: str, given: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the command's values and the gradients of the loss; {} if the answer does not determine them."""
        assert self.command is not None
        options = {name: case.option(name) for name in (*case.entry.scalars, "temperature")}
        if "direction_weights" in case.entry.keywords:
            options["direction_weights"] = case.option("direction_weights")
        request = {"loss": case.loss, "dtype": dtype, "options": options}
        for key, arrays in (("matrices", given), ("arguments", self.arrays(case))):
            request[key] = {name: array.tolist() for name, array in arrays.items()}
        values_of_case = case.counted() if self.claim.reduced_here else case.undefined_values()
        answer, found = self.command.ask(request, len(values_of_case), self.limit)
        if self.gradients_judged not in (None, bool(found)):
            now, before = ("gradients", "none") if found else ("no gradients", "some")
            raise TargetError(f"returned {now} but returned {before} before: return them in all answers or in none")
        self.gradients_judged = bool(found)
        values = torch.tensor(answer, dtype=torch.float64)
        share, *others = {*self._shares(case, values).tolist()} or {1.0}
        if not found or others:
            # The gradient of the sum of the values does not determine that of a weighted mean.
            return values, {}
        return values, {name: share * torch.tensor(found[name], dtype=torch.float64) for name in given}
