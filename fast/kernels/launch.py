"""The kernels as one evaluation: forward and backward of a described batch, on tensors of one device.

Everything is queued on the current stream and nothing is read back. Buffers are linear in the number of rows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..engine.spec import LN2, UNSHIFTED, Rule, Targets
from . import STATS, anchors, gradient, positives, rows, sums
from .table import Kernel, Kind, Launch, launch_of

PAD = 128
"""Rows are padded to a multiple of this, which every tile divides."""
LINES = 128
"""Anchors of one program where each is a few numbers."""
FEW = 32
"""Embeddings of one program that makes them ready, or their gradients."""
NARROW = 64
"""Entries of these that it takes at a time: with more, some compiler spills a register or two."""
REACH = 4096.0
"""Factor that keeps weights of float16 within its range: they are at most 8 by themselves."""
WAVES = 4
"""Programs per multiprocessor that columns are shared out for, where there are few rows."""
SHARES = 16
"""The most programs that share one panel's columns: each leaves a part to be added."""

Observer = Callable[[str, dict[str, Any]], None]
observers: list[Observer] = []
"""Called with a kernel's name and its compile-time arguments whenever one is queued."""


class Traits(NamedTuple):
    """How rows are multiplied.

    Attributes:
        kind: "pieces" for float32, "tf32" where that was asked for, else the dtype's name.
        raw: rows are as they were given, and their scale is applied to products.
        pieces: how many matrices make the rows.
        dtype: of these matrices.
    """

    kind: Kind
    raw: bool
    pieces: int
    dtype: torch.dtype


def traits_of(dtype: torch.dtype, *, tf32: bool) -> Traits:
    """Return how rows of a dtype are multiplied."""
    if dtype == torch.float32:
        return Traits("tf32", False, 1, torch.float32) if tf32 else Traits("pieces", False, 3, torch.bfloat16)
    return Traits("bfloat16" if dtype == torch.bfloat16 else "float16", True, 1, dtype)


