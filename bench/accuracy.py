"""Errors against float64 at several temperatures, on random and trained-like batches, for all implementations."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import truth
from .batches import DTYPES, KINDS, make_batch
from .measure import evaluate, recorded
from .peers import PEERS, SLOWEST, load, names_for

TEMPERATURES = (0.01, 0.02, 0.05, 0.07, 0.1, 0.5, 1.0)
ROWS = 256
ACCELERATOR_ROWS = 1024
"""Number of rows on a GPU. Small batches are evaluated differently from large ones."""
BATCHES = 20
LOSSES = ("nt_xent", "supcon", "pairwise_classes")


def error_rows(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a job of kind "accuracy": one loss at one temperature.

    Args:
        job: loss, n, d, temperature, batches (their number), backend, device, dtype.

    Returns:
        One row per kind of batch and implementation, in the format that `bench.report` describes.
    """
    loss, temperature = job["loss"], job["temperature"]
    rows = []
    for kind in KINDS:
        made = [
            make_batch(loss, job["n"], job["d"], kind, seed=1 + seed, device=job["device"]).to(DTYPES[job["dtype"]])
            for seed in range(job["batches"])
        ]
        batches = [(batch, truth.loss_and_gradient(batch, temperature)) for batch in made]
        smallest = min(expected[0] for _, expected in batches)
        for name in names_for(loss, job["device"], job["dtype"]):
            # Leave out peers that take seconds per step or minutes to compile, or that run in another dtype.
            if name == SLOWEST or PEERS[name].compiled or PEERS[name].tf32:
                continue
            row: dict[str, Any] = {"kind": kind, "implementation": name, "smallest_loss": smallest}
            rows.append(row)
            with recorded(row):
                implementation = load(name, job["backend"])
                found = [
                    truth.errors(*evaluate(implementation.step(batch, temperature), batch.embeddings), expected)
                    for batch, expected in batches
                ]
                row |= {f"{part}_error": float(np.median([errors[part] for errors in found])) for part in found[0]}
    return rows
