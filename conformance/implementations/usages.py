"""Usages: other ways to call a loss that must not change its result. Also the side effects of calls.

A usage changes one of:

- the arguments, such as the dtype of labels or the layout of rows
- the call, such as another thread or a second call of one instance
- its surroundings, such as autocast or ``torch.no_grad``

``USAGES`` lists all usages. ``Use`` is one evaluation under a usage, and records the side effects.
"""

from __future__ import annotations

import math
import random
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..suite.cases import MATRICES, Case, row_norms
from ..suite.levels import Level
from ..truth.kinks import maximum_is_tied
from .base import gradients_of
from .signatures import Claim, is_module

EVERY_ARRAY = ("torch", "numpy", "jax")

Arguments = tuple[list[Any], dict[str, Any]]
"""The positional arguments of a call, and its keywords by their names in the catalogue."""


@dataclass(frozen=True)
class Usage:
    """A way to call a loss.

    Attributes:
        name: short name; the check is called "usage/NAME".
        words: what is changed, for messages.
        level: the level of its check.
        case: turns an ordinary case into the one that is judged; returns None if the usage does not apply.
        arguments: changes the arguments of the call.
        around: returns a context manager for the call, given the device type.
        call: calls the target.
        arrays: the kinds of arrays to which it applies.
        dtype: the dtype of the rows; "" for that of the check.
        rounds: the dtype to which intermediate results may be rounded; "" for float64 if the rows are float64, else
            float32.
        refusable: errors with which a target may refuse the usage: "any"; "named" for errors that mention a dtype or a
            layout; "" for none.
        modules: whether it applies to torch modules only.
        frozen: the matrices without gradient: 0 for the first, 1 for all others; None if all have one.
        joined: whether the gradient of the first matrix includes that of the second.
        differentiable: whether gradients are judged.
        upstream: function from the number of values to their upstream gradients; if None, these are the weights of the
            reduction.
        scale: factor of the loss, as in mixed-precision training.
        temperature: the temperature whose gradient is judged: "tensor" for an argument, "learned" for a parameter, ""
            for none.
        bias: the same for the bias.
        expects: "the truth"; "the truth or an error"; or "NaN", for a result that is not finite or an error.
        reveals: the kinds of side effects that are failures of this usage.
    """

    name: str
    words: str
    level: Level = Level.POLICIES
    case: Callable[[Case, Claim], Case | None] = lambda case, claim: case
    arguments: Callable[[list[Any], dict[str, Any]], Arguments] = lambda positional, keywords: (positional, keywords)
    around: Callable[[str], AbstractContextManager[Any]] = lambda device: nullcontext()
    call: Callable[..., Any] = lambda called, positional, keywords: called(*positional, **keywords)
    arrays: tuple[str, ...] = ("torch",)
    dtype: str = ""
    rounds: str = ""
    refusable: str = ""
    modules: bool = False
    frozen: int | None = None
    joined: bool = False
    differentiable: bool = True
    upstream: Callable[[int], list[float]] | None = None
    scale: float = 1.0
    temperature: str = ""
    bias: str = ""
    expects: str = "the truth"
    reveals: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """The name of its check."""
        return f"usage/{self.name}"

    @property
    def scalar(self) -> str:
        """The scalar whose gradient is judged: "temperature", "bias" or ""."""
        return "temperature" if self.temperature else "bias" if self.bias else ""


def upstream_of(count: int) -> list[float]:
    """Return random upstream gradients for a number of values; the same number always gets the same gradients.

    They are multiples of 1/16 in [-1, 1], which are exact in every dtype. The last of three or more is 0.
    """
    drawn = random.Random(count)
    found = [drawn.choice((-1, 1)) * drawn.randint(1, 16) / 16 for _ in range(count)]
    return [*found[:-1], 0.0] if count > 2 else found


def _is_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1


