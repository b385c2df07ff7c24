"""Compile every kernel that can be queued, for devices that need not be here, and check what came out.

What can be queued is found by a dry run: every loss is called with every choice that matters, on tensors without
memory, and `pairproof.fast.kernels.launch` passes its kernels here instead of to a device. Triton says how it would
specialise each for its arguments; each distinct form is compiled, and what the compiler made is read, not run:

- it fits: shared memory (and on sm_100 tensor memory) within what a program can have, nothing spilled to the stack;
- products are made by tensor cores;
- the plain kernels with FIXED take one exponential per pair;
- no atomic operation meets device memory: sums would depend on the order of arrival.

Exit code: 0 all is well; 1 a check failed; 2 wrong usage; 3 triton or its cuobjdump is missing.
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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, get_args
from unittest import mock

import torch

from pairproof import fast
from pairproof.fast import kernels
from pairproof.fast.engine import Denominator, Similarity, device
from pairproof.fast.info_nce import Direction
from pairproof.fast.kernels.table import KINDS, PADDED, Kind

DIMS = (64, 128, 256, 512)
MORE_DIMS = (16, 32, 384, 768, 1024)
"""Lengths whose tiles are derived from others'; every other length is like one of these."""
SMALL_DIM = 128
"""At which the kernels without tiles are compiled: they walk along rows, whose length changes little."""
DTYPES = dict(zip(KINDS, (torch.float32, torch.float32, torch.bfloat16, torch.float16), strict=True))
"""By kind of rows, the dtype of embeddings."""
TENSOR_COLUMNS = 512


class Device(NamedTuple):
    """What a program may take, and how products look.

    Attributes:
        shared: bytes of shared memory, at most, of a program.
        products: the instruction of its tensor cores, in the machine's code and in PTX; older ones would run as well.
    """

    shared: int
    products: str


DEVICES = {
    80: Device(166912, r"HMMA|mma\.sync"),
    89: Device(101376, r"HMMA|mma\.sync"),
    90: Device(232448, r"HGMMA|wgmma\.mma_async"),
    100: Device(232448, r"UTCHMMA|tcgen05\.mma"),
}

Given = dict[str, Any]
"""What a kernel is queued with, by name."""


class Job(NamedTuple):
    """One compilation.

    Attributes:
        module: of the kernel.
        kernel: its name.
        arch: the architecture it is compiled for.
        arguments: the name of each, its type ("constexpr" for what is known), and its value or "D" where 16 divides it.
        options: ``num_warps`` and ``num_stages``, for kernels of tiles.
        kind: how rows are multiplied.
        dim: padded length of a row.
        machine: the machine's own code is read; otherwise the compiler's last step before it, which takes less time.
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
        """What is known when the kernel is compiled, by name."""
        return {name: value for name, kind, value in self.arguments if kind == "constexpr"}

    def __str__(self) -> str:
        given = (f"{name}={value}" for name, value in (*self.constants.items(), *self.options))
        return f"{self.kernel} {self.kind} D={self.dim} sm_{self.arch}, {' '.join(given)}"


def calls(dtype: torch.dtype, where: str = "meta", *, wide: bool = False) -> list[Callable[[], torch.Tensor]]:
    """List every loss with every choice that decides which kernels are queued; some of these calls are refused.

    Args:
        dtype: of the embeddings.
        where: the device of all tensors; "meta" has no memory.
        wide: whether masks with strides beyond 32 bits are among the choices; on "meta" alone.
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
        "temperature": (0.01, 0.1, torch.tensor(0.1).to(where).requires_grad_()),
        "similarity": get_args(Similarity),
        "denominator": get_args(Denominator),
        "direction": get_args(Direction),
    }
    found: list[Callable[[], torch.Tensor]] = []
    for loss in (getattr(fast, name) for name in fast.__all__ if name.endswith("_loss")):
        taken = [name for name in inspect.signature(loss).parameters if name in choices]
        for values in itertools.product(*(choices[name] for name in taken)):
            found.append(partial(loss, backend="triton", **dict(zip(taken, values, strict=True))))
    return found


@contextmanager
def dry_run(kind: Kind, dim: int, arch: int) -> Iterator[list[tuple[Any, Given]]]:
    """Within the context kernels are not queued, but listed with what they would be queued with.

    Args:
        kind: how rows are multiplied.
        dim: the length that rows are padded to, whatever it is.
        arch: the architecture of the device, whatever it is.
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
    """Return Triton's compiler for an architecture."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    return make_backend(GPUTarget("cuda", arch, 32))


@cache
def _specialise(kernel: Any, arch: int) -> Any:
    """Return the function that Triton applies to a kernel's arguments to choose its form."""
    from triton.runtime.jit import create_function_from_signature

    return create_function_from_signature(kernel.signature, kernel.params, _backend(arch))


