"""Argument checks of the losses.

A tensor or number of the wrong type or dtype raises a TypeError; all other errors are ValueErrors. Each message is one
line: the argument, what is expected, and what was given.

Types, dtypes, shapes, devices and options are always checked. Values of tensors are checked on the CPU. On
accelerators, they are checked only if ``validate`` is True, because reading them synchronises. Values are never read
while a graph is compiled, nor under `torch.func.vmap`. A compiled graph checks row numbers, such as partners, when it
runs.

``shared`` is True if the rows of all ranks are contrasted with each other (see `distributed`).
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
    jit,
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
"""The directions of a ranking loss, in order. The first is always chosen."""
SCOPES = ("batch", "own", "own_only")
HARD_OF_DOC = ("others", "all", "none")
PARTITIONS = ("joint", "per_direction")
HARDNESS_MODES = ("none", "in_batch_negatives", "hard_negatives", "all_negatives")
BACKENDS: tuple[str, ...] = get_args(Backend)
LOWEST = 1e-10
"""Lowest temperature; the highest is 1 / LOWEST. At LOWEST, the error of float64 is about 1e-6."""
RANGES = {
    "bias": (-1 / LOWEST, 1 / LOWEST, "-1e+10 to 1e+10"),
    "tau_plus": (0.0, math.nextafter(1.0, 0.0), "0 to 1, 1 excluded"),
    "beta": (0.0, 1 / LOWEST, "0 to 1e+10"),
    "hardness_strength": (0.0, 1 / LOWEST, "0 to 1e+10"),
    "sigma": (LOWEST, 1 / LOWEST, "1e-10 to 1e+10"),
    "direction_weights": (0.0, 1 / LOWEST, "0 to 1e+10"),
}
"""Lowest value, highest value, and the range in words, of each numeric option except temperatures."""
VIEWS = "; flatten_views lays out [batch, views, dim] as rows"
"""Hint for embeddings ``[batch, views, dim]``."""
ROWS_NOT_ITEMS = "; stacked_partners and interleaved_partners take the number of rows, not of items"
"""Hint for partners with half as many entries as there are rows."""
ZERO_ROWS = '; SupCon and NT-Xent accept such rows with zero_row="zero"'
"""Hint for rows of zeros."""
LEARNED = "; to learn it, pass torch.exp(-log_scale) of a parameter log_scale, which is always positive"
"""Hint for a tensor as temperature that is not positive, as after a step of an optimizer."""
NOT_LABELS = "; partners are row numbers: for labels use nt_xent_pairwise_loss or NTXentPairwiseLoss"
"""Hint for partners with repeated values, which are probably class labels."""


P = ParamSpec("P")
R = TypeVar("R")


def across_ranks(function: Callable[P, R]) -> Callable[P, R]:
    """Return a loss that accepts a process group, "world" or a `Ring` as ``group``, and passes on `Ranks`."""
    names = tuple(inspect.signature(function).parameters)

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        if kwargs.get("group") is None:
            return function(*args, **kwargs)
        return cast(R, eagerly(function, names, args, kwargs))

    return called


def ranks_of(group: object) -> Ranks:
    """Return ``group`` with the type `Ranks`, which `across_ranks` passes."""
    return cast(Ranks, group)


def check_number(name: str, value: object, hint: str = "") -> None:
    """Check that an option is a number in the range of temperatures. The hint is for a number that is not positive."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not 0 < number < math.inf:
        raise ValueError(f"{name}: expected a positive finite number, got {value}{hint if number <= 0 else ''}")
    if not LOWEST <= number <= 1 / LOWEST:
        raise ValueError(f"{name}: expected a number in the range {LOWEST:g} to {1 / LOWEST:g}, got {value}")


def check_temperature(value: object, *, validate: bool = False) -> None:
    """Check that a temperature is a number in its range, or a 0-dimensional floating tensor with such a number."""
    if not isinstance(value, Tensor):
        check_number("temperature", value)
        return
    if not value.is_floating_point():
        raise TypeError(f"temperature: expected a floating dtype, got {value.dtype}")
    if value.ndim:
        raise ValueError(f"temperature: expected a number or a 0-dimensional tensor, got shape {_shape(value)}")
    if device.may_read(value, validate):
        check_number("temperature", float(value.detach()), LEARNED)


