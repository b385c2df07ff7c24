"""Count the files and functions of `pairproof.fast` that are called in a forward pass with autograd.

    python tools/trace_calls.py

The labels have many rows per class, then two rows per class. Each line of output is a function with its number of
calls, in the order of the first calls.
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
    """Call `supcon_loss` on random embeddings, and count its calls of the package's functions.

    Args:
        labels: int64 ``[N]``.

    Returns:
        The number of calls by file and qualified name.
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
    """Print the counts for both kinds of labels."""
    for name, labels in (("classes", torch.arange(ROWS) % CLASSES), ("pairs", torch.arange(ROWS) // 2)):
        found = count_calls(labels)
        print(f"{name}: {len({path for path, _ in found})} files, {len(found)} functions, {found.total()} calls")
        for (path, function), count in found.items():
            print(f"    {path} {function} {count}")


if __name__ == "__main__":
    main()
