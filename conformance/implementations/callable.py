"""The adapter for anybody's loss: called with torch, numpy or jax arrays as its signature says, gradients mapped back.

A target is a function, a class that is constructed with its options, or an instance. ``Target`` calls it on any
``Batch``. ``External`` is an implementation that judges it, or a command in any language (``subprocess.py``), on cases.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch

from ..suite.cases import Case
from ..suite.catalogue import LOSSES
from ..suite.records import Outcome
from .base import Deviation, Implementation, items_of, labels_of, normalised, targets_of
from .sandbox import TargetError, TargetMisused, copy_of, describe, find, within, within_memory
from .signatures import Claim, Signature, complete, guess_arrays, guess_call, is_module, kind_of
from .subprocess import LineError, Lines

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """Embeddings and their positives, as the arguments of a loss.

    Attributes:
        name: what it is for.
        call: how it is given, one of ``CALLS``.
        embeddings: [N, D]; for views, stacked and features all first views come first, then all second ones.
        labels: of every row; for "features" of every item; None where none are passed.
        positive_pairs: for "pairs", directed.
        n_views: how many views of each item there are.
        keywords: what else is passed, by its name in the catalogue.
    """

    name: str
    call: str
    embeddings: Tensor
    labels: Sequence[int] | None = None
    positive_pairs: Sequence[Sequence[int]] | None = None
    n_views: int = 1
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self, call: str) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional arguments and the keywords for a target that is called so."""
        keywords, rows = dict(self.keywords), self.embeddings
        labels = None if self.labels is None else _integers(self.labels, rows.device)
        if call == "labels":
            return [rows, labels], keywords
        if call == "pairs":
            return [rows, _integers(self.positive_pairs or (), rows.device).reshape(-1, 2)], keywords
        if call == "stacked":
            return [rows], keywords
        views = rows.chunk(self.n_views)
        if call == "views":
            return list(views), keywords
        if labels is not None:
            keywords["labels"] = labels
        return [torch.stack(views, dim=1)], keywords


@dataclass(frozen=True, eq=False)
class Answer:
    """What a target returns for a batch.

    Attributes:
        values: [K] float64; one, or one per anchor.
        gradients: float64, of the sum of the values, by the tensor that they are with respect to; empty without any.
    """

    values: Tensor
    gradients: Mapping[str, Tensor]

    @property
    def gradient(self) -> Tensor | None:
        """The gradient with respect to the embeddings."""
        return self.gradients.get("embeddings")

    @property
    def total(self) -> float:
        """The sum of the values."""
        return float(self.values.sum())

    @property
    def single(self) -> bool:
        """Whether every value is a float32 number."""
        known = self.values[self.values.isfinite()]
        return bool((known.float().double() == known).all())


