"""Compare losses of SupContrast and lightly with our replacements in time: ``python -m bench.compat_views``.

A step is forward and backward, on one thread. Samples of the two classes alternate, and the ratio is the median over
pairs of neighbouring samples. Each comparison runs in its own process. A batch has two views of ``rows / 2`` items.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pairproof.compat import lightly, supcontrast
from pairproof.conformance.implementations.lightly import Lightly, LightlyDecoupled
from pairproof.conformance.implementations.supcontrast import SupContrast

from .alternate import alternated

COLUMNS, CLASSES, BANK = 128, 10, 4096
SIZES = (64, 256, 1024)

LOSSES: dict[str, tuple[str, dict[str, Any], str]] = {
    "SupConLoss, SimCLR": ("SupConLoss", {}, "none"),
    "SupConLoss, 10 classes": ("SupConLoss", {}, "labels"),
    "SupConLoss, mask of 10 classes": ("SupConLoss", {}, "mask"),
    "SupConLoss, soft mask": ("SupConLoss", {}, "soft"),
    "SupConLoss, 10 classes, one": ("SupConLoss", {"contrast_mode": "one"}, "labels"),
    "SupConLoss, 10 classes, negative temperature": ("SupConLoss", {"temperature": -0.07}, "labels"),
    "NTXentLoss": ("NTXentLoss", {"temperature": 0.1}, "views"),
    "NTXentLoss, bank of 4096": ("NTXentLoss", {"temperature": 0.1, "memory_bank_size": (BANK, COLUMNS)}, "views"),
    "NTXentLoss, negative temperature": ("NTXentLoss", {"temperature": -0.1}, "views"),
    "DCLLoss": ("DCLLoss", {}, "views"),
    "DCLWLoss": ("DCLWLoss", {}, "views"),
    "DCLLoss, negative temperature": ("DCLLoss", {"temperature": -0.1}, "views"),
}
"""By name in the table: the class, its options and its inputs.

With "views", the loss gets the two views separately. Otherwise it gets features ``[B, 2, D]``, and labels or a mask as
named. "soft" is a mask of random weights.
"""


def original(name: str) -> Any:
    """Return the original class of the library."""
    if name == "SupConLoss":
        return SupContrast({}, "cpu").loss
    adapter: Any = Lightly if name == "NTXentLoss" else LightlyDecoupled
    return getattr(adapter({}, "cpu").module(), name)


def step_of(loss: Any, size: int, given: str) -> Callable[[], float]:
    """Return a function that runs forward and backward, and returns the loss."""
    generator = torch.Generator().manual_seed(size)
    features = F.normalize(torch.randn(size // 2, 2, COLUMNS, generator=generator), dim=2)
    labels = torch.randint(0, CLASSES, (size // 2,), generator=generator)
    mask = torch.rand(size // 2, size // 2, generator=generator) if given == "soft" else labels[:, None] == labels
    targets = {"labels": {"labels": labels}, "none": {}}.get(given, {"mask": mask})

    def step() -> float:
        rows = [features] if given != "views" else [features[:, 0], features[:, 1]]
        rows = [part.clone().requires_grad_() for part in rows]
        value: Tensor = loss(*rows) if given == "views" else loss(*rows, **targets)
        value.backward()  # type: ignore[no-untyped-call]
        return value.item()

    return step


def measured(name: str, size: int) -> dict[str, Any]:
    """Compare both classes on one batch; return the median times in milliseconds, and the ratio theirs / ours."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "To copy construct from a tensor", UserWarning)
    kind, options, given = LOSSES[name]
    replacement: Any = getattr(supcontrast if kind == "SupConLoss" else lightly, kind)
    losses, steps, values = {}, {}, {}
    for side, found in (("theirs", original(kind)), ("ours", replacement)):
        torch.manual_seed(0)  # both draw the same memory bank
        losses[side] = found(**options)
        steps[side] = step_of(losses[side], size, given)
        values[side] = steps[side]()
    if not abs(values["ours"] - values["theirs"]) <= 1e-4 * abs(values["theirs"]):
        raise ValueError(f"{name}, {size}: the values differ: {values}")
    return {**alternated(steps), "by": losses["ours"].evaluated_by}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line of Markdown for each comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", help="run one comparison, given as JSON [loss, rows]; print JSON")
    parser.add_argument("--losses", nargs="*", default=[*LOSSES], choices=[*LOSSES])
    parser.add_argument("--sizes", nargs="*", type=int, default=[*SIZES])
    given = parser.parse_args(arguments)
    if given.one:
        print(json.dumps(measured(*json.loads(given.one))))  # noqa: T201
        return
    print("| loss | rows | evaluated by | original, ms | ours, ms | times as fast |")  # noqa: T201
    print("|---|---|---|---|---|---|")  # noqa: T201
    for name in given.losses:
        for size in given.sizes:
            command = [sys.executable, "-m", "bench.compat_views", "--one", json.dumps([name, size])]
            row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            figures = f"{row['theirs']:.2f} | {row['ours']:.2f} | {row['ratio']:.2f}"
            print(f"| {name} | {size} | {row['by']} | {figures} |", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
