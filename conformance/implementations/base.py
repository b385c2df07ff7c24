"""Base classes and helpers for adapters. An adapter evaluates cases with one implementation of the losses."""

from __future__ import annotations

import inspect
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..suite.cases import MASKS, Case, row_norms
from ..suite.catalogue import IGNORED, TOWER_TARGETS, WEIGHTS
from ..suite.records import Outcome, Truth
from ..truth.baseline import scaled_similarities
from ..truth.compare import compare
from ..truth.tolerances import bounds


class Unavailable(Exception):
    """An implementation cannot be loaded. The message says why."""


@dataclass(frozen=True)
class Deviation:
    """A declared difference between an implementation and the truth.

    Every check to which a deviation applies must fail: a check that passes counts as a failure. In a full run, a
    deviation must apply to at least one check. Both rules find outdated declarations.

    Peers declare deviations in code, users in TOML (:mod:`pairproof.conformance.judge.deviations`).

    Attributes:
        name: name in messages; for an entry of a TOML file, its position.
        condition: returns whether it applies to a check, given the case, the dtype and the truth.
        reason: why the result differs.
        link: where the difference is discussed or documented.
        wrong: whether the result is a mistake, such as lost digits or a contradiction of the implementation's own
            documentation, and not another convention.
        target: the only target (a user's loss) that it applies to; empty for any.
        losses: the only losses that it applies to; None for any.
        dtypes: the only dtypes that it applies to; None for any.
        usages: ids of the usages that it applies to as well.
    """

    name: str
    condition: Callable[[Case, str, Truth], bool]
    reason: str
    link: str
    wrong: bool = False
    target: str = ""
    losses: Collection[str] | None = None
    dtypes: frozenset[str] | None = None
    usages: Collection[str] = ()

    def applies(self, case: Case, dtype: str, true: Truth) -> bool:
        """Whether the deviation applies to the check of a case in a dtype."""
        return self.concerns(case.loss, self.target, (dtype,)) and self.condition(case, dtype, true)

    def concerns(self, loss: str, target: str, dtypes: Collection[str] = ()) -> bool:
        """Whether the deviation may apply to this loss, this target and, if given, one of these dtypes."""
        same = self.target in ("", target) and (self.losses is None or loss in self.losses)
        return same and (not dtypes or self.dtypes is None or not self.dtypes.isdisjoint(dtypes))


def deviation(name: str, link: str, **facts: Any) -> Callable[[Callable[[Case, str, Truth], bool]], Deviation]:
    """Turn the decorated condition into a ``Deviation``. The last paragraph of its docstring becomes the reason.

    Args:
        name: see ``Deviation``.
        link: see ``Deviation``.
        facts: other attributes of the deviation.
    """

    def declared(condition: Callable[[Case, str, Truth], bool]) -> Deviation:
        reason = inspect.cleandoc(condition.__doc__ or "").rpartition("\n\n")[2]
        return Deviation(name, condition, " ".join(reason.split()).removesuffix("."), link, **facts)

    return declared


ARRAY_OPTIONS = (
    *("anchors", "positives", "ref_embeddings", "ref_labels", "self_rows", "negatives", "hard_negatives"),
    *(*IGNORED, *WEIGHTS, "direction_weights"),
)
"""The keywords of the catalogue whose values are arrays or lists."""

OPT_IN = (*IGNORED, *WEIGHTS, "zero_row", "direction_weights")
"""Keywords that are supported only if ``Support.options`` or ``Support.takes`` names them.

For losses of two towers, the same holds for ``TOWER_TARGETS``."""


