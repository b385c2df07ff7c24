"""Run pairproof verify as on other machines, and compare the verdicts.

    .venv/bin/python tools/machines.py                        # make machines
    .venv/bin/python tools/machines.py --covering --only mkl-compatible --only one-thread

Environment variables select other code paths of MKL, ATen, OpenBLAS and glibc; a preloaded library lets MKL believe
that the processor is of the other vendor. The first run has no variation. The table has a row per variation: how many
checks ran and failed, the largest ratio of error to bound, how many errors differ in some digit from the first run, and
how many verdicts do. The exit code is 1 if a check fails or a verdict differs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

VENDOR = """
int mkl_serv_intel_cpu_true(void) { return %d; }
int mkl_serv_intel_cpu(void) { return %d; }
"""
"""A library that answers whether the processor is from Intel, for which MKL chooses its fastest code."""

BAD = ("failed", "errored")


@dataclass(frozen=True)
class Variation:
    """A way to run other code on the same processor.

    Attributes:
        name: name in the table.
        environment: environment variables.
        arguments: options of pairproof verify.
        tests: whether the tests are run as well.
    """

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    tests: bool = False


VARIATIONS = (
    Variation("as it is"),
    Variation("mkl-compatible", {"MKL_CBWR": "COMPATIBLE"}, tests=True),
    Variation("mkl-avx2", {"MKL_CBWR": "AVX2"}),
    Variation("aten-default", {"ATEN_CPU_CAPABILITY": "default"}),
    Variation("aten-avx2", {"ATEN_CPU_CAPABILITY": "avx2"}),
    Variation("openblas-prescott", {"OPENBLAS_CORETYPE": "Prescott"}),
    Variation("openblas-sandybridge", {"OPENBLAS_CORETYPE": "Sandybridge"}),
    Variation("openblas-haswell", {"OPENBLAS_CORETYPE": "Haswell"}),
    Variation("numba-generic", {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}),
    Variation("glibc-without-fma", {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-AVX2_Usable,-FMA,-FMA_Usable"}),
    Variation("one-thread", {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}, tests=True),
    Variation("two-threads", {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}),
    Variation("flush-denormal", {}, ("--flush-denormal",)),
    Variation("mkl-other-vendor"),
)
"""The variations; the first is what the others are compared with."""

DIFFER_MOST = ("mkl-compatible", "aten-default")
"""The variations that change most digits; CI runs these."""


def vendor_library(folder: Path) -> Path | None:
    """Compile the library that answers MKL's question for the vendor; None without a C compiler or MKL."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or platform.machine() not in ("x86_64", "AMD64") or sys.platform != "linux":
        return None
    answer = int("GenuineIntel" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    source, library = folder / "vendor.c", folder / "vendor.so"
    source.write_text(VENDOR % (answer, answer), encoding="utf-8")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library


def environment_of(variation: Variation, folder: Path) -> dict[str, str] | None:
    """Return the environment of a variation; None if it is not possible here."""
    more = dict(variation.environment)
    if variation.name == "mkl-other-vendor":
        library = vendor_library(folder)
        if library is None:
            return None
        more["LD_PRELOAD"] = " ".join(filter(None, (str(library), os.environ.get("LD_PRELOAD"))))
    return {**os.environ, **more}


def checks_of(variation: Variation, environment: Mapping[str, str], arguments: Sequence[str], folder: Path) -> Any:
    """Run pairproof verify, and return its checks by name.

    Raises:
        RuntimeError: it wrote no report.
    """
    report = folder / f"{variation.name}.json".replace(" ", "-")
    command = [sys.executable, "-m", "pairproof.conformance.cli", "verify", "--quiet", "--json", str(report)]
    done = subprocess.run(
        [*command, *arguments, *variation.arguments], env=environment, capture_output=True, text=True, check=False
    )
    if not report.is_file():
        raise RuntimeError(f"{variation.name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    checks = json.loads(report.read_text(encoding="utf-8"))["checks"]
    return {(one.get("implementation"), one["case"], one.get("dtype"), one.get("kind")): one for one in checks}


def tests_pass(environment: Mapping[str, str]) -> bool:
    """Run make test, and return whether it passes. Its output is printed if it does not."""
    done = subprocess.run(["make", "test"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout[-8000:], done.stderr[-2000:], sep="\n", flush=True)
    return not done.returncode


HEAD = ("variation", "checks", "failures", "largest ratio", "digits differ", "verdicts differ", "make test", "s")


def rows(chosen: Sequence[Variation], arguments: Sequence[str], tests: bool, folder: Path) -> Iterator[tuple[Any, ...]]:
    """Run the variations, and yield a row of the table for each."""
    first: dict[Any, Any] = {}
    for variation in chosen:
        began = time.perf_counter()
        environment = environment_of(variation, folder)
        if environment is None:
            yield variation.name, "not possible here: no C compiler, or not x86-64", *[""] * (len(HEAD) - 2)
            continue
        checks = checks_of(variation, environment, arguments, folder)
        first = first or checks
        failed = [key for key, one in checks.items() if one["status"] in BAD]
        for key in failed:
            print(f"{variation.name}: {key[0]}, {key[1]}, {key[2]}: {checks[key]['message']}", flush=True)
        ratios = [one["ratio"] for one in checks.values() if one["status"] == "passed" and one.get("ratio") is not None]
        common = checks.keys() & first.keys()
        digits = sum(checks[key].get("ratio") != first[key].get("ratio") for key in common)
        verdicts, present = 0, {name for name, *_ in checks}
        for key in checks.keys() | first.keys():
            found, before = (some[key]["status"] if key in some else "absent" for some in (checks, first))
            # Some deviations are declared only where subnormal numbers are flushed. Recorded results are absent there.
            declared = (before, found) == ("passed", "deviates") or key[0] not in present
            if found != before and not ("--flush-denormal" in variation.arguments and declared):
                verdicts += 1
                print(f"{variation.name}: {key}: {found}, not {before}", flush=True)
        passed = {True: "passed", False: "FAILED"}[tests_pass(environment)] if tests and variation.tests else ""
        seconds = round(time.perf_counter() - began)
        judged = sum(one["status"] != "skipped" for one in checks.values())
        yield variation.name, judged, len(failed), f"{max(ratios):.3f}", digits, verdicts, passed, seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the variations and print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [variation.name for variation in VARIATIONS[1:]]
    parser.add_argument("--only", action="append", choices=names, help="run only this variation; may be repeated")
    parser.add_argument("--differ-most", action="store_true", help=f"run only {' and '.join(DIFFER_MOST)}")
    parser.add_argument("--tests", action="store_true", help="also run make test where a variation asks for it")
    options, rest = parser.parse_known_args(arguments)  # the rest is for pairproof verify
    only = DIFFER_MOST if options.differ_most else options.only or names
    chosen = [VARIATIONS[0], *(variation for variation in VARIATIONS if variation.name in only)]
    with tempfile.TemporaryDirectory() as folder:
        table = [HEAD]
        for row in rows(chosen, rest, options.tests, Path(folder)):
            table.append(row)
            print(*row, sep=", ", flush=True)
    widths = [max(len(str(row[k])) for row in table if len(str(row[2]))) for k in range(len(HEAD))]
    for row in table:
        print(
            "  ".join(
                f"{cell!s:{'<' if k == 0 else '>'}{width}}"
                for k, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
        )
    wrong = [row for row in table[1:] if row[2] or row[5] or row[6] == "FAILED"]
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
