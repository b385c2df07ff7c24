"""Usages: other ways to call a loss that must not change its result. Also the side effects of calls.

A usage changes one of:

- the arguments, such as the dtype of labels or the layout of rows
- the call, such as another thread or a second call of one instance
- its surroundings, such as autocast or ``torch.no_grad``
- the differentiation, such as second derivatives or gradients that are accumulated

``USAGES`` lists all usages. ``Use`` is one evaluation under a usage, and records the side effects.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import pickle
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

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
        differentiate: evaluates the loss and its gradients; None for one backward pass.
        leaf: turns a matrix into the leaf tensor that the target gets; None if the target gets a copy of a leaf.
        arrays: the kinds of arrays to which it applies.
        dtype: the dtype of the rows; "" for that of the check.
        rounds: the dtype to which intermediate results may be rounded; "" for float64 if the rows are float64, else
            float32.
        refusable: errors with which a target may refuse the usage: "any"; "named" for errors that mention a dtype or a
            layout; "" for none.
        modules: whether it applies to torch modules only.
        most: largest number of small cases on which it is judged; None for the default of the judge.
        large: whether it is also judged on a batch of training size.
        slow: whether it takes seconds, so that it is judged only if it is selected or with ``thorough``.
        frozen: the matrices without gradient: 0 for the first, 1 for all others; None if all have one.
        joined: whether the gradient of the first matrix includes that of the second.
        differentiable: whether gradients are judged.
        upstream: function from the number of values to their upstream gradients; if None, these are the weights of the
            reduction.
        scale: factor of the loss, as in mixed-precision training.
        temperature: the temperature whose gradient is judged: "tensor" for an argument, "learned" for a parameter, ""
            for none. "default" leaves out the argument, so that the target uses its own default.
        second: whether the gradients are second derivatives, multiplied by ``direction_of``.
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
    differentiate: Callable[[Step], Differentiated] | None = None
    leaf: Callable[[Tensor], Tensor] | None = None
    arrays: tuple[str, ...] = ("torch",)
    dtype: str = ""
    rounds: str = ""
    refusable: str = ""
    modules: bool = False
    most: int | None = None
    large: bool = True
    slow: bool = False
    frozen: int | None = None
    joined: bool = False
    differentiable: bool = True
    upstream: Callable[[int], list[float]] | None = None
    scale: float = 1.0
    temperature: str = ""
    second: bool = False
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
        return "temperature" if self.temperature in ("tensor", "learned") else "bias" if self.bias else ""


def upstream_of(count: int) -> list[float]:
    """Return random upstream gradients for a number of values; the same number always gets the same gradients.

    They are multiples of 1/16 in [-1, 1], which are exact in every dtype. The last of three or more is 0.
    """
    drawn = random.Random(count)
    found = [drawn.choice((-1, 1)) * drawn.randint(1, 16) / 16 for _ in range(count)]
    return [*found[:-1], 0.0] if count > 2 else found


def direction_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    """Return a direction of a matrix: multiples of 1/16 in [-1, 1], the same for every matrix of this shape."""
    count = math.prod(shape)
    return torch.tensor(upstream_of(count), dtype=dtype).reshape(shape)


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

        indices = ("labels", "ref_labels", "partners")
        named = {name: changed(x) if name in indices else x for name, x in keywords.items()}
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


def _with_steps(x: Tensor) -> Tensor:
    """Return every second entry of a tensor whose other entries are NaN, or 77 for labels."""
    other = math.nan if x.is_floating_point() else 77
    for axis in range(x.dim()):
        x = torch.stack([x, torch.full_like(x, other)], dim=axis + 1).flatten(axis, axis + 1)
    return x[(slice(None, None, 2),) * x.dim()]


class _Expanded(torch.autograd.Function):
    """The first row of a matrix of equal rows, expanded to all rows; the gradient is that of each row."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows[:1].clone().expand(rows.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients


def _expanded(x: Tensor) -> Tensor:
    equal = x.dim() == 2 and len(x) > 1 and bool((x == x[:1]).all())
    result: Tensor = _Expanded.apply(x) if equal else x  # type: ignore[no-untyped-call]
    return result


def _of_equal_rows(case: Case, claim: Claim) -> Case | None:
    """Return the case with equal rows in its last matrix, such as a queue."""
    name = [case.first, *case.others][-1]
    equal = {name: np.repeat(case.matrices[name][:1], len(case.matrices[name]), axis=0)}
    changed = case.with_matrices(equal, id=f"{case.id}, {name} of equal rows")
    return None if maximum_is_tied(changed) else changed


def _with_rows_and_labels(change: Callable[[Tensor], Tensor]) -> Callable[..., Arguments]:
    return lambda positional, keywords: _with_labels(change)(*_with_rows(change)(positional, keywords))


