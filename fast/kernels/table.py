"""The tile of each kernel, by architecture, by how rows are multiplied, and by their padded length.

Many tiles of sm_90 were timed on an H100 with torch 2.11 and Triton 3.6, each beside similar tiles. Those marked ``*``
spill registers in some variants, and were faster than the tiles without spills that were timed beside them.

The other tiles were compiled, not timed. For each line and kernel, ten to forty tiles were compiled in every variant of
the kernel. A tile was eligible if no variant spills registers, all variants fit in shared and tensor memory, and tensor
cores compute the products. The eligible tile with the shortest estimated time was chosen. The estimate counts

- products, at the rate reached in practice, which is lower for 16 or 32 columns because tensor cores are half idle;
- reads from the second-level cache: a program that keeps its rows on chip reads only columns, and with more rows it
  reads less per product;
- exponentials and other work per pair, repeated for each part if the gradient is computed in parts of the row length.

The longest of the three hides the others. It hides more of them with more programs per multiprocessor, because one
program's exponentials overlap another's products. Loads are hidden best with three stages, nearly as well with two.
Tiles close to the register limit were ranked below tiles with registers to spare. `tools/compile_kernels.py`
checks every line against these criteria with the installed compiler.

With ``PAIRPROOF_KERNEL_TABLE=PATH``, tiles from a file replace those of the table; `pairproof.fast.kernels.tune` times
tiles on a device and writes such a file. The file is read once. A file that is malformed, or that breaks a rule of
`violations`, is an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, cast, get_args

Kind = Literal["pieces", "tf32", "bfloat16", "float16"]
Kernel = Literal["sums_plain", "sums_marked", "positives", "gradient_plain", "gradient_marked"]

KERNELS: tuple[Kernel, ...] = get_args(Kernel)
KINDS: tuple[Kind, ...] = get_args(Kind)
PLAIN: Mapping[Kernel, Kernel] = {
    "sums_marked": "sums_plain",
    "positives": "sums_plain",
    "gradient_marked": "gradient_plain",
}
"""The plain kernel of each kernel that computes the tiles it skips. Its tiles are multiples of theirs."""
VARIABLE = "PAIRPROOF_KERNEL_TABLE"
FORMAT = 1
"""Version of the file format."""
PADDED: tuple[int, ...] = (16, 32, 64, 128, 256, *range(384, 1025, 128))
"""Lengths that rows are padded to: powers of two, then multiples of 128."""
LONGEST = PADDED[-1]
"""Largest number of columns of embeddings."""


class Launch(NamedTuple):
    """A tile, and how a program processes it.

    Attributes:
        rows: rows of one side, which a program keeps.
        columns: rows of the other side that a program processes at a time.
        part: row entries that are multiplied at a time; if this is the whole row length, the rows stay on chip.
        out: entries of the gradient that one program computes; unused by the forward kernels.
        warps: warps of 32 threads.
        stages: stages of the software pipeline.
    """

    rows: int
    columns: int
    part: int
    out: int
    warps: int
    stages: int


class Key(NamedTuple):
    """The key of a tile in the table; ``capability`` is the compute capability times ten."""

    kernel: Kernel
    kind: Kind
    dim: int
    capability: int


# Each line has an architecture, a kind, a row length, and a cell for each of KERNELS. Each cell is
# rows x columns / part / out / warps / stages, with * if the tile may spill registers.
_TABLE = """
80  pieces   64  64x64/64/64/4/3     64x32/64/64/8/1     64x32/64/64/8/1     128x32/64/64/8/3    64x32/32/64/8/1
80  pieces   128 128x64/32/32/8/3    64x32/64/64/8/1     64x32/64/64/8/1     64x32/128/64/4/3    32x32/64/128/8/1
80  pieces   256 128x64/32/32/8/3    32x32/32/32/8/1     64x32/32/32/8/1     128x32/32/64/8/3    32x32/32/256/8/1
80  pieces   384 128x64/32/32/8/3    32x32/32/32/8/1     64x32/32/32/8/1     128x32/32/64/8/3    64x32/32/128/8/1
80  pieces   512 128x64/32/32/8/3    32x32/32/32/8/1     64x32/32/32/8/1     128x32/32/64/8/3    64x32/32/256/8/1
80  pieces   768 128x64/32/32/8/3    32x32/32/32/8/1     64x32/32/32/8/1     128x32/32/64/8/3    64x32/32/256/8/1
80  tf32     64  128x64/64/64/4/2    64x32/64/64/8/1     64x64/64/64/8/1     64x64/64/64/4/3     64x64/64/64/8/1
80  tf32     128 128x64/128/128/8/3  64x32/128/128/8/1   64x32/128/128/8/1   128x32/128/128/8/3  64x32/128/128/8/1
80  tf32     256 128x32/256/256/8/2  32x32/256/256/8/1   64x32/256/256/8/1   128x32/32/128/8/3   64x32/128/256/8/1
80  tf32     384 128x128/64/64/8/2   64x32/64/64/8/1     64x64/64/64/8/1     128x32/32/128/8/3   64x32/128/128/8/1
80  tf32     512 128x128/32/32/8/3   64x32/256/256/8/1   64x64/64/64/8/1     128x32/32/128/8/3   64x32/64/256/8/1
80  tf32     768 128x128/64/64/8/3   64x32/128/128/8/1   64x64/64/64/8/1     128x32/32/128/8/3   64x32/64/256/8/1
80  bfloat16 64  128x64/64/64/4/3    64x64/64/64/8/1     64x64/64/64/8/1     64x64/64/64/4/3     64x32/64/64/8/1
80  bfloat16 128 128x64/128/128/4/2  64x32/128/128/8/1   64x64/64/64/4/1     128x32/128/128/8/3  32x32/128/128/4/1
80  bfloat16 256 128x64/256/256/8/3  64x32/256/256/8/1   64x32/256/256/8/1   128x32/32/128/8/3   64x32/64/256/8/1
80  bfloat16 384 128x128/64/64/8/2   64x32/128/128/8/1   64x64/64/64/8/1     128x32/32/128/8/3   64x32/128/128/8/1
80  bfloat16 512 128x128/64/64/8/2   64x32/64/64/8/1     64x64/64/64/8/1     128x32/32/128/8/3   64x32/64/256/8/1
80  bfloat16 768 128x128/64/64/8/2   64x32/64/64/8/1     64x64/64/64/8/1     128x32/32/128/8/3   64x32/64/256/8/1
89  pieces   64  64x64/64/64/4/2     64x32/64/64/8/1     64x64/32/32/8/1     64x64/64/64/4/2     64x32/64/64/8/1
89  pieces   128 128x64/32/32/8/3    64x32/128/128/4/1   64x32/128/128/4/1   128x32/32/128/8/3   64x32/128/128/4/1
89  pieces   256 128x64/32/32/8/3    32x64/128/128/8/1   64x32/32/32/8/1     128x32/32/128/8/2   64x32/128/256/8/1
89  pieces   384 128x64/32/32/8/3    64x32/32/32/8/1     32x32/32/32/8/1     128x32/32/128/8/2   64x32/32/128/8/1
89  pieces   512 128x64/32/32/8/3    64x32/32/32/8/1     64x32/32/32/8/1     64x32/32/128/4/3    64x32/32/256/8/1
89  pieces   768 128x64/32/32/8/3    32x32/32/32/8/1     64x32/32/32/8/1     64x32/32/128/4/3    64x32/32/256/8/1
89  tf32     64  128x64/64/64/8/2    64x32/64/64/8/1     64x64/64/64/8/1     64x64/64/64/4/3     64x64/64/64/8/1
89  tf32     128 128x32/128/128/8/3  64x32/128/128/8/1   64x32/128/128/8/1   128x32/128/128/8/3  64x32/128/128/8/1
89  tf32     256 128x128/64/64/8/2   32x32/256/256/8/1   64x32/256/256/8/1   64x64/32/128/4/3    64x32/128/256/8/1
89  tf32     384 128x128/64/64/8/2   64x32/128/128/8/1   64x64/64/64/8/1     64x64/32/128/4/3    64x64/64/128/8/1
89  tf32     512 128x128/64/64/8/2   64x32/256/256/8/1   64x64/64/64/8/1     64x64/32/128/4/3    64x32/128/256/8/1
89  tf32     768 128x128/64/64/8/2   64x32/256/256/8/1   64x64/64/64/8/1     64x64/32/128/4/3    64x32/128/256/8/1
89  bfloat16 64  128x64/64/64/8/3    64x64/64/64/8/1     64x64/64/64/8/1     64x64/64/64/4/3     64x32/64/64/8/1
89  bfloat16 128 128x64/128/128/8/2  64x32/128/128/8/1   64x32/128/128/4/1   64x64/128/128/4/3   64x32/128/128/8/1
89  bfloat16 256 128x64/256/256/8/2  64x32/256/256/8/1   64x32/256/256/8/1   64x64/32/128/4/3    64x32/128/256/8/1
89  bfloat16 384 128x128/64/64/8/2   64x64/64/64/8/1     64x64/64/64/8/1     64x64/32/128/4/3    64x64/64/128/8/1
89  bfloat16 512 128x128/64/64/8/2   64x64/64/64/8/1     64x64/64/64/8/1     64x64/32/128/4/3    64x32/256/256/8/1
89  bfloat16 768 128x128/64/64/8/2   64x64/64/64/8/1     64x64/64/64/8/1     64x64/32/128/4/3    64x32/256/256/8/1
90  pieces   64  128x64/64/64/8/2     64x64/64/64/8/1      64x64/64/64/8/1   128x64/64/64/8/3     64x32/64/64/8/1
90  pieces   128 128x64/128/128/8/2   64x64/128/128/4/2*   64x32/128/128/8/1 128x64/128/128/8/2   64x64/32/128/4/4*
90  pieces   256 128x128/32/32/8/3    128x128/64/64/8/2*   64x64/64/64/8/1   128x64/64/256/8/3*   64x64/32/256/4/3*
90  pieces   384 128x128/32/32/8/3    128x128/64/64/8/2*   64x64/64/64/8/1   128x128/32/128/8/3*  64x64/32/128/4/3*
90  pieces   512 128x128/32/32/8/3    128x128/64/64/8/2*   64x64/64/64/8/1   64x64/64/256/4/2*    64x64/32/256/4/3*
90  pieces   768 128x128/32/32/8/3    128x128/64/64/8/2*   64x64/64/64/8/1   128x64/64/256/8/3*   64x64/32/256/4/3*
90  tf32     64  128x64/64/64/8/2     64x64/64/64/8/1      64x64/64/64/4/1   64x64/64/64/4/3      64x64/64/64/8/1
90  tf32     128 128x128/32/32/4/3    64x32/128/128/8/1    64x32/128/128/4/1 128x64/128/128/8/3   64x32/128/128/8/1
90  tf32     256 128x128/32/32/8/3    64x32/256/256/8/1    64x32/256/256/8/1 128x32/256/256/8/1   64x16/256/256/8/1
90  tf32     384 128x128/32/32/8/2    64x64/64/64/8/1      64x64/64/64/8/1   128x64/32/128/8/2    64x32/64/128/8/1
90  tf32     512 128x128/32/32/8/4    64x16/512/512/8/1    64x32/512/512/8/1 64x64/64/512/8/3*    64x32/64/256/8/1
90  tf32     768 128x128/64/64/8/3    64x64/64/64/8/1      64x64/64/64/8/1   128x128/32/256/8/3*  64x32/64/256/8/1
90  bfloat16 64  64x128/64/64/4/3     64x64/64/64/8/1      64x64/64/64/4/1   128x64/64/64/4/3     64x64/64/64/8/1
90  bfloat16 128 128x64/128/128/8/2   64x32/128/128/8/2    64x16/128/128/4/1 64x64/128/128/4/3    64x16/128/128/8/2
90  bfloat16 256 128x128/64/64/8/3    64x32/256/256/8/1    64x32/256/256/4/1 128x64/256/256/8/3   64x32/256/256/8/1
90  bfloat16 384 128x128/64/64/4/3*   64x64/64/64/8/1      64x64/64/64/8/1   128x128/64/128/8/3*  64x64/64/128/8/1
90  bfloat16 512 128x128/64/64/8/3    128x64/512/512/16/1* 64x16/512/512/4/1 64x64/512/512/8/2*   64x64/512/512/16/1*
90  bfloat16 768 128x128/128/128/8/3  64x64/128/128/8/2*   64x64/64/64/8/1   128x128/64/256/8/3*  64x128/128/256/16/1*
100 pieces   64  128x64/64/64/8/3    128x16/64/64/8/1    128x64/64/64/8/1    64x64/64/64/4/3     64x32/64/64/8/1
100 pieces   128 128x32/128/128/8/3  128x16/128/128/8/1  128x16/128/128/8/1  64x32/128/64/4/3    64x16/128/128/8/1
100 pieces   256 64x64/256/256/4/1   64x64/64/64/8/1     64x32/64/64/8/1     64x32/64/128/4/1    64x16/64/256/8/1
100 pieces   384 128x64/32/32/8/1    64x16/64/64/8/1     128x64/64/64/8/1    64x32/64/128/4/1    64x32/64/128/8/1
100 pieces   512 128x64/32/32/8/1    64x64/64/64/8/1     128x64/64/64/8/1    64x32/64/128/4/1    64x16/64/256/8/1
100 pieces   768 128x64/32/32/8/1    64x16/64/64/8/1     128x64/64/64/8/1    64x32/64/128/4/1    64x16/64/256/8/1
100 tf32     64  128x32/64/64/8/3    128x16/64/64/8/1    128x32/64/64/8/1    128x32/64/64/8/3    128x16/64/64/8/1
100 tf32     128 128x32/128/128/8/3  128x16/128/128/8/1  64x32/128/128/4/1   128x64/128/128/8/3  64x32/128/128/8/1
100 tf32     256 128x32/256/256/8/3  128x16/256/256/8/1  128x16/256/256/8/1  128x32/256/256/8/3  64x32/32/256/8/1
100 tf32     384 128x128/32/32/8/3   64x32/64/64/8/1     128x64/64/64/8/1    128x64/64/128/8/3   64x32/128/128/8/1
100 tf32     512 128x128/32/32/8/3   64x32/64/64/8/1     128x64/64/64/8/1    128x64/32/256/8/3   64x32/32/256/8/1
100 tf32     768 128x128/32/32/8/3   64x32/64/64/8/1     128x64/64/64/8/1    128x64/32/256/8/3   64x32/32/256/8/1
100 bfloat16 64  128x64/64/64/4/3    64x32/64/64/8/1     64x16/64/64/8/1     128x32/64/64/8/3    128x16/64/64/8/1
100 bfloat16 128 128x32/128/128/8/3  64x32/128/128/8/1   128x32/128/128/8/1  128x32/128/128/8/3  128x16/128/128/8/1
100 bfloat16 256 128x32/256/256/8/2  64x32/128/128/8/1   128x32/256/256/8/1  128x64/256/256/8/3  64x16/256/256/8/1
100 bfloat16 384 128x64/64/64/8/3    64x64/64/64/8/1     128x64/64/64/8/1    128x64/64/128/8/3   64x32/128/128/8/1
100 bfloat16 512 128x32/512/512/8/3  128x16/512/512/8/1  64x32/128/128/8/1   128x32/512/256/8/2  64x32/32/256/8/1
100 bfloat16 768 128x128/128/128/8/3 64x64/64/64/8/1     128x64/64/64/8/1    128x64/32/128/8/3   64x32/32/256/8/1
"""


def architecture_of(capability: int) -> int:
    """Return the architecture whose tiles a device uses: its own, or one with at most its shared memory."""
    if capability in (80, 87):
        return 80
    if capability == 90:
        return 90
    return 100 if 100 <= capability < 120 else 89


def listed_dim(dim: int) -> int:
    """Return the row length in the table whose tiles are used for rows of padded length ``dim``."""
    if dim <= 256 or dim == 512:
        return max(64, dim)
    return 768 if dim % 256 == 0 else 384


@cache
def _cells() -> dict[Key, str]:
    found = {}
    for line in _TABLE.strip().splitlines():
        architecture, kind, dim, *cells = line.split()
        for kernel, cell in zip(KERNELS, cells, strict=True):
            found[Key(kernel, cast(Kind, kind), int(dim), int(architecture))] = cell
    return found


@cache
def committed() -> dict[Key, Launch]:
    """Return the table above as a dictionary."""
    return {key: Launch(*map(int, cell.rstrip("*").replace("x", "/").split("/"))) for key, cell in _cells().items()}


def _listed(kernel: Kernel, kind: Kind, dim: int, capability: int) -> Key:
    return Key(kernel, _near(kind), listed_dim(dim), architecture_of(capability))


def may_spill(kernel: Kernel, kind: Kind, dim: int, capability: int) -> bool:
    """Return whether a kernel's tile was timed and may spill registers; see `launch_of` for the arguments."""
    return _cells()[_listed(kernel, kind, dim, capability)].endswith("*")


