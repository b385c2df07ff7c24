"""A user's loss (a *target*) in several processes of one ``torch.distributed`` group, each with its own rows.

Each process is a ``Child``, called a *rank*. The backend is gloo. The embeddings are the product of inputs and a
projection: a parameter that all ranks share, so that each rank computes a gradient of it.
"""

from __future__ import annotations

import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.utils._pytree import tree_leaves

from ..truth.rounding import Dispatch
from .callable import Batch, Target
from .child import Child, Served
from .sandbox import NoCallFits, TargetError, TargetMisused, copy_of, describe, find
from .signatures import FACTS, Signature

Tensor = torch.Tensor

PROJECTION = "projection"
"""The name of the projection among the gradients."""

HARD = "hard_negatives"
"""The keyword for hard negatives, [items, number, D], which are multiplied by the projection too."""

SCALARS = ("temperature", "bias")
"""The keywords that are passed to a loss that takes them."""

GROUPS = ("group", "process_group")
"""Names of parameters for a process group."""

GATHERS = re.compile(r"gather|local_loss|distributed|across|cross_(rank|device)|sync")
"""Names of parameters that may control what the ranks exchange."""

WAITED = re.compile(r"gloo|connection (closed|reset|refused)|timed? ?out|broken pipe", re.IGNORECASE)
"""Errors of a rank that waited for another one."""


@dataclass(frozen=True)
class Subject:
    """What every rank loads.

    Attributes:
        target: the target, or the text that names it.
        call: how it is called; guessed if None.
        arrays: the arrays that it takes; guessed if None.
        init: values of parameters by name.
        result: the name of the loss among several results; guessed if None.
        against: the target to evaluate in a single process, if it is another one.
        scale: the parameter that gets 1 / temperature, if its name does not show it.
    """

    target: object
    call: str | None = None
    arrays: str | None = None
    init: Mapping[str, Any] = field(default_factory=dict)
    result: str | None = None
    against: object = None
    scale: str | None = None


class Exchange(Dispatch):
    """Count the collective operations of a rank, and the bytes that it receives if blocks travel around a ring."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations, self.received = 0, 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function. Of W blocks, W - 1 come from other ranks; the sum of all ranks needs two rounds."""
        found = function(*args, **(kwargs or {}))
        library, _, name = function._schema.name.partition("::")
        if library in ("c10d", "_c10d_functional") and not re.search("wait|barrier|send", name):
            world = distributed.get_world_size()
            written = args[0] if library == "c10d" else found
            size = sum(x.nbytes for x in tree_leaves(written) if isinstance(x, Tensor))
            rounds = world if "reduce_scatter" in name else 1 + ("allreduce" in name.replace("_", ""))
            self.operations += 1
            self.received += size if "recv" in name else rounds * size * (world - 1) / world
        return found


