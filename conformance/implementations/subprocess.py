"""A loss in any language: a command that answers requests, one JSON object per line.

The command keeps running. It reads one request per line from standard input:

    {"protocol": "pairproof-lines/1", "id": 7, "loss": "supcon", "dtype": "float64",
     "matrices": {"embeddings": [[0.5, -1.25], ...]},
     "arguments": {"labels": [0, 0, 1]},
     "options": {"temperature": 0.1, "base_temperature": null, "similarity": "cosine", "reduction": "mean", ...}}

- ``matrices``: the float matrices by their names in the catalogue, as lists of rows, exact in ``dtype``
- ``arguments``: the other arrays, if the case has them: labels, partners, positive_pairs, positives, anchors,
  ref_labels, self_rows, ignored, ignored_ids, ref_ignored_ids, positive_weights, negative_weights, anchor_weights.
  Masks consist of booleans.
- ``options``: every option of the loss

For each request, the command writes one line to standard output and flushes it. Any of these is an answer:

    {"id": 7, "value": 1.25}
    {"id": 7, "value": 1.25, "gradients": {"embeddings": [[0.01, -0.02], ...]}}
    {"id": 7, "values": [0.5, 2.0, 1.25]}
    {"id": 7, "error": "what went wrong"}

- ``value``: the loss
- ``values``: for reduction "none", one value per anchor in the order of the rows; for "none_pairs", one value per pair,
  ordered by anchor, then by column
- ``gradients``: the gradients of the value, or of the sum of the values, with the names and shapes of ``matrices``. An
  answer has all of them or none. Either all answers of a command have gradients or none has.

Numbers that are not finite are NaN, Infinity, -Infinity or null (for NaN), without quotes. Standard error is free for
messages. The command must exit when its standard input ends.

A request fails if the command exits, if the answer is late, or if it is not a JSON object with the id of the request.
The process is then killed. The next request starts it again, at most ``RESTARTS`` times in all.
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
"""Seconds that a command may take to exit after the end of its input."""

BRIEFLY = 1.0
"""Seconds to wait for the exit code of a process that closed its output. On a busy machine, its end takes a while."""


class _Broken(Exception):
    """The process cannot answer another request."""


class _Ended(_Broken):
    """The process closed its output; its exit code follows."""


class Lines:
    """A command and its process. After a fork, the child starts a process of its own.

    Attributes:
        command: the shell command line.
        started: number of times that the process was started.
    """

    def __init__(self, command: str) -> None:
        self.command, self.started, self._id, self._last, self._owner = command, 0, 0, "", 0
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes]

    def ask(self, request: Mapping[str, Any], expected: int, limit: float | None) -> tuple[list[float], dict[str, Any]]:
        """Send one request and read its answer.

        Args:
            request: the request without its id.
            expected: number of values that are expected.
            limit: time limit of the answer in seconds; None for no limit.

        Returns:
            The values, and the gradients by the name of the matrix; {} without gradients.

        Raises:
            TargetError: the command did not answer in time, reported an error, gave an invalid answer, or cannot be
                started again.
        """
        self._id += 1
        process = self._start()
        text = json.dumps({"protocol": PROTOCOL, "id": self._id, **request}, allow_nan=False)
        try:
            answer = _parsed(_exchange(process, text.encode() + b"\n", limit), self._id)
        except _Broken as error:
            raise TargetError(self._end(BRIEFLY if isinstance(error, _Ended) else 0.0, str(error))) from None
        if answer.get("error") is not None:
            raise TargetError(f"the command reported: {answer['error']}")
        if ("value" in answer) == ("values" in answer):
            raise TargetError("the command's answer must have either value or values")
        if "values" in answer:
            values = _numbers(answer["values"], "values", (expected,))
        elif expected == 1:
            values = [_numbers(answer["value"], "value")]
        else:
            raise TargetError(f"value: expected {expected} values, one per anchor or per pair")
        return values, _gradients(answer.get("gradients"), request["matrices"])

    def close(self) -> None:
        """Close the input of the process. If it does not exit, kill it."""
        if self._owner == os.getpid() and self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
            self._end(PATIENCE)

    def _start(self) -> subprocess.Popen[bytes]:
        if self._owner != os.getpid():
            # After a fork, the process belongs to the parent.
            self._process, self._owner = None, os.getpid()
        if self._process is not None:
            if self._process.poll() is None:
                return self._process
            self._end(0.0, "the command ended after its last answer")
        if self.started > RESTARTS:
            raise TargetError(f"gave up after {self.started} starts of the command; the last time: {self._last}")
        self.started += 1
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the process ends
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        # In its own session, the processes that the shell starts are killed with it.
        self._process = subprocess.Popen(self.command, shell=True, start_new_session=True, **pipes)  # type: ignore[call-overload]
        return self._process

    def _end(self, patience: float, message: str = "") -> str:
        """Kill the process if it does not exit in time; add its exit code and last line of stderr to the message."""
        process, self._process = self._process, None
        assert process is not None
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
        code = process.poll()
        # The context manager of the process closes its pipes and waits for it.
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
    """Write a request and return the answer. A thread does this, because reads of pipes have no time limit."""
    found: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def exchange() -> None:
        line = b""
        with suppress(OSError, ValueError):
            # A command that has exited may have written a line before.
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
        raise _Broken(f"the command wrote {LONGEST_LINE} bytes without a line break and was killed")
    if not line.endswith(b"\n"):
        raise _Ended("the command ended without an answer")
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
    """Check the shape of nested lists of numbers, and convert null to NaN."""
    if shape:
        if not isinstance(given, list) or len(given) != shape[0]:
            raise TargetError(f"{where}: expected {' rows of '.join(map(str, shape))} numbers, got {_shown(given)}")
        return [_numbers(one, f"{where}[{k}]", shape[1:]) for k, one in enumerate(given)]
    if given is None:
        return math.nan
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TargetError(f"{where}: expected a number, got {_shown(given)}")
    # float(str()) turns an integer that is too large into infinity.
    return float(str(given))


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = json.dumps(value)
    kind = "the text " if isinstance(value, str) else ""
    return kind + (text if len(text) <= 40 else f"{text[:37]}...")
