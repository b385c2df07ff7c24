"""Errors against float64 at several temperatures, on random and on trained-like batches."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import truth
from .forms import DTYPES, KINDS, make
from .measure import evaluate, recorded
from .peers import NT_XENT, PAIRWISE_CLASSES, PEERS, SLOWEST, SUPCON, load, names_for

TEMPERATURES = (0.01, 0.02, 0.05, 0.07, 0.1, 0.5, 1.0)
ROWS = 256
ACCELERATOR_ROWS = 1024
"""Number of rows on a GPU, where small batches are evaluated in another way than large ones."""
BATCHES = 20
FORMS = (NT_XENT, SUPCON, PAIRWISE_CLASSES)


def names(form: str, device: str, dtype: str) -> list[str]:
    """Return the implementations to measure: not `SLOWEST`, and none that is compiled or uses TF32."""
    found = [name for name in names_for(form, device, dtype) if name != SLOWEST]
    return [name for name in found if not PEERS[name].compiled and not PEERS[name].tf32]


def error_rows(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a job of kind "accuracy": one form at one temperature.

    Args:
        job: form, names (of implementations), n, d, temperature, batches (how many), backend, device, dtype.

    Returns:
        One row per kind of batch and implementation, in the format of `bench.report`.
    """
    form, temperature, dtype = job["form"], job["temperature"], DTYPES[job["dtype"]]
    rows = []
    for kind in KINDS:
        made = [
            make(form, job["n"], job["d"], kind, seed=1 + seed, device=job["device"]).to(dtype)
            for seed in range(job["batches"])
        ]
        batches = [(batch, truth.loss_and_gradient(batch, temperature)) for batch in made]
        smallest = min(expected[0] for _, expected in batches)
        for name in job["names"]:
            row: dict[str, Any] = {"kind": kind, "implementation": name, "smallest_loss": smallest}
            rows.append(row)
            with recorded(row):
                implementation = load(name, job["backend"])
                found = [
                    truth.errors(*evaluate(implementation.step(batch, temperature), batch.leaves(dtype)), expected)
                    for batch, expected in batches
                ]
                row |= {f"{part}_error": float(np.median([errors[part] for errors in found])) for part in found[0]}
    return rows