def _with_rows(change: Callable[[Tensor], Tensor]) -> Callable[..., Arguments]:

    def arguments(positional: list[Any], keywords: dict[str, Any]) -> Arguments:
        named = {name: change(x) if name in MATRICES and _is_rows(x) else x for name, x in keywords.items()}
        return [change(x) if _is_rows(x) else x for x in positional], named

    return arguments


def _with_labels(change: Callable[[Tensor], Tensor]) -> Callable[..., Arguments]:

    def arguments(positional: list[Any], keywords: dict[str, Any]) -> Arguments:
        def changed(x: Any) -> Any:
            return change(x) if isinstance(x, Tensor) and x.dtype == torch.int64 and x.dim() == 1 else x

        named = {name: changed(x) if name in ("labels", "ref_labels") else x for name, x in keywords.items()}
        return [changed(x) for x in positional], named

    return arguments


def _by_columns(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def _within_a_larger(x: Tensor) -> Tensor:
    """Return a view into a larger tensor. Its other entries are NaN, or 77 and 78 for labels."""
    if x.dim() == 1:
        return torch.stack([x.new_full(x.shape, 77), x, x.new_full(x.shape, 78)], dim=1)[:, 1]
    padded = torch.nn.functional.pad(x, (1, 1) * x.dim(), value=math.nan)
    return padded[tuple(slice(1, -1) for _ in x.shape)]


def _strided(positional: list[Any], keywords: dict[str, Any]) -> Arguments:
    return _with_labels(_within_a_larger)(*_with_rows(_within_a_larger)(positional, keywords))


def _frozen(place: int) -> Callable[..., Arguments]:
    """Detach the first matrix (place 0) or all others (place 1)."""

    def arguments(positional: list[Any], keywords: dict[str, Any]) -> Arguments:
        first, *others = positional
        if place == 0:
            return [first.detach(), *others], keywords
        named = {name: x.detach() if name in MATRICES and _is_rows(x) else x for name, x in keywords.items()}
        return [first, *(x.detach() if _is_rows(x) else x for x in others)], named

    return arguments


def _shared(positional: list[Any], keywords: dict[str, Any]) -> Arguments:
    """Make all matrices views of one tensor."""
    found = {
        k: x for k, x in [*enumerate(positional), *keywords.items()] if _is_rows(x) and (k in MATRICES or k in (0, 1))
    }
    # Hard negatives are [N, H, D].
    rows = [x.flatten(0, -2) for x in found.values()]
    parts = torch.tensor_split(torch.cat(rows), np.cumsum([len(each) for each in rows[:-1]]).tolist())
    parted = {k: part.view(x.shape) for (k, x), part in zip(found.items(), parts, strict=True)}
    return [parted.get(k, x) for k, x in enumerate(positional)], {k: parted.get(k, x) for k, x in keywords.items()}


def _of_the_first(positional: list[Any], keywords: dict[str, Any]) -> Arguments:
    """Pass the first matrix also as the second one or as the references."""
    if "ref_embeddings" in keywords:
        return positional, keywords | {"ref_embeddings": positional[0]}
    return [positional[0], positional[0], *positional[2:]], keywords


def _detached(positional: list[Any], keywords: dict[str, Any]) -> Arguments:
    return _with_rows(lambda rows: rows.detach())(positional, keywords)


def _again(called: Callable[..., Any], positional: list[Any], keywords: dict[str, Any]) -> Any:
    """Call it with fewer rows and with rows in another order, and only then as usual."""
    changes: tuple[Callable[[Tensor], Tensor], ...] = (lambda x: x[:-2], lambda x: x.roll(1, 0))
    for change in changes:
        with suppress(Exception):
            called(*(change(x) if isinstance(x, Tensor) and x.dim() else x for x in positional), **keywords)
    return called(*positional, **keywords)


def _in_evaluation_mode(called: Any, positional: list[Any], keywords: dict[str, Any]) -> Any:
    before = called.training
    called.eval()
    try:
        return called(*positional, **keywords)
    finally:
        called.train(before)


def _in_a_thread(called: Callable[..., Any], positional: list[Any], keywords: dict[str, Any]) -> Any:
    found: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(called(*positional, **keywords))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]


