"""Argument checks, shared by every loss: one line each, naming the argument, what is expected and what was got.

Types, dtypes, shapes, devices and options are checked always. Checks that read values cost an accelerator a
synchronisation, so they run on the CPU, or where ``validate`` asks for them, and never while a graph is being compiled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import cast, get_args

import torch
from torch import Tensor

from .engine import MODERATE, Backend, Denominator, References, Similarity, Targets, device, measure

SIMILARITIES: tuple[str, ...] = get_args(Similarity)
DENOMINATORS: tuple[str, ...] = get_args(Denominator)
NO_POSITIVE = ("zero", "drop", "nan")
NO_NEGATIVE = ("zero", "nan")
REDUCTIONS = ("mean", "sum", "none")
PAIR_REDUCTIONS = (*REDUCTIONS, "mean_pairs")
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
    if _reads_values(value, validate):
        check_number("temperature", float(value.detach()))


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
    direction: object = "both",
    backend: object = "auto",
    validate: bool = False,
    reductions: Sequence[str] = REDUCTIONS,
) -> None:
    """Check the options of a loss; those that it lacks keep a valid default.

    Raises:
        TypeError: a temperature is no number.
        ValueError: a temperature is not positive and finite, or an option has an unknown value.
    """
    check_temperature(temperature, validate=validate)
    if base_temperature is not None:
        check_number("base_temperature", base_temperature)
    check_choice("similarity", similarity, SIMILARITIES)
    check_choice("denominator", denominator, DENOMINATORS)
    check_choice("no_positive", no_positive, NO_POSITIVE)
    check_choice("no_negative", no_negative, NO_NEGATIVE)
    check_choice("reduction", reduction, reductions)
    check_choice("direction", direction, DIRECTIONS)
    check_choice("backend", backend, BACKENDS)


def check_embeddings(
    embeddings: object,
    *,
    similarity: str,
    validate: bool,
    name: str = "embeddings",
    shape: str = "[N, D]",
    least: int = 2,
) -> tuple[Tensor, Tensor | None]:
    """Check embeddings ``[N, D]``, D >= 1, real floating, and where values are read: finite, no zero row.

    Args:
        embeddings: the argument.
        similarity: "cosine" or "dot".
        validate: whether to read values on an accelerator too.
        name: what the argument is called.
        shape: how its shape is written.
        least: the fewest rows allowed.

    Returns:
        The embeddings, and where values were read and are of moderate size their norms ``[N, 1]`` in float64.

    Raises:
        TypeError: not a tensor, or not of a floating dtype.
        ValueError: wrong shape, NaN or infinity, or a zero row under "cosine".
    """
    tensor = _tensor(name, embeddings)
    if not tensor.is_floating_point():
        raise TypeError(f"{name}: expected a floating dtype, got {tensor.dtype}")
    if tensor.ndim != 2:
        raise ValueError(f"{name}: expected shape {shape}, got shape {_shape(tensor)}")
    if tensor.shape[0] < least:
        rows = "row" if least == 1 else "rows"
        raise ValueError(f"{name}: expected at least {least} {rows}, got shape {_shape(tensor)}")
    if tensor.shape[1] < 1:
        raise ValueError(f"{name}: expected at least 1 column, got shape {_shape(tensor)}")
    if not _reads_values(tensor, validate):
        return tensor, None
    # One number per row decides: NaN and infinity both survive it, and only a zero row gives zero.
    narrow = tensor.dtype != torch.float64 and tensor.device.type != "mps"
    sizes = measure(tensor) if narrow else tensor.detach().abs().amax(1)
    low, high = (float(end) for end in torch.aminmax(sizes))
    if not high < math.inf:
        row = _first(~sizes.isfinite().view(-1))
        raise ValueError(f"{name}: expected finite values, got NaN or infinity in row {row}")
    if similarity == "cosine" and low == 0:
        row = _first(sizes.view(-1) == 0)
        raise ValueError(f"{name}: expected no zero row under cosine similarity, got zeros in row {row}")
    return tensor, sizes if narrow and low > 1 / MODERATE and high < MODERATE else None


def check_references(
    embeddings: Tensor,
    ref_embeddings: object,
    self_rows: object,
    *,
    ref_labels: object = None,
    similarity: str,
    validate: bool,
) -> References | None:
    """Check references ``[M, D]``, and self_rows, integers ``[N]`` from -1 to M - 1 or None.

    Raises:
        TypeError: not tensors, or of a wrong dtype.
        ValueError: a wrong shape, value or device, or what belongs to references without them.
    """
    if ref_embeddings is None:
        for name, value in (("ref_labels", ref_labels), ("self_rows", self_rows)):
            if value is not None:
                raise ValueError(f"{name}: expected ref_embeddings with it, got none")
        return None
    tensor, _ = check_embeddings(
        ref_embeddings, similarity=similarity, validate=validate, name="ref_embeddings", shape="[M, D]", least=1
    )
    check_alike("ref_embeddings", tensor, "embeddings", embeddings)
    if self_rows is None:
        return References(tensor)
    own = _integers("self_rows", self_rows)
    count, columns = embeddings.shape[0], tensor.shape[0]
    if own.shape != (count,):
        raise ValueError(f"self_rows: expected one row per embedding, shape [{count}], got shape {_shape(own)}")
    _same_device("self_rows", own, embeddings)
    own = _to_int64(own)
    if _reads_values(own, validate):
        row = _first((own < -1) | (own >= columns))
        if row is not None:
            value = int(own[row])
            raise ValueError(f"self_rows: expected rows in the range -1 to {columns - 1}, got {value} in row {row}")
    return References(tensor, own)


def _columns(references: References) -> int:
    return cast(Tensor, references.embeddings).shape[0]


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
    embeddings: Tensor,
    labels: object,
    positives: object,
    *,
    references: References | None = None,
    ref_labels: object = None,
) -> Targets:
    """Check that exactly one of labels ``[N]`` and positives ``[N, M]`` is given, and ref_labels ``[M]`` with labels.

    Without references M is N, and there are no ref_labels.

    Raises:
        TypeError: not a tensor, labels not integers, or positives not bool.
        ValueError: both or neither given, a wrong shape, or another device than the embeddings'.
    """
    count = embeddings.shape[0]
    columns = count if references is None else _columns(references)
    if (labels is None) == (positives is None):
        got = "neither" if labels is None else "both"
        raise ValueError(f"labels: expected exactly one of labels and positives, got {got}")
    if labels is None:
        if ref_labels is not None:
            raise ValueError("ref_labels: expected labels with it, got positives")
        return Targets("mask", _mask("positives", positives, embeddings, [count, columns], "one flag per pair"))
    own = _labels("labels", labels, count, "embedding", embeddings)
    if references is None:
        return Targets("labels", own)
    if ref_labels is None:
        raise ValueError(f"ref_labels: expected one label per reference, shape [{columns}], got none")
    others = _labels("ref_labels", ref_labels, columns, "reference", embeddings)
    if (cast(Tensor, labels).dtype == torch.uint64) != (cast(Tensor, ref_labels).dtype == torch.uint64):
        own, others = _numbered(cast(Tensor, labels), cast(Tensor, ref_labels), own, others)
    return Targets("labels", own, others)


def _numbered(labels: Tensor, ref_labels: Tensor, own: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Number labels of which some are unsigned 64-bit integers anew: read as signed, the largest would be negative."""
    both = [(own, labels.dtype == torch.uint64), (others, ref_labels.dtype == torch.uint64)]
    keys = [torch.stack((values, (values < 0) & unsigned), 1) for values, unsigned in both]
    numbers = torch.unique(torch.cat(keys), dim=0, return_inverse=True)[1]
    return numbers[: own.shape[0]], numbers[own.shape[0] :]


