"""Compile every variant of every GPU kernel, without a GPU, and check the compiled code.

In a dry run, every loss is called with every combination of the relevant arguments, and its kernels are recorded
instead of run. A variant is a kernel with the types and constants for which Triton specialises it. These checks are
made on the compiled code of each variant:

- Shared memory (on sm_100 also tensor memory) is within the limit.
- Matrix products use tensor cores, and logits are rounded (see `logits_of` in `pairproof.fast.kernels.tile`).
- A variant spills no registers, and with FIXED (see `pairproof.fast.kernels.tile`), the `*_plain` kernels compute one
  exponential per pair, except for the tiles marked in `pairproof.fast.kernels.table`.
- There are no atomic operations, whose result would depend on the order of the threads.

Exit code: 0 all checks passed; 1 a check failed; 2 wrong usage; 3 triton or its cuobjdump is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args
from unittest import mock
from zlib import crc32

import torch

from pairproof import fast
from pairproof.fast import kernels
from pairproof.fast.engine import Denominator, Similarity, device
from pairproof.fast.info_nce import Direction
from pairproof.fast.kernels.table import KINDS, PADDED, Kernel, Kind, may_spill
from pairproof.fast.ranking import Directions, Partition

DIMS = (64, 128, 256, 512)
MORE_DIMS = (16, 32, 384, 768, 1024)
"""Further embedding dimensions, for ``--long``. All others use the same tiles as a dimension in one of these lists."""
SMALL_DIM = 128
"""The embedding dimension of kernels without tiles, or else the first selected one. Their code depends little on it."""
DTYPES = dict(zip(KINDS, (torch.float32, torch.float32, torch.bfloat16, torch.float16), strict=True))
"""Dtype of the embeddings by kind of product."""
TENSOR_COLUMNS = 512
"""Columns of tensor memory on sm_100."""


class Device(NamedTuple):
    """Limits and instructions of a device.

    Attributes:
        shared: maximum shared memory of a program in bytes.
        products: pattern of its tensor-core instruction in SASS (machine code) and PTX (compiled to SASS). Older
            instructions, which would also run, do not match.
    """

    shared: int
    products: str


DEVICES = {
    80: Device(166912, r"HMMA|mma\.sync"),
    89: Device(101376, r"HMMA|mma\.sync"),
    90: Device(232448, r"HGMMA|wgmma\.mma_async"),
    100: Device(232448, r"UTCHMMA|tcgen05\.mma"),
}

SIZES = ("BM", "BN", "BK", "OUT", "GROUP", "GROUP_ROWS", "DIM", "WIDTH")
"""The sizes of tiles and rows, which depend on the architecture and the embedding dimension."""

Given = dict[str, Any]
"""The arguments of a launch, by name."""


class Job(NamedTuple):
    """One compilation of a kernel.

    Attributes:
        arguments: (name, type, value) of each argument. Constants have the type "constexpr", multiples of 16 the value
            "D".
        options: ``num_warps`` and ``num_stages``, for kernels with tiles.
        kind: how rows are multiplied.
        dim: padded embedding dimension.
        machine: whether to check SASS instead of PTX, which takes longer.
    """

    module: str
    kernel: str
    arch: int
    arguments: tuple[tuple[str, str, Any], ...]
    options: tuple[tuple[str, int], ...]
    kind: Kind
    dim: int
    machine: bool = True

    @property
    def constants(self) -> Given:
        """The compile-time constants, by name."""
        return {name: value for name, kind, value in self.arguments if kind == "constexpr"}

    @property
    def form(self) -> tuple[Any, ...]:
        """The kernel, and the types and constants of its arguments, without sizes of tiles and rows."""
        return self.kernel, *(one for one in self.arguments if one[1] != "constexpr" or one[0] not in SIZES)

    def __str__(self) -> str:
        given = (f"{name}={value}" for name, value in (*self.constants.items(), *self.options))
        return f"{self.kernel} {self.kind} D={self.dim} sm_{self.arch}, {' '.join(given)}"


def calls(dtype: torch.dtype, where: str = "cpu", *, wide: bool = False) -> list[partial[torch.Tensor]]:
    """Return calls of every loss with all combinations of the arguments that affect the kernels.

    Some calls are invalid.

    Args:
        dtype: dtype of the embeddings.
        where: device of all tensors. "meta" needs no memory, but is several times slower.
        wide: whether to include masks with strides beyond 32 bits, which need "meta".
    """
    z, y = (torch.randn(6, 5).to(where, dtype).requires_grad_() for _ in range(2))
    place = torch.arange(6)
    labels, partners, own, some = (t.to(where) for t in (place // 2, place ^ 1, place, place < 4))
    masks = [torch.eye(6, dtype=torch.bool).roll(1, 0).to(where)]
    if wide:
        masks.append(torch.empty_strided((6, 6), (2**40 + 1, 2**33 + 1), dtype=torch.bool, device=where))
    choices: dict[str, Sequence[Any]] = {
        **{"embeddings": (z,), "embeddings_a": (z,), "embeddings_b": (y,), "negatives": (None, y)},
        **{"labels": (None, labels), "positives": (None, *masks), "anchors": (None, some)},
        **{"partners": (partners,), "positive_pairs": (torch.stack((labels, partners), 1),)},
        **{"ref_embeddings": (None, y), "ref_labels": (None, labels), "self_rows": (None, own)},
        "ignored_ids": (None, place.to(where)),
        "temperature": (0.01, 0.1, torch.tensor(0.1).to(where).requires_grad_()),
        "bias": (-10.0, torch.tensor(-10.0).to(where).requires_grad_()),
        "similarity": get_args(Similarity),
        "denominator": get_args(Denominator),
        "direction": get_args(Direction),
        "hard_negatives": (None, torch.randn(6, 1, 5).to(where, dtype).requires_grad_()),
        "directions": get_args(Directions),
        "partition": get_args(Partition),
    }
    found: list[partial[torch.Tensor]] = []
    for loss in (getattr(fast, name) for name in fast.__all__ if name.endswith("_loss")):
        parameters = inspect.signature(loss).parameters
        # Partners are optional for two towers only.
        left_out = (None,) if "partners" in parameters and parameters["partners"].default is None else ()
        every = choices | {"partners": (*left_out, partners)}
        if loss is fast.nt_xent_pairwise_loss and where != "meta":
            every["reduction"] = ("mean", "none_pairs")
        taken = [name for name in parameters if name in every]
        for values in itertools.product(*(every[name] for name in taken)):
            given = dict(zip(taken, values, strict=True))
            if given.get("ignored_ids") is not None and given.get("ref_embeddings") is not None:
                given["ref_ignored_ids"] = given["ignored_ids"]
            found.append(partial(loss, backend="triton", **given))
    if where == "meta":  # the number of pairs depends on values, which meta tensors lack
        found += (call for call in calls(dtype) if call.keywords.get("reduction") == "none_pairs")
    return found


@contextmanager
def dry_run(kind: Kind, dim: int, arch: int) -> Iterator[list[tuple[Any, Given]]]:
    """Record kernels and their arguments within the context instead of launching them.

    Args:
        kind: how rows are multiplied.
        dim: padded embedding dimension.
        arch: architecture of the device.
    """
    found: list[tuple[Any, Given]] = []
    with (
        mock.patch("pairproof.fast.kernels.launch.run", lambda kernel, grid, given: found.append((kernel, given))),
        mock.patch("pairproof.fast.kernels.launch.padded_dim", return_value=dim),
        mock.patch("pairproof.fast.kernels.launch.capability_of", return_value=arch),
        mock.patch.object(kernels, "refusal", return_value=None),
        mock.patch.object(device, "tf32_allowed", return_value=kind == "tf32"),
    ):
        yield found


@cache
def _backend(arch: int) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    return make_backend(GPUTarget("cuda", arch, 32))


@cache
def _specialise(kernel: Any, arch: int) -> Any:
    """Return Triton's function that specialises a kernel for its arguments."""
    from triton.runtime.jit import create_function_from_signature

    return create_function_from_signature(kernel.signature, kernel.params, _backend(arch))


