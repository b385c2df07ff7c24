"""Compile every kernel that can be queued, for devices that need not be here, and check what came out.

Each variant of each kernel is compiled as `pairproof.fast.kernels.launch` queues it: with the tile of the table, and
with arguments of the types that its calls have. What the compiler made is then read, not run:

- it fits: shared memory (and on sm_100 tensor memory) within what a program can have, nothing spilled to the stack;
- products are made by tensor cores;
- the plain kernels with FIXED take one exponential per pair;
- no atomic operation meets device memory: sums would depend on the order of arrival.

Exit code: 0 all is well; 1 a check failed; 2 wrong usage; 3 triton or its cuobjdump is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pairproof.fast.kernels.table import KERNELS, KINDS, Kernel, Kind, Launch, launch_of

DIMS = (64, 128, 256, 512)
MORE_DIMS = (16, 32, 384, 768, 1024)
"""Lengths whose tiles are derived from others'; every other length is like one of these."""
SMALL_DIM = 128
"""At which the kernels without tiles are compiled: they walk along rows, whose length changes little."""
REGISTERS = 65536
TENSOR_COLUMNS = 512
WARPS = 64
RESERVED = 1024
"""Bytes of shared memory that the system keeps for each program."""


class Device(NamedTuple):
    """What a program may take, and how products look.

    Attributes:
        shared: bytes of shared memory, at most, of a program.
        all_shared: bytes of shared memory of a multiprocessor.
        products: the instruction of its tensor cores, in the machine's code and in PTX; older ones would run as well.
    """

    shared: int
    all_shared: int
    products: str


DEVICES = {
    80: Device(166912, 167936, r"HMMA|mma\.sync"),
    89: Device(101376, 102400, r"HMMA|mma\.sync"),
    90: Device(232448, 233472, r"HGMMA|wgmma\.mma_async"),
    100: Device(232448, 233472, r"UTCHMMA|tcgen05\.mma"),
}
ARCHS = (80, 90, 100)


class Variant(NamedTuple):
    """One of the forms in which a kernel is queued.

    Attributes:
        kernel: its name.
        flags: what it is told at compile time beyond its tile and the kind of its rows.
    """

    kernel: str
    flags: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return " ".join([self.kernel, *(f"{name}={value}" for name, value in self.flags)])


FLAGS = {
    "sums_plain": ("FIXED",),
    "sums_marked": ("MARKS", "TERMS"),
    "positives": ("MARKS", "TERMS"),
    "gradient_plain": ("FIXED",),
    "gradient_marked": ("MARKS", "TERMS"),
    "prepare_labels": ("LABELS", "LEARNED", "ORDERED", "SELVES"),
    "prepare": ("COSINE", "ORDERED", "PIECES", "RAW"),
    "finish": ("COSINE", "LEARNED", "ORDERED", "REACH"),
    "combine": ("DENOMINATOR", "FIXED", "ORDERED", "SOME", "TERMS"),
    "combine_positives": ("ORDERED", "TERMS"),
    "coefficients": ("DENOMINATOR", "ORDERED", "TERMS"),
}
"""By kernel, what tells its variants apart."""
MODULES = {
    **dict.fromkeys(("sums_plain", "sums_marked"), "sums"),
    "positives": "positives",
    **dict.fromkeys(("gradient_plain", "gradient_marked"), "gradient"),
    **dict.fromkeys(("prepare_labels", "prepare", "finish"), "rows"),
    **dict.fromkeys(("combine", "combine_positives", "coefficients"), "anchors"),
}


def variant_of(kernel: str, flags: dict[str, Any]) -> Variant:
    """Return the variant that was queued.

    Args:
        kernel: its name, as `pairproof.fast.kernels.launch.observers` are told.
        flags: its compile-time arguments, likewise.
    """
    return Variant(kernel, tuple((name, flags[name]) for name in FLAGS[kernel]))


class _Case(NamedTuple):
    """A loss's rule and targets, as far as they decide which kernels are queued."""

    kind: str
    terms: str
    denominator: str
    references: bool
    chosen: bool


