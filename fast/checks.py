"""Argument checks, shared by every loss: one line each, naming the argument, what is expected and what was got.

Types, dtypes, shapes, devices and options are checked always. Checks that read values cost an accelerator a
synchronisation, so they run on the CPU, or where ``validate`` asks for them, and never while a graph is being compiled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import get_args

import torch
from torch import Tensor

from .engine import Backend, Denominator, Policy, References, Rule, Similarity, Sizes, Targets, device, measure

REDUCTIONS = ("mean", "sum", "none")
PAIR_REDUCTIONS = (*REDUCTIONS, "mean_pairs")
SIMILARITIES: tuple[str, ...] = get_args(Similarity)
DENOMINATORS: tuple[str, ...] = get_args(Denominator)
NO_POSITIVE = ("zero", "drop", "nan")
NO_NEGATIVE = ("zero", "nan")
DIRECTIONS = ("both", "a_to_b", "b_to_a")
BACKENDS: tuple[str, ...] = get_args(Backend)


def check_number(name: str, value: object) -> None:
    """Check that an option is a positive, finite number.

    Raises:
        TypeError: it is no number.
        ValueError: it is zero, negative, NaN or infinite.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(f"{name}: expected a positive finite number, got {value}")


def check_temperature(value: object, *, validate: bool = False) -> None:
    """Check that a temperature is a positive, finite number, or a floating tensor without dimension that holds one.

    A tensor's value is read as other values are: on the CPU, or where ``validate`` asks for it.

    Raises:
        TypeError: it is neither, or a tensor of another dtype.
        ValueError: it has dimensions, or is zero, negative, NaN or infinite.
    """
    if not isinstance(value, Tensor):
        check_number("temperature", value)
        return
    if not value.is_floating_point():
        raise TypeError(f"temperature: expected a floating dtype, got {value.dtype}")
    if value.ndim:
        raise ValueError(f"temperature: expected a number or a tensor without dimension, got shape {_shape(value)}")
    if device.may_read(value, validate):
        check_number("temperature", float(value.detach()))


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Check that an option is one of its allowed values.

    Raises:
        ValueError: it is not.
    """
    if not (isinstance(value, str) and value in choices):
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")


def check_options(
    rule: Rule,
    policy: Policy,
    backend: object,
    *,
    validate: bool,
    reductions: Sequence[str] = REDUCTIONS,
    direction: object = "both",
) -> None:
    """Check the options of a loss; those that it lacks keep a valid default.

    Raises:
        TypeError: a temperature is no number.
        ValueError: a temperature is not positive and finite, or an option has an unknown value.
    """
    if isinstance(rule.temperature, Tensor):
        check_temperature(rule.temperature, validate=validate)
    else:
        check_number("temperature", rule.temperature)
    if policy.base_temperature is not None:
        check_number("base_temperature", policy.base_temperature)
    for name, value, choices in (
        ("similarity", rule.similarity, SIMILARITIES),
        ("denominator", rule.denominator, DENOMINATORS),
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
    """Check embeddings ``[N, D]``, D >= 1, real floating, and where values are read: finite, no zero row.

    Args:
        embeddings: the argument.
        similarity: "cosine" or "dot".
        validate: whether to read values on an accelerator too.
        name: what the argument is called.
        shape: how its shape is written.
        least: the fewest rows allowed.

    Returns:
        What the engine measured of the rows, where values were read.

    Raises:
        TypeError: not a tensor, or not of a floating dtype.
        ValueError: wrong shape, NaN or infinity, or a zero row under "cosine".
    """
    if not isinstance(embeddings, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(embeddings).__name__}")
    if not embeddings.is_floating_point():
        raise TypeError(f"{name}: expected a floating dtype, got {embeddings.dtype}")
    if embeddings.ndim != 2:
        raise ValueError(f"{name}: expected shape {shape}, got shape {_shape(embeddings)}")
    if embeddings.shape[0] < least:
        rows = "row" if least == 1 else "rows"
        raise ValueError(f"{name}: expected at least {least} {rows}, got shape {_shape(embeddings)}")
    if embeddings.shape[1] < 1:
        raise ValueError(f"{name}: expected at least 1 column, got shape {_shape(embeddings)}")
    sizes = measure(embeddings) if device.may_read(embeddings, validate) else None
    # One number per row decides: NaN and infinity both survive it, and only a zero row gives zero.
    if sizes is not None and not sizes.high < math.inf:
        row = _first(~sizes.each.isfinite().view(-1))
        raise ValueError(f"{name}: expected finite values, got NaN or infinity in row {row}")
    if sizes is not None and similarity == "cosine" and sizes.low == 0:
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
    """Check references ``[M, D]``, and self_rows, integers ``[N]`` from -1 to M - 1 or None.

    Raises:
        TypeError: not tensors, or of a wrong dtype.
        ValueError: a wrong shape, value or device, or what belongs to references without them.
    """
    if ref_embeddings is None:
        for name, value in (("ref_labels", ref_labels), ("self_rows", self_rows)):
            if value is not None:
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
    if device.may_read(own, validate):
        row = _first((own < -1) | (own >= columns))
        if row is not None:
            value = int(own[row])
            raise ValueError(f"self_rows: expected rows in the range -1 to {columns - 1}, got {value} in row {row}")
    return References(ref_embeddings, own, sizes=sizes)


def check_alike(name: str, tensor: Tensor, other: str, model: Tensor) -> None:
    """Check that rows ``[M, D]`` have the columns, dtype and device of other rows ``[N, D]``.

    Raises:
        TypeError: another dtype.
        ValueError: another number of columns, or another device.
    """
    if tensor.shape[1] != model.shape[1]:
        raise ValueError(f"{name}: expected {model.shape[1]} columns as in {other}, got shape {_shape(tensor)}")
    if tensor.dtype != model.dtype:
        raise TypeError(f"{name}: expected the dtype of {other}, {model.dtype}, got {tensor.dtype}")
    if tensor.device != model.device:
        raise ValueError(f"{name}: expected the device of {other}, {model.device}, got {tensor.device}")


def check_labels_or_positives(
    embeddings: Tensor, labels: Tensor | None, positives: object, references: References, ref_labels: Tensor | None
) -> Targets:
    """Check that exactly one of labels ``[N]`` and positives ``[N, M]`` is given, and ref_labels ``[M]`` with labels.

    Without references M is N, and there are no ref_labels.

    Raises:
        TypeError: not a tensor, labels not integers, or positives not bool.
        ValueError: both or neither given, a wrong shape, or another device than the embeddings'.
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
    """Number labels of which some are unsigned 64-bit integers anew: read as signed, the largest would be negative."""
    both = [(own, labels.dtype == torch.uint64), (others, ref_labels.dtype == torch.uint64)]
    keys = [torch.stack((values, (values < 0) & unsigned), 1) for values, unsigned in both]
    numbers = torch.unique(torch.cat(keys), dim=0, return_inverse=True)[1]
    return numbers[: own.shape[0]], numbers[own.shape[0] :]