def _labels(name: str, value: object, count: int, of: str, embeddings: Tensor) -> Tensor:
    tensor = _integers(name, value, boolean=True)
    if tensor.shape != (count,):
        raise ValueError(f"{name}: expected one label per {of}, shape [{count}], got shape {_shape(tensor)}")
    _same_device(name, tensor, embeddings)
    return _to_int64(tensor)


def check_anchors(embeddings: Tensor, anchors: object) -> Tensor | None:
    """Check anchors, bool ``[N]`` or None.

    Raises:
        TypeError: not a tensor, or not bool.
        ValueError: a wrong shape, or another device than the embeddings'.
    """
    if anchors is None:
        return None
    return _mask("anchors", anchors, embeddings, [embeddings.shape[0]], "one flag per embedding")


def check_partners(
    embeddings: Tensor, partners: object, *, references: References | None = None, validate: bool
) -> Targets:
    """Check partners, integers ``[N]``, and where values are read: in range, never the row itself, mutual.

    With references they are rows of those, and need not be mutual.

    Raises:
        TypeError: not a tensor, or not integers.
        ValueError: a wrong shape, another device than the embeddings', or an impossible partner.
    """
    count = embeddings.shape[0]
    columns = count if references is None else _columns(references)
    tensor = _integers("partners", partners)
    if tensor.shape != (count,):
        raise ValueError(f"partners: expected one partner per embedding, shape [{count}], got shape {_shape(tensor)}")
    _same_device("partners", tensor, embeddings)
    tensor = _to_int64(tensor)
    if _reads_values(tensor, validate):
        own = torch.arange(count, device=tensor.device) if references is None else references.own
        if references is not None or not _are_mutual(tensor, cast(Tensor, own)):
            _refuse_partners(tensor, own, columns, mutual=references is None)
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
    return Targets("pairs", tensor)


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
    return validate or device.may_read(tensor)


def _first(flags: Tensor) -> int | None:
    """Return the first true position of bool ``[K]``, or None."""
    return int(flags.int().argmax()) if bool(flags.any()) else None


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)
