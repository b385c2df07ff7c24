"""A module that interferes with its process while it is imported; the variable HOSTILE selects how."""

from __future__ import annotations

import atexit
import os
import threading
import time

import torch
from hostile import raises_other_letters  # noqa: F401 - a target
from losses import without_other_positives

ATTACKS = {
    "exits": lambda: os._exit(0),
    "exits_at_the_end": lambda: atexit.register(os._exit, 0),
    "leaves_a_thread": lambda: threading.Thread(target=time.sleep, args=(1000,)).start(),
    "patches_torch": lambda: setattr(torch.linalg, "vector_norm", lambda *_, **__: torch.zeros(())),
}
ATTACKS[os.environ["HOSTILE"]]()
wrong = without_other_positives
