"""Argument checks, shared by every loss. Each message is one line: the argument, what is expected and what was given.

Types, dtypes, shapes, devices and options are always checked. Checks that read values would synchronise with an
accelerator, so they run for tensors on the CPU, and for others only if ``validate`` is True; never while a graph is
compiled, nor under `torch.func.vmap`. In a compiled graph, row numbers such as partners are checked when it runs.

The argument ``shared`` is True if the rows of all ranks are contrasted with each other (see `distributed`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from itertools import combinations
from numbers import Real
from typing import Any, ParamSpec, TypeVar, cast, get_args

import torch
from torch import Tensor

from .distributed import Ranks, eagerly
from .engine import (
    Backend,
    Denominator,
    InsideReduction,
    Policy,
    References,
    Rule,
    Similarity,
    Sizes,
    Targets,
    WeightsDivisor,
    ZeroRow,
    device,
    measure,
)

REDUCTIONS = ("mean", "sum", "none")
PAIR_REDUCTIONS = (*REDUCTIONS, "mean_pairs", "sum_pairs", "none_pairs")
SIMILARITIES: tuple[str, ...] = get_args(Similarity)
DENOMINATORS: tuple[str, ...] = get_args(Denominator)
INSIDE_REDUCTIONS: tuple[str, ...] = get_args(InsideReduction)
WEIGHTS_DIVISORS: tuple[str, ...] = get_args(WeightsDivisor)
ZERO_ROW: tuple[str, ...] = get_args(ZeroRow)
NO_POSITIVE = ("zero", "drop", "nan")
NO_NEGATIVE = ("zero", "nan")
DIRECTIONS = ("both", "a_to_b", "b_to_a")
RANKED = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
"""The directions of a ranking loss, in order; the first one is always chosen."""
SCOPES = ("batch", "own", "own_only")
PARTITIONS = ("joint", "per_direction")
HARDNESS_MODES = ("none", "in_batch_negatives", "hard_negatives", "all_negatives")
BACKENDS: tuple[str, ...] = get_args(Backend)
LOWEST = 1e-10
"""Lowest temperature, at which float64 still determines losses to about 1e-6; the highest is its reciprocal."""
RANGES = {
    "bias": (-1 / LOWEST, 1 / LOWEST, "-1e+10 to 1e+10"),
    "tau_plus": (0.0, math.nextafter(1.0, 0.0), "0 to 1, 1 excluded"),
    "beta": (0.0, 1 / LOWEST, "0 to 1e+10"),
    "hardness_strength": (0.0, 1 / LOWEST, "0 to 1e+10"),
    "sigma": (LOWEST, 1 / LOWEST, "1e-10 to 1e+10"),
    "direction_weights": (0.0, 1 / LOWEST, "0 to 1e+10"),
}
"""The options that are numbers apart from the temperatures: the lowest value, the highest, and the range in words."""
VIEWS = "; flatten_views lays out [batch, views, dim] as rows"
"""Hint for embeddings that still have an axis of views."""
ROWS_NOT_ITEMS = "; stacked_partners and interleaved_partners take the number of rows, not of items"
"""Hint for partners whose number is half the number of rows."""
NOT_LABELS = "; partners are row numbers: for labels use nt_xent_pairwise_loss or NTXentPairwiseLoss"
"""Hint for partners that occur repeatedly, as class labels do."""


P = ParamSpec("P")
R = TypeVar("R")


def across_ranks(function: Callable[P, R]) -> Callable[P, R]:
    """Return a loss whose ``group`` is a process group, "world", a `Ring` or None.

    The decorated function gets `Ranks` or None instead.
    """
    names = tuple(inspect.signature(function).parameters)

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if kwargs.get("group") is None:
            return function(*args, **kwargs)
        return cast(R, eagerly(function, names, args, kwargs))

    return called


def ranks_of(group: object) -> Ranks:
    """Return ``group`` as it is, typed as the `Ranks` that `across_ranks` passes."""
    return cast(Ranks, group)


def check_number(name: str, value: object) -> None:
    """Check that an option is a positive, finite number in the range of temperatures.

    Raises:
        TypeError: the value is not a number.
        ValueError: the value is zero, negative, NaN, infinite or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not 0 < number < math.inf:
        raise ValueError(f"{name}: expected a positive finite number, got {value}")
    if not LOWEST <= number <= 1 / LOWEST:
        raise ValueError(f"{name}: expected a number in the range {LOWEST:g} to {1 / LOWEST:g}, got {value}")


