"""A loss in any language: a command that answers questions, one JSON object per line.

The command is started once and kept alive. Its standard input brings one request per line:

    {"protocol": "pairproof-lines/1", "id": 7, "loss": "supcon", "dtype": "float64",
     "matrices": {"embeddings": [[0.5, -1.25], ...]},
     "arguments": {"labels": [0, 0, 1]},
     "options": {"temperature": 0.1, "base_temperature": null, "similarity": "cosine", "reduction": "mean", ...}}

``matrices`` are the float matrices by their names in the catalogue, row by row; their numbers are numbers of ``dtype``.
``arguments`` hold integers and booleans: labels, partners, positive_pairs, positives, anchors, ref_labels, self_rows.
``options`` are those of the loss, each with its value. For every request one line goes to standard output, and is
flushed:

    {"id": 7, "value": 1.25}
    {"id": 7, "value": 1.25, "gradients": {"embeddings": [[0.01, -0.02], ...]}}
    {"id": 7, "values": [0.5, 2.0, 1.25]}
    {"id": 7, "error": "what went wrong"}

``value`` is the loss; ``values`` are those of the anchors, in the order of their rows, where the reduction is "none".
``gradients``, of the value or of the sum of the values, are by the name of the matrix, of its shape: those of every
matrix, or none. What is no number is written NaN, Infinity, -Infinity or null (NaN), never as text. Standard error is
free for messages. When standard input ends, so does the command.

An answer that is late, no JSON, or of another id ends the process, and so does a crash; it is started anew for the next
case, at most ``RESTARTS`` times.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

PROTOCOL = "pairproof-lines/1"
RESTARTS = 3
LONGEST_LINE = 2**28
"""Bytes of one answer above which nobody means it."""

PATIENCE = 2.0
"""Seconds that a command has to end by itself once its input has ended."""


class LineError(RuntimeError):
    """A command that did not answer, or whose answer is none; the message says which."""


class Lines:
    """A command and its process.

    Attributes:
        command: as a shell reads it.
        started: how often the process was started.
    """

    def __init__(self, command: str) -> None:
        self.command = command
        self.started = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._left = b""
        self._id = 0
        self._last = ""

    def ask(
        self, request: Mapping[str, Any], expected: int, limit: float | None
    ) -> tuple[list[float], dict[str, list[list[float]]]]:
        """Put one request and read its answer.

        Args:
            request: without its id.
            expected: how many values there must be.
            limit: seconds until the answer must be there, starting the process included.

        Returns:
            The values, and the gradients by matrix where there are any.

        Raises:
            LineError: there is no such answer.
        """
        self._id += 1
        deadline = math.inf if limit is None else time.monotonic() + limit
        self._start()
        text = json.dumps({"protocol": PROTOCOL, "id": self._id, **request}, allow_nan=False)
        try:
            line = self._exchange(text.encode() + b"\n", deadline)
            answer = _parsed(line, self._id)
        except _OutOfStep as error:
            message = str(error)
            if message == _LATE:
                message = f"the command did not answer within {limit:g} s (--limit) and was killed"
            self._last = message = self._end(message)
            raise LineError(message) from None
        if answer.get("error") is not None:
            raise LineError(f"the command says: {answer['error']}")
        return _values(answer, expected), _gradients(answer, request["matrices"])

    def close(self) -> None:
        """End the process: its input first, then, if it stays, with force."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE)
        self._end("")

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        if self._process is not None:
            self._last = self._end("the command ended after its last answer")
        if self.started > RESTARTS:
            raise LineError(f"not asked: the command was started {self.started} times; the last time: {self._last}")
        self.started += 1
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the process ends
        self._left = b""
        # A session of its own: whatever the shell starts can be killed with it.
        self._process = subprocess.Popen(
            self.command,
            shell=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            start_new_session=True,
        )
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)

    def _exchange(self, request: bytes, deadline: float) -> bytes:
        """Write the request while reading, so that neither side waits for the other; the first line that comes back."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        to, fro = process.stdin.fileno(), process.stdout.fileno()
        left, found = memoryview(request), bytearray(self._left)
        while True:
            end = found.find(b"\n")
            if end >= 0 and not left:
                self._left = bytes(found[end + 1 :])
                return bytes(found[:end])
            if len(found) > LONGEST_LINE:
                raise _OutOfStep(f"the command wrote {len(found)} bytes without an end and was killed")
            wait = deadline - time.monotonic()
            if wait <= 0:
                raise _OutOfStep(_LATE)
            readable, writable, _ = select.select([fro], [to] if left else [], [], None if math.isinf(wait) else wait)
            if readable:
                piece = os.read(fro, 2**16)
                if not piece:
                    raise _OutOfStep("the command ended without an answer")
                found += piece
            if writable:
                try:
                    left = left[os.write(to, left[: 2**16]) :]
                except BlockingIOError:
                    continue
                except BrokenPipeError:
                    # What it said last, if anything, is still to be read.
                    left = memoryview(b"")

    def _end(self, message: str) -> str:
        """Kill what is left of the process; the message, with what it ended with."""
        process, self._process = self._process, None
        if process is None:
            return message
        ended = process.poll()
        if ended is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                # One that closed its output is about to end by itself.
                ended = process.wait(0.2 if "ended" in message else 0.0)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        if ended is not None and "ended" in message:
            message += f" (exit code {ended})" if ended >= 0 else f" (signal {-ended})"
        if self._errors is not None:
            self._errors.seek(0, os.SEEK_END)
            self._errors.seek(max(self._errors.tell() - 2**14, 0))
            said = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
            self._errors.close()
            self._errors = None
            if said and message:
                message += f"; its last message: {said[-1].strip()}"
        return message


class _OutOfStep(Exception):
    """The process cannot be asked again."""


_LATE = "late"


def _parsed(line: bytes, identity: int) -> dict[str, Any]:
    shown = line[:80].decode(errors="replace")
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        raise _OutOfStep(f"the command answered what is no JSON: {shown!r}") from None
    if not isinstance(answer, dict):
        raise _OutOfStep(f"the command answered what is no JSON object: {shown!r}")
    if answer.get("id") != identity or isinstance(answer.get("id"), bool):
        raise _OutOfStep(f"the command answered id {answer.get('id')!r} to request {identity}")
    return answer


def _values(answer: Mapping[str, Any], expected: int) -> list[float]:
    if ("value" in answer) == ("values" in answer):
        raise LineError("the command's answer must have either value or values")
    if "value" in answer:
        found = [_number(answer["value"], "value")]
    else:
        if not isinstance(answer["values"], list):
            raise LineError(f"the command's values are {_shown(answer['values'])}, no list")
        found = [_number(x, f"values[{k}]") for k, x in enumerate(answer["values"])]
    if len(found) != expected:
        raise LineError(f"the command gave {len(found)} values where there are {expected}")
    return found


def _gradients(answer: Mapping[str, Any], matrices: Mapping[str, Sequence[Any]]) -> dict[str, list[list[float]]]:
    given = answer.get("gradients")
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise LineError(f"the command's gradients are {_shown(given)}, no object with one matrix per name")
    if set(given) != set(matrices):
        raise LineError(f"the command gave gradients by {_listed(given)} where there are {_listed(matrices)}")
    found = {}
    for name, matrix in matrices.items():
        rows, wanted = given[name], f"{len(matrix)} rows of {len(matrix[0])}"
        if not isinstance(rows, list) or len(rows) != len(matrix):
            raise LineError(f"gradients.{name}: expected {wanted} numbers, got {_shown(rows)}")
        for k, row in enumerate(rows):
            if not isinstance(row, list) or len(row) != len(matrix[0]):
                raise LineError(f"gradients.{name}[{k}]: expected {wanted} numbers, got {_shown(row)}")
        found[name] = [
            [_number(x, f"gradients.{name}[{k}][{d}]") for d, x in enumerate(row)] for k, row in enumerate(rows)
        ]
    return found


def _number(x: Any, where: str) -> float:
    if x is None:
        return math.nan
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise LineError(f"{where}: expected a number, got {_shown(x)}")
    try:
        return float(x)
    except OverflowError:
        return math.inf if x > 0 else -math.inf


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(sorted(map(str, names))) or "nothing"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = json.dumps(value)
    kind = "the text " if isinstance(value, str) else ""
    return kind + (text if len(text) <= 40 else f"{text[:37]}...")