def check_bias(value: object, *, validate: bool = False) -> None:
    """Check that a bias is a number from -1e10 to 1e10, or a 0-dimensional floating tensor with such a number."""
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
    """Check that an option is a number in the range given by `RANGES`."""
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
    """Check that an option is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected one of True, False, got {value!r}")


def check_direction_weights(weights: object, direction: str = "both") -> tuple[float, float] | None:
    """Check the weights of both directions, two numbers or None, and return them as floats."""
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
    """Check that an option has an allowed value."""
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
    """Check the options of a loss."""
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
    """Check that embeddings are floating ``[N, D]``, D >= 1, and finite.

    Args:
        embeddings: the argument.
        similarity: under "cosine", rows of zeros are errors too.
        validate: whether to read values on accelerators too.
        name: the name of the argument, for messages.
        shape: the expected shape, for messages.
        least: the smallest allowed number of rows.

    Returns:
        The sizes of the rows; None if values were not read or there are no rows.
    """
    if not isinstance(embeddings, Tensor) or embeddings.layout != torch.strided:
        raise _not_dense(name, embeddings)
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
    # The size of a row is NaN or infinite if any entry is, and 0 only for a row of zeros.
    if sizes is None or (sizes.low > 0 and sizes.high < math.inf):
        return sizes
    if not sizes.high < math.inf:
        row = _first(~sizes.each.isfinite().view(-1))
        raise ValueError(f"{name}: expected finite values, got NaN or infinity in row {row}")
    if similarity == "cosine" and sizes.low == 0:
        row = _first(sizes.each.view(-1) == 0)
        raise ValueError(f"{name}: expected no zero row under cosine similarity, got zeros in row {row}{ZERO_ROWS}")
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
    """Check ref_embeddings ``[M, D]`` and self_rows, integers ``[N]`` from -1 to M - 1. Both may be None."""
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
    """Check hard negatives ``[N, H, D]`` for embeddings ``[N, D]``, and return them as rows ``[N H, D]``."""
    if not isinstance(hard_negatives, Tensor) or hard_negatives.layout != torch.strided:
        raise _not_dense(name, hard_negatives)
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
    """Check a mask of ignored pairs, and split it into its blocks of columns.

    Args:
        ignored: bool ``[N, C]``.
        embeddings: ``[N, D]``.
        widths: the name and the number of columns of each block, in order.
        positives: the names of the blocks that contain positives, which must not be ignored.
        place: int64 ``[N]``, the column of each row's positive in the blocks with positives.
        validate: whether to read values on accelerators too.

    Returns:
        The part of the mask for each block, by name.
    """
    count, columns = embeddings.shape[0], sum(widths.values())
    mask = _given("ignored", ignored, embeddings, [count, columns], "one flag per pair", "bool")
    found = dict(zip(widths, torch.split(mask, list(widths.values()), dim=1), strict=True))
    for name in positives:
        own = found[name].gather(1, place[:, None])[:, 0]
        found[name] = _checked("ignored", found[name], own, columns, validate)
    return dict(found)


def check_directions(
    directions: object, partition: object, scope: object, doc_to_doc_hard: object, hard_negatives: object
) -> list[str]:
    """Check the options of a ranking loss; return the chosen directions."""
    check_choice("hard_negatives_scope", scope, SCOPES)
    if doc_to_doc_hard is not None:
        check_choice("doc_to_doc_hard", doc_to_doc_hard, HARD_OF_DOC)
    check_choice("partition", partition, PARTITIONS)
    further = [chain for size in range(4) for chain in combinations(RANKED[1:], size)]
    check_choice("directions", directions, ["+".join((RANKED[0], *chain)) for chain in further])
    chosen = str(directions).split("+")
    if partition == "per_direction" and {"query_to_query", "doc_to_doc"} & {*chosen}:
        expected = '"joint" with query_to_query or doc_to_doc, which have no positives'
        raise ValueError(f"partition: expected {expected}, got 'per_direction'")
    if scope == "own_only" and hard_negatives is None:
        raise ValueError("hard_negatives_scope: expected batch or own if hard_negatives is None, got 'own_only'")
    return chosen


def check_alike(name: str, tensor: Tensor, other: str, model: Tensor) -> None:
    """Check that ``tensor`` has the number of columns, dtype and device of ``model``.

    Under autocast, the dtypes may differ.
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
    """Check that either labels ``[N]`` or positives ``[N, M]`` are given.

    With references, labels need ref_labels ``[M]``; without references, M is N. If ``shared``, M is the number of rows
    of all ranks, and is checked later.
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
    """Renumber labels of which one side is uint64: large uint64 labels, read as int64, may equal negative labels."""
    both = [(own, labels.dtype == torch.uint64), (others, ref_labels.dtype == torch.uint64)]
    keys = [torch.stack((values, (values < 0) & unsigned), 1) for values, unsigned in both]
    numbers = torch.unique(torch.cat(keys), dim=0, return_inverse=True)[1]
    return numbers[: own.shape[0]], numbers[own.shape[0] :]


def check_anchors(embeddings: Tensor, anchors: object) -> None:
    """Check anchors, bool ``[N]``."""
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
    """Check ignored pairs, bool ``[N, M]``, and ids, integers ``[N]`` and ``[M]``, and add them to targets.

    If targets are partners, no partner may be ignored. If ``shared``, M is the number of rows of all ranks; M and the
    partners are checked later.
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
    """Check the weights of pairs ``[N, M]`` or of anchors ``[N]``, and return them.

    Args:
        embeddings: floating ``[N, D]``.
        name: the name of the argument.
        weights: the argument, or None.
        references: for weights of pairs, the references; for weights of anchors, None.
        validate: whether to read values on accelerators too.
        shared: whether M is the number of rows of all ranks, which is checked later.
    """
    if weights is None:
        return None
    if not isinstance(weights, Tensor) or weights.layout != torch.strided:
        raise _not_dense(name, weights)
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
    """Check partners, integers ``[N]``: in range, not the row itself and, without references, mutual."""
    count, rows = embeddings.shape[0], references.embeddings
    tensor = _given("partners", partners, embeddings, [count], "one partner per embedding")
    if rows is not None:
        return Targets("partners", _checked("partners", tensor, references.own, rows.shape[0], validate))
    place = torch.arange(count, device=tensor.device)
    return Targets("partners", _checked("mutual", tensor, place, count, validate))