def job_of(kernel: Any, given: Given, kind: Kind, dim: int, arch: int) -> Job:
    """Return the job that compiles a kernel for some arguments."""
    options = {name: given[name] for name in ("num_warps", "num_stages") if name in given}
    _, forms, _ = _specialise(kernel, arch)(*(given[name] for name in kernel.arg_names), **options)
    arguments = tuple((name, *form) for name, form in zip(kernel.arg_names, forms, strict=True))
    return Job(kernel.fn.__module__, kernel.fn.__name__, arch, arguments, tuple(options.items()), kind, dim)


def jobs(
    archs: Iterable[int], dims: Sequence[int], kinds: Iterable[Kind], names: Collection[str] = (), *, long: bool = False
) -> list[Job]:
    """Return all distinct jobs.

    A call uses the same kernels and flags for every architecture and dimension. So calls that add no job for the first
    architecture and dimension are skipped for the others.

    Args:
        archs: the architectures.
        dims: the padded embedding dimensions.
        kinds: how rows are multiplied.
        names: names of kernels; empty for all.
        long: whether to include masks with strides beyond 32 bits, and to check the SASS at every dimension.
    """
    found: dict[Any, Job] = {}
    untiled = SMALL_DIM if SMALL_DIM in dims else dims[0]
    for kind in kinds:
        chosen = calls(DTYPES[kind], "meta" if long else "cpu", wide=long)
        for dim, arch in itertools.product(sorted(dims, key=lambda dim: dim != untiled), archs):
            effective = []
            with dry_run(kind, dim, arch) as queued:
                for call in chosen:
                    before = len(found)
                    queued.clear()
                    with suppress(ValueError):
                        torch.autograd.backward(call().sum())
                    for kernel, given in queued:
                        if (not names or kernel.fn.__name__ in names) and (dim == untiled or "BN" in kernel.arg_names):
                            job = job_of(kernel, given, kind, dim, arch)
                            # Exponentials are counted per loop. This needs SASS, where a loop is contiguous.
                            machine = long or dim == untiled or job.constants.get("FIXED") is True
                            found.setdefault(job[:5], job._replace(machine=machine))
                    effective += [call] if len(found) > before else []
            chosen = effective or chosen
    return list(found.values())


