"""Queue the kernels of the forward and the backward pass of a batch, on tensors of one device.

All kernels run on the current stream, and no value is read back. Buffers are linear in the number of rows.

An argument has the same name in all kernels. `Side` and `Problem` provide arguments by these names, and `run` passes
each kernel the arguments in its signature.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..engine.spec import LN2, UNSHIFTED, AnchorValues, Batch, Gradients, Plan, Targets
from . import STATS, anchors, gradient, positives, rows, sums
from .table import PADDED, PLAIN, Kernel, Kind, Launch, launch_of

PAD = 128
"""Rows are padded to a multiple of this number. It is a multiple of the number of rows of every tile."""
LINES = 128
"""Anchors per program in kernels that process a few numbers per anchor."""
FEW = 32
"""Embeddings per program in the kernels that convert embeddings or gradients."""
NARROW = 64
"""Entries of an embedding that these programs process at a time; with more, some compilers spill registers."""
REACH = 4096.0
"""Factor that scales the gradient's float16 weights of pairs into the normal range; unscaled they are at most 8."""
WAVES = 4
"""Target number of programs per multiprocessor; if there are few rows, columns are split to reach it."""
SHARES = 16
"""Largest number of programs that split the columns of one panel; each writes a partial result."""

Arguments = dict[str, Any]
"""Arguments of kernels by name; names in capitals are compile-time constants."""


def kind_of(dtype: torch.dtype, *, tf32: bool) -> Kind:
    """Return how rows of a dtype are multiplied. "pieces" stores float32 rows as the sum of three bfloat16 matrices."""
    kinds: dict[torch.dtype, Kind] = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
    return kinds.get(dtype, "tf32" if tf32 else "pieces")


def padded_dim(dim: int) -> int:
    """Return the length that rows of ``dim`` are padded to."""
    return next(length for length in PADDED if length >= dim)


def interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels, on the CPU."""
    return not isinstance(sums.sums_plain, triton.JITFunction)


@cache
def capability_of(device: torch.device) -> int:
    """Return the compute capability times ten; 90 for the interpreter."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def multiprocessors_of(device: torch.device) -> int:
    """Return the number of multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def empty(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocate a buffer that kernels fill. All such buffers come from here, so that tests can poison and count them."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def run(kernel: Any, grid: tuple[int, ...], given: Arguments) -> None:
    """Queue a kernel with the arguments in its signature. All kernels are queued here."""
    taken = [given[name] for name in kernel.arg_names]
    options = {name: given[name] for name in ("num_warps", "num_stages") if name in given}
    if interpreted():
        # The interpreter uses numpy, which warns about infinities that are expected here.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            kernel[grid](*taken, **options)
    else:
        kernel[grid](*taken, **options)


def on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which kernels are queued on the tensor's device."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()


@dataclass(frozen=True)
class Side:
    """One matrix of rows, prepared for the kernels.

    Attributes:
        given: ``[count, D]``, the caller's tensor.
        order: int64 ``[count]``, the given row at each sorted position; None if rows keep their order.
        x: ``[pieces, pad, dim]``, the padded rows.
        scale: ``[pad]``, the reciprocal of the norm of each row after multiplication by ``power``; 1 under "dot".
        power: ``[pad]``, the power of two that scales each row into range; 1 under "dot".
        label: int64 ``[pad]``, the label of each row.
        itself: int32 ``[pad]``, the column that is the row itself, or -1.
        ident: int32 ``[pad]``, the rank of the id of each row; without ids, the same tensor as ``itself``.
        bounds: int64, flat: the smallest and largest ``label`` and ``itself`` of tiles of 128, of 64 and of 32 rows.
    """

    given: Tensor
    order: Tensor | None
    x: Tensor
    scale: Tensor
    power: Tensor
    label: Tensor
    itself: Tensor
    ident: Tensor
    bounds: Tensor

    @property
    def count(self) -> int:
        """The number of rows."""
        return self.given.shape[0]

    @property
    def pad(self) -> int:
        """The number of rows, with padding."""
        return self.x.shape[1]

    @property
    def dim(self) -> int:
        """The padded length of a row."""
        return self.x.shape[2]

    def bounds_of(self, rows: int) -> Tensor:
        """Return the bounds of tiles of ``rows`` rows."""
        before = {128: 0, 64: self.pad // 128, 32: self.pad // 128 + self.pad // 64}[rows]
        return self.bounds[4 * before :]

    def arguments(self) -> Arguments:
        """Return the arguments of kernels that process these rows."""
        row_stride, column_stride = self.given.stride()
        return {
            **{name: getattr(self, name) for name in ("given", "x", "scale", "power", "label", "itself", "bounds")},
            "order": self.label if self.order is None else self.order,
            **{"n": self.count, "dim": self.given.shape[1], "pad": self.pad},
            **{"row_stride": row_stride, "column_stride": column_stride},
            **{"ORDERED": self.order is not None, "DIM": self.dim, "WIDTH": min(self.dim, NARROW)},
        }


@dataclass(frozen=True)
class Problem:
    """A batch, prepared for the kernels.

    Attributes:
        batch: the description of the batch.
        anchors: the rows.
        columns: the rows that anchors are contrasted with; the same object as ``anchors`` without references.
        kind: how rows are multiplied.
        arguments: the arguments that are the same for all kernels.
    """

    batch: Batch
    anchors: Side
    columns: Side
    kind: Kind
    arguments: Arguments

    def turned(self) -> Problem:
        """Return the problem with rows and columns exchanged."""
        return replace(self, anchors=self.columns, columns=self.anchors)

    def launch(self, kernel: Kernel) -> Launch:
        """Return the tile that a kernel uses."""
        found = launch_of(kernel, self.kind, self.anchors.dim, capability_of(self.anchors.given.device))
        if kernel in PLAIN and self.arguments["IDS"] and self.arguments["MARKS"] == "pairs":
            found = found._replace(columns=16)  # lists of pairs and ids together take many registers
        return found

    def of_sides(self) -> Arguments:
        """Return the labels, the self pairs, the ids and the numbers of rows and columns."""
        x, y = self.anchors, self.columns
        return {
            **{"x_label": x.label, "x_self": x.itself, "x_ident": x.ident, "n": x.count},
            **{"y_label": y.label, "y_self": y.itself, "y_ident": y.ident, "m": y.count},
        }

    def along_rows(self, kernel: Any, programs: int, **more: Any) -> None:
        """Queue a kernel with one program per block of anchors.

        Args:
            kernel: a kernel of `anchors` or `rows`.
            programs: the number of programs.
            more: further arguments, in addition to those of the problem.
        """
        x = self.anchors
        run(kernel, (programs,), {**self.arguments, **x.arguments(), "m": self.columns.count, "BM": LINES, **more})

    def over_tiles(self, kernels: Sequence[Kernel], shape: tuple[int, ...], **more: Any) -> Tensor:
        """Queue kernels with one program per panel of rows and share of the columns.

        Args:
            kernels: the kernels, in this order. A plain kernel runs only for the terms in ``SOFTMAX``, only if labels
                show which tiles hold no positive, and only without ids of ignored pairs.
            shape: the shape of the result of one share of the columns.
            more: further arguments, in addition to those of the problem and the tile.

        Returns:
            float32 ``[shares, *shape]``, the partial results.
        """
        x, y = self.anchors, self.columns
        known = self.arguments
        plain = known["TERMS"] in SOFTMAX and known["MARKS"] == "labels" and not known["IDS"]
        taken = [kernel for kernel in kernels if plain or kernel in PLAIN]
        launches = [self.launch(kernel) for kernel in taken]
        splits = [_split(launch, x, y) for launch in launches]
        out = empty((sum(split.shares for split in splits), *shape), x.given, torch.float32)
        around, first = self.launch(PLAIN.get(taken[0], taken[0])), 0
        described = {
            **self.arguments,
            **self.of_sides(),
            **{"x": x.x, "x_scale": x.scale, "x_pad": x.pad, "y": y.x, "y_scale": y.scale, "y_pad": y.pad},
            **{"x_bounds": x.bounds_of(around.rows), "y_bounds": y.bounds_of(around.columns)},
            **{"GROUP_ROWS": around.rows, "GROUP": around.columns, "DIM": x.dim, "out": out},
        }
        for kernel, launch, split in zip(taken, launches, splits, strict=True):
            tile = {"BM": launch.rows, "BN": launch.columns, "BK": launch.part, "OUT": launch.out}
            tile |= {"num_warps": launch.warps, "num_stages": launch.stages}
            slabs = x.dim // launch.out if kernel.startswith("gradient") else 1
            grid = (split.panels, split.shares, slabs)
            run(TILED[kernel], grid, {**described, **tile, "share": split.share, "first_part": first, **more})
            first += split.shares
        return out


SOFTMAX = ("out", "in", "lse")
"""Terms that are computed from the sums of exponentials over negatives and over positives."""
TILED: dict[Kernel, Any] = {
    "sums_plain": sums.sums_plain,
    "sums_marked": sums.sums_marked,
    "positives": positives.positives,
    "gradient_plain": gradient.gradient_plain,
    "gradient_marked": gradient.gradient_marked,
}


def set_up(batch: Batch, plan: Plan) -> Problem:
    """Prepare a batch for the kernels."""
    rule, targets, given, others = batch.rule, batch.targets, batch.embeddings, batch.references.embeddings
    stored = batch.storage or given.dtype
    kind = kind_of(stored, tf32=plan.tf32)
    constants, learned = empty((3,), given, torch.float32), None
    if rule.terms == "sigmoid":
        constants[2].fill_(rule.bias)  # an assignment would copy from the CPU and wait for the device
    if isinstance(rule.temperature, Tensor):
        learned, reciprocal, largest = rule.temperature.to(given.device), 1.0, math.inf
    else:
        reciprocal = largest = 1 / rule.temperature
    # If sums of the largest possible exponentials are in range, no maximum is subtracted. A pair of rows has two terms
    # in the gradient, one with each row as the anchor. Without a maximum, both use the same exponential.
    count = max(given.shape[0], 0 if others is None else others.shape[0])
    moderate = rule.similarity == "cosine" and largest + math.log(count) <= UNSHIFTED[torch.float32]
    # If every row has one positive, the denominators "one_positive" and "all" are the same.
    own = rule.denominator == "one_positive" and targets.kind != "partners"
    arguments: Arguments = {
        "constants": constants,
        "temperature": constants if learned is None else learned,
        "reciprocal": reciprocal,
        "reciprocal_in_log2": reciprocal / LN2,
        "inside": 1.0 if rule.terms == "in" else 0.0,
        "averaged": 1.0 if rule.inside_reduction == "mean" else 0.0,
        "TERMS": "binary" if rule.terms == "sigmoid" else rule.terms,
        "SUMMED": rule.terms == "sigmoid",
        "IDS": targets.ids is not None,
        "DENOMINATOR": "own" if own else "all" if rule.denominator == "one_positive" else rule.denominator,
        "COSINE": rule.similarity == "cosine",
        "FIXED": moderate and rule.terms in SOFTMAX and targets.kind not in ("mask", "pairs") and targets.ids is None,
        "LEARNED": learned is not None,
        "REACH": REACH if kind == "float16" else 1.0,
        "RAW": stored != torch.float32,
        "PIECES": 3 if kind == "pieces" else 1,
        "WIDEN": interpreted(),
    }
    x, y = _sides(batch, torch.bfloat16 if kind == "pieces" else stored, arguments)
    return Problem(batch, x, y, kind, {**arguments, **_marks(targets, x)})


def _sides(batch: Batch, dtype: torch.dtype, arguments: Arguments) -> tuple[Side, Side]:
    """Prepare rows and references."""
    targets, others, own = batch.targets, batch.references.embeddings, batch.references.own
    labels = targets.given if targets.kind in ("labels", "partners") else None
    # Sorting by label makes positives neighbours, so that few tiles hold any.
    order = torch.argsort(targets.given, stable=True) if targets.kind == "labels" else None
    ids, of_columns = _ranked(targets)
    if others is None:
        named = {"labels": "given", "partners": "paired"}.get(targets.kind, "never")
        side = _side(batch.embeddings, order, dtype, arguments, labels, ids=ids, LABELS=named, SELVES="place")
        return side, side
    columns_order = None
    if targets.columns is not None:
        columns_order = torch.argsort(targets.columns, stable=True)
        if own is not None:
            place = torch.empty_like(columns_order)
            place[columns_order] = torch.arange(place.shape[0], device=place.device)
            own = torch.where(own >= 0, place[own.clamp(min=0)], -1)
    named, selves = ("never" if known is None else "given" for known in (labels, own))
    x = _side(batch.embeddings, order, dtype, arguments, labels, own, ids, LABELS=named, SELVES=selves)
    named = "place" if targets.columns is None else "given"
    y = _side(others, columns_order, dtype, arguments, targets.columns, ids=of_columns, LABELS=named, SELVES="place")
    return x, y


def _ranked(targets: Targets) -> tuple[Tensor | None, Tensor | None]:
    """Return the ids of rows and of references as int32 ranks; equal ids have equal ranks. No value is read back."""
    if targets.ids is None:
        return None, None
    every = targets.ids if targets.column_ids is None else torch.cat((targets.ids, targets.column_ids))
    ranks = torch.searchsorted(every.sort()[0], every, out_int32=True)
    return ranks[: targets.ids.shape[0]], ranks[targets.ids.shape[0] :]


def _side(
    given: Tensor,
    order: Tensor | None,
    dtype: torch.dtype,
    arguments: Arguments,
    labels: Tensor | None = None,
    selves: Tensor | None = None,
    ids: Tensor | None = None,
    **naming: str,
) -> Side:
    """Prepare one matrix as rows of a dtype; ``naming`` is LABELS and SELVES of `rows.prepare_labels`."""
    pad, dim = -(-given.shape[0] // PAD) * PAD, padded_dim(given.shape[1])
    itself = empty((pad,), given, torch.int32)
    ident = itself
    if ids is not None:
        ident = empty((pad,), given, torch.int32)
        ident[: given.shape[0]] = ids if order is None else ids[order]
    side = Side(
        given,
        order,
        empty((arguments["PIECES"], pad, dim), given, dtype),
        empty((pad,), given, torch.float32),
        empty((pad,), given, torch.float32),
        empty((pad,), given, torch.int64),
        itself,
        ident,
        empty((4 * (pad // 128 + pad // 64 + pad // 32),), given, torch.int64),
    )
    described = {**arguments, **side.arguments(), **naming}
    described["labels"] = side.label if labels is None else labels.contiguous()
    described["selves"] = side.itself if selves is None else selves.contiguous()
    run(rows.prepare_labels, (pad // PAD,), {**described, "BM": PAD})
    run(rows.prepare, (pad // FEW,), {**described, "BM": FEW})
    return side


def _marks(targets: Targets, side: Side) -> Arguments:
    """Return the arguments that describe the positives: labels, a mask of bytes, or lists of each row's positives."""
    given, names = targets.given, ("marks", "ends", "back_marks", "back_ends")
    found: Arguments = {"MARKS": "labels", "row_stride": 0, "column_stride": 0, **dict.fromkeys(names, side.itself)}
    if targets.kind == "mask":
        row_stride, column_stride = given.stride()
        found |= {"MARKS": "mask", "marks": given.view(torch.uint8)}
        found |= {"row_stride": row_stride, "column_stride": column_stride}
    elif targets.kind == "pairs":
        lists = (*_listed(given, side.count), *_listed(given.flip(1), side.count))
        found |= {"MARKS": "pairs", **dict(zip(names, lists, strict=True))}
    return found