class Target:
    """A function, an instance or a class, called with the arguments of the catalogue.

    A class is constructed for every call, with the options that its constructor takes; the others go to the call.

    Attributes:
        thing: what is called.
        signature: its parameters.
        call: how it is called, one of ``CALLS``.
        arrays: with which arrays, one of ``ARRAYS``.
        notes: what was guessed.
        tensors_only: whether a result that is not a tensor is an error, for torch.
    """

    def __init__(
        self,
        thing: Any,
        call: str | None = None,
        arrays: str | None = None,
        *,
        device: str = "cpu",
        tensors_only: bool = False,
    ) -> None:
        """Read the signature; guess the call and the arrays where they are None.

        Raises:
            TargetError: it cannot be called, or jax is needed and not installed.
            TargetMisused: the signature does not show how it is called.
        """
        self.thing, self.device, self.tensors_only = thing, device, tensors_only
        self.signature = Signature(thing)
        self.__name__ = str(getattr(thing, "__name__", type(thing).__name__))
        notes = []
        if call is None:
            call, words = guess_call(self.signature)
            notes.append(f"call: {call}, guessed from {words}; --call says otherwise")
        if arrays is None:
            arrays, words = guess_arrays(thing)
            notes.append(f"arrays: {arrays}, guessed from {words}; --arrays says otherwise")
        self.call, self.arrays, self.notes = call, arrays, tuple(notes)
        if is_module(thing) and not self.constructs:
            thing.to(device)
        if arrays == "jax":
            import_jax()

    @property
    def constructs(self) -> bool:
        """Whether it is a class, constructed anew for every call."""
        return self.signature.constructs

    @property
    def takes_temperature(self) -> bool:
        """Whether a temperature can be passed."""
        return self.signature.keyword("temperature") is not None

    def __call__(self, *positional: Any, **keywords: Any) -> Any:
        """Call it with the catalogue's arguments, as arrays of its own kind."""
        constructor, given, others = self.signature.bind(positional, keywords)
        called = self.thing
        if self.constructs:
            called = self.thing(**constructor)
            if is_module(called):
                called.to(self.device)
        return called(*given, **others)

    def evaluate(
        self, batch: Batch, leaves: Mapping[str, Tensor] | None = None, weights: Sequence[float] = ()
    ) -> Answer:
        """Call it on a batch.

        Args:
            batch: in torch tensors.
            leaves: the tensors that the batch is made of and gradients are with respect to; None for the embeddings.
            weights: [K] of the values in the sum that is differentiated; otherwise each is 1.

        Returns:
            Its values, and the gradients where it gives any.

        Raises:
            TargetError: the result is not a loss.
        """
        if leaves is None:
            embeddings = batch.embeddings.detach().clone().requires_grad_()
            leaves, batch = {"embeddings": embeddings}, replace(batch, embeddings=embeddings)
        positional, keywords = batch.arguments(self.call)
        if self.arrays == "jax":
            return self._with_jax(positional, keywords, leaves, weights)
        if self.arrays == "numpy":
            positional = [_numpy(value) for value in positional]
            keywords = {name: _numpy(value) for name, value in keywords.items()}
        with nullcontext() if leaves else torch.no_grad():
            loss = self(*positional, **keywords)
        if self.arrays == "numpy" or not (self.tensors_only or isinstance(loss, Tensor)):
            return Answer(_values(loss), {})
        if not isinstance(loss, Tensor):
            raise TargetError(f"returned {kind_of(loss)} where a tensor is expected{_hint(loss)}")
        if not loss.is_floating_point():
            raise TargetError(f"returned a tensor of {loss.dtype} where floating-point numbers are expected")
        gradients = []
        if loss.requires_grad:
            total = _weighted(loss, torch.tensor(weights, dtype=loss.dtype, device=loss.device))
            gradients = list(torch.autograd.grad(total, list(leaves.values()), materialize_grads=True))
        return Answer(_float64(loss).reshape(-1), dict(zip(leaves, map(_float64, gradients), strict=False)))

    def _with_jax(
        self,
        positional: Sequence[Any],
        keywords: Mapping[str, Any],
        leaves: Mapping[str, Tensor],
        weights: Sequence[float],
    ) -> Answer:
        jax = import_jax()
        given = [*positional, *keywords.values()]
        arrays = {id(value): _jax(value) for value in given}
        places = [value for value in given if isinstance(value, Tensor) and value.requires_grad]

        def total(differentiated: list[Any]) -> tuple[Any, Any]:
            now = arrays | dict(zip(map(id, places), differentiated, strict=True))
            loss = self(*(now[id(value)] for value in positional), **{k: now[id(v)] for k, v in keywords.items()})
            loss = jax.numpy.asarray(loss)
            return _weighted(loss, jax.numpy.asarray(weights, dtype=loss.dtype)), loss

        differentiate = jax.value_and_grad(total, has_aux=True)
        inputs = [arrays[id(place)] for place in places]
        # Compiling takes a third of the time; a function that looks at values cannot be compiled.
        try:
            (_, loss), found = jax.jit(differentiate)(inputs)
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
            (_, loss), found = differentiate(inputs)
        return Answer(
            _values(np.asarray(loss.astype("float64"))),
            pull_back(places, [torch.tensor(np.asarray(g.astype("float64"))) for g in found], leaves),
        )


