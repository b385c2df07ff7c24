"""The machine and the package versions of a measurement."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from pairproof import __version__
from pairproof.fast import warm_up

PEERS = ("pytorch-metric-learning", "info-nce-pytorch", "bioencoder", "lightly", "inf-cl")


def field(path: str, start: str = "") -> str | None:
    """Return what follows ``start`` and a colon on the first line that begins with ``start``, or None."""
    with suppress(OSError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(start):
                return line.removeprefix(start).strip(" \t:")
    return None


def field_bytes(path: str, start: str) -> int | None:
    """Return a field that the Linux kernel reports in kB, in bytes, or None."""
    found = field(path, start)
    return 1024 * int(found.split()[0]) if found else None


def machine() -> dict[str, Any]:
    """Return the CPU, memory, operating system and load. Values that cannot be read are None."""
    return {
        "cpu": field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "memory": field("/proc/meminfo", "MemTotal"),
        "governor": field("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "system": f"{platform.system()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "load_before": list(os.getloadavg()),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python, pairproof and the installed packages, and why Numba is not used if it is not."""
    found = {"python": platform.python_version(), "pairproof": __version__}
    for package in ("torch", "numpy", "triton", *PEERS):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    refusal = warm_up()
    return found | {"numba": f"not used ({refusal})" if refusal else metadata.version("numba")}
