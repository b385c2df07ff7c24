"""Many processes: each rank passes its own rows, and the loss is that of the rows of all ranks together.

With ``group=``, each rank passes the rows, labels, partners, ids, anchors and weights of its own batch. The rows of all
ranks, in the order of the ranks, are contrasted with each other. Ranks may have different numbers of rows, even none.

- Masks and weights of pairs have a row for each row of this rank, and a column for each row of all ranks.
- ``partners`` and the first column of ``positive_pairs`` index the rows of the same rank. The second column indexes
  the rows of all ranks.
- ``ref_embeddings`` and ``negatives`` replace the rows of other ranks. They are not gathered; all ranks pass the same.
- Means and sums are over the anchors of all ranks, and every rank returns the same value. "none" and "none_pairs"
  return the values of this rank's anchors.
- The gradient of means and sums is multiplied by the number of ranks. The mean of the ranks' gradients, which
  `DistributedDataParallel` computes, is then the gradient of the returned value. The gradient of "none" and
  "none_pairs" is not multiplied.

With ``group=Ring(...)``, the ranks pass their rows to each other, so that no rank holds all rows; see `Ring`.

On each call, the ranks exchange a summary of their arguments. If the summaries differ, or arguments are invalid on any
rank, every rank raises an error that says what is wrong on which ranks. If a rank does not take part, the others raise
an error when its connection closes, or at the latest after the timeout of the group.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .engine import (
    AnchorValues,
    Backend,
    Batch,
    Policy,
    References,
    Targets,
    anchor_values,
    device,
    measure,
    precision,
    ring,
    shared,
)
from .engine.device import dtypes_of
from .engine.spec import Plan

if TYPE_CHECKING or dist.is_available():
    from torch.distributed import ProcessGroup
else:

    class ProcessGroup:
        """Replaces the class if torch was built without distributed."""


@dataclass(frozen=True)
class Ring:
    """A group whose ranks pass their rows to each other in a ring, instead of gathering the rows of all ranks.

    Each rank holds only a few blocks of rows, so its memory is proportional to its own number of rows. More is sent
    than without a ring: in the backward pass, each block travels again, with its gradient. Rows travel while the ranks
    compute. The functions in `RINGS` and their modules support a ring.

    Example:
        >>> from pairproof.fast import Ring, SupConLoss
        >>> SupConLoss(group=Ring("world")).group
        Ring(group='world')

    Args:
        group: a process group of torch.distributed, or "world" for all processes.

    Raises:
        TypeError: the group is neither a process group nor a string.
        ValueError: the group is a string other than "world".
    """

    group: ProcessGroup | str = "world"

    def __post_init__(self) -> None:
        """Check the group."""
        if not isinstance(self.group, ProcessGroup | str):
            raise TypeError(f'group: expected a process group or "world" in a Ring, got {type(self.group).__name__}')
        check_group(self.group)


Group = ProcessGroup | str | Ring | None
"""A process group, "world" for all processes, a `Ring`, or None for one process."""

R = TypeVar("R")

RINGS = ("supcon_loss", "supcon_in_loss", "nt_xent_loss", "nt_xent_pairwise_loss", "info_nce_loss")
"""The functions that support a `Ring`."""

WIDE_MASKS = ("positives", "ignored", "positive_weights", "negative_weights")
"""Arguments with a column for each row of all ranks."""
REPLICATED = ("ref_embeddings", "negatives")
"""Arguments that must have the same number of rows on all ranks."""
NAMING_TIMEOUT = 5.0
"""Seconds that a rank waits, after a failed exchange, to learn which ranks do not answer."""


def eagerly(*arguments: Any) -> Any:
    """Call a loss with the other ranks, outside any compiled graph."""
    # Without torch._dynamo, nothing is compiled. torch.compiler.disable would import it, which takes seconds.
    if "torch._dynamo" not in sys.modules:
        return _together(*arguments)
    return torch.compiler.disable(_together)(*arguments)  # type: ignore[no-untyped-call]


eagerly._torchdynamo_disable = True  # type: ignore[attr-defined]


def _together(function: Callable[..., Any], names: Sequence[str], args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a loss with the other ranks. If a rank raises an error before `Ranks.meet`, all ranks raise it."""
    given = dict(zip(names, args, strict=False)) | {name: kwargs[name] for name in kwargs if name != "group"}
    group = kwargs["group"]
    ranks = Ranks(find_group(group), function.__name__, given, ring=isinstance(group, Ring))
    try:
        if ranks.ring:
            check_ring(function.__name__, given)
        return function(*args, **{**kwargs, "group": ranks})
    except Exception as error:
        if ranks.met:
            raise
        ranks.refuse(error)


