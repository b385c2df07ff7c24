"""Errors against float64 over temperatures, on random and on trained-like batches, ours beside the peers'."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import truth
from .batches import DTYPES, KINDS, Batch, make_batch
from .measure import evaluate, reason_of
from .peers import PEERS, PmlNtXent, Unavailable, load, names_for

TEMPERATURES = (0.01, 0.02, 0.05, 0.07, 0.1, 0.5, 1.0)
ROWS = 256
ACCELERATOR_ROWS = 1024
"""Where small batches do not take the road that large ones take."""
BATCHES = 20
LOSSES = ("nt_xent", "supcon", "pairwise_classes")


def _errors(name: str, backend: str, batches: list[tuple[Batch, Any]], temperature: float) -> dict[str, Any]:
    """Medians over batches of one implementation's errors in their dtype, or why it cannot be asked."""
    try:
        implementation = load(name, backend)
        found = [
            truth.errors(*evaluate(implementation.step(batch, temperature), batch.embeddings), expected)
            for batch, expected in batches
        ]
    except Unavailable as error:
        return {"status": "refused", "reason": str(error)}
    except Exception as error:  # outside code may raise anything
        return {"status": "refused", "reason": reason_of(error)}
    medians = {f"{part}_error": float(np.median([errors[part] for errors in found])) for part in ("loss", "gradient")}
    return {"status": "measured", **medians}


def error_rows(job: dict[str, Any]) -> dict[str, Any]:
    """One job of kind "accuracy": one loss at one temperature.

    Args:
        job: loss, n, d, temperature, batches (how many), backend, device, dtype.

    Returns:
        ``{"rows": [...]}`` in the format that `bench.report` describes.
    """
    loss, temperature = str(job["loss"]), float(job["temperature"])
    rows = []
    for kind in KINDS:
        made = [
            make_batch(loss, job["n"], job["d"], kind, seed=1 + seed, device=job["device"]).to(DTYPES[job["dtype"]])
            for seed in range(int(job["batches"]))
        ]
        batches = [(batch, truth.loss_and_gradient(batch, temperature)) for batch in made]
        smallest = min(expected[0] for _, expected in batches)
        for name in names_for(loss, job["device"], job["dtype"]):
            if name == PmlNtXent.name:  # seconds a step
                continue
            if name in PEERS and (PEERS[name].compiled or PEERS[name].given is not None):
                continue  # minutes to compile for one figure, or rows in another dtype than ours
            row = {"loss": loss, "temperature": temperature, "kind": kind, "implementation": name}
            rows.append(row | {"smallest_loss": smallest} | _errors(name, job["backend"], batches, temperature))
    return {"rows": rows}
