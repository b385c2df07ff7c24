"""Count the files and functions of `pairproof.fast` that are called in a forward pass with autograd.

    python tools/trace_calls.py

It does so for labels with many rows per class and for labels with two rows per class, and prints one line per
function, in the order of the first calls, with the number of calls.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import torch

from pairproof import fast

ROWS, COLUMNS, CLASSES = 256, 128, 16


def count_calls(labels: torch.Tensor) -> Counter[tuple[str, str]]:
    """Call `supcon_loss` on random embeddings, and return how often it calls each function of the package.

    Args:
        labels: int64 ``[N]``.

    Returns:
        The number of calls, by the file and the qualified name of the function.
    """
    package = Path(fast.__file__).parent
    embeddings = torch.randn(len(labels), COLUMNS, requires_grad=True)
    found: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(package):
            found[str(path.relative_to(package)), frame.f_code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        fast.supcon_loss(embeddings, labels)
    finally:
        sys.setprofile(before)
    return found


def main() -> None:
    """Print the counts for labels with several classes, and for labels with two rows per class."""
    for name, labels in (("classes", torch.arange(ROWS) % CLASSES), ("pairs", torch.arange(ROWS) // 2)):
        found = count_calls(labels)
        print(f"{name}: {len({path for path, _ in found})} files, {len(found)} functions, {found.total()} calls")
        for (path, function), count in found.items():
            print(f"    {path} {function} {count}")


if __name__ == "__main__":
    main()