def check_temperature(value: object, *, validate: bool = False) -> None:
    """Check that a temperature is a positive, finite number, or a 0-dimensional floating tensor that holds one.

    The value of a tensor is read on the CPU, and on other devices if ``validate`` is True.

    Raises:
        TypeError: the value is neither a number nor a floating tensor.
        ValueError: the tensor has dimensions, or the number is zero, negative, NaN, infinite or out of range.
    """
    if not isinstance(value, Tensor):
        check_number("temperature", value)
        return
    if not value.is_floating_point():
        raise TypeError(f"temperature: expected a floating dtype, got {value.dtype}")
    if value.ndim:
        raise ValueError(f"temperature: expected a number or a 0-dimensional tensor, got shape {_shape(value)}")
    if device.may_read(value, validate):
        check_number("temperature", float(value.detach()))


def check_bias(value: object, *, validate: bool = False) -> None:
    """Check that a bias is a number from -1e10 to 1e10, or a 0-dimensional floating tensor that holds one.

    The value of a tensor is read on the CPU, and on other devices if ``validate`` is True.

    Raises:
        TypeError: the value is neither a number nor a floating tensor.
        ValueError: the tensor has dimensions, or the number is NaN or out of range.
    """
    if type(value) is float and -1 / LOWEST <= value <= 1 / LOWEST:
        return
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            raise TypeError(f"bias: expected a floating dtype, got {value.dtype}")
        if value.ndim:
            raise ValueError(f"bias: expected a number or a 0-dimensional tensor, got shape {_shape(value)}")
        if not device.may_read(value, validate):
            return
        value = float(value.detach())
    check_range("bias", value)


def check_range(name: str, value: object) -> None:
    """Check that an option is a number in its range, `RANGES`.

    Raises:
        TypeError: the value is not a number.
        ValueError: the number is NaN or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    low, high, words = RANGES[name]
    if not low <= number <= high:
        raise ValueError(f"{name}: expected a number in the range {words}, got {value}")


def check_flag(name: str, value: object) -> None:
    """Check that an option is a bool.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected one of True, False, got {value!r}")