def _are_mutual(partners: Tensor, own: Tensor) -> bool:
    """Return whether partners ``[N]`` are valid, in few operations."""
    if jit.State.failure is None and jit.readable(partners) and jit.function("are_mutual"):
        return cast(bool, jit.function("are_mutual")(jit.array(partners)))
    try:
        # If a partner is out of range or negative, index_select raises an IndexError on a CPU. On CUDA, all later
        # operations of the process would fail.
        if partners.device.type != "cpu" and bool(((partners < 0) | (partners >= len(own))).any()):
            return False
        return torch.equal(partners.index_select(0, partners), own) and not torch.eq(partners, own).any().item()
    except IndexError:
        return False


def _refuse_partners(partners: Tensor, own: Tensor | None, columns: int, *, mutual: bool) -> None:
    """Raise an error if partners ``[N]`` are invalid; see `_refuse`."""
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
    """Check two towers a ``[N, D]`` and b ``[M, D]``, and their positives: partners, labels or a mask.

    At most one of partners ``[N]``, labels ``[N]`` and positives ``[N, M]`` may be given. If none is, M must be N, and
    row k of b is the positive of row k of a. If M is N, ref_labels ``[M]`` default to ``labels``.
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
    """Call `check_ignored` for two towers a ``[N, D]`` and b ``[M, D]``.

    If M is N, ref_ignored_ids ``[M]`` default to ``ignored_ids``.
    """
    if ignored is ignored_ids is ref_ignored_ids is None:
        return targets
    if ref_ignored_ids is None and a.shape[0] == b.shape[0]:
        ref_ignored_ids = ignored_ids
    given = ignored, ignored_ids, ref_ignored_ids
    return check_ignored(a, targets, References(b), *given, validate=validate, shared=shared)


def check_equal_towers(name: str, direction: str, a: Tensor, b: Tensor) -> None:
    """Check that the towers have equally many rows if rows of b are anchors, as the argument ``name`` requires."""
    n, m = a.shape[0], b.shape[0]
    if direction != "a_to_b" and n != m:
        raise ValueError(f"{name}: expected direction 'a_to_b' for towers of {n} and {m} rows, got {direction!r}")


def check_no_queue(given: Sequence[str]) -> None:
    """Check that ``given``, the names of arguments that ``negatives`` exclude, is empty."""
    if given:
        raise ValueError(f"{given[0]}: expected no negatives with it: negatives take the place of the other tower")


def check_positive_pairs(
    embeddings: Tensor, positive_pairs: object, *, validate: bool, shared: bool = False
) -> Targets:
    """Check positive pairs, integers ``[M, 2]``. If ``shared``, their range is checked later."""
    count = embeddings.shape[0]
    tensor = _given("positive_pairs", positive_pairs, embeddings)
    if tensor.ndim != 2 or tensor.shape[1] != 2:
        raise ValueError(f"positive_pairs: expected shape [M, 2], got shape {_shape(tensor)}")
    return Targets("pairs", tensor if shared else _checked("positive_pairs", tensor, None, count, validate))


def _checked(kind: str, rows: Tensor, own: Tensor | None, columns: int, validate: bool) -> Tensor:
    """Return row numbers, checked if values may be read. In a compiled graph, an operator checks them at run time."""
    if device.may_read(rows, validate) and (own is None or device.may_read(own, validate)):
        _refuse(kind, rows, own, columns)
    elif device.traced(rows):
        return cast(Tensor, torch.ops.pairproof.checked(kind, rows, own, columns, validate))
    return rows


def _refuse(kind: str, rows: Tensor, own: Tensor | None, columns: int) -> None:
    """Raise an error if row numbers are invalid.

    Args:
        kind: "partners", "mutual" (partners without references), "ignored" (pairs of rows and partners), "self_rows" or
            "positive_pairs".
        rows: int64 ``[N]``, the row numbers; ``[M, 2]`` for "positive_pairs"; for "ignored", anything.
        own: int64 ``[N]``. For "partners" and "mutual", the number of the row itself, which must not be its partner; -1
            or None: no such row. For "ignored", whether the pair of a row and its positive is ignored.
        columns: row numbers must be less than this number.
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