def _with_tables(case: Case, claim: Claim) -> Case | None:
    """Return the case if it has a mask or a list of pairs.

    A positive is removed from a symmetric mask, because such a mask is the same if rows and columns are exchanged.
    """
    tables = {name: np.array(value) for name, value in case.arguments.items() if np.ndim(value) == 2}
    if any(not np.array_equal(table, table.T) for table in tables.values()):
        return case
    mask = tables.get("positives")
    if mask is None or mask.sum(axis=1).max() < 2:
        return None
    row = int(np.argmax(mask.sum(axis=1) > 1))
    mask[row, np.flatnonzero(mask[row])[-1]] = False
    arguments = {**case.arguments, "positives": mask.tolist()}
    return replace(case, id=f"{case.id}, without one positive of row {row}", arguments=arguments)


def _tables_by_columns(positional: list[Any], keywords: dict[str, Any]) -> Arguments:
    def changed(name: str, x: Any) -> Any:
        table = isinstance(x, Tensor) and x.dim() == 2 and name not in MATRICES
        return _by_columns(x) if table and (name or not _is_rows(x)) else x

    return [changed("", x) for x in positional], {name: changed(name, x) for name, x in keywords.items()}


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


def _again(called: Callable[..., Any], positional: list[Any], keywords: dict[str, Any]) -> Any:
    """Call it with fewer rows and with rows in another order, and only then as usual."""
    changes: tuple[Callable[[Tensor], Tensor], ...] = (lambda x: x[:-2], lambda x: x.roll(1, 0))
    for change in changes:
        with suppress(Exception):
            called(*(change(x) if isinstance(x, Tensor) and x.dim() else x for x in positional), **keywords)
    return called(*positional, **keywords)


def _doubled(x: Any) -> Any:
    """Return the rows, class ids, partners or mask of a batch of twice the size: the batch and a similar one."""
    if not isinstance(x, Tensor):
        return x
    if x.dim() == 1 and not x.is_floating_point():
        return torch.cat([x, x + len(x)])
    if x.dtype == torch.bool and x.dim() == 2:
        return torch.block_diag(x, x)  # type: ignore[no-untyped-call]
    return torch.cat([x, x.roll(1, 0)]).detach() if _is_rows(x) else x


def _before_other_calls(called: Callable[..., Any], positional: list[Any], keywords: dict[str, Any]) -> Any:
    """Call it as usual, then with the same rows and with a larger batch, both at another temperature if it takes one.

    The backward pass of the first call follows.
    """
    found = called(*positional, **keywords)
    other = {"temperature": 2 * keywords["temperature"]} if "temperature" in keywords else {}
    changes: tuple[Callable[[Any], Any], ...] = (lambda x: x, _doubled)
    for change in changes:
        with suppress(Exception):
            called(*map(change, positional), **{name: change(x) for name, x in {**keywords, **other}.items()})
    return found


def _after_an_update(called: Callable[..., Any], positional: list[Any], keywords: dict[str, Any]) -> Any:
    """Call it with other rows in the same leaf tensors, write the rows into these, and call it as usual."""
    leaves = [x for x in (*positional, *keywords.values()) if _is_rows(x) and x.is_leaf]
    rows = [x.detach().clone() for x in leaves]
    with torch.no_grad():
        for x in leaves:
            x.copy_(x.roll(1, 0))
    with suppress(Exception):
        called(*positional, **keywords)
    with torch.no_grad():
        for x, right in zip(leaves, rows, strict=True):
            x.copy_(right)
    return called(*positional, **keywords)


def _in_evaluation_mode(called: Any, positional: list[Any], keywords: dict[str, Any]) -> Any:
    before = called.training
    called.eval()
    try:
        return called(*positional, **keywords)
    finally:
        called.train(before)


class _Interrupted(TorchFunctionMode):
    """Raise an error at one call of a torch function with tensors in the body, or only count these calls.

    Functions without tensors may be those by which a context, such as ``no_grad``, restores the state of torch.
    """

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(x, (Tensor, list, tuple)) for x in (*args, *(kwargs or {}).values())):
            self.calls += 1
            if self.calls == self.at:
                raise RuntimeError("out of memory")
        return function(*args, **(kwargs or {}))


