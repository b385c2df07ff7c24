"""A loss in any language: a command that answers requests, one JSON object per line.

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
matrix, or none. Values that are not finite are written NaN, Infinity, -Infinity or null (NaN), never as text. Standard
error is free for messages. The command ends when its standard input ends.

An answer that is late, not JSON, or of another id ends the process, and so does a crash; it is started again for the
next case, at most ``RESTARTS`` times.
"""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from .sandbox import TargetError

PROTOCOL = "pairproof-lines/1"
RESTARTS = 3
LONGEST_LINE = 2**28
"""Maximum length of one answer, in bytes."""

PATIENCE = 2.0
"""Seconds that a command has to end by itself once its input has ended."""

BRIEFLY = 0.2
"""Seconds that a command which stopped answering has to end, so that its exit code can be reported."""


class _Broken(Exception):
    """The process cannot answer another request."""


class Lines:
    """A command and its process.

    Attributes:
        command: as a shell reads it.
        started: how often the process was started.
    """

    def __init__(self, command: str) -> None:
        self.command, self.started, self._id, self._last = command, 0, 0, ""
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes]

    def ask(self, request: Mapping[str, Any], expected: int, limit: float | None) -> tuple[list[float], dict[str, Any]]:
        """Send one request and read its answer.

        Args:
            request: without its id.
            expected: how many values there must be.
            limit: seconds until the answer must be there.

        Returns:
            The values, and the gradients by matrix where there are any.

        Raises:
            TargetError: the command did not answer, or its answer is invalid; the message says which.
        """
        self._id += 1
        process = self._start()
        text = json.dumps({"protocol": PROTOCOL, "id": self._id, **request}, allow_nan=False)
        try:
            answer = _parsed(_exchange(process, text.encode() + b"\n", limit), self._id)
        except _Broken as error:
            raise TargetError(self._end(BRIEFLY, str(error))) from None
        if answer.get("error") is not None:
            raise TargetError(f"the command says: {answer['error']}")
        if ("value" in answer) == ("values" in answer):
            raise TargetError("the command's answer must have either value or values")
        if "values" in answer:
            values = _numbers(answer["values"], "values", (expected,))
        elif expected == 1:
            values = [_numbers(answer["value"], "value")]
        else:
            raise TargetError(f"value: expected {expected} values, one per anchor")
        return values, _gradients(answer.get("gradients"), request["matrices"])

    def close(self) -> None:
        """End the process: its input first, then, if it does not end by itself, with a signal."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
            self._end(PATIENCE)

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is not None:
            if self._process.poll() is None:
                return self._process
            self._end(0.0, "the command ended after its last answer")
        if self.started > RESTARTS:
            raise TargetError(f"not asked: the command was started {self.started} times; the last time: {self._last}")
        self.started += 1
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the process ends
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        # A session of its own, so that whatever the shell starts is killed with it.
        self._process = subprocess.Popen(self.command, shell=True, start_new_session=True, **pipes)  # type: ignore[call-overload]
        return self._process

    def _end(self, patience: float, message: str = "") -> str:
        """Kill the process unless it ends soon; return the message with the exit code and the last line of stderr."""
        process, self._process = self._process, None
        assert process is not None
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
        code = process.poll()
        # Leaving the process closes its pipes and waits for its end.
        with suppress(OSError), process:
            os.killpg(process.pid, signal.SIGKILL)
        if code is not None:
            message += f" (exit code {code})" if code >= 0 else f" (signal {-code})"
        with self._errors as errors:
            errors.seek(max(errors.seek(0, os.SEEK_END) - 2**14, 0))
            lines = errors.read().decode(errors="replace").strip().splitlines()
        self._last = f"{message}; its last message: {lines[-1].strip()}" if lines else message
        return self._last


def _exchange(process: Any, request: bytes, limit: float | None) -> bytes:
    """Write a request and return the line that comes back, in a thread, because pipes have no limit of time."""
    found: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def exchange() -> None:
        line = b""
        with suppress(OSError, ValueError):
            # A command that has ended may have written a line before.
            with suppress(BrokenPipeError):
                process.stdin.write(request)
                process.stdin.flush()
            line = process.stdout.readline(LONGEST_LINE)
        found.put(line)

    threading.Thread(target=exchange, daemon=True).start()
    try:
        line = found.get(timeout=None if limit is None or math.isinf(limit) else limit)
    except queue.Empty:
        raise _Broken(f"the command did not answer within {limit:g} s (--limit) and was killed") from None
    if len(line) == LONGEST_LINE:
        raise _Broken(f"the command wrote {LONGEST_LINE} bytes without an end and was killed")
    if not line.endswith(b"\n"):
        raise _Broken("the command ended without an answer")
    return line


def _parsed(line: bytes, identity: int) -> dict[str, Any]:
    shown = line[:80].decode(errors="replace").rstrip("\n")
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        raise _Broken(f"the command's answer is not JSON: {shown!r}") from None
    if not isinstance(answer, dict):
        raise _Broken(f"the command's answer is not a JSON object: {shown!r}")
    found = answer.get("id")
    if found != identity or isinstance(found, bool):
        raise _Broken(f"the command answered id {found!r} to request {identity}")
    return answer


def _gradients(given: Any, matrices: Mapping[str, Sequence[Any]]) -> dict[str, list[list[float]]]:
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise TargetError(f"gradients: expected an object with one matrix per name, got {_shown(given)}")
    if set(given) != set(matrices):
        wanted, names = (", ".join(sorted(found)) or "nothing" for found in (matrices, given))
        raise TargetError(f"gradients: expected those of {wanted}, got {names}")
    return {name: _numbers(given[name], f"gradients.{name}", (len(z), len(z[0]))) for name, z in matrices.items()}


def _numbers(given: Any, where: str, shape: tuple[int, ...] = ()) -> Any:
    """Check the shape of nested lists of numbers; NaN for null."""
    if shape:
        if not isinstance(given, list) or len(given) != shape[0]:
            raise TargetError(f"{where}: expected {' rows of '.join(map(str, shape))} numbers, got {_shown(given)}")
        return [_numbers(one, f"{where}[{k}]", shape[1:]) for k, one in enumerate(given)]
    if given is None:
        return math.nan
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TargetError(f"{where}: expected a number, got {_shown(given)}")
    # An integer that is too large for a float is infinite.
    return float(str(given))


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = json.dumps(value)
    kind = "the text " if isinstance(value, str) else ""
    return kind + (text if len(text) <= 40 else f"{text[:37]}...")