def _cases() -> list[_Case]:
    """List what the losses of `pairproof.fast` can ask for."""
    denominators, both = ("all", "one_positive", "only_negatives"), (False, True)
    found = [
        _Case(kind, terms, denominator, references, chosen)
        for kind, references, chosen in itertools.product(("labels", "mask"), both, both)
        for terms, denominator in itertools.product(("out", "in"), denominators)
    ]
    found += [_Case(kind, "epsilon", "all", False, chosen) for kind in ("labels", "mask") for chosen in both]
    found += [_Case("partners", "out", "all", *rest) for rest in itertools.product(both, both)]
    found += [_Case("pairs", "binary", "all", False, chosen) for chosen in both]
    return [*found, _Case("none", "lse", "all", True, False)]


def variants() -> list[Variant]:
    """List every form in which `pairproof.fast.kernels.launch` can queue each kernel, once."""
    found: dict[Variant, None] = {}

    def add(kernel: str, **flags: Any) -> None:
        found[variant_of(kernel, flags)] = None

    for case in _cases():
        softmax = case.terms in ("out", "in", "lse")
        marks = case.kind if case.kind in ("mask", "pairs") else "labels"
        own = case.denominator == "one_positive" and case.kind != "partners"
        denominator = "own" if own else "all" if case.denominator == "one_positive" else case.denominator
        plain = softmax and marks == "labels"
        ordered = case.kind == "labels"
        about = {"DENOMINATOR": denominator, "ORDERED": ordered, "SOME": case.chosen}
        for fixed in (False, True) if plain else (False,):
            if plain:
                add("sums_plain", FIXED=fixed)
                add("gradient_plain", FIXED=fixed)
            add("combine", FIXED=fixed, TERMS=case.terms, **about)
        add("sums_marked", MARKS=marks, TERMS="softmax" if softmax else case.terms)
        if own or case.terms == "epsilon":
            add("positives", MARKS=marks, TERMS="own" if own else "epsilon")
            add("combine_positives", TERMS=case.terms, ORDERED=ordered)
        add("coefficients", TERMS=case.terms, **about)
        add("gradient_marked", MARKS=marks, TERMS=("own" if own else "softmax") if softmax else case.terms)
        for labels, selves in _naming(case):
            for learned in (False, True):
                add("prepare_labels", LEARNED=learned, ORDERED=ordered, LABELS=labels, SELVES=selves)
        for cosine in (False, True):
            for raw, pieces in ((False, 3), (False, 1), (True, 1)):
                add("prepare", COSINE=cosine, ORDERED=ordered, RAW=raw, PIECES=pieces)
            for reach, learned in itertools.product((1.0, 4096.0), (False, True)):
                add("finish", COSINE=cosine, ORDERED=ordered, REACH=reach, LEARNED=learned)
    return sorted(found, key=lambda variant: list(MODULES).index(variant.kernel))


def _naming(case: _Case) -> list[tuple[str, str]]:
    """List LABELS and SELVES of `prepare_labels` for the anchors, and for the references where there are any."""
    if not case.references:
        return [({"labels": "given", "partners": "paired"}.get(case.kind, "never"), "place")]
    of_anchors = "given" if case.kind in ("labels", "partners") else "never"
    of_references = ("given" if case.kind == "labels" else "place", "place")
    return [(of_anchors, "never"), (of_anchors, "given"), of_references]


class Job(NamedTuple):
    """One compilation.

    Attributes:
        variant: what is compiled.
        kind: how rows are multiplied.
        dim: padded length of a row.
        arch: the architecture it is compiled for.
        wide: the strides of a mask are beyond 32 bits, rather than those of a mask whose rows lie in one piece.
        floats: rows of a narrow dtype were given in float32.
        machine: the machine's own code is read; otherwise the compiler's last step before it, which takes less time.
    """

    variant: Variant
    kind: Kind
    dim: int
    arch: int
    wide: bool = False
    floats: bool = False
    machine: bool = True

    @property
    def launch(self) -> Launch | None:
        """The tile, for kernels that have one."""
        kernel = self.variant.kernel
        return launch_of(kernel, self.kind, self.dim, self.arch) if kernel in KERNELS else None

    def __str__(self) -> str:
        text = f"{self.variant} {self.kind} D={self.dim} sm_{self.arch}"
        if self.wide:
            text += " wide strides"
        if self.floats:
            text += " given in float32"
        if self.launch is None:
            return text
        rows, columns, part, out, warps, stages = self.launch
        return f"{text}, tile {rows}x{columns} part {part} out {out} warps {warps} stages {stages}"