def check_group(group: object) -> None:
    """Check the type of a `Group`; the only valid string is "world"."""
    if isinstance(group, str) and group != "world":
        raise ValueError(f'group: expected a process group, "world" or None, got {group!r}')
    if not isinstance(group, ProcessGroup | str | Ring | None):
        raise TypeError(f'group: expected a process group, "world" or None, got {type(group).__name__}')


def check_ring(function: str, given: dict[str, Any]) -> None:
    """Check that a `Ring` supports a function with the given arguments."""
    if function not in RINGS:
        known = f"{', '.join(RINGS[:-1])} and {RINGS[-1]}"
        raise ValueError(f'group: expected a process group or "world", got a Ring, which only {known} support')
    refused = [name for name in ("positive_weights", "negative_weights") if given.get(name) is not None]
    refused += [f'backend="{name}"' for name in ("exact", "triton") if given.get("backend") == name]
    if given.get("reduction") == "none_pairs":
        refused.append('reduction="none_pairs"')
    if function == "supcon_in_loss" and given.get("denominator") == "one_positive":
        refused.append('denominator="one_positive"')
    if refused:
        expected = f'a process group or "world" with {refused[0]}'
        raise ValueError(f"group: expected {expected}, got a Ring, which does not support it")


def find_group(group: object) -> Any:
    """Return the process group of a `Group`, after checking that this process is a member."""
    group = group.group if isinstance(group, Ring) else group
    if dist.is_available() and group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: expected a group with this process, got one without it")
    check_group(group)
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("group: expected torch.distributed to be initialised, got no default process group")
    return dist.group.WORLD if isinstance(group, str) else group


