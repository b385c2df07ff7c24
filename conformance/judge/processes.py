"""Compare a loss in several processes with the same loss in one process: ``pairproof parity --world-size``.

Each process is a rank of a gloo group. It has its own rows: its inputs times a parameter, the *projection*. As with
``DistributedDataParallel``, the loss and the gradients of parameters are averaged over the ranks. They must equal those
of one process with all rows.

If they differ, further evaluations find the mistake:

- Each rank evaluates its own rows, without a group. This shows whether anything is gathered.
- Only one rank's loss is propagated. This shows whether a gradient reaches the rows of other ranks.
- The gradient of an embedding is a combination of the other embeddings, which are linearly independent. The signs of
  its coefficients show which rows are positives and which are negatives.
- A constant is added to the rows of each rank. If its loss stays the same, it normalises with its own mean.
- All rows are equal, or all are orthogonal. Only self pairs have the same similarity in both batches.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import accumulate, combinations_with_replacement
from typing import Any

import torch

from ..implementations.callable import Batch
from ..implementations.child import CannotFork
from ..implementations.ranks import HARD, PROJECTION, Ranks, Subject
from ..implementations.sandbox import TargetError
from .comparisons import (
    BIAS,
    DIFFERS,
    ERRORED,
    FACTOR,
    LEAST,
    MOST_DRAWN,
    NOISE,
    NOT_APPLICABLE,
    PARTS,
    PASSED,
    ROUNDING,
    TEMPERATURE,
    TRIALS,
    UNITS,
    WIDTH,
    Arrivals,
    Comparison,
    ParityResult,
    check_facts,
    note_on_batches,
    signs,
)
from .options import CouldNotRun, ParityRequest, UsageError

Tensor = torch.Tensor

EVEN, UNEVEN = (3, 5), (2, 4, 3, 5)
"""Numbers of items per rank. In an even batch, every rank has the same number, one of ``EVEN``. In the uneven batch,
the ranks have the numbers ``UNEVEN`` in turn."""

MOST = 64
"""Maximum number of processes."""

SPREAD = 1.5
"""Root-mean-square norm of the noise that is added to a centre of norm 1, before the row is normalised."""

SIMILAR = 0.3
"""The same of a first view that is very similar to a second view of the first rank."""

READING_TEMPERATURE = 0.5
"""Temperature of the batch whose gradient shows the positives. At lower ones, some coefficients are negligible."""

PATIENCE = 10.0
"""Maximum time for which ranks with uneven rows wait for each other, in seconds."""

SEVERAL_POSITIVES = ("labels", "features", "pairs")
"""Calls in which a row can have several positives."""

EQUAL = 1e-6
"""In a diagnosis, numbers or vectors are equal if their relative difference is at most this."""

STEPS, STEP_ERROR = (1e-5, 1e-7), 1e-4
"""Steps of central differences, the smaller one for strongly curved losses, and their largest error, divided by the
norms of the gradient and of the direction."""

READ = 1e-8
"""A gradient counts as 0 if its norm is at most this share of that of another one."""

ZERO, ZERO_SINGLE, CLEAR, CLEAR_SINGLE = 1e-10, 1e-4, 1e-6, 1e-2
"""Coefficients below the first share of the largest one count as 0. Those below the third share have no known sign. The
others are for results in float32."""

UNCHANGED = 1e-4
"""Largest relative difference of a loss that is independent of a change of the rows, also in float32."""

UNGATHERED = "nothing is gathered"
UNDIFFERENTIATED = "no gradient through the gather"
CROSSING = "wrong gradient through the gather"
OFFSET = "targets without the rank's offset"
POSITIVE_MASK = "positive mask without the rank's offset"
MASK = "mask without the rank's offset"
HARD_TARGETS = "hard negatives are targets"
SELF_PAIRS = "self pairs are not left out"
STATISTICS = "each rank normalises with its own statistics"
ORDER = "order of the gathered rows"
PARTLY = "not all rows are gathered"
OFFSET_ALONE = "targets with the rank's offset, but nothing is gathered"
MEANS = "mean of the ranks' means"
TIMES_WORLD, BY_WORLD = "{} x world size", "{} / world size"
"""Names of mistakes. The last two are formatted with "loss" or a gradient."""


@dataclass(frozen=True)
class _Shared:
    """A batch that is divided among ranks.

    - ``parts``: the batch of each rank, with inputs in place of embeddings
    - ``whole``: the batch of all ranks
    - ``places``: for each row of ``whole``, (rank, kind, number within this rank and kind). The kind is the view, or -1
      for hard negatives, which come last.
    """

    name: str
    parts: list[Batch]
    whole: Batch
    places: list[tuple[int, int, int]]
    projection: Tensor

    @property
    def items(self) -> list[int]:
        """The number of rows of each rank."""
        return [len(part.embeddings) for part in self.parts]

    @property
    def rows(self) -> Tensor:
        """All rows, [N, D], in the order of ``places``."""
        hard = [self.whole.keywords[HARD].flatten(0, -2)] if HARD in self.whole.keywords else []
        return torch.cat([self.whole.embeddings, *hard])

    @property
    def positives(self) -> Tensor:
        """Whether two rows are a positive pair, bool [N, N]; the diagonal has no meaning."""
        n, labels = len(self.whole.embeddings), self.whole.labels
        groups = range(n // 2) if labels is None or self.whole.call == "partners" else labels
        found = torch.zeros(len(self.places), len(self.places), dtype=torch.bool)
        group = torch.tensor([groups[row % len(groups)] for row in range(n)])
        found[:n, :n] = group[:, None] == group
        return found

    def with_rows(self, rows: Tensor) -> _Shared:
        """Return the batch with other rows, given in the order of ``places``."""

        def changed(batch: Batch, rows: Tensor) -> Batch:
            n, keywords = len(batch.embeddings), dict(batch.keywords)
            if HARD in keywords:
                keywords[HARD] = rows[n:].reshape(keywords[HARD].shape)
            return replace(batch, embeddings=rows[:n], keywords=keywords)

        owners = [rank for rank, _, _ in self.places]
        parts = [changed(part, rows[[owner == rank for owner in owners]]) for rank, part in enumerate(self.parts)]
        return replace(self, parts=parts, whole=changed(self.whole, rows))


@dataclass(frozen=True)
class _Measured:
    """The loss and the gradient of each parameter, in one process or averaged over ranks."""

    loss: float
    gradients: Mapping[str, Tensor]

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and all(bool(g.isfinite().all()) for g in self.gradients.values())


@dataclass(frozen=True)
class _Expected:
    """The result of one process, and the allowed difference of each part: "loss" or a parameter."""

    found: _Measured
    allowed: Mapping[str, float]


@dataclass
class _Difference:
    """The largest difference of one part, in units of the allowed difference."""

    ratio: float = -1.0
    relative: float = 0.0
    allowed: float = 0.0
    batch: str = ""
    words: str = ""
    factor: float | None = None


class Processes:
    """The comparisons of one target for several numbers of processes."""

    def __init__(self, request: ParityRequest, facts: Mapping[str, Any], ranks: Ranks) -> None:
        self.request, self.facts, self.ranks = request, facts, ranks
        self.chance = torch.Generator().manual_seed(request.seed)
        self.keywords: dict[str, Any] = {}
        for name, value in (("temperature", request.temperature or TEMPERATURE), ("bias", BIAS)):
            if any(name in takes for takes in facts["takes"]):
                self.keywords[name] = value
        if facts["call"] == "similarities":
            self.keywords["temperature"] = request.temperature or TEMPERATURE
        check_facts(request, "temperature" in self.keywords, facts["probed_as"], facts["against_as"])
        # A gradient that only one of the two losses has cannot be compared.
        self.learned = [name for name in self.keywords if all(name in takes for takes in facts["takes"])]
        # ``single``: the target returns float32 values for float64 rows.
        # ``columns_of_all``: the second row number of a pair is an index into the rows of all ranks.
        self.single = self.columns_of_all = False
        sizes = note_on_batches([(2 * items, self.keywords) for items in EVEN], "rows per rank")
        self.notes: list[str] = [*facts["notes"], _note_on_ranks(facts), sizes]
        for name in self.keywords:
            own, other = (name in known for known in facts["takes"])
            if own != other:
                self.notes.append(f"{name}: passed to {request.name if own else request.expected} only")
        self.arrivals: dict[int, Arrivals] = {}

    # Batches

    def draw(self, counts: Sequence[int], name: str, reading: bool = False) -> _Shared:
        """Draw a batch with rows of norm 1. With labels, the classes of most rows also occur on other ranks.

        ``counts`` are the numbers of items of the ranks. An item is a pair of views or, with labels, two rows of one
        class. If ``reading``, the gradient must show the positives: the embeddings are linearly independent, and equal
        to the inputs.
        """
        call, hard = self.facts["probed_as"], self.facts["hard"]
        views = 1 if call in ("labels", "similarities") else 2
        total = sum(counts) * (3 if hard else 2)
        width = max(WIDTH, total) if reading else WIDTH
        keywords = dict(self.keywords)
        if reading and "temperature" in keywords:
            keywords["temperature"] = READING_TEMPERATURE

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=self.chance, dtype=torch.float64)

        def around(centres: Tensor, spread: float = SPREAD) -> Tensor:
            rows = centres + spread * normal(*centres.shape) / math.sqrt(width)
            return torch.nn.functional.normalize(rows, dim=-1)

        centres = torch.nn.functional.normalize(normal(2 + len(counts) + total, width), dim=-1)
        orthogonal = torch.linalg.qr(normal(width, width))[0]
        # With several positives, the coefficient of a very similar positive can have the sign of a negative.
        orthogonal_rows = reading and call in SEVERAL_POSITIVES
        parts: list[Batch] = []
        used = 2 + len(counts)
        for rank, items in enumerate(counts):
            # The class of the first item occurs only on this rank; all ranks share the other two classes.
            classes = [2 + rank if k == 0 else k % 2 for k in range(items)]
            given, labels, pairs = dict(keywords), None, None
            if views == 1:
                order = torch.randperm(2 * items, generator=self.chance).tolist()
                labels = [(classes * 2)[k] for k in order]
                inputs = around(centres[labels])
            else:
                inputs = around(centres[used : used + items].repeat(2, 1))
                labels = classes if call == "features" and self.facts["takes_labels"] else None
                if parts:
                    # A loss that leaves out very similar negatives leaves out this pair, which no rank has alone.
                    inputs[0] = around(parts[0].embeddings[counts[0]], SIMILAR)
            if orthogonal_rows:
                inputs = orthogonal[2 * sum(counts[:rank]) :][: 2 * items]
            if hard:
                given[HARD] = around(centres[used : used + items])[:, None]
            used += items
            if call == "partners":
                labels = [(k + items) % (2 * items) for k in range(2 * items)]
            if call == "pairs":
                pairs = [(k, (k + items) % (2 * items)) for k in range(2 * items)]
            # Only these calls divide the rows into views; for the others, labels and pairs refer to single rows.
            divided = views if call in ("views", "features") else 1
            parts.append(Batch(name, call, inputs, labels, pairs, divided, given))
        projection = torch.eye(width, dtype=torch.float64) if reading else orthogonal
        return self.shifted(joined(name, parts, projection, views))

    # Evaluations

    def alone(self, batch: Batch, projection: Tensor) -> _Measured:
        """Evaluate a batch in one process."""
        return _mean([self.answer_alone(batch, projection)])

    def answer_alone(self, batch: Batch, projection: Tensor) -> dict[str, Any]:
        """Evaluate a batch in one process, without a group if possible. Return the answer of the process."""
        given = (batch, projection, self.learned)
        if self.facts["alone"]:
            return self.ranks.alone(*given)
        self.ranks.join(1)
        found: dict[str, Any] = self.ranks.together([given])[0]
        return found

    def expected(self, shared: _Shared) -> _Expected:
        """Evaluate a batch in one process, and estimate the effect of rounding by random relative changes.

        Raises:
            TargetError: the result is not finite.
        """
        found, whole = self.alone(shared.whole, shared.projection), shared.whole
        slopes = dict.fromkeys(("loss", *found.gradients), 0.0)
        for _ in range(TRIALS):
            keywords = {name: value * self.changed(torch.as_tensor(value)) for name, value in whole.keywords.items()}
            keywords = {name: x if x.dim() else float(x) for name, x in keywords.items()}
            inputs = whole.embeddings * self.changed(whole.embeddings)
            other = self.alone(replace(whole, embeddings=inputs, keywords=keywords), shared.projection)
            for name, (a, b) in _pairs(found, other).items():
                slopes[name] = max(slopes[name], float((a - b).norm()) / NOISE)
        unit = ROUNDING["float32" if self.single else "float64"]
        sizes = {name: float(a.norm()) for name, (a, _) in _pairs(found, found).items()}
        # The largest size, because a gradient can be 0 up to rounding.
        scale = max(sizes.values())
        allowed = {name: unit * (FACTOR * slopes[name] + UNITS * scale) + LEAST for name in slopes}
        if not found.finite:
            raise TargetError(f"{shared.name}: the loss or the gradient in one process is not finite")
        return _Expected(found, allowed)

    def changed(self, values: Tensor) -> Tensor:
        """Return random factors near 1, one per value."""
        return signs(values.double(), self.chance)

    def together(self, shared: _Shared, weights: Sequence[float] = (), quiet: bool = False) -> list[dict[str, Any]]:
        """Evaluate the batch of each rank in its process.

        Each rank's loss is multiplied by its weight, 1 by default, before the backward pass. If ``quiet``, native code
        of the ranks prints nothing from now on.
        """
        weights = weights or [1.0] * len(shared.parts)
        parts = zip(shared.parts, weights, strict=True)
        return self.ranks.together([(p, shared.projection, self.learned, w, quiet) for p, w in parts])

    def one_by_one(self, shared: _Shared) -> list[list[Tensor]]:
        """Propagate the loss of one rank at a time, and return the gradients of all rows for each rank.

        The list is empty if the batch cannot be evaluated, or if a gradient is not finite.
        """
        rows, ranks = [], range(len(shared.parts))
        try:
            for rank in ranks:
                answers = self.together(shared, [float(rank == other) for other in ranks])
                rows.append([torch.tensor(one["rows"], dtype=torch.float64) for one in answers])
        except TargetError:
            return []
        return rows if all(bool(g.isfinite().all()) for row in rows for g in row) else []

    def arrive(self, shared: _Shared) -> None:
        """Store which gradients reach the rows of each rank, unless the batch cannot be evaluated."""
        world = len(shared.parts)
        with suppress(TargetError):
            self.ranks.join(world)
            if not (rows := self.one_by_one(shared)):
                return
            alone = torch.tensor(self.answer_alone(shared.whole, shared.projection)["rows"], dtype=torch.float64)
            # The loss of one process is the mean over ranks, so the sum over ranks is this many times its gradient.
            needed = [world * alone[[place[0] == rank for place in shared.places]] for rank in range(world)]
            shares = [
                [float((g * n).sum() / n.square().sum()) if g.norm() > READ * n.norm() else None for g, n in pairs]
                for pairs in (list(zip(row, needed, strict=True)) for row in rows)
            ]
            sums = [torch.stack(column).sum(0) for column in zip(*rows, strict=True)]
            both = ((g.flatten(), n.flatten()) for g, n in zip(sums, needed, strict=True))
            cosines = [float(torch.cosine_similarity(*pair, dim=0)) for pair in both]
            self.arrivals[world] = Arrivals(shares, cosines)

    def exchange(self, shared: _Shared) -> None:
        """Note what the ranks exchange in one step, unless it cannot be counted."""
        world, rows = len(shared.parts), shared.rows
        given = [(part, shared.projection, self.learned) for part in shared.parts]
        with suppress(TargetError):
            self.ranks.join(world)
            operations, received = zip(*self.ranks.together(given, "exchange"), strict=True)
            mean = sum(received) / world
            # The rows of other ranks, and the gradients of its own rows from each of them.
            least = 2 * rows.nbytes * (world - 1) / world
            self.notes.append(
                f"exchange on {world} ranks (gloo): {max(operations)} collective operations in one step; a rank "
                f"receives {mean:.0f} bytes, {mean / least:.3g} times the {least:.0f} of all rows and their gradients"
            )

    # Comparisons

    def comparisons(self) -> Iterator[Comparison]:
        """Yield the comparisons for each number of processes."""
        for world in self.request.world_size:
            try:
                yield from self.of_world(world)
            except TargetError as error:
                mistake = OFFSET_ALONE if self.fails_above_rank_0(world, str(error)) else ""
                words = f"; {mistake}: rank 0 returns the loss of its own rows" if mistake else ""
                yield Comparison(f"world size {world}", ERRORED, f"{error}{words}", mistake=mistake)

    def fails_above_rank_0(self, world: int, error: str) -> bool:
        """Return whether indices are too large on all ranks but the first, which returns the loss of its own rows."""
        if re.findall(r"rank (\d+): IndexError", error) != [str(rank) for rank in range(1, world)]:
            return False
        shared = self.draw([EVEN[0]] * world, "first rank")
        given = (shared.parts[0], shared.projection, self.learned)
        try:
            self.ranks.join(world, PATIENCE)
            first = self.ranks.together([given])[0]["value"]
            return _same(torch.tensor(self.alone(*given[:2]).loss), torch.tensor(first))
        except TargetError:
            return False

    def prepare(self) -> None:
        """Choose which numbers are passed as tensors with a gradient, and note the precision of the target.

        Raises:
            CouldNotRun: the target is random, or returns no finite loss with a gradient.
        """
        shared = self.draw([EVEN[0]], "first batch")
        try:
            found = self.alone(shared.whole, shared.projection)
            if self.learned and not found.finite:
                raise TargetError("the loss or a gradient is not finite")
        except TargetError as error:
            if not self.learned:
                raise
            self.notes.append(f"{', '.join(self.learned)}: passed as numbers; as tensors: {error}")
            self.learned = []
            found = self.alone(shared.whole, shared.projection)
        again = self.alone(shared.whole, shared.projection)
        if not found.finite:
            raise CouldNotRun(f"{self.request.name}: the loss or the gradient in one process is not finite")
        if PROJECTION not in found.gradients:
            raise CouldNotRun(f"{self.request.name}: the loss has no gradient in one process")
        if not _same(torch.tensor(found.loss), torch.tensor(again.loss)):
            different = "the target returns different results for the same batch"
            raise CouldNotRun(f"{self.request.name}: {different}: it is random or keeps state")
        self.single = float(torch.tensor(found.loss).float()) == found.loss
        if self.single:
            self.notes.append("precision: the target returns float32 values for float64 rows")
        elif not self.differentiates(shared, found.gradients[PROJECTION]):
            self.notes.append(
                "gradient: even in one process, it is not the derivative of the loss. If this is not intended, "
                "perhaps the gathered rows have no gradient; compare with a correct loss (--against)"
            )

    def differentiates(self, shared: _Shared, gradient: Tensor) -> bool:
        """Return whether a central difference confirms the gradient in one process."""
        direction = torch.randn(shared.projection.shape, generator=self.chance, dtype=torch.float64)
        slope, allowed = float(gradient @ direction.flatten()), STEP_ERROR * float(gradient.norm() * direction.norm())

        def confirmed(step: float) -> bool:
            ends = [self.alone(shared.whole, shared.projection + x * direction).loss for x in (step, -step)]
            return abs((ends[0] - ends[1]) / (2 * step) - slope) <= allowed

        return any(confirmed(step) for step in STEPS)

    def of_world(self, world: int) -> Iterator[Comparison]:
        """Compare a number of processes with one process."""
        only, name = self.request.only or PARTS, f"world size {world}"
        batches = [self.draw([items] * world, f"{items} items per rank") for items in EVEN]
        expected = [self.expected(shared) for shared in batches]
        wrong = False
        if "loss" in only or "gradient" in only:
            self.ranks.join(world)
            answers = [self.together(shared) for shared in batches]
            parts = self.compared(batches, expected, answers)
            if self.facts["call"] == "pairs" and world > 1 and any(one.ratio > 1 for one in parts.values()):
                batches, answers, parts = self.with_columns_of_all(batches, expected, answers, parts)
            wrong = any(one.ratio > 1 for one in parts.values())
            # A mask can change the loss of one batch and not that of the other.
            worst = parts["loss"] if parts["loss"].ratio > 1 else max(parts.values(), key=lambda one: one.ratio)
            k = [shared.name for shared in batches].index(worst.batch)
            mistakes = Naming(self, batches[k], expected[k].found, answers[k]).mistakes() if wrong else {}
            if world > 1:
                self.exchange(batches[0])
            for part, one in parts.items():
                if ("loss" if part == "loss" else "gradient") in only:
                    yield _comparison(f"{name}: {_title(part)}", one, len(batches), mistakes.get(part, ""))
        if self.request.html is not None and 1 < world <= MOST_DRAWN:
            self.arrive(batches[0])
        if "uneven" in only and world > 1:
            yield self.uneven(world, f"{name}, uneven rows", wrong)

    def with_columns_of_all(
        self,
        batches: list[_Shared],
        expected: list[_Expected],
        answers: list[list[dict[str, Any]]],
        parts: dict[str, _Difference],
    ) -> tuple[list[_Shared], list[list[dict[str, Any]]], dict[str, _Difference]]:
        """Compare again, with second row numbers that are indices into all ranks' rows. Keep this if all agrees."""
        self.columns_of_all = True
        again = [self.shifted(shared) for shared in batches]
        try:
            found = [self.together(shared) for shared in again]
            others = self.compared(again, expected, found)
        except TargetError:
            self.ranks.join(len(batches[0].parts))
            others = parts
        if any(one.ratio > 1 for one in others.values()):
            self.columns_of_all = False
            return batches, answers, parts
        self.notes.append(
            "pairs: the second row number of a pair is an index into the rows of all ranks, the first one into those "
            "of its own rank"
        )
        return again, found, others

    def shifted(self, shared: _Shared) -> _Shared:
        """Return the batch. If the target needs it, second row numbers of pairs are indices into all ranks' rows."""
        if not self.columns_of_all:
            return shared
        starts = [0, *accumulate(shared.items)]
        parts = [
            replace(part, positive_pairs=[(i, start + j) for i, j in part.positive_pairs or ()])
            for part, start in zip(shared.parts, starts, strict=False)
        ]
        return replace(shared, parts=parts)

    def uneven(self, world: int, name: str, known: bool) -> Comparison:
        """Compare ranks with different numbers of rows with one process.

        ``known`` is whether ranks with equal numbers of rows also differ.
        """
        counts = [UNEVEN[rank % len(UNEVEN)] for rank in range(world)]
        shared = self.draw(counts, f"{', '.join(map(str, counts))} items")
        expected = self.expected(shared)
        try:
            self.ranks.join(world, PATIENCE)
            answers = self.together(shared, quiet=True)
        except TargetError as error:
            return Comparison(name, NOT_APPLICABLE, f"the target does not support them: {error}")
        parts = self.compared([shared], [expected], [answers])
        part, worst = max(parts.items(), key=lambda one: one[1].ratio)
        mistake = ""
        if worst.ratio > 1:
            items = shared.items
            weights = [world * n / sum(items) for n in items]
            with_weights = _mean(self.together(shared, weights))
            loss = sum(w * one["value"] for w, one in zip(weights, answers, strict=True)) / world
            pairs = _pairs(replace(with_weights, loss=loss), expected.found)
            if all(_same(a, b) for a, b in pairs.values()):
                mistake = (
                    f"{MEANS}: every rank returns the mean over its own anchors, so that the mean over the ranks gives "
                    "anchors of ranks with fewer rows a larger weight"
                )
            elif known:
                worst.words += "; they also differ with equal numbers of rows"
        worst.words = f"the {_title(part)}: {worst.words}"
        return _comparison(name, worst, 1, mistake)

    def compared(
        self, batches: Sequence[_Shared], expected: Sequence[_Expected], answers: Sequence[list[dict[str, Any]]]
    ) -> dict[str, _Difference]:
        """Return the largest difference of each part."""
        worst: dict[str, _Difference] = {}
        for shared, true, answer in zip(batches, expected, answers, strict=True):
            found = _mean(answer)
            for part, (a, b) in _pairs(true.found, found).items():
                size = float(a.norm())
                away = float((a - b).norm()) if bool(b.isfinite().all()) else math.inf
                allowed = true.allowed[part]
                one = worst.setdefault(part, _Difference())
                if away / allowed > one.ratio:
                    words = _difference_in_words(a, b)
                    # The relative difference of a gradient near 0 has no meaning.
                    factor = float(b.norm()) / size if size > allowed else None
                    size = size if size > allowed else 1.0
                    worst[part] = _Difference(away / allowed, away / size, allowed / size, shared.name, words, factor)
        return worst