def check_direction_weights(weights: object, direction: str = "both") -> tuple[float, float] | None:
    """Check the weights of both directions, None or two numbers in the range of `RANGES`; return them as floats.

    Raises:
        TypeError: the value is not a pair, or an entry is not a number.
        ValueError: there are not two entries, a number is out of range, or the direction is not "both".
    """
    if weights is None:
        return None
    if not isinstance(weights, (tuple, list)):
        raise TypeError(f"direction_weights: expected a pair of numbers, got {type(weights).__name__}")
    if len(weights) != 2:
        raise ValueError(f"direction_weights: expected a pair of numbers, got {len(weights)} entries")
    for weight in weights:
        check_range("direction_weights", weight)
    if direction != "both":
        raise ValueError(f"direction_weights: expected direction 'both' with them, got {direction!r}")
    return float(weights[0]), float(weights[1])


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Check that an option has one of its allowed values.

    Raises:
        ValueError: the value is not allowed.
    """
    if not (isinstance(value, str) and value in choices):
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")


def check_options(
    rule: Rule,
    policy: Policy,
    backend: object,
    *,
    validate: bool,
    reductions: Sequence[str] = REDUCTIONS,
    direction: object = "both",
) -> None:
    """Check the options of a loss. Options that the loss does not have keep a valid default.

    Raises:
        TypeError: a temperature is neither a number nor a floating tensor, or the base temperature is not a number.
        ValueError: a temperature is out of range or not a scalar, or an option has an unknown value.
    """
    temperature = rule.temperature
    if isinstance(temperature, Tensor):
        check_temperature(temperature, validate=validate)
    elif not (type(temperature) is float and LOWEST <= temperature <= 1 / LOWEST):
        check_number("temperature", temperature)
    if policy.base_temperature is not None:
        check_number("base_temperature", policy.base_temperature)
    for name, value, choices in (
        ("similarity", rule.similarity, SIMILARITIES),
        ("denominator", rule.denominator, DENOMINATORS),
        ("inside_reduction", rule.inside_reduction, INSIDE_REDUCTIONS),
        ("weights_divisor", rule.weights_divisor, WEIGHTS_DIVISORS),
        ("zero_row", rule.zero_row, ZERO_ROW),
        ("no_positive", policy.no_positive, NO_POSITIVE),
        ("no_negative", policy.no_negative, NO_NEGATIVE),
        ("reduction", policy.reduction, reductions),
        ("direction", direction, DIRECTIONS),
        ("backend", backend, BACKENDS),
    ):
        if value not in choices:
            check_choice(name, value, choices)


def check_embeddings(
    embeddings: object,
    *,
    similarity: str,
    validate: bool,
    name: str = "embeddings",
    shape: str = "[N, D]",
    least: int = 2,
) -> Sizes | None:
    """Check embeddings: ``[N, D]`` with D >= 1, real and floating; if values are read, finite.

    If values are read under "cosine", also check that no row is zero.

    Args:
        embeddings: the argument.
        similarity: "cosine" or "dot".
        validate: whether to read values on an accelerator too.
        name: the argument's name, for messages.
        shape: the expected shape, for messages.
        least: the smallest allowed number of rows.

    Returns:
        The sizes of the rows as measured by the engine, or None if values were not read or there are no rows.

    Raises:
        TypeError: not a tensor, or not of a floating dtype.
        ValueError: wrong shape, NaN or infinity, or a zero row under "cosine".
    """
    if not isinstance(embeddings, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(embeddings).__name__}")
    if not embeddings.is_floating_point():
        raise TypeError(f"{name}: expected a floating dtype, got {embeddings.dtype}")
    if embeddings.ndim != 2:
        hint = VIEWS if name == "embeddings" and embeddings.ndim == 3 else ""
        raise ValueError(f"{name}: expected shape {shape}, got shape {_shape(embeddings)}{hint}")
    if embeddings.shape[0] < least:
        rows = "row" if least == 1 else "rows"
        raise ValueError(f"{name}: expected at least {least} {rows}, got shape {_shape(embeddings)}")
    if embeddings.shape[1] < 1:
        raise ValueError(f"{name}: expected at least 1 column, got shape {_shape(embeddings)}")
    sizes = measure(embeddings) if device.may_read(embeddings, validate) and embeddings.shape[0] else None
    # A row's size is NaN or infinite if any of its entries is, and zero only for a zero row.
    if sizes is None or (sizes.low > 0 and sizes.high < math.inf):
        return sizes
    if not sizes.high < math.inf:
        row = _first(~sizes.each.isfinite().view(-1))
        raise ValueError(f"{name}: expected finite values, got NaN or infinity in row {row}")
    if similarity == "cosine" and sizes.low == 0:
        row = _first(sizes.each.view(-1) == 0)
        raise ValueError(f"{name}: expected no zero row under cosine similarity, got zeros in row {row}")
    return sizes


def check_references(
    embeddings: Tensor,
    ref_embeddings: Tensor | None,
    ref_labels: object,
    self_rows: object,
    *,
    similarity: str,
    validate: bool,
) -> References:
    """Check and return references ``[M, D]`` or None, and self_rows, integers ``[N]`` from -1 to M - 1 or None.

    Raises:
        TypeError: an argument is not a tensor, or has the wrong dtype.
        ValueError: a wrong shape, value or device, or ref_labels or self_rows without references.
    """
    if ref_embeddings is None:
        if ref_labels is not None or self_rows is not None:
            name = "self_rows" if ref_labels is None else "ref_labels"
            raise ValueError(f"{name}: expected ref_embeddings with it, got none")
        return References()
    sizes = check_embeddings(
        ref_embeddings, similarity=similarity, validate=validate, name="ref_embeddings", shape="[M, D]", least=1
    )
    check_alike("ref_embeddings", ref_embeddings, "embeddings", embeddings)
    if self_rows is None:
        return References(ref_embeddings, sizes=sizes)
    count, columns = embeddings.shape[0], ref_embeddings.shape[0]
    own = _given("self_rows", self_rows, embeddings, [count], "one row per embedding")
    return References(ref_embeddings, _checked("self_rows", own, None, columns, validate), sizes=sizes)


def check_hard_negatives(hard_negatives: object, embeddings: Tensor, name: str = "hard_negatives") -> Tensor:
    """Return hard negatives ``[N, H, D]`` as rows ``[N H, D]``; N and D are those of the embeddings.

    Raises:
        TypeError: not a tensor, or not of a floating dtype.
        ValueError: wrong shape.
    """
    if not isinstance(hard_negatives, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(hard_negatives).__name__}")
    if not hard_negatives.is_floating_point():
        raise TypeError(f"{name}: expected a floating dtype, got {hard_negatives.dtype}")
    count, columns = embeddings.shape
    if hard_negatives.ndim != 3 or hard_negatives.shape[0] != count or hard_negatives.shape[1] < 1:
        expected = f"shape [{count}, H, {columns}], H >= 1"
        raise ValueError(f"{name}: expected {expected}, got shape {_shape(hard_negatives)}")
    return hard_negatives.flatten(0, 1)


def check_ignored_blocks(
    ignored: object,
    embeddings: Tensor,
    widths: dict[str, int],
    positives: Sequence[str],
    place: Tensor,
    *,
    validate: bool,
) -> dict[str, Tensor | None]:
    """Check a mask of ignored pairs, and return its part for each block of columns, by name.

    Args:
        ignored: bool ``[N, C]``.
        embeddings: ``[N, D]``, for its length and device.
        widths: the number of columns of each block, by name, in order.
        positives: the blocks with the positives, which must not be ignored.
        place: int64 ``[N]``, the column of each row's positive in these blocks.
        validate: whether to read values on an accelerator too.

    Raises:
        TypeError: the mask is not a tensor, or not bool.
        ValueError: wrong shape or device, or a positive is ignored.
    """
    count, columns = embeddings.shape[0], sum(widths.values())
    mask = _given("ignored", ignored, embeddings, [count, columns], "one flag per pair", "bool")
    found = dict(zip(widths, torch.split(mask, list(widths.values()), dim=1), strict=True))
    for name in positives:
        own = found[name].gather(1, place[:, None])[:, 0]
        if device.may_read(mask, validate) and bool(own.any()):
            expected = "ignored: expected False for every row and its positive"
            raise ValueError(f"{expected}, got True in row {_first(own)}")
    return dict(found)


def check_directions(directions: object, partition: object, scope: object, hard_negatives: object) -> list[str]:
    """Check the options of a ranking loss; return the chosen directions.

    Raises:
        ValueError: a value is unknown, or does not fit the other arguments.
    """
    check_choice("hard_negatives_scope", scope, SCOPES)
    check_choice("partition", partition, PARTITIONS)
    further = [chain for size in range(4) for chain in combinations(RANKED[1:], size)]
    check_choice("directions", directions, ["+".join((RANKED[0], *chain)) for chain in further])
    chosen = str(directions).split("+")
    if partition == "per_direction" and {"query_to_query", "doc_to_doc"} & {*chosen}:
        expected = '"joint" with query_to_query or doc_to_doc, which have no positives'
        raise ValueError(f"partition: expected {expected}, got 'per_direction'")
    if scope == "own_only" and hard_negatives is None:
        raise ValueError("hard_negatives_scope: expected batch or own without hard_negatives, got 'own_only'")
    return chosen


def check_alike(name: str, tensor: Tensor, other: str, model: Tensor) -> None:
    """Check that rows ``[M, D]`` have the number of columns, the dtype and the device of other rows ``[N, D]``.

    Under autocast the dtypes may differ; the wider one is used.

    Raises:
        TypeError: the dtypes differ, and autocast is disabled.
        ValueError: the numbers of columns or the devices differ.
    """
    if tensor.shape[1] != model.shape[1]:
        raise ValueError(f"{name}: expected {model.shape[1]} columns as in {other}, got shape {_shape(tensor)}")
    if tensor.dtype != model.dtype and not device.autocast(tensor):
        raise TypeError(f"{name}: expected the dtype of {other}, {model.dtype}, got {tensor.dtype}")
    if tensor.device != model.device:
        raise ValueError(f"{name}: expected the device of {other}, {model.device}, got {tensor.device}")


def check_labels_or_positives(
    embeddings: Tensor,
    labels: Tensor | None,
    positives: object,
    references: References,
    ref_labels: Tensor | None,
    *,
    shared: bool = False,
) -> Targets:
    """Check that exactly one of labels ``[N]`` and positives ``[N, M]`` is given, and ref_labels ``[M]`` with labels.

    Without references M is N, and ref_labels must be None. If ``shared``, the columns of positives are the rows of all
    ranks, whose number is checked later.

    Raises:
        TypeError: an argument is not a tensor, labels are neither integers nor bool, or positives are not bool.
        ValueError: both or neither are given, or a shape is wrong, or the device is not that of the embeddings.
    """
    rows = references.embeddings
    count = embeddings.shape[0]
    columns = count if rows is None else rows.shape[0]
    if (labels is None) == (positives is None):
        got = "neither" if labels is None else "both"
        raise ValueError(f"labels: expected exactly one of labels and positives, got {got}")
    if labels is None:
        if ref_labels is not None:
            raise ValueError("ref_labels: expected labels with it, got positives")
        columns = _columns(positives, columns, shared)
        return Targets(
            "mask", _given("positives", positives, embeddings, [count, columns], "one flag per pair", "bool")
        )
    own = _given("labels", labels, embeddings, [count], "one label per embedding", "label")
    if rows is None:
        return Targets("labels", own)
    if ref_labels is None:
        raise ValueError(f"ref_labels: expected one label per reference, shape [{columns}], got none")
    others = _given("ref_labels", ref_labels, embeddings, [columns], "one label per reference", "label")
    if (labels.dtype == torch.uint64) != (ref_labels.dtype == torch.uint64):
        own, others = _numbered(labels, ref_labels, own, others)
    return Targets("labels", own, others)


def _numbered(labels: Tensor, ref_labels: Tensor, own: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Renumber labels or ids if one side is uint64: its large values, read as int64, may equal negative ones."""
    both = [(own, labels.dtype == torch.uint64), (others, ref_labels.dtype == torch.uint64)]
    keys = [torch.stack((values, (values < 0) & unsigned), 1) for values, unsigned in both]
    numbers = torch.unique(torch.cat(keys), dim=0, return_inverse=True)[1]
    return numbers[: own.shape[0]], numbers[own.shape[0] :]


