"""What rounding errors depend on: the processor, the BLAS and its code path, threads, flushed denormals."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import torch

CODE_PATHS = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_DEBUG_CPU_TYPE")
"""Environment variables that choose a code path of MKL."""


def machine() -> dict[str, str]:
    """Return what rounding errors depend on, by name. Threads and denormals are those of the calling thread."""
    return {
        "processor": _processor(),
        "blas": _blas(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "denormals": "kept" if float(torch.tensor(2.0**-1022, dtype=torch.float64) / 2) else "flushed",
    }


def described(found: dict[str, str]) -> str:
    """Return the result of ``machine`` in words."""
    threads = f"{found['threads']} thread{'s' * (found['threads'] != '1')}"
    return f"{found['processor']}, {found['capability']}, {threads}, denormals {found['denormals']}; {found['blas']}"


@cache
def _processor() -> str:
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if name := re.search(r"^model name\s*: (.*\S)", text, re.MULTILINE):
            return name[1]
    return platform.processor() or platform.machine()


@cache
def _blas() -> str:
    """Return the BLAS of torch and of numpy, each with its version and its code path, as far as they are known."""
    config = torch.__config__.show()
    (blas,) = re.findall(r"BLAS_INFO=(\w+)", config)[:1] or ["unknown"]
    version = re.search(r"Math Kernel Library Version ([\d.]+)", config) if blas == "mkl" else None
    chosen = [f"{name}={os.environ[name]}" for name in CODE_PATHS if name in os.environ]
    parts = filter(None, [f"BLAS of torch {blas}", version and version[1], _vendor() if version else "", *chosen])
    core = _core_of_openblas()
    return f"{' '.join(parts)}; of numpy {_blas_of_numpy()}{f' {core}' if core else ''}"


def _vendor() -> str:
    """Return whose processors MKL's code path is for."""
    # A preloaded library may answer in place of MKL.
    for library in (None, str(Path(torch.__path__[0], "lib", "libtorch_cpu.so"))):
        with suppress(OSError, AttributeError, TypeError):
            return "(path for Intel)" if ctypes.CDLL(library).mkl_serv_intel_cpu_true() else "(path for other vendors)"
    return ""


def _blas_of_numpy() -> str:
    found = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return f"{found.get('name', 'unknown')} {found.get('version', '')}".strip()


def _core_of_openblas() -> str:
    """Return the kind of processor for which the OpenBLAS of numpy computes."""
    for path in Path(np.__path__[0]).parent.glob("numpy.libs/libscipy_openblas*"):
        with suppress(OSError, AttributeError):
            core = ctypes.CDLL(str(path)).scipy_openblas_get_corename64_
            core.restype = ctypes.c_char_p
            return str(core().decode())
    return ""