def jobs(
    archs: Iterable[int], dims: Iterable[int], kinds: Iterable[Kind], kernels: Iterable[str], *, thorough: bool
) -> list[Job]:
    """List what is to be compiled.

    Args:
        archs: the architectures.
        dims: the padded lengths.
        kinds: how rows are multiplied.
        kernels: names of kernels.
        thorough: whether masks with strides beyond 32 bits, and narrow rows given in float32, are compiled as well; and
            whether the machine's code is read at every length.
    """
    archs, dims, kinds, kernels = list(archs), list(dims), list(kinds), set(kernels)
    found = []
    for variant, arch in itertools.product((v for v in variants() if v.kernel in kernels), archs):
        flags = dict(variant.flags)
        if variant.kernel not in KERNELS:
            met = _kinds_of(variant, kinds)
            found += [Job(variant, kind, SMALL_DIM, arch) for kind in (met if thorough else met[:1])]
            if thorough and variant.kernel in ("prepare", "finish"):
                narrow = [kind for kind in met if kind in ("bfloat16", "float16")]
                found += [Job(variant, kind, SMALL_DIM, arch, floats=True) for kind in narrow]
            continue
        for kind, dim in itertools.product(kinds, dims):
            typical = thorough or dim == SMALL_DIM or len(dims) == 1
            # Loops stand together in the machine's code alone, and exponentials are counted in a loop.
            found.append(Job(variant, kind, dim, arch, machine=typical or bool(flags.get("FIXED"))))
            if thorough and flags.get("MARKS") == "mask":
                found.append(Job(variant, kind, dim, arch, wide=True))
    return found


def _kinds_of(variant: Variant, kinds: Sequence[Kind]) -> list[Kind]:
    """List the kinds of rows that a kernel without tiles meets in this form."""
    flags = dict(variant.flags)
    if "RAW" in flags:
        kinds = [kind for kind in kinds if _split_of(kind) == (flags["RAW"], flags["PIECES"])]
    if "REACH" in flags:
        kinds = [kind for kind in kinds if (kind == "float16") == (flags["REACH"] != 1.0)]
    return list(kinds)


def _split_of(kind: Kind) -> tuple[bool, int]:
    """Return RAW and PIECES."""
    return kind in ("bfloat16", "float16"), 3 if kind == "pieces" else 1


