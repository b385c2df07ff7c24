"""Check whether a loss value is plausible for a batch.

``diagnose`` compares a value with three *levels*: the lowest possible value ("lowest"), the value of random embeddings
("chance"), and the value of equal embeddings ("collapsed"). At a high temperature, or with one class, levels nearly
coincide, and the value alone cannot tell them apart. The embeddings can. The module needs only numpy, scipy and torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .suite.catalogue import IGNORED, PUBLISHED_BASE, REFERENCES, TOWER_TARGETS, WEIGHTS, Loss, find_loss
from .suite.machine import machine

Array = npt.NDArray[Any]

DRAWS = 16
"""Number of random batches for the level "chance"."""
SEED = 0
NEAR = 0.002
"""Relative difference up to which a value is near a level. For "chance", three standard deviations are added."""
LEAST = 1e-6
"""Absolute difference up to which a value is near a level: far above rounding errors, and below what logs print."""
COINCIDENCE = 1e-3
"""Random embeddings do not explain a value that is closer to "collapsed" than this fraction of their standard
deviation: fewer than one random batch in a thousand comes that close."""
SOLVED = 0.01
"""A value is also near "lowest" if it is at most ``SOLVED * abs(chance - lowest)`` away."""
EQUAL = 0.99
"""Embeddings are collapsed only if the mean cosine of two rows is at least this."""
LEARNED = 0.1
"""Embeddings are random only if the mean cosine to positives exceeds that to negatives by less than this."""
FAR = (0.5, 2.0)
"""Under dot products, rows with norms outside these limits are called not normalised."""
ALIKE = 0.1
"""All similarities are nearly equal if a value is closer to "collapsed" than this fraction of the way to "chance"."""
ORDER = "check that labels, views and towers are in the same order"
"""What to check if positives are no more similar than negatives, which also makes an encoder collapse."""
UNTRAINED = ", or is untrained and its rows share a direction"
DIM = 128
"""Default number of columns of random embeddings."""
SATURATED = 1e-6
"""The softmax is saturated if the norm of the gradient is below this fraction of the norm at random embeddings."""
ROUNDING = 1e-12
"""Gradients below this fraction of the norm at random embeddings are rounding errors, and count as 0."""


@dataclass(frozen=True)
class Levels:
    """Values to compare a printed loss with. All include ``factor``.

    Attributes:
        lowest: a lower bound on the loss of all batches with these class sizes; None if no bound is known.
        attained: whether some embeddings reach the bound. False with a queue, whose rows are earlier keys.
        chance: mean loss of random embeddings.
        spread: standard deviation of the loss of random embeddings.
        collapsed: loss of equal embeddings.
        started: mean loss of equal embeddings with a queue of random rows, as at the start of training; None without a
            queue.
        started_spread: its standard deviation.
        factor: temperature / base_temperature; 1 without a base temperature.
    """

    lowest: float | None
    attained: bool
    chance: float
    spread: float
    collapsed: float
    started: float | None
    started_spread: float
    factor: float


@dataclass(frozen=True)
class Rows:
    """Properties of the embeddings.

    Attributes:
        count: number of rows, of both towers and the queue together.
        dim: number of columns.
        zero: number of rows of zeros.
        not_finite: number of rows with NaN or an infinity.
        duplicates: number of rows with the direction of an earlier row, compared in float32.
        lowest_norm: the lowest norm of a row.
        highest_norm: the highest norm of a row.
        positive_cosine: mean cosine of the positive pairs; NaN if there are none.
        negative_cosine: mean cosine of the negative pairs; NaN if there are none.
        mean_cosine: mean cosine of two rows of one matrix, for the matrix where it is lowest; NaN for a single row.
    """

    count: int
    dim: int
    zero: int
    not_finite: int
    duplicates: int
    lowest_norm: float
    highest_norm: float
    positive_cosine: float
    negative_cosine: float
    mean_cosine: float


@dataclass(frozen=True)
class Gradient:
    """The gradient of the loss with respect to the embeddings.

    Attributes:
        norm: the norm of the gradient.
        rows_without: number of rows whose gradient is 0.
        at_chance: the norm of the gradient at random embeddings. Their rows have the norms of the given rows for
            "cosine", and norm 1 for "dot".
    """

    norm: float
    rows_without: int
    at_chance: float


@dataclass(frozen=True)
class Diagnosis:
    """The result of ``diagnose``.

    Attributes:
        loss: short name of the loss.
        value: the given value, or the last one of ``values``; by default ``computed``.
        values: the value of every step; () if they were not given.
        computed: the loss of the embeddings; None without embeddings, or if their loss is undefined.
        classes: number of classes; None for a loss of partners or of two towers.
        positives: mean number of positives per anchor.
        lonely: number of anchors without positives.
        levels: the values to compare with.
        rows: properties of the embeddings; None without embeddings.
        gradient: the gradient; None if ``computed`` is None.
        near: all levels that the value is near, in the order "lowest", "chance", "collapsed", "started": it differs by
            at most 0.2 %, from "chance" also by three standard deviations, and from "lowest" by 1 % of the distance to
            "chance". If the value is that of the embeddings, without those that the embeddings contradict.
        problems: what is wrong, and where to look next.
        hints: what may be wrong, but may also be intended.
    """

    loss: str
    value: float | None
    values: tuple[float, ...]
    computed: float | None
    classes: int | None
    positives: float
    lonely: int
    levels: Levels
    rows: Rows | None
    gradient: Gradient | None
    near: tuple[str, ...]
    problems: tuple[str, ...]
    hints: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """1 if there are problems, otherwise 0."""
        return int(bool(self.problems))

    @property
    def crossings(self) -> tuple[int, ...]:
        """The steps, counted from 1, at which the values pass from above "chance" to below it, or back."""
        steps = [(k, x < self.levels.chance) for k, x in enumerate(self.values, 1) if not math.isnan(x)]
        return tuple(step for (_, before), (step, below) in pairwise(steps) if below != before)

    def as_json(self) -> dict[str, Any]:
        """Return the diagnosis as a JSON value, with null for numbers that are not finite."""

        def plain(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: plain(item) for name, item in value.items()}
            if isinstance(value, (list, tuple)):
                return [plain(item) for item in value]
            return None if isinstance(value, float) and not math.isfinite(value) else value

        return {"format": "pairproof-diagnosis/1", "machine": machine(), **plain(asdict(self))}

    def lines(self) -> Iterator[str]:
        """Yield the lines that ``pairproof diagnose`` prints."""
        levels, rows, gradient = self.levels, self.rows, self.gradient
        kinds = "" if self.classes is None else f"{self.classes} classes, "
        yield f"{self.loss}: {kinds}positives per anchor {self.positives:.4g}, anchors without positives {self.lonely}"
        if self.value is not None:
            of_step = ", that of the last step" if self.values else ""
            yield f"  value       {self.value:.6g}{of_step}{f', near {_listed(self.near)}' if self.near else ''}"
        if self.values:
            ends = f"{self.values[0]:.6g} to {self.values[-1]:.6g}"
            yield f"  curve       {len(self.values)} steps from {ends}; {self._path()}"
        if self.computed is not None and not _close(self.value, self.computed, relative=LEAST):
            yield f"  computed    {self.computed:.6g}, the loss of these embeddings"
        if levels.lowest is not None:
            reached = "reached by the best embeddings" if levels.attained else "a bound that may not be reached"
            yield f"  lowest      {levels.lowest:.6g}, {reached}"
        spread = f"{levels.spread:.2g} (standard deviation of {DRAWS} draws, seed {SEED})"
        yield f"  chance      {levels.chance:.6g} ± {spread}, random embeddings"
        yield f"  collapsed   {levels.collapsed:.6g}, all embeddings equal"
        if levels.started is not None:
            spread = f"± {levels.started_spread:.2g}"
            yield f"  started     {levels.started:.6g} {spread}, all embeddings equal, and a new queue of random rows"
        if levels.factor != 1:
            yield f"  all values include temperature / base_temperature = {levels.factor:.6g}"
        if rows is not None:
            yield (
                f"  embeddings  {rows.count} rows of {rows.dim} numbers, norms {rows.lowest_norm:.4g} to"
                f" {rows.highest_norm:.4g}; {rows.zero} zero rows, {rows.not_finite} with NaN or infinity,"
                f" {rows.duplicates} with the direction of an earlier row"
            )
            yield (
                f"  cosines     {rows.positive_cosine:.4f} to positives, {rows.negative_cosine:.4f} to negatives,"
                f" {rows.mean_cosine:.4f} between any two rows of one matrix"
            )
        if gradient is not None:
            yield (
                f"  gradient    norm {gradient.norm:.4g}, {gradient.at_chance:.4g} for random embeddings;"
                f" {gradient.rows_without} rows without gradient"
            )
        yield from (f"  problem: {text}" for text in self.problems)
        yield from (f"  hint: {text}" for text in self.hints)

    def _path(self) -> str:
        """Say on which side of "chance" the values are, and where they crossed it."""
        finite = [x for x in self.values if not math.isnan(x)]
        if not finite:
            return "all are NaN"
        side = "below" if finite[-1] < self.levels.chance else "above"
        if not self.crossings:
            return f"always {side} {self.levels.chance:.4g}, chance at this temperature"
        times = f"{len(self.crossings)} times, last " if len(self.crossings) > 1 else ""
        return f"crossed chance {times}at step {self.crossings[-1]}, and {side} it since"


def lowest_value(
    kinds: Sequence[tuple[int, int, int]], denominator: str, temperature: float, *, drop: bool = False
) -> float:
    """Lower bound on SupCon and NT-Xent under cosine similarity, for given class sizes.

    Let an anchor have P positives and N negatives, and let n be its mean cosine with the negatives. By Jensen's
    inequality, and because a cosine is at most 1, the value of the anchor is at least f((n - 1) / temperature), where

        f(x) = log(P + N e^x)   for the denominator "all"
        f(x) = log(1 + N e^x)   for "one_positive"
        f(x) = log N + x        for "only_negatives"

    f is convex, so anchors of the same kind (equal P and N) can share one n. The bound is the minimum over n under one
    constraint: the squared norm of the sum of all unit rows is not negative. This norm is at most the sum of
    1 + P + N n over the anchors.

    The minimum is computed from the Lagrangian dual. Every value of the dual is a lower bound, so the result is valid
    even if the search is not exact.

    If all classes have the same size, the minimum is at n = -1 / (classes - 1). Embeddings reach this minimum if each
    class is one corner of a regular simplex.

    Args:
        kinds: (P, N, number of anchors) of every kind of anchor.
        denominator: "all", "one_positive" or "only_negatives".
        temperature: positive number.
        drop: whether anchors without positives are left out of the mean; otherwise they count as 0.

    Returns:
        The bound; 0 if no anchor has positives.

    Source:
        Graf et al. 2021, "Dissecting supervised contrastive learning", arXiv 2102.08817, theorem 2, for balanced
        classes; Lu and Steinerberger 2022, arXiv 2012.08465, for one positive.
    """
    total = sum(count for P, _, count in kinds if P or not drop)
    with_negatives = [N for _, N, _ in kinds if N]
    if not total or not with_negatives:
        own = sum(count * math.log(P) for P, _, count in kinds if P)
        return own / max(total, 1) if denominator == "all" else 0.0

    def value(positives: int, negatives: int, n: float) -> float:
        if not positives or (not negatives and denominator == "only_negatives"):
            return 0.0
        x = (n - 1) / temperature
        if denominator == "only_negatives":
            return math.log(negatives) + x
        own = positives if denominator == "all" else 1
        return math.log(own) + math.log1p(negatives / own * math.exp(x))

    def best(positives: int, negatives: int, price: float) -> float:
        """The minimum over n of value - price * (1 + P + N n), where ``price`` is the Lagrange multiplier."""
        ends = [-1.0, 1.0]
        slope = price * negatives * temperature
        if positives and denominator != "only_negatives" and 0 < slope < 1:
            own = positives if denominator == "all" else 1
            ends.append(min(1.0, max(-1.0, 1 + temperature * math.log(own * slope / (negatives * (1 - slope))))))
        return min(value(positives, negatives, n) - price * (1 + positives + negatives * n) for n in ends)

    def dual(price: float) -> float:
        return sum(count * best(P, N, price) for P, N, count in kinds)

    from scipy.optimize import minimize_scalar  # takes 0.4 s, and few commands need it

    # Above the highest price, n = 1 is the minimum for every kind, and the dual decreases.
    breaks = [1 / (N * temperature) for N in with_negatives]
    highest = max(breaks)
    found = minimize_scalar(lambda price: -dual(price), bounds=(0.0, highest), options={"xatol": 1e-12 * highest})
    return max(map(dual, (0.0, float(found.x), *breaks))) / total


def lowest_of_towers(n: int, temperature: float) -> float:
    """Lower bound on InfoNCE of two towers of n rows under cosine similarity.

    Let d_i be the mean cosine of anchor i with its negatives, minus its cosine with its positive. By Jensen's
    inequality, the value of the anchor is at least f(d_i / temperature), where f(x) = log(1 + (n - 1) e^x). f is
    convex, so the loss is at least f(d / temperature), where d is the mean of all d_i.

    Let a and b be the mean rows of the towers. Then -(n - 1) d is the sum of (a_i - a) . (b_i - b), which is at most n.
    So d is at least -n / (n - 1).

    Args:
        n: number of rows of each tower.
        temperature: positive number.

    Returns:
        The bound. It is reached if both towers are the corners of a regular simplex.
    """
    return math.log1p((n - 1) * math.exp(-n / ((n - 1) * temperature))) if n > 1 else 0.0


def diagnose(
    embeddings: npt.ArrayLike | Tensor | None = None,
    labels: npt.ArrayLike | Tensor | None = None,
    *,
    loss: str = "supcon",
    value: float | None = None,
    values: npt.ArrayLike | Tensor | None = None,
    class_sizes: Sequence[int] | None = None,
    embeddings_b: npt.ArrayLike | Tensor | None = None,
    partners: npt.ArrayLike | Tensor | None = None,
    negatives: npt.ArrayLike | Tensor | int | None = None,
    dim: int = DIM,
    **options: Any,
) -> Diagnosis:
    """Report whether a loss value is plausible for a batch, and whether the embeddings can still improve.

    The value of a contrastive loss says little by itself. The lowest possible value is rarely 0, and a collapsed
    encoder can have a lower loss than random embeddings. If the value is near several levels (see ``Diagnosis.near``),
    it does not tell them apart; pass the embeddings then.

    Pass the embeddings of one batch, or the sizes of its classes and the value that the training loop prints.

    Example:
        >>> import pairproof
        >>> found = pairproof.diagnose(class_sizes=[2] * 256, value=8.909, temperature=0.1, base_temperature=0.07)
        >>> print(found.near, f"{found.levels.collapsed:.4f}")
        ('collapsed',) 8.9091

    Args:
        embeddings: [N, D], the embeddings of one batch; for two towers, those of the first.
        labels: [N] integers, for losses that take labels, and for nt_bxent, where all pairs of a class are positives.
        loss: short name of a loss, as ``pairproof list`` prints it.
        value: the value that the training loop prints; by default the loss of the embeddings.
        values: [T], the value of every step of a run, in place of ``value``, which is the last one.
        class_sizes: without embeddings, the number of rows of every class. For a loss of partners or of two towers, a 2
            for each positive pair.
        embeddings_b: [N, D], the second tower.
        partners: [N] integers, the row of the positive of every row; by default rows k and k + N / 2 are partners (two
            stacked views).
        negatives: [K, D], the queue of info_nce; with class_sizes, the number K of its rows.
        dim: number of columns of the random embeddings if no embeddings are given.
        options: options of the loss, such as ``temperature``.

    Returns:
        The diagnosis. ``lines()`` yields what ``pairproof diagnose`` prints.

    Raises:
        TypeError: an argument has the wrong type or dtype, or the loss has no such option.
        ValueError: an argument has the wrong shape or value, the loss is unknown, both or neither of embeddings and
            class_sizes are given, or both value and values.
    """
    entry = find_loss(loss)
    unknown = [name for name in options if name not in entry.keywords or name in REJECTED]
    if unknown:
        raise TypeError(f"{unknown[0]}: {entry.function} has no such option, or diagnose does not accept it")
    if options.get("reduction", "mean") != "mean":
        raise ValueError(f"reduction: expected 'mean', got {options['reduction']!r}")
    if (embeddings is None) == (class_sizes is None):
        got = "neither" if embeddings is None else "both"
        raise ValueError(f"embeddings: expected exactly one of embeddings and class_sizes, got {got}")
    steps = () if values is None else _steps(values)
    if steps and value is not None:
        raise ValueError("value: expected at most one of value and values, got both")
    value = steps[-1] if steps else value
    batch = _of_sizes(entry, class_sizes, dim) if embeddings is None else None
    if batch is None:
        batch = _of_embeddings(entry, embeddings, labels, embeddings_b, partners)
    batch = _queued(replace(batch, options=options), negatives, of_sizes=embeddings is None)
    kinds = batch.kinds()
    levels = _levels(batch, kinds, given=embeddings is not None)
    rows = gradient = computed = None
    if embeddings is not None:
        rows = _rows(batch)
        if not rows.not_finite and not (rows.zero and batch.refuses_zero_rows):
            computed, gradient = _gradient(batch)
    value = computed if value is None else float(value)
    measured = rows if computed is not None and _close(value, computed) else None
    anchors = sum(count for _, _, count in kinds)
    found = Diagnosis(
        loss=entry.name,
        value=value,
        values=steps,
        computed=computed,
        classes=None if batch.labels is None else len(torch.unique(batch.labels)),
        positives=sum(P * count for P, _, count in kinds) / anchors,
        lonely=sum(count for P, _, count in kinds if not P),
        levels=levels,
        rows=rows,
        gradient=gradient,
        near=_near(value, levels) if measured is None else _near(computed, levels, measured),
        problems=(),
        hints=(),
    )
    return replace(found, problems=tuple(_problems(found, batch)), hints=tuple(_hints(found, batch)))


REJECTED = (*(*REFERENCES, *IGNORED, *WEIGHTS, *TOWER_TARGETS), *("anchors", "hard_negatives", "direction_weights"))
"""Keywords that ``diagnose`` rejects, because the levels would depend on more than the classes."""


@dataclass(frozen=True)
class _Batch:
    """A batch, and how its loss is called.

    Attributes:
        entry: the loss.
        matrices: float64 [N, D]: the embeddings, or both towers; then the queue [K, D], if there is one.
        labels: int64 [N]; None if the loss does not need labels.
        partners: int64 [N]; None if the loss does not need partners.
        options: options of the loss.
    """

    entry: Loss
    matrices: tuple[Tensor, ...]
    labels: Tensor | None = None
    partners: Tensor | None = None
    options: Any = None

    def __post_init__(self) -> None:
        # Options may be learned.
        options = {name: x.detach() if isinstance(x, Tensor) else x for name, x in (self.options or {}).items()}
        object.__setattr__(self, "options", options)

    @property
    def queue(self) -> tuple[Tensor, ...]:
        """The queue, or () if there is none."""
        return self.matrices[2:]

    def option(self, name: str) -> Any:
        return self.options.get(name, self.entry.default(name, ("negatives",) if self.queue else ()))

    @property
    def refuses_zero_rows(self) -> bool:
        return bool(self.option("similarity") == "cosine" and self.option("zero_row") != "zero")

    def loss(self, *matrices: Tensor) -> Tensor:
        """Return the loss of other matrices with the positives of this batch."""
        targets: tuple[Tensor, ...] = ()
        if self.entry.positives_by == "pairs":
            assert self.labels is not None
            same = self.labels[:, None] == self.labels
            targets = (same.fill_diagonal_(False).nonzero(),)
        elif self.labels is not None:
            targets = (self.labels,)
        elif self.partners is not None:
            targets = (self.partners,)
        queue = dict(zip(["negatives"], matrices[2:], strict=False))
        value: Tensor = self.entry.fast(*matrices[:2], *targets, **queue, **self.options)
        return value

    def kinds(self) -> tuple[tuple[int, int, int], ...]:
        """Return the argument ``kinds`` of ``lowest_value``."""
        n = len(self.matrices[0])
        if self.entry.two_towers:
            negatives = len(self.queue[0]) if self.queue else n - 1
            return ((1, negatives, n * (1 + (self.option("direction") == "both"))),)
        if self.labels is None:
            return ((1, n - 2, n),)
        sizes, counts = torch.unique(torch.unique(self.labels, return_counts=True)[1], return_counts=True)
        return tuple(
            (size - 1, n - size, size * count) for size, count in zip(sizes.tolist(), counts.tolist(), strict=True)
        )


def _of_sizes(entry: Loss, class_sizes: Sequence[int] | None, dim: int) -> _Batch:
    sizes = [int(size) for size in class_sizes or ()]
    if not sizes or min(sizes) < 1:
        raise ValueError(f"class_sizes: expected positive numbers of rows, got {list(class_sizes or ())}")
    pairs = entry.two_towers or entry.positives_by == "partners"
    if pairs and set(sizes) != {2}:
        raise ValueError(
            f"class_sizes: expected 2 for every positive pair of {entry.function}, got {sorted(set(sizes))}"
        )
    if dim < 1:
        raise ValueError(f"dim: expected at least 1, got {dim}")
    if entry.two_towers:
        return _Batch(entry, (torch.zeros(len(sizes), dim, dtype=torch.float64),) * 2)
    rows = torch.zeros(sum(sizes), dim, dtype=torch.float64)
    if pairs:
        return _Batch(entry, (rows,), partners=torch.arange(len(rows)) ^ 1)
    return _Batch(entry, (rows,), torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)))


def _queued(batch: _Batch, negatives: Any, *, of_sizes: bool) -> _Batch:
    """Return a batch with a queue, if one is given; ``of_sizes``: as a number of rows."""
    if negatives is None:
        return batch
    if "negatives" not in batch.entry.keywords:
        raise TypeError(f"negatives: {batch.entry.function} has no such option")
    if of_sizes and not (isinstance(negatives, int) and negatives > 0):
        raise ValueError(f"negatives: expected a positive number of rows with class_sizes, got {negatives!r}")
    dim = batch.matrices[0].shape[1]
    queue = torch.zeros(negatives, dim, dtype=torch.float64) if of_sizes else _matrix("negatives", negatives)
    return replace(batch, matrices=(*batch.matrices, queue))


def _steps(values: Any) -> tuple[float, ...]:
    """Return the values of all steps."""
    found = torch.as_tensor(values).detach().to("cpu", torch.float64)
    if found.ndim != 1 or not len(found):
        raise ValueError(f"values: expected shape [T] with a value for every step, got shape {list(found.shape)}")
    return tuple(found.tolist())


def _matrix(name: str, given: Any) -> Tensor:
    """Return a matrix in float64 on the CPU."""
    found = torch.as_tensor(given).detach().to("cpu", torch.float64)
    if found.ndim != 2 or not found.numel():
        raise ValueError(f"{name}: expected shape [N, D], got shape {list(found.shape)}")
    return found


def _of_embeddings(entry: Loss, embeddings: object, labels: object, embeddings_b: object, partners: object) -> _Batch:
    """Return a batch of these arrays, in float64 on the CPU."""

    def integers(name: str, given: Any, n: int) -> Tensor:
        found = torch.as_tensor(given).detach().cpu()
        if found.is_floating_point() or found.shape != (n,):
            raise ValueError(f"{name}: expected {n} integers, got shape {list(found.shape)} and dtype {found.dtype}")
        return found.to(torch.int64)

    given = {"labels": labels, "embeddings_b": embeddings_b, "partners": partners}
    takes = {"labels": "labels", "pairs": "labels", "towers": "embeddings_b", "partners": "partners"}[
        entry.positives_by
    ]
    for name, array in given.items():
        if array is not None and name != takes:
            raise ValueError(f"{name}: expected {takes} for {entry.function}, got {name}")
    if given[takes] is None and takes != "partners":
        raise ValueError(f"{takes}: required by {entry.function}, got none")
    rows = _matrix("embeddings", embeddings)
    if entry.two_towers:
        return _Batch(entry, (rows, _matrix("embeddings_b", embeddings_b)))
    if takes == "labels":
        return _Batch(entry, (rows,), integers("labels", labels, len(rows)))
    if partners is None and len(rows) % 2:
        raise ValueError(f"partners: required for an odd number of rows ({len(rows)}), got none")
    stacked = torch.arange(len(rows)).roll(len(rows) // 2)
    return _Batch(entry, (rows,), partners=stacked if partners is None else integers("partners", partners, len(rows)))


def _random(batch: _Batch, draw: int, norms: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Return matrices of random rows with norm 1, or with the given norms [N, 1]."""
    generator = torch.Generator().manual_seed(SEED + draw)
    shapes = [matrix.shape for matrix in batch.matrices]
    found = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    found = [matrix / matrix.norm(dim=1, keepdim=True) for matrix in found]
    return found if norms is None else [matrix * norm for matrix, norm in zip(found, norms, strict=True)]