def _of_labels(case: Case, claim: Claim) -> Case | None:
    return case if claim.call in ("labels", "features") and "labels" in case.arguments else None


def _labels_as(dtype: torch.dtype) -> Usage:
    name = str(dtype).removeprefix("torch.")

    def chosen(case: Case, claim: Claim) -> Case | None:
        if not _of_labels(case, claim):
            return None
        labels = {*case.arguments["labels"], *case.arguments.get("ref_labels", ())}
        if dtype == torch.bool:
            return case if labels == {0, 1} else None
        return case if torch.iinfo(dtype).min <= min(labels) <= max(labels) <= torch.iinfo(dtype).max else None

    def changed(labels: Tensor) -> Tensor:
        return labels.to(dtype)

    usage = Usage(f"labels-{name}", f"labels as {name}", case=chosen, arguments=_with_labels(changed))
    return replace(usage, arrays=EVERY_ARRAY, refusable="named")


def _of_two_matrices(case: Case, claim: Claim) -> Case | None:
    if claim.call == "similarities" or not (len(case.matrices) > 1 or claim.call == "views"):
        return None
    own = claim.settings.get("direction")
    if not claim.directed_here or case.option("direction") == own:
        return case
    # In another direction, pairproof would swap the towers.
    return replace(case, id=f"{case.id}, direction {own}", keywords={**case.keywords, "direction": own})


def _of_each(case: Case, claim: Claim) -> Case | None:
    """Return the case with reduction "none"."""
    if claim.values_of("reduction") not in (None, ("none",)) and "none" not in (claim.values_of("reduction") or ()):
        return None
    return replace(case, id=f"{case.id}, reduction none", keywords={**case.keywords, "reduction": "none"})


def _of_each_that_counts(case: Case, claim: Claim) -> Case | None:
    """Return the case with reduction "none" and no_positive "drop", where the first row has no positives."""
    policies = claim.values_of("no_positive") if "no_positive" in case.entry.choices else ()
    if (policies is not None and "drop" not in policies) or case.others or "labels" not in case.arguments:
        return None
    labels = [max(case.arguments["labels"]) + 1, *case.arguments["labels"][1:]]
    case = replace(case, arguments={**case.arguments, "labels": labels})
    return _of_each(replace(case, keywords={**case.keywords, "no_positive": "drop"}), claim)


def _of_one_anchor(case: Case, claim: Claim) -> Case | None:
    """Return the case with reduction "none" and only the first row as anchor."""
    if "anchors" not in claim.passed or "anchors" not in case.entry.keywords:
        return None
    anchors = [i == 0 for i in range(case.n)]
    return _of_each(replace(case, keywords={**case.keywords, "anchors": anchors}), claim)


def _of_a_repeated_row(case: Case, claim: Claim) -> Case | None:
    """Return the case with its first row also as the second one."""
    rows = np.concatenate([case.embeddings[:1], case.embeddings[:1], case.embeddings[2:]])
    changed = replace(case, id=f"{case.id}, the first row twice", embeddings=rows)
    # The derivative of a tied maximum is not defined.
    return None if maximum_is_tied(changed) else changed


def _of_the_same_tensor(case: Case, claim: Claim) -> Case | None:
    """Return the case with its embeddings also as the second tower or as the references."""
    arguments = {name: value for name, value in case.arguments.items() if name != "self_rows"}
    if case.entry.two_towers:
        if len(case.others["embeddings_b"]) != case.n:
            return None
        name = "embeddings_b"
    elif "ref_embeddings" in case.others and "labels" in arguments:
        name, arguments["ref_labels"] = "ref_embeddings", arguments["labels"]
    else:
        return None
    others = {**case.others, name: case.embeddings}
    changed = replace(case, id=f"{case.id}, the same tensor twice", arguments=arguments, others=others)
    return _of_two_matrices(changed, claim)