GIVEN: dict[Kind, str] = {"pieces": "*fp32", "tf32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}
"""By kind, the type of embeddings."""
ROWS: dict[Kind, str] = {**GIVEN, "pieces": "*bf16"}
"""By kind, the type of rows made ready."""
POINTERS = {
    "*fp32": (
        *("x_scale", "y_scale", "scale", "power", "constants", "sums", "stats", "shares", "pull", "values"),
        *("x_coef", "y_coef", "grad", "largest", "out", "along_out", "temperature"),
    ),
    "*i32": ("x_self", "y_self", "itself", "ends", "back_marks", "back_ends"),
    "*i64": (
        *("x_label", "y_label", "label", "labels", "x_bounds", "y_bounds", "bounds", "order"),
        *("positives", "negatives"),
    ),
}
TYPES = {name: kind for kind, names in POINTERS.items() for name in names}
NUMBERS = {
    **dict.fromkeys(("n", "m", "x_pad", "y_pad", "pad", "dim", "share", "first_part", "parts"), "i32"),
    **dict.fromkeys(("x_anchor", "y_anchor", "row_stride", "column_stride"), "i32"),
    **dict.fromkeys(("inside", "reciprocal", "reciprocal_in_log2"), "fp32"),
}
PADS = ("x_pad", "y_pad", "pad")
"""Numbers of rows, multiples of 128: the compiler is told that 16 divides them."""


def type_of(job: Job, argument: str) -> str:
    """Return the type that Triton gives an argument of a job's kernel; "constexpr" for a number known as 1."""
    flags = dict(job.variant.flags)
    kernel = job.variant.kernel
    if argument == "given" or (kernel == "finish" and argument == "out"):
        return "*fp32" if job.floats else GIVEN[job.kind]
    if argument in ("x", "y"):
        return ROWS[job.kind]
    if argument == "marks":
        return "*u8" if flags["MARKS"] == "mask" else "*i32"
    if argument == "anchors":
        return "*u8" if flags["SOME"] else "*i32"
    if argument == "selves":
        return "*i64" if flags["SELVES"] == "given" else "*i32"
    if argument in ("row_stride", "column_stride") and flags.get("MARKS") == "mask":
        if job.wide:
            return "i64"
        return "constexpr" if argument == "column_stride" else "i32"
    return TYPES.get(argument) or NUMBERS[argument]


def divisible(job: Job, argument: str) -> bool:
    """Whether Triton knows that 16 divides an argument: so it is with memory, with padded numbers, and with 0."""
    flags = dict(job.variant.flags)
    unused = argument in ("row_stride", "column_stride") and flags.get("MARKS") in ("labels", "pairs")
    return type_of(job, argument).startswith("*") or argument in PADS or unused


def constants_of(job: Job) -> dict[str, Any]:
    """Return what a kernel is told at compile time, and how it is launched: ``num_warps`` and ``num_stages``."""
    from pairproof.fast.kernels import launch as queue

    told = dict(job.variant.flags)
    tile = job.launch
    if tile is None:
        of_rows = {"DIM": job.dim, "WIDTH": min(job.dim, queue.NARROW), "BM": queue.FEW}
        sizes: dict[str, dict[str, Any]] = {
            "prepare": of_rows,
            "finish": {**of_rows, "WIDEN": False},
            "prepare_labels": {"BM": queue.PAD},
        }
        return {**told, **sizes.get(job.variant.kernel, {"BM": queue.LINES})}
    raw, pieces = _split_of(job.kind)
    told |= {"RAW": raw, "PIECES": pieces, "WIDEN": False, "DIM": job.dim}
    told |= {"BM": tile.rows, "BN": tile.columns, "BK": tile.part}
    if "MARKS" in told:
        passing: Kernel = "gradient_plain" if job.variant.kernel.startswith("gradient") else "sums_plain"
        plain = launch_of(passing, job.kind, job.dim, job.arch)
        told |= {"GROUP_ROWS": plain.rows, "GROUP": plain.columns}
    if job.variant.kernel.startswith("gradient"):
        told |= {"OUT": tile.out, "REACH": queue.REACH if job.kind == "float16" else 1.0}
    return {**told, "num_warps": tile.warps, "num_stages": tile.stages}


class Signature(NamedTuple):
    """A kernel's arguments as `triton.compile` takes them.

    Attributes:
        types: by name; "constexpr" for what is known at compile time.
        constants: by name.
        attributes: by the argument's place.
    """

    types: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int], list[list[Any]]]


def signature_of(job: Job, names: Sequence[str]) -> Signature:
    """Return the types of a kernel's arguments, whose names are given in order."""
    told = constants_of(job)
    constants = {name: told[name] for name in names if name in told}
    types, attributes = {}, {}
    for place, name in enumerate(names):
        types[name] = "constexpr" if name in constants else type_of(job, name)
        if types[name] == "constexpr":
            constants.setdefault(name, 1)
        elif divisible(job, name):
            attributes[(place,)] = [["tt.divisibility", 16]]
    return Signature(types, constants, attributes)


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
        programs: that a multiprocessor holds at a time.
        seconds: that compiling took.
        error: why there is nothing to say of it, or "".
    """

    registers: int = 0
    stack: int = 0
    shared: int = 0
    tensor: int = 0
    warps: int = 0
    instructions: dict[str, int] = {}  # noqa: RUF012
    exponentials: int | None = None
    programs: int = 0
    seconds: float = 0.0
    error: str = ""


PATTERNS = {
    "products": r"HMMA|HGMMA|UTCHMMA|mma\.sync|wgmma\.mma_async|tcgen05\.mma",
    "exponentials": r"MUFU\.EX2|ex2\.approx",
    "local": r"LDL|STL|(?:ld|st)\.local",
    # Shared memory's own counters apart, which hand out tensor memory.
    "atomics": r"ATOMG?|REDG?|ATOMS(?!\.(?:OR|AND)\b)|atom|red",
}
"""How instructions begin, in the machine's code (SASS) and in the step before it (PTX)."""
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\d+\s+)?([^;]*);")
_STEP = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][^;\n]*)", re.MULTILINE)


