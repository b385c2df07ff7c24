"""A user's loss (a *target*) in a child process, so that it cannot crash, block or change the process that judges it.

There are three processes: the judging process forks a *spawner*, and the spawner forks a *worker*.

- The worker loads the target and answers requests.
- The spawner runs no code of the target. It forks a new worker if the worker dies. If the judging process dies, the
  spawner kills the worker and exits.

Forking supports lambdas and local functions, and torch is not imported again. Requests are pickled. Answers are JSON,
because unpickling an answer could run code of the target in the judging process.

A fork is possible only on Linux, and not while CUDA is in use or, for a target of jax arrays, after jax was used. If
it is not possible, the target runs in the judging process, and a note says so.
"""

from __future__ import annotations

import base64
import builtins
import faulthandler
import gc
import io
import json
import math
import os
import pickle
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import wait
from typing import Any, NoReturn

import numpy as np
import torch

from ..suite.cases import Case
from ..suite.records import Matrix, Outcome
from .callable import Answer, Batch, External, Target
from .forms import Reading
from .sandbox import JaxLost, NoCallFits, Overtime, TargetError, TargetMisused, described, find
from .signatures import Claim
from .subprocess import BRIEFLY, LONGEST_LINE, PATIENCE
from .usages import Use, read_observed

DEATHS = 10
"""Number of consecutive deaths after which the worker is not started again."""

CHECK_INTERVAL = 1.0
"""Seconds after which the spawner checks again whether the judging process has ended."""

LOADING = 60.0
"""Smallest time limit for loading a target, in seconds."""

PRINTED = 20
"""Maximum number of different lines of a target's output that are shown."""

LONGEST_MESSAGE = 1000
"""Maximum length of an error message or of a line of output, in characters."""

Served = tuple[dict[str, Any], Callable[..., Any]]
"""Facts about a target as JSON data, and a function that answers a request with JSON data."""


class CannotFork(Exception):
    """The target cannot run in a child process; the message says why."""


class _Ended(Exception):
    """The worker died, or its answer is too long."""


class _Late(_Ended):
    """The worker did not answer before the time limit."""