@dataclass(frozen=True)
class Support:
    """The cases that an implementation computes.

    Attributes:
        losses: short names in the catalogue; empty for all.
        options: the supported values by option; an option that is not listed may have any value.
        lacks: the keywords that it does not take.
        also: further reasons to skip a case, each with its condition.
        takes: the keywords of ``OPT_IN`` and ``TOWER_TARGETS`` that it takes with any value.
    """

    losses: tuple[str, ...] = ()
    options: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()
    also: tuple[tuple[str, Callable[[Case], bool]], ...] = ()
    takes: tuple[str, ...] = ()

    def refuses(self, case: Case) -> str | None:
        """Return the reason to skip a case, or None if the case is supported."""
        if self.losses and case.loss not in self.losses:
            return f"does not compute {case.loss}"
        for option, values in self.options.items():
            if option in case.entry.keywords and not _takes(case, option, values):
                if option in case.entry.choices:
                    return f"needs {option}={case.option(option)}"
                return f"needs a {option}" + (f" other than {' or '.join(map(str, values))}" * (values != (None,)))
        given = {**case.keywords, **case.arguments, **case.others}
        chosen = (*OPT_IN, *(TOWER_TARGETS if case.entry.two_towers else ()))
        unlisted = [name for name in chosen if self.losses and name not in (*self.options, *self.takes)]
        lacking = (f"has no parameter {name}" for name in (*self.lacks, *unlisted) if given.get(name) is not None)
        return next(chain(lacking, (reason for reason, applies in self.also if applies(case))), None)


def _takes(case: Case, option: str, values: Collection[object]) -> bool:
    value = case.option(option)
    if option == "direction_weights":
        return value is not None and tuple(value) in values
    if option == "base_temperature":
        # A base temperature of None means the temperature.
        return (value or case.temperature) in {it or case.temperature for it in values}
    # None in ``values`` stands for the default, which may depend on the case's arguments.
    as_default = None in values and value == case.entry.default(option, case.others)
    return value in values or as_default or not matters(case, option)


