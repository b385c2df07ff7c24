"""Memory: the peak of one training step in its own process."""

from __future__ import annotations

import time
from typing import Any

import torch

from . import truth
from .batches import DTYPES, make_batch
from .measure import Clock, evaluate, recorded
from .peers import load, ours


def step_memory(job: dict[str, Any], clock: Clock) -> list[dict[str, Any]]:
    """One job of kind "memory": peak of forward and backward beyond the interpreter, its libraries and the inputs.

    Args:
        job: implementation, loss, n, d, temperature, backend, dtype, device; of ours also anchors, if the values of so
            many are compared with float64.
        clock: of the device.

    Returns:
        One row in the format that `bench.report` describes.
    """
    loss, n, temperature = str(job["loss"]), int(job["n"]), float(job["temperature"])
    row: dict[str, Any] = {"implementation": job["implementation"]}
    with recorded(row):
        implementation = load(job["implementation"], job["backend"])
        implementation.check_memory(loss, n, DTYPES[job["dtype"]], None)
        # A small step first: it loads code and lets the libraries make their own buffers, which are not the loss's.
        small, batch = (
            make_batch(loss, rows, int(job["d"]), device=job["device"]).to(DTYPES[job["dtype"]]) for rows in (64, n)
        )
        evaluate(implementation.step(small, temperature), small.embeddings)
        step, embeddings = implementation.step(batch, temperature), batch.embeddings.requires_grad_()
        started = time.process_time()
        row["bytes"] = clock.peak(step, embeddings)
        if not clock.on_device:
            row["once_ms"] = 1e3 * (time.process_time() - started)
        if "anchors" in job:
            with torch.no_grad():
                values = ours(job["backend"], batch, temperature, reduction="none")(batch.embeddings)
            rows = torch.arange(0, n, max(1, n // job["anchors"]))
            true = truth.anchor_values(batch, temperature, rows)
            row["worst_anchor_error"] = float(((values[rows].to(torch.float64) - true).abs() / true).max())
            row["anchors_compared"] = len(rows)
    return [row]
