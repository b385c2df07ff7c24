"""The functions of `rows_numba`, compiled when a loss first needs them.

Numba is optional. If it is not installed, or if its import or the compilation fails, losses use torch operations.
"""

from __future__ import annotations

import os
import threading
from importlib import metadata
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

SWITCH = "PAIRPROOF_NUMBA"
"""The environment variable that turns compiled functions off if it is "0"."""
LABELS, MASK, PARTNERS = 0, 1, 2
"""How positives are given to a compiled function."""
OUT, MEAN, SUM = 0, 1, 2
"""The terms "out", and "in" with the mean or the sum of the ratios."""
_TENSORS = (Tensor, torch.nn.Parameter)


class State:
    """The compiled functions of this process, and why no others can be compiled: None if nothing has failed yet."""

    lock = threading.RLock()
    functions: ClassVar[dict[str, Any]] = {}
    failure: ClassVar[str | None] = f"{SWITCH} is 0" if os.environ.get(SWITCH) == "0" else None


def function(name: str) -> Any:
    """Return a function of `rows_numba`, compiled; None if it cannot be compiled."""
    return State.functions.get(name) or _compiled(name)


def _compiled(name: str) -> Any:
    with State.lock:
        if State.failure is None and name not in State.functions:
            try:
                from . import rows_numba

                State.functions[name] = rows_numba.ready(name)
            except Exception as problem:  # of any kind: of the import or of the compiler
                State.failure = f"{type(problem).__name__}: {problem}".splitlines()[0]
        return State.functions.get(name)


def refusal() -> str | None:
    """Return why losses use torch operations, as far as it is known without importing Numba; else None."""
    if State.failure is None and not version():
        return "numba is not installed"
    return State.failure


def version() -> str:
    """Return the version of Numba, without importing it; empty if it is not installed."""
    try:
        return metadata.version("numba")
    except metadata.PackageNotFoundError:
        return ""


def warm_up() -> str | None:
    """Compile what the losses of small batches on a CPU use, so that the first steps of a training are not slow.

    Without this call, the first losses compile what they need. This takes some seconds, or less than a second if an
    earlier process has left the machine code in Numba's cache.

    Example:
        >>> from pairproof.fast import warm_up
        >>> reason = warm_up()
        >>> reason is None or isinstance(reason, str)
        True

    Returns:
        None, or why losses use torch operations instead, such as "numba is not installed".
    """
    if function("measure"):
        from .rows_numba import SIGNATURES

        for name in SIGNATURES:
            function(name)
    return refusal()


def readable(tensor: Tensor) -> bool:
    """Return whether a compiled function may read a tensor: a plain one on the CPU, in eager mode without transforms.

    Subclasses and dispatch modes may give operations another meaning. After a failure, no tensor may be read.
    """
    return (
        State.failure is None
        and type(tensor) in _TENSORS
        and tensor.is_cpu
        and not tensor.is_neg()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


def array(tensor: Tensor) -> Any:
    """Return the values of a `readable` tensor as a contiguous, aligned array, which may share its memory."""
    found = tensor.detach().contiguous().numpy()
    return found if found.flags.aligned else found.copy()