def launch_of(kernel: Kernel, kind: Kind, dim: int, capability: int) -> Launch:
    """Return a kernel's tile.

    Args:
        kernel: the kernel's name.
        kind: how rows are multiplied; "float16" uses the tiles of "bfloat16" if it has no tile itself.
        dim: the padded length of a row.
        capability: the compute capability times ten.

    Raises:
        ValueError: the file named by ``PAIRPROOF_KERNEL_TABLE`` is not a valid table.
    """
    for near in (kind, _near(kind)):
        chosen = _in_place().get(Key(kernel, near, dim, capability))
        if chosen is not None:
            return chosen
    return _derived(kernel, kind, dim, capability)


def _near(kind: Kind) -> Kind:
    return "bfloat16" if kind == "float16" else kind


@cache
def _derived(kernel: Kernel, kind: Kind, dim: int, capability: int) -> Launch:
    launch = committed()[_listed(kernel, kind, dim, capability)]
    return launch._replace(part=min(launch.part, dim), out=min(launch.out, dim))


def violations(kernel: Kernel, launch: Launch, dim: int) -> list[str]:
    """Return the rules for single tiles that a tile breaks, one line each."""
    sides = (16, 32, 64, 128) if kernel in PLAIN else (32, 64, 128)
    parts = [size for size in (16, 32, 64, 128, 256, 512, 1024) if dim % size == 0]
    allowed = {
        "rows": sides,
        "columns": sides,
        "part": parts,
        "out": parts,
        "warps": (1, 2, 4, 8, 16),
        "stages": range(1, 9),
    }
    return [
        f"{name}: expected one of {', '.join(map(str, allowed[name]))}, got {number}"
        for name, number in launch._asdict().items()
        if number not in allowed[name]
    ]


