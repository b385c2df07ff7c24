"""A black box that answers questions: called with torch, numpy or jax arrays, its answer and gradient in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..implementations.callable import Door, External, TargetError, guess_arrays, guess_call, import_jax, within
from .positives import Batch
from .questions import QUESTIONS

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Question:
    """A batch, and the temperature it is asked with where the target takes one."""

    batch: Batch
    temperature: float | None

    @property
    def name(self) -> str:
        """In words."""
        at = "" if self.temperature is None else f", temperature {self.temperature:g}"
        return self.batch.name + at


@dataclass(frozen=True, eq=False)
class Answer:
    """What the target said.

    Attributes:
        values: [K] float64; one, or one per anchor.
        gradient: [N, D] of the sum of the values; None where there is none.
        single: whether every value is a float32 number.
    """

    values: Tensor
    gradient: Tensor | None
    single: bool

    @property
    def total(self) -> float:
        """The sum of the values."""
        return float(self.values.sum())


class Asked:
    """A target that answers questions.

    Attributes:
        door: what is called.
        call: how, "views" where both come in one matrix.
        called: how, in the words of ``targets``.
        arrays: with what.
        passes: whether it takes a temperature.
        notes: what was guessed.
    """

    def __init__(
        self,
        thing: Any,
        *,
        call: str | None = None,
        arrays: str | None = None,
        limit: float | None = 60.0,
        notes: Sequence[str] = (),
    ) -> None:
        """Find out how the target is called.

        Raises:
            TargetError: it cannot be called, or how does not show.
        """
        found = list(notes)
        if isinstance(thing, External):
            call, arrays = call or thing.claim.call, arrays or thing.claim.arrays
            thing = thing.function
        if call == "command":
            raise TargetError("a command is told which loss it is asked for: check it with pairproof check")
        self.door = thing if isinstance(thing, Door) else Door(thing, "cpu")
        if call is None:
            call, words = guess_call(self.door.signature)
            found.append(f"call: {call}, guessed from {words}; --call says otherwise")
        if arrays is None:
            arrays, words = guess_arrays(self.door.thing)
            found.append(f"arrays: {arrays}, guessed from {words}; --arrays says otherwise")
        self.called, call = call, "views" if call == "stacked" else call
        if call not in QUESTIONS:
            raise TargetError(f"unknown call {call!r}; known: {', '.join((*QUESTIONS, 'stacked'))}")
        self.call, self.arrays, self.limit, self.notes = call, arrays, limit, tuple(found)
        self.passes = self.door.keyword("temperature") is not None
        if self.door.made:
            self.notes += ("a class: constructed anew for each question, so what it remembers is not seen",)

    def ask(self, question: Question) -> Answer:
        """Put one question.

        Raises:
            TargetError: what came back is no loss, nothing came back, or it broke.
        """
        rows = question.batch.embeddings.detach().clone().requires_grad_(self.arrays != "numpy")
        positional: list[Any] = [rows] if self.called == "stacked" else list(question.batch.positional(rows))
        keywords: dict[str, Any] = {}
        if question.temperature is not None:
            keywords["temperature"] = question.temperature
        if self.call == "features" and len(positional) == 2:
            keywords["labels"] = positional.pop()
        if self.arrays == "numpy":
            positional = [_numpy(value) for value in positional]
            keywords = {name: _numpy(value) for name, value in keywords.items()}
        try:
            with within(self.limit):
                if self.arrays == "jax":
                    return self._with_jax(positional, keywords, rows)
                loss = self.door(*positional, **keywords)
                return self._answer(loss, rows)
        except TargetError:
            raise
        except Exception as error:  # outside code may raise anything
            raise TargetError(f"{type(error).__name__}: {error}".splitlines()[0]) from error

    def _with_jax(self, positional: list[Any], keywords: dict[str, Any], rows: Tensor) -> Answer:
        jax = import_jax()
        fixed = [jax.numpy.asarray(_numpy(value)) for value in positional]
        named = {name: jax.numpy.asarray(_numpy(value)) for name, value in keywords.items()}
        places = [k for k, value in enumerate(positional) if value.is_floating_point()]

        def total(given: list[Any]) -> tuple[Any, Any]:
            arguments = list(fixed)
            for place, value in zip(places, given, strict=True):
                arguments[place] = value
            loss = jax.numpy.asarray(self.door(*arguments, **named))
            return loss.sum(), loss

        taken, given = jax.value_and_grad(total, has_aux=True), [fixed[k] for k in places]
        try:
            # Compiled whole it takes a third of the time; a function that looks at values cannot be.
            (_, loss), found = jax.jit(taken)(given)
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
            (_, loss), found = taken(given)
        back = [torch.tensor(np.asarray(gradient, dtype=np.float64)) for gradient in found]
        (gradient,) = torch.autograd.grad([positional[k] for k in places], rows, back)
        values = torch.tensor(np.asarray(loss, dtype=np.float64).reshape(-1))
        return Answer(values, gradient, _is_single(values))

    def _answer(self, loss: Any, rows: Tensor) -> Answer:
        if not isinstance(loss, Tensor):
            if isinstance(loss, (tuple, list, Mapping, str)) or loss is None:
                raise TargetError(f"returned a {type(loss).__name__} where a number or an array is expected")
            values = torch.tensor(np.asarray(loss, dtype=np.float64).reshape(-1))
            return Answer(values, None, _is_single(values))
        if not loss.is_floating_point():
            raise TargetError(f"returned a tensor of {loss.dtype} where floating-point numbers are expected")
        values = loss.detach().double().reshape(-1)
        gradient = None
        if loss.requires_grad and rows.requires_grad:
            (gradient,) = torch.autograd.grad(loss.sum(), rows, materialize_grads=True)
        return Answer(values, gradient, _is_single(values))


def _numpy(value: Any) -> Any:
    return value.detach().numpy() if isinstance(value, Tensor) else value


def _is_single(values: Tensor) -> bool:
    known = values[values.isfinite()]
    return bool((known.float().double() == known).all())