def _levels(batch: _Batch, kinds: tuple[tuple[int, int, int], ...], *, given: bool) -> Levels:
    """Compute the levels of a batch. For dot products, random rows get the norms of the given embeddings."""
    entry, temperature = batch.entry, float(batch.option("temperature"))
    base = batch.option("base_temperature")
    factor = 1.0 if base is None else temperature / float(base)
    norms = None
    if given and batch.option("similarity") == "dot":
        norms = [matrix.norm(dim=1, keepdim=True).nan_to_num() for matrix in batch.matrices]
    collapsed, chance, started = math.nan, list[float](), list[float]()
    for draw in range(DRAWS):
        random = _random(batch, draw, norms)
        chance.append(float(batch.loss(*random)))
        if draw and not batch.queue:
            continue
        first = [random[0] if entry.two_towers else matrix for matrix in random]
        equal = [one[:1].expand(len(matrix), -1).contiguous() for one, matrix in zip(first, random, strict=True)]
        if not draw:
            collapsed = float(batch.loss(*equal))
        started.append(float(batch.loss(*equal[:2], *random[2:])))
    lowest = None
    if batch.option("similarity") == "cosine" and entry.name in BOUNDED:
        default = "one_positive" if entry.name == "nt_xent_pairwise" else "all"
        drop = batch.option("no_positive") == "drop"
        if batch.queue:
            lowest = math.log1p(kinds[0][1] * math.exp(-2 / temperature))  # positives are equal, negatives opposite
        elif entry.two_towers:
            lowest = lowest_of_towers(len(batch.matrices[0]), temperature)
        elif batch.option("inside_reduction") != "sum":
            denominator = batch.options.get("denominator", default)
            lowest = lowest_value(kinds, denominator, temperature, drop=drop)
    n, classes = len(batch.matrices[0]), sum(count // (P + 1) for P, _, count in kinds)
    corners = n if entry.two_towers else classes
    return Levels(
        lowest=None if lowest is None else factor * lowest,
        attained=not (lowest is None or batch.queue or len(kinds) > 1) and batch.matrices[0].shape[1] >= corners - 1,
        chance=float(np.mean(chance)),
        spread=float(np.std(chance, ddof=1)),
        collapsed=collapsed,
        started=float(np.mean(started)) if batch.queue else None,
        started_spread=float(np.std(started, ddof=1)) if batch.queue else 0.0,
        factor=factor,
    )


BOUNDED = ("supcon", "supcon_in", "nt_xent", "nt_xent_pairwise", "info_nce")
"""Losses with a known lower bound."""


def _rows(batch: _Batch) -> Rows:
    matrices = batch.matrices
    every = torch.cat(matrices)
    finite = every.isfinite().all(dim=1)
    norms = every[finite].norm(dim=1)
    unit = torch.nn.functional.normalize(every[finite & (every != 0).any(dim=1)], dim=1)
    positive, negative = _cosines(batch) if bool(finite.all()) else (math.nan, math.nan)
    return Rows(
        count=len(every),
        dim=every.shape[1],
        zero=int((norms == 0).sum()),
        not_finite=int((~finite).sum()),
        duplicates=len(unit) - len(torch.unique(unit.float(), dim=0)),
        lowest_norm=float(norms.min()) if len(norms) else math.nan,
        highest_norm=float(norms.max()) if len(norms) else math.nan,
        positive_cosine=positive,
        negative_cosine=negative,
        mean_cosine=min(map(_mean_cosine, matrices)),
    )


def _mean_cosine(matrix: Tensor) -> float:
    """Return the mean cosine of two rows; NaN for a single row."""
    unit, n = torch.nn.functional.normalize(matrix, dim=1), len(matrix)
    return float(unit.sum(dim=0).square().sum() - unit.square().sum()) / (n * (n - 1)) if n > 1 else math.nan


def _cosines(batch: _Batch) -> tuple[float, float]:
    unit = [torch.nn.functional.normalize(matrix, dim=1) for matrix in batch.matrices]
    n = len(unit[0])
    if batch.entry.two_towers:
        own, every = float((unit[0] * unit[1]).sum()), float(unit[0].sum(dim=0) @ unit[1].sum(dim=0))
        if batch.queue:
            return own / n, float(unit[0].mean(dim=0) @ unit[2].mean(dim=0))
        return own / n, (every - own) / (n * (n - 1)) if n > 1 else math.nan
    selves, every = float((unit[0] ** 2).sum()), float((unit[0].sum(dim=0) ** 2).sum())
    if batch.labels is None:
        own, pairs = float((unit[0] * unit[0][batch.partners]).sum()), n
    else:
        _, places, sizes = torch.unique(batch.labels, return_inverse=True, return_counts=True)
        sums = torch.zeros(len(sizes), unit[0].shape[1], dtype=torch.float64).index_add_(0, places, unit[0])
        own, pairs = float((sums**2).sum()) - selves, int((sizes * (sizes - 1)).sum())
    others = n * (n - 1) - pairs
    return own / pairs if pairs else math.nan, (every - selves - own) / others if others else math.nan


def _gradient(batch: _Batch) -> tuple[float, Gradient]:

    def gradient(matrices: Sequence[Tensor]) -> tuple[float, Tensor]:
        leaves = [matrix.clone().requires_grad_() for matrix in matrices[:2]]
        value = batch.loss(*leaves, *matrices[2:])
        if not value.requires_grad:
            return float(value), torch.zeros(sum(map(len, leaves)))
        return float(value.detach()), torch.cat(torch.autograd.grad(value, leaves)).norm(dim=1)

    value, rows = gradient(batch.matrices)
    # Unit vectors for "dot": large dot products would saturate the softmax at random embeddings, too.
    cosine = batch.option("similarity") == "cosine"
    norms = [matrix.norm(dim=1, keepdim=True) for matrix in batch.matrices] if cosine else None
    at_chance = float(gradient(_random(batch, 0, norms))[1].norm())
    rows = rows.where(rows > ROUNDING * at_chance, 0)
    return value, Gradient(float(rows.norm()), int((rows == 0).sum()), at_chance)


def _close(value: float | None, level: float | None, relative: float = NEAR, more: float = 0.0) -> bool:
    """Whether both are given, and the value is within a relative difference, plus ``more``, of the level."""
    if value is None or level is None:
        return False
    return abs(value - level) <= relative * abs(level) + more + LEAST


def _near(value: float | None, levels: Levels, rows: Rows | None = None) -> tuple[str, ...]:
    """Return the levels that a value is near. If it was computed from rows, they decide between levels."""
    gap = 0.0 if levels.lowest is None else SOLVED * abs(levels.chance - levels.lowest)
    found = {
        # A computed value is exact, so only its share of the gap counts, which is small at any temperature.
        "lowest": _close(value, levels.lowest, NEAR if rows is None else 0.0, gap),
        "chance": _close(value, levels.chance, more=3 * levels.spread),
        "collapsed": _close(value, levels.collapsed),
        "started": _close(value, levels.started, more=gap + 3 * levels.started_spread),
    }
    if rows is None:
        found["chance"] &= not _close(value, levels.collapsed, 0.0, COINCIDENCE * levels.spread - LEAST)
    else:
        equal = rows.mean_cosine >= EQUAL
        learned = rows.positive_cosine - rows.negative_cosine >= LEARNED
        found["chance"] &= not (equal or learned or found["lowest"])
        found["collapsed"] &= equal
        found["started"] &= rows.positive_cosine >= EQUAL and not equal
        found["lowest"] &= not found["started"]
    return tuple(name for name, near in found.items() if near)


def _solved(found: Diagnosis) -> bool:
    """Whether the value is the lowest, and not that of other embeddings, unless these are among the best."""
    lowest = found.levels.lowest
    if lowest is None or "lowest" not in found.near:
        return False
    measured = found.computed is not None and _close(found.value, found.computed)
    return measured or all(_close(getattr(found.levels, name), lowest, relative=0) for name in found.near)


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(map(repr, names[:-1])), repr(names[-1])]))