def check_anchors(embeddings: Tensor, anchors: object) -> None:
    """Check anchors, bool ``[N]``.

    Raises:
        TypeError: anchors are not a tensor, or not bool.
        ValueError: the shape is wrong, or the device is not that of the embeddings.
    """
    _given("anchors", anchors, embeddings, [embeddings.shape[0]], "one flag per embedding", "bool")


def check_ignored(
    embeddings: Tensor,
    targets: Targets,
    references: References,
    ignored: object,
    ignored_ids: Tensor | None,
    ref_ignored_ids: Tensor | None = None,
    *,
    validate: bool,
    shared: bool = False,
) -> Targets:
    """Check ignored pairs, bool ``[N, M]``, and ids, integers ``[N]`` and ``[M]``; return targets that contain them.

    If each row has exactly one positive, this pair must not be ignored, which is checked if values are read. If
    ``shared``, the columns of ignored are the rows of all ranks; their number and their positives are checked later.

    Raises:
        TypeError: an argument is not a tensor, ignored is not bool, or ids are not integers.
        ValueError: a shape is wrong, the device is not that of the embeddings, ids of only one side are given, or a
            row's only positive is ignored.
    """
    rows, count = references.embeddings, embeddings.shape[0]
    columns = count if rows is None else rows.shape[0]
    if ignored is not None:
        width = _columns(ignored, columns, shared)
        flags = _given("ignored", ignored, embeddings, [count, width], "one flag per pair", "bool")
        targets = replace(targets, ignored=flags)
        if targets.kind == "partners" and not shared:
            alone = flags.gather(1, targets.given[:, None])[:, 0].to(torch.int64)
            targets = replace(targets, given=_checked("ignored", targets.given, alone, columns, validate))
    if ref_ignored_ids is not None and (rows is None or ignored_ids is None):
        needed = "ref_embeddings" if rows is None else "ignored_ids"
        raise ValueError(f"ref_ignored_ids: expected {needed} with it, got none")
    if ignored_ids is None:
        return targets
    own = _given("ignored_ids", ignored_ids, embeddings, [count], "one id per embedding", "label")
    if rows is None:
        return replace(targets, ids=own)
    meaning = "one id per reference"
    if ref_ignored_ids is None:
        raise ValueError(f"ref_ignored_ids: expected {meaning}, shape [{columns}], got none")
    others = _given("ref_ignored_ids", ref_ignored_ids, embeddings, [columns], meaning, "label")
    if (ignored_ids.dtype == torch.uint64) != (ref_ignored_ids.dtype == torch.uint64):
        own, others = _numbered(ignored_ids, ref_ignored_ids, own, others)
    return replace(targets, ids=own, column_ids=others)