def _wider(copies: int) -> Callable[[Case, Claim], Case | None]:
    """Repeat the columns of small cases and add a column of zeros; a scale factor preserves the similarities."""

    def widened(case: Case, claim: Claim) -> Case | None:
        def wide(rows: Any) -> Any:
            return np.pad(np.tile(rows / math.sqrt(copies), (1, copies)), ((0, 0), (0, 1)))

        if case.n > 8 or case.size > 12:
            return None
        others = {name: wide(rows) for name, rows in case.others.items()}
        return replace(case, id=f"{case.id}, widened", embeddings=wide(case.embeddings), others=others)

    return widened


def _with_first_row(value: float) -> Callable[[Case, Claim], Case | None]:

    def changed(case: Case, claim: Claim) -> Case | None:
        if not math.isnan(value) and (claim.normalised or case.option("similarity") != "cosine"):
            return None
        rows = case.embeddings.copy()
        rows[0] = value
        chosen = case.option("anchors")
        return replace(case, embeddings=rows) if chosen is None or chosen[0] else None

    return changed


def _with_long_rows(case: Case, claim: Claim) -> Case | None:
    """Scale the rows to norms of 512 or more, whose squares exceed the range of float16."""
    norms = np.concatenate([row_norms(rows) for rows in case.matrices.values()])
    factor = 2.0 ** math.ceil(math.log2(512 / norms.min()))
    if claim.normalised or case.option("similarity") != "cosine" or factor * norms.max() > 2**14:
        return None
    others = {name: factor * rows for name, rows in case.others.items()}
    changed = replace(case, id=f"{case.id}, scaled", embeddings=factor * case.embeddings, others=others)
    return _in_dtype("float16")(changed, claim)


def _at_temperature(**keywords: float) -> Callable[[Case, Claim], Case | None]:
    """Change the temperature and other options, if they are passed to the target."""

    def changed(case: Case, claim: Claim) -> Case | None:
        if claim.temperature is not None or not {*keywords} <= {*claim.passed}:
            return None
        # A loss that rounds this number would lose some of its decimals.
        given = {"temperature": 0.37109375, **keywords}
        words = ", ".join(f"{name} {value:g}" for name, value in given.items())
        return replace(case, id=f"{case.id}, {words}", keywords={**case.keywords, **given})

    return changed


def _at_bias(case: Case, claim: Claim) -> Case | None:
    """Change the bias, if it is passed to the target."""
    if "bias" not in claim.passed or "bias" in claim.settings:
        return None
    # A loss that rounds this number would lose some of its decimals.
    return replace(case, id=f"{case.id}, bias -2.37109375", keywords={**case.keywords, "bias": -2.37109375})


def _of_any_bias(case: Case, claim: Claim) -> Case | None:
    return case if "bias" in case.entry.keywords else None


def _of_any_temperature(case: Case, claim: Claim) -> Case | None:
    # At 1, a temperature equals its inverse.
    return case if case.temperature != 1 else None


def _in_dtype(dtype: str) -> Callable[[Case, Claim], Case | None]:
    def chosen(case: Case, claim: Claim) -> Case | None:
        # The exponentials of logits must fit into float16, even without subtracting a maximum.
        fits = dtype != "float16" or case.temperature >= 0.2 or claim.temperature is not None
        return case if case.holds_in(dtype) and not claim.normalised and fits else None

    return chosen