def _problems(found: Diagnosis, batch: _Batch) -> Iterator[str]:
    levels, rows, gradient, value = found.levels, found.rows, found.gradient, found.value
    if rows is not None and rows.not_finite:
        yield "Some embeddings are NaN or infinite: look at the encoder's output and at the step before this one."
    if rows is not None and rows.zero and batch.refuses_zero_rows:
        yield "Some embeddings are zero, where cosine similarity is undefined: look for dead units in the last layer."
    if value is not None and math.isnan(value):
        yield "The value is NaN: run pairproof check on the function that printed it."
    lowest = -math.inf if levels.lowest is None else levels.lowest
    if value is not None and value < lowest and not _close(value, lowest):
        yield (
            "The value is below the lowest: the function that printed it computes another loss, or has another"
            " temperature. Run pairproof identify on it."
        )
    if value is not None and found.computed is not None and not _close(value, found.computed):
        yield (
            "The value is not the loss of these embeddings at this temperature: pass the one that the value was"
            " computed with, or run pairproof check on the function that printed it."
        )
    if found.near == ("collapsed",):
        words = "The value is that of equal embeddings, whose gradient is 0"
        if rows is None:
            words += f": the encoder has collapsed{UNTRAINED}"
            if _close(value, levels.chance, more=3 * levels.spread):
                words += "; fewer than one random batch in a thousand comes this close"
            words += ". Compare the embeddings of a batch; if they are nearly equal, restart"
        elif rows.mean_cosine >= EQUAL:
            words += f", and these are nearly equal: the encoder has collapsed{UNTRAINED}."
            words += f" {ORDER.capitalize()}; then restart"
        else:
            words += ", but these are not nearly equal: pass those of the batch with this value. If they are, restart"
        yield f"{words} with a warm-up or a lower learning rate."
    elif gradient is None or (_solved(found) and not _close(levels.chance, levels.lowest, relative=0)):
        return
    elif gradient.norm == 0:
        yield "The gradient is 0, so these embeddings do not change in training."
    elif gradient.norm < SATURATED * gradient.at_chance:
        yield "The gradient is less than a millionth of that of random embeddings: the softmax is saturated."