def instructions_of(code: str) -> list[tuple[int, str]]:
    """Return the address and the text, without its condition, of every instruction in what cuobjdump prints."""
    return [(int(found[1], 16), found[2].strip()) for found in _INSTRUCTION.finditer(code)]


def steps_of(code: str) -> list[tuple[int, str]]:
    """Return the same of PTX, numbered."""
    return [(number, step[1].strip()) for number, step in enumerate(_STEP.finditer(code))]


def count(instructions: Iterable[tuple[int, str]], name: str, how: str | None = None) -> int:
    """Count the instructions of one of `PATTERNS`, or of a narrower pattern."""
    pattern = re.compile(rf"(?:{how or PATTERNS[name]})\b")
    return sum(pattern.match(text) is not None for _, text in instructions)


def exponentials_of(instructions: Sequence[tuple[int, str]]) -> int | None:
    """Count the exponentials of the shortest loop with products and exponentials; None where there is none."""
    loops = []
    for address, text in instructions:
        target = re.search(r"0x([0-9a-f]+)\s*$", text) if text.startswith("BRA") else None
        if target is not None and int(target[1], 16) < address:
            body = [line for line in instructions if int(target[1], 16) <= line[0] <= address]
            exponentials = count(body, "exponentials")
            if exponentials and count(body, "products"):
                loops.append((len(body), exponentials))
    return min(loops)[1] if loops else None