class Member:
    """One rank, in its own process: the target, alone or in a group.

    Attributes:
        subject: what it loads.
        thing: the function, class or instance of the user.
        target: wraps ``thing`` with the arguments of the current group, if there is one.
        parameters: the parameters of the module that was called last, by name.
    """

    def __init__(self, subject: Subject, limit: float) -> None:
        """Load the target. A rank waits for the others for at most ``limit`` seconds."""
        torch.manual_seed(0)
        self.subject, self.limit = subject, limit
        self.thing = find(subject.target) if isinstance(subject.target, str) else subject.target
        self.parameters: dict[str, Tensor] = {}
        self.target = self._target(subject.init)
        self.choice = self.target.choice
        self.against: Target | None = None
        if subject.against is not None:
            spec = subject.against
            self.against = Target(find(spec) if isinstance(spec, str) else spec, spec=spec)

    def _target(self, init: Mapping[str, Any]) -> Target:
        """Return the target with these values of its parameters, with modules in float64."""
        subject = self.subject
        more: dict[str, Any] = {"init": init, "result": subject.result, "scale": subject.scale}
        found = Target(self.thing, subject.call, subject.arrays, **more, spec=subject.target)

        def watched(module: Any) -> Any:
            if isinstance(module, torch.nn.Module):
                module.double()
                self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
            return module

        if found.constructs:
            thing = found.thing
            found.thing = lambda **options: watched(thing(**options))
        else:
            watched(self.thing)
        return found

    def facts(self) -> dict[str, Any]:
        """How the target is called, as JSON data."""
        target, signature = self.target, self.target.signature
        known = {**signature.constructor, **signature.call}
        both = target, self.against or target
        # Hard negatives are passed by keyword.
        own, other = ("views" if one.probed_as == "hard" else one.probed_as for one in both)
        return {
            "call": target.call,
            "probed_as": own,
            "against_as": other,
            "choice": target.choice,
            "arrays": target.arrays,
            "notes": [
                *target.notes,
                *(f"single process: {one}" for one in (self.against and self.against.notes) or ()),
            ],
            "takes": [[name for name in SCALARS if one.signature.keyword(name)] for one in both],
            "passed": self._passed(0, 1, known),
            "hard": signature.keyword(HARD) is not None,
            "takes_labels": target.call != "features" or signature.keyword("labels") is not None,
            "gathers": [
                f"{name}={p.default!r}"
                for name, p in known.items()
                if GATHERS.search(name) and name not in target.signature.init and p.default is not p.empty
            ],
            "version": copy_of(target.thing if not target.constructs else self.thing),
        }

    def _passed(self, rank: int, world: int, known: Mapping[str, Any], group: Any = None) -> dict[str, Any]:
        """Return the rank, the number of ranks and the group by the names of the parameters that take them."""
        words = {**dict.fromkeys(FACTS["rank"], rank), **dict.fromkeys(FACTS["world_size"], world)}
        words |= dict.fromkeys(GROUPS, group)
        return {name: value for name, value in words.items() if name in known and name not in self.subject.init}

    def __call__(self, what: str, *given: Any) -> Any:
        """Call a method by name. After an error, leave the group, so that no other rank waits for this one."""
        try:
            return getattr(self, what)(*given)
        except BaseException:
            with suppress(Exception):
                self.leave()
            raise

    def settle(self, folder: str) -> dict[str, Any]:
        """Find out how the target is called: without a group or, if that fails, in a group of one process."""
        try:
            self.target.settle(limit=self.limit)
            alone = not self.target.grouped
        except NoCallFits:
            self.join(0, 1, folder, self.limit, self.choice)
            self.target.settle(limit=self.limit)
            alone = False
        if self.target.probed_as == "queue":
            raise TargetError("it requires negatives, and pairproof parity passes none")
        if self.against is not None:
            try:
                self.against.settle(limit=self.limit)
            except TargetError as error:
                raise type(error)(f"--against {describe(self.subject.against)}: {error}") from None
        found = self.facts() | {"alone": alone}
        self.leave()
        return found

    def join(self, rank: int, world: int, store: str, seconds: float, choice: Sequence[Any]) -> None:
        """Join a group, and construct the target for this rank.

        Args:
            rank: this rank.
            world: the number of ranks.
            store: path of a new file by which the ranks find each other.
            seconds: how long a rank waits for the others.
            choice: how the target is called: the arguments of ``Target.call_as``.
        """
        self.leave()
        if sys.platform == "linux":
            # The loopback interface works even if the name of the host cannot be resolved.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        shared = distributed.FileStore(store, world)  # type: ignore[attr-defined]
        wait = timedelta(seconds=seconds)
        distributed.init_process_group("gloo", store=shared, rank=rank, world_size=world, timeout=wait)
        signature = Signature(self.thing, self.subject.init)
        known = {**signature.constructor, **signature.call}
        given = self._passed(rank, world, known, distributed.group.WORLD)
        self.target = self._target({**self.subject.init, **given})
        self.target.call_as(*choice)

    def leave(self) -> None:
        """Leave the group, if there is one."""
        if distributed.is_initialized():
            distributed.destroy_process_group()
            self.target = self._target(self.subject.init)

    def alone(self, choice: Sequence[Any], *given: Any) -> dict[str, Any]:
        """Evaluate a batch without a group; the arguments are those of ``evaluate``."""
        self.leave()
        if tuple(choice) != self.target.choice:
            self.target.call_as(*choice)
        return self.evaluate(*given)

    def evaluate(
        self, batch: Batch, projection: Tensor, learned: Sequence[str] = (), weight: float = 1.0, quiet: bool = False
    ) -> dict[str, Any]:
        """Return the mean of the values of a batch, and the gradients of ``weight`` times this mean.

        Args:
            batch: inputs in place of embeddings, and the other arguments.
            projection: [D, D]; the embeddings are ``inputs @ projection``.
            learned: keywords that are passed as tensors with a gradient.
            weight: factor of the mean before the backward pass.
            quiet: whether native code prints nothing to standard error.

        Returns:
            ``value``, the mean; ``values``, their number; ``gradients`` by name, None if a parameter has none;
            ``rows``, the gradients of the embeddings.
        """
        torch.manual_seed(0)
        keywords, inputs = dict(batch.keywords), batch.embeddings
        leaves = {PROJECTION: projection.clone().requires_grad_()}
        for name in learned:
            leaves[name] = keywords[name] = torch.tensor(keywords[name], dtype=torch.float64, requires_grad=True)
        target = self.against if self.against is not None and not distributed.is_initialized() else self.target
        self.parameters = {} if target.constructs else self.parameters
        if target.call != "similarities":
            refused = [name for name in SCALARS if not target.signature.keyword(name)]
            keywords = {name: x for name, x in keywords.items() if name not in refused}
        rows = [inputs @ leaves[PROJECTION]]
        if HARD in keywords:
            rows.append(keywords[HARD] @ leaves[PROJECTION])
            keywords[HARD] = rows[1]
        with _silent() if quiet else nullcontext():
            loss = target.loss(replace(batch, embeddings=rows[0], keywords=keywords))
            value = loss.mean()
            leaves |= self.parameters
            found: Sequence[Tensor | None] = [None] * (len(leaves) + len(rows))
            if value.requires_grad:
                found = torch.autograd.grad(value * weight, [*leaves.values(), *rows], allow_unused=True)
        gradients = {
            name: None if g is None else g.double().flatten().tolist() for name, g in zip(leaves, found, strict=False)
        }
        of_rows = [torch.zeros_like(z) if g is None else g for z, g in zip(rows, found[len(leaves) :], strict=True)]
        flat = torch.cat([g.double().flatten(0, -2) for g in of_rows])
        return {"value": float(value.detach()), "values": loss.numel(), "gradients": gradients, "rows": flat.tolist()}

    def exchange(self, *given: Any) -> tuple[int, float]:
        """Evaluate a batch, and return the counts of ``Exchange``; the arguments are those of ``evaluate``."""
        with Exchange() as counted:
            self.evaluate(*given)
        return counted.operations, counted.received