def disagreements(kernel: Kernel, launch: Launch, plain: Launch) -> list[str]:
    """Return why a tile does not divide that of the kernel's plain kernel, one line each; empty if it does."""
    wrong = []
    for name in ("rows", "columns"):
        if getattr(plain, name) % getattr(launch, name):
            of = f"{getattr(plain, name)} of {PLAIN[kernel]}"
            wrong.append(f"{name}: expected a divisor of the {of}, got {getattr(launch, name)}")
    return wrong


@cache
def _in_place() -> dict[Key, Launch]:
    """Return the tiles that replace those of the table: the file's tiles, if a file is named."""
    path = os.environ.get(VARIABLE, "")
    return read(Path(path)) if path else {}


@contextmanager
def instead(tiles: Mapping[Key, Launch]) -> Iterator[None]:
    """Use these tiles within the context, with precedence over all others."""
    held = _in_place()
    before = dict(held)
    held.update(tiles)
    try:
        yield
    finally:
        held.clear()
        held.update(before)


def read(path: Path) -> dict[Key, Launch]:
    """Read a file of tiles.

    Args:
        path: a JSON file as written by `written`.

    Raises:
        ValueError: the file cannot be read or is malformed, or tiles break a rule; the message lists all broken rules.
    """

    def error(what: str) -> ValueError:
        return ValueError(f"{VARIABLE}: {path}: {what}")

    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as reason:
        raise error(f"cannot be read: {reason}") from reason
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise error(f'expected an object with "format": {FORMAT}')
    entries = content.get("tiles")
    if not isinstance(entries, list) or not entries:
        raise error('expected "tiles", a list of at least one tile')
    found: dict[Key, Launch] = {}
    for number, entry in enumerate(entries):
        try:
            key, launch = _parsed(entry)
        except ValueError as reason:
            raise error(f"tile {number}: {reason}") from reason
        if key in found:
            raise error(f"tile {number}: {_name(key)} already has a tile")
        found[key] = launch
    wrong = []
    for key, launch in found.items():
        wrong += [f"{_name(key)}: {line}" for line in violations(key.kernel, launch, key.dim)]
    if not wrong:
        for key in {key._replace(kernel=kernel) for key in found for kernel in PLAIN}:
            launch, plain = (found.get(k) or _derived(*k) for k in (key, key._replace(kernel=PLAIN[key.kernel])))
            wrong += [f"{_name(key)}: {line}" for line in disagreements(key.kernel, launch, plain)]
    if wrong:
        raise error("; ".join(sorted(wrong)))
    return found