def pull_back(places: Sequence[Tensor], gradients: Sequence[Tensor], leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Map gradients with respect to tensors back to the leaves that they are made of.

    Args:
        places: tensors that are made of the leaves.
        gradients: float64, one for each.
        leaves: by name.

    Returns:
        float64, by name.
    """
    back = [g.to(place.device, place.dtype) for g, place in zip(gradients, places, strict=True)]
    found = torch.autograd.grad(places, list(leaves.values()), back, materialize_grads=True)
    return dict(zip(leaves, map(_float64, found), strict=True))


def import_jax() -> Any:
    """Import jax, with 64-bit numbers switched on.

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


def _integers(values: Any, device: torch.device | str) -> Tensor:
    return torch.tensor(np.array(values, dtype=np.int64), device=device)


def _float64(value: Tensor) -> Tensor:
    return value.detach().double().cpu()


def _numpy(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else value


def _jax(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    jax, found = import_jax(), value.detach().cpu()
    if value.is_floating_point():
        return jax.numpy.asarray(found.double().numpy()).astype(str(value.dtype).removeprefix("torch."))
    return jax.numpy.asarray(found.numpy())


def _weighted(loss: Any, weights: Any) -> Any:
    """Return the weighted sum of torch or jax values; the plain sum where there are not as many weights."""
    flat = loss.reshape(-1)
    return (flat * weights).sum() if len(weights) == len(flat) else flat.sum()


def _values(loss: Any) -> Tensor:
    """Return numbers of any kind as [K] float64."""
    try:
        found = np.asarray(loss)
        if found.dtype.kind not in "fiu":
            raise TypeError
        return torch.tensor(found.astype(np.float64).reshape(-1))
    except (TypeError, ValueError, RuntimeError):
        raise TargetError(f"returned {kind_of(loss)} where a number or an array is expected{_hint(loss)}") from None


def _hint(value: object) -> str:
    return ": name a function that returns the loss alone" if isinstance(value, (tuple, list, Mapping)) else ""


NOTES = {
    "jax": "jax: 64-bit numbers are switched on; compiled where it can be",
    "numpy": "gradient: not judged, for a numpy function gives none",
}
"""What is noted of targets by their arrays."""


class External(Implementation):
    """Anybody's loss, judged as a claim describes it.

    Attributes:
        target: what is called; None for a command.
        command: the process that is asked; None for a target.
        claim: what it computes.
        notes: what was guessed, in words.
        gradients_judged: whether it gives gradients; None before a command has answered.
        outcomes: what it returned, by case and dtype, until the caller clears it.
    """

    name: ClassVar[str] = "target"
    title: ClassVar[str] = "the target"

    def __init__(
        self,
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
        dtypes: tuple[str, ...] = Implementation.dtypes,
        deviations: tuple[Deviation, ...] = (),
    ) -> None:
        """Find a target and how it is called.

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
            dtypes: in which it is judged.
            deviations: declared differences.

        Raises:
            TargetError: it cannot be loaded.
            TargetMisused: an option contradicts it, or one is missing.
        """
        super().__init__({}, device)
        # Each target has its own, where other implementations have those of their class.
        vars(self).update(dtypes=dtypes, deviations=deviations)
        self.limit = limit
        self.target: Target | None = None
        self.command: Lines | None = None
        self.outcomes: dict[tuple[str, str], Outcome] = {}
        self._version = describe(spec)
        thing = signature = None
        if call == "command":
            if not isinstance(spec, str):
                raise TargetMisused(f"call: command is a shell command line, and {describe(spec)} is none")
            self.command, arrays = Lines(spec), "numpy"
            notes = ["call: command, one JSON object per line"]
        else:
            thing = find(spec) if isinstance(spec, str) else spec
            self.target = Target(thing, call, arrays, device=device, tensors_only=True)
            self._version = copy_of(thing) or self._version
            call, arrays, signature = self.target.call, self.target.arrays, self.target.signature
            notes = [*self.target.notes, *filter(None, [NOTES.get(arrays)])]
        halves = [dtype for dtype in dtypes if dtype not in Implementation.dtypes]
        if "bfloat16" in halves and self.target and arrays == "numpy":
            raise TargetMisused("numpy has no bfloat16")
        if halves and normalised:
            raise TargetMisused(f"rows of norm 1 are not exactly representable in {halves[0]}: --raw, or other dtypes")
        said = Claim(loss, call, arrays, temperature, bool(normalised), settings)
        self.claim, more = complete(said, thing, signature)
        notes += more
        self.notes, self.support = tuple(notes), self.claim.support
        self.gradients_judged: bool | None = None if self.command else self.claim.arrays != "numpy"

    def version(self) -> str:
        """Return which copy is tested."""
        return self._version

    def close(self) -> None:
        """End a command."""
        if self.command:
            self.command.close()

    def evaluate(self, case: Case, dtype: str) -> Outcome:
        """Return the value and the gradients of a case.

        Raises:
            TargetError: the result is not a loss, or it does not come in time.
        """
        leaves = self.tensors(case, dtype)
        given = {k: normalised(z, case) for k, z in leaves.items()} if self.claim.normalised else leaves
        if self.command:
            values, gradients = self._answer(self.command, case, dtype, given, leaves)
            anchors = self._anchors(case, values)
        else:
            with within(self.limit), within_memory() if self.device == "cpu" else nullcontext():
                values, gradients = self._call(case, given, leaves)
                anchors = self._anchors(case, values) or self._anchors_by_another_call(case, given, values)
        found = {name: gradient.numpy() for name, gradient in gradients.items()}
        outcome = Outcome(self._reduced(case, values), found.pop(case.first, None), anchors, other_gradients=found)
        self.outcomes[case.id, dtype] = outcome
        return outcome

    def _call(
        self, case: Case, given: Mapping[str, Tensor], leaves: Mapping[str, Tensor], **changed: Any
    ) -> tuple[list[float], dict[str, Tensor]]:
        """Return the target's values, in the order of the case's anchors, and the gradients of their reduction."""
        assert self.target is not None
        batches, rows = self._batches(case, given, **changed)
        counted, weights = case.counted(), self._weights(case)
        order = [row for row in rows if row in set(counted)] if rows else counted
        reduction = batches[0].keywords.get("reduction", self.claim.settings.get("reduction", "mean"))
        share = 1 / len(batches) if reduction == "mean" else 1.0
        size = len(counted) // len(batches)
        answers = []
        for k, batch in enumerate(batches):
            mine = [weights[row] for row in order[k * size : (k + 1) * size]] if weights else [share]
            answers.append(self.target.evaluate(batch, leaves, mine))
        returned = [answer.values for answer in answers]
        values = (torch.cat(returned) if reduction == "none" else torch.stack(returned).sum(dim=0) * share).tolist()
        if len(values) == len(order) > 1:
            by_row = dict(zip(order, values, strict=True))
            values = [by_row[row] for row in counted]
        if not self.gradients_judged:
            return values, {}
        # A value without a gradient does not depend on the leaves.
        zeros = {name: torch.zeros(leaf.shape, dtype=torch.float64) for name, leaf in leaves.items()}
        return values, {name: sum((a.gradients.get(name, zero) for a in answers), zero) for name, zero in zeros.items()}

    def _batches(self, case: Case, given: Mapping[str, Tensor], **changed: Any) -> tuple[list[Batch], list[int]]:
        """Return what the target is called with, and the case's row of each row of a batch in another order."""
        claim, rows = self.claim, given[case.first]
        options = [name for name in (*LOSSES[case.loss].choices, "base_temperature") if name in claim.passed]
        keywords: dict[str, Any] = {name: given[name] for name in case.others if name in claim.passed}
        keywords |= {name: case.option(name) for name in options} | changed
        if claim.temperature is None:
            keywords["temperature"] = float(case.option("temperature"))
        for name in ("ref_labels", "self_rows"):
            if name in case.arguments:
                keywords[name] = _integers(case.arguments[name], self.device)
        if case.option("anchors") is not None:
            keywords["anchors"] = torch.tensor(case.option("anchors"), dtype=torch.bool, device=self.device)
        batch = Batch(case.id, claim.call, rows, keywords=keywords)
        if "embeddings_b" in given:
            towers = rows, given["embeddings_b"]
            return [replace(batch, embeddings=torch.cat(way), n_views=2) for way in self._directions(case, towers)], []
        if claim.call in ("features", "views", "stacked"):
            items = items_of(case)
            order, targets = [*chain(*zip(*items, strict=True))], targets_of(case, items, rows)
            labels = targets.pop("labels").tolist() if "labels" in targets else None
            keywords |= targets
            return [replace(batch, embeddings=rows[order], labels=labels, n_views=len(items[0]))], order
        if "positive_pairs" in case.arguments:
            return [replace(batch, positive_pairs=case.arguments["positive_pairs"])], []
        if "positives" in case.arguments:
            keywords["positives"] = torch.tensor(case.arguments["positives"], dtype=torch.bool, device=self.device)
            return [batch], []
        by_partners = "partners" in claim.passed
        return [replace(batch, labels=case.arguments["partners"] if by_partners else labels_of(case)[0])], []

    def _directions(self, case: Case, towers: tuple[Tensor, Tensor]) -> list[tuple[Tensor, ...]]:
        """Return the towers in the order, or in both orders, in which a target of one direction is called."""
        if not self.claim.directed_here:
            return [towers]
        own, wanted = self.claim.settings["direction"], case.option("direction")
        if wanted == "both":
            # The anchors of the first tower come before those of the second.
            return [towers, towers[::-1]] if own == "a_to_b" else [towers[::-1], towers]
        return [towers if own == wanted else towers[::-1]]

    def _anchors(self, case: Case, values: list[float], reduction: str = "") -> dict[int, float] | None:
        """Return every anchor's value, if there is one of each."""
        each = self.claim.reduced_here or "none" in (reduction, case.option("reduction"))
        counted = case.counted()
        if each and len(values) == len(counted) and counted == case.anchors():
            return dict(zip(counted, values, strict=True))
        return None

    def _anchors_by_another_call(
        self, case: Case, given: Mapping[str, Tensor], values: list[float]
    ) -> dict[int, float] | None:
        """Return every anchor's value from a call with reduction "none", if the target takes that."""
        takes_none = "reduction" in self.claim.passed and "none" in (self.claim.values_of("reduction") or ("none",))
        if not takes_none or len(values) != 1 or self.claim.arrays == "jax":
            return None
        try:
            return self._anchors(case, self._call(case, given, {}, reduction="none")[0], "none")
        except Exception:  # it is called with more than the case requires
            return None

    def _answer(
        self, command: Lines, case: Case, dtype: str, given: Mapping[str, Tensor], leaves: Mapping[str, Tensor]
    ) -> tuple[list[float], dict[str, Tensor]]:
        """Return the command's values, and the gradients of their reduction."""
        options = (*LOSSES[case.loss].choices, "temperature", "base_temperature")
        arguments = {name: np.asarray(value).tolist() for name, value in case.arguments.items()}
        if case.option("anchors") is not None:
            arguments["anchors"] = [bool(x) for x in case.option("anchors")]
        request = {
            "loss": case.loss,
            "dtype": dtype,
            "matrices": {name: _float64(matrix).tolist() for name, matrix in given.items()},
            "arguments": arguments,
            "options": {name: case.option(name) for name in options},
        }
        single = not self.claim.reduced_here and case.option("reduction") != "none"
        try:
            values, found = command.ask(request, 1 if single else len(case.counted()), self.limit)
        except LineError as error:
            raise TargetError(str(error)) from None
        if self.gradients_judged not in (None, bool(found)):
            now, before = ("gradients", "none") if found else ("no gradients", "some")
            raise TargetError(f"gave {now} where it gave {before} before: they are judged in all answers or in none")
        self.gradients_judged = bool(found)
        weight, *others = {*self._weights(case).values()} or {1.0}
        if not found or others:
            # A command gives the gradient of the values' sum, which does not determine that of a weighted mean.
            return values, {}
        gradients = {name: torch.tensor(found[name], dtype=torch.float64) * weight for name in given}
        if self.claim.normalised:
            gradients = pull_back([*given.values()], [*gradients.values()], leaves)
        return values, gradients

    def _weights(self, case: Case) -> dict[int, float]:
        """Return the weight of every counted anchor's value in the case's reduction; empty if the target reduces."""
        counted, reduction = case.counted(), case.option("reduction")
        if not self.claim.reduced_here:
            return {}
        if reduction == "mean_pairs":
            sizes = [len(case.positives()[i]) for i in counted]
            return {i: size / max(sum(sizes), 1) for i, size in zip(counted, sizes, strict=True)}
        return dict.fromkeys(counted, 1 / len(counted) if reduction == "mean" and counted else 1.0)

    def _reduced(self, case: Case, values: list[float]) -> list[float]:
        """Return the values as the case requires them."""
        if not self.claim.reduced_here:
            return values
        weights = self._weights(case)
        if len(values) != len(weights):
            raise TargetError(f"returned {len(values)} values where {len(weights)} anchors are counted")
        if case.option("reduction") == "none":
            return values
        return [float(np.dot(values, [*weights.values()]))]