def matters(case: Case, option: str) -> bool:
    """Return whether the value of an option can affect the result of a case."""
    if option == "no_positive":
        return lacks_positives(case)
    if option == "no_negative":
        positives, members = case.positives(), case.members()
        return any(len(positives[i]) == len(members[i]) for i in case.anchors())
    return option != "base_temperature" or case.option(option) not in (None, case.temperature)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread, because the rounding of sums depends on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def unusable(device: str) -> str:
    """Return why a torch device cannot be used, or ""."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        return f"device {device!r} cannot be used: {str(error).splitlines()[0]}"
    return ""


class Implementation(ABC):
    """One implementation of some of the losses.

    Attributes:
        name: name on the command line.
        title: description in the header of a run.
        support: the cases that it computes.
        dtypes: the dtypes in which it runs.
        deviations: declared differences.
        computes_in: the dtype of its computations. None means the dtype of the rows, or float32 for rows of bfloat16
            and float16.
        anywhere: whether it runs on every machine. If not, no expected counts of its checks are stored: in a full run,
            it must pass every supported case in every dtype that represents the inputs exactly.
        alternates: its own name and those of similar implementations. By default, ``pairproof verify`` judges each case
            with only one of them, in one dtype. Empty if it is judged on every case.
        environment: the environment variables that repeating a check needs, as ``NAME=VALUE``.
        narrows_weights: whether the derivatives with respect to the similarities are rounded to the dtype of the rows
            if that is bfloat16 or float16 (see ``truth/tolerances.py``).
    """

    name: ClassVar[str]
    title: ClassVar[str]
    support: Support = Support()
    dtypes: ClassVar[tuple[str, ...]] = ("float64", "float32")
    deviations: ClassVar[tuple[Deviation, ...]] = ()
    computes_in: ClassVar[str | None] = None
    anywhere: ClassVar[bool] = True
    alternates: ClassVar[tuple[str, ...]] = ()
    environment: tuple[str, ...] = ()
    narrows_weights: bool = False

    def __init__(self, options: Mapping[str, str], device: str) -> None:
        """Load the implementation.

        Args:
            options: paths from the command line, by peer name.
            device: torch device.

        Raises:
            Unavailable: it cannot be loaded.
        """
        self.device = device
        self.load(options)

    def load(self, options: Mapping[str, str]) -> None:  # noqa: B027 (most implementations have nothing to load)
        """Load the code or the data; ``options`` and errors are those of ``__init__``."""

    @abstractmethod
    def version(self) -> str:
        """The version of the copy that is judged."""

    def shared(self, case: Case, dtypes: Sequence[str]) -> list[str]:
        """Return the dtypes in which this implementation is judged on a case.

        Without ``alternates``, these are all ``dtypes``. Otherwise, the id of the case selects one of the alternates
        and one dtype; the list is empty for the others.
        """
        if not self.alternates:
            return [*dtypes]
        turn, place = divmod(zlib.crc32(case.id.encode()), len(self.alternates))
        held = list(filter(case.holds_in, dtypes))
        return [held[turn % len(held)]] if held and self.alternates[place] == self.name else []

    def refuses(self, case: Case) -> str | None:
        """Return the reason to skip a case, or None for a supported case."""
        return self.support.refuses(case)

    @abstractmethod
    def evaluate(self, case: Case, dtype: str) -> Outcome:
        """Evaluate the value and the gradients of a case."""

    def tensors(self, case: Case, dtype: str) -> dict[str, Tensor]:
        """Return the float matrices of a case by argument name, embeddings first, as leaf tensors that require grad."""
        kind = getattr(torch, dtype)
        return {name: torch.tensor(z).to(self.device, kind).requires_grad_() for name, z in case.matrices.items()}

    def integers(self, values: object) -> Tensor:
        """Return labels or indices as an int64 tensor on the device."""
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def arrays(self, case: Case) -> dict[str, Tensor]:
        """Return the other arrays of a case by argument name: indices as int64, masks as bool, weights as float64."""
        given = {}
        for name, value in {**case.arguments, "anchors": case.option("anchors")}.items():
            if value is not None:
                dtype = torch.bool if name in MASKS else torch.float64 if name in WEIGHTS else torch.int64
                tensor = torch.tensor(value, dtype=dtype, device=self.device)
                given[name] = tensor.reshape(-1, 2) if name == "positive_pairs" else tensor
        return given


class TorchImplementation(Implementation):
    """An implementation in torch, differentiated by autograd."""

    @abstractmethod
    def value(self, case: Case, given: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of a case; ``given`` has its matrices by argument name, in the dtype of the check."""

    def evaluate(self, case: Case, dtype: str) -> Outcome:
        """Evaluate the value and the gradients of a case."""
        given = self.tensors(case, dtype)
        return outcome_of(self.value(case, given), given)


def outcome_of(loss: Tensor, leaves: Mapping[str, Tensor], anchors: dict[int, float] | None = None) -> Outcome:
    """Return the outcome of a torch loss, with the gradients of ``loss.sum()``.

    Args:
        loss: one value, or one per anchor.
        leaves: leaf tensors by argument name, the embeddings first.
        anchors: the value of every anchor by row, if known.
    """
    found = {name: gradient.numpy() for name, gradient in gradients_of(loss, leaves).items()}
    values = loss.detach().double().cpu().reshape(-1).tolist()
    return Outcome(values, found.pop(next(iter(leaves))), anchors, other_gradients=found)