PLAIN = Usage("", "as usual")
USAGES: tuple[Usage, ...] = (
    Usage("upstream", "random upstream gradients", Level.FORMULA, case=_of_each, upstream=upstream_of),
    Usage(
        "upstream-with-drop",
        "random upstream gradients, with an anchor that is left out",
        Level.FORMULA,
        case=_of_each_that_counts,
        upstream=upstream_of,
    ),
    Usage("scaled-loss", "a loss that is scaled by 65536", Level.FORMULA, scale=65536.0),
    Usage("negative-loss", "a loss that is multiplied by -0.3", Level.FORMULA, scale=-0.3),
    Usage(
        "temperature-tensor",
        "a temperature given as a tensor",
        Level.FORMULA,
        case=_at_temperature(),
        refusable="any",
        temperature="tensor",
    ),
    Usage(
        "temperature-tensor-and-base",
        "a temperature given as a tensor, with a base temperature",
        Level.FORMULA,
        case=_at_temperature(base_temperature=0.125),
        refusable="any",
        temperature="tensor",
    ),
    Usage(
        "learned-temperature",
        "a learned temperature",
        Level.FORMULA,
        case=_of_any_temperature,
        dtype="float32",
        temperature="learned",
    ),
    Usage("bias-tensor", "a bias given as a tensor", Level.FORMULA, case=_at_bias, refusable="any", bias="tensor"),
    Usage("learned-bias", "a learned bias", Level.FORMULA, case=_of_any_bias, dtype="float32", bias="learned"),
    Usage("wide", "16 times as many columns", Level.FORMULA, case=_wider(16), arrays=EVERY_ARRAY),
    Usage("wider", "64 times as many columns", Level.FORMULA, case=_wider(64), arrays=EVERY_ARRAY),
    _labels_as(torch.int32),
    _labels_as(torch.int16),
    _labels_as(torch.uint8),
    _labels_as(torch.bool),
    Usage(
        "labels-column",
        "labels of shape [N, 1]",
        Level.RANGE,
        case=_of_labels,
        arguments=_with_labels(lambda labels: labels[:, None]),
        arrays=("torch", "numpy"),
        expects="the truth or an error",
    ),
    Usage("repeated-row", "two equal rows", case=_of_a_repeated_row, arrays=EVERY_ARRAY),
    Usage(
        "by-columns",
        "rows stored by columns",
        arguments=_with_rows(_by_columns),
        arrays=("torch", "numpy"),
        refusable="named",
    ),
    Usage(
        "strided",
        "rows and labels that are views into larger tensors",
        arguments=_strided,
        arrays=("torch", "numpy"),
        refusable="named",
    ),
    Usage("shared-memory", "matrices that share memory", case=_of_two_matrices, arguments=_shared),
    Usage(
        "separate-memory",
        "matrices that share no memory",
        case=_of_two_matrices,
        arguments=_with_rows(lambda rows: rows.clone()),
    ),
    Usage(
        "first-frozen",
        "a first matrix without gradient",
        case=_of_two_matrices,
        arguments=_frozen(0),
        frozen=0,
    ),
    Usage(
        "others-frozen",
        "other matrices without gradient",
        case=_of_two_matrices,
        arguments=_frozen(1),
        frozen=1,
    ),
    Usage(
        "same-tensor",
        "one tensor as both matrices",
        case=_of_the_same_tensor,
        arguments=_of_the_first,
        joined=True,
    ),
    Usage(
        "all-frozen",
        "rows without gradient",
        arguments=_detached,
        differentiable=False,
        reveals=("requires-grad", "leaf-grad"),
    ),
    Usage("one-anchor", "one anchor under reduction none", case=_of_one_anchor, reveals=("result-shape",)),
    Usage("no-grad", "torch.no_grad", around=lambda device: torch.no_grad(), differentiable=False),
    Usage("evaluation-mode", "evaluation mode", call=_in_evaluation_mode, modules=True),
    Usage("second-call", "a second call of one instance", call=_again, arrays=EVERY_ARRAY),
    Usage("thread", "another thread", call=_in_a_thread),
    Usage(
        "autocast",
        "autocast to bfloat16",
        around=lambda device: torch.autocast(device, dtype=torch.bfloat16),
        dtype="float32",
        rounds="bfloat16",
        refusable="named",
    ),
    *(
        Usage(dtype, f"rows of {dtype}", case=_in_dtype(dtype), dtype=dtype, rounds=dtype, refusable="named")
        for dtype in ("bfloat16", "float16")
    ),
    Usage(
        "float16-long-rows",
        "rows of float16 with norms of 512 or more",
        Level.RANGE,
        case=_with_long_rows,
        dtype="float16",
        rounds="float16",
        refusable="named",
    ),
    Usage("infinite-row", "an infinite row", case=_with_first_row(math.inf), arrays=EVERY_ARRAY, expects="NaN"),
    Usage("nan-row", "a row of NaN", case=_with_first_row(math.nan), arrays=EVERY_ARRAY, expects="NaN"),
    Usage("zero-row", "a row of zeros", Level.RANGE, case=_with_first_row(0.0), arrays=EVERY_ARRAY, expects="NaN"),
)
"""All usages, in the order in which they are judged."""

