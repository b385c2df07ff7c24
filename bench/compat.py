"""Compare the times of pytorch-metric-learning's losses and of our replacements: ``python -m bench.compat``.

A step is forward and backward, on one thread. Samples of the two classes alternate, and the ratio is the median over
pairs of neighbouring samples. Each comparison runs in its own process, with limited memory.
"""

from __future__ import annotations

import argparse
import importlib
import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .alternate import LEAST, alternated
from .measure import Clock

COLUMNS, CLASSES = 128, 10
SIZES = (64, 256, 1024)
GIBIBYTES = 8
"""Maximum address space of a process."""

PML = "pytorch_metric_learning"


def pml(name: str, **options: Any) -> Callable[[str], Callable[[Tensor, Tensor], Tensor]]:
    """Return a function that creates the loss ``name`` of a given module."""

    def made(module: str) -> Callable[[Tensor, Tensor], Tensor]:
        distances = importlib.import_module(f"{PML}.distances")
        given = {key: getattr(distances, value)() if key == "distance" else value for key, value in options.items()}
        loss: Callable[[Tensor, Tensor], Tensor] = getattr(importlib.import_module(module), name)(**given)
        return loss

    return made


LOSSES = {
    "SupConLoss": pml("SupConLoss"),
    "NTXentLoss": pml("NTXentLoss"),
    "SupConLoss, Euclidean": pml("SupConLoss", distance="LpDistance"),
    "NTXentLoss, Euclidean": pml("NTXentLoss", distance="LpDistance"),
    "SupConLoss, signal to noise": pml("SupConLoss", distance="SNRDistance"),
}
MODULES = {"theirs": f"{PML}.losses", "ours": f"pairproof.compat.{PML}"}
CLASSES_OF = {"two views": 0, "10 classes": CLASSES}


def batch(size: int, form: str) -> tuple[Tensor, Tensor]:
    """Return rows and labels: two views of ``size / 2`` items, or 10 classes."""
    generator = torch.Generator().manual_seed(size)
    rows = torch.randn(size, COLUMNS, generator=generator).requires_grad_()
    classes = CLASSES_OF[form]
    if not classes:
        return rows, torch.arange(size // 2).repeat(2)
    return rows, torch.randint(0, classes, (size,), generator=generator)


def measured(name: str, form: str, size: int) -> dict[str, Any]:
    """Compare both classes on one batch; return the median times in milliseconds, and the ratio theirs / ours.

    If the original does not fit into memory, the result has only our time.
    """
    torch.set_num_threads(1)
    limit = GIBIBYTES * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    rows, labels = batch(size, form)
    losses = {side: LOSSES[name](module) for side, module in MODULES.items()}

    def step(side: str) -> float:
        rows.grad = None
        value = losses[side](rows, labels)
        value.backward()  # type: ignore[no-untyped-call]
        return value.item()

    value = step("ours")
    found: dict[str, Any] = {"loss": name, "form": form, "size": size, "by": losses["ours"].evaluated_by}  # type: ignore[attr-defined]
    try:
        theirs = step("theirs")
    except RuntimeError as error:
        line = str(error).splitlines()[0]
        if "alloc" not in line:
            raise
        return {**found, "ours": 1e3 * statistics.median(Clock().call(partial(step, "ours"), 1) for _ in range(LEAST))}
    if not abs(value - theirs) <= 1e-4 * abs(theirs):
        raise ValueError(f"{name}, {form}, {size}: the values differ: {value}, {theirs}")
    return {**found, **alternated({side: partial(step, side) for side in losses})}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line of Markdown for each comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", help="run one comparison, given as JSON [loss, positives, rows]; print JSON")
    parser.add_argument("--losses", nargs="*", default=[*LOSSES], choices=[*LOSSES])
    parser.add_argument("--sizes", nargs="*", type=int, default=[*SIZES])
    given = parser.parse_args(arguments)
    if given.one:
        print(json.dumps(measured(*json.loads(given.one))))  # noqa: T201
        return
    print("| loss | positives | rows | evaluated by | original, ms | ours, ms | times as fast |")  # noqa: T201
    print("|---|---|---|---|---|---|---|")  # noqa: T201
    for name in given.losses:
        for form in CLASSES_OF:
            for size in given.sizes:
                command = [sys.executable, "-m", "bench.compat", "--one", json.dumps([name, form, size])]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                row = json.loads(done.stdout)
                theirs = f"{row['theirs']:.2f}" if "theirs" in row else f"more than {GIBIBYTES} GiB"
                ratio = f"{row['ratio']:.2f}" if "ratio" in row else ""
                cells = f"{row['by']} | {theirs} | {row['ours']:.2f} | {ratio}"
                print(f"| {name} | {form} | {size} | {cells} |", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