def job_of(kernel: Any, given: Given, kind: Kind, dim: int, arch: int) -> Job:
    """Return the compilation that a kernel needs for some arguments."""
    options = {name: given[name] for name in ("num_warps", "num_stages") if name in given}
    _, forms, _ = _specialise(kernel, arch)(*(given[name] for name in kernel.arg_names), **options)
    arguments = tuple((name, *form) for name, form in zip(kernel.arg_names, forms, strict=True))
    return Job(kernel.fn.__module__, kernel.fn.__name__, arch, arguments, tuple(options.items()), kind, dim)


def jobs(
    archs: Iterable[int], dims: Sequence[int], kinds: Iterable[Kind], names: Collection[str] = (), *, long: bool = False
) -> list[Job]:
    """List what is to be compiled, once each.

    Which kernels a call queues, and with which flags, depends neither on the architecture nor on the length: calls that
    queue nothing new for the first of these are left out for the others.

    Args:
        archs: the architectures.
        dims: the padded lengths.
        kinds: how rows are multiplied.
        names: of kernels; all of them where none is named.
        long: whether masks with strides beyond 32 bits are compiled for as well, and whether the machine's code is read
            at every length.
    """
    found: dict[Any, Job] = {}
    untiled = SMALL_DIM if SMALL_DIM in dims else dims[0]
    for kind in kinds:
        chosen = calls(DTYPES[kind], wide=long)
        for dim, arch in itertools.product(sorted(dims, key=lambda dim: dim != untiled), archs):
            telling = []
            with dry_run(kind, dim, arch) as queued:
                for call in chosen:
                    before = len(found)
                    queued.clear()
                    with suppress(ValueError):
                        torch.autograd.backward(call().sum())
                    for kernel, given in queued:
                        if (not names or kernel.fn.__name__ in names) and (dim == untiled or "BN" in kernel.arg_names):
                            job = job_of(kernel, given, kind, dim, arch)
                            # Exponentials are counted in a loop, and only the machine's code has loops in one piece.
                            machine = long or dim == untiled or job.constants.get("FIXED") is True
                            found.setdefault(job[:5], job._replace(machine=machine))
                    telling += [call] if len(found) > before else []
            chosen = telling or chosen
    return list(found.values())


class Found(NamedTuple):
    """What the compiler made of a job.

    Attributes:
        registers: of a thread.
        stack: bytes of a thread.
        shared: bytes of a program.
        tensor: columns of tensor memory of a program.
        warps: of a program.
        instructions: how many stand in the code, by the names of `PATTERNS`.
        exponentials: in the shortest loop that holds products and exponentials; None where no loop holds both.
        error: why there is nothing to say of it, or "".
    """

    registers: int = 0
    stack: int = 0
    shared: int = 0
    tensor: int = 0
    warps: int = 0
    instructions: dict[str, int] = {}  # noqa: RUF012
    exponentials: int | None = None
    error: str = ""


PATTERNS = {
    "products": r"HMMA|HGMMA|UTCHMMA|mma\.sync|wgmma\.mma_async|tcgen05\.mma",
    "exponentials": r"MUFU\.EX2|ex2\.approx",
    "local": r"LDL|STL|(?:ld|st)\.local",
    # Shared memory's own counters apart, which hand out tensor memory.
    "atomics": r"ATOMG?|REDG?|ATOMS(?!\.(?:OR|AND)\b)|atom|red",
}
"""How instructions begin, in the machine's code (SASS) and in the step before it (PTX)."""


def instructions_of(code: str) -> list[tuple[int, str]]:
    """Return the address and the text, without its condition, of every instruction in what cuobjdump prints."""
    found = re.finditer(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\d+\s+)?([^;]*);", code)
    return [(int(one[1], 16), one[2].strip()) for one in found]


def steps_of(code: str) -> list[tuple[int, str]]:
    """Return the same of PTX, numbered."""
    found = re.finditer(r"^\s*(?:@!?%p\d+\s+)?([a-z][^;\n]*)", code, re.MULTILINE)
    return [(number, one[1].strip()) for number, one in enumerate(found)]


def count(instructions: Iterable[tuple[int, str]], pattern: str) -> int:
    """Count the instructions that begin with a pattern."""
    return sum(re.match(rf"(?:{pattern})\b", text) is not None for _, text in instructions)


def exponentials_of(instructions: Sequence[tuple[int, str]]) -> int | None:
    """Count the exponentials of the shortest loop with products and exponentials; None where there is none."""
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
    """List what is wrong with what came out, with the limit that it breaks; an empty list is as it should be."""
    if found.error:
        return [f"did not compile: {found.error}"]
    device, constants, counted = DEVICES[job.arch], job.constants, found.instructions
    product = device.products.partition("|")[0]
    limits = [
        (found.shared > device.shared, f"{found.shared} bytes of shared memory, at most {device.shared}"),
        (found.tensor > TENSOR_COLUMNS, f"{found.tensor} columns of tensor memory, at most {TENSOR_COLUMNS}"),
        (found.stack > 0, f"{found.stack} bytes of stack, at most 0: registers are spilled"),
        (counted["atomics"] > 0, f"{counted['atomics']} atomic instructions, at most 0"),
    ]
    if "BN" in constants:
        limits += [
            (counted["local"] > 0, f"{counted['local']} instructions on the stack (LDL, STL), at most 0"),
            (not counted["products"], f"no {product}, at least 1: products are not made by these tensor cores"),
        ]
    if constants.get("FIXED") and "BN" in constants and job.machine:
        each, taken = constants["BM"] * constants["BN"] // (32 * found.warps), found.exponentials
        limits.append((taken != each, f"{taken} exponentials of a thread per tile, expected {each}: one per pair"))
    return [line for broken, line in limits if broken]