BY_NAME: Mapping[str, Usage] = {usage.name: usage for usage in (PLAIN, *USAGES)}

_PARAMETERS = {"temperature": ("temperature", "temp", "tau", "scale", "log_t", "logit_t"), "bias": ("bias",)}
"""Parts of parameter names that suggest a learned temperature or bias."""

Slope = tuple[Callable[[float], float], Callable[[float], float]]

_ITSELF: Slope = (lambda x: x, lambda x: 1.0)
SLOPES: Mapping[str, tuple[Slope, ...]] = {
    "temperature": (
        _ITSELF,
        (lambda t: 1 / t, lambda t: -1 / t**2),
        (math.log, lambda t: 1 / t),
        (lambda t: -math.log(t), lambda t: -1 / t),
    ),
    "bias": (_ITSELF,),
}
"""Functions of the temperature or the bias that a parameter may store, with their derivatives."""


class NotApplicable(Exception):
    """The usage does not apply to the target."""


def _state() -> dict[str, Any]:
    """Return the state that a loss must not change, by the kind of side effect."""
    numpy_state: Any = np.random.get_state(legacy=False)  # noqa: NPY002 (the global generator)
    return {
        "default-dtype": torch.get_default_dtype(),
        "grad-mode": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "anomaly-mode": torch.is_anomaly_enabled(),
        "deterministic-mode": torch.are_deterministic_algorithms_enabled(),
        "warnings": [one for one in warnings.filters if one[1:] == (None, Warning, None, 0)],
        "matmul-precision": torch.get_float32_matmul_precision(),
        "numpy-errors": np.geterr(),
        "torch-generator": torch.get_rng_state().numpy().tobytes(),
        "numpy-generator": (numpy_state["state"]["key"].tobytes(), numpy_state["state"]["pos"]),
        "python-generator": random.getstate(),
    }


SIDE_EFFECTS = {
    "default-dtype": "changes torch's default dtype",
    "grad-mode": "changes whether torch records gradients",
    "threads": "changes the number of torch's threads",
    "anomaly-mode": "changes whether torch detects anomalies",
    "deterministic-mode": "changes whether torch uses deterministic algorithms",
    "warnings": "changes how all warnings are handled",
    "matmul-precision": "changes the precision of torch's matrix products",
    "numpy-errors": "changes how numpy handles floating-point errors",
    "torch-generator": "changes the state of torch's global random generator",
    "numpy-generator": "changes the state of numpy's global random generator",
    "python-generator": "changes the state of Python's global random generator",
    "changed-input": "changes its inputs in place",
    "leaf-grad": "changes the attribute grad of its inputs",
    "requires-grad": "changes whether its inputs require a gradient",
    "result-shape": "returns a result of another shape",
    "result-dtype": "returns a wider dtype than that of the rows",
}
"""The kinds of side effects, in words. Their checks are called "side-effects/KIND"."""


GRAD = 3.0
"""The entries of ``grad`` before the call, as if the caller had accumulated gradients."""


def _with_grad(x: Tensor) -> tuple[Tensor, Tensor]:
    x.grad = torch.full_like(x.detach(), GRAD)
    return x, x.grad


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value.copy()


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")
    one = one.detach()
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