def covering(work: Iterable[Job]) -> list[Job]:
    """Select jobs that cover every variant, and for every kernel all pairs of architecture, kind and dimension.

    A pair is (architecture, kind), (architecture, dimension) or (kind, dimension). Jobs are visited in the order of a
    checksum, so that variants are spread over architectures.
    """
    spread, seen, kept = sorted(work, key=lambda job: crc32(str(job).encode())), set[Any](), []
    for new in (4, 3, 2, 1):
        for job in spread:
            pairs = itertools.combinations(((0, job.arch), (1, job.kind), (2, job.dim)), 2)
            traits = {job.form, *((job.kernel, *pair) for pair in pairs)} - seen
            if len(traits) >= new:
                seen |= traits
                kept.append(job)
    return kept


class Found(NamedTuple):
    """Properties of the compiled code of a job.

    Attributes:
        registers: per thread.
        stack: bytes per thread.
        shared: bytes of shared memory per program.
        tensor: columns of tensor memory per program.
        warps: per program.
        instructions: number of instructions by name in `PATTERNS`.
        exponentials: the result of `exponentials_of`.
        rounded: number of multiplications in PTX that the assembler must not fuse with an addition.
        error: why the job failed, or "".
    """

    registers: int = 0
    stack: int = 0
    shared: int = 0
    tensor: int = 0
    warps: int = 0
    instructions: dict[str, int] = {}  # noqa: RUF012
    exponentials: int | None = None
    rounded: int = 0
    error: str = ""


PATTERNS = {
    "products": r"HMMA|HGMMA|UTCHMMA|mma\.sync|wgmma\.mma_async|tcgen05\.mma",
    "exponentials": r"MUFU\.EX2|ex2\.approx",
    "local": r"LDL|STL|(?:ld|st)\.local",
    # Atomic counters in shared memory are allowed: they allocate tensor memory.
    "atomics": r"ATOMG?|REDG?|ATOMS(?!\.(?:OR|AND)\b)|atom|red",
}
"""How instructions begin in SASS and PTX."""


