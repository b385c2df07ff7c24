"""optax's ``ntxent`` as a command that speaks ``pairproof-lines/1`` (see ``subprocess.py``).

It runs in its own process, because the threads of JAX do not survive the forks of ``pairproof verify``. This file
imports nothing of pairproof.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

import numpy as np


def main() -> None:
    """Import JAX and optax; answer requests until standard input ends."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Every batch size is compiled but runs only once, so compilation dominates the time.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    jax: Any = importlib.import_module("jax")
    losses: Any = importlib.import_module("optax.losses")

    def inlined(*given: Any) -> Any:
        # This saves time: the jitted functions of jax.numpy are not traced and differentiated one by one.
        with jax.disable_jit():
            return jax.value_and_grad(losses.ntxent)(*given)

    evaluate = jax.jit(inlined)
    for line in sys.stdin:
        request = json.loads(line)
        found: dict[str, Any] = {"id": request["id"]}
        try:
            with jax.enable_x64(request["dtype"] == "float64"):
                rows = np.array(request["matrices"]["embeddings"], dtype=request["dtype"])
                labels = np.array(request["arguments"]["labels"], dtype=np.int64)
                value, gradient = evaluate(rows, labels, request["options"]["temperature"])
                found |= {"value": float(value), "gradients": {"embeddings": np.asarray(gradient).tolist()}}
        except Exception as error:  # an error in one case must not end the others
            found["error"] = f"{type(error).__name__}: {error}"
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