def check_weights(
    embeddings: Tensor,
    name: str,
    weights: object,
    references: References | None = None,
    *,
    validate: bool,
    shared: bool = False,
) -> Tensor | None:
    """Check the weights of pairs ``[N, M]`` or of anchors ``[N]`` and, if values are read, their range.

    Args:
        embeddings: floating ``[N, D]``.
        name: the argument's name.
        weights: the argument; None: no weights.
        references: the references, without embeddings if the rows of the batch take their place; None: the weights are
            those of anchors.
        validate: whether to read values on an accelerator too.
        shared: whether the columns of pairs are the rows of all ranks, whose number is checked later.

    Returns:
        The weights.

    Raises:
        TypeError: weights are not a tensor, or neither float32 nor float64.
        ValueError: the shape is wrong, the device is not that of the embeddings, a gradient is required, or a weight is
            negative, NaN or above 1e10.
    """
    if weights is None:
        return None
    if not isinstance(weights, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(weights).__name__}")
    if weights.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{name}: expected dtype float32 or float64, got {weights.dtype}")
    count = embeddings.shape[0]
    shape, meaning = [count], "one weight per embedding"
    if references is not None:
        rows = references.embeddings
        columns = _columns(weights, count if rows is None else rows.shape[0], shared)
        shape, meaning = [count, columns], "one weight per pair"
    if weights.shape != torch.Size(shape):
        raise ValueError(f"{name}: expected {meaning}, shape {shape}, got shape {_shape(weights)}")
    if weights.device != embeddings.device:
        raise ValueError(f"{name}: expected the embeddings' device, {embeddings.device}, got {weights.device}")
    if weights.requires_grad:
        raise ValueError(f"{name}: expected a tensor without gradient, as weights are constants; pass {name}.detach()")
    if device.may_read(weights, validate) and weights.numel():
        low, high = (end.item() for end in torch.aminmax(weights))
        if not 0 <= low <= high <= 1 / LOWEST:
            outside = ~((weights >= 0) & (weights <= 1 / LOWEST))
            row = _first(outside.reshape(count, -1).any(1))
            value = weights[outside][0].item()
            raise ValueError(f"{name}: expected numbers in the range 0 to {1 / LOWEST:g}, got {value:g} in row {row}")
    return weights


