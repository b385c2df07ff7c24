"""optax's ``ntxent`` as a command that answers ``pairproof-lines/1`` (see ``subprocess.py``), one request per line.

JAX starts threads, which do not survive the forks among which ``pairproof verify`` shares its cases: hence a process of
its own, started by the adapter. It imports nothing of ours.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

import numpy as np


def main() -> None:
    """Import JAX and optax; answer requests for nt_xent_pairwise or nt_xent, by labels, until standard input ends."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Every batch size is compiled anew and run once: what compiles fastest is fastest.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    jax: Any = importlib.import_module("jax")
    losses: Any = importlib.import_module("optax.losses")
    evaluate = jax.jit(jax.value_and_grad(losses.ntxent))
    for line in sys.stdin:
        request = json.loads(line)
        found: dict[str, Any] = {"id": request["id"]}
        try:
            with jax.enable_x64(request["dtype"] == "float64"):
                rows = np.array(request["matrices"]["embeddings"], dtype=request["dtype"])
                labels = np.array(request["arguments"]["labels"], dtype=np.int64)
                value, gradient = evaluate(rows, labels, request["options"]["temperature"])
                found |= {"value": float(value), "gradients": {"embeddings": np.asarray(gradient).tolist()}}
        except Exception as error:  # what breaks one case must not end the others
            found["error"] = f"{type(error).__name__}: {error}"
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