def programs_of(found: Found, device: Device) -> int:
    """Return how many programs a multiprocessor holds, by registers, shared and tensor memory, and warps."""
    registers = -(-found.registers // 8) * 8 * 32 * found.warps
    limits = [REGISTERS // max(1, registers), device.all_shared // (found.shared + RESERVED), WARPS // found.warps]
    return min(limits + ([TENSOR_COLUMNS // found.tensor] if found.tensor else []))


def failures(job: Job, found: Found) -> list[str]:
    """List what is wrong with what came out, with the limit that it breaks; an empty list is as it should be."""
    if found.error:
        return [f"did not compile: {found.error}"]
    device = DEVICES[job.arch]
    wrong = []
    if found.shared > device.shared:
        wrong.append(f"{found.shared} bytes of shared memory, at most {device.shared}")
    if found.tensor > TENSOR_COLUMNS:
        wrong.append(f"{found.tensor} columns of tensor memory, at most {TENSOR_COLUMNS}")
    if found.stack:
        wrong.append(f"{found.stack} bytes of stack, at most 0: registers are spilled")
    if found.instructions["atomics"]:
        wrong.append(f"{found.instructions['atomics']} atomic instructions, at most 0")
    if job.launch is None:
        return wrong
    if found.instructions["local"]:
        wrong.append(f"{found.instructions['local']} instructions on the stack (LDL, STL), at most 0")
    if not found.instructions["products"]:
        name = device.products.partition("|")[0]
        wrong.append(f"no {name}, at least 1: products are not made by these tensor cores")
    if dict(job.variant.flags).get("FIXED") and job.machine:
        each = job.launch.rows * job.launch.columns // (32 * job.launch.warps)
        if found.exponentials != each:
            wrong.append(f"{found.exponentials} exponentials of a thread per tile, expected {each}: one per pair")
    return wrong


@cache
def cuobjdump() -> Path:
    """Return the path of the disassembler that comes with triton."""
    spec = importlib.util.find_spec("triton")
    origin = spec.origin if spec is not None and spec.origin is not None else ""
    return Path(origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def missing() -> str | None:
    """Return what is not here that compiling needs, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton (Linux only)"
    if not os.access(cuobjdump(), os.X_OK):
        return f"triton's cuobjdump is not at {cuobjdump()}"
    return None


def examine(job: Job) -> Found:
    """Compile a job and read what came out."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    began = time.perf_counter()
    module = importlib.import_module(f"pairproof.fast.kernels.{MODULES[job.variant.kernel]}")
    kernel = getattr(module, job.variant.kernel)
    types, constants, attributes = signature_of(job, kernel.arg_names)
    tile = job.launch
    options = {} if tile is None else {"num_warps": tile.warps, "num_stages": tile.stages}
    try:
        compiled = triton.compile(
            ASTSource(kernel, types, constexprs=constants, attrs=attributes),
            target=GPUTarget("cuda", job.arch, 32),
            options=options,
        )
    except Exception as reason:  # whatever the compiler raises is what is to be told
        return Found(error=" ".join(f"{type(reason).__name__}: {reason}".split())[-400:])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        disassembled = tile is not None and job.machine
        wanted = ["--dump-resource-usage", *(["--dump-sass"] if disassembled else [])]
        shown = subprocess.run([cuobjdump(), *wanted, file.name], capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", shown)
    if usage is None:
        return Found(error="cuobjdump names no registers")
    code = instructions_of(shown) if disassembled else steps_of(compiled.asm["ptx"])
    metadata = compiled.metadata
    found = Found(
        registers=int(usage[1]),
        stack=int(usage[2]),
        shared=metadata.shared,
        tensor=getattr(metadata, "tmem_size", None) or 0,
        warps=metadata.num_warps,
        instructions={
            **{name: count(code, name) for name in PATTERNS},
            "products": count(code, "products", DEVICES[job.arch].products),
        },
        exponentials=exponentials_of(code),
        seconds=time.perf_counter() - began,
    )
    return found._replace(programs=programs_of(found, DEVICES[job.arch]))


def compiled(work: Sequence[Job], processes: int, done: Callable[[int], None]) -> list[Found]:
    """Compile jobs in fresh processes, with an empty cache: nothing that was compiled before is trusted."""
    with tempfile.TemporaryDirectory() as cache_folder:
        before = os.environ.get("TRITON_CACHE_DIR")
        os.environ["TRITON_CACHE_DIR"] = cache_folder
        try:
            with ProcessPoolExecutor(max_workers=processes, mp_context=get_context("spawn")) as pool:
                found = []
                for one in pool.map(examine, work, chunksize=4):
                    found.append(one)
                    done(len(found))
                return found
        finally:
            if before is None:
                del os.environ["TRITON_CACHE_DIR"]
            else:
                os.environ["TRITON_CACHE_DIR"] = before


def versions() -> str:
    """Name the versions of what compiles."""
    import torch
    import triton

    return f"triton {triton.__version__}, torch {torch.__version__}"


def as_markdown(work: Sequence[Job], found: Sequence[Found], title: str) -> str:
    """Return a table of what was compiled, a line for each kernel, kind, length and architecture.

    Variants that share a tile share a line: it gives their registers and the most that any of them takes of the rest.
    """
    lines = [f"Compiled by {title}.", ""]
    lines += ["| sm | kernel | rows | D | tile | part / out | warps | stages | registers | shared | programs |"]
    lines += ["|---|---|---|---|---|---|---|---|---|---|---|"]
    groups: dict[tuple[int, str, Kind, int], list[tuple[Job, Found]]] = {}
    for job, one in zip(work, found, strict=True):
        groups.setdefault((job.arch, job.variant.kernel, job.kind, job.dim), []).append((job, one))
    for (arch, kernel, kind, dim), members in sorted(groups.items()):
        registers = sorted({one.registers for _, one in members})
        span = str(registers[0]) if len(registers) == 1 else f"{registers[0]}-{registers[-1]}"
        tile = members[0][0].launch
        cells = ["", "", "", ""]
        if tile is not None:
            cells = [f"{tile.rows}x{tile.columns}", f"{tile.part} / {tile.out}", str(tile.warps), str(tile.stages)]
        shared, programs = max(one.shared for _, one in members), min(one.programs for _, one in members)
        line = [str(arch), kernel, kind, str(dim), *cells, span, str(shared), str(programs)]
        lines.append(f"| {' | '.join(line)} |")
    return "\n".join(lines) + "\n"


def as_json(work: Sequence[Job], found: Sequence[Found], title: str) -> str:
    """Return everything that was found, a record for each compilation."""
    records = [
        {
            "kernel": job.variant.kernel,
            "flags": dict(job.variant.flags),
            **{name: getattr(job, name) for name in ("kind", "dim", "arch", "wide", "floats", "machine")},
            "launch": None if job.launch is None else job.launch._asdict(),
            **one._asdict(),
            "failures": failures(job, one),
        }
        for job, one in zip(work, found, strict=True)
    ]
    return json.dumps({"versions": title, "compiled": records}, indent=1) + "\n"


def _parser() -> argparse.ArgumentParser:
    def several(text: str) -> list[str]:
        return text.split(",")

    def whole(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description="Compile every kernel that can be queued and check what came out.")
    usual, known = (", ".join(map(str, archs)) for archs in (ARCHS, DEVICES))
    parser.add_argument("--arch", type=whole, help=f"a,b of {known}; default: {usual}")
    parser.add_argument("--dim", type=whole, help=f"a,b: padded lengths; default: {', '.join(map(str, DIMS))}")
    parser.add_argument("--kind", type=several, help=f"a,b of {', '.join(KINDS)}; default: all")
    parser.add_argument("--kernel", type=several, help=f"a,b of {', '.join(MODULES)}; default: all")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes; default: %(default)s")
    parser.add_argument("--long", action="store_true", help="every architecture, more lengths and types of arguments")
    parser.add_argument("--report", type=Path, help="write a table (.md) or everything (.json) here")
    return parser


def main(arguments: list[str]) -> int:
    """Compile what the command line asks for and check it; return the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    archs = options.arch or (list(DEVICES) if options.long else list(ARCHS))
    dims = options.dim or [*DIMS, *(MORE_DIMS if options.long else ())]
    kinds: list[Kind] = options.kind or list(KINDS)
    kernels = options.kernel or list(MODULES)
    asked: list[tuple[str, Sequence[Any], Sequence[Any]]] = [
        ("--arch", archs, list(DEVICES)),
        ("--kind", kinds, get_args(Kind)),
        ("--kernel", kernels, list(MODULES)),
        ("--dim", dims, [16, 32, 64, 128, 256, *range(384, 1025, 128)]),
    ]
    for name, given, known in asked:
        for one in given:
            if one not in known:
                parser.error(f"{name}: expected some of {', '.join(map(str, known))}, got {one}")
    if options.jobs < 1:
        parser.error(f"--jobs: expected at least 1, got {options.jobs}")
    if options.report is not None and options.report.suffix not in (".md", ".json"):
        parser.error(f"--report: expected a path that ends with .md or .json, got {options.report}")
    lacking = missing()
    if lacking is not None:
        print(lacking, file=sys.stderr)
        return 3
    work = jobs(archs, dims, kinds, kernels, thorough=options.long)
    if not work:
        parser.error("nothing to compile: no variant of these kernels has rows of these kinds")
    title = versions()
    print(f"{len(work)} compilations for {', '.join(f'sm_{arch}' for arch in archs)}, {title}", flush=True)
    began = time.perf_counter()

    def done(number: int) -> None:
        if number % max(1, len(work) // 10) == 0:
            print(f"  {number} of {len(work)}, {time.perf_counter() - began:.0f} s", flush=True)

    found = compiled(work, options.jobs, done)
    if options.report is not None:
        make = as_markdown if options.report.suffix == ".md" else as_json
        options.report.write_text(make(work, found, title))
        print(f"written: {options.report}")
    wrong = [f"{job}: {line}" for job, one in zip(work, found, strict=True) for line in failures(job, one)]
    for line in wrong:
        print(line, file=sys.stderr)
    verdict = f"{len(wrong)} checks failed" if wrong else "nothing spills, everything fits"
    print(f"{len(work)} compilations in {time.perf_counter() - began:.0f} s: {verdict}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