def padded_dim(dim: int) -> int:
    """Return the length that rows of ``dim`` are padded to: tiles are powers of two wide."""
    return max(16, triton.next_power_of_2(dim)) if dim <= 256 else -(-dim // 128) * 128


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on the CPU."""
    return not isinstance(sums.sums_plain, triton.JITFunction)


def capability_of(tensor: Tensor) -> int:
    """Return the compute capability times ten; 90 for the interpreter, which has none."""
    if tensor.device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return 10 * major + minor


def empty(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return memory that kernels fill: the one place where it comes from, so that tests can poison and count it."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def _queue(kernel: Any, grid: tuple[int, ...], *given: Any, **flags: Any) -> None:
    for observe in observers:
        observe(kernel.fn.__name__, flags)
    if interpreted():
        # Its numpy warns of infinities that a device takes for granted.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            kernel[grid](*given, **flags)
    else:
        kernel[grid](*given, **flags)


def on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which kernels are queued on the tensor's device."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()


@dataclass(frozen=True)
class Side:
    """One matrix of rows, made ready.

    Attributes:
        given: ``[count, D]``, as the caller gave it.
        order: int64 ``[count]``, the given row that stands at each place, or None.
        x: ``[pieces, pad, dim]``.
        scale: ``[pad]``, reciprocal norms of rows times ``power``; 1 under "dot".
        power: ``[pad]``, powers of two.
        label: int64 ``[pad]``.
        itself: int32 ``[pad]``, which column is the row itself, -1 where none is.
        bounds: int64, flat: smallest and largest label and own number of tiles of 128, of 64 and of 32 rows.
    """

    given: Tensor
    order: Tensor | None
    x: Tensor
    scale: Tensor
    power: Tensor
    label: Tensor
    itself: Tensor
    bounds: Tensor

    @property
    def count(self) -> int:
        """Rows."""
        return self.given.shape[0]

    @property
    def pad(self) -> int:
        """Rows with those that pad them."""
        return self.x.shape[1]

    @property
    def dim(self) -> int:
        """Padded length of a row."""
        return self.x.shape[2]

    @property
    def places(self) -> Tensor:
        """The order, or in its place something that is not read."""
        return self.label if self.order is None else self.order

    def bounds_of(self, rows: int) -> Tensor:
        """Return the bounds of tiles of so many rows."""
        before = {128: 0, 64: self.pad // 128, 32: self.pad // 128 + self.pad // 64}[rows]
        return self.bounds[4 * before :]


@dataclass(frozen=True)
class Marks:
    """Where positives are not told by labels: a mask of bytes, or each row's positives one row behind the other.

    Attributes:
        how: "labels", "mask" or "pairs".
        marks: the mask, or int32 columns; not read for labels.
        ends: int32 ``[N + 1]``, where each row's columns begin.
        back_marks: the same pairs seen from their other row.
        back_ends: where those begin.
        strides: of the mask.
    """

    how: str
    marks: Tensor
    ends: Tensor
    back_marks: Tensor
    back_ends: Tensor
    strides: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Problem:
    """A batch as the kernels take it.

    Attributes:
        anchors: the rows.
        columns: what they are contrasted with; the same object where there are no references.
        marks: where labels do not tell who is positive.
        constants: what products are multiplied by to be logits, and the same over log 2.
        traits: how rows are multiplied.
        cosine: whether rows have norm 1.
        fixed: whether one exponential serves both directions.
        terms: as in `Rule`.
        denominator: as in `Rule`, but "own" where positives of one row have different ones.
    """

    anchors: Side
    columns: Side
    marks: Marks
    constants: Tensor
    traits: Traits
    cosine: bool
    fixed: bool
    terms: str
    denominator: str

    @property
    def softmax(self) -> bool:
        """Whether an anchor's value is made of sums of exponentials over negatives and over positives."""
        return self.terms in ("out", "in", "lse")

    @property
    def plain(self) -> bool:
        """Whether tiles without a positive are told beforehand, and left to the kernels without a mask."""
        return self.softmax and self.marks.how == "labels"

    def flags(self, launch: Launch) -> dict[str, Any]:
        """Return what every kernel of tiles is told at compile time."""
        return {
            "RAW": self.traits.raw,
            "PIECES": self.traits.pieces,
            "DIM": self.anchors.dim,
            "WIDEN": interpreted(),
            "BK": launch.part,
            "BM": launch.rows,
            "BN": launch.columns,
            "num_warps": launch.warps,
            "num_stages": launch.stages,
        }

    def turned(self) -> Problem:
        """Return the same with the columns as anchors."""
        return replace(self, anchors=self.columns, columns=self.anchors)

    def launch(self, kernel: Kernel) -> Launch:
        """Return the tile of a kernel."""
        return launch_of(kernel, self.traits.kind, self.anchors.dim, capability_of(self.anchors.given))


def set_up(
    embeddings: Tensor,
    references: Tensor | None,
    own: Tensor | None,
    targets: Targets,
    rule: Rule,
    *,
    held: torch.dtype,
    tf32: bool,
) -> Problem:
    """Make a batch ready.

    Args:
        embeddings: ``[N, D]``.
        references: ``[M, D]`` or None.
        own: what `References.own` holds.
        targets: who is whose positive.
        rule: the formula.
        held: a dtype that holds every entry of the embeddings and references exactly: theirs, or a narrower one.
        tf32: whether float32 rows may be multiplied in TF32.
    """
    traits = traits_of(held, tf32=tf32)
    cosine = rule.similarity == "cosine"
    temperature = rule.temperature
    constants = _Constants(empty((2,), embeddings, torch.float32), temperature)
    anchors_side, columns_side = _sides(embeddings, references, own, targets, constants, cosine, traits)
    # The largest logit there can be, and the sum of as many exponentials: one then serves both directions of a pair.
    count = max(anchors_side.count, columns_side.count)
    moderate = not isinstance(temperature, Tensor) and 1 / temperature + math.log(count) <= UNSHIFTED[torch.float32]
    # Where every row has one positive, its denominator is everyone's.
    own_denominator = rule.denominator == "one_positive" and targets.kind != "partners"
    problem = Problem(
        anchors_side,
        columns_side,
        _marks(targets, anchors_side),
        constants.place,
        traits,
        cosine,
        False,
        rule.terms,
        "own" if own_denominator else "all" if rule.denominator == "one_positive" else rule.denominator,
    )
    return replace(problem, fixed=cosine and moderate and problem.plain)


class _Constants(NamedTuple):
    """Where the constants stand, and the temperature that they are made of."""

    place: Tensor
    temperature: float | Tensor


def _sides(
    embeddings: Tensor,
    references: Tensor | None,
    own: Tensor | None,
    targets: Targets,
    constants: _Constants,
    cosine: bool,
    traits: Traits,
) -> tuple[Side, Side]:
    labels = targets.given if targets.kind in ("labels", "partners") else None
    # Sorted by label, positives are neighbours, and few tiles hold any.
    order = torch.argsort(targets.given, stable=True) if targets.kind == "labels" else None
    if references is None:
        named = {"labels": "given", "partners": "paired"}.get(targets.kind, "never")
        side = _side(embeddings, order, labels, named, None, "place", constants, cosine, traits)
        return side, side
    selves = "never" if own is None else "given"
    named = "never" if labels is None else "given"
    columns_named = "given" if targets.kind == "labels" else "place"
    columns_order = None
    if targets.columns is not None:
        columns_order = torch.argsort(targets.columns, stable=True)
        if own is not None:
            place = torch.empty_like(columns_order)
            place[columns_order] = torch.arange(place.shape[0], device=place.device)
            own = torch.where(own >= 0, place[own.clamp(min=0)], -1)
    return (
        _side(embeddings, order, labels, named, own, selves, constants, cosine, traits),
        _side(references, columns_order, targets.columns, columns_named, None, "place", constants, cosine, traits),
    )


def _side(
    given: Tensor,
    order: Tensor | None,
    labels: Tensor | None,
    named: str,
    selves: Tensor | None,
    own: str,
    constants: _Constants,
    cosine: bool,
    traits: Traits,
) -> Side:
    """Make one matrix ready; ``named`` and ``own`` are LABELS and SELVES of `rows.prepare_labels`."""
    count, dim = given.shape
    pad, wide = -(-count // PAD) * PAD, padded_dim(dim)
    side = Side(
        given,
        order,
        empty((traits.pieces, pad, wide), given, traits.dtype),
        empty((pad,), given, torch.float32),
        empty((pad,), given, torch.float32),
        empty((pad,), given, torch.int64),
        empty((pad,), given, torch.int32),
        empty((4 * (pad // 128 + pad // 64 + pad // 32),), given, torch.int64),
    )
    temperature, ordered = constants.temperature, order is not None
    learned = isinstance(temperature, Tensor)
    known = 1.0 if isinstance(temperature, Tensor) else 1 / temperature
    _queue(
        rows.prepare_labels,
        (pad // PAD,),
        temperature.to(given.device) if isinstance(temperature, Tensor) else constants.place,
        *(known, known / LN2),
        *(side.places, side.label if labels is None else labels.contiguous()),
        side.itself if selves is None else selves.contiguous(),
        *(constants.place, side.label, side.itself, side.bounds, count, pad),
        LEARNED=learned,
        ORDERED=ordered,
        LABELS=named,
        SELVES=own,
        BM=PAD,
    )
    _queue(
        rows.prepare,
        (pad // FEW,),
        *(given, side.places, side.x, side.scale, side.power, count, dim, pad, *given.stride()),
        COSINE=cosine,
        RAW=traits.raw,
        PIECES=traits.pieces,
        ORDERED=ordered,
        DIM=wide,
        WIDTH=min(wide, NARROW),
        BM=FEW,
    )
    return side


def _marks(targets: Targets, side: Side) -> Marks:
    given, unread = targets.given, side.itself
    if targets.kind == "mask":
        return Marks("mask", given.view(torch.uint8), unread, unread, unread, (given.stride(0), given.stride(1)))
    if targets.kind == "pairs":
        return Marks("pairs", *_listed(given, side.count), *_listed(given.flip(1), side.count))
    return Marks("labels", unread, unread, unread, unread)


def _listed(pairs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return each row's positives one row behind the other, ascending, and where each row's begin: int32, unread."""
    first, second = pairs.unbind(1)
    order = torch.argsort(first * count + second)
    ends = torch.searchsorted(first[order].contiguous(), torch.arange(count + 1, device=pairs.device))
    # One more, so that an empty list has an address.
    return torch.cat((second[order], second.new_zeros(1))).to(torch.int32), ends.to(torch.int32)


class _Split(NamedTuple):
    """How a kernel's tiles are shared out: panels of rows, tiles of columns per share, shares."""

    panels: int
    share: int
    shares: int


def _split(launch: Launch, x: Side, y: Side) -> _Split:
    panels, tiles = -(-x.count // launch.rows), -(-y.count // launch.columns)
    shares = 2
    if x.given.device.type == "cuda":
        shares = -(-WAVES * torch.cuda.get_device_properties(x.given.device).multi_processor_count // panels)
    share = -(-tiles // max(1, min(shares, SHARES, tiles)))
    return _Split(panels, share, -(-tiles // share))


class Found(NamedTuple):
    """What the forward pass leaves.

    Attributes:
        values: ``[N]``.
        positives: int64 ``[N]``.
        negatives: int64 ``[N]``.
        stats: ``[STATS, N]``, for the backward pass.
    """

    values: Tensor
    positives: Tensor
    negatives: Tensor
    stats: Tensor


def forward(problem: Problem, chosen: Tensor | None, *, mutual: bool = False) -> Found:
    """Queue the forward pass.

    Args:
        problem: what `set_up` returned.
        chosen: bool ``[N]``, which rows are anchors; None: all.
        mutual: whether the columns are anchors too; what is found for them follows.
    """
    if not mutual:
        return _forward(problem, chosen)
    found = (_forward(problem, None), _forward(problem.turned(), None))
    return Found(*(torch.cat(pair, dim=-1) for pair in zip(*found, strict=True)))


def _forward(problem: Problem, chosen: Tensor | None) -> Found:
    x, y = problem.anchors, problem.columns
    plain, marked = problem.launch("sums_plain"), problem.launch("sums_marked")
    split, more = _split(plain, x, y), _split(marked, x, y)
    before = split.shares if problem.plain else 0
    parts = empty((before + more.shares, sums.LINES.value, x.pad), x.given, torch.float32)
    if problem.plain:
        _queue(
            sums.sums_plain,
            (split.panels, split.shares),
            *(x.x, y.x, x.scale, y.scale, x.bounds_of(plain.rows), y.bounds_of(plain.columns)),
            *(problem.constants, parts, x.count, y.count, x.pad, y.pad, split.share),
            FIXED=problem.fixed,
            **problem.flags(plain),
        )
    of_pairs = (x.x, y.x, x.scale, y.scale, x.label, y.label, x.itself, y.itself)
    around = (x.bounds_of(plain.rows), y.bounds_of(plain.columns))
    grouped = {"MARKS": problem.marks.how, "GROUP_ROWS": plain.rows, "GROUP": plain.columns}
    _queue(
        sums.sums_marked,
        (more.panels, more.shares),
        *(*of_pairs, *around, problem.marks.marks, problem.marks.ends, problem.constants, parts),
        *(x.count, y.count, x.pad, y.pad, more.share, before, *problem.marks.strides),
        TERMS="softmax" if problem.softmax else problem.terms,
        **grouped,
        **problem.flags(marked),
    )
    stats = empty((STATS, x.count), x.given, torch.float32)
    values = empty((x.count,), x.given, torch.float32)
    sizes = [empty((x.count,), x.given, torch.int64) for _ in range(2)]
    told = {"TERMS": problem.terms, "ORDERED": x.order is not None, "BM": LINES}
    _queue(
        anchors.combine,
        (x.pad // LINES,),
        *(parts, stats, x.itself, x.itself if chosen is None else chosen.contiguous().view(torch.uint8), x.places),
        *(values, *sizes, x.count, y.count, x.pad, before + more.shares),
        DENOMINATOR=problem.denominator,
        FIXED=problem.fixed,
        SOME=chosen is not None,
        **told,
    )
    if problem.denominator == "own" or problem.terms == "epsilon":
        again = problem.launch("positives")
        split = _split(again, x, y)
        parts = empty((split.shares, positives.LINES.value, x.pad), x.given, torch.float32)
        _queue(
            positives.positives,
            (split.panels, split.shares),
            *(*of_pairs, *around, problem.marks.marks, problem.constants, stats, parts),
            *(x.count, y.count, x.pad, y.pad, split.share, *problem.marks.strides),
            TERMS="epsilon" if problem.terms == "epsilon" else "own",
            **grouped,
            **problem.flags(again),
        )
        _queue(
            anchors.combine_positives,
            (x.pad // LINES,),
            *(parts, stats, x.places, values, x.count, x.pad, split.shares),
            **told,
        )
    return Found(values, sizes[0], sizes[1], stats)


def backward(
    problem: Problem, grad: Tensor, stats: Tensor, *, learned: bool, mutual: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Queue the backward pass.

    Args:
        problem: what `set_up` returned.
        grad: ``[N]``, by the values.
        stats: what `forward` left.
        learned: whether the temperature wants a gradient.
        mutual: as in `forward`.

    Returns:
        The gradients by anchors and by columns (None where they are the same rows), and where a temperature is learned
        the sum over rows of their products with their gradients, float64.
    """
    x, y = problem.anchors, problem.columns
    grad = grad.contiguous()
    largest = torch.where(stats[anchors.COUNTED.value] != 0, grad, 0.0).abs().amax().float()
    if x is y:
        coef = _coefficients(problem, grad, largest, stats)
        by_rows, along = _pull(problem, x, x, coef, coef, (1, 1), largest, learned=learned)
        return by_rows, None, along
    if mutual:
        coef = _coefficients(problem, grad[: x.count], largest, stats[:, : x.count].contiguous())
        back = _coefficients(problem.turned(), grad[x.count :], largest, stats[:, x.count :].contiguous())
    else:
        coef = _coefficients(problem, grad, largest, stats)
        back = torch.zeros((gradient.COEFFICIENTS.value, y.pad), dtype=torch.float32, device=coef.device)
    by_rows, along = _pull(problem, x, y, coef, back, (1, int(mutual)), largest, learned=learned)
    by_columns, more = _pull(problem, y, x, back, coef, (int(mutual), 1), largest, learned=learned)
    return by_rows, by_columns, along + more if along is not None and more is not None else None


def _coefficients(problem: Problem, grad: Tensor, largest: Tensor, stats: Tensor) -> Tensor:
    x = problem.anchors
    coef = empty((gradient.COEFFICIENTS.value, x.pad), x.given, torch.float32)
    _queue(
        anchors.coefficients,
        (x.pad // LINES,),
        *(grad, largest, stats, x.itself, x.places, coef, x.count, problem.columns.count, x.pad),
        TERMS=problem.terms,
        DENOMINATOR=problem.denominator,
        ORDERED=x.order is not None,
        BM=LINES,
    )
    return coef


def _pull(
    problem: Problem,
    x: Side,
    y: Side,
    x_coef: Tensor,
    y_coef: Tensor,
    roles: tuple[int, int],
    largest: Tensor,
    *,
    learned: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient by the embeddings of x, and the sum of their products; roles tell which side has anchors."""
    reach = REACH if problem.traits.kind == "float16" else 1.0
    plain, marked = problem.launch("gradient_plain"), problem.launch("gradient_marked")
    split, more = _split(plain, x, y), _split(marked, x, y)
    before = split.shares if problem.plain else 0
    parts = empty((before + more.shares, x.pad, x.dim), x.given, torch.float32)
    if problem.plain:
        _queue(
            gradient.gradient_plain,
            (split.panels, split.shares, x.dim // plain.out),
            *(x.x, y.x, x.scale, y.scale, x.bounds_of(plain.rows), y.bounds_of(plain.columns), x_coef, y_coef),
            *(problem.constants, parts, x.count, y.count, x.pad, y.pad, split.share, *roles),
            FIXED=problem.fixed,
            REACH=reach,
            OUT=plain.out,
            **problem.flags(plain),
        )
    marks = problem.marks
    _queue(
        gradient.gradient_marked,
        (more.panels, more.shares, x.dim // marked.out),
        *(x.x, y.x, x.scale, y.scale, x.label, y.label, x.itself, y.itself),
        *(x.bounds_of(plain.rows), y.bounds_of(plain.columns)),
        *(marks.marks, marks.ends, marks.back_marks, marks.back_ends, x_coef, y_coef, problem.constants, parts),
        *(x.count, y.count, x.pad, y.pad, more.share, before, *roles, *marks.strides),
        1.0 if problem.terms == "in" else 0.0,
        TERMS=("own" if problem.denominator == "own" else "softmax") if problem.softmax else problem.terms,
        MARKS=marks.how,
        GROUP_ROWS=plain.rows,
        GROUP=plain.columns,
        REACH=reach,
        OUT=marked.out,
        **problem.flags(marked),
    )
    out = empty(tuple(x.given.shape), x.given, x.given.dtype)
    along = empty((x.count if learned else 1,), x.given, torch.float32)
    _queue(
        rows.finish,
        (-(-x.count // FEW),),
        *(x.given, x.places, x.scale, x.power, parts, problem.constants, largest, out, along),
        *(x.count, x.given.shape[1], x.pad, before + more.shares, *x.given.stride()),
        COSINE=problem.cosine,
        REACH=reach,
        ORDERED=x.order is not None,
        LEARNED=learned,
        DIM=x.dim,
        WIDTH=min(x.dim, NARROW),
        BM=FEW,
        WIDEN=interpreted(),
    )
    return out, along.sum(dtype=torch.float64) if learned else None