def cuobjdump() -> Path | None:
    """Return the path of the disassembler that comes with triton, None where it is missing."""
    spec = importlib.util.find_spec("triton")
    path = Path(spec.origin or "").parent / "backends" / "nvidia" / "bin" / "cuobjdump" if spec else Path()
    return path if path.is_file() and os.access(path, os.X_OK) else None


def examine(job: Job) -> Found:
    """Compile a job and read what came out."""
    import triton
    from triton.compiler import ASTSource

    backend = _backend(job.arch)
    kernel = getattr(importlib.import_module(job.module), job.kernel)
    types = {name: kind for name, kind, _ in job.arguments}
    known = {(place,): backend.parse_attr(value) for place, (_, _, value) in enumerate(job.arguments) if value == "D"}
    source = ASTSource(kernel, types, constexprs=job.constants, attrs=known)
    try:
        compiled = triton.compile(source, target=backend.target, options=dict(job.options))
    except Exception as reason:  # whatever the compiler raises is what is to be told
        return Found(error=" ".join(f"{type(reason).__name__}: {reason}".split())[-400:])
    disassembled = "BN" in types and job.machine
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        wanted = ["--dump-resource-usage", *(["--dump-sass"] if disassembled else []), file.name]
        shown = subprocess.run([str(cuobjdump()), *wanted], capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", shown)
    if usage is None:
        return Found(error="cuobjdump names no registers")
    code = instructions_of(shown) if disassembled else steps_of(compiled.asm["ptx"])
    metadata, patterns = compiled.metadata, {**PATTERNS, "products": DEVICES[job.arch].products}
    counted = {name: count(code, pattern) for name, pattern in patterns.items()}
    registers, stack, tensor = int(usage[1]), int(usage[2]), getattr(metadata, "tmem_size", None) or 0
    return Found(registers, stack, metadata.shared, tensor, metadata.num_warps, counted, exponentials_of(code))


def compiled(work: Sequence[Job], processes: int) -> list[Found]:
    """Compile jobs in fresh processes, with an empty cache: nothing that was compiled before is trusted."""
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
    """Compile what the command line asks for and check it; return the exit code."""
    parser = argparse.ArgumentParser(description="Compile every kernel that can be queued and check what came out.")
    parser.add_argument("--arch", nargs="+", type=int, choices=DEVICES, help="default: 80 90 100")
    parser.add_argument("--dim", nargs="+", type=int, choices=PADDED, help="padded lengths; default: 64 128 256 512")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=KINDS, help="of rows; default: all")
    parser.add_argument("--kernel", nargs="+", default=[], help="names; default: all")
    parser.add_argument("--jobs", type=int, choices=range(1, 65), metavar="N", default=2, help="processes; default: 2")
    parser.add_argument("--long", action="store_true", help="every architecture, more lengths and types of arguments")
    parser.add_argument("--report", type=Path, help="write everything that was found here, as JSON")
    options = parser.parse_args(arguments)
    if cuobjdump() is None:
        print("triton, with its cuobjdump, is not installed: pip install triton (Linux only)", file=sys.stderr)
        return 3
    import triton

    archs = options.arch or (list(DEVICES) if options.long else [80, 90, 100])
    dims = options.dim or [*DIMS, *(MORE_DIMS if options.long else ())]
    work = jobs(archs, dims, options.kind, options.kernel, long=options.long)
    unknown = set(options.kernel) - {job.kernel for job in work}
    if unknown:
        parser.error(f"--kernel: expected names of kernels that losses queue, got {', '.join(sorted(unknown))}")
    title = f"triton {triton.__version__}, torch {torch.__version__}"
    print(f"{len(work)} compilations for {', '.join(f'sm_{arch}' for arch in archs)}, {title}", flush=True)
    results = [(job, one, failures(job, one)) for job, one in zip(work, compiled(work, options.jobs), strict=True)]
    if options.report is not None:
        records = [{**job._asdict(), **one._asdict(), "failures": wrong} for job, one, wrong in results]
        options.report.write_text(json.dumps({"versions": title, "compiled": records}, indent=1) + "\n")
    lines = [f"{job}: {line}" for job, _, wrong in results for line in wrong]
    print("\n".join(lines), file=sys.stderr, end="\n" * bool(lines))
    print(f"{len(work)} compilations:", f"{len(lines)} checks failed" if lines else "nothing spills, everything fits")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
