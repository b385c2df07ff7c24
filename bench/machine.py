"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from pairproof import __version__

PACKAGES = (
    "torch",
    "numpy",
    "pytorch-metric-learning",
    "info-nce-pytorch",
    "bioencoder",
    "lightly",
    "triton",
    "inf-cl",
)


def _first(path: Path, start: str) -> str | None:
    """What follows the colon on the first line that starts so."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(start)), None)


def _governor() -> str | None:
    try:
        return Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").read_text().strip()
    except OSError:
        return None


def machine() -> dict[str, Any]:
    """The CPU, its cores, memory, frequency governor (None where it cannot be read) and load."""
    return {
        "cpu": _first(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "memory": _first(Path("/proc/meminfo"), "MemTotal"),
        "governor": _governor(),
        "system": f"{platform.system()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "load_before": list(os.getloadavg()),
    }


def versions() -> dict[str, str]:
    """Of Python, ours and the packages that are installed. The original code is loaded from a file: see its rows."""
    found = {"python": platform.python_version(), "pairproof": __version__}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