class Child:
    """A target in a worker process.

    Attributes:
        facts: what the worker reported about the target after loading it.
        last_death: how the worker died the last time; "" if it has not died since `settle`.
    """

    def __init__(self, load: Callable[[], Served], limit: float | None) -> None:
        """Fork the spawner and the first worker, and load the target.

        Args:
            load: loads the target; called in the worker.
            limit: time limit of an answer in seconds; None for no limit.

        Raises:
            CannotFork: this process cannot be forked.
            TargetError: the target cannot be loaded.
        """
        if sys.platform != "linux":
            raise CannotFork(f"{sys.platform} has no safe fork")
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise CannotFork("CUDA is in use and does not survive a fork")
        self._load, self._limit, self._owner = load, math.inf if limit is None else limit, os.getpid()
        self._deaths, self.last_death, self._spawner, self._worker = 0, "", 0, 0
        self._warned: set[tuple[Any, ...]] = set()
        try:
            self.facts: dict[str, Any] = self._start()
        except BaseException:
            self.close()
            raise

    def ask(self, *request: Any) -> Any:
        """Send one request and return the answer.

        Raises:
            TargetError: the target raised an error, died, or did not answer in time.
        """
        if self._worker and wait([self._control], 0):
            # The worker died after its last answer, which is not an error of this request.
            self._end(0.0)
        if not self._worker:
            if self._deaths >= DEATHS:
                raise TargetError(
                    f"gave up after {DEATHS} deaths of the process in a row; the last: {self.last_death}", died=True
                )
            self._start()
        late = f"took longer than {self._limit:g} s (--limit) and was killed"
        answer = self._answer(pickle.dumps(request), self._limit + PATIENCE, late)
        self._deaths = 0
        return self._result(answer, "result")

    def settle(self) -> dict[str, Any]:
        """Find out on a small batch how the target is called, and return the facts about it.

        If the worker dies or exceeds its time limit, the first guess is kept.

        Raises:
            CannotFork: the target takes arrays of jax, which this process has used.
            NoCallFits: every plausible call raises an error.
        """
        answer: Any = None
        with suppress(TargetError):
            answer = self.ask(None)
        self._deaths, self.last_death = 0, ""
        if isinstance(answer, dict) and answer.get("changed") and self._worker:
            # The trial changed global state. A new worker starts unchanged, so that the change is noticed in the cases.
            self._end(0.0)
        if isinstance(answer, dict) and "failed" in answer:
            self.close()
            raise NoCallFits("\n".join(map(_line, answer["failed"])))
        return {**self.facts, **(answer or {})}

    def close(self) -> None:
        """End the worker and the spawner."""
        if self._owner == os.getpid():
            if self._worker:
                self._end(0.0)
            self._stop()

    def _stop(self) -> None:
        if self._spawner:
            self._control.close()
            with suppress(OSError):
                os.kill(self._spawner, signal.SIGKILL)
                os.waitpid(self._spawner, 0)
            self._spawner = 0

    def _start(self) -> dict[str, Any]:
        """Start a worker, and return the facts about the target."""
        if not self._spawner:
            self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._spawner = _fork()
            if not self._spawner:
                _spawn(control, self._control, self._load)
            control.close()
        try:
            self._control.send(b"start")
            worker, (found, *_), _, _ = socket.recv_fds(self._control, 32, 1)
        except (OSError, ValueError):
            self._stop()
            raise TargetError("the process that starts the target was killed", died=True) from None
        self._worker, self._socket = int(worker), socket.socket(fileno=found)
        seconds = max(self._limit, LOADING)
        answer = self._answer(b"", seconds, f"took longer than {seconds:g} s to load and was killed")
        facts: dict[str, Any] = self._result(answer, "facts")
        return facts

    def _answer(self, request: bytes, seconds: float, late: str) -> dict[str, Any]:
        """Send a request and return the answer; end the worker if that fails or takes too long."""
        try:
            line = self._exchange(request, seconds, late)
            answer = json.loads(line)
            if not isinstance(answer, dict):
                raise ValueError("not an object")
        except _Ended as error:
            kind = Overtime if isinstance(error, _Late) else TargetError
            raise kind(self._died(str(error)), died=True) from None
        except (ValueError, RecursionError):
            raise TargetError(self._died("wrote an answer that cannot be read")) from None
        if "cannot_fork" in answer:
            self.close()
            raise CannotFork(_line(answer["cannot_fork"]))
        return answer

    def _exchange(self, request: bytes, seconds: float, late: str) -> bytes:
        deadline = time.monotonic() + seconds
        line = bytearray()
        # Sending fails if the worker has died, but its last output can still be read.
        with suppress(OSError):
            self._socket.settimeout(None if math.isinf(seconds) else seconds)
            self._socket.sendall(request)
        while not line.endswith(b"\n"):
            left = max(deadline - time.monotonic(), 0.0)
            ready = wait([self._socket, self._control], None if math.isinf(left) else left)
            if not ready:
                raise _Late(late)
            part = b""
            if self._socket in ready:
                with suppress(OSError):
                    part = self._socket.recv(2**20)
            if not part:
                raise _Ended("")
            line += part
            if len(line) > LONGEST_LINE:
                raise _Ended(f"wrote an answer of more than {LONGEST_LINE} bytes")
        return bytes(line)

    def _result(self, answer: Mapping[str, Any], name: str) -> Any:
        """Return a part of an answer, and repeat the target's warnings in this process, once for each line of code."""
        for category, text, file, row in answer.get("warnings", []):
            if (category, file, row) in self._warned:
                continue
            self._warned.add((category, file, row))
            kind = getattr(builtins, str(category), UserWarning)
            kind = kind if isinstance(kind, type) and issubclass(kind, Warning) else UserWarning
            with suppress(Warning):
                warnings.warn_explicit(str(text), kind, str(file), int(row))
        if "error" in answer:
            kind = TargetMisused if answer.get("misused") else Overtime if answer.get("late") else TargetError
            raise kind(_line(answer["error"]))
        return answer.get(name)

    def _died(self, why: str) -> str:
        """End the worker, and return how it died, in words."""
        self._deaths += 1
        code = self._end(0.0 if why else BRIEFLY)
        if not why and code is None:
            why = "closed its connection and was killed"
        elif not why and code is not None:
            kind = f"signal {-code}, {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"
            why = f"{'crashed' if code < 0 else 'ended'} its process ({kind})"
        self.last_death = why if why.startswith("took") else f"the target {why}"
        return self.last_death

    def _end(self, patience: float) -> int | None:
        """Kill the worker and its children after ``patience`` seconds; return its exit code, None if it was killed."""
        ended = bool(wait([self._control], patience))
        with suppress(OSError):
            os.killpg(self._worker, signal.SIGKILL)
        self._socket.close()
        self._worker = 0
        code = b""
        with suppress(OSError):
            code = self._control.recv(32)
        if not code:
            # The spawner was killed too.
            self._stop()
        return int(code) if code and ended else None


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 and jax warn about forks of processes with threads. The child runs torch on one thread.
        warnings.simplefilter("ignore")
        return os.fork()


