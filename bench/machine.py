"""What the figures were measured on."""

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


def _read(path: str, start: str = "") -> str | None:
    """The rest of the first line of a file that begins so, without a colon; None if there is none."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.removeprefix(start).strip(" \t:") for line in lines if line.startswith(start)), None)


def machine() -> dict[str, Any]:
    """The CPU, its cores, memory, frequency governor (None where it cannot be read) and load."""
    return {
        "cpu": _read("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "memory": _read("/proc/meminfo", "MemTotal"),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "system": f"{platform.system()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "load_before": list(os.getloadavg()),
    }


def versions() -> dict[str, str]:
    """Of Python, ours and the packages that are installed. The original code is loaded from a file: see its rows."""
    found = {"python": platform.python_version(), "pairproof": __version__}
    for package in ("torch", "numpy", "triton", *PEERS):
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