class Share(NamedTuple):
    """How the rows of one argument are divided among the ranks: rank r has ``counts[r]`` rows."""

    group: Any
    rank: int
    counts: tuple[int, ...]

    @property
    def start(self) -> int:
        """The number of rows of the ranks before this one."""
        return sum(self.counts[: self.rank])

    @property
    def total(self) -> int:
        """The number of rows of all ranks."""
        return sum(self.counts)

    @property
    def here(self) -> slice:
        """The rows of this rank among those of all ranks."""
        return slice(self.start, self.start + self.counts[self.rank])

    def place(self, tensor: Tensor) -> Tensor:
        """Return the indices ``[n]`` of this rank's rows among the rows of all ranks, on the device of a tensor."""
        return torch.arange(self.here.start, self.here.stop, device=tensor.device)

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the rows of all ranks ``[N, ...]`` from those of this rank ``[n, ...]``, without a gradient."""
        most = max(self.counts)
        mine = tensor.detach().contiguous()
        if mine.shape[0] < most:
            mine = torch.cat((mine, mine.new_zeros((most - mine.shape[0], *mine.shape[1:]))))
        found = mine.new_empty((most * len(self.counts), *mine.shape[1:]))
        _collective("all_gather", found, mine, self.group)
        if min(self.counts) == most:
            return found
        return torch.cat([found[k * most : k * most + count] for k, count in enumerate(self.counts)])

    def scatter(self, tensor: Tensor) -> Tensor:
        """Add the tensors ``[N, ...]`` of all ranks, and return this rank's rows ``[n, ...]`` of the sum."""
        most = max(self.counts)
        if min(self.counts) < most:
            padded = tensor.new_zeros((len(self.counts), most, *tensor.shape[1:]))
            for line, part in zip(padded, torch.split(tensor, list(self.counts)), strict=True):
                line[: part.shape[0]] = part
            tensor = padded.flatten(0, 1)
        found = tensor.new_empty((most, *tensor.shape[1:]))
        _collective("reduce_scatter", found, tensor.contiguous(), self.group)
        return found[: self.counts[self.rank]]

    def pass_on(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> tuple[list[Tensor], Callable[[], None]]:
        """Start to send tensors to the next rank and to receive others; see `ring.Share`."""
        found = [
            sent.new_empty((self.counts[owner], *sent.shape[1:])) for sent, owner in zip(tensors, owners, strict=True)
        ]
        return found, _to_the_next([sent.contiguous() for sent in tensors], found, self.group)

    def rows(self, tensor: Tensor) -> Tensor:
        """Return the rows of all ranks ``[N, D]``. In the backward pass, the gradients of all ranks are added.

        Rows in half precision are returned in float32, except on CUDA devices, so that gradients are added in float32.
        """
        found: Tensor = _Gather.apply(tensor, self, None)  # type: ignore[no-untyped-call]
        return found

    def with_gradient(self, tensor: Tensor, gathered: Tensor) -> Tensor:
        """Return the result of `rows` without gathering again; ``gathered`` is the result of `gather`."""
        found: Tensor = _Gather.apply(tensor, self, gathered)  # type: ignore[no-untyped-call]
        return found


class _Gather(torch.autograd.Function):
    """The rows of all ranks, differentiable."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, share: Share, gathered: Tensor | None) -> Tensor:
        ctx.share, ctx.dtype = share, rows.dtype
        found = share.gather(rows) if gathered is None else gathered.clone()
        return found if rows.is_cuda else found.to(dtypes_of(rows)[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        found: Tensor = _Scatter.apply(grads[0], ctx.share)  # type: ignore[no-untyped-call]
        return found.to(ctx.dtype), None, None


class _Scatter(torch.autograd.Function):
    """The gradient of `_Gather`."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, share: Share) -> Tensor:
        ctx.share = share
        return share.scatter(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        found: Tensor = _Gather.apply(grads[0], ctx.share, None)  # type: ignore[no-untyped-call]
        return found, None


class _Value(torch.autograd.Function):
    """The value of all ranks, with ``factor`` as derivative with respect to this rank's sum ``local``."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, value: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] * ctx.saved_tensors[0], None, None


class Ranks:
    """One call of a loss by all ranks of a group.

    Args:
        group: the process group.
        function: the name of the loss.
        given: the arguments of the loss.
        ring: whether the ranks pass their rows to each other instead of gathering them.

    Attributes:
        met: whether this rank has exchanged anything with the others.
        first: the share of the embeddings, or of the first tower.
        second: the share of the second tower; all counts are 0 if there is none.
    """

    def __init__(self, group: Any, function: str, given: dict[str, Any], *, ring: bool = False) -> None:
        self.group, self.rank, self.world = group, dist.get_rank(group), dist.get_world_size(group)
        self.given, self.ring = given, ring
        self.described = {"group": f"{function} with a Ring" if ring else function} | {
            name: _described(name, given) for name in sorted(given)
        }
        self.met = False
        self._planned: tuple[Plan, Batch] | None = None
        self.first = self.second = Share(group, self.rank, (0,) * self.world)

    def meet(self, first: Tensor, second: Tensor | None = None, *, least: int = 0) -> None:
        """Exchange the numbers of rows, and a summary of the arguments.

        Args:
            first: ``[n, ...]``, the rows of this rank.
            second: ``[m, ...]``, the rows of the other tower.
            least: the smallest allowed number of rows of all ranks together.

        Raises:
            TypeError, ValueError: the arguments of a rank are invalid, or differ between ranks.
            RuntimeError: a rank does not take part.
        """
        text = repr(sorted(self.described.items()))
        summary = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
        found = self._exchanged(0, summary, first.shape[0], 0 if second is None else second.shape[0])
        if any(line[0] for line in found) or len({line[1] for line in found}) > 1:
            self._raise(None)
        self.first = Share(self.group, self.rank, tuple(line[2] for line in found))
        self.second = Share(self.group, self.rank, tuple(line[3] for line in found))
        if self.first.total < least:
            name = next(iter(self.given))
            rows = "row" if least == 1 else "rows"
            raise ValueError(f"{name}: expected at least {least} {rows} on all ranks together, got {self.first.total}")

    def refuse(self, error: Exception) -> NoReturn:
        """Raise an error of this rank on all ranks."""
        self._exchanged(1, 0, 0, 0)
        self._raise(error)

    def check(self, check: Callable[[], R]) -> R:
        """Return the result of a check. If a rank raises an error, all ranks raise it."""
        result, error = [], None
        try:
            result.append(check())
        except (TypeError, ValueError) as found:
            error = found
        if any(line[0] for line in self._exchanged(int(error is not None), 0, 0, 0)):
            self._raise(error)
        return result[0]

    def widest(self, needed: str) -> Any:
        """Return the highest precision that a rank needs; ``needed`` is that of this rank (see `engine.precision`)."""
        levels = ("", "float64", "exact")
        return levels[max(line[0] for line in self._exchanged(levels.index(needed)))]

    def _exchanged(self, *numbers: int) -> list[list[int]]:
        """Exchange numbers, and return the numbers of each rank."""
        self.met = True
        mine = torch.tensor(numbers, dtype=torch.int64, device=_device_of_messages(self.group))
        found = mine.new_empty(self.world * len(numbers))
        _collective("all_gather", found, mine, self.group)
        return cast("list[list[int]]", found.view(self.world, -1).tolist())

    def _raise(self, error: Exception | None) -> NoReturn:
        """Exchange the arguments and errors of all ranks, and raise an error that says which ranks differ."""
        found: list[Any] = [None] * self.world
        failure = None if error is None else (type(error).__name__, str(error))
        dist.all_gather_object(found, (self.described, failure), group=self.group)
        failed = [(rank, *failure) for rank, (_, failure) in enumerate(found) if failure]
        if failed:
            message = failed[0][2]
            where = _of_ranks([rank for rank, _, text in failed if text == message])
            kind = {"TypeError": TypeError, "ValueError": ValueError}.get(failed[0][1], RuntimeError)
            raise kind(f"{message}, on {where}") from error
        differences = []
        for name in dict.fromkeys(name for described, _ in found for name in described):
            values = [described.get(name, "None") for described, _ in found]
            if len(set(values)) > 1:
                parts = (
                    f"{value} on {_of_ranks([r for r, v in enumerate(values) if v == value])}"
                    for value in dict.fromkeys(values)
                )
                differences.append(f"{name}: expected the same on all ranks, got {', '.join(parts)}")
        raise ValueError("; ".join(differences))

    def _check_widths(self, total: int) -> None:
        """Check that masks have ``total`` columns. All ranks have equal widths, so all or none raise an error."""
        for name in WIDE_MASKS:
            mask = self.given.get(name)
            if mask is not None and mask.shape[1] != total:
                expected = f"one column for each row of all ranks, shape [{mask.shape[0]}, {total}]"
                raise ValueError(f"{name}: expected {expected}, got shape {list(mask.shape)}")

    def shared(self, batch: Batch, policy: Policy, backend: Backend | None = None) -> tuple[Batch, Policy]:
        """Call `meet`, and return a batch whose references are the rows of all ranks, and a policy for all ranks.

        A batch with references is returned as it is. In a ring, the references are `ring.Blocks`.

        Args:
            batch: the rows of this rank.
            policy: how the values are reduced.
            backend: the backend; None if the loss combines several evaluations.
        """
        policy, own = replace(policy, ranks=self), batch.references.embeddings is None
        self.meet(batch.embeddings, least=2 if own and batch.targets.kind == "partners" else 1)
        if not own:
            return batch, policy
        rows, targets, share = batch.embeddings, batch.targets, self.first
        local = not self.ring and backend is not None and shared.suits(batch, backend)
        self._check_widths(share.total)
        if targets.kind == "labels":
            targets = replace(targets, columns=share.gather(targets.given))
        elif targets.kind == "partners":
            targets = self._partners(targets, share)
        elif targets.kind == "pairs":
            self.check(lambda: _check_pairs(targets.given, rows.shape[0], share.total))
        if targets.ids is not None:
            targets = replace(targets, column_ids=share.gather(targets.ids))
        if self.ring:
            needed = precision(batch.rule, rows, (batch.sizes,))
            needed = self.widest(needed) if batch.rule.similarity == "dot" else needed
            if needed == "exact":
                raise ValueError(ring.OVERFLOW)
            wide = rows.to(dtypes_of(rows)[1 if needed else 0])
            sizes = batch.sizes if wide.dtype == rows.dtype else None
            found = ring.Blocks(share=share)
            return replace(batch, embeddings=wide, targets=targets, references=found, sizes=sizes), policy
        every = share.gather(rows)
        references = References(every, share.place(rows), sizes=measure(every) if device.may_read(every) else None)
        batch = replace(batch, targets=targets, references=references, storage=rows.dtype)
        if local:
            self._planned = shared.planned(batch, cast(Backend, backend))
        if self._planned is None:
            # Rows are converted here, so that the gradients of all ranks are added before they are rounded.
            wide = rows if rows.is_cuda else rows.to(dtypes_of(rows)[0])
            references = replace(references, embeddings=share.with_gradient(wide, every.to(wide.dtype)))
            batch = replace(batch, embeddings=wide, references=references)
        return batch, policy

    def anchor_values(self, batch: Batch, backend: Backend) -> AnchorValues:
        """Return the values of this rank's anchors."""
        if isinstance(batch.references, ring.Blocks):
            if backend == "exact":  # chosen automatically: `check_ring` rejects the argument
                raise ValueError(ring.OVERFLOW)
            return ring.anchor_values(batch, backend)
        if self._planned is None:
            return anchor_values(batch, backend)
        plan, batch = self._planned
        return shared.anchor_values(batch, plan, self.first)

    def _partners(self, targets: Targets, share: Share) -> Targets:
        """Return targets with partners among the rows of all ranks."""
        found = replace(targets, given=targets.given + share.start)
        if found.ignored is not None:
            self.check(lambda: _check_kept(cast(Tensor, found.ignored), found.given))
        return found

    def towers(self, batch: Batch, direction: str, *, alike: bool = False) -> list[Batch]:
        """Return a batch for each direction, whose references are the other tower of all ranks.

        In a ring, the references are `ring.Blocks`.

        Args:
            batch: both towers of this rank.
            direction: "both", "a_to_b" or "b_to_a".
            alike: whether row k of one tower is the only positive of row k of the other.
        """
        a, b, targets = batch.embeddings, cast(Tensor, batch.references.embeddings), batch.targets
        first, second = self.first, self.second
        self._check_widths(second.total)
        sides = []
        if targets.kind == "partners":
            targets = self._partners(targets, second)
        if direction in ("both", "a_to_b"):
            there = targets
            if there.kind == "labels":
                there = replace(there, columns=second.gather(cast(Tensor, there.columns)))
            if there.column_ids is not None:
                there = replace(there, column_ids=second.gather(there.column_ids))
            sides.append((a, batch.sizes, b, batch.references.sizes, second, there))
        if direction in ("both", "b_to_a"):
            kind, given, columns = targets.kind, targets.given, None
            if alike:
                given = first.place(b)
            elif kind == "partners":
                kind, given, columns = "labels", second.place(b), first.gather(given)
            elif kind == "labels":
                given, columns = cast(Tensor, targets.columns), first.gather(given)
            else:
                given = first.gather(given)[:, second.here].T
            back = Targets(kind, given, columns)
            if targets.ignored is not None:
                back = replace(back, ignored=first.gather(targets.ignored)[:, second.here].T)
            if targets.ids is not None:
                back = replace(back, ids=targets.column_ids, column_ids=first.gather(targets.ids))
            sides.append((b, batch.references.sizes, a, batch.sizes, first, back))
        if self.ring:
            found: list[References] = [
                ring.Blocks(others, sizes=sizes, share=share) for _, _, others, sizes, share, _ in sides
            ]
        else:
            # All rows are gathered first, so that all ranks add gradients in the same order in the backward pass.
            found = [References(share.rows(others)) for _, _, others, _, share, _ in sides]
        return [
            replace(batch, embeddings=rows, sizes=sizes, targets=aims, references=references)
            for (rows, sizes, _, _, _, aims), references in zip(sides, found, strict=True)
        ]

    def reduced(self, values: Tensor, weights: Tensor | int, *, mean: bool, dtype: torch.dtype | None) -> Tensor:
        """Return the sum or mean of the values of all ranks, with the gradient multiplied by the number of ranks.

        Args:
            values: ``[n]``, already multiplied by their weights.
            weights: the sum of the weights of this rank.
            mean: whether to divide by the sum of the weights of all ranks, if it is positive.
            dtype: the dtype of sums.
        """
        local = values.sum(dtype=dtype)
        # The sum of float64 values may overflow although their mean does not.
        scaled = (values.detach() * 2.0**-64).sum(dtype=dtype)
        total = torch.as_tensor(weights, dtype=local.dtype, device=local.device)
        sums = torch.stack((local.detach(), scaled, total.detach()))
        _collective("all_reduce", sums, sums, self.group)
        divisor = torch.where(sums[2] > 0, sums[2], 1) if mean else torch.ones_like(total)
        value = torch.where(sums[0].isfinite(), sums[0] / divisor, sums[1] / divisor * 2.0**64)
        found: Tensor = _Value.apply(local, value, self.world / divisor)  # type: ignore[no-untyped-call]
        return found


def gather_rows(rows: Tensor, *, group: Group = None) -> Tensor:
    """Return the rows of all ranks, in the order of the ranks. Ranks may have different numbers of rows.

    In the backward pass, the gradients of all ranks are added.

    Example:
        >>> import torch
        >>> from pairproof.fast import gather_rows
        >>> gather_rows(torch.tensor([[1.0, 0.0]]))
        tensor([[1., 0.]])

    Args:
        rows: ``[n, ...]``, floating if they require a gradient.
        group: a process group, or "world"; None: return the rows as they are.

    Returns:
        ``[N, ...]``.

    Raises:
        TypeError: rows are not a tensor.
        ValueError: rows have no dimensions, or their dtypes or other dimensions differ between ranks.
    """
    if group is not None:
        found: Tensor = eagerly(_all_rows, ("rows",), (rows,), {"group": group})
        return found
    return rows


def _all_rows(rows: Tensor, group: Ranks) -> Tensor:
    if not isinstance(rows, Tensor):
        raise TypeError(f"rows: expected a tensor, got {type(rows).__name__}")
    if not rows.ndim:
        raise ValueError("rows: expected at least one dimension, got shape []")
    group.meet(rows)
    return group.first.rows(rows).to(rows.dtype) if rows.is_floating_point() else group.first.gather(rows)


def _described(name: str, given: dict[str, Any]) -> str:
    """Return a description of an argument. It must be the same on all ranks."""
    value = given[name]
    if not isinstance(value, Tensor):
        return repr(value)
    shape: list[Any] = list(value.shape)
    if shape and name not in REPLICATED:
        shape[0] = "any"
    learned = ", requires_grad" if value.requires_grad and torch.is_grad_enabled() else ""
    text = f"{str(value.dtype).removeprefix('torch.')} [{', '.join(map(str, shape))}] on {value.device.type}{learned}"
    if not value.ndim and given.get("validate") is True:
        text += f", {value.item()!r}"
    return text


def _check_pairs(pairs: Tensor, count: int, total: int) -> None:
    outside = (pairs < 0) | (pairs >= torch.tensor([count, total], device=pairs.device))
    if bool(outside.any()):
        place = int(outside.any(1).int().argmax())
        expected = f"rows in the ranges 0 to {count - 1} and 0 to {total - 1}"
        raise ValueError(f"positive_pairs: expected {expected}, got {pairs[place].tolist()} at position {place}")


def _check_kept(ignored: Tensor, partners: Tensor) -> None:
    flags = ignored.gather(1, partners[:, None])[:, 0]
    if bool(flags.any()):
        row = int(flags.int().argmax())
        raise ValueError(f"ignored: expected False for every row and its positive, got True in row {row}")


def _of_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _device_of_messages(group: Any) -> torch.device:
    """Return the device for small messages: the CPU if possible, to avoid synchronisation."""
    if "cpu:" in str(dist.get_backend_config(group)):
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    return torch.device("cpu" if kind is None else kind.type)


@contextmanager
def _naming(kind: str, group: Any) -> Iterator[None]:
    """If an operation fails, name the ranks that do not answer in the error."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"group: {kind} failed on rank {dist.get_rank(group)}{_lost(group)}: {error}") from error


def _to_the_next(tensors: Sequence[Tensor], found: Sequence[Tensor], group: Any) -> Callable[[], None]:
    """Start to send tensors to the next rank, and to receive others into ``found`` from the previous one.

    Returns:
        A function that waits until all are sent and received. It raises RuntimeError if a rank does not take part.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    following, previous = (dist.get_global_rank(group, (rank + turn) % world) for turn in (1, -1))
    operations = [
        dist.P2POp(operation, tensor, peer, group, tag)
        for operation, peer, parts in ((dist.isend, following, tensors), (dist.irecv, previous, found))
        for tag, tensor in enumerate(parts)
        if tensor.numel()
    ]
    with _naming("ring", group):
        works = dist.batch_isend_irecv(operations) if operations else []

    def wait() -> None:
        with _naming("ring", group):
            while works:  # popped, because a finished work keeps its tensor alive
                works.pop().wait()

    return wait


def _collective(kind: str, found: Tensor, given: Tensor, group: Any) -> None:
    """Run a collective operation with `_naming`."""
    with _naming(kind, group):
        if kind == "all_reduce":
            dist.all_reduce(found, group=group)
        elif kind == "all_gather":
            (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(found, given, group=group)
        else:
            (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(found, given, group=group)


def _lost(group: Any) -> str:
    """Return which ranks do not answer, as the end of a message; "" if unknown."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    # The connections of the group may be closed, so the remaining ranks report to each other in its store.
    with suppress(RuntimeError, ValueError, AttributeError):
        store = group.get_group_store()
        store.set(f"pairproof/left/{rank}", b"1")
        end, missing = time.monotonic() + NAMING_TIMEOUT, list(range(world))
        while missing and time.monotonic() < end:
            missing = [other for other in missing if not store.check([f"pairproof/left/{other}"])]
            time.sleep(0.05)
        if missing:
            return f", because {_of_ranks(missing)} did not take part"
    return ""
