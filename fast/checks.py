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

from .engine import Denominator, PairList, Pairs, Partners, PositiveMask, SameLabel, Similarity

SIMILARITIES: tuple[str, ...] = get_args(Similarity)
DENOMINATORS: tuple[str, ...] = get_args(Denominator)
NO_POSITIVE = ("zero", "drop", "nan")
NO_NEGATIVE = ("zero", "nan")
REDUCTIONS = ("mean", "sum", "none")
PAIR_REDUCTIONS = (*REDUCTIONS, "mean_pairs")


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


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Check that an option is one of its allowed values.

    Raises:
        ValueError: it is not.
    """
    if not (isinstance(value, str) and value in choices):
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")


def check_options(
    temperature: object,
    base_temperature: object,
    *,
    similarity: object,
    reduction: object,
    denominator: object = "all",
    no_positive: object = "zero",
    no_negative: object = "zero",
    reductions: Sequence[str] = REDUCTIONS,
) -> None:
    """Check the options of a loss; those that it lacks keep a valid default.

    Raises:
        TypeError: a temperature is no number.
        ValueError: a temperature is not positive and finite, or an option has an unknown value.
    """
    check_number("temperature", temperature)
    if base_temperature is not None:
        check_number("base_temperature", base_temperature)
    check_choice("similarity", similarity, SIMILARITIES)
    check_choice("denominator", denominator, DENOMINATORS)
    check_choice("no_positive", no_positive, NO_POSITIVE)
    check_choice("no_negative", no_negative, NO_NEGATIVE)
    check_choice("reduction", reduction, reductions)


def check_embeddings(embeddings: object, *, similarity: str, validate: bool) -> Tensor:
    """Check embeddings ``[N, D]``, N >= 2, D >= 1, real floating, and where values are read: finite, no zero row.

    Returns:
        The embeddings.

    Raises:
        TypeError: not a tensor, or not of a floating dtype.
        ValueError: wrong shape, NaN or infinity, or a zero row under "cosine".
    """
    tensor = _tensor("embeddings", embeddings)
    if not tensor.is_floating_point():
        raise TypeError(f"embeddings: expected a floating dtype, got {tensor.dtype}")
    if tensor.ndim != 2:
        raise ValueError(f"embeddings: expected shape [N, D], got shape {_shape(tensor)}")
    if tensor.shape[0] < 2:
        raise ValueError(f"embeddings: expected at least 2 rows, got shape {_shape(tensor)}")
    if tensor.shape[1] < 1:
        raise ValueError(f"embeddings: expected at least 1 column, got shape {_shape(tensor)}")
    if _reads_values(tensor, validate):
        values = tensor.detach()
        row = _first(~values.isfinite().all(1))
        if row is not None:
            raise ValueError(f"embeddings: expected finite values, got NaN or infinity in row {row}")
        row = _first((values == 0).all(1)) if similarity == "cosine" else None
        if row is not None:
            raise ValueError(f"embeddings: expected no zero row under cosine similarity, got zeros in row {row}")
    return tensor


def check_labels_or_positives(embeddings: Tensor, labels: object, positives: object) -> Pairs:
    """Check that exactly one of labels ``[N]`` and positives ``[N, N]`` is given, and describe it.

    Raises:
        TypeError: not a tensor, labels not integers, or positives not bool.
        ValueError: both or neither given, a wrong shape, or another device than the embeddings'.
    """
    count = embeddings.shape[0]
    if (labels is None) == (positives is None):
        got = "neither" if labels is None else "both"
        raise ValueError(f"labels: expected exactly one of labels and positives, got {got}")
    if labels is None:
        return PositiveMask(_mask("positives", positives, embeddings, [count, count], "one flag per pair"))
    tensor = _integers("labels", labels, boolean=True)
    if tensor.shape != (count,):
        raise ValueError(f"labels: expected one label per embedding, shape [{count}], got shape {_shape(tensor)}")
    _same_device("labels", tensor, embeddings)
    return SameLabel(_to_int64(tensor))


def check_anchors(embeddings: Tensor, anchors: object) -> Tensor | None:
    """Check anchors, bool ``[N]`` or None.

    Raises:
        TypeError: not a tensor, or not bool.
        ValueError: a wrong shape, or another device than the embeddings'.
    """
    if anchors is None:
        return None
    return _mask("anchors", anchors, embeddings, [embeddings.shape[0]], "one flag per embedding")


def check_partners(embeddings: Tensor, partners: object, *, validate: bool) -> Partners:
    """Check partners, integers ``[N]``, and where values are read: in range, never the row itself, mutual.

    Raises:
        TypeError: not a tensor, or not integers.
        ValueError: a wrong shape, another device than the embeddings', or an impossible partner.
    """
    count = embeddings.shape[0]
    tensor = _integers("partners", partners)
    if tensor.shape != (count,):
        raise ValueError(f"partners: expected one partner per embedding, shape [{count}], got shape {_shape(tensor)}")
    _same_device("partners", tensor, embeddings)
    tensor = _to_int64(tensor)
    if _reads_values(tensor, validate):
        own = torch.arange(count, device=tensor.device)
        row = _first((tensor < 0) | (tensor >= count))
        if row is not None:
            value = int(tensor[row])
            raise ValueError(f"partners: expected rows in the range 0 to {count - 1}, got {value} in row {row}")
        row = _first(tensor == own)
        if row is not None:
            raise ValueError(f"partners: expected another row as partner, got row {row} as partner of itself")
        row = _first(tensor[tensor] != own)
        if row is not None:
            other = int(tensor[row])
            back = int(tensor[other])
            raise ValueError(
                f"partners: expected mutual partners, got {other} in row {row} but {back} in row {other}",
            )
    return Partners(tensor)


def check_positive_pairs(embeddings: Tensor, positive_pairs: object, *, validate: bool) -> PairList:
    """Check positive pairs, integers ``[M, 2]``, and where values are read: in range.

    Raises:
        TypeError: not a tensor, or not integers.
        ValueError: a wrong shape, another device than the embeddings', or an entry out of range.
    """
    count = embeddings.shape[0]
    tensor = _integers("positive_pairs", positive_pairs)
    if tensor.ndim != 2 or tensor.shape[1] != 2:
        raise ValueError(f"positive_pairs: expected shape [M, 2], got shape {_shape(tensor)}")
    _same_device("positive_pairs", tensor, embeddings)
    tensor = _to_int64(tensor)
    if _reads_values(tensor, validate):
        position = _first(((tensor < 0) | (tensor >= count)).any(1))
        if position is not None:
            pair = tensor[position].tolist()
            raise ValueError(
                f"positive_pairs: expected rows in the range 0 to {count - 1}, got {pair} at position {position}",
            )
    return PairList(tensor)


def _tensor(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
    return value


def _integers(name: str, value: object, *, boolean: bool = False) -> Tensor:
    tensor = _tensor(name, value)
    if tensor.is_floating_point() or tensor.is_complex() or (tensor.dtype == torch.bool and not boolean):
        raise TypeError(f"{name}: expected an integer dtype, got {tensor.dtype}")
    return tensor


def _mask(name: str, value: object, embeddings: Tensor, shape: list[int], meaning: str) -> Tensor:
    tensor = _tensor(name, value)
    if tensor.dtype != torch.bool:
        raise TypeError(f"{name}: expected dtype bool, got {tensor.dtype}")
    if list(tensor.shape) != shape:
        raise ValueError(f"{name}: expected {meaning}, shape {shape}, got shape {_shape(tensor)}")
    _same_device(name, tensor, embeddings)
    return tensor


def _same_device(name: str, tensor: Tensor, embeddings: Tensor) -> None:
    if tensor.device != embeddings.device:
        raise ValueError(f"{name}: expected the embeddings' device, {embeddings.device}, got {tensor.device}")


def _to_int64(tensor: Tensor) -> Tensor:
    # Only equality of labels matters, and it survives reading unsigned 64-bit integers as signed ones.
    return tensor.view(torch.int64) if tensor.dtype == torch.uint64 else tensor.to(torch.int64)


def _reads_values(tensor: Tensor, validate: bool) -> bool:
    if torch.compiler.is_compiling() or tensor.device.type == "meta":
        return False
    return validate or tensor.device.type == "cpu"


def _first(flags: Tensor) -> int | None:
    """Return the first true position of bool ``[K]``, or None."""
    return int(flags.int().argmax()) if bool(flags.any()) else None


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)