def _not_dense(name: str, value: object) -> TypeError:
    """Return the error for an argument that is not a dense tensor."""
    if isinstance(value, Tensor):
        return TypeError(f"{name}: expected a dense tensor, got layout {value.layout}; pass {name}.to_dense()")
    nested = isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) and item.ndim for item in value)
    array = isinstance(value, (list, tuple)) or hasattr(value, "__array__")
    hint = f"; pass torch.as_tensor({name})" if array and not nested else ""
    return TypeError(f"{name}: expected a tensor, got {type(value).__name__}{hint}")


def _given(
    name: str,
    value: object,
    embeddings: Tensor,
    shape: list[int] | None = None,
    meaning: str = "",
    kind: str = "integer",
) -> Tensor:
    """Check the dtype, shape and device of a tensor, and return it: bool if ``kind`` is "bool", else int64.

    Args:
        name: the name of the argument, for messages.
        value: the argument.
        embeddings: a tensor on the expected device.
        shape: the expected shape; None: any.
        meaning: what the shape means, for messages.
        kind: "integer", "label" (integers or bool) or "bool".
    """
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        raise _not_dense(name, value)
    is_bool = value.dtype == torch.bool
    if kind == "bool" and not is_bool:
        raise TypeError(f"{name}: expected dtype bool, got {value.dtype}; pass {name}.bool()")
    if value.is_floating_point() or value.is_complex() or (is_bool and kind == "integer"):
        # Other shapes, such as those of one-hot labels, would be wrong after a conversion too.
        same = value.is_floating_point() and value.ndim == len(shape or value.shape)
        hint = f"; pass {name}.long()" if same else ""
        raise TypeError(f"{name}: expected an integer dtype, got {value.dtype}{hint}")
    if shape is not None and value.shape != torch.Size(shape):
        hint = ROWS_NOT_ITEMS if name == "partners" and _shape(value) == [shape[0] / 2] else ""
        raise ValueError(f"{name}: expected {meaning}, shape {shape}, got shape {_shape(value)}{hint}")
    if value.device != embeddings.device:
        raise ValueError(f"{name}: expected the embeddings' device, {embeddings.device}, got {value.device}")
    if kind == "bool":
        return value
    # uint64 labels are read as int64, because only equality matters.
    return value.view(torch.int64) if value.dtype == torch.uint64 else value.to(torch.int64)


def _columns(value: object, columns: int, shared: bool) -> int:
    """Return the expected number of columns of a mask. If ``shared``, any number is accepted for now."""
    return value.shape[1] if shared and isinstance(value, Tensor) and value.ndim == 2 else columns


def _first(flags: Tensor) -> int | None:
    """Return the index of the first True in bool ``[K]``, or None."""
    return int(flags.int().argmax()) if bool(flags.any()) else None


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)