class _Scalar(Tensor):
    """A temperature or bias that records which functions convert it to a number."""

    reads: list[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("item", "tolist", "numpy", "__float__", "__int__", "__array__"):
            next(x for x in args if isinstance(x, cls)).reads.append(name)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@dataclass(eq=False)
class Use:
    """One evaluation of a target under a usage, as a context manager that records side effects.

    Attributes:
        usage: the usage.
        rows: the matrices that are differentiated, by name.
        temperature: the temperature of the case.
        bias: the bias of the case.
        each: whether one value per anchor or per pair is expected; None to accept any shape.
        slopes: tensors that store the temperature or the bias, each with its derivative with respect to that scalar.
        seen: the side effects in words, by kind.
        notes: what cannot be judged, in words.
        reads: functions with which the target converts the temperature or bias tensor to a number.
        documented: whether the signature says that the temperature or the bias may be a tensor.
    """

    usage: Usage = PLAIN
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    temperature: float = math.nan
    bias: float = math.nan
    each: bool | None = None
    slopes: list[tuple[Tensor, float]] = field(default_factory=list)
    seen: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    documented: bool = False

    def __enter__(self) -> Use:
        """Record the state of the process."""
        self._grads = list(map(_with_grad, self.rows.values()))
        self._before = _state()
        return self

    def __exit__(self, *_: object) -> None:
        """Record the side effects of the body."""
        now = _state()
        self.seen |= {kind: SIDE_EFFECTS[kind] for kind, value in self._before.items() if now[kind] != value}
        self._compare_grads(self._grads)

    def _compare_grads(self, grads: list[tuple[Tensor, Tensor]]) -> None:
        with warnings.catch_warnings():
            # Reading ``grad`` of a tensor that is not a leaf warns.
            warnings.filterwarnings("ignore", "The .grad attribute")
            if any(x.grad is not grad or not bool((grad == GRAD).all()) for x, grad in grads):
                self.seen["leaf-grad"] = SIDE_EFFECTS["leaf-grad"]

    def arguments(self, positional: list[Any], keywords: dict[str, Any]) -> Arguments:
        """Return the arguments of the call under this usage."""
        positional, keywords = self.usage.arguments(positional, keywords)
        if "tensor" in (self.usage.temperature, self.usage.bias):
            if not self.slopes:
                dtype = next(iter(self.rows.values())).dtype
                self.slopes.append((torch.tensor(self.scalar, dtype=dtype, requires_grad=True), 1.0))
            given = self.slopes[0][0].as_subclass(_Scalar)
            given.reads = self.reads
            keywords = keywords | {self.usage.scalar: given}
        return positional, keywords

    @property
    def scalar(self) -> float:
        """The value of the temperature or the bias whose gradient is judged."""
        return self.bias if self.usage.bias else self.temperature

    def call(self, called: Any, positional: list[Any], keywords: dict[str, Any]) -> Any:
        """Call the target under this usage.

        Raises:
            NotApplicable: the usage does not apply to the target.
        """
        if "learned" in (self.usage.temperature, self.usage.bias):
            self._find_parameters(called)
        if self.usage.modules and not is_module(called):
            raise NotApplicable
        values = [*positional, *keywords.values()]
        values += [x for value in values if isinstance(value, dict) for x in value.values()]
        given = [x for x in values if isinstance(x, (Tensor, np.ndarray))]
        copies = list(map(_copy, given))
        device = next((x.device.type for x in given if isinstance(x, Tensor)), "cpu")
        differentiable = [isinstance(x, Tensor) and x.requires_grad for x in given]
        # This includes frozen rows: they are leaf tensors, in which a caller may have accumulated gradients.
        grads = [_with_grad(x) for x in given if isinstance(x, Tensor) and _is_rows(x)]
        with warnings.catch_warnings() if self.usage.scalar else nullcontext(), self.usage.around(device):
            if self.usage.scalar:
                # If the target reads the scalar as a number, the missing gradient reveals it.
                warnings.filterwarnings("ignore", "Converting a tensor with requires_grad")
            found = self.usage.call(called, positional, keywords)
        if not all(map(_equal, given, copies)):
            self.seen["changed-input"] = SIDE_EFFECTS["changed-input"]
        self._compare_grads(grads)
        if differentiable != [isinstance(x, Tensor) and x.requires_grad for x in given]:
            self.seen["requires-grad"] = SIDE_EFFECTS["requires-grad"]
        return found

    def result(self, loss: Tensor, arrays: str) -> Tensor:
        """Record a wrong shape or dtype of a result; return the result."""
        if self.each is not None and loss.dim() != self.each:
            expected = "[K], one value per anchor or per pair," if self.each else "[]"
            self.seen["result-shape"] = f"returns a result of shape {list(loss.shape)} where {expected} is expected"
        dtypes = {z.dtype for z in self.rows.values()}
        if arrays == "torch" and dtypes == {torch.float32} and loss.dtype == torch.float64:
            self.seen["result-dtype"] = "returns float64 for rows of float32"
        return loss

    def gradients(self, loss: Tensor, shares: Tensor) -> dict[str, Tensor]:
        """Return the gradients with respect to ``rows`` and ``slopes``.

        Args:
            loss: the values.
            shares: the weight of each value in the loss.
        """
        leaves = {**self.rows, **{f"slope {k}": x for k, (x, _) in enumerate(self.slopes)}}
        if self.usage.upstream:
            shares = shares.new_tensor(self.usage.upstream(len(shares)))
        found = gradients_of(self.usage.scale * (loss @ shares), leaves)
        return {name: gradient / self.usage.scale for name, gradient in found.items()}

    def observed(self, gradients: dict[str, Tensor]) -> dict[str, Any]:
        """Return the observations as JSON data; remove the gradients of ``slopes`` from ``gradients``."""
        found: dict[str, Any] = {"seen": self.seen, "notes": self.notes}
        slopes = [gradients.pop(f"slope {k}", None) for k in range(len(self.slopes))]
        if slopes and None not in slopes:
            pairs = zip(slopes, self.slopes, strict=True)
            if self.reads and not self.documented and not any(float(g.abs().sum()) for g in slopes if g is not None):
                self.notes.append(
                    f"it reads the {self.usage.scalar} as a number ({self.reads[0]}), which has no gradient"
                )
            found[self.usage.scalar] = sum(float(g.sum()) * slope for g, (_, slope) in pairs if g is not None)
        return found

    def _find_parameters(self, called: Any) -> None:
        """Add the parameters that store the temperature or the bias to ``slopes``."""
        owned = called.named_parameters() if is_module(called) else getattr(called, "__dict__", {}).items()
        learned = {n: x for n, x in owned if isinstance(x, Tensor) and x.requires_grad and x.numel() == 1}
        named = {
            name: x
            for name, x in learned.items()
            if any(word in name.lower() for word in _PARAMETERS[self.usage.scalar])
        }
        if not named:
            raise NotApplicable
        for name, parameter in named.items():
            value = float(parameter.detach())
            for stored, slope in SLOPES[self.usage.scalar]:
                if math.isclose(value, stored(self.scalar), rel_tol=1e-5, abs_tol=1e-6):
                    self.slopes.append((parameter, slope(self.scalar)))
                    break
            else:
                known = f"is not a known function of the {self.usage.scalar}"
                self.notes.append(f"parameter {name}: its value {value:g} {known}")


def read_observed(written: Any) -> dict[str, Any]:
    """Return the observations that the process of the target wrote, without unknown fields.

    Raises:
        ValueError: the data is malformed.
    """
    if not isinstance(written, dict):
        raise ValueError("observed")
    seen, notes = written.get("seen", {}), written.get("notes", [])
    if not (isinstance(seen, dict) and {*seen} <= {*SIDE_EFFECTS} and isinstance(notes, list)):
        raise ValueError("observed")
    found: dict[str, Any] = {name: written[name] for name in ("seen", "notes", "applies") if name in written}
    return found | {name: float(written[name]) for name in SLOPES if name in written}