def instructions_of(code: str) -> list[tuple[int, str]]:
    """Return (address, text) of every instruction in the output of cuobjdump, without predicates."""
    found = re.finditer(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\d+\s+)?([^;]*);", code)
    return [(int(one[1], 16), one[2].strip()) for one in found]


def steps_of(code: str) -> list[tuple[int, str]]:
    """Return (number, text) of every instruction in PTX, without predicates."""
    found = re.finditer(r"^\s*(?:@!?%p\d+\s+)?([a-z][^;\n]*)", code, re.MULTILINE)
    return [(number, one[1].strip()) for number, one in enumerate(found)]


def count(instructions: Iterable[tuple[int, str]], pattern: str) -> int:
    """Count the instructions that begin with a pattern."""
    return sum(re.match(rf"(?:{pattern})\b", text) is not None for _, text in instructions)


def exponentials_of(instructions: Sequence[tuple[int, str]]) -> int | None:
    """Count the exponentials in the shortest loop with products and exponentials; None without such a loop."""
    loops = []
    for address, text in instructions:
        target = re.search(r"0x([0-9a-f]+)\s*$", text) if text.startswith("BRA") else None
        if target is not None and int(target[1], 16) < address:
            body = [line for line in instructions if int(target[1], 16) <= line[0] <= address]
            exponentials = count(body, PATTERNS["exponentials"])
            if exponentials and count(body, PATTERNS["products"]):
                loops.append((len(body), exponentials))
    return min(loops)[1] if loops else None


def failures(job: Job, found: Found) -> list[str]:
    """Return one line for each check that fails."""
    if found.error:
        return [f"did not compile: {found.error}"]
    device, constants, counted = DEVICES[job.arch], job.constants, found.instructions
    product = device.products.partition("|")[0]
    limits = [
        (found.shared > device.shared, f"{found.shared} bytes of shared memory, at most {device.shared}"),
        (found.tensor > TENSOR_COLUMNS, f"{found.tensor} columns of tensor memory, at most {TENSOR_COLUMNS}"),
        (counted["atomics"] > 0, f"{counted['atomics']} atomic instructions, at most 0"),
    ]
    tiled = "BN" in constants
    if tiled:
        limits.append((not counted["products"], f"no {product}: products do not use these tensor cores"))
        limits.append((not found.rounded, "no mul.rn: logits are not rounded"))
    if tiled and may_spill(cast(Kernel, job.kernel), job.kind, job.dim, job.arch):
        return [line for broken, line in limits if broken]  # the rest estimates the speed, which was measured
    limits.append((found.stack > 0, f"{found.stack} bytes of stack, at most 0: registers are spilled"))
    if tiled:
        limits.append((counted["local"] > 0, f"{counted['local']} instructions on the stack (LDL, STL), at most 0"))
    if constants.get("FIXED") and tiled and job.machine:
        each, taken = constants["BM"] * constants["BN"] // (32 * found.warps), found.exponentials
        limits.append((taken != each, f"{taken} exponentials per thread and tile, expected {each}: one per pair"))
    return [line for broken, line in limits if broken]


def cuobjdump() -> Path | None:
    """Return the path of the disassembler in the triton package, or None."""
    spec = importlib.util.find_spec("triton")
    path = Path(spec.origin or "").parent / "backends" / "nvidia" / "bin" / "cuobjdump" if spec else Path()
    return path if path.is_file() and os.access(path, os.X_OK) else None