def gradients_of(loss: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradient of ``loss.sum()`` for each leaf, as float64 on the CPU; zeros for unused leaves."""
    found: Iterable[Tensor] = map(torch.zeros_like, leaves.values())
    upstream = 1.0
    if loss.requires_grad:
        # An upstream gradient other than 1 reveals a backward pass that ignores it or uses only its sign. In the
        # ordinary range, a power of two changes no digit. Float16 gets -1, because a factor of 2 would preserve digits
        # of subnormal gradients that an ordinary call loses.
        if all(2.0**-20 < float(z.detach().abs().max()) < 2.0**20 for z in leaves.values() if z.numel()):
            upstream = -1.0 if any(z.dtype == torch.float16 for z in leaves.values()) else -2.0
        found = torch.autograd.grad(loss.sum() * upstream, list(leaves.values()), materialize_grads=True)
    # Before torch 2.10, the zeros for unused leaves require a gradient.
    return {name: gradient.detach().double().cpu() / upstream for name, gradient in zip(leaves, found, strict=True)}


def unit(rows: Tensor) -> Tensor:
    """Normalise rows along the last axis.

    Each row is first scaled by a power of two, so that its norm neither overflows nor is clamped.
    """
    exponents = torch.frexp(rows.detach().abs().amax(dim=-1, keepdim=True)).exponent
    for half in (exponents // 2, exponents - exponents // 2):
        rows = rows * torch.pow(torch.tensor(2.0, dtype=rows.dtype), -half)
    return torch.nn.functional.normalize(rows, dim=-1)


def normalised(embeddings: Tensor, case: Case) -> Tensor:
    """Return normalised rows under cosine similarity; otherwise the rows unchanged."""
    return unit(embeddings) if case.option("similarity") == "cosine" else embeddings


def norms_out_of_range(case: Case, dtype: str, smallest: float) -> bool:
    """Whether, under cosine similarity, a norm is below ``smallest`` or its square is out of the dtype's range."""
    if case.option("similarity") != "cosine":
        return False
    info = torch.finfo(getattr(torch, dtype))
    norms = row_norms(np.concatenate(list(case.matrices.values())))
    return bool(norms.min() < max(smallest, math.sqrt(info.tiny)) or norms.max() > math.sqrt(info.max))


def clamped_norms(minimum: float, function: str = "normalize", module: str = "torch") -> Deviation:
    """Return the deviation of a function that divides by ``max(norm, minimum)``, with norms computed from squares."""
    reason = f"{module} divides by a norm of at least {minimum:g}, and the squares in a norm may overflow or underflow"
    link = f"https://pytorch.org/docs/stable/generated/torch.nn.functional.{function}.html"
    return Deviation("norms are clamped", lambda case, dtype, _: norms_out_of_range(case, dtype, minimum), reason, link)


def stacked_order(case: Case) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return an order of the rows that puts all first views before all second views."""
    partners = np.array(case.arguments["partners"], dtype=np.int64)
    first = np.flatnonzero(np.arange(case.n) < partners)
    return np.concatenate([first, partners[first]])


def items_of(case: Case) -> list[tuple[int, ...]]:
    """Group the rows of a case into items with the same number of views: two if possible, else three, else one.

    Rows that are positives of each other and share all their other positives form a class. The number of views must
    divide the size of every class. If ``anchors`` is given, each row is an item.
    """
    if case.option("anchors") is not None:
        return [(i,) for i in range(case.n)]
    mask = np.array(case.positive_mask()) | np.eye(case.n, dtype=bool)
    alike: dict[bytes, list[int]] = {}
    for i, row in enumerate(np.hstack([mask, mask.T])):
        alike.setdefault(row.tobytes(), []).append(i)
    views = next((v for v in (2, 3) if all(len(rows) % v == 0 for rows in alike.values())), 1)
    return sorted(tuple(rows[k : k + views]) for rows in alike.values() for k in range(0, len(rows), views))


def targets_of(case: Case, items: Sequence[tuple[int, ...]], rows: Tensor) -> dict[str, Tensor]:
    """Return ``labels`` or ``mask`` of the items for the original SupCon code; {} if a case has neither."""
    first = [item[0] for item in items]
    if "labels" in case.arguments:
        return {"labels": torch.tensor(case.arguments["labels"], dtype=torch.int64, device=rows.device)[first]}
    if "positives" not in case.arguments:
        return {}
    mask = torch.tensor(case.arguments["positives"], dtype=rows.dtype, device=rows.device)[first][:, first]
    return {"mask": mask.fill_diagonal_(1) if len(items[0]) > 1 else mask}


def by_views(case: Case, given: Mapping[str, Tensor], loss: Callable[..., Tensor]) -> Tensor:
    """Evaluate a loss on two views in one call, or on two towers in one call per direction.

    Args:
        case: a case of nt_xent or info_nce.
        given: its matrices.
        loss: function of the anchors, their positives and the further negatives (or None). It applies the reduction of
            the case.
    """
    views = stacked_views(case, given[case.first]) if "partners" in case.arguments else tuple(given.values())[:2]
    found = [loss(one, other, given.get("negatives")) for one, other in directed(case, views)]
    return joined(found, case.option("reduction"))


def directed(case: Case, views: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """Return the towers, anchors first, for each direction of a case. Without directions, return the views once."""
    return {"b_to_a": [views[::-1]], "both": [views, views[::-1]]}.get(case.option("direction"), [views])


def joined(losses: Sequence[Tensor], reduction: str) -> Tensor:
    """Combine the losses of all directions according to the reduction."""
    if reduction == "none":
        return torch.cat(list(losses))
    total = torch.stack(list(losses)).sum(dim=0)
    return total / len(losses) if reduction == "mean" else total


def stacked_views(case: Case, rows: Tensor) -> tuple[Tensor, ...]:
    """Return the first views and the second views of a case of nt_xent, both in the order of the items."""
    return rows[torch.as_tensor(stacked_order(case), device=rows.device)].chunk(2)


def logits(case: Case) -> npt.NDArray[np.float64]:
    """Return all similarities divided by the temperature, including self pairs."""
    return scaled_similarities(case) / case.temperature


def labels_of(case: Case) -> tuple[list[int], list[int] | None]:
    """Return labels of the rows and of the references (or None) that give the positives of a case.

    Partners are converted to labels. The case must not have a mask of positives.
    """
    if "labels" in case.arguments:
        return case.arguments["labels"], case.arguments.get("ref_labels")
    partners = [int(p) for p in case.arguments["partners"]]
    if "ref_embeddings" in case.others:
        return partners, list(range(case.shape[1]))
    return [min(i, p) for i, p in enumerate(partners)], None


def lacks_positives(case: Case) -> bool:
    """Whether some anchor has no positive."""
    positives = case.positives()
    return any(not positives[i] for i in case.anchors())


def gradient_is_missing(case: Case, dtype: str, true: Truth, name: str) -> bool:
    """Whether the true gradient of a matrix exceeds its bounds, so that a missing gradient fails."""
    gradient = true.other_gradients.get(name)
    return gradient is not None and exceeds(gradient, bounds(case, true, dtype).rows[name])


def gradient_of(case: Case, weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the gradient ``[N, D]`` with respect to the anchors, while the rows they are compared with are constant.

    Args:
        case: a case without other matrices.
        weights: ``[N, N]``, the derivative of the loss with respect to each similarity.
    """
    if case.option("similarity") != "cosine":
        return weights @ case.embeddings
    norms = row_norms(case.embeddings)[:, None]
    rows = case.embeddings / norms
    grad = weights @ rows
    return np.asarray((grad - (grad * rows).sum(axis=1, keepdims=True) * rows) / norms)


def differs(loss: Callable[[Tensor], Tensor], case: Case, dtype: str, true: Truth) -> bool:
    """Whether a loss of the embeddings, evaluated in float64, differs from the truth by more than a dtype's bounds."""
    rows = torch.tensor(case.embeddings, dtype=torch.float64, requires_grad=True)
    return compare(case, true, outcome_of(loss(rows), {case.first: rows}), bounds(case, true, dtype)).ratio > 1


def exceeds(matrix: npt.NDArray[np.float64], allowed: npt.NDArray[np.float64]) -> bool:
    """Whether the norm of some row is above its bound."""
    return bool((row_norms(matrix) > allowed).any())