def check_partners(embeddings: Tensor, partners: object, references: References, *, validate: bool) -> Targets:
    """Check partners: integers ``[N]``; if values are read, in range, never the row itself, and mutual.

    With references, partners are rows of the references and need not be mutual.

    Raises:
        TypeError: partners are not a tensor, or not integers.
        ValueError: the shape is wrong, the device is not that of the embeddings, or a partner is impossible.
    """
    count, rows = embeddings.shape[0], references.embeddings
    tensor = _given("partners", partners, embeddings, [count], "one partner per embedding")
    if rows is not None:
        return Targets("partners", _checked("partners", tensor, references.own, rows.shape[0], validate))
    place = torch.arange(count, device=tensor.device)
    return Targets("partners", _checked("mutual", tensor, place, count, validate))


def _are_mutual(partners: Tensor, own: Tensor) -> bool:
    """Return whether partners ``[N]`` are valid, in as few operations as possible: they nearly always are."""
    try:
        # In index_select, a partner out of range (or negative) raises an IndexError on a CPU. On CUDA it would make all
        # later operations of the process fail.
        if partners.device.type != "cpu" and bool(((partners < 0) | (partners >= len(own))).any()):
            return False
        return torch.equal(partners.index_select(0, partners), own) and not torch.eq(partners, own).any().item()
    except IndexError:
        return False


def _refuse_partners(partners: Tensor, own: Tensor | None, columns: int, *, mutual: bool) -> None:
    """Raise an error that describes what is wrong with partners ``[N]``, if anything is; see `_refuse`."""
    hint = NOT_LABELS if mutual and len(set(partners.tolist())) < len(partners) else ""
    row = _first((partners < 0) | (partners >= columns))
    if row is not None:
        value = int(partners[row])
        raise ValueError(f"partners: expected rows in the range 0 to {columns - 1}, got {value} in row {row}{hint}")
    row = None if own is None else _first(torch.eq(partners, own))
    if row is not None:
        raise ValueError(f"partners: expected another row as partner, got row {row} as partner of itself{hint}")
    row = _first(torch.ne(partners[partners], own)) if mutual and own is not None else None
    if row is not None:
        other = int(partners[row])
        back = int(partners[other])
        raise ValueError(
            f"partners: expected mutual partners, got {other} in row {row} but {back} in row {other}{hint}"
        )