def _spawn(control: socket.socket, parents: socket.socket, load: Callable[[], Served]) -> NoReturn:
    """Start a worker for each message; send its process id and its socket, and when it ends, its exit code."""
    try:
        os.setsid()
        parents.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        while control.recv(32):
            ours, theirs = socket.socketpair()
            worker = _fork()
            if not worker:
                control.close()
                ours.close()
                _work(theirs, load)
            socket.send_fds(control, [b"%d" % worker], [ours.fileno()])
            ours.close()
            theirs.close()
            control.send(b"%d" % _exit_code(worker, control))
    finally:
        os._exit(0)


def _exit_code(worker: int, control: socket.socket) -> int:
    """Wait until a worker ends, and return its exit code; kill it if the judging process ends first."""
    # A blocked signal stays pending, so the end of the worker is never missed.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while not (ended := os.waitpid(worker, os.WNOHANG))[0]:
        signal.sigtimedwait({signal.SIGCHLD}, CHECK_INTERVAL)
        if wait([control], 0):
            # The judging process sends nothing while a worker runs, so the connection has ended.
            with suppress(OSError):
                os.killpg(worker, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    return os.waitstatus_to_exitcode(ended[1])


class Once(io.TextIOBase):
    """Writes each different line of a target's output once to standard error, at most ``PRINTED`` lines."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._line = ""

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor of standard error."""
        return 2

    @property
    def buffer(self) -> io.BufferedWriter:
        """Return standard error as a binary stream."""
        return open(2, "wb", closefd=False)

    def write(self, text: str) -> int:
        """Write the complete lines of a text, and keep the rest."""
        *lines, self._line = (self._line + text[-LONGEST_MESSAGE:])[-LONGEST_MESSAGE:].split("\n")
        for line in lines:
            if line not in self._seen and len(self._seen) <= PRINTED:
                self._seen.add(line)
                more = f"printed by the target: {line}"
                words = more if len(self._seen) <= PRINTED else "further output of the target is not shown"
                with suppress(OSError):
                    os.write(2, f"{words}\n".encode(errors="backslashreplace"))
        return len(text)


def _work(connection: socket.socket, load: Callable[[], Served]) -> NoReturn:
    """Load the target and answer requests until the connection ends."""
    try:
        os.setsid()
        # Native code must not write to the output of the judging process, or read its input.
        os.dup2(2, 1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        # The judging process reports a crash in one line.
        faulthandler.disable()
        # Garbage collection writes to every object, which would copy the memory shared with the parent.
        gc.freeze()
        sys.stdout = sys.stderr = Once()
        torch.set_num_threads(1)
        shown: list[tuple[str, str, str, int]] = []
        warnings.showwarning = lambda text, kind, file, row, *_: shown.append((kind.__name__, str(text), file, row))
        requests, owner = connection.makefile("rb"), os.getpid()
        answer: dict[str, Any] = {}
        try:
            # This fails if autograd started threads for a GPU before the fork.
            torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            answer = {"cannot_fork": described(error)}
        else:
            try:
                answer["facts"], serve = load()
            except JaxLost as error:
                answer = {"cannot_fork": str(error)}
            except BaseException as error:
                text = " ".join(line.strip() for line in described(error).splitlines())
                answer = {"error": text, "misused": isinstance(error, TargetMisused)}
        loaded = "facts" in answer
        # A copy of this process that the target forked must not answer.
        while os.getpid() == owner:
            connection.sendall(json.dumps(answer | {"warnings": shown}).encode() + b"\n")
            shown.clear()
            if not loaded:
                break
            try:
                answer = {"result": serve(*pickle.load(requests))}
            except EOFError:
                break
            except JaxLost as error:
                answer = {"cannot_fork": str(error)}
            except BaseException as error:
                answer = {"error": described(error), "late": isinstance(error, Overtime)}
    finally:
        os._exit(0)


def _line(text: object) -> str:
    """Return the first line of a target's text, shortened and in printable characters."""
    first = next(iter(str(text).splitlines()), "")
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in first[: LONGEST_MESSAGE + 1])
    return shown if len(first) <= LONGEST_MESSAGE else f"{shown[:LONGEST_MESSAGE]}..."


class IsolatedLoss(External):
    """``External`` in a child process."""

    def __init__(self, spec: object, *, device: str = "cpu", **options: Any) -> None:
        """Load a target in a child process; the arguments and errors are those of ``External``.

        Raises:
            CannotFork: this process cannot be forked.
        """
        super(External, self).__init__({}, device)

        def load() -> Served:
            target = External(spec, device=device, **options)

            def facts() -> dict[str, Any]:
                same = ("call", "arrays", "settings", "default_temperature", "unlabelled", "queue")
                claim = {name: getattr(target.claim, name) for name in same}
                # None if the temperature is passed in each call.
                at = None if target.claim.temperature is None else float(target.claim.temperature)
                claim |= {name: sorted(getattr(target.claim, name)) for name in ("passed", "required", "unused")}
                found: dict[str, Any] = {"claim": claim | {"temperature": at}, "notes": target.notes}
                more = {"version": target.version(), "gradients_judged": target.gradients_judged}
                found["readings"] = [vars(one) for one in target.readings]
                return found | more | {"choice": target.target.choice if target.target else None}

            def serve(choice: tuple[int, str | None] | None, *request: Any) -> Any:
                if choice is None:
                    return _settled(target.settle, facts)
                target.call_as(*choice)
                return _written(target.evaluate(*request), request[0])

            return facts(), serve

        self.limit = options.get("limit", 60.0)
        self.child = Child(load, self.limit)
        facts = self.child.settle()
        self._choice = facts["choice"]
        given = facts["claim"]
        settings = {name: tuple(it) if isinstance(it, list) else it for name, it in given["settings"].items()}
        if weights := settings.get("direction_weights"):
            settings["direction_weights"] = (tuple(weights[0]),)
        more = {"settings": settings, **{name: frozenset(given[name]) for name in ("passed", "required", "unused")}}
        self.claim = Claim(options["loss"], normalised=bool(options.get("normalised")), **given | more)
        vars(self).update({name: options[name] for name in ("dtypes", "deviations", "frozen") if name in options})
        self.spec, self.target, self.command, self.support = spec, None, None, self.claim.support
        self.notes, self._version = tuple(map(_line, facts["notes"])), _line(facts["version"])
        self.gradients_judged = facts["gradients_judged"]
        self.readings = tuple(Reading(**one) for one in facts["readings"])
        self.outcomes: dict[tuple[str, str], Outcome] = {}

    def close(self) -> None:
        """End the child process."""
        self.child.close()

    def evaluate(self, case: Case, dtype: str, usage: str = "") -> Outcome:
        """Return the value and the gradients of a case; the arguments are those of ``External.evaluate``.

        Raises:
            TargetError: the target raised an error, died or was late, or the result is not a loss.
        """
        # Some cases have read-only mappings, which cannot be pickled.
        mappings: dict[str, Any] = {name: dict(getattr(case, name)) for name in ("arguments", "keywords", "others")}
        request = replace(case, **mappings), dtype, usage
        with self._counting_late(case, usage):
            outcome = self.outcomes[case.id, dtype] = _read(self.child.ask(self._choice, *request), case)
        return outcome


def _written(outcome: Outcome, case: Case) -> dict[str, Any]:
    """Return an outcome as JSON data, without rounding; matrices as base64 of float64 numbers, which is faster."""
    anchors = None if outcome.anchors is None else list(outcome.anchors.items())
    rows = {
        name: base64.b64encode(gradient.astype(np.float64).tobytes()).decode()
        for name, gradient in case.gradients(outcome).items()
    }
    return {"values": outcome.values, "anchors": anchors, "gradients": rows, "observed": outcome.observed}


def _read(answer: Any, case: Case) -> Outcome:
    """Decode what ``_written`` returned; raise ``TargetError`` for malformed data."""
    try:
        written, rows = answer["gradients"], dict[str, Matrix]()
        if written and written.keys() != case.matrices.keys():
            raise ValueError("names")
        for name, matrix in case.matrices.items() if written else ():
            rows[name] = np.frombuffer(base64.b64decode(written[name], validate=True)).reshape(matrix.shape).copy()
        anchors = answer["anchors"] and {int(row): float(value) for row, value in answer["anchors"]}
        values = [float(value) for value in answer["values"]]
        observed = read_observed(answer["observed"])
        observed["seen"] = {kind: _line(text) for kind, text in observed.get("seen", {}).items()}
        observed["notes"] = list(map(_line, observed.get("notes", [])))
    except (TypeError, ValueError, KeyError, AttributeError):
        raise TargetError("wrote an answer that cannot be read") from None
    return Outcome(values, rows.pop(case.first, None), anchors, None, rows, observed)


class IsolatedTarget(Target):
    """``Target`` in a child process."""

    def __init__(
        self, thing: Any, call: str | None = None, arrays: str | None = None, limit: float | None = None, **options: Any
    ) -> None:
        """Load a target in a child process.

        Arguments and errors are those of ``Target``. ``thing`` may also be a text that names the target. ``limit`` is
        the time limit of an answer in seconds; None for no limit.

        Raises:
            CannotFork: this process cannot be forked.
        """

        def load() -> Served:
            target = _loaded(thing, call, arrays, **options)
            names = ["__name__", "call", "probed_as", "arrays", "notes", "constructs", "takes_temperature"]
            names += ["temperature_by", "trial_keywords"]

            def facts() -> dict[str, Any]:
                return {name: getattr(target, name) for name in names} | {"_choice": target.choice}

            def serve(choice: tuple[int, str | None] | None, *request: Any) -> Any:
                if choice is None:
                    return _settled(partial(target.settle, limit=limit), facts)
                if tuple(choice) != target.choice:
                    target.call_as(*choice)
                answer = target.evaluate(*request)
                return answer.values.tolist(), None if answer.gradient is None else answer.gradient.tolist()

            return facts(), serve

        self.child = Child(load, limit)
        self._choice: tuple[int, str | None]
        facts = self.child.settle()
        vars(self).update({name: value for name, value in facts.items() if name != "changed"})
        self.thing, self.notes, self.strict = thing, tuple(map(_line, self.notes)), False

    @property
    def last_death(self) -> str:
        """How the child process died the last time; "" if it has not died since `settle`."""
        return self.child.last_death

    def close(self) -> None:
        """End the child process."""
        self.child.close()

    def evaluate(self, batch: Batch, limit: float | None = None) -> Answer:
        """Call it on a batch of torch tensors; return its values and their gradient.

        Raises:
            TargetError: the target raised an error, died or was late, or the result is not a loss.
        """
        return read_answer(self.child.ask(self._choice, batch, limit), batch)


def read_answer(answer: Any, batch: Batch) -> Answer:
    """Decode the values and the gradient of a batch; raise ``TargetError`` for malformed data."""
    try:
        values, gradient = answer
        found = None if gradient is None else torch.tensor(gradient, dtype=torch.float64)
        if found is not None and found.shape != batch.embeddings.shape:
            raise ValueError("shape")
        return Answer(torch.tensor(values, dtype=torch.float64).reshape(-1), found)
    except (TypeError, ValueError):
        raise TargetError("wrote an answer that cannot be read") from None


def _loaded(thing: Any, call: str | None, arrays: str | None, **options: Any) -> Target:
    return Target(find(thing) if isinstance(thing, str) else thing, call, arrays, spec=thing, **options)


def _settled(settle: Callable[[], None], facts: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Find out how to call a target. Return the facts about it, or the lines of the error if no call fits."""
    with Use() as use, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # most are about calls that do not fit; the others come again
        try:
            settle()
        except JaxLost:
            raise
        except TargetError as error:
            return {"failed": str(error).splitlines()}
    return facts() | {"changed": bool(use.seen)}


def load_loss(spec: object, **options: Any) -> External:
    """Load a target for judging, in a child process if possible; the arguments and errors are those of ``External``."""
    if options.get("call") == "command":
        return External(spec, **options)
    try:
        return IsolatedLoss(spec, **options)
    except CannotFork as reason:
        target = External(spec, **options)
        target.settle()
        target.notes += (_in_this_process(reason),)
        return target


def load_target(thing: Any, call: str | None, arrays: str | None, limit: float | None, **options: Any) -> Target:
    """Load a target for identification, in a child process if possible; the errors are those of ``Target``."""
    try:
        return IsolatedTarget(thing, call, arrays, limit, **options)
    except CannotFork as reason:
        target = _loaded(thing, call, arrays, **options)
        target.settle(limit=limit)
        target.notes += (_in_this_process(reason),)
        return target


def _in_this_process(reason: CannotFork) -> str:
    return f"process: the target runs in the process that judges it: {reason}"
