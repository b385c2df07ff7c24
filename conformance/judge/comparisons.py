"""The results of ``pairproof parity``, and the constants of its tolerances, which :mod:`.parity` explains."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..suite.machine import described, machine
from .options import ParityRequest, UsageError
from .results import plain

Tensor = torch.Tensor

FORMAT = "pairproof-parity/1"

PASSED, ROUNDED, DIFFERS, ERRORED = "passed", "rounded", "differs", "errored"
MEASURED, NOT_APPLICABLE = "measured", "not applicable"

COMPARISONS = ("repetition", "permutation", "chunks", "float32", "bfloat16", "autocast", "compile", "memory")
"""The comparisons in one process, in their order."""

AGAINST = ("float64", "float32", "bfloat16", "autocast")
"""The comparisons with another loss in float64, in their order."""

PARTS = ("loss", "gradient", "uneven")
"""The comparisons of several processes with one, in their order."""

USED_BY = {
    "vary": ("chunks", *AGAINST),
    "linear_memory": ("memory",),
    "rows": ("memory",),
}
"""Options that have an effect on some comparisons only."""

WIDTH = 16
"""Number of columns of the batches."""

TEMPERATURE, LOWER = 0.1, 0.05
"""The temperatures that are passed to the target. Only batches of nearly equal positives also use ``LOWER``."""

BIAS = -5.0
"""The bias that is passed, in one process only if it is required."""

ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8}
"""Unit roundoff of each dtype."""

NOISE = 2.0**-20
"""Size e of the random relative changes that measure the effect of rounding; above the rounding errors of float32."""

TRIALS = 4
"""Number of random changes per measurement. The largest effect counts."""

FACTOR, UNITS = 8.0, 16.0
"""The allowed difference is a sum of three terms:

- ``FACTOR`` times the measured effect of rounding,
- ``UNITS`` unit roundoffs of the result,
- ``UNITS`` unit roundoffs of the largest result on the random batches, because fused operations, such as a
  cross-entropy, round numbers of that size.

