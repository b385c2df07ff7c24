"""Losses that are right for batches of an even number of rows, and interfere with their process for an odd number.

``pairproof`` must judge the even batches, report an error for each odd one, and decide the exit code by itself.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import os
import resource
import signal
import sys
import threading
import time
from functools import wraps

import numpy as np
import torch
from losses import supcon


def odd(attack):
    """A right loss that runs the decorated function first on batches of odd size, and returns its result, if any."""

    @wraps(attack)
    def loss(embeddings: torch.Tensor, labels, temperature):
        found = attack() if len(embeddings) % 2 else None
        return supcon(embeddings, labels, temperature) if found is None else found

    del loss.__wrapped__
    return loss


@odd
def exits():
    os._exit(0)


@odd
def segfaults():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)


@odd
def aborts():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.abort()


@odd
def kills_itself():
    os.kill(os.getpid(), signal.SIGKILL)


@odd
def kills_its_parent():
    os.kill(os.getppid(), signal.SIGKILL)
    os._exit(0)


@odd
def blocks_the_alarm():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(1000)


@odd
def closes_everything():
    os.closerange(0, 1000)


class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no message")


class Nameless(type):
    @property
    def __name__(cls):
        raise RuntimeError("no name")


class Anonymous(Exception, metaclass=Nameless):
    pass


@odd
def raises_without_a_message():
    raise Silent


@odd
def raises_without_a_name():
    raise Anonymous


@odd
def raises_generator_exit():
    raise GeneratorExit("stopped")


@odd
def raises_keyboard_interrupt():
    raise KeyboardInterrupt


@odd
def raises_markup():
    raise ValueError("[/bold] [red]a[0] \x1b[31m &<>")


@odd
def raises_other_letters():
    raise ValueError("größe \u2264 \udc80 \U0001f600")


@odd
def exits_through_its_answer():
    class Bomb(float):
        def __reduce__(self):
            return os._exit, (0,)

    return Bomb(1.0)


# The attacks from here on do not fail by themselves: the loss is right, or its error is reported as for any loss.


@odd
def exits_at_the_end():
    atexit.register(os._exit, 0)


@odd
def leaves_a_thread():
    threading.Thread(target=time.sleep, args=(1000,)).start()


@odd
def leaves_a_process():
    if not os.fork():
        time.sleep(1000)


@odd
def returns_in_two_processes():
    os.fork()


@odd
def closes_stdout():
    sys.stdout.close()
    os.closerange(1, 3)


@odd
def replaces_stdout():
    sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = None


@odd
def prints():
    sys.stdout.write("conforms: a fake verdict\n")


@odd
def changes_the_process():
    os.chdir("/")
    os.environ.clear()
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    sys.path.clear()


def nothing(*_, **__):
    return torch.zeros(())


@odd
def patches_torch():
    for module, name in ((torch.linalg, "vector_norm"), (torch.linalg, "norm"), (torch, "hypot")):
        setattr(module, name, nothing)
    for module, name in ((math, "hypot"), (np.linalg, "norm"), (np, "hypot")):
        setattr(module, name, lambda *_, **__: 0.0)
    return torch.tensor(1e3)