def check_anchors(embeddings: Tensor, anchors: object) -> None:
    """Check anchors, bool ``[N]``.

    Raises:
        TypeError: not a tensor, or not bool.
        ValueError: a wrong shape, or another device than the embeddings'.
    """
    _given("anchors", anchors, embeddings, [embeddings.shape[0]], "one flag per embedding", "bool")


def check_partners(embeddings: Tensor, partners: object, references: References, *, validate: bool) -> Targets:
    """Check partners, integers ``[N]``, and where values are read: in range, never the row itself, mutual.

    With references they are rows of those, and need not be mutual.

    Raises:
        TypeError: not a tensor, or not integers.
        ValueError: a wrong shape, another device than the embeddings', or an impossible partner.
    """
    count, rows = embeddings.shape[0], references.embeddings
    tensor = _given("partners", partners, embeddings, [count], "one partner per embedding")
    if device.may_read(tensor, validate):
        if rows is not None:
            _refuse_partners(tensor, references.own, rows.shape[0], mutual=False)
        elif not _are_mutual(tensor, place := torch.arange(count, device=tensor.device)):
            _refuse_partners(tensor, place, count, mutual=True)
    return Targets("partners", tensor)


def _are_mutual(partners: Tensor, own: Tensor) -> bool:
    """Whether partners ``[N]`` are right: in few operations, for they nearly always are."""
    try:
        # A negative partner is no row's partner's partner, wherever it points.
        return torch.equal(partners[partners], own) and not bool((partners == own).any())
    except IndexError:
        return False