def check_pairs_of_towers(
    a: Tensor,
    b: Tensor,
    partners: object,
    labels: object,
    ref_labels: object,
    positives: object,
    *,
    validate: bool,
    shared: bool = False,
) -> Targets:
    """Check the positives of the rows of a ``[N, D]`` among the rows of b ``[M, D]``.

    At most one of partners ``[N]``, labels ``[N]`` and positives ``[N, M]`` is given. Without them row k of b is the
    positive of row k of a, and M is N. The labels of b are ref_labels ``[M]``; by default, if M is N, those of a.

    Raises:
        TypeError: an argument is not a tensor, or has the wrong dtype.
        ValueError: several are given, ref_labels are given without labels, or a shape, value or device is wrong.
    """
    options = {"partners": partners, "labels": labels, "positives": positives}
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1:
        expected = "at most one of partners, labels and positives"
        raise ValueError(f"{given[0]}: expected {expected}, got {' and '.join(given)}")
    if ref_labels is not None and labels is None:
        raise ValueError(f"ref_labels: expected labels with it, got {given[0] if given else 'none'}")
    if not given and a.shape != b.shape:
        raise ValueError(f"embeddings_b: expected the shape of embeddings_a, {_shape(a)}, got shape {_shape(b)}")
    check_alike("embeddings_b", b, "embeddings_a", a)
    if not given:
        return Targets("partners", torch.arange(a.shape[0], device=a.device))
    references = References(b)
    if partners is not None:
        return check_partners(a, partners, references, validate=validate)
    if labels is not None and ref_labels is None and a.shape[0] == b.shape[0]:
        ref_labels = labels
    own = cast("Tensor | None", labels)
    return check_labels_or_positives(a, own, positives, references, cast(Any, ref_labels), shared=shared)


def check_ignored_of_towers(
    a: Tensor,
    b: Tensor,
    targets: Targets,
    ignored: object,
    ignored_ids: Tensor | None,
    ref_ignored_ids: Tensor | None,
    *,
    validate: bool,
    shared: bool = False,
) -> Targets:
    """Return targets with ignored pairs of a row of a ``[N, D]`` and a row of b ``[M, D]``; see `check_ignored`.

    The ids of b are ref_ignored_ids ``[M]``; by default, if M is N, those of a.
    """
    if ignored is ignored_ids is ref_ignored_ids is None:
        return targets
    if ref_ignored_ids is None and a.shape[0] == b.shape[0]:
        ref_ignored_ids = ignored_ids
    given = ignored, ignored_ids, ref_ignored_ids
    return check_ignored(a, targets, References(b), *given, validate=validate, shared=shared)


def check_equal_towers(name: str, direction: str, a: Tensor, b: Tensor) -> None:
    """Check that b has as many rows as a if rows of b are anchors: the weights ``name`` have one entry per row of a.

    Raises:
        ValueError: it has more or fewer rows.
    """
    n, m = a.shape[0], b.shape[0]
    if direction != "a_to_b" and n != m:
        raise ValueError(f"{name}: expected direction 'a_to_b' for towers of {n} and {m} rows, got {direction!r}")


def check_no_queue(given: Sequence[str]) -> None:
    """Check that no argument that describes pairs of the towers is given with negatives.

    Raises:
        ValueError: one is given.
    """
    if given:
        raise ValueError(f"{given[0]}: expected no negatives with it: negatives take the place of the other tower")


def check_positive_pairs(
    embeddings: Tensor, positive_pairs: object, *, validate: bool, shared: bool = False
) -> Targets:
    """Check positive pairs: integers ``[M, 2]``; if values are read, in range. If ``shared``, ranges are checked later.

    Raises:
        TypeError: positive_pairs are not a tensor, or not integers.
        ValueError: the shape is wrong, the device is not that of the embeddings, or an entry is out of range.
    """
    count = embeddings.shape[0]
    tensor = _given("positive_pairs", positive_pairs, embeddings)
    if tensor.ndim != 2 or tensor.shape[1] != 2:
        raise ValueError(f"positive_pairs: expected shape [M, 2], got shape {_shape(tensor)}")
    return Targets("pairs", tensor if shared else _checked("positive_pairs", tensor, None, count, validate))


