"""The machine and the versions with which the figures were measured."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from pairproof import __version__

PEERS = ("pytorch-metric-learning", "info-nce-pytorch", "bioencoder", "lightly", "inf-cl")


def field(path: str, start: str = "") -> str | None:
    """Return the rest of the first line of a file that begins with a text, without a colon; None if there is none."""
    with suppress(OSError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(start):
                return line.removeprefix(start).strip(" \t:")
    return None


def field_bytes(path: str, start: str) -> int | None:
    """Return a field that the kernel gives in kB, in bytes."""
    found = field(path, start)
    return 1024 * int(found.split()[0]) if found else None


def machine() -> dict[str, Any]:
    """Return the CPU, its cores, memory, frequency governor (None if it cannot be read) and load."""
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
    """Return the versions of Python, pairproof and the installed packages; that of the SupCon code is in its rows."""
    found = {"python": platform.python_version(), "pairproof": __version__}
    for package in ("torch", "numpy", "triton", *PEERS):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
