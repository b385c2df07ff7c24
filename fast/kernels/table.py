"""Which tile each kernel takes: by architecture, by how rows are multiplied, and by their padded length.

...
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["pieces", "tf32", "bfloat16", "float16"]
Kernel = Literal["sums_plain", "sums_marked", "positives", "gradient_plain", "gradient_marked"]


class Launch(NamedTuple):
    rows: int
    columns: int
    part: int
    out: int
    warps: int
    stages: int


def launch_of(kernel: Kernel, kind: Kind, dim: int, capability: int) -> Launch:
    return Launch(64, 64 if kernel.endswith("plain") else 16, min(dim, 128), min(dim, 128), 4, 1)