class Naming:
    """The search for the mistake of a loss that differs from one process on the batch ``shared``."""

    def __init__(
        self, processes: Processes, shared: _Shared, true: _Measured, answers: Sequence[Mapping[str, Any]]
    ) -> None:
        self.processes, self.shared, self.true, self.answers = processes, shared, true, answers
        self.world = len(shared.parts)

    def mistakes(self) -> dict[str, str]:
        """Return the mistake of each part, as a name and an explanation."""
        finite = [math.isfinite(one["value"]) for one in self.answers]
        if not all(finite):
            bad = [rank for rank, known in enumerate(finite) if not known]
            where = f"the loss is not finite on rank {', '.join(map(str, bad))}"
            if finite[0]:
                words = f"{MASK}: {where}, but finite on rank 0: the rank's own positives are masked"
                return dict.fromkeys(self.parts, words)
            return dict.fromkeys(self.parts, where)
        reading = self.processes.draw([EVEN[0]] * self.world, "reading", reading=True)
        rows = self.processes.one_by_one(reading)
        # An evaluation in one process ends the group, so the evaluations in the group come first.
        if self.world > 1 and self.ungathered():
            gathers = ", ".join(self.processes.facts["gathers"])
            hint = f"; see its parameters {gathers} (--init)" if gathers else ""
            words = f"{UNGATHERED}: every rank computes the loss of its own rows alone{hint}"
            return dict.fromkeys(self.parts, words)
        factors = self.factors
        # Other positives or negatives would change the loss.
        if factors["loss"] is None:
            if self.own_statistics():
                words = "if a constant is added to all rows of a rank, the loss changes in one process, but on no rank"
                return dict.fromkeys(self.parts, f"{STATISTICS}: {words}")
            if rows and (pairs := self.pairs(reading, rows)):
                return dict.fromkeys(self.parts, pairs)
        return self.named(factors, self.crosses(reading, rows) if rows else None)

    @property
    def parts(self) -> list[str]:
        """The loss and the parameters."""
        return ["loss", *self.true.gradients]

    def ungathered(self) -> bool:
        """Return whether every rank's loss is that of its own rows in one process."""
        for part, answer in zip(self.shared.parts, self.answers, strict=True):
            try:
                found = self.processes.alone(part, self.shared.projection)
            except TargetError:
                return False
            if not _same(torch.tensor(found.loss), torch.tensor(answer["value"])):
                return False
        return True

    def own_statistics(self) -> bool:
        """Return whether a constant row that is added to the rows of each rank changes only the loss of one process."""
        shared, processes = self.shared, self.processes
        constants = torch.randn(self.world, shared.rows.shape[1], generator=processes.chance, dtype=torch.float64)
        moved = shared.with_rows(shared.rows + constants[[rank for rank, _, _ in shared.places]])
        try:
            processes.ranks.join(self.world)
            found = processes.together(moved)
            alone = processes.alone(moved.whole, moved.projection).loss
        except TargetError:
            return False
        for before, after in zip(self.answers, found, strict=True):
            if not (_unchanged(before["value"], after["value"]) and torch.tensor(before["rows"]).any()):
                return False  # A loss without a gradient could be a constant.
        return math.isfinite(alone) and not _unchanged(self.true.loss, alone)

    def crosses(self, shared: _Shared, rows: list[list[Tensor]]) -> bool:
        """Return whether the loss of a rank has a gradient with respect to the rows of another one."""
        own = max(float(rows[rank][rank].norm()) for rank in range(self.world))
        others = [g for rank, row in enumerate(rows) for other, g in enumerate(row) if other != rank]
        return any(float(g.norm()) > READ * own for g in others)

    def pairs(self, shared: _Shared, rows: list[list[Tensor]]) -> str:
        """Return the mistake in the choice of positives and negatives; "" if there is none."""
        try:
            alone = self.processes.answer_alone(shared.whole, shared.projection)
            whole = self._coefficients(shared, torch.tensor(alone["rows"], dtype=torch.float64))
        except TargetError:
            return ""
        zero, least = (ZERO_SINGLE, CLEAR_SINGLE) if self.processes.single else (ZERO, CLEAR)
        largest = whole.abs().max()

        def signs_of(coefficients: Tensor) -> Tensor:
            """Return 1, -1, 0, or NaN if the sign is unknown."""
            sizes = coefficients.abs()
            return coefficients.sign().where(sizes > least, math.nan).where(sizes >= zero, 0.0)

        true, positives = signs_of(whole / largest), shared.positives
        if bool(((true < 0) & ~positives).fill_diagonal_(False).any()):
            return ""  # Not a contrastive loss: other signs have no meaning.
        places = shared.places
        index = {place: row for row, place in enumerate(places)}
        wrong: list[tuple[int, int]] = []
        changed: list[tuple[int, int]] = []
        within = left_out = True  # Whether pairs within a rank are right; whether rows of rank 0 are left out.
        for rank in range(self.world):
            mine = [row for row, place in enumerate(places) if place[0] == rank]
            full = torch.zeros(len(places), rows[rank][rank].shape[1], dtype=torch.float64)
            full[mine] = rows[rank][rank]
            found = signs_of(self._coefficients(shared, full) / largest)
            for i in mine:
                for j in range(len(places)):
                    if i == j:
                        continue
                    own, before, after = places[j][0] == rank, true[i, j], found[i, j]
                    within &= not (own and bool((before - after).abs() > 0))  # NaN, an unknown sign, is no evidence
                    if after < 0 and not positives[i, j]:
                        wrong.append((i, j))
                    # If 0, the loss of another rank can have the coefficient, because its row is the anchor.
                    elif (before < 0 <= after) if own else (before <= 0 < after):
                        changed.append((i, j))
                if rank and places[i][1] >= 0:
                    remote = [j for j, place in enumerate(places) if place[0] != rank and place[1] == places[i][1]]
                    j = index[0, places[i][1], places[i][2]]
                    left_out &= bool(found[i, j] == 0 != true[i, j] and found[i, remote].any())

        def shown(i: int, j: int) -> str:
            (rank, kind, k), (other, kind_of_other, m) = places[i], places[j]
            what = (
                "hard negative" if kind_of_other < 0 else "row" if self.views == 1 else f"view {kind_of_other} of item"
            )
            own = "row" if self.views == 1 else f"view {kind} of item"
            return f"{own} {k} of rank {rank} and {what} {m} of rank {other}"

        if wrong:
            example = f"{shown(*wrong[0])} are a positive pair, but not in one process"
            if any(places[j][1] < 0 <= places[i][1] for i, j in wrong):
                i, j = next((i, j) for i, j in wrong if places[j][1] < 0 <= places[i][1])
                return f"{HARD_TARGETS}: {shown(i, j)} are a positive pair; check the order of the gathered rows"
            # Without the offset, not all pairs have the same view and number: on one rank, these would be self pairs.
            others = any(places[i][1:] != places[j][1:] for i, j in wrong)
            if others and all(self._without_offset(i, j, places, index, positives) for i, j in wrong):
                masked = self.processes.facts["probed_as"] in SEVERAL_POSITIVES
                return f"{POSITIVE_MASK if masked else OFFSET}: {example}"
            return f"{ORDER}: {example}"
        known = {-1: "a positive pair", 0: "left out", 1: "a negative pair"}
        for i, j in changed:
            inside = places[i][0] == places[j][0] > 0
            if not inside and not (places[i][0] > 0 and self._without_offset(i, j, places, index, positives)):
                return ""
        if changed:
            i, j = changed[0]
            return f"{MASK}: {shown(i, j)} are not {known[int(true[i, j])]}, but they are in one process"
        if within and (words := self.self_pairs(shared)):
            return words
        if left_out and self.world > 1:
            return f"{MASK}: on ranks above 0, a row and the row of rank 0 with its number are left out"
        return self.partly(shared, rows, whole, zero)

    def partly(self, shared: _Shared, rows: list[list[Tensor]], true: Tensor, zero: float) -> str:
        """Return the mistake if two kinds of rows are contrasted within ranks only; "" if there is none.

        ``true`` are the coefficients of one process. Below the share ``zero`` of the largest one, they count as 0.
        """
        found, least = torch.zeros_like(true), float(zero * true.abs().max())
        for gradients in rows:
            parts = [iter(one) for one in gradients]
            full = torch.stack([next(parts[rank]) for rank, _, _ in shared.places])
            found = found.maximum(self._coefficients(shared, full).abs())
        owners, kinds = (torch.tensor([place[k] for place in shared.places]) for k in (0, 1))
        remote = owners[:, None] != owners
        used, within = found.maximum(found.T) > least, ~remote & ~torch.eye(len(true), dtype=torch.bool)
        for a, b in combinations_with_replacement(sorted({*kinds.tolist()}, reverse=True), 2):
            pairs = (kinds[:, None] == a) & (kinds == b)
            needed, kept = (true.abs() > least) & remote & pairs, used & pairs
            if needed.any() and (kept & within).any() and not (kept & remote).any():
                one, other = ("hard negative" if kind < 0 else f"row of view {kind}" for kind in (a, b))
                return f"{PARTLY}: a {one} and a {other} are contrasted only if they are on the same rank"
        return ""

    def self_pairs(self, shared: _Shared) -> str:
        """Return the mistake if self pairs are not left out; "" if they are, or if this is unknown.

        In one process, the loss of equal rows must be that of orthogonal rows: only differences of similarities count.
        On a rank that does not leave out self pairs, their similarity of 1 makes a difference among orthogonal rows.
        """
        units = torch.eye(len(shared.projection), dtype=torch.float64)[: len(shared.places)]
        batches = [shared.with_rows(rows) for rows in (units[[0] * len(units)], units)]
        try:
            self.processes.ranks.join(self.world)
            found = [[one["value"] for one in self.processes.together(batch)] for batch in batches]
            alone = [self.processes.alone(batch.whole, batch.projection).loss for batch in batches]
        except TargetError:
            return ""
        ranks = [rank for rank, values in enumerate(zip(*found, strict=True)) if not _unchanged(*values)]
        if not (ranks and _unchanged(*alone) and all(math.isfinite(value) for values in found for value in values)):
            return ""
        where = f"on rank {', '.join(map(str, ranks))}, but not in one process"
        words = f"self pairs count {where}: the loss depends on the similarity of a row to itself"
        return f"{SELF_PAIRS if 0 in ranks else MASK}: {words}"

    @property
    def views(self) -> int:
        """The number of views of an item; 1 with labels or similarities."""
        return 1 if self.processes.facts["probed_as"] in ("labels", "similarities") else 2

    @staticmethod
    def _without_offset(
        i: int, j: int, places: list[tuple[int, int, int]], index: Mapping[Any, int], positives: Tensor
    ) -> bool:
        """Return whether the pair would be positive, or a self pair, if its row on rank 0 were on the other's rank."""
        if places[i][0] == 0:
            i, j = j, i
        rank, (other, kind, k) = places[i][0], places[j]
        meant = index.get((rank, kind, k))
        return other == 0 < rank and meant is not None and bool(positives[i, meant])

    @staticmethod
    def _coefficients(shared: _Shared, gradient: Tensor) -> Tensor:
        """Return the coefficients of all rows in the gradient of each row."""
        found: Tensor = gradient @ torch.linalg.pinv(shared.rows)
        return found

    @property
    def factors(self) -> dict[str, float | None]:
        """The factor of each part: 1, the world size or its inverse; None if it is another one, or none."""
        known = (float(self.world), 1 / self.world, 1.0)
        pairs = _pairs(self.true, _mean(self.answers))
        return {part: next((c for c in known if _same(c * a, b)), None) for part, (a, b) in pairs.items()}

    def named(self, factors: Mapping[str, float | None], crosses: bool | None) -> dict[str, str]:
        """Name the parts that differ by a factor of the world size, and a gradient with a wrong direction.

        ``crosses`` is whether a gradient reaches the rows of other ranks; None if unknown.
        """
        known = {float(self.world): TIMES_WORLD, 1 / self.world: BY_WORLD, 1.0: ""}
        names = {part: known[c].format(_title(part)) for part, c in factors.items() if c is not None}
        if factors.get(PROJECTION, 1.0) == 1 / self.world and crosses is False:
            names[PROJECTION] += f": {UNDIFFERENTIATED}, and every rank returns the loss of all rows"
        if factors["loss"] is not None and factors.get(PROJECTION, 1.0) is None and crosses is not None:
            names[PROJECTION] = CROSSING if crosses else UNDIFFERENTIATED
            if not crosses:
                other = ": the loss of a rank has no gradient with respect to the rows of other ranks"
                names[PROJECTION] += other if self.world > 1 else ": without a group, the gathered rows have one"
            if factors["loss"] == self.world > 1:
                names[PROJECTION] += ", and the loss is multiplied by the world size"
        return names