def _after_errors(called: Callable[..., Any], positional: list[Any], keywords: dict[str, Any]) -> Any:
    """Call it as usual after two calls in which a torch function raised an error: in the middle and at the end."""
    with _Interrupted() as counted:
        called(*positional, **keywords)
    with _changed(torch.is_grad_enabled, torch.set_grad_enabled, torch.is_grad_enabled()):
        for at in (counted.calls // 2, counted.calls):
            with suppress(Exception), _Interrupted(max(at, 1)):
                called(*positional, **keywords)
        return called(*positional, **keywords)


def _compiled(called: Any, positional: list[Any], keywords: dict[str, Any]) -> Any:
    # The compiler does not support operations of subclasses that record reads.
    keywords = {name: x.as_subclass(Tensor) if isinstance(x, _Scalar) else x for name, x in keywords.items()}
    return torch.compile(called, backend="aot_eager")(*positional, **keywords)  # type: ignore[no-untyped-call]


@contextmanager
def _changed(read: Callable[[], Any], write: Callable[[Any], object], value: object) -> Iterator[None]:
    """Change a setting of the process within a context."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def _without_graph_breaks(device: str) -> AbstractContextManager[None]:
    """Do not let the compiler print where a graph breaks."""
    logger = logging.getLogger("torch._dynamo")
    return _changed(lambda: logger.level, logger.setLevel, logging.ERROR)


def _copied(duplicate: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda called, positional, keywords: duplicate(called)(*positional, **keywords)


THREADS = 2
"""Number of torch's threads in the usage "threads"."""


def _threads(device: str) -> AbstractContextManager[None]:
    if not _can_use_threads(os.getpid()):
        raise NotJudged("torch cannot start threads in this process, which was forked from one with threads")
    return _changed(torch.get_num_threads, torch.set_num_threads, THREADS)


HANGS_AFTER = 20.0
"""Seconds after which a process that starts threads counts as hanging. On a busy machine, it may wait for seconds."""
ASLEEP = 20
"""Times in a row that a process is seen with all threads asleep, after which it counts as hanging."""


@cache
def _can_use_threads(process: int) -> bool:
    """Return whether torch can start threads: GNU OpenMP hangs in a process that was forked from one with threads.

    The answer for this ``process`` does not hold for processes that are forked from it later. A forked process tries
    it, and is killed if it hangs.
    """
    if not hasattr(os, "fork"):
        return True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a fork of a process with threads
        child = os.fork()
    if not child:
        torch.set_num_threads(THREADS)
        torch.ones(1 << 17).exp()
        os._exit(0)
    end, asleep = time.monotonic() + HANGS_AFTER, 0
    while time.monotonic() < end and asleep < ASLEEP:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        asleep = asleep + 1 if _is_asleep(child) else 0
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _is_asleep(process: int) -> bool:
    """Return whether no thread of the process runs or waits for a processor; False where there is no /proc."""
    try:
        states = [(task / "stat").read_text() for task in Path(f"/proc/{process}/task").iterdir()]
    except OSError:  # a thread has ended meanwhile
        return False
    return all(state.rpartition(")")[2].split()[0] == "S" for state in states)


def _in_a_thread(called: Callable[..., Any], positional: list[Any], keywords: dict[str, Any]) -> Any:
    found: list[Any] = []
    errors: list[BaseException] = []
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]

    def run() -> None:
        try:
            with ExitStack() as stack:
                for mode in modes:  # a new thread has none
                    stack.enter_context(mode)
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


def _of_partners(case: Case, claim: Claim) -> Case | None:
    return case if "partners" in claim.passed and "partners" in case.arguments else None