def _checked(kind: str, rows: Tensor, own: Tensor | None, columns: int, validate: bool) -> Tensor:
    """Return row numbers, checked if values may be read; in a compiled graph an operator checks them when it runs."""
    if device.may_read(rows, validate):
        _refuse(kind, rows, own, columns)
    elif device.traced(rows):
        return cast(Tensor, torch.ops.pairproof.checked(kind, rows, own, columns, validate))
    return rows


def _refuse(kind: str, rows: Tensor, own: Tensor | None, columns: int) -> None:
    """Raise an error that describes what is wrong with row numbers, if anything is.

    Args:
        kind: "partners", "mutual" (partners without references), "ignored" (pairs of rows and partners), "self_rows" or
            "positive_pairs".
        rows: int64 ``[N]``, the row numbers; ``[M, 2]`` for "positive_pairs".
        own: int64 ``[N]``. For "partners" and "mutual", the number of the row itself, which is not allowed as its
            partner, or -1; None: all -1. For "ignored", 1 if the pair is ignored, else 0.
        columns: the number of rows that may be referred to.
    """
    if kind == "mutual" and own is not None and _are_mutual(rows, own):
        return
    if kind == "ignored":
        row = _first(cast(Tensor, own) > 0)
        if row is not None:
            raise ValueError(f"ignored: expected False for every row and its positive, got True in row {row}")
        return
    if kind in ("partners", "mutual"):
        _refuse_partners(rows, own, columns, mutual=kind == "mutual")
        return
    least = -1 if kind == "self_rows" else 0
    outside = (rows < least) | (rows >= columns)
    place = _first(outside if least else outside.any(1))
    if place is not None:
        where = f"in row {place}" if least else f"at position {place}"
        got = rows[place].tolist()
        raise ValueError(f"{kind}: expected rows in the range {least} to {columns - 1}, got {got} {where}")


def _operator(kind: str, rows: Tensor, own: Tensor | None, columns: int, validate: bool) -> Tensor:
    if device.may_read(rows, validate):
        _refuse(kind, rows, own, columns)
    return rows.clone()


torch.library.custom_op(
    "pairproof::checked",
    _operator,
    mutates_args=(),
    schema="(str kind, Tensor rows, Tensor? own, SymInt columns, bool validate) -> Tensor",
).register_fake(lambda kind, rows, own, columns, validate: torch.empty_like(rows))


def _given(
    name: str,
    value: object,
    embeddings: Tensor,
    shape: list[int] | None = None,
    meaning: str = "",
    kind: str = "integer",
) -> Tensor:
    """Check the dtype, shape and device of a tensor of integers, of labels (integers or bool) or of flags (bool).

    Args:
        name: the argument's name, for messages.
        value: the argument.
        embeddings: floating ``[N, D]``, on the expected device.
        shape: the expected shape; None: any.
        meaning: what the shape means, for messages.
        kind: "integer", "label" or "bool".

    Returns:
        The tensor, as int64 unless it is bool flags.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
    is_bool = value.dtype == torch.bool
    if kind == "bool" and not is_bool:
        raise TypeError(f"{name}: expected dtype bool, got {value.dtype}")
    if value.is_floating_point() or value.is_complex() or (is_bool and kind == "integer"):
        raise TypeError(f"{name}: expected an integer dtype, got {value.dtype}")
    if shape is not None and value.shape != torch.Size(shape):
        hint = ROWS_NOT_ITEMS if name == "partners" and _shape(value) == [shape[0] / 2] else ""
        raise ValueError(f"{name}: expected {meaning}, shape {shape}, got shape {_shape(value)}{hint}")
    if value.device != embeddings.device:
        raise ValueError(f"{name}: expected the embeddings' device, {embeddings.device}, got {value.device}")
    if kind == "bool":
        return value
    # Reading uint64 as int64 keeps equality of labels, and only equality matters.
    return value.view(torch.int64) if value.dtype == torch.uint64 else value.to(torch.int64)


def _columns(value: object, columns: int, shared: bool) -> int:
    """Return the expected number of columns of a mask: if ``shared``, the number that it has."""
    return value.shape[1] if shared and isinstance(value, Tensor) and value.ndim == 2 else columns


def _first(flags: Tensor) -> int | None:
    """Return the position of the first True in bool ``[K]``, or None."""
    return int(flags.int().argmax()) if bool(flags.any()) else None


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)