def _refuse_partners(partners: Tensor, own: Tensor | None, columns: int, *, mutual: bool) -> None:
    """Say what is wrong with partners ``[N]``, if anything is."""
    row = _first((partners < 0) | (partners >= columns))
    if row is not None:
        value = int(partners[row])
        raise ValueError(f"partners: expected rows in the range 0 to {columns - 1}, got {value} in row {row}")
    row = None if own is None else _first(torch.eq(partners, own))
    if row is not None:
        raise ValueError(f"partners: expected another row as partner, got row {row} as partner of itself")
    row = _first(torch.ne(partners[partners], own)) if mutual and own is not None else None
    if row is not None:
        other = int(partners[row])
        back = int(partners[other])
        raise ValueError(f"partners: expected mutual partners, got {other} in row {row} but {back} in row {other}")


def check_positive_pairs(embeddings: Tensor, positive_pairs: object, *, validate: bool) -> Targets:
    """Check positive pairs, integers ``[M, 2]``, and where values are read: in range.

    Raises:
        TypeError: not a tensor, or not integers.
        ValueError: a wrong shape, another device than the embeddings', or an entry out of range.
    """
    count = embeddings.shape[0]
    tensor = _given("positive_pairs", positive_pairs, embeddings)
    if tensor.ndim != 2 or tensor.shape[1] != 2:
        raise ValueError(f"positive_pairs: expected shape [M, 2], got shape {_shape(tensor)}")
    if device.may_read(tensor, validate):
        position = _first(((tensor < 0) | (tensor >= count)).any(1))
        if position is not None:
            pair = tensor[position].tolist()
            raise ValueError(
                f"positive_pairs: expected rows in the range 0 to {count - 1}, got {pair} at position {position}",
            )
    return Targets("pairs", tensor)


def _given(
    name: str,
    value: object,
    embeddings: Tensor,
    shape: list[int] | None = None,
    meaning: str = "",
    kind: str = "integer",
) -> Tensor:
    """Check the dtype, shape and device of integers, of labels (integers or bool) or of flags ("bool")."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
    is_bool = value.dtype == torch.bool
    if kind == "bool" and not is_bool:
        raise TypeError(f"{name}: expected dtype bool, got {value.dtype}")
    if value.is_floating_point() or value.is_complex() or (is_bool and kind == "integer"):
        raise TypeError(f"{name}: expected an integer dtype, got {value.dtype}")
    if shape is not None and list(value.shape) != shape:
        raise ValueError(f"{name}: expected {meaning}, shape {shape}, got shape {_shape(value)}")
    if value.device != embeddings.device:
        raise ValueError(f"{name}: expected the embeddings' device, {embeddings.device}, got {value.device}")
    if kind == "bool":
        return value
    # Only equality of labels matters, and it survives reading unsigned 64-bit integers as signed ones.
    return value.view(torch.int64) if value.dtype == torch.uint64 else value.to(torch.int64)


def _first(flags: Tensor) -> int | None:
    """Return the first true position of bool ``[K]``, or None."""
    return int(flags.int().argmax()) if bool(flags.any()) else None


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)