def _hints(found: Diagnosis, batch: _Batch) -> Iterator[str]:
    levels, rows, value = found.levels, found.rows, found.value
    factor = float(batch.option("temperature")) / PUBLISHED_BASE
    unscaled: tuple[str, ...] = ()
    computed = found.computed is not None and _close(value, found.computed)
    if value is not None and not (computed or found.near) and levels.factor == 1 and abs(factor - 1) > 2 * NEAR:
        unscaled = _near(value / factor, levels)
    if unscaled:
        yield (
            f"Divided by temperature / {PUBLISHED_BASE} = {factor:.4g}, the value is near {_listed(unscaled)}. The"
            " original SupCon code multiplies its loss by temperature / base_temperature; if yours does, repeat this"
            f" with base_temperature {PUBLISHED_BASE}."
        )
    else:
        yield from _between(found)
    lowest = -math.inf if levels.lowest is None else levels.lowest
    if value is not None and lowest <= value < 0 and batch.option("denominator") == "only_negatives":
        yield "A negative value is possible: the denominator only_negatives lacks the positives. 0 is no lower bound."
    if found.near == ("chance",):
        yield (
            f"The value is that of random embeddings: nothing has been learned yet. If it stays, {ORDER}, and that the"
            " gradient reaches the encoder."
        )
    if found.near == ("started",):
        yield (
            "The value is that of a new queue, whose rows are random. It rises while keys replace them, to"
            f" {levels.collapsed:.4g} if the embeddings stay nearly equal."
        )
    if _solved(found):
        assert value is not None
        assert levels.lowest is not None
        yield f"The batch is solved: the loss can fall by at most {max(value - levels.lowest, 0.0):.2g}."
    elif len(found.near) > 1:
        whose = "" if rows is None else " of the batch with this value"
        yield f"The value alone does not tell {_listed(found.near)} apart: pass the embeddings{whose}."
    if found.lonely:
        yield (
            f"{found.lonely} of the anchors have no positives and contribute no gradient as anchors: sample several"
            " rows per class, or two views of each."
        )
    if rows is not None:
        yield from _about_rows(rows, batch)