@contextmanager
def _silent() -> Iterator[None]:
    """Discard what native code writes to standard error, such as messages of gloo."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


class Ranks:
    """The ranks of a target, seen from the judging process: started when needed, restarted after a failure."""

    def __init__(self, subject: Subject, limit: float) -> None:
        self._subject, self._limit = subject, limit
        self._children: list[Child] = []
        self._folder = tempfile.TemporaryDirectory(prefix="pairproof-")
        self._stores = count()
        self.choice: Sequence[Any] = (0, None)

    def close(self) -> None:
        """End all processes."""
        self._end()
        self._folder.cleanup()

    def _end(self) -> None:
        for child in self._children:
            child.close()
        self._children = []

    def _start(self, ranks: int) -> None:
        def load() -> Served:
            member = Member(self._subject, self._limit)
            return member.facts(), member

        while len(self._children) < ranks:
            self._children.append(Child(load, self._limit))

    def _store(self) -> str:
        return str(Path(self._folder.name) / f"store-{next(self._stores)}")

    def settle(self) -> dict[str, Any]:
        """Find out how the target is called, and return the facts about it.

        Raises:
            CannotFork: this process cannot be forked.
            TargetError: the target cannot be loaded, or every plausible call raises an error.
            TargetMisused: it is not a torch target, or an option contradicts it.
        """
        self._start(1)
        arrays = self._children[0].facts["arrays"]
        if arrays != "torch":
            raise TargetMisused(f"several processes need a torch target, not {arrays}")
        facts: dict[str, Any] = self._children[0].ask("settle", self._store())
        self.choice = facts["choice"]
        return facts

    def alone(self, *given: Any) -> dict[str, Any]:
        """Evaluate a batch in one process without a group; the arguments are those of ``Member.evaluate``.

        Raises:
            TargetError: the target raised an error, died or did not answer in time.
        """
        self._start(1)
        found: dict[str, Any] = self._children[0].ask("alone", self.choice, *given)
        return found

    def join(self, world: int, seconds: float = math.inf) -> None:
        """Form a group of the first ``world`` ranks. A rank waits for the others for ``seconds``, at most the limit.

        Raises:
            TargetError: a rank failed.
        """
        self._start(world)
        store, wait = self._store(), min(seconds, self._limit)
        self._ask([("join", rank, world, store, wait, self.choice) for rank in range(world)])

    def together(self, requests: Sequence[Sequence[Any]], method: str = "evaluate") -> list[Any]:
        """Evaluate one batch on each rank at the same time; the arguments are those of ``Member.evaluate``.

        Raises:
            TargetError: a rank failed; the message names it.
        """
        return self._ask([(method, *request) for request in requests])

    def _ask(self, requests: Sequence[Sequence[Any]]) -> list[Any]:
        """Send one request to each rank at the same time. If a rank fails, end all processes."""
        with ThreadPoolExecutor(len(requests)) as pool:
            answers = [pool.submit(self._children[rank].ask, *request) for rank, request in enumerate(requests)]
        errors = {rank: error for rank, answer in enumerate(answers) if (error := answer.exception())}
        if not errors:
            return [answer.result() for answer in answers]
        self._end()
        for error in errors.values():
            if not isinstance(error, TargetError):
                raise error
        raise TargetError(blamed({rank: str(error) for rank, error in errors.items()}, len(requests)))


def blamed(errors: Mapping[int, str], world: int) -> str:
    """Return which ranks failed, and which ones only waited for them.

    Args:
        errors: the errors by rank.
        world: the number of ranks.
    """
    # Messages of gloo begin with a source file and a line number.
    errors = {rank: re.sub(r"^RuntimeError: \[[^\]]*\] ", "", error) for rank, error in errors.items()}
    waiting = [rank for rank in errors if WAITED.search(errors[rank])]
    failed = [f"rank {rank}: {errors[rank]}" for rank in errors if rank not in waiting]
    finished = [rank for rank in range(world) if rank not in errors]
    if not failed:
        without = f" that {_ranks(finished)} did not join" if finished else ""
        failed, waiting = [f"{_ranks(waiting)} waited in a collective operation{without}: {errors[waiting[0]]}"], []
    return "; ".join([*failed, *([f"{_ranks(waiting)} waited"] if waiting else [])])


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