def written(tiles: Mapping[Key, Launch], note: str) -> str:
    """Return the text of a file for `read`; ``note`` names the device on which the tiles were timed."""
    entries = [
        {**key._asdict(), **launch._asdict()} for key, launch in sorted(tiles.items(), key=lambda item: _name(item[0]))
    ]
    return json.dumps({"format": FORMAT, "note": note, "tiles": entries}, indent=2) + "\n"


def _name(key: Key) -> str:
    return f"{key.kernel} {key.kind} dim {key.dim} capability {key.capability}"


def _parsed(entry: object) -> tuple[Key, Launch]:
    names = (*Key._fields, *Launch._fields)
    if not isinstance(entry, dict) or set(entry) != set(names):
        raise ValueError(f"expected an object of {', '.join(names)}")
    for name in ("dim", "capability", *Launch._fields):
        if type(entry[name]) is not int:
            raise ValueError(f"{name}: expected an integer, got {entry[name]!r}")
    for name, known in (("kernel", KERNELS), ("kind", KINDS), ("dim", PADDED)):
        if entry[name] not in known:
            raise ValueError(f"{name}: expected one of {', '.join(map(str, known))}, got {entry[name]!r}")
    if entry["capability"] < 80:
        raise ValueError(f"capability: expected at least 80, got {entry['capability']}")
    return Key(*(entry[name] for name in Key._fields)), Launch(*(entry[name] for name in Launch._fields))