def examine(job: Job) -> Found:
    """Compile a job and read the compiled code."""
    import triton
    from triton.compiler import ASTSource

    backend = _backend(job.arch)
    kernel = getattr(importlib.import_module(job.module), job.kernel)
    types = {name: kind for name, kind, _ in job.arguments}
    known = {(place,): backend.parse_attr(value) for place, (_, _, value) in enumerate(job.arguments) if value == "D"}
    source = ASTSource(kernel, types, constexprs=job.constants, attrs=known)
    try:
        compiled = triton.compile(source, target=backend.target, options=dict(job.options))
    except Exception as reason:  # report any exception of the compiler
        return Found(error=" ".join(f"{type(reason).__name__}: {reason}".split())[-400:])
    disassembled = "BN" in types and job.machine
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        wanted = ["--dump-resource-usage", *(["--dump-sass"] if disassembled else []), file.name]
        shown = subprocess.run([str(cuobjdump()), *wanted], capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", shown)
    if usage is None:
        return Found(error="cuobjdump prints no register usage")
    steps = steps_of(compiled.asm["ptx"])
    code = instructions_of(shown) if disassembled else steps
    metadata, patterns = compiled.metadata, {**PATTERNS, "products": DEVICES[job.arch].products}
    counted = {name: count(code, pattern) for name, pattern in patterns.items()}
    registers, stack, tensor = int(usage[1]), int(usage[2]), getattr(metadata, "tmem_size", None) or 0
    shared, warps, rounded = metadata.shared, metadata.num_warps, count(steps, r"mul\.rn\.(?:ftz\.)?f32")
    return Found(registers, stack, shared, tensor, warps, counted, exponentials_of(code), rounded)


def compiled(work: Sequence[Job], processes: int) -> list[Found]:
    """Compile jobs in fresh processes with an empty cache."""
    began, found = time.perf_counter(), []
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, TRITON_CACHE_DIR=folder),
        ProcessPoolExecutor(max_workers=processes, mp_context=get_context("spawn")) as pool,
    ):
        for one in pool.map(examine, work, chunksize=4):
            found.append(one)
            if len(found) % max(1, len(work) // 10) == 0:
                print(f"  {len(found)} of {len(work)}, {time.perf_counter() - began:.0f} s", flush=True)
    return found


def main(arguments: list[str]) -> int:
    """Compile and check the selected variants; return the exit code."""
    parser = argparse.ArgumentParser(description="Compile every variant of every GPU kernel and check the code.")
    parser.add_argument("--arch", nargs="+", type=int, choices=DEVICES, help="default: 80 90 100")
    parser.add_argument(
        "--dim", nargs="+", type=int, choices=PADDED, help="padded embedding dimensions; default: 64 128 256 512"
    )
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=KINDS, help="kinds of products; default: all")
    parser.add_argument("--kernel", nargs="+", default=[], help="names of kernels; default: all")
    parser.add_argument("--jobs", type=int, choices=range(1, 65), metavar="N", default=2, help="processes; default: 2")
    parser.add_argument(
        "--covering",
        action="store_true",
        help="every variant once, and for every kernel all pairs of architecture, kind and dimension",
    )
    parser.add_argument(
        "--long", action="store_true", help="every architecture, more embedding dimensions and argument types"
    )
    parser.add_argument("--report", type=Path, help="write all results to this file as JSON")
    options = parser.parse_args(arguments)
    if cuobjdump() is None:
        print("triton, with its cuobjdump, is not installed: pip install triton (Linux only)", file=sys.stderr)
        return 3
    import triton

    archs = options.arch or (list(DEVICES) if options.long else [80, 90, 100])
    dims = options.dim or [*DIMS, *(MORE_DIMS if options.long else ())]
    work = jobs(archs, dims, options.kind, options.kernel, long=options.long)
    every = len(work)
    work = covering(work) if options.covering else work
    unknown = set(options.kernel) - {job.kernel for job in work}
    if unknown:
        parser.error(f"--kernel: expected names of kernels that losses launch, got {', '.join(sorted(unknown))}")
    title = f"triton {triton.__version__}, torch {torch.__version__}"
    print(f"{len(work)} of {every} compilations for {', '.join(f'sm_{arch}' for arch in archs)}, {title}", flush=True)
    results = [(job, one, failures(job, one)) for job, one in zip(work, compiled(work, options.jobs), strict=True)]
    if options.report is not None:
        records = [{**job._asdict(), **one._asdict(), "failures": wrong} for job, one, wrong in results]
        options.report.write_text(json.dumps({"versions": title, "compiled": records}, indent=1) + "\n")
    lines = [f"{job}: {line}" for job, _, wrong in results for line in wrong]
    print("\n".join(lines), file=sys.stderr, end="\n" * bool(lines))
    print(f"{len(work)} compilations:", f"{len(lines)} checks failed" if lines else "all checks passed")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