def _listed(pairs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the positives of all rows, concatenated and ascending within a row, and each row's offset; int32.

    No value is read back from the device.
    """
    first, second = pairs.unbind(1)
    order = torch.argsort(first * count + second)
    ends = torch.searchsorted(first[order].contiguous(), torch.arange(count + 1, device=pairs.device))
    # One extra entry, so that an empty list has an address.
    return torch.cat((second[order], second.new_zeros(1))).to(torch.int32), ends.to(torch.int32)


class _Split(NamedTuple):
    """How a kernel's tiles are divided among programs: panels of rows, tiles of columns per share, and shares."""

    panels: int
    share: int
    shares: int


def _split(launch: Launch, x: Side, y: Side) -> _Split:
    panels, tiles = -(-x.count // launch.rows), -(-y.count // launch.columns)
    shares = 2
    if x.given.device.type == "cuda":
        shares = -(-WAVES * multiprocessors_of(x.given.device) // panels)
    share = -(-tiles // max(1, min(shares, SHARES, tiles)))
    return _Split(panels, share, -(-tiles // share))


def forward(problem: Problem) -> tuple[AnchorValues, Tensor]:
    """Queue the forward pass; return the values, and the statistics for the backward pass."""
    values, stats = _forward(problem, problem.batch.anchors)
    if not problem.batch.references.mutual:
        return values, stats
    back, back_stats = _forward(problem.turned(), None)
    both = AnchorValues(*(torch.cat(pair) for pair in zip(values, back, strict=True)))
    return both, torch.cat((stats, back_stats), dim=-1)


def _forward(problem: Problem, chosen: Tensor | None) -> tuple[AnchorValues, Tensor]:
    x, terms, own = problem.anchors, problem.arguments["TERMS"], problem.arguments["DENOMINATOR"] == "own"
    of_sums = "softmax" if terms in SOFTMAX else terms
    sums_of_shares = problem.over_tiles(("sums_plain", "sums_marked"), (sums.LINES.value, x.pad), TERMS=of_sums)
    omitted = x.itself
    if problem.arguments["IDS"]:
        omitted = empty((x.pad,), x.given, torch.int32)
        described = {**problem.arguments, **problem.of_sides(), "out": omitted, "BM": FEW, "COLUMNS": LINES}
        run(sums.omitted, (x.pad // FEW,), described)
    found = AnchorValues(*(empty((x.count,), x.given, dtype) for dtype in (torch.float32, torch.int64, torch.int64)))
    stats = empty((STATS, x.count), x.given, torch.float32)
    problem.along_rows(
        anchors.combine,
        x.pad // LINES,
        **{"sums": sums_of_shares, "parts": sums_of_shares.shape[0], "stats": stats, **found._asdict()},
        omitted=omitted,
        anchors=x.itself if chosen is None else chosen.contiguous().view(torch.uint8),
        SOME=chosen is not None,
    )
    if own or terms == "epsilon":
        of_shares = "own" if own else "epsilon"
        shares = problem.over_tiles(("positives",), (positives.LINES.value, x.pad), stats=stats, TERMS=of_shares)
        described = {"shares": shares, "parts": shares.shape[0], "stats": stats, "values": found.values}
        problem.along_rows(anchors.combine_positives, x.pad // LINES, **described)
    return found, stats


def backward(problem: Problem, grad: Tensor, stats: Tensor) -> Gradients:
    """Queue the backward pass.

    Args:
        problem: the result of `set_up`.
        grad: the gradient of each value that `forward` returned.
        stats: the statistics that `forward` returned.
    """
    x, y, grad = problem.anchors, problem.columns, grad.contiguous()
    temperature, mutual = problem.batch.rule.temperature, problem.batch.references.mutual
    largest = torch.where(stats[anchors.COUNTED.value] != 0, grad, 0.0).abs().amax().float()
    coef = _coefficients(problem, grad[: x.count], largest, stats[:, : x.count].contiguous())
    if x is y:
        back = coef
    elif mutual:
        back = _coefficients(problem.turned(), grad[x.count :], largest, stats[:, x.count :].contiguous())
    else:
        back = torch.zeros((gradient.COEFFICIENTS.value, y.pad), dtype=torch.float32, device=coef.device)
    found = [_gradient(problem, largest, x_coef=coef, y_coef=back, x_anchor=1, y_anchor=int(x is y or mutual))]
    if x is not y:
        roles = {"x_anchor": int(mutual), "y_anchor": 1}
        found.append(_gradient(problem.turned(), largest, x_coef=back, y_coef=coef, **roles))
    by_rows, by_columns = found[0][0], None if x is y else found[1][0]
    by_bias, bias = None, problem.batch.rule.bias
    if isinstance(bias, Tensor):
        ordered = grad if x.order is None else grad[x.order]
        by_bias = torch.linalg.vecdot(ordered.double(), stats[anchors.BY_BIAS.value].double()).to(bias.dtype)
    if not isinstance(temperature, Tensor):
        return by_rows, by_columns, None, by_bias
    # A logit is homogeneous of degree -1 in the temperature and of degree 2 in the rows.
    along = torch.cat([part for _, part in found]).sum(dtype=torch.float64)
    return by_rows, by_columns, (along / (-2 * temperature.to(torch.float64))).to(temperature.dtype), by_bias


def _coefficients(problem: Problem, grad: Tensor, largest: Tensor, stats: Tensor) -> Tensor:
    coef = empty((gradient.COEFFICIENTS.value, problem.anchors.pad), grad, torch.float32)
    described = {"grad": grad, "largest": largest, "stats": stats, "out": coef}
    problem.along_rows(anchors.coefficients, problem.anchors.pad // LINES, **described)
    return coef


def _gradient(problem: Problem, largest: Tensor, **coefficients: Any) -> tuple[Tensor, Tensor]:
    """Return the embeddings' gradient and, if the temperature is learned, the product of each row with its gradient.

    Args:
        problem: its ``anchors`` are the rows whose gradient is computed, even if they are not anchors of the loss.
        largest: the largest magnitude of an upstream gradient; the coefficients were divided by its power of two.
        coefficients: the coefficients of rows and columns, and whether each side holds anchors.
    """
    x, terms = problem.anchors, problem.arguments["TERMS"]
    if terms in SOFTMAX:
        terms = "own" if problem.arguments["DENOMINATOR"] == "own" else "softmax"
    kernels: Sequence[Kernel] = ("gradient_plain", "gradient_marked")
    pull = problem.over_tiles(kernels, (x.pad, x.dim), TERMS=terms, **coefficients)
    out = empty(tuple(x.given.shape), x.given, x.given.dtype)
    along = empty((x.count if problem.arguments["LEARNED"] else 1,), x.given, torch.float32)
    described = {"pull": pull, "parts": pull.shape[0], "largest": largest, "out": out, "along_out": along}
    problem.along_rows(rows.finish, -(-x.count // FEW), BM=FEW, **described)
    return out, along