def _between(found: Diagnosis) -> Iterator[str]:
    """Yield where a value that is near no level lies."""
    levels, value, rows = found.levels, found.value, found.rows
    if value is None or found.near or math.isnan(value):
        return
    unlearned = rows is not None and _unlearned(rows)
    if levels.lowest is not None and levels.lowest < value < levels.chance:
        share = (levels.chance - value) / (levels.chance - levels.lowest)
        yield f"The value is {share:.0%} of the way from random embeddings to the lowest{_learned(found)}."
    elif value > levels.chance and unlearned:
        yield (
            f"The value is above that of random embeddings, and positives are no more similar than other rows: {ORDER}."
        )
    elif value > levels.chance:
        yield (
            "The value is above that of random embeddings: positives are further apart than other rows, or the function"
            " that printed it has another temperature."
        )
    alike = abs(value - levels.collapsed) <= ALIKE * abs(levels.chance - levels.collapsed)
    if alike and unlearned and rows is not None and rows.mean_cosine < EQUAL:
        yield (
            f"The value is near {levels.collapsed:.4g}: every row is as similar to its positive as to others, although"
            " rows differ. That is so before training, if rows share a direction, and after training on pairs that do"
            f" not belong together. If the value stays, {ORDER}."
        )


def _unlearned(rows: Rows) -> bool:
    """Whether positives are no more similar than negatives."""
    # Random directions differ by chance: one cosine by 1 / sqrt(D), the mean over half of the rows by less.
    chance = 3 / math.sqrt(rows.dim * max(1, rows.count // 2))
    return rows.positive_cosine - rows.negative_cosine <= chance


def _learned(found: Diagnosis) -> str:
    """Say whether a value between random embeddings and the lowest shows that something has been learned."""
    levels, rows = found.levels, found.rows
    if rows is not None:
        if _unlearned(rows):
            return ", but positives are no more similar than other rows: nothing has been learned yet"
    elif levels.started is None and 2 * (found.value or 0.0) > levels.collapsed + (levels.lowest or 0.0):
        others = (
            "an untrained encoder whose rows share a direction, or one trained on pairs that do not belong together,"
        )
        return f"; {others} can be there, too: pass the embeddings"
    if levels.started is not None and found.value is not None and found.value < levels.collapsed:
        return ": something has been learned, unless rows of the queue are still random: then the value rises"
    if rows is not None:
        return ": something has been learned, if the value was higher before the first step"
    return ": something has been learned"


def _about_rows(rows: Rows, batch: _Batch) -> Iterator[str]:
    """Yield what is remarkable in the norms and the cosines of the rows."""
    if batch.option("similarity") == "dot":
        lowest, highest = rows.lowest_norm, rows.highest_norm
        if lowest < FAR[0] or highest > FAR[1]:
            logit = highest**2 / float(batch.option("temperature"))
            yield (
                f"Rows are not normalised: their norms are {lowest:.4g} to {highest:.4g}, so logits can be {logit:.4g}."
                " Normalise them, or use cosine."
            )
        elif highest > (2 + NEAR) * lowest:
            yield "Dot products depend on the norms, which differ by more than a factor of 2: normalise, or use cosine."
    kinds, towers = batch.kinds(), batch.entry.two_towers
    # If both towers are equal, they count as one, without positives.
    if len(kinds) == 1 and kinds[0][1] and not batch.queue and (not towers or rows.positive_cosine > 1 - SOLVED):
        # The squared norm of the sum of all unit rows, n (1 + P p + N q), is not negative, and p is at most 1.
        positives, negatives, _ = kinds[0]
        if rows.negative_cosine <= -(1 - SOLVED) * (1 if towers else 1 + positives) / negatives:
            yield (
                f"The mean cosine to negatives, {rows.negative_cosine:.4g}, is as low as it can be: only with two"
                " classes could it be -1."
            )