def _labels_as(dtype: torch.dtype) -> Usage:
    name = str(dtype).removeprefix("torch.")

    def chosen(case: Case, claim: Claim) -> Case | None:
        if not _of_labels(case, claim):
            return None
        labels = torch.tensor([*case.arguments["labels"], *case.arguments.get("ref_labels", ())])
        return case if bool((labels.to(dtype).long() == labels).all()) else None

    def spread(labels: Tensor) -> Tensor:
        """Use the whole range of the dtype: labels 2k and 2k + 1 become k and k plus the lowest number."""
        if labels.dtype != torch.int64 or bool((labels < 0).any()):
            return labels.to(dtype)
        return (labels // 2 + labels % 2 * torch.iinfo(dtype).min).to(dtype)

    change = spread if dtype == torch.int32 else lambda x: x.to(dtype)
    usage = Usage(f"labels-{name}", f"labels as {name}", case=chosen, arguments=_with_labels(change))
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
    return _of_each(case.with_options(no_positive="drop"), claim)


def _of_one_anchor(case: Case, claim: Claim) -> Case | None:
    """Return the case with reduction "none" and only the first row as anchor."""
    if "anchors" not in claim.passed or "anchors" not in case.entry.keywords:
        return None
    return _of_each(case.with_options(anchors=[i == 0 for i in range(case.n)]), claim)


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

        return None if case.n > 8 or case.size > 12 else case.mapped(wide, id=f"{case.id}, widened")

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
    return _in_dtype("float16")(case.mapped(lambda rows: factor * rows, id=f"{case.id}, scaled"), claim)


TEMPERATURE = 0.37109375
"""The temperature of usages that change it. A loss that rounds this number would lose some of its decimals."""
LOW_TEMPERATURE = 0.013671875
"""A low temperature of training, exact in every dtype; CLIP's ends at 0.01."""


def _at_temperature(temperature: float = TEMPERATURE, **keywords: float) -> Callable[[Case, Claim], Case | None]:
    """Change the temperature and other options, if they are passed to the target."""

    def changed(case: Case, claim: Claim) -> Case | None:
        if claim.temperature is not None or not {*keywords} <= {*claim.passed}:
            return None
        given = {"temperature": temperature, **keywords}
        if all(case.option(name) == value for name, value in given.items()):
            return case
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


def _at_its_default(case: Case, claim: Claim) -> Case | None:
    """Return the case with the default temperature of the target, if it takes one and has a default."""
    at = claim.default_temperature
    if at is None or claim.temperature is not None or claim.call == "similarities":
        return None
    return replace(case, id=f"{case.id}, default temperature {at:g}", keywords={**case.keywords, "temperature": at})


def _with_second_derivatives(case: Case, claim: Claim) -> Case | None:
    """Return a case whose loss has second derivatives: its weights are not detached."""
    return None if case.entry.weights and case.detaches_weights else case


@dataclass(eq=False)
class Step:
    """One training step, which a usage differentiates in its own way.

    Attributes:
        rows: the leaf tensors by name.
        values: evaluates the loss at leaf tensors or at tensors that replace them.
        shares: returns the weight of each value in the loss.
        given: for each matrix that the target got as a leaf, the tensor that it is a copy of, and the leaf.
    """

    rows: Mapping[str, Tensor]
    values: Callable[[Mapping[str, Tensor]], Tensor]
    shares: Callable[[Tensor], Tensor]
    given: list[tuple[Tensor, Tensor]]

    def total(self, values: Tensor) -> Tensor:
        """The loss, of the values."""
        return values @ self.shares(values)


Differentiated = tuple[Tensor, dict[str, Tensor]]
"""The values and the gradients."""


def _among_other_batches(step: Step) -> Differentiated:
    """Evaluate another batch before and after the batch; then differentiate the sum of the three losses."""

    def other(shift: int) -> Tensor:
        rows = {name: x.detach().roll(shift, 0).requires_grad_() for name, x in step.rows.items()}
        return step.total(step.values(rows))

    before, values, after = other(1), step.values(step.rows), other(-1)
    return values, gradients_of(before + step.total(values) + after, step.rows)


def _retained(step: Step) -> Differentiated:
    """Differentiate the same graph twice, and return the second gradients."""
    values = step.values(step.rows)
    total = step.total(values)
    if total.requires_grad:
        torch.autograd.grad(total, [*step.rows.values()], retain_graph=True, allow_unused=True)
    return values, gradients_of(total, step.rows)


def _accumulated(step: Step, share: float = 0.5) -> Differentiated:
    """Accumulate the gradient twice in the leaves that the target got, and return a share of the sum."""
    values = step.values(step.rows)
    for _, leaf in step.given:
        leaf.grad = None
    for _ in range(2):
        if values.requires_grad:
            step.total(values).backward(retain_graph=True)  # type: ignore[no-untyped-call]
    found = [(x, leaf.grad) for x, leaf in step.given if leaf.grad is not None]
    through = [(x.double() * (grad.double() * share)).sum() for x, grad in found]
    return values, gradients_of(sum(through, torch.zeros(())), step.rows)


def _with_hook(x: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    leaf.register_hook(lambda grad: grad / 2)  # type: ignore[no-untyped-call]
    return leaf


def _of_changed_input(step: Step) -> Differentiated:
    """Change the leaves that the target got in place, before the backward pass."""
    values = step.values(step.rows)
    leaves = [leaf for _, leaf in step.given]
    with torch.no_grad():
        for leaf in leaves:
            leaf.mul_(-0.5).add_(0.25)
    found = torch.autograd.grad(step.total(values), leaves, materialize_grads=True) if values.requires_grad else ()
    through = [(x.double() * grad.double()).sum() for (x, _), grad in zip(step.given, found, strict=False)]
    return values, gradients_of(sum(through, torch.zeros(())), step.rows)


def _second_derivatives(step: Step) -> Differentiated:
    """Differentiate the product of the gradients with ``direction_of`` each matrix."""
    values, leaves = step.values(step.rows), [*step.rows.values()]
    found = torch.autograd.grad(step.total(values), leaves, create_graph=True, materialize_grads=True)
    products = [(g.double() * direction_of(g.shape)).sum() for g in found]
    return values, gradients_of(sum(products, torch.zeros(())), step.rows)


def _forward_mode(step: Step) -> Differentiated:
    """Return gradients whose product with ``direction_of`` each matrix is the derivative of forward mode.

    They are the gradients of the backward pass, changed along this direction. Rows are changed in proportion to their
    norms, because rounding errors of one sum would exceed the bounds of rows that are almost 0.
    """
    directions = {name: direction_of(x.shape) for name, x in step.rows.items()}
    values = step.values(step.rows)
    gradients = gradients_of(step.total(values), step.rows)
    make_dual, unpack_dual = cast(Any, forward_ad.make_dual), cast(Any, forward_ad.unpack_dual)
    with forward_ad.dual_level():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the first call imports rules of torch, which warn
            dual = {name: make_dual(x.detach(), directions[name].to(x.dtype)) for name, x in step.rows.items()}
        tangent = unpack_dual(step.total(step.values(dual))).tangent
    slope = 0.0 if tangent is None else float(tangent.detach())
    error = slope - sum(float((gradients[name] * v).sum()) for name, v in directions.items())
    norms = {name: gradient.norm(dim=1, keepdim=True) for name, gradient in gradients.items()}
    if not any(map(torch.count_nonzero, norms.values())):
        norms = {name: torch.ones_like(norm) for name, norm in norms.items()}
    changes = {name: norms[name] * v for name, v in directions.items()}
    size = sum(float((change * directions[name]).sum()) for name, change in changes.items())
    return values, {name: gradients[name] + error / size * change for name, change in changes.items()}


def _functional(step: Step) -> Differentiated:
    """Differentiate with ``torch.func.grad``."""

    def total(rows: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        values = step.values(rows)
        return step.total(values), values

    found, values = torch.func.grad(total, has_aux=True)({name: x.detach() for name, x in step.rows.items()})
    return values, {name: x.double().cpu() for name, x in found.items()}


def _in_dtype(dtype: str) -> Callable[[Case, Claim], Case | None]:
    def chosen(case: Case, claim: Claim) -> Case | None:
        # The exponentials of logits must fit into float16, even without subtracting a maximum.
        fits = dtype != "float16" or case.temperature >= 0.2 or claim.temperature is not None
        return case if case.holds_in(dtype) and not claim.normalised and fits else None

    return chosen


PLAIN = Usage("", "as usual")

_TENSOR: Mapping[str, Any] = {"level": Level.FORMULA, "refusable": "any", "temperature": "tensor"}
"""What usages with a temperature given as a tensor share."""

_LEARNED: Mapping[str, Any] = {
    **{"level": Level.FORMULA, "case": _of_any_temperature},
    **{"dtype": "float32", "temperature": "learned"},
}
"""What usages with a learned temperature share."""

_LAYOUT: Mapping[str, Any] = {"arrays": ("torch", "numpy"), "refusable": "named"}
"""What usages with another layout of the rows share."""

_FROZEN: Mapping[str, Any] = {"arguments": _with_rows(Tensor.detach), "differentiable": False}
"""What usages with rows without gradient share."""

_COMPILED: Mapping[str, Any] = {"around": _without_graph_breaks, "call": _compiled, "most": 1, "slow": True}
"""What usages of ``torch.compile`` share."""

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
        case=_at_temperature(),
        reveals=("leaf-grad",),
        **_TENSOR,
    ),
    Usage(
        "temperature-tensor-and-base",
        "a temperature given as a tensor, with a base temperature",
        case=_at_temperature(base_temperature=0.125),
        **_TENSOR,
    ),
    Usage(
        "low-temperature-tensor",
        "a low temperature of training given as a tensor",
        case=_at_temperature(LOW_TEMPERATURE),
        **_TENSOR,
    ),
    Usage("learned-temperature", "a learned temperature", **_LEARNED),
    Usage("bias-tensor", "a bias given as a tensor", Level.FORMULA, case=_at_bias, refusable="any", bias="tensor"),
    Usage("learned-bias", "a learned bias", Level.FORMULA, case=_of_any_bias, dtype="float32", bias="learned"),
    Usage("wide", "16 times as many columns", Level.FORMULA, case=_wider(16), arrays=EVERY_ARRAY),
    Usage("wider", "64 times as many columns", Level.FORMULA, case=_wider(64), arrays=EVERY_ARRAY),
    _labels_as(torch.int32),
    _labels_as(torch.int16),
    _labels_as(torch.uint8),
    _labels_as(torch.int8),
    _labels_as(torch.bool),
    _labels_as(torch.float32),
    Usage(
        "partners-int32",
        "partners as int32",
        case=_of_partners,
        arguments=_with_labels(lambda partners: partners.to(torch.int32)),
        arrays=EVERY_ARRAY,
        refusable="named",
    ),
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
    Usage("by-columns", "rows stored by columns", arguments=_with_rows(_by_columns), **_LAYOUT),
    Usage(
        "tables-by-columns",
        "masks and lists of pairs stored by columns",
        case=_with_tables,
        arguments=_tables_by_columns,
        refusable="named",
    ),
    Usage(
        "strided",
        "rows and labels that are views into larger tensors",
        arguments=_with_rows_and_labels(_within_a_larger),
        **_LAYOUT,
    ),
    Usage(
        "stepped",
        "rows and labels that are every second entry of larger tensors",
        arguments=_with_rows_and_labels(_with_steps),
        **_LAYOUT,
    ),
    Usage(
        "expanded",
        "equal rows that share their memory",
        case=_of_equal_rows,
        arguments=_with_rows(_expanded),
        refusable="named",
    ),
    Usage("shared-memory", "matrices that share memory", case=_of_two_matrices, arguments=_shared),
    Usage(
        "separate-memory",
        "matrices that share no memory",
        case=_of_two_matrices,
        arguments=_with_rows(lambda rows: rows.clone()),
    ),
    Usage("first-frozen", "a first matrix without gradient", case=_of_two_matrices, arguments=_frozen(0), frozen=0),
    Usage("others-frozen", "other matrices without gradient", case=_of_two_matrices, arguments=_frozen(1), frozen=1),
    Usage("same-tensor", "one tensor as both matrices", case=_of_the_same_tensor, arguments=_of_the_first, joined=True),
    Usage("all-frozen", "rows without gradient", reveals=("requires-grad", "leaf-grad"), **_FROZEN),
    Usage(
        "frozen-rows-temperature-tensor",
        "rows without gradient, with a temperature given as a tensor",
        case=_at_temperature(),
        **_FROZEN,
        **_TENSOR,
    ),
    Usage(
        "frozen-rows-learned-temperature", "rows without gradient, with a learned temperature", **_FROZEN, **_LEARNED
    ),
    Usage(
        "default-temperature",
        "the default temperature of the target",
        Level.FORMULA,
        case=_at_its_default,
        temperature="default",
    ),
    Usage("one-anchor", "one anchor under reduction none", case=_of_one_anchor, reveals=("result-shape",)),
    Usage("no-grad", "torch.no_grad", around=lambda device: torch.no_grad(), differentiable=False),
    Usage(
        "inference-mode",
        "torch.inference_mode",
        around=lambda device: torch.inference_mode(),
        refusable="any",
        **_FROZEN,
    ),
    Usage(
        "among-other-batches", "one backward pass for the losses of three batches", differentiate=_among_other_batches
    ),
    Usage(
        "before-other-calls",
        "calls with the same rows and with a larger batch before the backward pass",
        call=_before_other_calls,
    ),
    Usage("retained-graph", "a second backward pass through one graph", differentiate=_retained),
    *(
        Usage(
            f"accumulated-{name}",
            f"gradients that are accumulated in {words}",
            call=call,
            differentiate=_accumulated,
            leaf=leaf,
            reveals=("leaf-grad",),
        )
        for name, words, leaf, call in (
            ("leaf", "leaf tensors", lambda x: x.detach().requires_grad_(), PLAIN.call),
            (
                "parameter",
                "an nn.Parameter that was changed in place after an earlier call",
                lambda x: torch.nn.Parameter(x.detach()),
                _after_an_update,
            ),
        )
    ),
    Usage(
        "hooks",
        "leaf tensors with a hook that halves the gradient",
        differentiate=partial(_accumulated, share=1.0),
        leaf=_with_hook,
    ),
    Usage(
        "changed-input",
        "rows that are changed in place before the backward pass",
        differentiate=_of_changed_input,
        leaf=lambda x: x.detach().requires_grad_(),
        expects="the truth or an error",
    ),
    Usage(
        "second-derivatives",
        "second derivatives",
        case=_with_second_derivatives,
        differentiate=_second_derivatives,
        refusable="any",
        most=1,
        large=False,
        second=True,
    ),
    Usage("forward-mode", "forward-mode differentiation", differentiate=_forward_mode, refusable="any"),
    Usage("functional", "torch.func.grad", differentiate=_functional, refusable="any"),
    Usage("compiled", "torch.compile", refusable="any", **_COMPILED),
    Usage(
        "compiled-temperature-tensor",
        "torch.compile, with a temperature given as a tensor",
        case=_at_temperature(),
        **_COMPILED,
        **_TENSOR,
    ),
    Usage("deep-copy", "a deep copy of the module", call=_copied(copy.deepcopy), modules=True, refusable="any"),
    Usage(
        "pickled",
        "a module that was pickled",
        call=_copied(lambda called: pickle.loads(pickle.dumps(called))),
        modules=True,
        refusable="any",
    ),
    Usage(
        "default-dtype",
        "the default dtype float64",
        around=lambda device: _changed(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
        dtype="float32",
        refusable="named",
    ),
    Usage("threads", f"{THREADS} threads of torch", around=_threads),
    Usage(
        "deterministic",
        "deterministic algorithms",
        around=lambda device: _changed(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, "error"),
        refusable="any",
    ),
    Usage("after-errors", "a call after two calls that raised errors", call=_after_errors),
    Usage("evaluation-mode", "evaluation mode", call=_in_evaluation_mode, modules=True),
    Usage("second-call", "a second call of one instance", call=_again, arrays=EVERY_ARRAY),
    Usage(
        "second-call-learned-temperature",
        "a second call of one instance, with a learned temperature",
        call=_again,
        **_LEARNED,
    ),
    Usage("thread", "another thread", call=_in_a_thread),
    *(
        Usage(
            name,
            f"autocast to {dtype}",
            case=_in_dtype(dtype),
            around=partial(torch.autocast, dtype=getattr(torch, dtype)),
            dtype="float32",
            rounds=dtype,
            refusable="named",
        )
        for name, dtype in (("autocast", "bfloat16"), ("autocast-float16", "float16"))
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

_PARAMETERS = {
    "temperature": ("temperature", "temp", "tau", "scale", "log_t", "logit_t", "logt", "t_prime"),
    "bias": ("bias",),
}
"""Parts of parameter names that suggest a learned temperature or bias."""

STEP = 2.0**-6
"""Step of ``Use.change``, in units of the temperature or the bias (of 1 if it is 0)."""

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
    """The usage does not apply to the target. The message says why."""


class NotJudged(Exception):
    """The usage cannot be judged here. The message says why."""


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
            found = func(*args, **(kwargs or {}))
        if name == "detach":  # an nn.Parameter of it must have its class
            found = found.as_subclass(cls)
            found.reads = []
        return found


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
        guessed: whether only the values of parameters, not their names, suggest that they store the scalar.
        shift: how far the scalar that they store is moved in a call.
        change: the difference quotient of the loss with respect to this scalar; None unless it is guessed.
        given: see ``Step.given``.
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
    guessed: bool = False
    shift: float = 0.0
    change: float | None = None
    given: list[tuple[Tensor, Tensor]] = field(default_factory=list)

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
                leaf = torch.tensor(self.scalar, dtype=dtype).as_subclass(_Scalar).requires_grad_()
                self.slopes.append((leaf, 1.0))
            given = cast(_Scalar, self.slopes[0][0])
            given.reads = self.reads
            keywords = keywords | {self.usage.scalar: given}
        if self.usage.temperature == "default":
            del keywords["temperature"]
            if keywords.get("base_temperature", math.nan) is None:  # None means the temperature
                keywords["base_temperature"] = self.temperature
        return _with_rows(self._leaf)(positional, keywords) if self.usage.leaf else (positional, keywords)

    def _leaf(self, x: Tensor) -> Tensor:
        assert self.usage.leaf is not None
        self.given.append((x, self.usage.leaf(x)))
        return self.given[-1][1]

    @property
    def scalar(self) -> float:
        """The value of the temperature or the bias whose gradient is judged."""
        return self.bias if self.usage.bias else self.temperature

    def call(self, called: Any, positional: list[Any], keywords: dict[str, Any]) -> Any:
        """Call the target under this usage.

        Raises:
            NotApplicable: the usage does not apply to the target.
        """
        stored = self._find_parameters(called) if self.usage.scalar else []
        if self.usage.modules and not is_module(called):
            raise NotApplicable("the target is not a torch module")
        values = [*positional, *keywords.values()]
        values += [x for value in values if isinstance(value, dict) for x in value.values()]
        # A tensor may be given twice: the temperature is also the base temperature of None.
        given = [*{id(x): x for x in values if isinstance(x, (Tensor, np.ndarray))}.values()]
        copies = list(map(_copy, given))
        device = next((x.device.type for x in given if isinstance(x, Tensor)), "cpu")
        differentiable = [isinstance(x, Tensor) and x.requires_grad for x in given]
        # This includes frozen rows: they are leaf tensors, in which a caller may have accumulated gradients.
        grads = [_with_grad(x) for x in given if isinstance(x, Tensor) and (_is_rows(x) or isinstance(x, _Scalar))]
        with self.usage.around(device), _shifted(stored, self.shift):
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

    def differentiated(
        self, values: Callable[[Mapping[str, Tensor]], Tensor], shares: Callable[[Tensor], Tensor], *, judged: bool
    ) -> Differentiated:
        """Return the values and the gradients.

        Args:
            values: see ``Step.values``.
            shares: see ``Step.shares``.
            judged: whether gradients are judged.
        """
        if self.usage.differentiate:
            return self.usage.differentiate(Step(self.rows, values, shares, self.given))
        loss = values(self.rows)
        gradients = self.gradients(loss, shares(loss)) if judged else {}
        if self.guessed:
            ends, step = list[float](), STEP * (abs(self.scalar) or 1)
            for self.shift in (step, -step):
                moved = values(self.rows).detach()
                ends.append(float(moved @ shares(moved)))
            self.change = (ends[0] - ends[1]) / (2 * step)
        return loss, gradients

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
        found |= {} if self.change is None else {"change": self.change}
        slopes = [gradients.pop(f"slope {k}", None) for k in range(len(self.slopes))]
        if slopes and None not in slopes:
            pairs = zip(slopes, self.slopes, strict=True)
            if self.reads and not self.documented and not any(float(g.abs().sum()) for g in slopes if g is not None):
                self.notes.append(
                    f"it reads the {self.usage.scalar} as a number ({self.reads[0]}), which has no gradient"
                )
            found[self.usage.scalar] = sum(float(g.sum()) * slope for g, (_, slope) in pairs if g is not None)
        return found

    def _find_parameters(self, called: Any) -> list[tuple[Tensor, float]]:
        """Return the parameters that store the temperature or the bias, as in ``slopes``, and add them to ``slopes``.

        A parameter counts if its value is a known function of the scalar; if the names of some also suggest it, only
        these count. A target with such a parameter keeps no tensor that its constructor gets, so the usages that pass
        one do not apply to it.

        Raises:
            NotApplicable: the usage does not apply to the target.
        """
        scalar, learned = self.usage.scalar, "learned" in (self.usage.temperature, self.usage.bias)
        own = getattr(called, "__dict__", {}).items()
        if is_module(called):
            own = [*called.named_parameters(), *called.named_buffers()]
        kind = Tensor if learned else torch.nn.Parameter
        scalars = {name: x for name, x in own if isinstance(x, kind) and x.is_floating_point() and x.numel() == 1}
        stored = {name: (x, slope) for name, x in scalars.items() if (slope := self._slope(x)) is not None}
        if not learned:
            if stored:
                raise NotApplicable(f"{next(iter(stored))}, a parameter of the target, stores the {scalar} it gets")
            return []
        named = [name for name in scalars if any(word in name.lower() for word in _PARAMETERS[scalar])]
        with_gradient = {name: pair for name, pair in stored.items() if pair[0].requires_grad}
        chosen = {name: pair for name, pair in with_gradient.items() if name in named} or with_gradient
        if not chosen:
            self.notes += [f"{name} stores the {scalar} but requires no gradient" for name in stored]
            self.notes += [
                f"parameter {name}: its value {float(scalars[name].detach()):g} is not a known function of the {scalar}"
                for name in named
                if scalars[name].requires_grad
            ]
            if not self.notes:
                raise NotApplicable(f"no scalar parameter of the target stores the {scalar}")
        self.guessed |= not {*chosen} <= {*named}
        if not self.shift:
            known = [id(x) for x, _ in self.slopes]
            self.slopes += [pair for pair in chosen.values() if id(pair[0]) not in known]
        return [*chosen.values()]

    def _slope(self, x: Tensor) -> float | None:
        """Return the derivative of what a tensor stores; None if it is not a known function of the scalar."""
        value = float(x.detach())
        for stored, slope in SLOPES[self.usage.scalar]:
            if math.isclose(value, stored(self.scalar), rel_tol=1e-5, abs_tol=1e-6):
                return slope(self.scalar)
        return None


@contextmanager
def _shifted(stored: Collection[tuple[Tensor, float]], shift: float) -> Iterator[None]:
    """Move the scalar that parameters store, to first order, within a context."""
    before = [x.detach().clone() for x, _ in stored]
    for x, slope in stored:
        x.data.add_(shift * slope)
    try:
        yield
    finally:
        for (x, _), value in zip(stored, before, strict=True):
            x.data.copy_(value)


def read_observed(written: Any) -> dict[str, Any]:
    """Return the observations that the process of the target wrote, without unknown fields.

    Raises:
        ValueError: the data is malformed.
    """
    if not isinstance(written, dict):
        raise ValueError("observed")
    seen, notes = written.get("seen", {}), written.get("notes", [])
    lists = isinstance(notes, list) and isinstance(written.get("frozen", []), list)
    if not (isinstance(seen, dict) and {*seen} <= {*SIDE_EFFECTS} and lists):
        raise ValueError("observed")
    found: dict[str, Any] = {name: written[name] for name in ("seen", "notes", "applies", "frozen") if name in written}
    return found | {name: float(written[name]) for name in (*SLOPES, "change") if name in written}
