"""A target that answers probes: called with a batch, its values and gradient in float64, its errors in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..implementations.callable import Answer, Batch, External, Target
from ..implementations.sandbox import TargetError, within
from .questions import QUESTIONS

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Question:
    """A batch, and the temperature that is passed where the target takes one."""

    batch: Batch
    temperature: float | None

    @property
    def name(self) -> str:
        """In words."""
        at = "" if self.temperature is None else f", temperature {self.temperature:g}"
        return self.batch.name + at


class Asked:
    """A target that answers probes.

    Attributes:
        door: the target.
        call: how it is called, "views" where both come in one matrix.
        called: how it is called.
        arrays: with which arrays.
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
        if isinstance(thing, External):
            call, arrays = call or thing.claim.call, arrays or thing.claim.arrays
            thing = thing.target.thing if thing.target else thing.command
        if call == "command":
            raise TargetError("a command is told which loss it is asked for: check it with pairproof check")
        self.door = Target(thing, call, arrays)
        self.called, self.arrays, self.limit = self.door.call, self.door.arrays, limit
        self.call = "views" if self.called == "stacked" else self.called
        if self.call not in QUESTIONS:
            raise TargetError(f"unknown call {call!r}; known: {', '.join((*QUESTIONS, 'stacked'))}")
        self.passes = self.door.takes_temperature
        self.notes = (*notes, *self.door.notes)
        if self.door.constructs:
            self.notes += ("a class: constructed anew for each question, so what it remembers is not seen",)

    def ask(self, question: Question) -> Answer:
        """Put one question.

        Raises:
            TargetError: what came back is no loss, nothing came back, or it broke.
        """
        passed = {} if question.temperature is None else {"temperature": question.temperature}
        try:
            with within(self.limit):
                return self.door.evaluate(replace(question.batch, keywords=passed))
        except TargetError:
            raise
        except Exception as error:  # outside code may raise anything
            raise TargetError(f"{type(error).__name__}: {error}".splitlines()[0]) from error