In bfloat16, only the products are rounded to bfloat16 in the first term, the second term is divided by 4, and the third
uses the unit roundoff of float32. Larger differences have the status "rounded", up to the sum without these changes.
With several processes, one term replaces the last two: ``UNITS`` unit roundoffs of the loss or the gradient, whichever
is larger.
"""

MOST_DRAWN = 8
"""Largest number of processes whose gradients are drawn."""

LEAST = 1e-300
"""Added to every allowed difference, so that none is 0."""


@dataclass(frozen=True)
class Comparison:
    """One comparison of a target with itself.

    Attributes:
        name: what was varied, such as "permutation" or "chunk_size=3".
        status: "passed", "rounded" (differs, but not by more than arithmetic in bfloat16 does), "differs", "errored",
            "measured" (no limit applies) or "not applicable".
        message: numbers, or the reason.
        difference: the relative difference of the loss or of the gradient, whichever is the larger multiple of its
            allowed difference. None if nothing was compared.
        allowed: the allowed value of ``difference``.
        batch: the batch with this difference, or with the error.
        mistake: the name of the mistake that explains a difference between several processes and one; "" if none was
            found.
        factor: with several processes, the norm of the loss or gradient divided by that of one process.
    """

    name: str
    status: str
    message: str
    difference: float | None = None
    allowed: float | None = None
    batch: str = ""
    mistake: str = ""
    factor: float | None = None


@dataclass(frozen=True)
class Arrivals:
    """The gradients that reach the rows of each rank, compared with those of one process (the needed ones).

    Attributes:
        shares: [rank][other]: the component of the gradient that the loss of ``rank`` sends to the rows of ``other``
            along the needed gradient, divided by the norm of the latter; None if the gradient is 0. The sum over
            ``rank`` must be 1.
        cosines: [other]: the cosine of the sum of all gradients that reach the rows of ``other`` and the needed one.
    """

    shares: list[list[float | None]]
    cosines: list[float]


@dataclass
class ParityResult:
    """The comparisons of a target with itself.

    Attributes:
        request: the target and the options.
        call: how the target is called.
        notes: messages about the target, such as the inferred way to call it, and the batches that were left out.
        version: the file of the target and the version of its package.
        comparisons: the comparisons.
        memory: [rows, bytes kept for the backward pass, bytes at the peak] for each size.
        arrivals: with ``html``, the gradients that reach the rows of each rank, by number of processes.
        seconds: duration.
    """

    request: ParityRequest
    call: str = ""
    notes: list[str] = field(default_factory=list)
    version: str = ""
    comparisons: list[Comparison] = field(default_factory=list)
    memory: list[tuple[int, int, int]] = field(default_factory=list)
    arrivals: dict[int, Arrivals] = field(default_factory=dict)
    seconds: float = 0.0
    machine: dict[str, str] = field(default_factory=machine)

    @property
    def exit_code(self) -> int:
        """3 if no comparison has a result; otherwise 1 if one differs or ended in an error, else 0.

        With several processes, an error counts as a result, because a wrong loss can make one rank wait for another.
        """
        statuses = {one.status for one in self.comparisons}
        if not statuses & {PASSED, ROUNDED, DIFFERS, MEASURED, *((ERRORED,) if self.request.world_size else ())}:
            return 3
        return int(bool(statuses & {DIFFERS, ERRORED}))

    @property
    def summary(self) -> str:
        """The verdict and the number of comparisons of each status, in one line."""
        names = [one.status for one in self.comparisons]
        ends = ", ".join(f"{names.count(status)} {status}" for status in dict.fromkeys(names))
        other = "itself" if self.request.against is None else self.request.expected
        verdict = {0: f"agrees with {other}", 1: f"does not agree with {other}"}.get(self.exit_code, "could not run")
        return f"{verdict}: {self.request.name}: {ends}"

    def lines(self) -> list[str]:
        """The lines of the report."""
        heading = [f"{self.request.name}, called with {self.call}, seed {self.request.seed}"]
        heading += [f"  on {described(self.machine)}"]
        shown = [f"{one.status:<14} {one.name}: {one.message}" for one in self.comparisons]
        named = [f"mistake: {name}: {', '.join(where)}" for name, where in self.mistakes.items()]
        end = f"{self.summary} in {self.seconds:.1f} s"
        return [*heading, *(f"  {note}" for note in self.notes), *shown, *named, end]

    @property
    def mistakes(self) -> dict[str, list[str]]:
        """The mistakes of a loss in several processes, each with where it was found, such as "world size 2"."""
        found: dict[str, list[str]] = {}
        for one in self.comparisons:
            where = re.split("[:,]", one.name)[0]
            if one.mistake and where not in found.setdefault(one.mistake, []):
                found[one.mistake].append(where)
        return found

    def as_json(self) -> dict[str, Any]:
        """The result as JSON data, in the format ``pairproof-parity/1``."""
        options = ("temperature", "scale", "init", "result", "vary", "rows", "linear_memory", "device", "world_size")
        return {
            "format": FORMAT,
            "passed": self.exit_code == 0,
            "target": self.request.name,
            "version": self.version,
            "machine": self.machine,
            "call": self.call,
            "seed": self.request.seed,
            "against": None if self.request.against is None else self.request.expected,
            "options": {name: getattr(self.request, name) for name in options},
            "notes": self.notes,
            "comparisons": [
                {key: plain(value) for key, value in vars(comparison).items()} for comparison in self.comparisons
            ],
            "mistakes": self.mistakes,
            "memory": [dict(zip(("rows", "kept", "peak"), sizes, strict=True)) for sizes in self.memory],
            "summary": self.summary,
            "seconds": self.seconds,
        }


def check_options(request: ParityRequest) -> None:
    """Raise a ``UsageError`` if a comparison is unknown, or if an option has no effect on the comparisons."""
    mode = "--world-size" if request.world_size else "" if request.against is None else "--against"
    known = {"--world-size": PARTS, "--against": AGAINST}.get(mode, COMPARISONS)
    for name in request.only:
        if name not in known:
            raise UsageError(f"--only: unknown comparison {name!r}; known: {', '.join(known)}")
    if "uneven" in request.only and max(request.world_size) == 1:
        raise UsageError("--only uneven: needs a --world-size of at least 2")
    default = ParityRequest(request.target)
    for name, users in USED_BY.items():
        if getattr(request, name) != getattr(default, name) and not {*users} & {*(request.only or known)}:
            reason = f"--only {','.join(request.only)}" if request.only else mode
            raise UsageError(f"--{name.replace('_', '-')}: not possible together with {reason}")


def check_facts(request: ParityRequest, takes_temperature: bool, own: str, other: str) -> None:
    """Raise a ``UsageError`` if no loss takes the temperature, or if two losses need different kinds of batches.

    Args:
        request: the options.
        takes_temperature: whether a temperature can be passed.
        own: the kind of batches of the target, its ``probed_as``.
        other: the same of the other loss.
    """
    if request.temperature is not None and not takes_temperature:
        raise UsageError(
            f"--temperature: {request.name} takes no temperature. Pass its own parameters with --init, or name the "
            "parameter that gets 1/temperature with --scale"
        )
    kinds = {"views" if one == "features" else one for one in (own, other)}
    if len(kinds) > 1:
        raise UsageError(f"--against: {request.expected} takes {other}, but {request.name} takes {own}; see --call")


def note_on_batches(batches: Iterable[tuple[int, Mapping[str, float]]], each: str = "rows") -> str:
    """Return a note with the sizes, the numbers that are passed and the dtype of batches.

    Args:
        batches: for each batch, its number of rows and the numbers that are passed by keyword.
        each: what ``batches`` counts.
    """
    sizes: dict[str, list[str]] = {}
    for rows, numbers in batches:
        words = ", ".join(f"{name} {value:g}" for name, value in numbers.items())
        sizes.setdefault(f" at {words}" if words else "; no temperature is passed", []).append(str(rows))
    shown = "; ".join(f"{', '.join(rows)} {each}{words}" for words, rows in sizes.items())
    return f"batches: {shown}; {WIDTH} columns; float64 unless a comparison names another dtype"


def signs(like: Tensor, chance: torch.Generator) -> Tensor:
    """Return a tensor of the same shape whose entries are 1 + NOISE or 1 - NOISE at random."""
    bits = torch.randint(0, 2, like.shape, generator=chance)
    return (1 + NOISE * (2 * bits - 1)).to(like.device, like.dtype)