def joined(name: str, parts: Sequence[Batch], projection: Tensor, views: int) -> _Shared:
    """Return the batch of all ranks: all first views, then all second views."""
    items = [len(part.embeddings) // views for part in parts]
    before = [0, *accumulate(items)]
    total = before[-1]
    rows = [p.embeddings[v * n : (v + 1) * n] for v in range(views) for p, n in zip(parts, items, strict=True)]
    places = [(rank, v, k) for v in range(views) for rank, n in enumerate(items) for k in range(n)]
    first = parts[0]

    def moved(rank: int, row: int) -> int:
        view, k = divmod(row, items[rank])
        return view * total + before[rank] + k

    labels = pairs = None
    if first.call == "partners":
        labels = [0] * (total * views)
        for rank, part in enumerate(parts):
            for row, partner in enumerate(part.labels or ()):
                labels[moved(rank, row)] = moved(rank, partner)
    elif first.labels is not None:
        labels = [label for part in parts for label in part.labels or ()]
    if first.positive_pairs is not None:
        pairs = [
            (moved(rank, i), moved(rank, j)) for rank, part in enumerate(parts) for i, j in part.positive_pairs or ()
        ]
    keywords = dict(first.keywords)
    if HARD in keywords:
        keywords[HARD] = torch.cat([part.keywords[HARD] for part in parts])
        places += [(rank, -1, k) for rank, n in enumerate(items) for k in range(n)]
    whole = Batch(name, first.call, torch.cat(rows), labels, pairs, first.n_views, keywords)
    return _Shared(name, list(parts), whole, places, projection)


def _mean(answers: Sequence[Mapping[str, Any]]) -> _Measured:
    """Return the mean over ranks. A missing gradient counts as 0, unless it is missing on every rank."""
    names = dict.fromkeys(name for one in answers for name, g in one["gradients"].items() if g is not None)
    gradients = {}
    for name in names:
        found = [one["gradients"][name] for one in answers]
        size = max(len(g) for g in found if g is not None)
        rows = [
            torch.zeros(size, dtype=torch.float64) if g is None else torch.tensor(g, dtype=torch.float64) for g in found
        ]
        gradients[name] = torch.stack(rows).mean(0)
    return _Measured(sum(one["value"] for one in answers) / len(answers), gradients)


def _pairs(true: _Measured, found: _Measured) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the losses and the gradients of both, by part. A missing gradient is 0."""
    loss = (torch.tensor([true.loss], dtype=torch.float64), torch.tensor([found.loss], dtype=torch.float64))
    gradients = {name: (g, found.gradients.get(name, torch.zeros_like(g))) for name, g in true.gradients.items()}
    return {"loss": loss, **gradients}


def _title(part: str) -> str:
    return {"loss": "loss", PROJECTION: "gradient"}.get(part, f"gradient of {part}")


def _same(expected: Tensor, given: Tensor) -> bool:
    return bool((expected - given).norm() <= EQUAL * expected.norm())


def _unchanged(before: float, after: float) -> bool:
    return abs(before - after) <= UNCHANGED * abs(before)


def _difference_in_words(true: Tensor, found: Tensor) -> str:
    if len(true) == 1:
        return f"{float(found[0]):.6g} instead of {float(true[0]):.6g}"
    norm, size = float(true.norm()), float(found.norm())
    if not (norm and size and math.isfinite(size)):
        return f"its norm is {size:.4g} instead of {norm:.4g}"
    cosine = float(true @ found) / norm / size
    return f"its norm is {size / norm:.4g} times that of one process, the cosine of both is {cosine:.4g}"


def _comparison(name: str, one: _Difference, batches: int, mistake: str) -> Comparison:
    """Return the comparison of one part. ``mistake`` is a name, or a name and an explanation after a colon."""
    if one.ratio > 1:
        words = f"{one.batch}: {one.words}" + (f". {mistake}" if mistake else "")
        mistake = mistake.partition(": ")[0]
        return Comparison(name, DIFFERS, words, one.relative, one.allowed, one.batch, mistake, one.factor)
    message = f"{batches} batch{'es' * (batches > 1)}, relative difference at most {one.relative:.1g}"
    return Comparison(
        name, PASSED, f"{message} (allowed {one.allowed:.1g})", one.relative, one.allowed, one.batch, "", one.factor
    )


def _note_on_ranks(facts: Mapping[str, Any]) -> str:
    passed = [*facts["passed"]]
    ways = "each rank is a process with an initialised group of torch.distributed (gloo)"
    alone = "without a group" if facts["alone"] else "in a group of one process, because it fails without a group"
    passes = f", and gets the parameter{'s' * (len(passed) > 1)} {', '.join(passed)}" if passed else ""
    return f"ranks: {ways}{passes}; the single process evaluates the loss {alone}"


@contextmanager
def _each_warning_once() -> Iterator[None]:
    """Show each warning of the ``with`` block once, at its end, because every rank gives the same ones."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        yield
    for one in {(one.category, str(one.message)): one for one in shown}.values():
        with suppress(Warning):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


def compare_processes(result: ParityResult) -> None:
    """Compare the target of a result in several processes with one process, and add the comparisons to the result.

    Raises:
        CouldNotRun: the target cannot be called, or cannot run in other processes.
        UsageError: an option contradicts the others.
        TargetError: the target cannot be loaded.
    """
    request = result.request
    if not all(1 <= world <= MOST for world in request.world_size):
        raise UsageError(
            f"--world-size: expected numbers from 1 to {MOST}, got {', '.join(map(str, request.world_size))}"
        )
    if request.device != "cpu":
        raise UsageError("--world-size: the ranks are processes on the CPU; --device is not possible")
    if not torch.distributed.is_available():
        raise CouldNotRun("--world-size: this torch has no torch.distributed")
    given = request.target, request.call, request.arrays, request.init, request.result, request.against, request.scale
    subject = Subject(*given)
    with closing(Ranks(subject, request.limit)) as ranks, _each_warning_once():
        try:
            facts = ranks.settle()
        except CannotFork as reason:
            raise CouldNotRun(f"several processes are not possible: {reason}") from None
        result.call, result.version = facts["call"], facts["version"]
        processes = Processes(request, facts, ranks)
        result.notes, result.arrivals = processes.notes, processes.arrivals
        processes.prepare()
        result.comparisons += processes.comparisons()
